"""The text of a kernel's module, which people read, the DSL compiles and golden tests pin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from enum import Enum
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from cute_backend.errors import UsageError
from cute_backend.formula import formula
from cute_backend.kinds.axes import Call, Extent
from cute_backend.memory_ops import emit_reductions
from cute_backend.memory_ops.emit_epilogue import EpilogueText
from cute_backend.memory_ops.reads import CUTE_TYPES
from cute_backend.memory_ops.schedule import kernel_names, renamed
from cute_backend.memory_ops.simplify import simplify
from cute_backend.planning import Plan, Rowvecs, Stages, TileConfig, unserved
from cute_backend.planning.naming import entry_name
from cute_backend.signature import COUNTERS, WORKSPACE, Argument, Use, of_use
from cute_backend.spec import BColumns, DType, EpilogueSpec, ProductKind, Scales

_WHERE_TO_READ_ON = (
    "templates/epilogue.py documents each method, and when it runs. Ops that are not in the formula come",
    "from memory_ops/simplify.py, which replaces ops by cheaper ones.",
)


_GROUPED_ROWS = (
    "Rows lie in groups. If the columns of a program's product do, this kernel computes the transposed one:",
    "its rows are the columns of the program's result.",
)


def emit(plan: Plan, lines: Mapping[str, str] = MappingProxyType({})) -> str:
    """The module of a planned kernel.

    It defines the class `Epilogue`, the kernel `gemm` and the function `launch(a, <bs>, <loads>, <stores>,
    max_active_clusters, stream)`, whose arguments carry the spec's names. If a store reduces, there is also a
    kernel `finish`, and an argument `workspace` after the stores, in which `gemm` leaves partials for it.
    `workspace` also holds the sums of parts of K, if the tile leaves them for `gemm`'s own second kernel.
    If the last tile of a row may finish its reductions, an argument `counters` follows, and `finish` is only
    launched where they are not counted.
    `lines` maps names of ops and stores of the spec to lines of a program, such as "model.py:12". They become
    comments behind the statements, for people to read; kernels are compiled without them. Raises UsageError
    if the architecture has no instructions for the spec.
    """
    if (why := unserved(plan.spec, plan.tile.target)) is not None:
        raise UsageError(why)
    names, folded = kernel_names(plan.spec), dict[float, str]()
    simple = renamed(simplify(plan.computed, folded), names)
    shown = {names.get(name, name): line for name, line in _behind(names, lines)}
    epilogues = [
        EpilogueText(name, segment, folded, plan, places, shown, _of_segment(plan.arguments, index, segment))
        for index, (name, segment, places) in enumerate(
            zip(_class_names(simple), simple.segments, plan.segments, strict=True)
        )
    ]
    return _Module(simple, formula(plan.spec, names), plan, epilogues).text()


def _class_names(spec: EpilogueSpec) -> list[str]:
    """The names of the epilogues' classes: one, or one for each segment."""
    count = len(spec.segments)
    return ["Epilogue"] if count == 1 else [f"Epilogue{index}" for index in range(count)]


def _of_segment(arguments: Sequence[Argument], index: int, segment: EpilogueSpec) -> list[Argument]:
    """The arguments of a segment: all but the B and the operands of others."""
    own = {load.name for load in segment.loads} | {store.name for store in segment.stores}
    others = [
        b for i, b in enumerate(of_use(arguments, Use.B)) if i != index and len(segment.accumulators) == 1
    ]
    return [
        each
        for each in arguments
        if each not in others and (each.use not in (Use.LOAD, Use.STORE) or each.name in own)
    ]


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
    """The text of a module, for a spec that `simplify` has made and the text of each segment's epilogue."""

    def __init__(
        self, spec: EpilogueSpec, formula: str, plan: Plan, epilogues: Sequence[EpilogueText]
    ) -> None:
        self.spec, self.formula, self.plan, self.epilogues = spec, formula, plan, epilogues
        self.tile, self.arguments, self.mainloop = plan.tile, plan.arguments, plan.mainloop

    def text(self) -> str:
        classes = [line for epilogue in self.epilogues for line in ("", "", *epilogue.text())]
        return "\n".join([*self._header(), *classes, "", "", *self._launch(), ""])

    def _header(self) -> list[str]:
        beside, product = self._beside(), self.spec.product
        names = [each.name for each, _ in beside] + [load.name for load in self.spec.loads]
        width, kind = max(map(len, names), default=0), 7 if beside else 6
        lines = ['"""' + self.formula.replace("\n", "\n   "), ""]
        for each, of in beside:
            lines.append(f"    {each.name:<{width}}  {of.words:<{kind}}  {each.dtype.value:<4}  {of.place}")
        placements, strides = self.plan.placements, [load.words() for load in self.spec.loads]
        for load, along in zip(self.spec.loads, strides, strict=True):
            placement = placements[load.name]
            lines.append(
                f"    {load.name:<{width}}  {load.kind.value:<{kind}}  {load.dtype.value:<4}  "
                f"{placement.name:<14}  {placement.meaning}{along}"
            )
        lines += [
            "",
            f"{entry_name(self.plan)}:",
            f"{self.plan.arch.value}, tile {self.tile.name}, {self.plan.alignment.words}:",
            f"{self.tile.words}.",
            *_WHERE_TO_READ_ON,
            *(["Strides are 0, 1 or s, any other stride."] if any(strides) else []),
            *(_GROUPED_ROWS if product.kind is ProductKind.GROUPED else []),
            '"""',
            "",
        ]
        return [*lines, *self._imports()]

    def _imports(self) -> list[str]:
        module, template = self.tile.target.template.split(":")
        epilogues, reductions = self.epilogues, self.spec.reductions
        types = {"Float32", "Int32"}.union(*(each.types() for each in epilogues))
        after = "\n".join(emit_reductions.after(self.spec))
        types |= {"Boolean"} if ", Boolean)" in after else set()
        reduces = reductions or any(each.reduces_blocks() for each in epilogues)
        helpers = ["SmemOperand"]
        for steps in zip(*(each.steps_of_views() for each in epilogues), strict=True):
            helpers += sorted({call for step in steps for *_, calls in step for call, _ in calls})
        has_columns = any(each.has_columns() for each in epilogues)
        enums = [*(["Axis"] if reductions else []), *(["Order"] if has_columns else [])]
        enums += ["BColumns"] if self.tile.b_columns is not BColumns.APART else []
        enums += self.mainloop.names if self.mainloop else ()
        enums += ["ProductKind"] if self.spec.product.kind is not ProductKind.DENSE else []
        draws = any(each.draws() for each in epilogues)
        is_split, several = self.tile.sums_in_memory, len(epilogues) > 1
        sweeps = {name for each in epilogues for name in each.sweeps()}
        tiles = [*(["Rowvecs"] if self.tile.rowvecs is not Rowvecs.AUTO else []), "Stages", "TileConfig"]
        return [
            "from types import SimpleNamespace",
            "",
            "import cuda.bindings.driver as cuda",
            "import cutlass",
            "import cutlass.cute as cute",
            f"from cutlass import {', '.join(sorted(types))}",
            "",
            "from cute_backend.memory_ops import device_math as math",
            *(["from cute_backend.memory_ops import device_noise as noise"] if draws else []),
            *(["from cute_backend.memory_ops import device_reduce as reduce"] if reduces else []),
            *self._of_places(),
            *([f"from cute_backend.spec import {', '.join(sorted(enums))}"] if enums else []),
            f"from cute_backend.planning import Arch, {', '.join(sorted(tiles))}",
            f"from cute_backend.templates.drain import {', '.join(sorted(sweeps))}",
            f"from cute_backend.templates.epilogue import {', '.join(helpers)}",
            *(["from cute_backend.templates.finish import Finish"] if reductions else []),
            *([f"from {self.mainloop.module} import {self.mainloop.name}"] if self.mainloop else []),
            *([f"from cute_backend.templates.segments import {self._segments}"] if several else []),
            f"from {module} import {template}",
            *(["from cute_backend.templates.split_sums import SplitGemm"] if is_split else []),
        ]

    def _beside(self) -> list[tuple[Argument, Scales]]:
        """The arguments beside A and every B."""
        return [
            (argument, scales)
            for role, (_, scales) in zip((Use.A_SCALES, Use.B_SCALES), self.spec.scaled, strict=True)
            for argument in of_use(self.arguments, role)
        ]

    def _launch(self) -> list[str]:
        views = {name: view for epilogue in self.epilogues for name, view in epilogue.views().items()}
        reductions = self.spec.reductions
        template = self.tile.target.template.split(":")[1]
        options = f", {self.mainloop.name}({self.mainloop.arguments})" if self.mainloop else ""
        if (kind := self.spec.product.kind) is not ProductKind.DENSE:
            options += f", kind=ProductKind.{kind.name}"
        made = f"SplitGemm({template}, " if self.tile.sums_in_memory else f"{template}("
        return [
            *emit_reductions.after(self.spec),
            f"gemm = {made}{self._made()}, {_config(self.tile)}, {_stages(self.plan.stages)}{options})",
            *(self._finishing_kernel() if reductions else []),
            "",
            "",
            "@cute.jit",
            "def launch(",
            *(f"    {argument.name}: cute.Tensor," for argument in self.arguments),
            "    max_active_clusters: Int32,",
            "    stream: cuda.CUstream,",
            "):",
            *(f"    {name} = {_viewed(tensor, calls)}" for tensor, (name, calls) in views.items()),
            *self._calls({argument: name for argument, (name, _) in views.items()}),
        ]

    def _made(self) -> str:
        """The epilogue of the kernel, as an expression."""
        made = [f"{epilogue.name}()" for epilogue in self.epilogues]
        if len(made) == 1:
            return made[0]
        widths = ", ".join(str(acc.segment) for acc in self.spec.accumulators)
        return f"{self._segments}([{', '.join(made)}], [{widths}])"

    @property
    def _segments(self) -> str:
        """The class of several epilogues."""
        return "RowSegments" if self.spec.product.height else "Segments"

    def _of_places(self) -> list[str]:
        """The imports of the functions that find the places of stored elements."""
        by_row = {load.name for load in self.spec.loads if load.kind.by_row}
        found = {store.form.function(store.form.positions in by_row) for store in self.spec.stores}
        found |= {"device_cache.saturated" for load in self.spec.loads if load.dtype is DType.I64}
        names = sorted(each.split(".") for each in found if each)
        return [
            f"from cute_backend.memory_ops.{module} import {', '.join(name for _, name in of)}"
            for module, of in groupby(names, key=itemgetter(0))
        ]

    def _finishing_kernel(self) -> list[str]:
        results = []
        for store in self.spec.stores:
            if (reduction := store.form.reduction) is not None:
                _, _, overflow = self.epilogues[0].chain.stored(store)
                element = CUTE_TYPES[store.dtype]
                results.append(emit_reductions.result(store, reduction, element, overflow))
        arguments = ["gemm.config", *results]
        kind, counts = self.spec.product.kind, self.plan.finishes_rows
        arguments += [f"kind=ProductKind.{kind.name}"] if counts and kind is not ProductKind.DENSE else []
        return ["finish = Finish(", *(f"    {argument}," for argument in arguments), ")"]

    def _calls(self, views: dict[str, str]) -> list[str]:
        """The body of `launch` after `views` of its arguments are made."""

        def names(arguments: Iterable[str]) -> str:
            return ", ".join(views.get(name, name) for name in arguments)

        every_a, bs = of_use(self.arguments, Use.A), of_use(self.arguments, Use.B)
        if self.tile.transposed:
            every_a, bs = bs, every_a
        a, *stacked = every_a
        reductions, counts = self.spec.reductions, self.plan.finishes_rows
        stores = [store for epilogue in self.epilogues for store in epilogue.spec.stores]
        planes = names(store.name for store in stores if store.form.reduction is None)
        scales = names(argument.name for argument, _ in self._beside())
        further = f", [{scales}]" if scales else ""
        groups = of_use(self.arguments, Use.OFFSETS)
        further += "".join(f", {argument.name}={argument.name}" for argument in groups)
        further += f", further_as=[{names(each.name for each in stacked)}]" if stacked else ""
        every = (load.name for epilogue in self.epilogues for load in epilogue.spec.loads)
        loads, products = names(every), names(b.name for b in bs)
        written = f"[{planes}]"
        if reductions:
            finished = names(reductions)
            written = f"[{planes}, *partials]" if planes else "partials"
            if counts:
                written = f"[{planes}{', ' if planes else ''}*partials, {finished}, {COUNTERS}]"
        written += f", {WORKSPACE}" if self.tile.sums_in_memory else ""
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
            f"    finish(partials, [{finished}], m, n, stream{f', {COUNTERS}' if counts else ''})",
        ]


def _viewed(tensor: str, calls: Sequence[Call]) -> str:
    """The expression of a tensor's view."""
    for function, arguments in calls:
        tensor = f"{function}({', '.join(map(str, (tensor, *arguments)))})"
    return tensor


def _config(config: TileConfig) -> str:
    """The configuration as a Python expression, leaving out what is default."""
    defaults = TileConfig(config.arch, config.tile_m, config.tile_n)
    extras = [
        f", {field.name}={_literal(value)}"
        for field in fields(config)
        if (value := getattr(config, field.name)) != getattr(defaults, field.name)
    ]
    return f"TileConfig(Arch.{config.arch.name}, {config.tile_m}, {config.tile_n}{''.join(extras)})"


def _stages(stages: Stages) -> str:
    """The stages of the rings as a Python expression, leaving out rings that are not used."""
    used = (f"{name}={count}" for name, count in asdict(stages).items() if count)
    return f"Stages({', '.join(used)})"


def _literal(value: Any) -> str:
    return f"{type(value).__name__}.{value.name}" if isinstance(value, Enum) else repr(value)
