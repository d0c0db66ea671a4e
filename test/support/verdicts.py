"""The verdicts of the compiler on the rungs of kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from cute_backend.planning import Alignment, Plan, rungs
from cute_backend.runtime.arguments.operands import Tensors
from cute_backend.runtime.compiling.build import build
from cute_backend.runtime.kernels.kernel import Kernel
from cute_backend.simulator.simulate import Launch, Machine, run_region
from cute_backend.spec import EpilogueSpec
from support.serialized import has_serialized_products

CLEAN = 0.97
"""The least share of kernels whose first rung spills nothing."""

COMPILATIONS = 1.05
"""The most compilations that a kernel takes in the mean."""


@dataclass(frozen=True)
class Verdict:
    """The bytes that each rung of a kernel spills, down to the first that spills nothing."""

    plan: Plan
    spilled: tuple[int, ...]

    @staticmethod
    def of(first: Plan) -> Verdict:
        spilled: list[int] = []
        for rung in rungs(first):
            built = build(Kernel(rung))
            assert built.smem_bytes <= rung.arch.target.smem_bytes, rung.tile.name
            # Kernels that store planes by element may still have such products (64x80_1x1_by80 with heads).
            if rung.alignment is Alignment.TMA:
                assert not has_serialized_products(built.cubin), rung.tile.name
            spilled.append(built.spill_bytes)
            if built.spill_bytes == 0:
                break
        return Verdict(first, tuple(spilled))

    @property
    def words(self) -> str:
        tile, alignment = self.plan.tile, self.plan.alignment
        return f"{tile.name} of {tile.arch.value}, {alignment.value}: {self.spilled}"


def assert_sound(plans: Iterable[Plan]) -> list[Verdict]:
    """Asserts that each kernel has a rung that spills nothing. Returns the verdicts."""
    verdicts = [Verdict.of(each) for each in plans]
    assert verdicts
    assert not [each.words for each in verdicts if each.spilled[-1]]
    return verdicts


def run_sound(
    spec: EpilogueSpec, a: Tensors, b: Tensors, loads: Tensors, machine: Machine
) -> tuple[list[Tensor], Launch]:
    """Simulates a region, as `run_region` does, by a kernel that has a rung that spills nothing."""
    results, launch = run_region(spec, a, b, loads, machine)
    assert_sound([launch.kernel.plan])
    return results, launch


def assert_first_rungs_are_clean(plans: Iterable[Plan]) -> None:
    """Asserts that each kernel has a rung that spills nothing, and nearly all have it at once. Of a few
    kernels, one may need its second rung."""
    verdicts = assert_sound(plans)
    lower = [each.words for each in verdicts if len(each.spilled) > 1]
    assert len(lower) <= max((1 - CLEAN) * len(verdicts), 1), lower
    further = sum(len(each.spilled) - 1 for each in verdicts)
    assert further <= max((COMPILATIONS - 1) * len(verdicts), 1), lower
