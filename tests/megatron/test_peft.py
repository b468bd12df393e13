"""A LoRA around the output layer in PEFT's form: fused where it is known, left alone where not.

The class here is written for the test, with the attributes and the layout over TP of mcore-bridge's
layer for ms-swift, on Megatron's own linear layers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.groups import resolve_tp_group
from mcore_logprobs.megatron import head_report, patch_gpt_model
from tests.megatron.common import (
    VOCAB,
    loss_of,
    make_batch,
    megatron,
    relative,
    step,
    tiny_config,
    worst,
)
from tests.megatron.test_lora import one_way, said

RANKS = {"first": 6, "second": 3}


class LoraParallelLinear(nn.Module):
    """A whole on every rank, B over TP as the layer; under SP A sees the rank's own tokens."""

    def __init__(self, base: Any, names: tuple[str, ...] = ("first",)) -> None:
        super().__init__()
        from megatron.core.tensor_parallel import ColumnParallelLinear

        self.base_layer, self.disable_adapters, self.merged = base, False, False
        self.active_adapters = list(names)
        self.lora_A, self.lora_B, self.lora_dropout = (nn.ModuleDict() for _ in range(3))
        self.scaling, self.use_dora = {}, {}
        for name in names:
            rank = RANKS[name]
            down = nn.Linear(base.input_size, rank, bias=False)
            with torch.no_grad():  # the same on every rank
                generator = torch.Generator().manual_seed(rank)
                down.weight.copy_(torch.randn(down.weight.shape, generator=generator) * 0.2)
            if base.sequence_parallel:
                down.weight.sequence_parallel = True
            up = ColumnParallelLinear(
                rank,
                base.output_size,
                config=base.config,
                init_method=nn.init.normal_,
                bias=False,
                gather_output=False,
            )
            self.lora_A[name], self.lora_B[name] = down, up
            self.lora_dropout[name] = nn.Identity()
            self.scaling[name], self.use_dora[name] = 0.3 * rank, False

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out, bias = self.base_layer(x, *args, **kwargs)
        if not self.disable_adapters and not self.merged:
            for name in self.active_adapters:
                low = self.lora_A[name](self.lora_dropout[name](x))
                out = out + self.lora_B[name](low)[0] * self.scaling[name]
        return out, bias


def build(tp: int, *, sequence_parallel: bool = False, names: Any = ("first",)) -> Any:
    config = tiny_config(tp, sequence_parallel=sequence_parallel)
    model = mm.build_gpt_model(config, vocab_size=VOCAB, tied=False)
    base = model.output_layer
    torch.manual_seed(5 + torch.distributed.get_rank())
    model.output_layer = LoraParallelLinear(base, names)
    base.weight.requires_grad_(False)
    return model


def as_megatron_finishes(grads: dict[str, Tensor], sequence_parallel: bool) -> dict[str, Tensor]:
    """A's gradients after Megatron has summed those that are marked."""
    for name in grads:
        if sequence_parallel and "lora_A" in name:
            torch.distributed.all_reduce(grads[name], group=resolve_tp_group(None))
    return grads


def compare(tp: int, sequence_parallel: bool, names: tuple[str, ...]) -> dict[str, float]:
    with megatron(tp=tp) as parallel_state:
        model = build(tp, sequence_parallel=sequence_parallel, names=names)
        assert head_report(model) == (True, "")
        batch = make_batch(parallel_state)
        expected, expected_grads = step(model, batch)
        assert sum("lora_" in name for name in expected_grads) == 2 * len(names)
        expected_grads = as_megatron_finishes(expected_grads, sequence_parallel)
        errors = {}
        for settings in ({}, {"compact": True, "chunk_size": 16}):
            with patch_gpt_model(model, LogprobConfig(fused="require", entropy=True, **settings)):
                got, grads = step(model, batch)
            grads = as_megatron_finishes(grads, sequence_parallel)
            errors[f"loss {settings}"] = relative(loss_of(got), expected)
            errors[f"grad {settings}"] = worst(grads, expected_grads)
        for way in ("top_p", "policy"):
            found, own = one_way(way, model, batch, "require")
            values, real = one_way(way, model, batch, False)
            assert torch.equal(found.isfinite(), values.isfinite())
            kept = values.isfinite()
            errors[way] = relative(found[kept], values[kept])
            errors[f"{way} grad"] = worst(
                *(as_megatron_finishes(grads, sequence_parallel) for grads in (own, real))
            )
        return errors


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "names"),
    [
        (1, False, ("first", "second")),
        (2, False, ("first",)),
        (2, True, ("first", "second")),
        (3, True, ("first",)),
    ],
    ids=str,
)
def test_fused_equals_unpatched(ranks: Any, tp: int, sequence_parallel: bool, names: Any) -> None:
    for errors in ranks(tp).run(compare, tp, sequence_parallel, names):
        assert max(errors.values()) < 2e-5, errors


def dropout(layer: Any) -> None:
    layer.lora_dropout["first"] = nn.Dropout(0.5)


def dora(layer: Any) -> None:
    layer.use_dora["first"] = True


def magnitude(layer: Any) -> None:
    layer.lora_magnitude_vector = nn.ParameterDict({"first": nn.Parameter(torch.ones(VOCAB))})


def biased(layer: Any) -> None:
    layer.lora_A["first"] = nn.Linear(layer.base_layer.input_size, RANKS["first"])


def taken_out(layer: Any) -> None:
    layer.disable_adapters = layer.merged = True


REFUSED = {
    "dropout": (dropout, "drops out"),
    "dora": (dora, "a variant of LoRA"),
    "magnitude": (magnitude, "not a plain LoRA .*lora_magnitude_vector"),
    "biased": (biased, "lora_A with more than a weight"),
    "merged and disabled": (taken_out, "takes its part out of the weight"),
}


def refused() -> None:
    with megatron() as parallel_state:
        for change, reason in REFUSED.values():
            model = build(1)
            change(model.output_layer)
            with pytest.raises(ValueError, match=reason):
                patch_gpt_model(model, LogprobConfig(fused="require"))
            batch = make_batch(parallel_state)
            torch.manual_seed(11)
            expected, _ = step(model, batch)
            with said() as lines, patch_gpt_model(model, LogprobConfig()):
                torch.manual_seed(11)
                got, _ = step(model, batch)
            assert relative(loss_of(got), expected) < 1e-5
            assert len(lines) == 1


def switched_off() -> None:
    """A part that is merged into the weight, or disabled, is not added."""
    with megatron() as parallel_state:
        model, batch = build(1), make_batch(parallel_state)
        for name in ("merged", "disable_adapters"):
            setattr(model.output_layer, name, True)
            expected, _ = step(model, batch)
            with patch_gpt_model(model, LogprobConfig(fused="require")):
                got, _ = step(model, batch)
            assert relative(loss_of(got), expected) < 2e-5
            setattr(model.output_layer, name, False)
        assert relative(loss_of(step(model, batch)[0]), expected) > 1e-3


def test_what_is_not_known_takes_the_logits_path(ranks: Any) -> None:
    ranks(1).run(refused)


def test_what_is_switched_off_adds_nothing(ranks: Any) -> None:
    ranks(1).run(switched_off)


def one_of_two() -> float:
    """PEFT's set_adapter: only the active adapters' parts are added."""
    with megatron() as parallel_state:
        model, batch = build(1, names=("first", "second")), make_batch(parallel_state)
        model.output_layer.active_adapters = ["second"]
        expected, _ = step(model, batch)
        with patch_gpt_model(model, LogprobConfig(fused="require")):
            return relative(loss_of(step(model, batch)[0]), expected)


def test_an_adapter_that_is_not_active_adds_nothing(ranks: Any) -> None:
    assert ranks(1).run(one_of_two)[0] < 2e-5


def no_mark(layer: Any) -> None:
    layer.base_layer.sequence_parallel = True


def other_dtype(layer: Any) -> None:
    layer.lora_A.bfloat16()


def transposed(layer: Any) -> None:
    weight = layer.lora_B["first"].weight
    layer.lora_B["first"].weight = nn.Parameter(weight.detach().t().contiguous())


OTHERS = {
    "variant": (lambda x: setattr(x, "lora_variant", {"first": object()}), "a variant of LoRA"),
    "dropout": (lambda x: x.lora_dropout.update({"first": nn.ReLU()}), "a ReLU for dropout"),
    "scaling": (lambda x: x.scaling.update(first=torch.ones(1)), "no number for scaling"),
    "forward": (lambda x: setattr(x.lora_A["first"], "forward", abs), "a lora_A that is a Linear"),
    "class": (
        lambda x: setattr(x.lora_A["first"], "__class__", type("Other", (nn.Linear,), {})),
        "a lora_A that is a Other",
    ),
    "dtype": (other_dtype, "a lora_A of another kind or dtype"),
    "shape": (transposed, "parts of shapes"),
    "gathers": (lambda x: setattr(x.lora_B["first"], "gather_output", True), "gathers its output"),
    "mode": (lambda x: setattr(x.lora_B["first"], "parallel_mode", None), "no part in tensor par"),
    "mark": (no_mark, "without the mark sequence_parallel"),
    "hook": (
        lambda x: x.lora_A["first"].register_forward_hook(lambda *_: None),
        "hooks on the Linear inside",
    ),
}


def other_layers() -> None:
    with megatron():
        for name, (change, reason) in OTHERS.items():
            model = build(1)
            change(model.output_layer)
            found = head_report(model)
            assert not found.fusable, name
            assert reason in found.reason, found.reason


def test_other_layers_of_peft_s_form_are_not_fused(ranks: Any) -> None:
    ranks(1).run(other_layers)


def of_another_group() -> None:
    """The head's own TP group, which need not be Megatron's."""
    from mcore_logprobs.megatron.adapters import head_lora

    with megatron():
        layer = build(1).output_layer
        layer.base_layer.tp_group = torch.distributed.group.WORLD
        assert head_lora(layer).group is torch.distributed.group.WORLD


def test_a_lora_s_group_is_its_layer_s(ranks: Any) -> None:
    ranks(2).run(of_another_group)
