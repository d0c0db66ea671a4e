"""Runs `main` of a module of this package as a program: `python start.py INIT MODULE N PATH... ARGUMENT...`.

`interpreter` starts it. INIT is the package's `__init__.py` in the process that starts this one, so that the
two run the same package whatever is on the search path; N is the number of PATHs, which become that path.
Until the path is set, only modules that are built into Python are imported.
"""

import sys

if __name__ == "__main__":
    init, module, count, *rest = sys.argv[1:]
    sys.path[:] = rest[: int(count)]
    sys.argv = [module, *rest[int(count) :]]

    from importlib import import_module
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("cute_backend", init)
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = package = module_from_spec(spec)
    spec.loader.exec_module(package)
    sys.exit(import_module(module).main())
