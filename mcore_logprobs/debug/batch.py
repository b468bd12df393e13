"""`doctor --batch`: whether a batch's labels are what a patched model expects."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

import torch
from torch import Tensor

from mcore_logprobs.debug.dump_file import read_dump, whole_number_of
from mcore_logprobs.megatron.calls import check_shifted

# Labels are said to be shifted back where at least so many tell, and this share of them says so.
_ENOUGH, _NEARLY_ALL = 8, 0.9


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

    The file may also have `loss_mask` `[b, s]`, 0 where a token has no loss, `cu_seqlens`
    `[n + 1]`, where packed sequences begin in each row, and numbers: `vocab_size` (the tokenizer's)
    and `ignore_index` (default -100). Other keys are left alone.

    Raises:
        ValueError: the file has no such tensors, they have different shapes or hold no values,
            cu_seqlens are no offsets into a row, or a number is not whole or needs more than 64
            bits.
    """
    dump = read_dump(path)
    for name in ("input_ids", "labels"):
        tensor = dump.get(name)
        if not isinstance(tensor, Tensor) or tensor.dim() != 2 or not _holds_integers(tensor):
            got = type(tensor).__name__
            if isinstance(tensor, Tensor):
                got = f"{tuple(tensor.shape)} of {tensor.dtype}"
            raise ValueError(f"{path}: {name}: expected integers [b, s], got {got}")
        _check_dense(path, name, tensor)
    input_ids, labels = dump["input_ids"].long(), dump["labels"].long()
    mask = dump.get("loss_mask", torch.ones_like(labels))
    for name, tensor in (("labels", labels), ("loss_mask", mask)):
        if not isinstance(tensor, Tensor) or tensor.shape != input_ids.shape:
            found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(
                f"{path}: {name}: expected input_ids' shape {tuple(input_ids.shape)}, got {found}"
            )
    _check_dense(path, "loss_mask", mask)
    mask = mask.double() if mask.is_floating_point() else mask  # no isfinite of 8-bit floats
    if not_finite := int((~mask.isfinite()).sum()):
        raise ValueError(
            f"{path}: loss_mask: expected finite numbers, got {not_finite} that are not"
        )
    if not labels.numel():
        shape = tuple(input_ids.shape)
        return BatchReport([], [f"input_ids: expected at least one token, got shape {shape}"])
    starts = _starts(path, dump.get("cu_seqlens"), input_ids.shape[1])
    ignore_index = whole_number_of(path, dump, "ignore_index", -100)
    vocab_size = whole_number_of(path, dump, "vocab_size")
    assert ignore_index is not None
    given = labels != ignore_index
    counted = given & (mask != 0)
    why = f"not {ignore_index}" + (", loss_mask not 0" if "loss_mask" in dump else "")
    facts = [f"{int(counted.sum())} of {labels.numel()} labels count ({why})"]
    facts += [
        f"{_share(input_ids, labels, counted, ahead):.0%} are {what}"
        for ahead, what in ((0, "the input's own token"), (1, "the next one"))
    ]
    problems = _of_counts(given, counted, ignore_index)
    of_shift = _of_shift(input_ids, labels, counted, ignore_index)
    problems += of_shift or _of_rows(input_ids, labels, counted, ignore_index)
    if not of_shift:
        problems += _of_ends(input_ids, labels, counted, starts, facts)
    problems += _of_ids(input_ids, labels[given], vocab_size, facts)
    return BatchReport(facts, problems)


def _holds_integers(tensor: Tensor) -> bool:
    other = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool
    return not other


def _check_dense(path: str | PathLike[str], name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else tensor.layout
        raise ValueError(f"{path}: {name}: expected a dense tensor with values, got a {kind} one")


def _starts(path: str | PathLike[str], cu_seqlens: object, length: int) -> Tensor:
    """Where packed sequences begin within a row, behind its first token."""
    if cu_seqlens is None:
        return torch.zeros(0, dtype=torch.int64)
    got = type(cu_seqlens).__name__
    if isinstance(cu_seqlens, Tensor):
        _check_dense(path, "cu_seqlens", cu_seqlens)
        got = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        if cu_seqlens.dim() == 1 and _holds_integers(cu_seqlens):
            offsets = cu_seqlens.long()
            rises = offsets.numel() > 0 and bool((offsets.diff() >= 0).all())
            if rises and offsets[0] == 0 and offsets[-1] <= length:
                return offsets[(offsets > 0) & (offsets < length)].unique()
            got += f" {offsets.tolist()[:8]}"
    raise ValueError(
        f"{path}: cu_seqlens: expected integers [n + 1] that rise from 0 to at most {length}, the "
        f"length of a row, got {got}"
    )


def _of_counts(given: Tensor, counted: Tensor, ignore_index: int) -> list[str]:
    """Problems of a batch that trains on no token."""
    if not bool(given.any()):
        got = f"ignore_index ({ignore_index}) at all {given.numel()}"
        return [f"labels: expected some that count, got {got}; no token has a loss"]
    if not bool(counted.any()):
        got = f"0 at all {int(given.sum())}"
        return [
            "loss_mask: expected a number other than 0 at some label that counts, got "
            f"{got}; no token has a loss"
        ]
    return []


def _of_shift(input_ids: Tensor, labels: Tensor, counted: Tensor, ignore_index: int) -> list[str]:
    """Problems of labels that are another token than the one after their input."""
    # Only a token whose two neighbors differ tells one shift from the other: in padding and in
    # repeated text right labels are the token before, too.
    before, after = input_ids[:, :-2], input_ids[:, 2:]
    telling = counted[:, 1:-1] & (before != after)
    back, total = int((telling & (labels[:, 1:-1] == before)).sum()), int(telling.sum())
    if total >= _ENOUGH and back >= _NEARLY_ALL * total:
        return [
            f"labels: expected the token after each input, got the one before it at {back} of "
            f"{total} positions; shift them the other way: labels[:, t] = tokens[:, t + 1]"
        ]
    try:
        check_shifted(input_ids, labels.where(counted, ignore_index), ignore_index)
    except ValueError as error:
        return [str(error)]
    shares = [_share(input_ids, labels, counted, ahead) for ahead in range(3)]
    if shares[2] > 0.5 and shares[2] > max(shares[:2]):
        return [
            f"labels: expected the token after each input, got the one after that at "
            f"{shares[2]:.0%} of the positions; shift them once"
        ]
    inside = int(counted[:, :-1].sum())
    if inside >= _ENOUGH and shares[1] < 0.5:  # packed, every other one may be an end of text
        return [
            f"labels: expected the token after each input, got it at {shares[1]:.0%} of {inside} "
            "positions; are they [b, s], and of these inputs, row by row?"
        ]
    return []


def _of_rows(input_ids: Tensor, labels: Tensor, counted: Tensor, ignore_index: int) -> list[str]:
    """Problems of single rows, of which the others are right."""
    found: dict[int, str] = {}
    for row in (counted[:, :-1].sum(1) >= _ENOUGH).nonzero().flatten().tolist():
        part = slice(row, row + 1)
        for problem in _of_shift(input_ids[part], labels[part], counted[part], ignore_index):
            found[row] = problem
    if not found:
        return []
    first = next(iter(found))
    rows = f"{len(found)} of {len(labels)} rows, {list(found)[:8]}"
    return [f"{rows}, differ from the others; row {first}: {found[first]}"]


def _of_ends(
    input_ids: Tensor, labels: Tensor, counted: Tensor, starts: Tensor, facts: list[str]
) -> list[str]:
    """Problems of labels that `torch.roll` has brought from the start of a row, or of the next
    packed sequence; what may be an end of text goes to the facts.
    """
    places = (
        (torch.tensor([input_ids.shape[1] - 1]), torch.tensor([0]), "row", "the row's"),
        (starts - 1, starts, "packed sequence", "the next one's"),
    )
    problems = []
    for last, first, what, whose in places:
        counts = counted[:, last]
        brought, found = input_ids[:, first][counts], labels[:, last][counts]
        same, total = int((found == brought).sum()), int(counts.sum())
        if not total or same < _NEARLY_ALL * total:
            continue
        where = f"{whose} first token at the end of {same} of {total} {what}s"
        if len(brought.unique()) > 1:
            problems.append(
                f"labels: expected ignore_index or the text's next token, got {where}: torch.roll "
                "does that, context_parallel_shift(input_ids, cu_seqlens=..., fill=-100) does not"
            )
        else:
            token = int(brought[0])
            facts.append(f"the label is {where}, {token}: right only if it also ends a text")
    return problems


def _share(input_ids: Tensor, labels: Tensor, counted: Tensor, ahead: int) -> float:
    """The share of labels that are the token `ahead` positions after their input."""
    stop = max(0, labels.shape[1] - ahead)
    inside = counted[:, :stop]
    same = inside & (labels[:, :stop] == input_ids[:, ahead:])
    return int(same.sum()) / max(1, int(inside.sum()))


def _of_ids(
    input_ids: Tensor, labels: Tensor, vocab_size: int | None, facts: list[str]
) -> list[str]:
    """Problems of ids, of labels that are given; what is known of their range goes to the facts."""
    largest = int(labels.max()) if labels.numel() else -1
    if vocab_size is None:
        if largest >= 0:
            facts.append(
                f"the largest label is {largest}; add the vocabulary's size (len(tokenizer) or the "
                "model config's) as vocab_size, and pass it to LogprobConfig, or the columns that "
                "pad the vocabulary have probability"
            )
        vocab_size = torch.iinfo(torch.int64).max
    problems = []
    for name, ids, more in (("input_ids", input_ids, ""), ("labels", labels, " or ignore_index")):
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if outside.numel():
            got = outside[:8].tolist()
            problems.append(f"{name}: expected ids in [0, {vocab_size}){more}, got {got}")
    return problems
