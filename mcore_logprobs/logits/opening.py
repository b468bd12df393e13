"""One opening of a call on logits: arguments checked, before any collective, into one object."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import (
    check_chunk_size,
    check_optional_count,
    check_optional_integer,
    check_optional_positive,
    check_positive,
    remembered,
)
from mcore_logprobs.consistency import check_call
from mcore_logprobs.groups import VocabShard, resolve_tp_group
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels.segments import Segments
from mcore_logprobs.kernels.stats import RowSpec, accumulator_dtype
from mcore_logprobs.logits.dtensor import unwrap_logits, unwrap_rows

__all__ = [
    "CallOptions",
    "LocalTarget",
    "LogitsCall",
    "check_group_tensor",
    "check_inplace_backward",
    "check_same_rows",
    "check_target",
    "localize_target",
    "open_logits",
    "open_segments",
    "open_temperature",
    "row_spec",
]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


@dataclass(frozen=True)
class CallOptions:
    """What an operation needs to know of its logits, and how it walks them.

    Attributes:
        spec: how this rank's columns become finished logits, and which statistics are wanted.
        chunk_size: rows at a time where a float32 copy of them is made.
        temperature: `[...]`, each row's own in place of the spec's, or None.
        segments: the segments that statistics are taken by, or None.
    """

    shard: VocabShard
    spec: RowSpec
    chunk_size: int
    backend: backends.Backend
    temperature: Tensor | None = None
    segments: Segments | None = None

    @property
    def group(self) -> ProcessGroup | None:
        return self.shard.group


@dataclass(frozen=True)
class LogitsCall:
    """A checked call: this rank's local logits `[..., V/TP]`, and its options."""

    logits: Tensor
    options: CallOptions

    @property
    def shard(self) -> VocabShard:
        return self.options.shard

    def global_target(self, target: Tensor, ignore_index: int | None) -> Tensor:
        """Checked ids of the logits' leading shape, int64, for a kernel that localizes them.

        On CPU an id outside [0, vocab_size) is a ValueError; on CUDA the kernel asserts on it.

        Args:
            ignore_index: checked already.
        """
        target = check_target(target, self.logits.shape[:-1], self.logits.device)
        if target.device.type == "cpu":
            _check_ids_on_host(target, self.shard, ignore_index, "target")
        return target

    def local_target(
        self,
        target: Tensor,
        ignore_index: int | None,
        *,
        k: int | None = None,
        name: str = "target",
    ) -> LocalTarget:
        """Checked ids of the logits' leading shape (`[..., k]` with k), as this shard sees them."""
        lead = self.logits.shape[:-1]
        shape = lead if k is None else torch.Size((*lead, k))
        target = check_target(target, shape, self.logits.device, name=name)
        return localize_target(
            target, self.shard, ignore_index, name=name, backend=self.options.backend
        )


def open_logits(
    vocab_parallel_logits: Tensor,
    *,
    tp_group: ProcessGroup | None,
    vocab_size: int | None = None,
    backend: str = "auto",
    chunk_size: int | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    rank: bool = False,
    smoothing: bool = False,
    sum_pi_squared: bool = False,
    copies: int = 1,
    prefix: str = "",
    invariant_segments: int | None = None,
    name: str = "vocab_parallel_logits",
) -> LogitsCall:
    """Check the arguments that operations on logits share, resolve the group, choose the backend.

    A DTensor sharded on its last dimension brings its own group.

    Args:
        entropy, rank, smoothing, sum_pi_squared: which statistics are wanted, as in `RowSpec`.
        prefix: goes before the names of options in errors.
        copies: float32 copies of a chunk that the operation holds, for the default chunk size.
        invariant_segments: as in `vocab_parallel_token_stats`.

    Raises:
        ValueError: with the argument's name, what was expected and what was given.
    """
    logits, tp_group = unwrap_logits(vocab_parallel_logits, tp_group, name)
    check_group_tensor(logits, name, min_dim=1)
    group = resolve_tp_group(tp_group)
    width, device = logits.shape[-1], logits.device
    check_call(width, group, device)
    check_chunk_size(chunk_size)
    own = None
    if isinstance(temperature, Tensor):
        temperature, own = open_temperature(
            temperature, logits.shape[:-1], device, name=f"{prefix}temperature"
        )
    shard = VocabShard.of(width, group, vocab_size)
    segments = open_segments(shard, invariant_segments)
    chosen = backends.select(backend, logits, segments=segments)
    spec = row_spec(
        shard,
        softcap=softcap,
        temperature=temperature,
        entropy=entropy,
        rank=rank,
        smoothing=smoothing,
        sum_pi_squared=sum_pi_squared,
        prefix=prefix,
    )
    rows = chunk_size or backends.default_chunk_size(copies * width, device)
    return LogitsCall(logits, CallOptions(shard, spec, rows, chosen, own, segments))


def open_segments(shard: VocabShard, invariant_segments: int | None) -> Segments | None:
    """The segments that a call asks for, checked against its shard; see `Segments.of`."""
    check_optional_count("invariant_segments", invariant_segments)
    if invariant_segments is None:
        return None
    return Segments.of(invariant_segments, shard.padded_size, shard.tp_size)


def open_temperature(
    temperature: float | Tensor,
    lead: torch.Size,
    device: torch.device,
    *,
    name: str = "temperature",
) -> tuple[float, Tensor | None]:
    """A temperature as (number for all rows, None), or as (1.0, one for each row `[*lead]`).

    Args:
        temperature: a number, which is left for `row_spec` to check, or a tensor that broadcasts to
            `lead`, the target's shape. A CPU tensor of no dimension is a number.

    Raises:
        ValueError: a tensor of another shape or device, no numbers, one that requires a gradient,
            and on CPU values that are not finite and above 0 (on CUDA a device-side assert).
    """
    temperature = unwrap_rows(temperature, name) if isinstance(temperature, Tensor) else temperature
    if not isinstance(temperature, Tensor):
        return temperature, None
    if temperature.requires_grad:
        raise ValueError(f"{name}: requires a gradient, but none flows to it; detach it")
    if temperature.dtype not in (*_FLOATS, *_INTS):
        raise ValueError(f"{name}: expected real numbers, got {temperature.dtype}")
    if temperature.dim() == 0 and temperature.device.type == "cpu":
        return float(temperature), None
    shape = temperature.shape
    fits = len(shape) <= len(lead) and all(
        own in (1, size) for own, size in zip(reversed(shape), reversed(lead), strict=False)
    )
    if not fits:
        raise ValueError(
            f"{name}: expected a number or a tensor that broadcasts to {tuple(lead)}, got shape "
            f"{tuple(shape)}"
        )
    if temperature.device != device:
        raise ValueError(f"{name}: expected device {device}, got {temperature.device}")
    temperature = temperature.to(accumulator_dtype(temperature.dtype))
    positive = (temperature > 0) & temperature.isfinite()
    if device.type == "cpu":
        if not bool(positive.all()):
            bad = temperature[~positive][:8].tolist()
            raise ValueError(f"{name}: expected finite numbers > 0, got {bad}")
    else:
        torch._assert_async(positive.all(), f"{name}: not a finite number > 0")
    return 1.0, temperature.expand(lead)


def row_spec(
    shard: VocabShard,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    prefix: str = "",
    entropy: bool = False,
    rank: bool = False,
    smoothing: bool = False,
    sum_pi_squared: bool = False,
) -> RowSpec:
    """The checked RowSpec of this rank's columns; `prefix` goes before the names in errors."""
    return _row_spec(
        prefix, shard.valid_width, logit_scale, softcap, temperature,
        entropy, rank, smoothing, sum_pi_squared,
    )  # fmt: skip


@remembered
def _row_spec(
    prefix: str,
    valid: int,
    logit_scale: float,
    softcap: float | None,
    temperature: float,
    *wanted: bool,
) -> RowSpec:
    check_positive(f"{prefix}logit_scale", logit_scale)
    check_optional_positive(f"{prefix}softcap", softcap)
    check_positive(f"{prefix}temperature", temperature)
    return RowSpec(valid, logit_scale, softcap, temperature, *wanted)


def check_group_tensor(tensor: Tensor, name: str, *, min_dim: int) -> None:
    """A floating-point torch tensor with at least `min_dim` dimensions, or a ValueError."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in _FLOATS:
        raise ValueError(f"{name}: expected dtype in {_names(_FLOATS)}, got {tensor.dtype}")
    if tensor.dim() < min_dim:
        raise ValueError(
            f"{name}: expected at least {min_dim} dimension(s), got shape {tuple(tensor.shape)}"
        )


def check_same_rows(name: str, got: Tensor, shape: torch.Size, device: torch.device) -> None:
    """Exactly this shape and device, or a ValueError."""
    if got.shape != shape:
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(got.shape)}")
    if got.device != device:
        raise ValueError(f"{name}: expected device {device}, got {got.device}")


def check_target(
    target: Tensor, shape: torch.Size, device: torch.device, *, name: str = "target"
) -> Tensor:
    """Integer ids of exactly this shape and device, as int64; a DTensor gives its local part.

    Raises:
        ValueError: no tensor, no integers, another shape or device.
    """
    target = unwrap_rows(target, name)
    if not isinstance(target, Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(target).__name__}")
    if target.dtype not in _INTS:
        raise ValueError(f"{name}: expected an integer dtype, got {target.dtype}")
    check_same_rows(name, target, shape, device)
    return target.long()


@dataclass(frozen=True)
class LocalTarget:
    """Targets as one shard sees them; both `[n]`.

    Attributes:
        column: int64, this rank's column; negative where another rank owns it or it is ignored.
        keep: bool, False where the target is ignore_index.
    """

    column: Tensor
    keep: Tensor


def localize_target(
    target: Tensor,
    shard: VocabShard,
    ignore_index: int | None,
    *,
    name: str = "target",
    backend: backends.Backend | None = None,
) -> LocalTarget:
    """Global ids to this shard's columns.

    On CPU an id outside [0, vocab_size) is a ValueError; on CUDA it fails a device-side assert,
    without a sync.

    Args:
        target: int64 of any shape; global ids or ignore_index.
        backend: takes one launch where it can.
    """
    check_optional_integer("ignore_index", ignore_index)
    if target.device.type == "cpu":
        _check_ids_on_host(target, shard, ignore_index, name)
    native = None if backend is None else backends.one_launch(backend)
    if native is not None:
        return LocalTarget(
            *native.localize(
                target,
                start=shard.start,
                width=shard.width,
                vocab_size=shard.vocab_size,
                ignore_index=ignore_index,
            )
        )
    keep = torch.ones_like(target, dtype=torch.bool)
    if ignore_index is not None:
        keep = target != ignore_index
    if target.device.type != "cpu":
        inside = ((target >= 0) & (target < shard.vocab_size)) | ~keep
        torch._assert_async(inside.all(), f"{name}: id outside [0, {shard.vocab_size})")
    column = target - shard.start
    here = keep & (column >= 0) & (column < shard.width)
    return LocalTarget(torch.where(here, column, -1), keep)


def _check_ids_on_host(
    target: Tensor, shard: VocabShard, ignore_index: int | None, name: str
) -> None:
    outside = (target < 0) | (target >= shard.vocab_size)
    if ignore_index is not None:
        outside &= target != ignore_index
    if bool(outside.any()):
        bad = target[outside]
        raise ValueError(
            f"{name}: expected ids in [0, {shard.vocab_size}) or ignore_index "
            f"{ignore_index}, got {bad[:8].tolist()}{'...' if bad.numel() > 8 else ''}"
        )


def check_inplace_backward(logits: Tensor) -> None:
    """Refuse `inplace_backward=True` where the logits are needed elsewhere, as far as can be seen.

    Seen are: a leaf, retained gradients, a view's base that others may hold, overlapping memory
    (an expanded tensor), and an operation that saved its own output for its backward (softmax,
    tanh, exp, ...). Not seen are other consumers that come later.

    Raises:
        ValueError: says which.
    """
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return
    if logits.is_leaf:
        raise ValueError("inplace_backward=True: expected the output of an operation, got a leaf")
    if logits.retains_grad:
        raise ValueError("inplace_backward=True: the logits retain their gradient (retain_grad())")
    if any(
        size > 1 and stride == 0 for size, stride in zip(logits.shape, logits.stride(), strict=True)
    ):
        raise ValueError("inplace_backward=True: the logits are an expanded tensor")
    node = logits.grad_fn
    if hasattr(node, "_saved_result") or hasattr(node, "_saved_output"):
        raise ValueError(
            f"inplace_backward=True: {type(node).__name__} needs the logits for its own backward"
        )


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
