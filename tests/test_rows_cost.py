"""`rows=`: m rows cost the products of m rows, in every operation and through a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import mcore_logprobs as m
from mcore_logprobs.cpu_megatron import models as mm
from tests.megatron.common import VOCAB, make_batch, megatron, tiny_config

COUNT, HIDDEN, WIDTH = 40, 16, 24
ROWS = torch.tensor([3, 17, 17, 39, 0, 5, 8])

# name: (call of (hidden, weight, target, rows), products of the matrices with a backward)
CALLS: dict[str, tuple[Callable[..., Tensor], float]] = {
    "statistics": (
        lambda h, w, t, **k: m.linear_token_stats(h, w, t, entropy=True, **k).entropy,
        4,
    ),
    "policy loss": (
        lambda h, w, t, **k: m.linear_policy_loss(h, w, t, lambda lp, _: -lp, **k)[0],
        3,
    ),
    "filters": (lambda h, w, t, **k: m.linear_sampling_logprobs(h, w, t, top_k=20, **k), 4),
    "map": (lambda h, w, t, **k: m.linear_map(h, w, lambda z: z.logsumexp(-1), **k), 4),
    "divergence": (
        lambda h, w, t, **k: m.linear_kl_div(
            h, w, teacher_hidden=h.detach() + 1, teacher_weight=w.detach(), **k
        ),
        6,
    ),
    "log-softmax of entries": (
        lambda h, w, t, **k: m.linear_gather(h, w, t[:, None], log_softmax=True, **k),
        4,
    ),
}


class Flops(TorchDispatchMode):
    """Floating-point operations of products; torch's own counter hooks modules, which ends fusion.

    Attributes:
        total: so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


@pytest.mark.parametrize("name", CALLS)
def test_operations(name: str) -> None:
    call, products = CALLS[name]
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(WIDTH, HIDDEN, generator=generator).requires_grad_()
    target = torch.randint(WIDTH, (COUNT,), generator=generator)
    found = []
    for rows in (None, ROWS, ROWS[:0]):
        hidden = torch.randn(COUNT, HIDDEN, generator=generator).requires_grad_()
        own = target if rows is None else target[rows]
        with Flops() as counted:
            call(hidden, weight, own, rows=rows).sum().backward()
        assert hidden.grad is not None
        found.append(counted.total)
    assert found[0] == 2 * COUNT * HIDDEN * WIDTH * products
    assert found[1:] == [found[0] * ROWS.numel() // COUNT, 0]


def _head_flops(layout: dict[str, Any]) -> list[int]:
    with megatron(**layout) as parallel_state:
        tp = layout.get("tp", 1)
        model = mm.build_gpt_model(tiny_config(tp, sequence_parallel=tp > 1), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        flops = []
        count = batch["labels"].numel()
        for rows in (torch.arange(count), torch.arange(0, count, 4)):
            model.zero_grad(set_to_none=True)
            target = batch["labels"].reshape(-1)[rows]
            with (
                m.patch_model(model) as handle,
                handle.targets(target, rows=rows),
                Flops() as counted,
            ):
                model(**batch["inputs"]).logprobs.sum().backward()
            flops.append(counted.total)
        product = 2 * model.config.hidden_size * VOCAB // tp
        return [flops[0] - flops[1], 4 * product * (count - count // 4)]


@pytest.mark.parametrize("layout", [{}, {"tp": 2}], ids=str)
def test_a_model(ranks, layout) -> None:
    for saved, expected in ranks(layout.get("tp", 1)).run(_head_flops, layout):
        assert saved == expected
