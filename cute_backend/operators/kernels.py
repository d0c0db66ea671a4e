"""Our kernels as CUTLASS Operators: supported arguments, discovery, compilation and launch."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import cutlass
import torch
from cutlass.operators import (
    CompiledArtifact,
    CuTeDSLProvider,
    DenseTensor,
    GemmArguments,
    OperatorMetadata,
    Status,
    TargetSm,
)
from cutlass.operators.providers.cutedsl import CuteDslOperator
from cutlass.operators.workspace import AllocationRequirement, Workspace
from torch import Tensor

from cute_backend.errors import UsageError
from cute_backend.operators.epilogue_function import Epilogue, convert, plain
from cute_backend.operators.implementation import Implementation, running_on
from cute_backend.operators.metadata import (
    TARGETS,
    Design,
    FusedEpilogue,
    FusedMetadata,
    ampere_design,
    blackwell_design,
    hopper_design,
    metadata_of,
)
from cute_backend.operators.tensor_arguments import Layout, TensorArgument, bytes_at, values_of
from cute_backend.planning import Alignment, Arch, Sizes, clustered, plan, ranked, unserved
from cute_backend.runtime.arguments.device import device_at
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.source import text_of
from cute_backend.signature import WORKSPACE_ALIGN, Argument, ArgumentAlignment
from cute_backend.spec import VALUE_DTYPES, Accumulator, DType, Major, Order

_log = logging.getLogger(__name__)

OUT_DTYPES = (DType.F32, DType.BF16, DType.F16, DType.E4M3, DType.E5M2)
"""The dtypes that a product without an epilogue may be written in."""

PRODUCTS = (
    *(
        Accumulator("acc", a, b)
        for a, b in itertools.product((DType.E4M3, DType.E5M2), repeat=2)
        if DType.E4M3 in (a, b)
    ),
    *(
        Accumulator("acc", dtype, dtype, a_major, b_major)
        for dtype in (DType.BF16, DType.F16)
        for a_major in Major
        for b_major in Major
    ),
)
"""The supported products: fp8 with K contiguous in both operands, bf16 and fp16 with either mode."""


@dataclass(frozen=True)
class Request:
    """The facts of a request's arguments that decide which kernels can serve it."""

    product: Accumulator
    epilogue: Epilogue
    out: DType
    order: Order
    sizes: tuple[int, int, int]
    alignment: Alignment

    @staticmethod
    def of(args: Any) -> Request:
        """Reads the request from arguments. Raises UsageError for arguments that no kernel of ours takes."""
        if not isinstance(args, GemmArguments):
            raise UsageError(f"{type(args).__name__} is not a GEMM; these operators take GemmArguments")
        for name, operand in (("A", args.A), ("B", args.B), ("out", args.out)):
            if not isinstance(operand, DenseTensor):
                raise UsageError(f"{name} is a {type(operand).__name__}; these operators take dense tensors")
        if args.performance is not None:
            raise UsageError("performance controls are given, and these operators have none")
        if args.accumulator_type is not cutlass.Float32:
            raise UsageError(f"accumulator_type is {args.accumulator_type}; these kernels add in Float32")
        a, b, out = (
            Layout.of(name, operand.tensor)
            for name, operand in (("A", args.A), ("B", args.B), ("out", args.out))
        )
        accepted = OUT_DTYPES if args.epilogue is None else VALUE_DTYPES
        if out.value_dtype is None or out.value_dtype not in accepted:
            raise UsageError(f"out is {out.dtype}; it may be {', '.join(each.value for each in accepted)}")
        m, k, n = *a.shape, b.shape[1]
        if not (m and n and k):
            raise UsageError(f"the product of ({m}, {k}) and ({k}, {n}) is empty, which needs no kernel")
        for name, layout in (("A", a), ("B", b)):
            if not layout.aligned:
                raise UsageError(
                    f"{name} is {layout.shape} of {layout.dtype} with strides {layout.strides}; TMA requires "
                    "a matrix that is contiguous along one mode, and whose base and pitch are multiples of "
                    "16 bytes"
                )
        if out.unit is None:
            raise UsageError(f"out has strides {out.strides}, contiguous along neither mode")
        order = Order.ROW if out.unit == 1 else Order.COLUMN
        if args.epilogue is None:
            epilogue, aligned = plain(out.value_dtype, order), out.aligned
        else:
            epilogue = convert(args.epilogue, m, n)
            aligned = out.aligned and _planes_aligned(epilogue, args.epilogue.tensors)
        alignment = Alignment.TMA if aligned else Alignment.PLAIN
        return Request(_product(a, b), epilogue, out.value_dtype, order, (m, n, k), alignment)


def _product(a: Layout, b: Layout) -> Accumulator:
    a_major, b_major = Major.K if a.unit == 1 else Major.MN, Major.K if b.unit == 0 else Major.MN
    for known in PRODUCTS:
        dtypes = known.a_dtype, known.b_dtype
        if (*dtypes, known.a_major, known.b_major) == (a.value_dtype, b.value_dtype, a_major, b_major):
            return known
    fp8 = any(each is not None and each.is_fp8 for each in (a.value_dtype, b.value_dtype))
    how = " with K contiguous in both" if fp8 else ""
    raise UsageError(
        f"A is {a.dtype} with strides {a.strides} and B {b.dtype} with strides {b.strides}; supported: bf16 "
        f"by bf16, fp16 by fp16, e4m3 by e4m3 and e4m3 by e5m2 in either order{how}"
    )


def _planes_aligned(epilogue: Epilogue, tensors: dict[str, Any]) -> bool:
    """Whether TMA can move every plane of an epilogue that is contiguous along a mode."""
    names = [*(each.name for each in epilogue.inputs), *epilogue.outputs]
    arguments = [*map(Argument.of_load, epilogue.spec.loads), *map(Argument.of_store, epilogue.spec.stores)]
    return all(
        Layout.of(name, tensors[name]).aligned
        for name, argument in zip(names, arguments, strict=True)
        if argument.alignment is ArgumentAlignment.PLANE
    )


def check(args: Any) -> Status:
    """Whether one of these operators takes the arguments and, if none does, the reason."""
    try:
        Request.of(args)
    except UsageError as error:
        return Status.fail(error)
    return Status.success()


def is_ours(metadata: OperatorMetadata) -> bool:
    """Whether an operator is one of these: a filter for `get_operators`."""
    return issubclass(metadata.operator_class, _FusedGemm)


class _FusedGemm:
    """The base of the operators of all architectures."""

    arch: Arch
    design: Design
    metadata: FusedMetadata

    def _supports(self, args: GemmArguments | None, target_sm: TargetSm | None = None) -> Status:
        # Older targets are portable by name, but a kernel is machine code for one target.
        if target_sm is not None and target_sm != TARGETS[self.arch]:
            return Status.fail(f"the operator is for {TARGETS[self.arch]}, not for {target_sm}")
        if args is None:  # the request is for a target only, which the metadata has
            return Status.success()
        try:
            request = Request.of(args)
        except UsageError as error:
            return Status.fail(error)
        if self.metadata.design.aligned and request.alignment is not Alignment.TMA:
            return Status.fail(
                "the operator moves the epilogue's planes by TMA, but the address or the pitch of one of "
                "them is not a multiple of 16 bytes; an unaligned operator takes it"
            )
        return Status.success()

    def _compile(self, args: GemmArguments, target_sm: TargetSm | None = None) -> CompiledArtifact:
        target = TARGETS[self.arch]
        if target_sm is not None and target_sm != target:
            raise UsageError(f"{self.metadata.operator_name} compiles for {target}, not for {target_sm}")
        return CompiledArtifact(self.implementation.compile(), self, target)

    def _run(
        self,
        args: GemmArguments,
        compiled_artifact: CompiledArtifact,
        stream: Any,
        workspace: Workspace | None = None,
    ) -> None:
        maker = compiled_artifact.operator_obj
        if maker is not self and maker.metadata.kernel != self.metadata.kernel:
            raise UsageError(
                f"{self.metadata.operator_name} can't run an artifact of {maker.metadata.operator_name}"
            )
        a, b = values_of("A", args.A.tensor), values_of("B", args.B.tensor)
        with torch.no_grad(), running_on(stream, a.device):
            if self.metadata.epilogue is None:
                loads, results = [], [values_of("out", args.out.tensor)]
            else:
                epilogue, tensors = self.metadata.epilogue.converted, args.epilogue.tensors
                loads = [
                    each.view(_operand(each.name, tensors[each.name], a.device), a.shape[0], b.shape[1])
                    for each in epilogue.inputs
                ]
                results = [values_of(name, tensors[name]) for name in epilogue.outputs]
            size = self.implementation.workspace_bytes(a.shape[0], b.shape[1])
            room = None if size == 0 else _room(workspace, size, a.device)
            self.implementation.launch(compiled_artifact.compiled_obj, a, b, loads, results, room)

    def _get_workspace_size(self, args: GemmArguments) -> AllocationRequirement:
        m, n, *_ = args.problem_size
        size = self.implementation.workspace_bytes(m, n)
        return AllocationRequirement(size, WORKSPACE_ALIGN) if size else AllocationRequirement.empty()

    def _initialize_workspace(self, args: GemmArguments, workspace: Workspace) -> None:
        """Does nothing: a launch writes its workspace before it reads it."""

    @property
    def source(self) -> str:
        """The kernel's module, as CuTe DSL Python."""
        return text_of(self.metadata.kernel)

    @cached_property
    def implementation(self) -> Implementation:
        """The kernel itself."""
        return Implementation(self.metadata.kernel)

    @classmethod
    def _generate_operators(
        cls,
        metadata_filter: Callable[[OperatorMetadata], bool],
        epilogue_args: Any = None,
        target_sm: TargetSm | None = None,
        args: GemmArguments | None = None,
    ) -> list[Any]:
        if target_sm is not None and target_sm != TARGETS[cls.arch]:
            return []
        if args is not None:
            found = _for_arguments(cls, args)
        elif epilogue_args is None:
            found = _for_anyone(cls)
        else:
            return []  # the spec of an epilogue depends on its operands' sizes
        return [cls(metadata) for metadata in found if metadata_filter(metadata)]  # type: ignore[call-arg]


def _for_arguments(operator: type[_FusedGemm], args: GemmArguments) -> Iterator[FusedMetadata]:
    """Every kernel for the arguments, in the order of predicted speed."""
    try:
        request = Request.of(args)
    except UsageError as error:
        _log.debug("No operator of cute_backend: %s", error)
        return
    arch = operator.arch
    for product in _modes(arch, request.product):
        spec = request.epilogue.of(product)
        if (reason := unserved(spec, arch.target)) is not None:
            _log.debug("No operator of cute_backend for %s: %s", arch.value, reason)
            return
        tiles = ranked(arch, spec, Sizes(*request.sizes), _sm_count(arch))
        for planned in dict.fromkeys(plan(spec, config, request.alignment) for config in tiles):
            kernel = Kernel.found(planned)
            fused = None if args.epilogue is None else FusedEpilogue(args.epilogue, request.epilogue)
            yield metadata_of(operator, operator.design, kernel, request.out, request.order, fused)


def _for_anyone(operator: type[_FusedGemm]) -> Iterator[FusedMetadata]:
    """Every kernel of a product without an epilogue."""
    for known, out, order in itertools.product(PRODUCTS, OUT_DTYPES, (Order.ROW, Order.COLUMN)):
        for product in _modes(operator.arch, known):
            spec = plain(out, order).of(product)
            if unserved(spec, operator.arch.target) is not None:
                continue
            able = itertools.product(clustered(operator.arch, spec), Alignment)
            for planned in dict.fromkeys(plan(spec, config, alignment) for config, alignment in able):
                kernel = Kernel.found(planned)
                yield metadata_of(operator, operator.design, kernel, out, order, None)


def _modes(arch: Arch, product: Accumulator) -> list[Accumulator]:
    """A product and, if that differs, the product with sums that are promoted after each k tile."""
    promoted = [replace(product, fast_accum=False)]
    return [product, *(promoted if arch.target.promotes and product.a_dtype.is_fp8 else [])]


def _sm_count(arch: Arch) -> int:
    """The SM count of the current GPU if it is one of `arch`, otherwise that of the GPU to plan for."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == arch.target.capability:
        return device_at(torch.cuda.current_device()).sm_count
    return arch.target.sm_count


def _operand(name: str, value: TensorArgument | float, device: torch.device) -> Tensor:
    if isinstance(value, (int, float)):
        return torch.full((), value, dtype=torch.float32, device=device)
    return values_of(name, value)


def _room(workspace: Workspace | None, size: int, device: torch.device) -> Tensor:
    """The given workspace as bytes, or a new one."""
    if workspace is None:
        return torch.empty(size, dtype=torch.uint8, device=device)
    if isinstance(workspace.data, int):
        given = bytes_at(workspace.data, size)
    else:
        given = values_of("the workspace", workspace.data).view(-1).view(torch.uint8)
    if given.numel() < size or given.data_ptr() % WORKSPACE_ALIGN:
        raise UsageError(
            f"the workspace has {given.numel()} bytes at {given.data_ptr():#x}; the kernel needs {size} "
            f"bytes at a multiple of {WORKSPACE_ALIGN}"
        )
    return given


@CuTeDSLProvider.register
class Sm90FusedGemm(_FusedGemm, CuteDslOperator):
    """wgmma for Hopper, persistent and warp-specialised, with any epilogue of `EpilogueArguments`.

    A is (M, K) and B is (K, N), or a batch of one. Supported are bf16 by bf16, fp16 by fp16 and, with K
    contiguous in both, e4m3 by e4m3 and e4m3 by e5m2 in either order. Sums are Float32. Without an epilogue,
    out is fp32, bf16, fp16, e4m3 or e5m2, row-major or column-major, with any alignment.
    """

    supported_args_type = GemmArguments
    designed_for_min_cc = 90
    arch = Arch.SM90A
    design = staticmethod(hopper_design)


@CuTeDSLProvider.register
class Sm100FusedGemm(_FusedGemm, CuteDslOperator):
    """tcgen05 for Blackwell. It takes the arguments of `Sm90FusedGemm`; its sums need no promotion."""

    supported_args_type = GemmArguments
    designed_for_min_cc = 100
    arch = Arch.SM100A
    design = staticmethod(blackwell_design)


@CuTeDSLProvider.register
class Sm103FusedGemm(Sm100FusedGemm):
    """The kernels of `Sm100FusedGemm`, compiled for the B300."""

    supported_args_type = GemmArguments
    designed_for_min_cc = 103
    arch = Arch.SM103A


@CuTeDSLProvider.register
class Sm80FusedGemm(_FusedGemm, CuteDslOperator):
    """mma.sync for Ampere's A100, with any epilogue of `EpilogueArguments`.

    It takes the arguments of `Sm90FusedGemm` whose operands, planes and results are not of fp8.
    """

    supported_args_type = GemmArguments
    designed_for_min_cc = 80
    arch = Arch.SM80
    design = staticmethod(ampere_design)


@CuTeDSLProvider.register
class Sm86FusedGemm(Sm80FusedGemm):
    """mma.sync for Ampere's other GPUs. It takes the arguments of `Sm80FusedGemm`."""

    supported_args_type = GemmArguments
    designed_for_min_cc = 86
    arch = Arch.SM86


@CuTeDSLProvider.register
class Sm89FusedGemm(Sm80FusedGemm):
    """mma.sync for Ada. It takes the arguments of `Sm90FusedGemm`, but no product of e4m3 and e5m2."""

    supported_args_type = GemmArguments
    designed_for_min_cc = 89
    arch = Arch.SM89


@CuTeDSLProvider.register
class Sm120FusedGemm(Sm80FusedGemm):
    """mma.sync for RTX Blackwell, where TMA loads operands. It takes the arguments of `Sm89FusedGemm`."""

    supported_args_type = GemmArguments
    designed_for_min_cc = 120
    arch = Arch.SM120A


@CuTeDSLProvider.register
class Sm121FusedGemm(Sm120FusedGemm):
    """The kernels of `Sm120FusedGemm`, compiled for the GB10."""

    supported_args_type = GemmArguments
    designed_for_min_cc = 121
    arch = Arch.SM121A
