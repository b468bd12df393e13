"""Log-probabilities under what the sampler sampled from: temperature, then top-k, then top-p.

Which tokens the filters keep is found by the module `sampling_cut`, or recorded by the sampler and
replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.autograd import once_differentiable
from mcore_logprobs.checks import check_top_k, check_top_p
from mcore_logprobs.collectives import all_gather_stack
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels.stats import accumulator_dtype
from mcore_logprobs.logits.opening import LocalTarget, check_target, open_logits
from mcore_logprobs.logits.rows import Rows
from mcore_logprobs.logits.sampling_cut import (
    Cut,
    FilterOptions,
    find_cut,
    multiplier_column,
)
from mcore_logprobs.logits.token_stats import vocab_parallel_logprobs

__all__ = [
    "CutGradient",
    "Filters",
    "KeptIds",
    "SavedCut",
    "open_kept_ids",
    "vocab_parallel_sampling_logprobs",
]


def vocab_parallel_sampling_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    top_k: int | None = None,
    top_p: float = 1.0,
    kept_ids: tuple[Tensor, Tensor] | None = None,
    tp_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    ignore_index: int | None = -100,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Log-probability of each target under the filtered distribution that it was sampled from.

    1. z = logits / temperature.
    2. top-k: the k largest stay, and with them all that equal the k-th.
    3. top-p, over what is left and renormalised: in descending order, equal ones by ascending id, a
       token stays while the probability of those before it is under top_p. The first always stays.
    4. logprob = z[target] - logsumexp of the z that stayed.

    A target that was filtered out gives -inf, and with an upstream g the gradient that plain torch
    gives: -g p over the kept columns, 0 elsewhere; mask its loss, not its value, so that g is 0. A
    row with NaN or +inf (its masked columns aside) gives NaN, in value and gradient. An upstream of
    exactly 0 gives a gradient of exactly 0, in such rows too; NaN and inf upstream pass through to
    the kept columns. Larger and equal are decided on the raw logits, so that ties are exactly those
    of the logits' own dtype.

    Shape:
        vocab_parallel_logits: `[..., V/TP]`, or a DTensor `[..., V]` sharded on its last dimension.
        target: `[...]`, integers, global ids or ignore_index; the same on every TP rank.
        Returns float32 `[...]` (float64 for float64 logits), the same on every TP rank; 0 where the
        target is ignore_index. Differentiable; the kept set counts as a constant.

    Args:
        top_k: None, 0, -1 or vocab_size and more: off.
        top_p: in (0, 1]; 1.0: off.
        kept_ids: replay: (flat ids, offsets), the sampler's own record of what it kept, in place of
            the filters. Row i of the flattened target kept the global ids
            `flat_ids[offsets[i]:offsets[i+1]]`, each once; offsets is `[n + 1]`. A target that is
            not among them gives -inf. Cannot be combined with top_k or top_p.
        backend: checked; with both filters off it computes, else the work is torch's everywhere.

    Collectives, forward, over TP: one all-gather of `[2 + c, n]` with c = top_k + 1 or 128; with
    top-p one all-reduce of `[n]`. Rows whose cut-off these c largest logits of each rank do not
    show (nearly flat ones, masses of ties, top_k past 1023) share 4 to 15 all-reduces of
    `[7, rows]` (float64: to 26) and two all-gathers a filter, of `[128, rows]` and `[2, rows]`.
    Backward none.
    Replay: one all-gather of `[3, n]`. Filters off: as `vocab_parallel_logprobs`.

    Host syncs: one a call, whether rows need the search, and one a round of it. None in replay.

    Memory: backward keeps the logits and six numbers a row; the gradient, in the logits' dtype, is
    the only `[..., V/TP]` tensor made.

    Rounding: probabilities are summed in float32 or better, so that where the sum before a token
    is within about 1e-6 of top_p, that token may fall on either side. TP ranks always agree.

    How samplers do it. vLLM with `logprobs_mode="processed_logprobs"` returns the same: temperature
    in float32, top-k that keeps ties, top-p renormalised; of equal logits at the top-p cut-off it
    keeps any, by an unstable sort. Its default, raw_logprobs, has no filter and no temperature.
    SGLang returns log-probabilities after the temperature and before top-k and top-p (before the
    temperature too where SGLANG_RETURN_ORIGINAL_LOGPROB is set): for those leave both off here.
    What it samples from keeps exactly k tokens, any of those that tie, and takes top-p of the
    probabilities before top-k ("joint" order), so that with both set it may keep more tokens than
    this function. Kernels with other sums or another order of equals differ at the edge: where that
    matters, record the kept ids (SGLang's sampling masks hold them) and replay them.

    Raises:
        ValueError: top_k, top_p or kept_ids that make no sense; else as in
            `vocab_parallel_token_stats`.
    """
    opened = open_logits(
        vocab_parallel_logits,
        tp_group=tp_group,
        vocab_size=vocab_size,
        backend=backend,
        chunk_size=chunk_size,
        temperature=temperature,
    )
    logits, shard = opened.logits, opened.shard
    filters = Filters.of(top_k, top_p, shard)
    if kept_ids is None and filters.off:
        return vocab_parallel_logprobs(
            logits,
            target,
            tp_group=opened.options.group,
            temperature=temperature,
            vocab_size=vocab_size,
            ignore_index=ignore_index,
            chunk_size=chunk_size,
            backend=backend,
        )
    target = check_target(target, logits.shape[:-1], logits.device)
    local = opened.local_target(target, ignore_index)
    multiplier: float | Tensor = opened.options.spec.multiplier
    own = opened.options.temperature  # [...], or None
    if kept_ids is not None:
        filters.check_off_for_replay(top_k, top_p)
        kept = open_kept_ids(kept_ids, target.numel(), shard, logits.device)
        if own is not None:
            multiplier = own.reshape(-1).double().reciprocal()
        return replay_logprobs(logits, target, local, kept, shard, multiplier)
    if own is not None:
        multiplier = Rows(logits).walk(own).double().reciprocal()
    opts = FilterOptions(
        shard=shard,
        multiplier=multiplier,
        top_k=filters.top_k,
        top_p=filters.top_p,
        chunk_size=opened.options.chunk_size,
    )
    return _Filtered.apply(logits, local.column, local.keep, opts)


@dataclass(frozen=True)
class Filters:
    """Checked filters; None is off."""

    top_k: int | None
    top_p: float | None

    @property
    def off(self) -> bool:
        return self.top_k is None and self.top_p is None

    def check_off_for_replay(self, top_k: int | None, top_p: float) -> None:
        """A ValueError if filters go with kept_ids; takes them as the caller gave them."""
        if not self.off:
            raise ValueError(
                "kept_ids: expected top_k and top_p to be off, as the sampler's record replaces "
                f"them, got top_k={top_k}, top_p={top_p}"
            )

    @classmethod
    def of(cls, top_k: int | None, top_p: float, shard: VocabShard) -> Filters:
        check_top_k("top_k", top_k)
        check_top_p("top_p", top_p)
        k_off = top_k is None or top_k <= 0 or top_k >= shard.vocab_size
        return cls(None if k_off else top_k, None if top_p == 1.0 else float(top_p))


# ---- filters -------------------------------------------------------------------------------------


class _Filtered(torch.autograd.Function):
    """Log-probabilities under top-k and top-p, `[...]`."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, column: Tensor, keep: Tensor, opts: FilterOptions
    ) -> Tensor:
        rows = Rows(logits)
        column, keep = rows.walk(column), rows.walk(keep)
        cut = find_cut(logits, column, keep, opts)
        ctx.opts = opts
        column = torch.where(cut.kept, column, -1)  # a filtered target's own column gets nothing
        ctx.save_for_backward(logits, column, keep, *SavedCut.of(cut))
        return rows.restore(torch.where(keep, cut.logprobs, 0.0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, column, keep, *saved = ctx.saved_tensors
        opts: FilterOptions = ctx.opts
        rows, valid = Rows(logits), opts.shard.valid_width
        gradient = CutGradient(rows.walk(grads[0]), keep, column, SavedCut(*saved), opts)
        grad = torch.empty_like(logits)
        for part, block, out in rows.chunks(opts.chunk_size, logits, grad):
            out[:, valid:] = 0
            if valid:
                out[:, :valid] = gradient.of_logits(block[:, :valid], part)
        return grad, None, None, None


class SavedCut(NamedTuple):
    """What a backward needs of a `Cut`; each as there."""

    value: Tensor
    last: Tensor
    top: Tensor
    log_sum: Tensor

    @classmethod
    def of(cls, cut: Cut) -> SavedCut:
        return cls(cut.value, cut.last, cut.top, cut.log_sum)


class CutGradient:
    """The gradient of filtered log-probabilities, from the rows' saved cuts: no search, no rank.

    Args:
        upstream, keep, column: `[n]`, in the order of the rows; the target as this rank's column,
            -1 where it is another rank's or filtered out.
    """

    def __init__(
        self, upstream: Tensor, keep: Tensor, column: Tensor, cut: SavedCut, opts: FilterOptions
    ) -> None:
        self._opts, self._column, self._last = opts, column, cut.last
        upstream = torch.where(keep, upstream, 0.0).to(cut.value.dtype)
        # A row that asks for nothing keeps nothing: NaN compares with no logit.
        value = torch.where(upstream == 0, torch.nan, cut.value)
        filtered = _outside_kept(cut.top, upstream)
        self._rows = (upstream, value, cut.top, cut.log_sum, filtered)

    def of_logits(self, logits: Tensor, part: slice, first: int = 0) -> Tensor:
        """With respect to logits `[c, v]` of some rows, float32 or float64; new.

        Args:
            logits: as `find_cut` saw them; columns from `first` on.
            part: their rows.
        """
        opts = self._opts
        g, lowest, highest, total, rest = (t[part].unsqueeze(-1) for t in self._rows)
        x = logits.to(lowest.dtype)
        if opts.top_p is None:
            kept = x >= lowest
        else:
            ids = torch.arange(first, first + x.shape[1], device=x.device)
            kept = x == lowest
            kept &= ids <= self._last[part].unsqueeze(-1)
            kept |= x > lowest
        multiplier = multiplier_column(opts.multiplier, part, x.dtype)
        # (z - m) - log s, not z - lse: the difference of large numbers is taken exactly.
        dz = torch.sub(x, highest).mul_(multiplier).sub_(total).exp_().mul_(-g)
        own = self._column[part] - first
        inside = (own >= 0) & (own < x.shape[1])
        row, at = torch.arange(own.shape[0], device=own.device), torch.where(inside, own, 0)
        dz.index_put_((row, at), dz[row, at] + torch.where(inside, g.squeeze(-1), 0.0))
        # The target is known to be kept, even where a product made again rounds it below the cut.
        kept.index_put_((row, at), kept[row, at] | (inside & ~lowest.squeeze(-1).isnan()))
        return torch.where(kept, dz, rest, out=dz).mul_(multiplier)


def _outside_kept(top: Tensor, upstream: Tensor) -> Tensor:
    """The gradient of each row's columns outside the kept set, `[n]`: NaN in a row with NaN or
    +inf whose upstream is not 0, else 0.
    """
    return torch.where(top.isfinite() | (upstream == 0), 0.0, torch.nan).to(upstream.dtype)


# ---- replay --------------------------------------------------------------------------------------


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
    multiplier: float | Tensor  # [n]

    def of(self, row: Tensor) -> float | Tensor:
        return self.multiplier[row] if isinstance(self.multiplier, Tensor) else self.multiplier


class _Replay(torch.autograd.Function):
    """Log-probabilities under recorded kept sets, `[...]`."""

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
        packed[2].index_add_(0, kept.row, ((raw - shift[kept.row]) * opts.of(kept.row)).exp())
        packed[1] += _nan_where_unusable(logits, opts.shard).to(dtype)
        ranks = all_gather_stack(packed, opts.shard.group)
        top = ranks[:, 1].amax(0)  # NaN where any rank's is
        top = torch.where(top.isneginf(), 0.0, top)
        mass = (ranks[:, 2] * ((ranks[:, 1] - top) * opts.multiplier).exp()).sum(0)
        log_sum = torch.where(mass == 0, 0.0, mass.log())
        hit = kept.id == target[kept.row]
        among = torch.zeros(n, dtype=dtype, device=logits.device)
        among.index_add_(0, kept.row, hit.to(dtype))
        logprobs = (ranks[:, 0].sum(0) - top) * opts.multiplier - log_sum
        logprobs = torch.where((among > 0) & (mass != 0), logprobs, -torch.inf)
        logprobs = logprobs.masked_fill(top.isnan(), torch.nan)
        ctx.opts = opts
        ctx.save_for_backward(logits, hit, keep, top, log_sum)
        return torch.where(keep, logprobs, 0.0).reshape(logits.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, hit, keep, top, log_sum = ctx.saved_tensors
        opts: _Options = ctx.opts
        row = opts.kept.row
        at, own = _entries(logits, opts.kept, opts.shard)
        upstream = torch.where(keep, grads[0].reshape(-1), 0.0).to(top.dtype)
        g = upstream[row]
        multiplier = opts.of(row)
        p = ((logits[at].to(g.dtype) - top[row]) * multiplier - log_sum[row]).exp()
        dz = torch.where(own & (g != 0), g * (hit.to(g.dtype) - p) * multiplier, 0.0)
        rest = _outside_kept(top, upstream).to(logits.dtype).view(logits.shape[:-1])
        grad = torch.empty_like(logits).copy_(rest.unsqueeze(-1))
        grad[..., opts.shard.valid_width :] = 0
        # Each own entry comes once; the others add 0 to some column of their row.
        grad.index_put_(at, dz.to(grad.dtype), accumulate=True)
        return grad, None, None, None


def _nan_where_unusable(logits: Tensor, shard: VocabShard) -> Tensor:
    """`[n]`, NaN in rows with NaN or +inf among this rank's true vocabulary, else 0. One read."""
    valid = logits[..., : shard.valid_width]
    if not valid.shape[-1]:
        return torch.zeros(logits.shape[:-1].numel(), dtype=logits.dtype, device=logits.device)
    top = valid.amax(-1).reshape(-1)
    return torch.where(top.isnan() | top.isposinf(), torch.nan, 0.0)


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
    multiplier: float | Tensor,
) -> Tensor:
    """As `vocab_parallel_sampling_logprobs` says of `kept_ids`. One all-gather of `[3, n]`."""
    if isinstance(multiplier, Tensor):
        multiplier = multiplier.to(accumulator_dtype(logits.dtype))
    if not logits.shape[:-1]:
        args = (logits.unsqueeze(0), target.unsqueeze(0))
        local = LocalTarget(local.column.unsqueeze(0), local.keep.unsqueeze(0))
        return _Replay.apply(*args, local, _Options(kept, shard, multiplier)).squeeze(0)
    return _Replay.apply(logits, target, local, _Options(kept, shard, multiplier))
