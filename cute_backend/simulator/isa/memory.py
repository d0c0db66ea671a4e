"""Loads, stores, atomics, address arithmetic and cp.async of single threads (PTX ISA 9.7.9, 9.7.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_backend.simulator.errors import IllegalAccess
from cute_backend.simulator.formats import decode, encode
from cute_backend.simulator.isa.common import TYPES, compute, scalar, types_of
from cute_backend.simulator.memory import (
    LOCAL_WINDOW,
    OFFSET_MASK,
    PARAM_WINDOW,
    RANK_SHIFT,
    SHARED_WINDOW,
    WINDOW_MASK,
)
from cute_backend.simulator.opcodes import Step, opcode, unsupported
from cute_backend.simulator.parser import (
    TYPE_BYTES,
    Address,
    Immediate,
    Instruction,
    Pair,
    Sink,
    Symbol,
    Vector,
)
from cute_backend.simulator.shadow import Access
from cute_backend.simulator.warp import LANE_IDS, Wait

if TYPE_CHECKING:
    from cute_backend.simulator.cta import Cta
    from cute_backend.simulator.program import Binder
    from cute_backend.simulator.warp import Warp

SPACES = ("param", "param::entry", "global", "shared", "shared::cta", "shared::cluster", "local", "const")
STRONG = ("volatile", "relaxed", "acquire", "release", "mmio")


def space_of(instruction: Instruction) -> str:
    """The state space, "generic" where none is named."""
    found = next((p for p in instruction.parts[1:] if p in SPACES), "generic")
    return "shared::cta" if found == "shared" else found


def vector_length(instruction: Instruction) -> int:
    return next((int(p[1:]) for p in instruction.parts[1:] if p in ("v2", "v4", "v8")), 1)


def active(w: Warp) -> np.ndarray:
    return LANE_IDS if w.full else np.flatnonzero(w.mask)


def per_lane(w: Warp, value: Any, lanes: np.ndarray) -> np.ndarray:
    """A getter's value for these lanes, as a vector also where it is one scalar for all."""
    array = np.asarray(value)
    return np.broadcast_to(array, len(lanes)) if array.ndim == 0 else array[lanes]


def aligned(addresses: np.ndarray, nbytes: int) -> None:
    """Raises unless each address is a multiple of the access's size (PTX ISA 6.4.1)."""
    bad = addresses % addresses.dtype.type(nbytes)
    if bad.any():
        worst = int(addresses[bad != 0][0])
        raise IllegalAccess(f"an access of {nbytes} bytes at {worst:#x}, which is not a multiple of {nbytes}")


def cells_of(offsets: np.ndarray, nbytes: int) -> np.ndarray:
    """Shadow cells of accesses to shared memory."""
    first = offsets >> 2
    return first if nbytes <= 4 else (first[:, None] + np.arange(nbytes // 4)).reshape(-1)


def shared_target(w: Warp, addresses: np.ndarray, space: str) -> list[tuple[Cta, np.ndarray, np.ndarray]]:
    """(CTA, lanes' positions, offsets) for shared addresses; only .shared::cluster may leave the own CTA."""
    ranks = (addresses >> np.uint64(RANK_SHIFT)).astype(np.int64)
    offsets = (addresses & np.uint64(OFFSET_MASK)).astype(np.int64)
    first = int(ranks[0])
    found = [first] if (ranks == first).all() else np.unique(ranks).tolist()
    targets = []
    for rank in found:
        if rank >= len(w.cta.cluster.ctas):
            raise IllegalAccess(
                f"shared address {rank << RANK_SHIFT:#x} and up: the cluster has {len(w.cta.cluster.ctas)} CTAs"
            )
        if rank != w.cta.rank and space == "shared::cta":
            raise IllegalAccess(f"a .shared::cta address in CTA rank {rank}, issued by rank {w.cta.rank}")
        here = np.arange(len(ranks)) if len(found) == 1 else np.flatnonzero(ranks == rank)
        targets.append((w.cta.cluster.ctas[rank], here, offsets[here]))
    return targets


def load_bytes(
    w: Warp,
    space: str,
    addresses: np.ndarray,
    lanes: np.ndarray,
    nbytes: int,
    parameters: np.ndarray,
    strong: bool,
) -> np.ndarray:
    """Bytes (lanes, nbytes) from any space."""
    aligned(addresses, nbytes)
    if space == "generic":
        space, addresses = _resolve(addresses)
        if space == "mixed":
            return np.concatenate(
                [
                    load_bytes(
                        w, "generic", addresses[i : i + 1], lanes[i : i + 1], nbytes, parameters, strong
                    )
                    for i in range(len(lanes))
                ]
            )
    if space in ("global", "const"):
        w.report.bytes["ld.global"] += nbytes * len(lanes)
        w.report.global_load()
        return w.cta.cluster.memory.gather(addresses, nbytes)
    if space.startswith("shared"):
        out = np.empty((len(lanes), nbytes), np.uint8)
        for cta, here, offsets in shared_target(w, addresses, space):
            cta.shared.check(int(offsets.min()), int(offsets.max()) + nbytes)
            if not strong:
                cta.shared.shadow.read(cells_of(offsets, nbytes), w.access(w.name))
            out[here] = cta.shared.data[offsets[:, None] + np.arange(nbytes)]
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
    w: Warp, space: str, addresses: np.ndarray, lanes: np.ndarray, data: np.ndarray, strong: bool
) -> None:
    """Writes bytes (lanes, nbytes) to any space."""
    nbytes = data.shape[1]
    aligned(addresses, nbytes)
    if space == "generic":
        space, addresses = _resolve(addresses)
        if space == "mixed":
            for i in range(len(lanes)):
                store_bytes(w, "generic", addresses[i : i + 1], lanes[i : i + 1], data[i : i + 1], strong)
            return
    cluster = w.cta.cluster
    if space == "global":
        w.report.bytes["st.global"] += nbytes * len(lanes)
        w.report.stored()
        cluster.activity += 1
        cluster.memory.scatter(addresses, data)
    elif space.startswith("shared"):
        for cta, here, offsets in shared_target(w, addresses, space):
            cta.shared.check(int(offsets.min()), int(offsets.max()) + nbytes)
            cta.shared.shadow.write(
                cells_of(offsets, nbytes), w.access(w.name), whole=nbytes >= 4 and not strong
            )
            cta.shared.data[offsets[:, None] + np.arange(nbytes)] = data[here]
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
    elements = target.elements if isinstance(target, Vector) else (target,)
    if len(elements) != count:
        raise unsupported(instruction, f"{len(elements)} destinations")
    puts = [binder.put(e, kind, instruction) for e in elements]
    dtype = _raw_dtype(kind)
    parameters = binder.parameters
    assert isinstance(source, Address)
    if isinstance(source.base, Symbol) and space.startswith("param"):
        return _load_constant(binder, instruction, source, puts, width, dtype)
    address = binder.address(source, instruction)
    nbytes = width * count
    strong = any(instruction.has(m) for m in STRONG)

    def load(w: Warp) -> None:
        lanes = active(w)
        data = load_bytes(w, space, per_lane(w, address(w), lanes), lanes, nbytes, parameters, strong)
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


def _raw_dtype(kind: str) -> Any:
    if kind in ("s8", "s16", "s32", "s64"):
        return np.dtype(f"i{TYPE_BYTES[kind]}")
    if kind in ("f32", "f64", "f16"):
        return np.dtype(f"f{TYPE_BYTES[kind]}")
    return np.dtype(f"u{min(TYPE_BYTES[kind], 8)}")


def _load_constant(
    binder: Binder, instruction: Instruction, source: Address, puts: list[Any], width: int, dtype: Any
) -> Step:
    """A parameter at a fixed place has the same value in the whole launch."""
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
        for put, constant in zip(puts, constants):
            put(w, constant)

    return load


def value_bytes(w: Warp, gets: list[Any], dtype: Any, lanes: np.ndarray) -> np.ndarray:
    """Source registers as bytes (lanes, nbytes)."""
    columns = [per_lane(w, g(w), lanes).astype(dtype, copy=False) for g in gets]
    return np.stack(columns, axis=1).view(np.uint8)


@opcode("st", section="9.7.9.11", meaning="Store to memory, vectors of up to 8 elements")
def bind_st(binder: Binder, instruction: Instruction) -> Step:
    if instruction.has("async"):
        return bind_st_async(binder, instruction)
    kind, count, space = types_of(instruction)[-1], vector_length(instruction), space_of(instruction)
    address = binder.address(instruction.operands[0], instruction)
    source = instruction.operands[1]
    elements = source.elements if isinstance(source, Vector) else (source,)
    if len(elements) != count:
        raise unsupported(instruction, f"{len(elements)} sources")
    gets = [binder.get(e, kind, instruction) for e in elements]
    strong = any(instruction.has(m) for m in STRONG)
    if kind == "b128":
        (wide,) = gets

        def store_wide(w: Warp) -> None:
            lanes = active(w)
            data = np.ascontiguousarray(wide(w)[lanes]).view(np.uint8).reshape(len(lanes), 16)
            store_bytes(w, space, per_lane(w, address(w), lanes), lanes, data, strong)

        return store_wide
    dtype = _raw_dtype(kind)

    def store(w: Warp) -> None:
        lanes = active(w)
        data = value_bytes(w, gets, dtype, lanes)
        store_bytes(w, space, per_lane(w, address(w), lanes), lanes, data, strong)

    return store


@opcode("st.async", section="9.7.9.12", meaning="Store to a CTA of the cluster, counted on an mbarrier")
def bind_st_async(binder: Binder, instruction: Instruction) -> Step:
    kind, count = types_of(instruction)[-1], vector_length(instruction)
    address = binder.address(instruction.operands[0], instruction)
    source = instruction.operands[1]
    gets = [
        binder.get(e, kind, instruction)
        for e in (source.elements if isinstance(source, Vector) else (source,))
    ]
    barrier_address = binder.address(instruction.operands[2], instruction)
    dtype, nbytes = _raw_dtype(kind), TYPE_BYTES[kind] * count
    text = instruction.text

    def store(w: Warp) -> None:
        lanes = active(w)
        data = value_bytes(w, gets, dtype, lanes)
        addresses = per_lane(w, address(w), lanes)
        barriers = per_lane(w, barrier_address(w), lanes)
        aligned(addresses, nbytes)
        for i in range(len(lanes)):
            land_later(w, int(addresses[i]), data[i], int(barriers[i]), text)

    return store


def land_later(w: Warp, address: int, data: np.ndarray, barrier_address: int, text: str) -> None:
    """Bytes that reach shared memory of the cluster later and are counted on an mbarrier there."""
    from cute_backend.simulator.shadow import IN_FLIGHT

    cluster = w.cta.cluster
    cta, offset = cluster.locate(address, w.cta)
    barrier = cluster.mbarrier_at(barrier_address, w.cta)
    cta.shared.check(offset, offset + len(data))
    cells = np.unique((offset + np.arange(len(data))) >> 2)
    cta.shared.shadow.write(cells, Access(barrier.agent, IN_FLIGHT, w.clock.copy(), "async", text))

    def finish() -> None:
        cta.shared.data[offset : offset + len(data)] = data
        cta.shared.shadow.epoch[cells] = barrier.next_epoch
        barrier.complete_tx(len(data))

    cta.pipes["TMA load"].issue(text, finish)


# --- atomics ------------------------------------------------------------------------------------------------

ATOMICS: dict[str, Callable[..., Any]] = {
    "add": lambda old, x: old + x,
    "min": lambda old, x: np.minimum(old, x),
    "max": lambda old, x: np.maximum(old, x),
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "exch": lambda old, x: x,
    "inc": lambda old, x: np.where(old >= x, old.dtype.type(0), old + old.dtype.type(1)),
    "dec": lambda old, x: np.where((old == 0) | (old > x), x, old - old.dtype.type(1)),
    "cas": lambda old, x, y: np.where(old == x, y, old),
}


def atomic_function(name: str, kind: str) -> Callable[..., Any]:
    """The update of one memory element: on raw bits for the 16-bit floats."""
    plain = ATOMICS[name]
    if kind not in ("bf16", "f16", "bf16x2", "f16x2") or name in ("exch", "cas"):
        if name in ("min", "max") and kind.startswith("f"):
            return np.fmin if name == "min" else np.fmax
        return plain
    element = kind.removesuffix("x2")

    def half(old: Any, x: Any) -> Any:
        if kind.endswith("x2"):
            old, x = (np.ascontiguousarray(v).view(np.uint16) for v in (old, x))
            a, b = decode(old, element), decode(x, element)
            return encode(plain(a, b), element).view(np.uint32)
        a, b = decode(old.view(np.uint16), element), decode(x.view(np.uint16), element)
        return encode(plain(a, b), element).view(old.dtype)

    return half


@opcode("atom", "red", section="9.7.13.8, 9.7.13.9", meaning="Atomic update, with and without its old value")
def bind_atomic(binder: Binder, instruction: Instruction) -> Step:
    name = next((p for p in instruction.parts[1:] if p in ATOMICS), None)
    if name is None or instruction.has("async"):
        raise unsupported(instruction, "this form")
    kind, count, space = types_of(instruction)[-1], vector_length(instruction), space_of(instruction)
    function = atomic_function(name, kind)
    returns = instruction.parts[0] == "atom"
    operands = list(instruction.operands)
    target = operands.pop(0) if returns else Sink()
    address = binder.address(operands.pop(0), instruction)
    targets = target.elements if isinstance(target, Vector) else (target,) * count
    puts = [binder.put(t, kind, instruction) for t in targets]
    sources = [o.elements if isinstance(o, Vector) else (o,) for o in operands[: 2 if name == "cas" else 1]]
    gets = [[binder.get(e, kind, instruction) for e in group] for group in sources]
    dtype = _raw_dtype(kind)
    nbytes = dtype.itemsize * count
    acquires = any(instruction.has(m) for m in ("acq_rel", "acquire", "release"))
    parameters = binder.parameters

    def update(w: Warp) -> None:
        lanes = active(w)
        addresses = per_lane(w, address(w), lanes)
        values = [
            np.stack([per_lane(w, g(w), lanes).astype(dtype, copy=False) for g in group], axis=1)
            for group in gets
        ]
        old = np.zeros((32, count), dtype)
        distinct = len(np.unique(addresses)) == len(lanes)
        batches = [np.arange(len(lanes))] if distinct else [np.array([i]) for i in range(len(lanes))]
        loads = w.report.loads_since_wait
        for batch in batches:
            raw = load_bytes(w, space, addresses[batch], lanes[batch], nbytes, parameters, True)
            before = np.ascontiguousarray(raw).view(dtype)
            after = np.asarray(function(before, *(v[batch] for v in values))).astype(dtype, copy=False)
            store_bytes(
                w, space, addresses[batch], lanes[batch], np.ascontiguousarray(after).view(np.uint8), True
            )
            old[lanes[batch]] = before
        if w.report.loads_since_wait is not None:
            w.report.loads_since_wait = loads
        for i, put in enumerate(puts):
            put(w, old[:, i])
        if acquires:
            w.release()

    return update


# --- addresses ----------------------------------------------------------------------------------------------


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


# --- cp.async -----------------------------------------------------------------------------------------------


class CopyGroups:
    """A warp's cp.async operations: those not yet in a group, and the groups, oldest first."""

    def __init__(self, w: Warp) -> None:
        self.agent = w.cta.cluster.agents.new(f"cp.async of {w.name}", generic=True)
        self.epoch = 1
        self.finished = 0
        self.pending = 0
        self.groups: list[list[int]] = []
        self.pipe = w.new_pipe("cp.async")


def copies_of(w: Warp) -> CopyGroups:
    found = w.pipes.get("cp.async")
    if found is None:
        found = w.pipes["cp.async"] = CopyGroups(w)
    return found


@opcode(
    "cp.async", section="9.7.9.25.3", meaning="Copy of 4 to 16 bytes per thread from global to shared memory"
)
def bind_cp_async(binder: Binder, instruction: Instruction) -> Step:
    if not (instruction.has("ca") or instruction.has("cg")):
        raise unsupported(instruction, "this form")
    target, source = (binder.address(o, instruction) for o in instruction.operands[:2])
    size_operand = instruction.operands[2]
    assert isinstance(size_operand, Immediate)
    nbytes = int(size_operand.value)
    rest = [o for o in instruction.operands[3:]]
    if instruction.has("L2::cache_hint"):
        rest = rest[:-1]
    source_size = binder.get(rest[0], "u32", instruction) if rest else None
    text = instruction.text

    def copy(w: Warp) -> None:
        copies, lanes = copies_of(w), active(w)
        data = np.zeros((len(lanes), nbytes), np.uint8)
        sizes = np.full(len(lanes), nbytes) if source_size is None else per_lane(w, source_size(w), lanes)
        sources = per_lane(w, source(w), lanes)
        for size in np.unique(sizes):
            if size:
                here = np.flatnonzero(sizes == size)
                data[here, :size] = w.cta.cluster.memory.gather(sources[here], int(size))
        addresses = per_lane(w, target(w), lanes)
        aligned(addresses, nbytes)
        epoch = copies.epoch
        ((cta, _, offsets),) = shared_target(w, addresses, "shared::cta")
        cta.shared.check(int(offsets.min()), int(offsets.max()) + nbytes)
        cells = cells_of(offsets, nbytes)
        cta.shared.shadow.write(cells, Access(copies.agent, epoch, w.clock.copy(), "generic", text))
        copies.pending += 1
        w.report.bytes["cp.async"] += data.size

        def finish() -> None:
            cta.shared.data[offsets[:, None] + np.arange(nbytes)] = data
            copies.finished += 1

        copies.pipe.issue(text, finish)

    return copy


@opcode("cp.async.commit_group", section="9.7.9.25.3.2", meaning="Closes a group of cp.async")
def bind_cp_async_commit(binder: Binder, instruction: Instruction) -> Step:
    def commit(w: Warp) -> None:
        copies = copies_of(w)
        copies.groups.append([copies.epoch, copies.pending])
        copies.epoch += 1

    return commit


@opcode(
    "cp.async.wait_group", "cp.async.wait_all", section="9.7.9.25.3.3", meaning="Waits for cp.async groups"
)
def bind_cp_async_wait(binder: Binder, instruction: Instruction) -> Step:
    every = instruction.has("wait_all")
    left = 0 if every else int(instruction.operands[0].value)  # type: ignore[union-attr]

    def wait(w: Warp) -> Wait | None:
        copies = copies_of(w)
        if every and copies.pending:
            copies.groups.append([copies.epoch, copies.pending])
            copies.epoch += 1
        wanted = len(copies.groups) - left
        if wanted <= 0:
            return None
        epoch, count = copies.groups[wanted - 1]
        if copies.finished < count:
            return Wait(lambda: copies.finished >= count, lambda: f"{len(copies.groups)} cp.async groups")
        w.clock.seen[copies.agent] = epoch
        return None

    return wait


@opcode(
    "cp.async.mbarrier.arrive", section="9.7.13.15.17", meaning="Arrival once the thread's cp.async are done"
)
def bind_cp_async_arrive(binder: Binder, instruction: Instruction) -> Step:
    address = binder.address(instruction.operands[0], instruction)
    no_increment = instruction.has("noinc")
    text = instruction.text

    def arrive(w: Warp) -> None:
        copies, lanes = copies_of(w), active(w)
        epoch = copies.epoch
        copies.epoch += 1
        barriers = [w.cta.mbarrier(int(a) & OFFSET_MASK) for a in per_lane(w, address(w), lanes)]
        if not no_increment:
            for barrier in barriers:
                barrier.pending += 1
        clock = w.release()

        def finish() -> None:
            clock.seen[copies.agent] = epoch
            for barrier in barriers:
                barrier.arrive(1, clock)

        copies.pipe.issue(text, finish)

    return arrive


__all__ = [
    "TYPES",
    "Pair",
    "active",
    "aligned",
    "cells_of",
    "load_bytes",
    "per_lane",
    "scalar",
    "store_bytes",
]
