"""How far one call travels in this package:  python -m benchmarks.trace [CALL]

One warm call, forward and backward, on one CPU process: the package's own functions that it enters,
their files, and how often the file changes on the way. Comprehensions and lambdas are part of the
function that they stand in. With the name of a call: its functions by file, and how often each was
entered.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

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
    return {
        "vocab_parallel_logprobs": lambda: ml.vocab_parallel_logprobs(logits, target),
        "linear_token_stats": lambda: ml.linear_token_stats(hidden, weight, target).logprobs,
        "linear_policy_loss": lambda: ml.linear_policy_loss(
            hidden, weight, target, lambda logprobs, entropy: -logprobs
        )[0],
        "linear_sampling_logprobs": lambda: ml.linear_sampling_logprobs(
            hidden, weight, target, top_k=12
        ),
        "linear_kl_div": lambda: ml.linear_kl_div(
            hidden, weight, teacher_hidden=teacher, teacher_weight=weight.detach()
        ),
    }


def entered_by(call: Callable[[], Tensor]) -> tuple[Counter[tuple[str, str]], int]:
    """(how often each function was entered, by file and name; changes of the file), warm."""
    entered: Counter[tuple[str, str]] = Counter()
    files: list[str] = []

    def seen(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        if code.co_name.startswith("<"):
            return
        if not files or files[-1] != code.co_filename:
            files.append(code.co_filename)
        file = str(Path(code.co_filename).relative_to(PACKAGE))
        entered[file, f"{code.co_name} (line {code.co_firstlineno})"] += 1

    for _ in range(2):
        call().sum().backward()
    sys.setprofile(seen)
    try:
        call().sum().backward()
    finally:
        sys.setprofile(None)
    return entered, len(files) - 1


def traced(call: Callable[[], Tensor]) -> tuple[int, int, int]:
    """(functions, files, changes of the file) of a call and its backward."""
    entered, changes = entered_by(call)
    return len(entered), len({file for file, _ in entered}), changes


def main(names: Sequence[str]) -> None:
    known = calls()
    if not known.keys() >= set(names):
        sys.exit(f"usage: python -m benchmarks.trace [CALL], one of {', '.join(known)}")
    for name in names:
        entered, _ = entered_by(known[name])
        for file in sorted({file for file, _ in entered}):
            own = [f"{what}: {n}" for (where, what), n in entered.items() if where == file]
            print(f"{file}, {len(own)} functions", *own, sep="\n    ")
    if names:
        return
    print("| call | functions | files | changes |\n|---|---|---|---|")
    for name, call in known.items():
        functions, files, changes = traced(call)
        print(f"| `{name}` | {functions} | {files} | {changes} |")


if __name__ == "__main__":
    main(sys.argv[1:])
