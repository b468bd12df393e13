"""A GRPO step on a Megatron-Core model, top to bottom, log-probabilities from mcore_logprobs.

    torchrun --nproc-per-node 3 examples/rl_step.py --config configs/smollm2-cpu.yaml

`bash examples/run_rl_step.sh` sets up an environment and runs this. `GrpoTrainer.train_step` is the
step: roll out, score, update through Megatron's own schedule, weights back, report. What is not the
step lies in rl/: tasks and the batch of padded answers (data.py), questions to train on and held
out (evaluate.py), rollout engines (rollout.py, vllm_engine.py), building a GPTModel and converting
its weights (weights.py), scores and the loss under top-p (scores.py), process groups (layout.py),
the optimizer (optim.py), checkpoints, tables and plots (report.py), and the checks before the first
step (checks.py).

Left out altogether: reward models, several engines, asynchronous rollouts, sequence packing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rl import checkpoint, checks
from rl.config import RunConfig, SetupError, read_command_line, validate_model
from rl.data import IGNORE, Batch, MicroBatch, group_advantages, make_batch, make_task
from rl.data import micro_batches as split
from rl.evaluate import Questions
from rl.layout import (
    Layout,
    from_last_stage,
    megatron_runtime,
    on_main,
    start_megatron,
    start_processes,
    stop_processes,
)
from rl.optim import make_optimizer
from rl.report import StepRecord, run_steps, sample_metrics, step_metrics, token_metrics
from rl.rollout import RolloutEngine, Sample
from rl.scores import Scores, filtered_loss, score, with_numbers
from rl.vllm_engine import VllmEngine
from rl.weights import Policy, WeightBridge, build_policy

from mcore_logprobs import LogprobConfig, PatchHandle, TokenStats, patch_model
from mcore_logprobs.losses import clip_fraction, truncated_importance_weights


class GrpoTrainer:
    """Everything that a run holds. Collective: built and called on every rank alike."""

    def __init__(self, config: RunConfig, layout: Layout, console: Console) -> None:
        self.config, self.layout, self.console = config, layout, console
        self.step = 0
        self.engine: RolloutEngine | VllmEngine | None = None  # on rank 0, as is the task
        llama, self.pad = on_main(self._start_engine)
        validate_model(config, llama)
        self.llama = llama
        self.bridge = WeightBridge(llama, layout)
        build = partial(build_policy, llama, self.bridge, self.engine, config)
        self.policy = build(trainable=True)
        self.loss = config.loss
        needs_reference = {"ref_logprobs", "teacher_logprobs"} & set(self.loss.tensors)
        self.reference = build(trainable=False) if needs_reference else None
        self.optimizer = make_optimizer(config, self.policy.model, layout.device)
        self.filtered = config.rollout.top_p < 1.0
        # The sampler's temperature, so that the ratio compares like with like; the true
        # vocabulary, so that padded columns are never counted.
        self.logprobs = replace(
            LogprobConfig.from_dict(config.logprobs),
            temperature=config.rollout.temperature,
            vocab_size=llama.vocab_size,
        )
        torch.manual_seed(config.seed + 100 * layout.rank)

    def _start_engine(self) -> tuple[Any, int]:
        config, vllm = self.config, self.config.rollout.engine == "vllm"
        self.task = make_task(config.task, seed=config.seed)
        self.questions = Questions(self.task, config)
        device = "cpu" if vllm else self.layout.device
        self.engine = RolloutEngine.load(config.model, seed=config.seed, device=device)
        if vllm:
            self.engine = VllmEngine(self.engine, config, config.run_dir / "vllm.log")
        return self.engine.model.config, self.engine.tokenizer.pad_token_id

    # ---- the step --------------------------------------------------------------------------------

    def train_step(self) -> tuple[StepRecord, list[Sample], list[str]]:
        config, started = self.config, time.perf_counter()
        samples, questions = on_main(self.roll_out)  # 1. answers, their log-probabilities, rewards
        rollout_seconds = time.perf_counter() - started
        group_advantages(samples, normalise_std=config.grpo.normalise_std)
        batch = self.batch(samples)

        old = self.score(self.policy, batch)  # 2. what the policy thinks of them, before any update
        batch.old_logprobs = old.under(config.rollout.kept_tokens)
        if self.reference:
            batch.ref_logprobs = self.score(self.reference, batch).stats.logprobs
        if config.rollout.importance_cap > 0:
            batch.weights = truncated_importance_weights(
                batch.old_logprobs, batch.rollout_logprobs, cap=config.rollout.importance_cap
            )
        # A token that the trainer's filter would never give has no ratio.
        outside = batch.mask & batch.old_logprobs.isinf()
        batch.labels = batch.labels.masked_fill(outside, IGNORE)
        measured = token_metrics(batch, old, outside, config)
        taught = batch.that_teaches(config.grpo, self.layout)

        updates = []
        for _ in range(config.grpo.updates):  # 3. clipped updates
            report = self.accumulate_gradients(taught)
            report["grad_norm"] = self.optimizer.step()
            updates.append(report)

        self.send_weights()  # 4. weights back to the engine
        self.step += 1
        record = StepRecord(
            step=self.step,
            **sample_metrics(samples),
            **measured,
            **step_metrics(updates, samples, taught, self.layout, started, rollout_seconds),
        )
        return record, samples, questions

    def roll_out(self) -> tuple[list[Sample], list[str]]:
        """On rank 0. The others wait in a broadcast, so that all cores are the engine's."""
        r = self.config.rollout
        first = self.step * r.prompts
        problems = [self.questions.training(first + i) for i in range(r.prompts)]
        seed = (self.config.seed * 1_000_003 + self.step) * r.prompts * r.group_size
        samples = self.questions.answer(self.engine, problems, r.group_size, seed)
        return samples, [p.question for p in problems]

    def batch(self, samples: list[Sample], *, all_tokens: bool = False) -> Batch:
        p = self.config.parallel
        multiple = 2 * p.cp * p.tp if p.sequence_parallel else 2 * p.cp
        device = self.layout.device
        return make_batch(
            samples, pad=self.pad, multiple=multiple, device=device, all_tokens=all_tokens
        )

    def score(self, policy: Policy, batch: Batch) -> Scores:
        return score(self, policy.model, batch)

    def send_weights(self) -> None:
        """Megatron's shards -> whole tensors on rank 0 -> the engine."""
        self.bridge.store(self.policy.gpt_model, self.engine)
        on_main(lambda: self.engine.sync())

    # ---- gradients -------------------------------------------------------------------------------

    def accumulate_gradients(self, batch: Batch, *, way: str | None = None) -> dict[str, float]:
        """One forward and backward over the batch; leaves the mean loss's gradient, summed over all
        ranks, in `main_grad`. Returns the mean loss and the clipped share of tokens.

        way: a key of `ways` below; None: what the configuration says.
        """
        if way is None:
            of_stats = "fused" if self.logprobs.fused else "logits"
            way = "linear" if self.config.grpo.policy_loss == "linear" else of_stats
            way = "filtered" if self.filtered else way
        ways: dict[str, Callable] = {
            "linear": self._loss_of_head,  # formed in the head; logits once, in chunks
            "fused": self._loss_of_stats,  # from TokenStats; logits twice, in chunks
            "logits": self._loss_of_stats,  # from TokenStats; logits held
            "filtered": self._loss_of_logits,  # under top-p; logits held
        }
        model, batch = self.policy.model, with_numbers(self, batch)
        model.zero_grad_buffer()
        # compact: prompts and padding cost no product.
        config = replace(self.logprobs, fused=way in ("linear", "fused"), compact=way == "linear")
        with patch_model(model, config) as handle:
            parts = self.run(
                model,
                batch,
                ways[way],
                forward_only=False,
                labels=way != "filtered",
                handle=handle if way == "linear" else None,
            )
        sums = sum(parts, torch.zeros(3, dtype=torch.float64, device=self.layout.device))
        dist.all_reduce(sums, group=self.layout.dp_cp_group)
        loss, clipped, tokens = from_last_stage(sums, self.layout).tolist()
        return {"loss": loss / tokens, "clip_fraction": clipped / tokens}

    def run(
        self,
        model: Any,
        batch: Batch,
        loss_func: Callable[..., Any],
        *,
        forward_only: bool,
        labels: bool = True,
        handle: PatchHandle | None = None,
    ) -> list[Any]:
        """Megatron's forward-backward over this rank's micro-batches: `loss_func(micro, output)`
        gives (sum, tokens, report); returns the reports, on the last pipeline stage. With the
        patch's handle the loss is formed in the head; without labels the output is logits."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(iterator: Any, model: Any) -> tuple[Any, Any]:
            micro = next(iterator)
            per_token = self._loss_inputs(micro.batch)
            with handle.policy_loss(self.loss, *per_token) if handle else nullcontext():
                output = model(
                    input_ids=micro.batch.tokens,
                    position_ids=micro.position_ids,
                    attention_mask=None,  # causal; padding stands to the right
                    labels=micro.batch.labels if labels else None,
                )
            return output, partial(loss_func, micro)

        size = self.config.grpo.micro_batch
        micros = list(split(batch, size=size, layout=self.layout))
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micros),
            model=[model],
            num_microbatches=len(micros),
            seq_length=batch.tokens.shape[1],
            micro_batch_size=size,
            forward_only=forward_only,
        )

    def _loss_inputs(self, b: Batch) -> tuple[torch.Tensor, ...]:
        return tuple(getattr(b, name) for name in self.loss.tensors)

    def _loss_of_stats(self, micro: MicroBatch, stats: TokenStats) -> Any:
        per_token = self.loss(stats.logprobs, stats.entropy, *self._loss_inputs(micro.batch))
        return self._report(micro, (per_token * micro.batch.mask).sum(), stats.logprobs)

    def _loss_of_head(self, micro: MicroBatch, stats: TokenStats) -> Any:
        return self._report(micro, stats.policy_loss, stats.logprobs)

    def _loss_of_logits(self, micro: MicroBatch, logits: torch.Tensor) -> Any:
        return self._report(micro, *filtered_loss(self, micro, logits))

    def _report(self, micro: MicroBatch, loss: torch.Tensor, logprobs: torch.Tensor) -> Any:
        """Megatron's three outputs: the sum, the tokens that it is over, and what to report."""
        b, g = micro.batch, self.config.grpo
        clip = {"clip_low": g.clip_low, "clip_high": g.clip_high}
        clipped = clip_fraction(logprobs, b.old_logprobs, b.advantages, **clip)
        tokens = b.tokens_counted
        report = torch.stack([loss.detach().double(), clipped.sum().double(), tokens.double()])
        return loss, tokens.int(), report

    def resume(self, path: Path) -> None:
        self.step = checkpoint.load(path, self)
        self.send_weights()
        self.say(f"resumed from {path} after step {self.step}")

    def say(self, text: str) -> None:
        if self.layout.is_main:
            self.console.print(text, highlight=False, markup=False)


def main() -> int:
    console = Console(width=None if sys.stdout.isatty() else 100)
    try:
        config, args = read_command_line(__doc__.splitlines()[0])
        start_processes(config)
        try:
            with megatron_runtime(config):
                trainer = GrpoTrainer(config, start_megatron(config), console)
                checks.self_check(trainer)
                if args.resume:
                    trainer.resume(args.resume)
                task = (args.compare and checks.compare) or (args.explain and checks.explain)
                (task or run_steps)(trainer)
        finally:
            stop_processes()
    except SetupError as error:
        rank = os.environ.get("RANK", "0")
        print(f"rank {rank}: error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
