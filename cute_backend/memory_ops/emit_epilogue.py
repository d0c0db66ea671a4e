"""The text of an epilogue's class, and of the views of its tensors that a kernel takes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from cute_backend.kinds.axes import Call, Extent
from cute_backend.memory_ops import emit_reductions, reads
from cute_backend.memory_ops.partials import written
from cute_backend.memory_ops.reads import CUTE_TYPES
from cute_backend.memory_ops.schedule import passes
from cute_backend.memory_ops.statements import EmittedChain, Loop, register_type
from cute_backend.ops import GUMBEL
from cute_backend.planning import Carrier, Placing, Plan, is_one_block
from cute_backend.signature import Argument, Use, of_use
from cute_backend.spec import DType, EpilogueSpec, Load, Op, Order, Overflow, Store

Step = tuple[str, str, tuple[Call, ...]]
"""A step of a view: an argument, the end of the view's name, and the calls that make it."""


class EpilogueText:
    """An epilogue of a module: the class `name`, for a spec of one tile's products that `simplify` has made,
    and the places of its operands in a kernel's plan.

    `arguments` are those of `launch` that belong to it, A and every B among them. `lines` as for `emit`, by
    the names in the text.
    """

    def __init__(
        self,
        name: str,
        spec: EpilogueSpec,
        folded: dict[float, str],
        plan: Plan,
        places: Placing,
        lines: Mapping[str, str],
        arguments: Sequence[Argument],
    ) -> None:
        self.name, self.spec, self.tile, self.places = name, spec, plan.tile, places
        self._lines, self._arguments, self._counts = lines, arguments, plan.finishes_rows
        found = self._reads()
        self.passes: list[tuple[list[Op], EmittedChain]] = []
        found_passes = passes(spec, self.tile.subtile_n)
        self.kept = spec.kept if found_passes else ""
        self.keeping = EmittedChain(spec, found, folded, wanted=[self.kept]) if self.kept else None
        kept = {self.kept: f"{self.kept}[e]"} if self.kept else {}
        given: dict[str, str] = {}
        for ops in found_passes:
            names = {op.name: f"{op.name}[r]" for op in ops}
            self.passes.append((ops, EmittedChain(spec, found, folded, given | kept, names)))
            given |= names
        held = {name: f"held.{text}" for name, text in given.items()}
        self.chain = EmittedChain(spec, found, folded, held | kept)

    def text(self) -> list[str]:
        staged = [_operand(load.name, load.dtype) for load in self.places.in_ring(Carrier.ROW, self.spec)]
        planes = self.places.in_ring(Carrier.PLANE, self.spec)
        shared_loads = [_operand(load.name, load.dtype, load.smem_words) for load in planes]
        shared_stores = [
            _operand(store.name, store.dtype, store.form.smem_words)
            for store in self.spec.planes
            if store.name in self.places.shared_stores
        ]
        return [
            f"class {self.name}:",
            f"    loads = {_names(load.name for load in self.spec.loads)}",
            f"    stores = {_names(written(self.spec, self._counts))}",
            *_tuple("staged", staged),
            *_tuple("shared_loads", shared_loads),
            *_tuple("shared_stores", shared_stores),
            *_tuple("sweeps", [f"{name}({arguments})" for name, arguments in self.sweeps().items()]),
            "",
            *self._stage(),
            *self._begin(),
            "",
            *([*self._keep(self.keeping), ""] if self.keeping is not None else []),
            *([*self._reduce_blocks(), ""] if self.passes else []),
            *self._visit(),
            *(["", *end] if (end := self._end()) else []),
        ]

    def sweeps(self) -> dict[str, str]:
        """The sweeps of the epilogue: the name of each one's class, and its arguments."""
        planes = [load.name for load in self.places.in_ring(Carrier.PLANE, self.spec)]
        early = [name for name in planes if self.kept and name in self.spec.early_planes]
        late = [name for name in planes if name not in early]
        span = [f"span={self.spec.pass_columns}"]
        keep = [*span, *([f"planes={_names(early)}"] if early else [])]
        visit = [f"planes={_names(late)}"] if late else []
        visit += ["pads_rows=True"] if self.pads_rows() else []
        visit += ["ends=True"] if self._end() else []
        sweeps = {"Keep": keep} if self.kept else {}
        sweeps |= {"Reduce": span} if self.passes else {}
        return {name: ", ".join(arguments) for name, arguments in (sweeps | {"Visit": visit}).items()}

    def types(self) -> set[str]:
        stored = {register_type(self.chain.stored(store)[1]) for store in self.spec.stores}
        loaded = {register_type(load.dtype) for load in self.spec.loads}
        memory = {CUTE_TYPES[load.dtype] for load in self.spec.loads}
        memory |= {CUTE_TYPES[store.dtype] for store in self.spec.stores}
        statements = [line for loop in self._loops() for line in loop.statements]
        constants = {"Boolean"} if any(", Boolean)" in line for line in statements) else set()
        kept = {kind for loop in self._loops() for kind in loop.kept.values()}
        kept |= {"Float32"} if self.passes else set()
        return stored | loaded | memory | constants | kept

    def reduces_blocks(self) -> bool:
        """Whether ops reduce blocks of columns."""
        return any(op.reduction is not None for loop in self._loops() for op, _ in loop.reduced)

    def _loops(self) -> list[Loop]:
        """The loops of what is kept, of all passes and of a visit."""
        chains = [chain for _, chain in self.passes]
        chains += [self.chain] if self.keeping is None else [self.keeping, self.chain]
        return [loop for chain in chains for loop in chain.loops]

    def draws(self) -> bool:
        return any(op.op == GUMBEL.name for op in self.spec.ops)

    def pads_rows(self) -> bool:
        """Whether scales are written in tiles, whose last rows zeros pad."""
        return any(store.form.pads_rows for store in self.spec.stores)

    def has_columns(self) -> bool:
        planes = [load.order for load in self.places.in_ring(Carrier.PLANE, self.spec)]
        planes += [store.form.order for store in self.spec.planes if store.name in self.places.shared_stores]
        return Order.COLUMN in planes

    def views(self) -> dict[str, tuple[str, tuple[Call, ...]]]:
        """The arguments of `launch` that the kernel takes as views: each view's name, and how it is made."""
        views: dict[str, tuple[str, tuple[Call, ...]]] = {}
        for name, end, calls in (each for step in self.steps_of_views() for each in step):
            if calls:
                views[name] = (f"{name}_{end}", (*views.get(name, ("", ()))[1], *calls))
        return views

    def steps_of_views(self) -> list[list[Step]]:
        """The steps in which views are made.

        Several modes of M, and blocks of columns of loads and of B, become one axis. Forms of results have
        views of their own. If halves of blocks are rotated, each half provides half of a subtile's columns,
        unless subtiles are whole blocks. If D^T = B^T A^T is computed, all arguments of two axes are
        transposed.
        """
        of_b = of_use(self._arguments, Use.B) if self.spec.product.b_block else ()
        operands: list[Step] = [(each.name, "columns", (("collapse_n", ()),)) for each in of_b]
        operands += [(load.name, "plane", load.calls(self.comes_in_boxes(load))) for load in self.spec.loads]
        results: list[Step] = [
            (store.name, "heads", store.form.calls(self._rows_at_launch(store))) for store in self.spec.stores
        ]
        moved = {load.name for load in self.places.in_ring(Carrier.PLANE, self.spec)}
        moved |= set(self.places.shared_stores)
        block, wide, narrow = self.spec.reordered_columns, self.tile.box_n, self.tile.subtile_n
        paired: list[Step] = [
            (name, "paired", (("pair_halves", (block, (wide if name in moved else narrow) // 2)),))
            for name in (self._columned() if self.pairs() else ())
        ]
        planes = (each for each in self._arguments if self.tile.transposed and len(each.dims) == 2)
        return [operands, results, paired, [(each.name, "t", (("transpose", ()),)) for each in planes]]

    def _rows_at_launch(self, store: Store) -> str:
        """The expression of the rows of a batch in `launch`, from the sizes of arguments."""
        divisors = [
            f" // {load.name}.shape[{axis}]"
            for load in self.spec.loads_with_batches(store)[:1]
            for axis in range(len(load.m_modes) - 1)
        ]
        return f"{store.name}.shape[0]" + "".join(divisors)

    def pairs(self) -> bool:
        """Whether rotated blocks have more columns than a subtile."""
        return self.spec.reordered_columns > self.tile.subtile_n

    def comes_in_boxes(self, load: Load) -> bool:
        """Whether a load is a table that TMA brings in boxes."""
        return load.is_table and self.places.placements[load.name].ring is Carrier.PLANE

    def _columned(self) -> list[str]:
        """The names of the arguments that have the plane's columns."""
        columns = (Extent.N, Extent.BLOCK)
        return [each.name for each in self._arguments if any(dim.extent in columns for dim in each.dims)]

    def _reads(self) -> dict[str, str]:
        """Returns the expression of each accumulator and load for element e, in row slot r and column slot
        c."""
        accumulators = {acc.name: f"{acc.name}[e]" for acc in self.spec.accumulators}
        placed = self.places.placements
        return accumulators | {name: placement.element.format(name) for name, placement in placed.items()}

    def _stage(self) -> list[str]:
        """The hook of the staging warp, if any rowvec is staged."""
        staged = self.places.in_ring(Carrier.ROW, self.spec)
        if not staged:
            return []
        return [*_method("stage(self, tile, glob, smem)"), *reads.stage(staged, self.tile.tile_n), ""]

    def _begin(self) -> list[str]:
        lines = _method("begin(self, tile, glob)")
        held = []
        for load in self.spec.loads:
            if read := reads.begin(load, self.places.placements[load.name]):
                lines += read
                held.append(f"{load.name}={load.name}")
        for name, reduction in self.spec.reductions.items():
            if reduction.axis.is_held:
                lines.append(f"        {reduction.begin(name)}")
                held.append(f"{name}={name}")
        return [*lines, f"        return SimpleNamespace({', '.join(held)})"]

    def _reduce_blocks(self) -> list[str]:
        """The hook that reduces blocks wider than a subtile, in passes."""
        values = self._values()
        lines, results = _method("reduce_blocks(self, blocks, glob, held, smem)"), []
        for ops, chain in self.passes:
            body = [f"        sub, {values} = blocks.read(i)", *self._read(chain)]
            for loop in chain.loops[:-1]:  # the last one would read the results
                body += self._loop(loop, [], [op.name for op in ops])
            lines += [
                *(f"        {emit_reductions.begin_blocks(op)}" for op in ops),
                "        for i in cutlass.range_constexpr(blocks.subtiles):",
                *(f"    {line}" for line in body),
                *(f"        {op.name} = {op.name}_parts.results(blocks.tile)" for op in ops),
            ]
            results += [f"{op.name}={op.name}" for op in ops]
        return [*lines, f"        return SimpleNamespace({', '.join(results)})"]

    def _read(self, chain: EmittedChain) -> list[str]:
        """The statements by which a thread reads a chain's loads for one subtile."""
        return reads.visit([load for load in self.spec.loads if load.name in chain.operands], self.places)

    def _keep(self, chain: EmittedChain) -> list[str]:
        """The hook that computes the value that is kept, ahead of the passes."""
        accumulators = ", ".join(acc.name for acc in self.spec.accumulators)
        chain.keep(self.kept)
        lines = [*_method(f"keep(self, sub, {accumulators}, glob, held, smem)"), *self._read(chain)]
        for loop in chain.loops:
            lines += self._loop(loop, [])
        return [*lines, f"        return {self.kept}_kept"]

    def _values(self) -> str:
        """The names of the values of which passes and visits have an element: accumulators, or one that is
        kept."""
        return self.kept or ", ".join(acc.name for acc in self.spec.accumulators)

    def _visit(self) -> list[str]:
        lines = _method(f"visit(self, sub, {self._values()}, glob, held, smem)")
        lines += self._read(self.chain)
        for store in self.spec.stores:
            kind = register_type(self.chain.stored(store)[1])
            lines.append(f"        {store.name} = cute.make_rmem_tensor(sub.elements, {kind})")
        for index, loop in enumerate(self.chain.loops):
            stores = [store for store in self.spec.stores if self.chain.loop_of(store) == index]
            lines += self._loop(loop, stores)
        for store in self.spec.stores:
            lines += [f"        {line}" for line in store.form.take(store.name)] or self._store(store)
        return lines

    def _end(self) -> list[str]:
        lines = [f"        {line}" for line in emit_reductions.end(self.spec, self._counts)]
        return [*_method("end(self, tile, glob, held)"), *lines] if lines else []

    def _loop(self, loop: Loop, stores: list[Store], in_passes: Sequence[str] = ()) -> list[str]:
        """Returns the lines of a loop over a subtile's elements, of the values that it keeps for later loops,
        and of the blocks that are reduced after it, of which those `in_passes` are wider than a subtile."""
        kept = {f"{name}_kept": kind for name, kind in loop.kept.items()}
        kept |= {f"{op.name}_of": "Float32" for op, _ in loop.reduced}
        body = []
        for statement in loop.statements:
            body.append(statement)
            if (name := statement.split(" ", 1)[0]) in loop.kept:
                body.append(f"{name}_kept[e] = {name}")
        body += [f"{op.name}_of[e] = {text}" for op, text in loop.reduced]
        behind = [
            f"{op.name}_parts.take({op.name}_of, sub)"
            if op.name in in_passes
            else emit_reductions.of_blocks(op)
            for op, _ in loop.reduced
        ]
        body += [f"{store.name}[e] = {self.chain.stored(store)[0]}" for store in stores]
        used = "".join(body)
        row = ["r = sub.row_of(e)"] if "[r]" in used else []
        column = ["c = sub.column_of(e)"] if "c]" in used else []
        return [
            *(f"        {name} = cute.make_rmem_tensor(sub.elements, {kind})" for name, kind in kept.items()),
            *(f"        {name}_draws = noise.Draws(sub)" for name in loop.draws),
            "        for e in cutlass.range_constexpr(sub.elements):",
            *(f"            {line}" for line in self._with_lines([*row, *column, *body])),
            *(f"        {line}" for line in self._with_lines(behind)),
        ]

    def _with_lines(self, statements: list[str]) -> list[str]:
        """Returns the statements, each followed by its program line as a comment, if there is one."""
        width = max(map(len, statements), default=0)
        shown = []
        for statement in statements:
            line = self._lines.get(re.split(r"\W", statement, maxsplit=1)[0])
            shown.append(f"{statement:<{width}}  # {line}" if line else statement)
        return shown

    def _store(self, store: Store) -> list[str]:
        _, _, overflow = self.chain.stored(store)
        rule = ", saturate=False" if overflow is Overflow.NONFINITE else ""
        narrowed = f"math.narrow({store.name}, {CUTE_TYPES[store.dtype]}{rule})"
        if store.dtype is DType.E8M0:
            narrowed = f"math.e8m0_codes({store.name})"
        if store.name in self.places.shared_stores:
            return [f"        sub.copy_to({narrowed}, smem.{store.name})"]
        lines = [f"        {store.name}_glob = glob.{store.name}", f"        {store.name}_rmem = {narrowed}"]
        lines.append("        for e in cutlass.range_constexpr(sub.elements):")
        placement = self.places.placements.get(store.form.positions)
        by_row = placement is not None and placement.kind.by_row
        position = "" if placement is None else placement.element.format(store.form.positions)
        if statements := store.form.statements(store.name, self.tile.subtile_n, position, by_row):
            return [*lines, *(f"            {statement}" for statement in statements)]
        whole = is_one_block(self.spec, self.tile)
        in_line = whole and store.form.block_columns > 0
        place = f"{store.name}_line[e]" if in_line else f"{store.name}_glob[row, column]"
        return [
            *lines[:-1],
            *[f"        {store.name}_line = sub.line_of({store.name}_glob)"] * in_line,
            *["        _, _, inside = sub.target(0)"] * whole,
            lines[-1],
            *[f"            row, column, {'_' if whole else 'inside'} = sub.target(e)"] * (not in_line),
            "            if inside:",
            f"                {place} = {store.name}_rmem[e]",
        ]


def _method(signature: str) -> list[str]:
    return ["    @cute.jit", f"    def {signature}:"]


def _names(names: Iterable[str]) -> str:
    quoted = [f'"{name}"' for name in names]
    return f"({', '.join(quoted)}{',' if len(quoted) == 1 else ''})"


def _tuple(name: str, items: Sequence[str]) -> list[str]:
    if not items:
        return [f"    {name} = ()"]
    return [f"    {name} = (", *(f"        {item}," for item in items), "    )"]


def _operand(name: str, dtype: DType, suffix: str = "") -> str:
    return f'SmemOperand("{name}", {CUTE_TYPES[dtype]}{suffix})'
