"""slime's actor in process, without Ray: its arguments, rollout manager and train actor.

Rows with `ray` run its own `train.py` with real Ray: `tests.trainers.slime_ray`. The rollout is
slime's own debug data (`--load-debug-rollout-data`): samples of random tokens and rewards. slime is
a repository: `MCORE_LOGPROBS_PEERS` names the folder with a checkout of it in `slime`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from mcore_logprobs.cpu_megatron.bridged import bridged_block_spec
from mcore_logprobs.cpu_megatron.training import cpu_training
from tests.trainers import requirements
from tests.trainers.absent import stand_in
from tests.trainers.frame import (
    How,
    Row,
    Trace,
    checkout,
    installed,
    layout_sizes,
    watched,
    with_fused,
)
from tests.trainers.half import dtype, rounded_alike

MEGATRON = "0.19.2"
VOCAB = 96
SAMPLES = 8  # per rollout: two prompts of four
ROLLOUTS, UPDATES = 2, 2  # updates per rollout
MICRO = 2  # samples
MODEL = {
    "num-layers": 2,
    "hidden-size": 32,
    "ffn-hidden-size": 48,
    "num-attention-heads": 4,
    "num-query-groups": 2,
    "vocab-size": VOCAB,
    "max-position-embeddings": 128,
    "seq-length": 128,
    "normalization": "RMSNorm",
    "norm-epsilon": 1e-6,
    "rotary-base": 10000,
}
FLAGS = (
    "swiglu", "use-rotary-position-embeddings", "disable-bias-linear", "group-query-attention",
    "untie-embeddings-and-output-weights", "no-rope-fusion", "no-gradient-accumulation-fusion",
    "no-bias-swiglu-fusion", "no-masked-softmax-fusion", "no-persist-layer-norm",
    "use-cpu-initialization",
)  # fmt: skip


def paths(row: Row) -> list[Path] | str:
    """slime's checkout, and Ray where it is used."""
    folder, ray = checkout("slime"), installed("slime")
    if not folder:
        return "no checkout of slime: tests/run.sh --all --peers DIR"
    if not row.settings.get("ray"):
        return [folder]
    return [folder, ray] if ray.is_dir() else requirements.missing(ray)


# ---- what a user writes --------------------------------------------------------------------------


def arguments(row: Row, how: How) -> list[str]:
    folder = Path(how.folder)
    sizes = {"tensor": 1, "pipeline": 1, "context": 1, **row.settings.get("sizes", {})}
    options: dict[str, Any] = {
        **MODEL,
        "vocab-size": vocabulary(row),
        **{
            f"{kind}{'' if kind == 'context' else '-model'}-parallel-size": size
            for kind, size in sizes.items()
        },
        "transformer-impl": "local",
        "spec": "tests.trainers.slime cpu_layers",
        "distributed-backend": "gloo",
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "hf-checkpoint": folder / "model",
        "load": folder / "model",
        "ref-load": folder / "model",
        "load-debug-rollout-data": folder / "rollout{rollout_id}.pt",
        "rollout-data-postprocess-path": "tests.trainers.slime.keep",
        "actor-num-nodes": 1,
        "actor-num-gpus-per-node": actors(row),
        "num-gpus-per-node": actors(row),
        "rollout-num-gpus": 1,
        "num-rollout": steps(row),
        "rollout-batch-size": 2,
        "n-samples-per-prompt": SAMPLES // 2,
        "global-batch-size": SAMPLES // row.settings.get("updates", UPDATES),
        "micro-batch-size": MICRO,
        "rollout-max-response-len": 16,
        "rollout-temperature": how.temperature,
        "data-pad-size-multiplier": 8,
        "lr": 1e-3,
        "adam-eps": 1e-5,  # a gradient that is rounding noise moves nothing
        "lr-decay-style": "constant",
        "weight-decay": 0.0,
        "clip-grad": 1.0,
        "seed": 7,
        "advantage-estimator": "grpo",
        "entropy-coef": 0.01,
        **row.settings.get("options", {}),
    }
    if how.switched:
        options["custom-megatron-init-path"] = "mcore_logprobs.dropin.switch.slime"
        if "worker" in row.settings:
            options["train-env-vars"] = json.dumps(row.settings["worker"], separators=(",", ":"))
    given = [
        f"--{flag}" for flag in (*FLAGS, "use-rollout-entropy", *row.settings.get("flags", ()))
    ]
    for key, value in options.items():
        given += [f"--{key}", *str(value).split(" ")]
    return given


def cpu_layers(args: Any, config: Any, vp_stage: int | None) -> Any:
    """For --spec: slime's own layers need Transformer Engine, whose names its loader knows."""
    return bridged_block_spec(config, vp_stage=vp_stage)


def vocabulary(row: Row) -> int:
    return row.settings.get("vocabulary", VOCAB)


def steps(row: Row) -> int:
    return row.settings.get("steps", ROLLOUTS)


def actors(row: Row) -> int:
    """How many ranks train."""
    return row.settings.get("actors", row.processes)


# ---- model and rollouts --------------------------------------------------------------------------


def write_inputs(row: Row, folder: Path) -> None:
    """A model with its tokenizer, and the rollouts' samples."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocabulary(row),
        hidden_size=row.settings.get("options", {}).get("hidden-size", MODEL["hidden-size"]),
        intermediate_size=MODEL["ffn-hidden-size"],
        num_hidden_layers=MODEL["num-layers"],
        num_attention_heads=MODEL["num-attention-heads"],
        num_key_value_heads=MODEL["num-query-groups"],
        rms_norm_eps=MODEL["norm-epsilon"],
        rope_theta=MODEL["rotary-base"],
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    words = {f"w{i}": i for i in range(vocabulary(row))}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", pad_token="w0", eos_token="w1"
    ).save_pretrained(folder / "model")
    for rollout in range(steps(row)):
        samples = [sample(row, rollout, i) for i in range(SAMPLES)]
        torch.save({"samples": samples}, folder / f"rollout{rollout}.pt")


def sample(row: Row, rollout: int, index: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(100 * rollout + index)
    prompt, response = 3 + index % 4, 4 + (5 * index) % 11
    if "length" in row.settings:
        response = row.settings["length"] - prompt
    tokens = torch.randint(0, vocabulary(row), (prompt + response,), generator=generator).tolist()
    mask = torch.ones(response, dtype=torch.int64)
    mask[1 + index % 2] = 0  # a tool's answer
    found = {
        "group_index": index // (SAMPLES // 2),
        "index": index,
        "rollout_id": index,
        "prompt": "",
        "tokens": tokens,
        "response": "",
        "response_length": response,
        "reward": float(torch.rand((), generator=generator)),
        "loss_mask": mask.tolist(),
        "rollout_log_probs": (-4 + torch.rand(response, generator=generator)).tolist(),
        "status": "completed",
        "metadata": {},
    }
    if "rollout-top-p" in row.settings.get("options", {}):
        kept = [
            torch.randperm(vocabulary(row), generator=generator)[: 5 + r] for r in range(response)
        ]
        found["rollout_top_p_token_ids"] = torch.cat(kept).tolist()
        counts = torch.tensor([len(ids) for ids in kept])
        found["rollout_top_p_token_offsets"] = [0, *counts.cumsum(0).tolist()]
    return found


# ---- what is kept --------------------------------------------------------------------------------

_trace = Trace()


def keep(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """For --rollout-data-postprocess-path: before the updates, on every rank."""
    for name in ("log_probs", "ref_log_probs"):
        _trace.logprobs += [x.clone() for x in rollout_data.get(name, ())]
    _trace.entropy += [x.clone() for x in rollout_data.get("entropy", ())]


def keep_metrics(args: Any, metrics: dict[str, Any], step_key: str) -> None:
    """In place of slime's `logging_utils.log`, which would send them to a service."""
    kept = {
        key: float(x) for key, x in metrics.items() if isinstance(x, (int, float, torch.Tensor))
    }
    kept = {key: x for key, x in kept.items() if not key.startswith("perf/")}
    _trace.metrics.append(kept)
    if "train/grad_norm" in kept:
        _trace.grad_norm.append(kept["train/grad_norm"])


# ---- the run -------------------------------------------------------------------------------------


def prepare(row: Row, folder: Path) -> None:
    """Writes the inputs, and imports slime: its switch acts when Megatron has been initialised."""
    write_inputs(row, folder)
    if row.settings.get("ray"):
        return  # its processes import slime
    ray_in_process()
    stand_in(*ENGINES)
    with cpu_training():
        import slime.backends.megatron_utils.actor  # type: ignore[import-not-found]
        import slime.ray.rollout  # type: ignore[import-not-found]  # noqa: F401


def drive(row: Row, how: How) -> Trace:
    """Through slime's rollout manager and actor, as `train.py` calls them, or through it."""
    if row.settings.get("ray"):
        from tests.trainers import slime_ray

        return slime_ray.drive(row, how)
    import numpy

    with cpu_training(), mock.patch.object(numpy, "__version__", "1." + numpy.__version__):
        return train(row, how)  # slime asks for numpy 1


def train(row: Row, how: How) -> Trace:
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor
    from slime.observability import logging_utils
    from slime.ray.rollout import RolloutManager
    from slime.utils import accelerator
    from slime.utils.arguments import parse_args

    accelerator.set_accelerator(cpu_accelerator())
    from slime.utils.reloadable_process_group import (  # type: ignore[import-not-found]
        ReloadableProcessGroup,
    )

    forward_new_names(ReloadableProcessGroup)
    logging_utils.log = keep_metrics
    sys.argv = ["train.py", *arguments(row, how)]
    args = parse_args()
    if dtype(row) is torch.float32:  # slime knows bf16 and fp16 only
        args.bf16, args.params_dtype = False, torch.float32
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    actor = MegatronTrainRayActor(world, rank, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    actor.init(args, "actor", with_ref=bool(args.use_kl_loss or args.kl_coef))
    manager = RolloutManager(args, None)
    manager.set_train_parallel_config(actor.train_parallel_config)
    before = parameters(actor)
    if "length" in row.settings:
        measure(_trace)
    with step_watched(row, _trace):
        for rollout in range(steps(row)):
            actor.train(rollout, manager.generate(rollout))
    _trace.parameters = parameters(actor)
    _trace.moved = max(float((_trace.parameters[k] - x).abs().max()) for k, x in before.items())
    return _trace


def measure(trace: Trace) -> None:
    """Notes what slime's log-probability passes and training steps take."""
    from slime.backends.megatron_utils import actor

    owner = actor.MegatronTrainRayActor
    passes, step = owner.compute_log_prob, actor.train

    def compute_log_prob(*given: Any, **options: Any) -> Any:
        with trace.measure("log-probabilities"):
            return passes(*given, **options)

    def train(*given: Any, **options: Any) -> Any:
        with trace.measure("training step"):
            return step(*given, **options)

    owner.compute_log_prob, actor.train = compute_log_prob, train


def step_watched(row: Row, trace: Trace) -> Any:
    """For the training: a micro-batch has two samples of six tokens or more."""
    rows = 2 * 6 // row.settings["sizes"].get("context", 1)
    return watched(row, trace, MODEL["hidden-size"], rows)


def parameters(actor: Any) -> dict[str, torch.Tensor]:
    named = (chunk.named_parameters() for chunk in actor.model)
    return {f"{i} {k}": x.detach().clone() for i, part in enumerate(named) for k, x in part}


# ---- what a CPU needs ----------------------------------------------------------------------------

# Rollout engines and services that slime imports; here only where they are not installed.
ENGINES = (
    "sglang", "sglang_router", "torch_memory_saver", "wandb", "httpx", "pybase64", "aiohttp",
    "pylatexenc", "omegaconf", "datasets", "tensorboard", "xxhash", "zstandard", "blake3",
)  # fmt: skip


def ray_in_process() -> None:
    """Ray whose actors are plain objects and whose references are the things themselves."""
    stand_in("ray")
    import ray  # type: ignore[import-not-found]
    import ray._private.services  # type: ignore[import-not-found]

    def remote(*given: Any, **options: Any) -> Any:
        if not given:
            return remote
        if isinstance(given[0], type):
            started = types.SimpleNamespace(remote=given[0])
            given[0].options = lambda **options: started  # type: ignore[attr-defined]
        return given[0]

    ray.remote = remote
    ray.get = ray.put = lambda thing, **options: thing
    ray.get_gpu_ids = lambda: [0]
    ray._private.services.get_node_ip_address = lambda: "127.0.0.1"


def cpu_accelerator() -> Any:
    """For slime's registry of accelerators."""
    from slime.utils.accelerator.torch_accelerator import (  # type: ignore[import-not-found]
        TorchAccelerator,
    )

    class CPU(TorchAccelerator):
        name = device_type = "cpu"
        communication_backend_name = "gloo"
        visible_devices_env = "CUDA_VISIBLE_DEVICES"

        def _module(self) -> Any:
            return torch.cuda

        def is_available(self) -> bool:
            return True

        def current_device(self) -> Any:
            return "cpu"

        def device_name(self, index: Any = None) -> str:
            return "cpu"

        def mem_get_info(self, device: Any = None) -> tuple[int, int]:
            return 1 << 36, 1 << 36  # below 3 GiB slime collects garbage at each collective

    return CPU()


def forward_new_names(wrapper: type) -> None:
    """slime's wrapper of a group forwards torch's collectives by name; torch 2.13 has new ones.

    Functions that Megatron took from torch before slime's patch reach the wrapper itself.
    """
    for name in ("reduce_scatter_single", "all_gather_single", "all_to_all_single"):
        if hasattr(torch.distributed.ProcessGroup, name) and name not in vars(wrapper):
            setattr(wrapper, name, functools.partialmethod(wrapper._fwd, name))  # type: ignore


# ---- rows ----------------------------------------------------------------------------------------


def row(layout: str, option: str = "GRPO", **settings: Any) -> Row:
    """lazy: with a large vocabulary, where whatever wants real logits fails, and none are made."""
    sizes, processes = layout_sizes(layout)
    sizes.pop("data", None)
    return Row(
        framework="slime",
        layout=layout,
        option=option,
        processes=processes,
        log=(
            "slime.backends.megatron_utils.loss: get_log_probs_and_entropy: now those of "
            "mcore_logprobs.dropin.slime",
        ),
        calls=("get_log_probs_and_entropy",),
        settings={"sizes": sizes, **settings},
        environment={"MCORE_LOGPROBS_FUSED": "require"} if settings.get("lazy") else {},
        megatron=MEGATRON,
        timeout=600,
    )


GSPO = {"advantage-estimator": "gspo", "eps-clip": 4e-4}
CISPO = {"advantage-estimator": "cispo", "eps-clip": 1.0, "eps-clip-high": 4.0}
CHUNKS = {"log-probs-chunk-size": 5}
TOP_P = {"rollout-top-p": 0.9}
KL = {"kl-loss-coef": 0.1, "kl-loss-type": "low_var_kl"}
DYNAMIC = {"max-tokens-per-gpu": 40}


def measured(vocabulary: int, hidden: int, tokens: int) -> dict[str, dict[str, Row]]:
    """For `python -m benchmarks.trainers slime`: one rank, `tokens` in each of 4 micro-batches.

    Three steps each: the first warms up. GSPO, because slime takes GRPO's log-probabilities from
    the training step where a rollout has one update.
    """
    length = tokens // MICRO
    given = row(
        "TP 1",
        "measured",
        vocabulary=vocabulary,
        length=length,
        steps=3,
        updates=1,
        threads=2,
        options={
            **GSPO,
            "hidden-size": hidden,
            "max-position-embeddings": 2 * length,
            "seq-length": 2 * length,
            "rollout-max-response-len": length,
        },
    )
    return {"": with_fused(given, "false", "require")}


def ray_row(layout: str, option: str, **settings: Any) -> Row:
    """`train.py` in one process of the row's, whose train actors are Ray's."""
    given = row(layout, option, **settings)
    lazy = settings.get("lazy")
    worker = {"MCORE_LOGPROBS_FUSED": "require"} if lazy else {}
    return dataclasses.replace(
        given,
        processes=1,
        settings=given.settings | {"ray": True, "actors": given.processes, "worker": worker},
        environment={},
        timeout=1200,
        log=(
            *given.log,
            *(["GPTModel: gives lazy logits", "MCORE_LOGPROBS_FUSED is 'require'"] if lazy else []),
        ),
    )


LAZY = {"lazy": True, "vocabulary": 8192, "options": CHUNKS}

ROWS = [
    row("TP 1"),
    ray_row("DP 2", "train.py with Ray, GRPO, TIS", flags=["use-tis"]),
    ray_row("TP 2", "train.py with Ray, GRPO, chunks, lazy logits at V 8192", **LAZY),
    row("TP 1", "GRPO, chunks, lazy logits at V 8192", **LAZY),
    row("TP 2", "GRPO, chunks, lazy logits at V 8192", **LAZY),
    row("CP 2", "GSPO, chunks, lazy logits at V 8192", **LAZY | {"options": CHUNKS | GSPO}),
    row("TP 2", "GRPO, chunks", options=CHUNKS),
    row("TP 2", "GSPO, top-p replay", options=GSPO | TOP_P),
    row("TP 2 x SP", "CISPO, TIS", options=CISPO, flags=["use-tis", "sequence-parallel"]),
    row("CP 2", "GRPO, top-p replay, chunks", options=TOP_P | CHUNKS),
    row("CP 2", "GSPO, TIS, reference KL", options=GSPO | KL, flags=["use-tis", "use-kl-loss"]),
    row("PP 2", "GRPO, TIS", flags=["use-tis"]),
    row(
        "DP 2", "CISPO, dynamic batches", options=CISPO | DYNAMIC, flags=["use-dynamic-batch-size"]
    ),
    rounded_alike(row("TP 2", "GRPO, chunks", options=CHUNKS), real=True),
    rounded_alike(row("TP 2", "GRPO, chunks, lazy logits at V 8192", **LAZY)),
]
