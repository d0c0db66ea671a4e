"""The base of all kinds, and fields that JSON leaves out."""

from __future__ import annotations

LEFT_OUT = {"left_out": True}
"""The metadata of a dataclass's field that JSON has only if it is not None, 0 or empty, which is its default.
Without a default it is 0."""


class Kind:
    """An object that has all that a kind means. The JSON form of a spec has its name alone."""

    name: str

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Kind) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)
