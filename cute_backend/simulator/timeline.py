"""A picture of a simulated launch: when each warp works and waits, and which operations are in progress.

Its axis counts warp instructions of the cluster. It shows order and overlap, not time.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from cute_backend.errors import UsageError
from cute_backend.simulator.report import Recorder

_COLORS = {
    "TMA load": "tab:blue",
    "TMA store": "tab:cyan",
    "MMA": "tab:red",
    "wgmma": "tab:red",
    "epilogue": "tab:green",
    "mma": "tab:red",
    "tma": "tab:blue",
}
_WAITING, _OTHER = "lightgrey", "tab:olive"

Bars = dict[str, list[tuple[int, int]]]


def check(path: Path) -> None:
    """Raises UsageError if a timeline can't be drawn to `path`. It is called before a kernel is simulated."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise UsageError("a timeline needs matplotlib, which is missing: pip install matplotlib") from error
    endings = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".") not in endings:
        raise UsageError(f"a timeline is written as .{', .'.join(endings)}, not as {path.name}")
    if not os.access(path.absolute().parent, os.W_OK):
        raise UsageError(f"the folder of the timeline, {path.parent}, does not exist or can't be written to")


def draw(recorder: Recorder, path: Path, title: str) -> None:
    """Writes the timeline of the first CTA that `recorder` saw to `path`, in the format of its ending.

    Raises UsageError as `check` does, and if the file can't be written.
    """
    check(path)
    from matplotlib.figure import Figure

    warps = _warps(recorder)
    operations = _operations(recorder)
    ends = [time for *_, time in recorder.exits] + [finish for *_, finish in recorder.operations]
    end = max(ends, default=1)
    figure = Figure(figsize=(8, 1.2 + 0.32 * (len(warps) + len(operations))), layout="constrained")
    axes = figure.add_subplot()
    labels = []
    for row, warp in enumerate(warps):
        axes.broken_barh([(0, warp.end)], (row - 0.4, 0.8), color=_COLORS.get(warp.role, _OTHER))
        axes.broken_barh(_spans(warp.waits), (row - 0.4, 0.8), color=_WAITING)
        labels.append(f"warp {warp.number}: {warp.role}")
    for row, (pipe, spans) in enumerate(operations.items(), len(warps)):
        axes.broken_barh(_spans(spans), (row - 0.4, 0.8), color=_COLORS.get(pipe, _OTHER), alpha=0.35)
        labels.append(f"{pipe}, in progress")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, end)
    axes.set_xlabel("warp instructions of the cluster (order and overlap, not time); grey: waiting")
    axes.set_title(title)
    try:
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"the timeline can't be written to {path}: {error}") from error


def _spans(bars: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Bars as matplotlib takes them: a start and a width."""
    return [(start, max(end - start, 1)) for start, end in bars]


@dataclass(frozen=True)
class _Warp:
    """A warp of the first CTA: when it waited, and when it ended."""

    number: int
    role: str
    end: int
    waits: list[tuple[int, int]]


def _warps(recorder: Recorder) -> list[_Warp]:
    """The warps of the first CTA, by number."""
    cta = _first_cta(recorder)
    found = []
    for name, role, end in recorder.exits:
        number = re.fullmatch(rf"warp (\d+) of {re.escape(cta)}", name)
        if number is not None:
            waits = [(start, finish) for warp, *_, start, finish in recorder.waits if warp == name]
            found.append(_Warp(int(number[1]), role, end, waits))
    return sorted(found, key=lambda warp: warp.number)


def _operations(recorder: Recorder) -> Bars:
    """The operations of each kind of pipe of the first CTA."""
    found: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    cta = _first_cta(recorder)
    for pipe, _, issued, finished in recorder.operations:
        kind = re.fullmatch(rf"(.*?) of (?:warp \d+ of )?{re.escape(cta)}", pipe)
        if kind is not None:
            found[kind[1]].append((issued, finished))
    return dict(found)


def _first_cta(recorder: Recorder) -> str:
    names = [wait[0] for wait in recorder.waits] or [one[0] for one in recorder.exits]
    return names[0].partition(" of ")[2] if names else ""
