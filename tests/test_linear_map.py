"""linear_map: any operation on logits from hidden states, against the same on the whole head."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import megatron.core  # noqa: F401  (the ranks' fork server imports it once for all of them)
import pytest
import torch
from torch import Tensor

from mcore_logprobs import linear_map, vocab_parallel_topk
from tests.helpers.heads import make_problem, shard_problem


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
    ],
    ids=range(5),
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
