"""Tiles that were found fastest on a GPU, and the choice that follows for a launch on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from cute_backend.planning import UNCONSTRAINED, Alignment, Arch, TileConfig, bucket_of
from cute_backend.runtime.arguments.device import Device, device_at
from cute_backend.runtime.kernels.reach import Problem, Winners, config_for
from cute_backend.runtime.tuning.tuning_results import Key, Result, remembered
from cute_backend.spec import EpilogueSpec


def winners_on(gpu: Device, groups: int | None) -> Winners:
    """Returns what was found fastest on GPUs of this model, for products of `groups` groups. None stands for
    products without groups."""

    def winners(
        spec: EpilogueSpec, alignment: Alignment, ms: Sequence[int], n: int, k: int
    ) -> Mapping[int, TileConfig]:
        key = Key(spec, alignment, 0, n, k, gpu.model, groups)
        return remembered().winners(replace(key, m=m) for m in ms)

    return winners


def config_here(problem: Problem, alignment: Alignment, arch: Arch) -> TileConfig:
    """The configuration that a launch would get: on the current GPU if it has the architecture `arch`, else
    on the GPU that is planned for."""
    if (gpu := _gpu_here(arch)) is not None:
        return config_for(problem, alignment, arch, gpu.sm_count, winners_on(gpu, problem.groups))
    return config_for(problem, alignment, arch, arch.target.sm_count)


def result_here(problem: Problem, alignment: Alignment, arch: Arch) -> Result | None:
    """The timings of a problem of known sizes that decide on the current GPU, if it has the architecture."""
    m, n, k, constraints = problem.m, problem.n, problem.k, problem.constraints
    if (gpu := _gpu_here(arch)) is None or constraints != UNCONSTRAINED:
        return None
    assert m is not None and n is not None and k is not None
    m = bucket_of(m) if problem.varies else m
    return remembered().get(Key(problem.spec, alignment, m, n, k, gpu.model, problem.groups))


def _gpu_here(arch: Arch) -> Device | None:
    """The current GPU, if it has an architecture."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == arch.target.capability:
        return device_at(torch.cuda.current_device())
    return None
