"""`doctor` on `invariant_segments`: it reports what it finds, and finds what is broken."""

from __future__ import annotations

import pytest
import torch

from mcore_logprobs.debug import doctor, invariance
from mcore_logprobs.kernels.products import product
from mcore_logprobs.kernels.stats import merge
from mcore_logprobs.ops import apply
from mcore_logprobs.ops import head as fused_head
from mcore_logprobs.ops.head_gradients import HeadGradient


def found() -> dict[str, bool]:
    return {g.name: g.holds for g in invariance.find_guarantees()}


def test_every_guarantee_holds_here() -> None:
    guarantees = found()
    assert len(guarantees) == 18
    assert set(guarantees.values()) == {True}


def test_a_head_of_another_size() -> None:
    """The checks ask for no size of their own: a GPU's are those of a real model's head."""
    hidden, weight = torch.randn(15, 96), torch.randn(8 * 1024, 96)
    found = dict(invariance._hidden_checks(hidden, weight, torch.arange(15) * 500))
    assert len(found) == 5
    assert set(found.values()) == {True}


def test_products_of_another_shape_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_head, "batch_invariant_matmul", lambda a, b, out: product(a, b, out))
    broken = {name for name, holds in found().items() if not holds}
    assert "hidden float32 forward across rows" in broken
    assert not any(name.startswith("logits") for name in broken)


def test_sums_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(stats, spec, *, ordered=False):
        flipped = stats.flip(0) if stats.shape[-1] % 2 else stats
        return merge(flipped, spec, ordered=ordered)

    monkeypatch.setattr(apply, "merge", backwards)
    broken = {name for name, holds in found().items() if not holds}
    assert "logits float32 forward across rows" in broken


def test_parts_of_dhidden_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    add_segment = HeadGradient._add_segment

    def spoiled(self, columns, dlogits, tile):
        add_segment(self, columns, dlogits, tile)
        if self._head.options.segments.local == 2:  # TP 4
            self._parts[0].nextafter_(torch.tensor(torch.inf))

    monkeypatch.setattr(HeadGradient, "_add_segment", spoiled)
    broken = {name for name, holds in found().items() if not holds}
    assert broken == {f"hidden {dtype} dHidden across TP" for dtype in ("float32", "bfloat16")}


def test_doctor_prints_it() -> None:
    assert "not tried: doctor --full does" in doctor.as_text(doctor.report())
    report = doctor.report(full=True)
    assert "cpu: 18 of 18 checks found them" in doctor.as_text(report)
    report["invariant_segments"]["cpu"]["logits float32 forward across TP"] = False
    assert "NOT logits float32 forward across TP" in doctor.as_text(report)
