"""The LM head as a source of logits: hidden states times its weight, a chunk at a time.

    for each tile of rows, for each block of columns:
        forward    chunk = tile @ weight[block]^T          -> what the operation takes of it
        backward   chunk again -> dLogits, in its place    -> dWeight[block], dHidden[tile]

One chunk of logits exists at a time, forward and backward, or the chunks of one tile where an
operation holds them. Under sequence parallelism a tile is gathered from all ranks when it is needed
(the next one while this one is worked on), so that the whole sequence is never held either; its
gradient is reduce-scattered the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import (
    autocast_enabled,
    check_bytes,
    check_flag,
    check_float_tensor,
    check_logits_dtype,
    check_optional_count,
    check_optional_scale,
    check_scale,
    check_temperature,
)
from mcore_logprobs.consistency import check_call
from mcore_logprobs.groups import VocabShard, group_size, resolve_tp_group
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels.budgets import Tiling
from mcore_logprobs.kernels.chunk import acc_dtype
from mcore_logprobs.kernels.products import matmul_dtype
from mcore_logprobs.sources.head_gradients import HeadGradient
from mcore_logprobs.sources.head_operands import (
    HeadOperands,
    HeadOptions,
    HeadTensors,
    SavedBytes,
)
from mcore_logprobs.sources.latest_pass import LatestPass
from mcore_logprobs.sources.lora import LoRAInput, check_lora
from mcore_logprobs.sources.main_grad import MainGrad
from mcore_logprobs.sources.rows import RowSelection, check_rows
from mcore_logprobs.sources.source import check_segments
from mcore_logprobs.sources.vocab_bias import Ids, LogitBias, vocab_bias


@dataclass(frozen=True)
class BoundOptions(HeadOptions):
    """A head's options, which make it again of its tensors."""

    def bind(self, *tensors: Any) -> HeadLogits:
        return HeadLogits(self, HeadTensors(*tensors))


class HeadLogits(HeadOperands):
    """Hidden states and an LM head as a `Source`."""

    recomputed, linear, order_may_change = True, False, False
    options: BoundOptions
    latest_pass: LatestPass | None = None

    @property
    def heads(self) -> tuple[HeadLogits, ...]:
        """Those whose chunks may be kept (`sources.kept`)."""
        return (self,)

    def compacted(self, valid_mask: Tensor | None) -> HeadLogits:
        options = self.options
        if not options.compact:
            return self
        if valid_mask is None:
            raise ValueError("compact=True: expected a mask that says which rows to keep, got None")
        rows = valid_mask.reshape(-1).cpu().nonzero().squeeze(1)  # the host sync
        count = self.batch_shape.numel()
        selection = RowSelection(rows, count, self.hidden.group, self.device, tokens=True)
        return replace(options, selection=selection).bind(*self.tensors)

    # ---- as a source ----

    def in_token_order(self) -> HeadLogits:
        return self

    def in_whole_rows(self, *, adds_per_tile: bool = False) -> HeadLogits:
        """This head in tiles small enough to hold a tile's logits over all of the rank's columns.

        Args:
            adds_per_tile: as in `Tiling.of`.
        """
        options, shard = self.options, self.shard
        # With segments the same rows per tile at any TP. dHidden of a tile is float32 too.
        width = shard.width if options.segments is None else shard.padded_size
        width = max(width, self.weight.shape[1])
        tiling = Tiling.of(
            self.num_rows,
            shard.width,
            options.chunk_size,
            self.device,
            held_width=width,
            adds_per_tile=adds_per_tile,
        )
        return replace(options, tiling=tiling).bind(*self.tensors)

    def gradient(
        self, needs: Sequence[bool], *, sparse: bool = False, in_acc_dtype: bool = False
    ) -> HeadGradient:
        return HeadGradient(self, needs, in_acc_dtype=in_acc_dtype, sparse=sparse)


def head_logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    lora: LoRAInput | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    sequence_parallel: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    rows: Tensor | None = None,
    compact: bool = False,
    gradient_accumulation_fusion: bool = False,
    saved_bytes: int = 0,
    tp_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
    invariant_segments: int | None = None,
    logit_bias: LogitBias | None = None,
    disallowed_ids: Ids | None = None,
    may_round: bool = False,
    prefix: str = "",
) -> HeadLogits:
    """Check an output layer and the hidden states that it is given, and resolve the group.

    Under autocast hidden states may be of another dtype than the weight: both are rounded to the
    narrower one, as a linear layer rounds them.

    Args:
        may_round: whether the operation may make all of its GEMMs in a low-precision
            logits_dtype.
        prefix: goes before the arguments' names in errors.

    Raises:
        ValueError: with the argument's name, what was expected and what was given.
    """
    check_float_tensor(f"{prefix}hidden", hidden, min_dim=2)
    check_float_tensor(f"{prefix}weight", weight, min_dim=2)
    group, device = resolve_tp_group(tp_group), hidden.device
    if group is not None:  # before what only one rank may refuse
        a = lora[0] if isinstance(lora, tuple) and lora else None
        exchanged = {f"{prefix}hidden": hidden, f"{prefix}lora[0]": a}
        check_call(weight.shape[0], group, device, exchanged)
    compute_dtype = _check_layer(hidden, weight, bias, lora, prefix)
    check_flag("sequence_parallel", sequence_parallel)
    check_flag("compact", compact)
    check_flag("gradient_accumulation_fusion", gradient_accumulation_fusion)
    check_bytes("saved_bytes", saved_bytes)
    check_logits_dtype("logits_dtype", logits_dtype)
    check_optional_count("chunk_size", chunk_size)
    check_scale(f"{prefix}logit_scale", logit_scale)
    check_optional_scale(f"{prefix}softcap", softcap)
    main_grad = MainGrad.of(weight) if gradient_accumulation_fusion else None
    shard = VocabShard.of(weight.shape[0], group, vocab_size)
    segments = None
    if invariant_segments is not None:
        segments = check_segments(shard, invariant_segments)
    if segments is not None and lora is not None:
        raise ValueError(
            f"invariant_segments: expected None with a LoRA, got {invariant_segments!r}: its "
            "low-rank GEMMs are not batch-invariant"
        )
    ranks = group_size(group) if sequence_parallel else 1
    lead = torch.Size((hidden.shape[0] * ranks, *hidden.shape[1:-1]))
    selection, num_rows = None, math.prod(lead)
    if rows is not None:
        if compact:
            raise ValueError("compact: expected False with rows, which name the rows already")
        rows = check_rows(rows, num_rows)
        selection = RowSelection(rows, num_rows, group if ranks > 1 else None, device, tokens=False)
        lead, num_rows = rows.shape, selection.num_slots
    temperature = check_temperature(temperature, lead, device, name=f"{prefix}temperature")
    accumulated = acc_dtype(compute_dtype)
    if accumulated == torch.float64:
        logits_dtype = torch.float64
    a, b = (None, None) if lora is None else lora[:2]
    per_token = temperature if isinstance(temperature, Tensor) else None
    added = None
    if logit_bias is not None or disallowed_ids is not None:
        added = vocab_bias(logit_bias, disallowed_ids, shard, device, accumulated)
        bias = added.values if bias is None else bias.to(accumulated) + added.values
    low_precision = (
        may_round and logits_dtype == compute_dtype and lora is None and segments is None
    )
    tiling = Tiling.of(num_rows, shard.width, chunk_size, device)
    tensors = hidden.flatten(0, -2), weight, bias, a, b, per_token
    options = BoundOptions(
        shard=shard,
        batch_shape=lead,
        logit_scale=float(logit_scale),
        softcap=softcap,
        temperature=1.0 if isinstance(temperature, Tensor) else float(temperature),
        logits_dtype=logits_dtype,
        compute_dtype=compute_dtype,
        acc_dtype=accumulated,
        matmul_dtype=matmul_dtype(compute_dtype, device, low_precision=low_precision),
        low_precision=low_precision,
        backend=backends.select(
            backend,
            weight.new_empty(0, 1, dtype=logits_dtype),
            numel=tiling.rows * tiling.columns,
            invariant=segments is not None,
        ),
        sequence_parallel=sequence_parallel,
        chunk_size=chunk_size,
        tiling=tiling,
        selection=selection,
        compact=compact,
        segments=segments,
        lora_scale=1.0 if lora is None else float(lora[2]),
        main_grad=main_grad,
        saved=SavedBytes(saved_bytes) if saved_bytes else None,
        disallowed=None if added is None else added.disallowed,
    )
    return options.bind(*tensors)


def _check_layer(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, lora: LoRAInput | None, prefix: str
) -> torch.dtype:
    """The dtype that operands are rounded to."""
    hidden_name, weight_name = f"{prefix}hidden", f"{prefix}weight"
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{weight_name}: expected shape [V/TP, {hidden.shape[-1]}] for {hidden_name} of shape "
            f"{tuple(hidden.shape)}, got {tuple(weight.shape)}"
        )
    if bias is not None:
        check_float_tensor(f"{prefix}bias", bias, min_dim=1)
    device_type, dtype = hidden.device.type, hidden.dtype
    autocast = dtype != torch.float64 and autocast_enabled(device_type)
    if autocast and weight.dtype != dtype:
        dtype = min(dtype, weight.dtype, key=lambda each: each.itemsize)
    for name, tensor in ((weight_name, weight), (f"{prefix}bias", bias)):
        if tensor is None:
            continue
        fits = tensor.dtype == hidden.dtype or (autocast and tensor.dtype != torch.float64)
        if not fits or tensor.device != hidden.device:
            raise ValueError(
                f"{name}: expected {hidden_name}'s dtype and device, {hidden.dtype} on "
                f"{hidden.device}, got {tensor.dtype} on {tensor.device}"
            )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{prefix}bias: expected shape [{weight.shape[0]}], got {tuple(bias.shape)}"
        )
    if lora is not None:
        check_lora(lora, hidden, weight, prefix, autocast=autocast)
    return dtype
