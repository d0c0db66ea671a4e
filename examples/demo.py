"""The main job, end to end: an fp8 Llama MLP through `torch.compile(mlp, backend="cute")`.

Without a GPU, it explains what is fused, shows the arithmetic of a kernel, compiles all kernels for Ada,
Hopper and Blackwell, and compares the regions' replay with eager. On a Hopper or Blackwell GPU it also runs,
checks and times them. It prints at most 60 lines, and ends with the commands that show the rest.
"""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path

import torch
from llama_mlp import LlamaMLP
from rich.rule import Rule
from torch import Tensor

import cute_backend
from cute_backend.api import Explanation
from cute_backend.bench.command import compare as timed
from cute_backend.planning import Arch
from cute_backend.presentation import terminal
from cute_backend.simulator.simulate import reference

ARCHS = ("sm_89", "sm_90a", "sm_100a", "sm_120a")
"""Ada, Hopper, and Blackwell with tensor memory and without."""

PYTHON = Path(os.path.relpath(sys.executable))
"""This interpreter, which `make demo` has made in .venv."""

TOLERANCE = 0.03
"""The allowed error, relative in norm. The hidden activations are quantised to e4m3 between the kernels, and
a fused epilogue does not round to bf16 first, so some of them round the other way."""

console = terminal.console()


def main() -> int:
    title("An fp8 Llama MLP, as its author writes it")
    terminal.print_source(inspect.getsource(LlamaMLP.forward))
    gpu = gpu_name()
    mlp, x, residual = block(gpu is not None)
    with torch.no_grad():
        title('What torch.compile(mlp, backend="cute") makes of it')
        with console.status("tracing"):
            explained = cute_backend.explain(mlp, x, residual)
            source = explained.regions[0].source()
        summarise(explained)
        title(f"The arithmetic of region 0 on {explained.arch}")
        show_arithmetic(source)
        title("Every kernel, compiled here")
        spills = build_all(explained)
        title("Is it right?")
        if gpu:
            right = run(mlp, x, residual)
            title(f"How fast is it on this {gpu}?")
            console.print(timed(mlp, (x, residual)))
        else:
            right = replay(mlp, x, residual)
    console.print("\nShown: what is fused, a kernel, what each asks of a GPU, whether they are right.")
    console.print(f"Next: {PYTHON} -m cute_backend explain examples/llama_mlp.py:mlp", soft_wrap=True)
    return 0 if right and spills == 0 else 1


def summarise(explained: Explanation) -> None:
    """Prints the products, the formula and the refusals. `explain` prints more."""
    for index, region in enumerate(explained.regions):
        m, n, k = region.sizes
        weights = " and ".join(product.label for product in region.products)
        console.print(f"[bold]region {index}[/]: {weights}, M {m}, N {n}, K {k}")
        for line in region.formula.splitlines():
            console.print(f"    {line}", style="cyan", soft_wrap=True)
    for each in explained.rejections:
        console.print(f"[bold]not fused[/]: {each.node} at {each.where}, {each.reason.value}")


def show_arithmetic(source: str) -> None:
    """The part of a module that visits the tile."""
    lines = source.splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if "def visit(" in line)
    end = lines.index("\n", first)
    terminal.print_source("".join(lines[first:end]))
    console.print(
        f"Lines {first + 1} to {end} of {len(lines)}; all of them:\n"
        f"{PYTHON} -m cute_backend source examples/llama_mlp.py:mlp",
        soft_wrap=True,
    )


def block(gpu: bool) -> tuple[LlamaMLP, Tensor, Tensor]:
    """The MLP and its inputs: of Llama 3.1 8B with 4096 tokens on a GPU, else of Llama 3.2 1B with 128."""
    tokens, hidden, intermediate = (2048, 4096, 14336) if gpu else (64, 2048, 8192)
    torch.manual_seed(0)
    with torch.device("cuda" if gpu else "cpu"):
        x, residual = torch.randn(2, 2, tokens, hidden, dtype=torch.bfloat16)
        return LlamaMLP(hidden, intermediate), x, residual


def gpu_name() -> str | None:
    """The GPU here, if kernels are generated for it."""
    if not torch.cuda.is_available() or Arch.of_capability(torch.cuda.get_device_capability()) is None:
        return None
    return torch.cuda.get_device_name()


def title(text: str) -> None:
    console.print()
    console.print(Rule(f"[bold]{text}", align="left"))


def build_all(explained: Explanation) -> int:
    """Build every region for each of ARCHS. Returns the bytes that they spill, together."""
    builds = []
    with console.status("compiling") as status:
        for index, region in enumerate(explained.regions):
            for arch in ARCHS:
                status.update(f"compiling region {index} for {arch}")
                builds.append((f"region {index}", region.kernel(arch), region.build(arch)))
    console.print(terminal.build_table(builds))
    return sum(built.spill_bytes for _, _, built in builds)


def replay(mlp: LlamaMLP, x: Tensor, residual: Tensor) -> bool:
    """Compare the fused regions' specs, replayed on the CPU, with eager."""
    with console.status("replaying"):
        actual = reference(mlp, (x, residual))
    how = "replayed on the CPU, as there is no Hopper or Blackwell GPU here"
    return compare(actual, mlp(x, residual), how)


def run(mlp: LlamaMLP, x: Tensor, residual: Tensor) -> bool:
    """Compare the kernels with eager."""
    fused = torch.compile(mlp, backend="cute")
    with console.status("compiling"):
        actual = fused(x, residual)
    return compare(actual, mlp(x, residual), "run on the GPU")


def compare(actual: Tensor, expected: Tensor, how: str) -> bool:
    error = ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
    verdict = "[green]agrees" if error < TOLERANCE else "[bold red]WRONG"
    console.print(f"{how}: differs from eager by {error:.2%} in norm, {TOLERANCE:.0%} is allowed: {verdict}")
    return error < TOLERANCE


if __name__ == "__main__":
    sys.exit(main())
