"""vocab_parallel_gather against float64, with repeated and ignored ids."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mcore_logprobs import vocab_parallel_gather
from tests.helpers import oracles
from tests.helpers.memory import TensorsMade
from tests.logits.common import (
    DTYPES,
    LAYOUTS,
    VOCAB,
    WORLDS,
    Case,
    accumulator,
    shard,
    world_group,
)


@pytest.mark.parametrize("log_softmax", [False, True])
def test_against_plain_torch_in_float64(log_softmax):
    """The operation on one process, line by line."""
    # 5 rows in chunks of 2 leave a ragged chunk; 9 columns, of which the last is padding. A row
    # repeats an id, whose gradients add up, and another ignores one.
    logits = torch.randn(5, 9, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 7], [3, 3], [2, -100], [5, 6], [1, 0]])
    upstream = torch.randn(5, 2, dtype=torch.float64)
    options = {"temperature": 0.7, "vocab_size": 8, "chunk_size": 2}
    if log_softmax:  # the default is the logits
        options["log_softmax"] = True
    out = vocab_parallel_gather(logits, ids, **options)
    (grad,) = torch.autograd.grad(out, logits, upstream)

    z = logits[:, :8] / 0.7
    picked = (z.log_softmax(-1) if log_softmax else z).gather(-1, ids.clamp(min=0))
    expected = torch.where(ids != -100, picked, 0.0)
    (expected_grad,) = torch.autograd.grad(expected, logits, upstream)

    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


@dataclass
class GatherCase(Case):
    ids: Tensor
    counts_collectives = True

    def __post_init__(self) -> None:
        self.upstream = {"values": torch.randn(self.ids.shape, dtype=accumulator(self.whole.dtype))}

    def call(self, logits: Tensor) -> dict[str, Tensor]:
        group = world_group()
        return {"values": vocab_parallel_gather(logits, self.ids, tp_group=group, **self.options)}

    def truth(self, whole: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        options = {k: v for k, v in self.options.items() if k != "chunk_size"}
        make = oracles.finished_logits
        if options.pop("log_softmax", False):
            make = oracles.log_softmax
        keep = self.ids != -100
        rows = torch.where(keep.any(-1, keepdim=True), whole, 0.0)
        z = make(rows, dtype=dtype, **options)
        return {"values": torch.where(keep, z.gather(-1, self.ids.clamp(min=0)), 0.0)}

    def check(self, ulps: float = 4.0) -> None:
        super().check(ulps)
        one = "all_gather" if self.options.get("log_softmax") else "all_reduce"
        self.assert_sent([one] if self.ids.shape[:-1].numel() else [], [])


def _ids(lead: tuple[int, ...], k: int, vocab: int, ignored: float = 0.2) -> Tensor:
    ids = torch.randint(0, vocab, (*lead, k))
    return torch.where(torch.rand(ids.shape) < ignored, -100, ids)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"vocab_size": 11}], ids=str)
@pytest.mark.parametrize("log_softmax", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_values_and_gradients(world, dtype, log_softmax, options):
    whole = (torch.randn(3, 7, VOCAB) * 3).to(dtype)
    ids = _ids((3, 7), 6, options.get("vocab_size", VOCAB))
    GatherCase(whole, ids, options={"log_softmax": log_softmax, **options}).run(world).check()


@pytest.mark.parametrize("log_softmax", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_repeated_ids_add_up(world, dtype, log_softmax):
    # 50 entries over 3 ids: summed in bfloat16 they would be far off.
    ids = torch.randint(0, 3, (9, 50)) * 7
    whole = torch.randn(9, VOCAB).to(dtype)
    GatherCase(whole, ids, options={"log_softmax": log_softmax}).run(world).check()


@pytest.mark.parametrize("log_softmax", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_ignored_rows_may_hold_anything(world, log_softmax):
    whole = torch.randn(5, VOCAB)
    whole[1], whole[3] = torch.nan, -torch.inf
    ids = _ids((5,), 4, VOCAB, ignored=0.0)
    ids[1], ids[3] = -100, -100
    GatherCase(whole, ids, options={"log_softmax": log_softmax}).run(world).check()


@pytest.mark.parametrize("log_softmax", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_minus_infinity(world, log_softmax):
    whole = torch.randn(8, VOCAB)
    whole[torch.rand(8, VOCAB) < 0.4] = -torch.inf
    whole[0] = -torch.inf
    whole[0, 13] = 2.0
    ids = _ids((8,), 5, VOCAB)
    GatherCase(whole, ids, options={"log_softmax": log_softmax}).run(world).check()


@pytest.mark.parametrize("log_softmax", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", WORLDS)
def test_layouts(world, layout, log_softmax):
    ids = _ids((4, 5), 3, VOCAB)
    whole = torch.randn(4, 5, VOCAB)
    options = {"chunk_size": 3, "log_softmax": log_softmax}
    GatherCase(whole, ids, options=options, layout=layout).run(world).check()


@pytest.mark.parametrize("lead", [(), (1,), (0,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("world", WORLDS)
def test_leading_shapes(world, lead, k):
    whole, ids = torch.randn(*lead, VOCAB), _ids(lead, k, VOCAB)
    GatherCase(whole, ids, options={"log_softmax": True}).run(world).check()


@pytest.mark.parametrize("offset", [-120.0, 80.0, 1e4])
@pytest.mark.parametrize("world", WORLDS)
def test_logits_far_from_zero(world, offset):
    whole = torch.randn(9, VOCAB) * 2 + offset
    GatherCase(whole, _ids((9,), 4, VOCAB), options={"log_softmax": True}).run(world).check()


def _bad(whole: Tensor, ids: object, options: dict) -> None:
    vocab_parallel_gather(shard(whole)[1], ids, tp_group=world_group(), **options)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), {}, "ids: expected shape"),
        (torch.zeros(4, 2, dtype=torch.int64), {}, "ids: expected shape"),
        (torch.zeros(3, 2), {}, "ids: expected an integer dtype"),
        ([[1], [2], [3]], {}, "ids: expected a torch.Tensor"),
        (torch.full((3, 2), VOCAB), {}, "ids: expected ids in"),
        (torch.full((3, 2), 11), {"vocab_size": 11}, "ids: expected ids in"),
        (torch.full((3, 2), -1), {}, "ids: expected ids in"),
        (torch.zeros(3, 2, dtype=torch.int64), {"log_softmax": 1}, "log_softmax: expected"),
        (torch.zeros(3, 2, dtype=torch.int64), {"temperature": 0}, "temperature: expected"),
    ],
    ids=str,
)
def test_bad_input_raises_on_every_rank(ranks, ids, options, message):
    for error in ranks(2).run_expecting_errors(_bad, torch.randn(3, VOCAB), ids, options):
        assert isinstance(error, ValueError)
        assert message in str(error)


@pytest.mark.parametrize("log_softmax", [False, True])
def test_memory_is_a_few_chunks(log_softmax):
    logits = torch.randn(64, 4096).bfloat16().requires_grad_()
    copy = 4 * 4096 * 4  # float32 copies of 4 rows
    with TensorsMade() as made:
        out = vocab_parallel_gather(
            logits, torch.randint(0, 4096, (64, 5)), log_softmax=log_softmax, chunk_size=4
        )
    assert made.peak <= 4 * copy
    with TensorsMade() as made:
        out.sum().backward()
    assert [m.dtype for m in made.larger_than(copy)] == [torch.bfloat16]  # the gradient itself
    assert made.peak <= logits.nbytes + 4 * copy
