"""`python -m cute_backend explain|source|build|simulate|bench FILE.py[:name] [--arch sm_90a|sm_100a|...]`,
`python -m cute_backend aot FILE.py[:name] ... -o FILE.cutepack`, `python -m cute_backend cache info|show|
verify|clear|path`, `python -m cute_backend doctor` and `python -m cute_backend fuzz`.

FILE defines a function (or a module) and `example_inputs()`, which returns its arguments, as a tuple, or as
`(args, kwargs)`; `bench` without a FILE runs the built-in tables, and `fuzz` takes no FILE, since it draws
programs. An error in a request is reported in one sentence, with exit status 2. The status is 1 if a
simulated kernel, a timed result or a drawn program's result is wrong, and 130 if the command is interrupted.
"""

from __future__ import annotations

import errno
import os
import signal
import sys

from cute_backend.command.checks import check
from cute_backend.command.parser import parse
from cute_backend.command.runner import run
from cute_backend.errors import UsageError


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0, 1 for a faulty kernel, 2 for a request that can't be met,
    130 for an interruption."""
    if sys.stdout is None:  # the shell closed it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  until the process ends
    try:
        arguments = parse(argv)
        check(arguments)
        status = run(arguments)
        sys.stdout.flush()
        return status
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("cute_backend"):
            raise
        print(
            f"cute_backend: {sys.executable} has no module {error.name!r}; activate the environment in which "
            "this package is installed (after `make demo`: source .venv/bin/activate), or pip install it",
            file=sys.stderr,
        )
        return 2
    except UsageError as error:
        print("cute_backend:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cute_backend: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of the pipe, such as `head`, has closed it
        _discard_output()
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"cute_backend: the output can't be written: {error.strerror}", file=sys.stderr)
        _discard_output()
        return 2


def _discard_output() -> None:
    """Redirects standard output, so that the text in its buffer is discarded when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
