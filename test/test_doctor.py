"""`python -m cute_backend doctor`: a report of what runs here, complete where parts of it fail."""

import re
import sys

import pytest
import torch

import cute_backend
from cute_backend import config
from cute_backend.__main__ import main
from cute_backend.command import doctor


@pytest.fixture
def report(capsys):
    """Runs the command, and gives the texts of each row."""

    def run():
        assert main(["doctor"]) == 0
        rows = {}
        for line in capsys.readouterr().out.splitlines():
            name, text = re.fullmatch(r"(\S+(?: \d+)?)\s{2,}(\S.*)", line).groups()
            rows.setdefault(name, []).append(text)
        return rows

    return run


def test_it_has_versions_settings_and_the_cache(report, monkeypatch, tmp_path):
    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("CUTE_BACKEND_MAX_STORES", "3")
    with config.patch(max_stores=3, batch_invariant=True):
        rows = report()
    assert rows["cute_backend"] == [cute_backend.__version__]
    assert rows["torch"] == [torch.__version__]
    assert sys.executable in rows["python"][0]
    assert rows["cache"] == [f"{tmp_path / 'kernels'}, which does not exist yet"]
    names = [each.partition(" = ")[0] for each in rows["setting"]]
    assert names == [name for name in config._config if not name.startswith("_")]
    assert "max_stores = 3, of CUTE_BACKEND_MAX_STORES" in rows["setting"]
    assert "batch_invariant = True" in rows["setting"]
    assert "CUTE_BACKEND_MAX_STORES=3" in rows["environment"]
    (tmp_path / "kernels").mkdir(mode=0o700)
    assert re.fullmatch(r".*/kernels, kernels: 0, 0\.0 MiB, \d+ GiB free", report()["cache"][0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_says_that_there_is_no_gpu(report):
    assert any(each.startswith("a GPU that torch can use") for each in report()["missing"])


def test_a_part_that_fails_leaves_the_others(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(doctor, "version", doctor_without("nvidia-cutlass-dsl"))
    rows = report()
    assert "torch.cuda" not in rows and rows["cache"] and rows["system"]
    assert any(re.match(r"devices: ModuleNotFoundError: .*torch", each) for each in rows["missing"])
    assert any(each.startswith("the package nvidia-cutlass-dsl: ") for each in rows["missing"])


def doctor_without(package):
    found = doctor.version

    def version(name):
        if name == package:
            raise doctor.PackageNotFoundError(name)
        return found(name)

    return version


def test_a_compiler_that_is_not_there_is_named(report, monkeypatch):
    monkeypatch.setenv("CXX", "nowhere-g++")
    rows = report()
    assert "C++" not in rows
    assert any("the C++ compiler nowhere-g++, which CXX names" in each for each in rows["missing"])
