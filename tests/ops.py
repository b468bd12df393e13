"""Every operation once: its public calls, the truth, its options, and what makes it refuse.

A row of `OPERATIONS` is all that `tests/engine` knows of an operation. Its truth, in
`engine/truths.py`, is plain torch: outputs by name, of the processed logits `z` `[..., V]` of the
whole vocabulary (float64, and float32 as the yardstick), `side` (the other arguments) and options.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import mcore_logprobs as ml
from mcore_logprobs.ops import sampling_cut
from tests.engine.mistakes import BAD_RECORDS
from tests.engine.operation import SEGMENTS, VOCAB, Draw, Side, Subject
from tests.engine.truths import (
    answered,
    at_ids,
    distilled,
    drawn,
    filtered,
    largest,
    mapped,
    only,
    policy,
    rewarded,
    statistics,
    topk_divergence,
    whole_divergence,
)

# ---- calls that take a function; arguments that are not options ---------------------------------


class Mapped(NamedTuple):
    scaled: Tensor
    entropy: Tensor


def call_map(fn: Any, head: Any, side: Side, keywords: dict[str, Any]) -> Mapped:
    """linear_map knows of no temperature and no true vocabulary: what it calls applies them."""
    keywords = dict(keywords)
    temperature = keywords.pop("temperature", 1.0)
    options = {"vocab_size": keywords.pop("vocab_size", None)}
    options |= {"tp_group": keywords.get("tp_group")}
    tensors = [side["target"], side["factor"]]
    if isinstance(temperature, Tensor):
        tensors.append(temperature.expand(side["target"].shape))

    def several(z: Tensor, target: Tensor, factor: Tensor, *own: Tensor) -> Mapped:
        tempered = options | {"temperature": own[0] if own else temperature}
        stats = ml.vocab_parallel_token_stats(z, target, entropy=True, **tempered)
        assert stats.entropy is not None
        return Mapped(stats.logprobs.unsqueeze(-1) * factor, stats.entropy)

    mask = {"mask": side["mask"]} if "mask" in side else {}
    return fn(*head, several, *tensors, **mask, **keywords)


def call_policy_loss(fn: Any, head: Any, side: Side, keywords: dict[str, Any]) -> tuple:
    loss, stats = fn(*head, side["target"], rewarded, side["advantage"], **keywords)
    per_token = tuple(getattr(stats, name) for name in PER_TOKEN)
    assert all(x is None or not x.requires_grad for x in per_token)
    return loss, *per_token


def call_filtered(fn: Any, head: Any, side: Side, keywords: dict[str, Any]) -> Any:
    """With few `candidates` nearly every row's cut is searched for over the ranks."""
    side = dict(side)
    candidates = side.pop("candidates", None)
    operands = [side.pop(name) for name in ("target",) if name in side]
    few = mock.patch.object(sampling_cut, "_candidates", return_value=candidates)
    with nullcontext() if candidates is None else few:
        return fn(*head, *operands, **side, **keywords)


def call_sampling(fn: Any, head: Any, side: Side, keywords: dict[str, Any]) -> tuple:
    found = call_filtered(fn, head, side, keywords)
    if isinstance(found, Tensor):
        return found, None, None, None, None
    return found.logprobs, found.full_logprobs, found.kept_entropy, found.lse, found.entropy


PER_TOKEN = ("logprobs", "entropy", "target_rank", "sum_pi_squared", "lse")
WITH_A_GRADIENT = tuple(name for name in PER_TOKEN if name != "target_rank")


def candidates_of(draw: Draw) -> Side:
    given = draw.setting.get("candidates")
    return {} if given is None else {"candidates": given}


def kept_by_sampler(draw: Draw) -> Side:
    """Targets, and for a replay up to 6 ids per row that hold most targets."""
    target = draw.target()
    if not draw.setting["replay"]:
        return {"target": target} | candidates_of(draw)
    rows = draw.distinct_ids(6).reshape(-1, 6)
    missing = draw.setting["missing"]
    counts = torch.randint(0, 7, (len(rows),), generator=draw.generator)
    if missing == "error":
        counts = torch.where(target.flatten() == draw.ignore_index, counts, counts.clamp(min=1))
    kept = [row[:n] for row, n in zip(rows, counts, strict=True)]
    for row, (own, ids) in enumerate(zip(target.flatten(), kept, strict=True)):
        if own >= 0 and own not in ids and row % 4 and len(ids):
            ids[0] = own
    bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    found: Side = {"target": target, "kept_ids": (torch.cat([target.new_empty(0), *kept]), bounds)}
    return found | ({} if missing == "error" else {"missing": missing})


def teacher_of(draw: Draw) -> Side:
    """A teacher's logits, or its hidden states and its head, of another width."""
    kind, found = draw.setting.get("teacher", "logits"), draw.mask("logits", "hidden")
    if kind == "logits":
        return found | {"teacher_logits": 3.0 * draw.randn(draw.columns)}
    found |= {
        "teacher_hidden": draw.spread(*draw.hidden_lead, 5),
        "teacher_weight": draw.spread(draw.columns, 5),
    }
    if kind == "adapted":
        lora = (draw.spread(2, 5, step=1 / 4), draw.spread(draw.columns, 2, step=1 / 4), 0.5)
        found |= {"teacher_bias": draw.spread(draw.columns), "teacher_lora": lora}
        found |= {"teacher_softcap": 9.0, "teacher_logit_scale": 0.5}
    return found


def teacher_at_ids(draw: Draw) -> Side:
    ids = draw.distinct_ids(4)
    z = draw.randn(draw.columns).float()
    logp = z.log_softmax(-1).gather(-1, ids).to(draw.dtype)
    ids = ids.masked_fill(~draw.keep().unsqueeze(-1), draw.ignore_index)
    if not draw.setting["lse"]:
        return {"teacher_logprobs": logp, "ids": ids}
    logits = logp.float() + 2.0
    return {"teacher_logprobs": logits, "ids": ids, "teacher_lse": torch.full(draw.lead, 2.0)}


def ids_to_gather(draw: Draw) -> Side:
    ids = draw.ids(3)
    ids[..., 1] = ids[..., 0]  # gradients of one id given twice add up
    ids[..., 2].masked_fill_(~draw.keep(), draw.ignore_index)
    return {"ids": ids.masked_fill(~draw.keep().unsqueeze(-1), draw.ignore_index)}


def compact_by_mask(setting: dict[str, Any]) -> bool:
    """Where a mask says which rows count, there is none to compact by if all rows do."""
    return setting.get("ignored", True) or not setting.get("compact", False)


def replay_or_filters(setting: dict[str, Any]) -> bool:
    s = setting.get
    of_replay = s("replay") or s("entropy") or s("missing", "error") != "error"
    of_filters = s("top_k") not in (None, -1) or s("top_p", 1.0) != 1.0
    of_filters = of_filters or s("min_p", 0.0) > 0.0 or s("candidates")
    return not (of_replay and (of_filters or s("replay") is False))


def asked_besides(draw: Draw) -> Side:
    shape = () if draw.setting["shared_ids"] else draw.lead
    ids = torch.randint(0, draw.vocab, (*shape, 3), generator=draw.generator)
    ids[..., 1] = ids[..., 0]
    return {"target": draw.target(), "candidate_ids": ids}


def call_answers(fn: Any, head: Any, side: Side, keywords: dict[str, Any]) -> tuple:
    found = fn(*head, side["target"], candidate_ids=side["candidate_ids"], **keywords)
    values, ids = (None, None) if found.topk is None else found.topk
    return found.logprobs, found.lse, found.entropy, found.candidates, values, ids


def target_of(draw: Draw) -> Side:
    return {"target": draw.target()}


# ---- the table ----------------------------------------------------------------------------------

BOTH = (False, True)
SEGMENTED = {"invariant_segments": (None, SEGMENTS)}
STATISTICS = {
    "entropy": BOTH,
    "target_rank": BOTH,
    "sum_pi_squared": BOTH,
    "label_smoothing": (0.0, 0.1),
}
FLAGS = tuple(name for name, values in STATISTICS.items() if values is BOTH)
EVERY_STATISTIC = dict.fromkeys(FLAGS, True)  # what a call asks for that wants every statistic
KINDS = {
    "kind": (
        "forward",
        "reverse",
        "jsd",
        "skewed_forward",
        "skewed_reverse",
        "total_variation",
    ),
    "beta": (0.5, 0.3),
}
IGNORE_INDEX = {"ignore_index": (-100, -1, None)}
# Settings that only statistics of the vocabulary take.
PLAIN = ("temperature", "vocab_size", "chunk_size", "ignored", "garbage", "backend", "budgets")
PLAIN += ("logit_bias",)


def exchanged(name: str, fn: Any, input_dim: int, output_dim: int) -> Subject:
    return Subject(
        name,
        lambda z, side, o: {"x": z},
        fn,
        outputs=("x",),
        differentiable=("x",),
        without=PLAIN,
        axes={"lead": ("[n]",)},
        input_dim=input_dim,
        output_dim=output_dim,
        same_dtype=True,
        argument="x",
        mistakes=[
            ({"x": torch.zeros(6)}, "x: expected a 2-D tensor"),
            ({"x": torch.zeros(5, 5)}, "divisible by TP 2"),
            ({"tp_group": None}, "tp_group"),
        ],
    )


OPERATIONS = {
    op.name: op
    for op in (
        Subject(
            "token_stats",
            statistics,
            ml.vocab_parallel_token_stats,
            ml.linear_token_stats,
            differentiable=WITH_A_GRADIENT,
            side=target_of,
            positional=("target",),
            options=STATISTICS | SEGMENTED,
            axes={"softcap": (None, 8.0)} | IGNORE_INDEX,
            left_out={"target_rank": -1},
        ),
        Subject(
            "answers",
            answered,
            ml.vocab_parallel_token_stats,
            ml.linear_token_stats,
            outputs=("logprobs", "lse", "entropy", "candidates", "values", "ids"),
            differentiable=("logprobs", "lse", "entropy", "candidates", "values"),
            side=asked_besides,
            call=call_answers,
            options={"topk": (None, 3, 9), "log_softmax": (True, False), "entropy": BOTH},
            axes={"shared_ids": BOTH} | IGNORE_INDEX,
            mistakes=[
                ({"topk": 0}, "topk: expected an int from 1 to vocab_size"),
                (
                    {"candidate_ids": lambda x: x.float()},
                    "candidate_ids: expected an integer dtype",
                ),
                ({"candidate_ids": lambda x: x + VOCAB}, "candidate_ids: expected ids in [0, 24)"),
                ({"invariant_segments": SEGMENTS}, "invariant_segments: expected None with"),
            ],
        ),
        Subject(
            "logprobs",
            only("logprobs"),
            ml.vocab_parallel_logprobs,
            outputs=("logprobs",),
            differentiable=("logprobs",),
            side=target_of,
            positional=("target",),
            options={"label_smoothing": (0.0, 0.1)} | SEGMENTED,
            axes={"softcap": (None, 8.0)} | IGNORE_INDEX,
        ),
        Subject(
            "entropy",
            only("entropy"),
            ml.vocab_parallel_entropy,
            outputs=("entropy",),
            differentiable=("entropy",),
            options=SEGMENTED,
            axes={"softcap": (None, 8.0)},
            without=("ignored",),
        ),
        Subject(
            "target_rank",
            only("target_rank"),
            ml.vocab_parallel_target_rank,
            outputs=("target_rank",),
            side=target_of,
            positional=("target",),
            axes=IGNORE_INDEX,
            left_out={"target_rank": -1},
        ),
        Subject(
            "log_softmax",
            lambda z, side, o: {"columns": z.log_softmax(-1)},
            ml.vocab_parallel_log_softmax,
            outputs=("columns",),
            differentiable=("columns",),
            without=("ignored",),
            output_dim=-1,
        ),
        Subject(
            "topk",
            largest,
            ml.vocab_parallel_topk,
            ml.linear_topk,
            outputs=("values", "ids"),
            differentiable=("values",),
            side=lambda draw: {"k": draw.setting["k"]} | draw.mask("logits", "hidden"),
            positional=("k",),
            axes={"k": (3, 1, 9)},  # 9: more than a shard of three
            allowed=compact_by_mask,
            mistakes=[({"k": 0}, "k: expected"), ({"k": VOCAB + 1}, "k: expected")],
        ),
        Subject(
            "argmax",
            lambda z, side, o: {"ids": largest(z, side, o)["ids"].squeeze(-1)},
            ml.vocab_parallel_argmax,
            outputs=("ids",),
            without=("temperature", "chunk_size", "ignored", "backend"),
        ),
        Subject(
            "gather",
            at_ids,
            ml.vocab_parallel_gather,
            ml.linear_gather,
            outputs=("values",),
            differentiable=("values",),
            side=ids_to_gather,
            positional=("ids",),
            options={"log_softmax": BOTH},
            axes=IGNORE_INDEX,
        ),
        Subject(
            "topk_distill",
            distilled,
            ml.vocab_parallel_topk_distill,
            ml.linear_topk_distill,
            outputs=("student", "teacher", "entropy"),
            differentiable=("student", "entropy"),
            side=lambda draw: (
                {"teacher_topk_logits": draw.randn(4), "teacher_topk_ids": draw.ids(4)}
                | draw.mask("logits", "hidden")
            ),
            positional=("teacher_topk_logits", "teacher_topk_ids"),
            options={
                "normalize": ("vocab", "topk"),
                "entropy": BOTH,
                "teacher_temperature": (None, 1.3),
            },
            support=True,
            allowed=compact_by_mask,
            left_out={"teacher": None},
            mistakes=[
                ({"normalize": "all"}, "normalize: expected one of"),
                ({"teacher_temperature": 0.0}, "teacher_temperature: expected"),
                ({"teacher_topk_logits": torch.zeros(6, 2, 0)}, "expected"),
                (
                    {
                        name: lambda x: x[..., :0]
                        for name in ("teacher_topk_logits", "teacher_topk_ids")
                    },
                    "k >= 1",
                ),
                *(
                    ({"teacher_temperature": bad}, "teacher_temperature: expected a finite number")
                    for bad in (-1.0, float("nan"), True)
                ),
            ],
        ),
        Subject(
            "topk_kl_div",
            topk_divergence,
            ml.vocab_parallel_topk_kl_div,
            ml.linear_topk_kl_div,
            outputs=("values",),
            differentiable=("values",),
            side=teacher_at_ids,
            positional=("teacher_logprobs", "ids"),
            options=KINDS | {"tail": (None, "bin", "ignore", "renormalize"), "generalized": BOTH},
            axes={"lse": BOTH} | IGNORE_INDEX,
            support=True,
            allowed=lambda s: s.get("tail") in (None, "ignore") or not s.get("generalized"),
            factor=8.0,
            mistakes=[
                ({"tail": "drop"}, "tail: expected one of"),
                ({"tail": "bin", "generalized": True}, "generalized=True: expected tail"),
                ({"generalized": 1}, "generalized: expected True or False"),
                ({"teacher_lse": torch.zeros(5)}, "teacher_lse: expected shape (6, 2)"),
                (
                    {"teacher_lse": torch.full((6, 2), -50.0)},
                    "teacher_lse: expected the log-sum-exp of the very logits in teacher_logprobs",
                ),
                ({"ids": lambda x: x * 0 + 1}, "ids: expected each id at most once per row"),
                (
                    {"teacher_logprobs": lambda x: x * 0 + 1},
                    "teacher_logprobs: expected log-probabilities, got [1.0, 1.0, 1.0, 1.0]; of",
                ),
            ],
        ),
        Subject(
            "sampling_logprobs",
            filtered,
            ml.vocab_parallel_sampling_logprobs,
            ml.linear_sampling_logprobs,
            outputs=("values", "full_logprobs", "kept_entropy", "lse", "entropy"),
            differentiable=("values", "full_logprobs", "kept_entropy", "lse", "entropy"),
            side=kept_by_sampler,
            positional=("target",),
            options={
                "top_k": (None, 6, -1, 1),
                "top_p": (1.0, 0.8, 0.05),
                "min_p": (0.0, 0.03, 1.0),
                "full": BOTH,
                "entropy": BOTH,
            },
            axes={
                "replay": BOTH,
                "missing": ("error", "full", "ignore"),
                "candidates": (None, 1, 3),
            }
            | IGNORE_INDEX,
            allowed=replay_or_filters,
            call=call_sampling,
            infinite=True,
            mistakes=[
                *(({"top_k": bad}, "top_k: expected") for bad in (-2, 2.0, True)),
                *(({"top_p": bad}, "top_p: expected") for bad in (0.0, 1.1, float("nan"), None)),
                *(({"min_p": bad}, "min_p: expected") for bad in (-0.1, 1.1, float("nan"), None)),
                *(({"kept_ids": bad}, words) for bad, words in BAD_RECORDS),
                ({"missing": "full"}, "missing: expected 'error' without kept_ids"),
                ({"missing": "none"}, "missing: expected one of"),
                ({"full": 1}, "full: expected True or False"),
                (
                    {"kept_ids": (torch.arange(12), torch.arange(13)), "top_k": 5},
                    "kept_ids: expected top_k, top_p and min_p to be off",
                ),
            ],
        ),
        Subject(
            "sample",
            drawn,
            ml.vocab_parallel_sample,
            ml.linear_sample,
            outputs=("ids", "logprobs"),
            side=lambda draw: (
                {"seed": draw.ids() if draw.setting["seed_per_row"] else -(2**63)}
                | draw.mask("logits", "hidden")
                | candidates_of(draw)
            ),
            call=call_filtered,
            options={"top_k": (None, 5), "top_p": (1.0, 0.7), "min_p": (0.0, 0.1)},
            axes={"seed_per_row": BOTH, "candidates": (None, 1)},
            allowed=compact_by_mask,
            passed_on=("temperature",),  # 0 is allowed here
            mistakes=[
                ({"seed": 0.5}, "seed: expected"),
                ({"seed": 2**63}, "seed: expected an int of 64 bits"),
                (
                    {"seed": torch.zeros(5, dtype=torch.int64)},
                    "seed: expected a number or",
                ),
                ({"seed": torch.zeros(())}, "seed: expected an integer dtype"),
                ({"temperature": -1.0}, "temperature: expected a finite number > 0"),
                ({"top_k": 0.5}, "top_k"),
                ({"top_p": 0.0}, "top_p"),
            ],
        ),
        Subject(
            "soft_cross_entropy",
            whole_divergence,
            ml.vocab_parallel_soft_cross_entropy,
            outputs=("values",),
            differentiable=("values",),
            side=teacher_of,
            positional=("teacher_logits",),
            options={"teacher_temperature": (None, 1.3)},
            support=True,
        ),
        Subject(
            "kl_div",
            whole_divergence,
            ml.vocab_parallel_kl_div,
            ml.linear_kl_div,
            outputs=("values",),
            differentiable=("values",),
            side=teacher_of,
            options=KINDS | {"teacher_temperature": (None, 1.3)},
            support=True,
            axes={"teacher": ("logits", "hidden", "adapted")},
            allowed=lambda s: (
                compact_by_mask(s)
                and (s.get("teacher", "logits") == "logits" or s["source"] == "hidden")
            ),
            factor=8.0,
            mistakes=[({"teacher_temperature": 0.0}, "teacher_temperature: expected")],
        ),
        Subject(
            "linear_map",
            mapped,
            None,
            ml.linear_map,
            outputs=("scaled", "entropy"),
            differentiable=("scaled", "entropy"),
            side=lambda draw: (
                {"target": draw.ids(), "factor": draw.randn(2).float()} | draw.mask("hidden")
            ),
            call=call_map,
            without=("backend", "logit_bias"),
            passed_on=("temperature", "vocab_size", "target"),
            allowed=compact_by_mask,
            mistakes=[({"factor": torch.zeros(5)}, "per_token_tensors[1]: expected")],
        ),
        Subject(
            "linear_policy_loss",
            policy,
            None,
            ml.linear_policy_loss,
            outputs=("loss", *PER_TOKEN),
            differentiable=("loss",),
            side=lambda draw: target_of(draw) | {"advantage": draw.randn().float()},
            call=call_policy_loss,
            options=STATISTICS | {"denominator": (1.0, 7.0)} | SEGMENTED,
            axes=IGNORE_INDEX,
            left_out={"loss": None, "target_rank": -1},
            mistakes=[
                *(
                    ({"denominator": wrong}, "denominator: expected a finite number > 0, got")
                    for bad in (0, -1, float("nan"), float("inf"), -float("inf"))
                    for wrong in (bad, torch.tensor(bad), torch.tensor([bad]).double())
                ),
                *(
                    ({"denominator": bad}, "denominator: expected a number")
                    for bad in (True, "all", torch.ones(2), torch.ones((), requires_grad=True))
                ),
                ({"advantage": torch.zeros(2, 6)}, "per_token_tensors[0]: expected"),
                ({"advantage": 1.0}, "per_token_tensors[0]: expected a torch.Tensor, got float"),
                ({"advantage": torch.zeros(6, 2, requires_grad=True)}, "requires a gradient"),
            ],
        ),
        exchanged("all_to_all_vp2sp", ml.all_to_all_vp2sp, -1, 0),
        exchanged("all_to_all_sp2vp", ml.all_to_all_sp2vp, 0, -1),
    )
}
