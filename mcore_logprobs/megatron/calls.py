"""What one call of a patched model is asked for, and the order of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.checks import (
    check_min_p,
    check_scale_or_zero,
    check_seed,
    check_top_k,
    check_top_p,
)
from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.megatron.heads import say_unchecked
from mcore_logprobs.ops.answers import Also
from mcore_logprobs.ops.record import ReplayRequest
from mcore_logprobs.ops.topk_divergence import TopKDivergence
from mcore_logprobs.ops.user_function import check_denominator
from mcore_logprobs.sources.lora import LoRAInput
from mcore_logprobs.sources.rows import check_rows


@dataclass(frozen=True)
class TokenOrder:
    """The tokens of a call, as its caller has them and as the head does.

    A caller has `[b, s]`, the head `[s, b]`; where rows are named both have `[m]`.

    Attributes:
        batch: `[b, s]`, this rank's.
        rows: `[m]` int64 on the host, flat indices into it; or None.

    Raises:
        ValueError: rows that are out of range.
    """

    batch: torch.Size
    rows: Tensor | None = None

    def __post_init__(self) -> None:
        if self.rows is not None:
            object.__setattr__(self, "rows", check_rows(self.rows, self.batch.numel()))

    @property
    def shape(self) -> torch.Size:
        """The caller's."""
        return self.batch if self.rows is None else self.rows.shape

    @cached_property
    def head_rows(self) -> Tensor | None:
        """The rows as flat indices into the head's `[s, b]`."""
        if self.rows is None:
            return None
        sequences, length = self.batch
        return self.rows % max(1, length) * sequences + self.rows // max(1, length)

    def places(self, device: torch.device) -> Tensor:
        """Which of the caller's tokens, flattened, stands at each of the head's."""
        places = torch.arange(self.shape.numel(), device=device)
        return self.to_head(places.view(self.shape))

    def view_in_head(self, per_token: Tensor, name: str) -> Tensor:
        """`[s, b, ...]` of `[b, s, ...]`, without a copy.

        Raises:
            ValueError: a shape that does not start with the tokens'.
        """
        if per_token.shape[: len(self.shape)] != self.shape:
            whose = "labels'" if self.rows is None else "rows'"
            raise ValueError(
                f"{name}: expected a shape that starts with {whose} {tuple(self.shape)}, got "
                f"{tuple(per_token.shape)}"
            )
        return self._swapped(per_token)

    def to_head(self, per_token: Tensor, name: str = "") -> Tensor:
        """The same, contiguous."""
        return self.view_in_head(per_token, name).contiguous()

    def broadcast_to_head(self, x: Tensor, name: str) -> Tensor:
        """A tensor that broadcasts to the tokens' shape, in the head's order."""
        try:
            return self._swapped(x.expand(self.shape)).contiguous()
        except RuntimeError as error:
            whose = "labels'" if self.rows is None else "rows'"
            raise ValueError(
                f"{name}: expected a tensor that broadcasts to {whose} {tuple(self.shape)}, got "
                f"shape {tuple(x.shape)}"
            ) from error

    def from_head(self, per_token: Tensor) -> Tensor:
        """The inverse of `to_head`."""
        return self._swapped(per_token).contiguous()

    def _swapped(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if self.rows is None else x


@dataclass(frozen=True)
class PerToken:
    """A function for the head and its per-token tensors `[b, s, ...]`, or `[m, ...]` with rows.

    Checked here, so that every pipeline stage checks them.

    Raises:
        ValueError: no function, tensors of another kind or that require a gradient.
    """

    function: Callable[..., Any]
    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"expected a callable, got {type(self.function).__name__}")
        for place, tensor in enumerate(self.tensors):
            name = f"per_token_tensors[{place}]"
            if not isinstance(tensor, Tensor) or tensor.dim() < 1:
                got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(f"{name}: expected a tensor [b, s, ...] like labels, got {got}")
            if tensor.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"{name}: requires a gradient, but none flows to it; detach it")

    def in_head_order(self, tokens: TokenOrder) -> tuple[Tensor, ...]:
        """The per-token tensors as the head has the tokens; `TokenOrder.to_head`'s errors."""
        return tuple(
            tokens.to_head(tensor, f"per_token_tensors[{place}]")
            for place, tensor in enumerate(self.tensors)
        )


@dataclass(frozen=True)
class PolicyLoss(PerToken):
    """A policy loss to form in the head: the arguments of `linear_policy_loss`.

    Raises:
        ValueError: as `PerToken`; a denominator that is not a finite number above 0 (a CUDA
            tensor's value is not checked).
    """

    denominator: float | Tensor = 1.0

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"loss_fn: expected a callable, got {type(self.function).__name__}")
        super().__post_init__()
        check_denominator(self.denominator)


@dataclass(frozen=True)
class SampleRequest:
    """The arguments of `PatchHandle.sample`; None takes the value of LogprobConfig.

    Raises:
        ValueError: a seed that is no integer of 64 bits or tensor of integers; filters out of
            range; a temperature that is neither 0 nor in float32's range, or no real tensor.
    """

    seed: int | Tensor
    top_k: int | None = None
    top_p: float | None = None
    temperature: float | Tensor | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        device = self.seed.device if isinstance(self.seed, Tensor) else torch.device("cpu")
        shape = self.seed.shape if isinstance(self.seed, Tensor) else torch.Size()
        check_seed(self.seed, shape, device)
        check_top_k("top_k", self.top_k)
        check_top_p.optional("top_p", self.top_p)
        check_min_p.optional("min_p", self.min_p)
        if self.temperature is not None and not isinstance(self.temperature, Tensor):
            check_scale_or_zero("temperature", self.temperature)

    def filters(self, config: LogprobConfig) -> dict[str, Any]:
        """The keywords top_k, top_p and min_p; what is not given is the settings'."""
        names = ("top_k", "top_p", "min_p")
        return {n: getattr(config if getattr(self, n) is None else self, n) for n in names}


@dataclass(frozen=True)
class Teacher:
    """The arguments of `PatchHandle.divergence`.

    Raises:
        ValueError: an unknown kind, beta or tail; an option of another kind of teacher.
    """

    kind: str
    logits: Tensor | None = None
    hidden: Tensor | None = None
    weight: Tensor | None = None
    topk: tuple[Tensor, Tensor] | None = None
    lse: Tensor | None = None
    bias: Tensor | None = None
    lora: LoRAInput | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor | None = None
    beta: float = 0.5
    tail: str | None = None
    generalized: bool = False
    divergence: TopKDivergence = field(init=False)

    def __post_init__(self) -> None:
        # Of a teacher's top-k; made for whole teachers too, as it checks kind and beta.
        divergence = TopKDivergence.of(self.kind, self.beta, self.tail, self.generalized)
        object.__setattr__(self, "divergence", divergence)
        unused: dict[str, object]
        whole = (self.logits, self.hidden, self.weight)
        if self.topk is None and all(x is None for x in whole):
            return  # a stage without a head need not know which kind of teacher there is
        if self.topk is None:
            unused = {"tail": self.tail, "generalized": self.generalized or None}
            unused["teacher_lse"] = self.lse
            whose = "without teacher_topk"
        else:
            if not isinstance(self.topk, tuple | list) or len(self.topk) != 2:
                got = type(self.topk).__name__
                raise ValueError(f"teacher_topk: expected (log-probabilities, ids), got {got}")
            shapes = [tuple(x.shape) for x in self.topk if isinstance(x, Tensor)]
            if len(set(shapes)) > 1:
                raise ValueError(f"teacher_topk[1]: expected shape {shapes[0]}, got {shapes[1]}")
            if self.temperature is not None:
                raise ValueError(
                    "teacher_temperature: expected None with teacher_topk, whose log-probabilities "
                    f"must be at the student's temperature already, got {self.temperature!r}"
                )
            unused = {
                "teacher_bias": self.bias,
                "teacher_lora": self.lora,
                "teacher_softcap": self.softcap,
                "teacher_logit_scale": None if self.logit_scale == 1.0 else self.logit_scale,
            }
            whose = "with teacher_topk"
        for name, value in unused.items():
            if value is not None:
                raise ValueError(f"{name}: expected the default {whose}, got {value!r}")

    def check_given(self) -> None:
        """Exactly one teacher; for stages that have a head, as others may not have a teacher's.

        Raises:
            ValueError: none or several, or hidden states without a weight.
        """
        head = self.hidden is not None or self.weight is not None
        teachers = (self.logits is not None) + head + (self.topk is not None)
        if teachers != 1 or (head and (self.hidden is None or self.weight is None)):
            raise ValueError(
                "teacher: expected one of teacher_logits, teacher_hidden with teacher_weight, and "
                "teacher_topk"
            )


# Settings that a loss of the model's own need not know: they do not change what a loss is, or are
# heeded before it.
_NOT_OF_THE_LOSS = (
    *("fused", "mtp", "chunk_size", "backend", "logits_dtype", "saved_bytes"),
    *("compact", "logits", "check_labels"),
)
# Settings that a sampler's record replaces.
_REPLACED_BY_RECORD = ("top_k", "top_p", "min_p", "label_smoothing", "invariant_segments")


@dataclass(frozen=True)
class Call:
    """What the open `with` blocks of a `PatchHandle` ask of a call.

    Attributes:
        config: the patch's settings, as `PatchHandle.options` has changed them.
        policy: of `PatchHandle.policy_loss`.
        mapped: of `PatchHandle.map`.
        target, rows: of `PatchHandle.targets`, `[b, s]`, or `[m]` and `[m]`; rows of
            `PatchHandle.sample` too.
        kept: of `PatchHandle.replay`.
        also: of `PatchHandle.also`.
        teacher: of `PatchHandle.divergence`.
        draw: of `PatchHandle.sample`.
        temperature: of `PatchHandle.options`, where it is a tensor that broadcasts to the tokens.
        logit_bias: likewise, where it is a tensor `[V/TP]`.
        labels_checked: what `check_labels` asks for was done when a schedule plan was made.

    Raises:
        ValueError: what does not go together.
    """

    config: LogprobConfig
    policy: PolicyLoss | None = None
    mapped: PerToken | None = None
    target: Tensor | None = None
    rows: Tensor | None = None
    kept: ReplayRequest | None = None
    also: Also | None = None
    teacher: Teacher | None = None
    draw: SampleRequest | None = None
    temperature: Tensor | None = None
    logit_bias: Tensor | None = None
    labels_checked: bool = False

    def __post_init__(self) -> None:
        config = self.config
        for block, what in (("also", "candidates and the top k"), ("sample", "samples")):
            asked = self.also if block == "also" else self.draw
            if asked is not None and config.invariant_segments is not None:
                raise ValueError(
                    f"PatchHandle.{block}: expected invariant_segments=None, as {what} are not "
                    f"batch-invariant, got {config.invariant_segments}"
                )
        if self.rows is not None and config.compact and self.draw is None:
            raise ValueError("rows: expected compact=False, as rows say what is computed")
        if self.kept is not None:
            replaced = {
                name: value
                for name, value in config.as_dict().items()
                if name in _REPLACED_BY_RECORD and value != getattr(LogprobConfig, name)
            }
            if replaced:
                got = ", ".join(f"{name}={value!r}" for name, value in replaced.items())
                raise ValueError(
                    "PatchHandle.replay: expected settings without filters, label smoothing and "
                    f"invariant segments, which the sampler's record replaces, got {got}"
                )
        blocks = self.blocks
        for block, unfit in (("sample", set(blocks)), ("map", {"replay", "divergence", "also"})):
            for name in blocks:
                if block in blocks and name in unfit and name != block:
                    raise ValueError(
                        f"PatchHandle.{block}: cannot be combined with PatchHandle.{name}"
                    )

    @property
    def blocks(self) -> list[str]:
        """The open blocks that ask for something, by name."""
        asked = {
            "policy_loss": self.policy,
            "map": self.mapped,
            "targets": self.target,
            "replay": self.kept,
            "also": self.also,
            "divergence": self.teacher,
            "sample": self.draw,
        }
        return [name for name, given in asked.items() if given is not None]

    @property
    def vocab_bias(self) -> dict[str, Any]:
        """The keywords of a source that shift or forbid ids."""
        config = self.config
        bias = config.logit_bias if self.logit_bias is None else self.logit_bias
        return {"logit_bias": bias, "disallowed_ids": config.disallowed_ids}

    @property
    def operation(self) -> str:
        """What ranks compare at its first call: each combination of blocks is one."""
        filters = ["filters"] if self.filtered else []
        return " with ".join(["a patched model", *self.blocks, *filters])

    @property
    def wants_only_loss(self) -> bool:
        """Whether nothing but a loss of each token is asked for."""
        more = self.rows is not None or set(self.blocks) - {"targets"}
        return self.config.output == "loss" and not more

    @property
    def loses_own_loss(self) -> str:
        """The block inside which output="loss" does not call a loss of the model's own, or "".

        Not one that takes the loss's place.
        """
        blocks = [name for name in self.blocks if name != "targets"]
        if self.config.output != "loss" or {"policy_loss", "map", "sample"} & set(blocks):
            return ""
        return next(iter(blocks), "")

    @property
    def gives_stats(self) -> bool:
        """Whether a block asks for more than output="loss" would hold."""
        of_record = self.kept is not None and (self.kept.full or self.kept.entropy)
        others = self.policy, self.mapped, self.teacher, self.also
        return of_record or any(block is not None for block in others)

    @property
    def unseen(self) -> str:
        """The settings that a loss of the model's own would not see, as text; "" for none."""
        got, plain = self.config.as_dict(), LogprobConfig(output="loss").as_dict()
        unseen = {k: got[k] for k in got if got[k] != plain[k] and k not in _NOT_OF_THE_LOSS}
        for name in ("temperature", "logit_bias"):
            tensor = getattr(self, name)
            if tensor is not None:
                unseen[name] = f"a tensor of shape {tuple(tensor.shape)}"
        return ", ".join(f"{name}={value!r}" for name, value in unseen.items())

    @property
    def needs_labels(self) -> str:
        """The open block that has no meaning without labels, or ""."""
        return next((name for name in self.blocks if name not in ("targets", "sample")), "")

    @property
    def filtered(self) -> bool:
        """Whether log-probabilities are those of a filtered distribution."""
        return self.config.filtered


@dataclass
class ForwardState:
    """A forward pass of the model that is under way.

    Attributes:
        labels: what it was given, or NOT_PASSED where the model's method does not say.
        loss_mask: the same.
        reached: whether the patched loss was called with these labels; without labels, whether the
            patched output layer was called.
        samples: whether a sampler makes the call, with its cache.
        in_processor: whether the caller's own output_processor runs.
    """

    labels: object
    loss_mask: object
    reached: bool = False
    samples: bool = False
    in_processor: bool = False


NOT_PASSED: object = object()


def check_shifted(
    input_ids: object,
    labels: object,
    ignore_index: int,
    *,
    name: str = "labels",
    rows: Tensor | None = None,
) -> None:
    """Check that labels are the tokens after their inputs, where both are there. Host sync.

    One log line where there are no input_ids to compare them with: Megatron-LM gives none to a
    later pipeline stage, nor a vision-language model to its language model.

    Args:
        rows: flat indices into input_ids, whose labels they are; None: all. What does not fit is
            left to the call, which raises.

    Raises:
        ValueError: most labels are the inputs' own tokens, and fewer are the next ones.
    """
    if not isinstance(labels, Tensor):
        return
    if rows is not None and isinstance(input_ids, Tensor):
        if labels.shape != rows.shape or bool((rows >= input_ids.numel()).any()):
            return
        whole = labels.new_full((input_ids.numel(),), ignore_index)
        labels = whole.index_copy(0, rows.to(labels.device), labels).view(input_ids.shape)
    if not isinstance(input_ids, Tensor) or input_ids.shape != labels.shape:
        what = "none" if not isinstance(input_ids, Tensor) else f"shape {tuple(input_ids.shape)}"
        say_unchecked(what, name)
        return
    labels = labels[:, :-1]  # the last has no next token here
    counted = labels != ignore_index
    same = counted & (labels == input_ids[:, :-1])
    following = counted & (labels == input_ids[:, 1:])
    unshifted, shifted, total = torch.stack([same.sum(), following.sum(), counted.sum()]).tolist()
    if 2 * unshifted > total and unshifted > shifted:
        raise ValueError(
            f"{name}: expected the token after each input, got the input's own at {unshifted} of "
            f"{total} positions; shift them: {name}[:, t] = tokens[:, t + 1]"
        )
