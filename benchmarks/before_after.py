"""What calls cost at another commit and here:  python -m benchmarks.before_after COMMIT [CALL...]

For a rebuilding, whose tests see values and not times. Each tree's own calls run in processes of
their own, in turns, on one CPU thread; the table has the minima of process time over all turns,
forward and backward, so that other work on the machine shows little. A call that either lacks is
left out, and said on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
Times = dict[str, tuple[float, float]]  # seconds of forward and backward, by call


def calls(rows: int, vocab: int) -> tuple[dict[str, Callable[[], Tensor]], tuple[Tensor, ...]]:
    """(every operation once, of given logits and of hidden states; what gets the gradients)."""
    import mcore_logprobs as ml

    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, gradient: bool = True) -> Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_(gradient)

    hidden, weight, logits = normal(rows, 64), normal(vocab, 64), normal(rows, vocab)
    teacher = normal(rows, vocab, gradient=False)
    other: dict[str, Any] = {
        "teacher_hidden": normal(rows, 64, gradient=False),
        "teacher_weight": normal(vocab, 64, gradient=False),
    }
    target = torch.randint(0, vocab, (rows,), generator=generator)
    largest, ids = teacher.log_softmax(-1).topk(min(16, vocab))
    both: dict[str, Callable[..., Tensor]] = {
        "token_stats": lambda f, *x: f(*x, target).logprobs,
        "gather": lambda f, *x: f(*x, ids),
        "topk": lambda f, *x: f(*x, ids.shape[1])[0],
        "sampling_logprobs": lambda f, *x: f(*x, target, top_k=ids.shape[1]),
        "topk_kl_div": lambda f, *x: f(*x, largest, ids),
        "sample": lambda f, *x: f(*x, seed=1)[1],
    }
    found: dict[str, Callable[[], Tensor]] = {}
    for name, ask in both.items():
        for prefix, head in (("vocab_parallel", (logits,)), ("linear", (hidden, weight))):
            function = getattr(ml, f"{prefix}_{name}", None)
            found[f"{prefix}_{name}"] = partial(ask, function, *head)
    for kind in ("forward", "reverse", "jsd"):
        of_logits = partial(ml.vocab_parallel_kl_div, logits, teacher, kind=kind)
        of_hidden = partial(ml.linear_kl_div, hidden, weight, **other, kind=kind)
        found[f"vocab_parallel_kl_div {kind}"] = of_logits
        found[f"linear_kl_div {kind}"] = of_hidden
    found["vocab_parallel_entropy"] = lambda: ml.vocab_parallel_entropy(logits)
    found["vocab_parallel_log_softmax"] = lambda: ml.vocab_parallel_log_softmax(logits)
    found["linear_map"] = lambda: ml.linear_map(hidden, weight, lambda z: z.logsumexp(-1))
    found["linear_policy_loss"] = lambda: ml.linear_policy_loss(
        hidden, weight, target, lambda logprobs, entropy: -logprobs
    )[0]
    return found, (hidden, weight, logits)


def times(rows: int, vocab: int, names: list[str], repeat: int) -> Times:
    """The minima of this process, of the package that it imports."""
    torch.set_num_threads(1)
    found: Times = {}
    known, leaves = calls(rows, vocab)
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"before_after: expected calls of {', '.join(known)}, got {unknown}")
    for name in names or known:
        call = known[name]
        forward, backward = [], [0.0]
        try:
            for _ in range(repeat):
                for leaf in leaves:
                    leaf.grad = None
                start = time.process_time()
                result = call()
                forward.append(time.process_time() - start)
                if result.requires_grad:
                    upstream = torch.linspace(0.5, 1.5, result.numel()).view(result.shape)
                    start = time.process_time()
                    result.backward(upstream)
                    backward.append(time.process_time() - start)
        except (AttributeError, TypeError) as error:  # another API
            print(f"before_after: {name} is left out: {error}", file=sys.stderr)
            continue
        found[name] = min(forward), min(backward[1:], default=0.0)
    return found


def minima(tree: Path, arguments: list[str], before: Times) -> Times:
    """These, and those of one more process that has this tree's package."""
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, "--times", *arguments]
    answer = subprocess.run(command, env=env, cwd=tree, stdout=subprocess.PIPE)
    if answer.returncode:  # it has said why
        raise SystemExit(answer.returncode)
    found = json.loads(answer.stdout.splitlines()[-1])
    old = {name: before.get(name, pair) for name, pair in found.items()}
    return {n: (min(f, old[n][0]), min(b, old[n][1])) for n, (f, b) in found.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.before_after")
    parser.add_argument("--times", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=16000)
    parser.add_argument("--turns", type=int, default=3, help="processes of each tree")
    parser.add_argument("names", nargs="*", metavar="COMMIT [CALL...]")
    given = parser.parse_args(argv)
    if given.times:
        print(json.dumps(times(given.rows, given.vocab, given.names, 5)))
        return
    if not given.names:
        parser.error("expected a commit to compare with")
    commit, *names = given.names
    arguments = ["--rows", str(given.rows), "--vocab", str(given.vocab), *names]
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "tree.tar")
        subprocess.run(
            ["git", "archive", "-o", archive, commit, "mcore_logprobs"], cwd=ROOT, check=True
        )
        subprocess.run(["tar", "xf", archive], cwd=folder, check=True)
        before: Times = {}
        after: Times = {}
        for _ in range(given.turns):
            before = minima(Path(folder), arguments, before)
            after = minima(ROOT, arguments, after)
    print(f"| call | forward, ms at {commit} | here | ratio | backward | here | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name in (name for name in after if name in before):
        cells = [name]
        for old, new in zip(before[name], after[name], strict=True):
            ratio = f"{new / old:.2f}" if old else ""
            cells += [f"{old * 1e3:.1f}", f"{new * 1e3:.1f}", ratio]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
