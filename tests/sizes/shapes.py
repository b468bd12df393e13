"""Shapes of real models, and where the package cuts them."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch

from mcore_logprobs.sources.head import HeadLogits, head_logits
from tests.engine.cases import Case, Setting, allowed, axes_of
from tests.helpers.covering import covering
from tests.ops import FLAGS, OPERATIONS

# Padded vocabularies of real models, and the tensor-parallel sizes that they are split over.
VOCABS = (32000, 32064, 49152, 50304, 64000, 100352, 102400, 128256, 129280, 131072)
VOCABS += (151936, 152064, 163840, 200064, 201088, 256000, 262144)
TP_SIZES = (1, 2, 4, 8, 16, 32)
MOST_ROWS = 65536
# Logits of one case, over all ranks: what the float64 reference takes a second or two for.
_LOGITS = 12 << 20
# A tile of whole rows has 32 Mi of them.
_LOGITS_OF_WHOLE_ROWS = 44 << 20
_EXCHANGED = ("all_to_all_vp2sp", "all_to_all_sp2vp")
_IN_WHOLE_ROWS = ("linear_policy_loss", "linear_map")


@functools.cache
def opened(width: int, h: int, chunk_size: int | None, rows: int, whole_rows: bool) -> HeadLogits:
    """A head as the package cuts it; its numbers are in nobody's way."""
    hidden, weight = (torch.zeros(1, h).expand(count, h) for count in (rows, width))
    head = head_logits(hidden, weight, chunk_size=chunk_size)
    return head.in_whole_rows() if whole_rows else head


def boundary(row: Setting) -> int:
    """The rows of a whole number of tiles, or of a backend's chunks of rows, over all ranks."""
    width, chunk_size = width_of(row), row["chunk_size"]
    kind, number = row["at"]
    whole_rows = row["op"] in _IN_WHOLE_ROWS
    head = opened(width, row.get("h", 4), chunk_size, MOST_ROWS, whole_rows)
    if kind == "chunk":
        block = width if row["source"] == "logits" else next(iter(head.blocks)).stop
        own = chunk_size if row["source"] == "logits" else None
        return number * (own or head.rows_at_a_time(block))
    ranks = ranks_of(row)
    return number * (head.tile_ends()[0] // ranks * ranks)


def width_of(row: Setting) -> int:
    return row["vocab"] // row["share"]


def ranks_of(row: Setting) -> int:
    return 1 if row["ranks"] == "one" else 2


def rows_of(row: Setting) -> int:
    """The rows of a case; where ranks hold parts of them, the same on every rank."""
    rows = boundary(row) + row["off"]
    split = row["ranks"] == "two, sequence parallel" or (
        row["ranks"] == "two" and row["op"] in _EXCHANGED
    )
    return rows + (row["off"] or 1) if split and rows % 2 else rows


# ---- the axes; each case has one value of each --------------------------------------------------

AXES: dict[str, Any] = {
    "vocab": VOCABS,
    "share": TP_SIZES,
    "at": (("tile", 1), ("tile", 2), ("tile", 3), ("chunk", 1), ("chunk", 3)),
    "off": (0, 1, -1),
    "true": ("all", "one column of the last block", "some less"),
    "dtype": ("float32", "bfloat16"),
    "temperature": ("one", "number", "token"),
    "upstream": ("all", "some rows"),
    "ignored": (False, True),
}
FROM_HIDDEN = {
    "h": (4, 5, 8, 16),
    "chunk_size": (None, 50, 1000),
    "ranks": ("one", "two", "two, sequence parallel"),
    "bias": (False, True),
    "lora": (False, True),
    "logit_scale": (1.0, 0.5),
    "compact": (False, True),
    "rows": (None, "some"),
    "gradient_accumulation_fusion": (False, True),
}
FROM_LOGITS = {
    "chunk_size": (None, 3),
    "ranks": ("one", "two"),
    "layout": ("contiguous", "wider rows", "every second row"),
}


def axes(source: str) -> dict[str, Any]:
    ops = [name for name, op in OPERATIONS.items() if source in op.sources]
    return {"op": ops} | AXES | (FROM_HIDDEN if source == "hidden" else FROM_LOGITS)


def case_of(row: Setting, seed: int = 0) -> Case:
    """The engine's case."""
    op, source = OPERATIONS[row["op"]], row["source"]
    known = axes_of(op, source)
    setting = {name: values[0] for name, values in known.items()}
    setting |= {name: value for name, value in row.items() if name in known}
    ranks, width, rows = ranks_of(row), width_of(row), rows_of(row)
    setting |= {"tp": ranks, "vocab": ranks * width, "h": row.get("h", 4), "exact": True}
    flat = rows % 4 or row["op"] in _EXCHANGED
    setting["lead"] = f"[{rows}]" if flat else f"[{rows // 2}, 2]"
    if source == "hidden":
        setting["sequence_parallel"] = row["ranks"] == "two, sequence parallel"
    if "vocab_size" in known:
        setting["vocab_size"] = true_vocab(row)
    rng = random.Random(seed)
    options = {name: rng.choice(values) for name, values in op.options.items()}
    setting |= options if op.allowed(setting | options) else {}
    if "invariant_segments" in op.options:  # a kernel for each width: test_large.py has them
        setting["invariant_segments"] = None
    asked = {name: True for name in FLAGS if name in op.options}
    setting |= asked if op.allowed(setting | asked) else {}
    if "k" in known:
        setting["k"] = (3, 50, 700)[seed % 3]
    return Case(op.name, setting, seed)


def true_vocab(row: Setting) -> int | None:
    """The last rank keeps all of its columns, one of its last block, or all but a few."""
    if row["true"] == "all":
        return None
    width, others = width_of(row), (ranks_of(row) - 1) * width_of(row)
    starts = [0]
    if row["true"] != "some less":
        starts = list(range(0, width, 2048))  # blocks of the compiled backend
        if row["source"] == "hidden":
            whole_rows = row["op"] in _IN_WHOLE_ROWS
            head = opened(width, row["h"], row["chunk_size"], rows_of(row), whole_rows)
            starts = [block.start for block in head.blocks]
    return others + (starts[-1] + 1 if starts[-1] else width - 37)


def fits(source: str, row: Setting) -> bool:
    """Whether settings, some of which may be missing, make a case of reasonable size."""
    if row.get("rows") and row.get("compact"):
        return False
    if row.get("compact") and not row.get("ignored", True):
        return False
    needed = {"op", "vocab", "share", "at", "off", "ranks", "chunk_size"}
    if not row.keys() >= needed | ({"h"} if source == "hidden" else set()):
        return True
    row = {"source": source} | row
    rows = rows_of(row)
    most = _LOGITS
    if row["op"] in _IN_WHOLE_ROWS and row["chunk_size"] is None and row["at"] == ("tile", 1):
        most = _LOGITS_OF_WHOLE_ROWS
    if not 0 < rows <= MOST_ROWS or rows * width_of(row) * ranks_of(row) > most:
        return False
    if not row.keys() >= axes(source).keys():
        return True
    case = case_of(row)
    return allowed(case.operation, case.setting)


def cases_from(source: str) -> list[Case]:
    """Every pair of settings that fits, and each operation at and around every boundary."""
    together = [("op", "at", "off", "chunk_size"), ("op", "ranks", "dtype")]
    found = covering(axes(source), lambda row: fits(source, row), together)
    return [case_of({"source": source} | row, seed) for seed, row in enumerate(found, start=1)]


def random_policy_cases(count: int, seed: int) -> list[Case]:
    """`linear_policy_loss` in float32: any vocabulary over any TP size, any number of rows."""
    rng = random.Random(seed)
    found: list[Case] = []
    while len(found) < count:
        width, h = rng.choice(VOCABS) // rng.choice(TP_SIZES), rng.randint(4, 16)
        rows = int(2 ** rng.uniform(0.0, 16.0))
        chunk_size = rng.choice((None, None, None, rng.randint(1, rows)))
        if rows * width <= _LOGITS_OF_WHOLE_ROWS and rows <= 300 * (chunk_size or rows):
            found.append(policy_case(rows, width, h, chunk_size, rng.randrange(1, 2**31)))
    return found


def policy_case(
    rows: int, width: int, h: int = 4, chunk_size: int | None = None, seed: int = 0
) -> Case:
    """`linear_policy_loss` with all other settings as they are by default."""
    op = OPERATIONS["linear_policy_loss"]
    setting = {name: values[0] for name, values in axes_of(op, "hidden").items()}
    setting |= {"lead": f"[{rows}]", "vocab": width, "h": h, "chunk_size": chunk_size}
    return Case(op.name, setting, seed)


def sample_case(op: str) -> Case:
    """V 151936 over TP 32, two blocks; a row behind the first tile; other settings by default."""
    row = {name: values[0] for name, values in axes("hidden").items()}
    told = {"op": op, "source": "hidden", "vocab": 151936, "share": 32, "off": 1}
    if op in _IN_WHOLE_ROWS:
        told["chunk_size"] = 300
    return case_of(row | told, seed=1)
