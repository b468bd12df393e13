"""vocab_parallel_log_softmax: the shards of torch's log_softmax, and of its gradient."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mcore_logprobs import vocab_parallel_log_softmax
from tests.helpers import oracles
from tests.helpers.memory import TensorsMade
from tests.logits.common import (
    DTYPES,
    LAYOUTS,
    VOCAB,
    WORLDS,
    Case,
    Found,
    accumulator,
    world_group,
    world_rank,
    world_size,
)


def test_against_plain_torch_in_float64():
    """The operation on one process, line by line."""
    # 6 rows in chunks of 4 leave a ragged chunk; 7 columns, of which the last is padding.
    logits = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, 3, 7, dtype=torch.float64)
    out = vocab_parallel_log_softmax(logits, temperature=0.7, vocab_size=6, chunk_size=4)
    (grad,) = torch.autograd.grad(out[..., :6], logits, upstream[..., :6])

    expected = (logits[..., :6] / 0.7).log_softmax(-1)
    (expected_grad,) = torch.autograd.grad(expected, logits, upstream[..., :6])

    torch.testing.assert_close(out[..., :6], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)
    assert out[..., 6].isneginf().all()


@dataclass
class LogSoftmaxCase(Case):
    sharded_outputs = True
    counts_collectives = True

    def __post_init__(self) -> None:
        shape, dtype = self.whole.shape, accumulator(self.whole.dtype)
        self.upstream = {"log_softmax": torch.randn(shape, dtype=dtype)}

    def call(self, logits: Tensor) -> dict[str, Tensor]:
        group = world_group()
        return {"log_softmax": vocab_parallel_log_softmax(logits, tp_group=group, **self.options)}

    def incoming(self) -> dict[str, Tensor]:
        width = self.whole.shape[-1] // world_size()
        mine = slice(world_rank() * width, (world_rank() + 1) * width)
        return {name: value[..., mine].clone() for name, value in self.upstream.items()}

    def true_upstream(self) -> dict[str, Tensor]:
        # Nobody should send a gradient into a masked column; if somebody does, it goes nowhere.
        inside = torch.arange(self.whole.shape[-1]) < self.options.get("vocab_size", VOCAB)
        return {name: torch.where(inside, value, 0.0) for name, value in self.upstream.items()}

    def truth(self, whole: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        options = {k: v for k, v in self.options.items() if k != "chunk_size"}
        return {"log_softmax": oracles.log_softmax(whole, dtype=dtype, **options)}

    def on_rank(self) -> Found:
        found = super().on_rank()
        if world_size() > 1 and self.whole.numel():
            assert [made.name for made in found.forward] == ["all_gather"]
            assert len(found.backward) == 1
            assert found.backward[0].nbytes <= 4 * 2 * self.whole.shape[:-1].numel()
        return found


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6}, {"vocab_size": 11, "chunk_size": 4}, {"chunk_size": 1}],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_values_and_gradients(world, dtype, options):
    LogSoftmaxCase((torch.randn(3, 5, VOCAB) * 3).to(dtype), options=options).run(world).check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", WORLDS)
def test_layouts(world, layout):
    options = {"chunk_size": 3, "vocab_size": 20}
    LogSoftmaxCase(torch.randn(4, 5, VOCAB), options=options, layout=layout).run(world).check()


@pytest.mark.parametrize("lead", [(), (1,), (0,), (3, 0), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_leading_shapes(world, lead):
    LogSoftmaxCase(torch.randn(*lead, VOCAB)).run(world).check()


@pytest.mark.parametrize("offset", [-120.0, 80.0, 1e4])
@pytest.mark.parametrize("world", WORLDS)
def test_logits_far_from_zero(world, offset):
    LogSoftmaxCase(torch.randn(6, VOCAB) * 2 + offset).run(world).check()


@pytest.mark.parametrize("world", WORLDS)
def test_minus_infinity_columns(world):
    whole = torch.randn(20, VOCAB)
    whole[torch.rand(20, VOCAB) < 0.5] = -torch.inf
    whole[0] = torch.where(torch.arange(VOCAB) == 3, 1.0, -torch.inf)
    whole[:, 3] = 0.5
    LogSoftmaxCase(whole).run(world).check()


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e4])
@pytest.mark.parametrize("world", WORLDS)
def test_masked_columns_may_hold_anything(world, junk):
    whole = torch.randn(5, VOCAB)
    whole[:, 11:] = junk
    case = LogSoftmaxCase(whole, options={"vocab_size": 11}).run(world)
    out, grad = case.outputs()["log_softmax"], case.gradient()
    torch.testing.assert_close(out[:, :11], torch.log_softmax(whole[:, :11], -1))
    assert out[:, 11:].isneginf().all()
    assert not grad[:, 11:].any()
    assert grad.isfinite().all()


def test_memory_is_the_result_and_a_few_chunks():
    logits = torch.randn(256, 1024).bfloat16().requires_grad_()
    chunk = 4 * 1024 * 4
    with TensorsMade() as forward:
        out = vocab_parallel_log_softmax(logits, chunk_size=4)
    assert [made.nbytes for made in forward.larger_than(2 * chunk)] == [256 * 1024 * 4]
    assert forward.peak <= 256 * 1024 * 4 + 4 * chunk + 256 * 64
    upstream = torch.ones_like(out)
    with TensorsMade() as backward:
        out.backward(upstream)
    large = backward.larger_than(2 * chunk)
    assert [made.nbytes for made in large if made.dtype == torch.bfloat16] == [256 * 1024 * 2]
    assert backward.peak <= 256 * 1024 * 2 + 4 * chunk + 256 * 64


def test_gradcheck():
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: vocab_parallel_log_softmax(x, temperature=0.8), logits)
