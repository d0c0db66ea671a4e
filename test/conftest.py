"""Fixtures of all tests: a kernel cache of the run, launches without cost, and skips where there is no GPU or
no compiler."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

from cute_backend.fx_walk.ends import boundary, crossings

pytest.register_assert_rewrite("support")
pytest_plugins = [
    "support.compile_once",
    "support.cpp_once",
    "support.cpu_times",
    "support.quiet_torch",
    "support.sweeps",
]

GPU = Path(__file__).parent / "gpu"
"""The folder of the tests that need a GPU, all of which have the mark `gpu`."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no test that needs a GPU for a run that leaves them out."""
    return True if collection_path == GPU and "not gpu" in config.option.markexpr else None


def pytest_collection_finish() -> None:
    """Keep the collector from walking torch and the DSL: a seventh of a simulated kernel's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a GPU of compute capability 9.0 or 10.0")
    elif torch.cuda.get_device_capability() not in ((9, 0), (10, 0)):
        major, minor = torch.cuda.get_device_capability()
        skip = pytest.mark.skip(reason=f"this GPU has compute capability {major}.{minor}, not 9.0 or 10.0")
    else:
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


HAS_COMPILER = any(shutil.which(name) for name in ("cc", "gcc", "clang"))

NO_COMPILER = "needs a C compiler, and there is none here"
PER_TENSOR = f"_scaled_mm of torch {torch.__version__} takes scales of one element alone on a CPU"

LACKING = {
    "Now _scaled_mm only supports per-tensor scaling for CPU backend": PER_TENSOR,
    **(
        {}
        if HAS_COMPILER
        else dict.fromkeys(
            (
                "InvalidCxxCompiler",
                "the simulator needs a C compiler",
                "No such file or directory: 'cc'",
            ),
            NO_COMPILER,
        )
    ),
}
"""Text that a failing test prints if this machine or its torch lacks something, and the reason to skip it."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that turns out to need what is not here: a C compiler, rowwise scales on a CPU."""
    report = yield
    if report.failed:
        output = report.longreprtext + report.capstderr
        for complaint, reason in LACKING.items():
            if complaint in output:
                report.outcome = "skipped"
                report.longrepr = (str(report.fspath), 0, f"Skipped: {reason}")
    return report


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[None]:
    """A kernel cache of this run's own, shared by its workers, so that no test leans on an earlier run; and
    the folder of what is compiled for it (`compile_once`)."""
    from support import compile_once

    base = tmp_path_factory.getbasetemp()
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUTE_BACKEND_CACHE_DIR", str(run / "kernels"))
        patch.setenv(
            compile_once.FOLDER, str(compile_once.folder_between_runs(pytestconfig) or run / "built")
        )
        yield


@pytest.fixture(scope="session", autouse=True)
def raised_errors() -> Iterator[None]:
    """Errors of this package are seen, here and in the processes that tests start."""
    from cute_backend import config

    with pytest.MonkeyPatch.context() as patch, config.patch(raise_errors=True):  # type: ignore[attr-defined]
        patch.setenv("CUTE_BACKEND_RAISE_ERRORS", "1")
        yield


@pytest.fixture(autouse=True)
def settings_of_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """The settings that marks of a test give (`@pytest.mark.settings(rotary_embeddings="always")`), the
    nearest mark first. All others have their defaults."""
    from cute_backend import config

    given: dict[str, object] = {}
    for mark in request.node.iter_markers("settings"):
        given = {**mark.kwargs, **given}
    with config.patch(**given):  # type: ignore[attr-defined]
        yield


@pytest.fixture
def no_blocks() -> Iterator[None]:
    """Programs reduce no blocks after single products, so short rows are reduced as long ones."""
    from cute_backend import config

    with config.patch(block_reductions="never"):  # type: ignore[attr-defined]
        yield


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No compiled code and an empty Inductor cache, before and after: what tests of counters need."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    counters.clear()
    with fresh_cache():
        yield
    torch._dynamo.reset()


@pytest.fixture
def free_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches and last tiles that cost nothing, and second readings of rows that cost their bytes: what can
    be fused is shown on planes so small that a launch would decide what is."""
    boundary.cheapest_stores.cache_clear()
    for name in ("LAUNCH_BYTES", "LAST_TILE_BYTES"):
        monkeypatch.setattr(boundary, name, 0)
    monkeypatch.setattr(crossings, "ROW_HELD", 0)
    yield
    boundary.cheapest_stores.cache_clear()
