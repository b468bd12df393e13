"""Tensors by name from a file, without running any code of it."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def read_dump(path: str | PathLike[str]) -> dict[str, Any]:
    """A dictionary saved by `torch.save` (.pt, .pth), or arrays saved by `numpy.savez` (.npz).

    A value of None is as if its key were not there.

    Raises:
        ValueError: another suffix, a damaged file, a .pt file that holds no dictionary, or anything
            but tensors and plain values.
        OSError: the file cannot be opened.
    """
    file = Path(path)
    if file.suffix not in (".npz", ".pt", ".pth"):
        raise ValueError(f"{file}: expected a .npz or .pt file")
    reader, read, expected = (
        ("numpy", _read_npz, "arrays of numbers saved by numpy.savez")
        if file.suffix == ".npz"
        else ("torch", _read_pt, "a dictionary of tensors and numbers saved by torch.save")
    )
    try:
        dump = read(file)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # what a damaged file raises depends on where the damage is
        got = f"a file that {reader} refuses ({type(error).__name__})"
        raise ValueError(f"{file}: expected {expected}, got {got}") from error
    if not isinstance(dump, dict):
        raise ValueError(f"{file}: expected a dictionary, got {type(dump).__name__}")
    return {key: value for key, value in dump.items() if value is not None}


def _read_npz(file: Path) -> object:
    import numpy as np

    with np.load(file, allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def _read_pt(file: Path) -> object:
    return torch.load(file, map_location="cpu", weights_only=True)


def number_of(
    path: str | PathLike[str],
    dump: Mapping[str, object],
    name: str,
    *,
    expected: str = "a number",
) -> float | None:
    """The number of that name, which may be a tensor with one entry; None where there is none.

    Raises:
        ValueError: anything else.
    """
    value = dump.get(name)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise ValueError(f"{path}: {name}: expected {expected}, got {_described(value)}")


def whole_number_of(
    path: str | PathLike[str], dump: Mapping[str, object], name: str, default: int | None = None
) -> int | None:
    """`number_of` as an int, or the default.

    Raises:
        ValueError: it is not a whole number of 64 bits.
    """
    expected = "a whole number"
    value = number_of(path, dump, name, expected=expected)
    if value is None:
        return default
    if isinstance(value, int) or value.is_integer():
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{path}: {name}: expected {expected} of 64 bits, got {value}")
        return int(value)
    raise ValueError(f"{path}: {name}: expected {expected}, got {_described(value)}")


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}"
    return str(value) if isinstance(value, float) else type(value).__name__
