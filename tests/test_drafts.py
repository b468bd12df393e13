"""A draft's acceptance rate and the losses of it, against their definitions in float64."""

from __future__ import annotations

import pytest
import torch

import mcore_logprobs as ml
from mcore_logprobs.losses import acceptance_rate, lk_alpha_loss, lk_lambda_loss


def test_against_the_definitions() -> None:
    generator = torch.Generator().manual_seed(2)
    draft = torch.randn(7, 31, generator=generator, dtype=torch.float64, requires_grad=True)
    model = 2.0 * torch.randn(7, 31, generator=generator, dtype=torch.float64)
    weights = torch.randn(7, generator=generator, dtype=torch.float64)
    apart = ml.vocab_parallel_kl_div(draft, model, kind="total_variation")
    kl = ml.vocab_parallel_kl_div(draft, model, kind="forward")
    p, q = draft.softmax(-1), model.softmax(-1)
    alpha = torch.minimum(p, q).sum(-1)
    torch.testing.assert_close(acceptance_rate(apart), alpha)
    share = (-3.0 * alpha.detach()).exp()
    exact = (q * (q.log() - p.log())).sum(-1)
    for ours, theirs in (
        (lk_alpha_loss(apart), -alpha.log()),
        (lk_lambda_loss(kl, apart), share * exact + (1.0 - share) * (1.0 - alpha)),
    ):
        torch.testing.assert_close(ours, theirs)
        (found,) = torch.autograd.grad((ours * weights).sum(), draft, retain_graph=True)
        (wanted,) = torch.autograd.grad((theirs * weights).sum(), draft, retain_graph=True)
        torch.testing.assert_close(found, wanted)


def test_nothing_accepted_is_finite() -> None:
    apart = torch.ones(3, requires_grad=True)
    lk_alpha_loss(apart).sum().backward()
    assert apart.grad is not None
    assert apart.grad.isfinite().all()


def test_a_draft_over_a_subset_of_the_vocabulary() -> None:
    """Of a teacher's logits at the draft's ids and its normaliser: the whole sum of min(p, q)."""
    generator = torch.Generator().manual_seed(4)
    draft = torch.randn(5, 12, generator=generator, dtype=torch.float64)
    model = 2.0 * torch.randn(5, 40, generator=generator, dtype=torch.float64)
    ids = torch.arange(12).expand(5, 12)  # the draft's columns
    of_model = torch.randperm(40, generator=generator)[:12]  # and where the model has them
    apart = ml.vocab_parallel_topk_kl_div(
        draft,
        model[:, of_model],
        ids,
        kind="total_variation",
        teacher_lse=model.logsumexp(-1),
    )
    accepted = torch.minimum(draft.softmax(-1), model.softmax(-1)[:, of_model]).sum(-1)
    torch.testing.assert_close(acceptance_rate(apart), accepted, atol=2e-6, rtol=0.0)


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="eta: expected"):
        lk_lambda_loss(torch.zeros(2), torch.zeros(2), eta=-1.0)
    with pytest.raises(ValueError, match="total_variation: expected forward_kl's shape"):
        lk_lambda_loss(torch.zeros(2), torch.zeros(3))
