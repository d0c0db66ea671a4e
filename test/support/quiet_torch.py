"""A pytest plugin that leaves out work of torch that no test looks at, an eighth of the processor time of a
compiled program.

pytest attaches its handlers to every logger that does not propagate. For them torch would write its
structured trace, all of which is below their level. Dynamo evaluates the guards of every compiled function
once with empty processor caches, to log how long that takes, and collects garbage after each compilation.
"""

from __future__ import annotations

from torch._dynamo import config, guards
from torch._logging._internal import trace_log

trace_log.propagate = True


def _no_time(*_: object) -> float:
    return 0.0


if hasattr(guards, "profile_guard_manager"):
    guards.profile_guard_manager = _no_time
if hasattr(config, "run_gc_after_compile"):
    config.run_gc_after_compile = False
