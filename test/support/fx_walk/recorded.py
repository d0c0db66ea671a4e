"""Graphs that `test/fixtures/record_graphs.py` recorded from real compilations, and their regions."""

from __future__ import annotations

from pathlib import Path

from torch import fx

from cute_backend.fx_walk.refusals.reasons import Rejection
from cute_backend.fx_walk.region.region import Region
from cute_backend.fx_walk.search.regions import find_regions
from cute_backend.spec import Precision
from support.fx_walk import graph_text

RECORDED = Path(__file__).parents[2] / "fixtures" / "graphs"


FOLDERS = sorted(path for path in RECORDED.iterdir() if path.is_dir())


GRAPHS = [path for folder in FOLDERS for path in sorted(folder.glob("*.txt"))]


def read(path: Path) -> tuple[fx.Graph, Precision]:
    text = path.read_text()
    eager = "'emulate_precision_casts': True" in text.split("\n", 2)[1]
    return graph_text.read(text), Precision.EAGER if eager else Precision.FUSED


def walked(path: Path) -> tuple[fx.Graph, list[Region], list[Rejection]]:
    graph, precision = read(path)
    return graph, *find_regions(graph, precision, lambda device: (9, 0))
