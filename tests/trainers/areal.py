"""AReaL: `MegatronPPOActor` with its PPO actor, `MegatronEngine` and mbridge, as its workers do.

All of it AReaL's, Megatron's and mbridge's own: log-probabilities, advantages and updates go
through the three methods that its trainer calls. Outside them: what a CPU needs (`cpu_devices`,
layers given to mbridge), a model of two layers with seeded weights, trajectories of random tokens.
Rows with `services` have AReaL's scheduler start the workers: `tests.trainers.areal_services`.

1.0.4 is PyPI's wheel; of main `MCORE_LOGPROBS_PEERS` names the folder with a checkout in `AReaL`.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.dropin.frameworks import source_root
from tests.trainers import requirements
from tests.trainers.absent import stand_in
from tests.trainers.frame import How, Row, Trace, checkout, installed, watched
from tests.trainers.half import dtype_name, rounded_alike
from tests.trainers.verl import HIDDEN, VOCABULARY, write_model

# Imported, and not used on the way to a training step: services, data sets, other engines.
ABSENT = (
    "ray", "datasets", "pandas", "peft", "fastapi", "uvicorn", "megatron.bridge", "aiohttp",
    "httpx", "tenacity", "flask", "torchdata", "werkzeug", "uvloop", "numba", "aiofiles", "openai",
    "swanlab", "trackio", "wandb", "tensorboardX", "pybase64", "hydra", "redis", "msgspec",
)  # fmt: skip
NOW = (
    "areal.utils.functional.vocab_parallel: gather_logprobs, gather_logprobs_entropy: now those of "
    "mcore_logprobs.dropin.areal"
)
UNPADS = "areal.utils.data: unpad_logits: now those of mcore_logprobs.dropin.areal"
STEPS, UPDATES = 2, 2  # updates per step
TRAJECTORIES = 8  # per step, of all data-parallel ranks


def _row(version: str, layout: str, option: str, **more: Any) -> Row:
    sizes = {"tp": 1, "cp": 1, "pp": 1, "dp": 1}
    words = layout.lower().split()
    sizes |= {name: int(size) for name, size in itertools.pairwise(words) if name in sizes}
    processes = 1
    for size in sizes.values():
        processes *= size
    calls = ("gather_logprobs", "gather_logprobs_entropy", "unpad_logits")
    if sizes["cp"] > 1:
        calls += ("reassemble_cp_packed_logprobs", "split_packed_seqs_for_context_parallel")
    settings = {"version": version, **sizes, **more.pop("settings", {})}
    if settings.get("lazy"):
        settings |= {"vocabulary": 8192, "sizes": {"tensor": sizes["tp"]}}
        more["environment"] = {"MCORE_LOGPROBS_FUSED": "require"}
    return Row(
        "areal",
        layout,
        f"{version}, {option}",
        1 if settings.get("services") else processes,
        log=(NOW, UNPADS),
        calls=calls,
        settings=settings,
        timeout=600,
        **more,
    )


_OPTIONS = {"use_decoupled_loss": True, "recompute_logprob": True, "kl_ctl": 0.0}
_CISPO = {"use_cispo_loss": True, "eps_clip_higher": 0.3}
_SEQUENCES = {"importance_sampling_level": "sequence", "eps_clip": 0.05}
_CHUNKS = {"logprobs_chunk_size": 5}
_ON_POLICY = {"use_decoupled_loss": False, "kl_ctl": 0.1}
_SERVICES = {"services": True, "options": {"kl_ctl": 0.1}}
_HEAD = {"enable_chunked_logits": True}
ROWS = [
    _row("1.0.4", "TP 1", "decoupled PPO, checkpoints"),
    _row("1.0.4", "TP 2", "ratios of sequences, checkpoints", settings={"options": _SEQUENCES}),
    _row("1.0.4", "DP 2", "decoupled PPO, checkpoints"),
    # Not CP: 1.0.4's compute_logp takes a rank's part of the logits with the whole labels, silently
    # where the part has more rows; the drop-in refuses. Main gathers the logits there.
    _row("main", "TP 1", "decoupled PPO"),
    _row("main", "TP 2", "CISPO, chunks of 5 tokens", settings={"options": _CISPO | _CHUNKS}),
    _row("main", "TP 2", "decoupled PPO, AReaL's head", settings={"megatron": _HEAD}),
    _row("main", "CP 2", "PPO, KL to a reference", settings={"options": _ON_POLICY}),
    _row("main", "PP 2", "ratios of sequences", settings={"options": _SEQUENCES}),
    _row("main", "DP 2", "CISPO", settings={"options": _CISPO}),
    *(
        _row(version, layout, f"{option}, lazy logits at V 8192", settings={"lazy": True, **more})
        for version, layout, option, more in (
            ("1.0.4", "TP 2", "decoupled PPO, checkpoints", {}),
            ("main", "TP 1", "decoupled PPO", {}),
            ("main", "TP 2", "CISPO", {"options": _CISPO}),
            ("main", "PP 2", "ratios of sequences", {"options": _SEQUENCES}),
        )
    ),
    _row("1.0.4", "TP 2", "its scheduler, reference forked, KL, checkpoints", settings=_SERVICES),
    _row(
        "main", "DP 2", "its scheduler, lazy logits at V 8192", settings=_SERVICES | {"lazy": True}
    ),
    rounded_alike(_row("main", "TP 2", "decoupled PPO"), real=True),
    rounded_alike(
        _row("main", "TP 2", "decoupled PPO, lazy logits at V 8192", settings={"lazy": True})
    ),
    # Not lazy with CP 2: AReaL gathers the logits of a rank's tokens from all ranks.
    # Not TP 2 CP 2: torch.distributed.nn's all_gather, in a group that is not the first, has no
    # backward under gloo.
]


def paths(row: Row) -> list[Path] | str:
    needed = installed("areal")
    if not needed.is_dir():
        return requirements.missing(needed)
    if row.settings["version"] != "main":
        return [source_root("areal", row.settings["version"]), needed]
    folder = checkout("AReaL")
    return [folder, needed] if folder else "no checkout of AReaL: tests/run.sh --all --peers DIR"


def prepare(row: Row, folder: Path) -> None:
    """Writes the model, and imports AReaL: the switch replaces what is imported already too."""
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    classes = Qwen2Config, Qwen2ForCausalLM, PreTrainedTokenizerFast
    write_model(folder / "model", row.settings, *classes)
    before_import()
    from mcore_logprobs.cpu_megatron.training import cpu_devices

    with cpu_devices():
        importlib.import_module("areal.engine.megatron_engine")
        importlib.import_module("areal.trainer.ppo.actor")


def _rope_theta(config: Any) -> float:
    try:
        return config.rope_parameters["rope_theta"]
    except (KeyError, TypeError) as error:
        raise AttributeError("rope_theta") from error


def before_import() -> None:
    """What a process needs before it imports AReaL."""
    from transformers import Qwen2Config

    # mbridge's release on PyPI asks as in transformers 4; AReaL takes a later one, which asks for
    # the attribute itself while it makes the parameters.
    Qwen2Config.rope_theta = property(_rope_theta)
    stand_in(*ABSENT)
    import ray  # type: ignore[import-not-found]

    ray.is_initialized = lambda: False  # tensors would be in its store, not with the workers


def drive(row: Row, how: How) -> Trace:
    if row.settings.get("services"):
        from tests.trainers import areal_services

        return areal_services.drive(row, how)
    from mcore_logprobs.cpu_megatron.training import cpu_devices

    if how.switched:
        # What `python -m mcore_logprobs.dropin areal -m areal.infra.rpc.rpc_server` does first.
        from mcore_logprobs.dropin.switch import switch_on

        switch_on("areal")
    with cpu_devices():
        return _train(row, how)


def _train(row: Row, how: How) -> Trace:
    actor = _actor(row, how)
    before = parameters(actor)
    trace = Trace()
    with step_watched(row, trace):
        _steps(row, actor, trace)
    trace.parameters = parameters(actor)
    trace.moved = max(float((x - before[n]).abs().max()) for n, x in trace.parameters.items())
    return trace


def step_watched(row: Row, trace: Trace) -> Any:
    """For the training: a micro-batch has a trajectory of seven tokens or more."""
    return watched(row, trace, HIDDEN, 7 // row.settings["cp"])


def _steps(row: Row, actor: Any, trace: Trace) -> None:
    for step in range(STEPS):
        batch = trajectories(step, actor.data_parallel_rank, row.settings["dp"])
        logprobs = actor.compute_logp(batch)
        note_logprobs(trace, step, batch, logprobs)
        actor.ppo_update(actor.compute_advantages(batch))
        actor.lr_scheduler_step()
        note_stats(trace, actor.export_stats())


def note_logprobs(
    trace: Trace, step: int, batch: list[dict[str, Tensor]], logprobs: list[Tensor]
) -> None:
    """Keeps a pass's log-probabilities, and gives the trajectories those of other policies."""
    for i, (each, found) in enumerate(zip(batch, logprobs, strict=True)):
        # Of an older policy: ratios on both sides of the clip range.
        random = torch.Generator().manual_seed(100 * step + i)
        noise = 0.3 * torch.randn(found.shape, generator=random)
        trace.logprobs.append(found.clone())
        each["prox_logp"] = found + noise
        each["logprobs"] = torch.roll(found + noise, 1, dims=-1)
        each["ref_logp"] = found - noise


def note_stats(trace: Trace, stats: Mapping[str, Any]) -> None:
    """Keeps what AReaL exports of an update."""
    metrics = {name: float(x) for name, x in stats.items() if "time" not in name}
    ends = [metrics.pop(f"ppo_actor/update/entropy/{end}") for end in ("avg", "min", "max")]
    trace.entropy.append(torch.tensor(ends))
    trace.grad_norm.append(metrics.pop("ppo_actor/update/grad_norm"))
    trace.metrics.append(metrics)


def _actor(row: Row, how: How) -> Any:
    from areal.api.alloc_mode import ModelAllocation  # type: ignore[import-not-found]
    from areal.engine import megatron_engine  # type: ignore[import-not-found]
    from areal.utils import seeding  # type: ignore[import-not-found]

    on_a_cpu(megatron_engine)
    config = actor_config(row, how)
    seeding.set_random_seed(1, "rows")
    actor = megatron_engine.MegatronPPOActor(config)
    actor.create_process_group(ModelAllocation.from_str(config.backend).parallel)
    actor.initialize(addr=None, ft_spec=finetune_spec())
    return actor


def finetune_spec() -> Any:
    from areal.api import FinetuneSpec  # type: ignore[import-not-found]

    return FinetuneSpec(total_train_epochs=1, dataset_size=80, train_batch_size=8)


def actor_config(row: Row, how: How) -> Any:
    """AReaL's settings of the actor; the model is what `prepare` wrote."""
    from areal.api import cli_args as settings  # type: ignore[import-not-found]

    given: Mapping[str, Any] = row.settings
    return settings.PPOActorConfig(
        experiment_name="rows",
        trial_name="row",
        backend=f"megatron:d{given['dp']}p{given['pp']}t{given['tp']}c{given['cp']}",
        path=f"{how.folder}/model",
        dtype=dtype_name(row),
        # Without it 1.0.4 leaves the model in mbridge's bfloat16, whatever dtype says.
        gradient_checkpointing=given["version"] == "1.0.4",
        temperature=how.temperature,
        mb_spec=settings.MicroBatchSpec(max_tokens_per_mb=40),
        optimizer=settings.OptimizerConfig(
            lr=1e-3, eps=1e-4, weight_decay=0.0, gradient_clipping=1.0, warmup_steps_proportion=0.0
        ),
        ppo_n_minibatches=UPDATES,
        megatron=settings.MegatronEngineConfig(**given.get("megatron", {})),
        adv_norm=settings.NormConfig(mean_level="batch", std_level="batch"),
        **_OPTIONS | given.get("options", {}),
    )


def on_a_cpu(engine: Any) -> None:
    """AReaL's module of the Megatron engine, and the layers that mbridge builds."""
    from mbridge.core import llm_bridge  # type: ignore[import-not-found]

    from mcore_logprobs.cpu_megatron.bridged import bridged_block_spec

    llm_bridge.get_gpt_decoder_block_spec = bridged_block_spec  # Transformer Engine's, else
    _one_device(engine)


def _one_device(engine: Any) -> None:
    """AReaL asks for the accelerator of a number, and tells its platform to take it."""

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def device(index: Any) -> torch.device:
            return torch.device("cpu" if isinstance(index, int) else index)

    engine.torch = Torch()
    platform = type(engine.current_platform._ensure_initialized())
    platform.set_device = platform.set_numa_affinity = staticmethod(lambda index: None)


def parameters(actor: Any) -> dict[str, Tensor]:
    return {
        f"{i}.{name}": x.detach().clone()
        for i, chunk in enumerate(actor.model)
        for name, x in chunk.named_parameters()
    }


def trajectories(step: int, rank: int = 0, ranks: int = 1) -> list[dict[str, Tensor]]:
    """This data-parallel rank's, of odd lengths; rows of one as a rollout gives them."""
    found = []
    for i in range(TRAJECTORIES):
        random = torch.Generator().manual_seed(50 * step + i)
        prompt, response = 3 + (5 * i + step) % 7, 4 + (3 * i + step) % 9
        mask = torch.tensor([0] * prompt + [1] * response)
        mask[prompt + response // 2] = 0  # a tool's token
        found.append(
            {
                "input_ids": torch.randint(3, VOCABULARY, (1, len(mask)), generator=random),
                "attention_mask": torch.ones(1, len(mask), dtype=torch.bool),
                "loss_mask": mask.unsqueeze(0),
                "rewards": torch.rand(1, generator=random) - 0.4,
                "versions": torch.zeros(1, len(mask), dtype=torch.int64),
            }
        )
    return found[rank * len(found) // ranks : (rank + 1) * len(found) // ranks]
