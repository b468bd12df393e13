"""What each process of a framework's tests does before anything else: no file of theirs is edited.

CUDA devices are the CPU, NCCL is gloo, packages that are missing and not used are stood in for, and
calls of the functions under test are written down. In a run with ours the drop-in is switched on.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import re
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from mcore_logprobs.cpu_megatron.training import cpu_devices, cpu_training
from mcore_logprobs.dropin.installed import FRAMEWORKS, signatures
from mcore_logprobs.dropin.switch import switch_on
from mcore_logprobs.megatron.imports import after_import
from tests.peers import prepare
from tests.trainers import faults
from tests.trainers.absent import stand_in

_open = contextlib.ExitStack()  # to the end of the process
_CPU = torch.device("cpu")
_DROPIN = "mcore_logprobs.dropin."


def ready() -> None:
    job = json.loads(os.environ["MCORE_LOGPROBS_PEER"])
    framework = FRAMEWORKS[job["framework"]]
    if job["megatron"]:
        _open.enter_context({"core": cpu_devices, "training": cpu_training}[job["megatron"]]())
    cuda_is_the_cpu(job["devices"])
    stand_in(*job["absent"])
    for name in job["prepare"]:
        getattr(prepare, name)()
    calls = _Calls(Path(job["folder"]))
    adapters = [name.rpartition(":") for name in job["adapters"]]
    modules = {framework.module_name(file) for file in framework.files}
    modules |= {module for module, _, _ in adapters}
    for module in sorted(modules):
        after_import(module, functools.partial(_count_theirs, calls, framework, job["adapters"]))
    if not job["switched"]:
        return
    if job["fault"]:
        faults.put(job["framework"], job["fault"])
    dropin = importlib.import_module(_DROPIN + framework.module)
    for name in framework.names():
        calls.watch(dropin, name, "ours")
    switch_on(job["framework"], fused=False)
    if job["rounding"]:
        torch.testing.assert_close = _within(torch.testing.assert_close, job["rounding"])
    for module, _, name in adapters:
        own = getattr(prepare, job["adapters"][f"{module}:{name}"])
        after_import(module, functools.partial(_put, name, calls.counted(own, "ours", name)))


def reason(files: Mapping[str, Mapping[str, str]], test: str) -> str:
    """Why a test is not applicable (`run.Suite.files`); "" where it is. The first match counts."""
    file, _, name = test.partition("::")
    for pattern, why in files.get(file, {}).items():
        parts = (re.escape(part) for part in pattern.split("*"))
        if re.fullmatch(".*".join(parts) + r"(\[.*|::.*)?", name):
            return why
    return ""


def _put(name: str, function: Callable[..., Any], module: Any) -> None:
    setattr(module, name, function)


def _within(assert_close: Callable[..., None], atol: float) -> Callable[..., None]:
    """For tests that ask for the last bits of their own order of summation."""

    @functools.wraps(assert_close)
    def wrapped(*args: Any, **options: Any) -> None:
        if options.get("atol") is not None:
            options["atol"] = max(options["atol"], atol)
        assert_close(*args, **options)

    return wrapped


# ---- calls ---------------------------------------------------------------------------------------


class _Calls:
    """Writes which test called which function, once per test, function and process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: set[tuple[str, str, str]] = set()

    def note(self, who: str, name: str) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        if not test and (self.folder / "running").is_file():
            test = (self.folder / "running").read_text()
        if (test, who, name) not in self.seen:
            self.seen.add((test, who, name))
            with open(self.folder / f"calls{os.getpid()}", "a") as file:
                file.write(json.dumps([test, who, name]) + "\n")

    def counted(self, function: Callable[..., Any], who: str, name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **options: Any) -> Any:
            self.note(who, name)
            return function(*args, **options)

        return wrapped

    def watch(self, module: Any, name: str, who: str) -> None:
        """A function, a method ("Class.method") or the forward (apply) of an autograd function."""
        owner, _, method = name.partition(".")
        thing = getattr(module, owner)
        if not isinstance(thing, type):
            setattr(module, owner, self.counted(thing, who, name))
            return
        method = method or ("forward" if hasattr(thing, "forward") else "apply")
        plain = inspect.getattr_static(thing, method)
        static = isinstance(plain, staticmethod)
        counted = self.counted(plain.__func__ if static else plain, who, name)
        setattr(thing, method, staticmethod(counted) if static else counted)


def _count_theirs(calls: _Calls, framework: Any, adapters: dict[str, str], module: Any) -> None:
    """Before the switch takes them out: what a test has kept of theirs is still counted."""
    text = Path(module.__file__).read_text(encoding="utf-8")
    names = [*framework.names(), *(name.partition(":")[2] for name in adapters)]
    for name in signatures(text, names):
        calls.watch(module, name, "theirs")


# ---- devices -------------------------------------------------------------------------------------


class _Cpu(TorchFunctionMode):
    """Reads a device "cuda" as the CPU, in any function of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if isinstance(kwargs.get("device"), int):  # a GPU's number
            kwargs["device"] = _CPU
        if func is torch.device and (isinstance(args[0], int) or str(args[0]).startswith("cuda")):
            return _CPU
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], int):
            args = (args[0], _CPU, *args[2:])
        args = tuple(_device(x) for x in args)
        return func(*args, **{name: _device(x) for name, x in kwargs.items()})


def _device(x: Any) -> Any:
    if isinstance(x, (torch.device, str)) and str(x).split(":")[0] == "cuda":
        return _CPU
    return x


class _Nothing(contextlib.ContextDecorator):
    """A stream, an event, a device's context: everything has happened already."""

    def __init__(self, *args: object, **options: object) -> None: ...
    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None: ...
    def elapsed_time(self, other: object) -> float:
        return 1.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: None


def cuda_is_the_cpu(devices: int) -> None:
    """For good: `devices` of them, which hold nothing and do everything at once."""
    properties = types.SimpleNamespace(
        name="cpu", major=9, minor=0, total_memory=1 << 36, multi_processor_count=1, gcnArchName=""
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": devices,
        "current_device": 0,
        "is_bf16_supported": True,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "get_device_name": "cpu",
        "mem_get_info": (1 << 36, 1 << 36),
        "is_current_stream_capturing": False,
    }
    amounts = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    answers |= dict.fromkeys(amounts, 0)
    nothing = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "ipc_collect",
               "init", "_lazy_init", "reset_max_memory_allocated")  # fmt: skip
    answers |= dict.fromkeys(nothing)
    for name, answer in answers.items():
        setattr(torch.cuda, name, _answer(answer))
    for name in ("Stream", "Event", "stream", "device", "current_stream", "default_stream"):
        setattr(torch.cuda, name, _Nothing)
    torch.cuda.manual_seed = torch.cuda.manual_seed_all = _answer(None)
    torch.cuda.nvtx = _Nothing()  # type: ignore[assignment]
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore
    torch.multiprocessing.spawn = _spawn
    dist.init_process_group = _gloo(dist.init_process_group)
    dist.new_group = _gloo(dist.new_group)
    dist.barrier = _gloo(dist.barrier)
    dist.is_nccl_available = _answer(True)
    mesh = importlib.import_module("torch.distributed.device_mesh")
    for owner in (mesh, dist):
        owner.init_device_mesh = _gloo(mesh.init_device_mesh)  # type: ignore[attr-defined]
    mesh.DeviceMesh.__init__ = _gloo(mesh.DeviceMesh.__init__)
    _open.enter_context(_Cpu())


def _spawn(*args: Any, **options: Any) -> Any:
    """Forks: started anew, each process of each test would import everything again."""
    method = "spawn" if dist.is_initialized() else "fork"  # a fork would have the parent's group
    return torch.multiprocessing.start_processes(*args, **options, start_method=method)


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *args, **options: value


def _gloo(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Without devices, and with the backend of the CPU."""

    def named(x: Any) -> Any:
        if isinstance(x, str) and "nccl" in x:
            return "gloo"
        return "cpu" if isinstance(x, str) and x.startswith("cuda") else x

    @functools.wraps(plain)
    def wrapped(*args: Any, **options: Any) -> Any:
        for name in ("device_id", "device_ids"):
            options.pop(name, None)
        args = tuple(named(x) for x in args)
        return plain(*args, **{name: named(x) for name, x in options.items()})

    return wrapped
