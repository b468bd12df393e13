"""The kernels behind the public operations: chosen by name, compiled around, captured."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import _functional_collectives as functional_collectives
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import mcore_logprobs as ml
from mcore_logprobs import vocab_parallel_token_stats as token_stats
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels import reference
from mcore_logprobs.kernels import triton as triton_backend
from mcore_logprobs.kernels.chunk import Chunk, Processing
from mcore_logprobs.kernels.pairs import KINDS
from mcore_logprobs.kernels.stats import GradientTerms, StatsSpec
from mcore_logprobs.kernels.triton import gradient, pair_gradient, pair_statistics, statistics
from mcore_logprobs.kernels.triton.common import row_multiplier
from mcore_logprobs.kernels.triton.operators import arguments, chunks_of
from mcore_logprobs.sources.given import given_logits
from tests.engine import run
from tests.engine.cases import Case, random_cases
from tests.engine.truths import take
from tests.helpers.covering import covering
from tests.helpers.distributed import get_pool
from tests.kernels.common import DEVICE, make_logits, setting_id
from tests.kernels.interpreter import interpreted, replace_builtins_once
from tests.ops import OPERATIONS as TABLE
from tests.ops import PER_TOKEN

SPEC = StatsSpec(entropy=True, smoothing=True)
HOW = Processing.of(logit_scale=0.5, softcap=4.0, temperature=0.8)


def _inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    logits, target = make_logits(3, 40, dtype), torch.tensor([0, -1, 29], device=DEVICE)
    return logits, target, torch.full((3,), 9.0, device=DEVICE), torch.randn(3, 3, device=DEVICE)


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


@interpreted
def test_a_gradient_over_the_logits_is_seen_by_whoever_saved_them():
    x = make_logits(3, 40, torch.float32).requires_grad_()
    logits = x * 1.0
    saved = logits.square().sum()
    target = torch.tensor([0, 5, 39], device=DEVICE)
    stats = token_stats(logits, target, backend="triton", inplace_backward=True)
    torch.autograd.grad(stats.logprobs.sum(), x, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(saved, x)


# ---- public operations agree with torch ---------------------------------------------------------

LEAD, WIDTH, VALID = (2, 2), 300, 280


class Call(NamedTuple):
    """What an operation is given besides its logits."""

    ids: Tensor  # [2, 2, 6], one of them twice; the first is the row's target
    other: Tensor  # [2, 2, V], a teacher's logits
    given: Tensor  # [2, 2, 6], a teacher's logits at ids
    keep: Tensor  # [2, 2], whether the row counts
    options: dict[str, Any]

    @property
    def target(self) -> Tensor:
        return self.ids[..., 0].masked_fill(~self.keep, -100)


def _distilled(z: Tensor, call: Call, normalize: Any) -> Sequence[Tensor]:
    found = ml.vocab_parallel_topk_distill(
        z, call.given, call.ids, normalize=normalize, entropy=True, **call.options
    )
    return found[0], found[2]


def _statistics(z: Tensor, call: Call, **wanted: Any) -> Sequence[Tensor]:
    ranks = ml.vocab_parallel_target_rank(z, call.target, **call.options)
    found = token_stats(z, call.target, entropy=True, target_rank=True, **wanted, **call.options)
    assert torch.equal(found.target_rank, ranks)
    return [getattr(found, name) for name in PER_TOKEN if getattr(found, name) is not None]


def _divergence(z: Tensor, call: Call, kind: Any) -> Sequence[Tensor]:
    options = call.options | {"teacher_temperature": 1.2, "mask": call.keep}
    if kind == "cross_entropy":
        return [ml.vocab_parallel_soft_cross_entropy(z, call.other, **options)]
    return [ml.vocab_parallel_kl_div(z, call.other, kind=kind, beta=0.3, **options)]


OPERATIONS: dict[str, Callable[[Tensor, Call], Sequence[Tensor]]] = {
    "statistics": _statistics,
    "in place": partial(_statistics, label_smoothing=0.1, inplace_backward=True),
    "squares": partial(_statistics, sum_pi_squared=True),
    "gather": lambda z, call: [ml.vocab_parallel_gather(z, call.ids, **call.options)],
    "log_softmax": lambda z, call: [
        ml.vocab_parallel_gather(z, call.ids, log_softmax=True, **call.options)
    ],
    "largest": lambda z, call: ml.vocab_parallel_topk(z, 6, **call.options)[:1],
    "distilled, vocab": partial(_distilled, normalize="vocab"),
    "distilled, topk": partial(_distilled, normalize="topk"),
    **{kind: partial(_divergence, kind=kind) for kind in KINDS},
}
# How `[2, 2, V]` rows lie, as a view of `[3, 2, V]`: one block with a transposed lead; one as it
# is; or a block for each of the first dimension.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, 1)[:, :-1],
    "one block": lambda x: x[1:],
    "blocks": lambda x: x.view(2, 3, -1)[:, :-1],
}
CALLS: dict[str, tuple[str, ...]] = {
    "operation": tuple(OPERATIONS),
    "layout": tuple(LAYOUTS),
    "dtype": ("bfloat16", "float32", "float16"),
}


@pytest.mark.parametrize("setting", covering(CALLS, lambda _: True), ids=setting_id)
@interpreted
def test_operations_on_logits_agree_with_torch(setting):
    dtype, seen = getattr(torch, setting["dtype"]), LAYOUTS[setting["layout"]]
    raw, other = (make_logits(6, WIDTH, dtype).view(3, 2, WIDTH) for _ in range(2))
    in_views = {"chunk_size": 1} if setting["layout"] == "blocks" else {}  # not copied together
    if in_views:
        assert len(list(given_logits(seen(raw), **in_views).chunks())) == 2
    ids = torch.randint(VALID, (*LEAD, 6), device=DEVICE)
    ids[..., 5] = ids[..., 0]
    temperature = 0.9 if setting["layout"] == "one block" else torch.rand(2, 1, device=DEVICE) + 0.5
    keep = torch.tensor([[True, True], [False, True]], device=DEVICE)
    given = torch.randn(*LEAD, 6, device=DEVICE)
    found = []
    for backend in ("torch", "triton"):
        options = {"temperature": temperature, "vocab_size": VALID, "backend": backend, **in_views}
        leaf = raw.clone().requires_grad_()
        call = Call(ids, seen(other), given, keep, options)
        values = OPERATIONS[setting["operation"]](seen(leaf * 1.0), call)
        differentiated = [value for value in values if value.requires_grad]
        upstream = [torch.linspace(-1, 1, v.numel()).view_as(v).to(v) for v in differentiated]
        torch.autograd.backward(differentiated, upstream)
        found.append((values, leaf.grad))
    (torchs, torch_grad), (tritons, triton_grad) = found
    for value, want in zip(tritons, torchs, strict=True):
        torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-5)
    assert torch_grad.any()
    # A difference of two roundings of the gradient's dtype.
    step = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    torch.testing.assert_close(triton_grad, torch_grad, rtol=step, atol=2e-6)


HEADS: dict[str, Callable[..., Sequence[Tensor]]] = {
    "statistics": lambda h, w, ids, x, bias, **how: [
        getattr(ml.linear_token_stats(h, w, ids[:, 0], entropy=True, **how), name)
        for name in ("logprobs", "entropy")
    ],
    "gather": lambda h, w, ids, x, bias, **how: [
        ml.linear_gather(h, w, ids, log_softmax=True, bias=bias, **how)
    ],
    "kl, teacher's logits": lambda h, w, ids, x, bias, **how: [
        ml.linear_kl_div(h, w, x.float() @ w.detach().flip(0).t(), kind="forward", **how)
    ],
    "kl, teacher's head": lambda h, w, ids, x, bias, **how: [
        ml.linear_kl_div(
            h, w, teacher_hidden=x, teacher_weight=w.detach().flip(0), teacher_bias=bias,
            teacher_softcap=3.0, kind=kind, **how,
        )
        for kind in ("reverse", "jsd")
    ],
}  # fmt: skip


@pytest.mark.parametrize("operation", HEADS)
@interpreted
def test_the_fused_path_agrees_with_torch(operation):
    hidden, weight = torch.randn(5, 8, device=DEVICE), torch.randn(WIDTH, 8, device=DEVICE)
    ids, other = torch.randint(VALID, (5, 3), device=DEVICE), torch.randn(5, 8, device=DEVICE)
    bias = torch.linspace(-1, 1, WIDTH, device=DEVICE)
    found = []
    for backend in ("torch", "triton"):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        values = HEADS[operation](
            *leaves, ids, other, bias, softcap=5.0, temperature=0.7, vocab_size=VALID,
            chunk_size=3, backend=backend,
        )  # fmt: skip
        upstream = [torch.linspace(0.5, 2.0, v.numel()).view_as(v).to(v) for v in values]
        torch.autograd.backward(values, upstream)
        found.append((*values, *(leaf.grad for leaf in leaves)))
    for torchs, tritons in zip(*found, strict=True):
        torch.testing.assert_close(tritons, torchs, rtol=1e-4, atol=1e-5)


@interpreted
def test_rows_of_nan_and_no_others():
    logits = make_logits(4, 300, torch.float32)
    logits[:3] = torch.nan
    ids = torch.tensor([[3, 4]] * 4, device=DEVICE)
    # Entries that cancel, so that no coefficient is left; one that does not; nothing at all.
    upstream = torch.tensor([[1.0, -1.0], [1.0, 0.5], [0.0, 0.0], [1.0, 2.0]], device=DEVICE)
    leaf = logits.requires_grad_()
    values = ml.vocab_parallel_gather(leaf, ids, log_softmax=True, backend="triton")
    values.backward(upstream)
    assert values[:3].isnan().all()
    assert leaf.grad[:2].isnan().all()
    assert (leaf.grad[2] == 0).all()
    assert leaf.grad[3].isfinite().all()


@interpreted
def test_a_nan_row_without_upstream_has_no_gradient_under_a_softcap():
    hidden, weight = torch.randn(3, 16, device=DEVICE), torch.randn(300, 16, device=DEVICE)
    hidden[1] = torch.nan
    hidden.requires_grad_()
    ids = torch.randint(300, (3, 4), device=DEVICE)
    upstream = torch.tensor([[0.7], [0.0], [-1.2]], device=DEVICE).expand(3, 4)
    values = ml.linear_gather(hidden, weight, ids, log_softmax=True, softcap=5.0, backend="triton")
    values.backward(upstream)
    assert torch.equal(hidden.grad[1], torch.zeros(16, device=DEVICE))
    assert hidden.grad[::2].isfinite().all()
    assert hidden.grad[::2].any()


INTERPRETED_RANKS = pytest.mark.skipif(
    DEVICE == "cuda", reason="the ranks' tensors are the CPU's: interpreted alone"
)
BACKED = [(n, s) for n, op in TABLE.items() for s in op.sources if "backend" not in op.without]


@INTERPRETED_RANKS
@interpreted
def test_each_operation_of_the_table():
    """One setting of the engine each, where `auto` takes Triton on a CPU; by night more ranks."""
    rng = random.Random(0)
    dtypes = ("bfloat16", "float16", "float32")
    cases = [
        next(random_cases(op, source, rng, tp=1, dtype=rng.choice(dtypes), **in_rows(op)))
        for op, source in ((TABLE[name], source) for name, source in BACKED)
    ]
    for case, found in zip(cases, get_pool(1).run_many(_by_triton, cases), strict=True):
        assert isinstance(found, list), f"{case}: {found}"
        run.check(case, found)


@pytest.mark.night
@INTERPRETED_RANKS
@pytest.mark.parametrize(("name", "source"), BACKED)
@interpreted
def test_the_table_of_operations(name, source):
    """Random settings of the engine, at any world size, where `auto` takes Triton on a CPU."""
    op = TABLE[name]
    drawn = islice(random_cases(op, source, random.Random(0), **in_rows(op)), 12)
    for case in drawn:
        tp = case.setting["tp"]
        run.check(case, get_pool(tp).run(_by_triton, case))


def in_rows(op: Any) -> dict[str, Any]:
    """Without segments, under which columns that are not contiguous are refused."""
    return {"invariant_segments": None} if "invariant_segments" in op.options else {}


def _by_triton(case: Case) -> run.Found:
    replace_builtins_once()
    candidates = [replace(c, device_type="cpu") for c in backends._CANDIDATES if c.name == "triton"]
    with mock.patch.object(backends, "_CANDIDATES", candidates):
        return run.on_rank(case)


# ---- operators of torch -------------------------------------------------------------------------


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
            upstream = torch.randn(3, device=DEVICE)
            temperature = torch.rand(3, device=DEVICE) + 0.5
            found = []
            for wrap in (late, torch.Tensor.clone):
                leaf = logits.clone().requires_grad_()
                options = {"temperature": wrap(temperature), "backend": "triton"}
                stats = token_stats(leaf, wrap(target), entropy=True, **options)
                value = stats.logprobs + stats.entropy
                (grad,) = torch.autograd.grad(
                    value + _Late.apply(stats.lse, wrap), leaf, upstream, retain_graph=True
                )
                mask, teacher = wrap(upstream > -0.5), wrap(logits.flip(0))
                kl = ml.vocab_parallel_kl_div(leaf, teacher, mask=mask, backend="triton")
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
        return triton_backend.stats(Chunk(logits, 30, HOW), target, SPEC)

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
        found = triton_backend.stats(Chunk(fake, 30), fake[:, 0].long(), SPEC)
        assert isinstance(found, FakeTensor)
        assert found.shape == plain.shape


@interpreted
def test_operators_declare_what_they_do():
    # Schema, fake implementation and what torch.compile sees, by torch's own checker.
    logits, target, shift, coef = _inputs()
    rows = torch.rand(3, device=DEVICE) + 0.5
    chunk, offsets = Chunk(logits, 30, HOW), torch.randn(40, device=DEVICE)
    other = Chunk(logits.float(), 30, Processing.of(temperature=rows, bias=offsets))
    out, softmax = torch.zeros_like(logits), torch.ones(4, 3, device=DEVICE)
    columns, upstream = target[:, None].expand(3, 2), torch.randn(3, 2, device=DEVICE)
    ranked = StatsSpec(rank=True)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    for operator, given in (
        (statistics._stats, (chunk, target, None, None, SPEC)),
        (statistics._stats, (other, target, shift.expand(2, 3), 16, ranked)),
        (gradient._grad, (chunk, columns, upstream, shift, coef, SPEC, out)),
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
        stats = triton_backend.stats(Chunk(logits * 2, 30, HOW), target, SPEC)
        out = logits * 2 if inplace else torch.zeros_like(logits)
        chunk = Chunk(out if inplace else logits * 2, 30, HOW)
        entries = target.unsqueeze(1), shift.unsqueeze(1)
        terms = GradientTerms(*entries, shift + stats[0, 0], coef, SPEC)
        triton_backend.grad(chunk, terms, out=out)
        return stats, out + 1

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    inputs = _inputs(torch.float32 if inplace else torch.bfloat16)
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
    logits.copy_(make_logits(3, 40, torch.bfloat16))
    graph.replay()
    expected = token_stats(logits, target, entropy=True, backend="torch")
    torch.testing.assert_close(stats.logprobs, expected.logprobs, rtol=1e-6, atol=1e-5)


def test_an_operator_makes_multipliers_of_rows_only_where_they_are_read() -> None:
    chunk = Chunk(torch.zeros(3, 40), 30, Processing.of(0.5, None, torch.tensor([0.5, 1.0, 2.0])))
    (within,) = chunks_of(1, arguments(chunk))
    assert not isinstance(within.processing.multiplier, torch.Tensor)  # a launch per number
    torch.testing.assert_close(row_multiplier(within), chunk.processing.multiplier)
    torch.testing.assert_close(row_multiplier(chunk), chunk.processing.multiplier)


@interpreted
def test_ranks_of_some_rows_with_a_bias_in_several_chunks() -> None:
    z, bias = torch.randn(3, 4, 40, device=DEVICE)[:, :3], torch.randn(40, device=DEVICE)
    target = torch.randint(40, (3, 3), device=DEVICE)
    found = ml.vocab_parallel_target_rank(
        z, target, logit_bias=bias, chunk_size=1, backend="triton"
    )
    assert torch.equal(found, (z + bias > (z + bias).gather(-1, target[..., None])).sum(-1))


@interpreted
def test_a_head_s_bias_with_a_stride() -> None:
    hidden, other, weight = (torch.randn(n, 8, device=DEVICE) for n in (5, 5, 40))
    bias = torch.randn(40, 2, device=DEVICE)[:, 1]
    target, upstream = torch.randint(40, (5,), device=DEVICE), torch.linspace(-1, 1, 5).to(DEVICE)
    found, exact = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    logp, logq = (
        (x.double() @ weight.double().T + bias.double()).log_softmax(-1) for x in (exact, other)
    )
    side = {"bias": bias, "backend": "triton"}
    teacher = {"teacher_hidden": other, "teacher_weight": weight, "teacher_bias": bias}
    for got, want in (
        (ml.linear_token_stats(found, weight, target, **side).logprobs, take(logp, target)),
        (ml.linear_kl_div(found, weight, **teacher, **side), (logq.exp() * (logq - logp)).sum(-1)),
    ):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
        (grad,) = torch.autograd.grad(got, found, upstream)
        (expected,) = torch.autograd.grad(want, exact, upstream.double(), retain_graph=True)
        torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-5)
