"""No call waits for the device or copies to it: what a CUDA graph needs, and asynchrony too.

Without a GPU the calls run on the meta device, where a tensor has no values: whatever asks for one
(`.item()`, `nonzero`, a Python `if`) raises, and the ways of cutting are those of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mcore_logprobs import api as m
from mcore_logprobs.kernels import largest as largest_columns
from mcore_logprobs.losses import ClippedLoss
from mcore_logprobs.ops import sampling_search
from tests.ops import EVERY_STATISTIC, WITH_A_GRADIENT

ROWS, WIDTH, VOCAB = 48, 16, 640


def _stats(stats: m.TokenStats) -> Tensor:
    return sum((getattr(stats, name) for name in WITH_A_GRADIENT), torch.zeros(())).sum()


ALL: Any = {"vocab_size": 600, **EVERY_STATISTIC}


def from_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return _stats(m.vocab_parallel_token_stats(hidden @ weight.t(), target, **ALL))


def fused(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return _stats(m.linear_token_stats(hidden, weight, target, softcap=20.0, **ALL))


def fused_in_tiles(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return _stats(m.linear_token_stats(hidden, weight, target, chunk_size=20, **ALL))


def policy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    old = torch.full((ROWS,), -7.0, device=hidden.device)
    advantages = torch.linspace(-1.0, 1.0, ROWS, device=hidden.device)
    loss, _ = m.linear_policy_loss(
        hidden,
        weight,
        target,
        ClippedLoss(entropy_coef=0.01),
        old,
        advantages,
        denominator=ROWS,
        entropy=True,
        vocab_size=600,
        chunk_size=20,
    )
    return loss


def replay(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """As many ids per row as in any other, in one tile."""
    ids = torch.arange(5, device=hidden.device).repeat(ROWS)
    offsets = torch.arange(ROWS + 1, device=hidden.device) * 5
    return m.linear_sampling_logprobs(hidden, weight, target, kept_ids=(ids, offsets)).sum()


def gathered(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    ids = target.unsqueeze(-1)
    logits = m.linear_gather(hidden, weight, ids, chunk_size=20)
    return (logits + m.linear_gather(hidden, weight, ids, log_softmax=True, chunk_size=20)).sum()


def _batch(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits `[6, 8, V]` that lie as `[8, 6, V]`."""
    return (hidden @ weight.t()).view(8, 6, VOCAB).transpose(0, 1)


def of_strided_rows(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """What is read at single rows and columns, of logits that no one stride covers."""
    logits, target = _batch(hidden, weight)[:, :-1], target.view(6, 8)[:, :-1]
    ids = torch.arange(3, device=hidden.device).repeat(target.numel())
    offsets = torch.arange(target.numel() + 1, device=hidden.device) * 3
    replayed = m.vocab_parallel_sampling_logprobs(logits, target, kept_ids=(ids, offsets))
    teacher = _batch(hidden, weight).contiguous().detach()[:, 1:]
    return (
        m.vocab_parallel_gather(logits, target.unsqueeze(-1)).sum()
        + replayed.sum()
        + m.vocab_parallel_kl_div(logits, teacher, kind="jsd").sum()
    )


def from_a_teacher_s_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    teacher = _batch(hidden, weight).detach()
    student = hidden.view(6, 8, WIDTH), weight
    return m.linear_kl_div(*student, teacher, chunk_size=20, kind="reverse").sum()


def largest(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    values, _ = m.linear_topk(hidden, weight, 5, chunk_size=20)
    return (values + m.vocab_parallel_topk(_batch(hidden, weight).reshape(ROWS, -1), 5)[0]).sum()


def sampled(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    ids = m.linear_sample(hidden.detach(), weight.detach(), seed=3, chunk_size=20)[0]
    return m.linear_token_stats(hidden, weight, ids).logprobs.sum()


def of_a_teacher_s_top_k(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    ids = (target.clamp(min=0).unsqueeze(-1) + torch.arange(4, device=target.device)) % 600
    teacher = torch.full(ids.shape, -2.0, device=target.device)
    values = [
        m.linear_topk_kl_div(hidden, weight, teacher, ids, kind=kind, beta=0.3, chunk_size=20)
        for kind in ("forward", "jsd", "skewed_reverse")
    ]
    return torch.stack(values).sum()


CALLS = [from_logits, fused, fused_in_tiles, policy, replay, gathered]
CALLS += [of_strided_rows, from_a_teacher_s_logits, largest, sampled, of_a_teacher_s_top_k]


class _NothingFromTheHost(TorchDispatchMode):
    """Refuses an operator that takes a host's tensor of data to the device, or one back.

    `torch.tensor` of Python numbers too: on a GPU it copies them and waits, and on the meta device
    nothing would show it. torch's own functions call it as well.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self.seen = 0

    def __enter__(self) -> Any:
        self._patches = pytest.MonkeyPatch()
        for name in ("tensor", "as_tensor"):
            self._patches.setattr(torch, name, self._of_tensors_alone(getattr(torch, name)))
        new_tensor = Tensor.new_tensor
        self._patches.setattr(
            Tensor,
            "new_tensor",
            lambda x, data, **options: self._of_tensors_alone(partial(new_tensor, x))(
                data, **options
            ),
        )
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patches.undo()
        super().__exit__(*error)

    def _of_tensors_alone(self, made: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(data: Any, **options: Any) -> Tensor:
            out = made(data, **options)
            assert isinstance(data, Tensor) or out.device.type != self._device, (
                f"between host and {self._device}: a tensor of {data}"
            )
            return out

        return make

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        kinds = {x.device.type for x in tensors if x.dim()}  # a scalar travels with the launch
        if "copy" in str(func):
            kinds = {x.device.type for x in tensors}
        assert kinds <= {self._device}, f"{func} between {kinds}"
        self.seen += 1
        return out


def _leaves(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(ROWS, WIDTH).to(dtype)
    weight = torch.randn(VOCAB, WIDTH).to(dtype)
    target = torch.randint(600, (ROWS,))
    target[::7] = -100
    return hidden.to(device), weight.to(device), target.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_forward_and_backward_ask_the_device_for_nothing(
    call: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    hidden, weight, target = _leaves("meta", dtype)
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    with _NothingFromTheHost("meta") as mode:
        grads = torch.autograd.grad(call(*leaves, target), leaves)
    assert [g.shape for g in grads] == [hidden.shape, weight.shape]
    assert mode.seen > 50


def test_the_proxy_sees_what_a_graph_would_refuse() -> None:
    x = torch.ones(3, device="meta")
    for bad in (x.sum().item, x.nonzero, lambda: bool(x.any()), lambda: x[x > 0]):
        with pytest.raises((RuntimeError, NotImplementedError)):
            bad()
    with _NothingFromTheHost("meta"):
        with pytest.raises(AssertionError, match="between"):
            torch.tensor([1.0, 2.0]).to("meta")
        with pytest.raises(AssertionError, match="between"):
            torch.tensor(2.0).to("meta")
        with pytest.raises(AssertionError, match="between"):
            x.new_tensor([1.0, 2.0])
        with pytest.raises(AssertionError, match="between"):
            torch.unravel_index(x.long(), (2, 3))
    hidden, weight, target = _leaves("meta", torch.float32)
    with pytest.raises((RuntimeError, NotImplementedError)):  # compaction says that it syncs
        m.linear_token_stats(hidden, weight, target, compact=True)


class _Waits(TorchDispatchMode):
    """Counts operators of which a GPU must be asked how large their result is."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        by_mask = name.startswith(("aten.index.", "aten.index_put")) and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        self.count += by_mask or "nonzero" in name or "masked_select" in name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("strided", [False, True])
def test_a_search_waits_once(strided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU searches: all rounds. The rows of one stride are found without asking."""
    monkeypatch.setattr(sampling_search._Interval, "is_one_value", False)
    monkeypatch.setattr(largest_columns, "is_traced", lambda x: True)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 3000, generator=generator).mul_(1e-2).requires_grad_()
    target = torch.randint(3000, (3, 4), generator=generator)
    if strided:
        logits, target = logits[:, :-1], target[:, :-1]
    with _Waits() as waits:
        found = m.vocab_parallel_sampling_logprobs(logits, target, top_p=0.9)
        found.sum().backward()
    assert waits.count == 1
    exact = logits.detach().double().softmax(-1)
    ordered, order = exact.sort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(exact).scatter_(
        -1, order, (ordered.cumsum(-1) - ordered < 0.9).double()
    )
    expected = (exact * kept / (exact * kept).sum(-1, keepdim=True)).log()
    expected = expected.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_a_cuda_graph_of_forward_and_backward_replays(
    call: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    hidden, weight, target = _leaves("cuda", dtype)
    leaves = (hidden.requires_grad_(), weight.requires_grad_())

    def step() -> tuple[Tensor, ...]:
        value = call(*leaves, target)
        return (value.detach(), *torch.autograd.grad(value, leaves))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels compile and libraries start outside the capture
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():  # the replay computes what lies in the inputs by then
        fresh = _leaves("cuda", dtype)
        for leaf, value in zip((*leaves, target), fresh, strict=True):
            leaf.copy_(value)
    graph.replay()
    for found, expected in zip(captured, step(), strict=True):
        assert torch.equal(found, expected)
