"""Kernels whose results on a real H200 are kept, to hold the simulator against: see record_hardware.py.

Inputs come from integers drawn by a seeded generator, so that every machine makes the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cute_backend.planning import Arch, TileConfig
from cute_backend.runtime.arguments.operands import TORCH_DTYPES
from cute_backend.simulator.simulate import Execute, run_with
from cute_backend.spec import (
    Accumulator,
    BColumns,
    DType,
    EpilogueSpec,
    Load,
    LoadKind,
    Major,
    Op,
    Store,
    Stride,
)
from support.epilogues import EPILOGUES, Problem
from support.reference import as_tuple

CLUSTERS = 1
"""Clusters in flight, simulated and on the GPU: one cluster of a persistent kernel works through all
tiles."""


class DrawnProblem(Problem):
    """A problem whose normal values are replaced by fractions that are drawn: no libm takes part."""

    def randn(self, *shape: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        return (torch.randint(-384, 385, shape, generator=generator) / 128).to(dtype)

    def operand(self, *shape: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        return (torch.randint(-7, 8, shape, generator=generator) / 2).to(dtype)


@dataclass(frozen=True)
class Case:
    """One kernel and its inputs: for a spec, or for one of the shared epilogues.

    `tolerance` is the difference that machines may have, relative in norm: 0 unless functions are approximate
    or sums depend on their order.
    """

    name: str
    config: TileConfig
    problem: tuple[int, int, int]
    epilogue: str = ""
    spec: EpilogueSpec | None = None
    tolerance: float = 0.0
    fractions: bool = False

    @property
    def exact(self) -> bool:
        return self.tolerance == 0.0

    def inputs(self) -> tuple[Tensor, ...]:
        """Fresh inputs: A, B and loads for a spec, arguments for an epilogue."""
        if self.spec is None:
            return EPILOGUES[self.epilogue].inputs(DrawnProblem(*self.problem))
        return _operands(self.spec, *self.problem, fractions=self.fractions)

    def outputs(self, execute: Execute) -> Sequence[Tensor]:
        """The outputs of the case, its kernel run by `execute`."""
        inputs = self.inputs()
        if self.spec is None:
            return as_tuple(run_with(EPILOGUES[self.epilogue].fn, inputs, execute))
        a, b, *loads = inputs
        return execute([a], [b], loads, self.spec.to_json())

    def digest(self) -> str:
        """SHA-256 of the inputs' bytes. The fixtures are only valid for the inputs that they were made
        from."""
        total = hashlib.sha256()
        for tensor in self.inputs():
            total.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
        return total.hexdigest()


def _operands(spec: EpilogueSpec, m: int, n: int, k: int, *, fractions: bool) -> tuple[Tensor, ...]:
    """A, B and loads: operands of -1, 0 and 1, or fractions. Every row and every column has its own scale."""
    generator = torch.Generator().manual_seed(m + n + k)
    [acc] = spec.accumulators

    def plane(rows: int, columns: int, largest: int, dtype: DType) -> Tensor:
        values = torch.randint(-largest, largest + 1, (rows, columns), generator=generator)
        return values.to(TORCH_DTYPES[dtype])

    def operand(rows: int, columns: int, dtype: DType) -> Tensor:
        if not fractions:
            return plane(rows, columns, 1, dtype)
        shape = (rows, columns)
        values = torch.randint(-384, 385, shape, generator=generator) / 128
        values *= 2.0 ** torch.randint(-6, 7, shape, generator=generator)
        return values.to(TORCH_DTYPES[dtype])

    a = operand(m, k, acc.a_dtype) if acc.a_major is Major.K else operand(k, m, acc.a_dtype).t()
    b = operand(n, k, acc.b_dtype).t() if acc.b_major is Major.K else operand(k, n, acc.b_dtype)
    loads = {
        "scale_a": 2.0 ** (torch.arange(m) % 3),
        "scale_b": 1.0 + torch.arange(n) % 2,
        "exact0": plane(m, n, 9, DType.BF16),
    }
    return a, b, *(loads[load.name] for load in spec.loads)


def _spec(
    a: DType, b: DType, a_major: Major = Major.K, b_major: Major = Major.K, fast: bool = True
) -> EpilogueSpec:
    """acc * scale_a * scale_b + exact0, a column, a row and a plane, to bf16."""
    loads = (
        Load("scale_a", LoadKind.COLVEC, DType.F32, Stride.ONE, Stride.ZERO),
        Load("scale_b", LoadKind.ROWVEC, DType.F32, Stride.ZERO, Stride.ONE),
        Load("exact0", LoadKind.EXACT, DType.BF16, Stride.OTHER, Stride.ONE),
    )
    ops = (
        Op("t0", "mul", ("acc", "scale_a"), DType.F32),
        Op("t1", "mul", ("t0", "scale_b"), DType.F32),
        Op("t2", "add", ("t1", "exact0"), DType.F32),
    )
    acc = Accumulator("acc", a, b, a_major, b_major, fast_accum=fast)
    return EpilogueSpec((acc,), loads, ops, (Store("out0", "t2", DType.BF16),))


def _tile(tile_m: int, tile_n: int, cluster_m: int = 1, cluster_n: int = 1, **options: int) -> TileConfig:
    return TileConfig(Arch.SM90A, tile_m, tile_n, cluster_m, cluster_n, **options)


SMALL, SINGLE = _tile(64, 64), _tile(64, 128, pingpong=True)
PARTS = _tile(64, 64, split_k=4)
PAIR, SHARED = _tile(128, 128, 2, pingpong=True), _tile(128, 128)

E4M3, E5M2, BF16, F16 = DType.E4M3, DType.E5M2, DType.BF16, DType.F16

_EXACT = [
    ("e4m3", SINGLE, (136, 144, 208), _spec(E4M3, E4M3)),
    ("e4m3-pair", PAIR, (280, 40, 272), _spec(E4M3, E4M3)),
    ("e4m3-shared", SHARED, (136, 72, 400), _spec(E4M3, E4M3)),
    ("e4m3-row", SINGLE, (1, 144, 144), _spec(E4M3, E4M3)),
    ("e4m3-masked", SINGLE, (67, 133, 160), _spec(E4M3, E4M3)),
    ("e4m3-promoted", SHARED, (136, 72, 272), _spec(E4M3, E4M3, fast=False)),
    ("e4m3-parts", PARTS, (67, 144, 2000), _spec(E4M3, E4M3)),
    ("e5m2-e4m3", SMALL, (72, 72, 208), _spec(E5M2, E4M3)),
    ("bf16", SINGLE, (136, 136, 104), _spec(BF16, BF16)),
    ("bf16-mn-mn", SHARED, (136, 72, 104), _spec(BF16, BF16, Major.MN, Major.MN)),
    ("f16-k-mn", SMALL, (72, 72, 104), _spec(F16, F16, Major.K, Major.MN)),
]


def _sum(dtype: DType, fast: bool = True) -> EpilogueSpec:
    """The bare sums, in fp32."""
    acc = Accumulator("acc", dtype, dtype, fast_accum=fast)
    return EpilogueSpec((acc,), (), (), (Store("out0", "acc", DType.F32),))


_SUMS = [
    ("bf16-sums", SMALL, (40, 48, 1024), _sum(BF16), 2.0**-19),
    ("e4m3-sums", SMALL, (40, 48, 1024), _sum(E4M3), 2.0**-10),
    ("e4m3-sums-promoted", SHARED, (40, 48, 1024), _sum(E4M3, fast=False), 2.0**-11),
]
"""Sums that round. Hopper's tensor cores keep fewer bits of a sum than fp32 has, so the simulator, which
rounds once per instruction, is more exact: the H200 differs from it by 1.3e-6, 6.7e-4 and 2.5e-4."""

APPROXIMATE = {
    "bias_gelu_residual": 2.0**-8,
    "silu_mul_quant": 2.0**-4,
    "row_maxima": 2.0**-8,
    "sums": 2.0**-23,
    "label_logit": 2.0**-8,
    "swiglu": 2.0**-8,
    "swiglu_chunk": 2.0**-8,
    "swiglu7": 2.0**-8,
    "batched": 2.0**-8,
}
"""Epilogues with approximate functions, and a unit in the last place of what they store. All others' products
and sums are exact, and what follows is rounded as IEEE 754 says."""


_PAIRED = {
    "swiglu": BColumns.APART,
    "swiglu_chunk": BColumns.APART,
    "swiglu7": BColumns.INTERLEAVED,
}
"""Epilogues of two accumulators, and how the columns of B are divided among them."""


NOT_RECORDED: set[str] = set()
"""Epilogues that came after the last recording: the next one takes them out of here."""


def _epilogue(name: str, config: TileConfig) -> Case:
    if name in _PAIRED:
        config = replace(config, tile_n=config.tile_n // 2, products=2, b_columns=_PAIRED[name])
    problem = (72, 72, 144) if EPILOGUES[name].square else (76, 72, 144)
    return Case(name, config, problem, epilogue=name, tolerance=APPROXIMATE.get(name, 0.0))


CASES = {
    case.name: case
    for case in [
        *(Case(name, config, problem, spec=spec) for name, config, problem, spec in _EXACT),
        *(Case(*case[:3], spec=case[3], tolerance=case[4], fractions=True) for case in _SUMS),
        *(
            _epilogue(name, SMALL if i % 2 else SINGLE)
            for i, name in enumerate(name for name in EPILOGUES if name not in NOT_RECORDED)
        ),
    ]
}
