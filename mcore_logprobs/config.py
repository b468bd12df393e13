"""`LogprobConfig`: every setting of a patched model; ways in from YAML, flags and Megatron.

Each setting is declared once, as a field of the dataclass with its help text and the values it
takes. Validation, the command line and the YAML reader are all generated from those fields, so a
default or a spelling cannot differ between them.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import numbers
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, Literal

import torch

ARG_PREFIX = "logprob_"
YAML_SECTION = "mcore_logprobs"

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
}


def _setting(default: Any, help: str, expected: str, valid: Callable[[Any], bool]) -> Any:
    """A dataclass field that knows what it accepts; `expected` is what error messages print."""
    return dataclasses.field(
        default=default, metadata={"help": help, "expected": expected, "valid": valid}
    )


def _choice(default: str, help: str, *choices: str) -> Any:
    expected = "one of " + ", ".join(repr(c) for c in choices)
    return _setting(default, help, expected, lambda v: isinstance(v, str) and v in choices)


def _flag(help: str) -> Any:
    return _setting(False, help, "True or False", lambda v: isinstance(v, bool))


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_count_or_none(value: Any) -> bool:
    return value is None or (_is_int(value) and value >= 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogprobConfig:
    """What a patched model computes and returns. Immutable, hashable, validated on construction.

    Fields:
        output: "stats": the model returns a `TokenStats` of `[b, s]` tensors; "loss": the usual
            float32 `[b, s]` loss, which is minus the log-probability.
        fused: True takes the path from hidden states that never holds the logits and falls back to
            the logits where a head does not allow it, with one log line; "require" raises at patch
            time instead of falling back; False always computes the logits.
        entropy, target_rank: also return these (output="stats" only).
        temperature: the logits are divided by it, after scale and softcap. Finite and > 0.
        vocab_size: true vocabulary size in tokens, before padding for tensor parallelism; columns
            at or past it count as -inf. None: every column counts.
        ignore_index: a target with this global id gives logprob 0, entropy 0, rank -1, no gradient.
        label_smoothing: in [0, 1), as in Megatron's `vocab_parallel_cross_entropy`.
        softcap: `softcap * tanh(logits / softcap)` before the temperature. None: off.
        logits_dtype: dtype in which a chunk of logits is formed on the fused path (a
            `torch.dtype` or its name: "float32", "bfloat16", "float16").
        chunk_size: rows at a time; None picks one from a memory budget.
        backend: "auto", "torch", "triton" or "inductor"; an explicit backend that is not
            available raises where it is used, "auto" takes the best one there is.

    Raises:
        ValueError: a value out of range or of the wrong type, with the field's name, what was
            expected and what was given.
    """

    output: Literal["stats", "loss"] = _choice(
        "stats", "what the patched model returns", "stats", "loss"
    )
    fused: bool | Literal["require"] = _setting(
        True,
        "compute from hidden states without holding the logits; 'require' refuses to fall back",
        "True, False or 'require'",
        lambda v: isinstance(v, bool) or v == "require",
    )
    entropy: bool = _flag("also return the entropy of each token's distribution")
    target_rank: bool = _flag("also return the rank of each target (0 is the argmax)")
    temperature: float = _setting(
        1.0,
        "the logits are divided by it",
        "a finite number > 0",
        lambda v: _is_finite(v) and v > 0,
    )
    vocab_size: int | None = _setting(
        None,
        "true vocabulary size; padded columns at or past it are masked",
        "None or an integer >= 1",
        _is_count_or_none,
    )
    ignore_index: int = _setting(-100, "targets with this id are ignored", "an integer", _is_int)
    label_smoothing: float = _setting(
        0.0,
        "label smoothing of the log-probabilities",
        "a number in [0, 1)",
        lambda v: _is_finite(v) and 0 <= v < 1,
    )
    softcap: float | None = _setting(
        None,
        "softcap*tanh(logits/softcap) before the temperature",
        "None or a finite number > 0",
        lambda v: v is None or (_is_finite(v) and v > 0),
    )
    logits_dtype: torch.dtype = _setting(  # noqa: RUF009
        torch.float32,
        "dtype of a chunk of logits on the fused path",
        "torch.float32, torch.bfloat16 or torch.float16, or its name",
        lambda v: v in (torch.float32, torch.bfloat16, torch.float16),
    )
    chunk_size: int | None = _setting(
        None,
        "rows computed at a time; none picks from a memory budget",
        "None or an integer >= 1",
        _is_count_or_none,
    )
    backend: Literal["auto", "torch", "triton", "inductor"] = _choice(
        "auto", "which kernels to run", "auto", "torch", "triton", "inductor"
    )

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = _normalise(f, getattr(self, f.name))
            if not f.metadata["valid"](value):
                raise ValueError(
                    f"LogprobConfig.{f.name}: expected {f.metadata['expected']}, "
                    f"got {value!r} ({type(value).__name__})"
                )
            object.__setattr__(self, f.name, value)
        if self.output == "loss" and (self.entropy or self.target_rank):
            raise ValueError(
                "LogprobConfig: entropy and target_rank need output='stats', which has a place "
                f"for them; got output='loss', entropy={self.entropy}, "
                f"target_rank={self.target_rank}"
            )

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> LogprobConfig:
        """Builds a config from field names and values; values may be text, as in a YAML file.

        Raises:
            ValueError: an unknown key (the message lists the known ones and suggests the nearest),
                or a value that its field does not accept.
        """
        if not isinstance(settings, Mapping):
            raise ValueError(
                f"LogprobConfig: expected a mapping of settings, got {type(settings).__name__}"
            )
        known = _field_names()
        for key in settings:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise ValueError(
                    f"LogprobConfig: unknown key {key!r}{hint}; known keys: {', '.join(known)}"
                )
        return cls(**{k: _parse(v) if isinstance(v, str) else v for k, v in settings.items()})

    @classmethod
    def from_yaml(cls, path: str | PathLike[str]) -> LogprobConfig:
        """Reads a YAML file: the fields at its top, or under a top-level key `mcore_logprobs`.

        With that key the rest of the file is somebody else's and is not looked at. dtypes are
        written by name (`logits_dtype: bfloat16`). Needs PyYAML.

        Raises:
            ValueError: not a mapping, an unknown key, or a value that its field does not accept.
        """
        import yaml

        with open(path, encoding="utf-8") as file:
            document = yaml.safe_load(file)
        if isinstance(document, Mapping) and YAML_SECTION in document:
            document = document[YAML_SECTION]
        try:
            return cls.from_dict({} if document is None else document)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> LogprobConfig:
        """Reads the `logprob_*` attributes that `add_logprob_args` puts on a namespace.

        A missing attribute means the default. An attribute that is nearly one of ours
        (`logprob_temprature`) raises; one that is unlike all of them belongs to other code.

        Raises:
            ValueError: a misspelt attribute, or a value that its field does not accept.
        """
        return cls._from_attributes(args)

    @classmethod
    def from_transformer_config(cls, config: Any) -> LogprobConfig:
        """Reads `logprob_*` attributes from Megatron's TransformerConfig, where it has any.

        Set them on the config (`config.logprob_entropy = True`) or add them to a subclass of it;
        what is missing takes the default, and near misses raise as in `from_args`. Megatron's own
        fields are not repeated here. `patch_gpt_model` reads these itself, from the model it is
        given: `sequence_parallel` (whether hidden states are split over the sequence),
        `gradient_accumulation_fusion` (weight gradients go into `main_grad`),
        `defer_embedding_wgrad_compute` and an FP8 output layer (both take the logits path, or
        raise with fused="require"), and, through the model's `_scale_logits`, `use_mup` with
        `mup_output_mult`.

        Raises:
            ValueError: a misspelt attribute, or a value that its field does not accept.
        """
        return cls._from_attributes(config)

    @classmethod
    def _from_attributes(cls, source: Any) -> LogprobConfig:
        known = _field_names()
        settings = {}
        names = set(getattr(source, "__dict__", ())) | {ARG_PREFIX + k for k in known}
        for name in sorted(n for n in names if n.startswith(ARG_PREFIX)):
            key = name.removeprefix(ARG_PREFIX)
            if key in known:
                if hasattr(source, name):
                    settings[key] = getattr(source, name)
            elif near := difflib.get_close_matches(key, known, n=1, cutoff=0.8):
                raise ValueError(
                    f"{type(source).__name__}: unknown attribute {name!r}; "
                    f"did you mean {ARG_PREFIX + near[0]!r}?"
                )
        return cls.from_dict(settings)

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain values (dtypes by name): `from_dict(c.as_dict()) == c`."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}


def add_logprob_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the group `mcore_logprobs` of `--logprob-*` flags, one for each `LogprobConfig` field.

    Pass it to Megatron-LM as `extra_args_provider`, and its namespace to
    `LogprobConfig.from_args`. Switches take an optional value and have a negative form:
    `--logprob-entropy`, `--logprob-fused require`, `--logprob-no-fused`. A bad value ends the
    program with argparse's usage message.

    Returns: the same parser.
    """
    group = parser.add_argument_group("mcore_logprobs", "log-probabilities of the patched model")
    for f in dataclasses.fields(LogprobConfig):
        flag = (ARG_PREFIX + f.name).replace("_", "-")
        default = _plain(f.default)
        options: dict[str, Any] = {"default": default, "type": _argument_type(f)}
        if isinstance(f.default, bool):
            values = "true,false,require" if f.name == "fused" else "true,false"
            options |= {"nargs": "?", "const": True, "metavar": "{" + values + "}"}
            group.add_argument(
                "--" + flag.replace("logprob-", "logprob-no-"),
                dest=ARG_PREFIX + f.name,
                action="store_const",
                const=False,
                default=default,
                help=f"same as --{flag} false",
            )
        else:
            options["metavar"] = f.name.upper()
        text = f"{f.metadata['help']}: {f.metadata['expected']} (default: {default})"
        group.add_argument("--" + flag, dest=ARG_PREFIX + f.name, help=text, **options)
    return parser


def _field_names() -> list[str]:
    return [f.name for f in dataclasses.fields(LogprobConfig)]


def _argument_type(f: dataclasses.Field[Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        value = _normalise(f, _parse(text))
        if not f.metadata["valid"](value):
            raise argparse.ArgumentTypeError(f"expected {f.metadata['expected']}, got {text!r}")
        return _plain(value)

    return convert


def _normalise(f: dataclasses.Field[Any], value: Any) -> Any:
    """One spelling for equal settings: dtype names become dtypes, 1 becomes 1.0 in a float field.

    What it does not know it returns unchanged, for validation to refuse.
    """
    if isinstance(f.default, torch.dtype) and isinstance(value, str):
        return _DTYPES.get(value.lower().removeprefix("torch."), value)
    if _is_int(value):
        return float(value) if "float" in str(f.type) else int(value)
    if "float" in str(f.type) and _is_finite(value):
        return float(value)
    return value


def _parse(text: str) -> Any:
    """Text from a flag or a YAML string to None, a bool, an int or a float; else unchanged."""
    words = {"none": None, "null": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _plain(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
