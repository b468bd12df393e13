"""Sixteen tokens drawn by Megatron's own forward, on any number of tensor-parallel ranks: the same
ones, and no rank gathers the vocabulary.

torchrun --nproc-per-node 2 examples/snippets/generate.py
"""

import os

import torch
from tiny import VOCAB, batch, gpt, megatron

from mcore_logprobs import LogprobConfig, patch_model


def main(tp: int = 1, tokens: int = 16) -> list[list[int]]:
    with megatron(tp=tp):
        model = gpt()
        ids = batch(rows=3, length=4)[0]
        config = LogprobConfig(temperature=0.8, top_p=0.9, vocab_size=VOCAB)
        with patch_model(model, config) as handle, torch.no_grad():
            for step in range(tokens):
                rows, length = ids.shape
                positions = torch.arange(length).expand(rows, -1)
                last = torch.arange(1, rows + 1) * length - 1  # flat in [rows, length]
                with handle.sample(seed=1000 + step, rows=last):
                    drawn, _ = model(ids, positions, None)
                ids = torch.cat([ids, drawn[:, None]], dim=1)
        return ids[:, 4:].tolist()


if __name__ == "__main__":
    print(main(int(os.environ.get("WORLD_SIZE", "1"))))
