"""NeMo-RL's functions from hidden states, and its forward of a GPTModel that ends in them.

The patched forward copies nothing of Megatron's: for the one call it patches the model's head
(`mcore_logprobs.patch_gpt_model`), which works with context parallelism and packed sequences too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed import ProcessGroup

import mcore_logprobs as ours
from mcore_logprobs.dropin._common import (
    IGNORED,
    check_vocab_range,
    grad_unless,
    next_tokens,
    or_every_rank,
    or_one_process,
    padded_bounds,
    rows_a_chunk,
    shard_padded,
    whole_logprobs,
)
from mcore_logprobs.dropin.lazy_models import head_settings
from mcore_logprobs.megatron.imports import PassedArguments

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_FLAG = "return_logprobs_for_linear_ce_fusion"
_SAMPLING = ("temperature", "sampling_params")
# Where ours and NeMo-RL's own patch, which may come over it, keep what they replaced; its mark.
_ORIGINAL = "_mcore_logprobs_original_forward"
_THEIR_ORIGINAL = "_original_forward_for_linear_ce_fusion"
_THEIR_MARK = "_linear_ce_fusion_forward_patched"


def _or_with_output_weight(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Also take the call of NeMo-RL before 0.7, whose third argument was output_weight.

    There the fourth is a flag or None and the target comes fifth; now the target comes fourth.
    """

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Tensor:
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
        runtime_gather_output: ignored, as in NeMo-RL: no logits are made that could be
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
    ranks = or_every_rank(tp_group).size()
    local_length = tensor_parallel_hidden_states.shape[0] * ranks
    targets = shard_padded(next_tokens(target), local_length, cp)
    with grad_unless(inference_only):
        logprobs = hidden_logprobs(
            tensor_parallel_hidden_states, weight, targets, tp_group, chunk_size
        )
    return ours.context_parallel_gather(logprobs, cp_group=cp)[:, : target.shape[1] - 1]


def hidden_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    tp_group: ProcessGroup | None,
    chunk_size: int | None,
) -> Tensor:
    """`[s/TP, b, h]` split over the sequence, `[V/TP, h]`, targets `[b, s]` -> `[b, s]`."""
    group = or_every_rank(tp_group)
    stats = ours.linear_token_stats(
        hidden,
        weight,
        target.transpose(0, 1).contiguous(),
        sequence_parallel=group.size() > 1,
        tp_group=group,
        chunk_size=rows_a_chunk(chunk_size, target.shape[0]),
    )
    return stats.logprobs.transpose(0, 1).contiguous()


def patch_gpt_model_forward_for_linear_ce_fusion(
    *, chunk_size: int, temperature: float | None = None, sampling_params: object | None = None
) -> None:
    """Let every GPTModel's forward take `return_logprobs_for_linear_ce_fusion=True`.

    With it and `labels` (the unshifted input ids) the last pipeline stage returns log-probabilities
    of the next tokens, float32 `[b, s - 1]`, made without holding the logits. Without it the model
    behaves as before. A second call changes the chunk size, and what else it gives. Undone by
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
            None of both: those of the call before, else a temperature of 1. sampling_params
            (attributes temperature, top_k, top_p) goes before temperature.

    Raises:
        ValueError: chunk_size is not an int of at least 1; NeMo-RL's own patch, whose forward knows
            neither temperature nor sampling_params, is on already, and one of them is given.
    """
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size: expected an int >= 1, got {chunk_size!r}")
    model_class = _gpt_model_class()
    is_given = temperature is not None or sampling_params is not None
    if is_given and _THEIR_MARK in vars(model_class):
        raise ValueError(
            "temperature, sampling_params: expected to be left out, since NeMo-RL's own patch of "
            "GPTModel.forward is on and ignores them; call this before NeMo-RL sets up its model"
        )
    model_class._linear_ce_fusion_chunk_size = chunk_size
    if is_given or "_linear_ce_fusion_sampling" not in vars(model_class):
        number = 1.0 if temperature is None else temperature
        model_class._linear_ce_fusion_sampling = _sampling(number, sampling_params)
    if {_ORIGINAL, _THEIR_MARK} & vars(model_class).keys():
        return
    original = model_class.forward

    @functools.wraps(original)
    def forward(self: object, *args: object, **kwargs: object) -> object:
        if kwargs.get("is_spec_decode", False) is None:
            del kwargs["is_spec_decode"]  # a Megatron that does not know it is called as ever
        return _forward(self, args, kwargs)

    forward.__signature__ = _with_flag(original)  # type: ignore[attr-defined]
    setattr(model_class, _ORIGINAL, original)
    model_class.forward = forward


def unpatch_gpt_model_forward_for_linear_ce_fusion() -> None:
    """Undo the patch; nothing where there is none.

    Raises:
        ValueError: something else has replaced GPTModel.forward since; undo that first.
    """
    model_class = _gpt_model_class()
    original = vars(model_class).get(_ORIGINAL)
    if original is None:
        return
    if getattr(model_class.forward, "__wrapped__", None) is not original:
        raise ValueError(
            "GPTModel.forward was replaced by something else after the patch; undo that first"
        )
    model_class.forward = original
    delattr(model_class, _ORIGINAL)
    del model_class._linear_ce_fusion_chunk_size
    del model_class._linear_ce_fusion_sampling


def _gpt_forward_with_linear_ce_fusion(
    self: object,
    input_ids: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor,
    decoder_input: Tensor = None,  # type: ignore[assignment]
    labels: Tensor = None,  # type: ignore[assignment]
    inference_context: object = None,
    packed_seq_params: object = None,
    extra_block_kwargs: dict | None = None,
    runtime_gather_output: bool | None = None,
    *,
    inference_params: object | None = None,
    loss_mask: Tensor | None = None,
    padding_mask: Tensor | None = None,
    is_spec_decode: bool | None = None,
    return_logprobs_for_linear_ce_fusion: bool = False,
    temperature: float | None = None,
    sampling_params: object | None = None,
) -> Tensor:
    """The patched forward as a function of the model, in NeMo-RL's signature.

    Arguments that are None are left to the model's own defaults, so that any release will do.
    temperature and sampling_params are ours: see `patch_gpt_model_forward_for_linear_ce_fusion`.
    """
    given = locals()
    always = ("input_ids", "position_ids", "attention_mask")
    kwargs = {name: x for name, x in given.items() if x is not None or name in always}
    return _forward(kwargs.pop("self"), (), kwargs)


def _forward(model: GPTModel, args: tuple, kwargs: dict[str, object]) -> Tensor:
    """The model's own forward, or with the flag its next tokens' log-probabilities."""
    sampling = {name: kwargs.pop(name, None) for name in _SAMPLING}
    if kwargs.pop(_FLAG, False):
        return _next_token_logprobs(model, args, kwargs, **sampling)
    return _original_forward(model)(model, *args, **kwargs)


def _sampling(temperature: object, sampling_params: object) -> dict[str, object]:
    """Fields of `LogprobConfig`; sampling_params goes before temperature."""
    if sampling_params is not None:
        temperature = getattr(sampling_params, "temperature", 1.0)
    top_p = getattr(sampling_params, "top_p", None)
    return {
        "temperature": 1.0 if temperature is None else temperature,
        "top_k": getattr(sampling_params, "top_k", None),
        "top_p": 1.0 if top_p is None else top_p,
        "min_p": getattr(sampling_params, "min_p", None) or 0.0,
    }


def _next_token_logprobs(
    model: GPTModel,
    args: tuple,
    kwargs: dict[str, object],
    *,
    temperature: object = None,
    sampling_params: object = None,
) -> Tensor:
    """Run the model once with a patched head; the last stage's `[b, s - 1]`, else its output."""
    original = _original_forward(model)
    arguments = PassedArguments(inspect.signature(original), (model, *args), kwargs)
    labels = arguments.get("labels")
    if labels is None:
        raise ValueError(f"{_FLAG}=True: expected labels (the unshifted input ids), got None")
    cp = or_one_process(ours.ParallelGroups.from_model(model).cp)
    cu_seqlens = padded_bounds(arguments.get("packed_seq_params"))
    arguments["labels"] = _local_next_tokens(labels, arguments.get("input_ids"), cp, cu_seqlens)
    chunk_size = getattr(type(model), "_linear_ce_fusion_chunk_size", None)
    sampling = getattr(type(model), "_linear_ce_fusion_sampling", {})
    if temperature is not None or sampling_params is not None:
        sampling = _sampling(temperature, sampling_params)
    of_head = head_settings(getattr(model, "config", None))
    if chunk_size is not None:
        of_head["chunk_size"] = rows_a_chunk(chunk_size, labels.shape[0])
    config = ours.LogprobConfig(output="stats", ignore_index=IGNORED, **sampling, **of_head)
    inference = any(arguments.get(n) is not None for n in ("inference_context", "inference_params"))
    return whole_logprobs(
        lambda: arguments.call(original),
        model,
        config,
        cp,
        cu_seqlens,
        inference_only=inference and not model.training,
    )


def _local_next_tokens(
    labels: Tensor, input_ids: Tensor | None, cp: ProcessGroup, cu_seqlens: Tensor | None
) -> Tensor:
    """Unshifted labels, this CP rank's part or the whole, -> this rank's next tokens."""
    if input_ids is not None and labels.shape[1] == input_ids.shape[1] * cp.size():
        next_ids = next_tokens(labels, cu_seqlens=cu_seqlens)
        return ours.context_parallel_shard(next_ids, cp_group=cp, cu_seqlens=cu_seqlens)
    return ours.context_parallel_shift(
        labels.long(), cp_group=cp, cu_seqlens=cu_seqlens, fill=IGNORED
    )


def _original_forward(model: GPTModel) -> Callable[..., Tensor]:
    kind = type(model)
    return getattr(kind, _ORIGINAL, None) or getattr(kind, _THEIR_ORIGINAL, None) or kind.forward


def _gpt_model_class() -> type[GPTModel]:
    from megatron.core.models.gpt import GPTModel

    return GPTModel


def _with_flag(original: Callable[..., object]) -> inspect.Signature:
    signature = inspect.signature(original)
    added = {_FLAG: False, **dict.fromkeys(_SAMPLING), "is_spec_decode": None}
    parameters = list(signature.parameters.values())
    last = parameters.pop() if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD else None
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in added.items()
        if name not in signature.parameters
    ]
    return signature.replace(parameters=[*parameters, last] if last else parameters)
