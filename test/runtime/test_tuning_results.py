"""The file of tuned results: across processes, corrupt, of other versions, and where it can't be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from filelock import FileLock

from cute_backend.planning import BUCKETS, Alignment, Arch, TileConfig
from cute_backend.runtime.disk.cache import KernelCache
from cute_backend.runtime.host import notices
from cute_backend.runtime.tuning import tuning_results
from cute_backend.runtime.tuning.tuning_results import Key, Records, Result, TunedFile, remembered
from support.runtime.handmade import make_spec
from support.runtime.warned import runtime_warnings

SPEC = make_spec()
KEY = Key(SPEC, Alignment.TMA, 64, 4096, 512, "a GPU, 132 SMs")
OTHER = Key(SPEC, Alignment.TMA, 128, 4096, 512, "a GPU, 132 SMs")
RESULT = Result(TileConfig(Arch.SM90A, 64, 256, 2, pingpong=True, raster_m=4), 12.25, 13.5)


@pytest.fixture(autouse=True)
def unwarned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(notices, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def file_in(folder: Path) -> TunedFile:
    return TunedFile(KernelCache(folder))


def entries(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "tuned.json").read_text())["problems"]


def test_a_process_that_stopped_while_it_timed_stops_no_other(tmp_path: Path) -> None:
    with file_in(tmp_path).exclusively(0.0) as first, file_in(tmp_path).exclusively(0.05) as second:
        assert first and not second
        file_in(tmp_path).put({KEY: RESULT})
    assert file_in(tmp_path).get(KEY) == RESULT


WRITER = """
import sys
sys.path[:0] = sys.argv[1:3]
import test_tuning_results as t
keys = [t.Key(t.SPEC, t.Alignment.TMA, int(m), 4096, 512, "a GPU, 132 SMs") for m in sys.argv[3:]]
t.remembered().put(dict.fromkeys(keys, t.RESULT))
print(t.remembered().get(t.KEY))
"""


def start(folder: Path, *buckets: int) -> subprocess.Popen[str]:
    here = Path(__file__).parent
    command = [sys.executable, "-c", WRITER, str(here), str(here.parent), *map(str, buckets)]
    surroundings = {**os.environ, "CUTE_BACKEND_CACHE_DIR": str(folder)}
    return subprocess.Popen(command, env=surroundings, stdout=subprocess.PIPE, text=True)


@pytest.mark.exhaustive
def test_a_result_is_remembered_by_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers = [start(tmp_path, 64, 128), start(tmp_path, 256), start(tmp_path, 512, 1024)]
    assert all(writer.wait(60) == 0 for writer in writers)
    assert len(entries(tmp_path)) == 5  # none has overwritten another's
    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", str(tmp_path))
    assert remembered().get(KEY) == RESULT
    winners = remembered().winners(replace(KEY, m=m) for m in BUCKETS)
    assert winners == dict.fromkeys((64, 128, 256, 512, 1024), RESULT.config)
    reader = start(tmp_path)
    assert reader.communicate(timeout=60)[0].strip() == str(RESULT)


def test_what_another_process_adds_is_seen(tmp_path: Path) -> None:
    mine, theirs = file_in(tmp_path), file_in(tmp_path)
    mine.put({KEY: RESULT})
    assert theirs.get(KEY) == RESULT and theirs.get(OTHER) is None
    mine.put({OTHER: RESULT})
    assert theirs.get(OTHER) == RESULT


def test_whoever_writes_waits_for_the_lock(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    with FileLock(tmp_path / "tuned.lock"):
        writer = Thread(target=file.put, args=({KEY: RESULT},))
        writer.start()
        writer.join(0.3)
        assert writer.is_alive() and not (tmp_path / "tuned.json").exists()
    writer.join(60)
    assert file.get(KEY) == RESULT


def test_a_result_of_other_versions_is_ignored_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_in(tmp_path).put({KEY: RESULT, OTHER: RESULT})
    ours = tuning_results._environment()
    monkeypatch.setattr(tuning_results, "_environment", lambda: [*ours, "a newer DSL"])
    newer = file_in(tmp_path)
    assert newer.get(KEY) is None
    newer.put({KEY: RESULT})
    assert newer.get(KEY) == RESULT and newer.get(OTHER) is None
    assert len(entries(tmp_path)) == 2


def test_results_of_another_gpu_are_not_taken(tmp_path: Path) -> None:
    memory = Records([file_in(tmp_path)])
    memory.put({KEY: RESULT})
    for other in ({"device": "another GPU"}, {"alignment": Alignment.PLAIN}, {"m": 65}):
        assert memory.winners([replace(KEY, **other)]) == {}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '"x"',
        "{}",
        '{"format": 1}',
        '{"format": 1, "problems": 7}',
        "\x80",
        '{"format": 99}',
    ],
)
def test_a_corrupt_file_is_a_miss_with_one_warning_and_is_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / "tuned.json").write_bytes(content.encode("latin-1"))
    file = file_in(tmp_path)
    with pytest.warns(RuntimeWarning, match=r"tuned\.json is not used") as warned:
        assert file.get(KEY) is None
        assert file.get(OTHER) is None
        file.put({KEY: RESULT})
    assert len(runtime_warnings(warned)) == 1
    assert file.get(KEY) == RESULT == file_in(tmp_path).get(KEY)


@pytest.mark.parametrize("field", ["config", "us", "unfused_us", "environment"])
@pytest.mark.parametrize("value", ["?", {"tile": 1}, [1], ...])
def test_a_corrupt_entry_is_a_miss_with_a_warning_and_spoils_no_other(
    tmp_path: Path, field: str, value: object
) -> None:
    file_in(tmp_path).put({KEY: RESULT, OTHER: RESULT})
    data = json.loads((tmp_path / "tuned.json").read_text())
    entry = data["problems"][KEY.text]
    if value is ...:
        del entry[field]
    else:
        entry[field] = value
    (tmp_path / "tuned.json").write_text(json.dumps(data))
    file = file_in(tmp_path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert file.get(KEY) is None
        assert file.get(OTHER) == RESULT
    of_other_versions = field == "environment" and value is not ...
    assert len(runtime_warnings(warned)) == (0 if of_other_versions else 1)


def test_where_nothing_can_be_written_this_process_remembers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = file_in(tmp_path)

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file._cache, "write", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        file.put({KEY: RESULT})
    assert file.get(KEY) == RESULT and file_in(tmp_path).get(KEY) is None
