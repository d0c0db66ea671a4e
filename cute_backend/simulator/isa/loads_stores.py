"""Loads and stores of single threads, from and to every state space (PTX ISA 9.7.9.8 to 9.7.9.12)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

import numpy as np

from cute_backend.simulator.isa.common import types_of
from cute_backend.simulator.isa.global_access import load_global, store_global
from cute_backend.simulator.memory import (
    LOCAL_WINDOW,
    OFFSET_MASK,
    PARAM_WINDOW,
    RANK_SHIFT,
    SHARED_WINDOW,
    WINDOW_MASK,
)
from cute_backend.simulator.opcodes import Step, opcode, unsupported
from cute_backend.simulator.scopes import Order, order_of
from cute_backend.simulator.simulation_errors import IllegalAccess
from cute_backend.simulator.syntax import TYPE_BYTES, Address, Instruction, Symbol, elements_of
from cute_backend.simulator.warp import LANE_IDS

if TYPE_CHECKING:
    from cute_backend.simulator.binder import Binder
    from cute_backend.simulator.cta import Cta
    from cute_backend.simulator.warp import Warp

SPACES = ("param", "param::entry", "global", "shared", "shared::cta", "shared::cluster", "local", "const")


def space_of(instruction: Instruction) -> str:
    """The state space, or "generic" if the instruction names none."""
    found = next((p for p in instruction.parts[1:] if p in SPACES), "generic")
    return "shared::cta" if found == "shared" else found


def vector_length(instruction: Instruction) -> int:
    return next((int(p[1:]) for p in instruction.parts[1:] if p in ("v2", "v4", "v8")), 1)


def active(w: Warp) -> np.ndarray:
    return LANE_IDS if w.full else np.flatnonzero(w.mask)


def per_lane(w: Warp, value: Any, lanes: np.ndarray) -> np.ndarray:
    """A getter's value for these lanes, as a vector even if it is one scalar for all."""
    array = np.asarray(value)
    if array.ndim == 0:
        return np.full(len(lanes), array)
    return array if lanes is LANE_IDS else array[lanes]


def aligned(addresses: np.ndarray, nbytes: int) -> None:
    """Raises unless each address is a multiple of the access's size, a power of two (PTX ISA 6.4.1)."""
    if nbytes > 1 and int(np.bitwise_or.reduce(addresses)) & (nbytes - 1):
        bad = addresses % addresses.dtype.type(nbytes)
        worst = int(addresses[bad != 0][0])
        raise IllegalAccess(f"an access of {nbytes} bytes at {worst:#x}, which is not a multiple of {nbytes}")


def cells_of(offsets: np.ndarray, nbytes: int) -> np.ndarray:
    """Shadow cells of accesses to shared memory."""
    first = offsets >> 2
    return first if nbytes <= 4 else (first[:, None] + _CELLS[: nbytes // 4]).reshape(-1)


_CELLS = np.arange(8)

Target = tuple["Cta", Union[slice, np.ndarray], np.ndarray]


def shared_target(w: Warp, addresses: np.ndarray, space: str, nbytes: int) -> list[Target]:
    """The CTA, the positions of lanes and the offsets of shared addresses, by CTA. Only .shared::cluster may
    access another CTA. Raises `IllegalAccess` unless all `nbytes` bytes lie in the kernel's memory."""
    low, high = int(np.minimum.reduce(addresses)), int(np.maximum.reduce(addresses))
    offsets = (addresses & np.uint64(OFFSET_MASK)).astype(np.int64)
    if low >> RANK_SHIFT == high >> RANK_SHIFT == w.cta.rank:
        w.cta.shared.check(low & OFFSET_MASK, (high & OFFSET_MASK) + nbytes)
        return [(w.cta, slice(None), offsets)]
    ranks = (addresses >> np.uint64(RANK_SHIFT)).astype(np.int64)
    found = np.unique(ranks).tolist()
    targets: list[Target] = []
    for rank in found:
        if rank >= len(w.cta.cluster.ctas):
            raise IllegalAccess(
                f"shared addresses of CTA rank {rank}: the cluster has {len(w.cta.cluster.ctas)} CTAs"
            )
        if rank != w.cta.rank and space == "shared::cta":
            raise IllegalAccess(f"a .shared::cta address in CTA rank {rank}, issued by rank {w.cta.rank}")
        here = np.flatnonzero(ranks == rank)
        cta, theirs = w.cta.cluster.ctas[rank], offsets[here]
        cta.shared.check(int(theirs.min()), int(theirs.max()) + nbytes)
        targets.append((cta, here, theirs))
    return targets


def load_bytes(
    w: Warp,
    space: str,
    addresses: np.ndarray,
    lanes: np.ndarray,
    nbytes: int,
    parameters: np.ndarray,
    order: Order,
) -> np.ndarray:
    """Bytes (lanes, nbytes) from any space."""
    aligned(addresses, nbytes)
    if space == "generic":
        space, addresses = _resolve(addresses)
        if space == "mixed":
            return np.concatenate(
                [
                    load_bytes(
                        w, "generic", addresses[i : i + 1], lanes[i : i + 1], nbytes, parameters, order
                    )
                    for i in range(len(lanes))
                ]
            )
    if space in ("global", "const"):
        w.report.bytes["ld.global"] += nbytes * len(lanes)
        w.report.global_load()
        return load_global(w, addresses, lanes, nbytes, order)
    if space.startswith("shared"):
        out = np.empty((len(lanes), nbytes), np.uint8)
        for cta, here, offsets in shared_target(w, addresses, space, nbytes):
            if not order.strong:
                cta.shared.shadow.read(cells_of(offsets, nbytes), w.access(w.name))
            out[here] = cta.shared.gather(offsets, nbytes)
            w.report.shared(lanes[here], offsets, nbytes)
        w.report.bytes["ld.shared"] += nbytes * len(lanes)
        return out
    if space == "local":
        return w.local.gather(lanes, addresses.astype(np.int64), nbytes)
    offsets = (addresses & np.uint64(~WINDOW_MASK & (1 << 64) - 1)).astype(np.int64)
    if int(offsets.max()) + nbytes > len(parameters):
        raise IllegalAccess(f"a parameter at byte {int(offsets.max())}; there are {len(parameters)} bytes")
    return parameters[offsets[:, None] + np.arange(nbytes)]


def _resolve(addresses: np.ndarray) -> tuple[str, np.ndarray]:
    """The state space of generic addresses, and the addresses in it; "mixed" if lanes differ."""
    windows = addresses & np.uint64(WINDOW_MASK)
    window = int(windows[0])
    if not (windows == windows[0]).all():
        return "mixed", addresses
    name = {0: "global", SHARED_WINDOW: "shared::cluster", LOCAL_WINDOW: "local", PARAM_WINDOW: "param"}.get(
        window
    )
    if name is None:
        raise IllegalAccess(f"the generic address {int(addresses[0]):#x} is in no state space")
    return name, addresses - np.uint64(window)


def store_bytes(
    w: Warp, space: str, addresses: np.ndarray, lanes: np.ndarray, data: np.ndarray, order: Order
) -> None:
    """Writes bytes (lanes, nbytes) to any space."""
    nbytes = data.shape[1]
    aligned(addresses, nbytes)
    if space == "generic":
        space, addresses = _resolve(addresses)
        if space == "mixed":
            for i in range(len(lanes)):
                store_bytes(w, "generic", addresses[i : i + 1], lanes[i : i + 1], data[i : i + 1], order)
            return
    cluster = w.cta.cluster
    if space == "global":
        w.report.bytes["st.global"] += nbytes * len(lanes)
        w.report.stored()
        cluster.activity += 1
        store_global(w, addresses, lanes, data, order)
    elif space.startswith("shared"):
        for cta, here, offsets in shared_target(w, addresses, space, nbytes):
            cta.shared.shadow.write(
                cells_of(offsets, nbytes), w.access(w.name), whole=nbytes >= 4 and not order.strong
            )
            cta.shared.scatter(offsets, data[here])
            w.report.shared(lanes[here], offsets, nbytes)
        w.report.bytes["st.shared"] += nbytes * len(lanes)
        w.report.stored()
        cluster.activity += 1
    elif space == "local":
        w.local.scatter(lanes, addresses.astype(np.int64), data)
    else:
        raise IllegalAccess(f"a store to {space} memory")


@opcode("ld", "ldu", section="9.7.9.8", meaning="Load from memory, vectors of up to 8 elements")
def bind_ld(binder: Binder, instruction: Instruction) -> Step:
    kind, count, space = types_of(instruction)[-1], vector_length(instruction), space_of(instruction)
    width = TYPE_BYTES[kind]
    target, source = instruction.operands[:2]
    elements = elements_of(target)
    if len(elements) != count:
        raise unsupported(instruction, f"{len(elements)} destinations")
    puts = [binder.put(e, kind, instruction) for e in elements]
    dtype = raw_dtype(kind)
    parameters = binder.parameters
    assert isinstance(source, Address)
    if isinstance(source.base, Symbol) and space.startswith("param"):
        return _load_constant(binder, instruction, source, puts, width, dtype)
    address = binder.address(source, instruction)
    nbytes = width * count
    order = order_of(instruction, width)

    def load(w: Warp) -> None:
        lanes = active(w)
        data = load_bytes(w, space, per_lane(w, address(w), lanes), lanes, nbytes, parameters, order)
        if len(lanes) < 32:
            whole = np.zeros((32, nbytes), np.uint8)
            whole[lanes] = data
            data = whole
        if width == 16:
            puts[0](w, np.ascontiguousarray(data).view(np.uint64).reshape(32, 2))
            return
        columns = np.ascontiguousarray(data).view(dtype)
        for i, put in enumerate(puts):
            put(w, columns[:, i])

    return load


def raw_dtype(kind: str) -> Any:
    if kind in ("s8", "s16", "s32", "s64"):
        return np.dtype(f"i{TYPE_BYTES[kind]}")
    if kind in ("f32", "f64", "f16"):
        return np.dtype(f"f{TYPE_BYTES[kind]}")
    return np.dtype(f"u{min(TYPE_BYTES[kind], 8)}")


def _load_constant(
    binder: Binder, instruction: Instruction, source: Address, puts: list[Any], width: int, dtype: Any
) -> Step:
    """A load of a parameter at a constant address, whose value is the same in the whole launch."""
    assert isinstance(source.base, Symbol)
    _, start = binder.symbols[source.base.name]
    offset = start - PARAM_WINDOW + source.base.offset + source.offset
    raw = binder.parameters[offset : offset + width * len(puts)]
    if len(raw) < width * len(puts):
        raise IllegalAccess(f"PTX line {instruction.line}: {instruction.text}: beyond the parameters")
    constants = list(raw.copy().view(dtype))
    if len(puts) == 1:
        put, constant = puts[0], constants[0]
        return lambda w: put(w, constant)

    def load(w: Warp) -> None:
        for put, constant in zip(puts, constants, strict=False):
            put(w, constant)

    return load


def value_bytes(w: Warp, gets: list[Any], dtype: Any, lanes: np.ndarray) -> np.ndarray:
    """Source registers as bytes (lanes, nbytes)."""
    columns = [per_lane(w, g(w), lanes).astype(dtype, copy=False) for g in gets]
    return np.stack(columns, axis=1).view(np.uint8)


@opcode("st", section="9.7.9.11", meaning="Store to memory, vectors of up to 8 elements")
def bind_st(binder: Binder, instruction: Instruction) -> Step:
    kind, count, space = types_of(instruction)[-1], vector_length(instruction), space_of(instruction)
    address = binder.address(instruction.operands[0], instruction)
    elements = elements_of(instruction.operands[1])
    if len(elements) != count:
        raise unsupported(instruction, f"{len(elements)} sources")
    gets = [binder.get(e, kind, instruction) for e in elements]
    order = order_of(instruction, TYPE_BYTES[kind])
    if kind == "b128":
        (wide,) = gets

        def store_wide(w: Warp) -> None:
            lanes = active(w)
            data = np.ascontiguousarray(wide(w)[lanes]).view(np.uint8).reshape(len(lanes), 16)
            store_bytes(w, space, per_lane(w, address(w), lanes), lanes, data, order)

        return store_wide
    dtype = raw_dtype(kind)

    def store(w: Warp) -> None:
        lanes = active(w)
        data = value_bytes(w, gets, dtype, lanes)
        store_bytes(w, space, per_lane(w, address(w), lanes), lanes, data, order)

    return store
