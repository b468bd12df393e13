"""Other implementations of a head's loss, from the wheels that `carry.sh` puts into a folder.

A GPU machine may have no network and none of them installed: the session unpacks the wheels into a
temporary folder and imports from there, after what is installed. `python -m benchmarks.gpu_peers
DIR` tries each of them without a GPU: in Triton's interpreter against float64, or, where the
interpreter cannot run it, by compiling its kernels for sm_90.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import shutil
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

CARRIED = Path(__file__).resolve().parents[1] / "runs" / "peers"

# (hidden [n, h], weight [V, h], target [n]) -> loss [n], or the sum of all.
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Peer:
    """Somebody else's way to the loss of a head.

    Attributes:
        load: imports it and gives its function; raises whatever its import does.
        module: what `load` imports, which the session imports before its groups start.
        products: matrix products forward and backward, which its time is divided by.
        interpreted: whether it is tried in the interpreter; else by compiling its kernels.
    """

    name: str
    module: str
    load: Callable[[], Loss]
    products: int = 3
    interpreted: bool = True


# ---- what they are -------------------------------------------------------------------------------


def _torch() -> Loss:
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no functional.linear_cross_entropy")
    function: Any = F.linear_cross_entropy
    return lambda h, w, t: function(h, w, t, reduction="sum")


def _plain() -> Loss:
    return lambda h, w, t: F.cross_entropy((h @ w.t()).float(), t, reduction="none")


def _compiled() -> Loss:
    return torch.compile(_plain(), dynamic=False)


def _liger() -> Loss:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    function = LigerFusedLinearCrossEntropyFunction.apply
    return lambda h, w, t: function(h, w, t, None, None, -100, 0.0, 0.0, "sum")[0]


def _liger_sm90() -> Loss:
    from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90 as module

    function = module.liger_fused_linear_cross_entropy_sm90
    return lambda h, w, t: function(h, w, t, reduction="sum")


def _liger_parallel() -> Loss:
    from liger_kernel.ops.vocab_parallel_cross_entropy import LigerVocabParallelCEFunction

    function = LigerVocabParallelCEFunction.apply

    def loss(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        logits, column = (h @ w.t()).unsqueeze(1), t.unsqueeze(1)  # [s, b, V/TP], [s, b]
        return function(logits, column, None, -100, 0.0, "pytorch", "global")

    return loss


def _cut(**options: Any) -> Loss:
    from cut_cross_entropy import linear_cross_entropy

    return lambda h, w, t: linear_cross_entropy(h, w, t, reduction="none", **options)


def _quack() -> Loss:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda h, w, t: chunked_linear_cross_entropy(h, w, t, reduction="sum")


def _megatron() -> Loss:
    from mcore_logprobs.bench.peers import _megatron_cross_entropies

    made: dict[torch.device, Any] = {}

    def loss(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        # Its group and its layout are made at the first call, on the device that it has then.
        own = made.setdefault(t.device, _megatron_cross_entropies)
        return own(t)["megatron fused" if t.is_cuda else "megatron"](h @ w.t())

    return loss


def _transformer_engine() -> Loss:
    function = _te_function()

    def loss(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        logits, column = (h @ w.t()).unsqueeze(1), t.unsqueeze(1)
        return function(logits, column, 0.0, False, None, -100, False)

    return loss


def _te_function() -> Callable[..., Tensor]:
    """Transformer Engine's cross entropy, which is Triton, by file: the package wants its library.

    What stands for its packages is gone afterwards, so that nobody takes it for the whole.
    """
    root = _UNPACKED.get("transformer_engine")
    if root is None:
        module = importlib.import_module("transformer_engine.pytorch.cross_entropy")
        return module.CrossEntropyFunction.apply
    packages = ["", ".common", ".common.triton", ".pytorch", ".pytorch.triton"]
    standing = {}
    for name in (f"transformer_engine{package}" for package in packages):
        standing[name] = types.ModuleType(name)
        standing[name].__path__ = [str(root.joinpath(*name.split(".")))]
    jit = types.ModuleType("transformer_engine.pytorch.jit")
    jit.no_torch_dynamo = lambda *a, **k: lambda function: function  # type: ignore[attr-defined]
    before = {name for name in sys.modules if name.split(".")[0] == "transformer_engine"}
    sys.modules.update(standing | {jit.__name__: jit})
    try:
        module = importlib.import_module("transformer_engine.pytorch.cross_entropy")
        return module.CrossEntropyFunction.apply
    finally:
        for name in list(sys.modules):
            if name.split(".")[0] == "transformer_engine" and name not in before:
                del sys.modules[name]


PEERS = (
    Peer("quack", "quack.linear_cross_entropy", _quack, interpreted=False),
    Peer("liger", "liger_kernel.ops.fused_linear_cross_entropy", _liger),
    Peer("liger, SM90", "cutlass", _liger_sm90, interpreted=False),
    Peer("cut-cross-entropy exact", "cut_cross_entropy", partial(_cut, filter_eps=None), 4, False),
    Peer("cut-cross-entropy", "cut_cross_entropy", _cut, 4, False),
    Peer("megatron, logits held", "megatron.core.tensor_parallel.cross_entropy", _megatron),
    Peer("transformer-engine, logits held", "triton", _transformer_engine),
    Peer("liger TP, logits held", "liger_kernel.ops.vocab_parallel_cross_entropy", _liger_parallel),
    Peer("torch linear_cross_entropy", "torch", _torch),
    Peer("torch.compile, logits held", "torch._inductor.compile_fx", _compiled, 3, False),
)
# A process each: one that brings the GPU down takes no other with it.
FAMILIES = {
    "quack": ("quack",),
    "liger": ("liger", "liger, SM90", "liger TP, logits held"),
    "cut-cross-entropy": ("cut-cross-entropy exact", "cut-cross-entropy"),
    "megatron": ("megatron, logits held", "transformer-engine, logits held"),
    "torch": ("torch linear_cross_entropy", "torch.compile, logits held"),
}


# ---- from a folder -------------------------------------------------------------------------------

_UNPACKED: dict[str, Path] = {}


def unpack(folder: Path) -> dict[str, str]:
    """Unpack a folder's wheels and import from them after what is installed; what failed, and why.

    They are gone when the process ends.
    """
    wheels = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if not wheels:
        return {}
    site = Path(tempfile.mkdtemp(prefix="peers-"))
    atexit.register(shutil.rmtree, site, ignore_errors=True)
    failed = {}
    for wheel in wheels:
        name = wheel.name.split("-")[0]
        # Megatron looks for a whole Transformer Engine: what can be had by file is not on the path.
        place = site / "by-file" if name == "transformer_engine" else site / "packages"
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(place)
        except (OSError, zipfile.BadZipFile) as error:
            failed[wheel.name] = f"{type(error).__name__}: {error}"
            continue
        if name == "transformer_engine":
            _UNPACKED[name] = place
    sys.path.append(str(site / "packages"))
    _add_cutlass(site / "packages")
    return failed


def _add_cutlass(packages: Path) -> None:
    """Put CUTLASS's DSL on the path, which a .pth file of its wheel does in an installation."""
    folder = packages / "nvidia_cutlass_dsl" / "dsl_packages"
    if folder.is_dir():
        sys.path.append(str(folder))


@contextmanager
def no_cuda() -> Iterator[None]:
    """What would start CUDA raises: a process that has started it must not be forked."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("imported where CUDA must not be started")

    with mock.patch.object(torch.cuda, "_lazy_init", refuse):
        yield


def preload(names: Sequence[str]) -> dict[str, str]:
    """Import modules before groups are forked; those that do not import, and why.

    Their own group tries them again, where CUDA may be started.
    """
    failed = {}
    with no_cuda():
        for name in names:
            try:
                importlib.import_module(name)
            except Exception as error:  # whatever a foreign import raises is the reason
                failed[name] = reason(error)
    return failed


def reason(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:300]


# ---- tried without a GPU -------------------------------------------------------------------------


def try_out(peer: Peer) -> str:
    """How a peer was tried, or the exception of what is wrong with it."""
    loss = peer.load()
    if not peer.interpreted:
        return _compile_ahead(loss)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(6, 32, generator=generator).requires_grad_()
    weight = torch.randn(256, 32, generator=generator).requires_grad_()
    target = torch.randint(256, (6,), generator=generator)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    wanted = F.cross_entropy(exact[0] @ exact[1].t(), target, reduction="sum")
    found = loss(hidden, weight, target).sum()
    pairs = [(found, wanted)]
    pairs += zip(
        torch.autograd.grad(found, (hidden, weight)),
        torch.autograd.grad(wanted, exact),
        strict=True,
    )
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    if not worst < 1e-4:
        raise AssertionError(f"off by {worst:.1e} of float64")
    return f"values and gradients within {worst:.0e} of float64"


def _compile_ahead(loss: Loss) -> str:
    """Its Triton kernels for sm_90, by a call that launches nothing."""
    from benchmarks.launches import dry_launches

    hidden = torch.zeros(256, 512, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(1024, 512, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(256, dtype=torch.int64)
    with ExitStack() as stack:
        launched = stack.enter_context(dry_launches())
        for name, value in {"current_device": 90, "get_device_capability": (9, 0)}.items():
            answer = lambda *_, value=value: value  # noqa: E731
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        torch.autograd.grad(loss(hidden, weight, target).sum(), (hidden, weight))
        names = sorted(set(launched.counts))
    if not names:
        raise RuntimeError("no kernel of Triton's was launched")
    return f"{len(names)} kernels compiled for sm_90: {', '.join(names)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Try each peer of a folder, a line each; a reason why not is an answer too."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_peers")
    parser.add_argument("folder", type=Path, nargs="?", default=CARRIED)
    parser.add_argument("--peer", help="this one only, in this process", choices=_names())
    args = parser.parse_args(argv)
    if args.peer is None:
        return _try_all(args.folder)
    from benchmarks.gpu_timing import let_one_element_be_a_number

    for wheel, why in unpack(args.folder).items():
        print(f"{wheel}: {why}")
    let_one_element_be_a_number()
    peer = next(peer for peer in PEERS if peer.name == args.peer)
    try:
        print(f"{peer.name}: {try_out(peer)}", flush=True)
    except Exception as error:
        print(f"{peer.name}: not tried: {reason(error)}", flush=True)
    return 0


def _names() -> list[str]:
    return [peer.name for peer in PEERS]


def _try_all(folder: Path) -> int:
    import os
    import subprocess

    for peer in PEERS:
        # Whether kernels are interpreted is chosen when they are imported.
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        env |= {"TRITON_INTERPRET": "1"} if peer.interpreted else {}
        command = [sys.executable, "-m", "benchmarks.gpu_peers", str(folder), "--peer", peer.name]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"{peer.name}: ")]
        print(lines[-1] if lines else f"{peer.name}: exit status {done.returncode}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
