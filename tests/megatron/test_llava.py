"""A patched LLaVAModel: Megatron's own vision-language model around a GPTModel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.megatron import head_report, patch_gpt_model
from mcore_logprobs.ops.token_stats import TokenStats
from tests.megatron.common import VOCAB, loss_of, megatron, relative, tiny_config, worst

IMAGE, PATCH, TEXT = 8, 4, 10  # an image is 2 x 2 patches and takes one text token's place
PLACE = -200  # Megatron's token for an image


def build(tp: int, tied: bool, *, encoder: bool = True, decoder: bool = True) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules

    # Each part is whole on its stage.
    parts = {"pipeline_model_parallel_size": 1, "pipeline_dtype": torch.float32}
    language = tiny_config(tp, **parts)
    language.language_model_type = "dummy"
    vision = tiny_config(tp, num_layers=1, normalization="LayerNorm", **parts)
    vision.vision_model_type = "internvit"  # clip asks for Apex's or Transformer Engine's norm
    torch.manual_seed(11)
    return LLaVAModel(
        language_transformer_config=language,
        language_transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        language_vocab_size=VOCAB,
        language_max_sequence_length=64,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=get_vit_layer_with_local_spec(),
        drop_vision_class_token=False,
        vision_projection_config=tiny_config(tp, num_layers=1, **parts),
        vision_projection_layer_spec=MLPSubmodules(
            linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
        ),
        language_position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
        pre_process=encoder,
        post_process=decoder,
        add_encoder=encoder,
        add_decoder=decoder,
        img_h=IMAGE,
        img_w=IMAGE,
        patch_dim=PATCH,
    )


def llava_step(model: Any) -> tuple[Any, torch.Tensor, dict[str, torch.Tensor]]:
    """(output, loss mask over text and image positions, gradients)."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (2, TEXT + 1), generator=generator)
    ids, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    ids[0, 2], ids[1, 5] = PLACE, PLACE
    labels[0, 1], labels[1, 4] = PLACE, PLACE
    position = torch.arange(TEXT).expand(2, TEXT)
    image_positions = 2 * 2 + 1
    length = TEXT - 1 + image_positions
    future = torch.ones(length, length).tril().logical_not()[None, None]
    model.zero_grad(set_to_none=True)
    output, mask = model(
        images=torch.randn(2, 3, IMAGE, IMAGE, generator=generator),
        input_ids=ids,
        position_ids=position,
        attention_mask=future,
        labels=labels,
        loss_mask=torch.rand(2, TEXT, generator=generator) + 0.5,
    )
    assert mask.shape == (2, length)
    (loss_of(output) * mask).sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return output, mask, grads


def compare(tp: int, tied: bool, settings: dict[str, Any]) -> dict[str, float]:
    with megatron(tp=tp):
        model = build(tp, tied)
        expected, mask, expected_grads = llava_step(model)
        modules = [
            dict(vars(m)) for m in model.modules()
        ]  # after a step, which adds what it caches
        assert any("vision_model" in name for name in expected_grads)
        with patch_gpt_model(model, LogprobConfig(**settings)):
            got, _, grads = llava_step(model)
        for module, before in zip(model.modules(), modules, strict=True):
            assert vars(module).keys() == before.keys(), type(module)
        assert isinstance(got, TokenStats) == (settings.get("output", "stats") == "stats")
        # Image positions carry Megatron's ignored label; the mask takes them out of the loss.
        kept = mask > 0
        assert 0 < kept.sum() < kept.numel()
        return {
            "loss": relative(loss_of(got)[kept], expected[kept]),
            "grad": worst(grads, expected_grads),
        }


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("settings", [{"fused": "require"}, {"output": "loss"}, {"fused": False}])
@pytest.mark.parametrize("tp", [1, 2])
def test_same_loss_and_gradients(ranks, tp, settings, tied):
    for errors in ranks(tp).run(compare, tp, tied, settings):
        assert max(errors.values()) < 1e-5


def _stages(fused: bool | str) -> int:
    """Heads of this stage that were patched."""
    with megatron(pp=2) as parallel_state:
        first = parallel_state.get_pipeline_model_parallel_rank() == 0
        model = build(1, False, encoder=first, decoder=not first)
        with patch_gpt_model(model, LogprobConfig(fused=fused)) as handle:
            with handle.options(output="loss"):
                assert head_report(model).fusable
            return len(handle.reports)


@pytest.mark.parametrize("fused", [True, "require"])
def test_a_pipeline_stage_of_encoders_alone_is_left_as_it_is(ranks, fused):
    assert ranks(2).run(_stages, fused) == [0, 1]
