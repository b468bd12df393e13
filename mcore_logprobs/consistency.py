"""Whether the ranks of a group make the same call: what matters at the first one, or all of it.

Two mistakes give wrong results without any error. With uneven shards, `rank * width` is not where a
rank's columns begin. With `sequence_parallel=True` forgotten, each rank has other tokens. So at the
first call of an operation with a width on a group each rank posts in the group's key-value store,
and compares with the others: its width, its options (a temperature, a top k), a hash of each
integer tensor (targets, ids, rows, masks) and of a temperature for each token, the tokens' shape of
given logits, whether sums are in float64, whether tensors whose gradient the ranks exchange require
one, and without sequence parallelism a few values of the hidden states, which may differ by
rounding.
No collective is made. The first call waits for the device; later calls look in a set. In a CUDA
graph's capture no values are compared, in what `torch.compile` traces nothing is.

If only one rank makes a first call, it finds no answer and raises. A rank that raises within an
operation leaves the reason in the store; the others wait for it in a collective, and raise with
that reason once its process has ended.

Over a CP or data-parallel group (`comparing(..., group)`) two things differ. Its ranks may be late
by minutes, so one that finds no answer goes on into the collective. And a rank that refuses its
arguments posts that, if the others are about to compare: a first call that one rank refuses raises
on all of them. If it refuses a later call the others are in its collective, and would take the
rank's next call for it. So that one is compared as a first call is, and raises if
it is the only one.

`MCORE_LOGPROBS_CHECK=0` compares widths only. `MCORE_LOGPROBS_CHECK=1` compares every argument in
every call: shapes, dtypes, options, values, and what requires a gradient. It makes one all-gather
of 4 KiB per call and waits for the device, and is for finding a fault.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import is_traced
from mcore_logprobs.collectives import (
    all_gather_stack,
    another_stopped,
    group_store,
    leave_reason,
    take_back_reason,
)
from mcore_logprobs.groups import group_rank, group_size
from mcore_logprobs.kernels.chunk import acc_dtype

VARIABLE = "MCORE_LOGPROBS_CHECK"

_MESSAGE_BYTES = 4096
_LONGEST_VALUE = 120
# Arguments whose values are this rank's own; of them only shape and dtype are compared.
_SHARDED = ("logits", "hidden", "weight", "bias", "lora")
# What an option is; of these, what concerns only the rank that has it.
_OPTIONS = (bool, int, float, str, torch.dtype, type(None))
_OF_ONE_RANK = ("saved_bytes", "backend", "inplace_backward")
# What `explain_mismatch` searches by: its next collective depends on these values.
_REPORTS = ("train_logprobs", "rollout_logprobs")
# Along each dimension of hidden states, how many values are compared; and by how much of their norm
# ranks may differ: far more than rounding, far less than two tokens.
_SAMPLED = 6
_CLOSE = 0.1
# How long a rank waits for the others in the store, in seconds. The ranks of a TP group go
# through a model layer by layer together: on a CPU none is late by much; elsewhere as long as NCCL
# lets a collective take. Over a CP or data-parallel group it waits as long as on a CPU.
_PATIENCE = {"cpu": 30.0, "other": 600.0}
_WITHDRAWN = "withdrawn"
# What ranks have agreed on: (operation, width).
_agreed: weakref.WeakKeyDictionary[ProcessGroup, set[tuple[str, int | None]]]
_agreed = weakref.WeakKeyDictionary()
# Where this rank has raised, and the reason that it has left there, if no other rank's was there.
_blamed: weakref.WeakKeyDictionary[ProcessGroup, str] = weakref.WeakKeyDictionary()


class _Calls(threading.local):
    def __init__(self) -> None:
        self.under_way: list[comparing] = []  # outermost first


_calls = _Calls()


class comparing:
    """Within it `check_call` compares this call of an operation, and an error leaves its reason.

    Args:
        arguments: makes its arguments by name; called if they are compared.
        group: a CP or data-parallel group, None for one process. Then all that may refuse arguments
            is within it, before `check_call`; no collective is; and `arguments` are those that have
            to be the same on every rank.
    """

    __slots__ = ("arguments", "compared_over", "group", "operation")

    def __init__(
        self,
        operation: str,
        arguments: Callable[[], Mapping[str, object]],
        group: ProcessGroup | None = None,
    ) -> None:
        self.operation, self.arguments = operation, arguments
        self.group = group if group_size(group) > 1 else None
        self.compared_over: ProcessGroup | None = None

    def __enter__(self) -> None:
        _calls.under_way.append(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _calls.under_way.pop()
        if isinstance(error, Exception):
            _leave(error, self)


def check_call(
    width: int | None,
    group: ProcessGroup | None,
    device: torch.device,
    exchanged: Mapping[str, object] | None = None,
) -> None:
    """Called by the function that opens an operation's call, before whatever depends on the width.

    Args:
        width: columns of this rank's shard; None over a CP or data-parallel group.
        exchanged: tensors whose gradient the backward sends, by name: a rank that wants none is not
            in that collective.

    Collectives: none; with `MCORE_LOGPROBS_CHECK=1` one all-gather of 4 KiB over the group.

    Raises:
        ValueError: a `MCORE_LOGPROBS_CHECK` that is neither 0 nor 1; on every rank of the group
            alike, saying which rank has which value, or why one has refused its own. For a first
            call on some ranks only: on them after a while, on the others where those end.
    """
    if group is None or group_size(group) == 1 or torch.compiler.is_compiling():
        return
    call = _calls.under_way[-1] if _calls.under_way else comparing("an operation", dict)
    call.compared_over = group
    level = os.environ.get(VARIABLE, "")
    if level not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}: expected 0 or 1, got {level!r}")
    if level == "1":
        described = {"operation": call.operation}
        if width is not None:
            described["columns"] = str(width)
        described |= _described("", call.arguments()) | _wanted(exchanged)
        _compare_arguments(described, _name(width), group, device)
    elif (key := (call.operation, width)) not in _agreed.get(group, ()):
        if group not in _agreed and group not in _blamed:
            take_back_reason(group)  # of an earlier group, whose store this is too
        posted = _Posted(width, call.operation)
        if level != "0" and not _captured(device):
            posted.add(call.arguments())
            posted.options |= _wanted(exchanged)
        by_all = _posted_by_all(posted, group, _patience(posted, device))
        _compare(by_all, _name(width))
        _agreed.setdefault(group, set()).add(key)
    # The caller has gone on after an error. What another rank has left is that rank's to take back.
    if own := _blamed.pop(group, ""):
        take_back_reason(group, own)


def _wanted(exchanged: Mapping[str, object] | None) -> dict[str, str]:
    """Whether the backward gives each tensor a gradient."""
    tensors = {name: x for name, x in (exchanged or {}).items() if isinstance(x, Tensor)}
    return {f"{name}.requires_grad": str(_wants_gradient(x)) for name, x in tensors.items()}


def _wants_gradient(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _blame(reason: str, group: ProcessGroup) -> None:
    own = _blamed.get(group, "")
    _blamed[group] = reason if leave_reason(group, reason) else own


def _patience(posted: _Posted, device: torch.device) -> float:
    return _PATIENCE["cpu" if posted.width is None or device.type == "cpu" else "other"]


def _name(width: int | None) -> str:
    return "group" if width is None else "TP group"


def _leave(error: Exception, call: comparing) -> None:
    """Tell the ranks that may wait for this one why it raises."""
    group = call.group if call.group is not None else call.compared_over
    refused = call.group is not None and call.compared_over is None
    # After the comparison a RuntimeError may be that another rank is lost: no reason of this one.
    if group is None or (isinstance(error, RuntimeError) and not refused):
        return
    if type(error).__name__ == "_StopRecomputationError":  # a checkpoint has all that it needs
        return
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    reason = f"{call.operation} on rank {group_rank(group)}: {kind}{error}"
    _blame(reason, group)
    if call.group is not None:
        agreed = _agreed.pop(group, set())  # the next call is compared
        if refused and (call.operation, None) not in agreed and os.environ.get(VARIABLE) != "1":
            _post_refusal(reason, group)


def _captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# ---- the first call ----------------------------------------------------------------------------


@dataclass
class _Posted:
    """What a rank says of its first call.

    Attributes:
        width: columns of its shard; None over a CP or data-parallel group.
        refused: why it makes no such call, or nothing.
        options: numbers, flags and choices, by name.
        tensors: shape, dtype, first values and hash of each integer tensor, of a temperature and of
            `_REPORTS`; in what dtype others of floating point are summed; by name.
        tokens: the shape of given logits but for the vocabulary, by name.
        hidden: some values of hidden states that every rank has whole, by name.
    """

    width: int | None
    operation: str = ""
    refused: str = ""
    options: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    hidden: dict[str, list[float]] = field(default_factory=dict)

    def add(self, arguments: Mapping[str, object]) -> None:
        self._add(arguments, in_parts=arguments.get("sequence_parallel") is True)

    def _add(self, arguments: Mapping[str, object], *, in_parts: bool) -> None:
        for name, value in arguments.items():
            if (parts := _parts(name, value)) is not None:
                self.options[name] = "several values"
                self._add(parts, in_parts=in_parts)
            elif _is_option(value):
                if name.rpartition(".")[2] not in _OF_ONE_RANK:
                    self.options[name] = _value(name, value)
            elif isinstance(value, Tensor):
                self.options[name] = "a tensor"
                if not (value.is_meta or is_traced(value)):  # those have no values
                    self._add_tensor(name, value, in_parts=in_parts)

    def _add_tensor(self, name: str, value: Tensor, *, in_parts: bool) -> None:
        if value.is_floating_point():
            # Logits may differ in dtype, but not in that of the sums that ranks exchange.
            self.tensors[name] = f"sums in {acc_dtype(value.dtype)}".replace("torch.", "")
            if "logits" in name:  # an operation may have no integer tensor that says how many
                self.tokens[name] = str([*value.shape[:-1], "V/TP"]).replace("'", "")
            if "hidden" in name and in_parts:
                self.tensors[name] = f"{tuple(value.shape)} {value.dtype}"
            elif "hidden" in name and value.numel():
                self.hidden[name] = _some_values(value.detach())
            elif name.endswith(("temperature", *_REPORTS)):
                self.tensors[name] = _value(name, value)
            elif any(part in name for part in ("weight", "bias", "lora")):
                self.tensors[name] = f"{tuple(value.shape)} {value.dtype}"
        elif not any(part in name for part in _SHARDED) or "topk" in name:
            self.tensors[name] = _value(name, value)


def _is_option(value: object) -> bool:
    each = value if isinstance(value, list) else [value]
    return all(isinstance(x, _OPTIONS) for x in each)


def _some_values(x: Tensor) -> list[float]:
    """Evenly spaced values along every dimension."""
    x = getattr(x, "_local_tensor", x)  # of a DTensor
    picked = x[tuple(slice(None, None, -(-size // _SAMPLED)) for size in x.shape)]
    return picked.double().flatten().tolist()


def _posted_by_all(own_post: _Posted, group: ProcessGroup, patience: float) -> list[_Posted]:
    """What each rank has posted, in the group's order; without a store only this rank's.

    The number in the keys counts the times that this rank has agreed, differed or refused on the
    group: it is the same on every rank, and lives in the store, as a group object may be made
    again.

    Raises:
        ValueError: some rank has posted nothing in time; not over a CP or data-parallel group, if
            this rank has not raised before.
    """
    store = group_store(group)
    if store is None:
        return [own_post]
    rank, size = group_rank(group), group_size(group)
    counter, keys = _place(store, rank, size)
    store.set(keys[rank], json.dumps(asdict(own_post)))
    deadline, pause = time.monotonic() + patience, 1e-4
    while True:
        posted = [store.get(key).decode() for key in keys] if store.check(keys) else []
        if posted and _WITHDRAWN not in posted:
            break
        if time.monotonic() > deadline:
            if own_post.width is None and group not in _blamed:
                store.add(counter, 1)  # the late ones will compare with what is posted
                return [own_post]
            store.set(keys[rank], _WITHDRAWN)
            error = _no_answer(own_post, rank, patience)
            _blame(str(error), group)
            raise error
        time.sleep(pause)
        pause = min(2.0 * pause, 0.02)
    store.add(counter, 1)
    return [_Posted(**json.loads(text)) for text in posted]


def _place(store: dist.Store, rank: int, size: int) -> tuple[str, list[str]]:
    """The key of this rank's count, and those of every rank's next post."""
    counter = f"mcore_logprobs/calls/{rank}"
    number = store.add(counter, 0)
    return counter, [f"mcore_logprobs/call/{number}/{other}" for other in range(size)]


def _post_refusal(reason: str, group: ProcessGroup) -> None:
    store = group_store(group)
    if store is None:
        return
    rank = group_rank(group)
    with suppress(RuntimeError):  # the store was a lost rank's
        counter, keys = _place(store, rank, group_size(group))
        store.set(keys[rank], json.dumps(asdict(_Posted(None, refused=reason))))
        store.add(counter, 1)


def _no_answer(posted: _Posted, rank: int, patience: float) -> ValueError:
    none = f"and none within {patience:g} s on every other rank"
    if posted.width is None:
        return ValueError(
            f"{posted.operation}: expected the same call on every rank of the group, got one on "
            f"rank {rank}, which has raised before, {none}"
        )
    return ValueError(
        f"{posted.operation}: expected the same call on every rank of the TP group, got the first "
        f"one with {posted.width} columns on rank {rank}, {none}"
    )


def _compare(posted: list[_Posted], group: str) -> None:
    """Raises a ValueError, on every rank, where ranks differ."""
    refused = [each.refused for each in posted if each.refused]
    if refused:
        raise another_stopped(refused[0])
    if len({each.width for each in posted}) > 1:
        raise ValueError(
            "vocabulary shards: expected the same number of columns on every rank of the TP "
            f"group, got {_of_ranks([each.width for each in posted])}: pad the vocabulary to a "
            "multiple of the group's size"
        )
    _compare_texts([{"operation": each.operation} for each in posted], group)
    _compare_texts([each.options for each in posted], group)
    for name in dict.fromkeys(name for each in posted for name in each.hidden):
        values = [each.hidden.get(name, []) for each in posted]
        if not all(_close(values[0], other) for other in values[1:]):
            raise ValueError(
                f"{name}: expected the same hidden states on every rank of the TP group, got "
                "others on each; if they are each rank's part of the sequence, pass "
                "sequence_parallel=True and the whole sequence's targets"
            )
    _compare_texts([each.tensors for each in posted], group)
    _compare_texts([each.tokens for each in posted], group)


def _compare_texts(described: list[dict[str, str]], group: str) -> None:
    for name in dict.fromkeys(name for each in described for name in each):
        texts = [each.get(name, "absent") for each in described]
        if len(set(texts)) > 1:
            raise ValueError(
                f"{name}: expected the same on every rank of the {group}, got {_of_ranks(texts)}"
            )


def _of_ranks(values: list[Any]) -> str:
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))


def _close(one: list[float], other: list[float]) -> bool:
    if len(one) != len(other):
        return False
    a, b = torch.tensor([one, other], dtype=torch.float64, device="cpu")
    norm = torch.maximum(a.norm(), b.norm())
    # NaN and inf are for the operation to give back.
    return not bool(norm.isfinite()) or bool((a - b).norm() <= _CLOSE * norm)


# ---- all arguments, on demand ------------------------------------------------------------------


def _compare_arguments(
    described: dict[str, str], name: str, group: ProcessGroup, device: torch.device
) -> None:
    message = json.dumps(described).encode()
    if len(message) > _MESSAGE_BYTES:  # no rank may raise by itself
        described = {"operation": described["operation"], "all arguments": f"hash {_hash(message)}"}
        message = json.dumps(described).encode()
    sent = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
    sent[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    rows = all_gather_stack(sent.to(device), group).cpu()
    calls = [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in rows]
    names = dict.fromkeys(argument for call in calls for argument in call)
    different = []
    for argument in names:
        values = [call.get(argument, "absent") for call in calls]
        if len(set(values)) > 1:
            different.append(f"{argument}: {_of_ranks(values)}")
    if different:
        raise ValueError(f"the ranks of the {name} make different calls; " + "; ".join(different))


def _described(name: str, value: Any) -> dict[str, str]:
    """An argument, part by part."""
    if (parts := _parts(name, value)) is None:
        text = _value(name, value)
        return {name: text} if text else {}
    return {k: text for key, part in parts.items() for k, text in _described(key, part).items()}


def _parts(name: str, value: object) -> dict[str, object] | None:
    """The parts of a mapping, a dataclass, a tuple or a partial by name; None of anything else."""
    if isinstance(value, functools.partial):
        bound = {f"{name}({place})": part for place, part in enumerate(value.args)}
        named = {f"{name}({key}=)": part for key, part in value.keywords.items()}
        return {name: value.func, **bound, **named}
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {f"{name}.{key}" if name else str(key): part for key, part in value.items()}
    if isinstance(value, tuple):
        return {f"{name}[{place}]": part for place, part in enumerate(value)}
    return None


def _value(name: str, value: object) -> str:
    if isinstance(value, ProcessGroup):
        return ""
    if isinstance(value, Tensor):
        learns = " that requires a gradient" if _wants_gradient(value) else ""
        value = getattr(value, "_local_tensor", value).detach()  # of a DTensor
        text = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{learns}"
        sharded = value.is_floating_point() and any(part in name for part in _SHARDED)
        if sharded and "topk" not in name:
            return text
        flat = value.cpu().reshape(-1)
        # A clone: to torch one number with a stride is contiguous, and yet no view of bytes.
        packed = flat.clone(memory_format=torch.contiguous_format)
        content = packed.view(torch.uint8).numpy().tobytes()
        first = ", ".join(f"{x:g}" for x in flat[:4].tolist())
        more = ", ..." if flat.numel() > 4 else ""
        return f"{text} [{first}{more}] hash {_hash(content)}"
    text = getattr(value, "__qualname__", "") if callable(value) else repr(value)
    text = text or type(value).__qualname__
    text = re.sub(r" at 0x[0-9a-f]+", "", text)  # an object without a repr of its own
    if len(text) > _LONGEST_VALUE:
        text = f"{text[:_LONGEST_VALUE]}... hash {_hash(text.encode())}"
    return text


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=4).hexdigest()
