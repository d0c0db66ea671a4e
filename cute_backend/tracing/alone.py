"""Tracing of a user's function, one at a time and without torch's logs of a failure."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch._dynamo.convert_frame import compile_lock
from torch._subclasses import fake_tensor


@contextmanager
def traced_alone() -> Iterator[None]:
    """Waits until no other thread traces or compiles, which torch's tracers do with patches of global state,
    and suppresses torch's logs of calls that fail on fake tensors, since torch also raises the errors."""
    logger = logging.getLogger(fake_tensor.__name__)
    with compile_lock:
        logger.addFilter(_drop)
        try:
            yield
        finally:
            logger.removeFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    return False
