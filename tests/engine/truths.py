"""What each operation gives, in plain torch on one process; the table is in `tests/ops.py`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.engine.operation import Outputs, Side
from tests.helpers import oracles
from tests.helpers.oracles import finished_logits


def take(x: Tensor, ids: Tensor) -> Tensor:
    """`x[..., ids]`, with 0 for ids that are left out; ids `[...]` or `[..., k]`."""
    column = ids.clamp(min=0)
    if ids.dim() < x.dim():
        return x.gather(-1, column.unsqueeze(-1)).squeeze(-1)
    return x.gather(-1, column)


def entropy_of(logp: Tensor) -> Tensor:
    return -(logp.exp() * logp.masked_fill(logp.isneginf(), 0.0)).sum(-1)


def statistics(z: Tensor, side: Side, o: dict[str, Any]) -> Outputs:
    smoothing = o.get("label_smoothing", 0.0)
    found = oracles.statistics(z, side["target"].clamp(min=0), label_smoothing=smoothing)
    asked = {"logprobs", "lse", *(name for name in found if o.get(name))}
    return {name: x for name, x in found.items() if name in asked}


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
    logp, logq = z[..., : o["vocab_size"]].log_softmax(-1), teacher_logprobs(z, side, o)
    return {"values": divergence(logp, logq, o.get("kind", "cross entropy"), o.get("beta", 0.5))}


def teacher_logprobs(z: Tensor, side: Side, o: dict[str, Any]) -> Tensor:
    """Of the true vocabulary, from the teacher's logits or hidden states (`teacher_of`)."""
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
        bias=teacher_bias(side, o),
        logit_scale=o.get("teacher_logit_scale", 1.0),
        softcap=o.get("teacher_softcap"),
        temperature=temperature,
        dtype=z.dtype,
    )
    return teacher[..., : o["vocab_size"]].log_softmax(-1)


def teacher_bias(side: Side, o: dict[str, Any]) -> Tensor | None:
    own, added = side.get("teacher_bias"), o["vocab_bias"]
    return added if own is None else own if added is None else own.to(added.dtype) + added


def topk_divergence(z: Tensor, side: Side, o: dict[str, Any]) -> Outputs:
    logp, logq = take(z.log_softmax(-1), side["ids"]), side["teacher_logprobs"].to(z.dtype)
    logq = logq - side["teacher_lse"].to(z.dtype).unsqueeze(-1) if "teacher_lse" in side else logq
    tail = o["tail"] or ("ignore" if o["generalized"] else "bin")
    if tail == "renormalize":
        logp, logq = logp.log_softmax(-1), logq.log_softmax(-1)
    elif tail == "bin":
        rest = [(1.0 - x.exp().sum(-1, keepdim=True)).clamp(min=1e-6).log() for x in (logp, logq)]
        logp, logq = torch.cat([logp, rest[0]], -1), torch.cat([logq, rest[1]], -1)
    return {"values": divergence(logp, logq, o["kind"], o["beta"], o["generalized"])}


def filtered(z: Tensor, side: Side, o: dict[str, Any]) -> Outputs:
    found, target = {}, side["target"]
    whole = z.log_softmax(-1)
    if o["full"]:
        found = {"full_logprobs": take(whole, target), "lse": z.logsumexp(-1)}
    if "kept_ids" not in side:
        found |= {"values": take(kept_logits(z, o).log_softmax(-1), target)}
        return found | undecided(z, o)
    kept = torch.zeros(z.shape[:-1].numel(), z.shape[-1], dtype=torch.bool)
    flat, bounds = side["kept_ids"]
    for row, (start, end) in enumerate(itertools.pairwise(bounds)):
        kept[row, flat[start:end]] = True
    kept, missing = kept.view(z.shape), (bounds.diff() == 0).view(z.shape[:-1])
    none = ~(kept & ~z.isneginf()).any(-1)  # of which log_softmax is NaN
    logp = z.masked_fill(~(kept | none.unsqueeze(-1)), -torch.inf).log_softmax(-1)
    values = take(logp, target).masked_fill(none, -torch.inf)
    found["values"] = unrecorded(values, take(whole, target), missing, side)
    if o["entropy"]:
        entropy = torch.where(none, 0.0, entropy_of(logp))
        found["kept_entropy"] = unrecorded(entropy, entropy_of(whole), missing, side)
        found |= {"entropy": entropy_of(whole)} if o["full"] else {}
    return found


def unrecorded(of_record: Tensor, of_whole: Tensor, missing: Tensor, side: Side) -> Tensor:
    """What rows without a record get instead."""
    fill = of_whole if side.get("missing") == "full" else torch.zeros_like(of_whole)
    return torch.where(missing, fill, of_record)


def kept_logits(z: Tensor, o: dict[str, Any]) -> Tensor:
    """-inf where min_p, top_k or top_p drops a column."""
    z = before_top_p(z, o)
    if o["top_p"] < 1.0:
        before, order = mass_before(z)
        dropped = before >= o["top_p"]
        z = z.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)
    return z


def mass_before(z: Tensor) -> tuple[Tensor, Tensor]:
    """(the probability of what is larger than each column, largest first; these columns)."""
    p, order = z.softmax(-1).sort(dim=-1, descending=True, stable=True)
    return p.cumsum(-1) - p, order


def undecided(z: Tensor, o: dict[str, Any]) -> Outputs:
    """Of which rows the rounding of a float32 sum decides what top_p keeps; of the truth alone."""
    if z.dtype != torch.float64 or o["top_p"] == 1.0:
        return {}
    before, _ = mass_before(before_top_p(z.detach(), o))
    return {"undecided": ((before - o["top_p"]).abs() < 1e-7).any(-1)}


def before_top_p(z: Tensor, o: dict[str, Any]) -> Tensor:
    """-inf where min_p or top_k drops a column."""
    if o["min_p"] > 0.0:
        logp = z.log_softmax(-1)
        few = logp.exp() < o["min_p"] * logp.amax(-1, keepdim=True).exp()
        # At exactly the limit no rounding decides.
        few &= logp < logp.amax(-1, keepdim=True) + math.log(o["min_p"])
        z = z.masked_fill(few, -torch.inf)
    if o["top_k"] is not None and 0 < o["top_k"] < z.shape[-1]:
        # One without probability is dropped too, and gets no gradient, where fewer than k have any.
        dropped = (z < z.topk(o["top_k"]).values[..., -1:]) | z.isneginf()
        z = z.masked_fill(dropped, -torch.inf)
    return z


def answered(z: Tensor, side: Side, o: dict[str, Any]) -> Outputs:
    found = statistics(z, side, o)
    values = z.log_softmax(-1) if o["log_softmax"] else z
    ids = side["candidate_ids"].expand(*z.shape[:-1], 3)
    found["candidates"] = take(values, ids)
    if o["topk"] is not None:
        top = z.sort(dim=-1, descending=True, stable=True).indices[..., : o["topk"]]
        found |= {"values": take(values, top), "ids": top}
    return found


def splitmix(state: Any, number: Any) -> Any:
    """The number-th output of SplitMix64 from a state; both uint64 arrays or integers."""
    state, number = (np.asarray(x).astype(np.uint64) for x in (state, number))
    with np.errstate(over="ignore"):  # modulo 2^64
        bits = state + number * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def drawn(z: Tensor, side: Side, o: dict[str, Any]) -> Outputs:
    logp = kept_logits(z, o).log_softmax(-1)
    flat = logp.reshape(-1, logp.shape[-1])
    seeds = torch.as_tensor(side["seed"]).expand(logp.shape[:-1]).reshape(-1, 1).numpy()
    row = o["first_row"] + np.arange(len(flat)).reshape(-1, 1)
    stream = splitmix(splitmix(seeds, 1), row + 1)
    bits = splitmix(stream, np.arange(1, flat.shape[1] + 1)) >> np.uint64(12)
    uniform = torch.from_numpy((bits.astype(np.float64) + 0.5) / 2.0**52)
    ids = (flat.double() - uniform.log().neg().log()).argmax(-1).view(logp.shape[:-1])
    return {"ids": ids, "logprobs": take(logp, ids)} | undecided(z, o)


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


def only(*names: str) -> Callable[[Tensor, Side, dict[str, Any]], Outputs]:
    """Some of the statistics' truth."""

    def truth(z: Tensor, side: Side, o: dict[str, Any]) -> Outputs:
        side = {"target": torch.zeros(z.shape[:-1], dtype=torch.int64)} | side
        found = statistics(z, side, o | dict.fromkeys(names, True))
        return {name: found[name] for name in names}

    return truth
