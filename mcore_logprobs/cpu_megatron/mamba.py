"""What Megatron's Mamba mixer calls from `mamba_ssm`, `causal_conv1d` and Transformer Engine.

Those packages need a GPU. Inside `cpu_runtime()` Megatron's own `MambaMixer` finds these functions
in their place: the same mathematics by plain torch, with autograd's own backward. The scan is
written in its quadratic form, whose memory grows with the square of the sequence: right for a
test's sequences, and for nothing longer than a few thousand tokens.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from mcore_logprobs.cpu_megatron.layers import token_positions


def split_conv1d_scan(
    zxbcdt: Tensor,  # [b, l, 2 * heads * d + 2 * ngroups * n + heads]
    conv1d_weight: Tensor,  # [heads * d + 2 * ngroups * n, width]
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,  # [heads]
    A: Tensor,  # [heads], negative
    D: Tensor,  # [heads]
    chunk_size: int,
    *,
    headdim: int,
    ngroups: int = 1,
    seq_idx: Tensor | None = None,  # [b, l]
    activation: str = "silu",
    norm_before_gate: bool = False,
    **other: object,
) -> Tensor:
    """`mamba_split_conv1d_scan_combined`: [b, l, heads * d], gated by silu(z) and not normed.

    Of each sequence (a row, or the tokens of one number in `seq_idx`), with x, B and C through a
    causal convolution and silu, and dt through softplus:

        state[t] = exp(dt[t] * A) * state[t-1] + dt[t] * x[t] B[t]^T
        y[t] = (state[t] C[t] + D * x[t]) * silu(z[t])

    The quadratic form: state[t] C[t] = sum over s <= t of decay(s, t) * (C[t] . B[s]) * dt[s] x[s]
    with decay(s, t) = exp(sum of dt * A from s + 1 to t).
    `chunk_size` changes nothing here.

    Raises:
        ValueError: an option of the kernel that Megatron's mixer does not use.
    """
    asked = {k: v for k, v in other.items() if v is not None and k != "state_dtype"}
    if activation != "silu" or norm_before_gate or asked or D.dim() != 1:
        raise ValueError(
            "the CPU scan does activation='silu', norm_before_gate=False and D [heads]; got "
            f"{activation!r}, {norm_before_gate}, {list(D.shape)} and {sorted(asked)}"
        )
    heads = D.shape[0]
    inner = heads * headdim
    width = torch.promote_types(zxbcdt.dtype, torch.float32)
    z, xbc, dt = zxbcdt.to(width).split((inner, conv1d_weight.shape[0], heads), dim=-1)
    same = _same_sequence(seq_idx, zxbcdt)
    xbc = nn.functional.silu(_causal_conv1d(xbc, conv1d_weight.to(width), conv1d_bias, same))
    states = (xbc.shape[-1] - inner) // 2
    x, b, c = xbc.split((inner, states, states), dim=-1)
    x = x.unflatten(-1, (heads, headdim))  # [b, l, heads, d]
    b, c = (g.unflatten(-1, (ngroups, -1)) for g in (b, c))  # [b, l, ngroups, n]

    dt = nn.functional.softplus(dt + dt_bias.to(width))  # [b, l, heads]
    total = (dt * A.to(width)).cumsum(1).transpose(1, 2)  # [b, heads, l]
    decay = total[..., :, None] - total[..., None, :]  # [b, heads, t, s]
    length = x.shape[1]
    reaches = torch.ones(length, length, dtype=torch.bool, device=x.device).tril() & same
    decay = decay.masked_fill(~reaches[:, None], -torch.inf).exp()
    match = torch.einsum("btgn,bsgn->bgts", c, b).repeat_interleave(heads // ngroups, dim=1)
    y = torch.einsum("bhts,bshp->bthp", match * decay, x * dt[..., None])
    y = y + x * D.to(width)[:, None]
    return (y.flatten(2) * nn.functional.silu(z)).to(zxbcdt.dtype)


def _same_sequence(seq_idx: Tensor | None, like: Tensor) -> Tensor:
    """[b or 1, l, l]: whether two tokens are of one sequence."""
    if seq_idx is None:
        length = like.shape[1]
        return torch.ones(1, length, length, dtype=torch.bool, device=like.device)
    return seq_idx[:, :, None] == seq_idx[:, None, :]


def _causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, same: Tensor) -> Tensor:
    """[b, l, channels]: each channel with its own filter, whose last tap is the token itself."""
    taps = weight.shape[1]
    out = x * weight[:, -1]
    for back in range(1, min(taps, x.shape[1])):
        kept = same.diagonal(-back, dim1=1, dim2=2)[..., None]  # [b or 1, l - back, 1]
        past = x[:, :-back] * weight[:, -1 - back] * kept
        out = out + nn.functional.pad(past, (0, 0, back, 0))
    return out if bias is None else out + bias.to(out.dtype)


class CpuGatedNorm(nn.Module):
    """In place of the mixer's norm: an RMS norm of each group of `group_size` channels."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.group_size = group_size or hidden_size
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        normed = nn.functional.rms_norm(groups, (self.group_size,), eps=self.eps)
        return normed.flatten(-2) * self.weight

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: object = (), metadata: object = None
    ) -> dict[str, object]:
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


def partitioned_indices(cu_seqlens: Tensor, tokens: int, cp_size: int, cp_rank: int) -> Tensor:
    """Transformer Engine's `thd_get_partitioned_indices`: which of the packed tokens a CP rank
    holds, in its order."""
    packed = SimpleNamespace(cu_seqlens_q=cu_seqlens, cu_seqlens_q_padded=cu_seqlens)
    seq, position = token_positions(
        tokens // cp_size, cp_rank, cp_size, packed, torch.device(cu_seqlens.device)
    )
    starts = torch.cat((cu_seqlens, cu_seqlens[-1:])).long()
    return starts[seq] + position


def replacements(mixer: object, context_parallel: object) -> list[tuple[object, str, object]]:
    """What `cpu_runtime` sets in Megatron's mamba_mixer and mamba_context_parallel modules."""
    table: list[tuple[object, str, object]] = [
        (mixer, "HAVE_MAMBA_SSM", True),
        (mixer, "MAMBA_HAS_STATE_DTYPE", False),
        (mixer, "ExtendedRMSNorm", CpuGatedNorm),
        (mixer, "RMSNormGated", CpuGatedNorm),
        (mixer, "mamba_split_conv1d_scan_combined", split_conv1d_scan),
        (mixer, "_check_mamba_sequence_packing_support", lambda **asked: (True, None)),
        (context_parallel, "tex", _TransformerEngineTorch),
        (context_parallel, "is_te_min_version", lambda version: True),
    ]
    return [row for row in table if hasattr(row[0], row[1]) or row[1].startswith("mamba_split")]


class _TransformerEngineTorch:
    thd_get_partitioned_indices = staticmethod(partitioned_indices)
