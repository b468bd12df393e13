"""From a head's (deferred) logits and Megatron's labels to a TokenStats or a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from mcore_logprobs.collectives import all_gather_stack
from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.consistency import comparing
from mcore_logprobs.groups import group_rank, group_size
from mcore_logprobs.kernels.stats import StatsSpec
from mcore_logprobs.megatron.calls import Call, SampleRequest, Teacher, TokenOrder
from mcore_logprobs.megatron.deferred import DeferredLogits, DeferringHead
from mcore_logprobs.megatron.heads import require_fused
from mcore_logprobs.ops.answers import NO_ID, Also
from mcore_logprobs.ops.divergence import any_teacher, kl_div
from mcore_logprobs.ops.linear_map import map_logits
from mcore_logprobs.ops.policy_loss import loss_of_stats, policy_loss
from mcore_logprobs.ops.record import has_record
from mcore_logprobs.ops.replay import replay
from mcore_logprobs.ops.result import TokenStats
from mcore_logprobs.ops.row_statistics import Statistics
from mcore_logprobs.ops.sample import sample, without_zeros
from mcore_logprobs.ops.sampling import Filters, filtered_stats
from mcore_logprobs.ops.token_stats import token_stats, vocab_parallel_token_stats
from mcore_logprobs.ops.topk_divergence import topk_kl_div
from mcore_logprobs.sources.given import given_logits
from mcore_logprobs.sources.lazy import LazyLogits
from mcore_logprobs.sources.lazy_head import LazyHead
from mcore_logprobs.sources.pair_source import AnySource

_TOUCHED = "something computed the logits before the loss did (a logger, an in-place operation)"


def head_output(
    labels: Tensor,  # [b, s]; [m] with rows
    logits: Tensor | DeferredLogits,  # [s, b, V/TP]
    call: Call,
    *,
    head: DeferringHead,
    tp_group: ProcessGroup | None,
) -> Any:
    """What a patched model returns: a TokenStats of tensors like labels, or a loss like labels.

    Inside `PatchHandle.map` what its function gives, inside `.sample` (ids, log-probabilities).

    Deferred logits are one source of logits, real ones another. `head` is what stands in for the
    output layer's forward. Collectives: those of the operations over TP.

    Raises:
        ValueError: real logits under fused="require"; those of the operations.
        RuntimeError: logits that have lost the gradient of what they were computed from.
    """
    request = _HeadRequest.of(labels, logits, call, head)
    known, reason = _real_logits(logits, call, head)
    parallel = request.sequence_parallel
    arguments = {"labels": labels, "sequence_parallel": parallel, **vars(call)}
    with comparing(call.operation, lambda: arguments):
        if known is None:
            assert isinstance(logits, DeferredLogits)
            source = partial(logits.source, **request.head_options(logits.head))
            output = logits.head.run(lambda: request.compute(source()))
        else:
            if not isinstance(known, LazyLogits):  # which are a source, and are not materialized
                require_fused(call.config, reason, tp_group)
            known = own_columns(known, tp_group, getattr(head.base, "output_size", None))
            rows = request.tokens.head_rows
            if rows is not None:
                known = known.flatten(0, 1).index_select(0, rows.to(known.device))
            output = request.compute(given_logits(known, tp_group=tp_group, **request.options))
    return request.in_caller_order(output)


def _real_logits(
    logits: Tensor | DeferredLogits, call: Call, head: DeferringHead
) -> tuple[Tensor | None, str]:
    """(the logits that the loss is about where they are real, and why; None where deferred)."""
    if not isinstance(logits, DeferredLogits):
        check_gradient(logits, head.latest)
        return logits, head.why_real()
    known = logits.computed()
    if known is not None:
        return known, _TOUCHED
    return None if call.config.fused else logits.materialize(), ""


@dataclass(frozen=True)
class _HeadRequest:
    """What a call asks of a source of logits, its tokens in the head's order.

    Attributes:
        labels: in the caller's order; nothing where tokens are drawn.
        options: of a source, of real logits or deferred ones.
        greedy: where the temperature is 0, in the head's order, or everywhere or nowhere.
        sequence_parallel: how a teacher's hidden states lie.
    """

    call: Call
    tokens: TokenOrder
    labels: Tensor
    options: dict[str, Any]
    greedy: Tensor | bool
    sequence_parallel: bool

    @classmethod
    def of(
        cls, labels: Tensor, logits: Tensor | DeferredLogits, call: Call, head: DeferringHead
    ) -> _HeadRequest:
        """Raises: ValueError: labels or temperatures of another shape."""
        config, draw = call.config, call.draw
        tokens = TokenOrder(torch.Size((logits.shape[1], logits.shape[0])), call.rows)
        if draw is None and labels.shape != tokens.shape:
            expected = tuple(tokens.shape)
            raise ValueError(f"labels: expected shape {expected}, got {tuple(labels.shape)}")
        if isinstance(logits, DeferredLogits):
            parallel, device = logits.head.sequence_parallel, logits.hidden.device
        else:
            parallel, device = getattr(head.base, "sequence_parallel", False), logits.device
        options: dict[str, Any] = {"softcap": config.softcap, "chunk_size": config.chunk_size}
        greedy: Tensor | bool = False
        if call.mapped is None:
            temperature = config.temperature if call.temperature is None else call.temperature
            if draw is not None:
                drawn_at = temperature if draw.temperature is None else draw.temperature
                temperature, greedy = without_zeros(drawn_at, device)
            if isinstance(temperature, Tensor):
                temperature = tokens.broadcast_to_head(temperature, "temperature")
            if isinstance(greedy, Tensor):
                greedy = tokens.broadcast_to_head(greedy, "temperature")
            options |= {
                "backend": config.backend,
                "invariant_segments": config.invariant_segments,
                "vocab_size": config.vocab_size,
                "temperature": temperature,
                **call.vocab_bias,
            }
        return cls(call, tokens, labels, options, greedy, bool(parallel))

    def head_options(self, head: LazyHead) -> dict[str, Any]:
        """`options`, and those only of deferred logits."""
        call, config = self.call, self.call.config
        asks = (call.mapped, call.kept, call.teacher, call.draw, call.also)
        return self.options | {
            "compact": config.compact and call.draw is None,
            "rows": self.tokens.head_rows,
            "logits_dtype": head.output_dtype or config.logits_dtype,
            "saved_bytes": config.saved_bytes,
            "may_round": not call.filtered and all(x is None for x in asks),
        }

    def in_caller_order(self, found: Any) -> Any:
        """What the model returns of what `compute` gives."""
        call = self.call
        if not isinstance(found, TokenStats):
            return pytree.tree_map_only(Tensor, self.tokens.from_head, found)
        stats = found.map(self.tokens.from_head)
        return stats if call.config.output == "stats" or call.gives_stats else stats.loss

    def compute(self, source: AnySource) -> Any:
        """The result, as `[s, b, ...]` tensors; `[m, ...]` with rows."""
        call, tokens = self.call, self.tokens
        if call.draw is not None:
            return self._drawn(source, call.draw)
        target = tokens.to_head(self.labels, "labels")
        keep = target != call.config.ignore_index
        if call.mapped is not None:
            tensors = call.mapped.in_head_order(tokens)
            return map_logits(source, call.mapped.function, *tensors, mask=keep)
        stats = self._stats(source, target, keep)
        if call.also is not None and stats.candidates is None and stats.topk is None:
            plain = token_stats(
                source, target, Statistics.of(), call.config.ignore_index, self._also()
            )
            stats = replace(stats, candidates=plain.candidates, topk=plain.topk)
        if call.teacher is not None:
            # Without segments, of whose bits a divergence promises nothing.
            without = replace(source.options, segments=None).bind(*source.tensors)
            stats = replace(stats, divergence=self._divergence(without, keep, call.teacher))
        return stats

    def _stats(self, source: AnySource, target: Tensor, keep: Tensor) -> TokenStats:
        call, config, policy = self.call, self.call.config, self.call.policy
        statistics = Statistics.of(
            entropy=config.entropy,
            target_rank=config.target_rank,
            sum_pi_squared=config.sum_pi_squared,
            label_smoothing=config.label_smoothing,
        )
        ignored = config.ignore_index
        tensors = () if policy is None else policy.in_head_order(self.tokens)
        if call.kept is None and not call.filtered:
            if policy is None:
                return token_stats(source, target, statistics, ignored, self._also())
            loss, stats = policy_loss(
                source,
                target,
                statistics,
                policy.function,
                *tensors,
                denominator=policy.denominator,
                ignore_index=ignored,
            )
            return replace(stats, policy_loss=loss)
        if call.kept is None:
            filters = Filters.of(config.top_k, config.top_p, config.min_p, source.shard)
            stats = filtered_stats(source, target, filters, statistics, ignored)
        else:
            places = self.tokens.places(source.device)
            kept = replace(call.kept, entropy=call.kept.entropy or config.entropy)
            asked = statistics.spec != StatsSpec()
            stats = replay(
                source,
                target,
                kept,
                full_spec=statistics.spec if asked else None,
                places=places,
                ignore_index=ignored,
            )
            if kept.missing == "ignore":
                keep = keep & has_record(kept.ids[1], places)
        if policy is None:
            return stats
        loss = loss_of_stats(stats, keep, policy.function, *tensors, denominator=policy.denominator)
        return replace(stats.detach(), policy_loss=loss)

    def _also(self) -> Also | None:
        also = self.call.also
        if also is None or also.ids is None or also.ids.dim() == 1:
            return also
        return also._replace(ids=self.tokens.to_head(also.ids, "ids"))

    def _divergence(self, source: AnySource, keep: Tensor, teacher: Teacher) -> Tensor:
        tokens, config = self.tokens, self.call.config
        if teacher.topk is not None:
            logprobs, ids = (
                tokens.to_head(x, f"teacher_topk[{place}]") for place, x in enumerate(teacher.topk)
            )
            ids = ids.masked_fill(~keep.unsqueeze(-1), NO_ID)
            lse = None if teacher.lse is None else tokens.to_head(teacher.lse, "teacher_lse")
            return topk_kl_div(source, logprobs, ids, teacher.divergence, NO_ID, lse)
        temperature, logits = teacher.temperature, teacher.logits
        if isinstance(temperature, Tensor):
            temperature = tokens.broadcast_to_head(temperature, "teacher_temperature")
        if logits is not None:  # as large as the student's would be: not copied
            logits = tokens.view_in_head(logits, "teacher_logits")
        other = any_teacher(
            source,
            logits=logits,
            hidden=teacher.hidden,
            weight=teacher.weight,
            bias=teacher.bias,
            lora=teacher.lora,
            rows=tokens.head_rows,
            sequence_parallel=self.sequence_parallel,
            logit_scale=teacher.logit_scale,
            softcap=teacher.softcap,
            temperature=temperature,
            vocab_size=config.vocab_size,
            backend=config.backend,
            **self.call.vocab_bias,
        )
        return kl_div(source, other, kind=teacher.kind, beta=teacher.beta, mask=keep)

    def _drawn(self, source: AnySource, draw: SampleRequest) -> tuple[Tensor, Tensor]:
        tokens, seed = self.tokens, draw.seed
        if isinstance(seed, Tensor):
            seed = tokens.broadcast_to_head(seed, "seed")
        return sample(
            source,
            seed=seed,
            greedy=self.greedy,
            places=tokens.places(source.device),
            **draw.filters(self.call.config),
        )


def mtp_loss(
    labels: Tensor,  # [b, s]
    logits: DeferredLogits,
    config: LogprobConfig,
    *,
    tp_group: ProcessGroup | None,
    loss_mask: object,
    ignored: int | None,
) -> Tensor:
    """Megatron's own loss for a multi-token prediction head, [b, s], from hidden states.

    Equal to `vocab_parallel_cross_entropy` for every label: that knows no ignore_index, and gives a
    label outside the vocabulary the loss lse - max, whose gradient is that of lse. The maximum is
    only for the log; if a loss mask comes with the call it is left out on a GPU, since the
    mask is there to drop such labels, and finding them costs a pass over the vocabulary.

    Args:
        ignored: the label whose loss is 0 (`ignored_by_own_loss`), or None.

    Collectives: those of `linear_token_stats`; with the maximum one all-gather of [s, b] over TP.
    """
    head = logits.head

    def stats_of(target: Tensor) -> TokenStats:
        def in_head() -> TokenStats:
            source = logits.source(
                chunk_size=config.chunk_size,
                backend=config.backend,
                invariant_segments=config.invariant_segments,
                logits_dtype=head.output_dtype or config.logits_dtype,
                may_round=True,
            )
            return token_stats(source, target, Statistics.of(), None)

        return head.run(in_head)

    return _loss_of_every_label(
        labels,
        stats_of,
        lambda: logits.largest().values,
        columns=head.weight.shape[0] * group_size(tp_group),
        tp_group=tp_group,
        loss_mask=loss_mask,
        ignored=ignored,
    )


def lazy_mtp_loss(
    labels: Tensor,  # [b, s]
    logits: LazyLogits,  # [s, b, V/TP]
    config: LogprobConfig,
    *,
    tp_group: ProcessGroup | None,
    loss_mask: object,
    ignored: int | None,
) -> Tensor:
    """`mtp_loss` of lazy logits, as a call without labels has them."""

    def stats_of(target: Tensor) -> TokenStats:
        return vocab_parallel_token_stats(
            logits,
            target,
            tp_group=tp_group,
            ignore_index=None,
            chunk_size=config.chunk_size,
            backend=config.backend,
            invariant_segments=config.invariant_segments,
        )

    return _loss_of_every_label(
        labels,
        stats_of,
        lambda: logits.detach().max(dim=-1).values,
        columns=logits.shape[-1] * group_size(tp_group),
        tp_group=tp_group,
        loss_mask=loss_mask,
        ignored=ignored,
    )


def ignored_by_own_loss(config: object) -> int | None:
    """The label that the model's own loss gives 0 and no gradient; None: it knows none.

    Of Megatron's losses only Transformer Engine's does (its `ignore_idx`).
    """
    fused = getattr(config, "cross_entropy_loss_fusion", False)
    return -100 if fused and getattr(config, "cross_entropy_fusion_impl", "") == "te" else None


def _loss_of_every_label(
    labels: Tensor,
    stats_of: Callable[[Tensor], TokenStats],
    local_largest: Callable[[], Tensor],
    *,
    columns: int,
    tp_group: ProcessGroup | None,
    loss_mask: object,
    ignored: int | None,
) -> Tensor:
    """Megatron's loss, [b, s], of statistics of targets [s, b]; `columns` of the whole vocabulary.

    A label outside it gets lse - max, `ignored` gets 0; see `mtp_loss`.
    """
    target = labels.transpose(0, 1).contiguous()  # [s, b]
    outside = (target < 0) | (target >= columns)
    stats = stats_of(target.masked_fill(outside, 0))
    on_cpu = outside.device.type == "cpu"
    wants_top = bool(outside.any()) if on_cpu else not isinstance(loss_mask, Tensor)
    wants_top &= ignored is None  # whose loss of other labels outside is inf
    assert stats.lse is not None
    top: Tensor | float = 0.0
    if wants_top:
        top = all_gather_stack(local_largest().to(stats.lse.dtype), tp_group).amax(0)
    loss = torch.where(outside, stats.lse - top, -stats.logprobs)
    if ignored is not None:
        loss = loss.masked_fill(target == ignored, 0.0)
    return loss.transpose(0, 1).contiguous()


def check_gradient(logits: Tensor, latest: DeferredLogits | None) -> None:
    """Real logits that reached the loss must carry the gradient of the deferred ones."""
    if latest is None or not latest.wants_gradient:
        return
    if not (logits.requires_grad and latest.is_ancestor_of(logits)):
        raise RuntimeError(
            "the logits lost their gradient between the patched output layer and the loss: they "
            "went through a torch.autograd.Function or no_grad, which see no gradient in deferred "
            "logits. Patch with LogprobConfig(fused=False)"
        )


def own_columns(
    logits: Tensor, tp_group: ProcessGroup | None, padded_vocab_size: int | None
) -> Tensor:
    """This rank's vocabulary shard of logits that a head has gathered; others as they are.

    The gather's backward takes each rank's own columns of the gradient, and only those are filled.
    """
    size = group_size(tp_group)
    if size == 1 or padded_vocab_size is None or logits.shape[-1] != padded_vocab_size:
        return logits
    width = padded_vocab_size // size
    return logits.narrow(-1, group_rank(tp_group) * width, width)
