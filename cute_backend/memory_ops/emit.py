"""The text of a kernel's module, which people read, the DSL compiles and golden tests pin."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from types import MappingProxyType
from typing import Any

from cute_backend.errors import UsageError
from cute_backend.formula import formula
from cute_backend.memory_ops import emit_reductions, reads
from cute_backend.memory_ops.mainloops import mainloop
from cute_backend.memory_ops.partials import written
from cute_backend.memory_ops.reads import CUTE_TYPES
from cute_backend.memory_ops.schedule import kernel_names, renamed
from cute_backend.memory_ops.simplify import simplify
from cute_backend.memory_ops.statements import Chain, Loop, register_type
from cute_backend.ops import GUMBEL
from cute_backend.planning import Alignment, Ring, Rowvecs, TileConfig, plan, subtiled, unserved
from cute_backend.planning.naming import entry_name
from cute_backend.planning.transposing import multiplied
from cute_backend.signature import WORKSPACE, Argument, Extent, Role, of_role, signature
from cute_backend.spec import (
    ROTATE_HALF,
    BColumns,
    DType,
    EpilogueSpec,
    Load,
    Order,
    Overflow,
    ProductKind,
    Store,
)

_WHERE_TO_READ_ON = (
    "templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come",
    "from memory_ops/simplify.py, which replaces ops by cheaper ones.",
)


def emit(
    spec: EpilogueSpec,
    config: TileConfig,
    alignment: Alignment,
    lines: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The module for a spec, a tile configuration and an alignment.

    It defines the class `Epilogue`, the kernel `gemm` and the function `launch(a, <bs>, <loads>, <stores>,
    max_active_clusters, stream)`, whose arguments carry the spec's names. If a store reduces, there is also a
    kernel `finish`, and an argument `workspace` after the stores, in which `gemm` leaves partials for it.
    `workspace` also holds the sums of parts of K, if the tile leaves them for `gemm`'s own second kernel.
    `lines` maps names of ops and stores of the spec to lines of a program, such as "model.py:12". They become
    comments behind the statements, for people to read; kernels are compiled without them. Raises UsageError
    if the architecture has no instructions for the spec.
    """
    if (why := unserved(spec, config.target)) is not None:
        raise UsageError(why)
    names, folded = kernel_names(spec), dict[float, str]()
    header = (entry_name(spec, config, alignment), formula(spec, names))
    simple = renamed(simplify(spec, folded), names)
    shown = {names.get(name, name): line for name, line in _behind(names, lines)}
    return _Module(simple, folded, header, subtiled(spec, config, alignment), alignment, shown).text()


def _behind(names: Iterable[str], lines: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the program line of each op and store. An op that `simplify` made has the line of the op that it
    was made from, whose name is a prefix of its own."""
    yield from lines.items()
    for name in names:
        made_from = name
        while made_from not in lines and "_" in made_from:
            made_from = made_from.rpartition("_")[0]
        if made_from in lines:
            yield name, lines[made_from]


class _Module:
    def __init__(
        self,
        spec: EpilogueSpec,
        folded: dict[float, str],
        header: tuple[str, str],
        config: TileConfig,
        alignment: Alignment,
        lines: Mapping[str, str],
    ) -> None:
        self.config, self.alignment, self.lines = config, alignment, lines
        self.name, self.formula = header
        self.arguments = signature(spec, config.sums_in_memory)
        self.plan = plan(spec, config.summing, alignment)
        self.spec = spec = multiplied(spec, config)
        self.chain = Chain(spec, self._reads(), folded)
        self.mainloop = mainloop(spec, config)

    def text(self) -> str:
        return "\n".join([*self._header(), "", "", *self._epilogue(), "", "", *self._launch(), ""])

    def _reads(self) -> dict[str, str]:
        """Returns the expression of each accumulator and load for element e, in row slot r and column slot
        c."""
        accumulators = {acc.name: f"{acc.name}[e]" for acc in self.spec.accumulators}
        placed = self.plan.placements
        return accumulators | {name: placement.element.format(name) for name, placement in placed.items()}

    def _header(self) -> list[str]:
        module, template = self.config.target.template.split(":")
        scales, product = self._scales(), self.spec.product
        names = [each.name for each in scales] + [load.name for load in self.spec.loads]
        width, kind = max(map(len, names), default=0), 7 if scales else 6
        lines = ['"""' + self.formula.replace("\n", "\n   "), ""]
        for each in scales:
            blocks = product.a_scaling if each.role is Role.A_SCALES else product.b_scaling
            lines.append(
                f"    {each.name:<{width}}  {blocks.value:<{kind}}  {each.dtype.value:<4}  "
                f"{_SCALE_PLACES[blocks.by_mma]}"
            )
        for load in self.spec.loads:
            placement = self.plan.placements[load.name]
            lines.append(
                f"    {load.name:<{width}}  {load.kind.value:<{kind}}  {load.dtype.value:<4}  "
                f"{placement.name:<14}  {placement.meaning}{_modes(load)}"
            )
        lines += [
            "",
            f"{self.name}:",
            f"{self.config.arch.value}, tile {self.config.name}, {self.alignment.words}:",
            f"{self.config.words}.",
            *_WHERE_TO_READ_ON,
            '"""',
            "",
        ]
        types = sorted({"Float32", "Int32", *self._types()})
        reductions = self.spec.reductions
        reduces = reductions or any(
            op.op != ROTATE_HALF for loop in self.chain.loops for op, _ in loop.reduced
        )
        loads = self.spec.loads
        whole = [load for load in loads if not self._is_table(load)]
        helpers = ["SmemOperand", *(["collapse_m"] if any(load.m_modes for load in whole) else [])]
        helpers += ["collapse_n"] if any(load.blocks for load in whole) else []
        helpers += ["table"] if len(whole) < len(loads) else []
        helpers += ["pair_halves"] if self._pairs() else []
        helpers += ["transpose"] if self.config.transposed else []
        enums = [*(["Axis"] if reductions else []), *(["Order"] if self._columns() else [])]
        enums += ["BColumns"] if self.config.b_columns is not BColumns.APART else []
        enums += ["Scaling"] if self.spec.product.is_block_scaled else []
        enums += ["DType"] if self.spec.product.a_scaling.by_mma else []
        enums += ["ProductKind"] if self.spec.product.kind is not ProductKind.DENSE else []
        is_split = self.config.sums_in_memory
        tiles = [*(["Rowvecs"] if self.config.rowvecs is not Rowvecs.AUTO else []), "TileConfig"]
        return [
            *lines,
            "from types import SimpleNamespace",
            "",
            "import cuda.bindings.driver as cuda",
            "import cutlass",
            "import cutlass.cute as cute",
            f"from cutlass import {', '.join(types)}",
            "",
            "from cute_backend.memory_ops import device_math as math",
            *(["from cute_backend.memory_ops import device_noise as noise"] if self._draws() else []),
            *(["from cute_backend.memory_ops import device_reduce as reduce"] if reduces else []),
            *([f"from cute_backend.spec import {', '.join(sorted(enums))}"] if enums else []),
            f"from cute_backend.planning import Arch, {', '.join(tiles)}",
            f"from cute_backend.templates.epilogue import {', '.join(helpers)}",
            *(["from cute_backend.templates.finish import Finish"] if reductions else []),
            *([f"from {self.mainloop.module} import {self.mainloop.name}"] if self.mainloop else []),
            f"from {module} import {template}",
            *(["from cute_backend.templates.split_sums import SplitGemm"] if is_split else []),
        ]

    def _types(self) -> set[str]:
        stored = {register_type(self.chain.stored(store)[1]) for store in self.spec.stores}
        loaded = {register_type(load.dtype) for load in self.spec.loads}
        memory = {CUTE_TYPES[load.dtype] for load in self.spec.loads}
        memory |= {CUTE_TYPES[store.dtype] for store in self.spec.stores}
        constants = {"Boolean"} if any(", Boolean)" in line for line in self.chain.statements) else set()
        kept = {kind for loop in self.chain.loops for kind in loop.kept.values()}
        return stored | loaded | memory | constants | kept

    def _scales(self) -> tuple[Argument, ...]:
        """The arguments with scales of blocks."""
        return of_role(self.arguments, Role.A_SCALES) + of_role(self.arguments, Role.B_SCALES)

    def _draws(self) -> bool:
        return any(op.op == GUMBEL.name for op in self.spec.ops)

    def _columns(self) -> bool:
        planes = [load.order for load in self.plan.in_ring(Ring.PLANE, self.spec)]
        planes += [store.order for store in self.spec.planes if store.name in self.plan.shared_stores]
        return Order.COLUMN in planes

    def _epilogue(self) -> list[str]:
        placed = self.plan
        staged = [_operand(load.name, load.dtype) for load in placed.in_ring(Ring.ROW, self.spec)]
        planes = placed.in_ring(Ring.PLANE, self.spec)
        shared_loads = [_operand(load.name, load.dtype, load.order, load.is_table) for load in planes]
        shared_stores = [
            _operand(store.name, store.dtype, store.order)
            for store in self.spec.planes
            if store.name in self.plan.shared_stores
        ]
        return [
            "class Epilogue:",
            f"    loads = {_names(load.name for load in self.spec.loads)}",
            f"    stores = {_names(written(self.spec.stores))}",
            *_tuple("staged", staged),
            *_tuple("shared_loads", shared_loads),
            *_tuple("shared_stores", shared_stores),
            "",
            *self._stage(),
            *self._begin(),
            "",
            *self._visit(),
            *(["", *end] if (end := emit_reductions.end(self.spec.stores)) else []),
        ]

    def _stage(self) -> list[str]:
        """The hook of the staging warp, if any rowvec is staged."""
        staged = self.plan.in_ring(Ring.ROW, self.spec)
        return [*_method("stage(self, tile, glob, smem)"), *reads.stage(staged), ""] if staged else []

    def _begin(self) -> list[str]:
        lines = _method("begin(self, tile, glob)")
        held = []
        for load in self.spec.loads:
            if read := reads.begin(load, self.plan.placements[load.name]):
                lines += read
                held.append(f"{load.name}={load.name}")
        for store in filter(emit_reductions.held, self.spec.stores):
            lines += emit_reductions.begin(store)
            held.append(f"{store.name}={store.name}")
        return [*lines, f"        return SimpleNamespace({', '.join(held)})"]

    def _visit(self) -> list[str]:
        accumulators = ", ".join(acc.name for acc in self.spec.accumulators)
        lines = _method(f"visit(self, sub, {accumulators}, glob, held, smem)")
        lines += reads.visit(self.spec, self.plan)
        for store in self.spec.stores:
            kind = register_type(self.chain.stored(store)[1])
            lines.append(f"        {store.name} = cute.make_rmem_tensor(sub.elements, {kind})")
        for index, loop in enumerate(self.chain.loops):
            stores = [store for store in self.spec.stores if self.chain.loop_of(store) == index]
            lines += self._loop(loop, stores)
        for store in self.spec.stores:
            lines += self._store(store) if store.reduce is None else emit_reductions.take(store)
        return lines

    def _loop(self, loop: Loop, stores: list[Store]) -> list[str]:
        """Returns the lines of a loop over a subtile's elements, of the values that it keeps for later loops,
        and of the blocks that are reduced after it."""
        kept = {f"{name}_kept": kind for name, kind in loop.kept.items()}
        kept |= {f"{op.name}_of": "Float32" for op, _ in loop.reduced}
        body = []
        for statement in loop.statements:
            body.append(statement)
            if (name := statement.split(" ", 1)[0]) in loop.kept:
                body.append(f"{name}_kept[e] = {name}")
        body += [f"{op.name}_of[e] = {text}" for op, text in loop.reduced]
        behind = [emit_reductions.of_blocks(op) for op, _ in loop.reduced]
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
            line = self.lines.get(re.split(r"\W", statement, maxsplit=1)[0])
            shown.append(f"{statement:<{width}}  # {line}" if line else statement)
        return shown

    def _store(self, store: Store) -> list[str]:
        _, _, overflow = self.chain.stored(store)
        rule = ", saturate=False" if overflow is Overflow.NONFINITE else ""
        narrowed = f"math.narrow({store.name}, {CUTE_TYPES[store.dtype]}{rule})"
        if store.name in self.plan.shared_stores:
            return [f"        sub.copy_to({narrowed}, smem.{store.name})"]
        lines = [f"        {store.name}_glob = glob.{store.name}", f"        {store.name}_rmem = {narrowed}"]
        lines.append("        for e in cutlass.range_constexpr(sub.elements):")
        if block := store.block:
            return [
                *lines,
                f"            if cutlass.const_expr(sub.begins_block(e, {block})):",
                "                row, column, inside = sub.target(e)",
                f"                if inside & (column % {block} == 0):",
                f"                    {store.name}_glob[row, column // {block}] = {store.name}_rmem[e]",
            ]
        return [
            *lines,
            "            row, column, inside = sub.target(e)",
            "            if inside:",
            f"                {store.name}_glob[row, column] = {store.name}_rmem[e]",
        ]

    def _launch(self) -> list[str]:
        views, reductions = self._views(), self.spec.reductions
        template = self.config.target.template.split(":")[1]
        options = (
            f", {self.mainloop.name}({self.mainloop.arguments(self.config, self.spec)})"
            if self.mainloop
            else ""
        )
        if (kind := self.spec.product.kind) is not ProductKind.DENSE:
            options += f", kind=ProductKind.{kind.name}"
        made = f"SplitGemm({template}, " if self.config.sums_in_memory else f"{template}("
        return [
            f"gemm = {made}Epilogue(), {_config(self.config)}{options})",
            *(self._finishing_kernel() if reductions else []),
            "",
            "",
            "@cute.jit",
            "def launch(",
            *(f"    {argument.name}: cute.Tensor," for argument in self.arguments),
            "    max_active_clusters: Int32,",
            "    stream: cuda.CUstream,",
            "):",
            *(f"    {name} = {text}" for name, text in views.values()),
            *self._calls({argument: name for argument, (name, _) in views.items()}),
        ]

    def _finishing_kernel(self) -> list[str]:
        results = []
        for store in self.spec.reductions:
            _, _, overflow = self.chain.stored(store)
            results.append(emit_reductions.result(store, CUTE_TYPES[store.dtype], overflow))
        return ["finish = Finish(", "    gemm.config,", *(f"    {result}," for result in results), ")"]

    def _views(self) -> dict[str, tuple[str, str]]:
        """The arguments of `launch` that the kernel takes as views: each view's name and its expression.

        Several modes of M, and blocks of columns, become one axis. If halves of blocks are rotated, each half
        provides half of a subtile's columns, unless subtiles are whole blocks. If D^T = B^T A^T is computed,
        all arguments of two axes are transposed.
        """
        views = {}
        for load in self.spec.loads:
            text = f"collapse_m({load.name}, {len(load.m_modes)})" if load.m_modes else load.name
            if load.blocks:
                text = f"collapse_n({text})"
            if self._is_table(load):
                text = f"table({load.name})"
            if text != load.name:
                views[load.name] = (f"{load.name}_plane", text)
        if self._pairs():
            sizes = f"{self.spec.reordered_columns}, {self.config.subtile_n // 2}"
            for name in self._columned():
                text = views[name][1] if name in views else name
                views[name] = (f"{name}_paired", f"pair_halves({text}, {sizes})")
        if self.config.transposed:
            for name in (argument.name for argument in self.arguments if len(argument.dims) == 2):
                views[name] = (f"{name}_t", f"transpose({views[name][1] if name in views else name})")
        return views

    def _is_table(self, load: Load) -> bool:
        """Whether TMA brings boxes of a table."""
        return load.is_table and self.plan.placements[load.name].ring is Ring.PLANE

    def _pairs(self) -> bool:
        """Whether rotated blocks have more columns than a subtile."""
        return self.spec.reordered_columns > self.config.subtile_n

    def _columned(self) -> list[str]:
        """The names of the arguments that have the plane's columns."""
        columns = (Extent.N, Extent.BLOCK)
        return [each.name for each in self.arguments if any(dim.extent in columns for dim in each.dims)]

    def _calls(self, views: dict[str, str]) -> list[str]:
        """The body of `launch` after `views` of its arguments are made."""

        def names(arguments: Iterable[str]) -> str:
            return ", ".join(views.get(name, name) for name in arguments)

        (a,), bs = of_role(self.arguments, Role.A), of_role(self.arguments, Role.B)
        if self.config.transposed:
            (a,), bs = bs, (a,)
        reductions = self.spec.reductions
        planes = names(store.name for store in self.spec.stores if store.reduce is None)
        scales = names(argument.name for argument in self._scales())
        further = f", [{scales}]" if scales else ""
        groups = of_role(self.arguments, Role.OFFSETS)
        further += "".join(f", {argument.name}={argument.name}" for argument in groups)
        loads, products = names(load.name for load in self.spec.loads), names(b.name for b in bs)
        written = f"[{planes}]"
        if reductions:
            written = f"[{planes}, *partials]" if planes else "partials"
        written += f", {WORKSPACE}" if self.config.sums_in_memory else ""
        gemm = (
            f"    gemm({names([a.name])}, [{products}], [{loads}], {written}, "
            f"max_active_clusters, stream{further})"
        )
        if not reductions:
            return [gemm]
        m = " * ".join(f"{names([a.name])}.shape[{axis}]" for axis in range(len(a.dims) - 1))
        if self.spec.product.kind is ProductKind.K_GROUPED:
            m = f"{groups[0].name}.shape[0] * {m}"
        b = bs[0]
        n = f"{names([b.name])}.shape[{len(b.dims) - 1}]"
        n += " // 2" if b.dims[-1].extent is Extent.COLUMNS else ""
        return [
            f"    m, n = {m}, {n}",
            f"    partials = finish.partials({WORKSPACE}, m, n)",
            gemm,
            f"    finish(partials, [{names(store.name for store in reductions)}], m, n, stream)",
        ]


_SCALE_PLACES = {
    False: f"{'k_tile_ring':<14}  copied to shared memory ahead of each k tile, by element",
    True: f"{'tensor_memory':<14}  brought by TMA with each k tile, and copied there for the MMA",
}
"""Where block scales are kept and how they are copied there. The key says whether the MMA applies them."""


def _modes(load: Load) -> str:
    """The modes of M or N along which a load varies, in words."""
    text = f", of M modes ({', '.join(mode.value for mode in load.m_modes)})" if load.m_modes else ""
    if (blocks := load.blocks) is not None:
        text += f", of blocks of {blocks.columns} columns ({blocks.outer.value}, {blocks.inner.value})"
    return text


def _method(signature: str) -> list[str]:
    return ["    @cute.jit", f"    def {signature}:"]


def _names(names: Iterable[str]) -> str:
    quoted = [f'"{name}"' for name in names]
    return f"({', '.join(quoted)}{',' if len(quoted) == 1 else ''})"


def _tuple(name: str, items: Sequence[str]) -> list[str]:
    if not items:
        return [f"    {name} = ()"]
    return [f"    {name} = (", *(f"        {item}," for item in items), "    )"]


def _operand(name: str, dtype: DType, order: Order | None = Order.ROW, repeats: bool = False) -> str:
    suffix = ", Order.COLUMN" if order is Order.COLUMN else ", repeats=True" if repeats else ""
    return f'SmemOperand("{name}", {CUTE_TYPES[dtype]}{suffix})'


def _config(config: TileConfig) -> str:
    """The configuration as a Python expression, leaving out what is default."""
    defaults = TileConfig(config.arch, config.tile_m, config.tile_n)
    extras = [
        f", {field.name}={_literal(value)}"
        for field in fields(config)
        if (value := getattr(config, field.name)) != getattr(defaults, field.name)
    ]
    return f"TileConfig(Arch.{config.arch.name}, {config.tile_m}, {config.tile_n}{''.join(extras)})"


def _literal(value: Any) -> str:
    return f"{type(value).__name__}.{value.name}" if isinstance(value, Enum) else repr(value)
