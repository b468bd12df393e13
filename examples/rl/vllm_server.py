"""vLLM in a process of its own: commands over a pipe, an answer or a beat for each bit of work.

    python vllm_server.py FD        (started by vllm_engine.py; FD is the pipe's end)

vLLM sets up torch.distributed, threads and signal handlers as it likes, so that it shares no
process with Megatron, and no environment either where versions do not allow it: this file imports
nothing of the example. It starts without weights (`load_format="dummy"`); they come over the pipe,
before the first rollout as after every update.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any


class Server:
    def __init__(self, conn: Connection) -> None:
        self.conn, self._beat_at = conn, 0.0
        self.hidden: dict[str, list[Any]] = {}  # by request, where it is recorded

    def start(self, options: dict[str, Any]) -> str:
        """-> vLLM's version."""
        from vllm import LLM, __version__

        self.sleeps, self.asleep = options.get("enable_sleep_mode", False), False
        self.llm = LLM(**options)
        self.runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        if options.get("enforce_eager"):
            # On a busy CPU a scheduler step with many prompts takes minutes; a layer does not.
            for layer in self.runner.model.model.layers:
                layer.register_forward_hook(lambda *_: self.beat("layer"))
        return __version__

    def beat(self, what: str) -> None:
        """Says that work goes on, once a second at most."""
        now = time.monotonic()
        if now - self._beat_at >= 1.0:
            self._beat_at = now
            self.conn.send(("beat", what))

    def weights(self, named: list[tuple[str, tuple[int, ...], str]]) -> None:
        """Takes tensors from the pipe, in the order named, into vLLM's reload API."""
        import torch

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name, shape, dtype in named:
                data = bytearray(self.conn.recv_bytes())
                yield name, torch.frombuffer(data, dtype=getattr(torch, dtype)).view(shape)
                self.beat(name)

        if self.asleep:
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors()})
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
        self.llm.reset_prefix_cache()  # its keys and values are the old weights'

    def record_hidden(self) -> None:
        """From now on `generate` returns what the head multiplied for each token, as float32."""
        runner = self.runner
        if not hasattr(runner, "input_batch"):
            raise RuntimeError(
                "expected vLLM's first model runner, which names the requests of its batch: set "
                "VLLM_USE_V2_MODEL_RUNNER=0"
            )
        compute_logits = runner.model.compute_logits

        def recording(hidden: Any, *args: Any, **kwargs: Any) -> Any:
            for name, row in zip(runner.input_batch.req_ids, hidden, strict=True):
                # vLLM appends a suffix of its own to a request's name.
                self.hidden.setdefault(name.split("-")[0], []).append(row.float().cpu())
            return compute_logits(hidden, *args, **kwargs)

        runner.model.compute_logits = recording

    def generate(
        self,
        prompts: list[list[int]],
        group_size: int,
        seed: int,
        max_kept: int,
        vocab_size: int,
        sampling: dict,
    ) -> list[dict[str, Any]]:
        """Answers in the order of prompts, group after group; each with its tokens' log-probability
        and, with max_kept, the ids that the filters kept (None where there may be more than those
        reported)."""
        from vllm import SamplingParams

        if self.asleep:
            raise RuntimeError("expected weights before the next answers: the engine sleeps")
        engine = self.llm.llm_engine
        self.hidden.clear()
        for i, prompt in enumerate(prompts):
            for j in range(group_size):
                number = i * group_size + j
                params = SamplingParams(
                    seed=seed + number, logprobs=max_kept, detokenize=False, **sampling
                )
                engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        answers: list[dict[str, Any]] = [{}] * (len(prompts) * group_size)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    answer = self.answer(output.outputs[0], max_kept, vocab_size)
                    rows = self.hidden.get(output.request_id, [])[: len(answer["tokens"])]
                    answer["hidden"] = [row.tolist() for row in rows]
                    answers[int(output.request_id)] = answer
            self.beat("step")
        return answers

    def sleep(self) -> None:
        """Leaves a GPU's memory to the trainer, until weights come."""
        if self.sleeps and not self.asleep:
            self.llm.sleep(level=2)  # weights and cache
            self.asleep = True

    @staticmethod
    def answer(output: Any, max_kept: int, vocab_size: int) -> dict[str, Any]:
        logprobs, kept = [], []
        for token, entries in zip(output.token_ids, output.logprobs, strict=True):
            logprobs.append(entries[token].logprob)
            finite = [i for i, entry in entries.items() if entry.logprob > -math.inf]
            kept.append(finite if len(finite) < max_kept or max_kept >= vocab_size else None)
        return {"tokens": list(output.token_ids), "logprobs": logprobs, "kept": kept}


def main() -> None:
    # Ctrl-C reaches the whole process group; the trainer decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    conn = Connection(int(sys.argv[1]))
    try:
        server = Server(conn)
        while True:
            command, arguments = conn.recv()
            conn.send(("done", getattr(server, command)(**arguments)))
    except EOFError:  # the trainer is gone
        pass
    except Exception as error:
        traceback.print_exc()
        conn.send(("failed", f"{type(error).__name__}: {error}"))
    finally:
        sys.stderr.flush()
        os._exit(0)  # vLLM's own shutdown waits for threads that have nothing left to do


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules are not those that vLLM means by their names
    main()
