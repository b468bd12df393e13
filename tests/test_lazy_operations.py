"""Every operation on logits takes lazy ones, and gives what it gives for real ones."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_logprobs as ours
from mcore_logprobs.kernels import budgets
from tests.engine.cases import NARROW
from tests.helpers.lazy import lazy_logits
from tests.helpers.shards import world_group, world_rank, world_size
from tests.ops import EVERY_STATISTIC
from tests.test_lazy import _TEMPERATURES, B, H, S, V, gradients, head, of_rows


def _kept(n: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    other = (ids + 1) % V
    return torch.stack([ids, other], -1).flatten(), torch.arange(0, 2 * n + 1, 2)


def consumers(teacher: Tensor, lead: torch.Size) -> dict[str, Any]:
    """Every operation on logits: functions of (logits, keywords)."""
    n = lead.numel()
    target = torch.arange(n).mul(5).remainder(V).view(lead)
    ids = torch.stack([target, (target + 3) % V], -1)
    topk = torch.linspace(-3.0, -1.0, 2 * n).view(*lead, 2)
    kept = _kept(n, target.flatten())
    return {
        "logprobs": lambda x, **k: ours.vocab_parallel_logprobs(x, target, **k),
        "label_smoothing": lambda x, **k: ours.vocab_parallel_logprobs(
            x, target, label_smoothing=0.1, **k
        ),
        "entropy": ours.vocab_parallel_entropy,
        "target_rank": lambda x, **k: ours.vocab_parallel_target_rank(x, target, **k),
        "token_stats": lambda x, **k: ours.vocab_parallel_token_stats(
            x, target, **EVERY_STATISTIC, **k
        ),
        "log_softmax": ours.vocab_parallel_log_softmax,
        "topk": lambda x, **k: ours.vocab_parallel_topk(x, 3, **k),
        "argmax": ours.vocab_parallel_argmax,
        "gather": lambda x, **k: ours.vocab_parallel_gather(x, ids, **k),
        "gather log_softmax": lambda x, **k: ours.vocab_parallel_gather(
            x, ids, log_softmax=True, **k
        ),
        "top_k": lambda x, **k: ours.vocab_parallel_sampling_logprobs(x, target, top_k=9, **k),
        "top_p": lambda x, **k: ours.vocab_parallel_sampling_logprobs(x, target, top_p=0.9, **k),
        "kept_ids": lambda x, **k: ours.vocab_parallel_sampling_logprobs(
            x, target, kept_ids=kept, **k
        ),
        "sample": lambda x, **k: ours.vocab_parallel_sample(x, seed=3, **k),
        "kl_div": lambda x, **k: ours.vocab_parallel_kl_div(x, teacher, **k),
        "jsd": lambda x, **k: ours.vocab_parallel_kl_div(x, teacher, kind="jsd", **k),
        "soft_cross_entropy": lambda x, **k: ours.vocab_parallel_soft_cross_entropy(
            x, teacher, **k
        ),
        "a teacher": lambda x, **k: ours.vocab_parallel_kl_div(teacher, x, kind="reverse", **k),
        "both": lambda x, **k: ours.vocab_parallel_kl_div(x, x.detach() * 0.5, **k),
        "both, of other rows": lambda x, **k: ours.vocab_parallel_kl_div(
            x, x.detach().flip(0), **k
        ),
        "topk_distill": lambda x, **k: ours.vocab_parallel_topk_distill(
            x, topk, ids, entropy=True, **k
        ),
        "topk_kl_div": lambda x, **k: ours.vocab_parallel_topk_kl_div(x, topk, ids, **k),
    }


CONSUMERS = list(consumers(torch.zeros(1, V), torch.Size((1,))))
CUTS: dict[str, Any] = {
    "all rows": lambda x: x,
    "tokens": lambda x: x.transpose(0, 1).contiguous() / 0.7,
    "some rows": lambda x: (x / _TEMPERATURES).flatten(0, 1)[torch.tensor([7, 2, 2, 9])],
}


def test_every_operation_is_a_consumer() -> None:
    called = inspect.getsource(consumers)
    names = [name for name in ours.__all__ if name.startswith("vocab_parallel_")]
    assert [name for name in names if not re.search(rf"ours\.{name}\b", called)] == []


KEYWORDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.6},
    {"softcap": 2.0},
    {"chunk_size": 3},
)


def compare(
    name: str,
    tp: int = 1,
    rank: int = 0,
    group: Any = None,
    *,
    sequence_parallel: bool = False,
    every_pair: bool = False,
) -> None:
    """Lazy equals real, values and all gradients: of every cut and every keyword of a call.

    Args:
        every_pair: of these; else each keyword with one cut, which differ from name to name.
    """
    cuts, first = list(CUTS), CONSUMERS.index(name)
    for place, keywords in enumerate(KEYWORDS):
        some = cuts if every_pair else [cuts[(first + place) % len(cuts)]]
        for cut in some:
            compare_cut(name, cut, keywords, tp, rank, group, sequence_parallel)


def compare_cut(
    name: str,
    cut_name: str,
    keywords: dict[str, Any],
    tp: int,
    rank: int,
    group: Any,
    sequence_parallel: bool,
) -> None:
    cut, inputs = CUTS[cut_name], head(tp=tp, rank=rank)
    if sequence_parallel:
        whole = inputs.pop("hidden")
        own = torch.cat([whole.detach(), torch.zeros(-S % tp, B, H)]).chunk(tp)[rank].clone()
        inputs = {"hidden": own.requires_grad_(), **inputs}
        real_hidden = torch.cat([whole.detach(), torch.zeros(-S % tp, B, H)]).requires_grad_()
    else:
        real_hidden = inputs["hidden"].detach().clone().requires_grad_()
    weight, bias = (inputs[k].detach().clone().requires_grad_() for k in ("weight", "bias"))
    if "softcap" in keywords:
        inputs.pop("bias")
    lazy = lazy_logits(**inputs, tp_group=group, sequence_parallel=sequence_parallel)[:S]
    real = (real_hidden @ weight.t())[:S]
    if "bias" in inputs:
        real = real + bias
    lazy, real = cut(lazy), cut(real)
    generator = torch.Generator().manual_seed(11)
    teacher = torch.randn(*real.shape[:-1], V, generator=generator).chunk(tp, -1)[rank]
    operation = consumers(teacher, real.shape[:-1])[name]
    options = {**keywords, "tp_group": group}
    got, expected = operation(lazy, **options), operation(real, **options)
    pairs = []
    for a, b in zip(_tensors(got), _tensors(expected), strict=True):
        assert a.requires_grad == b.requires_grad
        _close(a, b, f"{cut_name} {keywords}")
        if b.requires_grad:
            pairs.append((a, b))
    if not pairs:
        return
    upstream = [torch.linspace(-1.0, 2.0, a.numel()).view(a.shape) for a, _ in pairs]
    if name == "log_softmax":
        upstream = [g * (rank + 1) for g in upstream]
    found = torch.autograd.grad([a for a, _ in pairs], list(inputs.values()), upstream)
    others = [real_hidden, weight] + ([bias] if "bias" in inputs else [])
    wanted = list(torch.autograd.grad([b for _, b in pairs], others, upstream))
    if group is not None:
        torch.distributed.all_reduce(wanted[0], group=group)
    if sequence_parallel:
        wanted[0] = wanted[0].chunk(tp)[rank]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=3e-5)


def _close(got: Tensor, expected: Tensor, where: str) -> None:
    torch.testing.assert_close(
        got, expected, rtol=2e-5, atol=2e-5, msg=lambda text: f"{where}: {text}"
    )


def _tensors(found: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(found) if isinstance(x, Tensor)]


@pytest.mark.parametrize(
    "name", ["kl_div", "jsd", "soft_cross_entropy", "a teacher", "both", "both, of other rows"]
)
@pytest.mark.parametrize("vocab_size", [V, 9])
def test_two_sides_by_blocks_some_of_padding_alone(name: str, vocab_size: int) -> None:
    """Blocks of 7 columns. Of 18 with a vocabulary of 9 the last is padding alone."""
    tensors = head()
    lazy = lazy_logits(**tensors)[:S]
    real = (tensors["hidden"] @ tensors["weight"].t())[:S] + tensors["bias"]
    teacher = torch.randn(real.shape, generator=torch.Generator().manual_seed(11))
    teacher.requires_grad_(name == "a teacher")  # the student there
    leaves = [teacher] if teacher.requires_grad else list(tensors.values())
    operation = consumers(teacher, real.shape[:-1])[name]
    expected = operation(real, vocab_size=vocab_size)
    upstream = torch.linspace(-1.0, 2.0, expected.numel()).view(expected.shape)
    wanted = torch.autograd.grad(expected, leaves, upstream)
    with budgets.use(NARROW):
        got = operation(lazy, vocab_size=vocab_size)
        found = torch.autograd.grad(got, leaves, upstream)
    _close(got, expected, name)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("name", CONSUMERS)
def test_every_operation_consumes_them(name: str) -> None:
    compare(name, every_pair=True)


def compare_on_ranks(sequence_parallel: bool) -> None:
    for name in CONSUMERS:
        compare(
            name,
            world_size(),
            world_rank(),
            world_group(),
            sequence_parallel=sequence_parallel,
        )


@pytest.mark.parametrize(
    ("tp", "sequence_parallel"),
    [
        (2, False),
        (3, True),
        pytest.param(2, True, marks=pytest.mark.night),
        pytest.param(3, False, marks=pytest.mark.night),
    ],
)
def test_every_operation_over_ranks(ranks: Any, tp: int, sequence_parallel: bool) -> None:
    ranks(tp).run(compare_on_ranks, sequence_parallel)


@pytest.mark.parametrize("scale", [(1e38,), (1e20, 1e19), (1e-30, 1e-9)], ids=str)
def test_a_scale_that_is_no_temperature(scale: tuple[float, ...]) -> None:
    """Logits that are so scaled are real ones, as far as float32 has them."""
    tensors = head()
    real = tensors["hidden"] @ tensors["weight"].t() + tensors["bias"]
    lazy = lazy_logits(**tensors)
    for divisor in scale:
        real, lazy = real / divisor, lazy / divisor
    torch.testing.assert_close(of_rows(lazy), of_rows(real), equal_nan=True)


def test_float64_logits_keep_their_digits_under_temperatures_of_float32() -> None:
    hidden, weight = (torch.randn(n, H, dtype=torch.float64) * 3 for n in (S, V))
    target, temperature = torch.arange(S) % V, torch.linspace(0.5, 2.0, S)
    real, lazy = hidden @ weight.t(), lazy_logits(hidden, weight)
    for scale in (0.7, _TEMPERATURES[0, 0]):
        expected, got = (
            ours.vocab_parallel_logprobs(x / scale, target, temperature=temperature)
            for x in (real, lazy)
        )
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=0.0)


def test_consumers_add_their_gradients() -> None:
    tensors = head()
    logits = lazy_logits(**tensors)
    real = tensors["hidden"] @ tensors["weight"].t() + tensors["bias"]
    found = []
    for x in (logits, real):
        x = x.transpose(0, 1)
        value = of_rows(x) + of_rows(x[1:] / 2) + x[0, 1:3].exp().mean()
        found.append(gradients(value, tensors))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_lora_gets_its_gradient() -> None:
    tensors = head()
    a, b = (torch.randn(*shape, requires_grad=True) for shape in ((3, H), (V, 3)))
    real = tensors["hidden"] @ tensors["weight"].t() + (tensors["hidden"] @ a.t() * 0.5) @ b.t()
    logits = lazy_logits(tensors["hidden"], tensors["weight"], lora=(a, b, 0.5))
    inputs = {"hidden": tensors["hidden"], "weight": tensors["weight"], "a": a, "b": b}
    found = [gradients(of_rows(x[1:] / 0.7), inputs) for x in (logits, real)]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_no_worse_than_real_logits() -> None:
    exact = {k: x.detach().double().requires_grad_() for k, x in head(torch.bfloat16).items()}
    expected = of_rows(exact["hidden"] @ exact["weight"].t() + exact["bias"])
    tensors = head(torch.bfloat16)
    real = of_rows((tensors["hidden"] @ tensors["weight"].t() + tensors["bias"]).float())
    logits = lazy_logits(**tensors)
    assert logits.dtype == torch.bfloat16
    assert logits.float().dtype == torch.float32
    got = of_rows(logits.float())
    assert (got - expected).abs() <= (real - expected).abs() + 1e-5
    for name, mine, theirs, truth in zip(
        tensors,
        gradients(got, tensors),
        gradients(real, tensors),
        gradients(expected, exact),
        strict=True,
    ):
        bound = (theirs.double() - truth).abs().max()
        assert (mine.double() - truth).abs().max() <= bound + 1e-3 * truth.abs().max(), name


def test_mistakes() -> None:
    logits = lazy_logits(**head())
    with pytest.raises(ValueError, match=r"target: expected shape \(5, 2\), got \(2, 5\)"):
        ours.vocab_parallel_logprobs(logits, torch.zeros(B, S, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"temperature: .* broadcasts to \(5, 2\), got shape \(3"):
        ours.vocab_parallel_entropy(logits, temperature=torch.ones(3, 1))
    with pytest.raises(RuntimeError, match="invalid for input"):
        logits.view(3, V)
    with pytest.raises(IndexError, match="out of"):
        logits[7]
    with pytest.raises(RuntimeError, match="must match"):
        logits.expand(4, B, V)
