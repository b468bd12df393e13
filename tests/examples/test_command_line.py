"""The example's configurations hold; a mistake is told once, before any process starts."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import rl_step
from rl.config import (
    ModelSection,
    RunConfig,
    SetupError,
    from_dict,
    llama_config,
    load_config,
    override,
    validate,
    validate_model,
)

from mcore_logprobs import LogprobConfig, add_logprob_args
from tests.helpers.documents import ROOT

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
        ({True: 3, 1.5: 2, "foo": 3}, "unknown key 1.5, True, foo; known: name, "),
        ({"grpo": {1: 2}}, "grpo: unknown key 1; known: "),
        ({"grpo": {"kl": 0.1}}, "grpo: unknown key kl"),
        ({"steps": "three"}, "steps: expected int, got 'three'"),
        ({"parallel": {"tp": True}}, "tp: expected int, got True"),
        ({"rollout": 3}, "rollout: expected a mapping, got 3"),
        ({"name": 7}, "name: expected str, got 7"),
        ({"model": {"random": None}}, "random: expected a mapping, got None"),
        ({"logprobs": None}, "logprobs: expected a mapping, got None"),
        ({"optimizer": {"lr": "1e-5"}}, "lr: expected float, got '1e-5' .*write 1.0e-5"),
        ({"rollout": {"temperature": float("inf")}}, "temperature: expected a finite number"),
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
        (
            {"grpo": {"objective": "DPPOLoss"}, "rollout": {"importance_cap": 2.0}},
            1,
            "rollout.importance_cap: expected 0 with DPPOLoss, .*got 2.0",
        ),
        ({"parallel": {"tp": 0}}, 1, "parallel.tp: expected >= 1, got 0"),
        ({"seed": 2**70}, 1, "seed: expected between"),
        ({"grpo": {"objective": "GSPOLoss", "clip_low": 1.5}}, 1, "grpo.clip_low: expected in"),
        (
            {"grpo": {"objective": "GSPOLoss", "clip_high": -0.5}},
            1,
            "grpo.clip_high: expected >= 0",
        ),
        *(
            (
                {"grpo": {"objective": name, "settings": {"weighted": True}}},
                1,
                f"grpo.settings of {name}: expected rollout.importance_cap",
            )
            for name in ("ClippedLoss", "ClipCovLoss", "SFTLoss")
        ),
        ({"task": {"examples": 3}}, 1, "task echo: expected no examples and no system"),
        ({"task": {"system": "hello"}}, 1, "task echo: expected .*, got 0 and 'hello'"),
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
            "^rollout.kept_tokens: expected engine with top_p < 1 or min_p > 0 and a reference",
        ),
        ({"rollout": {"min_p": 1.5}}, 1, "rollout.min_p: expected in"),
        ({"rollout": {"gpu_memory": 3.0}}, 1, "rollout.gpu_memory: expected in"),
        ({"rollout": {"max_model_len": -5}}, 1, "rollout.max_model_len: expected >= 1"),
        (
            {"rollout": {"top_p": 0.9, "min_p": 0.1}},
            1,
            "^rollout.kept_tokens: expected engine with both top_p < 1 and min_p > 0",
        ),
        ({"logprobs": {"temperature": 2.0}}, 1, "logprobs.temperature"),
        ({"logprobs": {"fuzed": True}}, 1, "unknown key 'fuzed'"),
        ({"rollout": {"temperature": 1e-40}}, 1, "logprobs: .*temperature: expected a finite"),
        (
            {"rollout": {"top_p": 0.9}, "logprobs": {"invariant_segments": 2}},
            1,
            "logprobs: .*invariant_segments: expected None with top_k, top_p or min_p",
        ),
    ],
)
def test_bad_combinations(values: dict, world: int, message: str) -> None:
    config = from_dict(RunConfig, values, where="a.yaml")
    with pytest.raises(SetupError, match=message):
        validate(config, world)


def test_sizes_of_a_random_model() -> None:
    with pytest.raises(SetupError, match=r"model\.random: unknown key hiden_size"):
        llama_config(ModelSection(random={"hiden_size": 5}))
    with pytest.raises(SetupError, match=r"model\.random: unknown key 1"):
        llama_config(ModelSection(random={1: 2}))
    with pytest.raises(SetupError, match=r"model\.random: "):
        llama_config(ModelSection(random={"hidden_size": 12, "num_attention_heads": 5}))


def test_segments_divide_the_padded_vocabulary() -> None:
    llama = llama_config(ModelSection(random={"vocab_size": 11, "num_hidden_layers": 2}))
    for segments, tp in ((8, 1), (11, 2)):
        values = {"logprobs": {"invariant_segments": segments}, "parallel": {"tp": tp, "cp": 1}}
        config = from_dict(RunConfig, values, where="a.yaml")
        with pytest.raises(SetupError, match="expected a divisor of the padded vocabulary"):
            validate_model(config, llama)
    values = {"logprobs": {"invariant_segments": 6}, "parallel": {"tp": 2, "cp": 1}}
    validate_model(from_dict(RunConfig, values, where="a.yaml"), llama)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1")
    with pytest.raises(SetupError, match="not valid YAML"):
        load_config(tmp_path / "broken.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(SetupError, match="not valid YAML"):
        load_config(tmp_path / "latin.yaml")
    (tmp_path / "twice.yaml").write_text("steps: 1\nsteps: 2\n")
    with pytest.raises(SetupError, match="each key once, got 'steps' again"):
        load_config(tmp_path / "twice.yaml")


def test_command_line_wins() -> None:
    config = load_config(ROOT / "configs" / "tiny-cpu.yaml")
    changed = override(config, tp=1, cp=None, pp=2, steps=7, seed=0)
    assert (changed.parallel.tp, changed.parallel.cp, changed.parallel.pp) == (1, 2, 2)
    assert (changed.steps, changed.seed) == (7, 0)
    assert changed.parallel.sequence_parallel == config.parallel.sequence_parallel


# ---- the command line ----------------------------------------------------------------------------


def test_help_needs_no_environment() -> None:
    done = subprocess.run(
        ["bash", "examples/run_rl_step.sh", "--help"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHON": "/none"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    flags = set(re.findall(r"--[a-z][a-z-]+", done.stdout.replace("--cp N --pp N", "--cp --pp")))
    parser = (ROOT / "examples/rl/config.py").read_text()
    assert flags == set(re.findall(r'add\("(--[a-z-]+)"', parser))
    for config in ROOT.glob("configs/*.yaml"):
        assert re.search(rf"configs/{config.name}: \S+", done.stdout)


def _main(monkeypatch: pytest.MonkeyPatch, arguments: list[str], **environment: str) -> int:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["rl_step.py", *arguments])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return rl_step.main()


@pytest.mark.parametrize(
    ("given", "environment", "message"),
    [
        ("smollm2-cpu.yaml --steps 0 --print-processes", {}, "steps: expected >= 1, got 0"),
        (
            "smollm2-cpu.yaml --print-processes",
            {"NPROC": "4"},
            "needs a multiple of 3 processes, got 4",
        ),
        ("missing.yaml --print-processes", {}, "config file configs/missing.yaml does not exist"),
        ("tiny-cpu.yaml --tp 3 --print-processes", {}, "attention heads (4) do not divide by TP 3"),
        (
            "tiny-cpu.yaml --tp 3",
            {"WORLD_SIZE": "4"},
            "TP 3 x CP 2 x PP 1 needs a multiple of 6 processes, got 4",
        ),
    ],
)
def test_mistakes_are_told_once_before_any_process_starts(
    given: str, environment: dict, message: str, monkeypatch, capsys
) -> None:
    assert _main(monkeypatch, f"--config configs/{given}".split(), **environment) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("error: ") == printed.err.count(message) == 1
    assert len(printed.err.splitlines()) < 4


def test_print_processes(monkeypatch, capsys) -> None:
    """What run_rl_step.sh reads before it starts torchrun."""
    with pytest.raises(SystemExit) as stopped:
        _main(monkeypatch, ["--config", "configs/tiny-cpu.yaml", "--print-processes"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == "4 auto cpu\n"
    config = load_config(ROOT / "configs" / "tiny-cpu.yaml")
    rollout = dataclasses.replace(config.rollout, python="/opt/vllm/bin/python")
    elsewhere = dataclasses.replace(config, rollout=rollout)
    monkeypatch.setattr("rl.config.load_config", lambda path: elsewhere)
    with pytest.raises(SystemExit):
        _main(monkeypatch, ["--config", "configs/tiny-cpu.yaml", "--print-processes"])
    assert capsys.readouterr().out == "4 elsewhere cpu\n"  # nothing is added to this environment


def test_a_checkout_in_a_path_with_spaces_is_refused_before_anything_is_made(tmp_path) -> None:
    """torch's compiler fails there, minutes later and at length."""
    scripts = tmp_path / "my checkout" / "examples"
    scripts.mkdir(parents=True)
    for name in ("run_rl_step.sh", "setup_env.sh"):
        shutil.copy(ROOT / "examples" / name, scripts)
    # `cd` prints where it goes under CDPATH.
    environment = {**os.environ, "CDPATH": str(scripts.parent)}
    command = ["bash", "examples/run_rl_step.sh"]
    done = subprocess.run(
        command, cwd=scripts.parent, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"expected a path without spaces, got {scripts.parent}:" in done.stderr
    assert [path.name for path in scripts.parent.iterdir()] == ["examples"]


STARTED = ["--config", "configs/tiny-cpu.yaml", "--steps", "0"]


def test_one_rank_tells_a_mistake(monkeypatch, capsys) -> None:
    """The ranks of torchrun find it alike; all but the first wait for torchrun to end them."""
    waited: list[float] = []
    monkeypatch.setattr(rl_step, "time", SimpleNamespace(sleep=waited.append))
    for rank, expected in ("0", "error: steps: expected >= 1, got 0\n"), ("1", ""):
        assert _main(monkeypatch, STARTED, WORLD_SIZE="4", RANK=rank) == 2
        assert capsys.readouterr().err == expected
    assert waited == [30]


@pytest.mark.night
def test_one_rank_tells_a_mistake_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr=127.0.0.1", "--nproc-per-node", "2", "examples/rl_step.py", *STARTED]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert done.stderr.count("error: steps: expected >= 1, got 0") == 1
