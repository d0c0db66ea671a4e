"""`torch.compile(model, backend="cute")`: Inductor, with one more pass over its post-grad graphs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from shutil import rmtree
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._dynamo.exc import RestartAnalysis, ShortenTraceback, SkipFrame
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._inductor import config as inductor_config

from cute_backend import artifacts
from cute_backend.errors import UsageError, meant
from cute_backend.fx_walk.epilogue_pass import EpiloguePass, Observer
from cute_backend.fx_walk.pass_sequence import Pass, chain_passes, passes_of
from cute_backend.fx_walk.refusals.containment import contain, first_raised, is_contained
from cute_backend.fx_walk.refusals.labels import input_names, label_inputs
from cute_backend.fx_walk.refusals.reasons import Reason
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
        from cute_backend.fx_walk.replacement.tuning_jobs import begin

        begin(late)
        self.late += late  # Inductor gives subgraphs to the pass, then the graph that calls them

    def measure_late(self) -> bool:
        """Measures what was left, and forgets it: it has copies of regions. Returns whether Inductor's own
        code is faster for a region of the graph."""
        late, self.late = self.late, []
        if not late:
            return False
        from cute_backend.fx_walk.replacement.tuning_jobs import measure_late

        return measure_late(late)


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

        restore = _restorer(gm)
        tally = counters["cute_backend"]
        counted = Counter(tally)
        self.fuse.late = []
        start = perf_counter()
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
            took = perf_counter() - start
            if not self.fuse.measure_late():
                return compiled
            _uncache(compiled)
            if took > _BRIEF_S and not functorch_config.bundled_autograd_cache:  # a bundle keeps the graph
                return compiled
            restore()
            _take_back(counted)
            return self._compile(gm, example_inputs, how)
        restore()
        with inductor_config.patch(self.without), functorch_config.patch(bundled_autograd_cache=False):
            compiled = compile_fx_inner(gm, example_inputs, **how)
        tally.clear()
        tally.update(counted)
        self.fuse.show([], [contain(failed)])
        return compiled


_BRIEF_S = 3.0
"""The seconds for which Inductor may have worked on a graph that is compiled again, since its own code is
faster for a region. A longer one is compiled again by the next process."""


def _restorer(gm: fx.GraphModule) -> Callable[[], None]:
    """A function that gives a module and its submodules the graphs that they have now, once, and forgets what
    Inductor has reported of them."""
    modules = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
    graphs = [deepcopy(module.graph) for module in modules]

    def restore() -> None:
        for module, graph in zip(modules, graphs, strict=True):
            module.graph = graph
        _forget_strides()

    return restore


def _forget_strides() -> None:
    """Forgets the strides of outputs that Inductor has reported of a graph to its caller, which it does once.
    They come in a list that is empty before."""
    context = TracingContext.try_get()
    if context is not None and context.output_strides:
        context.output_strides.clear()


def _take_back(counted: Mapping[str, int]) -> None:
    """Sets what the pass has counted, and will count again, to the numbers that were `counted` before it."""
    from cute_backend.runtime.tuning.jobs import Untuned

    tally = counters["cute_backend"]
    for name in tally.keys() & {"anchors", "regions", *(each.value for each in (*Reason, *Untuned))}:
        tally[name] = counted.get(name, 0)


def _uncache(compiled: Any) -> None:
    """Removes a graph from Inductor's cache on disk, and from what `torch.compiler.save_cache_artifacts` is
    to save. Who compiles it next leaves the regions to Inductor that were measured too late for this time."""
    key = getattr(compiled, "_fx_graph_cache_key", None)  # a wrapper, as of torch's minifier, has none
    if key is None:
        return
    try:  # torch has no public call for it
        from torch._inductor.codecache import FxGraphCache
        from torch.compiler._cache import CacheArtifactManager

        rmtree(FxGraphCache._get_tmp_dir_for_key(key), ignore_errors=True)
        for recorded in CacheArtifactManager._new_cache_artifacts.values():
            recorded[:] = [artifact for artifact in recorded if artifact.key != key]
    except Exception as error:
        contain(error, instead="Inductor's cache keeps a graph, although Inductor's code is faster")


def _reset() -> None:
    """Makes Inductor forget recorded CUDA graphs, as `torch._dynamo.reset` does."""
    torch._TorchCompileInductorWrapper("reduce-overhead", None, None).reset()


cute.reset = _reset  # type: ignore[attr-defined]
