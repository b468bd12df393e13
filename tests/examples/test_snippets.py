"""Every snippet runs, under 50 lines, and shows what it says."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import mcore_logprobs as ml
from mcore_logprobs.cpu_megatron import models
from tests.helpers.distributed import get_pool
from tests.helpers.documents import ROOT

SNIPPETS = ROOT / "examples" / "snippets"


def _main(name: str, *args: Any) -> Any:
    if str(SNIPPETS) not in sys.path:
        sys.path.insert(0, str(SNIPPETS))
    return importlib.import_module(name).main(*args)


def _run(name: str, *args: Any, ranks: int = 1) -> Any:
    return get_pool(ranks).run(_main, name, *args, timeout=200)[0]


def test_all_are_short_and_run_here() -> None:
    own = Path(__file__).read_text()
    for file in SNIPPETS.glob("*.py"):
        assert len(file.read_text().splitlines()) < 50, file
        assert f'"{file.stem}"' in own or file.stem == "tiny", file


def test_patch_model() -> None:
    found = _run("patch_model")
    assert found["difference"] < 1e-5
    assert 0 < found["entropy"] <= math.log(90)
    assert found["gradient"] > 0


def test_dpo() -> None:
    losses = _run("dpo")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[-1] < 0.9 * losses[0]


def test_distill() -> None:
    losses = _run("distill")
    assert 0 < losses[-1] < 0.9 * losses[0]


def _distance_of_heads(**layout: int) -> list[float]:
    """max |hidden @ head(model)^T - logits|, of a tied and an untied model."""
    sys.path.insert(0, str(SNIPPETS))
    distill, tiny = (importlib.import_module(name) for name in ("distill", "tiny"))
    far = []
    with tiny.megatron(**layout), torch.no_grad():
        config = models.transformer_config(hidden_size=32, num_attention_heads=4)
        ids, positions = (ml.context_parallel_shard(x) for x in tiny.batch()[:2])
        for tied in (True, False):
            model = models.build_gpt_model(config, vocab_size=96, tied=tied)
            logits = distill.hidden_states(model, ids, positions) @ distill.head(model).t()
            far.append((logits.transpose(0, 1) - model(ids, positions, None)).abs().max().item())
    return far


@pytest.mark.parametrize("cp", [1, 2])
def test_distill_s_head_is_what_a_model_multiplies_by(cp: int) -> None:
    for far in get_pool(cp).run(_distance_of_heads, cp=cp):
        assert all(error < 1e-5 for error in far)


def test_top_p() -> None:
    found = _run("top_p")
    assert found["with filter"] < 1e-5
    assert math.log(0.89) < found["without filter"] < -0.01
    assert found["weight"] == pytest.approx(1, abs=1e-5)


def test_cp_loss_scale() -> None:
    assert _run("cp_loss_scale", 2, ranks=2) == pytest.approx(_run("cp_loss_scale", 1), rel=1e-4)


@pytest.mark.parametrize("pp", [1, 2])
def test_schedule(pp: int) -> None:
    loss, expected = get_pool(pp).run(_main, "schedule", pp, timeout=200)[-1]
    assert loss == pytest.approx(expected, abs=1e-6)
    assert abs(expected + 0.5) > 1e-3  # of some of the tokens: the filter has dropped the others


def _sums_of_rows() -> list[float]:
    """Of the packed snippet's sequences, each by itself in plain torch."""
    packed, tiny = (importlib.import_module(name) for name in ("packed", "tiny"))
    with tiny.megatron(), torch.no_grad():
        model, sums = tiny.gpt(), []
        for x in packed.sequences():
            logits = model(x[None], torch.arange(len(x))[None], None)[0, :, : tiny.VOCAB]
            logprobs = logits.double().log_softmax(-1)[:-1].gather(-1, x[1:, None])
            sums.append(logprobs[packed.PROMPT - 1 :].sum().item())
        return sums


def test_packed() -> None:
    one = _run("packed", 1)
    assert one == pytest.approx(get_pool(1).run(_sums_of_rows)[0], rel=1e-5)
    assert _run("packed", 2, ranks=2) == pytest.approx(one, rel=1e-5)


def test_megatron_flags() -> None:
    loss, plain = _run("megatron_flags")
    assert loss == pytest.approx(plain, rel=1e-6)


def test_prefix_tree() -> None:
    found = _run("prefix_tree")
    assert found["logprobs"] < 1e-5
    assert found["gradient"] < 1e-5
    assert found["tokens saved"] == 3 * 9


def test_generate() -> None:
    one, two = _run("generate", 1), _run("generate", 2, ranks=2)
    assert one == two
    assert len({token for row in one for token in row}) > 10


def _distil(teacher: str) -> list[float]:
    """The snippet; SmolLM2 takes long to load, a random model of 300 tokens does not."""
    if teacher == "SmolLM2":
        return _main("on_policy_distillation")
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=300, num_hidden_layers=1, initializer_range=0.5, **sizes)
    tiny = LlamaForCausalLM(config)
    with mock.patch.object(AutoModelForCausalLM, "from_pretrained", return_value=tiny):
        return _main("on_policy_distillation")


@pytest.mark.parametrize("teacher", ["tiny", pytest.param("SmolLM2", marks=pytest.mark.night)])
def test_on_policy_distillation(teacher: str) -> None:
    (losses,) = get_pool(1).run(_distil, teacher, timeout=200)
    assert 0 < sum(losses[-2:]) < 0.9 * sum(losses[:2])
