"""Which backend computes a chunk, and why.

`auto` takes the fastest backend that can serve a call and falls back to torch; a backend asked for
by name that is unavailable is a ValueError, never a silent substitute.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mcore_logprobs.checks import is_traced
from mcore_logprobs.kernels import budgets, inductor, reference
from mcore_logprobs.kernels.chunk import Chunk
from mcore_logprobs.kernels.pairs import PairSpec
from mcore_logprobs.kernels.stats import GradientTerms, StatsSpec

BACKENDS = ("auto", "torch", "triton", "inductor")
logger = logging.getLogger("mcore_logprobs")


class Backend(Protocol):
    """A module with these functions; `kernels.reference`, `kernels.pairs` and `kernels.codes`
    document them."""

    def stats(
        self,
        chunk: Chunk,
        target: Tensor,
        spec: StatsSpec,
        *,
        threshold: Tensor | None = None,
        block: int | None = None,
        chunk_size: int,
    ) -> Tensor: ...

    def grad(self, chunk: Chunk, terms: GradientTerms, *, out: Tensor, chunk_size: int) -> None: ...

    def scale(self, grad: Tensor, upstream: Tensor, *, out: Tensor, add: bool = False) -> None: ...

    def encode(self, chunk: Chunk, *, out: Tensor, chunk_size: int) -> Tensor: ...

    def decode(self, codes: Tensor, scale: Tensor, *, out: Tensor, chunk_size: int) -> None: ...

    def pair_stats(
        self, student: Chunk, teacher: Chunk, spec: PairSpec, *, chunk_size: int
    ) -> Tensor: ...

    def pair_sums(
        self, student: Chunk, teacher: Chunk, softmax: Tensor, spec: PairSpec, *, chunk_size: int
    ) -> Tensor: ...

    def pair_grad(
        self,
        student: Chunk,
        teacher: Chunk,
        softmax: Tensor,
        inner: Tensor,
        upstream: Tensor,
        spec: PairSpec,
        *,
        out: Tensor,
        chunk_size: int,
    ) -> None: ...


@dataclass(frozen=True)
class Choice:
    """A backend's name, whether it is available, and the reason either way."""

    name: str
    available: bool
    reason: str


_TORCH = Choice("torch", True, "eager torch, on any device")


# ---- Triton ------------------------------------------------------------------------------------


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
            from mcore_logprobs.kernels.triton import common

            return triton.__version__, common.INTERPRETED, ""
        failure = f"Triton {triton.__version__} has no tuples in kernels: 3.3 or later is needed"
    except Exception as error:  # a Triton built for another torch or driver raises all sorts
        failure = f"triton does not import: {type(error).__name__}: {error}"
    _triton_failure.append(failure)
    return "", False, failure


def _triton_refusal(logits: Tensor, invariant: bool) -> str | None:
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    if logits.dtype not in dtypes:
        return f"expected logits of float16, bfloat16 or float32, got {logits.dtype}"
    if not _has_strided_columns(logits):
        return None
    reason = f"expected logits whose last stride is 1, got strides {logits.stride()}"
    if invariant:  # another backend would give other bits
        raise ValueError(f"invariant_segments: {reason}")
    return reason


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
        f"disk; auto takes it from {budgets.of(device_type).compiled_numel} logits on, and with "
        "invariant_segments; softcap, bias and label smoothing go through eager torch",
    )


def _inductor_refusal(logits: Tensor, invariant: bool) -> str | None:
    if logits.dtype not in inductor.DTYPES:
        return f"expected logits of float32, bfloat16 or float16, got {logits.dtype}"
    if not invariant and _has_strided_columns(logits):
        return "expected logits whose last stride is 1"
    return None


def _inductor_passed_over(logits: Tensor, numel: int, invariant: bool) -> str | None:
    if is_traced(logits):  # nor can the search for a compiler be traced
        return "the caller is being compiled already"
    least = budgets.of(logits.device.type).compiled_numel
    if not invariant and numel < least:
        return f"fewer than {least} logits"
    return None


def _has_strided_columns(logits: Tensor) -> bool:
    return logits.shape[-1] > 1 and logits.stride(-1) != 1


# ---- choice ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Candidate:
    """A backend that `auto` takes on one type of device.

    Attributes:
        availability: device type -> Choice; may import what it needs.
        refusal: logits, invariant -> why it cannot serve this call, or None.
        passed_over: logits, how many at a time, invariant -> likewise why `auto` leaves them to
            torch all the same; asked first, as it is cheap.
    """

    name: str
    device_type: str
    availability: Callable[[str], Choice]
    refusal: Callable[[Tensor, bool], str | None]
    passed_over: Callable[[Tensor, int, bool], str | None] = lambda logits, numel, invariant: None


# torch, which serves everything, comes after both.
_CANDIDATES = (
    _Candidate("triton", "cuda", _triton_availability, _triton_refusal),
    _Candidate("inductor", "cpu", _inductor_availability, _inductor_refusal, _inductor_passed_over),
)


def explain(device_type: str) -> tuple[Choice, ...]:
    """Every backend for tensors on this type of device, best first."""
    return (*(candidate.availability(device_type) for candidate in _CANDIDATES), _TORCH)


def select(
    backend: str, logits: Tensor, *, numel: int | None = None, invariant: bool = False
) -> Backend:
    """The backend that serves a call, for logits of this device, dtype, size and layout.

    Args:
        logits: all of them, or an empty tensor of their device and dtype.
        numel: how many exist at a time at most; None: as many as the tensor has.
        invariant: a row's bits must depend only on its own numbers, so that size and layout may
            not decide: "auto" goes by device and dtype.

    Raises:
        ValueError: an unknown name, or a backend that is unavailable here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}")
    device_type, numel = logits.device.type, logits.numel() if numel is None else numel
    for candidate in _CANDIDATES:
        by_name = backend == candidate.name
        by_default = backend == "auto" and device_type == candidate.device_type
        if not (by_name or by_default):
            continue
        reason = candidate.passed_over(logits, numel, invariant) if by_default else None
        if reason is None:
            choice = candidate.availability(device_type)
            reason = choice.reason
            if choice.available:
                reason = candidate.refusal(logits, invariant)
            if reason is None:
                _log_once(candidate.name, device_type, choice.reason)
                return _load(candidate.name, invariant)
        if by_name:
            raise ValueError(f"backend={backend!r} is unavailable: {reason}")
        _log_once("not " + candidate.name, device_type, reason)
    _log_once("torch", device_type, _TORCH.reason)
    return reference


def _load(name: str, invariant: bool) -> Any:
    if name == "inductor":
        return inductor.INVARIANT if invariant else inductor
    from mcore_logprobs.kernels import triton

    return triton


_logged: set[tuple[str, str, str]] = set()


def _log_once(name: str, device_type: str, reason: str) -> None:
    if torch.compiler.is_compiling() or (name, device_type, reason) in _logged:
        return
    _logged.add((name, device_type, reason))
    logger.info("backend for %s tensors: %s (%s)", device_type, name, reason)
