"""The line on a terminal that says how far compiling and tuning are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import config

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def line(console: Console | None = None) -> Progress:
    """A line of tasks, gone when they are done; none under `config.quiet` or without a terminal."""
    # Here, for a warm start shows nothing and rich takes long to import.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    console = console or Console(stderr=True)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=config.quiet or not console.is_terminal,
    )
