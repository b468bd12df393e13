"""The torch backend: eager, readable, on any device; the ground truth for the others.

A chunk of rows at a time, at most two float32 copies of a chunk alive.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mcore_logprobs.kernels.stats import LOG_ZERO, RowSpec, accumulator_dtype, no_columns

__all__ = [
    "block_stats",
    "count_higher",
    "distribution_gradient",
    "entries_grad",
    "finished_logits",
    "gather_target",
    "grad_logits",
    "row_chunks",
    "row_multiplier",
    "row_stats",
    "softcap_slope",
    "to_raw_gradient",
]


def row_chunks(rows: int, chunk_size: int) -> Iterator[slice]:
    """Slices of at most `chunk_size` rows that cover `rows` rows; none for zero rows."""
    for start in range(0, rows, chunk_size):
        yield slice(start, min(start + chunk_size, rows))


def finished_logits(
    logits: Tensor, spec: RowSpec, bias: Tensor | None = None, temperature: Tensor | None = None
) -> Tensor:
    """z of the module `stats`, float32 or float64; logits itself where nothing is to be done.

    Args:
        logits: `[..., v]`, raw; not modified.
        bias: `[v]` or None.
        temperature: in place of the spec's, anything that broadcasts to the logits, or None.
    """
    z = logits.to(accumulator_dtype(logits.dtype))
    if spec.softcap is None and bias is None:
        if temperature is not None:
            return z * row_multiplier(spec, temperature).to(z.dtype)
        return z if spec.is_plain else z * spec.multiplier
    if spec.softcap is not None:
        z = torch.tanh(z * (spec.logit_scale / spec.softcap)) * spec.softcap
    elif spec.logit_scale != 1.0:
        z = z * spec.logit_scale
    if bias is not None:
        z = z + bias
    if temperature is not None:
        return z / temperature.to(z.dtype)
    return z / spec.temperature if spec.temperature != 1.0 else z


def row_multiplier(spec: RowSpec, temperature: Tensor) -> Tensor:
    """`spec.multiplier` where each row has its own temperature; float64, of temperature's shape."""
    return spec.logit_scale / temperature.double()


def gather_target(values: Tensor, target: Tensor, fill: float) -> Tensor:
    """`values[i, target[i]]`, or `fill` where target[i] is negative (another shard's, or ignored).

    Args:
        values: `[n, v]`; v may be 0 if every target is negative.
        target: `[n]` int64, columns of this block.
    """
    if values.shape[-1] == 0:
        return values.new_full(target.shape, fill)
    picked = values.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(target >= 0, picked, fill)


def row_stats(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    *,
    bias: Tensor | None = None,
    threshold: Tensor | None = None,
    temperature: Tensor | None = None,
    chunk_size: int,
) -> Tensor:
    """The row statistics of a block of logits.

    Args:
        logits: `[n, v]` raw logits, any float dtype, any row stride; not modified.
        target: `[n]` int64, a column of this block, or -1 where the target is not in it.
        spec: how z is made and which statistics are wanted; `spec.valid <= v`.
        bias: `[v]` or None.
        threshold: `[n]`, with `spec.rank` only: the target's value, against which `higher` counts.
            Raw logits in the logits' own units without a bias (the way from y to z increases, and
            raw values compare exactly on every backend), z with one.
        temperature: `[n]`, each row's own in place of the spec's, or None.
        chunk_size: rows at a time, at least 1.

    Returns:
        `[k, n]` float32 (float64 for float64 logits), rows as `spec.fields` says.
    """
    rows = logits.shape[0]
    out = torch.empty(
        len(spec.fields), rows, dtype=accumulator_dtype(logits.dtype), device=logits.device
    )
    for chunk in row_chunks(rows, chunk_size):
        limit = None if threshold is None else threshold[chunk]
        _chunk_stats(
            logits[chunk, : spec.valid],
            target[chunk],
            spec,
            None if bias is None else bias[: spec.valid],
            limit,
            None if temperature is None else temperature[chunk],
            out[:, chunk],
        )
    return out


def _chunk_stats(
    logits: Tensor,  # [c, valid]
    target: Tensor,  # [c]
    spec: RowSpec,
    bias: Tensor | None,
    threshold: Tensor | None,
    temperature: Tensor | None,  # [c]
    out: Tensor,  # [k, c]
) -> None:
    if logits.shape[-1] == 0:
        out.copy_(no_columns(spec, logits.shape[0], like=out))
        return
    row = spec.named(out)
    z = finished_logits(logits, spec, bias, _column(temperature))
    top = z.amax(-1)
    row["max"].copy_(top)
    row["target"].copy_(gather_target(z, target, 0.0))
    if spec.rank:
        assert threshold is not None
        row["higher"].copy_(_count(logits if bias is None else z, target, threshold))
    if spec.smoothing:
        is_finite = ~z.isneginf()
        row["finite"].copy_(is_finite.sum(-1))
        row["zsum"].copy_(torch.where(is_finite, z, 0.0).sum(-1))
    shifted = z - torch.where(top.isneginf(), 0.0, top).unsqueeze(-1)
    del z
    weight = shifted.clamp_(min=LOG_ZERO).exp() if spec.entropy else shifted.exp_()
    row["sum"].copy_(weight.sum(-1))
    if spec.entropy:
        row["entropy"].copy_(shifted.mul_(weight).sum(-1))
    if spec.sum_pi_squared:
        row["squares"].copy_(weight.square_().sum(-1))


def block_stats(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    *,
    block: int,
    bias: Tensor | None = None,
    threshold: Tensor | None = None,
    temperature: Tensor | None = None,
    chunk_size: int,
) -> Tensor:
    """The row statistics of each block of columns; a row's bits depend on its own numbers alone.

    Every reduction runs over `block` neighbouring numbers in fresh memory, the last block filled up
    with -inf, so that neither the rows in the call nor the logits' strides move a number to another
    place of the sum.

    Args:
        block: columns a block, the same in every call that is to give the same bits.
        The others as in `row_stats`.

    Returns:
        `[blocks, k, n]`, at least one block; what is not summed by blocks (`target`, `higher`)
        stands in the first.
    """
    rows, valid = logits.shape[0], spec.valid
    blocks = max(1, -(-valid // block))
    wide = accumulator_dtype(logits.dtype)
    out = torch.zeros(blocks, len(spec.fields), rows, dtype=wide, device=logits.device)
    if valid == 0:
        out[0] = no_columns(spec, rows, like=out)
        return out
    bias = None if bias is None else bias[:valid]
    # Not more rows than the caller's memory budget has room for once blocks are filled up.
    chunk_size = max(1, chunk_size * max(1, logits.shape[1]) // (blocks * block))
    buffer = torch.full(
        (min(rows, chunk_size), blocks * block), -torch.inf, dtype=wide, device=logits.device
    )
    for chunk in row_chunks(rows, chunk_size):
        padded = buffer[: chunk.stop - chunk.start]
        raw, z = logits[chunk, :valid], padded[:, :valid]
        own = _column(None if temperature is None else temperature[chunk])
        if bias is not None or own is not None or not spec.is_plain:
            z.copy_(finished_logits(raw, spec, bias, own))
        elif raw.dtype != wide or valid < padded.shape[1] or raw.stride(1) != 1:
            z.copy_(raw)
        else:
            z = raw
        first = spec.named(out[0, :, chunk])
        first["target"].copy_(gather_target(z, target[chunk], 0.0))
        if spec.rank:
            assert threshold is not None
            values = raw if bias is None else z
            first["higher"].copy_(_count(values, target[chunk], threshold[chunk]))
        shape = (blocks, block)
        source = (raw if z is raw else padded).unflatten(1, shape)
        _reduce_blocks(source, padded.unflatten(1, shape), spec, out[:, :, chunk])
        # The reduction leaves other numbers here.
        padded[:, valid:] = -torch.inf
    return out


def _reduce_blocks(z: Tensor, buffer: Tensor, spec: RowSpec, out: Tensor) -> None:
    """Statistics over the last dimension of z `[c, blocks, block]`, into out `[blocks, k, c]`.

    The sums run over `buffer`, which is contiguous, of z's shape, and may be z itself.
    """
    part = spec.named(out, dim=1)
    top = z.amax(-1)
    part["max"].copy_(top.t())
    if spec.smoothing:
        is_finite = ~z.isneginf()
        part["finite"].copy_(is_finite.sum(-1).t())
        # In fresh memory, so that how z lies does not decide how it is added.
        finite = torch.where(is_finite, z, 0.0).contiguous()
        part["zsum"].copy_(finite.sum(-1).t())
    shifted = torch.sub(z, torch.where(top.isneginf(), 0.0, top).unsqueeze(-1), out=buffer)
    weight = shifted.clamp_(min=LOG_ZERO).exp() if spec.entropy else shifted.exp_()
    part["sum"].copy_(weight.sum(-1).t())
    if spec.entropy:
        part["entropy"].copy_(shifted.mul_(weight).sum(-1).t())
    if spec.sum_pi_squared:
        part["squares"].copy_(weight.square_().sum(-1).t())


def _column(per_row: Tensor | None) -> Tensor | None:
    return None if per_row is None else per_row.unsqueeze(-1)


def count_higher(
    logits: Tensor, target: Tensor, threshold: Tensor, *, valid: int, chunk_size: int
) -> Tensor:
    """How many of the first `valid` columns, the target's own aside, are above the threshold.

    Args:
        logits, target, chunk_size: as in `row_stats`.
        threshold: `[n]`, a raw logit for each row.

    Returns:
        `[n]` int64.
    """
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for chunk in row_chunks(logits.shape[0], chunk_size):
        out[chunk] = _count(logits[chunk, :valid], target[chunk], threshold[chunk])
    return out


def _count(values: Tensor, target: Tensor, threshold: Tensor) -> Tensor:
    # The threshold came from a value of this dtype, so that the way back is exact. The target's own
    # column is left out by name: on another path its value may differ from the threshold by an ulp.
    limit = threshold.to(values.dtype)
    higher = (values > limit.unsqueeze(-1)).sum(-1)
    own = gather_target(values, target, -torch.inf) > limit
    return higher - own.long()


def grad_logits(
    logits: Tensor,
    target: Tensor,
    shift: Tensor,
    coef: Tensor,
    spec: RowSpec,
    *,
    bias: Tensor | None = None,
    temperature: Tensor | None = None,
    out: Tensor,
    chunk_size: int,
) -> None:
    """Write the gradient with respect to raw logits.

    With w = exp(z - shift), and per row the coefficients by name:

        dz[v] = w[v] * (weight + moment * (z[v] - shift) + squares * w[v])
                + target * [v == target] + finite * [z[v] finite]
        dy[v] = dz[v] * dz/dy,   0 at masked columns

    A row whose coefficients are all 0 gets exactly 0, whatever its logits hold (NaN included:
    attention gives NaN at padding tokens).

    Args:
        logits, target, spec, bias, temperature, chunk_size: as in `row_stats`; target may be -1.
        shift: `[n]`, each whole row's maximum (its lse does too, but has been rounded at the scale
            of z, and w carries that error).
        coef: `[k, n]`, rows as `spec.coefficients` says.
        out: `[n, v]`, any dtype and row stride; may be `logits` itself. Every entry is written.
    """
    for chunk in row_chunks(logits.shape[0], chunk_size):
        out[chunk, spec.valid :] = 0
        if spec.valid:
            _chunk_grad(
                logits[chunk, : spec.valid],
                target[chunk],
                shift[chunk],
                coef[:, chunk],
                spec,
                None if bias is None else bias[: spec.valid],
                None if temperature is None else temperature[chunk],
                out[chunk, : spec.valid],
            )


def _chunk_grad(
    logits: Tensor,  # [c, valid]
    target: Tensor,  # [c]
    shift: Tensor,  # [c]
    coef: Tensor,  # [k, c]
    spec: RowSpec,
    bias: Tensor | None,
    temperature: Tensor | None,  # [c]
    out: Tensor,  # [c, valid]
) -> None:
    grad = distribution_gradient(logits, shift, coef, spec, bias, temperature)
    # One entry a row. The gather and the write go through float32, so that the target's entry, the
    # difference of two nearly equal numbers where p is near 1, is rounded to the output once.
    column = target.clamp(min=0).unsqueeze(-1)
    on_target = coef[spec.coefficients.index("target")]
    own = torch.where(target >= 0, on_target, 0.0).unsqueeze(-1)
    rows = torch.arange(target.shape[0], device=target.device)
    grad.index_put_((rows, column.squeeze(-1)), (grad.gather(-1, column) + own).squeeze(-1))
    to_raw_gradient(grad, logits, spec, temperature)
    out.copy_(grad.masked_fill_((coef == 0).all(0).unsqueeze(-1), 0.0))


def distribution_gradient(
    logits: Tensor,
    shift: Tensor,
    coef: Tensor,
    spec: RowSpec,
    bias: Tensor | None = None,
    temperature: Tensor | None = None,
) -> Tensor:
    """dz of `grad_logits` without the target's own term, `[c, valid]`, float32 or float64; new.

    Args:
        logits: `[c, valid]`, raw. The others as in `grad_logits`.
    """
    row = dict(zip(spec.coefficients, coef.unsqueeze(-1).unbind(0), strict=True))
    shifted = finished_logits(logits, spec, bias, _column(temperature)) - shift.unsqueeze(-1)
    is_finite = ~shifted.isneginf() if spec.smoothing else None
    shifted.clamp_(min=LOG_ZERO)
    grad = shifted.exp()
    factor = row["weight"]
    if spec.entropy:
        factor = shifted.mul_(row["moment"]).add_(factor)
    if spec.sum_pi_squared:
        factor = torch.addcmul(factor, row["squares"], grad)
    grad.mul_(factor)
    if is_finite is not None:
        grad.add_(torch.where(is_finite, row["finite"], 0.0))
    return grad


def entries_grad(
    logits: Tensor,
    column: Tensor,
    upstream: Tensor,
    shift: Tensor | None,
    coef: Tensor | None,
    spec: RowSpec,
    *,
    bias: Tensor | None = None,
    temperature: Tensor | None = None,
    out: Tensor,
    chunk_size: int,
) -> None:
    """Write the gradient with respect to raw logits of k finished ones a row, and of statistics.

        dz[v] = w[v] * (weight + moment * (z[v] - shift) + squares * w[v])     as in `grad_logits`
                + sum_j upstream[j] * [v == column[j]]

    summed in float32 and rounded once. A row whose upstream and coefficients are all 0 gets exactly
    0, whatever its logits hold.

    Args:
        logits, spec, bias, temperature, chunk_size: as in `row_stats`.
        column: `[n, k]` int64, columns of this block, repeated ones allowed, -1 for another's.
        upstream: `[n, k]`, with respect to z; those of other blocks say whether the row is asked.
        shift, coef: as in `grad_logits`; None: no statistics, only the entries.
        out: as in `grad_logits`.
    """
    out[:, spec.valid :] = 0
    if spec.valid == 0:
        return
    bias = None if bias is None else bias[: spec.valid]
    for part in row_chunks(logits.shape[0], chunk_size):
        raw, mine = logits[part, : spec.valid], column[part]
        own = None if temperature is None else temperature[part]
        if shift is None or coef is None:
            grad = raw.new_zeros(raw.shape, dtype=accumulator_dtype(out.dtype))
        else:
            asked = (upstream[part] != 0).any(-1) | (coef[:, part] != 0).any(0)
            grad = distribution_gradient(raw, shift[part], coef[:, part], spec, bias, own)
            grad.masked_fill_(~asked.unsqueeze(-1), 0.0)
        at = torch.arange(len(mine), device=out.device).unsqueeze(-1).expand_as(mine)
        here = torch.where(mine >= 0, upstream[part].to(grad.dtype), 0.0)
        grad.index_put_((at, mine.clamp(min=0)), here, accumulate=True)
        to_raw_gradient(grad, raw, spec, own)
        out[part, : spec.valid] = grad


def softcap_slope(logits: Tensor, spec: RowSpec, dtype: torch.dtype) -> Tensor:
    """The derivative of softcap * tanh(x / softcap) at x = logit_scale * logits; new, in dtype."""
    assert spec.softcap is not None
    scaled = logits.to(dtype, copy=True).mul_(spec.logit_scale / spec.softcap)
    return scaled.tanh_().square_().neg_().add_(1.0)


def to_raw_gradient(
    grad: Tensor, logits: Tensor, spec: RowSpec, temperature: Tensor | None = None
) -> None:
    """The gradient of finished logits `[c, v]` to that of raw ones, in place."""
    if spec.softcap is not None:
        # A row with NaN that asks for nothing gets nothing: 0 times a NaN slope would be NaN.
        grad.mul_(softcap_slope(logits, spec, grad.dtype).masked_fill_(grad == 0, 0.0))
    if temperature is not None:
        grad.mul_(row_multiplier(spec, temperature).to(grad.dtype).unsqueeze(-1))
    elif spec.multiplier != 1.0:
        grad.mul_(spec.multiplier)
