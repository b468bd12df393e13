"""`--explain`: why trainer and rollout engine differ on one rollout, cause by cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_logprobs.diagnostics import explain_mismatch

from .config import SetupError
from .data import Batch
from .layout import on_main
from .weights import Policy, build_policy


def explain(trainer: Any) -> Any:
    """The trainer's side is over the whole vocabulary at the sampler's temperature. Collective;
    rank 0 prints the causes and writes mismatch.png and mismatch.pt (a dump that `doctor mismatch`
    reads) into the run's directory."""
    config, layout = trainer.config, trainer.layout
    if layout.cp * layout.pp * layout.dp != 1:
        raise SetupError("--explain compares one rollout on one TP group: set CP, PP and DP to 1")
    on_main(lambda: trainer.engine.name == "vLLM" and trainer.engine.record_hidden())
    samples, _ = on_main(trainer.roll_out)
    batch = trainer.batch(samples)
    hidden, weight = _head_inputs(trainer, trainer.policy, batch)
    inputs = {
        "train_logprobs": trainer.score(trainer.policy, batch, filtered=False).logprobs,
        "rollout_logprobs": batch.rollout_logprobs,
        "target": trainer.batch(samples, all_tokens=True).labels,  # the prompts' too
        "mask": batch.mask,
        "hidden": hidden,
        "temperature": config.rollout.temperature,
        "top_p": config.rollout.top_p,
        "min_p": config.rollout.min_p,
        "vocab_size": trainer.logprobs.vocab_size,
    }
    if all(s.hidden is not None for s in samples):
        # The engine's hidden states, each at the position of the token that it predicts.
        inputs["rollout_hidden"] = torch.zeros_like(hidden, dtype=torch.float32)
        inputs["rollout_hidden"][batch.mask] = torch.cat([s.hidden for s in samples]).to(
            hidden.device
        )
    if config.model.dtype != "float32":
        # The same weights in float32, so that what rounding in the layers does can be told.
        exact = replace(config, model=replace(config.model, dtype="float32"))
        policy = build_policy(trainer.llama, trainer.bridge, trainer.engine, exact, trainable=False)
        inputs["float32_hidden"], _ = _head_inputs(trainer, policy, batch)
    found = explain_mismatch(**inputs, weight=weight, tp_group=layout.tp_group)
    shards = [torch.empty_like(weight) for _ in range(layout.tp)]
    dist.all_gather(shards, weight.contiguous(), group=layout.tp_group)
    if layout.is_main:
        out = config.run_dir
        trainer.say(
            f"\n{trainer.engine.name} against Megatron, {config.model.dtype}\n{found.text()}"
        )
        out.mkdir(parents=True, exist_ok=True)
        found.figure().savefig(out / "mismatch.png", dpi=130)
        torch.save({**inputs, "weight": torch.cat(shards)}, out / "mismatch.pt")
        trainer.say(f"wrote {out / 'mismatch.png'} and {out / 'mismatch.pt'}")
    return found


def _head_inputs(trainer: Any, policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
    """What the output layer multiplies: hidden states [n, s, h] and this rank's [V/TP, h]."""
    head, found = policy.gpt_model.output_layer, []

    def look(_: Any, args: tuple, kwargs: dict) -> None:
        weight = kwargs.get("weight")
        found.append((args[0].detach(), (head.weight if weight is None else weight).detach()))

    def nothing(micro: Batch, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return logits.sum(), micro.mask.sum().int(), logits.new_zeros(())

    hook = head.register_forward_pre_hook(look, with_kwargs=True)
    try:
        trainer.run(policy, batch, nothing, labels=False)
    finally:
        hook.remove()
    hidden = torch.cat([h for h, _ in found], dim=1)  # [s, n, h], or [s/TP, n, h]
    if trainer.config.parallel.sequence_parallel:
        parts = [torch.empty_like(hidden) for _ in range(trainer.layout.tp)]
        dist.all_gather(parts, hidden.contiguous(), group=trainer.layout.tp_group)
        hidden = torch.cat(parts)
    return hidden.transpose(0, 1).contiguous(), found[0][1]
