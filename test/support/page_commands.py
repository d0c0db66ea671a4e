"""The command lines of this package that pages show."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
]
READERS_OWN = ("FILE.py", "model.py", "program.py")
"""Names that stand for a file of the reader's."""

PROGRAM = "python -m cute_backend"


def commands() -> list[tuple[str, str]]:
    """The name of a page and a command line, for each that a page shows in a block of shell."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            ours = (line.split(" #")[0].strip() for line in lines if PROGRAM in line)
            found += [(page.name, line) for line in ours if not line.endswith("--version")]
    return found
