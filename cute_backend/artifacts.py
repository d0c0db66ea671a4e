"""The artifacts that a compilation records for tools: the explanation of each graph, and each kernel's
module.

tlparse shows them as artifacts beside Inductor's own, and with TORCH_COMPILE_DEBUG=1 they are files in the
debug folder of their graph. Where Inductor's cache serves a graph, the pass does not run, and there are no
artifacts.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch._inductor import config as inductor_config
from torch._inductor.virtualized import V
from torch._logging._internal import trace_log, trace_structured

from cute_backend.errors import UsageError
from cute_backend.fx_walk.refusals.containment import contain
from cute_backend.fx_walk.refusals.reasons import Rejection
from cute_backend.fx_walk.region.region import Region

EXPLANATION = "cute_backend_explanation"
"""The name of the artifact, and of the file, with the explanation of a graph; a module has its kernel's."""


def record(regions: Sequence[Region], rejections: Sequence[Rejection]) -> None:
    """Records the regions and rejections of the graph that is being compiled, if a trace or a folder is kept.

    A kernel's module is the one for the sizes that the graph is traced with. If recording fails, compilation
    continues.
    """
    if not ((regions or rejections) and (trace_log.handlers or inductor_config.trace.enabled)):
        return
    try:
        _record(regions, rejections)
    except UsageError as error:  # it is raised again where the kernel is needed
        _write(EXPLANATION, ".txt", f"{error}\n", "a")
    except Exception as error:
        contain(error, instead="the explanation of this graph is left out of its artifacts")


def _record(regions: Sequence[Region], rejections: Sequence[Rejection]) -> None:
    from torch._functorch.aot_autograd import get_aot_graph_name  # here, since few compilations are traced

    from cute_backend.api import explanation_of

    explained = explanation_of(regions, rejections)
    _write(EXPLANATION, ".txt", f"graph {get_aot_graph_name()}: {explained}\n", "a")
    modules = {region.kernel().entry: region for region in explained.regions}
    for name, region in modules.items():
        _write(name, ".py", region.source(), "w")


def _write(name: str, suffix: str, text: str, mode: str) -> None:
    """Writes an artifact, and a file. A graph and the graphs that it calls share a folder, whose file has one
    explanation after the other."""
    from torch._inductor.debug import DebugContext

    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text
    )
    if inductor_config.trace.enabled and isinstance(V.debug, DebugContext):
        with V.debug.fopen(name + suffix, mode) as file:
            file.write(text)
