"""Operations from hidden states on the rows of a context-parallel rank, gathered, in float64.

Under context parallelism a rank calls them on its own tokens: per-token arguments are sharded
beside them, results are gathered, and the weight's gradient is summed over the ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import megatron.core  # noqa: F401  (the ranks' fork server imports it once for all of them)
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_logprobs import (
    context_parallel_gather,
    context_parallel_shard,
    linear_kl_div,
    linear_map,
    vocab_parallel_entropy,
)
from mcore_logprobs.groups import group_rank, group_size
from tests.fused.common import Problem, make_problem
from tests.fused.test_linear_ops import (
    DistillCase,
    GatherCase,
    OpCase,
    TopKCase,
    _tuple,
    _upstream,
)
from tests.fused.test_sampling import SamplingCase, _kept
from tests.fused.test_topk_divergence import DivergenceCase, _teacher
from tests.helpers.distributed import get_pool, grid_groups

LEAD = (12, 3)  # 2 * CP and CP * TP divide 12; 18 rows a rank, which the tiles of 5 do not divide
HEAD = {"logit_scale": 0.7, "softcap": 5.0, "chunk_size": 5}
FINISH = {**HEAD, "temperature": 1.4, "vocab_size": 17}


class MapCase(OpCase):
    def call(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, **parallel: Any) -> Any:
        (scale,) = self.args

        def fn(z: Tensor, scale: Tensor) -> Tensor:
            return vocab_parallel_entropy(z, tp_group=parallel["tp_group"]) * scale

        return linear_map(hidden, weight, fn, scale, bias=bias, **parallel, **self.options)

    def expected(self, z: Tensor) -> tuple[Tensor, ...]:
        logp = z.log_softmax(-1)
        return (-(logp.exp() * logp).sum(-1) * self.args[0].to(z.dtype),)


class KLCase(OpCase):
    """args: the teacher's logits, all columns."""

    def call(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, **parallel: Any) -> Any:
        group = parallel["tp_group"]
        mine = self.args[0].tensor_split(group_size(group), -1)[group_rank(group)]
        return linear_kl_div(hidden, weight, mine, bias=bias, **parallel, **self.options)

    def expected(self, z: Tensor) -> tuple[Tensor, ...]:
        teacher = self.args[0].to(z.dtype)
        finish = {k: self.options[k] for k in ("temperature", "vocab_size")}
        teacher = (teacher / finish["temperature"])[..., : finish["vocab_size"]]
        student = z[..., : finish["vocab_size"]]
        p, q = student.log_softmax(-1), teacher.log_softmax(-1)
        return ((q.exp() * (q - p)).sum(-1),)


def cases(problem: Problem) -> dict[str, OpCase]:
    """Each operation with a temperature, a mask of columns and what else it takes."""
    lead = problem.target.shape
    ids = torch.randint(0, 17, (*lead, 4))
    ids[1], ids[4, 1] = -100, -100
    mask = torch.arange(lead.numel()).view(lead) % 4 != 1
    _, teacher, chosen = _teacher(lead, 17)
    sampling = {**FINISH, "top_p": 0.8, "compact": True}
    made: dict[str, OpCase] = {
        "map": MapCase(problem, HEAD, args=(torch.rand(lead) + 0.5,)),
        "gather": GatherCase(problem, {**FINISH, "log_softmax": True}, args=(ids,)),
        "logits": GatherCase(problem, {**FINISH, "compact": True}, args=(ids,)),
        "topk": TopKCase(problem, {**FINISH, "mask": mask}, args=(3,)),
        "sampling": SamplingCase(problem, sampling),
        "kl": KLCase(problem, FINISH, args=(torch.randn(*lead, 24),)),
        "topk kl": DivergenceCase(
            problem, {**FINISH, "kind": "jsd", "tail": "bin"}, args=(teacher, chosen)
        ),
        "distill": DistillCase(
            problem,
            {**FINISH, "normalize": "topk", "entropy": True, "mask": mask, "compact": True},
            args=(torch.randn(*lead, 5), torch.randint(0, 17, (*lead, 5))),
        ),
    }
    made["sampling"].kept = _kept(problem, sampling)  # type: ignore[attr-defined]
    return made


def on_rank(case: OpCase, tp: int, sequence_parallel: bool) -> tuple[Any, dict[str, Tensor]]:
    """The whole results and gradients (of what is split over TP, this rank's)."""
    groups = grid_groups(tp=tp, cp=2)

    def cut(x: Any) -> Any:
        """This rank's tokens of whatever has the tokens' leading shape."""
        if not isinstance(x, Tensor) or x.shape[:2] != LEAD:
            return x
        return context_parallel_shard(x, cp_group=groups.cp, seq_dim=0)

    problem = case.problem
    part, of = dist.get_rank() % tp, lambda x: x.tensor_split(tp)[dist.get_rank() % tp].clone()
    local = replace(
        case,
        problem=replace(problem, hidden=cut(problem.hidden), target=cut(problem.target)),
        options={name: cut(x) for name, x in case.options.items()},
        args=tuple(map(cut, case.args)),
    )
    hidden = local.problem.hidden
    hidden = hidden.tensor_split(tp)[part].clone() if sequence_parallel else hidden.clone()
    leaves = {name: x.clone() if name == "A" else of(x) for name, x in problem.leaves().items()}
    leaves["hidden"] = hidden
    for leaf in leaves.values():
        leaf.requires_grad_()
    # As Megatron adds up over ranks: in float32.
    main_grad = leaves["weight"].main_grad = torch.zeros_like(leaves["weight"], dtype=torch.float32)
    found = local.call(
        hidden,
        leaves["weight"],
        leaves.get("bias"),
        lora=problem.lora and (leaves["A"], leaves["B"], problem.lora[2]),
        tp_group=groups.tp,
        sequence_parallel=sequence_parallel,
        gradient_accumulation_fusion=True,
    )
    whole = tuple(
        context_parallel_gather(x, cp_group=groups.cp, seq_dim=0, grad="slice")
        for x in _tuple(found)
        if x is not None
    )
    roots = [x for x in whole if x.requires_grad]
    upstream = [_upstream(x) for x in roots]
    grads = torch.autograd.grad(roots, list(leaves.values()), upstream, allow_unused=True)
    d_hidden, none, *rest = grads
    assert none is None
    others = [main_grad, *rest]
    for grad in others:
        dist.all_reduce(grad, group=groups.cp)
    others[0] = main_grad.to(problem.weight.dtype)
    if sequence_parallel:
        d_hidden = torch.cat(_all(d_hidden, groups.tp))
    d_hidden = context_parallel_gather(d_hidden, cp_group=groups.cp, seq_dim=0)
    return whole, dict(zip(leaves, (d_hidden, *others), strict=True))


def _all(x: Tensor, group: Any) -> list[Tensor]:
    found = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(found, x.contiguous(), group=group)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (3, True)]
)
def test_rows_of_a_context_parallel_rank(tp, sequence_parallel, dtype):
    # Without main_grad the ranks' bfloat16 parts of a gradient are rounded once more each.
    more = {"bias": True, "lora": True} if dtype == torch.float32 else {}
    for case in cases(make_problem(LEAD, dtype=dtype, true_vocab=17, **more)).values():
        runs = get_pool(2 * tp).run(on_rank, case, tp, sequence_parallel)
        for cp_rank in range(2):
            case.layout = (tp, False)  # dHidden is gathered
            case.runs = runs[tp * cp_rank : tp * (cp_rank + 1)]
            case.check()
