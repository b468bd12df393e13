"""Log-probabilities under the token ids that a sampler recorded as kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_logprobs.collectives import all_gather_stack
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels.stats import accumulator_dtype
from mcore_logprobs.logits.opening import LocalTarget, check_target

__all__ = ["KeptIds", "open_kept_ids", "replay_logprobs"]


@dataclass(frozen=True)
class KeptIds:
    """A checked record, entry by entry; both `[entries]` int64.

    Attributes:
        row: the row of the flattened target that an entry belongs to.
        id: global id.
    """

    row: Tensor
    id: Tensor


def open_kept_ids(
    kept_ids: tuple[Tensor, Tensor], rows: int, shard: VocabShard, device: torch.device
) -> KeptIds:
    """Check (flat ids, offsets) and say of each entry which row it belongs to; no sync on CUDA.

    Raises:
        ValueError: no pair of 1-D integer tensors, offsets that are not `[rows + 1]`; on CPU (on
            CUDA a device-side assert) offsets that do not rise from 0 to the number of ids, ids
            outside [0, vocab_size), or an id twice in one row.
    """
    if not isinstance(kept_ids, tuple | list) or len(kept_ids) != 2:
        raise ValueError(f"kept_ids: expected (flat_ids, offsets), got {type(kept_ids).__name__}")
    ids, offsets = kept_ids
    entries = ids.numel() if isinstance(ids, Tensor) else 0
    ids = check_target(ids, torch.Size((entries,)), device, name="kept_ids[0]")
    offsets = check_target(offsets, torch.Size((rows + 1,)), device, name="kept_ids[1]")
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
    return KeptIds(row, ids)


@dataclass(frozen=True)
class _Options:
    kept: KeptIds
    shard: VocabShard
    multiplier: float


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, local: LocalTarget, opts: _Options
    ) -> Tensor:
        kept, dtype = opts.kept, accumulator_dtype(logits.dtype)
        n = target.numel()
        target, keep, column = (t.reshape(-1) for t in (target, local.keep, local.column))
        at, own = _entries(logits, kept, opts.shard)
        raw = torch.where(own, logits[at].to(dtype), -torch.inf)  # [entries]
        everyone = torch.arange(n, device=logits.device)
        here, _ = _entries(logits, KeptIds(everyone, column + opts.shard.start), opts.shard)
        packed = torch.zeros(3, n, dtype=dtype, device=logits.device)
        packed[0] = torch.where(column >= 0, logits[here].to(dtype), 0.0)
        packed[1] = -torch.inf
        packed[1].scatter_reduce_(0, kept.row, raw, "amax")
        shift = torch.where(packed[1].isneginf(), 0.0, packed[1])
        packed[2].index_add_(0, kept.row, ((raw - shift[kept.row]) * opts.multiplier).exp())
        ranks = all_gather_stack(packed, opts.shard.group)
        top = ranks[:, 1].amax(0)
        top = torch.where(top.isneginf(), 0.0, top)
        log_sum = (ranks[:, 2] * ((ranks[:, 1] - top) * opts.multiplier).exp()).sum(0).log()
        hit = kept.id == target[kept.row]
        among = torch.zeros(n, dtype=dtype, device=logits.device)
        among.index_add_(0, kept.row, hit.to(dtype))
        logprobs = (ranks[:, 0].sum(0) - top) * opts.multiplier - log_sum
        logprobs = torch.where((among > 0) & ~log_sum.isneginf(), logprobs, -torch.inf)
        ctx.opts = opts
        ctx.save_for_backward(logits, hit, keep & logprobs.isfinite(), top, log_sum)
        return torch.where(keep, logprobs, 0.0).reshape(logits.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, hit, live, top, log_sum = ctx.saved_tensors
        opts: _Options = ctx.opts
        row = opts.kept.row
        at, own = _entries(logits, opts.kept, opts.shard)
        g = torch.where(live, grads[0].reshape(-1), 0.0)[row]
        p = ((logits[at].to(g.dtype) - top[row]) * opts.multiplier - log_sum[row]).exp()
        dz = torch.where(own & (g != 0), g * (hit.to(g.dtype) - p) * opts.multiplier, 0.0)
        grad = torch.zeros_like(logits)
        # Each own entry comes once; the others add 0 to some column of their row.
        grad.index_put_(at, dz.to(grad.dtype), accumulate=True)
        return grad, None, None, None


def _entries(logits: Tensor, kept: KeptIds, shard: VocabShard) -> tuple[tuple[Tensor, ...], Tensor]:
    """Index of each entry into `[..., V/TP]` (column 0 for another rank's), and which are own."""
    column = kept.id - shard.start
    own = (column >= 0) & (column < shard.width)
    rows = torch.unravel_index(kept.row, logits.shape[:-1])
    return (*rows, torch.where(own, column, 0)), own


def replay_logprobs(
    logits: Tensor,
    target: Tensor,
    local: LocalTarget,
    kept: KeptIds,
    shard: VocabShard,
    multiplier: float,
) -> Tensor:
    """As `vocab_parallel_sampling_logprobs` says of `kept_ids`. One all-gather of `[3, n]`."""
    if not logits.shape[:-1]:
        args = (logits.unsqueeze(0), target.unsqueeze(0))
        local = LocalTarget(local.column.unsqueeze(0), local.keep.unsqueeze(0))
        return _Replay.apply(*args, local, _Options(kept, shard, multiplier)).squeeze(0)
    return _Replay.apply(logits, target, local, _Options(kept, shard, multiplier))
