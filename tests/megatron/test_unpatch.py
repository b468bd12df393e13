"""A patch is put on and taken off: twice, in part, under others, on copies. No trace is left."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import pytest
import torch

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.megatron import head_patch, patch_gpt_model, unpatch_gpt_model
from mcore_logprobs.megatron.head_patch import patch_of
from mcore_logprobs.megatron.patch import patch_built
from mcore_logprobs.ops.token_stats import TokenStats
from tests.megatron.common import (
    VOCAB,
    make_batch,
    megatron,
    relative,
    step,
    tiny_config,
)


def snapshot(model: Any) -> list[dict[str, Any]]:
    return [dict(vars(m)) for m in model.modules()]


def release() -> str:
    version: str = import_module("megatron.core").__version__
    return ".".join(version.split(".")[:2])


def no_trace(tp: int, tied: bool, fused: bool) -> bool:
    with megatron(tp=tp) as parallel_state:
        model = mm.build_gpt_model(tiny_config(tp), vocab_size=VOCAB, tied=tied)
        batch = make_batch(parallel_state)
        before = snapshot(model)
        logits, (loss, grads) = model(**batch["inputs"]), step(model, batch)

        handle = patch_gpt_model(model, LogprobConfig(fused=fused))
        assert handle.active
        # README says how many attributes are replaced.
        pairs = zip(snapshot(model), before, strict=True)
        replaced = sum(a.get(k) is not b.get(k) for a, b in pairs for k in a.keys() | b.keys())
        assert replaced == {"0.16": 4, "0.19": 5}.get(release(), replaced)
        # labels=None: as if never patched, to the last bit.
        assert torch.equal(model(**batch["inputs"]), logits)
        step(model, batch)
        handle.remove()
        assert not handle.active
        handle.remove()

        after = snapshot(model)
        assert [d.keys() for d in after] == [d.keys() for d in before]
        same = [a[k] is b[k] for a, b in zip(after, before, strict=True) for k in b]
        assert all(same)
        assert torch.equal(model(**batch["inputs"]), logits)
        again, grads_again = step(model, batch)
        assert torch.equal(again, loss)
        assert all(torch.equal(grads_again[n], grads[n]) for n in grads)
        return True


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "logits"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_leaves_no_trace(ranks, tied, fused):
    assert all(ranks(2).run(no_trace, 2, tied, fused))


def idempotence() -> None:
    with megatron() as parallel_state:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        before = snapshot(model)
        outer = patch_gpt_model(model, LogprobConfig(entropy=True))
        with patch_gpt_model(model, LogprobConfig(entropy=True)) as inner:
            assert inner.active
        assert outer.active  # an inner block leaves the outer patch in place
        with pytest.raises(ValueError, match="patched already"):
            patch_gpt_model(model, LogprobConfig(entropy=False))
        assert model(**batch["inputs"], labels=batch["labels"]).entropy is not None
        unpatch_gpt_model(model)
        unpatch_gpt_model(model)
        assert not outer.active
        assert [list(d) for d in snapshot(model)] == [list(d) for d in before]
        patch_gpt_model(model, LogprobConfig(output="loss"))
        patch_gpt_model(model, LogprobConfig(output="loss")).remove()
        assert [list(d) for d in snapshot(model)] == [list(d) for d in before]


def test_patching_twice(ranks):
    ranks(1).run(idempotence)


def fails_halfway() -> None:
    """If the head of the second of two chunks fails, no chunk stays patched."""
    with megatron():
        first, second = (mm.build_gpt_model(tiny_config(), vocab_size=VOCAB) for _ in range(2))
        before = snapshot(first), snapshot(second)
        original = head_patch.kind_reason

        def fail(layer: Any) -> str:
            if layer is second.output_layer and patch_of(first) is not None:
                raise RuntimeError("no room")
            return original(layer)

        with pytest.MonkeyPatch.context() as fails:
            fails.setattr(head_patch, "kind_reason", fail)
            with pytest.raises(RuntimeError, match="no room"):
                patch_gpt_model([first, second])
        for model, found in zip((first, second), before, strict=True):
            assert patch_of(model) is None
            assert [list(d) for d in snapshot(model)] == [list(d) for d in found]


def test_a_chunk_that_fails_leaves_none_patched(ranks):
    ranks(1).run(fails_halfway)


def chunks_one_by_one() -> None:
    """A chunk of a virtual pipeline may leave `fused="require"` to the patch of all chunks."""
    with megatron():
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
        model.output_layer.register_forward_hook(lambda *_: None)
        config = LogprobConfig(fused="require")
        for stage, later in (None, False), (None, True), (0, False):
            model.vp_stage = stage
            with pytest.raises(ValueError, match="fused='require', but"):
                patch_built(model, config, checked_later=later)
            assert patch_of(model) is None
        patch_built(model, config, checked_later=True)
        with pytest.raises(ValueError, match="fused='require', but"):
            patch_gpt_model([model], config)


def test_a_chunk_s_head_may_be_checked_with_the_others(ranks):
    ranks(1).run(chunks_one_by_one)


def foreign_changes() -> None:
    """Someone else's attributes survive, and an unpatch that would drop them refuses."""
    with megatron() as parallel_state:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        theirs = lambda labels, logits: torch.zeros(())  # noqa: E731
        model.compute_language_model_loss = theirs
        with patch_gpt_model(model) as handle:
            assert isinstance(model(**batch["inputs"], labels=batch["labels"]), TokenStats)
            model.output_layer.forward = ours = model.output_layer.forward
            handle.remove()
        assert vars(model)["compute_language_model_loss"] is theirs
        assert ours.__name__ == "forward"
        assert "forward" not in vars(model.output_layer)

        handle = patch_gpt_model(model)
        model.output_layer.forward = theirs
        with pytest.raises(ValueError, match="replaced by something else"):
            handle.remove()
        assert handle.active
        del model.output_layer.forward


def test_other_peoples_patches(ranks):
    ranks(1).run(foreign_changes)


def copies_and_frozen() -> None:
    with megatron() as parallel_state:
        batch = make_batch(parallel_state)
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB, tied=False)
        with patch_gpt_model(model):
            # Methods of a copy must look at the copy's weights.
            twin = copy_without_groups(model)
            with torch.no_grad():
                twin.output_layer.weight.zero_()
            uniform = twin(**batch["inputs"], labels=batch["labels"]).logprobs
            assert relative(uniform, torch.full_like(uniform, -torch.tensor(VOCAB).log())) < 1e-6

            model.output_layer.weight.requires_grad_(False)
            _, grads = step(model, batch)
            assert "output_layer.weight" not in grads
            assert "decoder.layers.0.mlp.linear_fc1.weight" in grads
            with torch.no_grad():
                assert not model(**batch["inputs"], labels=batch["labels"]).lse.requires_grad


def copy_without_groups(model: Any) -> Any:
    """copy.deepcopy, with process groups shared (they cannot be copied)."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.distributed.ProcessGroup) or "ProcessGroup" in str(
                type(value)
            ):
                memo[id(value)] = value
    return copy.deepcopy(model, memo)


def test_copies_and_frozen_weights(ranks):
    ranks(1).run(copies_and_frozen)
