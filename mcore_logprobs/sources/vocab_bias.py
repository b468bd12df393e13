"""A bias on ids, and forbidden ids, as one vector over a rank's columns.

Both apply before the temperature, as inference engines apply them, and to every row alike. There is
no `[n, V/TP]` mask: the vector is what a head's own bias is to a chunk of logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcore_logprobs.checks import check_values, index_of, is_bias
from mcore_logprobs.groups import VocabShard

LogitBias = Mapping[int, float] | Sequence[tuple[int, float]] | Tensor
Ids = Tensor | Sequence[int]


class VocabBias(NamedTuple):
    """Attributes:
    values: `[V/TP]` float32 (float64), added to the logits; -inf at a forbidden id.
    disallowed: int64 `[k]` global ids that are -inf, as far as every rank knows them.
    """

    values: Tensor
    disallowed: Tensor


def vocab_bias(
    logit_bias: LogitBias | None,
    disallowed_ids: Ids | None,
    shard: VocabShard,
    device: torch.device,
    dtype: torch.dtype,
) -> VocabBias:
    """The checked vector, new.

    Args:
        logit_bias: `{id: x}` of global ids or pairs of them, or this rank's `[V/TP]`.
        disallowed_ids: integers `[k]`, global ids, on any device, repeated or not.

    Raises:
        ValueError: on every rank, for another type or shape, and for values on the CPU (on CUDA a
            device-side assert): an id outside [0, vocab_size) or biased twice, a bias that is NaN
            or +inf, no id left (of an `[V/TP]` bias where one rank has all of them).
    """
    values = torch.zeros(shard.width, dtype=dtype, device=device)
    gone = torch.empty(0, dtype=torch.int64, device=device)
    if isinstance(logit_bias, Tensor):
        values = _of_columns(logit_bias, shard, device, dtype)
    elif logit_bias is not None:
        pairs = _pairs(logit_bias, shard)
        impossible = [i for i, x in pairs if x == -torch.inf]
        gone = torch.tensor(impossible, dtype=torch.int64, device=device)
        of_shard = [(i - shard.start, x) for i, x in pairs if shard.start <= i < shard.end]
        if of_shard:
            columns, added = zip(*of_shard, strict=True)
            values[torch.tensor(columns, device=device)] = torch.tensor(
                added, dtype=dtype, device=device
            )
    if disallowed_ids is not None:
        gone = torch.cat([gone, _ids(disallowed_ids, shard).to(device)])
        local = gone - shard.start
        inside = (local >= 0) & (local < shard.width)
        flags = torch.zeros(shard.width + 1, dtype=torch.bool, device=device)
        flags[torch.where(inside, local, shard.width)] = True
        values.masked_fill_(flags[:-1], -torch.inf)
    _check_some_left(values, gone, shard)
    return VocabBias(values, gone)


def scaled_bias(logit_bias: LogitBias, factor: float) -> LogitBias:
    """The bias times a factor above 0; what is no bias stays, for `vocab_bias` to refuse."""
    if factor == 1.0 or not isinstance(logit_bias, Iterable):
        return logit_bias
    if isinstance(logit_bias, Tensor):
        return logit_bias * factor
    pairs = list(logit_bias.items()) if isinstance(logit_bias, Mapping) else list(logit_bias)
    return [(i, float(x) * factor) if is_bias(x) else (i, x) for i, x in pairs]


def _of_columns(
    bias: Tensor, shard: VocabShard, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """The checked bias in this dtype, new."""
    check_column_bias(bias, shard.width, dtype)
    if bias.device != device:
        raise ValueError(f"logit_bias: expected device {device}, got {bias.device}")
    return bias.to(dtype, copy=True)


def check_column_bias(
    bias: Tensor, width: int | None = None, dtype: torch.dtype | None = None
) -> None:
    """Check a bias `[V/TP]` of this rank's columns.

    Args:
        width, dtype: V/TP, and what it is added in; None: not known here.

    Raises:
        ValueError: another dtype or shape, a gradient, and NaN or +inf on the CPU (on CUDA a
            device-side assert).
    """
    fits_shape = bias.dim() == 1 and width in (None, bias.shape[0])
    if not bias.is_floating_point() or not fits_shape:
        expected = "[V/TP]" if width is None else f"[V/TP] = [{width}]"
        raise ValueError(
            f"logit_bias: expected {{id: x}} or floating-point {expected}, got {bias.dtype} of "
            f"shape {tuple(bias.shape)}"
        )
    if bias.requires_grad:
        raise ValueError("logit_bias: requires a gradient, but none flows to it; detach it")
    fits = bias.to(dtype or bias.dtype) < torch.inf
    check_values(
        fits,
        "logit_bias: NaN or inf",
        lambda: ValueError(
            "logit_bias: expected finite numbers in float32 or -inf, got "
            f"{bias[~fits][:8].tolist()}"
        ),
    )


def _pairs(logit_bias: Any, shard: VocabShard) -> list[tuple[int, float]]:
    if not isinstance(logit_bias, Iterable):
        raise ValueError(f"logit_bias: expected {{id: x}} or [V/TP], got {logit_bias!r}")
    pairs = list(logit_bias.items()) if isinstance(logit_bias, Mapping) else list(logit_bias)
    found = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"logit_bias: expected {{id: x}} or [V/TP], got {pair!r}")
        number, x = index_of(pair[0]), pair[1]
        if number is None:
            raise ValueError(f"logit_bias: expected ids as ints, got {pair[0]!r}")
        if not 0 <= number < shard.vocab_size:
            raise ValueError(f"logit_bias: expected ids in [0, {shard.vocab_size}), got {number}")
        if not is_bias(x):
            raise ValueError(
                f"logit_bias: expected finite numbers in float32 or -inf, got {x!r} for id {number}"
            )
        found.append((number, float(x)))
    if len(dict(found)) < len(found):
        raise ValueError(f"logit_bias: expected each id once, got {pairs!r}")
    return found


def _ids(ids: object, shard: VocabShard) -> Tensor:
    """int64 `[k]` on the device where they are."""
    if not isinstance(ids, Tensor):
        numbers = [index_of(i) for i in ids] if isinstance(ids, Sequence) else [None]
        if None in numbers:
            raise ValueError(f"disallowed_ids: expected integers [k], got {ids!r}")
        outside = [i for i in numbers if i is not None and not 0 <= i < shard.vocab_size]
        if outside:  # here, since it may have more than 64 bits
            raise _outside(outside, shard)
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(
            f"disallowed_ids: expected integers [k], got {ids.dtype} of shape {tuple(ids.shape)}"
        )
    inside = (ids >= 0) & (ids < shard.vocab_size)
    check_values(
        inside,
        f"disallowed_ids: id outside [0, {shard.vocab_size})",
        lambda: _outside(ids[~inside].tolist(), shard),
    )
    return ids.long()


def _outside(ids: list[int], shard: VocabShard) -> ValueError:
    return ValueError(f"disallowed_ids: expected ids in [0, {shard.vocab_size}), got {ids[:8]}")


def _check_some_left(values: Tensor, gone: Tensor, shard: VocabShard) -> None:
    left = torch.ones(shard.vocab_size, dtype=torch.bool, device=values.device)
    left.index_fill_(0, gone, False)
    if shard.tp_size == 1:
        left &= values[: shard.vocab_size] > -torch.inf
    check_values(
        left.any(),
        "disallowed_ids: every id is disallowed",
        lambda: ValueError(
            "disallowed_ids: expected at least one id to remain, got all "
            f"{shard.vocab_size} of the vocabulary"
        ),
    )
