"""Random programs, the results of each under `cute`, and the smallest program behind a wrong result.

    program = draw(seed=0, index=17)
    verdict = judge(program)

`python -m cute_backend fuzz` does this for many.
"""

from cute_backend.fuzz.draw import draw
from cute_backend.fuzz.forms import draw_form
from cute_backend.fuzz.judge import Verdict, judge
from cute_backend.fuzz.program import Program
from cute_backend.fuzz.shrink import shrink

__all__ = ["Program", "Verdict", "draw", "draw_form", "judge", "shrink"]
