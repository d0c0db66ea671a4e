"""Kernels that are begun before a launch needs them, since a region is known before it runs."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain

import torch

from cute_backend.planning import Constraints
from cute_backend.runtime.arguments.device import UnsupportedDeviceError, device_at
from cute_backend.runtime.arguments.operands import Size
from cute_backend.runtime.calls.launch import launcher_of
from cute_backend.runtime.calls.spec_kernels import STATE, SpecKernels
from cute_backend.runtime.compiling.build import has_spare_core
from cute_backend.runtime.compiling.rungs import begin_standing, is_asked_for, load_standing, obtain_standing
from cute_backend.runtime.compiling.workers import start_early
from cute_backend.runtime.disk.cache import existing_caches
from cute_backend.runtime.disk.pack import is_packed, is_packed_for_any_size, packs
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.runtime.kernels.reach import Problem, launched, reachable_kernels
from cute_backend.runtime.tuning.winners import winners_on
from cute_backend.spec import EpilogueSpec

log = logging.getLogger(__name__)


def prepare(problems: Iterable[Problem], device: int, *, at_once: bool = False) -> None:
    """Obtains every kernel that these regions can reach. Kernels that are in no cache and no pack are built
    in parallel while the program goes on, and the launch that needs one waits for it. With `at_once`, all are
    built when this returns.

    Launches of the regions then compile nothing. A kernel that can't be built causes a warning where it is
    waited for, and its launches are replayed. If a pack was made for a problem but lacks a kernel, M is
    beyond the pack's range, or the pack is for any size. The launch uses the kernel that is predicted to be
    the fastest. In the second case the missing one may be built for later processes (`later_kernels`).
    """
    gpu, problems = device_at(device), list(chain.from_iterable(map(launched, problems)))
    for problem in problems:
        launcher_of(problem.spec, device, problem.constraints).kernels.announced.add(problem)
    wanted = [
        (launcher_of(problem.spec, device, problem.constraints).kernels, kernel, problem)
        for problem in problems
        for kernel in reachable_kernels(problem, gpu.arch, gpu.sm_count, winners_on(gpu, problem.groups))
    ]
    log.info("%d kernels serve the regions of a graph on GPU %d", len(wanted), device)
    missing: dict[tuple[SpecKernels, Kernel], None] = {}
    for there, kernel, problem in wanted:
        if there.knows(kernel):
            continue
        if kernel.edited or not (is_packed(problem, gpu.arch) and there.has_like(kernel)):
            missing[there, kernel] = None
        elif is_packed_for_any_size(problem, gpu.arch):
            there.defer(kernel)
    obtained = load_standing(kernel for _, kernel in missing)
    begin_standing(kernel for _, kernel in missing if kernel not in obtained)
    obtained |= obtain_standing(
        kernel for _, kernel in missing if kernel not in obtained and (at_once or is_asked_for(kernel))
    )
    with STATE:
        for there, kernel in missing:
            if kernel in obtained:
                there.add(kernel, obtained[kernel])
            else:
                there.expect(kernel)


def expect(devices: Iterable[torch.device]) -> None:
    """Starts what compiles kernels, if a program that is about to be compiled for these devices is likely to
    need it: the program's own compilation goes on meanwhile. If a pack or the cache may have its kernels, the
    first one that is missing starts it."""
    gpus = [device for device in devices if device.type == "cuda"]
    if not gpus or not has_spare_core() or any(cache.has_kernels() for cache in existing_caches()):
        return
    for device in gpus:
        with suppress(UnsupportedDeviceError):
            arch = device_at(torch.cuda.current_device() if device.index is None else device.index).arch
            if not any(arch in pack.archs for pack in packs()):
                start_early(arch)


def announce(
    regions: Iterable[tuple[EpilogueSpec, Size, Size, Size, Size | None]],
    device: torch.device,
    *,
    at_once: bool = False,
) -> None:
    """Prepares the regions of a graph, given as (spec, M, N, K, groups of rows), before symbolic sizes are
    known, as `prepare` does.

    The constraints are those of the settings now. Does nothing for devices other than CUDA's, or without a
    GPU, since nothing will be launched.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return
    constraints, problems = Constraints.from_config(), []
    for spec, *sizes in regions:
        m, n, k, groups = (size if isinstance(size, int) else None for size in sizes)
        problems.append(Problem(spec, m, n, k, groups, constraints))
    index = torch.cuda.current_device() if device.index is None else device.index
    prepare(problems, index, at_once=at_once)
