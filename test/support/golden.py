"""Golden files: generated text compared with what a person has read and accepted.

`EXPECTTEST_ACCEPT=1` (or `make golden`) writes what is generated instead of comparing.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

EXPECTED = Path(__file__).parents[1] / "expected"


def assert_expected(name: str, text: str) -> Path:
    """Compares `text` with the file `name` of test/expected. Returns the file's path."""
    __tracebackhide__ = True  # a failure shows only the difference
    path = EXPECTED / name
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        EXPECTED.mkdir(exist_ok=True)
        path.write_text(text)
        return path
    assert path.exists(), f"{path.name} is not there: EXPECTTEST_ACCEPT=1 writes it"
    expected = path.read_text()
    if text != expected:
        diff = difflib.unified_diff(
            expected.splitlines(), text.splitlines(), f"expected/{name}", "generated", lineterm=""
        )
        raise AssertionError(
            "\n".join([f"{name} differs; EXPECTTEST_ACCEPT=1 (or `make golden`) accepts it:", *diff])
        )
    return path


def assert_unexpected(name: str, why: str) -> None:
    """Checks that test/expected has no file `name`."""
    path = EXPECTED / name
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        path.unlink(missing_ok=True)
    assert not path.exists(), f"{name} is not needed, since {why}; EXPECTTEST_ACCEPT=1 removes it"


def check_samples(path: Path, name: str, sample: str) -> None:
    """Compares the sample `name` of a page with `sample`, or writes it."""
    text = path.read_text()
    pattern = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=\n<!-- /{name} -->)", re.DOTALL)
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        text, written = pattern.subn(lambda _: sample, text)
        assert written == 1
        path.write_text(text)
        return
    (shown,) = pattern.findall(text)
    assert shown == sample, "make golden rewrites it"
