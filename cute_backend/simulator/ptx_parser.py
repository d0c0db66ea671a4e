"""Parses PTX text into instructions with operand objects. It knows no instruction's meaning.

Scopes `{ ... }` (inline assembly) have their own registers and labels (PTX ISA 4.4, "Identifiers" and 9.6
"Syntax of instructions"); they are renamed here, so that the rest sees one flat list.
"""

from __future__ import annotations

import re
import struct
from typing import Any, Union

from cute_backend.simulator.simulation_errors import PtxSyntaxError
from cute_backend.simulator.syntax import (
    TYPE_BYTES,
    Address,
    Entry,
    FloatBits,
    Immediate,
    Instruction,
    Label,
    Module,
    Not,
    Operand,
    Pair,
    Parameter,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)

FILES = {1: "h", 2: "h", 4: "w", 8: "d", 16: "q"}
_IDENTIFIER = r"[A-Za-z_$%][A-Za-z0-9_$.]*"
_LABEL = re.compile(r"([A-Za-z_$][A-Za-z0-9_$]*)\s*:(?!:)")
_INTEGER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|[0-9]+U?)$")
_SOURCE_FILE = re.compile(r"^\s*\.file\s+(\d+)\s+\"(?:[^\"]*/)?([^\"/]*)\"", re.M)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)


def parse(ptx: str) -> Module:
    """Reads a whole PTX module. Raises `PtxSyntaxError` with the line that can't be read."""
    return _Parser(ptx).module()


class _Scope:
    def __init__(self, parent: _Scope | None) -> None:
        self.parent = parent
        self.registers: dict[str, Register] = {}
        self.labels: dict[str, int] = {}
        self.tables: dict[str, list[str]] = {}

    def find(self, table: str, name: str) -> Any:
        scope: _Scope | None = self
        while scope is not None:
            found = getattr(scope, table).get(name)
            if found is not None:
                return found
            scope = scope.parent
        return None


class _Parser:
    def __init__(self, ptx: str) -> None:
        # Comments become blanks of the same shape, so that line numbers stay right.
        self.text = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), ptx)
        self.at = 0
        self.line = 1
        self.counted = 0
        # A .file may come after the .loc that refers to it.
        self.files = {int(n): name for n, name in _SOURCE_FILE.findall(self.text)}

    # --- characters and statements ---------------------------------------------------------------------
    def fail(self, message: str) -> PtxSyntaxError:
        return PtxSyntaxError(f"PTX line {self.line_at(self.at)}: {message}")

    def line_at(self, position: int) -> int:
        self.line += self.text.count("\n", self.counted, position) if position >= self.counted else 0
        self.counted = max(self.counted, position)
        return self.line

    def skip_blanks(self) -> bool:
        text, at = self.text, self.at
        while at < len(text) and text[at].isspace():
            at += 1
        self.at = at
        return at < len(text)

    def until(self, stop: str) -> str:
        end = self.text.find(stop, self.at)
        if end < 0:
            raise self.fail(f"no {stop!r} before the end of the text")
        found = self.text[self.at : end]
        self.at = end + 1
        return found.strip()

    # --- module ------------------------------------------------------------------------------------------
    def module(self) -> Module:
        module = Module("", "", {}, {})
        while self.skip_blanks():
            rest = self.text[self.at : self.at + 40]
            if rest.startswith((".version", ".target", ".address_size", ".file", ".loc")):
                words = self.until("\n").split(None, 1)
                if words[0] == ".target":
                    module.target = words[1].split(",")[0].strip()
                elif words[0] == ".version":
                    module.version = words[1]
            elif rest.startswith(".section"):
                self.until("{")
                self.until("}")
            elif re.match(r"(\.(visible|weak|extern)\s+)?\.(entry|func)\b", rest):
                self.function(module)
            else:
                variable = self.variable(self.until(";"))
                module.variables[variable.name] = variable
        return module

    def variable(self, statement: str) -> Variable:
        match = re.match(
            r"((?:\.(?:visible|weak|extern|common)\s+)*)\.(shared|global|const|local)\s+(?:\.attribute\([^)]*\)\s*)?"
            r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(" + _IDENTIFIER + r")\s*((?:\[[^\]]*\])*)\s*(?:=\s*(.*))?$",
            statement,
            re.S,
        )
        if match is None:
            raise self.fail(f"a declaration that is not understood: {statement[:80]!r}")
        prefix, space, align, kind, name, dims, initial = match.groups()
        count = 1
        sizes = re.findall(r"\[([^\]]*)\]", dims)
        for size in sizes:
            count *= int(size, 0) if size.strip() else 0
        width = TYPE_BYTES[kind]
        data = None
        if initial is not None:
            numbers = [_number(w.strip()) for w in initial.strip("{} \n\t").split(",") if w.strip()]
            data = b"".join(_pack(n, width, kind) for n in numbers).ljust(count * width, b"\0")
        return Variable(name, space, count * width, int(align or width), "extern" in prefix, data)

    # --- function ----------------------------------------------------------------------------------------
    def function(self, module: Module) -> None:
        head_end = min(p for p in (self.text.find("{", self.at), self.text.find(";", self.at)) if p >= 0)
        head = self.text[self.at : head_end]
        body = self.text[head_end] == "{"
        self.at = head_end + 1
        name_match = re.search(r"\.(entry|func)\s+(?:\([^)]*\)\s*)?(" + _IDENTIFIER + ")", head)
        assert name_match is not None
        if name_match.group(1) == "func":
            if body:
                self.skip_body()
            return
        entry = Entry(name_match.group(2))
        offset = 0
        for align, kind, name, size in re.findall(
            r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?"
            r"(" + _IDENTIFIER + r")(?:\[(\d+)\])?",
            head[name_match.end() :],
        ):
            width = TYPE_BYTES[kind]
            nbytes = width * int(size or 1)
            alignment = int(align or width)
            offset = (offset + alignment - 1) // alignment * alignment
            entry.parameters.append(Parameter(name, offset, nbytes))
            offset += nbytes
        for directive, target in (
            (r"\.reqntid", "required_threads"),
            (r"\.reqnctapercluster", "cluster"),
            (r"\.maxnreg", "most_registers"),
            (r"\.minnctapersm", "resident_ctas"),
        ):
            match = re.search(directive + r"\s+([\d,\s]+)", head)
            if match:
                numbers = [int(w) for w in match.group(1).split(",")]
                setattr(entry, target, tuple(numbers + [1] * (3 - len(numbers))))
        self.body(entry)
        module.entries[entry.name] = entry

    def skip_body(self) -> None:
        depth = 1
        while depth:
            match = re.compile(r"[{}]").search(self.text, self.at)
            if match is None:
                raise self.fail("a function body without an end")
            depth += 1 if match.group() == "{" else -1
            self.at = match.end()

    def body(self, entry: Entry) -> None:
        scope = _Scope(None)
        counts = {"p": 0, "h": 0, "w": 0, "d": 0, "q": 0}
        pending: list[tuple[int, str, str, _Scope, str | None]] = []
        source: str | None = None
        scopes: list[_Scope] = [scope]
        while True:
            if not self.skip_blanks():
                raise self.fail(f"entry {entry.name} has no end")
            start = self.at
            char = self.text[start]
            if char == "{":
                self.at += 1
                scopes.append(_Scope(scopes[-1]))
                continue
            if char == "}":
                self.at += 1
                scopes.pop()
                if not scopes:
                    break
                continue
            scope = scopes[-1]
            label = _LABEL.match(self.text, start)
            if label:
                scope.labels[label.group(1)] = len(pending)
                entry.labels.setdefault(label.group(1), len(pending))
                self.at = label.end()
                continue
            if char == ".":
                word_match = re.compile(r"\.\w+").match(self.text, start)
                word = word_match.group() if word_match else "."
                if word == ".loc":
                    numbers = self.until("\n").split()
                    source = f"{self.files.get(int(numbers[1]), '?')}:{numbers[2]}"
                elif word == ".file":
                    self.until("\n")
                elif word == ".reg":
                    self.registers(self.until(";"), scope, counts)
                elif word in (".shared", ".global", ".const", ".local"):
                    variable = self.variable(self.until(";"))
                    entry.variables[variable.name] = variable
                elif word == ".branchtargets":
                    names = self.until(";")[len(word) :].split(",")
                    last = max(scope.labels, key=lambda name: (scope.labels[name], name))
                    scope.tables[last] = [n.strip() for n in names]
                elif word in (".pragma", ".maxntid", ".minnctapersm", ".maxnreg", ".param"):
                    self.until(";")
                else:
                    raise self.fail(f"the directive {word} is not understood")
                continue
            line = self.line_at(start)
            statement = self.until(";")
            pending.append((line, statement, "", scope, source))
        for name, scope_tables in (
            (n, s) for s in {id(p[3]): p[3] for p in pending}.values() for n in s.tables
        ):
            entry.branch_targets[name] = tuple(
                scope_tables.find("labels", target) for target in scope_tables.tables[name]
            )
        for index, (line, statement, _, scope, where) in enumerate(pending):
            entry.instructions.append(self.instruction(index, line, statement, scope, where))
        entry.register_counts = counts

    def registers(self, statement: str, scope: _Scope, counts: dict[str, int]) -> None:
        match = re.match(r"\.reg\s+(?:\.v\d\s+)?\.(\w+)\s+(.*)$", statement, re.S)
        if match is None:
            raise self.fail(f"a register declaration that is not understood: {statement[:60]!r}")
        kind, names = match.groups()
        file = "p" if kind == "pred" else FILES[TYPE_BYTES[kind]]
        for name in (n.strip() for n in names.split(",")):
            block = re.match(r"(.*)<(\d+)>$", name)
            for each in (f"{block.group(1)}{i}" for i in range(int(block.group(2)))) if block else (name,):
                scope.registers[each] = Register(each, file, counts[file])
                counts[file] += 1

    def instruction(self, index: int, line: int, text: str, scope: _Scope, source: str | None) -> Instruction:
        rest = text
        guard = None
        if rest.startswith("@"):
            match = re.match(r"@(!?)\s*(" + _IDENTIFIER + r")\s+", rest)
            if match is None:
                raise PtxSyntaxError(f"PTX line {line}: a guard that is not understood: {text[:60]!r}")
            register = scope.find("registers", match.group(2))
            if register is None:
                raise PtxSyntaxError(f"PTX line {line}: the guard {match.group(2)} is not declared")
            guard = (register, match.group(1) == "!")
            rest = rest[match.end() :]
        words = rest.split(None, 1)
        opcode = words[0]
        operands: list[Operand] = []
        if len(words) > 1:
            for piece in _split(words[1]):
                operands.append(_operand(piece, scope, line))
        clean = " ".join(text.split())
        return Instruction(
            index, line, clean, opcode, tuple(opcode.split(".")), guard, tuple(operands), source
        )


def _split(text: str) -> list[str]:
    """Splits at commas outside brackets."""
    if not any(c in text for c in "[{("):
        return [piece.strip() for piece in text.split(",")]
    pieces, depth, start = [], 0, 0
    for position, char in enumerate(text):
        if char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == "," and depth == 0:
            pieces.append(text[start:position].strip())
            start = position + 1
    pieces.append(text[start:].strip())
    return pieces


def _number(text: str) -> int | float:
    if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
        return float(struct.unpack("<f", int(text[2:], 16).to_bytes(4, "little"))[0])
    if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
        return float(struct.unpack("<d", int(text[2:], 16).to_bytes(8, "little"))[0])
    if _INTEGER.match(text):
        digits = text.rstrip("U")
        sign = -1 if digits.startswith("-") else 1
        digits = digits.lstrip("+-")
        if len(digits) > 1 and digits[0] == "0" and digits[1].isdigit():
            return sign * int(digits, 8)
        return sign * int(digits, 0)
    return float(text)


def _pack(number: int | float, width: int, kind: str) -> bytes:
    if isinstance(number, float):
        return struct.pack({"f32": "<f", "f64": "<d"}[kind], number)
    return (number % (1 << (8 * width))).to_bytes(width, "little")


def _float_bits(text: str) -> Immediate | None:
    """0f and 0d literals keep their bits: NaN payloads and signs must survive."""
    if text[:2] in ("0f", "0F") and len(text) == 10:
        return FloatBits(_number(text), int(text[2:], 16), 4)
    if text[:2] in ("0d", "0D") and len(text) == 18:
        return FloatBits(_number(text), int(text[2:], 16), 8)
    return None


def _operand(text: str, scope: _Scope, line: int) -> Operand:
    if text == "_":
        return Sink()
    first = text[0]
    if first == "{":
        inner = text[1:-1].strip()
        return Vector(tuple(_operand(p, scope, line) for p in _split(inner)))
    if first == "[":
        pieces = _split(text[1:-1].strip())
        base, offset = _base(pieces[0], scope, line)
        return Address(base, offset, tuple(_operand(p, scope, line) for p in pieces[1:]))
    if first == "(":
        return Vector(tuple(_operand(p, scope, line) for p in _split(text[1:-1].strip())))
    if "|" in text:
        left, right = text.split("|")
        return Pair(_operand(left.strip(), scope, line), _operand(right.strip(), scope, line))
    if first == "!":
        register = scope.find("registers", text[1:].strip())
        if register is None:
            raise PtxSyntaxError(f"PTX line {line}: {text[1:]} is not declared")
        return Not(register)
    if first.isdigit() or (first in "+-" and len(text) > 1 and (text[1].isdigit() or text[1] == ".")):
        exact = _float_bits(text)
        return exact if exact is not None else Immediate(_number(text))
    base, offset = _base(text, scope, line)
    if isinstance(base, Symbol) and offset == 0:
        target = scope.find("labels", base.name)
        if target is not None:
            return Label(base.name, target)
    return Symbol(base.name, offset) if isinstance(base, Symbol) else base


def _base(text: str, scope: _Scope, line: int) -> tuple[Union[Register, Symbol, Immediate], int]:
    match = re.match(r"(" + _IDENTIFIER + r")\s*(?:\+?\s*([+-]?\s*\w+))?$", text)
    if match is None:
        if _INTEGER.match(text):
            return Immediate(int(_number(text))), 0
        raise PtxSyntaxError(f"PTX line {line}: an operand that is not understood: {text[:60]!r}")
    name, plus = match.groups()
    offset = int(_number(plus.replace(" ", ""))) if plus else 0
    register = scope.find("registers", name)
    if register is not None:
        return register, offset
    if name == "WARP_SZ":
        return Immediate(32), offset
    if name.startswith("%"):
        return Special(name), offset  # type: ignore[return-value]
    return Symbol(name), offset
