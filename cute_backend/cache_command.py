"""`python -m cute_backend cache info|verify|clear|path`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from . import config
from .errors import UsageError
from .runtime.cache import CacheFolderError, KernelCache, cache_root
from .runtime.documents import parse
from .runtime.kernel import environment
from .runtime.upkeep import Entry, Verdict, clear, entries, judge

ACTIONS = ("info", "verify", "clear", "path")


def main(arguments: argparse.Namespace) -> int:
    """Runs one action. Returns the exit status: 1 where `verify` finds what is corrupt."""
    root = cache_root()
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
    return _verify(kernels) if arguments.action == "verify" else _info(root, kernels)


def _info(root: Path, kernels: list[Entry]) -> int:
    limit = f"{config.cache_limit_mb} MiB" if config.cache_limit_mb else "none"
    print(f"folder   {root}")
    print(f"kernels  {len(kernels)}, {_megabytes(sum(entry.size for entry in entries(root)))}; limit {limit}")
    if kernels:
        print(f"used     {_date(kernels[0].used)} to {_date(kernels[-1].used)}")
    print(f"tuned    {_tuned(root / 'tuned.json')}")
    print(f"versions {'; '.join(environment())}")
    return 0


def _verify(kernels: list[Entry]) -> int:
    counts = dict.fromkeys(Verdict, 0)
    for entry in kernels:
        verdict, why = judge(entry)
        counts[verdict] += 1
        if verdict is Verdict.CORRUPT:
            print(f"{entry.name}: {why}")
    print(", ".join(f"{count} {verdict.value}" for verdict, count in counts.items()))
    return 1 if counts[Verdict.CORRUPT] else 0


def _clear(cache: KernelCache) -> None:
    try:
        count, size = clear(cache)
    except OSError as error:
        raise UsageError(f"{cache.root} can't be cleared: {error.strerror}") from error
    print(f"removed from {cache.root}: kernels: {count}, {_megabytes(size)}, and what was tuned")
    if left := [entry.name for entry in entries(cache.root)]:
        print(f"left {len(left)} that other processes are writing, or that can't be removed")


def _tuned(path: Path) -> str:
    try:
        return f"{len(parse(path.read_bytes())['problems'])} problems"
    except FileNotFoundError:
        return "nothing"
    except (OSError, KeyError, TypeError, ValueError):
        return f"{path} can't be read"


def _megabytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
