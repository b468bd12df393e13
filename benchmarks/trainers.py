"""Time and peak memory of frameworks' own training code, plain and switched, on this CPU.

    python -m benchmarks.trainers verl [--vocabulary 131072 --hidden 64 --tokens 2048 --rounds 3]
    MCORE_LOGPROBS_PEERS=DIR python -m benchmarks.trainers slime|megatron_rl
    python -m benchmarks.trainers ms_swift

One rank. A step is a batch of four micro-batches of `--tokens` tokens: a log-probability pass with
entropy, then a training step with its optimizer update. The ways take turns, each in a fresh
process; a cell is the least of all steps but each process's first, in which torch.compile works for
minutes once. MiB is the rank's peak resident memory above what it held when the pass began.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence

from tests.trainers.frame import PLAIN, SWITCHED, How, Row, module, run, unavailable


def ways(rows: dict[str, Row]) -> Iterator[tuple[str, Row, How]]:
    """What is measured, in this order, each round."""
    first = next(iter(rows.values()))
    yield "plain", first, PLAIN
    for name, row in rows.items():
        yield f"switched, {name}", row, SWITCHED


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trainers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("framework")
    for name, default in (("vocabulary", 131072), ("hidden", 64), ("tokens", 2048), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(argv)
    tables: dict[str, dict[str, Row]] = module(options.framework).measured(
        options.vocabulary, options.hidden, options.tokens
    )
    for title, rows in tables.items():
        rows = {
            name: dataclasses.replace(row, timeout=3600, settings={**row.settings, "compile": True})
            for name, row in rows.items()
        }
        if why := unavailable(next(iter(rows.values()))):
            print(f"{options.framework}: {why}", file=sys.stderr)
            return 1
        found = measure(rows, options.rounds)
        print(
            f"{options.framework}{title and f' {title}'}: vocabulary {options.vocabulary}, hidden "
            f"{options.hidden}, {options.tokens} tokens a micro-batch, 4 micro-batches, one rank, "
            "float32, CPU"
        )
        show(found)
    return 0


def measure(rows: dict[str, Row], rounds: int) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Way -> phase -> (seconds, MiB) of each step."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for number in range(rounds):
        for way, row, how in ways(rows):
            print(f"round {number + 1}: {way}", file=sys.stderr, flush=True)
            ((trace,),) = run(row, [how])
            for what, steps in trace.measured.items():
                found.setdefault(way, {}).setdefault(what, []).extend(steps[1:])
    return found


def show(found: dict[str, dict[str, list[tuple[float, float]]]]) -> None:
    """Prints what was measured as a table."""
    phases = list(next(iter(found.values())))
    print("| | " + " | ".join(f"{what}, s | MiB" for what in phases) + " |")
    print("|---" * (2 * len(phases) + 1) + "|")
    for way, measured in found.items():
        cells = (
            f"{min(s for s, _ in measured[what]):.3g} | {min(m for _, m in measured[what]):.0f}"
            for what in phases
        )
        print(f"| {way} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
