"""The batch, its logits, and the search for the settings that give what a side reports."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import Check, check_float_tensor
from mcore_logprobs.debug.compare import check_zero_or_one
from mcore_logprobs.debug.mismatch_result import RIGHT, SETTINGS, Alignment, Settings
from mcore_logprobs.groups import group_size, resolve_tp_group
from mcore_logprobs.ops.driver import without_autocast
from mcore_logprobs.ops.gather import vocab_parallel_gather
from mcore_logprobs.ops.sampling import vocab_parallel_sampling_logprobs

# Of each alignment: which row, and the label of which position, counted from the token's own.
OFFSETS: dict[str, tuple[int, int]] = {
    "right": (0, 0),
    "labels late": (0, -1),
    "labels early": (0, 1),
    "values late": (-1, -1),
    "values early": (1, 1),
}
CAP = 10.0  # nats: a token that is further off says no more than that a hypothesis is wrong
_CLOSE = 1.5  # a simpler hypothesis is preferred while its error is under this multiple of the best
_FLOOR = 2e-5  # nats: float32 log-probabilities of two implementations agree no better
_TILE = 256  # rows of logits at a time
_check_id = Check("an int of 64 bits", lambda v: -(2**63) <= v < 2**63, int)
check_vocab_size = Check("an int from 1 to 2**63 - 1", lambda v: 1 <= v < 2**63, int).optional


def _tensor(name: str, value: object) -> Tensor:
    """What can be read as a dense tensor, detached, or a ValueError."""
    try:
        x = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name}: expected a tensor, got {type(value).__name__}") from error
    if x.is_nested or x.layout is not torch.strided or x.is_meta:
        kind = "nested" if x.is_nested else "meta" if x.is_meta else x.layout
        raise ValueError(f"{name}: expected a dense tensor with values, got a {kind} one")
    return x


@dataclass(frozen=True)
class Batch:
    """The checked batch, flat; float64 on the CPU."""

    shape: tuple[int, int]
    train: Tensor  # [b * s]
    rollout: Tensor  # [b * s]
    target: Tensor  # [b * s]
    ignore_index: int
    positions: Tensor  # [tokens] flat indices of the tokens that count

    @classmethod
    def of(
        cls, train: object, rollout: object, target: object, mask: object, ignore_index: int
    ) -> Batch:
        _check_id("ignore_index", ignore_index)
        train, rollout = _tensor("train_logprobs", train), _tensor("rollout_logprobs", rollout)
        target = _tensor("target", target)
        if train.dim() not in (1, 2):
            raise ValueError(f"train_logprobs: expected [b, s] or [s], got {list(train.shape)}")
        if not train.is_floating_point() or not rollout.is_floating_point():
            raise ValueError(
                f"log-probabilities: expected floating dtypes, got {train.dtype}, {rollout.dtype}"
            )
        if target.is_floating_point() or target.is_complex() or target.dtype is torch.bool:
            raise ValueError(f"target: expected an integer dtype, got {target.dtype}")
        target = target.long()
        keep = target != ignore_index
        if mask is not None:
            mask = _tensor("mask", mask)
            check_zero_or_one(mask)
            mask = mask.bool()
        for name, x in (("rollout_logprobs", rollout), ("target", target), ("mask", mask)):
            if x is not None and x.shape != train.shape:
                raise ValueError(f"{name}: expected {list(train.shape)}, got {list(x.shape)}")
        if mask is not None:
            keep = keep & mask
        positions = keep.cpu().flatten().nonzero()[:, 0]
        if not len(positions):
            raise ValueError("expected at least one token that counts, got none")
        b, s = train.shape if train.dim() == 2 else (1, train.shape[0])
        train, rollout = (x.double().cpu().flatten() for x in (train, rollout))
        bad = int((train[positions].isnan() | rollout[positions].isnan()).sum())
        if bad:
            raise ValueError(f"expected no NaN where a token counts, got {bad} tokens")
        return cls((b, s), train, rollout, target.cpu().flatten(), ignore_index, positions)

    def check_ids(self, vocab_size: int | None) -> None:
        """A ValueError where the id of a token that counts is outside [0, vocab_size)."""
        ids = self.target[self.positions]
        outside = ids < 0 if vocab_size is None else (ids < 0) | (ids >= vocab_size)
        if outside.any():
            most = "ids >= 0" if vocab_size is None else f"ids in [0, {vocab_size})"
            raise ValueError(
                f"target: expected {most} or ignore_index {self.ignore_index} where a token "
                f"counts, got {ids[outside][:8].tolist()}"
            )

    def neighbor(self, positions: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """(flat index, whether it lies in the same sequence) of positions + offset."""
        length = self.shape[1]
        column = positions % length + offset
        inside = (column >= 0) & (column < length)
        return torch.where(inside, positions + offset, positions), inside


@dataclass(frozen=True)
class Source:
    """Where rows of logits come from."""

    flat: Tensor  # logits [b * s, V/TP], or hidden states [b * s, h]
    weight: Tensor | None  # of hidden states, [V/TP, h]

    @classmethod
    def of(
        cls, prefix: str, given: Mapping[str, object], shape: tuple[int, int], weight: object = None
    ) -> Source | None:
        """From the arguments whose names begin with the prefix; None where there are none.

        Args:
            weight: the head's, where they have none of their own.
        """
        logits, hidden, own_weight = (given.get(prefix + n) for n in ("logits", "hidden", "weight"))
        if logits is None and hidden is None:
            if own_weight is not None:
                raise ValueError(f"{prefix}weight: expected {prefix}hidden with it")
            return None
        if (logits is None) == (hidden is None):
            raise ValueError(f"expected one of {prefix}logits and {prefix}hidden")
        name, x = (f"{prefix}logits", logits) if hidden is None else (f"{prefix}hidden", hidden)
        x = _tensor(name, x)
        check_float_tensor(name, x, min_dim=0)
        flat = x.reshape(-1, x.shape[-1]) if x.dim() in (2, 3) else x
        if x.dim() not in (2, 3) or flat.shape[0] != shape[0] * shape[1]:
            raise ValueError(f"{name}: expected [{shape[0]}, {shape[1]}, n], got {list(x.shape)}")
        if hidden is None:
            return cls(flat, None)
        own_weight = weight if own_weight is None else own_weight
        if own_weight is None:
            whose = f"{prefix}weight" if f"{prefix}weight" in given else "weight"
            raise ValueError(f"{name}: expected {whose} with it")
        own_weight = _tensor(f"{prefix}weight", own_weight)
        check_float_tensor(f"{prefix}weight", own_weight, min_dim=0)
        if own_weight.dim() != 2 or own_weight.shape[1] != flat.shape[1]:
            raise ValueError(
                f"{prefix}weight: expected [V/TP, {flat.shape[1]}], got {list(own_weight.shape)}"
            )
        return cls(flat, own_weight)

    @property
    def width(self) -> int:
        """V/TP."""
        return self.flat.shape[1] if self.weight is None else self.weight.shape[0]

    def rows(self, index: Tensor) -> Tensor:
        """[rows, V/TP] float32."""
        x = self.flat[index.to(self.flat.device)].float()
        if self.weight is None:
            return x
        with without_autocast(x.device):
            return x @ self.weight.float().T


def check_known(side: str, given: Mapping[str, object] | None) -> dict[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(
            f"{side}: expected None or a mapping of settings, got {type(given).__name__}"
        )
    for name, value in (given or {}).items():
        if name not in SETTINGS:
            raise ValueError(f"{side}: unknown setting {name!r}; known: {', '.join(SETTINGS)}")
        choices = get_args(Alignment) if name == "alignment" else (False, True)
        if not isinstance(value, str | bool) or value not in choices:
            raise ValueError(f"{side}: {name}: expected one of {choices}, got {value!r}")
    return dict(given or {})


@dataclass(frozen=True)
class Rows:
    """Log-probabilities of the batch's tokens under any settings."""

    batch: Batch
    fresh: Source
    stale: Source | None
    float32: Source | None
    engine: Source | None
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    vocab_size: int | None
    tp_group: ProcessGroup | None

    def __post_init__(self) -> None:
        """Raises: ValueError: logits over another vocabulary than the trainer's."""
        others = (("stale", self.stale), ("float32", self.float32), ("rollout", self.engine))
        for prefix, source in others:
            if source is None or source.width == self.fresh.width or self._padded(source):
                continue
            kind = "logits" if source.weight is None else "hidden"
            padded = "; with vocab_size, at least so many over all ranks"
            raise ValueError(
                f"{prefix}_{kind}: expected logits of {self.fresh.width} columns, as the "
                f"trainer's are, got {source.width}{padded if source is self.engine else ''}"
            )

    def _padded(self, source: Source) -> bool:
        """Whether these are the engine's, which may pad the true vocabulary in another way."""
        if source is not self.engine or self.vocab_size is None:
            return False
        return source.width * self._ranks >= self.vocab_size

    @property
    def _ranks(self) -> int:
        return group_size(resolve_tp_group(self.tp_group))

    @property
    def ids(self) -> int:
        """How many ids there are: vocab_size, or every column."""
        return self.vocab_size or self.fresh.width * self._ranks

    def choices(self, name: str) -> tuple[Any, ...]:
        """The values of a setting that give different figures here, the right one first."""
        if name == "alignment":
            return get_args(Alignment)
        told_apart = {
            "stale_weights": self.stale is not None,
            "trainer_layers": self.float32 is not None,
            "engine_layers": self.engine is not None,
            "padding_counted": self.vocab_size is not None,
            "bf16_logits": True,
            "temperature_applied": self.temperature != 1.0,
            "filter_applied": (
                self.top_p < 1.0 or self.min_p > 0.0 or self.top_k not in (None, 0, -1)
            ),
        }
        right = getattr(RIGHT, name)
        return (right, not right) if told_apart[name] else (right,)

    def unchecked(self) -> list[str]:
        notes = []
        if self.stale is None:
            notes.append("stale weights not checked: no stale_logits or stale_hidden")
        if self.vocab_size is None:
            notes.append("padded vocabulary not checked: no vocab_size")
        if self.float32 is not None and self.engine is None:
            notes.append("the engine's own rounding is in the remainder: no rollout_hidden")
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

        start = replace(RIGHT, **known)
        free = {name: self.choices(name) for name in SETTINGS if name not in known}
        # A shift is worth nats, so that it shows whatever the finer settings are.
        coarse = {k: v for k, v in free.items() if k not in _FINE}
        shift = best(coarse, start).alignment
        fine = {k: v for k, v in free.items() if k != "alignment"}
        return best(fine, replace(start, alignment=shift))

    def _error(self, settings: Settings, wanted: Tensor, positions: Tensor) -> float:
        """Mean |difference| over the tokens, each capped; infinite where most cannot be known."""
        got = self.logprobs(settings, positions, wanted)
        known = ~got.isnan()
        if 2 * int(known.sum()) < len(wanted):
            return math.inf
        return distance(got[known], wanted[known])

    @torch.no_grad()
    def logprobs(
        self, settings: Settings, positions: Tensor, reported: Tensor | None = None
    ) -> Tensor:
        """float64 [positions] on the CPU; NaN where a neighbor's label is not known.

        Args:
            reported: `[positions]`; where they are finite, a token just outside a filter has the
                value of one that keeps it.
        """
        row_offset, label_offset = OFFSETS[settings.alignment]
        row, row_inside = self.batch.neighbor(positions, row_offset)
        label, label_inside = self.batch.neighbor(positions, label_offset)
        target = self.batch.target[label]
        known = row_inside & label_inside & (target != self.batch.ignore_index)
        known &= (target >= 0) & (target < self.ids)  # a neighbor that does not count may be any
        target = torch.where(known, target, 0)
        source = self._source(settings)
        parts = []
        for start in range(0, len(positions), _TILE):
            tile = slice(start, start + _TILE)
            z = source.rows(row[tile])
            possible = None if reported is None else ~reported[tile].isneginf()
            parts.append(self._figures(z, target[tile].to(z.device), settings, possible))
        values = torch.cat(parts).double().cpu()
        return torch.where(known, values, torch.nan)

    def _filters(self, *, looser: bool = False) -> dict[str, Any]:
        """The sampler's; looser: a quarter more ids, of the mass left out, and below the limit."""
        top_k, top_p, min_p = self.top_k, self.top_p, self.min_p
        if looser:
            top_k = top_k + -(-top_k // 4) if top_k is not None and top_k > 0 else top_k
            top_p, min_p = top_p + (1.0 - top_p) / 4, min_p * 0.75
        return {"top_k": top_k, "top_p": top_p, "min_p": min_p}

    def _source(self, settings: Settings) -> Source:
        source: Source | None = self.fresh
        if settings.stale_weights:
            source = self.stale
        elif settings.engine_layers:
            source = self.engine
        elif self.float32 is not None and not settings.trainer_layers:
            source = self.float32
        assert source is not None, "a setting is a choice only where its logits are given"
        return source

    def _figures(
        self, z: Tensor, target: Tensor, settings: Settings, possible: Tensor | None
    ) -> Tensor:
        """z: [rows, V/TP] float32 -> [rows]; possible: bool [rows], what a side has reported."""
        if settings.bf16_logits:
            z = z.bfloat16().float()
        temperature = self.temperature if settings.temperature_applied else 1.0
        options: dict[str, Any] = {
            "temperature": temperature,
            "vocab_size": None if settings.padding_counted else self.vocab_size,
            "tp_group": self.tp_group,
        }
        if settings.filter_applied and len(self.choices("filter_applied")) > 1:
            values = vocab_parallel_sampling_logprobs(z, target, **self._filters(), **options)
            if possible is None:
                return values
            # Noise carries a few tokens over the cut, and at CAP each they would outweigh all
            # others. A side without the filter reports tokens far outside of it.
            filters = self._filters(looser=True)
            near = vocab_parallel_sampling_logprobs(z, target, **filters, **options)
            return torch.where(values.isneginf() & possible.to(z.device), near, values)
        return vocab_parallel_gather(z, target[:, None], log_softmax=True, **options)[:, 0]


def distance(a: Tensor, b: Tensor) -> float:
    """Mean |a - b|, each capped; tokens that are impossible in both are equal."""
    return torch.where(a == b, 0.0, (a - b).abs()).clamp(max=CAP).mean().item()


_FINE = ("stale_weights", "trainer_layers", "engine_layers", "padding_counted", "bf16_logits")
