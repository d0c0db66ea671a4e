"""The devices that a region may run on, and the operands that they multiply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cute_backend.fx_walk.graph.static import fake, target_name
from cute_backend.fx_walk.products.anchor import Anchor
from cute_backend.fx_walk.refusals.reasons import Reason, Refused
from cute_backend.planning import Arch, Target
from cute_backend.spec import ProductKind, Scaling

Capability = Callable[[torch.device], tuple[int, int]]
"""The compute capability of a CUDA device."""


def device_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a device. If torch sees no GPU, it is that of the first target."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_capability(device)
    return next(iter(Arch)).target.capability


@dataclass(frozen=True)
class Named:
    """A `Capability` that returns one architecture for every device, also for a CPU."""

    arch: Arch

    def __call__(self, device: torch.device) -> tuple[int, int]:
        return self.arch.target.capability


def target_of(device: torch.device, capability: Capability) -> Target | None:
    """The target of a CUDA device. It is None for a CPU, whose graphs are replayed, unless a target is named.
    Raises Refused for a device for which no kernel exists."""
    if device.type == "cpu":
        return capability.arch.target if isinstance(capability, Named) else None
    if device.type != "cuda" or torch.version.hip is not None:
        raise Refused(Reason.DEVICE, device=device if torch.version.hip is None else f"{device} (ROCm)")
    found = capability(device)
    arch = Arch.of_capability(found)
    if arch is None:
        raise Refused(
            Reason.CAPABILITY,
            device=device,
            capability=".".join(map(str, found)),
            taken=Arch.listed("or", lambda target: target.version),
        )
    return arch.target


def of_target(refused: Refused, target: Target | None) -> Refused:
    """The refusal of a product on a target: one of dtypes that no target multiplies lists this one's."""
    if target is None or refused.reason is not Reason.OPERAND_DTYPE:
        return refused
    return _unmultiplied(refused.facts["a"], refused.facts["b"], target)


def _unmultiplied(a: torch.dtype, b: torch.dtype, target: Target) -> Refused:
    taken = ", ".join(sorted(dtype.value for dtype in target.operands))
    return Refused(Reason.OPERAND_DTYPE, where=f"kernels for {target.name}", a=a, b=b, taken=taken)


def check_operands(anchor: Anchor, target: Target | None) -> None:
    """Refuses a product whose operands the target's MMA can't multiply, or whose scales of blocks none of its
    mainloops supports. A CPU supports all."""
    product = anchor.accumulator
    if target is not None and not product.mma_operands <= target.operands:
        raise _unmultiplied(fake(anchor.a).dtype, fake(anchor.b).dtype, target)
    if target is not None and product.kind.has_offsets and not target.groups:
        what = "rows" if product.kind is ProductKind.GROUPED else "K"
        why = f"multiplies {what} in groups, which no kernel of {target.name} does"
        raise Refused(Reason.GROUPED, target=target_name(anchor.node), why=why)
    scalings = {product.a_scaling, product.b_scaling}
    if target is not None and not scalings <= target.scalings | {Scaling.NONE}:
        recipe = f"BlockWise{product.a_scaling.value} by BlockWise{product.b_scaling.value}"
        blocks = sorted(f"BlockWise{scaling.value}" for scaling in target.scalings)
        *all_but_last, last = ["TensorWise", "RowWise", *blocks]
        raise Refused(
            Reason.RECIPE, recipe=recipe, taken=f"{', '.join(all_but_last)} and {last} on {target.name}"
        )
