"""The kernels behind the public operations: chosen by name, compiled around, captured."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import _functional_collectives as functional_collectives
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_logprobs import linear_token_stats, vocab_parallel_kl_div, vocab_parallel_target_rank
from mcore_logprobs import vocab_parallel_token_stats as token_stats
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels import reference
from mcore_logprobs.kernels import triton as triton_backend
from mcore_logprobs.kernels.chunk import Chunk
from mcore_logprobs.kernels.stats import GradientTerms, StatsSpec
from mcore_logprobs.kernels.triton import gradient, pair_gradient, pair_statistics, statistics
from mcore_logprobs.kernels.triton.operators import arguments
from mcore_logprobs.ops.source import given_logits
from tests.kernels.common import DEVICE, make_logits
from tests.kernels.interpreter import interpreted

SPEC = StatsSpec(entropy=True, smoothing=True)
HOW = {"logit_scale": 0.5, "softcap": 4.0, "temperature": 0.8}


def _inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    logits = make_logits(6, 200, dtype)
    target = torch.tensor([0, 5, -1, 100, 189, 7], device=DEVICE)
    return logits, target, torch.full((6,), 9.0, device=DEVICE), torch.randn(3, 6, device=DEVICE)


@interpreted
def test_triton_is_had_by_name_and_serves_what_it_can():
    logits = make_logits(2, 8, torch.bfloat16)
    assert backends.select("triton", logits) is triton_backend
    assert backends.select("auto", logits) is (triton_backend if DEVICE == "cuda" else reference)
    choices = {choice.name: choice for choice in backends.explain(DEVICE)}
    assert choices["triton"].available
    for refused, reason in ((logits.double(), "float64"), (logits.t(), "last stride is 1")):
        with pytest.raises(ValueError, match=reason):
            backends.select("triton", refused)
        assert backends.select("auto", refused) is reference


@pytest.mark.parametrize("backend", ["torch", "triton"])
@interpreted
def test_a_gradient_over_the_logits_is_seen_by_whoever_saved_them(backend):
    x = make_logits(3, 40, torch.float32).requires_grad_()
    logits = x * 1.0
    saved = logits.square().sum()
    target = torch.tensor([0, 5, 39], device=DEVICE)
    stats = token_stats(logits, target, backend=backend, inplace_backward=True)
    torch.autograd.grad(stats.logprobs.sum(), x, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(saved, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("blocks", [1, 3])
@interpreted
def test_operations_on_logits_agree_with_torch(dtype, inplace, blocks):
    # [b, s, V] without its last position: of [s, b, V] that is one block, else one a sequence.
    leaves = [make_logits(12, 300, dtype).view(4, 3, 300).requires_grad_() for _ in range(2)]
    leaves[1].data.copy_(leaves[0].data)
    target = torch.randint(280, (3, 3), device=DEVICE)
    target[1, 1] = -100
    upstream = torch.randn(3, 3, device=DEVICE)
    results = []
    for leaf, backend in zip(leaves, ("torch", "triton"), strict=True):
        logits = leaf * 1.0
        logits = (logits.transpose(0, 1) if blocks == 1 else logits.view(3, 4, 300))[:, :-1]
        assert len(list(given_logits(logits).chunks())) == blocks
        temperature = 0.9 if blocks == 1 else torch.linspace(0.5, 1.5, 9).view(3, 3).to(DEVICE)
        options = {"temperature": temperature, "vocab_size": 280, "backend": backend}
        rank = vocab_parallel_target_rank(logits, target, **options)
        stats = token_stats(
            logits, target, entropy=True, target_rank=True, label_smoothing=0.1,
            sum_pi_squared=blocks > 1, inplace_backward=inplace, **options,
        )  # fmt: skip
        total = stats.logprobs - 0.5 * stats.entropy + 0.1 * stats.lse
        (upstream * (total if blocks == 1 else total + stats.sum_pi_squared)).sum().backward()
        assert torch.equal(stats.target_rank, rank)
        results.append((stats.logprobs, stats.entropy, stats.lse, rank))
    for name, torchs, tritons in zip(("logprobs", "entropy", "lse", "rank"), *results, strict=True):
        torch.testing.assert_close(tritons, torchs, rtol=1e-6, atol=1e-5, msg=name)
    tolerance = {"rtol": 2**-7, "atol": 1e-6} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad, **tolerance)


@interpreted
def test_the_fused_path_agrees_with_torch():
    hidden, weight = torch.randn(7, 16, device=DEVICE), torch.randn(300, 16, device=DEVICE)
    target = torch.randint(290, (7,), device=DEVICE)
    results = []
    for backend in ("torch", "triton"):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        stats = linear_token_stats(
            *leaves, target, entropy=True, softcap=5.0, temperature=0.7, vocab_size=290,
            chunk_size=4, backend=backend,
        )  # fmt: skip
        (stats.logprobs + stats.entropy).sum().backward()
        results.append((stats.logprobs, stats.entropy, *(leaf.grad for leaf in leaves)))
    for torchs, tritons in zip(*results, strict=True):
        torch.testing.assert_close(tritons, torchs, rtol=1e-4, atol=1e-5)


class _Names(TorchDispatchMode):
    """Names of what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@interpreted
def test_tensors_that_are_on_their_way_are_waited_for():
    # What a functional collective gives has no memory of its own to point to.
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:

            def late(x: torch.Tensor) -> torch.Tensor:
                found = functional_collectives.all_gather_tensor(x, 0, dist.group.WORLD)
                assert type(found) is functional_collectives.AsyncCollectiveTensor
                return found

            logits, target, *_ = _inputs()
            target = target.clamp(min=0)
            upstream = torch.randn(6, device=DEVICE)
            temperature = torch.rand(6, device=DEVICE) + 0.5
            found = []
            for wrap in (late, torch.Tensor.clone):
                leaf = logits.clone().requires_grad_()
                stats = token_stats(
                    leaf,
                    wrap(target),
                    entropy=True,
                    temperature=wrap(temperature),
                    backend="triton",
                )
                value = stats.logprobs + stats.entropy
                (grad,) = torch.autograd.grad(
                    value + _Late.apply(stats.lse, wrap), leaf, upstream, retain_graph=True
                )
                mask = wrap(upstream > -0.5)
                kl = vocab_parallel_kl_div(leaf, wrap(logits.flip(0)), mask=mask, backend="triton")
                (other,) = torch.autograd.grad(_Late.apply(kl, wrap), leaf, upstream)
                found.append((value.detach(), grad, kl.detach(), other))
            for one, plain in zip(*found, strict=True):
                assert torch.equal(one, plain)
        finally:
            dist.destroy_process_group()


class _Late(torch.autograd.Function):
    """The identity, whose gradient `wrap` has had in hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wrap: Any) -> torch.Tensor:
        ctx.wrap = wrap
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.wrap(grad.contiguous()), None


@interpreted
def test_whoever_looks_sees_the_operators():
    logits, target, *_ = _inputs()

    def stats(logits: torch.Tensor) -> torch.Tensor:
        return triton_backend.stats(Chunk(logits, 190, **HOW), target, SPEC)

    name = "mcore_logprobs::stats"
    with torch.no_grad():
        plain = stats(logits)
        with _Names() as names:
            assert torch.equal(stats(logits), plain)
        assert name in names.seen
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            assert torch.equal(stats(logits), plain)
        assert name in [event.name for event in profile.events()]
        traced = torch.jit.trace(stats, logits, check_trace=False)
        assert name in str(traced.graph)
        assert torch.equal(traced(logits + 1.0), stats(logits + 1.0))
        for pre_dispatch in (False, True):
            graph = make_fx(stats, pre_dispatch=pre_dispatch)(logits)
            assert name.replace("::", ".") in str(graph.code)
        fake = FakeTensorMode().from_tensor(logits)
        found = triton_backend.stats(Chunk(fake, 190), fake[:, 0].long(), SPEC)
        assert isinstance(found, FakeTensor)
        assert found.shape == plain.shape


@interpreted
def test_operators_declare_what_they_do():
    # Schema, fake implementation and what torch.compile sees, by torch's own checker.
    logits, target, shift, coef = _inputs()
    rows = torch.rand(6, device=DEVICE) + 0.5
    chunk = Chunk(logits, 190, **HOW)
    other = Chunk(logits.float(), 190, temperature=rows, bias=torch.randn(200, device=DEVICE))
    out, softmax = torch.empty_like(logits), torch.ones(4, 6, device=DEVICE)
    columns, upstream = target[:, None].expand(6, 3), torch.randn(6, 3, device=DEVICE)
    ranked = StatsSpec(rank=True)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    for operator, given in (
        (statistics._stats, (chunk, target, None, None, SPEC)),
        (statistics._stats, (other, target, shift, 64, ranked)),
        (gradient._grad, (chunk, columns[:, :1], upstream[:, :1], shift, coef, SPEC, out)),
        (gradient._grad, (other, columns, upstream, None, None, ranked, out)),
        (pair_statistics._pair_stats, (chunk, other, "reverse", 0.5)),
        (pair_statistics._pair_sums, (chunk, other, softmax, "jsd", 0.5)),
        (pair_gradient._pair_grad, (chunk, other, softmax, shift, rows, "jsd", 0.5, out)),
    ):
        torch.library.opcheck(operator, arguments(*given), test_utils=checks)


@pytest.mark.parametrize("inplace", [False, True])
@interpreted
def test_one_graph_under_torch_compile(inplace):
    def run(logits, target, shift, coef):
        stats = triton_backend.stats(Chunk(logits * 2, 190, **HOW), target, SPEC)
        out = logits * 2 if inplace else torch.zeros_like(logits)
        chunk = Chunk(out if inplace else logits * 2, 190, **HOW)
        entries = target.unsqueeze(1), shift.unsqueeze(1)
        terms = GradientTerms(*entries, shift + stats[0, 0], coef, SPEC)
        triton_backend.grad(chunk, terms, out=out)
        return stats, out + 1

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for inputs in (_inputs(), _inputs(torch.float32)):
        for got, expected in zip(compiled(*inputs), run(*inputs), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a GPU")
@interpreted
def test_captured_in_a_cuda_graph():
    logits, target, _, _ = _inputs()
    token_stats(logits, target.clamp(min=0), entropy=True)  # compile before the capture
    graph = torch.cuda.CUDAGraph()
    target = target.clamp(min=0)
    with torch.cuda.graph(graph):
        stats = token_stats(logits, target, entropy=True)
    logits.copy_(make_logits(6, 200, torch.bfloat16))
    graph.replay()
    expected = token_stats(logits, target, entropy=True, backend="torch")
    torch.testing.assert_close(stats.logprobs, expected.logprobs, rtol=1e-6, atol=1e-5)
