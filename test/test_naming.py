"""Names of kernels: words that a person would use, and a digest of the kernel."""

import re
from dataclasses import field, fields, make_dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from cute_backend.fx_walk.collect import collect
from cute_backend.ops import OPS
from cute_backend.planning import Alignment, Arch, TileConfig, naming, offered, plan
from cute_backend.planning.naming import DIGEST, MAX_WORDS, digest, entry_name, words
from cute_backend.runtime.kernels import kernel as kernels
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.spec import EpilogueSpec
from support.epilogues import EPILOGUES
from support.random_specs import specs
from support.shipped import epilogue_spec, sampling_spec

WORDS = {
    "rowwise": "scaled_mm",
    "tensorwise": "scaled_mm",
    "int8_dynamic": "int_mm_scale_bias",
    "bias": "scaled_mm_bias",
    "bias_gelu_residual": "scaled_mm_bias_gelu_residual",
    "silu_mul_quant": "scaled_mm_silu_mul_quant",
    "two_outputs": "scaled_mm_residual_quant",
    "bf16_vectors": "scaled_mm_scale_bias",
    "linear_3d": "scaled_mm_bias_residual",
    "clamp_where": "scaled_mm_clamp_where",
    "e5m2_relu": "scaled_mm_relu",
    "addmm_relu": "mm_bias_relu",
    "square": "scaled_mm_scale_residual",
    "row_maxima": "scaled_mm_silu_amax",
    "greedy_token": "mm_bias_argmax",
    "label_logit": "mm_bias_pick_logsumexp",
    "sums": "scaled_mm_sum_logsumexp",
    "swiglu": "scaled_mm_swiglu_amax",
    "swiglu_chunk": "scaled_mm_swiglu",
    "swiglu7": "mm_bias_clamp_swiglu",
    "heads": "mm_bias_scale_residual",
    "per_batch": "scaled_mm_residual_scale_amax",
    "batched": "bmm_bias_scale_silu_residual_max",
}

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
A, B = torch.ones(16, 16, dtype=BF16), torch.ones(16, 16, dtype=BF16)


def spec_of(fn) -> EpilogueSpec:
    """The one region of a function of A and B."""
    (graph,) = collect(fn, (A, B))
    (region,) = graph.regions
    return region.spec


@pytest.mark.parametrize("name", EPILOGUES)
def test_a_shared_epilogue_is_called_by_what_it_does(name):
    assert words(epilogue_spec(name, True)) == WORDS[name]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (F.relu, "relu"),
        (lambda y: y.clamp(min=0), "relu"),
        (lambda y: y.clamp(-2, 2), "clamp"),
        (F.gelu, "gelu"),
        (lambda y: F.gelu(y.float(), approximate="tanh").bfloat16(), "gelu"),
        (lambda y: F.gelu(F.relu(y)), "relu_gelu"),
        (lambda y: y * torch.sigmoid(1.702 * y), "silu"),
        (torch.sigmoid, "sigmoid"),
        (lambda y: y + y.sigmoid(), "sigmoid"),
        (torch.tanh, "tanh"),
        (lambda y: y.tanh().relu(), "tanh_relu"),
        (lambda y: y.clamp(0, 6), "clamp"),
        (lambda y: F.silu(y).to(E4M3), "silu_quant"),
        (lambda y: y.relu().to(E4M3), "relu_quant"),
        (lambda y: y * y.tanh(), "tanh"),
        (lambda y: y * y.erf(), "erf"),
        (lambda y: F.relu(y) ** 2, "relu_square"),
        (lambda y: torch.where(y > 1, y, 0.0), "where"),
        (lambda y: (y * 3).to(E4M3), "quant"),
        (lambda y: y.clamp(-448, 448).to(E4M3), "quant"),
        (lambda y: y.clamp(-448, 448) * 2, "clamp"),
        (lambda y: (y + A).clamp(-7, 7) * B, "residual_clamp_mul"),
        (lambda y: y.float().abs().amax(-1), "amax"),
        (lambda y: y.float().amax(0), "max"),
        (lambda y: (y.relu(), y.float().mean()), "relu_mean"),
    ],
)  # fmt: skip
def test_a_formula_is_recognised_in_each_spelling(fn, expected):
    assert words(spec_of(lambda a, b: fn(a @ b))) == f"mm_{expected}"


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (F.silu, "swiglu"),
        (F.gelu, "geglu"),
        (F.relu, "reglu"),
        (torch.sigmoid, "glu"),
        (torch.tanh, "tanh_mul"),
    ],
)
def test_a_pair_is_called_by_its_activation(activation, expected):
    def gated(a, b):
        gate, up = (a @ b).float().chunk(2, -1)
        return up * activation(gate)

    assert words(spec_of(gated)) == f"mm_{expected}"


def test_a_function_that_is_added_to_the_op_table_is_a_word():
    spec = spec_of(lambda a, b: torch.tanh(a @ b))
    renamed = replace(spec, ops=tuple(replace(op, op=op.op.replace("tanh", "cbrt")) for op in spec.ops))
    assert words(renamed) == "mm_cbrt"


def test_ops_that_are_no_words_are_in_the_op_table():
    assert set(OPS) > naming._UNSAID


def test_draws_are_called_so_once():
    assert words(sampling_spec("a further pass")) == "scaled_mm_bias_sample"
    assert words(sampling_spec("with logarithms")).endswith("_sample_scale_logsumexp")


def test_a_long_chain_is_cut_at_a_word():
    def long(a, b):
        y = (a @ b).float()
        for name in ("exp", "log1p", "sin", "cos", "tanh", "sqrt", "floor", "ceil", "round", "log"):
            y = getattr(torch, name)(y)
        return y

    assert words(spec_of(long)) == "mm_exp_log1p_sin_cos_tanh_sqrt_floor_ceil_etc"


@settings(max_examples=40, deadline=None)
@given(specs())
def test_every_name_is_an_identifier_of_bounded_length(spec):
    assert len(words(spec)) <= MAX_WORDS
    name = entry_name(plan(spec, TileConfig(Arch.SM100A, 256, 256, ctas=2), Alignment.PLAIN))
    assert re.fullmatch(r"cute_(scaled_|int_)?b?mm(_[a-z0-9]+)*_\d+x\d+_[0-9a-f]{8}", name, re.ASCII)
    assert len(name) < 80


def test_whatever_makes_another_kernel_makes_another_digest_and_versions_do_not(monkeypatch):
    spec = epilogue_spec("bias", True)
    made = [
        Kernel(plan(each, config, alignment))
        for each in (spec, replace(spec, ops=spec.ops[:2], stores=(replace(spec.stores[0], value="t1"),)))
        for arch in Arch
        for config in offered(arch, each)
        for alignment in Alignment
    ]
    assert len({kernel.entry for kernel in made}) == len(set(made)) > 400
    assert all(re.fullmatch(rf"{kernel.entry}_[0-9a-f]{{16}}", kernel.name) for kernel in made)
    before = {kernel: kernel.name for kernel in made}
    monkeypatch.setattr(kernels, "environment", lambda: ("later",))
    for kernel in made:
        again = Kernel(plan(kernel.plan.spec, kernel.plan.tile, kernel.plan.alignment))
        assert again.entry == kernel.entry and again.name != before[kernel]


def test_a_field_that_is_added_with_a_default_changes_no_digest():
    spec, config = epilogue_spec("bias", True), TileConfig(Arch.SM90A, 128, 128)
    added = [("added", int, field(default=0))]
    later_spec = make_dataclass("LaterSpec", added, bases=(EpilogueSpec,), frozen=True)
    later_config = make_dataclass("LaterConfig", added, bases=(TileConfig,), frozen=True)

    def of(value, kind, **more):
        return kind(**{each.name: getattr(value, each.name) for each in fields(value)}, **more)

    made = plan(spec, config, Alignment.TMA)
    before = digest(made)
    assert digest(replace(made, spec=of(spec, later_spec), tile=of(made.tile, later_config))) == before
    assert digest(replace(made, spec=of(spec, later_spec, added=1))) != before
    assert digest(replace(made, tile=of(made.tile, later_config, added=1))) != before
    assert digest(plan(spec, config, Alignment.PLAIN)) != before


@pytest.mark.parametrize(
    "called",
    [
        "1a2b3c4d",
        "cute_mm_bias_128x128_1a2b3c4d",
        "cute_mm_bias_128x128_1a2b3c4d_cutlass_0",
        "cute_mm_bias_128x128_1a2b3c4d_finish_cutlass_1",
        "cute_mm_bias_relu_64x64_1a2b3c4d_parts_cutlass_0",
        "cute_mm_bias_128x128_1a2b3c4d_0123456789abcdef",
    ],
)
def test_the_digest_is_found_in_whatever_people_copy(called):
    found = DIGEST.search(called)
    assert found is not None and found[1] == "1a2b3c4d"


@pytest.mark.parametrize("called", ["sm_90a_64x64_tma_0123456789abcdef", "cute_mm", "1a2b3c4", "1a2b3c4d.so"])
def test_what_has_no_digest_gives_none(called):
    assert DIGEST.search(called) is None
