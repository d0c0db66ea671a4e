"""Settings from the environment, and the log of decisions."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cute_backend.config as shipped


@pytest.fixture
def settings(monkeypatch):
    """The settings of a process with some environment variables."""

    def read(**environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        spec = importlib.util.spec_from_file_location("settings_of_a_test", Path(shipped.__file__))
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return read


def test_every_setting_has_a_variable_of_its_name(settings):
    names = [name for name in shipped._config if not name.startswith("_")]
    assert len(names) == 9
    plain = settings()
    for name in names:
        other = {True: "0", False: "1", None: "1"}.get(getattr(plain, name), "7")
        changed = settings(**{f"CUTE_BACKEND_{name.upper()}": other})
        assert getattr(changed, name) == int(other) != getattr(plain, name)


def test_a_program_wins_over_the_environment(settings):
    config = settings(CUTE_BACKEND_MAX_STORES="2", CUTE_BACKEND_BATCH_INVARIANT="1")
    assert (config.max_stores, config.batch_invariant) == (2, True)
    with config.patch(max_stores=3, batch_invariant=False):
        assert (config.max_stores, config.batch_invariant) == (3, False)
    assert (config.max_stores, config.batch_invariant) == (2, True)


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("MAX_LOADS", "-1", "a whole number"),
        ("COMPILE_JOBS", "two", "a whole number"),
        ("QUIET", "yes", "0 or 1"),
    ],
)
def test_what_is_no_value_is_refused(settings, name, value, accepted):
    with pytest.raises(ValueError, match=f"CUTE_BACKEND_{name} is '{value}'; it takes {accepted}"):
        settings(**{f"CUTE_BACKEND_{name}": value})


def test_only_settings_that_decide_a_result_are_part_of_keys():
    keys = set(shipped.save_config_portable())
    assert keys == {"max_loads", "max_exact_loads", "max_stores", "max_autotune", "batch_invariant"}


PROGRAM = """
import torch
a = torch.ones(32, 64, dtype=torch.bfloat16)
torch.compile(lambda x: ((x @ x.t()).relu(), x.t() @ x), backend="cute")(a)
"""


def test_torch_logs_shows_decisions(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TORCH_LOGS": "+cute_backend", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    lines = [line.split("] ", 2)[-1] for line in done.stderr.splitlines() if "cute_backend" in line]
    assert any("fused mm of M, N, K (32, 32, 64): mm_relu " in line for line in lines)
    assert any("left mm_1 to Inductor, nothing_to_fuse: no pointwise op" in line for line in lines)
