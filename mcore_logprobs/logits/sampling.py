"""Log-probabilities under what the sampler sampled from: temperature, then top-k, then top-p."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.logits.opening import check_target, localize_target, open_logits
from mcore_logprobs.logits.rows import Rows
from mcore_logprobs.logits.sampling_filter import FilterOptions, find_cut
from mcore_logprobs.logits.sampling_replay import open_kept_ids, replay_logprobs
from mcore_logprobs.logits.token_stats import vocab_parallel_logprobs

__all__ = ["vocab_parallel_sampling_logprobs"]


class _Sampling(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, column: Tensor, keep: Tensor, opts: FilterOptions
    ) -> Tensor:
        rows = Rows(logits)
        column, keep = rows.walk(column), rows.walk(keep)
        cut = find_cut(logits, column, keep, opts)
        ctx.opts = opts
        # A filtered target, and one of probability 0, has no gradient.
        live = keep & cut.logprobs.isfinite()
        ctx.save_for_backward(logits, column, live, cut.value, cut.last, cut.top, cut.log_sum)
        return rows.restore(torch.where(keep, cut.logprobs, 0.0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, column, live, value, last, top, log_sum = ctx.saved_tensors
        opts: FilterOptions = ctx.opts
        rows, valid = Rows(logits), opts.shard.valid_width
        upstream = torch.where(live, rows.walk(grads[0]), 0.0)
        # Comparisons are written into floating-point buffers: far faster in torch than masks.
        ids = torch.arange(valid, device=logits.device, dtype=value.dtype)
        tie = last.clamp(max=valid).to(value.dtype)
        grad = torch.empty_like(logits)
        for part, block, out in rows.chunks(opts.chunk_size, logits, grad):
            out[:, valid:] = 0
            if not valid:
                continue
            per_row = (t[part].unsqueeze(-1) for t in (upstream, value, tie, top, log_sum))
            g, lowest, last_kept, highest, total = per_row
            x = block[:, :valid].to(value.dtype)
            kept, dz = torch.empty_like(x), torch.empty_like(x)
            torch.le(ids, last_kept, out=kept)
            kept.mul_(torch.eq(x, lowest, out=dz)).add_(torch.gt(x, lowest, out=dz))
            # (z - m) - log s, not z - lse: the difference of large numbers is taken exactly.
            torch.sub(x, highest, out=dz).mul_(opts.multiplier).sub_(total).exp_()
            dz.mul_(kept).mul_(-g)
            own = column[part]
            row = torch.arange(own.shape[0], device=own.device)
            at = own.clamp(min=0)
            extra = torch.where(own >= 0, g.squeeze(-1), 0.0)
            dz.index_put_((row, at), dz[row, at] + extra)
            # A row that asks for nothing gets 0, whatever its logits hold; others are finite.
            out[:, :valid] = dz.mul_(opts.multiplier).nan_to_num_(0.0, 0.0, 0.0)
            del x, kept, dz  # before the next chunk makes its own
        return grad, None, None, None


def vocab_parallel_sampling_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    top_k: int | None = None,
    top_p: float = 1.0,
    kept_ids: tuple[Tensor, Tensor] | None = None,
    tp_group: ProcessGroup | None = None,
    temperature: float = 1.0,
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

    A target that was filtered out gives -inf and no gradient. Larger and equal are decided on the
    logits as they came, so that ties are exactly those of the logits' own dtype.

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

    Memory: backward keeps the logits and five numbers a row; the gradient, in the logits' dtype, is
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
    filters = _Filters.of(top_k, top_p, shard)
    target = check_target(target, logits.shape[:-1], logits.device)
    backends.select(backend, logits)
    if kept_ids is not None:
        if not filters.off:
            raise ValueError(
                "kept_ids: expected top_k and top_p to be off, as the sampler's record replaces "
                f"them, got top_k={top_k}, top_p={top_p}"
            )
        local = localize_target(target, shard, ignore_index)
        kept = open_kept_ids(kept_ids, target.numel(), shard, logits.device)
        return replay_logprobs(logits, target, local, kept, shard, 1.0 / temperature)
    if filters.off:
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
    local = localize_target(target, shard, ignore_index)
    opts = FilterOptions(
        shard=shard,
        multiplier=1.0 / temperature,
        top_k=filters.top_k,
        top_p=filters.top_p,
        chunk_size=chunk_size or backends.default_chunk_size(shard.width, logits.device),
    )
    return _Sampling.apply(logits, local.column, local.keep, opts)


@dataclass(frozen=True)
class _Filters:
    """Checked filters; None is off."""

    top_k: int | None
    top_p: float | None

    @property
    def off(self) -> bool:
        return self.top_k is None and self.top_p is None

    @classmethod
    def of(cls, top_k: int | None, top_p: float, shard: VocabShard) -> _Filters:
        if top_k is not None and (
            isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < -1
        ):
            raise ValueError(f"top_k: expected None or an int >= -1, got {top_k!r}")
        if (
            isinstance(top_p, bool)
            or not isinstance(top_p, numbers.Real)
            or not 0.0 < float(top_p) <= 1.0
        ):
            raise ValueError(f"top_p: expected a number in (0, 1], got {top_p!r}")
        k_off = top_k is None or top_k <= 0 or top_k >= shard.vocab_size
        return cls(None if k_off else top_k, None if top_p == 1.0 else float(top_p))
