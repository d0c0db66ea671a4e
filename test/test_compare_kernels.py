"""The verdicts of compare_kernels.py, on kernels that are made up."""

import struct
import sys
from pathlib import Path

import pytest

from compare_kernels import (
    Tree,
    Verdict,
    compare,
    cover,
    main,
    opcodes,
    record,
    report,
    sections_of,
    without_names,
)
from support.shipped import shipped

FADD, FMUL = bytes.fromhex("2172") + bytes(14), bytes.fromhex("2072") + bytes(14)


def cubin(code: bytes) -> bytes:
    """An ELF file with `code` in the section `.text.kernel`."""
    names = b"\0.text.kernel\0.names\0"
    header = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", 64 + len(names) + len(code))
    header = header.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, 3, 2)
    sections = [(0, 0, 0, 0, 0, 0), (1, 1, 0, 0, 64 + len(names), len(code)), (14, 3, 0, 0, 64, len(names))]
    table = b"".join(struct.pack("<IIQQQQ", *one).ljust(64, b"\0") for one in sections)
    return header.ljust(64, b"\0") + names + code + table


def kernel(ptx: str = "add", code: bytes = FADD, registers: int = 8) -> dict:
    figures = {"registers": registers, "spill bytes": 0, "shared memory": 0}
    return record({"ptx": ptx, "cubin": cubin(code), **figures})


def ptx_named(entry: str, symbol: str, added: str = "%r1") -> str:
    return f"""// made by a compiler
.extern .shared .align 1024 .b8 {symbol}[];
.visible .entry {entry}(
    .param .u32 {entry}_param_0
)
{{
    ld.param.b32 %r1, [{entry}_param_0]; // what it is given
    mov.b32 %r2, {symbol};
    add.s32 %r2, %r1, {added};
}}
.visible .entry {entry}_finish(.param .u32 {entry}_finish_param_0)
{{
}}
"""


def test_names_are_no_difference_and_operands_are():
    text = without_names(ptx_named("long_name_0", "room"))
    assert text == without_names(ptx_named("k", "smem_a"))
    assert "long_name" not in text and "[entry0_param_0]" in text and "entry1_param_0" in text
    assert text != without_names(ptx_named("k", "smem_a", added="%r2"))


def test_a_cubin_has_the_opcodes_of_its_code():
    code = FADD + FMUL + FADD
    assert dict(sections_of(cubin(code)))[".text.kernel"] == code
    assert opcodes(code) == {"0x221": 2, "0x220": 1}


def test_each_difference_has_its_verdict():
    same = kernel()
    other_code = kernel("add, differently", FADD[:8] + b"\1" + FADD[9:])
    cases = [
        (kernel(), Verdict.SAME_TEXT, ""),
        (kernel("sub"), Verdict.SAME_CODE, "registers 8, "),
        (other_code, Verdict.SAME_FIGURES, "instructions 1"),
        (kernel(code=FMUL), Verdict.DIFFERENT, "opcode 0x221 -1"),
        (kernel(registers=9), Verdict.DIFFERENT, "registers 8 -> 9"),
        (kernel("sub", FADD[:8] + b"\1" + FADD[9:], 9), Verdict.DIFFERENT, "registers 8 -> 9"),
        (kernel("sub", FMUL), Verdict.DIFFERENT, "opcode 0x221 -1"),
        ({"error": "BuildError: no"}, Verdict.UNBUILT, "working tree: BuildError: no"),
        (None, Verdict.ALONE, "the base only"),
    ]
    for after, verdict, facts in cases:
        found = compare("kernel", same, after)
        assert found.verdict is verdict and facts in found.facts, found


def test_the_status_is_that_of_the_worst_kernel(capsys):
    same, sub = {"one": kernel()}, {"one": kernel("sub")}
    assert report(same, same) == 0
    assert capsys.readouterr().out == "\n1 kernels: 1 have the same PTX and machine code\n"
    assert report(same, sub) == 0
    assert "    one\n        registers 8, spill bytes 0" in capsys.readouterr().out
    assert report(same, {"one": kernel("sub", FMUL)}) == 1
    assert report(same, {**same, "two": kernel()}) == 1
    assert "1 are in one tree alone" in capsys.readouterr().out


def test_what_can_not_be_compared_has_a_status_of_its_own(capsys, monkeypatch, tmp_path):
    command = ["compare_kernels", "--base", "no such revision", "--cache", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "compare_kernels: no such revision can't be read: fatal: " in capsys.readouterr().err


def test_a_tree_has_another_cache_where_what_lists_its_kernels_has_changed(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("cute_backend/ops.py", "test/a.py", "test/support/fx_walk/b.py")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("before")
    caches = [Tree(tmp_path, tmp_path / "cache", 1).cache]
    for path in paths:
        path.write_text("after")
        caches.append(Tree(tmp_path, tmp_path / "cache", 1).cache)
    assert len({*caches}) == len(caches)


def test_the_cover_has_every_tile_and_every_epilogue() -> None:
    tables = {
        "configurations/gelu-sm_90a": ("64x64-tma", "64x64-plain", "128x64-tma"),
        "configurations/bias-sm_90a": ("64x64-tma", "128x64-tma"),
        "configurations/amax-sm_90a": ("128x64-tma", "256x64-tma"),
        "configurations/bias-sm_80": ("64x64-tma",),
    }
    names = [f"{table}/{tile}" for table, tiles in tables.items() for tile in tiles]
    golden = ["golden/gelu-sm_90a", "golden/bias-sm_80"]
    assert cover([*golden, *names]) == [
        *golden,
        *(f"configurations/gelu-sm_90a/{tile}" for tile in tables["configurations/gelu-sm_90a"]),
        "configurations/bias-sm_90a/64x64-tma",
        "configurations/amax-sm_90a/256x64-tma",
        "configurations/bias-sm_80/64x64-tma",
    ]


def test_what_is_listed_has_names_of_its_own_and_both_alignments():
    listed = list(shipped(lambda label: label in ("golden/square-sm_90a", "configurations/square-sm_100a")))
    names = [one.name for one in listed]
    assert names[0] == "golden/square-sm_90a" and len(set(names)) == len(names) > 4
    plain = {name.removesuffix("-plain") for name in names if name.endswith("-plain")}
    assert plain == {name.removesuffix("-tma") for name in names if name.endswith("-tma")}
