"""NeMo-RL's functions from logits and unshifted targets to `[b, s - 1]`.

`sampling_params` is any object with `top_k`, `top_p` and `temperature`. As in NeMo-RL, its
temperature is not applied to logits: NeMo-RL's workers divide them by it before they call these
functions, and a second division would be silently wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import mcore_logprobs as ours
from mcore_logprobs.checks import unwrap_logits, unwrap_rows
from mcore_logprobs.dropin._common import (
    check_vocab_range,
    next_tokens,
    or_one_process,
    packed_places,
    packed_targets,
    shard_padded,
    token_logprobs,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """Whether x is a DTensor, without importing torch's DTensor module."""
    return isinstance(x, Tensor) and hasattr(x, "device_mesh") and hasattr(x, "placements")


def rank_in_group(rank: int | None) -> int:
    """The `vocab_parallel_rank` that goes with a group."""
    if rank is None:
        raise ValueError("vocab_parallel_rank: expected this rank in the group, got None")
    return rank


def _options(chunk_size: int | None, inference_only: bool, sampling_params: Any) -> dict[str, Any]:
    """Keywords of `token_logprobs`."""
    options: dict[str, object] = {"chunk_size": chunk_size, "inference_only": inference_only}
    if sampling_params is not None:
        options |= {"top_k": sampling_params.top_k, "top_p": sampling_params.top_p}
        options["min_p"] = getattr(sampling_params, "min_p", None) or 0.0
    return options


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: ProcessGroup,
    inference_only: bool = False,
    cp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    sampling_params: object | None = None,
) -> Tensor:
    """`[b, s/CP, V/TP]` zigzag, unshifted target `[b, s]` -> float32 `[b, s - 1]`.

    The target is shifted, padded to s/CP * CP and sharded; the result is gathered over CP, whose
    backward sums over the ranks. Collectives: those of `vocab_parallel_logprobs` (or the sampling
    one) over TP, and one all-gather over CP.
    """
    _, local_length, width = vocab_parallel_logits.shape
    check_vocab_range(vocab_start_index, vocab_end_index, width, tp_group)
    targets = shard_padded(next_tokens(target), local_length, cp_group)
    options = _options(chunk_size, inference_only, sampling_params)
    logprobs = token_logprobs(vocab_parallel_logits, targets, tp_group, **options)
    gathered = ours.context_parallel_gather(logprobs, cp_group=or_one_process(cp_group))
    return gathered[:, : target.shape[1] - 1]


def from_parallel_logits_to_logprobs_packed_sequences(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    vocab_start_index: int,
    vocab_end_index: int,
    group: ProcessGroup,
    inference_only: bool = False,
    cp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    sampling_params: object | None = None,
    target_is_pre_rolled: bool = False,
) -> Tensor:
    """`[1, T/CP, V/TP]` packed, target `[1, T]` -> float32 `[b, unpacked_seqlen - 1]`.

    Each sequence is shifted and zigzag-sharded on its own; zeros stand past its (padded) end. With
    target_is_pre_rolled the target is `[1, T/CP]`, shifted and sharded already. No host sync, and
    one all-gather over CP for all sequences.
    """
    check_vocab_range(vocab_start_index, vocab_end_index, vocab_parallel_logits.shape[-1], group)
    if not target_is_pre_rolled:
        target = packed_targets(target, cu_seqlens_padded, cp_group)
    options = _options(chunk_size, inference_only, sampling_params)
    logprobs = token_logprobs(vocab_parallel_logits, target, group, **options)
    packed = ours.context_parallel_gather(
        logprobs, cp_group=or_one_process(cp_group), cu_seqlens=cu_seqlens_padded
    )
    source, inside = packed_places(cu_seqlens_padded, unpacked_seqlen - 1)
    return torch.where(inside, packed[0][source], 0.0)


def dtensor_from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: ProcessGroup,
    inference_only: bool = False,
    seq_index: Tensor | None = None,
    chunk_size: int | None = None,
    sampling_params: object | None = None,
) -> Tensor:
    """`[b, s(/CP), V/TP]` local logits, unshifted target `[b, s]` -> float32 `[b, s - 1]`.

    A target that is a DTensor sharded over a mesh dimension named "cp" comes with seq_index `[s]`:
    the global index of each of its positions, as it lies. The result is whole on every rank, and
    its gradient is taken as the same on every rank (DTensor's own convention).

    Raises:
        ValueError: a target over CP without seq_index.
    """
    logits, _ = unwrap_logits(vocab_parallel_logits, tp_group, "vocab_parallel_logits")
    check_vocab_range(vocab_start_index, vocab_end_index, logits.shape[-1], tp_group)
    options = _options(chunk_size, inference_only, sampling_params)
    if not _is_over_cp(target):
        local = next_tokens(unwrap_rows(target, "target"))
        return token_logprobs(logits, local, tp_group, **options)[:, :-1]

    from torch.distributed.tensor import DTensor, Replicate

    if seq_index is None:
        raise ValueError("seq_index: expected the global indices of a target over CP, got None")
    if is_dtensor(seq_index):
        seq_index = seq_index.full_tensor()
    assert is_dtensor(target)
    mesh, placements = target.device_mesh, target.placements
    order = seq_index.argsort()
    in_order = target.full_tensor()[:, order]
    everywhere = [Replicate()] * mesh.ndim
    shifted = DTensor.from_local(next_tokens(in_order)[:, seq_index], mesh, everywhere)
    local = shifted.redistribute(placements=placements).to_local()  # each rank takes its own part
    logprobs = token_logprobs(logits, local, tp_group, **options)
    return DTensor.from_local(logprobs, mesh, placements).full_tensor()[:, order][:, :-1]


def _is_over_cp(target: object) -> bool:
    if not is_dtensor(target):
        return False
    names = target.device_mesh.mesh_dim_names or ()
    return "cp" in names and target.device_mesh.size(names.index("cp")) > 1


def get_logprobs_from_vocab_parallel_logits(
    vocab_parallel_logits: object,
    input_ids: Tensor,
    seq_index: Tensor | None = None,
    chunk_size: int | None = None,
    sampling_params: object | None = None,
) -> Tensor:
    """`dtensor_from_parallel_logits_to_logprobs` of a DTensor, whose mesh has the group.

    Raises:
        ValueError: no DTensor with a sharded vocabulary; seq_index on a mesh without "cp".
    """
    if not is_dtensor(vocab_parallel_logits):
        raise ValueError(
            f"vocab_parallel_logits: expected a DTensor, got {type(vocab_parallel_logits).__name__}"
        )
    names = vocab_parallel_logits.device_mesh.mesh_dim_names or ()
    if seq_index is not None and "cp" not in names:
        raise ValueError(f"seq_index: expected a mesh with a dimension named 'cp', got {names}")
    logits, group = unwrap_logits(vocab_parallel_logits, None, "vocab_parallel_logits")
    assert group is not None
    width, rank = logits.shape[-1], group.rank()
    return dtensor_from_parallel_logits_to_logprobs(
        logits,
        input_ids,
        rank * width,
        (rank + 1) * width,
        group,
        inference_only=not torch.is_grad_enabled(),
        seq_index=seq_index,
        chunk_size=chunk_size,
        sampling_params=sampling_params,
    )


def get_next_token_logprobs_from_logits(
    input_ids: Tensor,
    next_token_logits: Tensor,
    seq_index: Tensor | None = None,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
    context_parallel_group: ProcessGroup | None = None,
    sampling_params: object | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Log-probabilities `[b, s - 1]` from sharded, DTensor or whole logits.

    With vocab_parallel_group: logits `[b, s/CP, V/TP]`; a DTensor brings its groups; anything else
    is the whole vocabulary. The logits are not copied to float32. input_ids are unshifted;
    `sampling_params.temperature` is not applied: as in NeMo-RL, whoever calls has divided by it.

    Raises:
        ValueError: vocab_parallel_rank missing, or not this process's rank in the group.
    """
    if vocab_parallel_group is None and is_dtensor(next_token_logits):
        return get_logprobs_from_vocab_parallel_logits(
            next_token_logits,
            input_ids,
            seq_index=seq_index,
            chunk_size=chunk_size,
            sampling_params=sampling_params,
        )
    group = or_one_process(vocab_parallel_group)
    rank = 0 if vocab_parallel_group is None else rank_in_group(vocab_parallel_rank)
    width = next_token_logits.shape[-1]
    return from_parallel_logits_to_logprobs(
        next_token_logits,
        input_ids.to(next_token_logits.device),
        rank * width,
        (rank + 1) * width,
        group,
        cp_group=context_parallel_group,
        chunk_size=chunk_size,
        sampling_params=sampling_params,
    )
