"""The CPU runtime: reversible, and real models that agree at every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.cpu_megatron import runtime
from mcore_logprobs.cpu_megatron.layers import CpuNorm, token_positions
from mcore_logprobs.cpu_megatron.training import cpu_devices
from mcore_logprobs.megatron.versions import takes
from tests.megatron.common import (
    SEQ,
    VOCAB,
    make_batch,
    megatron,
    relative,
    step,
    tiny_config,
    zigzag,
)


def shims() -> None:
    import megatron.core.models.gpt  # noqa: F401
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer
    from megatron.core.tensor_parallel import random as tracker
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    owners = [torch, torch.cuda, torch.cuda.random, torch.Tensor, torch.nn.Module, dist]
    owners += [tracker, mamba_mixer, mamba_context_parallel, multi_latent_attention, moe_utils]
    before = [dict(vars(owner)) for owner in owners]
    for _ in range(2):
        with runtime.cpu_runtime() as active:
            assert active
            with runtime.cpu_runtime() as inner:
                assert inner
            assert torch.zeros(2, device="cuda").device.type == "cpu"
            assert torch.tensor([1], pin_memory=True).cuda().device.type == "cpu"
            pinned = torch.empty_like(torch.zeros(2), device="cuda", pin_memory=True)
            assert pinned.device.type == "cpu"
            assert torch.device(torch.cuda.current_device()).type == "cpu"
        assert [dict(vars(owner)) for owner in owners] == before
    try:
        with runtime.cpu_runtime():
            raise KeyError
    except KeyError:
        pass
    assert [dict(vars(owner)) for owner in owners] == before


def test_shims_leave_no_trace(ranks):
    ranks(1).run(shims)


def test_does_nothing_where_a_gpu_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = dict(vars(torch.cuda))
    with runtime.cpu_runtime() as active:
        assert not active
        assert dict(vars(torch.cuda)) == before


def test_a_counted_device_is_no_gpu(monkeypatch):
    """A build for CUDA may answer by the count of devices, which is a shim's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: torch.cuda.device_count() > 0)
    with cpu_devices() as active:
        assert active
        assert torch.cuda.device_count() == 1
        assert not runtime.gpu_present()


def summed_gradients(layout: dict[str, Any], sp: bool, packed: bool) -> dict[str, torch.Tensor]:
    """The whole batch's loss and gradients: of a parameter split over TP the norm, else all."""
    with megatron(**layout) as parallel_state:
        model = mm.build_gpt_model(tiny_config(sequence_parallel=sp), vocab_size=VOCAB)
        batch = make_batch(parallel_state, packed=packed)
        loss, grads = step(model, batch)
        tp_group = parallel_state.get_tensor_model_parallel_group()
        cp_group = parallel_state.get_context_parallel_group()
        result = {"loss": (loss.detach() * batch["weights"]).sum()}
        dist.all_reduce(result["loss"], group=cp_group)
        for name, param in model.named_parameters():
            grad = grads[name]
            dist.all_reduce(grad, group=cp_group)
            if getattr(param, "sequence_parallel", False):
                dist.all_reduce(grad, group=tp_group)
            if getattr(param, "tensor_model_parallel", False):
                grad = grad.double().pow(2).sum()
                dist.all_reduce(grad, group=tp_group)
            result[name] = grad
        return result


LAYOUTS = [
    ({"tp": 2}, False),
    ({"tp": 2}, True),
    ({"cp": 2}, False),
    ({"cp": 4}, False),
    ({"tp": 2, "cp": 2}, True),
]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize(("layout", "sp"), LAYOUTS)
def test_layouts_agree(ranks, layout, sp, packed):
    one = ranks(1).run(summed_gradients, {}, False, packed)[0]
    world = layout.get("tp", 1) * layout.get("cp", 1)
    for many in ranks(world).run(summed_gradients, layout, sp, packed):
        for name, expected in one.items():
            assert relative(many[name], expected) < 1e-5, name


def own_attention_and_norm() -> float:
    """Against Megatron's own local layers, where those work: one process, no packing."""
    with megatron() as parallel_state:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        config = tiny_config()
        batch = make_batch(parallel_state)
        ours = mm.build_gpt_model(config, vocab_size=VOCAB)
        original = mm.gpt_block_spec
        mm.gpt_block_spec = lambda config, vp_stage: get_gpt_layer_local_spec(
            normalization="RMSNorm"
        )
        try:
            theirs = mm.build_gpt_model(config, vocab_size=VOCAB)
        finally:
            mm.gpt_block_spec = original
        assert type(theirs.decoder.layers[0].self_attention.core_attention).__name__ == (
            "DotProductAttention"
        )
        mask = torch.ones(24, 24).tril().logical_not()[None, None]
        theirs.load_state_dict(ours.state_dict(), strict=False)
        expected = theirs(**{**batch["inputs"], "attention_mask": mask})
        return relative(ours(**batch["inputs"]), expected)


def test_same_as_megatrons_own_layers(ranks):
    assert ranks(1).run(own_attention_and_norm)[0] < 1e-5


def positions_of_megatron(cp: int) -> None:
    with megatron(cp=cp) as parallel_state:
        from megatron.core.utils import get_batch_on_this_cp_rank

        rank = parallel_state.get_context_parallel_rank()
        whole = torch.arange(SEQ)[None]
        newer = {"is_hybrid_cp": False} if takes(get_batch_on_this_cp_rank, "is_hybrid_cp") else {}
        expected = get_batch_on_this_cp_rank({"tokens": whole.clone()}, **newer)["tokens"][0]
        seq, position = token_positions(SEQ // cp, rank, cp, None, torch.device("cpu"))
        assert torch.equal(position, expected)
        assert torch.equal(zigzag(whole, rank, cp)[0], expected)
        assert not seq.any()


def test_zigzag_is_megatrons(ranks):
    ranks(4).run(positions_of_megatron, 4)


def test_unsupported_settings_are_refused():
    class Config:
        normalization = "RMSNorm"
        layernorm_zero_centered_gamma = True

    with pytest.raises(ValueError, match="zero-centered"):
        CpuNorm(Config(), 4)


def wrong_layout() -> None:
    from mcore_logprobs.cpu_megatron.runtime import cpu_runtime

    with cpu_runtime(), pytest.raises(ValueError, match="divisible by tp"):
        mm.init_model_parallel(tp=3)


def test_world_size_must_fit(ranks):
    ranks(2).run(wrong_layout)
