"""Whether the ranks of a TP group make the same call: their widths always, the rest on demand.

A rank's shard starts at `rank * width`: with uneven shards every rank has another idea of where the
others' columns are, and results are wrong without a word. So at the first call with a width on a
group each rank posts its width in the group's key-value store and reads the others': no collective,
nothing on the wire that carries tensors, and later calls look in a set. A rank whose width changes
while the others' stays finds no answer and raises, and leaves the reason in the store; the others
wait for it in a collective, and raise with that reason once its process has ended.

With `MCORE_LOGPROBS_CHECK=1` each opening of a call makes one all-gather of 4 KiB instead, which
compares every argument of the operation: shapes, dtypes, options, a hash of integer tensors. It
waits for the device, and is for finding a fault.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.collectives import all_gather_stack, group_store, leave_reason
from mcore_logprobs.groups import group_rank, group_size

VARIABLE = "MCORE_LOGPROBS_CHECK"

_MESSAGE_BYTES = 4096
_LONGEST_VALUE = 120
# Arguments whose values are this rank's own; of them only shape and dtype are compared.
_SHARDED = ("logits", "hidden", "weight", "bias", "lora")
# How long a rank waits for the others' widths in the store, in seconds. The ranks of a TP group go
# through a model layer by layer together: on a CPU none is late by much; elsewhere as long as NCCL
# lets a collective take.
_PATIENCE = {"cpu": 30.0, "other": 600.0}
_WITHDRAWN = "withdrawn"
_agreed: weakref.WeakKeyDictionary[ProcessGroup, set[int]] = weakref.WeakKeyDictionary()
_blamed: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()  # this rank has left a reason there


def check_call(width: int, group: ProcessGroup | None, device: torch.device) -> None:
    """Called by the function that opens an operation's call, before whatever depends on the width.

    Collectives: none; with `MCORE_LOGPROBS_CHECK=1` one all-gather of 4 KiB over TP.

    Raises:
        ValueError: on every rank of the group alike, saying which rank has which value. A width
            that is new on some ranks only: on them after a while, on the others where those end.
    """
    if group_size(group) == 1 or torch.compiler.is_compiling():
        return
    assert group is not None
    if os.environ.get(VARIABLE) == "1":
        described = _current[-1] if _current else {"operation": "unnamed", "columns": str(width)}
        _compare_arguments(described, group, device)
    elif width not in _agreed.setdefault(group, set()):
        _agree_in_store(width, group, _PATIENCE["cpu" if device.type == "cpu" else "other"])
        _agreed[group].add(width)
    if group in _blamed:  # the caller has gone on after the error
        _blamed.discard(group)
        leave_reason(group, "")


# ---- widths, once ------------------------------------------------------------------------------


def _agree_in_store(width: int, group: ProcessGroup, patience: float) -> None:
    """Returns where all ranks have posted this width; without a store nothing is compared.

    The number in the keys counts the times that this rank has agreed or differed on the group: it
    is the same on every rank, and lives in the store, as a group object may be made anew.

    Raises:
        ValueError: the widths differ, on every rank; or some rank has posted none in time.
    """
    store = group_store(group)
    if store is None:
        return
    rank, size = group_rank(group), group_size(group)
    counter = f"mcore_logprobs/widths/{rank}"
    number = store.add(counter, 0)
    keys = [f"mcore_logprobs/width/{number}/{other}" for other in range(size)]
    store.set(keys[rank], str(width))
    deadline, pause = time.monotonic() + patience, 1e-4
    while True:
        posted = [store.get(key).decode() for key in keys] if store.check(keys) else []
        if posted and _WITHDRAWN not in posted:
            break
        if time.monotonic() > deadline:
            store.set(keys[rank], _WITHDRAWN)
            error = ValueError(
                f"vocabulary shards: {width} columns on rank {rank} of the TP group, a new width, "
                f"but no new one on every other rank within {patience:g} s"
            )
            leave_reason(group, str(error))
            _blamed.add(group)
            raise error
        time.sleep(pause)
        pause = min(2.0 * pause, 0.02)
    store.add(counter, 1)
    leave_reason(group, "")
    if len(set(posted)) > 1:
        each = ", ".join(f"{found} on rank {other}" for other, found in enumerate(posted))
        raise ValueError(
            "vocabulary shards: expected the same number of columns on every rank of the TP "
            f"group, got {each}: pad the vocabulary to a multiple of the group's size"
        )


# ---- all arguments, on demand ------------------------------------------------------------------

_current: list[dict[str, str]] = []  # operations that are under way, outermost first


@contextmanager
def comparing(operation: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """While open, `check_call` compares this call of an operation. Waits for the device."""
    if os.environ.get(VARIABLE) != "1" or torch.compiler.is_compiling():
        yield
        return
    _current.append({"operation": operation, **_described("", arguments)})
    try:
        yield
    finally:
        _current.pop()


def _compare_arguments(
    described: dict[str, str], group: ProcessGroup, device: torch.device
) -> None:
    own = json.dumps(described).encode()
    if len(own) > _MESSAGE_BYTES:  # no rank may raise alone
        described = {"operation": described["operation"], "all arguments": f"hash {_hash(own)}"}
        own = json.dumps(described).encode()
    sent = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    sent[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    rows = all_gather_stack(sent.to(device), group).cpu()
    calls = [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in rows]
    names = dict.fromkeys(name for call in calls for name in call)
    different = []
    for name in names:
        values = [call.get(name, "absent") for call in calls]
        if len(set(values)) > 1:
            of_ranks = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            different.append(f"{name}: {of_ranks}")
    if different:
        raise ValueError("the ranks of the TP group make different calls; " + "; ".join(different))


def _described(name: str, value: Any) -> dict[str, str]:
    """An argument, part by part: of a mapping, of a dataclass, of a tuple."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        parts = {f"{name}.{key}" if name else str(key): part for key, part in value.items()}
    elif isinstance(value, tuple):
        parts = {f"{name}[{place}]": part for place, part in enumerate(value)}
    else:
        text = _value(name, value)
        return {name: text} if text else {}
    return {k: text for key, part in parts.items() for k, text in _described(key, part).items()}


def _value(name: str, value: Any) -> str:
    if isinstance(value, ProcessGroup):
        return ""
    if isinstance(value, Tensor):
        value = getattr(value, "_local_tensor", value).detach()  # of a DTensor
        text = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        sharded = value.is_floating_point() and any(part in name for part in _SHARDED)
        if sharded and "topk" not in name:
            return text
        flat = value.cpu().reshape(-1)
        content = flat.contiguous().view(torch.uint8).numpy().tobytes()
        first = ", ".join(f"{x:g}" for x in flat[:4].tolist())
        more = ", ..." if flat.numel() > 4 else ""
        return f"{text} [{first}{more}] hash {_hash(content)}"
    text = getattr(value, "__qualname__", "") if callable(value) else repr(value)
    text = text or type(value).__qualname__
    if len(text) > _LONGEST_VALUE:
        text = f"{text[:_LONGEST_VALUE]}... hash {_hash(text.encode())}"
    return text


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=4).hexdigest()
