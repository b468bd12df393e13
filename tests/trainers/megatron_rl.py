"""Megatron-LM main's own `train_rl.py`, as `python train_rl.py` runs it, with given rollouts.

Its arguments, `pretrain`, GRPO's data iterator, schedules, DDP, optimizer and loss. From outside
come what a CPU needs (`cpu_training`, the layers by --spec) and the rollouts: groups of random
tokens with rewards, because the inference engine needs CUDA. `MCORE_LOGPROBS_PEERS` names the
folder with a checkout in `Megatron-LM`.

Megatron's RL knows no temperature of log-probabilities: the run that must be told apart has another
scale of the initial weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import torch

from mcore_logprobs.cpu_megatron.training import cpu_training
from tests.trainers.absent import stand_in
from tests.trainers.frame import (
    UNBOUNDED,
    How,
    Row,
    Trace,
    checkout,
    layout_sizes,
    watched,
    with_fused,
)
from tests.trainers.half import dtype, rounded
from tests.trainers.slime import FLAGS, MODEL, VOCAB

NOW = (
    "megatron.rl.rl_utils: get_logprobs, selective_log_softmax: now those of "
    "mcore_logprobs.dropin.megatron_rl"
)
ABSENT = (
    "wandb", "yaml", "openai", "flask", "quart", "hypercorn", "datasets", "httpx", "fastapi",
    "uvicorn", "aiohttp", "tqdm",
)  # fmt: skip
LENGTH = 32
PROMPTS, GROUP = 2, 4  # per collection: 8 rollouts
STEPS = 4  # two collections, two updates of each


def paths(row: Row) -> list[Path] | str:
    """Megatron-LM's checkout, whose megatron.core goes before the installed one."""
    folder = checkout("Megatron-LM")
    return [folder] if folder else "no checkout of Megatron-LM: tests/run.sh --all --peers DIR"


def arguments(row: Row, how: How) -> list[str]:
    sizes = {"tensor": 1, "pipeline": 1, "context": 1, **row.settings.get("sizes", {})}
    options: dict[str, Any] = {
        **MODEL,
        "vocab-size": vocabulary(row),
        **{
            f"{kind}{'' if kind == 'context' else '-model'}-parallel-size": size
            for kind, size in sizes.items()
        },
        "seq-length": length(row),
        "max-position-embeddings": length(row),
        "inference-max-seq-length": length(row),
        "transformer-impl": "local",
        "spec": "tests.trainers.megatron_rl layers",
        "distributed-backend": "gloo",
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "tokenizer-type": "HuggingFaceTokenizer",
        "tokenizer-model": f"{how.folder}/model",
        "init-method-std": 0.3 * how.temperature / 0.8,
        "micro-batch-size": 1,
        "global-batch-size": PROMPTS * group(row),
        "grpo-prompts-per-step": PROMPTS,
        "grpo-group-size": group(row),
        "grpo-iterations": 2,
        "grpo-kl-beta": 0.1,
        "grpo-clamp-eps-lower": 0.2,
        "grpo-clamp-eps-upper": 0.28,
        "grpo-entropy-term-weight": 0.01,
        "train-iters": STEPS,
        "eval-iters": 0,
        "eval-interval": 1000,
        "log-interval": 1,
        "lr": 1e-3,
        "adam-eps": 1e-5,
        "lr-decay-style": "constant",
        "weight-decay": 0.0,
        "clip-grad": 1.0,
        "seed": 7,
        **row.settings.get("options", {}),
    }
    flags = (*FLAGS, "perform-rl-step", *row.settings.get("flags", ()))
    given = [f"--{flag}" for flag in (*flags, *["bf16"] * (dtype(row) is torch.bfloat16))]
    for key, value in options.items():
        given += [f"--{key}", *str(value).split(" ")]
    return given


def vocabulary(row: Row) -> int:
    return int(row.settings.get("vocabulary", VOCAB))


def length(row: Row) -> int:
    return int(row.settings.get("length", LENGTH))


def group(row: Row) -> int:
    return int(row.settings.get("group", GROUP))


def layers(config: Any, vp_stage: int | None = None) -> Any:
    """For --spec: layers whose parts all run on a CPU."""
    from mcore_logprobs.cpu_megatron.models import gpt_block_spec

    return gpt_block_spec(getattr(config, "transformer", config), vp_stage=vp_stage)


def arguments_config() -> Any:
    """The older way to the same model, by which the inference engine's own is built."""
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    return core_transformer_config_from_args(get_args())


def zigzag(bounds: torch.Tensor, tokens: int, size: int, rank: int) -> torch.Tensor:
    """Transformer Engine's: which tokens of packed sequences a context-parallel rank holds."""
    held = []
    for start, end in itertools.pairwise(bounds.tolist()):
        piece = (end - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            held.append(torch.arange(start + number * piece, start + (number + 1) * piece))
    return torch.cat(held)


# ---- rollouts ------------------------------------------------------------------------------------


def rollouts(row: Row, iteration: int) -> Any:
    """Groups as Megatron's agents give them: tokens that end in the end of the document."""
    from megatron.rl.types import RolloutGroup, TokenRollout

    groups = []
    for prompt in range(PROMPTS):
        answers = []
        for i in range(group(row)):
            random = torch.Generator().manual_seed(1000 * iteration + 10 * prompt + i)
            before, answer = 3 + (5 * i + prompt) % 7, 4 + (3 * i + prompt) % 9
            if "length" in row.settings:
                answer = length(row) - before - 1
            size = vocabulary(row)
            tokens = torch.randint(3, size, (before + answer,), generator=random).tolist()
            mask = [False] * before + [True] * (answer + 1)
            mask[before + answer // 2] = False  # a tool's token
            answers.append(
                TokenRollout(
                    trajectory=[[*tokens, 1]],
                    reward=float(torch.rand((), generator=random)),
                    generation_mask=[mask],
                    logprobs=[(-4 + torch.rand(sum(mask), generator=random)).tolist()],
                    env_id="given",
                    problem_id=f"{prompt}",
                )
            )
        groups.append(RolloutGroup(rollouts=answers))
    return groups


# ---- the run -------------------------------------------------------------------------------------


def prepare(row: Row, folder: Path) -> None:
    """Writes a tokenizer, and imports what train_rl.py imports."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(vocabulary(row))}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", pad_token="w2", eos_token="w1"
    ).save_pretrained(folder / "model")
    stand_in(*ABSENT)
    # torch's own import asks tensorboard for its version.
    board: Any = types.ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = object
    sys.modules[board.__name__] = board
    with cpu_training():
        import megatron.rl.rl_utils  # type: ignore[import-not-found]
        import megatron.training  # type: ignore[import-not-found]  # noqa: F401


def drive(row: Row, how: How) -> Trace:
    """train_rl.py, or the command of the framework's page with it."""
    from mcore_logprobs.dropin import switch

    trace = Trace()
    with cpu_training():
        import gpt_builders  # type: ignore[import-not-found]
        import megatron.training as training
        from megatron.rl import rl_utils

        if not rl_utils.HAVE_TEX:
            rl_utils.HAVE_TEX = True
            rl_utils.tex = types.SimpleNamespace(thd_get_partitioned_indices=zigzag)
        gpt_builders.import_module = lambda spec: layers(arguments_config())
        models = watch(row, training.training, rl_utils, trace)
        script = Path(rl_utils.__file__).parents[2] / "train_rl.py"
        command = [str(script), *arguments(row, how)]
        rows = LENGTH // 2 // row.settings["sizes"].get("context", 1)  # a micro-batch has more
        with watched(row, trace, MODEL["hidden-size"], rows):
            if how.switched:
                switch.main(["megatron_rl", *command])
            else:
                sys.argv = command
                sys.path.insert(0, str(script.parent))
                runpy.run_path(str(script), run_name="__main__")
    (model, before) = models
    trace.parameters = parameters(model)
    trace.moved = max(float((trace.parameters[k] - x).abs().max()) for k, x in before.items())
    return trace


def parameters(model: Any) -> dict[str, torch.Tensor]:
    named = (chunk.named_parameters() for chunk in model)
    return {f"{i} {k}": x.detach().clone() for i, part in enumerate(named) for k, x in part}


def without_precision(model: Any, args: Any, options: dict[str, Any]) -> Any:
    """Half precision's wrapper takes fp32_output, which Megatron's RL also gives a bare model."""
    options.pop("fp32_output", None)
    return args, options


def watch(row: Row, training: Any, rl_utils: Any, trace: Trace) -> list[Any]:
    """Keeps what the loop computes, and gives the rollouts; the list gets model and parameters."""
    from megatron.core.utils import unwrap_model

    kept: list[Any] = []
    setup, batch, log = (
        training.setup_model_and_optimizer,
        rl_utils.compute_logprobs_batch,
        training.training_log,
    )

    def model_and_optimizer(*args: Any, **options: Any) -> Any:
        found = setup(*args, **options)
        kept.extend([found[0], parameters(found[0])])
        for chunk in found[0]:
            unwrap_model(chunk).register_forward_pre_hook(without_precision, with_kwargs=True)
        return found

    def measure(what: str) -> contextlib.AbstractContextManager[None]:
        return trace.measure(what) if "length" in row.settings else contextlib.nullcontext()

    def logprobs(*args: Any, **options: Any) -> Any:
        with measure("log-probabilities"):
            found = batch(*args, **options)
        kept = found
        if (packing := options["packing_context"]) is not None:
            # Between the sequences of a bin ours has 0, and Megatron a number that nobody reads.
            kept = found * packing.packed_loss_mask[:, 1:].cpu()
        trace.logprobs.append(kept.clone())
        return found

    def training_log(losses: dict[str, Any], *args: Any, **options: Any) -> Any:
        trace.metrics.append({name: float(x) for name, x in losses.items()})
        return log(losses, *args, **options)

    step = training.train_step

    def train_step(*args: Any, **options: Any) -> Any:
        with measure("training step"):
            found = step(*args, **options)
        trace.grad_norm.append(float(found[5]))
        return found

    def environment_rollouts(*args: Any) -> Any:
        return rollouts(row, training.get_args().curr_iteration), {}

    training.setup_model_and_optimizer = model_and_optimizer
    training.training_log, training.train_step = training_log, train_step
    rl_utils.compute_logprobs_batch = logprobs
    rl_utils.get_environment_rollouts = environment_rollouts
    rl_utils.rl_inference_interface_shutdown = lambda: None  # the process would exit
    return kept


# ---- rows ----------------------------------------------------------------------------------------


def row(layout: str, option: str, **settings: Any) -> Row:
    sizes, processes = layout_sizes(layout)
    sizes.pop("data", None)
    return Row(
        "megatron_rl",
        layout,
        option,
        processes,
        log=(NOW,),
        calls=("get_logprobs",),
        settings={"sizes": sizes, **settings},
        environment={"MCORE_LOGPROBS_FUSED": "require"} if settings.get("lazy") else {},
        timeout=600,
    )


def measured(vocabulary: int, hidden: int, tokens: int) -> dict[str, dict[str, Row]]:
    """For `python -m benchmarks.trainers megatron_rl`: one rank, `tokens` in each of 4
    micro-batches.

    Three collections of one update each: the first warms up.
    """
    given = row(
        "TP 1",
        "measured",
        vocabulary=vocabulary,
        length=tokens,
        group=4 // PROMPTS,
        threads=2,
        options={"hidden-size": hidden, "grpo-iterations": 1, "train-iters": 3},
    )
    return {"": with_fused(given, "false", "require")}


PACKED = ["rl-use-sequence-packing"]
PACKED_SP = [*PACKED, "sequence-parallel"]
CORRECTED = ["rl-inference-logprobs-is-correction"]
LAZY = {"lazy": True, "vocabulary": 8192}
TRUNCATED = {"rl-importance-sampling-truncation-coef": 2.0}
# Log-probabilities are rounded to multiples of 1/16, ours from float32 logits and theirs from
# rounded ones. Later updates take ratios to the first one's: at PP 2 their norms were 2e-2 to 8e-2
# apart, by the CPU, and the first norms 7e-4.
ROUNDED = dataclasses.replace(UNBOUNDED, logprobs=0.07, grad_norm=3e-3)
ROWS = [
    row("TP 1", "GRPO"),
    row("TP 1", "GRPO, packed bins", flags=PACKED),
    # 0.28 would be within rounding of one token's ratio, 1.2800006.
    row("TP 1", "GRPO, lazy logits at V 8192", **LAZY, options={"grpo-clamp-eps-upper": 0.3}),
    row("TP 2 x SP", "GRPO, packed bins, lazy logits at V 8192", **LAZY, flags=PACKED_SP),
    row("CP 2", "GRPO, lazy logits at V 8192", **LAZY, flags=["calculate-per-token-loss"]),
    row("TP 2", "GRPO, importance sampling", flags=CORRECTED, options=TRUNCATED),
    row("TP 2 x SP", "GRPO, packed bins", flags=PACKED_SP),
    row("CP 2", "GRPO", flags=["calculate-per-token-loss"]),
    row("PP 2", "GRPO"),
    dataclasses.replace(rounded(row("TP 1", "GRPO")), first=ROUNDED),
    dataclasses.replace(rounded(row("PP 2", "GRPO"), grad_norm=0.15), first=ROUNDED),
    row("DP 2", "GRPO, distributed optimizer", flags=["use-distributed-optimizer"]),
]
