"""Launches on a described GPU."""

from __future__ import annotations

import pytest

from cute_backend.runtime.arguments.device import Device
from cute_backend.runtime.calls import launch, prepare, spec_kernels


def on(gpu: Device, patch: pytest.MonkeyPatch) -> None:
    """Lets launches begin anew, as if `gpu` were the current GPU, with a cluster on each of its places."""
    patch.setattr(launch, "_launchers", {})
    for module in (prepare, spec_kernels):
        patch.setattr(module, "device_at", lambda index: gpu)
    patch.setattr(spec_kernels, "max_active_clusters", lambda index, size: gpu.sm_count // size)
