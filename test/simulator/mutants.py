"""Deliberate faults in our kernels, each in one place, and the error by which each must be caught.

A fault is an edit of a template's text, of a generated module or of a compiled kernel's PTX. The text that it
replaces must be there exactly as often as said, so that no mutant vanishes when a template changes.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
from test_grouped import grouped, groups
from test_sm80 import sm80
from test_templates import operands, scaled_residual, sm90, sm100, wrong

import cute_backend.templates
from cute_backend.memory_ops.emit import emit
from cute_backend.planning import TileConfig, Variant
from cute_backend.replay import replay
from cute_backend.runtime.build import build
from cute_backend.runtime.compile import SYMBOL, Built, compile_kernel
from cute_backend.runtime.kernel import Kernel
from cute_backend.simulator import api
from cute_backend.simulator.errors import (
    BarrierError,
    Deadlock,
    IllegalAccess,
    MissingProxyFence,
    RaceError,
    ResourceError,
    SimulationError,
)
from cute_backend.simulator.host import HostProgram
from cute_backend.spec import Axis, DType, EpilogueSpec, ReduceKind, Reduction, Scaling, Store

SPEC = scaled_residual()
LARGEST = replace(
    SPEC, stores=(Store("out0", "t2", DType.F32, reduce=Reduction(Axis.COLUMN, ReduceKind.MAX)),)
)
BLOCKWISE = replace(
    SPEC,
    accumulators=(
        replace(SPEC.accumulators[0], fast_accum=False, a_scaling=Scaling.LINE, b_scaling=Scaling.SQUARE),
    ),
    loads=SPEC.loads[2:],
    ops=(replace(SPEC.ops[2], operands=("acc", "exact0")),),
)
COLUMNWISE = replace(BLOCKWISE, accumulators=(replace(BLOCKWISE.accumulators[0], b_scaling=Scaling.LINE),))
SLOW = replace(SPEC, accumulators=(replace(SPEC.accumulators[0], fast_accum=False),))
GROUPED = replace(grouped(), stores=SPEC.stores)


class WrongNumbers(AssertionError):
    """A kernel ran to its end and left something else than the reference."""


@dataclass(frozen=True)
class Subject:
    """A kernel and a problem of several tiles, all of which one cluster works through, or `clusters`; of a
    grouped product with the `ends` of its groups."""

    config: TileConfig
    problem: tuple[int, int, int]
    variant: Variant = Variant.TMA
    spec: EpilogueSpec = SPEC
    clusters: int = 1
    ends: tuple[int, ...] = ()

    @property
    def kernel(self) -> Kernel:
        return Kernel(self.spec, self.config, self.variant)

    def check(self, program: HostProgram, seed: int) -> None:
        """Run the problem. Raises WrongNumbers, or whatever the simulator has to say of the kernel."""
        made = (
            groups(self.spec, self.ends, *self.problem) if self.ends else operands(self.spec, *self.problem)
        )
        a, b, loads = made
        machine = api.Machine(self.config.arch, seed, self.config, clusters=self.clusters)
        with patch.object(api, "_program", lambda kernel: program):
            [actual], launch = api.run_region(self.spec, a, b, loads, machine)
        assert launch.kernel == self.kernel
        [expected] = replay(self.spec, a, b, loads)
        if not torch.equal(actual, expected):
            raise WrongNumbers(wrong(torch.atleast_2d(actual), torch.atleast_2d(expected)))


ONE = Subject(sm100(128, 64), (192, 192, 384))  # M = N: only the strides tell a row from a column
PAIR = Subject(sm100(256, 64, 2, 1, ctas=2), (520, 104, 256))
MULTICAST = Subject(sm100(128, 64, 2, 2), (296, 168, 256))
MASKED = Subject(sm100(128, 64), (131, 69, 128), Variant.PLAIN)
TURNS = Subject(sm90(64, 128, pingpong=True), (136, 144, 896))  # 7 k tiles: the ring's stages change hands
FEW_ROWS = Subject(sm90(64, 64), (40, 72, 256))
COOPERATIVE = Subject(sm90(128, 128), (136, 136, 896))
STAGED = Subject(sm90(128, 256), (136, 264, 512))  # the row is too long for registers
PROMOTED = Subject(sm90(64, 64), (72, 72, 896), spec=SLOW)
HOPPER_MULTICAST = Subject(sm90(128, 64, 2, 1), (136, 136, 512))
REDUCING = Subject(sm90(128, 64), (136, 136, 128), spec=LARGEST)
BLOCK_SCALED = Subject(sm90(64, 128, pingpong=True), (72, 136, 1280), spec=BLOCKWISE)
COLUMN_SCALED = Subject(sm90(64, 64), (72, 72, 1040), spec=COLUMNWISE)
SCALED_PARTS = Subject(sm90(64, 64, split_k=4), (40, 72, 640), spec=BLOCKWISE)  # 2, 2, 1 and 0 blocks
WARPS = Subject(sm80(64, 64), (136, 136, 896), spec=scaled_residual(DType.BF16, DType.BF16))
FEW_K_TILES = replace(WARPS, problem=(72, 72, 72))
MANY_SUBTILES = replace(WARPS, config=sm80(128, 128), problem=(136, 136, 72))
PARTS = Subject(sm90(64, 64, split_k=4), (72, 72, 1040))

ENDS = (*range(20), 83, 83, 128)
GROUPS = Subject(sm90(64, 64, 2), (128, 72, 160), spec=GROUPED, ends=ENDS)
BLACKWELL_GROUPS = Subject(sm100(128, 64), (128, 72, 160), spec=GROUPED, ends=ENDS)

SUBJECTS = {
    "one": ONE,
    "pair": PAIR,
    "multicast": MULTICAST,
    "masked": MASKED,
    "turns": TURNS,
    "few rows": FEW_ROWS,
    "cooperative": COOPERATIVE,
    "staged": STAGED,
    "promoted": PROMOTED,
    "block-scaled": BLOCK_SCALED,
    "column-scaled": COLUMN_SCALED,
    "scaled parts": SCALED_PARTS,
    "hopper multicast": HOPPER_MULTICAST,
    "reducing": REDUCING,
    "parts": PARTS,
    "groups": GROUPS,
    "groups on Blackwell": BLACKWELL_GROUPS,
    "warps": WARPS,
    "few k tiles": FEW_K_TILES,
    "many subtiles": MANY_SUBTILES,
}


class Text(Enum):
    """What is edited: a module of the templates, by its name, or something made of them."""

    TEMPLATE = "the template of the architecture"
    TILE = "tile"
    EPILOGUE = "epilogue"
    SCHEDULER = "scheduler"
    FINISH = "finish"
    SPLIT_K = "split_k"
    MAINLOOP = "mainloop"
    BLOCK_SCALED = "block_scaled"
    BLOCK_SCALES = "block_scales"
    GEMM = "gemm"
    MODULE = "the generated module"
    PTX = "the PTX, where the old text is a regular expression"


@dataclass(frozen=True)
class Edit:
    """`old` becomes `new` at its `at`-th of `times` occurrences."""

    old: str
    new: str
    times: int = 1
    at: int = 0

    def apply(self, text: str, *, regex: bool = False) -> str:
        found = list(re.finditer(self.old if regex else re.escape(self.old), text))
        assert len(found) == self.times, f"{self.old!r} is there {len(found)} times, not {self.times}"
        match = found[self.at]
        return text[: match.start()] + (match.expand(self.new) if regex else self.new) + text[match.end() :]


_USERS = {
    (Text.SCHEDULER, "sm90"): ("batch", "import batch as"),
    (Text.SCHEDULER, "sm100"): ("batch", "import batch as"),
    (Text.TILE, "sm90"): ("fragments", "from .fragments import"),
    (Text.TILE, "sm80"): ("fragments", "from .fragments import"),
}
"""The module that uses an edited one where the template itself does not, and how the template imports it."""

_BY_MODULES_ALONE = (Text.BLOCK_SCALED,)
"""What generated modules import, and templates don't."""


@dataclass(frozen=True)
class Mutant:
    """A fault. `message` is searched for in the text of the error; `around` edits the template that imports
    what is edited."""

    name: str
    subject: Subject
    edits: tuple[Edit, ...]
    error: type[Exception]
    message: str
    text: Text = Text.TEMPLATE
    around: tuple[Edit, ...] = ()

    def program(self, folder: Path) -> HostProgram:
        """The faulty kernel, its text in `folder`."""
        kernel = self.subject.kernel
        if self.text is Text.PTX:
            compiled = built(kernel)
            return HostProgram(self._edited(compiled.ptx), compiled.host_object, SYMBOL)
        source = emit(kernel.spec, kernel.config, kernel.variant)
        template = kernel.arch.target.template.split(":")[0].rpartition(".")[2]
        if self.text is Text.MODULE:
            source = self._edited(source)
        else:
            used = "finish" if self.text is Text.FINISH else template
            if self.text in _BY_MODULES_ALONE:
                used = self.text.value
            if self.text in (Text.TEMPLATE, Text.FINISH, *_BY_MODULES_ALONE):
                text = self._edited(_text(used))
            else:
                part = self.text.value
                name = self._imported(part, self._edited(_text(part)), folder)
                source = source.replace(f"templates.{part} import", f"templates.{name} import")
                user, importing = _USERS.get((self.text, template), (template, ""))
                text = Edit(f"from .{part} import", f"from .{name} import").apply(_text(user))
                for edit in self.around:
                    text = edit.apply(text)
                if user != template:
                    imported = importing.replace(user, self._imported(user, text, folder))
                    text = Edit(importing, imported).apply(_text(template))
            faulty = self._imported(used, text, folder)
            source = Edit(f"templates.{used} import", f"templates.{faulty} import").apply(source)
        path = folder / "kernel.py"
        path.write_text(source)
        compiled = compile_kernel(kernel, source, path)
        return HostProgram(compiled.ptx, compiled.host_object, SYMBOL)

    def _edited(self, text: str) -> str:
        for edit in self.edits:
            text = edit.apply(text, regex=self.text is Text.PTX)
        return text

    def _imported(self, original: str, text: str, folder: Path) -> str:
        """Import `text` beside the module of the templates that it is made from; returns its name."""
        path = folder / f"{original}.py"
        path.write_text(text)
        name = re.sub(r"\W", "_", f"{original} {self.name}")
        found = importlib.util.spec_from_file_location(f"{cute_backend.templates.__name__}.{name}", path)
        assert found is not None and found.loader is not None
        module = sys.modules[found.name] = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        return name


def _text(module: str) -> str:
    """The source of a module of the templates."""
    [package] = cute_backend.templates.__path__
    return Path(package, f"{module}.py").read_text()


@cache
def built(kernel: Kernel) -> Built:
    """A sound kernel, compiled once for all the mutants of its PTX."""
    return build(kernel)


def sound(subject: Subject) -> HostProgram:
    """The kernel without a fault."""
    compiled = built(subject.kernel)
    return HostProgram(compiled.ptx, compiled.host_object, SYMBOL)


def without(line: str, times: int = 1, at: int = 0) -> tuple[Edit, ...]:
    """The statement is gone."""
    return (Edit(line, "pass", times, at),)


def instead(old: str, new: str, times: int = 1, at: int = 0) -> tuple[Edit, ...]:
    return (Edit(old, new, times, at),)


def early(release: str, wait: str) -> tuple[Edit, ...]:
    """The release stands right after the wait, no longer where it stood."""
    return (Edit(release, "pass"), Edit(wait, f"{wait}; {release}"))


RELEASED_UNREAD = (Edit("smem.release()", "pass"), Edit("sub.copy_from(", "smem.release(); sub.copy_from("))
"""A generated epilogue hands planes back to TMA before it has read them."""


# What the simulator says of a race. The dot does not cross lines, so both sides stand in one sentence.
UNWRITTEN = "reads {}.*, which was never written"
UNFINISHED = "reads {}.*, written by .*: nothing that it waited for says that this write is complete"
STILL_READ = "overwrites {}.* may still be reading.*: nothing waits for it"
UNMET = r"cp\.async\.bulk\.tensor.*reads shared.*; its own lanes meet at bar\.warp\.sync"
STILL_WRITTEN = "overwrites {}.*, written by .*: nothing that it waited for"
STORED_TWICE = (
    "overwrites byte .*, which .* writes in the same kernel .*: no barrier, and no release and acquire"
)
SHARED, TMEM = "shared 0x", "tensor memory lane"

SWIZZLE_128 = 0x4000404000010000
"""The constant bits of our tcgen05 descriptors: swizzle 2 (128 bytes), stride offset 1024, version 1."""

MUTANTS = [
    # Operands: the load warp, the MMA warp, and the cluster.
    Mutant(
        "operands not waited for",
        ONE,
        without("ab_pipeline.consumer_wait(ab_state)"),
        RaceError,
        r"tcgen05\.mma.*" + UNFINISHED.format(SHARED),
    ),
    Mutant(
        "operand stage not waited for",
        ONE,
        instead("producer_acquire(ab_state)", "producer_acquire(ab_state, cutlass.Boolean(True))"),
        BarrierError,
        "arrival.* more than it expects",
    ),
    Mutant(
        "operand stage released before its products",
        ONE,
        early("ab_pipeline.consumer_release(ab_state)", "ab_pipeline.consumer_wait(ab_state)"),
        RaceError,
        STILL_READ.format(SHARED),
    ),
    Mutant(
        "half of the bytes expected",
        ONE,
        instead("tx_count=ab_bytes * config.ctas", "tx_count=ab_bytes // 2"),
        Deadlock,
        "mma warp(.|\n)*1 of 1 arrivals.* bytes",
    ),
    Mutant(
        "half of a pair's bytes expected",
        PAIR,
        instead("tx_count=ab_bytes * config.ctas", "tx_count=ab_bytes"),
        RaceError,
        r"tcgen05\.mma.*reads shared",
    ),
    Mutant(
        "sixteen bytes too many expected",
        ONE,
        instead(r"mov\.b32(\s+%r\d+), 24576;", r"mov.b32\1, 24592;"),
        Deadlock,
        r"mma warp(.|\n)*1 of 1 arrivals, 16 bytes",
        Text.PTX,
    ),
    Mutant(
        "A multicast to the CTAs that share B",
        MULTICAST,
        instead("cta_coord, mcast_mode=2)", "cta_coord, mcast_mode=1)"),
        RaceError,
        r"multicast.*" + STILL_WRITTEN.format(SHARED),
    ),
    Mutant(
        "one reader of a stage not counted",
        MULTICAST,
        instead("config.ctas + config.cluster_n - 1", "config.ctas + config.cluster_n - 2"),
        RaceError,
        "overwrites shared",
    ),
    Mutant(
        "barriers not made known to the cluster",
        MULTICAST,
        instead(r"fence\.mbarrier_init\.release\.cluster;", ""),
        RaceError,
        "no barrier between the two makes the initialisation visible",
        Text.PTX,
    ),
    Mutant(
        "two pipelines share a barrier",
        ONE,
        instead(
            "**stages_of(smem, self.acc_ring)",
            "**stages_of(smem, self.acc_ring) | "
            "{'barrier_storage': smem.allocate_array(cutlass.Int64, 2 * ACC_STAGES - 1)}",
        ),
        BarrierError,
        r"mbarrier\.init of the mbarrier at .* which warp 0 .* has initialised",
    ),
    Mutant(
        "CTA leaves while others signal it",
        MULTICAST,
        without("ab_pipeline.producer_tail(ab_state)"),
        IllegalAccess,
        "mbarrier at .*, all of whose warps have exited",
    ),
    Mutant(
        "a wait that gives up is taken for one that succeeds",
        ONE,
        instead(r"bra\.uni\s+LAB_WAIT;", "", 21, 8),
        RaceError,
        r"tcgen05\.mma.*reads shared",
        Text.PTX,
    ),
    # Parts of K.
    Mutant(
        "sums not waited for",
        PARTS,
        without("cute.arch.mbarrier_wait(self.ready, 0)"),
        RaceError,
        UNWRITTEN.format(SHARED),
        Text.SPLIT_K,
    ),
    Mutant(
        "one part not waited for",
        PARTS,
        instead("1, config.split_k - 1)", "1, config.split_k - 2)"),
        RaceError,
        UNWRITTEN.format(SHARED),
    ),
    Mutant(
        "a warp tells of sums before its lanes have left them",
        PARTS,
        instead("cute.arch.sync_warp()", "pass"),
        RaceError,
        UNFINISHED.format(SHARED),
        Text.SPLIT_K,
    ),
    Mutant(
        "CTA leaves while its sums are read",
        PARTS,
        without("cute.arch.mbarrier_wait(self.read, 0)"),
        IllegalAccess,
        "all of whose warps have exited",
        Text.SPLIT_K,
    ),
    Mutant(
        "one part is read and let go for all",
        PARTS,
        instead("map_dsmem_ptr(self.shared.iterator, part)", "map_dsmem_ptr(self.shared.iterator, 1)"),
        IllegalAccess,
        "all of whose warps have exited",
        Text.SPLIT_K,
    ),
    Mutant(
        "every part from the first k tile on",
        PARTS,
        instead("k = shared.first_k + k_tile", "k = k_tile + 0 * shared.first_k", 2),
        WrongNumbers,
        "are wrong",
    ),
    Mutant(
        "every part has an epilogue",
        PARTS,
        without("epilogue_item = schedule.items"),
        Deadlock,
        "waits",
    ),
    # Groups of rows.
    Mutant(
        "a group from its second row on",
        GROUPS,
        instead("self.offsets[group - 1], 0)", "self.offsets[group - 1] + 1, 0)"),
        WrongNumbers,
        "are wrong",
        Text.SCHEDULER,
    ),
    Mutant(
        "the B of the next group",
        GROUPS,
        instead("Place(row, column, group, first, end)", "Place(row, column, group + 1, first, end)"),
        WrongNumbers,
        "are wrong",
        Text.SCHEDULER,
    ),
    Mutant(
        "rows of a group that has none not cleared",
        GROUPS,
        instead("Boolean(self.is_grouped) | ", "Boolean(False) | "),
        RaceError,
        UNWRITTEN.format(SHARED),
    ),
    Mutant(
        "a neighbour's rows written",
        BLACKWELL_GROUPS,
        instead("count = cutlass.min(place.end - row, box[0])", "count = box[0]"),
        WrongNumbers,
        "are wrong",
        Text.GEMM,
    ),
    # The stream.
    Mutant(
        "earlier kernels not waited for",
        ONE,
        without("await_earlier_kernels()"),
        RaceError,
        r"before griddepcontrol\.wait",
    ),
    Mutant(
        "earlier kernels not waited for on Hopper",
        COOPERATIVE,
        without("await_earlier_kernels()"),
        RaceError,
        r"before griddepcontrol\.wait",
    ),
    Mutant(
        "earlier kernels waited for after partials are read",
        REDUCING,
        (
            Edit("        await_earlier_kernels()\n", ""),
            Edit("held.across(lanes)", "held.across(lanes); await_earlier_kernels()"),
        ),
        RaceError,
        r"before griddepcontrol\.wait",
        Text.FINISH,
    ),
    # Global memory.
    Mutant(
        "a tile of two clusters",
        replace(FEW_ROWS, clusters=2),
        instead(
            "epilogue_item = Int32(first_item)",
            "first_item = Int32(0) * first_item; epilogue_item = first_item",
        ),
        RaceError,
        STORED_TWICE,
    ),
    Mutant(
        "partials read before the kernel that leaves them has ended",
        REDUCING,
        without("await_earlier_kernels()"),
        RaceError,
        r"before griddepcontrol\.wait",
        Text.FINISH,
    ),
    # The second stage of reductions.
    Mutant(
        "partials of other warps not waited for",
        REDUCING,
        without("cute.arch.sync_threads()"),
        RaceError,
        UNWRITTEN.format(SHARED) + "|" + UNFINISHED.format(SHARED),
        Text.FINISH,
    ),
    Mutant(
        "partials of other lanes not taken",
        REDUCING,
        without("held.across(lanes)"),
        WrongNumbers,
        "are wrong",
        Text.FINISH,
    ),
    # Products.
    Mutant(
        "accumulator not waited for by the MMA warp",
        ONE,
        without("acc_pipeline.producer_acquire(acc_state)"),
        RaceError,
        TMEM,
    ),
    Mutant(
        "MMA warp begins in the wrong phase",
        ONE,
        instead(
            "consumer_state(self.stages.ab), consumer_state(ACC_STAGES)",
            "consumer_state(self.stages.ab), producer_state(ACC_STAGES)",
        ),
        Deadlock,
        "mma warp(.|\\n)*waits for parity 1 of .* phase 1 .* 0 of 4 arrivals",
    ),
    Mutant(
        "sums begin with what was there",
        ONE,
        instead("tcgen05.Field.ACCUMULATE, False", "tcgen05.Field.ACCUMULATE, True"),
        RaceError,
        r"tcgen05\.mma.*" + UNWRITTEN.format(TMEM),
        Text.MAINLOOP,
    ),
    Mutant(
        "accumulator committed to the operands' barrier",
        ONE,
        instead("acc_pipeline.producer_commit(acc_state)", "ab_pipeline.consumer_release(ab_state)"),
        Deadlock,
        "epilogue warp(.|\n)*0 of 1 arrivals",
    ),
    Mutant(
        "products committed to the next stage's barrier",
        ONE,
        instead(r"(tcgen05\.commit\S+\s+\[%r\d+\+)213552\]", r"\g<1>213560]"),
        Deadlock,
        "tma warp(.|\n)*0 of 1 arrivals",
        Text.PTX,
    ),
    Mutant(
        "swizzle of 64 bytes for one of 128",
        ONE,
        instead(str(SWIZZLE_128), str(SWIZZLE_128 ^ 6 << 61), 2),
        WrongNumbers,
        "are wrong",
        Text.PTX,
    ),
    Mutant(
        "every eighth row half as far on",
        ONE,
        instead(str(SWIZZLE_128), str(SWIZZLE_128 - (32 << 32)), 2, 1),
        WrongNumbers,
        "are wrong",
        Text.PTX,
    ),
    Mutant(
        "lanes that no instruction has set disabled",
        ONE,
        instead(
            r"mov\.b64\s+\{(%r\d+, %r\d+)\}, %rd\d+;(?=[^{]*tcgen05\.mma[^{]*\{%r\d+, %r\d+, \1\})", "", 4, 3
        ),
        WrongNumbers,
        "are wrong",
        Text.PTX,
    ),
    Mutant(
        "a pair's accumulator committed to one CTA",
        PAIR,
        instead(r"(\[%r\d+\+230016\]), %rs\d+;", r"\1, 1;"),
        Deadlock,
        r"epilogue warp \d of CTA \(1, 0, 0\)(.|\n)*0 of 1 arrivals",
        Text.PTX,
    ),
    Mutant(
        "tensor memory of a pair handled by one CTA",
        PAIR,
        instead(r"relinquish_alloc_permit\.cta_group::2", "relinquish_alloc_permit.cta_group::1"),
        ResourceError,
        r"cta_group::1 .* and \.cta_group::2 .* in one kernel",
        Text.PTX,
    ),
    # Tensor memory.
    Mutant(
        "address of tensor memory not waited for",
        ONE,
        without("tmem.wait_for_alloc()", 2),
        RaceError,
        "mma warp",
    ),
    Mutant(
        "tensor memory for one stage of two",
        ONE,
        instead("tmem.allocate(ACC_STAGES * config.mma_n)", "tmem.allocate(config.mma_n)"),
        IllegalAccess,
        "tensor memory columns 64 to 127 .* allocated are 0 to 63",
    ),
    Mutant(
        "tensor memory not freed",
        ONE,
        without("tmem.free(tmem_ptr)"),
        ResourceError,
        "exits with tensor memory allocated",
    ),
    Mutant(
        "tensor memory freed before all have read",
        MASKED,
        without("barrier.arrive_and_wait()", 2, 1),
        RaceError,
        r"tcgen05\.dealloc.*" + STILL_READ.format(TMEM),
    ),
    Mutant(
        "tensor memory read a column further",
        ONE,
        instead(r"(tcgen05\.ld\S+ \{[^}]*\}, \[%r\d+)\]", r"\1+1]"),
        RaceError,
        TMEM,
        Text.PTX,
    ),
    Mutant(
        "loads from tensor memory not waited for",
        ONE,
        without("cute.arch.fence_view_async_tmem_load()"),
        RaceError,
        r"tcgen05\.mma.* overwrites tensor memory.*a tcgen05\.ld of warp \d .*may still be reading",
    ),
    # The accumulators' way to the epilogue.
    Mutant(
        "barriers not awaited at the start",
        ONE,
        without("pipeline.pipeline_init_wait(cluster_shape_mn=cluster)"),
        RaceError,
        "no barrier between the two makes the initialisation visible",
    ),
    Mutant(
        "accumulator not waited for by the epilogue",
        ONE,
        without("acc_pipeline.consumer_wait(acc_state)"),
        RaceError,
        UNWRITTEN.format(TMEM),
    ),
    Mutant(
        "accumulator released after its first subtile",
        ONE,
        instead("if subtile == self.subtiles - 1:", "if subtile == 0:"),
        RaceError,
        TMEM,
    ),
    Mutant(
        "accumulator stage not handed over at the start",
        ONE,
        instead("cutlass.range_constexpr(ACC_STAGES)", "cutlass.range_constexpr(ACC_STAGES - 1)"),
        Deadlock,
        "mma warp(.|\n)*0 of 4 arrivals",
    ),
    Mutant(
        "one arrival too many expected",
        ONE,
        instead(
            "**stages_of(smem, self.acc_ring)",
            "**stages_of(smem, self.acc_ring) | {'consumer_group': agents(Arrivals(self.finish, 5, 1))}",
        ),
        Deadlock,
        "mma warp(.|\n)*4 of 5 arrivals",
    ),
    Mutant(
        "arrivals of one CTA of a pair expected",
        PAIR,
        instead("Arrivals(self.finish, WARPS, 1, config.ctas)", "Arrivals(self.finish, WARPS, 1)"),
        Deadlock,
        r"mma warp(.|\n)*of 4 arrivals",
    ),
    Mutant(
        "accumulator of the other stage",
        ONE,
        instead("i), acc_state.index)]", "i), 1 - acc_state.index)]"),
        RaceError,
        TMEM,
    ),
    Mutant(
        "accumulator of the other subtile",
        ONE,
        instead("self._piece_of(subtile, i)", "self._piece_of(self.subtiles - 1 - subtile, i)"),
        WrongNumbers,
        "are wrong",
    ),
    Mutant(
        "accumulator handed over by every lane",
        ONE,
        (
            Edit(
                "if subtile == self.subtiles - 1:\n                        with cute.arch.elect_one():",
                "if subtile == self.subtiles - 1:\n                        if subtile >= 0:",
            ),
        ),
        Deadlock,
        "epilogue warp(.|\n)*0 of 1 arrivals",
    ),
    Mutant(
        "accumulator of another warp's rows",
        ONE,
        instead("tmem_copy.get_slice(thread)", "tmem_copy.get_slice((thread + 32) % EPILOGUE_THREADS)"),
        IllegalAccess,
        r"warp \d of .* may touch lanes",
    ),
    Mutant(
        "half of a warp waited for",
        ONE,
        instead(r"bar\.warp\.sync(\s+)-1;", r"bar.warp.sync\1 65535;"),
        SimulationError,
        "in lanes .*16.* which its membermask 0xffff leaves out",
        Text.PTX,
    ),
    # The epilogue's operands.
    Mutant(
        "rowvec not waited for",
        ONE,
        without("row_pipeline.consumer_wait(row_state)"),
        RaceError,
        UNFINISHED.format(SHARED),
    ),
    Mutant(
        "rowvec stage not waited for",
        ONE,
        without("row_pipeline.producer_acquire(row_state)"),
        RaceError,
        SHARED,
        Text.GEMM,
    ),
    Mutant(
        "rowvec stage released early",
        ONE,
        early("row_pipeline.consumer_release(row_state)", "row_pipeline.consumer_wait(row_state)"),
        RaceError,
        SHARED,
    ),
    Mutant(
        "an arrival too many expected of the row warp",
        ONE,
        instead(
            "(smem, self.row_ring)",
            "(smem, Ring('row', stages.row, Arrivals(self.rows, 1, 33), self.row_ring.emptied))",
        ),
        Deadlock,
        "epilogue warp(.|\n)*32 of 33 arrivals",
    ),
    Mutant(
        "exact load not waited for",
        ONE,
        without("exact_pipeline.consumer_wait(exact_state)"),
        RaceError,
        UNFINISHED.format(SHARED),
    ),
    Mutant(
        "exact stage released before it is read",
        ONE,
        RELEASED_UNREAD,
        RaceError,
        r"cp\.async\.bulk\.tensor.*" + STILL_READ.format(SHARED),
        Text.MODULE,
    ),
    Mutant(
        "exact stage released before all lanes have read it",
        ONE,
        without("cute.arch.sync_warp()"),
        RaceError,
        r"cp\.async\.bulk\.tensor.*" + STILL_READ.format(SHARED),
        Text.EPILOGUE,
    ),
    Mutant(
        "exact stage released by three warps of four",
        ONE,
        instead(
            "(smem, self.exact_ring,",
            "(smem, Ring('exact', stages.exact, one(self.exact), Arrivals(self.finish, 3, 1)),",
        ),
        RaceError,
        r"cp\.async\.bulk\.tensor.*" + STILL_READ.format(SHARED),
    ),
    Mutant(
        "exact load of the first subtile always",
        ONE,
        (Edit("row, column * self.subtiles + subtile)", "row, column * self.subtiles)", times=2),),
        WrongNumbers,
        "columns 32 to 191",
    ),
    Mutant(
        "row scale read by columns",
        ONE,
        instead("glob.scale_a[tile.row(r)]", "glob.scale_a[tile.clamp_column(tile.thread)]"),
        WrongNumbers,
        "are wrong",
        Text.MODULE,
    ),
    Mutant(
        "rows beyond M read",
        ONE,
        instead("return cutlass.min(self.raw_row(r), self.m - 1)", "return self.raw_row(r)"),
        IllegalAccess,
        "past the end of argument 2",
        Text.TILE,
    ),
    # Outputs.
    Mutant(
        "output not published to TMA",
        ONE,
        without('cute.arch.fence_proxy("async.shared", space="cta")'),
        MissingProxyFence,
        r"cp\.async\.bulk\.tensor.* wrote it through the generic proxy",
    ),
    Mutant(
        "output published to TMA before it is written",
        ONE,
        (
            Edit('cute.arch.fence_proxy("async.shared", space="cta")', "pass"),
            Edit(
                "sub = Sm100Subtile(self.config, tile, subtile)",
                "sub = Sm100Subtile(self.config, tile, subtile); "
                'cute.arch.fence_proxy("async.shared", space="cta")',
            ),
        ),
        MissingProxyFence,
        r"cp\.async\.bulk\.tensor.* wrote it through the generic proxy",
    ),
    Mutant(
        "output map with rows that are not there",
        ONE,
        instead(
            "store_of = dict(zip(epilogue.stores, stores, strict=True))",
            "store_of = {name: cute.make_tensor(d.iterator, cute.make_layout((m + 128, n), stride=d.stride)) "
            "for name, d in zip(epilogue.stores, stores, strict=True)}",
        ),
        IllegalAccess,
        "past the end of argument 5",
    ),
    Mutant(
        "output stored before all have written",
        ONE,
        without("barrier.arrive_and_wait()", 2),
        RaceError,
        r"cp\.async\.bulk\.tensor.*reads shared",
    ),
    Mutant(
        "output plane not waited for",
        ONE,
        without("store_pipeline.producer_acquire()"),
        RaceError,
        STILL_READ.format(SHARED),
    ),
    Mutant(
        "output plane not advanced",
        ONE,
        without("store_state.advance()"),
        RaceError,
        STILL_READ.format(SHARED),
    ),
    Mutant(
        "shared memory given up under a store",
        ONE,
        without("store_pipeline.producer_tail()"),
        IllegalAccess,
        "while this store still reads its shared memory",
    ),
    Mutant(
        "masked store without its bound",
        MASKED,
        instead("if inside:", "if inside | True:"),
        IllegalAccess,
        "past the end of argument 5",
        Text.MODULE,
    ),
    Mutant(
        "masked store one row too high",
        MASKED,
        instead("(row < self.tile.m)", "(row <= self.tile.m)"),
        IllegalAccess,
        "past the end of argument 5",
        Text.TILE,
    ),
    # Hopper.
    Mutant(
        "more registers asked for than there are",
        COOPERATIVE,
        instead("setmaxregister_increase(config.target.epilogue_registers)", "setmaxregister_increase(240)"),
        Deadlock,
        r"wgmma warp (.|\n)*240 registers a thread, .* more for the warp; the pool of CTA",
    ),
    Mutant(
        "accumulator registers fenced for the first tile only",
        COOPERATIVE,
        (Edit("warpgroup.fence()", "pass"),),
        RaceError,
        r"registers that it has touched since its last wgmma\.fence",
        Text.MAINLOOP,
        instead(
            "item = shared.epilogue_item\n        if",
            "item = shared.epilogue_item; warpgroup.fence()\n        if",
        ),
    ),
    Mutant(
        "one named barrier for both turns",
        TURNS,
        instead("first.barrier + group, first.barrier + 1 - group", "first.barrier, first.barrier"),
        RaceError,
        SHARED,
    ),
    Mutant(
        "rows of the other warpgroup's tile",
        TURNS,
        without("row_state.advance(seat.ring)"),
        Deadlock,
        r"staging warp(.|\n)*0 of 128 arrivals",
    ),
    Mutant(
        "staged rows not waited for",
        STAGED,
        without("row_pipeline.consumer_wait(row_state)"),
        RaceError,
        UNFINISHED.format(SHARED),
    ),
    Mutant(
        "multicast to a CTA that is not there",
        HOPPER_MULTICAST,
        instead("cute.make_layout_image_mask(cta_layout, cta_coord, mode=0)", "cutlass.Int16(7)"),
        IllegalAccess,
        "multicast mask 0x7 in a cluster of 2 CTAs",
    ),
    Mutant(
        "accumulator registers not fenced",
        COOPERATIVE,
        without("warpgroup.fence()"),
        RaceError,
        r"no wgmma\.fence before it",
        Text.MAINLOOP,
    ),
    Mutant(
        "last products not waited for",
        COOPERATIVE,
        without("warpgroup.wait_group(0)"),
        RaceError,
        r"touches accumulator registers of a wgmma\.mma_async that it has not waited for",
        Text.MAINLOOP,
    ),
    Mutant(
        "operand stage released under its products",
        COOPERATIVE,
        instead("warpgroup.wait_group(1)", "warpgroup.wait_group(2)"),
        RaceError,
        r"cp\.async\.bulk\.tensor.*wgmma of .* may still be reading",
        Text.MAINLOOP,
    ),
    Mutant(
        "wgmma's operands not waited for",
        COOPERATIVE,
        without("self.ring.consumer_wait(state)"),
        RaceError,
        r"wgmma\.mma_async.*" + UNFINISHED.format(SHARED),
        Text.MAINLOOP,
    ),
    Mutant(
        "sums in registers begin with what was there",
        COOPERATIVE,
        instead("multiply(acc, state, anew=True)", "multiply(acc, state)"),
        WrongNumbers,
        "are wrong",
        Text.MAINLOOP,
    ),
    Mutant(
        "every product overwrites the sums",
        COOPERATIVE,
        instead("multiply(acc, state)", "multiply(acc, state, anew=True)"),
        WrongNumbers,
        "are wrong",
        Text.MAINLOOP,
    ),
    Mutant(
        "promoted sums begin with those of the last k tile",
        PROMOTED,
        instead("multiply(sums, state, anew=True)", "multiply(sums, state)"),
        WrongNumbers,
        "are wrong",
        Text.MAINLOOP,
    ),
    Mutant(
        "sums promoted before they are there",
        PROMOTED,
        instead("warpgroup.wait_group(under_way)", "warpgroup.wait_group(under_way + (count - 1))"),
        RaceError,
        r"touches accumulator registers of a wgmma\.mma_async that it has not waited for",
        Text.MAINLOOP,
    ),
    Mutant(
        "sums of the last of an odd number of k tiles not waited for",
        PROMOTED,
        instead("warpgroup.wait_group(under_way)", "warpgroup.wait_group(1 if count == 1 else under_way)"),
        RaceError,
        r"touches accumulator registers of a wgmma\.mma_async that it has not waited for",
        Text.MAINLOOP,
    ),
    # Scales of blocks.
    Mutant(
        "scales not waited for",
        BLOCK_SCALED,
        without("stages.ring.consumer_wait(state)"),
        RaceError,
        UNFINISHED.format(SHARED) + "|" + UNWRITTEN.format(SHARED),
        Text.BLOCK_SCALED,
    ),
    Mutant(
        "scales released before columns are read",
        COLUMN_SCALED,
        early("scales.ring.consumer_release(scales.state)", "assert scales is not None"),
        RaceError,
        r"cp\.async.*" + STILL_READ.format(SHARED),
        Text.BLOCK_SCALED,
    ),
    Mutant(
        "scales never released",
        BLOCK_SCALED,
        without("scales.ring.consumer_release(scales.state)"),
        Deadlock,
        r"warp 3 of CTA(.|\n)*0 of 128 arrivals",
        Text.BLOCK_SCALED,
    ),
    Mutant(
        "the scales of another stage",
        BLOCK_SCALED,
        instead("stages.a[(None, state.index)]", "stages.a[(None, 0)]"),
        RaceError,
        r"cp\.async.*" + STILL_READ.format(SHARED),
        Text.BLOCK_SCALED,
    ),
    Mutant(
        "scales of the rows below",
        COLUMN_SCALED,
        instead("scales.rows[2 * block + e // 2]", "scales.rows[2 * block + e % 2]"),
        WrongNumbers,
        "are wrong",
        Text.BLOCK_SCALED,
    ),
    Mutant(
        "scales of the neighbouring column",
        COLUMN_SCALED,
        instead("pair[e % 2]", "pair[1 - e % 2]"),
        WrongNumbers,
        "are wrong",
        Text.BLOCK_SCALED,
    ),
    Mutant(
        "a stage of scales filled before it is empty",
        BLOCK_SCALED,
        without("stages.ring.producer_acquire(state)"),
        RaceError,
        r"cp\.async.*" + STILL_READ.format(SHARED) + "|" + STILL_WRITTEN.format(SHARED),
    ),
    Mutant(
        "scales announced before they are there",
        BLOCK_SCALED,
        instead(
            "stages.ring.producer_commit(state)",
            "cute.arch.mbarrier_arrive(stages.ring.producer_get_barrier(state))",
        ),
        RaceError,
        UNFINISHED.format(SHARED),
    ),
    Mutant(
        "scales of the next block of K",
        BLOCK_SCALED,
        instead("k = shared.first_k + k_tile", "k = (k_tile + 1) % shared.k_tiles", 2, 1),
        WrongNumbers,
        "are wrong",
    ),
    Mutant(
        "scales of the first part of K in all",
        SCALED_PARTS,
        instead("k = shared.first_k + k_tile", "k = k_tile", 2, 1),
        WrongNumbers,
        "are wrong",
    ),
    Mutant(
        "parts of K beyond the last block",
        SCALED_PARTS,
        instead("config.split_k > 1 and self.scaling is not None", "False"),
        IllegalAccess,
        "",
    ),
    Mutant(
        "scales of the first columns for all",
        BLOCK_SCALED,
        instead("n0 * (config.piece_n // config.tile_n) // scaling.b.lines", "n0 * 0"),
        WrongNumbers,
        "are wrong",
        Text.BLOCK_SCALES,
    ),
    Mutant(
        "turns not taken",
        TURNS,
        (Edit("self.own.arrive_and_wait()", "pass"), Edit("self.other.arrive()", "pass")),
        RaceError,
        r"wgmma\.mma_async.*" + UNFINISHED.format(SHARED),
    ),
    Mutant(
        "the other warpgroup's operands not skipped",
        TURNS,
        without("ab_state.advance(k_tiles)"),
        Deadlock,
        "wgmma warp(.|\\n)*128 of 256 threads have arrived",
    ),
    # Rows beyond the last, which are multiplied but not loaded.
    Mutant(
        "rows that are not loaded not cleared",
        FEW_ROWS,
        without("self._clear(s_a, thread)"),
        RaceError,
        r"wgmma.*" + UNWRITTEN.format(SHARED),
    ),
    Mutant(
        "cleared rows not published to TMA",
        FEW_ROWS,
        without('cute.arch.fence_proxy("async.shared", space="cta")', 2, 1),
        MissingProxyFence,
        r"overwrites shared.* through the async proxy; .* wrote it through the generic proxy",
    ),
    Mutant(
        "more expected than is loaded of few rows",
        FEW_ROWS,
        instead("self.box_bytes * cutlass.max(count - 1, 0)", "self.box_bytes * count"),
        Deadlock,
        "1 of 1 arrivals, 2048 bytes",
    ),
    Mutant(
        "a box of rows too few",
        FEW_ROWS,
        instead("if box < count:", "if box < count - 1:"),
        Deadlock,
        "1 of 1 arrivals, 2048 bytes",
    ),
    Mutant(
        "wgmma's output not published to TMA",
        TURNS,
        without('cute.arch.fence_proxy("async.shared", space="cta")', 2, 0),
        MissingProxyFence,
        r"cp\.async\.bulk\.tensor.* wrote it through the generic proxy",
    ),
    Mutant(
        "output stored before all lanes of a warp have written",
        TURNS,
        without("cute.arch.sync_warp()", 2, 1),
        RaceError,
        UNMET,
    ),
    Mutant(
        "output stored by lanes that met before they wrote",
        COOPERATIVE,
        (
            Edit("cute.arch.sync_warp()", "pass", 2, 1),
            Edit("self.epilogue.visit(", "cute.arch.sync_warp(); self.epilogue.visit("),
        ),
        RaceError,
        UNMET,
    ),
    Mutant(
        "output plane of a warp not waited for",
        TURNS,
        without("store_group.producer_acquire()"),
        RaceError,
        STILL_READ.format(SHARED),
    ),
    Mutant(
        "a store more in flight than there are planes",
        TURNS,
        instead("num_stages=max(stages.store, 1)", "num_stages=stages.store + 1"),
        RaceError,
        STILL_READ.format(SHARED),
    ),
    Mutant(
        "shared memory given up under a warp's store",
        COOPERATIVE,
        without("store_group.producer_tail()"),
        IllegalAccess,
        "while this store still reads its shared memory",
    ),
    Mutant(
        "one output plane for all warps of a warpgroup",
        COOPERATIVE,
        instead("+ seat.group) * WARPS + seat.warp", "+ seat.group) * WARPS"),
        RaceError,
        r"overwrites shared.*, written by warp \d",
    ),
    Mutant(
        "one output plane for both warpgroups",
        COOPERATIVE,
        instead("(store_plane * config.warpgroups + seat.group)", "store_plane * config.warpgroups"),
        RaceError,
        "overwrites shared",
    ),
    Mutant(
        "rows of a warpgroup's first warp stored by all",
        TURNS,
        instead("(row * WARPS + seat.warp, column)", "(row * WARPS, column)"),
        RaceError,
        STORED_TWICE,
    ),
    Mutant(
        "planes handed back before they are read",
        TURNS,
        RELEASED_UNREAD,
        RaceError,
        r"cp\.async\.bulk\.tensor.*" + STILL_READ.format(SHARED),
        Text.MODULE,
    ),
    Mutant(
        "planes handed back before all lanes have read them",
        TURNS,
        without("cute.arch.sync_warp()"),
        RaceError,
        r"cp\.async\.bulk\.tensor.*" + STILL_READ.format(SHARED),
        Text.EPILOGUE,
    ),
    Mutant(
        "planes not handed back",
        TURNS,
        without("smem.release()"),
        Deadlock,
        "tma warp(.|\\n)*0 of 4 arrivals",
        Text.MODULE,
    ),
    Mutant(
        "planes not waited for",
        TURNS,
        without("exact_pipeline.consumer_wait(exact_stage)"),
        RaceError,
        UNFINISHED.format(SHARED),
    ),
    Mutant(
        "barriers of the other warpgroup's planes",
        TURNS,
        instead("exact_stage = in_ring(exact_state, seat.ring)", "exact_stage = in_ring(exact_state, 0)"),
        Deadlock,
        r"wgmma warp(.|\n)*0 of 1 arrivals",
    ),
    Mutant(
        "planes of the other warpgroup's tile",
        TURNS,
        instead("(seat.ring * stages.exact + exact_state.index)", "exact_state.index"),
        RaceError,
        SHARED,
    ),
    Mutant(
        "planes of the other half of a tile",
        COOPERATIVE,
        instead("exact_state.index) * config.sharing + seat.share", "exact_state.index) * config.sharing"),
        WrongNumbers,
        "rows 64 to",
    ),
    Mutant(
        "matrices stored transposed",
        TURNS,
        instead(r"(stmatrix\.sync\.aligned\.m8n8\.x4)\.shared", r"\1.trans.shared", 8, 3),
        WrongNumbers,
        "are wrong",
        Text.PTX,
    ),
    Mutant(
        "a short group of tile rows walked as a full one",
        TURNS,
        instead("if first_row + self.raster_m > self.grid_m:", "if first_row > self.grid_m:"),
        WrongNumbers,
        "are wrong",
        Text.SCHEDULER,
    ),
    Mutant(
        "output plane of a warp not advanced",
        TURNS,
        instead("(store_plane + 1) % stages.store", "store_plane + 0"),
        RaceError,
        STILL_READ.format(SHARED),
    ),
    Mutant(
        "rows of a fragment confused",
        TURNS,
        instead("e // 2 % 2", "e % 2"),
        WrongNumbers,
        "are wrong",
        Text.TILE,
    ),
    Mutant(
        "readers in one CTA of two counted",
        HOPPER_MULTICAST,
        instead("readers = config.cluster_m + config.cluster_n - 1", "readers = 1"),
        RaceError,
        r"cp\.async\.bulk\.tensor.*overwrites shared",
    ),
    Mutant(
        "B multicast to one CTA of two",
        HOPPER_MULTICAST,
        instead("cute.make_layout_image_mask(cta_layout, cta_coord, mode=0)", "cutlass.Int16(1)"),
        Deadlock,
        "wgmma warp(.|\n)* bytes",
    ),
    # Warps that copy by cp.async: the ring of operands, rowvecs, and the planes of a warp.
    Mutant(
        "copies of a k tile not waited for",
        WARPS,
        without("cute.arch.cp_async_wait_group(stages.ab - 2)"),
        RaceError,
        UNFINISHED.format(SHARED) + r"(.|\n)*ldmatrix",
    ),
    Mutant(
        "a k tile more under way than there are stages for",
        WARPS,
        instead("cp_async_wait_group(stages.ab - 2)", "cp_async_wait_group(stages.ab - 1)"),
        RaceError,
        UNFINISHED.format(SHARED) + r"(.|\n)*ldmatrix",
    ),
    Mutant(
        "warps do not meet over a k tile",
        WARPS,
        without("cute.arch.sync_threads()"),
        RaceError,
        "shared 0x",
    ),
    Mutant(
        "a stage copied to while others multiply it",
        WARPS,
        (
            Edit("                ahead = self._copy(shared, ahead, thread)\n", ""),
            Edit(
                "                cute.arch.sync_threads()\n",
                "                ahead = self._copy(shared, ahead, thread)\n"
                "                cute.arch.sync_threads()\n",
            ),
        ),
        RaceError,
        r"cp\.async.*" + STILL_READ.format(SHARED),
    ),
    Mutant(
        "a stage too many begun with",
        WARPS,
        instead("range_constexpr(stages.ab - 1)", "range_constexpr(stages.ab)"),
        RaceError,
        "shared 0x",
    ),
    Mutant(
        "stage of the ring not advanced",
        WARPS,
        instead("stage = _after(stage, stages.ab)", "stage = stage + 0"),
        RaceError,
        "shared 0x",
    ),
    Mutant(
        "planes of a short product not waited for",
        FEW_K_TILES,
        without("cute.arch.cp_async_wait_group(0)", 2, 1),
        RaceError,
        UNFINISHED.format(SHARED),
    ),
    Mutant(
        "planes of a later subtile not waited for",
        MANY_SUBTILES,
        instead(
            "min(stages.exact, self.subtiles - subtile) - 1", "min(stages.exact, self.subtiles - subtile)"
        ),
        RaceError,
        UNFINISHED.format(SHARED),
    ),
    Mutant(
        "planes replaced before they are read",
        MANY_SUBTILES,
        RELEASED_UNREAD,
        RaceError,
        "shared 0x",
        Text.MODULE,
    ),
    Mutant(
        "rows of a fragment of mma.sync confused",
        FEW_K_TILES,
        instead("e // 2 % 2", "e % 2"),
        WrongNumbers,
        "are wrong",
        Text.TILE,
    ),
    Mutant(
        "sums begin with those of the tile before",
        WARPS,
        without("acc.fill(0.0)"),
        WrongNumbers,
        "are wrong",
    ),
]
