"""The inputs say where to compute, not the caller's default device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_logprobs as ml
from mcore_logprobs.losses import ClipCovLoss

HIDDEN, WEIGHT = torch.randn(6, 5), torch.randn(12, 5)
TARGET, OTHER = torch.tensor([1, -100, 3, 11, 0, 5]), torch.randn(6)


def logprobs(**options: Any) -> Tensor:
    target = TARGET if "rows" not in options else TARGET[options["rows"]]
    result = ml.linear_token_stats(HIDDEN, WEIGHT, target, **options).logprobs
    assert result is not None
    return result


CALLS: dict[str, Callable[[], Any]] = {
    "statistics": logprobs,
    "rows": lambda: logprobs(rows=torch.tensor([4, 0, 4], device="cpu")),
    "compact": lambda: logprobs(compact=True),
    "ids": lambda: logprobs(disallowed_ids=[2, 7], logit_bias={4: 1.0, 6: -torch.inf}),
    "a tree": lambda: ml.PrefixTree.from_branches([[1, 2, 3], [1, 2, 4]]).positions,
    "a mask": lambda: ml.PrefixTree.from_branches([[1, 2, 3], [1, 4]]).attention_mask(),
    "a shift": lambda: ml.context_parallel_shift(OTHER[None], fill=-torch.inf),
    "a choice": lambda: ClipCovLoss(low=-9.0).choose(OTHER, OTHER + 0.1, OTHER.flip(0)),
}


@pytest.mark.parametrize("call", CALLS)
def test_another_default_device_changes_nothing(call: str) -> None:
    expected = CALLS[call]()
    with torch.device("meta"):
        got = CALLS[call]()
    assert torch.equal(got, expected)
