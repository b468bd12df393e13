"""The rollout engine that users run: vLLM, in a process of its own (vllm_server.py).

Rank 0 starts it, sends weights and prompts over a pipe, and waits for beats: vLLM reports as layers
and steps of its scheduler are done and tensors are taken, so that a slow engine on a busy machine
is waited for. Without any progress for `rollout.timeout` seconds, those not counted in which it
waited for a core, or at the process's end, an `EngineError` is raised on every rank. Nothing goes
through a file but vLLM's log.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import EngineError, RunConfig, SetupError
from .rollout import RolloutEngine, Sample, cores

_SERVER = Path(__file__).with_name("vllm_server.py")
_START_SECONDS = 600  # loading, profiling and, on a GPU, capturing graphs


class VllmEngine:
    """`generate` and `sync` as `RolloutEngine` has them.

    The transformers model that the weights came from stays on the CPU: the bridge gathers the
    trained weights in it, and it is the oracle of the self-check.
    """

    def __init__(self, source: RolloutEngine, config: RunConfig, log: Path) -> None:
        self.source, self.config, self.log = source, config, log
        self.tokenizer, self.model = source.tokenizer, source.model
        # On a CPU vLLM packs a linear layer's weight as it loads it, and reloading a tied embedding
        # leaves the packed head as it was: there the head is a tensor of its own.
        self.untie = config.device == "cpu" and source.model.config.tie_word_embeddings
        self.timeout = config.rollout.timeout
        self.max_kept = min(config.rollout.max_kept, source.model.config.vocab_size)
        self._folder = tempfile.TemporaryDirectory(prefix="rollout-")
        self._start()
        self.sync()

    def _start(self) -> None:
        r, model = self.config.rollout, self.model.config
        shape = type(model)(**{**_plain(model), "architectures": ["LlamaForCausalLM"]})
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
        env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        env.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        # This process's place in the job is not the engine's.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            env.pop(name, None)
        for name in [n for n in env if n.startswith(("TORCHELASTIC_", "MASTER_", "ROLE_"))]:
            env.pop(name)
        env.pop("PYTHONPATH", None)
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
        ours, theirs = Pipe()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as log:
            try:
                self.process = subprocess.Popen(
                    [r.python or sys.executable, str(_SERVER), str(theirs.fileno())],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                )
            except OSError as error:
                raise SetupError(f"rollout.python {r.python!r} does not start: {error}") from None
        theirs.close()
        self.conn = ours
        atexit.register(self.close)
        try:
            self.conn.send(options)
            self._answer("starting", _START_SECONDS)
        except (EngineError, OSError) as error:
            if "No module named 'vllm'" in self._log_tail():
                raise SetupError(
                    "rollout.engine: vllm, but vLLM is not installed for "
                    f"{r.python or sys.executable}; bash examples/run_rl_step.sh installs it, or "
                    "set rollout.engine: transformers"
                ) from None
            raise SetupError(str(error)) from None

    def sync(self) -> None:
        """The weights in `model` go to vLLM, by its reload API."""
        tensors = dict(self.model.named_parameters())
        if self.untie:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        named = [
            (name, tuple(t.shape), str(t.dtype).removeprefix("torch."))
            for name, t in tensors.items()
        ]

        def send() -> None:
            try:
                for tensor in tensors.values():
                    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                    self.conn.send_bytes(flat.numpy().data)
            except OSError:  # the engine is gone; whoever waits for its answer says so
                pass

        self._ask("weights", named=named, sending="the weights")
        # In a thread: a pipe that nobody reads blocks its writer for ever.
        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        self._answer("reloading weights")
        sender.join()

    def generate(
        self,
        prompts: list[list[int]],
        *,
        group_size: int,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
    ) -> list[Sample]:
        """As `RolloutEngine.generate`; every answer has a seed of its own, so that what a step
        samples depends on the step and not on what ran before."""
        eos = self.tokenizer.eos_token_id
        sampling = {
            "temperature": temperature,
            "top_p": top_p,
            "max_tokens": max_new_tokens,
            "stop_token_ids": [eos],
        }
        kept = self.max_kept if top_p < 1.0 else 0
        self._ask(
            "generate",
            prompts=prompts,
            group_size=group_size,
            seed=seed,
            max_kept=kept,
            sampling=sampling,
            sending="the prompts",
        )
        answers = self._answer("rolling out")
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

    def record_hidden(self) -> None:
        """Samples carry the hidden states of their tokens from now on."""
        self._ask("record_hidden", sending="a request to record hidden states")
        self._answer("starting to record hidden states")

    def score(self, tokens: Tensor, labels: Tensor, temperature: float) -> Tensor:
        """The oracle of the self-check: transformers', on the device where `tokens` are."""
        self.source.device = tokens.device
        self.model.to(tokens.device)
        try:
            return self.source.score(tokens, labels, temperature)
        finally:
            self.model.to("cpu")

    def close(self) -> None:
        self.conn.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._folder.cleanup()

    def _ask(self, command: str, *, sending: str, **kwargs: Any) -> None:
        try:
            self.conn.send((command, kwargs))
        except OSError:
            raise self._dead(f"taking {sending}") from None

    def _answer(self, doing: str, silence: float | None = None) -> Any:
        """The engine's next answer; beats start the clock again."""
        limit = self.timeout if silence is None else silence
        heard, waited = time.monotonic(), waiting_for_a_core(self.process.pid)
        while True:
            try:
                if self.conn.poll(0.5):
                    kind, value = self.conn.recv()
                    if kind == "done":
                        return value
                    if kind == "failed":
                        self.process.wait()
                        raise EngineError(f"vLLM failed while {doing}: {value} (log: {self.log})")
                    heard, waited = time.monotonic(), waiting_for_a_core(self.process.pid)
                    continue
            except (EOFError, OSError):
                raise self._dead(doing) from None
            if self.process.poll() is not None and not self.conn.poll(0):
                raise self._dead(doing)
            silent = time.monotonic() - heard
            if silent > limit:
                now = waiting_for_a_core(self.process.pid)
                silent -= max((now[t] - waited.get(t, 0.0) for t in now), default=0.0)
            if silent > limit:
                self.process.kill()
                raise EngineError(
                    f"vLLM was silent for {limit:.0f} s while {doing}, not one layer or tensor "
                    f"done: killed (rollout.timeout: {limit:.0f}; log: {self.log})"
                    f"{self._log_tail()}"
                )

    def _dead(self, doing: str) -> EngineError:
        try:
            code = self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        return EngineError(
            f"vLLM's process ended ({how}) while {doing} (log: {self.log}){self._log_tail()}"
        )

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        return "".join(f"\n  {line}" for line in lines[-4:])


def waiting_for_a_core(pid: int) -> dict[str, float]:
    """Seconds that each of the process's threads could have run and had no core, since its start
    (Linux; elsewhere nothing). A process that hangs or is stopped does not wait for one."""
    found = {}
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread may end meanwhile
            found[file.parent.name] = int(file.read_text().split()[1]) / 1e9
    return found


def _plain(model: Any) -> dict[str, Any]:
    """A configuration's fields, without what says where it came from."""
    dropped = ("_name_or_path", "quantization_config", "transformers_version", "architectures")
    return {k: v for k, v in model.to_dict().items() if k not in dropped}
