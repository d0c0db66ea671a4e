"""Errors of the simulator: each is a `SimulationError` whose text names the fault and its place."""

from __future__ import annotations


class SimulationError(RuntimeError):
    """Base of all errors that a simulated kernel can cause.

    `where` is filled in by the machine when the error passes through the executing warp: the PTX line, the
    instruction, the warp with its role, and the CTA.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.where: str | None = None

    def __str__(self) -> str:
        return self.message if self.where is None else f"{self.message}\n  at {self.where}"


class PtxSyntaxError(SimulationError):
    """The PTX text can't be read."""


class UnknownOpcode(SimulationError):
    """An instruction, or a form of it, that the opcode table doesn't have."""


class IllegalAccess(SimulationError):
    """An access outside registered or allocated memory, or a misaligned one."""


class RaceError(SimulationError):
    """An access that no synchronisation orders after the access that it depends on, or a read of memory that
    was never written."""


class MissingProxyFence(RaceError):
    """The async proxy reads what the generic proxy wrote with no fence.proxy.async between."""


class BarrierError(SimulationError):
    """A barrier used against its rules: never initialised, too many arrivals, wrong thread count."""


class ResourceError(SimulationError):
    """Tensor memory allocated, used or freed against its rules; too much shared memory asked for."""


class DescriptorError(SimulationError):
    """A matrix descriptor, instruction descriptor or tensor map with a value that PTX doesn't allow here."""


class Deadlock(SimulationError):
    """Nothing can make progress any more."""


class Runaway(SimulationError):
    """The kernel executes far more instructions than its problem can need."""


class Trap(SimulationError):
    """The kernel executed `trap`."""
