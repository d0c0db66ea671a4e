"""From a spec to the text of a kernel: where each load happens, then CuTe DSL Python that does it.

`plan` decides the placements, `emit.emit` writes the module. The text depends on nothing but its arguments.
Nothing here imports the emitter, which a process that finds its kernels on disk never needs.
"""

from .placement import Placement, Plan, Variant, plan

__all__ = ["Placement", "Plan", "Variant", "plan"]
