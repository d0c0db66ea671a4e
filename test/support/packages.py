"""Packages of AOTInductor for tests."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config as inductor_config

import cute_backend

BF16 = torch.bfloat16

CHEAPLY = {
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
    "cpp.vec_isa_ok": False,
}
"""Options that save time: the C++ compiler takes nearly all of it, in part to find out which vector
instructions there are. Options that this torch does not have are left out."""


class Model(torch.nn.Module):
    """bf16 (rows, k) to (rows, n)."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(k, n, dtype=BF16)
        with torch.no_grad():  # sums of products of small integers are exact, however they are rounded
            for parameter in self.parameters():
                parameter.copy_((torch.arange(parameter.numel()).view(parameter.shape) % 97 == 0).float())

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.up(x)) + 1


ROWS = torch.export.Dim("rows", min=2, max=512)


def make_package(folder: Path, *, k: int, n: int, rows: tuple[int, ...], device: str) -> tuple[Path, Path]:
    """A package of a linear with an epilogue and exact sums, for 2 to 512 rows, and a file of inputs and
    eager's results for each of `rows`, the first of which is exported."""
    model, saved = Model(k, n).to(device).eval(), folder / "expected.pt"
    x = (torch.arange(rows[0] * k, device=device).view(rows[0], k) % 5 - 2).to(BF16)
    with torch.no_grad():
        torch.save([(x[:m].cpu(), model(x[:m]).cpu()) for m in rows], saved)
    return package_of(folder, model, (x,), {"x": {0: ROWS}}), saved


def package_of(folder: Path, model: torch.nn.Module, args: Sequence[Tensor], dynamic: Any) -> Path:
    """A package of a model, made with the pass."""
    package = folder / "model.pt2"
    with torch.no_grad():
        exported = torch.export.export(model, tuple(args), dynamic_shapes=dynamic)
    known = inductor_config.get_config_copy()
    torch._inductor.aoti_compile_and_package(
        exported,
        package_path=str(package),
        inductor_configs={
            "post_grad_custom_pre_pass": cute_backend.epilogue_pass,
            **{name: value for name, value in CHEAPLY.items() if name in known},
        },
    )
    return package


CHEAP = """
import torch._inductor.config
torch._inductor.config.cpp.vec_isa_ok = False
"""
"""Lines for the loading program: loading a package asks the compiler for vector instructions, too."""


def serve(program: str, package: Path, saved: Path) -> list[str]:
    """Runs a program on the two files of `make_package` in a process, and returns the lines that it prints.

    A package that contains libstdc++ crashes when it is loaded, whoever made it, unless the system's library
    is loaded first, as docs/operating.md says.
    """
    environment = {**os.environ}
    if not _shares_libstdcxx(package):
        environment["LD_PRELOAD"] = LIBSTDCXX
    command = [sys.executable, "-c", CHEAP + program, str(package), str(saved)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


LIBSTDCXX = "libstdc++.so.6"


def _shares_libstdcxx(package: Path) -> bool:
    with zipfile.ZipFile(package) as archive:
        (code,) = (archive.read(name) for name in archive.namelist() if name.endswith(".so"))
    return LIBSTDCXX.encode() in code
