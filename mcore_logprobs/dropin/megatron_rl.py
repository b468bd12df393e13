"""Megatron-LM's own RL: `megatron.rl.rl_utils`.

    import mcore_logprobs.dropin.megatron_rl as ours
    rl_utils.get_logprobs = ours.get_logprobs

Upstream gathers the whole vocabulary on every TP rank and loops over the batch; here no logits are
held at all.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import mcore_logprobs as ours
from mcore_logprobs.dropin._common import (
    IGNORED,
    ONE_PROCESS,
    grad_unless,
    next_tokens,
    or_one_process,
    padded_bounds,
    whole_logprobs,
)
from mcore_logprobs.dropin.lazy_models import head_settings
from mcore_logprobs.megatron.heads import find_language_models

__all__ = ["get_logprobs", "selective_log_softmax"]


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """Whole-vocabulary logits `[..., V]`, ids `[...]` -> float32 log-probabilities `[...]`.

    Ids are used as they are (not shifted). Upstream's result has the logits' dtype and is formed
    in it; this one is float32, without a float32 copy of the logits.

    Raises:
        ValueError: under Megatron's batch-invariant mode.
    """
    _refuse_batch_invariance()
    return ours.vocab_parallel_logprobs(logits, index, tp_group=ONE_PROCESS)


def get_logprobs(
    model: Any,
    tokens: Tensor,
    position_ids: Tensor | None,
    no_grad: bool = False,
    sequence_packing: bool = False,
    packed_seq_params: Any = None,
) -> Tensor:
    """Log-probabilities of each next token, `[b, s - 1]`; other stages: what model gives.

    They are float32; with Megatron's own arguments `--bf16` and `--fp16` rounded to that once, as
    Megatron's RL asserts the dtype of what it collects.

    Shape:
        tokens, position_ids: `[b, s]`, whole sequences on every rank, unshifted.

    Context parallelism: tokens are split zigzag here (s divides by 2 * CP; packed sequences each by
    themselves) and the result is gathered on every rank; its backward sums over CP, as upstream's.

    packed_seq_params with qkv_format "thd": tokens are one bin `[1, s]`; 0 stands at each
    sequence's last token, where upstream has the log-probability of the next sequence's first.
    Bounds repeated at the end (sequences of no tokens) are fine. Without parameters a bin counts as
    one sequence and, inside Megatron-LM's RL, the model is given the parameters that upstream makes
    for it: captured graphs know one signature.

    Raises:
        ValueError: under Megatron's batch-invariant mode, whose log-softmax is bitwise identical to
            the inference engine's.
    """
    _refuse_batch_invariance()
    cp = _cp_group(model)
    packed = packed_seq_params
    if packed is None and tokens.shape[0] == 1:
        packed = _upstream_s_own(tokens, sequence_packing)
    cu_seqlens = padded_bounds(packed)
    if cu_seqlens is not None and cp.size() > 1:
        packed = _for_ranks(packed, cp)

    def local(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return ours.context_parallel_shard(x, cp_group=cp, cu_seqlens=cu_seqlens)

    labels = local(next_tokens(tokens, cu_seqlens=cu_seqlens))
    extra = {} if packed is None else {"packed_seq_params": packed}
    of_head = head_settings(getattr(model, "config", None))
    config = ours.LogprobConfig(output="stats", ignore_index=IGNORED, **of_head)

    def run() -> object:
        return model(local(tokens), local(position_ids), None, labels=labels, **extra)

    with _without_flash_decode(model):
        if _returns_logits(model):
            with grad_unless(no_grad):
                logits = model(tokens, position_ids, None, **extra)
                return selective_log_softmax(logits[:, :-1], tokens[:, 1:]).to(_collected_in())
        dtype = _collected_in()
        return whole_logprobs(
            run, model, config, cp, cu_seqlens, inference_only=no_grad, dtype=dtype
        )


def _collected_in() -> torch.dtype:
    """What `rl_utils.compute_logprobs_batch` asserts of log-probabilities, by Megatron's arguments.

    Those of the training step are rounded likewise: a ratio to others than itself would be noise.
    """
    global_vars, args = sys.modules.get("megatron.training.global_vars"), None
    with contextlib.suppress(AssertionError):  # there are none yet
        args = None if global_vars is None else global_vars.get_args()
    if getattr(args, "bf16", False):
        return torch.bfloat16
    return torch.float16 if getattr(args, "fp16", False) else torch.float32


def _refuse_batch_invariance() -> None:
    name = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
    kernels = sys.modules.get(name)
    if kernels is not None and kernels.is_batch_invariant_mode_enabled():
        raise ValueError(
            "Megatron's batch-invariant mode: expected it off: its log-softmax is bitwise "
            "identical to the inference engine's, and this one is not. Run train_rl.py without "
            "this drop-in"
        )


def _cp_group(model: Any) -> Any:
    """The model's or Megatron's; only this process if there is neither, as upstream does."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return or_one_process(ours.ParallelGroups.from_model(model).cp)
    return ONE_PROCESS


def _returns_logits(model: object) -> bool:
    """Whether the model keeps no output layer of its own to patch, and is no pipeline stage."""
    language_models = find_language_models(model)
    return not any(
        hasattr(m, "output_layer") or hasattr(m, "post_process") for m in language_models
    )


def _upstream_s_own(tokens: Tensor, sequence_packing: bool) -> object:
    """What `rl_utils.get_logprobs` gives the model where it is given nothing (0.18 and later)."""
    packing = sys.modules.get("megatron.rl.sequence_packing_utils")
    if packing is None or not hasattr(packing, "get_default_packed_seq_params"):
        return None
    length = tokens.shape[1]
    if sequence_packing:
        from megatron.training import get_args

        sequences = get_args().rl_sequence_packing_max_sequences_per_bin
        return packing.get_default_packed_seq_params(length, sequences, tokens.device)
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, length], dtype=torch.int32, device=tokens.device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=length,
        max_seqlen_kv=length,
        **_known(PackedSeqParams, pad_between_seqs=False),
    )


def _for_ranks(packed: Any, cp: Any) -> object:
    """A copy with what attention over several CP ranks reads, as upstream annotates its own."""
    packed = copy.copy(packed)
    for side in ("q", "kv"):
        if getattr(packed, f"cu_seqlens_{side}_padded", None) is None:
            setattr(packed, f"cu_seqlens_{side}_padded", getattr(packed, f"cu_seqlens_{side}"))
    for name, value in _known(type(packed), cp_group=cp, local_cp_size=cp.size()).items():
        setattr(packed, name, value)
    return packed


def _known(params_class: Any, **fields: object) -> dict[str, object]:
    """The given fields that this release's class has."""
    return {name: x for name, x in fields.items() if name in params_class.__dataclass_fields__}


@contextlib.contextmanager
def _without_flash_decode(model: Any) -> Iterator[None]:
    """Off for the call: a config made for inference would change the training forward."""
    # A mock of a model may never have called the constructor of Module.
    modules = model.modules() if hasattr(model, "_modules") else [model]
    configs = {id(m.config): m.config for m in modules if hasattr(m, "config")}
    on = [config for config in configs.values() if getattr(config, "flash_decode", False)]
    for config in on:
        config.flash_decode = False
    try:
        yield
    finally:
        for config in on:
            config.flash_decode = True
