"""Fixtures for every test: pools of gloo ranks, poisoned memory, one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

from mcore_logprobs.groups import megatron_parallel_state
from mcore_logprobs.testing.distributed import RankPool, _pools, get_pool
from mcore_logprobs.testing.poison import poisoned_memory

torch.set_num_threads(1)
settings.register_profile("repo", derandomize=True, deadline=None, max_examples=25, database=None)
settings.load_profile("repo")


@pytest.fixture
def ranks() -> Callable[[int], RankPool]:
    """`ranks(world_size)` is the pool of that many gloo ranks (see testing/distributed.py)."""
    return get_pool


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan() -> Iterator[None]:
    torch.manual_seed(0)
    with poisoned_memory():
        yield


def _forget_megatron() -> None:
    state = megatron_parallel_state()
    if state is not None:
        state.destroy_model_parallel()


@pytest.fixture(autouse=True, scope="module")
def _megatron_groups_end_with_the_file() -> Iterator[None]:
    """Ranks keep Megatron's groups between the tests of a file, for speed, and not beyond.

    A later file's `group=None` would silently mean them.
    """
    yield
    for pool in list(_pools.values()):
        pool.run(_forget_megatron)
    _forget_megatron()
