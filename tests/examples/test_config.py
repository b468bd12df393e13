"""The example's configuration: the files in configs/ hold, and mistakes are told."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import pytest
from rl.config import RunConfig, SetupError, from_dict, load_config, override, validate

from mcore_logprobs import LogprobConfig, add_logprob_args

ROOT = Path(__file__).parents[2]
RANKS = {"smollm2-cpu": 3, "tiny-cpu": 4, "llama3-8b-gpu": 8}


def test_every_file_is_known() -> None:
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == set(RANKS)


@pytest.mark.parametrize("name", RANKS)
def test_files_hold(name: str) -> None:
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    validate(config, RANKS[name])
    validate(config, 2 * RANKS[name])  # with data parallelism
    LogprobConfig.from_dict(config.logprobs)
    assert config.name == name


def test_megatron_lm_flags() -> None:
    file = ROOT / "configs" / "megatron_lm_flags.sh"
    script = f'source {file} && printf "%s\\n" "${{LOGPROB_ARGS[@]}}"'
    flags = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    args = add_logprob_args(argparse.ArgumentParser()).parse_args(flags.stdout.split("\n")[:-1])
    config = LogprobConfig.from_args(args)
    # No vocabulary size among the flags: it comes from Megatron-LM's tokenizer.
    assert (config.output, config.fused, config.vocab_size) == ("loss", True, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stepz": 3}, "unknown key stepz"),
        ({"grpo": {"kl": 0.1}}, "grpo: unknown key kl"),
        ({"steps": "three"}, "steps: expected int, got 'three'"),
        ({"parallel": {"tp": True}}, "tp: expected int, got True"),
        ({"rollout": 3}, "rollout: expected a mapping, got 3"),
        ({"name": 7}, "name: expected str, got 7"),
    ],
)
def test_bad_values(values: dict, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        from_dict(RunConfig, values, where="a.yaml")


@pytest.mark.parametrize(
    ("values", "world", "message"),
    [
        ({"parallel": {"tp": 2, "cp": 2}}, 6, "needs a multiple of 4 processes, got 6"),
        ({"grpo": {"objective": "Clipped"}}, 1, "grpo.objective: expected one of .*got Clipped"),
        (
            {"grpo": {"objective": "DPPOLoss", "settings": {"cap": 0.0}}},
            1,
            "grpo.settings of DPPOLoss: cap: expected .*got 0.0",
        ),
        (
            {"grpo": {"objective": "DPPOLoss", "settings": {"clip_low": 0.1}}},
            1,
            "grpo.settings of DPPOLoss: .*unexpected keyword argument 'clip_low'",
        ),
        ({"parallel": {"tp": 0}}, 1, "parallel.tp: expected >= 1, got 0"),
        ({"grpo": {"micro_batch": 5}}, 1, "16 samples do not divide"),
        ({"rollout": {"group_size": 1}}, 1, "group_size: expected >= 2"),
        ({"rollout": {"temperature": 0.0}}, 1, "temperature: expected > 0"),
        ({"device": "tpu"}, 1, "device: expected one of cpu, cuda, got tpu"),
        ({"optimizer": {"lr": -1.0}}, 1, "optimizer.lr: expected > 0, got -1.0"),
        ({"optimizer": {"beta2": 1.0}}, 1, r"optimizer.beta2: expected in \[0, 1\), got 1.0"),
        ({"task": {"eval_questions": 1}}, 1, "task.eval_questions: expected 0, or >= 2, got 1"),
        ({"rollout": {"engine": "sglang"}}, 1, "engine: expected one of auto, vllm, transformers"),
        ({"rollout": {"top_p": 0.0}}, 1, "rollout.top_p: expected in"),
        ({"rollout": {"kept_tokens": "both"}}, 1, "kept_tokens: expected one of trainer, engine"),
        ({"rollout": {"timeout": 0.0}}, 1, "rollout.timeout: expected > 0"),
        (
            {"rollout": {"top_p": 0.9}, "grpo": {"kl_coef": 0.1}},
            1,
            "^rollout.kept_tokens: expected engine with top_p < 1 and a reference model",
        ),
        ({"logprobs": {"temperature": 2.0}}, 1, "logprobs.temperature"),
        ({"logprobs": {"fuzed": True}}, 1, "unknown key 'fuzed'"),
    ],
)
def test_bad_combinations(values: dict, world: int, message: str) -> None:
    config = from_dict(RunConfig, values, where="a.yaml")
    with pytest.raises(SetupError, match=message):
        validate(config, world)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1")
    with pytest.raises(SetupError, match="not valid YAML"):
        load_config(tmp_path / "broken.yaml")


def test_command_line_wins() -> None:
    config = load_config(ROOT / "configs" / "tiny-cpu.yaml")
    changed = override(config, tp=1, cp=None, pp=2, steps=7, seed=0)
    assert (changed.parallel.tp, changed.parallel.cp, changed.parallel.pp) == (1, 2, 2)
    assert (changed.steps, changed.seed) == (7, 0)
    assert changed.parallel.sequence_parallel == config.parallel.sequence_parallel
