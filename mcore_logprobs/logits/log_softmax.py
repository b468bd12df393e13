"""The whole log-softmax, vocabulary shard by vocabulary shard."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.autograd import once_differentiable
from mcore_logprobs.collectives import all_reduce_sum
from mcore_logprobs.kernels.reference import finished_logits, to_raw_gradient
from mcore_logprobs.kernels.stats import accumulator_dtype
from mcore_logprobs.logits.opening import CallOptions, open_logits
from mcore_logprobs.logits.rows import Rows, whole_rows

__all__ = ["vocab_parallel_log_softmax"]


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, opts: CallOptions) -> Tensor:
        rows, valid = Rows(logits), opts.spec.valid
        no_target = torch.full((rows.count,), -1, dtype=torch.int64, device=logits.device)
        norms = whole_rows(logits, no_target, opts)[0].norms
        temperature = rows.walk_optional(opts.temperature)
        result = torch.empty_like(logits, dtype=accumulator_dtype(logits.dtype))
        for part, block, out in rows.chunks(opts.chunk_size, logits, result):
            own = None if temperature is None else temperature[part, None]
            z = finished_logits(block[:, :valid], opts.spec, temperature=own)
            # Not z - lse: the difference of large numbers is taken exactly.
            torch.sub(z, norms.top[part].unsqueeze(-1), out=out[:, :valid])
            out[:, :valid] -= norms.log_sum[part].unsqueeze(-1)
            out[:, valid:] = -torch.inf
        ctx.opts = opts
        ctx.save_for_backward(logits, norms.top, norms.log_sum)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, top, log_sum = ctx.saved_tensors
        opts: CallOptions = ctx.opts
        rows, valid = Rows(logits), opts.spec.valid
        total = log_sum.new_empty(rows.count)
        asked = torch.empty_like(total, dtype=torch.bool)
        for part, wanted in rows.chunks(opts.chunk_size, grads[0][..., :valid]):
            total[part], asked[part] = wanted.sum(-1), (wanted != 0).any(-1)
        total = all_reduce_sum(total, opts.group)
        asked |= total != 0
        total = total * log_sum.neg().exp()  # p = exp(z - top) / s
        temperature = rows.walk_optional(opts.temperature)
        grad = torch.empty_like(logits)
        for part, block, wanted, out in rows.chunks(opts.chunk_size, logits, grads[0], grad):
            own = None if temperature is None else temperature[part]
            z = finished_logits(
                block[:, :valid], opts.spec, temperature=None if own is None else own.unsqueeze(-1)
            )
            p = z - top[part].unsqueeze(-1)
            p.exp_().mul_(total[part].unsqueeze(-1))
            dz = torch.sub(wanted[:, :valid], p, out=p)
            to_raw_gradient(dz, block[:, :valid], opts.spec, own)
            # A row that asks for nothing gets exactly 0, whatever its logits hold.
            out[:, :valid] = dz.masked_fill_(~asked[part].unsqueeze(-1), 0.0)
            out[:, valid:] = 0
        return grad, None


def vocab_parallel_log_softmax(
    vocab_parallel_logits: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """log p of every column of this rank's shard, differentiable.

    Prefer `vocab_parallel_token_stats` or `vocab_parallel_gather` where a few columns do: this one
    makes a float32 tensor of the logits' size, because that is what is asked for.

    Shape:
        vocab_parallel_logits `[..., V/TP]` -> float32 `[..., V/TP]`, normalised over all V columns;
        -inf at columns at or past vocab_size.

    Collectives: forward one all-gather of `[3, n]` float32 over TP, backward one all-reduce of
    `[n]` (the upstream gradient's sum over the whole vocabulary).

    Keywords and errors are `vocab_parallel_token_stats`'s.
    """
    call = open_logits(
        vocab_parallel_logits,
        tp_group=tp_group,
        vocab_size=vocab_size,
        backend=backend,
        chunk_size=chunk_size,
        temperature=temperature,
    )
    return _LogSoftmax.apply(call.logits, call.options)
