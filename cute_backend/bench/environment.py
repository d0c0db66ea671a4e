"""The machine that a timing depends on: the GPU, its clock, the driver and the packages."""

from __future__ import annotations

import ctypes
import platform
import statistics
from datetime import datetime, timezone

import torch

from cute_backend.bench.results import Clock, Machine
from cute_backend.runtime.kernels.kernel import version_of

_PACKAGES = ("cute-backend", "nvidia-cutlass-dsl", "apache-tvm-ffi", "triton", "quack-kernels")
_NVML_CLOCK_SM = 1


def now() -> str:
    """The date and time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class Nvml:
    """The NVIDIA Management Library's view of the current GPU; without the library, every value is None, and
    without a GPU, every value but the driver's version.

    The library comes with the driver. A query takes microseconds, where nvidia-smi starts a process.
    """

    def __init__(self) -> None:
        self._device = ctypes.c_void_p()
        self._clocks: list[int] = []
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            self._found = False
            return
        self._found = self._ask("nvmlInit_v2")
        if self._found and torch.cuda.is_available():
            uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
            device = ctypes.byref(self._device)
            self._found = self._ask("nvmlDeviceGetHandleByUUID", uuid.encode(), device)

    def _ask(self, name: str, *arguments: object) -> bool:
        return getattr(self._library, name)(*arguments) == 0

    @property
    def driver(self) -> str | None:
        text = ctypes.create_string_buffer(80)
        known = self._found and self._ask("nvmlSystemGetDriverVersion", text, len(text))
        return text.value.decode() if known else None

    @property
    def power_limit_w(self) -> int | None:
        milliwatts = ctypes.c_uint()
        known = self._found and self._ask(
            "nvmlDeviceGetEnforcedPowerLimit", self._device, ctypes.byref(milliwatts)
        )
        return milliwatts.value // 1000 if known else None

    def sample_clock(self) -> None:
        """Records the current SM clock."""
        megahertz = ctypes.c_uint()
        if self._found and self._ask(
            "nvmlDeviceGetClockInfo", self._device, _NVML_CLOCK_SM, ctypes.byref(megahertz)
        ):
            self._clocks.append(megahertz.value)

    def take_clock(self) -> Clock | None:
        """A summary of the samples since the last call; None if there are none."""
        samples, self._clocks = self._clocks, []
        if not samples:
            return None
        return Clock(min(samples), int(statistics.median(samples)), max(samples))


def describe(nvml: Nvml) -> Machine:
    """The current GPU and what runs on it."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Machine(
        gpu=properties.name,
        sms=properties.multi_processor_count,
        power_limit_w=nvml.power_limit_w,
        driver=nvml.driver,
        cuda=torch.version.cuda,
        torch=torch.__version__,
        python=platform.python_version(),
        packages={name: version_of(name) for name in _PACKAGES},
    )
