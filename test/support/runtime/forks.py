"""Forked children of the test's process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


def in_child(what: Callable[[], object]) -> str:
    """The result of a call in a forked child, as text, or that it hangs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            reply = repr(what())
        except BaseException as error:
            reply = repr(error)
        os.write(writer, reply.encode())
        os._exit(0)
    os.close(writer)
    until = time.monotonic() + 60
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return "it hangs"
        time.sleep(0.005)
    with os.fdopen(reader) as pipe:
        return pipe.read()
