"""Names, argument names, their order and their defaults, as users of NeMo-RL and ROLL know them."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch

from mcore_logprobs.dropin import nemo_rl, roll

FUNCTIONS = """
DistributedLogprob(vocab_parallel_logits, target, vocab_start_index, vocab_end_index, group, inference_only=False)
ChunkedDistributedLogprob(vocab_parallel_logits, target, vocab_start_index, vocab_end_index, chunk_size, tp_group, inference_only=False)
DistributedCrossEntropy(student_logits, target_logits, group, inference_only=False)
DistributedLogprobWithSampling(vocab_parallel_logits, target, tp_group, top_k, top_p, inference_only=False)
ChunkedDistributedLogprobWithSampling(vocab_parallel_logits, target, tp_group, top_k, top_p, chunk_size, inference_only=False)
ChunkedDistributedGatherLogprob(vocab_parallel_logits, global_indices, vocab_start_index, vocab_end_index, chunk_size, tp_group, inference_only=False)
ChunkedDistributedEntropy(vocab_parallel_logits, chunk_size, tp_group, inference_only=False)
ChunkedDistributedHiddenStatesToLogprobs(tensor_parallel_hidden_states, target, output_weight_layer, vocab_start_index, vocab_end_index, chunk_size, tp_group, inference_only=False)
AllGatherCPTensor(tensor, cp_group, seq_dim=1)
_compute_distributed_log_softmax(vocab_parallel_logits, group)
_compute_distributed_softmax(vocab_parallel_logits, group)
dtensor_from_parallel_logits_to_logprobs(vocab_parallel_logits, target, vocab_start_index, vocab_end_index, tp_group, inference_only=False, seq_index=None, chunk_size=None, sampling_params=None)
from_parallel_logits_to_logprobs(vocab_parallel_logits, target, vocab_start_index, vocab_end_index, tp_group, inference_only=False, cp_group=None, chunk_size=None, sampling_params=None)
from_parallel_logits_to_logprobs_packed_sequences(vocab_parallel_logits, target, cu_seqlens_padded, unpacked_seqlen, vocab_start_index, vocab_end_index, group, inference_only=False, cp_group=None, chunk_size=None, sampling_params=None, target_is_pre_rolled=False)
_get_tokens_on_this_cp_rank(input_ids, cp_rank, cp_size, seq_dim=1)
allgather_cp_sharded_tensor(tensor, cp_group, seq_dim=1)
get_logprobs_from_vocab_parallel_logits(vocab_parallel_logits, input_ids, seq_index=None, chunk_size=None, sampling_params=None)
get_next_token_logprobs_from_logits(input_ids, next_token_logits, seq_index=None, vocab_parallel_rank=None, vocab_parallel_group=None, context_parallel_group=None, sampling_params=None)
distributed_vocab_topk(vocab_parallel_logits, k, tp_group, *, vocab_start_index, vocab_end_index, chunk_size=None)
gather_logits_at_global_indices(vocab_parallel_logits, global_indices, tp_group=None, cp_group=None, *, vocab_start_index, vocab_end_index, chunk_size=None)
get_distillation_topk_logprobs_from_logits(student_logits, teacher_topk_logits, teacher_topk_indices, zero_outside_topk, calculate_entropy, vocab_parallel_rank=None, vocab_parallel_group=None, context_parallel_group=None)
from_parallel_hidden_states_to_logprobs(tensor_parallel_hidden_states, output_weight_layer, output_weight, runtime_gather_output, target, vocab_start_index, vocab_end_index, tp_group, inference_only=False, cp_group=None, chunk_size=None)
patch_gpt_model_forward_for_linear_ce_fusion(*, chunk_size)
_gpt_forward_with_linear_ce_fusion(self, input_ids, position_ids, attention_mask, decoder_input=None, labels=None, inference_context=None, packed_seq_params=None, extra_block_kwargs=None, runtime_gather_output=None, *, inference_params=None, loss_mask=None, padding_mask=None, return_logprobs_for_linear_ce_fusion=False)
all_to_all_vp2sq(vocab_parallel_logits, tp_group)
all_to_all_sq2vp(seq_parallel_logits, tp_group)
group_all_reduce_sum(x, group)
group_all_reduce_sum_with_grad(x, group)
cp_load_balanced_to_contiguous(x, *, cp_group=None, seq_dim=1)
cp_shift_next(x, cp_group=None, *, fill)
vocab_parallel_log_softmax(logits, temperature, *, tp_group=None)
vocab_parallel_full_log_softmax(logits, temperature, *, tp_group=None)
vocab_parallel_gather_columns(logits, column_indices, *, tp_group=None)
vocab_parallel_argmax(logits, *, tp_group=None)
"""  # noqa: E501
ROLL = """
vocab_parallel_logprobs(vocab_parallel_logits, target)
vocab_parallel_target_rank(vocab_parallel_logits, target)
vocab_parallel_entropy(vocab_parallel_logits)
context_parallel_gather(x, parallel_dim=-1)
VocabUtility.vocab_range_from_per_partition_vocab_size(per_partition_vocab_size, rank, world_size)
VocabUtility.vocab_range_from_global_vocab_size(global_vocab_size, rank, world_size)
"""


def rows(table: str) -> list[tuple[str, str]]:
    split = [line.partition("(") for line in table.strip().splitlines()]
    return [(name, bracket + rest) for name, bracket, rest in split]


def spelled(function: object) -> str:
    """The signature without annotations."""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(inspect.Signature(bare))


@pytest.mark.parametrize(("name", "expected"), rows(FUNCTIONS), ids=lambda value: value[:40])
def test_nemo_rl(name: str, expected: str) -> None:
    found = getattr(nemo_rl, name)
    if inspect.isclass(found):
        assert spelled(found.apply) == expected
        assert spelled(found.forward) == expected.replace("(", "(ctx, ", 1)
    else:
        assert spelled(found) == expected
    assert name in nemo_rl.__all__
    assert found.__doc__


@pytest.mark.parametrize(("name", "expected"), rows(ROLL), ids=lambda value: value[:40])
def test_roll(name: str, expected: str) -> None:
    owner, _, method = name.partition(".")
    found = getattr(roll, owner)
    if method:
        found = getattr(found, method)
    assert spelled(found) == expected
    assert owner in roll.__all__


def test_every_published_name_is_there() -> None:
    named = {name for name, _ in rows(FUNCTIONS)}
    assert set(nemo_rl.__all__) - named == {"unpatch_gpt_model_forward_for_linear_ce_fusion"}


def test_they_only_forward() -> None:
    """No mathematics of their own: no exp, log, softmax or matrix product in any drop-in module."""
    banned = {"log", "logsumexp", "softmax", "log_softmax", "matmul", "mm", "bmm", "einsum"}
    for path in Path(nemo_rl.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in banned, f"{path.name}:{node.lineno} {node.attr}"
            if isinstance(node, ast.BinOp):
                assert not isinstance(node.op, ast.MatMult), f"{path.name}:{node.lineno}"


def test_a_range_that_is_not_this_ranks_raises() -> None:
    logits, target = torch.randn(1, 3, 8), torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"expected \(0, 8\) for rank 0 of 1 .* got \(8, 16\)"):
        nemo_rl.DistributedLogprob.apply(logits, target, 8, 16, None)
    with pytest.raises(ValueError, match=r"expected \(0, 8\) for rank 0 of 1 .* got \(0, 7\)"):
        nemo_rl.from_parallel_logits_to_logprobs(logits, target, 0, 7, None)


def test_vocab_utility() -> None:
    utility = roll.VocabUtility
    assert tuple(utility.vocab_range_from_per_partition_vocab_size(10, 2, 4)) == (20, 30)
    assert tuple(utility.vocab_range_from_global_vocab_size(40, 3, 4)) == (30, 40)
    with pytest.raises(ValueError, match="expected a multiple of 4, got 41"):
        utility.vocab_range_from_global_vocab_size(41, 3, 4)
