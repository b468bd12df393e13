"""Operations from hidden states: ties over blocks, precision, a LoRA, main_grad, tiles."""

from __future__ import annotations

import dataclasses
from typing import Any

import megatron.core  # noqa: F401  (the ranks' fork server imports it once for all of them)
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mcore_logprobs import (
    linear_gather,
    linear_kl_div,
    linear_policy_loss,
    linear_token_stats,
    linear_topk,
    vocab_parallel_token_stats,
    vocab_parallel_topk,
)
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels import budgets, inductor
from mcore_logprobs.kernels.inductor import INVARIANT
from mcore_logprobs.sources.head import HeadLogits, head_logits
from tests.helpers import oracles
from tests.helpers.heads import (
    Problem,
    make_problem,
    shard_problem,
)
from tests.helpers.memory import TensorsMade
from tests.helpers.shards import on_ranks, world_group, world_size


def _ties(world_vocab: int) -> tuple:
    """Products of small integers, exact on every path and full of ties."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randint(-1, 2, (8, 4), generator=generator).float()
    whole = torch.randint(-1, 2, (world_vocab, 4), generator=generator).float()
    group = world_group()
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    weight = whole.tensor_split(world)[rank]
    found = linear_topk(hidden, weight, 300, tp_group=group)
    expected = vocab_parallel_topk(hidden @ weight.t(), 300, tp_group=group)
    return found, expected


@pytest.mark.parametrize("world", [1, 2])
def test_ties_stand_by_id_over_blocks_and_ranks(ranks, world):
    for found, expected in on_ranks(ranks, world, _ties, 9_000):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("bias", [False, True])
def test_topk_of_a_tile_in_several_steps(monkeypatch, bias):
    monkeypatch.setattr(HeadLogits, "rows_at_a_time", lambda *_: 2)
    problem = make_problem((7, 1), bias=bias)
    hidden, weight, own = shard_problem(problem, False)
    leaves = [x for x in (hidden, weight, own) if x is not None]
    temperature = torch.rand(7, 1) + 0.5
    values, ids = linear_topk(
        hidden, weight, 5, bias=own, temperature=temperature, tp_group=world_group()
    )
    z = (hidden @ weight.t() if own is None else hidden @ weight.t() + own) / temperature[..., None]
    expected, order = z.topk(5, dim=-1)
    assert torch.equal(ids, order)
    torch.testing.assert_close(values, expected)
    upstream = torch.randn(values.shape)
    for grad, plain in zip(
        torch.autograd.grad(values, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(grad, plain)


def test_a_bf16_head_s_rounding_is_avoided_and_can_be_asked_for():
    problem = make_problem((256,), width=64, vocab=512, dtype=torch.bfloat16, names=("logprobs",))
    raw = problem.hidden.double() @ problem.weight.double().t()
    exact = oracles.token_stats(raw, problem.target).logprobs
    wide = linear_token_stats(problem.hidden, problem.weight, problem.target).logprobs
    narrow = linear_token_stats(
        problem.hidden, problem.weight, problem.target, logits_dtype=torch.bfloat16
    ).logprobs
    head = vocab_parallel_token_stats(problem.hidden @ problem.weight.t(), problem.target).logprobs
    assert (wide - exact).abs().max() < 2e-5
    assert (head - exact).abs().max() > 1e-2
    # The same rounding as the head's, up to the products' own last bits, which rounding may flip.
    assert (narrow - head).abs().mean() < 0.1 * (head - exact).abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weight_gradient_is_no_worse_in_256_chunks(dtype):
    problem = make_problem((256,), width=16, vocab=64, dtype=dtype, names=("logprobs",))
    upstream = problem.upstream["logprobs"]
    leaf = problem.weight.double().requires_grad_()
    stats = oracles.token_stats(problem.hidden.double() @ leaf.t(), problem.target)
    (exact,) = torch.autograd.grad(stats.logprobs, leaf, upstream.double())

    def error(chunk_size: int | None) -> float:
        hidden, weight, _ = shard_problem(problem, False)
        out = linear_token_stats(hidden, weight, problem.target, chunk_size=chunk_size)
        (grad,) = torch.autograd.grad(out.logprobs, weight, upstream)
        return ((grad.double() - exact).norm() / exact.norm()).item()

    one, many = error(None), error(1)
    # float32 sums differ in their last bits; bf16 is rounded once in either case.
    assert many <= (2.0 * one if dtype == torch.float32 else 1.001 * one)
    assert one < (1e-6 if dtype == torch.float32 else 3e-3)


# ---- a LoRA --------------------------------------------------------------------------------------


def test_an_entry_that_nobody_asks_for_adds_nothing():
    """Rows that hold NaN, and ids that no gradient comes to, in the gradients of A and B."""
    problem = make_problem((6,), lora=True)
    hidden, (a, b, scale) = problem.hidden, problem.lora
    ids = torch.tensor([[0, 3], [1, 1], [2, 3], [3, 9], [4, 5], [5, 0]])
    upstream = torch.randn(6, 2)
    upstream[2] = 0.0
    found = []
    for spoilt in (True, False):
        x = hidden.clone()
        if spoilt:
            x[2] = torch.nan
        leaves = [t.clone().requires_grad_() for t in (x, a, b)]
        z = linear_gather(leaves[0], problem.weight, ids, lora=(*leaves[1:], scale), softcap=5.0)
        found.append(torch.autograd.grad(z, leaves, upstream))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
        assert other.any()


def test_a_spoilt_row_that_is_asked_for_shows_before_the_lora_has_learnt():
    """With B = 0, as a LoRA starts, too."""
    problem = make_problem((6,), lora=True)
    hidden, (a, b, scale) = problem.hidden.clone(), problem.lora
    hidden[2] = torch.nan
    leaves = [a.clone().requires_grad_(), torch.zeros_like(b).requires_grad_()]
    z = linear_gather(hidden, problem.weight, torch.zeros(6, 2).long(), lora=(*leaves, scale))
    for grad in torch.autograd.grad(z.sum(), leaves):
        assert grad.isnan().any()


# ---- gradient_accumulation_fusion ----------------------------------------------------------------


def _against_megatron(problems: list[Problem]) -> tuple[Tensor, Tensor]:
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size())
    try:
        vocab, width = problems[0].weight.shape
        config = ModelParallelConfig(
            tensor_model_parallel_size=world_size(), use_cpu_initialization=True
        )
        layer = ColumnParallelLinear(
            width, vocab, config=config, init_method=torch.nn.init.normal_, bias=False
        )
        _, shard, _ = shard_problem(problems[0], False)
        with torch.no_grad():
            layer.weight.copy_(shard)
        theirs = torch.zeros_like(layer.weight, dtype=torch.float32)
        ours = torch.nn.Parameter(shard.detach())
        ours.main_grad = torch.zeros_like(ours, dtype=torch.float32)
        ours.grad_added_to_main_grad = False
        for problem in problems:
            upstream = problem.upstream["logprobs"]
            hidden = problem.hidden.clone().requires_grad_()
            logits, _ = layer(hidden)
            loss = vocab_parallel_cross_entropy(logits.clone(), problem.target)
            (loss * upstream).sum().backward()
            theirs += layer.weight.grad  # what Megatron's data parallelism does after each
            layer.weight.grad = None
            same = problem.hidden.clone().requires_grad_()
            out = linear_token_stats(
                same, ours, problem.target, gradient_accumulation_fusion=True, chunk_size=5
            )
            ours.zero_out_wgrad = problem is problems[0]
            (out.loss * upstream).sum().backward()
            assert ours.grad_added_to_main_grad is True
            # Data parallelism's hooks fire on a gradient of the right shape, which nobody adds.
            assert ours.grad is not None
            assert ours.grad.shape == ours.shape
            assert not (ours.zero_out_wgrad and ours.grad.any())
            ours.grad, ours.grad_added_to_main_grad = None, False
            torch.testing.assert_close(out.loss, loss, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(same.grad, hidden.grad, rtol=1e-5, atol=1e-5)
        return ours.main_grad, theirs
    finally:
        parallel_state.destroy_model_parallel()


def test_main_grad_is_what_megatrons_own_layer_accumulates(ranks):
    problems = [make_problem((6, 2), ignored=0.0, names=("logprobs",)) for _ in range(4)]
    for ours, theirs in ranks(2).run(_against_megatron, problems):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_a_low_precision_main_grad_is_rounded_once_a_tile(chunk_size):
    """float32 products are added to a bf16 main_grad, as Megatron's own kernel does."""
    problem = make_problem((7,), dtype=torch.bfloat16, ignored=0.0, names=("logprobs",))
    upstream, before = problem.upstream["logprobs"], torch.randn(24, 8).bfloat16()
    plain = problem.weight.float().requires_grad_()
    weight = torch.nn.Parameter(problem.weight)
    weight.main_grad, weight.grad_added_to_main_grad = before.clone(), False
    expected = before.clone()
    for rows in torch.arange(7).split(chunk_size or 7):
        stats = linear_token_stats(problem.hidden[rows].float(), plain, problem.target[rows])
        expected += torch.autograd.grad(stats.logprobs, plain, upstream[rows])[0]
    stats = linear_token_stats(
        problem.hidden.requires_grad_(),
        weight,
        problem.target,
        gradient_accumulation_fusion=True,
        chunk_size=chunk_size,
    )
    stats.logprobs.backward(upstream)
    assert weight.main_grad.dtype == torch.bfloat16
    # dLogits are rounded to bf16 before the product: an ulp or two of the sum.
    torch.testing.assert_close(weight.main_grad, expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_logits_add_to_main_grad_in_any_dtype(dtype):
    """Straight into one of float32; a bf16 one gets their float32 sum, rounded once."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(7, 8, generator=generator).bfloat16()
    weight = torch.nn.Parameter(torch.randn(24, 8, generator=generator).bfloat16())
    ids = torch.arange(21).view(7, 3) % 9
    upstream = torch.linspace(-1.0, 2.0, 21).view(7, 3)
    before = torch.randn(24, 8, generator=generator).to(dtype)
    weight.main_grad, weight.grad_added_to_main_grad = before.clone(), False
    expected = before.double()
    expected.index_add_(
        0, ids.flatten(), (upstream.unsqueeze(-1) * hidden.unsqueeze(1)).double().flatten(0, 1)
    )
    out = linear_gather(hidden, weight, ids, gradient_accumulation_fusion=True)
    with TensorsMade() as made:
        out.backward(upstream)
    assert weight.main_grad.dtype == dtype
    close = {"rtol": 2**-8, "atol": 2**-8} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(weight.main_grad, expected.to(dtype), **close)
    sums = [x for x in made.made if x.shape == weight.shape and x.dtype == torch.float32]
    assert len(sums) == (dtype == torch.bfloat16)


# ---- calls, tiles and rows ----------------------------------------------------------------------


def test_adapters_in_one_batch_are_a_call_each_and_cost_what_one_call_does() -> None:
    """As docs/api/hidden.md has it: values, gradients and multiplications."""
    generator = torch.Generator().manual_seed(5)
    n, v, h, r = 60, 320, 64, 2

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    hidden, weight = normal(n, h), normal(v, h).detach()
    adapters = [(normal(r, h), normal(v, r), 0.1) for _ in range(3)]
    target = torch.randint(0, v, (n,), generator=generator)
    upstream = torch.randn(n, generator=generator, dtype=torch.float64)
    adapter_id = torch.randint(0, 3, (n,), generator=generator)
    rows_of_adapter = [(adapter_id == i).nonzero().squeeze(1) for i in range(3)]
    leaves = [hidden, *(x for a, b, _ in adapters for x in (a, b))]

    def ours() -> Tensor:
        found = [
            linear_token_stats(hidden, weight, target[rows], rows=rows, lora=lora).logprobs
            for rows, lora in zip(rows_of_adapter, adapters, strict=True)
        ]
        return torch.zeros(n, dtype=torch.float64).index_put(
            (torch.cat(rows_of_adapter),), torch.cat(found)
        )

    def one_call() -> Tensor:
        return linear_token_stats(hidden, weight, target, lora=adapters[0]).logprobs

    a, b = (torch.stack([lora[part] for lora in adapters])[adapter_id] for part in (0, 1))
    low = torch.einsum("nh,nrh->nr", hidden, a)
    logits = hidden @ weight.t() + 0.1 * torch.einsum("nr,nvr->nv", low, b)
    expected = logits.log_softmax(-1).gather(1, target.unsqueeze(1)).squeeze(1)
    flops, grads = [], []
    for call in (ours, one_call):
        with FlopCounterMode(display=False) as counted:
            found = call()
            grads.append(torch.autograd.grad(found @ upstream, leaves, allow_unused=True))
        flops.append(counted.get_total_flops())
        if call is ours:
            torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grads[0], torch.autograd.grad(expected @ upstream, leaves))
    assert flops[0] == flops[1] > 3 * 2 * n * v * h


def test_the_largest_chunk_decides_what_computes_a_call() -> None:
    """A short last tile is computed by what the others are, and by no kernels of its own."""
    sizes = dataclasses.replace(budgets.CPU, compiled_numel=80)
    hidden, weight = torch.randn(5, 4), torch.randn(40, 4)
    with budgets.use(sizes):
        of_size = [backends.select("auto", torch.empty(rows, 40)) for rows in (1, 2)]
        assert of_size[0] is not of_size[1]  # the compiled one from 80 logits on
        for rows in (1, 2):  # the last tile has one row
            assert head_logits(hidden, weight, chunk_size=rows).backend is of_size[rows - 1]
        assert head_logits(hidden, weight, invariant_segments=1).backend is INVARIANT


def test_compiled_kernels_compute_short_tiles_and_narrow_blocks_too() -> None:
    """Tiles of 4, 4 and 1 rows, blocks of 2048, 2048 and 300 columns, all by one backend."""
    n, v, h = 9, 2 * 2048 + 300, 6
    generator = torch.Generator().manual_seed(7)
    hidden, weight, of_teacher, head_of_teacher = (
        torch.randn(shape, generator=generator) for shape in ((n, h), (v, h), (n, h), (v, h))
    )
    target = torch.randint(0, v, (n,), generator=generator)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    upstream = torch.linspace(-1.0, 2.0, n)
    small = dataclasses.replace(
        budgets.CPU, tile_rows=4, chunk_bytes=1, min_block=2048, held_rows=4, compiled_numel=1
    )
    kind = {"teacher_hidden": of_teacher, "teacher_weight": head_of_teacher}
    with budgets.use(small):
        source = head_logits(hidden, weight)
        assert source.backend is inductor
        assert source.tile_ends() == [4, 8, 9]
        assert [part.stop - part.start for part in source.blocks] == [2048, 2048, 300]
        stats = linear_token_stats(hidden, weight, target, entropy=True)
        found = [stats.logprobs, stats.entropy, linear_kl_div(hidden, weight, **kind)]
        losses, _ = linear_policy_loss(hidden, weight, target, lambda x, _: -x * x)
        loss = sum(x @ upstream for x in found) + losses
        gradients = torch.autograd.grad(loss, leaves)
    logp = (hidden.double() @ weight.double().t()).log_softmax(-1)
    logq = (of_teacher.double() @ head_of_teacher.double().t()).log_softmax(-1)
    own = logp.gather(1, target.unsqueeze(1)).squeeze(1)
    exact = [own, -(logp.exp() * logp).sum(-1), (logq.exp() * (logq - logp)).sum(-1)]
    exact_loss = sum(x @ upstream.double() for x in exact) - own.square().sum()
    for got, want in zip(found, exact, strict=True):
        torch.testing.assert_close(got, want.float(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(loss.double(), exact_loss, rtol=2e-6, atol=0.0)
    for got, want in zip(gradients, torch.autograd.grad(exact_loss, leaves), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 * float(want.abs().max()))


def no_ids_under_sequence_parallelism(chunk_size: int | None) -> tuple[torch.Size, torch.Size]:
    hidden, weight, group = torch.randn(4, 2, 3), torch.randn(8, 3), world_group()
    target = torch.zeros(4 * world_size(), 2, dtype=torch.int64)
    options = {"sequence_parallel": True, "chunk_size": chunk_size, "tp_group": group}
    ids = target.unsqueeze(-1)[..., :0]
    stats = linear_token_stats(hidden, weight, target, candidate_ids=ids, **options)
    return linear_gather(hidden, weight, ids, **options).shape, stats.candidates.shape


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_no_ids_under_sequence_parallelism(ranks, chunk_size) -> None:
    for found in ranks(2).run(no_ids_under_sequence_parallelism, chunk_size):
        assert found == ((8, 2, 0), (8, 2, 0))


@pytest.mark.parametrize("spoilt", ["hidden", "weight"])
def test_an_entry_without_an_upstream_leaves_nothing_of_what_is_spoilt(spoilt: str) -> None:
    tensors = {"hidden": torch.randn(4, 6), "weight": torch.randn(9, 6)}
    tensors[spoilt][2] = torch.nan
    hidden, weight = (x.requires_grad_() for x in tensors.values())
    ids = torch.tensor([[0, 1], [3, 4], [2, 5], [6, 7]])
    upstream = torch.linspace(0.5, 2.0, 8).view(4, 2)
    upstream[2] = 0.0  # the spoilt row, and the only place of the spoilt id
    values = linear_gather(hidden, weight, ids)
    of_hidden, of_weight = torch.autograd.grad(values, (hidden, weight), upstream)
    assert of_hidden.isfinite().all()
    assert of_weight.isfinite().all()
    assert not of_hidden[2].any()


def test_rows_that_are_named_often_are_added_in_float32() -> None:
    """In bfloat16 a sum of 2,000 equal numbers would end at 256 of them."""
    hidden, weight = torch.randn(3, 6).bfloat16(), torch.randn(40, 6).bfloat16()
    rows, target = torch.ones(2000, dtype=torch.int64), torch.full((2000,), 7)
    low, wide = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    logprobs = linear_token_stats(low, weight, target, rows=rows).logprobs
    (got,) = torch.autograd.grad(logprobs.sum(), low)
    one = (wide[1] @ weight.double().t()).log_softmax(-1)[7]
    (expected,) = torch.autograd.grad(2000 * one, wide)
    torch.testing.assert_close(got[1].double(), expected[1], rtol=2**-7, atol=0.5)


def test_single_logits_are_rounded_as_blocks_are() -> None:
    hidden, weight = torch.randn(6, 32).bfloat16(), torch.randn(18, 32).bfloat16()
    ids = torch.arange(12).view(6, 2)
    found = linear_gather(hidden, weight, ids, logits_dtype=torch.bfloat16)
    assert torch.equal(found, found.bfloat16().float())
    assert not torch.equal(found, linear_gather(hidden, weight, ids))


def test_a_float16_policy_loss_in_several_tiles_with_a_temperature_per_token() -> None:
    """What keeps dLogits within float16 is each tile's own."""
    hidden = torch.randn(6, 8).half().requires_grad_()
    weight = (torch.randn(16, 8) / 3).half().requires_grad_()
    temperature, target = torch.linspace(0.5, 2.0, 6), torch.arange(6)
    factors = torch.linspace(-1, 2, 6)
    loss, _ = linear_policy_loss(
        *(hidden, weight, target, lambda logprobs, entropy, f: logprobs * f, factors),
        temperature=temperature,
        chunk_size=2,
    )
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    z = exact[0] @ exact[1].t() / temperature.double().unsqueeze(1)
    expected = (z.log_softmax(-1)[torch.arange(6), target] * factors).sum()
    found, wanted = (
        torch.autograd.grad(value, leaves)
        for value, leaves in ((loss, (hidden, weight)), (expected, exact))
    )
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=3e-3, atol=3e-3)


# ---- main_grad ----------------------------------------------------------------------------------

FUSION: Any = {"gradient_accumulation_fusion": True}


@pytest.mark.parametrize("main_grad", [None, torch.zeros(7), torch.zeros(7, 18), 1.0])
def test_a_weight_that_learns_has_a_main_grad_of_its_shape(main_grad: Any) -> None:
    weight, target = torch.nn.Parameter(torch.randn(18, 7)), torch.tensor([3, 17, 0])
    if main_grad is not None:
        weight.main_grad = main_grad
    with pytest.raises(ValueError, match=r"expected weight.main_grad of shape \(18, 7\), got"):
        linear_token_stats(torch.randn(3, 7), weight, target, **FUSION)


def test_a_weight_without_gradients_needs_no_main_grad() -> None:
    """A reference model's and a frozen one's: there are no buffers."""
    hidden, target = torch.randn(3, 7, requires_grad=True), torch.tensor([3, 17, 0])
    weight = torch.nn.Parameter(torch.randn(18, 7))
    with torch.no_grad():
        value = linear_token_stats(hidden, weight, target, **FUSION).logprobs
    learns = linear_token_stats(hidden, weight.requires_grad_(False), target, **FUSION).logprobs
    exact = (hidden.double() @ weight.double().t()).log_softmax(-1)[range(3), target]
    torch.testing.assert_close(value.double(), exact.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(learns.double(), exact, rtol=1e-5, atol=1e-5)
    got, want = (torch.autograd.grad(x.sum(), hidden)[0] for x in (learns, exact))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_weight_that_megatron_does_not_mark_gets_no_gradient_of_its_own() -> None:
    """What stands for one is uninitialized: without the mark an optimizer would read it."""
    hidden, target = torch.randn(3, 7), torch.tensor([3, 17, 0])
    weight = torch.nn.Parameter(torch.randn(18, 7))
    weight.main_grad = torch.zeros(18, 7)
    linear_token_stats(hidden, weight, target, **FUSION).logprobs.sum().backward()
    assert weight.grad is None
    exact = weight.detach().double().requires_grad_()
    (hidden.double() @ exact.t()).log_softmax(-1)[range(3), target].sum().backward()
    torch.testing.assert_close(weight.main_grad.double(), exact.grad, rtol=1e-4, atol=1e-5)
