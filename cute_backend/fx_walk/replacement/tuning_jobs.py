"""Tuning and measuring for the pass: makes jobs of regions, and leaves regions for which Inductor's code is
faster to Inductor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch._dynamo.utils import dynamo_timed
from torch.utils._python_dispatch import _disable_current_modes

from cute_backend import config
from cute_backend.fx_walk.graph.static import hint
from cute_backend.fx_walk.refusals.containment import contain
from cute_backend.fx_walk.refusals.reasons import Reason, Refused, Rejection
from cute_backend.fx_walk.region.region import Region
from cute_backend.fx_walk.replacement.unfused import unfused
from cute_backend.planning import Constraints
from cute_backend.runtime.arguments.device import device_at
from cute_backend.runtime.disk.pack import is_packed
from cute_backend.runtime.kernels.reach import Problem
from cute_backend.runtime.tuning.jobs import Job, Untuned
from cute_backend.runtime.tuning.tune import tuner_for
from cute_backend.runtime.tuning.tuning_results import Result
from cute_backend.spec import ProductKind


def tune(regions: Sequence[Region]) -> tuple[list[Region], list[Rejection]]:
    """Tunes all regions that can be tuned. Returns the regions that are worth a kernel, and rejections of the
    others.

    A region that can't be tuned is kept, and counted. Without a GPU every region is kept.
    """
    found: dict[int, Result | None] = {}
    with dynamo_timed("cute_backend.tune"):
        for index, jobs in _by_gpu(regions, thorough=True).items():
            found.update(zip(jobs, tuner_for(index).tune(list(jobs.values())), strict=True))
    return _judge(regions, found)


Late = list[tuple[int, Job]]
"""Regions that were not measured before Inductor compiled their graph, each with the index of its GPU."""


def measure(regions: Sequence[Region], late: Late) -> tuple[list[Region], list[Rejection]]:
    """Does the same as `tune`, but times only those few tiles between which the cost model can't decide, and
    waits for no kernel: it keeps a region whose kernels are not built, and adds it to `late`. It was not
    asked for, so it warns of nothing but what fails, and then keeps all regions."""
    found: dict[int, Result | None] = {}
    try:
        with dynamo_timed("cute_backend.measure"):
            for index, jobs in _by_gpu(regions, thorough=False).items():
                results, left = tuner_for(index).measure(list(jobs.values()))
                found.update(zip(jobs, results, strict=True))
                late += [(index, job) for job in left]
    except Exception as error:
        contain(error, _INSTEAD)
        return list(regions), []
    return _judge(regions, found)


def begin(late: Late) -> None:
    """Begins to build kernels of regions that `measure` left, for `measure_late`."""
    try:
        for index, each in _late_by_gpu(late).items():
            tuner_for(index).begin(each)
    except Exception as error:
        contain(error, _INSTEAD)


@_disable_current_modes()  # AOTAutograd's fake mode, which is off inside Inductor alone
def measure_late(late: Late) -> bool:
    """Times what `measure` left, now that Inductor has compiled the graph. Launches get the tiles that are
    found. Returns whether Inductor's own code is faster for a region, which is a kernel in this graph."""
    results: list[Result | None] = []
    try:
        with dynamo_timed("cute_backend.measure_late"):
            for index, each in _late_by_gpu(late).items():
                found, left = tuner_for(index).measure_late(each)
                results += found
                for _ in left:
                    Untuned.LATE.note(warns=False)
    except Exception as error:
        contain(error, _INSTEAD)
    return any(result is not None and result.unfused_wins for result in results)


_INSTEAD = "the cost model decides alone"


def _late_by_gpu(late: Late) -> dict[int, list[Job]]:
    jobs: dict[int, list[Job]] = defaultdict(list)
    for index, job in late:
        jobs[index].append(job)
    return jobs


def _by_gpu(regions: Sequence[Region], thorough: bool) -> dict[int, dict[int, Job]]:
    """The jobs of regions by GPU and position. Counts the regions that are not timed."""
    jobs: dict[int, dict[int, Job]] = defaultdict(dict)
    for position, index, job in _jobs(regions, thorough):
        if isinstance(job, Untuned):
            job.note(warns=thorough)
        elif not thorough and _is_packed(job, index) and tuner_for(index).recall(job) is None:
            Untuned.PACKED.note(warns=False)
        else:
            jobs[index][position] = job
    return jobs


def recall(regions: Sequence[Region], thorough: bool) -> tuple[list[Region], list[Rejection]]:
    """Does the same as `tune` or, if not `thorough`, as `measure` with earlier results: nothing is compiled,
    timed or counted."""
    found = {
        position: tuner_for(index).recall(job)
        for position, index, job in _jobs(regions, thorough)
        if isinstance(job, Job)
    }
    return _judge(regions, found)


def _judge(
    regions: Sequence[Region], found: dict[int, Result | None]
) -> tuple[list[Region], list[Rejection]]:
    """Divides the regions into those that are kept and those that are left to Inductor, by their timings."""
    kept, rejections = [], []
    for position, region in enumerate(regions):
        result = found.get(position)
        if result is None or not result.unfused_wins:
            kept.append(region)
            continue
        refused = Refused(Reason.UNFUSED_FASTER, unfused=f"{result.unfused_us:.1f}", fused=f"{result.us:.1f}")
        rejections.append(refused.rejection(region.products[-1]))
    return kept, rejections


def _jobs(regions: Sequence[Region], thorough: bool) -> Iterator[tuple[int, int, Job | Untuned]]:
    """The regions that run on a GPU, by position and GPU, each as a job or with the reason why it is not
    tuned."""
    for position, region in enumerate(regions):
        index = gpu_of(region.first.device)
        if index is not None:
            yield position, index, _job(region, thorough)


def _is_packed(job: Job, index: int) -> bool:
    problem = Problem(job.spec, job.m, job.n, job.k, constraints=Constraints.from_config())
    return is_packed(problem, device_at(index).arch)


def gpu_of(device: torch.device) -> int | None:
    """The index of the GPU on which a region will run. None for a CPU, and if there is no GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def _job(region: Region, thorough: bool) -> Job | Untuned:
    """The region as a job, or the reason why it is not timed. If it is not `thorough`, all sizes are static,
    and Inductor's code is timed in 16 bits alone: in 8 bits it was never the faster."""
    m, n, k = region.problem
    if config.batch_invariant:
        return Untuned.BATCH_INVARIANT
    if region.spec.product.kind is ProductKind.K_GROUPED:
        return Untuned.GROUPED
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return Untuned.CAPTURING
    example, groups = hint(m), region.groups
    if not isinstance(n, int) or not isinstance(k, int) or example is None:
        return Untuned.SYMBOLIC
    if not thorough:
        if not isinstance(m, int):
            return Untuned.SYMBOLIC
        if groups is not None:
            return Untuned.GROUPED
    if groups is None:
        # Without the region, the columns of B that heads have in one weight would be copied in every call.
        is_copied = any(acc.b_block for acc in region.spec.accumulators)
        in_doubt = thorough or region.spec.product.a_dtype.bits == 16
        compared = partial(unfused, region, tuned=thorough) if in_doubt and not is_copied else None
        return Job(region.spec, example, n, k, not isinstance(m, int), compared)
    if not isinstance(groups, int):
        return Untuned.SYMBOLIC
    # Random offsets would divide no rows, so Inductor's code is not timed.
    return Job(region.spec, example, n, k, not isinstance(m, int), groups=groups)
