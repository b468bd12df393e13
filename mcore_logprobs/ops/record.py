"""The ids that a sampler recorded: checked, and in the order in which a source walks its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_logprobs.checks import check_choice, check_flag, check_target, check_values
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.sources.source import Source

MISSING = ("error", "full", "ignore")


@dataclass(frozen=True)
class ReplayRequest:
    """A sampler's record, and what is asked of it; None and False are off.

    Attributes:
        ids: (flat ids, offsets), as `kept_ids` of `vocab_parallel_sampling_logprobs`.
        missing: one of MISSING.
        entropy: whether that of the kept ids is wanted.
        full: whether log-probabilities of the whole distribution are wanted too.
    """

    ids: tuple[Tensor, Tensor]
    missing: str = "error"
    entropy: bool = False
    full: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.ids, tuple | list) or len(self.ids) != 2:
            got = type(self.ids).__name__
            raise ValueError(f"kept_ids: expected (flat_ids, offsets), got {got}")
        check_choice("missing", self.missing, MISSING)
        check_flag("entropy", self.entropy)
        check_flag("full", self.full)


class Record(NamedTuple):
    """The kept ids in the order in which a source walks its rows, one entry per id.

    Attributes:
        row: int64 `[e]`, each entry's row, ascending.
        place: int64 `[e]`, where its id stands in the flat ids.
        bounds: where each tile's entries begin, and the end.
    """

    row: Tensor
    place: Tensor
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, source: Source, count: int, offsets: Tensor, places: Tensor) -> Record:
        """A host sync where rows are left out, and one where there are several tiles.

        Args:
            count: ids in the whole record.
            offsets: `[rows + 1]`, where each row of the record begins in the flat ids.
            places: `[*lead]`, which row of the record is each token's.
        """
        device, row_of_record = source.device, source.to_row_order(places)  # [n]
        is_row = source.to_row_order(torch.ones_like(places), fill=0)  # 0: padding
        lengths = offsets.diff()[row_of_record] * is_row
        ends = lengths.cumsum(0)
        if source.options.selection is not None:
            count = int(lengths.sum())  # a host sync
        tile_ends, bounds = source.tile_ends(), (0, count)
        if len(tile_ends) > 1:
            last = torch.stack([ends[end - 1] for end in tile_ends])
            bounds = (0, *last.tolist())  # a host sync
        row = torch.arange(source.num_rows, device=device)
        row = row.repeat_interleave(lengths, output_size=count)
        nth_of_row = torch.arange(count, device=device) - (ends - lengths)[row]
        place = offsets[row_of_record[row]] + nth_of_row
        return cls(row, place, bounds)


def has_record(offsets: Tensor, places: Tensor) -> Tensor:
    """bool, of places' shape: whether the record has any id for these rows of it."""
    return (offsets.diff() > 0)[places]


def check_possible(ids: Tensor, offsets: Tensor, disallowed: Tensor | None) -> None:
    """No disallowed id in a record, or a ValueError; on CUDA a device-side assert."""
    if disallowed is None or disallowed.numel() == 0:
        return
    ordered = disallowed.sort().values  # torch.isin may wait for the device
    place = torch.searchsorted(ordered, ids).clamp(max=ordered.numel() - 1)
    bad = ordered[place] == ids

    def error() -> ValueError:
        entry = int(bad.nonzero()[0])
        row = int(torch.searchsorted(offsets, entry, right=True)) - 1
        return ValueError(
            "kept_ids: expected no disallowed id in a record, got id "
            f"{int(ids[entry])} in row {row}"
        )

    check_values(~bad, "kept_ids: a disallowed id in a record", error)


def check_recorded(recorded: Tensor, valid_mask: Tensor, places: Tensor) -> None:
    """A record for every row that counts, or a ValueError; on CUDA a device-side assert."""
    none = ~recorded & valid_mask
    check_values(
        ~none,
        "kept_ids: a row without a record",
        lambda: ValueError(
            "kept_ids: expected a record of every row whose target counts, got none for row "
            f"{places[none][:8].tolist()}: pass missing='full' where nothing was masked, or "
            "missing='ignore'"
        ),
    )


def check_kept_ids(
    kept_ids: tuple[Tensor, Tensor], rows: int, shard: VocabShard, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(flat ids `[e]`, offsets `[rows + 1]`), int64 copies; no sync on CUDA.

    Raises:
        ValueError: no 1-D integer tensors, offsets that are not `[rows + 1]`; on CPU (on
            CUDA a device-side assert) offsets that do not rise from 0 to the number of ids, ids
            outside [0, vocab_size), or an id twice in one row.
    """
    ids, offsets = kept_ids
    entries = ids.numel() if isinstance(ids, Tensor) else 0
    # Copies: the backward reads them, and autograd does not see changes of the caller's own.
    ids = check_target(ids, torch.Size((entries,)), device, name="kept_ids[0]").clone()
    offsets = check_target(offsets, torch.Size((rows + 1,)), device, name="kept_ids[1]").clone()
    lengths = offsets.diff()
    expected = f"kept_ids: expected offsets that rise from 0 to {entries}"
    check_values(
        (lengths >= 0).all() & (offsets[0] == 0) & (offsets[-1] == entries),
        expected,
        lambda: ValueError(f"{expected}, got {offsets[:8].tolist()} to {int(offsets[-1])}"),
    )
    check_values(
        (ids >= 0) & (ids < shard.vocab_size),
        f"kept_ids: id outside [0, {shard.vocab_size})",
        lambda: ValueError(f"kept_ids: expected ids in [0, {shard.vocab_size})"),
    )
    row = torch.arange(rows, device=device).repeat_interleave(lengths, output_size=entries)
    keys = (row * shard.padded_size + ids).sort().values
    check_values(
        keys.diff() > 0,
        "kept_ids: an id twice in one row",
        lambda: ValueError("kept_ids: expected each id at most once per row"),
    )
    return ids, offsets
