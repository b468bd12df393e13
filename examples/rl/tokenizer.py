"""A tokenizer of letters for the tiny model: the few methods that the rollout engine calls."""

from __future__ import annotations


class LetterTokenizer:
    """Token 0 pads, 1 starts, 2 ends; 'a' is 3."""

    pad_token_id, bos_token_id, eos_token_id = 0, 1, 2

    def __init__(self, vocab_size: int) -> None:
        self._letters = vocab_size - 3

    def encode_prompt(self, question: str, shots: list[tuple[str, str]]) -> list[int]:
        del shots  # this model knows one task
        return [self.bos_token_id, *(3 + ord(letter) - ord("a") for letter in question)]

    def decode(self, ids: list[int]) -> str:
        # Special tokens become "?", so that they count as wrong answers where they stand.
        return "".join(chr(ord("a") + i - 3) if i >= 3 else "?" for i in ids)


class ChatTokenizer:
    """A transformers tokenizer behind the same methods, through the model's own chat template."""

    def __init__(self, tokenizer: object) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_id
        pad = tokenizer.pad_token_id
        self.pad_token_id = tokenizer.eos_token_id if pad is None else pad

    def encode_prompt(self, question: str, shots: list[tuple[str, str]]) -> list[int]:
        messages = []
        for asked, answer in shots:
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": question})
        text = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
