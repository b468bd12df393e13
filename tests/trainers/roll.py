"""ROLL: its `ActorWorker` with `MegatronTrainStrategy` and mcore_adapter's model, as a pipeline's,
and the `StudentWorker` of a distillation.

`initialize`, `compute_log_probs` and `train_step`, all ROLL's own. Outside it: what a CPU needs
(`cpu_devices`, layers given to mcore_adapter, no offloading to the host), no shared storage of Ray,
sequences of random tokens. `MCORE_LOGPROBS_PEERS` names the folder with a checkout `ROLL`.

ROLL's training applies no temperature: the run that must be told apart has another head.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.cpu_megatron.bridged import bridged_block_spec
from mcore_logprobs.cpu_megatron.training import cpu_devices
from tests.trainers import requirements
from tests.trainers.absent import stand_in
from tests.trainers.bridge import without_tensorboard
from tests.trainers.frame import PLAIN, How, Row, Trace, checkout, installed, layout_sizes, watched
from tests.trainers.half import dtype, rounded_alike
from tests.trainers.slime import ray_in_process
from tests.trainers.verl import HIDDEN, VOCABULARY, write_model

# Imported, and not used on the way to a training step.
ABSENT = (
    "transfer_queue", "opentelemetry", "dacite", "datasets", "wandb", "swanlab", "grpc", "google",
    "httpx", "more_itertools", "setproctitle", "fastapi", "pybase64",
)  # fmt: skip
LORA = (
    "apply_megatron_lora", "find_all_embedding_modules", "find_all_linear_modules",
    "find_all_router_modules", "set_linear_is_expert",
)  # fmt: skip
LENGTH = 32
_PIPELINE = {
    "sequence_length": LENGTH,
    "max_grad_norm": 1.0,
    "seed": 7,
    "ppo_epochs": 1,
    "resume_from_checkpoint": False,
    "enable_old_logprobs_recompute": True,
    "use_pg_clip_range": False,
    "pg_clip": 0.2,
    "dual_clip_loss": True,
    "loss_agg_mode": "token-mean",
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "entropy_loss_coef": 0.0,  # its entropy overwrites float32 logits too
}
NOW = (
    "mcore_adapter.parallel_functions.vocab_parallel: VocabUtility, vocab_parallel_logprobs, "
    "vocab_parallel_target_rank: now those of mcore_logprobs.dropin.roll"
)
STEPS = 2  # of two updates each
MICRO, ACCUMULATED = 2, 4  # sequences per micro-batch, micro-batches per update
_MEMORY = (
    "memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved",
    "reset_max_memory_allocated", "reset_max_memory_cached", "reset_peak_memory_stats",
    "device_memory_used", "empty_cache",
)  # fmt: skip


def paths(row: Row) -> list[Path] | str:
    """ROLL's checkout and what it imports."""
    needed, folder = installed("verl"), checkout("ROLL")
    if not needed.is_dir():
        return requirements.missing(needed)
    if folder is None:
        return "no checkout of ROLL: tests/run.sh --all --peers DIR"
    return [folder, folder / "mcore_adapter" / "src", needed]


def prepare(row: Row, folder: Path) -> None:
    """Writes two models, and imports ROLL: the switch replaces what is imported already."""
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    classes = Qwen2Config, Qwen2ForCausalLM, PreTrainedTokenizerFast
    write_model(folder / "model", row.settings, *classes)
    write_model(folder / "other", row.settings, *classes)
    other = Qwen2ForCausalLM.from_pretrained(folder / "other")
    other.lm_head.weight.data.mul_(0.9)
    other.save_pretrained(folder / "other")
    with cpu_devices():
        ray_in_process()
        without_tensorboard()
        stand_in(*ABSENT)
        adapters = importlib.import_module("mcore_adapter.adapters")
        for name in LORA:  # it asks whether peft is there
            vars(adapters).setdefault(name, None)
        stand_in("peft")
        importlib.import_module("roll.distributed.strategy.megatron_strategy")
        importlib.import_module("roll.pipeline.base_worker")
        importlib.import_module("roll.pipeline.distill.distill_worker")


def drive(row: Row, how: How) -> Trace:
    if how.switched:
        # What the module of the page's `your_workers.py` does.
        from mcore_logprobs.dropin.switch import switch_on

        switch_on("roll")
    with cpu_devices():
        return _train(row, how)


def _train(row: Row, how: How) -> Trace:
    actor = _actor(row, how)
    before = _parameters(actor)
    trace = Trace()
    rows = MICRO * LENGTH // row.settings["sizes"].get("context", 1)
    with watched(row, trace, HIDDEN, rows // 2):
        _steps(row, actor, trace)
    trace.parameters = _parameters(actor)
    trace.moved = max(float((x - before[n]).abs().max()) for n, x in trace.parameters.items())
    return trace


def _steps(row: Row, actor: Any, trace: Trace) -> None:
    for step in range(STEPS):
        tensors = _tensors(step, actor, row)
        logprobs, entropy = _logprobs(actor, tensors)
        trace.logprobs.append(logprobs)
        trace.entropy.append(entropy)
        if row.settings.get("student"):
            for part in range(2):
                half = slice(part * MICRO * ACCUMULATED, (part + 1) * MICRO * ACCUMULATED)
                _distill(actor, {name: x[half] for name, x in tensors.items()}, row, trace)
            continue
        noise = 0.3 * torch.randn(
            logprobs.shape, generator=torch.Generator().manual_seed(70 + step)
        )
        tensors["old_log_probs"] = logprobs + noise
        tensors["ref_log_probs"] = logprobs - noise
        _update(actor, tensors, trace)


def _actor(row: Row, how: How) -> Any:
    from mcore_adapter.models import model_factory  # type: ignore[import-not-found]
    from roll.configs import ModelArguments, TrainingArguments  # type: ignore[import-not-found]
    from roll.configs.worker_config import StrategyArguments, WorkerConfig  # type: ignore
    from roll.distributed.executor.worker import RankInfo, Worker  # type: ignore[import-not-found]
    from roll.distributed.strategy import megatron_strategy  # type: ignore[import-not-found]
    from roll.pipeline.base_worker import ActorWorker  # type: ignore[import-not-found]
    from roll.pipeline.distill.distill_worker import StudentWorker  # type: ignore[import-not-found]
    from roll.utils import (  # type: ignore[import-not-found]
        checkpoint_manager,
        context_managers,
        telemetry,
    )

    tracer = types.SimpleNamespace(start_as_current_span=contextlib.nullcontext)
    context_managers.profiling = types.SimpleNamespace(profile=contextlib.nullcontext)
    for name in _MEMORY:  # its platform for a CPU takes them from torch.cpu, which lacks them
        setattr(context_managers.current_platform, name, lambda device=None: 0)
    nothing = types.SimpleNamespace(remote=lambda **given: None)
    checkpoint_manager.shared_storage = types.SimpleNamespace(get=nothing, put=nothing)
    telemetry._noop_tracer_provider = types.SimpleNamespace(get_tracer=lambda name: tracer)

    def placed(worker: Any, worker_config: Any) -> None:
        """Without Ray's shared storage, in which workers find each other's addresses."""
        worker.worker_config = worker_config
        worker.worker_name = worker.cluster_name = "actor_train"
        worker.rank, worker.world_size = int(os.environ["RANK"]), row.processes
        worker.rank_info = RankInfo(world_size=worker.world_size, rank=worker.rank)

    Worker.__init__ = placed
    # Transformer Engine's layers, else; and states on the host already.
    model_factory.McaGPTModel._get_transformer_layer_spec = lambda model, config=None: (
        bridged_block_spec(config or model.config, vp_stage=model.vp_stage)
    )
    for name in ("offload_states", "load_states"):
        setattr(
            megatron_strategy.MegatronTrainStrategy, name, lambda strategy, *given, **options: None
        )
    megatron_strategy.TrainingArguments = _arguments
    # transformers 5 gives the tokenizer of a model that has no processor.
    megatron_strategy.default_processor_provider = lambda **given: None
    sizes = row.settings["sizes"]
    config = WorkerConfig(
        name="actor_train",
        model_args=ModelArguments(
            model_name_or_path=f"{how.folder}/{'model' if _same(how) else 'other'}",
            dtype="bf16" if dtype(row) is torch.bfloat16 else "fp32",
        ),
        training_args=TrainingArguments(
            output_dir=f"{how.folder}/out",
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            max_steps=100,
            per_device_train_batch_size=MICRO,
            gradient_accumulation_steps=ACCUMULATED,
        ),
        strategy_args=StrategyArguments(
            strategy_name="megatron_train",
            strategy_config={
                "tensor_model_parallel_size": sizes.get("tensor", 1),
                "pipeline_model_parallel_size": sizes.get("pipeline", 1),
                "context_parallel_size": sizes.get("context", 1),
                "sequence_parallel": sizes.get("tensor", 1) > 1,
                "use_distributed_optimizer": True,
                "adam_epsilon": 1e-4,
                "use_cpu": True,
                "bias_activation_fusion": False,
                "apply_rope_fusion": False,
                "cross_entropy_loss_fusion": False,
                **row.settings.get("strategy", {}),
            },
        ),
        infer_batch_size=MICRO,
        # Not packed: ROLL's log-probabilities subtract from float32 logits in place, which its own
        # backward refuses for the view that the model gives of one row.
    )
    actor = (StudentWorker if row.settings.get("student") else ActorWorker)(config)
    actor.initialize(
        types.SimpleNamespace(**_PIPELINE | row.settings.get("pipeline", {})),
    )
    for chunk in actor.strategy.models_unwrapped:
        chunk.register_forward_pre_hook(_causal, with_kwargs=True)
    return actor


def _causal(model: Any, args: Any, options: dict[str, Any]) -> Any:
    """Without ROLL's mask of padding, which follows the tokens: for layers that are causal."""
    return args, options | {"attention_mask": None}


def _arguments(**given: Any) -> Any:
    """mcore_adapter's, with those of transformers 4 that the environment's has no field for."""
    from mcore_adapter import TrainingArguments

    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    found = TrainingArguments(**{name: x for name, x in given.items() if name in known})
    for name in given.keys() - known:
        setattr(found, name, given[name])
    return found


def _same(how: How) -> bool:
    return how.temperature == PLAIN.temperature


def _parameters(actor: Any) -> dict[str, Tensor]:
    return {
        f"{i}.{name}": x.detach().clone()
        for i, chunk in enumerate(actor.strategy.models_unwrapped)
        for name, x in chunk.named_parameters()
    }


def _tensors(step: int, actor: Any, row: Row) -> dict[str, Tensor]:
    """Sequences of odd lengths, padded at their ends, of this data-parallel rank."""
    count = 2 * MICRO * ACCUMULATED
    random = torch.Generator().manual_seed(50 + step + 1000 * actor.rank_info.dp_rank)
    index, place = torch.arange(count).unsqueeze(1), torch.arange(LENGTH)
    prompts = 3 + (5 * index + step) % 7
    lengths = prompts + 4 + (3 * index + step) % 9
    vocabulary = row.settings.get("vocabulary", VOCABULARY)
    ids = torch.randint(3, vocabulary, (count, LENGTH), generator=random)
    response = ((place >= prompts) & (place < lengths)).long()
    response[torch.arange(count), (prompts + 2).squeeze(1)] = 0  # a tool's token
    attended = (place < lengths).long()
    advantages = torch.randn(count, 1, generator=random).expand(-1, LENGTH - 1)
    read = {
        "input_ids": ids * attended,
        "attention_mask": attended,
        "position_ids": place.expand(count, -1).contiguous(),
    }
    if row.settings.get("student"):
        targets = read["input_ids"].masked_fill((response == 0) | (attended == 0), -100)
        # As `train_step` names them: of "labels" the model itself makes a loss.
        return read | {"labels_for_loss": targets}
    return read | {
        "response_mask": response,
        "advantages": (advantages * response[:, 1:]).contiguous(),
    }


def _proto(tensors: dict[str, Tensor], **meta: Any) -> Any:
    from roll.distributed.scheduler.protocol import DataProto  # type: ignore

    found = DataProto.from_dict(tensors=dict(tensors))
    found.meta_info = {
        "is_offload_states": False,
        "global_step": 0,
        "loss_mask_keys": ["response_mask"],
        **meta,
    }
    return found


def _logprobs(actor: Any, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Those of this data-parallel rank's sequences, which its pipeline's last stage has.

    The entropy by a pass of its own: `compute_log_probs` takes it after the log-probabilities,
    which have overwritten float32 logits.
    """

    def own_logprobs(data: Any, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        read = data.batch["input_ids"], data.batch["attention_mask"]
        found = actor.strategy.op_compute_log_probs(logits, *read)
        return logits.new_zeros(()), {"log_probs": found.detach().clone()}

    def entropy(data: Any, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        found = actor.strategy.op_compute_entropy(logits, data.batch["attention_mask"])
        return logits.new_zeros(()), {"entropy": found.detach().clone()}

    batch = actor.strategy.get_data_input(_proto(tensors, micro_batch_size=MICRO))
    if hasattr(actor, "compute_log_probs"):
        logprobs = actor.compute_log_probs(_proto(tensors)).batch
    else:
        with torch.no_grad():
            logprobs = actor.strategy.forward_step(batch, own_logprobs)
    with torch.no_grad():
        entropies = actor.strategy.forward_step(batch, entropy)
    own = entropies and (logprobs["log_probs"], entropies["entropy"])
    ranks: list[Any] = [None] * actor.world_size
    torch.distributed.all_gather_object(ranks, (actor.rank_info.dp_rank, own))
    mine = [x for rank, x in ranks if rank == actor.rank_info.dp_rank and x is not None]
    return mine[0]  # type: ignore[no-any-return]


def _distill(student: Any, tensors: dict[str, Tensor], row: Row, trace: Trace) -> None:
    """One update, to a teacher's k ids with random logits, which come as from Ray."""
    count = tensors["input_ids"].shape[0]
    random = torch.Generator().manual_seed(int(tensors["input_ids"].sum()))
    vocabulary = row.settings.get("vocabulary", VOCABULARY)
    k = student.pipeline_config.logits_topk
    values = 2 * torch.randn(count, LENGTH, k, generator=random)
    ids = torch.randint(vocabulary, (count, LENGTH, 1), generator=random) + 7 * torch.arange(k)
    teacher = {
        "topk_probs": values.softmax(-1),
        "topk_log_probs": values.log_softmax(-1),
        "topk_indices": (ids % vocabulary).int(),
        "topk_inf_mask": values.isinf(),
    }
    for name, x in teacher.items():
        student.receive_broadcast_logits((0, 0, 1, "full"), "ray", name, tensor_slice=x)
    _update(student, tensors, trace, loss_mask_keys=["labels_for_loss"])


def _update(actor: Any, tensors: dict[str, Tensor], trace: Trace, **meta: Any) -> None:
    meta["is_offload_optimizer_states_in_train_step"] = False
    found = actor.train_step(_proto(tensors, **meta)).meta_info["metrics"]
    norms = found.pop("actor_train/grad_norm")
    trace.grad_norm += [float(x) for x in (norms if isinstance(norms, list) else [norms])]
    metrics = {}
    for name, x in found.items():
        if "time" not in name:
            each = torch.tensor(x, dtype=torch.float64).reshape(-1)
            metrics |= {f"{name} {i}": float(value) for i, value in enumerate(each)}
    trace.metrics.append(metrics)


# ---- rows ----------------------------------------------------------------------------------------


def _row(layout: str, option: str, **settings: Any) -> Row:
    sizes, processes = layout_sizes(layout)
    calls: tuple[str, ...] = ("vocab_parallel_logprobs", "vocab_parallel_entropy")
    if settings.get("student"):
        calls += ("MegatronInferStrategy",)
    if sizes.get("context"):
        calls += ("context_parallel_gather",)
    return Row(
        "roll",
        layout,
        option,
        processes,
        log=(NOW,),
        calls=calls,
        settings={"sizes": sizes, **settings},
        environment={"MCORE_LOGPROBS_FUSED": "require"} if settings.get("lazy") else {},
        timeout=600,
    )


_RANGE = {"pg_clip": 0.1, "dual_clip_loss": False, "loss_agg_mode": "seq-mean-token-mean"}
_LAZY = {"lazy": True, "vocabulary": 8192}
_DISTILLED = {
    "logits_topk": 8,
    "distill_loss_weight": 0.6,
    "kd_temperature": 1.3,
    "kd_objective": "skewed_forward_kl",
    "skew_lambda": 0.3,
}
_STUDENT = {"student": True, "pipeline": _DISTILLED}
_OF_REVERSE_KL = {"student": True, "pipeline": {**_DISTILLED, "kd_objective": "reverse_kl"}}
ROWS = [
    _row("TP 1", "PPO, KL"),
    _row("TP 2 x SP", "PPO, mean of sequences", pipeline=_RANGE),
    _row("CP 2", "PPO, KL"),
    _row("TP 1", "PPO, KL, lazy logits at V 8192", **_LAZY),
    _row("TP 2 x SP", "PPO, KL, lazy logits at V 8192", **_LAZY),
    _row("CP 2", "PPO, KL, lazy logits at V 8192", **_LAZY),
    _row("PP 2", "PPO, KL"),
    _row("DP 2", "PPO, KL"),
    # Without logits_in_fp32 its own entropy is bfloat16.
    rounded_alike(_row("TP 2 x SP", "PPO, KL"), real=True, entropy=0.1),
    rounded_alike(_row("TP 2 x SP", "PPO, KL, lazy logits at V 8192", **_LAZY)),
    _row("TP 2 x SP", "distillation, skewed KL", **_STUDENT),
    _row("TP 2 x SP", "distillation, reverse KL, lazy logits at V 8192", **_LAZY, **_OF_REVERSE_KL),
    _row("CP 2", "distillation, skewed KL, lazy logits at V 8192", **_LAZY, **_STUDENT),
]
