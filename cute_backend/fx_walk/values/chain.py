"""A spec under construction: loads and steps in SSA order, named by role. Equal steps are made once."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import lcm

from torch import fx

from cute_backend.fx_walk.graph.static import Size, target_name
from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.fx_walk.values.classify import LoadView
from cute_backend.kinds import reductions
from cute_backend.kinds.blocks import BlockOp, reducing
from cute_backend.ops import OPS, result_dtype
from cute_backend.planning import Arch, Target, serves
from cute_backend.spec import (
    LEAST_AHEAD,
    Accumulator,
    BlockPasses,
    Const,
    DType,
    EpilogueSpec,
    Load,
    Op,
    Operand,
    Overflow,
    Precision,
    Store,
    block_passes,
)

_MOST_OPS = 1024
"""The most ops of a region. The time to compile a kernel grows faster than their number: 500 took 7 s of
processor time, 1,000 took 20 and 2,000 more than 100 (128x128 on sm_90a, nvidia-cutlass-dsl 4.8)."""


@dataclass(frozen=True)
class Mark:
    """A state of the chain that `rollback` returns to."""

    loads: int
    ops: int


class Chain:
    """Loads and ops of a region as they are found.

    Names are roles and counters, never the graph's names, so that the same epilogue in another layer gives
    the same spec: `scale_a`, `scale_b`, `bias`, with numbers if two products differ in them, then `rowvec0`,
    `colvec0`, `exact0`, `scalar0`, ...; ops `t0`, ...

    Steps for which the `target`, if there is one, has no instruction are refused.
    """

    def __init__(
        self, accumulators: tuple[Accumulator, ...], precision: Precision, target: Target | None = None
    ) -> None:
        self.accumulators = accumulators
        self.precision = precision
        self.target = target
        self.views: list[LoadView] = []
        self._loads: list[Load] = []
        self._ops: list[Op] = []
        self._nodes: list[fx.Node | None] = []
        """The node for which each op was made."""
        self._lowered: fx.Node | None = None
        self._made: dict[_Key, str] = {}
        """The name of each op by its other fields, so that a long region is lowered in linear time."""
        self.block_ops: list[Op] = []
        """The ops over blocks of columns."""
        self._served: dict[Hashable, bool] = {}
        """The answers of `is_served`, by the facts that they depend on."""
        self._dtypes = {acc.name: acc.dtype for acc in accumulators}
        self.stored: frozenset[str] = frozenset()
        """The values that the kernel stores, once they are known. Until then, the values that no op reads
        stand for them."""

    @contextmanager
    def lowering(self, node: fx.Node) -> Iterator[None]:
        """A context in which ops are recorded as made for `node`."""
        outer, self._lowered = self._lowered, node
        try:
            yield
        finally:
            self._lowered = outer

    @property
    def origins(self) -> dict[str, fx.Node]:
        """The node that each op was made for, by the name of the op."""
        nodes = zip(self._ops, self._nodes, strict=True)
        return {op.name: node for op, node in nodes if node is not None}

    def load(self, view: LoadView, role: str | None = None) -> str:
        """Adds a load, and returns its name. The same view of the same node is loaded once."""
        if view in self.views:
            return self._loads[self.views.index(view)].name
        taken = {load.name for load in self._loads}
        if role is None or role in taken:
            role = next(
                name for index in range(len(taken) + 1) if (name := f"{view.kind.value}{index}") not in taken
            )
        self._check(view.dtype)
        self.views.append(view)
        modes = tuple(mode.stride for mode in view.modes)
        self._loads.append(
            Load(role, view.kind, view.dtype, view.stride_m, view.stride_n, modes, view.blocks)
        )
        self._dtypes[role] = view.dtype
        return role

    def emit(self, op: str, *operands: Operand) -> Operand:
        """The result of a row of OPS. Raises ops.OperandError where it is not defined on the operands."""
        if op == "mul" and _is_one(operands[1]) and self.dtype(operands[0]).is_float:
            return operands[0]
        dtype = result_dtype(OPS[op], [self.dtype(operand) for operand in operands])
        return self._step(op, operands, dtype)

    def cast(self, value: Operand, dtype: DType, overflow: Overflow = Overflow.SATURATE) -> Operand:
        """`value` rounded or wrapped to `dtype`, or `value` itself if it has that dtype."""
        if self.dtype(value) is dtype:
            return value
        return self._step("cast", (value,), dtype, overflow)

    @property
    def last(self) -> str:
        """The value that was made last: the first accumulator if there are no ops."""
        return self._ops[-1].name if self._ops else self.accumulators[0].name

    @property
    def blocks(self) -> set[int]:
        """The sizes, in columns, of the blocks that a tile has to hold whole."""
        return {op.whole_columns for op in self.block_ops} - {0}

    @property
    def visit_columns(self) -> int:
        """The number of columns that a visit needs whole (`EpilogueSpec.visit_columns`)."""
        return lcm(*self.blocks) if self.by_visits or lcm(*self.blocks) % LEAST_AHEAD else 1

    @property
    def by_visits(self) -> bool:
        """Whether only visits can reduce the blocks, whatever their sizes (`block_passes`)."""
        return bool(self.blocks) and self._passes(self._ops) is None

    def _passes(self, ops: Sequence[Op]) -> BlockPasses | None:
        planes = {load.name for load in self._loads if load.kind.is_plane}
        return block_passes(ops, self.accumulators, planes, self._storable(ops), ())

    def _storable(self, ops: Sequence[Op]) -> frozenset[str]:
        """The values that the kernel may store: `stored`, or those that no op reads."""
        read = {name for op in ops for name in op.values}
        return self.stored or frozenset(op.name for op in ops if op.name not in read)

    def is_served(self, *further: Op) -> bool:
        """Whether some tile of the target holds the blocks that the chain reduces and rotates, with `further`
        ops at its end; on a CPU, one of any target that has this product.

        It is asked after each step, and constructing a spec takes a time that grows with the chain. So the
        planner is asked only if the loads, the blocks or the passes over them have changed.
        """
        of_blocks = (*self.block_ops, *further)
        if not of_blocks:
            return True
        ops = (*self._ops, *further)
        facts = tuple(self._loads), of_blocks, self._passes(ops), self.stored
        if facts not in self._served:
            spec = self.provisional(*further)
            self._served[facts] = any(serves(arch, spec) for arch in self.archs)
        return self._served[facts]

    def provisional(self, *further: Op) -> EpilogueSpec:
        """The spec of the chain with `further` ops at its end, if the kernel wrote a single plane in fp32. It
        is the sum of all values that the kernel may store, since how many of them it stores is not known."""
        ops = [*self._ops, *further]
        storable = self._storable(ops)
        names = (*self._dtypes, *(op.name for op in further))
        value, *others = [name for name in names if name in storable] or [ops[-1].name]
        for other in others:
            ops.append(Op(f"end{len(ops)}", "add", (value, other), DType.F32))
            value = ops[-1].name
        stores = (Store("out0", value, DType.F32),)
        return EpilogueSpec(self.accumulators, tuple(self._loads), tuple(ops), stores, self.precision)

    @property
    def archs(self) -> Iterator[Arch]:
        """The architectures of the target; on a CPU, all that have this product."""
        for arch in Arch:
            if self.target in (None, arch.target) and self.accumulators[0].a_dtype in arch.target.operands:
                yield arch

    def repeat(self, op: Op, names: Mapping[Operand, Operand]) -> Operand:
        """The result of an op of another chain, whose operands have other `names` here."""
        operands = tuple(names.get(operand, operand) for operand in op.operands)
        return self._step(op.op, operands, op.dtype, op.overflow, op.block)

    def ops_for(self, value: str) -> tuple[Op, ...]:
        """The ops that a value is computed by, in order; none for a value that the chain does not make."""
        needed = {value}
        for op in reversed(self._ops):
            if op.name in needed:
                needed.update(op.values)
        return tuple(op for op in self._ops if op.name in needed)

    def innermost_modes(self, value: str) -> list[Size]:
        """The sizes of the innermost modes of M that the operands of a value have, if M is several modes."""
        read = {value}.union(*(op.values for op in self.ops_for(value)))
        views = zip(self._loads, self.views, strict=True)
        return [view.modes[-1].extent for load, view in views if view.modes and load.name in read]

    def step_over_blocks(self, kind: BlockOp, columns: int, *operands: Operand) -> Operand:
        """The result of an op over blocks of `columns` columns."""
        return self._step(kind.name, operands, DType.F32 if kind.reads else DType.I32, block=columns)

    def reduce_blocks(self, kind: reductions.ReductionKind, value: Operand, columns: int) -> Operand:
        """The reduction of each block of `columns` columns, as the value of all elements of the block."""
        return self.step_over_blocks(reducing(kind), columns, value)

    def dtype(self, operand: Operand) -> DType:
        """The dtype that an operand has been rounded to."""
        if isinstance(operand, Const):
            return operand.dtype
        return self._dtypes.get(operand, DType.F32)

    def bounds(self, operand: Operand) -> tuple[float, float]:
        """A range that contains every value of the operand except NaN, as far as clamps by numbers prove
        it."""
        found: dict[Operand, tuple[float, float]] = {}

        def bounds(each: Operand) -> tuple[float, float]:
            number = (float(each.value),) * 2 if isinstance(each, Const) else None
            return number or found.get(each, (float("-inf"), float("inf")))

        for op in self._ops if isinstance(operand, str) else ():
            if op.op in ("minimum", "maximum"):
                lows, highs = zip(*map(bounds, op.operands), strict=True)
                choose = min if op.op == "minimum" else max
                found[op.name] = choose(lows), choose(highs)
        return bounds(operand)

    def reads(self, operand: Operand) -> set[str]:
        """The accumulators that a value is computed from."""
        found: dict[Operand, set[str]] = {acc.name: {acc.name} for acc in self.accumulators}
        for op in self._ops:
            found[op.name] = set().union(*(found.get(source, set()) for source in op.operands))
        return found.get(operand, set())

    def mark(self) -> Mark:
        return Mark(len(self._loads), len(self._ops))

    def rollback(self, mark: Mark) -> None:
        """Forget every load and op made since `mark`."""
        for load in self._loads[mark.loads :]:
            del self._dtypes[load.name]
        for op in self._ops[mark.ops :]:
            del self._made[_key_of(op)], self._dtypes[op.name]
        while self.block_ops and self.block_ops[-1].name not in self._dtypes:
            self.block_ops.pop()
        del self._loads[mark.loads :], self.views[mark.loads :]
        del self._ops[mark.ops :], self._nodes[mark.ops :]

    @property
    def planes_read(self) -> tuple[int, int]:
        """The number of planes that are read, and how many of them are by blocks whose columns lie side by
        side."""
        planes = [load for load in self._loads if load.kind.is_plane]
        return len(planes), sum(load.in_runs for load in planes)

    def nodes(self) -> list[fx.Node]:
        """The node of every load, in the spec's order."""
        return [view.node for view in self.views]

    def build(self, stores: Sequence[Store]) -> EpilogueSpec:
        """The spec with these stores."""
        return EpilogueSpec(
            accumulators=self.accumulators,
            loads=tuple(self._loads),
            ops=tuple(self._ops),
            stores=tuple(stores),
            precision=self.precision,
        )

    def build_needed(self, stores: Sequence[Store]) -> EpilogueSpec:
        """The spec with these stores, and with no load and no op that they don't need."""
        ops = {op.name for store in stores for op in self.ops_for(store.value)}
        read = {store.value for store in stores}.union(*(op.values for op in self._ops if op.name in ops))
        whole = self.build(stores)
        return replace(
            whole,
            loads=tuple(load for load in whole.loads if load.name in read),
            ops=tuple(op for op in whole.ops if op.name in ops),
        )

    def kept(
        self, members: Mapping[fx.Node, Sequence[Operand]], left: Container[fx.Node]
    ) -> tuple[Chain, dict[Operand, Operand]]:
        """The chain of some members, given with their values in the order of joining, and its names of those
        values. It has the loads and the ops that they need, numbered in that order without gaps. An op that
        was made for a member in `left` is one of the first other member that needs it."""
        chain = Chain(self.accumulators, self.precision, self.target)
        loads = {load.name: index for index, load in enumerate(self._loads)}
        ops = {op.name: index for index, op in enumerate(self._ops)}
        names: dict[Operand, Operand] = {}
        for member, values in members.items():
            needed, stack = set[str](), [value for value in values if isinstance(value, str)]
            while stack:
                name = stack.pop()
                if name not in names and name not in needed:
                    needed.add(name)
                    stack += self._ops[ops[name]].values if name in ops else ()
            for index in sorted(loads[name] for name in needed & loads.keys()):
                name, view = self._loads[index].name, self.views[index]
                numbered = name.removeprefix(view.kind.value).isdigit()
                names[name] = chain.load(view, None if numbered else name)
            for index in sorted(ops[name] for name in needed & ops.keys()):
                node = self._nodes[index]
                with chain.lowering(member if node is None or node in left else node):
                    names[self._ops[index].name] = chain.repeat(self._ops[index], names)
        return chain, names

    def _step(
        self,
        op: str,
        operands: tuple[Operand, ...],
        dtype: DType,
        overflow: Overflow = Overflow.SATURATE,
        block: int = 0,
    ) -> Operand:
        step = Op(f"t{len(self._ops)}", op, operands, dtype, overflow, block)
        key = _key_of(step)
        if key in self._made:
            return self._made[key]
        self._check(dtype)
        if len(self._ops) >= _MOST_OPS:
            target = op if self._lowered is None else target_name(self._lowered)
            why = f"follows {_MOST_OPS} ops of its kernel, which would take too long to compile with more"
            raise Refused(Reason.UNSUPPORTED_OP, target=target, why=why)
        self._ops.append(step)
        self._nodes.append(self._lowered)
        self._made[key], self._dtypes[step.name] = step.name, dtype
        if block:
            self.block_ops.append(step)
        return step.name

    def _check(self, dtype: DType) -> None:
        """Refuses a value in fp8 if the target has no conversions of it."""
        if dtype.is_fp8 and self.target is not None and not self.target.fp8:
            raise Refused(Reason.FP8, target=self.target.name, dtype=dtype.value)


def _is_one(operand: Operand) -> bool:
    return isinstance(operand, Const) and operand.value == 1


_Key = tuple[str, tuple[str, ...], DType, Overflow, int]


def _key_of(op: Op) -> _Key:
    """The fields of an op but its name. 1, 1.0 and True count as different numbers, and so do 0.0 and -0.0,
    although Python compares them as equal."""
    return op.op, tuple(map(repr, op.operands)), op.dtype, op.overflow, op.block
