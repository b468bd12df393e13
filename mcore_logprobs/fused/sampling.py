"""Log-probabilities under what the sampler sampled from, from hidden states."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.fused.entries import entry_logits, ragged_entries
from mcore_logprobs.fused.head import HeadOptions, open_head
from mcore_logprobs.fused.map import linear_map
from mcore_logprobs.fused.token_stats import linear_token_stats
from mcore_logprobs.fused.tokens import HiddenTiles, Tokens, open_tokens, whole_lead
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.logits.opening import check_target, localize_target, open_temperature
from mcore_logprobs.logits.sampling import (
    Filters,
    KeptIds,
    open_kept_ids,
    vocab_parallel_sampling_logprobs,
)

__all__ = ["linear_sampling_logprobs"]


def linear_sampling_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    top_k: int | None = None,
    top_p: float = 1.0,
    kept_ids: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    sequence_parallel: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    compact: bool = False,
    gradient_accumulation_fusion: bool = False,
    tp_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    ignore_index: int | None = -100,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """`vocab_parallel_sampling_logprobs` of a head's logits without ever holding them.

    Shape:
        hidden, weight, bias, target: as in `linear_token_stats`.
        Returns float32 `[s, b]` or `[n]` (float64 for float64 operands), the same on every TP rank;
        0 where the target is ignore_index, -inf where it was filtered out. Differentiable; the kept
        set counts as a constant. A filtered target has the gradient that plain torch gives.

    Args:
        top_k, top_p, kept_ids: as in `vocab_parallel_sampling_logprobs`. Larger and equal are
            decided on finished logits before the temperature.
        chunk_size: rows a tile, which spans all of a rank's columns, as in `linear_map`.
        the others: as in `linear_token_stats`.

    Cost: filters: four matrix products with a backward, and twice the filters' own work, which
    `linear_map` recomputes. kept_ids: a dot product an id, and no matrix product. Filters off: that
    of `linear_token_stats`.

    Collectives: filters: those of `vocab_parallel_sampling_logprobs` a tile, forward and backward;
    kept_ids: one all-reduce of `[ids]`. Backward, and under sequence parallelism, those of
    `linear_token_stats`.

    Host syncs: filters: one a tile, as there. kept_ids: none with one tile and without compaction,
    else one each.

    Memory: filters: two tiles of logits and what the filters make of one. kept_ids: a few numbers
    an id, and 32 MiB of gathered operands.

    Raises:
        ValueError: before any collective; see `vocab_parallel_sampling_logprobs` and
            `linear_token_stats`.
    """
    head = open_head(
        hidden,
        weight,
        bias,
        logit_scale=logit_scale,
        softcap=softcap,
        logits_dtype=logits_dtype,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        tp_group=tp_group,
        temperature=temperature,
        vocab_size=vocab_size,
        backend=backend,
    )
    backends.select(backend, weight)
    filters = Filters.of(top_k, top_p, head.shard)
    lead = whole_lead(hidden, head.group, sequence_parallel=sequence_parallel)
    target = check_target(target, lead, hidden.device)
    local = localize_target(target, head.shard, ignore_index)
    if kept_ids is None and filters.off:
        return linear_token_stats(
            hidden,
            weight,
            target,
            bias=bias,
            logit_scale=logit_scale,
            softcap=softcap,
            sequence_parallel=sequence_parallel,
            logits_dtype=logits_dtype,
            compact=compact,
            gradient_accumulation_fusion=gradient_accumulation_fusion,
            tp_group=head.group,
            temperature=temperature,
            vocab_size=vocab_size,
            ignore_index=ignore_index,
            chunk_size=chunk_size,
            backend=backend,
        ).logprobs
    if kept_ids is not None:
        filters.check_off_for_replay(top_k, top_p)
        kept = open_kept_ids(kept_ids, target.numel(), head.shard, hidden.device)
        tokens = open_tokens(
            hidden,
            target,
            head.shard,
            sequence_parallel=sequence_parallel,
            chunk_size=chunk_size,
            ignore_index=ignore_index,
            compact=compact,
            temperature=temperature,
        )
        return _replay(tokens, weight, bias, target, kept, kept_ids[1].long(), head)
    number, own = open_temperature(temperature, lead, hidden.device)

    def filtered(z: Tensor, wanted: Tensor, each: float | Tensor = number) -> Tensor:
        return vocab_parallel_sampling_logprobs(
            z,
            wanted,
            top_k=top_k,
            top_p=top_p,
            tp_group=head.group,
            temperature=each,
            vocab_size=vocab_size,
            ignore_index=ignore_index,
            backend=backend,
        )

    return linear_map(
        hidden,
        weight,
        filtered,
        target,
        *(() if own is None else (own,)),
        mask=local.keep,
        bias=bias,
        logit_scale=logit_scale,
        softcap=softcap,
        sequence_parallel=sequence_parallel,
        logits_dtype=logits_dtype,
        compact=compact,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        tp_group=head.group,
        chunk_size=chunk_size,
    )


def _replay(
    tokens: Tokens,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    kept: KeptIds,
    offsets: Tensor,
    head: HeadOptions,
) -> Tensor:
    """Softmax over each row's kept ids alone, in plain torch on their finished logits."""
    tiles = HiddenTiles(tokens.hidden, tokens.tiling)
    local = localize_target(kept.id, head.shard, None, name="kept_ids[0]")
    entries, place = ragged_entries(offsets, local.column, tokens, tiles)
    z = entry_logits(tokens, weight, bias, entries, head, tiles)
    keep = tiles.walk(tokens.target.keep)
    z = torch.where(keep[entries.row], z, 0.0)  # an ignored row may hold NaN
    rows = keep.shape[0]
    hit = kept.id[place] == tiles.walk(tokens.per_row(target))[entries.row]
    top = z.new_full((rows,), -torch.inf)
    top.scatter_reduce_(0, entries.row, z.detach(), "amax")
    shifted = z - torch.where(top.isneginf(), 0.0, top)[entries.row]
    log_sum = z.new_zeros(rows).index_add(0, entries.row, shifted.exp()).log()
    on_target = z.new_zeros(rows).index_add(0, entries.row, torch.where(hit, shifted, 0.0))
    among = z.new_zeros(rows).index_add(0, entries.row, hit.to(z.dtype)) > 0
    # A target that was not kept: -inf, with the gradient that plain torch gives.
    logprobs = (on_target - log_sum) + torch.where(among, 0.0, -torch.inf)
    logprobs = torch.where(top.isneginf(), -torch.inf, logprobs)
    return tokens.restore(tiles.restore(torch.where(keep, logprobs, 0.0)), 0.0)
