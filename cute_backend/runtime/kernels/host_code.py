"""The host side of a compiled kernel, in the LLVM dialect: the baseline CPU, and the shared memory of
launches."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from cute_backend.runtime.kernels.kernel import host_cpu, host_features


def target_baseline(module: Any) -> None:
    """Makes LLVM compile the host code for the baseline CPU instead of the CPU that it runs on.

    A function's own target attributes override the code generator's defaults, which are the build machine's
    CPU and, separately, its features: with only the CPU set, the code used AVX-512.
    """
    ir = _ir()

    def visit(op: Any) -> Any:
        if op.name == "llvm.func":
            features = ", ".join(f'"+{feature}"' for feature in host_features())
            op.attributes["target_cpu"] = ir.StringAttr.get(host_cpu())
            op.attributes["target_features"] = ir.Attribute.parse(f"#llvm.target_features<[{features}]>")
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)


_LAUNCH_CONFIG = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
"""cudaLaunchConfig_t (CUDA Runtime API): grid, block, dynamic shared memory in bytes, stream, attributes."""


def dynamic_smem_bytes(module: Any) -> int:
    """The largest constant that the host code stores to a launch configuration's dynamic shared memory."""
    ir = _ir()

    sizes: list[int] = []

    def visit(op: Any) -> Any:
        if op.name == "llvm.getelementptr" and str(op.attributes["elem_type"]) == _LAUNCH_CONFIG:
            indices = list(ir.DenseI32ArrayAttr(op.attributes["rawConstantIndices"]))
            if indices == [0, 2]:
                sizes.extend(_stored_constants(op.results[0]))
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
    if not sizes:
        raise ValueError("the launch's dynamic shared memory is not a constant")
    return max(sizes)


def _stored_constants(pointer: Any) -> list[int]:
    ir = _ir()
    stores = [use.owner for use in pointer.uses if use.owner.name == "llvm.store"]
    makers = [store.operands[0].owner for store in stores]
    return [
        ir.IntegerAttr(maker.attributes["value"]).value
        for maker in makers
        if maker.name == "llvm.mlir.constant"
    ]


def _ir() -> Any:
    """The DSL's MLIR bindings, which have no usable type stubs."""
    return import_module("cutlass._mlir.ir")
