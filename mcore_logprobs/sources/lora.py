"""A LoRA on the head: logits = hidden W^T + scale (hidden A^T) B^T, and what it adds to gradients.

    U    = scale * tile @ A^T                once per tile, [rows, r]
    chunk                += U @ B[block]^T
    dB[block]            += dLogits^T @ U
    dU                   += dLogits @ B[block]
    dTile                += scale * dU @ A   once per tile; summed over TP with the rest of dTile
    dA                   += scale * dU^T @ tile, summed over TP once per call

Where dLogits are single entries, dB and dU get theirs row by row, and the rest is the same.

B is split over TP as the vocabulary is, A is whole on every rank. A rank's dU comes only from its
own columns, so that dA, as dHidden, is a sum over TP; after it every rank has the whole dA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import check_float_tensor
from mcore_logprobs.collectives import all_reduce_sum
from mcore_logprobs.kernels.products import add_product, product, range_scale

LoRAInput = tuple[Tensor, Tensor, float]


class LoRA(NamedTuple):
    """Attributes: A `[r, h]`, B `[V/TP, r]`, and what their product is multiplied by."""

    a: Tensor
    b: Tensor
    scale: float


def check_lora(
    lora: LoRAInput, hidden: Tensor, weight: Tensor, prefix: str, *, autocast: bool
) -> None:
    """Check a LoRA against the hidden states and the weight that it goes with.

    Args:
        autocast: dtypes may differ.

    Raises:
        ValueError: with what was expected and what was given.
    """
    name, form = f"{prefix}lora", "(A [r, h], B [V/TP, r], scale)"
    if not isinstance(lora, tuple) or len(lora) != 3:
        count = f" of {len(lora)} values" if isinstance(lora, (tuple, list)) else ""
        got = type(lora).__name__ + count
        raise ValueError(f"{name}: expected a tuple {form}, got {got}")
    a, b, scale = lora
    for part, tensor in (("A", a), ("B", b)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name}: expected {form}, got {type(tensor).__name__} for {part}")
        check_float_tensor(f"{name}'s {part}", tensor, min_dim=0)
    if a.dim() != 2 or a.shape[1] != hidden.shape[-1] or a.shape[0] < 1:
        raise ValueError(
            f"{name}: expected A of shape [r, {hidden.shape[-1]}], whole on every TP rank, got "
            f"{tuple(a.shape)}"
        )
    if b.shape != (weight.shape[0], a.shape[0]):
        raise ValueError(
            f"{name}: expected B of shape [{weight.shape[0]}, {a.shape[0]}], got {tuple(b.shape)}"
        )
    for part, tensor in (("A", a), ("B", b)):
        fits = tensor.dtype == hidden.dtype or (autocast and tensor.dtype != torch.float64)
        if not fits or tensor.device != hidden.device:
            raise ValueError(
                f"{name}: expected {part} in {prefix}hidden's dtype and on its device, "
                f"{hidden.dtype} on {hidden.device}, got {tensor.dtype} on {tensor.device}"
            )
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"{name}: expected a finite number for scale, got {scale!r}")


class _OfTile(NamedTuple):
    """U `[rows, r]` of a tile; and as it is multiplied, its `halves` times shrink (None: 1)."""

    tile: Tensor
    inner: Tensor
    operand: Tensor
    shrink: Tensor | None


class LowRank:
    """The LoRA's part of the logits; U of the latest tile is kept.

    Products have the head's operands and float32 (float64 for float64) results. U may be beyond
    float16: then it is multiplied by a power of two, and B is divided by it.

    Args:
        dtype: of the results.
        matmul_input: makes an operand of a tensor.
    """

    def __init__(
        self, lora: LoRA, dtype: torch.dtype, matmul_input: Callable[[Tensor], Tensor]
    ) -> None:
        self.lora, self.dtype, self.matmul_input = lora, dtype, matmul_input
        self._a = matmul_input(lora.a)
        self._latest: _OfTile | None = None

    def _of_tile(self, tile: Tensor) -> _OfTile:
        if self._latest is None or self._latest.tile is not tile:
            shape = (tile.shape[0], self._a.shape[0])
            inner = product(tile, self._a.t(), tile.new_empty(shape, dtype=self.dtype))
            inner.mul_(self.lora.scale)
            operand, shrink = inner, None
            if self._a.dtype == torch.float16:
                shrink = range_scale(inner.abs()).clamp(max=1.0)
                operand = inner * shrink
            self._latest = _OfTile(tile, inner, halves(operand, self._a.dtype), shrink)
        return self._latest

    def inner(self, tile: Tensor) -> Tensor:
        """U `[rows, r]` of a tile `[rows, h]`, in the results' dtype."""
        return self._of_tile(tile).inner

    def release(self) -> None:
        """Let go of the latest tile."""
        self._latest = None

    def add_logits(self, tile: Tensor, columns: slice, out: Tensor) -> None:
        """`out += U @ B[columns]^T`, `[rows, columns]` float32 or float64."""
        block, left = self.matmul_input(self.lora.b[columns]), self._of_tile(tile)
        if left.shrink is not None:
            block = (block / left.shrink).to(block.dtype)
        if left.operand.shape[1] > block.shape[1]:
            block = torch.cat([block, block], 1)
        add_product(left.operand, block.t(), out)

    def entries(self, tile: Tensor, column: Tensor, rows: Tensor) -> Tensor:
        """The part of single entries, `[e]`; rows within the tile."""
        inner = self.inner(tile)[rows]
        return (inner * self.matmul_input(self.lora.b.index_select(0, column))).sum(-1)


def halves(inner: Tensor, dtype: torch.dtype) -> Tensor:
    """`[rows, r]` as operands of this dtype: itself, or `[rows, 2r]` that add up to it.

    A GPU multiplies operands of low precision. U rounded to it once would be off by more than the
    sums of its products, and the logits of a block by as much from those of single entries, against
    which ranks are counted; what rounding took away is the second half.
    """
    rounded = inner.to(dtype)
    if dtype == inner.dtype:
        return rounded
    return torch.cat([rounded, (inner - rounded).to(dtype)], 1)


class LoRAGradient:
    """dA, dB and the LoRA's part of dTile, accumulated in float32.

    Args:
        needs: whether dHidden, dA and dB are wanted.
        in_acc_dtype: leave dA and dB in float32 (float64 for float64).
        sparse: dLogits come by `add_entries`; rows without any add nothing, whatever they hold.
    """

    def __init__(
        self,
        low_rank: LowRank,
        group: ProcessGroup | None,
        needs: Sequence[bool],
        *,
        in_acc_dtype: bool,
        sparse: bool,
    ) -> None:
        self._lora, self._group, self._sparse = low_rank.lora, group, sparse
        self._matmul_input, self._acc = low_rank.matmul_input, low_rank.dtype
        self._dtypes = [self._acc if in_acc_dtype else x.dtype for x in self._lora[:2]]
        for_hidden, for_a, for_b = needs
        self._a = torch.zeros_like(self._lora.a, dtype=self._acc) if for_a else None
        self._b = torch.zeros_like(self._lora.b, dtype=self._acc) if for_b else None
        self._wants_inner = for_hidden or for_a
        self._inner: Tensor | None = None
        # U of the tile as dB's products take it, and what float16 has it multiplied by.
        self._operand: tuple[Tensor, Tensor | None] | None = None

    def add_chunk(self, columns: slice, dlogits: Tensor, inner: Tensor) -> None:
        """Args: `[rows, columns]` as it is multiplied; U `[rows, r]`."""
        if self._b is not None:
            if self._operand is None:
                scale = range_scale(inner.abs()) if dlogits.dtype == torch.float16 else None
                scaled = inner if scale is None else inner * scale
                self._operand = scaled.to(dlogits.dtype), scale
            operand, scale = self._operand
            if scale is None:
                add_product(dlogits.t(), operand, self._b[columns])
            else:
                part = torch.empty_like(self._b[columns])
                self._b[columns] += product(dlogits.t(), operand, part).div_(scale)
        if self._wants_inner:
            if self._inner is None:
                self._inner = torch.zeros_like(inner)
            add_product(dlogits, self._matmul_input(self._lora.b[columns]), self._inner)

    def multiply(self, factor: Tensor) -> None:
        """Multiply dA and dB of the tiles that have ended."""
        for total in (self._a, self._b):
            if total is not None:
                total.mul_(factor)

    def add_entries(self, rows: Tensor, columns: Tensor, factor: Tensor, inner: Tensor) -> None:
        """Args: `[e]`, `[e]`, dLogits `[e, 1]` float32 or float64; U `[rows, r]`."""
        none = factor == 0
        if self._b is not None:
            self._b.index_add_(0, columns, (inner[rows] * factor).masked_fill_(none, 0.0))
        if self._wants_inner:
            if self._inner is None:
                self._inner = torch.zeros_like(inner)
                self._asked = inner.new_zeros(inner.shape[0], 1)
            self._asked.index_add_(0, rows, (~none).to(inner.dtype))
            part = self._matmul_input(self._lora.b[columns]).to(self._acc) * factor
            self._inner.index_add_(0, rows, part.masked_fill_(none, 0.0))

    def end_tile(self, tile: Tensor, dtile: Tensor | None) -> None:
        """All of the tile's chunks were added; adds to dtile, `[rows, h]` float32 or float64."""
        self._operand = None
        if self._inner is None:  # no true vocabulary on this rank, or nothing that needs it
            return
        inner, a = self._inner.mul_(self._lora.scale), self._matmul_input(self._lora.a)
        if tile.dtype == torch.float16:  # which dU may be beyond; these products are small
            tile, a = tile.to(inner.dtype), a.to(inner.dtype)
        inner = inner.to(tile.dtype)
        if self._a is not None:
            if self._sparse:
                tile = torch.where(self._asked != 0, tile, 0.0)
            add_product(inner.t(), tile, self._a)
        if dtile is not None:
            add_product(inner, a, dtile)
        self._inner = None

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        """(dA whole on every rank, dB of this rank). One all-reduce of `[r, h]` float32 over TP."""
        a, b = self._a, self._b
        if a is not None:
            a = all_reduce_sum(a, self._group)
        dtype_a, dtype_b = self._dtypes
        return (None if a is None else a.to(dtype_a), None if b is None else b.to(dtype_b))
