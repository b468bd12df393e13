"""`LogprobConfig`: every setting of a patched model; ways in from YAML, flags and Megatron.

A field states everything about its setting: default, text, check and parser. The class's docstring,
the command line's help, validation and the readers of YAML and flags are generated from the
fields, so that a default, a text or a spelling cannot differ between them.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import torch

from mcore_logprobs import checks, fields
from mcore_logprobs.kernels.backend import BACKENDS
from mcore_logprobs.spelling import SuggestsFields, suggesting
from mcore_logprobs.vocabulary import true_vocab_size

ARG_PREFIX = "logprob_"
YAML_SECTION = "mcore_logprobs"


@fields.documented
@dataclasses.dataclass(frozen=True, kw_only=True)
class LogprobConfig(SuggestsFields):
    """What a patched model computes and returns. Immutable, hashable, validated on construction.

    Fields:
        {fields}

    Raises:
        ValueError: a value out of range or of the wrong type, with the field's name, what was
            expected and what was given.
    """

    output: Literal["stats", "loss"] = fields.choice(
        "stats",
        ("stats", "loss"),
        "'stats': the model returns a `TokenStats` of `[b, s]` tensors; 'loss': the usual float32 "
        "`[b, s]` loss, which is minus the log-probability.",
    )
    fused: bool | Literal["require"] = fields.switch(
        True,
        "True takes the path from hidden states, which never materializes the logits, and falls "
        "back to the logits if the head does not allow it, with one log line; 'require' raises "
        "when the model is patched instead of falling back; False always computes the logits.",
        words=("require",),
    )
    entropy: bool = fields.switch(
        False, "Also return the entropy of each token's distribution (output='stats' only)."
    )
    target_rank: bool = fields.switch(
        False, "Also return the rank of each target, 0 for the argmax (output='stats' only)."
    )
    sum_pi_squared: bool = fields.switch(
        False, "Also return the sum of squared probabilities (output='stats' only)."
    )
    temperature: float = fields.real(
        1.0, checks.check_scale, "The logits are divided by it, after scale and softcap."
    )
    top_k: int | None = fields.integer(
        None,
        checks.check_top_k,
        "Log-probabilities are those of the distribution filtered to the top_k largest logits; "
        "-inf for a target outside, whose ratio is NaN. Entropy, rank and lse are of the full "
        "distribution. None, 0 and -1: off.",
        off=(0, -1),
    )
    top_p: float = fields.real(
        1.0,
        checks.check_top_p,
        "As top_k, filtered to the smallest set of tokens whose probability reaches top_p. 1: off.",
    )
    min_p: float = fields.real(
        0.0,
        checks.check_min_p,
        "As top_k, filtered to the tokens whose probability is at least min_p times the largest, "
        "before top_k and top_p. 0: off.",
    )
    disallowed_ids: tuple[int, ...] | None = fields.ids(
        None,
        checks.check_optional_ids,
        "Forbidden global ids, or one: their logits are -inf, for every statistic, filter, sample "
        "and divergence. A flag separates them by commas.",
    )
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = fields.pairs(
        None,
        checks.check_optional_pairs,
        "{id: x}, added to the logits before the temperature, likewise; finite or -inf. A flag is "
        "written 5:1.5,7:-inf.",
    )
    vocab_size: int | None = fields.integer(
        None,
        checks.check_optional_count,
        "True vocabulary size in tokens, before padding for tensor parallelism; columns at or past "
        "it count as -inf. None: every column counts.",
    )
    ignore_index: int = fields.integer(
        -100,
        checks.check_integer,
        "A target with this global id gives logprob 0, entropy 0, rank -1 and no gradient.",
    )
    label_smoothing: float = fields.real(
        0.0,
        checks.check_fraction,
        "Label smoothing over the whole vocabulary at every TP, as Megatron's "
        "`vocab_parallel_cross_entropy` has it at TP 1; at more it smooths over each rank's shard.",
    )
    softcap: float | None = fields.real(
        None,
        checks.check_optional_scale,
        "`softcap * tanh(logits / softcap)` before the temperature. None: off.",
    )
    compact: bool = fields.switch(
        False,
        "Compute only tokens whose target is not ignore_index. Costs one host sync.",
    )
    mtp: Literal["keep", "off"] = fields.choice(
        "keep",
        ("keep", "off"),
        "'keep': multi-token prediction has its own losses, as without the patch: they count every "
        "token, also of label -100, unless the model is given a loss_mask or its loss is "
        "Transformer Engine's; 'off': calls with labels leave it out, so that reading "
        "log-probabilities does not train it. Under Megatron's DDP, which waits for all "
        "gradients, its parameters get those of 0.",
    )
    invariant_segments: int | None = fields.integer(
        None,
        checks.check_optional_count,
        "Results are bitwise identical for every tensor-parallel size that divides this number. "
        "None: no such guarantee.",
    )
    logits_dtype: torch.dtype = fields.dtype(  # noqa: RUF009
        torch.float32,
        checks.check_logits_dtype,
        "Dtype in which a chunk of logits is formed on the fused path: a `torch.dtype` or its "
        "name.",
    )
    chunk_size: int | None = fields.integer(
        None,
        checks.check_optional_count,
        "Rows at a time. None picks a number from a memory budget.",
    )
    saved_bytes: int = fields.size(
        "Bytes of logits that a rank may keep from the forward to the backward of a call on the "
        "fused path, chunk by chunk as they fit: what is kept is not multiplied again and costs 3 "
        "GEMMs, the rest 4. A policy loss costs 3 without it and ignores it, as do multi-token "
        "prediction's own losses.",
    )
    backend: Literal["auto", "torch", "triton", "inductor"] = fields.choice(
        "auto",
        BACKENDS,
        "Which kernels to run: 'auto' takes the best available ones; any other that is unavailable "
        "raises where it is used.",
    )
    logits: Literal["real", "lazy"] = fields.choice(
        "real",
        ("real", "lazy"),
        "What a call without labels returns: 'lazy' gives a `LazyLogits`, which every "
        "`vocab_parallel_*` function computes from hidden states; anything else that reads it gets "
        "real logits, with one log line (fused='require': an error).",
    )
    check_labels: bool = fields.switch(
        False,
        "Raise an error if the labels of a call are its input_ids themselves instead of the tokens "
        "after them. Costs one host sync. A call without input_ids, as on a later pipeline stage, "
        "is not checked, and one log line says so.",
    )

    def __post_init__(self) -> None:
        for name, setting in fields.settings_of(self).items():
            value = setting.normal(getattr(self, name))
            setting.check(f"LogprobConfig.{name}", value)
            object.__setattr__(self, name, value)
        if self.label_smoothing > 0.0 and self.filtered:
            raise ValueError(
                "LogprobConfig.label_smoothing: expected 0 with top_k, top_p or min_p, which give "
                f"the target's neighbors no probability, got {self.label_smoothing}"
            )
        if self.invariant_segments is not None and self.filtered:
            raise ValueError(
                "LogprobConfig.invariant_segments: expected None with top_k, top_p or min_p, whose "
                f"log-probabilities are not batch-invariant, got {self.invariant_segments}"
            )
        if self.logits == "lazy" and self.fused is False:
            raise ValueError(
                "LogprobConfig.logits: expected 'real' with fused=False, which always computes the "
                "logits, got 'lazy'"
            )
        extras = [n for n in ("entropy", "target_rank", "sum_pi_squared") if getattr(self, n)]
        if self.output == "loss" and extras:
            raise ValueError(
                f"LogprobConfig: {', '.join(extras)}: expected output='stats', which has a place "
                "for it, got output='loss'"
            )

    @property
    def filtered(self) -> bool:
        """Whether log-probabilities are those of a filtered distribution."""
        return self.top_k is not None or self.top_p < 1.0 or self.min_p > 0.0

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> LogprobConfig:
        """Build a config from field names and values; values may be text, as in a YAML file.

        Raises:
            ValueError: an unknown key (the message lists the known ones and suggests the nearest),
                or a value that its field does not accept.
        """
        if not isinstance(settings, Mapping):
            raise ValueError(
                f"LogprobConfig: expected a mapping of settings, got {type(settings).__name__}"
            )
        known = fields.settings_of(cls)
        for key in settings:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise ValueError(
                    f"LogprobConfig: unknown key {key!r}{hint}; known keys: {', '.join(known)}"
                )
        return cls(**{key: known[key].read(value) for key, value in settings.items()})

    @classmethod
    def from_yaml(cls, path: str | PathLike[str]) -> LogprobConfig:
        """Read a YAML file: the fields at its top, or under a top-level key `mcore_logprobs`.

        With that key the rest of the file only has to be YAML. dtypes are written by name
        (`logits_dtype: bfloat16`). Requires PyYAML.

        Raises:
            ValueError: with the path, no YAML, not a mapping, an unknown key, a duplicate key, or a
                value that its field does not accept.
            ImportError: PyYAML is not installed.
        """
        yaml = _yaml("from_yaml")
        try:
            with open(path, encoding="utf-8") as file:
                document = yaml.load(file, unique_keys(yaml))
            if isinstance(document, Mapping) and YAML_SECTION in document:
                document = document[YAML_SECTION]
            elif isinstance(document, Mapping):
                others = [str(key) for key in document if key not in fields.settings_of(cls)]
                if near := difflib.get_close_matches(YAML_SECTION, others, n=1, cutoff=0.8):
                    raise ValueError(
                        f"LogprobConfig: unknown key {near[0]!r} (did you mean {YAML_SECTION!r}?)"
                    )
            return cls.from_dict({} if document is None else document)
        except (ValueError, yaml.YAMLError) as error:
            raise ValueError(f"{path}: {error}") from None

    def to_yaml(self, path: str | PathLike[str]) -> None:
        """Write every setting to a YAML file that `from_yaml` reads. Requires PyYAML.

        Raises:
            ImportError: PyYAML is not installed.
        """
        yaml, settings = _yaml("to_yaml"), self.as_dict()
        if self.logit_bias is not None:
            settings["logit_bias"] = dict(self.logit_bias)
        with open(path, "w", encoding="utf-8") as file:
            yaml.safe_dump(settings, file, sort_keys=False)

    @classmethod
    def from_args(cls, args: argparse.Namespace | SimpleNamespace) -> LogprobConfig:
        """Read the `logprob_*` attributes that `add_logprob_args` puts on a namespace.

        A missing attribute means the default. An attribute that is nearly one of ours
        (`logprob_temprature`), or that begins one (`logprob_temp`), raises; one that is unlike all
        of them belongs to other code.

        Where Megatron-LM pads the vocabulary and `--logprob-vocab-size` is not given, `vocab_size`
        is the tokenizer's true size, so that padding is masked; give the padded size to count it.

        Raises:
            ValueError: a dictionary, list or text instead of a namespace, a misspelled attribute, a
                value that its field does not accept, a padded vocabulary whose true size is not
                known, a flag of ours on the command line whose setting is not on the namespace, or
                a section of YAML on it, as after Megatron's `--yaml-cfg`.
        """
        config = cls._from_attributes(args)
        cls._check_read(args)
        if config.vocab_size is None and (size := true_vocab_size(args)) is not None:
            config = dataclasses.replace(config, vocab_size=size)
        return config

    @classmethod
    def _check_read(cls, args: argparse.Namespace | SimpleNamespace) -> None:
        """Raise a ValueError where settings were given that are not on this namespace."""
        words = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
        given = {word.partition("=")[0] for word in words}
        flags = add_logprob_args(argparse.ArgumentParser(add_help=False))._option_string_actions
        lost = [
            flag
            for flag, action in flags.items()
            if flag in given and not hasattr(args, action.dest)
        ]
        section = getattr(args, YAML_SECTION, None)
        if isinstance(section, (SimpleNamespace, argparse.Namespace, Mapping)):
            lost.append(f"a section {YAML_SECTION!r}")
        ours = {action.dest for action in flags.values()}
        for name, part in getattr(args, "__dict__", {}).items():  # a section of Megatron's own
            if isinstance(part, SimpleNamespace):
                lost += [f"{name}.{key}" for key in vars(part) if key in ours]
        if lost:
            raise ValueError(
                f"LogprobConfig: expected a logprob_* attribute for {lost[0]}, got a "
                f"{type(args).__name__} without it. Megatron's --yaml-cfg reads no flags: write "
                "logprob_temperature and the like at the top level of its file. Every other parser "
                "needs add_logprob_args"
            )

    @classmethod
    def from_transformer_config(cls, config: Any) -> LogprobConfig:
        """Read `logprob_*` attributes from Megatron's TransformerConfig, where it has any.

        Set them on the config (`config.logprob_entropy = True`) or add them to a subclass of it;
        what is missing takes the default, and near misses raise as in `from_args`. Megatron's own
        fields are not repeated here. `patch_gpt_model` reads these itself, from the model it is
        given: `sequence_parallel` (whether hidden states are split over the sequence),
        `gradient_accumulation_fusion` (weight gradients go into `main_grad`),
        `defer_embedding_wgrad_compute`, an FP8 output layer, and `batch_invariant_mode` without
        `invariant_segments` (these take the logits path, or raise with fused="require"), and,
        through the model's `_scale_logits`, `use_mup` with `mup_output_mult`.

        Raises:
            ValueError: a dictionary, list or text instead of a config, a misspelled attribute, or a
                value that its field does not accept.
        """
        return cls._from_attributes(config)

    @classmethod
    def _from_attributes(cls, source: object) -> LogprobConfig:
        if type(source).__module__ == "builtins" or _without_attributes(source):
            raise ValueError(
                "LogprobConfig: expected an object with logprob_* attributes, got "
                f"{type(source).__name__}; LogprobConfig.from_dict reads a mapping"
            )
        known = fields.settings_of(cls)
        settings = {}
        names = {ARG_PREFIX + k for k in known}.union(getattr(source, "__dict__", ()))
        names.update(*map(vars, type(source).__mro__))  # of its classes, with their __slots__
        for keys in (source, getattr(source, "model_extra", None)):  # as OmegaConf's, pydantic's
            names.update(map(str, _keys(keys)))
        for name in sorted(n for n in names if n.startswith(ARG_PREFIX)):
            key = name.removeprefix(ARG_PREFIX)
            if key in known:
                if hasattr(source, name):
                    value = getattr(source, name)
                    # Megatron's --yaml-cfg makes a mapping a namespace, its keys text.
                    settings[key] = vars(value) if isinstance(value, SimpleNamespace) else value
            elif near := _similar(key, known):
                meant = " or ".join(repr(ARG_PREFIX + n) for n in near)
                raise ValueError(
                    f"{type(source).__name__}: unknown attribute {name!r}; did you mean {meant}?"
                )
        return cls.from_dict(settings)

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain values (dtypes by name): `from_dict(c.as_dict()) == c`."""
        return {name: fields.plain(getattr(self, name)) for name in fields.settings_of(self)}


def _yaml(method: str) -> ModuleType:
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            f"LogprobConfig.{method}: expected PyYAML to be installed: pip install pyyaml"
        ) from error
    return yaml


def unique_keys(yaml: ModuleType) -> type:
    """PyYAML's safe loader, which silently takes the last value of a duplicate key; here that is an
    error with its line.
    """

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        # Before `<<` is resolved, which adds the keys of another mapping.
        def compose_mapping_node(self, anchor: object) -> Any:
            node, found = super().compose_mapping_node(anchor), set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge"):
                    if (key.tag, key.value) in found:
                        line = key.start_mark.line + 1
                        raise ValueError(
                            f"line {line}: expected each key once, got {key.value!r} again"
                        )
                    found.add((key.tag, key.value))
            return node

    return Loader


def _keys(source: object) -> Iterable[object]:
    keys = getattr(source, "keys", None)
    return keys() if callable(keys) else ()


def _without_attributes(source: object) -> bool:
    """Whether it is a dictionary whose keys are no attributes, as an OrderedDict's are not."""
    if not isinstance(source, Mapping) or hasattr(type(source), "__getattr__"):
        return False
    return not any(key in getattr(source, "__dict__", ()) for key in source)


def _similar(key: str, known: Iterable[str]) -> list[str]:
    """The fields that an unknown attribute may mean: a flag's name shortened, or nearly one."""
    key = key.removeprefix("no_")
    shortened = [name for name in known if key and name.startswith(key)]
    return shortened or difflib.get_close_matches(key, known, n=1, cutoff=0.8)


@suggesting
def add_logprob_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group `mcore_logprobs` of `--logprob-*` flags, one for each `LogprobConfig` field.

    Pass it to Megatron-LM as `extra_args_provider`, and its namespace to
    `LogprobConfig.from_args`. Switches take an optional value and have a negative form:
    `--logprob-entropy`, `--logprob-fused require`, `--logprob-no-fused`. A bad value, or a switch
    that contradicts its negative form, ends the program with argparse's usage message. A parser
    that has the flags already is left alone.

    Returns: the same parser.
    """
    if "--" + (ARG_PREFIX + "output").replace("_", "-") in parser._option_string_actions:
        return parser
    group = parser.add_argument_group("mcore_logprobs", "log-probabilities of the patched model")
    for name, setting in fields.settings_of(LogprobConfig).items():
        flag = (ARG_PREFIX + name).replace("_", "-")
        default = fields.default_of(LogprobConfig, name)
        options: dict[str, Any] = {"default": default, "type": _argument_type(setting)}
        if setting.words:
            options |= {"nargs": "?", "const": True, "metavar": "{" + ",".join(setting.words) + "}"}
            stored: list[_Stored] = []
            options |= {"action": _Switch, "stored": stored}
            group.add_argument(
                "--" + flag.replace("logprob-", "logprob-no-"),
                dest=ARG_PREFIX + name,
                action=_Switch,
                nargs=0,
                stored=stored,
                default=default,
                help=f"same as --{flag} false",
            )
        else:
            options["metavar"] = name.upper()
        text = f"{setting.help} Expected: {setting.check.expected}. Default: {default}."
        group.add_argument("--" + flag, dest=ARG_PREFIX + name, help=text, **options)
    return parser


_Stored = tuple[Callable[[], object], str, object]


class _Switch(argparse.Action):
    """Stores a switch; an error where the same command line stored another value by another flag.

    argparse's exclusive groups overlook a flag that stores the default.

    Args:
        stored: shared by a switch's flags: of each that was read, (namespace, flag, value).
    """

    def __init__(self, *, stored: list[_Stored], **options: Any) -> None:
        super().__init__(**options)
        self._stored = stored

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        flag, value = self.option_strings[0], False if self.nargs == 0 else values
        self._stored[:] = [entry for entry in self._stored if entry[0]() is namespace]
        for _, other, before in self._stored:
            if other != flag and before != value:
                raise argparse.ArgumentError(self, f"contradicts {other}")
        self._stored.append((_reference(namespace), flag, value))
        setattr(namespace, self.dest, value)


def _reference(namespace: object) -> Callable[[], object]:
    """A weak reference; the object itself where it allows none, as types.SimpleNamespace."""
    try:
        return weakref.ref(namespace)
    except TypeError:
        return lambda: namespace


def _argument_type(setting: fields.Setting) -> Callable[[str], object]:
    def convert(text: str) -> object:
        value = setting.normal(setting.parse(text))
        try:
            setting.check("", value)
        except ValueError:
            check = setting.check
            message = f"expected {check.expected}, got {text!r}{check.hint(value)}"
            raise argparse.ArgumentTypeError(message) from None
        return fields.plain(value)

    return convert
