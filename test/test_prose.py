"""English that a stranger reads once: counts of phrases that do not stay away by themselves.

Each phrase stands for a way of writing that makes readers stop. What it should be instead is beside it. The
test has no opinion on style beyond these; a line that needs one of them is added to `ALLOWED`.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/*.md", "benchmarks/**/*.md")
SOURCES = ("cute_backend/**/*.py", "benchmarks/*.py", "docs/*.py", "examples/*.py")

PHRASES = {
    r"\b[Tt]old\b": "report, show or receive: a page is not told, it shows",
    r"\b[Ss]o many\b": "the number, or the parameter that holds it",
    r"\b[Ii]n turns?\b": "ping-pong, alternate, round-robin, or one after another",
    r"\bK in parts\b": "split-K",
    r"^\s*(Whose|None of which|Nothing of which) [a-z ]+\.$": "a main clause: its subject first",
    r"\b[Ll]ikes best\b": "predicts to be fastest",
    r"\bis no sound\b": "is not a valid",
    r"\b[Tt]urns? of (a|the) loop\b": "iterations of a loop",
    r"\b[Tt]aken apart\b": "decomposed or divided",
    r"^# (which|whose|here, for)\b": "a clause with its own subject",
    r"\bNone where\b": "None if",
    r"\bunder way\b": "in progress or in flight",
    r"\b[Ss]imulated alone\b": "only simulated",
    r"\b(time|speed) by (ours|that of)\b": "time divided by ours",
    r"\bsome hundred instructions\b": "the number",
    r"\bas many, and\b": "a clause with a noun",
}
"""A regular expression for each phrase, and its replacement."""

ANY_PHRASE = re.compile("|".join(phrase.replace("^", "").replace("$", "") for phrase in PHRASES))
"""Every phrase, anywhere in a line: a file without any has none, and is not divided into tokens."""

ALLOWED: dict[str, int] = {}
"""How often a file may have any of the phrases, by its path."""


def prose(path: Path, messages: bool = False) -> Iterator[tuple[int, str]]:
    """Lines of prose with their numbers: of a page all but code, of a source its docstrings and comments and,
    with `messages`, its other texts of several words."""
    text = path.read_text()
    if path.suffix == ".md":
        code = False
        for number, line in enumerate(text.splitlines(), 1):
            code ^= line.startswith("```")
            if not code:
                yield number, line
        return
    for node in ast.walk(ast.parse(text)):
        text_of = node if messages else node.value if isinstance(node, ast.Expr) else None
        if isinstance(text_of, ast.Constant) and isinstance(text_of.value, str) and " " in text_of.value:
            for offset, line in enumerate(text_of.value.splitlines()):
                yield text_of.lineno + offset, line
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def files(patterns: tuple[str, ...], having: re.Pattern[str] = re.compile("")) -> list[Path]:
    """Files with a match of `having`."""
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    ours = (path for path in found if "expected" not in path.parts and path != Path(__file__))
    return sorted(path for path in ours if having.search(path.read_text()))


def test_phrases_that_make_a_reader_stop_stay_away() -> None:
    found: dict[str, list[str]] = {}
    for path in files((*PAGES, *SOURCES, "test/**/*.py"), ANY_PHRASE):
        name = str(path.relative_to(ROOT))
        for number, line in prose(path):
            for phrase, instead in PHRASES.items():
                if match := re.search(phrase, line):
                    found.setdefault(name, []).append(f"{name}:{number}: {match[0]!r}; write {instead}")
    more = [line for name, lines in found.items() if len(lines) > ALLOWED.get(name, 0) for line in lines]
    assert not more, "\n".join(more)


HEADLESS = re.compile(r"(What|Whose|Of|Those|That of|None of which|As `)\b(?! (do|does|is|are)\b.*\?)")
"""The beginning of a docstring that names its subject only later, or in the name of what it documents."""


def test_docstrings_begin_with_what_they_describe() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {str(node.value.value).split(chr(10))[0]}"
        for path in files(
            ("cute_backend/**/*.py", "benchmarks/*.py", "docs/*.py", "examples/*.py", "test/support/**/*.py")
        )
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and HEADLESS.match(str(node.value.value))
    ]
    assert not found, "\n".join(found)


LATE_SUBJECT = re.compile(
    r"(?:^[\s#-]*|[.;] )(What|Whose|Those of|Those that|None of which|Nothing of) (?!.*\?)"
)
"""The beginning of a sentence whose subject is a clause, or is named only in the sentence before."""
LATE_WORDS = re.compile(r"(What|Whose|Those of|Those that|None of which|Nothing of) ")


def test_sentences_begin_with_their_subject() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files((*PAGES, *SOURCES), LATE_WORDS)
        for number, line in prose(path)
        if not line.startswith(("#", "|")) or path.suffix != ".md"
        if LATE_SUBJECT.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "planted", ["What it finds is kept.", "# It runs. Those of B are read.", "- What is x"]
)
def test_a_late_subject_is_found(planted: str) -> None:
    assert LATE_SUBJECT.search(planted)
    assert not LATE_SUBJECT.search("Know what it finds. What is it?")


@pytest.mark.parametrize(
    "planted",
    [
        "# It is told of.",
        '"""As many rows as there are so many."""',
        "x = 1  # K in parts",
        "f()  # which raises",
        '"""Gelu arrives taken apart, in turns of a loop."""',
    ],
)
def test_a_phrase_is_found(planted: str, tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(planted)
    assert any(re.search(phrase, line) for _, line in prose(path) for phrase in PHRASES)
