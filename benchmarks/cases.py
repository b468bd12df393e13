"""Cases that only the authors measure: `python -m benchmarks.cases cp|sampling|topk [options]`.

Options, tables and ranks are those of `python -m mcore_logprobs bench`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import mcore_logprobs as m
from mcore_logprobs.bench import cli
from mcore_logprobs.bench.cases import Shape, top_p_logprobs
from mcore_logprobs.bench.runner import Contender, Workload
from mcore_logprobs.context_parallel import context_parallel_gather
from mcore_logprobs.groups import group_rank, group_size, resolve_tp_group
from mcore_logprobs.ops.all_to_all import all_to_all_vp2sp


def cp_case(shape: Shape) -> Workload:
    """Context-parallel helpers over the world: gather with both gradients, shift, shard."""
    group = shape.group
    whole = shape.rows - shape.rows % (2 * group_size(group))
    local = torch.randn(8, whole // group_size(group), device=shape.device).requires_grad_()
    full = torch.randn(8, whole, device=shape.device)
    contenders = [
        Contender(
            "gather, grad=sum", lambda x: m.context_parallel_gather(x, cp_group=group), [local]
        ),
        Contender(
            "gather, grad=slice",
            lambda x: m.context_parallel_gather(x, cp_group=group, grad="slice"),
            [local],
        ),
        Contender(
            "shift",
            lambda x: m.context_parallel_shift(x, cp_group=group),
            [local.detach()],
            differentiable=False,
        ),
        Contender(
            "shard",
            lambda x: m.context_parallel_shard(x, cp_group=group),
            [full],
            differentiable=False,
        ),
    ]
    size = {"batch": 8, "sequence": whole, "cp": group_size(group)}
    return Workload("context parallelism", size, contenders)


def sampling_case(shape: Shape) -> Workload:
    """Sampling log-probabilities on peaked and flat rows, beside the all-to-all way."""
    target = shape.targets()
    rows = shape.rows - shape.rows % group_size(shape.group)
    target = target[:rows]
    contenders = []
    for name, std in (("peaked", 8.0), ("flat", 0.5)):
        logits = shape.randn(rows, shape.width, std=std, shared=False).requires_grad_()
        for way, function in (
            ("candidates", m.vocab_parallel_sampling_logprobs),
            ("all-to-all", alltoall_sampling_logprobs),
        ):
            contenders.append(
                Contender(
                    f"{way}, {name}",
                    lambda z, f=function: f(z, target, top_p=0.95, tp_group=shape.group),
                    [logits],
                )
            )
    return Workload(
        "sampling log-probabilities, top-p 0.95", shape.describe(hidden=False), contenders
    )


def topk_case(shape: Shape) -> Workload:
    """Global top-k of sharded rows beside a local torch.topk of the same shard."""
    logits = shape.randn(shape.rows, shape.width, std=4.0, shared=False)
    contenders = [
        Contender(
            "torch.topk of the shard",
            lambda z: z.topk(64, -1)[0],
            [logits],
            differentiable=False,
            is_floor=True,
        ),
        Contender(
            "vocab_parallel_topk",
            lambda z: m.vocab_parallel_topk(z, 64, tp_group=shape.group)[0],
            [logits],
            differentiable=False,
        ),
    ]
    return Workload("top-k, k = 64", shape.describe(hidden=False), contenders)


# ---- the usual way to sampling log-probabilities ----


def alltoall_sampling_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    top_p: float,
    tp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """`vocab_parallel_sampling_logprobs` of `[n, V/TP]`, n divisible by TP. Differentiable.

    All-to-all over TP turns every row's part of the vocabulary into part of the rows' whole
    vocabulary; each rank sorts and filters its rows as an inference engine would.

    Collectives: one all-to-all of the logits, forward and backward, and one all-gather of `[n/TP]`.
    """
    group = resolve_tp_group(tp_group)
    whole = all_to_all_vp2sp(vocab_parallel_logits, tp_group=group)  # [n/TP, V]
    rows = whole.shape[0]
    mine = target[group_rank(group) * rows :][:rows]
    chunks = zip(whole.split(chunk_size or rows), mine.split(chunk_size or rows), strict=True)
    logprobs = torch.cat([top_p_logprobs(x.float(), t, top_p) for x, t in chunks])
    if group_size(group) == 1:
        return logprobs
    return context_parallel_gather(
        logprobs, cp_group=group, seq_dim=0, layout="contiguous", grad="slice"
    )


CASES: dict[str, Callable[[Shape], Workload]] = {
    "cp": cp_case,
    "sampling": sampling_case,
    "topk": topk_case,
}
SIZES: cli.Sizes = {
    "cpu": {
        "cp": ([16384], 0, 0),
        "sampling": ([64], 65536, 0),
        "topk": ([128], 65536, 0),
    },
    "cuda": {
        "cp": ([131072], 0, 0),
        "sampling": ([1024], 152064, 0),
        "topk": ([4096], 152064, 0),
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cases that the arguments ask for; returns the exit status."""
    given: dict[str, Any] = {
        "cases": "benchmarks.cases",
        "sizes": SIZES,
        "default": [*SIZES["cpu"]],
    }
    return cli.main(argv, **given, prog="python -m benchmarks.cases")


if __name__ == "__main__":
    sys.exit(main())
