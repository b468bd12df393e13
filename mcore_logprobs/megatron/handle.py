"""`PatchHandle`: what a patched model is asked for in a call, by `with` blocks, and its end."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from mcore_logprobs.checks import check_flag, check_optional_count, check_temperature
from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.megatron.blocks import block
from mcore_logprobs.megatron.calls import (
    Call,
    PerToken,
    PolicyLoss,
    SampleRequest,
    Teacher,
)
from mcore_logprobs.megatron.head_patch import HeadPatch
from mcore_logprobs.megatron.heads import (
    HeadReport,
    find_language_models,
    loss_reason,
    own_loss,
    say_left_out,
    unseen_reason,
)
from mcore_logprobs.megatron.open_blocks import OpenBlocks
from mcore_logprobs.ops.answers import Also
from mcore_logprobs.ops.record import ReplayRequest
from mcore_logprobs.sources.lora import LoRAInput
from mcore_logprobs.sources.rows import check_rows
from mcore_logprobs.sources.vocab_bias import check_column_bias


class PatchHandle:
    """Undo a patch, or change single calls; `patch_model` returns it.

        with handle.options(temperature=0.7), handle.policy_loss(loss_fn, advantages):
            stats = model(ids, positions, mask, labels=labels)
        stats.policy_loss.backward()

    Blocks can be nested; the innermost wins. Each undoes only its own change, in any order. On
    pipeline stages without a head they only check their arguments. Under the combined 1F1B schedule
    a block applies to the schedule plans that are built inside it. A deep copy of a patched model
    is patched too, with no block open.

    A patched model is called by one thread at a time: several take turns, by a lock around the
    block and the call in it, as a block changes the model for all of them. If an activation
    checkpoint wraps the *whole* model, run the backward inside the block too, because it calls the
    model again. With `use_reentrant=False` a backward outside it raises.

    Attributes:
        reports: for each head of this rank (none on stages without one), as of patching, whether
            it is `fusable`, and else for what `reason`.
    """

    def __init__(
        self, model: object, heads: list[tuple[HeadPatch, bool]], config: LogprobConfig
    ) -> None:
        self._model = model
        self._owned = [head for head, is_ours in heads if is_ours]
        self._heads = {head: head.blocks for head, _ in heads}
        # A stage without a head has blocks of its own, to check arguments against.
        self._blocks = list(self._heads.values()) or [OpenBlocks(config)]

    @property
    def reports(self) -> list[HeadReport]:
        return [head.report for head in self._heads]

    @property
    def active(self) -> bool:
        """Whether a head of this rank is patched by this patch now."""
        return any(head.serves(blocks) for head, blocks in self._heads.items())

    def remove(self) -> None:
        """Undo the patch, whoever made it; a second call does nothing."""
        self._remove(self._heads)

    def __enter__(self) -> PatchHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        """Undo what this handle's own call patched."""
        self._remove(self._owned)

    def _remove(self, heads: Iterable[HeadPatch]) -> None:
        present = [head for head in heads if head.serves(self._heads[head])]
        for head in present:
            head.check_removable()
        for head in present:
            head.remove()

    @block
    def options(self, **fields: object) -> Iterator[None]:
        """For calls in this block: `LogprobConfig` fields that differ from the patch's.

        temperature may be a tensor too, without gradient, that broadcasts to labels' `[b, s]`;
        logit_bias a tensor of this rank's `[V/TP]`.

        Raises:
            ValueError: an unknown field, or a value that it does not accept, on every stage; on the
                head's, one that the head cannot have.
        """
        changes: dict[str, Any] = {}
        for name in ("temperature", "logit_bias"):
            if name in fields:
                is_tensor = isinstance(fields[name], Tensor)
                changes[name] = fields.pop(name) if is_tensor else None
        temperature, logit_bias = changes.get("temperature"), changes.get("logit_bias")
        if temperature is not None:  # only the call knows its shape
            checked = check_temperature(temperature, temperature.shape, temperature.device)
            if not isinstance(checked, Tensor):  # a number in a CPU tensor, of a model on a GPU too
                fields["temperature"], changes["temperature"] = checked, None
        if logit_bias is not None:
            check_column_bias(logit_bias)

        @functools.cache  # asked again for each head, and a bias may be of thousands of ids
        def changed_config(config: LogprobConfig) -> LogprobConfig:
            return LogprobConfig.from_dict({**config.as_dict(), **fields})

        def change(call: Call) -> Call:
            return replace(call, config=changed_config(call.config), **changes)

        changed = change(self._blocks[0].call).config
        for language_model in find_language_models(self._model):
            check_own_loss(language_model, changed)
        for head in self._heads:
            head.check(changed, logit_bias)
        with self._during(change):
            yield

    @block
    def policy_loss(
        self,
        loss_fn: Callable[..., Tensor],
        *per_token_tensors: Tensor,
        denominator: float | Tensor = 1.0,
    ) -> Iterator[None]:
        """For calls in this block: form a policy loss in the head, as `linear_policy_loss` does.

        The model returns a TokenStats whose `policy_loss`, a scalar, is the sum over this rank's
        tokens of `loss_fn(logprobs, entropy or None, *the tensors' rows)` over the denominator. Its
        other statistics have no gradient; `divergence`, `candidates` and the top k's values
        have one. Entropy, rank, temperature, masks and the head's own scale, bias and softcap
        follow the settings. So does `compact`, which leaves out rows whose label is ignore_index. A
        head that cannot be fused computes the same from real logits. It takes the place of an outer
        `map`.

        Shape: per-token tensors `[b, s, ...]` like labels (`[b, s/CP]` under context parallelism),
            without gradient.

        Args:
            denominator: tokens of the step over all data, divided by what the trainer divides by
                itself (DDP and FSDP: their ranks; Megatron: data-parallel ranks and
                micro-batches), as `aggregation` computes it.

        Raises:
            ValueError: arguments of another kind, on every stage; in the call, shapes unlike
                labels' and what `linear_policy_loss` raises.
        """
        policy = PolicyLoss(loss_fn, per_token_tensors, denominator)
        with self._during(lambda call: replace(call, policy=policy, mapped=None)):
            yield

    @block
    def map(self, fn: Callable[..., object], *per_token_tensors: Tensor) -> Iterator[None]:
        """For calls in this block: the model returns what `linear_map` gives.

        `fn(logits, *the tensors' rows)` gets logits `[rows, V/TP]` of some tokens at a time, after
        scale, softcap and bias. Pass temperature and vocab_size to the functions that fn calls;
        logit_bias and disallowed_ids are not in them, and filters, label smoothing and statistics
        of the settings have no effect.
        Tokens whose label is ignore_index give 0 and no gradient, and with `compact` cost nothing.
        With a head that cannot be fused, fn is called once, with the real logits of all tokens. It
        takes the place of an outer `policy_loss`.

        Shape: per-token tensors `[b, s, ...]` like labels (`[b, s/CP]` under context parallelism),
            without gradient; fn's results `[rows, ...]` come back as `[b, s, ...]`.

        Raises:
            ValueError: arguments of another kind, on every stage; in the call, shapes unlike
                labels' and what `linear_map` raises.
            TypeError: under the combined 1F1B schedule, fn gives anything but one tensor.
        """
        mapped = PerToken(fn, per_token_tensors)
        with self._during(lambda call: replace(call, mapped=mapped, policy=None)):
            yield

    @block
    def targets(self, target: Tensor, rows: Tensor | None = None) -> Iterator[None]:
        """For calls in this block, without labels: return what `labels=target` would give.

        Shape: target `[b, s]` (`[b, s/CP]`), already shifted, as Megatron's labels are. With rows
            target, per-token tensors and results are `[m]`, and a temperature broadcasts to it.

        Args:
            rows: int64 `[m]`, flat indices into this rank's `[b, s]`, in any order, repeated or
                not: the only positions that the head computes. The same on every TP rank. On the
                host no sync. Not with `compact`, nor with multi-token prediction under
                `mtp="keep"`.

        Raises:
            ValueError: not a tensor of integers [b, s], or [m] with rows, on every stage; a call
                with labels; in the call, rows out of range.
        """
        shape = "[b, s]" if rows is None else "[m]"
        if (
            not isinstance(target, Tensor)
            or target.dim() != len(shape.split())
            or target.is_floating_point()
        ):
            got = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
            raise ValueError(f"target: expected a tensor of integers {shape}, got {got}")
        if rows is not None:
            rows = check_rows(rows, None)
            if rows.shape != target.shape:
                raise ValueError(
                    f"target: expected rows' shape {tuple(rows.shape)}, got {tuple(target.shape)}"
                )
        with self._during(lambda call: replace(call, target=target, rows=rows)):
            yield

    @block
    def replay(
        self,
        kept_ids: tuple[Tensor, Tensor],
        *,
        missing: str = "error",
        full: bool = False,
        entropy: bool = False,
    ) -> Iterator[None]:
        """For calls in this block: replay the sampler's masks, instead of filters.

            with handle.replay((kept_ids, offsets), missing="full", full=True):
                stats = model(ids, positions, mask, labels=labels)
            stats.logprobs, stats.full_logprobs  # over the kept ids, over the vocabulary

        `stats.logprobs`, and the log-probabilities that a policy loss gets, come from a softmax
        over only the ids that the sampler kept for the token. All other statistics are those of the
        full distribution. If you ask for one of them (`full`, or `entropy`, `target_rank` or
        `sum_pi_squared` of LogprobConfig), one pass computes both. If you ask for none, and missing
        is not "full", the call costs no GEMM of the head; `stats.lse` is None. The model returns a
        TokenStats with any `output` if full or entropy is asked for.

        Args:
            kept_ids: (flat ids, offsets `[n + 1]`), integers, in the order of the flattened labels
                `[b, s]` (or `[m]` of rows): token i kept `ids[offsets[i]:offsets[i + 1]]`.
            missing: what a token without a record means. "error": a ValueError. "full": nothing was
                masked there. "ignore": 0, and no gradient; a policy loss leaves the token out.
            full: also give `stats.full_logprobs`, over the whole vocabulary.
            entropy: also give `stats.kept_entropy`, over the kept ids. LogprobConfig(entropy=True)
                gives it too, next to `stats.entropy` of the full distribution.

        With a policy loss, loss_fn gets `full_logprobs` and `kept_entropy` as keywords if its
        signature has parameters with these names.

        Raises:
            ValueError: no pair, a `missing` that does not exist; filters, label smoothing or
                invariant segments in the settings; in the call what
                `vocab_parallel_sampling_logprobs` raises.
        """
        kept = ReplayRequest(kept_ids, missing, entropy, full)
        with self._during(lambda call: replace(call, kept=kept)):
            yield

    @block
    def also(
        self, ids: Tensor | None = None, topk: int | None = None, *, log_softmax: bool = True
    ) -> Iterator[None]:
        """For calls in this block: also give `stats.candidates` and `stats.topk`.

            with handle.also(ids=torch.tensor([7, 11]), topk=20):
                stats = model(ids, positions, mask, labels=labels)
            values, top_ids = stats.topk  # [b, s, 20]; stats.candidates: [b, s, 2]

        They come from the pass that computes the statistics, and cost no GEMM of their own. With a
        policy loss, filters or a replay they take a pass of their own, which has a backward only if
        a gradient flows to them. Tokens whose label is ignore_index give 0. So does an id that is
        ignore_index, or -100 where ignore_index is a true id. The model returns a TokenStats with
        any `output`.

        Shape:
            ids: integers, global ids: `[k]`, the same for every token, or `[b, s, k]` like labels
                (`[m, k]` with rows).
            `stats.candidates` is `[b, s, k]` (`[m, k]`), `stats.topk` (values, ids) of `[b, s,
            topk]` each; candidates and values are differentiable.

        Args:
            topk: how many of the largest, as `vocab_parallel_topk` orders them.
            log_softmax: log-probabilities over the whole vocabulary; False: logits over the
                temperature.

        Raises:
            ValueError: neither ids nor topk, or of another kind, on every stage; invariant segments
                in the settings; in the call, ids of another shape or out of range.
        """
        if ids is None and topk is None:
            raise ValueError("also: expected ids or topk, got neither")
        if ids is not None and (
            not isinstance(ids, Tensor) or ids.dim() < 1 or ids.is_floating_point()
        ):
            got = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(f"ids: expected a tensor of integers [k] or [b, s, k], got {got}")
        check_optional_count("topk", topk)
        check_flag("log_softmax", log_softmax)
        asked = Also(ids, topk, log_softmax)
        with self._during(lambda call: replace(call, also=asked)):
            yield

    @block
    def divergence(
        self,
        kind: str = "forward",
        *,
        teacher_logits: Tensor | None = None,
        teacher_hidden: Tensor | None = None,
        teacher_weight: Tensor | None = None,
        teacher_topk: tuple[Tensor, Tensor] | None = None,
        teacher_lse: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        teacher_lora: LoRAInput | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_softcap: float | None = None,
        teacher_temperature: float | Tensor | None = None,
        beta: float = 0.5,
        tail: str | None = None,
        generalized: bool = False,
    ) -> Iterator[None]:
        """For calls in this block: also give `stats.divergence` from a teacher, per token.

        It is differentiable, also together with a policy loss: add its masked sum to the loss. A
        token whose label is ignore_index gives 0. The model returns a TokenStats with any `output`.

        Shape:
            teacher_logits: `[b, s, V/TP]` like labels (`[b, s/CP, V/TP]`; `[m, V/TP]` with rows).
            teacher_hidden, teacher_weight: `[s, b, h]` as Megatron has hidden states (`[s/TP, b,
                h]` under sequence parallelism; whole with rows too), and `[V/TP, h]`; any h.
                `examples/snippets/distill.py` takes both from a model.
            teacher_topk: (log-probabilities, ids), `[b, s, k]` each (`[m, k]` with rows), as in
                `linear_topk_kl_div`, at the student's temperature; an id of -100 is left out. With
                teacher_lse `[b, s]`, logits over that temperature instead of log-probabilities.

        Args:
            kind, beta: as in `vocab_parallel_kl_div`.
            tail, generalized: as in `vocab_parallel_topk_kl_div`.
            teacher_bias, teacher_lora, teacher_logit_scale, teacher_softcap, teacher_temperature:
                as in `linear_kl_div`. A temperature may broadcast to labels.

        Temperature, vocab_size, softcap and backend come from LogprobConfig. Filters and a replay
        apply only to the log-probabilities.

        Cost: the student's GEMMs a second time, and the teacher's.

        Raises:
            ValueError: options that do not exist, on every stage; options of another kind of
                teacher, where one is given; on a stage with a head, none or several teachers; in
                the call what `linear_kl_div` and `linear_topk_kl_div` raise.
        """
        teacher = Teacher(
            kind,
            logits=teacher_logits,
            hidden=teacher_hidden,
            weight=teacher_weight,
            topk=teacher_topk,
            lse=teacher_lse,
            bias=teacher_bias,
            lora=teacher_lora,
            logit_scale=teacher_logit_scale,
            softcap=teacher_softcap,
            temperature=teacher_temperature,
            beta=beta,
            tail=tail,
            generalized=generalized,
        )
        if self._heads:
            teacher.check_given()
        with self._during(lambda call: replace(call, teacher=teacher)):
            yield

    @block
    def sample(
        self,
        seed: int | Tensor,
        *,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        temperature: float | Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Iterator[None]:
        """For calls in this block, without labels: sample a token at every position.

        The model returns (ids int64, log-probabilities float32) `[b, s]`, without gradient, as
        `linear_sample` does. The ids are the same at every tensor-parallel size, unless a filter's
        cut lies within rounding.

        Args:
            seed: as in `vocab_parallel_sample`: the same on the ranks of a tensor-parallel group,
                another one on data- and context-parallel ranks, and in every call.
            top_k, top_p, min_p, temperature: as in `vocab_parallel_sample`; None takes the value of
                LogprobConfig. `top_k=0` (or -1), `top_p=1.0` and `min_p=0.0` switch its filters
                off. A temperature of 0 takes the largest logit. It may be a tensor that broadcasts
                to the results.
            rows: as in `targets`. Results are then `[m]`; entry i has the noise of
                place i, not of rows[i].

        Multi-token prediction is left out.

        Raises:
            ValueError: settings out of range and invariant segments in LogprobConfig, on every
                stage; a call with labels, or inside a block of another kind; in the call what
                `linear_sample` raises.
        """
        draw = SampleRequest(seed, top_k, top_p, temperature, min_p)
        if rows is not None:
            rows = check_rows(rows, None)
        with self._during(lambda call: replace(call, draw=draw, rows=rows)):
            yield

    @contextlib.contextmanager
    def _during(self, change: Callable[[Call], Call]) -> Iterator[None]:
        if any(not head.serves(blocks) for head, blocks in self._heads.items()):
            raise ValueError("the model is not patched any more: patch it again")
        call = change(self._blocks[0].call)  # raises on every stage for what does not go together
        if call.config.output == "loss" and (call.rows is not None or call.kept is not None):
            for language_model in find_language_models(self._model):
                if own_loss(language_model):
                    raise ValueError(
                        f"{loss_reason(language_model)}, which knows neither rows nor a replay: "
                        "expected output='stats', which leaves it out"
                    )
        with contextlib.ExitStack() as stack:
            for blocks in self._blocks:
                stack.enter_context(blocks.open(change))
            yield


def check_own_loss(language_model: object, config: LogprobConfig) -> None:
    """A loss that the model brings along is called, or the settings are refused.

    One that was put on the instance is left out under output="stats", and a log line says so.
    """
    whose = own_loss(language_model)
    if not whose:
        return
    if whose == "instance" and config.output == "stats":
        say_left_out(loss_reason(language_model))
        return
    if unseen := Call(config).unseen:
        raise ValueError(unseen_reason(language_model, unseen))
