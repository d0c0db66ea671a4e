"""Epilogues of arguments: what they compute, by the replay in the kernel's place, and what is refused."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F

from support.operator_cases import BF16, E4M3, E5M2, F16, F32, M, N, gemm_operands, replayed, without_a_gpu

ops = pytest.importorskip("cutlass.operators", reason="needs the extra `operators`: nvidia-cutlass-operators")

from cute_backend.operators import EpilogueArguments, check, is_ours  # noqa: E402

ROWS, COLUMNS = torch.arange(M).float()[:, None] / 64 - 1, torch.arange(N).float() / 128 - 1
PLANE = torch.linspace(-2, 2, M * N).view(M, N)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Operators run on CPU tensors here."""
    without_a_gpu(monkeypatch, replayed)


def exact(a, b):
    return a.float() @ b.float()


def run(epilogue, operands=None, target="90a", kind=EpilogueArguments, workspace=None, **named):
    """The first operator found, run on arguments with an epilogue. Gives the accumulators."""
    a, b, out = operands or gemm_operands()
    args = ops.GemmArguments(a, b, out, F32, kind(epilogue, **named))
    check(args).raise_on_error()
    operator = ops.get_operators(args, is_ours, target_sm=target)[0]
    operator.run(args, workspace=workspace)
    return exact(a, b)


def scaled_silu(accum, scale, bias):
    D = silu(accum * scale + bias)  # noqa: F821
    return D


def chained(accum, C, alpha, beta):
    mixed = multiply_add(accum, alpha, C * beta)  # noqa: F821
    D = relu(minimum(mixed, 2.0)) + sigmoid(mixed)  # noqa: F821
    return D


def named_functions(accum, gate):
    raw = identity(accum / 32)  # noqa: F821
    D = maximum(tanh(raw), sigmoid(gate)) + exp(minimum(raw, 1)) + gelu(gate)  # noqa: F821
    return D, raw


def in_torch(accum, gate):
    D = torch.where(accum > 0, F.gelu(accum, approximate="tanh"), gate.abs()).clamp(-3, 30)
    return D


BOTH = [ops.EpilogueArguments, EpilogueArguments]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("target", ["90a", "100a"])
def test_vectors_are_read_by_rows_and_columns(kind, target):
    D = torch.zeros(M, N, dtype=BF16)
    product = run(scaled_silu, target=target, kind=kind, scale=ROWS, bias=COLUMNS, D=D)
    torch.testing.assert_close(D, F.silu(product * ROWS + COLUMNS).to(BF16))


@pytest.mark.parametrize("kind", BOTH)
def test_numbers_are_given_at_every_run(kind):
    a, b, D = gemm_operands(out=F32)
    operator = artifact = None
    for alpha, beta in ((0.25, 2), (-0.5, 0.125)):
        arguments = kind(chained, C=PLANE, alpha=alpha, beta=beta, D=D)
        args = ops.GemmArguments(a, b, D, F32, arguments)
        operator = operator or ops.get_operators(args, is_ours, target_sm="90a")[0]
        artifact = artifact or operator.compile(args)
        operator.run(args, artifact)
        mixed = exact(a, b) * alpha + PLANE * beta
        torch.testing.assert_close(D, F.relu(mixed.clamp(max=2.0)) + mixed.sigmoid())


@pytest.mark.parametrize("kind", BOTH)
def test_the_vocabulary_needs_no_import(kind):
    D, raw = torch.zeros(M, N), torch.zeros(M, N, dtype=F16)
    product = run(named_functions, gemm_operands(F16), kind=kind, gate=PLANE, D=D, raw=raw)
    expected = product / 32
    torch.testing.assert_close(raw, expected.to(F16))
    expected = torch.maximum(expected.tanh(), PLANE.sigmoid()) + expected.clamp(max=1).exp() + F.gelu(PLANE)
    torch.testing.assert_close(D, expected)


def hardswish(x):
    return x * 3


def with_a_word_of_its_own(accum):
    D = hardswish(accum)
    return D


@pytest.mark.parametrize("kind", BOTH)
def test_a_word_that_the_program_defines_is_the_programs_where_it_is_called(kind):
    """The registry's own arguments are read by their words alone, whatever those are elsewhere."""
    D = torch.zeros(M, N)
    product = run(with_a_word_of_its_own, kind=kind, D=D)
    torch.testing.assert_close(D, product * 3 if kind is EpilogueArguments else F.hardswish(product))


def test_torch_is_at_hand_too():
    D = torch.zeros(M, N)
    product = run(in_torch, gate=PLANE, D=D)
    expected = torch.where(product > 0, F.gelu(product, approximate="tanh"), PLANE.abs()).clamp(-3, 30)
    torch.testing.assert_close(D, expected)


def test_source_text_serves_as_a_function():
    source = "def doubled(accum, bias):\n    D = silu(accum) * 2 + bias\n    return D\n"
    for kind in BOTH:
        D = torch.zeros(M, N)
        product = run(source, kind=kind, bias=COLUMNS, D=D)
        torch.testing.assert_close(D, F.silu(product) * 2 + COLUMNS)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("dtype", [E4M3, E5M2, BF16, F16, F32, torch.int8, torch.bool])
@pytest.mark.parametrize("order", ["row", "column"])
def test_results_go_to_tensors_of_any_dtype_and_order(dtype, order):
    def halves(accum, scale):
        D = accum * scale
        F = accum - 1
        return D, F

    D = torch.zeros(M, N).to(dtype) if order == "row" else torch.zeros(N, M).to(dtype).t()
    second = torch.zeros(M, N)
    product = run(halves, gemm_operands(E4M3), scale=ROWS, D=D, F=second)
    assert torch.equal(second, product - 1)
    if dtype in (E4M3, E5M2):
        limit = torch.finfo(dtype).max
        assert torch.equal(D.float(), (product * ROWS).clamp(-limit, limit).to(dtype).float())
    else:
        assert torch.equal(D, (product * ROWS).to(dtype))


def test_equal_results_go_to_each_of_their_tensors():
    def twice(accum):
        D = relu(accum)  # noqa: F821
        copy = D
        return D, copy

    D, copy = torch.zeros(M, N, dtype=BF16), torch.zeros(N, M, dtype=BF16).t()
    product = run(twice, D=D, copy=copy)
    assert torch.equal(D, product.relu().to(BF16)) and torch.equal(copy, D)


def reduced(accum):
    D = accum
    total = sum(accum)
    peaks = max(accum, dim=[1])
    least = min(accum, dim=[0])
    return D, total, peaks, least


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("given", ["none", "tensor", "address"])
def test_reductions_combine_with_what_their_tensors_hold(given, kind, monkeypatch):
    from cute_backend.operators import kernels

    a, b, D = gemm_operands()
    product = exact(a, b)
    total = torch.tensor([5.0])
    peaks = torch.full((M, 1), product.amax(1).median().item())
    least = torch.full((N,), product.amin(0).median().item())
    expected = (
        5 + product.sum(),
        torch.maximum(peaks, product.amax(1, keepdim=True)),
        torch.minimum(least, product.amin(0)),
    )
    args = ops.GemmArguments(a, b, D, F32, kind(reduced, D=D, total=total, peaks=peaks, least=least))
    operator = ops.get_operators(args, is_ours, target_sm="90a")[0]
    need = operator.get_workspace_size(args)
    assert need.size_bytes > 4 * (M + N + 1) and need.ptr_alignment == 32
    room = torch.full((need.size_bytes + 32,), 255, dtype=torch.uint8)
    room = room[-room.data_ptr() % 32 :][: need.size_bytes]
    workspace = None
    if given == "tensor":
        workspace = ops.workspace.Workspace(room)
    elif given == "address":
        monkeypatch.setattr(
            kernels, "bytes_at", lambda address, size: {room.data_ptr(): room}[address][:size]
        )
        workspace = ops.workspace.Workspace(room.data_ptr())
    operator.run(args, workspace=workspace)
    assert torch.equal(D, product.to(BF16))
    for actual, right in zip((total, peaks, least), expected, strict=True):
        torch.testing.assert_close(actual, right.view(actual.shape))
    assert room.eq(255).all().item() is (given == "none")


def test_a_workspace_that_is_too_small_is_refused():
    small = ops.workspace.Workspace(torch.zeros(64, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"the workspace has 64 bytes at .*; the kernel needs \d+ bytes at"):
        run(
            reduced,
            workspace=small,
            D=torch.zeros(M, N),
            total=torch.zeros(1),
            peaks=torch.zeros(M),
            least=torch.zeros(N),
        )


def test_what_needs_no_workspace_says_so():
    args = ops.GemmArguments(*gemm_operands(), F32)
    operator = ops.get_operators(args, is_ours, target_sm="90a")[0]
    assert operator.get_workspace_size(args) == ops.workspace.AllocationRequirement.empty()
    operator.initialize_workspace(args, None)
    operator.run(args)
    assert torch.equal(args.out.tensor.runtime_tensor, exact(*gemm_operands_of(args)).to(BF16))


def gemm_operands_of(args):
    return args.A.tensor.runtime_tensor, args.B.tensor.runtime_tensor


def test_reductions_spelt_in_torch_may_be_of_any_kind():
    def kept(accum, bias):
        D = accum * 0.125 + bias
        where = D.argmax(-1)
        mass = D.logsumexp(-1, keepdim=True)
        positive = (D > 14).any(-1)
        return D, where, mass, positive

    D, where = torch.zeros(M, N), torch.zeros(M, dtype=torch.int64)
    mass, positive = torch.zeros(M, 1), torch.zeros(M, dtype=torch.bool)
    product = run(kept, bias=COLUMNS, D=D, where=where, mass=mass, positive=positive)
    expected = product * 0.125 + COLUMNS
    assert torch.equal(D, expected) and torch.equal(where, expected.argmax(-1))
    torch.testing.assert_close(mass, expected.logsumexp(-1, keepdim=True))
    assert torch.equal(positive, (expected > 14).any(-1)) and 0 < positive.sum() < M


@pytest.mark.parametrize("rows", [1, M])
def test_a_single_row_is_a_plane_too(rows):
    a, b, out = gemm_operands()
    D = torch.zeros(rows, N, dtype=BF16)
    product = run(scaled_silu, (a[:rows], b, out[:rows]), scale=ROWS[:rows], bias=COLUMNS, D=D)
    torch.testing.assert_close(D, F.silu(product * ROWS[:rows] + COLUMNS).to(BF16))


def test_batches_of_one_reach_the_epilogue():
    operands = [each[None] for each in gemm_operands()]
    D = torch.zeros(1, M, N)
    run(scaled_silu, operands, scale=ROWS[None], bias=COLUMNS[None, None], D=D)
    product = exact(operands[0][0], operands[1][0])
    torch.testing.assert_close(D[0], F.silu(product * ROWS + COLUMNS))


def normalised(accum):
    D = accum / accum.abs().amax(-1, keepdim=True)
    return D


def computed(accum, bias):
    D = accum + bias.sum()
    return D


def unknown(accum):
    D = frobnicate(accum)  # noqa: F821
    return D


def branching(accum):
    D = accum if accum.sum() > 0 else -accum
    return D


def apart(accum, gate):
    D = accum
    other = gate * 2
    return D, other


def constant(accum):
    D = accum
    other = 1.0
    return D, other


def multiplied(accum, gate):
    D = accum @ gate
    return D


def writing(accum, gate):
    gate.add_(1)
    D = accum + gate
    return D


def transposed(accum):
    D = permute(accum, indices=[1, 0])  # noqa: F821
    return D


def rows_of(accum):
    D = accum
    total = sum(accum, dim=[1])
    return D, total


def gated(accum, gate):
    D = accum * gate
    return D


_CLOSED_OVER = torch.zeros(M, N)


def closing(accum):
    D = accum + _CLOSED_OVER
    return D


def fresh(*shape, dtype=F32):
    return torch.zeros(*shape or (M, N), dtype=dtype)


def given(**named):
    return named


REFUSED = {
    "feedback": (normalised, given(D=fresh()), "complete only when the kernel has ended"),
    "an operand's reduction": (computed, given(bias=COLUMNS, D=fresh()), "kernels read whole operands"),
    "an unknown name": (unknown, given(D=fresh()), "name 'frobnicate' is not defined"),
    "a choice by value": (
        branching,
        given(D=fresh()),
        "branches on a value (aten._local_scalar_dense.default), which is known only in",
    ),
    "not of the product": (
        apart,
        given(gate=PLANE, D=fresh(), other=fresh()),
        "it does not depend on the product",
    ),
    "a constant": (
        constant,
        given(D=fresh(), other=fresh()),
        "other is a float; the epilogue returns tensors",
    ),
    "torch's own refusal": (
        multiplied,
        given(gate=PLANE, D=fresh()),
        "(accum, gate): RuntimeError: a and b must",
    ),
    "a write": (writing, given(gate=PLANE.clone(), D=fresh()), "writes to an operand"),
    "a permutation": (transposed, given(D=fresh()), "permute changes the layout"),
    "another axis": (rows_of, given(D=fresh(), total=fresh(N)), "which no reduction for each row"),
    "a vector of rows": (gated, given(gate=fresh(M), D=fresh()), "a value per row is (M, 1)"),
    "fp64": (gated, given(gate=fresh(dtype=torch.float64), D=fresh()), "float64"),
    "gaps": (gated, given(gate=PLANE, D=fresh(M, 2 * N)[:, ::2]), "contiguous along neither mode"),
    "another plane": (
        gated,
        given(gate=PLANE, D=fresh(M, N // 2)),
        "is computed as (192, 256), but its tensor",
    ),
    "a tensor closed over": (closing, given(D=fresh()), "closes over a tensor; tensors must be named"),
    "a transport": (
        gated,
        given(gate=ops.Load(PLANE, via="sync_gmem_load"), D=fresh()),
        "these kernels choose their own",
    ),
    "an array": (
        gated,
        given(gate=PLANE.numpy(), D=fresh()),
        "gate is a ndarray; these operators take torch",
    ),
    "too many": (
        "def many(accum):\n    D = accum\n"
        + "".join(f"    d{i} = accum * {i + 2}\n" for i in range(5))
        + f"    return D, {', '.join(f'd{i}' for i in range(5))}\n",
        given(D=fresh(), **{f"d{i}": fresh() for i in range(5)}),
        "can't be written by the kernel",
    ),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("epilogue", "named", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_can_not_be_converted_is_a_failed_status(epilogue, named, sentence, caplog):
    a, b, out = gemm_operands()
    operator = ops.get_operators(
        ops.GemmArguments(a, b, out, F32, EpilogueArguments(gated, gate=PLANE, D=fresh())), is_ours
    )[0]
    args = ops.GemmArguments(a, b, out, F32, EpilogueArguments(epilogue, **named))
    assert ops.get_operators(args, is_ours) == []
    for status in (check(args), operator.supports(args), operator.supports(args, "90a")):
        assert sentence in str(status.error)
    # torch's structured trace, which other tests turn on, is below warnings.
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_operator_takes_its_own_epilogue_alone():
    a, b, out = gemm_operands()

    def arguments(epilogue, **named):
        return ops.GemmArguments(a, b, out, F32, epilogue and EpilogueArguments(epilogue, **named))

    gating, bare = arguments(gated, gate=PLANE, D=fresh()), arguments(None)
    vector = arguments(gated, gate=ROWS, D=fresh())
    for own, other, sentence in (
        (
            gating,
            vector,
            "f32(acc * exact0)] of (gate), but the arguments ask for [out0 = f32(acc * colvec0)]",
        ),
        (gating, bare, "fuses an epilogue, but the arguments have none"),
        (bare, gating, "epilogue metadata is absent"),
    ):
        operator = ops.get_operators(own, is_ours, target_sm="90a")[0]
        assert operator.supports(own)
        assert sentence in str(operator.supports(other).error)
        with pytest.raises(ValueError):
            operator.run(other)


def test_what_another_operator_compiled_is_refused():
    args = ops.GemmArguments(*gemm_operands(), F32)
    first, second, *_ = ops.get_operators(args, is_ours, target_sm="90a")
    artifact = first.compile(args)
    assert str(artifact.compiled_for) == "90a" and artifact.operator_obj is first
    with pytest.raises(ValueError, match=r"can't run an artifact of cute_backend\.sm90a"):
        second.run(args, artifact)
    with pytest.raises(ValueError, match="compiles for 90a, not for 100a"):
        first.compile(args, "100a")


def test_other_operators_do_not_take_our_epilogue_and_do_not_fail_on_it():
    args = ops.GemmArguments(*gemm_operands(), F32, EpilogueArguments(gated, gate=PLANE, D=fresh()))
    operators = ops.get_operators(args, target_sm="100a")
    assert operators and all(is_ours(each.metadata) for each in operators)


def test_an_epilogue_that_reaches_an_object_is_traced_for_each_of_its_arguments():
    class Settings:
        factor = 2.0

    settings = Settings()

    def scaled(accum):
        D = accum * settings.factor
        return D

    for factor in (2.0, 3.0):
        settings.factor = factor
        D = fresh()
        product = run(scaled, D=D)
        assert torch.equal(D, product * factor)


def test_tma_is_what_a_tensor_has_without_a_transport_too():
    D = fresh()
    product = run(gated, gate=ops.Load(PLANE), D=ops.Store(D, via="tma"))
    assert torch.equal(D, product * PLANE)


def test_more_planes_than_a_kernel_reads_are_refused():
    names = [f"v{i}" for i in range(5)]
    source = f"def summed(accum, {', '.join(names)}):\n    D = accum + {' + '.join(names)}\n    return D\n"
    args = ops.GemmArguments(
        *gemm_operands(), F32, EpilogueArguments(source, D=fresh(), **{name: fresh() for name in names})
    )
    assert "can't be written by the kernel" in str(check(args).error)
