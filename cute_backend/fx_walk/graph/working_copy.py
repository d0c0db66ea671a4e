"""A copy of a graph to work on, and the change of the graph to the state of the copy.

The pass changes a graph in many steps, any of which may fail. It makes them on a copy, so that a graph either
stays exactly as it was or becomes the finished one.
"""

from __future__ import annotations

from copy import deepcopy

from torch import fx


class WorkingCopy:
    """A copy of `original`, as `graph`, which may be changed by all means of fx. Metas are copied, and their
    values are shared."""

    def __init__(self, original: fx.Graph) -> None:
        self.graph: fx.Graph = deepcopy(original)
        self.graph.owning_module = original.owning_module
        self._original = original
        self._nodes = dict(zip(self.graph.nodes, original.nodes, strict=True))
        self._given = {node: (node.args, node.kwargs) for node in self.graph.nodes}
        self._values = {node: node.meta.get("val") for node in self.graph.nodes}

    def commit(self) -> None:
        """Changes the original to the state of the copy, in time that is linear in its size.

        The copy of a node stands for that node. The node keeps its identity, because Inductor remembers nodes
        and the arguments of their calls. It keeps its meta, except for a value that was exchanged in the
        copy, and its arguments, if those of the copy were not changed. Call this once, on a sorted copy that
        lints. Nodes are put in place first and erased last, so that the original means the same after every
        step.
        """
        kept: dict[fx.Node, None] = {}
        last: fx.Node | None = None
        for node in self.graph.nodes:
            last = self._put(node, last)
            kept[last] = None
        for node in reversed(self._original.nodes):
            if node not in kept:
                self._original.erase_node(node)

    def _put(self, node: fx.Node, before: fx.Node | None) -> fx.Node:
        """The original's node for one of the copy, placed after the node `before`, or first."""
        here = self._nodes.get(node)
        behind = next(iter(self._original.nodes)) if before is None else before.next
        if here is None:
            with self._original.inserting_before(behind):
                here = self._nodes[node] = self._original.node_copy(node, self._nodes.__getitem__)
            return here
        if here is not behind:
            behind.prepend(here)
        args, kwargs = self._given[node]
        if node.args is not args or node.kwargs is not kwargs:
            here.args = fx.map_arg(node.args, self._nodes.__getitem__)
            here.kwargs = fx.map_arg(node.kwargs, self._nodes.__getitem__)
        if node.meta.get("val") is not self._values[node]:
            here.meta["val"] = node.meta["val"]
        return here
