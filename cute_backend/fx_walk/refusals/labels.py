"""Names of graph inputs as the program has them: `x`, `self.up.weight`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cute_backend.fx_walk.refusals.reasons import LABEL


def plain_name(source: str) -> str:
    """The program's name of an input of Dynamo's: `self.up.weight` for
    `L['self']._modules['up']._parameters['weight']`."""
    name = re.sub(r"\._(?:modules|parameters|buffers)(?=\[)", "", source)
    name = re.sub(r"^G\['__import_\w+'\]\.", "", name)
    name = re.sub(r"^[LG](?=\[)", "", name)
    return re.sub(r"\['(\w+)'\]", r".\1", name).strip(".")


def input_names(
    gm: fx.GraphModule, example_inputs: Sequence[Any], name_of: Callable[[str], str] = plain_name
) -> list[str]:
    """The names of the inputs that AOTAutograd makes from those of one of Dynamo's graphs, in their order.

    `name_of` gives the program's name for Dynamo's name of an input.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [
        name
        for node, value in zip(placeholders, example_inputs, strict=True)
        for name in _flat_names(_name(node, name_of), value)
    ]


def _name(node: fx.Node, name_of: Callable[[str], str]) -> str:
    source = getattr(node.meta.get("grapharg"), "source", None)
    if source is None:
        return node.name
    return name_of(source.name if isinstance(source.name, str) else source.name())


def _flat_names(name: str, value: Any) -> Iterator[str]:
    """The names of the inputs that AOTAutograd makes of one input. A tensor subclass becomes all tensors that
    it holds."""
    if not is_traceable_wrapper_subclass(value):
        yield name
        return
    for part in value.__tensor_flatten__()[0]:
        yield from _flat_names(f"{name}.{part}", getattr(value, part))


def label_inputs(graph: fx.Graph, names: Sequence[str]) -> None:
    """Labels the inputs of an AOTAutograd graph with the names of Dynamo's inputs, which have the same
    order."""
    for node in graph.nodes:
        place = (
            re.fullmatch(r"(?:arg(\d+)_1|primals_(\d+))", str(node.target))
            if node.op == "placeholder"
            else None
        )
        if place is None:
            continue
        index = int(place[1]) if place[1] else int(place[2]) - 1
        if index < len(names):
            node.meta[LABEL] = names[index]
