"""LogprobConfig: validation, and the same values by every way in."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pickle
import re
import sys
import types
from fractions import Fraction

import numpy as np
import pytest
import torch
import yaml

from mcore_logprobs.config import LogprobConfig, add_logprob_args
from mcore_logprobs.ops.result import TokenStats

# Every field's default, which is the contract; then another value, as Python, as flag text and as
# YAML text.
SETTINGS = {
    "output": ("stats", "loss", "loss", "loss"),
    "fused": (True, "require", "require", "require"),
    "entropy": (False, True, "true", "true"),
    "target_rank": (False, True, "true", "yes"),
    "sum_pi_squared": (False, True, "true", "true"),
    "temperature": (1.0, 0.5, "5e-1", "5e-1"),
    "top_k": (None, 50, "50", "50"),
    "top_p": (1.0, 0.9, "0.9", "9e-1"),
    "min_p": (0.0, 0.05, "0.05", "5e-2"),
    "disallowed_ids": (None, (3, 7), "7,3", "[3, 7]"),
    "logit_bias": (None, ((3, 1.5), (7, -math.inf)), "3:1.5,7:-inf", "{7: -.inf, 3: 1.5}"),
    "vocab_size": (None, 50257, "50257", "50257"),
    "ignore_index": (-100, -1, "-1", "-1"),
    "label_smoothing": (0.0, 0.1, "0.1", "0.1"),
    "softcap": (None, 30.0, "30", "30"),
    "compact": (False, True, "true", "on"),
    "mtp": ("keep", "off", "off", "off"),
    "invariant_segments": (None, 8, "8", "8"),
    "logits_dtype": (torch.float32, torch.bfloat16, "bfloat16", "bf16"),
    "chunk_size": (None, 64, "64", "64"),
    "saved_bytes": (0, 3 << 29, "1.5GiB", "1536 MiB"),
    "backend": ("auto", "torch", "torch", "torch"),
    "logits": ("real", "lazy", "lazy", "lazy"),
    "check_labels": (False, True, "true", "true"),
}
NAMES = [f.name for f in dataclasses.fields(LogprobConfig)]

BAD = {
    "output": ["logits", None],
    "fused": [1, "always", None],
    "entropy": ["yes", 0],
    "target_rank": [None],
    "temperature": [
        *(0.0, -1.0, math.inf, math.nan, "1.0", True, None, 1e-40, 1e300, 10**400),
        Fraction(10**400, 3),
    ],
    "vocab_size": [0, 32000.0, True],
    "ignore_index": [None, -100.0],
    "label_smoothing": [-0.1, 1.0, math.nan],
    "softcap": [0.0, -30.0, 1e-40, 1e300, 10**400],
    "logits_dtype": [torch.int64, "fp12"],
    "chunk_size": [0, 1.5],
    "backend": ["cuda"],
    "top_k": [-2, 1.5, True],
    "top_p": [0.0, 1.5, math.nan, None, 10**400],
    "min_p": [-0.1, 1.5, math.nan, None],
    "disallowed_ids": [[], [-1], -1, [1.5], [True], True, torch.tensor([True]), 1.5, "a"],
    "logit_bias": [
        *({}, {-1: 0.0}, {True: 0.0}, {1.5: 0.0}, {1: math.nan}, {1: math.inf}, {1: True}),
        *({1: "1"}, {1: np.bool_(True)}, {np.bool_(True): 1.0}, "3", [3], 301.5, [(1, 0), (1, 2)]),
        *({1: 1e39}, {1: -1e39}, {1: 10**400}),
    ],
    "compact": [1, "require"],
    "logits": ["never", None, True],
    "invariant_segments": [0, 2.0],
    "saved_bytes": [-1, 1.5, True, None, "1.5", "many", "-1GiB", "3 parsecs"],
}


def parser() -> argparse.ArgumentParser:
    return add_logprob_args(argparse.ArgumentParser())


def flag(name: str) -> str:
    return "--logprob-" + name.replace("_", "-")


def test_defaults_are_the_contract() -> None:
    defaults = dataclasses.asdict(LogprobConfig())
    assert defaults == {name: row[0] for name, row in SETTINGS.items()}


def test_every_way_in_gives_byte_equal_defaults(tmp_path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "section.yaml").write_text("model: tiny\nmcore_logprobs: {}\n")
    expected = pickle.dumps(LogprobConfig())
    for config in (
        LogprobConfig.from_yaml(tmp_path / "empty.yaml"),
        LogprobConfig.from_yaml(tmp_path / "section.yaml"),
        LogprobConfig.from_args(parser().parse_args([])),
        LogprobConfig.from_args(argparse.Namespace()),
        LogprobConfig.from_transformer_config(argparse.Namespace(hidden_size=64)),
        LogprobConfig.from_dict({}),
        LogprobConfig.from_dict(LogprobConfig().as_dict()),
    ):
        assert pickle.dumps(config) == expected


@pytest.mark.parametrize("name", NAMES)
def test_one_setting_by_every_way_in(name, tmp_path) -> None:
    _, value, flag_text, yaml_text = SETTINGS[name]
    expected = LogprobConfig(**{name: value})
    assert expected != LogprobConfig()
    assert LogprobConfig.from_args(parser().parse_args([flag(name), flag_text])) == expected
    path = tmp_path / "config.yaml"
    path.write_text(f"{name}: {yaml_text}\n")
    assert LogprobConfig.from_yaml(path) == expected
    path.write_text(f"steps: 2\nmcore_logprobs:\n  {name}: {yaml_text}\n")
    assert LogprobConfig.from_yaml(path) == expected
    on_config = argparse.Namespace(**{f"logprob_{name}": value}, sequence_parallel=True)
    assert LogprobConfig.from_transformer_config(on_config) == expected
    path.write_text(yaml.safe_dump(expected.as_dict()))
    assert LogprobConfig.from_yaml(path) == expected


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_to_yaml_is_read_again(name, tmp_path) -> None:
    path = tmp_path / "config.yaml"
    config = LogprobConfig(**{name: SETTINGS[name][1]})
    config.to_yaml(path)
    assert LogprobConfig.from_yaml(path) == config
    written = yaml.safe_load(path.read_text())
    assert list(written) == NAMES
    path.write_text(yaml.safe_dump({"steps": 2, "mcore_logprobs": written}))
    assert LogprobConfig.from_yaml(path) == config


def test_a_bias_is_written_as_pages_spell_it(tmp_path) -> None:
    LogprobConfig(logit_bias={7: -math.inf, 5: 1.5}).to_yaml(tmp_path / "config.yaml")
    assert "logit_bias:\n  5: 1.5\n  7: -.inf\n" in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize("call", [LogprobConfig.from_yaml, LogprobConfig().to_yaml], ids=str)
def test_yaml_without_pyyaml(call, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match=rf"{call.__qualname__}: .* pip install pyyaml"):
        call(tmp_path / "config.yaml")


def test_switches_have_bare_and_negative_forms() -> None:
    config = LogprobConfig.from_args(
        parser().parse_args(["--logprob-entropy", "--logprob-target-rank", "--logprob-no-fused"])
    )
    assert (config.entropy, config.target_rank, config.fused) == (True, True, False)
    config = LogprobConfig.from_args(parser().parse_args(["--logprob-fused", "false"]))
    assert config.fused is False


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("--logprob-fused require", "--logprob-no-fused"),
        ("--logprob-fused", "--logprob-no-fused"),
        ("--logprob-entropy true", "--logprob-no-entropy"),
    ],
)
def test_a_switch_and_its_negative_form_contradict_each_other(first, second, capsys) -> None:
    for one, other in ((first, second), (second, first)):
        with pytest.raises(SystemExit):
            parser().parse_args([*one.split(), *other.split()])
        said = f"error: argument {other.split()[0]}: contradicts {one.split()[0]}\n"
        assert capsys.readouterr().err.endswith(said)


def test_switches_that_do_not_contradict_each_other() -> None:
    """That agree, that are given twice, or that two command lines of one parser give."""
    flags = parser()
    assert (
        flags.parse_args(["--logprob-fused", "false", "--logprob-no-fused"]).logprob_fused is False
    )
    assert flags.parse_args(["--logprob-fused", "require"]).logprob_fused == "require"
    twice = ["--logprob-fused", "require", "--logprob-fused", "false"]
    assert flags.parse_args(twice).logprob_fused is False


def test_any_object_is_a_namespace() -> None:
    """To argparse; types.SimpleNamespace takes no weak reference."""
    found = parser().parse_args(["--logprob-entropy"], types.SimpleNamespace())
    assert found.logprob_entropy is True
    with pytest.raises(SystemExit):
        parser().parse_args(["--logprob-entropy", "--logprob-no-entropy"], types.SimpleNamespace())


def test_namespace_is_plain_data() -> None:
    args = parser().parse_args(["--logprob-logits-dtype", "torch.bfloat16"])
    assert json.loads(json.dumps(vars(args)))["logprob_logits_dtype"] == "bfloat16"


@pytest.mark.parametrize(("name", "value"), [(n, bad) for n, row in BAD.items() for bad in row])
def test_bad_value_names_field_expected_and_got(name, value) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        LogprobConfig(**{name: value})
    assert f"LogprobConfig.{name}" in str(caught.value)
    assert repr(value) in str(caught.value)


FIVE = LogprobConfig(disallowed_ids=(5,))
BIASED = LogprobConfig(logit_bias=((5, 1.5), (7, -math.inf)))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (5, FIVE),
        (np.int32(5), FIVE),
        ([np.int64(5), 5], FIVE),
        (np.array([5, 5]), FIVE),
        (torch.tensor(5), FIVE),
        ({np.int64(7): -math.inf, 5: np.float32(1.5)}, BIASED),
        ([(torch.tensor(5), Fraction(3, 2)), (7, -math.inf)], BIASED),
    ],
    ids=repr,
)
def test_ids_and_numbers_of_other_types(value, expected) -> None:
    """From NumPy too; what is kept is Python's own ints and floats."""
    name = "disallowed_ids" if expected is FIVE else "logit_bias"
    config = LogprobConfig(**{name: value})
    assert config == expected
    assert repr(config) == repr(expected)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("disallowed_ids: 5", FIVE),
        ("disallowed_ids: '5'", FIVE),
        ("logit_bias: {5: 1.5, 7: -inf}", BIASED),
        ("logit_bias: {5: 1.5, 7: -.inf}", BIASED),
        ("logit_bias: {5: 15e-1, 7: -.INF}", BIASED),
        ("logit_bias: {'5': 1.5, '7': '-.inf'}", BIASED),
        ("logit_bias: [[5, 1.5], [7, -inf]]", BIASED),
        ("logit_bias: 5:1.5,7:-inf", BIASED),
        ("logit_bias: '5:1.5, 7:-.inf'", BIASED),
    ],
)
def test_spellings_of_ids_and_biases(line, expected, tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(line + "\n")
    assert LogprobConfig.from_yaml(path) == expected
    name, value = line.split(": ", 1)
    if value[0] in "[{":
        return
    assert LogprobConfig.from_args(parser().parse_args([flag(name), value.strip("'")])) == expected


def test_a_bias_that_yaml_reads_as_another_number(tmp_path) -> None:
    """5:1.5 is 301.5 in YAML 1.1, which has base-60 numbers; {5:1.5} is {301.5: null}."""
    path = tmp_path / "config.yaml"
    for text in ("5:1.5", "{5:1.5}"):
        path.write_text(f"logit_bias: {text}\n")
        with pytest.raises(ValueError, match=r"logit_bias: expected .* got .*301\.5") as caught:
            LogprobConfig.from_yaml(path)
        assert 'write {5: 1.5} or "5:1.5"' in str(caught.value)
    path.write_text('logit_bias: "5:1.5"\n')
    assert LogprobConfig.from_yaml(path) == LogprobConfig(logit_bias={5: 1.5})


@pytest.mark.parametrize("value", ["5:1,7:2,5:2", {"5": 1, 5: 2, 7: 3}, [[5, 1], [7, 3], [5, 2]]])
def test_an_id_that_is_biased_twice(value, capsys) -> None:
    with pytest.raises(ValueError, match=r"LogprobConfig\.logit_bias: .*; id 5 is given twice"):
        LogprobConfig.from_dict({"logit_bias": value})
    if isinstance(value, str):
        with pytest.raises(SystemExit):
            parser().parse_args(["--logprob-logit-bias", value])
        assert "id 5 is given twice" in capsys.readouterr().err


NONE = ("vocab_size", "softcap", "chunk_size", "invariant_segments", "disallowed_ids", "logit_bias")


@pytest.mark.parametrize(
    ("name", "text"), [*((name, "none") for name in NONE), ("top_k", "0"), ("top_k", "-1")]
)
def test_a_flag_that_says_none(name, text) -> None:
    assert LogprobConfig.from_args(parser().parse_args([flag(name), text])) == LogprobConfig()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("temperature", "0"),
        ("temperature", "abc"),
        ("temperature", "none"),
        ("temperature", "1e-40"),
        ("softcap", "1e300"),
        ("backend", "gpu"),
        ("chunk_size", "-1"),
        ("ignore_index", "abc"),
        ("ignore_index", "1.5"),
        ("top_k", "abc"),
        ("saved_bytes", "many"),
        ("disallowed_ids", "a,b"),
        ("logit_bias", "3"),
    ],
)
def test_bad_flag_ends_with_usage(name, text, capsys) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([flag(name), text])
    message = capsys.readouterr().err
    assert flag(name) in message
    assert "expected" in message
    assert repr(text) in message


@pytest.mark.parametrize("off", [0, -1, None])
def test_top_k_has_one_spelling_for_off(off) -> None:
    assert LogprobConfig(top_k=off) == LogprobConfig()


@pytest.mark.parametrize("name", NAMES)
def test_docstring_and_help_have_the_same_text(name) -> None:
    """Each field's text, up to its default, stands in both, word for word."""
    words = " ".join(parser().format_help().split())
    doc = " ".join((LogprobConfig.__doc__ or "").split())
    start = doc.index(f" {name}: ") + len(f" {name}: ")
    text = doc[start : doc.index(" Default: ", start)]
    assert len(text) > 20
    # argparse may break a line at any hyphen.
    assert text.replace(" ", "") in words.replace(" ", "")


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_invariant_segments_promise_nothing_of_a_filtered_distribution(filters) -> None:
    with pytest.raises(ValueError, match="invariant_segments: expected None"):
        LogprobConfig(invariant_segments=2, **filters)


STATISTICS = {field.name for field in dataclasses.fields(TokenStats)} & set(NAMES)


@pytest.mark.parametrize("name", sorted(STATISTICS))
def test_loss_output_has_no_place_for_extras(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected output='stats'"):
        LogprobConfig(output="loss", **{name: True})


def test_the_statistics_that_a_model_is_asked_for() -> None:
    assert {"entropy", "target_rank", "sum_pi_squared"} <= STATISTICS


def test_unknown_key_lists_known_ones_and_suggests(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("temprature: 0.7\n")
    with pytest.raises(ValueError, match="did you mean 'temperature'") as caught:
        LogprobConfig.from_yaml(path)
    assert str(path) in str(caught.value)
    assert all(name in str(caught.value) for name in NAMES)
    path.write_text("- temperature\n")
    with pytest.raises(ValueError, match="mapping"):
        LogprobConfig.from_yaml(path)
    path.write_text("temperature: [0.7\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}: while parsing")):
        LogprobConfig.from_yaml(path)


def test_a_duplicate_key_is_refused(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    section = "mcore_logprobs:\n  temperature: 0.7\n"
    for twice, text, line in (
        ("temperature", f"{section}  temperature: 1.0\n", 3),
        ("mcore_logprobs", f"{section}other: 1\n{section}", 4),
    ):
        path.write_text(text)
        words = f"{path}: line {line}: expected each key once, got '{twice}' again"
        with pytest.raises(ValueError, match=re.escape(words)):
            LogprobConfig.from_yaml(path)
    path.write_text(f"base: &base {{temperature: 0.5, softcap: 3.0}}\n{section}  <<: *base\n")
    assert LogprobConfig.from_yaml(path) == LogprobConfig(temperature=0.7, softcap=3.0)
    first = "{temperature: 1.0, softcap: 3.0}"
    path.write_text(
        f"of:\n  base: &base {first}\n  hot: &hot {{<<: *base, temperature: 0.7}}\n"
        "mcore_logprobs: {<<: *hot, entropy: true}\n"
    )
    expected = LogprobConfig(temperature=0.7, softcap=3.0, entropy=True)
    assert LogprobConfig.from_yaml(path) == expected


@pytest.mark.parametrize(
    "text", ["mcore_logprob:\n  temperature: 0.7\n", "a: 1\nmcore-logprobs:\n"]
)
def test_a_misspelled_section_is_told_its_name(text: str, tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="did you mean 'mcore_logprobs'"):
        LogprobConfig.from_yaml(path)


def test_ids_within_a_list_may_be_text(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("disallowed_ids: ['3', '1', 7]\n")
    assert LogprobConfig.from_yaml(path).disallowed_ids == (1, 3, 7)
    path.write_text("disallowed_ids: ['3', 'x']\n")
    with pytest.raises(ValueError, match="disallowed_ids: expected None or ints >= 0, got"):
        LogprobConfig.from_yaml(path)
    with pytest.raises(ValueError, match="disallowed_ids: expected None or ints >= 0, got b'k3'"):
        LogprobConfig(disallowed_ids=b"k3")


def test_frozen_and_hashable() -> None:
    config = LogprobConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.temperature = 2.0  # type: ignore[misc]
    assert hash(config) == hash(LogprobConfig(temperature=1))
    assert dataclasses.replace(config, temperature=2).temperature == 2.0
    with pytest.raises(ValueError, match="temperature"):
        dataclasses.replace(config, temperature=0)
