"""A GRPO step on a Megatron-Core model, top to bottom, log-probabilities from mcore_logprobs.

    torchrun --nproc-per-node 4 examples/rl_step.py --config configs/tiny-cpu.yaml

`bash examples/run_rl_step.sh` sets up an environment and runs this. `GrpoTrainer.train_step` is the
step: roll out, score, update through Megatron's own schedule, weights back, report. What is not the
step lies in rl/: tasks and the batch of padded answers (data.py), questions to train on and held
out (evaluate.py), rollout engines (rollout.py, vllm_engine.py), building a GPTModel and converting
its weights (weights.py), process groups (layout.py), the optimizer (optim.py), checkpoints, the
report (report.py), the checks before the first step (checks.py) and --explain (explain.py).

Left out altogether: reward models, several engines, asynchronous rollouts, sequence packing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from rl import checkpoint
from rl.checks import self_check
from rl.config import (
    OF_THE_SAMPLER,
    RunConfig,
    SetupError,
    logprob_config,
    read_command_line,
    validate_model,
)
from rl.data import IGNORE, Batch, group_advantages, kept_ids, make_batch, make_task, micro_batches
from rl.evaluate import Questions
from rl.explain import explain
from rl.layout import (
    Layout,
    from_last_stage,
    on_main,
    start_processes,
    stop_processes,
    whole_rows,
)
from rl.optim import make_optimizer
from rl.report import StepRecord, run_steps, step_metrics, token_metrics
from rl.rollout import RolloutEngine, Sample
from rl.vllm_engine import VllmEngine
from rl.weights import Policy, WeightBridge, build_policy

from mcore_logprobs import TokenStats, patch_model
from mcore_logprobs.cpu_megatron.runtime import cpu_runtime
from mcore_logprobs.losses import RegularizedLoss, clip_fraction, truncated_importance_weights


class GrpoTrainer:
    """Everything that a run holds. Collective: built and called on every rank alike."""

    def __init__(
        self, config: RunConfig, layout: Layout, say: Callable[[str], None] = print
    ) -> None:
        self.config, self.layout, self.step = config, layout, 0
        self.say = say if layout.is_main else lambda text: None
        self.engine: RolloutEngine | VllmEngine | None = None  # on rank 0, as is the task
        self.llama, self.pad = on_main(self._start_engine)
        validate_model(config, self.llama)
        self.bridge = WeightBridge(self.llama, layout)
        build = partial(build_policy, self.llama, self.bridge, self.engine, config)
        self.policy = build(trainable=True)
        self.reference = build(trainable=False) if config.needs_reference else None
        self.optimizer = make_optimizer(config, self.policy.model, layout.device)
        # The true vocabulary, so that padded columns are never counted.
        self.logprobs = replace(logprob_config(config), vocab_size=self.llama.vocab_size)
        torch.manual_seed(config.seed + 100 * layout.rank)

    def _start_engine(self) -> tuple[Any, int]:
        config, wanted = self.config, self.config.rollout.engine
        self.task = make_task(config.task, seed=config.seed)
        self.questions = Questions(self.task, config)
        self.say(f"{config.name}: loading model {config.model.source} in transformers")
        source = RolloutEngine.load(config.model, seed=config.seed)
        self.engine, why = source, ""
        if wanted != "transformers":
            self.say("starting vLLM in a process of its own; the first time takes a minute")
            try:
                self.engine = VllmEngine(source, config)
            except SetupError as error:
                if wanted == "vllm":
                    raise
                why = f" ({error})"
        if self.engine is source:
            source.model.to(self.layout.device)
        self.say(f"rollout engine: {self.engine.name} {self.engine.version}{why}")
        sizes = SimpleNamespace(**self.engine.model.config.to_dict())  # needs no transformers
        return sizes, self.engine.tokenizer.pad_token_id

    # ---- the step --------------------------------------------------------------------------------

    def train_step(self) -> tuple[StepRecord, list[Sample], list[str]]:
        config, started = self.config, time.perf_counter()
        samples, questions = on_main(self.roll_out)  # 1. answers, their log-probabilities, rewards
        rollout_seconds = time.perf_counter() - started
        group_advantages(samples, normalise_std=config.grpo.normalise_std)
        batch = self.batch(samples)
        sampled = int(batch.mask.sum())
        if self.config.rollout.replays:  # what the engine kept is not known for every token
            unknown = (batch.kept_ids < 0).all(-1)
            batch.labels = batch.labels.masked_fill(unknown, IGNORE)

        old = self.score(self.policy, batch)  # 2. what the policy thinks of them, before any update
        batch.old_logprobs = old.logprobs
        # A token that the trainer's filter would never give has no ratio.
        batch.labels = batch.labels.masked_fill(old.logprobs.isinf(), IGNORE)
        if not batch.mask.any():  # the same on every rank
            raise SetupError(
                f"step {self.step + 1}: none of the {sampled} sampled tokens is left to train on: "
                "the engine's record (rollout.max_kept) or the trainer's filter leaves all out"
            )
        if self.reference:
            batch.ref_logprobs = self.score(self.reference, batch).logprobs
        if config.rollout.importance_cap > 0:
            batch.weights = truncated_importance_weights(
                batch.old_logprobs, batch.rollout_logprobs, cap=config.rollout.importance_cap
            )
        measured = token_metrics(batch, old, sampled, self.reference is not None)
        if config.grpo.objective in OF_THE_SAMPLER:
            batch.old_logprobs = batch.rollout_logprobs

        updates = []
        for number in range(config.grpo.updates):  # 3. clipped updates
            if number and config.rollout.filters and not config.rollout.replays:
                # The trainer's own filter has moved with the policy, too.
                impossible = self.score(self.policy, batch).logprobs.isinf()
                batch.labels = batch.labels.masked_fill(impossible, IGNORE)
            report = self.accumulate_gradients(batch)
            updates.append(report | {"grad_norm": self.optimizer.step()})

        self.send_weights()  # 4. weights back to the engine
        self.step += 1
        seconds = time.perf_counter() - started
        speed = step_metrics(samples, updates, batch, self.layout, seconds, rollout_seconds)
        return StepRecord(step=self.step, **measured, **speed), samples, questions

    def roll_out(self) -> tuple[list[Sample], list[str]]:
        """On rank 0. The others wait in a broadcast, so that all cores are the engine's."""
        r = self.config.rollout
        first = self.step * r.prompts
        problems = [self.questions.training(first + i) for i in range(r.prompts)]
        seed = (self.config.seed * 1_000_003 + self.step) * r.prompts * r.group_size
        samples = self.questions.answer(self.engine, problems, r.group_size, seed)
        self.engine.sleep()
        return samples, [p.question for p in problems]

    def batch(self, samples: list[Sample], *, all_tokens: bool = False) -> Batch:
        p = self.config.parallel
        return make_batch(
            samples,
            pad=self.pad,
            multiple=2 * p.cp * (p.tp if p.sequence_parallel else 1),
            device=self.layout.device,
            all_tokens=all_tokens,
        )

    def send_weights(self) -> None:
        """Megatron's shards -> whole tensors on rank 0 -> the engine."""
        self.bridge.store(self.policy.gpt_model, self.engine)
        on_main(lambda: self.engine.sync())

    # ---- log-probabilities and gradients ---------------------------------------------------------

    @torch.no_grad()
    def score(self, policy: Policy, batch: Batch, *, filtered: bool = True) -> TokenStats:
        """Log-probabilities (under the sampler's filter), entropy and ranks of the labels, [n, s]
        each on every rank. Collective."""

        def keep(micro: Batch, s: TokenStats) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            found = torch.stack([s.logprobs, s.entropy, s.target_rank.float()], dim=-1)
            return s.logprobs.sum(), micro.mask.sum().int(), found

        options = {"entropy": True, "target_rank": True}
        parts = self.run(policy, batch, keep, filtered=filtered, **options)
        shape = torch.Size((*batch.tokens.shape, 3))
        logprobs, entropy, rank = whole_rows(parts, shape, self.layout).unbind(-1)
        return TokenStats(logprobs, entropy, rank.long(), None)

    @property
    def loss(self) -> RegularizedLoss:
        return self.config.loss(self.step)

    def accumulate_gradients(self, batch: Batch) -> dict[str, float]:
        """One forward and backward over the batch; leaves the mean loss's gradient, summed over all
        ranks, in `main_grad`. Returns the mean loss and the clipped share of tokens."""
        if self.loss.passes == 2:  # an objective of whole sequences: first a pass for its numbers
            first = self.score(self.policy, batch).logprobs
            given = (first, batch.old_logprobs, batch.advantages, batch.mask)
            batch = replace(batch, **self.loss.second_pass(*given))
        self.policy.model.zero_grad_buffer()
        entropy = self.config.grpo.settings.get("entropy_coef", 0) > 0
        parts = self.run(self.policy, batch, self.loss_of_micro_batch, loss=True, entropy=entropy)
        sums = sum(parts, torch.zeros(3, dtype=torch.float64, device=self.layout.device))
        dist.all_reduce(sums, group=self.layout.dp_cp_group)
        loss, clipped, tokens = from_last_stage(sums, self.layout).tolist()
        tokens = max(tokens, 1.0)
        return {"loss": loss / tokens, "clip_fraction": clipped / tokens}

    def loss_of_micro_batch(self, micro: Batch, stats: TokenStats) -> tuple[torch.Tensor, ...]:
        """Megatron's three outputs: the sum, the tokens that it is over, and what to report."""
        loss, tokens, g = stats.policy_loss, micro.mask.sum(), self.config.grpo
        clip = {"clip_low": g.clip_low, "clip_high": g.clip_high}
        clipped = clip_fraction(stats.logprobs, micro.old_logprobs, micro.advantages, **clip)
        clipped = clipped.masked_fill(~micro.mask, 0.0).sum()
        return loss, tokens.int(), torch.stack([loss.detach().double(), clipped, tokens])

    def run(
        self,
        policy: Policy,
        batch: Batch,
        loss_func: Callable[[Batch, Any], tuple],
        *,
        loss: bool = False,
        labels: bool = True,
        filtered: bool = True,
        **options: Any,
    ) -> list[Any]:
        """Megatron's forward-backward over this rank's micro-batches: `loss_func(micro, output)`
        gives (sum, tokens, report); returns the reports, on the last pipeline stage.

        loss: form the policy loss in the head, a chunk of logits at a time, and go backward.
        labels=False: the output is logits. filtered: log-probabilities under the sampler's filter.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        size = self.config.grpo.micro_batch
        if filtered and not self.config.rollout.replays:
            rollout = self.config.rollout
            options |= {"top_p": rollout.top_p, "min_p": rollout.min_p}
        with patch_model(policy.model, replace(self.logprobs, **options)) as handle:

            def forward_step(iterator: Any, model: Any) -> tuple[Any, Any]:
                micro, position_ids = next(iterator)
                with ExitStack() as blocks:
                    if loss:
                        per_token = (getattr(micro, name) for name in self.loss.tensors)
                        blocks.enter_context(handle.policy_loss(self.loss, *per_token))
                    if filtered and self.config.rollout.replays and labels:
                        blocks.enter_context(handle.replay(kept_ids(micro.kept_ids)))
                    output = model(
                        input_ids=micro.tokens,
                        position_ids=position_ids,
                        attention_mask=None,  # causal; padding stands to the right
                        labels=micro.labels if labels else None,
                    )
                return output, partial(loss_func, micro)

            micros = list(micro_batches(batch, size=size, layout=self.layout))
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(micros),
                model=[policy.model],
                num_microbatches=len(micros),
                seq_length=batch.tokens.shape[1],
                micro_batch_size=size,
                forward_only=not loss,
            )

    def resume(self, path: Path) -> None:
        self.step = checkpoint.load(path, self)
        self.send_weights()
        self.say(f"resumed from {path} after step {self.step}")


def main() -> int:
    try:
        config, args = read_command_line(__doc__.splitlines()[0])
        start_processes(config)
        try:
            with cpu_runtime():  # on a GPU, nothing
                if args.explain:  # vLLM's second model runner would not say whose states it has
                    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
                trainer = GrpoTrainer(config, Layout(config), partial(print, flush=True))
                self_check(trainer)
                if args.resume:
                    trainer.resume(args.resume)
                (explain if args.explain else run_steps)(trainer)
        finally:
            stop_processes()
    except SetupError as error:  # on every rank alike: rank 0 tells it, and ends the others
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(30)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
