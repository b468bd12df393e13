"""The optimizer step: torch's AdamW on CPU, Megatron's own optimizer on a GPU.

Megatron's optimizers ask for CUDA tensors (`cpu_megatron.training.cpu_devices` lets them run on a
CPU, in tests). On CPU, everything before the step is Megatron's here (DDP's gradient buffers,
finalize_model_grads); the step itself is torch's, without shims.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from .config import OptimizerSection, RunConfig, SetupError


def make_optimizer(config: RunConfig, model: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return CpuAdamW(config.optimizer, model)
    return GpuOptimizer(config.optimizer, model, getattr(torch, config.model.dtype))


class CpuAdamW:
    """torch.optim.AdamW over the gradients that Megatron's DDP summed into `main_grad`.

    Steps of a bfloat16 model are made on float32 copies of its parameters: a step is mostly smaller
    than the last bit of what it changes.
    """

    def __init__(self, section: OptimizerSection, model: Any) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self.params]
        self.clip_grad = section.clip_grad
        betas, decay = (section.beta1, section.beta2), section.weight_decay
        self.adamw = torch.optim.AdamW(self.masters, section.lr, betas, weight_decay=decay)

    def state_dict(self) -> dict[str, Any]:
        pairs = zip(self.params, self.masters, strict=True)
        copies = {i: master for i, (p, master) in enumerate(pairs) if master is not p}
        return self.adamw.state_dict() | {"masters": copies}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict({key: state[key] for key in ("state", "param_groups")})
        saved = state.get("masters", {})  # none of a checkpoint from before there were any
        for i, (param, master) in enumerate(zip(self.params, self.masters, strict=True)):
            if master is not param:
                master.copy_(saved.get(i, param.detach()))

    def step(self) -> float:
        """Clips by the norm over the whole model, steps, and returns that norm."""
        norm = check_norm(global_grad_norm(self.params))
        scale = min(1.0, self.clip_grad / (norm + 1e-6)) if self.clip_grad > 0 else 1.0
        pairs = list(zip(self.params, self.masters, strict=True))
        for param, master in pairs:
            master.grad = param.main_grad.mul_(scale).to(master.dtype)
        self.adamw.step()
        for param, master in pairs:
            master.grad = None
            if master is not param:
                param.data.copy_(master)
        return norm


def check_norm(norm: float) -> float:
    """The norm, on every rank alike; a SetupError where there is none to train with."""
    if not math.isfinite(norm):
        raise SetupError(
            f"expected a finite gradient norm, got {norm}: a token's loss is not finite under "
            "these settings, or the training has diverged (see the run's metrics)"
        )
    return norm


def global_grad_norm(params: list[torch.Tensor]) -> float:
    """L2 norm of the model's gradient: TP-replicated and shared parameters count once. One
    all-reduce over TP x PP; over CP and DP the gradients are equal already."""
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    total = torch.zeros((), dtype=torch.float64, device=params[0].device)
    for param in params:
        if param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param):
            total += param.main_grad.double().square().sum()
    dist.all_reduce(total, group=ps.get_model_parallel_group())
    return total.sqrt().item()


class GpuOptimizer:
    """Megatron's optimizer (float32 master weights under bf16). Needs a GPU; not run on CPU."""

    def __init__(self, section: OptimizerSection, model: Any, dtype: torch.dtype) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        config = OptimizerConfig(
            optimizer="adam",
            lr=section.lr,
            min_lr=section.lr,
            adam_beta1=section.beta1,
            adam_beta2=section.beta2,
            weight_decay=section.weight_decay,
            clip_grad=section.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
        )
        # `init_model_parallel` makes no gloo groups; they are for saving a distributed optimizer.
        self.optimizer = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
        self.state_dict = self.optimizer.state_dict
        self.load_state_dict = self.optimizer.load_state_dict

    def step(self) -> float:
        _, norm, _ = self.optimizer.step()
        # A float32 parameter's `grad` is its `main_grad` now: the next backward would add to both.
        self.optimizer.zero_grad()
        return check_norm(float(norm))
