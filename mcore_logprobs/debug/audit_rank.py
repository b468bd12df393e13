"""What one rank of an audit does: its world, the inputs, the call, the comparison with float64."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import inspect
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_logprobs.debug import oracle
from mcore_logprobs.debug.oracle import BOUND, KINDS, Kind
from mcore_logprobs.ops.result import TokenStats
from mcore_logprobs.spelling import nearest

_LAYOUTS = ("[b, s, V/TP]", "[n, V/TP]", "[b, s, V/TP] of [s, b]")
_SPREADS = {"plain": (2.0, 0.0), "offset 200": (2.0, 200.0), "peaked": (12.0, 0.0)}

# Names of parameters -> what is passed. The first parameter is the logits whatever its name.
_MEANINGS = {
    "target": "target labels tokens index masked_target target_ids next_tokens",
    "teacher": "teacher_logits target_logits teacher target_vocab_parallel_logits",
    "ids": "ids global_indices indices teacher_topk_ids topk_indices column_indices",
    "group": "group tp_group process_group dist_process_group vocab_parallel_group pg",
    "start": "vocab_start_index vocab_start start_index",
    "end": "vocab_end_index vocab_end end_index",
    "rank": "tp_rank vocab_parallel_rank",
    "size": "tp_size world_size",
    "chunk": "chunk_size",
}
_MEANING_OF = {name: what for what, names in _MEANINGS.items() for name in names.split()}


Finding = dict[str, Any]  # what a rank says of a case, by name; goes through JSON


@dataclass(frozen=True)
class Job:
    """What the ranks of one size do, the seconds that they have, and where their answers go."""

    spec: str
    kind: str
    call: tuple[tuple[str, object], ...]
    vocab: int
    size: int = 1
    seconds: float = 0.0
    folder: str = ""

    @property
    def grace(self) -> float:
        """Seconds that the other ranks have to end likewise, once one has failed."""
        return min(10.0, self.seconds / 4)


class Order(IntEnum):
    """Which of several failures is told: the cause before what follows from it."""

    DIED = 0
    RAISED = 1
    HUNG = 2
    LEFT_ALONE = 3  # a collective whose other ranks did not come


class _Refusal(Exception):
    """The call itself raised `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def find(spec: str) -> Callable[..., Any]:
    """The callable that "module:function" or "file.py:function" names.

    Raises:
        ValueError: no such module, file or function, or one that raises when it is imported.
    """
    module_name, _, name = spec.rpartition(":")
    if not module_name:
        raise ValueError(f"expected MODULE:FUNCTION, got {spec!r}")
    if module_name.startswith(".") and not module_name.endswith(".py"):
        raise ValueError(
            f"expected MODULE:FUNCTION with a module's full name, or FILE.py:FUNCTION, got {spec!r}"
        )
    try:
        target: Any = _imported(module_name)
    except (ValueError, ModuleNotFoundError):
        raise
    except Exception as error:
        raise ValueError(f"{module_name} raises when imported: {error!r}") from error
    for part in name.split("."):
        if not hasattr(target, part):
            raise ValueError(f"{module_name} has no {part!r}")
        target = getattr(target, part)
    if not callable(target):
        raise ValueError(f"expected a function, got {spec}, of type {type(target).__name__}")
    owner = getattr(target, "__self__", None)
    if inspect.isclass(owner) and name.endswith(".apply"):
        return owner  # only its forward has parameters with names
    return target


def _imported(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"no file {name}")
    key = f"_audited_{path.stem}_{abs(hash(str(path.resolve()))):x}"
    return sys.modules.get(key) or module_of_file(key, path)


def module_of_file(name: str, path: Path) -> ModuleType:
    """Import a file under this name; one that raises leaves no module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def parameters(fn: Callable[..., object]) -> list[inspect.Parameter]:
    """What a call takes; of an autograd function its forward's, without ctx."""
    if inspect.isclass(fn) and hasattr(fn, "apply"):
        if hasattr(fn, "forward"):
            return list(inspect.signature(fn.forward).parameters.values())[1:]
        fn = fn.apply  # a class that stands in for one
    return list(inspect.signature(fn).parameters.values())


def check_call(spec: str, call: Mapping[str, object]) -> None:
    """Check the further arguments before any rank starts.

    Raises:
        ValueError: a name that no parameter has, or a function whose parameters are not known.
    """
    if not call:
        return
    try:
        takes = parameters(find(spec))
    except (TypeError, ValueError):
        raise ValueError(
            f"fn: expected a function whose parameters Python knows, got {spec}"
        ) from None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes):
        return
    known = [p.name for p in takes if p.kind is not p.VAR_POSITIONAL]
    for name in call:
        if name not in known:
            raise ValueError(
                f"call: expected one of {', '.join(known)}, got {name!r}{nearest(name, known)}"
            )


def run_rank(job: Job, rank: int, path: list[str]) -> None:
    """One rank of one world, in a process of its own: leaves its findings in the folder."""
    Path(job.folder, f"started{rank}").touch()
    gc.freeze()  # a collection would walk over all modules, and copy the server's memory
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its ranks
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path[:] = path
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    findings: list[dict[str, object]] = []
    try:
        with _world(job, rank) as group:
            findings += _cases(job, rank, group)
    except Exception as error:
        findings.append({"tp": job.size, "rank": rank, **_failure(error)})
    staged = Path(job.folder, f"rank{rank}.part")
    staged.write_text(json.dumps(findings))
    staged.rename(Path(job.folder, f"rank{rank}.json"))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _failure(error: Exception) -> Finding:
    lines = str(error).splitlines() or [""]
    order = Order.LEFT_ALONE if "gloo/transport/" in str(error) else Order.RAISED
    reason = f"{type(error).__name__}: {lines[0][:120]}"
    return {"raised": reason, "order": [order, time.time()]}


@contextlib.contextmanager
def _world(job: Job, rank: int) -> Iterator[object]:
    """torch.distributed of exactly the job's ranks, and Megatron's state where it imports."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.size), LOCAL_RANK=str(rank))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.folder}/store",
        rank=rank,
        world_size=job.size,
        timeout=timedelta(seconds=max(10.0, job.seconds / 2)),
    )
    try:
        with contextlib.ExitStack() as stack:
            group: object = dist.group.WORLD
            try:
                import megatron.core  # noqa: F401
            except Exception:
                pass
            else:
                from mcore_logprobs.cpu_megatron import models
                from mcore_logprobs.cpu_megatron.runtime import cpu_runtime

                stack.enter_context(cpu_runtime())
                models.init_model_parallel(tp=job.size)
                stack.callback(models.destroy_model_parallel)
                from megatron.core import parallel_state

                group = parallel_state.get_tensor_model_parallel_group()
            yield group
    finally:
        dist.destroy_process_group()


def _cases(job: Job, rank: int, group: object) -> Iterator[dict[str, object]]:
    """Rows of every layout and spread, up to the first failure that is no refusal.

    After each case every rank learns how it ended on the others. If only one has failed, their
    collectives no longer match, so all of them stop.
    """
    fn, kind = find(job.spec), KINDS[job.kind]
    for layout in _LAYOUTS:
        refusals: list[Finding] = []
        accepted = False
        for spread, (scale, offset) in _SPREADS.items():
            case = {"tp": job.size, "rank": rank, "layout": layout, "spread": spread}
            inputs = _inputs(job.vocab, job.size, layout, scale, offset)
            mine, failure = "ok", Finding()
            try:
                rows = _one(fn, kind, inputs, job, rank, group)
            except _Refusal as refusal:
                mine, failure = "refused", _failure(refusal.error)
            except Exception as error:
                mine, failure = "raised", _failure(error)
            everyone = set[str]()
            if not failure or failure["order"][0] != Order.LEFT_ALONE:
                everyone = _endings(job, f"{layout} {spread}", rank, mine)
            if everyone == {"ok"}:
                accepted = True
                yield from (case | row for row in rows)
            elif everyone == {"refused"}:
                refusals.append(case | failure)
            else:
                if failure:
                    yield case | failure
                return
        if refusals and accepted:  # of some logits only
            yield refusals[0]
            return
        if refusals:
            yield case | {"refused": refusals[0]["raised"]}


def _endings(job: Job, case: str, rank: int, mine: str) -> set[str]:
    """How a case ended on every rank: ok, refused, raised, or missing if a rank does not come.

    Not by a collective: those of a rank that has failed no longer match the others'.
    """
    place = Path(job.folder, "endings", case.replace("/", " "))
    place.mkdir(parents=True, exist_ok=True)
    Path(place, f"{rank}.{mine}").touch()
    failed_at = None
    while True:
        found = [path.suffix[1:] for path in place.iterdir()]
        if len(found) == job.size:
            return set(found)
        if set(found) - {"ok"}:
            failed_at = failed_at or time.monotonic()
            if time.monotonic() > failed_at + job.grace:
                return {*found, "missing"}
        time.sleep(0.002)


def _inputs(vocab: int, size: int, layout: str, scale: float, offset: float) -> dict[str, Tensor]:
    """Inputs, the same on every rank: whole logits of an odd number of tokens, with targets and ids
    on either side of every shard's borders.
    """
    generator = torch.Generator().manual_seed(11)
    first = torch.arange(size) * (vocab // size)
    borders = torch.cat([first, (first - 1) % vocab])
    shape = (max(7, 2 * size + 1),) if layout == _LAYOUTS[1] else (2, max(5, size | 1))
    logits = torch.randn(*shape, vocab, generator=generator) * scale + offset
    if layout == _LAYOUTS[2]:
        logits = logits.transpose(0, 1).contiguous().transpose(0, 1)
    target = torch.randint(0, vocab, shape, generator=generator)
    target.view(-1)[: len(borders)] = borders
    ids = torch.randint(0, vocab, (*shape, 3), generator=generator)
    ids.view(-1, 3)[: len(borders), 1] = borders
    return {
        "logits": logits,
        "target": target,
        "teacher": torch.randn(*shape, vocab, generator=generator) * scale + offset,
        "ids": ids,
        "upstream": torch.randn(*shape, generator=generator) * 2,
    }


def _one(
    fn: object, kind: Kind, inputs: dict[str, Tensor], job: Job, rank: int, group: object
) -> list[dict[str, object]]:
    width = job.vocab // job.size
    mine = slice(rank * width, (rank + 1) * width)
    exact_leaf = inputs["logits"].double().requires_grad_()
    exact = kind.exact(exact_leaf, inputs | {"teacher": inputs["teacher"].double()})

    leaf = inputs["logits"][..., mine].clone(memory_format=torch.preserve_format)
    leaf.requires_grad_(kind.differentiable)
    logits = leaf.clone()  # no leaf: as a model's output, it may be overwritten
    by_parameter = {
        "logits": logits,
        "target": inputs["target"].clone(),
        "teacher": inputs["teacher"][..., mine].clone(),
        "ids": inputs["ids"].clone(),
        "group": group,
        "start": mine.start,
        "end": mine.stop,
        "rank": rank,
        "size": job.size,
        "chunk": 3,
    }
    given = {name: x for name, x in by_parameter.items() if isinstance(x, Tensor)}
    before = {name: x.detach().clone() for name, x in given.items()}
    try:
        result = _call(fn, kind, by_parameter, dict(job.call))
    except Exception as error:
        raise _Refusal(error) from error
    told = type(result).__name__
    if isinstance(result, TokenStats):
        result = tuple(getattr(result, part, None) for part in kind.parts)
    results: Any = tuple(result) if isinstance(result, tuple | list) else (result,)
    results = results[: len(kind.parts)]
    if len(results) < len(kind.parts) or not all(isinstance(x, Tensor) for x in results):
        raise TypeError(f"expected {len(kind.parts)} tensors, got {told}")
    rows: list[dict[str, object]] = []
    loss, exact_loss = torch.zeros(()), torch.zeros((), dtype=torch.float64)
    for i, (part, want) in enumerate(zip(kind.parts, exact, strict=True)):
        got = results[i].reshape(results[i].shape)
        local = want[..., mine] if kind.sharded else want
        if got.numel() == local.numel():
            got = got.reshape(local.shape)  # [n, 1] for [n] is a convention
        rows.append({"tensor": part, **_difference(got.detach(), local.detach())})
        weight = inputs["upstream"] * (1.0 + i)
        if want.dim() > weight.dim():
            weight = weight.unsqueeze(-1) * torch.linspace(0.5, 1.5, want.shape[-1])
        exact_loss = exact_loss + (want * weight.double()).sum()
        local_weight = weight[..., mine] if kind.sharded else weight
        if kind.differentiable:
            loss = loss + (got * local_weight.to(got.dtype)).sum()
    changed = [name for name, x in given.items() if not torch.equal(x.detach(), before[name])]
    rows[0]["modified"] = changed
    if not kind.differentiable:
        return rows
    if not loss.requires_grad:
        return [*rows, {"tensor": "d logits", "error": float("inf"), "note": "no gradient"}]
    loss.backward()
    exact_loss.backward()
    assert exact_leaf.grad is not None
    grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return [*rows, {"tensor": "d logits", **_difference(grad, exact_leaf.grad[..., mine])}]


def _call(fn: Any, kind: Kind, given: dict[str, object], call: dict[str, object]) -> object:
    """Call by the parameters' names; an autograd function takes everything by position."""
    takes = parameters(fn)
    if inspect.isclass(fn) and hasattr(fn, "apply"):
        fn = fn.apply  # type: ignore[attr-defined]
    if all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in takes):
        signature = ", ".join(map(str, takes))
        raise TypeError(f"do not know what to pass: expected named parameters, got ({signature})")
    args: list[object] = []
    keywords: dict[str, object] = {}
    for place, parameter in enumerate(takes):
        name, what = parameter.name, _MEANING_OF.get(parameter.name, "")
        if parameter.kind is parameter.VAR_KEYWORD:
            named = {p.name for p in takes}
            keywords |= {n: value for n, value in call.items() if n not in named}
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if name in call:
            value = call[name]
        elif place == 0:
            value = given["logits"]
        elif place == 1 and kind.inputs and parameter.default is parameter.empty:
            value = given[kind.inputs]
        elif what in given:
            value = given[what]
        elif parameter.default is not parameter.empty:
            value = parameter.default
        else:
            raise TypeError(f"do not know what to pass as {name!r}: give it with --call {name}=...")
        if parameter.kind is parameter.KEYWORD_ONLY:
            keywords[name] = value
        else:
            args.append(value)
    return fn(*args, **keywords)


def _difference(got: Tensor, want: Tensor) -> dict[str, object]:
    """Relative to the largest expected value; what factor it is off by, if it is one factor.
    Integers are equal, or the error is inf.
    """
    if got.shape != want.shape:
        note = f"expected shape {list(want.shape)}, got {list(got.shape)}"
        return {"error": float("inf"), "note": note}
    if not torch.isfinite(got).all():
        return {"error": float("inf"), "note": "not finite"}
    if not want.is_floating_point():  # counts, of which none is nearly right
        wrong = int((got != want).sum())
        note = f"{wrong} of {want.numel()} differ" if wrong else ""
        return {"error": float("inf") if wrong else 0.0, "note": note}
    error, note = oracle.relative_error(got, want), ""
    if error > BOUND:
        factor = ((got.double() * want).sum() / (want * want).sum().clamp(min=1e-30)).item()
        if not got.any():
            note = "zero"
        elif oracle.error(got, factor * want) < 1e-3 * want.abs().max():
            note = f"{factor:.3g} times the right one"
    return {"error": error, "note": note}
