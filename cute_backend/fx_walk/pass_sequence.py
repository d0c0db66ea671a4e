"""Several post-grad passes as one. Inductor of torch 2.11 takes one pass; later versions also take a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Union

from torch import fx
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

Pass = Union[CustomGraphPass, Callable[[fx.Graph], None]]

_InferenceAware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)
"""A pass that receives whether its graph is one of inference; torch 2.11 has no such class."""


class PassSequence(_InferenceAware):
    """Runs its passes in order. If one of them has no uuid, its uuid is None, and nothing is cached."""

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


def passes_of(setting: Any) -> list[Pass]:
    """The passes that Inductor's setting names: none, one, or a list."""
    if setting is None:
        return []
    if isinstance(setting, PassSequence):
        return list(setting.passes)
    if isinstance(setting, (list, tuple)):
        return [each for one in setting for each in passes_of(one)]
    return [setting]


def chain_passes(passes: Sequence[Pass]) -> Pass | None:
    """One pass that runs all of these, which every torch accepts, or None if there are none."""
    return PassSequence(tuple(passes)) if len(passes) > 1 else next(iter(passes), None)
