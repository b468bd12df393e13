"""Distillation from a teacher of whom only the k largest logits are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import check_flag, check_positive
from mcore_logprobs.collectives import all_gather_stack
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels.reference import finished_logits
from mcore_logprobs.kernels.stats import LOG_ZERO, RowSpec, accumulator_dtype, finish, merge
from mcore_logprobs.logits.dtensor import unwrap_rows
from mcore_logprobs.logits.gather import scatter_gradient
from mcore_logprobs.logits.inputs import (
    check_group_tensor,
    check_target,
    localize_target,
    open_logits,
)
from mcore_logprobs.logits.rows import Rows

__all__ = ["NORMALIZATIONS", "vocab_parallel_topk_distill"]

NORMALIZATIONS = ("vocab", "topk")


@dataclass(frozen=True)
class _Options:
    shard: VocabShard
    spec: RowSpec
    normalize: str
    chunk_size: int
    backend: backends.Backend


class _PickAndEntropy(torch.autograd.Function):
    """logits `[..., v]`, this rank's columns `[..., k]` or -1 -> (picked `[..., k]`, entropy).

    picked is log p for normalize="vocab" and finished logits for "topk"; entropy `[...]` or None.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, column: Tensor, opts: _Options) -> Any:
        rows, spec = Rows(logits), opts.spec
        columns = rows.flat(column)
        nobody = torch.full((rows.count,), -1, dtype=torch.int64, device=logits.device)
        stats, picked = [], []
        for part, block in rows.blocks(logits):
            stats.append(
                opts.backend.row_stats(block, nobody[part], spec, chunk_size=opts.chunk_size)
            )
            own = columns[part]
            values = finished_logits(block.gather(-1, own.clamp(min=0)), spec)
            picked.append(torch.where(own >= 0, values, 0.0))
        packed = torch.cat([torch.cat(stats, dim=1), torch.cat(picked).t()])
        parts = all_gather_stack(packed, opts.shard.group)  # [TP, fields + k, n]
        fields = len(spec.fields)
        merged = merge(parts[:, :fields].contiguous(), spec)
        norm = torch.stack([merged[0], merged[1].log()])  # m, log s
        norm = torch.where(merged[0].isneginf(), 0.0, norm).unsqueeze(-1)
        values = parts[:, fields:].sum(0).t()  # one rank owns each id, the others sent 0
        if opts.normalize == "vocab":
            values = (values - norm[0]).sub_(norm[1])
        done = finish(merged, spec)
        ctx.opts = opts
        ctx.save_for_backward(logits, columns, norm, done.entropy)
        ctx.set_materialize_grads(False)
        entropy = None if done.entropy is None else rows.unflat(done.entropy)
        return rows.unflat(values), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        on_picked, on_entropy = grads
        if on_picked is None and on_entropy is None:
            return None, None, None
        logits, columns, norm, entropy = ctx.saved_tensors
        opts: _Options = ctx.opts
        rows = Rows(logits)
        # dz = g_k [v == id_k] + p (a + b log p), a = -sum_k g_k - h H, b = -h
        picked = None if on_picked is None else rows.flat(on_picked)
        h = None if on_entropy is None else rows.flat(on_entropy).unsqueeze(-1)
        a = torch.zeros_like(norm[0])
        if picked is not None and opts.normalize == "vocab":
            a = a - picked.sum(-1, keepdim=True)
        if h is not None:
            a = a - h * entropy.unsqueeze(-1)
        if picked is None:
            picked, columns = norm.new_zeros(rows.count, 0), columns[:, :0]
        grad = torch.empty_like(logits)
        for part, block, out in rows.chunks(opts.chunk_size, logits, grad):
            base = None
            if h is not None or opts.normalize == "vocab":
                logp = (finished_logits(block, opts.spec) - norm[0, part]).sub_(norm[1, part])
                logp.clamp_(min=LOG_ZERO)
                base = logp.exp()
                base.mul_(a[part] if h is None else a[part] - logp.mul_(h[part]))
            scatter_gradient(picked[part], columns[part], opts.spec, out, base)
        return grad, None, None


def vocab_parallel_topk_distill(
    student_logits: Tensor,
    teacher_topk_logits: Tensor,
    teacher_topk_ids: Tensor,
    *,
    normalize: str = "vocab",
    entropy: bool = False,
    tp_group: ProcessGroup | None = None,
    temperature: float = 1.0,
    teacher_temperature: float | None = None,
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

    Collectives: forward one all-gather of `[3 + k, n]` float32 (`[4 + k, n]` with entropy) over TP,
    backward none.

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
    check_positive("teacher_temperature", teacher_temperature)
    opened = open_logits(
        student_logits,
        tp_group=tp_group,
        vocab_size=vocab_size,
        backend=backend,
        chunk_size=chunk_size,
        temperature=temperature,
        name="student_logits",
    )
    logits, shard = opened.logits, opened.shard
    teacher_topk_logits = unwrap_rows(teacher_topk_logits, "teacher_topk_logits")
    check_group_tensor(teacher_topk_logits, "teacher_topk_logits", min_dim=1)
    k = teacher_topk_logits.shape[-1]
    if k < 1:
        raise ValueError(f"teacher_topk_logits: expected [..., k] with k >= 1, got k = {k}")
    shape = torch.Size((*logits.shape[:-1], k))
    if teacher_topk_logits.shape != shape or teacher_topk_logits.device != logits.device:
        raise ValueError(
            f"teacher_topk_logits: expected shape {tuple(shape)} on {logits.device}, got "
            f"{tuple(teacher_topk_logits.shape)} on {teacher_topk_logits.device}"
        )
    ids = check_target(teacher_topk_ids, shape, logits.device, name="teacher_topk_ids")
    local = localize_target(ids, shard, None, name="teacher_topk_ids")
    opts = _Options(
        shard=shard,
        spec=RowSpec(valid=shard.valid_width, temperature=temperature, entropy=entropy),
        normalize=normalize,
        chunk_size=chunk_size or backends.default_chunk_size(shard.width, logits.device),
        backend=backends.select(backend, logits),
    )
    student, student_entropy = _PickAndEntropy.apply(logits, local.column, opts)
    if normalize == "topk":
        student = torch.log_softmax(student, dim=-1)
    teacher = teacher_topk_logits.detach().to(accumulator_dtype(teacher_topk_logits.dtype))
    return student, torch.log_softmax(teacher / teacher_temperature, dim=-1), student_entropy
