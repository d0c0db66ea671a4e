"""Regions to tune, and the reasons why some are not tuned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from cute_backend.runtime.host.notices import count, warn_once
from cute_backend.runtime.tuning.timing import Run
from cute_backend.spec import EpilogueSpec


class Untuned(Enum):
    """The reasons why a region is not tuned. The value is the name in the counters; `sentence` is the reason
    for the user to read."""

    sentence: str

    def __new__(cls, key: str, sentence: str) -> Untuned:
        member = object.__new__(cls)
        member._value_ = key
        member.sentence = sentence
        return member

    SYMBOLIC = "untuned_symbolic", "its N, K or groups are not static, or nothing is known of its M"
    BATCH_INVARIANT = "untuned_batch_invariant", "config.batch_invariant leaves one configuration for all M"
    GROUPED = "untuned_grouped", "how its K is split into groups is known to the device alone"
    PACKED = "untuned_packed", "a pack has kernels for it, and others would have to be compiled"
    CAPTURING = "untuned_capturing", "a CUDA graph is being captured, in which nothing can be timed"
    LATE = "untuned_late", "its kernels are not all built, or another process times"
    MEMORY = "untuned_memory", "its operands do not fit into the GPU's memory beside what is there"
    FAILED = "untuned_failed", "none of its candidates runs"

    def note(self, warns: bool = True) -> None:
        """Counts the reason and, if it `warns`, says it once in a process."""
        count(self.value)
        if not warns:
            return
        warn_once(
            self, f"cute_backend: a region is not tuned and gets the cost model's tile: {self.sentence}."
        )


@dataclass(frozen=True)
class Job:
    """A region to tune: its spec and its sizes. A symbolic M is replaced by an example.

    `dynamic` says that M is symbolic, and `groups` how many groups M rows are in. `unfused` is called while
    the region's graph lives. It returns a function that compiles what computes the same as the region without
    our kernels, and is called only if that has to be timed.
    """

    spec: EpilogueSpec
    m: int
    n: int
    k: int
    dynamic: bool = False
    unfused: Callable[[], Callable[[], Run]] | None = None
    groups: int | None = None


def kept(job: Job) -> Job:
    """A job whose unfused program doesn't change any more when the region's graph does."""
    compiled = _unless_it_fails(job, job.unfused)
    return replace(job, unfused=None if compiled is None else lambda: compiled)


def unfused_of(job: Job) -> Run | None:
    """The unfused program that the region is timed against, or None if there is none."""
    return _unless_it_fails(job, _unless_it_fails(job, job.unfused))


_T = TypeVar("_T")


def _unless_it_fails(job: Job, make: Callable[[], _T] | None) -> _T | None:
    """The result of `make`, or None if Inductor can't compile it, which is counted."""
    if make is None:
        return None
    try:
        return make()
    except Exception as error:
        count("unfused_not_timed")
        reason = (str(error).strip() or "no message").splitlines()[0]
        warn_once(
            ("unfused", job.spec),
            "cute_backend: a region is not compared with Inductor's own code, which could not be compiled "
            f"by itself: {type(error).__name__}: {reason}",
        )
        return None
