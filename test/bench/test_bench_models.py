"""Whole models, timed: one process's part, with the CPU as its GPU, and the run of them all."""

import json
import sys
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from cute_backend import UsageError
from cute_backend.__main__ import main
from cute_backend.bench import command, model_case, model_run, models
from cute_backend.bench.model_results import (
    KernelKind,
    KernelTime,
    ModelResult,
    ModelTiming,
    Timing,
    read,
)
from cute_backend.bench.models import MODELS, Model
from cute_backend.bench.program_timing import Unit
from cute_backend.bench.results import Ceilings, Results
from cute_backend.bench.table import Runner
from support import sample_results


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(self.up(x).relu() * 3.0) + x


def small(trains=False):
    return Model("small", lambda layers: (Mlp(), (torch.randn(64, 32),)), (), trains=trains)


def result(name="llama-bf16-1", us=100.0):
    timings = tuple(
        ModelTiming(
            runner,
            Timing(factor * us, factor * us, factor * us),
            (
                KernelTime("cute_mm", KernelKind.PRODUCT, 2.0, 60.0),
                KernelTime("triton_", KernelKind.OTHER, 1.0, 30.0),
            ),
            *(((4 * 10**6, 0.01)) if factor < 3 else (None, None)),
        )
        for runner, factor in ((Runner.EAGER, 3), (Runner.INDUCTOR, 1.5), (Runner.CUTE, 1))
    )
    return ModelResult(name, timings)


def test_models_are_chosen_by_their_names():
    assert len({model.name for model in MODELS}) == len(MODELS)
    assert [model.name for model in models.select(["llama-fp8-*", "bert-bf16"])] == [
        *("llama-fp8-2048", "llama-fp8-64", "llama-fp8-1"),
        "bert-bf16",
    ]
    assert models.select([]) == [*MODELS]
    with pytest.raises(UsageError, match="'gpt5' is none of llama-bf16-2048, "):
        models.select(["llama-*", "gpt5"])


@pytest.mark.parametrize("name", ["llama-bf16-64", "gemma3-fp8-1", "bert-bf16", "vit-bf16", "gpt2-training"])
def test_a_model_has_its_real_width_in_bf16(name):
    (model,) = models.select([name])
    if model.lacks:
        pytest.skip(f"not installed: {model.lacks}")
    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("cute_backend.bench.models.quantise", lambda module: None)
        module, args = model.build()
    assert {each.dtype for each in (*args, *module.parameters())} == {torch.bfloat16}
    assert args[0].requires_grad == model.trains == all(each.requires_grad for each in module.parameters())
    widths = {each.in_features for each in module.modules() if isinstance(each, nn.Linear)}
    assert widths >= {"llama": {4096, 14336}, "gemma3": {2560, 10240}}.get(name.split("-")[0], set())


@pytest.mark.parametrize("trains", [False, True])
def test_a_model_is_measured(trains, monkeypatch, tmp_path):
    ran = []

    def unit_of(step, sets):
        ran.append([step() for _ in sets])
        return Unit(lambda: None, len(sets))

    monkeypatch.setattr(model_case, "_DEVICE", "cpu")
    monkeypatch.setattr(model_case, "unit_of", unit_of)
    monkeypatch.setattr(model_case, "time_units", lambda units, rounds: dict.fromkeys(units, Timing(3, 2, 4)))
    monkeypatch.setattr(model_case, "_kernels", lambda unit: ())
    found = model_case.measure(small(trains), 2, model_case.Turn(tmp_path / "turn"))
    eager, inductor, cute = found.timings
    assert found.agrees and [each.runner for each in found.timings] == ["eager", "inductor", "cute"]
    assert eager.bytes is None and eager.difference is None
    assert 0 < cute.difference < 0.02 and 0 <= inductor.difference < 0.02
    # The activation and its derivative belong to products of ours, and are kernels of Inductor's else.
    assert inductor.bytes > cute.bytes
    assert len(ran) == 3 and all(len(calls) == 4 for calls in ran)  # 64 rows
    results = ran[0][0]
    assert len(results) == 5 if trains else results.shape == (64, 32)
    assert read(ModelResult, json.loads(json.dumps(asdict(found)))) == found


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("cute_mm_silu_mul_128x128_1a2b3c4d_cutlass_0", KernelKind.PRODUCT),
        ("cute_mm_amax_128x128_1a2b3c4d_finish_cutlass_0", KernelKind.OTHER),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_TNT", KernelKind.PRODUCT),
        (
            "void cutlass::device_kernel<flash::enable_sm80_to_sm89<flash::FlashAttnFwdSm90<>>>",
            KernelKind.ATTENTION,
        ),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(...)", KernelKind.ATTENTION),
        ("triton_red_fused__softmax_0", KernelKind.OTHER),
        ("Memset (Device)", KernelKind.OTHER),
    ],
)
def test_a_kernel_is_for_what_its_name_says(name, part):
    assert model_case.kind_of(name) is part


def child(tmp_path, text):
    """A command that runs some Python, which finds the model's name in `name`."""
    path = tmp_path / "child.py"
    path.write_text(f"import sys, json, time\nname = sys.argv[1]\n{text}\n")
    return (sys.executable, str(path))


def test_each_model_has_a_process(tmp_path):
    found = []
    data = json.dumps(asdict(result("?")))
    text = (
        "assert name != 'bad', 'no good'\nprint('a line of another')\n"
        f"print(json.dumps({{**json.loads({data!r}), 'name': name}}))"
    )
    cases = [
        replace(small(), name="one"),
        replace(small(), name="bad"),
        replace(small(), name="absent", packages=("no_such_package", "torch")),
    ]
    model_run.measure_models(cases, 2, found.append, command=child(tmp_path, text))
    assert {each.name: each.note for each in found} == {
        "one": "",
        "bad": "AssertionError: no good",
        "absent": "not installed: no_such_package",
    }
    assert {each.name: each.agrees for each in found} == {"one": True, "bad": False, "absent": True}
    assert next(each for each in found if each.name == "one") == result("one")


def test_a_run_ends_in_time(tmp_path):
    found = []
    cases = [replace(small(), name=f"m{index}") for index in range(3)]
    model_run.measure_models(cases, 2, found.append, 0.5, child(tmp_path, "time.sleep(60)"))
    assert not found


@pytest.fixture
def machine(monkeypatch):
    """A GPU on which each model takes 100 us; the names of those that were asked for."""
    asked = []

    def measure_models(chosen, rounds, done):
        for model in chosen:
            asked.append(model.name)
            done(result(model.name))

    def empty(nvml):
        return Results("2026-01-03T00:00:00+00:00", "bench --models", sample_results.results().machine)

    monkeypatch.setattr(command, "require_gpu", lambda: None)
    monkeypatch.setattr(command, "Nvml", lambda: None)
    monkeypatch.setattr(command, "_empty", empty)
    monkeypatch.setattr(command, "measure_ceilings", lambda rates, rounds: Ceilings(4e12, {}))
    monkeypatch.setattr(command, "measure_models", measure_models)
    return asked


def test_the_command_goes_on_where_it_stopped(machine, tmp_path, capsys, monkeypatch):
    assert main(["bench", "--models", "bert-*", "--json", str(tmp_path)]) == 0
    assert machine == ["bert-bf16", "bert-fp8"]
    assert main(["bench", "--models", "llama-bf16-1", "bert-*", "--json", str(tmp_path)]) == 0
    assert machine == ["bert-bf16", "bert-fp8", "llama-bf16-1"]
    (path,) = tmp_path.iterdir()
    assert path.name == "nvidia-h200-2026-01-03-models.json"
    assert [each.name for each in Results.load(path).models] == ["llama-bf16-1", "bert-bf16", "bert-fp8"]
    monkeypatch.setattr(command, "digest", lambda: "another")
    main(["bench", "--models", "bert-bf16", "--json", str(path)])
    assert machine[3:] == ["bert-bf16"]
    assert [each.name for each in Results.load(path).models] == ["bert-bf16"]


def test_a_row_a_model_is_shown(machine, capsys):
    assert main(["bench", "--models", "llama-bf16-1"]) == 0
    shown = capsys.readouterr().out
    times, parts = (line.split() for line in shown.splitlines() if line.startswith("llama-bf16-1"))
    assert times[1:] == ["300.0", "150.0", "100.0", "1.50", "3", "to", "3", "1.00%"]
    assert parts[1:] == ["60", "to", "60", "0", "to", "0", "30", "to", "30", "1", "to", "1", "1.24"]


def test_the_most_that_a_model_can_gain():
    found = result()
    assert found.most(1e12) == pytest.approx(150 / (150 - 0 - (30 - 4)))  # 4 MB at 1 TB/s take 4 us
    assert found.most(1e11) == 1.0  # the bytes take longer than all other kernels did
    faster = tuple(
        replace(each, kernels=(replace(each.kernels[0], us=40.0), each.kernels[1]))
        if each.runner is Runner.CUTE
        else each
        for each in found.timings
    )
    assert replace(found, timings=faster).most(1e12) == pytest.approx(150 / (150 - 20 - 26))
    assert ModelResult("none").most(1e12) is None


def test_options_that_contradict_are_refused(capsys):
    for others in (["--rows", "gated"], ["--host"], ["--peers"]):
        assert main(["bench", "--models", "llama-*", *others]) == 2
        assert "can't be combined with" in capsys.readouterr().err
    assert main(["bench", "--models", "nonesuch"]) == 2
    assert "is none of llama-bf16-2048" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("errors", "line"),
    [
        (
            "Traceback (most recent call last):\n  ...\n"
            "torch.AcceleratorError: CUDA error: an illegal instruction\n"
            "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n",
            "torch.AcceleratorError: CUDA error: an illegal instruction",
        ),
        ("ValueError: one\n\nDuring handling ...\nRuntimeError: two\n", "RuntimeError: two"),
        ("Killed\n", "Killed"),
        ("", "status 137"),
    ],
)
def test_a_model_that_failed_names_its_exception(errors: str, line: str) -> None:
    assert model_run.failure(errors, 137) == line
