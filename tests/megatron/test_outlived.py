"""Nothing that a call of a patched model makes outlives it, as nothing of an unpatched one does.

Hidden states are large, and Megatron's `--manual-gc` switches Python's cyclic collector off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mcore_logprobs import LogprobConfig, logprob_output_processor, patch_model, unpatch_model
from mcore_logprobs.cpu_megatron import models as mm
from tests.helpers.outlived import NoCollector, outlived, shapes
from tests.megatron import test_fsdp, test_lora, test_schedule_plan
from tests.megatron.common import SEQ, VOCAB, make_batch, megatron, tiny_config
from tests.megatron.test_hybrid import hybrid_config
from tests.megatron.test_output_processor import call_as_megatron_does
from tests.megatron.test_unpatch import copy_without_groups

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
            "teacher_topk": (-1.0 - torch.rand(b, s, 2), torch.randn(b, s, VOCAB).topk(2).indices)
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
    layout = {"tp": config.pop("tp", 1), "num_layers": 1}
    how = {"tied": config.pop("tied", True), "mtp": "mtp_num_layers" in config}
    return mm.build_gpt_model(tiny_config(**layout, **config), vocab_size=VOCAB, **how)


def scaled() -> Any:
    """MuP scales its logits (0.18 and later)."""
    known = {field.name for field in dataclasses.fields(tiny_config())}
    return gpt(**({"use_mup": True, "mup_output_mult": 0.25} if "use_mup" in known else {}))


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
    model = gpt(tied=False)

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
    "MuP": scaled,
    "LoRA": lambda: test_lora.build(1),
    "multi-token prediction": lambda: gpt(mtp_num_layers=1),
    "a hook on the head": hooked,
    "a model that looks at logits": meddled,
}


def of_calls(model: Any, batch: dict[str, Any], calls: dict[str, tuple[dict, Call]]) -> list[str]:
    """What the calls of a model leave behind, in each way, unpatched and patched."""
    # In one order on all ranks: that of a set of functions is of their addresses.
    unlabelled = (call for _, call in calls.values() if call is without_labels)
    plain = list(dict.fromkeys((with_labels, *unlabelled)))
    for call in plain:
        backward(call(model, None, batch))  # caches, and gradients that are added to from now on
    found = []
    with NoCollector() as cycles:
        for call in plain:
            found += every_way("unpatched", functools.partial(call, model, None, batch))
        for name, (settings, call) in calls.items():
            with patch_model(model, LogprobConfig(**settings)) as handle:
                found += every_way(name, functools.partial(call, model, handle, batch))
    return found + cycles.held


def every_block(tp: int) -> list[str]:
    with megatron(tp=tp) as parallel_state:
        calls = {
            f"{block}, fused={fused}": ({"fused": fused}, BLOCKS[block])
            for block, fused in itertools.product(BLOCKS, (True, False))
            if tp == 1 or "divergence" not in block  # whose teachers are not cut here
        }
        calls |= {f"{settings}": (settings, with_labels) for settings in SETTINGS}
        model = gpt(tp=tp, sequence_parallel=tp > 1)
        return of_calls(model, make_batch(parallel_state), calls)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.night)])
def test_every_block(ranks, tp):
    assert ranks(tp).run(every_block, tp, timeout=400) == [[]] * tp


def every_model() -> list[str]:
    found = []
    with megatron() as parallel_state:
        for kind, build in MODELS.items():
            few = [x for x in FEW if x != "no labels" or kind != "multi-token prediction"]
            calls: dict[str, tuple[dict, Call]] = {x: ({}, BLOCKS[x]) for x in few}
            calls["loss"] = ({"output": "loss"}, with_labels)
            left = of_calls(build(), make_batch(parallel_state), calls)
            found += [f"{kind}: {x}" for x in left]
    return found


def test_every_kind_of_model(ranks):
    assert ranks(1).run(every_model, timeout=400) == [[]]


# ---- the model itself, and the ways to call it --------------------------------------------------


def whole_lives() -> dict[str, list[str]]:
    """What models leave behind that were built, called and dropped."""
    with megatron() as parallel_state:
        batch = make_batch(parallel_state)

        def unpatched() -> None:
            backward(with_labels(gpt(), None, batch))

        def patched() -> None:
            model = gpt()
            handle = patch_model(model)
            backward(policy_loss(model, handle, batch))

        def undone() -> None:
            model = gpt()
            with patch_model(model) as handle:
                backward(with_labels(model, handle, batch))

        def undone_by_name() -> None:
            model = gpt()
            patch_model(model)
            backward(with_labels(model, None, batch))
            unpatch_model(model)

        def copied() -> None:
            model = gpt()
            handle = patch_model(model)
            backward(with_labels(copy_without_groups(model), handle, batch))

        def processed() -> None:
            backward(call_as_megatron_does(gpt(), batch, LogprobConfig(), batch["labels"]))

        found: dict[str, list[str]] = {}
        for life in (unpatched, patched, undone, undone_by_name, copied, processed):
            life()
            with NoCollector() as cycles:
                left = outlived(life, known=shapes(found.get("unpatched", ())))
            found[life.__name__] = left + cycles.held
        return found


def test_a_patched_model_goes_when_it_is_dropped(ranks):
    (found,) = ranks(1).run(whole_lives)
    own = set(found["unpatched"])  # Megatron's rotary embeddings are cached for good
    assert len(own) < 4
    assert all(own.issuperset(left) for left in found.values()), found


def without_its_model() -> None:
    """A layer that outlives its patched model computes real logits; a dropped layer is no error."""
    with megatron() as parallel_state:
        batch = make_batch(parallel_state)
        model = gpt(tied=False)
        other = copy_without_groups(model.output_layer)
        patch_model(model)
        layer = model.output_layer
        model.output_layer = other
        assert not isinstance(model(**batch["inputs"], labels=batch["labels"]), Tensor)
        model.output_layer = layer
        del model
        gc.collect()
        hidden = torch.randn(5, 2, layer.weight.shape[1])
        assert torch.equal(layer(hidden)[0], other(hidden)[0])
        model = gpt(tied=False)
        handle = patch_model(model)
        model.output_layer = other
        assert not isinstance(model(**batch["inputs"], labels=batch["labels"]), Tensor)
        with handle.options(fused="require"), pytest.raises(ValueError, match="patch the model ag"):
            model(**batch["inputs"], labels=batch["labels"])
        handle.remove()
        assert isinstance(model(**batch["inputs"], labels=batch["labels"]), Tensor)


def test_a_layer_without_its_model(ranks):
    ranks(1).run(without_its_model)


# ---- FSDP2 and Megatron's schedules -------------------------------------------------------------


def by_processor(model: Any, handle: Any, batch: dict[str, Any]) -> Any:
    """The official hook, as a release that has it calls it."""

    def postprocess(**call: Any) -> Any:
        return logprob_output_processor(
            hidden_states=call["hidden_states"],
            output_layer=model.output_layer,
            labels=call["labels"],
            context=LogprobConfig(fused="require"),
            config=model.config,
        )

    handle.remove()
    model._postprocess = postprocess
    try:
        return with_labels(model, None, batch)
    finally:
        del model._postprocess


def more_than_unpatched(found: dict[str, list[str]]) -> list[str]:
    """What is left of other shapes than the unpatched model leaves.

    That are gradients, and in the combined schedule, whose nodes are cycles, the losses.
    """
    own = shapes(found["unpatched"])
    more = {n: [x for x in left if shapes([x]) - own] for n, left in found.items()}
    return [f"{name}: {left}" for name, left in more.items() if left]


def of_fsdp2(head: str) -> list[str]:
    """With a head of its own its weight is gathered around the loss once more."""
    with megatron() as parallel_state:
        model = gpt(tied=head == "root")
        test_fsdp.wrap(model, parallel_state.get_data_parallel_group(), head=head)
        batch = make_batch(parallel_state)
        calls = [with_labels, policy_loss, mapped, *([by_processor] if head == "own" else [])]
        found = {}
        for name, call in (("unpatched", with_labels), *((c.__name__, c) for c in calls)):
            handle = None if name == "unpatched" else patch_model(model)
            run = functools.partial(call, model, handle, batch)
            backward(run())
            with NoCollector() as cycles:
                left = outlived(lambda run=run: backward(run()))
                with torch.no_grad():
                    left += outlived(run)
            found[name] = left + cycles.held
        return more_than_unpatched(found)


@pytest.mark.parametrize("head", ["own", pytest.param("root", marks=pytest.mark.night)])
def test_fsdp2(ranks, head):
    assert ranks(2).run(of_fsdp2, head, timeout=400) == [[], []]


def by_schedule(kind: str) -> list[str]:
    """A step of Megatron's pipelines (1F1B), or of its combined schedule on one rank."""
    combined = kind == "combined"
    around = test_schedule_plan.schedule_on_a_cpu if combined else contextlib.nullcontext
    with megatron(pp=1 if combined else 2) as parallel_state, around():
        config = tiny_config(num_layers=2)
        (model,) = mm.build_gpt_chunks(config, vocab_size=VOCAB)
        config.overlap_moe_expert_parallel_comm = combined
        batches = [make_batch(parallel_state, seed=seed) for seed in range(3)]

        def in_head(output: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
            return output.policy_loss, output.policy_loss.detach().clone()

        def train(report: Any, block: Any = None) -> None:
            if combined:
                test_schedule_plan.train_step(config, model, batches, report, block)
            else:
                step_of_a_pipeline(model, batches, report, block)

        found: dict[str, list[str]] = {}
        for name in ("unpatched", "patched", "policy loss"):
            handle = None if name == "unpatched" else patch_model(model)
            block, report = None, test_schedule_plan.weighted
            if name == "policy loss":

                def block(batch: dict[str, Any], handle: Any = handle) -> Any:
                    return handle.policy_loss(weighted, batch["weights"])

                report = in_head
            train(report, block)
            with NoCollector() as cycles:
                known = shapes(found.get("unpatched", ()))
                left = outlived(lambda b=block, r=report: train(r, b), known=known)
            found[name] = left + cycles.held
        return more_than_unpatched(found)


def step_of_a_pipeline(model: Any, batches: list[Any], report: Any, block: Any) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(iterator: Any, model: Any) -> Any:
        batch = next(iterator)
        with contextlib.nullcontext() if block is None else block(batch):
            output = with_labels(model, None, batch)
        return output, lambda out: report(out, batch)

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=SEQ,
        micro_batch_size=2,
        forward_only=False,
    )


@pytest.mark.parametrize("kind", ["combined", pytest.param("pipeline", marks=pytest.mark.night)])
def test_schedules(ranks, kind):
    world = 1 if kind == "combined" else 2
    assert ranks(world).run(by_schedule, kind, timeout=400) == [[]] * world
