"""verl's Megatron helpers: `verl.utils.megatron.tensor_parallel`, `verl.utils.kernel
.linear_cross_entropy`, `verl.models.mcore.model_forward_fused` and its top-k distillation.

    import verl.models.mcore.model_forward_fused as fused
    from mcore_logprobs.dropin import verl as ours
    fused.fused_output_processor = ours.fused_output_processor
    fused.patch_fused_forward = ours.patch_fused_forward  # before the engine is built

Labels are used as they are (verl rolls them when it packs); log-probabilities, not losses; a label
of -100 gives 0. TP is Megatron's group, but where a group is an argument and None means one
process. No input is modified: verl's entropy overwrites its logits for a while.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import mcore_logprobs as ours
from mcore_logprobs.dropin._common import (
    applied,
    no_targets,
    or_one_process,
    setting,
    share_of_gradient,
)
from mcore_logprobs.dropin.lazy_models import head_settings
from mcore_logprobs.groups import group_size, resolve_tp_group
from mcore_logprobs.megatron.imports import PassedArguments

__all__ = [
    "ForwardKL",
    "FusedOutput",
    "FusedOutputProcessorContext",
    "LinearCrossEntropy",
    "compute_forward_kl_topk",
    "fused_output_processor",
    "linear_cross_entropy",
    "patch_fused_forward",
    "unpatch_fused_forward",
    "vocab_parallel_entropy",
    "vocab_parallel_entropy_with_chunking",
    "vocab_parallel_log_probs_from_logits",
    "vocab_parallel_log_probs_from_logits_response_rmpad",
    "vocab_parallel_sum_pi_squared",
]


# ---- from logits ---------------------------------------------------------------------------------


def vocab_parallel_entropy(vocab_parallel_logits: Tensor) -> Tensor:
    """`[..., V/TP]` -> float32 entropy `[...]` in nats (>= 0); differentiable."""
    return ours.vocab_parallel_entropy(vocab_parallel_logits)


def vocab_parallel_entropy_with_chunking(
    vocab_parallel_logits: Tensor, chunk_size: int = 2048
) -> Tensor:
    """`vocab_parallel_entropy`, chunk_size tokens at a time.

    verl's takes only three dimensions; this one takes `[n, V/TP]` too.
    """
    return ours.vocab_parallel_entropy(vocab_parallel_logits, chunk_size=chunk_size)


def vocab_parallel_sum_pi_squared(vocab_parallel_logits: Tensor) -> Tensor:
    """`[..., V/TP]` -> float32 sum of p^2 `[...]`; differentiable.

    Its gradient is 2 p (p - sum p^2) for each logit; verl's is another under TP, for its
    all-reduces are unknown to autograd.
    """
    squares = ours.vocab_parallel_token_stats(
        vocab_parallel_logits, no_targets(vocab_parallel_logits), sum_pi_squared=True
    ).sum_pi_squared
    assert squares is not None
    return squares


def vocab_parallel_log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """`[..., V/TP]`, global ids `[...]` -> float32 log-probabilities `[...]`; differentiable."""
    return ours.vocab_parallel_logprobs(logits, labels)


def vocab_parallel_log_probs_from_logits_response_rmpad(
    input_ids: Tensor, attention_mask: Tensor, logits_rmpad: Tensor, response_length: int
) -> Tensor:
    """Unpadded logits `[n, V/TP]` of `[b, s]` ids -> float32 `[b, response_length]`.

    input_ids are unshifted: the tokens that the mask keeps are rolled by -1 as one row, as in verl,
    so that a sequence's last token is given its successor in the row; 0 stands in padding. Needs no
    flash_attn. Host syncs: one, for the kept tokens' number.
    """
    batch, length = input_ids.shape
    kept = attention_mask.reshape(-1).bool().nonzero().squeeze(-1)
    labels = input_ids.reshape(-1)[kept].roll(-1)
    logprobs = ours.vocab_parallel_logprobs(logits_rmpad, labels)
    padded = logprobs.new_zeros(batch * length).index_put((kept,), logprobs)
    return padded.view(batch, length)[:, -response_length - 1 : -1]


# ---- from hidden states --------------------------------------------------------------------------


@applied
def LinearCrossEntropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor | None = 1.0,
    reduction: str | None = "none",
    dist_process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Hidden states, weight and labels -> (log-probabilities, entropy), never holding the logits.

    Shape: hidden `[..., h]`, weight `[V/TP, h]`, labels `[...]` of as many tokens; both results are
    flat `[n]` float32. reduction "sum" or "mean" reduces only the log-probabilities (a log-
    probability still, no loss).

    With a group of several ranks the gradient of hidden is a rank's share of it, to be summed over
    the group, as verl's callers do (`gather_from_sequence_parallel_region`); without sequence
    parallelism they do not, and `fused_output_processor` is what is right in both cases.
    """
    kinds: dict[str, Any] = {"none": lambda x: x, "sum": torch.sum, "mean": torch.mean}
    kind = str(reduction).lower()
    if kind not in kinds:
        raise ValueError(f"reduction: expected one of {', '.join(kinds)}, got {reduction!r}")
    group = or_one_process(dist_process_group)
    labels = labels.reshape(-1)
    stats = ours.linear_token_stats(
        share_of_gradient(hidden.reshape(-1, hidden.shape[-1]), group.size()),
        weight,
        labels,
        entropy=True,
        temperature=_per_token(temperature, labels),
        tp_group=group,
    )
    assert stats.entropy is not None
    return kinds[kind](stats.logprobs), stats.entropy


linear_cross_entropy = LinearCrossEntropy.apply


def _per_token(temperature: object, labels: Tensor) -> Any:
    """A number, or a tensor of as many temperatures as labels in their shape."""
    if temperature is None:
        return 1.0
    if isinstance(temperature, Tensor):
        if temperature.numel() == 1:
            return float(temperature)  # what LogprobConfig takes; verl resolves it likewise
        if temperature.numel() == labels.numel():
            return temperature.reshape(labels.shape)
    return temperature


@dataclasses.dataclass
class FusedOutput:
    """What the fused forward returns, in the fields of verl's `CausalLMOutputForPPO`.

    log_probs and entropy are flat `[b * s]` float32 in the order of the labels.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Any = None
    hidden_states: Tensor | None = None
    attentions: Any = None


@dataclasses.dataclass
class FusedOutputProcessorContext:
    """What goes with the output processor: the temperature."""

    temperature: float | Tensor


def fused_output_processor(
    *,
    hidden_states: Tensor,
    output_layer: object,
    output_weight: Tensor | None,
    labels: Tensor,
    context: Any,
    config: object,
    scale_logits: object = None,
    **given: object,
) -> FusedOutput:
    """Megatron's output processor (0.18 and later): log-probabilities and entropy of the labels.

    Shape: hidden_states `[s, b, h]` (`[s/TP, b, h]` under sequence parallelism), labels `[b, s]`
    already shifted. context.temperature: a number (or a tensor of one).

    The gradient of the hidden states is reduced over TP with and without sequence parallelism
    (verl's own is not without). Where config.config_logger_dir is set, Megatron's config logger
    writes the model's inputs and both results, as in verl. Differs for a batch of more than one
    row: verl pairs `[s, b]` hidden states with `[b, s]` labels.
    """
    temperature = _per_token(context.temperature, labels)
    settings = ours.LogprobConfig(
        output="stats", entropy=True, temperature=temperature, **head_settings(config)
    )
    stats = ours.logprob_output_processor(
        hidden_states=hidden_states,
        output_layer=output_layer,
        output_weight=output_weight,
        labels=labels,
        context=settings,
        config=config,
        scale_logits=scale_logits,
    )
    output = _flat(stats, hidden_states)
    _log_config(config, given, logprobs=output.log_probs, entropy=output.entropy)
    return output


def _log_config(config: object, given: dict[str, object], **results: object) -> None:
    from megatron.core.config_logger import has_config_logger_enabled, log_config_to_disk

    if has_config_logger_enabled(config):
        names = ("input_ids", "position_ids", "attention_mask", "decoder_input")
        # The logger saves only tensors of this class; others it writes as text.
        payload = OrderedDict({name: given.get(name) for name in names} | results)
        log_config_to_disk(config, payload, prefix="input_and_logits")


def _flat(stats: Any, hidden: Tensor | None = None) -> FusedOutput:
    return FusedOutput(stats.logprobs.reshape(-1), stats.entropy.reshape(-1), hidden_states=hidden)


_OWN_FORWARD = "_mcore_logprobs_forward"
_THEIR_FORWARD = "forward_backup"  # where verl's patch keeps the one that it replaced


def patch_fused_forward(model: Any) -> None:
    """Let the model's forward take `temperature=` and, given labels, return a `FusedOutput`.

    model: a GPTModel or HybridModel in any wrapper. On every Megatron release, tied weights,
    sequence and context parallelism, packed sequences and multi-token prediction included (its
    own losses stay Megatron's). A second call does nothing. Without labels the model behaves as
    before. The weights are read through the output layer's own call, so that its hooks run.

    Raises:
        ValueError: verl's own patch is on the model.
    """
    for language_model in _language_models(model):
        if _OWN_FORWARD in vars(language_model):
            continue
        if _THEIR_FORWARD in vars(language_model):
            raise ValueError(
                f"{type(language_model).__name__}: expected a forward without verl's own patch, to "
                "which this one would not hand the temperature; call verl's unpatch_fused_forward "
                "first, or switch on before the engine builds its model"
            )
        original = language_model.forward

        def forward(
            *args: object,
            temperature: object = 1.0,
            _model: object = language_model,
            _original: object = original,
            **kwargs: object,
        ) -> object:
            return _fused_forward(_model, _original, args, kwargs, temperature)

        functools.update_wrapper(forward, original)
        vars(language_model)[_OWN_FORWARD] = forward, vars(language_model).get("forward")
        vars(language_model)["forward"] = forward


def unpatch_fused_forward(model: object) -> None:
    """Undo `patch_fused_forward`; a model that is not patched is not changed.

    Raises:
        ValueError: something else has replaced the model's forward since; undo that first.
    """
    for language_model in _language_models(model):
        if _OWN_FORWARD not in vars(language_model):
            continue
        patched, before = vars(language_model)[_OWN_FORWARD]
        if vars(language_model).get("forward") is not patched:
            raise ValueError(
                f"{type(language_model).__name__}.forward was replaced by something else after the "
                "patch; undo that first"
            )
        del vars(language_model)[_OWN_FORWARD]
        del vars(language_model)["forward"]
        if before is not None:
            vars(language_model)["forward"] = before


def _language_models(model: object) -> list[Any]:
    from mcore_logprobs.megatron.heads import find_language_models

    return find_language_models(model)


def _fused_forward(
    model: object, original: Any, args: tuple, kwargs: dict, temperature: Any
) -> object:
    arguments = PassedArguments(inspect.signature(original), args, kwargs)
    labels = arguments.get("labels")
    if labels is None or arguments.get("output_processor") is not None:
        return original(*args, **kwargs)
    temperature = _per_token(temperature, labels)
    of_head = head_settings(getattr(model, "config", None))
    config = ours.LogprobConfig(output="stats", entropy=True, temperature=temperature, **of_head)
    with ours.patch_gpt_model(model, config):
        stats = original(*args, **kwargs)
    if not isinstance(stats, ours.TokenStats):
        return stats  # a pipeline stage without a head
    return _flat(stats)


# ---- distillation --------------------------------------------------------------------------------


class ForwardKL(dict):
    """verl's mapping of results; unpacks into losses, student mass, teacher mass.

    verl's annotation and docstring say three tensors, its code returns a mapping of five: both
    callers are served.
    """

    def __iter__(self) -> Iterator[Any]:
        return iter([self[k] for k in ("distillation_losses", "student_mass", "teacher_mass")])


def compute_forward_kl_topk(
    student_logits: Tensor,
    teacher_topk_log_probs: Tensor,
    teacher_topk_ids: Tensor,
    config: object,
    data_format: str,
) -> ForwardKL:
    """Sum over the teacher's k ids of q (log q - log p), not renormalized: float32 `[b, s/CP]`.

    Shape: student_logits `[b, s/CP, V/TP]`; the teacher's `[b, s, k]` whole, split zigzag here, or
    nested tensors, which verl's own `preprocess_{thd,bshd}_engine` packs.

    config.distillation_loss.log_prob_min_clamp: floor of both log-probabilities, or None; where the
    student's is below it there is no gradient. config is a dataclass, mapping or OmegaConf node.

    Returns:
        distillation_losses (differentiable), and without gradient student_mass and teacher_mass
        (sum of p and of q over the k ids), overlap_count (of the teacher's ids how many are among
        the student's k best) and overlap_token_advantage (mean of -q (log q - log p) over those).

    Raises:
        ValueError: data_format is neither "thd" nor "bshd".
    """
    if data_format not in ("thd", "bshd"):
        raise ValueError(f"data_format: expected 'thd' or 'bshd', got {data_format!r}")
    cp = ours.ParallelGroups.from_megatron().cp
    teacher, ids = (
        _local_teacher(x, data_format, or_one_process(cp))
        for x in (teacher_topk_log_probs, teacher_topk_ids)
    )
    floor = setting(setting(config, "distillation_loss"), "log_prob_min_clamp")
    log_q = teacher.float()
    log_p = ours.vocab_parallel_gather(student_logits, ids.long(), log_softmax=True)
    if floor is not None:
        log_q, log_p = log_q.clamp_min(floor), log_p.clamp_min(floor)
    q = log_q.exp()
    per_id = q * (log_q - log_p)
    with torch.no_grad():
        vocabulary = student_logits.shape[-1] * group_size(resolve_tp_group(None))
        _, best = ours.vocab_parallel_topk(student_logits, min(ids.shape[-1], vocabulary))
        overlap = (ids.unsqueeze(-1) == best.unsqueeze(-2)).any(-1)
        count = overlap.sum(-1)
        advantage = (-per_id * overlap).sum(-1) / count.clamp_min(1)
    return ForwardKL(
        distillation_losses=per_id.sum(-1),
        student_mass=log_p.detach().exp().sum(-1),
        teacher_mass=q.sum(-1),
        overlap_count=count,
        overlap_token_advantage=advantage,
    )


def _local_teacher(x: Tensor, data_format: str, cp: Any) -> Tensor:
    if not x.is_nested:
        return ours.context_parallel_shard(x, cp_group=cp)
    from verl.models.mcore import util  # type: ignore[import-not-found]

    pack = getattr(util, f"preprocess_{data_format}_engine")
    return pack(x, pre_process=True)[0]
