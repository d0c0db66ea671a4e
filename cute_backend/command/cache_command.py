"""`python -m cute_backend cache info|show [NAME]|verify|clear|path`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from cute_backend.errors import UsageError
from cute_backend.planning.naming import DIGEST
from cute_backend.runtime.disk.cache import CacheFolderError, KernelCache, cache_root
from cute_backend.runtime.disk.upkeep import ENTRY, Entry, Soundness, clear, entries, judge
from cute_backend.runtime.host.documents import parse
from cute_backend.runtime.kernels.kernel import Kernel, environment

LATEST = 5
"""The number of kernels that `info` names."""


def main(arguments: argparse.Namespace) -> int:
    """Runs one action. Returns the exit status: 1 if `verify` finds a corrupt kernel."""
    try:
        root = cache_root()
    except CacheFolderError as error:
        raise UsageError(str(error)) from error
    if arguments.name is not None and arguments.action != "show":
        raise UsageError(f"cache {arguments.action} takes no name; cache show does")
    if arguments.action == "path":
        print(root)
        return 0
    if not root.exists():
        print(f"{root} does not exist yet: nothing was compiled")
        return 0
    try:
        cache = KernelCache(root)
    except CacheFolderError as error:
        raise UsageError(str(error)) from error
    if arguments.action == "clear":
        _clear(cache)
        return 0
    kernels = [entry for entry in entries(root) if entry.is_kernel]
    if arguments.action == "show":
        return _show(root, kernels, arguments.name)
    return _verify(kernels) if arguments.action == "verify" else _info(root, kernels)


def _info(root: Path, kernels: list[Entry]) -> int:
    from cute_backend import config  # here, as below: it imports torch, which the other actions don't need

    limit = f"{config.cache_limit_mb} MiB" if config.cache_limit_mb else "none"
    print(f"folder   {root}")
    print(f"kernels  {len(kernels)}, {_mebibytes(sum(entry.size for entry in entries(root)))}; limit {limit}")
    if kernels:
        print(f"used     {_date(kernels[0].used)} to {_date(kernels[-1].used)}")
        print(f"latest   {', '.join(_entry_name(entry) for entry in reversed(kernels[-LATEST:]))}")
    print(f"tuned    {_tuned(root / 'tuned.json')}")
    print(f"versions {'; '.join(environment())}")
    return 0


def _show(root: Path, kernels: list[Entry], name: str | None) -> int:
    """Lists the kernels, or prints those of one name: a digest, or the name in a profiler, a log or a
    file."""
    if name is None:
        if not kernels:
            print(f"{root} has no kernels")
        for entry in reversed(kernels):
            print(f"{_date(entry.used)}  {_entry_name(entry)}")
        return 0
    found = [entry for entry in kernels if _is_called(entry, name)]
    if not found:
        raise UsageError(
            f"{root} has no kernel {name!r}; expected one that `cache show` lists, or the 8 digits at its end"
        )
    print("\n\n".join(_described(entry) for entry in found))
    return 0


def _entry_name(entry: Entry) -> str:
    """The name that profilers show for a kernel, or the name of its file if the entry was written before
    kernels had such names."""
    return entry.name.rpartition("_")[0] if DIGEST.search(entry.name) else entry.name


def _is_called(entry: Entry, name: str) -> bool:
    name = Path(name).name.partition(".")[0]  # a file of the cache
    asked, has = DIGEST.search(name), DIGEST.search(entry.name)
    return entry.name == name or (asked is not None and has is not None and asked[1] == has[1])


def _described(entry: Entry) -> str:
    """A kernel's spec, tile and figures, as its entry has them."""
    from cute_backend.memory_ops.schedule import kernel_formula

    path = next(path for path in entry.files if path.suffix == ENTRY)
    try:
        data: dict[str, Any] = parse(path.read_bytes())
        kernel = Kernel.from_dict(data["kernel"])
        needs = (data["registers"], data["spill_bytes"], data["smem_bytes"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} can't be read: {error}") from error
    plan = kernel.plan
    loads = [f"{load.name}, {load.kind.value}, {load.dtype.value}" for load in plan.spec.loads]
    target = f"{plan.arch.value}, tile {plan.tile.name}, {plan.alignment.words}"
    current = tuple(data["environment"]) == environment()
    rows = {
        "computes": kernel_formula(plan.spec).splitlines(),
        "reads": loads or ["nothing beside A and B"],
        "target": [target, plan.tile.words],
        "needs": ["{} registers, {} bytes spilled, {} bytes of shared memory".format(*needs)],
        "module": [str(path.with_suffix(".py")) + ("" if kernel.edited is None else ", edited")],
        "used": [_date(entry.used)],
        "versions": ["; ".join(data["environment"]) + ("" if current else ": not what is installed")],
    }
    lines = [kernel.entry]
    for label, texts in rows.items():
        lines += [f"  {label if i == 0 else '':<8} {text}" for i, text in enumerate(texts)]
    return "\n".join(lines)


def _verify(kernels: list[Entry]) -> int:
    counts = dict.fromkeys(Soundness, 0)
    for entry in kernels:
        verdict, why = judge(entry)
        counts[verdict] += 1
        if verdict is Soundness.CORRUPT:
            print(f"{entry.name}: {why}")
    print(", ".join(f"{count} {verdict.value}" for verdict, count in counts.items()))
    return 1 if counts[Soundness.CORRUPT] else 0


def _clear(cache: KernelCache) -> None:
    try:
        count, size = clear(cache)
    except OSError as error:
        raise UsageError(f"{cache.root} can't be cleared: {error.strerror}") from error
    print(f"removed from {cache.root}: kernels: {count}, {_mebibytes(size)}, and what was tuned")
    if left := [entry.name for entry in entries(cache.root)]:
        print(f"left {len(left)} entries that other processes are writing, or that can't be removed")


def _tuned(path: Path) -> str:
    try:
        return f"{len(parse(path.read_bytes())['problems'])} problems"
    except FileNotFoundError:
        return "nothing"
    except (OSError, KeyError, TypeError, ValueError):
        return f"{path} can't be read"


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
