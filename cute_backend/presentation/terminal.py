"""Explanations, builds, sources and simulations as a terminal shows them."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from cute_backend.spec import EpilogueSpec

if TYPE_CHECKING:
    from cute_backend.api import ExplainedRegion, Explanation
    from cute_backend.runtime.kernels.built import Built
    from cute_backend.runtime.kernels.kernel import Kernel
    from cute_backend.simulator.report import Report
    from cute_backend.simulator.simulate import Difference, Launch

PLAIN_WIDTH = 110


def console() -> Console:
    """Standard output: as wide as the terminal, or wide enough for the tables in a pipe."""
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)


def show(renderable: RenderableType) -> None:
    """Prints to standard output."""
    if sys.stdout.isatty():
        console().print(renderable)
    else:
        print(to_text(renderable))


def to_text(renderable: RenderableType) -> str:
    """The text that `print` shows: the same layout, no colour, and rules in ASCII for logs."""
    width = shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns if sys.stdout.isatty() else PLAIN_WIDTH
    plain = Console(width=width, color_system=None, highlight=False)
    with plain.capture() as capture:
        plain.print(renderable)
    return "\n".join(line.rstrip().replace("\u2500", "-") for line in capture.get().splitlines())


GRADIENTS_ARE_ON = (
    "Gradients are on: these are the forward graph and the backward graph. Call explain under "
    "torch.no_grad(), or without --grad, to see inference alone."
)


OPERANDS = ("", "in your program", "kind", "placement", "dtype")
"""The columns of `operand_rows`."""


_INDENTED = (0, 0, 0, 4)
"""The indentation of each column; a line that wraps keeps it."""


def explanation(explained: Explanation) -> RenderableType:
    """A block for each region, then what was not fused, and why."""
    fused, left = summary(explained)
    parts: list[RenderableType] = [Text.assemble((fused, "bold"), left)]
    if explained.has_backward:
        parts.append(Text(GRADIENTS_ARE_ON))
    for region, title in zip(explained.regions, titles(explained), strict=True):
        parts += [Text(), _region(region, title)]
    for listing in listings(explained):
        table = light_table(*listing.columns)
        for row in listing.rows:
            table.add_row(*row)
        parts += [Text(), table]
    return Group(*parts)


def summary(explained: Explanation) -> tuple[str, str]:
    """The numbers of regions, of refusals and of graph breaks, or the reason why there are no regions and no
    refusals."""
    fused = _counted(len(explained.regions), "region") + " fused"
    if not (explained.regions or explained.rejections):
        return fused, f": {explained.no_product}"
    left = ""
    if count := len(explained.rejections):
        free = sum(each.costs_nothing for each in explained.rejections)
        which = "" if free == count else f"{free} "
        costs = f" ({which}cost{'s' if free == 1 else ''} nothing)" if free else ""
        left += f", {_counted(count, 'refusal')}{costs}"
    if explained.breaks:
        left += f", {_counted(len(explained.breaks), 'graph break')}"
    return fused, left


def _counted(count: int, name: str) -> str:
    return f"{count or 'no'} {name}{'' if count == 1 else 's'}"


def titles(explained: Explanation) -> list[str]:
    """The title of each region, as "region 0", with its graph if there are two graphs."""
    if not explained.has_backward:
        return [f"region {index}" for index in range(len(explained.regions))]
    return [
        f"region {index} ({'backward' if region.is_backward else 'forward'})"
        for index, region in enumerate(explained.regions)
    ]


def kernel_lines(region: ExplainedRegion) -> list[str]:
    """In whose place the kernel runs, if it is not the first choice, and its time, if that decided. Then a
    line for each accumulator: its B, its segment of the columns where it shares the launch with others, the
    blocks by which it is scaled, and the line of the program. Then why it shares no launch, if others of its
    A could."""
    lines = [
        f"{accumulator.name} of {product.label}"
        + (f", its {accumulator.width} of the launch's columns" if accumulator.width else "")
        + _scales(region.spec)
        + (f", at {product.where}" if product.where else "")
        for accumulator, product in zip(region.spec.accumulators, region.products, strict=True)
    ]
    return [line for line in (region.rung, region.timed, *lines, region.unshared) if line]


def _scales(spec: EpilogueSpec) -> str:
    found = [(side, scales) for side, scales in spec.scaled if scales.word]
    words = ", ".join(f"{scales.words} of {side.name}" for side, scales in found)
    return f", with scales of {found[0][1].parts}: {words}" if found else ""


def operand_rows(region: ExplainedRegion) -> list[tuple[str, ...]]:
    """The operands of a region and its results, as OPERANDS says."""
    rows: list[tuple[str, ...]] = [
        (load.name, load.label, load.kind, load.placement, load.dtype) for load in region.loads
    ]
    for store in region.stores:
        rows.append((store.name, "", store.kind, store.placement, store.dtype))
    return rows


@dataclass(frozen=True)
class Listing:
    """A table below the regions: the names of its columns, its rows, and its caption on a page."""

    caption: str
    columns: list[str]
    rows: list[list[str]]


def listings(explained: Explanation) -> list[Listing]:
    """The refusals that matter, those that cost nothing, and graph breaks, as far as there are any."""
    graph = ["graph"] if explained.has_backward else []
    refusals: dict[bool, list[list[str]]] = {False: [], True: []}
    for each in explained.rejections:
        graph_of = ["backward" if each.is_backward else "forward"] if graph else []
        row = [each.node, *graph_of, each.where, each.reason.value, each.message]
        refusals[each.costs_nothing].append(row)
    facts = [*graph, "line", "reason", "because"]
    breaks = [[each.where, each.reason] for each in explained.breaks]
    found = [
        Listing("What is left to Inductor", ["not fused", *facts], refusals[False]),
        Listing("What is left to Inductor, which costs nothing", ["costs nothing", *facts], refusals[True]),
        Listing("Where a graph ends, and Python runs the line", ["graph break", "because"], breaks),
    ]
    return [each for each in found if each.rows]


def _region(region: ExplainedRegion, title: str) -> RenderableType:
    m, n, k = region.sizes
    kernel = region.kernel()
    config = kernel.plan.tile
    heading = Text.assemble((f"{title}: {region.node}", "bold"), f", {region.anchor} of M {m}, N {n}, K {k}")
    facts = [
        f"{kernel.entry}:",
        f"{region.arch}, tile {config.name}:",
        config.words,
        *kernel_lines(region),
    ]
    operands = light_table(*OPERANDS)
    for index, row in enumerate(operand_rows(region)):
        operands.add_row(*row, style="green" if index >= len(region.loads) else "")
    formula = Text(region.formula, style="cyan")
    return Group(
        heading, *(Padding(part, _INDENTED) for part in (Text("\n".join(facts)), formula, Text(), operands))
    )


def build_table(builds: Sequence[tuple[str, Kernel, Built]]) -> Table:
    """The resources of an SM that compiled kernels need, one row each, with the name of their region."""
    table = light_table("", "arch", "tile", "registers", "spill bytes", "smem KiB", right=3)
    for name, kernel, built in builds:
        table.add_row(
            name,
            kernel.arch.value,
            kernel.plan.tile.name,
            str(built.registers),
            Text(str(built.spill_bytes), style="green" if built.spill_bytes == 0 else "bold red"),
            f"{built.smem_bytes / 1024:.1f}",
        )
    return table


def launch_table(launch: Launch) -> RenderableType:
    """A simulated launch: what the warps of each role did, in both kernels if parts of K go through
    memory."""
    m, n, k = launch.problem
    config = launch.kernel.plan.tile
    tile = Text(f"M {m}, N {n}, K {k} on {config.arch.value}, tile {config.name}: {config.words}")
    if launch.summing is None:
        return Group(tile, *_kernel_table("", launch.report))
    parts = _kernel_table("kernel that multiplies the parts of K: ", launch.report)
    return Group(tile, *parts, *_kernel_table("kernel that adds them up: ", launch.summing))


def _kernel_table(title: str, run: Report) -> tuple[RenderableType, RenderableType]:
    """The heading of one kernel and the table of its roles."""
    heading = Text(f"{title}grid {run.grid}, {run.instructions} warp instructions")
    table = light_table("role", "warps", "instructions", "waits", "exposed loads", "bytes moved")
    for role in sorted(run.roles.values(), key=lambda role: role.role):
        table.add_row(
            role.role,
            str(role.warps),
            str(role.instructions),
            str(sum(role.waits.values())),
            str(max(role.exposed_loads)) if role.exposed_loads else "",
            ", ".join(f"{kind} {count}" for kind, count in sorted(role.bytes.items())),
        )
    return heading, table


def launch_legend(differences: Sequence[Difference]) -> Text:
    """The meaning of the columns of `launch_table` and `comparison_table`, and advice if results differ."""
    text = (
        "Counts are sums over a role's warps of all CTAs. A role is named after the instructions that its "
        "warps can reach, and other if they reach none that names one. A wait is a warp parked at a barrier. "
        "Exposed loads are those of global memory between the wait for a tile's accumulator and its first "
        "store, in the tile that has most. The relative error is the norm of the difference over that of the "
        "reference."
    )
    if any(_may_be_rounding(difference) for difference in differences):
        text += (
            " The reference adds products up in another order. So a right kernel can exceed what is allowed "
            "where fp32 results amplify the rounding of sums, as exp of large sums does, or differences of "
            "almost equal ones: try smaller inputs."
        )
    return Text(text)


def _may_be_rounding(difference: Difference) -> bool:
    """Whether an output differs by less than 1e-3. Outputs of 16 bits or less never count."""
    return difference.allowed < difference.relative < 1e-3


def comparison_table(differences: Sequence[Difference]) -> Table:
    """Outputs beside their references."""
    table = light_table("output", "dtype", "equal", "relative error", "allowed", "")
    for index, difference in enumerate(differences):
        total = math.prod(difference.shape)
        verdict = Text("agrees", style="green") if difference.agrees else Text("WRONG", style="bold red")
        table.add_row(
            f"{index} {difference.shape}",
            str(difference.dtype).removeprefix("torch."),
            f"{difference.equal} of {total}",
            f"{difference.relative:.1e}",
            f"{difference.allowed:.1e}",
            verdict,
        )
    return table


def print_source(text: str) -> None:
    """Prints a generated module: highlighted and wrapped on a terminal, and unchanged otherwise. Nothing is
    cropped."""
    if not sys.stdout.isatty():
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    highlighted = Syntax("", "python", theme="ansi_dark", background_color="default").highlight(text)
    console().print(highlighted, soft_wrap=True, end="")


def light_table(*columns: str, right: int = 0) -> Table:
    """A light table whose last `right` columns are numbers."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(
            column, justify="right" if index >= len(columns) - right else "left", overflow="fold"
        )
    return table
