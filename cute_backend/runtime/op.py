"""The operator that a rewritten graph calls: `torch.ops.cute_backend.gemm_epilogue`.

    gemm_epilogue(
        Tensor[] a, Tensor[] b, Tensor[] loads, str spec, bool batch_invariant=False, str? tile=None,
        str rowvecs="auto"
    ) -> Tensor[]

`a` has one tensor, (M, K), that all accumulators of the spec share, and `b` one (K, N) for each of them, or
one (K, 2 N) for a pair of even and odd columns. If blocks have scales, these follow: one tensor in `a`, and
one for each B in `b`. If a product has groups, `a` also has their offsets, (G,). With groups of rows, each B
is (G, K, N); with groups of K, the plane is (G * M, N). `loads` are in the spec's order, in canonical view:
(M, N) for an exact load, (N,) for a rowvec, (M,) for a colvec, (G, N) for a groupvec, one element for a
scalar. If a load has several modes of M, it has an axis for each of them in place of M; if it has blocks of b
columns, it has (N / b, b) in place of N. All tensors are on one device. For each store the result has one (M,
N) tensor, dense in the store's order, or its reduction. Stores that are parts of one result have one tensor
together, (M, parts * N). `spec` is the canonical JSON of an EpilogueSpec: the op is registered once, and
everything that varies is in its arguments, so that a graph from Inductor's cache can call it in a new
process. `batch_invariant` asks for rows whose bits do not depend on M, `tile` names tiles, as `config.tile`
does, and `rowvecs` is as `config.rowvec_placement`.

Results in caches of keys and values are written to the caches themselves, by another op, which takes all of
its results:

    gemm_epilogue_into(
        Tensor[] a, Tensor[] b, Tensor[] loads, Tensor(a!)[] results, str spec, ...
    ) -> ()

A cache of the `results` is contiguous, (B, H, L, D) or any other shape with the same elements.

The ops raise ValueError if operands contradict `spec`.

On CPU the op replays the spec, on CUDA it launches a kernel. It is a post-grad op, which autograd never sees,
so it has no derivative: it falls through the autograd key, and its results require no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_backend.caches import caches_of, deliver
from cute_backend.runtime.launch import launch, launch_into
from cute_backend.runtime.operands import check_operands, outputs_like, parse_spec, plane_of
from cute_backend.spec import EpilogueSpec

_LIBRARY = torch.library.Library("cute_backend", "DEF")
_LIBRARY.define(
    "gemm_epilogue(Tensor[] a, Tensor[] b, Tensor[] loads, str spec, bool batch_invariant=False, "
    'str? tile=None, str rowvecs="auto") -> Tensor[]',
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def _fake(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    loads: Sequence[Tensor],
    spec: str,
    batch_invariant: bool = False,
    tile: str | None = None,
    rowvecs: str = "auto",
) -> list[Tensor]:
    parsed = parse_spec(spec)
    check_operands(parsed, a, b, loads)
    m, n = plane_of(parsed, a, b)
    return outputs_like(parsed, a[0], m, n)


@torch.no_grad()
def on_cpu(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    loads: Sequence[Tensor],
    spec: str,
    batch_invariant: bool = False,
    tile: str | None = None,
    rowvecs: str = "auto",
) -> list[Tensor]:
    """The replay of `spec`."""
    from cute_backend.replay import replay  # imported here, since a serving process only launches kernels

    parsed = parse_spec(spec)
    check_operands(parsed, a, b, loads)
    return replay(parsed, a, b, loads)


_LIBRARY.define(
    "gemm_epilogue_into(Tensor[] a, Tensor[] b, Tensor[] loads, Tensor(a!)[] results, str spec, "
    'bool batch_invariant=False, str? tile=None, str rowvecs="auto") -> ()',
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def _fake_into(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    loads: Sequence[Tensor],
    results: Sequence[Tensor],
    spec: str,
    batch_invariant: bool = False,
    tile: str | None = None,
    rowvecs: str = "auto",
) -> None:
    _check_results(parse_spec(spec), results, _fake(a, b, loads, spec))


def _check_results(spec: EpilogueSpec, results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Raises ValueError if results that the caller gives are not like those that the op would return."""
    if len(results) != len(expected):
        raise ValueError(f"gemm_epilogue_into got {len(results)} results; the spec has {len(expected)}")
    for cache, given, like in zip(caches_of(spec), results, expected, strict=True):
        fits = given.numel() == like.numel() and given.is_contiguous() if cache else given.shape == like.shape
        if given.dtype is not like.dtype or not fits:
            wanted = f"contiguous, with {like.numel()} elements" if cache else f"of shape {tuple(like.shape)}"
            raise ValueError(
                f"gemm_epilogue_into got a result of {given.dtype} and shape {tuple(given.shape)}; expected "
                f"{like.dtype}, {wanted}"
            )


@torch.no_grad()
def on_cpu_into(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    loads: Sequence[Tensor],
    results: Sequence[Tensor],
    spec: str,
    batch_invariant: bool = False,
    tile: str | None = None,
    rowvecs: str = "auto",
) -> None:
    """The replay of `spec`, into `results`."""
    parsed, replayed = parse_spec(spec), on_cpu(a, b, loads, spec)
    _check_results(parsed, results, replayed)
    deliver(parsed, replayed, loads, results)


torch.library.register_fake("cute_backend::gemm_epilogue_into", _fake_into, lib=_LIBRARY)
_LIBRARY.impl("gemm_epilogue_into", on_cpu_into, "CPU")
_LIBRARY.impl("gemm_epilogue_into", launch_into, "CUDA")
_LIBRARY.impl("gemm_epilogue_into", torch.library.fallthrough_kernel, "Autograd")

torch.library.register_fake("cute_backend::gemm_epilogue", _fake, lib=_LIBRARY)
_LIBRARY.impl("gemm_epilogue", on_cpu, "CPU")
_LIBRARY.impl("gemm_epilogue", launch, "CUDA")
_LIBRARY.impl("gemm_epilogue", torch.library.fallthrough_kernel, "Autograd")

gemm_epilogue = torch.ops.cute_backend.gemm_epilogue.default
gemm_epilogue_into = torch.ops.cute_backend.gemm_epilogue_into.default
