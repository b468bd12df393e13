"""Each framework's own function and ours on the same inputs, where its file loads on a CPU.

One float64 reference decides which of the two is right where they differ; what is asserted of
upstream's mistakes is asserted so that their repair is noticed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs.dropin import areal, ms_swift, skyrl, verl
from tests.dropin.common import VOCAB
from tests.dropin.frameworks import load
from tests.megatron.common import megatron, relative

ROWS = 9


def theirs(framework: str) -> Any:
    if framework == "verl":
        return load("verl", "verl/utils/megatron/tensor_parallel.py")
    if framework == "areal":
        stand_in = {"areal__infra__platforms": {"is_npu_available": True}}  # no torch.compile
        return load("areal", "areal/utils/functional/vocab_parallel.py", **stand_in)
    if framework == "ms_swift":
        return load("ms-swift", "swift/megatron/trainers/vocab_parallel_utils.py")
    from tests.dropin.audited import skyrl as loaded

    return loaded


def calls(module: Any, tp: Any, start: int, end: int) -> dict[str, Any]:
    """What is called on either side, by framework; (logits [1, n, v], labels [1, n]) -> tensors."""
    name = module.__name__
    if "verl" in name:
        return {
            "entropy": lambda z, t: module.vocab_parallel_entropy(z[0]),
            "logprobs": lambda z, t: module.vocab_parallel_log_probs_from_logits(z, t),
            "sum_pi_squared": lambda z, t: module.vocab_parallel_sum_pi_squared(z[0]),
        }
    if "areal" in name or "functional" in name:
        return {
            "logprobs": lambda z, t: module.gather_logprobs(z[0], t[0], 0.7, tp, 4),
            "both": lambda z, t: sum(
                module.gather_logprobs_entropy(z[0], t[0], temperature=0.7, tp_group=tp)
            ),
        }
    if "swift" in name:
        return {
            "both": lambda z, t: sum(module.compute_logps_and_entropy_from_logits(z, t, True)),
            "kl": lambda z, t: module.vocab_parallel_kl_div(
                module.vocab_parallel_log_softmax(z),
                module.vocab_parallel_log_softmax(z * 0.5 + 0.1 * z.detach() ** 2),
            ),
        }
    return {
        "logprobs": lambda z, t: module.from_parallel_logits_to_logprobs(
            z, t, start, end, tp, chunk_size=4
        ),
        "entropy": lambda z, t: module.vocab_parallel_entropy(z),
        "weighted": lambda z, t: module.vocab_parallel_entropy_weighted_sum(
            z[0], torch.linspace(0, 1, ROWS), chunk_size=4
        ),
    }


def exact(framework: str, name: str, z: Tensor, t: Tensor) -> Tensor:
    """The same from whole logits `[1, n, V]`, in their dtype."""
    if framework == "areal":
        z = z / 0.7
    log_p = z.log_softmax(-1)
    logprobs = log_p.gather(-1, t.clamp(min=0)[..., None])[..., 0].where(t >= 0, 0.0)
    entropy = -(log_p.exp() * log_p).sum(-1)
    if name == "kl":
        other = (z * 0.5 + 0.1 * z.detach() ** 2).log_softmax(-1)
        return (other.exp() * (other - log_p)).sum(-1)
    if framework == "skyrl" and name == "logprobs":
        return log_p.gather(-1, t.roll(-1, 1)[..., None])[:, :-1, 0]
    weights = torch.linspace(0, 1, ROWS, dtype=z.dtype)
    return {
        "logprobs": logprobs,
        "entropy": entropy,
        "both": logprobs + entropy,
        "sum_pi_squared": log_p.exp().square().sum(-1),
        "weighted": (entropy * weights).sum(),
    }[name]


def run(tp: int, framework: str, logits: Tensor, labels: Tensor, upstream: Tensor) -> dict:
    own = {"verl": verl, "areal": areal, "ms_swift": ms_swift, "skyrl": skyrl}[framework]
    found: dict[str, float] = {}
    with megatron(tp=tp) as parallel_state:
        group = parallel_state.get_tensor_model_parallel_group()
        width = VOCAB // tp
        start, end = group.rank() * width, (group.rank() + 1) * width
        sides = {"ours": own, "theirs": theirs(framework)}
        made = {side: calls(m, group, start, end) for side, m in sides.items()}
        assert made["ours"].keys() == made["theirs"].keys()
        for name in made["ours"]:
            whole = logits.double().requires_grad_()
            want = exact(framework, name, whole, labels)
            weight = upstream.double().reshape(-1)[: want.numel()].reshape(want.shape)
            (want * weight).sum().backward()
            assert whole.grad is not None
            for side in sides:
                leaf = logits[..., start:end].clone().requires_grad_()
                got = made[side][name](leaf * 1, labels.clone())
                (got.reshape(want.shape) * weight.float()).sum().backward()
                assert leaf.grad is not None
                found[f"{name} {side} value"] = relative(got.reshape(want.shape), want)
                found[f"{name} {side} gradient"] = relative(
                    leaf.grad, whole.grad[..., start:end].float()
                )
    return found


@pytest.mark.parametrize("framework", ["verl", "areal", "ms_swift", "skyrl"])
def test_ours_and_theirs(ranks, framework: str) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, ROWS, VOCAB, generator=generator) * 2
    labels = torch.randint(0, VOCAB, (1, ROWS), generator=generator)
    if framework == "ms_swift":
        labels[0, 2] = -100
    upstream = torch.randn(1, ROWS, generator=generator)
    results = ranks(2).run(run, 2, framework, logits, labels, upstream)
    worst = {what: max(result[what] for result in results) for what in results[0]}
    assert max(e for what, e in worst.items() if " ours " in what) < 1e-5, worst
    # verl's all-reduces of sum exp and sum exp^2 are unknown to autograd.
    wrong = {"sum_pi_squared theirs gradient"} if framework == "verl" else set()
    assert {what for what, e in worst.items() if e > 1e-4} == wrong
