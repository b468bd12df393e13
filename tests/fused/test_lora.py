"""A LoRA on the head, exactly: every gradient against float64, and what a frozen weight saves."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_logprobs
from mcore_logprobs import (
    linear_gather,
    linear_kl_div,
    linear_map,
    linear_policy_loss,
    linear_token_stats,
    vocab_parallel_token_stats,
)
from mcore_logprobs.bench.counting import CollectivesMade
from tests.fused.common import LAYOUTS, make_problem
from tests.fused.test_context_parallel import FINISH, cases
from tests.fused.test_linear_ops import OpCase
from tests.fused.test_sampling import SamplingCase
from tests.fused.test_topk_divergence import BETA, plain
from tests.helpers import oracles
from tests.helpers.distributed import get_pool
from tests.logits.common import world_group, world_rank, world_size

RANK, SCALE = 3, 1.7
OPTIONS = {
    "plain": {},
    "bias, softcap, masked": {"softcap": 4.0, "logit_scale": 0.6, "vocab_size": 17},
}


@dataclass
class LoRACase:
    """One call with a LoRA, on each rank, against the same in plain torch in float64."""

    how: str
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    bias: bool = False
    frozen: bool = False
    chunk_size: int | None = 4
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        true_vocab = self.options.get("vocab_size")
        self.problem = make_problem(dtype=self.dtype, bias=self.bias, true_vocab=true_vocab)
        width, vocab = self.problem.hidden.shape[-1], self.problem.weight.shape[0]
        self.a = torch.randn(RANK, width).to(self.dtype)
        self.b = torch.randn(vocab, RANK).to(self.dtype)

    def whole(self) -> dict[str, Tensor]:
        problem = self.problem
        leaves = {"hidden": problem.hidden, "weight": problem.weight, "A": self.a, "B": self.b}
        return leaves | ({} if problem.bias is None else {"bias": problem.bias})

    def on_rank(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(statistics, gradients of the leaves that learn) of this rank."""
        world, rank = world_size(), world_rank()
        leaves = {}
        for name, x in self.whole().items():
            split = name in ("weight", "B", "bias") or (name == "hidden" and self.sequence_parallel)
            x = (x.tensor_split(world)[rank] if split else x).clone()
            leaves[name] = x.requires_grad_(not (self.frozen and name == "weight"))
        results, roots, incoming = self.call(leaves)
        learning = {name: x for name, x in leaves.items() if x.requires_grad}
        grads = torch.autograd.grad(roots, list(learning.values()), incoming)
        return results, dict(zip(learning, grads, strict=True))

    def call(self, leaves: dict[str, Tensor]) -> tuple[dict[str, Tensor], list, list]:
        head: dict[str, Any] = {
            "bias": leaves.get("bias"),
            "lora": (leaves["A"], leaves["B"], SCALE),
            "tp_group": world_group(),
            "sequence_parallel": self.sequence_parallel,
            "chunk_size": self.chunk_size,
        }
        operands, target = (leaves["hidden"], leaves["weight"]), self.problem.target
        upstream = self.problem.upstream
        if self.how == "policy":
            loss, stats = linear_policy_loss(
                *operands,
                target,
                lambda logprobs, entropy, g, h: logprobs * g + entropy * h,
                upstream["logprobs"],
                upstream["entropy"],
                entropy=True,
                **head,
                **self.options,
            )
            return {"logprobs": stats.logprobs, "entropy": stats.entropy}, [loss], [None]
        if self.how == "map":
            options = dict(self.options)
            vocab_size = options.pop("vocab_size", None)

            def fn(z: Tensor, t: Tensor) -> Any:
                return vocab_parallel_token_stats(
                    z, t, entropy=True, tp_group=head["tp_group"], vocab_size=vocab_size
                )

            stats = linear_map(*operands, fn, target, **head, **options)
        else:
            stats = linear_token_stats(
                *operands, target, entropy=True, target_rank=True, **head, **self.options
            )
        results = {name: getattr(stats, name) for name in upstream}
        return results, list(results.values()), list(upstream.values())

    def truth(self, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        leaves = {name: x.to(dtype).requires_grad_() for name, x in self.whole().items()}
        x = leaves["hidden"]
        raw = x @ leaves["weight"].t() + SCALE * (x @ leaves["A"].t()) @ leaves["B"].t()
        stats = oracles.token_stats(
            raw, self.problem.target, bias=leaves.get("bias"), dtype=dtype, **self.options
        )
        names = ("logprobs", "entropy") if self.how == "policy" else tuple(self.problem.upstream)
        results = {name: getattr(stats, name) for name in names}
        total = sum((results[n] * self.problem.upstream[n].to(dtype)).sum() for n in names)
        grads = torch.autograd.grad(total, list(leaves.values()))
        return {n: r.detach() for n, r in results.items()}, dict(zip(leaves, grads, strict=True))

    def check(self, world: int) -> None:
        runs = [self.on_rank()] if world == 1 else get_pool(world).run(self.on_rank)
        exact, exact_grads = self.truth(torch.float64)
        plain, plain_grads = self.truth(torch.float32)
        for results, _ in runs:
            for name, value in results.items():
                oracles.assert_no_worse(value, plain[name], exact[name], name=name, ulps=8.0)
        learning = set(exact_grads) - ({"weight"} if self.frozen else set())
        assert set(runs[0][1]) == learning
        for name in learning:
            parts = [grads[name] for _, grads in runs]
            if name == "A" or (name == "hidden" and not self.sequence_parallel):
                assert all(torch.equal(part, parts[0]) for part in parts), f"d{name} differs"
                found = parts[0]
            else:
                found = torch.cat(parts)
            assert found.dtype == self.dtype
            oracles.assert_no_worse(
                found,
                plain_grads[name].to(self.dtype),
                exact_grads[name],
                name=f"d{name}",
                ulps=8.0,
            )


@pytest.mark.parametrize("how", ["stats", "policy", "map"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_against_float64(layout, dtype, options, how):
    world, sequence_parallel = layout
    bias = bool(options)
    case = LoRACase(how, dtype, options, bias=bias, sequence_parallel=sequence_parallel)
    case.check(world)


@pytest.mark.parametrize("how", ["stats", "policy", "map"])
@pytest.mark.parametrize("layout", [(1, False), (2, True)], ids=str)
def test_a_frozen_weight(layout, how):
    LoRACase(how, frozen=True, sequence_parallel=layout[1]).check(layout[0])


def test_every_operation_from_hidden_states_takes_one():
    names = [name for name in mcore_logprobs.__all__ if name.startswith("linear_")]
    assert len(names) >= 9
    for name in names:
        parameters = inspect.signature(getattr(mcore_logprobs, name)).parameters
        assert parameters["lora"].default is None, name


class OwnHeadCase(OpCase):
    """args: the hidden states of a teacher with the student's own weight, and its LoRA or None."""

    def call(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, **parallel: Any) -> Any:
        (other, lora), world, rank = self.args, world_size(), world_rank()
        if parallel["sequence_parallel"]:
            other = other.tensor_split(world)[rank]
        if lora is not None:
            lora = (lora[0], lora[1].tensor_split(world)[rank], lora[2])
        teacher = {"teacher_hidden": other, "teacher_weight": weight, "teacher_lora": lora}
        return linear_kl_div(
            hidden, weight, beta=BETA, bias=bias, **teacher, **parallel, **self.options
        )

    def expected(self, z: Tensor) -> tuple[Tensor, ...]:
        other, lora = self.args
        teacher = replace(self.problem, hidden=other, bias=None, lora=lora)
        t = teacher.raw(teacher.leaves(), z.dtype) / self.options["temperature"]
        valid = self.options["vocab_size"]
        logp, logq = (x[..., :valid].log_softmax(-1) for x in (z, t))
        return (plain(logp, logq, self.options["kind"], "ignore"),)


def _other_operations(dtype: torch.dtype, **problem: Any) -> dict[str, OpCase]:
    problem = make_problem(dtype=dtype, true_vocab=17, lora=True, **problem)
    made = cases(problem)
    kept = torch.rand(*problem.target.shape, 17) < 0.4
    kept = torch.cat([kept, torch.zeros(*problem.target.shape, 7, dtype=torch.bool)], -1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), kept.sum(-1).flatten().cumsum(0)])
    options = {**FINISH, "kept_ids": (kept.flatten(0, 1).nonzero()[:, 1], offsets)}
    made["replay"] = replay = SamplingCase(problem, options)
    replay.kept = kept
    other = torch.randn(problem.hidden.shape).to(dtype)
    for kind, lora in (("reverse", None), ("jsd", make_problem(dtype=dtype, lora=True).lora)):
        made[f"kl {kind}"] = OwnHeadCase(problem, {**FINISH, "kind": kind}, args=(other, lora))
    return made


OTHERS = tuple(_other_operations(torch.float32))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_other_operations_against_float64(layout, name):
    for dtype in (torch.float32, torch.bfloat16):
        _other_operations(dtype, bias=True)[name].run(layout).check()


@pytest.mark.parametrize("learning", [("A",), ("B",), ("hidden",), ("A", "B")], ids=str)
@pytest.mark.parametrize("how", ["stats", "policy"])
def test_only_some_inputs_learn(how, learning):
    case = LoRACase(how)
    leaves = {n: x.clone().requires_grad_(n in learning) for n, x in case.whole().items()}
    _, roots, incoming = case.call(leaves)
    grads = torch.autograd.grad(roots, [leaves[name] for name in learning], incoming)
    _, exact = case.truth(torch.float64)
    for name, grad in zip(learning, grads, strict=True):
        torch.testing.assert_close(grad.double(), exact[name], rtol=1e-4, atol=1e-4)


def test_the_target_s_rank_counts_the_lora():
    case = LoRACase("stats", torch.float64)
    hidden, weight, target = case.problem.hidden, case.problem.weight, case.problem.target
    lora = (case.a, case.b, SCALE)
    found = linear_token_stats(hidden, weight, target, target_rank=True, lora=lora).target_rank
    raw = hidden @ weight.t() + SCALE * (hidden @ case.a.t()) @ case.b.t()
    own = raw.gather(-1, target.clamp(min=0).unsqueeze(-1))
    expected = torch.where(target >= 0, (raw > own).sum(-1), -1)
    assert torch.equal(found, expected)


def test_several_blocks_of_columns():
    """Wide enough for the vocabulary to be cut as well as the rows."""
    hidden, target = torch.randn(6, 4).double(), torch.randint(0, 18_002, (6,))
    weight, a, b = torch.randn(18_002, 4).double(), torch.randn(1, 4), torch.randn(18_002, 1)
    leaves = [x.double().requires_grad_() for x in (hidden, weight, a, b)]
    upstream = torch.randn(6).double()
    logprobs = linear_token_stats(
        leaves[0], leaves[1], target, lora=(leaves[2], leaves[3], 0.3), chunk_size=4
    ).logprobs
    found = torch.autograd.grad(logprobs, leaves, upstream)
    x, w, a, b = leaves
    logp = (x @ w.t() + 0.3 * (x @ a.t()) @ b.t()).log_softmax(-1)
    expected_logprobs = logp.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    expected = torch.autograd.grad(expected_logprobs, leaves, upstream)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("learning", [("A",), ("B",), ("hidden",), ("A", "B")], ids=str)
def test_only_some_inputs_of_the_other_operations_learn(learning):
    for name, case in _other_operations(torch.float32).items():
        leaves = {n: x.clone() for n, x in case.problem.leaves().items()}
        for leaf in learning:
            leaves[leaf].requires_grad_()
        lora = (leaves["A"], leaves["B"], case.problem.lora[2])
        found = case.call(
            leaves["hidden"],
            leaves["weight"],
            None,
            lora=lora,
            tp_group=None,
            sequence_parallel=False,
        )
        outputs, incoming = zip(*case.roots(found).values(), strict=True)
        grads = torch.autograd.grad(outputs, [leaves[n] for n in learning], incoming)
        exact = case.truth().grads
        for leaf, grad in zip(learning, grads, strict=True):
            torch.testing.assert_close(
                grad.double(), exact[leaf], rtol=1e-4, atol=1e-4, msg=f"{name}, d{leaf}"
            )


def test_an_entry_that_nobody_asks_for_adds_nothing():
    """Rows that hold NaN, and ids that no gradient comes to, in the gradients of A and B."""
    problem = make_problem((6,), lora=True)
    hidden, (a, b, scale) = problem.hidden, problem.lora
    ids = torch.tensor([[0, 3], [1, 1], [2, 3], [3, 9], [4, 5], [5, 0]])
    upstream = torch.randn(6, 2)
    upstream[2] = 0.0
    found = []
    for spoilt in (True, False):
        x = hidden.clone()
        if spoilt:
            x[2] = torch.nan
        leaves = [t.clone().requires_grad_() for t in (x, a, b)]
        z = linear_gather(leaves[0], problem.weight, ids, lora=(*leaves[1:], scale), softcap=5.0)
        found.append(torch.autograd.grad(z, leaves, upstream))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
        assert other.any()


def test_a_spoilt_row_that_is_asked_for_shows_before_the_lora_has_learnt():
    """With B = 0, as a LoRA starts, too."""
    problem = make_problem((6,), lora=True)
    hidden, (a, b, scale) = problem.hidden.clone(), problem.lora
    hidden[2] = torch.nan
    leaves = [a.clone().requires_grad_(), torch.zeros_like(b).requires_grad_()]
    z = linear_gather(hidden, problem.weight, torch.zeros(6, 2).long(), lora=(*leaves, scale))
    for grad in torch.autograd.grad(z.sum(), leaves):
        assert grad.isnan().any()


def _sent(learning_a: bool) -> list[tuple[str, int]]:
    """What a call with a LoRA on a frozen head and its backward send more than one without."""
    case, made = LoRACase("stats", chunk_size=None), []
    weight = case.problem.weight.tensor_split(world_size())[world_rank()]
    b = case.b.tensor_split(world_size())[world_rank()].clone().requires_grad_()
    for lora in (None, (case.a.clone().requires_grad_(learning_a), b, SCALE)):
        hidden = case.problem.hidden.clone().requires_grad_()
        with CollectivesMade() as calls:
            stats = linear_token_stats(
                hidden, weight, case.problem.target, lora=lora, tp_group=world_group()
            )
            stats.logprobs.sum().backward()
        made.append([(call.name, call.nbytes) for call in calls.made])
    without, with_lora = made
    assert with_lora[: len(without)] == without
    return with_lora[len(without) :]


def test_one_small_all_reduce_for_the_gradient_of_a(ranks):
    width = LoRACase("stats").problem.hidden.shape[-1]
    for more in ranks(2).run(_sent, True):
        assert more == [("all_reduce", 4 * RANK * width)]
    for more in ranks(2).run(_sent, False):
        assert more == []


def _mistake(kind: str, a: Tensor, b: Tensor) -> Any:
    return {
        "not a tuple": a,
        "two": (a, b),
        "A transposed": (a.t(), b, SCALE),
        "B of the whole vocabulary": (a, torch.cat([b, b]), SCALE),
        "another rank": (a[:2], b, SCALE),
        "A in another dtype": (a.bfloat16(), b, SCALE),
        "B in another dtype": (a, b.double(), SCALE),
        "scale a tensor": (a, b, torch.tensor(2.0)),
        "scale infinite": (a, b, float("inf")),
        "scale a bool": (a, b, True),
        "no B": (a, None, SCALE),
        "no rank": (a[:0], b[:, :0], SCALE),
        "A flat": (a[0], b, SCALE),
    }[kind]


def _refused(kind: str) -> tuple[str, list[str]]:
    case = LoRACase("stats")
    hidden, target = case.problem.hidden, case.problem.target
    weight, b = (x.tensor_split(world_size())[world_rank()] for x in (case.problem.weight, case.b))
    lora = _mistake(kind, case.a, b)
    with CollectivesMade() as made:
        try:
            linear_token_stats(hidden, weight, target, lora=lora, tp_group=world_group())
        except ValueError as error:
            return str(error), made.names
    return "", made.names


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("not a tuple", ("tuple", "got Tensor")),
        ("two", ("tuple", "2 values")),
        ("A transposed", ("[r, 8]", "(8, 3)")),
        ("B of the whole vocabulary", ("[12, 3]", "(24, 3)")),
        ("another rank", ("[12, 2]", "(12, 3)")),
        ("A in another dtype", ("A", "float32", "bfloat16")),
        ("B in another dtype", ("B", "float32", "float64")),
        ("scale a tensor", ("scale", "tensor(2.)")),
        ("scale infinite", ("scale", "inf")),
        ("scale a bool", ("scale", "True")),
        ("no B", ("B", "NoneType")),
        ("no rank", ("[r, 8]", "(0, 8)")),
        ("A flat", ("[r, 8]", "(8,)")),
    ],
)
def test_mistakes_are_refused_before_anything_is_sent(ranks, kind, parts):
    for message, sent in ranks(2).run(_refused, kind):
        assert message.startswith("lora: ")
        assert sent == []
        for part in parts:
            assert part in message, f"{part!r} is missing in: {message}"
