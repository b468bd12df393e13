"""What all drop-ins have in common: no mathematics, ranges checked, older calls taken."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from mcore_logprobs.dropin import nemo_rl, roll


def test_they_only_forward() -> None:
    """No mathematics of their own: no log, softmax or matrix product in any drop-in module."""
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


def test_hidden_states_with_and_without_output_weight() -> None:
    """NeMo-RL's call of before 0.7 and of today, by position and by name."""
    function = nemo_rl.from_parallel_hidden_states_to_logprobs
    hidden, weight = torch.randn(4, 2, 6), torch.randn(8, 6)
    target = torch.randint(0, 8, (2, 4))
    place = {"vocab_start_index": 0, "vocab_end_index": 8, "tp_group": None}
    want = (hidden @ weight.T).transpose(0, 1).double().log_softmax(-1)[:, :-1]
    want = want.gather(-1, target[:, 1:, None])[..., 0]
    calls = [
        function(hidden, weight, None, target, 0, 8, None),
        function(hidden, weight, True, target, 0, 8, None, True, None, 2),
        function(hidden, weight, None, target, **place, chunk_size=3),
        function(hidden, weight, runtime_gather_output=None, target=target, **place),
        function(hidden, weight, None, None, target, 0, 8, None),
        function(hidden, None, weight, False, target, 0, 8, None, False, None, 2),
        function(hidden, None, weight, None, target=target, **place),
        function(hidden, None, weight, runtime_gather_output=None, target=target, **place),
        function(
            hidden,
            output_weight_layer=None,
            output_weight=weight,
            runtime_gather_output=None,
            target=target,
            **place,
        ),
    ]
    for got in calls:
        assert (got - want).abs().max() < 1e-5
    with pytest.raises(ValueError, match="expected a tensor in one, got None"):
        function(hidden, None, None, None, target, 0, 8, None)


def test_vocab_utility() -> None:
    utility = roll.VocabUtility
    assert tuple(utility.vocab_range_from_per_partition_vocab_size(10, 2, 4)) == (20, 30)
    assert tuple(utility.vocab_range_from_global_vocab_size(40, 3, 4)) == (30, 40)
    with pytest.raises(ValueError, match="expected a multiple of 4, got 41"):
        utility.vocab_range_from_global_vocab_size(41, 3, 4)
