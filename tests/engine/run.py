"""Runs cases on their ranks, and holds what they find to the truth in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from mcore_logprobs.bench.counting import CollectivesMade
from mcore_logprobs.kernels import budgets
from tests.engine.cases import (
    BREAKS,
    BUDGETS,
    KEYWORDS,
    Case,
    Problem,
    axes_of,
    shape_of,
    tensors_of,
)
from tests.engine.mistakes import MISTAKES, MISTAKES_TOGETHER
from tests.engine.operation import SHARDED, VOCAB
from tests.engine.reference import counted, reference, upstream_gradients, wide
from tests.helpers.distributed import RankError, get_pool, grid_groups, preloaded
from tests.helpers.oracles import assert_no_worse

preloaded.append("tests.helpers.compiled")

# ---- one rank -----------------------------------------------------------------------------------

# How a tensor lies in memory: (the leaf that holds it, the view of the leaf that is passed).
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "contiguous": (Tensor.clone, lambda x: x),
    "transposed": (lambda x: x.transpose(0, 1).contiguous(), lambda x: x.transpose(0, 1)),
    "wider rows": (lambda x: torch.nn.functional.pad(x, (1, 2), value=7.0), lambda x: x[..., 1:-2]),
    "every second row": (lambda x: x.repeat_interleave(2, 0), lambda x: x[::2]),
    "vocabulary first": (lambda x: x.movedim(-1, 0).contiguous(), lambda x: x.movedim(0, -1)),
    "negative bit": (Tensor.neg, torch._neg_view),
}
_OF_RANKS = ("transposed", "contiguous", "every second row")  # "each rank's own"


def _column_major(x: Tensor) -> Tensor:
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).clone(memory_format=torch.contiguous_format).permute(order)


HOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "row-major": lambda x: x.clone(memory_format=torch.contiguous_format),
    "column-major": _column_major,
    "clone": Tensor.clone,
}


@dataclass
class Found:
    """What a rank found: outputs and gradients by name, or that the backward refused."""

    outputs: dict[str, Tensor]
    grads: dict[str, Tensor]
    refused: bool = False


@dataclass
class Placed:
    """A rank's share of a problem: the leaves that hold its tensors, and the arguments of the call.

    Attributes:
        leaves: by name, those of `Problem.head`.
        of_leaf: a leaf's view that is passed; the same of its gradient.
        head: (logits,) or (hidden, weight).
    """

    leaves: dict[str, Tensor]
    of_leaf: dict[str, Callable[[Tensor], Tensor]]
    head: tuple[Tensor, ...]
    side: dict[str, Any]
    keywords: dict[str, Any]


def place(case: Case, problem: Problem) -> Placed:
    s, op = case.setting, case.operation
    sequence = 0 if s.get("sequence_parallel") else None
    dims = {"logits": op.input_dim, "hidden": sequence, "weight": 0, "bias": 0, "A": None, "B": 0}
    leaves, of_leaf = {}, {}
    for name, x in problem.head.items():
        layout = s["layout"] if name in ("logits", "hidden") else "contiguous"
        if layout == "each rank's own":
            layout = _OF_RANKS[dist.get_rank(_group) if s["tp"] > 1 else 0]
        if case.source == "hidden" and s["layout"] == "vocabulary first":  # the weight's, then
            layout = "contiguous"
        store, of_leaf[name] = LAYOUTS[layout]
        leaf = store(cut(x, dims[name], s["tp"]))
        if name == "weight" and s["layout"] == "vocabulary first":
            leaf = leaf.t().contiguous().t()
        leaves[name] = leaf.detach().requires_grad_(s.get("frozen") != name)
    if s.get("gradient_accumulation_fusion"):
        leaves["weight"].main_grad = torch.ones_like(leaves["weight"]).to(wide(case))
        leaves["weight"].grad_added_to_main_grad = False
    views = {name: of_leaf[name](leaf) for name, leaf in leaves.items()}

    by_kind = {"columns": -1, "rows": 0, "sequence": sequence}
    side = dict(problem.side)
    for name in side.keys() & SHARDED.keys():
        side[name] = cut(side[name], by_kind[SHARDED[name]], s["tp"]).clone()
    if "teacher_lora" in side:
        a, b, scale = side["teacher_lora"]
        side["teacher_lora"] = (a, cut(b, 0, s["tp"]).clone(), scale)

    axes = axes_of(op, case.source)
    told = {name for name in s.keys() & axes.keys() if s[name] != axes[name][0]}
    keywords = {name: s[name] for name in (*KEYWORDS, *op.options) if name in told}
    if "tp" in told:
        keywords["tp_group"] = _group or dist.group.WORLD
    if "temperature" in told:
        keywords["temperature"] = problem.temperature
    if problem.rows is not None:
        keywords["rows"] = problem.rows
    if "logits_dtype" in told:
        keywords["logits_dtype"] = getattr(torch, s["logits_dtype"])
    for name, given in problem.vocab_bias.items():
        own = cut(given, 0, s["tp"]) if name == "logit_bias" else given
        keywords["logit_bias" if name == "pairs" else name] = own
    if "bias" in views:
        keywords["bias"] = views["bias"]
    if "A" in views:
        keywords["lora"] = (views["A"], views["B"], 0.5)
    head = tuple(views[name] for name in ("logits", "hidden", "weight") if name in views)
    return Placed(leaves, of_leaf, head, side, keywords)


def cut(x: Tensor, dim: int | None, tp: int) -> Tensor:
    """This rank's part."""
    return x if dim is None or tp == 1 else x.tensor_split(tp, dim)[dist.get_rank(_group)]


_group: Any = None  # the TP group where it is not the world


def on_subgroup(pair: tuple[Case, Case]) -> Found:
    """Of four ranks each two a TP group, with a case of their own."""
    global _group
    groups = grid_groups(tp=2, cp=2)
    _group = groups.tp
    try:
        return on_rank(pair[groups.cp.rank()])
    finally:
        _group = None


def on_rank(case: Case) -> Found:
    """The case on this rank; inputs must come out untouched."""
    with cut_by(case):
        return _on_rank(case)


def cut_by(case: Case) -> AbstractContextManager[Any]:
    name = case.setting.get("budgets", "shipped")
    return nullcontext() if name == "shipped" else budgets.use(BUDGETS[name])


def _on_rank(case: Case) -> Found:
    s, op, problem = case.setting, case.operation, Problem(case)
    device = torch.device(s.get("device", "cpu"))
    problem.move(device)
    mine = place(case, problem)
    tensors = problem.tensors() | tensors_of(mine.side) | mine.leaves
    kept = {name: (x.detach().clone(), x._version) for name, x in tensors.items()}
    first, *rest = mine.head
    names: list[str] = []

    def call(x: Tensor) -> tuple[Tensor, ...]:
        outputs = op(case.source, (x, *rest), mine.side, mine.keywords)
        names[:] = outputs
        return tuple(outputs.values())

    with ExitStack() as around:
        if s.get("compiled"):
            torch.compiler.reset()  # torch compiles one function for a limited number of cases
            # Its entries hold freed memory where a result is a reshaped input (PyTorch 185630).
            around.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
            if s["compiled"] == "symbolic":
                lead = shape_of(s["lead"])
                for x in (first, *tensors_of(mine.side | mine.keywords).values()):
                    if x.shape[: len(lead)] == lead:
                        torch._dynamo.maybe_mark_dynamic(x, list(range(len(lead))))
                whole = op.name not in BREAKS
                call = torch.compile(call, backend="aot_eager", fullgraph=whole)
            else:
                call = torch.compile(call, backend=s["compiled"])
        if s.get("hooks", "none") != "none":
            around.enter_context(saved_tensors_hooks(HOOKS[s["hooks"]], lambda x: x))
        if s["autocast"]:
            around.enter_context(torch.autocast(device.type, torch.bfloat16))
        if s.get("checkpoint", "none") == "none":
            results = call(first)
        else:
            results = checkpoint(call, first, use_reentrant=s["checkpoint"] == "reentrant")
    outputs = dict(zip(names, results, strict=True))
    found = {name: x.detach().to("cpu", copy=True) for name, x in outputs.items()}

    changed = s.get("tampered")
    if changed:
        tamper(tensors[changed])
    learning = {name for name, x in outputs.items() if x.requires_grad}
    if s.get("checkpoint") == "reentrant":  # it says so of all that are floating point
        learning &= set(op.differentiable)
    assert learning == set(op.differentiable) & outputs.keys(), f"{learning} carry a gradient"
    roots, incoming = [], []
    for x, g in upstreams(case, outputs, s["tp"]):
        roots.append(x)
        lies_by_column = s["layout"] == "transposed" and g.dim() == 2
        incoming.append(g.t().contiguous().t() if lies_by_column else g)
    before = [g.clone() for g in incoming]
    try:
        if roots:
            torch.autograd.backward(roots, incoming)
    except RuntimeError as error:
        if changed and "modified by an inplace operation" in str(error):
            return Found(found, {}, refused=True)
        raise
    assert all(map(torch.equal, incoming, before)), "an upstream gradient was modified"
    for name, x in tensors.items():
        same = torch.equal(*(y.detach().nan_to_num(99) for y in (x, kept[name][0])))
        assert (same and x._version == kept[name][1]) or name == changed, f"{name} was modified"

    grads = {}
    for name, leaf in mine.leaves.items() if roots else ():
        if not leaf.requires_grad:
            assert leaf.grad is None
            continue
        assert leaf.grad is not None, f"{name}: no gradient"
        assert leaf.grad.dtype == leaf.dtype
        whole = leaf.grad.clone()
        grads[name] = mine.of_leaf[name](whole).to("cpu", copy=True)
        mine.of_leaf[name](whole).zero_()
        assert not whole.any(), f"{name}: a gradient outside of the view"
        if name == "weight" and s.get("gradient_accumulation_fusion"):
            assert leaf.grad_added_to_main_grad
            grads[name] = leaf.main_grad.cpu()
    return Found(found, grads)


def sent(case: Case) -> tuple[list[str], list[str]]:
    """The collectives of forward and backward on this rank."""
    mine = place(case, Problem(case))
    with cut_by(case), CollectivesMade() as forward:
        outputs = case.operation(case.source, mine.head, mine.side, mine.keywords)
    roots = upstreams(case, outputs, case.setting["tp"])
    with cut_by(case), CollectivesMade() as backward:
        if roots:
            torch.autograd.backward(*map(list, zip(*roots, strict=True)))
    return forward.names, backward.names


def tamper(x: Tensor) -> None:
    """Change the values in place, to others that are possible."""
    with torch.no_grad():
        if x.dtype == torch.bool:
            x.logical_not_()
        elif x.is_floating_point():
            x.mul_(1.5).add_(0.25)
        else:
            x.zero_()


def refusals(case: Case) -> list[tuple[str, str, list[str]]]:
    """What this rank says to each mistake: (words that are expected, message, what was sent)."""
    op, found = case.operation, []
    names = (op.argument,) if case.source == "logits" else ("hidden", "weight")
    taken = {
        *names,
        *axes_of(op, case.source),
        *Problem(case).side,
        "tp_group",
        "bias",
        "lora",
        "backend",
    }
    taken |= {"disallowed_ids"} if "logit_bias" in taken else set()
    taken -= {*op.without, *op.passed_on} | ({"bias", "lora"} if case.source == "logits" else set())
    shared = [({n: bad}, words) for n in MISTAKES if n in taken for bad, words in MISTAKES[n]]
    shared += [({n: 1}, f"{n}: expected True or False") for n in op.flags(case.source)]
    together = [(bad, words) for bad, words in MISTAKES_TOGETHER if taken.issuperset(bad)]
    for changes, words in (*shared, *together, *op.mistakes):
        mine = place(case, Problem(case))
        call = {**dict(zip(names, mine.head, strict=True)), **mine.side, **mine.keywords}
        for name, bad in changes.items():
            call[name] = bad(call[name]) if callable(bad) else bad
        head = tuple(call.pop(name) for name in names)
        side = {name: call.pop(name) for name in mine.side}
        with CollectivesMade() as made:
            try:
                op(case.source, head, side, call)
                message = "nothing was raised"
            except ValueError as error:
                message = str(error)
        found.append((words, message, made.names))
    return found


# ---- the truth ----------------------------------------------------------------------------------


def upstreams(case: Case, outputs: dict[str, Tensor], ranks: int = 1) -> list[tuple[Tensor, ...]]:
    """The outputs that are differentiated, each with a gradient of its own for every entry."""
    shapes = {name: x.shape for name, x in outputs.items()}
    incoming = upstream_gradients(case, shapes, ranks)
    dim = case.operation.output_dim
    return [counted(case, outputs[name], cut(g, dim, ranks)) for name, g in incoming.items()]


def check(case: Case, runs: list[Found]) -> None:
    """Raise an AssertionError where the ranks' results or gradients are off."""
    s, op = case.setting, case.operation
    ulps = 8.0 * op.factor
    if s.get("logits_dtype", "float32") != "float32":  # one rounding of the products more
        ulps += 2.0**15
    if s.get("values") == "large":  # and so are products' roundings
        ulps *= 4.0
    if s["dtype"] == "float64" and s.get("tail", "none") in (None, "bin") and not s["generalized"]:
        ulps = 2.0**16  # a tail of 1e-6 is what is left of 1: six digits fewer
    if s["dtype"] == "float64":
        # The truth is plain torch's own, so that its error counts as 0; sums over many columns in
        # another order differ all the same, by the square root of their number.
        ulps *= max(1.0, (s.get("vocab", VOCAB) / VOCAB) ** 0.5)
    grad_factor = op.factor
    if s.get("device") == "cuda" and (s["dtype"] in ("bfloat16", "float16") or s["autocast"]):
        # Operands of 16 bits are multiplied as they are: dlogits are rounded to them first, which
        # plain torch's float32 ones are not (up to four times its error, of 3,500 cases), and a
        # LoRA's product with hidden states is the sum of two.
        grad_factor *= 8.0
        ulps += 2.0**9 if s.get("lora") else 0.0
    exact, exact_grads = reference(case, torch.float64)
    undecided = exact.pop("undecided", torch.tensor(False)) & (s["dtype"] != "float64")
    plain, plain_grads = reference(case, wide(case))
    assert len({run.refused for run in runs}) == 1, (
        "some ranks refused the backward, others did not"
    )

    def joined(parts: list[Tensor], name: str, dim: int | None) -> Tensor:
        if dim is not None:
            return torch.cat(parts, dim)
        assert all(torch.equal(part, parts[0]) for part in parts), f"{name}: ranks differ"
        return parts[0]

    got_names, names = set(runs[0].outputs), set(exact)
    assert got_names == names, f"expected outputs {sorted(names)}, got {sorted(got_names)}"
    for name, want in exact.items():
        got = joined([run.outputs[name] for run in runs], name, op.output_dim)
        if want.is_floating_point():
            assert got.dtype == (getattr(torch, s["dtype"]) if op.same_dtype else wide(case)), (
                f"{name}: {got.dtype}"
            )
            found = (x.where(~undecided, want.to(x.dtype)) for x in (got, plain[name]))
            assert_no_worse(*found, want, name=name, ulps=ulps, factor=op.factor)
        else:
            decided = got.where(~undecided, want)
            assert torch.equal(decided, want), f"{name}: {got} where {want} is expected"
    if runs[0].refused or undecided.any():  # a gradient of the weight is of all rows
        return
    sequence = 0 if s.get("sequence_parallel") else None
    dims = {"logits": op.input_dim, "hidden": sequence, "A": None}
    assert set(runs[0].grads) == set(exact_grads)
    for name, want in exact_grads.items():
        got = joined([run.grads[name] for run in runs], f"d{name}", dims.get(name, 0))
        # A head's gradient is a sum over rows: one after the other, where a product's are blocked.
        more = 2.0 if s.get("chunk_size") == 1 and name in ("weight", "bias", "A", "B") else 1.0
        how: dict[str, Any] = {"ulps": more * ulps, "factor": grad_factor}
        assert_no_worse(got, plain_grads[name], want, name=f"d{name}", **how)


def failures(cases: Sequence[Case]) -> list[str]:
    """Run the cases, one dispatch a world size; for each that fails, how to rerun it and why."""
    found = []
    for tp in (1, 2, 3):
        some = [case for case in cases if case.setting["tp"] == tp]
        answers = get_pool(tp).run_many(on_rank, some) if tp > 1 else map(_here, some)
        for case, answer in zip(some, answers, strict=True):
            found += told(case, answer)
    return found


def told(case: Case, answer: Any) -> list[str]:
    """How to rerun a case and why it fails, from what the ranks found or raised; or nothing."""
    try:
        if isinstance(answer, RankError):
            raise next(e for e in answer.errors if e is not None)
        if isinstance(answer, Exception):
            raise answer
        check(case, answer)
    except Exception as error:
        reason = (str(error).strip() or "?").splitlines()[0]
        return [f"{case}\n    {type(error).__name__}: {reason}"]
    return []


def _here(case: Case) -> Any:
    try:
        return [on_rank(case)]
    except Exception as error:
        return error
