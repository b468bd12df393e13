"""What is of a whole batch, over its ranks: denominators, choices of tokens, the entropy's mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import (
    check_choice,
    check_count,
    check_flag,
    check_not_negative,
    check_number,
    check_optional_count,
    check_positive,
    check_top_p,
)
from mcore_logprobs.collectives import all_gather_dim0, all_gather_stack, all_reduce_sum
from mcore_logprobs.consistency import check_call, comparing
from mcore_logprobs.groups import group_rank
from mcore_logprobs.losses.base import counted
from mcore_logprobs.losses.per_token import check_tensor
from mcore_logprobs.spelling import SuggestsFields, suggesting

__all__ = ["AdaptiveEntropy", "Aggregation", "aggregation", "top_entropy_mask"]


@suggesting
def top_entropy_mask(
    entropy: Tensor, mask: Tensor, *, share: float = 0.2, group: ProcessGroup | None = None
) -> Tensor:
    """1.0 at the tokens of highest entropy in the batch, else 0.0; without gradient.

    The 80/20 rule (Wang et al., 2506.01939): only the top share of tokens learns. Those are the
    tokens at or above the entropy's (1 - share) quantile. As weights of `WeightedLoss`.

    Shape:
        entropy, mask (bool or 0/1): `[...]` -> `[...]`; 0.0 outside the mask,
            NaN in all of it if a counted entropy is.

    Args:
        share: in (0, 1].
        group: the ranks whose tokens make up the batch (data and context parallel); None: only
            this process.

    Collectives: over the group an all-gather of one count, and one of the counted tokens' values.
    One host sync.

    Raises:
        ValueError: before any collective. At the first call over a group on every rank, if one
            rank refuses its arguments or has another share or dtype.
    """
    same = {"share": share, "dtype": getattr(entropy, "dtype", None)}
    with comparing("top_entropy_mask", lambda: same, group):
        check_top_p("share", share)
        check_tensor("entropy", entropy)
        valid_mask = counted(mask, entropy, 0)
        check_call(None, group, entropy.device)

    def choose(values: Tensor) -> Tensor:
        place = math.ceil((1.0 - share) * (len(values) - 1) - 1e-9)
        return values >= values.sort().values[place]

    return choose_in_batch(choose, valid_mask, group, entropy)


def choose_in_batch(
    choose: Callable[..., Tensor], mask: Tensor, group: ProcessGroup | None, *values: Tensor
) -> Tensor:
    """`choose` for the counted tokens of all ranks: this rank's part, 1.0 or 0.0; 0.0 elsewhere.

    It is called with one tensor `[n]` for each of the values, the same on every rank, and gives a
    bool `[n]`. NaN among the values gives NaN everywhere. One host sync.

    Args:
        mask: bool, of the values' shape.
    """
    valid_mask = mask.flatten()
    counts = all_gather_stack(valid_mask.sum(), group).flatten().tolist()  # the host sync
    rank = group_rank(group)
    # The counted tokens in order, without asking where they are.
    index = valid_mask.byte().sort(descending=True, stable=True).indices[: counts[rank]]
    mine = torch.stack([value.detach().flatten()[index] for value in values])
    padded = F.pad(mine, (0, max(counts) - counts[rank]))
    parts = all_gather_dim0(padded.unsqueeze(0), group)
    everyone = torch.cat([part[:, :n] for part, n in zip(parts, counts, strict=True)], 1)
    result = torch.zeros(mask.numel(), dtype=values[0].dtype, device=mine.device)
    if everyone.shape[1]:
        start = sum(counts[:rank])
        chosen = choose(*everyone)[start : start + counts[rank]]
        result[index] = torch.where(everyone.isnan().any(), torch.nan, chosen.to(result.dtype))
    return result.view(mask.shape)


@dataclass(frozen=True)
class AdaptiveEntropy(SuggestsFields):
    """A coefficient of the entropy bonus that keeps the entropy up (Skywork-OR1, 2505.22312).

        c rises by `step` after a batch whose entropy is at most the target, falls by it otherwise;
        coef = c while the last batch's entropy was at most the target, else 0

    One for each run; `after` gives the next step's:

        control = AdaptiveEntropy(target=0.5)
        objective = RegularizedLoss(ClippedLoss(), entropy_coef=control.coef)
        control = control.after(vocab_parallel_entropy(logits), answer_mask)

    Attributes:
        target, entropy: mean entropy of a token, in nats; entropy is the last batch's.
        value: c, kept within low and high.
    """

    target: float = 0.2
    step: float = 0.005
    low: float = 0.0
    high: float = 1.0
    value: float = 0.0
    entropy: float | None = None

    def __post_init__(self) -> None:
        check_positive("step", self.step)
        for name in ("target", "low", "high", "value"):
            check_not_negative(name, getattr(self, name))
        check_number.optional("entropy", self.entropy)
        if not self.low <= self.value <= self.high:
            bounds = f"at least low {self.low!r}, at most high {self.high!r}"
            raise ValueError(f"value: expected a number {bounds}, got {self.value!r}")

    @property
    def coef(self) -> float:
        return self.value if self.entropy is not None and self.entropy <= self.target else 0.0

    @suggesting
    def after(
        self, entropy: Tensor, mask: Tensor, *, group: ProcessGroup | None = None
    ) -> AdaptiveEntropy:
        """The control after a batch; unchanged where no token counts.

        Shape:
            entropy, mask (bool or 0/1): `[...]`.

        Collectives: one all-reduce of `[2]` over the group (data and context parallel; None: only
        this process). One host sync.

        Raises:
            ValueError: before the collective; at the first call over a group on every rank, if one
                rank refuses its arguments or has other settings. On every rank, a mean of NaN or
                inf.
        """
        with comparing("AdaptiveEntropy.after", lambda: {"control": self}, group):
            check_tensor("entropy", entropy)
            valid_mask = counted(mask, entropy, 0)
            check_call(None, group, entropy.device)
        total = torch.where(valid_mask, entropy.detach(), 0.0).sum(dtype=torch.float64)
        total, tokens = all_reduce_sum(
            torch.stack([total, valid_mask.sum().double()]), group
        ).tolist()
        if not tokens:
            return self
        mean = total / tokens
        if not math.isfinite(mean):
            raise ValueError(f"entropy: expected finite numbers, got a mean of {mean}")
        value = self.value + (self.step if mean <= self.target else -self.step)
        return replace(self, value=min(max(value, self.low), self.high), entropy=mean)


@dataclass(frozen=True, eq=False)
class Aggregation(SuggestsFields):
    """sum over tokens of weights * loss, over denominator.

    Attributes:
        denominator: a scalar, the same on every rank; `denominator=` of `linear_policy_loss` and
            `PatchHandle.policy_loss`, for every micro-batch alike.
        weights: `[b, s]`, for `WeightedLoss`; None where all are 1.
    """

    denominator: Tensor
    weights: Tensor | None = None


@suggesting
def aggregation(
    mask: Tensor,
    *,
    mode: str = "token",
    length: int | None = None,
    answers: int | None = None,
    averaged_ranks: int = 1,
    micro_batches: int = 1,
    seq_dim: int = 1,
    group: ProcessGroup | None = None,
    dtype: torch.dtype = torch.float32,
    count_empty: bool = False,
) -> Aggregation:
    """The denominator, and where needed the tokens' weights, of a step's loss.

        mode         the loss                                           D
        "token"      mean over all tokens (PPO, DAPO as implemented)    tokens
        "sequence"   mean over sequences of their tokens' mean (GRPO)   sequences
        "constant"   sum over tokens, a constant per sequence (Dr. GRPO)  sequences * length
        "prompt"     mean over prompts of the mean over the tokens of   prompts
                     all their answers (DAPO's eq. 8)

    length=1 of "constant" is the mean over sequences of their tokens' sums. Sequences and prompts
    without a token, such as those that a rejection mask leaves nothing of, are not counted; with
    count_empty they are, as verl's trainer and SkyRL count them. Weights are 0 outside the mask;
    where there are none, such tokens need the label ignore_index. D is at least 1: a step without
    any token has the loss 0.

    The trainer divides too; the denominator is D / (averaged_ranks * micro_batches), so that what
    is left is the gradient of the sum over all ranks and micro-batches over D:

        what the trainer does                                averaged_ranks  micro_batches
        adds up gradients of ranks and micro-batches         1               1
        DDP, FSDP: averages them over ranks                  its ranks       1, or the steps of
                                                                             accumulation by which
                                                                             it divides
        Megatron, of (loss, report)                          DP              num_microbatches
        Megatron, of (loss, tokens, report) with tokens = 1  DP * CP         num_microbatches

    Megatron itself multiplies a two-output loss by CP. Each CP rank's loss is of its own tokens.
    With calculate_per_token_loss return three outputs: Megatron then does not average a two-output
    loss over ranks, and its gradients are DP * CP times too large.

    Shape:
        mask (bool or 0/1): `[b, s]` (`[s, b]` with seq_dim=0), all sequences of this data-parallel
        rank in this step, all micro-batches; whole sequences under context parallelism. The weights
        are `[b, s]` too, to be sharded like the losses (`context_parallel_shard`).

    Args:
        length: of "constant": Dr. GRPO's is the longest answer allowed.
        answers: of "prompt": answers to a prompt, one after the other.
        group: the data-parallel ranks, without context parallelism; None: only this process.
        dtype: of denominator and weights. That of the loss, so that a division keeps the loss's
            dtype; bfloat16 rounds the denominator, and with it the loss, by up to 0.4%. Not
            float16, in which more than 65504 tokens are inf. Counts are exact in float64 before
            they are rounded to it.
        count_empty: D counts sequences and prompts without a token too. Not with mode "token".

    Collectives: one all-reduce of one number over the group. No host sync.

    Raises:
        ValueError: before the collective. At the first call over a group on every rank, if one rank
            refuses its arguments, or has another mode, length, answers, averaged_ranks or
            count_empty.
    """
    same = {
        "mode": mode,
        "length": length,
        "answers": answers,
        "averaged_ranks": averaged_ranks,
        "count_empty": count_empty,
    }
    with comparing("aggregation", lambda: same, group):
        _check_settings(mode, length, answers, count_empty)
        check_count("averaged_ranks", averaged_ranks)
        check_count("micro_batches", micro_batches)
        _check_denominator(dtype)
        check_tensor("mask", mask)
        if mask.dim() > 2:
            raise ValueError(f"mask: expected [b, s], got shape {tuple(mask.shape)}")
        valid_mask = counted(mask, mask, seq_dim)
        tokens = valid_mask.sum(seq_dim, keepdim=True)
        if mode == "prompt":
            tokens = _of_prompts(tokens, answers or 1)
        check_call(None, group, mask.device)
    counts = tokens if mode == "token" else (tokens > 0) | count_empty
    total = counts.sum(dtype=torch.float64).reshape(1) / (answers or 1)
    total = all_reduce_sum(total, group).squeeze(0) * (length or 1)
    weights = None
    if mode in ("sequence", "prompt"):
        each = tokens.clamp(min=1).double().reciprocal().to(dtype)
        weights = torch.where(valid_mask, each, 0.0)
    # A step without a token: its loss is 0 whatever it is divided by.
    denominator = total.clamp(min=1.0) / (averaged_ranks * micro_batches)
    return Aggregation(denominator.to(dtype), weights)


def _check_settings(mode: str, length: int | None, answers: int | None, count_empty: bool) -> None:
    check_choice("mode", mode, ("token", "sequence", "constant", "prompt"))
    for name, value, needed in (("length", length, "constant"), ("answers", answers, "prompt")):
        check_optional_count(name, value)
        if (value is not None) != (mode == needed):
            state = "a number with" if mode == needed else "None without"
            raise ValueError(f"{name}: expected {state} mode={needed!r}, got {value!r}")
    check_flag("count_empty", count_empty)
    if count_empty and mode == "token":
        raise ValueError("count_empty: expected False with mode='token', got True")


def _check_denominator(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise ValueError(
            "dtype: expected torch.float32, torch.float64 or torch.bfloat16, in which a count of "
            f"tokens is finite, got {dtype!r}"
        )


def _of_prompts(tokens: Tensor, answers: int) -> Tensor:
    """Tokens of each sequence's prompt, of the sequences' shape."""
    if tokens.numel() % answers:
        raise ValueError(
            f"answers: expected a divisor of the {tokens.numel()} sequences, got {answers}"
        )
    sums = tokens.reshape(-1, answers).sum(1, keepdim=True)
    return sums.expand(-1, answers).reshape(tokens.shape)
