"""Every shared epilogue on a real GPU: through torch.compile against float64, then each kernel that its
region could ever be given, in every configuration and alignment, against the replay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_backend.fx_walk.collect import collect
from cute_backend.runtime.arguments.device import device_at
from cute_backend.spec import EpilogueSpec, Scaling
from support.epilogues import BLOCKS, BLOCKWISE, EPILOGUES, GROUPED, SEGMENTS, Epilogue, Problem
from support.golden_regions import the_region
from support.kernel_check import PARTS, SHAPES, check_kernels, tiles_of
from support.reference import TOLERANCE, as_tuple, in_float64, relative_error

pytestmark = pytest.mark.gpu


def poison(m: int, n: int) -> None:
    """Leave NaN in the memory that outputs of these sizes are about to get."""
    for itemsize in (1, 2, 4):
        torch.empty(m * n * itemsize, device="cuda", dtype=torch.uint8).fill_(0xFF)


PROGRAMS = EPILOGUES | BLOCKWISE | GROUPED


def skip_elsewhere(name: str) -> None:
    if name in BLOCKWISE and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("blocks have scales on Hopper alone")


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_program_is_right(name: str, fresh_compiler: None) -> None:
    skip_elsewhere(name)
    epilogue = PROGRAMS[name]
    compiled = torch.compile(epilogue.fn, backend="cute", dynamic=False)
    shapes = SHAPES[2:4]  # many k tiles, edges in both directions
    for seed, (m, n, k) in enumerate(shapes):
        m = n if epilogue.square else m
        m = -(-m // 8) * 8 if name == "grouped_k" else m  # torch requires rows of gradients of 16 bytes
        inputs = epilogue.inputs(Problem(m, n, k, device="cuda", seed=seed))
        expected = in_float64(epilogue, inputs)
        poison(m, n)
        for actual, right in zip(as_tuple(compiled(*inputs)), expected, strict=True):
            assert relative_error(actual, right) < TOLERANCE[actual.dtype], (m, n, k)
    counters = torch._dynamo.utils.counters["cute_backend"]
    assert counters["regions"] == len(shapes), dict(counters)
    assert not counters["replayed"] and not counters["builds_failed"]


def region_of(epilogue: Epilogue) -> EpilogueSpec:
    inputs = epilogue.inputs(Problem(256, 256, 256))
    (report,) = collect(epilogue.fn, inputs, arch=device_at(0).arch.value)
    (region,) = report.regions
    return region.spec


def check_part(spec: EpilogueSpec, part: int) -> None:
    check_kernels(spec, configs=tiles_of(spec, part))


@pytest.mark.sweep
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_kernel_of_a_region_is_right(name: str, part: int) -> None:
    skip_elsewhere(name)
    check_part(region_of(PROGRAMS[name]), part)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", BLOCKS | SEGMENTS)
def test_every_kernel_of_heads_is_right(name: str, part: int) -> None:
    check_part(the_region(name, device_at(0).arch.value, Problem(512, 512, 512)).spec, part)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("columns", [64, 128, 256])
def test_every_kernel_that_reduces_blocks_in_passes_is_right(columns: int, is_ahead: bool, part: int) -> None:
    """Also if a plane is read ahead of the passes, and another one after them."""

    def normed(a: torch.Tensor, b: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        y = a @ b + first if is_ahead else a @ b
        return torch.nn.functional.layer_norm(y.view(256, -1, columns), (columns,)).flatten(1) + last

    shapes = ((256, 128), (128, 512), (256, 512), (256, 512))
    inputs = tuple(torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    (report,) = collect(normed, inputs, arch=device_at(0).arch.value)
    (region,) = report.regions
    assert (region.spec.kept != "") is is_ahead and region.spec.pass_columns == columns
    check_part(region.spec, part)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("a", "b"), [(Scaling.LINE, Scaling.LINE), (Scaling.SQUARE, Scaling.LINE)], ids=lambda each: each.value
)
def test_every_recipe_of_scales_of_blocks_is_right(a: Scaling, b: Scaling, part: int) -> None:
    skip_elsewhere("blockwise")
    spec = region_of(BLOCKWISE["blockwise_silu_residual"])
    scaled = replace(spec.product, a_scaling=a, b_scaling=b)
    check_part(replace(spec, accumulators=(scaled,)), part)


@pytest.mark.parametrize("name", ["bias_gelu_residual", "sums"])
def test_equal_inputs_give_equal_bits(name: str, fresh_compiler: None) -> None:
    epilogue = EPILOGUES[name]
    compiled = torch.compile(epilogue.fn, backend="cute", dynamic=False)
    for seed in range(20):
        first, second = (
            as_tuple(compiled(*epilogue.inputs(Problem(1000, 1040, 528, device="cuda", seed=seed))))
            for _ in range(2)
        )
        assert all(map(torch.equal, first, second)), seed
    assert not torch._dynamo.utils.counters["cute_backend"]["replayed"]
