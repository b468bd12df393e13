"""Mutation run: small changes to the source, each of which some test must notice.

    python -m tests.mutation ops/topk.py --sample 20                    # and with --seed others
    python -m tests.mutation ops/topk.py:81 --sample 0                  # all of one line
    python -m tests.mutation ops/topk.py --tests tests/test_choices.py  # by these tests alone

Works in a copy of the repository. A mutant is one comparison, operator, constant, condition or
sign changed. A process that has imported torch forks for each mutant and runs the tests up to the
first failure. The figures of past runs are in tests/measured.md.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import multiprocessing.forkserver
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis  # noqa: F401
import megatron.core  # noqa: F401
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
OPERATIONS = "tests/test_operations.py"
ANY_OPERATION = (
    "tests/test_new_source.py tests/test_statistics_edges.py tests/test_soundness.py "
    "tests/test_nan_rows.py tests/test_hidden_edges.py tests/test_costs_logits.py "
    "tests/test_costs_hidden.py tests/test_saved_bytes.py "
    f"{OPERATIONS}"
)
# By the start of a module's path, the longest first: the tests that are run, the quick ones first.
TESTS = {
    "ops/sampl": "tests/test_choices.py tests/test_nan_rows.py tests/test_filters_hidden.py "
    f"{OPERATIONS}",
    "ops/topk_div": f"tests/test_topk_divergence.py tests/test_nan_rows.py {OPERATIONS}",
    "ops/topk": f"tests/test_choices.py tests/test_hidden_edges.py {OPERATIONS}",
    "ops/divergence": "tests/test_new_source.py tests/test_divergences.py "
    f"tests/test_nan_rows.py tests/test_lazy_operations.py {OPERATIONS}",
    "ops/policy": f"tests/test_policy_loss.py {OPERATIONS}",
    "ops/linear_map": f"tests/test_linear_map.py {OPERATIONS}",
    "ops/": ANY_OPERATION,
    "sources/pair": "tests/test_new_source.py tests/test_divergences.py "
    f"tests/test_lazy_operations.py {OPERATIONS}",
    "sources/": ANY_OPERATION,
    "kernels/pairs": f"tests/kernels/test_reference.py tests/test_divergences.py {OPERATIONS}",
    "kernels/inductor/pairs": "tests/kernels/test_inductor_pairs.py",
    "kernels/": "tests/kernels/test_reference.py tests/test_statistics_edges.py "
    "tests/kernels/test_inductor.py tests/kernels/test_inductor_compiler.py "
    f"tests/test_invariant_logits.py {OPERATIONS}",
    "losses": "tests/test_losses.py tests/test_losses_objectives.py tests/test_losses_batches.py "
    "tests/test_losses_frameworks.py tests/test_losses_in_training.py",
    "context_parallel": "tests/context_parallel",
    "": "tests/test_collectives.py tests/test_consistency.py tests/test_consistency_check.py "
    "tests/test_faults.py",
}

_OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def sites(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Nodes that can be changed, and how, in a fixed order."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        # Annotations, messages and invariants are not behaviour.
        if isinstance(node, (ast.arg, ast.Raise, ast.Assert, ast.JoinedStr)):
            skipped |= {id(child) for child in ast.walk(node)}
        if isinstance(node, ast.keyword) and node.arg == "strict":
            skipped.add(id(node.value))
        if isinstance(node, ast.AnnAssign):
            skipped |= {id(child) for child in ast.walk(node.annotation)}
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            skipped |= {id(child) for child in ast.walk(node.returns)}
        # -1 becomes -2, and not 1 as well: where it is a dimension, that mostly is the same one.
        if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
            skipped.add(id(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in _MESSAGES:
            skipped |= {id(child) for child in ast.walk(node)}
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            is_type = node.value.id in ("dict", "list", "tuple", "set", "Callable", "Iterator")
            skipped |= {id(child) for child in ast.walk(node)} if is_type else set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if (isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS) or isinstance(
            node, ast.BoolOp
        ):
            yield node, "operator"
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in _OPERATORS:
            yield node, "comparison"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not, ast.Invert)):
            yield node, "sign"
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            yield node, "constant"
        elif isinstance(node, (ast.If, ast.IfExp)) and ast.unparse(node.test) != "TYPE_CHECKING":
            yield node, "condition"


# Calls that say something or declare it; `frozen=True` keeps out mistakes that nobody makes.
_MESSAGES = ("warn", "warning", "info", "debug", "_assert_async", "dataclass")


def mutated(source: str, number: int) -> tuple[str, str, str]:
    """(the source with its n-th site changed, "line:column", what it became)."""
    tree = ast.parse(source)
    node, kind = list(sites(tree))[number]
    assert isinstance(node, (ast.expr, ast.stmt))
    place = f"{node.lineno}:{node.col_offset + 1}"
    if kind == "operator":
        assert isinstance(node, (ast.BinOp, ast.BoolOp))
        node.op = _OPERATORS[type(node.op)]()
    elif kind == "comparison":
        assert isinstance(node, ast.Compare)
        node.ops[0] = _OPERATORS[type(node.ops[0])]()
    elif kind == "constant":
        assert isinstance(node, ast.Constant)
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    elif kind == "condition":
        assert isinstance(node, (ast.If, ast.IfExp))
        node.test = ast.UnaryOp(ast.Not(), node.test)
    else:
        assert isinstance(node, ast.UnaryOp)
        inner = copy.deepcopy(node.operand)
        for field in list(vars(node)):
            delattr(node, field)
        node.__class__ = ast.IfExp  # type: ignore[assignment]
        vars(node).update(test=ast.Constant(True), body=inner, orelse=ast.Constant(None))
    ast.fix_missing_locations(tree)
    found = node if isinstance(node, ast.expr) else getattr(node, "test", node)
    return ast.unparse(tree), place, f"{kind}: {' '.join(ast.unparse(found).split())[:80]}"


class _FirstFailure:
    """A pytest plugin that remembers which test failed."""

    name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid or "collection"


def _in_child(root: Path, arguments: list[str], answer: Path) -> None:
    os.chdir(root)
    for name in [n for n in sys.modules if n.partition(".")[0] in ("tests", "mcore_logprobs")]:
        del sys.modules[name]
    sys.path[:] = [str(root), *(p for p in sys.path if p not in ("", str(ROOT)))]
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    # The ranks come from the fork server of the process that this one was forked from.
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    with open(answer.with_suffix(".log"), "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    first = _FirstFailure()
    code = pytest.main(["-x", "--no-header", "--assert=plain", *arguments], plugins=[first])
    answer.write_text(first.name or ("" if code == 0 else f"exit status {int(code)}"))


def verdict(root: Path, arguments: list[str], limit: float) -> str:
    """The test that fails, "timed out", or nothing."""
    answer, started = root.parent / "answer", time.monotonic()
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            _in_child(root, arguments, answer)
        finally:
            os._exit(0)
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() - started > limit:
            os.kill(pid, signal.SIGKILL)  # its ranks end with it
            os.waitpid(pid, 0)
            return "timed out"
        time.sleep(0.02)
    return answer.read_text() if answer.exists() else "the process died"


def main() -> int:
    """Prints a line a mutant, and the counts; exit status 1 where one survived."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("module", help="path in the package, or path:line")
    parser.add_argument("--sample", type=int, default=20, help="mutants; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", help="not the module's own")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds a mutant")
    parser.add_argument("-k", help="as pytest's")
    parser.add_argument("--root", type=Path, default=ROOT, help="another copy of the repository")
    args = parser.parse_args()
    path, _, line = args.module.partition(":")
    own = TESTS[max((p for p in TESTS if path.startswith(p)), key=len)].split()
    arguments = (args.tests or own) + (["-k", args.k] if args.k else [])
    torch.set_num_threads(1)
    # What takes seconds to import is there before the forks, in the ranks' fork server too.
    heavy = ["torch", "torch.distributed", "pytest", "hypothesis", "megatron.core"]
    multiprocessing.forkserver.set_forkserver_preload(heavy)
    multiprocessing.forkserver.ensure_running()
    gc.freeze()
    counts = Counter[str](killed=0, survived=0)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory, "repository")
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info", "runs")
        shutil.copytree(args.root, root, ignore=ignored)
        file = root / "mcore_logprobs" / path
        source = file.read_text()
        changes = [mutated(source, n) for n in range(len(list(sites(ast.parse(source)))))]
        changes = [c for c in changes if not line or c[1].partition(":")[0] == line]
        random.Random(f"{args.seed} {path}").shuffle(changes)
        failed = verdict(root, arguments, args.limit)
        if failed:
            raise SystemExit(f"without a mutant: {failed}")
        for text, place, change in changes[: args.sample or None]:
            file.write_text(text)
            started = time.monotonic()
            failed = verdict(root, arguments, args.limit)
            counts[kind := "killed" if failed else "survived"] += 1
            took = time.monotonic() - started
            print(f"{kind:9} {path}:{place} {change} [{took:.0f} s, {failed}]", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return int(counts["survived"] > 0)


if __name__ == "__main__":
    sys.exit(main())
