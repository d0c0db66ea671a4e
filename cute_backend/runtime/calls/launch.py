"""The ops on CUDA: a call finds the launcher of its spec, device and constraints."""

from __future__ import annotations

from torch import Tensor

from cute_backend.planning import Constraints
from cute_backend.runtime.arguments.operands import Tensors, parse_spec
from cute_backend.runtime.arguments.outputs import check_call
from cute_backend.runtime.calls.launcher import Launcher
from cute_backend.runtime.calls.spec_kernels import Fitted
from cute_backend.runtime.calls.widening import WideningLauncher
from cute_backend.spec import EpilogueSpec

_launchers: dict[tuple[str, int, str], Launcher] = {}
"""Launchers by the text of a spec, the device and the text of constraints."""


def launch(
    a: Tensors,
    b: Tensors,
    loads: Tensors | None,
    spec: str,
    constraints: str = "",
    results: Tensors | None = None,
) -> list[Tensor]:
    """Both ops on CUDA: see `cute_backend.runtime.calls.op` for their arguments. Returns the results, which
    are those given, if there are any.

    Raises UnsupportedDeviceError on a GPU for which no kernels exist, ValueError if operands contradict
    `spec`, and UsageError if no kernel meets `constraints`.
    """
    loads = loads or ()
    try:
        launcher = _launchers[spec, a[0].get_device(), constraints]
    except (KeyError, IndexError):
        parsed = parse_spec(spec)
        check_call(parsed, a, b, loads, results)
        launcher = launcher_of(parsed, a[0].get_device(), Constraints.parse(constraints))
    return launcher(a, b, loads, results)


def fitted_for(a: Tensors, b: Tensors, spec: str, constraints: str) -> Fitted | None:
    """The kernel that an earlier launch of operands of these sizes ran without copies or views, or None."""
    launcher = _launchers.get((spec, a[0].get_device(), constraints))
    return None if launcher is None else launcher.fitted(a, b)


def launcher_of(spec: EpilogueSpec, device: int, constraints: Constraints) -> Launcher:
    """The launcher of a spec on a device, which is made at the first call. Raises as `launch` does."""
    key = (spec.to_json(), device, constraints.text)
    if (known := _launchers.get(key)) is not None:
        return known
    if spec.product.is_wideable:
        return _launchers.setdefault(key, WideningLauncher(spec, device, constraints, launcher_of))
    return _launchers.setdefault(key, Launcher(spec, device, constraints))
