"""Layers with which a real Megatron GPTModel runs on CPU: attention under CP and packing, norms.

`CpuCoreAttention` takes the place of Megatron's local core attention, which refuses context
parallelism and packed sequences; `CpuNorm` that of its torch norms, which refuse sequence
parallelism. Neither is used where a GPU is present.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_logprobs.collectives import GroupContext

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig


class CpuCoreAttention(nn.Module):
    """Causal grouped-query attention by torch's `scaled_dot_product_attention`.

    An attention_mask (True: not attended) takes the place of the causal one, as in Megatron's own
    core attention.

    Shape:
        query [s, b, heads/TP, d], key [s, b, groups/TP, d], value [s, b, groups/TP, dv]
        -> [s, b, heads/TP * dv]; packed (`packed_seq_params`): the same with [t] for [s, b].
        Multi-latent attention has another dv than d. Under context parallelism these are the
        rank's zigzag shard.

    Collectives: with CP > 1, one all-gather of key and value together in forward, one
    reduce-scatter in backward. Each rank then holds all keys of its query heads, so that only the
    mask has to know about the zigzag order.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: object = None,
        **unused: object,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        for name, ok in {
            f"attention_dropout={dropout}": dropout == 0.0,
            f"window_size={config.window_size}": config.window_size is None,
            "apply_query_key_layer_scaling": not config.apply_query_key_layer_scaling,
            "softmax_type": getattr(config, "softmax_type", "vanilla") == "vanilla",
            f"attention_type={attention_type}": attention_type == "self",
        }.items():
            if not ok:
                raise ValueError(f"the CPU core attention does not do {name}")
        self.softmax_scale = softmax_scale
        self.attn_mask_type = attn_mask_type
        self._cp_group = getattr(pg_collection, "cp", None)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: object = None,
        **unused: object,
    ) -> Tensor:
        mask_type = getattr(attn_mask_type or self.attn_mask_type, "name", "causal")
        if mask_type not in ("causal", "padding_causal") or attention_bias is not None:
            raise ValueError(
                "the CPU core attention is causal without a bias; expected mask type causal or "
                f"padding_causal, got {mask_type}, attention_bias={attention_bias is not None}"
            )
        packed = packed_seq_params is not None
        if packed:  # thd is one long row: [t, heads, d] -> [t, 1, heads, d]
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        cp_size, cp_rank = 1, 0
        cp_group = self._group_of(packed_seq_params)
        if cp_group is not None and cp_group.size() > 1:
            cp_size, cp_rank = cp_group.size(), cp_group.rank()
            kv = _GatherSequence.apply(torch.cat((key, value), dim=-1), cp_group)
            key, value = kv.split((key.shape[-1], value.shape[-1]), dim=-1)

        mask = None if attention_mask is None else ~attention_mask
        if packed or cp_size > 1:
            if mask is not None:
                raise ValueError(
                    "attention_mask: expected None with packed sequences or context parallelism, "
                    f"got shape {tuple(mask.shape)}"
                )
            ranks = [
                token_positions(query.shape[0], r, cp_size, packed_seq_params, query.device)
                for r in range(cp_size)
            ]
            q_seq, q_pos = ranks[cp_rank]
            k_seq = torch.cat([seq for seq, _ in ranks])
            k_pos = torch.cat([pos for _, pos in ranks])
            # [sq, sk]: the same sequence, and not after the query.
            mask = (q_seq[:, None] == k_seq) & (q_pos[:, None] >= k_pos)

        out = nn.functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),  # [b, heads, s, d]
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        out = out.permute(2, 0, 1, 3).flatten(2)  # [s, b, heads * d]
        return out.squeeze(1).contiguous() if packed else out.contiguous()

    def _group_of(self, packed_seq_params: PackedSeqParams | None) -> dist.ProcessGroup | None:
        """The call's own group where it brings one (dynamic CP), as Transformer Engine takes it."""
        own = getattr(packed_seq_params, "cp_group", None)
        if own is None and getattr(packed_seq_params, "local_cp_size", None) is None:
            return self._cp_group
        return own


def token_positions(
    local_len: int,
    cp_rank: int,
    cp_size: int,
    packed_seq_params: PackedSeqParams | None,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """(sequence number, position in it) of each token that CP rank `cp_rank` holds.

    Zigzag: a sequence is cut into 2*CP pieces and rank r holds pieces r and 2*CP-1-r; packed
    sequences are cut one by one. Written on its own and not by `mcore_logprobs.context_parallel`,
    so that the model under test is an independent witness of that order.
    """
    index = torch.arange(local_len, device=device)
    if packed_seq_params is None:
        seq = torch.zeros_like(index)
        start = torch.zeros_like(index)
        length = torch.full_like(index, local_len)
    else:
        cu = packed_seq_params.cu_seqlens_q_padded
        if cu is None:
            cu = packed_seq_params.cu_seqlens_q
        local_cu = cu.to(device=device, dtype=torch.int64) // cp_size
        lengths = local_cu.diff()
        seq = torch.searchsorted(local_cu, index, right=True) - 1
        # Rows past the last sequence are padding of the whole batch: a sequence of their own.
        seq = seq.clamp(max=lengths.numel())
        start = local_cu[seq]
        tail = torch.clamp(local_len - local_cu[-1:], min=1)
        length = torch.cat((lengths, tail))[seq]
    offset = index - start
    if cp_size == 1:
        return seq, offset
    half = length // 2
    second = offset >= half
    piece = torch.where(second, 2 * cp_size - 1 - cp_rank, cp_rank)
    return seq, piece * half + offset - half * second


class _GatherSequence(torch.autograd.Function):
    """[s/CP, ...] -> [s, ...] in rank order; backward sums and scatters the gradients."""

    @staticmethod
    def forward(ctx: GroupContext, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: GroupContext, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        out = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


class CpuNorm:
    """Builds torch's LayerNorm or RMSNorm, as `config.normalization` says, for Megatron.

    With sequence parallelism every TP rank normalizes its own tokens, so the weight's gradient is
    a part of the sum: the `sequence_parallel` mark makes Megatron's `finalize_model_grads` add the
    parts up.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> nn.Module:
        kinds = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}
        if config.normalization not in kinds or config.layernorm_zero_centered_gamma:
            raise ValueError(
                f"the CPU norm is one of {sorted(kinds)} without zero-centered gamma, got "
                f"{config.normalization}, zero-centered: {config.layernorm_zero_centered_gamma}"
            )
        norm = kinds[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
