"""explain, generate and build: what they show a person, without a GPU."""

import functools
import re
import subprocess
import sys

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_backend
from cute_backend import UsageError
from cute_backend.api import Product, Source
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.planning import Alignment, Arch, Constraints, TileConfig, plan
from cute_backend.runtime.arguments.device import Device
from cute_backend.runtime.kernels import reach
from cute_backend.runtime.kernels.source import text_of
from cute_backend.runtime.tuning import winners
from cute_backend.runtime.tuning.tuning_results import Key, Result, remembered
from cute_backend.simulator.simulate import Machine, run
from support.epilogues import EPILOGUES, Problem


def explain(name, arch="sm_90a", m=512, n=512, k=512, **options):
    epilogue = EPILOGUES[name]
    return cute_backend.explain(epilogue.fn, *epilogue.inputs(Problem(m, n, k)), arch=arch, **options)


def test_an_explanation_prints_as_a_table():
    expecttest.assert_expected_inline(
        re.sub(r"(epilogues.py):\d+", r"\1:LINE", str(explain("silu_mul_quant"))),
        """\
1 region fused

region 0: _scaled_mm, aten._scaled_mm.default of M 512, N 512, K 512
    cute_scaled_mm_silu_mul_quant_64x64_48bfc437:
    sm_90a, tile 64x64_1x1_pingpong:
    64 by 64, ping-pong, subtiles of 32 columns, raster 8
    acc of b, at epilogues.py:LINE
    t1 = acc * scale_a * scale_b
    out0 = e4m3(minimum(maximum(t1 / (exp(-t1) + 1) * exact0 * scalar0, -448), 448))

             in your program  kind    placement    dtype
    -----------------------------------------------------
    scale_a  scale_a          colvec  row_read     f32
    scale_b  scale_b          rowvec  smem_staged  f32
    exact0   other            exact   tma          bf16
    scalar0  scale_out        scalar  scalar       f32
    out0                      output  tma          e4m3""",
    )


def test_refusals_are_listed_with_their_reasons():
    def fn(a, b):
        return (a @ b).relu().cumsum(-1)

    a, b = torch.randn(64, 64, dtype=torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16)
    explained = cute_backend.explain(fn, a, b)
    (region,) = explained.regions
    assert region.formula == "out0 = bf16(relu(acc))"
    (refusal,) = explained.rejections
    assert (refusal.node, refusal.reason) == ("cumsum", Reason.NOT_POINTWISE)
    assert refusal.message == (
        "aten.cumsum.default is neither a pointwise op nor a reduction that kernels compute"
    )
    assert re.search(
        r"cumsum +test_api.py:\d+ +not_pointwise +aten.cumsum.default is neither a pointwise op",
        str(explained),
    )


def two_that_cost_nothing(a, b):
    left = (a @ b).view(-1).cumsum(0)
    return left, b @ a, a.new_empty(64, 0) @ b[:0]


def test_refusals_that_cost_nothing_are_apart_from_those_that_matter():
    a, b = torch.randn(64, 64, dtype=torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16)
    explained = cute_backend.explain(two_that_cost_nothing, a, b)
    found = {each.node: (each.reason, each.costs_nothing) for each in explained.rejections}
    assert found == {
        "mm": (Reason.NOTHING_TO_FUSE, False),  # what follows it was refused
        "view": (Reason.REARRANGED, False),
        "mm_1": (Reason.NOTHING_TO_FUSE, True),
        "mm_2": (Reason.EMPTY, True),
    }
    first, matter, free = str(explained).split("\n\n")
    assert first == "no regions fused, 4 refusals (2 cost nothing)"
    assert [line.split()[0] for line in matter.splitlines()[2:] if not line.startswith(" ")] == ["mm", "view"]
    assert free.startswith("costs nothing  line ") and "mm_1" in free and "mm_2" in free
    assert "<caption>What is left to Inductor, which costs nothing</caption>" in explained.to_html("page")


def test_forward_and_backward_are_labelled():
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64, dtype=torch.bfloat16),
        torch.nn.GELU(),
        torch.nn.Linear(64, 32, dtype=torch.bfloat16),
    )
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    explained = cute_backend.explain(model, x, arch="sm_90a")
    assert explained.has_backward
    assert [(each.node, each.is_backward) for each in explained.regions] == [("addmm", False), ("mm", True)]
    found = [(each.node, each.where, each.is_backward) for each in explained.rejections]
    assert found[:2] == [("addmm_1", "self.2", False), ("mm_1", "self.2", True)]
    assert all(where.startswith("self.") for _, where, _ in found)
    lines = str(explained).splitlines()
    assert sum(line.startswith("Gradients are on: these are the forward") for line in lines) == 1
    assert "region 0 (forward): addmm, aten.addmm.default of M 16, N 64, K 64" in lines
    assert any(re.match(r"mm_1 +backward +self\.2 +nothing_to_fuse", line) for line in lines)

    with torch.no_grad():
        inference = cute_backend.explain(model, x, arch="sm_90a")
    assert not inference.has_backward and not any(each.is_backward for each in inference.rejections)
    assert not re.search("forward|backward|Gradients", str(inference))


@pytest.mark.parametrize(
    ("fn", "where"),
    [
        (torch.mm, r"torch\.mm"),
        (F.linear, r"torch\._C\._nn\.linear"),
        (functools.partial(torch.mm), r"torch\.mm"),
    ],
    ids=["mm", "linear", "partial"],
)
def test_no_refusal_is_without_a_place(fn, where):
    a, b = torch.randn(64, 64, dtype=torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16)
    (refusal,) = cute_backend.explain(fn, a, b).rejections
    assert re.fullmatch(where, refusal.where)


def test_an_error_of_our_own_has_the_functions_place(monkeypatch):
    def fn(a, b):
        return (a @ b).relu()

    def fail(*args):
        raise RuntimeError("planted")

    monkeypatch.setattr("cute_backend.fx_walk.collect.regions_of", fail)
    a, b = torch.randn(64, 64, dtype=torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16)
    with cute_backend.config.patch(raise_errors=False), pytest.warns(RuntimeWarning, match="planted"):
        (refusal,) = cute_backend.explain(fn, a, b).rejections
    assert refusal.reason is Reason.INTERNAL_ERROR
    assert refusal.where == f"test_api.py:{fn.__code__.co_firstlineno}"


def test_a_test_can_pin_what_is_fused():
    def fn(a, b):
        return (a @ b).relu().cumsum(-1)

    a, b = torch.randn(64, 64, dtype=torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16)
    explained = cute_backend.explain(fn, a, b)
    explained.assert_fused()
    explained.assert_fused(regions=1, no=["rearranged", Reason.FEEDBACK])
    with pytest.raises(AssertionError, match=r"^regions: 1, expected 2; refused as not_pointwise: 1, "):
        explained.assert_fused(regions=2, no=["not_pointwise", "rearranged"])
    with pytest.raises(AssertionError, match=r"^regions: 1, expected 0\n"):
        explained.assert_fused(regions=0)
    with pytest.raises(UsageError, match=r"^'rearrange' is no reason of a .* \(did you mean 'rearranged'\?"):
        explained.assert_fused(no=["rearrange"])

    bare = cute_backend.explain(torch.mm, a, b)
    bare.assert_fused(regions=0)
    with pytest.raises(AssertionError, match=r"^regions: 0, expected at least 1\n\nno regions fused"):
        bare.assert_fused()


def test_a_product_left_alone_names_the_refusals_that_leave_it():
    def fn(a, b):
        return (a @ b).view(-1).cumsum(0), b @ a

    a, b = torch.randn(64, 64, dtype=torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16)
    messages = {each.node: each.message for each in cute_backend.explain(fn, a, b).rejections}
    assert messages["mm"] == "no op that could be fused follows the product; refused: view"
    assert messages["mm_1"] == "no op that could be fused follows the product"


def test_a_program_without_a_product_has_nothing_to_explain():
    explained = cute_backend.explain(torch.relu, torch.randn(4))
    assert explained.regions == explained.rejections == ()
    with pytest.raises(UsageError, match="no kernel: there is no matrix product in it"):
        cute_backend.generate(torch.relu, torch.randn(4))


def test_a_product_that_is_refused_says_why_there_is_no_kernel():
    with pytest.raises(
        UsageError, match=r"no kernel: mm: kernels for sm_100a do not multiply torch\.float32"
    ):
        cute_backend.generate(lambda a, b: (a @ b).relu(), torch.randn(4, 4), torch.randn(4, 4))


def test_labels_are_the_programs_names():
    class Linear(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.projection = torch.nn.Linear(64, 64, dtype=torch.bfloat16)

        def forward(self, x, residual):
            return self.projection(x).relu() + residual

    x, residual = torch.randn(2, 2, 32, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        (region,) = cute_backend.explain(Linear(), x, residual).regions
    assert [load.label for load in region.loads] == ["self.projection.bias", "residual"]


def test_a_region_that_reads_anothers_result_says_so():
    def gated(a, b, scale_a, scale_b, other):
        def product(a):
            return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16)

        return F.silu(product(a)) * product(other).relu()

    inputs = EPILOGUES["rowwise"].inputs(Problem(64, 64, 64))
    first, second = cute_backend.explain(gated, *inputs, inputs[0].clone()).regions
    assert first.stores[0].name == "out0"
    assert [load.label for load in second.loads if load.kind == "exact"] == ["region 0, out0"]


def test_a_region_has_the_number_of_its_place_behind_those_that_it_reads() -> None:
    """The larger product takes the sum, although it comes first in the graph, as in Falcon's parallel MLP."""

    def parallel(x, down, small, up):
        return x @ down + F.relu(small @ up)

    shapes = (32, 512), (512, 48), (32, 64), (64, 48)
    operands = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    first, second = cute_backend.explain(parallel, *operands).regions
    assert (first.sizes[2], second.sizes[2]) == (64, 512)
    assert [load.label for load in second.loads] == ["region 0, out0"]
    assert second.sources == (Source(0, 0),)


@pytest.mark.parametrize(
    ("parts", "columns"),
    [
        (lambda y: y.chunk(2, -1), ("[0:48]", "[48:96]")),
        (lambda y: (y[:, ::2], y[:, 1::2]), ("[0::2]", "[1::2]")),
    ],
    ids=["halves", "neighbours"],
)
def test_a_pair_is_shown_with_the_columns_of_each(parts, columns):
    labels = [f"self.up_gate.weight {each}" for each in columns]

    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up_gate = torch.nn.Linear(64, 96, dtype=torch.bfloat16)

        def forward(self, x):
            gate, up = parts(self.up_gate(x))
            return gate.relu() * up

    with torch.no_grad():
        explained = cute_backend.explain(Gated(), torch.randn(32, 64, dtype=torch.bfloat16))
    (region,) = explained.regions
    line = f"test_api.py:{Gated.forward.__code__.co_firstlineno + 1}"
    assert region.products == tuple(Product(label, line) for label in labels) and region.sizes == (32, 48, 64)
    assert region.formula == "out0 = bf16(relu(acc0 + bias0) * (acc1 + bias1))"
    lines = str(explained).splitlines()
    assert lines[5].startswith("    2 accumulators of 128 by 64, a warpgroup for the epilogue of each half")
    assert [f"    acc{i} of {label}, at {line}" for i, label in enumerate(labels)] == lines[6:8]
    assert [load.label for load in region.loads] == [label.replace("weight", "bias") for label in labels]


def test_what_the_program_computes_is_told_by_its_variable_and_line():
    def quantized(x, w, scale_w):
        scale = x.abs().amax(-1, keepdim=True) / 448
        q = (x / scale).to(torch.float8_e4m3fn)
        y = torch._scaled_mm(q, w, scale.clone(), scale_w, out_dtype=torch.bfloat16)
        return y * torch.softmax(x[:, :1] + 1, 0).add(1)

    x, scale_w = torch.randn(64, 64), torch.ones(1, 64)
    w = torch.randn(64, 64).to(torch.float8_e4m3fn).t()
    (region,) = cute_backend.explain(quantized, x, w, scale_w).regions
    line = quantized.__code__.co_firstlineno
    names = {load.name: load.label for load in region.loads}
    assert names["scale_a"] == f"scale (test_api.py:{line + 1})"
    assert names["scale_b"] == "scale_w"
    assert re.fullmatch(rf"\w+ \(test_api.py:{line + 4}\)", names["colvec0"])


def test_keyword_arguments_are_arguments():
    class Linear(torch.nn.Module):
        def forward(self, x, *, weight, output=None, **rest):
            return {"hidden": (x @ weight).relu() + rest["shift"]} if output == "dict" else x @ weight

    x, weight = torch.randn(64, 64, dtype=torch.bfloat16), torch.randn(64, 32, dtype=torch.bfloat16)
    named = {"weight": weight, "output": "dict", "shift": torch.ones(32)}
    (region,) = cute_backend.explain(Linear(), x, arch="sm_90a", **named).regions
    assert [product.label for product in region.products] == ["weight"]
    assert [load.label for load in region.loads] == ["shift"]
    assert cute_backend.generate(Linear(), x, arch="sm_90a", **named) == region.source()


def test_a_class_is_refused_where_an_instance_is_meant():
    x = torch.randn(4, 4)
    for ask in (cute_backend.explain, cute_backend.generate, cute_backend.build, cute_backend.simulate):
        with pytest.raises(UsageError, match=r"^ReLU is a class; give an instance .* as ReLU\(...\)$"):
            ask(torch.nn.ReLU, x)
    with pytest.raises(UsageError, match=r"^the first argument is of type Tensor, not a function"):
        cute_backend.explain(x, x)


def test_nothing_is_computed():
    with FakeTensorMode():
        inputs = EPILOGUES["bias_gelu_residual"].inputs(Problem(2**20, 2**20, 2**20))
    (region,) = cute_backend.explain(EPILOGUES["bias_gelu_residual"].fn, *inputs).regions
    assert region.sizes == (2**20, 2**20, 2**20)


def test_explaining_leaves_no_trace_in_what_is_compiled(fresh_compiler):
    epilogue = EPILOGUES["rowwise"]
    inputs = epilogue.inputs(Problem(32, 32, 32))
    for _ in range(20):  # beyond the limit of recompilations
        assert len(cute_backend.explain(epilogue.fn, *inputs).regions) == 1
    compiled = torch.compile(epilogue.fn, backend="cute", dynamic=False)
    torch.testing.assert_close(compiled(*inputs), epilogue.fn(*inputs), rtol=1e-2, atol=1e-2)
    assert torch._dynamo.utils.counters["cute_backend"]["regions"] == 1


def test_a_source_names_the_line_behind_each_statement():
    """Values that simplification makes have the line of the op that they stand for."""

    def program(x, weight, bias):
        y = x @ weight
        y = F.silu(y + bias)
        return y, y.float().amax(-1)

    x, weight = torch.randn(64, 64, dtype=torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16)
    (region,) = cute_backend.explain(program, x, weight, weight[0], arch="sm_90a").regions
    first = program.__code__.co_firstlineno
    shown = re.findall(r"^ +(\w+)(?:\[e\])? = .*  # test_api\.py:(\d+)$", region.source(), re.MULTILINE)
    lines = {name: int(line) - first for name, line in shown}
    assert lines == {"t0": 2, "t1": 2, "t2": 2, "t3": 2, "out0": 2, "out1": 3}
    compiled = text_of(region.kernel())
    assert re.sub(r" +# test_api\.py:\d+$", "", region.source(), flags=re.MULTILINE) == compiled
    assert "test_api" not in compiled


def test_dynamic_sizes_are_symbols():
    (region,) = explain("bias", dynamic=True, m=48, n=64, k=32).regions
    assert all(isinstance(size, str) for size in region.sizes)
    assert region.hints == (48, 64, 32)


@pytest.mark.parametrize(
    ("unfused", "shown"),
    [(None, "timed on this GPU: 12.2 us"), (14.0, "timed on this GPU: 12.2 us, Inductor's own code 14.0")],
)
def test_a_region_shows_the_times_that_decided(monkeypatch, tmp_path, unfused, shown):
    """Those of its M, on the GPU at hand."""
    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", str(tmp_path))
    gpu = Device(0, Arch.SM90A, 132, "a GPU, 132 SMs")
    monkeypatch.setattr(winners, "_gpu_here", lambda arch: gpu if arch is gpu.arch else None)
    a, b = torch.empty(257, 64).bfloat16(), torch.empty(64, 128).bfloat16()

    def explained(m, arch):
        return cute_backend.explain(lambda a, b: (a @ b).relu(), a[:m], b, dynamic=False, arch=arch)

    (region,) = explained(257, "sm_90a").regions
    tile = TileConfig(Arch.SM90A, 128, 128)
    key = Key(region.spec, Alignment.TMA, 257, 128, 64, gpu.model)
    remembered().put({key: Result(tile, 12.25, unfused)})
    assert region.timed == shown and region.kernel().plan == plan(region.spec, tile, Alignment.TMA)
    assert shown in str(explained(257, "sm_90a"))
    for m, arch in ((256, "sm_90a"), (257, "sm_100a")):
        (other,) = explained(m, arch).regions
        assert other.timed == "" and "timed on" not in str(explained(m, arch))


def test_each_segment_of_a_launch_has_placements_of_its_own():
    """The planes of one segment leave those of the others the same shared memory. Planned as one epilogue,
    two of the three that are read would have no room."""

    def added(x, q, k, v, a, b, c):
        return [F.linear(x, each).float() + plane for each, plane in ((q, a), (k, b), (v, c))]

    with FakeTensorMode(), cute_backend.config.patch(shared_launches=True):
        x = torch.empty(512, 4096, dtype=torch.bfloat16)
        weights = [torch.empty(1024, 4096, dtype=torch.bfloat16) for _ in range(3)]
        planes = [torch.empty(512, 1024) for _ in weights]
        (region,) = cute_backend.explain(added, x, *weights, *planes, arch="sm_90a").regions
    assert len(region.spec.accumulators) == 3
    assert [each.placement for each in (*region.loads, *region.stores)] == ["tma"] * 6
    assert re.findall(r'SmemOperand\("(exact\d)"', text_of(region.kernel())) == ["exact0", "exact1", "exact2"]


def test_placements_depend_on_the_architecture():
    few_tiles = {"m": 16, "n": 1024}
    (hopper,) = explain("rowwise", "sm_90a", k=8192, **few_tiles).regions  # split-K, transposed
    (blackwell,) = explain("rowwise", "sm_100a", k=256, **few_tiles).regions  # too short to hide a hoist
    assert [load.placement for load in hopper.loads] == ["register_hoist", "row_read"]
    assert [load.placement for load in blackwell.loads] == ["smem_staged", "row_read"]
    (deep,) = explain("rowwise", "sm_100a", k=8192, **few_tiles).regions
    assert hopper.source("sm_100a") == deep.source() != hopper.source()


@pytest.mark.parametrize(("columns", "placement"), [(512, "tma"), (500, "vector")])
def test_alignment_decides_how_planes_travel(columns, placement):
    (region,) = explain("clamp_where", n=columns).regions
    assert {load.placement for load in region.loads if load.kind == "exact"} == {placement}
    assert [store.placement for store in region.stores] == [placement]


def test_an_offset_plane_is_not_aligned():
    inputs = list(EPILOGUES["clamp_where"].inputs(Problem(64, 64, 64)))
    inputs[-1] = torch.zeros(64 * 64 + 1, dtype=torch.bfloat16)[1:].view(64, 64)
    (region,) = cute_backend.explain(EPILOGUES["clamp_where"].fn, *inputs).regions
    assert {load.placement for load in region.loads if load.kind == "exact"} == {"vector"}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_build_gives_the_figures_of_the_generated_kernel(arch):
    epilogue = EPILOGUES["bias"]
    inputs = epilogue.inputs(Problem(256, 256, 256))
    built = cute_backend.build(epilogue.fn, *inputs, arch=arch)
    region = cute_backend.explain(epilogue.fn, *inputs, arch=arch).first_region()
    assert built.source == text_of(region.kernel())
    assert f".target {arch}" in built.ptx
    assert built.cubin.startswith(b"\x7fELF")
    assert 32 < built.registers <= 255
    assert built.spill_bytes == 0
    assert 32 * 1024 < built.smem_bytes <= 227 * 1024


@pytest.mark.parametrize("ask", [cute_backend.explain, cute_backend.generate, cute_backend.build])
def test_an_unknown_architecture_is_named_beside_the_known(ask):
    message = "arch is 'sm_75'; kernels are generated for sm_90a, sm_100a, sm_80, .*, sm_120a and sm_121a"
    with pytest.raises(UsageError, match=message):
        ask(torch.mm, torch.randn(4, 4), torch.randn(4, 4), arch="sm_75")


def test_without_the_dsl_only_build_fails_and_says_what_to_install(tmp_path):
    """As the process says that compiles a kernel."""
    code = """
import sys
from pathlib import Path
sys.path.insert(0, "test")
sys.modules["cutlass"] = None
import cute_backend
from cute_backend.runtime.compiling.build import compiled
from cute_backend.runtime.disk.cache import KernelCache
from cute_backend.errors import UnavailableError
from support.epilogues import EPILOGUES, Problem
fn, inputs = EPILOGUES["rowwise"].fn, EPILOGUES["rowwise"].inputs(Problem(64, 64, 64))
assert "class Epilogue" in cute_backend.generate(fn, *inputs)
kernel = cute_backend.explain(fn, *inputs).first_region().kernel()
try:
    compiled(KernelCache(Path(sys.argv[1])), kernel)
except UnavailableError as error:
    print(error)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "pip install 'nvidia-cutlass-dsl[cu13]" in done.stdout


def tile_of(problem: reach.Problem) -> TileConfig:
    """The tile that runs for a problem whose planes are aligned."""
    chosen = reach.config_for(problem, Alignment.TMA, Arch.SM90A, Arch.SM90A.target.sm_count)
    return plan(problem.spec, chosen, Alignment.TMA).tile


@pytest.mark.parametrize("invariant", [False, True])
def test_what_is_shown_is_the_tile_that_a_launch_gets(invariant):
    m, n, k = 4096, 512, 256
    x, weight, bias = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16(), torch.randn(n).bfloat16()
    with cute_backend.config.patch(batch_invariant=invariant):
        region = cute_backend.explain(
            lambda x, weight, bias: torch.addmm(bias, x, weight.t()).relu(), x, weight, bias, arch="sm_90a"
        ).first_region()
        shown = region.kernel().plan.tile
    wanted = reach.Problem(region.spec, m, n, k, constraints=Constraints(invariant))
    assert shown == tile_of(wanted)
    other = reach.Problem(region.spec, m, n, k, constraints=Constraints(not invariant))
    assert shown != tile_of(other)


def test_a_tile_by_name_is_the_one_that_is_explained_and_built():
    name = "128x128_1x2"
    with cute_backend.config.patch(tile=name):
        explained = explain("bias_gelu_residual")
        assert f"sm_90a, tile {name}:" in str(explained)
        assert explained.regions[0].build().source == text_of(explained.regions[0].kernel())
        assert "TileConfig(Arch.SM90A, 128, 128, cluster_n=2, raster_m=16)" in explained.regions[0].source()
    assert explained.regions[0].kernel().plan.tile.name != name  # the setting is read when it is asked
    assert {name, "128x256_2x1"} < set(explained.regions[0].tiles)
    refusal = r"config\.tile is '128x9'.*; scaled_mm_bias_gelu_residual on sm_90a can take \d+ tiles, "
    with cute_backend.config.patch(tile="128x9"), pytest.raises(UsageError, match=refusal):
        explain("bias_gelu_residual")


def test_a_tile_by_name_is_simulated():
    epilogue = EPILOGUES["bias"]
    with cute_backend.config.patch(tile="64x64_1x1"):
        simulated = run(epilogue.fn, epilogue.inputs(Problem(64, 64, 64)), Machine(Arch.SM90A))
    assert simulated.launches[0].kernel.plan.tile.name == "64x64_1x1"
