"""A few given ids of each row: their logits or log-probabilities, and distillation on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.autograd import once_differentiable
from mcore_logprobs.checks import check_flag, check_positive
from mcore_logprobs.collectives import all_reduce_sum
from mcore_logprobs.kernels.reference import finished_logits
from mcore_logprobs.kernels.stats import (
    RowNorms,
    RowResults,
    RowSpec,
    accumulator_dtype,
    gradient_coefficients,
    gradient_spec,
)
from mcore_logprobs.logits.dtensor import unwrap_rows
from mcore_logprobs.logits.opening import (
    CallOptions,
    LocalTarget,
    check_group_tensor,
    check_same_rows,
    open_logits,
    open_temperature,
)
from mcore_logprobs.logits.rows import Rows, whole_rows

__all__ = [
    "NORMALIZATIONS",
    "entry_coefficients",
    "vocab_parallel_gather",
    "vocab_parallel_topk_distill",
]

NORMALIZATIONS = ("vocab", "topk")


@dataclass(frozen=True)
class _Options:
    """normalise: log-probabilities over the whole vocabulary instead of finished logits."""

    call: CallOptions
    normalise: bool

    @property
    def whole_rows(self) -> bool:
        """Whether the rows' statistics are needed at all."""
        return self.normalise or self.call.spec.entropy


class _Entries(torch.autograd.Function):
    """logits `[..., v]`, targets `[..., k]` -> (entries `[..., k]`, entropy `[...]` or None)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, local: LocalTarget, opts: _Options
    ) -> tuple[Tensor, Tensor | None]:
        rows, spec = Rows(logits), opts.call.spec
        column, keep = rows.walk(local.column), rows.walk(local.keep)
        own = [_own_entries(block, column[part]) for part, block in rows.blocks(logits)]
        temperature = rows.walk_optional(opts.call.temperature)
        values = finished_logits(
            torch.cat(own), spec, temperature=None if temperature is None else temperature[:, None]
        )
        entropy: Tensor | None = None
        norms: tuple[Tensor | None, ...] = ()
        if opts.whole_rows:
            no_target = torch.full((rows.count,), -1, dtype=torch.int64, device=logits.device)
            done, summed = whole_rows(logits, no_target, opts.call, entries=values)
            assert summed is not None
            values, entropy, norms = summed, done.results.entropy, done.norms
            if opts.normalise:
                # (z - m) - log s, not z - lse: the difference of large numbers is taken exactly.
                values = (values - done.norms.top.unsqueeze(-1)) - done.norms.log_sum.unsqueeze(-1)
        else:
            values = all_reduce_sum(values, opts.call.group)
        ctx.opts = opts
        ctx.save_for_backward(logits, column, keep, *norms)
        ctx.set_materialize_grads(False)
        values = rows.restore(torch.where(keep, values, 0.0))
        return values, None if entropy is None else rows.restore(entropy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        on_values, on_entropy = grads
        if on_values is None and on_entropy is None:
            return None, None, None
        logits, column, keep, *norms = ctx.saved_tensors
        opts: _Options = ctx.opts
        rows, spec = Rows(logits), opts.call.spec
        if on_values is None:
            on_entries = torch.zeros_like(column, dtype=norms[0].dtype)
        else:
            on_entries = torch.where(keep, rows.walk(on_values), 0.0)
        summed = on_entries.sum(-1) if opts.normalise else None
        upstream = RowResults(summed, None if on_entropy is None else rows.walk(on_entropy))
        coef: Tensor | None = None
        if upstream != RowResults():
            spec, coef = entry_coefficients(on_entries, upstream, RowNorms(*norms), spec)
        temperature = rows.walk_optional(opts.call.temperature)
        grad = torch.empty_like(logits)
        for part, block, out in rows.blocks(logits, grad):
            opts.call.backend.entries_grad(
                block,
                column[part],
                on_entries[part],
                None if coef is None else norms[0][part],
                None if coef is None else coef[:, part],
                spec,
                temperature=None if temperature is None else temperature[part],
                out=out,
                chunk_size=opts.call.chunk_size,
            )
        return grad, None, None


def entry_coefficients(
    on_entries: Tensor, upstream: RowResults, norms: RowNorms, spec: RowSpec
) -> tuple[RowSpec, Tensor]:
    """The spec and coefficients of `kernels.reference.entries_grad`, from upstream gradients.

    Args:
        on_entries: `[n, k]`, of all k entries, whichever rank has them.
        upstream: `[n]` each: logprobs, the sum of on_entries where they are normalised; entropy.
    """
    spec = gradient_spec(spec, upstream)
    asked = (on_entries != 0).any(-1)
    if upstream.entropy is not None:
        asked |= upstream.entropy != 0
    coef = gradient_coefficients(upstream, norms, spec, keep=asked, label_smoothing=0.0)
    # Entries that cancel leave coefficients of 0, but a row that holds a NaN is NaN throughout.
    return spec, coef + torch.where(asked, 0.0 * norms.log_sum, 0.0)


def _own_entries(block: Tensor, column: Tensor) -> Tensor:
    """`block[i, column[i, j]]`, 0 where the column is -1. `[c, v]`, `[c, k]` -> `[c, k]`."""
    return torch.where(column >= 0, block.gather(-1, column.clamp(min=0)), 0.0)


def vocab_parallel_gather(
    vocab_parallel_logits: Tensor,
    ids: Tensor,
    *,
    log_softmax: bool = False,
    tp_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    ignore_index: int | None = -100,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Logits (over the temperature), or log-probabilities, at k given ids of each row.

    Shape:
        vocab_parallel_logits: `[..., V/TP]`, or a DTensor `[..., V]` sharded on its last dimension.
        ids: `[..., k]`, integers, global ids or ignore_index; the same on every TP rank. An id may
            be repeated: gradients add up.
        Returns float32 `[..., k]` (float64 for float64 logits), the same on every TP rank; 0,
        without a gradient, where the id is ignore_index. Differentiable.

    Args:
        log_softmax: normalised over the whole vocabulary, instead of the logits themselves.

    Collectives: forward one over TP: an all-reduce of `[n, k]`; with log_softmax an all-gather of
    `[3 + k, n]`. Backward none: with g upstream, dz = scatter_add(g) - p * sum_k g.

    Memory: backward keeps the logits and a few numbers a row and id; the gradient, in the logits'
    dtype, is the only `[..., V/TP]` tensor made.

    Raises:
        ValueError: ids that are not `[..., k]` integers; on CPU ids outside [0, vocab_size); as
            in `vocab_parallel_token_stats` otherwise.
    """
    check_flag("log_softmax", log_softmax)
    call = open_logits(
        vocab_parallel_logits,
        tp_group=tp_group,
        vocab_size=vocab_size,
        backend=backend,
        chunk_size=chunk_size,
        temperature=temperature,
    )
    ids = unwrap_rows(ids, "ids")
    k = ids.shape[-1] if isinstance(ids, Tensor) and ids.dim() else 1
    local = call.local_target(ids, ignore_index, k=k, name="ids")
    return _Entries.apply(call.logits, local, _Options(call.options, normalise=log_softmax))[0]


def vocab_parallel_topk_distill(
    student_logits: Tensor,
    teacher_topk_logits: Tensor,
    teacher_topk_ids: Tensor,
    *,
    normalize: str = "vocab",
    entropy: bool = False,
    tp_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    teacher_temperature: float | Tensor | None = None,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Student's and teacher's log-probabilities at the teacher's k largest logits.

    Shape:
        student_logits: `[..., V/TP]`, or a DTensor sharded on its last dimension. Not modified.
        teacher_topk_logits: `[..., k]`, any float dtype, the same on every TP rank.
        teacher_topk_ids: `[..., k]` integers, global ids, likewise. Ids may repeat.
        Returns (student log-probabilities `[..., k]`, the teacher's `[..., k]`, the student's
        entropy `[...]` or None), float32, the same on every TP rank.

    Args:
        normalize: what the student's log-probabilities are normalised over: "vocab", all V columns;
            "topk", the k ids alone. The teacher's are normalised over the k ids either way, for
            nothing else is known of it.
        entropy: also -sum p log p of the student over all V columns, in nats.
        temperature, teacher_temperature: either side's logits are divided by its own; None: the
            teacher's is the same.
        tp_group, vocab_size, chunk_size, backend: as in `vocab_parallel_token_stats`.

    The gradient goes to the student alone, from both results in one pass. A student logit of -inf
    at one of the ids gives -inf there.

    Collectives: forward one over TP: an all-gather of `[3 + k, n]` float32 (`[4 + k, n]` with
    entropy), or an all-reduce of `[n, k]` for "topk" without entropy; backward none.

    Memory: backward keeps the logits and k + 2 numbers a row; the gradient, in the logits' dtype,
    is the only `[..., V/TP]` tensor made.

    Raises:
        ValueError: before any collective, for shapes, dtypes, option ranges, an unresolvable group,
            and on CPU ids outside [0, vocab_size) (on CUDA a device-side assert).
    """
    if normalize not in NORMALIZATIONS:
        raise ValueError(f"normalize: expected one of {NORMALIZATIONS}, got {normalize!r}")
    check_flag("entropy", entropy)
    if teacher_temperature is None:
        teacher_temperature = temperature
    call = open_logits(
        student_logits,
        tp_group=tp_group,
        vocab_size=vocab_size,
        backend=backend,
        chunk_size=chunk_size,
        temperature=temperature,
        entropy=entropy,
        name="student_logits",
    )
    number, own = open_temperature(
        teacher_temperature, call.logits.shape[:-1], call.logits.device, name="teacher_temperature"
    )
    check_positive("teacher_temperature", number)
    teacher_topk_logits = unwrap_rows(teacher_topk_logits, "teacher_topk_logits")
    check_group_tensor(teacher_topk_logits, "teacher_topk_logits", min_dim=1)
    k = teacher_topk_logits.shape[-1]
    if k < 1:
        raise ValueError(f"teacher_topk_logits: expected [..., k] with k >= 1, got k = {k}")
    shape = torch.Size((*call.logits.shape[:-1], k))
    check_same_rows("teacher_topk_logits", teacher_topk_logits, shape, call.logits.device)
    local = call.local_target(teacher_topk_ids, None, k=k, name="teacher_topk_ids")
    opts = _Options(call.options, normalise=normalize == "vocab")
    student, student_entropy = _Entries.apply(call.logits, local, opts)
    if normalize == "topk":
        student = torch.log_softmax(student, dim=-1)
    teacher = teacher_topk_logits.detach().to(accumulator_dtype(teacher_topk_logits.dtype))
    teacher = teacher / (number if own is None else own.unsqueeze(-1))
    return student, torch.log_softmax(teacher, dim=-1), student_entropy
