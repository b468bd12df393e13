"""Logits in 16 bits: how far each is below its row's largest, in equal steps.

    code = round((max y - y) / step)        y = max y - step * code

The steps of a row divide the span of its logits, or the RANGE below its largest where they span
more, into LEVELS: z is off by at most min(span, RANGE) / (2 LEVELS), which is at most 2^-11, and so
is each probability, relatively; both by a rounding of y more, which is as much for |z| near 8,000.
bfloat16 probabilities are off by up to 2^-9; in these codes rows whose logits are close keep their
differences too. A logit below the range stays there, at a probability of e^-64; -inf has a code of
its own. A row with NaN or +inf has no meaningful code: its gradient is NaN whatever its logits are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_logprobs.kernels.chunk import Chunk, row_chunks, times_multiplier

LEVELS = 65534
RANGE = 64.0  # nats
_LEAST = 1e-20  # nats: the span of equal logits, so that their step is not 0
OFFSET = 32768  # codes from 0 to LEVELS + 1 as int16


def encode(chunk: Chunk, *, out: Tensor, chunk_size: int) -> Tensor:
    """Codes of a chunk's raw float32 logits into out, int16 `[n, v]`.

    Args:
        chunk: without bias and softcap, whose logits are all valid.
        chunk_size: rows at a time.

    Returns:
        float32 `[2, n]`: each row's largest logit, and its step.
    """
    scale = chunk.logits.new_empty(2, out.shape[0])
    for part in row_chunks(out.shape[0], chunk_size):
        step_chunk = chunk.rows(part)
        y, slope = step_chunk.logits, step_chunk.processing.slope
        low, top = torch.aminmax(y, dim=-1)
        span = times_multiplier(top - low, slope)
        step = torch.where(span < RANGE, span, RANGE).clamp_(min=_LEAST) / LEVELS
        step = step / (slope.to(step.dtype) if isinstance(slope, Tensor) else slope)
        scale[0, part], scale[1, part] = top, step
        below = torch.sub(top.unsqueeze(-1), y).div_(step.unsqueeze(-1)).round_()
        below.clamp_(max=LEVELS).masked_fill_(y.isneginf(), LEVELS + 1)
        out[part] = below.sub_(OFFSET)
    return scale


def decode(codes: Tensor, scale: Tensor, *, out: Tensor, chunk_size: int) -> None:
    """The logits of codes `[n, v]` and their scale `[2, n]` into out, float32 `[n, v]`."""
    for part in row_chunks(out.shape[0], chunk_size):
        top, step = scale[:, part].unsqueeze(-1)
        below = codes[part].to(out.dtype).add_(OFFSET)
        none = below > LEVELS
        out[part] = torch.sub(top, below.mul_(step)).masked_fill_(none, -torch.inf)
