"""NeMo-RL's fused path: log-probabilities from hidden states, and a patch of Megatron's GPTModel.

The patched forward copies nothing of Megatron's: for the one call it patches the model's head
(`mcore_logprobs.patch_gpt_model`), which works with context parallelism and packed sequences too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.context_parallel import (
    context_parallel_gather,
    context_parallel_shard,
    context_parallel_shift,
)
from mcore_logprobs.dropin._common import check_vocab_range, grad_unless, or_one_process
from mcore_logprobs.dropin.nemo_context import IGNORED, next_tokens, shard_padded
from mcore_logprobs.dropin.nemo_functions import ChunkedDistributedHiddenStatesToLogprobs
from mcore_logprobs.groups import ParallelGroups, group_size, resolve_tp_group
from mcore_logprobs.logits.token_stats import TokenStats
from mcore_logprobs.megatron import patch_gpt_model

__all__ = [
    "_gpt_forward_with_linear_ce_fusion",
    "from_parallel_hidden_states_to_logprobs",
    "patch_gpt_model_forward_for_linear_ce_fusion",
    "unpatch_gpt_model_forward_for_linear_ce_fusion",
]

_FLAG = "return_logprobs_for_linear_ce_fusion"
_SAMPLING = ("temperature", "sampling_params")


def _or_with_output_weight(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Also take the call of NeMo-RL before 0.7, whose third argument was output_weight.

    There the fourth is a flag or None and the target comes fifth; now the target comes fourth.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        older = isinstance(args[2], Tensor) if len(args) == 3 else False
        if len(args) > 3:
            older = not isinstance(args[3], Tensor)
        if not older and "output_weight" not in kwargs:
            return function(*args, **kwargs)
        names = ("tensor_parallel_hidden_states", "output_weight_layer", "output_weight")
        given = {**dict(zip(names, args[:3], strict=False)), **kwargs}
        weight = given.pop("output_weight", None)
        if given["output_weight_layer"] is None:
            given["output_weight_layer"] = weight
        return function(given.pop(names[0]), given.pop(names[1]), *args[3:], **given)

    return call


@_or_with_output_weight
def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states: Tensor,
    output_weight_layer: Tensor,
    runtime_gather_output: bool | None,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: ProcessGroup,
    inference_only: bool = False,
    cp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Hidden `[s/(TP*CP), b, h]`, unshifted target `[b, s]` -> float32 `[b, s - 1]`.

    Hidden states are split over TP (sequence parallelism) within each CP rank's zigzag part; the
    result is gathered over CP, whose backward sums over the ranks.

    The call of before 0.7 works too: its third argument, output_weight, is the weight where
    output_weight_layer is None (a tied head's own).

    Args:
        output_weight_layer: `[V/TP, h]`.
        runtime_gather_output: of no effect, as in NeMo-RL: no logits are made that could be
            gathered.

    Raises:
        ValueError: no weight, a range that is not this rank's, or a target longer than the ranks'
            hidden states.
    """
    weight = output_weight_layer
    if weight is None:
        raise ValueError("output_weight_layer, output_weight: expected a tensor in one, got None")
    check_vocab_range(vocab_start_index, vocab_end_index, weight.shape[0], tp_group)
    cp = or_one_process(cp_group)
    ranks = group_size(resolve_tp_group(tp_group))
    local_length = tensor_parallel_hidden_states.shape[0] * ranks
    logprobs = ChunkedDistributedHiddenStatesToLogprobs.apply(
        tensor_parallel_hidden_states,
        shard_padded(next_tokens(target), local_length, cp, IGNORED),
        weight,
        vocab_start_index,
        vocab_end_index,
        chunk_size,
        tp_group,
        inference_only,
    )
    return context_parallel_gather(logprobs, cp_group=cp)[:, : target.shape[1] - 1]


def patch_gpt_model_forward_for_linear_ce_fusion(
    *, chunk_size: int, temperature: float = 1.0, sampling_params: Any | None = None
) -> None:
    """Let every GPTModel's forward take `return_logprobs_for_linear_ce_fusion=True`.

    With it and `labels` (the unshifted input ids) the last pipeline stage returns log-probabilities
    of the next tokens, float32 `[b, s - 1]`, made without holding the logits. Without it the model
    behaves as before. A second call changes the chunk size. Undone by
    `unpatch_gpt_model_forward_for_linear_ce_fusion`.

    Context parallelism: labels are this rank's zigzag part `[b, s/CP]`, as the input ids are (or
    the whole `[b, s]`); the result is that of the whole sequence, on every rank, and its backward
    sums over CP. Packed sequences (`packed_seq_params` with qkv_format "thd"): `[1, T - 1]` in the
    packed order, 0 at each sequence's last token.

    NeMo-RL divides the model's output by the temperature afterwards, in place. On this path the
    output is log-probabilities, which that division spoils: give the temperature here, or to
    forward, and leave `apply_temperature_scaling` out.

    Args:
        chunk_size: positions of the sequence at a time.
        temperature, sampling_params: for calls that bring none; forward takes both as keywords.
            sampling_params (attributes temperature, top_k, top_p) goes before temperature.

    Raises:
        ValueError: chunk_size is not an int of at least 1.
    """
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size: expected an int >= 1, got {chunk_size!r}")
    model_class = _gpt_model_class()
    model_class._linear_ce_fusion_chunk_size = chunk_size
    model_class._linear_ce_fusion_sampling = _sampling(temperature, sampling_params)
    if "_original_forward_for_linear_ce_fusion" in vars(model_class):
        return
    original = model_class.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("is_spec_decode", False) is None:
            del kwargs["is_spec_decode"]  # a Megatron that does not know it is called as ever
        extra = {name: kwargs.pop(name, None) for name in _SAMPLING}
        if kwargs.pop(_FLAG, False):
            return _next_token_logprobs(self, args, kwargs, **extra)
        return original(self, *args, **kwargs)

    forward.__signature__ = _with_flag(original)  # type: ignore[attr-defined]
    model_class._original_forward_for_linear_ce_fusion = original
    model_class.forward = forward


def unpatch_gpt_model_forward_for_linear_ce_fusion() -> None:
    """Undo the patch; nothing where there is none.

    Raises:
        ValueError: something else has replaced GPTModel.forward since; undo that first.
    """
    model_class = _gpt_model_class()
    if "_original_forward_for_linear_ce_fusion" not in vars(model_class):
        return
    original = model_class._original_forward_for_linear_ce_fusion
    if getattr(model_class.forward, "__wrapped__", None) is not original:
        raise ValueError(
            "GPTModel.forward was replaced by something else after the patch; undo that first"
        )
    model_class.forward = original
    del model_class._original_forward_for_linear_ce_fusion
    del model_class._linear_ce_fusion_chunk_size
    del model_class._linear_ce_fusion_sampling


def _gpt_forward_with_linear_ce_fusion(
    self: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor,
    decoder_input: Tensor = None,  # type: ignore[assignment]
    labels: Tensor = None,  # type: ignore[assignment]
    inference_context: Any = None,
    packed_seq_params: Any = None,
    extra_block_kwargs: dict | None = None,
    runtime_gather_output: bool | None = None,
    *,
    inference_params: Any | None = None,
    loss_mask: Tensor | None = None,
    padding_mask: Tensor | None = None,
    is_spec_decode: bool | None = None,
    return_logprobs_for_linear_ce_fusion: bool = False,
    temperature: float | Tensor | None = None,
    sampling_params: Any | None = None,
) -> Tensor:
    """The patched forward as a function of the model, in NeMo-RL's signature.

    Arguments that are None are left to the model's own defaults, so that any release will do.
    temperature and sampling_params are ours: see `patch_gpt_model_forward_for_linear_ce_fusion`.
    """
    given = {
        "decoder_input": decoder_input,
        "labels": labels,
        "inference_context": inference_context,
        "packed_seq_params": packed_seq_params,
        "extra_block_kwargs": extra_block_kwargs,
        "runtime_gather_output": runtime_gather_output,
        "inference_params": inference_params,
        "loss_mask": loss_mask,
        "padding_mask": padding_mask,
        "is_spec_decode": is_spec_decode,
    }
    kwargs = {name: value for name, value in given.items() if value is not None}
    args = (input_ids, position_ids, attention_mask)
    if return_logprobs_for_linear_ce_fusion:
        return _next_token_logprobs(
            self, args, kwargs, temperature=temperature, sampling_params=sampling_params
        )
    return _original_forward(self)(self, *args, **kwargs)


def _sampling(temperature: Any, sampling_params: Any) -> dict[str, Any]:
    """Fields of `LogprobConfig`; those that ask for nothing are left out."""
    asked = {
        "temperature": getattr(sampling_params, "temperature", 1.0 if sampling_params else None),
        "top_k": getattr(sampling_params, "top_k", None),
        "top_p": getattr(sampling_params, "top_p", 1.0),
    }
    if asked["temperature"] is None:
        asked["temperature"] = 1.0 if temperature is None else temperature
    if asked["top_k"] in (None, 0, -1):
        del asked["top_k"]
    if asked["top_p"] == 1.0:
        del asked["top_p"]
    return asked


def _next_token_logprobs(
    model: Any,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    temperature: Any = None,
    sampling_params: Any = None,
) -> Tensor:
    """Run the model once with a patched head; the last stage's `[b, s - 1]`, else its output."""
    original = _original_forward(model)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    given = bound.arguments
    labels = given.get("labels")
    if labels is None:
        raise ValueError(f"{_FLAG}=True: expected labels (the unshifted input ids), got None")
    cp = ParallelGroups.from_model(model).cp
    cp = or_one_process(cp)
    packed = given.get("packed_seq_params")
    cu_seqlens = _padded_bounds(packed)
    given["labels"] = _local_next_tokens(labels, given.get("input_ids"), cp, cu_seqlens)
    chunk = getattr(type(model), "_linear_ce_fusion_chunk_size", None)
    sampling = getattr(type(model), "_linear_ce_fusion_sampling", {})
    if temperature is not None or sampling_params is not None:
        sampling = _sampling(temperature, sampling_params)
    config = LogprobConfig(
        output="stats",
        chunk_size=None if chunk is None else chunk * max(1, labels.shape[0]),
        ignore_index=IGNORED,
        **sampling,
    )
    inference = given.get("inference_context") is not None or (
        given.get("inference_params") is not None
    )
    with grad_unless(inference and not model.training), patch_gpt_model(model, config):
        output = original(*bound.args, **bound.kwargs)
    if not isinstance(output, TokenStats):
        return output  # a pipeline stage without a head
    logprobs = context_parallel_gather(output.logprobs, cp_group=cp, cu_seqlens=cu_seqlens)
    return logprobs[:, :-1]


def _local_next_tokens(
    labels: Tensor, input_ids: Tensor | None, cp: Any, cu_seqlens: Tensor | None
) -> Tensor:
    """Unshifted labels, this CP rank's part or the whole, -> this rank's next tokens."""
    if input_ids is not None and labels.shape[1] == input_ids.shape[1] * cp.size():
        whole = next_tokens(labels, cu_seqlens=cu_seqlens)
        return context_parallel_shard(whole, cp_group=cp, cu_seqlens=cu_seqlens)
    return context_parallel_shift(labels.long(), cp_group=cp, cu_seqlens=cu_seqlens, fill=IGNORED)


def _padded_bounds(packed: Any) -> Tensor | None:
    """The padded cumulative lengths of packed sequences; None where nothing is packed."""
    if packed is None or getattr(packed, "qkv_format", "thd") != "thd":
        return None
    padded = getattr(packed, "cu_seqlens_q_padded", None)
    return packed.cu_seqlens_q if padded is None else padded


def _original_forward(model: Any) -> Any:
    found = getattr(type(model), "_original_forward_for_linear_ce_fusion", None)
    return type(model).forward if found is None else found


def _gpt_model_class() -> Any:
    from megatron.core.models.gpt import GPTModel

    return GPTModel


def _with_flag(original: Any) -> inspect.Signature:
    signature = inspect.signature(original)
    ours = {_FLAG: False, **dict.fromkeys(_SAMPLING), "is_spec_decode": None}
    parameters = list(signature.parameters.values())
    last = parameters.pop() if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD else None
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in ours.items()
        if name not in signature.parameters
    ]
    return signature.replace(parameters=[*parameters, last] if last else parameters)
