"""The GPU as the host code sees it through the runtime stub: attributes, memory, and launches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from cute_backend.simulator.machine import Dim3, Launch
from cute_backend.simulator.memory import GlobalMemory
from cute_backend.simulator.ptx_parser import Entry, Module
from cute_backend.simulator.report import Report
from cute_backend.simulator.simulation_errors import SimulationError

_SUCCESS, _LAUNCH_FAILURE = 0, 719  # cudaError_t

MAX_SHARED_KIB = {
    (8, 0): 163,
    (8, 6): 99,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (10, 3): 227,
    (11, 0): 227,
    (12, 0): 99,
    (12, 1): 99,
}
"""The shared memory that one CTA may have, by compute capability (CUDA C++ Programming Guide, table
"Technical Specifications per Compute Capability")."""

PORTABLE_CLUSTER, LARGEST_CLUSTER = 8, 16
"""The largest number of CTAs in a cluster: without and with the kernel's attribute for non-portable sizes."""


class DeviceAttribute(IntEnum):
    """The cudaDeviceAttr values that generated host code and launch checks ask for."""

    MAX_THREADS_PER_BLOCK = 1
    MAX_BLOCK_DIM_X = 2
    MAX_BLOCK_DIM_Y = 3
    MAX_BLOCK_DIM_Z = 4
    MAX_GRID_DIM_X = 5
    MAX_GRID_DIM_Y = 6
    MAX_GRID_DIM_Z = 7
    MAX_SHARED_MEMORY_PER_BLOCK = 8
    WARP_SIZE = 10
    MULTIPROCESSOR_COUNT = 16
    COMPUTE_CAPABILITY_MAJOR = 75
    COMPUTE_CAPABILITY_MINOR = 76
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97


class LaunchAttribute(IntEnum):
    """The cudaLaunchAttributeID values that a functional simulation can honour or may ignore."""

    IGNORE = 0
    COOPERATIVE = 2
    CLUSTER_DIMENSION = 4
    PROGRAMMATIC_STREAM_SERIALIZATION = 6
    PRIORITY = 8
    PREFERRED_CLUSTER_DIMENSION = 11


Executor = Callable[[Launch, GlobalMemory], Report]


class _LaunchConfig(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint32),
    ]


class _LaunchAttributeEntry(ctypes.Structure):
    """cudaLaunchAttribute: an id, padding to 8 bytes, a 64-byte union."""

    _fields_ = [("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16)]


class _Kernel(ctypes.Structure):
    """`struct kernel` of the stub."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("max_dynamic_shared", ctypes.c_int32),
        ("non_portable_cluster", ctypes.c_int32),
    ]


_ATTRIBUTE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32)
_STATIC_SHARED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int32), ctypes.c_char_p)
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(_LaunchConfig), ctypes.POINTER(_Kernel), ctypes.POINTER(ctypes.c_void_p)
)
_ALLOCATED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
_FREED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class _DeviceTable(ctypes.Structure):
    """`struct device` of the stub."""

    _fields_ = [
        ("attribute", _ATTRIBUTE),
        ("static_shared", _STATIC_SHARED),
        ("launch", _LAUNCH),
        ("allocated", _ALLOCATED),
        ("freed", _FREED),
    ]


class Device:
    """The Python side of the stub. An exception can't cross C, so the first one is kept in `failure`."""

    def __init__(self, module: Module, execute: Executor, sm_count: int) -> None:
        self.memory = GlobalMemory()
        self.reports: list[Report] = []
        self.failure: BaseException | None = None
        self._module = module
        self._execute = execute
        self._attributes = _device_attributes(module, sm_count)
        self._allocations: set[int] = set()
        self.table = _DeviceTable(
            _ATTRIBUTE(self._guarded(self._attribute)),
            _STATIC_SHARED(self._guarded(self._static_shared)),
            _LAUNCH(self._guarded(self._launch)),
            _ALLOCATED(self._guarded(self._allocated)),
            _FREED(self._guarded(self._freed)),
        )

    def register(self, args: Sequence[Any]) -> None:
        """Makes the memory of every tensor in `args` accessible, under a name for error messages.

        Two arguments may be views of one memory: extents that overlap become one.
        """
        joined: list[_Extent] = []
        for extent in sorted(_extents("argument", args), key=lambda extent: extent.begin):
            if joined and extent.begin < joined[-1].end:
                last = joined.pop()
                extent = _Extent(last.begin, max(last.end, extent.end), f"{last.owner} and {extent.owner}")
            joined.append(extent)
        for extent in joined:
            self.memory.register(extent.begin, extent.end - extent.begin, extent.owner)

    def _guarded(self, answer: Callable[..., int]) -> Callable[..., int]:
        def guarded(*args: Any) -> int:
            try:
                return answer(*args)
            except BaseException as error:  # KeyboardInterrupt too: the caller raises it again
                self.failure = self.failure or error
                return _LAUNCH_FAILURE

        return guarded

    def _attribute(self, value: Any, attribute: int) -> int:
        if attribute not in self._attributes:
            raise SimulationError(
                f"the host code asks for device attribute {attribute} (cudaDeviceAttr), which the simulated "
                "device does not know: add it to DeviceAttribute in simulator/simulated_gpu.py"
            )
        value[0] = self._attributes[DeviceAttribute(attribute)]
        return _SUCCESS

    def _static_shared(self, value: Any, kernel: bytes) -> int:
        entry = self._entry(kernel)
        end = 0
        for variable in (*self._module.variables.values(), *entry.variables.values()):
            if variable.space == "shared" and not variable.external:
                end = -(-end // variable.align) * variable.align + variable.nbytes
        value[0] = end
        return _SUCCESS

    def _entry(self, kernel: bytes) -> Entry:
        name = kernel.decode()
        if name not in self._module.entries:
            raise SimulationError(f"the host code launches {name}, which the PTX does not define")
        return self._module.entries[name]

    def _allocated(self, address: int, nbytes: int) -> int:
        self.memory.register(address, nbytes, f"{nbytes} bytes that the host code allocated")
        self._allocations.add(address)
        return _SUCCESS

    def _freed(self, address: int) -> int:
        if address not in self._allocations:
            raise SimulationError(f"the host code frees {address:#x}, which it has not allocated")
        self._allocations.remove(address)
        self.memory.unregister(address)
        return _SUCCESS

    def _launch(self, config: Any, kernel: Any, parameters: Any) -> int:
        one = self._read_launch(config.contents, kernel.contents, parameters)
        self.reports.append(self._execute(one, self.memory))
        return _SUCCESS

    def _read_launch(self, config: _LaunchConfig, kernel: _Kernel, parameters: Any) -> Launch:
        cluster: Dim3 = (1, 1, 1)
        overlaps = False
        entries = ctypes.cast(config.attributes, ctypes.POINTER(_LaunchAttributeEntry))
        for i in range(config.num_attributes):
            if entries[i].id not in LaunchAttribute.__members__.values():
                raise SimulationError(
                    f"the launch has attribute {entries[i].id} (cudaLaunchAttributeID), which the simulator "
                    "does not know: add it to LaunchAttribute in simulator/simulated_gpu.py"
                )
            if entries[i].id == LaunchAttribute.CLUSTER_DIMENSION:
                cluster = _dim3(entries[i].value)
            if entries[i].id == LaunchAttribute.PROGRAMMATIC_STREAM_SERIALIZATION:
                overlaps = bool(entries[i].value[0])
        one = Launch(
            kernel=kernel.name.decode(),
            grid=_dim3(config.grid),
            block=_dim3(config.block),
            cluster=cluster,
            smem_bytes=config.smem_bytes,
            params=tuple(
                ctypes.string_at(parameters[i], parameter.nbytes)
                for i, parameter in enumerate(self._entry(kernel.name).parameters)
            ),
            overlaps=overlaps,
        )
        _check_launch(one, kernel, self._attributes[DeviceAttribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN])
        return one


@dataclass(frozen=True)
class _Extent:
    """The bytes between a tensor's first and last element."""

    begin: int
    end: int
    owner: str


def _extents(owner: str, args: Sequence[Any]) -> Iterator[_Extent]:
    for i, arg in enumerate(args):
        name = f"{owner} {i}"
        if isinstance(arg, (tuple, list)):
            yield from _extents(name, arg)
        elif isinstance(arg, torch.Tensor):
            dtype = str(arg.dtype).removeprefix("torch.")
            yield from _strided(name, arg.data_ptr(), arg.shape, arg.stride(), arg.element_size() * 8, dtype)
        elif hasattr(arg, "data_ptr") and hasattr(arg, "element_type"):  # a tensor of cute.runtime
            element = arg.element_type
            yield from _strided(name, arg.data_ptr, arg.shape, arg.stride, element.width, element.__name__)


def _strided(
    name: str, address: int, shape: Sequence[int], strides: Sequence[int], bits: int, dtype: str
) -> Iterator[_Extent]:
    if 0 not in shape:
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        yield _Extent(address, address + ((last + 1) * bits + 7) // 8, f"{name}, {dtype}{list(shape)}")


def _dim3(values: Any) -> Dim3:
    return values[0], values[1], values[2]


def _device_attributes(module: Module, sm_count: int) -> dict[DeviceAttribute, int]:
    """The device's attributes. Limits are from the CUDA C++ Programming Guide's table, and the same for all
    devices except for shared memory. Raises SimulationError for a compute capability that has no entry
    there."""
    major, minor = divmod(int(module.target.removeprefix("sm_").rstrip("af")), 10)
    if (major, minor) not in MAX_SHARED_KIB:
        known = ", ".join(f"{major}.{minor}" for major, minor in MAX_SHARED_KIB)
        raise SimulationError(
            f"a kernel was compiled for {module.target}; devices of compute capability {known} are simulated"
        )
    return {
        DeviceAttribute.MAX_THREADS_PER_BLOCK: 1024,
        DeviceAttribute.MAX_BLOCK_DIM_X: 1024,
        DeviceAttribute.MAX_BLOCK_DIM_Y: 1024,
        DeviceAttribute.MAX_BLOCK_DIM_Z: 64,
        DeviceAttribute.MAX_GRID_DIM_X: 2**31 - 1,
        DeviceAttribute.MAX_GRID_DIM_Y: 65535,
        DeviceAttribute.MAX_GRID_DIM_Z: 65535,
        DeviceAttribute.MAX_SHARED_MEMORY_PER_BLOCK: 48 * 1024,
        DeviceAttribute.WARP_SIZE: 32,
        DeviceAttribute.MULTIPROCESSOR_COUNT: sm_count,
        DeviceAttribute.COMPUTE_CAPABILITY_MAJOR: major,
        DeviceAttribute.COMPUTE_CAPABILITY_MINOR: minor,
        DeviceAttribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: MAX_SHARED_KIB[major, minor] * 1024,
    }


def _check_launch(one: Launch, kernel: _Kernel, device_shared: int) -> None:
    """Raises an error, with the reason, for a launch that the driver would refuse. `device_shared` is the
    shared memory that a CTA may have."""
    threads = one.block[0] * one.block[1] * one.block[2]
    ctas = one.cluster[0] * one.cluster[1] * one.cluster[2]
    largest = LARGEST_CLUSTER if kernel.non_portable_cluster else PORTABLE_CLUSTER
    if 0 in one.grid or 0 in one.block or 0 in one.cluster:
        problem = f"grid {one.grid}, block {one.block} and cluster {one.cluster} may not hold a 0"
    elif threads > 1024:
        problem = f"block {one.block} has {threads} threads; a CTA can have 1024"
    elif ctas > largest:
        problem = f"cluster {one.cluster} has {ctas} CTAs; this kernel accepts {largest}"
    elif any(g % c for g, c in zip(one.grid, one.cluster, strict=True)):
        problem = f"grid {one.grid} is not a multiple of cluster {one.cluster}"
    elif one.smem_bytes > kernel.max_dynamic_shared:
        problem = f"{one.smem_bytes} bytes of shared memory; this kernel accepts {kernel.max_dynamic_shared}"
    elif one.smem_bytes > device_shared:
        problem = f"{one.smem_bytes} bytes of shared memory; this device has {device_shared} for a CTA"
    else:
        return
    raise SimulationError(f"launch of {one.kernel}: {problem}")
