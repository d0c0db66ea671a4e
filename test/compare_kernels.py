"""Whether the working tree's kernels are those of another revision. No GPU is needed:

    python test/compare_kernels.py --base main              every golden module, tile and epilogue
    python test/compare_kernels.py --base main --goldens    the golden modules alone
    python test/compare_kernels.py --base main --only swiglu-sm_90a    all whose names match
    python test/compare_kernels.py --base main --only .     every tile with every epilogue

Both trees are copied, and in each its own `support/shipped.py` lists the kernels and compiles them. PTX is
compared once the names of entries and symbols are replaced, and machine code as it is: ptxas goes by names
too. Where they differ, registers, spill bytes, shared memory and the number of each opcode are compared. What
the host code does besides (its checks, the grid, the tensor maps) is not: the simulator runs it.

The exit status is 0 where every kernel has the same text, code or figures; 1 where one differs, fails to
compile or is in one tree alone; 2 where the comparison itself fails.

What was compiled is kept in `--cache` by a digest of the tree's sources and the compiler's version: a second
run compiles only what has changed. A kernel takes 2 to 8 seconds on a quiet core. There are 64 golden modules
and 872 kernels of `cover`, so with 2 processes a tree costs 2 minutes for the former, and half an hour for
the latter. Every tile with every epilogue is 6,346 kernels.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ("registers", "spill bytes", "shared memory")
BATCH = 20
"""Kernels of one process: it takes 5 to 10 seconds to start, and the compiler keeps some of each kernel."""
KEPT_S = 14 * 86400
"""Seconds after its last use before a tree is removed from the cache."""


class Verdict(Enum):
    """The result of comparing one kernel, from the same to the most different."""

    SAME_TEXT = "have the same PTX and machine code"
    SAME_CODE = "have other PTX and the same machine code"
    SAME_FIGURES = "have other machine code with the same figures and opcodes"
    DIFFERENT = "differ"
    UNBUILT = "do not compile"
    ALONE = "are in one tree alone"

    @property
    def is_fault(self) -> bool:
        return self in (Verdict.DIFFERENT, Verdict.UNBUILT, Verdict.ALONE)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", required=True, metavar="REV", help="the revision to compare with")
    parser.add_argument("--goldens", action="store_true", help="the golden modules alone")
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression of the names")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes that compile (default 2)")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", default=_default_cache(), help="where they are kept"
    )
    arguments = parser.parse_args()
    if arguments.goldens:
        arguments.only = f"^golden/.*(?:{arguments.only})"
    with tempfile.TemporaryDirectory(prefix="compare_kernels_") as scratch:
        base, here = Path(scratch, "base"), Path(scratch, "here")
        _archive(arguments.base, base)
        _copy(here)
        trees = [Tree(path, arguments.cache, arguments.jobs) for path in (base, here)]
        listed = [tree.listed(arguments.only) for tree in trees]
        names = dict.fromkeys(one["name"] for each in listed for one in each)
        chosen = set(names if arguments.only else cover(names))
        before, after = (
            tree.kernels([one for one in each if one["name"] in chosen])
            for tree, each in zip(trees, listed, strict=True)
        )
    if not before and not after:
        parser.error(f"no kernel of either tree is called {arguments.only}")
    return report(before, after)


def _fail(message: str) -> NoReturn:
    print(f"compare_kernels: {message}", file=sys.stderr)
    sys.exit(2)


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "cute_backend_compare")


def _archive(revision: str, target: Path) -> None:
    """The sources of a revision."""
    command = ["git", "-C", str(ROOT), "archive", revision, "cute_backend", "test"]
    archive = subprocess.run(command, capture_output=True, check=False)
    if archive.returncode:
        _fail(f"{revision} can't be read: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(target, filter="data")


def _copy(target: Path) -> None:
    """The sources here, as they are now: they may be edited while they are compiled."""
    for name in ("cute_backend", "test"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))


class Tree:
    """One of the two trees, whose kernels are listed and compiled by processes that import nothing else."""

    def __init__(self, path: Path, cache: Path, jobs: int) -> None:
        self.path, self.jobs = path, jobs
        digest = hashlib.sha256(version("nvidia-cutlass-dsl").encode())
        support = path.glob("test/support/**/*.py")
        for source in sorted([*path.glob("cute_backend/**/*.[pc]*"), *path.glob("test/*.py"), *support]):
            if source.is_file():
                digest.update(source.relative_to(path).as_posix().encode() + b"\0" + source.read_bytes())
        self.cache = cache / digest.hexdigest()[:16]
        self.cache.mkdir(parents=True, exist_ok=True)
        os.utime(self.cache)
        for other in cache.iterdir():
            if other.stat().st_mtime < time.time() - KEPT_S:
                shutil.rmtree(other, ignore_errors=True)

    def kernels(self, listed: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The record of each of these kernels by name; `{"error": ...}` if it does not compile."""
        made = self._compile({one["code"]: one for one in listed})
        return {one["name"]: made[one["code"]] for one in listed}

    def listed(self, pattern: str) -> list[dict[str, Any]]:
        """The kernels whose names match."""
        kept = self.cache / f"list-{hashlib.sha256(pattern.encode()).hexdigest()[:16]}.json"
        if not kept.exists():
            with self._process("list", pattern) as process:
                text, _ = process.communicate()
            if process.returncode:
                _fail(f"the kernels of {self.path.name} can't be listed")
            _write(kept, text.encode())
        return [json.loads(line) for line in kept.read_text().splitlines()]

    def _compile(self, wanted: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        missing = [one for code, one in wanted.items() if not self._path(code).exists()]
        batches = [missing[i : i + BATCH] for i in range(0, len(missing), BATCH)]
        failed: dict[str, dict[str, Any]] = {}
        numbers = count(1)

        def work(batch: list[dict[str, Any]]) -> None:
            with self._process("build") as process:
                for one in batch:
                    made = _asked(process, one)
                    if "error" in made:
                        failed[one["code"]] = made
                    else:
                        _write(self._path(one["code"]), gzip.compress(json.dumps(made).encode()))
                    number = next(numbers)
                    print(f"{self.path.name}: {number} of {len(missing)}: {one['name']}", file=sys.stderr)
                process.communicate()

        with ThreadPoolExecutor(self.jobs) as pool:
            for _ in pool.map(work, batches):
                pass
        return {code: failed.get(code) or self._kept(code) for code in wanted}

    def _path(self, code: str) -> Path:
        return self.cache / f"{code}.json.gz"

    def _kept(self, code: str) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(gzip.decompress(self._path(code).read_bytes()))
        return record

    def _process(self, *command: str) -> subprocess.Popen[str]:
        surroundings = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self.path), str(self.path / "test")]),
            "CUTE_BACKEND_CACHE_DIR": str(self.path / "cache"),
        }
        surroundings.pop("CUTE_BACKEND_SOURCES", None)
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), f"--{command[0]}", *command[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.path,
            env=surroundings,
        )


def _asked(process: subprocess.Popen[str], one: dict[str, Any]) -> dict[str, Any]:
    """The record of a kernel that a process which serves `--build` compiles."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(one["kernel"]) + "\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
    except (BrokenPipeError, json.JSONDecodeError):
        _fail(f"the process that compiled {one['name']} ended")
    return answer


def _write(path: Path, content: bytes) -> None:
    """A file as a whole: several comparisons may share a cache."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def cover(names: Iterable[str]) -> list[str]:
    """Of the names of `support/shipped.py`, every golden module, and of the configurations enough that each
    tile of an architecture occurs with each alignment, and each epilogue with each architecture."""
    tables: dict[str, list[str]] = {}
    for name in names:
        table, _, tile = name.rpartition("/")
        tables.setdefault(name if table == "golden" else table, []).append(tile)
    met: set[tuple[str, str]] = set()
    found: list[str] = []
    for table, tiles in tables.items():
        if table.startswith("golden/"):
            found.append(table)
            continue
        arch = table.rpartition("-")[2]
        tiles = [tile for tile in tiles if (arch, tile) not in met] or tiles[:1]
        met.update((arch, tile) for tile in tiles)
        found += (f"{table}/{tile}" for tile in tiles)
    return found


def in_tree(mode: str, pattern: str) -> None:
    """Runs in each tree: lists its kernels, or compiles those that stdin describes, one a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != ROOT / "test"]
    from support import shipped  # type: ignore[import-not-found,unused-ignore]

    if mode == "--list":
        for one in shipped.shipped(lambda label: re.search(pattern, label) is not None):
            line = {"name": one.name, "code": one.code, "kernel": one.kernel.to_dict()}
            print(json.dumps(line), file=answers)
        return
    for line in sys.stdin:
        try:
            made = record(shipped.built(shipped.Kernel.from_dict(json.loads(line))))
        except Exception as error:
            made = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(made), file=answers, flush=True)


def record(built: dict[str, Any]) -> dict[str, Any]:
    """The parts of a kernel that are compared: its text without names, its figures, digests of its code."""
    sections = dict(sections_of(built["cubin"]))
    code = [content for name, content in sections.items() if name.startswith(".text.")]
    return {
        "ptx": without_names(built["ptx"]),
        "code": sorted(hashlib.sha256(each).hexdigest() for each in code),
        "opcodes": dict(sum(map(opcodes, code), Counter())),
        **{figure: built[figure] for figure in FIGURES},
    }


def without_names(ptx: str) -> str:
    """PTX without comments, the names of its entries and module-wide symbols replaced by their numbers."""
    text = re.sub(r"[ \t]*//.*", "", ptx)
    entries = re.findall(r"\.entry\s+([\w$]+)", text)
    symbols = re.findall(r"^(?:\.\w+\s+(?:\d+\s+)?)+([\w$]+)(?=[\[; =])", text, re.MULTILINE)
    names = {name: f"entry{number}" for number, name in enumerate(entries)}
    names |= {name: f"symbol{number}" for number, name in enumerate(symbols) if name not in names}
    longest_first = sorted(names, key=len, reverse=True)
    if longest_first:
        pattern = r"(?<![\w$%])(?:" + "|".join(map(re.escape, longest_first)) + r")(?![a-zA-Z0-9$])"
        text = re.sub(pattern, lambda match: names[match[0]], text)
    return text


def sections_of(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of the sections of a cubin, a 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, _flags, _address, offset, length in headers:
        end = elf.index(b"\0", names + name)
        yield elf[names + name : end].decode(), b"" if kind == 8 else elf[offset : offset + length]


def opcodes(code: bytes) -> Counter[str]:
    """How often each opcode occurs in SASS, by number: from compute capability 7.0 on an instruction has 16
    bytes, and its low 12 bits are the opcode with the form of its operands."""
    words = (int.from_bytes(code[i : i + 2], "little") for i in range(0, len(code), 16))
    return Counter(f"{word & 0xFFF:#05x}" for word in words)


@dataclass(frozen=True)
class Comparison:
    """One kernel in both trees; `facts` are a row of the table, for all but the same text."""

    name: str
    verdict: Verdict
    facts: str = ""


def compare(name: str, before: dict[str, Any] | None, after: dict[str, Any] | None) -> Comparison:
    """Compares a kernel of two trees; None is one that a tree lacks."""
    if before is None or after is None:
        return Comparison(name, Verdict.ALONE, "the base only" if after is None else "the working tree only")
    for tree, made in (("base", before), ("working tree", after)):
        if "error" in made:
            return Comparison(name, Verdict.UNBUILT, f"{tree}: {made['error']}")
    # Shared memory is what the host code asks for, and no part of the text; ptxas goes by names too.
    figures_kept = all(before[figure] == after[figure] for figure in FIGURES)
    if figures_kept and all(before[what] == after[what] for what in ("ptx", "code")):
        return Comparison(name, Verdict.SAME_TEXT)
    facts = [f"{figure} {_change(before[figure], after[figure])}" for figure in FIGURES]
    facts.append(f"instructions {_change(*(sum(made['opcodes'].values()) for made in (before, after)))}")
    if figures_kept and before["code"] == after["code"]:
        return Comparison(name, Verdict.SAME_CODE, ", ".join(facts))
    if figures_kept and before["opcodes"] == after["opcodes"]:
        return Comparison(name, Verdict.SAME_FIGURES, ", ".join(facts))
    return Comparison(name, Verdict.DIFFERENT, ", ".join([*facts, *_changed(before, after)]))


def _change(before: int, after: int) -> str:
    return f"{before}" if before == after else f"{before} -> {after}"


def _changed(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """The opcodes of which there are more or fewer, the greatest change first."""
    counts = Counter(after["opcodes"])
    counts.subtract(before["opcodes"])
    changed = sorted((one for one in counts.items() if one[1]), key=lambda one: -abs(one[1]))
    yield from (f"opcode {opcode} {count:+d}" for opcode, count in changed[:6])
    if len(changed) > 6:
        yield f"and {len(changed) - 6} opcodes more"


def report(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> int:
    """Prints the table and what it comes to. Returns the exit status."""
    names = dict.fromkeys([*before, *after])
    compared = [compare(name, before.get(name), after.get(name)) for name in names]
    told: Sequence[Comparison] = [one for one in compared if one.verdict is not Verdict.SAME_TEXT]
    for verdict in Verdict:
        rows: Iterable[Comparison] = [one for one in told if one.verdict is verdict]
        if rows:
            print(f"\nThese {verdict.value}:")
        for one in rows:
            print(f"    {one.name}\n        {one.facts}")
    counts = Counter(one.verdict for one in compared)
    print(f"\n{len(compared)} kernels:", ", ".join(f"{counts[v]} {v.value}" for v in Verdict if counts[v]))
    return int(any(one.verdict.is_fault for one in compared))


if __name__ == "__main__":
    if sys.argv[1:2] in (["--list"], ["--build"]):
        in_tree(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
        sys.exit(0)
    sys.exit(main())
