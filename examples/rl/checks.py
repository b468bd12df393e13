"""Before the first step and beside it: are the numbers right, what do they cost, and where the
trainer and the rollout engine differ, why?"""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from mcore_logprobs import vocab_parallel_token_stats
from mcore_logprobs.diagnostics import explain_mismatch
from mcore_logprobs.losses import truncated_importance_weights

from .config import SetupError
from .data import Batch, group_advantages
from .layout import Layout, from_last_stage, on_main
from .optim import global_grad_norm
from .rollout import Sample
from .weights import Policy, build_policy

# ---- two independent witnesses ---------------------------------------------------------------


def self_check(trainer: Any) -> None:
    """Raises SetupError where the trainer's figures are not those of two independent witnesses:
    transformers' implementation of the model, and one process with the whole vocabulary."""
    count = trainer.config.grpo.micro_batch * trainer.layout.dp  # one micro-batch a rank

    def texts() -> list[Sample]:
        # Questions far from those of the training steps; every token of theirs is scored.
        problems = [trainer.task.problem(900_000 + i) for i in range(count)]
        prompts = [trainer.questions.encode(trainer.engine, p.question) for p in problems]
        return [Sample(tokens=p, prompt_length=len(p), logprobs=[], group=0) for p in prompts]

    batch = trainer.batch(on_main(texts), all_tokens=True)
    difference = check_against_transformers(trainer, batch)
    bound = trainer.config.selfcheck.max_logprob_diff
    trainer.say(
        f"self-check, {int(batch.mask.sum())} tokens: Megatron against transformers, "
        f"largest log-probability difference {difference:.2e} (bound {bound:.0e})"
    )
    require_close(difference, bound)
    apart = check_against_single_process(trainer, batch)
    trainer.say(
        f"self-check, TP {trainer.layout.tp} against one process: log-probability "
        f"{apart['logprobs']:.1e}, entropy {apart['entropy']:.1e}, "
        f"target rank {apart['target_rank']:.0f}"
    )
    require_close(apart["logprobs"], bound)


def check_against_transformers(trainer: Any, batch: Batch) -> float:
    """Largest |difference| of log-probabilities, Megatron's against transformers', on one text.

    Two implementations of the model and two of the log-probability share nothing but the weights.
    """
    ours = trainer.score(trainer.policy, batch).stats.logprobs
    temperature = trainer.config.rollout.temperature

    def compare() -> float:
        theirs = trainer.engine.score(batch.tokens, batch.labels, temperature)
        return (ours - theirs.to(ours.device))[batch.mask].abs().max().item()

    return on_main(compare)


@torch.no_grad()
def check_against_single_process(trainer: Any, batch: Batch) -> dict[str, float]:
    """The TP-sharded operation against one process that holds the whole vocabulary.

    The logits are gathered over TP, and each rank computes its statistics alone (a group of one).
    Returns the largest difference of log-probability and entropy, and of target rank.
    """
    from megatron.core import parallel_state as ps

    layout = trainer.layout
    alone = single_rank_group(layout)
    tp_group = ps.get_tensor_model_parallel_group()
    worst = torch.zeros(3, device=layout.device)

    def measure(micro: Any, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        options = {
            "entropy": True,
            "target_rank": True,
            "temperature": trainer.logprobs.temperature,
            "vocab_size": trainer.logprobs.vocab_size,
        }
        labels = micro.batch.labels
        sharded = vocab_parallel_token_stats(logits, labels, tp_group=tp_group, **options)
        whole = vocab_parallel_token_stats(
            _gather_vocabulary(logits, tp_group), labels, tp_group=alone, **options
        )
        pairs = (
            (sharded.logprobs, whole.logprobs),
            (sharded.entropy, whole.entropy),
            (sharded.target_rank, whole.target_rank),
        )
        return logits.sum(), labels.sum().int(), torch.stack([_distance(a, b) for a, b in pairs])

    model = trainer.policy.model
    for found in trainer.run(model, batch, measure, forward_only=True, labels=False):
        worst = torch.maximum(worst, found)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    logprob, entropy, rank = from_last_stage(worst, layout).tolist()
    return {"logprobs": logprob, "entropy": entropy, "target_rank": rank}


def _distance(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() - b.double()).abs().max().float()


def single_rank_group(layout: Layout) -> Any:
    """A process group of this rank alone. Every rank has to make every group."""
    groups = [dist.new_group([rank]) for rank in range(layout.world)]
    return groups[layout.rank]


def _gather_vocabulary(logits: Tensor, tp_group: Any) -> Tensor:
    """[b, s, V/TP] -> [b, s, V] on every TP rank."""
    parts = [torch.empty_like(logits) for _ in range(tp_group.size())]
    dist.all_gather(parts, logits.contiguous(), group=tp_group)
    return torch.cat(parts, dim=-1)


def require_close(difference: float, bound: float) -> None:
    if not difference < bound:  # also catches NaN
        raise SetupError(
            f"self-check failed: Megatron's log-probabilities differ from transformers' by "
            f"{difference:.3e} on the same text, the bound is {bound:.1e}. Training on them would "
            "be off-policy from the first token. Usual causes: weights converted in another layout "
            "(query-key-value groups, gate and up, rotary order), another RoPE base or norm "
            "epsilon, padded vocabulary counted in the softmax, or a half-precision model held to "
            "a float32 bound (selfcheck.max_logprob_diff)."
        )


# ---- --compare: one step's gradients by three ways through the head ---------------------------

WAYS = {
    "logits": "logits held, then the statistics of each token",
    "fused": "hidden states to statistics; logits computed twice, in chunks",
    "linear": "loss formed in the head; logits of answers only, once, in chunks",
}


def compare(trainer: Any) -> list[dict]:
    """`--compare`: loss, gradient norm, time and memory of one update by each way; no step.
    Collective; prints on rank 0."""
    samples, _ = on_main(trainer.roll_out)
    group_advantages(samples, normalise_std=trainer.config.grpo.normalise_std)
    batch = trainer.batch(samples)
    scores = trainer.score(trainer.policy, batch)
    batch.old_logprobs = batch.ref_logprobs = scores.stats.logprobs
    params = [p for p in trainer.policy.model.parameters() if p.requires_grad]
    rows = []
    for way in WAYS:
        trainer.accumulate_gradients(batch, way=way)  # warm: allocator, compiled code
        trainer.policy.model.zero_grad_buffer()
        meter = PeakMemory(trainer.layout)
        started = time.perf_counter()
        report = trainer.accumulate_gradients(batch, way=way)
        seconds = time.perf_counter() - started
        rows.append(
            {
                "way": way,
                "loss": report["loss"],
                "grad_norm": global_grad_norm(params),
                "seconds": seconds,
                "peak_mib": meter.added_mib(),
            }
        )
    if trainer.layout.is_main:
        trainer.console.print(_table(rows, trainer, batch))
    return rows


def _table(rows: list[dict], trainer: Any, batch: Batch) -> Table:
    tokens = trainer.config.grpo.micro_batch * batch.tokens.shape[1] // trainer.layout.cp
    size = tokens * trainer.policy.gpt_model.vocab_size // trainer.layout.tp * 4 / 2**20
    table = Table(
        title=f"one update, by the way through the head\n"
        f"(a rank's float32 logits of a micro-batch: {size:.1f} MiB)",
        title_justify="left",
    )
    for name in ("way", "", "loss", "gradient norm", "peak memory", "time"):
        table.add_column(name, justify="left" if name in ("way", "") else "right")
    for r in rows:
        table.add_row(
            r["way"],
            WAYS[r["way"]],
            f"{r['loss']:+.7f}",
            f"{r['grad_norm']:.6f}",
            f"+{r['peak_mib']:.1f} MiB",
            f"{r['seconds']:.2f} s",
        )
    return table


class PeakMemory:
    """The peak since this object was made, over what was held then; the largest of all ranks.

    On CPU it is resident memory, whose high-water mark Linux resets on request; where that is not
    allowed, the figure is NaN rather than something else.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.cuda = layout.device.type == "cuda"
        dist.barrier()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            return
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # give freed pages back, so that they count again
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self.before = _status("VmRSS")
        except OSError:
            self.before = float("nan")

    def added_mib(self) -> float:
        if self.cuda:
            peak = float(torch.cuda.max_memory_allocated() - self.before)
        elif self.before == self.before:
            peak = _status("VmHWM") - self.before
        else:
            peak = self.before
        value = torch.tensor(peak / 2**20, device=self.layout.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value.item()


def _status(key: str) -> float:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return float(line.split()[1]) * 1024
    raise OSError(f"no {key} in /proc/self/status")


# ---- why trainer and rollout engine differ ---------------------------------------------------


def explain(trainer: Any) -> Any:
    """`--explain`: one rollout, and where its log-probabilities differ from the trainer's, cause by
    cause. The trainer's side is the usual one, over the whole vocabulary at the sampler's
    temperature. Collective; rank 0 prints and writes mismatch.png and mismatch.pt (a dump that
    `doctor mismatch` reads) into the run's directory."""
    config, layout = trainer.config, trainer.layout
    if layout.cp * layout.pp * layout.dp != 1:
        raise SetupError("--explain holds one rollout on one TP group: set CP, PP and DP to 1")
    if config.rollout.engine == "vllm":
        on_main(lambda: trainer.engine.record_hidden())
    samples, _ = on_main(trainer.roll_out)
    whole = trainer.batch(samples, all_tokens=True)  # labels of the prompts too
    batch = trainer.batch(samples)
    train = trainer.score(trainer.policy, batch)
    hidden, weight = _head_inputs(trainer, trainer.policy, batch)
    inputs = {
        "train_logprobs": train.stats.logprobs,
        "rollout_logprobs": batch.rollout_logprobs,
        "target": whole.labels,
        "mask": batch.mask,
        "hidden": hidden,
        "temperature": config.rollout.temperature,
        "top_p": config.rollout.top_p,
        "vocab_size": trainer.logprobs.vocab_size,
    }
    if all(s.hidden is not None for s in samples):
        inputs["rollout_hidden"] = _answer_hidden(samples, batch, hidden)
    if config.model.dtype != "float32":
        # The same weights in float32, so that what rounding in the layers does can be told.
        exact = replace(config, model=replace(config.model, dtype="float32"))
        policy = build_policy(trainer.llama, trainer.bridge, trainer.engine, exact, trainable=False)
        inputs["float32_hidden"], _ = _head_inputs(trainer, policy, batch)
    found = explain_mismatch(**inputs, weight=weight, tp_group=layout.tp_group)
    weights = [
        truncated_importance_weights(lp[batch.mask], batch.rollout_logprobs[batch.mask]).mean()
        for lp in (train.stats.logprobs, train.trainer, train.engine)
    ]
    shards = [torch.empty_like(weight) for _ in range(layout.tp)]
    dist.all_gather(shards, weight.contiguous(), group=layout.tp_group)
    trainer.say(f"\n{config.rollout.engine} against Megatron, {config.model.dtype}\n{found.text()}")
    trainer.say(
        "truncated importance weight, mean: {:.4f} without a filter, {:.4f} under the trainer's, "
        "{:.4f} under the engine's kept tokens".format(*weights)
    )
    if layout.is_main:
        out = config.run_dir
        out.mkdir(parents=True, exist_ok=True)
        found.figure().savefig(out / "mismatch.png", dpi=130)
        torch.save({**inputs, "weight": torch.cat(shards)}, out / "mismatch.pt")
        trainer.say(f"wrote {out / 'mismatch.png'} and {out / 'mismatch.pt'}")
    return found


def _answer_hidden(samples: list[Sample], batch: Batch, like: Tensor) -> Tensor:
    """[n, s, h]: the engine's hidden states, each at the position of the token that it predicts."""
    out = torch.zeros(like.shape, device=like.device)
    out[batch.mask] = torch.cat([s.hidden for s in samples]).to(like.device)
    return out


def _head_inputs(trainer: Any, policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
    """What the output layer multiplies: hidden states [n, s, h] and this rank's [V/TP, h]."""
    gpt_model, found = policy.gpt_model, []

    def look(_: Any, args: tuple, kwargs: dict) -> None:
        weight = kwargs.get("weight")
        weight = gpt_model.output_layer.weight if weight is None else weight
        found.append((args[0].detach(), weight.detach()))

    def nothing(micro: Any, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return logits.sum(), micro.batch.mask.sum().int(), logits.new_zeros(())

    hook = gpt_model.output_layer.register_forward_pre_hook(look, with_kwargs=True)
    try:
        trainer.run(policy.model, batch, nothing, forward_only=True, labels=False)
    finally:
        hook.remove()
    hidden = torch.cat([h for h, _ in found], dim=1)  # [s, n, h], or [s/TP, n, h]
    if trainer.config.parallel.sequence_parallel:
        parts = [torch.empty_like(hidden) for _ in range(trainer.layout.tp)]
        dist.all_gather(parts, hidden.contiguous(), group=trainer.layout.tp_group)
        hidden = torch.cat(parts)
    return hidden.transpose(0, 1).contiguous(), found[0][1]
