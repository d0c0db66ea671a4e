"""A kernel that was compiled once serves all who ask for the same kernel with the same text, and no
others."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cute_backend.errors import BuildError
from cute_backend.planning import Arch
from cute_backend.runtime.compiling import compile as compiling
from cute_backend.runtime.kernels.built import Built
from cute_backend.runtime.kernels.kernel import Kernel
from support import cpp_once
from support.compile_once import FOLDER, Compile, once, remove_unused
from support.runtime.handmade import kernel_of, make_spec

KERNEL = kernel_of(make_spec())


class Counting:
    """A compiler that counts what it compiles, and refuses the text "bad"."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, kernel: Kernel, source: str, path: Path) -> Built:
        self.asked += 1
        if source == "bad":
            raise BuildError("bad")
        return Built(source, f"{kernel.name} for the {self.asked}. time", b"cubin", 1, 2, 3, b"object")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "built"))
    return tmp_path / "kernel.py"


def ask(compile_kernel: Compile, path: Path, text: str, kernel: Kernel = KERNEL) -> Built:
    path.write_text(text)
    return compile_kernel(kernel, text, path)


def test_the_same_text_is_compiled_once(path: Path) -> None:
    """For another process too, which has nothing but the folder."""
    first, second = Counting(), Counting()
    built = ask(once(first), path, "text")
    assert built.ptx.endswith("1. time")
    assert ask(once(second), path, "text") == built
    assert (first.asked, second.asked) == (1, 0)


def test_another_text_or_kernel_is_compiled(path: Path) -> None:
    counting = Counting()
    ask(once(counting), path, "text")
    ask(once(counting), path, "text ")
    ask(once(counting), path, "text", kernel_of(make_spec(), arch=Arch.SM100A))
    ask(once(counting), path, "text", kernel_of(make_spec(second_store=True)))
    assert counting.asked == 4


def test_errors_are_not_kept_nor_hidden(path: Path) -> None:
    counting = Counting()
    for _ in range(2):
        with pytest.raises(BuildError, match="bad"):
            ask(once(counting), path, "bad")
    assert counting.asked == 2


def test_a_text_that_was_never_written_is_left_to_the_compiler(path: Path) -> None:
    counting = Counting()
    ask(once(counting), path, "text")
    path.write_text("another")
    once(counting)(KERNEL, "text", path)
    assert counting.asked == 2


def test_the_package_is_wrapped_in_this_run() -> None:
    assert hasattr(compiling.compile_kernel, "__wrapped__")


def test_what_no_run_has_used_for_long_is_removed(path: Path) -> None:
    """A use counts, whatever the age. Nothing is left of a kernel that is removed."""
    counting = Counting()
    for text in ("used", "unused"):
        ask(once(counting), path, text)
    folder = path.parent / "built"
    for each in folder.iterdir():
        os.utime(each, (0, 0))
    ask(once(counting), path, "used")
    remove_unused(folder)
    assert counting.asked == 2
    ask(once(counting), path, "used")
    assert counting.asked == 2
    ask(once(counting), path, "unused")
    assert counting.asked == 3


def test_a_kernel_that_was_written_in_part_is_compiled_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends_early(self: Path, data: bytes) -> int:
        self.open("wb").write(data[:7])
        raise KeyboardInterrupt

    counting = Counting()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", ends_early)
        with pytest.raises(KeyboardInterrupt):
            ask(once(counting), path, "text")
    assert ask(once(counting), path, "text").ptx.endswith("2. time")


@dataclass
class Builder:
    """One of Inductor's, as far as `cpp_once` knows it."""

    target: Path

    def get_target_file_path(self) -> str:
        return str(self.target)


def test_a_library_of_inductors_kernels_is_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that finds out what the processor has is compiled again."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "built"))
    asked = []

    def build(builder: Any) -> None:
        asked.append(builder.target.name)
        builder.target.write_bytes(b"code")

    for run in ("first", "second"):
        (tmp_path / run).mkdir()
        for name in ("a.main.so", "a.so"):
            builder: Any = Builder(tmp_path / run / name)
            cpp_once.once(build)(builder)
            assert builder.target.read_bytes() == b"code"
    assert asked == ["a.main.so", "a.so", "a.so"]
