"""Before the first step: are the trainer's log-probabilities those of two independent witnesses?"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_logprobs import vocab_parallel_token_stats

from .config import SetupError
from .data import Batch
from .layout import from_last_stage, on_main
from .rollout import Sample

SAME_LOGITS = 1e-3  # bound of log-probabilities and entropy between TP and one process


def self_check(trainer: Any) -> None:
    """Raises SetupError where the trainer's figures are not those of transformers' implementation
    of the model, and of one process with the whole vocabulary."""
    count = trainer.config.grpo.micro_batch * trainer.layout.dp  # one micro-batch per rank

    def texts() -> list[Sample]:
        # Questions far from those of the training steps; every token of theirs is scored.
        problems = [trainer.task.problem(900_000 + i) for i in range(count)]
        prompts = [trainer.questions.encode(trainer.engine, p.question) for p in problems]
        return [Sample(tokens=p, prompt_length=len(p), logprobs=[], group=0) for p in prompts]

    batch = trainer.batch(on_main(texts), all_tokens=True)
    tokens, bound = int(batch.mask.sum()), trainer.config.selfcheck
    trainer.say(f"self-check on {tokens} tokens: Megatron against transformers ...")
    difference = check_against_transformers(trainer, batch)
    apart = check_against_single_process(trainer, batch)
    trainer.say(
        f"  largest difference of log-probabilities {difference:.1e} (bound {bound:.0e}); TP "
        f"{trainer.layout.tp} against one process {apart['logprobs']:.1e}, entropy "
        f"{apart['entropy']:.1e}, target rank {apart['target_rank']:.0f}"
    )
    if not difference < bound:  # nor is NaN
        raise SetupError(
            f"self-check failed: Megatron's log-probabilities differ by {difference:.3e} from "
            f"another implementation's on the same text, the bound is {bound:.1e}. Training on "
            "them would be off-policy from the first token. Usual causes: weights converted in "
            "another layout (query-key-value groups, gate and up, rotary order), another RoPE base "
            "or norm epsilon, padded vocabulary counted in the softmax, or a half-precision model "
            "held to a float32 bound (selfcheck)."
        )
    # Both take the same logits and compute in float32, in a half-precision run too.
    limits = {"logprobs": min(bound, SAME_LOGITS), "entropy": min(bound, SAME_LOGITS)}
    limits["target_rank"] = 1.0  # a count: below 1 is equal
    wrong = [name for name, limit in limits.items() if not apart[name] < limit]
    if wrong:
        figures = ", ".join(f"{n} by {apart[n]:.3e} (below {limits[n]:.1e})" for n in wrong)
        raise SetupError(
            f"self-check failed: on the same logits TP {trainer.layout.tp} differs from one "
            f"process in {figures}. The weights are not the cause: usual ones are a TP group of "
            "the wrong ranks, shards in another order or a wrong vocab_size."
        )


def check_against_transformers(trainer: Any, batch: Batch) -> float:
    """Largest |difference| of log-probabilities, Megatron's against transformers', on one text.

    Two implementations of the model and two of the log-probability share nothing but the weights.
    """
    ours = trainer.score(trainer.policy, batch, filtered=False).logprobs
    temperature = trainer.config.rollout.temperature

    def compare() -> float:
        theirs = trainer.engine.score(batch.tokens, batch.labels, temperature)
        return (ours - theirs.to(ours.device))[batch.mask].abs().max().item()

    return on_main(compare)


@torch.no_grad()
def check_against_single_process(trainer: Any, batch: Batch) -> dict[str, float]:
    """The TP-sharded operation against one process that holds the whole vocabulary: the logits are
    gathered over TP, and each rank computes its statistics alone. Returns largest differences."""
    layout = trainer.layout
    groups = [dist.new_group([rank]) for rank in range(layout.world)]  # every rank makes every one
    names = ("logprobs", "entropy", "target_rank")

    def measure(micro: Batch, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        options = {
            "entropy": True,
            "target_rank": True,
            "temperature": trainer.logprobs.temperature,
            "vocab_size": trainer.logprobs.vocab_size,
        }
        parts = [torch.empty_like(logits) for _ in range(layout.tp)]
        dist.all_gather(parts, logits.contiguous(), group=layout.tp_group)
        both = [
            vocab_parallel_token_stats(z, micro.labels, tp_group=group, **options)
            for z, group in (
                (logits, layout.tp_group),
                (torch.cat(parts, -1), groups[layout.rank]),
            )
        ]
        far = [(getattr(both[0], n) - getattr(both[1], n)).abs().max().float() for n in names]
        return logits.sum(), micro.mask.sum().int(), torch.stack(far)

    worst = torch.zeros(3, device=layout.device)
    for found in trainer.run(trainer.policy, batch, measure, labels=False):
        worst = torch.maximum(worst, found)
    worst.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # gloo's maximum may leave a rank's NaN out
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return dict(zip(names, from_last_stage(worst, layout).tolist(), strict=True))
