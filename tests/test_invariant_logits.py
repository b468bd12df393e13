"""`invariant_segments`: the same bits at any TP, any chunk, in any company of rows, from logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs import (
    vocab_parallel_entropy,
    vocab_parallel_logprobs,
    vocab_parallel_token_stats,
)
from mcore_logprobs.bench.counting import CollectivesMade
from tests.helpers.invariance import assert_same_bits, same_bits
from tests.helpers.shards import on_ranks, world_group, world_rank, world_size
from tests.ops import EVERY_STATISTIC, PER_TOKEN, WITH_A_GRADIENT

SEGMENTS = 8
# One whole block and a part of one in each segment; the true vocabulary ends inside the sixth.
WIDE = {"vocab": SEGMENTS * (2048 + 70), "vocab_size": 6 * (2048 + 70) - 45}
NARROW = {"vocab": SEGMENTS * 40, "vocab_size": SEGMENTS * 40 - 51}
CHUNKS = (None, 1, 7, 64)


def inputs(rows: int, sizes: dict[str, int], dtype: torch.dtype) -> dict[str, Tensor]:
    whole = (3 * torch.randn(rows, sizes["vocab"])).to(dtype)
    whole[1, 5:900] = -torch.inf
    target = torch.randint(0, sizes["vocab_size"], (rows,))
    target[rows // 2] = -100
    return {
        "whole": whole,
        "target": target,
        "temperature": 0.5 + torch.rand(rows),
        "upstream": torch.randn(len(WITH_A_GRADIENT), rows),
    }


def stats_and_gradient(given: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """This rank's statistics, and its columns of the logits' gradient."""
    width = given["whole"].shape[-1] // world_size()
    own = given["whole"][:, world_rank() * width : (world_rank() + 1) * width]
    logits = own.clone().requires_grad_()
    stats = vocab_parallel_token_stats(
        logits,
        given["target"],
        temperature=given["temperature"],
        tp_group=world_group(),
        **EVERY_STATISTIC,
        **options,
    )
    found = {name: getattr(stats, name) for name in PER_TOKEN}
    roots = [found[name] for name in WITH_A_GRADIENT]
    (grad,) = torch.autograd.grad(roots, logits, list(given["upstream"].to(roots[0].dtype)))
    return {name: value.detach() for name, value in found.items()} | {"grad": grad}


def chosen(given: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    return {
        name: value[:, rows] if name == "upstream" else value[rows] for name, value in given.items()
    }


def every_way(given: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """The result on this rank; the same for every chunk size, and for rows drawn from the call."""
    found = stats_and_gradient(given, **options)
    for chunk_size in CHUNKS[1:]:
        again = stats_and_gradient(given, chunk_size=chunk_size, **options)
        assert_same_bits(again, found, f"chunk_size {chunk_size}")
    rows = given["target"].shape[0]
    for some in (torch.arange(rows).flip(0), torch.arange(0, rows, 3), torch.tensor([rows - 2])):
        again = stats_and_gradient(chosen(given, some), **options)
        expected = {name: value[some] for name, value in found.items()}
        assert_same_bits(again, expected, f"rows {some.tolist()}")
    return found


def joined(runs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    for run in runs[1:]:
        first, other = ({name: x[name] for name in PER_TOKEN} for x in (runs[0], run))
        assert_same_bits(other, first, "ranks")
    return runs[0] | {"grad": torch.cat([run["grad"] for run in runs], -1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_the_same_at_any_tensor_parallel_size_chunk_and_company(
    ranks: Any, dtype: torch.dtype
) -> None:
    given = inputs(13, WIDE, dtype)
    options = {"vocab_size": WIDE["vocab_size"], "softcap": 20.0, "invariant_segments": SEGMENTS}
    options |= {"backend": "torch"}
    found = [joined(on_ranks(ranks, tp, every_way, given, **options)) for tp in (1, 2, 4)]
    assert_same_bits(found[1], found[0], "TP 2")
    assert_same_bits(found[2], found[0], "TP 4")
    exact = stats_and_gradient(
        {name: value.double() if value.is_floating_point() else value for name, value in
         given.items()},
        vocab_size=WIDE["vocab_size"], softcap=20.0,
    )  # fmt: skip
    near = {"rtol": 1e-5, "atol": 1e-5}
    for name in PER_TOKEN:
        torch.testing.assert_close(found[0][name], exact[name].to(found[0][name].dtype), **near)


def test_eight_ranks_and_label_smoothing(ranks: Any) -> None:
    given = inputs(9, NARROW, torch.float32)
    options = {"vocab_size": NARROW["vocab_size"], "invariant_segments": SEGMENTS}
    options |= {"label_smoothing": 0.1}
    alone = joined(on_ranks(ranks, 1, every_way, given, **options))
    assert_same_bits(joined(on_ranks(ranks, 8, stats_and_gradient, given, **options)), alone, "8")


def test_without_the_flag_the_bits_differ(ranks: Any) -> None:
    given = inputs(13, WIDE, torch.float32)
    found = [joined(on_ranks(ranks, tp, stats_and_gradient, given)) for tp in (1, 4)]
    assert not same_bits(found[0]["lse"], found[1]["lse"])
    assert not same_bits(found[0]["entropy"], found[1]["entropy"])
    assert not same_bits(found[0]["grad"], found[1]["grad"])


def test_columns_that_do_not_lie_side_by_side() -> None:
    given = inputs(11, NARROW, torch.float32)
    plain = vocab_parallel_logprobs(given["whole"], given["target"], invariant_segments=4)
    strided = given["whole"].t().contiguous().t()
    assert_same_bits(
        vocab_parallel_logprobs(strided, given["target"], invariant_segments=4), plain, "strided"
    )
    padded = torch.cat([torch.zeros(11, 1), given["whole"]], 1)[:, 1:]
    assert_same_bits(
        vocab_parallel_entropy(padded, invariant_segments=4),
        vocab_parallel_entropy(given["whole"], invariant_segments=4),
        "offset by one number",
    )


def logprobs_refused(segments: Any, width: int) -> int:
    logits = torch.randn(3, width)
    with CollectivesMade() as made, pytest.raises(ValueError, match="invariant_segments: expected"):
        vocab_parallel_logprobs(
            logits, torch.zeros(3).long(), tp_group=world_group(), invariant_segments=segments
        )
    return len(made.made)


@pytest.mark.parametrize(("segments", "width"), [(5, 12), (3, 12), (0, 12), (True, 12), (2.0, 12)])
def test_wrong_segments_are_refused_before_any_collective(
    ranks: Any, segments: Any, width: int
) -> None:
    # 24 columns over 2 ranks: 5 does not divide the columns, 2 does not divide 3.
    assert on_ranks(ranks, 2, logprobs_refused, segments, width) == [0, 0]


def test_the_documented_fold_of_whole_rows_in_plain_torch_gives_the_same_bits(ranks: Any) -> None:
    page = (Path(__file__).parents[1] / "docs" / "invariance.md").read_text()
    space: dict[str, Any] = {}
    exec(page.split("```python\n")[2].split("```")[0], space)
    logits, target = 3 * torch.randn(31, WIDE["vocab"]), torch.randint(WIDE["vocab"], (31,))
    odd = SEGMENTS * 2119  # no divisor of a segment is a block's width: the last one is filled up
    for dtype, z in ((torch.float32, logits), (torch.float32, 3 * torch.randn(31, odd)),
                     (torch.bfloat16, logits)):  # fmt: skip
        z = z.to(dtype)
        folded = space["fold_logprobs"](z, target, SEGMENTS, 0.7)
        sharded = on_ranks(ranks, 2, logprobs_of_shard, z, target)
        assert_same_bits(sharded[0], folded, f"{dtype} {z.shape[1]}")
    softmax = (z.float() * (1 / 0.7)).log_softmax(-1).gather(1, target[:, None])[:, 0]
    assert not same_bits(softmax, folded)
    torch.testing.assert_close(softmax, folded, rtol=1e-6, atol=4e-6)


def logprobs_of_shard(logits: Tensor, target: Tensor) -> Tensor:
    shard = logits.chunk(world_size(), dim=-1)[world_rank()].contiguous()
    return vocab_parallel_logprobs(
        shard, target, temperature=0.7, invariant_segments=SEGMENTS, tp_group=world_group(),
        backend="torch",
    )  # fmt: skip
