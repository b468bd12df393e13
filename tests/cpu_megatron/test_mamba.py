"""The Mamba kernels in torch against the recurrence, token by token; whole models under CP."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.cpu_megatron.mamba import CpuGatedNorm, partitioned_indices, split_conv1d_scan
from tests.megatron.common import (
    MAMBA,
    SEQ,
    VOCAB,
    make_batch,
    megatron,
    relative,
    tiny_config,
    zigzag,
)

HEADS, DIM, GROUPS, STATES, TAPS = 6, 5, 3, 4, 4


def token_by_token(zxbcdt, weight, bias, dt_bias, decay, skip, seq_idx):
    """The definition: one token, one head, one convolution tap at a time."""
    batch, length, _ = zxbcdt.shape
    inner = HEADS * DIM
    out = torch.zeros(batch, length, inner, dtype=zxbcdt.dtype)
    for row in range(batch):
        z, xbc, dt = zxbcdt[row].split((inner, weight.shape[0], HEADS), dim=-1)
        state = torch.zeros(HEADS, DIM, STATES, dtype=zxbcdt.dtype)
        for t in range(length):
            if t and seq_idx[row, t] != seq_idx[row, t - 1]:
                state = torch.zeros_like(state)
            conv = bias.clone()
            for tap in range(TAPS):
                at = t - (TAPS - 1 - tap)
                if at >= 0 and seq_idx[row, at] == seq_idx[row, t]:
                    conv = conv + weight[:, tap] * xbc[at]
            conv = conv * torch.sigmoid(conv)
            x, b, c = conv.split((inner, GROUPS * STATES, GROUPS * STATES))
            step = torch.log1p(torch.exp(dt[t] + dt_bias))
            ys = []
            new = []
            for head in range(HEADS):
                group = head // (HEADS // GROUPS)
                mine = x[head * DIM : (head + 1) * DIM]
                b_here = b[group * STATES : (group + 1) * STATES]
                c_here = c[group * STATES : (group + 1) * STATES]
                kept = torch.exp(step[head] * decay[head]) * state[head]
                new.append(kept + step[head] * torch.outer(mine, b_here))
                ys.append(new[-1] @ c_here + skip[head] * mine)
            state = torch.stack(new)
            out[row, t] = torch.cat(ys) * z[t] * torch.sigmoid(z[t])
    return out


@pytest.mark.parametrize("packed", [False, True])
def test_scan_is_the_recurrence(packed):
    torch.manual_seed(1)
    batch, length = (1, 11) if packed else (2, 7)
    channels = HEADS * DIM + 2 * GROUPS * STATES
    double = {"dtype": torch.float64}
    zxbcdt = torch.randn(batch, length, HEADS * DIM + channels + HEADS, **double)
    weight, bias = torch.randn(channels, TAPS, **double), torch.randn(channels, **double)
    dt_bias, skip = torch.randn(HEADS, **double), torch.randn(HEADS, **double)
    decay = -torch.rand(HEADS, **double) - 0.1
    seq_idx = torch.tensor([[0] * 4 + [1] * 2 + [2] * 5]) if packed else None
    inputs = [t.requires_grad_() for t in (zxbcdt, weight, bias, dt_bias, decay, skip)]
    got = split_conv1d_scan(*inputs, 128, headdim=DIM, ngroups=GROUPS, seq_idx=seq_idx)
    numbers = torch.zeros(batch, length) if seq_idx is None else seq_idx
    expected = token_by_token(*inputs, numbers)
    assert relative(got, expected) < 1e-12
    upstream = torch.randn_like(got)
    grads = torch.autograd.grad(got, inputs, upstream)
    for mine, theirs in zip(grads, torch.autograd.grad(expected, inputs, upstream), strict=True):
        assert relative(mine, theirs) < 1e-11


def test_scan_refuses_what_it_does_not_do():
    args = [torch.zeros(1, 2, 3), torch.zeros(1, 4), None, *[torch.zeros(1)] * 3, 128]
    with pytest.raises(ValueError, match="initial_states"):
        split_conv1d_scan(*args, headdim=1, initial_states=torch.zeros(1))
    with pytest.raises(ValueError, match="swish"):
        split_conv1d_scan(*args, headdim=1, activation="swish")


def test_gated_norm_is_by_groups():
    norm = CpuGatedNorm(12, eps=1e-5, group_size=4)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 2, 12)
    groups = x.double().view(3, 2, 3, 4)
    expected = groups / (groups.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    assert relative(norm(x), expected.view(3, 2, 12) * norm.weight) < 1e-6


@pytest.mark.parametrize("cp", [1, 2])
def test_partitioned_indices(cp):
    bounds = (0, 8, 24)
    cu = torch.tensor(bounds, dtype=torch.int32)
    for rank in range(cp):
        expected = zigzag(torch.arange(24)[None], rank, cp, bounds)[0]
        assert torch.equal(partitioned_indices(cu, 24, cp, rank), expected)


def whole_loss(layout: dict[str, int], packed: bool) -> torch.Tensor:
    with megatron(**layout) as parallel_state:
        config = tiny_config(num_layers=4, **MAMBA)
        model = mm.build_hybrid_model(config, vocab_size=VOCAB, pattern="M*M-")
        batch = make_batch(parallel_state, packed=packed)
        loss = (model(**batch["inputs"], labels=batch["labels"]) * batch["weights"]).sum()
        dist.all_reduce(loss, group=parallel_state.get_context_parallel_group())
        return loss.detach() / SEQ


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_context_parallel_mixers_agree(ranks, packed):
    one = ranks(1).run(whole_loss, {}, packed)[0]
    for two in ranks(2).run(whole_loss, {"cp": 2}, packed):
        assert relative(two, one) < 1e-6
