"""A process that gets the hand-made kernel: `python build_once.py [NUMBER OF KERNELS]`.

It prints as JSON the number of its compilations, the kernels that it got, its warnings, and whether it
imported the DSL.
"""

from __future__ import annotations

import json
import sys
import warnings

from cute_backend.errors import BuildError, UnavailableError
from cute_backend.memory_ops import emit
from cute_backend.runtime.compiling import build, compile
from cute_backend.runtime.disk.cache import KernelCache
from support.runtime.handmade import kernel_of, make_spec, source


def main() -> None:
    compilations = []
    compile_kernel = compile.compile_kernel

    def counting(*arguments):
        compilations.append(arguments[0].name)
        return compile_kernel(*arguments)

    compile.compile_kernel = counting
    build._build_in_process = lambda cache, kernel: build.build_into(KernelCache(cache.root), kernel)
    emit.emit = lambda plan, *how: source(plan.spec)
    kernels = [kernel_of(make_spec(second_store=bool(i))) for i in range(int(sys.argv[1]))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcomes = [outcome for kernel in kernels for outcome in build.obtain([kernel]).values()]
    failures = [str(o) for o in outcomes if isinstance(o, (BuildError, UnavailableError))]
    print(
        json.dumps(
            {
                "compiled": len(compilations),
                "loaded": len(outcomes) - len(failures),
                "failures": failures,
                "warnings": [str(w.message) for w in caught if "cute_backend" in str(w.message)],
                "imported_cutlass": "cutlass" in sys.modules,
            }
        )
    )


if __name__ == "__main__":
    main()
