"""ms-swift's `megatron rlhf`, from its command line: GRPO and DPO by its Megatron trainers.

Its arguments, templates, data sets, `MegatronGRPOTrainer` and `MegatronDPOTrainer`, mcore-bridge's
model and weights, Megatron's schedules, DDP and optimizer. Outside them: what a CPU needs
(`cpu_devices`, layers given to mcore-bridge), and in place of the vLLM server's client, which gives
completions, one with random tokens. 4.6.0 is PyPI's wheel; of main `MCORE_LOGPROBS_PEERS` names the
folder with a checkout in `ms-swift`.

DPO knows no temperature: there the run that must be told apart has another scale of the weights.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.dropin.frameworks import source_root
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
from tests.trainers.half import dtype, dtype_name, rounded_alike
from tests.trainers.verl import write_model

# Imported, and not used on the way to a training step.
ABSENT = ("transformer_engine", "aiohttp", "cryptography", "msgspec")
NOW = (
    "swift.megatron.trainers.vocab_parallel_utils: compute_logps_and_entropy_from_logits, "
    "vocab_parallel_entropy, vocab_parallel_gather_logps, vocab_parallel_kl_div, "
    "vocab_parallel_log_softmax: now those of mcore_logprobs.dropin.ms_swift"
)
VOCABULARY, HIDDEN = 96, 32
PROMPTS, GROUP = 4, 4  # per rollout: 16 completions, of which an update takes 8
MICRO, BATCH = 2, 8
STEPS = 4  # of GRPO two rollouts, two updates of each
PROMPT, COMPLETION = 6, 8  # tokens at most

# ---- what a user writes --------------------------------------------------------------------------

COMMON: dict[str, Any] = {
    "model_type": "llama",
    "template": "dummy",
    "tuner_type": "full",
    "fp16": False,
    "ddp_backend": "gloo",
    "use_cpu_initialization": True,
    "check_model": False,
    "split_dataset_ratio": 0,
    "load_from_cache_file": False,
    "dataset_num_proc": 1,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": False,
    "report_to": "print",  # in place of a service
    "add_version": False,
    "save_steps": 1000,
    "logging_steps": 1,
    "train_iters": STEPS,
    "micro_batch_size": MICRO,
    "global_batch_size": BATCH,
    "max_length": 64,
    "recompute_granularity": "none",
    "lr": 1e-3,
    "lr_decay_style": "constant",
    "adam_eps": 1e-5,  # a gradient that is rounding noise moves nothing
    "weight_decay": 0.0,
    "clip_grad": 1.0,
    "seed": 7,
}
GRPO: dict[str, Any] = {
    "rlhf_type": "grpo",
    "num_generations": GROUP,
    "generation_batch_size": PROMPTS * GROUP,
    "max_completion_length": COMPLETION,
    "reward_funcs": "share",
    "vllm_mode": "server",
    "vllm_server_host": "127.0.0.1",
    "log_entropy": True,
    "beta": 0.04,
}
DPO: dict[str, Any] = {
    "rlhf_type": "dpo",
    "beta": 0.1,
    "rpo_alpha": 0.2,
    "cross_entropy_loss_fusion": False,  # Megatron's fused one rounds every gradient to bfloat16
}


def arguments(row: Row, how: How) -> list[str]:
    folder = Path(how.folder)
    given: Mapping[str, Any] = row.settings
    grpo = given["trainer"] == "GRPO"
    scale = "" if grpo else f"-{how.temperature}"
    plugins = [folder / "rewards.py"]
    if how.switched:
        plugins.append(folder / "switch_logprobs.py")
    options = {
        **COMMON,
        "torch_dtype": dtype_name(row),
        "bf16": dtype(row) is torch.bfloat16,
        **(GRPO | {"temperature": how.temperature} if grpo else DPO),
        "model": folder / f"model{scale}",
        "dataset": folder / f"{given['trainer'].lower()}.jsonl",
        "output_dir": folder / "output",
        "external_plugins": " ".join(map(str, plugins)),
        **{
            f"{kind}{'' if kind == 'context' else '_model'}_parallel_size": size
            for kind, size in given["sizes"].items()
        },
        **given.get("options", {}),
    }
    words: list[str] = []
    for key, value in options.items():
        words += [f"--{key}", *str(value).split(" ")]
    return words


def write_inputs(row: Row, folder: Path) -> None:
    """Models with their tokenizer, prompts, pairs, and the two files of --external_plugins."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = row.settings.get("vocabulary", VOCABULARY)
    length = row.settings.get("length", 0)
    given = {
        "vocabulary": words,
        "hidden": row.settings.get("hidden", HIDDEN),
        "length": 2 * length,
    }
    classes = LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    for name in ("model", "model-0.8", "model-0.9"):
        write_model(folder / name, given, *classes)
        write_tokenizer(folder / name)
    for scale in (0.8, 0.9):
        model = LlamaForCausalLM.from_pretrained(folder / f"model-{scale}")
        with torch.no_grad():
            model.lm_head.weight.mul_(scale)
        model.save_pretrained(folder / f"model-{scale}")
    random = torch.Generator().manual_seed(5)

    def text(most: int) -> str:
        count = int(torch.randint(2, most + 1, (), generator=random))
        first = 4
        if length:  # "w20" to "w39" are two tokens: w2 and w3 are found in them, being special
            count, first = most, 40
        ids = torch.randint(first, VOCABULARY, (count,), generator=random).tolist()
        return " ".join(f"w{i}" for i in ids)

    with (folder / "grpo.jsonl").open("w") as prompts, (folder / "dpo.jsonl").open("w") as pairs:
        for _ in range(4 * BATCH):
            user = {"role": "user", "content": text(PROMPT)}
            prompts.write(json.dumps({"messages": [user]}) + "\n")
            answer = {"role": "assistant", "content": text(completion(row))}
            pair = {"messages": [user, answer], "rejected_response": text(completion(row))}
            pairs.write(json.dumps(pair) + "\n")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "switch_logprobs.py").write_text(SWITCH)


def completion(row: Row) -> int:
    """How many tokens an answer has at most; where it is measured, exactly."""
    length = row.settings.get("length")
    return length - PROMPT - 1 if length else COMPLETION  # 1: the end of the document


def write_tokenizer(folder: Path) -> None:
    """Words apart from each other by spaces: an answer's text is read again."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w3", pad_token="w0", eos_token="w2"
    ).save_pretrained(folder)


REWARDS = """
from swift.rewards import ORM, orms


class Share(ORM):
    def __call__(self, completions, **rest):
        return [sum(len(word) for word in text.split()) / 40 for text in completions]


orms["share"] = Share
"""
SWITCH = """
import mcore_logprobs.dropin.switch as s; s.switch_on("ms_swift")
"""


# ---- in place of the vLLM server -----------------------------------------------------------------


class Server:
    """The client of a rollout server: completions of random tokens; weights go nowhere."""

    enable_lora = enable_multi_turn = use_gym_env = False
    least, most = 2, COMPLETION

    def __init__(self, **address: Any) -> None:
        self.random = torch.Generator().manual_seed(11)

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **options: None

    def infer(self, infer_requests: list[Any], request_config: Any) -> list[Any]:
        return [self.completion() for _ in infer_requests]

    def completion(self) -> Any:
        from swift.infer_engine import protocol  # type: ignore[import-not-found]

        count = int(torch.randint(self.least, self.most + 1, (), generator=self.random))
        ids = torch.randint(4, VOCABULARY, (count,), generator=self.random).tolist()
        text = " ".join(f"w{i}" for i in ids)
        message = protocol.ChatMessage(role="assistant", content=text)
        choice = protocol.ChatCompletionResponseChoice(
            index=0, message=message, finish_reason="stop", token_ids=ids
        )
        usage = protocol.UsageInfo(0, count, count)
        response = protocol.ChatCompletionResponse(model="", choices=[choice], usage=usage)
        return protocol.RolloutOutput(response=response)


# ---- the run -------------------------------------------------------------------------------------


def paths(row: Row) -> list[Path] | str:
    needed = installed("ms_swift")
    if not needed.is_dir():
        return requirements.missing(needed)
    if row.settings["version"] != "main":
        return [source_root("ms-swift", row.settings["version"]), needed]
    folder = checkout("ms-swift")
    return [folder, needed] if folder else "no checkout of ms-swift: tests/run.sh --all --peers DIR"


def prepare(row: Row, folder: Path) -> None:
    """Writes the inputs, and imports ms-swift: the switch replaces what is imported already too."""
    write_inputs(row, folder)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers  # noqa: F401  (it asks which of the stand-ins are installed)

    te_layers()
    stand_in(*ABSENT)
    for name in ("model.register", "utils"):
        importlib.import_module(f"mcore_bridge.{name}")
    for name in ("grpo_trainer", "dpo_trainer"):
        importlib.import_module(f"swift.megatron.trainers.{name}")
    importlib.import_module("swift.megatron.pipelines.train.rlhf")


def te_layers() -> None:
    """Names that mcore-bridge imports from Megatron, which has no classes without the engine."""
    from megatron.core.extensions import transformer_engine

    for name in (
        "TELinear", "TEGroupedLinear", "TELayerNormColumnParallelLinear", "TEColumnParallelLinear",
        "TERowParallelLinear", "TENorm", "TEDotProductAttention", "TEFusedMLP",
        "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear",
    ):  # fmt: skip
        if not isinstance(getattr(transformer_engine, name, None), type):
            setattr(transformer_engine, name, type(name, (), {}))


def drive(row: Row, how: How) -> Trace:
    from mcore_logprobs.cpu_megatron.training import cpu_devices

    trace = Trace()
    with cpu_devices():
        on_cpu()
        kept = observe(trace)
        if "length" in row.settings:
            Server.least = Server.most = completion(row)
            measure(trace)
        from swift.megatron.pipelines.train.rlhf import (  # type: ignore[import-not-found]
            megatron_rlhf_main,
        )

        context = int(row.settings["sizes"].get("context", 1))
        with watched(row, trace, HIDDEN, 2 * 4 // context):
            megatron_rlhf_main(arguments(row, how))
    if "length" in row.settings:  # measured, not compared
        return trace
    (trainer, before) = kept
    trace.parameters = parameters(trainer)
    trace.moved = max(float((trace.parameters[k] - x).abs().max()) for k, x in before.items())
    return trace


def on_cpu() -> None:
    from accelerate import PartialState

    PartialState(
        cpu=True
    )  # accelerate gathers and broadcasts for ms-swift, where it knows of ranks
    from mcore_bridge.model import register  # type: ignore[import-not-found]

    from mcore_logprobs.cpu_megatron.bridged import bridged_block_spec

    register.get_gpt_decoder_block_spec = bridged_block_spec
    from swift.megatron.trainers import rollout_mixin  # type: ignore[import-not-found]
    from swift.rlhf_trainers import vllm_client  # type: ignore[import-not-found]

    rollout_mixin.is_vllm_available = lambda: True
    vllm_client.VLLMClient = Server
    moved = torch.Tensor.to

    def to(self: Tensor, *given: Any, **options: Any) -> Any:
        """mcore-bridge moves weights to "cuda" by name."""
        return moved(self, *("cpu" if word == "cuda" else word for word in given), **options)

    torch.Tensor.to = to  # type: ignore[method-assign,assignment]


def observe(trace: Trace) -> list[Any]:
    """Keeps what losses get and what is logged; gives [the trainer, its parameters at first]."""
    from swift.megatron.pipelines.train.rlhf import MegatronRLHF
    from swift.megatron.trainers import base, dpo_trainer, grpo_trainer

    kept: list[Any] = []
    build, log = MegatronRLHF.prepare_trainer, base.BaseMegatronTrainer.on_log

    def prepare_trainer(self: Any) -> Any:
        trainer = build(self)
        kept.extend((trainer, parameters(trainer)))
        return trainer

    def on_log(self: Any, logs: dict[str, Any], prefix: str = "") -> None:
        log(self, logs, prefix)
        metrics = {k: float(x) for k, x in self._last_logged_metrics.items()}
        trace.grad_norm.append(metrics.pop("grad_norm"))
        if not trace.metrics:
            # DPO's policy is the reference still: which of two equal rewards is larger is rounding.
            metrics.pop("rewards/accuracies", None)
        trace.metrics.append(metrics)

    MegatronRLHF.prepare_trainer = prepare_trainer
    base.BaseMegatronTrainer.on_log = on_log
    base.BaseMegatronTrainer.save_checkpoint = lambda self: None  # the last one: slow, not compared
    grpo, dpo = grpo_trainer.MegatronGRPOTrainer, dpo_trainer.MegatronDPOTrainer
    loss_of_grpo, loss_of_dpo = grpo.loss_func, dpo.loss_func

    def grpo_loss(self: Any, output_tensor: Tensor, data: Any) -> Any:
        batch = data["grpo_batch"]
        for x in (output_tensor, batch.old_per_token_logps, batch.ref_per_token_logps):
            if x is not None:
                trace.logprobs.append(x.detach().clone())
        entropy = data["per_token_entropy"].where(batch.completion_mask, 0.0)
        trace.entropy.append(entropy.detach().clone())
        return loss_of_grpo(self, output_tensor, data)

    def dpo_loss(self: Any, output_tensor: Tensor, *, labels: Tensor, **more: Any) -> Any:
        for losses in output_tensor.detach().chunk(2):  # of the reference, of the policy
            trace.logprobs.append(-losses.where(labels != -100, 0.0))
        return loss_of_dpo(self, output_tensor, labels=labels, **more)

    grpo.loss_func, dpo.loss_func = grpo_loss, dpo_loss
    return kept


def measure(trace: Trace) -> None:
    """Notes what a training step takes, and apart from it the pass that GRPO begins it with: the
    log-probabilities of its micro-batches, without the rollout and the weights sent for it.
    """
    from swift.megatron.trainers import base, grpo_trainer

    owner, grpo = base.BaseMegatronTrainer, grpo_trainer.MegatronGRPOTrainer
    step, of_micro_batch = owner.train_step, grpo._maybe_compute_logps
    passes: list[tuple[float, float]] = []

    def compute_logps(*given: Any, **options: Any) -> Any:
        with trace.measure("micro-batch"):
            found = of_micro_batch(*given, **options)
        passes.extend(trace.measured.pop("micro-batch"))
        return found

    def train_step(self: Any, iterator: Any) -> Any:
        if isinstance(self, grpo):
            iterator = self._replace_data_iterator(iterator)
            self._replace_data_iterator = lambda same: same
            seconds, peaks = zip(*passes, strict=True)
            of_step = trace.measured.setdefault("log-probabilities", [])
            of_step.append((sum(seconds), max(peaks)))
            passes.clear()
        try:
            with trace.measure("training step"):
                return step(self, iterator)
        finally:
            vars(self).pop("_replace_data_iterator", None)

    owner.train_step, grpo._maybe_compute_logps = train_step, compute_logps


def parameters(trainer: Any) -> dict[str, Tensor]:
    return {
        f"{i} {name}": x.detach().clone()
        for i, model in enumerate(trainer.unwrapped_models)
        for name, x in model.named_parameters()
    }


# ---- rows ----------------------------------------------------------------------------------------


def row(version: str, trainer: str, layout: str, option: str, **more: Any) -> Row:
    sizes, processes = layout_sizes(layout)
    sizes.pop("data", None)
    if "SP" in layout:
        more["options"] = {**more.get("options", {}), "sequence_parallel": True}
    settings = {"version": version, "trainer": trainer, "sizes": sizes, **more}
    return Row(
        framework="ms_swift",
        layout=layout,
        option=f"{version}, {trainer}, {option}",
        processes=processes,
        log=(NOW,),
        calls=("compute_logps_and_entropy_from_logits",) if trainer == "GRPO" else (),
        settings=settings,
        environment={"MCORE_LOGPROBS_FUSED": "require"} if more.get("lazy") else {},
        timeout=600,
    )


def measured(vocabulary: int, hidden: int, tokens: int) -> dict[str, dict[str, Row]]:
    """For `python -m benchmarks.trainers ms_swift`: one rank, two sequences of `tokens` together in
    each of 4 micro-batches.

    Three steps each: the first warms up. GRPO has log-probabilities of the old policy, by a pass
    over completions that are given; DPO those of its reference within the step.
    """
    sizes = {
        "vocabulary": vocabulary,
        "hidden": hidden,
        "length": tokens // 2,
        "threads": 2,
    }
    long = {"max_length": tokens, "train_iters": 3}
    options = {
        "GRPO": {
            **long,
            "beta": 0.0,
            "max_completion_length": tokens,
            "generation_batch_size": BATCH,
        },
        "DPO": {**long, "micro_batch_size": 1, "global_batch_size": 4},
    }
    given = {
        trainer: row("4.6.0", trainer, "TP 1", "measured", **sizes, options=own)
        for trainer, own in options.items()
    }
    return {
        "GRPO": with_fused(given["GRPO"], "false", "require"),
        "DPO": with_fused(given["DPO"], "require"),  # no function of its own is replaced
    }


SEQUENCES = {"importance_sampling_level": "sequence", "epsilon": 3e-3}
CISPO = {"loss_type": "cispo", "epsilon_high": 2.0}
LAZY = {"lazy": True, "vocabulary": 8192}
LAZY_2 = LAZY | {"vocabulary": 16384}  # a block of 4,096 columns is less than a rank's

ROWS = [
    row("4.6.0", "GRPO", "TP 1", "KL to a reference", alike=True),
    row("4.6.0", "GRPO", "TP 1", "lazy logits at V 8192", **LAZY),
    row("4.6.0", "GRPO", "TP 2", "lazy logits at V 16384", **LAZY_2),
    row("4.6.0", "GRPO", "TP 2 x SP", "CISPO", options=CISPO),
    row("4.6.0", "GRPO", "CP 2", "ratios of sequences", options=SEQUENCES),
    row("4.6.0", "GRPO", "PP 2", "KL to a reference", alike=True),
    row("4.6.0", "DPO", "TP 1", "RPO, lazy logits at V 8192", **LAZY),
    row("4.6.0", "DPO", "TP 2", "RPO, lazy logits at V 16384", **LAZY_2),
    row("4.6.0", "DPO", "CP 2", "RPO, lazy logits at V 8192", **LAZY),
    # Not main at TP 2: its own gradients are wrong there (docs/audit.md).
    row("main", "GRPO", "TP 1", "KL to a reference"),
    rounded_alike(row("4.6.0", "GRPO", "TP 2", "KL to a reference"), real=True),
    rounded_alike(row("4.6.0", "GRPO", "TP 2", "lazy logits at V 16384", **LAZY_2)),
    rounded_alike(row("4.6.0", "DPO", "TP 2", "RPO, lazy logits at V 16384", **LAZY_2)),
]
