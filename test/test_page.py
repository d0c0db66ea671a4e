"""An explanation as HTML: well-formed, by itself, readable in light and dark, as complete as the table."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import product

import pytest
import torch
from torch import Tensor

import cute_backend
from cute_backend.__main__ import main
from cute_backend.api import Explanation, Source
from support.colours import contrast

BF16 = torch.bfloat16
VOID = {"meta", "br", "img"}


class Block(torch.nn.Module):
    """A region, ops that Inductor computes of it, a region that reads them, and one that reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (torch.nn.Linear(64, 64, dtype=BF16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = torch.where(self.up(x) < 0.5, 1.0, 2.0).to(BF16)
        second = self.gate(first.cumsum(-1)).relu()
        return self.down(second).relu() + first


@pytest.fixture(scope="module")
def explained() -> Explanation:
    with torch.no_grad():
        return cute_backend.explain(Block(), torch.zeros(32, 64, dtype=BF16), arch="sm_90a")


class Tree(HTMLParser):
    """The tags of a document, each closed where it was opened, and its text."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[tuple[str, str]] = []
        self.feed(document)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append((self.open[-1] if self.open else "", data))

    def texts(self, tag: str) -> list[str]:
        return [text for each, text in self.text if each == tag]

    def attributes(self, tag: str, name: str) -> list[str]:
        return [found[name] or "" for each, found in self.tags if each == tag and name in found]


def test_a_page_needs_no_other_file_and_fits_a_phone(explained: Explanation) -> None:
    tree = Tree(explained.to_html("What & why"))
    assert tree.texts("title")[0] == tree.texts("h1")[0] == "What & why"
    assert {tag for tag, _ in tree.tags}.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert not [name for _, found in tree.tags for name in found if name in ("src", "srcset", "onclick")]
    styles = "".join(tree.texts("style"))
    assert "url(" not in styles and "@import" not in styles
    assert "width=device-width, initial-scale=1" in tree.attributes("meta", "content")
    assert tree.attributes("html", "lang") == ["en"] and tree.attributes("meta", "charset") == ["utf-8"]
    # Nothing is wider than the window but what scrolls by itself.
    assert not re.search(r"(?<!max-)(?<!-)width: \d{3,}px", styles)
    assert (
        "@media (max-width: 40rem)" in styles and ".module { white-space: pre; overflow-x: auto; }" in styles
    )
    svgs = [int(width) for width in tree.attributes("svg", "width")]
    assert svgs and max(svgs) < 120


def test_a_column_is_as_wide_as_its_longest_word_but_on_a_phone(explained: Explanation) -> None:
    """`anywhere` lets a browser narrow a column to a letter: "feedbac" and "k" were two lines."""
    wide, _, phone = Tree(explained.to_html("title")).texts("style")[-1].partition("@media (max-width")
    cells = {
        name: re.findall(r"\.cute td \{[^}]*overflow-wrap: ([\w-]+)", style)
        for name, style in (("wide", wide), ("phone", phone))
    }
    assert cells == {"wide": ["break-word"], "phone": ["anywhere"]}


def test_a_page_tells_all_that_the_table_tells(explained: Explanation) -> None:
    tree = Tree(explained.to_html("title"))
    words = " ".join(" ".join(text for _, text in tree.text).split())
    for region in explained.regions:
        assert f"{region.anchor} of M 32, N 64, K 64" in words
        assert region.formula in tree.texts("pre") and region.source() in tree.texts("pre")
        assert region.kernel().entry in words and region.kernel().plan.tile.words in words
        for load in region.loads:
            assert f"{load.name} {load.label} {load.kind} {load.placement} {load.dtype}" in words
    assert any("<" in region.formula for region in explained.regions)
    (refusal,) = explained.rejections
    assert f"{refusal.node} {refusal.where} not_pointwise {refusal.message}" in words
    assert "3 regions fused , 1 refusal" in words
    line = Block.forward.__code__.co_firstlineno + 1
    assert f"acc of self.up.weight, at test_page.py:{line}" in words


def test_arcs_and_links_lead_from_region_to_region(explained: Explanation) -> None:
    assert [region.sources for region in explained.regions] == [
        (),
        (Source(0, 1),),
        (Source(0, 0), Source(1, 0)),
    ]
    tree = Tree(explained.to_html("title"))
    arcs = [text for text in tree.texts("title") if text.startswith("region ")]
    assert sorted(arcs) == [
        "region 0 to region 1, through 1 op that Inductor computes",
        "region 0 to region 2",
        "region 1 to region 2",
    ]
    assert tree.attributes("path", "stroke-dasharray") == ["4 3"]
    anchors = tree.attributes("section", "id")
    assert anchors == ["region-0", "region-1", "region-2"]
    links = tree.attributes("a", "href")
    assert len(links) == 3 + 3 and {link.removeprefix("#") for link in links} == set(anchors)


def test_arcs_of_many_regions_share_lanes() -> None:
    def chained(x: Tensor, weight: Tensor) -> Tensor:
        values = [x]
        for _ in range(9):
            values.append((torch.stack(values).amax(0) @ weight).relu())
        return values[-1]

    x = torch.zeros(64, 64, dtype=BF16)
    explained = cute_backend.explain(chained, x, x.clone(), arch="sm_90a")
    assert len(explained.regions) == 9 and len(explained.regions[-1].sources) == 8
    (width,) = Tree(explained.to_html("title")).attributes("svg", "width")
    assert int(width) < 120


def test_text_stands_out_in_light_and_in_dark(explained: Explanation) -> None:
    styles = "".join(Tree(explained.to_html("title")).texts("style"))
    light, dark = styles.split("@media (prefers-color-scheme: dark)", 1)
    names = ("text", "quiet", "link", "page", "box")
    for scheme in (light, dark):
        colours = dict(re.findall(r"--cute-(\w+): (#[0-9a-f]{6});", scheme))
        assert set(colours) == set(names)
        for text, ground in product(("text", "quiet", "link"), ("page", "box")):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    # Every colour of what is shown is one of these, or the reader's own.
    rest = re.sub(r"--cute-\w+: #[0-9a-f]{6};", "", styles)
    assert set(re.findall(r"(?<![-\w])(?:color|background): ([^;]+);", rest)) <= {
        "inherit",
        "none",
        "transparent",
        *(f"var(--cute-{name})" for name in names),
        "var(--cute-link, inherit)",
        "var(--cute-quiet, inherit)",
        "var(--cute-box, transparent)",
    }


def test_a_notebook_shows_a_part_in_its_own_colours(explained: Explanation) -> None:
    part = explained._repr_html_()
    tree = Tree(part)
    assert tree.tags[0] == ("div", {"class": "cute"})
    assert not re.search(r"--cute-\w+:|<body|<main| id=|href=", part)
    rules = [rule.strip() for rule in re.findall(r"[^{}]+(?={)", "".join(tree.texts("style")))]
    for rule in rules:
        assert rule.startswith("@media") or all(each.strip().startswith(".cute ") for each in rule.split(","))


def test_a_prompt_shows_the_table(explained: Explanation) -> None:
    assert repr(explained) == str(explained) and repr(explained).startswith("3 regions fused, 1 refusal\n")


def test_forward_and_backward_are_labelled() -> None:
    x = torch.zeros(32, 64, dtype=BF16)
    tree = Tree(cute_backend.explain(Block(), x, arch="sm_90a").to_html("title"))
    assert "region 0 (forward)" in tree.texts("a") and any("(backward)" in text for text in tree.texts("h2"))
    assert {"forward", "backward"} <= set(tree.texts("td"))


def test_a_program_without_a_product_is_a_page_too() -> None:
    words = " ".join(
        text for _, text in Tree(cute_backend.explain(torch.relu, torch.zeros(4)).to_html("t")).text
    )
    assert "no regions fused : there is no matrix product in it" in " ".join(words.split())


PROGRAM = """
import torch
def program(a, b):
    return (a @ b).relu()
def example_inputs():
    return torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(64, 64, dtype=torch.bfloat16)
"""


def test_the_command_writes_a_page(tmp_path, capsys) -> None:
    path, target = tmp_path / "report.html", tmp_path / "program.py"
    target.write_text(PROGRAM)
    assert main(["explain", str(target), "--html", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    tree = Tree(path.read_text())
    assert tree.texts("h1") == ["What cute_backend fuses of program.py"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("program.py", "a page is written as .html, not as program.py"),
        ("nowhere/report.html", "the folder of the page, .*nowhere, does not exist or .*"),
    ],
)
def test_where_a_page_cannot_go_is_said_before_a_program_is_traced(name, told, tmp_path, capsys) -> None:
    target = tmp_path / "program.py"
    target.write_text("raise RuntimeError('was imported')")
    assert main(["explain", str(target), "--html", str(tmp_path / name)]) == 2
    assert re.fullmatch(f"cute_backend: {told}\n", capsys.readouterr().err)
    assert target.read_text() == "raise RuntimeError('was imported')"
