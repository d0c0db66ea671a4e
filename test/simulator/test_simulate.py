"""`cute_backend.simulate` and `python -m cute_backend simulate`: what people call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cute_backend
from cute_backend import config
from cute_backend.__main__ import main
from cute_backend.errors import UsageError
from cute_backend.planning import Arch
from cute_backend.presentation import terminal
from cute_backend.simulator import host, simulate
from cute_backend.simulator.simulation_errors import Runaway, SimulationError
from support.epilogues import EPILOGUES, Problem


def inputs_of(name: str, m: int = 40, n: int = 48, k: int = 64) -> tuple[torch.Tensor, ...]:
    return EPILOGUES[name].inputs(Problem(m, n, k))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_the_result_has_the_form_of_the_functions_own(arch):
    inputs = inputs_of("two_outputs")
    hidden, quantised = cute_backend.simulate(EPILOGUES["two_outputs"].fn, *inputs, arch=arch, async_seed=5)
    assert (hidden.dtype, quantised.dtype) == (torch.bfloat16, torch.float8_e4m3fn)
    expected = simulate.reference(EPILOGUES["two_outputs"].fn, inputs)
    assert all(difference.agrees for difference in simulate.compare((hidden, quantised), expected))


def test_what_stands_around_a_region_runs_too():
    a, b, scale_a, scale_b = inputs_of("rowwise")

    def fn(a, b, shift, *, twice):
        y = EPILOGUES["rowwise"].fn(a, b, scale_a, scale_b)
        return {"sum": y.float().cumsum(0) + shift, "twice": twice}

    def call(a, b, shift):
        return fn(a, b, shift, twice=True)

    simulation = simulate.run(call, (a, b, 3.0), simulate.Machine())
    assert simulation.outputs["twice"] is True
    expected = fn(a, b, 3.0, twice=True)["sum"]
    torch.testing.assert_close(simulation.outputs["sum"], expected, rtol=1e-2, atol=1e-1)
    assert len(simulation.launches) == 1


def test_modules_and_several_regions():
    class Mlp(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(64, 48, dtype=torch.bfloat16)
            self.down = torch.nn.Linear(48, 32, dtype=torch.bfloat16)

        def forward(self, x):
            return self.down(self.up(x).relu()).sigmoid()

    module, x = Mlp(), torch.randn(2, 20, 64, dtype=torch.bfloat16)
    simulation = simulate.run(module, (x,), simulate.Machine())
    assert [launch.problem for launch in simulation.launches] == [(40, 48, 64), (40, 32, 48)]
    torch.testing.assert_close(simulation.outputs, module(x), rtol=2e-2, atol=2e-2)


def test_one_function_may_be_simulated_often():
    """More often than Dynamo compiles one function before it gives up."""
    with torch._dynamo.config.patch(recompile_limit=2):
        for m in (16, 32, 48, 64):
            inputs = inputs_of("rowwise", m=m)
            out = cute_backend.simulate(EPILOGUES["rowwise"].fn, *inputs)
            assert out.shape == (m, 48)


def test_progress_is_reported():
    heard = []
    machine = simulate.Machine(clusters=2, progress=lambda *step: heard.append(step))
    [launch] = simulate.run(EPILOGUES["rowwise"].fn, inputs_of("rowwise", m=300), machine).launches
    assert [step[:2] for step in heard] == [(1, 2), (2, 2)]
    # Waits that are tried again are counted in the progress; clusters run side by side.
    assert launch.report.instructions // 2 < heard[0][2] < heard[1][2]
    assert launch.report.instructions <= heard[1][2]


def test_a_kernel_that_runs_away_is_stopped(monkeypatch):
    monkeypatch.setattr(simulate, "INSTRUCTIONS_PER_SECOND", 100)
    with pytest.raises(Runaway, match="some loop does not end"):
        cute_backend.simulate(EPILOGUES["rowwise"].fn, *inputs_of("rowwise"))


def test_an_unwritten_element_disagrees():
    full, partial = torch.ones(4, 4), torch.ones(4, 4)
    partial[3, 3] = float("nan")
    assert simulate.compare(full, full)[0].agrees
    assert not simulate.compare(partial, full)[0].agrees
    both_nan = simulate.compare(partial, partial)[0]
    assert both_nan.agrees and both_nan.equal == 16
    assert not simulate.compare(full + 1e-3, full)[0].agrees


def test_integers_that_are_off_by_one_everywhere_do_not_agree() -> None:
    """A few may be, as values round the other way."""
    counts = torch.arange(200, 300)
    few = counts + (counts % 10 == 0)
    assert simulate.compare(few, counts)[0].agrees
    off = simulate.compare(counts + 1, counts)[0]
    assert off.relative < off.allowed and not off.agrees


def test_what_is_allowed_is_shown(capsys):
    full = torch.ones(4, 4)
    for actual, verdict in ((full, "agrees"), (full + 1e-3, "WRONG")):
        differences = simulate.compare((actual, actual.int()), (full, full.int()))
        terminal.show(terminal.comparison_table(differences))
        floats, integers = (line.split() for line in capsys.readouterr().out.splitlines()[-2:])
        assert floats[-2:] == ["1.2e-07", verdict] and integers[-3:] == ["0.0e+00", "1.0e-02", "agrees"]


def test_advice_on_rounding_stands_where_an_error_may_be_that():
    full = torch.ones(4, 4)
    advised = [
        "try smaller inputs" in str(terminal.launch_legend(simulate.compare(full + off, full)))
        for off in (0.0, 1e-5, 0.25, float("nan"))
    ]
    assert advised == [False, True, False, False]


def test_requests_that_cannot_be_met_are_told_in_one_sentence():
    rowwise, inputs = EPILOGUES["rowwise"].fn, inputs_of("rowwise")
    known = r"^arch is 'sm_75'; kernels are generated for sm_90a, sm_100a, sm_80, .*, sm_120a and sm_121a$"
    with pytest.raises(UsageError, match=known):
        cute_backend.simulate(rowwise, *inputs, arch="sm_75")
    for seed in (-1, 1.5, True):
        with pytest.raises(
            UsageError, match=f"^async_seed is {seed}; it takes a whole number that is not neg"
        ):
            cute_backend.simulate(rowwise, *inputs, async_seed=seed)
    with pytest.raises(UsageError, match="nothing in the function is fused"):
        cute_backend.simulate(torch.sin, inputs[2])
    with pytest.raises(
        UsageError, match=r"^simulating M = 65536, N = 4128, K = 64 would take about \d+ minutes"
    ):
        cute_backend.simulate(
            rowwise,
            torch.zeros(65536, 64, dtype=torch.float8_e4m3fn),
            torch.zeros(4128, 64, dtype=torch.float8_e4m3fn).t(),
            torch.ones(65536, 1),
            torch.ones(1, 4128),
        )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_packed_vector_is_hoisted_up_to_the_edge(dtype: torch.dtype) -> None:
    """Two elements of 16 bits share a register; columns beyond N, of the last tile, are clamped."""

    def program(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, x, weight.t()).relu()

    m, n, k = 100, 200, 512
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randint(-3, 4, shape, generator=generator).to(dtype) for shape in ((m, k), (n, k), (n,))
    )
    with config.patch(tile="128x64_1x1_unrolled"):  # type: ignore[attr-defined]  # 100 rows get a transposed tile, where bias is a colvec
        (region,) = cute_backend.explain(program, x, weight, bias, arch="sm_100a").regions
        assert [load.placement for load in region.loads] == ["register_hoist"]
        assert "math.pack(bias_" in region.source()
        launched = simulate.run(program, (x, weight, bias), simulate.Machine(Arch.SM100A, 3))
    assert torch.equal(launched.outputs, program(x, weight, bias))
    (launch,) = launched.launches
    assert set(launch.report.exposed_loads) == {0}


PROGRAM = """
import torch

def linear(x, weight, bias):
    return torch.addmm(bias, x, weight.t()).relu()

def example_inputs():
    bf16 = torch.bfloat16
    return torch.randn(40, 64).to(bf16), torch.randn(48, 64).to(bf16), torch.randn(48).to(bf16)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_the_command_line_runs_and_compares(program, capsys):
    assert main(["simulate", program, "--arch", "sm_90a", "--async-seed", "2"]) == 0
    printed = capsys.readouterr().out
    assert "M 40, N 48, K 64 on sm_90a, tile 64x64_1x1_pingpong: 64 by 64" in printed
    assert "subtiles of 32 columns" in printed
    assert "A wait is a warp parked at a barrier." in printed
    assert "wgmma" in printed
    assert "1920 of 1920" in printed and "agrees" in printed


def test_the_command_line_tells_faults_from_requests(program, capsys, monkeypatch):
    assert main(["simulate", program, "--async-seed", "-1"]) == 2
    assert capsys.readouterr().err.startswith("cute_backend: async_seed is -1; it takes ")
    assert main(["simulate", program, "--arch", "sm_75"]) == 2
    assert (
        capsys.readouterr().err
        == "cute_backend: arch is 'sm_75'; kernels are generated for sm_90a, sm_100a, sm_80, sm_86, sm_89, "
        "sm_103a, sm_120a and sm_121a\n"
    )

    def run_kernel(*args, **how):
        raise SimulationError("a race")

    monkeypatch.setattr(host, "run_kernel", run_kernel)
    assert main(["simulate", program]) == 1
    assert capsys.readouterr().err == "a race\n"


def test_the_command_line_without_a_compiler(capsys, monkeypatch, tmp_path):
    """Of a kernel that no other test here has linked."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.replace("relu", "tanh"))
    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert main(["simulate", str(path)]) == 2
    assert capsys.readouterr() == (
        "",
        "cute_backend: the simulator needs a C compiler: install cc, gcc or clang, or name one in CC\n",
    )


def test_the_command_line_fails_where_numbers_do(program, capsys, monkeypatch):
    real = simulate.run_region

    def run_region(spec, a, b, loads, machine):
        outputs, launch = real(spec, a, b, loads, machine)
        return [output.roll(1, 0) for output in outputs], launch

    monkeypatch.setattr(simulate, "run_region", run_region)
    assert main(["simulate", program]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_the_regions_are_those_of_the_architecture():
    """Two products of one A share a launch on Hopper, but warps that multiply by themselves have no tile for
    both."""

    def program(x: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x @ left).relu(), (x @ right).relu()

    inputs = [torch.ones(shape, dtype=torch.bfloat16) for shape in ((64, 64), (64, 64), (64, 128))]
    with config.patch(shared_launches=True):  # type: ignore[attr-defined]
        launches = {
            arch: len(simulate.run(program, inputs, simulate.Machine(arch)).launches)
            for arch in (Arch.SM90A, Arch.SM80)
        }
    assert launches == {Arch.SM90A: 1, Arch.SM80: 2}
