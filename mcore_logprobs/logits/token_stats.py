"""Per-token statistics from vocab-parallel logits: one pass, one collective, one gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import check_flag, check_fraction, check_optional_positive
from mcore_logprobs.collectives import all_gather_stack, all_reduce_sum
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels.huge_pages import prefer_huge_pages
from mcore_logprobs.kernels.reference import gather_target
from mcore_logprobs.kernels.stats import (
    FinishedStats,
    RowSpec,
    accumulator_dtype,
    finish,
    merge,
    smoothing_weights,
)
from mcore_logprobs.logits.inplace import check_inplace_backward
from mcore_logprobs.logits.inputs import (
    LocalTarget,
    check_target,
    localize_target,
    open_logits,
)
from mcore_logprobs.logits.rows import Rows

__all__ = [
    "TokenStats",
    "blank_ignored",
    "gradient_coefficients",
    "target_logits",
    "vocab_parallel_token_stats",
]


@dataclass
class TokenStats:
    """What is known of each token. Every tensor has the target's shape `[...]`.

    Attributes:
        logprobs: float32, log p[target] in nats; 0 where the target is ignore_index. With label
            smoothing, minus the smoothed cross entropy. Differentiable.
        entropy: float32, -sum p log p in nats, or None if not asked for; 0 where ignored.
            Differentiable.
        target_rank: int64, how many columns have a larger logit than the target's (0: the target
            is the argmax; ties count as not higher), or None; -1 where ignored.
        lse: float32, log-sum-exp of the finished logits; 0 where ignored. Differentiable, so that a
            z-loss costs no second pass.

    Tensors are float64 where the logits are.
    """

    logprobs: Tensor
    entropy: Tensor | None
    target_rank: Tensor | None
    lse: Tensor

    @property
    def loss(self) -> Tensor:
        """Cross entropy for each token, `-logprobs`."""
        return -self.logprobs


@dataclass(frozen=True)
class _Options:
    shard: VocabShard
    spec: RowSpec
    label_smoothing: float
    ignore_index: int | None
    chunk_size: int
    backend: backends.Backend
    inplace_backward: bool


class _TokenStats(torch.autograd.Function):
    """(logprobs, entropy or None, rank or None, lse), each `[...]`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, local: LocalTarget, opts: _Options) -> Any:
        rows = Rows(logits)
        column, keep = rows.flat(local.column), rows.flat(local.keep)
        done = shard_stats(rows, logits, column, opts)
        ctx.opts = opts
        ctx.save_for_backward(
            logits, column, keep, done.top, done.log_sum, done.entropy, done.finite
        )
        ctx.set_materialize_grads(False)
        outputs = [None if x is None else rows.unflat(x) for x in blank_ignored(done, keep)]
        if outputs[2] is not None:
            ctx.mark_non_differentiable(outputs[2])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        on_logprobs, on_entropy, _, on_lse = grads
        if on_logprobs is None and on_entropy is None and on_lse is None:
            return None, None, None
        logits, column, keep, top, log_sum, entropy, finite = ctx.saved_tensors
        opts: _Options = ctx.opts
        rows = Rows(logits)
        coef = gradient_coefficients(
            *(None if g is None else rows.flat(g) for g in (on_logprobs, on_entropy, on_lse)),
            keep=keep,
            log_sum=log_sum,
            entropy=entropy,
            finite=finite,
            smoothing=opts.label_smoothing,
        )
        spec = replace(
            opts.spec, entropy=on_entropy is not None, smoothing=opts.label_smoothing > 0.0
        )
        logits = logits.detach()
        grad = logits
        if not opts.inplace_backward:
            grad = prefer_huge_pages(torch.empty_like(logits))
        for part, block, out in rows.blocks(logits, grad):
            opts.backend.grad_logits(
                block,
                column[part],
                top[part],
                coef[:, part],
                spec,
                out=out,
                chunk_size=opts.chunk_size,
            )
        return grad, None, None


def shard_stats(rows: Rows, logits: Tensor, column: Tensor, opts: _Options) -> FinishedStats:
    """This rank's pass over its columns and the merge over ranks; `[n]` tensors.

    One all-gather of `[k, n]`; with the rank, one all-reduce of `[n]` before it, so that the ranks
    count against the target's logit in the same read.
    """
    blocks = list(rows.blocks(logits))
    threshold = target_logits(blocks, column, opts.shard) if opts.spec.rank else None
    stats = torch.cat(
        [
            opts.backend.row_stats(
                block,
                column[part],
                opts.spec,
                threshold=None if threshold is None else threshold[part],
                chunk_size=opts.chunk_size,
            )
            for part, block in blocks
        ],
        dim=1,
    )
    merged = merge(all_gather_stack(stats, opts.shard.group), opts.spec)
    return finish(merged, opts.spec, opts.label_smoothing)


def blank_ignored(
    done: FinishedStats, keep: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """(logprobs, entropy or None, rank or None, lse) with ignored rows as the contract has them."""
    return (
        torch.where(keep, done.logprobs, 0.0),
        None if done.entropy is None else torch.where(keep, done.entropy, 0.0),
        None if done.higher is None else torch.where(keep, done.higher.long(), -1),
        torch.where(keep, done.lse, 0.0),
    )


def target_logits(blocks: list[tuple[slice, Tensor]], column: Tensor, shard: VocabShard) -> Tensor:
    """Each row's raw target logit on every rank, `[n]` float32; one all-reduce over TP."""
    dtype = accumulator_dtype(blocks[0][1].dtype)
    own = torch.cat([gather_target(block, column[part], 0.0) for part, block in blocks])
    return all_reduce_sum(own.to(dtype), shard.group)


def gradient_coefficients(
    on_logprobs: Tensor | None,
    on_entropy: Tensor | None,
    on_lse: Tensor | None,
    *,
    keep: Tensor,
    log_sum: Tensor,
    entropy: Tensor | None,
    finite: Tensor | None,
    smoothing: float,
) -> Tensor:
    """Upstream gradients to the four coefficients of `kernels.reference.grad_logits`.

    With g, h, l upstream of logprob, entropy and lse, and q the target distribution,

        dz = g (q - p) - h p (log p + H) + l p

    so that with log p in place of z - shift, a = l - g - h H and b = -h; without label smoothing
    c = g, d = 0. The kernels' shift is the row's maximum m, so that a and b are scaled to match:
    log p = (z - m) - log s.

    Args:
        on_logprobs, on_entropy, on_lse: `[n]` or None for zero.
        keep: `[n]` bool; other rows get coefficients 0, and with them exactly no gradient.
        log_sum, entropy, finite: `[n]`, what the forward found.

    Returns:
        `[4, n]` in log_sum's dtype.
    """
    coef = log_sum.new_zeros(4, log_sum.shape[0])
    if on_lse is not None:
        coef[0] += on_lse
    if on_logprobs is not None:
        coef[0] -= on_logprobs
        coef[2] += on_logprobs
    if on_entropy is not None:
        assert entropy is not None
        coef[0] -= on_entropy * entropy
        coef[1] -= on_entropy
    if smoothing > 0.0 and on_logprobs is not None:
        assert finite is not None
        target_weight, other_weight = smoothing_weights(smoothing, finite)
        coef[2] *= target_weight
        coef[3] = on_logprobs * other_weight
    coef[0] -= coef[1] * log_sum
    coef[:2] *= log_sum.neg().exp()
    return coef.masked_fill_(~keep, 0.0)


def vocab_parallel_token_stats(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    entropy: bool = False,
    target_rank: bool = False,
    tp_group: ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
    inplace_backward: bool = False,
) -> TokenStats:
    """Log-probability of each target and, if asked for, entropy and rank, in one pass.

    Shape:
        vocab_parallel_logits: `[..., V/TP]`, float16, bfloat16, float32 or float64; this rank's
            columns `[r*V/TP, (r+1)*V/TP)`, or a DTensor `[..., V]` sharded on its last dimension.
            Any strides of the leading dimensions. Not modified.
        target: `[...]`, integers, global ids or ignore_index; the same on every TP rank.
        Returns TokenStats of `[...]` tensors, the same on every TP rank.

    Args:
        entropy: also the entropy of the whole distribution.
        target_rank: also the target's rank.
        tp_group: ranks that share the vocabulary. None: Megatron's group, or one process; see
            `mcore_logprobs.groups`.
        temperature: logits are divided by it.
        vocab_size: true vocabulary; columns at or past it count as -inf. None: all V.
        ignore_index: a target that asks for nothing: logprob 0, entropy 0, rank -1, lse 0, no
            gradient, whatever its logits hold. None: no such target.
        label_smoothing: a in [0, 1): the target distribution has 1 - a on the target and
            a / (K - 1) on each of the K - 1 others (Megatron's convention, over the whole true
            vocabulary).
        softcap: z = softcap * tanh(logits / softcap) first, as Gemma does.
        chunk_size: rows at a time for backends that chunk; None: from a memory budget.
        backend: "auto", "torch", "triton" (CUDA) or "inductor" (CPU; compiles at its first use);
            see `mcore_logprobs.kernels.backend`.
        inplace_backward: write the gradient over the logits. Saves the only large tensor made; the
            logits must not be used after the backward.

    Collectives: forward one all-gather of `[k, n]` float32 over TP (k is 3, 4 with entropy); with
    the rank, one all-reduce of `[n]` more. Backward none. None at all on one rank.

    Memory: backward keeps the logits themselves and a few float32 numbers a row; the gradient, in
    the logits' dtype, is the only `[..., V/TP]` tensor made.

    Raises:
        ValueError: before any collective, for shapes, dtypes, option ranges, an unresolvable group,
            and on CPU targets outside [0, vocab_size) (on CUDA a device-side assert).
    """
    opened = open_logits(
        vocab_parallel_logits,
        tp_group=tp_group,
        vocab_size=vocab_size,
        backend=backend,
        chunk_size=chunk_size,
        temperature=temperature,
    )
    logits = opened.logits
    check_flag("entropy", entropy)
    check_flag("target_rank", target_rank)
    check_fraction("label_smoothing", label_smoothing)
    check_optional_positive("softcap", softcap)
    target = check_target(target, logits.shape[:-1], logits.device)
    local = localize_target(target, opened.shard, ignore_index)
    if inplace_backward:
        check_inplace_backward(logits)
    spec = RowSpec(
        valid=opened.shard.valid_width,
        softcap=softcap,
        temperature=temperature,
        entropy=entropy,
        rank=target_rank,
        smoothing=label_smoothing > 0.0,
    )
    opts = _Options(
        shard=opened.shard,
        spec=spec,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        chunk_size=chunk_size or backends.default_chunk_size(logits.shape[-1], logits.device),
        backend=backends.select(backend, logits),
        inplace_backward=inplace_backward,
    )
    return TokenStats(*_TokenStats.apply(logits, local, opts))
