"""The pages of docs/: they build as `make docs` builds them, and say what is so."""

import ast
import doctest
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import cute_backend
from cute_backend import config
from cute_backend.command.parser import parse
from cute_backend.fx_walk.refusals.reasons import Reason
from cute_backend.planning import Arch, Rowvecs, TileConfig
from cute_backend.runtime.tuning.jobs import Untuned
from cute_backend.simulator.report import Recorder
from cute_backend.simulator.simulate import Machine, run
from support.colours import contrast
from support.golden import check_samples
from support.page_commands import PROGRAM, READERS_OWN, commands

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.mark.exhaustive
def test_pages_build_without_warnings(tmp_path):
    for module in ("sphinx", "myst_parser", "furo", "cutlass.operators"):
        pytest.importorskip(module)
    options = ["-W", "--keep-going", "-n", "-q", "-b", "html"]
    command = [sys.executable, "-m", "sphinx", *options, "docs", tmp_path]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    for page in DOCS.glob("*.md"):
        assert (tmp_path / f"{page.stem}.html").exists()


def test_every_refusal_has_an_entry_that_says_what_to_do():
    entries = re.findall(r"^`(\w+)`\n: (.+)", (DOCS / "refusals.md").read_text(), re.MULTILINE)
    assert [name for name, _ in entries] == [reason.value for reason in Reason]


def test_the_page_names_the_refusals_that_cost_nothing():
    page = (DOCS / "refusals.md").read_text()
    (listed,) = re.findall(r"would be no faster\. These are\s(.*?)\. ", page, re.DOTALL)
    assert re.findall(r"`(\w+)`", listed) == [reason.value for reason in Reason if reason.costs_nothing]


ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| `(.+)` \|$", re.MULTILINE)
NAMES = ROW.findall((DOCS / "api.md").read_text())


def first_sentence(name: str) -> str:
    text = inspect.getdoc(getattr(cute_backend, name)) or ""
    return re.match(r".+?[^.](?:\.(?= |$)|$)", " ".join(text.split("\n\n")[0].split()))[0]


def test_the_page_lists_every_public_name():
    assert sorted(name for name, *_ in NAMES) == sorted({*cute_backend.__all__} - {"__version__"})


@pytest.mark.parametrize(("name", "line", "example"), NAMES, ids=[name for name, *_ in NAMES])
def test_a_public_name_is_described_by_its_docstring_and_called_as_it_can_be(name, line, example):
    assert line == first_sentence(name)
    tree = ast.parse(f"try: pass\n{example}" if example.startswith("except ") else example)
    ours = [each for each in ast.walk(tree) if ast.unparse(each).startswith("cute_backend.")]
    attributes = [ast.unparse(each) for each in ours if isinstance(each, ast.Attribute)]
    paths = [path for path in attributes if "(" not in path]
    assert f"cute_backend.{name}" in paths or name == "Explanation"  # the result of explain
    found = {path: attrgetter(path.removeprefix("cute_backend."))(cute_backend) for path in paths}
    for call in (each for each in ours if isinstance(each, ast.Call) and ast.unparse(each.func) in found):
        given = {each.arg: each.value for each in call.keywords}
        inspect.signature(found[ast.unparse(call.func)]).bind(*call.args, **given)


def _linear(x, weight):
    return F.linear(x, weight).relu()


SQUARE = torch.randn(64, 64, dtype=torch.bfloat16)
NARROW = torch.randn(64, 60, dtype=torch.bfloat16)
DEEP = torch.randn(8, 16, 64, dtype=torch.bfloat16)

REMEDIES = {
    Reason.SYMBOLIC_SCALAR: (
        lambda m: (m @ m) * m.shape[0],
        lambda m: (m @ m) * torch.tensor(m.shape[0], dtype=torch.float32),
        (SQUARE,),
    ),
    Reason.OPERAND_ALIGNMENT: (
        lambda x: _linear(x, x),
        lambda x: _linear(F.pad(x, (0, 4)), F.pad(x, (0, 4))),
        (NARROW,),
    ),
    Reason.OPERAND_LAYOUT: (
        lambda x, weight: _linear(x.transpose(0, 1), weight),
        lambda x, weight: _linear(x.transpose(0, 1).contiguous(), weight),
        (DEEP, SQUARE),
    ),
    Reason.FLOAT64: (
        lambda m: (m @ m) * torch.ones(64, dtype=torch.float64),
        lambda m: (m @ m) * torch.ones(64, dtype=torch.float64).float(),
        (SQUARE,),
    ),
}
"""Programs that are refused, what the page makes of them, and their arguments."""


@pytest.mark.parametrize("reason", REMEDIES, ids=lambda reason: reason.value)
def test_what_the_page_says_makes_a_refusal_go_away(reason):
    refused, mended, arguments = REMEDIES[reason]
    dynamic = reason is Reason.SYMBOLIC_SCALAR
    reasons = [each.reason for each in cute_backend.explain(refused, *arguments, dynamic=dynamic).rejections]
    assert reason in reasons
    explained = cute_backend.explain(mended, *arguments, dynamic=dynamic)
    assert len(explained.regions) == 1 and not explained.rejections


@pytest.fixture(scope="module")
def samples() -> dict[str, str]:
    """The samples of the first hour: the small linear's explanation, and its epilogue's class."""
    sys.path.insert(0, str(ROOT / "examples"))
    import small_linear

    explained = cute_backend.explain(
        small_linear.small_linear, *small_linear.example_inputs(), arch="sm_100a"
    )
    source = explained.regions[0].source()
    epilogue = source[source.index("class Epilogue") : source.index("\n\n\n@cute.jit\ndef launch")]
    return {"explain": f"```text\n{explained}\n```", "kernel": f"```python\n{epilogue}\n```"}


@pytest.mark.parametrize("name", ["explain", "kernel"])
def test_the_first_hour_reads_what_is_generated(name, samples):
    check_samples(DOCS / "first-hour.md", name, samples[name])


sys.path.insert(0, str(DOCS))
WHAT_FUSES = {each.name: each for each in import_module("what_fuses").PROGRAMS}


@pytest.mark.parametrize("name", WHAT_FUSES)
def test_the_page_on_what_fuses_has_the_formula_of_one_kernel(name):
    check_samples(DOCS / "what-fuses.md", name, WHAT_FUSES[name].sample())


def test_the_page_on_profilers_has_the_name_of_an_examples_kernel() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    import gelu_residual

    args = gelu_residual.example_inputs()
    explained = cute_backend.explain(gelu_residual.linear_gelu_residual, *args, arch="sm_90a")
    name = explained.regions[0].kernel().entry
    page = (DOCS / "operating.md").read_text()
    assert f"\n{name}_cutlass_0\n" in page and f"cache show {name.rpartition('_')[2]} " in page


def test_the_page_lists_why_regions_are_not_tuned() -> None:
    page = (DOCS / "operating.md").read_text()
    assert re.findall(r"\| `(untuned_\w+)` \|$", page, re.MULTILINE) == [each.value for each in Untuned]


def test_explain_has_every_suffix_of_a_tiles_name() -> None:
    name = inspect.getsource(TileConfig.name.fget)
    suffixes = set(re.findall(r'"_(\w+?)["{]', name)) | {each.value for each in Rowvecs} - {
        Rowvecs.AUTO.value
    }
    page = (DOCS / "explain.md").read_text()
    assert len(suffixes) > 9
    assert all(re.search(rf"^\|.*`_{suffix}\d*`", page, re.MULTILINE) for suffix in suffixes), suffixes


def test_the_first_hour_explains_every_value_of_its_kernel() -> None:
    """The page names values of the sample alone, singly or as `t3` to `t8`, and leaves none out."""
    page = (DOCS / "first-hour.md").read_text()
    *_, kernel = re.findall(r"<!-- kernel -->(.*?)<!-- /kernel -->", page, re.DOTALL)
    made = {int(number) for number in re.findall(r"^ +t(\d+) = ", kernel, re.MULTILINE)}
    named = {int(number) for number in re.findall(r"`t(\d+)`", page)}
    for first, last in re.findall(r"`t(\d+)` to `t(\d+)`", page):
        named.update(range(int(first), int(last) + 1))
    assert made and named == made


CHANGES = sorted(path.stem for path in (DOCS / "changes").glob("*.patch"))


@pytest.mark.parametrize("change", CHANGES)
def test_a_worked_change_is_one_to_the_current_code(change):
    apply = ["git", "apply", "--check", DOCS / "changes" / f"{change}.patch"]
    applied = subprocess.run(apply, cwd=ROOT, capture_output=True, text=True)
    assert applied.returncode == 0, applied.stderr


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., str]:
    """Applies worked changes to a copy of the code, runs Python there, and gives what it prints."""

    def run(changes: list[str], *command: str | Path) -> str:
        for folder in ("cute_backend", "test"):
            ignored = shutil.ignore_patterns("__pycache__", "expected")
            shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
        patches = [DOCS / "changes" / f"{change}.patch" for change in changes]
        subprocess.run(["git", "apply", "-v", *patches], cwd=tmp_path, check=True, capture_output=True)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        ran = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    return run


@pytest.mark.exhaustive
def test_a_worked_architecture_plans_and_builds_kernels_of_both_alignments(changed):
    """As those of the architecture whose template it shares: subtiles are as narrow, and nothing spills."""
    built = changed(["add-an-architecture"], ROOT / "docs/changes/both_alignments.py", "sm_110a")
    assert built == (
        "sm_110a tma: subtiles of 32 columns, rowvec0 smem_staged, exact0 tma, exact1 tma\n"
        "    target sm_110a, 0 bytes spilled\n"
        "sm_110a plain: subtiles of 16 columns, rowvec0 smem_staged, exact0 vector, exact1 vector\n"
        "    target sm_110a, 0 bytes spilled\n"
    )


RUN = """
from cute_backend.__main__ import main
for command in {}:
    print("RUN", *command[:1], flush=True)
    main(command)
"""


@pytest.mark.exhaustive
def test_worked_changes_fuse_or_place_or_multiply_as_the_page_says(changed):
    """An op, a placement and a mainloop, which change nothing of each other, in one process."""
    op, placement, mainloop = (
        [str(ROOT / f"docs/changes/{name}.py"), "--arch", arch]
        for name, arch in (("arctangent", "sm_100a"), ("odd_bias", "sm_100a"), ("slow_sums", "sm_90a"))
    )
    commands = [["explain", *op], ["explain", *placement], ["source", *mainloop], ["simulate", *mainloop]]
    changes = [change for change in CHANGES if change != "add-an-architecture"]
    shown = changed(changes, "-c", RUN.format(commands))
    _, atan, odd, source, simulated = re.split(r"^RUN \w+$", shown, flags=re.MULTILINE)
    assert "f32(atan(acc))" in atan and "column_read" in odd
    assert "from cute_backend.templates.promoted_by_two import Sm90PromotedByTwo\n" in source
    assert re.search(r"64, 64\), Stages\(.*\), Sm90PromotedByTwo\(\)\)\n", source)
    assert re.search(r"8192 of 8192 +0\.0e\+00 +7\.8e-03 +agrees", simulated)


def test_every_worked_change_is_tried():
    assert CHANGES == ["add-a-mainloop", "add-a-placement", "add-an-architecture", "add-an-op"]


def test_drawings_show_the_strides_of_tensors():
    sys.path.insert(0, str(DOCS))
    pytest.importorskip("matplotlib")
    import load_classes

    m, n = load_classes.M, load_classes.N
    operands = {
        "scalar": torch.zeros(()),
        "rowvec": torch.zeros(n),
        "colvec": torch.zeros(m, 1),
        "exact": torch.zeros(m, n),
        "exact_column": torch.zeros(n, m).t(),
        "modes": torch.zeros(2, 1, n).expand(2, m // 2, n),
        "blocks": torch.zeros(3).expand(m, n // 3, 3),
    }
    page = (DOCS / "operands.md").read_text()
    assert operands.keys() == {drawing.name for drawing in load_classes.DRAWINGS}
    for drawing in load_classes.DRAWINGS:
        operand = operands[drawing.name]
        strides = operand if operand.dim() == 3 else operand.expand(m, n)
        offsets = torch.zeros(strides.shape, dtype=torch.int64)
        for size, stride, axis in zip(strides.shape, strides.stride(), range(strides.dim()), strict=True):
            offsets += (torch.arange(size) * stride).reshape(-1, *[1] * (strides.dim() - axis - 1))
        offsets = offsets.reshape(m, n)
        assert offsets.tolist() == [[drawing.offset(row, column) for column in range(n)] for row in range(m)]
        svg = (DOCS / "drawings" / f"{drawing.name}.svg").read_text()
        assert drawing.title in svg and f"drawings/{drawing.name}.svg" in page
        check_legible(svg, load_classes)


def test_the_layers_are_drawn_from_the_imports():
    layers = import_module("layers")
    drawn = layers.Drawing(layers.imports()).svg()
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        layers.DRAWN.write_text(drawn)
    assert layers.DRAWN.read_text() == drawn, "make golden draws it again"
    assert "drawings/layers.svg" in (DOCS / "code.md").read_text()
    check_legible(drawn, layers)


def test_a_layer_stands_above_what_it_imports():
    layers = import_module("layers")
    drawing = layers.Drawing({"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"c"}})
    assert drawing.rows == [["a"], ["b", "d"], ["c"]]
    assert drawing.lines == [("a", "b"), ("b", "c"), ("d", "c")]
    with pytest.raises(RecursionError):
        layers.Drawing({"a": {"b"}, "b": {"a"}})


PHONE = 358
"""Pixels that a page's text takes on a phone of 390."""


def check_legible(svg: str, drawing: ModuleType) -> None:
    """Digits stand out from every cell, and words from the card; no text is below 9 pixels on a phone."""
    fills = set(re.findall(r"fill: (#[0-9a-f]{6})", svg))
    cells = fills - {drawing.GROUND, drawing.TEXT, drawing.DIGITS}
    assert cells and drawing.GROUND in fills and "#ffffff" not in fills
    assert all(contrast(cell, drawing.DIGITS) >= 4.5 for cell in cells)
    assert contrast(drawing.TEXT, drawing.GROUND) >= 4.5
    (width,) = re.findall(r'viewBox="0 0 ([\d.]+) ', svg)
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", svg)]
    assert sizes and min(sizes) * min(4 / 3, PHONE / float(width)) >= 9


@pytest.mark.parametrize(("page", "command"), commands(), ids=lambda value: value)
def test_a_command_of_a_page_is_one_and_names_what_is_there(page: str, command: str) -> None:
    variables, _, words = command.rpartition(PROGRAM)
    assert all(re.fullmatch(r"CUTE_BACKEND_[A-Z_]+=\S+", each) for each in variables.split())
    assert {each.partition("=")[0] for each in variables.split()} <= VARIABLES
    arguments = parse(shlex.split(words))
    for named in (*getattr(arguments, "files", ()), getattr(arguments, "file", None)):
        path, _, name = (named or "").partition(":")
        if path and not path.startswith(READERS_OWN):
            text = (ROOT / path).read_text()
            assert not name or re.search(rf"^(def {name}\(|{name} = )", text, re.MULTILINE)


VARIABLES = {f"CUTE_BACKEND_{name.upper()}" for name in config._config} | {
    "CUTE_BACKEND_CACHE_DIR",
    "CUTE_BACKEND_PACK",
    "CUTE_BACKEND_SOURCES",
}


def test_there_are_commands_to_check() -> None:
    pages = {page for page, _ in commands()}
    assert {"README.md", "first-hour.md", "operating.md", "explain.md"} <= pages and len(commands()) > 20


def test_the_timeline_shows_the_mma_under_three_of_four_epilogues() -> None:
    """The statements of the first hour about docs/timeline.png, checked by the command that draws it."""
    sys.path.insert(0, str(ROOT / "examples"))
    import overlap

    recorder = Recorder()
    machine = Machine(Arch.SM100A, async_seed=1, observer=recorder)
    with cute_backend.config.patch(tile="128x64_1x1_unrolled"):  # several tiles for a CTA, without split-K
        (launch,) = run(overlap.relu_residual, overlap.example_inputs(), machine).launches
    assert launch.kernel.plan.tile.name == "128x64_1x1_unrolled"
    cta = "CTA (0, 0, 0)"
    products = [(begin, end) for pipe, _, begin, end in recorder.operations if pipe == f"MMA of {cta}"]
    stores = [begin for pipe, _, begin, _ in recorder.operations if pipe == f"TMA store of {cta}"]
    tiles = [
        range(min(stores[first : first + 4]), max(stores[first : first + 4])) for first in range(0, 16, 4)
    ]
    assert len(stores) == 16 and all(tiles)
    under = [sum(any(begin <= time < end for begin, end in products) for time in tile) for tile in tiles]
    assert all(2 * count > len(tile) for count, tile in zip(under[:3], tiles, strict=False)) and not under[3]


def test_the_recipe_for_a_stored_format_names_every_file_that_has_one() -> None:
    """Those that name the latest format, and those that find it by its dtype."""
    page = (DOCS / "code.md").read_text()
    section = page.partition("### A format of stored weights\n")[2].partition("\n### ")[0]
    package = ROOT / "cute_backend"
    having = {path for path in package.rglob("*.py") if "DType.I4X2" in path.read_text()}
    having |= {package / "fx_walk/products/packed_weights.py", package / "templates/stored_values.py"}
    assert package / "kinds/stored.py" in having
    assert not [path for path in having if f"`{path.relative_to(package)}`" not in section]
    assert len(section.split()) <= 150


def test_all_pages_have_at_most_26000_words() -> None:
    assert sum(len(page.read_text().split()) for page in DOCS.glob("*.md")) <= 26_000


DOCTESTED = ("api.explanation", "config", "eager.call", "sampling")


@pytest.mark.parametrize("name", DOCTESTED)
def test_examples_in_docstrings(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        result = doctest.testmod(import_module(f"cute_backend.{name}"))
    assert result.attempted and not result.failed
