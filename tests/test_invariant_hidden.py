"""`invariant_segments`: the same bits at any TP, any chunk, in any company of rows, from hidden.

What `doctor` says of it stands at the end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs import linear_policy_loss, linear_token_stats
from mcore_logprobs.debug import doctor, invariance
from mcore_logprobs.kernels import budgets
from mcore_logprobs.kernels.inductor import INVARIANT
from mcore_logprobs.kernels.products import product
from mcore_logprobs.kernels.stats import merge
from mcore_logprobs.ops import row_statistics
from mcore_logprobs.sources import head_operands as fused_head
from mcore_logprobs.sources.head_gradients import HeadGradient
from tests.helpers.invariance import assert_same_bits, same_bits
from tests.helpers.shards import on_ranks, world_group, world_rank, world_size
from tests.ops import EVERY_STATISTIC, PER_TOKEN

SEGMENTS = 4
# A segment of two product blocks, the second narrow and odd; the vocabulary ends in the third.
WIDE = {"vocab": SEGMENTS * (4096 + 71), "vocab_size": 3 * (4096 + 71) - 30, "hidden": 33}
NARROW = {"vocab": SEGMENTS * 70, "vocab_size": SEGMENTS * 70 - 9, "hidden": 24}


def inputs(rows: int, sizes: dict[str, int], dtype: torch.dtype) -> dict[str, Tensor]:
    target = torch.randint(0, sizes["vocab_size"], (rows,))
    target[rows // 2] = -100
    return {
        "hidden": torch.randn(rows, sizes["hidden"]).to(dtype),
        "weight": (torch.randn(sizes["vocab"], sizes["hidden"]) / sizes["hidden"] ** 0.5).to(dtype),
        "bias": torch.randn(sizes["vocab"]).to(dtype),
        "target": target,
        "temperature": 0.5 + torch.rand(rows),
        "upstream": torch.randn(len(PER_TOKEN) - 1, rows),
    }


def stats_and_gradients(
    given: dict[str, Tensor], *, gradients: bool = True, policy: bool = False, **options: Any
) -> dict[str, Tensor]:
    """This rank's statistics, dHidden, and its part of dWeight and dBias.

    By eager torch: with a bias nothing is compiled.
    """
    width = given["weight"].shape[0] // world_size()
    own = slice(world_rank() * width, (world_rank() + 1) * width)
    hidden = given["hidden"]
    if options.get("sequence_parallel"):
        hidden = hidden.chunk(world_size())[world_rank()]
    leaves = [
        x.clone().requires_grad_(gradients)
        for x in (hidden, given["weight"][own], given["bias"][own])
    ]
    options |= {"temperature": given["temperature"], "bias": leaves[2], "tp_group": world_group()}
    options |= EVERY_STATISTIC
    if policy:
        loss, stats = linear_policy_loss(
            *leaves[:2], given["target"], lambda logp, h, g: logp * g + h, given["upstream"][0],
            **options,
        )  # fmt: skip
    else:
        stats = linear_token_stats(*leaves[:2], given["target"], **options)
    found = {name: getattr(stats, name) for name in PER_TOKEN}
    if gradients:
        roots = [value for name, value in found.items() if name != "target_rank"]
        upstream = list(given["upstream"])
        if policy:
            roots, upstream, found = [loss], [torch.tensor(0.5)], found | {"loss": loss}
        made = torch.autograd.grad(roots, leaves, upstream)
        found |= dict(zip(("dhidden", "dweight", "dbias"), made, strict=True))
    return {name: value.detach() for name, value in found.items()}


def chosen(given: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    per_row = {name: given[name][rows] for name in ("hidden", "target", "temperature")}
    return given | per_row | {"upstream": given["upstream"][:, rows]}


def joined(runs: list[dict[str, Tensor]], *, scattered: bool = False) -> dict[str, Tensor]:
    split = ("dweight", "dbias", *(("dhidden",) if scattered else ()))
    for run in runs[1:]:
        for name in run.keys() - set(split):
            assert_same_bits(run[name], runs[0][name], f"ranks: {name}")
    return {
        name: torch.cat([run[name] for run in runs]) if name in split else value
        for name, value in runs[0].items()
    }


def only_values(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: found[name] for name in PER_TOKEN}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_the_same_bits_at_any_tensor_parallel_size(
    ranks: Any, dtype: torch.dtype
) -> None:
    given = inputs(12, WIDE, dtype)
    options = {"vocab_size": WIDE["vocab_size"], "invariant_segments": SEGMENTS}
    unusual = {"softcap": 5.0, "logit_scale": 0.7, "label_smoothing": 0.1}
    for extra in ({}, {"chunk_size": 8}, unusual):
        found = [
            joined(on_ranks(ranks, tp, stats_and_gradients, given, **options, **extra))
            for tp in (1, 2, 4)
        ]
        assert_same_bits(found[1], found[0], f"TP 2, {extra}")
        assert_same_bits(found[2], found[0], f"TP 4, {extra}")
    split = joined(
        on_ranks(ranks, 2, stats_and_gradients, given, sequence_parallel=True, **options),
        scattered=True,
    )
    assert_same_bits(split, joined([stats_and_gradients(given, **options)]), "sequence parallel")


def test_policy_loss_is_the_same_bits_at_any_tensor_parallel_size(ranks: Any) -> None:
    given = inputs(9, WIDE, torch.float32)
    options = {"vocab_size": WIDE["vocab_size"], "invariant_segments": SEGMENTS, "policy": True}
    found = [joined(on_ranks(ranks, tp, stats_and_gradients, given, **options)) for tp in (1, 2)]
    assert_same_bits(found[1], found[0], "TP 2")
    stats = stats_and_gradients(given, **options | {"policy": False})
    assert_same_bits(only_values(found[0]), only_values(stats), "linear_token_stats")


def test_without_the_flag_the_bits_differ(ranks: Any) -> None:
    given = inputs(29, WIDE, torch.float32)
    found = [joined(on_ranks(ranks, tp, stats_and_gradients, given)) for tp in (1, 2)]
    for name in ("lse", "entropy", "dhidden"):
        assert not same_bits(found[0][name], found[1][name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_and_order_of_rows(dtype: torch.dtype) -> None:
    given = inputs(200, NARROW, dtype)
    options = {"vocab_size": NARROW["vocab_size"], "invariant_segments": SEGMENTS}
    whole = stats_and_gradients(given, gradients=False, **options)
    orders = [torch.arange(count) for count in range(1, 200, 7)]
    orders += [torch.randperm(200), torch.randperm(200)[:131]]
    for some in orders:
        again = stats_and_gradients(chosen(given, some), gradients=False, **options)
        assert_same_bits(again, {n: value[some] for n, value in whole.items()}, f"{len(some)} rows")


def test_compiled_kernels_give_the_same_bits_for_any_chunk_and_rows() -> None:
    given = inputs(40, {"vocab": SEGMENTS * 1030, "vocab_size": 3900, "hidden": 24}, torch.float32)

    def found(rows: Tensor, chunk_size: int | None = None) -> dict[str, Tensor]:
        stats = linear_token_stats(
            given["hidden"][rows], given["weight"], given["target"][rows],
            temperature=given["temperature"][rows], vocab_size=3900, backend="inductor",
            invariant_segments=SEGMENTS, chunk_size=chunk_size, **EVERY_STATISTIC,
        )  # fmt: skip
        return {name: getattr(stats, name) for name in PER_TOKEN}

    every = torch.arange(40)
    whole = found(every)
    for chunk_size in (1, 7):
        assert_same_bits(found(every, chunk_size), whole, f"chunk_size {chunk_size}")
    for some in (torch.arange(1), torch.arange(17), torch.randperm(40)):
        assert_same_bits(found(some), {n: v[some] for n, v in whole.items()}, f"{len(some)} rows")


def test_wrong_segments_are_refused() -> None:
    hidden, weight = torch.randn(2, 4), torch.randn(9, 4)
    for segments in (2, 0):
        with pytest.raises(ValueError, match="invariant_segments: expected"):
            linear_token_stats(hidden, weight, torch.tensor([0, 1]), invariant_segments=segments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("columns", [5, 8, 9, 11, 47, 101])
@pytest.mark.parametrize("hidden_size", [7, 33, 66, 577])
def test_any_place_among_the_rows_at_odd_sizes(
    hidden_size: int, columns: int, dtype: torch.dtype
) -> None:
    """Few columns a segment, and an inner dimension that is no whole vector."""
    rows, order = 24, torch.randperm(24)
    hidden, vocab = torch.randn(rows, hidden_size).to(dtype), 6 * columns
    weight, target = torch.randn(vocab, hidden_size).to(dtype), torch.randint(vocab, (rows,))
    options: dict[str, Any] = {"invariant_segments": 6, "backend": "torch", **EVERY_STATISTIC}

    def statistics(places: Tensor, **more: Any) -> dict[str, Tensor]:
        stats = linear_token_stats(hidden[places], weight, target[places], **options, **more)
        return {name: getattr(stats, name) for name in PER_TOKEN}

    expected = statistics(torch.arange(rows))
    for name, found in statistics(order).items():
        assert torch.equal(found, expected[name][order]), name
    for name, found in statistics(torch.arange(rows), chunk_size=5).items():
        assert torch.equal(found, expected[name]), name


# ---- doctor --------------------------------------------------------------------------------------


def found() -> dict[str, bool]:
    return {g.name: g.holds for g in invariance.find_guarantees()}


def test_every_guarantee_holds_here() -> None:
    guarantees = found()
    assert len(guarantees) == 18
    assert set(guarantees.values()) == {True}


def test_what_the_guarantees_of_a_head_run_is_what_a_call_runs(monkeypatch) -> None:
    """Bits of the backend that `invariant_segments` takes: broken, they are found."""
    stats = INVARIANT.stats

    def noisy(chunk, *args, **options):
        values = stats(chunk, *args, **options)
        return values + 1e-3 * torch.rand_like(values)

    monkeypatch.setattr(INVARIANT, "stats", noisy)
    hidden, weight = torch.randn(15, 40), torch.randn(8 * 2048, 40)
    found = dict([next(invariance._hidden_checks(hidden, weight, torch.arange(15)))])
    assert found == {"forward across TP": False}


def test_a_head_of_another_size() -> None:
    """The checks ask for no size of their own: a GPU's are those of a real model's head."""
    # Logits of the size that a head's have: the checks take exp of them, and powers of that.
    hidden, weight = torch.randn(15, 96), torch.randn(8 * 2048, 96) * 96**-0.5
    found = dict(invariance._hidden_checks(hidden, weight, torch.arange(15) * 1000))
    assert len(found) == 5
    assert set(found.values()) == {True}


def test_products_of_another_shape_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_head, "batch_invariant_matmul", lambda a, b, out: product(a, b, out))
    broken = {name for name, holds in found().items() if not holds}
    assert "hidden float32 forward across rows" in broken
    assert not any(name.startswith("logits") for name in broken)


def test_sums_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(stats, spec, *, multiplier=1.0, ordered=False):
        flipped = stats.flip(0) if stats.shape[-1] % 2 else stats
        return merge(flipped, spec, multiplier=multiplier, ordered=ordered)

    monkeypatch.setattr(row_statistics, "merge", backwards)
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


def in_tiles(given: Any, **options: Any) -> Any:
    """Of a policy loss that holds eight rows at a time."""
    held = 4 * NARROW["vocab"] * 8
    few = replace(budgets.CPU, held_bytes=held, held_rows=1, max_held_bytes=held, row_step=1)
    with budgets.use(few):
        return stats_and_gradients(given, **options)


def test_a_policy_loss_in_several_tiles_is_the_same_bits_at_any_tensor_parallel_size(
    ranks: Any,
) -> None:
    given = inputs(29, NARROW, torch.float32)
    options = {"vocab_size": NARROW["vocab_size"], "invariant_segments": SEGMENTS, "policy": True}
    found = [joined(on_ranks(ranks, tp, in_tiles, given, **options)) for tp in (1, 2)]
    assert_same_bits(found[1], found[0], "TP 2")
