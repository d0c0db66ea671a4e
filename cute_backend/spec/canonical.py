"""The canonical JSON form of a spec, which is the key of every cache."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from cute_backend.errors import SpecError
from cute_backend.kinds import reductions
from cute_backend.kinds.axes import Order
from cute_backend.kinds.forms import FORMS
from cute_backend.kinds.kind import LEFT_OUT, Kind
from cute_backend.kinds.results import Form, ordered
from cute_backend.spec.chain_ops import Const, Op, Precision
from cute_backend.spec.loads import Load
from cute_backend.spec.products import Accumulator
from cute_backend.spec.stores import Store

SPEC_VERSION = 12
"""The version of the canonical form. A change of any field's name or meaning needs a new one."""

_PLAIN = {"order": Order.ROW.value, "block": 0, "reduce": None, "part": None}
"""Fields of a store that its JSON has whatever the form of the result."""


def encode(value: Any) -> Any:
    """Converts a spec, or a part of it, to values that JSON can hold; floats are exact."""
    if isinstance(value, Const):
        number = value.value
        if isinstance(number, bool):
            return {"bool": number}
        return {"int": number} if isinstance(number, int) else {"float": number.hex()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Kind):
        return value.name
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if is_dataclass(value):
        found = ((field, getattr(value, field.name)) for field in fields(value))
        given = {field.name: encode(each) for field, each in found if each or field.metadata != LEFT_OUT}
        return _encoded_store(value.form, given) if isinstance(value, Store) else given
    return value


def _encoded_store(form: Form, given: dict[str, Any]) -> dict[str, Any]:
    own = given.pop("form")
    return {**_PLAIN, **({form.field: own} if form.field else own), **given}


def decode(data: Any) -> dict[str, Any]:
    """The fields of the spec that `encode` turned into `data`.

    Raises SpecError if `data` has another version. If `data` is malformed, it raises SpecError or the error
    that Python raises where the data doesn't fit; `EpilogueSpec.from_json` makes SpecError of them all.
    """
    if data["version"] != SPEC_VERSION:
        raise SpecError(f"the spec has version {data['version']}; this package reads {SPEC_VERSION}")
    parts = {"accumulators": Accumulator, "loads": Load, "ops": Op, "stores": Store}
    found = {name: tuple(_decoded(part, item) for item in data[name]) for name, part in parts.items()}
    return {**found, "precision": Precision(data["precision"])}


@cache
def _hints(part: type) -> dict[str, Any]:
    return get_type_hints(part)


def _decoded(hint: Any, item: Any) -> Any:
    """A value with the type `hint`: a part of a spec, a kind, a member of an enumeration, a plain value, a
    tuple of such values, or one of several types."""
    of = get_args(hint)
    if get_origin(hint) is tuple:
        return tuple(_decoded(of[0], each) for each in item)
    if get_origin(hint) in (Union, UnionType):
        if type(item) in of:
            return item
        (hint,) = (each for each in of if each not in (str, type(None)))
    if hint is Const:
        return _decoded_constant(item)
    if hint is Form:
        return item
    if hint is Store:
        item = {**item, "form": _decoded_form(item)}
    if isinstance(hint, type) and is_dataclass(hint) and not issubclass(hint, Kind):
        absent = {each.name: each.default for each in fields(hint) if each.metadata == LEFT_OUT}
        given = {name: 0 for name, default in absent.items() if default is MISSING} | item
        names = [each.name for each in fields(hint) if each.name in given or each.name not in absent]
        return hint(**{name: _decoded(_hints(hint)[name], given[name]) for name in names})
    return reductions.named(item) if hint is reductions.ReductionKind else hint(item)


def _decoded_form(store: Any) -> Form:
    """The form of a store's result. Raises SpecError if its fields belong to several forms."""
    named = [name for name in FORMS if store.get(name)]
    plain = ordered(Order(store["order"]), store["block"])
    if len(named) + (plain != ordered(Order.ROW)) > 1:
        raise SpecError(
            f"{store['name']} is stored as {' and '.join(named)}, or by blocks or columns; it has one form"
        )
    return _decoded(FORMS[named[0]], store[named[0]]) if named else plain


def _decoded_constant(item: Any) -> Const:
    ((kind, number),) = item.items()
    if kind == "float":
        return Const(float.fromhex(number))
    if type(number) is not {"bool": bool, "int": int}[kind]:
        raise SpecError(f"the constant {item} is not a {kind}")
    return Const(item[kind])
