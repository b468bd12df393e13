"""`python -m mcore_logprobs doctor|audit`. torch is imported once the arguments have been read."""

from __future__ import annotations

import argparse
import ast
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict

from mcore_logprobs.commands import Parser, comma_separated, positive, why_not_drawn
from mcore_logprobs.debug.oracle import BOUND, KINDS

EXAMPLE = "python -m mcore_logprobs audit mcore_logprobs:vocab_parallel_logprobs --tp 1,2"


def doctor(argv: Sequence[str] | None = None) -> int:
    """Print the report; 0 if the self-test is within its bounds and a batch has no mistake, else 1.

    A file that cannot be read is one line on stderr, and status 2.

    With `mismatch FILE`, explain a run's own log-probabilities instead.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["mismatch"]:
        return _mismatch(arguments[1:])
    parser = Parser(
        "doctor",
        description="What is installed, what will be used and why, and whether it computes what it "
        "should.",
        epilog="doctor mismatch FILE explains train against rollout log-probabilities of a dump",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="also try what invariant_segments promises: compiles kernels, a minute or more",
    )
    parser.add_argument(
        "--batch",
        metavar="FILE",
        help="also check a training batch: a .pt or .npz file with input_ids and labels [b, s], "
        "and if you like loss_mask [b, s], cu_seqlens [n + 1], vocab_size and ignore_index",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse(arguments)
    from mcore_logprobs.debug.doctor import as_text, report

    try:
        found = report(full=args.full, batch=args.batch)
    except (OSError, ValueError) as error:
        return _refused("doctor", error)
    print(_as_json(found) if args.json else as_text(found))
    return 0 if found["ok"] else 1


def _mismatch(argv: Sequence[str]) -> int:
    parser = Parser(
        "doctor mismatch",
        description="Splits train minus rollout log-probabilities of a dump into causes, each with "
        "its size and the setting that cures it. docs/mismatch.md describes the file.",
    )
    parser.add_argument("file", help="a .npz or .pt dump: explain_mismatch's arguments by name")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--plot", metavar="FILE", help="write a figure too (needs matplotlib)")
    args = parser.parse(argv)
    if args.plot is not None and (why := why_not_drawn(args.plot)):
        return _refused("doctor mismatch", f"--plot: {why}")
    from mcore_logprobs.debug.mismatch import explain_mismatch, load_mismatch_dump

    try:
        result = explain_mismatch(**load_mismatch_dump(args.file))
    except (OSError, ValueError) as error:
        return _refused("doctor mismatch", error)
    print(_as_json(result.to_dict()) if args.json else result.text())
    if args.plot:
        try:
            result.figure().savefig(args.plot, dpi=120)
        except (OSError, ValueError) as error:  # a folder of that name, a format that is unknown
            return _refused("doctor mismatch", f"--plot: {error}")
    return 0


def _refused(command: str, why: Exception | str) -> int:
    """The status of a command whose file cannot be used, told in one line."""
    if isinstance(why, OSError) and why.filename:
        why = f"{why.filename}: expected a file that can be read, got {why.strerror}"
    print(f"{command}: error: {' '.join(str(why).split())}", file=sys.stderr)
    return 2


def audit(argv: Sequence[str] | None = None) -> int:
    """Print the report; 0 if every tensor is right, 1 if one is not, 130 after Ctrl-C."""
    parser = Parser(
        "audit",
        description="Compare a vocab-parallel function with float64: values and gradients, on "
        "every shard.",
        epilog=f"for example: {EXAMPLE}",
    )
    add = parser.add_argument
    add("function", nargs="?", help="MODULE:FUNCTION or FILE.py:FUNCTION")
    add("--kind", choices=list(KINDS), default="logprobs", help="what the function computes")
    add("--tp", type=_sizes, default="1,2,4", help="tensor-parallel sizes")
    add(
        "--call",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a further argument",
    )
    add("--vocab", type=positive, default=48, help="columns in all")
    add("--bound", type=float, default=BOUND, help="largest relative error")
    add("--timeout", type=float, default=300.0, help="seconds for all of it")
    add("--json", action="store_true", help="print the report as JSON")
    options = vars(parser.parse(argv))
    as_json, function, call = (options.pop(name) for name in ("json", "function", "call"))
    if function is None:
        parser.error(f"expected MODULE:FUNCTION or FILE.py:FUNCTION, for example:\n  {EXAMPLE}")
    try:
        from mcore_logprobs.debug.audit import audit

        report = audit(function, call=dict(call), **options)
    except (ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    if as_json:
        print(_as_json(asdict(report) | {"ok": report.ok}))
    else:
        print(report)
    return 0 if report.ok else 1


def _as_json(found: object) -> str:
    """JSON, which has neither infinity nor NaN: null instead."""

    def plain(x: object) -> object:
        if isinstance(x, dict):
            return {name: plain(value) for name, value in x.items()}
        if isinstance(x, (list, tuple)):
            return [plain(value) for value in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(plain(found), indent=2, allow_nan=False)


def _sizes(text: str) -> list[int]:
    try:
        return comma_separated(int)(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected numbers such as 1,2,4, got {text!r}") from error


def _pair(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
