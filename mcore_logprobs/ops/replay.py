"""Log-probabilities over the ids that a sampler recorded, in place of its filters.

A softmax over each row's kept ids alone, in plain torch on their logits: a dot product an id from
hidden states, no GEMM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.arguments import check_target, global_to_local
from mcore_logprobs.collectives import all_gather_stack
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels.chunk import per_row, times_multiplier
from mcore_logprobs.kernels.stats import StatsSpec, finalize, merge
from mcore_logprobs.ops.driver import Backward, Forward, Operation, Tensors, apply
from mcore_logprobs.sources.source import Entries, Source, Tile


@dataclass(frozen=True)
class Replay(Operation):
    """Log-probabilities `[n]`.

    Tensors: the valid mask `[n]`; of each entry `[e]` its row, ascending, its local id and whether
    it is the target.

    Attributes:
        bounds: where each tile's entries begin, and the end.
    """

    bounds: tuple[int, ...]

    def forward(self, source: Source, tensors: Tensors) -> Forward:
        return _ReplayForward(source, tensors, self._parts())

    def backward(
        self, source: Source, upstream: Tensors, tensors: Tensors, saved: Tensors
    ) -> Backward:
        return _ReplayGradient(source.multiplier, upstream[0], tensors, saved, self._parts())

    def _parts(self) -> Iterator[slice]:
        """Each tile's entries."""
        return (slice(*pair) for pair in zip(self.bounds[:-1], self.bounds[1:], strict=True))


class _ReplayForward(Forward):
    reads = "nothing"

    def __init__(self, source: Source, tensors: Tensors, parts: Iterator[slice]) -> None:
        self._source, self._parts = source, parts
        self._valid_mask, self._row, self._local_ids, self._hit = tensors
        self._x = torch.zeros(self._row.shape, dtype=source.acc_dtype, device=source.device)

    def begin_tile(self, tile: Tile, rows: slice) -> None:
        part = next(self._parts)
        self._x[part] = tile.unscaled_logits(Entries(self._row[part], self._local_ids[part]))

    def results(self) -> tuple[Tensors, Tensors]:
        x, row, hit, count = self._x, self._row, self._hit, self._source.count
        multiplier = self._source.multiplier
        own, spec = self._local_ids >= 0, StatsSpec()
        stats = x.new_zeros(len(spec.fields), count)
        local = spec.named(stats)
        local["max"].fill_(-torch.inf)
        local["max"].scatter_reduce_(0, row, torch.where(own, x, -torch.inf), "amax")
        shift = torch.where(local["max"].isneginf(), 0.0, local["max"])
        weight = times_multiplier(x - shift[row], per_row(multiplier, row)).exp()
        local["sum"].index_add_(0, row, torch.where(own, weight, 0.0))
        local["target"].index_add_(0, row, torch.where(own & hit, x, 0.0))
        shards = all_gather_stack(stats, self._source.shard.group)
        merged = merge(shards, spec, multiplier=multiplier)
        results, softmax = finalize(merged, spec, multiplier=multiplier)
        # -inf where the target is not among the kept ids, or all of them are -inf.
        kept = x.new_zeros(count).index_add_(0, row, hit.to(x.dtype)) > 0
        finite = ~spec.named(merged)["max"].isneginf()
        logprobs = torch.where(kept & finite, results.logprobs, -torch.inf)
        logprobs = torch.where(softmax.row_max.isnan(), torch.nan, logprobs)
        row_max, log_sum, *_ = softmax
        return (torch.where(self._valid_mask, logprobs, 0.0),), (row_max, log_sum, finite)


class _ReplayGradient(Backward):
    entries = True

    def __init__(
        self,
        multiplier: float | Tensor,
        upstream: Tensor,
        tensors: Tensors,
        saved: Tensors,
        parts: Iterator[slice],
    ) -> None:
        self._multiplier = multiplier
        valid_mask, self._row, self._local_ids, self._hit = tensors
        self._row_max, self._log_sum, finite = saved
        self._parts = parts
        self._on_row = torch.where(valid_mask & finite, upstream, 0.0).to(self._row_max.dtype)

    def at(self, tile: Tile) -> tuple[Entries, Tensor]:
        part = next(self._parts)
        row, hit = self._row[part], self._hit[part]
        entries, g = Entries(row, self._local_ids[part]), self._on_row[row]
        below = tile.unscaled_logits(entries) - self._row_max[row]
        below = times_multiplier(below, per_row(self._multiplier, row))
        p = (below - self._log_sum[row]).exp()
        # A target that was not kept gets nothing, the kept ids what plain torch gives.
        return entries, torch.where(g != 0, g * (hit.to(g.dtype) - p), 0.0)


def replay(
    source: Any,
    target: Tensor,
    kept_ids: tuple[Tensor, Tensor],
    *,
    places: Tensor | None = None,
    ignore_index: int | None = -100,
) -> Tensor:
    """Log-probabilities over each row's kept ids, of any source; `vocab_parallel_sampling_logprobs`
    describes `kept_ids`.

    Args:
        places: `[*lead]` int64, which row of the record is each token's; None: in their order.

    Collectives: one all-gather of `[3, n]`. A host sync where rows are left out, and one where
    there are several tiles.
    """
    target = check_target(target, source.lead, source.device)
    ids, offsets = check_kept_ids(kept_ids, target.numel(), source.shard, source.device)
    _, valid_mask = global_to_local(target, source.shard, ignore_index)
    local_ids, _ = global_to_local(ids, source.shard, None, name="kept_ids[0]")
    source = source.compacted(valid_mask)
    source = source.in_token_order()
    # The record in the order of the rows of the walk: of each entry where it stands.
    if places is None:
        places = torch.arange(target.numel(), device=source.device).view(source.lead)
    walk = source.flatten_rows(places)
    computed = source.flatten_rows(torch.ones_like(places), fill=0)
    lengths = offsets.diff()[walk] * computed
    ends = lengths.cumsum(0)
    is_whole = getattr(source.options, "selection", None) is None
    count = ids.numel() if is_whole else int(lengths.sum())  # a host sync
    row = torch.arange(source.count, device=source.device)
    row = row.repeat_interleave(lengths, output_size=count)
    place = torch.arange(count, device=source.device) + (offsets[:-1][walk] - ends + lengths)[row]
    tile_ends, bounds = source.tile_ends(), (0, count)
    if len(tile_ends) != 1:
        bounds = (0, *ends[[end - 1 for end in tile_ends]].tolist())  # a host sync
    hit = ids[place] == source.flatten_rows(target)[row]
    entries = (row, local_ids[place], hit)
    return apply(Replay(bounds), source, valid_mask, constants=entries)[0]


def check_kept_ids(
    kept_ids: Any, rows: int, shard: VocabShard, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(flat ids `[e]`, offsets `[rows + 1]`), int64 copies; no sync on CUDA.

    Raises:
        ValueError: no pair of 1-D integer tensors, offsets that are not `[rows + 1]`; on CPU (on
            CUDA a device-side assert) offsets that do not rise from 0 to the number of ids, ids
            outside [0, vocab_size), or an id twice in one row.
    """
    if not isinstance(kept_ids, tuple | list) or len(kept_ids) != 2:
        raise ValueError(f"kept_ids: expected (flat_ids, offsets), got {type(kept_ids).__name__}")
    ids, offsets = kept_ids
    entries = ids.numel() if isinstance(ids, Tensor) else 0
    # Copies: the backward reads them, and autograd does not see changes of the caller's own.
    ids = check_target(ids, torch.Size((entries,)), device, name="kept_ids[0]").clone()
    offsets = check_target(offsets, torch.Size((rows + 1,)), device, name="kept_ids[1]").clone()
    lengths = offsets.diff()
    fits = (lengths >= 0).all() & (offsets[0] == 0) & (offsets[-1] == entries)
    inside = ((ids >= 0) & (ids < shard.vocab_size)).all()
    expected = f"kept_ids: expected offsets that rise from 0 to {entries}"
    if device.type != "cpu":
        torch._assert_async(fits, expected)
        torch._assert_async(inside, f"kept_ids: id outside [0, {shard.vocab_size})")
    elif not fits:
        raise ValueError(f"{expected}, got {offsets[:8].tolist()} to {int(offsets[-1])}")
    elif not inside:
        raise ValueError(f"kept_ids: expected ids in [0, {shard.vocab_size})")
    row = torch.arange(rows, device=device).repeat_interleave(lengths, output_size=entries)
    keys = (row * shard.padded_size + ids).sort().values
    single = (keys.diff() > 0).all()
    if device.type != "cpu":
        torch._assert_async(single, "kept_ids: an id twice in one row")
    elif not single:
        raise ValueError("kept_ids: expected each id at most once a row")
    return ids, offsets
