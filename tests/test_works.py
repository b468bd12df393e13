"""Asynchronous collectives as NCCL makes them: at any time between their start and the wait.

Gloo's are mostly over before the next line. Here they are made once they are waited for, or at once
while the result comes with the wait; until then the result is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engine import cases, run
from tests.helpers.distributed import get_pool
from tests.ops import OPERATIONS

IN_TWO = ("all_gather_into_tensor", "reduce_scatter_tensor")


class Works:
    """Makes asynchronous collectives: `late` when they are waited for, else at once.

    Attributes:
        open: how many are not waited for yet.
        made: how many there were.
    """

    def __init__(self, *, late: bool) -> None:
        self._late, self.open, self.made = late, 0, 0

    def start(self, send: Callable[[], Tensor], out: Tensor) -> Any:
        """`send` makes the collective and gives its result, which goes into `out`."""
        found = None if self._late else send()
        unknown = out.fill_(torch.nan).clone()
        self.open, self.made = self.open + 1, self.made + 1

        class Work:
            def wait(_) -> None:
                torch.testing.assert_close(out, unknown, rtol=0, atol=0, equal_nan=True)
                out.copy_(send() if found is None else found)
                self.open -= 1

        return Work()

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        for name in IN_TWO:
            patch.setattr(dist, name, self._in_two(getattr(dist, name)))
        patch.setattr(dist, "all_reduce", self._in_place(dist.all_reduce))

    def _in_two(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def collective(out: Tensor, x: Tensor, *, group: Any, async_op: bool = False) -> Any:
            if not async_op:
                return real(out, x, group=group)

            def send() -> Tensor:
                found = torch.empty_like(out)
                real(found, x, group=group)
                return found

            return self.start(send, out)

        return collective

    def _in_place(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def collective(x: Tensor, *, group: Any, async_op: bool = False) -> Any:
            if not async_op:
                return real(x, group=group)
            given = x.clone()

            def send() -> Tensor:
                real(given, group=group)
                return given

            return self.start(send, x)

        return collective


def with_works(case: cases.Case) -> list[tuple[run.Found, int]]:
    """(what is found, asynchronous collectives) as gloo makes them, late and early."""
    found = [(run.on_rank(case), 0)]
    for late in (True, False):
        works = Works(late=late)
        with pytest.MonkeyPatch.context() as patch:
            works.patch(patch)
            found.append((run.on_rank(case), works.made))
        assert works.open == 0, "not waited for"
    return found


@pytest.mark.parametrize("parallel", [False, True])
def test_results_are_waited_for_and_operands_stay_as_they_are(parallel: bool) -> None:
    names = [name for name, op in OPERATIONS.items() if op.from_hidden]
    common = ["tp=2", "lead=[n]", "chunk_size=4", f"sequence_parallel={parallel}"]
    lines = [[name, "hidden", *common] for name in names]
    for name in ("token_stats", "linear_policy_loss"):
        lines += [
            [name, "hidden", *common, "lora=True", rows] for rows in ("rows=some", "compact=True")
        ]
        lines += [[name, "hidden", *common, "gradient_accumulation_fusion=True", "vocab=66"]]
    answers = get_pool(2).run_many(with_works, [cases.parse(line) for line in lines])
    for line, answer in zip(lines, answers, strict=True):
        assert isinstance(answer, list), (line, answer)
        for (plain, _), *others in answer:
            for found, made in others:
                assert made >= 2 or line[0] == "sample", line  # of two tiles or three
                for one, other in ((plain.outputs, found.outputs), (plain.grads, found.grads)):
                    assert one.keys() == other.keys()
                    for name, x in one.items():
                        torch.testing.assert_close(
                            other[name], x, rtol=0, atol=0, equal_nan=True, msg=f"{line} {name}"
                        )
