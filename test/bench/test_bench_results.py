"""Results as data: what is computed of them, how they are kept, shown and drawn."""

from dataclasses import replace

import pytest
from matplotlib.colors import to_hex, to_rgba

from cute_backend import UsageError
from cute_backend.__main__ import main
from cute_backend.bench import picture
from cute_backend.bench.results import Measurement, Results, Timing, Work, raise_rates
from cute_backend.bench.table import Rate, Ratio, Runner
from support import benchmark_tables, sample_results
from support.colours import contrast
from support.sample_results import BARE, CEILINGS, FULL, INDUCTOR, QUACK, TORCH


def test_a_timing_is_a_median_and_its_deciles():
    assert Timing.of([float(i) for i in range(100, -1, -1)]) == Timing(50.0, 10.0, 90.0)
    assert Timing.of([1.0, 2.0]) == Timing(1.5, pytest.approx(1.1), pytest.approx(1.9))


def test_the_limit_is_the_longer_of_arithmetic_and_traffic():
    arithmetic = Work("bare", operations=2 * 10**11, bytes=10**8, rate=Rate.FP8)
    assert arithmetic.limit_us(CEILINGS) == pytest.approx(200)
    assert replace(arithmetic, rate=Rate.BF16).limit_us(CEILINGS) == pytest.approx(400)
    traffic = replace(arithmetic, bytes=4 * 10**9)
    assert traffic.limit_us(CEILINGS) == pytest.approx(1000)


def test_ratios_are_of_speeds():
    problem = sample_results.problem("one", 1.0, None)
    assert problem.ratio(Ratio(BARE, TORCH)) == pytest.approx(1.2)
    assert problem.ratio(Ratio(FULL, INDUCTOR)) == pytest.approx(1.25)
    assert problem.ratio(Ratio(FULL, QUACK)) is None
    assert problem.share(BARE, CEILINGS) == pytest.approx(100 / 125)
    assert problem.share(FULL, CEILINGS) == pytest.approx(120 / 160)
    assert problem.share(QUACK, CEILINGS) is None


def test_torch_raises_the_ceiling_that_it_exceeds():
    slow = replace(CEILINGS, rates={Rate.FP8: 5e14, Rate.BF16: 5e14})
    raised = raise_rates(slow, sample_results.results().tables)
    assert raised.rates == {Rate.FP8: pytest.approx(1e11 / 150e-6), Rate.BF16: 5e14}
    assert raise_rates(CEILINGS, sample_results.results().tables) == CEILINGS


@pytest.mark.parametrize("with_host", [False, True])
def test_json_gives_back_what_it_was_given(with_host, tmp_path):
    results = sample_results.results()
    if with_host:
        results = replace(results, ceilings=None, tables=(), host=sample_results.host())
    path = tmp_path / "results.json"
    results.save(path)
    assert Results.load(path) == results
    assert results.file_name == f"nvidia-h200-2026-01-02{'-host' if with_host else ''}.json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "does not hold results of bench --json"),
        ("[]", "does not hold results of bench --json"),
        ("nonsense", "does not hold results of bench --json"),
        ('{"version": 7}', "has version 7; this package reads 1"),
        ('{"version": 1, "date": ""}', "missing 2 required"),
    ],
)
def test_other_files_are_refused(text, message, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        Results.load(path)
    with pytest.raises(UsageError, match="can't be read"):
        Results.load(tmp_path / "absent.json")
    with pytest.raises(UsageError, match="can't be written"):
        sample_results.results().save(tmp_path / "absent" / "results.json")


def test_draw_shows_and_draws_without_a_gpu(tmp_path, capsys):
    kept, drawn = tmp_path / "kept.json", tmp_path / "speed.png"
    sample_results.results().save(kept)
    assert main(["bench", "--draw", str(kept), "--picture", str(drawn)]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["cute", "bare", "125.0", "122.5", "to", "131.2", "800", "80%", "0.10%"] in lines
    assert ["quack", "full", "-", "-", "-", "-", "-"] in lines
    assert ["limit", "full", "120.0"] in lines
    assert ["4096x4096x4096", "1.20", "0.94", "1.25"] in lines
    assert "4096x4096x4096, SM clock 1500 to 1980 MHz" in out
    assert "quack full: not installed" in out
    assert "rates: a copy's 4.00 TB/s, read and written; torch's best product, fp8 1000, bf16 500" in out
    for written in (drawn, tmp_path / "speed-dark.png"):
        assert written.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("look", [picture.LIGHT, picture.DARK], ids=["light", "dark"])
def test_a_picture_can_be_read_on_its_page(look):
    figure = picture.figure(sample_results.results(), look)
    assert figure.get_facecolor() == to_rgba(look.paper)
    _, axes = figure.axes
    assert axes.get_facecolor() == to_rgba(look.paper)
    bars = [bar.get_facecolor() for bar in axes.patches]
    (limits,) = axes.collections
    (limit,) = limits.get_colors()
    names = [*axes.get_xticklabels(), *axes.get_yticklabels(), *axes.get_legend().get_texts()]
    words = [text.get_color() for text in (*names, axes.yaxis.label, axes.title)]
    paper = to_hex(look.paper)
    assert min(contrast(to_hex(color), paper) for color in (limit, *words)) >= 4.5
    assert min(contrast(to_hex(color), paper) for color in bars) >= 2
    assert {to_hex(text.get_color()) for text in axes.texts} == {"#ffffff"}
    assert contrast("#ffffff", to_hex(look.bars[Runner.CUTE])) >= 4.5


def test_a_wrong_result_is_shown_as_such_and_ends_with_status_1(tmp_path, capsys):
    results = sample_results.results()
    (table,) = results.tables
    wrong = Measurement(BARE, sample_results.timing(1.0), calls=4, difference=None, agrees=False)
    first = replace(table.problems[0], measurements=(table.problems[0].measurements[0], wrong))
    path = tmp_path / "wrong.json"
    replace(results, tables=(replace(table, problems=(first,)),)).save(path)
    assert main(["bench", "--draw", str(path)]) == 1
    assert "WRONG not finite" in capsys.readouterr().out


def test_host_times_are_shown(tmp_path, capsys):
    path = tmp_path / "host.json"
    replace(sample_results.results(), ceilings=None, tables=(), host=sample_results.host()).save(path)
    assert main(["bench", "--draw", str(path)]) == 0
    out = capsys.readouterr().out
    assert ["the", "op", "alone", "8.0", "7.8", "to", "8.4"] in [line.split() for line in out.splitlines()]
    assert "6.5 s until it is loaded" in out
    assert "0.030 s to load, after 0.050 s to import cute_backend" in out
    assert "loading did not import cutlass" in out
    assert main(["bench", "--draw", str(path), "--picture", str(tmp_path / "host.png")]) == 2
    assert "nothing to draw" in capsys.readouterr().err


def test_the_picture_has_a_panel_a_workload_a_bar_a_runner_and_the_limit():
    figure = picture.figure(sample_results.results())
    bare, full = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["bare", "full"]
    assert [text.get_text() for text in bare.get_legend().get_texts()] == ["limit", "cute"]
    assert [text.get_text() for text in full.get_legend().get_texts()] == ["limit", "inductor", "cute"]
    assert [label.get_text() for label in bare.get_xticklabels()] == ["4096x4096x4096", "16x8192x8192\nslow"]
    assert [bar.get_height() for bar in bare.patches] == pytest.approx([1.2, 1.2])
    assert [bar.get_height() for bar in full.patches] == pytest.approx([0.75, 0.75, 0.9375, 0.9375])
    (limits,) = full.collections
    assert [segment[0][1] for segment in limits.get_segments()] == pytest.approx([1.25, 1.25])
    assert full.get_ylim()[1] > 1.25


def test_a_picture_that_cannot_be_drawn_is_refused_beforehand(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"written as .png, .svg, .pdf, not as speed.doc"):
        picture.check(tmp_path / "speed.doc")
    with pytest.raises(UsageError, match="does not exist"):
        picture.check(tmp_path / "absent" / "speed.png")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UsageError, match="pip install matplotlib"):
        picture.check(tmp_path / "speed.png")


def test_the_readmes_sample():
    lines = benchmark_tables.markdown(sample_results.results()).splitlines()
    assert lines[:2] == ["### A linear and its epilogue", ""]
    assert lines[2].startswith(
        "One run of `python -m cute_backend bench --peers`, NVIDIA H200, 700 W, driver 580.1, CUDA 13.0, "
        "torch 2.11.0, 2026-01-02"
    )
    assert lines[3:8] == [
        "",
        "| problem | cute bare / eager bare | cute full / eager bare | cute full / inductor full |",
        "| --- | --- | --- | --- |",
        "| 4096x4096x4096 | 1.20 (80%) | 0.94 (75%) | 1.25 |",
        "| 16x8192x8192-slow | 1.20 (80%) | 0.94 (75%) | 1.25 |",
    ]


def test_a_table_is_shown_as_the_newest_run_has_it():
    old = sample_results.results()
    [table] = old.tables
    other = replace(table, name="other")
    old = replace(old, tables=(table, other), date="2026-01-02T00:00:00+00:00")
    new = replace(old, tables=(table,), date="2026-01-03T00:00:00+00:00")
    older = replace(old, date="2026-01-01T00:00:00+00:00")
    shown = [new, replace(old, tables=(other,))]
    assert benchmark_tables.newest([new, older, old], [table.name, "other"]) == shown
    assert benchmark_tables.newest([new, older, old], ["other", table.name]) == shown[::-1]


def test_results_print_as_a_table():
    rows = [line.split() for line in str(sample_results.results()).splitlines()]
    assert ["16x8192x8192-slow", "1.20", "0.94", "1.25"] in rows
