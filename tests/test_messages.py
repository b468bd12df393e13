"""A message that does not say its cure is explained in docs/troubleshooting.md, and pages quote no
message that nothing prints any more.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import mcore_logprobs as ml
from tests.helpers.documents import PAGES, ROOT, page_name, quoted_messages
from tests.helpers.messages import Message, can_be_printed, messages

# Messages that name what they take explain themselves; so do the lines of command-line tools.
SAY_IT = ("debug/", "bench/", "commands.", "run.", "cpu_megatron/")
OTHERS = [m for m in messages() if "expected" not in m.text and not m.where.startswith(SAY_IT)]


def test_what_is_collected():
    """A ValueError in f-strings, one of two parts, a log line and a device-side assert."""
    texts = {m.text: m.kind for m in messages()}
    assert len(texts) > 200
    assert texts["NAME: expected an int from 1 to vocab_size MOST, got K"] == "ValueError"
    assert texts["the ranks of the NAME make different calls; ..."] == "ValueError"
    assert texts["not fused, the logits are materialized: ..."] == "log"
    assert texts["kept_ids: an id twice in one row"] == "device-side assert"


@pytest.mark.parametrize("message", OTHERS, ids=lambda m: m.text[:40])
def test_a_message_that_does_not_say_its_cure_is_explained(message: Message):
    explained = " ".join((ROOT / "docs" / "troubleshooting.md").read_text().split())
    assert any(words in explained for words in message.words()), message.words()


# ---- what pages quote ----------------------------------------------------------------------------


def _under_inference_mode():
    with torch.inference_mode():
        x = torch.ones(2)
    x * torch.ones(2, requires_grad=True)


# Messages of others, with a call that raises torch's; gloo's takes a rank that dies.
FOREIGN: dict[str, Callable[[], object] | None] = {
    "Inference tensors cannot be saved for backward": _under_inference_mode,
    "expected m1 and m2 to have the same dtype": lambda: torch.ones(2, 2) @ torch.ones(2, 2).half(),
    "shape '[94148841748179, ...]' is invalid for input of size 96": lambda: torch.ones(96).view(
        94148841748179, 1
    ),
    "... Connection closed by peer": None,
}
# Generated pages have no quotes of their own. A change log says what messages were.
QUOTED = [
    (page_name(page), quote)
    for page in PAGES
    if page.parent.name != "api" and page.name not in ("CHANGELOG.md", "CONTRIBUTING.md")
    for quote in quoted_messages(page.read_text())
]


def test_which_quotes_are_found():
    """In prose, in tables of messages and in blocks; commands are not among them."""
    assert len(QUOTED) > 100
    assert {quote for _, quote in QUOTED} > {
        "another rank stopped: ...",
        "lazy logits: train.py:41 needs real ones (softmax): 48 rows are materialized",
        "patched GPTModel: LogprobConfig(...)",
        "backend for cpu tensors: torch (eager torch, on any device)",
        "GPTModel: gives lazy logits from now on",
        *FOREIGN,
    }
    assert not any("python -m" in quote for _, quote in QUOTED)


@pytest.mark.parametrize(("page", "quote"), QUOTED, ids=lambda text: text[:40])
def test_a_quoted_message_is_still_printed(page: str, quote: str):
    assert can_be_printed(quote) != (quote in FOREIGN)


@pytest.mark.parametrize("quote", [quote for quote, call in FOREIGN.items() if call])
def test_a_message_of_torch_is_still_printed(quote: str):
    with pytest.raises(RuntimeError) as caught:
        FOREIGN[quote]()
    assert quote.rpartition("...")[2].strip("]") in str(caught.value)


@pytest.mark.parametrize(
    "quote",
    [
        "disallowed_ids: no id may come",
        "not fused, the logits are computed whole: ...",
        "output='stats' leaves a loss out: ...",
        "kept_ids: expected each id at most once a row",
        "MODEL holds N language models (NAMES): pass one of them",
        "megatron.core.parallel_state is not initialised",
        "... is patched already, with ...",
        "temprature: expected a finite number > 0",
        "temperature: expected a finite number > 0, down to 1.2e-38",
        "mode: expected the same on every rank of the group, got 'token' at rank 0, 'x' at rank 1",
    ],
)
def test_a_quote_of_what_is_not_printed_is_found(quote: str):
    assert not can_be_printed(quote)


# ---- refusals that no other test asks for --------------------------------------------------------

HIDDEN, WEIGHT, IDS = torch.randn(4, 3), torch.randn(6, 3), torch.arange(4)
LOGITS, TEACHER = torch.randn(4, 6), torch.randn(4, 2)
FAR = torch.zeros(4, device="meta")
LORA = (torch.randn(2, 3), torch.randn(6, 2), 1.0)
REFUSED: list[tuple[str, Callable[[], object]]] = [
    (
        "compact=True: expected a mask that says which rows to keep, got None",
        lambda: ml.linear_topk_distill(
            HIDDEN, WEIGHT, TEACHER, IDS.view(4, 1).expand(4, 2), compact=True
        ),
    ),
    (
        "teacher_bias: expected None with teacher_logits",
        lambda: ml.linear_kl_div(
            HIDDEN, WEIGHT, teacher_logits=LOGITS, teacher_bias=torch.zeros(6)
        ),
    ),
    (
        "teacher_lora: expected None with teacher_logits",
        lambda: ml.linear_kl_div(HIDDEN, WEIGHT, teacher_logits=LOGITS, teacher_lora=LORA),
    ),
    (
        "teacher_hidden: expected device cpu, got meta",
        lambda: ml.linear_kl_div(
            HIDDEN, WEIGHT, teacher_hidden=HIDDEN.to("meta"), teacher_weight=WEIGHT.to("meta")
        ),
    ),
    (
        "invariant_segments: expected None with a LoRA, got 1",
        lambda: ml.linear_token_stats(HIDDEN, WEIGHT, IDS, lora=LORA, invariant_segments=1),
    ),
    (
        "per_token_tensors[0]: expected device cpu, got meta",
        lambda: ml.linear_policy_loss(HIDDEN, WEIGHT, IDS, lambda x, _, a: x * a, FAR),
    ),
    (
        "target: expected shape (4, 2), got (2, 4); hidden is [s, b, h] and takes [s, b]",
        lambda: ml.linear_token_stats(torch.randn(4, 2, 3), WEIGHT, IDS.expand(2, 4)),
    ),
    (
        "loss_fn: expected a function called as loss_fn(logprobs, entropy or None, 1 per-token "
        "tensors), got one that takes (x, a)",
        lambda: ml.linear_policy_loss(HIDDEN, WEIGHT, IDS, lambda x, a: x * a, IDS.float()),
    ),
    (
        "fn: expected a function called as fn(logits), got one that takes (z, temperature)",
        lambda: ml.linear_map(HIDDEN, WEIGHT, lambda z, temperature: z.logsumexp(-1)),
    ),
    (
        "lengths: expected device cpu, got meta",
        lambda: ml.context_parallel_shift(
            torch.zeros(1, 4), lengths=torch.zeros(1, dtype=torch.int64, device="meta")
        ),
    ),
    (
        "temperature: expected device cpu, got meta",
        lambda: ml.vocab_parallel_logprobs(LOGITS, IDS, temperature=FAR),
    ),
]


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=[text[:40] for text, _ in REFUSED])
def test_a_mistake_is_refused_with_its_message(message, call):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value).startswith(message), caught.value
