"""The constraints under which a user lets the plan of a region be chosen.

The op carries them as text, in one argument, and a pack lists them with each of its problems.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache

from cute_backend.planning.tiles import Rowvecs


@dataclass(frozen=True)
class Constraints:
    """The constraints on the kernels of a region. Without any, tuning and the cost model choose alone."""

    batch_invariant: bool = False
    """Whether one configuration serves every M, so that the bits of a row do not depend on M."""
    tile: str | None = None
    """Names of tiles, as in `config.tile`: the first that can serve the spec serves every M."""
    rowvecs: Rowvecs = Rowvecs.AUTO
    """Where rowvecs are kept."""

    @classmethod
    def from_config(cls) -> Constraints:
        """The constraints that the user's settings ask for now."""
        from cute_backend import config  # here, since it imports torch, without which planning works

        return _of_settings(config.batch_invariant, config.tile, config.rowvec_placement)

    @cached_property
    def text(self) -> str:
        """The canonical form: JSON of all fields that differ from their defaults, or "" if none does."""
        given = {name: value for name, value in asdict(self).items() if value != getattr(Constraints, name)}
        return json.dumps(given) if given else ""

    @classmethod
    def parse(cls, text: str) -> Constraints:
        """The constraints behind a canonical form. Raises ValueError for any other text."""
        try:
            given = json.loads(text) if text else {}
            found = cls(**{**given, "rowvecs": Rowvecs(given.get("rowvecs", Rowvecs.AUTO))})
            are_typed = type(found.batch_invariant) is bool and isinstance(found.tile, str | None)
            if are_typed and found.text == text:
                return found
        except (AttributeError, RecursionError, TypeError, ValueError):
            pass
        raise ValueError(
            f"constraints are {text!r:.80}; they are '' or the text of a cute_backend.planning.Constraints, "
            f"such as {cls(batch_invariant=True, rowvecs=Rowvecs.SMEM_STAGED).text!r}"
        )


@lru_cache(maxsize=64)
def _of_settings(batch_invariant: bool, tile: str | None, rowvec_placement: str) -> Constraints:
    """Cached, since `gemm` asks for the text at every call: making both anew takes some 3 us."""
    return Constraints(batch_invariant, tile, Rowvecs(rowvec_placement))


UNCONSTRAINED = Constraints()
