"""`python -m mcore_logprobs audit MODULE:FUNCTION`: any vocab-parallel function against float64.

    python -m mcore_logprobs audit my_package.losses:token_logprobs --kind logprobs --tp 1,2,4

The function runs under gloo on CPU ranks, each with its columns of the same logits; values and
gradients (with an upstream that differs from token to token) are held to plain torch in float64 on
one process. The right forward value says nothing about the gradient: an all-reduce that autograd
does not know of leaves it wrong on some shards only.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["KINDS", "AuditReport", "AuditRow", "audit", "main"]

_LAYOUTS = ("[b, s, V/TP]", "[n, V/TP]", "[b, s, V/TP] of [s, b]")
_SPREADS = {"plain": (2.0, 0.0), "offset 200": (2.0, 200.0), "peaked": (12.0, 0.0)}
_BOUND = 1e-4  # float32 against float64; a wrong formula is off by 1e-2 and more


# ---- what is asked of a function -----------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """One quantity: its parts in float64, and which inputs go with the logits.

    Attributes:
        parts: names of the tensors that the function returns, in order.
        exact: (float64 logits, the other inputs) -> those tensors. A last dimension of V is
            sharded like the logits.
        inputs: the second argument's meaning: "target", "teacher" or "ids"; "" is none.
        differentiable: whether gradients are compared.
    """

    parts: tuple[str, ...]
    exact: Callable[[Tensor, dict[str, Tensor]], tuple[Tensor, ...]]
    inputs: str = ""
    differentiable: bool = True


def _log_p(z: Tensor) -> Tensor:
    return z.log_softmax(-1)


def _picked(z: Tensor, x: dict[str, Tensor]) -> Tensor:
    return _log_p(z).gather(-1, x["target"].unsqueeze(-1)).squeeze(-1)


def _entropy(z: Tensor) -> Tensor:
    return -(_log_p(z).exp() * _log_p(z)).sum(-1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of two tensors of logits."""
    return (_log_p(p).exp() * (_log_p(p) - _log_p(q))).sum(-1)


KINDS: dict[str, Kind] = {
    "logprobs": Kind(("logprobs",), lambda z, x: (_picked(z, x),), "target"),
    "loss": Kind(("loss",), lambda z, x: (-_picked(z, x),), "target"),
    "entropy": Kind(("entropy",), lambda z, x: (_entropy(z),)),
    "negative_entropy": Kind(("sum p log p",), lambda z, x: (-_entropy(z),)),
    "logprobs_entropy": Kind(
        ("logprobs", "entropy"), lambda z, x: (_picked(z, x), _entropy(z)), "target"
    ),
    "sum_pi_squared": Kind(("sum p^2",), lambda z, x: (_log_p(z).exp().square().sum(-1),)),
    "log_softmax": Kind(("log-softmax",), lambda z, x: (_log_p(z),)),
    "kl": Kind(("KL(teacher || student)",), lambda z, x: (_kl(x["teacher"], z),), "teacher"),
    "reverse_kl": Kind(
        ("KL(student || teacher)",), lambda z, x: (_kl(z, x["teacher"]),), "teacher"
    ),
    "cross_entropy": Kind(
        ("cross entropy",),
        lambda z, x: (-(_log_p(x["teacher"]).exp() * _log_p(z)).sum(-1),),
        "teacher",
    ),
    "gather": Kind(("logprobs",), lambda z, x: (_log_p(z).gather(-1, x["ids"]),), "ids"),
    "target_rank": Kind(
        ("rank",),
        lambda z, x: ((z > z.gather(-1, x["target"].unsqueeze(-1))).sum(-1),),
        "target",
        differentiable=False,
    ),
}

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


# ---- the report ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class AuditRow:
    """The worst of one tensor at one TP, over ranks, layouts and spreads of logits.

    Attributes:
        error: largest difference over the largest value; inf where it is not finite.
        where: rank, layout and spread of the worst.
        verdict: "ok", "WRONG", "raises" or "no gradient"; note: what the error looks like.
    """

    tp: int
    tensor: str
    error: float
    verdict: str
    where: str = ""
    note: str = ""


@dataclass(frozen=True)
class AuditReport:
    """What `audit` found. `ok` is whether every tensor is right; `str()` is the table."""

    name: str
    kind: str
    rows: tuple[AuditRow, ...]
    remarks: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.verdict == "ok" for row in self.rows)

    def __str__(self) -> str:
        lines = [f"{self.name} as {self.kind}: {'right' if self.ok else 'WRONG'}"]
        lines.append(f"  {'TP':>2}  {'tensor':26} {'worst error':>11}  verdict")
        for row in self.rows:
            more = "; ".join(part for part in (row.where, row.note) if part)
            lines.append(
                f"  {row.tp:>2}  {row.tensor:26} {row.error:>11.1e}  {row.verdict}"
                + (f" ({more})" if more and row.verdict != "ok" else "")
            )
        return "\n".join([*lines, *(f"  {remark}" for remark in self.remarks)])


# ---- running -------------------------------------------------------------------------------------


def audit(
    fn: Callable[..., Any] | str,
    *,
    kind: str = "logprobs",
    tp: Sequence[int] = (1, 2, 4),
    call: Mapping[str, Any] | None = None,
    vocab: int = 48,
    bound: float = _BOUND,
    timeout: float = 300.0,
) -> AuditReport:
    """Hold a vocab-parallel function to float64: values and gradients, on every shard.

    The function is called with this rank's logits first and the rest by its parameters' names
    (target or labels, teacher_logits, global_indices, group or tp_group, vocab_start_index and
    vocab_end_index, chunk_size); parameters with defaults keep them. Where Megatron imports, its
    parallel state is initialised, for functions that take the group from there. An autograd
    function is called by its `apply`.

    A layout that the function refuses on every rank is left out, if it takes another one.

    Args:
        fn: a function that other processes can import (at a module's top), or "module:function", or
            "file.py:function".
        kind: one of `KINDS`.
        tp: how many ranks share the vocabulary; each must divide `vocab`.
        call: more arguments by name, which go before those found by name.
        bound: largest relative error that counts as right, for float32.
        timeout: seconds for all of it; ranks that wait for each other longer are killed.

    Raises:
        ValueError: an unknown kind, a TP that does not divide the vocabulary, a function that
            cannot be found or imported by another process.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    sizes = tuple(tp)
    if not sizes or any(size < 1 or vocab % size for size in sizes):
        raise ValueError(f"tp: expected divisors of {vocab}, got {list(sizes)}")
    spec = fn if isinstance(fn, str) else _spec_of(fn)
    _find(spec)  # here first: a name that is not there should not cost a launch
    job = _Job(spec, kind, sizes, tuple((call or {}).items()), vocab, timeout)
    found = _launch(job)
    return _judge(spec, kind, found, bound, sizes)


@dataclass(frozen=True)
class _Job:
    spec: str
    kind: str
    sizes: tuple[int, ...]
    call: tuple[tuple[str, Any], ...]
    vocab: int
    timeout: float


def _spec_of(fn: Any) -> str:
    name, module = getattr(fn, "__qualname__", ""), getattr(fn, "__module__", "")
    owner = getattr(fn, "__self__", None)
    if inspect.isclass(owner) and getattr(fn, "__name__", "") == "apply":
        name, module = owner.__qualname__, owner.__module__  # SomeFunction.apply
    if not name or "<" in name or module == "__main__":
        raise ValueError(
            f"fn: expected a function at the top of an importable module, got {module}.{name}"
        )
    return f"{module}:{name}"


def _find(spec: str) -> Callable[..., Any]:
    """The callable that "module:function" or "file.py:function" names."""
    module_name, _, name = spec.rpartition(":")
    if not module_name:
        raise ValueError(f"expected MODULE:FUNCTION, got {spec!r}")
    found: Any
    if module_name.endswith(".py"):
        path = Path(module_name)
        if not path.is_file():
            raise ValueError(f"no file {module_name}")
        key = f"_audited_{path.stem}_{abs(hash(str(path.resolve()))):x}"
        if key not in sys.modules:
            module_spec = importlib.util.spec_from_file_location(key, path)
            assert module_spec is not None
            assert module_spec.loader is not None
            sys.modules[key] = importlib.util.module_from_spec(module_spec)
            module_spec.loader.exec_module(sys.modules[key])
        found = sys.modules[key]
    else:
        found = importlib.import_module(module_name)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module_name} has no {part!r}")
        found = getattr(found, part)
    return found


def _has_megatron() -> bool:
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except Exception:
        return False


def _launch(job: _Job) -> list[dict[str, Any]]:
    """Every rank's findings; a rank that died or hung is a finding too."""
    from torch import multiprocessing

    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:  # what every rank imports, the server imports once
        heavy = ["torch.distributed", "mcore_logprobs.audit"]
        context.set_forkserver_preload([*heavy, *(["megatron.core"] if _has_megatron() else [])])
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, job, folder, list(sys.path)), daemon=True)
            for rank in range(max(job.sizes))
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + job.timeout
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        found: list[dict[str, Any]] = []
        for rank, process in enumerate(ranks):
            answer = Path(folder, f"rank{rank}.json")
            if process.is_alive():
                process.kill()
                process.join()
            if answer.exists():
                found += json.loads(answer.read_text())
            else:
                error = f"rank {rank} gave no answer within {job.timeout:g} s"
                found.append({"tp": max(job.sizes), "raised": error, "rank": rank})
        return found


# ---- inside a rank -------------------------------------------------------------------------------


def _rank(rank: int, job: _Job, folder: str, path: list[str]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: list[dict[str, Any]] = []
    for size in job.sizes:
        if rank < size:
            try:
                with _world(rank, size, f"{folder}/store{size}", job.timeout) as group:
                    found += _cases(job, rank, size, group)
            except Exception:
                reason = traceback.format_exc(limit=-2).strip()
                found.append({"tp": size, "rank": rank, "raised": reason})
    staged = Path(folder, f"rank{rank}.part")
    staged.write_text(json.dumps(found))
    staged.rename(Path(folder, f"rank{rank}.json"))


@contextlib.contextmanager
def _world(rank: int, size: int, store: str, timeout: float) -> Iterator[Any]:
    """torch.distributed of exactly `size` ranks, and Megatron's state where it imports."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=max(10.0, timeout / 2)),
    )
    try:
        with contextlib.ExitStack() as stack:
            group: Any = dist.group.WORLD
            try:
                import megatron.core  # noqa: F401
            except Exception:
                pass
            else:
                from mcore_logprobs.cpu_megatron import models
                from mcore_logprobs.cpu_megatron.runtime import cpu_runtime

                stack.enter_context(cpu_runtime())
                models.init_model_parallel(tp=size)
                stack.callback(models.destroy_model_parallel)
                from megatron.core import parallel_state

                group = parallel_state.get_tensor_model_parallel_group()
            yield group
    finally:
        dist.destroy_process_group()


def _cases(job: _Job, rank: int, size: int, group: Any) -> Iterator[dict[str, Any]]:
    fn, kind = _find(job.spec), KINDS[job.kind]
    for layout in _LAYOUTS:
        for spread, (scale, offset) in _SPREADS.items():
            case = {"tp": size, "rank": rank, "layout": layout, "spread": spread}
            whole = _inputs(job.vocab, layout, scale, offset)
            try:
                yield from (case | row for row in _one(fn, kind, whole, job, rank, size, group))
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
                yield case | {"refused": reason}
                break  # the layout as such


def _inputs(vocab: int, layout: str, scale: float, offset: float) -> dict[str, Tensor]:
    """The same on every rank; whole logits with an odd number of tokens."""
    generator = torch.Generator().manual_seed(11)
    shape = (7,) if layout == _LAYOUTS[1] else (2, 5)
    logits = torch.randn(*shape, vocab, generator=generator) * scale + offset
    if layout == _LAYOUTS[2]:
        logits = logits.transpose(0, 1).contiguous().transpose(0, 1)
    target = torch.randint(0, vocab, shape, generator=generator)
    target.view(-1)[:4] = torch.tensor([0, vocab // 2 - 1, vocab // 2, vocab - 1])
    return {
        "logits": logits,
        "target": target,
        "teacher": torch.randn(*shape, vocab, generator=generator) * scale + offset,
        "ids": torch.randint(0, vocab, (*shape, 3), generator=generator),
        "upstream": torch.randn(*shape, generator=generator) * 2,
    }


def _one(
    fn: Any, kind: Kind, whole: dict[str, Tensor], job: _Job, rank: int, size: int, group: Any
) -> list[dict[str, Any]]:
    width = job.vocab // size
    mine = slice(rank * width, (rank + 1) * width)
    exact_leaf = whole["logits"].double().requires_grad_()
    others = {n: whole[n].double() if n == "teacher" else whole[n] for n in ("target", "ids")}
    others["teacher"] = whole["teacher"].double()
    exact = kind.exact(exact_leaf, others)

    leaf = whole["logits"][..., mine].clone(memory_format=torch.preserve_format)
    leaf.requires_grad_(kind.differentiable)
    logits = leaf.clone()  # no leaf: as a model's output, it may be overwritten
    before = leaf.detach().clone()
    given = {
        "logits": logits,
        "target": whole["target"].clone(),
        "teacher": whole["teacher"][..., mine].clone(),
        "ids": whole["ids"].clone(),
        "group": group,
        "start": mine.start,
        "end": mine.stop,
        "rank": rank,
        "size": size,
        "chunk": 3,
    }
    results = _call(fn, kind, given, dict(job.call))
    rows = []
    loss: Any = 0.0
    exact_loss: Any = 0.0
    for i, (part, want) in enumerate(zip(kind.parts, exact, strict=True)):
        got = results[i].reshape(results[i].shape)
        sharded = want.shape[-1:] == (job.vocab,) and want.dim() == exact_leaf.dim()
        local = want[..., mine] if sharded else want
        if got.numel() == local.numel():
            got = got.reshape(local.shape)  # [n, 1] for [n] is a convention
        rows.append({"tensor": part, **_difference(got.detach(), local.detach())})
        weight = whole["upstream"] * (1.0 + i)
        spread = torch.linspace(0.5, 1.5, job.vocab if sharded else 1)
        if want.dim() > weight.dim():
            spread = spread if sharded else torch.linspace(0.5, 1.5, want.shape[-1])
            weight = weight.unsqueeze(-1) * spread
        exact_loss = exact_loss + (want * weight.double()).sum()
        local_weight = weight[..., mine] if sharded else weight
        if kind.differentiable:
            loss = loss + (got * local_weight.to(got.dtype)).sum()
    if not kind.differentiable:
        return rows
    if not loss.requires_grad:
        return [*rows, {"tensor": "d logits", "error": float("inf"), "note": "no gradient"}]
    modified = not torch.equal(logits.detach(), before)
    loss.backward()
    exact_loss.backward()
    assert exact_leaf.grad is not None
    grad = torch.zeros_like(before) if leaf.grad is None else leaf.grad
    row = {"tensor": "d logits", **_difference(grad, exact_leaf.grad[..., mine])}
    return [*rows, row | {"modified": modified}]


def _call(fn: Any, kind: Kind, given: dict[str, Any], call: dict[str, Any]) -> tuple[Tensor, ...]:
    """Call by the parameters' names; an autograd function takes everything by position."""
    if inspect.isclass(fn) and hasattr(fn, "apply"):
        forward = inspect.signature(fn.forward)  # type: ignore[attr-defined]
        parameters = list(forward.parameters.values())[1:]
        fn = fn.apply  # type: ignore[attr-defined]
    else:
        parameters = list(inspect.signature(fn).parameters.values())
    args: list[Any] = []
    keywords: dict[str, Any] = {}
    for place, parameter in enumerate(parameters):
        name, what = parameter.name, _MEANING_OF.get(parameter.name, "")
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
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
    result = fn(*args, **keywords)
    found = tuple(result) if isinstance(result, tuple | list) else (result,)
    if len(found) < len(kind.parts) or not all(isinstance(x, Tensor) for x in found[:2][:1]):
        raise TypeError(f"expected {len(kind.parts)} tensors, got {type(result).__name__}")
    return found


def _difference(got: Tensor, want: Tensor) -> dict[str, Any]:
    """Relative to the largest expected value; what factor it is off by, if it is one factor."""
    if got.shape != want.shape:
        note = f"expected shape {list(want.shape)}, got {list(got.shape)}"
        return {"error": float("inf"), "note": note}
    got, want = got.double(), want.double()
    scale = want.abs().max().clamp(min=1e-30)
    error = ((got - want).abs().max() / scale).item()
    note = ""
    if not torch.isfinite(got).all():
        return {"error": float("inf"), "note": "not finite"}
    if error > _BOUND:
        factor = ((got * want).sum() / (want * want).sum().clamp(min=1e-30)).item()
        rest = ((got - factor * want).abs().max() / scale).item()
        if not got.any():
            note = "zero"
        elif rest < 1e-3:
            note = f"{factor:.3g} times the right one"
    return {"error": error, "note": note}


# ---- judging -------------------------------------------------------------------------------------


def _judge(
    spec: str, kind: str, found: list[dict[str, Any]], bound: float, sizes: Sequence[int]
) -> AuditReport:
    rows = []
    names = [*KINDS[kind].parts, *(["d logits"] if KINDS[kind].differentiable else [])]
    for size in sizes:
        here = [f for f in found if f["tp"] == size]
        raised = next((f for f in here if "raised" in f), None)
        measured = [f for f in here if "tensor" in f]
        if raised is not None or not measured:
            refusals = [f["refused"] for f in here if "refused" in f]
            why = raised["raised"].splitlines()[-1] if raised else refusals[0] if refusals else ""
            rows.append(AuditRow(size, "all", float("inf"), "raises", note=why))
            continue
        for name in names:
            worst = max((f for f in measured if f["tensor"] == name), key=lambda f: f["error"])
            fits = worst["error"] <= bound
            where = f"rank {worst['rank']}, {worst['layout']}, {worst['spread']}"
            verdict = "ok" if fits else "WRONG"
            rows.append(AuditRow(size, name, worst["error"], verdict, where, worst.get("note", "")))
    remarks = []
    refused = {f["layout"]: f["refused"] for f in found if "refused" in f}
    remarks += [f"does not take {layout}: {why}" for layout, why in refused.items()]
    if any(f.get("modified") for f in found):
        remarks.append("overwrites its logits")
    return AuditReport(spec, kind, tuple(rows), tuple(remarks))


# ---- the command ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; 0 if every tensor is right, 1 if one is not."""
    parser = argparse.ArgumentParser(
        prog="python -m mcore_logprobs audit",
        description="Hold a vocab-parallel function to float64: values and gradients, every shard.",
    )
    parser.add_argument("function", help="MODULE:FUNCTION or FILE.py:FUNCTION")
    parser.add_argument("--kind", choices=list(KINDS), default="logprobs")
    parser.add_argument("--tp", default="1,2,4", help="tensor-parallel sizes")
    parser.add_argument(
        "--call", action="append", default=[], metavar="NAME=VALUE", help="a further argument"
    )
    parser.add_argument("--vocab", type=int, default=48, help="columns in all")
    parser.add_argument("--bound", type=float, default=_BOUND, help="largest relative error")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for all of it")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(argv)
    pairs = (text.partition("=") for text in options.call)
    report = audit(
        options.function,
        kind=options.kind,
        tp=[int(size) for size in options.tp.split(",")],
        call={name: _literal(value) for name, _, value in pairs},
        vocab=options.vocab,
        bound=options.bound,
        timeout=options.timeout,
    )
    print(json.dumps(asdict(report) | {"ok": report.ok}, indent=2) if options.json else report)
    return 0 if report.ok else 1


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    sys.exit(main())
