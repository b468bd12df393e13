"""The official hook: `logprob_output_processor` gives what the patch gives.

Megatron-Core before 0.18 has no such hook in `forward`, but the processor's contract is a call with
keywords, which `call_as_megatron_does` makes at the end of a real model. Through
`GPTModel.forward(output_processor=...)` itself it is tested in `newer_checks.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.megatron import logprob_output_processor, patch_gpt_model
from mcore_logprobs.ops.token_stats import TokenStats
from tests.megatron.common import (
    VOCAB,
    loss_of,
    make_batch,
    megatron,
    relative,
    tiny_config,
    worst,
)


def call_as_megatron_does(model: Any, batch: dict[str, Any], context: Any, labels: Any) -> Any:
    """The decoder's hidden states, and the processor with the keywords of 0.18's GPTModel."""
    captured: dict[str, Any] = {}
    hook = model.decoder.register_forward_hook(lambda m, args, out: captured.update(hidden=out))
    model(**batch["inputs"])
    hook.remove()
    tied = model.share_embeddings_and_output_weights
    return logprob_output_processor(
        hidden_states=captured["hidden"],
        output_layer=model.output_layer,
        output_weight=model.shared_embedding_or_output_weight() if tied else None,
        labels=labels,
        loss_mask=None,
        input_ids=batch["inputs"]["input_ids"],
        position_ids=batch["inputs"]["position_ids"],
        attention_mask=None,
        decoder_input=None,
        inference_context=None,
        packed_seq_params=None,
        runtime_gather_output=None,
        context=context,
        compute_language_model_loss=model.compute_language_model_loss,
        scale_logits=getattr(model, "_scale_logits", lambda logits: logits),
        config=model.config,
    )


def compare(tp: int, sp: bool, tied: bool, settings: dict[str, Any]) -> dict[str, float]:
    with megatron(tp=tp) as parallel_state:
        model = mm.build_gpt_model(
            tiny_config(tp, sequence_parallel=sp), vocab_size=VOCAB, tied=tied
        )
        batch = make_batch(parallel_state)
        context = LogprobConfig(**settings)
        fired: list[str] = []
        model.output_layer.register_forward_pre_hook(lambda m, args: fired.append("pre"))

        def run(call: Any) -> tuple[Any, dict[str, Any]]:
            model.zero_grad(set_to_none=True)
            output = call()
            (loss_of(output) * batch["weights"]).sum().backward()
            return output, {n: p.grad.clone() for n, p in model.named_parameters()}

        with patch_gpt_model(model, context):
            expected, expected_grads = run(lambda: model(**batch["inputs"], labels=batch["labels"]))
        before = dict(vars(model.output_layer))
        fired.clear()
        got, grads = run(lambda: call_as_megatron_does(model, batch, context, batch["labels"]))
        assert fired == ["pre", "pre"]  # the model's own call, and the processor's
        assert vars(model.output_layer) == before
        assert isinstance(got, TokenStats) == (context.output == "stats")
        logits = call_as_megatron_does(model, batch, context, None)
        assert torch.equal(logits, model(**batch["inputs"]))
        with pytest.raises(ValueError, match="expected a LogprobConfig"):
            call_as_megatron_does(model, batch, {"entropy": True}, batch["labels"])
        return {
            "loss": relative(loss_of(got), loss_of(expected)),
            "grad": worst(grads, expected_grads),
        }


@pytest.mark.parametrize("settings", [{}, {"output": "loss"}, {"fused": False}], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, True)])
def test_equals_the_patch(ranks, tp, sp, tied, settings):
    for errors in ranks(tp).run(compare, tp, sp, tied, settings):
        assert max(errors.values()) < 1e-6
