"""The `with` blocks that are open on a patched head, also where a checkpoint calls it again."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree

from mcore_logprobs.collectives import saved_tensors_hooks
from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.megatron.calls import Call

Output = TypeVar("Output")


_NUMBERS = itertools.count()  # of blocks and of patches' settings, none twice


def _hooks_around() -> object:
    """A checkpoint's, if one is around; None in what torch.compile traces, which cannot tell."""
    return None if torch.compiler.is_compiling() else saved_tensors_hooks()


class OpenBlocks:
    """The `with` blocks that are open on a patched head, in the order in which they were entered.

    Each undoes its own change when it ends, in any order. A copy has none open: the
    block around a `copy.deepcopy` of the model never ends for the copy.
    """

    def __init__(self, config: LogprobConfig) -> None:
        self._config = config
        # By number: the change, and the checkpoint in which the block was entered.
        self._changes: dict[int, tuple[Callable[[Call], Call], object]] = {}
        self._number = next(_NUMBERS)
        self._expected: tuple[int, ...] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return OpenBlocks, (self._config,)

    @property
    def call(self) -> Call:
        """The patch's settings with every open block's change, the innermost block's last.

        Raises:
            ValueError: changes that do not go together once a block between them has ended.
        """
        call = Call(self._config)
        for change, _ in self._changes.values():
            call = change(call)
        return call

    @contextlib.contextmanager
    def open(self, change: Callable[[Call], Call]) -> Iterator[None]:
        number = next(_NUMBERS)
        self._changes[number] = change, _hooks_around()
        try:
            yield
        finally:
            del self._changes[number]

    # An activation checkpoint around the model calls it again in the backward.

    @property
    def around_checkpoint(self) -> tuple[int, ...]:
        """Numbers of what a call depends on that its checkpoint does not enter again itself."""
        inside = _hooks_around()
        blocks = (n for n, (_, at) in self._changes.items() if at is None or at != inside)
        return (self._number, *blocks)

    @contextlib.contextmanager
    def recomputing(self, numbers: tuple[int, ...]) -> Iterator[None]:
        """What is called inside was called with these before."""
        self._expected = numbers
        try:
            yield
        finally:
            self._expected = None

    def check_recomputed(self) -> None:
        """For each call: one that a checkpoint makes again has the blocks of the first.

        Raises:
            RuntimeError: it has others, and would compute something else.
        """
        if self._expected is not None and self._expected != self.around_checkpoint:
            raise RuntimeError(_OTHER_BLOCKS)

    def recomputable(self, output: Output) -> Output:
        """Let the backward of a call see with which blocks a checkpoint has made it again.

        A reentrant checkpoint cannot be seen: it runs the call without a gradient.

        Returns: `output`; inside a checkpoint or other hooks on saved tensors, with copies in
            place of its tensors that require a gradient.
        """
        if _hooks_around() is None:
            return output
        leaves = pytree.tree_leaves(output)
        tensors = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        if not tensors:
            return output
        copies = dict(zip(map(id, tensors), _SameBlocks.apply(self, *tensors), strict=True))
        return pytree.tree_map(lambda x: copies.get(id(x), x), output)


_OTHER_BLOCKS = (
    "an activation checkpoint calls the patched model again in the backward, with other "
    "PatchHandle blocks open than in the forward: run the backward inside the same ones"
)


class _SameBlocksContext(FunctionCtx):
    blocks: OpenBlocks
    numbers: tuple[int, ...]
    saved_tensors: tuple[Tensor, ...]


class _SameBlocks(torch.autograd.Function):
    """Copies of its inputs, whose backward compares the blocks of the two calls.

    The backward is the first call's, the tensor that it has saved the second's.
    """

    @staticmethod
    def forward(
        ctx: _SameBlocksContext, blocks: OpenBlocks, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.blocks, ctx.numbers = blocks, blocks.around_checkpoint
        ctx.save_for_backward(torch.tensor(hash(ctx.numbers), dtype=torch.int64, device="cpu"))
        return tuple(x.clone() for x in tensors)

    @staticmethod
    def backward(ctx: _SameBlocksContext, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        with ctx.blocks.recomputing(ctx.numbers):
            (recomputed,) = ctx.saved_tensors  # calls the model, where nothing has before
        if recomputed.item() != hash(ctx.numbers):
            raise RuntimeError(_OTHER_BLOCKS)
        return (None, *grads)
