"""An epilogue with one output and no loads, for templates that are not run."""

from __future__ import annotations

import cutlass

from cute_backend.templates.epilogue import SmemOperand


class Bare:
    loads = staged = shared_loads = ()
    stores = ("out0",)
    shared_stores = (SmemOperand("out0", cutlass.BFloat16),)
