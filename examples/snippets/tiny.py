"""What the snippets run on: a tiny Megatron GPTModel on a CPU, under any launcher or none.

python examples/snippets/patch_model.py
torchrun --nproc-per-node 2 examples/snippets/cp_loss_scale.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mcore_logprobs.cpu_megatron import models
from mcore_logprobs.cpu_megatron.runtime import cpu_runtime

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on a CPU where there are GPUs, too
VOCAB = 90  # true vocabulary; padded to 96


@contextmanager
def megatron(**sizes: int) -> Iterator[None]:
    """Sizes: tp, cp, pp; the rest of the ranks is data parallel."""
    with cpu_runtime():
        models.init_model_parallel(**sizes)
        yield
        models.destroy_model_parallel()


def gpt(**config: Any) -> Any:
    config = models.transformer_config(hidden_size=32, num_attention_heads=4, **config)
    return models.build_gpt_model(config, vocab_size=96, max_sequence_length=64)


def batch(rows: int = 2, length: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, positions and labels, [rows, length] each; labels are already shifted."""
    tokens = torch.randint(VOCAB, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(length).expand(rows, -1)
    return tokens[:, :-1], positions, tokens[:, 1:].contiguous()
