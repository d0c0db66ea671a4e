"""Scales of MXFP8 blocks that leave a kernel in tiles, as the next product's MMA reads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_backend
from cute_backend.api import Explanation
from cute_backend.spec import DType, Order, Store
from support.epilogues import TILED, Problem, in_mxfp8, in_tiles
from support.reference import in_float64

BF16, E4M3, E8M0 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu
Tiles = Callable[[Tensor], Tensor]
Program = Callable[..., tuple[Tensor, ...]]


def padded(scales: Tensor, value: float = 0.0) -> Tensor:
    """With whole tiles of rows and of scales."""
    rows, columns = scales.shape
    return torch.nn.functional.pad(scales, (0, -columns % 4, 0, -rows % 128), value=value)


def permuted(scales: Tensor) -> Tensor:
    """In tiles by one permutation of five axes."""
    return padded(scales).unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, 4)).permute(0, 3, 2, 1, 4).reshape(-1)


def swapped(scales: Tensor) -> Tensor:
    """In tiles of which those of a column are consecutive."""
    return padded(scales).unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, 4)).permute(3, 0, 2, 1, 4).reshape(-1)


def of_ones(scales: Tensor) -> Tensor:
    """In tiles by one permutation, padded with ones."""
    tiles = padded(scales, 1.0).unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, 4))
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def into_ones(scales: Tensor) -> Tensor:
    """In tiles by one permutation, of a tensor of ones that the scales are written into."""
    whole = torch.ones_like(padded(scales.float())).to(scales.dtype)
    whole[: scales.shape[0], : scales.shape[1]] = scales
    return whole.unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, 4)).permute(0, 3, 2, 1, 4).reshape(-1)


def pair(tiles: Tiles, block: int = 32) -> Program:
    """The product of two products, quantised by blocks."""

    def program(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        values = (a @ b).float() * (a @ c).float()
        blocks = values.unflatten(-1, (-1, block))
        largest = blocks.abs().amax(-1, keepdim=True).clamp(min=1.0)
        scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
        return (blocks / scale).flatten(-2).to(E4M3), tiles(scale.squeeze(-1).to(E8M0))

    return program


def operands(m: int, n: int) -> tuple[Tensor, ...]:
    """Small integers, whose products are exact in bf16."""
    generator = torch.Generator().manual_seed(m + n)
    shapes = ((m, 16), (16, n), (16, n))
    return tuple(torch.randint(-1, 2, shape, generator=generator).to(BF16) for shape in shapes)


def explained(program: Program, m: int, n: int, arch: str = "sm_100a") -> Explanation:
    return cute_backend.explain(program, *operands(m, n), arch=arch)


def scale_stores(explanation: Explanation) -> list[Store]:
    stores = [store for region in explanation.regions for store in region.spec.stores]
    return [store for store in stores if store.dtype is DType.E8M0]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("tiles", [in_tiles, permuted])
@pytest.mark.parametrize(("m", "n"), [(128, 128), (256, 96), (130, 256), (1, 32), (300, 160)])
def test_scales_leave_the_kernel_in_tiles(fresh_compiler: None, tiles: Tiles, m: int, n: int) -> None:
    """Whole tiles and padded ones; the result is eager's to the bit. Eager has no zeros of E8M0 for `pad`."""
    program, inputs = pair(tiles), operands(m, n)
    found = explained(program, m, n)
    found.assert_fused(regions=1)
    assert not found.rejections
    [store] = scale_stores(found)
    assert (store.form.order, store.form.block_columns) == (Order.TILED, 32)
    compiled = torch.compile(program, backend="cute", fullgraph=True)
    for result, expected in zip(compiled(*inputs), pair(in_tiles)(*inputs), strict=True):
        assert torch.equal(result.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("program", "arch"),
    [
        (pair(swapped), "sm_100a"),
        (pair(of_ones), "sm_100a"),
        (pair(into_ones), "sm_100a"),
        (pair(permuted, block=64), "sm_100a"),
        (pair(permuted), "sm_90a"),
    ],
    ids=["tiles by columns", "padded with ones", "into ones", "blocks of 64", "Hopper"],
)
def test_what_no_mma_reads_is_left_outside(program: Program, arch: str) -> None:
    found = explained(program, 130, 192, arch)
    assert all(store.form.order is not Order.TILED for store in scale_stores(found))
    assert found.rejections


def test_values_may_be_divided_by_the_rounded_scales(fresh_compiler: None) -> None:
    """Scales are rounded to the nearest power of two, so some values lie beyond 448."""

    def program(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        blocks = ((a @ b).float() * (a @ c).float()).unflatten(-1, (-1, 32))
        scales = (blocks.abs().amax(-1, keepdim=True) / 448).to(E8M0)
        values = (blocks / scales.float()).clamp(-448, 448).flatten(-2).to(E4M3)
        return values, in_tiles(scales.squeeze(-1))

    found, inputs = explained(program, 130, 160), operands(130, 160)
    found.assert_fused(regions=1)
    assert not found.rejections
    assert [store.form.order for store in scale_stores(found)] == [Order.TILED]
    compiled = torch.compile(program, backend="cute", fullgraph=True)
    for result, expected in zip(compiled(*inputs), program(*inputs), strict=True):
        assert torch.equal(result.view(torch.uint8), expected.view(torch.uint8))


def test_what_reads_scales_on_their_way_to_tiles_keeps_them_outside() -> None:
    def program(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        values, scales = in_mxfp8((a @ b).float() * (a @ c).float())
        whole = padded(scales)
        tiles = whole.unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, 4)).permute(0, 3, 2, 1, 4)
        return values, tiles.reshape(-1), whole

    assert all(store.form.order is not Order.TILED for store in scale_stores(explained(program, 130, 160)))


def test_an_mlp_in_mxfp8_is_two_kernels() -> None:
    """The second product reads the first kernel's values and scales as they are."""
    first = TILED["mxfp8_swiglu_quantised"]

    def mlp(*args: Tensor) -> Tensor:
        *inputs, down, of_down = args
        values, scales = first.fn(*inputs)
        return torch._scaled_mm(values, down.t(), scales, of_down, out_dtype=BF16).relu()

    with FakeTensorMode():
        problem = Problem(4096, 2048, 7168)
        down = torch.empty(7168, 2048, dtype=E4M3)
        of_down = torch.empty(7168 * 2048 // 32, dtype=E8M0)
        found = cute_backend.explain(mlp, *first.inputs(problem), down, of_down, arch="sm_100a")
    found.assert_fused(regions=2)
    assert not found.rejections, "nothing is left to another kernel"
    assert [store.form.order for store in found.regions[0].spec.stores] == [Order.ROW, Order.TILED]


def test_the_replay_equals_float64() -> None:
    """Each value times its scale, which the layout's formula finds, is that of float64, rounded to E4M3."""
    program = TILED["mxfp8_swiglu_quantised"]
    m, n = 130, 160
    inputs = program.inputs(Problem(m, n, 288))
    values, scales = torch.compile(program.fn, backend="cute", fullgraph=True)(*inputs)
    wide, of_wide = in_float64(program, inputs)

    def whole(values: Tensor, scales: Tensor) -> Tensor:
        row, block = torch.arange(m)[:, None], torch.arange(n // 32)
        tile = row // 128 * -(-n // 128) + block // 4
        place = 512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
        return values.double() * scales.double()[place].repeat_interleave(32, 1)

    result, expected = whole(values, scales), whole(wide, of_wide)
    blocks = expected.abs().unflatten(-1, (-1, 32)).amax(-1, keepdim=True)
    error = (result - expected).unflatten(-1, (-1, 32)).abs() / blocks
    assert error.max() < 2**-3 and error.mean() < 2**-9, "a step of E4M3, where sums are rounded to bf16"
    codes = scales.view(torch.uint8)
    assert codes.shape == (2 * 2 * 512,) and (codes > 0).sum() == m * n // 32, "zeros pad"
