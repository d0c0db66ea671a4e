"""Tracing calls that may fail, without torch's logs of the failure."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses import fake_tensor


@contextmanager
def unlogged() -> Iterator[None]:
    """Suppresses torch's logs of calls that fail on fake tensors, since torch also raises the errors."""
    logger = logging.getLogger(fake_tensor.__name__)
    logger.addFilter(_drop)
    try:
        yield
    finally:
        logger.removeFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    return False
