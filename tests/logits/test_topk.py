"""vocab_parallel_topk and vocab_parallel_argmax against a stable sort of the whole vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mcore_logprobs import vocab_parallel_argmax, vocab_parallel_topk
from mcore_logprobs.bench.counting import CollectivesMade
from mcore_logprobs.ops import topk
from mcore_logprobs.ops.topk import stable_topk
from tests.helpers.distributed import RankError
from tests.helpers.memory import TensorsMade
from tests.logits.common import (
    DTYPES,
    LAYOUTS,
    VOCAB,
    WORLDS,
    accumulator,
    gradient_of_view,
    on_ranks,
    shard,
    world_group,
)


def test_against_plain_torch_in_float64():
    """The operation on one process, line by line."""
    # 5 rows in chunks of 2 leave a ragged chunk; the last of 9 columns is padding and the highest.
    logits = torch.randn(5, 9, dtype=torch.float64)
    logits[:, 8] = 9.0
    logits.requires_grad_()
    upstream = torch.randn(5, 3, dtype=torch.float64)
    options = {"temperature": 0.7, "vocab_size": 8, "chunk_size": 2}
    values, ids = vocab_parallel_topk(logits, 3, **options)
    (grad,) = torch.autograd.grad(values, logits, upstream)

    expected, expected_ids = (logits[:, :8] / 0.7).topk(3)
    (expected_grad,) = torch.autograd.grad(expected, logits, upstream)

    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


def _run(whole: Tensor, k: int, upstream: Tensor, layout: str, options: dict) -> tuple:
    leaf, logits = shard(whole, layout)
    kept = leaf.detach().clone()
    with CollectivesMade() as made:
        values, ids = vocab_parallel_topk(logits, k, tp_group=world_group(), **options)
        (grad,) = torch.autograd.grad(values, leaf, upstream)
    assert torch.equal(leaf.detach().nan_to_num(99.0), kept.nan_to_num(99.0))
    best = vocab_parallel_argmax(
        logits, tp_group=world_group(), vocab_size=options.get("vocab_size")
    )
    return values.detach(), ids, gradient_of_view(grad, layout), best, made.names


def _expected(whole: Tensor, k: int, vocab_size: int | None, temperature: float) -> tuple:
    z = whole.double()[..., : vocab_size or whole.shape[-1]]
    order = z.sort(dim=-1, descending=True, stable=True)
    return order.values[..., :k] / temperature, order.indices[..., :k]


def _check(ranks, world: int, whole: Tensor, k: int, layout: str = "plain", **options) -> None:
    dtype = accumulator(whole.dtype)
    temperature = options.get("temperature", 1.0)
    values, ids = _expected(whole, k, options.get("vocab_size"), temperature)
    upstream = torch.randn(*whole.shape[:-1], k, dtype=dtype)
    grad = torch.zeros(whole.shape, dtype=torch.float64)
    grad.scatter_(-1, ids, upstream.double() / temperature)
    results = on_ranks(ranks, world, _run, whole, k, upstream, layout, options)
    for found, found_ids, _, best, names in results:
        assert found.dtype == dtype
        assert found_ids.dtype == torch.int64
        assert torch.equal(found_ids, ids)
        torch.testing.assert_close(found.double(), values, rtol=1e-6, atol=0)
        assert torch.equal(best, ids[..., 0])
        assert names == ([] if world == 1 or not ids.numel() else ["all_gather"])
    whole_grad = torch.cat([result[2] for result in results], -1)
    assert whole_grad.dtype == whole.dtype
    torch.testing.assert_close(whole_grad, grad.to(dtype).to(whole.dtype), rtol=1e-6, atol=0)


@pytest.mark.parametrize("k", [1, 5, 12, 17])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_values_ids_and_gradient(ranks, world, dtype, k):
    # k = 12 is more than a shard at TP 3; 17 columns leave a shard at TP 3 with one, or none.
    _check(ranks, world, torch.randn(3, 5, VOCAB).to(dtype), k, vocab_size=17, temperature=0.7)


@pytest.mark.parametrize("k", [1, 3, 8, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_ties_go_by_id(ranks, world, dtype, k):
    _check(ranks, world, (torch.randn(64, VOCAB) * 1.5).round().to(dtype), k)


@pytest.mark.parametrize("world", WORLDS)
def test_all_equal_and_signed_zeros(ranks, world):
    whole = torch.zeros(4, VOCAB)
    whole[1] = -3.0
    whole[2, ::2] = -0.0
    whole[3, 1::2] = -0.0
    _check(ranks, world, whole, 7)


@pytest.mark.parametrize("world", WORLDS)
def test_minus_infinity_and_all_of_the_vocabulary(ranks, world):
    whole = torch.randn(6, VOCAB)
    whole[:, ::3] = -torch.inf
    whole[0] = -torch.inf
    for vocab_size in (VOCAB, 11):
        _check(ranks, world, whole, vocab_size, vocab_size=vocab_size)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", WORLDS)
def test_layouts(ranks, world, layout):
    _check(ranks, world, torch.randn(4, 5, VOCAB), 4, layout, chunk_size=3)


@pytest.mark.parametrize("lead", [(), (1,), (0,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_leading_shapes(ranks, world, lead):
    _check(ranks, world, torch.randn(*lead, VOCAB), 3)


@pytest.mark.parametrize("width", [1, 5, 127])
@pytest.mark.parametrize("world", WORLDS)
def test_odd_widths(ranks, world, width):
    _check(ranks, world, torch.randn(6, width * world).bfloat16(), min(9, width * world))


def _bad_k(whole: Tensor, k: object, options: dict) -> None:
    vocab_parallel_topk(shard(whole)[1], k, tp_group=world_group(), **options)


@pytest.mark.parametrize(
    ("k", "options"),
    [(0, {}), (-1, {}), (1.0, {}), (True, {}), (VOCAB + 1, {}), (12, {"vocab_size": 11})],
    ids=str,
)
def test_bad_k_raises_on_every_rank(ranks, k, options):
    for error in ranks(2).run_expecting_errors(_bad_k, torch.randn(3, VOCAB), k, options):
        assert isinstance(error, ValueError)
        assert "k: expected" in str(error)
    with pytest.raises(RankError, match="tp_group=None"):
        ranks(2).run(_without_group)


def _without_group() -> None:
    vocab_parallel_argmax(torch.randn(3, VOCAB))


def test_memory_is_a_few_chunks():
    logits = torch.randn(64, 4096).bfloat16()
    copy = 4 * 4096 * 4  # float32 copies of 4 rows
    with TensorsMade() as made:
        vocab_parallel_topk(logits, 8, chunk_size=4)
    assert not made.larger_than(2 * copy)
    assert made.peak <= 4 * copy


@pytest.mark.parametrize("k", [1, 5, 12])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equal_values_and_nan_are_chosen_by_column(dtype, k):
    """Rows without a tie, of nothing but ties, of both zeros, and with the NaN that a CPU makes."""
    x = torch.randn(9, 12).to(dtype)
    x[1], x[2, ::2], x[3] = 1.0, 0.0, torch.where(torch.arange(12) % 3 == 0, -0.0, 0.0)
    x[4, [2, 7]] = torch.tensor(torch.inf, dtype=dtype) - torch.inf
    x[5, [1, 8, 9]], x[6] = torch.nan, -torch.inf
    x[7:] = torch.randint(0, 3, (2, 12)).to(dtype)
    expected = x.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values
    assert torch.equal(stable_topk(x, k).sort(-1).values, expected)
    values, _ = vocab_parallel_topk(x, k)
    assert values[4:6, 0].isnan().all()


def test_a_nan_of_either_sign_is_the_largest_by_keys_too():
    """What a GPU takes; a NaN that a CPU makes has its sign bit set."""
    nan = torch.tensor([-torch.inf]) - torch.tensor([-torch.inf])
    x = torch.tensor([[1.0, 3.0, 2.0, 5.0]])
    x[0, 2] = torch.copysign(nan, torch.tensor(-1.0))[0]
    x = torch.cat([x, x.roll(1, 1)])
    assert topk._topk_of_keys(x, 1).tolist() == [[2], [3]]
    assert topk._topk_of_keys(x.bfloat16(), 2).sort().values.tolist() == [[2, 3], [0, 3]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_keys_tell_what_the_dtype_tells(dtype):
    x = torch.randn(5, 24).to(dtype)
    tiny = torch.finfo(dtype).tiny
    x[0] = 1.0 + torch.finfo(dtype).eps * torch.arange(24).to(dtype) % 7
    x[1] = tiny * torch.randperm(24).to(dtype)
    x[2] = torch.tensor([0.0, -0.0] * 12)
    x[3, ::3] = -torch.inf
    x[4, 1::5] = torch.inf
    kept = x.clone()
    for k in (1, 7, 23):
        columns = topk._topk_of_keys(x, k).sort(-1).values
        expected = x.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values
        assert torch.equal(columns, expected)
        assert torch.equal(stable_topk(x, k).sort(-1).values, expected)
        assert torch.equal(x.signbit(), kept.signbit())
        assert torch.equal(x, kept)
