"""The one operator that a rewritten graph calls: `torch.ops.cute_backend.gemm_epilogue`.

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

The op raises ValueError if operands contradict `spec`.

On CPU the op replays the spec, on CUDA it launches a kernel. It is a post-grad op, which autograd never sees,
so it has no derivative: it falls through the autograd key, and its results require no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_backend.runtime.launch import launch
from cute_backend.runtime.operands import check_operands, outputs_like, parse_spec, plane_of

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


torch.library.register_fake("cute_backend::gemm_epilogue", _fake, lib=_LIBRARY)
_LIBRARY.impl("gemm_epilogue", on_cpu, "CPU")
_LIBRARY.impl("gemm_epilogue", launch, "CUDA")
_LIBRARY.impl("gemm_epilogue", torch.library.fallthrough_kernel, "Autograd")

gemm_epilogue = torch.ops.cute_backend.gemm_epilogue.default
