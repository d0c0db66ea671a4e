"""Arguments are checked before torch is imported, and what a program does wrong is said with its line."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from cute_backend.__main__ import main
from cute_backend.command.parser import parse
from cute_backend.command.program import load

EXAMPLE = str(Path(__file__).parents[1] / "examples" / "gelu_residual.py")

PROGRAM = """
import torch
def product(a, b):
    return (a @ b).relu()
def example_inputs():
    weight = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True)
    return torch.ones(48, 64, dtype=torch.bfloat16), weight
"""


def complaint(capsys, *argv):
    """The one sentence of a refusal."""
    assert main([*argv]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == "" and line.startswith("cute_backend: ")
    return line.removeprefix("cute_backend: ")


BAD = {
    ("explain", "nowhere.py"): "there is no file nowhere.py",
    ("source", "model.onnx"): "model.onnx is not a Python file",
    ("bench", "nowhere.py:f"): "there is no file nowhere.py",
    ("aot", EXAMPLE, "nowhere.py", "-o", "x.cutepack"): "there is no file nowhere.py",
    ("build", EXAMPLE, "--arch", "sm_75"): "arch is 'sm_75'; kernels are generated for sm_90a, ",
    ("aot", EXAMPLE, "--arch", "sm_80", "--arch", "sm_75", "-o", "x.cutepack"): "arch is 'sm_75'",
    ("aot", EXAMPLE, "-o", "nowhere/x.cutepack"): "the folder of the pack, nowhere, does not exist",
    ("explain", EXAMPLE, "--html", "page.txt"): "a page is written as .html, not as page.txt",
    ("explain", EXAMPLE, "--html", "nowhere/page.html"): "the folder of the page, nowhere, does not exist",
    ("simulate", EXAMPLE, "--timeline", "nowhere/t.png"): "the folder of the timeline, nowhere, does not",
    ("fuzz", "--jobs", "0"): "argument --jobs: '0' is no positive number",
    ("source", EXAMPLE, "--region", "-1"): "argument --region: '-1' is no whole number",
}

WITHOUT_TORCH = f"""
import sys
sys.argv[0] = "cute_backend"
from cute_backend.__main__ import main
statuses = [main([*argv]) for argv in {[*BAD]!r}] + [main(["cache", "path"])]
assert "torch" not in sys.modules
print(statuses)
"""


def test_bad_arguments_are_refused_and_the_cache_is_named_without_torch(tmp_path, monkeypatch):
    for name in ("CUTE_BACKEND_RAISE_ERRORS", "CUTE_BACKEND_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str([2] * len(BAD) + [0])
    for line, expected in zip(done.stderr.splitlines(), BAD.values(), strict=True):
        assert line.startswith(f"cute_backend: {expected}")


@pytest.mark.parametrize("missing", ["torch", "numpy", "filelock"])
def test_a_python_without_our_packages_is_named_with_what_to_do(missing, capsys, monkeypatch):
    def fail(home):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr("cute_backend.command.runner._function", fail)
    assert complaint(capsys, "explain", EXAMPLE) == (
        f"{sys.executable} has no module {missing!r}; activate the environment in which this package is "
        "installed (after `make demo`: source .venv/bin/activate), or pip install it"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\nx.y\n", "'int' object has no attribute 'y' (program.py:2)"),
        ("import os\n\nimport nonsense_module\n", "No module named 'nonsense_module' (program.py:3)"),
        ("def f():\n    raise KeyError\ndef g():\n    f()\ng()\n", "KeyError: no message (program.py:2)"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3 (program.py:2)"),
        ("import json\njson.loads('')\n", "(program.py:2)"),
        ("x = (\n", "'(' was never closed (program.py, line 1)"),
        ("def f(): pass\ndef example_inputs():\n    return 1 // 0\n", "modulo by zero (program.py:3)"),
    ],
)
def test_what_a_program_raises_has_its_line(text, expected, tmp_path, capsys):
    path = tmp_path / "program.py"
    path.write_text(text)
    assert complaint(capsys, "explain", str(path)).endswith(expected)


@pytest.mark.parametrize("name", ["json", "random", "sys", "colorsys", "torch"])
def test_a_program_may_have_the_name_of_another_module(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / f"{name}.py"
    path.write_text(f"import random, json, colorsys\nassert json.dumps and colorsys.rgb_to_hsv\n{PROGRAM}")
    before = sys.modules.get(name)
    fn, inputs = load(str(path))
    assert fn.__module__ == f"program_{name}" and len(inputs()[0]) == 2
    assert sys.modules[name] is not sys.modules[fn.__module__] and before in (None, sys.modules[name])
    assert json.dumps and random.random and sys.path[0] != str(tmp_path)


@pytest.mark.exhaustive
def test_a_program_named_as_a_module_of_python_is_explained_in_its_folder(tmp_path):
    (tmp_path / "random.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "cute_backend", "explain", "random.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "acc of b, at random.py:4" in done.stdout


def test_the_shell_explains_dynamic_sizes_and_gradients(tmp_path, capsys):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    assert main(["explain", str(path), "--dynamic"]) == 0
    dynamic = capsys.readouterr().out
    assert " of M s" in dynamic and "forward" not in dynamic
    assert main(["explain", str(path), "--grad"]) == 0
    both = capsys.readouterr().out
    assert "region 0 (forward): mm" in both and "of M 48, " in both and "without --grad" in both
    assert "backward" in both
    assert main(["source", str(path), "--grad"]) == 0
    assert "out1[e]" in capsys.readouterr().out  # the backward graph needs the mask of relu


def test_simulate_offers_the_architecture_that_it_takes(capsys):
    with pytest.raises(SystemExit):
        parse(["simulate", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: sm_100a)" in shown and "the GPU here" not in shown
    assert parse(["simulate", "x.py"]).arch is None
