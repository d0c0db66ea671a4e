"""Loading kernels while a stream is captured."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED of the CUDA driver API: calls are permitted that a capture can't record."""


@contextmanager
def code_may_load() -> Iterator[None]:
    """A context in which this thread may load kernels, even while a stream is captured.

    CUDA refuses such calls during a capture, since a program may expect that they are recorded. A kernel that
    is loaded stays loaded, so nothing has to be recorded here.
    """
    if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    _exchange(mode)
    try:
        yield
    finally:
        _exchange(mode)


def _exchange(mode: ctypes.c_int) -> None:
    """Sets the thread's capture mode, and replaces `mode` by the one that it had. Raises RuntimeError."""
    status = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if status != 0:
        raise RuntimeError(f"cuThreadExchangeStreamCaptureMode returned CUDA error {status}")
