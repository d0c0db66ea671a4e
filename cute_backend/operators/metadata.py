"""The metadata of our operators: names, tiles, schedules, and the arguments that each takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass.operators import OperatorMetadata, Status, TargetSm
from cutlass.operators.metadata import (
    BLASDesignMetadata,
    DenseTensorConstraints,
    EpilogueMetadata,
    GemmOperandsMetadata,
    Sm100DesignMetadata,
)
from cutlass.operators.mma import AmpereMma, BlackwellTcgen05Mma, HopperWgmma
from cutlass.operators.utils.dtype import cutlass_type_from_torch_type

from cute_backend.errors import UsageError
from cute_backend.memory_ops.schedule import kernel_formula
from cute_backend.numerics import TORCH_DTYPES
from cute_backend.operators.epilogue_function import Epilogue, convert
from cute_backend.planning import Alignment, Arch, TileConfig, tile_k
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.signature import TMA_ALIGN
from cute_backend.spec import DType, Major, Order

CUTLASS_TYPES = {
    dtype: cutlass_type_from_torch_type(torch_dtype) for dtype, torch_dtype in TORCH_DTYPES.items()
}

TARGETS = {arch: TargetSm(arch.value.removeprefix("sm_")) for arch in Arch}
"""The only target that each architecture's kernels are compiled for."""


@dataclass(kw_only=True)
class FusedDesign(BLASDesignMetadata):
    """The tiles and the schedule of a kernel.

    `config` is the whole configuration, with `pingpong`, `subtile_n` and the raster. `fast_accum` is whether
    fp8 sums stay in the tensor cores; otherwise they are promoted to fp32 after each k tile. `aligned` is
    whether the epilogue's planes move by TMA, which their addresses must permit.
    """

    config: TileConfig
    fast_accum: bool
    aligned: bool


class HopperDesign(FusedDesign):
    """The design of a wgmma kernel."""


class AmpereDesign(FusedDesign):
    """The design of a kernel on mma.sync."""


@dataclass(kw_only=True)
class BlackwellDesign(FusedDesign, Sm100DesignMetadata):
    """The design of a tcgen05 kernel."""


Design = Callable[[Kernel], FusedDesign]


@dataclass(kw_only=True)
class FusedMetadata(OperatorMetadata):
    """The metadata of one operator, and its kernel."""

    kernel: Kernel


def metadata_of(
    operator: type, design: Design, kernel: Kernel, out: DType, order: Order, epilogue: FusedEpilogue | None
) -> FusedMetadata:
    """The metadata of a kernel with this design, for an `out` of this dtype and order."""
    return FusedMetadata(
        operator_name=_name(kernel, out, order, epilogue),
        operator_class=operator,
        supported_targets=[TARGETS[kernel.arch]],
        operands=_operands(kernel, out, order),
        design=design(kernel),
        epilogue=epilogue,
        kernel=kernel,
    )


def _name(kernel: Kernel, out: DType, order: Order, epilogue: FusedEpilogue | None) -> str:
    """A name that is unique among our operators, such as
    `cute_backend.sm90a_tnt_Ae4m3_Be4m3_outbf16_accf32_tile128x128_cluster2x1_pingpong`.

    The layouts are those of A, B and out, `t` for row-major and `n` for column-major, as in the rest of the
    registry; an epilogue is named by its spec.
    """
    product, config = kernel.plan.spec.product, kernel.plan.tile
    row_major = (product.a_major is Major.K, product.b_major is not Major.K, order is Order.ROW)
    words = [
        kernel.arch.value.replace("_", ""),
        "".join("t" if each else "n" for each in row_major),
        f"A{product.a_dtype.value}",
        f"B{product.b_dtype.value}",
        f"out{out.value}",
        "accf32",
        f"tile{config.tile_m}x{config.tile_n}",
        f"cluster{config.cluster_m}x{config.cluster_n}",
    ]
    words += ["2cta"] if config.ctas == 2 else []
    words += ["pingpong"] if config.pingpong else []
    words += [f"split{config.split_k}"] if config.split_k > 1 else []
    words += ["transposed"] if config.transposed else []
    words += [f"occupancy{config.occupancy}"] if config.occupancy > 1 else []
    words += ["halves"] if config.column_groups > 1 else []
    words += ["shallow"] if config.shallow else []
    words += [f"by{config.subtile_n}"] if config.subtile_n != TileConfig.subtile_n else []
    words += [] if product.fast_accum else ["promoted"]
    words += [] if kernel.plan.alignment is Alignment.TMA else ["unaligned"]
    words += [] if epilogue is None else [f"epilogue{epilogue.converted.spec.key}"]
    return "cute_backend." + "_".join(words)


def _operands(kernel: Kernel, out: DType, order: Order) -> GemmOperandsMetadata:
    """The constraints of a kernel on A, B and out."""
    a, b, *_ = kernel.plan.arguments
    return GemmOperandsMetadata(
        A=_dense(a.dtype, a.unit == 1, aligned=True),
        B=_dense(b.dtype, b.unit == 1, aligned=True),
        out=_dense(out, order is Order.ROW, aligned=kernel.plan.alignment is Alignment.TMA),
        accumulator_type=cutlass.Float32,
    )


def _dense(dtype: DType, row_major: bool, *, aligned: bool) -> DenseTensorConstraints:
    return DenseTensorConstraints(
        dtype=CUTLASS_TYPES[dtype],
        stride=(0, 0, 1) if row_major else (0, 1, 0),
        divisibility=TMA_ALIGN * 8 // dtype.bits if aligned else 1,
    )


def ampere_design(kernel: Kernel) -> AmpereDesign:
    """The design of a kernel on mma.sync."""
    return AmpereDesign(mma_instruction_type=AmpereMma, **_common(kernel))


def hopper_design(kernel: Kernel) -> HopperDesign:
    """The design of a wgmma kernel."""
    return HopperDesign(mma_instruction_type=HopperWgmma, **_common(kernel))


def blackwell_design(kernel: Kernel) -> BlackwellDesign:
    """The design of a tcgen05 kernel."""
    return BlackwellDesign(
        mma_instruction_type=BlackwellTcgen05Mma,
        use_2cta_mma=kernel.plan.tile.ctas == 2,
        use_tma_store=bool(kernel.plan.shared_stores),
        **_common(kernel),
    )


def _common(kernel: Kernel) -> dict[str, Any]:
    spec, config = kernel.plan.spec, kernel.plan.tile
    return {
        "tile_shape": (config.tile_m, config.tile_n, tile_k(spec.product.a_dtype)),
        "cluster_shape": (config.cluster_size // config.cluster_n, config.cluster_n, 1),
        "config": config,
        "fast_accum": spec.product.fast_accum,
        "aligned": kernel.plan.alignment is Alignment.TMA,
    }


class FusedEpilogue(EpilogueMetadata):
    """The epilogue that an operator was made for. It takes arguments with the same epilogue."""

    def __init__(self, arguments: Any, converted: Epilogue) -> None:
        super().__init__(arguments)
        self.converted = converted

    def supports(self, args: Any) -> Status:
        """Whether the arguments' epilogue converts to the same spec, from operands of the same names."""
        if args.epilogue is None:
            return Status.fail("the operator fuses an epilogue, but the arguments have none")
        m, n, *_ = args.problem_size
        try:
            other = convert(args.epilogue, m, n)
        except UsageError as error:
            return Status.fail(error)
        if other != self.converted:
            return Status.fail(
                f"the operator computes {_named(self.converted)}, but the arguments ask for {_named(other)}"
            )
        return Status.success()


def _named(epilogue: Epilogue) -> str:
    inputs = ", ".join(f"{each.name}" for each in epilogue.inputs)
    return f"[{kernel_formula(epilogue.spec)}] of ({inputs})".replace("\n", "; ")
