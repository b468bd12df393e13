"""Log-probabilities under what the sampler sampled from, from hidden states.

    for each tile of rows:
        forward    z = finished(tile @ weight^T), block by block -> the filters' cut, [rows]
        backward   a block of z again -> dLogits by the saved cut, in its place -> the products

Filters need whole rows at once, so that the forward holds a tile of logits. Where each row was cut
is a few numbers: the backward asks no filter and no other rank again, and holds a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.autograd import once_differentiable
from mcore_logprobs.fused.entries import entry_logits, ragged_entries
from mcore_logprobs.fused.gradients import HeadGradients
from mcore_logprobs.fused.head import Chunk, Head, HeadOptions, HeadTensors, open_head
from mcore_logprobs.fused.lora import LoRAInput
from mcore_logprobs.fused.token_stats import linear_token_stats
from mcore_logprobs.fused.tokens import (
    HiddenTiles,
    Tiling,
    Tokens,
    open_tokens,
    whole_lead,
    whole_row_tiling,
)
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels.huge_pages import prefer_huge_pages
from mcore_logprobs.kernels.reference import (
    distribution_gradient,
    finished_logits,
    row_chunks,
    to_raw_gradient,
)
from mcore_logprobs.kernels.stats import (
    RowNorms,
    RowResults,
    RowSpec,
    gradient_coefficients,
    gradient_spec,
)
from mcore_logprobs.logits.opening import LocalTarget, check_target, localize_target
from mcore_logprobs.logits.rows import finish_shards
from mcore_logprobs.logits.sampling import CutGradient, Filters, KeptIds, SavedCut, open_kept_ids
from mcore_logprobs.logits.sampling_cut import Cut, FilterOptions, find_cut, multiplier_column
from mcore_logprobs.logits.token_stats import TokenStats

__all__ = ["linear_filtered_stats", "linear_sampling_logprobs"]


@dataclass(frozen=True)
class _Options:
    """What a call does; holds no tensor but the temperatures.

    Attributes:
        temperature: `[n]`, each row's own in place of the head's, or None.
        whole: whether statistics of the whole distribution are wanted too.
    """

    head: HeadOptions
    tiling: Tiling
    filters: Filters
    temperature: Tensor | None
    whole: bool

    def filter(self, temperature: Tensor | None, device: torch.device) -> FilterOptions:
        """For logits before their temperature; temperature `[n]` of their rows, or None."""
        number, shard = self.head.spec.temperature, self.head.shard
        return FilterOptions(
            shard=shard,
            multiplier=1.0 / number if temperature is None else temperature.double().reciprocal(),
            top_k=self.filters.top_k,
            top_p=self.filters.top_p,
            chunk_size=backends.default_chunk_size(shard.width, device),
        )


class _LinearFiltered(torch.autograd.Function):
    """A RowResults of `[n]` tensors: filtered log-probabilities, the rest unfiltered or None."""

    @staticmethod
    def forward(ctx: Any, local: LocalTarget, opts: _Options, *inputs: Any) -> tuple[Any, ...]:
        tensors, spec = HeadTensors(*inputs), opts.head.spec
        hidden = tensors.hidden
        tiles = HiddenTiles(hidden, opts.tiling)
        column, keep = tiles.walk(local.column), tiles.walk(local.keep)
        temperature = tiles.walk_optional(opts.temperature)
        head = Head(tensors, opts.head, opts.tiling.block_columns)
        stats, cuts = [head.no_columns(hidden[:0])], [Cut.of_no_rows(head.wide, hidden.device)]
        for tile in tiles:
            mine, own = column[tile.rows], tile.of(temperature)
            threshold = head.target_threshold(tile.hidden, mine, own) if spec.rank else None
            found = []
            z = prefer_huge_pages(hidden.new_empty(len(mine), spec.valid, dtype=head.wide))
            for chunk in head.chunks(tile.hidden, mine, own):
                if opts.whole:
                    found.append((chunk.columns, head.chunk_stats(chunk, threshold)))
                finished = finished_logits(chunk.logits, _finishing(chunk), chunk.bias)
                z[:, chunk.columns] = finished
            stats.append(head.merged(tile.hidden, found))
            cuts.append(find_cut(z, mine, keep[tile.rows], opts.filter(own, z.device)))
            del z
        cut = Cut(*(torch.cat(parts) for parts in zip(*cuts, strict=True)))
        results: RowResults = RowResults()
        norms: tuple[Tensor | None, ...] = ()
        if opts.whole:
            done, _ = finish_shards(torch.cat(stats, 1), spec, opts.head.group)
            results, norms = done.blanked(keep), done.norms
        results = results._replace(logprobs=torch.where(keep, cut.logprobs, 0.0))
        column = torch.where(cut.kept, column, -1)  # a filtered target's own column gets nothing
        ctx.opts = opts
        tensors.save(ctx, column, keep, *SavedCut.of(cut), *norms)
        ctx.set_materialize_grads(False)
        results = results.map(tiles.restore)
        if results.target_rank is not None:
            ctx.mark_non_differentiable(results.target_rank)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        tensors, (column, keep, *saved) = HeadTensors.saved(ctx)
        cut = SavedCut(*saved[:4])
        opts: _Options = ctx.opts
        tiles = HiddenTiles(tensors.hidden, opts.tiling)
        temperature = tiles.walk_optional(opts.temperature)
        upstream = RowResults(*grads).map(tiles.walk)
        on_filtered = upstream.logprobs
        if on_filtered is None:
            on_filtered = torch.zeros_like(cut.top)
        filters = opts.filter(temperature, keep.device)
        filtered = CutGradient(on_filtered, keep, column, cut, filters)
        whole = upstream._replace(logprobs=None)
        spec = gradient_spec(opts.head.spec, whole)
        coef: Tensor | None = None
        if any(grad is not None for grad in whole):
            norms = RowNorms(*saved[4:])
            coef = gradient_coefficients(whole, norms, spec, keep=keep, label_smoothing=0.0)
        gradients = HeadGradients(tensors, tiles, opts.head, needs=ctx.needs_input_grad[2:])
        head = Head(tensors, replace(opts.head, spec=spec), opts.tiling.block_columns)

        def dlogits_of(chunk: Chunk, *, rows: slice) -> Tensor:
            out, finishing = head.gradient_buffer(chunk.logits), _finishing(chunk)
            size = backends.default_chunk_size(out.shape[1], out.device)
            for part in row_chunks(out.shape[0], size):
                where = slice(rows.start + part.start, rows.start + part.stop)
                raw = chunk.logits[part]
                z = finished_logits(raw, finishing, chunk.bias)
                dz = filtered.of_logits(z, where, chunk.columns.start)
                if coef is not None:
                    own = None if chunk.temperature is None else chunk.temperature[part]
                    unfiltered = (norms.top[where], coef[:, where], chunk.spec, chunk.bias, own)
                    base = distribution_gradient(raw, *unfiltered)
                    base.masked_fill_((coef[:, where] == 0).all(0).unsqueeze(-1), 0.0)
                    dz += base.mul_(multiplier_column(filters.multiplier, where, dz.dtype))
                to_raw_gradient(dz, raw, finishing)
                out[part] = dz
            return out

        for tile in tiles:
            for chunk in head.chunks(tile.hidden, None, tile.of(temperature)):
                gradients.add_chunk(head, tile, chunk, partial(dlogits_of, rows=tile.rows))
            gradients.end_tile(tile)
        return (None, None, *gradients.finish())


def _finishing(chunk: Chunk) -> RowSpec:
    """The chunk's spec without its temperature: the filters' order is that of such logits."""
    return replace(chunk.spec, temperature=1.0)


def linear_filtered_stats(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    top_k: int | None,
    top_p: float,
    whole: bool = True,
    entropy: bool = False,
    target_rank: bool = False,
    sum_pi_squared: bool = False,
    bias: Tensor | None = None,
    lora: LoRAInput | None = None,
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
) -> TokenStats:
    """`linear_token_stats` whose logprobs are those of the filtered distribution.

    Args:
        top_k, top_p: both off is `linear_token_stats`.
        whole: False leaves lse out, and with it the pass over the logits that it costs.
        the others: as in `linear_token_stats`.

    Cost, collectives, memory: those of `linear_sampling_logprobs`; with `whole` the statistics of
    each chunk and one all-gather of `[k, n]` a call more, and for the gradient of any of them one
    more pass over each chunk.
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
        lora=lora,
        temperature=temperature,
        vocab_size=vocab_size,
        backend=backend,
        entropy=entropy,
        rank=target_rank,
        sum_pi_squared=sum_pi_squared,
    )
    backends.select(backend, weight)
    filters = Filters.of(top_k, top_p, head.shard)
    if filters.off:
        return linear_token_stats(
            hidden,
            weight,
            target,
            entropy=entropy,
            target_rank=target_rank,
            sum_pi_squared=sum_pi_squared,
            bias=bias,
            lora=lora,
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
        )
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
    tiling = whole_row_tiling(tokens, head.shard, chunk_size)
    opts = _Options(head, tiling, filters, tokens.temperature, whole)
    tensors = HeadTensors.of(tokens.hidden, weight, bias, lora)
    return tokens.stats(RowResults(*_LinearFiltered.apply(tokens.target, opts, *tensors)))


def linear_sampling_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    top_k: int | None = None,
    top_p: float = 1.0,
    kept_ids: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
    lora: LoRAInput | None = None,
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
        hidden, weight, bias, lora, target: as in `linear_token_stats`.
        Returns float32 `[s, b]` or `[n]` (float64 for float64 operands), the same on every TP rank;
        0 where the target is ignore_index, -inf where it was filtered out. Differentiable; the kept
        set counts as a constant. A filtered target has the gradient that plain torch gives.

    Args:
        top_k, top_p, kept_ids: as in `vocab_parallel_sampling_logprobs`. Larger and equal are
            decided on finished logits before the temperature.
        chunk_size: rows a tile, which spans all of a rank's columns, as in `linear_map`.
        the others: as in `linear_token_stats`.

    Cost: filters: four matrix products with a backward, and the filters' own work once. kept_ids: a
    dot product an id, and no matrix product. Filters off: that of `linear_token_stats`.

    Collectives: filters: those of `vocab_parallel_sampling_logprobs` a tile; kept_ids: one
    all-reduce of `[ids]`. Backward, and under sequence parallelism, those of `linear_token_stats`.

    Host syncs: filters: one a tile, as there. kept_ids: none with one tile and without compaction,
    else one each.

    Memory: filters: a tile and a chunk of logits and what the filters make of a tile; backward a
    chunk; saved for it the inputs and six numbers a row. kept_ids: a few numbers
    an id, and 32 MiB of gathered operands.

    Raises:
        ValueError: before any collective; see `vocab_parallel_sampling_logprobs` and
            `linear_token_stats`.
    """
    shared: dict[str, Any] = {
        "bias": bias,
        "lora": lora,
        "logit_scale": logit_scale,
        "softcap": softcap,
        "logits_dtype": logits_dtype,
        "gradient_accumulation_fusion": gradient_accumulation_fusion,
        "tp_group": tp_group,
        "temperature": temperature,
        "vocab_size": vocab_size,
        "backend": backend,
    }
    rows: dict[str, Any] = {
        "sequence_parallel": sequence_parallel,
        "chunk_size": chunk_size,
        "ignore_index": ignore_index,
        "compact": compact,
    }
    if kept_ids is None:
        filters: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "whole": False}
        return linear_filtered_stats(hidden, weight, target, **filters, **shared, **rows).logprobs
    head = open_head(hidden, weight, **shared)
    backends.select(backend, weight)
    Filters.of(top_k, top_p, head.shard).check_off_for_replay(top_k, top_p)
    lead = whole_lead(hidden, head.group, sequence_parallel=sequence_parallel)
    target = check_target(target, lead, hidden.device)
    kept = open_kept_ids(kept_ids, target.numel(), head.shard, hidden.device)
    tokens = open_tokens(hidden, target, head.shard, temperature=temperature, **rows)
    tensors = HeadTensors.of(tokens.hidden, weight, bias, lora)
    return _replay(tokens, tensors, target, kept, kept_ids[1].long(), head)


def _replay(
    tokens: Tokens,
    tensors: HeadTensors,
    target: Tensor,
    kept: KeptIds,
    offsets: Tensor,
    head: HeadOptions,
) -> Tensor:
    """Softmax over each row's kept ids alone, in plain torch on their finished logits."""
    tiles = HiddenTiles(tokens.hidden, tokens.tiling)
    local = localize_target(kept.id, head.shard, None, name="kept_ids[0]")
    entries, place = ragged_entries(offsets, local.column, tokens, tiles)
    z = entry_logits(tensors, entries, tokens.temperature, head, tiles)
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
