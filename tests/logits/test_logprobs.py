"""The one-tensor operations, and agreement with Megatron's own vocab_parallel_cross_entropy."""

from __future__ import annotations

import megatron.core  # noqa: F401  (the ranks' fork server imports it once for all of them)
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_logprobs import (
    vocab_parallel_entropy,
    vocab_parallel_logprobs,
    vocab_parallel_target_rank,
    vocab_parallel_token_stats,
)
from mcore_logprobs.bench.counting import CollectivesMade
from tests.helpers import oracles
from tests.logits.common import (
    VOCAB,
    WORLDS,
    make_target,
    make_upstream,
    on_ranks,
    shard,
    world_group,
    world_size,
)

OPTIONS = [{}, {"temperature": 0.6, "vocab_size": 13, "softcap": 4.0, "chunk_size": 2}]


def test_against_plain_torch_in_float64():
    """Both operations on one process, line by line."""
    # 5 rows in chunks of 2 leave a ragged chunk; 9 columns, of which the last 2 are padding.
    logits = torch.randn(5, 9, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([6, 0, -100, 2, 2])
    upstream = list(torch.randn(2, 5, dtype=torch.float64))  # a gradient a token and output
    options = {"temperature": 1.3, "vocab_size": 7, "chunk_size": 2}
    found = [
        vocab_parallel_logprobs(logits, target, **options),
        vocab_parallel_entropy(logits, **options),
    ]
    (grad,) = torch.autograd.grad(found, logits, upstream)

    logp = (logits[:, :7] / 1.3).log_softmax(-1)
    picked = logp.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    # The entropy knows no target: the ignored row has one.
    expected = [torch.where(target != -100, picked, 0.0), -(logp.exp() * logp).sum(-1)]
    (expected_grad,) = torch.autograd.grad(expected, logits, upstream)

    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


def _one_tensor(whole: Tensor, target: Tensor, upstream: Tensor, options: dict) -> tuple:
    common = {"tp_group": world_group(), **options}
    _, logits = shard(whole)
    with CollectivesMade() as made:
        logprobs = vocab_parallel_logprobs(logits, target, **common)
        entropy = vocab_parallel_entropy(logits, **common)
    assert made.names == (["all_gather"] * 2 if world_size() > 1 else [])
    stats = vocab_parallel_token_stats(logits, target, entropy=True, **common)
    whole_entropy = vocab_parallel_token_stats(
        logits, target.clamp(min=0), entropy=True, **common
    ).entropy
    assert torch.equal(logprobs, stats.logprobs)
    assert torch.equal(entropy, whole_entropy)
    grads = [
        torch.autograd.grad(output, logits, upstream, retain_graph=True)[0]
        for output in (logprobs, entropy)
    ]
    return logprobs, entropy, *grads


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_logprobs_and_entropy(ranks, world, dtype, options):
    whole = (torch.randn(2, 5, VOCAB) * 2).to(dtype)
    target = make_target((2, 5), options.get("vocab_size", VOCAB))
    upstream = torch.randn(2, 5)
    results = on_ranks(ranks, world, _one_tensor, whole, target, upstream, options)
    exact_options = {k: v for k, v in options.items() if k != "chunk_size"}

    def reference(accumulate: torch.dtype) -> list[Tensor]:
        leaf = whole.double() if accumulate == torch.float64 else whole.clone()
        leaf.requires_grad_()
        logprobs = oracles.token_stats(leaf, target, dtype=accumulate, **exact_options).logprobs
        # The entropy knows no target: every row counts.
        anywhere = target.clamp(min=0)
        entropy = oracles.token_stats(leaf, anywhere, dtype=accumulate, **exact_options).entropy
        incoming = upstream.to(accumulate)
        grads = [torch.autograd.grad(out, leaf, incoming)[0] for out in (logprobs, entropy)]
        return [logprobs, entropy, *grads]

    exact, plain = reference(torch.float64), reference(torch.float32)
    for logprobs, entropy, *_ in results:
        oracles.assert_no_worse(logprobs, plain[0], exact[0], name="logprobs")
        oracles.assert_no_worse(entropy, plain[1], exact[1], name="entropy")
    for i in (2, 3):
        grad = torch.cat([result[i] for result in results], -1)
        oracles.assert_no_worse(grad, plain[i], exact[i], name=f"gradient {i}")


def _against_megatron(whole: Tensor, target: Tensor, upstream: Tensor, smoothing: float) -> tuple:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size())
    try:
        theirs, _ = shard(whole)
        # Megatron's writes over float32 logits, hence the copy.
        loss = vocab_parallel_cross_entropy(theirs.clone(), target, smoothing)
        loss.backward(upstream)
        ours, _ = shard(whole)
        # No group is given: Megatron's own must be found.
        logprobs = vocab_parallel_logprobs(ours, target, label_smoothing=smoothing)
        logprobs.backward(-upstream)
        assert theirs.grad is not None
        assert ours.grad is not None
        rank = vocab_parallel_target_rank(ours, target)
        return loss.detach(), -logprobs.detach(), theirs.grad, ours.grad, rank
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("world", "smoothing"), [(2, 0.0), (1, 0.1), (1, 0.0)])
def test_agrees_with_megatron_and_is_no_less_exact(ranks, world, smoothing, dtype):
    # Megatron smooths over each rank's shard, which is over the vocabulary at TP 1 only.
    whole = (torch.randn(6, 3, 96) * 3).to(dtype)
    target = torch.randint(0, 96, (6, 3))
    upstream = torch.randn(6, 3)
    results = ranks(world).run(_against_megatron, whole, target, upstream, smoothing)
    leaf = whole.double().requires_grad_()
    stats = oracles.token_stats(leaf, target, label_smoothing=smoothing)
    (exact,) = torch.autograd.grad(-stats.logprobs, leaf, upstream.double())
    for their_loss, our_loss, *_, rank in results:
        torch.testing.assert_close(our_loss, their_loss, rtol=1e-6, atol=2e-6)
        oracles.assert_no_worse(our_loss, their_loss, -stats.logprobs, name="loss")
        assert torch.equal(rank, stats.target_rank)
    theirs = torch.cat([result[2] for result in results], -1)
    ours = torch.cat([result[3] for result in results], -1)
    oracles.assert_no_worse(ours, theirs, exact, name="gradient")


def _no_group(whole: Tensor) -> None:
    assert dist.get_world_size() > 1
    _, logits = shard(whole)
    vocab_parallel_entropy(logits)


def test_a_shard_never_passes_for_the_whole_vocabulary(ranks):
    for error in ranks(2).run_expecting_errors(_no_group, torch.randn(3, VOCAB)):
        assert isinstance(error, ValueError)
        assert "tp_group=None" in str(error)


def test_entropy_of_known_distributions():
    uniform = vocab_parallel_entropy(torch.full((2, 64), 3.25), vocab_size=50)
    torch.testing.assert_close(uniform, torch.full((2,), 50.0).log())
    certain = torch.full((1, 64), -torch.inf)
    certain[0, 3] = 2.0
    assert vocab_parallel_entropy(certain).item() == 0.0
    half = torch.full((1, 64), -torch.inf)
    half[0, 3:5] = 2.0
    torch.testing.assert_close(vocab_parallel_entropy(half), torch.tensor([2.0]).log())


def test_the_gradient_of_a_mean_over_kept_tokens():
    """What a training loop does: a masked mean, whose upstream is 0 on some tokens."""
    logits = torch.randn(4, 8, VOCAB, requires_grad=True)
    target = make_target((4, 8), VOCAB, ignored=0.0)
    mask = (torch.rand(4, 8) < 0.5).float()
    loss = -(vocab_parallel_logprobs(logits, target) * mask).sum() / mask.sum()
    loss.backward()
    assert logits.grad is not None
    assert not logits.grad[mask == 0].any()
    leaf = logits.detach().double().requires_grad_()
    exact = -(oracles.token_stats(leaf, target).logprobs * mask).sum() / mask.sum()
    exact.backward()
    torch.testing.assert_close(logits.grad.double(), leaf.grad, rtol=1e-5, atol=1e-8)


def test_upstream_of_other_strides():
    """An expanded or transposed upstream gradient, as `sum()` and `.t()` make them."""
    logits = torch.randn(4, 6, VOCAB, requires_grad=True)
    target = make_target((4, 6), VOCAB)
    logprobs = vocab_parallel_logprobs(logits, target)
    upstream = make_upstream((6, 4), torch.float32)["logprobs"].t()
    (strided,) = torch.autograd.grad(logprobs, logits, upstream, retain_graph=True)
    (dense,) = torch.autograd.grad(logprobs, logits, upstream.contiguous(), retain_graph=True)
    assert torch.equal(strided, dense)
    (expanded,) = torch.autograd.grad(logprobs.sum(), logits, retain_graph=True)
    (ones,) = torch.autograd.grad(logprobs, logits, torch.ones(4, 6))
    assert torch.equal(expanded, ones)
