"""Host times: how calls are counted, what a new process tells of having a kernel. No figure is checked."""

import pytest
import torch
from torch._inductor import metrics
from torch._inductor.utils import run_and_get_code

from cute_backend import UsageError, explain
from cute_backend.bench import host_time, scaled_mm
from cute_backend.runtime.calls.op import on_cpu


def test_calls_are_timed_in_interleaved_bursts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    log = []
    programs = {name: (lambda name=name: log.append(name)) for name in "abc"}
    timings = host_time.time_calls(programs, rounds=3)
    assert list(timings) == ["a", "b", "c"]
    assert all(0 < each.low_us <= each.median_us <= each.high_us for each in timings.values())
    bursts = log[:: host_time._BURST]
    assert log == [name for name in bursts for _ in range(host_time._BURST)]
    assert [sorted(bursts[start : start + 3]) for start in range(0, 12, 3)] == [["a", "b", "c"]] * 4


@pytest.mark.exhaustive
def test_what_is_compared_is_the_same_product_and_the_same_program(monkeypatch, fresh_compiler):
    launched = []

    def launch(a, b, loads, spec):
        launched.append(spec)
        return on_cpu(a, b, loads, spec)

    monkeypatch.setattr(host_time, "launch", launch)
    with torch.no_grad():
        given = {name: call() for name, call in host_time.calls("cpu").items()}
    assert len(launched) == 1 and torch._dynamo.utils.counters["cute_backend"]["regions"] == 1
    eager, op, launch_alone, of_two, of_six, cute, inductor = given.values()
    assert all(each.shape == (128, 128) and each.dtype is torch.bfloat16 for each in given.values())
    assert torch.equal(op, launch_alone)
    torch.testing.assert_close(op, eager, rtol=0.01, atol=0.01)
    torch.testing.assert_close(cute, inductor, rtol=0.02, atol=0.02)
    assert not torch.equal(of_two, of_six)


@pytest.mark.parametrize(("program", "count"), [(host_time.pointwise, 2), (host_time.pointwise_of_six, 6)])
def test_what_the_fused_region_is_compared_with_is_one_kernel_of_all_its_operands(
    program, count, fresh_compiler
):
    args = scaled_mm.problem(128, 128, 128).workloads[1].inputs()
    args = args if count == 6 else (args[-1].clone(), args[-1])
    metrics.reset()
    compiled, code = run_and_get_code(torch.compile(program, dynamic=False), *args)
    torch.testing.assert_close(compiled, program(*args), rtol=0.02, atol=0.02)
    assert metrics.generated_kernel_count == 1
    assert f"arg{count - 1}_1" in code[0] and f"arg{count}_1" not in code[0]


@pytest.mark.exhaustive
def test_a_new_process_builds_a_kernel_and_another_loads_it_without_cutlass(tmp_path):
    pytest.importorskip("cutlass")
    bare = scaled_mm.problem(64, 64, 128).workloads[0]
    kernel = explain(bare.fn, *bare.inputs(), arch="sm_90a").first_region().kernel()
    cold = host_time._in_new_process(kernel, str(tmp_path))
    assert any(tmp_path.rglob("*.so"))
    warm = host_time._in_new_process(kernel, str(tmp_path))
    assert not cold["imports_cutlass"] and not warm["imports_cutlass"], "a process of its own compiles"
    assert cold.keys() == warm.keys() == {"import_s", "load_s", "imports_cutlass"}


def test_a_new_process_that_fails_is_told_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(host_time, "_FRESH", "raise SystemExit('out of luck')")
    bare = scaled_mm.problem(64, 64, 128).workloads[0]
    kernel = explain(bare.fn, *bare.inputs(), arch="sm_90a").first_region().kernel()
    with pytest.raises(UsageError, match="a new process can't get a kernel: out of luck"):
        host_time._in_new_process(kernel, str(tmp_path))
