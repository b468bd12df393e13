"""The usual way to sampling log-probabilities: re-shard by rows, sort, filter. And a race with it.

All-to-all over TP turns every row's part of the vocabulary into part of the rows' whole vocabulary;
each rank sorts and filters its rows as an inference engine would, and the results are gathered. The
baseline of the sampling benchmark, in plain torch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.bench.counting import CollectivesMade
from mcore_logprobs.context_parallel import context_parallel_gather
from mcore_logprobs.groups import group_rank, group_size, resolve_tp_group
from mcore_logprobs.ops.all_to_all import all_to_all_vp2sp
from mcore_logprobs.ops.sampling import vocab_parallel_sampling_logprobs

__all__ = ["SamplingRace", "alltoall_sampling_logprobs", "race"]


def alltoall_sampling_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    top_k: int | None = None,
    top_p: float = 1.0,
    temperature: float = 1.0,
    tp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """As `vocab_parallel_sampling_logprobs`, for `[n, V/TP]`, n divisible by TP. Differentiable.

    Collectives: one all-to-all of the logits, forward and backward, and one all-gather of `[n/TP]`.
    """
    group = resolve_tp_group(tp_group)
    whole = all_to_all_vp2sp(vocab_parallel_logits, tp_group=group)  # [n/TP, V]
    rows = whole.shape[0]
    mine = target[group_rank(group) * rows :][:rows]
    chunks = zip(whole.split(chunk_size or rows), mine.split(chunk_size or rows), strict=True)
    logprobs = torch.cat([_filtered(x, t, top_k, top_p, temperature) for x, t in chunks])
    if group_size(group) == 1:
        return logprobs
    return context_parallel_gather(
        logprobs, cp_group=group, seq_dim=0, layout="contiguous", grad="slice"
    )


def _filtered(
    logits: Tensor, target: Tensor, top_k: int | None, top_p: float, temperature: float
) -> Tensor:
    z = logits.float() / temperature
    with torch.no_grad():
        dropped = torch.zeros_like(z, dtype=torch.bool)
        ordered, order = z.sort(dim=-1, descending=True, stable=True)
        if top_k is not None:
            kth = ordered[:, top_k - 1 : top_k]
            dropped = z < kth
            ordered = ordered.masked_fill(ordered < kth, -torch.inf)
        if top_p < 1.0:
            p = ordered.softmax(-1)
            late = p.cumsum(-1).sub_(p) >= top_p
            late[:, 0] = False
            dropped |= torch.empty_like(late).scatter_(-1, order, late)
    z = z.masked_fill(dropped, -torch.inf)
    return z.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class SamplingRace:
    """Medians over interleaved rounds, of the slowest rank, in seconds; bytes that a rank sends.

    `forward` and `both` (forward and backward) are the seconds of (this package, all-to-all), and
    `sent` and `sent_both` the bytes.
    """

    forward: tuple[float, float]
    both: tuple[float, float]
    sent: tuple[int, int]
    sent_both: tuple[int, int]
    worst_difference: float


def race(
    rows: int,
    vocab: int,
    *,
    spread: float,
    top_k: int | None = None,
    top_p: float = 1.0,
    dtype: torch.dtype = torch.float32,
    rounds: int = 3,
    tp_group: ProcessGroup | None = None,
) -> SamplingRace:
    """Run on every rank of the group: both ways on the same random rows.

    Args:
        spread: standard deviation of the logits. 8 gives rows as peaked as a trained model's, 0.5
            nearly flat ones.
    """
    group = resolve_tp_group(tp_group)
    size, width = group_size(group), vocab // group_size(group)
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(rows, vocab, generator=generator).mul_(spread)
    target = torch.distributions.Categorical(logits=whole).sample()
    if group is not None:
        dist.broadcast(target, dist.get_global_rank(group, 0), group=group)
    start = group_rank(group) * width
    logits = whole[:, start : start + width].to(dtype).contiguous().requires_grad_()
    del whole
    ways = [
        lambda: vocab_parallel_sampling_logprobs(
            logits, target, top_k=top_k, top_p=top_p, tp_group=group
        ),
        lambda: alltoall_sampling_logprobs(
            logits, target, top_k=top_k, top_p=top_p, tp_group=group, chunk_size=16
        ),
    ]
    sent, sent_both, outs = [], [], []
    for way in ways:
        with CollectivesMade() as made:
            out = way()
        sent.append(_sent(made, size))
        with CollectivesMade() as made:
            torch.autograd.grad(out, logits, torch.ones_like(out))
        sent_both.append(sent[-1] + _sent(made, size))
        outs.append(out.detach())
    same = outs[0].isfinite() & outs[1].isfinite()
    difference = (outs[0] - outs[1])[same].abs().amax() if same.any() else torch.zeros(())
    forward: list[list[float]] = [[], []]
    both: list[list[float]] = [[], []]
    for _ in range(rounds):
        for i, way in enumerate(ways):
            forward[i].append(_seconds(lambda way=way: way().detach(), group))  # type: ignore[misc]
            both[i].append(
                _seconds(
                    lambda way=way: torch.autograd.grad(way().nan_to_num(neginf=0.0).sum(), logits),  # type: ignore[misc]
                    group,
                )
            )
    return SamplingRace(
        forward=(statistics.median(forward[0]), statistics.median(forward[1])),
        both=(statistics.median(both[0]), statistics.median(both[1])),
        sent=(sent[0], sent[1]),
        sent_both=(sent_both[0], sent_both[1]),
        worst_difference=float(difference),
    )


def _sent(made: CollectivesMade, size: int) -> int:
    """Bytes that leave one rank, with ring algorithms for the all-gather and all-reduce."""
    share = {"all_gather": size - 1, "all_reduce": 2 * (size - 1) / size}
    return int(sum(c.nbytes * share.get(c.name, (size - 1) / size) for c in made.made))


def _seconds(run: Callable[[], object], group: ProcessGroup | None) -> float:
    if group is not None:
        dist.barrier(group=group)
    start = time.perf_counter()
    run()
    elapsed = torch.tensor(time.perf_counter() - start)
    if group is not None:
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX, group=group)
    return float(elapsed)
