"""The operator that a rewritten graph calls: `torch.ops.cute_backend.gemm_epilogue`.

    gemm_epilogue(
        Tensor[] a, Tensor[] b, Tensor[] loads, str spec, str constraints=""
    ) -> Tensor[]

`a` has one tensor, (M, K), that all accumulators of the spec share, and `b` one (K, N) for each of them, or
one (K, 2 N) for a pair of even and odd columns. If blocks have scales, these follow: one tensor in `a`, and
one for each B in `b`. A weight in groups of K has scales, and maybe zeros, (K / group, N) after all B. If
rows or K lie in groups with products of their own, `a` also has their offsets, (G,). With groups of rows,
each B is (G, K, N); with groups of K, the plane is (G * M, N). `loads` are in the spec's order, in canonical
view: (M, N) for an exact load, (N,) for a rowvec, (M,) for a colvec, (G, N) for a groupvec, one element for a
scalar. If a load has several modes of M, it has an axis for each of them in place of M; if it has blocks of b
columns, it has (N / b, b) in place of N. All tensors are on one device. For each store the result has one (M,
N) tensor, dense in the store's order, or its reduction. Stores that are parts of one result have one tensor
together, (M, parts * N). `spec` is the canonical JSON of an EpilogueSpec: the op is registered once, and
everything that varies is in its arguments, so that a graph from Inductor's cache can call it in a new
process. `constraints` is the text of the `planning.Constraints` on its kernels, "" without any: rows whose
bits do not depend on M, names of tiles, a place for rowvecs.

Results that the caller has, such as caches of keys and values, are written by another op. It has the same
arguments, and takes all results:

    gemm_epilogue_into(..., *, Tensor(a!)[] results) -> ()

A cache of the `results` is contiguous, (B, H, L, D) or any other shape with the same elements; any other
result has the shape and strides of the one that the first op returns.

An absent list (None) stands for an empty one: AOTInductor's packages pass it.

The ops raise ValueError if operands contradict `spec`.

On CPU the op replays the spec, on CUDA it launches a kernel. It is a post-grad op, which autograd never sees,
so it has no derivative: it falls through the autograd key, and its results require no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_backend.runtime.arguments.operands import Tensors, outputs_like, parse_spec, plane_of
from cute_backend.runtime.arguments.outputs import check_call, deliver
from cute_backend.runtime.calls.launch import launch

_ARGUMENTS = 'Tensor[] a, Tensor[] b, Tensor[] loads, str spec, str constraints=""'
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def _fake(
    a: Tensors,
    b: Tensors,
    loads: Tensors | None,
    spec: str,
    constraints: str = "",
    results: Tensors | None = None,
) -> list[Tensor]:
    parsed = parse_spec(spec)
    check_call(parsed, a, b, loads or (), results)
    if results is not None:
        return list(results)
    m, n = plane_of(parsed, a, b)
    return outputs_like(parsed, a[0], m, n)


@torch.no_grad()
def on_cpu(
    a: Tensors,
    b: Tensors,
    loads: Tensors | None,
    spec: str,
    constraints: str = "",
    results: Tensors | None = None,
) -> list[Tensor]:
    """The replay of `spec`, into `results` if they are given."""
    from cute_backend.replay import replay  # imported here, since a serving process only launches kernels

    parsed, loads = parse_spec(spec), loads or ()
    check_call(parsed, a, b, loads, results)
    return deliver(parsed, replay(parsed, a, b, loads), loads, results)


def _returning_nothing(implementation: Callable[..., list[Tensor]]) -> Callable[..., None]:
    """An implementation of the op that is given its results."""

    def into(*args: Any, results: Tensors) -> None:
        implementation(*args, results=results)

    return into


_LIBRARY = torch.library.Library("cute_backend", "DEF")
_LIBRARY.define(f"gemm_epilogue({_ARGUMENTS}) -> Tensor[]", tags=_TAGS)
_LIBRARY.define(f"gemm_epilogue_into({_ARGUMENTS}, *, Tensor(a!)[] results) -> ()", tags=_TAGS)

torch.library.register_fake("cute_backend::gemm_epilogue", _fake, lib=_LIBRARY)
torch.library.register_fake("cute_backend::gemm_epilogue_into", _returning_nothing(_fake), lib=_LIBRARY)
for _key, _implementation in (("CPU", on_cpu), ("CUDA", launch)):
    _LIBRARY.impl("gemm_epilogue", _implementation, _key)
    _LIBRARY.impl("gemm_epilogue_into", _returning_nothing(_implementation), _key)
for _name in ("gemm_epilogue", "gemm_epilogue_into"):
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")

gemm_epilogue = torch.ops.cute_backend.gemm_epilogue.default
gemm_epilogue_into = torch.ops.cute_backend.gemm_epilogue_into.default
