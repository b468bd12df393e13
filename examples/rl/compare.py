"""`--compare`: one step's gradients by three ways through the head, on the same answers."""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from .batch import Batch
from .layout import Layout
from .policy import Policy

WAYS = {
    "logits": "logits held, then the statistics of each token",
    "fused": "hidden states to statistics; logits computed twice, in chunks",
    "linear": "loss formed in the head; logits of answers only, once, in chunks",
}


def compare(policy: Policy, batch: Batch, grad_norm, console: Console) -> list[dict]:
    """Loss, gradient norm, time and memory of each way. Collective; prints on rank 0."""
    rows = []
    for way in WAYS:
        policy.accumulate_gradients(batch, way=way)  # warm: allocator, compiled code
        policy.model.zero_grad_buffer()
        meter = PeakMemory(policy.layout)
        started = time.perf_counter()
        report = policy.accumulate_gradients(batch, way=way)
        seconds = time.perf_counter() - started
        rows.append(
            {
                "way": way,
                "loss": report["loss"],
                "grad_norm": grad_norm(),
                "seconds": seconds,
                "peak_mib": meter.added_mib(),
            }
        )
    if policy.layout.is_main:
        console.print(_table(rows, policy, batch))
    return rows


def _table(rows: list[dict], policy: Policy, batch: Batch) -> Table:
    tokens = policy.config.grpo.micro_batch * batch.tokens.shape[1] // policy.layout.cp
    size = tokens * policy.padded_vocab // policy.layout.tp * 4 / 2**20
    table = Table(
        title=f"one update, by the way through the head\n"
        f"(a rank's float32 logits of a micro-batch: {size:.1f} MiB)",
        title_justify="left",
    )
    for name in ("way", "", "loss", "gradient norm", "peak memory", "time"):
        table.add_column(name, justify="left" if name in ("way", "") else "right")
    for r in rows:
        table.add_row(
            r["way"],
            WAYS[r["way"]],
            f"{r['loss']:+.7f}",
            f"{r['grad_norm']:.6f}",
            f"+{r['peak_mib']:.1f} MiB",
            f"{r['seconds']:.2f} s",
        )
    return table


class PeakMemory:
    """The peak since this object was made, over what was held then; the largest of all ranks.

    On CPU it is resident memory, whose high-water mark Linux resets on request; where that is not
    allowed, the figure is NaN rather than something else.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.cuda = layout.device.type == "cuda"
        dist.barrier()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            return
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # give freed pages back, so that they count again
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self.before = _status("VmRSS")
        except OSError:
            self.before = float("nan")

    def added_mib(self) -> float:
        if self.cuda:
            peak = float(torch.cuda.max_memory_allocated() - self.before)
        elif self.before == self.before:
            peak = _status("VmHWM") - self.before
        else:
            peak = self.before
        value = torch.tensor(peak / 2**20, device=self.layout.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value.item()


def _status(key: str) -> float:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return float(line.split()[1]) * 1024
    raise OSError(f"no {key} in /proc/self/status")
