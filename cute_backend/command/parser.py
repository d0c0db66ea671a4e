"""The arguments of the commands. Nothing here imports torch, so that help and a typo are answered at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from typing import NoReturn

from cute_backend import __version__
from cute_backend.errors import UsageError
from cute_backend.planning import Arch
from cute_backend.variables import SOURCES_VARIABLE


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


COMMANDS = {
    "explain": "what is fused, how each operand is loaded, and why the rest is not fused",
    "source": "print a region's kernel as CuTe DSL Python or, with -o, write it to a folder for editing",
    "build": "compile every region and print registers, spills and shared memory; needs no GPU",
    "simulate": "run every region's kernel on the simulated machine and compare with the reference",
    "bench": "time the function, or the built-in tables, beside what else could run them; needs a GPU",
    "aot": "compile every kernel that a program can ask for, into one file that serves it; needs no GPU",
    "cache": "what the folder of compiled kernels holds, what a kernel is, and whether all are sound",
    "fuzz": "compile random programs, compare with eager and Inductor, and print the smallest that is wrong",
    "doctor": "print versions, GPUs, cache, packs, settings and what is missing, to paste into a report",
}
"""Every command, and what it does."""

CACHE_ACTIONS = ("info", "show", "verify", "clear", "path")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of one command, whose name is `command`. Raises UsageError; exits after `--help` and
    `--version`, which print."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(
        prog="cute_backend",
        description="Shows, builds, simulates and times what cute_backend makes of a function, and manages "
        "compiled kernels.",
    )
    parser.add_argument("--version", action="version", version=f"cute_backend {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", parser_class=_Parser)
    for command, about in COMMANDS.items():
        sub = commands.add_parser(command, help=about, description=about)
        _OPTIONS[command](sub)
    named = next((word for word in words if not word.startswith("-")), None)
    if named is not None and named not in COMMANDS:
        close = get_close_matches(named, COMMANDS, n=1)
        suggestion = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(COMMANDS)}"
        raise UsageError(f"there is no command {named!r}; {suggestion}")
    arguments = parser.parse_args(words)
    if arguments.command is None:
        raise UsageError(f"give a COMMAND: {', '.join(COMMANDS)}")
    return arguments


def _add_file(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    parser.add_argument(
        "file", metavar="FILE.py[:name]", nargs=nargs, help="defines the function, and example_inputs()"
    )


def _add_arch(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--arch", metavar="ARCH", help=f"{Arch.listed('or')} (default: {default})")


def _add_region_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `build`, which are the first of `explain` and `source` too."""
    _add_file(parser)
    _add_arch(parser, "the GPU here, or sm_100a")
    parser.add_argument("--dynamic", action="store_true", help="trace with symbolic sizes")
    parser.add_argument(
        "--grad",
        action="store_true",
        help="trace with gradients enabled: the forward graph and, if an input or a parameter requires a "
        "gradient, the backward graph",
    )


def _add_explain_options(parser: argparse.ArgumentParser) -> None:
    _add_region_options(parser)
    parser.add_argument(
        "--html",
        metavar="REPORT.html",
        type=Path,
        help="write a page instead, with the graph of regions and the generated modules",
    )


def _add_source_options(parser: argparse.ArgumentParser) -> None:
    _add_region_options(parser)
    parser.add_argument(
        "--region", metavar="N", type=_whole, default=0, help="the number of the region (default: 0)"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FOLDER",
        type=Path,
        help=f"write the module to FOLDER, to be edited; {SOURCES_VARIABLE}=FOLDER then uses it",
    )


def _add_simulate_options(parser: argparse.ArgumentParser) -> None:
    _add_file(parser)
    _add_arch(parser, "sm_100a")
    parser.add_argument(
        "--async-seed", metavar="N", type=int, help="complete asynchronous work in this random order"
    )
    parser.add_argument(
        "--timeline",
        metavar="FILE.png",
        type=Path,
        help="draw what the first region's warps do when; needs matplotlib",
    )


def _add_cache_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=CACHE_ACTIONS)
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="show this kernel alone: its digest or its name"
    )


def _add_aot_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", metavar="FILE.py[:name]", nargs="+", help="defines the function, and example_inputs()"
    )
    parser.add_argument("-o", "--output", dest="pack", metavar="FILE.cutepack", type=Path, required=True)
    parser.add_argument(
        "--arch",
        metavar="ARCH",
        action="append",
        default=[],
        help=f"{Arch.listed('or')}; may be given again (default: all of them)",
    )
    parser.add_argument(
        "--m",
        metavar="LOW:HIGH",
        type=_range,
        help="rows of the products that are served (default: those of the example inputs)",
    )
    parser.add_argument(
        "--any-size",
        action="store_true",
        help="serve products of any size with the few tiles that are for unknown sizes",
    )
    parser.add_argument(
        "--sm-count",
        metavar="N",
        type=_positive,
        action="append",
        default=[],
        help="multiprocessors of the GPUs that are served, "
        f"if not an {Arch.listed('or', attrgetter('gpu'))}; may be given again",
    )


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number that is not negative")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _layers(text: str) -> int | None:
    """A number of layers, or None for all."""
    return None if text == "all" else _whole(text)


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high)):
        raise argparse.ArgumentTypeError(f"{text!r} is no range LOW:HIGH, such as 1:4096 or 16:16")
    return int(low), int(high)


def _add_bench_options(parser: argparse.ArgumentParser) -> None:
    _add_file(parser, nargs="?")
    parser.add_argument(
        "--rows",
        metavar="PATTERN",
        nargs="+",
        default=[],
        help="which of the built-in tables (scaled_mm, sampling, losses, row_maxima, gated, block_scaled, "
        "grouped, grouped_fp8, int8, weights) or of their rows, such as '16x*' or 'H16-*' (default: all)",
    )
    parser.add_argument(
        "--models",
        metavar="PATTERN",
        nargs="*",
        help="instead, time layers of whole models, or of those that are named, such as 'llama-*'; with "
        "--json, goes on where an earlier run of this package stopped",
    )
    parser.add_argument(
        "--first-call",
        metavar="PATTERN",
        nargs="*",
        help="instead, time the first call of the models in new processes, with empty and with filled caches",
    )
    parser.add_argument(
        "--layers",
        metavar="N",
        type=_layers,
        default=2,
        help="layers of the models of --first-call, or all (default: 2)",
    )
    parser.add_argument(
        "--times",
        metavar="N",
        type=int,
        default=1,
        help="how often each first call of --first-call is timed, alternately (default: 1)",
    )
    parser.add_argument("--rounds", metavar="N", type=int, default=50, help="timings of each (default: 50)")
    parser.add_argument(
        "--peers", action="store_true", help="also max-autotune, and QuACK where installed; takes long"
    )
    parser.add_argument(
        "--host",
        action="store_true",
        help="instead, time calls on the host and a kernel's cold and warm start",
    )
    parser.add_argument(
        "--json",
        metavar="PATH",
        type=Path,
        help="write the results; a PATH without .json is a folder, for <gpu>-<date>.json",
    )
    parser.add_argument(
        "--picture",
        metavar="FILE.png",
        type=Path,
        help="draw the speeds and the limit, and again for dark pages, as FILE-dark.png",
    )
    parser.add_argument(
        "--draw",
        metavar="RESULTS.json",
        type=Path,
        help="instead, show results that were written; needs no GPU",
    )


def _add_fuzz_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--count", metavar="N", type=_positive, default=100, help="the number of programs (default: 100)"
    )
    parser.add_argument(
        "--seed", metavar="S", type=int, default=0, help="the seed of the sequence of programs (default: 0)"
    )
    parser.add_argument(
        "--first", metavar="I", type=_whole, default=0, help="the index of the first program (default: 0)"
    )
    parser.add_argument(
        "--replay",
        action="store_true",
        help="the walker and the replay alone: Inductor generates no code, and eager takes its place",
    )
    parser.add_argument(
        "--emulate",
        action="store_true",
        help="emulate_precision_casts is on for all programs, instead of for half of them",
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.set_defaults(kind="any")
    kinds.add_argument(
        "--forms",
        dest="kind",
        action="store_const",
        const="forms",
        help="programs of every form, which are only checked to raise nothing",
    )
    kinds.add_argument(
        "--attention",
        dest="kind",
        action="store_const",
        const="attention",
        help="projections whose columns are heads: rotated, normed, packed, copied",
    )
    kinds.add_argument(
        "--weights",
        dest="kind",
        action="store_const",
        const="weights",
        help="weights of 8 bits, with scales of columns or of groups of K, and zeros",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: cpu)")
    parser.add_argument(
        "--jobs", metavar="J", type=_positive, default=1, help="processes that compile and run (default: 1)"
    )


_OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "explain": _add_explain_options,
    "source": _add_source_options,
    "build": _add_region_options,
    "simulate": _add_simulate_options,
    "bench": _add_bench_options,
    "aot": _add_aot_options,
    "cache": _add_cache_options,
    "fuzz": _add_fuzz_options,
    "doctor": lambda parser: None,
}
