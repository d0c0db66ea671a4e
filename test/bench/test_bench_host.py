"""Host times: how calls are counted, what a new process tells of having a kernel. No figure is checked."""

import pytest
import torch

from cute_backend import UsageError, explain
from cute_backend.bench import host, scaled_mm


def test_calls_are_timed_in_interleaved_bursts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    log = []
    programs = {name: (lambda name=name: log.append(name)) for name in "abc"}
    timings = host.time_calls(programs, rounds=3)
    assert list(timings) == ["a", "b", "c"]
    assert all(0 < each.low_us <= each.median_us <= each.high_us for each in timings.values())
    bursts = log[:: host._BURST]
    assert log == [name for name in bursts for _ in range(host._BURST)]
    assert [sorted(bursts[start : start + 3]) for start in range(0, 12, 3)] == [["a", "b", "c"]] * 4


def test_a_new_process_builds_a_kernel_and_another_loads_it_without_cutlass(tmp_path):
    pytest.importorskip("cutlass")
    bare = scaled_mm.problem(64, 64, 128).workloads[0]
    kernel = explain(bare.fn, *bare.inputs(), arch="sm_90a").first_region().kernel()
    cold = host._in_new_process(kernel, str(tmp_path))
    assert cold["imports_cutlass"] and any(tmp_path.rglob("*.so"))
    warm = host._in_new_process(kernel, str(tmp_path))
    assert not warm["imports_cutlass"]
    assert cold.keys() == warm.keys() == {"import_s", "load_s", "imports_cutlass"}


def test_a_new_process_that_fails_is_told_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_FRESH", "raise SystemExit('out of luck')")
    bare = scaled_mm.problem(64, 64, 128).workloads[0]
    kernel = explain(bare.fn, *bare.inputs(), arch="sm_90a").first_region().kernel()
    with pytest.raises(UsageError, match="can't be had in a new process: out of luck"):
        host._in_new_process(kernel, str(tmp_path))
