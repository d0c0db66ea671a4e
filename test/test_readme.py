"""The README and the pages show what is generated now: samples stand between comments that name them."""

import re
import statistics
import sys
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
import torch

import cute_backend
from cute_backend.bench.command import TABLES
from cute_backend.bench.results import Results
from support import benchmark_tables as tables
from support.golden import check_samples

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def samples() -> dict[str, str]:
    """The example's block: the arithmetic of its first kernel, and what explain prints of that region."""
    sys.path.insert(0, str(ROOT / "examples"))
    import llama_mlp

    with torch.no_grad():
        explained = cute_backend.explain(llama_mlp.mlp, *llama_mlp.example_inputs(), arch="sm_100a")
    source = explained.regions[0].source()
    arithmetic = source[source.index("        for e in cutlass") : source.index("        sub.copy_to(")]
    printed = str(explained)
    region = printed[printed.index("region 0:") : printed.index("\n\nregion 1:")]
    refusals = printed[printed.index("not fused") :]
    summary = printed[: printed.index("\n")]
    shown = f"{summary}\n\n{region}\n\n...\n\n{refusals}"
    return {"kernel": f"```python\n{arithmetic}```", "explain": f"```text\n{shown}\n```"}


@pytest.mark.parametrize("name", ["kernel", "explain"])
def test_samples_are_current(name, samples):
    check_samples(ROOT / "README.md", name, samples[name])


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


def pages(*patterns: str) -> list[Path]:
    return sorted(page for pattern in patterns for page in ROOT.glob(pattern))


RESULTS = list((ROOT / "benchmarks" / "results").glob("*.json"))


IN_SHORT = ("sampling", "row_maxima", "grouped", "grouped_fp8", "weights")
"""Tables of which the page has a line for each ratio. `bench --draw` shows their rows."""


def in_short(runs: list[Results]) -> str:
    """The least, the mean and the greatest of each ratio of these tables."""
    lines = ["| table | GPU, date | rows | ratio | least | geometric mean | most |", f"|{' --- |' * 7}"]
    for run in runs:
        for table in (each for each in run.tables if each.name in IN_SHORT):
            gpu = f"{run.machine.gpu.removeprefix('NVIDIA ').split()[0]}, {run.date[:10]}"
            for ratio in tables.measured(table):
                found = [x for each in table.problems if (x := each.ratio(ratio)) is not None]
                values = (min(found), statistics.geometric_mean(found), max(found))
                cells = [f"`{table.name}`", gpu, len(found), ratio, *(f"{each:.2f}" for each in values)]
                lines.append(f"| {' | '.join(map(str, cells))} |")
    titles = {each.name: each.title for run in runs for each in run.tables if each.name in IN_SHORT}
    names = "\n".join(f"- `{name}`: {title}" for name, title in titles.items())
    return "\n\n".join(["### Further tables in short", names, "\n".join(lines)])


@pytest.mark.skipif(not RESULTS, reason="no results are kept in benchmarks/results")
def test_what_was_measured_is_that_of_the_newest_results():
    order = [table.name for table in TABLES]
    found = [Results.load(path) for path in RESULTS]
    host = max((each for each in found if each.host is not None), key=attrgetter("date"))
    newest = tables.newest(found, order)
    kept = (
        replace(run, tables=tuple(table for table in run.tables if table.name not in IN_SHORT))
        for run in newest
    )
    runs = [run for run in kept if run.tables]
    picture = "### Speed as a picture\n\n![Speed relative to torch's bare product](speed.png)"
    models = max((each for each in found if each.models), key=attrgetter("date"))
    of_models, of_host = tables.models_markdown(models), tables.host_markdown(host)
    first = sorted((each for each in found if each.first_calls is not None), key=attrgetter("date"))[-1:]
    of_first = map(tables.first_calls_markdown, first)
    shown = "\n\n".join(
        [of_models, *of_first, *map(tables.markdown, runs), in_short(newest), of_host, picture]
    )
    check_samples(ROOT / "docs" / "benchmarks.md", "measured", shown)


def test_links_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    targets = re.findall(r"\]\((?!http)([^)#]+)\)", text) + re.findall(r'\bsrc(?:set)?="([^"]+)"', text)
    assert "docs/speed-dark.png" in targets and all((ROOT / target).exists() for target in targets)


@pytest.mark.parametrize(
    "page", pages("docs/*.md", "benchmarks/**/*.md", "CONTRIBUTING.md"), ids=lambda page: page.stem
)
def test_links_between_pages_lead_to_headings(page: Path):
    for target in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
        name, _, heading = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), f"{page}: {target}"
        if heading and path.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings]
            assert heading in slugs, f"{page}: {target} is none of {slugs}"


def test_files_that_are_named_exist():
    page = (ROOT / "docs" / "code.md").read_text()
    named = re.findall(r"`((?:\w+/)?\w+\.py)`", page)
    assert len(named) > 8
    for name in named:
        assert any((folder / name).exists() for folder in (ROOT / "cute_backend", ROOT)), name
