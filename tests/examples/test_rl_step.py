"""The GRPO step itself, on real Megatron models: learning, layouts, resume, mistakes."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import rl_step
import torch
import yaml
from rl import checkpoint, checks, optim
from rl.config import OF_THE_SAMPLER, RunConfig, SetupError, load_config
from rl.data import Batch, group_advantages
from rl.layout import on_main
from rl.optim import global_grad_norm
from rl.report import run_steps
from rl.rollout import Sample

from mcore_logprobs.cpu_megatron.training import cpu_devices
from mcore_logprobs.losses import OBJECTIVES
from tests.examples.common import TINY, Ranks, trainer_of
from tests.helpers.distributed import RankError, get_pool


def _learn(out: str, sections: dict, given: dict) -> list[float]:
    with trainer_of(sections=sections, output_dir=out, **given) as trainer:
        checks.self_check(trainer)
        return [record.reward for record in run_steps(trainer)]


# A prompt of one letter, repeated twice, is learnt in a quarter of the steps.
SHORT = {
    "task": {"options": {"letters": 8, "prompt_length": 1, "answer_length": 2}},
    "rollout": {"max_new_tokens": 2},
    "grpo": {"micro_batch": 64, "updates": 3},
    "optimizer": {"lr": 0.02},
}


@pytest.mark.parametrize(
    ("sections", "given", "end"),
    [
        pytest.param(SHORT, {"tp": 1, "cp": 1, "steps": 7}, 0.8, id="one rank"),
        pytest.param({}, {"steps": 30}, 0.6, id="tp2-cp2-sp", marks=pytest.mark.night),
    ],
)
def test_the_tiny_model_learns(
    ranks: Ranks, tmp_path: Path, sections: dict, given: dict, end: float
) -> None:
    """Chance is 1/8; a policy that gives one letter always stays there too, so that the bound is
    out of reach without the right gradient."""
    world = given.get("tp", 2) * given.get("cp", 2)
    rewards = ranks(world).run(_learn, str(tmp_path), sections, given, timeout=280)[0]
    few = len(rewards) // 7
    assert sum(rewards[:few]) / few < 0.2, rewards
    assert sum(rewards[-few:]) / few > end, rewards
    lines = (tmp_path / "tiny-cpu" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == given["steps"]
    assert (tmp_path / "tiny-cpu" / "run.png").read_bytes().startswith(b"\x89PNG")


def _one_update(layout: dict[str, int], sequence_parallel: bool) -> dict[str, Any]:
    """One rollout's figures and gradients, with held logits and with a chunk at a time."""
    # Two layers for the pipeline's two stages; tied, so that both hold the embedding.
    llama = {**load_config(TINY).model.random, "num_hidden_layers": 2, "tie_word_embeddings": True}
    sections = {
        "parallel": {"sequence_parallel": sequence_parallel},
        "rollout": {"prompts": 4, "group_size": 4},
        "grpo": {"micro_batch": 4, "kl_coef": 0.1},
        "model": {"random": llama},
    }
    with trainer_of(sections=sections, **layout) as trainer:
        checks.self_check(trainer)
        torch.manual_seed(5)  # the sampler's, on rank 0
        samples, _ = on_main(trainer.roll_out)
        group_advantages(samples, normalise_std=True)
        batch = trainer.batch(samples)
        stats = trainer.score(trainer.policy, batch)
        # Old and reference figures that differ from the policy's, so that no term vanishes.
        batch.old_logprobs = torch.where(batch.mask, stats.logprobs + 0.1, 0.0)
        batch.ref_logprobs = torch.where(batch.mask, stats.logprobs - 0.3, 0.0)
        params = list(trainer.policy.model.parameters())
        found: dict[str, Any] = {"tokens": batch.tokens, "stats": stats}
        for fused in (False, "require"):
            trainer.logprobs = dataclasses.replace(trainer.logprobs, fused=fused)
            report = trainer.accumulate_gradients(batch)
            found[fused] = (report["loss"], report["clip_fraction"], global_grad_norm(params))
        return found


@pytest.mark.parametrize(
    ("world", "layout", "sequence_parallel"),
    [
        (2, {"tp": 1, "cp": 2, "pp": 1}, False),
        (2, {"tp": 1, "cp": 1, "pp": 1}, False),  # data parallel 2
        (4, {"tp": 2, "cp": 2, "pp": 1}, True),
        (4, {"tp": 2, "cp": 1, "pp": 2}, False),
    ],
    ids=["cp2", "dp2", "tp2-cp2-sp", "tp2-pp2"],
)
def test_layouts_and_ways_agree(
    ranks: Ranks, world: int, layout: dict[str, int], sequence_parallel: bool, one_rank: dict
) -> None:
    """Loss, clip fraction and gradient norm depend neither on the layout nor on fusion."""
    found = ranks(world).run(_one_update, layout, sequence_parallel, timeout=280)
    for rank in found:
        width = one_rank["tokens"].shape[1]
        assert rank["tokens"][:, :width].tolist() == one_rank["tokens"].tolist()
        for name in ("logprobs", "entropy", "target_rank"):
            torch.testing.assert_close(
                getattr(rank["stats"], name)[:, :width],
                getattr(one_rank["stats"], name),
                rtol=1e-5,
                atol=2e-6,
            )
        for fused in (False, "require"):
            assert rank[fused] == pytest.approx(one_rank[False], rel=2e-5), fused


@pytest.fixture(scope="module")
def one_rank() -> dict:
    (found,) = get_pool(1).run(_one_update, {"tp": 1, "cp": 1, "pp": 1}, False, timeout=280)
    assert found["require"] == pytest.approx(found[False], rel=1e-5)
    assert found[False][2] > 0.01
    return found


def _three_steps(file: str, tp: int, cp: int) -> list[dict[str, float]]:
    with trainer_of(Path(file), tp=tp, cp=cp) as trainer:
        return [dataclasses.asdict(trainer.train_step()[0]) for _ in range(3)]


@pytest.mark.night
@pytest.mark.parametrize("name", OBJECTIVES)
def test_any_objective_by_name_from_yaml(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """Three steps with each, formed in the head; two-pass objectives under TP and CP."""
    values = yaml.safe_load(TINY.read_text())
    cap = 0.0 if name in OF_THE_SAMPLER else 2.0
    values["rollout"] |= {"prompts": 4, "group_size": 4, "importance_cap": cap}
    values["grpo"] = {"objective": name, "micro_batch": 8, "kl_coef": 0.01}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    layout = (2, 2) if OBJECTIVES[name]().passes == 2 else (1, 1)
    records = ranks(layout[0] * layout[1]).run(
        _three_steps, str(tmp_path / "run.yaml"), *layout, timeout=280
    )[0]
    assert all(math.isfinite(record["loss"]) for record in records)
    assert all(math.isfinite(record["grad_norm"]) for record in records)
    # The distillation's teacher is the model at the start: there is nothing to learn from it.
    assert (records[-1]["grad_norm"] > 0) == (name != "DistillationLoss")


def _entropy_term(coef: float) -> dict[str, float]:
    sections = {
        "rollout": {"prompts": 4, "group_size": 4},
        "grpo": {"micro_batch": 16, "updates": 1, "settings": {"entropy_coef": coef}},
    }
    with trainer_of(sections=sections, tp=1, cp=1) as trainer:
        return dataclasses.asdict(trainer.train_step()[0])


def test_an_objective_with_entropy(ranks: Ranks) -> None:
    """One update on policy: the loss is lower by 0.1 of the mean entropy that is reported."""
    without, with_term = (ranks(1).run(_entropy_term, c, timeout=280)[0] for c in (0.0, 0.1))
    expected = without["loss"] - 0.1 * without["entropy"]
    assert with_term["loss"] == pytest.approx(expected, abs=1e-5)


def _ratio_to_the_engine(shift: float) -> float:
    """The gradient's norm where the engine's log-probabilities are off by this."""
    grpo = {"objective": "IPOLoss", "settings": {"threshold": 1.0, "kl_coef": 0.0}, "updates": 1}
    sections = {"rollout": {"prompts": 4, "group_size": 4}, "grpo": {"micro_batch": 16, **grpo}}
    with trainer_of(sections=sections, tp=1, cp=1) as trainer:
        samples, questions = trainer.roll_out()
        for sample in samples:
            sample.logprobs = [logprob + shift for logprob in sample.logprobs]
        trainer.roll_out = lambda: (samples, questions)
        return trainer.train_step()[0].grad_norm


def test_an_objective_around_the_policy_that_sampled(ranks: Ranks) -> None:
    """Its ratio is to the engine's probabilities, not to the trainer's own of the same weights."""
    equal, half = (ranks(1).run(_ratio_to_the_engine, x, timeout=280)[0] for x in (0.0, -0.6931472))
    assert half == pytest.approx(2.0 * equal, rel=1e-4)


SHIFTS = (0.5, -0.3, -1.5)  # ratios of 0.61, 1.35 and 4.48, which the cap of 2 truncates


def _importance_weights() -> tuple[Batch, float, float]:
    """One update's batch, its loss and the mean weight that is reported, where the engine's
    log-probabilities are off by SHIFTS, one after another."""
    sections = {
        "rollout": {"prompts": 4, "group_size": 4, "importance_cap": 2.0},
        "grpo": {"micro_batch": 4, "updates": 1},
    }
    with trainer_of(sections=sections, tp=1, cp=1) as trainer:
        samples, questions = trainer.roll_out()
        for i, sample in enumerate(samples):
            shifts = (SHIFTS[(i + j) % 3] for j in range(len(sample.logprobs)))
            sample.logprobs = [x + shift for x, shift in zip(sample.logprobs, shifts, strict=True)]
            sample.reward = float(i % 3 == 0)
        trainer.roll_out = lambda: (samples, questions)
        used = []
        accumulate = trainer.accumulate_gradients
        trainer.accumulate_gradients = lambda batch: used.append(batch) or accumulate(batch)
        record = trainer.train_step()[0]
        return used[0], record.loss, record.importance_weight


def test_a_step_s_loss_has_truncated_importance_weights(ranks: Ranks) -> None:
    batch, loss, reported = ranks(1).run(_importance_weights, timeout=280)[0]
    weighted = []
    for i in range(16):
        row = batch.mask[i]
        weights = [min(math.exp(-SHIFTS[(i + j) % 3]), 2.0) for j in range(int(row.sum()))]
        assert batch.weights[i, row].tolist() == pytest.approx(weights, rel=1e-4)
        weighted += zip(weights, batch.advantages[i, row].tolist(), strict=True)
    assert reported == pytest.approx(sum(w for w, _ in weighted) / len(weighted), rel=1e-4)
    # Before the update the policy's own ratio is 1: a token's loss is minus weight x advantage.
    by_hand = -sum(w * advantage for w, advantage in weighted) / len(weighted)
    unweighted = -sum(advantage for _, advantage in weighted) / len(weighted)
    assert abs(by_hand - unweighted) > 0.01
    assert loss == pytest.approx(by_hand, rel=1e-3)


def _resume(out: str) -> list[tuple[Any, Any]]:
    """(what 2 steps give, what 1 and 1 resumed step give), for each thing that must be equal."""
    small = {"rollout": {"prompts": 4, "group_size": 4}, "grpo": {"micro_batch": 16}}
    untimed = ("seconds", "rollout_tokens_per_s", "train_tokens_per_s", "peak_memory_gib")

    def results(trainer: Any) -> tuple[list, dict, dict]:
        records = [dataclasses.asdict(r) for r in run_steps(trainer)]
        kept = [{k: v for k, v in r.items() if k not in untimed} for r in records]
        weights = {k: v.clone() for k, v in trainer.policy.gpt_model.named_parameters()}
        return kept, weights, trainer.optimizer.state_dict()["state"]

    given = {"tp": 2, "cp": 1, "steps": 2}
    with trainer_of(sections=small, output_dir=out + "/whole", save_every=1, **given) as trainer:
        straight = results(trainer)
    torch.manual_seed(99)  # what the checkpoint must put right
    with trainer_of(sections=small, output_dir=out + "/resumed", **given) as trainer:
        trainer.resume(Path(out) / "whole" / "tiny-cpu" / "checkpoints" / "step_1")
        assert trainer.step == 1
        resumed = results(trainer)
    pairs = [(straight[0][1:], resumed[0])]
    pairs += [(value, resumed[1][name]) for name, value in straight[1].items()]
    for key, state in straight[2].items():
        pairs += [(state[name], resumed[2][key][name]) for name in ("exp_avg", "exp_avg_sq")]
    return pairs


def test_resume_is_bit_exact(ranks: Ranks, tmp_path: Path) -> None:
    for rank, pairs in enumerate(ranks(2).run(_resume, str(tmp_path), timeout=280)):
        records, *tensors = pairs
        if rank == 0:  # the reporter
            assert len(records[0]) == 1
        assert records[0] == records[1]
        assert len(tensors) > 20
        assert all(torch.equal(a, b) for a, b in tensors)


def _updates(out: str, device: str) -> list[tuple[float, float]]:
    """The loss and the gradient's norm of two steps of two updates each."""
    small = {"rollout": {"prompts": 4, "group_size": 4}, "grpo": {"micro_batch": 4}}
    small["parallel"] = {"sequence_parallel": False}

    def make_optimizer(config: RunConfig, model: Any, of_run: torch.device) -> Any:
        return optim.make_optimizer(config, model, torch.device(device))

    given: dict[str, Any] = {"output_dir": f"{out}/{device}", "tp": 1, "cp": 1, "steps": 2}
    with (
        cpu_devices(),
        mock.patch.object(rl_step, "make_optimizer", make_optimizer),
        trainer_of(sections=small, **given) as trainer,
    ):
        return [(record.loss, record.grad_norm) for record in run_steps(trainer)]


@pytest.mark.night
def test_the_optimizer_of_a_gpu_takes_the_same_steps(ranks: Ranks, tmp_path: Path) -> None:
    """Several updates, of several micro-batches: none finds what the one before left."""
    on_cpu, on_gpu = (
        ranks(1).run(_updates, str(tmp_path), device, timeout=280)[0] for device in ("cpu", "cuda")
    )
    assert len(on_gpu) == 2
    assert torch.allclose(torch.tensor(on_gpu), torch.tensor(on_cpu), rtol=1e-4, atol=1e-6)


def _save(out: str) -> None:
    with trainer_of(tp=2, cp=1) as trainer:
        checkpoint.save(Path(out), trainer)


class _Runs:
    """Makes a directory where it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


def _build(case: tuple[dict, dict, Path | None]) -> None:
    sections, given, saved = case
    with trainer_of(sections=sections, **{"tp": 2, "cp": 1, **given}) as trainer:
        if saved is not None:
            trainer.resume(saved)


def test_mistakes_are_told_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    """Found on rank 0 alone, raised everywhere."""
    saved, broken = tmp_path / "saved", tmp_path / "broken"
    ranks(2).run(_save, str(saved), timeout=280)
    shutil.copytree(saved, broken)
    (broken / "rank_1.pt").unlink()
    foreign, traces = tmp_path / "foreign", tmp_path / "its_code_ran"
    shutil.copytree(saved, foreign)
    torch.save({"model": _Runs(str(traces))}, foreign / "rank_1.pt")
    unread = [tmp_path / name for name in ("half", "older")]
    for folder, text in zip(unread, ("{", '{"step": 1, "world": 2, "config": {}}'), strict=True):
        shutil.copytree(saved, folder)
        (folder / "run.json").write_text(text)
    mistakes: dict[str, tuple[dict, dict, Path | None]] = {
        "'no_such_model' is not installed": (
            {"model": {"source": "pypi:no_such_model"}},
            {},
            None,
        ),
        "/nowhere does not exist": ({"model": {"source": "/nowhere"}}, {}, None),
        "no_such_task": ({"task": {"name": "no_such_task"}}, {}, None),
        "the model's layers (1) do not divide by PP 2": ({}, {"tp": 1, "pp": 2}, None),
        "was saved with parallel": ({}, {"tp": 1, "cp": 2}, saved),
        "was saved with optimizer": ({"optimizer": {"lr": 0.5}}, {}, saved),
        "is no checkpoint": ({}, {}, tmp_path / "none"),
        "rank_1.pt is missing": ({}, {}, broken),
        "half/run.json is refused: expected what this version": ({}, {}, unread[0]),
        "older/run.json is refused: expected what this version": ({}, {}, unread[1]),
        "rank_1.pt is refused: expected tensors and plain data": ({}, {}, foreign),
    }
    found = ranks(2).run_many(_build, mistakes.values(), timeout=280)
    for message, errors in zip(mistakes, found, strict=True):
        assert isinstance(errors, RankError), message
        assert [message in str(error) for error in errors.errors] == [True, True], errors
    assert not traces.exists()


def _none_left() -> None:
    with trainer_of(sections=SHORT, tp=1, cp=1) as trainer:
        made = trainer.batch

        def batch(samples: list[Sample]) -> Any:
            found = made(samples)
            return dataclasses.replace(found, labels=torch.full_like(found.labels, -100))

        trainer.batch = batch
        with pytest.raises(SetupError, match="step 1: none of the 0 sampled tokens is left"):
            trainer.train_step()


def test_a_step_without_tokens_says_so(ranks: Ranks) -> None:
    ranks(1).run(_none_left)


def _engine_s_calls(out: str) -> list[str]:
    """Of two steps with an evaluation after each."""
    task = {**SHORT["task"], "eval_questions": 2, "eval_every": 1}
    given = {"output_dir": out, "tp": 1, "cp": 1, "steps": 2}
    calls: list[str] = []
    with trainer_of(sections=SHORT | {"task": task}, **given) as trainer:
        for name in ("generate", "sleep", "sync"):

            def traced(*args: Any, name: str = name, **kwargs: Any) -> Any:
                calls.append(name)
                return getattr(type(trainer.engine), name)(trainer.engine, *args, **kwargs)

            setattr(trainer.engine, name, traced)
        run_steps(trainer)
    return calls


def test_an_engine_that_sleeps_gets_weights_before_it_answers(ranks: Ranks, tmp_path: Path) -> None:
    step = ["generate", "sleep", "sync", "generate"]  # the last one evaluates
    assert ranks(1).run(_engine_s_calls, str(tmp_path))[0] == ["generate", *step, *step]
