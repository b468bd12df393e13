"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mcore_logprobs.kernels import inductor
from mcore_logprobs.kernels.inductor import common


@pytest.fixture
def must_compile() -> Iterator[None]:
    """No case may pass because the reference computed it."""
    assert inductor.obstacle() is None
    yield
    assert inductor.obstacle() is None
    assert not common._failures
