"""Faults planted in kernels of the Ampere template."""

from __future__ import annotations

from cute_backend.simulator.errors import RaceError
from support.simulator.mutants import (
    ADA,
    FEW_K_TILES,
    MANY_SUBTILES,
    RELEASED_UNREAD,
    SHARED,
    STILL_READ,
    UNFINISHED,
    WARPS,
    Edit,
    Mutant,
    Text,
    WrongNumbers,
    instead,
    without,
)

MUTANTS = [
    # Warps that copy by cp.async: the ring of operands, rowvecs, and the planes of a warp.
    Mutant(
        "copies of a k tile not waited for",
        WARPS,
        without("cute.arch.cp_async_wait_group(stages.ab - 2)"),
        RaceError,
        UNFINISHED.format(SHARED) + r"(.|\n)*ldmatrix",
    ),
    Mutant(
        "a k tile more under way than there are stages for",
        WARPS,
        instead("cp_async_wait_group(stages.ab - 2)", "cp_async_wait_group(stages.ab - 1)"),
        RaceError,
        UNFINISHED.format(SHARED) + r"(.|\n)*ldmatrix",
    ),
    Mutant(
        "warps do not meet over a k tile",
        WARPS,
        without("cute.arch.sync_threads()"),
        RaceError,
        "shared 0x",
    ),
    Mutant(
        "a stage copied to while others multiply it",
        WARPS,
        (
            Edit("in (self._bring_a, self._bring_b)]", "in (self._bring_b,)]"),
            Edit(
                "                cute.arch.sync_threads()\n",
                "                self._bring_a(shared, ahead, thread)\n"
                "                cute.arch.sync_threads()\n",
            ),
        ),
        RaceError,
        r"cp\.async.*" + STILL_READ.format(SHARED),
    ),
    Mutant(
        "a stage too many begun with",
        WARPS,
        instead("range_constexpr(stages.ab - 1)", "range_constexpr(stages.ab)"),
        RaceError,
        "shared 0x",
    ),
    Mutant(
        "stage of the ring not advanced",
        WARPS,
        instead("stage = _after(stage, stages.ab)", "stage = stage + 0"),
        RaceError,
        "shared 0x",
    ),
    Mutant(
        "planes of a short product not waited for",
        FEW_K_TILES,
        without("cute.arch.cp_async_wait_group(0)", 2, 1),
        RaceError,
        UNFINISHED.format(SHARED),
    ),
    Mutant(
        "planes of a later subtile not waited for",
        MANY_SUBTILES,
        instead(
            "min(stages.exact, self.subtiles - subtile) - 1", "min(stages.exact, self.subtiles - subtile)"
        ),
        RaceError,
        UNFINISHED.format(SHARED),
    ),
    Mutant(
        "planes replaced before they are read",
        MANY_SUBTILES,
        RELEASED_UNREAD,
        RaceError,
        "shared 0x",
        Text.MODULE,
    ),
    Mutant(
        "rows of a fragment of mma.sync confused",
        FEW_K_TILES,
        instead("e // 2 % 2", "e % 2"),
        WrongNumbers,
        "are wrong",
        Text.TILE,
    ),
    Mutant(
        "sums begin with those of the tile before",
        WARPS,
        instead("sums = self.mainloop.begin(acc)", "sums = None"),
        WrongNumbers,
        "are wrong",
    ),
    # fp8, whose sums of a k tile are added to the accumulators.
    Mutant(
        "sums of a k tile begin with those of the one before",
        ADA,
        without("held.fill(0.0)"),
        WrongNumbers,
        "are wrong",
        Text.WARP_MAINLOOP,
    ),
    Mutant(
        "sums of the last k tile alone",
        ADA,
        instead("acc[i] = acc[i] + held[i]", "acc[i] = held[i]"),
        WrongNumbers,
        "are wrong",
        Text.WARP_MAINLOOP,
    ),
]
