"""clusterlaunchcontrol: a cluster takes over the work of one that has not started (PTX ISA 9.7.13.17)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cute_backend.simulator.isa.bulk import destinations, start_load
from cute_backend.simulator.isa.common import scalar_address
from cute_backend.simulator.opcodes import Step, opcode, unsupported
from cute_backend.simulator.syntax import Instruction, elements_of

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder
    from cute_backend.simulator.warp import Warp


def encode_response(origin: tuple[int, int, int] | None) -> np.ndarray:
    """The 16 bytes of a response, opaque to kernels: the first CTA's x, y, z, and whether there is one."""
    words = [*origin, 1] if origin is not None else [0, 0, 0, 0]
    return np.array(words, np.uint32).view(np.uint8)


@opcode(
    "clusterlaunchcontrol.try_cancel", section="9.7.13.17.1", meaning="Asks for a cluster not yet started"
)
def bind_try_cancel(binder: Binder, instruction: Instruction) -> Step:
    target, barrier = (scalar_address(binder, o, instruction) for o in instruction.operands)
    everywhere = instruction.has("multicast::cluster::all")
    text = instruction.text

    def ask(w: Warp) -> None:
        cluster = w.cta.cluster
        response = encode_response(cluster.launch.take_unstarted())
        mask = (1 << len(cluster.ctas)) - 1 if everywhere else None
        for goal in destinations(w, target(w), barrier(w), mask, False):
            start_load(w, goal, np.array([goal.offset >> 4]), partial(np.copy, response), text)

    return ask


@opcode("clusterlaunchcontrol.query_cancel", section="9.7.13.17.2", meaning="Reads a response")
def bind_query(binder: Binder, instruction: Instruction) -> Step:
    target, source = instruction.operands
    get = binder.get(source, "b128", instruction)
    question = instruction.parts[2]
    if question == "is_canceled":
        put = binder.put(target, "pred", instruction)
        return lambda w: put(w, (get(w)[:, 1] >> np.uint64(32)) != 0)
    targets = elements_of(target)
    axes = "xyz" if question == "get_first_ctaid" else question[-1]
    if len(targets) < len(axes):
        raise unsupported(instruction, f"{len(targets)} destinations")
    puts = [binder.put(t, "b32", instruction) for t in targets[: len(axes)]]

    def read(w: Warp) -> None:
        words = np.ascontiguousarray(get(w)).view(np.uint32)
        for put, axis in zip(puts, axes, strict=True):
            put(w, words[:, "xyz".index(axis)])

    return read
