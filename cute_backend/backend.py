"""`torch.compile(model, backend="cute")`: Inductor, with one more pass over its post-grad graphs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._dynamo.exc import RestartAnalysis, ShortenTraceback, SkipFrame
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from cute_backend import artifacts
from cute_backend.errors import UsageError, meant
from cute_backend.fx_walk.epilogue_pass import EpiloguePass, Observer
from cute_backend.fx_walk.pass_sequence import Pass, chain_passes, passes_of
from cute_backend.fx_walk.refusals.containment import contain, first_raised, is_contained
from cute_backend.fx_walk.refusals.labels import input_names, label_inputs
from cute_backend.fx_walk.replacement.product_times import times_wanted
from cute_backend.options import PREFIX, split_options
from cute_backend.runtime.calls.prepare import expect

if TYPE_CHECKING:
    from cute_backend.fx_walk.replacement.tuning_jobs import Late

epilogue_pass = EpiloguePass(observe=artifacts.record)
"""The pass, for `backend="inductor"` with `options={"post_grad_custom_pre_pass": epilogue_pass}`.

`epilogue_pass.with_settings(max_autotune=True)` is a pass with settings of its own.
"""


class OptionError(ShortenTraceback, UsageError):
    """A mode or an option of `torch.compile`, or another setting, that can't be met.

    Dynamo shows an error of this kind as it is, without its own frames: the traceback goes from the call of
    the compiled function to the frame here that raises the error.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=sys._getframe(1))


class _RaisingPass(EpiloguePass):
    """The pass as `cute` runs it. It raises errors, which `cute` catches to compile the graph without the
    pass, and keeps what measuring has left until Inductor has compiled the graph."""

    def __init__(self, settings: Mapping[str, Any], observe: Observer) -> None:
        super().__init__(settings, observe)
        self.late: Late = []

    def __call__(self, graph: fx.Graph) -> None:
        self.fuse(graph)

    def leave(self, late: Late) -> None:
        self.late += late  # Inductor gives subgraphs to the pass, then the graph that calls them

    def measure_late(self) -> None:
        """Measures what was left, and forgets it: it holds inputs on the GPU."""
        late, self.late = self.late, []
        if late:
            from cute_backend.fx_walk.replacement.tuning_jobs import measure_late

            measure_late(late)


def cute(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles a Dynamo graph as Inductor would, with matrix products fused with the ops after them.

    `mode` and `options` are Inductor's own, and options such as "cute_backend.max_autotune" are settings of
    `cute_backend.config` for this compilation: for its forward and backward graphs, and for every one that
    Dynamo asks for later. A `post_grad_custom_pre_pass` that is set, among the options or in Inductor's
    configuration, is kept and runs first; if it is an `epilogue_pass`, its settings apply too. A graph,
    forward or backward, that can't be compiled with regions is compiled again without them: see
    `cute_backend.fx_walk.refusals.containment`. Raises OptionError for a mode or an option that can't be met.
    """
    expect({each.device for each in example_inputs if isinstance(each, torch.Tensor)})
    from torch._inductor.compile_fx import compile_fx

    settings, patches = _read_options(mode, options or {})
    set_passes = passes_of(
        patches.get("post_grad_custom_pre_pass", inductor_config.post_grad_custom_pre_pass)
    )
    own = [each for each in set_passes if not isinstance(each, EpiloguePass)]
    for each in set_passes:
        if isinstance(each, EpiloguePass):
            settings = {**each.settings, **settings}
    fuse = _RaisingPass(settings, artifacts.record)
    patches = {**patches, **times_wanted(patches), "post_grad_custom_pre_pass": chain_passes([*own, fuse])}
    inner: Any = _Compiler(chain_passes(own), fuse, _names(gm, example_inputs))
    return compile_fx(gm, example_inputs, inner_compile=inner, config_patches=patches)  # type: ignore[return-value]


def _read_options(mode: str | None, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our settings and Inductor's, by name. Raises OptionError."""
    try:
        settings, others = split_options(options)
        return settings, torch._TorchCompileInductorWrapper(mode, others, None).config
    except UsageError as error:
        raise OptionError(str(error)) from None
    except RuntimeError as error:
        known = inductor_config.get_config_copy()
        for option in others:
            if option.replace("-", "_") not in known:
                raise OptionError(
                    f"torch.compile's option {option!r} is neither one of Inductor's"
                    f"{meant(option, known)} nor one of cute_backend's, which begin with {PREFIX!r}"
                ) from None
        raise OptionError(str(error)) from None


def _names(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[str]:
    """The user's names for the inputs of one of Dynamo's graphs; an empty list if they can't be found."""
    try:
        return input_names(gm, example_inputs)
    except Exception as error:
        contain(error, instead="inputs are called as in the graph")
        return []


class _Compiler:
    """Inductor's compiler of one graph. If it fails with the pass, it runs again without it.

    An exception of the second attempt is not this package's, and is raised. The result is put into no cache,
    so that the next process tries to fuse again.
    """

    def __init__(self, own: Pass | None, fuse: _RaisingPass, names: Sequence[str]) -> None:
        self.fuse = fuse
        self.names = names
        self.without: dict[str, Any] = {
            "post_grad_custom_pre_pass": own,
            "fx_graph_cache": False,
            "fx_graph_remote_cache": False,
        }

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **how: Any) -> Any:
        with self.fuse.in_force():
            return self._compile(gm, example_inputs, how)

    def _compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any], how: dict[str, Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        modules = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
        graphs = [deepcopy(module.graph) for module in modules]
        tally = counters["cute_backend"]
        counted = Counter(tally)
        self.fuse.late = []
        try:
            label_inputs(gm.graph, self.names)
            compiled = compile_fx_inner(gm, example_inputs, **how)
        except (RestartAnalysis, SkipFrame):
            raise
        except Exception as error:
            if not is_contained(error):
                cause = first_raised(error)
                if isinstance(cause, UsageError):  # Inductor has wrapped our error in one of its own
                    raise OptionError(str(cause)) from None
                raise
            failed = error
        else:
            self.fuse.measure_late()
            return compiled
        for module, graph in zip(modules, graphs, strict=True):
            module.graph = graph
        with inductor_config.patch(self.without), functorch_config.patch(bundled_autograd_cache=False):
            compiled = compile_fx_inner(gm, example_inputs, **how)
        tally.clear()
        tally.update(counted)
        self.fuse.show([], [contain(failed)])
        return compiled


def _reset() -> None:
    """Makes Inductor forget recorded CUDA graphs, as `torch._dynamo.reset` does."""
    torch._TorchCompileInductorWrapper("reduce-overhead", None, None).reset()


cute.reset = _reset  # type: ignore[attr-defined]
