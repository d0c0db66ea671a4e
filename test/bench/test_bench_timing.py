"""The method of timing, on a GPU whose clock is a list: what is enqueued, in which order, and what counts."""

import fcntl
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from cute_backend import UsageError
from cute_backend.bench import program_timing
from cute_backend.bench.program_timing import Unit, own_turn, preparing, time_units, unit_of
from cute_backend.bench.results import Timing


class FakeGpu:
    """Work takes the milliseconds that it says; `log` is what was enqueued."""

    def __init__(self):
        self.now, self.log = 0.0, []

    def work(self, name, milliseconds):
        self.log.append(name)
        self.now += milliseconds


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeGpu()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            fake.log.append("event")
            self.at = fake.now

        def elapsed_time(self, end):
            return end.at - self.at

    class Buffer:
        def __init__(self, elements, device):
            assert device == "cuda" and elements * 4 >= 2**28

        def sum(self):
            fake.work("sweep", 7.0)

    class Graph:
        def replay(self):
            fake.work("replay", 3.0)

    @contextmanager
    def capture(graph):
        fake.log.append("capture")
        yield
        fake.log.append("captured")

    monkeypatch.setattr(program_timing, "require_gpu", lambda: None)
    monkeypatch.setattr(program_timing, "_WARMUP_S", 0)
    monkeypatch.setattr(program_timing.torch, "zeros", Buffer)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: fake.log.append("synchronize"))
    return fake


def test_a_unit_is_swept_before_and_timed_between_its_events(gpu):
    units = {"one": Unit(lambda: gpu.work("one", 3.0), calls=6)}
    seen = []
    assert time_units(units, 2, lambda: seen.append(len(gpu.log))) == {"one": Timing(500.0, 500.0, 500.0)}
    assert gpu.log == ["sweep", "event", "one", "event", "synchronize"] * 2
    assert seen == [4, 9]  # while the GPU is at work


def test_nothing_is_compiled_while_programs_are_timed(gpu, monkeypatch):
    monkeypatch.setattr(program_timing, "settle", lambda: gpu.log.append("fitted"))
    time_units({"one": Unit(lambda: gpu.work("one", 3.0), calls=6)}, 2)
    assert gpu.log.index("fitted") == 0 and gpu.log.count("fitted") == 1


def test_every_round_has_every_unit_once_in_changing_orders(gpu):
    units = {
        name: Unit(lambda name=name, i=i: gpu.work(name, float(i)), calls=1)
        for i, name in enumerate("abcd", 1)
    }
    found = time_units(units, 20)
    assert [found[name].median_us for name in "abcd"] == [1000.0, 2000.0, 3000.0, 4000.0]
    ran = [name for name in gpu.log if name in units]
    rounds = ["".join(ran[start : start + 4]) for start in range(0, 80, 4)]
    assert all(sorted(each) == list("abcd") for each in rounds)
    assert len(set(rounds)) > 5


def test_none_prepares_or_times_while_one_times(gpu, monkeypatch, tmp_path):
    """Two that did would be charged for each other's work. Several may prepare."""
    monkeypatch.setattr(program_timing, "writable_cache", lambda: SimpleNamespace(root=tmp_path))

    def is_free(kind):
        with (tmp_path / "timing.lock").open("a") as file:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    free = []
    unit = Unit(lambda: free.append([is_free(kind) for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX)]), calls=1)
    time_units({"one": unit}, 2)
    assert free and free == [[False, False]] * len(free)
    with preparing():
        assert is_free(fcntl.LOCK_SH) and not is_free(fcntl.LOCK_EX)
    assert is_free(fcntl.LOCK_EX)


def test_warm_up_rounds_do_not_count(gpu, monkeypatch):
    clock = iter([0.0, 0.0, 0.5, 1.5])
    monkeypatch.setattr(program_timing, "_WARMUP_S", 1)
    monkeypatch.setattr(program_timing.time, "monotonic", lambda: next(clock))
    spent = iter([9.0, 9.0, 1.0, 1.0])
    units = {"one": Unit(lambda: gpu.work("one", next(spent)), calls=1)}
    assert time_units(units, 2)["one"].high_us == 1000.0


def test_only_the_first_timing_of_a_turn_warms_up(gpu, monkeypatch):
    clock = iter([0.0, 0.0, 0.5, 1.5, 2.0, 2.0])
    monkeypatch.setattr(program_timing, "_WARMUP_S", 1)
    monkeypatch.setattr(program_timing.time, "monotonic", lambda: next(clock))
    units = {"one": Unit(lambda: gpu.work("one", 1.0), calls=1)}
    with own_turn() as turn:
        turn.time(units, 2)
        assert gpu.log.count("one") == 4
        turn.time(units, 2)
    assert gpu.log.count("one") == 6


def test_calls_are_captured_one_on_each_set_after_a_warm_up(gpu):
    unit = unit_of(lambda x: gpu.log.append(f"call {x}"), [(1,), (2,)])
    assert gpu.log == ["call 1", "call 2", "synchronize", "capture", "call 1", "call 2", "captured"]
    assert (unit.calls, unit.uncaptured) == (2, "")
    unit.run()
    assert gpu.log[-1] == "replay"


def test_what_cannot_be_captured_is_launched_and_says_why(gpu):
    def program(x):
        gpu.log.append(f"call {x}")
        if "capture" in gpu.log and gpu.log.count("capture") > gpu.log.count("launch"):
            gpu.log.append("launch")
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    unit = unit_of(program, [(1,), (2,)])
    assert unit.uncaptured.endswith("operation not permitted when stream is capturing")
    assert unit.uncaptured.startswith("not captured in a CUDA graph, so host time may count")
    gpu.log.clear()
    unit.run()
    assert gpu.log == ["call 1", "call 2"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time on")
def test_nothing_is_timed_without_a_gpu():
    with pytest.raises(UsageError, match="bench times kernels on a GPU"):
        time_units({}, 2)
