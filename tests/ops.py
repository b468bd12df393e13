"""Every operation once: its public calls, the truth, its options, and what makes it refuse.

A row of `OPERATIONS` is all that the engine (`engine.py`) knows of an operation. The truth is plain
torch on one process. It is given the processed logits `z` `[..., V]` of the whole vocabulary (after
scale, softcap, bias, temperature and mask; in float64, and once more in float32 as the yardstick),
`side` (the call's other arguments, whole tensors by name) and the options; it returns the outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mcore_logprobs as ml
from tests.helpers.oracles import finished_logits

VOCAB = 24  # padded; divides into 1, 2 and 3 shards
Outputs = dict[str, Tensor]
Side = dict[str, Any]


@dataclass
class Draw:
    """Random tensors of one case. `[...]` is the leading shape of targets and results.

    Attributes:
        hidden_lead: that of hidden states, another where the call names rows.
    """

    lead: tuple[int, ...]
    hidden_lead: tuple[int, ...]
    columns: int  # the padded vocabulary
    vocab: int  # the true one
    dtype: torch.dtype
    ignored: bool  # whether some rows are left out
    source: str  # "logits" or "hidden"
    setting: dict[str, Any]  # of every axis of the case
    generator: torch.Generator

    def randn(self, *shape: int) -> Tensor:
        return torch.randn((*self.lead, *shape), generator=self.generator).to(self.dtype)

    def spread(self, *shape: int, step: float = 1 / 16) -> Tensor:
        """Numbers within +-2. Where products are rounded to a lower precision, multiples of `step`:
        their products are exact before, so that there is one way to round them."""
        x = 4.0 * torch.rand(shape, generator=self.generator, dtype=torch.float64) - 2.0
        if self.setting.get("logits_dtype", "float32") != "float32":
            x = (x / step).round() * step
        return x.to(self.dtype)

    def keep(self) -> Tensor:
        """bool `[...]`: about two rows of three, or all of them."""
        return (torch.rand(self.lead, generator=self.generator) < 0.67) | (not self.ignored)

    def ids(self, *k: int) -> Tensor:
        """int64 `[..., *k]`, global ids."""
        return torch.randint(0, self.vocab, (*self.lead, *k), generator=self.generator)

    def distinct_ids(self, k: int) -> Tensor:
        """int64 `[..., k]`, each id at most once a row."""
        noise = torch.rand(*self.lead, self.vocab, generator=self.generator)
        return noise.argsort(-1)[..., :k]

    def target(self) -> Tensor:
        """int64 `[...]`, -100 in the rows that are left out."""
        return self.ids().masked_fill(~self.keep(), -100)

    def mask(self, *sources: str) -> Side:
        """The keyword `mask`, where rows are left out and the call from this source takes it."""
        return {"mask": self.keep()} if self.ignored and self.source in sources else {}


@dataclass(frozen=True)
class Operation:
    """One row of the table.

    Attributes:
        truth: (z, side, options) -> outputs by name. What it gives in a row that is left out is
            not looked at.
        outputs: what the call's results are called, in their order; empty: a TokenStats' fields.
        differentiable: the outputs that have a gradient.
        side: draws the arguments that are not options: targets, ids, masks, teachers.
        positional: the names in `side` that are passed by position, in this order.
        options: keywords of the operation alone, and the values they are tried with: first the
            default, which is not passed.
        axes: other settings of the case: for `side` to look at, or the engine's own.
        allowed: whether settings, some of which may be missing, go together.
        without: common settings that the operation does not take.
        call: makes the call where passing side and keywords is not enough.
        passed_on: arguments that a function of the caller checks, not the operation.
        left_out: outputs that are not 0 in a row that is left out: their value, or None where they
            are computed all the same.
        output_dim: the dimension in which outputs are sharded over ranks; None: the same on each.
        input_dim: the dimension in which the logits are.
        factor: how many times plain torch's error the error may be; more where sums cancel.
        same_dtype: whether outputs come in the logits' dtype rather than in float32 or better.
        infinite: whether an output of -inf gets an upstream gradient.
        argument: what the logits are called in `mistakes`.
        mistakes: (bad values by argument, words of the message); `MISTAKES` has those that several
            operations share.
    """

    name: str
    truth: Callable[[Tensor, Side, dict[str, Any]], Outputs]
    from_logits: Callable[..., Any] | None = None
    from_hidden: Callable[..., Any] | None = None
    outputs: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()
    side: Callable[[Draw], Side] = lambda draw: {}
    positional: tuple[str, ...] = ()
    options: dict[str, Sequence[Any]] = field(default_factory=dict)
    axes: dict[str, Sequence[Any]] = field(default_factory=dict)
    allowed: Callable[[dict[str, Any]], bool] = lambda setting: True
    without: tuple[str, ...] = ()
    call: Callable[..., Any] | None = None
    passed_on: tuple[str, ...] = ()
    left_out: dict[str, int | None] = field(default_factory=dict)
    output_dim: int | None = None
    input_dim: int = -1
    infinite: bool = False
    factor: float = 2.0
    same_dtype: bool = False
    argument: str = "logits"
    mistakes: Sequence[tuple[dict[str, Any], str]] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(s for s in ("logits", "hidden") if self.function(s) is not None)

    def function(self, source: str) -> Callable[..., Any] | None:
        return self.from_logits if source == "logits" else self.from_hidden

    def __call__(
        self, source: str, head: tuple[Tensor, ...], side: Side, keywords: dict[str, Any]
    ) -> Outputs:
        """The public call. `head`: (logits,) or (hidden, weight), this rank's."""
        fn = self.function(source)
        if self.call is not None:
            result = self.call(fn, head, side, keywords)
        else:
            by_name = {name: x for name, x in side.items() if name not in self.positional}
            assert fn is not None
            result = fn(*head, *(side[n] for n in self.positional), **by_name, **keywords)
        if isinstance(result, ml.TokenStats):
            names = ("logprobs", "lse", "entropy", "sum_pi_squared", "target_rank")
            found = {name: getattr(result, name) for name in names}
        else:
            results = result if isinstance(result, tuple) else (result,)
            found = dict(zip(self.outputs, results, strict=True))
        return {name: x for name, x in found.items() if x is not None}


# How tensors of `side` are cut over TP ranks: columns of the vocabulary, its rows, or the sequence.
SHARDED = {
    "teacher_logits": "columns",
    "teacher_weight": "rows",
    "teacher_bias": "rows",
    "teacher_hidden": "sequence",
}


# ---- truths -------------------------------------------------------------------------------------


def take(x: Tensor, ids: Tensor) -> Tensor:
    """`x[..., ids]`, with 0 for ids that are left out; ids `[...]` or `[..., k]`."""
    column = ids.clamp(min=0)
    if ids.dim() < x.dim():
        return x.gather(-1, column.unsqueeze(-1)).squeeze(-1)
    return x.gather(-1, column)


def entropy_of(logp: Tensor) -> Tensor:
    return -(logp.exp() * logp.masked_fill(logp.isneginf(), 0.0)).sum(-1)


def statistics(z: Tensor, side: Side, o: dict[str, Any]) -> Outputs:
    target, logp = side["target"], z.log_softmax(-1)
    own = take(logp, target)
    smoothing = o.get("label_smoothing", 0.0)
    if smoothing:
        others = ~z.isneginf() & (torch.arange(z.shape[-1]) != target.unsqueeze(-1))
        mean = torch.where(others, logp, 0.0).sum(-1) / others.sum(-1)
        own = (1.0 - smoothing) * own + smoothing * mean
    found = {"logprobs": own, "lse": z.logsumexp(-1)}
    if o.get("entropy"):
        found["entropy"] = entropy_of(logp)
    if o.get("sum_pi_squared"):
        found["sum_pi_squared"] = logp.exp().square().sum(-1)
    if o.get("target_rank"):
        found["target_rank"] = (z > take(z, target).unsqueeze(-1)).sum(-1)
    return found


def largest(z: Tensor, side: Side, o: dict[str, Any]) -> Outputs:
    values, ids = z.sort(dim=-1, descending=True, stable=True)
    k = side.get("k", 1)
    return {"values": values[..., :k], "ids": ids[..., :k]}


def at_ids(z: Tensor, side: Side, o: dict[str, Any]) -> Outputs:
    z = z.log_softmax(-1) if o["log_softmax"] else z
    return {"values": take(z, side["ids"]).masked_fill(side["ids"] < 0, 0.0)}


def distilled(z: Tensor, side: Side, o: dict[str, Any]) -> Outputs:
    ids, logp = side["teacher_topk_ids"], z.log_softmax(-1)
    student = take(logp, ids) if o["normalize"] == "vocab" else take(z, ids).log_softmax(-1)
    temperature = o["temperature"] if o["teacher_temperature"] is None else o["teacher_temperature"]
    teacher = (side["teacher_topk_logits"].to(z.dtype) / temperature).log_softmax(-1)
    found = {"student": student, "teacher": teacher}
    return found | ({"entropy": entropy_of(logp)} if o["entropy"] else {})


def divergence(
    logp: Tensor, logq: Tensor, kind: str, beta: float, generalized: bool = False
) -> Tensor:
    """Of the student's p from the teacher's q; every column has some probability on either side."""
    p, q = logp.exp(), logq.exp()
    m = beta * q + (1.0 - beta) * p
    if kind == "cross entropy":
        return -(q * logp).sum(-1)
    if kind == "jsd":
        return (beta * relative(q, m, False) + (1.0 - beta) * relative(p, m, False)).sum(-1)
    if kind == "total_variation":
        return 0.5 * (p - q).abs().sum(-1)
    pair = {
        "forward": (q, p),
        "reverse": (p, q),
        "skewed_forward": (q, m),
        "skewed_reverse": (p, m),
    }
    return relative(*pair[kind], generalized).sum(-1)


def relative(a: Tensor, b: Tensor, generalized: bool) -> Tensor:
    return a * (a / b).log() + (b - a if generalized else 0.0)


def whole_divergence(z: Tensor, side: Side, o: dict[str, Any]) -> Outputs:
    if "teacher_logits" in side:
        raw = side["teacher_logits"].to(z.dtype)
    else:
        hidden = side["teacher_hidden"].to(z.dtype)
        if o["rows"] is not None:
            hidden = hidden.flatten(0, -2)[o["rows"]]
        raw = hidden @ side["teacher_weight"].to(z.dtype).t()
        if "teacher_lora" in side:
            a, b, scale = side["teacher_lora"]
            raw = raw + scale * (hidden @ a.to(z.dtype).t()) @ b.to(z.dtype).t()
        raw = raw.to(o["logits_dtype"]).to(z.dtype) if o["logits_dtype"] else raw
    temperature = o["temperature"] if o["teacher_temperature"] is None else o["teacher_temperature"]
    teacher = finished_logits(
        raw,
        bias=side.get("teacher_bias"),
        logit_scale=o.get("teacher_logit_scale", 1.0),
        softcap=o.get("teacher_softcap"),
        temperature=temperature,
        dtype=z.dtype,
    )
    true = slice(o["vocab_size"])
    logp, logq = z[..., true].log_softmax(-1), teacher[..., true].log_softmax(-1)
    return {"values": divergence(logp, logq, o.get("kind", "cross entropy"), o.get("beta", 0.5))}


def topk_divergence(z: Tensor, side: Side, o: dict[str, Any]) -> Outputs:
    logp, logq = take(z.log_softmax(-1), side["ids"]), side["teacher_logprobs"].to(z.dtype)
    tail = o["tail"] or ("ignore" if o["generalized"] else "bin")
    if tail == "renormalize":
        logp, logq = logp.log_softmax(-1), logq.log_softmax(-1)
    elif tail == "bin":
        rest = [(1.0 - x.exp().sum(-1, keepdim=True)).clamp(min=1e-6).log() for x in (logp, logq)]
        logp, logq = torch.cat([logp, rest[0]], -1), torch.cat([logq, rest[1]], -1)
    return {"values": divergence(logp, logq, o["kind"], o["beta"], o["generalized"])}


def filtered(z: Tensor, side: Side, o: dict[str, Any]) -> Outputs:
    if "kept_ids" in side:
        kept = torch.zeros(z.shape, dtype=torch.bool).flatten(0, -2)
        flat, bounds = side["kept_ids"]
        for row, (start, end) in enumerate(itertools.pairwise(bounds)):
            kept[row, flat[start:end]] = True
        z = z.masked_fill(~kept.view(z.shape), -torch.inf)
    else:
        z = kept_logits(z, o)
    return {"values": take(z.log_softmax(-1), side["target"])}


def kept_logits(z: Tensor, o: dict[str, Any]) -> Tensor:
    """-inf where top_k or top_p drops a column."""
    kept = ~z.isneginf()
    if o["top_k"] is not None and 0 < o["top_k"] < z.shape[-1]:
        kept &= z >= z.topk(o["top_k"]).values[..., -1:]
    p, order = (
        z.masked_fill(~kept, -torch.inf).softmax(-1).sort(dim=-1, descending=True, stable=True)
    )
    before = p.cumsum(-1) - p
    kept &= torch.zeros_like(kept).scatter(-1, order, before < o["top_p"])
    return z.masked_fill(~kept, -torch.inf)


def splitmix(state: int, number: int) -> int:
    """The number-th output of SplitMix64 from a state."""
    bits = (state + number * 0x9E3779B97F4A7C15) % 2**64
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
    return bits ^ (bits >> 31)


def drawn(z: Tensor, side: Side, o: dict[str, Any]) -> Outputs:
    logp = kept_logits(z, o).log_softmax(-1)
    flat = logp.reshape(-1, logp.shape[-1])
    seeds = torch.as_tensor(side["seed"]).expand(logp.shape[:-1]).flatten().tolist()
    ids = torch.zeros(len(flat), dtype=torch.int64)
    for row, seed in enumerate(seeds):
        stream = splitmix(splitmix(seed, 1), row + 1)
        uniform = [(splitmix(stream, i + 1) // 2**12 + 0.5) / 2**52 for i in range(flat.shape[1])]
        ids[row] = (flat[row].double() - torch.tensor(uniform).double().log().neg().log()).argmax()
    ids = ids.view(logp.shape[:-1])
    return {"ids": ids, "logprobs": take(logp, ids)}


def rewarded(logprobs: Tensor, entropy: Tensor | None, advantage: Tensor) -> Tensor:
    """A loss per token: what a caller gives `linear_policy_loss`."""
    loss = -(logprobs.exp() * advantage)
    return loss if entropy is None else loss - 0.1 * entropy * advantage.abs()


def policy(z: Tensor, side: Side, o: dict[str, Any]) -> Outputs:
    stats = statistics(z, side, o)
    loss = rewarded(stats["logprobs"], stats.get("entropy"), side["advantage"].to(z.dtype))
    total = loss.masked_fill(side["target"] < 0, 0.0).sum() / o["denominator"]
    return {"loss": total} | {name: x.detach() for name, x in stats.items()}


def mapped(z: Tensor, side: Side, o: dict[str, Any]) -> Outputs:
    logp = z.log_softmax(-1)
    factor = side["factor"].to(z.dtype)
    return {
        "scaled": take(logp, side["target"]).unsqueeze(-1) * factor,
        "entropy": entropy_of(logp),
    }


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
        options["temperature"] = own[0] if own else temperature
        stats = ml.vocab_parallel_token_stats(z, target, entropy=True, **options)
        assert stats.entropy is not None
        return Mapped(stats.logprobs.unsqueeze(-1) * factor, stats.entropy)

    mask = {"mask": side["mask"]} if "mask" in side else {}
    return fn(*head, several, *tensors, **mask, **keywords)


def call_policy_loss(fn: Any, head: Any, side: Side, keywords: dict[str, Any]) -> tuple:
    loss, stats = fn(*head, side["target"], rewarded, side["advantage"], **keywords)
    for x in (stats.logprobs, stats.lse, stats.entropy):
        assert x is None or not x.requires_grad
    return loss, stats.logprobs, stats.lse, stats.entropy


def kept_by_sampler(draw: Draw) -> Side:
    """Targets, and for a replay 1 to 6 ids a row that hold most targets."""
    target = draw.target()
    if not draw.setting["replay"]:
        return {"target": target}
    rows = draw.distinct_ids(6).flatten(0, -2)
    counts = torch.randint(1, 7, (len(rows),), generator=draw.generator)
    kept = [row[:n] for row, n in zip(rows, counts, strict=True)]
    for row, (own, ids) in enumerate(zip(target.flatten(), kept, strict=True)):
        if own >= 0 and own not in ids and row % 4:
            ids[0] = own
    bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return {"target": target, "kept_ids": (torch.cat(kept), bounds)}


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
    logp = draw.randn(draw.columns).float().log_softmax(-1).gather(-1, ids).to(draw.dtype)
    return {"teacher_logprobs": logp, "ids": ids.masked_fill(~draw.keep().unsqueeze(-1), -100)}


def ids_to_gather(draw: Draw) -> Side:
    ids = draw.ids(3)
    ids[..., 1] = ids[..., 0]  # gradients of one id given twice add up
    ids[..., 2].masked_fill_(~draw.keep(), -100)
    return {"ids": ids.masked_fill(~draw.keep().unsqueeze(-1), -100)}


def compact_by_mask(setting: dict[str, Any]) -> bool:
    """Where a mask says which rows count, there is none to compact by if all rows do."""
    return setting.get("ignored", True) or not setting.get("compact", False)


def target_of(draw: Draw) -> Side:
    return {"target": draw.target()}


# ---- the table ----------------------------------------------------------------------------------

BOTH = (False, True)
STATISTICS = {
    "entropy": BOTH,
    "target_rank": BOTH,
    "sum_pi_squared": BOTH,
    "label_smoothing": (0.0, 0.1),
}
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
# Settings that only statistics of the vocabulary take.
PLAIN = ("temperature", "vocab_size", "chunk_size", "ignored", "garbage", "backend")


def only(*names: str) -> Callable[[Tensor, Side, dict[str, Any]], Outputs]:
    """Some of the statistics' truth."""

    def truth(z: Tensor, side: Side, o: dict[str, Any]) -> Outputs:
        side = {"target": torch.zeros(z.shape[:-1], dtype=torch.int64)} | side
        found = statistics(z, side, o | dict.fromkeys(names, True))
        return {name: found[name] for name in names}

    return truth


def exchanged(name: str, fn: Any, input_dim: int, output_dim: int) -> Operation:
    return Operation(
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
        Operation(
            "token_stats",
            statistics,
            ml.vocab_parallel_token_stats,
            ml.linear_token_stats,
            differentiable=("logprobs", "entropy", "sum_pi_squared", "lse"),
            side=target_of,
            positional=("target",),
            options=STATISTICS,
            axes={"softcap": (None, 8.0)},
            left_out={"target_rank": -1},
        ),
        Operation(
            "logprobs",
            only("logprobs"),
            ml.vocab_parallel_logprobs,
            outputs=("logprobs",),
            differentiable=("logprobs",),
            side=target_of,
            positional=("target",),
            options={"label_smoothing": (0.0, 0.1)},
            axes={"softcap": (None, 8.0)},
        ),
        Operation(
            "entropy",
            only("entropy"),
            ml.vocab_parallel_entropy,
            outputs=("entropy",),
            differentiable=("entropy",),
            axes={"softcap": (None, 8.0)},
            without=("ignored",),
        ),
        Operation(
            "target_rank",
            only("target_rank"),
            ml.vocab_parallel_target_rank,
            outputs=("target_rank",),
            side=target_of,
            positional=("target",),
            left_out={"target_rank": -1},
        ),
        Operation(
            "log_softmax",
            lambda z, side, o: {"columns": z.log_softmax(-1)},
            ml.vocab_parallel_log_softmax,
            outputs=("columns",),
            differentiable=("columns",),
            without=("ignored",),
            output_dim=-1,
        ),
        Operation(
            "topk",
            largest,
            ml.vocab_parallel_topk,
            ml.linear_topk,
            outputs=("values", "ids"),
            differentiable=("values",),
            side=lambda draw: {"k": draw.setting["k"]} | draw.mask("hidden"),
            positional=("k",),
            axes={"k": (3, 1, 9)},  # 9: more than a shard of three
            allowed=compact_by_mask,
            mistakes=[({"k": 0}, "k: expected"), ({"k": VOCAB + 1}, "k: expected")],
        ),
        Operation(
            "argmax",
            lambda z, side, o: {"ids": largest(z, side, o)["ids"].squeeze(-1)},
            ml.vocab_parallel_argmax,
            outputs=("ids",),
            without=("temperature", "chunk_size", "ignored", "backend"),
        ),
        Operation(
            "gather",
            at_ids,
            ml.vocab_parallel_gather,
            ml.linear_gather,
            outputs=("values",),
            differentiable=("values",),
            side=ids_to_gather,
            positional=("ids",),
            options={"log_softmax": BOTH},
        ),
        Operation(
            "topk_distill",
            distilled,
            ml.vocab_parallel_topk_distill,
            ml.linear_topk_distill,
            outputs=("student", "teacher", "entropy"),
            differentiable=("student", "entropy"),
            side=lambda draw: (
                {"teacher_topk_logits": draw.randn(4), "teacher_topk_ids": draw.ids(4)}
                | draw.mask("hidden")
            ),
            positional=("teacher_topk_logits", "teacher_topk_ids"),
            options={
                "normalize": ("vocab", "topk"),
                "entropy": BOTH,
                "teacher_temperature": (None, 1.3),
            },
            allowed=compact_by_mask,
            left_out={"teacher": None},
            mistakes=[
                ({"normalize": "all"}, "normalize: expected one of"),
                ({"teacher_temperature": 0.0}, "teacher_temperature: expected"),
                ({"teacher_topk_logits": torch.zeros(6, 2, 0)}, "expected"),
            ],
        ),
        Operation(
            "topk_kl_div",
            topk_divergence,
            ml.vocab_parallel_topk_kl_div,
            ml.linear_topk_kl_div,
            outputs=("values",),
            differentiable=("values",),
            side=teacher_at_ids,
            positional=("teacher_logprobs", "ids"),
            options=KINDS | {"tail": (None, "bin", "ignore", "renormalize"), "generalized": BOTH},
            allowed=lambda s: s.get("tail") in (None, "ignore") or not s.get("generalized"),
            factor=8.0,
            mistakes=[
                ({"tail": "drop"}, "tail: expected one of"),
                ({"tail": "bin", "generalized": True}, "generalized=True: expected tail"),
                ({"generalized": 1}, "generalized: expected True or False"),
            ],
        ),
        Operation(
            "sampling_logprobs",
            filtered,
            ml.vocab_parallel_sampling_logprobs,
            ml.linear_sampling_logprobs,
            outputs=("values",),
            differentiable=("values",),
            side=kept_by_sampler,
            positional=("target",),
            options={"top_k": (None, 6, -1), "top_p": (1.0, 0.8)},
            axes={"replay": BOTH},
            allowed=lambda s: (
                not s.get("replay") or (s.get("top_k") in (None, -1) and s.get("top_p", 1.0) == 1.0)
            ),
            infinite=True,
            mistakes=[
                ({"top_k": -2}, "top_k: expected"),
                ({"top_p": 0.0}, "top_p: expected"),
                ({"kept_ids": torch.zeros(3)}, "kept_ids: expected"),
            ],
        ),
        Operation(
            "sample",
            drawn,
            ml.vocab_parallel_sample,
            ml.linear_sample,
            outputs=("ids", "logprobs"),
            side=lambda draw: (
                {"seed": draw.ids() if draw.setting["seed_per_row"] else -(2**63)}
                | draw.mask("logits", "hidden")
            ),
            options={"top_k": (None, 5), "top_p": (1.0, 0.7)},
            axes={"seed_per_row": BOTH},
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
        Operation(
            "soft_cross_entropy",
            whole_divergence,
            ml.vocab_parallel_soft_cross_entropy,
            outputs=("values",),
            differentiable=("values",),
            side=teacher_of,
            positional=("teacher_logits",),
            options={"teacher_temperature": (None, 1.3)},
        ),
        Operation(
            "kl_div",
            whole_divergence,
            ml.vocab_parallel_kl_div,
            ml.linear_kl_div,
            outputs=("values",),
            differentiable=("values",),
            side=teacher_of,
            options=KINDS | {"teacher_temperature": (None, 1.3)},
            axes={"teacher": ("logits", "hidden", "adapted")},
            allowed=lambda s: (
                compact_by_mask(s)
                and (s.get("teacher", "logits") == "logits" or s["source"] == "hidden")
            ),
            factor=8.0,
            mistakes=[({"teacher_temperature": 0.0}, "teacher_temperature: expected")],
        ),
        Operation(
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
            without=("backend",),
            passed_on=("temperature", "vocab_size", "target"),
            allowed=compact_by_mask,
            mistakes=[({"factor": torch.zeros(5)}, "per_token_tensors[1]: expected")],
        ),
        Operation(
            "linear_policy_loss",
            policy,
            None,
            ml.linear_policy_loss,
            outputs=("loss", "logprobs", "lse", "entropy"),
            differentiable=("loss",),
            side=lambda draw: target_of(draw) | {"advantage": draw.randn().float()},
            call=call_policy_loss,
            options={"entropy": BOTH, "label_smoothing": (0.0, 0.1), "denominator": (1.0, 7.0)},
            left_out={"loss": None},
            mistakes=[({"denominator": 0.0}, "denominator: expected")],
        ),
        exchanged("all_to_all_vp2sp", ml.all_to_all_vp2sp, -1, 0),
        exchanged("all_to_all_sp2vp", ml.all_to_all_sp2vp, 0, -1),
    )
}

# ---- what every operation that takes the argument refuses ---------------------------------------

# Argument: (a bad value, or what is made of the good one; words of the message).
MISTAKES: dict[str, list[tuple[Any, str]]] = {
    "logits": [(Tensor.long, "expected dtype in"), (Tensor.tolist, "expected a torch.Tensor")],
    "hidden": [(Tensor.long, "hidden: expected dtype in"), (None, "hidden: expected")],
    "weight": [
        (Tensor.half, "weight: expected hidden's dtype"),
        (lambda w: w[:, 1:], "weight: expected shape"),
        (Tensor.flatten, "weight: expected"),
    ],
    "bias": [(lambda b: b[1:], "bias: expected shape"), (Tensor.half, "bias: expected")],
    "lora": [((1.0,), "lora: expected a tuple")],
    "target": [
        (Tensor.float, "target: expected an integer dtype"),
        (lambda t: t[1:], "target: expected shape"),
        (lambda t: torch.full_like(t, VOCAB), "target: expected ids in [0, 24)"),
        (None, "target: expected a torch.Tensor"),
    ],
    "ids": [
        (Tensor.float, "ids: expected an integer dtype"),
        (lambda t: t[1:], "ids: expected shape"),
        (lambda t: torch.full_like(t, VOCAB), "ids: expected ids in [0, 24)"),
    ],
    "teacher_topk_ids": [
        (lambda t: t[..., 1:], "teacher_topk_ids: expected shape"),
        (lambda t: torch.full_like(t, VOCAB), "teacher_topk_ids: expected ids in [0, 24)"),
    ],
    "teacher_logprobs": [(lambda x: x[1:], "teacher_logprobs: expected shape")],
    "teacher_logits": [(lambda x: x[..., 1:], "teacher_logits: expected shape")],
    "mask": [
        (Tensor.float, "mask: expected a bool tensor"),
        (lambda m: m[1:], "mask: expected shape"),
    ],
    "temperature": [
        (0.0, "temperature: expected a finite number > 0"),
        (float("nan"), "temperature: expected a finite number > 0"),
        ("hot", "temperature: expected"),
        (torch.ones(5), "temperature: expected a number or a tensor that broadcasts"),
        (torch.zeros(6, 2), "temperature: expected finite numbers > 0"),
    ],
    "vocab_size": [
        (0, "vocab_size: expected 1 to 24"),
        (VOCAB + 1, "vocab_size: expected 1 to 24"),
    ],
    "chunk_size": [(0, "chunk_size: expected None or an int >= 1"), (2.0, "chunk_size: expected")],
    "backend": [("cuda", "backend: expected one of")],
    "tp_group": [("tp", "tp_group: expected a torch.distributed ProcessGroup"), (None, "tp_group")],
    "softcap": [(-1.0, "softcap: expected")],
    "logit_scale": [(float("nan"), "logit_scale: expected")],
    "logits_dtype": [(torch.int8, "logits_dtype: expected")],
    "compact": [("yes", "compact: expected True or False")],
    "rows": [
        ([0], "rows: expected a torch.Tensor"),
        (torch.tensor([0.0]), "rows: expected int64"),
        (torch.tensor([[0]]), "rows: expected int64 of shape [m]"),
        (torch.tensor([0, -1]), "rows: expected indices in [0, 12), got [-1]"),
        (torch.tensor([12]), "rows: expected indices in [0, 12), got [12]"),
    ],
    "sequence_parallel": [("yes", "sequence_parallel: expected True or False")],
    "gradient_accumulation_fusion": [(True, "expected weight.main_grad")],
    "entropy": [(1, "entropy: expected True or False")],
    "label_smoothing": [(1.0, "label_smoothing: expected")],
    "kind": [("sideways", "kind: expected one of")],
    "beta": [(1.0, "beta: expected a number in (0, 1)")],
}

# The same of several together.
MISTAKES_TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"rows": torch.arange(12), "compact": True}, "compact: expected False with rows"),
    ({"rows": torch.arange(5)}, "expected"),  # whatever there is for each of 12 tokens
]
