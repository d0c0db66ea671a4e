"""JSON that may be damaged or hostile: every fault in it raises ValueError."""

from __future__ import annotations

import json
from typing import Any

_MAX_DEPTH = 64
"""The most levels of nested lists and objects; a spec has six. A deeper document could cause a
RecursionError."""


def parse(content: bytes | str) -> Any:
    """The value of a JSON document. Raises ValueError if it is not JSON, or is nested too deeply."""
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [child for each in level for child in _children(each)]
        if not level:
            return value
    raise ValueError("it is nested too deeply")


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
