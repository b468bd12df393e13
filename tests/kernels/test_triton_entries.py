"""The gradient of given entries in Triton against the reference in float64, and behind top-k."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mcore_logprobs import (
    linear_gather,
    vocab_parallel_gather,
    vocab_parallel_topk,
    vocab_parallel_topk_distill,
)
from mcore_logprobs.kernels import reference
from mcore_logprobs.kernels import triton as triton_backend
from mcore_logprobs.kernels.chunk import Chunk
from mcore_logprobs.kernels.stats import GradientTerms, StatsSpec
from mcore_logprobs.kernels.triton import gradient
from tests.helpers.oracles import assert_no_worse
from tests.kernels.common import (
    DEVICE,
    DTYPES,
    TRANSFORMS,
    doubled,
    lay_out,
    make_chunk,
    make_logits,
)
from tests.kernels.interpreter import interpreted


def _check(chunk: Chunk, spec: StatsSpec, k: int) -> None:
    """With statistics and without; out is fresh, strided, and the logits themselves."""
    logits, rows = chunk.logits, len(chunk.logits)
    column = torch.randint(chunk.valid, (rows, k), device=DEVICE)
    column[:, 1::3] = column[:, :1]  # repeated
    column[:, 2::5] = -1
    upstream = torch.randn(rows, k, device=DEVICE)
    coef = torch.randn(len(spec.coefficients), rows, device=DEVICE)
    upstream[1::3] = coef[:, 1::3] = 0.0
    z = doubled(chunk).processed()
    shift = z.amax(-1).float()
    coef /= (z - shift.unsqueeze(-1)).exp().sum(-1)
    for statistics in ((shift, coef), (None, None)):
        exact = torch.empty(logits.shape, dtype=torch.float64, device=DEVICE)
        wide = [None if x is None else x.double() for x in (upstream, *statistics)]
        reference.grad(doubled(chunk), GradientTerms(column, *wide, spec), out=exact, chunk_size=4)
        plain = torch.empty_like(logits)
        given = (column, upstream, *statistics, spec)
        reference.grad(chunk, GradientTerms(*given), out=plain, chunk_size=4)
        copy = logits.clone()
        for source, out in (
            (logits, torch.full_like(logits, torch.nan)),
            (logits, lay_out(torch.zeros_like(logits), "wide")),
            (copy, copy),
        ):
            triton_backend.grad(replace(chunk, logits=source), GradientTerms(*given), out=out)
            assert_no_worse(out, plain, exact, name="gradient")
            assert (out[1::3] == 0).all()
            assert (out[:, chunk.valid :] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@interpreted
def test_shapes_and_dtypes(dtype):
    assert gradient._ENTRIES < 130  # more entries than a program writes
    for rows, width, k in ((2, 1152, 7), (2, 33, 1), (1, 300, 130), (2, 40, 0), (0, 40, 3)):
        spec = StatsSpec(entropy=True, sum_pi_squared=width == 300)
        _check(make_chunk(make_logits(rows, width, dtype), width - 3), spec, k)
    _check(make_chunk(make_logits(3, 300, dtype)), StatsSpec(), 5)


@pytest.mark.parametrize("transform", [*TRANSFORMS, "rows", "capped rows"])
@interpreted
def test_scale_softcap_bias_and_temperature(transform):
    options = dict(TRANSFORMS.get(transform, {"rows": True}))
    if transform == "capped rows":
        options |= {"softcap": 3.0, "bias": True}
    logits = make_logits(3, 700, torch.bfloat16)
    _check(make_chunk(logits, 650, **options), StatsSpec(entropy=True), 6)


@interpreted
def test_rows_of_nan_and_no_others():
    logits = make_logits(4, 300, torch.float32)
    logits[:3] = torch.nan
    ids = torch.tensor([[3, 4]] * 4, device=DEVICE)
    # Entries that cancel, so that no coefficient is left; one that does not; nothing at all.
    upstream = torch.tensor([[1.0, -1.0], [1.0, 0.5], [0.0, 0.0], [1.0, 2.0]], device=DEVICE)
    for backend in ("torch", "triton"):
        leaf = logits.clone().requires_grad_()
        values = vocab_parallel_gather(leaf, ids, log_softmax=True, backend=backend)
        values.backward(upstream)
        assert values[:3].isnan().all()
        assert leaf.grad[:2].isnan().all()
        assert (leaf.grad[2] == 0).all()
        assert leaf.grad[3].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@interpreted
def test_operations_agree_with_torch(dtype):
    # [s, b, V] seen as [b, s, V], without its last position: rows of two strides.
    raw = make_logits(12, 300, dtype).view(4, 3, 300)
    ids = torch.randint(280, (3, 3, 6), device=DEVICE)
    ids[..., 5] = ids[..., 0]
    teacher, upstream = torch.randn(2, 3, 3, 6, device=DEVICE).unbind(0)
    upstream[0, 1] = 0.0
    warm = {"temperature": torch.rand(3, 1, device=DEVICE) + 0.5, "vocab_size": 280}

    def distilled(logits: Tensor, normalize: str, backend: str) -> Tensor:
        student, _, entropy = vocab_parallel_topk_distill(
            logits, teacher, ids, normalize=normalize, entropy=True, backend=backend, **warm
        )
        return (upstream * student).sum() + (entropy * upstream[..., 0]).sum()

    operations = {
        "vocab": lambda z, backend: distilled(z, "vocab", backend),
        "topk": lambda z, backend: distilled(z, "topk", backend),
        "gather": lambda z, b: vocab_parallel_gather(z, ids, backend=b, **warm) * upstream,
        "largest": lambda z, b: vocab_parallel_topk(z, 6, backend=b, **warm)[0] * upstream,
    }
    for name, operation in operations.items():
        grads = []
        for backend in ("torch", "triton"):
            leaf = raw.clone().requires_grad_()
            operation(leaf.transpose(0, 1)[:, :-1], backend).sum().backward()
            grads.append(leaf.grad)
        step = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
        torch.testing.assert_close(*grads, rtol=step, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@interpreted
def test_the_fused_path_agrees_with_torch():
    hidden, weight = torch.randn(7, 16, device=DEVICE), torch.randn(300, 16, device=DEVICE)
    ids, upstream = torch.randint(290, (7, 5), device=DEVICE), torch.randn(7, 5, device=DEVICE)
    results = []
    for backend in ("torch", "triton"):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        values = linear_gather(
            *leaves, ids, log_softmax=True, softcap=5.0, temperature=0.7, vocab_size=290,
            bias=torch.linspace(-1, 1, 300, device=DEVICE), chunk_size=4, backend=backend,
        )  # fmt: skip
        values.backward(upstream)
        results.append((values.detach(), *(leaf.grad for leaf in leaves)))
    for torchs, tritons in zip(*results, strict=True):
        torch.testing.assert_close(tritons, torchs, rtol=1e-4, atol=1e-5)


@interpreted
def test_a_nan_row_without_upstream_has_no_gradient_under_a_softcap():
    hidden, weight = torch.randn(3, 16, device=DEVICE), torch.randn(300, 16, device=DEVICE)
    hidden[1] = torch.nan
    hidden.requires_grad_()
    ids = torch.randint(300, (3, 4), device=DEVICE)
    upstream = torch.tensor([[0.7], [0.0], [-1.2]], device=DEVICE).expand(3, 4)
    values = linear_gather(hidden, weight, ids, log_softmax=True, softcap=5.0, backend="triton")
    values.backward(upstream)
    assert torch.equal(hidden.grad[1], torch.zeros(16, device=DEVICE))
    assert hidden.grad[::2].isfinite().all()
    assert hidden.grad[::2].any()
