"""One's own kernel in the registry of CUTLASS Operators: an FP64 GEMM, found, filtered, compiled and run.

    python examples/operators_fp64_gemm.py

compiles for Ampere, Hopper and Blackwell on any machine, and runs where there is a GPU. Needs the extra
`operators`; docs/api.md goes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import cutlass
import cutlass.operators as ops
import torch
from cutlass.cute.runtime import make_fake_stream
from cutlass.operators.metadata import BLASDesignMetadata, DenseTensorConstraints, GemmOperandsMetadata
from cutlass.operators.providers.cutedsl import CuteDslOperator
from cutlass.operators.utils.device import to_cuda_stream
from cutlass.operators.utils.tensor import normalized_major_stride, strides_to_layout_string
from operators_fp64_gemm_kernel import Fp64GemmKernel

TILES = ((32, 32), (16, 16))
"""The tiles that the kernel is offered with: all a thread block's worth of threads, and a quarter."""

ROW_MAJOR, COLUMN_MAJOR = (0, 0, 1), (0, 1, 0)
"""Strides as the registry writes them: 1 where a tensor of (L, rows, columns) is contiguous, 0 elsewhere."""

Strides = tuple[int, int, int]


@ops.CuTeDSLProvider.register
class Fp64GemmOperator(CuteDslOperator):
    """The interface of the kernel: which arguments it is for, and how it is compiled and run."""

    supported_args_type = ops.GemmArguments
    designed_for_min_cc = 80

    def __init__(self, metadata: ops.OperatorMetadata) -> None:
        super().__init__(metadata)
        self.kernel = Fp64GemmKernel(metadata.design.tile_shape[:2])

    # Discovery

    @classmethod
    def _generate_operators(
        cls,
        metadata_filter: Callable[[ops.OperatorMetadata], bool],
        epilogue_args: ops.EpilogueArguments | None = None,
        target_sm: ops.TargetSm | None = None,
        args: ops.GemmArguments | None = None,
    ) -> list[Fp64GemmOperator]:
        if epilogue_args is not None:
            return []
        layouts = product((ROW_MAJOR, COLUMN_MAJOR), repeat=3) if args is None else _layouts(args)
        described = (_metadata(cls, tile, layout) for layout in layouts for tile in TILES)
        return [cls(metadata) for metadata in described if metadata_filter(metadata)]

    def _supports(self, args: ops.GemmArguments, target_sm: ops.TargetSm | None = None) -> ops.Status:
        for name, operand in (("A", args.A), ("B", args.B), ("out", args.out)):
            if len(operand.shape) != 3:
                return ops.Status.fail(f"{name} has {len(operand.shape)} modes; the kernel takes 3")
            if not _is_compact(operand):
                return ops.Status.fail(f"{name} has gaps between its elements: strides {operand.stride}")
        return ops.Status.success()

    # Compilation and launch

    def _compile(
        self, args: ops.GemmArguments, target_sm: ops.TargetSm | None = None
    ) -> ops.CompiledArtifact:
        tensors = (args.A.tensor, args.B.tensor, args.out.tensor)
        return self.cute_compile(self.kernel, *tensors, make_fake_stream(), target_sm=target_sm)

    def _run(
        self,
        args: ops.GemmArguments,
        compiled_artifact: ops.CompiledArtifact,
        stream: Any,
        workspace: ops.workspace.Workspace | None = None,
    ) -> None:
        tensors = (args.A.tensor, args.B.tensor, args.out.tensor)
        self.cute_run(compiled_artifact.compiled_obj, *tensors, to_cuda_stream(stream))


def _layouts(args: ops.GemmArguments) -> Iterator[tuple[Strides, Strides, Strides]]:
    """The one layout that arguments have, if the kernel takes them."""
    operands = (args.A, args.B, args.out)
    if not all(isinstance(each, ops.DenseTensor) and each.dtype is cutlass.Float64 for each in operands):
        return
    a, b, out = (
        normalized_major_stride(each.shape, each.stride, prepend_zeros_to_rank=3) for each in operands
    )
    if {a, b, out} <= {ROW_MAJOR, COLUMN_MAJOR}:
        yield a, b, out


def _is_compact(operand: ops.DenseTensor) -> bool:
    """Whether the modes of an operand lie one inside the other without gaps."""
    expected = 1
    for size, stride in sorted(zip(operand.shape, operand.stride, strict=True), key=lambda mode: mode[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _metadata(
    operator: type, tile: tuple[int, int], layout: tuple[Strides, Strides, Strides]
) -> ops.OperatorMetadata:
    """The metadata of the kernel with one tile, for operands of one layout."""
    # Arguments are compiled for bases and rows of whole 16 bytes: two elements.
    a, b, out = (DenseTensorConstraints(cutlass.Float64, strides, divisibility=2) for strides in layout)
    operands = GemmOperandsMetadata(A=a, B=b, out=out, accumulator_type=cutlass.Float64)
    design = BLASDesignMetadata(
        mma_instruction_type=ops.mma.AmpereMma, tile_shape=(*tile, 1), cluster_shape=(1, 1, 1)
    )
    return ops.OperatorMetadata(
        operator_name=f"examples.fp64_gemm_{strides_to_layout_string(*layout)}_tile{tile[0]}x{tile[1]}",
        operator_class=operator,
        supported_targets=ops.TargetSm.get_supported_targets(design, operands),
        operands=operands,
        design=design,
    )


def is_fp64_gemm(metadata: ops.OperatorMetadata) -> bool:
    """A filter for `get_operators`: this kernel alone."""
    return metadata.operator_class is Fp64GemmOperator


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = (torch.randint(-2, 3, shape, device=device).double() for shape in ((2, 250, 128), (2, 128, 1000)))
    out = torch.empty(2, 250, 1000, dtype=torch.float64, device=device)
    args = ops.GemmArguments(a, b, out, accumulator_type=torch.float64)

    operators = ops.get_operators(args, is_fp64_gemm)
    print("found:", *(operator.metadata.operator_name for operator in operators), sep="\n    ")

    small = ops.get_operators(args, lambda each: is_fp64_gemm(each) and each.design.tile_shape[0] == 16)
    large = ops.get_operators(args, lambda each: is_fp64_gemm(each) and each.design.tile_shape[0] == 256)
    print(f"with tiles of 16 rows: {len(small)}; of 256, which it does not offer: {len(large)}")

    for target in ("80", "90a", "100a"):
        artifact = operators[0].compile(args, target_sm=target)
        print(f"compiled for sm_{artifact.compiled_for}")

    if device == "cpu":
        print("not run: there is no GPU here")
        return
    for operator in operators:
        out.fill_(float("nan"))
        operator.run(args)
        torch.testing.assert_close(out, a @ b, rtol=0, atol=0)
        print(f"{operator.metadata.operator_name} gives A @ B")


if __name__ == "__main__":
    main()
