"""Settings, each read where it decides something and hashed into the cache keys of Inductor.

Set them as attributes, or for a while with `cute_backend.config.patch(max_stores=2)`.
"""

import sys
from typing import Optional

from torch.utils._config_module import install_config_module

max_loads: int = 16
"""Epilogue operands that one kernel reads: pointers and descriptors are kernel parameters."""

max_exact_loads: int = 4
"""Operands of the output's size that one kernel reads: each takes shared memory from the mainloop."""

max_stores: int = 4
"""Results that one kernel writes: each takes shared memory from the mainloop."""

max_autotune: Optional[bool] = None  # noqa: UP045  torch's config module reads the annotation at run time
"""Whether kernels are tuned when a program is compiled: None as Inductor does, with mode="max-autotune".

What was found is remembered in the cache folder, and serves every later program, tuned or not."""

batch_invariant: bool = False
"""Whether a row of a result has the same bits whatever M is: one configuration serves every M, chosen by N
and K alone, at some cost in speed, and nothing is tuned. It holds for what is fused, not for what is left."""

quiet: bool = False
"""Whether tuning shows no progress. It shows none either where standard error is not a terminal."""

_cache_config_ignore_prefix: list[str] = ["quiet"]
"""What `save_config_portable` leaves out: settings that decide nothing."""

install_config_module(sys.modules[__name__])
