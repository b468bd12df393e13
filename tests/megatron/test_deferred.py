"""`DeferredLogits`: the loss reads its fields, everyone else gets real logits."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs.kernels import budgets
from mcore_logprobs.megatron import deferred as deferred_logits
from mcore_logprobs.megatron.deferred import DeferredLogits
from mcore_logprobs.megatron.lazy import call_of


class Head:
    """Counts how often the logits were computed."""

    def __init__(self) -> None:
        self.hidden = torch.randn(5, 2, 4, requires_grad=True)
        self.weight = torch.randn(6, 4, requires_grad=True)
        self.calls = 0

    def logits(self) -> Tensor:
        return self.compute(self.hidden, self.weight)

    def compute(self, hidden: Tensor, weight: Tensor) -> Tensor:
        self.calls += 1
        return hidden @ weight.t()

    def handle(self) -> DeferredLogits:
        return deferred(self.hidden, self.weight, self.compute)


def deferred(
    hidden: Tensor,
    weight: Tensor,
    product: Callable[[Tensor, Tensor], Tensor],
    output_dtype: torch.dtype | None = None,
) -> DeferredLogits:
    layer = SimpleNamespace(
        bias=None,
        skip_bias_add=False,
        sequence_parallel=False,
        gradient_accumulation_fusion=False,
        output_dtype=output_dtype,
        _forward_hooks={},
    )
    return DeferredLogits(call_of(layer, hidden, weight, product, lambda fn: None))


TOUCHES: dict[str, Any] = {
    "method": lambda x: x.transpose(0, 1).contiguous(),
    "attribute": lambda x: x.mT,
    "strides": lambda x: torch.zeros(x.stride(0)),
    "torch function": lambda x: torch.argmax(x, dim=-1),
    "keyword": lambda x: torch.softmax(input=x, dim=-1),
    "list": lambda x: torch.cat([x, x]),
    "functional": lambda x: torch.nn.functional.gelu(x),
    "multiply": lambda x: x * 2,
    "multiply from the left": lambda x: 2 * x,
    "tensor first": lambda x: torch.ones(6) + x,
    "matmul": lambda x: x @ torch.ones(6),
    "index": lambda x: x[1:, 0],
    "compare": lambda x: x > 0,
    "equal": lambda x: x == x,
    "negate": lambda x: -x,
    "iterate": lambda x: torch.stack(list(x)),
    "length": lambda x: torch.tensor(len(x)),
    "max": lambda x: x.max(dim=-1)[0],
    "copy": lambda x: x.detach().clone(),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "in place": lambda x: x.clone().add_(x),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy().copy()),
    "where": lambda x: torch.where(torch.ones(6) > 0, x, 0.0),
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_any_touch_gets_the_logits(touch):
    head = Head()
    expected = TOUCHES[touch](head.logits())
    head.calls = 0
    got = TOUCHES[touch](head.handle())
    assert isinstance(got, Tensor)
    assert torch.equal(got, expected)
    assert head.calls == 1


def test_deep_copy_is_a_tensor():
    head = Head()
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(head.handle()), head.logits())


def test_looking_does_not_compute():
    head = Head()
    handle = head.handle()
    assert "hidden=[5, 2, 4]" in repr(handle)
    assert hash(handle) == hash(handle)
    assert handle is not None
    assert handle.hidden is head.hidden
    assert handle.size() == handle.shape == (5, 2, 6)
    assert handle.size(-1) == 6
    assert handle.dtype == torch.float32
    assert handle.scaled(2.0, lambda x: x * 2).scale == 2.0
    assert head.calls == 0


def test_gradients_flow_and_logits_are_computed_once():
    head = Head()
    handle = head.handle()
    (handle.sum() + handle.pow(2).sum()).backward()
    assert head.calls == 1
    expected = torch.autograd.grad(head.logits().sum() + head.logits().pow(2).sum(), head.hidden)
    assert torch.allclose(head.hidden.grad, expected[0])


def test_which_tensors_carry_the_gradient_of_the_logits() -> None:
    head = Head()
    handle, others = head.handle(), head.logits()
    assert not handle.is_ancestor_of(others)  # nothing is computed yet
    logits = handle.materialize()
    for reached in (logits, logits * 2, ((2 * logits).exp() + others).sum(-1)):
        assert handle.is_ancestor_of(reached)
    for apart in (others, others * 2, (logits.detach() * others).sum(-1), logits.detach()):
        assert not handle.is_ancestor_of(apart)


def test_logits_without_gradients_are_not_kept_for_a_caller_with_them():
    head = Head()
    handle = head.handle()
    with torch.no_grad():
        assert not handle.sum().requires_grad
        assert not handle.min().requires_grad
    assert head.calls == 1
    assert handle.max().requires_grad


def test_logits_in_inference_mode_are_read_and_written():
    """Whose versions torch does not count."""
    head = Head()
    with torch.inference_mode():
        handle = head.handle()
        handle.mul_(0.5)
        expected = head.logits() * 0.5
        assert torch.equal(handle.computed(), expected)
        assert torch.equal(handle.scaled(2.0, lambda x: x * 2.0).computed(), expected * 2.0)


def test_a_write_in_inference_mode_to_logits_that_want_a_gradient_is_seen():
    head = Head()
    handle = head.handle()
    with torch.inference_mode():
        assert torch.equal(handle.max(), head.logits().max())
    assert handle.computed() is None  # read only
    with torch.inference_mode():
        handle.mul_(0.5)
    with pytest.raises(RuntimeError, match="changed in place under no_grad"):
        handle.computed()


READS: dict[str, Callable[[Any], Tensor]] = {
    "max": lambda x: x.max(dim=-1).values,
    "argmax": lambda x: x.argmax(-1),
    "torch.argmax": lambda x: torch.argmax(x, dim=-1),
    "softmax": lambda x: torch.softmax(x, -1),
}


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("read", READS)
def test_who_reads_without_gradients_sees_a_write(read, scaled, with_gradient):
    """Of the logits or, where scaled ones are read, of those before the scale."""
    head = Head()
    handle, real = head.handle(), head.logits()
    read_handle, read_real = handle, real
    with torch.no_grad():
        READS[read](handle)  # what was computed before the write is not given again
    with torch.set_grad_enabled(with_gradient):
        for logits in (handle, real):
            logits.mul_(-1.0)
    if scaled:
        read_handle, read_real = handle.scaled(3.0, lambda x: x * 3.0), real * 6.0
        read_handle = read_handle.scaled(2.0, lambda x: x * 2.0)
    with torch.no_grad():
        torch.testing.assert_close(READS[read](read_handle), READS[read](read_real))


def test_who_reads_with_gradients_is_not_given_logits_without_a_write():
    head = Head()
    handle = head.handle()
    with torch.no_grad():
        handle.mul_(-1.0)
    with pytest.raises(RuntimeError, match="changed in place under no_grad"):
        handle.softmax(-1)


def test_a_write_to_logits_that_want_no_gradient_is_everybody_s():
    head = Head()
    head.hidden.requires_grad_(False)
    head.weight.requires_grad_(False)
    handle, real = head.handle(), head.logits()
    with torch.no_grad():
        handle.mul_(-1.0)
    assert torch.equal(handle.computed(), -real)
    assert torch.equal(handle.max(-1).values, (-real).max(-1).values)


@pytest.mark.parametrize(
    "write",
    [operator.imul, operator.iadd, operator.isub, operator.itruediv, operator.ipow, operator.imod],
)
def test_augmented_assignment_changes_the_logits_that_others_hold(write):
    head = Head()
    handle, real = head.handle(), head.logits()
    for logits in (handle, real):
        write(logits, 2.0)  # `x *= 2.0` in a function that was given them
    assert torch.equal(handle + 0, real + 0)


def test_the_larger_of_two_tensors_without_gradients():
    head = Head()
    handle, real, other = head.handle(), head.logits(), torch.zeros(5, 2, 6)
    with torch.no_grad():
        assert torch.equal(torch.max(handle, other), torch.max(real, other))
        assert torch.equal(handle.max(other), real.max(other))


def test_scaled_handle_gives_scaled_logits():
    head = Head()
    scaled = head.handle().scaled(0.5, lambda x: x * 0.5).scaled(3.0, lambda x: x * 3.0)
    assert scaled.scale == 1.5
    assert torch.equal(scaled + 0, head.logits() * 0.5 * 3.0)


@pytest.mark.parametrize("budget", [1, 13, 1 << 20])
@pytest.mark.parametrize("scaled", [False, True])
def test_largest_logits_without_the_logits(monkeypatch, budget, scaled):
    monkeypatch.setattr(budgets, "CPU", replace(budgets.CPU, tile_rows=budget, chunk_bytes=budget))
    head = Head()
    handle = head.handle()
    expected = head.logits().detach()
    if scaled:
        handle, expected = handle.scaled(2.0, lambda x: x * 2.0), expected * 2.0
    head.calls = 0
    with torch.no_grad():
        for found in (handle.max(dim=-1), handle.max(2), torch.max(handle, dim=-1)):
            assert torch.allclose(found.values, expected.max(-1).values)
            assert torch.equal(found.indices, expected.argmax(-1))
            for x in (*found, handle.argmax(-1)):
                x.zero_()  # the caller's own
        assert torch.equal(torch.argmax(handle, dim=-1), expected.argmax(-1))
        assert torch.equal(handle.argmax(-1), expected.argmax(-1))
        assert head.calls == 0
        assert torch.equal(handle.max(), expected.max())
        assert torch.equal(handle.max(dim=0).values, expected.max(dim=0).values)
        assert torch.equal(handle.argmax(dim=-1, keepdim=True), expected.argmax(-1, keepdim=True))
    assert handle.max(dim=-1).values.requires_grad


@pytest.mark.own_sizes  # compares the bits of products, which are of other widths
@pytest.mark.parametrize(
    ("own", "output_dtype"),
    [
        (torch.bfloat16, None),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_largest_logits_in_the_logits_dtype(own, output_dtype):
    """Ties are those of the model's own logits: they decide which token a head predicts."""
    hidden, weight = torch.randn(64, 2, 16).to(own), torch.randn(2048, 16).to(own)
    precise = hidden.float() @ weight.float().t()
    logits = precise.to(output_dtype or own)
    handle = deferred(hidden, weight, lambda hidden, weight: logits, output_dtype)
    expected = logits.max(-1)
    ties = (expected.indices != precise.argmax(-1)).sum()
    assert (ties > 0) == (logits.dtype != torch.float32)
    with torch.no_grad():
        found = handle.max(-1)
        assert found.values.dtype == logits.dtype
        assert torch.equal(found.values, expected.values)
        assert torch.equal(found.indices, expected.indices)
        assert torch.equal(handle.scaled(2.0, lambda x: x * 2.0).argmax(-1), expected.indices)


class _Square(torch.autograd.Function):
    """Whose forward has no ctx."""

    @staticmethod
    def forward(x: Any) -> Tensor:
        return x.pow(2).sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2.0 * grads[0] * ctx.saved_tensors[0]


class _Decorated(torch.autograd.Function):
    @staticmethod
    @torch.no_grad()
    def forward(ctx: Any, x: Any) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise AssertionError


def test_a_decorator_of_a_function_s_forward_is_no_function() -> None:
    head = Head()
    handle = head.handle()

    @torch.no_grad()
    def metric(logits: Any) -> Tensor:
        return logits.sum()

    assert torch.equal(metric(handle), head.logits().sum())
    with pytest.raises(RuntimeError, match="was given the deferred logits"):
        _Decorated.apply(head.handle())


@pytest.mark.parametrize("from_c", [False, True], ids=["as here", "as in torch 2.14"])
def test_a_function_whose_forward_has_no_ctx_is_refused_too(
    from_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if from_c:  # there no file of torch's has a frame of `apply` above a forward
        monkeypatch.setattr(deferred_logits, "_FUNCTION_FILE", "")
    head = Head()
    with pytest.raises(RuntimeError, match="forward was given the deferred logits"):
        _Square.apply(head.handle())
    handle = head.handle()
    with torch.no_grad():
        handle.sum()  # logits without a gradient are there
    with pytest.raises(RuntimeError, match="forward was given the deferred logits"):
        _Square.apply(handle)
    (found,) = torch.autograd.grad(_Square.apply(handle.clone()), head.hidden)
    (want,) = torch.autograd.grad(_Square.apply(head.logits()), head.hidden)
    torch.testing.assert_close(found, want)
