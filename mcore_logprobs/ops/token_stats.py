"""Per-token statistics: log-probability, entropy, rank; one pass, one collective, one gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from mcore_logprobs.checks import check_flag, check_target, global_to_local
from mcore_logprobs.kernels.stats import RowResults, StatsSpec
from mcore_logprobs.ops.answers import Also, answers
from mcore_logprobs.ops.driver import apply
from mcore_logprobs.ops.joint_statistics import joint_statistics
from mcore_logprobs.ops.keywords import (
    HeadKeywords,
    LogitsKeywords,
    StatisticsKeywords,
    shared_keywords,
)
from mcore_logprobs.ops.result import TokenStats
from mcore_logprobs.ops.row_statistics import Statistics
from mcore_logprobs.sources.given import given_logits
from mcore_logprobs.sources.head import head_logits
from mcore_logprobs.sources.source import Source


def token_stats(
    source: Source,
    target: Tensor,
    operation: Statistics,
    ignore_index: int | None,
    also: Also | None = None,
) -> TokenStats:
    """`vocab_parallel_token_stats` of any source."""
    target = check_target(target, source.batch_shape, source.device)
    local_target, valid_mask = global_to_local(target, source.shard, ignore_index)
    if also is not None:
        return answers(source, local_target, valid_mask, operation, also, ignore_index)
    source = source.compacted(valid_mask)
    latest = source.latest_pass
    if latest is None or operation.label_smoothing > 0.0:
        results = RowResults(*apply(operation, source, local_target, valid_mask))
    else:
        results = joint_statistics(latest, operation.spec, source, local_target).masked(valid_mask)
    return TokenStats(**results._asdict())


@shared_keywords(StatisticsKeywords, given_logits)
def vocab_parallel_token_stats(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    entropy: bool = False,
    target_rank: bool = False,
    sum_pi_squared: bool = False,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    candidate_ids: Tensor | None = None,
    topk: int | None = None,
    log_softmax: bool = True,
    **shared: Unpack[StatisticsKeywords],
) -> TokenStats:
    """Return each target's log-probability and, on request, its rank and the entropy, in one pass.

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
        ignore_index: a target with this value gives logprob 0, entropy 0, rank -1, lse 0 and no
            gradient, also if its logits are NaN. None: no such target.
        label_smoothing: a in [0, 1): the target distribution has 1 - a on the target and
            a / (K - 1) on each of the K - 1 others (Megatron's convention, over the whole true
            vocabulary). Columns of -inf, such as disallowed ids, are not among the K.
        candidate_ids: also `candidates` `[..., k]`, differentiable: the values at ids `[k]`, which
            are the same for every token, or at `[..., k]`. They cost no further pass and no further
            collective. 0 where an id or the target is ignore_index. Where that is a true id, an id
            of -100 is left out instead.
        topk: also `topk`, (values, ids) `[..., topk]` each, as `vocab_parallel_topk` orders them;
            values are differentiable. One more all-gather, of min(topk, V/TP) pairs per row.
        log_softmax: candidates and the top values are log-probabilities; False: logits over the
            temperature.
        {shared}

    Collectives: forward one all-gather of `[k, n]` float32 over TP. k is 3, plus one for each of
    entropy, sum_pi_squared and rank, two for label smoothing and one per candidate. The rank adds
    one all-reduce of `[n]`. Backward none. On one rank there is none at all. With
    invariant_segments the all-gather is of `[g/TP, k, n]`.

    Memory: backward keeps the logits themselves and a few float32 numbers per row; the gradient, in
    the logits' dtype, is the only `[..., V/TP]` tensor made.

    Raises:
        ValueError: before any collective, for shapes, dtypes, option ranges, an unresolvable group,
            and on CPU targets outside [0, vocab_size) (on CUDA a device-side assert).
        RuntimeError: with invariant_segments, where the backend's kernels do not compile.
    """
    source = given_logits(vocab_parallel_logits, **shared)
    statistics = Statistics.of(
        entropy=entropy,
        target_rank=target_rank,
        sum_pi_squared=sum_pi_squared,
        label_smoothing=label_smoothing,
    )
    check_flag("log_softmax", log_softmax)
    asks = candidate_ids is not None or topk is not None
    also = Also(candidate_ids, topk, log_softmax, "candidate_ids") if asks else None
    return token_stats(source, target, statistics, ignore_index, also)


@shared_keywords(StatisticsKeywords, given_logits)
def vocab_parallel_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    **shared: Unpack[StatisticsKeywords],
) -> Tensor:
    """Return log p[target] in nats: minus Megatron's `vocab_parallel_cross_entropy`.

    Differentiable.

    Shape:
        vocab_parallel_logits `[..., V/TP]`, target `[...]` of global ids -> float32 `[...]`,
        float64 of float64 logits.

    Collectives: one all-gather of `[3, n]` float32 over TP forward, none backward.

    Keywords, memory and errors are those of `vocab_parallel_token_stats`.
    """
    source = given_logits(vocab_parallel_logits, **shared)
    statistics = Statistics.of(label_smoothing=label_smoothing)
    return token_stats(source, target, statistics, ignore_index).logprobs


@shared_keywords(StatisticsKeywords, given_logits)
def vocab_parallel_entropy(
    vocab_parallel_logits: Tensor, **shared: Unpack[StatisticsKeywords]
) -> Tensor:
    """Return the entropy, -sum p log p over the whole vocabulary, in nats; differentiable.

    Shape:
        vocab_parallel_logits `[..., V/TP]` -> float32 `[...]`, float64 of float64 logits.

    Collectives: one all-gather of `[4, n]` float32 over TP forward, none backward.

    Keywords, memory and errors are those of `vocab_parallel_token_stats`.
    """
    source = given_logits(vocab_parallel_logits, **shared)
    operation, latest = Statistics(StatsSpec(entropy=True)), source.latest_pass
    if latest is not None:
        results = joint_statistics(latest, operation.spec, source, None)
    else:
        local_target = torch.full(source.batch_shape, -1, dtype=torch.int64, device=source.device)
        valid_mask = torch.ones_like(local_target, dtype=torch.bool)
        results = RowResults(*apply(operation, source, local_target, valid_mask))
    entropy = results.entropy
    assert entropy is not None
    return entropy


@torch.no_grad()
@shared_keywords(LogitsKeywords, given_logits)
def vocab_parallel_target_rank(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int | None = -100,
    **shared: Unpack[LogitsKeywords],
) -> Tensor:
    """Return how many columns have a larger logit than the target's: 0 is the argmax.

    Shape:
        vocab_parallel_logits `[..., V/TP]`, target `[...]` of global ids -> int64 `[...]`; -1 where
        the target is ignore_index, or its logit is NaN. A tie does not count as larger, also if
        only the softcap makes it one.

    Collectives: one all-reduce of `[n]` over TP and one all-gather of `[4, n]`. The logits are read
    once.

    Keywords and errors are those of `vocab_parallel_token_stats`. The temperature does not
    change a rank.
    """
    source = given_logits(vocab_parallel_logits, **shared)
    ranks = token_stats(source, target, Statistics.of(target_rank=True), ignore_index).target_rank
    assert ranks is not None
    return ranks


@shared_keywords(HeadKeywords, head_logits)
def linear_token_stats(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    entropy: bool = False,
    target_rank: bool = False,
    sum_pi_squared: bool = False,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    candidate_ids: Tensor | None = None,
    topk: int | None = None,
    log_softmax: bool = True,
    invariant_segments: int | None = None,
    **shared: Unpack[HeadKeywords],
) -> TokenStats:
    """Return log-probabilities, entropy and rank from hidden states, without holding the logits.

    The logits are `hidden @ weight^T` plus a LoRA's part. Then, in this order: times logit_scale,
    the softcap, plus bias, plus logit_bias, divided by the temperature, masked past vocab_size.

    Shape:
        hidden: `[s, b, h]` (`[s/TP, b, h]` under sequence parallelism) or `[n, h]` (`[n/TP, h]`);
            float16, bfloat16, float32 or float64. The same on every TP rank without sequence
            parallelism.
        weight: `[V/TP, h]`, this rank's rows of the output layer, in hidden's dtype, which both
            keep under autocast; there it may be another, and both are rounded to the narrower one
            (float64 goes with float64).
        target: `[s, b]` or `[n]`, integers, global ids or ignore_index; the whole sequence on every
            TP rank also under sequence parallelism. `[m]` with rows.
        Returns TokenStats of `[s, b]` or `[n]` (`[m]`) tensors, the same on every TP rank.

    Args:
        entropy, target_rank, sum_pi_squared, ignore_index, label_smoothing: as in
            `vocab_parallel_token_stats`. The target's logit for the rank comes from a dot product:
            a column that differs from it by less than rounding may count as larger or not.
        candidate_ids, topk, log_softmax: as in `vocab_parallel_token_stats`, from the same GEMMs;
            with topk a tile of rows spans all of a rank's columns, as in `linear_topk`.
        invariant_segments: g: values are bitwise identical for every TP size that divides g, for
            every chunk_size, and with any other rows in the call. The gradients of weight, bias and
            hidden are so at every such TP size, for the same rows in the same order and the same
            chunk_size (under sequence parallelism: with one tile). Each rank then sends g/TP times
            what a reduce-scatter of dHidden does, and keeps g/TP float32 copies of a tile of it.
        {shared}

    saved_bytes is what this rank may hold from the forward to the end of the backward. Chunks of
    logits are kept in the order in which they are computed, while they fit. All results are bitwise
    identical with any saved_bytes. The gradients depend on what is kept:

    - Logits no wider than the operands (float32 and float64 heads, or logits_dtype of 16 bits) are
      kept as they are. The gradients are the same as without saved_bytes.
    - float32 logits of bfloat16 or float16 operands are kept in 16 bits per logit, and 8 bytes per
      row. A probability in the gradient is then off by at most 2^-11 of itself (rounding dLogits to
      bfloat16: 2^-9), and by float32's rounding of the logit, which is as much for |logit| /
      temperature near 8,000. With a softcap, a bias (logit_bias and disallowed_ids are one),
      invariant_segments, candidate_ids or topk they are computed again.

    Other operations keep only the first kind, because their gradients need exact logits:
    divergences, filters, `linear_gather` with log_softmax and `linear_map`. `linear_policy_loss`
    has three GEMMs without it, and keeps nothing. Hidden states that are gathered under sequence
    parallelism are gathered again. If nothing is kept, one log line says why.

    With logits_dtype=torch.bfloat16 every GEMM of a bfloat16 head is a bfloat16 one, on a CPU with
    instructions for them. Each chunk's part of a gradient is then rounded once before it is added
    in float32.

    chunk_size is rows per tile; None: 2048 on a CPU and 8192 on a GPU. A tile is computed in blocks
    of columns, whose chunk of logits takes at most 32 MiB on a CPU and 256 MiB on a GPU. With one
    tile, each block of dWeight is one GEMM. Every further tile reads and writes dWeight in float32
    once more.

    Gradients: of hidden, weight, bias and a LoRA, each in its own dtype, accumulated in float32.
    An input that does not require a gradient costs no GEMM for it. dHidden and the gradient of a
    LoRA's A are summed over TP: every rank gets the sum. The gradient of B is of this rank's rows.

    Collectives: forward one all-gather of `[k, n]` float32 over TP; target_rank adds one all-reduce
    of `[rows]` per tile (`[2, rows]` with a bias). Backward one all-reduce of dHidden per tile, in
    float32, while the next tile is computed. Sequence parallelism makes it a reduce-scatter, and
    gathers each tile of hidden, forward and backward, while the tile before it is computed. If a
    LoRA's A requires a gradient, the backward ends in one all-reduce of `[r, h]` float32. With
    invariant_segments dHidden is sent by an all-to-all per tile, and without sequence parallelism
    one all-gather.

    Memory: a chunk of logits and, where operands are bfloat16, its gradient; the gradients; for a
    bfloat16 weight without main_grad and more than one tile, dWeight in float32. Saved for
    backward: the inputs, a few numbers per row, and up to saved_bytes of logits.

    Raises:
        ValueError: before any collective; see `vocab_parallel_token_stats`.
    """
    source = head_logits(
        hidden, weight, invariant_segments=invariant_segments, may_round=True, **shared
    )
    statistics = Statistics.of(
        entropy=entropy,
        target_rank=target_rank,
        sum_pi_squared=sum_pi_squared,
        label_smoothing=label_smoothing,
    )
    check_flag("log_softmax", log_softmax)
    asks = candidate_ids is not None or topk is not None
    also = Also(candidate_ids, topk, log_softmax, "candidate_ids") if asks else None
    return token_stats(source, target, statistics, ignore_index, also)
