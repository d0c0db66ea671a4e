"""From a spec to the text of a kernel: where each load happens, then CuTe DSL Python that does it.

`plan` decides the placements, `emit` writes the module. The text depends on nothing but its arguments.
"""

from .emit import emit
from .placement import Placement, Plan, Variant, plan

__all__ = ["Placement", "Plan", "Variant", "emit", "plan"]
