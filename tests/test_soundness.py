"""Around forward and backward: what is singular. The products of settings are in the engine."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import mcore_logprobs as ml
from mcore_logprobs.ops.policy_loss import loss_of_stats
from mcore_logprobs.sources.head import HeadLogits
from tests.engine import cases, run
from tests.ops import OPERATIONS

CALLS = [(name, source) for name, op in OPERATIONS.items() for source in op.sources]
OF_ROWS = [  # from logits of any leading shape
    name
    for name, op in OPERATIONS.items()
    if op.from_logits and op.differentiable and not op.same_dtype
]
# Lines of the engine.
DIFFERENTIABLE = [
    *(f"{name} {source}" for name, source in CALLS if OPERATIONS[name].differentiable),
    "gather hidden log_softmax=True",
    "sampling_logprobs logits replay=True",
    "sampling_logprobs hidden top_k=6 top_p=0.8",
    "topk_distill logits entropy=True",
]
LINEAR = ("topk logits", "gather logits", "all_to_all_vp2sp logits", "all_to_all_sp2vp logits")


def opened(line: str, **settings: str) -> tuple[list[Tensor], Any]:
    """Tensors that want gradients, and a function of them that gives the differentiable outputs."""
    case = cases.parse([*line.split(), *(f"{name}={value}" for name, value in settings.items())])
    mine = run.place(case, cases.Problem(case))

    def call(*head: Tensor) -> list[Tensor]:
        outputs = case.operation(case.source, head, mine.side, mine.keywords)
        return [outputs[name] for name in case.operation.differentiable if name in outputs]

    return list(mine.leaves.values()), call


@pytest.mark.parametrize("line", [line for line in DIFFERENTIABLE if line not in LINEAR])
def test_a_penalty_on_gradients_raises(line: str) -> None:
    """A second derivative raises; the first one is the same under create_graph=True."""
    scale = torch.ones((), requires_grad=True)
    leaves, call = opened(line)
    leaves = [x * scale for x in leaves]

    def gradients(**options: bool) -> tuple[Tensor, ...]:
        roots = call(*leaves)
        incoming = [torch.linspace(0.5, 1.5, x.numel()).view(x.shape) for x in roots]
        return torch.autograd.grad(roots, leaves, incoming, **options)

    grads = gradients(create_graph=True)
    for got, expected in zip(grads, gradients(), strict=True):
        assert torch.equal(got.nan_to_num(99), expected.nan_to_num(99))
    loss = sum((g * g).sum() for g in grads) + leaves[0].sum()
    for last in (
        lambda: torch.autograd.grad(loss, [scale], retain_graph=True),
        lambda: torch.autograd.grad(grads[0], [scale], grads[0].detach(), retain_graph=True),
        lambda: loss.backward(inputs=[scale], retain_graph=True),
        loss.backward,
    ):
        with pytest.raises(RuntimeError, match="gradient of a gradient"):
            last()
    grads[0].mul_(0.5)  # as clipping does


def test_a_linear_operation_has_no_second_derivative_to_lose() -> None:
    (logits,), call = opened("topk logits")
    (grad,) = torch.autograd.grad(call(logits)[0].sum(), logits, create_graph=True)
    assert not grad.requires_grad


class _Lost(torch.autograd.Function):
    """Identity whose backward has no gradient for its input: the operation before gets None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


@pytest.mark.parametrize("line", DIFFERENTIABLE)
def test_outputs_that_get_no_gradient_give_none(line: str) -> None:
    leaves, call = opened(line)
    torch.stack([_Lost.apply(x).sum() for x in call(*leaves)]).sum().backward()
    assert all(leaf.grad is None for leaf in leaves)


@pytest.mark.parametrize("line", [line for line in DIFFERENTIABLE if "hidden" in line])
def test_one_gradient_alone_is_the_same(line: str) -> None:
    leaves, call = opened(f"{line} chunk_size=5 bias=True")

    def gradients() -> list[Tensor | None]:
        roots = call(*leaves[:2])
        incoming = [torch.linspace(0.5, 1.5, x.numel()).view(x.shape) for x in roots]
        wanted = [x for x in leaves if x.requires_grad]
        found = iter(torch.autograd.grad(roots, wanted, incoming))
        return [next(found) if x.requires_grad else None for x in leaves]

    together = gradients()
    for alone in range(3):
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(i == alone)
        found, expected = gradients()[alone], together[alone]
        assert found is not None
        assert expected is not None
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert expected.any()


@pytest.mark.parametrize("lead", ["[n]", "[s, b]", "[4,4]"])
@pytest.mark.parametrize("line", [line for line in DIFFERENTIABLE if "all_to_all" not in line])
def test_results_can_be_changed_in_place(line: str, lead: str) -> None:
    """As a masked fill of log-probabilities does, each result by itself."""
    leaves, call = opened(line, lead=lead)
    places = range(len(call(*leaves)))

    def gradients(change: Callable[[Tensor], Tensor]) -> list[tuple[Tensor, ...]]:
        found = []
        for i in places:
            changed = change(call(*leaves)[i])
            incoming = torch.linspace(0.5, 1.5, changed.numel()).view(changed.shape)
            found.append((changed, *torch.autograd.grad(changed, leaves, incoming)))
        return found

    for got, expected in zip(
        gradients(lambda x: x.mul_(3.0)), gradients(lambda x: x * 3.0), strict=True
    ):
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_log_softmax_of_transposed_logits_is_in_the_order_of_tokens() -> None:
    """Rows in the order of the memory fill a buffer of the very shape of the result."""
    logits = torch.randn(4, 4, 9).transpose(0, 1)
    found = ml.vocab_parallel_log_softmax(logits)
    torch.testing.assert_close(found, logits.log_softmax(-1))


def test_distillation_of_one_id() -> None:
    hidden, weight, ids = torch.randn(7, 5), torch.randn(11, 5), torch.arange(7)[:, None]
    student, teacher, _ = ml.linear_topk_distill(hidden, weight, torch.randn(7, 1), ids)
    assert torch.equal(student, ml.linear_gather(hidden, weight, ids, log_softmax=True))
    assert not teacher.any()


@pytest.mark.parametrize("name", OF_ROWS)
def test_expanded_logits_under_a_hook_that_clones(name: str) -> None:
    """A clone of an expanded tensor has other strides."""
    op, case = OPERATIONS[name], cases.parse([name, "logits", "dtype=float64", "ignored=True"])
    mine = run.place(case, cases.Problem(case))
    leaf = torch.randn(1, 2, 24, dtype=torch.float64, requires_grad=True)
    found = []
    for hook in (lambda x: x, torch.clone):
        with saved_tensors_hooks(hook, lambda x: x):
            outputs = op("logits", (leaf.expand(6, 2, 24),), mine.side, mine.keywords)
        roots = [outputs[n] for n in op.differentiable if n in outputs]
        incoming = [torch.linspace(-1.0, 2.0, x.numel()).double().view(x.shape) for x in roots]
        found += torch.autograd.grad(roots, leaf, incoming)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.own_sizes  # a block of 7 rows has another address in memory where it is a copy
@pytest.mark.parametrize("layout", ["contiguous", "vocabulary first"])
@pytest.mark.parametrize(
    "line",
    [
        *(line for line in DIFFERENTIABLE if "hidden" in line),
        "kl_div hidden teacher=adapted kind=reverse",
    ],
)
def test_logits_are_computed_again_from_operands_that_lie_as_they_did(
    line: str, layout: str
) -> None:
    """In another order a matrix library rounds otherwise: same bits whatever a hook gives back."""
    case = cases.parse([*line.split(), "lora=True", "chunk_size=7", f"layout={layout}"])
    mine, found = run.place(case, cases.Problem(case)), []
    for hook in run.HOOKS.values():
        with saved_tensors_hooks(hook, lambda x: x):
            outputs = case.operation("hidden", mine.head, mine.side, mine.keywords)
        roots = [outputs[name] for name in case.operation.differentiable if name in outputs]
        incoming = [torch.linspace(-1.0, 2.0, x.numel()).view(x.shape) for x in roots]
        found.append(torch.autograd.grad(roots, list(mine.leaves.values()), incoming))
    for grads in found[1:]:
        assert all(map(torch.equal, grads, found[0]))


FUNCTIONS: dict[str, Callable[..., object]] = {
    "linear_policy_loss": lambda fn, hidden, weight, size: ml.linear_policy_loss(
        hidden, weight, torch.arange(len(hidden)), lambda logprobs, _: fn(logprobs), chunk_size=size
    ),
    "linear_map": lambda fn, hidden, weight, size: ml.linear_map(
        hidden, weight, lambda z: fn(z).sum(-1), chunk_size=size
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_hooks_see_nothing_of_a_graph_that_ends_within_the_call(name: str) -> None:
    """They may be a checkpoint's, or move what they see to the host."""
    hidden, weight = torch.randn(12, 4, requires_grad=True), torch.randn(24, 4)
    seen: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
        FUNCTIONS[name](lambda x: x.exp().tanh().square(), hidden, weight, 12)
        once = len(seen)
        FUNCTIONS[name](lambda x: x.exp().tanh().square(), hidden, weight, 3)
    assert len(seen) == 2 * once
    assert all(x.numel() in (0, hidden.numel(), weight.numel(), 12) for x in seen)


@pytest.mark.parametrize("hooks", [False, True])
def test_a_loss_that_changes_what_its_gradient_needs_raises(hooks: bool) -> None:
    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        ratio = logprobs.exp()
        return logprobs - ratio.mul_(2.0)

    around = saved_tensors_hooks(lambda x: x, lambda x: x) if hooks else nullcontext()
    hidden, weight = torch.randn(12, 4, requires_grad=True), torch.randn(24, 4)
    with around, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        FUNCTIONS["linear_policy_loss"](loss, hidden, weight, None)


def test_a_loss_changes_copies_of_what_it_gets_by_name() -> None:
    logprobs, full = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.5])
    stats = ml.TokenStats(logprobs, None, None, None, full_logprobs=full)

    def loss(logprobs: Tensor, entropy: Tensor | None, full_logprobs: Tensor) -> Tensor:
        return -logprobs * full_logprobs.sub_(logprobs.detach()).exp_()

    loss_of_stats(stats, torch.ones(2, dtype=torch.bool), loss)
    assert full.tolist() == [-1.5, -2.5]


@pytest.mark.parametrize(("name", "source"), CALLS)
def test_a_negative_bit_is_read(name: str, source: str) -> None:
    assert not run.failures([cases.parse([name, source, "layout=negative bit"])])


@pytest.mark.parametrize(("name", "source"), CALLS)
def test_results_are_float32_whatever_the_default_dtype_is(name: str, source: str) -> None:
    words = [name, source, *(["replay=True"] if name == "sampling_logprobs" else [])]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert not run.failures([cases.parse(words)])
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("filters", [{"top_k": 6}, {"top_p": 0.8}], ids=str)
def test_logits_computed_again_do_not_move_the_cut(filters: dict) -> None:
    """Logits with other last bits, as of another kernel: no token falls out by them."""
    hidden, weight = torch.randn(99, 16, requires_grad=True), torch.randn(24, 16)
    target = torch.arange(99) % 24
    upstream, grads = torch.randn(99), []
    inf = torch.tensor(torch.inf)
    for hook in (run.HOOKS["none"], lambda x: x.nextafter(inf) if x.shape == (99, 16) else x):
        with saved_tensors_hooks(hook, lambda x: x):
            out = ml.linear_sampling_logprobs(hidden, weight, target, **filters)
        grads += torch.autograd.grad(out, hidden, upstream)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)


def test_stats_are_not_moved_to_integers() -> None:
    stats = ml.vocab_parallel_token_stats(torch.randn(3, 5), torch.tensor([0, 4, 2]))
    for to in (torch.int64, torch.zeros(1, dtype=torch.int64)):
        with pytest.raises(ValueError, match="expected a floating-point dtype"):
            stats.to(to)
    moved = stats.to(torch.zeros(1, dtype=torch.float64))
    assert moved.logprobs.dtype == torch.float64


def test_autocast_is_restored_where_linear_map_computes_again() -> None:
    """A product within fn is bfloat16 in the backward as in the forward, as a checkpoint's is."""
    hidden, weight = torch.randn(12, 8, requires_grad=True), torch.randn(24, 8, requires_grad=True)
    matrix, upstream = 0.1 * torch.randn(24, 5), torch.randn(12, 5)
    dtypes = []

    def fn(z: Tensor) -> Tensor:
        product = z @ matrix
        dtypes.append(product.dtype)
        return product.float().square()

    with torch.autocast("cpu", torch.bfloat16):
        out = ml.linear_map(hidden, weight, fn, chunk_size=5)
        plain = fn((hidden.unsqueeze(1) * weight).sum(-1))
    found = torch.autograd.grad(out, [hidden, weight], upstream)
    expected = torch.autograd.grad(plain, [hidden, weight], upstream)
    assert set(dtypes) == {torch.bfloat16}
    for ours, theirs in zip((out, *found), (plain, *expected), strict=True):
        assert (ours - theirs).abs().max() <= 0.02 * theirs.abs().max()


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_main_grad_is_asked_for_only_where_there_is_a_gradient(without) -> None:
    hidden, weight = torch.randn(4, 3), torch.nn.Parameter(torch.randn(6, 3))
    target = torch.arange(4)
    with without():
        stats = ml.linear_token_stats(hidden, weight, target, gradient_accumulation_fusion=True)
        loss, _ = ml.linear_policy_loss(
            hidden, weight, target, lambda p, _: -p, gradient_accumulation_fusion=True
        )
    torch.testing.assert_close(loss, -stats.logprobs.sum())


def _gather_one_element(dtype: torch.dtype) -> list[int]:
    x = torch.tensor([dist.get_rank() + 1, 99], dtype=dtype)[::2]
    options = {"cp_group": dist.group.WORLD, "seq_dim": 0, "layout": "contiguous"}
    return ml.context_parallel_gather(x, **options).tolist()


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64, torch.bfloat16], ids=str)
def test_one_element_a_rank_with_a_stride(ranks, dtype) -> None:
    assert ranks(2).run(_gather_one_element, dtype) == [[1, 2]] * 2


def test_a_policy_loss_keeps_nothing_after_its_backward() -> None:
    shapes = {"hidden": (5, 8), "weight": (24, 8), "A": (3, 8), "B": (24, 3)}
    leaves = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}
    x = {name: 2.0 * leaf for name, leaf in leaves.items()}  # the graph itself holds the leaves
    loss, _ = ml.linear_policy_loss(
        x["hidden"],
        x["weight"],
        torch.arange(5),
        lambda logprobs, _: -logprobs,
        lora=(x["A"], x["B"], 0.5),
    )
    held = {name: StorageWeakRef(tensor.untyped_storage()) for name, tensor in x.items()}
    x.clear()
    loss.backward()
    assert [name for name in ("hidden", "A", "B") if not held[name].expired()] == []
    assert loss.grad_fn is not None


@pytest.mark.parametrize("name", [name for name, source in CALLS if source == "hidden"])
def test_a_head_is_gone_with_its_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the garbage collector: a head holds a chunk of logits."""
    seen = []
    opened = HeadLogits.__init__

    def watched(self: HeadLogits, *args: object) -> None:
        opened(self, *args)  # type: ignore[arg-type]
        seen.append(weakref.ref(self))

    monkeypatch.setattr(HeadLogits, "__init__", watched)
    gc.disable()
    try:
        assert not run.failures([cases.parse([name, "hidden", "ignored=True"])])
        assert seen
        assert [ref() for ref in seen if ref() is not None] == []
    finally:
        gc.enable()
