"""From a plan to the text of a kernel: CuTe DSL Python, and the library that it imports.

`emit.emit` writes the module. The text depends on nothing but its arguments.

- The text: `emit`, `emit_epilogue`, `reads`, `statements`, `emit_reductions`, `schedule`, `mainloops`,
  `partials`.
- Rewrites of specs: `simplify`, `shared_noise`.
- The library of generated modules: `device_math`, `device_reduce`, `device_noise`, `device_scales`,
  `device_cache`.
"""
