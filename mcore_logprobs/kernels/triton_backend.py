"""The Triton backend: every function an operator of torch, for torch.compile and CUDA graphs.

`kernels.backend.Backend` and `OneLaunch` say which functions there are; `kernels.reference`,
`kernels.segments` and `kernels.stats` document them. The chunk size is of no use here, as nothing
but the results is ever written.

Each function comes with what its operator (`kernels.operators`) runs, and its fake.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.kernels import (
    triton_entries,
    triton_finish,
    triton_grad,
    triton_stats,
)
from mcore_logprobs.kernels.operators import SPEC_SCHEMA, flatten, operator, unflatten
from mcore_logprobs.kernels.segments import Segments
from mcore_logprobs.kernels.stats import RowResults, RowSpec, TargetIds

__all__ = [
    "block_stats",
    "entries_grad",
    "finish_rows",
    "finished_stats",
    "grad_logits",
    "localize",
    "located_stats",
    "own_logits",
    "results_grad",
    "row_stats",
    "segment_stats",
]

# ---- statistics --------------------------------------------------------------------------------


def row_stats(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    *,
    bias: Tensor | None = None,
    threshold: Tensor | None = None,
    temperature: Tensor | None = None,
    chunk_size: int = 0,
) -> Tensor:
    """As `kernels.reference.row_stats`; float16, bfloat16 or float32 with a last stride of 1."""
    return _row_stats(logits, target, bias, threshold, temperature, *flatten(spec))


def _run_row_stats(
    logits: Tensor, target: Tensor, bias: Any, threshold: Any, temperature: Any, *spec: Any
) -> Tensor:
    return triton_stats.row_stats(
        logits, target, unflatten(*spec), bias=bias, threshold=threshold, temperature=temperature
    )


def _fake_row_stats(
    logits: Tensor, target: Tensor, bias: Any, threshold: Any, temperature: Any, *spec: Any
) -> Tensor:
    return logits.new_empty(len(RowSpec(*spec).fields), logits.shape[0], dtype=torch.float32)


_row_stats = operator(
    "row_stats(Tensor logits, Tensor target, Tensor? bias, Tensor? threshold, "
    f"Tensor? row_temperature, {SPEC_SCHEMA}) -> Tensor",
    _run_row_stats,
    _fake_row_stats,
)


def block_stats(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    *,
    block: int,
    bias: Tensor | None = None,
    threshold: Tensor | None = None,
    temperature: Tensor | None = None,
    chunk_size: int = 0,
) -> Tensor:
    """As `kernels.reference.block_stats`; dtypes and strides as in `row_stats`."""
    return _block_stats(logits, target, block, bias, threshold, temperature, *flatten(spec))


def _run_block_stats(
    logits: Tensor, target: Tensor, block: int, bias: Any, threshold: Any, temperature: Any,
    *spec: Any,
) -> Tensor:  # fmt: skip
    return triton_stats.block_stats(
        logits, target, unflatten(*spec),
        block=block, bias=bias, threshold=threshold, temperature=temperature,
    )  # fmt: skip


def _fake_block_stats(
    logits: Tensor, target: Tensor, block: int, bias: Any, threshold: Any, temperature: Any,
    *spec: Any,
) -> Tensor:  # fmt: skip
    given = RowSpec(*spec)
    shape = (max(1, -(-given.valid // block)), len(given.fields), logits.shape[0])
    return logits.new_empty(shape, dtype=torch.float32)


_block_stats = operator(
    "block_stats(Tensor logits, Tensor target, int block, Tensor? bias, Tensor? threshold, "
    f"Tensor? row_temperature, {SPEC_SCHEMA}) -> Tensor",
    _run_block_stats,
    _fake_block_stats,
)


def segment_stats(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    segments: Segments,
    *,
    bias: Tensor | None = None,
    threshold: Tensor | None = None,
    temperature: Tensor | None = None,
) -> Tensor:
    """As `kernels.segments.segment_stats`; dtypes and strides as in `row_stats`."""
    return _segment_stats(
        logits, target, segments.local, segments.width, bias, threshold, temperature,
        *flatten(spec),
    )  # fmt: skip


def _run_segment_stats(
    logits: Tensor, target: Tensor, local: int, width: int, bias: Any, threshold: Any,
    temperature: Any, *spec: Any,
) -> Tensor:  # fmt: skip
    return triton_stats.segment_stats(
        logits, target, unflatten(*spec), Segments(local, width),
        bias=bias, threshold=threshold, temperature=temperature,
    )  # fmt: skip


def _fake_segment_stats(
    logits: Tensor, target: Tensor, local: int, width: int, bias: Any, threshold: Any,
    temperature: Any, *spec: Any,
) -> Tensor:  # fmt: skip
    shape = (local, len(RowSpec(*spec).fields), logits.shape[0])
    return logits.new_empty(shape, dtype=torch.float32)


_segment_stats = operator(
    "segment_stats(Tensor logits, Tensor target, int local, int width, Tensor? bias, "
    f"Tensor? threshold, Tensor? row_temperature, {SPEC_SCHEMA}) -> Tensor",
    _run_segment_stats,
    _fake_segment_stats,
)


# ---- one launch a step -------------------------------------------------------------------------


def localize(
    target: Tensor, *, start: int, width: int, vocab_size: int, ignore_index: int | None
) -> tuple[Tensor, Tensor]:
    """As `logits.opening.localize_target`: (column, keep), contiguous and of the target's shape.

    The column is as `TargetIds` says. An id outside the vocabulary fails a device-side assert; in
    the interpreter nothing does.
    """
    column, keep = _localize(target, start, width, vocab_size, ignore_index)
    return column, keep


def _fake_localize(target: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    shape = target.shape
    return target.new_empty(shape, dtype=torch.int64), target.new_empty(shape, dtype=torch.bool)


_localize = operator(
    "localize(Tensor target, int start, int width, int vocab_size, int? ignore_index) "
    "-> (Tensor, Tensor)",
    lambda target, start, width, vocab_size, ignore_index: triton_finish.localize(
        target, start=start, width=width, vocab_size=vocab_size, ignore_index=ignore_index
    ),
    _fake_localize,
)


def own_logits(logits: Tensor, target: Tensor, ids: TargetIds) -> tuple[Tensor, Tensor]:
    """As `localize`'s column, `[n]`, and the raw logits there in float32; 0 where not here."""
    column, own = _own_logits(logits, target, *ids)
    return column, own


_own_logits = operator(
    "own_logits(Tensor logits, Tensor target, int start, int vocab_size, int? ignore_index) "
    "-> (Tensor, Tensor)",
    lambda logits, target, *ids: triton_finish.own_logits(logits, target, TargetIds(*ids)),
    lambda logits, target, *_: (
        torch.empty_like(target),
        torch.empty_like(target, dtype=torch.float32),
    ),
)


def located_stats(
    logits: Tensor,
    target: Tensor | None,
    ids: TargetIds,
    spec: RowSpec,
    segments: Segments | None = None,
    *,
    temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `row_stats`, or `segment_stats`, for targets that are global ids; and their columns.

    Args:
        target: `[n]` int64; None: no row has one, and there are no columns.
    """
    local, width = (0, 0) if segments is None else (segments.local, segments.width)
    stats, *column = _located_stats(logits, target, temperature, *ids, local, width, *flatten(spec))
    return stats, column[0] if column else None


def _run_located_stats(
    logits: Tensor, target: Any, temperature: Any, start: int, vocab_size: int,
    ignore_index: int | None, local: int, width: int, *spec: Any,
) -> list[Tensor]:  # fmt: skip
    found = triton_stats.located_stats(
        logits, target, TargetIds(start, vocab_size, ignore_index), unflatten(*spec),
        Segments(local, width) if local else None, temperature=temperature,
    )  # fmt: skip
    return [x for x in found if x is not None]


def _fake_located_stats(
    logits: Tensor, target: Any, temperature: Any, start: int, vocab_size: int,
    ignore_index: int | None, local: int, width: int, *spec: Any,
) -> list[Tensor]:  # fmt: skip
    fields, rows = len(RowSpec(*spec).fields), logits.shape[0]
    shape = (local, fields, rows) if local else (fields, rows)
    column = [] if target is None else [torch.empty_like(target)]
    return [logits.new_empty(shape, dtype=torch.float32), *column]


_located_stats = operator(
    "located_stats(Tensor logits, Tensor? target, Tensor? row_temperature, int start, "
    f"int vocab_size, int? ignore_index, int local, int width, {SPEC_SCHEMA}) -> Tensor[]",
    _run_located_stats,
    _fake_located_stats,
)


def finish_rows(
    parts: Tensor, column: Tensor | None, spec: RowSpec, label_smoothing: float
) -> tuple[RowResults, Tensor]:
    """As `kernels.stats.merge`, `finish` and `FinishedStats.blanked` of parts `[parts, k, n]`.

    Args:
        column: `[n]`, as `TargetIds` says, or None: every row is kept.

    Returns:
        The results `[n]`, and norms `[j, n]` for `results_grad`, as `RowSpec.norms` says.
    """
    given = iter(_finish_rows(parts, column, float(label_smoothing), *flatten(spec)))
    return _named(spec, given), next(given)


def finished_stats(
    logits: Tensor,
    target: Tensor | None,
    ids: TargetIds,
    spec: RowSpec,
    label_smoothing: float,
    *,
    temperature: Tensor | None = None,
) -> tuple[RowResults, Tensor, Tensor | None]:
    """`located_stats` and `finish_rows` where all of the vocabulary is here, in two launches.

    The target's rank is counted against its own logit.

    Returns:
        The results, norms, and columns.
    """
    found = _finished_stats(
        logits, target, temperature, *ids, float(label_smoothing), *flatten(spec)
    )
    given = iter(found)
    return _named(spec, given), next(given), next(given, None)


def _named(spec: RowSpec, given: Iterator[Tensor]) -> RowResults:
    return RowResults(
        logprobs=next(given),
        entropy=next(given) if spec.entropy else None,
        target_rank=next(given) if spec.rank else None,
        lse=next(given),
        sum_pi_squared=next(given) if spec.sum_pi_squared else None,
    )


def _run_finish_rows(
    parts: Tensor, column: Any, label_smoothing: float, *spec: Any
) -> list[Tensor]:
    return triton_finish.finish_rows(parts, column, unflatten(*spec), label_smoothing)


def _fake_finish_rows(like: Tensor, _: Any, label_smoothing: float, *spec: Any) -> list[Tensor]:
    given, rows = RowSpec(*spec), like.shape[-1]
    wanted = (True, given.entropy, given.rank, True, given.sum_pi_squared)
    dtypes = dict.fromkeys(RowResults._fields, torch.float32) | {"target_rank": torch.int64}
    return [
        *(
            like.new_empty(rows, dtype=dtypes[name])
            for name, yes in zip(RowResults._fields, wanted, strict=True)
            if yes
        ),
        like.new_empty(len(given.norms), rows, dtype=torch.float32),
    ]


_finish_rows = operator(
    f"finish_rows(Tensor parts, Tensor? column, float label_smoothing, {SPEC_SCHEMA}) -> Tensor[]",
    _run_finish_rows,
    _fake_finish_rows,
)


def _run_finished_stats(
    logits: Tensor, target: Any, temperature: Any, start: int, vocab_size: int,
    ignore_index: int | None, label_smoothing: float, *spec: Any,
) -> list[Tensor]:  # fmt: skip
    given, ids = unflatten(*spec), TargetIds(start, vocab_size, ignore_index)
    parts, column = triton_stats.split_stats(
        logits, target, given, ids=ids, temperature=temperature
    )
    results = triton_finish.finish_rows(parts, column, given, label_smoothing)
    return results if column is None else [*results, column]


def _fake_finished_stats(
    logits: Tensor, target: Any, temperature: Any, start: int, vocab_size: int,
    ignore_index: int | None, label_smoothing: float, *spec: Any,
) -> list[Tensor]:  # fmt: skip
    column = [] if target is None else [torch.empty_like(target)]
    return [*_fake_finish_rows(logits[:, 0], None, label_smoothing, *spec), *column]


_finished_stats = operator(
    "finished_stats(Tensor logits, Tensor? target, Tensor? row_temperature, int start, "
    f"int vocab_size, int? ignore_index, float label_smoothing, {SPEC_SCHEMA}) -> Tensor[]",
    _run_finished_stats,
    _fake_finished_stats,
)


# ---- gradients ---------------------------------------------------------------------------------


def grad_logits(
    logits: Tensor,
    target: Tensor,
    shift: Tensor,
    coef: Tensor,
    spec: RowSpec,
    *,
    bias: Tensor | None = None,
    temperature: Tensor | None = None,
    out: Tensor,
    chunk_size: int = 0,
) -> None:
    """As `kernels.reference.grad_logits`; dtypes and strides as in `row_stats`, for out too."""
    _grad_logits(logits, target, shift, coef, bias, temperature, out, *flatten(spec))


def _run_grad_logits(
    logits: Tensor, target: Tensor, shift: Tensor, coef: Tensor, bias: Any, temperature: Any,
    out: Tensor, *spec: Any,
) -> None:  # fmt: skip
    triton_grad.grad_logits(
        logits, target, shift, coef, unflatten(*spec), bias=bias, temperature=temperature, out=out
    )


def _writes_out(*_: Any) -> None:
    return None


_grad_logits = operator(
    "grad_logits(Tensor logits, Tensor target, Tensor shift, Tensor coef, Tensor? bias, "
    f"Tensor? row_temperature, Tensor(a!) out, {SPEC_SCHEMA}) -> ()",
    _run_grad_logits,
    _writes_out,
)


def results_grad(
    logits: Tensor,
    column: Tensor | None,
    upstream: RowResults,
    norms: Tensor,
    spec: RowSpec,
    label_smoothing: float,
    *,
    temperature: Tensor | None = None,
    out: Tensor,
) -> None:
    """As `kernels.stats.gradient_coefficients` and `kernels.reference.grad_logits`, in one launch.

    Args:
        column: `[n]`, as `TargetIds` says; None: no row has a target.
        upstream: `[n]` float32 each, any stride.
        norms: of the forward, with its spec.
    """
    _results_grad(
        logits, column, upstream.logprobs, upstream.entropy, upstream.lse,
        upstream.sum_pi_squared, norms, temperature, out, float(label_smoothing), *flatten(spec),
    )  # fmt: skip


def _run_results_grad(
    logits: Tensor, column: Any, logprobs: Any, entropy: Any, lse: Any,
    sum_pi_squared: Any, norms: Tensor, temperature: Any, out: Tensor, label_smoothing: float,
    *spec: Any,
) -> None:  # fmt: skip
    upstream = RowResults(logprobs, entropy, None, lse, sum_pi_squared)
    triton_grad.results_grad(
        logits, column, upstream, norms, unflatten(*spec),
        label_smoothing=label_smoothing, temperature=temperature, out=out,
    )  # fmt: skip


_results_grad = operator(
    "results_grad(Tensor logits, Tensor? column, Tensor? d_logprobs, "
    "Tensor? d_entropy, Tensor? d_lse, Tensor? d_sum_pi_squared, Tensor norms, "
    "Tensor? row_temperature, Tensor(a!) out, "
    f"float label_smoothing, {SPEC_SCHEMA}) -> ()",
    _run_results_grad,
    _writes_out,
)


# ---- entries -----------------------------------------------------------------------------------


def entries_grad(
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
    chunk_size: int = 0,
) -> None:
    """As `kernels.reference.entries_grad`; dtypes and strides as in `row_stats`, for out too."""
    _entries_grad(logits, column, upstream, shift, coef, bias, temperature, out, *flatten(spec))


def _run_entries_grad(
    logits: Tensor, column: Tensor, upstream: Tensor, shift: Any, coef: Any, bias: Any,
    temperature: Any, out: Tensor, *spec: Any,
) -> None:  # fmt: skip
    triton_entries.entries_grad(
        logits, column, upstream, shift, coef, unflatten(*spec),
        bias=bias, temperature=temperature, out=out,
    )  # fmt: skip


_entries_grad = operator(
    "entries_grad(Tensor logits, Tensor column, Tensor upstream, Tensor? shift, Tensor? coef, "
    f"Tensor? bias, Tensor? row_temperature, Tensor(a!) out, {SPEC_SCHEMA}) -> ()",
    _run_entries_grad,
    lambda *_: None,
)
