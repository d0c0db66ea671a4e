"""What the public functions raise."""

from __future__ import annotations


class UsageError(ValueError):
    """A request that cannot be met: one sentence with what was given and what is accepted.

    The command line prints it and exits with status 2.
    """


def root_cause(error: BaseException) -> BaseException:
    """What was raised first: Dynamo wraps what a program raises in pages of its own."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return error
