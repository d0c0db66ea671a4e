"""Address arithmetic and cache hints (PTX ISA 9.7.9.15 to 9.7.9.23)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cute_backend.simulator.isa.common import compute, types_of
from cute_backend.simulator.isa.loads_stores import space_of
from cute_backend.simulator.memory import (
    LOCAL_WINDOW,
    PARAM_WINDOW,
    RANK_SHIFT,
    SHARED_WINDOW,
    WINDOW_MASK,
)
from cute_backend.simulator.opcodes import Step, opcode, unsupported
from cute_backend.simulator.syntax import Instruction

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder
    from cute_backend.simulator.warp import Warp


@opcode("cvta", section="9.7.9.20", meaning="Between generic addresses and those of a state space")
def bind_cvta(binder: Binder, instruction: Instruction) -> Step:
    kind, space = types_of(instruction)[-1], space_of(instruction)
    window = {"global": 0, "const": 0, "param": 0, "param::entry": 0, "local": LOCAL_WINDOW}.get(
        space, SHARED_WINDOW
    )
    if kind == "u32" and window:
        raise unsupported(instruction, "32-bit generic addresses")
    shift = np.uint64(window)
    if window == 0:
        return compute(binder, instruction, lambda a: a, [kind], kind)
    if instruction.has("to"):
        return compute(binder, instruction, lambda a: a - shift, [kind], kind)
    return compute(binder, instruction, lambda a: a + shift, [kind], kind)


@opcode("isspacep", section="9.7.9.19", meaning="Whether a generic address is in a state space")
def bind_isspacep(binder: Binder, instruction: Instruction) -> Step:
    space = space_of(instruction)
    window = {"global": 0, "const": 0, "local": LOCAL_WINDOW, "param": PARAM_WINDOW}.get(space, SHARED_WINDOW)
    put = binder.put(instruction.operands[0], "pred", instruction)
    get = binder.get(instruction.operands[1], "u64", instruction)

    def test(w: Warp) -> None:
        address = get(w)
        found = (address & np.uint64(WINDOW_MASK)) == np.uint64(window)
        if space == "shared::cta":
            found = found & (
                ((address & np.uint64(0xFFFFFFFF)) >> np.uint64(RANK_SHIFT)) == np.uint64(w.cta.rank)
            )
        put(w, found)

    return test


@opcode("mapa", section="9.7.9.22", meaning="The same shared address in another CTA of the cluster")
def bind_mapa(binder: Binder, instruction: Instruction) -> Step:
    kind = types_of(instruction)[-1]
    put = binder.put(instruction.operands[0], kind, instruction)
    get = binder.get(instruction.operands[1], kind, instruction)
    rank = binder.get(instruction.operands[2], "u32", instruction)
    dtype = np.uint64 if kind == "u64" else np.uint32
    keep = dtype((1 << (8 * dtype().itemsize)) - 1 - (0xFF << RANK_SHIFT))

    def map_address(w: Warp) -> None:
        put(w, (get(w) & keep) | (np.asarray(rank(w)).astype(dtype) << dtype(RANK_SHIFT)))

    return map_address


@opcode("getctarank", section="9.7.9.23", meaning="The CTA rank of a shared::cluster address")
def bind_getctarank(binder: Binder, instruction: Instruction) -> Step:
    kind = types_of(instruction)[-1]
    dtype = np.uint64 if kind == "u64" else np.uint32
    put = binder.put(instruction.operands[0], "u32", instruction)
    get = binder.get(instruction.operands[1], kind, instruction)
    return lambda w: put(w, ((get(w) >> dtype(RANK_SHIFT)) & dtype(0xFF)).astype(np.uint32))


@opcode(
    "prefetch",
    "prefetchu",
    "applypriority",
    "discard",
    section="9.7.9.15-18",
    meaning="Cache hints: no effect here",
)
def bind_hint(binder: Binder, instruction: Instruction) -> Step:
    return lambda w: None


@opcode("createpolicy", section="9.7.9.19", meaning="A cache policy: an opaque value")
def bind_createpolicy(binder: Binder, instruction: Instruction) -> Step:
    put = binder.put(instruction.operands[0], "b64", instruction)
    return lambda w: put(w, np.uint64(0))
