"""verl: hydra's config, `ActorRolloutRefWorker`, `MegatronEngineWithLMHead`, mbridge, `ppo_loss`.

All of it verl's, Megatron's and mbridge's own. Outside them: what a CPU needs (`cpu_devices`, a
platform registered with verl, layers given to mbridge), a model of two layers with seeded weights
and the batches that verl's trainer would send.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.dropin.frameworks import source_root
from tests.trainers import requirements
from tests.trainers.absent import stand_in
from tests.trainers.frame import How, Row, Trace, installed, watched
from tests.trainers.half import dtype_name, rounded_alike

PLUGIN = "mcore_logprobs.dropin.verl_plugin"
FUSED = "verl.models.mcore.model_forward_fused: fused_output_processor, patch_fused_forward"
LOGITS = "verl.utils.megatron.tensor_parallel: vocab_parallel_entropy"
NOW = "now those of mcore_logprobs.dropin.verl"

VOCABULARY, HIDDEN = 96, 32
VARIABLE = "VERL_USE_EXTERNAL_MODULES"


def _row(
    layout: str,
    option: str,
    *,
    calls: Sequence[str] = ("vocab_parallel_log_probs_from_logits", "vocab_parallel_entropy"),
    **more: Any,
) -> Row:
    sizes = {"tp": 1, "cp": 1, "pp": 1, "dp": 1}
    words = layout.lower().replace(" x ", " ").replace(",", "").split()
    for name, size in itertools.pairwise(words):
        if name in sizes:
            sizes[name] = int(size)
    processes = sizes["tp"] * sizes["cp"] * sizes["pp"] * sizes["dp"]
    settings = {**sizes, "sp": "sp" in words, **more.pop("settings", {})}
    settings["alike"] = not {"overrides", "lazy"} & settings.keys()
    if settings.get("lazy"):
        settings |= {"vocabulary": 8192, "sizes": {"tensor": sizes["tp"]}}
        more["environment"] = {"MCORE_LOGPROBS_FUSED": "require"}
    more.setdefault("log", (LOGITS, NOW))
    return Row("verl", layout, option, processes, calls=tuple(calls), settings=settings, **more)


LAZY = "gives lazy logits from now on"
_FUSED: dict[str, Any] = {
    "settings": {"fused": True},
    "calls": ("patch_fused_forward", "_fused_forward"),
}
_FUSED["log"] = (FUSED, NOW)
_ACTOR = "actor_rollout_ref.actor"
_REFERENCE = {"reference": True, "overrides": {f"{_ACTOR}.use_kl_loss": True}}
_DISTILL = {
    "distillation.enabled": True,
    "distillation.nnodes": 1,
    "distillation.n_gpus_per_node": 2,  # the teacher's, whose numbers are given here
    "distillation.teacher_models.teacher_model.model_path": "given",
    "distillation.distillation_loss.loss_mode": "forward_kl_topk",
    "distillation.distillation_loss.topk": 5,
}

ROWS = [
    # Nothing in verl's own step may read logits but by the names that are replaced.
    _row(
        "TP 2 SP",
        "logits, external_lib",
        night=False,
        log=(LOGITS, NOW, LAZY),
        environment={"MCORE_LOGPROBS_FUSED": "require"},
    ),
    *(
        _row(layout, option, **more)
        for layout in ("TP 1", "TP 2", "TP 2 SP", "CP 2", "PP 2", "DP 2", "TP 2 CP 2")
        for option, more in (("logits, external_lib", {}), ("fused, external_lib", _FUSED))
        if (layout, option) != ("TP 2 SP", "logits, external_lib")
    ),
    _row(
        "TP 2",
        "logits, environment variable",
        environment={VARIABLE: PLUGIN},
    ),
    _row(
        "TP 2 SP",
        "fused, environment variable, reference worker, KL loss",
        environment={VARIABLE: PLUGIN},
        log=_FUSED["log"],
        calls=_FUSED["calls"],
        settings={"fused": True, **_REFERENCE},
    ),
    _row(
        "TP 2",
        "logits, reference worker, KL loss",
        settings=_REFERENCE,
    ),
    _row(
        "TP 2",
        "logits, entropy in chunks of 8 tokens",
        calls=("vocab_parallel_log_probs_from_logits", "vocab_parallel_entropy_with_chunking"),
        settings={
            "switched": {
                f"{_ACTOR}.entropy_from_logits_with_chunking": True,
                f"{_ACTOR}.entropy_from_logits_chunk_size": 8,
            }
        },
    ),
    *(
        _row(layout, "logits, lazy logits at V 8192", settings={"lazy": True})
        for layout in ("TP 1", "TP 2")
    ),
    _row(
        "TP 2 SP",
        "logits, distillation from a teacher's top 5, lazy logits at V 8192",
        calls=("vocab_parallel_log_probs_from_logits", "compute_forward_kl_topk"),
        settings={"lazy": True, "topk": 5, "overrides": _DISTILL},
    ),
    *(
        _row(
            layout,
            "logits, distillation from a teacher's top 5",
            calls=("vocab_parallel_log_probs_from_logits", "compute_forward_kl_topk"),
            settings={"topk": 5, "overrides": _DISTILL},
        )
        for layout in ("TP 2 SP", "CP 2")
    ),
    *(
        _row(
            "DP 2",
            f"{option}, dynamic batches",
            **{
                **more,
                "settings": {
                    **more.get("settings", {}),
                    "overrides": {
                        f"{_ACTOR}.use_dynamic_bsz": True,
                        f"{_ACTOR}.ppo_max_token_len_per_gpu": 32,
                        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": True,
                        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 40,
                    },
                },
            },
        )
        for option, more in (("logits", {}), ("fused", _FUSED))
    ),
    rounded_alike(_row("TP 2 SP", "logits, external_lib"), real=True),
    rounded_alike(_row("TP 2 SP", "fused, external_lib", **_FUSED)),
    rounded_alike(_row("TP 2", "logits, lazy logits at V 8192", settings={"lazy": True})),
]


def measured(vocabulary: int, hidden: int, tokens: int) -> dict[str, dict[str, Row]]:
    """Rows for `python -m benchmarks.trainers verl`: one rank, `tokens` in each of 4 micro-batches.

    Three steps each: the first warms up.
    """
    size = {"vocabulary": vocabulary, "hidden": hidden, "length": tokens // 2, "steps": 3}
    size["threads"] = 2
    logits = _row("TP 1", "logits", settings=size)
    fused = _row("TP 1", "fused", settings={**size, "fused": True})
    return {"": {"logits": logits, "fused": fused}}


def paths(row: Row) -> list[Path] | str:
    needed = installed("verl")
    return [source_root("verl"), needed] if needed.is_dir() else requirements.missing(needed)


# ---- before the ranks ----------------------------------------------------------------------------


def prepare(row: Row, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    classes = Qwen2Config, Qwen2ForCausalLM, PreTrainedTokenizerFast
    write_model(folder / "model", row.settings, *classes)
    _composed(*_overrides(row, str(folder)))  # once for all of its ranks
    if VARIABLE not in row.environment:
        _import()


def write_model(
    folder: Path, given: Any, config_class: Any, model_class: Any, tokenizer_class: Any
) -> None:
    """A Qwen2 of two layers in Hugging Face's format, with a tokenizer of its size."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    torch.manual_seed(3)
    hidden = given.get("hidden", HIDDEN)
    config = config_class(
        vocab_size=given.get("vocabulary", VOCABULARY),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max(128, given.get("length", 0)),
        tie_word_embeddings=False,
        initializer_range=0.3,  # logits of a few nats: temperatures show
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model_class(config).float().save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = tokenizer_class(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w3")),
        pad_token="w0",
        bos_token="w1",
        eos_token="w2",
    )
    tokenizer.save_pretrained(folder)


def _import() -> None:
    """verl's workers, with verl itself first: its environment variable acts there."""
    import transformers  # noqa: F401  (it asks which of the stand-ins are installed)

    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # the engines are registered for it
    stand_in("ray", "datasets", "pandas", "peft", "uvicorn", "fastapi")
    import verl  # type: ignore[import-not-found]
    from verl.plugin.platform import platform_cuda, platform_manager

    class PlatformCPU(platform_cuda.PlatformCUDA):
        device_name = "cpu"

        def communication_backend_name(self) -> str:
            return "gloo"

    platform_manager._current_platform = PlatformCPU()
    import verl.workers.engine.megatron
    import verl.workers.engine_workers  # noqa: F401


# ---- in a rank -----------------------------------------------------------------------------------


def drive(row: Row, how: How) -> Trace:
    from mcore_logprobs.cpu_megatron.training import cpu_devices

    given = row.settings
    with cpu_devices():
        if VARIABLE in row.environment:
            _import()
        torch.distributed.init_process_group("gloo")
        actor, reference = _workers(row, how)
        parameters = _parameters(actor)
        before = {name: p.clone() for name, p in parameters.items()}
        trace = Trace()
        # A micro-batch has two sequences of seven tokens or more.
        with watched(row, trace, HIDDEN, 2 * 7 // given["cp"]):
            for step in range(given.get("steps", 2)):
                batch = _batch(step, given, actor)
                _step(batch, actor, reference, given, how, trace)
        if given.get("length"):  # measured, not compared
            return trace
        trace.parameters = {name: p.clone() for name, p in _parameters(actor).items()}
        trace.moved = max(float((trace.parameters[n] - before[n]).abs().max()) for n in before)
    return trace


def _overrides(row: Row, folder: str) -> list[str]:
    """Hydra's, those that all runs of a row share."""
    given = row.settings
    overrides = {
        "actor_rollout_ref.model.path": f"{folder}/model",
        "actor_rollout_ref.rollout.name": "sglang",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 2,
        f"{_ACTOR}.megatron.tensor_model_parallel_size": given["tp"],
        f"{_ACTOR}.megatron.context_parallel_size": given["cp"],
        f"{_ACTOR}.megatron.pipeline_model_parallel_size": given["pp"],
        f"{_ACTOR}.megatron.sequence_parallel": given["sp"],
        f"{_ACTOR}.megatron.vanilla_mbridge": True,
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu": 2,
        f"{_ACTOR}.ppo_mini_batch_size": 8,
        f"{_ACTOR}.entropy_coeff": 0.01,
        f"{_ACTOR}.optim.lr": 1e-3,
        f"{_ACTOR}.optim.total_training_steps": 10,
        # A gradient that is all rounding would move its parameter by the whole learning rate.
        f"+{_ACTOR}.optim.override_optimizer_config.adam_eps": 1e-4,
    }
    if not given["sp"] and given["tp"] > 1:  # mbridge turns it on with TP
        overrides[f"+{_ACTOR}.megatron.override_transformer_config.sequence_parallel"] = False
    overrides |= given.get("overrides", {})
    return [f"{key}={value}" for key, value in overrides.items()]


@functools.cache
def _composed(*overrides: str) -> Any:
    """verl's own configuration, which takes hydra seconds."""
    from hydra import compose, initialize_config_dir  # type: ignore[import-not-found]

    folder = source_root("verl") / "verl" / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_megatron_trainer", list(overrides))


def _workers(row: Row, how: How) -> tuple[Any, Any]:
    from mbridge.core import llm_bridge  # type: ignore[import-not-found]
    from omegaconf import OmegaConf  # type: ignore[import-not-found]
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    from mcore_logprobs.cpu_megatron.bridged import bridged_block_spec

    llm_bridge.get_gpt_decoder_block_spec = bridged_block_spec  # Transformer Engine's, else
    given = row.settings
    settings = {
        # verl's own kernels need a GPU: the plain run is the one on logits.
        "actor_rollout_ref.model.use_fused_kernels": given.get("fused", False) and how.switched,
        "actor_rollout_ref.rollout.temperature": how.temperature,
    }
    if how.switched and VARIABLE not in row.environment:
        settings["actor_rollout_ref.model.external_lib"] = PLUGIN
    if how.switched:
        settings |= given.get("switched", {})
    config = copy.deepcopy(_composed(*_overrides(row, how.folder)))
    for key, value in settings.items():
        OmegaConf.update(config, key, value)

    class OfDtype(TrainingWorker):
        """The settings' check takes half precision only, the engine behind it any."""

        def __init__(self, config: Any) -> None:
            object.__setattr__(config.engine_config, "dtype", dtype_name(row))
            super().__init__(config)

    class Worker(ActorRolloutRefWorker):
        actor_worker_cls = ref_worker_cls = OfDtype

    distillation = config.distillation if given.get("topk") else None
    worker = Worker(config.actor_rollout_ref, role="actor", distillation_config=distillation)
    worker.init_model()
    reference = None
    if given.get("reference"):
        reference = Worker(config.actor_rollout_ref, role="ref")
        reference.init_model()
    return worker, reference


def _parameters(worker: Any) -> dict[str, Tensor]:
    return {
        f"{i}.{name}": p.detach()
        for i, chunk in enumerate(worker.actor.engine.module)
        for name, p in chunk.named_parameters()
    }


def _batch(step: int, given: Any, worker: Any) -> dict[str, Any]:
    """Eight sequences of odd lengths for the whole world; a data-parallel rank gets its part."""
    random = torch.Generator().manual_seed(17 + step)
    prompts = [3 + (5 * i + step) % 7 for i in range(8)]
    responses = [4 + (3 * i + step) % 9 for i in range(8)]
    if length := given.get("length"):
        prompts, responses = [length // 4] * 8, [length - length // 4] * 8
    parts: dict[str, list[Tensor]] = {}

    def put(name: str, value: Tensor) -> None:
        parts.setdefault(name, []).append(value)

    for prompt, response in zip(prompts, responses, strict=True):
        size = given.get("vocabulary", VOCABULARY)
        tokens = torch.randint(3, size, (prompt + response,), generator=random)
        mask = torch.ones(response, dtype=torch.int64)
        mask[response // 2] = 0  # a tool's token
        put("input_ids", tokens)
        put("prompts", tokens[:prompt])
        put("responses", tokens[prompt:])
        put("position_ids", torch.arange(prompt + response))
        put("response_mask", mask)
        put("loss_mask", mask)
        put("advantages", torch.randn(response, generator=random))
        if k := given.get("topk"):
            teacher = torch.randn(len(tokens), VOCABULARY, generator=random) * 2
            values, ids = teacher.log_softmax(-1).topk(k)
            put("teacher_logprobs", values)
            put("teacher_ids", ids)
    size, rank = (
        worker.actor.engine.get_data_parallel_size(),
        worker.actor.engine.get_data_parallel_rank(),
    )
    mine = slice(rank * 8 // size, (rank + 1) * 8 // size)
    return {name: values[mine] for name, values in parts.items()}


def _nested(values: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


def _step(
    batch: dict[str, Any], actor: Any, reference: Any, given: Any, how: How, trace: Trace
) -> None:
    """What verl's trainer asks of its workers for one batch, and in that order."""
    from verl.utils import tensordict_utils as tu

    def data(**info: Any) -> Any:
        tensors = {name: _nested(values) for name, values in batch.items()}
        info["temperature"] = how.temperature
        lengths = [len(t) for t in batch["input_ids"]]
        return tu.get_tensordict(tensors, {"global_token_num": lengths, **info})

    asked = data(calculate_entropy=True, compute_loss=False)
    with trace.measure("log-probabilities") if given.get("length") else contextlib.nullcontext():
        found = actor.compute_log_prob(asked)
    mask = _nested(batch["response_mask"])
    if found is not None:
        for name in ("log_probs", "entropy"):
            kept = trace.logprobs if name == "log_probs" else trace.entropy
            kept.append(found[name].values().clone())
    old = _everywhere(found, mask, actor)
    first = actor.actor.engine.get_data_parallel_rank() * len(old)  # of this rank's sequences
    batch["old_log_probs"] = [_off(x, first + i) for i, x in enumerate(old)]
    if reference is not None:
        found = reference.compute_ref_log_prob(data(calculate_entropy=False, compute_loss=False))
        if found is not None:
            trace.logprobs.append(found["log_probs"].values().clone())
        batch["ref_log_prob"] = [
            _off(x, first + i + 8) for i, x in enumerate(_everywhere(found, mask, actor))
        ]
    asked = data(
        calculate_entropy=True,
        distillation_use_topk=bool(given.get("topk")),
        distillation_only=False,
        global_batch_size=8,
        mini_batch_size=8,
        epochs=1,
        seed=1,
        dataloader_kwargs={"shuffle": False},
    )
    with trace.measure("training step") if given.get("length") else contextlib.nullcontext():
        output = actor.update_actor(asked)
    if output is not None:
        metrics = _numbers(tu.get(output, "metrics"))
        trace.grad_norm += [metrics.pop("grad_norm")]
        trace.metrics.append(metrics)


def _everywhere(found: Any, mask: Tensor, actor: Any) -> list[Tensor]:
    """Log-probabilities of the responses, on every rank of the replica: one of them has results.

    In verl the driver collects them and sends them to all workers.
    """
    from verl.workers.utils.padding import response_from_nested

    own = actor.actor.engine.get_data_parallel_rank()
    mine = None
    if found is not None:
        mine = [x.clone() for x in response_from_nested(found["log_probs"], mask).unbind()]
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, (own, mine))
    return next(x for rank, x in every if rank == own and x is not None)


def _off(x: Tensor, seed: int) -> Tensor:
    """Log-probabilities of an older policy: ratios on both sides of the clip range."""
    random = torch.Generator().manual_seed(seed)
    return x + 0.3 * torch.randn(x.shape, generator=random)


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Metrics of one update, but for times and memory."""
    found = {}
    for name, value in metrics.items():
        if name.startswith("perf/") or name == "mfu":
            continue
        value = value.aggregate() if hasattr(value, "aggregate") else value
        values = value if isinstance(value, list | tuple) else [value]
        for i, x in enumerate(values):
            with contextlib.suppress(TypeError):
                x = x.aggregate() if hasattr(x, "aggregate") else x
                found[name if len(values) == 1 else f"{name} {i}"] = float(x)
    return found
