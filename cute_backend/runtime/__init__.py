"""The op and its implementation: compilation, the cache on disk, tuning and launches.

Modules import from their own folder and from those below it:

- `calls`
- `tuning`
- `compiling`
- `disk`
- `kernels`
- `arguments`
- `host`
"""
