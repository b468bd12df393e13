"""AReaL's main branch: logits that its loss reuses, and the head that it puts into a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.dropin import areal
from mcore_logprobs.megatron import head_report, patch_gpt_model
from mcore_logprobs.sources.lazy import LazyLogits
from tests.dropin.frameworks import MAIN, checkout, load
from tests.engine.truths import entropy_of, take
from tests.helpers.lazy import lazy_logits
from tests.megatron.common import VOCAB, make_batch, megatron, relative, step, tiny_config, worst

HEAD = "areal.models.mcore.vocab_parallel_head"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["whole", "view", "leaf", "part", "strided"])
def test_reused_logits(shape: str, dtype: torch.dtype) -> None:
    """Only float32 results that fill their storage are overwritten; the gradient is the same."""
    leaf = torch.randn(5, 24, dtype=torch.float64).requires_grad_()
    labels = torch.tensor([3, 23, 0, -100, 7])
    upstream = torch.linspace(-1, 2, 5)
    whole = leaf.to(dtype) * 1
    logits = {
        "whole": whole,
        "view": whole.view(1, 5, 24)[0],
        "leaf": whole.detach().requires_grad_(),
        "part": (torch.cat([leaf, leaf]).to(dtype) * 1)[:5],
        "strided": (leaf.to(dtype).T.contiguous() * 1).T,
    }[shape]
    before = logits.detach().clone()
    logprobs, entropy = areal.gather_logprobs_entropy(logits, labels, 0.7, reuse_logits=True)
    reused = dtype is torch.float32 and shape in ("whole", "view")
    assert entropy.requires_grad is not reused  # as in AReaL
    (logprobs * upstream).sum().backward()
    assert torch.equal(logits.detach(), before) is not reused
    z = before.double().requires_grad_()
    log_p = (z / 0.7).log_softmax(-1)
    want = take(log_p, labels).where(labels >= 0, 0.0)
    (want * upstream).sum().backward()
    grad = logits.grad if shape == "leaf" else leaf.grad
    assert relative(logprobs, want) < 1e-6
    assert relative(grad, z.grad) < (1e-6 if dtype is torch.float32 else 1e-2)
    assert relative(entropy, entropy_of(log_p).where(labels >= 0, 0.0)) < 1e-6


def written(model: Any, fp32_output: bool, fp32_operands: bool) -> None:
    """A head of AReaL's names that computes what its does, where there is no checkout of it."""
    layer = model.output_layer
    base = type(layer)

    def _forward_impl(self: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.fp32_operands:
            kwargs |= {"bias": None}
            return base._forward_impl(self, input.float(), weight.float(), *args, **kwargs)
        out = base._forward_impl(self, input, weight, *args, **kwargs)
        return out.float() if self.fp32_output else out

    _forward_impl.__module__ = HEAD
    layer.__class__ = type("AReaLVocabParallelLMHead", (base,), {"_forward_impl": _forward_impl})
    layer.fp32_output, layer.fp32_operands = fp32_output, fp32_operands


def its_own(model: Any, fp32_output: bool, fp32_operands: bool) -> None:
    """AReaL's own head, by its own function."""
    module = load("areal", "areal/models/mcore/vocab_parallel_head.py", MAIN, name=HEAD)
    module.replace_output_layer_with_areal_lm_head(
        model, fp32_output=fp32_output, fp32_operands=fp32_operands
    )


def run_head(replace: Any, fp32_output: bool, sequence_parallel: bool) -> dict[str, float]:
    with megatron(tp=2) as parallel_state:
        config = tiny_config(2, sequence_parallel=sequence_parallel)
        model = mm.build_gpt_model(config, vocab_size=VOCAB, tied=False)
        replace(model, fp32_output, False)
        assert type(model.output_layer).__name__ == "AReaLVocabParallelLMHead"
        batch = make_batch(parallel_state)
        loss, want = step(model, batch)
        with patch_gpt_model(model, LogprobConfig(fused="require")):
            stats, grads = step(model, batch)
        # With fp32_operands its weight gradient is a product of float32 tensors: not fused.
        model.output_layer.fp32_operands = True
        assert "AReaLVocabParallelLMHead multiplies float32 copies" in head_report(model).reason
        with pytest.raises(ValueError, match="fp32_operands"):
            patch_gpt_model(model, LogprobConfig(fused="require"))
        with patch_gpt_model(model):
            unfused, _ = step(model, batch)
        # So is a function that stands in for the layer's product (its enable_fp32_lm_head).
        model.output_layer.fp32_operands = False
        model.output_layer._forward_impl = type(model.output_layer)._forward_impl
        assert "replaced the output layer's _forward_impl" in head_report(model).reason
        return {
            "loss": relative(stats.loss, loss),
            "gradients": worst(grads, want),
            "unfused": relative(unfused.loss, loss),
        }


@pytest.mark.parametrize("replace", [written, its_own] if checkout("areal") else [written])
@pytest.mark.parametrize(("fp32_output", "sequence_parallel"), [(False, True), (True, False)])
def test_areal_s_head_is_fused(
    ranks, replace: Any, fp32_output: bool, sequence_parallel: bool
) -> None:
    for errors in ranks(2).run(run_head, replace, fp32_output, sequence_parallel):
        assert max(errors.values()) < 2e-5, errors


@pytest.mark.parametrize("lazy", [False, True])
def test_rows_without_padding(lazy: bool) -> None:
    """AReaL's own copies of each sequence's rows, of real logits; lazy ones stay lazy."""
    cu_seqlens, old = torch.tensor([0, 4, 8, 16]), torch.tensor([0, 3, 7, 12])
    hidden, weight = torch.randn(18, 5, requires_grad=True), torch.randn(9, 5, requires_grad=True)
    logits = hidden @ weight.t()
    if lazy:
        logits = lazy_logits(hidden.unsqueeze(1), weight, require=True).squeeze(1)
    real = hidden.detach() @ weight.detach().t()
    kept = torch.tensor([0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    got = areal.unpad_logits(logits, 2, cu_seqlens, old)
    assert isinstance(got, LazyLogits) is lazy
    labels = torch.arange(12) % 9
    logprobs, _ = areal.gather_logprobs_entropy(got, labels, 0.7)
    expected = (real[kept] / 0.7).log_softmax(-1)[torch.arange(12), labels]
    torch.testing.assert_close(logprobs, expected)
    (on_hidden,) = torch.autograd.grad(logprobs.sum(), hidden)
    assert on_hidden.abs().sum(-1).nonzero().squeeze(1).tolist() == kept.tolist()
    assert areal.unpad_logits(torch.arange(6.0), 2).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert areal.unpad_logits(torch.arange(18.0), 2, cu_seqlens, old).tolist() == kept.tolist()


@pytest.mark.parametrize("name", ["vocab_parallel_logprobs", "vocab_parallel_token_stats"])
def test_a_chunk_is_of_the_first_dimension(monkeypatch: Any, name: str) -> None:
    seen = []
    original = getattr(areal.ours, name)

    def spy(*args: Any, **options: Any) -> Any:
        seen.append(options["chunk_size"])
        return original(*args, **options)

    monkeypatch.setattr(areal.ours, name, spy)
    logits, labels = torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.int64)
    function = areal.gather_logprobs if "logprobs" in name else areal.gather_logprobs_entropy
    function(logits, labels, chunk_size=3)
    assert seen == [15]


def test_bounds_that_do_not_fit_are_refused() -> None:
    rows = torch.arange(16.0)
    with pytest.raises(ValueError, match="cu_seqlens: expected a tensor"):
        areal.unpad_logits(rows, 0, None, torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="old_cu_seqlens: expected at most 4 rows from row 0"):
        areal.unpad_logits(rows, 0, torch.tensor([0, 4, 16]), torch.tensor([0, 5, 17]))
    # A last sequence that is all padding.
    padded, old = torch.tensor([0, 4, 8, 16]), torch.tensor([0, 3, 7])
    assert areal.unpad_logits(rows, 0, padded, old).tolist() == [0, 1, 2, 4, 5, 6, 7]
