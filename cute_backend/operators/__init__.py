"""Registers our kernels as CUTLASS Operators. Importing this module adds them to the CuTe DSL provider.

    import cutlass.operators as ops
    from cute_backend.operators import EpilogueArguments, is_ours

    args = ops.GemmArguments(a, b, out, torch.float32, EpilogueArguments(epilogue, bias=bias, D=out))
    operator = ops.get_operators(args, is_ours, target_sm="90a")[0]    # the one that should be fastest
    operator.run(args)

`check` says why no operator is found. The module needs the extra `operators`.
"""

from __future__ import annotations

try:
    import cutlass.operators  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"cute_backend.operators needs nvidia-cutlass-operators 0.3 ({error}): "
        "pip install 'cute-backend[operators]'"
    ) from error

from cute_backend.operators.epilogue_function import EpilogueArguments
from cute_backend.operators.kernels import (
    Sm80FusedGemm,
    Sm86FusedGemm,
    Sm89FusedGemm,
    Sm90FusedGemm,
    Sm100FusedGemm,
    Sm103FusedGemm,
    Sm120FusedGemm,
    Sm121FusedGemm,
    check,
    is_ours,
)
from cute_backend.operators.metadata import AmpereDesign, BlackwellDesign, FusedDesign, HopperDesign

__all__ = [
    "AmpereDesign",
    "BlackwellDesign",
    "EpilogueArguments",
    "FusedDesign",
    "HopperDesign",
    "Sm80FusedGemm",
    "Sm86FusedGemm",
    "Sm89FusedGemm",
    "Sm90FusedGemm",
    "Sm100FusedGemm",
    "Sm103FusedGemm",
    "Sm120FusedGemm",
    "Sm121FusedGemm",
    "check",
    "is_ours",
]
