"""Batches, advantages and tasks of the example."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from rl.config import SetupError, TaskSection
from rl.data import IGNORE, group_advantages, kept_ids, make_batch, make_task, micro_batches
from rl.rollout import LetterTokenizer, Sample, left_pad

CPU = torch.device("cpu")


def _sample(prompt: list[int], answer: list[int], group: int = 0, reward: float = 0.0) -> Sample:
    logprobs = [-0.1 * (i + 1) for i in range(len(answer))]
    return Sample(prompt + answer, len(prompt), logprobs, group, reward=reward)


def test_labels_are_the_next_tokens_of_the_answer() -> None:
    samples = [_sample([5, 6, 7], [8, 9]), _sample([5], [6])]
    samples[0].advantage = 2.0
    batch = make_batch(samples, pad=0, multiple=4, device=CPU)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0], [5, 6, 0, 0, 0, 0, 0, 0]]
    off = IGNORE
    assert batch.labels.tolist() == [[off, off, 8, 9, *[off] * 4], [6, *[off] * 7]]
    torch.testing.assert_close(batch.rollout_logprobs[0, 2:4], torch.tensor([-0.1, -0.2]))
    assert batch.advantages[0].tolist() == [0, 0, 2, 2, 0, 0, 0, 0]
    assert batch.mask.sum() == 3


def test_all_tokens_labels_the_prompt_too() -> None:
    batch = make_batch([_sample([5, 6, 7], [])], pad=0, multiple=2, device=CPU, all_tokens=True)
    assert batch.labels.tolist() == [[6, 7, IGNORE, IGNORE]]


def test_kept_ids_follow_their_tokens() -> None:
    """Also through a CP split: row i of the flat target kept ids[offsets[i]:offsets[i + 1]]."""
    samples = [_sample([5, 6], [8, 9]), _sample([5], [7, 4, 3])]
    samples[0].kept = [[8, 1, 2], None]
    samples[1].kept = [[7], [4, 0], [3, 5, 6, 9]]
    batch = make_batch(samples, pad=0, multiple=4, device=CPU)
    ids, offsets = kept_ids(batch.kept_ids)
    found = [ids[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    assert found == [[], [8, 1, 2], [], [], [7], [4, 0], [3, 5, 6, 9], []]
    part = batch.map(lambda t: t[1:, 1:3])
    assert kept_ids(part.kept_ids)[0].tolist() == [4, 0, 3, 5, 6, 9]


def test_advantages_are_relative_to_the_group() -> None:
    rewards = [(0, 1.0), (0, 0.0), (1, 5.0), (1, 5.0)]
    samples = [_sample([5], [6], group, reward) for group, reward in rewards]
    group_advantages(samples, normalise_std=True)
    assert [s.advantage for s in samples] == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-3)
    group_advantages(samples, normalise_std=False)
    assert [s.advantage for s in samples] == [0.5, -0.5, 0.0, 0.0]
    alike = [_sample([5], [6], 0, 0.1) for _ in range(3)]  # whose mean is 0.10000000000000002
    group_advantages(alike, normalise_std=True)
    assert [s.advantage for s in alike] == [0.0] * 3


def test_micro_batches_cover_the_rows_of_a_data_parallel_rank() -> None:
    samples = [_sample([5], [10 + i]) for i in range(8)]
    batch = make_batch(samples, pad=0, multiple=2, device=CPU)
    layout = SimpleNamespace(dp=2, dp_rank=1, cp_group=None)
    parts = list(micro_batches(batch, size=2, layout=layout))
    assert torch.cat([m.tokens for m, _ in parts]).tolist() == batch.tokens[4:].tolist()
    assert [positions.tolist() for _, positions in parts] == [[[0, 1], [0, 1]]] * 2


def test_left_padding() -> None:
    ids, mask = left_pad([[7, 8, 9], [7]], 2, CPU)
    assert ids.tolist() == [[7, 8, 9], [2, 2, 7]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_echo_task() -> None:
    task = make_task(TaskSection(name="echo"), seed=3)
    problem = task.problem(5)
    assert problem == make_task(TaskSection(name="echo"), seed=3).problem(5)
    assert len({task.problem(i).question for i in range(20)}) > 15
    first = problem.question[0]
    assert task.score(problem, first * 4) == 1.0
    assert task.score(problem, first * 2 + "??" + first) == 0.5
    with pytest.raises(SetupError, match="unknown option colours"):
        make_task(TaskSection(name="echo", options={"colours": 3}), seed=0)


def test_letter_tokenizer() -> None:
    tokenizer = LetterTokenizer()
    assert tokenizer.encode_prompt("abh", []) == [1, 3, 4, 10]
    assert tokenizer.decode([3, 10, 2, 0]) == "ah??"


def test_reasoning_gym_task_scores_with_its_own_scorer() -> None:
    options = {"min_words": 1, "max_words": 1}
    task = make_task(TaskSection("letter_counting", options, examples=2), seed=0)
    problem = task.problem(4)
    right = problem.entry["answer"]
    assert task.score(problem, f" {right}\n") == 1.0
    assert 0 < task.score(problem, f"It is {right}, I think") < 1
    assert task.score(problem, "none") == 0.0
    assert len(task.shots) == 2
    assert problem.question not in dict(task.shots)


def test_unknown_task_and_option() -> None:
    with pytest.raises(SetupError, match="no_such_task"):
        make_task(TaskSection("no_such_task"), seed=0)
    with pytest.raises(SetupError, match="letter_counting"):
        make_task(TaskSection("letter_counting", {"colour": 1}), seed=0)
