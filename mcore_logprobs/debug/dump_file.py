"""Tensors by name from a file, without running any code of it."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch


def read_dump(path: str | PathLike[str]) -> dict[str, Any]:
    """A dictionary saved by `torch.save` (.pt, .pth), or arrays saved by `numpy.savez` (.npz).

    Raises:
        ValueError: another suffix, or a .pt file that holds no dictionary.
        pickle.UnpicklingError: pickled objects other than tensors and plain values.
    """
    file = Path(path)
    if file.suffix == ".npz":
        import numpy as np

        with np.load(file, allow_pickle=False) as arrays:
            return {key: torch.from_numpy(arrays[key]) for key in arrays.files}
    if file.suffix not in (".pt", ".pth"):
        raise ValueError(f"{file}: expected a .npz or .pt file")
    dump = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(dump, dict):
        raise ValueError(f"{file}: expected a dictionary, got {type(dump).__name__}")
    return dump
