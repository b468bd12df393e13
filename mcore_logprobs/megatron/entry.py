"""Switch the library on from Megatron-LM's command line, in a training script of one's own.

Which way in a Megatron release has, and why, is in docs/megatron-flags.md:

    # From 0.19: the container's model config builds the model and runs these hooks.
    args = parse_and_validate_args(extra_args_provider=add_logprob_args)
    model_config = gpt_config_from_args(args)
    model_config.pre_wrap_hooks.append(logprob_model_hook(args))
    pretrain(pretrain_cfg_container_from_args(args, model_config), ...)

    # To 0.18 (there with the container before it): the model provider builds the model.
    pretrain(datasets, patched_model_provider(model_provider), ModelType.encoder_or_decoder,
             forward_step, extra_args_provider=add_logprob_args)

and on the command line `--logprob-output loss`, or stats and a loss function that takes them. A
script that is not to be changed runs under `python -m mcore_logprobs run`.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

from torch import nn

from mcore_logprobs.config import ARG_PREFIX, LogprobConfig
from mcore_logprobs.megatron.imports import PassedArguments, after_import, replace_function
from mcore_logprobs.megatron.patch import patch_built, patch_gpt_model
from mcore_logprobs.megatron.versions import takes
from mcore_logprobs.spelling import suggesting

TRAINING = "megatron.training.training"
_MARK = "_mcore_logprobs_provider"
_SETTINGS = LogprobConfig, Namespace, SimpleNamespace, type(None)  # what a hook may read


@suggesting
def logprob_model_hook(
    args_or_config: Namespace | LogprobConfig | None = None,
) -> Callable[[list[nn.Module]], list[nn.Module]]:
    """A hook for `pre_wrap_hooks` or `post_wrap_hooks` of Megatron's model config (from 0.19).

    Args:
        args_or_config: a `LogprobConfig`; or a parsed namespace with the flags of
            `add_logprob_args`, or of Megatron's `--yaml-cfg` with them at the top level, read when
            the model is built and the size of its vocabulary is known; or None for Megatron-LM's
            own, `megatron.training.get_args()`.

    Returns: `hook(models)`, which patches the list of model chunks and returns it.

    Megatron to 0.18 builds a GPT model without these hooks: `patched_model_provider` there.

    Raises:
        ValueError: neither of these (here); and when a model is built, a namespace without the
            flags, flags that do not make a `LogprobConfig`, or what `patch_gpt_model` raises.
    """
    if not isinstance(args_or_config, _SETTINGS):
        raise ValueError(
            "logprob_model_hook: expected a LogprobConfig, a parsed namespace or None, got "
            f"{type(args_or_config).__name__}"
        )

    def hook(models: list[nn.Module]) -> list[nn.Module]:
        patch_gpt_model(models, _config_of(args_or_config))
        return models

    return hook


@suggesting
def patched_model_provider(
    model_provider: Callable[..., object], *, args: Namespace | None = None
) -> Callable[..., object]:
    """A Megatron-LM model provider whose models are patched as the `--logprob-*` flags say.

    For `pretrain` to 0.18, and for every caller that builds its model by a provider. `args` is the
    parsed namespace; None asks Megatron-LM's `megatron.training.get_args()` when a model is built.

    From 0.19 `pretrain` builds the model from its configuration container, where that has a model
    config, and ignores a provider. A provider made here then raises before any model is built.

    Raises:
        ValueError: args that are none of these (here); and when a model is built, a namespace
            without the flags, flags that do not make a `LogprobConfig`, or what
            `patch_gpt_model` raises (in a virtual pipeline a head that
            cannot be fused under `fused="require"` on its own stage only); a `pretrain` that
            ignores it.
    """
    if not isinstance(args, _SETTINGS):
        raise ValueError(
            "patched_model_provider: expected args to be a parsed namespace or None, got "
            f"{type(args).__name__}"
        )
    after_import(TRAINING, _guard_against_ignored_provider)

    def provider(*provider_args: object, **kwargs: object) -> object:
        model = model_provider(*provider_args, **kwargs)
        patch_built(model, _config_of(args))
        return model

    functools.update_wrapper(provider, model_provider)
    setattr(provider, _MARK, True)
    return provider


def _config_of(
    args_or_config: Namespace | SimpleNamespace | LogprobConfig | None,
) -> LogprobConfig:
    if isinstance(args_or_config, LogprobConfig):
        return args_or_config
    namespace = args_or_config
    if namespace is None:
        from megatron.training import get_args

        namespace = get_args()
    if not any(name.startswith(ARG_PREFIX) for name in vars(namespace)):
        raise ValueError(
            "the parsed arguments have no logprob_* settings: expected a parser that went through "
            "add_logprob_args (Megatron-LM's extra_args_provider)"
        )
    return LogprobConfig.from_args(namespace)


def _guard_against_ignored_provider(training: ModuleType) -> None:
    """Make Megatron's set-up refuse a patched provider together with a model config that builds.

    Once for each process. Where the set-up has no container (to 0.18) there is nothing to guard.
    """
    original = getattr(training, "setup_model_and_optimizer", None)
    if not takes(original, "cfg_container") or getattr(original, _MARK, False):
        return

    def refuse(arguments: PassedArguments) -> None:
        provider = arguments.get("model_provider_func")
        builds = getattr(arguments.get("cfg_container"), "model", None) is not None
        if builds and getattr(getattr(provider, "func", provider), _MARK, False):
            raise ValueError(
                "this Megatron's pretrain builds the model from its configuration container and "
                "ignores model_provider: patched_model_provider would have no effect. Append "
                "logprob_model_hook(args) to the container's model.pre_wrap_hooks, or run the "
                "script by `python -m mcore_logprobs run`"
            )

    replace_function(training, "setup_model_and_optimizer", before=refuse)
    setattr(training.setup_model_and_optimizer, _MARK, True)
