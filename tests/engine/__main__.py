"""python -m tests.engine OPERATION SOURCE SETTING=VALUE ..."""

from __future__ import annotations

import sys
from collections.abc import Sequence

if "device=cuda" in sys.argv:
    import tests.gpu.simulated  # noqa: F401  (before torch)

from tests.engine.cases import Case, allowed, axes_of, parse
from tests.engine.run import failures


def main(words: Sequence[str]) -> int:
    """Run one case; where it fails, go on with fewer settings for as long as it does."""
    case = parse(words)
    found = failures([case])
    if not found:
        print("passed")
        return 0
    print(found[0])
    for name, values in axes_of(case.operation, case.source).items():
        simpler = Case(case.op, case.setting | {name: values[0]}, case.seed)
        if allowed(case.operation, simpler.setting) and failures([simpler]):
            case = simpler
    print("shrunk to:", *failures([case]), sep="\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
