"""How far one call travels in this package:  python -m benchmarks.trace

One warm call, forward and backward, on one CPU process: the package's own functions that it enters,
their files, and how often the file changes on the way. Comprehensions and lambdas are part of the
function that they stand in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mcore_logprobs as ml

PACKAGE = str(Path(ml.__file__).parent)


def calls() -> dict[str, Callable[[], Tensor]]:
    """A call of each operation, whose result is summed and differentiated."""
    generator = torch.Generator().manual_seed(0)
    hidden, teacher = (torch.randn(4, 8, generator=generator) for _ in range(2))
    weight = torch.randn(24, 8, generator=generator).requires_grad_()
    hidden.requires_grad_()
    logits = torch.randn(4, 24, generator=generator).requires_grad_()
    target = torch.arange(4)
    both: dict[str, Any] = {"teacher_hidden": teacher, "teacher_weight": weight.detach()}
    return {
        "vocab_parallel_logprobs": lambda: ml.vocab_parallel_logprobs(logits, target),
        "linear_token_stats": lambda: ml.linear_token_stats(hidden, weight, target).logprobs,
        "linear_policy_loss": lambda: ml.linear_policy_loss(
            hidden, weight, target, lambda logprobs, entropy: -logprobs
        )[0],
        "linear_sampling_logprobs": lambda: ml.linear_sampling_logprobs(
            hidden, weight, target, top_k=12
        ),
        "linear_kl_div": lambda: ml.linear_kl_div(hidden, weight, **both),
    }


def traced(call: Callable[[], Tensor]) -> tuple[int, int, int]:
    """(functions, files, changes of the file) of a call and its backward."""
    entered: set[tuple[str, str]] = set()
    files: list[str] = []

    def seen(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        if not files or files[-1] != code.co_filename:
            files.append(code.co_filename)
        if not code.co_name.startswith("<"):
            entered.add((code.co_filename, f"{code.co_firstlineno} {code.co_name}"))

    sys.setprofile(seen)
    try:
        call().sum().backward()
    finally:
        sys.setprofile(None)
    return len(entered), len(set(files)), len(files) - 1


def main() -> None:
    print("| call | functions | files | changes |\n|---|---|---|---|")
    for name, call in calls().items():
        for _ in range(2):
            call().sum().backward()
        functions, files, changes = traced(call)
        print(f"| `{name}` | {functions} | {files} | {changes} |")


if __name__ == "__main__":
    main()
