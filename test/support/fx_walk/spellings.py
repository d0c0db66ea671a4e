"""Every way in which a program can spell an epilogue operand, and the class that each has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_backend.spec import LoadKind

SCALAR, ROWVEC, COLVEC, EXACT = LoadKind.SCALAR, LoadKind.ROWVEC, LoadKind.COLVEC, LoadKind.EXACT


@dataclass(frozen=True)
class Spelling:
    """A spelling. `base(m, n)` is the shape of the program's dense argument, and `view` the view that the
    program takes of it."""

    kind: LoadKind
    base: Callable[[int, int], tuple[int, ...]]
    view: Callable[[Tensor, int, int], Tensor]

    def tensor(self, m: int, n: int) -> Tensor:
        """Small integers, different from place to place, so that sums are exact and a shifted read shows."""
        shape = self.base(m, n)
        count = torch.Size(shape).numel()
        return (torch.arange(count, dtype=torch.float32) % 61 - 30).reshape(shape).to(torch.bfloat16)

    def kind_at(self, m: int, n: int) -> LoadKind:
        """The class for these sizes: an operand does not vary along an axis of size 1."""
        along_m = self.kind in (COLVEC, EXACT) and m != 1
        along_n = self.kind in (ROWVEC, EXACT) and n != 1
        return {(False, False): SCALAR, (False, True): ROWVEC, (True, False): COLVEC, (True, True): EXACT}[
            along_m, along_n
        ]


def _same(tensor: Tensor, m: int, n: int) -> Tensor:
    return tensor


SPELLINGS: dict[str, Spelling] = {
    "vector": Spelling(ROWVEC, lambda m, n: (n,), _same),
    "one_row": Spelling(ROWVEC, lambda m, n: (1, n), _same),
    "permuted_one_row": Spelling(ROWVEC, lambda m, n: (n, 1), lambda t, m, n: t.t()),
    "strided_vector": Spelling(ROWVEC, lambda m, n: (2 * n,), lambda t, m, n: t[::2]),
    "expanded_vector": Spelling(ROWVEC, lambda m, n: (n,), lambda t, m, n: t.expand(m, n)),
    "one_column": Spelling(COLVEC, lambda m, n: (m, 1), _same),
    "indexed_column": Spelling(COLVEC, lambda m, n: (m,), lambda t, m, n: t[:, None]),
    "expanded_column": Spelling(COLVEC, lambda m, n: (m,), lambda t, m, n: t.unsqueeze(1).expand(m, n)),
    "column_of_a_matrix": Spelling(COLVEC, lambda m, n: (m, 7), lambda t, m, n: t[:, 3:4]),
    "zero_dim": Spelling(SCALAR, lambda m, n: (), _same),
    "one_element": Spelling(SCALAR, lambda m, n: (1,), _same),
    "one_by_one": Spelling(SCALAR, lambda m, n: (1, 1), _same),
    "expanded_one_by_one": Spelling(SCALAR, lambda m, n: (1, 1), lambda t, m, n: t.expand(m, n)),
    "dense": Spelling(EXACT, lambda m, n: (m, n), _same),
    "transposed": Spelling(EXACT, lambda m, n: (n, m), lambda t, m, n: t.t()),
    "slice_of_a_matrix": Spelling(EXACT, lambda m, n: (m, n + 5), lambda t, m, n: t[:, 2 : n + 2]),
}

SHAPES = {"rectangle": (24, 40), "square": (32, 32), "one_row": (1, 40), "one_column": (24, 1)}
