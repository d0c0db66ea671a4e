"""B300: the tensor-core instructions and the tensor memory of a B200, under a capability of its own."""

from __future__ import annotations

from dataclasses import replace

from cute_backend.planning.targets import sm100a

TARGET = replace(
    sm100a.TARGET, name="sm_103a", family="Blackwell Ultra", capability=(10, 3), gpu="B300", sm_count=148
)
