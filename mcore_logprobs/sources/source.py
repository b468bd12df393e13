"""Where an operation's logits come from: the protocol of a `Source`, and what sources share.

An operation walks over the rows of its source tile by tile and within a tile chunk by chunk, and
hands each chunk's gradient back. It does not know whether the logits exist as a tensor
(`given.GivenLogits`) or are multiplied again for each chunk (`head.HeadLogits`).

A *row* is a token, a *tile* some rows, a *block* some columns, a *chunk* a tile by a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import Self

from mcore_logprobs.checks import check_optional_count
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels.backend import Backend
from mcore_logprobs.kernels.chunk import Chunk, ChunkAt, Processing, per_row, softcap_slope
from mcore_logprobs.kernels.segments import Segments
from mcore_logprobs.sources.latest_pass import LatestPass
from mcore_logprobs.sources.main_grad import MainGrad
from mcore_logprobs.sources.rows import RowSelection

# Writes the gradient of a chunk's raw logits into a tensor.
Write = Callable[[ChunkAt, Tensor], None]


class LogitIndices(NamedTuple):
    """Single logits of a tile's rows, `[e]` each: row in the source's order, this rank's column.

    A column of -1 is another rank's, or none.
    """

    row: Tensor
    column: Tensor


class Tile(Protocol):
    """Some rows of a source."""

    rows: slice

    def chunks(self) -> Iterator[ChunkAt]:
        """Chunks that cover the rows and all of this rank's true vocabulary.

        The chunks of the same rows follow each other, their columns in order. None has only
        padding, unless the rank has nothing else.
        """

    def whole_rows(self) -> Iterator[ChunkAt]:
        """Chunks of some rows by all of this rank's true columns, of which there may be none."""

    def target_logits(self, local_target: Tensor) -> Tensor:
        """The raw logit of each row's target, `[rows]`, against which its rank is counted; 0 where
        -1. With a bias `[2, rows]`, that and the bias there.
        """

    def unscaled_logits(self, entries: LogitIndices) -> Tensor:
        """Unscaled logits at entries, `[e]`; 0 where the column is -1."""


class RecomputedTile(Tile, Protocol):
    """Some rows of a source whose logits are computed when they are asked for."""

    def block(self, columns: slice) -> Chunk:
        """The chunk of these columns, which may be padding, by the tile's rows."""

    def held_chunks(self) -> list[ChunkAt]:
        """Its chunks, all at one time."""

    def raw_logits(self) -> Tensor:
        """`[rows, V/TP]` in the accumulation dtype; -inf past the true vocabulary."""

    def blocks_of(self, raw_logits: Tensor) -> Iterator[ChunkAt]:
        """The chunks of such logits."""


class Gradient(Protocol):
    """Collects the gradients of a source's tensors, tile by tile."""

    def collect(self, tile: Any, placed: ChunkAt, write: Write) -> None:
        """Take the gradient of a chunk's raw logits, which `write` writes where it is told to.

        Args:
            placed: its rows are those that `write` knows them by: the source's, or the tile's own
                where the gradient is formed in the forward. A tile's place is `tile.rows`.
        """

    def scaled_by(self, scale: Tensor) -> None:
        """From now on what is collected is multiplied by a power of two `[]`.

        `finish` gives the gradients without it. Called between tiles, of recomputed sources with
        `in_acc_dtype`.
        """

    def collect_entries(self, tile: Any, entries: LogitIndices, upstream: Tensor) -> None:
        """Take the gradient of processed logits at entries `[e]`, all others being 0."""

    def end_tile(self, tile: Any) -> None:
        """All chunks of the tile were collected."""

    def finish(self) -> tuple[Tensor | None, ...]:
        """The gradients, in the order of the source's tensors; None where none is wanted."""


class Options(Protocol):
    """All of a source that is not a tensor of autograd's.

    Attributes:
        segments: those that statistics are taken by, or None.
    """

    @property
    def segments(self) -> Segments | None: ...

    @property
    def bind(self) -> Callable[..., Any]:
        """Makes the source again, of its tensors."""


class SourceOptions(Options, Protocol):
    """Those of one source.

    Attributes:
        selection: the rows that are walked, where they are not all tokens in order; None: they are.
        disallowed: forbidden global ids, or None.
        main_grad: where the gradient of a head's weight goes, or None.
    """

    @property
    def selection(self) -> RowSelection | None: ...

    @property
    def disallowed(self) -> Tensor | None: ...

    @property
    def main_grad(self) -> MainGrad | None: ...


class Walked(Protocol):
    """What the driver asks of a source, or of two side by side.

    Attributes:
        linear: whether processed logits are linear in the tensors.
        order_may_change: whether a checkpoint's second forward may walk the rows in another order,
            as it may find the tensors with other strides: rows are then saved in the tokens' order.
        may_keep: whether chunks of its `heads` (`head_operands.HeadOperands`) may be kept for the
            backward.
        tensors: what gradients may be wanted of, the first not None; last the temperature of each
            token, or None.
        shard: this rank's columns of the vocabulary.
        device: of everything.
        acc_dtype: of statistics and results, float32 or float64.
        num_rows: n.
    """

    shard: VocabShard
    device: torch.device
    acc_dtype: torch.dtype
    num_rows: int
    linear: bool
    order_may_change: bool
    may_keep: bool

    @property
    def heads(self) -> tuple[Any, ...]: ...

    @property
    def options(self) -> Options: ...

    @property
    def tensors(self) -> tuple[Tensor | None, ...]: ...

    def tiles(self) -> Iterator[Any]:
        """Its tiles, in order."""

    def to_row_order(self, per_token: Tensor, fill: float | None = None) -> Tensor:
        """`[*batch_shape, ...]` -> `[n, ...]` as the rows are walked.

        Args:
            fill: what rows of no token get; None: a mask gets False, other tensors a value of
                theirs.
        """

    def to_token_order(self, per_row: Tensor, fill: float = 0) -> Tensor:
        """The inverse; `fill` at tokens that are not walked over."""

    def gradient(self, needs: Sequence[bool], *, sparse: bool = False) -> Gradient:
        """Collects gradients.

        Args:
            needs: of which tensors.
            sparse: they come by `collect_entries`, not by chunks.
        """


class Source(Walked, Protocol):
    """Logits, a chunk at a time, and where their gradient goes.

    Attributes:
        processing: of all rows as they are walked, and of this rank's columns.
        backend: what computes its chunks.
        recomputed: whether a chunk costs a GEMM; then single entries cost less than a chunk.
        batch_shape: the shape of the tokens: of targets, masks and results.
        latest_pass: of lazy logits that several consumers may ask for; None: only one.
    """

    batch_shape: torch.Size
    processing: Processing
    backend: Backend
    recomputed: bool

    @property
    def latest_pass(self) -> LatestPass | None: ...

    @property
    def options(self) -> SourceOptions: ...

    def tiles(self) -> Iterator[Tile]: ...

    def gradient(
        self, needs: Sequence[bool], *, sparse: bool = False, in_acc_dtype: bool = False
    ) -> Gradient:
        """As of `Walked`.

        Args:
            in_acc_dtype: gradients stay in the accumulation dtype; of recomputed sources.
        """

    def tile_ends(self) -> list[int]:
        """The row behind each tile's last."""

    def rows_at_a_time(self, width: int, copies: int = 1) -> int:
        """Rows of which so many float32 copies of `width` columns are made at a time."""

    def compacted(self, valid_mask: Tensor | None) -> Self:
        """The source of only the tokens that count, if it was asked to be compact.

        Args:
            valid_mask: bool `[*batch_shape]`; None: nothing says which count.

        Raises:
            ValueError: compact without a mask.
        """

    def in_whole_rows(self, *, adds_per_tile: bool = False) -> Self:
        """The source in tiles of which all logits of a rank may exist at one time.

        Args:
            adds_per_tile: each tile adds to a gradient of the weight's size.
        """

    def in_token_order(self) -> Self:
        """The source with rows in the order of the tokens, where it can choose their order."""


def token_temperature(source: Any) -> float | Tensor:
    """The temperature as a caller gives it: a number, or `[*batch_shape]`."""
    per_token = source.tensors[-1]
    return source.options.temperature if per_token is None else per_token


def check_segments(shard: VocabShard, invariant_segments: int) -> Segments:
    """The segments that a call asks for, checked against its shard; see `Segments.of`."""
    check_optional_count("invariant_segments", invariant_segments)
    return Segments.of(invariant_segments, shard.padded_size, shard.tp_size)


def entry_gradients(
    upstream: Tensor,
    entries: LogitIndices,
    raw_logits: Callable[[], Tensor],
    processing: Processing,
) -> tuple[Tensor, Tensor]:
    """Gradients of processed logits at entries `[e]` to those of the biases and raw logits there.

    Both are 0 where the column is -1, and exactly 0 where grad_output is, whatever the logits.

    Args:
        raw_logits: gives them, `[e]`; called where there is a softcap.
        processing: of all rows.
    """
    softcap, of_entries = processing.softcap, per_row(processing.temperature, entries.row)
    on_bias = torch.where(entries.column >= 0, upstream, 0.0)
    on_bias = (on_bias / of_entries).to(upstream.dtype)
    on_raw = on_bias * processing.logit_scale
    if softcap is not None:
        slope = softcap_slope(raw_logits(), processing.logit_scale, softcap, on_raw.dtype)
        on_raw = torch.where(on_raw != 0, on_raw * slope, 0.0)
    return on_bias, on_raw
