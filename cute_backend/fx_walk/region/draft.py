"""A growing region."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from cute_backend.fx_walk.graph.frame import Frame
from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.region.region import stored_form
from cute_backend.fx_walk.region.slices import Slices
from cute_backend.fx_walk.region.value import Plane, Reading, Value
from cute_backend.fx_walk.values.chain import Chain, Mark
from cute_backend.fx_walk.values.lower import is_reshape
from cute_backend.kinds.results import Form
from cute_backend.spec import Columns, Operand


@dataclass
class Draft:
    """`values` maps each member to its value in the chain, in the order of joining."""

    anchors: tuple[Anchor, ...]
    chain: Chain
    values: dict[fx.Node, Value] = field(default_factory=dict)
    independent: set[fx.Node] = field(default_factory=set)
    """Nodes outside that are known not to depend on the region."""
    expected: set[fx.Node] = field(default_factory=set)
    """Nodes that may become members."""
    frames: dict[fx.Node, Frame] = field(default_factory=dict)
    """The frames of members on the plane. Members that reduce rows or columns have no frame, nor do members
    that hold several slices of its columns."""
    work: dict[tuple[fx.Node, int | None, Frame | None], Operand] = field(default_factory=dict)
    """The values of work on operands alone, by the node, the part of the columns, and the frame of the
    reader."""

    @property
    def first(self) -> Anchor:
        """The earliest anchor. All anchors have the same plane."""
        return self.anchors[0]

    @property
    def inputs(self) -> list[fx.Node]:
        every = (each for anchor in self.anchors for each in (*anchor.a_vectors, *anchor.b_vectors))
        beside = (each.node for each in every)
        return [*self.first.a_side, *(anchor.b for anchor in self.anchors), *beside, *self.chain.nodes()]

    def rollback(self, mark: Mark) -> None:
        """Removes the loads and ops that were added to the chain since `mark`, and all work on operands."""
        self.chain.rollback(mark)
        self.work.clear()

    def plane(self, values: Sequence[Operand]) -> Value:
        """The value of a plane that the chain has as one value, or as one for the slice of each anchor."""
        if len(values) == 1:
            return Plane(values[0])
        return Slices(tuple(values), True, self.first.accumulator.columns is not Columns.ALL)

    def values_read(self, node: fx.Node) -> list[Value]:
        """The values of the members that a node reads."""
        return [self.values[source] for source in node.all_input_nodes if source in self.values]

    def read(self, member: fx.Node, reader: fx.Node, side: int | None = None) -> Operand:
        """The value of the chain that `reader` reads of a member. `side` is as in `Reading`. Raises Refused
        if it can't read it."""
        return self.values[member].read(self, Reading(reader, member, side))

    def cut(self, members: Sequence[fx.Node]) -> Draft:
        """The draft of some of its members alone, whose names have no gaps."""
        values = {node: self.values[node] for node in members}
        parts = {node: value.operands for node, value in values.items()}
        chain, names = self.chain.kept(parts, self.values.keys() - values.keys())
        return Draft(
            self.anchors,
            chain,
            {node: value.renamed(names) for node, value in values.items()},
            expected=self.expected,
            frames={node: frame for node, frame in self.frames.items() if node in values},
        )

    def split(self, node: fx.Node) -> bool:
        """Whether a node reads a value that the region has in two parts."""
        return any(value.is_split for value in self.values_read(node))

    def reads_both(self, node: fx.Node) -> bool:
        """Whether a member's value depends on two accumulators."""
        value = self.values[node]
        return not value.is_split and any(len(self.chain.reads(part)) > 1 for part in value.parts)

    def form(self, node: fx.Node) -> Form | None:
        """The form in which a member could be stored, or None if it can't be stored."""
        frame = self.frames.get(node)
        if not self.values[node].parts or (frame is not None and frame.part is not None):
            return None
        form = stored_form(self.first, self.chain, node, self.values[node], frame)
        target = self.chain.target
        without_tma = target is not None and not target.planes_by_tma
        return None if form is not None and form.only_by_tma and without_tma else form

    def block(self, node: fx.Node) -> int:
        """The number of columns that each element of a member stands for."""
        return self.frames[node].block if node in self.frames else 1

    def only_moves_axes(self, node: fx.Node) -> bool:
        """Whether a node of the region splits columns or moves axes, and does nothing else."""
        return is_reshape(node) and node in self.frames and not self.frames[node].is_plain
