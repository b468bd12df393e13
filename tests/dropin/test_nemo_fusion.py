"""NeMo-RL's fused path: from hidden states, and the patched forward of a real GPTModel."""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.dropin import nemo_rl
from tests.dropin.common import LAYOUTS, Rank, assert_near, next_token_logprobs, spread, zigzag
from tests.dropin.common import VOCAB as SMALL_VOCAB
from tests.dropin.test_models import FLAG, fused, grads_of
from tests.engine.truths import take
from tests.helpers.covering import every_pair
from tests.helpers.memory import TensorsMade
from tests.megatron.common import SEQ, VOCAB, make_batch, megatron, relative, tiny_config, worst

B, H = 2, 6


def run_hidden(tp: int, cp: int, d: dict[str, Tensor], chunk_size: Any) -> dict[str, Tensor]:
    r = Rank(tp, cp)
    mine = zigzag(d["hidden"], r.place, cp).transpose(0, 1)  # [s/CP, b, h]
    hidden = mine.chunk(tp)[r.tp.rank()].clone().requires_grad_()
    weight = d["weight"][r.range[0] : r.range[1]].clone().requires_grad_()
    value = nemo_rl.from_parallel_hidden_states_to_logprobs(
        hidden, weight, None, None, d["ids"], *r.range, r.tp, False, r.cp_group, chunk_size
    )
    (value * d["upstream"]).sum().backward()
    tied = nemo_rl.from_parallel_hidden_states_to_logprobs(
        hidden, None, weight, True, d["ids"], *r.range, r.tp, True, r.cp_group, chunk_size
    )
    assert not tied.requires_grad
    assert torch.equal(tied, value.detach())
    return {"value": value, "hidden": hidden.grad, "weight": weight.grad}


@every_pair(layout=LAYOUTS, lengths=((8, 8), (9, 12)), chunk_size=(None, 3))
def test_hidden_states(ranks, layout: tuple, lengths: tuple, chunk_size: int | None) -> None:
    (tp, cp), (length, padded) = layout, lengths
    d = {
        "hidden": torch.randn(B, padded, H),
        "weight": torch.randn(SMALL_VOCAB, H),
        "ids": torch.randint(0, SMALL_VOCAB, (B, length)),
        "upstream": torch.randn(B, length - 1),
    }
    leaves = {name: d[name].double().requires_grad_() for name in ("hidden", "weight")}
    want = next_token_logprobs(leaves["hidden"] @ leaves["weight"].t(), d["ids"])
    (want * d["upstream"].double()).sum().backward()
    results = ranks(tp * cp).run(run_hidden, tp, cp, d, chunk_size)
    for result in results:
        assert_near(result["value"], want.detach(), 5e-6)
    # The backward of the gather over CP sums the same loss of every rank.
    rows = [torch.cat([r["hidden"] for r in results[i:][:tp]]) for i in range(0, tp * cp, tp)]
    hidden = spread([x.transpose(0, 1) for x in rows], 1, cp, (B, padded, H))
    assert_near(hidden, leaves["hidden"].grad * cp, 1e-5)
    weight = torch.cat([sum(r["weight"].double() for r in results[i::tp]) for i in range(tp)])
    assert_near(weight, leaves["weight"].grad * cp, 1e-5)


def run_model(tp: int, cp: int, sp: bool, packed: bool, tied: bool, whole_labels: bool) -> dict:
    """Errors of the patched forward against the unpatched model's own logits."""
    with megatron(tp=tp, cp=cp) as parallel_state:
        config = tiny_config(tp, sequence_parallel=sp)
        model = mm.build_gpt_model(config, vocab_size=VOCAB, tied=tied)
        model.eval()
        batch = make_batch(parallel_state, packed=packed)
        rank, ids = parallel_state.get_context_parallel_rank(), batch["inputs"]["input_ids"]
        bounds = (0, 8, SEQ) if packed else (0, SEQ)
        place = [zigzag(torch.arange(SEQ)[None], r, cp, bounds)[0] for r in range(cp)]
        # The tokens of the whole sequence, as the ranks hold them.
        parts = [torch.empty_like(ids) for _ in range(cp)]
        torch.distributed.all_gather(
            parts, ids.contiguous(), group=parallel_state.get_context_parallel_group()
        )
        whole = torch.cat(parts, 1)[:, torch.cat(place).argsort()]
        following = torch.full_like(whole, -1)
        for start, end in itertools.pairwise(bounds):
            following[:, start : end - 1] = whole[:, start + 1 : end]
        weights = torch.rand(whole.shape, generator=torch.Generator().manual_seed(2))

        # Expected: this rank's own tokens by plain torch, each with the weight it will have.
        mine = following[:, place[rank]]
        logp = model(**batch["inputs"], runtime_gather_output=True).double().log_softmax(-1)
        own = torch.where(mine >= 0, take(logp, mine), 0.0)
        (own * weights[:, place[rank]]).sum().backward()
        expected_grads = grads_of(model)

        with fused(chunk_size=5):
            logits_after = model(**batch["inputs"])
            got = model(**batch["inputs"], labels=whole if whole_labels else ids, **FLAG)
            (got * weights[:, :-1] / cp).sum().backward()
            grads = grads_of(model)
        assert got.shape == (whole.shape[0], SEQ - 1)
        assert torch.equal(logits_after, model(**batch["inputs"]))
        # The last position has no next token: drop it from what was expected.
        here = got[:, place[rank].clamp(max=SEQ - 2)]
        here = torch.where(place[rank] < SEQ - 1, here, 0.0)
        return {
            "value": relative(here, own),
            "grad": worst(grads, expected_grads),
            "zeros": int((got == 0).sum()) - (len(bounds) - 2) * whole.shape[0],
        }


@every_pair(
    layout=((1, 1, False), (2, 1, False), (2, 1, True), (1, 2, False), (2, 2, True)),
    packed=(False, True),
    tied=(True, False),
)
def test_patched_forward(ranks, layout: tuple, packed: bool, tied: bool) -> None:
    tp, cp, _ = layout
    for errors in ranks(tp * cp).run(run_model, *layout, packed, tied, False):
        assert errors["value"] < 1e-5
        assert errors["grad"] < 1e-5
        assert errors["zeros"] == 0


def test_whole_labels_over_cp(ranks) -> None:
    for errors in ranks(2).run(run_model, 1, 2, False, False, True, True):
        assert max(errors.values()) < 1e-5


def theirs_over_ours(model: Any, batch: dict[str, Any]) -> None:
    """What NeMo-RL's own set-up does to the class, once the switch is off."""
    from megatron.core.models.gpt import GPTModel

    ours, plain = GPTModel.forward, model(**batch["inputs"])
    GPTModel._original_forward_for_linear_ce_fusion = ours
    GPTModel._linear_ce_fusion_forward_patched = True
    GPTModel.forward = lambda self, **given: self._original_forward_for_linear_ce_fusion(**given)
    try:
        assert torch.equal(model(**batch["inputs"]), plain)
        with pytest.raises(ValueError, match="replaced by something else after the patch"):
            nemo_rl.unpatch_gpt_model_forward_for_linear_ce_fusion()
    finally:
        GPTModel.forward = ours
        del GPTModel._original_forward_for_linear_ce_fusion
        del GPTModel._linear_ce_fusion_forward_patched


def class_patch() -> None:
    with megatron() as parallel_state:
        from megatron.core.models.gpt import GPTModel

        batch = make_batch(parallel_state)
        ids = batch["inputs"]["input_ids"]
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
        before, names = GPTModel.forward, set(vars(GPTModel))
        nemo_rl.unpatch_gpt_model_forward_for_linear_ce_fusion()  # nothing to undo
        nemo_rl.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=4, temperature=0.5)
        asked = GPTModel._linear_ce_fusion_sampling
        nemo_rl.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=5)
        assert GPTModel._linear_ce_fusion_sampling == asked  # only the chunk size is another
        nothing = SimpleNamespace(temperature=0.5, top_k=None, top_p=None)
        nemo_rl.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=5, sampling_params=nothing)
        assert GPTModel._linear_ce_fusion_sampling == asked  # None is off
        nemo_rl.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=7, temperature=1.0)
        assert GPTModel._linear_ce_fusion_sampling != asked
        assert GPTModel._linear_ce_fusion_chunk_size == 7
        parameters = inspect.signature(GPTModel.forward).parameters
        assert set(parameters) == set(inspect.signature(before).parameters) | {
            *FLAG,
            "is_spec_decode",
            "sampling_params",
            "temperature",
        }
        with pytest.raises(ValueError, match="expected labels"):
            model(**batch["inputs"], **FLAG)
        state = dict(vars(model))
        with torch.no_grad():
            direct = nemo_rl._gpt_forward_with_linear_ce_fusion(
                model, ids, batch["inputs"]["position_ids"], None, labels=ids, **FLAG
            )
            assert torch.equal(model(**batch["inputs"], labels=ids, **FLAG), direct)
            plain = nemo_rl._gpt_forward_with_linear_ce_fusion(
                model, ids, batch["inputs"]["position_ids"], None
            )
            assert torch.equal(plain, model(**batch["inputs"]))
        assert dict(vars(model)) == state  # the head's patch is gone after each call
        theirs_over_ours(model, batch)
        nemo_rl.unpatch_gpt_model_forward_for_linear_ce_fusion()
        assert GPTModel.forward is before
        assert set(vars(GPTModel)) == names
        with pytest.raises(ValueError, match="chunk_size: expected an int >= 1, got 0"):
            nemo_rl.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=0)
        # NeMo-RL's own patch leaves its mark; its forward would ignore a temperature.
        GPTModel._linear_ce_fusion_forward_patched = True
        try:
            with pytest.raises(ValueError, match=r"NeMo-RL's own patch .* is on and ignores them"):
                nemo_rl.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=4, temperature=0.5)
        finally:
            del GPTModel._linear_ce_fusion_forward_patched
        assert set(vars(GPTModel)) == names


def test_the_class_is_as_before(ranks) -> None:
    ranks(1).run(class_patch)


def largest_tensor() -> int:
    with megatron() as parallel_state:
        model = mm.build_gpt_model(tiny_config(), vocab_size=48 * VOCAB)
        batch = make_batch(parallel_state)
        with fused(chunk_size=2), TensorsMade() as made:
            model(**batch["inputs"], labels=batch["inputs"]["input_ids"], **FLAG)
        return max(tensor.nbytes for tensor in made.made)


@pytest.mark.own_sizes
def test_no_logits_are_held(ranks) -> None:
    logits = 2 * SEQ * 48 * VOCAB * 4
    assert ranks(1).run(largest_tensor)[0] < logits / 4
