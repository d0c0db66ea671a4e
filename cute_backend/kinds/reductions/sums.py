"""Sums, means and products, in fp32, in any order."""

from __future__ import annotations

from cute_backend.kinds.reductions.kind import Part, ReductionKind

SUM = ReductionKind(
    name="sum",
    parts=(Part("_sum", 0.0),),
    combine=lambda math, a, b: (a[0] + b[0],),
    reference=lambda rows, accumulate: rows.sum(-1, dtype=accumulate).float(),
    of_blocks=True,
    aten=("aten.sum.default", "aten.sum.dim_IntList"),
    drawn=("{0}.sum(@)", "{0}.sum(@, dtype=torch.float32)"),
)

MEAN = ReductionKind(
    name="mean",
    parts=(Part("_sum", 0.0),),
    combine=lambda math, a, b: (a[0] + b[0],),
    result=lambda math, whole, count: math.div(whole[0], math.to_f32(count)),
    reference=lambda rows, accumulate: (rows.sum(-1, dtype=accumulate) / rows.shape[-1]).float(),
    of_blocks=True,
    aten=("aten.mean.default", "aten.mean.dim"),
    drawn=("{0}.mean(@)",),
)

PROD = ReductionKind(
    name="prod",
    parts=(Part("_product", 1.0),),
    combine=lambda math, a, b: (a[0] * b[0],),
    reference=lambda rows, accumulate: rows.prod(-1, dtype=accumulate).float(),
    aten=("aten.prod.default", "aten.prod.dim_int"),
)
