"""What `python -m mcore_logprobs run` does to Megatron: its parser's flags, its models' patch.

Three places, each found by name and signature in whatever release the script imports, at the
moment it imports it:

    megatron.training.arguments     add_megatron_arguments(parser)         the flags join the parser
    megatron.training.training      get_model(model_provider_func=...)     models by a provider
                                    setup_model_and_optimizer(...)         every model to be trained
    megatron.training.models        unimodal_build_distributed_models(     models by a config
        .dist_utils                     pre_wrap_hook=...)                 container, before DDP

Models are patched as they are built, before DDP or FSDP wraps them; `setup_model_and_optimizer`
looks at what it returns, so that a builder that goes another way is caught before training starts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence

from mcore_logprobs.config import LogprobConfig, add_logprob_args
from mcore_logprobs.megatron.entry import TRAINING
from mcore_logprobs.megatron.handle import PatchHandle
from mcore_logprobs.megatron.heads import find_language_models
from mcore_logprobs.megatron.imports import PassedArguments, after_import, replace_function
from mcore_logprobs.megatron.patch import patch_built, patch_gpt_model
from mcore_logprobs.megatron.versions import takes
from mcore_logprobs.spelling import nearest

ARGUMENTS = "megatron.training.arguments"
BUILDERS = "megatron.training.models.dist_utils"
FLAG = "--logprob-"
logger = logging.getLogger("mcore_logprobs")


class LaunchError(RuntimeError):
    """The flags had no effect, or would have had none."""


class Launcher:
    """Gives a script's Megatron the `--logprob-*` flags and patches the models it builds.

    Attributes:
        given: the `--logprob-*` flags on the command line.
        parsed: whether Megatron's parser, with the flags, has parsed the command line.
        patched: the number of language models patched so far.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        """`arguments`: the script's.

        A bad flag or value, and flags that contradict each other, end the program with a usage
        message: here, as the models are built minutes later.
        """
        parser = argparse.ArgumentParser(
            prog="python -m mcore_logprobs run", allow_abbrev=False, add_help=False
        )
        self._add_flags(parser)
        self._settings, rest = parser.parse_known_args(list(arguments))
        self.given = [a for a in arguments if a.startswith(FLAG)]
        # Only those that are given: a parser leaves what is there where no flag says otherwise.
        unset = object()
        told = argparse.Namespace(**dict.fromkeys(vars(self._settings), unset))
        parser.parse_known_args(list(arguments), told)
        self._of_flags = {name: x for name, x in vars(told).items() if x is not unset}
        if unknown := [a for a in rest if a.startswith(FLAG)]:
            flags = [flag for flag in parser._option_string_actions if flag.startswith(FLAG)]
            flag = unknown[0].partition("=")[0]
            hint = "; expected before '--'" if flag in flags else nearest(flag, flags)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        try:
            LogprobConfig.from_args(self._settings)
        except ValueError as error:
            parser.error(str(error))
        self.parsed = False
        self.patched = 0
        self._passed_over: list[str] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """While it is open, Megatron is taken hold of as the script imports it."""
        with contextlib.ExitStack() as undo:
            for name, act in (
                (ARGUMENTS, self._take_parser),
                (TRAINING, self._take_training),
                (BUILDERS, self._take_builders),
            ):
                undo.callback(after_import(name, functools.partial(act, undo)))
            yield

    def check(self) -> None:
        """Raises: LaunchError where flags were given that had no effect."""
        if self.given and not self.parsed:
            raise LaunchError(
                f"{self.given[0]} was given, but no parser of Megatron's "
                f"({ARGUMENTS}.add_megatron_arguments) has read the command line: the script has "
                "a parser of its own, which never saw the flags"
            )
        if self.given and not self.patched:
            seen = "; ".join(self._passed_over) or "no model"
            raise LaunchError(
                f"{self.given[0]} was given, but no model was patched: expected the script to "
                "build a GPTModel, HybridModel, MambaModel, T5Model or BertModel through "
                f"megatron.training; what was seen there: {seen}"
            )

    # The flags.

    def _add_flags(self, parser: argparse.ArgumentParser) -> None:
        add_logprob_args(parser)
        # What an unchanged loss function takes; the flags say otherwise.
        parser.set_defaults(logprob_output="loss")

    def _take_parser(self, undo: contextlib.ExitStack, module: object) -> None:
        if takes(getattr(module, "add_megatron_arguments", None), "parser"):
            undo.callback(
                replace_function(module, "add_megatron_arguments", after=self._watch_parser)
            )

    def _watch_parser(self, parser: argparse.ArgumentParser) -> None:
        self._add_flags(parser)
        parse = parser.parse_known_args

        def parse_and_tell(*args: object, **kwargs: object) -> object:
            result = parse(*args, **kwargs)
            self.parsed = True
            return result

        parser.parse_known_args = parse_and_tell  # type: ignore[assignment, method-assign]

    # The models.

    def _take_training(self, undo: contextlib.ExitStack, module: object) -> None:
        if takes(getattr(module, "get_model", None), "model_provider_func"):
            undo.callback(replace_function(module, "get_model", before=self._patch_what_is_built))
        if hasattr(module, "setup_model_and_optimizer"):
            undo.callback(
                replace_function(module, "setup_model_and_optimizer", after=self._patch_trained)
            )

    def _take_builders(self, undo: contextlib.ExitStack, module: object) -> None:
        name = "unimodal_build_distributed_models"
        if takes(getattr(module, name, None), "pre_wrap_hook"):
            undo.callback(replace_function(module, name, before=self._patch_before_wrap))

    def _patch_what_is_built(self, arguments: PassedArguments) -> None:
        build = arguments.get("model_provider_func")
        if callable(build):

            @functools.wraps(build)
            def provider(*args: object, **kwargs: object) -> object:
                model = build(*args, **kwargs)
                self.patch(model, functools.partial(patch_built, checked_later=True))
                return model

            arguments["model_provider_func"] = provider

    def _patch_before_wrap(self, arguments: PassedArguments) -> None:
        script_hook = arguments.get("pre_wrap_hook")
        assert script_hook is None or callable(script_hook)

        def hook(models: list[object]) -> list[object]:
            changed = script_hook(models) if script_hook is not None else None
            models = models if changed is None else changed
            self.patch(models)
            return models

        arguments["pre_wrap_hook"] = hook

    def _patch_trained(self, result: Sequence[object]) -> None:
        self.patch(result[0])
        self.check()

    def patch(
        self,
        models: object,
        put: Callable[[object, LogprobConfig], PatchHandle] = patch_gpt_model,
    ) -> None:
        """Patch a model or a list of chunks; a model without a language model is passed over.

        Raises:
            LaunchError: flags were given and the script's parser has not seen them.
            ValueError: what `patch_gpt_model` raises.
        """
        if self.given and not self.parsed:
            self.check()
        try:
            language_models = find_language_models(models)
        except ValueError as error:
            if str(error) not in self._passed_over:
                self._passed_over.append(str(error))
            return
        config = self.config()
        handle = put(models, config)
        if not self.patched and handle.reports:
            logger.info("patched %s: %s", type(language_models[0]).__name__, config)
        self.patched += len(language_models)

    def config(self) -> LogprobConfig:
        """The flags' settings, else the script's, and the vocabulary's size by Megatron's own."""
        from megatron.training import get_args

        return self._config_of(get_args())

    def _config_of(self, args: argparse.Namespace) -> LogprobConfig:
        settings = vars(self._settings) | vars(args) | self._of_flags
        return LogprobConfig.from_args(argparse.Namespace(**settings))
