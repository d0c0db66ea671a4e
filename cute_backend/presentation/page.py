"""An explanation as HTML: a part of a notebook, or a self-contained page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from cute_backend.planning.naming import words
from cute_backend.presentation.terminal import (
    GRADIENTS_ARE_ON,
    OPERANDS,
    kernel_lines,
    listings,
    operand_rows,
    summary,
    titles,
)

if TYPE_CHECKING:
    from cute_backend.api import ExplainedRegion, Explanation

_COLOURS = """
:root {
  color-scheme: light dark;
  --cute-text: #1b1f24;
  --cute-quiet: #57606a;
  --cute-link: #0b57d0;
  --cute-page: #ffffff;
  --cute-box: #f4f5f7;
}
@media (prefers-color-scheme: dark) {
  :root {
    --cute-text: #e6e8eb;
    --cute-quiet: #a9b1bb;
    --cute-link: #a8c7fa;
    --cute-page: #15181d;
    --cute-box: #20242b;
  }
}
"""
"""The colours of a self-contained page. A notebook has its own."""

_PAGE_STYLE = """
body { margin: 0; color: var(--cute-text); background: var(--cute-page); }
body { font: 1rem/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; line-height: 1.25; overflow-wrap: anywhere; }
footer { color: var(--cute-quiet); font-size: .875rem; margin-top: 2rem; }
"""

_ROW = 72
"""Pixels of a region's row in the graph: four lines of its text."""

_STYLE = f"""
.cute a {{ color: var(--cute-link, inherit); }}
.cute h2 {{ font-size: 1.1rem; margin: 1.5rem 0 .25rem; overflow-wrap: anywhere; }}
.cute p {{ margin: .25rem 0; }}
.cute ul {{ margin: .25rem 0; padding-left: 1.25rem; }}
.cute code, .cute pre {{ font: .875rem/1.5 ui-monospace, monospace; background: none; color: inherit; }}
.cute code, .cute li {{ overflow-wrap: anywhere; }}
.cute td {{ overflow-wrap: break-word; }}
.cute pre {{ border: 1px solid rgb(128 128 128 / .4); border-radius: 4px; padding: .5rem .75rem; }}
.cute pre {{ background: var(--cute-box, transparent); margin: .5rem 0; }}
.cute .formula {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
.cute .module {{ white-space: pre; overflow-x: auto; }}
.cute summary {{ cursor: pointer; padding: .25rem 0; }}
.cute table {{ border-collapse: collapse; width: 100%; margin: .5rem 0; }}
.cute caption {{ text-align: left; padding: .25rem 0; color: var(--cute-quiet, inherit); }}
.cute th, .cute td {{ text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; }}
.cute th, .cute td {{ color: inherit; font-size: .875rem; }}
.cute th, .cute td {{ border-bottom: 1px solid rgb(128 128 128 / .4); }}
.cute .graph {{ position: relative; margin: 1rem 0; }}
.cute .graph svg {{ position: absolute; left: 0; top: 0; }}
.cute .graph ol {{ list-style: none; margin: 0; padding: 0; }}
.cute .graph li {{ height: {_ROW}px; margin: 0; font-size: .875rem; line-height: 1.25; }}
.cute .graph li {{ display: flex; flex-direction: column; justify-content: center; }}
@media (max-width: 40rem) {{
  .cute table, .cute tbody, .cute tr, .cute td {{ display: block; width: auto; }}
  .cute thead {{ position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }}
  .cute caption {{ display: block; }}
  .cute tr {{ border-bottom: 1px solid rgb(128 128 128 / .4); padding: .25rem 0; }}
  .cute td {{ border: 0; padding: .1rem 0; overflow-wrap: anywhere; }}
  .cute td:empty {{ display: none; }}
  .cute td::before {{ content: attr(data-column) ": "; color: var(--cute-quiet, inherit); }}
}}
"""


def page(explained: Explanation, title: str) -> str:
    """A whole page, for a browser. It follows the reader's theme, light or dark, and size of text."""
    from cute_backend import __version__

    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_COLOURS}{_PAGE_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n{part(explained, links=True)}"
        f"<footer>cute_backend {__version__}, {escape(explained.arch)}</footer>\n</main>\n</body>\n</html>\n"
    )


def part(explained: Explanation, *, links: bool = False) -> str:
    """An explanation as part of a page, in the page's colours. With `links` regions link to one another,
    which needs a page with no other explanation."""
    names = titles(explained)
    fused, left = summary(explained)
    parts = [f'<div class="cute">\n<style>{_STYLE}</style>\n<p><b>{fused}</b>{left}</p>\n']
    if explained.has_backward:
        parts.append(f"<p>{GRADIENTS_ARE_ON}</p>\n")
    if any(region.sources for region in explained.regions):
        parts.append(_graph(explained.regions, names, links))
    parts += [_region(region, index, names, links) for index, region in enumerate(explained.regions)]
    parts += [_table(each.caption, each.columns, each.rows) for each in listings(explained)]
    return "".join([*parts, "</div>\n"])


def _link(index: int, names: Sequence[str], links: bool) -> str:
    return f'<a href="#region-{index}">{names[index]}</a>' if links else names[index]


def _region(region: ExplainedRegion, index: int, names: Sequence[str], links: bool) -> str:
    m, n, k = (escape(str(size)) for size in region.sizes)
    kernel, source = region.kernel(), region.source()
    anchor = f' id="region-{index}"' if links else ""
    items = [escape(line) for line in kernel_lines(region)]
    items += [f"reads {_link(each.region, names, links)}{_through(each.ops)}" for each in region.sources]
    return (
        f"<section{anchor}>\n<h2>{names[index]}: {escape(region.node)}</h2>\n"
        f"<p>{escape(region.anchor)} of M {m}, N {n}, K {k}</p>\n<p><code>{kernel.entry}</code></p>\n"
        f"<p>{region.arch}, tile <code>{kernel.plan.tile.name}</code>: {kernel.plan.tile.words}</p>\n"
        f"<ul>\n{''.join(f'<li>{item}</li>' for item in items)}\n</ul>\n"
        f'<pre class="formula">{escape(region.formula)}</pre>\n'
        + _table("Operands and results", OPERANDS, operand_rows(region))
        + f"<details>\n<summary>The generated module, {len(source.splitlines())} lines</summary>\n"
        f'<pre class="module" tabindex="0">{escape(source)}</pre>\n</details>\n</section>\n'
    )


def _through(ops: int) -> str:
    return f", through {ops} op{'' if ops == 1 else 's'} that Inductor computes" if ops else ""


def _table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; on a phone each cell is a line that begins with the name of its column."""
    columns = [column or "name" for column in columns]
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    body = ""
    for row in rows:
        cells = zip(columns, row, strict=True)
        texts = (f'<td data-column="{column}">{escape(cell)}</td>' for column, cell in cells)
        body += f"<tr>{''.join(texts)}</tr>\n"
    return (
        f"<table>\n<caption>{caption}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}</tbody>\n</table>\n"
    )


_LANE, _BEND, _MAX_LANES = 14, 8, 6
"""The pixels between arcs, the radius of their bends in pixels, and the number of lanes for arcs; more arcs
share the last lane."""


def _graph(regions: Sequence[ExplainedRegion], names: Sequence[str], links: bool) -> str:
    """The regions from top to bottom, and an arc from each to all that read its results."""
    arcs = sorted(
        ((each.region, index, each.ops) for index, region in enumerate(regions) for each in region.sources),
        key=lambda arc: (arc[1] - arc[0], arc[0]),
    )
    lanes: list[list[tuple[int, int]]] = [[] for _ in range(_MAX_LANES)]
    placed = []
    for first, last, ops in arcs:
        free = (i for i, lane in enumerate(lanes) if all(last <= a or b <= first for a, b in lane))
        lane = next(free, _MAX_LANES - 1)
        lanes[lane].append((first, last))
        placed.append((first, last, ops, lane))
    width = _LANE * sum(map(bool, lanes)) + 3 * _BEND
    height = _ROW * len(regions)
    paths = "".join(_arc(*arc, right=width) for arc in placed)
    items = "".join(
        f"<li><span>{_link(index, names, links)}</span><code>{words(region.spec)}</code></li>\n"
        for index, region in enumerate(regions)
    )
    return (
        f'<div class="graph" style="padding-left: {width + _BEND}px">\n'
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" fill="none" '
        f'stroke="currentColor" stroke-width="1.5">\n<title>Which region reads which</title>\n{paths}</svg>\n'
        f"<ol>\n{items}</ol>\n</div>\n<p>An arc leads from a region to each that reads its results; a dashed "
        "one through ops that Inductor computes.</p>\n"
    )


def _arc(first: int, last: int, ops: int, lane: int, right: int) -> str:
    """From the lower half of one row to the upper half of another, by a lane to the left of them."""
    x = right - 2 * _BEND - _LANE * (lane + 1)
    begin, end = _ROW * first + _ROW // 2 + 6, _ROW * last + _ROW // 2 - 6
    dashes = ' stroke-dasharray="4 3"' if ops else ""
    return (
        f'<path d="M{right} {begin}H{x + _BEND}Q{x} {begin} {x} {begin + _BEND}V{end - _BEND}'
        f'Q{x} {end} {x + _BEND} {end}H{right}"{dashes}><title>region {first} to region {last}{_through(ops)}'
        f'</title></path>\n<path d="M{right - 5} {end - 4}L{right} {end}L{right - 5} {end + 4}"/>\n'
    )
