"""A vocabulary sharded one way, sharded another way, or only some of its ids."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import check_float_tensor, check_target, global_to_local
from mcore_logprobs.collectives import all_gather_stack, all_reduce_sum
from mcore_logprobs.consistency import check_call, comparing
from mcore_logprobs.groups import VocabShard, group_rank, group_size, resolve_tp_group
from mcore_logprobs.spelling import suggesting


@torch.no_grad()
@suggesting
def reshard_vocabulary(
    shard: Tensor,
    ids: Tensor | None = None,
    *,
    dim: int,
    source_group: ProcessGroup | None = None,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """This rank's shard, over tp_group, of a vocabulary that is sharded over source_group.

    Two uses, both for a teacher, as no gradient flows: a teacher of another TP than the student's
    (source_group is the teacher's), and a draft head whose vocabulary is a part of the teacher's
    (ids are the teacher's ids of the draft's ids 0, 1, ...).

        draft_weight = reshard_vocabulary(teacher_weight, draft_to_target, dim=0)
        linear_kl_div(hidden, draft_head, teacher_hidden=h, teacher_weight=draft_weight)

    Shape:
        shard: `[V/source TP, h]` with dim=0 (a head's weight, once), or `[..., V/source TP]` with
            dim=-1 (logits); float16, bfloat16, float32 or float64.
        ids: `[m]` integers, global ids of the source, the same on every rank; None: all V in order.
        Returns the same with m/TP (V/TP) instead of V/source TP.

    Args:
        source_group: the ranks that share the vocabulary as it is; None: as for tp_group.
        tp_group: the ranks that are to share it. Every rank of source_group calls this, and the
            ranks of tp_group may be others.

    Collectives: over source_group one all-gather of two numbers per rank (a host sync), then an
    all-reduce of a resulting shard for each different one that its ranks want. Memory: two of them.

    Raises:
        ValueError: before any collective, m (V) that tp_group does not divide, ids out of range;
            on every rank at a first call, shards of other sizes or dtypes and another dim.
    """
    check_float_tensor("shard", shard, min_dim=1)
    if dim not in (-1, 0):
        raise ValueError(f"dim: expected 0 or -1, got {dim!r}")
    if dim == 0 and shard.dim() > 2:
        raise ValueError(
            f"dim: expected -1 for logits [..., V/TP] of {shard.dim()} dimensions, got 0"
        )
    source, wanted_by = resolve_tp_group(source_group), resolve_tp_group(tp_group)
    if source is not None:
        others = [size for place, size in enumerate(shard.shape) if place != dim % shard.dim()]
        described = {"logits": shard, "ids": ids, "dim": dim, "dtype": shard.dtype, "sizes": others}
        with comparing("reshard_vocabulary", lambda: described):
            check_call(shard.shape[dim], source, shard.device)
    vocab = VocabShard.of(shard.shape[dim], source, None)
    if ids is None:
        ids = torch.arange(vocab.padded_size, device=shard.device)
    count = ids.numel() if isinstance(ids, Tensor) else 0
    ids = check_target(ids, torch.Size((count,)), shard.device, name="ids")
    local, _ = global_to_local(ids, vocab, None, name="ids")
    size = group_size(wanted_by)
    if count % size or not count:
        raise ValueError(f"ids: expected a number divisible by TP {size}, got {count}")
    mine = torch.tensor([size, group_rank(wanted_by)], device=shard.device)
    asked_by_rank = [tuple(pair) for pair in all_gather_stack(mine, source).tolist()]
    own_piece = shard
    for parts, part in sorted(set(asked_by_rank)):
        column = local.view(parts, -1)[part]
        piece = shard.index_select(dim, column.clamp(min=0))
        shape = [1] * shard.dim()
        shape[dim] = -1
        piece = all_reduce_sum(piece.masked_fill_((column < 0).view(shape), 0), source)
        if (parts, part) == asked_by_rank[group_rank(source)]:
            own_piece = piece
    return own_piece
