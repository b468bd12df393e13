"""`doctor --batch`: whether a batch's labels are what a patched model expects."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

import torch
from torch import Tensor

from mcore_logprobs.debug.dump_file import read_dump
from mcore_logprobs.megatron.calls import check_shifted


@dataclass(frozen=True)
class BatchReport:
    """What was found in a batch.

    Attributes:
        facts: counts, one sentence each.
        problems: what is wrong and how to mend it; empty if nothing is.
    """

    facts: list[str]
    problems: list[str]


def check_batch(path: str | PathLike[str]) -> BatchReport:
    """Check `input_ids` and `labels`, `[b, s]` integers each, in a .pt or .npz file.

    The file may also have numbers: `vocab_size` (the tokenizer's) and `ignore_index` (default
    -100). Other keys are left alone.

    Raises:
        ValueError: the file has no such tensors, or they have different shapes.
    """
    dump = read_dump(path)
    for name in ("input_ids", "labels"):
        tensor = dump.get(name)
        if not isinstance(tensor, Tensor) or tensor.dim() != 2 or tensor.is_floating_point():
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{path}: {name}: expected integers [b, s], got {got}")
    input_ids, labels = dump["input_ids"].long(), dump["labels"].long()
    if input_ids.shape != labels.shape:
        raise ValueError(
            f"{path}: labels: expected input_ids' shape {tuple(input_ids.shape)}, got "
            f"{tuple(labels.shape)}"
        )
    ignore_index = int(dump.get("ignore_index", -100))
    counted = labels != ignore_index
    facts = [f"{int(counted.sum())} of {labels.numel()} labels count (not {ignore_index})"]
    problems = []
    shares = [_share(input_ids, labels, counted, ahead) for ahead in range(3)]
    facts += [
        f"{share:.0%} are {what}"
        for share, what in zip(shares, ("the input's own token", "the next one"), strict=False)
    ]
    try:
        check_shifted(input_ids, labels, ignore_index)
    except ValueError as error:
        problems.append(str(error))
    if shares[2] > 0.5 and shares[2] > max(shares[:2]):
        problems.append(
            f"labels: expected the token after each input, got the one after that at "
            f"{shares[2]:.0%} of the positions; shift them once"
        )
    return BatchReport(facts, problems + _of_ids(labels[counted], dump.get("vocab_size"), facts))


def _share(input_ids: Tensor, labels: Tensor, counted: Tensor, ahead: int) -> float:
    """The share of labels that are the token `ahead` positions after their input."""
    stop = max(0, labels.shape[1] - ahead)
    inside = counted[:, :stop]
    same = inside & (labels[:, :stop] == input_ids[:, ahead:])
    return int(same.sum()) / max(1, int(inside.sum()))


def _of_ids(ids: Tensor, vocab_size: Tensor | int | None, facts: list[str]) -> list[str]:
    """Problems of labels' ids; what is known of their range is added to the facts."""
    largest = int(ids.max()) if ids.numel() else -1
    if vocab_size is None:
        facts.append(
            f"the largest label is {largest}; add the tokenizer's size as vocab_size, and pass it "
            "to LogprobConfig, or the columns that pad the vocabulary have probability"
        )
        vocab_size = torch.iinfo(torch.int64).max
    outside = (ids < 0) | (ids >= int(vocab_size))
    if not bool(outside.any()):
        return []
    return [
        f"labels: expected ids in [0, {int(vocab_size)}) or ignore_index, got "
        f"{ids[outside][:8].tolist()}"
    ]
