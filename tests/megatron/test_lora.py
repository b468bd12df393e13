"""A LoRA around the output layer: fused exactly where it is known, left alone where it is not.

The classes here are written for the test, with the names, attributes and layout over TP of
Megatron-Bridge's `LoRALinear` and `ParallelLinearAdapter`, on Megatron's own linear layers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_logprobs import vocab_parallel_topk
from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.groups import resolve_tp_group
from mcore_logprobs.megatron import head_report, patch_gpt_model
from mcore_logprobs.megatron import heads as heads_module
from mcore_logprobs.megatron.deferred import DeferredLogits
from tests.megatron.common import (
    VOCAB,
    loss_of,
    make_batch,
    megatron,
    patched_errors,
    relative,
    step,
    tiny_config,
    worst,
)

RANK = 6  # divides by TP 1, 2 and 3


class ParallelLinearAdapter(nn.Module):
    """A of `[RANK/TP, h]` rows per rank, its output gathered; B split as the vocabulary is."""

    def __init__(self, base: Any, *, dropout: float = 0.0) -> None:
        super().__init__()
        from megatron.core.tensor_parallel import ColumnParallelLinear

        self.dim, self.alpha = RANK, 9.0
        self.activation = nn.Identity()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        config, sequence_parallel = base.config, base.config.sequence_parallel
        self.disable_sequence_parallel_comm = not sequence_parallel
        config.sequence_parallel = False
        common = {"config": config, "init_method": nn.init.normal_, "bias": False}
        self.linear_in = ColumnParallelLinear(
            base.input_size,
            RANK,
            gather_output=True,
            disable_grad_reduce=sequence_parallel,
            **common,
        )
        self.linear_out = ColumnParallelLinear(
            RANK, base.output_size, gather_output=False, **common
        )
        config.sequence_parallel = sequence_parallel
        with torch.no_grad():
            for layer in (self.linear_in, self.linear_out):
                layer.weight.mul_(0.2)

    def forward(self, x: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        x = self.dropout(x)
        if not self.disable_sequence_parallel_comm:
            x = gather_from_sequence_parallel_region(x)
        x = self.activation(self.linear_in(x)[0]) * (self.alpha / self.dim)
        return self.linear_out(x)[0]


class LoRALinear(nn.Module):
    def __init__(self, to_wrap: Any, adapter: nn.Module) -> None:
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, adapter
        self._adapter_enabled = True

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out, bias = self.to_wrap(x, *args, **kwargs)
        return (out + self.adapter(x) if self._adapter_enabled else out), bias


def lora_put_on_a_patched_model() -> None:
    """The log line says: patch the model again."""
    with megatron() as parallel_state:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB, tied=False)
        batch, config = make_batch(parallel_state), LogprobConfig(fused="require")
        before, base = dict(vars(model)), model.output_layer
        with patch_gpt_model(model, config) as outer:
            model.output_layer = LoRALinear(base, ParallelLinearAdapter(base))
            with pytest.raises(ValueError, match="patch the model again"):
                model(**batch["inputs"], labels=batch["labels"])
            with outer.options(temperature=0.5), patch_gpt_model(model, config) as again:
                assert again.active
                stats = model(**batch["inputs"], labels=batch["labels"])
            assert "forward" not in vars(base)
            assert "forward" in vars(model.output_layer)
            logits = model(**batch["inputs"]) / 0.5
            expected = logits.log_softmax(-1).gather(-1, batch["labels"].clamp(min=0)[..., None])
            counted = batch["labels"] != -100
            torch.testing.assert_close(stats.logprobs[counted], expected[..., 0][counted])
        assert not outer.active
        assert "forward" not in vars(model.output_layer)
        model.output_layer = base
        assert dict(vars(model)) == before


def test_a_lora_put_on_a_patched_model(ranks):
    ranks(1).run(lora_put_on_a_patched_model)


def build(tp: int, *, sequence_parallel: bool = False, dropout: float = 0.0, **config: Any) -> Any:
    """A tiny GPT with frozen layers and a LoRA on its head."""
    made = tiny_config(tp, sequence_parallel=sequence_parallel, **config)
    model = mm.build_gpt_model(made, vocab_size=VOCAB, tied=False)
    base = model.output_layer
    torch.manual_seed(5 + torch.distributed.get_rank())
    model.output_layer = LoRALinear(base, ParallelLinearAdapter(base, dropout=dropout))
    base.weight.requires_grad_(False)
    return model


def compare(tp: int, sequence_parallel: bool) -> dict[str, float]:
    with megatron(tp=tp) as parallel_state:
        model = build(tp, sequence_parallel=sequence_parallel)
        assert head_report(model) == (True, "")
        batch = make_batch(parallel_state)
        _, plain = step(model, batch)
        names = [name for name in plain if "adapter" in name]
        assert len(names) == 2
        assert all(plain[name].abs().max() > 1e-3 for name in names)
        assert not any("output_layer.to_wrap" in name for name in plain)
        return against_unpatched(model, batch)


def against_unpatched(model: Any, batch: dict[str, Any]) -> dict[str, float]:
    expected, expected_grads = step(model, batch)
    seen: list[Any] = []
    compute = DeferredLogits.materialize
    DeferredLogits.materialize = lambda self: seen.append(self) or compute(self)  # type: ignore[method-assign]
    errors = {}
    try:
        for settings in ({}, {"compact": True, "chunk_size": 16}):
            with patch_gpt_model(model, LogprobConfig(fused="require", entropy=True, **settings)):
                got, grads = step(model, batch)
            errors[f"loss {settings}"] = relative(loss_of(got), expected)
            errors[f"grad {settings}"] = worst(grads, expected_grads)
    finally:
        DeferredLogits.materialize = compute  # type: ignore[method-assign]
    assert not seen, "real logits were computed"
    return errors


@pytest.mark.parametrize(
    ("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (3, True)], ids=str
)
def test_fused_equals_unpatched(ranks, tp, sequence_parallel):
    for errors in ranks(tp).run(compare, tp, sequence_parallel):
        assert max(errors.values()) < 2e-5, errors


def topk_of_row(z: Tensor, weight: Tensor) -> Tensor:
    values, ids = vocab_parallel_topk(z, 4, tp_group=resolve_tp_group(None))
    return (values * (ids % 5 + 1)).sum(-1) * weight


# By name: the config; what the handle is asked for; per-token values from what the model returns.
WAYS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "top_p": ({"top_p": 0.9}, None, lambda out: out.logprobs),
    "top_k": (
        {"top_k": 9, "entropy": True, "temperature": 0.7, "compact": True},
        None,
        lambda out: out.logprobs + out.entropy,
    ),
    "policy": (
        {},
        lambda handle, batch: handle.policy_loss(lambda logp, _, w: -logp * w, batch["weights"]),
        lambda out: out.policy_loss,
    ),
    "map": (
        {},
        lambda handle, batch: handle.map(topk_of_row, batch["weights"]),
        lambda out: out,
    ),
    "targets": (
        {},
        lambda handle, batch: handle.targets(batch["labels"]),
        lambda out: out.logprobs,
    ),
}


def one_way(way: str, model: Any, batch: dict, fused: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """(values, -inf where a target was left out; gradients of their weighted sum)."""
    settings, ask, values_of = WAYS[way]
    torch.manual_seed(11)  # of dropout
    model.zero_grad(set_to_none=True)
    labels = None if way == "targets" else batch["labels"]
    handle = patch_gpt_model(model, LogprobConfig(fused=fused, **settings))
    with handle, contextlib.nullcontext() if ask is None else ask(handle, batch):
        values = values_of(model(**batch["inputs"], labels=labels))
    weights = batch["weights"] if values.dim() else 1.0
    (torch.where(values.isfinite(), values, 0.0) * weights).sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return values.detach(), grads


def fused_and_not(tp: int, sequence_parallel: bool) -> dict[str, float]:
    """Each way on the fused path against the logits path, patched both."""
    with megatron(tp=tp) as parallel_state:
        model = build(tp, sequence_parallel=sequence_parallel)
        batch = make_batch(parallel_state)
        errors = {}
        with pytest.raises(ValueError, match="invariant_segments: expected None with a LoRA"):
            patch_gpt_model(model, LogprobConfig(invariant_segments=tp))
        for way in WAYS:
            (found, grads), (expected, expected_grads) = (
                one_way(way, model, batch, fused) for fused in ("require", False)
            )
            kept = expected.isfinite()
            assert torch.equal(found.isfinite(), kept)
            assert kept.any()
            assert kept.all() == (way not in ("top_p", "top_k"))
            errors[way] = relative(found[kept], expected[kept])
            errors[f"{way} grad"] = worst(grads, expected_grads)
        return errors


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True), (3, False)], ids=str)
def test_top_p_and_policy_loss(ranks, tp, sequence_parallel):
    for errors in ranks(tp).run(fused_and_not, tp, sequence_parallel):
        assert max(errors.values()) < 2e-5, errors


def switched_off() -> dict[str, float]:
    with megatron() as parallel_state:
        model = build(1)
        batch = make_batch(parallel_state)
        model.output_layer._adapter_enabled = False
        return against_unpatched(model, batch)


def test_an_adapter_that_is_switched_off_adds_nothing(ranks):
    errors = ranks(1).run(switched_off)[0]
    assert max(errors.values()) < 2e-5, errors


def dropout(model: Any) -> None:
    model.output_layer.adapter.dropout = nn.Dropout(0.5)


def activation(model: Any) -> None:
    model.output_layer.adapter.activation = nn.ReLU()


def magnitude(model: Any) -> None:
    """As DoRA's: the same two parts and one more parameter, which the forward may use."""
    model.output_layer.adapter.weight_magnitude = nn.Parameter(torch.ones(VOCAB))


def other_name(model: Any) -> None:
    class DoRALinear(LoRALinear):
        pass

    model.output_layer.__class__ = DoRALinear


def other_linear(model: Any) -> None:
    class Linear(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), None

    adapter = model.output_layer.adapter
    adapter.linear_in = Linear(adapter.linear_in.input_size, RANK, bias=False)


def inner_hook(model: Any) -> None:
    model.output_layer.adapter.linear_in.register_forward_pre_hook(lambda *args: None)


CASES = {
    "dropout": (dropout, "drops out"),
    "activation": (activation, "activation"),
    "magnitude": (magnitude, "weight_magnitude"),
    "other name": (other_name, "DoRALinear"),
    "other linear": (other_linear, "linear_in that is not Megatron's"),
    "inner hook": (inner_hook, "hooks on the ColumnParallelLinear"),
}


def fall_back(case: str) -> dict[str, dict[str, Any]]:
    """What an adapter that is not known for certain gives, patched against unpatched."""
    change, reason = CASES[case]
    with megatron() as parallel_state:
        model = build(1)
        change(model)
        fusable, why = head_report(model)
        assert not fusable
        assert reason in why, why
        with pytest.raises(ValueError, match="fused='require'"):
            patch_gpt_model(model, LogprobConfig(fused="require"))
        batch = make_batch(parallel_state)
        torch.manual_seed(11)
        expected, expected_grads = step(model, batch)
        with said() as lines, patch_gpt_model(model, LogprobConfig()):
            for _ in range(2):
                torch.manual_seed(11)
                got, grads = step(model, batch)
        errors = {"loss": relative(loss_of(got), expected), "grad": worst(grads, expected_grads)}
        result = {"loss": {"errors": errors, "lines": lines}}
        for way in WAYS:
            with said() as lines:
                found, grads = one_way(way, model, batch, True)
            values, own = one_way(way, model, batch, False)
            assert torch.equal(found, values), way
            result[way] = {"errors": {"grad": worst(grads, own)}, "lines": lines}
        return result


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """The package's log lines within it, as if none had been said before."""
    heads_module._said.clear()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcore_logprobs").addHandler(handler)
    yield lines
    logging.getLogger("mcore_logprobs").removeHandler(handler)


@pytest.mark.parametrize("case", CASES)
def test_other_adapters_take_the_logits_path(ranks, case):
    for result in ranks(1).run(fall_back, case)[0].values():
        assert max(result["errors"].values()) < 1e-5, result
        assert len(result["lines"]) == 1
        assert CASES[case][1] in result["lines"][0]


def dropout_between_calls() -> None:
    """Evaluation has no dropout: the same patched model is fused there, and not in training."""
    with megatron() as parallel_state:
        model = build(1, dropout=0.5)
        batch = make_batch(parallel_state)
        assert not head_report(model).fusable
        model.eval()
        expected, expected_grads = step(model, batch)
        with patch_gpt_model(model, LogprobConfig(fused="require")):
            got, grads = step(model, batch)
            model.output_layer.train()
            with pytest.raises(ValueError, match="drops out"):
                step(model, batch)
        assert relative(loss_of(got), expected) < 2e-5
        assert worst(grads, expected_grads) < 2e-5


def test_dropout_counts_in_training_alone(ranks):
    ranks(1).run(dropout_between_calls)


def float64_truth() -> dict[str, float]:
    """On one rank: the adapter's own forward knows no gathered logits."""
    with megatron() as parallel_state:
        return patched_errors(build(1), make_batch(parallel_state))


def test_log_probabilities_against_float64(ranks):
    errors = ranks(1).run(float64_truth)[0]
    assert max(errors.values()) < 2e-5, errors


def of_another_group() -> None:
    """The head's own TP group, which need not be Megatron's."""
    from mcore_logprobs.megatron.adapters import head_lora

    with megatron():
        layer = build(1).output_layer
        layer.to_wrap.tp_group = torch.distributed.group.WORLD
        assert head_lora(layer).group is torch.distributed.group.WORLD


def test_a_lora_s_group_is_its_layer_s(ranks):
    ranks(2).run(of_another_group)


def narrower(adapter: Any) -> None:
    adapter.linear_in.weight = nn.Parameter(adapter.linear_in.weight[:2].detach())


def other_class(adapter: Any) -> None:
    adapter.__class__ = type("CanonicalAdapter", (ParallelLinearAdapter,), {})


OTHERS = {
    "class": (other_class, "its adapter, a CanonicalAdapter, is not a plain LoRA"),
    "scale": (lambda x: setattr(x, "_external_tp_reduce_scale", 0.5), "scales its output once"),
    "expert": (lambda x: setattr(x, "is_expert", True), "made for another kind of layer"),
    "alpha": (lambda x: setattr(x, "alpha", torch.ones(1)), "no number alpha"),
    "forward": (lambda x: setattr(x.linear_in, "forward", abs), "linear_in that is not Megatron's"),
    "dtype": (lambda x: x.linear_out.bfloat16(), "linear_out of another kind or dtype"),
    "shape": (narrower, "linear_in of shape"),
    "gathers": (lambda x: setattr(x.linear_out, "gather_output", True), "split over TP in another"),
    "splits": (lambda x: setattr(x.linear_in, "gather_output", False), "over TP in another way"),
    "sequence": (
        lambda x: setattr(x, "disable_sequence_parallel_comm", False),
        "differ in sequence parallelism",
    ),
    "forward hook": (lambda x: x.linear_in.register_forward_hook(lambda *_: None), "hooks on"),
    "backward hook": (lambda x: x.linear_in.register_full_backward_hook(abs), "hooks on"),
    "backward pre-hook": (lambda x: x.linear_in.register_full_backward_pre_hook(abs), "hooks on"),
}


def other_adapters(tp: int) -> None:
    with megatron(tp=tp):
        for name, (change, reason) in OTHERS.items():
            model = build(tp)
            assert head_report(model).fusable
            change(model.output_layer.adapter)
            found = head_report(model)
            assert not found.fusable, name
            assert reason in found.reason, found.reason


def test_other_adapters_are_not_fused(ranks):
    ranks(2).run(other_adapters, 2)


def changed_before_lazy_logits_are_computed() -> None:
    with megatron() as parallel_state, torch.no_grad():
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB, tied=False)
        inputs, base = make_batch(parallel_state)["inputs"], model.output_layer
        adapter = ParallelLinearAdapter(base, dropout=0.5)
        layer = model.output_layer = LoRALinear(base, adapter)
        model.eval()
        plain = model(**inputs)
        with patch_gpt_model(model, LogprobConfig(logits="lazy")):
            for change in (lambda: setattr(adapter, "alpha", 3.0), layer.train):
                lazy = model(**inputs)
                change()
                torch.testing.assert_close(torch.sin(lazy), torch.sin(plain))
                adapter.alpha = 9.0


def test_lazy_logits_have_the_adapter_of_their_call(ranks):
    """Its scale, and whether its dropout was on."""
    ranks(1).run(changed_before_lazy_logits_are_computed)
