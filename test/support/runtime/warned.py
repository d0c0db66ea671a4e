"""The warnings of a block of code, without those that other code's garbage causes meanwhile."""

from __future__ import annotations

import warnings
from collections.abc import Iterable


def runtime_warnings(caught: Iterable[warnings.WarningMessage]) -> list[str]:
    """The texts of the warnings that the package gives. Any object that is collected may add a
    ResourceWarning."""
    return [str(each.message) for each in caught if issubclass(each.category, RuntimeWarning)]
