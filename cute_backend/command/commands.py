"""The commands that trace or run a program, each a function of its parsed arguments."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cute_backend.command.program import load, tracing
from cute_backend.errors import UsageError
from cute_backend.planning import Arch
from cute_backend.presentation import terminal
from cute_backend.runtime.calls import op as _op  # noqa: F401  programs may call the ops by themselves
from cute_backend.runtime.calls import sample_op as _sample  # noqa: F401
from cute_backend.runtime.disk.pack import PackError
from cute_backend.runtime.host import progress
from cute_backend.runtime.kernels.edited import edited_folder, file_name
from cute_backend.runtime.kernels.source import text_of
from cute_backend.variables import SOURCES_VARIABLE

if TYPE_CHECKING:
    from cute_backend.api import Explanation
    from cute_backend.runtime.kernels.reach import Problem


def explain(arguments: argparse.Namespace) -> None:
    if arguments.html is None:
        terminal.show(_explanation(arguments))
        return
    path = arguments.html
    page = _explanation(arguments).to_html(f"What cute_backend fuses of {Path(arguments.file).name}")
    try:
        path.write_text(page)
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error}") from error
    print(path)


def source(arguments: argparse.Namespace) -> None:
    explained = _explanation(arguments)
    explained.first_region()
    if not 0 <= arguments.region < len(explained.regions):
        raise UsageError(f"there is no region {arguments.region}; the last is {len(explained.regions) - 1}")
    region = explained.regions[arguments.region]
    if arguments.output is None:
        terminal.print_source(region.source())
        return
    kernel = region.kernel()
    path = arguments.output / file_name(kernel.plan)
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:
            file.write(text_of(kernel))
    except FileExistsError as error:
        raise UsageError(
            f"{error.filename} exists already, and is not overwritten; regions with the same kernel share "
            "one file"
        ) from error
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error}") from error
    print(path)


def build(arguments: argparse.Namespace) -> None:
    explained = _explanation(arguments)
    explained.first_region()
    builds = []
    with progress.wait(f"compiling for {explained.arch}", len(explained.regions)) as update:
        for index, region in enumerate(explained.regions):
            builds.append((f"region {index}", region.kernel(), region.build()))
            update(done=index + 1)
    terminal.show(terminal.build_table(builds))


def aot(arguments: argparse.Namespace) -> None:
    if edited_folder() is not None:
        raise UsageError(f"a pack holds what is generated: unset {SOURCES_VARIABLE}")
    if arguments.any_size and arguments.m is not None:
        raise UsageError("--any-size serves any number of rows: leave out --m")
    with progress.wait("tracing", len(arguments.files)) as update:
        from cute_backend.aot import Request, find_problems, make_pack

        archs = [Arch.parse(arch) for arch in arguments.arch] or list(Arch)
        problems: dict[Arch, list[Problem]] = {arch: [] for arch in archs}
        for count, target in enumerate(arguments.files):
            update(f"tracing {Path(target).name}", done=count)
            fn, inputs = load(target)
            args, kwargs = inputs()
            for arch, found in problems.items():
                with tracing(target):
                    found += find_problems(
                        fn,
                        args,
                        arch,
                        any_m=arguments.m is not None,
                        any_size=arguments.any_size,
                        kwargs=kwargs,
                    )
    try:
        written = make_pack(Request(problems, arguments.m, arguments.sm_count), arguments.pack)
    except PackError as error:
        raise UsageError(str(error)) from error
    size = arguments.pack.stat().st_size / 2**20
    served = " and ".join(arch.value for arch, found in problems.items() if found)
    others = " and ".join(arch.value for arch, found in problems.items() if not found)
    print(
        f"{arguments.pack}: for {served}, epilogues: {written.epilogues}, kernels: {written.kernels}, "
        f"{size:.1f} MiB\nsha256 of its manifest: {written.sha256}"
    )
    if others:
        print(f"No kernel is for {others}, because nothing is fused there; explain says why.")


def _explanation(arguments: argparse.Namespace) -> Explanation:
    with progress.wait(f"tracing {Path(arguments.file).name}"):
        from cute_backend import api

        fn, inputs = load(arguments.file)
        args, kwargs = inputs()
        with tracing(arguments.file, gradients=arguments.grad):
            return api.explain(fn, *args, arch=arguments.arch, dynamic=arguments.dynamic or None, **kwargs)


def simulate(arguments: argparse.Namespace) -> int:
    with progress.wait(f"tracing {Path(arguments.file).name}") as update:
        from cute_backend.simulator import simulate as simulator
        from cute_backend.simulator import timeline
        from cute_backend.simulator.report import Recorder
        from cute_backend.simulator.simulation_errors import SimulationError

        recorder = None if arguments.timeline is None else Recorder()
        machine = simulator.Machine(
            Arch.parse(arguments.arch or "sm_100a"),
            arguments.async_seed,
            observer=recorder,
            progress=lambda done, total, instructions: update(
                f"simulating, {instructions:,} warp instructions", done, total
            ),
        )
        fn, inputs = load(arguments.file)
        args, kwargs = inputs()
        update("compiling")
        try:
            simulation = simulator.run(fn, args, machine, kwargs)
        except SimulationError as error:
            print(error, file=sys.stderr)
            return 1
        update("computing the reference")
        expected = simulator.reference(fn, args, kwargs, machine.arch)
        differences = simulator.compare(simulation.outputs, expected)
    for launch in simulation.launches:
        terminal.show(terminal.launch_table(launch))
    terminal.show(terminal.comparison_table(differences))
    terminal.show(terminal.launch_legend(differences))
    if recorder is not None:
        kernel = simulation.launches[0].kernel
        timeline.draw(recorder, arguments.timeline, f"{kernel.arch.value}, tile {kernel.plan.tile.name}")
    return 0 if all(difference.agrees for difference in differences) else 1


def bench(arguments: argparse.Namespace) -> int:
    from cute_backend.bench import command

    return command.main(arguments, load)
