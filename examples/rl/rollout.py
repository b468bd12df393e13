"""Rollout by Hugging Face `transformers`, on rank 0: it shares no code with the trained model.

It samples the answers, says what log-probability it gave each token, and is the oracle that the
self-check compares Megatron with.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .config import ModelSection, RolloutSection, SetupError, llama_config, locate_weights


@dataclass
class Sample:
    """One answer: `tokens[prompt_length:]` was sampled, with these log-probabilities."""

    tokens: list[int]
    prompt_length: int
    logprobs: list[float]
    group: int
    text: str = ""
    reward: float = 0.0
    kept: list[list[int] | None] | None = None  # ids that the filter kept, None: not recorded
    hidden: Tensor | None = None  # [answer, h] what the engine's head multiplied, on request
    advantage: float = 0.0


class RolloutEngine:
    name = "transformers"

    def __init__(self, model: Any, tokenizer: Any) -> None:
        from transformers import GenerationConfig, __version__

        self.model, self.tokenizer, self.version = model.eval(), tokenizer, __version__
        # Not the model's own penalties and bans, of which the trainer knows nothing.
        self.model.generation_config = GenerationConfig()

    @classmethod
    def load(cls, section: ModelSection, *, seed: int) -> RolloutEngine:
        """Loads weights and tokenizer; raises SetupError where a package or file is missing."""
        llama, dtype = llama_config(section), getattr(torch, section.dtype)
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers import logging as hf_logging

        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
        if section.source == "random":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(llama, dtype=dtype)
            return cls(model, LetterTokenizer())
        folder, kwargs = locate_weights(section.source)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **kwargs)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **kwargs)
        except (ImportError, OSError, ValueError) as error:
            raise SetupError(f"model {section.source!r} does not load: {error}") from None
        renew_rotary_buffers(model)
        return cls(model, ChatTokenizer(tokenizer))

    def sync(self) -> None:
        """Nothing: the weight bridge writes into `model` itself."""

    def sleep(self) -> None:
        """Nothing: no memory is kept for answers. There are none until the next `sync`."""

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], *, group_size: int, seed: int, rollout: RolloutSection
    ) -> list[Sample]:
        """`group_size` answers to each prompt, drawn with torch's global generator, whose state a
        checkpoint keeps (`seed` is for engines of their own). All cores are this process's."""
        pad, eos = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        ids, mask = left_pad(prompts, pad, self.model.device)
        threads = torch.get_num_threads()
        torch.set_num_threads(max(threads, cores()))
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=rollout.max_new_tokens,
            do_sample=True,
            temperature=rollout.temperature,
            top_k=0,
            top_p=rollout.top_p,
            min_p=rollout.min_p or None,
            num_return_sequences=group_size,
            pad_token_id=pad,
            eos_token_id=eos,
            return_dict_in_generate=True,
            output_scores=True,  # logits over the temperature, -inf where the filter took them
        )
        torch.set_num_threads(threads)
        answers = out.sequences[:, ids.shape[1] :]
        logprobs = [
            torch.log_softmax(scores.float(), -1).gather(1, chosen[:, None])
            for scores, chosen in zip(out.scores, answers.T, strict=True)
        ]
        samples = []
        for i, (answer, lp) in enumerate(
            zip(answers.tolist(), torch.cat(logprobs, 1).tolist(), strict=True)
        ):
            length = answer.index(eos) + 1 if eos in answer else len(answer)
            prompt = prompts[i // group_size]
            kept = None
            if rollout.replays:
                kept = [s[i].isfinite().nonzero()[:, 0].tolist() for s in out.scores[:length]]
            samples.append(
                Sample(
                    tokens=prompt + answer[:length],
                    prompt_length=len(prompt),
                    logprobs=lp[:length],
                    group=i // group_size,
                    text=self.tokenizer.decode(answer[:length]),
                    kept=kept,
                )
            )
        return samples

    @torch.no_grad()
    def score(self, tokens: Tensor, labels: Tensor, temperature: float) -> Tensor:
        """Log-probability of `labels` [b, s] by one plain forward of `tokens` [b, s]. Causal, so
        that right padding needs no mask."""
        logits = self.model(input_ids=tokens).logits.float() / temperature
        picked = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return picked.masked_fill(labels < 0, 0.0)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def renew_rotary_buffers(model: Any) -> None:
    """Computes the rotary frequencies again, from the model's configuration.

    They are in no checkpoint, and transformers 5 makes models on the meta device first: where it
    was imported inside Megatron's CPU runtime, its initialisation skips these buffers and leaves
    uninitialised memory. The model still talks then, but nonsense; the self-check caught it.
    """
    for module in model.modules():
        if hasattr(module, "inv_freq") and hasattr(module, "config"):
            for name, buffer in type(module)(module.config).named_buffers(recurse=False):
                setattr(module, name, buffer.to(module.inv_freq.device))


def left_pad(prompts: list[list[int]], pad: int, device: Any) -> tuple[Tensor, Tensor]:
    """-> ids and attention mask, both [prompts, longest]."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


# ---- tokenizers ----------------------------------------------------------------------------------


class LetterTokenizer:
    """Token 0 pads, 1 starts, 2 ends; 'a' is 3."""

    pad_token_id, bos_token_id, eos_token_id = 0, 1, 2

    def encode_prompt(self, question: str, shots: list, system: str = "") -> list[int]:
        del shots, system  # this model knows one task
        return [self.bos_token_id, *(3 + ord(letter) - ord("a") for letter in question)]

    def decode(self, ids: list[int]) -> str:
        # Special tokens become "?", so that they count as wrong answers where they stand.
        return "".join(chr(ord("a") + i - 3) if i >= 3 else "?" for i in ids)


class ChatTokenizer:
    """A transformers tokenizer behind the same methods, through the model's own chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_id
        pad = tokenizer.pad_token_id
        self.pad_token_id = tokenizer.eos_token_id if pad is None else pad

    def encode_prompt(self, question: str, shots: list, system: str = "") -> list[int]:
        messages = [{"role": "system", "content": system}] if system else []
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
