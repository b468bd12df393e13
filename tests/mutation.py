"""Mutation run: small changes to the source, each of which some test must notice.

    python -m tests.mutation --sample 20 --seed 0          # mutants a module
    python -m tests.mutation --only losses --sample 0      # all of one module

Works in a copy of the repository. A mutant is one comparison, operator, constant, condition or
keyword changed; it survives if the tests listed for its module pass. What survived and why is in
tests/mutants.md.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Module (or package): what is run against its mutants, the quickest first.
TESTS = {
    "collectives.py": ["tests/test_collectives.py"],
    "consistency.py": ["tests/test_consistency.py"],
    "losses.py": ["tests/test_losses.py"],
    "context_parallel": ["tests/context_parallel"],
    "fused/loss_function.py": ["tests/fused/test_loss_function.py"],
    "fused": ["tests/fused"],
    "logits": ["tests/logits"],
}

_OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
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
        # Annotations, defaults of signatures and messages are not behaviour.
        if isinstance(node, (ast.arg, ast.Raise, ast.JoinedStr)):
            skipped |= {id(child) for child in ast.walk(node)}
        if isinstance(node, ast.AnnAssign):
            skipped |= {id(child) for child in ast.walk(node.annotation)}
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            skipped |= {id(child) for child in ast.walk(node.returns)}
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
        elif isinstance(node, (ast.If, ast.IfExp)):
            yield node, "condition"


def mutated(source: str, number: int) -> tuple[str, int, str]:
    """(the source with its n-th site changed, the line, what it became)."""
    tree = ast.parse(source)
    node, kind = list(sites(tree))[number]
    assert isinstance(node, (ast.expr, ast.stmt))
    line = node.lineno
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
    return ast.unparse(tree), line, f"{kind}: {ast.unparse(found)[:80]}"


def tests_of(path: str) -> list[str]:
    return next(tests for prefix, tests in TESTS.items() if path.startswith(prefix))


def main() -> int:
    """Prints a line a mutant, and the counts; exit status 1 where one survived."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=20, help="mutants a module; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="modules whose path starts so")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a mutant")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    args = parser.parse_args()
    chosen = random.Random(args.seed)
    started, counts = time.monotonic(), {"killed": 0, "survived": 0, "timed out": 0}
    with tempfile.TemporaryDirectory() as directory:
        copy_root = Path(directory, "repository")
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT, copy_root, ignore=ignored)
        package = copy_root / "mcore_logprobs"
        files = sorted({f for prefix in TESTS for f in _files(package, prefix)})
        wanted = [f for f in files if str(f.relative_to(package)).startswith(args.only)]
        mutants = []
        for file in wanted:
            numbers = list(range(len(list(sites(ast.parse(file.read_text()))))))
            chosen.shuffle(numbers)
            mutants += [(file, n) for n in numbers[: args.sample or None]]
        chosen.shuffle(mutants)
        print(f"{len(mutants)} mutants of {len(wanted)} modules", flush=True)
        for file, number in mutants:
            if time.monotonic() - started > 60 * args.minutes:
                break
            path = str(file.relative_to(package))
            source = file.read_text()
            text, line, change = mutated(source, number)
            file.write_text(text)
            try:
                verdict = _verdict(copy_root, tests_of(path), args.timeout)
            finally:
                file.write_text(source)
            counts[verdict] += 1
            print(f"{verdict:9} {path}:{line} {change}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(counts["survived"] > 0)


def _files(package: Path, prefix: str) -> list[Path]:
    where = package / prefix
    return [where] if where.is_file() else [f for f in where.rglob("*.py") if f.stem != "__init__"]


def _verdict(root: Path, tests: list[str], timeout: float) -> str:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", *tests]
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return "timed out"
    return "survived" if done.returncode == 0 else "killed"


if __name__ == "__main__":
    sys.exit(main())
