"""README.md holds: its Python runs, its names and flags exist, its files are there."""

from __future__ import annotations

import argparse
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_logprobs
from mcore_logprobs.config import add_logprob_args

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.M | re.S)


def run_blocks(blocks: list[str]) -> dict[str, Any]:
    """Runs the blocks one after the other, as one program, around a real GPTModel on CPU."""
    from mcore_logprobs.cpu_megatron import models as mm
    from mcore_logprobs.cpu_megatron.runtime import cpu_runtime

    with cpu_runtime():
        mm.init_model_parallel()
        try:
            model = mm.build_gpt_model(mm.transformer_config(), vocab_size=64)
            tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
            names: dict[str, Any] = {
                "model": model,
                "input_ids": tokens[:, :-1],
                "labels": tokens[:, 1:],
                "position_ids": torch.arange(8).expand(2, 8),
                "attention_mask": None,
                "parser": argparse.ArgumentParser(),
                "model_provider": lambda pre_process, post_process: model,
            }
            before = set(vars(model))
            for number, block in enumerate(blocks):
                exec(compile(block, f"README.md block {number}", "exec"), names)
            assert set(vars(model)) == before, "a block left its patch behind"
            gradients = [p.grad for p in model.parameters()]
            return {
                "stats": names["stats"],
                "loss": names["loss"].detach(),
                "model_gradients": sum(g is not None and g.abs().sum() > 0 for g in gradients),
                "model_parameters": len(gradients),
                "hidden_gradient": names["hidden"].grad,
            }
        finally:
            mm.destroy_model_parallel()


def test_python_blocks_run(ranks) -> None:
    assert len(BLOCKS) == README.count("```python") >= 4
    (result,) = ranks(1).run(run_blocks, BLOCKS)
    assert torch.isfinite(result["loss"])
    assert result["model_gradients"] == result["model_parameters"]
    assert result["hidden_gradient"].abs().sum() > 0
    assert result["stats"].logprobs.shape == (16, 2)


def test_a_broken_block_would_be_noticed(ranks) -> None:
    from tests.helpers.distributed import RankError

    with pytest.raises(RankError, match=r"README\.md block 0"):
        ranks(1).run(run_blocks, [BLOCKS[0].replace("LogprobConfig(", "LogprobConfig(tempo=1, ")])


def test_names_exist() -> None:
    names = set(
        re.findall(r"`((?:vocab_parallel|context_parallel|linear|all_to_all)_\w+)`", README)
    )
    names |= set(re.findall(r"`((?:un)?patch_gpt_model|LogprobConfig|ParallelGroups)`", README))
    assert len(names) > 15
    missing = names - set(mcore_logprobs.__all__)
    assert not missing
    for name in names:
        getattr(mcore_logprobs, name)


def test_every_public_function_is_in_the_task_table() -> None:
    functions = {
        name
        for name in mcore_logprobs.__all__
        if name.startswith(("vocab_parallel_", "linear_", "context_parallel_", "all_to_all_"))
    }
    assert {name for name in functions if f"`{name}`" not in README} == set()


def test_modules_exist() -> None:
    modules = set(re.findall(r"mcore_logprobs(?:\.[a-z_]+)+", README))
    assert "mcore_logprobs.diagnostics" in modules
    for dotted in modules:
        assert pkgutil.resolve_name(dotted) is not None


def test_flags_exist() -> None:
    flags = set(re.findall(r"--logprob-[a-z-]+[a-z]", README))
    assert flags
    known = add_logprob_args(argparse.ArgumentParser()).format_help()
    assert all(flag in known for flag in flags)


def test_files_exist() -> None:
    files = set(re.findall(r"`bash ([\w/.]+)`", README)) | set(
        re.findall(r"\]\((\w[\w./]*)\)", README)
    )
    assert "tests/run.sh" in files
    assert [f for f in files if not f.startswith("http") and not (ROOT / f).exists()] == []


def test_it_is_short() -> None:
    assert len(README.splitlines()) < 150
