"""Draws random programs, judges the results of each under `cute`, and makes a program that fails smaller.

    program = draw(seed=0, index=17)
    verdict = judge(program)

`python -m cute_backend fuzz` does this for many programs. The modules by subject:

- The command: `command`.
- Programs: `drawn_program`, `draw`, `forms`, `attention`, `weights`, `vocabulary`,
  `block_scaled_products`, `block_formats`.
- Verdicts: `judge`, `bounds`, `shrink`.
"""

from cute_backend.fuzz.draw import draw
from cute_backend.fuzz.drawn_program import Program
from cute_backend.fuzz.forms import draw_form
from cute_backend.fuzz.judge import Verdict, judge
from cute_backend.fuzz.shrink import shrink

__all__ = ["Program", "Verdict", "draw", "draw_form", "judge", "shrink"]
