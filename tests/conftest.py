"""Fixtures for every test: pools of gloo ranks, poisoned memory, one thread."""

from __future__ import annotations

import atexit
import gc
import logging
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

from mcore_logprobs.cpu_megatron.models import destroy_model_parallel, end_groups
from mcore_logprobs.groups import megatron_parallel_state
from tests.helpers.distributed import (
    SELDOM,
    RankPool,
    _pools,
    get_pool,
    live_groups,
    seed,
)
from tests.helpers.poison import poisoned_memory
from tests.helpers.sizes import put_in_force

# Tests run on the CPU, on a machine with GPUs too: Megatron's models would lie on them there.
if os.environ.get("MCORE_LOGPROBS_TEST_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
put_in_force()
torch.set_num_threads(1)
# pytest puts its handlers on a logger that does not propagate, and where this one has any, torch
# writes down all that it compiles: a fifteenth of the time of tests that compile.
logging.getLogger("torch.__trace").propagate = True
gc.set_threshold(*SELDOM)
atexit.register(gc.unfreeze)  # C++ extensions count what is left at the end
settings.register_profile("repo", derandomize=True, deadline=None, max_examples=25, database=None)
settings.register_profile("nightly", deadline=None, max_examples=2000, database=None)
settings.load_profile("repo")


@pytest.fixture
def ranks() -> Callable[[int], RankPool]:
    """`ranks(world_size)` is the pool of that many gloo ranks (see helpers/distributed.py)."""
    return get_pool


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan() -> Iterator[None]:
    seed()
    with poisoned_memory():
        yield


def _forget_groups() -> None:
    if megatron_parallel_state() is not None:
        destroy_model_parallel()
    if torch.distributed.is_initialized():
        # Device meshes are made once and shared by files.
        end_groups(g for g in live_groups() if not g.group_desc.startswith("mesh"))
    # Models are cycles that hold groups, and a group's threads run for as long as it is held.
    gc.collect()
    gc.freeze()  # nothing of a test is kept, but it may have imported more


def pytest_collection_finish() -> None:
    """What is there now stays, a million objects of modules: `gc.collect` need not walk over it."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _groups_end_with_the_file() -> Iterator[None]:
    """Ranks keep the process groups that a file's tests made, for speed, and not beyond.

    A later file's `group=None` would silently mean Megatron's, and idle groups cost time.
    """
    yield
    for pool in [pool for pool in _pools.values() if pool.used]:
        pool.run(_forget_groups)
        pool.used = False
    _forget_groups()
