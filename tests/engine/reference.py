"""What plain torch finds for a case: outputs and gradients, in float64 or as the yardstick."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.engine.cases import Case, Problem, kept_rows
from tests.engine.operation import VOCAB
from tests.helpers.oracles import finished_logits


def upstream_gradients(
    case: Case, shapes: dict[str, tuple[int, ...]], ranks: int = 1
) -> dict[str, Tensor]:
    """Whole, in float64, by the names of outputs of these shapes on each rank."""
    s, op, generator = case.setting, case.operation, case.generator("upstream")
    names = [name for name in op.differentiable if name in shapes]
    if s.get("upstream") == "one output":
        names = [names[int(torch.randint(len(names), (), generator=generator))]]
    found = {}
    for name in names:
        shape = list(shapes[name])
        if op.output_dim is not None:
            shape[op.output_dim] *= ranks
        g = torch.randn(shape, generator=generator, dtype=torch.float64)
        if s.get("upstream") == "some rows" and shape:
            g[torch.rand(shape[0], generator=generator) < 0.5] = 0.0
        found[name] = g
    return found


def counted(case: Case, output: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """An output and its gradient, 0 where the output is -inf and such outputs get none."""
    return output, g.to(output.device, output.dtype).masked_fill(
        output.isneginf() & (not case.operation.infinite), 0
    )


def wide(case: Case) -> torch.dtype:
    return torch.float64 if case.setting["dtype"] == "float64" else torch.float32


# Logits that the reference makes at a time.
_BLOCK = 1 << 21
# Tensors of `side` of which a token has no part of its own.
_OF_NO_TOKEN = ("teacher_weight", "teacher_bias")


def reference(case: Case, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(outputs, gradients) in plain torch on one process, computed in the dtype.

    Float64 is the truth: there inputs are taken as they are, and gradients are not rounded. Some
    tokens are computed at a time, so that real vocabularies fit.
    """
    s, problem, exact = case.setting, Problem(case), dtype == torch.float64
    whole = {name: x.to(dtype) for name, x in problem.head.items()}
    first = next(iter(whole))
    whole[first] = whole[first].masked_fill(problem.unread, 0.0)
    if problem.rows is not None:
        whole[first] = whole[first].flatten(0, -2)
    parts: dict[str, list[Tensor]] = {}
    grads = {name: torch.zeros_like(x) for name, x in whole.items()}
    incoming: dict[str, Tensor] | None = None
    for part in token_blocks(problem, s.get("vocab", VOCAB)):
        own_rows = part if problem.rows is None else problem.rows[part]
        x = {name: w[own_rows] if name == first else w for name, w in whole.items()}
        x = {name: w.detach().requires_grad_() for name, w in x.items()}
        outputs = _reference_block(case, problem, x, part, dtype)
        lead = len(problem.lead)
        if incoming is None:
            shapes = {n: y.dim() and (*problem.lead, *y.shape[lead:]) for n, y in outputs.items()}
            incoming = upstream_gradients(case, {n: shape or () for n, shape in shapes.items()})
        roots = [
            counted(case, outputs[name], g[part] if g.dim() else g) for name, g in incoming.items()
        ]
        if roots:
            torch.autograd.backward(*map(list, zip(*roots, strict=True)))
        for name, leaf in x.items():
            if leaf.grad is None:
                grads.pop(name, None)
            elif name != first:
                grads[name] += leaf.grad
            elif problem.rows is None:
                grads[name][part] = leaf.grad
            else:
                grads[name].index_add_(0, own_rows, leaf.grad)
        for name, value in outputs.items():
            parts.setdefault(name, []).append(value.detach())
    if problem.rows is not None and first in grads:
        grads[first] = grads[first].view(problem.head[first].shape)
    if not exact:
        grads = {name: g.to(problem.head[name].dtype) for name, g in grads.items()}
    if s.get("gradient_accumulation_fusion") and incoming:
        grads["weight"] = grads["weight"].to(dtype) + 1.0
    grads.pop(s.get("frozen"), None)
    found = {n: torch.cat(ys) if ys[0].dim() else sum(ys[1:], ys[0]) for n, ys in parts.items()}
    return found, grads


def token_blocks(problem: Problem, columns: int) -> list[Any]:
    """Slices of the first dimension of the tokens, or ... for all of them."""
    rows = max(1, _BLOCK // max(1, columns * math.prod(problem.lead[1:])))
    if not problem.lead or problem.lead[0] <= rows or "kept_ids" in problem.side:
        return [...]
    count = problem.lead[0]
    return [slice(at, min(at + rows, count)) for at in range(0, count, rows)]


def _reference_block(
    case: Case, problem: Problem, x: dict[str, Tensor], part: Any, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The outputs of some tokens: `part` of the first dimension; x has their part of the head."""
    s, op, exact = case.setting, case.operation, dtype == torch.float64
    side = dict(problem.side)
    for name, value in side.items():
        if isinstance(value, Tensor):
            own = name not in _OF_NO_TOKEN and not (
                name == "teacher_hidden" and problem.rows is not None
            )
            side[name] = (value[part] if own and value.dim() else value).nan_to_num(0.0)
    rounding = None
    if s.get("logits_dtype", "float32") != "float32":
        rounding = getattr(torch, s["logits_dtype"])
    if case.source == "logits":
        raw = x["logits"]
    else:
        raw = x["hidden"] @ x["weight"].t()
        if "A" in x:
            raw = raw + 0.5 * (x["hidden"] @ x["A"].t()) @ x["B"].t()
        if rounding is not None:
            rounded = raw.to(rounding).to(dtype)
            raw = raw + (rounded - raw).detach() if exact else rounded
    own = problem.temperature
    if isinstance(own, Tensor):
        own = own.expand(problem.lead)[part].unsqueeze(-1).to(dtype)
    added = problem.bias_of_ids()
    bias = x.get("bias")
    if bias is not None and bias.requires_grad and not exact and s.get("softcap") is None:
        # A head's logits have a gradient in its operands' dtype, of which the bias' is a sum. With
        # a softcap between them the bias has its own, which is not rounded.
        operands = torch.bfloat16 if s["autocast"] else getattr(torch, s["dtype"])
        bias = bias.expand(raw.shape)
        bias.register_hook(lambda g: g.to(operands).to(dtype))
    if added is not None:
        bias = added.to(dtype) if bias is None else bias + added.to(dtype)
    z = finished_logits(
        raw,
        bias=bias,
        logit_scale=s.get("logit_scale", 1.0),
        softcap=s.get("softcap"),
        temperature=own,  # type: ignore[arg-type]
        vocab_size=s.get("vocab_size"),
        dtype=dtype,
    )
    options = {name: s[name] for name in op.options}
    numbers = {name: v for name, v in side.items() if not isinstance(v, Tensor | tuple)}
    told = {"temperature": own, "vocab_size": s.get("vocab_size"), "logits_dtype": rounding}
    told["vocab_bias"] = None if added is None else added.to(dtype)
    told["rows"] = None if problem.rows is None else problem.rows[part]
    told["first_row"] = 0 if part is ... else part.start * math.prod(problem.lead[1:])
    outputs = op.truth(z, side, options | numbers | told)
    keep = kept_rows(side)
    for name, value in outputs.items():
        fill = op.left_out.get(name, 0)
        if keep is not None and fill is not None:
            left_out = ~keep.reshape(keep.shape + (1,) * (value.dim() - keep.dim()))
            outputs[name] = value.masked_fill(left_out, fill)
    return outputs
