"""linear_map: any operation on logits from hidden states, against the same on the whole head."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import megatron.core  # noqa: F401  (the ranks' fork server imports it once for all of them)
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mcore_logprobs import linear_map, vocab_parallel_token_stats, vocab_parallel_topk
from tests.helpers.heads import make_problem, shard_problem
from tests.helpers.memory import TensorsMade
from tests.helpers.shards import on_ranks, world_group, world_size


class Found(NamedTuple):
    spread: Tensor  # [rows]
    pair: tuple[Tensor, None]  # [rows, 2], differentiable
    ids: Tensor  # [rows, 2] int64
    constant: Tensor  # [rows], cut off from the logits


def _several(z: Tensor, scale: Tensor) -> Found:
    values, ids = vocab_parallel_topk(z, 2)
    return Found(z.var(-1) * scale[:, 0], (values, None), ids, z.detach().amax(-1))


def test_against_plain_torch_in_float64():
    """Results of several shapes in a named tuple; a per-token tensor with a dimension of its own.

    10 rows in tiles of 4 leave a ragged tile; 9 columns, a width of 3.
    """
    hidden = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(5, 2, 1, dtype=torch.float64)
    out = linear_map(hidden, weight, _several, scale, softcap=2.0, chunk_size=4)
    assert isinstance(out, Found)

    z = 2.0 * torch.tanh(hidden @ weight.t() / 2.0)
    values, ids = z.topk(2, -1)
    spread = z.var(-1) * scale[..., 0]
    torch.testing.assert_close(out.spread, spread, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out.pair[0], values, rtol=1e-12, atol=1e-12)
    assert out.pair[1] is None
    assert torch.equal(out.ids, ids)
    torch.testing.assert_close(out.constant, values[..., 0].detach(), rtol=1e-12, atol=1e-12)
    assert [x.requires_grad for x in (out.spread, out.pair[0], out.ids, out.constant)] == [
        True,
        True,
        False,
        False,
    ]
    upstream = [torch.randn_like(spread), torch.randn_like(values)]
    found = torch.autograd.grad([out.spread, out.pair[0]], [hidden, weight], upstream)
    expected = torch.autograd.grad([spread, values], [hidden, weight], upstream)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_row_of_nan_spoils_no_other_and_asks_for_nothing():
    problem = make_problem((6,), ignored=0.0)
    problem.hidden[2] = torch.nan
    hidden, weight, _ = shard_problem(problem, False)
    out = linear_map(hidden, weight, lambda z: z.logsumexp(-1))
    assert out.isnan().tolist() == [row == 2 for row in range(6)]
    upstream = torch.randn(6)
    upstream[2] = 0.0
    (grad,) = torch.autograd.grad(out, hidden, upstream)
    assert not grad[2].any()
    assert grad.isfinite().all()


# ---- what it costs ------------------------------------------------------------------------------


def test_four_products():
    problem = make_problem((12,))
    hidden, weight, _ = shard_problem(problem, False)
    one = 2 * problem.target.numel() * weight.numel()
    with FlopCounterMode(display=False) as forward:
        out = linear_map(hidden, weight, lambda z: z.logsumexp(-1), chunk_size=5)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == one
    assert backward.get_total_flops() == 3 * one


def _allocations(dtype: torch.dtype, options: dict, sequence_parallel: bool) -> tuple:
    rows, vocab, width = 256, 8192, 32
    local = rows // world_size() if sequence_parallel else rows
    hidden = torch.randn(local, width).to(dtype).requires_grad_()
    weight = torch.randn(vocab // world_size(), width).to(dtype).requires_grad_()
    target = torch.arange(rows) % vocab
    group = world_group()

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return vocab_parallel_token_stats(z, t, tp_group=group, chunk_size=1).logprobs

    with TensorsMade() as forward:
        out = linear_map(
            hidden,
            weight,
            fn,
            target,
            tp_group=group,
            sequence_parallel=sequence_parallel,
            **options,
        )
    kept = forward.live
    with TensorsMade() as backward:
        out.sum().backward()
    wide = 4 * (rows * width + weight.numel())  # both gradients in float32
    return forward.made, forward.peak, kept, backward.made, backward.peak, wide


@pytest.mark.parametrize("options", [{}, {"softcap": 20.0}], ids=["plain", "softcap"])
@pytest.mark.parametrize(
    ("layout", "dtype"), [((1, False), torch.float32), ((2, True), torch.bfloat16)], ids=str
)
def test_never_more_than_tiles_of_logits(ranks, layout, dtype, options):
    world, sequence_parallel = layout
    chunk_size = 16
    tile = chunk_size * (8192 // world) * 4
    per_row = 256 * 8 * 40
    args = (dtype, options | {"chunk_size": chunk_size}, sequence_parallel)
    softcap = 2 if options else 0  # raw logits beside the finished ones, and a passing copy
    for made, peak, kept, made_backward, peak_backward, wide in on_ranks(
        ranks, world, _allocations, *args
    ):
        gradient_shapes = {(8192 // world, 32), (256, 32), (256 // world, 32)}
        for one in (*made, *made_backward):
            assert one.nbytes <= tile or one.shape in gradient_shapes, one
        assert kept <= per_row
        # All logits would be 16 tiles.
        assert peak <= (2 + softcap) * tile + wide + per_row
        assert peak_backward <= (4 + softcap) * tile + 2 * wide + per_row


# ---- what is refused ----------------------------------------------------------------------------


class _Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.ones(()))

    def forward(self, z: Tensor) -> Tensor:
        return (z * self.temperature).logsumexp(-1)


def _times(z: Tensor, factor: Tensor) -> Tensor:
    return z.logsumexp(-1) * factor


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen head"])
def test_learnt_tensors_are_refused_by_name(frozen):
    hidden, weight, _ = shard_problem(make_problem((6,)), False)
    if frozen:
        hidden, weight = hidden.detach(), weight.detach()
    learnt = torch.ones((), requires_grad=True)
    fns = {
        "'learnt'": lambda z: z.logsumexp(-1) * learnt.exp(),
        "'factor'": functools.partial(_times, factor=learnt),
        "'_Scaled.temperature'": _Scaled(),
        "'learnt' (shape ())": lambda z: learnt.expand(z.shape[0]),
    }
    for name, fn in fns.items():
        with pytest.raises(ValueError, match="requires a gradient") as error:
            linear_map(hidden, weight, fn)
        assert name in str(error.value)
        with torch.no_grad():
            linear_map(hidden, weight, fn)
    with pytest.raises(ValueError, match=r"per_token_tensors\[0\]: requires a gradient"):
        linear_map(hidden, weight, _times, torch.ones(6, requires_grad=True))


@pytest.mark.parametrize(
    ("fn", "tensors", "options", "message"),
    [
        ("sum", (), {}, "fn: expected a callable, got str"),
        (lambda z: z.sum(), (), {}, r"fn: expected .*\[6, ...\], got \(\) as result 0"),
        (lambda z: (z.sum(-1), 1.0), (), {}, "got float as result 1"),
        (lambda z: z.sum(0), (), {}, r"got \(24,\)"),
        (_times, (torch.ones(5),), {}, r"per_token_tensors\[0\].*\(6,\).*\(5,\)"),
        (_times, (1.0,), {}, r"per_token_tensors\[0\].*float"),
        (_times, (), {"compact": True}, "compact=True: expected a mask"),
        (_times, (), {"mask": torch.ones(6)}, "mask: expected a bool"),
        (_times, (), {"mask": torch.ones(5, dtype=torch.bool)}, r"mask: .*\(6,\).*\(5,\)"),
        (_times, (), {"chunk_size": 0}, "chunk_size"),
        (_times, (), {"softcap": -1.0}, "softcap"),
        (_times, (), {"gradient_accumulation_fusion": True}, "main_grad"),
    ],
    ids=range(12),
)
def test_mistakes(fn, tensors, options, message):
    hidden, weight, _ = shard_problem(make_problem((6,)), False)
    with pytest.raises(ValueError, match=message):
        linear_map(hidden, weight, fn, *tensors, **options)


def test_a_changing_structure_is_refused():
    hidden, weight, _ = shard_problem(make_problem((6,)), False)
    calls = []

    def fn(z: Tensor) -> Any:
        calls.append(z)
        return z.sum(-1) if len(calls) < 2 else (z.sum(-1), z.sum(-1))

    with pytest.raises(ValueError, match="structure and dtypes that its first call gave"):
        linear_map(hidden, weight, fn, chunk_size=3)
