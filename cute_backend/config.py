"""Settings, each read where it decides something and hashed into the cache keys of Inductor.

Set them as attributes, or for a while with `cute_backend.config.patch(max_stores=2)`.
"""

import sys

from torch.utils._config_module import install_config_module

max_loads: int = 16
"""Epilogue operands that one kernel reads: pointers and descriptors are kernel parameters."""

max_exact_loads: int = 4
"""Operands of the output's size that one kernel reads: each takes shared memory from the mainloop."""

max_stores: int = 4
"""Results that one kernel writes: each takes shared memory from the mainloop."""

install_config_module(sys.modules[__name__])
