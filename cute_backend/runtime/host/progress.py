"""The progress line of compiling and tuning on a terminal."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def line(console: Console | None = None) -> Progress:
    """Shows a line while tasks run, and removes it when they are done. Shows nothing under `config.quiet` or
    without a terminal."""
    from cute_backend import config  # here, since it imports torch

    return _line(console, config.quiet)


def _line(console: Console | None, quiet: bool) -> Progress:
    # Here, since a warm start shows nothing and rich takes long to import.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.text import Text

    class CountColumn(MofNCompleteColumn):
        def render(self, task: Task) -> Text:
            return Text() if task.total is None else super().render(task)

    console = console or Console(stderr=True)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        CountColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )


def _is_terminal(stream: object) -> bool:
    """Whether a stream is a terminal. A program may have closed its streams, or put None or an object of its
    own in their place."""
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False


class LiveLine:
    """A line on the terminal that shows a text for work that takes longer than `delay` seconds. It is written
    anew while the work goes on, and removed in the end. Shows nothing under `config.quiet`, without a
    terminal, or where CI is set.

    It does without rich, whose import takes longer than many kernels do.
    """

    PERIOD = 0.2

    def __init__(self, text: Callable[[], str], delay: float) -> None:
        self._text, self._delay = text, delay
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        from cute_backend import config  # here, since it imports torch

        if config.quiet or os.environ.get("CI") or not _is_terminal(sys.stderr):
            return
        thread = threading.Thread(target=self._show, name="cute_backend line", daemon=True)
        with suppress(RuntimeError):  # no more threads; the work goes on without a line
            thread.start()
            self._thread = thread

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _show(self) -> None:
        seconds, shown = self._delay, ""
        while not self._ended.wait(seconds):
            if (text := self._text()) != shown:
                self._write(shown := text)
            seconds = self.PERIOD
        if shown:
            self._write("")

    def _write(self, text: str) -> None:
        with suppress(AttributeError, OSError, ValueError):  # the terminal or the stream is gone
            sys.stderr.write(f"\r{text}\x1b[K")
            sys.stderr.flush()


class Update(Protocol):
    """Shows the current step and its count. Arguments that are None stay as they were, except that a new
    `what` without `done` has no count."""

    def __call__(
        self, what: str | None = None, done: int | None = None, total: int | None = None
    ) -> None: ...


@contextmanager
def wait(what: str, total: int | None = None, console: Console | None = None) -> Iterator[Update]:
    """A line for work that takes longer than two seconds, shown as `line` is, with the elapsed seconds."""
    with line(console) as bar:
        task = bar.add_task(what, total=total)

        def update(what: str | None = None, done: int | None = None, total: int | None = None) -> None:
            if total is not None or (what is not None and done is None):
                bar.tasks[0].total, bar.tasks[0].finished_time = total, None
            bar.update(task, description=what, completed=done or 0)

        yield update


@contextmanager
def starting() -> Iterator[None]:
    """A line while torch is imported, which takes seconds where the disk is slow. The settings are not
    imported yet, so the environment variable says whether to show it."""
    quiet = os.environ.get("CUTE_BACKEND_QUIET", "0").lower() not in ("0", "false", "no", "off")
    if quiet or not _is_terminal(sys.stderr):
        yield  # without rich, which takes long to import
        return
    with _line(None, quiet) as bar:
        bar.add_task("starting", total=None)
        yield
