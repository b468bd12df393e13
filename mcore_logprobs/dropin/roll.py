"""ROLL's `mcore_adapter.parallel_functions` and `roll.third_party.megatron.tensor_parallel`.

    from mcore_logprobs.dropin.roll import vocab_parallel_logprobs, vocab_parallel_target_rank

`MegatronInferStrategy` has only the methods of ROLL's class that work on sharded logits;
`switch_on("roll")` puts these into ROLL's class and leaves the rest of it.

On Megatron's own groups. Targets are used as they are (not shifted); log-probabilities are positive
(not a loss); a target of -100 gives 0, and a rank of -1, where ROLL counts its column 0's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

import mcore_logprobs as ours
from mcore_logprobs.collectives import all_gather_stack, all_reduce_sum
from mcore_logprobs.dropin._common import IGNORED, ONE_PROCESS, share_of_gradient

__all__ = [
    "MegatronInferStrategy",
    "VocabUtility",
    "context_parallel_gather",
    "cross_entropy",
    "encoder_sequence_parallel_gather",
    "encoder_small_batch_size_gather",
    "vocab_parallel_entropy",
    "vocab_parallel_logprobs",
    "vocab_parallel_target_rank",
]


class VocabUtility:
    """Which global ids a rank owns, `[start, end)`, where the vocabulary is split evenly."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> Sequence[int]:
        """(start, end) of `rank`, from the columns on each rank."""
        start = rank * per_partition_vocab_size
        return start, start + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> Sequence[int]:
        """(start, end) of `rank`, from all columns.

        Raises:
            ValueError: they do not divide by world_size.
        """
        if global_vocab_size % world_size:
            raise ValueError(
                f"global_vocab_size: expected a multiple of {world_size}, got {global_vocab_size}"
            )
        return VocabUtility.vocab_range_from_per_partition_vocab_size(
            global_vocab_size // world_size, rank, world_size
        )


def vocab_parallel_logprobs(
    vocab_parallel_logits: Tensor, target: Tensor, use_fused_kernel: bool = True
) -> Tensor:
    """`[b, s, V/TP]`, global ids `[b, s]` -> float32 `[b, s]`; differentiable.

    use_fused_kernel: ignored; the best backend that is available computes at any TP.
    """
    return ours.vocab_parallel_logprobs(vocab_parallel_logits, target)


def vocab_parallel_target_rank(vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
    """`[b, s, V/TP]`, global ids `[b, s]` -> int64 `[b, s]`, 0 for the largest logit."""
    return ours.vocab_parallel_target_rank(vocab_parallel_logits, target)


def vocab_parallel_entropy(
    vocab_parallel_logits: Tensor, used_fp32: bool = True, use_fused_kernel: bool = True
) -> Tensor:
    """`[b, s, V/TP]` -> float32 `[b, s]`, in nats (>= 0); differentiable.

    used_fp32, use_fused_kernel: ignored; statistics are float32 without a copy of the logits.
    """
    return ours.vocab_parallel_entropy(vocab_parallel_logits)


class MegatronInferStrategy:
    """The methods of ROLL's class of this name that work on sharded logits."""

    def op_compute_topk_logits(self, logits: Tensor, topk: int = 0) -> tuple[Tensor, Tensor | None]:
        """(values, global ids) of the largest logits; for topk=0 (all logits, None).

        Shape: `[b, s/CP, V/TP]` -> `[b, s, topk]` each, or `[b, s, V]`; values in the logits'
        dtype. On every TP and CP rank; backward for a loss that every rank computes.

        The order is by value, then by id, so that it does not depend on TP. topk may exceed V/TP.
        Collectives: one all-gather of values and ids over TP, where ROLL has two; then one each
        over CP, as in ROLL.
        """
        from megatron.core import parallel_state, tensor_parallel

        if topk > 0:
            values, ids = ours.vocab_parallel_topk(logits, topk)
            values = values.to(logits.dtype)
        else:
            # Megatron's own gather of columns splits the gradient, as `grad="slice"` does for CP.
            values, ids = tensor_parallel.gather_from_tensor_model_parallel_region(logits), None
        if parallel_state.get_context_parallel_world_size() > 1:
            values = context_parallel_gather(values, parallel_dim=1)
            ids = None if ids is None else context_parallel_gather(ids, parallel_dim=1)
        return values, ids

    def op_compute_gather_by_teacher_indices(
        self, student_logits: Tensor, teacher_indices: Tensor | None
    ) -> Tensor:
        """The student's logits at a teacher's ids; differentiable.

        Shape: `[b, s/CP, V/TP]`, global ids `[b, s/CP, k]` or `[b, s/CP]` -> as the ids, in the
        logits' dtype, on every TP rank. Ids of None: the logits as they are.

        Collectives: one all-reduce over TP, backward none, as in ROLL. An id outside the vocabulary
        is an error; at TP > 1 ROLL gives it a logit of 0. -100 gives 0.
        """
        if teacher_indices is None:
            return student_logits
        ids = teacher_indices.unsqueeze(-1) if teacher_indices.dim() == 2 else teacher_indices
        values = ours.vocab_parallel_gather(student_logits, ids)
        return values.view(teacher_indices.shape).to(student_logits.dtype)

    def op_compute_language_loss_from_logits(
        self, logits: Tensor, targets: Tensor, reduction: str = "mean"
    ) -> tuple[Tensor, Tensor]:
        """(sum or mean of -log p of the next tokens, float32; their number, int64).

        Shape: logits `[b, s/CP, V/TP]`, targets `[b, s]`, whole on every CP rank; -100 does not
        count. Each of a rank's two zigzag pieces predicts its own tokens only: the first token of a
        piece is not a target, as in ROLL.

        Collectives: one all-gather over TP; the sums and counts are added up over CP, where the
        gradient is that of the rank's own tokens, as in ROLL.

        Raises:
            ValueError: reduction is neither "mean" nor "sum".
        """
        from megatron.core import parallel_state

        if reduction not in ("mean", "sum"):
            raise ValueError(f'reduction: expected "mean" or "sum", got {reduction!r}')
        mine = self._get_feature_on_this_cp_rank(targets, "targets")  # type: ignore[attr-defined]
        whole = parallel_state.get_context_parallel_world_size() == 1
        pieces = mine.unflatten(1, (1 if whole else 2, -1))
        target = pieces.roll(-1, dims=-1)
        target[..., -1] = IGNORED
        target = target.flatten(1)
        loss = -ours.vocab_parallel_logprobs(logits, target).sum()
        count = (target != IGNORED).sum()
        if not whole:
            sums = torch.stack([loss.detach(), count.to(loss.dtype)])
            sums = all_reduce_sum(sums, parallel_state.get_context_parallel_group())
            loss = sums[0] + (loss - loss.detach())  # the value of all ranks
            count = sums[1].to(torch.int64)
        if reduction == "mean":
            loss = loss / count.clamp(min=1)
        return loss, count


def cross_entropy(
    x: Tensor,
    target: Tensor,
    lse_partial: Tensor | None = None,
    ignore_index: int = IGNORED,
    reduction: Literal["none", "mean", "sum"] = "mean",
    inplace_backward: bool = False,
) -> Tensor:
    """-log p of each target, on one process: `[n, V]`, ids `[n]` -> float32 `[n]` or a scalar.

    Args:
        lse_partial: `[n, parts]`, the log-sum-exp of parts of the columns. The normalizer is the
            log-sum-exp of these, without a gradient of its own; the gradient of x is that of the
            formula with this normalizer. Columns that x lacks may be among the parts.
        reduction: "mean" divides by the number of targets that are not ignore_index.
        inplace_backward: write the gradient over x. Not with lse_partial.

    Raises:
        ValueError: an unknown reduction, lse_partial of another shape or with inplace_backward, or
            an x that inplace_backward cannot overwrite (a leaf, for example).
    """
    one = {"tp_group": ONE_PROCESS, "ignore_index": ignore_index}
    stats = ours.vocab_parallel_token_stats(x, target, inplace_backward=inplace_backward, **one)
    loss = stats.loss
    if lse_partial is not None:
        loss = _renormalized(stats, _lse_of(lse_partial, x, target, inplace_backward, one))
    if reduction == "mean":
        return loss.sum() / (target != ignore_index).sum()
    if reduction == "sum":
        return loss.sum()
    if reduction == "none":
        return loss
    raise ValueError(f'reduction: expected "none", "mean" or "sum", got {reduction!r}')


def _lse_of(
    lse_partial: Tensor, x: Tensor, target: Tensor, inplace_backward: bool, one: dict[str, Any]
) -> Tensor:
    if lse_partial.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"lse_partial: expected the shape {(*x.shape[:-1], 'parts')}, got "
            f"{tuple(lse_partial.shape)}"
        )
    if inplace_backward:
        raise ValueError("inplace_backward: expected False with lse_partial, got True")
    any_part = target.masked_fill(target != one["ignore_index"], 0)
    lse = ours.vocab_parallel_token_stats(lse_partial.detach(), any_part, **one).lse
    assert lse is not None
    return lse


def _renormalized(stats: ours.TokenStats, normalizer: Tensor) -> Tensor:
    """normalizer - logit of the target, with the gradient exp(x - normalizer) - 1[target]."""
    assert stats.lse is not None
    local_lse = stats.lse.detach()
    # exp(x - normalizer) is this much of these columns' own softmax, the gradient of their lse.
    share = (local_lse - normalizer).exp()
    return normalizer - (stats.logprobs + stats.lse) + share * (stats.lse - local_lse)


def context_parallel_gather(context_parallel_input: Tensor, parallel_dim: int = -1) -> Tensor:
    """The whole sequence from Megatron's CP ranks' zigzag parts along `parallel_dim`.

    The backward takes each rank's own part of the gradient: for a loss that every rank computes.
    """
    return ours.context_parallel_gather(context_parallel_input, seq_dim=parallel_dim, grad="slice")


class _GatherItems(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plans: list[list[int]], sizes: list[int], group: Any
    ) -> Tensor:
        ctx.mine, ctx.sizes = plans[group.rank()], sizes
        rows = [sum(sizes[item] for item in plan) for plan in plans]
        padded = x.new_zeros(max(rows), *x.shape[1:])
        padded[: x.shape[0]] = x
        items: dict[int, Tensor] = {}
        for plan, count, part in zip(plans, rows, all_gather_stack(padded, group), strict=True):
            pieces = part[:count].split([sizes[item] for item in plan])
            items.update(zip(plan, pieces, strict=True))
        return torch.cat([items[item] for item in range(len(sizes))])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        items = grads[0].split(ctx.sizes)
        return torch.cat([grads[0][:0], *(items[item] for item in ctx.mine)]), None, None, None


def encoder_sequence_parallel_gather(
    input_: Tensor, split_plan: Sequence[Sequence[Any]], input_size_list: Sequence[int]
) -> Tensor:
    """Every item of an encoder's batch, in its original order, from the TP x CP ranks' shares.

    Shape: input_ `[rows of this rank's items, ...]`; `[sum(input_size_list), ...]` returned.

    split_plan: for each rank its items in order, as pairs (anything, original index).
    input_size_list: the rows of each item. The backward takes this rank's items' rows of the
    gradient: for a loss that every rank computes. Collectives: one all-gather, backward none.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_and_context_parallel_group()
    if group.size() == 1:
        return input_
    plans = [[pair[1] for pair in plan] for plan in split_plan]
    return _GatherItems.apply(input_, plans, list(input_size_list), group)


def encoder_small_batch_size_gather(input_: Tensor) -> Tensor:
    """The input itself, which every TP rank has computed whole; the backward divides by TP."""
    from megatron.core import parallel_state

    return share_of_gradient(input_, parallel_state.get_tensor_model_parallel_world_size())
