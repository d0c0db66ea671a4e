"""Several post-grad passes where Inductor takes one. Torch 2.11 takes no list; later versions take either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Union

from torch import fx
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

Pass = Union[CustomGraphPass, Callable[[fx.Graph], None]]

_InferenceAware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)
"""A pass that is told whether its graph is one of inference; torch 2.11 has none."""


class PassSequence(_InferenceAware):
    """Runs its passes in order. Its uuid is None, and nothing is cached, where one of them has none."""

    def __init__(self, passes: tuple[Pass, ...]) -> None:
        self.passes = passes

    def __call__(self, graph: fx.Graph, is_inference: bool = False) -> None:
        for each in self.passes:
            if _InferenceAware is not CustomGraphPass and isinstance(each, _InferenceAware):
                each(graph, is_inference)
            else:
                each(graph)

    def uuid(self) -> Any:
        uuids = tuple(each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.passes)
        return None if None in uuids else uuids


def chain_passes(own: Any, last: CustomGraphPass) -> CustomGraphPass:
    """`last` after the passes that a user has set: none, one, or a list. Once only, if it is set already."""
    if own is None:
        return last
    passes = tuple(own) if isinstance(own, (list, tuple)) else (own,)
    if len(passes) == 1 and isinstance(passes[0], PassSequence):
        passes = passes[0].passes
    return PassSequence((*(each for each in passes if each is not last), last))
