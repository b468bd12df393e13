"""What is measured: the contenders of each subcommand at one shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import mcore_logprobs as m
from mcore_logprobs.bench.alltoall_sampling import alltoall_sampling_logprobs
from mcore_logprobs.bench.peers import linear_peers, logits_peers
from mcore_logprobs.bench.runner import Contender, Workload
from mcore_logprobs.groups import group_rank, group_size
from mcore_logprobs.kernels.products import matmul_input, product
from mcore_logprobs.losses import ClippedLoss

__all__ = ["CASES", "Shape"]

_CHECKED_ROWS = 16


@dataclass(frozen=True)
class Shape:
    """Sizes of one workload; `vocab` is the whole padded vocabulary."""

    rows: int
    vocab: int
    hidden: int
    dtype: torch.dtype
    device: torch.device
    group: ProcessGroup | None
    seed: int = 0

    @property
    def width(self) -> int:
        return self.vocab // group_size(self.group)

    def describe(self, *, hidden: bool = True) -> dict[str, Any]:
        shape: dict[str, Any] = {"rows": self.rows, "vocab": self.vocab}
        shape["tp"] = group_size(self.group)
        shape["dtype"] = str(self.dtype).removeprefix("torch.")
        return {**shape, "hidden": self.hidden} if hidden else shape

    def randn(self, *size: int, std: float = 1.0, shared: bool = True) -> Tensor:
        """Random values; the same on every rank if `shared`."""
        seed = self.seed if shared else self.seed + 1 + group_rank(self.group)
        generator = torch.Generator(self.device).manual_seed(seed)
        values = torch.randn(*size, generator=generator, device=self.device, dtype=torch.float32)
        return values.mul_(std).to(self.dtype)

    def targets(self) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(self.seed + 99)
        return torch.randint(self.vocab, (self.rows,), generator=generator, device=self.device)


def logits_case(shape: Shape) -> Workload:
    """Log-probabilities from logits: ours, with entropy and rank, beside the peers'."""
    logits = shape.randn(shape.rows, shape.width, std=4.0, shared=False).requires_grad_()
    target = shape.targets()
    group = shape.group
    scratch = torch.empty_like(logits).detach()
    source = logits.detach()
    half = max(1, shape.rows // 2)

    def read_once(_: Tensor) -> None:
        scratch[:half].copy_(source[:half])  # reads and writes half: as many bytes as one read

    def copy() -> None:
        scratch.copy_(source)

    def stats(**options: Any) -> Callable[[Tensor], Tensor]:
        def run(z: Tensor) -> Tensor:
            found = m.vocab_parallel_token_stats(z, target, tp_group=group, **options)
            if found.entropy is None:
                return found.logprobs
            return found.logprobs + 0.01 * found.entropy

        return run

    def check(entropy: bool) -> Callable[[Tensor, Sequence[Tensor]], tuple[float, float]]:
        return lambda out, grads: _logits_error(logits, target, out, grads, entropy)

    one = group_size(group) == 1
    contenders = [
        Contender("floor: copy", read_once, [logits], is_floor=True, backward=copy),
        Contender("logprobs", stats(), [logits], check=check(False) if one else None),
        Contender("+ entropy", stats(entropy=True), [logits], check=check(True) if one else None),
        Contender("+ entropy + rank", stats(entropy=True, target_rank=True), [logits]),
    ]
    peers, absent = logits_peers(target)
    for name, function in peers.items():
        contenders.append(Contender(name, function, [logits], is_peer=True))
    contenders.append(
        Contender(
            "target rank alone",
            lambda z: m.vocab_parallel_target_rank(z, target, tp_group=group),
            [source],
            differentiable=False,
        )
    )
    contenders.append(Contender("amax", lambda z: z.amax(-1), [source], differentiable=False))
    return Workload(
        "log-probabilities from logits", shape.describe(hidden=False), contenders, absent
    )


def _logits_error(
    logits: Tensor, target: Tensor, out: Tensor, grads: Sequence[Tensor], entropy: bool
) -> tuple[float, float]:
    rows = slice(0, min(_CHECKED_ROWS, logits.shape[0]))
    z = logits[rows].detach().double().requires_grad_()
    logp = z.log_softmax(-1)
    want = logp.gather(1, target[rows, None]).squeeze(1)
    if entropy:
        want = want - 0.01 * (logp.exp() * logp).sum(-1)
    upstream = torch.linspace(0.5, 1.5, out.numel(), device=out.device)[rows].double()
    (want_grad,) = torch.autograd.grad(want, z, upstream)
    error = (out[rows].double() - want.detach()).abs().max()
    grad_error = (grads[0][rows].double() - want_grad).abs().max() / want_grad.abs().max()
    return error.item(), grad_error.item()


def _head(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    hidden = shape.randn(shape.rows, shape.hidden).requires_grad_()
    weight = shape.randn(
        shape.width, shape.hidden, std=2.0 * shape.hidden**-0.5, shared=False
    ).requires_grad_()
    return hidden, weight, shape.targets()


def _products(hidden: Tensor, weight: Tensor, *, recompute: bool) -> Contender:
    """The bare matrix products, in blocks, with float32 results and no statistics.

    Forward one product; backward dWeight and dHidden, and the logits once more if `recompute`.
    """
    h = matmul_input(hidden.detach())
    blocks = weight.detach().split(max(1, min(weight.shape[0], 8192)))
    chunk = torch.empty(h.shape[0], blocks[0].shape[0], device=h.device)
    low = chunk.to(h.dtype)
    d_weight = torch.empty(blocks[0].shape[0], h.shape[1], device=h.device)
    d_hidden = torch.empty(h.shape, device=h.device)
    operands = [matmul_input(block) for block in blocks]  # cast beforehand: a floor has no casts

    def logits(*_: Tensor) -> None:
        for w in operands:
            product(h, w.t(), chunk[:, : w.shape[0]])

    def gradients() -> None:
        for w in operands:
            if recompute:
                product(h, w.t(), chunk[:, : w.shape[0]])
            dz = low[:, : w.shape[0]]
            product(dz.t(), h, d_weight[: w.shape[0]])
            product(dz, w, d_hidden)

    count = 4 if recompute else 3
    return Contender(
        f"floor: {count} products", logits, [hidden, weight], is_floor=True, backward=gradients
    )


def linear_case(shape: Shape) -> Workload:
    """Log-probabilities from hidden states: fused, unfused, the peers, the bare products."""
    hidden, weight, target = _head(shape)
    group = shape.group

    def fused(**options: Any) -> Callable[..., Tensor]:
        def run(h: Tensor, w: Tensor) -> Tensor:
            stats = m.linear_token_stats(h, w, target, tp_group=group, **options)
            if stats.entropy is None:
                return stats.logprobs
            return stats.logprobs + 0.01 * stats.entropy

        return run

    def unfused(h: Tensor, w: Tensor) -> Tensor:
        return m.vocab_parallel_logprobs(h @ w.t(), target, tp_group=group)

    def check(out: Tensor, grads: Sequence[Tensor]) -> tuple[float, float]:
        return _linear_error(hidden, weight, target, out, grads)

    one = group_size(group) == 1
    contenders = [
        _products(hidden, weight, recompute=True),
        Contender("fused", fused(), [hidden, weight], check=check if one else None),
        Contender("fused + entropy", fused(entropy=True), [hidden, weight]),
        Contender(
            "unfused (holds the logits)", unfused, [hidden, weight], check=check if one else None
        ),
    ]
    if shape.dtype == torch.bfloat16:
        rounded = fused(logits_dtype=torch.bfloat16)
        contenders.insert(3, Contender("fused, bf16 logits", rounded, [hidden, weight]))
    peers, absent = linear_peers(target)
    contenders += [Contender(name, f, [hidden, weight], is_peer=True) for name, f in peers.items()]
    return Workload("log-probabilities from hidden states", shape.describe(), contenders, absent)


def _linear_error(
    hidden: Tensor, weight: Tensor, target: Tensor, out: Tensor, grads: Sequence[Tensor]
) -> tuple[float, float]:
    rows = slice(0, min(_CHECKED_ROWS, hidden.shape[0]))
    h = hidden[rows].detach().double().requires_grad_()
    z = torch.cat([h @ w.double().t() for w in weight.detach().split(8192)], dim=1)
    want = z.log_softmax(-1).gather(1, target[rows, None]).squeeze(1)
    upstream = torch.linspace(0.5, 1.5, out.numel(), device=out.device)[rows].double()
    (want_grad,) = torch.autograd.grad(want, h, upstream)
    error = (out[rows].double() - want.detach()).abs().max()
    grad_error = (grads[0][rows].double() - want_grad).abs().max() / want_grad.abs().max()
    return error.item(), grad_error.item()


def linear_ops_case(shape: Shape) -> Workload:
    """Other operations from hidden states, each against the same on logits that are held."""
    hidden, weight, target = _head(shape)
    group = shape.group
    k = min(64, shape.vocab)
    generator = torch.Generator(shape.device).manual_seed(shape.seed + 98)
    size = (shape.rows, k)
    ids = torch.randint(shape.vocab, size, generator=generator, device=shape.device)

    def finite(logprobs: Tensor) -> Tensor:
        return torch.where(logprobs.isfinite(), logprobs, 0.0)

    def sampling(temperature: float) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        # At temperature 1 a row keeps thousands of tokens, and the filters search for its cut.
        options: dict[str, Any] = {"top_p": 0.95, "temperature": temperature, "tp_group": group}
        return (
            lambda h, w: finite(m.linear_sampling_logprobs(h, w, target, **options)),
            lambda z: finite(m.vocab_parallel_sampling_logprobs(z, target, **options)),
        )

    # By name: from hidden states, from logits.
    ways: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
        "top-p 0.95, peaked": sampling(0.25),
        "top-p 0.95, flat": sampling(1.0),
        f"log p of {k} ids": (
            lambda h, w: m.linear_gather(h, w, ids, log_softmax=True, tp_group=group),
            lambda z: m.vocab_parallel_gather(z, ids, log_softmax=True, tp_group=group),
        ),
        f"logits of {k} ids": (
            lambda h, w: m.linear_gather(h, w, ids, tp_group=group),
            lambda z: m.vocab_parallel_gather(z, ids, tp_group=group),
        ),
        f"top {k}": (
            lambda h, w: m.linear_topk(h, w, k, tp_group=group)[0],
            lambda z: m.vocab_parallel_topk(z, k, tp_group=group)[0],
        ),
        "logsumexp by map": (
            lambda h, w: m.linear_map(h, w, lambda z: z.logsumexp(-1), tp_group=group),
            lambda z: z.float().logsumexp(-1),
        ),
    }
    inputs = [hidden, weight]
    contenders = [_products(hidden, weight, recompute=True)]
    for name, (fused, on_logits) in ways.items():
        contenders.append(Contender(f"{name}, fused", fused, inputs))
        contenders.append(
            Contender(f"{name}, logits held", lambda h, w, f=on_logits: f(h @ w.t()), inputs)
        )
    return Workload("operations from hidden states", shape.describe(), contenders)


def policy_case(shape: Shape) -> Workload:
    """A clipped policy loss with entropy bonus, from hidden states."""
    hidden, weight, target = _head(shape)
    group, rows = shape.group, shape.rows
    old = shape.randn(rows).float().mul_(0.1).sub_(11.0)
    advantages = shape.randn(rows).float()
    loss_fn = ClippedLoss(entropy_coef=0.01)

    def policy(h: Tensor, w: Tensor) -> Tensor:
        loss, _ = m.linear_policy_loss(
            h, w, target, loss_fn, old, advantages, denominator=rows, entropy=True, tp_group=group
        )
        return loss

    def stats(h: Tensor, w: Tensor) -> Tensor:
        found = m.linear_token_stats(h, w, target, entropy=True, tp_group=group)
        return loss_fn(found.logprobs, found.entropy, old, advantages).sum() / rows

    def unfused(h: Tensor, w: Tensor) -> Tensor:
        found = m.vocab_parallel_token_stats(h @ w.t(), target, entropy=True, tp_group=group)
        return loss_fn(found.logprobs, found.entropy, old, advantages).sum() / rows

    inputs = [hidden, weight]
    contenders = [
        _products(hidden, weight, recompute=False),
        Contender("linear_policy_loss", policy, inputs),
        Contender("linear_token_stats", stats, inputs),
        Contender("unfused (holds the logits)", unfused, inputs),
    ]
    return Workload("a policy loss from hidden states", shape.describe(), contenders)


def cp_case(shape: Shape) -> Workload:
    """Context-parallel helpers over the world: gather with both gradients, shift, shard."""
    group = shape.group
    whole = shape.rows - shape.rows % (2 * group_size(group))
    local = torch.randn(8, whole // group_size(group), device=shape.device).requires_grad_()
    full = torch.randn(8, whole, device=shape.device)
    contenders = [
        Contender(
            "gather, grad=sum", lambda x: m.context_parallel_gather(x, cp_group=group), [local]
        ),
        Contender(
            "gather, grad=slice",
            lambda x: m.context_parallel_gather(x, cp_group=group, grad="slice"),
            [local],
        ),
        Contender(
            "shift",
            lambda x: m.context_parallel_shift(x, cp_group=group),
            [local.detach()],
            differentiable=False,
        ),
        Contender(
            "shard",
            lambda x: m.context_parallel_shard(x, cp_group=group),
            [full],
            differentiable=False,
        ),
    ]
    size = {"batch": 8, "sequence": whole, "cp": group_size(group)}
    return Workload("context parallelism", size, contenders)


def sampling_case(shape: Shape) -> Workload:
    """Sampling log-probabilities on peaked and flat rows, beside the all-to-all way."""
    target = shape.targets()
    rows = shape.rows - shape.rows % group_size(shape.group)
    target = target[:rows]
    contenders = []
    for name, std in (("peaked", 8.0), ("flat", 0.5)):
        logits = shape.randn(rows, shape.width, std=std, shared=False).requires_grad_()
        for way, function in (
            ("candidates", m.vocab_parallel_sampling_logprobs),
            ("all-to-all", alltoall_sampling_logprobs),
        ):
            contenders.append(
                Contender(
                    f"{way}, {name}",
                    lambda z, f=function: f(z, target, top_p=0.95, tp_group=shape.group),
                    [logits],
                )
            )
    return Workload(
        "sampling log-probabilities, top-p 0.95", shape.describe(hidden=False), contenders
    )


def topk_case(shape: Shape) -> Workload:
    """Global top-k of sharded rows beside a local torch.topk of the same shard."""
    logits = shape.randn(shape.rows, shape.width, std=4.0, shared=False)
    contenders = [
        Contender(
            "torch.topk of the shard",
            lambda z: z.topk(64, -1)[0],
            [logits],
            differentiable=False,
            is_floor=True,
        ),
        Contender(
            "vocab_parallel_topk",
            lambda z: m.vocab_parallel_topk(z, 64, tp_group=shape.group)[0],
            [logits],
            differentiable=False,
        ),
    ]
    return Workload("top-k, k = 64", shape.describe(hidden=False), contenders)


def invariant_case(shape: Shape) -> Workload:
    """The price of `invariant_segments`, from logits and from hidden states; what `auto` takes."""
    hidden, weight, target = _head(shape)
    logits = shape.randn(shape.rows, shape.width, std=4.0, shared=False).requires_grad_()
    segments = math.lcm(8, group_size(shape.group))
    contenders = []
    for name, options in (("", {}), (f", {segments} segments", {"invariant_segments": segments})):
        keywords: dict[str, Any] = {"tp_group": shape.group, **options}
        contenders += [
            Contender(
                f"logits{name}",
                lambda z, k=keywords: m.vocab_parallel_logprobs(z, target, **k),
                [logits],
            ),
            Contender(
                f"hidden{name}",
                lambda h, w, k=keywords: m.linear_token_stats(h, w, target, **k).logprobs,
                [hidden, weight],
            ),
        ]
    return Workload("the same bits at any TP", shape.describe(), contenders)


CASES: dict[str, Callable[[Shape], Workload]] = {
    "logits": logits_case,
    "linear": linear_case,
    "linear_ops": linear_ops_case,
    "policy": policy_case,
    "cp": cp_case,
    "sampling": sampling_case,
    "topk": topk_case,
    "invariant": invariant_case,
}
