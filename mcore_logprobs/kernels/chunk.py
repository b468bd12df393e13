"""Raw logits of some rows and columns, and how they become processed logits.

From raw logits y come the processed logits

    z = (softcap * tanh(logit_scale * y / softcap) + bias) / temperature      (no softcap: no tanh)

with every column at or past `valid` left out, that is -inf: the mask comes last, so that no later
step revives a masked column.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

_Chunk = TypeVar("_Chunk", bound="Chunk")


# Elements of which a row's stride is a multiple where a kernel reads and writes 16 bytes at a time.
_UNIT = 16


def aligned_width(columns: int) -> int:
    """The least stride of rows of so many columns that kernels read 16 bytes at a time."""
    return -(-columns // _UNIT) * _UNIT


@dataclass(frozen=True)
class Chunk:
    """What every kernel takes.

    Attributes:
        logits: `[n, v]`, raw, any float dtype, any row stride; not modified.
        valid: columns that are true vocabulary; they come first. May be 0.
        logit_scale, softcap: as in the module's formula.
        temperature: a number, or `[n]`, one a row.
        bias: `[v]` or None.
    """

    logits: Tensor
    valid: int
    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor = 1.0
    bias: Tensor | None = None

    @property
    def width(self) -> int:
        return self.logits.shape[1]

    def rows(self: _Chunk, part: slice) -> _Chunk:
        """Some of its rows."""
        return replace(self, logits=self.logits[part], temperature=per_row(self.temperature, part))

    def columns(self: _Chunk, part: slice) -> _Chunk:
        """Some of its columns, `[part.start, part.stop)`."""
        return replace(
            self,
            logits=self.logits[:, part],
            valid=max(0, min(self.valid, part.stop) - part.start),
            bias=None if self.bias is None else self.bias[part],
        )

    @property
    def row_temperature(self) -> Tensor | None:
        """`[n]` where each row has its own, else None."""
        return self.temperature if isinstance(self.temperature, Tensor) else None

    @property
    def multiplier(self) -> float | Tensor:
        """z / y where there is neither softcap nor bias; float64 `[n]` where rows differ."""
        return _multiplier(self.logit_scale, self.temperature)

    @property
    def is_plain(self) -> bool:
        """Whether z is y itself."""
        unscaled = not isinstance(self.multiplier, Tensor) and self.multiplier == 1.0
        return unscaled and self.softcap is None and self.bias is None

    def processed(self, dtype: torch.dtype | None = None) -> Tensor:
        """z, `[n, valid]`, in a dtype (None: the logits' `acc_dtype`); maybe the logits' memory."""
        bias = None if self.bias is None else self.bias[: self.valid]
        z = self._processed(self.logits[:, : self.valid], bias)
        return z if dtype is None else z.to(dtype)

    def processed_at(self, columns: Tensor) -> Tensor:
        """z at columns `[n, j]`, 0 where a column is negative (another shard's or ignored)."""
        bias = None if self.bias is None else self.bias[columns.clamp(min=0)]
        return torch.where(
            columns >= 0, self._processed(gather_columns(self.logits, columns), bias), 0.0
        )

    def _processed(self, raw: Tensor, bias: Tensor | None) -> Tensor:
        own = self.row_temperature
        return processed_logits(
            raw,
            logit_scale=self.logit_scale,
            softcap=self.softcap,
            bias=bias,
            temperature=self.temperature if own is None else own.unsqueeze(-1),
        )

    def to_raw_gradient(self, dz: Tensor) -> None:
        """The gradient of processed logits `[n, valid]` to that of raw ones, in place."""
        if self.softcap is not None:
            raw = self.logits[:, : self.valid]
            slope = softcap_slope(raw, self.logit_scale, self.softcap, dz.dtype)
            # A row with NaN that asks for nothing gets nothing: 0 times a NaN slope would be NaN.
            dz.mul_(slope.masked_fill_(dz == 0, 0.0))
        multiplier = self.multiplier
        if isinstance(multiplier, Tensor):
            dz.mul_(multiplier.to(dz.dtype).unsqueeze(-1))
        elif multiplier != 1.0:
            dz.mul_(multiplier)


def processed_logits(
    logits: Tensor,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """z of the module's formula, float32 or float64; logits itself where nothing is to be done.

    Args:
        logits: of any shape; not modified.
        bias, temperature: what broadcasts to it.
    """
    z = logits.to(acc_dtype(logits.dtype))
    if softcap is None and bias is None:
        multiplier = _multiplier(logit_scale, temperature)
        if isinstance(multiplier, Tensor):
            return z * multiplier.to(z.dtype)
        return z if multiplier == 1.0 else z * multiplier
    if softcap is not None:
        z = torch.tanh(z * (logit_scale / softcap)) * softcap
    elif logit_scale != 1.0:
        z = z * logit_scale
    if bias is not None:
        z = z + bias
    if isinstance(temperature, Tensor):
        return z / temperature.to(z.dtype)
    return z / temperature if temperature != 1.0 else z


def softcap_slope(logits: Tensor, logit_scale: float, softcap: float, dtype: torch.dtype) -> Tensor:
    """The derivative of softcap * tanh(x / softcap) at x = logit_scale * logits; new, in dtype."""
    scaled = logits.to(dtype, copy=True).mul_(logit_scale / softcap)
    return scaled.tanh_().square_().neg_().add_(1.0)


def _multiplier(logit_scale: float, temperature: float | Tensor) -> float | Tensor:
    if isinstance(temperature, Tensor):
        return logit_scale / temperature.double()
    return logit_scale / temperature


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """What tensors of this dtype are summed in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def per_row(value: float | Tensor, rows: slice | Tensor) -> float | Tensor:
    """Some rows of what may be one number for all."""
    return value[rows] if isinstance(value, Tensor) else value


def gather_columns(values: Tensor, columns: Tensor) -> Tensor:
    """`values[i, columns[i, j]]`, `[n, j]`; of a negative column any value; v may be 0."""
    if values.shape[-1] == 0:
        return values.new_zeros(columns.shape)
    return values.gather(-1, columns.clamp(min=0))


def row_chunks(rows: int, chunk_size: int) -> Iterator[slice]:
    """Slices of at most `chunk_size` rows that cover `rows` rows; none for zero rows."""
    for start in range(0, rows, chunk_size):
        yield slice(start, min(start + chunk_size, rows))
