"""Importing this builds `device.cpp`, once for each torch, and loads it; then torch is imported."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).with_name("device.cpp")
_FLAGS = ("-O1", "-std=c++20", "-shared", "-fPIC", "-w")


def _load() -> None:
    assert "torch" not in sys.modules, "torch asks for its CUDA hooks once, when it is imported"
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    own = sorted(folder.glob("lib/libtorch_cuda*")) + sorted(folder.glob("lib/libtorch_hip*"))
    assert not own, f"a build of torch with CUDA of its own: {own[0]}"
    ctypes.CDLL(str(folder / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(_built(folder)))
    # As on a machine without Triton: with it the kernels would look for a driver.
    sys.modules["triton"] = None  # type: ignore[assignment]


def _built(torch_folder: Path) -> Path:
    source = _SOURCE.read_bytes() + importlib.metadata.version("torch").encode()
    name = hashlib.sha256(source).hexdigest()[:16]
    library = Path(sys.prefix) / "simulated-gpu" / f"{name}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        include, lib = torch_folder / "include", torch_folder / "lib"
        partial = library.with_suffix(f".{os.getpid()}")
        command = ["g++", *_FLAGS, f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
        command += [str(_SOURCE), "-o", str(partial), f"-L{lib}", "-lc10", "-ltorch_cpu"]
        subprocess.run([*command, f"-Wl,-rpath,{lib}"], check=True)
        partial.rename(library)
    return library


_load()
# The device's thread may still let go of a backward's objects: Python ends a thread that asks for
# its lock later, which C++ takes for a crash.
atexit.register(time.sleep, 0.5)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


class _Stream:
    """The one stream: whatever it is told has happened."""

    device = torch.device("cuda", 0)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **keywords: None


def _always(value: object) -> Any:
    """A function of its own: torch.compile has a rule for each of torch's functions, by object."""
    return lambda *args, **keywords: value


# What torch's Python asks of the CUDA runtime. A generator of the device is the host's.
_ANSWERS: dict[str, Any] = {
    "is_available": lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != "",
    "stream": lambda stream: contextlib.nullcontext(),
    "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    "manual_seed_all": lambda seed: torch.default_generator.manual_seed(seed),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state.cpu()),
    "default_generators": (torch.default_generator,),
}
_CONSTANTS = {
    **{"device_count": 1, "get_device_capability": (9, 0), "get_device_name": "simulated"},
    **{"is_bf16_supported": True, "is_current_stream_capturing": False},
    **dict.fromkeys(("current_device", "_exchange_device", "_maybe_exchange_device"), 0),
    **dict.fromkeys(("memory_allocated", "max_memory_allocated"), 0),
    **dict.fromkeys(("_lazy_init", "set_device", "synchronize", "empty_cache"), None),
    **{"reset_peak_memory_stats": None, "current_stream": _Stream()},
}
for _name, _value in _CONSTANTS.items():
    _ANSWERS[_name] = _always(_value)
for _name, _answer in _ANSWERS.items():
    for _module in (torch.cuda, torch.cuda.random):
        if _module is torch.cuda or hasattr(_module, _name):
            setattr(_module, _name, _answer)


def _over_gloo(make: Any) -> Any:
    @functools.wraps(make)
    def made(backend: str | None = None, *args: Any, **keywords: Any) -> Any:
        return make("gloo" if backend == "nccl" else backend, *args, **keywords)

    return made


dist.init_process_group = _over_gloo(dist.init_process_group)
