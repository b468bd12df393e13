"""Nothing that a call of a patched model makes outlives it, as nothing of an unpatched one does.

Hidden states are large, and Megatron's `--manual-gc` switches Python's cyclic collector off.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mcore_logprobs import LogprobConfig, patch_model
from mcore_logprobs.cpu_megatron import models as mm
from tests.helpers.outlived import NoCollector, outlived
from tests.megatron import test_lora
from tests.megatron.common import VOCAB, make_batch, megatron, tiny_config
from tests.megatron.test_hybrid import hybrid_config

# ---- calls --------------------------------------------------------------------------------------

Call = Callable[[Any, Any, dict[str, Any]], Any]  # of model, handle and batch


def with_labels(model: Any, handle: Any, batch: dict[str, Any]) -> Any:
    return model(**batch["inputs"], labels=batch["labels"])


def without_labels(model: Any, handle: Any, batch: dict[str, Any]) -> Any:
    return model(**batch["inputs"])


def weighted(logprobs: Tensor, entropy: Tensor | None, weights: Tensor) -> Tensor:
    return weights * logprobs.exp()


def options(model: Any, handle: Any, batch: dict[str, Any]) -> Any:
    with handle.options(temperature=batch["weights"] + 0.5, entropy=True, sum_pi_squared=True):
        return with_labels(model, handle, batch)


def policy_loss(model: Any, handle: Any, batch: dict[str, Any]) -> Any:
    with handle.policy_loss(weighted, batch["weights"].clone(), denominator=torch.tensor(3.0)):
        return with_labels(model, handle, batch)


def mapped(model: Any, handle: Any, batch: dict[str, Any]) -> Any:
    with handle.map(lambda z, w: (z.logsumexp(-1) * w, z.argmax(-1)), batch["weights"].clone()):
        return with_labels(model, handle, batch)


def targets(model: Any, handle: Any, batch: dict[str, Any]) -> Any:
    rows = torch.tensor([5, 2, 5, 0])
    with handle.targets(batch["labels"].flatten()[rows], rows=rows):
        return without_labels(model, handle, batch)


def replay(model: Any, handle: Any, batch: dict[str, Any]) -> Any:
    labels = batch["labels"].flatten()
    kept = torch.stack([labels, (labels + 1) % VOCAB], -1).flatten()
    with handle.replay((kept, 2 * torch.arange(len(labels) + 1))):
        return with_labels(model, handle, batch)


def replayed_policy(model: Any, handle: Any, batch: dict[str, Any]) -> Any:
    with handle.options(entropy=True), handle.policy_loss(weighted, batch["weights"]):
        return replay(model, handle, batch)


def divergence(kind: str, model: Any, handle: Any, batch: dict[str, Any]) -> Any:
    b, s = batch["labels"].shape
    teachers: dict[str, Callable[[], dict[str, Any]]] = {
        "logits": lambda: {"teacher_logits": torch.randn(b, s, VOCAB)},
        "hidden": lambda: {
            "teacher_hidden": torch.randn(s, b, 6),
            "teacher_weight": torch.randn(VOCAB, 6),
        },
        "topk": lambda: {
            "teacher_topk": (-1.0 - torch.rand(b, s, 2), batch["labels"][..., None].repeat(1, 1, 2))
        },
    }
    with handle.divergence("reverse", **teachers[kind]()):
        return with_labels(model, handle, batch)


def sample(model: Any, handle: Any, batch: dict[str, Any]) -> Any:
    with handle.sample(3, top_k=9):
        return without_labels(model, handle, batch)


def refused(model: Any, handle: Any, batch: dict[str, Any]) -> None:
    """An error in the middle of the head, which its caller handles."""

    def fail(logprobs: Tensor, entropy: Tensor | None, weights: Tensor) -> Tensor:
        raise KeyError("a mistake of the caller's")

    with contextlib.suppress(KeyError), handle.policy_loss(fail, batch["weights"]):
        with_labels(model, handle, batch)


BLOCKS: dict[str, Call] = {
    "no block": with_labels,
    "no labels": without_labels,
    "options": options,
    "policy loss": policy_loss,
    "map": mapped,
    "targets": targets,
    "replay": replay,
    "replayed policy loss": replayed_policy,
    **{f"divergence {k}": functools.partial(divergence, k) for k in ("logits", "hidden", "topk")},
    "sample": sample,
    "an error": refused,
}
FEW = ("no block", "no labels", "policy loss", "map")
SETTINGS: list[dict[str, Any]] = [
    {"output": "loss"},
    {"output": "loss", "fused": False},
    {"entropy": True, "target_rank": True, "compact": True, "chunk_size": 5},
    {"top_k": 7, "top_p": 0.9, "entropy": True},
    {"label_smoothing": 0.1, "saved_bytes": 0}
    if "saved_bytes" in LogprobConfig().as_dict()
    else {},
]


# ---- one call -----------------------------------------------------------------------------------


def backward(output: Any) -> Any:
    learning = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if learning:
        torch.autograd.backward([x.double().sum() for x in learning])
    return output


def forward_alone(call: Callable[[], Any]) -> list[str]:
    return outlived(call)


def forward_and_backward(call: Callable[[], Any]) -> list[str]:
    return outlived(lambda: backward(call()), result_alone=True)


def without_gradients(call: Callable[[], Any]) -> list[str]:
    with torch.no_grad():
        return outlived(call, result_alone=True)


WAYS = (forward_and_backward, forward_alone, without_gradients)


def every_way(name: str, call: Callable[[], Any]) -> list[str]:
    return [f"{name}, {way.__name__}: {left}" for way in WAYS if (left := way(call))]


# ---- models -------------------------------------------------------------------------------------


def gpt(**config: Any) -> Any:
    mtp = "mtp_num_layers" in config
    return mm.build_gpt_model(tiny_config(num_layers=1, **config), vocab_size=VOCAB, mtp=mtp)


def hybrid() -> Any:
    return mm.build_hybrid_model(
        hybrid_config({}, "M*-"), vocab_size=VOCAB, pattern="M*-", position_embedding_type="rope"
    )


def hooked() -> Any:
    model = gpt()
    model.output_layer.register_forward_hook(lambda module, args, out: (out[0] * 1.5, out[1]))
    return model


def meddled() -> Any:
    """A model that looks at its logits, with gradients and without, before its loss is formed."""
    model = gpt()

    class Looks(type(model)):  # type: ignore[misc]
        def _postprocess(self, *args: Any, **kwargs: Any) -> Any:
            if kwargs["labels"] is None:
                return super()._postprocess(*args, **kwargs)
            logits, _ = self.output_layer(kwargs["hidden_states"])
            with torch.no_grad():
                logits.max(dim=-1)
            logits.detach().mean()
            return self.compute_language_model_loss(kwargs["labels"], logits)

    model.__class__ = Looks
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "hybrid": hybrid,
    "LoRA": lambda: test_lora.build(1),
    "multi-token prediction": lambda: gpt(mtp_num_layers=1),
    "a hook on the head": hooked,
    "a model that looks at logits": meddled,
}


def of_calls(model: Any, batch: dict[str, Any], calls: dict[str, tuple[dict, Call]]) -> list[str]:
    """What the calls of a model leave behind, in each way, unpatched and patched."""
    for call in (without_labels, with_labels):
        backward(call(model, None, batch))  # caches, and gradients that are added to from now on
    found = []
    with NoCollector() as cycles:
        for call in (without_labels, with_labels):
            found += every_way("unpatched", functools.partial(call, model, None, batch))
        for name, (settings, call) in calls.items():
            with patch_model(model, LogprobConfig(**settings)) as handle:
                found += every_way(name, functools.partial(call, model, handle, batch))
    return found + cycles.held


def in_every_block() -> list[str]:
    with megatron() as parallel_state:
        calls = {
            f"{block}, fused={fused}": ({"fused": fused}, BLOCKS[block])
            for block, fused in itertools.product(BLOCKS, (True, False))
        }
        calls |= {f"{s}": (s, with_labels) for s in SETTINGS}
        return of_calls(gpt(), make_batch(parallel_state), calls)


def test_every_block(ranks):
    assert ranks(1).run(in_every_block) == [[]]


def of_every_model() -> list[str]:
    found = []
    with megatron() as parallel_state:
        for kind, build in MODELS.items():
            calls: dict[str, tuple[dict, Call]] = {n: ({}, BLOCKS[n]) for n in FEW}
            calls["loss"] = ({"output": "loss"}, with_labels)
            left = of_calls(build(), make_batch(parallel_state), calls)
            found += [f"{kind}: {x}" for x in left]
    return found


def test_every_kind_of_model(ranks):
    assert ranks(1).run(of_every_model) == [[]]
