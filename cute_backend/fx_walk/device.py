"""Which devices a region may run on."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cute_backend.fx_walk.reasons import Reason, Refused

Capability = Callable[[torch.device], tuple[int, int]]
"""The compute capability of a CUDA device."""

CAPABILITIES = ((9, 0), (10, 0))


def device_capability(device: torch.device) -> tuple[int, int]:
    """Of a real device; of a fake one, where this torch sees no GPU, the first that kernels exist for."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else CAPABILITIES[0]


def check_device(device: torch.device, capability: Capability) -> None:
    """Refuse a device that no kernel exists for. CPU graphs are replayed."""
    if device.type == "cpu":
        return
    if device.type != "cuda" or torch.version.hip is not None:
        raise Refused(Reason.DEVICE, device=device if torch.version.hip is None else f"{device} (ROCm)")
    found = capability(device)
    if found not in CAPABILITIES:
        raise Refused(Reason.CAPABILITY, device=device, capability=".".join(map(str, found)))
