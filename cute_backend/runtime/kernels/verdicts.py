"""The verdicts of the compiler on the kernels of shared epilogues, which need no compilation to be known.

`verdicts.json` is written by `make verdicts` and holds for one version of the compiler. By it, `explain` and
the samples in the docs name the tile that runs.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cute_backend.planning import Plan
from cute_backend.runtime.kernels.kernel import version_of

VERDICTS = Path(__file__).with_name("verdicts.json")


@dataclass(frozen=True)
class Verdict:
    """The resources of a compiled kernel, as `Built` has them."""

    registers: int
    spill_bytes: int
    smem_bytes: int


def key_of(plan: Plan) -> str:
    """The digest of a plan's canonical form, under which the table has its verdict."""
    canonical = json.dumps(plan.to_dict(), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def compiler() -> str:
    """The compiler that a verdict is of."""
    return f"nvidia-cutlass-dsl {version_of('nvidia-cutlass-dsl')}"


def shipped_verdict(plan: Plan) -> Verdict | None:
    """The verdict on a plan's kernel; None if the table has none, or is of another compiler."""
    table = _table()
    found = table["verdicts"].get(key_of(plan)) if table["compiler"] == compiler() else None
    return found and Verdict(found["registers"], found["spill_bytes"], found["smem_bytes"])


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(VERDICTS.read_text())
    return table
