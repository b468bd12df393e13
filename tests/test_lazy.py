"""Lazy logits without Megatron: what is recorded, what consumes them, what computes them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typing_extensions import deprecated

import mcore_logprobs as ours
from mcore_logprobs.sources import lazy as lazy_module
from mcore_logprobs.sources.lazy import LazyLogits
from tests.helpers.lazy import Seen, lazy_logits

# 2 sequences of 5 tokens; a hidden size and a vocabulary of no round width. TP 1, 2, 3.
S, B, H, V = 5, 2, 7, 18

_LIKE = torch.empty(S * B, V)
MASK = torch.tensor([True, False, True, True, False])
_PLACES = torch.tensor([3, 0, 0, 4])
_TEMPERATURES = torch.linspace(0.5, 2.0, S * B).view(S, B, 1)

# Every one of them is of logits [s, b, v], costs no product, and leaves the vocabulary last.
RECORDED: dict[str, Any] = {
    "transpose": lambda x: x.transpose(0, 1),
    "torch.transpose": lambda x: torch.transpose(x, 1, 0),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "permute": lambda x: x.permute(1, 0, 2),
    "movedim": lambda x: torch.movedim(x, 0, 1),
    "view": lambda x: x.view(-1, x.size(-1)),
    "view with the vocabulary left to torch": lambda x: x.view(S * B, -1),
    "view_as": lambda x: x.view_as(_LIKE),
    "reshape": lambda x: x.transpose(0, 1).reshape(S * B, x.size(-1)),
    "flatten": lambda x: x.flatten(0, 1),
    "unflatten": lambda x: x.flatten(0, 1).unflatten(0, (B, S)),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "squeeze all": lambda x: x[2:3, :1].squeeze(),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "expand": lambda x: x[:, :1].expand(-1, 3, -1),
    "an int": lambda x: x[3],
    "ints": lambda x: x[3, -1],
    "slice": lambda x: x[1:, :1],
    "slice with a step": lambda x: x[::2],
    "ellipsis": lambda x: x[1:3, ...],
    "ellipsis and all columns": lambda x: x[..., :],
    "None": lambda x: x[:, None, 1],
    "mask": lambda x: x[MASK],
    "mask of tokens": lambda x: x[torch.arange(S * B).view(S, B) % 3 == 1],
    "index tensor": lambda x: x[_PLACES],
    "two index tensors": lambda x: x[_PLACES, torch.tensor([1, 0, 1, 1])],
    "list": lambda x: x[[4, 1]],
    "split": lambda x: x.split(2)[1],
    "split by sizes": lambda x: x.split([1, 3, 1], dim=0)[1],
    "torch.split": lambda x: torch.split(x.flatten(0, 1), [4, 6])[1],
    "chunk": lambda x: x.chunk(2, dim=1)[1],
    "unbind": lambda x: x.unbind(1)[0],
    "iterate": lambda x: list(x)[2],
    "narrow": lambda x: x.narrow(0, 1, 3),
    "flip": lambda x: torch.flip(x, (0, -2)),
    "roll": lambda x: torch.roll(x, shifts=(1, -2), dims=(1, 0)),
    "keyword": lambda x: torch.transpose(input=x, dim0=0, dim1=1),
    "keyword of a reshape": lambda x: torch.reshape(input=x, shape=(B, S, V)),
    "select": lambda x: x.select(1, 1),
    "index_select": lambda x: x.index_select(0, _PLACES),
    "torch.cat": lambda x: torch.cat([x[4], x[1:2, 1], x[0]]),
    "torch.cat of scaled ones": lambda x: torch.cat([x[4] / 0.5, x[0] / _TEMPERATURES[0]]),
    "torch.stack": lambda x: torch.stack([x[4], x[1]], dim=1),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "clone": lambda x: x[1:].clone(),
    "data.float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float32),
    "times a number": lambda x: x * 1.5,
    "a number times": lambda x: 1.5 * x,
    "over a number": lambda x: x / 0.7,
    "torch.div": lambda x: torch.div(x, 0.7),
    "mul_": lambda x: x.clone().mul_(1.5),
    "div_": lambda x: x.clone().div_(0.7),
    "/=": lambda x: _over(x.clone()),
    "over a tensor of no dimension": lambda x: x / torch.tensor(0.7),
    "over a temperature per token": lambda x: x / _TEMPERATURES,
    "over a temperature per sequence": lambda x: x / _TEMPERATURES[0],
    "times a number per token": lambda x: x * _TEMPERATURES,
    "div_ by a temperature per token": lambda x: x.clone().div_(_TEMPERATURES),
    "div_ of a view is seen by its base": lambda x: _over_in_part(x.clone()),
    "several": lambda x: x.transpose(0, 1).contiguous()[0].float().div_(0.7)[1:4] * 2,
}


def _over(x: Tensor) -> Tensor:
    x /= 0.7
    return x


def _over_in_part(x: Tensor) -> Tensor:
    part = x.flatten(0, 1)[3:7]
    part /= 0.7
    part[1:].mul_(torch.linspace(1.0, 2.0, 3).view(3, 1))
    return x


def of_rows(x: Tensor, tp_group: Any = None) -> Tensor:
    """Different targets, weights and statistics of logits of any leading shape, as one number."""
    lead = x.shape[:-1]
    size = 1 if tp_group is None else tp_group.size()
    target = torch.arange(lead.numel()).view(lead).mul(5).remainder(x.shape[-1] * size)
    stats = ours.vocab_parallel_token_stats(
        x, target, entropy=True, sum_pi_squared=True, tp_group=tp_group, temperature=0.9
    )
    weights = torch.linspace(-1.0, 2.0, lead.numel()).view(lead)
    assert stats.entropy is not None
    assert stats.sum_pi_squared is not None
    return ((stats.logprobs + 0.3 * stats.entropy + stats.sum_pi_squared) * weights).sum()


def head(dtype: torch.dtype = torch.float32, *, tp: int = 1, rank: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tensors = {
        "hidden": torch.randn(S, B, H, generator=generator),
        "weight": torch.randn(V, H, generator=generator).chunk(tp)[rank],
        "bias": torch.randn(V, generator=generator).chunk(tp)[rank],
    }
    return {k: x.to(dtype).requires_grad_() for k, x in tensors.items()}


def gradients(value: Tensor, tensors: dict[str, Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(value, list(tensors.values())))


@pytest.mark.parametrize("name", RECORDED)
def test_what_rearranges_and_scales_is_recorded(name: str) -> None:
    operation, tensors = RECORDED[name], head()
    real = tensors["hidden"] @ tensors["weight"].t() + tensors["bias"]
    expected = operation(real)
    with Seen() as seen:
        got = operation(lazy_logits(**tensors))
    assert isinstance(got, LazyLogits)
    assert seen.products == 0
    assert seen.largest <= S * B * 8, "rows and temperatures, and no logits"
    for attribute in ("shape", "dtype", "device", "requires_grad", "ndim", "is_leaf"):
        assert getattr(got, attribute) == getattr(expected, attribute), attribute
    assert (got.size(), got.dim(), got.numel(), len(got) if got.dim() > 1 else 0) == (
        expected.size(),
        expected.dim(),
        expected.numel(),
        len(expected) if expected.dim() > 1 else 0,
    )
    assert got.stride() == expected.stride() or not expected.is_contiguous()
    one, other = of_rows(got), of_rows(expected)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients(one, tensors), gradients(other, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    # And so are the real logits of what is left, which cost the rows that are left.
    with torch.no_grad():
        torch.testing.assert_close(got + 0.0, expected.detach(), rtol=1e-5, atol=1e-5)


# The frame that calls torch is in typing_extensions.
OLD_SOFTMAX = deprecated("by another one")(torch.nn.functional.softmax)
MATERIALIZED: dict[str, Any] = {
    "softmax": lambda x: x.softmax(-1),
    "functional": lambda x: torch.nn.functional.log_softmax(x, dim=-1),
    "keyword": lambda x: torch.softmax(input=x, dim=-1),
    "a deprecated function": lambda x: OLD_SOFTMAX(x, dim=-1),
    "some columns": lambda x: x[..., 2:5],
    "one column": lambda x: x[..., 3],
    "flipped vocabulary": lambda x: x.flip(-1),
    "flipped vocabulary, with others": lambda x: torch.flip(x, dims=(0, 2)),
    "rolled vocabulary": lambda x: x.roll(2, -1),
    "rolled over all": lambda x: torch.roll(x, 2),
    "keyword in another place": lambda x: torch.where(
        condition=MASK.view(S, 1, 1), input=x, other=x
    ),
    "scale that is 0 somewhere": lambda x: x * (_TEMPERATURES - 0.5),
    "transposed vocabulary": lambda x: x.transpose(-1, 0),
    "view across tokens": lambda x: x.view(S, -1),
    "negative scale": lambda x: x * -1.0,
    "scale per column": lambda x: x * torch.linspace(1.0, 2.0, V),
    "sum of two": lambda x: x + x,
    "logits first": lambda x: torch.ones(V) + x,
    "matmul": lambda x: x @ torch.ones(V),
    "compare": lambda x: torch.where(x > 0, x, 0.0),
    "argsort": lambda x: x.argsort(-1),
    "max with a gradient": lambda x: x.max(dim=-1)[0],
    "cat of two calls": lambda x: torch.cat([x, torch.zeros(1, B, V)]),
    "double": lambda x: x.double(),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy().copy()),
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "deepcopy": lambda x: copy.deepcopy(x.detach()),
    "out": lambda x: torch.exp(x.detach(), out=torch.empty(S, B, V)),
    "two of a sequence": lambda x: x.transpose(0, 1)[1, 2:4].exp(),
}


@pytest.mark.parametrize("name", MATERIALIZED)
def test_anything_else_gets_real_logits(name: str, caplog: Any) -> None:
    operation, tensors = MATERIALIZED[name], head()
    lazy_module._said.clear()
    expected = operation(tensors["hidden"] @ tensors["weight"].t() + tensors["bias"])
    with caplog.at_level("WARNING"):
        got = operation(lazy_logits(**tensors))
    assert type(got) is Tensor
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert len(caplog.records) == 1
    assert f"{__file__}:" in caplog.text
    assert ("2 rows" if name == "two of a sequence" else "10 rows") in caplog.text
    if expected.requires_grad and expected.is_floating_point():
        upstream = torch.randn_like(expected)
        found = (gradients((x * upstream).sum(), tensors) for x in (got, expected))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_real_logits_are_computed_once() -> None:
    logits = lazy_logits(**head())
    with Seen() as seen:
        logits.softmax(-1)
        logits.transpose(0, 1).exp()
        logits[1:3].exp()
    assert seen.products == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_compute_again(reentrant: bool) -> None:
    """What a recomputation reads is what the forward read, whatever was read in between."""
    tensors = head()
    real = tensors["hidden"] @ tensors["weight"].t() + tensors["bias"]
    found = []
    for x in (lazy_logits(**tensors), real):
        values = [
            torch.utils.checkpoint.checkpoint(function, x[1:], use_reentrant=reentrant)
            for function in (of_rows, lambda part: part.exp().mean())
        ]
        values.append(x.sigmoid().sum())
        for tensor in tensors.values():
            tensor.grad = None
        torch.stack(values).sum().backward(retain_graph=True)
        found.append([tensor.grad for tensor in tensors.values()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_hooks_and_gradients_of_the_logits_themselves() -> None:
    logits, seen = lazy_logits(**head()), []
    logits.register_hook(lambda grad: seen.append(grad.shape))
    logits.retain_grad()
    of_rows(logits).backward()
    assert seen == [torch.Size((S, B, V))]
    assert logits.grad is not None
    assert logits.grad.shape == (S, B, V)


@pytest.mark.night
def test_under_compile() -> None:
    """A graph break, and the same values; traced, every function of it would be read."""
    logits, tensors = torch.compile(lambda x: x.exp() + 1, backend="eager"), head()
    got = logits(lazy_logits(**tensors))
    real = tensors["hidden"] @ tensors["weight"].t() + tensors["bias"]
    torch.testing.assert_close(got, real.exp() + 1)


@pytest.mark.parametrize(
    "bias", [{2: 1.5, 11: -0.7}, [(2, 1.5)], {4: np.float32(1.5)}, torch.linspace(-1.0, 1.0, V)]
)
@pytest.mark.parametrize("divisor", [1.0, 0.7, _TEMPERATURES], ids=["1", "0.7", "per token"])
def test_a_bias_on_ids_comes_after_what_was_recorded(bias: Any, divisor: Any) -> None:
    tensors, target = head(), torch.arange(S * B).view(S, B)
    found = []
    for logits in (
        lazy_logits(**tensors),
        tensors["hidden"] @ tensors["weight"].t() + tensors["bias"],
    ):
        logprobs = ours.vocab_parallel_logprobs(
            logits / divisor, target, temperature=0.9, logit_bias=bias, disallowed_ids=[15, 17]
        )
        value = (logprobs * torch.linspace(-1.0, 2.0, S * B).view(S, B)).sum()
        found.append([value, *gradients(value, tensors)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_writes_are_seen_by_every_view() -> None:
    tensors = head()
    found = []
    for logits in (
        lazy_logits(**tensors),
        tensors["hidden"] @ tensors["weight"].t() + tensors["bias"],
    ):
        logits = logits.clone()
        part = logits.transpose(0, 1)[1]
        part[1:, 4:] = -torch.inf
        logits[0, 0].clamp_(max=0.5)
        logits.div_(0.7)
        value = of_rows(logits.transpose(0, 1)[:, :, :4]) + logits[0].exp().sum()
        found.append([value, *gradients(value, tensors)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_writes_under_no_grad_cannot_be_followed() -> None:
    logits = lazy_logits(**head())
    with torch.no_grad():
        logits[0] = 0.0
        assert float(logits[0].abs().max()) == 0.0
    with pytest.raises(RuntimeError, match="changed in place under no_grad"):
        ours.vocab_parallel_logprobs(logits, torch.zeros(S, B, dtype=torch.int64))


@pytest.mark.parametrize(
    ("touch", "instead"),
    [
        (lambda x: x.log_softmax(-1), "vocab_parallel_logprobs"),
        (lambda x: x.__setitem__(x > 0, 0.0), "a vocab_parallel_"),
        (lambda x: x.__setitem__(0, -torch.inf), "kept_ids of vocab_parallel_sampling_logprobs"),
        (lambda x: pickle.dumps(x), "a vocab_parallel_"),
    ],
)
def test_require_names_the_line_and_what_to_use(touch: Any, instead: str) -> None:
    logits = lazy_logits(**head(), require=True)
    with pytest.raises(ValueError, match=r"fused='require', but .*test_lazy\.py") as error:
        touch(logits)
    assert instead in str(error.value)
    ours.vocab_parallel_entropy(logits)


@pytest.mark.parametrize(
    ("changed", "says"),
    [("weight", "weight"), ("bias", "bias"), ("lora_a", "LoRA"), ("lora_b", "LoRA"),
     ("hidden", "hidden states")],
)  # fmt: skip
def test_changed_tensors_are_refused(changed: str, says: str) -> None:
    tensors = {
        **head(),
        "bias": torch.zeros(V, requires_grad=True),
        "lora_a": torch.randn(2, H, requires_grad=True),
        "lora_b": torch.zeros(V, 2, requires_grad=True),
    }
    lora = (tensors["lora_a"], tensors["lora_b"], 0.5)
    logits = lazy_logits(tensors["hidden"], tensors["weight"], bias=tensors["bias"], lora=lora)
    target = torch.zeros(S, B, dtype=torch.int64)
    torch.optim.SGD(tensors.values(), lr=0.1).step()  # without a gradient: nothing happens
    ours.vocab_parallel_logprobs(logits, target)
    tensors[changed].grad = torch.ones_like(tensors[changed])
    torch.optim.SGD(tensors.values(), lr=0.1).step()
    for consume in (lambda: ours.vocab_parallel_logprobs(logits, target), lambda: logits.exp()):
        with pytest.raises(
            RuntimeError, match=rf"the {says} of the model's call \(version 0\), got"
        ):
            consume()


def test_gradient_modes() -> None:
    tensors, target = head(), torch.zeros(S, B, dtype=torch.int64)
    logits = lazy_logits(**tensors)
    assert logits.requires_grad
    assert not logits.is_leaf
    assert not ours.vocab_parallel_logprobs(logits.detach(), target).requires_grad
    assert not logits.data.requires_grad
    with torch.no_grad():
        assert not logits[1:].requires_grad
        assert not ours.vocab_parallel_logprobs(logits, target).requires_grad
        assert not lazy_logits(**tensors).requires_grad
        assert not (logits + 1).requires_grad
    assert ours.vocab_parallel_logprobs(logits, target).requires_grad
    assert (logits + 1).requires_grad
    with torch.inference_mode():
        assert not lazy_logits(**tensors).softmax(-1).requires_grad
    frozen = {**tensors, "weight": tensors["weight"].detach()}
    ours.vocab_parallel_logprobs(lazy_logits(**frozen), target).sum().backward()
    assert tensors["weight"].grad is None
    assert tensors["hidden"].grad is not None


def test_a_handle_keeps_nothing_alive() -> None:
    gc.disable()
    try:
        tensors = head()
        hidden = tensors["hidden"] * 1.0
        dropped = weakref.ref(hidden)
        logits = lazy_logits(hidden, tensors["weight"])
        views = [logits.transpose(0, 1)[1:] / 0.7, logits.detach()]
        (views[0] + 1).sum().backward()
        ours.vocab_parallel_entropy(views[1])
        del hidden
        assert dropped() is not None
        del logits, views
        assert dropped() is None
    finally:
        gc.enable()


@pytest.mark.own_sizes
def test_rows_that_are_not_asked_for_cost_no_product() -> None:
    """A tenth of the rows is a tenth of the multiplications, forward and backward."""
    hidden = torch.randn(40, 1, H, requires_grad=True)
    weight = torch.randn(V, H, requires_grad=True)
    rows: list[int] = []

    class Rows(Seen):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func._schema.name == "aten::mm":
                rows.append(max(args[0].shape[0], args[0].shape[1]))
            return super().__torch_dispatch__(func, types, args, kwargs)

    with Rows():
        logits = lazy_logits(hidden, weight).transpose(0, 1)[0, 30:34]
        ours.vocab_parallel_logprobs(logits, torch.arange(4)).sum().backward()
    assert len(rows) == 4
    assert max(rows) <= V


@pytest.mark.parametrize("by", [2.0, torch.full((S, B, 1), 2.0)], ids=["number", "tensor"])
def test_an_expanded_view_is_not_written_to(by: float | Tensor) -> None:
    """It has as many places as there are rows, and is none but some of them."""
    tensors, target = head(), torch.ones(S, B, dtype=torch.int64)
    logits = lazy_logits(**tensors)
    with pytest.raises(RuntimeError, match="single memory location"):
        logits[:1].expand(S, B, V).div_(by)
    real = tensors["hidden"] @ tensors["weight"].t() + tensors["bias"]
    expected = ours.vocab_parallel_logprobs(real, target)
    torch.testing.assert_close(ours.vocab_parallel_logprobs(logits, target), expected)
