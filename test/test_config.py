"""Settings from the environment, and the log of decisions."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cute_backend.config as shipped
from cute_backend.errors import UsageError


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
    assert len(names) == 16
    plain = settings()
    assert plain.tile is settings(CUTE_BACKEND_TILE="").tile is None
    assert settings(CUTE_BACKEND_TILE="128x256_2x1").tile == "128x256_2x1"
    assert settings(CUTE_BACKEND_ROWVEC_PLACEMENT="smem_staged").rowvec_placement == "smem_staged"
    assert settings(CUTE_BACKEND_BLOCK_REDUCTIONS="always").block_reductions == "always"
    assert settings(CUTE_BACKEND_ROTARY_EMBEDDINGS="never").rotary_embeddings == "never"
    for name in set(names) - {"tile", "rowvec_placement", "block_reductions", "rotary_embeddings"}:
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
        ("CACHE_LIMIT_MB", "abc", "a whole number"),
        ("QUIET", "maybe", "1, true, yes or on, or else 0, false, no or off"),
        ("MAX_AUTOTUNE", "2", "1, true, yes or on"),
        ("ROWVEC_PLACEMENT", "registers", "auto or register_hoist or smem_staged"),
    ],
)
def test_what_is_no_value_is_refused(settings, name, value, accepted):
    with pytest.raises(UsageError, match=f"CUTE_BACKEND_{name} is '{value}'; it takes {accepted}"):
        settings(**{f"CUTE_BACKEND_{name}": value})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("CUTE_BACKEND_MAX_AUTOTUN", " (did you mean 'CUTE_BACKEND_MAX_AUTOTUNE'?)"),
        ("CUTE_BACKEND_CACHEDIR", " (did you mean 'CUTE_BACKEND_CACHE_DIR'?)"),
        ("CUTE_BACKEND_batch_invariant", " (did you mean 'CUTE_BACKEND_BATCH_INVARIANT'?)"),
        ("CUTE_BACKEND_WAVES", ""),
    ],
)
def test_a_misspelt_variable_is_named(settings, name, meant):
    with pytest.warns(RuntimeWarning) as warned:
        settings(**{name: "1"})
    (found,) = (str(each.message) for each in warned)
    expected = f"{name} is set in the environment, and cute_backend has no such setting{meant}"
    assert found == f"cute_backend: {expected}"


def test_no_variable_of_ours_is_taken_for_a_misspelt_one(settings, recwarn):
    names = {"CACHE_DIR", "PACK", "SOURCES", *(name.upper() for name in shipped._config if name[0] != "_")}
    with pytest.raises(UsageError, match="COMPILE_JOBS is 'x'"):  # the values are checked before the names
        settings(**{f"CUTE_BACKEND_{name}": "x" for name in names if name in ("COMPILE_JOBS", "PACK")})
    numbers = {"MAX_LOADS", "MAX_EXACT_LOADS", "MAX_STORES", "CACHE_LIMIT_MB", "COMPILE_JOBS"}
    words = {"ROWVEC_PLACEMENT", "BLOCK_REDUCTIONS", "ROTARY_EMBEDDINGS"}
    settings(**{f"CUTE_BACKEND_{name}": "7" if name in numbers else "1" for name in names - words})
    assert not [each for each in recwarn if "no such setting" in str(each.message)]


@pytest.mark.parametrize("text", ["1", "true", "True", "yes", "on", "0", "false", "NO", "off"])
def test_words_for_switches(settings, text):
    config = settings(CUTE_BACKEND_MAX_AUTOTUNE=text, CUTE_BACKEND_QUIET=text)
    assert config.max_autotune is config.quiet is (text.lower() in ("1", "true", "yes", "on"))


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("max_autotune", "yes", "True or False or None"),
        ("batch_invariant", None, "True or False"),
        ("tile", 128, "text or None"),
        ("rowvec_placement", 1, "text"),
        ("rowvec_placement", "registers", "auto or register_hoist or smem_staged"),
        ("max_loads", -1, "a whole number that is not negative"),
        ("max_stores", -1, "a whole number that is not negative or None"),
        ("max_stores", True, "a whole number that is not negative or None"),
    ],
)
def test_an_assignment_of_what_is_no_value_is_refused(settings, name, value, accepted):
    config = settings()
    before = getattr(config, name)
    sentence = re.escape(f"cute_backend.config.{name} is {value!r}; it takes {accepted}") + "$"
    with pytest.raises(UsageError, match=sentence):
        setattr(config, name, value)
    with pytest.raises(UsageError, match=sentence), config.patch(**{name: value}):
        pass
    assert getattr(config, name) is before


@pytest.mark.parametrize(("name", "meant"), [("tiel", " (did you mean 'tile'?)"), ("waves", "")])
def test_a_misspelt_setting_is_named_with_the_nearest_and_all_others(settings, name, meant):
    config = settings()
    known = ", ".join(each for each in shipped._config if not each.startswith("_"))
    sentence = re.escape(f"cute_backend has no setting {name!r}{meant}; it has {known}") + "$"
    with pytest.raises(AttributeError, match=sentence):
        setattr(config, name, 1)
    with pytest.raises(AttributeError, match=sentence):
        getattr(config, name)
    with pytest.raises(AttributeError, match=sentence), config.patch(**{name: 1}):
        pass
    assert not hasattr(config, name)


def test_a_command_refuses_the_environment_in_one_sentence():
    done = subprocess.run(
        [sys.executable, "-m", "cute_backend", "cache", "path"],
        env={**os.environ, "CUTE_BACKEND_CACHE_LIMIT_MB": "abc"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "cute_backend: CUTE_BACKEND_CACHE_LIMIT_MB is 'abc'; it takes a whole number that is not negative\n"
    )


def test_only_settings_that_decide_a_result_are_part_of_keys():
    keys = set(shipped.save_config_portable())
    assert keys == {
        "max_loads",
        "max_exact_loads",
        "max_stores",
        "max_autotune",
        "measure",
        "batch_invariant",
        "tile",
        "rowvec_placement",
        "block_reductions",
        "rotary_embeddings",
        "shared_launches",
        "cache_writes",
    }


PROGRAM = """
import torch
a = torch.ones(32, 64, dtype=torch.bfloat16)
torch.compile(lambda x: ((x @ x.t()).relu(), x.t() @ x), backend="cute")(a)
"""


@pytest.mark.exhaustive
def test_torch_logs_shows_decisions(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TORCH_LOGS": "+cute_backend", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    lines = [line.split("] ", 2)[-1] for line in done.stderr.splitlines() if "cute_backend" in line]
    assert any("fused mm of M, N, K (32, 32, 64): mm_relu " in line for line in lines)
    assert any("left mm_1 to Inductor, nothing_to_fuse: no op that" in line for line in lines)
