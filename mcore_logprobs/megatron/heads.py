"""Find a model's language model head, and say whether its logits can be deferred."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import check_logits_dtype
from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.groups import VocabShard, group_rank, resolve_tp_group
from mcore_logprobs.megatron.adapters import (
    adapter_reason,
    base_dtype,
    base_layer,
    head_lora,
    is_adapter,
)
from mcore_logprobs.megatron.versions import takes
from mcore_logprobs.sources.lazy import gives_on
from mcore_logprobs.sources.lazy_dispatch import is_harmless
from mcore_logprobs.sources.source import check_segments
from mcore_logprobs.sources.vocab_bias import vocab_bias
from mcore_logprobs.vocabulary import tokenizer_size

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

logger = logging.getLogger("mcore_logprobs")
_said: set[str] = set()


class HeadReport(NamedTuple):
    """Whether a head can take the fused path, and why not (empty where it can)."""

    fusable: bool
    reason: str


def find_language_models(model: object) -> list[nn.Module]:
    """The Megatron language models inside `model`, one for each virtual pipeline chunk.

    Looks through lists of chunks and through any wrapper's submodules (DDP, Float16Module, FSDP,
    `torch.compile`, PEFT, vision-language models), and not inside a language model once found. Of a
    vision-language model's pipeline stage that has only encoders, the model itself is returned: a
    stage without a head.

    Raises:
        ValueError: a chunk with no language model, or with several side by side (a policy next to
            its teacher): pass one of them.
    """
    if isinstance(model, (list, tuple, nn.ModuleList)):
        return [one for chunk in model for one in find_language_models(chunk)]
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a Megatron model or a list of chunks, got {type(model)}")
    language_models = _outermost(model)
    if not language_models:
        raise ValueError(
            "expected a Megatron GPTModel or HybridModel, or a wrapper around one, got "
            f"{type(model).__name__}, in which nothing has compute_language_model_loss"
        )
    if len(language_models) > 1:
        names = ", ".join(type(m).__name__ for m in language_models)
        raise ValueError(
            f"{type(model).__name__} holds {len(language_models)} language models ({names}): "
            "pass the one that is meant"
        )
    return language_models


def _outermost(module: nn.Module) -> list[nn.Module]:
    # What its class or itself has: `torch.compile` and PEFT wrap a model in a module that hands the
    # model's attributes on. A mock may never have called Module's constructor.
    own = vars(module)
    children = dict.fromkeys(own.get("_modules", {}).values())  # one may have several names
    brings_loss = "compute_language_model_loss" in own or callable(
        getattr(type(module), "compute_language_model_loss", None)
    )
    if brings_loss and ("post_process" in own or "output_layer" in own.get("_modules", {})):
        return [module]
    # A wrapper may have a method of its own, which calls that of the model within.
    inside = [one for child in children if child is not None for one in _outermost(child)]
    # LLaVAModel(add_decoder=False), and a MimoModel of encoders.
    without = own.get("language_model", module) is None
    encoders = without and "MegatronModule" in {kind.__name__ for kind in type(module).__mro__}
    return inside or [module] * (brings_loss or encoders)


def has_head(language_model: object) -> bool:
    """Whether this pipeline stage ends in an output layer."""
    return (
        getattr(language_model, "output_layer", None) is not None
        and getattr(language_model, "post_process", True) is not False
        and getattr(language_model, "add_decoder", True) is not False  # T5Model's encoder stage
    )


def head_tp_group(layer: nn.Module) -> ProcessGroup | None:
    """The TP group over which the output layer's vocabulary is split, Megatron's by default."""
    return resolve_tp_group(getattr(base_layer(layer), "tp_group", None))


def head_report(model: object, config: LogprobConfig | None = None) -> HeadReport:
    """Whether the head of `model` (wrapped or not) can take the fused path, and if not, why.

    Stages without a head are fusable: there is nothing to do. For `doctor` and for the patch.

    Args:
        config: the patch's; None: the defaults.

    Raises:
        ValueError: no language model is found in `model`.
    """
    for language_model in find_language_models(model):
        if has_head(language_model):
            report = _model_report(language_model, config or LogprobConfig())
            if not report.fusable:
                return report
    return HeadReport(True, "")


def check_vocabulary(
    layer: nn.Module, config: LogprobConfig, logit_bias: Tensor | None = None
) -> None:
    """What does not fit the head's vocabulary is refused before the first call, fused or not.

    Args:
        logit_bias: `[V/TP]` of this rank; None: the settings have it.

    Raises:
        ValueError: vocab_size, ids, a bias or invariant_segments.
    """
    base = base_layer(layer)
    width = getattr(base, "output_size_per_partition", None)
    if width is None or getattr(base, "gather_output", False):
        return  # of another kind: the call finds out
    shard = VocabShard.of(width, head_tp_group(layer), config.vocab_size)
    bias = config.logit_bias if logit_bias is None else logit_bias
    if bias is not None or config.disallowed_ids is not None:
        device = torch.device("cpu") if logit_bias is None else logit_bias.device
        vocab_bias(bias, config.disallowed_ids, shard, device, torch.float32)
    if config.invariant_segments is not None:
        check_segments(shard, config.invariant_segments)


def check_head(layer: nn.Module, config: LogprobConfig) -> None:
    """Refuse settings that a fused head cannot honor, before the first call.

    Raises:
        ValueError: invariant_segments with a LoRA; a low-precision logits_dtype other than the
            layer's own.
    """
    output_dtype = getattr(base_layer(layer), "output_dtype", None)
    if output_dtype is not None and config.logits_dtype not in (torch.float32, output_dtype):
        raise ValueError(
            f"logits_dtype: expected float32 or the output layer's output_dtype, {output_dtype}, "
            f"got {config.logits_dtype}"
        )
    if config.invariant_segments is not None and head_lora(layer) is not None:
        raise ValueError(
            f"invariant_segments: expected None with a LoRA on the output layer, got "
            f"{config.invariant_segments}: its low-rank GEMMs are not batch-invariant"
        )


def _model_report(language_model: LanguageModule, config: LogprobConfig) -> HeadReport:
    layer = language_model.output_layer
    weight = getattr(base_layer(layer), "weight", None)
    if weight is None and hasattr(language_model, "shared_embedding_or_output_weight"):
        weight = language_model.shared_embedding_or_output_weight()
    scale_logits = getattr(language_model, "_scale_logits", None)
    reason = (
        # A weight that FSDP has sharded counts as what it is in a forward.
        call_reason(layer, weight, gather=False, gathered_by_then=True)
        or scale_reason(scale_logits)
        or settings_reason(layer, config)
    )
    return HeadReport(not reason, reason)


def settings_reason(layer: object, config: LogprobConfig) -> str:
    """Why this layer is not fused under these settings, or ""."""
    base = base_layer(layer)
    if config.softcap is not None and base.bias is not None:
        return "its bias would have to come before the softcap"
    if config.invariant_segments is None and getattr(base.config, "batch_invariant_mode", False):
        return (
            "Megatron's batch_invariant_mode is on, whose matmuls a fused head does not use "
            "(invariant_segments is its own)"
        )
    return ""


def call_reason(
    layer: nn.Module, weight: Tensor | None, *, gather: bool, gathered_by_then: bool = False
) -> str:
    """Why a call of the layer cannot be deferred, or "": all that may change between calls."""
    if gather:
        return "the call gathers the logits over TP (runtime_gather_output)"
    return (
        kind_reason(layer)
        or _reason_against_layer(base_layer(layer))
        or (adapter_reason(layer, gathered_by_then) if is_adapter(layer) else "")
        or _reason_against_hooks(layer)
        or _reason_against_weight(weight, gathered_by_then)
    )


def say_unfused(reason: str, tp_group: ProcessGroup | None) -> None:
    """One log line per reason, from the first TP rank, that a head computes its logits whole."""
    if group_rank(tp_group) == 0 and reason not in _said:
        _said.add(reason)
        logger.warning("not fused, the logits are materialized: %s", reason)


def say_unchecked(tokens: str, labels: str) -> None:
    """One log line that labels are not compared with the tokens of their call."""
    if "check_labels" not in _said:
        _said.add("check_labels")
        logger.warning(
            "check_labels: expected input_ids of the %s' shape in the same call, got %s: the "
            "labels of such calls are not checked (a later pipeline stage, decoder_input, or an "
            "output processor beside multi-token prediction in combined 1F1B)",
            labels,
            tokens,
        )


def say_left_out(reason: str, by: str = "output='stats'") -> None:
    """One log line that a loss of the model's own is not called."""
    if (line := f"{by} skips a loss: {reason}") not in _said:
        _said.add(line)
        logger.warning(line)


def say_padding(language_model: object, config: LogprobConfig) -> None:
    """One log line where padding is counted, if Megatron-LM's tokenizer has the true size."""
    size, columns = tokenizer_size(), getattr(language_model, "vocab_size", None)
    if config.vocab_size is not None or size is None or columns is None or size >= columns:
        return
    if (reason := f"vocab_size {size} of {columns}") not in _said:
        _said.add(reason)
        logger.warning(
            "vocab_size: expected %d, the tokenizer's size, got None, which counts all %d columns "
            "of the head: its padding has probability too",
            size,
            columns,
        )


def require_fused(config: LogprobConfig, reason: str, tp_group: ProcessGroup | None) -> None:
    """For a call whose loss comes from real logits for `reason`: refuse it, or say so once.

    Raises:
        ValueError: fused="require".
    """
    if config.fused == "require":
        raise ValueError(f"fused='require', but {reason}")
    if config.fused:
        say_unfused(reason, tp_group)


def say_replaced(language_model: LanguageModule) -> None:
    """One log line where Megatron's loss would call a function that is not Megatron's.

    Args:
        language_model: whose loss is computed here instead.
    """
    from megatron.core.models.common.language_module import language_module as module

    config, name = language_model.config, "vocab_parallel_cross_entropy"
    function = module.tensor_parallel.vocab_parallel_cross_entropy
    if config.cross_entropy_loss_fusion:
        te = config.cross_entropy_fusion_impl == "te"
        name = "te_parallel_cross_entropy" if te else "fused_vocab_parallel_cross_entropy"
        function = getattr(module, name, None)
    line = (
        f"output='loss' computes Megatron's loss: {name}, in whose place something has put another "
        "function, is not called; a compute_language_model_loss of the model's own would be"
    )
    if function is not None and not _is_megatrons(function) and line not in _said:
        _said.add(line)
        logger.warning(line)


def own_loss(language_model: LanguageModule) -> str:
    """Who brings a `compute_language_model_loss`: "class", "instance", or "" (only Megatron)."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    loss = getattr(language_model, "compute_language_model_loss", None)
    if loss is None:  # a stage of encoders
        return ""
    if _is_ours(loss):
        return loss.__self__.own_loss
    megatrons = LanguageModule.compute_language_model_loss
    if getattr(loss, "__func__", None) is megatrons and _is_megatrons(megatrons):
        return ""
    return "instance" if "compute_language_model_loss" in vars(language_model) else "class"


def loss_reason(language_model: object) -> str:
    kind = type(language_model).__name__
    return f"{kind} has a compute_language_model_loss of its own, which takes logits"


def unseen_reason(language_model: object, unseen: str) -> str:
    """Why settings that such a loss does not see (`Call.unseen`) are refused."""
    return (
        f"{loss_reason(language_model)}: expected output='loss', which calls it, and no "
        f"setting that it does not see, got {unseen}. To leave it out, put Megatron's own on the "
        "model: model.compute_language_model_loss = "
        "types.MethodType(LanguageModule.compute_language_model_loss, model)"
    )


def reshards_after_forward(layer: nn.Module) -> bool:
    """Whether FSDP takes the layer's weight away as soon as the layer's own forward is over."""
    return any(_names(hook)[1] == "_post_forward" for hook in layer._forward_hooks.values())


# AReaL's `_forward_impl` is Megatron's product, given in the weight's dtype or, rounded once, in
# float32 (fp32_output), as here; with fp32_operands its weight gradient is not rounded either.
_AREAL_HEAD = "areal.models.mcore.vocab_parallel_head"


def kind_reason(layer: nn.Module) -> str:
    """Why this layer's forward cannot be replaced at all, or ""."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    if is_adapter(layer):
        if "forward" in vars(layer) and not _is_ours(vars(layer)["forward"]):
            return "something else has replaced the output layer's forward"
        layer = base_layer(layer)
    kind = type(layer).__name__
    if not isinstance(layer, ColumnParallelLinear):
        return f"the output layer is a {kind} (an adapter, FP8 or other head), not Megatron's own"
    for name in ("forward", "_forward_impl"):
        method, megatrons = (getattr(t, name, None) for t in (type(layer), ColumnParallelLinear))
        known = _returns_logits(kind, method) or getattr(method, "__module__", "") == _AREAL_HEAD
        if method is not megatrons and not known:
            return f"{kind} overrides ColumnParallelLinear.{name}"
        if megatrons is not None and not _is_megatrons(megatrons):
            return f"something else has replaced ColumnParallelLinear.{name}"
        if name in vars(layer) and not _is_ours(vars(layer)[name]):
            return f"something else has replaced the output layer's {name}"
    if getattr(layer, "fp32_operands", False):
        return f"{kind} multiplies float32 copies (fp32_operands)"
    return ""


def _returns_logits(kind: str, forward: Callable[..., object] | None) -> bool:
    """Whether this is the output layer of Megatron's dev branch, which has a loss of its own.

    Its forward is ColumnParallelLinear's for calls that do not ask for that loss.
    """
    return kind == "LinearCrossEntropyModule" and takes(forward, "output_cross_entropy_loss")


def _reason_against_hooks(layer: nn.Module) -> str:
    """Hooks get the layer's output, and only FSDP's are known to leave it as it is."""
    everywhere = nn.modules.module
    if layer._backward_hooks or layer._backward_pre_hooks:
        return "backward hooks on the output layer want the logits' gradient"
    if everywhere._global_backward_hooks or everywhere._global_backward_pre_hooks:
        return "backward hooks on all modules want the logits' gradient"
    for hook in (*layer._forward_hooks.values(), *everywhere._global_forward_hooks.values()):
        where, name = _names(hook)
        if where.startswith("torch.distributed.fsdp.") and not hasattr(hook, "__self__"):
            return "FSDP shards its weight in one group with other modules"
        if not (is_harmless(hook) or _gives_logits_on(hook)):
            return f"a forward hook on the output layer ({name}) may read or change the logits"
    if reshards_after_forward(layer):  # which is called as a module again, with its weight there
        before = (
            *layer._forward_pre_hooks.values(),
            *everywhere._global_forward_pre_hooks.values(),
        )
        for hook in before:
            if not is_harmless(hook):
                name = _names(hook)[1]
                return f"a forward pre-hook ({name}) would run twice, as FSDP calls the layer again"
    return ""


# mcore_adapter's makes the gradient contiguous, for a LoRA's backward.
_IDENTITY_HOOKS = (("mcore_adapter.models.model_utils", "mca_lora_logits_postprocess_hook"),)
_tried: dict[object, bool] = {}


def _gives_logits_on(hook: Callable[..., Any]) -> bool:
    """Whether it is a known hook that leaves logits and their gradient as they are; tried once."""
    if _names(hook) not in _IDENTITY_HOOKS:
        return False
    if hook not in _tried:
        _tried[hook] = gives_on(lambda logits: hook(None, (), (logits, None))[0])
    return _tried[hook]


def _names(hook: object) -> tuple[str, str]:
    """(module, name) of the function that a hook is."""
    hook = getattr(hook, "func", hook)  # functools.partial
    return getattr(hook, "__module__", "") or "", getattr(hook, "__name__", type(hook).__name__)


def _reason_against_layer(layer: ColumnParallelLinear) -> str:
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
    output_dtype, dtype = getattr(layer, "output_dtype", None), base_dtype(layer)
    if output_dtype not in (None, dtype) and (
        dtype == torch.float64 or not check_logits_dtype.accepts(output_dtype)
    ):
        return f"its logits are {output_dtype} (output_dtype), its weight {dtype}"
    return ""


def _reason_against_weight(weight: Tensor | None, gathered_by_then: bool) -> str:
    if weight is None:
        return "no weight was found for it"
    if gathered_by_then and type(weight).__name__ == "DTensor":
        weight = weight.to_local()  # type: ignore[attr-defined]
    if type(weight) not in (nn.Parameter, torch.Tensor):
        return f"its weight is a {type(weight).__name__}, not a plain tensor"
    plain = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    return "" if weight.dtype in plain else f"its weight is {weight.dtype}"


def scale_reason(scale_logits: object) -> str:
    """Only Megatron's own `_scale_logits` is known to be a multiplication."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    if scale_logits is None or _is_ours(scale_logits):
        return ""
    known = getattr(LanguageModule, "_scale_logits", None)
    is_known = getattr(scale_logits, "__func__", None) is known
    if known is None or not (is_known and _is_megatrons(known)):
        return "its logits go through a _scale_logits that is not Megatron's own"
    return ""


def _is_megatrons(function: object) -> bool:
    """Whether its code stands in megatron.core, whose classes others change in place.

    `functools.wraps` gives a wrapper the module and the name of what it wraps, but not its code.
    """
    import megatron.core

    code = getattr(function, "__code__", None)
    if code is None:  # built to machine code, as by Cython
        return (getattr(function, "__module__", None) or "").startswith("megatron.core")
    return any(code.co_filename.startswith(folder + os.sep) for folder in megatron.core.__path__)


def _is_ours(value: object) -> bool:
    owner = getattr(value, "__self__", None)
    return type(owner).__module__.startswith("mcore_logprobs.megatron")
