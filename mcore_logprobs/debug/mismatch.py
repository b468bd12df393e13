"""Why the trainer's log-probabilities differ from the rollout engine's, cause by cause.

Each side reports a number per token. Which computation gives that number is found by trying: from
the trainer's logits, every combination of the settings below is computed for some tokens, and the
one whose figures come closest to a side's report is taken for what that side computed (of those
about as close, the one with the fewest departures from the right setting).

    setting      right                            departures
    alignment    label t is token t + 1           labels or values one position late or early
    weights      the trainer's                    those before the last update ("stale")
    layers       float32 (where given)            the trainer's precision, or the engine's
    padding      padded columns left out          counted in the softmax
    rounding     float32 logits                   bfloat16 logits
    temperature  applied                          left out
    filter       min-p, top-k and top-p applied   left out

What the two sides do differently explains the difference. Changing the trainer's settings into the
engine's one by one, in the order above, splits `train - rollout` of each token into parts that add
up to it exactly, with what no setting explains as the remainder. A filter that only the trainer
applies is taken off first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from itertools import takewhile
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import (
    check_count,
    check_min_p,
    check_not_negative,
    check_scale,
    check_top_k,
    check_top_p,
)
from mcore_logprobs.consistency import check_call, comparing
from mcore_logprobs.debug.dump_file import number_of, read_dump, whole_number_of
from mcore_logprobs.debug.mismatch_result import (
    CAUSES,
    RIGHT,
    SETTINGS,
    MismatchExplanation,
    Settings,
    cause_of,
    part_of,
)
from mcore_logprobs.debug.mismatch_search import (
    OFFSETS,
    Batch,
    Rows,
    Source,
    check_known,
    check_vocab_size,
    distance,
)
from mcore_logprobs.groups import resolve_tp_group

_BEYOND_ROUNDING = 0.1  # nats, mean |.|: more than rounding in the layers makes


def explain_mismatch(
    train_logprobs: object,
    rollout_logprobs: object,
    target: object,
    *,
    mask: object = None,
    logits: object = None,
    hidden: object = None,
    weight: object = None,
    stale_logits: object = None,
    stale_hidden: object = None,
    stale_weight: object = None,
    float32_logits: object = None,
    float32_hidden: object = None,
    rollout_logits: object = None,
    rollout_hidden: object = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    train: Mapping[str, object] | None = None,
    rollout: Mapping[str, object] | None = None,
    threshold: float = 1e-3,
    search_tokens: int = 256,
    tp_group: ProcessGroup | None = None,
) -> MismatchExplanation:
    """Split `train_logprobs - rollout_logprobs` of a batch into its causes.

    Without logits and hidden states only values that stand one position off can be found, and the
    cause is named as the trainer's though it may be the engine's. The notes say so, and which
    settings were not checked.

    Shape:
        train_logprobs, rollout_logprobs, target, mask: `[b, s]`, or `[s]` for one sequence.
        logits, stale_logits: `[b, s, V/TP]`, the trainer's, as they leave the head: no temperature.
            Or hidden, stale_hidden `[b, s, h]` with weight, stale_weight `[V/TP, h]` (stale_weight
            None: weight): a tile of logits is computed at a time, in float32. float32_* and
            rollout_* likewise, with weight. With vocab_size, rollout_logits may be padded in their
            own way: at least vocab_size columns over all ranks.

    Args:
        target: Megatron's labels, already shifted: target[t] is token t + 1. Give those of the
            prompt too where you have them, and say by `mask` which tokens count: a wrong shift
            needs the neighbors.
        mask: the tokens that count; None: where target is not ignore_index.
        stale_logits, stale_hidden, stale_weight: the same from the weights before the last update,
            to tell stale weights from the rest.
        float32_logits, float32_hidden: the same from a float32 forward of the trainer's weights, to
            tell rounding in the layers of either side from the rest.
        rollout_logits, rollout_hidden: the same as the engine computed them, to tell its layers
            from its head.
        temperature, top_k, top_p, min_p: the sampler's. vocab_size: the true vocabulary.
        train, rollout: fields of `Settings` that are known of a side and not to be searched.
        threshold: nats, of the share of tokens.
        search_tokens: how many tokens, spread evenly, the search looks at.

    Collectives, over TP: those of `vocab_parallel_sampling_logprobs` and `vocab_parallel_gather`,
    some 50 calls per side. For a look at a run, not for a hot path; the host reads values back.

    Raises:
        ValueError: shapes, dtypes or settings that do not fit; no token that counts, or one whose
            target is outside the vocabulary; stale_*, float32_* or rollout_* without logits or
            hidden. At the first call with a width, on every rank of tp_group: other settings,
            reports, targets or tokens on one of them.
    """
    arguments = dict(locals())  # the arguments by name
    check_count("search_tokens", search_tokens)
    check_not_negative("threshold", threshold)
    check_scale("temperature", temperature)
    check_top_k("top_k", top_k)
    check_top_p("top_p", top_p)
    check_min_p("min_p", min_p)
    check_vocab_size("vocab_size", vocab_size)
    batch = Batch.of(train_logprobs, rollout_logprobs, target, mask, ignore_index)
    known = {
        side: check_known(side, fields) for side, fields in (("train", train), ("rollout", rollout))
    }
    fresh = Source.of("", arguments, batch.shape)
    if fresh is None:
        batch.check_ids(vocab_size)
        return _without_logits(batch, threshold, arguments)
    rows = Rows(
        batch,
        fresh=fresh,
        stale=Source.of("stale_", arguments, batch.shape, weight),
        float32=Source.of("float32_", arguments, batch.shape, weight),
        engine=Source.of("rollout_", arguments, batch.shape, weight),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        vocab_size=vocab_size,
        tp_group=tp_group,
    )
    reports = {"train_logprobs": batch.train, "rollout_logprobs": batch.rollout}
    given = arguments | reports | {"target": batch.target, "mask": batch.positions}
    with comparing("explain_mismatch", lambda: given):
        check_call(fresh.width, resolve_tp_group(tp_group), fresh.flat.device)
    batch.check_ids(rows.ids)
    for side, settings in known.items():
        for name, source, prefix in (
            ("stale_weights", rows.stale, "stale"),
            ("engine_layers", rows.engine, "rollout"),
        ):
            if settings.get(name) and source is None:
                raise ValueError(f"{side}: {name}: expected {prefix}_logits or {prefix}_hidden too")
    notes = rows.unchecked()
    spread = batch.positions[:: max(1, -(-len(batch.positions) // search_tokens))]
    ours = rows.search(batch.train, spread, known["train"])
    theirs = rows.search(batch.rollout, spread, known["rollout"])
    steps = _steps(ours, theirs)
    changed = {name for name, _, _ in steps}
    for name in SETTINGS:
        shared = getattr(ours, name) == getattr(theirs, name) != getattr(RIGHT, name)
        if shared and name not in changed:
            unless = ""
            if name == "temperature_applied":
                unless = ", unless the logits given are divided by it already"
            notes.append(f"both sides: {CAUSES[name][0]}. They agree, and both are wrong{unless}")
    # Each figure takes collectives: in one order on all ranks, which a set of texts has not.
    path = dict.fromkeys((ours, theirs, *(settings for _, *pair in steps for settings in pair)))
    figures = {settings: rows.logprobs(settings, batch.positions) for settings in path}
    notes += _unlike_any(batch, figures[ours], figures[theirs])
    parts = [
        (name, before, after, figures[before] - figures[after]) for name, before, after in steps
    ]
    return _explained(batch, parts, list(figures.values()), ours, theirs, threshold, notes)


def _unlike_any(batch: Batch, ours: Tensor, theirs: Tensor) -> list[str]:
    """A note on each side whose values none of the computations that were tried gives.

    Args:
        ours, theirs: the figures that come closest to either side, `[tokens]`.
    """
    notes = []
    for side, reported, figures in (
        ("train", batch.train, ours),
        ("rollout", batch.rollout, theirs),
    ):
        size = (reported[batch.positions] - figures).abs()
        mean = float(size[size.isfinite()].mean())
        if mean > _BEYOND_ROUNDING:
            notes.append(
                f"{side}: no setting that was tried comes closer than {mean:.1e} nats (mean |.|); "
                "check its logits, its targets, and the sampler's temperature and filters"
            )
    return notes


def _explained(
    batch: Batch,
    parts: Sequence[tuple[str, Settings, Settings, Tensor]],
    figures: Sequence[Tensor],
    ours: Settings,
    theirs: Settings,
    threshold: float,
    notes: Sequence[str],
) -> MismatchExplanation:
    """The explanation of the tokens whose figures are all finite.

    Args:
        parts: each setting that changes, before, after, and by how much, `[tokens]`.
        figures: `[tokens]` each, that must be finite besides the two sides' own.
    """
    total = batch.train[batch.positions] - batch.rollout[batch.positions]
    finite = total.isfinite()
    for values in figures:
        finite &= values.isfinite()
    if not finite.any():
        raise ValueError("expected tokens with finite log-probabilities on both sides, got none")
    causes = tuple(
        cause_of(name, before, after, size[finite], threshold)
        for name, before, after, size in parts
    )
    rest = total[finite] - sum((c.per_token for c in causes), torch.zeros(()).double())
    return MismatchExplanation(
        tokens=int(finite.sum()),
        left_out=int((~finite).sum()),
        threshold=threshold,
        train=ours,
        rollout=theirs,
        total=part_of("all", total[finite], threshold),
        causes=causes,
        remainder=part_of("remainder", rest, threshold),
        notes=tuple(notes),
    )


def _steps(ours: Settings, theirs: Settings) -> list[tuple[str, Settings, Settings]]:
    """From the trainer's settings to the engine's, one change at a time: (name, before, after).

    Two heads that both round agree on that only where they round the same logits. Where the hidden
    states differ, each rounding is a part of its own: the trainer's is undone first, the engine's
    done last.
    """
    at, steps = ours, []

    def change(name: str, value: Any) -> None:
        nonlocal at
        before, at = at, replace(at, **{name: value})
        steps.append((name, before, at))

    layers = ("stale_weights", "trainer_layers", "engine_layers")
    apart = any(getattr(ours, name) != getattr(theirs, name) for name in layers)
    both_round = ours.bf16_logits and theirs.bf16_logits and apart
    if both_round:
        change("bf16_logits", False)
    # With other settings a filter cuts other tokens, some of which both sides know: no further
    # setting is changed under the trainer's, and the engine's comes last.
    filter_first = sorted(SETTINGS, key=lambda name: name != "filter_applied")
    for name in filter_first if ours.filter_applied else SETTINGS:
        if getattr(ours, name) != getattr(theirs, name):
            change(name, getattr(theirs, name))
    if both_round:
        change("bf16_logits", True)
    return steps


# Arguments that say nothing without logits or hidden states: tensors, and settings.
_OF_LOGITS = (
    *("stale_logits", "stale_hidden", "stale_weight", "float32_logits", "float32_hidden"),
    *("rollout_logits", "rollout_hidden"),
)
_UNREAD = ("temperature", "top_k", "top_p", "min_p", "vocab_size", "train", "rollout")
_DUMP_NUMBERS = ("temperature", "top_p", "min_p")
_DUMP_WHOLE_NUMBERS = ("top_k", "vocab_size", "ignore_index")
# Of a dump: the arguments that describe the run, not the search.
_DUMP_KEYS = list(takewhile(lambda name: name != "train", signature(explain_mismatch).parameters))


def load_mismatch_dump(path: str | PathLike[str]) -> dict[str, Any]:
    """The arguments of `explain_mismatch` from a file: a dictionary saved by `torch.save` (.pt), or
    arrays saved by `numpy.savez` (.npz). Keys are the names of the arguments before `train`;
    numbers may be 0-d.

    Nothing in the file is executed: pickled objects other than tensors and numbers are refused.

    Raises:
        ValueError: another suffix, a damaged file, a key that is not known, one of train_logprobs,
            rollout_logprobs and target missing, or a value that is no tensor or number.
        OSError: the file cannot be opened.
    """
    dump = read_dump(path)
    unknown = sorted(str(key) for key in set(dump) - set(_DUMP_KEYS))
    if unknown:
        raise ValueError(
            f"{path}: unknown key {', '.join(unknown)}; known: {', '.join(_DUMP_KEYS)}"
        )
    missing = [key for key in _DUMP_KEYS[:3] if key not in dump]
    if missing:
        raise ValueError(
            f"{path}: expected the keys {', '.join(_DUMP_KEYS[:3])}; {missing} missing"
        )
    for key, value in dump.items():
        if key in _DUMP_NUMBERS:
            dump[key] = number_of(path, dump, key)
        elif key in _DUMP_WHOLE_NUMBERS:
            dump[key] = whole_number_of(path, dump, key)
        elif not isinstance(value, Tensor | list | tuple):
            raise ValueError(f"{path}: {key}: expected a tensor, got {type(value).__name__}")
    return dump


def _without_logits(
    batch: Batch, threshold: float, arguments: Mapping[str, object]
) -> MismatchExplanation:
    """From only the two reports: whether one stands a position off.

    Args:
        arguments: those of `explain_mismatch`; what asks for logits is told, or refused.
    """
    for name in _OF_LOGITS:
        if arguments[name] is not None:
            raise ValueError(f"{name}: expected logits or hidden with it")
    defaults = signature(explain_mismatch).parameters
    unread = [name for name in _UNREAD if arguments[name] != defaults[name].default]
    train, rollout = batch.train[batch.positions], batch.rollout[batch.positions]
    counted = torch.zeros_like(batch.train, dtype=torch.bool)
    counted[batch.positions] = True
    ours, aligned, moved = RIGHT, train, distance(train, rollout)
    for name in ("values late", "values early"):
        # The trainer's value of token t stands one further on: at t + 1 where it is late.
        other, inside = batch.neighbor(batch.positions, -OFFSETS[name][0])
        inside &= counted[other]
        if 2 * int(inside.sum()) < len(batch.positions):
            continue
        error = distance(batch.train[other][inside], rollout[inside])
        if error < moved / 2:
            ours = Settings(alignment=name)  # type: ignore[arg-type]
            aligned, moved = torch.where(inside, batch.train[other], torch.nan), error
    parts = [] if ours == RIGHT else [("alignment", ours, RIGHT, train - aligned)]
    notes = ["no logits or hidden: only values one position off can be found"]
    if unread:
        notes[0] += f"; not looked at: {', '.join(unread)}"
    if parts:
        opposite = "early" if ours.alignment == "values late" else "late"
        notes.append(f"or the engine's values are {opposite}: two reports alone do not tell which")
    return _explained(batch, parts, [aligned], ours, RIGHT, threshold, notes)
