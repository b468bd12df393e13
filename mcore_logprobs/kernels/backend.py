"""Which backend computes a block of rows, and why.

`auto` takes the fastest backend that can serve a call and falls back to torch; a backend asked for
by name that is unavailable is a ValueError, never a silent substitute.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from mcore_logprobs.kernels import distill, inductor, inductor_blocks, reference
from mcore_logprobs.kernels.distill import PairSpec, Side
from mcore_logprobs.kernels.segments import Segments
from mcore_logprobs.kernels.stats import RowResults, RowSpec, TargetIds

__all__ = [
    "BACKENDS",
    "PAIR_BACKENDS",
    "Backend",
    "Choice",
    "Counting",
    "OneLaunch",
    "OneLaunchPair",
    "PairBackend",
    "default_chunk_size",
    "explain",
    "one_launch",
    "one_launch_pair",
    "select",
    "select_pair",
]

BACKENDS = ("auto", "torch", "triton", "inductor")
PAIR_BACKENDS = ("auto", "torch", "triton")
logger = logging.getLogger("mcore_logprobs")

# Bytes of one float32 copy of a chunk. On a CPU it should stay in the cache; on a GPU it must be
# large enough to fill the chip. The torch backend holds at most two such copies.
_CHUNK_BYTES = {"cpu": 2 << 20, "other": 64 << 20}


class Backend(Protocol):
    """A module with these functions; `reference` documents them."""

    def row_stats(
        self,
        logits: Tensor,
        target: Tensor,
        spec: RowSpec,
        *,
        bias: Tensor | None = None,
        threshold: Tensor | None = None,
        temperature: Tensor | None = None,
        chunk_size: int,
    ) -> Tensor: ...

    def block_stats(
        self,
        logits: Tensor,
        target: Tensor,
        spec: RowSpec,
        *,
        block: int,
        bias: Tensor | None = None,
        threshold: Tensor | None = None,
        temperature: Tensor | None = None,
        chunk_size: int,
    ) -> Tensor: ...

    def grad_logits(
        self,
        logits: Tensor,
        target: Tensor,
        shift: Tensor,
        coef: Tensor,
        spec: RowSpec,
        *,
        bias: Tensor | None = None,
        temperature: Tensor | None = None,
        out: Tensor,
        chunk_size: int,
    ) -> None: ...

    def entries_grad(
        self,
        logits: Tensor,
        column: Tensor,
        upstream: Tensor,
        shift: Tensor | None,
        coef: Tensor | None,
        spec: RowSpec,
        *,
        bias: Tensor | None = None,
        temperature: Tensor | None = None,
        out: Tensor,
        chunk_size: int,
    ) -> None: ...


class PairBackend(Protocol):
    """A module with the functions for two sides; `kernels.distill` documents them."""

    def pair_stats(
        self, student: Side, teacher: Side, spec: PairSpec, *, chunk_size: int
    ) -> Tensor: ...

    def jsd_sums(
        self,
        student: Side,
        teacher: Side,
        norm_s: Tensor,
        norm_t: Tensor,
        spec: PairSpec,
        *,
        chunk_size: int,
    ) -> Tensor: ...

    def pair_grad(
        self,
        student: Side,
        teacher: Side,
        norm_s: Tensor,
        norm_t: Tensor,
        inner: Tensor,
        upstream: Tensor,
        spec: PairSpec,
        *,
        kept: Tensor | None = None,
        out: Tensor,
        chunk_size: int,
    ) -> None: ...


class OneLaunchPair(PairBackend, Protocol):
    """A `PairBackend` that also takes each small step in one launch; see `OneLaunch`.

    `kernels.triton_pairs` documents the functions.
    """

    def finish_pairs(
        self, parts: Tensor, mask: Tensor | None, spec: PairSpec
    ) -> tuple[Tensor, Tensor]: ...

    def finished_pair(
        self, student: Side, teacher: Side, mask: Tensor | None, spec: PairSpec
    ) -> tuple[Tensor, Tensor]: ...

    def finish_jsd(self, parts: Tensor, norms: Tensor, spec: PairSpec) -> tuple[Tensor, Tensor]: ...

    def finished_jsd(
        self, student: Side, teacher: Side, norms: Tensor, spec: PairSpec
    ) -> tuple[Tensor, Tensor]: ...


class OneLaunch(Backend, Protocol):
    """A backend that also takes each small step of a call in one launch.

    Where tokens are few, launches are what a call takes; plain torch has one an operation.
    `kernels.triton_backend` documents the functions.
    """

    def localize(
        self, target: Tensor, *, start: int, width: int, vocab_size: int, ignore_index: int | None
    ) -> tuple[Tensor, Tensor]: ...

    def segment_stats(
        self,
        logits: Tensor,
        target: Tensor,
        spec: RowSpec,
        segments: Segments,
        *,
        bias: Tensor | None = None,
        threshold: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> Tensor: ...

    def own_logits(
        self, logits: Tensor, target: Tensor, ids: TargetIds
    ) -> tuple[Tensor, Tensor]: ...

    def located_stats(
        self,
        logits: Tensor,
        target: Tensor | None,
        ids: TargetIds,
        spec: RowSpec,
        segments: Segments | None = None,
        *,
        temperature: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]: ...

    def finish_rows(
        self, parts: Tensor, column: Tensor | None, spec: RowSpec, label_smoothing: float
    ) -> tuple[RowResults, Tensor]: ...

    def finished_stats(
        self,
        logits: Tensor,
        target: Tensor | None,
        ids: TargetIds,
        spec: RowSpec,
        label_smoothing: float,
        *,
        temperature: Tensor | None = None,
    ) -> tuple[RowResults, Tensor, Tensor | None]: ...

    def results_grad(
        self,
        logits: Tensor,
        column: Tensor | None,
        upstream: RowResults,
        norms: Tensor,
        spec: RowSpec,
        label_smoothing: float,
        *,
        temperature: Tensor | None = None,
        out: Tensor,
    ) -> None: ...


class Counting(Backend, Protocol):
    """A backend that counts alone for less than its statistics cost: each but a `OneLaunch`."""

    def count_higher(
        self, logits: Tensor, target: Tensor, threshold: Tensor, *, valid: int, chunk_size: int
    ) -> Tensor: ...


def one_launch(backend: Backend) -> OneLaunch | None:
    """The backend itself if it takes small steps in one launch each, else None."""
    return cast(OneLaunch, backend) if hasattr(backend, "finish_rows") else None


def one_launch_pair(backend: PairBackend) -> OneLaunchPair | None:
    """Likewise for two sides."""
    return cast(OneLaunchPair, backend) if hasattr(backend, "finish_pairs") else None


@dataclass(frozen=True)
class Choice:
    """A backend's name, whether it can be had, and the reason either way."""

    name: str
    available: bool
    reason: str


@dataclass(frozen=True)
class _Candidate:
    """A backend that `auto` may take.

    Attributes:
        load: gives the module, which is imported when first taken; by segments or None.
        availability: device type -> Choice; may import what it needs.
        refusal: logits, segments or None -> why it cannot serve this call, or None.
        by_default: device types on which `auto` takes it; elsewhere it is had by name only.
        unworthy: likewise why `auto` leaves this call to another, though it could be served. With
            segments it must not look at the call's layout.
    """

    name: str
    load: Callable[[Segments | None], Backend]
    availability: Callable[[str], Choice]
    refusal: Callable[[Tensor, Segments | None], str | None]
    by_default: tuple[str, ...]
    unworthy: Callable[[Tensor, Segments | None], str | None] = lambda logits, segments: None


def default_chunk_size(width: int, device: torch.device) -> int:
    """Rows at a time for `width` columns, from the memory budget of the device."""
    budget = _CHUNK_BYTES["cpu" if device.type == "cpu" else "other"]
    return max(1, budget // (4 * max(1, width)))


# ---- Triton ------------------------------------------------------------------------------------

_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _triton_availability(device_type: str) -> Choice:
    def refused(reason: str) -> Choice:
        return Choice("triton", False, reason)

    if device_type != "cuda" and not (
        device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    ):
        return refused(
            f"Triton kernels need a CUDA device, not {device_type}"
            " (TRITON_INTERPRET=1 runs them on a CPU, slowly, for tests)"
        )
    version, interpreted, error = _import_triton()
    if error:
        return refused(error)
    if device_type == "cpu" and not interpreted:
        return refused("TRITON_INTERPRET=1 must be set before triton is first imported")
    how = "interpreted" if interpreted else "compiled for this GPU"
    return Choice("triton", True, f"Triton {version}, kernels {how}")


_triton_failure: list[str] = []


def _import_triton() -> tuple[str, bool, str]:
    """(version, whether the interpreter runs the kernels, "") or ("", False, why not)."""
    # A failed import is not tried again. No functools.cache: torch.compile traces through here.
    if _triton_failure:
        return "", False, _triton_failure[0]
    try:
        import triton
        import triton.language as tl

        if hasattr(tl, "tuple"):
            from mcore_logprobs.kernels import triton_common

            return triton.__version__, triton_common.INTERPRETED, ""
        failure = f"Triton {triton.__version__} has no tuples in kernels: 3.3 or later is needed"
    except Exception as error:  # a Triton built for another torch or driver raises all sorts
        failure = f"triton does not import: {type(error).__name__}: {error}"
    _triton_failure.append(failure)
    return "", False, failure


def _load_triton(segments: Segments | None) -> Backend:
    from mcore_logprobs.kernels import triton_backend

    return triton_backend


def _triton_refusal(logits: Tensor, segments: Segments | None) -> str | None:
    if logits.dtype not in _TRITON_DTYPES:
        return f"expected logits of float16, bfloat16 or float32, got {logits.dtype}"
    if _has_strided_columns(logits):
        return f"expected logits whose last stride is 1, got strides {logits.stride()}"
    return None


# ---- inductor ----------------------------------------------------------------------------------


def _inductor_availability(device_type: str) -> Choice:
    if device_type != "cpu":
        return Choice("inductor", False, f"compiled for CPU tensors only, not {device_type}")
    obstacle = inductor.obstacle()
    if obstacle is not None:
        return Choice("inductor", False, obstacle)
    return Choice(
        "inductor",
        True,
        f"torch.compile with {inductor.compiler()}: seconds at the first use, cached on "
        f"disk; auto takes it from {inductor.MIN_NUMEL} logits on, with invariant_segments "
        f"from {inductor_blocks.MIN_WIDTH} columns a segment; softcap, bias and label "
        "smoothing go through eager torch",
    )


def _load_inductor(segments: Segments | None) -> Backend:
    return inductor if segments is None else inductor_blocks


def _inductor_refusal(logits: Tensor, segments: Segments | None) -> str | None:
    if logits.dtype not in inductor.DTYPES:
        return f"expected logits of float32, bfloat16 or float16, got {logits.dtype}"
    if segments is None and _has_strided_columns(logits):
        return "expected logits whose last stride is 1"
    return None


def _inductor_unworthy(logits: Tensor, segments: Segments | None) -> str | None:
    if torch.compiler.is_compiling():
        return "the caller is being compiled already"
    if segments is not None:
        narrow = segments.width < inductor_blocks.MIN_WIDTH
        return f"segments of under {inductor_blocks.MIN_WIDTH} columns" if narrow else None
    if logits.numel() < inductor.MIN_NUMEL:
        return f"fewer than {inductor.MIN_NUMEL} logits"
    return None


# ---- choice ------------------------------------------------------------------------------------

# Best first. torch, which serves everything, ends every search.
_CANDIDATES: tuple[_Candidate, ...] = (
    _Candidate(
        "triton",
        _load_triton,
        _triton_availability,
        _triton_refusal,
        by_default=("cuda",),
    ),
    _Candidate(
        "inductor",
        _load_inductor,
        _inductor_availability,
        _inductor_refusal,
        by_default=("cpu",),
        unworthy=_inductor_unworthy,
    ),
)
_TORCH = Choice("torch", True, "eager torch, on any device")


def explain(device_type: str) -> tuple[Choice, ...]:
    """Every backend for tensors on this type of device, best first."""
    return (*(candidate.availability(device_type) for candidate in _CANDIDATES), _TORCH)


def select(backend: str, logits: Tensor, *, segments: Segments | None = None) -> Backend:
    """The module that serves this call, for logits of this device, dtype, size and layout.

    Args:
        segments: results must not depend on the layout of the call, so neither must the choice;
            their width may count.

    Raises:
        ValueError: an unknown name, or a backend that cannot be had here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}")
    device_type = logits.device.type
    for candidate in _CANDIDATES:
        by_name = backend == candidate.name
        if not by_name and not (backend == "auto" and device_type in candidate.by_default):
            continue
        if not by_name and torch.compiler.is_compiling() and candidate.unworthy(logits, segments):
            continue  # before the search for a compiler, which cannot be traced
        choice = candidate.availability(device_type)
        reason = candidate.refusal(logits, segments) if choice.available else choice.reason
        # With segments the layout may not decide; where more than that is in the way, it does not.
        by_layout = segments is not None and choice.available and _has_strided_columns(logits)
        if by_layout and reason and candidate.refusal(logits[..., :1], segments) is None:
            raise ValueError(f"invariant_segments: {reason}")
        if reason is None and not by_name:
            reason = candidate.unworthy(logits, segments)
        if reason is None:
            _log_once(candidate.name, device_type, choice.reason)
            return candidate.load(segments)
        if by_name:
            raise ValueError(f"backend={backend!r} cannot be had: {reason}")
        _log_once("not " + candidate.name, device_type, reason)
    _log_once("torch", device_type, _TORCH.reason)
    return reference


def select_pair(backend: str, student: Tensor, teacher: Tensor) -> PairBackend:
    """The module that serves a divergence between these logits, which may differ in dtype.

    Raises:
        ValueError: an unknown name, or a backend that is unavailable here.
    """
    if backend not in PAIR_BACKENDS:
        raise ValueError(
            f"backend: expected one of {PAIR_BACKENDS} for a divergence, got {backend!r}"
        )
    if backend == "auto" and student.device.type == "cpu":
        backend = "torch"  # inductor has no functions for two sides
    if any(select(backend, side) is reference for side in (student, teacher)):
        return distill
    from mcore_logprobs.kernels import triton_pairs

    return triton_pairs


def _has_strided_columns(logits: Tensor) -> bool:
    return logits.shape[-1] > 1 and logits.stride(-1) != 1


_logged: set[tuple[str, str, str]] = set()


def _log_once(name: str, device_type: str, reason: str) -> None:
    if torch.compiler.is_compiling() or (name, device_type, reason) in _logged:
        return
    _logged.add((name, device_type, reason))
    logger.info("backend for %s tensors: %s (%s)", device_type, name, reason)
