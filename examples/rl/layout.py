"""Which rank is which, and the few collectives that the example makes itself."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_logprobs import context_parallel_gather

from .config import RunConfig, SetupError

T = TypeVar("T")


class Layout:
    """This process's place, once Megatron's parallel groups and generators are set up. Groups are
    Megatron's own."""

    def __init__(self, config: RunConfig) -> None:
        from megatron.core import parallel_state as ps

        from mcore_logprobs.cpu_megatron.models import init_model_parallel

        p = config.parallel
        init_model_parallel(tp=p.tp, cp=p.cp, pp=p.pp, seed=config.seed + 1)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.tp, self.cp, self.pp = p.tp, p.cp, p.pp
        self.dp = ps.get_data_parallel_world_size()
        self.tp_rank = ps.get_tensor_model_parallel_rank()
        self.cp_rank = ps.get_context_parallel_rank()
        self.pp_rank = ps.get_pipeline_model_parallel_rank()
        self.dp_rank = ps.get_data_parallel_rank()
        self.tp_group = ps.get_tensor_model_parallel_group()
        self.cp_group = ps.get_context_parallel_group()
        self.dp_group = ps.get_data_parallel_group()
        self.dp_cp_group = ps.get_data_parallel_group(with_context_parallel=True)
        self.is_main, self.last_stage = self.rank == 0, self.pp_rank == self.pp - 1
        on_cpu = config.device == "cpu"
        self.device = torch.device("cpu" if on_cpu else f"cuda:{torch.cuda.current_device()}")


def start_processes(config: RunConfig) -> None:
    """torch.distributed, from torchrun's environment."""
    if "RANK" not in os.environ:
        raise SetupError("start with torchrun, for example: torchrun --nproc-per-node 4 ...")
    if config.device == "cuda":
        if not torch.cuda.is_available():
            raise SetupError("device: cuda, but torch sees no GPU here; use a CPU config")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif torch.cuda.is_available():
        raise SetupError("device: cpu on a machine with a GPU; set CUDA_VISIBLE_DEVICES= (empty)")
    # torchrun ends the others where a rank dies. This bounds what they wait for rank 0's rollout.
    backend = "nccl" if config.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=30))


def stop_processes() -> None:
    """End every process group, when nothing that holds one is in use any more: one that outlives
    this is torn down with the interpreter, which can abort the process."""
    from mcore_logprobs.cpu_megatron.models import destroy_model_parallel

    destroy_model_parallel()
    gc.collect()  # models and their autograd graphs refer to groups in cycles
    dist.destroy_process_group()


def on_main(fn: Callable[[], T]) -> T:
    """Runs `fn` on rank 0 and gives every rank its result; its SetupError is raised on all."""
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = fn()
        except SetupError as error:
            box[1] = str(error)
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise SetupError(box[1])
    return box[0]


def from_last_stage(tensor: Tensor, layout: Layout) -> Tensor:
    """Every pipeline stage gets the last stage's `tensor`."""
    if layout.pp > 1:
        from megatron.core import parallel_state as ps

        last, group = ps.get_pipeline_model_parallel_last_rank, ps.get_pipeline_model_parallel_group
        dist.broadcast(tensor, src=last(), group=group())
    return tensor


def whole_rows(parts: list[Tensor], shape: torch.Size, layout: Layout) -> Tensor:
    """The last stage's [micro_batch, s / CP, k] parts of all ranks -> [n, s, k] on every rank."""
    whole = torch.empty(shape, device=layout.device)
    if layout.last_stage:
        local = context_parallel_gather(torch.cat(parts), cp_group=layout.cp_group)
        dist.all_gather_into_tensor(whole, local, group=layout.dp_group)
    return from_last_stage(whole, layout)
