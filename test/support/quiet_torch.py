"""A pytest plugin that leaves out work of torch that no test looks at, an eighth of the processor time of a
compiled program.

pytest attaches its handlers to every logger that does not propagate. For them torch would write its
structured trace, all of which is below their level. Dynamo evaluates the guards of every compiled function
once with empty processor caches, to log how long that takes, and collects garbage after each compilation.
With an empty cache, Inductor compiles a program of 2.4 seconds to learn whether the compiler and the loader
take the vector instructions that the processor reports.
"""

from __future__ import annotations

import os

from torch._dynamo import config, guards
from torch._inductor import config as inductor_config
from torch._logging._internal import trace_log

trace_log.propagate = True


def _no_time(*_: object) -> float:
    return 0.0


os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # for the processes that tests start
if inductor_config.cpp.vec_isa_ok is None:
    inductor_config.cpp.vec_isa_ok = True
if hasattr(guards, "profile_guard_manager"):
    guards.profile_guard_manager = _no_time
if hasattr(config, "run_gc_after_compile"):
    config.run_gc_after_compile = False
