"""Selects the mainloop of a kernel: a table with a row for each mainloop other than a template's default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cute_backend.planning.registers import is_promoted, k_tiles_a_step, pieces_of_sums, sets_of_sums
from cute_backend.planning.shared_memory import SumScales
from cute_backend.planning.tiles import TileConfig
from cute_backend.spec import EpilogueSpec


@dataclass(frozen=True)
class Mainloop:
    """A mainloop of a kernel: a class of the templates, by its module and name, and the arguments of its
    constructor, as Python source."""

    module: str
    name: str
    arguments: str


@dataclass(frozen=True)
class _Row:
    """A mainloop class, the kernels that use it, on any architecture, and its arguments for each of them."""

    module: str
    name: str
    serves: Callable[[TileConfig, EpilogueSpec], bool]
    arguments: Callable[[TileConfig, EpilogueSpec], str] = lambda config, spec: ""


def _is_block_scaled(config: TileConfig, spec: EpilogueSpec) -> bool:
    return _scales(config, spec) and is_promoted(config, spec)


def _is_scaled_in_tensor_memory(config: TileConfig, spec: EpilogueSpec) -> bool:
    in_registers = config.target.accumulators.in_registers
    return _scales(config, spec) and SumScales.of(spec) is not None and not in_registers


def _is_scaled_by_mma(config: TileConfig, spec: EpilogueSpec) -> bool:
    return _scales(config, spec) and spec.product.a_scaling.by_mma


def _scales(config: TileConfig, spec: EpilogueSpec) -> bool:
    """Whether the target scales such blocks."""
    return {spec.product.a_scaling, spec.product.b_scaling} <= config.target.scalings


def _by_warpgroups(config: TileConfig, spec: EpilogueSpec) -> bool:
    return is_promoted(config, spec) and config.target.planes_by_tma


def _by_warps(config: TileConfig, spec: EpilogueSpec) -> bool:
    return is_promoted(config, spec) and not config.target.planes_by_tma and not spec.product.is_block_scaled


def _converts_by_warpgroups(config: TileConfig, spec: EpilogueSpec) -> bool:
    return config.converts and config.target.planes_by_tma


def _converts_by_warps(config: TileConfig, spec: EpilogueSpec) -> bool:
    return config.converts and not config.target.planes_by_tma


def _weight(config: TileConfig, spec: EpilogueSpec) -> str:
    groups, given = spec.product.weight_groups, [f"DType.{spec.product.stored.name}"]
    if groups is not None:
        dtypes = (groups.scale, groups.product, groups.zero, groups.difference)
        names = [f"DType.{dtype.name}" for dtype in dtypes if dtype is not None]
        given.append(f"WeightGroups({', '.join([str(groups.values), *names])})")
    return ", ".join(given)


def _weight_by_bits(config: TileConfig, spec: EpilogueSpec) -> str:
    """Without conversions of fp8, bits are moved."""
    by_bits = spec.product.stored.is_fp8 and not config.target.fp8
    return _weight(config, spec) + ", by_bits=True" * by_bits


def _blocks(config: TileConfig, spec: EpilogueSpec) -> str:
    pieces = pieces_of_sums(config, spec)
    in_pieces = f", pieces={pieces}" if pieces > 1 else ""
    sets, k_tiles = sets_of_sums(config, spec), k_tiles_a_step(config, spec)
    return f"{_blocks_of_both(config, spec)}, sets={sets}, k_tiles={k_tiles}{in_pieces}"


def _blocks_of_both(config: TileConfig, spec: EpilogueSpec) -> str:
    return f"Scaling.{spec.product.a_scaling.name}, Scaling.{spec.product.b_scaling.name}"


def _format(config: TileConfig, spec: EpilogueSpec) -> str:
    return f"Scaling.{spec.product.a_scaling.name}, DType.{spec.product.a_dtype.name}"


MAINLOOPS = (
    _Row("cute_backend.templates.converted", "Sm90Converted", _converts_by_warpgroups, _weight),
    _Row("cute_backend.templates.warp_converted", "Sm80Converted", _converts_by_warps, _weight_by_bits),
    _Row("cute_backend.templates.block_scaled", "Sm90BlockScaled", _is_block_scaled, _blocks),
    _Row(
        "cute_backend.templates.partial_sums",
        "Sm100BlockScaled",
        _is_scaled_in_tensor_memory,
        _blocks_of_both,
    ),
    _Row("cute_backend.templates.mma_scaled", "Sm100MmaScaled", _is_scaled_by_mma, _format),
    _Row("cute_backend.templates.warp_mainloop", "Sm80Promoted", _by_warps),
    _Row("cute_backend.templates.mainloop", "Sm90Promoted", _by_warpgroups),
)
"""The first row that serves a kernel is its mainloop."""


def mainloop_of(spec: EpilogueSpec, config: TileConfig) -> Mainloop | None:
    """Returns the mainloop of a kernel that computes a spec, or None if it uses its template's own, as a
    kernel does whose architecture can't serve the spec (`served.unserved`)."""
    found = next((row for row in MAINLOOPS if row.serves(config, spec)), None)
    return None if found is None else Mainloop(found.module, found.name, found.arguments(config, spec))
