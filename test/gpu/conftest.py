"""Tests on a GPU run where the package is on the path, installed or not.

`backend="cute"` is found by the entry point of an installation, which a bare checkout lacks.
"""

import cute_backend.registration  # noqa: F401
