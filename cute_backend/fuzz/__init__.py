"""Random programs, what each gives through `cute`, and the smallest program behind what is wrong.

    program = draw(seed=0, index=17)
    verdict = judge(program)

`python -m cute_backend fuzz` does this for many.
"""

from .draw import draw
from .forms import draw_form
from .judge import Verdict, judge
from .program import Program
from .shrink import shrink

__all__ = ["Program", "Verdict", "draw", "draw_form", "judge", "shrink"]
