"""The kinds of operands that an epilogue loads: scalars, vectors and planes.

A kind says along which axes of the plane (M, N) elements vary. To add one, add a member; a kernel also needs
a placement of it (`planning/placements`).
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class LoadKind(str, Enum):
    """How an operand varies over the (M, N) plane: by which axes, or by groups of rows.

    The JSON form of a spec, `explain` and names of loads have its value.
    """

    by_group: bool
    """Whether it has a vector, or a number, for each group of rows of a grouped product."""
    by_row: bool
    by_column: bool
    flat: tuple[str, ...]
    """How random programs spell it over a plane (M, N): the shapes of dense tensors, and views of them. More
    frequent spellings stand there twice."""
    deep: tuple[str, ...]
    """The same over a plane (B, S, N)."""

    def __new__(cls, name: str, axes: str = "", *spelled: str) -> LoadKind:
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.by_group, kind.by_row, kind.by_column = ("g" in axes), ("m" in axes), ("n" in axes)
        kind.flat, kind.deep = (tuple(each.split(" | ")) for each in spelled) if spelled else ((), ())
        return kind

    ROWVEC = (
        *("rowvec", "n"),
        "(N) | (1, N) | (N, 1).t() | (2 * N)[::2] | (N + 3)[3:] | (N).expand(M, N)",
        "(N) | (1, 1, N) | (N).expand(B, S, N)",
    )
    COLVEC = (
        *("colvec", "m"),
        "(M, 1) | (M)[:, None] | (M).unsqueeze(1).expand(M, N) | (M, 7)[:, 3:4] | (1, M).t()",
        "(B, S, 1) | (B, S)[..., None] | (B * S, 1).view(B, S, 1) | (S, B, 1).transpose(0, 1) | (S, 1)"
        " | (B, 1, 1)",
    )
    SCALAR = (
        *("scalar", ""),
        "() | (1) | (1, 1) | (1, 1).expand(M, N)",
        "() | (1, 1, 1).expand(B, S, N)",
    )
    EXACT = (
        *("exact", "mn"),
        "(M, N) | (M, N) | (N, M).t() | (M, N + 5)[:, 2 : N + 2] | (M, 2 * N)[:, ::2] | (2 * M, N)[::2]"
        " | (M + N).as_strided((M, N), (1, 1))",
        "(B, S, N) | (B, S, N) | (B * S, N).view(B, S, N) | (S, B, N).transpose(0, 1)"
        " | (B, N, S).transpose(1, 2) | (B, S, 2 * N)[..., 1::2] | (B, 2 * S, N)[:, ::2] | (B, 1, N)"
        " | (S, N)",
    )
    GROUPVEC = "groupvec", "gn"
    """A rowvec for each group of a grouped product, as the biases of experts are."""

    @staticmethod
    def of(by_row: bool, by_column: bool) -> LoadKind:
        """The kind of an operand that varies along these axes, and not by groups."""
        kinds = (kind for kind in LoadKind if not kind.by_group)
        return next(kind for kind in kinds if (kind.by_row, kind.by_column) == (by_row, by_column))

    @property
    def is_plane(self) -> bool:
        """Whether each element of the plane has one of its own."""
        return self.by_row and self.by_column

    @property
    def is_uniform(self) -> bool:
        """Whether it is one number."""
        return not (self.by_group or self.by_row or self.by_column)

    @property
    def is_staged(self) -> bool:
        """Whether it has columns and no rows, so that a warp may stage those of a tile."""
        return self.by_column and not self.by_row

    def allows(self, varies_m: bool, varies_n: bool) -> bool:
        """Whether its strides along M and N may be such that elements vary or don't. A vector for each group
        may be a number for each."""
        over_n = varies_n is self.by_column or (self.by_group and not varies_n)
        return varies_m is (self.by_row or self.by_group) and over_n

    def over_plane(self, tensor: Tensor) -> Tensor:
        """A tensor without groups in a shape that broadcasts over (M, N)."""
        if self.is_plane or self.by_group:
            return tensor
        return tensor.reshape(-1 if self.by_row else 1, -1 if self.by_column else 1)
