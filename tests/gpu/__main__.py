"""python -m tests.gpu COUNT [SEED]: random cases of every operation on the simulated GPU."""

from __future__ import annotations

import tests.gpu.simulated  # noqa: F401  # isort: skip  (before torch)

import itertools
import random
import sys

from tests.engine.cases import random_cases
from tests.engine.run import failures
from tests.helpers.sizes import put_in_force
from tests.ops import OPERATIONS


def main(count: int, seed: int) -> int:
    put_in_force()
    cases = [
        case
        for op in OPERATIONS.values()
        for source in op.sources
        for case in itertools.islice(
            random_cases(op, source, random.Random(seed), device="cuda"), count
        )
    ]
    found = failures(cases)
    print(f"seed {seed}: {len(found)} of {len(cases)} cases fail", *found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    words = [int(word) for word in sys.argv[1:]]
    sys.exit(main(words[0], words[1] if len(words) > 1 else random.randrange(2**31)))
