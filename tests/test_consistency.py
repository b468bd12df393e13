"""Ranks whose first calls differ raise, all of them."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mcore_logprobs as ml
from mcore_logprobs import collectives, consistency, losses
from mcore_logprobs.bench.counting import CollectivesMade
from mcore_logprobs.ops.all_to_all import all_to_all_sp2vp, all_to_all_vp2sp
from tests.helpers.lazy import lazy_logits

ROWS, HIDDEN = 4, 3


def scaled(logprobs: torch.Tensor, entropy: object, by: float) -> torch.Tensor:
    return by * logprobs


def call(operation: str, width: int, **changes: Any) -> Any:
    """One of the public operations on a shard of `width` columns; the same values on every rank."""
    torch.manual_seed(1)
    rows = changes.pop("rows", ROWS)
    logits, weight = torch.randn(rows, width), torch.randn(width, HIDDEN)
    logits = logits.to(changes.pop("dtype", logits.dtype))
    target = changes.pop("target", torch.arange(rows) * 5)
    hidden = changes.pop("hidden", torch.randn(ROWS, HIDDEN))
    lora = (torch.ones(2, HIDDEN), torch.ones(width, 2), 1.0)
    learns = changes.pop("learns", "")
    for name, tensor in (("logits", logits), ("hidden", hidden), ("weight", weight)):
        if name in learns:
            tensor.requires_grad_()
    if "A" in learns:
        changes["lora"] = lora
        lora[0].requires_grad_(learns == "A that learns")
    common = {"tp_group": dist.group.WORLD} | changes
    ids = target.unsqueeze(-1)
    calls = {
        "logprobs": lambda: ml.vocab_parallel_logprobs(logits, target, **common),
        "entropy": lambda: ml.vocab_parallel_entropy(logits, **common),
        "target_rank": lambda: ml.vocab_parallel_target_rank(logits, target, **common),
        "token_stats": lambda: ml.vocab_parallel_token_stats(
            logits, target, entropy=True, target_rank=True, **common
        ),
        "log_softmax": lambda: ml.vocab_parallel_log_softmax(logits, **common),
        "topk": lambda: ml.vocab_parallel_topk(logits, 3, **common),
        "gather": lambda: ml.vocab_parallel_gather(logits, ids, **common),
        "sampling": lambda: ml.vocab_parallel_sampling_logprobs(
            logits, target, top_k=3, top_p=0.9, **common
        ),
        "kl_div": lambda: ml.vocab_parallel_kl_div(logits, logits, **common),
        "linear_token_stats": lambda: ml.linear_token_stats(hidden, weight, target, **common),
        "linear_topk": lambda: ml.linear_topk(hidden, weight, 3, **common),
        "lazy_logprobs": lambda: ml.vocab_parallel_logprobs(
            lazy_logits(hidden, weight, tp_group=dist.group.WORLD), target, **common
        ),
        "linear_policy_loss": lambda: ml.linear_policy_loss(
            hidden, weight, target, common.pop("loss_fn", lambda x, _: x), **common
        ),
        "reshard": lambda: ml.reshard_vocabulary(
            weight, dim=0, source_group=dist.group.WORLD, **common
        ),
        "vp2sp": lambda: all_to_all_vp2sp(logits, **common),
        "sp2vp": lambda: all_to_all_sp2vp(logits.repeat(1, 2), **common),
    }
    return calls[operation]()


OPERATIONS = (
    *("logprobs", "entropy", "target_rank", "token_stats", "log_softmax", "topk", "gather"),
    *("sampling", "kl_div", "linear_token_stats", "linear_policy_loss", "reshard"),
    *("vp2sp", "sp2vp"),
)


def refusal(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Why the call is refused, or nothing."""
    try:
        fn(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return ""


message = partial(refusal, call)
checking = mock.patch.dict(os.environ, {consistency.VARIABLE: "1"})


def uneven(operation: str) -> tuple[str, str]:
    """Ranks of 12 and 13 columns; then, on the same group, an even call."""
    consistency._agreed.clear()
    found = message(operation, 12 + dist.get_rank())
    return found, message(operation, 12)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_uneven_shards_raise_on_every_rank(ranks, operation):
    for found, after in ranks(2).run(uneven, operation, timeout=60):
        assert "12 on rank 0, 13 on rank 1" in found
        assert after == ""


def alone_with_a_new_width(next_width: int) -> tuple[str, str]:
    """One rank's width changes; the other makes no call, so that nothing is left to wait for.

    Returns what is raised, and what is left in the store after the next call.
    """
    consistency._agreed.clear()
    assert message("logprobs", 12) == ""
    found = ""
    if dist.get_rank() == 1:
        consistency._PATIENCE["cpu"] = 0.5
        found = message("logprobs", 13)
        consistency._PATIENCE["cpu"] = 30.0
    dist.barrier()
    # What it withdrew is in nobody's way.
    assert message("logprobs", next_width) == ""
    dist.barrier()
    return found, collectives._reason_left(dist.group.WORLD)


@pytest.mark.parametrize("next_width", [14, 12], ids=["an agreement", "a width agreed before"])
def test_a_width_that_is_new_on_one_rank_raises_there(ranks, next_width):
    none, (found, left) = ranks(2).run(alone_with_a_new_width, next_width, timeout=60)
    assert none == ("", "")
    assert found.startswith("vocab_parallel_logprobs: expected the same call on every rank")
    assert "the first one with 13 columns on rank 1, and none within 0.5 s on every" in found
    assert left == ""


def uneven_with_targets_that_one_rank_refuses() -> str:
    consistency._agreed.clear()
    return message("logprobs", 12 + dist.get_rank(), target=torch.full((ROWS,), 25))


def test_local_errors_that_follow_from_the_width_come_after_it(ranks):
    for found in ranks(2).run(uneven_with_targets_that_one_rank_refuses, timeout=60):
        assert "12 on rank 0, 13 on rank 1" in found


def raises_while_another_still_compares(late: int) -> str:
    """A first call on which ranks agree; then one raises before the late rank has gone on."""
    assert message("logprobs", 12) == ""  # what an earlier test has left is taken back
    dist.barrier()
    consistency._agreed.clear()
    compare = consistency._compare

    def compare_late(*posted: Any) -> None:
        compare(*posted)
        time.sleep(1.0)

    is_late = dist.get_rank() == late
    with mock.patch.object(consistency, "_compare", compare_late if is_late else compare):
        try:
            with consistency.comparing("an operation", dict):
                consistency.check_call(12, dist.group.WORLD, torch.device("cpu"))
                if not is_late:
                    raise ValueError("its own")
        except ValueError:
            pass
    dist.barrier()
    left = collectives._reason_left(dist.group.WORLD)
    dist.barrier()
    assert message("logprobs", 12) == ""
    dist.barrier()
    assert collectives._reason_left(dist.group.WORLD) == ""
    return left


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_agrees_late_leaves_the_reason_of_one_that_raised_since(ranks, late):
    reason = f"an operation on rank {1 - late}: its own"
    assert ranks(2).run(raises_while_another_still_compares, late) == [reason] * 2


def after_a_reason_of_an_earlier_group() -> str:
    """Its store is the new group's too, where a launcher keeps one; no rank knows of the reason."""
    consistency._agreed.clear()
    if dist.get_rank() == 0:
        collectives.leave_reason(dist.group.WORLD, "of an earlier group")
    dist.barrier()
    assert message("logprobs", 12) == ""
    dist.barrier()
    return collectives._reason_left(dist.group.WORLD)


def test_a_reason_of_an_earlier_group_is_forgotten(ranks):
    assert ranks(2).run(after_a_reason_of_an_earlier_group) == ["", ""]


def recomputes() -> tuple[str, int]:
    """What a checkpoint leaves, and the store's uses, where it stops recomputing within a call."""
    group = dist.group.WORLD
    x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
    mask, loss = torch.ones(3, 8), losses.M2POLoss()

    def forward(x: Tensor) -> Tensor:
        logprobs = ml.vocab_parallel_logprobs(x, torch.zeros(3, dtype=torch.int64), tp_group=group)
        return logprobs.sum() + (2.0 * x).sum()

    def second_pass(x: Tensor) -> Tensor:
        total = x.square().sum()
        loss.second_pass(x, x.detach(), x.detach(), mask, group=group)
        return total

    for function in (forward, second_pass):
        checkpoint(function, x, use_reentrant=False).backward()
    with mock.patch.object(collectives, "group_store", wraps=collectives.group_store) as asked:
        for function in (forward, second_pass):
            checkpoint(function, x, use_reentrant=False).backward()
    return collectives._reason_left(group), asked.call_count


def test_a_checkpoint_that_stops_within_an_operation_is_no_error(ranks):
    assert ranks(2).run(recomputes) == [("", 0)] * 2


def of_a_fake_backend() -> tuple[bool, str]:
    """Its other ranks do not exist, and its store may know no functions."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    group = dist.new_group(backend="fake")
    return collectives.group_store(group) is None, message("logprobs", 12, tp_group=group)


def test_with_a_fake_backend_nothing_is_compared(ranks):
    assert ranks(2).run(of_a_fake_backend, timeout=20) == [(True, "")] * 2


def no_cost() -> tuple[list[str], int]:
    consistency._agreed.clear()
    told = mock.patch.object(consistency, "group_store", wraps=consistency.group_store)
    with CollectivesMade() as made, told as written:
        for _ in range(3):
            call("logprobs", 17)
    return made.names, written.call_count


def test_even_shards_cost_no_collective(ranks):
    """And the store is asked for a new width only."""
    assert ranks(2).run(no_cost) == [(["all_gather"] * 3, 1)] * 2


# ---- the first call's values ----


def parts_of_a_sequence(operation: str, sequence_parallel: bool) -> str:
    """Each rank's own tokens, with its own targets or with those of the whole sequence."""
    consistency._agreed.clear()
    rank, size = dist.get_rank(), dist.get_world_size()
    hidden = torch.randn(size, ROWS, HIDDEN, generator=torch.Generator().manual_seed(2))[rank]
    if sequence_parallel:
        changes = {"target": torch.arange(size * ROWS), "sequence_parallel": True}
    else:
        changes = {"target": torch.arange(ROWS) + rank}
    with _NoCollective() if not sequence_parallel else contextlib.nullcontext():
        return message(operation, 12, hidden=hidden, **changes)


class _NoCollective(CollectivesMade):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.namespace != "c10d", f"{func} before the ranks had compared their calls"
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("operation", ["linear_token_stats", "linear_policy_loss", "linear_topk"])
def test_forgotten_sequence_parallelism_raises_on_every_rank(ranks, operation):
    for found in ranks(3).run(parts_of_a_sequence, operation, False, timeout=60):
        assert found.startswith("hidden: expected the same hidden states on every rank of the TP")
        assert "pass sequence_parallel=True" in found
    assert ranks(3).run(parts_of_a_sequence, operation, True, timeout=60) == [""] * 3


def uneven_parts_of_a_sequence() -> str:
    consistency._agreed.clear()
    with _NoCollective():
        hidden = torch.randn(ROWS + dist.get_rank(), HIDDEN)
        return message("linear_topk", 12, hidden=hidden, sequence_parallel=True)


def test_uneven_parts_of_a_sequence_raise_on_every_rank(ranks):
    for found in ranks(2).run(uneven_parts_of_a_sequence, timeout=60):
        assert found.startswith("hidden: expected the same on every rank of the TP group, got (4, ")


def first_calls(operation: str, per_rank: dict[str, list[Any]], value: str = "") -> str:
    consistency._agreed.clear()
    changes = {name: values[dist.get_rank()] for name, values in per_rank.items()}
    with mock.patch.dict(os.environ, {consistency.VARIABLE: value}):
        return message(operation, 12, **changes)


def default_on_rank_0() -> str:
    consistency._agreed.clear()
    given = {} if dist.get_rank() == 0 else {"temperature": 1.0, "softcap": None}
    first = message("logprobs", 12, **given)
    with checking:
        return first or message("logprobs", 12, **given)


def test_other_targets_on_a_rank_raise_on_every_rank(ranks):
    targets = {"target": [torch.tensor([0, 5, 10, 15]), torch.tensor([0, 5, 10, 14])]}
    for found in ranks(2).run(first_calls, "logprobs", targets, timeout=60):
        assert found.startswith("target: expected the same on every rank of the TP group, got (4,)")
        assert "[0, 5, 10, 14] hash" in found
    for found in ranks(2).run(first_calls, "gather", {"rows": [4, 0]}, timeout=60):
        assert found.startswith("ids: expected the same on every rank of the TP group, got (4, 1)")
    assert ranks(2).run(first_calls, "logprobs", targets, "0", timeout=60) == ["", ""]


@pytest.mark.parametrize(
    ("operation", "per_rank", "expected"),
    [
        ("logprobs", {"temperature": [1.0, 0.7]}, "temperature: {} 1.0 on rank 0, 0.7 on rank 1"),
        ("token_stats", {"vocab_size": [None, 20]}, "vocab_size: {} None on rank 0, 20 on rank 1"),
        ("logprobs", {"softcap": [None, 30.0]}, "softcap: {} None on rank 0, 30.0 on rank 1"),
        ("logprobs", {"logit_bias": [{3: 1.0}, {3: 1.5}]}, "logit_bias.3: {} 1.0 on rank 0, 1.5 "),
        ("logprobs", {"disallowed_ids": [[3], [4]]}, "disallowed_ids: {} [3] on rank 0, [4] on "),
        ("linear_topk", {"sequence_parallel": [False, True]}, "sequence_parallel: {} False on "),
        ("linear_topk", {"logits_dtype": [torch.float32, torch.bfloat16]}, "logits_dtype: {} "),
        ("linear_topk", {"softcap": [None, 0.0]}, "softcap: {} None on rank 0, 0.0 on rank 1"),
        ("linear_topk", {"saved_bytes": [0, -1], "chunk_size": [None, 0]}, "chunk_size: {} None "),
        ("linear_topk", {"bias": [None, torch.ones(12)]}, "bias: {} None on rank 0, a tensor on "),
        ("linear_topk", {"lora": [None, (1, 2, 3)]}, "lora: {} None on rank 0, several values on "),
        ("logprobs", {"temperature": [1.0, torch.ones(4)]}, "temperature: {} 1.0 on rank 0, a "),
        ("logprobs", {"temperature": [torch.ones(4), 2 * torch.ones(4)]}, "temperature: {} (4,) "),
        (
            "logprobs",
            {"dtype": [torch.float32, torch.float64]},
            "vocab_parallel_logits: {} sums in float32 on rank 0, sums in float64 on rank 1",
        ),
    ],
)
def test_other_options_on_a_rank_raise_on_every_rank(ranks, operation, per_rank, expected):
    expected = expected.format("expected the same on every rank of the TP group, got")
    for found in ranks(2).run(first_calls, operation, per_rank, timeout=60):
        assert found.startswith(expected)


@pytest.mark.parametrize("operation", ["entropy", "log_softmax", "kl_div", "topk", "vp2sp"])
def test_other_numbers_of_tokens_on_a_rank_raise_on_every_rank(ranks, operation):
    """Also without targets that would say how many there are."""
    for found in ranks(2).run(first_calls, operation, {"rows": [4, 0]}, timeout=60):
        said = (
            "logits: expected the same on every rank of the TP group, got [4, V/TP] on rank 0, [0"
        )
        assert said in found


@pytest.mark.parametrize(
    ("operation", "learns", "name"),
    [
        ("linear_token_stats", ["", "hidden"], "hidden"),
        ("linear_policy_loss", ["", "hidden"], "hidden"),
        ("linear_topk", ["a fixed A", "A that learns"], "lora[0]"),
        ("lazy_logprobs", ["", "hidden"], "hidden"),
        ("vp2sp", ["", "logits"], "x"),
        ("sp2vp", ["", "logits"], "x"),
    ],
)
def test_a_gradient_that_is_wanted_on_one_rank_raises_on_every_rank(ranks, operation, learns, name):
    """Its collective in the backward would wait for the others'."""
    expected = (
        "expected the same on every rank of the TP group, got False on rank 0, True on rank 1"
    )
    for found in ranks(2).run(first_calls, operation, {"learns": learns}, timeout=20):
        assert found == f"{name}.requires_grad: {expected}"


def a_gradient_that_no_call_asks_for() -> str:
    consistency._agreed.clear()
    with torch.no_grad():
        return message("linear_topk", 12, learns="hidden" if dist.get_rank() else "")


def test_what_may_differ_of_what_requires_a_gradient(ranks):
    """The weight's gradient is each rank's own, and without grad mode there is none."""
    weights = {"learns": ["", "weight"]}
    assert ranks(2).run(first_calls, "linear_topk", weights, timeout=20) == ["", ""]
    assert ranks(2).run(a_gradient_that_no_call_asks_for, timeout=20) == ["", ""]


def a_patched_model_that_learns_on_one_rank() -> str:
    from mcore_logprobs.megatron import patch_gpt_model
    from tests.megatron.common import VOCAB, make_batch, megatron, mm, tiny_config

    with megatron(tp=2) as parallel_state:
        model = mm.build_gpt_model(tiny_config(2), vocab_size=VOCAB)
        model.requires_grad_(dist.get_rank() == 1)
        batch = make_batch(parallel_state)
        with patch_gpt_model(model):
            return refusal(model, **batch["inputs"], labels=batch["labels"])


def test_a_patched_model_that_learns_on_one_rank_raises_on_every_rank(ranks):
    for found in ranks(2).run(a_patched_model_that_learns_on_one_rank, timeout=60):
        assert found.startswith("hidden.requires_grad: expected the same on every rank of the TP")


def test_what_is_sent_as_it_is_has_one_dtype(ranks):
    dtypes = {"dtype": [torch.float32, torch.bfloat16]}
    for found in ranks(2).run(first_calls, "vp2sp", dtypes, timeout=60):
        assert found.startswith("dtype: expected the same on every rank of the TP group, got ")


def test_what_concerns_one_rank_alone_may_differ(ranks):
    for operation, per_rank in (
        ("linear_token_stats", {"saved_bytes": [0, 1 << 20]}),
        ("logprobs", {"backend": ["auto", "torch"]}),
        ("logprobs", {"dtype": [torch.float32, torch.bfloat16]}),
    ):
        assert ranks(2).run(first_calls, operation, per_rank, timeout=60) == ["", ""]


def one_of_a_column() -> str:
    consistency._agreed.clear()
    ids = torch.arange(30).view(3, 10)
    return message("logprobs", 12, rows=1, target=ids[:1, 4])


def test_one_target_with_a_stride_is_compared(ranks):
    assert ranks(2).run(one_of_a_column, timeout=60) == ["", ""]


def test_a_default_and_the_same_given_are_alike(ranks):
    assert ranks(2).run(default_on_rank_0, timeout=60) == ["", ""]


def test_hidden_states_may_differ_by_rounding(ranks):
    hidden = torch.randn(ROWS, HIDDEN)
    rounded = {"hidden": [hidden, hidden.bfloat16().float()]}
    assert ranks(2).run(first_calls, "linear_token_stats", rounded) == ["", ""]
    nan = {"hidden": [hidden, hidden.masked_fill(hidden == hidden[0, 0], torch.nan)]}
    assert ranks(2).run(first_calls, "linear_token_stats", nan) == ["", ""]
    large = {"hidden": [100.0 * each for each in rounded["hidden"]]}
    assert ranks(2).run(first_calls, "linear_token_stats", large) == ["", ""]
    nothing = {"hidden": [torch.zeros(ROWS, HIDDEN)] * 2}
    assert ranks(2).run(first_calls, "linear_token_stats", nothing) == ["", ""]


def test_hidden_states_that_differ_on_one_rank_raise_on_every_rank(ranks):
    one, rows = torch.randn(ROWS, HIDDEN), torch.randn(ROWS + 1, HIDDEN)
    for other in (one + 0.5 * one.flip(0, 1), rows):
        for found in ranks(2).run(first_calls, "linear_topk", {"hidden": [one, other]}, timeout=20):
            assert found.startswith("hidden: expected the same hidden states on every rank")


def patched_models_with_other_labels() -> list[str]:
    """What a first call says, and then of each block its own first call."""
    from mcore_logprobs.megatron import patch_gpt_model
    from tests.megatron.common import VOCAB, make_batch, megatron, mm, tiny_config

    with megatron(tp=2) as parallel_state:
        model = mm.build_gpt_model(tiny_config(2, sequence_parallel=True), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        with patch_gpt_model(model) as handle:
            inputs, labels = batch["inputs"], batch["labels"]
            others = labels + dist.get_rank()
            found = [refusal(model, **inputs, labels=others)]
            model(**inputs, labels=labels)
            for block in (handle.policy_loss(lambda p, e: -p), handle.also(topk=2)):
                with block:
                    found.append(refusal(model, **inputs, labels=others))
            return found


def test_a_patched_model_s_labels_are_compared(ranks):
    expected = "labels: expected the same on every rank of the TP group, got (2,"
    for found in ranks(2).run(patched_models_with_other_labels, timeout=120):
        assert len(found) == 3
        assert all(said.startswith(expected) for said in found), found


def settings_in_a_patch() -> None:
    rank, group, cpu = dist.get_rank(), dist.group.WORLD, torch.device("cpu")
    own = ml.LogprobConfig(saved_bytes=1000 * rank, backend=("torch", "auto")[rank])
    with consistency.comparing("a patched model, once", lambda: {"config": own}):
        consistency.check_call(8, group, cpu)
    other = ml.LogprobConfig(temperature=1.0 + rank)
    with (
        consistency.comparing("a patched model, twice", lambda: {"config": other}),
        pytest.raises(ValueError, match="temperature"),
    ):
        consistency.check_call(8, group, cpu)


def test_settings_of_a_patch_that_may_differ_and_that_may_not(ranks):
    ranks(2).run(settings_in_a_patch)


def heads_of_two_dtypes() -> None:
    consistency._agreed.clear()
    rank = dist.get_rank()
    dtype = (torch.float32, torch.bfloat16)[rank]
    hidden, weight = torch.randn(4, 8).to(dtype), torch.randn(12, 8).to(dtype).chunk(2)[rank]
    with pytest.raises(ValueError, match="weight"):
        ml.linear_token_stats(hidden, weight, torch.arange(4), tp_group=dist.group.WORLD)


def test_heads_of_two_dtypes_are_refused(ranks):
    ranks(2).run(heads_of_two_dtypes)
