"""Logits for the kernels' tests: every kind of row that a kernel must survive, in every layout."""

from __future__ import annotations

import mmap
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.kernels.chunk import Chunk, ChunkAt, Processing
from mcore_logprobs.kernels.segments import Segments
from mcore_logprobs.kernels.stats import RowResults, StatsSpec, finalize, merge
from mcore_logprobs.ops.row_statistics import RowStatistics
from tests.helpers.oracles import assert_no_worse

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EVERYTHING = StatsSpec(*[True] * len(fields(StatsSpec)))
# What `make_chunk` takes.
TRANSFORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"logit_scale": 0.25, "temperature": 0.7},
    "softcap": {"softcap": 3.0, "temperature": 0.7},
    "bias": {"bias": True, "temperature": 1.7, "logit_scale": 0.5},
    "all": {"bias": True, "temperature": 1.7, "logit_scale": 0.5, "softcap": 3.0},
    "rows": {"rows": True, "logit_scale": 0.5},
    "softcap, rows": {"rows": True, "softcap": 3.0},
    "bias, rows": {"rows": True, "bias": True},
    "all, rows": {"rows": True, "bias": True, "logit_scale": 0.5, "softcap": 3.0},
}


def setting_id(setting: dict[str, Any]) -> str:
    """What pytest calls a setting of `covering`."""
    return "; ".join(f"{name} {value}" for name, value in sorted(setting.items()))


def make_logits(rows: int, width: int, dtype: torch.dtype, kind: str = "normal") -> Tensor:
    """`[rows, width]` on the device under test.

    Kinds: "low" and "high" lie within a few units of -120 and +80; "holes" has -inf in every third
    column, in the whole first row, and everywhere but in one late column of the last.
    """
    y = torch.randn(rows, width)
    y = {"normal": 3.0 * y, "low": y - 120.0, "high": y + 80.0, "holes": 3.0 * y}[kind]
    if kind == "holes" and rows:
        y[:, ::3] = -torch.inf
        y[0] = -torch.inf
        y[-1] = -torch.inf
        y[-1, max(0, width - 9)] = 1.0
    return y.to(DEVICE, dtype)


def lay_out(logits: Tensor, layout: str) -> Tensor:
    """The same values, with rows that lie otherwise; NaN between them."""
    rows, width = logits.shape
    if layout == "wide":  # rows of a wider tensor, off a 16-byte boundary
        home = torch.full((rows, width + 7), torch.nan, dtype=logits.dtype, device=DEVICE)
        view = home[:, 3 : 3 + width]
    elif layout == "every other":
        home = torch.full((2 * rows, width), torch.nan, dtype=logits.dtype, device=DEVICE)
        view = home[::2]
    else:
        assert layout == "far"  # the third row starts past 2^31 elements
        view = far_rows(rows, width, logits.dtype)
    view.copy_(logits)
    return view


def far_rows(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """`[rows, width]`, the third past 2^31 elements; memory that is not touched is free."""
    stride = (1 << 30) + 64  # in 32 bits, as a row's number is: their product is not
    elements = (rows - 1) * stride + width
    if DEVICE == "cuda":
        home = torch.empty(elements, dtype=dtype, device=DEVICE)
    else:
        home = torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize), dtype=dtype)
    return home.as_strided((rows, width), (stride, 1))


def make_target(rows: int, valid: int, logits: Tensor) -> Tensor:
    """`[rows]` columns below `valid` that hold a finite logit where there is one; -1 for some."""
    finite = logits[:, :valid].isfinite().float() + 1e-6
    target = torch.multinomial(finite, 1).squeeze(-1) if rows else finite.new_zeros(0).long()
    target[1::4] = -1
    return target


def make_threshold(chunk: Chunk, target: Tensor) -> Tensor:
    """What `higher` counts against: the target's logit, or the first column's; and its bias."""
    column = target.clamp(min=0)
    raw = chunk.logits.float().gather(-1, column.unsqueeze(-1)).squeeze(-1)
    bias = chunk.processing.bias
    return raw if bias is None else torch.stack([raw, bias[column]])


def make_chunk(
    logits: Tensor, valid: int | None = None, *, bias: bool = False, rows: bool = False, **how: Any
) -> Chunk:
    """A chunk, by default all valid; with a bias, with a temperature a row."""
    width = logits.shape[1]
    if rows:
        how["temperature"] = torch.linspace(0.5, 2.0, len(logits), device=DEVICE)
    offsets = torch.randn(width, device=DEVICE) if bias else None
    processing = Processing.of(bias=offsets, **how)
    return Chunk(logits, width if valid is None else valid, processing)


def doubled(chunk: Chunk) -> Chunk:
    """The chunk in float64."""
    processing = chunk.processing
    if processing.bias is not None:
        processing = replace(processing, bias=processing.bias.double())
    return replace(chunk, logits=chunk.logits.double(), processing=processing)


def row_stats(
    backend: Any, chunk: Chunk, target: Tensor, spec: StatsSpec, threshold: Tensor | None = None
) -> Tensor:
    """Statistics of whole rows, `[k, n]`."""
    parts = backend.stats(chunk, target, spec, threshold=threshold, chunk_size=16)
    return merge(parts, spec, multiplier=chunk.processing.multiplier)


def segment_stats(
    backend: Any,
    chunk: Chunk,
    target: Tensor,
    spec: StatsSpec,
    segments: Segments,
    *,
    threshold: Tensor | None = None,
    chunk_size: int,
) -> Tensor:
    """Statistics of a rank's segments, `[local, k, n]`, of a chunk of all of its columns."""
    rows, width = chunk.logits.shape
    source: Any = SimpleNamespace(
        options=SimpleNamespace(segments=segments),
        device=chunk.logits.device,
        acc_dtype=torch.float32,
        processing=chunk.processing,
        num_rows=rows,
        shard=SimpleNamespace(group=None, width=width, valid_width=chunk.valid),
        backend=backend,
        rows_at_a_time=lambda _: chunk_size,
    )
    tile: Any = SimpleNamespace(rows=slice(0, rows), target_logits=lambda _: threshold)
    stats = RowStatistics(source, spec, target)
    stats.begin_tile(tile, tile.rows)
    stats.see(ChunkAt(tile.rows, slice(0, width), chunk))
    return stats.local


def assert_stats(
    got: Tensor,
    plain: Tensor,
    exact: Tensor,
    spec: StatsSpec,
    *,
    multiplier: float | Tensor = 1.0,
    ulps: float = 4.0,
) -> None:
    """`[k, n]` statistics, finalized, are no worse than plain torch's against float64's."""
    done: list[RowResults] = [
        finalize(stats, spec, multiplier=multiplier).results for stats in (got, plain, exact)
    ]
    for name, values in zip(RowResults._fields, zip(*done, strict=True), strict=True):
        if name not in ("logprobs", "target_rank") and values[0] is not None:
            assert_no_worse(*values, ulps=ulps, name=name)
    # A shard of -inf alone has no log-probability, and one without the target gives no meaning to
    # it; both still have to merge, which takes `target` as it is.
    assert_no_worse(got[2], plain[2], exact[2], ulps=ulps, name="target")
    some = exact[1] > 0
    assert_no_worse(*(d.logprobs[some] for d in done), ulps=ulps, name="logprobs")
    assert torch.equal(got[0].isneginf(), exact[0].isneginf())
    if spec.rank:
        assert torch.equal(got[spec.fields.index("higher")].double(), done[2].target_rank.double())
    if spec.smoothing:
        zsum = spec.fields.index("zsum")
        assert_no_worse(got[zsum], plain[zsum], exact[zsum], ulps=8 * ulps, name="zsum")
        assert torch.equal(got[zsum + 1].double(), exact[zsum + 1])
