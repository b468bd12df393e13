"""What `group=None` means, where groups come from, and who owns which columns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import megatron.core  # noqa: F401  (the ranks' fork server imports it once for all of them)
import pytest
import torch
import torch.distributed as dist

from mcore_logprobs import ParallelGroups, VocabShard, vocab_parallel_logprobs
from mcore_logprobs.groups import group_rank, group_size, resolve_cp_group, resolve_tp_group
from tests.helpers.distributed import grid_groups

RESOLVERS = (resolve_tp_group, resolve_cp_group)


def _members(group: Any) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


# ---- group=None ---------------------------------------------------------------------------------


@pytest.mark.parametrize("resolve", RESOLVERS)
def test_none_is_one_process_where_nothing_is_initialised(resolve):
    assert not dist.is_initialized()
    assert resolve(None) is None
    assert group_size(None) == 1
    assert group_rank(None) == 0


def _resolve_none() -> list[Any]:
    found: list[Any] = []
    for resolve in RESOLVERS:
        try:
            found.append(_members(resolve(None)))
        except ValueError as error:
            found.append(str(error))
    return found


def test_none_is_one_process_where_torch_has_one_rank(ranks):
    assert ranks(1).run(_resolve_none) == [[None, None]]


def test_none_under_several_ranks_is_refused(ranks):
    for tp, cp in ranks(2).run(_resolve_none):
        for name, message in (("tp_group", tp), ("cp_group", cp)):
            assert f"{name}=None" in message
            assert "2 ranks" in message
            assert "pass" in message


def _megatron_grid(tp: int, cp: int) -> tuple:
    from megatron.core import parallel_state

    # Imported is not initialized: several ranks are still refused, one is still one.
    before = _resolve_none()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, context_parallel_size=cp
    )
    try:
        found = ParallelGroups.from_megatron()
        expected = (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_context_parallel_group(),
        )
        assert (found.tp, found.cp) == expected
        during = _resolve_none()
        assert during == [_members(found.tp), _members(found.cp)]
        sizes = (group_size(resolve_tp_group(None)), group_size(resolve_cp_group(None)))
        # A group that is given wins over Megatron's.
        assert resolve_tp_group(dist.group.WORLD) is dist.group.WORLD
    finally:
        parallel_state.destroy_model_parallel()
    return before, sizes, _resolve_none()


@pytest.mark.parametrize(("tp", "cp"), [(4, 1), (2, 2), (1, 4), (2, 1)])
def test_none_is_megatrons_group_while_its_state_is_initialised(ranks, tp, cp):
    for before, sizes, after in ranks(4).run(_megatron_grid, tp, cp):
        assert sizes == (tp, cp)
        for refused in (*before, *after):
            assert "4 ranks" in refused


def _from_megatron_uninitialised() -> str:
    import megatron.core.parallel_state  # noqa: F401

    with pytest.raises(ValueError, match="not initialized") as caught:
        ParallelGroups.from_megatron()
    return str(caught.value)


def test_from_megatron_says_what_is_missing(ranks):
    (message,) = ranks(1).run(_from_megatron_uninitialised)
    assert "initialize_model_parallel" in message


@pytest.mark.parametrize("resolve", RESOLVERS)
@pytest.mark.parametrize("wrong", ["tp", 2, object(), torch.ones(2)], ids=type)
def test_what_is_no_group_is_refused(resolve, wrong):
    with pytest.raises(ValueError, match=r"(tp|cp)_group: expected a .*ProcessGroup, got"):
        resolve(wrong)


def _outsider() -> list[str]:
    group = dist.new_group([0])
    messages = []
    for resolve in RESOLVERS:
        try:
            assert resolve(group) is group
            assert group_size(group) == 1
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_a_group_that_leaves_this_process_out_is_refused(ranks):
    inside, *outside = ranks(3).run(_outsider)
    assert inside == []
    for rank, messages in enumerate(outside, start=1):
        assert messages == [
            f"tp_group: this process (rank {rank}) is not in the group",
            f"cp_group: this process (rank {rank}) is not in the group",
        ]


# ---- from a model, from a mesh ------------------------------------------------------------------


def _from_models() -> None:
    mine = grid_groups(tp=2, cp=2)
    collection = SimpleNamespace(tp=mine.tp, cp=mine.cp)
    models = {
        "pg_collection": SimpleNamespace(pg_collection=collection),
        "its older name": SimpleNamespace(model_comm_pgs=collection),
        "attributes": SimpleNamespace(tp_group=mine.tp, cp_group=mine.cp),
        "half and half": SimpleNamespace(
            pg_collection=SimpleNamespace(tp=mine.tp), cp_group=mine.cp
        ),
    }
    for model in list(models.values()):
        wrapped = SimpleNamespace(module=SimpleNamespace(module=model))
        models[f"wrapped {id(model)}"] = wrapped
    for name, model in models.items():
        found = ParallelGroups.from_model(model)
        assert (found.tp, found.cp) == (mine.tp, mine.cp), name
    outer = SimpleNamespace(tp_group=mine.tp, module=SimpleNamespace(cp_group=mine.cp))
    found = ParallelGroups.from_model(outer)
    assert (found.tp, found.cp) == (mine.tp, mine.cp)
    with pytest.raises(ValueError, match=r"carries no cp group, and .* not initialized"):
        ParallelGroups.from_model(SimpleNamespace(tp_group=mine.tp))
    with pytest.raises(ValueError, match="not initialized"):
        ParallelGroups.from_model(SimpleNamespace())
    with pytest.raises(ValueError, match="not initialized"):
        ParallelGroups.from_model(torch.nn.Linear(2, 2))


def test_from_model(ranks):
    ranks(4).run(_from_models)


def _from_real_model() -> None:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, context_parallel_size=2)
    try:
        bare = ParallelGroups.from_model(torch.nn.Linear(2, 2))
        assert bare == ParallelGroups.from_megatron()
        own = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        model = torch.nn.Module()
        model.pg_collection = own
        found = ParallelGroups.from_model(torch.nn.Sequential(model)[0])
        assert (found.tp, found.cp) == (own.tp, own.cp)
        # Megatron's collections may lack one: the rest comes from its global groups.
        half = torch.nn.Module()
        half.pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp"])
        assert ParallelGroups.from_model(half) == bare
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        wrapper = SimpleNamespace(tp_group=alone, module=torch.nn.Linear(2, 2))
        assert ParallelGroups.from_model(wrapper) == ParallelGroups(alone, bare.cp)
    finally:
        parallel_state.destroy_model_parallel()


def test_from_model_with_megatrons_own_collections(ranks):
    ranks(4).run(_from_real_model)


def _from_mesh() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    found = ParallelGroups.from_device_mesh(mesh)
    rank = dist.get_rank()
    assert _members(found.tp) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert _members(found.cp) == [rank % 2, rank % 2 + 2]
    only = ParallelGroups.from_device_mesh(mesh["tp"])
    assert (only.tp, only.cp) == (found.tp, None)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "model"))
    with pytest.raises(ValueError, match=r"'tp'.*'cp'.*dp"):
        ParallelGroups.from_device_mesh(other)
    named = ParallelGroups.from_device_mesh(other, tp="model")
    assert _members(named.tp) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert named.cp is None
    with pytest.raises(ValueError, match="expected a dimension named"):
        ParallelGroups.from_device_mesh(init_device_mesh("cpu", (4,)))


def test_from_device_mesh(ranks):
    ranks(4).run(_from_mesh)


# ---- shards -------------------------------------------------------------------------------------


def _shard(width: int, vocab_size: int | None) -> tuple:
    shard = VocabShard.of(width, dist.group.WORLD, vocab_size)
    return (
        shard.rank,
        shard.tp_size,
        shard.start,
        shard.end,
        shard.padded_size,
        shard.vocab_size,
        shard.valid_width,
    )


@pytest.mark.parametrize(
    ("vocab_size", "valid"),
    [(None, [8, 8, 8]), (24, [8, 8, 8]), (17, [8, 8, 1]), (16, [8, 8, 0]), (1, [1, 0, 0])],
)
def test_shards_tile_the_padded_vocabulary(ranks, vocab_size, valid):
    for rank, shard in enumerate(ranks(3).run(_shard, 8, vocab_size)):
        assert shard == (rank, 3, 8 * rank, 8 * rank + 8, 24, vocab_size or 24, valid[rank])


# ---- mistakes of one group ----------------------------------------------------------------------


def _different_batches() -> None:
    """TP pairs with batches of their own: only one pair is wrong, and the other must go on."""
    groups = grid_groups(tp=2, cp=2)
    bad = groups.cp.rank() == 1
    target = torch.full((4, 3), 24 if bad else 0)
    vocab_parallel_logprobs(torch.zeros(4, 3, 12), target, tp_group=groups.tp)


def test_the_wrong_group_fails_alone(ranks):
    results = ranks(4).run_expecting_errors(_different_batches)
    assert results[:2] == [None, None]
    for error in results[2:]:
        assert isinstance(error, ValueError)


def test_a_backend_that_cannot_be_had_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"triton.*CUDA"):
        vocab_parallel_logprobs(torch.zeros(2, 4), torch.zeros(2).long(), backend="triton")
