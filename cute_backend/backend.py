"""`torch.compile(model, backend="cute")`: Inductor, with one more pass over its post-grad graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config

from cute_backend.fx_walk.epilogue_pass import EpiloguePass
from cute_backend.fx_walk.pass_sequence import chain_passes

epilogue_pass = EpiloguePass()
"""The pass, for `backend="inductor"` with `options={"post_grad_custom_pre_pass": epilogue_pass}`."""


def cute(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph as Inductor would, matrix products fused with the pointwise work after them.

    `mode` and `options` are Inductor's own. A `post_grad_custom_pre_pass` that is set, among the options or
    in Inductor's configuration, is kept and runs first.
    """
    inductor = torch._TorchCompileInductorWrapper(mode, options, None)
    own = inductor.config.get("post_grad_custom_pre_pass", inductor_config.post_grad_custom_pre_pass)
    inductor.config["post_grad_custom_pre_pass"] = chain_passes(own, epilogue_pass)
    return inductor(gm, example_inputs)


def _reset() -> None:
    """Forget recorded CUDA graphs, as `torch._dynamo.reset` has Inductor do."""
    torch._TorchCompileInductorWrapper("reduce-overhead", None, None).reset()


cute.reset = _reset  # type: ignore[attr-defined]
