"""Other implementations, as far as they import here; for those that do not, the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mcore_logprobs.groups import megatron_parallel_state

Peers = dict[str, Callable[..., Tensor]]
_started: list[Callable[[], None]] = []  # what undoes the groups made for Megatron's sake


def _megatron_cross_entropies(target: Tensor) -> Peers:
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    if not dist.is_initialized():
        backend = "nccl" if target.is_cuda else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        _started.append(dist.destroy_process_group)
    if megatron_parallel_state() is None:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
        _started.append(parallel_state.destroy_model_parallel)
    group = parallel_state.get_tensor_model_parallel_group()
    column = target.unsqueeze(1)  # Megatron's layout is [s, b]
    return {
        "megatron": lambda z: vocab_parallel_cross_entropy(z.unsqueeze(1), column),
        "megatron fused": lambda z: fused_vocab_parallel_cross_entropy(
            z.unsqueeze(1), column, group
        ),
    }


def _torch_cross_entropy(target: Tensor) -> Peers:
    _one_rank()
    return {"torch cross_entropy": lambda z: F.cross_entropy(z.float(), target, reduction="none")}


def compiled(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.compile of a plain formula, which knows only one rank."""
    function = torch.compile(plain, dynamic=False)

    def run(*inputs: Tensor) -> Tensor:
        _one_rank()
        return function(*inputs)

    return run


def _liger_cross_entropy(target: Tensor) -> Peers:
    _one_rank()
    _cuda(target)
    from liger_kernel.transformers.functional import liger_cross_entropy

    return {"liger": lambda z: liger_cross_entropy(z, target, reduction="sum")}


def _quack_cross_entropy(target: Tensor) -> Peers:
    _one_rank()
    _cuda(target)
    from quack.cross_entropy import cross_entropy

    return {"quack": lambda z: cross_entropy(z, target, reduction="none")}


def _te_cross_entropy(target: Tensor) -> Peers:
    _cuda(target)
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    group = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
    column = target.unsqueeze(1)
    return {
        "transformer-engine": lambda z: parallel_cross_entropy(
            z.unsqueeze(1), column, 0.0, False, group
        )
    }


def _liger_linear(target: Tensor) -> Peers:
    _one_rank()
    _cuda(target)
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return {
        "liger fused linear": lambda h, w: liger_fused_linear_cross_entropy(
            h, w, target, reduction="sum"
        )
    }


def _cut_cross_entropy(target: Tensor) -> Peers:
    _one_rank()
    _cuda(target)
    from cut_cross_entropy import linear_cross_entropy

    return {
        "cut-cross-entropy": lambda h, w: linear_cross_entropy(h, w, target, reduction="none"),
        # Its default skips small gradient entries; this keeps all (25.1, the release on PyPI, has
        # no "cce_exact", as later ones have).
        "cut-cross-entropy exact": lambda h, w: linear_cross_entropy(
            h, w, target, reduction="none", filter_eps=None
        ),
    }


def _torch_linear(target: Tensor) -> Peers:
    _one_rank()
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no functional.linear_cross_entropy")
    function = F.linear_cross_entropy
    return {"torch linear_cross_entropy": lambda h, w: function(h, w, target, reduction="sum")}


def stop_megatron() -> None:
    """Undo the process groups that were made for Megatron's cross entropies."""
    while _started:
        _started.pop()()


def logits_peers(target: Tensor) -> tuple[Peers, dict[str, str]]:
    """Functions `logits [n, V/TP] -> loss [n] or scalar`; and what is unavailable.

    Some write over float32 logits in the forward, or the gradient over them.
    """
    return _collect(
        target,
        {
            "megatron": _megatron_cross_entropies,
            "torch cross_entropy": _torch_cross_entropy,
            "liger": _liger_cross_entropy,
            "quack": _quack_cross_entropy,
            "transformer-engine": _te_cross_entropy,
        },
    )


def linear_peers(target: Tensor) -> tuple[Peers, dict[str, str]]:
    """Functions `(hidden [n, h], weight [V, h]) -> loss [n] or scalar`; and what is unavailable."""
    return _collect(
        target,
        {
            "torch linear_cross_entropy": _torch_linear,
            "liger fused linear": _liger_linear,
            "cut-cross-entropy": _cut_cross_entropy,
        },
    )


def _collect(target: Tensor, makers: dict[str, Callable[[Tensor], Peers]]) -> Any:
    peers: Peers = {}
    absent: dict[str, str] = {}
    for name, make in makers.items():
        try:
            peers.update(make(target))
        except Exception as error:  # whatever a foreign import raises is the reason
            absent[name] = f"{type(error).__name__}: {error}"[:160]
    return peers, absent


def _one_rank() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError("works on one rank only")


def _cuda(target: Tensor) -> None:
    if not target.is_cuda:
        raise RuntimeError("works on CUDA only")
