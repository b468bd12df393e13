"""Every message that the package can raise or log is findable in the documentation."""

from __future__ import annotations

import pytest

from tests.helpers.messages import PAGE, ROOT, Message, area, messages, page

# Messages that name what they take explain themselves; so do the lines of command-line tools.
SAY_IT = ("Diagnostics and tools", "Megatron on a CPU")
OTHERS = [m for m in messages() if "expected" not in m.text and area(m.where) not in SAY_IT]


def test_the_page_of_all_messages_is_the_one_of_this_source():
    assert PAGE.read_text() == page(), "python -m tests.helpers.messages writes it"


def test_what_is_collected():
    """A ValueError in f-strings, one of two parts, a log line and a device-side assert."""
    texts = {m.text: m.kind for m in messages()}
    assert len(texts) > 200
    assert texts["k: expected an int from 1 to vocab_size MOST, got K"] == "ValueError"
    assert texts["the ranks of the TP group make different calls; ..."] == "ValueError"
    assert texts["not fused, the logits are computed whole: ..."] == "log"
    assert texts["kept_ids: an id twice in one row"] == "device-side assert"


@pytest.mark.parametrize("message", OTHERS, ids=lambda m: m.text[:40])
def test_a_message_that_does_not_say_its_cure_is_explained(message: Message):
    explained = " ".join((ROOT / "docs" / "troubleshooting.md").read_text().split())
    assert any(words in explained for words in message.words()), message.words()
