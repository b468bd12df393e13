"""Run real Megatron-Core models on CPU under gloo: reversible shims for its `torch.cuda` calls.

Megatron asks for "the current CUDA device", forks the CUDA generator and names `device="cuda"`
without looking whether a GPU is there. Inside `cpu_runtime()` those calls mean the CPU:

    import torch.distributed as dist
    from mcore_logprobs.cpu_megatron.runtime import cpu_runtime
    from mcore_logprobs.cpu_megatron import models as mm

    dist.init_process_group("gloo")                       # under torchrun, 4 ranks
    with cpu_runtime():
        mm.init_model_parallel(tp=2, cp=2)
        config = mm.transformer_config(num_layers=2, hidden_size=32, sequence_parallel=True)
        model = mm.build_gpt_model(config, vocab_size=64, tied=True)
        loss = model(input_ids, position_ids, None, labels=labels)   # local zigzag shard [b, s/CP]
        loss.mean().backward()
        mm.destroy_model_parallel()

**Where a GPU is present the context manager does nothing** (it yields False): Megatron's own calls
are right there, and nothing of this module is active. It is a no-op and not an error, so that a
script can be written once for both. Hide the GPUs (`CUDA_VISIBLE_DEVICES=`) to run on CPU anyway.

The shims are process-wide while the context is open; contexts nest, and the outermost one puts
every attribute back, the ones that were not there before included.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mcore_logprobs.cpu_megatron import mamba

# Factories which Megatron calls with device="cuda" or pin_memory=True, written out.
_FACTORIES = (
    *("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
)
_CPU = torch.device("cpu")
_depth = 0
_MISSING = object()


def gpu_present() -> bool:
    """Whether a CUDA device is usable: then the CPU runtime stays out of the way."""
    return torch.cuda.is_available()


@contextlib.contextmanager
def cpu_runtime() -> Iterator[bool]:
    """Let Megatron-Core run on CPU while the context is open; yields whether shims are active.

    A no-op that yields False where a GPU is present. Reversible: on exit every replaced attribute
    of `torch`, `torch.cuda`, `torch.distributed`, `torch.Tensor`, `torch.nn.Module` and Megatron's
    generator tracker and Mamba mixer is as it was.
    """
    global _depth
    if gpu_present():
        yield False
        return
    if _depth:
        _depth += 1
        try:
            yield True
        finally:
            _depth -= 1
        return
    with contextlib.ExitStack() as undo:
        for owner, name, value in _replacements():
            _replace(undo, owner, name, value)
        _depth += 1
        undo.callback(_leave)
        yield True


def _leave() -> None:
    global _depth
    _depth -= 1


def _replace(undo: contextlib.ExitStack, owner: object, name: str, value: object) -> None:
    before = vars(owner).get(name, _MISSING)

    def restore() -> None:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    setattr(owner, name, value)
    undo.callback(restore)


def _replacements() -> list[tuple[object, str, object]]:
    # Import Megatron first: its decorators make torch.compile list torch's functions by object,
    # once and for good, and that list must hold the real ones.
    importlib.import_module("megatron.core.models.gpt")
    tracker = importlib.import_module("megatron.core.tensor_parallel.random")
    cuda_calls: dict[str, object] = {
        "current_device": lambda: _CPU,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "device": _NullContext,
        "stream": _NullContext,
        "Stream": _NullStream,
        "Event": _NullStream,
        "current_stream": _NullStream,
        "default_stream": _NullStream,
        "default_generators": _OneGenerator(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.manual_seed(seed),
        "initial_seed": lambda: torch.initial_seed(),
    }
    table: list[tuple[object, str, object]] = [(torch.cuda, k, v) for k, v in cuda_calls.items()]
    table += [
        (torch.cuda.random, name, cuda_calls[name])
        for name in ("get_rng_state", "set_rng_state", "manual_seed")
    ]
    table += [(torch, name, _on_cpu(getattr(torch, name))) for name in _FACTORIES]
    table += [
        (torch.Tensor, "cuda", _same),
        (torch.Tensor, "pin_memory", _same),
        (torch.nn.Module, "cuda", _same),
    ]
    # Megatron imported torch's deferred-call helper by name: without a GPU it would queue the
    # generator's new state for a CUDA start that never comes.
    table.append((tracker, "_lazy_call", _call_now))
    table.append((tracker, "_lazy_init", lambda: None))
    table.append((tracker, "device_ctx_manager", _NullContext))
    table.append((dist, "all_to_all_single", _all_to_all_of_lists(dist.all_to_all_single)))
    table += _names_of_transformer_engine()
    try:
        mixer = importlib.import_module("megatron.core.ssm.mamba_mixer")
        shards = importlib.import_module("megatron.core.ssm.mamba_context_parallel")
    except ImportError:  # it wants triton or another package: no Mamba mixers then
        return table
    return table + mamba.replacements(mixer, shards)


def _names_of_transformer_engine() -> list[tuple[object, str, object]]:
    """Names that some releases read without looking whether Transformer Engine gave them."""
    moe = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    mla = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    table: list[tuple[object, str, object]] = []
    if not hasattr(moe, "te_general_gemm"):
        table.append((moe, "te_general_gemm", None))
    inference = sys.modules.get("megatron.core.tensor_parallel.inference_layers")
    for module, name in (  # asked for in isinstance()
        (mla, "TELinear"),
        (inference, "InferenceColumnParallelLinear"),
        (inference, "InferenceLayerNormColumnParallelLinear"),
    ):
        if module is not None and not isinstance(getattr(module, name, None), type):
            table.append((module, name, _NoLayer))
    return table


class _NoLayer:
    """No module is one."""


def _all_to_all_of_lists(original: Callable[..., object]) -> Callable[..., object]:
    """`all_to_all_single` that takes its split sizes as tensors or arrays too.

    Megatron's token dispatcher turns sizes that lie on a GPU into lists on their way to the host;
    sizes that are on the host already stay tensors, which torch's bindings refuse.
    """

    @functools.wraps(original)
    def wrapped(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: object = None,
        async_op: bool = False,
    ) -> object:
        sizes = (
            None if split is None else [int(n) for n in split]
            for split in (output_split_sizes, input_split_sizes)
        )
        return original(output, input, *sizes, group=group, async_op=async_op)

    return wrapped


class _OneGenerator:
    """`torch.cuda.default_generators`: every device, by number or by name, has the CPU's."""

    def __getitem__(self, device: object) -> torch.Generator:
        return torch.default_generator


def _on_cpu(factory: Callable[..., object]) -> Callable[..., object]:
    """`factory` with device="cuda..." read as the CPU and pinned memory as plain memory."""

    @functools.wraps(factory)
    def wrapped(*args: object, **kwargs: Any) -> object:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


def _same(self: object, *args: object, **kwargs: object) -> object:
    return self


def _call_now(callback: Callable[[], object], **kwargs: object) -> None:
    callback()


class _NullContext(contextlib.AbstractContextManager):
    """Stands in for `torch.cuda.device(...)` and `torch.cuda.stream(...)`."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        return None


class _NullStream(_NullContext):
    """Stands in for CUDA streams and events: everything has happened already."""

    def wait_stream(self, *args: object) -> None: ...
    def wait_event(self, *args: object) -> None: ...
    def record_event(self, *args: object) -> _NullStream:
        return self

    def record(self, *args: object) -> None: ...
    def wait(self, *args: object) -> None: ...
    def synchronize(self) -> None: ...
