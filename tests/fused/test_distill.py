"""The fused divergence against float64 and the unfused one: values, gradients, memory, traffic."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs import linear_kl_div, vocab_parallel_kl_div
from mcore_logprobs.bench.counting import CollectivesMade
from tests.helpers.distributed import grid_groups
from tests.helpers.memory import TensorsMade
from tests.helpers.oracles import assert_no_worse, finished_logits

KINDS = ("forward", "reverse", "jsd")
S, B, H, V = 6, 2, 8, 66
TRUE = 44  # the last of three ranks has none of it
SPEC = {"logit_scale": 0.9, "softcap": 5.0, "temperature": 0.7}
TEACHER_SPEC = {"logit_scale": 1.2, "softcap": 6.0, "temperature": 1.1}


def test_against_plain_torch_in_float64() -> None:
    """KL(teacher || student) on one process, line by line."""
    # 5 rows in tiles of 2 leave a ragged tile; 9 columns, of which the last is padding; widths of
    # 3 and 4, unlike every other size, so that a transposed product cannot pass.
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    teacher_hidden = torch.randn(5, 4, dtype=torch.float64)
    teacher_weight = torch.randn(9, 4, dtype=torch.float64)
    upstream = torch.randn(5, dtype=torch.float64)
    value = linear_kl_div(
        hidden,
        weight,
        teacher_hidden=teacher_hidden,
        teacher_weight=teacher_weight,
        kind="forward",
        temperature=0.7,
        teacher_temperature=1.2,
        vocab_size=8,
        chunk_size=2,
    )
    grads = torch.autograd.grad(value, [hidden, weight], upstream)

    logp = (hidden @ weight[:8].t() / 0.7).log_softmax(-1)
    logq = (teacher_hidden @ teacher_weight[:8].t() / 1.2).log_softmax(-1)
    expected = (logq.exp() * (logq - logp)).sum(-1)
    expected_grads = torch.autograd.grad(expected, [hidden, weight], upstream)

    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-12, atol=1e-12)


def make(dtype: torch.dtype, *, bias: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(11)

    def randn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "hidden": randn(S, B, H),
        "weight": randn(V, H),
        "bias": randn(V) - 300.0 if bias else None,  # no maximum starts at 0
        "teacher_hidden": randn(S, B, H + 3),
        "teacher_weight": randn(V, H + 3),
        "teacher_bias": randn(V) - 200.0 if bias else None,
        "upstream": randn(S, B, dtype=torch.float32),
        "mask": torch.rand(S, B, generator=generator) < 0.7,
    }


def reference(data: dict[str, Any], kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Plain autograd on the whole logits, jsd with beta 0.3; rows outside the mask left out."""
    leaves = {
        name: None
        if data[name] is None
        else data[name].to(torch.float64 if dtype == torch.float64 else data[name].dtype)
        for name in ("hidden", "weight", "bias")
    }
    for leaf in leaves.values():
        if leaf is not None:
            leaf.requires_grad_()
    hidden, weight = leaves["hidden"].to(dtype), leaves["weight"].to(dtype)
    other = data["teacher_hidden"].to(dtype) @ data["teacher_weight"].to(dtype).t()
    options: dict[str, Any] = {"vocab_size": TRUE, "dtype": dtype}
    s = finished_logits(hidden @ weight.t(), bias=leaves["bias"], **SPEC, **options)[..., :TRUE]
    t = finished_logits(other, bias=data["teacher_bias"], **TEACHER_SPEC, **options)[..., :TRUE]
    logp, logq = s.log_softmax(-1), t.log_softmax(-1)
    p, q = logp.exp(), logq.exp()
    if kind == "forward":
        value = (q * (logq - logp)).sum(-1)
    elif kind == "reverse":
        value = (p * (logp - logq)).sum(-1)
    else:
        mixture = (0.3 * q + 0.7 * p).log()
        value = 0.3 * (q * (logq - mixture)).sum(-1) + 0.7 * (p * (logp - mixture)).sum(-1)
    value = torch.where(data["mask"], value, 0.0)
    value.backward(data["upstream"].to(dtype))
    found = {"value": value.detach()}
    return found | {name: leaf.grad for name, leaf in leaves.items() if leaf is not None}


def run_fused(data: dict[str, Any], kind: str, given: bool, options: dict[str, Any]) -> dict:
    """One rank's call and backward."""
    groups = grid_groups(tp=torch.distributed.get_world_size())
    tp, rank = groups.tp.size(), groups.tp.rank()

    def shard(name: str) -> Tensor | None:
        return None if data[name] is None else data[name].chunk(tp)[rank].clone()

    scatter = options.get("sequence_parallel", False)
    hidden = shard("hidden") if scatter else data["hidden"].clone()
    other = shard("teacher_hidden") if scatter else data["teacher_hidden"]
    leaves = {"hidden": hidden, "weight": shard("weight"), "bias": shard("bias")}
    for leaf in leaves.values():
        if leaf is not None:
            leaf.requires_grad_()
    weight: Any = leaves["weight"]
    if options.get("gradient_accumulation_fusion"):
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
        weight.grad_added_to_main_grad = False
    if given:
        logits = data["teacher_hidden"].double() @ shard("teacher_weight").double().t()
        if data["teacher_bias"] is not None:
            raise AssertionError("given logits have no separate bias")
        teacher = {"teacher_logits": logits.float()}
    else:
        teacher = {
            "teacher_hidden": other,
            "teacher_weight": shard("teacher_weight").requires_grad_(),
            "teacher_bias": shard("teacher_bias"),
        }
    with CollectivesMade() as made:
        value = linear_kl_div(
            hidden,
            weight,
            **teacher,
            bias=leaves["bias"],
            kind=kind,
            beta=0.3,
            mask=data["mask"],
            tp_group=groups.tp,
            vocab_size=TRUE,
            teacher_temperature=TEACHER_SPEC["temperature"],
            teacher_logit_scale=TEACHER_SPEC["logit_scale"],
            teacher_softcap=TEACHER_SPEC["softcap"],
            **SPEC,
            **options,
        )
    value.backward(data["upstream"])
    if not given:
        assert teacher["teacher_weight"].grad is None
    found = {name: leaf.grad for name, leaf in leaves.items() if leaf is not None}
    if options.get("gradient_accumulation_fusion"):
        assert weight.grad_added_to_main_grad
        found["weight"] = weight.main_grad - 1.0
    return found | {"value": value, "collectives": made.names}


def check(results: list[dict], data: dict, kind: str, *, scattered: bool = False) -> None:
    exact = reference(data, kind, torch.float64)
    plain = reference(data, kind, torch.float32)
    for result in results:
        assert result["value"].dtype == torch.float32
        assert torch.equal(result["value"], results[0]["value"])
        if not scattered:
            assert torch.equal(result["hidden"], results[0]["hidden"])
    found = {"value": results[0]["value"], "hidden": results[0]["hidden"]}
    if scattered:
        found["hidden"] = torch.cat([result["hidden"] for result in results])
    for name in ("weight", "bias"):
        if data[name] is not None:
            found[name] = torch.cat([result[name] for result in results])
    for name, got in found.items():
        assert_no_worse(got, plain[name], exact[name], name=name, ulps=16)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [False, True])
def test_matches_float64(ranks, world: int, kind: str, given: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        data = make(dtype)
        results = ranks(world).run(run_fused, data, kind, given, {"chunk_size": 5})
        check(results, data, kind)
        assert results[0]["hidden"].dtype == results[0]["weight"].dtype == dtype
        second = ["all_reduce"] if kind == "jsd" else []
        assert results[0]["collectives"] == (["all_gather", *second] if world > 1 else [])


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"sequence_parallel": True, "chunk_size": 4},
        {"compact": True},
        {"compact": True, "sequence_parallel": True, "chunk_size": 2},
        {"gradient_accumulation_fusion": True, "chunk_size": 3},
    ],
    ids=lambda options: "-".join(options),
)
def test_megatron_options(ranks, given: bool, options: dict) -> None:
    data = make(torch.float32)
    scattered = options.get("sequence_parallel", False)
    results = ranks(2).run(run_fused, data, "reverse", given, options)
    check(results, data, "reverse", scattered=scattered)


@pytest.mark.parametrize("kind", KINDS)
def test_biases_of_either_side(ranks, kind: str) -> None:
    data = make(torch.float32, bias=True)
    results = ranks(2).run(run_fused, data, kind, False, {"chunk_size": 5})
    check(results, data, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [False, True])
def test_equals_unfused_and_holds_no_logits(kind: str, dtype: torch.dtype, given: bool) -> None:
    n, h, v = 512, 16, 4096
    hidden, weight = torch.randn(n, h, dtype=dtype), torch.randn(v, h, dtype=dtype)
    other, other_weight = torch.randn(n, h, dtype=dtype), torch.randn(v, h, dtype=dtype)
    upstream = torch.randn(n)
    teacher_logits = other.float() @ other_weight.float().t()
    teacher = {"teacher_hidden": other, "teacher_weight": other_weight}
    if given:
        teacher = {"teacher_logits": teacher_logits}

    plain = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    want = vocab_parallel_kl_div(plain[0].float() @ plain[1].float().t(), teacher_logits, kind=kind)
    want.backward(upstream)

    hidden.requires_grad_()
    weight.requires_grad_()
    with TensorsMade() as made:
        got = linear_kl_div(hidden, weight, **teacher, kind=kind, chunk_size=64)
        got.backward(upstream)
    assert_no_worse(got, want, want.double(), ulps=8)
    for mine, theirs in ((hidden.grad, plain[0].grad), (weight.grad, plain[1].grad)):
        limit = 1e-5 if dtype == torch.float32 else 2.0**-7
        assert (mine - theirs).abs().max() <= limit * theirs.abs().max()
    # The largest tensor is a float32 tile of 64 rows; whole logits would be 8 of them.
    assert max(tensor.nbytes for tensor in made.made) <= 64 * v * 4


def test_hidden_size_and_layout_of_the_teachers_logits() -> None:
    """Given logits [b, s, V] seen as [s, b, V] are read in place."""
    data = make(torch.float32)
    other = data["teacher_hidden"] @ data["teacher_weight"].t()  # [s, b, V]
    hidden, weight = data["hidden"], data["weight"]
    want = linear_kl_div(hidden, weight, other)
    lying = other.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(linear_kl_div(hidden, weight, lying), want)
    flat = linear_kl_div(hidden.flatten(0, 1), weight, other.flatten(0, 1))
    assert torch.equal(flat, want.flatten())
    mask = data["mask"]
    for logits in (other, lying):
        kept = linear_kl_div(hidden, weight, logits, mask=mask, compact=True, chunk_size=4)
        torch.testing.assert_close(kept, want * mask)


def _of_dtensor(hidden: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    teacher = distribute_tensor(logits, mesh, [Shard(1)])
    return linear_kl_div(hidden, weight.chunk(2)[mesh.get_local_rank()], teacher)


def test_a_dtensor_of_the_teachers_logits_brings_its_group(ranks) -> None:
    hidden, weight, logits = torch.randn(4, 3), torch.randn(10, 3), torch.randn(4, 10)
    want = linear_kl_div(hidden, weight, logits)
    for found in ranks(2).run(_of_dtensor, hidden, weight, logits):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(kind: str) -> None:
    hidden, weight = torch.empty(0, 8, requires_grad=True), torch.randn(10, 8, requires_grad=True)
    value = linear_kl_div(hidden, weight, torch.empty(0, 10), kind=kind)
    value.sum().backward()
    assert value.shape == (0,)
    assert hidden.grad.shape == (0, 8)
    assert (weight.grad == 0).all()


def test_refuses_what_it_cannot_do() -> None:
    hidden, weight, logits = torch.randn(4, 8), torch.randn(10, 8), torch.randn(4, 10)
    teacher = {"teacher_hidden": torch.randn(4, 6), "teacher_weight": torch.randn(10, 6)}
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "teacher: expected either teacher_logits or"),
        ({"teacher_logits": logits, **teacher}, "teacher: expected either teacher_logits or"),
        ({"teacher_logits": logits, "teacher_bias": torch.ones(10)}, "teacher_bias: expected None"),
        ({"teacher_logits": logits[:3]}, "teacher_logits: expected shape (4, 10)"),
        ({"teacher_hidden": hidden}, "teacher_weight: expected a torch.Tensor, got NoneType"),
        ({**teacher, "teacher_weight": torch.randn(9, 6)}, "teacher_weight: expected the student"),
        ({**teacher, "teacher_hidden": torch.randn(3, 6)}, "teacher_hidden: expected hidden's"),
        ({"teacher_logits": logits, "kind": "?"}, "kind: expected one of"),
        ({"teacher_logits": logits, "compact": True}, "compact=True: expected a mask"),
        ({"teacher_logits": logits, "compact": logits}, "compact: expected True or False"),
        ({"teacher_logits": logits, "mask": torch.ones(4)}, "mask: expected a bool tensor"),
        ({"teacher_logits": logits, "backend": "inductor"}, "backend: expected one of"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            linear_kl_div(hidden, weight, **options)
