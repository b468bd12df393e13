"""Objectives and corrections against the frameworks' own functions, taken from their source.

A function is compiled alone, out of its file: what it needs of its package is given by name.
docs/objectives.md explains the differences.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_logprobs import losses
from tests.dropin.frameworks import source_root

F64 = torch.float64


def published(distribution: str, file: str, *names: str, **scope: Any) -> SimpleNamespace:
    """Functions and methods of a file, by name, without decorators, annotations and imports."""
    tree = ast.parse((source_root(distribution) / file).read_text())
    scope = {"torch": torch, "math": math, "F": F, "Any": Any, "Optional": Optional, **scope}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list, node.returns = [], None
            for argument in [*node.args.args, *node.args.kwonlyargs]:
                argument.annotation = None
            exec(compile(ast.Module([node], []), file, "exec"), scope)
    return SimpleNamespace(**{name: scope[name] for name in names})


class Config(SimpleNamespace):
    """A framework's configuration object."""

    global_batch_info: dict[str, Any] = {}  # noqa: RUF012

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def _verl(name: str) -> Callable[..., Tensor]:
    functional = published(
        "verl", "verl/utils/torch_functional.py", "masked_sum", "masked_mean", np=None
    )
    algos = published(
        "verl",
        "verl/trainer/ppo/core_algos.py",
        name,
        "agg_loss",
        verl_F=functional,
        ActorConfig=Config,
        AlgoConfig=type("AlgoConfig", (), {}),
    )
    loss = vars(algos)[name]

    def call(
        x: dict[str, Tensor], new: Tensor, mode: str = "token-mean", **settings: Any
    ) -> Tensor:
        policy = {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.0, "clip_cov_ub": 5.0}
        policy |= {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.7, "dro_beta": 0.3}
        config = Config(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28)
        vars(config).update(settings, policy_loss=SimpleNamespace(**policy))
        return loss(x["old"], new, x["a"], x["mask"], loss_agg_mode=mode, config=config)[0]

    return call


def _skyrl_published(file: str, *names: str) -> SimpleNamespace:
    folder = "skyrl/backends/skyrl_train/utils"
    utils = published("skyrl", f"{folder}/torch_utils.py", "masked_mean", "safe_exp_delta")
    return published(
        "skyrl",
        f"{folder}/{file}",
        *names,
        apply_off_policy_correction=lambda loss, old, rollout, mask, config: (loss, mask, {}),
        **vars(utils),
    )


def _skyrl(name: str) -> Callable[..., Tensor]:
    algos = _skyrl_published("ppo_utils.py", name, "reduce_loss")

    def call(x: dict[str, Tensor], new: Tensor, **settings: Any) -> Tensor:
        config = Config(off_policy_correction=None, eps_clip_low=0.2, eps_clip_high=0.28)
        vars(config).update({k: SimpleNamespace(**v) for k, v in settings.items()})
        found = vars(algos)[name](new, x["old"], x["a"], config, x["mask"])[0]
        return found / x["mask"].sum()  # its advantages carry the denominator

    return call


def _batch(spread: float = 0.4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    old = -torch.rand(5, 9, generator=generator, dtype=F64) * 3 - 0.02
    noise = torch.randn(5, 9, generator=generator, dtype=F64) * spread
    mask = torch.arange(9) < torch.tensor([9, 4, 6, 1, 8]).unsqueeze(1)
    return {
        "old": old,
        "new": torch.minimum(old + noise, torch.tensor(-1e-3, dtype=F64)),
        "a": torch.tensor([[1.0], [-0.7], [0.4], [-1.2], [2.0]], dtype=F64).expand(5, 9),
        "mask": mask.double(),
    }


def _ours(loss: losses.TokenLoss, **how: Any) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """The objective in as many passes as it takes, aggregated."""

    def call(x: dict[str, Tensor], new: Tensor) -> Tensor:
        numbers = {"old_logprobs": x["old"], "advantages": x["a"], "teacher_logprobs": x["old"]}
        if loss.passes == 2:
            numbers |= loss.second_pass(new, x["old"], x["a"], x["mask"])
        per_token = loss(new, None, *(numbers[name] for name in loss.tensors))
        found = losses.aggregation(x["mask"], dtype=F64, **how)
        weights = 1.0 if found.weights is None else found.weights
        return (per_token * weights * x["mask"]).sum() / found.denominator

    return call


SEQUENCES = {"mode": "sequence"}
# Ours, theirs.
PAIRS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "verl dppo_tv": (
        _ours(losses.DPPOLoss(low=0.1, high=0.15, cap=3.0)),
        lambda x, new: _verl("compute_policy_loss_dppo_tv")(
            x, new, clip_ratio_low=0.1, clip_ratio_high=0.15, clip_ratio_c=3.0
        ),
    ),
    "verl dppo_kl": (
        _ours(losses.DPPOLoss(divergence="kl", low=0.02, high=0.03)),
        lambda x, new: _verl("compute_policy_loss_dppo_kl")(
            x, new, clip_ratio_low=0.02, clip_ratio_high=0.03
        ),
    ),
    "verl gspo": (
        _ours(losses.GSPOLoss(0.2, 0.28), **SEQUENCES),
        lambda x, new: _verl("compute_policy_loss_gspo")(x, new, mode="seq-mean-token-mean"),
    ),
    "verl gpg": (_ours(losses.GPGLoss()), _verl("compute_policy_loss_gpg")),
    "verl geo_mean": (
        _ours(losses.GMPOLoss(), **SEQUENCES),
        lambda x, new: _verl("compute_policy_loss_geo_mean")(
            x, new, clip_ratio_low=0.4, clip_ratio_high=0.4
        ),
    ),
    "verl dro": (_ours(losses.DROLoss(tau=0.3, level="token")), _verl("compute_policy_loss_dro")),
    "verl kl_cov": (
        _ours(losses.KLCovLoss(share=0.1, kl_coef=0.7)),
        _verl("compute_policy_loss_kl_cov"),
    ),
    "verl cispo": (
        _ours(losses.CISPOLoss(clip_low=0.2, clip_high=0.28)),
        _verl("compute_policy_loss_cispo"),
    ),
    "verl sapo": (
        _ours(losses.SAPOLoss(), **SEQUENCES),
        lambda x, new: _verl("compute_policy_loss_sapo")(x, new, tau_pos=1.0, tau_neg=1.05),
    ),
    "verl vanilla, dual clip": (
        _ours(losses.ClippedLoss(0.2, 0.28, dual_clip=1.4)),
        lambda x, new: _verl("compute_policy_loss_vanilla")(x, new, clip_ratio_c=1.4),
    ),
    "verl Dr. GRPO": (
        _ours(losses.ClippedLoss(0.2, 0.28, dual_clip=3.0), mode="constant", length=9),
        lambda x, new: _verl("compute_policy_loss_vanilla")(x, new, mode="seq-mean-token-sum-norm"),
    ),
    "skyrl kl_cov": (
        _ours(losses.KLCovLoss(share=0.2)),
        lambda x, new: _skyrl("compute_policy_loss_kl_cov")(
            x, new, kl_cov={"kl_cov_frac": 0.2, "ppo_kl_coef": 1.0}
        ),
    ),
    "skyrl importance_sampling": (
        _ours(losses.ImportanceLoss()),
        _skyrl("importance_sampling_loss"),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_loss_and_its_gradient_are_the_framework_s(name):
    x = _batch()
    ours, theirs = PAIRS[name]
    found = []
    for call in (ours, theirs):
        new = x["new"].clone().requires_grad_()
        value = call(x, new)
        (grad,) = torch.autograd.grad(value, new)
        found.append((value.detach(), grad))
    # Theirs add 1e-8 to some denominators.
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-6, atol=1e-9)
    assert found[0][1].any()


@pytest.mark.parametrize(("kind", "bound"), [("binary_tv", 0.12), ("binary_kl", 0.03)])
def test_dppo_in_skyrl_has_the_same_gradient(kind, bound):
    """Its value is that of -r A, ours of -sg(r) A log p."""
    x = _batch()
    loss = losses.DPPOLoss(divergence=kind[-2:], low=bound, high=bound)
    settings = {"dppo_type": kind, "delta_low": bound, "delta_high": bound}
    new, same = (x["new"].clone().requires_grad_() for _ in range(2))
    (grad,) = torch.autograd.grad(_ours(loss)(x, new), new)
    theirs = _skyrl("dppo_policy_loss")(x, same, dppo=settings)
    (expected,) = torch.autograd.grad(theirs, same)
    torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-9)
    assert (expected[x["mask"] > 0] == 0).any()


def test_clip_cov_drops_tokens_that_verl_may_drop():
    """Which are drawn is chance; how many, and among which, is not."""
    x = _batch()
    settings = {"share": 0.1, "low": 0.0, "high": 5.0}
    torch.manual_seed(0)
    dropped = []
    for ours in (True, False):
        new = x["new"].clone().requires_grad_()
        if ours:
            value = _ours(losses.ClipCovLoss(0.2, 0.28, **settings))(x, new)
        else:
            value = _verl("compute_policy_loss_clip_cov")(x, new)
        (grad,) = torch.autograd.grad(value, new)
        without = new.detach().clone().requires_grad_()
        clipped = _ours(losses.ClippedLoss(0.2, 0.28))(x, without)
        (plain,) = torch.autograd.grad(clipped, without)
        dropped.append((plain != 0) & (grad == 0))
        torch.testing.assert_close(grad[grad != 0], plain[grad != 0])
    assert dropped[0].sum() == dropped[1].sum() == int(0.1 * x["mask"].sum())


@pytest.mark.parametrize(
    ("verl", "skyrl", "how"),
    [
        ("seq-mean-token-mean", "sequence_mean", SEQUENCES),
        ("seq-mean-token-sum", None, {"mode": "constant", "length": 1}),
        ("seq-mean-token-sum-norm", "seq_mean_token_sum_norm", {"mode": "constant", "length": 9}),
        (None, "prompt_mean", {"mode": "prompt", "answers": 2}),
    ],
)
def test_sequences_without_a_token_are_counted_as_their_trainers_do(verl, skyrl, how):
    """verl's trainer gives the number of all sequences; a rejection mask leaves some empty."""
    x = _batch()
    loss, mask = x["new"][:4], x["mask"][:4].clone()
    mask[2:] = 0.0
    ours = losses.aggregation(mask, count_empty=True, dtype=F64, **how)
    weights = mask if ours.weights is None else ours.weights
    found = (loss * weights).sum() / ours.denominator
    if verl:
        functional = published("verl", "verl/utils/torch_functional.py", "masked_sum")
        file = "verl/trainer/ppo/core_algos.py"
        algos = published("verl", file, "agg_loss", verl_F=functional)
        expected = algos.agg_loss(loss, mask, verl, global_batch_size=4)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=0)
    if skyrl:
        file = "skyrl/backends/skyrl_train/utils/ppo_utils.py"
        utils = published("skyrl", file, "apply_loss_reduction_to_advantages_minibatch")
        scaled = utils.apply_loss_reduction_to_advantages_minibatch(
            loss, mask, skyrl, 4, 9, [(0, 2), (2, 4)]
        )
        torch.testing.assert_close(found, (scaled * mask).sum())


def test_rollout_is_of_skyrl():
    algos = _skyrl_published("ppo_utils.py", "rollout_is_policy_loss", "reduce_loss")
    x = _batch()
    config = Config(off_policy_correction=None, eps_clip_low=0.3, eps_clip_high=0.5)
    new, same = (x["new"].clone().requires_grad_() for _ in range(2))
    loss, _ = algos.rollout_is_policy_loss(new, None, x["a"], config, x["mask"], x["old"])
    (expected,) = torch.autograd.grad(loss, new)
    kept = losses.masked_importance_weights(x["new"], x["old"], low=0.7, high=1.5)
    ours = losses.ReinforceLoss()(same, None, x["a"] * kept) * x["mask"]
    (found,) = torch.autograd.grad(ours.sum(), same)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert (expected[x["mask"] > 0] == 0).any()


# ---- corrections ---------------------------------------------------------------------------------

VERL_REJECTION = [
    (f"{level}_{k}" if level == "token" else f"seq_{level}_{k}", k, level)
    for level in ("token", "sum", "mean", "max")
    for k in ("k1", "k2", "k3")
    if (level, k) != ("max", "k1")
]


@pytest.mark.parametrize(("option", "estimator", "level"), VERL_REJECTION)
def test_rejection_is_verl_s(option, estimator, level):
    functional = published("verl", "verl/utils/torch_functional.py", "masked_sum", "masked_mean")
    file = "verl/trainer/ppo/rollout_corr_helper.py"
    modes = [mode for mode, _, _ in VERL_REJECTION]
    helper = published(
        "verl",
        file,
        "compute_rollout_rejection_mask",
        "_parse_rollout_rs_thresholds",
        verl_F=functional,
        SAFETY_BOUND=20.0,
        SUPPORTED_ROLLOUT_RS_OPTIONS=modes,
        TOKEN_LEVEL_ROLLOUT_RS_OPTIONS=modes[:3],
        compute_rs_metrics=lambda **_: {},
    )
    x = _batch(spread=0.1)
    high = 0.004 if level == "mean" else 0.02
    threshold = "0.95_1.04" if estimator == "k1" else high
    expected, _ = helper.compute_rollout_rejection_mask(
        x["new"] - x["old"], x["mask"], option, threshold
    )
    bounds = {"high": high}
    if estimator == "k1":
        bounds = {"low": math.log(0.95), "high": math.log(1.04)}
    found = losses.rejection_mask(
        x["new"], x["old"], x["mask"], estimator=estimator, level=level, **bounds
    )
    assert torch.equal(found * x["mask"], expected)
    assert 0 < expected.sum() < x["mask"].sum()


@pytest.mark.parametrize(("estimator", "high"), [("k1", 0.1), ("k2", 0.01), ("k3", 0.01)])
def test_rejection_is_areal_s_of_the_two_exchanged(estimator, high):
    """AReaL's estimators are of KL(p_train, p_rollout)."""
    kl = published("areal", "areal/utils/data.py", "_compute_approx_kl")
    x = _batch(spread=0.1)
    train, rollout, mask = x["new"], x["old"], x["mask"]
    expected = (kl._compute_approx_kl(train, rollout, estimator) <= high) & mask.bool()
    found = losses.rejection_mask(rollout, train, mask, estimator=estimator, high=high)
    assert torch.equal(found * mask, expected.to(found.dtype))
    assert 0 < expected.sum() < mask.sum()


def test_m2po_is_areal_s():
    file = "areal/trainer/ppo/actor.py"
    actor = published("areal", file, "_apply_m2po_masking", "_get_m2po_loss_mask")
    for threshold in (1e-6, 0.005, 0.04, 10.0):
        x = _batch()
        expected = actor._apply_m2po_masking(x["old"], x["new"], x["mask"].bool(), threshold)
        loss = losses.M2POLoss(threshold=threshold)
        found = loss.second_pass(x["new"], x["old"], x["a"], x["mask"])["advantages"]
        assert torch.equal(found != 0, expected)


@pytest.mark.parametrize("high_only", [True, False])
def test_fipo_is_ms_swift_s(high_only):
    file = "swift/megatron/trainers/grpo_trainer.py"
    trainer = published("ms-swift", file, "_compute_fipo_influence")
    x = _batch(spread=1.0)
    own = SimpleNamespace(
        args=SimpleNamespace(delta=10.0, fipo_safety_threshold=2.0),
        fipo_gamma=2 ** (-1 / 5),
        fipo_clip_range=0.2,
        fipo_clip_high_only=high_only,
        fipo_safety_threshold=2.0,
    )
    log_ratio = x["new"] - x["old"]
    expected, _ = trainer._compute_fipo_influence(
        own, log_ratio, log_ratio.exp(), x["a"], x["mask"].bool()
    )
    loss = losses.FIPOLoss(half_life=5.0, high_only=high_only, safety=2.0)
    found = loss.second_pass(x["new"], x["old"], x["a"], x["mask"])["importance_weights"]
    keep = x["mask"].bool()
    torch.testing.assert_close(found[keep], expected[keep])


def test_sequence_weights_are_skyrl_s_and_ms_swift_s():
    file = "off_policy_correction_utils.py"
    skyrl = _skyrl_published(file, "compute_tis_ratio", "compute_outlier_token_mask")
    x = _batch()
    config = Config(
        sequence_tis_ratio_clip_high=1.1,
        outlier_token_is_threshold_low=0.6,
        outlier_token_is_threshold_high=None,
    )
    arguments = (x["new"], x["old"], x["mask"])
    weights, _ = skyrl.compute_tis_ratio(*arguments, "sequence", config)
    outliers, _ = skyrl.compute_outlier_token_mask(*arguments, config)
    found = losses.truncated_sequence_weights(*arguments, cap=1.1, veto=0.6)
    torch.testing.assert_close(found, weights * outliers, rtol=1e-6, atol=0)
    assert 0 < found.count_nonzero() < 5

    file = "swift/megatron/trainers/grpo_trainer.py"
    swift = published(
        "ms-swift",
        file,
        "_apply_rollout_importance_sampling",
        "_compute_sequence_level_ratios",
    )
    own = SimpleNamespace(
        rollout_importance_sampling_mode="sequence_mask",
        rollout_importance_sampling_threshold=1.05,
        _compute_sequence_level_ratios=lambda *a: swift._compute_sequence_level_ratios(None, *a),
    )
    expected = swift._apply_rollout_importance_sampling(own, x["new"] - x["old"], x["mask"])
    found = losses.sequence_masked_importance_weights(*arguments, low=0.0, high=1.05)
    torch.testing.assert_close(found, expected * x["mask"])
    assert 0 < found.count_nonzero() < x["mask"].sum()
