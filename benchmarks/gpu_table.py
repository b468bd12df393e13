"""The table of `gpu_session`: ways through an LM head, at the shapes that RL runs.

Each way is timed in turn with the bare products that it makes, checked against float64 on a slice,
and printed next to what `time_model` predicts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import mcore_logprobs as m
from benchmarks import gpu_peers, time_model
from benchmarks.gpu_timing import GroupRun
from benchmarks.time_model import PUBLISHED, SHAPES, Head
from mcore_logprobs.bench.cases import _products
from mcore_logprobs.bench.machine import Peak
from mcore_logprobs.bench.peers import stop_megatron
from mcore_logprobs.bench.runner import upstream
from mcore_logprobs.losses import ClippedLoss

_ENTROPY = 0.01
_CHECKED = 64  # rows of the value and of dHidden, columns of dWeight
_BLOCK = 1024  # rows of float64 logits at once
# Of ours, relative to the largest: bf16 dLogits and gradients.
_TRITON: Any = {"backend": "triton"}  # auto's choice on a GPU, and what a dry run is to try
_MOST_ERROR, _MOST_GRAD_ERROR = 2e-3, 2e-2

Formula = Callable[[Tensor, Tensor], Tensor]  # log-probabilities, entropy -> what the way gives


@dataclass(frozen=True)
class Way:
    """One way through the head.

    Attributes:
        forward: (hidden, weight) -> a tensor to differentiate.
        formula: the same from float64 log-probabilities and entropies; one number if it is a sum.
        products: matrix products forward and backward.
        predicted: ms of both, by the model; of the forward alone.
        fused: gradients are formed in the forward: it has no forward of its own to time.
        main_grad: dWeight goes into `weight.main_grad`.
        saved: bytes that are kept for the backward, of `saved_bytes`.
    """

    name: str
    forward: Callable[[Tensor, Tensor], Tensor]
    formula: Formula
    products: float
    predicted: float | None = None
    predicted_forward: float | None = None
    fused: bool = False
    main_grad: bool = False
    saved: int | None = None
    ours: bool = True


def _logprobs(logprobs: Tensor, entropy: Tensor) -> Tensor:
    return logprobs


def _both(logprobs: Tensor, entropy: Tensor) -> Tensor:
    return logprobs + _ENTROPY * entropy


def _loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
    return -logprobs


def _loss_sum(logprobs: Tensor, entropy: Tensor) -> Tensor:
    return -logprobs.sum()


def keeps_exponentials() -> bool:
    """Whether `linear_token_stats` can keep exponentials for its backward."""
    return "saved_bytes" in inspect.signature(m.linear_token_stats).parameters


@dataclass
class Problem:
    """A head's operands at one shape, and its answers in float64.

    Attributes:
        hidden, weight, target: `[n, h]`, `[V, h]` and `[n]`; the first two require gradients.
        rows, columns: those that are checked.
    """

    run: GroupRun
    head: Head

    def __post_init__(self) -> None:
        n, width, h = self.head.rows, self.head.columns, self.head.hidden
        self.hidden = self.run.randn(n, h).requires_grad_()
        self.weight = self.run.randn(width, h, std=2.0 * h**-0.5).requires_grad_()
        self.target = self.run.targets(n, width)
        device = self.run.device
        self.rows = torch.linspace(0, n - 1, min(n, _CHECKED), device=device).long()
        self.columns = torch.linspace(0, width - 1, min(width, _CHECKED), device=device).long()
        self._exact: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def shape(self) -> dict[str, Any]:
        return {"rows": self.head.rows, "vocab": self.head.columns, "hidden": self.head.hidden}

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probabilities, entropies, lse) of all rows in float64, `[n]` each."""
        if self._exact is None:
            parts = []
            weight = self.weight.detach().double()
            pairs = zip(self.hidden.detach().split(_BLOCK), self.target.split(_BLOCK), strict=True)
            for hidden, target in pairs:
                z = hidden.double() @ weight.t()
                lse = z.logsumexp(-1)
                own = z.gather(-1, target.unsqueeze(-1)).squeeze(-1)
                p = (z - lse.unsqueeze(-1)).exp_()
                parts.append((own - lse, lse - (p * z).sum(-1), lse))
            logprobs, entropy, lse = (torch.cat(x) for x in zip(*parts, strict=True))
            self._exact = logprobs, entropy, lse
        return self._exact

    def errors(self, formula: Formula, out: Tensor, grads: Sequence[Tensor]) -> dict[str, float]:
        """`error` of the result and `grad_error`, each relative to the largest entry."""
        logprobs, entropy, lse = self.exact()
        leaves = logprobs.clone().requires_grad_(), entropy.clone().requires_grad_()
        want = formula(*leaves)
        found = torch.autograd.grad(want, leaves, upstream(want.detach()), allow_unused=True)
        g, h = (torch.zeros_like(lse) if x is None else x for x in found)

        def dlogits(rows: Any, z: Tensor, ids: Tensor) -> Tensor:
            """g (1[target] - p) - h p (log p + entropy) of some rows' logits in some columns."""
            log_p = z - lse[rows, None]
            p, one = log_p.exp(), ids == self.target[rows, None]
            return g[rows, None] * (one.double() - p) - h[rows, None] * p * (
                log_p + entropy[rows, None]
            )

        hidden, weight = self.hidden.detach(), self.weight.detach()
        ids = torch.arange(self.head.columns, device=lse.device)
        exact = weight.double()
        rows = self.rows
        d_hidden = dlogits(rows, hidden[rows].double() @ exact.t(), ids) @ exact
        some, everything = weight[self.columns].double(), hidden.double()
        dz = dlogits(slice(None), everything @ some.t(), self.columns)
        d_weight = dz.t() @ everything
        worst = [
            _relative(grads[0].reshape(hidden.shape)[rows], d_hidden),
            _relative(grads[1][self.columns], d_weight),
        ]
        return {"error": _relative(out, want.detach()), "grad_error": max(worst)}


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


# ---- the ways ------------------------------------------------------------------------------------


def own_ways(problem: Problem) -> Iterator[Way]:
    """This library's, the most telling first."""
    target, head = problem.target, problem.head
    rows, generator = head.rows, torch.Generator().manual_seed(5)
    old = torch.randn(rows, generator=generator).mul_(0.1).sub_(11.0).to(target.device)
    advantages = torch.randn(rows, generator=generator).to(target.device)
    loss_fn = ClippedLoss(entropy_coef=_ENTROPY)

    def stats(h: Tensor, w: Tensor, *, entropy: bool = False, **options: Any) -> Tensor:
        found = m.linear_token_stats(h, w, target, entropy=entropy, **_TRITON, **options)
        return found.logprobs if found.entropy is None else _both(found.logprobs, found.entropy)

    def policy(h: Tensor, w: Tensor, **options: Any) -> Tensor:
        given: Any = {"denominator": rows, "entropy": True, **_TRITON, **options}
        return m.linear_policy_loss(h, w, target, loss_fn, old, advantages, **given)[0]

    def policy_formula(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return loss_fn(logprobs, entropy, old.double(), advantages.double()).sum() / rows

    both = partial(stats, entropy=True)
    fused: Any = {"products": 4, "predicted_forward": time_model.forward(head)}
    predicted = time_model.token_stats(head)
    policy_ms = time_model.policy_loss(head)
    yield Way("token_stats", stats, _logprobs, predicted=predicted, **fused)
    yield Way("token_stats, entropy", both, _both, predicted=predicted, **fused)
    yield Way("policy loss", policy, policy_formula, 3, policy_ms, fused=True)
    if keeps_exponentials():
        whole = 2 * head.logits  # bytes of all exponentials in bf16
        for name, share in (("all", 1.0), ("half", 0.5), ("0", 0.0)):
            kept = int(share * whole)
            yield Way(
                f"token_stats, entropy, saved_bytes {name}",
                partial(both, saved_bytes=kept),
                _both,
                4 - share,
                time_model.token_stats(head, saved=share),
                saved=kept,
            )
    accumulated: Any = {"gradient_accumulation_fusion": True}
    yield Way(
        "token_stats, entropy, main_grad",
        partial(both, **accumulated),
        _both,
        4,
        time_model.token_stats(head, main_grad=True),
        main_grad=True,
    )
    yield Way(
        "policy loss, main_grad",
        partial(policy, **accumulated),
        policy_formula,
        3,
        fused=True,
        main_grad=True,
    )
    yield Way(
        "logits held",
        lambda h, w: m.vocab_parallel_logprobs(h @ w.t(), target, **_TRITON),
        _logprobs,
        3,
        time_model.held(head),
    )


def peer_ways(problem: Problem, family: str) -> Iterator[Way | tuple[str, str]]:
    """A family's, or (name, why it is not there)."""
    for name in gpu_peers.FAMILIES[family]:
        peer = next(peer for peer in gpu_peers.PEERS if peer.name == name)
        try:
            loss = peer.load()
        except Exception as error:  # whatever a foreign import raises is the reason
            yield name, gpu_peers.reason(error)
            continue
        if not (peer.interpreted or problem.run.cuda):
            yield name, "needs a GPU: it cannot be interpreted"
            continue

        def forward(h: Tensor, w: Tensor, loss: gpu_peers.Loss = loss) -> Tensor:
            found = loss(h, w, problem.target)
            return found.reshape(-1) if found.dim() else found

        yield Way(name, forward, _loss, peer.products, ours=False)


# ---- one way measured ----------------------------------------------------------------------------


def _measure(problem: Problem, way: Way) -> dict[str, Any]:
    """Both directions against the products, the forward alone, peak memory and the errors."""
    run, hidden, weight = problem.run, problem.hidden, problem.weight
    leaf = weight
    if way.main_grad:
        leaf = weight.detach().requires_grad_()
        leaf.main_grad = torch.zeros_like(leaf, dtype=torch.float32)  # type: ignore[attr-defined]

    def step() -> tuple[Tensor, list[Any]]:
        out = way.forward(hidden, leaf)
        got = torch.autograd.grad(
            out, (hidden, leaf), upstream(out.detach()), allow_unused=way.main_grad
        )
        return out.detach(), list(got)

    if run.share is not None:
        step()
        return {}
    products = _products(hidden, weight, recompute=way.products > 3)

    def bare() -> None:
        products.forward(hidden, weight)
        assert products.backward is not None
        products.backward()

    def bare_forward() -> None:
        products.forward(hidden, weight)

    def alone() -> None:
        with torch.no_grad():
            way.forward(hidden, weight)

    found: dict[str, Any] = {"products": way.products}
    found |= run.timed(step, floor=bare)
    counted = 4 if way.products > 3 else 3
    if way.products != counted:  # half a product more or less
        found["floor_ms"] = round(found["floor_ms"] * way.products / counted, 5)
        found["share"] = round(found["floor_ms"] / found["kernel_ms"], 4)
    if not way.fused:
        forward = run.timed(alone, floor=bare_forward)
        found |= {"forward_ms": forward["kernel_ms"], "forward_share": forward["share"]}
    if way.main_grad:
        leaf.main_grad.zero_()  # type: ignore[attr-defined]
    with Peak(run.device) as peak:
        out, grads = step()
    found["peak_mib"] = round((peak.nbytes or 0) / 2**20, 1)
    if way.main_grad:
        grads[1] = leaf.main_grad  # type: ignore[attr-defined]
    # Some peers give no loss per token, only the sum.
    formula = _loss_sum if not way.ours and out.dim() == 0 else way.formula
    found |= problem.errors(formula, out, grads)
    found |= {"predicted_ms": way.predicted, "predicted_forward_ms": way.predicted_forward}
    found |= {"saved_bytes": way.saved, "published_ms": _published(problem.head, way)}
    wrong = way.ours and not (
        found["error"] < _MOST_ERROR and found["grad_error"] < _MOST_GRAD_ERROR
    )
    if wrong:
        raise AssertionError(
            f"off by {found['error']:.1e}, gradients by {found['grad_error']:.1e} of float64"
        )
    return {key: value for key, value in found.items() if value is not None}


def _published(head: Head, way: Way) -> float | None:
    there = (head.rows, head.columns, head.hidden) == (4096, 128256, 4096)
    return PUBLISHED.get(way.name) if there and not way.ours else None


# ---- groups --------------------------------------------------------------------------------------

_SMALL = ((4, 512, 32), (4, 272, 48), (3, 384, 32), (9, 640, 32))


def heads(run: GroupRun) -> list[Head]:
    """The session's shapes; tiny ones in their place, few rows to compile."""
    found = [Head(*shape) for shape in (_SMALL if run.small else SHAPES)]
    if run.share is not None:  # several processes share the memory
        found = [Head(min(head.rows, 4096), head.columns, head.hidden) for head in found]
    return found


def own(run: GroupRun, number: int) -> None:
    """This library's ways at one shape."""
    problem = Problem(run, heads(run)[number])
    ways = list(own_ways(problem))
    for way in ways[:1] if run.small and number else ways:
        run.case(way.name, partial(_measure, problem, way), **problem.shape)


def peers(run: GroupRun, family: str) -> None:
    """A family's ways at every shape, the published one first."""
    found = sorted(heads(run), key=lambda head: head.rows != 4096)
    for head in found[:1] if run.small else found:
        problem = Problem(run, head)
        for way in peer_ways(problem, family):
            if isinstance(way, Way):
                run.case(way.name, partial(_measure, problem, way), foreign=True, **problem.shape)
            else:
                run.record(way[0], "left out", reason=way[1], **problem.shape)
    stop_megatron()
