"""The count of higher logits against the reference: counts are exact."""

from __future__ import annotations

import pytest
import torch

from mcore_logprobs.kernels import reference, triton_backend
from tests.kernels.common import DEVICE, DTYPES, lay_out, make_logits, make_target
from tests.kernels.interpreter import interpreted


def _check(logits, valid):
    target = make_target(logits.shape[0], valid, logits)
    threshold = logits.float().gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    got = triton_backend.count_higher(logits, target, threshold, valid=valid)
    expected = reference.count_higher(logits, target, threshold, valid=valid, chunk_size=3)
    assert torch.equal(got, expected)
    assert got.dtype == torch.int64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "low", "high", "holes"])
@interpreted
def test_counts(kind, dtype):
    # Whole numbers, so that there are ties.
    for rows, width, valid in ((1, 1, 1), (3, 33, 32), (5, 1152, 1152), (2, 9000, 8999)):
        _check(make_logits(rows, width, dtype, kind).round(), valid)


@pytest.mark.parametrize("layout", ["wide", "every other", "far"])
@interpreted
def test_rows_with_a_stride(layout):
    _check(lay_out(make_logits(2, 1152, torch.bfloat16), layout), 1152)


@interpreted
def test_zero_rows_and_no_true_vocabulary():
    _check(make_logits(0, 40, torch.float32), 40)
    nobody = torch.full((3,), -1, device=DEVICE)
    logits = make_logits(3, 40, torch.float32)
    counts = triton_backend.count_higher(logits, nobody, torch.zeros(3, device=DEVICE), valid=0)
    assert counts.tolist() == [0, 0, 0]


@interpreted
def test_the_targets_own_column_is_left_out_by_name():
    # Its value is above a threshold that was computed on another path, an ulp lower.
    logits = torch.tensor([[1.0, 2.0, 3.0]], device=DEVICE)
    below = torch.nextafter(logits[:, 1], torch.zeros(1, device=DEVICE))
    counts = triton_backend.count_higher(logits, torch.tensor([1], device=DEVICE), below, valid=3)
    assert counts.tolist() == [1]
