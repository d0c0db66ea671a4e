"""Facts about a GPU that a launch needs: its architecture, its SMs, how many clusters it runs at once."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

from cute_backend.planning import Arch


class UnsupportedDeviceError(RuntimeError):
    """No kernels are generated for this GPU."""


@dataclass(frozen=True)
class Device:
    """A GPU that kernels run on."""

    index: int
    arch: Arch
    sm_count: int
    name: str

    @property
    def model(self) -> str:
        """The model of GPU, or of a slice of a GPU, for which timings are valid."""
        return f"{self.name}, {self.sm_count} SMs"


@cache
def device_at(index: int) -> Device:
    """The GPU of an index. Raises UnsupportedDeviceError if no target has its compute capability."""
    properties = torch.cuda.get_device_properties(index)
    arch = Arch.of_capability((properties.major, properties.minor))
    if arch is None:
        taken = Arch.listed("or", lambda target: f"{target.version} ({target.family})")
        raise UnsupportedDeviceError(
            f"{properties.name} has compute capability {properties.major}.{properties.minor}; "
            f"cute_backend's kernels need {taken}"
        )
    return Device(index, arch, properties.multi_processor_count, properties.name)


@dataclass(frozen=True)
class Grid:
    """The clusters of a persistent kernel on a GPU, which runs `most` of them at once."""

    most: int
    cluster_size: int
    sm_count: int

    def clusters(self) -> int:
        """The number of clusters that a launch starts now: those that fit beside the SMs that a program
        leaves to other kernels, with torch's `_set_sm_carveout_experimental`, and one at least."""
        left: int | None = torch._C._get_sm_carveout_experimental()
        if left is None:
            return self.most
        return max(1, min(self.most, (self.sm_count - left) // self.cluster_size))


@cache
def max_active_clusters(index: int, cluster_size: int) -> int:
    """The number of clusters of `cluster_size` CTAs, one CTA to an SM, that the GPU runs at once.

    It is less than the SMs divided by the cluster size if the SMs of a GPC are no multiple of it. So the
    driver is asked (CUDA Driver API, cuOccupancyMaxActiveClusters), for a kernel that needs all of an SM's
    shared memory.
    """
    if cluster_size == 1:
        return device_at(index).sm_count
    with torch.cuda.device(index):
        torch.cuda.current_stream()  # a context must be current
        return _occupancy(index, cluster_size)


_PROBE = b"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry probe() { ret; }
"""
"""An empty kernel that any later GPU can run."""

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
_ATTRIBUTE_CLUSTER_DIMENSION = 4


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, of whose value only a cluster's three sizes are used."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("cluster", ctypes.c_uint * 16)]


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    ]


def _occupancy(index: int, cluster_size: int) -> int:
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        status = getattr(driver, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} returned CUDA error {status} for clusters of {cluster_size} CTAs")

    module, function, clusters = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    call("cuModuleLoadData", ctypes.byref(module), _PROBE)
    try:
        call("cuModuleGetFunction", ctypes.byref(function), module, b"probe")
        shared_bytes = torch.cuda.get_device_properties(index).shared_memory_per_block_optin  # type: ignore[attr-defined]
        call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        call("cuFuncSetAttribute", function, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        attribute = _LaunchAttribute(_ATTRIBUTE_CLUSTER_DIMENSION, 0, (cluster_size, 1, 1))
        config = _LaunchConfig(
            (cluster_size, 1, 1), (128, 1, 1), shared_bytes, None, ctypes.pointer(attribute), 1
        )
        call("cuOccupancyMaxActiveClusters", ctypes.byref(clusters), function, ctypes.byref(config))
    finally:
        call("cuModuleUnload", module)
    return clusters.value
