"""Per-token statistics from vocab-parallel logits: one pass, one collective, one gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.autograd import once_differentiable
from mcore_logprobs.checks import (
    check_flag,
    check_fraction,
    check_optional_integer,
    remembered,
)
from mcore_logprobs.collectives import all_reduce_sum
from mcore_logprobs.kernels.backend import Counting, one_launch
from mcore_logprobs.kernels.huge_pages import prefer_huge_pages
from mcore_logprobs.kernels.stats import (
    RowNorms,
    RowResults,
    TargetIds,
    gradient_coefficients,
    gradient_spec,
)
from mcore_logprobs.logits.opening import (
    CallOptions,
    LocalTarget,
    LogitsCall,
    check_inplace_backward,
    open_logits,
)
from mcore_logprobs.logits.result import TokenStats
from mcore_logprobs.logits.rows import (
    Rows,
    gather_parts,
    joined,
    shard_stats,
    sum_over_ranks,
    target_logits,
    whole_rows,
)

__all__ = [
    "TokenStats",
    "vocab_parallel_entropy",
    "vocab_parallel_logprobs",
    "vocab_parallel_target_rank",
    "vocab_parallel_token_stats",
]


@dataclass(frozen=True)
class _Options:
    call: CallOptions
    ignore_index: int | None
    label_smoothing: float
    inplace_backward: bool


class _TokenStats(torch.autograd.Function):
    """A RowResults of `[...]` tensors.

    `target` is a LocalTarget; for a backend with `OneLaunch` global ids `[...]`, or None where no
    row has a target.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: LocalTarget | Tensor | None, opts: _Options
    ) -> tuple[Any, ...]:
        rows = Rows(logits)
        if isinstance(target, LocalTarget):
            results, saved = _finished(logits, rows, target, opts)
        else:
            results, saved = _finished_in_few_launches(logits, rows, target, opts)
        ctx.opts = opts
        ctx.save_for_backward(logits, *saved)
        ctx.set_materialize_grads(False)
        results = results.map(rows.restore)
        if results.target_rank is not None:
            ctx.mark_non_differentiable(results.target_rank)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        if all(grad is None for grad in grads):
            return None, None, None
        logits, *saved = ctx.saved_tensors
        opts: _Options = ctx.opts
        rows = Rows(logits)
        upstream = RowResults(*grads).map(rows.walk)
        if opts.inplace_backward:
            grad = logits = logits.detach()
        else:
            grad = prefer_huge_pages(torch.empty_like(logits))
        write = _write_in_one_launch if one_launch(opts.call.backend) else _write
        write(logits, grad, rows, upstream, saved, opts)
        return grad, None, None


# ---- by a backend that takes chunks ------------------------------------------------------------


def _finished(
    logits: Tensor, rows: Rows, local: LocalTarget, opts: _Options
) -> tuple[RowResults, Sequence[Tensor | None]]:
    """The results, ignored rows blanked, and what `_write` needs."""
    column, keep = rows.walk(local.column), rows.walk(local.keep)
    done, _ = whole_rows(logits, column, opts.call, label_smoothing=opts.label_smoothing)
    return done.blanked(keep), (column, keep, *done.norms)


def _write(
    logits: Tensor,
    grad: Tensor,
    rows: Rows,
    upstream: RowResults,
    saved: list[Tensor],
    opts: _Options,
) -> None:
    """The gradient into grad, which may be the logits; coefficients first, in plain torch."""
    column, keep, *norms = saved
    whole = RowNorms(*norms)
    spec = gradient_spec(opts.call.spec, upstream)
    coef = gradient_coefficients(
        upstream, whole, spec, keep=keep, label_smoothing=opts.label_smoothing
    )
    temperature = rows.walk_optional(opts.call.temperature)
    for part, block, out in rows.blocks(logits, grad):
        opts.call.backend.grad_logits(
            block,
            column[part],
            whole.top[part],
            coef[:, part],
            spec,
            temperature=None if temperature is None else temperature[part],
            out=out,
            chunk_size=opts.call.chunk_size,
        )


# ---- by a backend with `OneLaunch` -------------------------------------------------------------


def _finished_in_few_launches(
    logits: Tensor, rows: Rows, target: Tensor | None, opts: _Options
) -> tuple[RowResults, Sequence[Tensor | None]]:
    """As `_finished`, of global ids: a kernel for the statistics, one for what comes after them.

    Under TP one more merges each shard's parts, and with the rank one finds the targets' logits;
    so too under invariant_segments.
    """
    call, shard = opts.call, opts.call.shard
    native = one_launch(call.backend)
    assert native is not None
    ids = TargetIds(shard.start, shard.vocab_size, opts.ignore_index)
    target, temperature = rows.walk_optional(target), rows.walk_optional(call.temperature)
    blocks = list(rows.blocks(logits))
    if shard.tp_size == 1 and call.segments is None and len(blocks) == 1:
        results, norms, column = native.finished_stats(
            blocks[0][1], target, ids, call.spec, opts.label_smoothing, temperature=temperature
        )
        return results, (column, norms)
    if call.spec.rank and (shard.tp_size > 1 or call.segments is not None):
        # Every part counts against the target's logit, wherever that is: it comes first.
        assert target is not None
        found = [native.own_logits(block, target[part], ids) for part, block in blocks]
        column, own = (joined(list(each)) for each in zip(*found, strict=True))
        stats = shard_stats(logits, column, call, threshold=sum_over_ranks(own, call.group))
    else:
        located = [
            native.located_stats(
                block,
                None if target is None else target[part],
                ids,
                call.spec,
                call.segments,
                temperature=None if temperature is None else temperature[part],
            )
            for part, block in blocks
        ]
        stats = joined([stats for stats, _ in located])
        columns = [column for _, column in located if column is not None]
        column = joined(columns) if columns else None
    parts = gather_parts(stats, call.group)
    results, norms = native.finish_rows(parts, column, call.spec, opts.label_smoothing)
    return results, (column, norms)


def _write_in_one_launch(
    logits: Tensor,
    grad: Tensor,
    rows: Rows,
    upstream: RowResults,
    saved: list[Tensor],
    opts: _Options,
) -> None:
    """As `_write`, the kernel finding each row's coefficients itself."""
    native = one_launch(opts.call.backend)
    assert native is not None
    column, norms = saved
    temperature = rows.walk_optional(opts.call.temperature)
    for part, block, out in rows.blocks(logits, grad):

        def own(x: Tensor, part: slice = part) -> Tensor:
            return x if part.stop - part.start == rows.count else x[..., part]

        native.results_grad(
            block,
            None if column is None else own(column),
            upstream.map(own),
            own(norms),
            opts.call.spec,
            opts.label_smoothing,
            temperature=None if temperature is None else own(temperature),
            out=out,
        )


def _opened(call: LogitsCall, target: Tensor, ignore_index: int | None) -> LocalTarget | Tensor:
    """Checked targets, as `_TokenStats` takes them."""
    if one_launch(call.options.backend) is None:
        return call.local_target(target, ignore_index)
    return call.global_target(target, ignore_index)


def _no_target(call: LogitsCall) -> LocalTarget | None:
    if one_launch(call.options.backend) is not None:
        return None
    lead, device = call.logits.shape[:-1], call.logits.device
    return LocalTarget(
        column=torch.full(lead, -1, dtype=torch.int64, device=device),
        keep=torch.ones(lead, dtype=torch.bool, device=device),
    )


def _token_stats(
    call: LogitsCall,
    target: LocalTarget | Tensor | None,
    ignore_index: int | None,
    *,
    inplace_backward: bool,
    label_smoothing: float = 0.0,
) -> TokenStats:
    if inplace_backward:
        check_inplace_backward(call.logits)
    opts = _Options(call.options, ignore_index, label_smoothing, inplace_backward)
    return TokenStats(*_TokenStats.apply(call.logits, target, opts))


@remembered
def _check_settings(
    entropy: bool,
    target_rank: bool,
    sum_pi_squared: bool,
    label_smoothing: float,
    inplace_backward: bool,
    ignore_index: int | None,
) -> None:
    check_flag("entropy", entropy)
    check_flag("target_rank", target_rank)
    check_flag("sum_pi_squared", sum_pi_squared)
    check_fraction("label_smoothing", label_smoothing)
    check_flag("inplace_backward", inplace_backward)
    check_optional_integer("ignore_index", ignore_index)


def vocab_parallel_token_stats(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    entropy: bool = False,
    target_rank: bool = False,
    sum_pi_squared: bool = False,
    tp_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
    inplace_backward: bool = False,
    invariant_segments: int | None = None,
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
        sum_pi_squared: also the sum of the squared probabilities.
        tp_group: ranks that share the vocabulary. None: Megatron's group, or one process; see
            `mcore_logprobs.groups`.
        temperature: logits are divided by it: a number, or a tensor without gradient that
            broadcasts to target's shape, a temperature a token.
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
        invariant_segments: g: values and the logits' gradient are the same bits for every TP size
            that divides g, every chunk_size and whatever other rows are in the call, on one kind of
            machine, with one backend, dtype and number of threads. V must be divisible by g.
            "auto" then chooses by device, dtype and V / g alone. None: no such promise.

    Collectives: forward one all-gather of `[k, n]` float32 over TP (k is 3, and one more for each
    of entropy, sum_pi_squared and rank, two for label smoothing); with the rank, one all-reduce of
    `[n]` more. Backward none. None at all on one rank. With invariant_segments the all-gather is
    of `[g/TP, k, n]`.

    Memory: backward keeps the logits themselves and a few float32 numbers a row; the gradient, in
    the logits' dtype, is the only `[..., V/TP]` tensor made.

    Raises:
        ValueError: before any collective, for shapes, dtypes, option ranges, an unresolvable group,
            and on CPU targets outside [0, vocab_size) (on CUDA a device-side assert).
        RuntimeError: with invariant_segments, where the backend's kernels do not compile.
    """
    _check_settings(
        entropy, target_rank, sum_pi_squared, label_smoothing, inplace_backward, ignore_index
    )
    call = open_logits(
        vocab_parallel_logits,
        tp_group=tp_group,
        vocab_size=vocab_size,
        backend=backend,
        chunk_size=chunk_size,
        temperature=temperature,
        softcap=softcap,
        entropy=entropy,
        rank=target_rank,
        smoothing=label_smoothing > 0.0,
        sum_pi_squared=sum_pi_squared,
        invariant_segments=invariant_segments,
    )
    return _token_stats(
        call,
        _opened(call, target, ignore_index),
        ignore_index,
        label_smoothing=label_smoothing,
        inplace_backward=inplace_backward,
    )


def vocab_parallel_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
    inplace_backward: bool = False,
    invariant_segments: int | None = None,
) -> Tensor:
    """log p[target] in nats, differentiable; minus Megatron's `vocab_parallel_cross_entropy`.

    Shape:
        vocab_parallel_logits `[..., V/TP]`, target `[...]` of global ids -> float32 `[...]`.

    Collectives: one all-gather of `[3, n]` float32 over TP forward, none backward.

    Keywords, memory and errors are `vocab_parallel_token_stats`'s.
    """
    return vocab_parallel_token_stats(
        vocab_parallel_logits,
        target,
        tp_group=tp_group,
        temperature=temperature,
        vocab_size=vocab_size,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        chunk_size=chunk_size,
        backend=backend,
        inplace_backward=inplace_backward,
        invariant_segments=invariant_segments,
    ).logprobs


def vocab_parallel_entropy(
    vocab_parallel_logits: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
    inplace_backward: bool = False,
    invariant_segments: int | None = None,
) -> Tensor:
    """-sum p log p over the whole vocabulary, in nats, differentiable.

    Shape:
        vocab_parallel_logits `[..., V/TP]` -> float32 `[...]`.

    Collectives: one all-gather of `[4, n]` float32 over TP forward, none backward.

    Keywords, memory and errors are `vocab_parallel_token_stats`'s.
    """
    check_flag("inplace_backward", inplace_backward)
    call = open_logits(
        vocab_parallel_logits,
        tp_group=tp_group,
        vocab_size=vocab_size,
        backend=backend,
        chunk_size=chunk_size,
        temperature=temperature,
        softcap=softcap,
        entropy=True,
        invariant_segments=invariant_segments,
    )
    found = _token_stats(call, _no_target(call), None, inplace_backward=inplace_backward).entropy
    assert found is not None
    return found


@torch.no_grad()
def vocab_parallel_target_rank(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    ignore_index: int | None = -100,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """How many columns have a larger logit than the target's: 0 is the argmax.

    Shape:
        vocab_parallel_logits `[..., V/TP]`, target `[...]` of global ids -> int64 `[...]`; -1 where
        the target is ignore_index, or its logit is NaN. Ties count as not higher.

    Collectives: two all-reduces of `[n]` over TP; with Triton's kernels the second is an all-gather
    of `[4, n]`. The logits are read once.

    Keywords and errors are `vocab_parallel_token_stats`'s; a temperature cannot change a rank.
    """
    check_optional_integer("ignore_index", ignore_index)
    call = open_logits(
        vocab_parallel_logits,
        tp_group=tp_group,
        vocab_size=vocab_size,
        backend=backend,
        chunk_size=chunk_size,
        temperature=temperature,
        rank=True,
    )
    opts = call.options
    if one_launch(opts.backend) is not None:
        opened = _opened(call, target, ignore_index)
        ranks = _token_stats(call, opened, ignore_index, inplace_backward=False).target_rank
        assert ranks is not None
        return ranks
    local = call.local_target(target, ignore_index)
    rows = Rows(call.logits)
    column = rows.walk(local.column)
    blocks = list(rows.blocks(call.logits))
    threshold = target_logits(blocks, column, opts.group)
    counting = cast(Counting, opts.backend)
    counts = torch.cat(
        [
            counting.count_higher(
                block,
                column[part],
                threshold[part],
                valid=opts.spec.valid,
                chunk_size=opts.chunk_size,
            )
            for part, block in blocks
        ]
    )
    total = all_reduce_sum(counts, opts.group).masked_fill(threshold.isnan(), -1)
    return torch.where(local.keep, rows.restore(total), -1)
