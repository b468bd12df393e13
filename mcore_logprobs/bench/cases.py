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
from mcore_logprobs.bench.peers import compiled, linear_peers, logits_peers
from mcore_logprobs.bench.runner import Contender, Workload, upstream
from mcore_logprobs.collectives import all_reduce_sum
from mcore_logprobs.debug import oracle
from mcore_logprobs.groups import group_rank, group_size
from mcore_logprobs.kernels.chunk import row_stride
from mcore_logprobs.kernels.products import matmul_dtype, product
from mcore_logprobs.losses import ClippedLoss
from mcore_logprobs.sources.head import head_logits
from mcore_logprobs.sources.kept import whole_bytes

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
        shape: dict[str, object] = {"device": "GPU" if self.device.type == "cuda" else "CPU"}
        shape |= {"rows": self.rows, "vocab": self.vocab, "tp": group_size(self.group)}
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


Formula = Callable[[Tensor, Tensor], Tensor]


def _with_entropy(z: Tensor, target: Tensor) -> Tensor:
    return oracle.logprobs(z, target) + 0.01 * oracle.entropy(z)


def _sum(stats: m.TokenStats) -> Tensor:
    """Log-probabilities, and some of the entropy where there is one: a gradient for each."""
    return stats.logprobs if stats.entropy is None else stats.logprobs + 0.01 * stats.entropy


def _check(
    leaf: Tensor,
    target: Tensor,
    formula: Formula,
    weight: Tensor | None = None,
) -> Callable[[Tensor, Sequence[Tensor]], tuple[float, float]]:
    """The first rows of a result and of the leaf's gradient against float64, on one rank."""
    rows = slice(0, min(_CHECKED_ROWS, leaf.shape[0]))

    def check(out: Tensor, grads: Sequence[Tensor]) -> tuple[float, float]:
        x = leaf[rows].detach().double().requires_grad_()
        blocks = () if weight is None else weight.detach().split(8192)
        z = x if weight is None else torch.cat([x @ w.double().t() for w in blocks], dim=1)
        want = formula(z, target[rows])
        (grad,) = torch.autograd.grad(want, x, upstream(out)[rows].double())
        return oracle.error(out[rows], want), oracle.relative_error(grads[0][rows], grad)

    return check


def _compiled(
    plain: Callable[..., Tensor], inputs: Sequence[Tensor], name: str = "torch.compile"
) -> Contender:
    """The plain formula, compiled by torch: what a user has without this library."""
    return Contender(name, compiled(plain), inputs, is_peer=True)


def logits_case(shape: Shape) -> Workload:
    """Log-probabilities from logits: ours, with entropy and rank, beside the peers'."""
    logits = shape.randn(shape.rows, shape.width, std=4.0, shared=False).requires_grad_()
    target = shape.targets()
    scratch = torch.empty_like(logits).detach()
    source = logits.detach()
    half = max(1, shape.rows // 2)

    def read_once(_: Tensor) -> None:
        scratch[:half].copy_(source[:half])  # reads and writes half: as many bytes as one read

    def stats(**options: Any) -> Callable[[Tensor], Tensor]:
        return lambda z: _sum(
            m.vocab_parallel_token_stats(z, target, tp_group=shape.group, **options)
        )

    one = group_size(shape.group) == 1
    exact = _check(logits, target, oracle.logprobs) if one else None
    exact_entropy = _check(logits, target, _with_entropy) if one else None
    inputs = [logits]
    peers, absent = logits_peers(target)
    contenders = [
        Contender(
            "floor: copy", read_once, inputs, is_floor=True, backward=lambda: scratch.copy_(source)
        ),
        Contender("logprobs", stats(), inputs, check=exact),
        Contender("+ entropy", stats(entropy=True), inputs, check=exact_entropy),
        Contender("+ entropy + rank", stats(entropy=True, target_rank=True), inputs),
        *(Contender(n, peer, inputs, is_peer=True, overwrites=True) for n, peer in peers.items()),
        _compiled(lambda z: oracle.logprobs(z.float(), target), inputs),
        _compiled(lambda z: _with_entropy(z.float(), target), inputs, "torch.compile + entropy"),
        Contender(
            "target rank alone",
            lambda z: m.vocab_parallel_target_rank(z, target, tp_group=shape.group),
            [source],
            differentiable=False,
        ),
        Contender("amax", lambda z: z.amax(-1), [source], differentiable=False),
    ]
    return Workload(
        "log-probabilities from logits", shape.describe(hidden=False), contenders, absent
    )


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
    dtype = matmul_dtype(hidden.dtype, hidden.device)
    h = hidden.detach().to(dtype)
    blocks = weight.detach().split(max(1, min(weight.shape[0], 8192)))
    width = blocks[0].shape[0]
    # Rows as the library lays them: a power of two apart, a product on a CPU would wait for them.
    stride = row_stride(width, torch.float32, h.device.type)
    shape = h.shape[0], stride
    chunk = torch.empty(shape, device=h.device)[:, :width]
    # dLogits of random numbers: products of zeros draw less power and run faster than real ones.
    generator = torch.Generator(h.device).manual_seed(h.shape[0])
    low = torch.randn(shape, generator=generator, device=h.device).to(dtype)[:, :width]
    d_weight = torch.empty(width, h.shape[1], device=h.device)
    d_hidden = torch.empty(h.shape, device=h.device)
    operands = [block.to(dtype) for block in blocks]  # cast beforehand: a floor has no casts

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


def _held(h: Tensor, w: Tensor, group: ProcessGroup | None) -> Tensor:
    """All logits of this rank; dHidden is summed over TP, as a column-parallel layer sums it."""
    if group is not None and group_size(group) > 1 and h.requires_grad:
        h = h.view_as(h)  # not the operand itself, on which a hook would stay
        h.register_hook(lambda gradient: all_reduce_sum(gradient, group))
    return h @ w.t()


def linear_case(shape: Shape) -> Workload:
    """Log-probabilities from hidden states: fused, unfused, the peers, the bare products."""
    hidden, weight, target = _head(shape)
    inputs = [hidden, weight]

    def fused(**options: Any) -> Callable[..., Tensor]:
        return lambda h, w: _sum(
            m.linear_token_stats(h, w, target, tp_group=shape.group, **options)
        )

    def unfused(h: Tensor, w: Tensor) -> Tensor:
        return m.vocab_parallel_logprobs(_held(h, w, shape.group), target, tp_group=shape.group)

    one = group_size(shape.group) == 1
    check = _check(hidden, target, oracle.logprobs, weight) if one else None
    peers, absent = linear_peers(target)
    contenders = [
        _products(hidden, weight, recompute=True),
        Contender("fused", fused(), inputs, check=check),
        Contender("fused + entropy", fused(entropy=True), inputs),
        *_low_precision(shape, "fused, bf16 logits", fused(logits_dtype=torch.bfloat16), inputs),
        Contender("unfused (holds the logits)", unfused, inputs, check=check),
        *(Contender(name, function, inputs, is_peer=True) for name, function in peers.items()),
        _compiled(lambda h, w: oracle.logprobs((h @ w.t()).float(), target), inputs),
    ]
    return Workload("log-probabilities from hidden states", shape.describe(), contenders, absent)


def _low_precision(
    shape: Shape, name: str, function: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> list[Contender]:
    """With logits in bfloat16, of a head in bfloat16: on a CPU its products are too."""
    return [Contender(name, function, inputs)] if shape.dtype == torch.bfloat16 else []


def rows_case(shape: Shape) -> Workload:
    """An eighth of the rows: by `rows=`, by `compact=True`, selected by hand; and all of them."""
    hidden, weight, all_targets = _head(shape)
    generator = torch.Generator().manual_seed(shape.seed + 97)
    count = max(1, shape.rows // 8)
    rows = torch.randperm(shape.rows, generator=generator)[:count].sort().values
    # A host's tensor: `rows=` is then checked without waiting for the device.
    index = rows.to(shape.device)
    target = all_targets[index]
    labels = torch.full_like(all_targets, -100).index_copy_(0, index, target)
    inputs = [hidden, weight]

    def stats(h: Tensor, w: Tensor, target: Tensor = target, **options: Any) -> Tensor:
        result = m.linear_token_stats(h, w, target, entropy=True, tp_group=shape.group, **options)
        return _sum(result)

    def plain(h: Tensor, w: Tensor) -> Tensor:
        return _with_entropy((h.index_select(0, index) @ w.t()).float(), target)

    contenders = [
        _products(hidden[index], weight, recompute=True),
        Contender("rows=", lambda h, w: stats(h, w, rows=rows), inputs),
        Contender("compact=True", lambda h, w: stats(h, w, labels, compact=True), inputs),
        Contender("index_select by hand", lambda h, w: stats(h.index_select(0, index), w), inputs),
        Contender("all rows, the others ignored", lambda h, w: stats(h, w, labels), inputs),
        _compiled(plain, inputs, "torch.compile of index_select"),
    ]
    return Workload("an eighth of the rows", shape.describe(), contenders)


def top_p_logprobs(z: Tensor, target: Tensor, top_p: float) -> Tensor:
    """The target's log-probability among the fewest tokens that make up top_p; -inf outside.

    By sorting, as an inference engine does: a token stays while those before it are under top_p.
    """
    with torch.no_grad():
        ordered, order = z.sort(dim=-1, descending=True, stable=True)
        p = ordered.softmax(-1)
        late = p.cumsum(-1).sub_(p) >= top_p
        late[:, 0] = False
        dropped = torch.empty_like(late).scatter_(-1, order, late)
    return oracle.logprobs(z.masked_fill(dropped, -torch.inf), target)


def linear_ops_case(shape: Shape) -> Workload:
    """Other operations from hidden states, each against the same on logits that are held."""
    hidden, weight, _ = _head(shape)
    group = shape.group
    with torch.no_grad():  # which a filter keeps: gradients of zeros are multiplied faster
        target = m.linear_topk(hidden, weight, 1, tp_group=group)[1][:, 0]
    k = min(64, shape.vocab)
    generator = torch.Generator(shape.device).manual_seed(shape.seed + 98)
    size = (shape.rows, k)
    ids = torch.randint(shape.vocab, size, generator=generator, device=shape.device)

    def finite(logprobs: Tensor) -> Tensor:
        return torch.where(logprobs.isfinite(), logprobs, 0.0)

    def sampling(temperature: float) -> tuple[Callable[..., Tensor], ...]:
        # At temperature 1 a row keeps thousands of tokens, and the filters search for its cut.
        options: dict[str, Any] = {"top_p": 0.95, "temperature": temperature, "tp_group": group}
        return (
            lambda h, w: finite(m.linear_sampling_logprobs(h, w, target, **options)),
            lambda z: finite(m.vocab_parallel_sampling_logprobs(z, target, **options)),
            lambda z: finite(top_p_logprobs(z.float() / temperature, target, 0.95)),
        )

    # By name: from hidden states, from logits, the plain formula.
    ways: dict[str, tuple[Callable[..., Tensor], ...]] = {
        "top-p 0.95, peaked": sampling(0.25),
        "top-p 0.95, flat": sampling(1.0),
        f"log p of {k} ids": (
            lambda h, w: m.linear_gather(h, w, ids, log_softmax=True, tp_group=group),
            lambda z: m.vocab_parallel_gather(z, ids, log_softmax=True, tp_group=group),
            lambda z: oracle.gather(z.float(), ids),
        ),
        f"logits of {k} ids": (
            lambda h, w: m.linear_gather(h, w, ids, tp_group=group),
            lambda z: m.vocab_parallel_gather(z, ids, tp_group=group),
            lambda z: z.float().gather(-1, ids),
        ),
        f"top {k}": (
            lambda h, w: m.linear_topk(h, w, k, tp_group=group)[0],
            lambda z: m.vocab_parallel_topk(z, k, tp_group=group)[0],
            lambda z: z.float().topk(k, -1)[0],
        ),
        "logsumexp by map": (
            lambda h, w: m.linear_map(h, w, lambda z: z.logsumexp(-1), tp_group=group),
            lambda z: z.float().logsumexp(-1),
            lambda z: z.float().logsumexp(-1),
        ),
    }
    inputs = [hidden, weight]
    contenders = [_products(hidden, weight, recompute=True)]
    for name, (fused, on_logits, plain) in ways.items():
        contenders += [
            Contender(f"{name}, fused", fused, inputs),
            Contender(
                f"{name}, logits held", lambda h, w, f=on_logits: f(_held(h, w, group)), inputs
            ),
            _compiled(lambda h, w, f=plain: f(h @ w.t()), inputs, f"{name}, torch.compile"),
        ]
    return Workload("operations from hidden states", shape.describe(), contenders)


def policy_case(shape: Shape) -> Workload:
    """A clipped policy loss with entropy bonus, from hidden states."""
    hidden, weight, target = _head(shape)
    group, rows = shape.group, shape.rows
    old = shape.randn(rows).float().mul_(0.1).sub_(11.0)
    advantages = shape.randn(rows).float()
    loss_fn = ClippedLoss(entropy_coef=0.01)

    def policy(h: Tensor, w: Tensor, **options: object) -> Tensor:
        arguments: dict[str, Any] = {"denominator": rows, "entropy": True, "tp_group": group}
        arguments |= options
        return m.linear_policy_loss(h, w, target, loss_fn, old, advantages, **arguments)[0]

    def stats(h: Tensor, w: Tensor) -> Tensor:
        result = m.linear_token_stats(h, w, target, entropy=True, tp_group=group)
        return loss_fn(result.logprobs, result.entropy, old, advantages).sum() / rows

    def unfused(h: Tensor, w: Tensor) -> Tensor:
        result = m.vocab_parallel_token_stats(
            _held(h, w, group), target, entropy=True, tp_group=group
        )
        return loss_fn(result.logprobs, result.entropy, old, advantages).sum() / rows

    def plain(h: Tensor, w: Tensor) -> Tensor:
        z = (h @ w.t()).float()
        return loss_fn(oracle.logprobs(z, target), oracle.entropy(z), old, advantages).sum() / rows

    def rounded(h: Tensor, w: Tensor) -> Tensor:
        return policy(h, w, logits_dtype=torch.bfloat16)

    inputs = [hidden, weight]
    contenders = [
        _products(hidden, weight, recompute=False),
        Contender("linear_policy_loss", policy, inputs),
        *_low_precision(shape, "linear_policy_loss, bf16 logits", rounded, inputs),
        Contender("linear_token_stats", stats, inputs),
        Contender("unfused (holds the logits)", unfused, inputs),
        _compiled(plain, inputs),
    ]
    return Workload("a policy loss from hidden states", shape.describe(), contenders)


def keep_case(shape: Shape) -> Workload:
    """Time against memory: `saved_bytes` from nothing to everything, and who holds the logits."""
    hidden, weight, target = _head(shape)
    inputs = [hidden, weight]
    group = shape.group
    all_of_it = whole_bytes(head_logits(hidden, weight, tp_group=group))

    def keeping(share: float) -> Callable[..., Tensor]:
        saved_bytes = int(share * all_of_it)
        return lambda h, w: _sum(
            m.linear_token_stats(h, w, target, tp_group=group, saved_bytes=saved_bytes)
        )

    def unfused(h: Tensor, w: Tensor) -> Tensor:
        return m.vocab_parallel_logprobs(_held(h, w, group), target, tp_group=group)

    one = group_size(group) == 1
    check = _check(hidden, target, oracle.logprobs, weight) if one else None
    on_logits, absent = logits_peers(target)
    on_hidden, unavailable = linear_peers(target)
    peers: dict[str, Callable[..., Tensor]] = {
        f"{name}, logits held": lambda h, w, f=function: f(_held(h, w, group))
        for name, function in on_logits.items()
        if name.startswith("megatron")
    }
    contenders = [
        _products(hidden, weight, recompute=False),
        *(
            Contender(f"saved_bytes {share:.0%}", keeping(share), inputs, check=check)
            for share in (0.0, 0.25, 0.5, 0.75, 1.0)
        ),
        Contender("unfused (holds the logits)", unfused, inputs, check=check),
        *(
            Contender(name, function, inputs, is_peer=True)
            for name, function in (peers | on_hidden).items()
        ),
        _compiled(lambda h, w: oracle.logprobs((h @ w.t()).float(), target), inputs),
    ]
    absent = {name: why for name, why in absent.items() if name == "megatron"} | unavailable
    return Workload(
        "what kept logits save", shape.describe(), contenders, absent, curve="saved_bytes"
    )


SEGMENTS = 8  # of `invariant_case`, on as many ranks at most


def invariant_case(shape: Shape) -> Workload:
    """The price of `invariant_segments`, from logits and from hidden states; what `auto` takes."""
    hidden, weight, target = _head(shape)
    logits = shape.randn(shape.rows, shape.width, std=4.0, shared=False).requires_grad_()
    segments = math.lcm(SEGMENTS, group_size(shape.group))
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
    contenders.append(_compiled(lambda z: oracle.logprobs(z.float(), target), [logits]))
    return Workload("the same bits at any TP", shape.describe(), contenders)


CASES: dict[str, Callable[[Shape], Workload]] = {
    "logits": logits_case,
    "linear": linear_case,
    "linear_ops": linear_ops_case,
    "policy": policy_case,
    "keep": keep_case,
    "invariant": invariant_case,
    "rows": rows_case,
}
