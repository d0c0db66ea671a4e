"""Row vectors of groups: each row of a grouped product reads the row of its group in a table (G, N).

Models write `table[expert_of_row]`, where rows are sorted by expert and offsets count them. The origins of
the index and of the offsets prove that the index is the row's group:

    ids      the experts that `topk`, `argmax` or `sort` chose of G, in some shape
    index    the ids, sorted
    offsets  cumsum(histc(index, bins=G, min=0, max=G - 1))

Where this is not proven, the load stays a plane that is gathered before the kernel runs.
"""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx

from cute_backend.fx_walk.graph.frame import Frame
from cute_backend.fx_walk.graph.static import arguments, fake, first_argument, known, same_sizes, target_name
from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.values.classify import LoadView, classify_table
from cute_backend.fx_walk.values.lower import CASTS, is_reshape

_EXACT_IDS = (torch.int32, torch.int64, torch.float32, torch.float64)
"""Dtypes that hold the number of every expert exactly, for up to 2**24 experts."""

_CHOICES = {"aten.topk.default": 1, "aten.sort.default": 1, "aten.sort.stable": 1}
"""Ops with a result that has indices of an axis, and the number of that result."""


def group_vectors(node: fx.Node, shape: torch.Size, frame: Frame | None, anchor: Anchor) -> LoadView | None:
    """The table from which `node` takes the row of each row's group, by the offsets of `anchor`. `node` is an
    operand of an op with result `shape` and `frame`. None if the graph does not prove that there is such a
    table.

    Raises Refused if a kernel can't read the table.
    """
    if anchor.offsets is None or (frame is not None and frame.n_axes != (1,)):
        return None
    if not _is_call(node, "aten.index.Tensor"):
        return None
    table, indices = (arguments(node)[name] for name in ("self", "indices"))
    if fake(table).dim() != 2 or len(indices) != 1 or not same_sizes(fake(node).shape, shape):
        return None
    if not _ends_of(anchor.offsets, indices[0], fake(table).shape[0]):
        return None
    return classify_table(table, anchor.device)


def _ends_of(offsets: fx.Node, index: fx.Node, groups: int | torch.SymInt) -> bool:
    """Whether `index` is the group of each row by the offsets: rows are sorted by it, and the offsets count
    it."""
    if not _is_call(offsets, "aten.cumsum.default") or not isinstance(index, fx.Node):
        return False
    counts = _uncast(first_argument(offsets))
    if not _is_call(counts, "aten.histc.default"):
        return False
    args = arguments(counts)
    bins = args["bins"]
    whole = args["min"] == 0 and args["max"] == bins - 1 and known(groups == bins)
    return whole and _uncast(args["self"]) is index and _is_sorted_choice(index)


def _is_sorted_choice(index: fx.Node) -> bool:
    """Whether a vector is sorted, and has no negative numbers."""
    if index.target is not getitem or index.args[1] != 0:
        return False
    sort = index.args[0]
    if not isinstance(sort, fx.Node) or not (
        _is_call(sort, "aten.sort.default") or _is_call(sort, "aten.sort.stable")
    ):
        return False
    source = arguments(sort)["self"]
    if arguments(sort)["descending"] or fake(source).dim() != 1:
        return False
    while is_reshape(source) or _is_call(source, *CASTS):
        source = first_argument(source)
    if source.target is getitem:
        choice = source.args[0]
        return isinstance(choice, fx.Node) and any(
            _is_call(choice, name) and source.args[1] == place for name, place in _CHOICES.items()
        )
    return _is_call(source, "aten.argmax.default")


def _uncast(node: fx.Node) -> fx.Node:
    """The node before casts that keep small integers."""
    while _is_call(node, *CASTS) and fake(node).dtype in _EXACT_IDS:
        node = first_argument(node)
    return node


def _is_call(node: fx.Node, *names: str) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and target_name(node) in names
