"""Edges of the drop-ins' functions on one process: gradients left out, floors, records' offsets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_logprobs as ours
from mcore_logprobs.dropin import miles, roll, skyrl, slime, verl
from mcore_logprobs.dropin._common import ONE_PROCESS


def here(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """These functions of the library on this process alone, whatever groups there are."""
    for name in names:
        function = getattr(ours, name)

        def alone(*args: Any, of: Any = function, **options: Any) -> Any:
            return of(*args, tp_group=ONE_PROCESS, **options)

        monkeypatch.setattr(ours, name, alone)


# ---- verl ---------------------------------------------------------------------------------------


def forward_kl(
    monkeypatch: pytest.MonkeyPatch,
    logits: Tensor,
    teacher: Tensor,
    ids: Tensor,
    floor: float | None,
) -> Any:
    here(monkeypatch, "vocab_parallel_gather", "vocab_parallel_topk")
    monkeypatch.setattr(verl, "resolve_tp_group", lambda group: ONE_PROCESS)
    groups = classmethod(lambda cls: ours.ParallelGroups())
    monkeypatch.setattr(ours.ParallelGroups, "from_megatron", groups)
    config = {"distillation_loss": {"log_prob_min_clamp": floor}}
    return verl.compute_forward_kl_topk(logits, teacher, ids, config, "bshd")


def test_verl_s_figures_beside_the_divergence_have_no_gradient(monkeypatch) -> None:
    logits = torch.randn(1, 4, 8, requires_grad=True)
    teacher, ids = torch.randn(1, 4, 3).log_softmax(-1), torch.arange(3).expand(1, 4, 3)
    found = forward_kl(monkeypatch, logits, teacher, ids, None)
    learning = {name for name, values in found.items() if values.requires_grad}
    assert learning == {"distillation_losses"}


def test_verl_s_floor_is_of_the_teacher_too(monkeypatch) -> None:
    """Of a flat student over 4 ids, whose log-probability is -log 4."""
    teacher, ids = torch.tensor([[[-0.1, -5.0]]]), torch.tensor([[[0, 1]]])
    found = forward_kl(monkeypatch, torch.zeros(1, 1, 4), teacher, ids, -2.0)
    log_q = torch.tensor([-0.1, -2.0])
    loss = (log_q.exp() * (log_q + torch.tensor(4.0).log())).sum()
    torch.testing.assert_close(found["distillation_losses"].sum(), loss)
    torch.testing.assert_close(found["teacher_mass"].sum(), log_q.exp().sum())


def test_verl_s_advantage_without_an_overlap_is_0(monkeypatch) -> None:
    logits, teacher = torch.tensor([[[5.0, 4.0, 0.0, 0.0]]]), torch.tensor([[[-0.1, -3.0]]])
    found = forward_kl(monkeypatch, logits, teacher, torch.tensor([[[2, 3]]]), None)
    assert found["overlap_count"].tolist() == [[0]]
    assert found["overlap_token_advantage"].tolist() == [[0.0]]


def test_verl_s_teacher_may_name_more_ids_than_there_are(monkeypatch) -> None:
    ids = torch.tensor([[[0, 1, 1]]])
    found = forward_kl(monkeypatch, torch.zeros(1, 1, 2), torch.full((1, 1, 3), -1.0), ids, None)
    assert found["overlap_count"].tolist() == [[3]]


# ---- slime and miles ----------------------------------------------------------------------------


def of_slime(monkeypatch: pytest.MonkeyPatch, module: Any = slime, **given: Any) -> Any:
    """(logits of four tokens, two of them the response's, and what the function says of them)."""
    monkeypatch.setattr(slime, "_tp_group", lambda: ONE_PROCESS)
    monkeypatch.setattr(slime, "_cp", lambda: slime._Place(0, 1, None))
    logits = torch.randn(1, 4, 8, requires_grad=True)
    arguments = {"args": {"rollout_temperature": 1.0}, "unconcat_tokens": [torch.arange(4)]}
    arguments |= {"total_lengths": [4], "response_lengths": [2]} | given
    found = module.get_log_probs_and_entropy(logits, **arguments)
    return logits, found if module is miles else found[1]


@pytest.mark.parametrize(
    ("ids", "offsets"),
    [([7, 6, 5, 2, 4, 3], [2, 4, 6]), ([5, 2, 4, 3, 1], [0, 2, 4, 5])],
    ids=["the first are no token's", "longer than the response"],
)
def test_a_record_of_slime_is_read_by_its_offsets(monkeypatch, ids, offsets) -> None:
    record = {
        "top_p_token_ids": [torch.tensor(ids)],
        "top_p_token_offsets": [torch.tensor(offsets)],
    }
    logits, found = of_slime(monkeypatch, **record)
    kept = logits[0, 1, [5, 2]], logits[0, 2, [4, 3]]
    expected = torch.stack([x.log_softmax(-1)[1] for x in kept])
    torch.testing.assert_close(found["log_probs"][0], expected)


@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_slime_s_entropy_learns_where_its_coefficient_is_not_0(monkeypatch, coef) -> None:
    args = {"rollout_temperature": 1.0, "entropy_coef": coef}
    _, found = of_slime(monkeypatch, args=args, with_entropy=True)
    assert found["entropy"][0].requires_grad is (coef != 0.0)
    assert found["log_probs"][0].requires_grad


@pytest.mark.parametrize("token", [1, 7])
def test_slime_s_mask_keeps_its_columns_where_the_target_is_another_rank_s(token) -> None:
    logits, keep = torch.randn(1, 3), torch.ones(1, 3, dtype=torch.bool)  # columns 3 to 5 of 9
    assert torch.equal(slime._masked(logits, torch.tensor([token]), keep, 1), logits)


@pytest.mark.parametrize("given", [{"cp_rank": 0}, {"cp_size": 1}])
def test_slime_s_offsets_with_half_of_a_rank_are_this_rank_s(monkeypatch, given) -> None:
    monkeypatch.setattr(slime, "_cp", lambda: slime._Place(1, 2, None))
    offsets = slime.get_logits_and_tokens_offset_with_cp
    assert offsets(16, 6, **given) == offsets(16, 6)


def test_miles_s_packed_batches_have_no_padded_lengths(monkeypatch) -> None:
    args = {"rollout_temperature": 1.0, "qkv_format": "thd"}
    torch.manual_seed(0)
    packed = {"unconcat_tokens": [torch.arange(2)] * 2, "total_lengths": [2, 2], "args": args}
    packed["response_lengths"] = [1, 1]
    _, plain = of_slime(monkeypatch, miles, **packed)
    torch.manual_seed(0)
    _, padded = of_slime(monkeypatch, miles, **packed, max_seq_lens=[4, 4])
    assert all(map(torch.equal, plain["log_probs"], padded["log_probs"]))


# ---- SkyRL and ROLL -----------------------------------------------------------------------------


def test_rows_whose_later_sequences_lie_past_skyrl_s_cut() -> None:
    """Sequences at 0 and 8, of 3 and 2 tokens; the first 7 columns are asked for."""
    columns, there = skyrl._places(torch.tensor([0, 8, 16]), 8, None, [[3, 2]])[:2]
    assert columns.tolist() == [[0, 1, 0, 0, 0, 0, 0]]
    assert there.tolist() == [[True, True] + [False] * 5]


def test_the_mean_entropy_that_skyrl_reports_has_no_gradient() -> None:
    logits = torch.randn(1, 6, 8, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    mean, term = skyrl.vocab_parallel_entropy_packed_sequences(
        logits, torch.tensor([0, 4, 6]), 4, 3, mask, None, None
    )
    assert not mean.requires_grad
    assert term.requires_grad


def test_rows_that_skyrl_s_draft_mask_leaves_out_may_hold_anything() -> None:
    student = torch.randn(1, 3, 8)
    student[0, 1] = torch.nan
    student.requires_grad_()
    loss = skyrl.draft_soft_ce(student, torch.randn(1, 3, 8), torch.tensor([[1.0, 0.0, 1.0]]))
    loss.backward()
    assert loss.isfinite()
    assert student.grad.isfinite().all()


def test_an_entropy_of_skyrl_in_chunks_of_0_is_in_one(monkeypatch) -> None:
    here(monkeypatch, "vocab_parallel_entropy")
    logits = torch.randn(1, 3, 8)
    expected = skyrl.vocab_parallel_entropy(logits)
    torch.testing.assert_close(skyrl.vocab_parallel_entropy(logits, 0), expected)


def test_a_normalizer_of_roll_made_of_the_logits_has_no_gradient_of_its_own() -> None:
    logits = torch.randn(5, 9, dtype=torch.float64, requires_grad=True)
    target, weights = torch.tensor([0, 3, 8, -100, 2]), torch.arange(1.0, 6.0).double()
    parts = torch.stack([logits[:, :4].logsumexp(-1), logits[:, 4:].logsumexp(-1)], -1)
    got = roll.cross_entropy(logits, target, parts, reduction="none")
    want = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    grads = [torch.autograd.grad((x * weights).sum(), logits)[0] for x in (got, want)]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)
