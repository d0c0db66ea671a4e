"""Settings, each read where it is used. Settings that affect results are hashed into the keys of Inductor's
caches.

Set them as attributes, or for a while with `cute_backend.config.patch(max_stores=2)`, or before Python starts
as an environment variable of the same name, such as CUTE_BACKEND_MAX_STORES=2; the value of a switch is 1,
true, yes or on, or else 0, false, no or off. A value that a setting does not accept raises UsageError, a
ValueError, in either case. A value that the program sets takes precedence over the environment.
CUTE_BACKEND_CACHE_DIR, the folder of compiled kernels, CUTE_BACKEND_PACK, a pack to load them from, and
CUTE_BACKEND_SOURCES, a folder of modules that were edited by hand, are environment variables only. A warning
names any other variable with this prefix.

>>> from cute_backend import config
>>> with config.patch(max_stores=2):
...     config.max_stores
2
"""

import os
import sys
from typing import Any, Optional, get_args

from torch.utils._config_module import install_config_module


def _number(name: str, default: int) -> int:
    """A setting from the environment. Raises UsageError unless it is a whole number that is not negative."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise _refusal(f"{name} is {text!r}; it takes a whole number that is not negative")
    return int(text)


def _limit(name: str) -> Optional[int]:  # noqa: UP045  as below
    """A limit from the environment, None if it is not set. Raises UsageError as `_number` does."""
    return _number(name, 0) if os.environ.get(name) else None


def _switch(name: str, default: Optional[bool]) -> Optional[bool]:  # noqa: UP045  as below
    """A setting from the environment. Raises UsageError unless it is one of the words for yes or no."""
    text = os.environ.get(name)
    if text is None:
        return default
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise _refusal(f"{name} is {text!r}; it takes 1, true, yes or on, or else 0, false, no or off")


def check_value(name: str, value: Any, setting: str) -> None:
    """Raises UsageError if the setting `name` does not accept `value`. The message calls it `setting`."""
    kind = sys.modules[__name__].get_type(name)
    kinds = get_args(kind) or (kind,)
    if type(value) not in kinds or (type(value) is int and value < 0):
        taken = {
            bool: "True or False",
            int: "a whole number that is not negative",
            str: "text",
            type(None): "None",
        }
        raise _refusal(f"{setting} is {value!r}; it takes {' or '.join(taken[each] for each in kinds)}")
    if value not in (choices := _choices(name) or (value,)):
        raise _refusal(f"{setting} is {value!r}; it takes {' or '.join(choices)}")


def _choices(name: str) -> tuple[str, ...]:
    """All values of a setting that accepts a few words, the default first; empty for any other setting."""
    few = {
        "rowvec_placement": ("auto", "register_hoist", "smem_staged"),
        "block_reductions": ("auto", "always", "never"),
        "rotary_embeddings": ("auto", "always", "never"),
    }
    return few.get(name, ())


def _one_of(name: str, choices: tuple[str, ...]) -> str:
    """A setting from the environment, by default the first choice. Raises UsageError unless it is a
    choice."""
    text = os.environ.get(name) or choices[0]
    if text not in choices:
        raise _refusal(f"{name} is {text!r}; it takes {' or '.join(choices)}")
    return text


def _refusal(message: str) -> Exception:
    from cute_backend.errors import UsageError  # here, as launches need no errors

    return UsageError(message)


max_loads: int = _number("CUTE_BACKEND_MAX_LOADS", 16)
"""Epilogue operands that one kernel reads: pointers and descriptors are kernel parameters."""

max_exact_loads: Optional[int] = _limit("CUTE_BACKEND_MAX_EXACT_LOADS")  # noqa: UP045  torch reads it
"""The number of operands of the output's size that one kernel reads. None for as many as fit: four of any
dtype, and more if shared memory holds all planes of the kernel beside the stages of A and B
(planning/capacity.py)."""

max_stores: Optional[int] = _limit("CUTE_BACKEND_MAX_STORES")  # noqa: UP045  as above
"""The number of results that one kernel writes. If it is None, a kernel writes at most six results, and at
most four of them are planes."""

max_autotune: Optional[bool] = _switch("CUTE_BACKEND_MAX_AUTOTUNE", None)  # noqa: UP045  torch reads it
"""Whether kernels are tuned when a program is compiled: None as Inductor does, with mode="max-autotune".

The results are remembered in the cache folder, and serve every later program, tuned or not."""

measure: bool = bool(_switch("CUTE_BACKEND_MEASURE", True))
"""Whether choices that the cost model leaves open are timed on the GPU when a program is compiled: between
two or three tiles and, in 16 bits, Inductor's own code. It is done for static sizes, once: the results are
remembered as those of tuning are. It is never done under torch.use_deterministic_algorithms, in a process
group of several ranks, for AOTInductor, or where tuning can't be."""

tile: Optional[str] = os.environ.get("CUTE_BACKEND_TILE") or None  # noqa: UP045  as above
"""The tile of every region, for every M, by the name that `explain` shows, such as "128x256_2x1". If there
are several names, separated by commas or spaces, each region uses the first that fits it.

None leaves the choice to the model and to tuning. If a tile is set, nothing is tuned, and a region that no
named tile fits raises UsageError, which lists the tiles that fit. If its kernel spills, another tile runs
in its place, with a warning. On a CPU the setting has no effect."""

rowvec_placement: str = _one_of("CUTE_BACKEND_ROWVEC_PLACEMENT", _choices("rowvec_placement"))
"""Where kernels keep operands that vary over columns alone, such as biases and scales of columns: "auto",
"register_hoist" for registers before the accumulator wait, or "smem_staged" for shared memory.

"auto" decides by a budget of registers and a model of the epilogue's time. With another value nothing is
tuned, and the budget does not limit register_hoist: it is an error if the visits of the kernel are the
iterations of a loop, or if the kernel spills registers."""

block_reductions: str = _one_of("CUTE_BACKEND_BLOCK_REDUCTIONS", _choices("block_reductions"))
"""The reductions of blocks of columns, such as norms by head, that a kernel computes and reads again: "auto"
for those of gated pairs, and those of single products if narrow subtiles suffice, "always" for all whose
blocks a tile holds whole, or "never" for none of single products.

On an H100, at 4096 x 4096 x 4096 in bf16, a norm by head of 128 columns adds 4 percent to the time of a
product, and quantising a silu by blocks of 128 adds 3 percent; Inductor takes 1.07 and 1.08 times as long.
But if the product is read again after the norm, beside a plane that is added before it, a visit holds whole
blocks, which leaves only small tiles. A norm by head in such a tile took 1.43 times as long as Inductor's
kernels."""

rotary_embeddings: str = _one_of("CUTE_BACKEND_ROTARY_EMBEDDINGS", _choices("rotary_embeddings"))
"""The rotary embeddings that stay in the kernel of the product before them: "auto" for those of products that
share a launch, "always" for all that a tile can rotate, or "never".

q and k of a Llama 8B layer, in one launch with v, took on an H200 0.95 and 0.83 times as long as with
Inductor at 2,048 tokens (bf16, fp8), and 0.55 and 0.24 at 64 (benchmarks/qkv.py). With launches of their own,
on an H100, they took 1.06 and 0.95 times as long at 2,048 tokens, and 1.00 and 0.54 at 64
(benchmarks/findings.md)."""

cache_writes: bool = bool(_switch("CUTE_BACKEND_CACHE_WRITES", True))
"""Whether kernels write keys and values to a static cache themselves, in place of a kernel of Inductor's that
copies them."""

shared_launches: bool = bool(_switch("CUTE_BACKEND_SHARED_LAUNCHES", True))
"""Whether products of one A that never meet, such as those of queries, keys and values, share a launch with
the work after each of them, where the cost model predicts that it is faster. The projections of a Llama 8B
layer then took, on an H200, 0.56 to 0.61 of the time of separate launches at 64 tokens in bf16, 0.50 to 0.52
in fp8, and 0.94 to 1.00 at 2,048 tokens (benchmarks/qkv.py)."""

batch_invariant: bool = bool(_switch("CUTE_BACKEND_BATCH_INVARIANT", False))
"""Whether a row of a result has the same bits whatever M is: one configuration, chosen by N and K alone,
serves every M, at some cost in speed, and nothing is tuned. This holds for fused regions, not for the ops
that are left to Inductor."""

cache_limit_mb: int = _number("CUTE_BACKEND_CACHE_LIMIT_MB", 4096)
"""The number of megabytes (2**20 bytes) of compiled kernels that the cache folder keeps; 0 means no limit.

After a kernel is written, the kernels that were loaded longest ago are removed until the rest fits; those
that were used in the last ten minutes stay."""

compile_jobs: int = _number("CUTE_BACKEND_COMPILE_JOBS", 0)
"""The number of processes that compile kernels in parallel; 0 means one for each CPU that this process may
use. With two or fewer, no kernel is built for measuring behind Inductor's work."""

quiet: bool = bool(_switch("CUTE_BACKEND_QUIET", False))
"""Whether compiling and tuning show no progress. They never show any if standard error is not a terminal."""

raise_errors: bool = bool(_switch("CUTE_BACKEND_RAISE_ERRORS", False))
"""Whether an error of this package is raised while a graph is compiled, as in its tests. Otherwise it causes
a warning and is counted, and Inductor alone compiles the graph."""

_cache_config_ignore_prefix: list[str] = ["quiet", "cache_limit_mb", "compile_jobs", "raise_errors"]
"""The settings that `save_config_portable` leaves out, because no result depends on them."""

install_config_module(sys.modules[__name__])


def _warn_of_misspelt() -> None:
    import warnings  # here, as launches need none

    from cute_backend.variables import misspelt

    settings = [name for name in sys.modules[__name__]._config if not name.startswith("_")]
    for sentence in misspelt(settings):
        warnings.warn(f"cute_backend: {sentence}", RuntimeWarning, stacklevel=2)


_warn_of_misspelt()


class _CheckedModule(type(sys.modules[__name__])):  # type: ignore[misc]
    """The settings. Assigning a value that a setting does not accept raises UsageError, and a name that is no
    setting AttributeError, which lists the settings."""

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_"):
            if name not in self._config:
                raise AttributeError(self._complaint(name))
            check_value(name, value, f"cute_backend.config.{name}")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(self._complaint(name)) from error

    def _complaint(self, name: str) -> str:
        from cute_backend.errors import meant

        settings = [each for each in self._config if not each.startswith("_")]
        return f"cute_backend has no setting {name!r}{meant(name, settings)}; it has {', '.join(settings)}"


object.__setattr__(sys.modules[__name__], "__class__", _CheckedModule)
