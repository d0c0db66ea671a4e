"""Measuring, with the GPU's part played by the CPU: no figure means anything, but every step is taken."""

import ctypes
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cute_backend import UsageError
from cute_backend.__main__ import main
from cute_backend.bench import command, decoding, measure, scaled_mm
from cute_backend.bench.environment import Nvml
from cute_backend.bench.program_timing import MAX_CALLS, Unit
from cute_backend.bench.results import Ceilings, Clock, Results, Timing
from cute_backend.bench.table import Rate, Runner, function_table
from support import sample_results

EXAMPLE = Path(__file__).parents[2] / "examples" / "gelu_residual.py"
CEILINGS = Ceilings(1e12, {Rate.FP8: 1e15, Rate.BF16: 1e15})


class FakeNvml:
    driver, power_limit_w = "580.1", 700

    def sample_clock(self):
        pass

    def take_clock(self):
        return Clock(1, 2, 3)


@pytest.fixture
def on_cpu(monkeypatch):
    """Units run once, on the CPU, and each call takes a microsecond more than the last one's."""
    torch._dynamo.reset()

    def unit_of(program, sets):
        for args in sets:
            program(*args)
        return Unit(lambda: None, len(sets))

    def time_units(units, rounds, meanwhile=None):
        return {key: Timing(float(i), float(i), float(i)) for i, key in enumerate(units, 1)}

    monkeypatch.setattr(measure, "_DEVICE", "cpu")
    monkeypatch.setattr(measure, "unit_of", unit_of)
    monkeypatch.setattr(measure, "time_units", time_units)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**20, 2**30))
    monkeypatch.setattr(command, "require_gpu", lambda: None)
    monkeypatch.setattr(command, "Nvml", FakeNvml)
    monkeypatch.setattr(
        command, "describe", lambda nvml: replace(sample_results.results().machine, gpu="NVIDIA Nothing")
    )


def a_run(**changes):
    told = []
    run = measure.Run(CEILINGS, {}, FakeNvml(), 2, told.append)
    return replace(run, **changes), told


def small_table(*problems):
    return replace(scaled_mm.SCALED_MM, problems=problems)


def test_a_problem_is_measured_cell_by_cell(on_cpu):
    table = small_table(scaled_mm.problem(32, 48, 64))
    run, told = a_run()
    (found,) = measure.measure_table(table, run)
    (problem,) = found.problems
    timed = {str(each.cell): each for each in problem.measurements if each.timing}
    runners = {
        "bare": ["eager", "cute"],
        "full": ["eager", "inductor", "cute"],
        "quant": ["eager", "inductor", "cute"],
    }
    assert {name for name in timed if "max" not in name} == {
        f"{runner} {workload}" for workload, each in runners.items() for runner in each
    }
    assert all(each.agrees and each.difference < 0.05 for each in timed.values())
    assert timed["eager full"].difference == 0 and timed["cute full"].difference > 0
    assert problem.clock == Clock(1, 2, 3)
    assert len(told) == measure.steps([table])


def test_tokens_are_judged_by_their_own_checks(on_cpu, monkeypatch):
    table = replace(decoding.SAMPLING, problems=(decoding.problem(3, 40, 16),))
    notes = measure.build_kernels([table])
    assert notes == {}
    (found,) = measure.measure_table(table, a_run()[0])
    cells = {str(each.cell): each for each in found.problems[0].measurements}
    assert list(cells) == [
        "eager logits",
        "cute sample",
        "inductor multinomial",
        "inductor greedy",
        "cute greedy",
    ]
    assert all(each.agrees and each.difference < 0.01 and not each.note for each in cells.values())

    def compiled(runner, fn):
        return fn if fn is decoding.logits else lambda hidden, *rest: torch.arange(7, 7 + len(hidden))

    monkeypatch.setattr(measure, "compiled", compiled)
    (found,) = measure.measure_table(table, a_run()[0])
    wrong = [str(each.cell) for each in found.problems[0].measurements if not each.agrees]
    assert wrong == ["cute sample", "inductor greedy", "cute greedy"]


def test_peers_that_cannot_run_are_noted_and_the_others_timed(on_cpu, monkeypatch):
    monkeypatch.setattr(measure.importlib.util, "find_spec", lambda name: None)
    real = measure.compiled

    def compiled(runner, fn):
        if runner in (Runner.INDUCTOR, Runner.MAX_AUTOTUNE):
            raise RuntimeError("out of luck\nand more")
        return real(runner, fn)

    monkeypatch.setattr(measure, "compiled", compiled)
    (found,) = measure.measure_table(small_table(scaled_mm.problem(32, 48, 64)), a_run()[0])
    notes = {str(each.cell): each.note for each in found.problems[0].measurements if each.timing is None}
    assert notes["inductor full"] == "RuntimeError: out of luck"
    assert notes["quack full"] == "not installed: pip install --no-deps quack-kernels"
    assert set(notes) == {"quack bare", "quack full", "inductor full", "inductor quant", "max-autotune full"}
    assert all(each.agrees for each in found.problems[0].measurements)


def test_a_wrong_result_and_a_failure_of_ours_do_not_agree(on_cpu, monkeypatch):
    problem = scaled_mm.bf16_problem(16, 32, 64)

    def compiled(runner, fn):
        if runner is Runner.CUTE:
            raise RuntimeError("no")
        return fn if runner is Runner.EAGER else lambda *args: fn(*args) * 1.1

    monkeypatch.setattr(measure, "compiled", compiled)
    (found,) = measure.measure_table(small_table(problem), a_run()[0])
    agree = {str(each.cell): each.agrees for each in found.problems[0].measurements}
    assert agree["eager full"] and not agree["inductor full"] and not agree["cute full"]


def test_a_program_that_fails_in_eager_is_told_in_a_sentence(on_cpu):
    table = function_table("fails", lambda x: x.reshape(7), (torch.ones(3),), Rate.BF16)
    with pytest.raises(UsageError, match="fails of fails fails in eager: RuntimeError: shape"):
        list(measure.measure_table(table, a_run()[0]))


def test_what_is_not_fused_is_noted(on_cpu):
    table = function_table("sine", torch.sin, (torch.ones(3),), Rate.BF16)
    notes = measure.build_kernels([table])
    assert ["nothing in the function is fused" in note for note in notes.values()] == [True]
    (found,) = measure.measure_table(table, a_run(notes=notes)[0])
    noted = {each.cell.runner for each in found.problems[0].measurements if each.note}
    assert noted == {Runner.CUTE}


def test_kernels_are_announced_together_at_their_sizes(on_cpu, monkeypatch):
    announced = []

    def announce(regions, device, *, at_once):
        assert at_once, "none is built while programs are timed"
        announced.append(regions)

    monkeypatch.setattr(measure, "announce", announce)
    problems = scaled_mm.problem(4096, 8192, 1024), scaled_mm.bf16_problem(128, 256, 512)
    assert measure.build_kernels([small_table(*problems)]) == {}
    (regions,) = announced
    assert [sizes for _, *sizes in regions] == [[4096, 8192, 1024, None]] * 3 + [[128, 256, 512, None]]


def test_each_call_of_a_unit_has_inputs_of_its_own(on_cpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**40, 2**40))
    workload = scaled_mm.problem(16, 32, 64).workloads[1]
    args = workload.inputs()
    sets = measure._input_sets(workload, args, limit_us=100.0, taken=1000)
    assert len(sets) == 10
    assert len({each[0].data_ptr() for each in sets}) == 10
    assert all(torch.equal(a.float(), b.float()) for each in sets for a, b in zip(each, args, strict=True))
    assert all(a.stride() == b.stride() for each in sets for a, b in zip(each, args, strict=True))
    assert len(measure._input_sets(workload, args, limit_us=0.1, taken=1000)) == MAX_CALLS
    assert len(measure._input_sets(workload, args, limit_us=5000.0, taken=1000)) == 1
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**20, 2**40))
    assert len(measure._input_sets(workload, args, limit_us=100.0, taken=2**14)) == 4
    layer = replace(workload, fn=torch.nn.Linear(4, 4))
    assert len(measure._input_sets(layer, args, limit_us=100.0, taken=1000)) == 1


def test_calls_of_small_problems_are_many_and_those_of_large_ones_few(on_cpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**40, 2**40))
    sizes = {3: MAX_CALLS, 2**20: 12, 2**24: 1}  # 8 bytes an element, at 1e12 bytes a second
    for size, calls in sizes.items():
        table = function_table("sine", torch.sin, (torch.ones(size),), Rate.BF16)
        (found,) = measure.measure_table(table, a_run(unit_us=100.0)[0])
        assert {each.calls for each in found.problems[0].measurements} == {calls}, size


@pytest.mark.parametrize(
    ("actual", "expected", "difference"),
    [
        ([2.0, 0.0], [2.0, 0.0], 0.0),
        ([3.0, 4.0], [0.0, 4.0], 0.75),
        ([0.0], [0.0], 0.0),
        ([1.0], [0.0], math.inf),
    ],
)
def test_differences_are_relative_in_norm(actual, expected, difference):
    pair = torch.tensor(actual), torch.tensor(expected)
    assert measure.relative_difference(*pair) == difference
    same = torch.ones(2)
    assert measure.relative_difference((same, pair[0]), (same, pair[1])) == difference


def test_a_nan_is_not_hidden_by_another_output():
    good, bad = torch.ones(2), torch.tensor([math.nan])
    assert math.isnan(measure.relative_difference((bad, good * 2), (torch.ones(1), good)))
    assert math.isnan(measure.relative_difference((good * 2, bad), (good, torch.ones(1)), 1e-2))


def test_results_that_are_zero_but_for_rounding_count_by_the_size_of_others():
    weights, zero = torch.full((16, 16), 2.0), torch.full((16,), 1e-9)
    assert measure.relative_difference((weights, -3 * zero), (weights, zero)) == pytest.approx(4)
    assert measure.relative_difference((weights, -3 * zero), (weights, zero), 1e-2) < 1e-6
    assert measure.relative_difference((weights * 1.25, zero), (weights, zero), 1e-2) == 0.25
    assert measure.relative_difference((weights, zero + 0.02), (weights, zero), 1e-2) > 0.9


def test_ceilings_are_of_the_best_product_and_the_copy(on_cpu, monkeypatch):
    monkeypatch.setattr(measure, "_CUBES", {64: 2, 128: 1})
    monkeypatch.setattr(measure, "_COPIED_BYTES", (100, 1000))
    found = measure.measure_ceilings([Rate.BF16, Rate.FP8], 2)
    # Calls take 1 and 2 us (copies of 100 and 1000 bytes), 3 and 4 (bf16 of 64 and 128), 5 and 6 (fp8).
    assert found.bandwidth == pytest.approx(2000 / 2e-6)
    assert found.rates == {
        Rate.BF16: pytest.approx(2 * 128**3 / 4e-6),
        Rate.FP8: pytest.approx(2 * 128**3 / 6e-6),
    }


def test_the_command_times_a_file_and_writes_json(on_cpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "measure_ceilings", lambda rates, rounds: CEILINGS)
    monkeypatch.setattr(command, "_DEVICE", "cpu")
    monkeypatch.setattr(
        sys,
        "argv",
        ["/a/cute_backend/__main__.py", "bench", "small.py", "--json", str(tmp_path), "--picture=x"],
    )
    program = tmp_path / "small.py"
    program.write_text(EXAMPLE.read_text().replace("4096", "64"))
    folder = tmp_path / "new" / "results"
    assert main(["bench", str(program), "--json", str(folder)]) == 0
    (path,) = folder.glob("nvidia-nothing-*.json")
    found = Results.load(path)
    assert found.command == "python -m cute_backend bench small.py"
    assert [str(each.cell) for each in found.tables[0].problems[0].measurements] == [
        "eager linear_gelu_residual",
        "inductor linear_gelu_residual",
        "cute linear_gelu_residual",
    ]
    captured = capsys.readouterr()
    assert "cute linear_gelu_residual" in captured.out
    assert "linear_gelu_residual: timing" in captured.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rows", "17x*"], "no table or row is called '17x*'"),
        (["--rounds", "1"], "--rounds is 1; a median with its spread needs 2 or more"),
        ([__file__, "--rows", "16x*"], "bench FILE can't be combined with --rows"),
        (["--host", "--peers"], "bench --host can't be combined with --peers"),
        (["--draw", "r.json", "--host"], "bench --draw can't be combined with --host"),
        (["--json", "/nowhere/at/all.json"], "the folder of the results, /nowhere/at, does not exist"),
        (["--picture", "speed.doc"], "a picture is written as .png"),
    ],
)
def test_what_would_fail_in_the_end_is_refused_at_once(argv, message, capsys):
    assert main(["bench", *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_a_file_stands_in_the_way_of_is_refused_before_the_timing(
    on_cpu, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(command, "run_host", lambda rounds: pytest.fail("timed"))
    taken = tmp_path / "results"
    taken.write_text("")
    assert main(["bench", "--host", "--json", str(taken)]) == 2
    assert f"the results can't be written to the folder {taken}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time on")
@pytest.mark.parametrize("argv", [[], ["--host"], ["--rows", "16x*"], [str(EXAMPLE)]])
def test_without_a_gpu_one_sentence(argv, capsys):
    assert main(["bench", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "cute_backend: bench times kernels on a GPU, and torch finds no CUDA device on this machine\n"
    )


class FakeLibrary:
    """NVML, with a clock that rises by 100 MHz at each look."""

    clock = 1400

    def nvmlDeviceGetClockInfo(self, device, domain, out):
        assert domain == 1
        self.clock += 100
        ctypes.cast(out, ctypes.POINTER(ctypes.c_uint))[0] = self.clock
        return 0

    def nvmlSystemGetDriverVersion(self, text, length):
        ctypes.memmove(text, b"580.1\0", min(6, length))
        return 0

    def nvmlDeviceGetEnforcedPowerLimit(self, device, out):
        return 3  # not supported


def test_the_clock_is_sampled_and_summed_up(monkeypatch):
    monkeypatch.setattr(Nvml, "__init__", lambda self: None)
    nvml = Nvml()
    nvml._device, nvml._clocks, nvml._found, nvml._library = ctypes.c_void_p(), [], True, FakeLibrary()
    for _ in range(3):
        nvml.sample_clock()
    assert nvml.take_clock() == Clock(1500, 1600, 1700)
    assert nvml.take_clock() is None
    assert nvml.driver == "580.1"
    assert nvml.power_limit_w is None


def test_without_nvml_nothing_is_known(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    nvml = Nvml()
    nvml.sample_clock()
    assert (nvml.take_clock(), nvml.driver, nvml.power_limit_w) == (None, None, None)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            ["/a/cute_backend/__main__.py", "bench", "--rows", "16x*"],
            "python -m cute_backend bench --rows 16x*",
        ),
        (
            ["/a/cute_backend/__main__.py", "bench", "--json=x", "--picture", "y"],
            "python -m cute_backend bench",
        ),
        (["/a/examples/demo.py", "all"], "python demo.py all"),
    ],
)
def test_the_command_is_kept_without_its_outputs(argv, told, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    assert command._command() == told
