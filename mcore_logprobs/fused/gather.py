"""A few given ids of each row, from hidden states: their logits or log-probabilities.

Log-probabilities need the statistics of whole rows: the entries are taken from the chunks on the
way, and their gradient is written into the chunks' dLogits. Logits alone need no matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.autograd import once_differentiable
from mcore_logprobs.checks import check_choice, check_flag, check_positive
from mcore_logprobs.fused.entries import entry_logits, grid_entries
from mcore_logprobs.fused.gradients import HeadGradients
from mcore_logprobs.fused.head import Chunk, Head, HeadOptions, HeadTensors, open_head
from mcore_logprobs.fused.lora import LoRAInput
from mcore_logprobs.fused.tokens import (
    NO_TARGET,
    HiddenTiles,
    Tiling,
    Tokens,
    open_tokens,
    whole_lead,
)
from mcore_logprobs.kernels.backend import default_chunk_size
from mcore_logprobs.kernels.reference import finished_logits
from mcore_logprobs.kernels.stats import (
    RowNorms,
    RowResults,
    accumulator_dtype,
)
from mcore_logprobs.logits.dtensor import unwrap_rows
from mcore_logprobs.logits.gather import NORMALIZATIONS, entry_coefficients
from mcore_logprobs.logits.opening import (
    check_group_tensor,
    check_same_rows,
    check_target,
    localize_target,
    open_temperature,
)
from mcore_logprobs.logits.rows import finish_shards

__all__ = ["linear_gather", "linear_topk_distill"]


@dataclass(frozen=True)
class _Options:
    head: HeadOptions
    tiling: Tiling
    temperature: Tensor | None


class _LinearEntries(torch.autograd.Function):
    """columns `[n, k]` -> (log-probabilities `[n, k]`, entropy `[n]` or None)."""

    @staticmethod
    def forward(
        ctx: Any, column: Tensor, keep: Tensor, opts: _Options, *inputs: Any
    ) -> tuple[Tensor | None, ...]:
        tensors, spec = HeadTensors(*inputs), opts.head.spec
        tiles = HiddenTiles(tensors.hidden, opts.tiling)
        column, keep = tiles.walk(column), tiles.walk(keep)
        temperature = tiles.walk_optional(opts.temperature)
        head = Head(tensors, opts.head, opts.tiling.block_columns)
        values = torch.zeros(column.shape, dtype=head.wide, device=column.device)
        parts = [head.no_columns(tensors.hidden[:0])]
        for tile in tiles:
            mine = column[tile.rows]
            found = []
            for chunk in head.chunks(tile.hidden, None, tile.of(temperature)):
                found.append((chunk.columns, head.chunk_stats(chunk, None)))
                values[tile.rows] += _own_entries(chunk, mine)
            parts.append(head.merged(tile.hidden, found))
        done, summed = finish_shards(torch.cat(parts, 1), spec, opts.head.group, entries=values)
        assert summed is not None
        # (z - m) - log s, not z - lse: the difference of large numbers is taken exactly.
        summed = (summed - done.norms.top.unsqueeze(-1)) - done.norms.log_sum.unsqueeze(-1)
        ctx.opts = opts
        tensors.save(ctx, column, keep, *done.norms)
        ctx.set_materialize_grads(False)
        entropy = done.results.entropy
        return (
            tiles.restore(torch.where(keep, summed, 0.0)),
            None if entropy is None else tiles.restore(entropy),
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        on_values, on_entropy = grads
        if on_values is None and on_entropy is None:
            return (None,) * len(ctx.needs_input_grad)
        tensors, (column, keep, *saved) = HeadTensors.saved(ctx)
        norms, opts = RowNorms(*saved), ctx.opts
        tiles = HiddenTiles(tensors.hidden, opts.tiling)
        temperature = tiles.walk_optional(opts.temperature)
        if on_values is None:
            column, on_entries = column[:, :0], norms.top.new_zeros(tiles.count, 0)
        else:
            on_entries = torch.where(keep, tiles.walk(on_values), 0.0)
        upstream = RowResults(
            logprobs=on_entries.sum(-1),
            entropy=None if on_entropy is None else tiles.walk(on_entropy),
        )
        spec, coef = entry_coefficients(on_entries, upstream, norms, opts.head.spec)
        gradients = HeadGradients(tensors, tiles, opts.head, needs=ctx.needs_input_grad[3:])
        head = Head(tensors, replace(opts.head, spec=spec), opts.tiling.block_columns)

        def dlogits_of(chunk: Chunk, *, rows: slice) -> Tensor:
            logits, out = chunk.logits, head.gradient_buffer(chunk.logits)
            head.backend(logits).entries_grad(
                logits,
                _inside(chunk, column[rows]),
                on_entries[rows],
                norms.top[rows],
                coef[:, rows],
                chunk.spec,
                bias=chunk.bias,
                temperature=chunk.temperature,
                out=out,
                chunk_size=default_chunk_size(logits.shape[1], logits.device),
            )
            return out

        for tile in tiles:
            for chunk in head.chunks(tile.hidden, None, tile.of(temperature)):
                gradients.add_chunk(head, tile, chunk, partial(dlogits_of, rows=tile.rows))
            gradients.end_tile(tile)
        return (None, None, None, *gradients.finish())


def _inside(chunk: Chunk, column: Tensor) -> Tensor:
    """The shard's columns as the chunk's, -1 where they are not in it."""
    local = column - chunk.columns.start
    return torch.where((local >= 0) & (column < chunk.columns.stop), local, -1)


def _own_entries(chunk: Chunk, column: Tensor) -> Tensor:
    """Finished logits at `[rows, k]` columns of the shard, 0 where they are not in the chunk."""
    inside = _inside(chunk, column)
    at = inside.clamp(min=0)
    bias = None if chunk.bias is None else chunk.bias[at].to(accumulator_dtype(chunk.bias.dtype))
    own = None if chunk.temperature is None else chunk.temperature.unsqueeze(-1)
    z = finished_logits(chunk.logits.gather(-1, at), chunk.spec, bias, own)
    return torch.where(inside >= 0, z, 0.0)


def _log_probs(
    tokens: Tokens, tensors: HeadTensors, column: Tensor, keep: Tensor, head: HeadOptions
) -> tuple[Tensor, Tensor | None]:
    opts = _Options(head, tokens.tiling, tokens.temperature)
    return _LinearEntries.apply(column, keep, opts, *tensors)


def _logits(tokens: Tokens, tensors: HeadTensors, column: Tensor, head: HeadOptions) -> Tensor:
    """Finished logits at columns `[n, k]`, 0 where no rank owns one; by dot products."""
    tiles = HiddenTiles(tokens.hidden, tokens.tiling)
    entries = grid_entries(tiles.walk(column), tiles)
    values = entry_logits(tensors, entries, tokens.temperature, head, tiles)
    return tiles.restore(values.view(column.shape))


def linear_gather(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    log_softmax: bool = False,
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
    """`vocab_parallel_gather` of a head's logits without ever holding them.

    Shape:
        hidden, weight, bias, lora: as in `linear_token_stats`.
        ids: `[s, b, k]` or `[n, k]`, integers, global ids or ignore_index; the whole sequence on
            every TP rank also under sequence parallelism. An id may be repeated.
        Returns float32 `[s, b, k]` or `[n, k]` (float64 for float64 operands), the same on every TP
        rank; 0, without a gradient, where the id is ignore_index. Differentiable.

    Args:
        log_softmax: normalised over the whole vocabulary, instead of the logits themselves.
        compact: leave out rows all of whose ids are ignore_index. One host sync.
        the others: as in `linear_token_stats`.

    Cost: without log_softmax a dot product an id, forward and twice backward, and no matrix
    product; with it, those of `linear_token_stats`. On CUDA, where the dot products add to dWeight
    and dHidden by atomics, gradients of logits differ in their last bits from run to run.

    Collectives: forward an all-reduce of `[n k]` over TP; with log_softmax an all-gather of
    `[3 + k, n]`. Backward, and under sequence parallelism, those of `linear_token_stats`.

    Memory: as `linear_token_stats`; without log_softmax, in place of the chunk, 8 MiB of gathered
    operands (64 MiB on a GPU) and their products, and dWeight in float32. Saved for backward: the
    inputs and a few numbers a row and id.

    Raises:
        ValueError: before any collective; see `vocab_parallel_gather` and `linear_token_stats`.
    """
    check_flag("log_softmax", log_softmax)
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
    )
    lead = whole_lead(hidden, head.group, sequence_parallel=sequence_parallel)
    ids = unwrap_rows(ids, "ids")
    k = ids.shape[-1] if isinstance(ids, Tensor) and ids.dim() else 1
    ids = check_target(ids, torch.Size((*lead, k)), hidden.device, name="ids")
    local = localize_target(ids, head.shard, ignore_index, name="ids")
    tokens = open_tokens(
        hidden,
        NO_TARGET,
        head.shard,
        sequence_parallel=sequence_parallel,
        chunk_size=chunk_size,
        mask=local.keep.any(-1),
        compact=compact,
        temperature=temperature,
    )
    tensors = HeadTensors.of(tokens.hidden, weight, bias, lora)
    column, keep = tokens.per_row(local.column), tokens.per_row(local.keep)
    if log_softmax:
        values, _ = _log_probs(tokens, tensors, column, keep, head)
    else:
        values = _logits(tokens, tensors, column, head)
    return tokens.restore(values, 0.0)


def linear_topk_distill(
    hidden: Tensor,
    weight: Tensor,
    teacher_topk_logits: Tensor,
    teacher_topk_ids: Tensor,
    *,
    normalize: str = "vocab",
    entropy: bool = False,
    mask: Tensor | None = None,
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
    teacher_temperature: float | Tensor | None = None,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`vocab_parallel_topk_distill` of a head's logits without ever holding them.

    Shape:
        hidden, weight, bias, lora: as in `linear_token_stats`; the student's.
        teacher_topk_logits, teacher_topk_ids: `[s, b, k]` or `[n, k]`, any float dtype and integer
            global ids; the whole sequence on every TP rank also under sequence parallelism.
        mask: bool `[s, b]` or `[n]`; the student's results of False rows are 0, without a gradient.
        Returns (student log-probabilities `[..., k]`, the teacher's `[..., k]`, the student's
        entropy `[...]` or None), float32, the same on every TP rank.

    Args:
        normalize, entropy, temperature, teacher_temperature: as in `vocab_parallel_topk_distill`.
        compact: compute only rows that the mask keeps; the same results. One host sync.
        the others: as in `linear_token_stats`.

    Cost: the products of `linear_token_stats`; "topk" without entropy: dot products, see
    `linear_gather`, whose collectives and memory these are too.

    Raises:
        ValueError: before any collective; see `vocab_parallel_topk_distill` and
            `linear_token_stats`.
    """
    check_choice("normalize", normalize, NORMALIZATIONS)
    check_flag("entropy", entropy)
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
    )
    lead = whole_lead(hidden, head.group, sequence_parallel=sequence_parallel)
    teacher = unwrap_rows(teacher_topk_logits, "teacher_topk_logits")
    check_group_tensor(teacher, "teacher_topk_logits", min_dim=1)
    k = teacher.shape[-1]
    if k < 1:
        raise ValueError(f"teacher_topk_logits: expected [..., k] with k >= 1, got k = {k}")
    shape = torch.Size((*lead, k))
    check_same_rows("teacher_topk_logits", teacher, shape, hidden.device)
    ids = check_target(teacher_topk_ids, shape, hidden.device, name="teacher_topk_ids")
    local = localize_target(ids, head.shard, None, name="teacher_topk_ids")
    number, own = open_temperature(
        temperature if teacher_temperature is None else teacher_temperature,
        lead,
        hidden.device,
        name="teacher_temperature",
    )
    check_positive("teacher_temperature", number)
    tokens = open_tokens(
        hidden,
        NO_TARGET,
        head.shard,
        sequence_parallel=sequence_parallel,
        chunk_size=chunk_size,
        mask=mask,
        compact=compact,
        temperature=temperature,
    )
    tensors = HeadTensors.of(tokens.hidden, weight, bias, lora)
    column, keep = tokens.per_row(local.column), tokens.target.keep
    found: Tensor | None = None
    if normalize == "vocab" or entropy:
        keeps = keep.unsqueeze(-1).expand_as(column)
        student, found = _log_probs(tokens, tensors, column, keeps, head)
    else:
        student = _logits(tokens, tensors, column, head)
    if normalize == "topk":
        student = torch.where(keep.unsqueeze(-1), student, 0.0)  # a masked row may hold NaN
        student = torch.log_softmax(student, dim=-1)
    if mask is not None:
        student = torch.where(keep.unsqueeze(-1), student, 0.0)
        found = None if found is None else torch.where(keep, found, 0.0)
    q = teacher.detach().to(accumulator_dtype(teacher.dtype))
    q = torch.log_softmax(q / (number if own is None else own.unsqueeze(-1)), dim=-1)
    return (
        tokens.restore(student, 0.0),
        q,
        None if found is None else tokens.restore(found, 0.0),
    )
