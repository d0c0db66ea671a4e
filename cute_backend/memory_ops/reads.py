"""Writes the lines of a module that read an operand: in `begin`, in `stage` or in `visit`, as its placement
says."""

from __future__ import annotations

from collections.abc import Sequence

from cute_backend.memory_ops.statements import register_type
from cute_backend.planning import ByElement, Carrier, Placement, Placing
from cute_backend.planning.tiles import STAGED_COLUMNS
from cute_backend.spec import DType, Load

CUTE_TYPES = {
    DType.F32: "Float32",
    DType.BF16: "BFloat16",
    DType.F16: "Float16",
    DType.E4M3: "Float8E4M3FN",
    DType.E5M2: "Float8E5M2",
    DType.I8: "Int8",
    DType.U8: "Uint8",
    DType.I32: "Int32",
    DType.I64: "Int64",
    DType.BOOL: "Uint8",
    DType.E2M1X2: "Uint8",
    DType.U4X2: "Uint8",
    DType.I4X2: "Uint8",
    DType.E8M0: "Uint8",
    DType.BF16X2: "Int32",
    DType.F16X2: "Int32",
}
"""The DSL's element types in memory. A bool of torch is a byte, and kernels take two values of 4 bits, or one
E8M0 scale, as a byte, and a pair of 16-bit values as an integer."""


def begin(load: Load, placement: Placement) -> list[str]:
    """Statements by which an epilogue thread reads a load before the accumulator wait."""
    if placement.begin is None:
        return []
    if placement.part is None:
        return [*_read_by_element(load, placement.begin, _narrow(load)), *_widened(load)]
    if load.dtype.bits != 16:
        return _read_by_element(load, placement.begin, load.name)
    read = f"{load.name}_read"
    return [*_read_by_element(load, placement.begin, read), f"        {load.name} = math.pack({read})"]


def stage(loads: Sequence[Load], columns: int) -> list[str]:
    """Statements by which a warp copies the `columns` columns of a tile of vectors to shared memory. Its last
    lanes may copy columns beyond the tile, for which shared memory has room."""
    group = {load.name: "tile.group, " if load.kind.by_group else "" for load in loads}
    reads = [f"smem.{name}[column] = glob.{name}[{group[name]}tile.clamp_column(column)]" for name in group]
    count = f"tile.tile_n // {STAGED_COLUMNS}"
    if columns % STAGED_COLUMNS:
        count = f"cute.ceil_div(tile.tile_n, {STAGED_COLUMNS})"
    return [
        f"        for i in cutlass.range_constexpr({count}):",
        f"            column = tile.lane + {STAGED_COLUMNS} * i",
        *(f"            {read}" for read in reads),
    ]


def visit(loads: Sequence[Load], places: Placing) -> list[str]:
    """Statements by which a thread reads its loads for one subtile. It releases the buffers of planes to TMA
    before it waits for global memory."""
    lines = []
    for load in loads:
        if part := places.placements[load.name].part:
            lines += [f"        {_narrow(load)} = {part.format(load.name)}", *_widened(load)]
    rings = {ring: [load for load in loads if places.placements[load.name].ring is ring] for ring in Carrier}
    for load in rings[Carrier.ROW]:
        lines += _fragment(load, f"sub.row_slice(smem.{load.name})")
    for load in rings[Carrier.PLANE]:
        lines += [
            f"        {_narrow(load)} = cute.make_rmem_tensor(sub.elements, {CUTE_TYPES[load.dtype]})",
            f"        sub.copy_from(smem.{load.name}, {_narrow(load)})",
            *_widened(load),
        ]
    lines += ["        smem.release()"] if rings[Carrier.PLANE] else []
    for load in loads:
        reads, copy = places.placements[load.name].visit, places.placements[load.name].copy
        if copy is not None:
            lines += [
                f"        {_narrow(load)} = cute.make_rmem_tensor(sub.elements, {CUTE_TYPES[load.dtype]})",
                f"        sub.{copy}(glob.{load.name}, {_narrow(load)})",
                *_widened(load),
            ]
        if reads is not None:
            lines += [*_read_by_element(load, reads, _narrow(load)), *_widened(load)]
    return lines


def _read_by_element(load: Load, reads: ByElement, name: str) -> list[str]:
    """Reads of global memory by element, to registers by this name, in memory's dtype."""
    return [
        f"        {name} = cute.make_rmem_tensor({reads.count}, {CUTE_TYPES[load.dtype]})",
        f"        for {reads.slot} in cutlass.range_constexpr({reads.count}):",
        f"            {name}[{reads.slot}] = glob.{load.name}[{reads.index}]",
    ]


def _fragment(load: Load, source: str) -> list[str]:
    """A vector copy of a thread's part of a shared operand, widened to the register type."""
    name = load.name
    return [
        f"        {name}_smem = {source}",
        f"        {_narrow(load)} = cute.make_rmem_tensor({name}_smem.shape, {CUTE_TYPES[load.dtype]})",
        f"        cute.autovec_copy({name}_smem, {_narrow(load)})",
        *_widened(load),
    ]


def _narrow(load: Load) -> str:
    """The name of a load's values in memory's dtype, such as `bias_bf16`, or the load's own name if it
    is not widened."""
    is_wide = CUTE_TYPES[load.dtype] == register_type(load.dtype)
    return load.name if is_wide else f"{load.name}_{load.dtype.value}"


def _widened(load: Load) -> list[str]:
    if _narrow(load) == load.name:
        return []
    if load.dtype is DType.I64:
        return [f"        {load.name} = saturated({_narrow(load)})"]
    return [f"        {load.name} = math.widen({_narrow(load)}, {register_type(load.dtype)})"]
