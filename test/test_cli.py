"""`python -m cute_backend`: what it prints, and how it refuses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.progress import Progress

from cute_backend.__main__ import main
from cute_backend.aot import Written

EXAMPLE = Path(__file__).parents[1] / "examples" / "gelu_residual.py"

PROGRAM = """
import torch
def product(a, b):
    return (a @ b).relu()
def example_inputs():
    return torch.randn(64, 64, dtype=torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16)
"""


@pytest.fixture
def program(tmp_path):
    """Writes a file and returns its path."""

    def write(text):
        path = tmp_path / "program.py"
        path.write_text(text)
        return str(path)

    return write


def test_explain_prints_the_table(program, capsys):
    assert main(["explain", program(PROGRAM), "--arch", "sm_90a"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 region fused\n")
    assert "out0 = bf16(relu(acc))" in out
    assert re.search(r"\n    cute_mm_\w+_64x64_[0-9a-f]{8}:\n    sm_90a, tile 64x64_1x1", out)


def test_source_prints_the_module_with_the_lines_of_the_program(program, capsys):
    import cute_backend

    assert main(["source", program(PROGRAM), "--arch", "sm_100a"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"out0\[e\] = t0 +# program\.py:\d+\n", shown)
    plane = torch.randn(64, 64, dtype=torch.bfloat16)
    generated = cute_backend.generate(lambda a, b: (a @ b).relu(), plane, plane)
    assert re.sub(r"# \w+\.py:\d+", "", shown) == re.sub(r"# \w+\.py:\d+", "", generated)


def test_build_prints_a_row_a_region(program, capsys):
    assert main(["build", program(PROGRAM), "--arch", "sm_90a"]) == 0
    _, _, row = capsys.readouterr().out.splitlines()
    assert row.split()[:3] == ["region", "0", "sm_90a"]
    assert row.split()[5] == "0"


def test_a_name_chooses_among_functions(program, capsys):
    path = program(PROGRAM + "def other(a, b):\n    return (a @ b).tanh()\n")
    assert main(["explain", f"{path}:other"]) == 0
    assert "tanh(acc)" in capsys.readouterr().out


def test_a_module_will_do_for_a_function(program, capsys):
    text = """
import torch
layer = torch.nn.Sequential(torch.nn.Linear(64, 64, dtype=torch.bfloat16), torch.nn.ReLU())
def _helper(): pass
def example_inputs():
    return [torch.randn(32, 64, dtype=torch.bfloat16)]
"""
    assert main(["explain", program(text)]) == 0
    assert "relu(acc + bias)" in capsys.readouterr().out


KEYWORDS = """
import torch
class Product(torch.nn.Module):
    def forward(self, a, *, b, times=2):
        return (a @ b).relu() * times
product = Product()
def example_inputs():
    square = torch.randint(-2, 3, (64, 64)).bfloat16()
    return (square,), {"b": square, "times": 3}
"""


@pytest.mark.parametrize("command", ["explain", "source", "simulate"])
def test_example_inputs_may_have_keywords(command, program, capsys):
    assert main([command, program(KEYWORDS), "--arch", "sm_90a"]) == 0
    assert {"explain": "relu(acc) * 3", "source": "relu(acc) * 3", "simulate": "4096 of 4096"}[command] in (
        capsys.readouterr().out
    )


NAMED = {
    "diffusers_flux": "block",
    "hugging_face": "llama",
    "llama_mlp": "mlp",
    "scaled_mm_recipes": "rowwise",
    "torchao_fp8": "mlp_per_row",
    "training": "gelu",
}
"""Of examples with several functions, one."""
EXPLAINED = [path for path in EXAMPLE.parent.glob("*.py") if "def example_inputs" in path.read_text()]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("path", sorted(EXPLAINED), ids=lambda path: path.stem)
def test_every_example_explains(capsys, path):
    for package in ("diffusers", "torchao", "transformers"):
        if package in path.read_text():
            pytest.importorskip(package, reason="needs the extra `models`")
    name = NAMED.get(path.stem)
    assert main(["explain", f"{path}:{name}" if name else str(path)]) == 0
    assert "region 0" in capsys.readouterr().out


def refused(capsys, *argv):
    """The one sentence of a refusal."""
    assert main([*argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("cute_backend: ")
    return line.removeprefix("cute_backend: ")


@pytest.mark.parametrize("command", ["explain", "source", "build"])
def test_an_unknown_architecture(command, program, capsys):
    assert refused(capsys, command, program(PROGRAM), "--arch", "sm_75") == (
        "arch is 'sm_75'; kernels are generated for sm_90a, sm_100a, sm_80, sm_86, sm_89, sm_103a, sm_120a "
        "and sm_121a"
    )


@pytest.mark.parametrize(
    ("text", "suffix", "message"),
    [
        ("def product(a): return a", "", "defines no example_inputs()"),
        (PROGRAM + "\ndef other(a): return a", "", "defines product, other beside example_inputs; name one"),
        ("def example_inputs(): return ()", "", "defines none beside example_inputs"),
        (KEYWORDS, ":Product", "Product is a class; give an instance of it, such as Product(...)"),
        (PROGRAM, ":missing", "defines no function 'missing'; it defines product"),
        ("import nonsense_module", "", "ModuleNotFoundError: No module named 'nonsense_module'"),
        ("def broken(:", "", "SyntaxError"),
        ("import sys; sys.exit(3)", "", "cannot be imported: SystemExit: 3"),
        (PROGRAM.replace("return torch", "return [][0], torch"), "", "failed: IndexError: list index"),
        (
            PROGRAM.replace("return torch.randn(64, 64, dtype=torch.bfloat16), ", "return "),
            "",
            "a Tensor, not a tuple",
        ),
        (
            PROGRAM.replace("randn(64, 64", "randn(64, 63"),
            "",
            "on its example inputs: RuntimeError: a and b must have same reduction dim",
        ),
    ],
)
def test_a_file_that_will_not_do(text, suffix, message, program, capsys):
    assert message in refused(capsys, "explain", program(text) + suffix)


def test_no_file_and_no_python_file(capsys):
    assert refused(capsys, "explain", "nowhere.py") == "there is no file nowhere.py"
    assert "is not a Python file" in refused(capsys, "explain", "model.onnx")


def test_no_command_and_no_such_command(capsys):
    assert refused(capsys) == (
        "give a COMMAND: explain, source, build, simulate, bench, aot, cache, fuzz, doctor"
    )
    assert refused(capsys, "explian") == "there is no command 'explian'; did you mean 'explain'?"
    assert refused(capsys, "train", "x.py").startswith("there is no command 'train'; there are explain, ")


SCRIPT = "import sys\nfrom cute_backend.__main__ import main\nsys.exit(main())\n"
"""The script that pip makes of the entry point."""


@pytest.mark.parametrize("how", ["-m", "script"])
@pytest.mark.parametrize(("word", "status"), [("--help", 0), ("--version", 0), ("explian", 2)])
def test_help_and_a_typo_are_answered_without_torch(how, word, status, tmp_path):
    path = tmp_path / "cute_backend"
    path.write_text(SCRIPT)
    program = ["-m", "cute_backend"] if how == "-m" else [path]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *program, word], capture_output=True, text=True
    )
    assert done.returncode == status
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "cute_backend.command.parser" in imported and "torch" not in imported


def test_the_script_is_declared():
    declared = (EXAMPLE.parents[1] / "pyproject.toml").read_text()
    assert '[project.scripts]\ncute_backend = "cute_backend.__main__:main"\n' in declared


INTERRUPTED = PROGRAM.replace("    return torch.randn", "    raise KeyboardInterrupt\n    return torch.randn")


@pytest.mark.parametrize("command", ["explain", "source", "build", "simulate", "aot"])
def test_an_interrupt_is_one_line_and_status_130(command, program, capsys):
    output = ["-o", "x.cutepack"] if command == "aot" else []
    assert main([command, program(INTERRUPTED), *output]) == 130
    assert capsys.readouterr() == ("", "cute_backend: interrupted\n")


@pytest.mark.parametrize("command", ["bench", "cache"])
def test_an_interrupt_where_no_program_runs(command, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("cute_backend.bench.command.require_gpu", interrupt)
    monkeypatch.setattr("cute_backend.command.cache_command.cache_root", interrupt)
    assert main([command, *(["path"] if command == "cache" else [])]) == 130
    assert capsys.readouterr() == ("", "cute_backend: interrupted\n")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["explain"], ["tracing"]),
        (["simulate", "--arch", "sm_90a"], ["tracing", "compiling", "simulating, ", "the reference"]),
        (["build", "--arch", "sm_90a"], ["tracing", "compiling for sm_90a", "0/1"]),
    ],
    ids=lambda value: value[0],
)
def test_a_wait_is_shown_on_a_terminal_alone(command, words, program, capsys, monkeypatch):
    path = program(PROGRAM)
    if command == ["explain"]:
        assert main([*command, path]) == 0
        assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich.progress.Progress.update", _refreshing(Progress.update))
    assert main([*command, path]) == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert [each for each in words if each not in shown] == []
    assert "/?" not in shown
    for line in re.split(r"[\r\n]+", shown):  # what is not counted has no count left of what was before it
        assert "the reference" not in line or not re.search(r"\d/\d", line)


@pytest.mark.parametrize(
    ("terminal", "quiet", "shown"), [(True, "0", True), (True, "yes", False), (False, "0", False)]
)
def test_the_import_of_torch_is_a_wait_too(terminal, quiet, shown, capsys, monkeypatch):
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("CUTE_BACKEND_QUIET", quiet)
    assert main(["cache", "path"]) == 0
    assert ("starting" in capsys.readouterr().err) is shown


def test_aot_shows_a_wait_before_it_compiles(program, capsys, monkeypatch, tmp_path):
    def make_pack(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("cute_backend.aot.make_pack", make_pack)
    monkeypatch.setattr("rich.progress.Progress.update", _refreshing(Progress.update))
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["aot", program(PROGRAM), "-o", str(tmp_path / "x.cutepack")]) == 130
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert re.search(r"tracing program\.py .* 0/1", shown)


def test_aot_names_the_architectures_that_a_pack_has_no_kernel_for(capsys, monkeypatch, tmp_path):
    def make_pack(request, path):
        path.write_bytes(b"")
        return Written(1, 1, "0" * 64)

    monkeypatch.setattr("cute_backend.aot.make_pack", make_pack)
    fp8 = str(EXAMPLE.with_name("small_linear.py"))
    assert main(["aot", fp8, "--arch", "sm_80", "--arch", "sm_89", "-o", str(tmp_path / "x.cutepack")]) == 0
    shown = capsys.readouterr().out
    assert ": for sm_89, epilogues: 1, kernels: 1, " in shown
    assert shown.endswith("No kernel is for sm_80, because nothing is fused there; explain says why.\n")


@pytest.mark.parametrize("quiet", [False, True])
def test_fuzz_and_bench_show_waits_unless_they_are_unwanted(quiet, capsys, monkeypatch):
    from cute_backend import config
    from cute_backend.bench import command

    monkeypatch.setenv("FORCE_COLOR", "1")
    with config.patch(quiet=quiet):
        assert main(["fuzz", "--count", "1", "--replay"]) == 0
        assert ("1/1" in capsys.readouterr().err) is not quiet
        with command._progress(2) as progress:
            progress("measuring")
        assert ("measuring" in capsys.readouterr().err) is not quiet
        monkeypatch.delenv("FORCE_COLOR")
        with command._progress(2) as progress:
            progress("measuring")
        assert capsys.readouterr().err == ("" if quiet else "measuring\n")


def _refreshing(update):
    def shown(self, *args, **kwargs):
        update(self, *args, **kwargs, refresh=True)

    return shown


def test_explain_without_a_product(program, capsys):
    assert main(["explain", program(PROGRAM.replace("(a @ b).relu()", "a + b"))]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("no regions fused: there is no matrix product in it: no mm, addmm, bmm, baddbmm, ")


def test_explain_gives_the_line_of_what_is_not_fused(program, capsys):
    path = program(PROGRAM.replace("(a @ b).relu()", "(a @ b).relu().cumsum(0)"))
    assert main(["explain", path]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("cumsum"))
    assert row.split()[:3] == ["cumsum", "program.py:4", "not_pointwise"]


@pytest.mark.parametrize("command", ["source", "build"])
def test_nothing_to_generate(command, program, capsys):
    text = PROGRAM.replace("(a @ b).relu()", "a + b")
    assert "nothing in the function is fused" in refused(capsys, command, program(text))


def test_without_the_dsl(program, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cutlass", None)
    assert "pip install 'nvidia-cutlass-dsl[cu13]" in refused(capsys, "build", program(PROGRAM))


SAID = """
import logging
import warnings
warnings.warn("cute_backend: a fact", RuntimeWarning)
warnings.warn("another's", RuntimeWarning)
logging.getLogger("another").warning("could not load")
logging.getLogger("another").error("is broken")
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("logs", "expected"),
    [
        ("", ["is broken"]),
        pytest.param("+cute_backend", ["could not load", "is broken"], marks=pytest.mark.exhaustive),
    ],
)
def test_a_warning_of_ours_is_a_line_and_what_others_log_is_left_out_unless_logs_are_asked_for(
    logs, expected, program
):
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    done = subprocess.run(
        [sys.executable, "-m", "cute_backend", "explain", program(SAID + PROGRAM)],
        env={**environment, "TORCH_LOGS": logs} if logs else environment,
        capture_output=True,
        text=True,
        check=True,
    )
    ours, others, *logged = done.stderr.splitlines()
    assert ours == "cute_backend: a fact"
    assert re.fullmatch(r".*program.py:5: RuntimeWarning: another's", others)
    assert logged[-len(expected) :] == expected and ("could not load" in logged) == bool(logs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time on")
def test_bench_needs_a_gpu(capsys):
    assert refused(capsys, "bench", str(EXAMPLE)) == (
        "bench times kernels on a GPU, and torch finds no CUDA device on this machine"
    )


def test_an_output_that_is_full():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "cute_backend", "cache", "path"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "cute_backend: the output can't be written: No space left on device\n",
    )


def test_an_output_that_is_closed(program, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["explain", program(PROGRAM)]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.exhaustive
def test_as_a_program_from_another_folder(tmp_path):
    def run(*argv):
        return subprocess.run(
            [sys.executable, "-m", "cute_backend", *argv], capture_output=True, text=True, cwd=tmp_path
        )

    done = run("source", str(EXAMPLE))
    assert done.returncode == 0 and "class Epilogue:" in done.stdout
    failed = run("explain", "nowhere.py")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == "cute_backend: there is no file nowhere.py\n"
