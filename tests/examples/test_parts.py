"""What is not the step: batches, tasks, converted weights, held-out questions, reports."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rl import optim
from rl.config import (
    GrpoSection,
    OptimizerSection,
    RolloutSection,
    RunConfig,
    SetupError,
    TaskSection,
    llama_config,
    load_config,
)
from rl.data import IGNORE, group_advantages, kept_ids, make_batch, make_task
from rl.evaluate import Evaluation, Evaluator, Questions
from rl.optim import CpuAdamW
from rl.report import Reporter, StepRecord, plot_run, run_steps
from rl.rollout import LetterTokenizer, RolloutEngine, Sample, left_pad, renew_rotary_buffers
from rl.vllm_server import Server
from rl.weights import Sizes, Slot, build_gpt_model, slot_of, to_megatron, to_transformers

from mcore_logprobs.losses import OBJECTIVES
from tests.helpers.documents import ROOT

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


@pytest.mark.parametrize(
    ("max_kept", "kept"), [(3, [None, [1, 0]]), (4, [[2, 0, 1, 3], [1, 0]])], ids=["cut", "whole"]
)
def test_a_record_of_the_whole_vocabulary_is_complete(max_kept, kept) -> None:
    """Of four ids: under `max_kept` of 3 a fourth may be missing, under 4 none can."""
    entries = [{2: -0.5, 0: -1.0, 1: -2.0, 3: -3.0}, {1: -0.1, 0: -2.3, 2: -torch.inf}]
    if max_kept == 3:
        del entries[0][3]
    output = SimpleNamespace(
        token_ids=[0, 1],
        logprobs=[{i: SimpleNamespace(logprob=x) for i, x in row.items()} for row in entries],
    )
    assert Server.answer(output, max_kept, vocab_size=4)["kept"] == kept


def test_hidden_states_need_the_model_runner_that_names_its_requests() -> None:
    """vLLM's second model runner, the default on a GPU, has no batch that names requests."""
    server = Server(conn=None)  # type: ignore[arg-type]
    server.runner = SimpleNamespace(model=SimpleNamespace(compute_logits=None))
    with pytest.raises(RuntimeError, match="set VLLM_USE_V2_MODEL_RUNNER=0"):
        server.record_hidden()


def test_small_steps_of_a_bfloat16_model_add_up(monkeypatch) -> None:
    """100 steps of 1e-4, each far below the last bit of a weight near 1; also after a resume."""
    monkeypatch.setattr(optim, "global_grad_norm", lambda params: 1.0)
    section = OptimizerSection(lr=1e-4)

    def steps(optimizer: CpuAdamW, count: int) -> None:
        for _ in range(count):
            for param in optimizer.params:
                param.main_grad = torch.ones(param.shape)
            optimizer.step()

    def made() -> CpuAdamW:
        layer = torch.nn.Linear(3, 2).bfloat16()
        torch.nn.init.ones_(layer.weight)
        torch.nn.init.ones_(layer.bias)
        return CpuAdamW(section, layer)

    straight, before, after = made(), made(), made()
    steps(straight, 100)
    assert straight.params[0].dtype == torch.bfloat16
    for param in straight.params:
        torch.testing.assert_close(param.float(), torch.full(param.shape, 0.99), atol=2e-3, rtol=0)
    steps(before, 60)
    after.load_state_dict(before.state_dict())
    steps(after, 40)
    assert all(map(torch.equal, after.params, straight.params))


def test_rotary_positions_that_megatron_has_not_are_refused() -> None:
    llama = llama_config(RunConfig().model)
    scaled = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}
    llama.rope_parameters = scaled | {"original_max_position_embeddings": 32}
    with pytest.raises(SetupError, match="expected original_max_position_embeddings 8192, got 32"):
        build_gpt_model(llama, RunConfig(), None)


def test_a_draw_is_another_one_each_step_and_the_same_again_after_a_resume() -> None:
    config = RunConfig(seed=5, grpo=GrpoSection(objective="ClipCovLoss"))
    assert [config.loss(step).loss.seed for step in (0, 1, 7)] == [5, 6, 12]


def test_a_batch_has_every_tensor_that_an_objective_takes() -> None:
    batch = make_batch([_sample([5, 6], [8, 9])], pad=0, multiple=4, device=CPU)
    named = {name for objective in OBJECTIVES.values() for name in objective().tensors}
    assert {"advantages", "old_logprobs"} < named
    assert [name for name in sorted(named) if not hasattr(batch, name)] == []


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


def test_left_padding() -> None:
    ids, mask = left_pad([[7, 8, 9], [7]], 2, CPU)
    assert ids.tolist() == [[7, 8, 9], [2, 2, 7]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_a_model_s_own_penalties_do_not_sample(tmp_path: Path) -> None:
    """What the engine says of its tokens is what a forward of the model says."""
    sizes = load_config(ROOT / "configs" / "tiny-cpu.yaml").model
    made = RolloutEngine.load(sizes, seed=0).model
    made.save_pretrained(tmp_path)
    penalties = {"repetition_penalty": 1.5, "suppress_tokens": [3, 4], "no_repeat_ngram_size": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(penalties))
    loaded = type(made).from_pretrained(tmp_path)
    renew_rotary_buffers(loaded)
    assert loaded.generation_config.repetition_penalty == 1.5
    engine = RolloutEngine(loaded, LetterTokenizer())
    asked = RolloutSection(max_new_tokens=8)
    for sample in engine.generate([[1, 5, 6, 7]], group_size=4, seed=0, rollout=asked):
        tokens, first = torch.tensor([sample.tokens]), sample.prompt_length
        with torch.no_grad():
            logprobs = loaded(tokens).logits.log_softmax(-1)[:, :-1]
        wanted = logprobs.gather(-1, tokens[:, 1:, None])[0, first - 1 :, 0]
        torch.testing.assert_close(torch.tensor(sample.logprobs), wanted, rtol=0, atol=1e-4)


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
    with pytest.raises(
        SetupError, match="echo: prompt_length: expected an int from 1 to 26, got 0"
    ):
        make_task(TaskSection("echo", {"prompt_length": 0}), seed=0)


# ---- weights -------------------------------------------------------------------------------------

HEADS, GROUPS, HEAD_DIM, HIDDEN, FFN, VOCAB = 12, 6, 4, 48, 24, 11
LAYER = "decoder.layers.3."
NAMES = [
    "embedding.word_embeddings.weight",
    LAYER + "input_layernorm.weight",
    LAYER + "self_attention.linear_qkv.layer_norm_weight",
    LAYER + "self_attention.linear_qkv.weight",
    LAYER + "self_attention.linear_proj.weight",
    LAYER + "mlp.linear_fc1.weight",
    LAYER + "mlp.linear_fc2.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
]


def _sizes(tp: int) -> Sizes:
    return Sizes(HEADS, GROUPS, VOCAB, -(-VOCAB // tp) * tp)


def _transformers_tensors(slot: Slot) -> list[torch.Tensor]:
    shapes = {
        "vocab": [(VOCAB, HIDDEN)],
        "qkv": [(HEADS * HEAD_DIM, HIDDEN), *[(GROUPS * HEAD_DIM, HIDDEN)] * 2],
        "row": [(HIDDEN, FFN)],
        "gate_up": [(FFN, HIDDEN)] * 2,
        "replicated": [(HIDDEN,)],
    }
    return [torch.randn(shape) for shape in shapes[slot.kind]]


@pytest.mark.parametrize("name", NAMES)
def test_weights_go_to_shards_and_back(name: str) -> None:
    """That Megatron computes the same with them, the self-check of test_self_check.py finds."""
    slot = slot_of(name, layer_offset=2)
    tensors = _transformers_tensors(slot)
    for tp in (1, 2, 3, 6):
        shards = [to_megatron(slot, tensors, _sizes(tp), rank=r, tp=tp) for r in range(tp)]
        assert len({s.shape for s in shards}) == 1
        back = to_transformers(slot, shards, _sizes(tp))
        for got, want in zip(back, tensors, strict=True):
            assert torch.equal(got, want)


def test_unknown_parameter_is_refused() -> None:
    with pytest.raises(KeyError, match="linear_fc3"):
        slot_of(LAYER + "mlp.linear_fc3.weight", layer_offset=0)


# ---- held-out questions: never trained on, asked again with the same seeds -----------------------


def _questions(eval_questions: int, letters: int = 3) -> Questions:
    options = {"letters": letters, "prompt_length": 3}  # letters ** 3 questions
    section = TaskSection("echo", options, eval_questions=eval_questions)
    return Questions(make_task(section, seed=4), RunConfig(task=section))


def test_training_never_asks_a_held_out_question() -> None:
    questions = _questions(20)
    held_out = [p.question for p in questions.held_out]
    assert len(set(held_out)) == len(held_out) == 20
    asked = {questions.training(i).question for i in range(400)}
    assert asked.isdisjoint(held_out)
    assert len(asked) == 7  # all that are left
    assert [questions.training(i).question for i in range(9)] == [
        _questions(20).training(i).question for i in range(9)
    ]


def test_more_questions_than_the_task_has() -> None:
    with pytest.raises(SetupError, match=r"eval_questions: expected at most 8 .*, got 9"):
        _questions(9, letters=2)
    with pytest.raises(SetupError, match="leave none to train on"):
        _questions(8, letters=2).training(0)


def test_a_gain_is_taken_question_by_question() -> None:
    before, after = Evaluation(0, [0.0, 1.0, 0.0]), Evaluation(9, [0.5, 1.0, 1.0])
    gain = after.against(before)
    assert gain.mean == pytest.approx(0.5)
    assert gain.error == pytest.approx((0.25 / 3) ** 0.5)  # of 0.5, 0 and 1
    assert before.mean == pytest.approx(1 / 3)
    assert before.error == pytest.approx(1 / 3)


def test_when_it_evaluates_and_what_a_resume_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl.evaluate.on_main", lambda fn: fn())
    asked, said = [], []

    class Trainer:
        engine = "engine"
        layout = SimpleNamespace(is_main=True)
        config = SimpleNamespace(task=TaskSection(eval_questions=2, eval_every=2), run_dir=tmp_path)
        say = said.append
        step = 0

        def __init__(self) -> None:
            self.questions = SimpleNamespace(held_out=["p", "q"], answer=self.answer)

        def answer(self, *given: Any) -> list:
            asked.append((str(given[0]), tuple(given[1]), *given[2:]))
            return [SimpleNamespace(reward=0.1 * self.step), SimpleNamespace(reward=0.5)]

    def steps(trainer: Trainer, until: int) -> list[int]:
        evaluator = Evaluator(trainer)
        evaluator.after_step()
        while trainer.step < until:
            trainer.step += 1
            evaluator.after_step()
        evaluator.after_step(last=True)
        lines = (tmp_path / "eval.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [e.step for e in evaluator.done]
        return [e.step for e in evaluator.done]

    assert steps(Trainer(), 3) == [0, 2, 3]
    assert "2 held-out questions: reward 0.350 +- 0.150; against step 0 +0.100 +- 0.100" in said[1]
    resumed = Trainer()
    resumed.step = 2
    assert steps(resumed, 4) == [0, 2, 4]
    assert len(set(asked)) == 1  # the same questions with the same seeds every time


# ---- reports: lines that survive an interruption, and the plot -----------------------------------

LAYOUT = SimpleNamespace(is_main=True)


def _record(step: int) -> StepRecord:
    names = [f.name for f in dataclasses.fields(StepRecord)]
    return StepRecord(**dict.fromkeys(names, 0.5 * step + 0.1) | {"step": step})


def test_resume_drops_later_steps_and_half_a_line(tmp_path: Path) -> None:
    lines = [json.dumps(dataclasses.asdict(_record(step))) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n" + lines[0][:40])
    trainer = SimpleNamespace(step=2, layout=LAYOUT, config=SimpleNamespace(run_dir=tmp_path))
    reporter = Reporter(trainer)
    assert reporter.records == [_record(1), _record(2)]
    kept = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert kept == lines[:2]
    for other in (b'{"step": 1, "foo": 1}', b"{", b"3", b"\xe9"):
        (tmp_path / "metrics.jsonl").write_bytes(lines[0].encode() + b"\n" + other + b"\n")
        with pytest.raises(
            SetupError, match="expected lines that this version of the example wrote"
        ):
            Reporter(trainer)


def test_a_resumed_run_that_has_nothing_to_do_leaves_its_lines(tmp_path: Path) -> None:
    """Those of steps after its checkpoint too, also where it is asked for fewer steps than that."""
    metrics, said = tmp_path / "metrics.jsonl", []
    metrics.write_text("".join(f"{json.dumps({'step': step})}\n" for step in (1, 2, 3)))
    before = metrics.read_bytes()
    config = SimpleNamespace(run_dir=tmp_path, steps=1)
    assert run_steps(SimpleNamespace(step=2, layout=LAYOUT, config=config, say=said.append)) == []
    assert said == ["nothing to do: step 2 of 1 is done"]
    assert metrics.read_bytes() == before


def test_an_interrupted_run_keeps_its_lines_and_its_plot(tmp_path: Path) -> None:
    class Interrupted:
        """One step, then Ctrl-C in the second."""

        layout, step, engine = LAYOUT, 0, SimpleNamespace(name="vLLM")
        config = SimpleNamespace(
            run_dir=tmp_path,
            steps=5,
            save_every=0,
            minutes=0.0,
            name="run",
            task=SimpleNamespace(name="t", eval_questions=0),
            parallel=SimpleNamespace(tp=1, cp=1, pp=1),
        )

        def train_step(self) -> tuple:
            self.step += 1
            if self.step == 2:
                raise KeyboardInterrupt
            sample = SimpleNamespace(reward=1.0, group=0, text="a")
            return _record(self.step), [sample], ["q"]

        def say(self, text: str) -> None:
            said.append(text)

    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_steps(Interrupted())
    assert said[0].startswith("step 1/5   reward 0.600")
    assert "step 1, 0.6 s" in said[1]  # the table of the last step alone
    assert "best answer: 'q' -> 'a'" in said
    steps = [json.loads(x)["step"] for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1]
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_plot_with_held_out_questions(tmp_path: Path) -> None:
    path = tmp_path / "a" / "run.png"
    held_out = [Evaluation(0, [0.0, 0.5]), Evaluation(80, [1.0, 0.5])]
    plot_run([_record(i + 1) for i in range(80)], path, title="a run", held_out=held_out)
    assert path.stat().st_size > 20_000
