"""Graph breaks, and why no graph of a program has a matrix product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary

import torch
from torch import fx
from torch._dynamo import config as dynamo_config
from torch._dynamo import eval_frame
from torch._dynamo.utils import graph_break_reasons
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from cute_backend.fx_walk.refusals.reasons import NO_PRODUCT, is_of_program


@dataclass(frozen=True)
class GraphBreak:
    """A line at which `torch.compile` ends a graph. Python runs what it can't compile there, and another
    graph follows.

    `where` is the line of the program, as "file.py:12", or empty if it is unknown. `reason` is the first line
    of what `TORCH_LOGS=graph_breaks` prints.
    """

    where: str
    reason: str


@contextmanager
def breaks_seen() -> Iterator[list[GraphBreak]]:
    """A context that ends by filling its list with the breaks of what was compiled in it, each once."""
    seen: list[GraphBreak] = []
    before = len(graph_break_reasons)
    try:
        yield seen
    finally:
        found = (
            GraphBreak(_place(each.user_stack), next(iter(str(each.reason).strip().splitlines()), ""))
            for each in graph_break_reasons[before:]
        )
        seen += dict.fromkeys(found)  # Dynamo breaks in the caller of a function, then in the function


def _place(stack: Sequence[FrameSummary]) -> str:
    frames = (each for each in reversed(stack) if is_of_program(each.filename))
    return next((f"{Path(each.filename).name}:{each.lineno}" for each in frames), "")


def why_no_product(graphs: Sequence[fx.Graph], breaks: Sequence[GraphBreak]) -> str:
    """The reason why none of these graphs, which are all of a program, has a product, in one sentence."""
    if not graphs:
        return f"torch.compile compiled no graph of it, because {_why_no_graph(breaks)}"
    if all(map(_is_on_meta, graphs)):
        return (
            "its tensors are on the device meta, for which Inductor generates no code; explain takes tensors "
            "on cpu and, without memory for them, those of FakeTensorMode"
        )
    if breaks:
        places = ", ".join(each.where for each in breaks[:_SHOWN]) + ", ..." * (len(breaks) > _SHOWN)
        return f"{NO_PRODUCT}; Python runs what is at its graph breaks ({places})"
    return NO_PRODUCT


_SHOWN = 3
"""Graph breaks that a sentence names."""


def _why_no_graph(breaks: Sequence[GraphBreak]) -> str:
    if dynamo_config.disable:
        return "torch._dynamo.config.disable is set, as by TORCH_COMPILE_DISABLE=1"
    if (stance := eval_frame._stance.stance) != "default":
        return f"torch.compiler.set_stance({stance!r}) is in force"
    if is_in_torch_dispatch_mode(include_infra_modes=False):
        return "a TorchDispatchMode is active, under which Dynamo compiles nothing"
    if breaks:
        return f"Python runs what is at its graph break, {breaks[0].where} ({breaks[0].reason})"
    return "no op on tensors is in its code, or Dynamo skips the code (TORCH_LOGS=+dynamo says which)"


def _is_on_meta(graph: fx.Graph) -> bool:
    values = (node.meta.get("val") for node in graph.nodes)
    return {value.device.type for value in values if isinstance(value, torch.Tensor)} == {"meta"}
