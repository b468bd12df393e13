"""Sequences that share prefixes, packed so that each shared token is computed once.

One hidden state then has several next tokens: `rows=` of the operations from hidden states, and
`PatchHandle.targets(target, rows=)`, score them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_logprobs.checks import INTEGERS, check_count


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """A packed prefix tree: n tokens, each after the one it follows. CPU tensors, int64.

        tree = PrefixTree.from_branches([[5, 6, 7], [5, 6, 8, 9]])
        with handle.targets(tree.targets, rows=tree.rows):
            stats = model(tree.tokens[None], tree.positions[None], tree.attention_mask())
        first, second = tree.branches(stats.logprobs)  # [2] and [3]

    Rotary embeddings go by a token's place and not by its position: where the model has them, give
    each token those of its depth, as `examples/snippets/prefix_tree.py` does by a forward hook. A
    mask of `[n, n]` is dense; a fused kernel would need to know, of each block of keys, which
    queries descend from it (as FlexAttention's block masks do). Under context parallelism a tree
    stays whole on a rank.

    Attributes:
        tokens: `[n]`, ids in depth-first order; padding is 0.
        parents: `[n]`, where the token stands that each follows; -1 at roots and padding.
        positions: `[n]`, how many tokens come before each in its sequences; 0 in padding.
        order: `[n]`, which of `from_parents`' tokens stands at each place; -1 in padding.
        rows: `[m]`, flat indices into `[1, n]`: of every token with a parent, the parent's place.
        targets: `[m]`, the id of every token with a parent.
        paths: for each branch `[its length - 1]`, the places among the m of its tokens but the
            first. A branch of `from_parents` is a leaf with what leads to it.
    """

    tokens: Tensor
    parents: Tensor
    positions: Tensor
    order: Tensor
    rows: Tensor
    targets: Tensor
    paths: tuple[Tensor, ...]

    @classmethod
    def from_branches(
        cls, branches: Sequence[Sequence[int] | Tensor], *, multiple: int = 1
    ) -> PrefixTree:
        """The tree of some sequences of ids; as far as any two begin alike they share tokens.

        Args:
            branches: each with at least one id.
            multiple: n is padded to a multiple of it, as sequence parallelism wants.

        Raises:
            ValueError: no branch, one without integer ids, one that is not one-dimensional.
        """
        if not hasattr(branches, "__len__"):
            got = type(branches).__name__
            raise ValueError(f"branches: expected a sequence of sequences of ids, got {got}")
        if len(branches) == 0:  # a tensor [b, length] is as good as a list of its rows
            raise ValueError("branches: expected at least one sequence, got none")
        tokens: list[int] = []
        parents: list[int] = []
        children: dict[tuple[int, int], int] = {}
        ends = []
        for number, branch in enumerate(branches):
            try:
                ids = (
                    branch if isinstance(branch, Tensor) else torch.as_tensor(branch, device="cpu")
                )
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(
                    f"branches[{number}]: expected integer ids, [length], got {branch!r}"
                ) from error
            if ids.dim() != 1 or ids.numel() == 0 or ids.dtype not in INTEGERS:
                raise ValueError(
                    f"branches[{number}]: expected at least one id, [length], got shape "
                    f"{tuple(ids.shape)} of {ids.dtype}"
                )
            place = -1
            for token in ids.tolist():
                key = (place, token)
                if key not in children:
                    children[key] = len(tokens)
                    tokens.append(token)
                    parents.append(place)
                place = children[key]
            ends.append(place)
        return cls._of(_on_host(tokens), _on_host(parents), ends, multiple)

    @classmethod
    def from_parents(cls, tokens: Tensor, parents: Tensor, *, multiple: int = 1) -> PrefixTree:
        """The tree of tokens `[n]` that each name the token they follow, `[n]`; -1: none.

        Raises:
            ValueError: other shapes or dtypes, no token, parents out of range or in a circle.
        """
        for name, x in (("tokens", tokens), ("parents", parents)):
            if not isinstance(x, Tensor) or x.dim() != 1 or x.dtype not in INTEGERS:
                got = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"{name}: expected a tensor of integers [n], got {got}")
        count = tokens.numel()
        if count == 0 or parents.shape != tokens.shape:
            raise ValueError(
                f"parents: expected tokens' shape [n], n >= 1, got {tuple(parents.shape)} for "
                f"{tuple(tokens.shape)}"
            )
        above = parents.tolist()
        if min(above) < -1 or max(above) >= count:
            raise ValueError(f"parents: expected indices in [-1, {count}), got {above[:8]}")
        leaves = sorted(set(range(count)) - set(above))
        return cls._of(tokens.cpu().long(), parents.cpu().long(), leaves, multiple)

    @classmethod
    def _of(cls, tokens: Tensor, parents: Tensor, ends: list[int], multiple: int) -> PrefixTree:
        check_count("multiple", multiple)
        above = parents.tolist()
        below: list[list[int]] = [[] for _ in above]
        for child, parent in enumerate(above):
            if parent >= 0:
                below[parent].append(child)
        order: list[int] = []
        depth = [0] * len(above)
        waiting = [node for node, parent in enumerate(above) if parent < 0][::-1]
        while waiting:
            node = waiting.pop()
            order.append(node)
            for child in reversed(below[node]):
                depth[child] = depth[node] + 1
                waiting.append(child)
        if len(order) != len(above):
            raise ValueError("parents: expected a tree, got a cycle")
        walk = _on_host(order)
        place = torch.empty_like(walk)
        place[walk] = torch.arange(len(order), device="cpu")
        moved = parents[walk]
        moved = torch.where(moved >= 0, place[moved.clamp(min=0)], -1)
        has_parent = moved >= 0
        row = torch.where(has_parent, has_parent.cumsum(0) - 1, -1)
        paths = []
        # As lists: a tensor's single numbers cost a microsecond each.
        leads_to, row_of, place_of = moved.tolist(), row.tolist(), place.tolist()
        for end in ends:
            path, node = [], place_of[end]
            while leads_to[node] >= 0:
                path.append(row_of[node])
                node = leads_to[node]
            paths.append(_on_host(path[::-1]))
        padding = -len(order) % multiple

        def padded(x: Tensor, value: int) -> Tensor:
            return torch.nn.functional.pad(x, (0, padding), value=value)

        return cls(
            tokens=padded(tokens[walk], 0),
            parents=padded(moved, -1),
            positions=padded(_on_host(depth)[walk], 0),
            order=padded(walk, -1),
            rows=moved[has_parent],
            targets=tokens[walk][has_parent],
            paths=tuple(paths),
        )

    def branches(self, per_row: Tensor) -> list[Tensor]:
        """`[m, ...]` -> of each branch `[its length - 1, ...]`, in the order of its tokens.

        Raises:
            ValueError: no tensor, or another m.
        """
        if not isinstance(per_row, Tensor):
            raise ValueError(f"per_row: expected a torch.Tensor, got {type(per_row).__name__}")
        if per_row.shape[:1] != self.rows.shape:
            raise ValueError(
                f"per_row: expected [m, ...] with m = {self.rows.numel()}, got "
                f"{tuple(per_row.shape)}"
            )
        # One gather: the gradient of each branch's own would be of all rows. The parts may be
        # written in place, "unsafe" or not: nothing else reads their memory.
        joined = per_row[torch.cat(self.paths).to(per_row.device)]
        lengths = [path.numel() for path in self.paths]
        return list(torch.unsafe_split_with_sizes(joined, lengths))

    def sum_of_branches(self, values: Sequence[Tensor]) -> Tensor:
        """A tensor `[length - 1]` a branch -> `[m]`: each token's sum over the branches with it.

        A loss that is a sum over branches of weight times a function of the log-probability is one
        over rows with these weights. Integers and bools give int64, others their own dtype.

        Raises:
            ValueError: another number of tensors, other lengths, or more than one dtype or device.
        """
        for number, x in enumerate(values):
            like = values[0]
            if not isinstance(x, Tensor) or (x.dtype, x.device) != (like.dtype, like.device):
                got = f"{x.dtype} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(
                    f"values[{number}]: expected a torch.Tensor of one dtype and device for all "
                    f"branches, got {got}"
                )
        if [x.shape for x in values] != [path.shape for path in self.paths]:
            raise ValueError(
                f"values: expected lengths {[path.numel() for path in self.paths]}, got shapes "
                f"{[tuple(x.shape) for x in values]}"
            )
        dtype = given = values[0].dtype
        if dtype.is_floating_point:
            dtype = torch.promote_types(dtype, torch.float32)  # bfloat16 cannot count to 300
        elif not dtype.is_complex:
            dtype = given = torch.int64  # uint8 cannot either
        total = values[0].new_zeros(self.rows.numel(), dtype=dtype)
        paths = torch.cat(self.paths).to(total.device)
        return total.index_add(0, paths, torch.cat(list(values)).to(dtype)).to(given)

    def attention_mask(self) -> Tensor:
        """bool `[1, 1, n, n]`, True where a token does not attend, as Megatron has it.

        A token attends to itself and to what leads to it; padding to itself.
        """
        count = self.tokens.numel()
        attends = torch.eye(count, dtype=torch.bool, device="cpu")
        for place, parent in enumerate(self.parents.tolist()):
            if parent >= 0:  # stands before it
                attends[place] |= attends[parent]
        return ~attends[None, None]


def _on_host(numbers: list[int]) -> Tensor:
    """int64 `[n]` on the CPU, whatever the default device is."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")
