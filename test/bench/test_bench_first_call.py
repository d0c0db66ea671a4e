"""First calls of models: which processes run, what they report, and how it is shown. No figure is checked."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cute_backend import UsageError
from cute_backend.__main__ import main
from cute_backend.bench import command, first_call, show
from cute_backend.bench.models import Model
from cute_backend.bench.results import FirstCall, FirstCalls, Results
from cute_backend.bench.table import Runner
from cute_backend.command.parser import parse
from support import benchmark_tables, sample_results

FAKE = """
import json, os, sys
from pathlib import Path
name, runner, layers = sys.argv[1:]
caches = [Path(os.environ[each]) for each in ("CUTE_BACKEND_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
if name == "broken" and runner == "cute":
    raise ValueError("it is broken")
is_warm = [path.exists() for path in caches]
for path in caches:
    path.mkdir(exist_ok=True)
figures = {"seconds": 1.0 if all(is_warm) else 5.0, "processor_s": 9.0, "kernels": int(layers)}
figures["phases"] = {"cute_backend.pass": 0.5}
print("a line of the program")
print(json.dumps(figures))
"""


class Layers(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def model(name: str = "small", trains: bool = False, packages: tuple[str, ...] = ()) -> Model:
    return Model(name, lambda layers: (Layers(layers), (torch.randn(4, 16),)), packages, trains=trains)


def found() -> Results:
    calls = (
        FirstCall("bert", Runner.INDUCTOR, (3.04,), (1.0,), (20.0,), kernels=0),
        FirstCall("bert", Runner.CUTE, (8.0,), (1.26,), (41.0,), ({"cute_backend.pass": 0.5},), 6),
        FirstCall("vit", Runner.INDUCTOR, (4.0,), (1.0,), (20.0,), kernels=0),
        FirstCall("vit", Runner.CUTE, note="ValueError: it is broken"),
    )
    return replace(
        sample_results.results(), tables=(), ceilings=None, first_calls=FirstCalls(2, 16, 1, calls)
    )


def test_a_cold_process_has_empty_caches_and_the_next_one_finds_them(tmp_path: Path) -> None:
    script, saved = tmp_path / "fake.py", list[FirstCalls]()
    script.write_text(FAKE)
    models = [model(), model("broken"), model("absent", packages=("no_such_package",))]
    steps: list[str] = []
    calls = first_call.measure_first_calls(
        models, 3, 1, steps.append, saved.append, (sys.executable, str(script))
    )
    assert calls.layers == 3 and calls.cores > 0
    inductor, cute, sound, broken, *absent = calls.calls
    assert inductor == FirstCall(
        "small", Runner.INDUCTOR, (5.0,), (1.0,), (9.0,), ({"cute_backend.pass": 0.5},), 3
    )
    assert cute == replace(inductor, runner=Runner.CUTE)
    assert sound.cold_s == (5.0,) and broken.note == "ValueError: it is broken" and not broken.cold_s
    assert [each.note for each in absent] == ["not installed: no_such_package"] * 2
    assert [len(each.calls) for each in saved] == [2, 4, 6] and saved[-1] == calls
    assert steps[:2] == ["small, inductor", "small, cute"]


def test_each_time_has_caches_of_its_own_and_inductor_and_cute_alternate(tmp_path: Path) -> None:
    script, steps, saved = tmp_path / "fake.py", list[str](), list[FirstCalls]()
    script.write_text(FAKE)
    found = first_call.measure_first_calls(
        [model(), model("broken")], 3, 2, steps.append, saved.append, (sys.executable, str(script))
    )
    assert [[len(each.cold_s) for each in done.calls] for done in saved[:2]] == [[1, 1], [2, 2]]
    sound = replace(found.calls[1], runner=Runner.INDUCTOR)
    assert sound == found.calls[0] and sound.cold_s == (5.0, 5.0) and sound.warm_s == (1.0, 1.0)
    assert steps[:4] == ["small, inductor", "small, cute"] * 2
    inductor, cute = found.calls[2:]
    assert cute.note == "ValueError: it is broken" and inductor.cold_s == (5.0,), "none after a failure"


def test_several_times_are_shown_by_their_median_and_range() -> None:
    calls = tuple(
        FirstCall("bert", runner, (23.0, 31.6, 24.04), (1.0, 1.0, 1.0), (34.0, 45.0, 40.0), kernels=4)
        for runner in (Runner.INDUCTOR, Runner.CUTE)
    )
    times = "24.0 (23.0-31.6)", "1.0 (1.0-1.0)"
    found = FirstCalls(2, 16, 3, calls)
    (row,) = show.first_call_rows(found)
    assert row == ["bert", times[0], times[0], times[1], times[1], "40 to 40", "4"]
    assert show.first_calls_title(found).endswith("seconds, medians and ranges of 3")


def test_a_model_has_its_real_depth_where_all_layers_are_asked_for(tmp_path: Path) -> None:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    models = [replace(model(), depth=24), model("other")]
    calls = first_call.measure_first_calls(
        models, None, 1, lambda step: None, lambda found: None, (sys.executable, str(script))
    )
    assert [each.kernels for each in calls.calls] == [24, 24, 2, 2]  # the script's kernels are its layers
    results = replace(found(), first_calls=calls)
    path = tmp_path / results.file_name
    results.save(path)
    assert Results.load(path) == results
    assert "first call of all layers in a new process" in str(results)


def test_all_layers_are_asked_for_by_a_word() -> None:
    words = ["bench", "--first-call", "bert-bf16", "--layers"]
    assert [parse([*words, each]).layers for each in ("all", "3")] == [None, 3]


@pytest.mark.exhaustive
@pytest.mark.sweep(1)
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("runner", [Runner.INDUCTOR, Runner.CUTE])
def test_a_process_reports_its_first_call(runner: Runner, trains: bool, fresh_compiler: None) -> None:
    figures = first_call.first_call(model(trains=trains), runner, 2, device="cpu")
    assert figures.keys() == {"seconds", "processor_s", "kernels", "phases"}
    assert ("cute_backend.pass" in figures["phases"]) is (runner is Runner.CUTE)
    assert figures["seconds"] > 0 and figures["processor_s"] > 0 and figures["kernels"] == 0


def test_a_process_takes_its_model_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(first_call, "first_call", lambda *given: asked.extend(given) or {"seconds": 1.0})
    monkeypatch.setattr(sys, "argv", ["first_call", "bert-bf16", "cute", "24"])
    first_call.main()
    assert json.loads(capsys.readouterr().out) == {"seconds": 1.0}
    assert [getattr(asked[0], "name", None), *asked[1:]] == ["bert-bf16", Runner.CUTE, 24]


def test_results_are_kept_and_shown(tmp_path: Path) -> None:
    results = found()
    path = tmp_path / results.file_name
    assert path.name.endswith("-first-call.json")
    results.save(path)
    assert Results.load(path) == results
    text = str(results)
    assert "first call of 2 layers in a new process, 16 cores, seconds" in text
    assert "vit, cute: ValueError: it is broken" in text
    rows = list(show.first_call_rows(results.first_calls))  # type: ignore[arg-type]
    assert rows == [["bert", "3.0", "8.0", "1.0", "1.3", "20 to 41", "6"]]
    page = benchmark_tables.first_calls_markdown(results)
    assert page.startswith("### First call of 2 layers in a new process, 16 cores, seconds\n")
    assert "| bert | 3.0 | 8.0 | 1.0 | 1.3 | 20 to 41 | 6 |" in page
    assert not results.agrees


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--first-call", "--peers"], "bench --first-call can't be combined with --peers"),
        (["--first-call", "--models"], "can't be combined with"),
        (["--first-call", "no-model"], "cute_backend: the model 'no-model' is none of"),
        (["--first-call", "--layers", "0"], "--layers is 0; a model has 1 or more, or all"),
        (["--first-call", "--times", "0"], "--times is 0; a first call is timed once or more often"),
    ],
)
def test_what_contradicts_is_refused_before_anything_runs(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_command_saves_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, saved = found().first_calls, list[Results]()
    assert calls is not None
    monkeypatch.setattr(command, "require_gpu", lambda: None)
    monkeypatch.setattr(command, "_empty", lambda nvml: sample_results.results())

    def measure(models: object, layers: int, times: int, progress: object, save: object) -> FirstCalls:
        assert times == 3
        save(calls)  # type: ignore[operator]
        return calls

    monkeypatch.setattr(command, "measure_first_calls", measure)
    assert command.run_first_calls(["bert-bf16"], 2, 3, saved.append).first_calls == calls
    assert [each.first_calls for each in saved] == [calls]
    with pytest.raises(UsageError, match="is none of"):
        command.run_first_calls(["bert"], 2)


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run([*first_call._COMMAND, "bert-bf16"], capture_output=True, text=True)
    assert done.returncode == 1 and "ValueError: not enough values to unpack" in done.stderr
