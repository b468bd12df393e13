"""From Megatron-LM's flags: the script's own model provider, and --logprob-* on the command line.

In a training script this is all (to 0.18; from 0.19 `logprob_model_hook` is the way in):

    pretrain(..., patched_model_provider(model_provider), ..., extra_args_provider=add_logprob_args)
"""

import argparse

from tiny import batch, gpt, megatron

from mcore_logprobs import add_logprob_args, patched_model_provider

FLAGS = ["--logprob-output", "loss", "--logprob-vocab-size", "90", "--logprob-temperature", "0.8"]


def model_provider(pre_process: bool = True, post_process: bool = True):
    return gpt()


def main(flags: list[str] = FLAGS) -> tuple[float, float]:
    with megatron():
        args = add_logprob_args(argparse.ArgumentParser()).parse_args(flags)
        model = patched_model_provider(model_provider, args=args)()  # Megatron-LM calls this
        ids, positions, labels = batch()
        loss = model(ids, positions, None, labels=labels)  # [b, s], as Megatron's own
        z = model(ids, positions, None)[..., :90].float() / 0.8
        plain = -z.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        return loss.mean().item(), plain.mean().item()


if __name__ == "__main__":
    print(main())
