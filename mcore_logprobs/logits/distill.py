"""Distillation on vocab-parallel logits: divergences from a teacher's whole distribution."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.autograd import once_differentiable
from mcore_logprobs.collectives import all_gather_stack
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels.distill import PairSpec, Side, finish_pair, merge_pairs
from mcore_logprobs.logits.dtensor import unwrap_rows
from mcore_logprobs.logits.opening import CallOptions, check_same_rows, open_logits
from mcore_logprobs.logits.rows import Rows, joined, sum_over_ranks

__all__ = [
    "KL_KINDS",
    "check_kind",
    "check_mask",
    "vocab_parallel_kl_div",
    "vocab_parallel_soft_cross_entropy",
]

KL_KINDS = ("forward", "reverse", "jsd")


@dataclass(frozen=True)
class _Options:
    student: CallOptions
    teacher: CallOptions
    spec: PairSpec
    kernels: backends.PairBackend

    def sides(
        self, rows: Rows, student: Tensor, teacher: Tensor, *others: Tensor
    ) -> Iterator[tuple[Any, ...]]:
        """As `Rows.blocks`, both logits as a `Side`."""
        own, other = (rows.walk_optional(x.temperature) for x in (self.student, self.teacher))
        for part, s, t, *views in rows.blocks(student, teacher, *others):
            yield (
                part,
                Side(s, self.student.spec, temperature=None if own is None else own[part]),
                Side(t, self.teacher.spec, temperature=None if other is None else other[part]),
                *views,
            )


class _Divergence(torch.autograd.Function):
    """student, teacher `[..., V/TP]`, mask `[...]` or None -> `[...]`."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, mask: Tensor | None, opts: _Options
    ) -> Tensor:
        rows = Rows(student)
        sides = list(opts.sides(rows, student, teacher))
        native = backends.one_launch_pair(opts.kernels)
        mask = rows.walk_optional(mask)
        if native is None:
            value, saved = _values(sides, mask, opts)
        else:
            value, saved = _values_in_few_launches(native, sides, mask, opts)
        ctx.opts = opts
        ctx.save_for_backward(student, teacher, *saved)
        return rows.restore(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        student, teacher, norm_s, norm_t, inner, keep = ctx.saved_tensors
        opts: _Options = ctx.opts
        rows = Rows(student)
        upstream = rows.walk(grads[0])
        grad = torch.empty_like(student)
        for part, s, t, out in opts.sides(rows, student, teacher, grad):
            opts.kernels.pair_grad(
                s,
                t,
                norm_s[:, part],
                norm_t[:, part],
                inner[part],
                upstream[part],
                opts.spec,
                kept=keep[part],
                out=out,
                chunk_size=opts.student.chunk_size,
            )
        return grad, None, None, None


def _values(
    sides: list[tuple[Any, ...]], mask: Tensor | None, opts: _Options
) -> tuple[Tensor, Sequence[Tensor]]:
    """The divergences `[n]`; norm_s, norm_t, inner and which rows are kept, for the gradient."""
    kernels, spec, group = opts.kernels, opts.spec, opts.student.group
    size = {"chunk_size": opts.student.chunk_size}
    stats = joined([kernels.pair_stats(s, t, spec, **size) for _, s, t in sides])
    done = finish_pair(merge_pairs(all_gather_stack(stats, group), spec), spec)
    value, inner = done.value, done.value
    if spec.kind == "jsd":
        sums = _jsd_sums(sides, done.norm_s, done.norm_t, opts)
        from_teacher, inner = sum_over_ranks(sums, group)
        value = (spec.beta * from_teacher + (1.0 - spec.beta) * inner).clamp(min=0.0)
    keep = done.usable if mask is None else done.usable & mask
    return torch.where(keep, value, 0.0), (done.norm_s, done.norm_t, inner, keep)


def _values_in_few_launches(
    native: backends.OneLaunchPair,
    sides: list[tuple[Any, ...]],
    mask: Tensor | None,
    opts: _Options,
) -> tuple[Tensor, Sequence[Tensor]]:
    """As `_values`; which rows are kept is float32."""
    spec, group = opts.spec, opts.student.group
    alone = opts.student.shard.tp_size == 1 and len(sides) == 1
    _, student, teacher = sides[0]
    if alone:
        value, norms = native.finished_pair(student, teacher, mask, spec)
    else:
        size = {"chunk_size": opts.student.chunk_size}
        stats = joined([native.pair_stats(s, t, spec, **size) for _, s, t in sides])
        value, norms = native.finish_pairs(all_gather_stack(stats, group), mask, spec)
    norm_s, norm_t, keep, inner = norms[:2], norms[2:4], norms[4], norms[5]
    if spec.kind == "jsd" and alone:
        value, inner = native.finished_jsd(student, teacher, norms, spec)
    elif spec.kind == "jsd":
        sums = sum_over_ranks(_jsd_sums(sides, norm_s, norm_t, opts), group)
        value, inner = native.finish_jsd(sums.unsqueeze(0), norms, spec)
    return value, (norm_s, norm_t, inner, keep)


def _jsd_sums(
    sides: list[tuple[Any, ...]], norm_s: Tensor, norm_t: Tensor, opts: _Options
) -> Tensor:
    return joined(
        [
            opts.kernels.jsd_sums(
                s, t, norm_s[:, part], norm_t[:, part], opts.spec,
                chunk_size=opts.student.chunk_size,
            )
            for part, s, t in sides
        ]
    )  # fmt: skip


def vocab_parallel_kl_div(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    kind: str = "forward",
    beta: float = 0.5,
    mask: Tensor | None = None,
    tp_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    teacher_temperature: float | Tensor | None = None,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Divergence of the student's distribution p from the teacher's q, token by token, in nats.

        "forward"  KL(q || p) = sum q (log q - log p)      covers the teacher's modes
        "reverse"  KL(p || q) = sum p (log p - log q)      seeks one of them
        "jsd"      beta KL(q || M) + (1 - beta) KL(p || M), M = beta q + (1 - beta) p
                   (generalised Jensen-Shannon, Agarwal et al. 2024, arXiv:2306.13649)

    Shape:
        student_logits, teacher_logits: `[..., V/TP]`, any float dtypes, each this rank's columns,
            or DTensors sharded on the last dimension. Any strides of the leading dimensions. Not
            modified. Returns float32 `[...]` (float64 where either is), the same on every TP rank.

    Args:
        kind, beta: see above; beta in (0, 1) is used by "jsd" alone.
        mask: bool `[...]`; False rows give 0 and exactly no gradient, whatever their logits hold.
        tp_group: ranks that share the vocabulary. None: Megatron's group, or one process; see
            `mcore_logprobs.groups`.
        temperature: the student's logits are divided by it; no factor of temperature**2 is applied.
        teacher_temperature: likewise for the teacher's; None: the same temperature.
        vocab_size: true vocabulary of both; columns at or past it count as -inf. None: all V.
        chunk_size: rows at a time; None: from a memory budget.
        backend: "auto", "torch" or "triton".

    The gradient goes to the student alone. A column at which one side is -inf has log-probability
    -1e4 there: divergences and gradients stay finite.

    Collectives: forward one all-gather of `[5, n]` float32 over TP; for "jsd" one all-reduce of
    `[2, n]` more, since the mixture needs both normalisers first. Backward none.

    Memory: backward keeps both logits and a few float32 numbers a row; the student's gradient, in
    its logits' dtype, is the only `[..., V/TP]` tensor made.

    Raises:
        ValueError: before any collective, for shapes, dtypes, devices, option ranges, an
            unresolvable group, or DTensors on different groups.
    """
    check_kind(kind, beta)
    return _divergence(
        student_logits,
        teacher_logits,
        kind=kind,
        beta=beta,
        mask=mask,
        tp_group=tp_group,
        temperature=temperature,
        teacher_temperature=teacher_temperature,
        vocab_size=vocab_size,
        chunk_size=chunk_size,
        backend=backend,
    )


def vocab_parallel_soft_cross_entropy(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    mask: Tensor | None = None,
    tp_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    teacher_temperature: float | Tensor | None = None,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """H(q, p) = -sum q log p of the teacher's distribution q under the student's p, in nats.

    KL(q || p) plus the teacher's entropy: the same gradient, `p - q`, to the student alone.

    Shape:
        student_logits, teacher_logits `[..., V/TP]` -> float32 `[...]`.

    Collectives: forward one all-gather of `[5, n]` float32 over TP, backward none.

    Keywords, memory and errors are `vocab_parallel_kl_div`'s.
    """
    return _divergence(
        student_logits,
        teacher_logits,
        kind="cross_entropy",
        beta=0.5,
        mask=mask,
        tp_group=tp_group,
        temperature=temperature,
        teacher_temperature=teacher_temperature,
        vocab_size=vocab_size,
        chunk_size=chunk_size,
        backend=backend,
    )


def _divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    kind: str,
    beta: float,
    mask: Tensor | None,
    tp_group: ProcessGroup | None,
    temperature: float | Tensor,
    teacher_temperature: float | Tensor | None,
    vocab_size: int | None,
    chunk_size: int | None,
    backend: str,
) -> Tensor:
    if teacher_temperature is None:
        teacher_temperature = temperature
    student = open_logits(
        student_logits,
        tp_group=tp_group,
        vocab_size=vocab_size,
        backend=backend,
        chunk_size=chunk_size,
        temperature=temperature,
        copies=2,  # both sides' chunks are alive at once
        name="student_logits",
    )
    teacher = open_logits(
        teacher_logits,
        tp_group=student.options.group,
        vocab_size=vocab_size,
        backend=backend,
        temperature=teacher_temperature,
        name="teacher_logits",
        prefix="teacher_",
    )
    logits = student.logits
    check_same_rows("teacher_logits", teacher.logits, logits.shape, logits.device)
    mask = check_mask(mask, logits.shape[:-1], logits.device)
    kernels = backends.select_pair(backend, logits, teacher.logits)
    opts = _Options(student.options, teacher.options, PairSpec(kind, float(beta)), kernels)
    return _Divergence.apply(logits, teacher.logits.detach(), mask, opts)


def check_kind(kind: str, beta: float) -> None:
    """One of KL_KINDS and a beta in (0, 1), or a ValueError."""
    if kind not in KL_KINDS:
        raise ValueError(f"kind: expected one of {KL_KINDS}, got {kind!r}")
    if isinstance(beta, bool) or not isinstance(beta, numbers.Real) or not 0.0 < beta < 1.0:
        raise ValueError(
            f"beta: expected a number in (0, 1), got {beta!r} (towards 0 the divergence tends to "
            "kind='forward', towards 1 to 'reverse', both scaled)"
        )


def check_mask(mask: Tensor | None, shape: torch.Size, device: torch.device) -> Tensor | None:
    """None, or bool of exactly this shape and device, or a ValueError; a DTensor's local part."""
    if mask is None:
        return None
    mask = unwrap_rows(mask, "mask")
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask: expected a bool tensor or None, got {got}")
    check_same_rows("mask", mask, shape, device)
    return mask
