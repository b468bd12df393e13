"""LogprobConfig of a namespace, a transformer config or any other object with attributes."""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict, UserDict
from types import SimpleNamespace

import pytest
import torch

from mcore_logprobs.config import LogprobConfig, add_logprob_args


@pytest.mark.parametrize("read", [LogprobConfig.from_args, LogprobConfig.from_transformer_config])
def test_near_miss_attribute_raises_and_foreign_one_does_not(read) -> None:
    with pytest.raises(ValueError, match="logprob_temperature"):
        read(argparse.Namespace(logprob_temprature=0.7))
    foreign = argparse.Namespace(logprob_batch_size=4, logprob_entropy=True)
    assert read(foreign) == LogprobConfig(entropy=True)


class _Attributes(dict):
    """Keys that are attributes too, as OmegaConf's and others have them."""

    def __getattr__(self, name: str) -> object:
        if name in self:
            return self[name]
        raise AttributeError(name)


class _Extra:
    """What pydantic makes of fields that a model does not declare."""

    def __init__(self, **extra: object) -> None:
        self.model_extra = extra

    def __getattr__(self, name: str) -> object:
        return _Attributes(self.__dict__["model_extra"]).__getattr__(name)


@pytest.mark.parametrize("kind", [_Attributes, _Extra])
def test_keys_that_are_attributes_are_read_and_looked_through(kind) -> None:
    read = LogprobConfig.from_args
    assert read(kind(logprob_temperature=0.7, lr=1.0)) == LogprobConfig(temperature=0.7)
    with pytest.raises(ValueError, match="'logprob_temprature'; did you mean"):
        read(kind(logprob_temprature=0.7))


@pytest.mark.parametrize("read", [LogprobConfig.from_args, LogprobConfig.from_transformer_config])
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("logprob_temp", "'logprob_temperature'"),
        ("logprob_top", "'logprob_top_k' or 'logprob_top_p'"),
        ("logprob_no_fused", "'logprob_fused'"),
        ("logprob_no_ent", "'logprob_entropy'"),
        ("logprob_no_entropi", "'logprob_entropy'"),
    ],
)
def test_a_shortened_flag_s_name_raises(read, name, meant) -> None:
    """As a flag it is understood (`--logprob-temp`); a namespace needs the whole name."""
    with pytest.raises(ValueError, match=f"unknown attribute {name!r}; did you mean {meant}\\?"):
        read(argparse.Namespace(**{name: True}))


class _Subclass:
    logprob_temprature = 0.5


class _Slots:
    __slots__ = ("logprob_temprature",)


class _Derived(_Subclass):
    """Misspelled in a base."""


@pytest.mark.parametrize("config", [_Subclass(), _Derived(), _Slots()], ids=repr)
def test_a_near_miss_of_a_class_raises(config) -> None:
    with pytest.raises(ValueError, match="'logprob_temprature'; did you mean 'logprob_temperatu"):
        LogprobConfig.from_transformer_config(config)


def test_settings_of_a_class_are_read() -> None:
    class Config:
        __slots__ = ("logprob_entropy", "logprob_target_rank")
        logprob_temperature, logprob_batch_size = 0.5, 4

    config = Config()
    config.logprob_entropy = True
    expected = LogprobConfig(temperature=0.5, entropy=True)
    assert LogprobConfig.from_transformer_config(config) == expected


@pytest.mark.parametrize("read", [LogprobConfig.from_args, LogprobConfig.from_transformer_config])
@pytest.mark.parametrize(
    "given",
    [
        {"logprob_temperature": 0.5},
        *(kind(logprob_temperature=0.5) for kind in (OrderedDict, UserDict)),
        *(["--logprob-temperature", "0.5"], "0.2", None),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_has_no_attributes_is_refused(read, given) -> None:
    expected = f"expected an object with logprob_\\* attributes, got {type(given).__name__}"
    with pytest.raises(ValueError, match=expected):
        read(given)


@pytest.mark.parametrize(
    ("words", "args", "given"),
    [
        (["--logprob-temperature", "0.5"], argparse.Namespace(), "--logprob-temperature"),
        (["--logprob-top-k=3"], SimpleNamespace(logprob_batch_size=4), "--logprob-top-k"),
        ([], SimpleNamespace(mcore_logprobs=SimpleNamespace(top_k=3)), "a section 'mcore_logprobs"),
        ([], argparse.Namespace(mcore_logprobs={"top_k": 3}), "a section 'mcore_logprobs"),
        (
            [],
            SimpleNamespace(language_model=SimpleNamespace(num_layers=2, logprob_top_k=3)),
            "language_model.logprob_top_k",
        ),
    ],
    ids=["a flag", "a flag and its value", "a section", "a mapping", "in Megatron's section"],
)
def test_settings_that_did_not_reach_the_namespace(monkeypatch, words, args, given) -> None:
    """As after Megatron's --yaml-cfg, whose file takes the place of the parser's namespace."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--yaml-cfg", "gpt.yaml", *words])
    with pytest.raises(ValueError, match=f"attribute for {given}.*--yaml-cfg reads no flags"):
        LogprobConfig.from_args(args)
    args.logprob_entropy = True  # another one arrived
    with pytest.raises(ValueError, match=f"attribute for {given}.*--yaml-cfg reads no flags"):
        LogprobConfig.from_args(args)


def test_flags_of_others_are_no_lost_settings(monkeypatch) -> None:
    words = ["--logprob-batch-size", "4", "--note", "--logprob-chunk 3", "--", "--logprob-top-k"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    foreign = argparse.Namespace(logprob_batch_size=4)
    assert LogprobConfig.from_args(foreign) == LogprobConfig()


def test_what_is_no_shortened_name() -> None:
    foreign = ("logprob_", "logprob_no_", "logprob_no_grad", "logprob_k", "logprob_token_ids")
    names = argparse.Namespace(**dict.fromkeys(foreign, 3))
    assert LogprobConfig.from_args(names) == LogprobConfig()
    short = add_logprob_args(argparse.ArgumentParser()).parse_args(
        ["--logprob-temp", "0.5", "--logprob-no-fu"]
    )
    assert LogprobConfig.from_args(short) == LogprobConfig(temperature=0.5, fused=False)


def test_real_transformer_config() -> None:
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    assert LogprobConfig.from_transformer_config(config) == LogprobConfig()
    config.logprob_entropy = True
    config.logprob_logits_dtype = "bfloat16"
    assert LogprobConfig.from_transformer_config(config) == LogprobConfig(
        entropy=True, logits_dtype=torch.bfloat16
    )
