"""The rank of each target among all logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.collectives import all_reduce_sum
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.logits.inputs import check_target, localize_target, open_logits
from mcore_logprobs.logits.rows import Rows
from mcore_logprobs.logits.token_stats import target_logits

__all__ = ["vocab_parallel_target_rank"]


@torch.no_grad()
def vocab_parallel_target_rank(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    ignore_index: int | None = -100,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """How many columns have a larger logit than the target's: 0 is the argmax.

    Shape:
        vocab_parallel_logits `[..., V/TP]`, target `[...]` of global ids -> int64 `[...]`; -1 where
        the target is ignore_index. Ties count as not higher. Not differentiable.

    Collectives: two all-reduces of `[n]` over TP. The logits are read once.

    Keywords and errors are `vocab_parallel_token_stats`'s; a temperature cannot change a rank.
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
    target = check_target(target, logits.shape[:-1], logits.device)
    local = localize_target(target, shard, ignore_index)
    rows = Rows(logits)
    column = rows.flat(local.column)
    blocks = list(rows.blocks(logits))
    threshold = target_logits(blocks, column, shard)
    kernel = backends.select(backend, logits)
    counts = torch.cat(
        [
            kernel.count_higher(
                block,
                column[part],
                threshold[part],
                valid=shard.valid_width,
                chunk_size=chunk_size or backends.default_chunk_size(shard.width, logits.device),
            )
            for part, block in blocks
        ]
    )
    total = all_reduce_sum(counts, shard.group)
    return torch.where(local.keep, rows.unflat(total), -1)
