"""Mistakes that are easily made: the error names the cure."""

from __future__ import annotations

import builtins
import copy
import inspect
from typing import Any

import pytest
import torch

import mcore_logprobs
from mcore_logprobs import (
    LogprobConfig,
    context_parallel_gather,
    context_parallel_positions,
    context_parallel_shard,
    context_parallel_shift,
    linear_token_stats,
    losses,
    patch_model,
    vocab_parallel_logprobs,
)
from mcore_logprobs.losses import AdaptiveEntropy, ClippedLoss, GSPOLoss
from mcore_logprobs.megatron.launcher import Launcher

HIDDEN, WEIGHT = torch.randn(8, 2, 4), torch.randn(12, 4)
IDS = torch.randint(12, (16, 2))


def test_a_whole_target_with_a_part_of_the_sequence() -> None:
    with pytest.raises(ValueError, match=r"got \(16, 2\); .* pass sequence_parallel=True"):
        linear_token_stats(HIDDEN, WEIGHT, IDS)
    with pytest.raises(ValueError, match=r"got \(4, 2\); under sequence_parallel=True"):
        linear_token_stats(HIDDEN, WEIGHT, IDS[:4])
    with pytest.raises(ValueError, match=r"got \(7, 2\)$"):
        linear_token_stats(HIDDEN, WEIGHT, IDS[:7])


def test_a_vocabulary_larger_than_the_group_s() -> None:
    with pytest.raises(ValueError, match=r"1 to 12 .* got 48; is tp_group, of size 1, the tensor"):
        linear_token_stats(HIDDEN, WEIGHT, IDS[:8], vocab_size=48)


def test_misspelt_keywords() -> None:
    with pytest.raises(TypeError, match="'entropi'; did you mean entropy"):
        linear_token_stats(HIDDEN, WEIGHT, IDS[:8], entropi=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'temprature'; did you mean temperature"):
        vocab_parallel_logprobs(torch.randn(3, 4), IDS[:3, 0], temprature=2.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'entropi'; did you mean entropy"):
        LogprobConfig(entropi=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(("short", "meant"), [("temp", "; did you mean temperature?"), ("to", "")])
def test_a_keyword_that_is_cut_short(short: str, meant: str) -> None:
    with pytest.raises(TypeError) as caught:
        LogprobConfig(**{short: 2.0})
    assert str(caught.value).endswith(f"{short!r}{meant}")


def test_a_misspelt_flag(capsys) -> None:
    with pytest.raises(SystemExit):
        Launcher(["--logprob-entropyy"])
    assert "--logprob-entropyy; did you mean --logprob-entropy?" in capsys.readouterr().err


def test_yaml_without_pyyaml(monkeypatch, tmp_path) -> None:
    plain = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "yaml":
            raise ImportError("No module named 'yaml'")
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install pyyaml"):
        LogprobConfig.from_yaml(tmp_path / "settings.yaml")


def test_an_objective_of_two_passes_in_one() -> None:
    logprobs = torch.randn(4)
    with pytest.raises(ValueError, match=r"'sequence_log_ratio'.* got 2; second_pass makes them"):
        GSPOLoss()(logprobs, None, logprobs, logprobs)


def test_statistics_taken_for_a_tensor() -> None:
    stats = linear_token_stats(HIDDEN, WEIGHT, IDS[:8])
    with pytest.raises(AttributeError, match=r"'mean': use \.logprobs.* output='loss'"):
        _ = stats.mean()
    assert copy.deepcopy(stats).shape == stats.shape
    assert stats.target_rank is None


def test_misspelt_keywords_of_everything_else() -> None:
    calls = {
        "cu_seqlens": lambda **k: context_parallel_shard(IDS, **k),
        "seq_dim": lambda **k: context_parallel_gather(IDS, **k),
        "layout": lambda **k: context_parallel_positions(4, **k),
        "fill": lambda **k: context_parallel_shift(IDS, **k),
        "lengths": linear_token_stats(HIDDEN, WEIGHT, IDS[:8]).unpack,
        "grad": linear_token_stats(HIDDEN, WEIGHT, IDS[:8]).gather_cp,
        "clip_high": ClippedLoss,
        "target": AdaptiveEntropy,
        "config": patch_model,
    }
    for keyword, call in calls.items():
        misspelt = keyword[:-1] + keyword[-1] * 2
        with pytest.raises(TypeError, match=f"{misspelt!r}; did you mean {keyword}"):
            call(**{misspelt: 1})


# Those that pass other keywords on are not among them.
FUNCTIONS = {
    name: function
    for module in (mcore_logprobs, losses)
    for name in module.__all__
    if inspect.isfunction(function := getattr(module, name))
    and name not in ("logprob_output_processor", "preference_advantages")
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_suggests_the_nearest_keyword(name: str) -> None:
    for keyword in inspect.signature(FUNCTIONS[name]).parameters:
        if len(keyword) >= 4:
            misspelt = keyword + keyword[-1]
            with pytest.raises(TypeError, match=rf"\(\) .*{misspelt!r}; did you mean {keyword}\?"):
                FUNCTIONS[name](**{misspelt: 1})


def test_a_keyword_cut_short() -> None:
    with pytest.raises(TypeError, match="'mod'; did you mean mode"):
        losses.aggregation(IDS, mod="token")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'ag'$"):  # unlike every keyword of this function
        linear_token_stats(HIDDEN, WEIGHT, IDS, ag=1)  # type: ignore[call-arg]
