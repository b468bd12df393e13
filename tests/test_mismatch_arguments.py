"""explain_mismatch and its command: what is given, what is refused, and which ids may be there."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from mcore_logprobs.__main__ import main
from mcore_logprobs.diagnostics import Settings, explain_mismatch, load_mismatch_dump


def test_a_dump_that_is_not_there(capsys) -> None:
    assert main(["doctor", "mismatch", "none.npz"]) == 2
    assert capsys.readouterr().err == (
        "doctor mismatch: error: none.npz: expected a file that can be read, got No such file or "
        "directory\n"
    )


SMALL = {
    "train_logprobs": torch.zeros(3),
    "rollout_logprobs": torch.zeros(3),
    "target": torch.arange(3),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": "all"}, "mask: expected a tensor, got str"),
        ({"temperature": "hot"}, "temperature: expected a number, got str"),
        ({"top_p": torch.ones(2)}, "top_p: expected a number, got shape (2,)"),
        ({"ignore_index": 0.5}, "ignore_index: expected a whole number, got 0.5"),
        ({"vocab_size": torch.tensor(math.nan)}, "vocab_size: expected a whole number, got nan"),
        ({3: 1, "logit": 1}, "unknown key 3, logit; known: train_logprobs, "),
        (
            {"target": None},
            "expected the keys train_logprobs, rollout_logprobs, target; ['target']",
        ),
    ],
)
def test_a_dump_of_something_else(change, message: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "dump.pt"
    torch.save({**SMALL, **change}, path)
    assert main(["doctor", "mismatch", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"doctor mismatch: error: {path}: {message}")
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    torch.save({**SMALL, "temperature": torch.tensor([0.5]), "mask": None, "top_p": None}, path)
    assert main(["doctor", "mismatch", str(path)]) == 0


def test_a_plot_that_cannot_be_written(tmp_path: Path, monkeypatch, capsys) -> None:
    """The refusal comes before the work."""
    dump = tmp_path / "dump.pt"
    torch.save(SMALL, dump)
    unknown, missing, folder = (
        tmp_path / "x.picture",
        tmp_path / "none" / "x.png",
        tmp_path / "a.png",
    )
    folder.mkdir()
    for plot, said in (
        (missing, "expected a file in a folder that exists, got"),
        (unknown, "expected a suffix of "),
        (folder, "expected a file, got the folder"),
        ("", "expected a file, got ''"),
    ):
        assert main(["doctor", "mismatch", str(dump), "--plot", str(plot)]) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("doctor mismatch: error: --plot: ")
        assert said in printed.err
        assert printed.err.count("\n") == 1
        assert printed.out == ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["doctor", "mismatch", str(dump), "--plot", str(tmp_path / "x.png")]) == 2
    assert "--plot: expected matplotlib to be installed: pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.zeros(2, 3)}, "target: expected an integer dtype"),
        ({"mask": torch.ones(2, 4)}, r"mask: expected \[2, 3\], got \[2, 4\]"),
        ({"mask": torch.full((2, 3), 2)}, "mask: expected only 0 and 1"),
        ({"mask": torch.zeros(2, 3)}, "at least one token"),
        ({"logits": torch.zeros(2, 4, 8)}, r"logits: expected \[2, 3, n\], got \[2, 4, 8\]"),
        ({"hidden": torch.zeros(2, 3, 4)}, "expected one of logits and hidden"),
        *(
            ({name: torch.zeros(2, 3, 9)}, f"{name}: expected logits of 8 columns, as the trainer")
            for name in ("stale_logits", "float32_logits", "rollout_logits")
        ),
        (
            {"rollout_hidden": torch.zeros(2, 3, 4), "weight": torch.zeros(7, 4)},
            "rollout_hidden: expected logits of 8 columns",
        ),
        (
            {"rollout_logits": torch.zeros(2, 3, 6), "vocab_size": 7},
            "rollout_logits: expected logits",
        ),
        ({"logits": None, "hidden": torch.zeros(2, 3, 4)}, "expected weight with it"),
        ({"stale_weight": torch.zeros(8, 4)}, "expected stale_hidden with it"),
        ({"logits": None, "weight": torch.zeros(8, 4)}, "weight: expected hidden with it"),
        (
            {"logits": None, "float32_logits": torch.zeros(2, 3, 8)},
            "float32_logits: expected logits or hidden with it",
        ),
        ({"train": {"colour": 1}}, "train: unknown setting 'colour'"),
        ({"rollout": {"alignment": "up"}}, "rollout: alignment: expected one of"),
        (
            {"train": {"stale_weights": True}},
            "train: stale_weights: expected stale_logits or stale_hidden too",
        ),
        ({"rollout": {"engine_layers": True}}, "engine_layers: expected rollout_logits or"),
        ({"temperature": 0.0}, "temperature"),
        ({"rollout_hidden": torch.zeros(2, 3, 4)}, "rollout_hidden: expected weight with it"),
        ({"stale_hidden": torch.zeros(2, 3, 4)}, "stale_hidden: expected stale_weight with it"),
        ({"search_tokens": 0}, "search_tokens: expected an int >= 1, got 0"),
        ({"threshold": math.nan}, "threshold: expected a finite number >= 0, got nan"),
        *(
            ({"top_p": p}, rf"top_p: expected a number in \(0, 1\], got {p}")
            for p in (90, math.nan, True, None)
        ),
        *(
            ({"min_p": p}, rf"min_p: expected a number in \[0, 1\], got {p}")
            for p in (-0.05, math.nan)
        ),
        ({"top_k": 2.5}, "top_k: expected None or an int >= -1, got 2.5"),
        ({"logits": None, "temperature": math.nan}, "temperature: expected a finite number > 0"),
        ({"vocab_size": 10**30}, "vocab_size: expected None or an int from 1 to"),
        *(
            ({"ignore_index": i}, f"ignore_index: expected an int of 64 bits, got {i}")
            for i in (math.nan, 0.5, True, 10**30)
        ),
        (
            {"target": torch.tensor([[1, 2, -1], [3, 4, -100]])},
            r"target: expected ids in \[0, 8\) or ignore_index -100 where a token counts, got "
            r"\[-1\]",
        ),
        ({"target": torch.full((2, 3), 8)}, r"target: expected ids in \[0, 8\)"),
        ({"target": torch.full((2, 3), 7), "vocab_size": 7}, r"expected ids in \[0, 7\)"),
        ({"target": torch.full((2, 3), -1), "logits": None}, "target: expected ids >= 0 or"),
        ({"target": torch.zeros(2, 3).cfloat()}, "target: expected an integer dtype, got"),
        ({"train_logprobs": "none"}, "train_logprobs: expected a tensor, got str"),
        ({"train": 3}, "train: expected None or a mapping of settings, got int"),
        ({"rollout": {"filter_applied": torch.ones(2)}}, "rollout: filter_applied: expected one"),
        ({"logits": torch.zeros(2, 3, 8).to_sparse()}, "logits: expected a dense tensor with val"),
        ({"mask": torch.ones(2, 3, device="meta")}, "mask: expected a dense tensor with values"),
    ],
)
def test_mistakes(change: dict, message: str) -> None:
    good = {
        "train_logprobs": -torch.rand(2, 3),
        "rollout_logprobs": -torch.rand(2, 3),
        "target": torch.randint(8, (2, 3)),
        "logits": torch.randn(2, 3, 8),
    }
    explain_mismatch(**good)
    with pytest.raises(ValueError, match=message):
        explain_mismatch(**{**good, **change})


def test_an_engine_pads_its_vocabulary_in_its_own_way() -> None:
    logits = torch.randn(2, 30, 12)
    target = torch.randint(9, (2, 30))
    right = logits[..., :9].log_softmax(-1).gather(-1, target[..., None])[..., 0]
    for columns in (9, 10, 12):
        found = explain_mismatch(
            right, right, target, logits=logits, rollout_logits=logits[..., :columns], vocab_size=9
        )
        assert (found.train, found.rollout) == (Settings(), Settings())


@pytest.mark.parametrize("ignored", [-100, -7, 99])
def test_a_token_that_does_not_count_may_have_any_id(ignored: int) -> None:
    """The value of its neighbor, had the labels been shifted, is not known."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 64, 8, generator=generator)
    target = torch.randint(8, (1, 64), generator=generator)
    right = logits.log_softmax(-1).gather(-1, target[..., None])[..., 0]
    mask = torch.arange(64)[None] % 8 != 0
    target = target.where(mask, ignored).to(torch.int16)
    found = explain_mismatch(right, right, target, mask=mask, logits=logits)
    assert (found.train, found.rollout) == (Settings(), Settings())
    assert found.tokens == 56


def test_unknown_dump_keys(tmp_path: Path) -> None:
    torch.save({"train_logprobs": torch.zeros(3), "logit": 1}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="unknown key logit"):
        load_mismatch_dump(tmp_path / "a.pt")
    torch.save({"train_logprobs": torch.zeros(3)}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match="rollout_logprobs"):
        load_mismatch_dump(tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"expected a \.npz or \.pt file"):
        load_mismatch_dump(tmp_path / "c.json")
