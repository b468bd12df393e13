"""SkyRL: `MegatronPolicyWorkerBase` as its trainer starts it, with Megatron-Bridge's model.

The worker's own process groups, model, distributed optimizer and scheduler, then `forward`,
`forward_backward` and `optim_step`, through `MegatronModelWrapper`. Outside it: what a CPU needs
(`cpu_training`, layers given to Megatron-Bridge), sequences of random tokens.
`MCORE_LOGPROBS_PEERS` names the folder with checkouts `SkyRL`, `Megatron-Bridge`, `Megatron-LM`.
"""

from __future__ import annotations

import importlib
import os
import typing
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import typing_extensions
from torch import Tensor

from mcore_logprobs.cpu_megatron.training import cpu_training
from tests.trainers.absent import stand_in, stand_in_for_jaxtyping
from tests.trainers.bridge import import_bridge, paths_with_bridge
from tests.trainers.frame import How, Row, Trace, checkout, installed, layout_sizes, watched
from tests.trainers.half import dtype, dtype_name, rounded_alike
from tests.trainers.verl import HIDDEN, VOCABULARY, write_model

# Imported, and not used on the way to a training step.
ABSENT = (
    "cloudpathlib", "skyrl_gym", "aiohttp", "pybase64", "zstandard",
    "megatron.core.dist_checkpointing.strategies.base",  # of checkpoints; gone from Megatron's main
)  # fmt: skip
NOW = "skyrl.backends.skyrl_train.distributed.megatron.model_utils: "
STEPS, UPDATES = 2, 2  # updates per step
SEQUENCES = 16  # per step, of all data-parallel ranks
PROMPT, RESPONSE = 12, 20  # with padding
MICRO = 2


def paths(row: Row) -> list[Path] | str:
    """SkyRL's checkout, what it imports, and Megatron-LM's before the installed one."""
    return paths_with_bridge("SkyRL", installed("skyrl"))


def prepare(row: Row, folder: Path) -> None:
    """Writes the model, and imports the worker: the switch replaces what is imported already."""
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    classes = Qwen2Config, Qwen2ForCausalLM, PreTrainedTokenizerFast
    write_model(folder / "model", row.settings, *classes)
    with cpu_training():
        import_bridge(Path(str(checkout("Megatron-Bridge")), "src"))
        stand_in(*ABSENT)
        import ray  # type: ignore[import-not-found]

        ray.is_initialized = lambda: False
        stand_in_for_jaxtyping()
        # pydantic asks for it below Python 3.12.
        with mock.patch.object(typing, "TypedDict", typing_extensions.TypedDict):
            importlib.import_module("skyrl.backends.skyrl_train.workers.megatron.megatron_worker")


def drive(row: Row, how: How) -> Trace:
    if how.switched:
        # What the two lines at the top of megatron_model_wrapper.py do.
        from mcore_logprobs.dropin.switch import switch_on

        switch_on("skyrl", fused="require" if row.settings.get("lazy") else None)
    with cpu_training():
        return _train(row, how)


def _train(row: Row, how: How) -> Trace:
    worker = _worker(row, how)
    before = _parameters(worker)
    trace = Trace()
    base: list[Tensor] = []
    with watched(row, trace, HIDDEN, 8 // row.settings["sizes"].get("context", 1)):
        for step in range(STEPS):
            batch = _batch(step, row)
            if not base:
                base.append(_logprobs(worker, batch, trace))  # the reference's, of the first batch
            logprobs = _logprobs(worker, batch, trace)
            _update(worker, batch, logprobs, step, trace)
    trace.parameters = _parameters(worker)
    trace.moved = max(float((x - before[n]).abs().max()) for n, x in trace.parameters.items())
    return trace


def _worker(row: Row, how: How) -> Any:
    from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import (  # type: ignore
        MegatronPolicyWorkerBase,
    )

    worker = MegatronPolicyWorkerBase(
        cfg=_config(row, how),
        world_size=row.processes,
        rank=int(os.environ["RANK"]),
        local_rank=0,
        master_addr=os.environ["MASTER_ADDR"],
        master_port=os.environ["MASTER_PORT"],
        sequence_parallel_size=1,
    )
    worker.init_worker_process_group()
    worker.init_model(f"{how.folder}/model", num_training_steps=10)
    return worker


def _config(row: Row, how: How) -> Any:
    from skyrl.train.config import TrainerConfig  # type: ignore[import-not-found]

    given, sizes = row.settings, row.settings["sizes"]
    config = TrainerConfig(
        strategy="megatron",
        bf16=dtype(row) is torch.bfloat16,
        flash_attn=False,
        gradient_checkpointing=False,
        use_expandable_segments=False,
        micro_train_batch_size_per_gpu=MICRO,
        micro_forward_batch_size_per_gpu=MICRO,
        remove_microbatch_padding=not given.get("padded", False),
        fused_lm_head_logprob=given.get("fused", False),
        logprobs_chunk_size=3 if given.get("lazy") else 1024,
        vocab_entropy_chunk_size=3 if given.get("lazy") else None,
    )
    for name, value in {
        "temperature": how.temperature,
        "kl_loss_coef": 0.1,
        **given.get("algorithm", {}),
    }.items():
        setattr(config.algorithm, name, value)
    config.policy.optimizer_config.lr = 1e-3
    config.policy.optimizer_config.weight_decay = 0.0
    megatron = config.policy.megatron_config
    for name in ("tensor", "pipeline", "context"):
        kind = f"{name}_{'' if name == 'context' else 'model_'}parallel_size"
        setattr(megatron, kind, sizes.get(name, 1))
    megatron.ddp_config.average_in_collective = False  # gloo has sums
    megatron.optimizer_config_kwargs |= {
        "bf16": config.bf16, "params_dtype": dtype_name(row),
        "adam_eps": 1e-4,
    }  # fmt: skip
    megatron.transformer_config_kwargs |= {
        "apply_rope_fusion": False, "bias_activation_fusion": False, "bf16": config.bf16,
        "params_dtype": dtype(row), "masked_softmax_fusion": False,
    }  # fmt: skip
    return config


def _parameters(worker: Any) -> dict[str, Tensor]:
    return {
        f"{i}.{name}": x.detach().clone()
        for i, chunk in enumerate(worker.actor_module)
        for name, x in chunk.named_parameters()
    }


def _batch(step: int, row: Row) -> Any:
    """Sequences of odd lengths, prompts padded before and responses after; this rank's part."""
    from megatron.core import parallel_state
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch  # type: ignore

    random = torch.Generator().manual_seed(50 + step)
    vocabulary = row.settings.get("vocabulary", VOCABULARY)
    ids = torch.randint(3, vocabulary, (SEQUENCES, PROMPT + RESPONSE), generator=random)
    place = torch.arange(PROMPT + RESPONSE)
    index = torch.arange(SEQUENCES).unsqueeze(1)
    start, end = PROMPT - 3 - (5 * index + step) % 7, PROMPT + 4 + (3 * index + step) % 9
    attended = ((place >= start) & (place < end)).long()
    response = attended[:, PROMPT:]
    loss = response.float()
    loss[:, 2] = 0  # a tool's token
    advantages = torch.randn(SEQUENCES, 1, generator=random).expand(-1, RESPONSE)
    noise = 0.3 * torch.randn(SEQUENCES, RESPONSE, generator=random)
    size = SEQUENCES // row.settings["sizes"].get("data", 1)
    rank = parallel_state.get_data_parallel_rank()
    tensors = {
        "sequences": ids * attended,
        "attention_mask": attended,
        "response_mask": response,
        "loss_mask": loss,
        "advantages": advantages * loss,
        "noise": noise,
    }
    mine = {name: x[rank * size : (rank + 1) * size].contiguous() for name, x in tensors.items()}
    batch = TrainingInputBatch(mine)
    batch.metadata = {"response_length": RESPONSE}
    return batch


def _logprobs(worker: Any, batch: Any, trace: Trace) -> Tensor:
    outputs = worker.forward(batch).loss_fn_outputs
    found = torch.tensor([each["logprobs"] for each in outputs])
    if found.shape != (batch.batch_size, RESPONSE):  # a stage without a head has a placeholder
        return torch.zeros(batch.batch_size, RESPONSE)
    trace.logprobs.append(found * batch["response_mask"])
    return found


def _update(worker: Any, batch: Any, logprobs: Tensor, step: int, trace: Trace) -> None:
    """Two updates, with ratios on both sides of the clip range."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import (  # type: ignore[import-not-found]
        apply_loss_reduction_to_advantages_minibatch,
    )

    noise = batch["noise"]
    batch["action_log_probs"] = logprobs + noise
    batch["rollout_logprobs"] = logprobs + 0.5 * noise
    batch["base_action_log_probs"] = logprobs - 0.5 * noise
    for part in batch.chunk(batch.batch_size // UPDATES):
        part["advantages"] = apply_loss_reduction_to_advantages_minibatch(
            part["advantages"], part["loss_mask"], "token_mean", MICRO, PROMPT + RESPONSE
        )
        metrics = worker.forward_backward(part).metrics
        trace.grad_norm.append(worker.optim_step())
        trace.entropy.append(torch.tensor(metrics.pop("policy_entropy")))
        trace.metrics.append({name: float(x) for name, x in metrics.items()})


# ---- rows ----------------------------------------------------------------------------------------


def _row(layout: str, option: str, **settings: Any) -> Row:
    """lazy: with a large vocabulary, where whatever wants real logits fails, and none are made."""
    sizes, processes = layout_sizes(layout)
    source = "hidden" if settings.get("fused") else "logits"
    packed = "" if settings.get("padded") else "_packed_sequences"
    return Row(
        "skyrl",
        layout,
        option,
        processes,
        log=(NOW,),
        calls=(f"from_parallel_{source}_to_logprobs{packed}",),
        settings={"sizes": sizes, **settings},
        timeout=600,
    )


_ENTROPY = {"use_entropy_loss": True, "entropy_loss_coef": 0.02}
_CISPO = {"policy_loss_type": "cispo"}
_GSPO = {"policy_loss_type": "gspo", "loss_reduction": "sequence_mean"}
_LAZY = {"lazy": True, "vocabulary": 8192, "algorithm": _ENTROPY}
ROWS = [
    _row("TP 1", "PPO, packed, entropy", algorithm=_ENTROPY),
    _row("TP 1", "CISPO, padded, entropy", padded=True, algorithm=_CISPO | _ENTROPY),
    _row("TP 1", "PPO, packed, entropy, lazy logits at V 8192", **_LAZY),
    _row("TP 2 x SP", "GSPO, packed, entropy", algorithm=_GSPO | _ENTROPY),
    _row("TP 2 x SP", "PPO, packed, fused_lm_head_logprob", fused=True),
    _row("TP 2 x SP", "PPO, packed, entropy, lazy logits at V 8192", **_LAZY),
    _row("CP 2", "PPO, packed, entropy", algorithm=_ENTROPY),
    _row("PP 2", "CISPO, packed", algorithm=_CISPO),
    _row("DP 2", "PPO, packed, entropy", algorithm=_ENTROPY),
    rounded_alike(_row("TP 2 x SP", "PPO, packed, entropy", algorithm=_ENTROPY), real=True),
    rounded_alike(_row("TP 2 x SP", "PPO, packed, entropy, lazy logits at V 8192", **_LAZY)),
]
