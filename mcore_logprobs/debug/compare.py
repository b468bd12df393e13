"""How far the trainer's log-probabilities are from those that the rollout engine sampled with.

    stats = compare_logprobs(train_logprobs, rollout_logprobs, mask, target_rank=stats.target_rank)
    print(report(stats, "mismatch.png"))

Notation, for a token x that the rollout engine drew: q = pi_rollout(x), p = pi_train(x),
r = p / q, d = log r = train - rollout. The three estimators of KL(pi_rollout || pi_train) are
those of John Schulman, "Approximating KL divergence" (2020): each is an average over tokens of
    k1 = -log r            unbiased, may be negative, high variance
    k2 = (log r)^2 / 2     biased, never negative, low variance
    k3 = (r - 1) - log r   unbiased, never negative, low variance

`explain_mismatch` says where the difference comes from, cause by cause (docs/mismatch.md).

For logging and plots, not for a hot path: the host reads values back. Sums are float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import check_integer
from mcore_logprobs.collectives import all_gather_dim0, all_gather_objects

PERCENTILES = (0.1, 1.0, 5.0, 25.0, 50.0, 75.0, 95.0, 99.0, 99.9)


@dataclass(frozen=True)
class RankHistogram:
    """How many tokens have a target rank in [first, last], bin by bin: 0, 1, 2-3, 4-7, 8-15, ...

    Attributes:
        first, last: inclusive limits of each bin.
        counts: tokens in each bin.
        mean, median, p95: of the rank itself.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    counts: tuple[int, ...]
    mean: float
    median: float
    p95: float

    @property
    def labels(self) -> list[str]:
        pairs = zip(self.first, self.last, strict=True)
        return [str(a) if a == b else f"{a}-{b}" for a, b in pairs]


@dataclass(frozen=True)
class MismatchStats:
    """What `compare_logprobs` found. d is log p_train - log p_rollout of a token, and r is e^d.

    Attributes:
        tokens, sequences: how many the mask leaves (sequences with at least one token).
        k1, k2, k3: estimates of KL(pi_rollout || pi_train) in nats per token.
        abs_diff_mean, abs_diff_max: of |d|.
        ratio_percentiles: percent -> percentile of r over tokens (linear interpolation).
        effective_sample_size: (sum r)^2 / sum r^2 over tokens, from 1 to `tokens` (Kish); NaN
            where every r is 0 or one is infinite.
        sequence_ratio: [sequences] prod r = exp(sum d), the importance weight of a sequence.
        sequence_ratio_normalized: [sequences] exp(mean d), its geometric mean per token (GSPO's).
        sequence_effective_sample_size: as above, over `sequence_ratio`; from 1 to `sequences`.
        target_ranks: histogram of the ranks given, else None.
        log_ratio, rollout_logprobs: [tokens] d and log q, float64 on the CPU, for plots.
    """

    tokens: int
    sequences: int
    k1: float
    k2: float
    k3: float
    abs_diff_mean: float
    abs_diff_max: float
    ratio_percentiles: dict[float, float]
    effective_sample_size: float
    sequence_ratio: Tensor = field(repr=False)
    sequence_ratio_normalized: Tensor = field(repr=False)
    sequence_effective_sample_size: float
    target_ranks: RankHistogram | None = field(repr=False)
    log_ratio: Tensor = field(repr=False)
    rollout_logprobs: Tensor = field(repr=False)

    def to_dict(self) -> dict[str, float]:
        """The scalars, flat, for a line of JSON or a tracker."""
        names = ("tokens", "sequences", "k1", "k2", "k3", "abs_diff_mean", "abs_diff_max")
        out: dict[str, float] = {name: getattr(self, name) for name in names}
        out |= {
            "ess_fraction": self.effective_sample_size / self.tokens,
            "sequence_ess_fraction": self.sequence_effective_sample_size / self.sequences,
            "sequence_ratio_min": self.sequence_ratio.min().item(),
            "sequence_ratio_max": self.sequence_ratio.max().item(),
            "sequence_ratio_normalized_min": self.sequence_ratio_normalized.min().item(),
            "sequence_ratio_normalized_max": self.sequence_ratio_normalized.max().item(),
        }
        out.update({f"ratio_p{p:g}": value for p, value in self.ratio_percentiles.items()})
        if self.target_ranks is not None:
            out["target_rank_mean"] = self.target_ranks.mean
            out["target_rank_p95"] = self.target_ranks.p95
        return out


def compare_logprobs(
    train_logprobs: object,
    rollout_logprobs: object,
    mask: object = None,
    *,
    target_rank: object = None,
    percentiles: Sequence[float] = PERCENTILES,
    seq_dim: int = -1,
    cu_seqlens: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> MismatchStats:
    """Compare two sets of log-probabilities of the same tokens.

    Args:
        train_logprobs, rollout_logprobs: `[..., S, ...]` floating tensors (or what
            `torch.as_tensor` takes), in nats. What the mask leaves out may hold anything. A token
            may be impossible (-inf) under one of the two: its terms are what the formulas say.
        mask: same shape, bool or 0 and 1: the tokens that count (the sampled ones). None: all.
        target_rank: same shape, integer: rank of each token under the trainer. Negative ones
            (ignored targets) do not count in the histogram.
        percentiles: which percentiles of r, in percent.
        seq_dim: dimension of the sequence. The others number the sequences.
        cu_seqlens: `[sequences + 1]` cumulative lengths, where several sequences are packed along
            seq_dim, ending at S.
        group: data-parallel group whose ranks hold different sequences; every rank gets the
            statistics of all of them, exactly (all-gathers of the values that count; under NCCL
            set the process's device before). None: only this rank's. Where context-parallel
            ranks share a sequence, `context_parallel_gather` the inputs first.

    Raises:
        ValueError: shapes, dtypes or options that do not fit; a mask that is neither 0 nor 1, or
            that leaves no token; NaN at a token that counts (-inf in both is one). If one rank's
            arguments are wrong, or only some ranks have target_rank, every rank raises.
    """
    error: Exception | None = None
    try:
        percentiles = _checked_percentiles(percentiles)
        train, rollout = torch.as_tensor(train_logprobs), torch.as_tensor(rollout_logprobs)
        keep = torch.ones_like(train) if mask is None else torch.as_tensor(mask)
        ranks = None if target_rank is None else torch.as_tensor(target_rank)
        _check(train, rollout, keep, ranks, seq_dim)
        sequence = _sequence_numbers(train, seq_dim, cu_seqlens)
    except Exception as mistake:  # the other ranks are told before it is raised
        error = mistake
    _agree(error, target_rank is not None, group)

    def flat(x: Tensor) -> Tensor:  # sequence after sequence
        return x.detach().to(train.device).movedim(seq_dim, -1).flatten()

    kept = flat(keep).bool()
    rollout = flat(rollout).double()[kept]
    d = flat(train).double()[kept] - rollout
    lengths = sequence[kept].unique_consecutive(return_counts=True)[1]
    d, rollout, lengths = (_concatenated(x, group) for x in (d, rollout, lengths))
    if ranks is not None:
        ranks = _concatenated(flat(ranks).to(torch.int64)[kept], group)

    # Checked after the gathers, so that every rank of the group raises.
    if d.numel() == 0:
        raise ValueError("mask: expected at least one token, got none")
    bad = int(d.isnan().sum())
    if bad:
        raise ValueError(f"expected no NaN under the mask, got {bad} of {d.numel()} tokens")
    return _summary(d.cpu(), rollout.cpu(), lengths.cpu(), ranks, percentiles)


def _checked_percentiles(percentiles: Sequence[float]) -> tuple[float, ...]:
    if not isinstance(percentiles, Iterable):
        raise ValueError(f"percentiles: expected a sequence of numbers, got {percentiles!r}")
    checked = tuple(percentiles)
    for p in checked:
        if not isinstance(p, Real) or isinstance(p, bool) or not 0.0 <= float(p) <= 100.0:
            raise ValueError(f"percentiles: expected values from 0 to 100, got {p!r}")
    return checked


def _agree(error: Exception | None, has_ranks: bool, group: ProcessGroup | None) -> None:
    """Raise a rank's error on every rank of the group."""
    told = all_gather_objects((error and str(error), has_ranks), group)
    if error is not None:
        raise error
    for rank, (why, _) in enumerate(told):
        if why is not None:
            raise ValueError(f"rank {rank} of the group: {why}")
    if len({given for _, given in told}) > 1:
        without = [rank for rank, (_, given) in enumerate(told) if not given]
        raise ValueError(
            "target_rank: expected it on every rank of the group or on none, got None on rank "
            f"{', '.join(map(str, without))}"
        )


def report(stats: MismatchStats, path: str | PathLike[str] | None = None) -> str:
    """The statistics as text; with a path, also a figure there (format by suffix, such as .png).

    Raises:
        ImportError: a path is given and matplotlib is not installed.
    """
    ess, sequence_ess = stats.effective_sample_size, stats.sequence_effective_sample_size
    rows = [
        ("tokens / sequences", f"{stats.tokens} / {stats.sequences}"),
        ("KL(rollout || train), nats per token", ""),
        ("  k1 = -log r", f"{stats.k1:+.3e}"),
        ("  k2 = (log r)^2 / 2", f"{stats.k2:.3e}"),
        ("  k3 = r - 1 - log r", f"{stats.k3:.3e}"),
        ("|train - rollout|, mean", f"{stats.abs_diff_mean:.3e}"),
        ("|train - rollout|, max", f"{stats.abs_diff_max:.3e}"),
        ("effective sample size, tokens", f"{ess:.1f} ({ess / stats.tokens:.1%})"),
        (
            "effective sample size, sequences",
            f"{sequence_ess:.1f} ({sequence_ess / stats.sequences:.1%})",
        ),
        ("importance ratio r = p_train / p_rollout", ""),
        *((f"  {p:g}%", f"{value:.4f}") for p, value in stats.ratio_percentiles.items()),
        ("sequence ratio, min to max", _span(stats.sequence_ratio)),
        ("  geometric mean per token", _span(stats.sequence_ratio_normalized)),
    ]
    ranks = stats.target_ranks
    if ranks is not None:
        total = max(sum(ranks.counts), 1)
        rows.append(
            (
                "target rank, mean / median / 95%",
                f"{ranks.mean:.2f} / {ranks.median:g} / {ranks.p95:g}",
            )
        )
        for label, count in zip(ranks.labels, ranks.counts, strict=True):
            rows.append((f"  rank {label}", f"{count} ({count / total:.1%})"))
    if path is not None:
        _figure(stats).savefig(path, dpi=120)
    return "\n".join(f"{name:<42}{value}".rstrip() for name, value in rows)


def _check(
    train: Tensor, rollout: Tensor, keep: Tensor, ranks: Tensor | None, seq_dim: int
) -> None:
    shape = list(train.shape)
    if not train.is_floating_point() or not rollout.is_floating_point():
        raise ValueError(
            f"log-probabilities: expected floating dtypes, got {train.dtype} and {rollout.dtype}"
        )
    check_integer("seq_dim", seq_dim)
    if not -train.dim() <= seq_dim < train.dim():
        raise ValueError(f"seq_dim: expected a dimension of shape {shape}, got {seq_dim}")
    for name, x in (("rollout_logprobs", rollout), ("mask", keep), ("target_rank", ranks)):
        if x is not None and list(x.shape) != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {list(x.shape)}")
    check_zero_or_one(keep)
    if ranks is not None and (ranks.is_floating_point() or ranks.dtype is torch.bool):
        raise ValueError(f"target_rank: expected an integer dtype, got {ranks.dtype}")


def check_zero_or_one(mask: Tensor) -> None:
    """A mask of bools, or of numbers that are 0 or 1, or a ValueError."""
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError("mask: expected only 0 and 1")


def _sequence_numbers(like: Tensor, seq_dim: int, cu_seqlens: Tensor | None) -> Tensor:
    """The number of each token's sequence, ascending, in the order of `flat`."""
    length = like.shape[seq_dim]
    token = torch.arange(like.numel(), device=like.device)
    row = token // max(length, 1)
    if cu_seqlens is None:
        return row
    bounds = torch.as_tensor(cu_seqlens, device=like.device)
    if bounds.dim() != 1 or bounds.is_floating_point() or bounds.numel() < 2:
        raise ValueError(
            "cu_seqlens: expected integers [sequences + 1], got "
            f"{bounds.dtype} {list(bounds.shape)}"
        )
    if bounds[0] != 0 or bounds[-1] != length or (bounds.diff() < 0).any():
        raise ValueError(f"cu_seqlens: expected to rise from 0 to {length}, got {bounds.tolist()}")
    return row * bounds.numel() + torch.searchsorted(bounds, token % max(length, 1), right=True)


def _concatenated(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The ranks' 1-D tensors, of whatever lengths, one after another. Two all-gathers."""
    sizes = all_gather_dim0(torch.tensor([x.numel()], device=x.device), group).tolist()
    padded = x.new_zeros(max(sizes))
    padded[: x.numel()] = x
    parts = all_gather_dim0(padded, group).view(len(sizes), -1)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _summary(
    d: Tensor,
    rollout: Tensor,
    lengths: Tensor,
    ranks: Tensor | None,
    percentiles: Sequence[float],
) -> MismatchStats:
    owner = torch.arange(lengths.numel()).repeat_interleave(lengths)
    sums = torch.zeros(lengths.numel(), dtype=torch.float64).index_add_(0, owner, d)
    ratios = d.exp().sort().values
    return MismatchStats(
        tokens=d.numel(),
        sequences=lengths.numel(),
        k1=-d.mean().item(),
        k2=d.square().mean().item() / 2,
        # expm1 keeps the small differences that exp(d) - 1 would round away.
        k3=torch.where(d.isinf(), float("inf"), d.expm1() - d).mean().item(),
        abs_diff_mean=d.abs().mean().item(),
        abs_diff_max=d.abs().max().item(),
        ratio_percentiles={p: _percentile(ratios, p) for p in percentiles},
        effective_sample_size=_effective_sample_size(d),
        sequence_ratio=sums.exp(),
        sequence_ratio_normalized=(sums / lengths).exp(),
        sequence_effective_sample_size=_effective_sample_size(sums),
        target_ranks=None if ranks is None else _rank_histogram(ranks.cpu()),
        log_ratio=d,
        rollout_logprobs=rollout,
    )


def _effective_sample_size(log_weights: Tensor) -> float:
    # In logarithms: a sequence's ratio overflows long before its sample size means nothing.
    once, twice = (torch.logsumexp(k * log_weights, 0) for k in (1, 2))
    return (2 * once - twice).exp().item()


def _percentile(ordered: Tensor, percent: float) -> float:
    """With linear interpolation, of ascending values (torch.quantile stops at 2^24 of them)."""
    place = percent / 100 * (ordered.numel() - 1)
    below = int(place)
    low = ordered[below].item()
    if place == below:
        return low
    high = ordered[below + 1].item()
    return low if low == high else low + (place - below) * (high - low)


def _rank_histogram(ranks: Tensor) -> RankHistogram | None:
    ordered = ranks[ranks >= 0].sort().values
    if ordered.numel() == 0:
        return None
    n_bins = int(ordered[-1]).bit_length() + 1
    first = [0, *(1 << k for k in range(n_bins - 1))]
    starts = torch.searchsorted(ordered, torch.tensor([*first, 1 << (n_bins - 1)]))
    values = ordered.double()
    return RankHistogram(
        first=tuple(first),
        last=(0, *((2 << k) - 1 for k in range(n_bins - 1))),
        counts=tuple(starts.diff().tolist()),
        mean=values.mean().item(),
        median=_percentile(values, 50),
        p95=_percentile(values, 95),
    )


def _span(x: Tensor) -> str:
    return f"{x.min().item():.4g} to {x.max().item():.4g}"


def _finite(x: Tensor) -> list[float]:
    return x[x.isfinite()].tolist()


def _figure(stats: MismatchStats) -> Any:
    """A matplotlib Figure, drawn without a display or pyplot's global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'the report\'s figure needs matplotlib: pip install "mcore-logprobs[examples]"'
        ) from error
    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2)

    axes[0, 0].hist(_finite(stats.log_ratio), bins=80, log=True)
    axes[0, 0].set(title="log r by token", xlabel="train - rollout (nats)", ylabel="tokens")

    # At most 20 000 points: more make the file large and the picture no clearer.
    step = -(-stats.tokens // 20_000)
    q = stats.rollout_logprobs[::step].exp()
    p = (stats.rollout_logprobs + stats.log_ratio)[::step].exp()
    axes[0, 1].plot([0, 1], [0, 1], color="gray", linewidth=1)
    axes[0, 1].scatter(q.tolist(), p.tolist(), s=4, alpha=0.4)
    axes[0, 1].set(title="probability", xlabel="rollout", ylabel="train")

    axes[1, 0].hist(_finite(stats.sequence_ratio_normalized), bins=40)
    axes[1, 0].set(
        title="sequence ratio, geometric mean per token", xlabel="ratio", ylabel="sequences"
    )

    ranks = stats.target_ranks
    if ranks is None:
        percents = list(stats.ratio_percentiles)
        axes[1, 1].plot(percents, list(stats.ratio_percentiles.values()), marker="o")
        axes[1, 1].set(title="r = p_train / p_rollout", xlabel="percentile", ylabel="r")
    else:
        axes[1, 1].bar(ranks.labels, ranks.counts, log=True)
        axes[1, 1].set(title="target rank under the trainer", xlabel="rank", ylabel="tokens")
        axes[1, 1].tick_params(axis="x", rotation=45)
    figure.suptitle(
        f"train against rollout: k3 {stats.k3:.2e}, max |d| {stats.abs_diff_max:.2e}, "
        f"ESS {stats.effective_sample_size / stats.tokens:.1%}"
    )
    return figure
