"""Projections to queries, keys and values of which a part of each head is rotated, on a real GPU: through
torch.compile against float64, then each kernel that their regions could be given against the replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from cute_backend import config
from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.search import shared_launch
from cute_backend.spec import EpilogueSpec
from support.epilogues import Problem
from support.kernel_check import PARTS, check_kernels, tiles_of
from support.reference import TOLERANCE, relative_error

pytestmark = pytest.mark.gpu

HEADS, HIDDEN = 8, 512


@dataclass(frozen=True)
class Layout:
    """Heads of `columns` columns, of which the first `turned` are rotated. One weight has the query, key and
    value of the first head, then those of the second, if it is `packed`; otherwise there are three
    weights."""

    turned: int
    columns: int
    packed: bool

    def module(self, dtype: torch.dtype, device: str) -> Projections:
        """The projections, with weights of which all sums are exact."""
        return Projections(self, dtype, device)

    def inputs(self, batches: int, places: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
        """x (B, S, HIDDEN), and cosines and sines (1, S, turned)."""
        generator, problem = torch.Generator(device).manual_seed(places), Problem(1, 1, 1, device=device)
        x = problem.operand(batches, places, HIDDEN, dtype=dtype, generator=generator)
        cos, sin = problem.randn(2, 1, places, self.turned, dtype=dtype, generator=generator)
        return x, cos, sin


class Projections(torch.nn.Module):
    """q, k and v of a layout, (B, H, S, D)."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.layout = layout
        generator, problem = torch.Generator(device).manual_seed(0), Problem(1, 1, 1, device=device)
        count, width = (1, 3 * layout.columns) if layout.packed else (3, layout.columns)
        self.linears = torch.nn.ModuleList()
        for _ in range(count):
            linear = torch.nn.Linear(HIDDEN, HEADS * width, device=device, dtype=dtype)
            linear.weight.data = problem.operand(*linear.weight.shape, dtype=dtype, generator=generator)
            linear.bias.data = problem.randn(*linear.bias.shape, dtype=dtype, generator=generator)
            self.linears.append(linear)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        layout = self.layout
        width = 3 * layout.columns if layout.packed else layout.columns
        heads = [each(x).unflatten(-1, (HEADS, width)).transpose(1, 2) for each in self.linears]
        q, k, v = heads[0].chunk(3, -1) if layout.packed else heads
        cos, sin = (each.view(1, 1, -1, layout.turned) for each in (cos, sin))
        return [self._rotated(q, cos, sin), self._rotated(k, cos, sin), v]

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        count, half = self.layout.turned, self.layout.turned // 2
        rot, passed = x[..., :count], x[..., count:]
        turned = torch.cat((-rot[..., half:], rot[..., :half]), -1)
        rot = rot * cos + turned * sin
        return rot if count == self.layout.columns else torch.cat((rot, passed), -1)


LAYOUTS = {
    "24 of 96, packed": Layout(24, 96, packed=True),
    "24 of 96, apart": Layout(24, 96, packed=False),
    "32 of 80, packed": Layout(32, 80, packed=True),
    "32 of 80, apart": Layout(32, 80, packed=False),
    "20 of 80, apart": Layout(20, 80, packed=False),
    "80 of 80, apart": Layout(80, 80, packed=False),
    "16 of 64, packed": Layout(16, 64, packed=True),
    "64 of 128, apart": Layout(64, 128, packed=False),
}
"""GPT-NeoX-20B and Phi-2, packed and apart; heads whose tables are read by element; whole heads; heads whose
columns TMA orders."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(autouse=True)
def one_launch_that_rotates() -> Iterator[None]:
    """Whatever it costs."""
    pays = mock.patch.object(shared_launch, "_loss", return_value=None)
    with pays, config.patch(shared_launches=True, rotary_embeddings="always"):  # type: ignore[attr-defined]
        yield


def compare(layout: Layout, dtype: torch.dtype, sizes: Sequence[tuple[int, int]], dynamic: bool) -> None:
    """Asserts that one compiled program gives the results of float64, and q and k with the strides of eager,
    for these numbers of batches and places. v is a view of the packed product in eager."""
    module = layout.module(dtype, "cuda")
    compiled = torch.compile(module, backend="cute", dynamic=dynamic)
    wide = layout.module(dtype, "cuda").double()
    with torch.no_grad():
        for batches, places in sizes:
            args = layout.inputs(batches, places, dtype, "cuda")
            expected = wide(*(each.double() for each in args))
            results = compiled(*args)
            for result, right in zip(results, expected, strict=True):
                assert relative_error(result, right) < TOLERANCE[result.dtype], (batches, places)
            for result, eager in zip(results[:2], module(*args), strict=False):
                assert result.stride() == eager.stride()
    counted = counters["cute_backend"]
    assert counted["regions"] and not counted["replayed"] and not counted["builds_failed"], dict(counted)


@pytest.mark.sweep
@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "places"), [("bf16", 1), ("bf16", 64), ("bf16", 100), ("fp16", 100), ("bf16", 2048)]
)
@pytest.mark.parametrize("name", list(LAYOUTS)[:5])
def test_one_launch_rotates(name: str, dtype: str, places: int, batches: int, fresh_compiler: None) -> None:
    if places == 1 and LAYOUTS[name].columns % LAYOUTS[name].turned:
        pytest.skip(
            "a vector has one element for each column, and of a part that divides no head there is none"
        )
    compare(LAYOUTS[name], DTYPES[dtype], [(batches, places)], dynamic=False)
    assert counters["cute_backend"]["regions"] == 1


@pytest.mark.parametrize("name", ["24 of 96, packed", "32 of 80, apart"])
def test_one_kernel_serves_every_number_of_places(name: str, fresh_compiler: None) -> None:
    sizes = [(2, 40), (2, 100), (5, 7), (3, 2049)]
    compare(LAYOUTS[name], torch.bfloat16, sizes, dynamic=True)
    assert counters["cute_backend"]["regions"] < len(sizes)


def spec_of(name: str, batches: int, places: int, dtype: torch.dtype, *, dynamic: bool) -> EpilogueSpec:
    layout = LAYOUTS[name]
    with torch.no_grad():
        (report,) = collect(
            layout.module(dtype, "cpu"),
            layout.inputs(batches, places, dtype, "cpu"),
            dynamic=dynamic,
            arch="sm_90a",
        )
    (region,) = report.regions
    return region.spec


@pytest.mark.sweep(8)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_kernel_of_one_batch_is_right(name: str, dtype: str, part: int) -> None:
    """S is M, known only at launch."""
    spec = spec_of(name, 1, 40, DTYPES[dtype], dynamic=True)
    check_kernels(spec, [(1, 0, 512), (100, 0, 64), (127, 0, 272), (2049, 0, 128)], tiles_of(spec, part))


@pytest.mark.sweep(8)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_kernel_of_batches_is_right(name: str, dtype: str, part: int) -> None:
    """A box has rows of two batches, of 100 rows each."""
    spec = spec_of(name, 3, 100, DTYPES[dtype], dynamic=False)
    check_kernels(spec, [(100, 0, 512), (300, 0, 272), (2000, 0, 64)], tiles_of(spec, part))
