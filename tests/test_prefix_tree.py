"""Prefix trees: order, rows, targets and masks against the sequences one by one."""

from __future__ import annotations

import random

import pytest
import torch

from mcore_logprobs import PrefixTree


def branches_of(seed: int) -> list[list[int]]:
    """Sequences over a small alphabet, so that many begin alike; some are others' beginnings."""
    rng = random.Random(seed)
    found: list[list[int]] = []
    for _ in range(rng.randint(1, 7)):
        start = rng.choice(found)[: rng.randint(0, 6)] if found and rng.random() < 0.7 else []
        found.append([*start, *(rng.randint(0, 2) for _ in range(rng.randint(1, 6)))])
    return found


@pytest.mark.parametrize("multiple", [1, 8])
def test_branches(multiple: int) -> None:
    for seed in range(40):
        branches = branches_of(seed)
        tree = PrefixTree.from_branches(branches, multiple=multiple)
        prefixes = {tuple(b[:n]) for b in branches for n in range(1, len(b) + 1)}
        n = tree.tokens.numel()
        assert n % multiple == 0
        assert n - len(prefixes) in range(multiple)
        assert tree.rows.numel() == len(prefixes) - len({p for p in prefixes if len(p) == 1})
        mask = tree.attention_mask()[0, 0]
        assert tree.attention_mask().shape == (1, 1, n, n)
        for branch, path in zip(branches, tree.paths, strict=True):
            assert tree.targets[path].tolist() == branch[1:]
            for depth, row in enumerate(tree.rows[path].tolist()):
                # The row's token attends to the branch so far, in its order, and nothing else.
                seen = (~mask[row]).nonzero()[:, 0]
                assert tree.tokens[seen].tolist() == branch[: depth + 1]
                assert tree.positions[seen].tolist() == list(range(depth + 1))
        for place in range(len(prefixes), n):
            assert (~mask[place]).nonzero()[:, 0].tolist() == [place]
        per_row = torch.arange(tree.rows.numel()) * 10
        shared = tree.branches(per_row)
        assert [x.tolist() for x in shared] == [(path * 10).tolist() for path in tree.paths]
        ones = tree.sum_of_branches([torch.ones(len(b) - 1) for b in branches])
        assert ones.sum() == sum(len(b) - 1 for b in branches)


def test_each_token_has_the_sum_of_its_own_branches() -> None:
    tree = PrefixTree.from_branches([[5, 6, 7], [5, 6, 8, 9]])
    values = [torch.tensor([1.0, 10.0]), torch.tensor([2.0, 20.0, 30.0])]
    assert tree.sum_of_branches(values).tolist() == [3.0, 10.0, 20.0, 30.0]


def test_parents() -> None:
    #     5 - 6 - 7        ids; given out of order
    #          \\ 8 - 9
    tokens = torch.tensor([9, 6, 5, 8, 7])
    parents = torch.tensor([3, 2, -1, 1, 1])
    tree = PrefixTree.from_parents(tokens, parents)
    assert tree.tokens.tolist() == [5, 6, 8, 9, 7]
    assert tree.order.tolist() == [2, 1, 3, 0, 4]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 1]
    assert tree.positions.tolist() == [0, 1, 2, 3, 2]
    assert tree.rows.tolist() == [0, 1, 2, 1]
    assert tree.targets.tolist() == [6, 8, 9, 7]
    assert [tree.targets[path].tolist() for path in tree.paths] == [[6, 8, 9], [6, 7]]
    again = PrefixTree.from_branches([[5, 6, 8, 9], [5, 6, 7]])
    assert torch.equal(again.tokens, tree.tokens)
    assert torch.equal(again.parents, tree.parents)


def test_rows_of_a_tensor_are_branches() -> None:
    branches = [[5, 6, 7], [5, 6, 8]]
    tree, again = (PrefixTree.from_branches(x) for x in (branches, torch.tensor(branches)))
    assert torch.equal(again.tokens, tree.tokens)
    assert torch.equal(again.parents, tree.parents)


def test_mistakes() -> None:
    ids = torch.tensor([1, 2, 3])
    for match, make in (
        ("at least one sequence", lambda: PrefixTree.from_branches([])),
        ("a sequence of sequences of ids, got int", lambda: PrefixTree.from_branches(3)),
        (r"branches\[1\]", lambda: PrefixTree.from_branches([[1], []])),
        (r"branches\[0\]", lambda: PrefixTree.from_branches([torch.ones(2, 2).long()])),
        ("multiple", lambda: PrefixTree.from_branches([[1]], multiple=0)),
        ("a cycle", lambda: PrefixTree.from_parents(ids, torch.tensor([-1, 2, 1]))),
        ("indices in", lambda: PrefixTree.from_parents(ids, torch.tensor([-1, 3, 1]))),
        ("indices in", lambda: PrefixTree.from_parents(ids, torch.tensor([-1, -2, 1]))),
        ("tokens' shape", lambda: PrefixTree.from_parents(ids, torch.tensor([-1]))),
        ("integers", lambda: PrefixTree.from_parents(ids.float(), ids)),
        ("tokens: .* torch.bool", lambda: PrefixTree.from_parents(ids > 1, ids - 2)),
        ("per_row", lambda: PrefixTree.from_branches([[1, 2]]).branches(torch.ones(3))),
        ("per_row: .* got list", lambda: PrefixTree.from_branches([[1, 2]]).branches([1.0])),
        (
            r"branches\[0\]: expected integer ids.* got 'ab'",
            lambda: PrefixTree.from_branches(["ab"]),
        ),
        (r"branches\[0\]: .* torch.bool", lambda: PrefixTree.from_branches([[True, False]])),
        (
            "values\\[0\\]: .* got list",
            lambda: PrefixTree.from_branches([[1, 2]]).sum_of_branches([[1.0]]),
        ),
        (
            "values\\[1\\]: .* got torch.float64",
            lambda: PrefixTree.from_branches([[1, 2]] * 2).sum_of_branches(
                [torch.ones(1), torch.ones(1).double()]
            ),
        ),
        ("lengths", lambda: PrefixTree.from_branches([[1, 2]]).sum_of_branches([torch.ones(3)])),
    ):
        with pytest.raises(ValueError, match=match):
            make()


def test_many_branches_are_summed_in_float32() -> None:
    tree = PrefixTree.from_branches([[1, 2]] * 1000)
    for dtype in (torch.bfloat16, torch.float64, torch.int64):
        total = tree.sum_of_branches([torch.ones(1, dtype=dtype)] * 1000)
        assert total.dtype is dtype
        assert total.tolist() == [1000]
    for dtype in (torch.uint8, torch.int32, torch.bool):
        total = tree.sum_of_branches([torch.ones(1, dtype=dtype)] * 1000)
        assert (total.dtype, total.tolist()) == (torch.int64, [1000])


def test_padding_is_no_token_of_the_caller_s() -> None:
    tree = PrefixTree.from_parents(torch.tensor([5, 6, 7]), torch.tensor([-1, 0, 0]), multiple=4)
    assert tree.order.tolist() == [0, 1, 2, -1]
    assert tree.tokens.tolist() == [5, 6, 7, 0]
    assert tree.parents.tolist() == [-1, 0, 0, -1]
    assert tree.positions.tolist() == [0, 1, 1, 0]


def test_a_single_token() -> None:
    tree = PrefixTree.from_parents(torch.tensor([5]), torch.tensor([-1]))
    assert tree.tokens.tolist() == [5]
    assert tree.rows.numel() == tree.targets.numel() == 0
    assert [path.tolist() for path in tree.paths] == [[]]


def test_several_numbers_a_row() -> None:
    tree = PrefixTree.from_branches([[5, 6, 7], [5, 8]])
    per_row = torch.arange(9).view(3, 3)
    assert [x.tolist() for x in tree.branches(per_row)] == [
        [[0, 1, 2], [3, 4, 5]],
        [[6, 7, 8]],
    ]


def test_branches_may_be_changed_in_place() -> None:
    tree = PrefixTree.from_branches([[5, 6, 7], [5, 6, 8, 9]])
    x = torch.randn(tree.rows.numel(), requires_grad=True)
    first, second = tree.branches(x * 1.0)
    first.mul_(2.0)
    (grad,) = torch.autograd.grad(first.sum() + second.sum(), x)
    assert grad.sum() == 2 * 2 + 3
