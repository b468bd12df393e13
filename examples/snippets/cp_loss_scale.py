"""Context parallelism: the same gradient under CP 1 and CP 2, from a loss of gathered values.

Megatron scales a loss of three outputs otherwise than one of two; the docstring of
`context_parallel_gather` says which `grad=` goes with which.
"""

import torch.distributed as dist
from tiny import VOCAB, batch, gpt, megatron

from mcore_logprobs import (
    LogprobConfig,
    context_parallel_gather,
    context_parallel_shard,
    patch_model,
)


def main(cp: int = 1) -> float:
    """The gradient's norm: independent of CP."""
    with megatron(cp=cp):
        model = gpt(calculate_per_token_loss=True)
        whole = batch()
        ids, positions, labels = (context_parallel_shard(t.contiguous()) for t in whole)

        def loss_func(stats):  # three outputs: (sum, tokens, metrics), so grad="sum"
            logprobs = context_parallel_gather(stats.logprobs, grad="sum")  # [b, s]
            return -logprobs.sum(), logprobs.numel(), {}

        with patch_model(model, LogprobConfig(vocab_size=VOCAB)):
            loss, tokens, _ = loss_func(model(ids, positions, None, labels=labels))
        loss.backward()
        squares = 0.0
        for parameter in model.parameters():
            # What finalize_model_grads does: sum over the ranks, over the sum of their tokens.
            dist.all_reduce(parameter.grad)
            squares += (parameter.grad / (tokens * cp)).square().sum().item()
        return squares**0.5


if __name__ == "__main__":
    import os

    print(main(cp=int(os.environ.get("WORLD_SIZE", "1"))))
