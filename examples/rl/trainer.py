"""The GRPO step, and the loop around it."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import checkpoint, selfcheck
from .batch import Batch, group_advantages, make_batch
from .compare import compare
from .config import RunConfig, validate_model
from .layout import Layout, on_main
from .metrics import Reporter, StepRecord, peak_memory_gib, sample_metrics, token_metrics
from .model import WeightBridge, build_gpt_model
from .optim import global_grad_norm, make_optimizer
from .plot import plot_run
from .policy import Policy
from .rollout import RolloutEngine, Sample
from .tasks import Problem, make_task


class Trainer:
    """Everything that a run holds. Collective: built and called on every rank alike."""

    def __init__(self, config: RunConfig, layout: Layout, console: Console) -> None:
        self.config, self.layout, self.console = config, layout, console
        self.step = 0
        self.engine: RolloutEngine | None = None  # on rank 0
        self.task = on_main_only(layout, lambda: make_task(config.task, seed=config.seed))
        llama, self.pad = on_main(self._load_engine)
        validate_model(config, llama)

        def policy(*, trainable: bool) -> Policy:
            model = build_gpt_model(llama, config, layout)
            self.bridge.load(model, self.engine)
            return Policy(model, config, layout, vocab_size=llama.vocab_size, trainable=trainable)

        self.bridge = WeightBridge(llama, layout)
        self.policy = policy(trainable=True)
        self.reference = policy(trainable=False)
        self.optimizer = make_optimizer(
            config.optimizer,
            self.policy.model,
            device=layout.device,
            dtype=getattr(torch, config.model.dtype),
        )
        torch.manual_seed(config.seed + 100 * layout.rank)

    def _load_engine(self):
        device = self.layout.device
        self.engine = RolloutEngine.load(self.config.model, seed=self.config.seed, device=device)
        return self.engine.model.config, self.engine.tokenizer.pad_token_id

    # -- the step ---------------------------------------------------------------------------------

    def train_step(self) -> tuple[StepRecord, list[Sample], list[str]]:
        started = time.perf_counter()
        samples, questions = on_main(self._rollout)  # 1. answers and rewards
        rollout_seconds = time.perf_counter() - started

        group_advantages(samples, normalise_std=self.config.grpo.normalise_std)
        batch = self._batch(samples)
        old = self.policy.stats(batch)  # 2. what the policy thinks of them, before any update
        batch.old_logprobs = old.logprobs
        batch.ref_logprobs = self.reference.stats(batch).logprobs
        measured = token_metrics(batch, old)

        updates = []
        for _ in range(self.config.grpo.updates):  # 3. clipped updates
            report = self.policy.accumulate_gradients(batch)
            report["grad_norm"] = self.optimizer.step()
            updates.append(report)
        self.bridge.store(self.policy.gpt_model, self.engine)  # 4. weights back to the engine

        self.step += 1
        seconds = time.perf_counter() - started
        answer_tokens = sum(len(s.logprobs) for s in samples)
        record = StepRecord(
            step=self.step,
            **sample_metrics(samples),
            **measured,
            **{key: sum(u[key] for u in updates) / len(updates) for key in updates[0]},
            rollout_tokens_per_s=answer_tokens / rollout_seconds,
            # Every token of the batch, padding included, once for each update.
            train_tokens_per_s=batch.tokens.numel() * len(updates) / (seconds - rollout_seconds),
            peak_memory_gib=peak_memory_gib(self.layout),
            seconds=seconds,
        )
        return record, samples, questions

    def _rollout(self) -> tuple[list[Sample], list[str]]:
        """On rank 0. The others wait in a broadcast, so that all cores are this process's."""
        r = self.config.rollout
        problems = [self.task.problem(self.step * r.prompts + i) for i in range(r.prompts)]
        threads = torch.get_num_threads()
        torch.set_num_threads(max(threads, self._cores()))
        try:
            samples = self.engine.generate(
                [self._encode(p) for p in problems],
                group_size=r.group_size,
                max_new_tokens=r.max_new_tokens,
                temperature=r.temperature,
            )
        finally:
            torch.set_num_threads(threads)
        for sample in samples:
            sample.reward = self.task.score(problems[sample.group], sample.text)
        return samples, [p.question for p in problems]

    def _encode(self, problem: Problem) -> list[int]:
        return self.engine.tokenizer.encode_prompt(problem.question, self.task.shots)

    @staticmethod
    def _cores() -> int:
        import os

        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1

    def _batch(self, samples: list[Sample], *, all_tokens: bool = False) -> Batch:
        p = self.config.parallel
        return make_batch(
            samples,
            pad=self.pad,
            multiple=2 * p.cp * p.tp if p.sequence_parallel else 2 * p.cp,
            device=self.layout.device,
            all_tokens=all_tokens,
        )

    # -- around it --------------------------------------------------------------------------------

    def self_check(self) -> None:
        """Raises SetupError where the trainer's figures are not the rollout engine's."""
        count = self.config.rollout.prompts * self.config.rollout.group_size

        def texts() -> list[Sample]:
            # Questions far from those of the training steps; every token of theirs is scored.
            prompts = [self._encode(self.task.problem(900_000 + i)) for i in range(count)]
            return [Sample(tokens=p, prompt_length=len(p), logprobs=[], group=0) for p in prompts]

        batch = self._batch(on_main(texts), all_tokens=True)
        difference = selfcheck.check_against_rollout_engine(self.policy, self.engine, batch)
        bound = self.config.selfcheck.max_logprob_diff
        tokens = int(batch.mask.sum())
        self.say(
            f"self-check, {tokens} tokens: Megatron against transformers, "
            f"largest log-probability difference {difference:.2e} (bound {bound:.0e})"
        )
        selfcheck.require_close(difference, bound)
        apart = selfcheck.check_against_single_process(self.policy, batch)
        self.say(
            f"self-check, TP {self.layout.tp} against one process: log-probability "
            f"{apart['logprobs']:.1e}, entropy {apart['entropy']:.1e}, "
            f"target rank {apart['target_rank']:.0f}"
        )
        selfcheck.require_close(apart["logprobs"], bound)

    def compare(self) -> list[dict]:
        """Loss, gradient norm and memory of one update with and without fusion; no step."""
        samples, _ = on_main(self._rollout)
        group_advantages(samples, normalise_std=self.config.grpo.normalise_std)
        batch = self._batch(samples)
        batch.old_logprobs = batch.ref_logprobs = self.policy.stats(batch).logprobs
        params = [p for p in self.policy.model.parameters() if p.requires_grad]
        return compare(self.policy, batch, lambda: global_grad_norm(params), self.console)

    def save(self, path: Path) -> None:
        checkpoint.save(
            path,
            step=self.step,
            policy=self.policy,
            optimizer=self.optimizer,
            config=self.config,
            layout=self.layout,
        )

    def resume(self, path: Path) -> None:
        self.step = checkpoint.load(
            path,
            policy=self.policy,
            optimizer=self.optimizer,
            config=self.config,
            layout=self.layout,
        )
        self.bridge.store(self.policy.gpt_model, self.engine)
        self.say(f"resumed from {path} after step {self.step}")

    def run(self) -> list[StepRecord]:
        """Steps up to `config.steps`, with table, JSON lines, checkpoints and the plot."""
        config = self.config
        out = config.run_dir
        reporter = Reporter(out, self.layout, self.console, resume_step=self.step)
        columns = (TextColumn("GRPO"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, disable=not self.layout.is_main) as bar:
            shown = bar.add_task("steps", total=config.steps, completed=self.step)
            while self.step < config.steps:
                record, samples, questions = self.train_step()
                reporter.add(record, samples, questions)
                bar.update(shown, completed=self.step)
                if config.save_every and self.step % config.save_every == 0:
                    self.save(out / "checkpoints" / f"step_{self.step}")
        if self.layout.is_main and reporter.records:
            p = config.parallel
            plot_run(
                reporter.records,
                out / "run.png",
                title=f"{config.name}: {config.task.name}, TP {p.tp} x CP {p.cp} x PP {p.pp}",
            )
            self.say(f"wrote {out / 'metrics.jsonl'} and {out / 'run.png'}")
        dist.barrier()
        return reporter.records

    def say(self, text: str) -> None:
        if self.layout.is_main:
            self.console.print(text, highlight=False, markup=False)


def on_main_only(layout: Layout, make):
    """An object that only rank 0 needs; an error while making it is raised on every rank."""
    box = {}

    def run() -> None:
        box["made"] = make()

    on_main(run)
    return box.get("made")
