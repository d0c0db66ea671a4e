"""A serving process with an empty cache and no compiler: `python serve_pack.py`, with CUTE_BACKEND_PACK set.

It prepares the pack's kernels as a graph of any M would, launches them with an M within the range, aligned
and unaligned, and with an M beyond it, and prints the outcomes as JSON. It needs no GPU, only a description
of one: the compiled host code refuses CPU tensors, and this error shows that it was called.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from typing import NoReturn

import torch
from torch._dynamo.utils import counters

from cute_backend.planning import Arch
from cute_backend.runtime.arguments.device import Device
from cute_backend.runtime.arguments.random_operands import random_operands
from cute_backend.runtime.calls import prepare as preparing
from cute_backend.runtime.calls import spec_kernels
from cute_backend.runtime.calls.launch import launch
from cute_backend.runtime.calls.prepare import prepare
from cute_backend.runtime.compiling import build, compile
from cute_backend.runtime.disk import pack
from cute_backend.runtime.kernels.reach import Problem
from cute_backend.spec import EpilogueSpec


def refuse(*arguments: object, **how: object) -> NoReturn:
    raise AssertionError("the compiler was called")


def main() -> None:
    compile.compile_kernel = subprocess.run = subprocess.Popen = refuse
    for module in (preparing, spec_kernels):
        module.device_at = lambda index: Device(-1, Arch.SM90A, 132, "a GPU")
    spec_kernels.max_active_clusters = lambda index, size: 132 // size
    told = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(pack.packs()) == 1
        for text in json.loads(sys.argv[1]):
            spec = EpilogueSpec.from_json(text)
            prepare([Problem(spec, None, 128, 64)], -1)
            for m, aligned in ((40, True), (40, False), (5000, True)):
                a, b, loads = random_operands(spec, m, 128, 64, torch.Generator())
                if not aligned:
                    loads = [each if each.dim() < 2 else shifted(each) for each in loads]
                try:
                    launch(a, b, loads, text)
                except ValueError as error:
                    told.append(str(error))
    print(
        json.dumps(
            {
                "told": told,
                "counters": dict(counters["cute_backend"]),
                "loaded": sorted(kernel.name for kernel in build._loaded),
                "warnings": [str(each.message) for each in caught if "cute_backend" in str(each.message)],
                "imported": [name for name in ("cutlass", "filelock", "rich") if name in sys.modules],
            }
        )
    )


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, one element further on, where TMA can't read them."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return room.copy_(tensor)


if __name__ == "__main__":
    main()
