"""Tracing what may fail without torch's account of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses import fake_tensor


@contextmanager
def unlogged() -> Iterator[None]:
    """Without the tracebacks that torch logs of calls that fail on fakes: they are raised, too."""
    logger = logging.getLogger(fake_tensor.__name__)
    logger.addFilter(_drop)
    try:
        yield
    finally:
        logger.removeFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    return False
