"""What users see when something goes wrong; the table of docs/troubleshooting.md, row by row.

Every row ends on all ranks within 60 s: with an error, or with a NaN where there is one.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from mcore_logprobs import (
    LogprobConfig,
    TokenStats,
    consistency,
    linear_policy_loss,
    linear_token_stats,
    patch_model,
    unpatch_model,
    vocab_parallel_logprobs,
)
from mcore_logprobs.cpu_megatron import models as mm
from tests.helpers.distributed import RankError, get_pool
from tests.megatron.common import VOCAB, make_batch, megatron, relative, step, tiny_config, worst

DEADLINE = 60.0
ROWS, WIDTH, HIDDEN = 6, 8, 4


def shard() -> dict[str, Any]:
    """The same hidden states on every rank, and a weight of its own."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, HIDDEN), torch.randn(2 * WIDTH, HIDDEN)
    weight = weight[: 2 * WIDTH].tensor_split(dist.get_world_size())[dist.get_rank()]
    return {
        "hidden": hidden.requires_grad_(),
        "weight": weight.clone().requires_grad_(),
        "target": torch.randint(0, WIDTH, (ROWS,)),
        "tp_group": dist.group.WORLD,
    }


def errors_of(fn: Any, *args: Any) -> list[BaseException | None]:
    """Each rank's error, within the deadline; the pool is started anew."""
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        get_pool(2).run(fn, *args, timeout=DEADLINE)
    assert time.monotonic() - started < DEADLINE
    get_pool(2).close()
    return caught.value.errors


# ---- a rank is lost ----------------------------------------------------------------------------


def bad_on_one_rank(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    if dist.get_rank() == 1:
        raise KeyError("advantages")
    return -logprobs


def raises_and_ends(how: str) -> None:
    call = shard()
    linear_token_stats(**call)
    try:
        if how == "dies" and dist.get_rank() == 1:
            os._exit(1)
        if how == "raises between its collectives":
            call["loss_fn"] = bad_on_one_rank
            loss, _ = linear_policy_loss(**call, chunk_size=2)
            loss.backward()
        elif how.startswith("changes its width"):
            consistency._PATIENCE["cpu"] = 0.5
            if dist.get_rank() == 1:
                call["weight"] = torch.zeros(WIDTH + 1, HIDDEN)
            if how.endswith("sequence parallel"):
                call |= {"hidden": call["hidden"][: ROWS // 2], "sequence_parallel": True}
            linear_token_stats(**call)
        elif how == "refuses its arguments":
            linear_token_stats(**call, temperature=1.0 - dist.get_rank())
        else:
            linear_token_stats(**call)
    except (KeyError, ValueError):
        if dist.get_rank() == 0:
            raise
        os._exit(1)  # what an error does to a script


def test_a_rank_that_dies_is_seen_by_the_others():
    survivor, lost = errors_of(raises_and_ends, "dies")
    assert isinstance(survivor, RuntimeError)
    assert "Connection" in str(survivor) or "peer" in str(survivor), survivor
    assert str(lost) == "the process died"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raises between its collectives", "linear_policy_loss on rank 1: KeyError: 'advantages'"),
        ("refuses its arguments", "linear_token_stats on rank 1: temperature: expected a finite"),
    ],
)
def test_the_others_are_told_why_a_rank_ended(how, reason):
    survivor, lost = errors_of(raises_and_ends, how)
    assert isinstance(survivor, ValueError)
    assert str(survivor).startswith(f"another rank stopped: {reason}")
    assert str(lost) == "the process died"


@pytest.mark.parametrize("how", ["changes its width", "changes its width, sequence parallel"])
def test_a_width_that_changes_on_one_rank_is_named_on_the_others(how):
    survivor, _ = errors_of(raises_and_ends, how)
    assert isinstance(survivor, ValueError)
    assert "another rank stopped: linear_token_stats: expected the same call" in str(survivor)
    assert "got the first one with 9 columns on rank 1" in str(survivor)


# ---- NaN ---------------------------------------------------------------------------------------


def nan_in_hidden(masked: bool) -> list[Tensor]:
    call = shard()
    with torch.no_grad():
        call["hidden"][2, 1] = torch.nan
    stats = linear_token_stats(**call, entropy=True)
    weight = torch.ones(ROWS)
    if masked:
        weight[2] = 0.0
    stats.logprobs.backward(weight)
    return [stats.logprobs, stats.entropy, call["hidden"].grad, call["weight"].grad]


def test_nan_in_hidden_states_is_seen_in_its_row_on_every_rank(ranks):
    bad = torch.arange(ROWS) == 2
    for logprobs, entropy, on_hidden, on_weight in ranks(2).run(nan_in_hidden, False):
        assert torch.equal(logprobs.isnan(), bad)
        assert torch.equal(entropy.isnan(), bad)
        assert torch.equal(on_hidden.isnan().all(-1), bad)
        assert torch.equal(on_hidden.isfinite().all(-1), ~bad)
        assert on_weight.isnan().any()  # a step with it would be seen
    for logprobs, _, on_hidden, _ in ranks(2).run(nan_in_hidden, True):
        assert torch.equal(logprobs.isnan(), bad)
        assert torch.equal(on_hidden[2], torch.zeros(HIDDEN))


# ---- patches -----------------------------------------------------------------------------------


def attributes(model: Any) -> list[list[str]]:
    return [list(vars(model)), list(vars(model.output_layer))]


def patches_in_any_order() -> None:
    with megatron() as parallel_state:
        model, other = (mm.build_gpt_model(tiny_config(), vocab_size=VOCAB) for _ in range(2))
        batch = make_batch(parallel_state)
        inputs, labels = batch["inputs"], batch["labels"]
        before = attributes(model)

        # A patch under a patch: the same settings share it, others are refused and change nothing.
        outer = patch_model(model, LogprobConfig(entropy=True))
        expected = model(**inputs, labels=labels)
        with pytest.raises(
            ValueError, match=r"patched already: expected entropy=True, .*, got entropy=False"
        ):
            patch_model(model, LogprobConfig(target_rank=True))
        inner = patch_model(model, LogprobConfig(entropy=True))
        assert torch.equal(model(**inputs, labels=labels).logprobs, expected.logprobs)

        # The outer one goes first.
        outer.remove()
        assert attributes(model) == before
        inner.remove()
        unpatch_model(model)
        assert attributes(model) == before

        # Two models, each with its own settings; one is undone in the middle.
        first, second = patch_model(model), patch_model(other, LogprobConfig(output="loss"))
        assert isinstance(model(**inputs, labels=labels), TokenStats)
        assert isinstance(other(**inputs, labels=labels), Tensor)
        first.remove()
        with second.options(output="stats", entropy=True):
            assert other(**inputs, labels=labels).entropy is not None
        assert attributes(model) == before
        second.remove()


def test_patches_in_any_order(ranks):
    ranks(1).run(patches_in_any_order, timeout=DEADLINE)


def in_threads() -> list[float]:
    """Two patched models, a forward and a backward of each, one after the other and at once."""
    with megatron() as parallel_state:
        models = [mm.build_gpt_model(tiny_config(), vocab_size=VOCAB) for _ in range(2)]
        batches = [make_batch(parallel_state, seed=seed) for seed in range(2)]
        for model, temperature in zip(models, (0.7, 1.3), strict=True):
            patch_model(model, LogprobConfig(entropy=True, temperature=temperature))
        wanted = [step(model, batch) for model, batch in zip(models, batches, strict=True)]
        found: dict[int, Any] = {}

        def work(place: int) -> None:
            found[place] = step(models[place], batches[place])

        threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
        return [
            max(relative(found[i][0].logprobs, stats.logprobs), worst(found[i][1], grads))
            for i, (stats, grads) in enumerate(wanted)
        ]


def test_threads(ranks):
    ((one, other),) = ranks(1).run(in_threads, timeout=DEADLINE)
    assert max(one, other) < 1e-6


# ---- forked data loaders -----------------------------------------------------------------------


class Scored(torch.utils.data.Dataset):
    """Each item is scored in the loader's process."""

    def __init__(self, logits: Tensor, target: Tensor) -> None:
        self.logits, self.target = logits, target

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, place: int) -> Tensor:
        return vocab_parallel_logprobs(self.logits[place], self.target[place])


def test_forked_data_loaders():
    logits, target = torch.randn(4, 3, WIDTH), torch.randint(0, WIDTH, (4, 3))
    leaf = logits.clone().requires_grad_()
    expected = vocab_parallel_logprobs(leaf, target)
    expected.sum().backward()  # autograd has run before the fork
    loader = DataLoader(
        Scored(logits, target), num_workers=2, multiprocessing_context="fork", timeout=DEADLINE
    )
    assert torch.equal(torch.cat(list(loader)), expected.detach())
