"""Random calls: what is drawn, and the same in float64 by plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LAYOUTS = ("contiguous", "transposed", "sliced rows", "sliced columns", "expanded batch")
OUTPUTS = ("logprobs", "entropy", "sum_pi_squared")


@dataclass(frozen=True)
class Call:
    """One call on logits `[a, b, vocab]`; everything that is random follows from the seed."""

    seed: int
    lead: tuple[int, int]
    vocab: int
    dtype: torch.dtype
    layout: str
    spread: float
    offset: float
    blocked: bool
    temperature: float | None
    vocab_size: int | None
    chunk_size: int | None

    def tensors(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(logits, targets, an upstream gradient for each output)."""
        made = torch.Generator().manual_seed(self.seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=made, dtype=torch.float64)

        a, b = self.lead
        logits = (self.spread * randn(a, b, self.vocab) + self.offset).to(self.dtype)
        if self.layout == "transposed":
            logits = logits.transpose(0, 1).contiguous().transpose(0, 1)
        elif self.layout == "sliced rows":
            logits = torch.cat([logits, logits], 1)[:, :b]
        elif self.layout == "sliced columns":
            logits = torch.cat([logits, logits], -1)[..., : self.vocab]
        elif self.layout == "expanded batch":
            logits = logits[:1].expand(a, b, self.vocab)
        true = self.vocab_size or self.vocab
        target = torch.randint(0, true, self.lead, generator=made)
        if self.blocked and self.layout != "expanded batch":
            block = torch.rand(logits.shape, generator=made) < 0.3
            block.scatter_(-1, target.unsqueeze(-1), False)
            logits = logits.masked_fill(block, -torch.inf)
        target[torch.rand(self.lead, generator=made) < 0.2] = -100
        return logits, target, {name: randn(*self.lead) for name in OUTPUTS}

    def own_temperature(self) -> float | Tensor:
        if self.temperature is not None:
            return self.temperature
        made = torch.Generator().manual_seed(self.seed + 1)
        return 0.5 + torch.rand(self.lead, generator=made)

    def options(self) -> dict[str, Any]:
        return {
            "temperature": self.own_temperature(),
            "vocab_size": self.vocab_size,
            "chunk_size": self.chunk_size,
        }

    def scale(self) -> float:
        """How large finished logits are: errors are relative to it."""
        return 1.0 + 2.0 * (abs(self.offset) + 5.0 * self.spread)


def calls(**fixed: Any) -> st.SearchStrategy[Call]:
    """Any call; `fixed` replaces what is drawn for a field."""

    @st.composite
    def build(draw: st.DrawFn) -> Call:
        vocab = 2 * draw(st.integers(1, 20))
        drawn = {
            "seed": draw(st.integers(0, 2**31)),
            "lead": (draw(st.integers(0, 4)), draw(st.integers(1, 4))),
            "vocab": vocab,
            "dtype": draw(st.sampled_from(DTYPES)),
            "layout": draw(st.sampled_from(LAYOUTS)),
            "spread": draw(st.sampled_from([0.0, 0.3, 3.0, 20.0])),
            "offset": draw(st.sampled_from([0.0, 100.0, -1000.0])),
            "blocked": draw(st.booleans()),
            "temperature": draw(st.sampled_from([None, 1.0, 0.6, 2.5])),
            "vocab_size": draw(st.none() | st.integers(1, vocab)),
            "chunk_size": draw(st.sampled_from([None, 1, 3])),
        }
        return Call(**(drawn | fixed))

    return build()


def finished(logits: Tensor, temperature: float | Tensor, vocab_size: int | None) -> Tensor:
    """`[..., V]` in float64: over the temperature, masked past vocab_size."""
    if isinstance(temperature, Tensor):
        temperature = temperature.double().unsqueeze(-1)
    z = logits.double() / temperature
    if vocab_size is not None:
        z = z.masked_fill(torch.arange(z.shape[-1]) >= vocab_size, -torch.inf)
    return z


def truth(z: Tensor, target: Tensor) -> dict[str, Tensor]:
    """The outputs and the rank in float64, ignored rows blanked; differentiable."""
    keep = target != -100
    index = target.clamp(min=0).unsqueeze(-1)
    logp = z.log_softmax(-1)
    p, finite = logp.exp(), logp.masked_fill(logp.isinf(), 0.0)
    found = {
        "logprobs": logp.gather(-1, index).squeeze(-1),
        "entropy": -(p * finite).sum(-1),
        "sum_pi_squared": (p * p).sum(-1),
    }
    found = {name: value.masked_fill(~keep, 0.0) for name, value in found.items()}
    rank = (z > z.gather(-1, index)).sum(-1).masked_fill(~keep, -1)
    return found | {"target_rank": rank}


def weighted(outputs: dict[str, Tensor], upstream: dict[str, Tensor]) -> Tensor:
    """One scalar of all outputs, with a gradient of its own for each token and output."""
    return sum((outputs[n].double() * upstream[n]).sum() for n in OUTPUTS)  # type: ignore[return-value]


def tolerance(call: Call) -> dict[str, float]:
    """Of values: a few roundings of the accumulator, of numbers as large as the logits."""
    eps = torch.finfo(torch.float64 if call.dtype == torch.float64 else torch.float32).eps
    return {"rtol": 32 * eps, "atol": 32 * eps * call.scale()}


def gradient_tolerance(call: Call, upstream: dict[str, Tensor]) -> dict[str, float]:
    """As `tolerance`, and one rounding to the gradient's dtype."""
    eps, values = torch.finfo(call.dtype).eps, tolerance(call)
    largest = max((float(u.abs().max()) for u in upstream.values() if u.numel()), default=1.0)
    # The entropy's gradient is a product with log p, and 1 / temperature is at most 2.
    tiny = torch.finfo(call.dtype).tiny
    return {
        "rtol": 2 * eps + values["rtol"],
        "atol": 4 * largest * call.scale() * values["atol"] + tiny,
    }
