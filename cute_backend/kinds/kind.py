"""The base of all kinds."""

from __future__ import annotations


class Kind:
    """An object that has all that a kind means. The JSON form of a spec has its name alone."""

    name: str

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Kind) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)
