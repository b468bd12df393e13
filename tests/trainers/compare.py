"""How the runs of a row are held to each other."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.trainers.frame import Row, Tolerance, Trace


@dataclasses.dataclass
class Result:
    """What a row showed: the largest differences, and the calls counted."""

    agreement: dict[str, float]
    control: dict[str, float]
    ours: int
    theirs: int

    def __str__(self) -> str:
        found = ", ".join(f"{key} {value:.0e}" for key, value in self.agreement.items())
        return f"{found}; calls: ours {self.ours}, theirs {self.theirs}"


def _apart(a: Any, b: Any, what: str, scale: Callable[[float], float]) -> float:
    a, b = (torch.as_tensor(x).detach().double() for x in (a, b))
    assert a.shape == b.shape, f"{what}: expected shape {tuple(a.shape)}, got {tuple(b.shape)}"
    assert bool(torch.isfinite(a).all()), f"{what}: the plain run has values that are not finite"
    if not a.numel():
        return 0.0
    worst = float(((a - b).abs()).max()) / scale(float(a.abs().max()))
    return worst if worst == worst else float("inf")


def differences(plain: Sequence[Trace], other: Sequence[Trace]) -> dict[str, float]:
    """The largest difference of each kind, over ranks, updates and names (see `Tolerance`)."""
    worst = dict.fromkeys((f.name for f in dataclasses.fields(Tolerance)), 0.0)

    def note(kind: str, a: Any, b: Any, what: str, scale: Callable = lambda size: 1.0) -> None:
        worst[kind] = max(worst[kind], _apart(a, b, what, scale))

    for rank, (a, b) in enumerate(zip(plain, other, strict=True)):
        for kind in ("logprobs", "entropy"):
            pairs = zip(getattr(a, kind), getattr(b, kind), strict=True)
            for i, (x, y) in enumerate(pairs):
                note(kind, x, y, f"rank {rank}, {kind} {i}")
        for i, (x, y) in enumerate(zip(a.grad_norm, b.grad_norm, strict=True)):
            note("grad_norm", x, y, f"rank {rank}, norm {i}", lambda size: max(size, 1e-12))
        for x, y in zip(a.metrics, b.metrics, strict=True):
            assert x.keys() == y.keys(), f"metrics: expected {sorted(x)}, got {sorted(y)}"
            for key in x:
                note("metrics", x[key], y[key], f"rank {rank}, {key}", lambda size: max(size, 1.0))
        assert a.parameters.keys() == b.parameters.keys(), "the runs' parameters differ in name"
        for key in a.parameters:
            note("parameters", a.parameters[key], b.parameters[key], f"rank {rank}, {key}")
    return worst


def first_differences(plain: Sequence[Trace], other: Sequence[Trace]) -> dict[str, float]:
    """The same of the first log-probabilities and gradient norm: parameters are the same still."""

    def first(trace: Trace) -> Trace:
        return Trace(logprobs=trace.logprobs[:1], grad_norm=trace.grad_norm[:1])

    return differences([first(t) for t in plain], [first(t) for t in other])


def check(row: Row, traces: Sequence[Sequence[Trace]]) -> Result:
    """Holds a row's three runs to each other.

    Raises:
        AssertionError: the first thing that is wrong.
    """
    plain, switched, other = traces
    printed = ["".join(t.output for t in ranks) for ranks in (plain, switched)]
    for line in row.log:
        assert line not in printed[0], f"the plain run says {line!r}"
        assert line in printed[1], f"the switched run does not say {line!r}: {printed[1][-3000:]}"
    total = {
        name: sum((getattr(t, who) for t in ranks), Counter[str]())
        for name, ranks, who in (
            ("plain ours", plain, "ours"),
            ("plain theirs", plain, "theirs"),
            ("ours", switched, "ours"),
            ("theirs", switched, "theirs"),
        )
    }
    assert not total["plain ours"], f"the plain run called ours: {total['plain ours']}"
    if row.calls:
        assert total["plain theirs"], "the plain run called none of the functions that are replaced"
    else:
        assert row.settings.get("lazy"), "a row without calls shows nothing"
    assert not total["theirs"], f"the switched run called theirs: {total['theirs']}"
    for name in row.calls:
        assert total["ours"][name], f"the switched run never called {name}: {total['ours']}"

    for ranks in (plain, switched):
        assert any(t.logprobs for t in ranks), "no rank has log-probabilities"
        assert all(t.parameters for t in ranks), "a rank has no parameters"
        assert max(len(t.grad_norm) for t in ranks) >= 2, "expected two updates or more"
        assert max(len(t.metrics) for t in ranks) >= 2, "expected the metrics of two updates"
        least = 20 * row.tolerance.parameters
        moved = min(t.moved for t in ranks)
        assert moved > (0.0 if math.isinf(least) else least), "nothing was trained"
    if row.settings.get("lazy"):
        made = [[made for t in ranks for made in t.logits] for ranks in (plain, switched)]
        assert made[0], "the plain run made no logits"
        assert not made[1], f"the switched run made logits: {sorted(set(made[1]))[:8]}"
    agreement = differences(plain, switched)
    control = differences(plain, other)
    result = Result(agreement, control, sum(total["ours"].values()), 0)
    first = first_differences(plain, switched)
    for kind, bound in dataclasses.asdict(row.first).items():
        assert first[kind] <= bound, f"{kind} at first: expected at most {bound:g}: {first}"
    for kind, bound in dataclasses.asdict(row.tolerance).items():
        assert agreement[kind] <= bound, f"{kind}: expected at most {bound:g}: {result}"
    for kind in ("logprobs", "grad_norm", "parameters"):
        bound = row.told_apart * getattr(row.tolerance, kind)
        assert math.isinf(bound) or control[kind] > bound, (
            f"{kind}: another temperature is not told apart: {control}"
        )
    return result


def check_alike(row: Row, plain: Sequence[Trace], norms: dict[str, list[float]]) -> None:
    """Rows that say so (`settings["alike"]`) train on the same data in every layout.

    norms: the gradient norms of the first such row of each framework; this one's are put there.

    Raises:
        AssertionError: they differ from those of the first.
    """
    if not row.settings.get("alike"):
        return
    own = max((t.grad_norm for t in plain), key=len)
    first = norms.setdefault(row.framework, own)
    worst = _apart(first, own, "gradient norms", lambda size: size)
    assert worst < 1e-4, f"{row.name}: gradient norms: expected {first} in every layout, got {own}"
