"""`TokenStats` is handled like one tensor where callers slice, move, gather or map it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from mcore_logprobs import (
    TokenStats,
    context_parallel_shard,
    linear_policy_loss,
    vocab_parallel_token_stats,
)
from tests.helpers.distributed import grid_groups

PER_TOKEN = ("logprobs", "entropy", "target_rank", "lse")


def made(*shape: int, seed: int = 0, **options: Any) -> tuple[torch.Tensor, TokenStats]:
    """(float64 logits that require a gradient, their statistics of shape `shape`)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, 7, dtype=torch.float64, generator=generator, requires_grad=True)
    target = torch.randint(0, 7, shape, generator=generator)
    return logits, vocab_parallel_token_stats(
        logits, target, entropy=True, target_rank=True, **options
    )


def with_policy_loss() -> TokenStats:
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    loss, stats = linear_policy_loss(
        hidden, torch.randn(7, 3, dtype=torch.float64), torch.arange(5), lambda lp, ent: -lp
    )
    return dataclasses.replace(stats, policy_loss=loss)


def fields_of(stats: TokenStats) -> dict[str, Any]:
    return {f.name: getattr(stats, f.name) for f in dataclasses.fields(stats)}


@pytest.mark.parametrize(
    "index",
    [1, slice(0, 2), (slice(None), slice(1, 4)), (0, torch.tensor([4, 0])), ..., None],
    ids=str,
)
def test_an_index_slices_every_field(index):
    _, stats = made(3, 5)
    got = stats[index]
    for name in PER_TOKEN:
        assert torch.equal(getattr(got, name), getattr(stats, name)[index])
    assert got.sum_pi_squared is None
    assert got.shape == stats.logprobs[index].shape


def test_an_index_leaves_the_policy_loss_out():
    stats = with_policy_loss()
    assert stats[:2].policy_loss is None
    assert stats.map(lambda x: x[:2]).policy_loss is stats.policy_loss


def test_a_boolean_mask_carries_the_gradient():
    logits, stats = made(3, 5)
    mask = torch.rand(3, 5) > 0.5
    weights = torch.rand(int(mask.sum()), dtype=torch.float64)
    picked = stats[mask]
    ((picked.logprobs + 2 * picked.entropy) * weights).sum().backward()
    got, logits.grad = logits.grad, None
    logp = logits.log_softmax(-1)
    _, stats = made(3, 5)  # the same targets: their log-probabilities name them
    chosen = (logp - stats.logprobs[..., None]).abs().argmin(-1, keepdim=True)
    per_token = logp.gather(-1, chosen)[..., 0] - 2 * (logp.exp() * logp).sum(-1)
    (per_token[mask] * weights).sum().backward()
    torch.testing.assert_close(got, logits.grad, rtol=1e-10, atol=1e-12)


def test_shape_device_and_requires_grad_are_the_per_token_tensors():
    logits, stats = made(3, 5)
    assert stats.shape == (3, 5)
    assert stats.device == logits.device
    assert stats.requires_grad
    policy = with_policy_loss()
    assert policy.policy_loss.requires_grad
    assert not policy.requires_grad
    mixed = dataclasses.replace(stats.detach(), entropy=stats.entropy)
    assert mixed.requires_grad


def test_detach_cuts_every_field():
    for stats in (made(3, 5)[1], with_policy_loss()):
        cut = stats.detach()
        assert not any(x.requires_grad for x in fields_of(cut).values() if x is not None)
        assert torch.equal(cut.logprobs, stats.logprobs)
        assert (cut.policy_loss is None) == (stats.policy_loss is None)


def test_to_moves_everything_and_keeps_integers():
    _, stats = made(3, 5)
    stats = dataclasses.replace(stats, policy_loss=stats.logprobs.sum())
    for got in (stats.to(torch.float32), stats.to("cpu", torch.float32), stats.to(torch.ones(1))):
        assert got.logprobs.dtype == got.lse.dtype == got.policy_loss.dtype == torch.float32
        assert got.target_rank.dtype == torch.int64
        assert torch.equal(got.target_rank, stats.target_rank)
    meta = stats.to("meta")
    assert {x.device.type for x in fields_of(meta).values() if x is not None} == {"meta"}


def test_ranks_go_through_no_other_dtype():
    z = torch.arange(70000.0).flip(0)[None]
    stats = vocab_parallel_token_stats(z, torch.tensor([12345]), target_rank=True)
    like = torch.ones(1, dtype=torch.float16)
    for got in (
        stats.to(torch.float16),
        stats.to(dtype=torch.bfloat16, copy=True),
        stats.to("cpu", torch.float16, True),
        stats.to(like),
    ):
        assert got.logprobs.dtype in (torch.float16, torch.bfloat16)
        assert got.target_rank.dtype == torch.int64
        assert got.target_rank.item() == 12345
    for dtype in (torch.bool, torch.int16, torch.complex64):
        with pytest.raises(ValueError, match="dtype: expected a floating-point dtype"):
            stats.to(dtype)


def test_is_a_pytree():
    stats = made(3, 5)[1]
    leaves, spec = pytree.tree_flatten({"out": stats, "n": 1})
    assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves) == 4
    back = pytree.tree_unflatten(leaves, spec)["out"]
    assert isinstance(back, TokenStats)
    pairs = zip(fields_of(back).values(), fields_of(stats).values(), strict=True)
    assert all(got is value for got, value in pairs)
    doubled = pytree.tree_map_only(torch.Tensor, lambda x: x * 2, stats)
    assert torch.equal(doubled.lse, stats.lse * 2)


def test_map_reaches_every_per_token_tensor_once():
    _, stats = made(3, 5)
    seen: list[torch.Tensor] = []

    def turn(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x.t()

    got = stats.map(turn)
    assert len(seen) == len(PER_TOKEN)
    for name in PER_TOKEN:
        assert torch.equal(getattr(got, name), getattr(stats, name).t())


@pytest.mark.parametrize("seq_dim", [1, -1, 0])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_unpack_cuts_at_the_bounds_and_cuts_padding_off(seq_dim, as_tensor):
    _, stats = made(2, 16) if seq_dim else made(16)
    bounds, lengths = [0, 4, 4, 12], [3, 0, 8]
    pieces = stats.unpack(torch.tensor(bounds) if as_tensor else bounds, seq_dim=seq_dim)
    assert [p.shape[seq_dim] for p in pieces] == [4, 0, 8]
    given = torch.tensor(lengths, dtype=torch.int32) if as_tensor else lengths
    pieces = stats.unpack(bounds, given, seq_dim=seq_dim)
    for start, length, piece in zip(bounds, lengths, pieces, strict=False):
        for name in PER_TOKEN:
            expected = getattr(stats, name)[..., start : start + length]
            assert torch.equal(getattr(piece, name), expected)
            assert getattr(piece, name).requires_grad == expected.requires_grad
    assert stats.unpack(bounds[:1], seq_dim=seq_dim) == []
    (whole,) = stats.unpack([0, 16], seq_dim=seq_dim)
    assert torch.equal(whole.logprobs, stats.logprobs)
    if seq_dim:
        assert [piece.shape for piece in stats.unpack([0, 1, 2], seq_dim=-2)] == [(1, 16)] * 2


@pytest.mark.parametrize(
    ("bounds", "lengths", "match"),
    [
        ([0, 4, 17], None, "cu_seqlens"),
        ([-1, 4], None, "cu_seqlens"),
        ([4, 8], None, r"cu_seqlens: expected bounds that ascend from 0 to at most 16, got .4, 8."),
        ([0, 6, 4], None, "cu_seqlens"),
        ([], None, "cu_seqlens"),
        (torch.zeros(2, 2, dtype=torch.int32), None, "one dimension"),
        ([0, 4, 8], [4], "2 lengths"),
        ([0, 4, 8], [5, 1], "lengths"),
        ([0, 4, 8], [-1, 1], "lengths"),
        (
            [0, 4.0, 8],
            None,
            r"cu_seqlens: .* list of ints, got .0, 4.0, 8.",
        ),
        ([0, 4, 8], [1, True], "lengths: expected a tensor or a list of ints"),
        (["0", "4"], None, "cu_seqlens: expected a tensor or a list of ints"),
        (None, None, "cu_seqlens: expected a tensor or a list of ints, got None"),
        (6, None, "cu_seqlens: expected a tensor or a list of ints, got 6"),
        (torch.zeros(2, dtype=torch.bool), None, "cu_seqlens: expected a tensor or a list of ints"),
        (torch.zeros(2, dtype=torch.complex64), None, "cu_seqlens: expected a tensor of integers"),
    ],
)
def test_unpack_refuses_bounds_that_do_not_fit(bounds, lengths, match):
    _, stats = made(2, 16)
    with pytest.raises(ValueError, match=match):
        stats.unpack(bounds, lengths)
    with pytest.raises(ValueError, match="seq_dim"):
        stats.unpack([0, 4], seq_dim=2)
    for seq_dim in ("1", True, None):
        with pytest.raises(ValueError, match="seq_dim: expected an int"):
            stats.unpack([0, 4], seq_dim=seq_dim)


def gathered(packed: bool, grad: str) -> dict[str, float]:
    """Errors of gathered statistics, and of the logits' gradient through them."""
    groups = grid_groups(cp=dist.get_world_size())
    cu = torch.tensor([0, 8, 24], dtype=torch.int32) if packed else None
    logits, whole = made(1, 24, tp_group=groups.tp)
    options = {"cp_group": groups.cp, "cu_seqlens": cu}
    generator = torch.Generator().manual_seed(0)
    torch.randn(1, 24, 7, dtype=torch.float64, generator=generator)
    target = torch.randint(0, 7, (1, 24), generator=generator)
    mine = context_parallel_shard(logits.detach(), **options).requires_grad_()
    part = vocab_parallel_token_stats(
        mine,
        context_parallel_shard(target, **options),
        entropy=True,
        target_rank=True,
        tp_group=groups.tp,
    )
    got = dataclasses.replace(part, policy_loss=part.lse.sum()).gather_cp(grad=grad, **options)
    assert got.policy_loss is None
    weights = torch.rand(1, 24, dtype=torch.float64, generator=generator)
    factor = 1 / dist.get_world_size() if grad == "sum" else 1.0  # every rank's loss is the same
    ((got.logprobs + got.entropy) * weights * factor).sum().backward()
    ((whole.logprobs + whole.entropy) * weights).sum().backward()
    expected = context_parallel_shard(logits.grad, **options)
    errors = {"grad": (mine.grad - expected).abs().max().item()}
    for name in PER_TOKEN:
        off = getattr(got, name) - getattr(whole, name)
        errors[name] = off.abs().max().item()
    return errors


@pytest.mark.parametrize("grad", ["sum", "slice"])
@pytest.mark.parametrize("packed", [False, True])
def test_gather_cp_gives_whole_sequences(ranks, packed, grad):
    for errors in ranks(2).run(gathered, packed, grad):
        assert all(error < 1e-12 for error in errors.values()), errors


# ---- candidates and a top k, of one dimension more ---------------------------------------------


def with_several(**options: Any) -> TokenStats:
    logits = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(4))
    target = torch.arange(12).view(2, 6)
    return vocab_parallel_token_stats(
        logits, target, topk=4, candidate_ids=torch.arange(7), **options
    )


def assert_same(found: TokenStats, expected: TokenStats) -> None:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    compared = [torch.equal(mine, exact) for mine, exact in pairs if exact is not None]
    assert len(compared) == 5  # logprobs, lse, candidates, values and ids
    assert all(compared)


@pytest.mark.parametrize("ignored", [2, -100, None])
def test_a_candidate_is_left_out_by_an_id_that_is_none(ignored: int | None) -> None:
    """A padding token's id says which targets count; among the candidates it is like any other."""
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    target = torch.tensor([5, 5 if ignored is None else ignored, 7])
    asked = torch.tensor([2, 3] if ignored is None else [2, 3, -100])
    found = vocab_parallel_token_stats(logits, target, candidate_ids=asked, ignore_index=ignored)
    expected = logits.log_softmax(-1)[:, [2, 3]]
    expected = torch.nn.functional.pad(expected, (0, len(asked) - 2))
    if ignored is not None:
        expected[1] = 0.0
    torch.testing.assert_close(found.candidates, expected)


def test_an_ellipsis_stands_for_the_dimensions_of_tokens() -> None:
    stats = with_several()
    assert_same(stats[..., 1:], stats[:, 1:])
    assert_same(stats[..., -1], stats[:, -1])
    assert_same(stats[0, ..., 2], stats[0, 2])
    assert_same(stats[...], stats[:])
    assert stats[..., None].topk[0].shape == (2, 6, 1, 4)


def test_it_is_one_of_its_kind() -> None:
    """Tensors have no truth value that a comparison of fields could give."""
    stats = with_several()
    assert stats == stats
    assert stats != with_several()
    assert stats in {stats}


def test_fields_are_not_unpacked() -> None:
    """Two sequences would pass for log-probabilities and entropy."""
    with pytest.raises(TypeError, match="expected its fields by name"):
        _logprobs, _entropy = with_several()


def test_a_negative_dimension_is_one_of_tokens() -> None:
    stats = with_several()
    bounds = [0, 2, 6]
    for mine, exact in zip(stats.unpack(bounds, seq_dim=-1), stats.unpack(bounds), strict=True):
        assert_same(mine, exact)


def gathered_from_the_end() -> None:
    groups = grid_groups(cp=2)
    stats = with_several(tp_group=groups.tp)
    assert_same(stats.gather_cp(groups.cp, seq_dim=-1), stats.gather_cp(groups.cp, seq_dim=1))


def test_a_negative_dimension_of_several_ranks(ranks) -> None:
    ranks(2).run(gathered_from_the_end)
