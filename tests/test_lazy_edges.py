"""Lazy logits, what is singular: parts read before a write, other passes, other layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mcore_logprobs as ours
from mcore_logprobs.ops.row_statistics import Statistics
from mcore_logprobs.ops.token_stats import token_stats
from mcore_logprobs.sources import lazy_head
from tests.helpers.lazy import Seen, lazy_logits
from tests.helpers.shards import world_group, world_rank, world_size
from tests.test_lazy import B, H, S, V, gradients, head
from tests.test_lazy_autograd import GivenOn


def pair() -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """(a head's tensors, its logits: lazy ones and real ones)."""
    tensors = head()
    real = tensors["hidden"] @ tensors["weight"].t() + tensors["bias"]
    return tensors, (lazy_logits(**tensors), real)


# ---- writes --------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_part_that_was_read_is_read_again_after_a_scale() -> None:
    found = []
    for logits in pair()[1]:
        whole = logits.clone()
        part = whole[1:3]
        part.softmax(-1)  # real logits of these rows are kept with the view
        whole.div_(0.5)
        found.append(part.softmax(-1))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("written", [False, True])
def test_logits_that_were_detached_stay_so(written: bool) -> None:
    for logits in pair()[1]:
        whole = logits.clone()
        detached = whole.detach()
        if written:
            whole[0] = 0.5
        else:
            whole.exp()  # computed once, with a gradient
        assert not detached.softmax(-1).requires_grad
        assert not ours.vocab_parallel_entropy(detached).requires_grad


def assert_entropies_agree(change: Callable[[Tensor], Tensor], upstream: Tensor) -> None:
    """Values and gradients of the entropy of changed logits, lazy and real."""
    tensors, both = pair()
    found = []
    for logits in both:
        value = (ours.vocab_parallel_entropy(change(logits)) * upstream).sum()
        found.append([value, *gradients(value, tensors)])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_an_autograd_function_of_logits_that_were_written_to() -> None:
    def written(logits: Tensor) -> Tensor:
        whole = logits.clone()
        whole[0] = 0.5
        whole[1:, :, 3:] = -1.0
        return GivenOn.apply(whole)

    assert_entropies_agree(written, torch.linspace(-1.0, 2.0, S * B).view(S, B))


@pytest.mark.parametrize("view", [lambda x: x[..., 3:], lambda x: x.view(-1), lambda x: x.mT])
def test_columns_that_were_taken_before_see_a_write(view: Callable[[Tensor], Tensor]) -> None:
    def written(logits: Tensor) -> Tensor:
        copy = logits.clone()
        columns = view(copy)
        copy[0] = -1.0
        copy.sub_(0.5)
        return (copy + columns.mean()).tanh()

    assert_entropies_agree(written, torch.linspace(-1.0, 2.0, S * B).view(S, B))


@torch.no_grad()
def test_joined_parts_of_logits_that_were_written_to() -> None:
    found = []
    for logits in pair()[1]:
        whole = logits.clone()
        first, second = whole[:2], whole[2:]
        whole[0, 1] = 0.5
        whole[3] = whole[3] * 0.0
        found.append(ours.vocab_parallel_entropy(torch.cat([second, first])))
    torch.testing.assert_close(*found)


class Saves(torch.autograd.Function):
    """Saves its argument for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].unsqueeze(-1) * torch.ones_like(ctx.saved_tensors[0])


@pytest.mark.parametrize("how", ["a function", "a checkpoint", "a reentrant checkpoint"])
def test_a_write_into_a_view_of_columns_is_noticed(how: str) -> None:
    for logits in pair()[1]:
        if how == "a function":
            value = Saves.apply(logits)
        else:
            value = checkpoint(
                lambda x: ours.vocab_parallel_entropy(x) * 1.0,
                logits,
                use_reentrant=how == "a reentrant checkpoint",
            )
        logits[..., 3:].fill_(-2.0)
        told = "modified by an inplace operation|expected columns to be written|number of tensors"
        with pytest.raises(RuntimeError, match=told):
            value.sum().backward()


@pytest.mark.parametrize("zero", [0, 0.0])
def test_logits_times_zero(zero: float) -> None:
    tensors, both = pair()
    for logits in both:
        value = (logits * zero).exp().sum()
        assert value == S * B * V
        assert not any(grad.any() for grad in gradients(value, tensors))


# ---- which tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize("divided", [False, True])
def test_temperatures_follow_their_tokens_into_a_copy(divided: bool) -> None:
    temperature = torch.linspace(0.5, 2.0, S * B).view(S, B, 1)
    target, found = torch.arange(S * B).view(B, S), []
    for logits in pair()[1]:
        turned = (logits / temperature).transpose(0, 1)
        copy = turned.clone().div_(0.7) if divided else turned.contiguous()
        found.append(ours.vocab_parallel_logprobs(copy, target))
    torch.testing.assert_close(*found)


@torch.no_grad()
def test_summaries_of_other_tokens_of_as_many() -> None:
    found = [
        torch.stack([logits[part].max(-1).values for part in (slice(2), slice(2, 4))])
        for logits in pair()[1]
    ]
    torch.testing.assert_close(*found)


@torch.no_grad()
def test_ranks_of_two_targets() -> None:
    _, (logits, real) = pair()
    target = torch.arange(S * B).view(S, B)
    for ids in (target, target.flip(0)):
        got, expected = (
            ours.vocab_parallel_token_stats(x, ids, target_rank=True).target_rank
            for x in (logits, real)
        )
        assert torch.equal(got, expected)


# ---- passes and settings -------------------------------------------------------------------------


def test_segments_are_another_pass() -> None:
    logits = lazy_logits(torch.randn(S, B, H, requires_grad=True), torch.randn(V, H))
    with Seen() as seen:
        ours.vocab_parallel_entropy(logits)
        first = seen.products
        ours.vocab_parallel_entropy(logits, invariant_segments=2)
    assert seen.products > first


@pytest.mark.parametrize(
    ("name", "of_model", "of_call", "expected"),
    [
        ("chunk_size", 2, None, 2),
        ("chunk_size", 2, 3, 3),
        ("backend", "torch", "auto", "torch"),
        ("backend", "auto", "torch", "torch"),
    ],
)
def test_the_settings_of_a_patched_model_reach_its_consumers(
    monkeypatch: pytest.MonkeyPatch, name: str, of_model: Any, of_call: Any, expected: Any
) -> None:
    """Where a call says otherwise, its own do."""
    seen, original = [], lazy_head.head_logits

    def spy(*args: Any, **options: Any) -> Any:
        seen.append(options[name])
        return original(*args, **options)

    monkeypatch.setattr(lazy_head, "head_logits", spy)
    logits = lazy_logits(torch.randn(S, B, H), torch.randn(V, H), **{name: of_model})
    ours.vocab_parallel_entropy(logits, **{name: of_call})
    assert seen == [expected]


def test_a_patched_model_s_tiles_bound_what_is_made() -> None:
    logits = lazy_logits(torch.randn(64, 1, H), torch.randn(400, H), chunk_size=8)
    with Seen() as seen:
        ours.vocab_parallel_entropy(logits)
    assert seen.largest < 64 * 400


# ---- rounding ------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_largest_is_of_logits_as_the_layer_rounds_them() -> None:
    hidden, weight = torch.randn(400, 2, 16).bfloat16(), torch.randn(4000, 16).bfloat16()
    real = hidden @ weight.t()
    assert torch.equal(lazy_logits(hidden, weight).argmax(-1), real.argmax(-1))


def test_logits_are_rounded_as_the_layer_rounds_its_output() -> None:
    hidden, weight = torch.randn(6, 2, 16).bfloat16(), torch.randn(50, 16).bfloat16()
    target = torch.arange(12).view(6, 2)
    logits = lazy_logits(hidden, weight, output_dtype=torch.bfloat16)
    rounded = (hidden @ weight.t()).double().log_softmax(-1)
    expected = rounded.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    got = ours.vocab_parallel_logprobs(logits, target).double()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_bias_is_scaled_with_its_logits() -> None:
    hidden, weight, bias = torch.randn(6, 2, 16), torch.randn(50, 16), torch.randn(50)
    target = torch.arange(12).view(6, 2)
    source = lazy_logits(hidden, weight, bias=bias).view_of_head.rows.head.source(logit_scale=0.25)
    got = token_stats(source, target, Statistics.of(), None).logprobs
    scaled = (0.25 * (hidden @ weight.t() + bias)).log_softmax(-1)
    expected = scaled.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


# ---- two sides on several ranks ------------------------------------------------------------------


def one_side_split() -> list[float]:
    """Errors of KL where one side's sequence is split over the ranks and the other's is not."""
    count, rank, group = world_size(), world_rank(), world_group()
    hidden = [torch.randn(6, 2, 7) for _ in range(2)]
    weights = [torch.randn(V, 7) for _ in range(2)]
    log_p, log_q = ((h @ w.t()).log_softmax(-1) for h, w in zip(hidden, weights, strict=True))
    expected, errors = (log_q.exp() * (log_q - log_p)).sum(-1), []
    for split in ((True, False), (False, True)):
        sides = [
            lazy_logits(
                h.chunk(count)[rank] if is_split else h,
                w.chunk(count)[rank],
                tp_group=group,
                sequence_parallel=is_split,
                chunk_size=2,
            )
            for h, w, is_split in zip(hidden, weights, split, strict=True)
        ]
        with torch.no_grad():
            got = ours.vocab_parallel_kl_div(*sides, tp_group=group)
        errors.append(float((got - expected).abs().max()))
    return errors


def test_two_sides_of_which_one_splits_its_sequence(ranks: Any) -> None:
    for errors in ranks(2).run(one_side_split):
        assert all(error < 1e-5 for error in errors)


# ---- joined parts --------------------------------------------------------------------------------


@torch.no_grad()
def test_joined_parts_of_two_calls_and_of_two_dtypes() -> None:
    hidden, weight = torch.randn(2, S, B, H), torch.randn(2, V, H)
    lazy = [lazy_logits(h, w) for h, w in zip(hidden, weight, strict=True)]
    real = [h @ w.t() for h, w in zip(hidden, weight, strict=True)]
    entropies = [ours.vocab_parallel_entropy(torch.cat(parts)) for parts in (lazy, real)]
    torch.testing.assert_close(*entropies)
    assert torch.cat([lazy[0][:2].bfloat16(), lazy[0][2:]]).dtype == torch.float32


@torch.no_grad()
def test_temperatures_of_some_tokens() -> None:
    temperature = torch.linspace(0.5, 2.0, S * B).view(S, B, 1)
    found = [ours.vocab_parallel_entropy(x[2:] / temperature[2:]) for x in pair()[1]]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("last", [False, True])
def test_a_joined_part_that_was_detached_has_no_gradient(last: bool) -> None:
    def joined(logits: Tensor) -> Tensor:
        parts = [logits[:2], logits[2:].detach()]
        return torch.cat(parts if last else parts[::-1])

    assert_entropies_agree(joined, torch.linspace(0.5, 2.0, S * B).view(S, B))


@torch.no_grad()
def test_an_infinite_temperature() -> None:
    temperature = torch.ones(S, B, 1)
    temperature[1, 1] = torch.inf
    found = [ours.vocab_parallel_entropy(x / temperature) for x in pair()[1]]
    torch.testing.assert_close(*found)


def another_group() -> None:
    count, rank, group = world_size(), world_rank(), world_group()
    alone = [torch.distributed.new_group([member]) for member in range(count)][rank]
    logits = lazy_logits(torch.randn(3, 1, H), torch.randn(V, H).chunk(count)[rank], tp_group=group)
    with pytest.raises(ValueError, match="tp_group: expected the output layer's"):
        ours.vocab_parallel_entropy(logits, tp_group=alone)


def test_another_group_than_the_head_s_is_refused(ranks: Any) -> None:
    ranks(2).run(another_group)


def test_data_that_is_set_to_lazy_logits_is_real() -> None:
    hidden, weight = torch.randn(5, 2, 4, requires_grad=True), torch.randn(6, 4)
    lazy, target = lazy_logits(hidden, weight), torch.zeros(5, 2, dtype=torch.int64)
    lazy.data = lazy.data * 0.5
    exact = (hidden @ weight.t() * 0.5).log_softmax(-1)[..., 0]
    torch.testing.assert_close(ours.vocab_parallel_logprobs(lazy, target), exact)


# ---- layouts, and arguments by place and by name -------------------------------------------------


def scaled_after_a_copy(logits: Tensor) -> Tensor:
    copy = logits.transpose(0, 1).clone()
    flat = copy.transpose(0, 1).reshape(-1, V)  # a view, as a copy has its dimensions in order
    flat.div_(2.0)
    return ours.vocab_parallel_entropy(copy)


def scaled_after_another(logits: Tensor) -> Tensor:
    copy = logits.transpose(0, 1) / 1.5
    copy.reshape(-1, V).div_(2.0)  # of another tensor than the copy
    return ours.vocab_parallel_entropy(copy)


def copied_by_place(logits: Tensor) -> Tensor:
    for other in (torch.empty(1), torch.float32):
        logits.to(other, False, True).div_(3.0)
        assert logits.to(other, False, False) is logits
    logits.to("cpu", torch.float32, False, True).div_(3.0)
    return ours.vocab_parallel_entropy(logits)


LAYOUTS: dict[str, Callable[[Tensor], Any]] = {
    "a scale of a copy's view": scaled_after_a_copy,
    "a scale of a copy's copy": scaled_after_another,
    "copies by place": copied_by_place,
    "strides": lambda x: [
        y.stride()
        for y in (
            x.transpose(0, 1).clone(),
            x.transpose(0, 1)[1:] * 2.0,
            x.transpose(0, 1).contiguous(),
            x.transpose(0, 1).clone(memory_format=torch.contiguous_format),
            x.transpose(0, 1).to(torch.bfloat16, memory_format=torch.contiguous_format),
            x.transpose(0, 1).bfloat16(memory_format=torch.contiguous_format),
            x.transpose(0, 1).to(torch.float32, copy=True),
            x[:, :1].unsqueeze(0).permute(1, 0, 2, 3).bfloat16(),
            x.transpose(0, 1).expand(B, S, V).float(),
        )
    ],
    "a view of a copy": lambda x: (x.transpose(0, 1) / 2).transpose(0, 1).view(-1, V).softmax(-1),
    "out": lambda x: torch.index_select(x.detach(), 0, torch.tensor([1]), out=torch.empty(0)),
    "a type by name": lambda x: x.type_as(other=torch.empty(1, dtype=torch.bfloat16)).dtype,
    "no gradient by name": lambda x: x.detach().requires_grad_(requires_grad=False).requires_grad,
}


@pytest.mark.parametrize("program", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_and_arguments_are_torch_s(program: Callable[[Tensor], Any]) -> None:
    lazy, real = (program(logits) for logits in pair()[1])
    if isinstance(real, Tensor):
        torch.testing.assert_close(torch.as_tensor(lazy), real, rtol=1e-4, atol=1e-5)
    else:
        assert lazy == real


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_every_part_of_what_is_joined_has_gone_past_its_hooks(join: Any) -> None:
    logits = pair()[1][0]
    parts = [logits[0], logits[1]]
    ours.vocab_parallel_entropy(join(parts)).sum()
    for part in parts:
        with pytest.raises(RuntimeError, match=r"retain_grad: .* have no gradient of their own"):
            part.retain_grad()


@pytest.mark.parametrize("name", ["transpose_", "swapaxes_", "squeeze_", "unsqueeze_", "t_"])
def test_a_shape_is_not_changed_in_place(name: str) -> None:
    logits = pair()[1][0]
    arguments = {"transpose_": (0, 1), "swapaxes_": (0, 1), "unsqueeze_": (0,)}.get(name, ())
    with pytest.raises(RuntimeError, match=f"such as {name[:-1]}, got {name}"):
        getattr(logits, name)(*arguments)
    assert logits.shape == (S, B, V)


def test_a_softcap_of_the_call_comes_behind_the_layer_s_bias() -> None:
    hidden, weight, bias = torch.randn(3, 2, 4), torch.randn(6, 4), torch.randn(6)
    target = torch.arange(6).view(3, 2)
    z = 2.0 * torch.tanh((hidden @ weight.t() + bias) / 2.0)
    expected = z.log_softmax(-1).gather(-1, target.unsqueeze(-1))[..., 0]
    logits = lazy_logits(hidden, weight, bias=bias)
    torch.testing.assert_close(ours.vocab_parallel_logprobs(logits, target, softcap=2.0), expected)


def test_a_temperature_that_learns_gets_its_gradient() -> None:
    hidden, weight = torch.randn(3, 2, 4), torch.randn(6, 4)
    target, grads = torch.arange(6).view(3, 2), []
    for logits in (lazy_logits(hidden, weight), hidden @ weight.t()):
        temperature = torch.tensor([[[2.0], [0.5]]], requires_grad=True)
        logprobs = ours.vocab_parallel_logprobs(logits / temperature, target)
        grads += torch.autograd.grad(logprobs.sum(), temperature)
    torch.testing.assert_close(*grads)
