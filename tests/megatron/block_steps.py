"""What tests of a patched model's blocks share: a model with a batch, rows of it, a record."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.groups import group_rank, group_size, resolve_tp_group
from tests.megatron.common import VOCAB, make_batch, tiny_config
from tests.megatron.test_hybrid import hybrid_config

IGNORED = -100
LIMIT = 2e-5


class Step:
    """A model with a batch, the same tokens' float64 logits, and rows of it."""

    def __init__(self, parallel_state: Any, layout: dict[str, Any], kind: str, change: str) -> None:
        tp = layout.get("tp", 1)
        if kind == "hybrid":
            self.model = mm.build_hybrid_model(
                hybrid_config(layout, "M*-"),
                vocab_size=VOCAB,
                pattern="M*-",
                position_embedding_type="rope",
            )
        else:
            recompute = {}
            if change == "recompute":
                recompute = {
                    "recompute_granularity": "full",
                    "recompute_method": "uniform",
                    "recompute_num_layers": 1,
                }
            self.model = mm.build_gpt_model(
                tiny_config(tp, sequence_parallel=tp > 1 and change != "no SP", **recompute),
                vocab_size=VOCAB,
            )
        if change == "hook":
            self.model.output_layer.register_forward_hook(lambda m, a, out: (out[0] * 1.5, out[1]))
        batch = make_batch(parallel_state, packed=change == "packed")
        self.inputs, self.labels = batch["inputs"], batch["labels"] % VOCAB
        self.weights = batch["weights"]
        self.shape = self.labels.shape
        self.sequence_parallel = self.model.config.sequence_parallel
        self.generator = torch.Generator().manual_seed(11)
        count = self.labels.numel()
        # Some named twice, and not all: a prefix tree, responses alone.
        self.rows = torch.randint(0, count, (count // 2 + 3,), generator=self.generator)

    def logits(self) -> Tensor:
        """`[b, s, V]` float64 of the whole vocabulary, with a graph."""
        return self.model(**self.inputs, runtime_gather_output=True).double()

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def own_columns(self, x: Tensor) -> Tensor:
        group = resolve_tp_group(None)
        return x.chunk(group_size(group), -1)[group_rank(group)].contiguous()


def picked(z: Tensor, rows: Tensor | None) -> Tensor:
    return z if rows is None else z.flatten(0, 1)[rows]


def tokens_of(step: Step, with_rows: bool) -> tuple[Tensor | None, Tensor, Tensor]:
    """(rows, targets with some ignored, a weight each)."""
    rows = step.rows if with_rows else None
    target = picked(step.labels, rows).clone()
    target.view(-1)[1::5] = IGNORED
    return rows, target, picked(step.weights, rows)


def kept_of(step: Step, target: Tensor, gaps: bool = False) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """A sampler's record, most of whose rows hold the target; the same as a mask `[..., V]`.

    Args:
        gaps: every fourth row has no record.
    """
    mask = torch.rand(*target.shape, VOCAB, generator=step.generator) < 0.15
    flat = mask.view(-1, VOCAB)
    some = torch.arange(flat.shape[0]) % 7 != 3
    at = target.reshape(-1).clamp(min=0)
    flat[some, at[some]] = True
    flat[~some, at[~some]] = False
    flat[:, 0] |= ~flat.any(-1)
    if gaps:
        flat[2::4] = False
    lengths = flat.sum(-1)
    return (flat.nonzero()[:, 1], torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])), mask
