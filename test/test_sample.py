"""`sample` by replay: what it draws, that the seed and the place alone decide it, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

import cute_backend
from cute_backend import UsageError, sampling
from cute_backend.runtime.calls import sample_op as op_module
from cute_backend.runtime.calls.sample_op import SAMPLES_PER_PASS, sample_op
from support.draws import DESCENDING, ROWS, VOCABULARIES, draw_pairs, draw_steps, noise, p_value
from support.sweeps import EXHAUSTIVE

BF16, F16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A draw is many small ops, on each of which further threads would do nothing but wait, busily."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_p_value_is_one_of_chi_squared() -> None:
    """Against the table of the distribution, and for what a broken sampler gives."""
    expected = torch.full((11,), 100.0, dtype=torch.float64)
    offset = torch.zeros(11, dtype=torch.float64)
    offset[0], offset[1] = math.sqrt(18.307 * 50), -math.sqrt(18.307 * 50)
    assert abs(p_value(expected + offset, expected) - 0.05) < 1e-4
    assert p_value(torch.full_like(expected, math.nan), expected) == 0.0


@pytest.mark.sweep(2)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(
    "rows", [pytest.param(rows, marks=() if rows == max(ROWS) else EXHAUSTIVE) for rows in ROWS]
)
@pytest.mark.parametrize("descending", DESCENDING)
def test_draws_follow_the_softmax(vocabulary: int, rows: int, descending: bool) -> None:
    """Few rows take thousands of draws each, a pass of all draws at a time."""
    tokens, expected = draw_steps(vocabulary, rows, descending)
    assert p_value(torch.bincount(tokens.flatten(), minlength=vocabulary), expected) > 0.001


def test_samples_of_one_call_are_independent_and_so_are_rows() -> None:
    """By the joint counts of two."""
    for name, (left, right) in draw_pairs().items():
        counts = torch.bincount(left * 8 + right, minlength=64)
        assert p_value(counts, torch.full((64,), len(left) / 64)) > 0.001, name


def problem(rows: int = 5, vocabulary: int = 40, depth: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randint(-2, 3, (rows, depth), generator=generator).to(BF16)
    return hidden, torch.randint(-2, 3, (vocabulary, depth), generator=generator).to(BF16)


@pytest.mark.parametrize("samples", [1, 3, SAMPLES_PER_PASS, SAMPLES_PER_PASS + 3])
def test_a_draw_is_the_largest_logit_with_its_noise(samples: int) -> None:
    """Of both words of the seed, and of the sample's number in whatever pass it is drawn."""
    hidden, weight = problem()
    seed = -(2**40) - 7
    logits = hidden.float() @ weight.float().t()
    expected = (logits + 0.5 * noise(seed, 5, 40, samples)).argmax(-1).t()
    assert torch.equal(
        cute_backend.sample(hidden, weight, temperature=0.5, num_samples=samples, seed=seed), expected
    )


def test_a_draw_depends_on_its_row_and_place_alone() -> None:
    """Not on how many rows or samples are drawn with it."""
    hidden, weight = problem(rows=9)
    all_rows = cute_backend.sample(hidden, weight, num_samples=11, seed=5)
    assert torch.equal(cute_backend.sample(hidden[:4], weight, num_samples=11, seed=5), all_rows[:4])
    assert torch.equal(cute_backend.sample(hidden, weight, num_samples=2, seed=5), all_rows[:, :2])


def test_several_samples_take_one_pass_over_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    original = op_module.gemm_epilogue

    def counted(*args: Any) -> Any:
        passes.append(1)
        return original(*args)

    monkeypatch.setattr(op_module, "gemm_epilogue", counted)
    for samples, logprob, expected in (
        (1, False, 1),
        (SAMPLES_PER_PASS, False, 1),
        (2 * SAMPLES_PER_PASS + 1, False, 3),
        (SAMPLES_PER_PASS - 1, True, 1),
        (SAMPLES_PER_PASS, True, 2),
    ):
        passes.clear()
        cute_backend.sample(*problem(), num_samples=samples, seed=0, return_logprob=logprob)
        assert len(passes) == expected


def test_seeds() -> None:
    hidden, weight = problem(rows=64)
    draw = lambda **how: cute_backend.sample(hidden, weight, num_samples=4, **how)  # noqa: E731
    assert torch.equal(draw(seed=1), draw(seed=1))
    assert not torch.equal(draw(seed=1), draw(seed=2))
    assert not torch.equal(draw(seed=1), draw(seed=1 + 2**32))
    assert torch.equal(draw(seed=2**64 - 1), draw(seed=-1))
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    assert torch.equal(draw(generator=generators[0]), draw(generator=generators[1]))
    assert not torch.equal(draw(generator=generators[0]), draw(generator=torch.Generator().manual_seed(3)))
    torch.manual_seed(4)
    first, again = draw(), draw()
    assert not torch.equal(first, again)
    torch.manual_seed(4)
    assert torch.equal(draw(), first)


def test_a_seed_on_the_device_is_advanced_there() -> None:
    hidden, weight = problem(rows=64)
    seed = torch.tensor(9)
    first, second = (cute_backend.sample(hidden, weight, seed=seed) for _ in range(2))
    assert seed == 11
    assert torch.equal(first, cute_backend.sample(hidden, weight, seed=9))
    assert torch.equal(second, cute_backend.sample(hidden, weight, seed=10))


def test_temperatures() -> None:
    """A number, one tensor for all and one for each row mean the same; 0 is greedy, and NaN gives index 0."""
    hidden, weight = problem()
    number = cute_backend.sample(hidden, weight, temperature=2.0, num_samples=3, seed=1)
    for tensor in (torch.tensor(2.0), torch.tensor([2.0], dtype=BF16), torch.full((5, 1), 2.0, dtype=F16)):
        assert torch.equal(
            cute_backend.sample(hidden, weight, temperature=tensor, num_samples=3, seed=1), number
        )
    greedy = (hidden.float() @ weight.float().t()).argmax(-1, keepdim=True)
    for zero in (0, 0.0, torch.tensor(0.0), torch.zeros(5)):
        tokens = cute_backend.sample(hidden, weight, temperature=zero, num_samples=2, seed=1)
        assert torch.equal(tokens, greedy.expand(5, 2))
    mixed = torch.tensor([2.0, 0.0, math.nan, 2.0, 0.0])
    tokens = cute_backend.sample(hidden, weight, temperature=mixed, num_samples=3, seed=1)
    assert torch.equal(tokens[[0, 3]], number[[0, 3]])
    assert torch.equal(tokens[[1, 4]], greedy[[1, 4]].expand(2, 3))
    assert (tokens[2] == 0).all()


@pytest.mark.parametrize("dtypes", [(F16, F16), (E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
def test_dtypes_scales_and_bias(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    hidden, weight = (each.to(dtype) for each, dtype in zip(problem(), dtypes, strict=True))
    scale_hidden, scale_weight = torch.rand(5) + 0.5, torch.rand(40) + 0.5
    bias = torch.randn(40).to(BF16)
    logits = hidden.float() @ weight.float().t() * scale_hidden[:, None] * scale_weight + bias.float()
    expected = (logits + noise(3, 5, 40, 2)).argmax(-1).t()
    for rows, columns in ((scale_hidden, scale_weight), (scale_hidden[:, None], scale_weight[None])):
        tokens, logprob = cute_backend.sample(
            hidden,
            weight,
            num_samples=2,
            seed=3,
            bias=bias,
            scale_hidden=rows,
            scale_weight=columns,
            return_logprob=True,
        )
        assert torch.equal(tokens, expected)
        torch.testing.assert_close(logprob, logits.log_softmax(-1).gather(1, tokens), rtol=1e-5, atol=1e-5)
    one = cute_backend.sample(
        hidden, weight, seed=3, scale_hidden=torch.tensor(0.0), scale_weight=torch.ones(1)
    )
    assert torch.equal(one, noise(3, 5, 40, 1)[0].argmax(-1, keepdim=True))


def test_log_probabilities() -> None:
    """Those of the distribution that is drawn from, beyond one pass too; certainty has the logarithm 0."""
    hidden, weight = problem()
    temperature = torch.tensor([2.0, 0.5, 0.0, 1.0, 8.0])
    tokens, logprob = cute_backend.sample(
        hidden, weight, temperature=temperature, num_samples=11, seed=1, return_logprob=True
    )
    assert torch.equal(
        tokens, cute_backend.sample(hidden, weight, temperature=temperature, num_samples=11, seed=1)
    )
    logits = hidden.float() @ weight.float().t() / temperature[:, None]
    expected = logits.log_softmax(-1).gather(1, tokens)
    expected[2] = 0.0
    torch.testing.assert_close(logprob, expected, rtol=1e-5, atol=1e-5)
    _, certain = cute_backend.sample(hidden, weight, temperature=0, num_samples=2, return_logprob=True)
    assert torch.equal(certain, torch.zeros(5, 2))


def test_no_rows_and_odd_layouts() -> None:
    hidden, weight = problem()
    assert cute_backend.sample(hidden[:0], weight, num_samples=3).shape == (0, 3)
    expected = cute_backend.sample(hidden, weight, seed=1)
    transposed = weight.t().contiguous().t()
    strided = torch.stack([hidden, hidden], 2)[:, :, 0]
    assert torch.equal(cute_backend.sample(strided, transposed, seed=1), expected)


# Operands that TMA can't read as they lie


@pytest.fixture
def handed_on(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """The hidden states and weights that the op is given."""
    calls: list[tuple[Tensor, Tensor]] = []

    def op(hidden: Tensor, weight: Tensor, *rest: Any) -> Any:
        calls.append((hidden, weight))
        return sample_op(hidden, weight, *rest)

    monkeypatch.setattr(sampling, "sample_op", op)
    return calls


@pytest.mark.filterwarnings("ignore:cute_backend. sample copies")
@pytest.mark.parametrize("dtype", [BF16, E4M3])
@pytest.mark.parametrize("depth", [1, 100])
def test_what_tma_cannot_read_is_copied_once_a_call(
    depth: int, dtype: torch.dtype, handed_on: list[tuple[Tensor, Tensor]]
) -> None:
    """And anew at each call, so that a weight may be written to in any way."""
    hidden, weight = (each.to(dtype) for each in problem(depth=depth))
    samples = SAMPLES_PER_PASS + 2
    for _ in range(2):
        before = counters["cute_backend"]["operands_copied"]
        tokens = cute_backend.sample(hidden, weight, num_samples=samples, seed=4)
        assert counters["cute_backend"]["operands_copied"] == before + 2
        logits = hidden.float() @ weight.float().t()
        assert torch.equal(tokens, (logits + noise(4, 5, 40, samples)).argmax(-1).t())
        for given, original in zip(handed_on.pop(), (hidden, weight), strict=True):
            assert given.stride(1) == 1 and given.stride(0) * given.element_size() % 16 == 0
            assert torch.equal(given.float(), original.float())
        weight.data.copy_(weight[torch.arange(39, -1, -1)])  # does not count as a new version


@pytest.mark.parametrize(
    "layout",
    [
        lambda w: F.pad(w, (0, 4))[:, :100],
        lambda w: w.t().contiguous().t(),
        lambda w: F.pad(w, (0, 28))[:, 8:108],
    ],
    ids=["padded", "transposed", "a slice"],
)
def test_what_tma_can_read_is_left_where_it_is(
    layout: Callable[[Tensor], Tensor], handed_on: list[tuple[Tensor, Tensor]]
) -> None:
    hidden, weight = problem(rows=1, depth=100)
    weight = layout(weight)
    cute_backend.sample(hidden, weight, seed=4)
    ((given_hidden, given_weight),) = handed_on
    assert given_hidden is hidden and given_weight is weight


def test_a_copy_is_warned_of() -> None:
    from cute_backend.runtime.host import notices

    notices._warned.discard(("sample", "weight"))
    with pytest.warns(RuntimeWarning, match=r"sample copies weight, \(40, 100\) with strides \(100, 1\), at"):
        cute_backend.sample(*problem(rows=1, depth=100))


def bad(**changes: Any) -> dict[str, Any]:
    hidden, weight = problem()
    return {"hidden": hidden, "weight": weight, **changes}


REFUSALS: list[tuple[str, dict[str, Any]]] = [
    (
        r"hidden \(5, 16\) and weight \(40, 15\); it takes \(H, D\) and \(V, D\)",
        {"weight": problem()[1][:, 1:]},
    ),
    (
        r"hidden \(5, 16\) and weight \(16, 40\); .* and \(V, D\), the weight .* not its transpose",
        {"weight": problem()[1].t()},
    ),
    (r"hidden \(16,\) and weight \(40, 16\)", {"hidden": problem()[0][0]}),
    (r"weight \(0, 16\); there is nothing to draw from", {"weight": problem()[1][:0]}),
    (r"hidden of int64 and weight of bfloat16; it multiplies bfloat16 by", {"hidden": problem()[0].long()}),
    (r"hidden of float32 and weight of bfloat16", {"hidden": problem()[0].float()}),
    (r"hidden of float8_e5m2 and weight of float8_e5m2", {k: v.to(E5M2) for k, v in bad().items()}),
    (r"hidden of type list", {"hidden": [1.0]}),
    (r"temperature=-1.0; it takes 0 or a positive finite number", {"temperature": -1.0}),
    (r"temperature=nan; it takes 0", {"temperature": math.nan}),
    (r"temperature=inf; it takes 0", {"temperature": math.inf}),
    (r"temperature of type str; it takes a number or a tensor", {"temperature": "hot"}),
    (r"temperature \(4,\) of float32; it takes \(\) or \(1,\) or \(5,\)", {"temperature": torch.ones(4)}),
    (r"temperature \(\) of int64", {"temperature": torch.tensor(1)}),
    (r"num_samples=0; it draws 1 or more", {"num_samples": 0}),
    (r"num_samples=2.0; it draws 1 or more", {"num_samples": 2.0}),
    (r"both seed and generator; it takes one of them", {"seed": 1, "generator": torch.Generator()}),
    (r"seed=1.5; it takes an integer of 64 bits", {"seed": 1.5}),
    (r"seed=18446744073709551616; it takes an integer of 64 bits", {"seed": 2**64}),
    (r"seed \(2,\) of int64; as a tensor it is one int64", {"seed": torch.tensor([1, 2])}),
    (r"seed \(\) of int32; as a tensor it is one int64", {"seed": torch.tensor(1, dtype=torch.int32)}),
    (r"bias \(39,\) of float32; it takes \(40,\) of float32 or bfloat16", {"bias": torch.ones(39)}),
    (r"bias \(40,\) of int64", {"bias": torch.ones(40).long()}),
    (r"bias of type float; it takes a tensor", {"bias": 1.0}),
    (r"scale_hidden \(40,\) of float32; it takes", {"scale_hidden": torch.ones(40)}),
    (r"scale_weight \(40,\) of bfloat16; it takes", {"scale_weight": torch.ones(40, dtype=BF16)}),
    (r"hidden on cpu and bias on meta; it takes one device", {"bias": torch.ones(40, device="meta")}),
]


@pytest.mark.parametrize(("message", "changes"), REFUSALS, ids=[message for message, _ in REFUSALS])
def test_refusals(message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"sample got .*{message}") as caught:
        cute_backend.sample(**bad(**changes))
    assert "\n" not in str(caught.value)


# Under torch.compile


def test_the_op_is_sound() -> None:
    hidden, weight = problem()
    seed, heat = torch.tensor([3]), torch.ones(1)
    vectors = torch.randn(40), torch.ones(5), torch.ones(40)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(sample_op, (hidden, weight, heat, seed, 9, *vectors, True), test_utils=checks)
    torch.library.opcheck(
        sample_op, (hidden, weight, None, seed, 2, None, None, None, False), test_utils=checks
    )


def test_compiled_it_is_one_op_in_a_whole_graph(fresh_compiler: None) -> None:
    """Draws as eager does, for any number of rows; the seed advances at every call of what was compiled."""

    def step(x: Tensor, table: Tensor, weight: Tensor, temperature: Tensor, seed: Tensor) -> Tensor:
        tokens = cute_backend.sample(x * 2, weight, temperature=temperature, num_samples=2, seed=seed)
        return table[tokens].sum(1)

    compiled = torch.compile(step, backend="cute", fullgraph=True, dynamic=True)
    hidden, weight = problem()
    table = torch.arange(40 * 4).float().reshape(40, 4)
    seeds = torch.tensor([5]), torch.tensor([5])
    for rows in (5, 3, 5):
        arguments = hidden[:rows], table, weight, torch.full((rows,), 3.0)
        assert torch.equal(compiled(*arguments, seeds[0]), step(*arguments, seeds[1]))
    assert torch.equal(*seeds) and seeds[0] == 8


@pytest.mark.filterwarnings("ignore:cute_backend. sample copies")
def test_compiled_with_symbols(fresh_compiler: None) -> None:
    """In a whole graph, of sizes of which operands are copied, and of a temperature."""

    def step(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
        return cute_backend.sample(hidden, weight, temperature=temperature, num_samples=2, seed=3)

    compiled = torch.compile(step, backend="cute", fullgraph=True, dynamic=True)
    for depth, temperature in ((100, 0.5), (84, 2.0)):
        arguments = *problem(depth=depth), temperature
        assert torch.equal(compiled(*arguments), step(*arguments))


def test_compiled_with_numbers(fresh_compiler: None) -> None:
    """A seed that is a number is one of the program's constants; without one each call draws anew."""
    hidden, weight = problem(rows=64)
    fixed = torch.compile(lambda h, w: cute_backend.sample(h, w, temperature=0.7, seed=3), fullgraph=True)
    expected = cute_backend.sample(hidden, weight, temperature=0.7, seed=3)
    assert torch.equal(fixed(hidden, weight), expected) and torch.equal(fixed(hidden, weight), expected)
    free = torch.compile(lambda h, w: cute_backend.sample(h, w), fullgraph=True)
    assert not torch.equal(free(hidden, weight), free(hidden, weight))
