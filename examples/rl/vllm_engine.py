"""The rollout engine that users run: vLLM, in a process of its own (vllm_server.py).

Rank 0 starts it, sends weights and prompts over a pipe, and waits for beats: vLLM reports layers,
scheduler steps and tensors as they are done, so that a slow engine is waited for. After
`rollout.timeout` seconds without one, or at the process's end, a SetupError is raised on every
rank.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import RolloutSection, RunConfig, SetupError
from .rollout import RolloutEngine, Sample, cores

_SERVER = Path(__file__).with_name("vllm_server.py")
_START_SECONDS = 600  # loading, profiling and, on a GPU, capturing graphs
# This process's place in the job is not the engine's.
_JOB = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "PYTHONPATH", "TORCHELASTIC_", "MASTER_", "ROLE_")


class VllmEngine:
    """`generate`, `sleep` and `sync` as `RolloutEngine` has them.

    The transformers model that the weights came from stays on the CPU: the bridge gathers the
    trained weights in it, and it is the oracle of the self-check.
    """

    name = "vLLM"

    def __init__(self, source: RolloutEngine, config: RunConfig) -> None:
        self.source, self.config, self.log = source, config, config.run_dir / "vllm.log"
        self.tokenizer, self.model = source.tokenizer, source.model
        # On a CPU vLLM packs a linear layer's weight as it loads it, and reloading a tied embedding
        # leaves the packed head as it was: there the head is a tensor of its own.
        self.untie = config.device == "cpu" and source.model.config.tie_word_embeddings
        self.timeout = config.rollout.timeout
        self.max_kept = min(config.rollout.max_kept, source.model.config.vocab_size)
        self._folder = tempfile.TemporaryDirectory(prefix="rollout-")
        self._start(config.rollout.python or sys.executable)
        self.sync()

    def _start(self, python: str) -> None:
        r, model = self.config.rollout, self.model.config
        dropped = ("_name_or_path", "quantization_config", "transformers_version", "architectures")
        plain = {k: v for k, v in model.to_dict().items() if k not in dropped}
        shape = type(model)(**plain, architectures=["LlamaForCausalLM"])
        shape.tie_word_embeddings = model.tie_word_embeddings and not self.untie
        shape.save_pretrained(self._folder.name)  # config.json alone
        options: dict[str, Any] = {
            "model": self._folder.name,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": self.config.model.dtype,
            "max_model_len": min(r.max_model_len, model.max_position_embeddings),
            "logprobs_mode": "processed_logprobs",  # after temperature and filters
            "max_logprobs": self.max_kept,
            "seed": self.config.seed,
        }
        env = {name: value for name, value in os.environ.items() if not name.startswith(_JOB)}
        env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        env.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        if self.config.device == "cpu":
            options["enforce_eager"] = True
            # A prompt in two parts rewinds the request's generator, which a CPU's has no way to do.
            options["enable_chunked_prefill"] = False
            options["block_size"] = 32  # the answers to a question share its prompt in whole blocks
            env["OMP_NUM_THREADS"] = str(cores())
            env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
            env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        else:
            options["enable_sleep_mode"] = True
            options["gpu_memory_utilization"] = r.gpu_memory
        self.conn, theirs = Pipe()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as log:
            try:
                self.process = subprocess.Popen(
                    [python, str(_SERVER), str(theirs.fileno())],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                )
            except OSError as error:
                raise SetupError(f"rollout.python {python!r} does not start: {error}") from None
        theirs.close()
        atexit.register(self.close)
        try:
            self.version = self._call("starting", "start", _START_SECONDS, options=options)
        except SetupError as error:
            if "No module named 'vllm'" in self._log_tail():
                raise SetupError(f"rollout.engine: vLLM is not installed for {python}") from None
            raise error

    def sync(self) -> None:
        """The weights in `model` go to vLLM, by its reload API."""
        tensors = dict(self.model.named_parameters())
        if self.untie:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        named = [
            (name, tuple(t.shape), str(t.dtype).removeprefix("torch."))
            for name, t in tensors.items()
        ]
        flat = (t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in tensors.values())
        data = (t.numpy().data for t in flat)
        self._call("reloading weights", "weights", payload=data, named=named)

    def generate(
        self, prompts: list[list[int]], *, group_size: int, seed: int, rollout: RolloutSection
    ) -> list[Sample]:
        """As `RolloutEngine.generate`; every answer has a seed of its own, so that what a step
        samples depends on the step and not on what ran before."""
        kept = self.max_kept if rollout.replays else 0
        answers = self._call(
            "rolling out",
            "generate",
            prompts=prompts,
            group_size=group_size,
            seed=seed,
            max_kept=kept,
            vocab_size=self.model.config.vocab_size,
            sampling={
                "temperature": rollout.temperature,
                "top_p": rollout.top_p,
                "min_p": rollout.min_p,
                "max_tokens": rollout.max_new_tokens,
                "stop_token_ids": [self.tokenizer.eos_token_id],
            },
        )
        return [
            Sample(
                tokens=prompts[i // group_size] + answer["tokens"],
                prompt_length=len(prompts[i // group_size]),
                logprobs=answer["logprobs"],
                kept=answer["kept"] if kept else None,
                group=i // group_size,
                text=self.tokenizer.decode(answer["tokens"]),
                hidden=torch.tensor(answer["hidden"]) if answer["hidden"] else None,
            )
            for i, answer in enumerate(answers)
        ]

    def sleep(self) -> None:
        """Until the next `sync` a GPU's memory is the trainer's."""
        self._call("leaving its memory", "sleep")

    def record_hidden(self) -> None:
        """Samples carry the hidden states of their tokens from now on."""
        self._call("starting to record hidden states", "record_hidden")

    def score(self, tokens: Tensor, labels: Tensor, temperature: float) -> Tensor:
        """The oracle of the self-check: transformers', on the device where `tokens` are."""
        self.model.to(tokens.device)
        try:
            return self.source.score(tokens, labels, temperature)
        finally:
            self.model.to("cpu")

    def close(self) -> None:
        self.conn.close()
        self.process.kill()
        self.process.wait()
        self._folder.cleanup()

    def _call(
        self,
        doing: str,
        command: str,
        limit: float = 0.0,
        payload: Iterable[Any] = (),
        **arguments: Any,
    ) -> Any:
        """The server's answer to a command; beats start the clock again."""

        def send() -> None:
            with suppress(OSError):  # the engine is gone; whoever waits for its answer says so
                self.conn.send((command, arguments))
                for data in payload:
                    self.conn.send_bytes(data)

        # In a thread: a pipe that nobody reads blocks its writer for ever.
        threading.Thread(target=send, daemon=True).start()
        limit, heard = limit or self.timeout, time.monotonic()
        while time.monotonic() - heard <= limit:
            try:
                if self.conn.poll(0.5):
                    kind, value = self.conn.recv()
                    if kind == "done":
                        return value
                    if kind == "failed":
                        raise SetupError(f"vLLM failed while {doing}: {value} (log: {self.log})")
                    heard = time.monotonic()
                elif self.process.poll() is not None:
                    raise EOFError
            except (EOFError, OSError):
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(10)
                self.process.kill()
                code = self.process.wait()
                how = f"signal {-code}" if code < 0 else f"exit status {code}"
                ended = f"vLLM's process ended ({how}) while {doing} (log: {self.log})"
                raise SetupError(ended + self._log_tail()) from None
        self.process.kill()
        raise SetupError(
            f"vLLM was silent for {limit:.0f} s while {doing}, not one layer or tensor done: "
            f"killed (rollout.timeout; log: {self.log}){self._log_tail()}"
        )

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        return "".join(f"\n  {line}" for line in lines[-4:])
