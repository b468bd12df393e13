"""Switch the library on from Megatron-LM's command line.

In a training script that calls Megatron-LM's `pretrain` (pretrain_gpt.py and its kin):

    pretrain(train_valid_test_datasets_provider,
             patched_model_provider(model_provider),
             ModelType.encoder_or_decoder,
             forward_step,
             extra_args_provider=add_logprob_args)

and on its command line `--logprob-output loss`, or stats and a loss function that takes them.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from mcore_logprobs.config import LogprobConfig, add_logprob_args

__all__ = ["add_logprob_args", "patched_model_provider"]


def patched_model_provider(
    model_provider: Callable[..., Any], *, args: Namespace | None = None
) -> Callable[..., Any]:
    """A Megatron-LM model provider whose models are patched as the `--logprob-*` flags say.

    `args` is the parsed namespace; None asks Megatron-LM's `megatron.training.get_args()` when a
    model is built.

    Raises (when a model is built):
        ValueError: flags that do not make a `LogprobConfig`, or what `patch_gpt_model` raises.
    """
    from mcore_logprobs.megatron.patch import patch_gpt_model

    @functools.wraps(model_provider)
    def provider(*provider_args: Any, **kwargs: Any) -> Any:
        namespace = args
        if namespace is None:
            from megatron.training import get_args

            namespace = get_args()
        model = model_provider(*provider_args, **kwargs)
        patch_gpt_model(model, LogprobConfig.from_args(namespace))
        return model

    return provider
