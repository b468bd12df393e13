"""Kernels where few calls lead: strides of saved tensors, parts that weigh nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import mcore_logprobs as ml
from mcore_logprobs.kernels import pairs
from mcore_logprobs.kernels.chunk import Chunk, Processing
from mcore_logprobs.kernels.inductor import common
from tests.kernels.common import DEVICE
from tests.kernels.interpreter import interpreted


@interpreted
def test_where_the_softmax_cancels_the_target_s_entry_stays() -> None:
    """The target's logit, as log-probability and lse: their softmax cancels."""
    logits = torch.randn(4, 40, device=DEVICE, requires_grad=True)
    target = torch.tensor([0, 7, 33, 39], device=DEVICE)
    upstream = torch.linspace(-1.0, 2.0, 4, device=DEVICE)
    found = ml.vocab_parallel_token_stats(logits, target, backend="triton")
    (got,) = torch.autograd.grad(((found.logprobs + found.lse) * upstream).sum(), logits)
    want = torch.zeros_like(logits).scatter(-1, target[:, None], upstream[:, None])
    torch.testing.assert_close(got, want)


@interpreted
def test_scale_of_one_side_strided() -> None:
    from mcore_logprobs.kernels import triton

    upstream = torch.tensor(2.0, device=DEVICE)
    for grad, out in (
        (torch.randn(6, 4, device=DEVICE).t(), torch.zeros(4, 6, device=DEVICE)),
        (torch.randn(4, 6, device=DEVICE), torch.zeros(6, 4, device=DEVICE).t()),
    ):
        wanted = 2.0 * grad
        triton.scale(grad, upstream, out=out)
        torch.testing.assert_close(out, wanted)


def test_kinds_that_failed_are_no_obstacle_beside_one_that_compiled(monkeypatch) -> None:
    monkeypatch.setattr(common, "_failures", {(n,): "no" for n in range(common._HOPELESS)})
    monkeypatch.setattr(common, "_warm", set())
    assert common.obstacle() == "no"
    monkeypatch.setattr(common, "_warm", {((), 1, False)})
    assert common.obstacle() is None


@pytest.mark.parametrize("kind", ["forward", "jsd"])
@interpreted
def test_normalizers_of_a_pair_that_a_saved_tensor_hook_laid_out_anew(kind: str) -> None:
    """As `save_on_cpu(pin_memory=True)` does: contiguous, whatever it was."""
    student, teacher = torch.randn(2, 5, 40, device=DEVICE)
    upstream = torch.linspace(-1.0, 2.0, 5, device=DEVICE)

    def gradient(x: Tensor, y: Tensor, backend: str) -> Tensor:
        x = x.clone().requires_grad_()
        with saved_tensors_hooks(lambda saved: saved.contiguous(), lambda saved: saved):
            value = ml.vocab_parallel_kl_div(x, y, kind=kind, backend=backend)
        return torch.autograd.grad(value, x, upstream)[0]

    got = gradient(student, teacher, "triton")
    want = gradient(student.double(), teacher.double(), "torch")
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)


def close_beside_columns_that_are_gone(kind: str, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """(student, teacher, divergence): the first half weighs nothing, and what one side masks there
    sums to an infinity.
    """
    student = torch.randn(3, width, device=DEVICE)
    teacher = student + 1e-4 * torch.randn(3, width, device=DEVICE)
    masked = teacher if kind == "reverse" else student
    masked[:, 1 : width // 2 : 2] = torch.finfo(torch.float32).min
    for side in (student, teacher):
        side[:, width // 2 :] += 200.0
    logp, logq = (x.double().log_softmax(-1) for x in (student, teacher))
    own, other = (logp, logq) if kind == "reverse" else (logq, logp)
    return student, teacher, (own.exp() * (own - other)).sum(-1)


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_digits_beside_parts_that_are_gone(kind: str) -> None:
    *sides, want = close_beside_columns_that_are_gone(kind, 2048)
    spec = pairs.PairSpec(kind)
    parts = [
        pairs.pair_stats(
            *(Chunk(x[:, part], 1024, Processing.of()) for x in sides), spec, chunk_size=3
        )
        for part in (slice(0, 1024), slice(1024, 2048))
    ]
    got = pairs.finalize_pair(pairs.merge_pairs(torch.cat(parts), spec), spec).value
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("kind", ["forward", "reverse"])
@interpreted
def test_digits_beside_tiles_that_are_gone(kind: str) -> None:
    student, teacher, want = close_beside_columns_that_are_gone(kind, 4200)
    got = ml.vocab_parallel_kl_div(student, teacher, kind=kind, backend="triton")
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=0.0)
