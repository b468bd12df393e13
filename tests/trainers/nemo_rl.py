"""NeMo-RL: `MegatronPolicyWorkerImpl` as its `Policy` starts it, from Megatron-Bridge's checkpoint.

The worker's own constructor (a Hugging Face model is converted, saved, read again), `get_logprobs`
and `train` with `ClippedPGLossFn`, by the settings of NeMo-RL's `grpo_math_1B.yaml`. Outside it:
what a CPU needs (`cpu_training`, layers given to Megatron-Bridge), sequences of random tokens.
NeMo-RL, Megatron-Bridge and Megatron-LM are repositories: `MCORE_LOGPROBS_PEERS` names the folder
with checkouts `RL`, `Megatron-Bridge` and `Megatron-LM`.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mcore_logprobs.cpu_megatron.training import cpu_training
from tests.trainers.absent import stand_in
from tests.trainers.bridge import import_bridge, paths_with_bridge
from tests.trainers.frame import How, Row, Trace, checkout, installed, layout_sizes, watched
from tests.trainers.half import dtype, dtype_name, rounded_alike
from tests.trainers.verl import HIDDEN, VOCABULARY, write_model

# Imported, and not used on the way to a training step.
ABSENT = ("zmq", "pynvml", "uvicorn", "fastapi", "mlflow", "swanlab", "prometheus_client")
NOW = "nemo_rl.distributed.model_utils: "
STEPS, UPDATES = 2, 2  # updates per step
SEQUENCES = 16  # per step, of all data-parallel ranks
LENGTH = 32


def paths(row: Row) -> list[Path] | str:
    """NeMo-RL's checkout, what it imports, and Megatron-LM's before the installed one."""
    return paths_with_bridge("RL", installed("verl"))  # tensordict, omegaconf and hydra


def prepare(row: Row, folder: Path) -> None:
    """Writes the model, and imports the worker: the switch replaces what is imported already."""
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    classes = Qwen2Config, Qwen2ForCausalLM, PreTrainedTokenizerFast
    write_model(folder / "model", row.settings, *classes)
    with cpu_training():
        import_bridge(Path(str(checkout("Megatron-Bridge")), "src"))
        stand_in(*ABSENT)
        import transformers

        # It asks for a release before that of the environment, for tokenizers of other models.
        with mock.patch.object(transformers, "__version__", "5.8.1"):
            importlib.import_module("nemo_rl.models.policy.workers.megatron_policy_worker")


def drive(row: Row, how: How) -> Trace:
    if how.switched:
        # What the module of the page's `your_workers.py` does.
        from mcore_logprobs.dropin.switch import switch_on

        switch_on("nemo_rl", fused="require" if row.settings.get("lazy") else None)
    os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = f"{how.folder}/megatron"
    with cpu_training():
        return _train(row, how)


def _train(row: Row, how: How) -> Trace:
    from nemo_rl.algorithms.loss import (  # type: ignore[import-not-found]
        ClippedPGLossConfig,
        ClippedPGLossFn,
    )

    given = row.settings
    worker = _worker(row, how)
    settings = ClippedPGLossConfig(**_KL | given.get("loss", {}))
    loss = ClippedPGLossFn(settings, given["fused"])
    before = _parameters(worker)
    trace = Trace()
    with watched(row, trace, HIDDEN, 8 // given["sizes"].get("context", 1)):
        for step in range(STEPS):
            batch = _batch(step, row)
            logprobs = _logprobs(worker, batch, reference=False)
            reference = _logprobs(worker, batch, reference=True)
            trace.logprobs += [logprobs, reference]
            random = torch.Generator().manual_seed(70 + step)
            # Of an older policy: ratios on both sides of the clip range.
            noise = 0.3 * torch.randn(logprobs.shape, generator=random)
            batch["prev_logprobs"] = logprobs + noise
            batch["generation_logprobs"] = logprobs + 0.5 * noise
            batch["reference_policy_logprobs"] = reference
            _update(worker, loss, batch, trace)
    trace.parameters = _parameters(worker)
    trace.moved = max(float((x - before[n]).abs().max()) for n, x in trace.parameters.items())
    return trace


def _worker(row: Row, how: How) -> Any:
    import ray  # type: ignore[import-not-found]
    from nemo_rl.distributed.named_sharding import NamedSharding  # type: ignore
    from nemo_rl.models.megatron import setup  # type: ignore[import-not-found]
    from nemo_rl.models.policy.workers import megatron_policy_worker  # type: ignore
    from transformers import AutoTokenizer

    ray.get_gpu_ids = lambda: [0]
    setup.initialize_megatron = functools.partial(setup.initialize_megatron, allow_no_cuda=True)
    megatron_policy_worker.torch = _Torch()
    sizes: Mapping[str, int] = row.settings["sizes"]
    names = ("pipeline", "data", "context", "tensor")
    ranks = torch.arange(row.processes).reshape([sizes.get(name, 1) for name in names])
    sharding = NamedSharding(ranks.numpy(), [f"{name}_parallel" for name in names])
    return megatron_policy_worker.MegatronPolicyWorkerImpl(
        _config(row, how),
        AutoTokenizer.from_pretrained(f"{how.folder}/model"),
        worker_sharding_annotations=sharding,
    )


class _Torch:
    """torch, but that the device's number is the one that Ray gave."""

    class cuda:
        current_device = staticmethod(lambda: 0)

        def __getattr__(self, name: str) -> Any:
            return getattr(torch.cuda, name)

    cuda = cuda()  # type: ignore

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _config(row: Row, how: How) -> dict[str, Any]:
    """`policy` of NeMo-RL's own file, with what a small model on a CPU needs."""
    from omegaconf import OmegaConf  # type: ignore[import-not-found]

    given, sizes = row.settings, row.settings["sizes"]
    OmegaConf.register_new_resolver("mul", lambda a, b: a * b)
    file = Path(str(checkout("RL")), "examples", "configs", "grpo_math_1B.yaml")
    config = OmegaConf.load(file)
    policy = OmegaConf.to_container(OmegaConf.merge(config, {"policy": {
        "model_name": f"{how.folder}/model",
        "precision": dtype_name(row),
        "train_global_batch_size": SEQUENCES // UPDATES,
        "train_micro_batch_size": 2,
        "max_total_sequence_length": LENGTH,
        "make_sequence_length_divisible_by": 2 * row.processes,
        # So that no chunk of the library's is as long as a micro-batch.
        "logprob_chunk_size": 3 if given.get("lazy") else None,
        "sequence_packing": {"enabled": not given.get("padded", False)},
        "dtensor_cfg": {"enabled": False},
        "generation": {"temperature": how.temperature, **given.get("sampling", {})},
        "megatron_cfg": {
            "enabled": True,
            **{f"{n}_{'' if n == 'context' else 'model_'}parallel_size": sizes.get(n, 1)
               for n in ("tensor", "pipeline", "context")},
            "sequence_parallel": sizes.get("tensor", 1) > 1,
            "checkpoint": {"async_save": False},
            "apply_rope_fusion": False,
            "bias_activation_fusion": False,
            "moe_permute_fusion": False,
            "empty_unused_memory_level": 0,
            "defer_fp32_logits": bool(given.get("lazy")),  # chunks ask for it
            "train_iters": 10,
            "use_fused_linear_logprobs": given["fused"],
            "optimizer": {
                "lr": 1e-3, "min_lr": 1e-3, "weight_decay": 0.0, "adam_eps": 1e-4,
                "bf16": dtype(row) is torch.bfloat16, "use_precision_aware_optimizer": False,
            },
            "scheduler": {"lr_warmup_iters": 0, "lr_warmup_init": 0.0},
            "distributed_data_parallel_config": {"overlap_param_gather": not given["fused"]},
        },
    }}), resolve=True)["policy"]  # fmt: skip
    return policy  # type: ignore[no-any-return]


def _parameters(worker: Any) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in worker.model.named_parameters()}


def _batch(step: int, row: Row) -> Any:
    """Sequences of odd lengths, padded at their ends; the whole world's."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict  # type: ignore

    random = torch.Generator().manual_seed(50 + step)
    prompts = [3 + (5 * i + step) % 7 for i in range(SEQUENCES)]
    lengths = [p + 4 + (3 * i + step) % 9 for i, p in enumerate(prompts)]
    vocabulary = row.settings.get("vocabulary", VOCABULARY)
    ids, mask = torch.zeros(SEQUENCES, LENGTH, dtype=torch.int64), torch.zeros(SEQUENCES, LENGTH)
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        ids[i, :length] = torch.randint(3, vocabulary, (length,), generator=random)
        mask[i, prompt:length] = 1
        mask[i, prompt + 2] = 0  # a tool's token
    advantages = torch.randn(SEQUENCES, 1, generator=random)
    return BatchedDataDict(
        input_ids=ids,
        input_lengths=torch.tensor(lengths),
        token_mask=mask,
        sample_mask=(torch.arange(SEQUENCES) != 5).float(),  # one sequence is left out
        advantages=advantages.expand(-1, LENGTH).contiguous(),
    )


# ---- what NeMo-RL's Policy does around its workers -----------------------------------------------


def _mine(worker: Any, batch: Any, size: int | None, tokens: str) -> tuple[Any, Any]:
    """This data-parallel rank's part of a batch, and where all parts' rows were."""
    from megatron.core import parallel_state

    options = {}
    if packing := worker.cfg["sequence_packing"]["enabled"]:
        settings = worker.cfg["sequence_packing"]
        options["sequence_packing_args"] = {
            "algorithm": settings["algorithm"],
            "microbatch_order": settings["microbatch_order"],
            "input_key": "input_ids",
            "input_lengths_key": "input_lengths",
            "sequence_length_pad_multiple": worker.cfg["make_sequence_length_divisible_by"],
            "max_tokens_per_microbatch": settings[tokens],
        }
    found = batch.shard_by_batch_size(worker.dp_size, batch_size=size, **options)
    parts, order = found if packing else (found, None)
    return parts[parallel_state.get_data_parallel_rank()], order


def _logprobs(worker: Any, batch: Any, reference: bool) -> Tensor:
    from megatron.core import parallel_state
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    mine, order = _mine(worker, batch, None, "logprob_mb_tokens")
    found = (worker.get_reference_policy_logprobs if reference else worker.get_logprobs)(data=mine)
    parts: list[Any] = [None] * worker.dp_size
    group = parallel_state.get_data_parallel_group()
    torch.distributed.all_gather_object(parts, dict(found), group=group)
    whole = BatchedDataDict.from_batches([BatchedDataDict(part) for part in parts])
    if order is not None:
        whole.reorder_data(order)
    (logprobs,) = whole.values()
    return logprobs


def _update(worker: Any, loss: Any, batch: Any, trace: Trace) -> None:
    size = worker.cfg["train_global_batch_size"]
    mine, _ = _mine(worker, batch, size, "train_mb_tokens")
    found = worker.train(mine, loss)
    trace.grad_norm.append(float(found["grad_norm"]))
    metrics = {"global_loss": float(found["global_loss"].sum())}
    for name, each in found["all_mb_metrics"].items():
        metrics |= {f"{name} {i}": float(x) for i, x in enumerate(each)}
    trace.metrics.append(metrics)


# ---- rows ----------------------------------------------------------------------------------------


def _row(layout: str, option: str, **settings: Any) -> Row:
    """lazy: with a large vocabulary, where whatever wants real logits fails, and none are made."""
    sizes, processes = layout_sizes(layout)
    padded = settings.get("padded", False)
    call = "" if padded else "_packed_sequences"
    calls = (f"from_parallel_logits_to_logprobs{call}",)
    if settings.get("fused"):
        calls = ("patch_gpt_model_forward_for_linear_ce_fusion", "_next_token_logprobs")
    return Row(
        "nemo_rl",
        layout,
        option,
        processes,
        log=(NOW,),
        calls=calls,
        settings={"sizes": sizes, "fused": False, **settings},
        timeout=600,
    )


_KL = {"reference_policy_kl_penalty": 0.1}
_GSPO = {
    "sequence_level_importance_ratios": True,
    "token_level_loss": False,
    "ratio_clip_min": 0.05,
    "ratio_clip_max": 0.05,
}
_CISPO = {"use_cispo": True, "ratio_clip_max": 0.3}
_TIS = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "tis",
    "truncated_importance_sampling_ratio": 1.1,
}
_FILTERS = {"top_k": 40, "top_p": 0.95}
_LAZY = {"lazy": True, "vocabulary": 8192}
ROWS = [
    _row("TP 1", "GRPO, packed"),
    _row("TP 1", "GRPO, top-k and top-p", padded=True, sampling=_FILTERS),
    _row("TP 1", "GRPO, packed, lazy logits at V 8192", **_LAZY),
    _row("TP 2 x SP", "GSPO, packed", loss=_GSPO),
    _row("TP 2 x SP", "CISPO, fused linear logprobs", loss=_CISPO, padded=True, fused=True),
    _row("TP 2 x SP", "GRPO, packed, lazy logits at V 8192", **_LAZY),
    _row("CP 2", "GRPO, TIS, packed", loss=_TIS),
    _row("CP 2", "GRPO, packed, lazy logits at V 8192", **_LAZY),
    _row("PP 2", "GRPO, packed"),
    _row("DP 2", "CISPO, packed", loss=_CISPO),
    rounded_alike(_row("TP 2 x SP", "GRPO, packed"), real=True),
    rounded_alike(_row("TP 2 x SP", "GRPO, packed, lazy logits at V 8192", **_LAZY)),
]
