"""Find a model's language model head, and say whether its logits can be deferred."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import nn

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.groups import group_rank, resolve_tp_group

logger = logging.getLogger("mcore_logprobs")
_said: set[str] = set()


class HeadReport(NamedTuple):
    """Whether a head can take the fused path, and why not (empty where it can)."""

    fusable: bool
    reason: str


def find_language_models(model: Any) -> list[nn.Module]:
    """The Megatron language models inside `model`, one for each virtual pipeline chunk.

    Looks through lists of chunks and through any wrapper's submodules (DDP, Float16Module, FSDP,
    vision-language models), and not inside a language model once found.

    Raises:
        ValueError: a chunk with no language model, or with several side by side (a policy next to
            its teacher): pass the one that is meant.
    """
    if isinstance(model, (list, tuple, nn.ModuleList)):
        return [found for chunk in model for found in find_language_models(chunk)]
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a Megatron model or a list of chunks, got {type(model)}")
    found = _outermost(model)
    if not found:
        raise ValueError(
            "expected a Megatron GPTModel or HybridModel, or a wrapper around one, got "
            f"{type(model).__name__}, in which nothing has compute_language_model_loss"
        )
    if len(found) > 1:
        names = ", ".join(type(m).__name__ for m in found)
        raise ValueError(
            f"{type(model).__name__} holds {len(found)} language models ({names}): pass the one "
            "that is meant"
        )
    return found


def _outermost(module: nn.Module) -> list[nn.Module]:
    if callable(getattr(module, "compute_language_model_loss", None)):
        return [module]
    return [found for child in module.children() for found in _outermost(child)]


def has_head(language_model: Any) -> bool:
    """Whether this pipeline stage has an output layer."""
    return (
        getattr(language_model, "output_layer", None) is not None
        and getattr(language_model, "post_process", True) is not False
    )


def head_tp_group(layer: Any) -> Any:
    """The TP group over which the output layer's vocabulary is split, Megatron's by default."""
    return resolve_tp_group(getattr(layer, "tp_group", None))


def head_report(model: Any, *, softcap: float | None = None) -> HeadReport:
    """Whether the head of `model` (wrapped or not) can take the fused path, and if not, why.

    Stages without a head are fusable: there is nothing to do. `softcap` is that of the config to
    come, if it has one. For `doctor` and for the patch.

    Raises:
        ValueError: no language model is found in `model`.
    """
    for language_model in find_language_models(model):
        if has_head(language_model):
            report = _model_report(language_model, softcap)
            if not report.fusable:
                return report
    return HeadReport(True, "")


def _model_report(language_model: Any, softcap: float | None) -> HeadReport:
    layer = language_model.output_layer
    weight = getattr(layer, "weight", None)
    if weight is None and hasattr(language_model, "shared_embedding_or_output_weight"):
        weight = language_model.shared_embedding_or_output_weight()
    scale_logits = getattr(language_model, "_scale_logits", None)
    return layer_report(layer, weight, scale_logits, softcap=softcap)


def layer_report(
    layer: Any, weight: Any, scale_logits: Any, *, softcap: float | None
) -> HeadReport:
    """The same for an output layer, the weight it is called with, and what scales its logits."""
    reason = (
        _reason_against_layer(layer)
        or _reason_against_weight(weight)
        or _reason_against_scale(scale_logits)
    )
    if not reason and softcap is not None and layer.bias is not None:
        reason = "its bias would have to come before the softcap"
    return HeadReport(not reason, reason)


def takes_fused_path(config: LogprobConfig, report: HeadReport) -> bool:
    """Whether this config on this head takes the fused path.

    Raises:
        ValueError: fused="require" on a head that cannot.
    """
    if config.fused == "require" and not report.fusable:
        raise ValueError(f"fused='require', but {report.reason}")
    return bool(config.fused) and report.fusable


def say_unfused(reason: str, tp_group: Any) -> None:
    """One log line a reason, from the first TP rank, that a head computes its logits whole."""
    if group_rank(tp_group) == 0 and reason not in _said:
        _said.add(reason)
        logger.warning("not fused, the logits are computed whole: %s", reason)


def _reason_against_layer(layer: Any) -> str:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    kind = type(layer).__name__
    if not isinstance(layer, ColumnParallelLinear):
        return f"the output layer is a {kind} (an adapter, FP8 or other head), not Megatron's own"
    for name in ("forward", "_forward_impl"):
        if getattr(type(layer), name, None) is not getattr(ColumnParallelLinear, name, None):
            return f"{kind} overrides ColumnParallelLinear.{name}"
    if "forward" in vars(layer) and not _is_ours(vars(layer)["forward"]):
        return "something else has replaced the output layer's forward"
    if layer._backward_hooks or layer._backward_pre_hooks:
        return "backward hooks on the output layer want the logits' gradient"
    flags = {
        "is_expert": "it is an expert layer",
        "explicit_expert_comm": "it is an expert layer",
        "disable_grad_reduce": "its input's gradient is reduced elsewhere (disable_grad_reduce)",
        "gather_output": "it gathers its output over TP (gather_output)",
    }
    for name, reason in flags.items():
        if getattr(layer, name, False):
            return reason
    if layer.skip_bias_add and layer.bias is not None:
        return "its bias is added by the caller (skip_bias_add)"
    if getattr(layer, "gtp_remat_size", 1) > 1:
        return "its weight is sharded once more and gathered when needed (gtp_remat)"
    if getattr(layer.config, "defer_embedding_wgrad_compute", False):
        return "its weight gradient is deferred (defer_embedding_wgrad_compute)"
    return ""


def _reason_against_weight(weight: Any) -> str:
    if weight is None:
        return "no weight was found for it"
    if type(weight) not in (nn.Parameter, torch.Tensor):
        return f"its weight is a {type(weight).__name__}, not a plain tensor"
    plain = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    return "" if weight.dtype in plain else f"its weight is {weight.dtype}"


def _reason_against_scale(scale_logits: Any) -> str:
    """Only Megatron's own `_scale_logits` is known to be a multiplication."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    if scale_logits is None or _is_ours(scale_logits):
        return ""
    known = getattr(LanguageModule, "_scale_logits", None)
    if known is None or getattr(scale_logits, "__func__", None) is not known:
        return "its logits go through a _scale_logits that is not Megatron's own"
    return ""


def _is_ours(value: Any) -> bool:
    owner = getattr(value, "__self__", None)
    return type(owner).__module__.startswith("mcore_logprobs.megatron")
