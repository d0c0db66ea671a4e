"""The walker on graphs recorded from real compilations, on this project's GPU machine and on CPU.

`test/fixtures/record_graphs.py` records them; what the walker makes of them is in test/expected.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_backend.fx_walk.graph.static import fake, tensor_of
from cute_backend.fx_walk.replacement.rewrite import rewrite
from cute_backend.memory_ops.schedule import kernel_formula
from support.fx_walk import graph_text
from support.fx_walk.recorded import FOLDERS, GRAPHS, walked
from support.fx_walk.synthetic import OP, called
from support.golden import assert_expected


def summary(path: Path) -> str:
    _, regions, rejections = walked(path)
    lines = [f"== {path.stem}"]
    for region in regions:
        names = ", ".join(node.name for node in region.products)
        loads = ", ".join(f"{load.name}: {load.kind.value} {load.dtype.value}" for load in region.spec.loads)
        outputs = ", ".join(f"{node.name} = out{index}" for node, index in region.outputs.items())
        lines += [f"{names} ({loads})", *kernel_formula(region.spec).splitlines(), f"  {outputs}"]
    lines += [f"{rejection.node}: {rejection.reason.value}" for rejection in rejections]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_what_is_found(folder: Path) -> None:
    text = "\n".join(summary(path) for path in sorted(folder.glob("*.txt")))
    assert_expected(f"walk_{folder.name}.txt", text)


@pytest.mark.parametrize("path", GRAPHS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_rewritten_graph_is_whole(path: Path) -> None:
    """As many calls of the op as regions, sound metas, and nothing left of what the regions took."""
    graph, regions, _ = walked(path)
    taken = {node.name for region in regions for node in region.nodes}
    (before,) = graph.find_nodes(op="output")
    wanted = [fake(node) for node in before.all_input_nodes if tensor_of(node) is not None]
    rewrite(graph, regions)
    graph.lint()
    assert called(graph).count("cute_backend.gemm_epilogue.default") == len(regions)
    assert not taken & {node.name for node in graph.nodes}
    assert all(node.meta.get("val") is not None for node in graph.nodes if node.target is OP)
    (after,) = graph.find_nodes(op="output")
    found = [fake(node) for node in after.all_input_nodes if tensor_of(node) is not None]
    for old, new in zip(wanted, found, strict=True):
        assert (new.shape, new.stride(), new.dtype) == (old.shape, old.stride(), old.dtype)


def test_a_text_is_read_as_it_was_written() -> None:
    """Sizes that are symbols get other names; everything else is the same text."""
    path = next(path for path in GRAPHS if path.stem == "fp8_llama_mlp")
    text = path.read_text()
    header = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("#")]
    assert graph_text.write(graph_text.read(text), header) == text
