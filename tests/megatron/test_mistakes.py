"""Mistakes with a patched model: each is an error, a warning or a log line that names the cure."""

from __future__ import annotations

import gc
import logging
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from mcore_logprobs import LogprobConfig, TokenStats, patch_model
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.losses import ReinforceLoss
from mcore_logprobs.megatron import heads
from mcore_logprobs.megatron.blocks import Block
from tests.megatron.common import VOCAB, make_batch, megatron, tiny_config


def mistakes() -> None:
    with megatron() as parallel_state:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        inputs, labels = batch["inputs"], batch["labels"]
        handle = patch_model(model, LogprobConfig(temperature=0.5, chunk_size=8))
        with pytest.raises(
            ValueError, match=r"already: expected temperature=0\.5, got temperature=1"
        ):
            patch_model(model, LogprobConfig(chunk_size=8))
        policy = ReinforceLoss(), torch.ones(labels.shape)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            handle.policy_loss(*policy)
            Block.__new__(Block).__del__()  # one whose making was interrupted says nothing
            gc.collect()
            with handle.policy_loss(*policy):
                stats = model(**inputs, labels=labels)
        texts = [str(w.message) for w in seen if w.category is RuntimeWarning]
        assert texts == [
            "PatchHandle.policy_loss(...) did nothing: expected a with statement around the "
            "model's call"
        ]
        assert isinstance(stats, TokenStats)
        assert stats.policy_loss is not None
        with (
            handle.policy_loss(*policy),
            pytest.raises(ValueError, match=r"\.policy_loss: expected a call with labels"),
        ):
            model(**inputs)
        with pytest.raises(TypeError, match="'denominater'; did you mean denominator"):
            handle.policy_loss(*policy, denominater=2.0)  # type: ignore[call-arg]
        logprobs, ids = torch.full((2, 5, 3), -2.0), torch.zeros(2, 5, 4, dtype=torch.int64)
        with (
            pytest.raises(ValueError, match=r"teacher_topk\[1\]: expected shape \(2, 5, 3\), got"),
            handle.divergence(teacher_topk=(logprobs, ids)),
        ):
            pass
        with (
            pytest.raises(ValueError, match="teacher_temperature: expected None with teacher_topk"),
            handle.divergence(teacher_topk=(logprobs, ids[..., 1:]), teacher_temperature=2.0),
        ):
            pass
        for name, value in (("logit_scale", 0.5), ("softcap", 5.0), ("bias", torch.ones(VOCAB))):
            with (
                pytest.raises(
                    ValueError, match=f"teacher_{name}: expected the default with teacher"
                ),
                handle.divergence(
                    teacher_topk=(logprobs, ids[..., 1:]), **{f"teacher_{name}": value}
                ),
            ):
                pass
        handle.remove()


def unshifted_labels() -> None:
    with megatron() as parallel_state:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
        inputs = make_batch(parallel_state)["inputs"]
        ids = inputs["input_ids"]
        shifted = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
        masked = torch.where(torch.rand(ids.shape) < 0.3, ids, -100)
        with patch_model(model, LogprobConfig(check_labels=True)) as handle:
            for wrong in (ids, masked):
                with pytest.raises(ValueError, match="expected the token after each input"):
                    model(**inputs, labels=wrong)
            for right in (shifted, torch.full_like(ids, -100)):
                model(**inputs, labels=right)
            repeated = torch.full_like(ids, 7)  # its own next token
            model(**inputs | {"input_ids": repeated}, labels=repeated)
            with handle.options(check_labels=False):
                model(**inputs, labels=ids)
            rows = torch.randperm(ids.numel())[: ids.numel() // 2]
            for target, message in (
                (ids, "expected the token after each input"),
                (shifted, ""),
                (shifted, "rows: expected"),
            ):
                some = rows + (ids.numel() if message.startswith("rows") else 0)
                with handle.targets(target.flatten()[rows].int(), rows=some):
                    if message:
                        with pytest.raises(ValueError, match=message):
                            model(**inputs)
                    else:
                        assert model(**inputs).logprobs.shape == rows.shape


def labels_without_their_inputs() -> list[str]:
    """The log lines of two calls of a language model that is given embeddings."""
    with megatron() as parallel_state, said() as lines:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
        inputs = make_batch(parallel_state)["inputs"]
        ids = inputs["input_ids"]
        embedded = model.embedding(ids, inputs["position_ids"])
        with patch_model(model, LogprobConfig(check_labels=True)):
            for _ in range(2):
                model(None, None, None, decoder_input=embedded, labels=ids)
    return lines


@contextmanager
def said() -> Iterator[list[str]]:
    """The log lines from here on, each as if it were said for the first time."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcore_logprobs").addHandler(handler)
    heads._said.clear()
    try:
        yield lines
    finally:
        logging.getLogger("mcore_logprobs").removeHandler(handler)


def padding_that_counts() -> list[str]:
    """With Megatron-LM's tokenizer smaller than the head; the log lines of two patches."""
    held = "megatron.training.global_vars"
    before = sys.modules.get(held)
    tokenizer = types.SimpleNamespace(vocab_size=VOCAB - 6)
    sys.modules[held] = types.SimpleNamespace(_GLOBAL_TOKENIZER=tokenizer)  # type: ignore[assignment]
    try:
        with megatron(), said() as lines:
            model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
            for size in (VOCAB - 6, None, None):
                patch_model(model, LogprobConfig(vocab_size=size)).remove()
    finally:
        if before is None:
            del sys.modules[held]
        else:
            sys.modules[held] = before
    return lines


@pytest.mark.parametrize("check", [mistakes, unshifted_labels], ids=lambda f: f.__name__)
def test_mistakes(ranks, check):
    ranks(1).run(check)


def test_labels_that_are_not_checked_are_said_once(ranks):
    (lines,) = ranks(1).run(labels_without_their_inputs)
    assert lines == [
        "check_labels: expected input_ids of the labels' shape in the same call, got none: the "
        "labels of such calls are not checked (a later pipeline stage, decoder_input, or an output "
        "processor beside multi-token prediction in combined 1F1B)"
    ]


def test_padding_that_is_counted_is_said_once(ranks):
    (lines,) = ranks(1).run(padding_that_counts)
    assert lines == [
        "vocab_size: expected 90, the tokenizer's size, got None, which counts all 96 columns of "
        "the head: its padding has probability too"
    ]


def blocks_without_labels() -> None:
    with megatron() as parallel_state:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        labels = batch["labels"] % VOCAB
        record = labels.flatten(), torch.arange(labels.numel() + 1)
        topk = torch.zeros(*labels.shape, 1), labels.unsqueeze(-1)
        with patch_model(model) as handle:
            for name, block in {
                "also": handle.also(topk=2),
                "policy_loss": handle.policy_loss(lambda logprobs, entropy: -logprobs),
                "map": handle.map(lambda logits: logits.sum(-1)),
                "replay": handle.replay(record),
                "divergence": handle.divergence(teacher_topk=topk),
            }.items():
                expected = f"PatchHandle.{name}: expected a call with labels"
                with block, pytest.raises(ValueError, match=expected):
                    model(**batch["inputs"])


def test_every_block_needs_labels(ranks):
    ranks(1).run(blocks_without_labels)
