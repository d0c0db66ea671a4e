"""The canonical JSON form of a spec, which is the key of every cache."""

from __future__ import annotations

from enum import Enum
from typing import Any, Union

from cute_backend.dtypes import DType
from cute_backend.errors import SpecError
from cute_backend.kinds import reductions
from cute_backend.kinds.kind import Kind
from cute_backend.kinds.loads import LoadKind
from cute_backend.kinds.results import Cache, Heads
from cute_backend.spec.chain_ops import Const, Op, Operand, Overflow, Precision
from cute_backend.spec.loads import Blocks, Load, Order, Stride
from cute_backend.spec.products import Accumulator, Columns, Major, ProductKind, Scaling
from cute_backend.spec.stores import Part, Store
from cute_backend.spec.weight_groups import WeightGroups

SPEC_VERSION = 12
"""The version of the canonical form. A change of any field's name or meaning needs a new one."""

_IF_SET = ("after", "b_block", "cache", "groups", "heads", "period", "rows")
"""Fields that the form has only where they are not None, 0 or empty."""


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
    if hasattr(value, "__dataclass_fields__"):
        fields = {name: getattr(value, name) for name in value.__dataclass_fields__}
        left_out = [name for name in _IF_SET if not fields.get(name)]
        return {name: encode(each) for name, each in fields.items() if name not in left_out}
    return value


def decode(data: Any) -> dict[str, Any]:
    """The fields of the spec that `encode` turned into `data`.

    Raises SpecError if `data` has another version. If `data` is malformed, it raises SpecError or the error
    that Python raises where the data doesn't fit; `EpilogueSpec.from_json` makes SpecError of them all.
    """
    if data["version"] != SPEC_VERSION:
        raise SpecError(f"the spec has version {data['version']}; this package reads {SPEC_VERSION}")
    return {
        "accumulators": tuple(_decode_accumulator(item) for item in data["accumulators"]),
        "loads": tuple(_decode_load(item) for item in data["loads"]),
        "ops": tuple(_decode_op(item) for item in data["ops"]),
        "stores": tuple(_decode_store(item) for item in data["stores"]),
        "precision": Precision(data["precision"]),
    }


def _decode_operand(item: Any) -> Operand:
    if isinstance(item, str):
        return item
    ((kind, number),) = item.items()
    if kind == "float":
        return Const(float.fromhex(number))
    if type(number) is not {"bool": bool, "int": int}[kind]:
        raise SpecError(f"the constant {item} is not a {kind}")
    return Const(item[kind])


def _decode_accumulator(item: Any) -> Accumulator:
    return Accumulator(
        name=item["name"],
        a_dtype=DType(item["a_dtype"]),
        b_dtype=DType(item["b_dtype"]),
        a_major=Major(item["a_major"]),
        b_major=Major(item["b_major"]),
        fast_accum=bool(item["fast_accum"]),
        columns=Columns(item["columns"]),
        kind=ProductKind(item["kind"]),
        a_scaling=Scaling(item["a_scaling"]),
        b_scaling=Scaling(item["b_scaling"]),
        width=int(item["width"]),
        b_block=int(item.get("b_block", 0)),
        groups=_decode_groups(item["groups"]) if "groups" in item else None,
    )


def _decode_groups(item: Any) -> WeightGroups:
    zero, difference = (None if item[name] is None else DType(item[name]) for name in ("zero", "difference"))
    return WeightGroups(item["values"], DType(item["scale"]), DType(item["product"]), zero, difference)


def _decode_blocks(item: Any) -> Union[Blocks, None]:
    if item is None:
        return None
    outer, inner = Stride(item["outer"]), Stride(item["inner"])
    return Blocks(item["columns"], outer, inner, int(item.get("period", 0)))


def _decode_load(item: Any) -> Load:
    return Load(
        name=item["name"],
        kind=LoadKind(item["kind"]),
        dtype=DType(item["dtype"]),
        stride_m=Stride(item["stride_m"]),
        stride_n=Stride(item["stride_n"]),
        m_modes=tuple(Stride(mode) for mode in item["m_modes"]),
        blocks=_decode_blocks(item["blocks"]),
    )


def _decode_op(item: Any) -> Op:
    return Op(
        name=item["name"],
        op=item["op"],
        operands=tuple(_decode_operand(operand) for operand in item["operands"]),
        dtype=DType(item["dtype"]),
        overflow=Overflow(item["overflow"]),
        block=int(item["block"]),
    )


def _decode_reduction(item: Any) -> reductions.Reduction:
    return reductions.Reduction(
        reductions.Axis(item["axis"]), reductions.named(item["kind"]), int(item.get("rows", 0))
    )


def _decode_heads(item: Any) -> Heads:
    return Heads(item.get("rows", 0), item["columns"])


def _decode_cache(item: Any) -> Cache:
    return Cache(item["length"], item["rows"], item["columns"], item["at"])


def _decode_store(item: Any) -> Store:
    dtype, order, reduce = DType(item["dtype"]), Order(item["order"]), item["reduce"]
    return Store(
        name=item["name"],
        value=item["value"],
        dtype=dtype,
        order=order,
        reduce=None if reduce is None else _decode_reduction(reduce),
        block=int(item["block"]),
        part=None if item["part"] is None else Part(item["part"]["index"], item["part"]["count"]),
        heads=_decode_heads(item["heads"]) if "heads" in item else None,
        after=tuple(_decode_op(op) for op in item.get("after", ())),
        cache=_decode_cache(item["cache"]) if "cache" in item else None,
    )
