"""Times of this package's products for torch's overlap scheduling, which hides collectives behind them.

The scheduler asks a hook for the time of a node, and benchmarks products for which the hook has none: it
would call the op on drawn operands, build its kernels, and read drawn offsets of groups. So the hook gives
the time that the cost model predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch.fx.node import map_arg

from cute_backend.fx_walk.graph.static import arguments, usual
from cute_backend.fx_walk.products.capability import device_capability
from cute_backend.fx_walk.products.torch_times import ROOFLINE, by_torch, option
from cute_backend.fx_walk.refusals.containment import contain
from cute_backend.planning import Alignment, Arch, Constraints, Sizes
from cute_backend.planning.cost import cost
from cute_backend.runtime.arguments.device import device_at
from cute_backend.runtime.arguments.operands import groups_of, parse_spec, plane_of
from cute_backend.runtime.calls.op import gemm_epilogue
from cute_backend.runtime.kernels.reach import Problem, launched
from cute_backend.runtime.tuning.winners import config_here

Estimate = Callable[[fx.Node, "int | None"], "float | None"]
"""torch's hook: the milliseconds of a node, or None if it has no estimate of its own. The number replaces the
size of a collective."""

OPTION = "aten_distributed_optimizations.custom_runtime_estimation"


class ProductTimes:
    """An `Estimate` for this package's products, behind the one that the user has set (`own`).

    torch leaves nodes without an estimate of their own to its default only if there is no hook. So without
    `own`, this hook returns that default for nodes that are neither collectives nor products.
    """

    def __init__(self, own: Estimate | None) -> None:
        self.own = own

    def __call__(self, node: fx.Node, override_size: int | None = None) -> float | None:
        own = self.own or _from_profile(option({}, "profile_guided_estimations_profile_path", None))
        given = None if own is None else own(node, override_size)
        if given is not None:
            return given
        if node.target is gemm_epilogue:
            return _milliseconds(node)
        return _default(node) if own is None else None


def times_wanted(options: Mapping[str, Any]) -> dict[str, Any]:
    """The option that sets the hook, for options of `torch.compile` under which torch would benchmark
    products; else none."""
    own = option(options, "custom_runtime_estimation", None)
    if (
        not option(options, "enable_overlap_scheduling", False)
        or option(options, "compute_estimator", "benchmark") != "benchmark"
        or isinstance(own, ProductTimes)
    ):
        return {}
    return {OPTION: ProductTimes(own)}


def give_times() -> None:
    """Sets the hook in Inductor's configuration, for the rest of the process, unless it is set or not wanted.
    `backend="cute"` has set it for its own compilation; a pass of `backend="inductor"` can't."""
    for hook in times_wanted({}).values():
        inductor_config.aten_distributed_optimizations.custom_runtime_estimation = hook


def can_be_rated(dtype: torch.dtype) -> bool:
    """Whether torch's overlap scheduling can estimate a product whose first result has a dtype.

    If it is on, it asks for the peak of the GPU for that dtype, also where there is a hook, and fails for fp8
    and integers on a GPU that is not in its table. Such a product is called in a way in which torch does not
    recognise it: as an op that writes to given tensors.
    """
    if not option({}, "enable_overlap_scheduling", False):
        return True
    from torch._inductor.fx_passes import overlap_scheduling
    from torch.utils import _runtime_estimation

    if not hasattr(overlap_scheduling, ROOFLINE):
        return True
    try:
        _runtime_estimation.get_device_tflops(dtype)
    except AssertionError:
        return False
    return True


@cache
def _from_profile(path: str | None) -> Estimate | None:
    """torch's estimates from a profile, which it makes itself only if there is no hook."""
    if path is None:
        return None
    from torch._inductor.fx_passes.profile_guided_estimation import ProfileGuidedEstimator

    return ProfileGuidedEstimator(path)


def _milliseconds(node: fx.Node) -> float:
    """The predicted time of a call of the op."""
    try:
        given: Any = map_arg(arguments(node), lambda each: each.meta["val"])
        a, b, spec = given["a"], given["b"], parse_spec(given["spec"])
        groups = groups_of(spec, a)
        sizes = (*plane_of(spec, a, b), a[0].shape[-1])
        (m, n, k), varies = map(usual, sizes), not isinstance(sizes[0], int)
        of_groups = None if groups is None else usual(groups)
        arch = Arch.of_capability(device_capability(a[0].device))
        assert arch is not None, "the walker fuses nothing on other GPUs"
        count = device_at(torch.cuda.current_device()).sm_count if torch.cuda.is_available() else None
        constraints = Constraints.parse(given["constraints"])
        (problem,) = launched(Problem(spec, m, n, k, of_groups, constraints, varies))
        tile = config_here(problem, Alignment.TMA, arch)
        return cost(tile, problem.spec, Sizes(m, n, k, of_groups), count or arch.target.sm_count) / 1000
    except Exception as error:
        contain(error, "torch estimates the time of the product")
        return by_torch(node)


def _default(node: fx.Node) -> float | None:
    """torch's estimate of a node if there is no hook; None for those that it estimates in spite of one:
    collectives and products."""
    from torch._inductor.fx_passes.overlap_scheduling import is_compute_node

    if node.op != "call_function" or is_compute_node(node) or _is_collective(node):
        return None
    return by_torch(node) or None


def _is_collective(node: fx.Node) -> bool:
    """Whether a later node waits for the result of a node, or for one of its results."""
    results = (node, *(user for user in node.users if user.target is getitem))
    wait = torch.ops._c10d_functional.wait_tensor.default
    return any(user.target is wait for result in results for user in result.users)
