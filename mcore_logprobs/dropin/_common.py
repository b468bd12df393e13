"""What the drop-in names share: groups, ranges and sequences as those projects mean them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

import mcore_logprobs as ours
from mcore_logprobs.groups import group_rank, group_size, resolve_tp_group

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

IGNORED = -100  # a target that asks for nothing


# ---- groups and ranges ---------------------------------------------------------------------------


class _OneProcess:
    """Stands for a group of only this process, for NeMo-RL functions that mean it by None.

    Our own None means Megatron's group, which is not the same; and a real group of one rank would
    have to be made by every rank.
    """

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


ONE_PROCESS: Any = _OneProcess()


def or_one_process(group: ProcessGroup | None) -> ProcessGroup:
    """The group; only this process for None."""
    return ONE_PROCESS if group is None else group


def or_every_rank(group: ProcessGroup | None) -> ProcessGroup:
    """The group; every rank for None, as where a framework hands it to `torch.distributed`.

    Only this process if `torch.distributed` is not initialized.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    return or_one_process(group)


def check_vocab_range(
    vocab_start_index: int, vocab_end_index: int, width: int, group: ProcessGroup | None
) -> None:
    """Hold a caller's `[start, end)` to what the group's rank owns; group None: every rank's.

    Raises:
        ValueError: it is another range than `[rank * width, (rank + 1) * width)`.
    """
    resolved = resolve_tp_group(or_every_rank(group))
    rank = group_rank(resolved)
    expected = (rank * width, (rank + 1) * width)
    if (int(vocab_start_index), int(vocab_end_index)) != expected:
        raise ValueError(
            f"vocab_start_index, vocab_end_index: expected {expected} for rank {rank} of "
            f"{group_size(resolved)} with {width} columns, got "
            f"({vocab_start_index}, {vocab_end_index})"
        )


# ---- calls ---------------------------------------------------------------------------------------


def applied(function: Callable[..., object]) -> Any:
    """A class whose `apply` is the function: for names that are called as autograd functions are.

    There is no backward: the operations within bring their own.
    """
    described = {name: getattr(function, name) for name in ("__doc__", "__module__")}
    return type(function.__name__, (), {"apply": staticmethod(function), **described})


def grad_unless(inference_only: bool) -> contextlib.AbstractContextManager[object]:
    """No gradient where `inference_only`; else as the caller has it."""
    return torch.no_grad() if inference_only else contextlib.nullcontext()


def setting(node: object, name: str, default: object = None) -> Any:
    """A field of a framework's configuration: a mapping, an OmegaConf node, args or a dataclass."""
    if isinstance(node, Mapping):
        return node.get(name, default)
    return getattr(node, name, default)


def size_or_none(size: int | None) -> int | None:
    """None, 0 and -1 are ways to say off."""
    return None if size is None or size <= 0 else size


def rows_a_chunk(chunk_size: int | None, batch: int) -> int | None:
    """Their chunk is of sequence positions, ours of rows."""
    return None if chunk_size is None else chunk_size * max(1, batch)


def no_targets(vocab_parallel_logits: Tensor) -> Tensor:
    """A target for calls that want only statistics of the distribution: id 0 everywhere."""
    return vocab_parallel_logits.new_zeros(vocab_parallel_logits.shape[:-1], dtype=torch.int64)


class _ShareContext(FunctionCtx):
    ranks: int


class _ShareOfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _ShareContext, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: _ShareContext, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.ranks, None


def share_of_gradient(x: Tensor, ranks: int) -> Tensor:
    """x itself; the backward divides by `ranks`.

    For callers who sum the gradient over the ranks themselves, where our operation has summed it
    already.
    """
    return x if ranks == 1 else _ShareOfGradient.apply(x, ranks)


def token_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    group: ProcessGroup | None,
    *,
    chunk_size: int | None = None,
    inference_only: bool = False,
    top_k: int | None = None,
    top_p: float | None = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """Log-probabilities of targets as they are: `[b, s, V/TP]`, `[b, s]` -> `[b, s]`.

    group None: every rank.
    """
    options: dict[str, object] = {
        "tp_group": or_every_rank(group),
        "chunk_size": rows_a_chunk(chunk_size, vocab_parallel_logits.shape[0]),
    }
    operation: Callable[..., Tensor] = ours.vocab_parallel_logprobs
    top_p = 1.0 if top_p is None else top_p  # NeMo-RL's way to say off
    if size_or_none(top_k) or top_p < 1.0 or min_p > 0.0:
        operation = ours.vocab_parallel_sampling_logprobs
        options |= {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    with grad_unless(inference_only):
        return operation(vocab_parallel_logits, target, **options)


# ---- sequences -----------------------------------------------------------------------------------


def padded_bounds(packed: PackedSeqParams | None) -> Tensor | None:
    """Megatron's padded cumulative lengths of packed sequences; None where nothing is packed."""
    if packed is None or getattr(packed, "qkv_format", "thd") != "thd":
        return None
    padded = getattr(packed, "cu_seqlens_q_padded", None)
    return packed.cu_seqlens_q if padded is None else padded


def next_tokens(target: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """`[b, s]` whole sequences -> each position's next token; IGNORED after a sequence's last.

    The published functions roll, so that there the last target is the first token; its result is
    cut off either way.
    """
    return ours.context_parallel_shift(
        target.long(), cp_group=ONE_PROCESS, seq_dim=1, cu_seqlens=cu_seqlens, fill=IGNORED
    )


def shard_padded(
    x: Tensor, local_length: int, cp_group: ProcessGroup | None, fill: float = IGNORED
) -> Tensor:
    """`[b, s, ...]` -> this CP rank's zigzag part `[b, local_length, ...]`, padded at the end.

    Raises:
        ValueError: s is more than the CP ranks hold together.
    """
    group = or_one_process(cp_group)
    room = local_length * group.size()
    if x.shape[1] > room:
        raise ValueError(
            f"sequence length: expected at most {room} ({local_length} on each of {group.size()} "
            f"context-parallel ranks), got {x.shape[1]}"
        )
    missing = (x.shape[0], room - x.shape[1], *x.shape[2:])
    if missing[1]:
        x = torch.cat([x, x.new_full(missing, fill)], dim=1)
    return ours.context_parallel_shard(x, cp_group=group, seq_dim=1)


def packed_targets(target: Tensor, cu_seqlens: Tensor, cp_group: ProcessGroup | None) -> Tensor:
    """Unshifted packed tokens `[1, T]` -> this CP rank's next tokens `[1, T/CP]`."""
    return ours.context_parallel_shard(
        next_tokens(target, cu_seqlens=cu_seqlens),
        cp_group=or_one_process(cp_group),
        cu_seqlens=cu_seqlens,
    )


def packed_places(cu_seqlens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """(packed position, whether it is a token's) of each of `[b, length]` outputs.

    A sequence's last token predicts nothing and has none.
    """
    bounds = cu_seqlens.long()
    place = torch.arange(length, device=bounds.device)
    inside = place < bounds.diff().unsqueeze(1) - 1
    return (bounds[:-1].unsqueeze(1) + place).where(inside, 0), inside


def whole_logprobs(
    run: Callable[[], object],
    model: object,
    config: ours.LogprobConfig,
    cp: ProcessGroup,
    cu_seqlens: Tensor | None,
    *,
    inference_only: bool,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Log-probabilities `[b, s - 1]` of whole sequences, by a patched model of this rank's labels.

    On a pipeline stage without a head what the model gives. The backward sums over CP.

    Args:
        dtype: what they are rounded to in the end.
    """
    with grad_unless(inference_only), ours.patch_gpt_model(model, config):
        output = run()
    if not isinstance(output, ours.TokenStats):
        return output
    logprobs = ours.context_parallel_gather(output.logprobs, cp_group=cp, cu_seqlens=cu_seqlens)
    return logprobs[:, :-1].to(dtype)
