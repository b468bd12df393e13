"""Which token of a sequence lives where: index arithmetic, no communication.

Each sequence (the whole one, or each packed one) is cut into equal chunks. "zigzag": 2*CP chunks,
rank r holds chunk r and then chunk 2*CP-1-r, which balances causal attention; this is the order of
Megatron's `get_batch_on_this_cp_rank` and Transformer Engine's `thd_get_partitioned_indices`.
"contiguous": CP chunks, rank r holds chunk r. A rank's chunks of all packed sequences follow one
another, sequence by sequence.

"contiguous_buffer": the packed buffer is cut as if it were one sequence, into CP chunks, rank r
holding chunk r, wherever sequences begin and end: the layout of attention that gathers keys and
values over CP (DeepSeek's sparse attention; slime's and verl's all-gather CP). Sequences may have
any length; cu_seqlens matters only for the next token. Where nothing is packed it is "contiguous".

Three numberings of tokens meet here, all int64:
    global: position in the whole (packed) sequence, 0 to length-1;
    local: position in a rank's part, 0 to length/CP-1;
    slot: rank * (length/CP) + local, the order in which an all-gather returns tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_logprobs.checks import check_choice, check_values

LAYOUTS = ("zigzag", "contiguous", "contiguous_buffer")


@dataclass(frozen=True)
class SequenceLayout:
    """How `cp_size` ranks share `length` tokens. Make one by `SequenceLayout.of`.

    Attributes:
        chunks: chunks a span, 2*CP for zigzag and CP for the others (1 where CP is 1).
        spans: bounds of what is cut into chunks [spans + 1], int64: each sequence, or [0, length].
        sequences: cumulative lengths [sequences + 1], int64; [0, length] where nothing is packed.
    """

    cp_size: int
    chunks: int
    length: int
    spans: Tensor
    sequences: Tensor

    @classmethod
    def of(
        cls,
        layout: str,
        cp_size: int,
        length: int,
        cu_seqlens: Tensor | None = None,
        *,
        device: torch.device | None = None,
    ) -> SequenceLayout:
        """Check and describe a layout of `length` (global) tokens.

        The values of cu_seqlens are checked by ValueError on CPU and by a device-side assert, with
        no synchronisation, elsewhere.

        Raises:
            ValueError: unknown layout; a length not divisible by the number of chunks; cu_seqlens
                of the wrong shape, dtype or device, not starting at 0, decreasing, not ending at
                `length`, or with a sequence that is cut and not divisible by the number of chunks.
        """
        check_choice("layout", layout, LAYOUTS)
        chunks = cp_size * 2 if layout == "zigzag" and cp_size > 1 else cp_size
        if length < 0 or length % chunks:
            raise ValueError(
                f"sequence length: expected a multiple of {chunks} ({layout}, CP {cp_size}), "
                f"got {length}"
            )
        bounds = torch.arange(2, device=device) * length
        if cu_seqlens is None:
            return cls(cp_size, chunks, length, spans=bounds, sequences=bounds)
        cut = layout != "contiguous_buffer"
        _check_cu_seqlens(cu_seqlens, chunks if cut else 1, length, device)
        sequences = cu_seqlens.to(torch.int64).contiguous()
        spans = sequences if cut else bounds.to(sequences.device)
        return cls(cp_size, chunks, length, spans=spans, sequences=sequences)

    @property
    def local_length(self) -> int:
        return self.length // self.cp_size

    @property
    def chunks_per_rank(self) -> int:
        """Chunks of each sequence on one rank: 2 or 1."""
        return self.chunks // self.cp_size

    @property
    def in_order(self) -> bool:
        """Whether an all-gather returns the tokens in their global order, as far as can be seen."""
        return self.chunks_per_rank == 1 and self.spans.numel() == 2

    def positions(self, rank: int) -> Tensor:
        """Global position of each of the rank's tokens [length/CP]."""
        span, offset, chunk = self._locate_local(rank)
        width = self._chunk_width[span]
        return self.spans[span] + chunk * width + offset % width

    def gather_order(self) -> Tensor:
        """Slot of each global position [length]."""
        position = torch.arange(self.length, device=self.spans.device)
        span = _containing(position, self.spans)
        width = self._chunk_width[span]
        offset = position - self.spans[span]
        owner, which = self._owner(offset // width)
        local = self._local_spans[span] + which * width + offset % width
        return owner * self.local_length + local

    def slot_positions(self) -> Tensor:
        """Global position of each slot [length]: the inverse of `gather_order`."""
        return torch.cat([self.positions(rank) for rank in range(self.cp_size)])

    def chunk_starts(self) -> Tensor:
        """Local index of the first token of each chunk [chunks_per_rank * spans].

        All spans' first chunks, then all second ones. An empty span's entry is in range (where
        length > 0) and of no meaning.
        """
        which = torch.arange(self.chunks_per_rank, device=self.spans.device)
        starts = self._local_spans[:-1] + which[:, None] * self._chunk_width
        return starts.flatten().clamp(max=max(self.local_length - 1, 0))

    def next_sources(self, rank: int, lengths: Tensor | None = None) -> Tensor:
        """The place of the next token of each of the rank's tokens, `[length/CP]` int64.

        An index into the rank's own tokens, followed by every rank's `chunk_starts` tokens in rank
        order, followed by one filler, which stands after a sequence's last token.

        Args:
            lengths: true lengths [sequences] int64, or None: all of each sequence. The filler
                stands at its last true token too, and at all after it.
        """
        span, offset, chunk = self._locate_local(rank)
        n_spans = self.spans.numel() - 1
        per_rank = self.chunks_per_rank * n_spans
        owner, which = self._owner(chunk + 1)
        boundary = self.local_length + owner * per_rank + which * n_spans + span
        at_chunk_end = (offset + 1) % self._chunk_width[span] == 0
        following = torch.arange(1, self.local_length + 1, device=self.spans.device)
        inside = torch.where(at_chunk_end, boundary, following)
        position = self.positions(rank)
        sequence = _containing(position, self.sequences)
        ends = self.sequences[1:] if lengths is None else self.sequences[:-1] + lengths
        filler = self.local_length + self.cp_size * per_rank
        return torch.where(position + 1 >= ends[sequence], filler, inside)

    @property
    def _chunk_width(self) -> Tensor:
        # An empty span has no tokens to index, but a division by its width must be defined.
        return (self.spans.diff() // self.chunks).clamp(min=1)

    @property
    def _local_spans(self) -> Tensor:
        return self.spans // self.cp_size

    def _locate_local(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """For each of the rank's tokens: its span, its offset in the rank's part of that span, and
        its chunk's number within the span."""
        bounds = self._local_spans
        local = torch.arange(self.local_length, device=bounds.device)
        span = _containing(local, bounds)
        offset = local - bounds[span]
        which = offset // self._chunk_width[span]
        # which is 0 or 1: chunk r, or chunk 2*CP-1-r.
        chunk = rank + which * (self.chunks - 1 - 2 * rank)
        return span, offset, chunk

    def _owner(self, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """The rank that holds a chunk, and whether as its first (0) or second (1) one.

        One past the last chunk gives something in range and of no meaning.
        """
        second = chunk >= self.cp_size
        owner = torch.where(second, self.chunks - 1 - chunk, chunk).clamp(min=0)
        return owner, second.to(torch.int64)


def _containing(position: Tensor, bounds: Tensor) -> Tensor:
    """The last span that starts at or before each position: never an empty one."""
    return torch.searchsorted(bounds, position, right=True) - 1


def check_lengths(
    lengths: Tensor | Sequence[int] | None, where: SequenceLayout, device: torch.device
) -> Tensor | None:
    """True lengths of the packed sequences, as int64 on the device; None stays None.

    Raises:
        ValueError: no list of ints or integer tensor of shape [sequences], another device; on CPU
            (elsewhere a device-side assert) a length below 0 or above the padded one.
    """
    if lengths is None:
        return None
    if not isinstance(lengths, Tensor):
        if not isinstance(lengths, Sequence) or not all(type(n) is int for n in lengths):
            raise ValueError(f"lengths: expected a tensor or a list of ints, got {lengths!r}")
        lengths = torch.tensor(lengths, dtype=torch.int64, device=device)
    if lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"lengths: expected an int32 or int64 tensor, got {lengths.dtype}")
    padded = where.sequences.diff()
    if lengths.shape != padded.shape:
        raise ValueError(
            f"lengths: expected one per sequence, shape {list(padded.shape)}, got "
            f"{list(lengths.shape)}"
        )
    if lengths.device != device:
        raise ValueError(f"lengths: expected device {device}, got {lengths.device}")
    lengths = lengths.to(torch.int64)
    check_values(
        (lengths >= 0) & (lengths <= padded),
        "lengths: expected 0 to the padded lengths of cu_seqlens",
        lambda: ValueError(
            f"lengths: expected 0 to the padded lengths {_short(padded)}, got {_short(lengths)}"
        ),
    )
    return lengths


def _check_cu_seqlens(
    cu_seqlens: Tensor, chunks: int, length: int, device: torch.device | None
) -> None:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise ValueError(f"cu_seqlens: expected an int32 or int64 tensor, got {got}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(
            "cu_seqlens: expected shape [sequences + 1] with at least one sequence, got "
            f"{list(cu_seqlens.shape)}"
        )
    if device is not None and cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens: expected device {device}, got {cu_seqlens.device}")
    lengths = cu_seqlens.diff()
    checks = {
        "start at 0": cu_seqlens[0] == 0,
        "never decrease": (lengths >= 0).all(),
        f"end at the sequence length {length}": cu_seqlens[-1] == length,
        f"have sequences padded to a multiple of {chunks}": (lengths % chunks == 0).all(),
    }
    check_values(
        torch.stack(list(checks.values())),
        f"cu_seqlens: expected to {', '.join(checks)}",
        lambda: ValueError(
            f"cu_seqlens: expected to {next(what for what, holds in checks.items() if not holds)}, "
            f"got {_short(cu_seqlens)}"
        ),
    )


def _short(numbers: Tensor) -> str:
    values = numbers.tolist()
    return str(values) if len(values) <= 16 else f"{values[:12]} ... {values[-2:]}"
