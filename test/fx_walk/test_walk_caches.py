"""Keys and values that a kernel writes to a static cache, in place of a copy after it."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_backend
from cute_backend import config
from cute_backend.fx_walk.epilogue_pass import EpiloguePass
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.fx_walk.replacement import rewrite
from cute_backend.kinds.results import Cache
from cute_backend.spec import LoadKind

BF16 = torch.bfloat16
COLUMNS, LENGTH, K = 32, 136, 64

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, COLUMNS)).transpose(1, 2)


def counted(x: Tensor, w: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    """As the static cache of transformers: a tensor counts the tokens."""
    positions = torch.arange(x.shape[1], device=x.device) + at
    cache.index_copy_(2, positions, heads(F.linear(x, w).relu()))
    return cache.sum(2)


def at_positions(x: Tensor, w: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    """As earlier ones: positions are an input."""
    cache[:, :, at] = heads(F.linear(x, w).relu())
    return cache.sum(2)


def of_slice(x: Tensor, w: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    cache[:, :, 5 : 5 + x.shape[1]] = heads(F.linear(x, w).relu())
    return cache.sum(2) + at[0]


PROGRAMS = [counted, at_positions, of_slice]


def operands(batches: int, rows: int, program: Callable[..., Any] = counted) -> list[Tensor]:
    """x, w, a cache and the positions of a program. The numbers are small integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(rows)
    shapes = [(batches, rows, K), (4 * COLUMNS, K), (batches, 4, LENGTH, COLUMNS)]
    tensors = [torch.randint(-3, 4, shape, generator=generator).to(BF16) for shape in shapes]
    positions = torch.randperm(LENGTH, generator=generator)[:rows]
    return [*tensors, torch.tensor(7) if program is counted else positions]


def caches(fn: Callable[..., Any], *args: Tensor) -> list[Cache]:
    """The caches to which a program's kernels write."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        regions = cute_backend.explain(fn, *args, arch="sm_90a").regions
    return [store.form for region in regions for store in region.spec.stores if isinstance(store.form, Cache)]


def agrees(fn: Callable[..., Any], *args: Tensor) -> list[str]:
    """Whether a compiled program has eager's results and writes the same caches. Returns its code."""
    given, own = ([each.clone() for each in args] for _ in range(2))
    with torch.no_grad():
        right = fn(*given)
        result, code = run_and_get_code(torch.compile(fn, backend="cute", dynamic=False), *own)
    assert torch.equal(result, right)
    assert all(map(torch.equal, own, given))
    assert counters["cute_backend"]["regions"] == 1
    return code


@pytest.mark.sweep(1)
@pytest.mark.parametrize("rows", [1, 100, 127])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_kernel_writes_rows_of_a_cache(program: Callable[..., Any], rows: int) -> None:
    args = operands(2, rows, program)
    (cache,) = caches(program, *args)
    assert (cache.length, cache.rows, cache.columns) == (LENGTH, rows, COLUMNS)
    (code,) = agrees(program, *args)
    (call,) = re.findall(r"gemm_epilogue_on_cpu\(.*results=\[(\w+)\]", code)
    assert call.startswith("arg"), "the kernel writes to the input, not to a copy of it"
    assert "index_put_" not in code


def test_a_kernel_that_writes_to_a_cache_has_the_tile_that_is_set() -> None:
    with config.patch(tile="64x64_1x1"):
        (code,) = agrees(counted, *operands(2, 9))
    assert re.search(r"""gemm_epilogue_on_cpu\(.*, '{"tile": "64x64_1x1"}', results=""", code)


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_a_kernel_writes_is_not_refused(program: Callable[..., Any]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        explained = cute_backend.explain(program, *operands(2, 9, program), arch="sm_90a")
    assert not explained.rejections


@pytest.mark.sweep(1)
@pytest.mark.parametrize("rows", [1, 64])
def test_the_kernel_of_a_llama_writes_the_static_cache_of_transformers(rows: int) -> None:
    transformers = pytest.importorskip("transformers")
    shape = transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=256,
    )
    model = transformers.LlamaForCausalLM(shape).to(BF16).eval().requires_grad_(False)
    cache = transformers.StaticCache(config=shape, max_cache_len=128)
    cache.early_initialization(2, 2, 128, BF16, torch.device("cpu"))
    tokens = torch.zeros((2, rows), dtype=torch.int64)
    with config.patch(shared_launches=True, rotary_embeddings="auto"):  # type: ignore[attr-defined]
        explained = cute_backend.explain(
            lambda tokens: model(tokens, past_key_values=cache).logits, tokens, arch="sm_90a"
        )
    region, *_ = explained.regions
    written = "output, rows of (B, H, 128, 128) at first0"
    assert [store.kind for store in region.stores] == ["output", written, written]


@pytest.mark.parametrize(
    ("program", "rows", "kind"),
    [(counted, 9, LoadKind.SCALAR), (at_positions, 9, LoadKind.COLVEC), (at_positions, 1, LoadKind.SCALAR)],
)
def test_a_position_is_a_load_of_the_kernel(program: Callable[..., Any], rows: int, kind: LoadKind) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        (region,) = cute_backend.explain(program, *operands(2, rows, program), arch="sm_90a").regions
    assert [load.kind for load in region.spec.loads] == [kind]
    (store,) = region.stores
    assert store.kind == f"output, rows of (B, H, 136, 32) at {region.loads[0].name}"


def test_the_setting_leaves_the_copy_to_inductor() -> None:
    with config.patch(cache_writes=False):  # type: ignore[attr-defined]
        assert not caches(counted, *operands(2, 9))
        (message,) = refusals(counted, *operands(2, 9))
    assert "config.cache_writes is off" in message


def test_aotinductor_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{EpiloguePass.__module__}.V", SimpleNamespace(aot_compilation=True))
    assert not caches(counted, *operands(2, 9))
    (message,) = refusals(counted, *operands(2, 9))
    assert "AOTInductor's code calls kernels that return results" in message


def test_many_rows_are_left_to_inductor() -> None:
    assert len(caches(counted, *operands(2, 128))) == 1
    assert not caches(counted, *operands(2, 129))
    (message,) = refusals(counted, *operands(2, 129))
    assert "the product has 258 rows; a kernel writes at most 256" in message


def test_an_unknown_number_of_rows_is_left_to_inductor() -> None:
    (message,) = refusals(at_positions, *operands(2, 9, at_positions), dynamic=True)
    assert "the product has a number of rows that is known only at run time; a kernel writes" in message


def test_attention_reads_what_was_written() -> None:
    def attention(x: Tensor, w: Tensor, cache: Tensor, at: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device) + at
        cache.index_copy_(2, positions, heads(F.linear(x, w).relu()))
        return F.scaled_dot_product_attention(
            heads(x @ w.t()[:, : 4 * COLUMNS]).float(), cache.float(), cache.float()
        )

    assert len(caches(attention, *operands(2, 9))) == 1
    args = operands(2, 9)
    given, own = ([each.clone() for each in args] for _ in range(2))
    right = attention(*given)
    result = torch.compile(attention, backend="cute", dynamic=False)(*own)
    torch.testing.assert_close(result, right)
    assert torch.equal(own[2], given[2])


def read_before(x: Tensor, w: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    before = cache.sum(2)
    return counted(x, w, cache, at) - before


def read_after_a_second_write(x: Tensor, w: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    result = counted(x, w, cache, at)
    cache.mul_(2)
    return result + cache.sum(2)


def used_twice(x: Tensor, w: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    keys = heads(F.linear(x, w).relu())
    cache.index_copy_(2, torch.arange(x.shape[1]) + at, keys)
    return cache.sum(2) + keys.sum(2)


def added(x: Tensor, w: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    positions = torch.arange(x.shape[1]) + at
    cache.index_put_(
        (torch.arange(2)[:, None, None], torch.arange(4)[:, None], positions),
        heads(F.linear(x, w).relu()),
        accumulate=True,
    )
    return cache.sum(2)


def not_an_input(x: Tensor, w: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    return counted(x, w, cache * 1, at)


def of_a_view(x: Tensor, w: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    return counted(x, w, cache.transpose(0, 1).transpose(0, 1)[:, :, 1:], at)


def in_another_order(x: Tensor, w: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    product = F.linear(x, w).relu().unflatten(-1, (COLUMNS, -1)).permute(0, 3, 1, 2)
    cache.index_copy_(2, torch.arange(x.shape[1]) + at, product)
    return cache.sum(2)


def at_a_position_of_the_product(x: Tensor, w: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    keys = F.linear(x, w).relu()
    cache.index_copy_(2, torch.arange(x.shape[1]) + (keys[0, 0, 0] > 5).long(), heads(keys))
    return cache.sum(2)


def of_every_second_position(x: Tensor, w: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    cache[:, :, 0 : 2 * x.shape[1] : 2] = heads(F.linear(x, w).relu())
    return cache.sum(2)


def of_another_dtype(x: Tensor, w: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    cache[:, :, : x.shape[1]] = heads(F.linear(x, w).relu())
    return cache.sum(2)


def refusals(fn: Callable[..., Any], *args: Tensor, **options: Any) -> list[str]:
    """Why writes to caches are left to Inductor."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        explained = cute_backend.explain(fn, *args, arch="sm_90a", **options)
    return [each.message for each in explained.rejections if each.reason is Reason.CACHE]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("program", "why"),
    [
        (read_before, "the cache is read before, or written again"),
        (read_after_a_second_write, "the cache is read before, or written again"),
        (used_twice, "the result is used in another way, too"),
        (added, "it adds to the cache"),
        (of_a_view, "it writes to a view or to an earlier result"),
        (in_another_order, "the result (2, 4, 9, 32) is not the product's plane by heads"),
        (at_a_position_of_the_product, "the result is used in another way, too"),
        (of_every_second_position, "it does not write to neighbouring positions"),
    ],
)
def test_other_writes_are_left_to_inductor(program: Callable[..., Any], why: str) -> None:
    args = operands(2, 9)
    assert caches(program, *args) == []
    (message,) = refusals(program, *args)
    assert "writes the result to rows of cache, but " + why in message
    agrees(program, *args)


def test_positions_that_another_kernel_computes_are_left_to_inductor() -> None:
    def program(x: Tensor, w: Tensor, cache: Tensor, at: Tensor) -> Tensor:
        first = F.linear(x, w[:COLUMNS].contiguous()).relu()[0, 0, 0] > 5
        return counted(x * 2, w, cache, at + first.long())

    assert caches(program, *operands(2, 9)) == []
    (message,) = refusals(program, *operands(2, 9))
    assert "its positions are computed from the result of a kernel" in message


def test_a_write_to_no_input_is_no_cache() -> None:
    args = operands(2, 9)
    assert caches(not_an_input, *args) == refusals(not_an_input, *args) == []
    agrees(not_an_input, *args)


def test_a_cache_in_another_layout_is_left_to_inductor() -> None:
    x, w, cache, at = operands(2, 9)
    for laid_out in (cache.transpose(2, 3).contiguous().transpose(2, 3), cache[:, :, ::2]):
        assert caches(counted, x, w, laid_out, at) == []
        (message,) = refusals(counted, x, w, laid_out, at)
        assert f"strides {laid_out.stride()}; a kernel writes to one that is contiguous" in message


def test_a_cache_of_another_dtype_is_left_to_inductor() -> None:
    x, w, cache, at = operands(2, 9)
    assert caches(of_another_dtype, x, w, cache.float(), at) == []


def test_one_tensor_may_be_two_caches() -> None:
    def both(x: Tensor, w: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        return counted(x, w, keys, at) + counted(x, w, values, at + 1)

    x, w, cache, at = operands(2, 9)
    own, given = cache.clone(), cache.clone()
    right = both(x, w, given, given, at)
    result = torch.compile(both, backend="cute", dynamic=False)(x, w, own, own, at)
    assert torch.equal(result, right) and torch.equal(own, given)


def test_a_failure_leaves_the_copy_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(rewrite, "_planes_into", fail)
    args = operands(2, 9)
    given, own = ([each.clone() for each in args] for _ in range(2))
    right = counted(*given)
    with config.patch(raise_errors=False), pytest.warns(RuntimeWarning, match="planted"):  # type: ignore[attr-defined]
        result = torch.compile(counted, backend="cute", dynamic=False)(*own)
    assert torch.equal(result, right) and torch.equal(own[2], given[2])
    assert counters["cute_backend"]["internal_error"] == 1
