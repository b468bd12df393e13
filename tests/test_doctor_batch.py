"""`doctor --batch`: mistakes in a training batch, and files that are none."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from mcore_logprobs.debug import commands, doctor
from mcore_logprobs.debug.batch import check_batch

IDS = torch.arange(24).view(2, 12)
NEXT = torch.cat([IDS[:, 1:], torch.full((2, 1), -100)], dim=1)


@pytest.mark.parametrize(
    ("labels", "vocab_size", "said"),
    [
        (NEXT, 24, "100% are the next one"),
        (NEXT, None, "the largest label is 23; add the vocabulary's size (len"),
        (NEXT.masked_fill(IDS > 4, -100), 24, "5 of 24 labels count (not -100)"),
        (IDS, 24, "MISTAKE labels: expected the token after each input, got the input's own at 22"),
        (IDS + 2, 99, "got the one after that at 100% of the positions; shift them once"),
        (
            IDS.roll(1, 1),
            24,
            "MISTAKE labels: expected the token after each input, got the one before",
        ),
        (NEXT, 20, "MISTAKE labels: expected ids in [0, 20) or ignore_index, got [20, 21, 22, 23]"),
        (
            NEXT.clamp(max=19),
            20,
            "MISTAKE input_ids: expected ids in [0, 20), got [20, 21, 22, 23]",
        ),
        (
            NEXT * 0 - 100,
            24,
            "MISTAKE labels: expected some that count, got ignore_index (-100) at",
        ),
        # Some of eleven are shifted twice, and most of them.
        (NEXT.where(IDS % 6 != 1, IDS + 2), 99, "82% are the next one"),
        (
            NEXT.where(IDS % 12 < 4, IDS + 2),
            99,
            "after that at 60% of the positions; shift them once",
        ),
        (
            NEXT.flip(0),
            24,
            "MISTAKE labels: expected the token after each input, got it at 0% of 22",
        ),
    ],
    ids=[
        *("right", "size not known", "masked", "not shifted", "shifted twice", "shifted back"),
        *("outside", "inputs outside", "none counts", "some twice", "most twice", "of other rows"),
    ],
)
@pytest.mark.parametrize("suffix", ["pt", "npz"])
def test_a_batch(labels, vocab_size, said, suffix, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "self_test", lambda device: [])
    file = tmp_path / f"batch.{suffix}"
    batch = {"input_ids": IDS, "labels": labels, "position_ids": IDS}
    if vocab_size is not None:
        batch["vocab_size"] = torch.tensor(vocab_size)
    if suffix == "pt":
        torch.save(batch, file)
    else:
        np.savez(file, **{name: tensor.numpy() for name, tensor in batch.items()})
    failed = commands.doctor(["--batch", str(file)])
    text = capsys.readouterr().out
    assert said in text
    assert bool(failed) == ("MISTAKE" in said or "shift them once" in said)
    assert text.rstrip().endswith("The batch FAILED." if failed else "All checks passed.")


def checked(tmp_path, **batch) -> list[str]:
    torch.save(batch, tmp_path / "batch.pt")
    return check_batch(tmp_path / "batch.pt").problems


def test_a_loss_mask_says_which_labels_count(tmp_path) -> None:
    """The masked labels are anything, as Megatron's data sets leave them."""
    answer = torch.arange(12).expand(2, 12) >= 5
    text = torch.arange(24).view(2, 12).flip(1)  # ids that no shift of IDS matches
    for labels, said in (NEXT, None), (IDS, "the input's own at 12"), (IDS.roll(1, 1), "before"):
        labels = labels.where(answer, text)
        for dtype in (torch.float32, torch.float8_e4m3fn, torch.bool):
            mask = answer.to(dtype)
            problems = checked(tmp_path, input_ids=IDS, labels=labels, loss_mask=mask)
            assert bool(problems) == bool(said), problems
        assert said is None or said in problems[0]
    problems = checked(tmp_path, input_ids=IDS, labels=NEXT, loss_mask=torch.zeros(2, 12))
    assert problems == [
        "loss_mask: expected a number other than 0 at some label that counts, got 0 at all 22; no "
        "token has a loss"
    ]
    with pytest.raises(ValueError, match=r"loss_mask: expected input_ids' shape \(2, 12\), got"):
        checked(tmp_path, input_ids=IDS, labels=NEXT, loss_mask=torch.ones(12))


@pytest.mark.parametrize("shape", [(0, 12), (2, 0)])
def test_an_empty_batch(tmp_path, shape) -> None:
    empty = torch.zeros(shape, dtype=torch.long)
    (problem,) = checked(tmp_path, input_ids=empty, labels=empty)
    assert problem == f"input_ids: expected at least one token, got shape {shape}"


def of_sequences(*sequences: list[int], last: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """One packed row; the last label of a sequence: `last`, or the next sequence's first token."""
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    labels = ids.roll(-1)
    if last is not None:
        labels[torch.tensor([len(sequence) for sequence in sequences]).cumsum(0) - 1] = last
    return ids[None], labels[None]


ALTERNATING, CONSTANT, PADDED = [3, 4] * 8, [5] * 16, [7, 8, 9, 1, 2] + [0] * 27
REPEATED = [1, 2, 3, 3, 3, 3, 3, 4, 3, 3, 3, 5, 6, 6, 6, 6]


@pytest.mark.parametrize("last", [-100, 0, None], ids=["ignored", "end of text", "rolled"])
@pytest.mark.parametrize(
    "sequences",
    [
        [list(range(1, 21))],
        [ALTERNATING],
        [CONSTANT],
        [PADDED],
        [PADDED[::-1]],
        [REPEATED],
        [[i, i + 1] for i in range(1, 30, 2)],
        [[i, i + 1, i + 2] for i in range(1, 40, 3)],
        [[1, 2, 1]] * 12,
        [ALTERNATING, CONSTANT, PADDED, REPEATED],
        [[9]],
    ],
    ids=str,
)
def test_right_batches_are_no_mistake(tmp_path, sequences, last) -> None:
    ids, labels = of_sequences(*sequences, last=last)
    if not (labels != -100).any():
        labels = ids
    assert checked(tmp_path, input_ids=ids, labels=labels) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            lambda ids, labels: ids,
            "labels: expected the token after each input, got the input's own",
        ),
        (lambda ids, labels: labels.roll(-1, 1), "got the one after that at 100% of the positions"),
        (lambda ids, labels: ids.roll(1, 1), "got the one before it at 10 of 10"),
        (lambda ids, labels: labels.flip(0), "got it at 0% of 11 positions; are they [b, s]"),
    ],
    ids=["not shifted", "shifted twice", "shifted back", "of other rows"],
)
def test_some_rows_of_a_batch(tmp_path, wrong, said) -> None:
    ids = torch.arange(65).view(5, 13)
    ids, labels = ids[:, :-1].clone(), ids[:, 1:].clone()
    assert checked(tmp_path, input_ids=ids, labels=labels) == []
    labels[[1, 3]] = wrong(ids, labels)[[1, 3]]
    (problem,) = checked(tmp_path, input_ids=ids, labels=labels)
    assert problem.startswith(
        "2 of 5 rows, [1, 3], differ from the others; row 1: labels: expected"
    )
    assert said in problem
    labels[:, :6] = -100  # too few to tell
    assert checked(tmp_path, input_ids=ids, labels=labels) == []


ROLLED = "labels: expected ignore_index or the text's next token, got the "


def test_labels_that_come_from_the_start_of_a_row(tmp_path) -> None:
    """Of three rows; a label of one is ignored."""
    ids = torch.arange(36).view(3, 12)
    labels = ids.roll(-1, 1)
    labels[2, -1] = -100
    (problem,) = checked(tmp_path, input_ids=ids, labels=labels)
    assert problem.startswith(ROLLED + "row's first token at the end of 2 of 2 rows: torch.roll")
    labels[1, -1] = 3
    assert checked(tmp_path, input_ids=ids, labels=labels) == []
    mask = torch.arange(12).expand(3, 12) < 11
    assert checked(tmp_path, input_ids=ids, labels=ids.roll(-1, 1), loss_mask=mask) == []


@pytest.mark.parametrize("rows", [1, 2])
def test_labels_that_come_from_the_next_packed_sequence(tmp_path, rows) -> None:
    ids = torch.arange(rows * 24).view(rows, 24)
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    packed = {"input_ids": ids, "labels": labels, "cu_seqlens": torch.tensor([0, 5, 5, 12, 24])}
    (problem,) = checked(tmp_path, **packed)
    total = 2 * rows
    assert problem.startswith(
        f"{ROLLED}next one's first token at the end of {total} of {total} packed sequences: torch"
    )
    assert "context_parallel_shift(input_ids, cu_seqlens=..., fill=-100)" in problem
    for last in (-100, 1):
        labels[:, [4, 11]] = last
        assert checked(tmp_path, **packed) == []


def test_a_first_token_that_may_also_end_a_text(tmp_path) -> None:
    """As <|endoftext|> does: told, and no mistake."""
    ids = torch.arange(24).view(2, 12)
    ids[:, 0] = ids[:, 6] = 50256
    torch.save(
        {
            "input_ids": ids,
            "labels": ids.roll(-1, 1),
            "cu_seqlens": torch.tensor([0, 6, 12], dtype=torch.int32),
        },
        tmp_path / "batch.pt",
    )
    report = check_batch(tmp_path / "batch.pt")
    assert report.problems == []
    right = "50256: right only if it also ends a text"
    for place in (
        f"the row's first token at the end of 2 of 2 rows, {right}",
        f"the next one's first token at the end of 2 of 2 packed sequences, {right}",
    ):
        assert f"the label is {place}" in report.facts


def test_few_labels_that_happen_to_be_the_token_before(tmp_path) -> None:
    """Classification: one label per sequence, which says nothing of a shift."""
    labels = torch.full_like(IDS, -100)
    labels[:, 6] = IDS[:, 5]
    assert checked(tmp_path, input_ids=IDS, labels=labels) == []


@pytest.mark.parametrize("sequence", [PADDED, PADDED[::-1], REPEATED], ids=str)
def test_labels_shifted_back_in_repetitive_text(tmp_path, sequence) -> None:
    """Only a token whose neighbors differ tells one shift from the other."""
    ids = torch.tensor([sequence] * 4)
    (problem,) = checked(tmp_path, input_ids=ids, labels=ids.roll(1, 1))
    assert "got the one before it at" in problem


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"input_ids": IDS}, "labels: expected integers [b, s], got NoneType"),
        (
            {"input_ids": IDS, "labels": NEXT.float()},
            "labels: expected integers [b, s], got (2, 12) of torch.float32",
        ),
        (
            {"input_ids": IDS, "labels": NEXT[:, 1:]},
            "expected input_ids' shape (2, 12), got (2, 11)",
        ),
        ([IDS, NEXT], "expected a dictionary, got list"),
        (
            {"input_ids": IDS, "labels": NEXT, "vocab_size": "many"},
            "vocab_size: expected a whole number, got str",
        ),
        (
            {"input_ids": IDS, "labels": NEXT, "ignore_index": float("nan")},
            "ignore_index: expected a whole number, got nan",
        ),
        (
            {"input_ids": IDS, "labels": NEXT, "loss_mask": torch.full((2, 12), float("nan"))},
            "loss_mask: expected finite numbers, got 24 that are not",
        ),
        (
            {"input_ids": IDS, "labels": NEXT, "cu_seqlens": torch.tensor([0, 7, 13])},
            "cu_seqlens: expected integers [n + 1] that rise from 0 to at most 12, the length of "
            "a row, got torch.int64 (3,) [0, 7, 13]",
        ),
        (
            {"input_ids": IDS, "labels": NEXT, "cu_seqlens": torch.tensor([0, 7, 5])},
            "cu_seqlens: expected integers [n + 1] that rise from 0",
        ),
        (
            {"input_ids": IDS, "labels": NEXT, "cu_seqlens": torch.tensor([[0, 12]])},
            "got torch.int64 (1, 2)",
        ),
        (
            {"input_ids": IDS, "labels": NEXT, "cu_seqlens": torch.zeros(0, dtype=torch.int32)},
            "got torch.int32 (0,) []",
        ),
        (
            {"input_ids": IDS, "labels": NEXT, "cu_seqlens": torch.ones(3).to_sparse()},
            "cu_seqlens: expected a dense tensor with values, got a torch.sparse_coo one",
        ),
        ({"input_ids": IDS, "labels": NEXT, "cu_seqlens": torch.ones(3)}, "torch.float32 (3,)"),
        ({"input_ids": IDS, "labels": NEXT, "cu_seqlens": [0, 12]}, "got list"),
        (
            {"input_ids": IDS, "labels": NEXT, "vocab_size": 10**30},
            f"vocab_size: expected a whole number of 64 bits, got {10**30}",
        ),
        (
            {"input_ids": IDS, "labels": NEXT, "ignore_index": -1e30},
            "ignore_index: expected a whole number of 64 bits, got -1e+30",
        ),
        (
            {"input_ids": IDS > 3, "labels": NEXT},
            "input_ids: expected integers [b, s], got (2, 12) of torch.bool",
        ),
        (
            {"input_ids": IDS, "labels": NEXT.cfloat()},
            "labels: expected integers [b, s], got (2, 12) of torch.complex64",
        ),
        (
            {"input_ids": IDS.to_sparse(), "labels": NEXT},
            "input_ids: expected a dense tensor with values, got a torch.sparse_coo one",
        ),
        (
            {"input_ids": IDS, "labels": NEXT.to_sparse()},
            "labels: expected a dense tensor with values, got a torch.sparse_coo one",
        ),
        (
            {"input_ids": IDS, "labels": NEXT, "loss_mask": torch.ones(2, 12, device="meta")},
            "loss_mask: expected a dense tensor with values, got a meta one",
        ),
    ],
    ids=[
        *("no labels", "no integers", "shapes", "a list", "a word", "not a number", "a NaN mask"),
        *(
            "offsets past a row",
            "falling offsets",
            "offsets by row",
            "no offsets",
            "sparse offsets",
            "offsets of floats",
            "a list of them",
        ),
        *("a huge size", "a huge index", "bools", "complex", "sparse ids", "sparse labels", "meta"),
    ],
)
def test_a_file_that_is_no_batch(batch, said, tmp_path, capsys) -> None:
    file = tmp_path / "batch.pt"
    torch.save(batch, file)
    assert_refused(["--batch", str(file)], f"doctor: error: {file}: ", said, capsys)


def assert_refused(arguments, start: str, said: str, capsys) -> None:
    """One line, and status 2."""
    assert commands.doctor(arguments) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith(start)
    assert said in printed.err


def code_in_a_pickle() -> bytes:
    file = io.BytesIO()
    torch.save({"input_ids": IDS, "labels": print}, file)
    return file.getvalue()


def words_in_an_npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, input_ids=IDS.numpy(), labels=np.array(["a"]))
    return file.getvalue()


@pytest.mark.parametrize("command", [["--batch"], ["mismatch"]], ids=["batch", "mismatch"])
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("batch.pt", None, "expected a file that can be read, got No such file or directory"),
        ("batch.npz", None, "expected a file that can be read, got No such file or directory"),
        ("batch.json", b"{}", "expected a .npz or .pt file"),
        ("batch.pt", b"", "expected a dictionary of tensors and numbers saved by torch.save, got"),
        ("batch.pt", b"garbage", "saved by torch.save, got a file that torch refuses (Unpickling"),
        ("batch.pt", code_in_a_pickle(), "got a file that torch refuses (UnpicklingError)"),
        ("batch.pt", code_in_a_pickle()[:600], "got a file that torch refuses (RuntimeError)"),
        (
            "batch.npz",
            b"",
            "expected arrays of numbers saved by numpy.savez, got a file that numpy",
        ),
        ("batch.npz", b"garbage", "saved by numpy.savez, got a file that numpy refuses (ValueE"),
        ("batch.npz", words_in_an_npz(), "got a file that numpy refuses (TypeError)"),
    ],
    ids=[
        *("no .pt", "no .npz", "another suffix", "empty .pt", "no pickle", "code", "half a .pt"),
        *("empty .npz", "no .npz inside", "words"),
    ],
)
def test_a_file_that_cannot_be_read(command, name, content, said, tmp_path, capsys) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    start = f"doctor{' mismatch' * (command == ['mismatch'])}: error: {file}: "
    assert_refused([*command, str(file)], start, said, capsys)
