"""The architectures that tests compile for: `make test` takes one of each template, sweeps take all."""

from __future__ import annotations

import pytest

from cute_backend.planning import Arch

FIRST = tuple({arch.target.template: arch for arch in reversed(Arch)}.values())[::-1]
"""The first architecture of each template."""

COMPILED = [
    pytest.param(arch, id=arch.value, marks=() if arch in FIRST else pytest.mark.exhaustive) for arch in Arch
]
"""Every architecture, as cases of a test."""
