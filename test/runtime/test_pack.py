"""Packs: what is in one, who is refused, and that a process that is served by one compiles nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import cute_backend
from cute_backend import PackError, aot, config
from cute_backend.__main__ import main
from cute_backend.aot import Written
from cute_backend.command import doctor
from cute_backend.errors import BuildError, UnavailableError
from cute_backend.planning import UNCONSTRAINED, Alignment, Arch, Constraints, TileConfig, buckets_of, plan
from cute_backend.runtime.arguments.device import Device
from cute_backend.runtime.arguments.random_operands import random_operands
from cute_backend.runtime.calls import launch as launching
from cute_backend.runtime.calls import prepare as preparing
from cute_backend.runtime.calls import spec_kernels
from cute_backend.runtime.calls.prepare import prepare
from cute_backend.runtime.compiling import build as building
from cute_backend.runtime.compiling import rungs
from cute_backend.runtime.compiling.build import load_known, obtain
from cute_backend.runtime.compiling.compile import compile_kernel
from cute_backend.runtime.compiling.rungs import Obtained
from cute_backend.runtime.disk import cache as caching
from cute_backend.runtime.disk import pack as packing
from cute_backend.runtime.disk.cache import KernelCache
from cute_backend.runtime.disk.pack import Content, Pack, load_pack, packed_kernels, write_pack
from cute_backend.runtime.host import notices
from cute_backend.runtime.kernels import link as linking
from cute_backend.runtime.kernels.kernel import Kernel, environment
from cute_backend.runtime.kernels.reach import MAX_KERNELS, Problem, reachable_kernels
from cute_backend.runtime.tuning.tuning_results import Key, Result, remembered
from cute_backend.spec import Axis, EpilogueSpec, LoadKind, Scaling
from support.compile_once import build_here
from support.epilogues import BLOCKWISE
from support.epilogues import Problem as InputsOf
from support.runtime import find_in_pack, launches, serve_pack
from support.runtime.handmade import kernel_of, make_spec, source
from support.runtime.warned import runtime_warnings

sys.path.insert(0, str(Path(__file__).parents[2] / "wheels"))
import kernels as wheels

SPEC = make_spec()
KERNEL = kernel_of(SPEC)
PROBLEM = Problem(SPEC, None, 128, 64)
FIGURES = {"registers": 32, "spill_bytes": 0, "smem_bytes": 0}

PROGRAM = """
import torch
def layer(a, b, bias, residual):
    h = (a @ b + bias).relu() + residual
    return h, h.abs().amax(-1)
def greedy(a, b, bias, residual):
    import cute_backend
    return cute_backend.sample(a, b.t(), num_samples=9, seed=1)
def nothing(a, b, bias, residual):
    return a + 1
def example_inputs():
    make = lambda *shape: torch.randn(shape, dtype=torch.bfloat16)
    return make(32, 64), make(64, 128), make(128), make(32, 128)
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A shared library with the hand-made kernel."""
    cache, text = KernelCache(tmp_path_factory.mktemp("kernels")), source(SPEC)
    cache.save(KERNEL, compile_kernel(KERNEL, text, cache.write_source(KERNEL, text)))
    found = cache.read(KERNEL)
    assert found is not None
    return found[0]


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The state of a new process: no kernel, no pack, an empty cache folder. It has no compiler."""
    root = tmp_path / "kernels"
    monkeypatch.setenv("CUTE_BACKEND_CACHE_DIR", str(root))
    monkeypatch.delenv("CUTE_BACKEND_PACK", raising=False)
    monkeypatch.setattr(building, "_loaded", {})
    monkeypatch.setattr("cute_backend.runtime.compiling.compile.compile_kernel", None)
    monkeypatch.setattr(packing, "_packs", {})
    monkeypatch.setattr(packing, "_refused", set())
    packing._installed.cache_clear()
    monkeypatch.setattr(notices, "_warned", set())
    caching._cache_at.cache_clear()
    counters.clear()
    yield root
    caching._cache_at.cache_clear()
    packing._installed.cache_clear()
    counters.clear()


@pytest.fixture
def pack(tmp_path: Path, code: bytes) -> Path:
    """A pack of one kernel for Hopper."""
    path = tmp_path / "model.cutepack"
    write_pack(path, Content({KERNEL: (code, FIGURES)}, [PROBLEM], (1, 4096)))
    return path


def rewrite(path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    """Change the members of a pack."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    path.chmod(0o644)


def restate(**entries: Any) -> Callable[[dict[str, bytes]], None]:
    """Changes entries of the manifest."""

    def change(members: dict[str, bytes]) -> None:
        members["manifest.json"] = json.dumps(json.loads(members["manifest.json"]) | entries).encode()

    return change


# Loading


def test_a_kernel_comes_from_a_pack_before_any_cache(fresh: Path, pack: Path) -> None:
    load_pack(pack)
    function = obtain([KERNEL])[KERNEL]
    plane = torch.zeros(2, 16).bfloat16()
    loads = [torch.zeros(1), torch.zeros(16), torch.zeros(2), plane]
    with pytest.raises(ValueError, match="expected device_type=cuda"):  # says its compiled code
        function(torch.zeros(2, 8).bfloat16(), torch.zeros(16, 8).bfloat16().t(), *loads, plane, 132)
    assert not fresh.exists() and notices._warned == set()
    assert counters["cute_backend"]["kernels_built"] == 0


def test_the_environment_names_a_pack(fresh: Path, pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_BACKEND_PACK", str(pack))
    assert callable(load_known([KERNEL])[KERNEL])
    assert not fresh.exists()


def test_doctor_names_the_pack(
    fresh: Path, pack: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUTE_BACKEND_PACK", str(pack))
    assert main(["doctor"]) == 0
    line = f"\npack                {pack}, for sm_90a, of graphs of torch {torch.__version__}\n"
    assert line in capsys.readouterr().out


def test_a_read_only_pack_in_a_read_only_folder_serves(fresh: Path, pack: Path) -> None:
    before = (pack.stat().st_mtime_ns, sorted(pack.parent.iterdir()))
    pack.chmod(0o444)
    pack.parent.chmod(0o555)
    try:
        load_pack(pack)
        assert callable(load_known([KERNEL])[KERNEL])
    finally:
        pack.parent.chmod(0o755)
    assert (pack.stat().st_mtime_ns, sorted(pack.parent.iterdir())) == before


def test_the_same_kernels_make_the_same_file(fresh: Path, tmp_path: Path, pack: Path, code: bytes) -> None:
    other = tmp_path / "other.cutepack"
    sha256 = write_pack(other, Content({KERNEL: (code, FIGURES)}, [PROBLEM], (1, 4096)))
    assert other.read_bytes() == pack.read_bytes()
    with zipfile.ZipFile(other) as archive:
        assert hashlib.sha256(archive.read("manifest.json")).hexdigest() == sha256
    load_pack(other, sha256)
    assert other.stat().st_mode & 0o777 == 0o644


def test_a_failed_write_leaves_the_old_pack(pack: Path) -> None:
    before = pack.read_bytes()
    with pytest.raises(TypeError):
        write_pack(pack, Content({KERNEL: ("no bytes", FIGURES)}, [PROBLEM], None))  # type: ignore[dict-item]
    assert pack.read_bytes() == before
    assert [
        path.name for path in pack.parent.iterdir() if "cutepack" in path.name or ".new" in path.name
    ] == [pack.name]


def test_a_kernel_that_no_pack_has_is_looked_for_in_the_cache(fresh: Path, pack: Path) -> None:
    load_pack(pack)
    other = kernel_of(SPEC, alignment=Alignment.PLAIN)
    assert load_known([other]) == {} and fresh.is_dir()


def test_what_a_pack_lacks_is_compiled_with_a_warning(
    fresh: Path, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_pack(pack)
    monkeypatch.setattr(building, "_build_in_process", lambda cache, kernel: None)
    with pytest.warns(RuntimeWarning, match=r"not in .*model.cutepack: 1; they are compiled"):
        obtain([kernel_of(SPEC, alignment=Alignment.PLAIN)])


# Refusing


def test_another_manifest_than_asked_for(pack: Path) -> None:
    with pytest.raises(PackError, match=r"has a manifest of SHA-256 [0-9a-f]{64}, not 1234$"):
        load_pack(pack, "1234")


@pytest.mark.parametrize("part", range(len(environment())))
def test_a_pack_of_other_versions_or_of_another_host(part: int, pack: Path) -> None:
    theirs = list(environment())
    theirs[part] += "x"
    rewrite(pack, restate(environment=theirs))
    with pytest.raises(PackError) as refused:
        load_pack(pack)
    expected = f"the pack {pack} is for {theirs[part]}, and this is {environment()[part]}; make it again"
    assert str(refused.value) == expected


def test_a_pack_for_other_gpus(fresh: Path, pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    with pytest.raises(PackError, match=r"is for sm_90a, and this GPU is sm_100a$"):
        load_pack(pack)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(PackError, match=r"is for sm_90a, and this GPU is none that kernels are for$"):
        load_pack(pack)
    assert packing._packs == {}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    load_pack(pack)
    assert packed_kernels(SPEC, Arch.SM90A) == [KERNEL]


def changed_code(members: dict[str, bytes]) -> None:
    name = f"{KERNEL.name}.so"
    members[name] = members[name][:-1] + bytes([members[name][-1] ^ 1])


def lost_code(members: dict[str, bytes]) -> None:
    del members[f"{KERNEL.name}.so"]


def lost_manifest(members: dict[str, bytes]) -> None:
    del members["manifest.json"]


def pickled(members: dict[str, bytes]) -> None:
    members["manifest.json"] = b"\x80\x04N."


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (changed_code, r"was changed: cute_\w+ does not match its checksum$"),
        (lost_code, r"is not a valid pack: .*there is no member 'cute_"),
        (lost_manifest, r"is not a valid pack: .*there is no member 'manifest"),
        (pickled, r"is not a valid pack: "),
        (restate(format=5), r"has format 5; this version reads 4$"),
        (restate(kernels=[]), r"is not a valid pack: "),
        (restate(problems=None), r"is not a valid pack: "),
    ],
)
def test_a_pack_that_was_changed(
    change: Callable[[dict[str, bytes]], None], sentence: str, fresh: Path, pack: Path
) -> None:
    rewrite(pack, change)
    with pytest.raises(PackError, match=sentence) as refused:
        load_pack(pack)
    assert str(pack) in str(refused.value) and "\n" not in str(refused.value)
    assert load_known([KERNEL]) == {}


def test_what_is_no_pack_at_all(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"missing can't be read: No such file or directory$"):
        load_pack(tmp_path / "missing")
    (tmp_path / "text").write_text("kernels")
    with pytest.raises(PackError, match=r"text is not a valid pack: it does not end as a zip archive does$"):
        load_pack(tmp_path / "text")


def test_a_pack_that_others_may_write(pack: Path) -> None:
    pack.chmod(0o666)
    with pytest.raises(PackError, match=r"the pack .* can't be trusted: others may write .* \(mode 666\)$"):
        load_pack(pack)


def test_a_refused_pack_of_the_environment_is_warned_of_once(
    fresh: Path, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(pack, changed_code)
    monkeypatch.setenv("CUTE_BACKEND_PACK", str(pack))
    with pytest.warns(RuntimeWarning, match="was changed: .*; kernels are compiled") as warned:
        assert load_known([KERNEL]) == {} == load_known([KERNEL])
    assert len(runtime_warnings(warned)) == 1


def test_a_pack_in_a_folder_that_is_gone_is_warned_of_once(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cwd() -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setenv("CUTE_BACKEND_PACK", "kernels.cutepack")
    monkeypatch.setattr(os, "getcwd", cwd)
    with pytest.warns(RuntimeWarning, match="there is no pack kernels.cutepack: .* are compiled") as warned:
        assert packing.packs() == packing.packs() == []
    assert len(runtime_warnings(warned)) == 1


def test_a_pack_that_is_replaced_under_the_process_is_not_loaded_from(fresh: Path, pack: Path) -> None:
    load_pack(pack)
    rewrite(pack, changed_code)
    with pytest.warns(RuntimeWarning, match="is not used, as it fails: .*was changed"):
        assert load_known([KERNEL]) == {}


# What is prepared of a program that a pack was made for

GPU = Device(-1, Arch.SM90A, 132, "a GPU")


# Installed packs


@pytest.fixture
def site(fresh: Path, pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages, in which a wheel with the pack is installed. Returns the pack's path there."""
    pytest.importorskip("setuptools", minversion="77")
    monkeypatch.setattr(
        wheels, "make_pack", lambda request, path: shutil.copy(pack, path) and Written(1, 1, "")
    )
    wheel = wheels.make_wheel(aot.Request({}), Arch.SM90A, tmp_path)
    folder = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    monkeypatch.syspath_prepend(folder)
    return folder / "cute_backend_kernels_sm_90a" / wheels.FILE


def test_an_installed_pack_is_found_and_no_module_of_it_is_imported(site: Path) -> None:
    assert [(each.path, each.installed) for each in packing.packs()] == [(site, True)]
    words = f"{site}, for sm_90a, of graphs of torch {torch.__version__}, installed"
    assert ("pack", words) in [*doctor._packs()]
    assert set(load_known([KERNEL])) == {KERNEL}
    assert site.parent.name not in sys.modules


def test_of_an_installed_pack_only_the_code_that_is_loaded_is_checked(site: Path) -> None:
    rewrite(site, changed_code)
    assert [each.path for each in packing.packs()] == [site]
    with pytest.warns(RuntimeWarning, match="does not match its checksum"):
        assert load_known([KERNEL]) == {}


@pytest.mark.filterwarnings("error")
def test_what_an_installed_pack_lacks_is_compiled_without_a_warning(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        building, "_build_all", lambda kernels, built: {each: BuildError("") for each in kernels}
    )
    other = kernel_of(make_spec(second_store=True))
    assert isinstance(obtain([other])[other], BuildError)


@pytest.mark.exhaustive
def test_a_wheel_has_every_kernel_of_a_program(tmp_path: Path) -> None:
    """In a process that has the wheel on its path, and neither a cache nor a compiler."""
    program = "scaled_mm_recipes.py:rowwise"
    wheels.main(["--arch", "sm_90a", "--only", program, "-o", str(tmp_path)])
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    done = subprocess.run(
        [sys.executable, find_in_pack.__file__, program],
        env={
            **{name: value for name, value in os.environ.items() if name != "CUTE_BACKEND_PACK"},
            "CUTE_BACKEND_CACHE_DIR": str(tmp_path / "kernels"),
            "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path]),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report["loaded"]) > 4 and report["missing"] == []


def test_a_wheels_images_have_a_symbolic_batch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    images, rows, sizes = torch.zeros(2, 3, 8, 8), torch.zeros(2, 4), set[tuple[bool, ...]]()

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        given = (node.meta["example_value"] for node in gm.graph.nodes if node.op == "placeholder")
        sizes.update(
            tuple(type(n) is int for n in each.shape) for each in given if isinstance(each, torch.Tensor)
        )
        return gm

    case = SimpleNamespace(ARCHITECTURES=["it"], architecture=lambda name: (torch.add, (images, rows)))
    monkeypatch.setattr(wheels, "_module", lambda name: case)
    _, args = wheels.program("it")
    torch.compile(lambda a, b: (a + 1, b + 1), backend=backend, dynamic=True)(*args)
    assert sizes == {(False, True, True, True), (False, False)}


def test_a_library_needs_no_libc(code: bytes) -> None:
    """Neither a file nor a version of one: any that the DSL's runtime is for will do."""
    assert code.startswith(b"\x7fELF") and b"TVMFFIEnvGetStream" in code
    assert b"libc" not in code and b"GLIBC" not in code


def without_a_symbol(members: dict[str, bytes]) -> None:
    """Let a library ask for a function that this system lacks, as one for another system may."""
    name = f"{KERNEL.name}.so"
    code = members[name].replace(b"TVMFFIEnvGetStream", b"TVMFFIEnvGetFuture")
    assert code != members[name]
    manifest = json.loads(members["manifest.json"])
    manifest["kernels"][KERNEL.name]["sha256"] = hashlib.sha256(code).hexdigest()
    members |= {name: code, "manifest.json": json.dumps(manifest).encode()}


def test_a_library_that_does_not_load_here_is_compiled(site: Path) -> None:
    rewrite(site, without_a_symbol)
    assert packed_kernels(SPEC, Arch.SM90A) == [KERNEL]
    with pytest.warns(RuntimeWarning, match="a kernel of .* is not used, as it fails: .*TVMFFIEnvGetFuture"):
        assert load_known([KERNEL]) == {}


@pytest.mark.filterwarnings("error")
def test_an_installed_pack_for_another_gpu_is_of_no_use_and_no_harm(site: Path) -> None:
    assert packed_kernels(SPEC, Arch.SM100A) == []
    assert packed_kernels(SPEC, Arch.SM90A) == [KERNEL]


def test_an_installed_pack_of_other_versions_is_refused_once(site: Path) -> None:
    rewrite(site, restate(environment=["another", *environment()[1:]]))
    with pytest.warns(RuntimeWarning, match="the pack .* is for another, .*; kernels are compiled") as warned:
        assert packing.packs() == packing.packs() == []
    assert len(runtime_warnings(warned)) == 1


def test_a_pack_for_unknown_sizes_serves_all(gpu: list[Kernel], tmp_path: Path, code: bytes) -> None:
    anything = Problem(SPEC, None, None, None)
    write_any_size(tmp_path / "any.cutepack", code)
    load_pack(tmp_path / "any.cutepack")
    prepare([Problem(SPEC, 300, 4096, 5120), Problem(SPEC, None, 8, 8), anything], -1)
    assert gpu == []
    prepare([replace(anything, constraints=Constraints(tile="64x96_1x1"))], -1)
    assert gpu


def test_products_of_any_size_are_found_without_their_sizes() -> None:
    a, b = torch.zeros(32, 64).bfloat16(), torch.zeros(64, 128).bfloat16()
    found = aot.find_problems(lambda a, b: (a @ b).relu(), (a, b), Arch.SM90A, any_m=False, any_size=True)
    assert found and {(each.m, each.n, each.k, each.groups) for each in found} == {(None,) * 4}


# The launches that a pack serves


@pytest.fixture
def gpu(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """A described GPU; and what is asked to be built for it."""
    asked: list[Kernel] = []

    def counting(kernels: Any) -> dict[Kernel, Any]:
        asked.extend(kernels)
        return {kernel: lambda *arguments: None for kernel in asked}

    launches.on(GPU, monkeypatch)
    monkeypatch.setattr(rungs, "obtain", counting)
    monkeypatch.setattr(rungs, "begin", lambda kernel, then: asked.append(kernel))
    monkeypatch.setattr(rungs, "_failed", set())
    return asked


def half_packed(path: Path, code: bytes) -> list[Kernel]:
    """Load a pack with all that M up to 256 reaches; what of the rest it lacks."""
    problem = Problem(SPEC, None, 4096, 4096)
    there = reachable_kernels(problem, Arch.SM90A, 132, buckets=buckets_of(1, 256))
    write_pack(path, Content(dict.fromkeys(there, (code, FIGURES)), [problem], (1, 256)))
    load_pack(path)
    return [kernel for kernel in reachable_kernels(problem, Arch.SM90A, 132) if kernel not in there]


def test_beyond_the_range_of_m_the_nearest_serves(gpu: list[Kernel], tmp_path: Path, code: bytes) -> None:
    assert half_packed(tmp_path / "half.cutepack", code)
    prepare([Problem(SPEC, None, 4096, 4096)], -1)
    prepare([Problem(SPEC, 8192, 4096, 4096)], -1)
    prepare([Problem(SPEC, None, None, 4096)], -1)
    assert gpu == []


def test_another_n_is_no_problem_of_the_pack(gpu: list[Kernel], tmp_path: Path, code: bytes) -> None:
    lacking = half_packed(tmp_path / "half.cutepack", code)
    prepare([Problem(SPEC, None, 4095 + 1024, 4096)], -1)
    assert gpu and {kernel.plan.alignment for kernel in gpu} == {Alignment.PLAIN}
    assert lacking


def test_a_pack_knows_of_how_many_groups_its_problems_are(tmp_path: Path, code: bytes) -> None:
    kernels = reachable_kernels(PROBLEM, Arch.SM90A, 132)
    path = tmp_path / "groups.cutepack"
    compiled = dict.fromkeys(kernels, (code, FIGURES))
    write_pack(path, Content(compiled, [replace(PROBLEM, groups=8)], None))
    pack = Pack(path)
    served = [pack.serves(replace(PROBLEM, groups=groups), Arch.SM90A) for groups in (8, None, 16)]
    assert served == [True, True, False]


def test_a_pack_knows_under_which_constraints_its_problems_are(tmp_path: Path, code: bytes) -> None:
    named, other = (replace(PROBLEM, constraints=Constraints(tile=name)) for name in ("64x64_1x1", "64x8"))
    kernels = reachable_kernels(named, Arch.SM90A, 132)
    path = tmp_path / "named.cutepack"
    write_pack(path, Content(dict.fromkeys(kernels, (code, FIGURES)), [named], None))
    pack = Pack(path)
    assert [pack.serves(each, Arch.SM90A) for each in (named, other, PROBLEM)] == [True, False, False]


def test_a_batch_invariant_region_takes_its_own_kernel_alone(
    gpu: list[Kernel], tmp_path: Path, code: bytes
) -> None:
    problem = Problem(SPEC, None, 4096, 4096, constraints=Constraints(batch_invariant=True))
    own = reachable_kernels(problem, Arch.SM90A, 132)
    others = [
        each
        for each in reachable_kernels(replace(problem, constraints=UNCONSTRAINED), Arch.SM90A, 132)
        if each not in own
    ]
    assert {each.plan.alignment for each in others} == {each.plan.alignment for each in own}
    path = tmp_path / "others.cutepack"
    write_pack(path, Content(dict.fromkeys(others, (code, FIGURES)), [problem], None))
    load_pack(path)
    prepare([problem], -1)
    assert gpu == own


# Better kernels than those of a pack for any size

SIZES = (300, 4096, 5120)


@dataclass
class Process:
    """A process beside a pack for any size: the kernels that are on disk, that were begun, and that ran."""

    begun: list[Kernel]
    on_disk: set[Kernel]
    ran: list[Kernel] = field(default_factory=list)

    def function(self, kernel: Kernel) -> Callable[..., None]:
        return lambda *arguments: self.ran.append(kernel)

    def prepare(self, problem: Problem) -> None:
        prepare([problem], -1)

    def launch(self, *sizes: int) -> Kernel:
        """Launches the product, and returns the kernel that ran."""
        launching.launch(*random_operands(SPEC, *sizes, torch.Generator()), SPEC.to_json())
        return self.ran[-1]


@pytest.fixture
def beside(gpu: list[Kernel], tmp_path: Path, code: bytes, monkeypatch: pytest.MonkeyPatch) -> Process:
    process = Process(gpu, set())
    write_any_size(tmp_path / "any.cutepack", code)
    pack = Pack(tmp_path / "any.cutepack", installed=True)
    monkeypatch.setitem(packing._packs, pack.path, pack)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})

    def load_known(kernels: Iterable[Kernel]) -> dict[Kernel, Any]:
        return {kernel: process.function(kernel) for kernel in kernels}

    def load_standing(kernels: Iterable[Kernel]) -> dict[Kernel, Obtained]:
        found = load_known(set(kernels) & process.on_disk)
        return {kernel: Obtained(kernel, function) for kernel, function in found.items()}

    monkeypatch.setattr(spec_kernels, "load_known", load_known)
    for module in (preparing, spec_kernels):
        monkeypatch.setattr(module, "load_standing", load_standing)
    return process


def write_any_size(path: Path, code: bytes) -> None:
    """Write a pack with the kernels of any size of a spec."""
    anything = Problem(SPEC, None, None, None)
    kernels = reachable_kernels(anything, Arch.SM90A, 132)
    write_pack(path, Content(dict.fromkeys(kernels, (code, FIGURES)), [anything], None))


def best(*sizes: int) -> Kernel:
    """The kernel of a problem with aligned operands."""
    return reachable_kernels(Problem(SPEC, *sizes), Arch.SM90A, 132)[0]


def test_a_better_kernel_than_a_packs_is_built_for_the_next_process(
    beside: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside.prepare(Problem(SPEC, *SIZES))
    assert beside.begun == [], "the program that compiles has the cores"
    served = beside.launch(*SIZES)
    assert served != best(*SIZES) and served in packed_kernels(SPEC, Arch.SM90A)
    assert beside.begun == [best(*SIZES)] and counters["cute_backend"]["built_for_later"] == 1

    beside.on_disk.add(best(*SIZES))
    beside.prepare(Problem(SPEC, *SIZES))
    beside.prepare(Problem(SPEC, 8, 4096, 5120))
    assert beside.launch(*SIZES) == beside.launch(*SIZES) == served, "the bits of a process stay as they are"
    assert beside.begun.count(best(*SIZES)) == 1

    monkeypatch.setattr(launching, "_launchers", {})
    beside.prepare(Problem(SPEC, *SIZES))
    assert beside.launch(*SIZES) == best(*SIZES)


def test_a_graph_of_inductors_cache_takes_the_better_kernel(beside: Process) -> None:
    """Nothing announces its regions."""
    beside.on_disk.add(best(*SIZES))
    assert beside.launch(*SIZES) == best(*SIZES)


def test_an_m_that_varies_takes_the_packs_kernels(beside: Process) -> None:
    beside.prepare(Problem(SPEC, None, *SIZES[1:]))
    assert beside.launch(*SIZES) in packed_kernels(SPEC, Arch.SM90A)
    assert beside.begun == []


@pytest.mark.parametrize("why", ["one core", "deterministic", "named", "its sizes"])
def test_no_kernel_is_built_for_later(
    why: str, beside: Process, tmp_path: Path, code: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "one core":
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    if why == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    if why == "named":
        load_pack(tmp_path / "any.cutepack")
    if why == "its sizes":
        others = dict.fromkeys(packed_kernels(SPEC, Arch.SM90A), (code, FIGURES))
        write_pack(tmp_path / "n.cutepack", Content(others, [Problem(SPEC, None, *SIZES[1:])], None))
        named = tmp_path / "n.cutepack"
        monkeypatch.setitem(packing._packs, named, Pack(named, installed=True))
    beside.prepare(Problem(SPEC, *SIZES))
    assert beside.launch(*SIZES) != best(*SIZES)
    assert beside.begun == [] and counters["cute_backend"]["built_for_later"] == 0


def test_a_kernel_that_another_region_needs_serves_both(beside: Process) -> None:
    beside.prepare(Problem(SPEC, *SIZES))
    (launcher,) = launching._launchers.values()
    assert best(*SIZES) in launcher.kernels.later
    launcher.kernels.expect(best(*SIZES))
    assert best(*SIZES) not in launcher.kernels.later


# Making


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The program, and its pack for Hopper, made by the command."""
    folder = tmp_path_factory.mktemp("made")
    program, path = folder / "program.py", folder / "model.cutepack"
    program.write_text(PROGRAM)
    arguments = ["aot", f"{program}:layer", "--arch", "sm_90a", "--m", "1:64", "-o", str(path)]
    assert main(arguments) == 0
    return program, path


def test_a_pack_has_a_kernel_for_every_alignment_and_reduction(made: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(made[1]) as archive:
        manifest = json.loads(archive.read("manifest.json"))
        members = archive.namelist()
    (spec,) = [EpilogueSpec.from_json(json.dumps(each)) for each in manifest["specs"].values()]
    assert {name: each.axis for name, each in spec.reductions.items()} == {"out1": Axis.ROW}
    assert [load.kind for load in spec.loads_of(LoadKind.EXACT)] == [LoadKind.EXACT]
    problem = Problem(spec, None, 128, 64)
    kernels = reachable_kernels(problem, Arch.SM90A, 132, buckets=(16, 32, 64))
    assert {kernel.plan.alignment for kernel in kernels} == set(Alignment)
    assert set(manifest["kernels"]) == {kernel.name for kernel in kernels}
    assert set(members) == {"manifest.json", *(f"{kernel.name}.so" for kernel in kernels)}
    assert manifest["environment"] == list(environment())
    assert manifest["m"] == [1, 64] and manifest["problems"] == [[spec.key, 128, 64, None, ""]]
    assert all(each["spill_bytes"] == 0 for each in manifest["kernels"].values())


def test_a_process_that_is_served_compiles_nothing(made: tuple[Path, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(made[1]) as archive:
        manifest = json.loads(archive.read("manifest.json"))
    specs = [EpilogueSpec.from_json(json.dumps(each)).to_json() for each in manifest["specs"].values()]
    home = tmp_path / "kernels"
    done = subprocess.run(
        [sys.executable, serve_pack.__file__, json.dumps(specs)],
        env={
            **os.environ,
            "CUTE_BACKEND_PACK": str(made[1]),
            "CUTE_BACKEND_CACHE_DIR": str(home),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report["told"]) == 3 and all("expected device_type=cuda" in each for each in report["told"])
    assert report["loaded"] == sorted(manifest["kernels"])
    assert report["counters"] == {} and report["warnings"] == [] and report["imported"] == []
    assert not list(home.glob("*"))


def test_a_second_run_compiles_nothing_and_makes_the_same_file(
    made: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "again.cutepack"
    counters.clear()
    assert main(["aot", f"{made[0]}:layer", "--arch", "sm_90a", "--m", "1:64", "-o", str(again)]) == 0
    assert counters["cute_backend"]["kernels_built"] == 0
    assert again.read_bytes() == made[1].read_bytes()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{again}: for sm_90a, epilogues: 1, kernels: 2, ")
    sha256 = second.removeprefix("sha256 of its manifest: ")
    assert Pack(again, sha256).archs == {Arch.SM90A}


def test_the_products_of_sample_are_found() -> None:
    hidden, weight = torch.zeros(4, 64).bfloat16(), torch.zeros(256, 64).bfloat16()

    def draw(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return cute_backend.sample(hidden, weight, num_samples=9, seed=1)

    problems = aot.find_problems(draw, (hidden, weight), Arch.SM90A, any_m=False)
    assert [(each.m, each.n, each.k) for each in problems] == [(4, 256, 64)] * 2
    assert [len(each.spec.reductions) for each in problems] == [8, 1]


def test_a_pack_of_scales_of_blocks_serves_their_recipe_alone(tmp_path: Path, code: bytes) -> None:
    program = BLOCKWISE["blockwise_silu_residual"]
    inputs = program.inputs(InputsOf(256, 384, 640))
    (problem,) = aot.find_problems(program.fn, inputs, Arch.SM90A, any_m=True)
    path = tmp_path / "blocks.cutepack"
    kernels = reachable_kernels(problem, Arch.SM90A, 132)
    write_pack(path, Content(dict.fromkeys(kernels, (code, FIGURES)), [problem], (1, 4096)))

    def scaled(b: Scaling) -> Problem:
        accumulators = (replace(problem.spec.product, b_scaling=b),)
        return replace(problem, spec=replace(problem.spec, accumulators=accumulators))

    pack = Pack(path)
    assert [pack.serves(scaled(b), Arch.SM90A) for b in (Scaling.SQUARE, Scaling.LINE)] == [True, False]


def test_a_pack_holds_the_tile_that_is_named_but_for_sampling() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.ReLU()).bfloat16()

    def draw(hidden: torch.Tensor) -> torch.Tensor:
        return cute_backend.sample(layer(hidden), layer[0].weight, seed=1)

    with config.patch(tile="64x256_1x1_pingpong"):
        problems = aot.find_problems(draw, (torch.zeros(16, 4096).bfloat16(),), Arch.SM90A, any_m=True)
    assert [each.constraints.tile for each in problems] == ["64x256_1x1_pingpong", None]
    kernels = set(aot._kernels(aot.Request({Arch.SM90A: problems[:1]}, (1, 65536), ())))
    assert {kernel.plan.tile.name for kernel in kernels} == {"64x256_1x1_pingpong"}


def test_sizes_of_m_are_those_of_the_range_or_of_the_example() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.ReLU()).bfloat16()
    problems = aot.find_problems(layer, (torch.zeros(16, 4096).bfloat16(),), Arch.SM90A, any_m=True)
    assert {(each.m, each.n, each.k) for each in problems} == {(None, 4096, 4096)}
    (spec,) = {each.spec for each in problems}

    def packed(m: tuple[int, int] | None, sm_counts: tuple[int, ...] = ()) -> set[Kernel]:
        return set(aot._kernels(aot.Request({Arch.SM90A: problems}, m, sm_counts)))

    everything = set(reachable_kernels(Problem(spec, None, 4096, 4096), Arch.SM90A, 132))
    assert packed((1, 65536)) == everything and 1 < len(everything) <= MAX_KERNELS
    assert len(packed((1, 16))) == 1 and packed((1, 16)) < everything
    assert packed((1, 65536), (132, 16)) == everything | set(
        reachable_kernels(Problem(spec, None, 4096, 4096), Arch.SM90A, 16)
    )


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["aot", *arguments]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    return line


def test_what_can_not_be_packed_is_told(
    made: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, output = made[0], str(tmp_path / "no.cutepack")
    assert "nothing in the program is fused" in refused(capsys, f"{program}:nothing", "-o", output)
    assert "'64:1' is no range LOW:HIGH" in refused(capsys, str(program), "-o", output, "--m", "64:1")
    assert "'0' is no positive number" in refused(capsys, str(program), "-o", output, "--sm-count", "0")
    both = refused(capsys, str(program), "-o", output, "--m", "1:64", "--any-size")
    assert "--any-size serves any number of rows: leave out --m" in both
    assert "arch is 'sm_75'" in refused(capsys, str(program), "-o", output, "--arch", "sm_75")
    nowhere = str(tmp_path / "missing" / "no.cutepack")
    said = f"the folder of the pack, {tmp_path / 'missing'}, does not exist"
    assert said in refused(capsys, str(program), "-o", nowhere)
    assert not Path(output).exists()


def test_a_pack_that_changes_while_another_is_made_is_told_of(
    made: tuple[Path, Path], fresh: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def changed(pack: Pack, kernel: Kernel) -> None:
        raise PackError(f"the pack {pack.path} was changed")

    load_pack(made[1])
    monkeypatch.setattr(Pack, "read", changed)
    arguments = (f"{made[0]}:layer", "--arch", "sm_90a", "--m", "1:64", "-o", str(fresh.parent / "again"))
    monkeypatch.setattr(rungs, "obtain", lambda kernels: dict.fromkeys(kernels))
    assert refused(capsys, *arguments) == f"cute_backend: the pack {made[1]} was changed"


def test_without_a_linker_there_is_no_pack(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_here(monkeypatch)
    monkeypatch.setattr(linking, "find_linker", lambda: None)
    monkeypatch.setattr("cute_backend.memory_ops.emit.emit", lambda plan, *how: source(plan.spec))
    monkeypatch.setattr("cute_backend.runtime.compiling.compile.compile_kernel", compile_kernel)
    problem = Problem(make_spec(exact=False), 16, 64, 64)
    with pytest.raises(UnavailableError, match="no linker was here"):
        aot.make_pack(aot.Request({Arch.SM90A: [problem]}), fresh / "no.cutepack")


def test_a_pack_has_what_was_timed_of_its_problems(
    fresh: Path, tmp_path: Path, code: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU of that model, they decide for who has the pack alone."""
    problem = Problem(SPEC, 257, 4096, 512)
    key = Key(SPEC, Alignment.TMA, 257, 4096, 512, "a GPU, 132 SMs")
    winner = Result(TileConfig(Arch.SM90A, 64, 256, raster_m=4), 12.25, 13.5)
    others = {replace(key, m=258): winner, replace(key, spec=make_spec(second_store=True)): winner}
    remembered().put({key: winner, **others})
    monkeypatch.setattr(aot, "_compiled", lambda kernels: dict.fromkeys(kernels, (code, FIGURES)))
    aot.make_pack(aot.Request({Arch.SM90A: [problem]}), tmp_path / "timed.cutepack")
    (fresh / "tuned.json").unlink()
    assert remembered().get(key) is None
    load_pack(tmp_path / "timed.cutepack")
    assert [remembered().get(each) for each in (key, *others)] == [winner, None, None]
    (pack,) = packing.packs()
    kernel = Kernel.found(plan(SPEC, winner.config, Alignment.TMA))
    assert kernel in pack.kernels(SPEC, Arch.SM90A)
    better = replace(winner, us=11.0)
    remembered().put({key: better})
    assert remembered().get(key) == better  # its own timings come first

    rewrite(pack.path, restate(timed={key.text: {"us": "fast"}}))
    monkeypatch.setattr(packing, "_packs", {})
    (fresh / "tuned.json").unlink()
    load_pack(pack.path)
    assert remembered().get(key) is None


def test_what_another_pack_has_is_not_compiled_again(fresh: Path, pack: Path, code: bytes) -> None:
    load_pack(pack)
    assert aot._compiled([KERNEL]) == {KERNEL: (code, FIGURES)}


def test_a_pack_opens_without_its_kernels_being_parsed(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EpilogueSpec, "from_json", None)
    assert Pack(pack).serves(PROBLEM, Arch.SM90A)
    assert not Pack(pack).serves(PROBLEM, Arch.SM100A)
