"""Questions about a function: what is fused (`explain`), the kernel (`generate`), its figures (`build`).

Nothing here needs a GPU: the arguments may be CPU, CUDA or fake tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cute_backend import config
from cute_backend.api.described import ExplainedRegion, default_arch, described
from cute_backend.errors import UsageError, meant
from cute_backend.fx_walk.collect import collect
from cute_backend.fx_walk.epilogue_pass import measuring_is_on, tuning_is_on
from cute_backend.fx_walk.products.capability import check_operands
from cute_backend.fx_walk.refusals.containment import contain
from cute_backend.fx_walk.refusals.graph_breaks import GraphBreak, breaks_seen, why_no_product
from cute_backend.fx_walk.refusals.reasons import NO_PRODUCT, Reason, Refused, Rejection
from cute_backend.fx_walk.region.region import Region
from cute_backend.fx_walk.replacement.tuning_jobs import recall
from cute_backend.planning import Arch, tile_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cute_backend.runtime.kernels.built import Built


@dataclass(frozen=True, repr=False)
class Explanation:
    """The kernels that `torch.compile(fn, backend="cute")` makes of a function, and the reasons for the rest.

    `print` shows it as a table. As the last expression of a notebook's cell it also shows the generated
    modules.

    Each of `rejections` has the `node` that was left to Inductor, the `reason`, the `message`, a sentence
    with the facts, and `where` the node is: a line, or the path of a module. With gradients enabled,
    `has_backward` is true, and each region and rejection belongs to the forward graph or, if `is_backward`,
    to the backward graph.

    `breaks` has the lines at which torch.compile ends a graph. If there are neither regions nor rejections,
    `no_product` says why, in a sentence.
    """

    regions: tuple[ExplainedRegion, ...]
    rejections: tuple[Rejection, ...]
    arch: str
    has_backward: bool = False
    breaks: tuple[GraphBreak, ...] = ()
    no_product: str = NO_PRODUCT

    def first_region(self) -> ExplainedRegion:
        """The first region. Raises UsageError if nothing is fused, with the reason."""
        if self.regions:
            return self.regions[0]
        why = self.no_product
        if self.rejections:
            why = "; ".join(f"{each.node}: {each.message}" for each in self.rejections)
        raise UsageError(f"nothing in the function is fused, so there is no kernel: {why}")

    def assert_fused(self, *, regions: int | None = None, no: Iterable[str | Reason] = ()) -> None:
        """For tests: raises AssertionError, with this explanation, unless what is fused is as expected.

        `regions` is the expected number of regions, forward and backward; without it, at least one is
        expected. `no` has the reasons, as members of Reason or as strings, for which nothing may be refused.
        Raises UsageError for a name that is not a reason.

        >>> a, b = torch.empty(256, 64, dtype=torch.bfloat16), torch.empty(64, 128, dtype=torch.bfloat16)
        >>> explained = explain(lambda a, b: (a @ b).relu(), a, b)
        >>> explained.assert_fused(regions=1, no=["rearranged", "unsupported_op"])
        """
        refused = Counter(each.reason for each in self.rejections)
        unwanted = {reason: refused[reason] for reason in map(_parse_reason, no) if refused[reason]}
        found = len(self.regions)
        wrong = [f"refused as {reason.value}: {count}, expected 0" for reason, count in unwanted.items()]
        if regions is None and not found:
            wrong.insert(0, "regions: 0, expected at least 1")
        elif regions is not None and found != regions:
            wrong.insert(0, f"regions: {found}, expected {regions}")
        if wrong:
            raise AssertionError("; ".join(wrong) + f"\n\n{self}")

    def to_html(self, title: str) -> str:
        """A self-contained page with the regions, their graph and their generated modules. It follows the
        reader's choice of a light or a dark theme."""
        from cute_backend.presentation.page import page

        return page(self, title)

    def _repr_html_(self) -> str:
        from cute_backend.presentation.page import part

        return part(self)

    def __str__(self) -> str:
        from cute_backend.presentation.terminal import to_text

        return to_text(self)

    __repr__ = __str__

    def __rich__(self) -> RenderableType:
        from cute_backend.presentation.terminal import explanation

        return explanation(self)


def explain(
    fn: Callable[..., Any],
    /,
    *args: Any,
    arch: str | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> Explanation:
    """Explains which parts of `fn(*args, **kwargs)` are fused, how operands are loaded, and why the rest is
    not.

    The arguments may be CPU, CUDA or fake tensors. Nothing is computed, unless `fn` reads a value of one, or
    one has no fake, as a nested or a quantised tensor. Python code at a graph break runs, on fake tensors;
    `breaks` of the result names each break. No cache is read or written, except for the results of tuning on
    the GPU here. `arch` is "sm_90a", "sm_100a", "sm_103a", "sm_80", "sm_86", "sm_89", "sm_120a" or "sm_121a",
    by default that of the current GPU, or "sm_100a" without one; `dynamic` is torch.compile's. If `fn` has a
    parameter with one of these two names, pass its argument by position. Raises UsageError for another
    `arch`, for a class in place of a module, and where `config.tile` has no tile for a region, and what torch
    raises where `fn` can't run on these arguments.

    >>> a, b = torch.empty(256, 64, dtype=torch.bfloat16), torch.empty(64, 128, dtype=torch.bfloat16)
    >>> (region,) = explain(lambda a, b: (a @ b).relu(), a, b, arch="sm_90a").regions
    >>> region.formula, region.sizes
    ('out0 = bf16(relu(acc))', (256, 128, 64))
    """
    target = Arch.parse(arch).value if arch is not None else default_arch()
    judged = arch if torch.cuda.is_available() else target  # on a GPU, the devices of tensors decide
    with breaks_seen() as found:
        reports = collect(fn, args, dynamic, judged, kwargs)
    breaks = tuple(replace(each, where=each.where or _place_of(fn)) for each in found)
    regions: list[ExplainedRegion] = []
    rejections: list[Rejection] = []
    for report in reports:
        served, unserved = _served(report.regions, Arch.parse(target))
        kept, slower = _recalled(served)
        shown = described(kept, target, len(regions))
        regions += [replace(each, is_backward=report.is_backward) for each in shown]
        rejections += [
            replace(each, is_backward=report.is_backward, where=each.where or _place_of(fn))
            for each in (*report.rejections, *unserved, *slower)
        ]
    asked = config.tile is not None or config.rowvec_placement != "auto"
    for region in regions if asked else ():
        region.kernel()  # raises if the tile or the placement can't be met
    return Explanation(
        regions=tuple(regions),
        rejections=tuple(rejections),
        arch=target,
        has_backward=any(report.is_backward for report in reports),
        breaks=breaks,
        no_product=why_no_product([report.graph for report in reports], breaks),
    )


def explanation_of(found: Sequence[Region], rejections: Sequence[Rejection]) -> Explanation:
    """The explanation of one graph that the pass has just fused, without the others of its program."""
    arch = default_arch()
    served, unserved = _served(found, Arch.parse(arch))
    return Explanation(regions=tuple(described(served, arch)), rejections=(*rejections, *unserved), arch=arch)


def _place_of(fn: Callable[..., Any]) -> str:
    """The first line of a function, as "file.py:12", or its name in torch if it is not written in Python."""
    fn = fn.forward if isinstance(fn, torch.nn.Module) else fn
    fn = unwrap(fn.func if isinstance(fn, partial) else fn)
    code = getattr(fn, "__code__", None)
    if code is not None:
        return f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    return f"{getattr(fn, '__module__', None) or 'torch'}.{getattr(fn, '__name__', type(fn).__name__)}"


def _served(found: Sequence[Region], arch: Arch) -> tuple[Sequence[Region], list[Rejection]]:
    """The regions that a kernel of the architecture can compute, and rejections of the others. For a graph on
    a CPU the walker assumes no target, unless one is named."""
    served, unserved = [], []
    for region in found:
        try:
            for anchor in region.anchors:
                check_operands(anchor, arch.target)
            tile_table(arch, region.spec)
        except Refused as refused:
            unserved.append(refused.rejection(region.products[-1]))
        except ValueError as error:  # no tile holds its blocks of columns
            sizes = {"columns": region.spec.block_columns, "held": ""}
            rejection = Refused(Reason.BLOCK_SIZE, **sizes).rejection(region.products[-1])
            unserved.append(replace(rejection, message=str(error)))
        else:
            served.append(region)
    return served, unserved


def _recalled(found: Sequence[Region]) -> tuple[Sequence[Region], list[Rejection]]:
    """The regions that timings, if they are wanted, have not found slower than Inductor's code; rejects the
    others."""
    try:
        wanted = tuning_is_on() or measuring_is_on()
        return recall(found, thorough=tuning_is_on()) if wanted else (found, [])
    except Exception as error:
        return [], [contain(error)]


def generate(fn: Callable[..., Any], /, *args: Any, arch: str | None = None, **kwargs: Any) -> str:
    """The kernel of the first region of `fn(*args, **kwargs)`, as the text of a Python module.

    `arch` has the values and the default that `explain` has; sizes are taken as the arguments have them.
    Raises UsageError for an unknown architecture, and where nothing is fused.

    >>> a, b = torch.empty(256, 64, dtype=torch.bfloat16), torch.empty(64, 128, dtype=torch.bfloat16)
    >>> text = generate(lambda a, b: (a @ b).relu(), a, b)
    >>> "class Epilogue:" in text.splitlines()
    True
    """
    return explain(fn, *args, arch=arch, **kwargs).first_region().source()


def build(fn: Callable[..., Any], /, *args: Any, arch: str | None = None, **kwargs: Any) -> Built:
    """The kernel of the first region of `fn(*args, **kwargs)`, compiled for `arch`; needs no GPU.

    `arch` has the values and the default that `explain` has; sizes are taken as the arguments have them.

    The result has `ptx`, `cubin`, `source`, and the resources that it needs: `registers` of a thread,
    `spill_bytes` of a thread, `smem_bytes` of a CTA. Raises UsageError for an unknown architecture and where
    nothing is fused, UnavailableError where the CuTe DSL is not installed, BuildError where compilation
    fails.
    """
    return explain(fn, *args, arch=arch, **kwargs).first_region().build()


def _parse_reason(reason: str | Reason) -> Reason:
    if isinstance(reason, Reason):
        return reason
    known = {each.value: each for each in Reason}
    if reason not in known:
        near = meant(reason, known)
        raise UsageError(f"{reason!r} is no reason of a refusal{near}; reasons are {', '.join(known)}")
    return known[reason]
