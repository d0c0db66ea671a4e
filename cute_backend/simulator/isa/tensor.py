"""Copies of tensor boxes by the TMA unit: loads, multicast, stores, reductions (PTX ISA 9.7.9.25.5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_backend.simulator.boxes import BoxFootprint, box_bytes, box_part, box_units, load_box, store_box
from cute_backend.simulator.isa.barrier import each_lane, own_address
from cute_backend.simulator.isa.bulk import (
    REDUCTIONS,
    WEAK,
    Touched,
    begin_store,
    destinations,
    reducing,
    start_load,
)
from cute_backend.simulator.isa.loads_stores import active
from cute_backend.simulator.memory import PARAM_WINDOW, WINDOW_MASK, GlobalMemory
from cute_backend.simulator.opcodes import Step, opcode, unsupported
from cute_backend.simulator.scopes import Order
from cute_backend.simulator.simulation_errors import DescriptorError, IllegalAccess
from cute_backend.simulator.syntax import Address, Immediate, Instruction, Vector
from cute_backend.simulator.tensormap import Packing, TensorMap, decode

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder
    from cute_backend.simulator.warp import Warp

TENSOR_MAP_BYTES = 128


@lru_cache(maxsize=256)
def _decoded(raw: bytes) -> TensorMap:
    return decode(raw)


def tensor_map(w: Warp, address: int, parameters: np.ndarray, coordinates: Sequence[int]) -> TensorMap:
    """The tensor map at a generic address: a kernel parameter, or global memory. Raises DescriptorError if
    its rank is not the number of coordinates."""
    window = address & WINDOW_MASK
    if address % 64:
        raise IllegalAccess(f"a tensor map at {address:#x}, which is not a multiple of 64")
    if window == PARAM_WINDOW:
        raw = parameters[address - PARAM_WINDOW :][:TENSOR_MAP_BYTES]
    elif window:
        raise IllegalAccess(f"a tensor map at {address:#x}: parameters and global memory can hold one")
    else:
        raw = w.cta.cluster.memory.read(address, TENSOR_MAP_BYTES)
    found = _decoded(raw.tobytes())
    if found.rank != len(coordinates):
        raise DescriptorError(f"{len(coordinates)} coordinates for a tensor map of rank {found.rank}")
    return found


@opcode("cp.async.bulk.tensor", section="9.7.9.25.5.2", meaning="TMA copy of a tensor's box")
def bind_tensor_copy(binder: Binder, instruction: Instruction) -> Step:
    parts = instruction.parts
    spaces = [p for p in parts if p.startswith("shared") or p == "global"]
    if any(p.startswith(("im2col", "tile::")) for p in parts):
        raise unsupported(instruction, "a mode other than .tile")
    if spaces[0].startswith("shared"):
        return _bind_tensor_load(binder, instruction)
    return _bind_tensor_store(binder, instruction, None)


@opcode("cp.reduce.async.bulk.tensor", section="9.7.9.25.5.3", meaning="TMA reduction of a box into a tensor")
def bind_tensor_reduce(binder: Binder, instruction: Instruction) -> Step:
    return _bind_tensor_store(binder, instruction, next(p for p in instruction.parts if p in REDUCTIONS))


def _region(
    tmap: TensorMap, coordinates: tuple[int, ...], memory: GlobalMemory, order: Order
) -> Touched | None:
    """The part of global memory that a box covers, or None if it covers none."""
    part = box_part(tmap, coordinates)
    if part is None:
        return None
    place = memory.find(part.start, part.nbytes)
    return Touched(place, BoxFootprint(part, place.address), order)


def _check_begin(tmap: TensorMap, given: tuple[int, ...], box: tuple[int, ...]) -> None:
    """Raises IllegalAccess if a box begins at another multiple than 16 bytes along contiguous memory. On an
    H100 and an H200 such loads, and on an H200 such stores, ended in CUDA error 715."""
    begin = box[0] * tmap.dtype.nbytes
    if begin % 16:
        raise IllegalAccess(
            f"a box at {given} begins {begin} bytes along contiguous memory; expected a multiple of 16"
        )


def _place(binder: Binder, operand: Any, instruction: Instruction) -> Callable[[Warp], list[Any]]:
    """The address of a tensor map, and the coordinates of a box."""
    assert isinstance(operand, Address) and isinstance(operand.rest[0], Vector)
    gets = [binder.get(each, "s32", instruction) for each in operand.rest[0].elements]
    gets.insert(0, binder.address(operand, instruction))
    return lambda w: [get(w) for get in gets]


def _bind_tensor_load(binder: Binder, instruction: Instruction) -> Step:
    target, source, signal, *rest = instruction.operands
    multicast = instruction.has("multicast::cluster")
    mask = binder.get(rest[0] if multicast else Immediate(0), "u16", instruction)
    fixed = mask, binder.address(target, instruction), binder.address(signal, instruction)
    place = _place(binder, source, instruction)
    pair = instruction.has("cta_group::2")
    parameters, text = binder.parameters, instruction.text

    def load(w: Warp) -> None:
        memory = w.global_memory
        for mask, target, signal, at, *where in each_lane(w, *(get(w) for get in fixed), *place(w)):
            tmap = tensor_map(w, at, parameters, where)
            box = tmap.coordinates(tuple(where))
            _check_begin(tmap, tuple(where), box)
            goals = destinations(w, target, signal, mask if multicast else None, pair)
            units = box_units(tmap, goals[0].offset)
            source = _region(tmap, box, memory, WEAK)
            for goal in goals:
                fetch = partial(load_box, tmap, box, memory)
                start_load(w, goal, units, fetch, text, source, box_bytes(tmap))

    return load


def _bind_tensor_store(binder: Binder, instruction: Instruction, reduction: str | None) -> Step:
    target, source = instruction.operands[:2]
    place, shared_address = _place(binder, target, instruction), binder.address(source, instruction)
    parameters, text = binder.parameters, instruction.text

    def store(w: Warp) -> None:
        lanes, rows = active(w), each_lane(w, shared_address(w), *place(w))
        # The hardware issues a plain store once if all lanes issue the same one.
        together = reduction is None and len(set(rows)) == 1
        memory = w.global_memory
        for row, owners in (
            [(rows[0], lanes)] if together else [(r, [n]) for r, n in zip(rows, lanes, strict=False)]
        ):
            offset, at, *where = row
            tmap = tensor_map(w, at, parameters, where)
            if tmap.packing is not Packing.NONE:
                raise unsupported(instruction, "a tensor of 4-bit elements")
            if min(where) < 0:
                # CUDA Programming Guide, on tensors of several dimensions; an H200 traps.
                raise IllegalAccess(f"a store to a box at {tuple(where)}; only loads may begin before 0")
            _check_begin(tmap, tuple(where), tuple(where))
            units = box_units(tmap, own_address(w, offset))
            begin_store(
                w,
                owners,
                units,
                partial(store_box, tmap, tuple(where), memory, reduction),
                text,
                _region(tmap, tuple(where), memory, reducing(tmap.dtype.nbytes) if reduction else WEAK),
            )

    return store
