"""Mutation run: small changes to the source, each of which some test must notice.

    python -m tests.mutation --only logits/gather --sample 20 --seed 0   # mutants a module
    python -m tests.mutation --only logits/gather --sample 40 --skip 20  # the next 20 of these
    python -m tests.mutation --only losses --sample 0                    # all of one module
    python -m tests.mutation --only logits/gather.py:81 --sample 0       # all of one line
    ... --tests kernels/test_triton_entries.py                           # not its own tests

Works in a copy of the repository. A mutant is one comparison, operator, constant, condition or
sign changed. A process that has imported torch forks for each mutant, and runs the tests that
`tests_of` names up to the first failure: those of one process and then, for all mutants that these
leave alive, those with gloo ranks; first the quick ones and those that have killed others. How long
each takes is kept in .pytest_cache for as long as the tests stay as they are. What survived and why
is in tests/measured.md.
"""

from __future__ import annotations

import argparse
import ast
import atexit
import compileall
import contextlib
import copy
import gc
import hashlib
import json
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis  # noqa: F401
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

PACKAGES = ("collectives.py", "consistency.py", "losses", "context_parallel", "fused", "logits")
# The tests nearest to a module, where it has none of its own name, or more than that.
NEAREST = {
    **dict.fromkeys(
        ("losses/base.py", "losses/one_pass.py", "losses/two_pass.py"),
        "test_losses.py test_losses_in_training.py test_losses_objectives.py "
        "test_losses_frameworks.py",
    ),
    **dict.fromkeys(
        ("losses/batch.py", "losses/corrections.py", "losses/preferences.py"),
        "test_losses.py test_losses_in_training.py test_losses_objectives.py "
        "test_losses_batches.py test_losses_frameworks.py",
    ),
    "consistency.py": "test_consistency.py logits/test_inputs.py",
    "collectives.py": "test_collectives.py test_consistency.py test_faults.py "
    "context_parallel/test_communication.py",
    "context_parallel/layouts.py": "context_parallel",
    "context_parallel/operations.py": "context_parallel",
    "fused/divergence.py": "fused/test_distill.py fused/test_partial_gradients.py",
    "fused/entries.py": "fused/test_linear_ops.py fused/test_sampling.py "
    "fused/test_partial_gradients.py "
    "fused/test_lora.py fused/test_no_sync.py",
    "fused/gather.py": "fused/test_linear_ops.py fused/test_partial_gradients.py",
    "fused/gradients.py": "fused/test_token_stats.py fused/test_partial_gradients.py "
    "fused/test_main_grad.py fused/test_cost.py fused/test_invariance.py fused/test_lora.py",
    "fused/head.py": "fused/test_token_stats.py fused/test_linear_ops.py fused/test_cost.py "
    "fused/test_invariance.py fused/test_lora.py fused/test_native_bf16.py",
    "fused/learnt.py": "fused/test_loss_function.py fused/test_policy_loss.py fused/test_map.py",
    "fused/loss_function.py": "fused/test_loss_function.py fused/test_policy_loss.py",
    "fused/map.py": "fused/test_map.py fused/test_linear_ops.py fused/test_partial_gradients.py",
    "fused/policy_loss.py": "fused/test_policy_loss.py fused/test_policy_loss_cost.py "
    "fused/test_partial_gradients.py fused/test_native_bf16.py fused/test_loss_function.py",
    "fused/sampling.py": "fused/test_sampling.py fused/test_linear_ops.py "
    "fused/test_partial_gradients.py",
    "fused/token_stats.py": "fused/test_token_stats.py fused/test_cost.py "
    "fused/test_partial_gradients.py fused/test_native_bf16.py",
    "fused/tokens.py": "fused/test_token_stats.py fused/test_policy_loss.py fused/test_cost.py",
    "fused/topk.py": "fused/test_linear_ops.py fused/test_partial_gradients.py",
    "logits/all_to_all.py": "logits/test_all_to_all.py test_consistency.py",
    "logits/distill.py": "logits/test_distill.py logits/test_nan_rows.py",
    "logits/gather.py": "logits/test_gather.py logits/test_nan_rows.py logits/test_distill.py "
    "logits/test_temperature.py "
    "fused/test_partial_gradients.py",
    "logits/log_softmax.py": "logits/test_log_softmax.py logits/test_nan_rows.py "
    "logits/test_temperature.py",
    "logits/opening.py": "logits/test_inputs.py logits/test_inplace.py logits/test_temperature.py",
    "logits/rows.py": "logits/test_rows.py logits/test_token_stats.py "
    "logits/test_token_stats_cost.py logits/test_invariance.py logits/test_gather.py",
    "logits/sampling.py": "logits/test_sampling.py logits/test_nan_rows.py",
    "logits/sampling_cut.py": "logits/test_sampling.py logits/test_nan_rows.py",
    "logits/token_stats.py": "logits/test_token_stats.py logits/test_logprobs.py "
    "logits/test_target_rank.py "
    "logits/test_sum_pi_squared.py logits/test_inplace.py logits/test_nan_rows.py",
    "logits/topk_divergence.py": "logits/test_distill.py fused/test_topk_divergence.py",
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


def tests_of(path: str, given: list[str] | None) -> tuple[str, ...]:
    """Files or folders under tests/ for a module, whose path is relative to the package."""
    own = Path("tests", path).with_name(f"test_{Path(path).name}")
    default = str(own.relative_to("tests"))
    chosen = tuple(f"tests/{name}" for name in given or NEAREST.get(path, default).split())
    absent = [name for name in chosen if not (ROOT / name).exists()]
    if absent:
        raise SystemExit(f"{path}: no tests at {', '.join(absent)}; name some in NEAREST")
    return chosen


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
        elif isinstance(node, (ast.If, ast.IfExp)):
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


def _uses_ranks(item: Any) -> bool:
    """Whether a test starts gloo ranks, as far as its number of them or its fixtures say."""
    values = item.callspec.params if hasattr(item, "callspec") else {}
    layout = values.get("layout")
    world = layout[0] if isinstance(layout, tuple) else values.get("world")
    return world != 1 if isinstance(world, int) else "ranks" in item.fixturenames


class _Recorder:
    """A pytest plugin: a stage's tests, the promising first; what each took, which failed."""

    def __init__(self, stage: _Stage) -> None:
        self.stage = stage
        self.seconds: dict[str, float] = {}
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if _uses_ranks(item) == self.stage.with_ranks]
        items.sort(key=lambda item: self.stage.cost(item.nodeid))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid or "collection"


def _run(root: Path, stage: _Stage, tests: tuple[str, ...], answer: Path) -> None:
    """In a forked process: the tests on the copy, the verdict as JSON into `answer`."""
    os.chdir(root)
    for name in [n for n in sys.modules if n.partition(".")[0] in ("tests", "mcore_logprobs")]:
        del sys.modules[name]
    sys.path[:] = [str(root), *(p for p in sys.path if p not in ("", str(ROOT)))]
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    # The ranks come from the fork server of the process that this one was forked from.
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    with open(answer.with_suffix(".log"), "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    recorder = _Recorder(stage)
    arguments = ["-x", "-q", "--no-header", "--assert=plain", "-p", "pytest_timeout"]
    arguments += ["--timeout", "100", *tests]
    code = pytest.main(arguments, plugins=[recorder])
    sound = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    failed = recorder.failed or ("" if code in sound else f"exit status {int(code)}")
    answer.write_text(json.dumps({"failed": failed, "seconds": recorder.seconds}))


@dataclass
class _Stage:
    """The tests of one process, or those with ranks.

    Attributes:
        seconds: what each takes without a mutant, once `baseline` has been called.
        kills: how many mutants each has killed.
    """

    tests: tuple[str, ...]
    with_ranks: bool
    seconds: dict[str, float] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)

    def cost(self, test: str) -> float:
        """Seconds, the fewer the more often the test has killed."""
        return self.seconds.get(test, 0.0) / (1.0 + self.kills[test]) ** 2

    def baseline(self, root: Path, known: dict[str, dict[str, float]]) -> None:
        """Run each file once without a mutant, unless it is known how long its tests take."""
        for test in () if self.seconds else self.tests:
            where = root / test
            files = [where] if where.is_file() else sorted(where.rglob("*.py"))
            content = b"".join(file.read_bytes() for file in files)
            key = f"{test} {self.with_ranks} {hashlib.sha256(content).hexdigest()[:16]}"
            if key not in known:
                failed, _, known[key] = self.run(root, (test,), 900.0)
                if failed:
                    raise SystemExit(f"without a mutant, {failed} fails")
            self.seconds |= known[key]

    def verdict(self, root: Path) -> tuple[str, float]:
        """(the test that failed, "timed out" or ""; seconds) with the mutant that is in place.

        The limit is generous: on a busy machine the same tests may take several times as long.
        """
        if not self.seconds:  # no tests of this kind
            return "", 0.0
        failed, took, _ = self.run(root, self.tests, 4.0 * sum(self.seconds.values()) + 60.0)
        self.kills[failed] += 1
        return failed, took

    def run(
        self, root: Path, tests: tuple[str, ...], timeout: float
    ) -> tuple[str, float, dict[str, float]]:
        """(as `verdict`; what each test took)."""
        answer, started = root.parent / "answer.json", time.monotonic()
        answer.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            try:
                _run(root, self, tests, answer)
            finally:
                os._exit(0)
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() - started > timeout:
                os.kill(pid, signal.SIGKILL)  # its ranks end with it
                os.waitpid(pid, 0)
                return "timed out", timeout, {}
            time.sleep(0.02)
        took = time.monotonic() - started
        if not answer.exists():
            return "the process died", took, {}
        found = json.loads(answer.read_text())
        return found["failed"], took, found["seconds"]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What starts here writes to nowhere: torch's profiler is chatty in the ranks."""
    saved = [os.dup(1), os.dup(2)]
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    yield
    for place, fd in enumerate(saved, 1):
        os.dup2(fd, place)
        os.close(fd)


def _modules(package: Path) -> list[str]:
    found = []
    for prefix in PACKAGES:
        where = package / prefix
        found += [where] if where.is_file() else sorted(where.rglob("*.py"))
    return [str(f.relative_to(package)) for f in found if f.stem != "__init__"]


def main() -> int:
    """Prints a line a mutant, and the counts; exit status 1 where one survived."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=20, help="mutants a module; 0: all")
    parser.add_argument("--skip", type=int, default=0, help="so many of them, run before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", default=[""], nargs="+", help="modules whose path starts so, or path.py:line"
    )
    parser.add_argument("--line", type=int, help="the mutants of this line alone")
    parser.add_argument(
        "--tests",
        nargs="+",
        help="not its own: kernels/test_triton_grad.py",
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # What takes seconds to import is there before the forks, in the ranks' fork server too.
    with contextlib.suppress(ImportError):
        import megatron.core  # noqa: F401
    heavy = ("torch", "torch.distributed", "pytest", "hypothesis", "megatron.core")
    loaded = [name for name in heavy if name in sys.modules]
    multiprocessing.forkserver.set_forkserver_preload(loaded)
    with _quiet():
        multiprocessing.forkserver.ensure_running()
    gc.freeze()  # pytest collects garbage at its end, among what only the parent has
    atexit.register(gc.unfreeze)
    started = time.monotonic()
    counts = Counter[str](killed=0, survived=0)
    sound: set[str] = set()
    cache = ROOT / ".pytest_cache" / "mutation.json"
    known = json.loads(cache.read_text()) if cache.exists() else {}
    with tempfile.TemporaryDirectory() as directory, contextlib.suppress(KeyboardInterrupt):
        root = Path(directory, "repository")
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info", "runs")
        shutil.copytree(ROOT, root, ignore=ignored)
        for folder in ("mcore_logprobs", "tests"):  # a mutant's file is younger than its bytecode
            compileall.compile_dir(root / folder, quiet=2)
        queue: list[tuple[int, str, int]] = []
        stages: dict[tuple[str, ...], tuple[_Stage, _Stage]] = {}
        for path in _modules(root / "mcore_logprobs"):
            lines = {
                int(n) for n in (each.removeprefix(f"{path}:") for each in args.only) if n.isdigit()
            }
            if not lines and not path.startswith(tuple(args.only)):
                continue
            lines |= set() if args.line is None else {args.line}
            source, tests = (root / "mcore_logprobs" / path).read_text(), tests_of(path, args.tests)
            numbers = list(range(len(list(sites(ast.parse(source))))))
            random.Random(f"{args.seed} {path}").shuffle(numbers)
            if lines:
                places = {n: mutated(source, n)[1] for n in numbers}
                numbers = [n for n in numbers if int(places[n].partition(":")[0]) in lines]
            numbers = numbers[args.skip : args.sample or None]
            queue += [(turn, path, n) for turn, n in enumerate(numbers)]
            stages[tests] = (_Stage(tests, False), _Stage(tests, True))
            print(f"{path}: {len(numbers)} mutants; {' '.join(tests)}", flush=True)
        queue.sort()  # all modules by turns
        chosen = len(queue)
        for last in (False, True):
            queue, left = [], queue
            for turn, path, number in left:
                if time.monotonic() - started > 60 * args.minutes:
                    break
                stage = stages[tests_of(path, args.tests)][last]
                stage.baseline(root, known)
                cache.parent.mkdir(exist_ok=True)
                cache.write_text(json.dumps(known))
                file = root / "mcore_logprobs" / path
                source = file.read_text()
                text, place, change = mutated(source, number)
                file.write_text(text)
                failed, took = stage.verdict(root)
                file.write_text(source)
                if "::" in failed and failed not in sound:
                    if stage.run(root, (failed,), 600.0)[0]:
                        raise SystemExit(f"without a mutant, {failed} fails")
                    sound.add(failed)
                kind = failed if failed == "timed out" else "killed" if failed else "survived"
                if kind == "survived" and not last:
                    kind = "alive yet"
                    queue.append((turn, path, number))
                else:
                    counts[kind] += 1
                by = f" [{took:.0f} s, {failed.split('::')[-1]}]"
                print(f"{kind:9} {path}:{place} {change}{by}", flush=True)
    counts["not judged"] = chosen - counts.total()
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(counts["survived"] > 0)


if __name__ == "__main__":
    sys.exit(main())
