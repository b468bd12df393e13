"""Why the trainer's log-probabilities differ from the rollout engine's, cause by cause.

Each side reports a number per token. Which computation gives that number is found by trying: from
the trainer's logits, every combination of the settings below is computed for some tokens, and the
one whose figures come closest to a side's report is taken for what that side computed (of those
about as close, the one with the fewest departures from the right setting).

    setting      right                            departures
    alignment    label t is token t + 1           labels or values one position late or early
    weights      the trainer's                    those before the last update ("stale")
    padding      padded columns left out          counted in the softmax
    rounding     float32 logits                   bfloat16 logits
    temperature  applied                          left out
    filter       top-k and top-p applied          left out

What the two sides do differently explains the difference. Changing the trainer's settings into the
engine's one by one, in the order above, splits `train - rollout` of each token into parts that add
up to it exactly, with what no setting explains as the remainder.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.logits.gather import vocab_parallel_gather
from mcore_logprobs.logits.sampling import vocab_parallel_sampling_logprobs

__all__ = [
    "MismatchCause",
    "MismatchExplanation",
    "Settings",
    "explain_mismatch",
    "load_mismatch_dump",
]

Alignment = Literal["right", "labels late", "labels early", "values late", "values early"]

# Of each alignment: which row, and the label of which position, counted from the token's own.
_OFFSETS: dict[str, tuple[int, int]] = {
    "right": (0, 0),
    "labels late": (0, -1),
    "labels early": (0, 1),
    "values late": (-1, -1),
    "values early": (1, 1),
}
_CAP = 10.0  # nats: a token that is further off says no more than that a hypothesis is wrong
_CLOSE = 1.5  # a simpler hypothesis is preferred while its error is under this multiple of the best
_FLOOR = 2e-5  # nats: float32 log-probabilities of two implementations agree no better
_TILE = 256  # rows of logits at a time


@dataclass(frozen=True)
class Settings:
    """What one side computed. The defaults are the right ones; see the module's docstring."""

    alignment: Alignment = "right"
    stale_weights: bool = False
    padding_counted: bool = False
    bf16_logits: bool = False
    temperature_applied: bool = True
    filter_applied: bool = True

    def departures(self) -> list[str]:
        """Names of the settings that are not the right ones."""
        return [name for name in _SETTINGS if getattr(self, name) != getattr(_RIGHT, name)]


_RIGHT = Settings()
_SETTINGS = tuple(Settings.__dataclass_fields__)
# A cause's name, and the cure where the trainer and where the engine departs from the right setting
_CAUSES: dict[str, tuple[str, str, str]] = {
    "alignment": (
        "shifted by one",
        "Megatron's labels are already shifted: label t is token t + 1, and the value at t is that "
        "token's. Shift once, before the split over CP (context_parallel_shift)",
        "the engine's value of token t + 1 belongs at position t: drop or add one at the start",
    ),
    "stale_weights": (
        "stale weights",
        "score with the weights that rolled out (before the update), as old_logprobs",
        "send the weights to the engine after every update and drop its prefix cache; or correct "
        "with truncated_importance_weights",
    ),
    "padding_counted": (
        "padded vocabulary counted",
        "LogprobConfig(vocab_size=the true size), or vocab_size= of the function",
        "cut the padded rows off the weights that the engine loads",
    ),
    "bf16_logits": (
        "rounding of the head",
        "logits_dtype=torch.float32: float32 logits from bfloat16 weights, a chunk at a time",
        'a float32 head in the engine (vLLM: --hf-overrides \'{"head_dtype": "float32"}\'), or '
        "correct with truncated_importance_weights",
    ),
    "temperature_applied": (
        "temperature not applied",
        "LogprobConfig(temperature=the sampler's), or temperature= of the function",
        'log-probabilities after the temperature (vLLM: logprobs_mode="processed_logprobs")',
    ),
    "filter_applied": (
        "truncation mass",
        "the sampler's top_k and top_p in vocab_parallel_sampling_logprobs",
        'log-probabilities after the filters (vLLM: logprobs_mode="processed_logprobs")',
    ),
}


@dataclass(frozen=True)
class MismatchCause:
    """One part of `train - rollout`.

    Attributes:
        name: the cause, or "remainder".
        side: "train" or "rollout": who departs from the right setting; "" for the remainder.
        setting: the field of `Settings`; "" for the remainder.
        mean, mean_abs, max_abs: of its size per token, in nats.
        share: of the tokens, those that it moves by more than the threshold.
        cure: the setting to change; "" for the remainder.
        per_token: [tokens] its size, float64 on the CPU.
    """

    name: str
    side: str
    setting: str
    mean: float
    mean_abs: float
    max_abs: float
    share: float
    cure: str
    per_token: Tensor = field(repr=False)


@dataclass(frozen=True)
class MismatchExplanation:
    """What `explain_mismatch` found; `causes` and `remainder` add up to `total`, token by token.

    Attributes:
        tokens: how many were explained.
        left_out: tokens without a finite figure: impossible (-inf) under a filter of one side, or
            next to a label that is not known.
        threshold: nats, of `share`.
        train, rollout: what each side was found to compute.
        total: train - rollout; causes: its parts; remainder: what no setting explains.
        notes: what could not be checked and why, and mistakes that both sides share.
    """

    tokens: int
    left_out: int
    threshold: float
    train: Settings
    rollout: Settings
    total: MismatchCause
    causes: tuple[MismatchCause, ...]
    remainder: MismatchCause
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a line of JSON: no per-token values."""
        keys = ("name", "side", "mean", "mean_abs", "max_abs", "share", "cure")

        def plain(cause: MismatchCause) -> dict[str, Any]:
            return {key: getattr(cause, key) for key in keys}

        return {
            "tokens": self.tokens,
            "left_out": self.left_out,
            "threshold": self.threshold,
            "train": {name: getattr(self.train, name) for name in _SETTINGS},
            "rollout": {name: getattr(self.rollout, name) for name in _SETTINGS},
            "total": plain(self.total),
            "causes": [plain(cause) for cause in self.causes],
            "remainder": plain(self.remainder),
            "notes": list(self.notes),
        }

    def text(self) -> str:
        """A table: a line per cause, then the cures and the notes."""
        head = f"{'train - rollout, nats':<36}{'mean':>11}{'mean |.|':>11}{'max |.|':>11}"
        lines = [f"{head}{f'> {self.threshold:g}':>11}"]
        for part in (self.total, *self.causes, self.remainder):
            name = f"  {part.name} ({part.side})" if part.side else f"  {part.name}"
            lines.append(
                f"{name:<36}{part.mean:>+11.2e}{part.mean_abs:>11.2e}{part.max_abs:>11.2e}"
                f"{part.share:>11.1%}"
            )
        dropped = f", {self.left_out} left out (no finite figure)" if self.left_out else ""
        lines.append(f"{self.tokens} tokens{dropped}")
        lines += [f"cure of {c.name} ({c.side}): {c.cure}" for c in self.causes]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def figure(self) -> Any:
        """A matplotlib Figure: how large each part is over the tokens, and the two sides before and
        after the explained parts are taken away. Drawn without a display."""
        return _figure(self)


def explain_mismatch(
    train_logprobs: Any,
    rollout_logprobs: Any,
    target: Any,
    *,
    mask: Any = None,
    logits: Any = None,
    hidden: Any = None,
    weight: Any = None,
    stale_logits: Any = None,
    stale_hidden: Any = None,
    stale_weight: Any = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    train: Mapping[str, Any] | None = None,
    rollout: Mapping[str, Any] | None = None,
    threshold: float = 1e-3,
    search_tokens: int = 256,
    tp_group: ProcessGroup | None = None,
) -> MismatchExplanation:
    """Split `train_logprobs - rollout_logprobs` of a batch into its causes.

    Without logits and hidden states only values that stand one position off can be found.

    Shape:
        train_logprobs, rollout_logprobs, target, mask: `[b, s]`, or `[s]` for one sequence.
        logits, stale_logits: `[b, s, V/TP]`, the trainer's, as they leave the head: no temperature.
            Or hidden, stale_hidden `[b, s, h]` with weight, stale_weight `[V/TP, h]` (stale_weight
            None: weight): a tile of logits is computed at a time, in float32.

    Args:
        target: Megatron's labels, already shifted: target[t] is token t + 1. Give those of the
            prompt too where you have them, and say by `mask` which tokens count: a wrong shift
            needs the neighbours.
        mask: the tokens that count; None: where target is not ignore_index.
        stale_logits, stale_hidden, stale_weight: the same from the weights before the last update,
            to tell stale weights from the rest.
        temperature, top_k, top_p: the sampler's. vocab_size: the true vocabulary.
        train, rollout: fields of `Settings` that are known of a side and not to be searched.
        threshold: nats, of the share of tokens.
        search_tokens: how many tokens, spread evenly, the search looks at.

    Collectives, over TP: those of `vocab_parallel_sampling_logprobs` and `vocab_parallel_gather`,
    some 50 calls a side. For a look at a run, not for a hot path; the host reads values back.

    Raises:
        ValueError: shapes, dtypes or settings that do not fit; no token that counts.
    """
    batch = _Batch.of(train_logprobs, rollout_logprobs, target, mask, ignore_index)
    known = {side: _known(side, given) for side, given in (("train", train), ("rollout", rollout))}
    if logits is None and hidden is None:
        return _without_logits(batch, threshold)
    rows = _Rows(
        batch,
        fresh=_Source.of("", logits, hidden, weight, batch.shape),
        stale=_stale_source(stale_logits, stale_hidden, stale_weight, weight, batch.shape),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        vocab_size=vocab_size,
        tp_group=tp_group,
    )
    notes = rows.unchecked()
    spread = batch.positions[:: max(1, -(-len(batch.positions) // search_tokens))]
    found = {
        "train": rows.search(batch.train, spread, known["train"]),
        "rollout": rows.search(batch.rollout, spread, known["rollout"]),
    }
    ours, theirs = found["train"], found["rollout"]
    for name in _SETTINGS:
        if getattr(ours, name) == getattr(theirs, name) != getattr(_RIGHT, name):
            notes.append(f"both sides: {_CAUSES[name][0]}. They agree, and both are wrong")

    # From the trainer's settings to the engine's, one change at a time.
    at, steps = ours, []
    for name in _SETTINGS:
        if getattr(ours, name) != getattr(theirs, name):
            after = replace(at, **{name: getattr(theirs, name)})
            steps.append((name, at, after))
            at = after
    figures = {s: rows.logprobs(s, batch.positions) for s in {ours, theirs, at}}
    for _, before, after in steps:
        for settings in (before, after):
            if settings not in figures:
                figures[settings] = rows.logprobs(settings, batch.positions)
    total = batch.train[batch.positions] - batch.rollout[batch.positions]
    finite = total.isfinite()
    for values in figures.values():
        finite &= values.isfinite()
    if not finite.any():
        raise ValueError("expected tokens with finite log-probabilities on both sides, got none")
    parts = [
        _cause(name, ours, theirs, (figures[before] - figures[after])[finite], threshold)
        for name, before, after in steps
    ]
    rest = total[finite] - sum((p.per_token for p in parts), torch.zeros(()).double())
    return MismatchExplanation(
        tokens=int(finite.sum()),
        left_out=int((~finite).sum()),
        threshold=threshold,
        train=ours,
        rollout=theirs,
        total=_part("all", total[finite], threshold),
        causes=tuple(parts),
        remainder=_part("remainder", rest, threshold),
        notes=tuple(notes),
    )


_DUMP_KEYS = (
    "train_logprobs",
    "rollout_logprobs",
    "target",
    "mask",
    "logits",
    "hidden",
    "weight",
    "stale_logits",
    "stale_hidden",
    "stale_weight",
    "temperature",
    "top_k",
    "top_p",
    "vocab_size",
    "ignore_index",
)


def load_mismatch_dump(path: str | PathLike[str]) -> dict[str, Any]:
    """The arguments of `explain_mismatch` from a file: a dictionary saved by `torch.save` (.pt), or
    arrays saved by `numpy.savez` (.npz). Keys are the names of the arguments; numbers may be 0-d.

    Nothing in the file is executed: pickled objects other than tensors and numbers are refused.

    Raises:
        ValueError: another suffix, a key that is not known, or one of train_logprobs,
            rollout_logprobs and target missing.
    """
    file = Path(path)
    if file.suffix == ".npz":
        import numpy as np

        with np.load(file, allow_pickle=False) as arrays:
            found: dict[str, Any] = {key: torch.from_numpy(arrays[key]) for key in arrays.files}
    elif file.suffix in (".pt", ".pth"):
        found = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(found, dict):
            raise ValueError(f"{file}: expected a dictionary, got {type(found).__name__}")
    else:
        raise ValueError(f"{file}: expected a .npz or .pt file")
    unknown = sorted(set(found) - set(_DUMP_KEYS))
    if unknown:
        raise ValueError(
            f"{file}: unknown key {', '.join(unknown)}; known: {', '.join(_DUMP_KEYS)}"
        )
    missing = [key for key in _DUMP_KEYS[:3] if key not in found]
    if missing:
        raise ValueError(
            f"{file}: expected the keys {', '.join(_DUMP_KEYS[:3])}; {missing} missing"
        )
    for key in _DUMP_KEYS[10:]:
        if isinstance(found.get(key), Tensor):
            found[key] = found[key].item()
    return found


# ---- inputs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Batch:
    """The checked batch, flat; float64 on the CPU."""

    shape: tuple[int, int]
    train: Tensor  # [b * s]
    rollout: Tensor  # [b * s]
    target: Tensor  # [b * s]
    ignore_index: int
    positions: Tensor  # [tokens] flat indices of the tokens that count

    @classmethod
    def of(cls, train: Any, rollout: Any, target: Any, mask: Any, ignore_index: int) -> _Batch:
        train, rollout = torch.as_tensor(train), torch.as_tensor(rollout)
        target = torch.as_tensor(target)
        if train.dim() not in (1, 2):
            raise ValueError(f"train_logprobs: expected [b, s] or [s], got {list(train.shape)}")
        if not train.is_floating_point() or not rollout.is_floating_point():
            raise ValueError(
                f"log-probabilities: expected floating dtypes, got {train.dtype}, {rollout.dtype}"
            )
        if target.is_floating_point() or target.dtype is torch.bool:
            raise ValueError(f"target: expected an integer dtype, got {target.dtype}")
        keep = target != ignore_index
        if mask is not None:
            mask = torch.as_tensor(mask).bool()
        for name, x in (("rollout_logprobs", rollout), ("target", target), ("mask", mask)):
            if x is not None and x.shape != train.shape:
                raise ValueError(f"{name}: expected {list(train.shape)}, got {list(x.shape)}")
        if mask is not None:
            keep = keep & mask
        positions = keep.cpu().flatten().nonzero()[:, 0]
        if not len(positions):
            raise ValueError("expected at least one token that counts, got none")
        b, s = train.shape if train.dim() == 2 else (1, train.shape[0])
        train, rollout = (x.detach().double().cpu().flatten() for x in (train, rollout))
        bad = int((train[positions].isnan() | rollout[positions].isnan()).sum())
        if bad:
            raise ValueError(f"expected no NaN where a token counts, got {bad} tokens")
        return cls((b, s), train, rollout, target.cpu().flatten(), ignore_index, positions)

    def neighbour(self, positions: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """(flat index, whether it lies in the same sequence) of positions + offset."""
        length = self.shape[1]
        column = positions % length + offset
        inside = (column >= 0) & (column < length)
        return torch.where(inside, positions + offset, positions), inside


@dataclass(frozen=True)
class _Source:
    """Where rows of logits come from."""

    logits: Tensor | None  # [b * s, V/TP]
    hidden: Tensor | None  # [b * s, h]
    weight: Tensor | None  # [V/TP, h]

    @classmethod
    def of(
        cls, prefix: str, logits: Any, hidden: Any, weight: Any, shape: tuple[int, int]
    ) -> _Source:
        if (logits is None) == (hidden is None):
            raise ValueError(f"expected one of {prefix}logits and {prefix}hidden")
        name, x = (f"{prefix}logits", logits) if hidden is None else (f"{prefix}hidden", hidden)
        x = torch.as_tensor(x).detach()
        flat = x.reshape(-1, x.shape[-1]) if x.dim() in (2, 3) else x
        if x.dim() not in (2, 3) or flat.shape[0] != shape[0] * shape[1]:
            raise ValueError(f"{name}: expected [{shape[0]}, {shape[1]}, n], got {list(x.shape)}")
        if hidden is None:
            return cls(flat, None, None)
        if weight is None:
            raise ValueError(f"{name}: expected {prefix}weight with it")
        weight = torch.as_tensor(weight).detach()
        if weight.dim() != 2 or weight.shape[1] != flat.shape[1]:
            raise ValueError(
                f"{prefix}weight: expected [V/TP, {flat.shape[1]}], got {list(weight.shape)}"
            )
        return cls(None, flat, weight)

    @property
    def width(self) -> int:
        tensor = self.logits if self.weight is None else self.weight.T
        assert tensor is not None
        return tensor.shape[1]

    def rows(self, index: Tensor) -> Tensor:
        """[rows, V/TP] float32."""
        if self.logits is not None:
            return self.logits[index.to(self.logits.device)].float()
        assert self.hidden is not None
        assert self.weight is not None
        return self.hidden[index.to(self.hidden.device)].float() @ self.weight.float().T


def _stale_source(
    logits: Any, hidden: Any, stale_weight: Any, weight: Any, shape: tuple[int, int]
) -> _Source | None:
    if logits is None and hidden is None:
        if stale_weight is not None:
            raise ValueError("stale_weight: expected stale_hidden with it")
        return None
    return _Source.of(
        "stale_", logits, hidden, weight if stale_weight is None else stale_weight, shape
    )


def _known(side: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    for name, value in (given or {}).items():
        if name not in _SETTINGS:
            raise ValueError(f"{side}: unknown setting {name!r}; known: {', '.join(_SETTINGS)}")
        choices = get_args(Alignment) if name == "alignment" else (False, True)
        if value not in choices:
            raise ValueError(f"{side}: {name}: expected one of {choices}, got {value!r}")
    return dict(given or {})


# ---- hypotheses --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """Log-probabilities of the batch's tokens under any settings."""

    batch: _Batch
    fresh: _Source
    stale: _Source | None
    temperature: float
    top_k: int | None
    top_p: float
    vocab_size: int | None
    tp_group: ProcessGroup | None

    def choices(self, name: str) -> tuple[Any, ...]:
        """The values of a setting that give different figures here, the right one first."""
        if name == "alignment":
            return get_args(Alignment)
        told_apart = {
            "stale_weights": self.stale is not None,
            "padding_counted": self.vocab_size is not None,
            "bf16_logits": True,
            "temperature_applied": self.temperature != 1.0,
            "filter_applied": self.top_p < 1.0 or self.top_k not in (None, 0, -1),
        }
        right = getattr(_RIGHT, name)
        return (right, not right) if told_apart[name] else (right,)

    def unchecked(self) -> list[str]:
        notes = []
        if self.stale is None:
            notes.append("stale weights not checked: no stale_logits or stale_hidden")
        if self.vocab_size is None:
            notes.append("padded vocabulary not checked: no vocab_size")
        return notes

    def search(self, reported: Tensor, positions: Tensor, known: dict[str, Any]) -> Settings:
        """The settings whose figures come closest to `reported`."""
        wanted = reported[positions]

        def best(free: dict[str, tuple[Any, ...]], base: Settings) -> Settings:
            scored = []
            for values in itertools.product(*free.values()):
                settings = replace(base, **dict(zip(free, values, strict=True)))
                scored.append((self._error(settings, wanted, positions), settings))
            limit = max(min(error for error, _ in scored) * _CLOSE, _FLOOR)
            close = [(len(s.departures()), error, i) for i, (error, s) in enumerate(scored)]
            _, _, chosen = min(entry for entry in close if entry[1] <= limit)
            return scored[chosen][1]

        start = replace(_RIGHT, **known)
        free = {name: self.choices(name) for name in _SETTINGS if name not in known}
        # A shift is worth nats, so that it shows whatever the finer settings are.
        coarse = {k: v for k, v in free.items() if k not in _FINE}
        shift = best(coarse, start).alignment
        fine = {k: v for k, v in free.items() if k != "alignment"}
        return best(fine, replace(start, alignment=shift))

    def _error(self, settings: Settings, wanted: Tensor, positions: Tensor) -> float:
        """Mean |difference| over the tokens, each capped; infinite where most cannot be known."""
        got = self.logprobs(settings, positions)
        known = ~got.isnan()
        if 2 * int(known.sum()) < len(wanted):
            return math.inf
        return _distance(got[known], wanted[known])

    @torch.no_grad()
    def logprobs(self, settings: Settings, positions: Tensor) -> Tensor:
        """float64 [positions] on the CPU; NaN where a neighbour's label is not known."""
        row_offset, label_offset = _OFFSETS[settings.alignment]
        row, row_inside = self.batch.neighbour(positions, row_offset)
        label, label_inside = self.batch.neighbour(positions, label_offset)
        target = self.batch.target[label]
        known = row_inside & label_inside & (target != self.batch.ignore_index)
        source = self.stale if settings.stale_weights else self.fresh
        assert source is not None, "stale weights are a choice only where there are some"
        parts = []
        for start in range(0, len(positions), _TILE):
            tile = slice(start, start + _TILE)
            z = source.rows(row[tile])
            parts.append(self._figures(z, target[tile].clamp(min=0).to(z.device), settings))
        values = torch.cat(parts).double().cpu()
        return torch.where(known, values, torch.nan)

    def _figures(self, z: Tensor, target: Tensor, settings: Settings) -> Tensor:
        """z: [rows, V/TP] float32 -> [rows]."""
        if settings.bf16_logits:
            z = z.bfloat16().float()
        temperature = self.temperature if settings.temperature_applied else 1.0
        options: dict[str, Any] = {
            "temperature": temperature,
            "vocab_size": None if settings.padding_counted else self.vocab_size,
            "tp_group": self.tp_group,
        }
        if settings.filter_applied and len(self.choices("filter_applied")) > 1:
            return vocab_parallel_sampling_logprobs(
                z, target, top_k=self.top_k, top_p=self.top_p, **options
            )
        return vocab_parallel_gather(z, target[:, None], log_softmax=True, **options)[:, 0]


def _distance(a: Tensor, b: Tensor) -> float:
    """Mean |a - b|, each capped; tokens that are impossible in both are equal."""
    return torch.where(a == b, 0.0, (a - b).abs()).clamp(max=_CAP).mean().item()


_FINE = ("stale_weights", "padding_counted", "bf16_logits")


def _without_logits(batch: _Batch, threshold: float) -> MismatchExplanation:
    """From the two reports alone: whether one stands a position off."""
    total = batch.train[batch.positions] - batch.rollout[batch.positions]
    counted = torch.zeros_like(batch.train, dtype=torch.bool)
    counted[batch.positions] = True
    best = ("right", batch.train[batch.positions])
    moved = _distance(batch.train[batch.positions], batch.rollout[batch.positions])
    for name in ("values late", "values early"):
        # The trainer's value of token t stands one further on: at t + 1 where it is late.
        other, inside = batch.neighbour(batch.positions, -_OFFSETS[name][0])
        inside &= counted[other]
        if 2 * int(inside.sum()) < len(batch.positions):
            continue
        error = _distance(batch.train[other][inside], batch.rollout[batch.positions][inside])
        if error < moved / 2:
            best, moved = (name, torch.where(inside, batch.train[other], torch.nan)), error
    name, aligned = best
    ours = Settings(alignment=name)  # type: ignore[arg-type]
    finite = total.isfinite() & aligned.isfinite()
    if not finite.any():
        raise ValueError("expected tokens with finite log-probabilities on both sides, got none")
    parts: tuple[MismatchCause, ...] = ()
    rest = total[finite]
    if name != "right":
        size = (batch.train[batch.positions] - aligned)[finite]
        parts = (_cause("alignment", ours, _RIGHT, size, threshold),)
        rest = rest - size
    return MismatchExplanation(
        tokens=int(finite.sum()),
        left_out=int((~finite).sum()),
        threshold=threshold,
        train=ours,
        rollout=_RIGHT,
        total=_part("all", total[finite], threshold),
        causes=parts,
        remainder=_part("remainder", rest, threshold),
        notes=("no logits or hidden: only values one position off can be found",),
    )


def _cause(
    setting: str, ours: Settings, theirs: Settings, size: Tensor, threshold: float
) -> MismatchCause:
    name, cure_train, cure_rollout = _CAUSES[setting]
    train_departs = getattr(ours, setting) != getattr(_RIGHT, setting)
    # Where both depart (late against early), the trainer's cure is named first.
    side, cure = ("train", cure_train) if train_departs else ("rollout", cure_rollout)
    part = _part(name, size, threshold)
    return replace(part, side=side, setting=setting, cure=cure)


def _part(name: str, size: Tensor, threshold: float) -> MismatchCause:
    absolute = size.abs()
    return MismatchCause(
        name=name,
        side="",
        setting="",
        mean=size.mean().item(),
        mean_abs=absolute.mean().item(),
        max_abs=absolute.max().item(),
        share=(absolute > threshold).double().mean().item(),
        cure="",
        per_token=size,
    )


# ---- picture -----------------------------------------------------------------------------------

_COLORS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#0891b2", "#be185d")


def _figure(found: MismatchExplanation) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'the figure needs matplotlib: pip install "mcore-logprobs[examples]"'
        ) from error
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    bars, tail, scatter = figure.subplots(1, 3, width_ratios=(1.05, 1, 1))
    parts = [
        (found.total, "#1f2933"),
        *zip(found.causes, _COLORS, strict=False),
        (found.remainder, "#9aa5b1"),
    ]
    names = [f"{p.name}\n({p.side})" if p.side else p.name for p, _ in parts]
    sizes = [p.mean_abs for p, _ in parts]
    bars.barh(names[::-1], sizes[::-1], color=[color for _, color in parts][::-1])
    for y, size in enumerate(sizes[::-1]):
        bars.text(size, y, f" {size:.1e}", va="center", fontsize=9)
    bars.set_xlim(right=max(max(sizes), 1e-12) * 1.25)
    bars.set_title("mean size per token, nats", loc="left", fontweight="bold")

    for part, color in parts:
        ordered = part.per_token.abs().sort(descending=True).values.clamp(min=1e-9)
        share = (torch.arange(len(ordered)) + 1) / len(ordered)
        label = part.name
        tail.plot(ordered.tolist(), share.tolist(), color=color, lw=1.8, label=label)
    tail.set(xscale="log", yscale="log", xlabel="nats")
    tail.set_xlim(left=max(1e-7, found.remainder.mean_abs / 300))
    tail.set_title("share of tokens larger than this", loc="left", fontweight="bold")
    tail.legend(framealpha=0.8, edgecolor="none", fontsize=9)

    explained = found.total.per_token - found.remainder.per_token
    keep = slice(None, None, -(-found.tokens // 5000))
    before, after = found.total.per_token[keep], found.remainder.per_token[keep]
    scatter.axhline(0, color="#d5dbe1", lw=1)
    scatter.scatter(
        explained[keep].tolist(), before.tolist(), s=7, alpha=0.5, color="#1f2933", label="before"
    )
    scatter.scatter(
        explained[keep].tolist(), after.tolist(), s=7, alpha=0.5, color="#d97706", label="after"
    )
    scatter.set(xlabel="explained part, nats", ylabel="train - rollout, nats")
    scatter.set_title("each token, before and after", loc="left", fontweight="bold")
    scatter.legend(framealpha=0.8, edgecolor="none", fontsize=9)
    for axes in (bars, tail, scatter):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e5e9ee", lw=0.6)
        axes.set_axisbelow(True)
    figure.suptitle(
        f"train against rollout, {found.tokens} tokens: mean |d| {found.total.mean_abs:.1e}, "
        f"of which unexplained {found.remainder.mean_abs:.1e}",
        fontsize=12,
        x=0.01,
        ha="left",
    )
    return figure
