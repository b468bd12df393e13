"""Ready-made per-token losses, for `linear_policy_loss` and for plain log-probabilities alike.

A loss is a frozen dataclass of its settings. Call it with `(logprobs, entropy or None, *per-token
tensors)`, all of one shape: it returns a loss for each token. Its `tensors` names the per-token
tensors, in order. Average the result as you like; `linear_policy_loss` divides its sum by
`denominator`, which `aggregation` computes. Only logprobs and entropy carry a gradient. In the
formulas r is exp(logprobs - old_logprobs), A the advantage, and sg(x) is x without gradient.

    loss, stats = linear_policy_loss(hidden, weight, target, ClippedLoss(clip_high=0.28),
                                     old_logprobs, advantages, denominator=answer_tokens)

Losses of whole sequences (GSPO, DPO) and of a batch's choices (M2PO, KL-Cov) need every token's
log-probability before any token's gradient, so they take two passes: one without gradient for the
numbers (`second_pass`), one with.

Losses and gradients are finite if the log-probabilities are, however far apart the policies are: a
ratio is bounded within the dtype's range, and has no gradient past the bound: e^70 in float32, and
e^35 in `SPOLoss`, which squares its ratio. Products may still overflow, in float32: squares of log
ratios above 1.8e19, and a ratio near e^70 times a log ratio above 1e4 (`kl="k2"`) or 1e8 (k1, k3),
as `kl_ratio=True` and a policy-gradient `DistillationLoss` have them. In float16 products end at
65504: KL terms overflow from log ratios of 20 on, a ratio times an advantage earlier.

A token whose advantage (or weight) is exactly 0 is masked: its policy term and that term's gradient
are 0, also if its log-probability is -inf or NaN. KL and entropy terms are not masked by it.

`RegularizedLoss` adds KL and entropy to any objective, `WeightedLoss` multiplies any by weights.

If the rollout engine's probabilities differ from the trainer's, weights and masks correct for it.
They have no gradient, and multiply a token's advantage (`weighted=True` does that):

    weight of a token, r = p_train / p_rollout; s of the whole sequence
    min(r, cap), at least floor                     `truncated_importance_weights`  (TIS)
    r if low <= r <= high, else 0                   `masked_importance_weights`     (IcePop, MIS)
    s or 1 if low <= s <= high, else 0              `masked_sequence_weights`       (Seq-MIS)
    min(s, cap); 0 if a token's r < veto            `truncated_sequence_weights`    (Seq-TIS)
    r if low <= s <= high, else 0                   `sequence_masked_importance_weights`
                                                                                    (seq-mask-TIS)
    0 if A < 0 and the sequence is far off, else 1  `off_policy_sequence_mask`      (OPSM)
    1 if low <= a divergence <= high, else 0        `rejection_mask`                (k1 to k3, KPop)
    1 if the entropy is among the highest, else 0   `top_entropy_mask`              (80/20)

For a draft of speculative decoding: `acceptance_rate`, `lk_alpha_loss` and `lk_lambda_loss`, which
are functions of a divergence.
"""

# ruff: noqa: F403 (each name is listed once, in the __all__ of its module)
from mcore_logprobs.losses import (
    base,
    batch,
    corrections,
    drafts,
    one_pass,
    per_token,
    preferences,
    two_pass,
)
from mcore_logprobs.losses.base import *
from mcore_logprobs.losses.batch import *
from mcore_logprobs.losses.corrections import *
from mcore_logprobs.losses.drafts import *
from mcore_logprobs.losses.one_pass import *
from mcore_logprobs.losses.per_token import *
from mcore_logprobs.losses.preferences import *
from mcore_logprobs.losses.two_pass import *

# Every objective with a loss of its own, by name.
_NAMES = [n for n in (*one_pass.__all__, *two_pass.__all__) if n.endswith("Loss")]
OBJECTIVES: dict[str, type[base.TokenLoss]] = {name: globals()[name] for name in _NAMES}

__all__ = ["OBJECTIVES"]
for _module in (base, per_token, batch, corrections, drafts, one_pass, preferences, two_pass):
    __all__ += _module.__all__
