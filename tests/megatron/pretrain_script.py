"""A training script as users write them: real `megatron.training.pretrain`, mock data, a tiny GPT.

    python [-m mcore_logprobs run] tests/megatron/pretrain_script.py --way none <Megatron's flags>

`--way` says what the script itself does: nothing (`none`), one of the library's two ways in
(`provider`, `provider-alone` without a model config beside it, `hook`), where the release has it,
or a model that is no language model (`other-model`). Which arguments `pretrain` takes is read from
its signature, as a script of that release would have them. On a CPU it opens `cpu_training`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch

from mcore_logprobs import add_logprob_args
from mcore_logprobs.cpu_megatron.training import cpu_training
from mcore_logprobs.megatron import logprob_model_hook, patched_model_provider

WAYS = ["none", "provider", "provider-alone", "hook", "other-model"]


def script_args(parser: Any, logprob_flags: bool) -> Any:
    parser.add_argument("--way", choices=WAYS, default="none")
    return add_logprob_args(parser) if logprob_flags else parser


class MockTokens(torch.utils.data.Dataset):
    """Sequences of a fixed arithmetic progression each, with some positions masked."""

    def __init__(self, count: int, length: int, vocab: int) -> None:
        self.count, self.length, self.vocab = count, length, vocab

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start, step = divmod(int(index) * 7919 % (self.vocab * 5), 5)
        text = (start + (step + 1) * torch.arange(self.length + 1)) % self.vocab
        mask = torch.ones(self.length)
        mask[index % self.length] = 0.0
        return {
            "tokens": text[:-1].contiguous(),
            "labels": text[1:].contiguous(),
            "loss_mask": mask,
            "position_ids": torch.arange(self.length),
        }


def datasets(sizes: Any, vp_stage: int | None = None) -> list[Any]:
    from megatron.training import get_args

    args = get_args()
    return [MockTokens(max(int(n or 0), 1), args.seq_length, args.vocab_size - 1) for n in sizes]


datasets.is_distributed = True  # type: ignore[attr-defined]


def loss_func(loss_mask: Any, output: Any) -> Any:
    loss = torch.sum(output.view(-1).float() * loss_mask.view(-1))
    count = loss_mask.sum().detach().to(torch.int)
    report = torch.cat([loss.detach().view(1), count.view(1)])
    return loss, count, {"lm loss": report}


def forward_step(data_iterator: Any, model: Any) -> Any:
    batch = next(data_iterator)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, functools.partial(loss_func, batch["loss_mask"])


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """The decoder's layers for a CPU, from a TransformerConfig or a GPTModelConfig."""
    from mcore_logprobs.cpu_megatron.models import gpt_block_spec

    return gpt_block_spec(getattr(config, "transformer", config), vp_stage=vp_stage)


def gpt_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """The model provider."""
    from megatron.core.models.gpt import GPTModel
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    from mcore_logprobs.cpu_megatron.models import _mtp_block_spec

    args = get_args()
    config = config or core_transformer_config_from_args(args)
    spec = layer_spec(config, vp_stage)
    mtp = _mtp_block_spec(config, spec, vp_stage) if args.mtp_num_layers else None
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
    )


def other_model(config: Any = None, **unused: Any) -> Any:
    from megatron.core.transformer import MegatronModule
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    class NoLanguageModel(MegatronModule):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.linear = torch.nn.Linear(4, 4)

    return NoLanguageModel(config or core_transformer_config_from_args(get_args()))


def main() -> None:
    from megatron.core.enums import ModelType
    from megatron.training import arguments as megatron_arguments
    from megatron.training import pretrain

    way = sys.argv[sys.argv.index("--way") + 1] if "--way" in sys.argv else "none"
    patches = way not in ("none", "other-model")
    extra = functools.partial(script_args, logprob_flags=patches)
    provider = other_model if way == "other-model" else gpt_model
    if way.startswith("provider"):
        provider = patched_model_provider(gpt_model)
    takes = inspect.signature(pretrain).parameters
    kind = ModelType.encoder_or_decoder
    if "cfg_container" not in takes:
        pretrain(datasets, provider, kind, forward_step, extra_args_provider=extra)
        return

    from megatron.training import argument_utils, global_vars

    pretrain_cfg_container_from_args = argument_utils.pretrain_cfg_container_from_args
    args = megatron_arguments.parse_and_validate_args(extra_args_provider=extra)
    container = pretrain_cfg_container_from_args(args)
    if takes["model_provider"].default is inspect.Parameter.empty:
        pretrain(container, datasets, provider, kind, forward_step)
        return
    # From Megatron-LM#7418 on the script builds the tokenizer, after the container.
    services = getattr(global_vars, "initialize_runtime_services", None)
    if way in ("provider-alone", "other-model"):
        if services:
            services(args)
        pretrain(container, datasets, kind, forward_step, model_provider=provider)
        return

    model_config = argument_utils.gpt_config_from_args(
        args, **({"vocab_size_from_tokenizer": True} if services else {})
    )
    model_config.transformer_layer_spec = layer_spec
    if way == "hook":
        model_config.pre_wrap_hooks.append(logprob_model_hook(args))
    container = pretrain_cfg_container_from_args(args, model_config)
    if services:
        services(args)
        argument_utils.resolve_tokenizer_vocab_size(container, args.padded_vocab_size)
    beside = {"model_provider": provider} if way == "provider" else {}
    pretrain(container, datasets, kind, forward_step, **beside)


if __name__ == "__main__":
    with cpu_training():
        main()
