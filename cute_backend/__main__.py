"""`python -m cute_backend explain|source|build|simulate|bench FILE.py[:name] [--arch sm_90a|sm_100a]`,
`python -m cute_backend aot FILE.py[:name] ... -o FILE.cutepack`, `python -m cute_backend cache info|show|
verify|clear|path`, and `python -m cute_backend fuzz`.

FILE defines a function (or a module) and `example_inputs()`, which returns its arguments, as a tuple, or as
`(args, kwargs)`; `bench` without it runs the built-in tables, and `fuzz` takes none, as it draws programs.
What is wrong with a request is told in one sentence, with exit status 2. What is wrong in a simulated kernel,
in a result that is timed or in that of a drawn program ends with status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from . import __version__, cache_command
from .errors import UsageError, check_function, root_cause
from .planning import Arch
from .runtime.kernel import BuildError, UnavailableError
from .runtime.pack import PackError
from .runtime.reach import Problem
from .runtime.source import SOURCES_VARIABLE, edited_folder, file_name

if TYPE_CHECKING:
    from .api import Explanation


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0, 1 for a faulty kernel, 2 for what cannot be done, 130
    where `fuzz` was interrupted."""
    try:
        arguments = _parser().parse_args(argv)
        return arguments.command(arguments) or 0
    except (UsageError, BuildError, UnavailableError, PackError) as error:
        print("cute_backend:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="cute_backend", description="What cute_backend makes of a function, seen without running it."
    )
    parser.add_argument("--version", action="version", version=f"cute_backend {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser)
    for command, about in (
        (_explain, "what is fused, how each operand is loaded, and why the rest is not fused"),
        (_source, "print a region's kernel as CuTe DSL Python, or write it where an edited one is found"),
        (_build, "compile every region and print registers, spills and shared memory; needs no GPU"),
        (_simulate, "run every region's kernel on the simulated machine and compare with the reference"),
        (_bench, "time the function, or the built-in tables, beside what else could run them; needs a GPU"),
    ):
        sub = commands.add_parser(command.__name__[1:], help=about, description=about)
        sub.add_argument(
            "file",
            metavar="FILE.py[:name]",
            nargs="?" if command is _bench else None,
            help="defines the function, and example_inputs()",
        )
        if command is _bench:
            _add_bench_options(sub)
        else:
            sub.add_argument(
                "--arch", metavar="ARCH", help=f"{Arch.listed('or')} (default: the GPU here, or sm_100a)"
            )
        if command is _source:
            sub.add_argument("--region", metavar="N", type=int, default=0, help="which (default: 0)")
            sub.add_argument(
                "-o",
                "--output",
                metavar="FOLDER",
                type=Path,
                help=f"write it there, to be edited: with {SOURCES_VARIABLE}=FOLDER it is what runs",
            )
        if command is _simulate:
            sub.add_argument(
                "--async-seed", metavar="N", type=int, help="complete asynchronous work in this random order"
            )
            sub.add_argument(
                "--timeline", metavar="FILE.png", type=Path, help="draw what the first region's warps do when"
            )
        sub.set_defaults(command=command)
    _add_aot(commands)
    about = "what the folder of compiled kernels holds; what a kernel is; is it sound; empty it; where it is"
    sub = commands.add_parser("cache", help=about, description=about)
    sub.add_argument("action", choices=cache_command.ACTIONS)
    sub.add_argument("name", nargs="?", metavar="NAME", help="show this kernel alone: its digest or its name")
    sub.set_defaults(command=cache_command.main)
    about = "compile random programs, compare with eager and Inductor, and print the smallest that is wrong"
    fuzz = commands.add_parser("fuzz", help=about, description=about)
    _add_fuzz_options(fuzz)
    fuzz.set_defaults(command=_fuzz)
    parser.set_defaults(command=lambda _: parser.error(f"give a COMMAND: {', '.join(commands.choices)}"))
    return parser


def _add_aot(commands: argparse._SubParsersAction[_Parser]) -> None:
    about = "compile every kernel that a program can ask for, into one file that serves it; needs no GPU"
    sub = commands.add_parser("aot", help=about, description=about)
    sub.add_argument(
        "files", metavar="FILE.py[:name]", nargs="+", help="defines the function, and example_inputs()"
    )
    sub.add_argument("-o", "--output", metavar="FILE.cutepack", type=Path, required=True)
    sub.add_argument(
        "--arch",
        metavar="ARCH",
        action="append",
        default=[],
        help=f"{Arch.listed('or')}; may be given again (default: all of them)",
    )
    sub.add_argument(
        "--m",
        metavar="LOW:HIGH",
        type=_range,
        help="rows of the products that are served (default: those of the example inputs)",
    )
    sub.add_argument(
        "--sm-count",
        metavar="N",
        type=_positive,
        action="append",
        default=[],
        help="multiprocessors of the GPUs that are served, "
        f"if not an {Arch.listed('or', attrgetter('gpu'))}; may be given again",
    )
    sub.set_defaults(command=_aot)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high)):
        raise argparse.ArgumentTypeError(f"{text!r} is no range LOW:HIGH, such as 1:4096 or 16:16")
    return int(low), int(high)


def _add_bench_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rows",
        metavar="PATTERN",
        nargs="+",
        default=[],
        help="which of the built-in tables (scaled_mm, sampling, row_maxima, gated) or of their rows, "
        "such as '16x*' or 'H16-*' (default: all)",
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
    parser.add_argument("--picture", metavar="FILE.png", type=Path, help="draw the speeds and the limit")
    parser.add_argument(
        "--draw",
        metavar="RESULTS.json",
        type=Path,
        help="instead, show results that were written; needs no GPU",
    )


def _add_fuzz_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", metavar="N", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="of which sequence (default: 0)")
    parser.add_argument("--first", metavar="I", type=int, default=0, help="from which of it on (default: 0)")
    parser.add_argument(
        "--replay",
        action="store_true",
        help="the walker and the replay alone: Inductor generates no code, and eager takes its place",
    )
    parser.add_argument(
        "--forms",
        action="store_true",
        help="programs of every form, of which no more is asked than that nothing raises",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: cpu)")
    parser.add_argument(
        "--jobs", metavar="J", type=int, default=1, help="processes that compile and run (default: 1)"
    )


def _explain(arguments: argparse.Namespace) -> None:
    from . import report

    report.show(_explanation(arguments))


def _source(arguments: argparse.Namespace) -> None:
    from . import report

    explained = _explanation(arguments)
    explained.first_region()
    if not 0 <= arguments.region < len(explained.regions):
        raise UsageError(f"there is no region {arguments.region}; the last is {len(explained.regions) - 1}")
    region = explained.regions[arguments.region]
    text = region.source()
    if arguments.output is None:
        report.print_source(text)
        return
    kernel = region.kernel()
    path = arguments.output / file_name(kernel.spec, kernel.config, kernel.variant)
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(
            f"{error.filename} is there already, and is not overwritten; alike regions share it"
        ) from error
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error}") from error
    print(path)


def _build(arguments: argparse.Namespace) -> None:
    from . import report

    explained = _explanation(arguments)
    explained.first_region()
    console = report.console()
    builds = []
    for index, region in enumerate(explained.regions):
        with console.status(f"compiling region {index} of {len(explained.regions)} for {explained.arch}"):
            builds.append((f"region {index}", region.kernel(), region.build()))
    report.show(report.build_table(builds))


def _aot(arguments: argparse.Namespace) -> None:
    from . import api
    from .aot import Request, find_problems, make_pack

    if edited_folder() is not None:
        raise UsageError(f"a pack holds what is generated: unset {SOURCES_VARIABLE}")
    archs = [api.parse_arch(arch) for arch in arguments.arch] or list(Arch)
    problems: dict[Arch, list[Problem]] = {arch: [] for arch in archs}
    for target in arguments.files:
        fn, inputs = load(target)
        args, kwargs = inputs()
        for arch, found in problems.items():
            with _tracing(target):
                found += find_problems(fn, args, arch, any_m=arguments.m is not None, kwargs=kwargs)
    written = make_pack(Request(problems, arguments.m, arguments.sm_count), arguments.output)
    size = arguments.output.stat().st_size / 2**20
    print(
        f"{arguments.output}: for {' and '.join(each.value for each in archs)}, epilogues: "
        f"{written.epilogues}, kernels: {written.kernels}, {size:.1f} MiB\n"
        f"sha256 of its manifest: {written.sha256}"
    )


def _explanation(arguments: argparse.Namespace) -> Explanation:
    from . import api

    if arguments.arch is not None:
        api.parse_arch(arguments.arch)
    fn, inputs = load(arguments.file)
    args, kwargs = inputs()
    with _tracing(arguments.file):
        return api.explain(fn, *args, arch=arguments.arch, **kwargs)


def _simulate(arguments: argparse.Namespace) -> int:
    from . import report
    from .simulator import api
    from .simulator.errors import SimulationError
    from .simulator.report import Recorder
    from .simulator.timeline import draw

    fn, inputs = load(arguments.file)
    args, kwargs = inputs()
    console = report.console()
    with console.status("compiling") as status:

        def progress(done: int, total: int, instructions: int) -> None:
            status.update(f"simulating: {done} of {total} clusters done, {instructions:,} warp instructions")

        recorder = None if arguments.timeline is None else Recorder()
        machine = api.Machine(
            api.parse_arch(arguments.arch or "sm_100a"),
            arguments.async_seed,
            observer=recorder,
            progress=progress,
        )
        try:
            simulation = api.run(fn, args, machine, kwargs)
        except SimulationError as error:
            print(error, file=sys.stderr)
            return 1
        differences = api.compare(simulation.outputs, api.reference(fn, args, kwargs))
    for launch in simulation.launches:
        report.show(report.launch_table(launch))
    if recorder is not None:
        kernel = simulation.launches[0].kernel
        draw(recorder, arguments.timeline, f"{kernel.arch.value}, tile {kernel.config.name}")
    report.show(report.comparison_table(differences))
    report.show(report.LAUNCH_LEGEND)
    return 0 if all(difference.agrees for difference in differences) else 1


def _bench(arguments: argparse.Namespace) -> int:
    from .bench import command

    return command.main(arguments, load)


def _fuzz(arguments: argparse.Namespace) -> int:
    from .fuzz import command

    return command.main(arguments)


Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a function, and its keyword arguments."""


def load(target: str) -> tuple[Callable[..., Any], Callable[[], Inputs]]:
    """The function named by `FILE.py[:name]`, and a function that makes its example inputs.

    Without a name, FILE has to define exactly one function or module beside `example_inputs`; a name that
    starts with an underscore does not count. Raises UsageError where any of this is not so.
    """
    path, _, name = target.partition(":")
    module = _import_file(Path(path))
    inputs = getattr(module, "example_inputs", None)
    if not callable(inputs):
        raise UsageError(
            f"{path} defines no example_inputs(), which has to return the arguments of the function"
        )
    candidates = dict(_candidates(module))
    if not name:
        if len(candidates) != 1:
            found = ", ".join(candidates) or "none"
            raise UsageError(f"{path} defines {found} beside example_inputs; name one function: {path}:name")
        (name,) = candidates
    fn = getattr(module, name, None)
    if not callable(fn):
        raise UsageError(f"{path} defines no function {name!r}; it defines {', '.join(candidates) or 'none'}")
    check_function(fn)
    return fn, lambda: _call_inputs(path, inputs)


def _import_file(path: Path) -> ModuleType:
    if path.suffix != ".py":
        raise UsageError(f"{path} is not a Python file; give FILE.py or FILE.py:name")
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[spec.name] = module
    with _told_in_one_sentence(f"{path} cannot be imported"):
        spec.loader.exec_module(module)
    return module


def _candidates(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        is_function = inspect.isfunction(value) and value.__module__ == module.__name__
        if (
            (is_function or isinstance(value, torch.nn.Module))
            and not name.startswith("_")
            and name != "example_inputs"
        ):
            yield name, value


def _call_inputs(path: str, inputs: Callable[[], Any]) -> Inputs:
    with _told_in_one_sentence(f"example_inputs() of {path} failed"):
        made = inputs()
    match made:
        case [tuple() | list() as args, dict() as kwargs] if all(isinstance(name, str) for name in kwargs):
            return tuple(args), kwargs
        case tuple() | list():
            return tuple(made), {}
    raise UsageError(
        f"example_inputs() of {path} returned a {type(made).__name__}, not a tuple of arguments, nor such a "
        "tuple and a dict of keyword arguments"
    )


@contextlib.contextmanager
def _tracing(target: str) -> Iterator[None]:
    """Around what runs a program on fakes, for inference."""
    logging.disable(logging.ERROR)  # torch logs a traceback of what it then raises
    try:
        with torch.no_grad(), _told_in_one_sentence(f"{target} cannot be traced on its example inputs"):
            yield
    finally:
        logging.disable(logging.NOTSET)


@contextlib.contextmanager
def _told_in_one_sentence(what: str) -> Iterator[None]:
    """Someone else's code runs here, so anything may be raised; it is reported, not hidden."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        root = root_cause(error)
        reason = next(iter(str(root).splitlines()), "no message")
        raise UsageError(f"{what}: {type(root).__name__}: {reason}") from error


if __name__ == "__main__":
    sys.exit(main())
