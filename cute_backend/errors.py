"""What the public functions raise."""

from __future__ import annotations


class UsageError(ValueError):
    """A request that cannot be met: one sentence with what was given and what is accepted.

    The command line prints it and exits with status 2.
    """
