"""Plants faults in kernels while they are traced: a call is left out, made otherwise, or made earlier.

A place names what is called, by the words of a kernel rather than by a template's text:

    ab.consumer_wait     a method of the pipeline of a ring, by the ring's name; `store` is that of TMA stores
    ab.full.wait         a method of the barriers that say that stages of a ring are full, or `empty`
    arch.sync_warp       a function or a method of a module or a class of `_OTHERS`, most of them the DSL's
    tails.Tails.clear    a function, a method, a property or a constant of a module of the templates

All calls of a place are wrong, or those `inside` another place or `outside` some, those `before` the first
call of another place, the first one `after` each call of another place, those `when` a condition holds, or
the call number `call` of those that are left. A fault that no call of the trace fits is an error
(`NeverReached`), so that none is lost when a kernel changes.

When the DSL traces, it calls what it finds in modules and classes, so that is where `planted` replaces it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from types import ModuleType
from typing import Any
from unittest.mock import patch

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import cpasync, tcgen05, warpgroup
from cutlass.cute.tensor import _Tensor
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.pipeline.helpers import MbarrierArray

import cute_backend.templates
from cute_backend.memory_ops import device_reduce, device_scales
from cute_backend.planning.mma_scales import MmaScales

_OTHERS = {
    "arch": cute.arch,
    "cpasync": cpasync,
    "cute": cute,
    "cutlass": cutlass,
    "device_reduce": device_reduce,
    "device_scales": device_scales,
    "MmaScales": MmaScales,
    "NamedBarrier": pipeline.NamedBarrier,
    "nvvm": nvvm,
    "pipeline": pipeline,
    "PipelineState": pipeline.PipelineState,
    "SmemAllocator": SmemAllocator,
    "tcgen05": tcgen05,
    "Tensor": _Tensor,
    "TmemAllocator": TmemAllocator,
    "warp": cute.nvgpu.warp,
    "warpgroup": warpgroup,
}
_RINGS = ("ab", "acc", "exact", "row", "scales", "store")


class NeverReached(AssertionError):
    """No call of a kernel's trace fits a planted fault."""


class Call:
    """A call that a kernel makes: its arguments are attributes. Calling it makes the call, with the arguments
    that are given in place of its own."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._function = function
        self._bound = _signature(function).bind(*args, **kwargs)
        given = dict(self._bound.arguments)
        self._bound.apply_defaults()
        vars(self).update(kwargs | self._bound.arguments)
        self._bound.arguments = given

    def __call__(call, /, **changes: Any) -> Any:
        given, named = call._bound.arguments, call._bound.signature.parameters
        others = {name: value for name, value in changes.items() if name not in named}
        if others:
            changes = {name: value for name, value in changes.items() if name in named}
            changes["kwargs"] = given.get("kwargs", {}) | others
        call._bound.arguments = given | changes
        return call._function(*call._bound.args, **call._bound.kwargs)


_signature = cache(inspect.signature)

Effect = Callable[[Call], Any]


@dataclass(frozen=True)
class Wrong:
    """The calls of a place that a fault replaces, as the module's docstring describes them, by `effect`."""

    at: str
    effect: Effect
    inside: str = ""
    outside: tuple[str, ...] = ()
    before: str = ""
    after: str = ""
    when: Callable[[Call], bool] | None = None
    call: int = 0

    def __str__(self) -> str:
        where = ("inside", "outside", "before", "after", "when", "call")
        said = [f"{name} {value}" for name in where if (value := getattr(self, name))]
        return ", ".join([self.at, *said])


def without(at: str, **where: Any) -> tuple[Wrong, ...]:
    """Calls that are left out."""
    return (Wrong(at, lambda call: None, **where),)


def instead(at: str, effect: Effect, **where: Any) -> tuple[Wrong, ...]:
    """Calls that `effect` replaces."""
    return (Wrong(at, effect, **where),)


def early(release: str, wait: str, **where: Any) -> tuple[Wrong, ...]:
    """Releases of a stage that are moved to the line after the wait for it."""
    method = release.rpartition(".")[2]

    def waits(call: Call) -> Any:
        result = call()
        with as_written():
            getattr(call.self, method)(call.state)
        return result

    return (*without(release), Wrong(wait, waits, **where))


def late(at: str, behind: str, **where: Any) -> tuple[Wrong, ...]:
    """Calls that are made only after the next call of another place."""
    waiting: list[Call] = []

    def then(call: Call) -> Any:
        result = call()
        while waiting:
            waiting.pop(0)()
        return result

    return (Wrong(at, waiting.append, **where), Wrong(behind, then))


def threads(count: int) -> pipeline.CooperativeGroup:
    """A group of threads, which arrives at a barrier as often."""
    return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)


def check(wrongs: tuple[Wrong, ...]) -> None:
    """Raises AttributeError or ImportError if a place of a fault does not exist."""
    for wrong in wrongs:
        for place in (wrong.at, wrong.inside, *wrong.outside, wrong.before, wrong.after):
            if place:
                _replaced(place, lambda call: call()).close()


def part_of(place: str) -> str:
    """The part of a kernel that a place belongs to: its rings, a module of the templates, or neither."""
    first = place.partition(".")[0]
    return "a ring" if first in _RINGS else "other" if first in _OTHERS else first


def changed(value: Any, **changes: Any) -> Any:
    """A copy of an object, with attributes of other values."""
    other = copy(value)
    vars(other).update(changes)
    return other


@dataclass
class _Trace:
    """The state of a trace: the rings that it has made, and the watched calls."""

    rings: dict[int, tuple[str, Any]] = field(default_factory=dict)
    """For each group of threads by its id: the ring's name and whether the group fills or empties its stages,
    and the group itself, so that its id stays its own."""
    open: list[str] = field(default_factory=list)
    """The watched places whose calls have not returned."""
    ended: set[str] = field(default_factory=set)
    """The watched places that were called."""
    effects: bool = True


_trace = _Trace()


@contextmanager
def as_written() -> Iterator[None]:
    """Calls that are made in this context are none of a kernel's, so that no fault replaces them."""
    with patch.object(_trace, "effects", False):
        yield


@contextmanager
def planted(wrongs: tuple[Wrong, ...]) -> Iterator[None]:
    """A context in which kernels are traced with a fault. Raises NeverReached at its end."""
    counts = [_Count(wrong) for wrong in wrongs]
    watched = {place for wrong in wrongs for place in (wrong.inside, wrong.before, *wrong.outside) if place}
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(_trace, **vars(_Trace())))
        stack.enter_context(_replaced("rings.stages_of", _named))
        for place in sorted(watched | {wrong.after for wrong in wrongs if wrong.after}):
            stack.enter_context(_replaced(place, partial(_watched, place, counts)))
        for count in counts:
            stack.enter_context(_replaced(count.wrong.at, count.replace))
        yield
    if lost := [str(count.wrong) for count in counts if not count.reached]:
        raise NeverReached(f"nothing that the kernel calls fits: {'; '.join(lost)}")


class _Count:
    """A fault, and the calls that fit it so far."""

    def __init__(self, wrong: Wrong) -> None:
        self.wrong, self.fit, self.reached, self.is_next = wrong, 0, False, not wrong.after

    def replace(self, call: Call) -> Any:
        if not (_trace.effects and self._fits(call)):
            return call()
        self.reached = True
        return self.wrong.effect(call)

    def _fits(self, call: Call) -> bool:
        wrong = self.wrong
        if wrong.inside and wrong.inside not in _trace.open:
            return False
        if any(place in _trace.open for place in wrong.outside) or wrong.before in _trace.ended:
            return False
        if not self.is_next or (wrong.when and not wrong.when(call)):
            return False
        self.is_next = not wrong.after
        self.fit += 1
        return wrong.call in (0, self.fit)


def _watched(place: str, counts: list[_Count], call: Call) -> Any:
    _trace.open.append(place)
    try:
        return call()
    finally:
        _trace.open.pop()
        _trace.ended.add(place)
        for count in counts:
            count.is_next |= count.wrong.after == place


def _named(call: Call) -> dict[str, Any]:
    """Remembers the ring whose stages a pipeline is about to be made of."""
    made = call()
    for name, side in (("producer_group", "full"), ("consumer_group", "empty")):
        _trace.rings[id(made[name])] = f"{call.ring.name}.{side}", made[name]
    return made


def _replaced(place: str, effect: Effect) -> ExitStack:
    """A context in which `effect` replaces the calls of a place. Raises AttributeError if there is no such
    place."""
    ring, _, method = place.partition(".")
    if ring not in _RINGS:
        return _in(*_owner(place), lambda *_, **__: True, effect)
    side, _, of_side = method.partition(".")
    if side in ("full", "empty"):
        return _in(MbarrierArray, of_side, partial(_is_side, f"{ring}.{side}"), effect)
    stack = ExitStack()
    classes = {each for each in vars(pipeline).values() if inspect.isclass(each)}
    rings = [each for each in classes if issubclass(each, pipeline.PipelineAsync)]
    stores = (pipeline.PipelineTmaStore,)
    owners = [each for each in (stores if ring == "store" else rings) if method in vars(each)]
    if not owners:
        raise AttributeError(f"{place}: no pipeline has a method {method}")
    for owner in owners:
        stack.enter_context(_in(owner, method, partial(_is_ring, ring), effect))
    return stack


def _owner(place: str) -> tuple[Any, str]:
    """The module or class that a place is in, and its name there."""
    first, *path = place.split(".")
    owner = _OTHERS.get(first) or importlib.import_module(f"{cute_backend.templates.__name__}.{first}")
    for name in path[:-1]:
        owner = getattr(owner, name)
    return owner, path[-1]


def _side_of(group: Any) -> str:
    """A ring's name, and "full" or "empty", of a group of threads that arrives at its barriers."""
    return _trace.rings.get(id(group), ("", None))[0]


def _is_ring(ring: str, *args: Any, **kwargs: Any) -> bool:
    """Whether a method is one of the pipeline of a ring, or makes it."""
    if ring == "store":
        return True
    group = getattr(args[0].sync_object_full, "cg", None) if args else kwargs.get("producer_group")
    return _side_of(group) == f"{ring}.full"


def _is_side(side: str, barriers: MbarrierArray, *args: Any, **kwargs: Any) -> bool:
    """Whether a method is one of the barriers of full stages of a ring, or of empty ones."""
    return _side_of(barriers.cg) == side


def _in(owner: Any, name: str, is_meant: Callable[..., bool], effect: Effect) -> ExitStack:
    """A context in which `effect` replaces those calls of an attribute that are meant."""
    found = inspect.getattr_static(owner, name)
    stack = ExitStack()
    if isinstance(found, (staticmethod, property)) or callable(found):
        function = found.fget if isinstance(found, property) else getattr(found, "__func__", found)

        @wraps(function)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if not is_meant(*args, **kwargs):
                return function(*args, **kwargs)
            return effect(Call(function, args, kwargs))

        new: Any = replaced
        if isinstance(found, (staticmethod, property)):
            new = type(found)(replaced)
    else:
        # A constant: what reads it counts as a call.
        new = property(lambda self: effect(Call(lambda self: found, (self,), {})))
    stack.enter_context(patch.object(owner, name, new))
    if isinstance(owner, ModuleType):
        for module in list(sys.modules.values()):
            if module is not owner and module.__name__.startswith(cute_backend.templates.__name__):
                for alias in [alias for alias, value in vars(module).items() if value is found]:
                    stack.enter_context(patch.object(module, alias, new))
    return stack
