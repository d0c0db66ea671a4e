"""The regions of the golden modules: one for each shared epilogue and architecture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest import mock

from torch._subclasses.fake_tensor import FakeTensorMode

import cute_backend
from cute_backend.api import ExplainedRegion
from cute_backend.fx_walk.search import shared_launch
from cute_backend.planning import Arch
from support.epilogues import (
    BLOCKS,
    BLOCKWISE,
    EPILOGUES,
    GROUPED,
    MMA_SCALED,
    SEGMENTS,
    STORED,
    TILED,
    Problem,
)

ARCHS = ("sm_90a", "sm_100a", "sm_80", "sm_86", "sm_89", "sm_103a", "sm_120a", "sm_121a")


PROGRAMS = EPILOGUES | BLOCKWISE | MMA_SCALED | TILED | GROUPED | BLOCKS | SEGMENTS | STORED


NAMES = {arch: [name for name in EPILOGUES if EPILOGUES[name].runs_on(Arch.of_name(arch))] for arch in ARCHS}
NAMES["sm_90a"] += BLOCKWISE
NAMES["sm_100a"] += [*BLOCKWISE, *MMA_SCALED, *TILED]
for grouping in ("sm_90a", "sm_100a"):
    NAMES[grouping] += [*GROUPED, *BLOCKS, *SEGMENTS]
# These share the template of another architecture, and differ in tiles and stages or not at all.
NAMES |= {
    "sm_86": ["addmm_relu", "swiglu7"],
    "sm_89": ["bias_gelu_residual", "greedy_token"],
    "sm_103a": ["bias_gelu_residual", "swiglu7"],
    "sm_120a": ["swiglu7", "rowwise", "label_logit"],
    "sm_121a": ["addmm_relu", "row_maxima"],
}


OTHER_SIZES = {
    "rowwise_few_rows_sm90a.py": ("rowwise", "sm_90a", Problem(16, 1024, 8192), "register_hoist"),
    "addmm_relu_few_rows_sm80.py": ("addmm_relu", "sm_80", Problem(16, 1024, 16384), "SplitGemm"),
    "addmm_relu_long_k_sm90a.py": ("addmm_relu", "sm_90a", Problem(128, 896, 31456), "SplitGemm"),
    "bias_gelu_residual_257_rows_sm90a.py": (
        "bias_gelu_residual",
        "sm_90a",
        Problem(257, 2304, 9216),
        "transposed=True",
    ),
    "swiglu_chunk_257_rows_sm90a.py": ("swiglu_chunk", "sm_90a", Problem(257, 9216, 2304), "further_as"),
    "int8_weight_sm90a.py": ("int8_weight", "sm_90a", Problem(64, 28672, 4096), "Sm90Converted"),
    "float8_weight_sm90a.py": ("float8_weight", "sm_90a", Problem(8, 4096, 4096), "split_k=2"),
    "float8_weight_sm80.py": ("float8_weight", "sm_80", Problem(64, 28672, 4096), "by_bits=True"),
    "int8_weight_sm120a.py": ("int8_weight", "sm_120a", Problem(8, 4096, 4096), "Sm80Converted"),
    "grouped_weight_sm90a.py": (
        "grouped_weight",
        "sm_90a",
        Problem(16, 14336, 4096),
        "WeightGroups(128, DType.F32, DType.F32, DType.I8, DType.BF16)",
    ),
    "grouped_weight_sm80.py": (
        "grouped_weight",
        "sm_80",
        Problem(16, 14336, 4096),
        "Sm80Converted(DType.I8, WeightGroups",
    ),
    "nibble_weight_sm90a.py": (
        "nibble_weight",
        "sm_90a",
        Problem(16, 14336, 4096),
        "WeightGroups(128, DType.F32, DType.BF16, DType.I8, DType.BF16)",
    ),
    "queries_and_keys_sm90a.py": ("queries_and_keys", "sm_90a", Problem(16, 4096, 4096), "RowSegments"),
    "gated_weights_sm90a.py": ("gated_weights", "sm_90a", Problem(16, 14336, 4096), "further_as"),
    "rowwise_large_sm100a.py": (
        "rowwise",
        "sm_100a",
        Problem(8192, 8192, 1024),
        "unrolled=True, column_groups=2",
    ),
    "bias_gelu_residual_short_k_sm100a.py": (
        "bias_gelu_residual",
        "sm_100a",
        Problem(4096, 4096, 1024),
        "column_groups=2",
    ),
}
"""Modules of other sizes, by file, and what each is there to show: without ping-pong, as where K is split,
sm_90a hoists rowvecs; on sm_100a two warpgroups share the epilogue of wide tiles, and hoist rowvecs there,
and that of chains which take longer than the MMA. Sums of parts of K go through memory where there are no
clusters, and on sm_90a where K has more parts than a cluster has CTAs. 257 rows are even shares of
transposed tiles, of a pair too, whose two weights are rows of a stage."""

LARGE = Problem(4096, 4096, 4096)


@cache
def the_region(name: str, arch: str, problem: Problem = LARGE) -> ExplainedRegion:
    """The one region of an epilogue."""
    epilogue = PROGRAMS[name]
    with FakeTensorMode():
        inputs = epilogue.inputs(problem)
    with fused(name):
        explained = cute_backend.explain(epilogue.fn, *inputs, arch=arch)
    assert not explained.rejections
    (region,) = explained.regions
    return region


@contextmanager
def fused(name: str) -> Iterator[None]:
    """A context in which an epilogue is fused whether or not that is expected to pay."""
    pays = mock.patch.object(shared_launch, "_loss", return_value=None)
    always = {"block_reductions": "always", "rotary_embeddings": "always"} if name in BLOCKS else {}
    with cute_backend.config.patch(**always), pays:
        yield


def file_name(name: str, arch: str) -> str:
    return f"{name}_{arch.replace('_', '')}.py"


def every_region() -> Iterator[ExplainedRegion]:
    """The regions of all golden modules."""
    for arch, names in NAMES.items():
        yield from (the_region(name, arch) for name in names)
    for name, arch, problem, _ in OTHER_SIZES.values():
        yield the_region(name, arch, problem)
