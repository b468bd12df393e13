"""Rows (framework x layout x option), how one is run, and how its runs are compared."""

from __future__ import annotations

import ast
import contextlib
import cProfile
import dataclasses
import importlib
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mcore_logprobs.dropin.installed import FRAMEWORKS as DESCRIBED
from mcore_logprobs.kernels import budgets
from mcore_logprobs.sources.lazy import LazyLogits
from tests.trainers import requirements

FRAMEWORKS: tuple[str, ...] = (
    "areal",
    "megatron_rl",
    "miles",
    "ms_swift",
    "nemo_rl",
    "roll",
    "skyrl",
    "slime",
    "verl",
)  # modules of this package
_DROPINS = "mcore_logprobs.dropin."
REPO = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far the switched run may be from the plain one; absolute unless said otherwise.

    Infinite: not compared.
    """

    logprobs: float = 2e-5
    entropy: float = 2e-5
    metrics: float = 2e-5  # of max(1, |metric|)
    grad_norm: float = 2e-5  # of the norm
    parameters: float = 2e-5


UNBOUNDED = Tolerance(*[math.inf] * len(dataclasses.fields(Tolerance)))


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        framework: a module of this package.
        layout, option: words for the table.
        processes: ranks, each a process that calls the module's `drive`.
        settings: what `drive` needs to know, JSON.
        environment: set in the switched runs before anything is imported.
        log: texts that the switched run's output has and the plain one's has not.
        calls: names of the drop-in that must be called; none where a trainer takes its loss from
            the model, by labels, and the switch acts on the model alone: such a row is a lazy one.
        first: how far the first log-probabilities and the first norm may be apart.
        told_apart: by how many tolerances a run at another temperature must differ.
        night: run by `python -m tests.trainers` only.
        megatron: a release other than the installed one.
    """

    framework: str
    layout: str
    option: str
    processes: int
    log: tuple[str, ...]
    calls: tuple[str, ...]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tolerance: Tolerance = Tolerance()
    first: Tolerance = UNBOUNDED
    told_apart: float = 10.0
    night: bool = True
    megatron: str = ""
    timeout: float = 300

    @property
    def name(self) -> str:
        return f"{self.framework}: {self.layout}: {self.option}"


@dataclasses.dataclass(frozen=True)
class How:
    """One run of a row."""

    switched: bool
    temperature: float
    folder: str = ""  # the one that `prepare` was given
    fault: str = ""  # one of `faults.FAULTS`, put into the drop-in


@dataclasses.dataclass
class Trace:
    """What one rank saw; a rank that gets no results (a pipeline stage without a head) leaves
    them empty. Lists are in the order of the calls.
    """

    logprobs: list[Tensor] = dataclasses.field(default_factory=list)
    entropy: list[Tensor] = dataclasses.field(default_factory=list)
    metrics: list[dict[str, float]] = dataclasses.field(default_factory=list)  # one per update
    grad_norm: list[float] = dataclasses.field(default_factory=list)
    parameters: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # after the updates
    moved: float = 0.0  # largest change of a parameter since the start
    ours: Counter[str] = dataclasses.field(default_factory=Counter)  # calls; filled in by the frame
    theirs: Counter[str] = dataclasses.field(default_factory=Counter)
    output: str = ""
    logits: list[str] = dataclasses.field(default_factory=list)  # see `watched`
    measured: dict[str, list[tuple[float, float]]] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Notes seconds, and MiB above what was held at the start, of what runs in here.

        For `python -m benchmarks.trainers`; the rank's peak resident memory is reset (Linux).
        """
        Path("/proc/self/clear_refs").write_text("5")
        before, begun = _resident("VmRSS"), time.perf_counter()
        yield
        seconds, peak = time.perf_counter() - begun, _resident("VmHWM")
        self.measured.setdefault(what, []).append((seconds, peak - before))


def _resident(field: str) -> float:
    """This process's memory by the kernel's account, in MiB: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


# The runs of a row: the last is the negative control.
PLAIN = How(switched=False, temperature=0.8)
SWITCHED = How(switched=True, temperature=0.8)
OTHER = How(switched=True, temperature=0.9)
RUNS = (PLAIN, SWITCHED, OTHER)


def layout_sizes(layout: str) -> tuple[dict[str, int], int]:
    """ "TP 2 x SP x DP 2" -> ({"tensor": 2, "data": 2}, 4 processes)."""
    kinds = {"TP": "tensor", "CP": "context", "PP": "pipeline", "DP": "data"}
    parts = (part.split() for part in layout.split(" x ") if part != "SP")
    sizes = {kinds[kind]: int(size) for kind, size in parts}
    return sizes, math.prod(sizes.values())


def with_fused(row: Row, *values: str) -> dict[str, Row]:
    """The row under each value of MCORE_LOGPROBS_FUSED, for `benchmarks.trainers`."""
    name = "MCORE_LOGPROBS_FUSED"
    return {f"{name}={x}": dataclasses.replace(row, environment={name: x}) for x in values}


def rows(framework: str = "") -> list[Row]:
    """All rows, or a framework's."""
    names = (framework,) if framework else FRAMEWORKS
    return [row for name in names for row in module(name).ROWS]


def module(framework: str) -> Any:
    return importlib.import_module(f"tests.trainers.{framework}")


# ---- counting calls ------------------------------------------------------------------------------


def _lines(source: Path, names: Sequence[str]) -> dict[int, str]:
    """First line -> name, of those functions (and of a class's forward) that a file defines."""
    found = {}
    wanted = {name.partition(".")[0] for name in names}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if getattr(node, "name", None) not in wanted:
            continue
        if isinstance(node, ast.ClassDef):
            functions = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            entry = [
                n for n in functions if n.name == "forward" or f"{node.name}.{n.name}" in names
            ]
        else:
            assert isinstance(node, ast.FunctionDef)
            entry = [node]
        for function in entry:
            # A decorated function's code begins at its first decorator.
            first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
            found[first] = node.name
    return found


def own_modules(framework: str) -> list[types.ModuleType]:
    """A drop-in, and the modules of the package that define what it takes from them."""
    name = f"{_DROPINS}{DESCRIBED[framework].module}"
    found = {getattr(x, "__module__", None) for x in vars(importlib.import_module(name)).values()}
    names = {name, *(str(module) for module in found if str(module).startswith(_DROPINS))}
    return [sys.modules[name] for name in sorted(names)]


@contextlib.contextmanager
def counting(
    framework: str, paths: Sequence[Path], also: Sequence[str] = ()
) -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Counts calls of (the drop-in's functions, the framework's own of the same names) in here.

    By code, not by name: what was imported, wrapped or kept before is counted too, and so are calls
    in threads that start in here. This thread's counts are filled in at the end.

    paths: where the framework's files are. also: more functions of the drop-in.
    """
    described = DESCRIBED[framework]
    names = described.names()
    places: dict[tuple[str, int], tuple[Counter[str], str]] = {}
    ours, theirs = Counter[str](), Counter[str]()
    wanted = [*names, *described.ours_alone, *also]
    files = [
        (Path(module.__file__ or ""), wanted, ours)
        for module in own_modules(framework)
        if module.__name__ != f"{_DROPINS}_common"
    ]
    for path in paths:
        for file in {*described.files, *map(described.installed_path, described.files)}:
            files.append((path / file, names, theirs))
    for source, functions, counter in files:
        if source.is_file():
            for line, name in _lines(source, functions).items():
                places[str(source.resolve()), line] = counter, name
    assert any(counter is theirs for counter, _ in places.values()), f"no {framework} in {paths}"

    def called_in_thread(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            count(frame.f_code, 1)

    def count(code: Any, calls: int) -> None:
        place = os.path.realpath(code.co_filename), code.co_firstlineno
        if (found := places.get(place)) is not None:
            found[0][found[1]] += calls

    threading.setprofile(called_in_thread)
    profile = cProfile.Profile(subcalls=False, builtins=False)
    profile.enable()
    try:
        yield ours, theirs
    finally:
        profile.disable()
        threading.setprofile(None)  # type: ignore[arg-type]
        for entry in profile.getstats():
            if isinstance(entry.code, types.CodeType):
                count(entry.code, entry.callcount)


# ---- logits that are made --------------------------------------------------------------------


class _LogitsMade(TorchDispatchMode):
    """Notes tensors `[..., V/TP]` of `rows` rows or more, but for the head's weight `[h, V/TP]`."""

    def __init__(self, width: int, rows: int, weight: tuple[int, int]) -> None:
        super().__init__()
        self.width, self.rows, self.weight = width, rows, weight
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if not isinstance(x, Tensor) or isinstance(x, LazyLogits):
                continue
            if x.device.type == "meta" or not x.dim():
                continue  # how shapes are worked out: nothing is in memory
            held = x.untyped_storage().nbytes() // x.element_size()  # an expanded number is one
            large = x.shape[-1] == self.width and min(x.numel(), held) >= self.rows * self.width
            if large and tuple(x.shape) != self.weight:
                self.made.append(f"{func} {tuple(x.shape)}")
        return out


@contextlib.contextmanager
def watched(row: Row, trace: Trace, hidden: int, rows: int) -> Iterator[None]:
    """Notes what makes logits of a micro-batch in here, if the row is a lazy one.

    Heads are computed in blocks of 512 columns, and whole rows one at a time: at this size a chunk
    would have them all.

    rows: as many as a micro-batch has at least, on one of the context-parallel ranks.
    """
    if not row.settings.get("lazy"):
        yield
        return
    width = row.settings["vocabulary"] // row.settings["sizes"].get("tensor", 1)
    shipped = budgets.of("cpu")
    blocks = {"min_block": 512, "max_block": 512, "chunk_bytes": 1}
    rows_held = {"held_bytes": 1, "max_held_bytes": 1}
    narrow = dataclasses.replace(shipped, **blocks, **rows_held)
    with budgets.use(narrow), _LogitsMade(width, rows, (hidden, width)) as seen:
        yield
    trace.logits = seen.made


# ---- running -------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def megatron_path(release: str) -> list[Path]:
    """What goes on PYTHONPATH for another Megatron-Core than the installed one."""
    if not release:
        return []
    found = Path(sys.prefix) / f"megatron-core-{release}"
    assert found.is_dir(), f"{found} is not there: run tests/run.sh once"
    return [found]


def installed(part: str) -> Path:
    """Where a framework's list of requirements is installed, apart from the environment."""
    return requirements.folder(part)


def checkout(name: str) -> Path | None:
    """A repository in the folder that `tests/run.sh --all --peers DIR` names, if it is there."""
    found = Path(os.environ.get("MCORE_LOGPROBS_PEERS", ""), name)
    return found if "MCORE_LOGPROBS_PEERS" in os.environ and found.is_dir() else None


def unavailable(row: Row) -> str:
    """Why a row cannot run here; "" where it can."""
    found = module(row.framework).paths(row)
    return found if isinstance(found, str) else ""


def run(row: Row, runs: Sequence[How] = RUNS) -> list[list[Trace]]:
    """Each run's traces, by rank, all from one fresh process that forks the ranks.

    Raises:
        RuntimeError: with the ranks' output, where one fails.
    """
    found = module(row.framework).paths(row)
    assert not isinstance(found, str), found
    paths = [*megatron_path(row.megatron), *found]
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job")
        job.write_bytes(pickle.dumps((row, paths, list(runs))))
        environment = {
            **os.environ,
            # Frameworks have a folder `tests` too.
            "PYTHONPATH": os.pathsep.join(map(str, [REPO, *paths])),
            "OMP_NUM_THREADS": str(row.settings.get("threads", 1)),
            "CUDA_VISIBLE_DEVICES": "",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TOKENIZERS_PARALLELISM": "false",
            # Compiling takes minutes and changes nothing that is compared.
            "TORCHDYNAMO_DISABLE": str(int(not row.settings.get("compile"))),
        }
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.trainers.ranks", folder],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=row.timeout)
        except subprocess.TimeoutExpired as late:
            tails = "\n".join(p.read_text()[-3000:] for p in Path(folder).glob("output*"))
            raise RuntimeError(f"{row.name}: not done in {row.timeout:g} s\n{tails}") from late
        finally:
            _end(process)
        if process.returncode:
            raise RuntimeError(f"{row.name}: {printed[-8000:]}")
        return pickle.loads(Path(folder, "traces").read_bytes())


def _end(process: subprocess.Popen) -> None:
    """Ends its whole session: ranks leave without waiting for workers that a framework started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
