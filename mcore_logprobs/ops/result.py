"""`TokenStats`: what an operation on logits gives for each token."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from mcore_logprobs.checks import check_integer
from mcore_logprobs.consistency import comparing
from mcore_logprobs.context_parallel import context_parallel_gather
from mcore_logprobs.groups import resolve_cp_group
from mcore_logprobs.spelling import suggesting


@dataclass(eq=False)
class TokenStats:
    """Statistics of each token.

    Every tensor except policy_loss has the target's shape `[...]`, or `[..., k]` if it says so. A
    field that the call did not ask for is None.

    Attributes:
        logprobs: float32, log p[target] in nats; 0 where the target is ignore_index. With label
            smoothing, minus the smoothed cross entropy. Differentiable.
        entropy: float32, -sum p log p in nats; 0 where ignored. Differentiable. By entropy=True.
        target_rank: int64, the number of columns with a larger logit than the target's (0: the
            target is the argmax; ties do not count as larger); -1 where ignored. By
            target_rank=True.
        lse: float32, log-sum-exp of the processed logits; 0 where ignored, and where every logit is
            -inf (logprobs is -inf there, and gradients are finite). Differentiable, so that a
            z-loss costs no second pass. None if the call only replays a sampler's masks.
        sum_pi_squared: float32, sum p^2. Differentiable. By sum_pi_squared=True.
        policy_loss: scalar, the loss of `PatchHandle.policy_loss`. Differentiable; of the fields
            beside it only divergence, candidates and topk's values are.
        divergence: float32, from a teacher, in nats; 0 where ignored. Differentiable. By
            `PatchHandle.divergence`.
        full_logprobs: float32, log p[target] of the full distribution, next to `logprobs` over the
            ids that a sampler kept; 0 where ignored. Differentiable. By full=True of a replay.
        kept_entropy: float32, the entropy over the ids that a sampler kept; 0 where ignored.
            Differentiable. By entropy=True of a replay.
        candidates: float32 `[..., k]`, log-probabilities (or logits) of given ids; 0 where ignored.
            Differentiable. By candidate_ids= or `PatchHandle.also`.
        topk: (float32 values, int64 global ids), `[..., k]` each, of the largest logits; 0 where
            ignored. Values are differentiable. By topk= or `PatchHandle.also`.

    Tensors are float64 where the logits are.

    It is a pytree, and can be sliced and moved like one tensor `[...]`: `stats[index]`, `.shape`,
    `.device`, `.requires_grad`, `.detach()`, `.to(...)`. policy_loss is not a per-token tensor:
    `.requires_grad` ignores it, and an index drops it.
    """

    logprobs: Tensor
    entropy: Tensor | None
    target_rank: Tensor | None
    lse: Tensor | None
    sum_pi_squared: Tensor | None = None
    policy_loss: Tensor | None = None
    divergence: Tensor | None = None
    full_logprobs: Tensor | None = None
    kept_entropy: Tensor | None = None
    candidates: Tensor | None = None
    topk: tuple[Tensor, Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_base":  # which Megatron's nodes ask of what they pass on
            raise AttributeError(
                "a schedule plan (combined 1F1B) takes a TokenStats of a patched model alone: "
                "expected output='loss', or patch_model instead of an output_processor"
            )
        raise AttributeError(
            f"TokenStats has no attribute {name!r}: use .logprobs, a tensor; with output='loss' a "
            "patched model returns the loss itself"
        )

    @property
    def loss(self) -> Tensor:
        """Cross entropy for each token, `-logprobs`."""
        return -self.logprobs

    @property
    def shape(self) -> torch.Size:
        """The per-token tensors' shape `[...]`."""
        return self.logprobs.shape

    @property
    def device(self) -> torch.device:
        return self.logprobs.device

    @property
    def requires_grad(self) -> bool:
        """Whether a per-token tensor requires a gradient."""
        return any(x.requires_grad for x in pytree.tree_leaves(self._per_token()))

    def __getitem__(self, index: Any) -> TokenStats:
        """Every per-token tensor at `index`, as `logprobs[index]`; without policy_loss.

        Candidates and a top k `[..., k]` keep their k.
        """
        index = index if isinstance(index, tuple) else (index,)
        # An Ellipsis means only the tokens' dimensions.
        k = (slice(None),) if any(part is Ellipsis for part in index) else ()
        dims = len(self.shape)
        return self._per_token_only(lambda x: x[index if x.dim() == dims else (*index, *k)])

    def __iter__(self) -> NoReturn:
        # Python would take stats[0], stats[1], ...: rows, where fields were meant.
        raise TypeError(
            "TokenStats is not iterable: expected its fields by name, such as .logprobs"
        )

    def map(self, fn: Callable[[Tensor], Tensor]) -> TokenStats:
        """`fn` of every per-token tensor there is; policy_loss stays as it is."""
        return replace(self, **pytree.tree_map(fn, self._per_token()))

    def detach(self) -> TokenStats:
        """Every tensor detached from the graph, policy_loss too."""
        return self._all(lambda x: x.detach())

    def to(self, *args: Any, **kwargs: Any) -> TokenStats:
        """`Tensor.to` of every tensor; a dtype converts only the floating-point ones.

        Raises:
            ValueError: a dtype of integers, or a tensor of one.
        """
        for value in (*args, *kwargs.values()):
            dtype = value.dtype if isinstance(value, Tensor) else value
            if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
                raise ValueError(f"dtype: expected a floating-point dtype, got {dtype}")

        def move(x: Tensor) -> Tensor:
            if x.is_floating_point():
                return x.to(*args, **kwargs)

            def kept(value: Any) -> Any:
                if isinstance(value, torch.dtype):
                    return x.dtype
                like = isinstance(value, Tensor)
                return value.new_empty(0, dtype=x.dtype) if like else value

            return x.to(*map(kept, args), **{name: kept(v) for name, v in kwargs.items()})

        return self._all(move)

    @suggesting
    def gather_cp(
        self,
        cp_group: ProcessGroup | None = None,
        seq_dim: int = 1,
        layout: str = "zigzag",
        cu_seqlens: Tensor | None = None,
        grad: str = "sum",
    ) -> TokenStats:
        """The statistics of whole sequences from the context-parallel ranks' parts.

        Shape: `[..., S/CP, ...]` in, `[..., S, ...]` out, in the sequence's order, on every rank;
            without policy_loss, which is of this rank's tokens.

        Args: those of `context_parallel_gather`, whose docstring says which `grad` goes with which
            loss.

        Collectives: one all-gather over CP for each tensor there is; backward, for grad="sum", one
            reduce-scatter for each that the loss uses.

        Raises:
            ValueError: as `context_parallel_gather`, before any collective.
        """
        group = resolve_cp_group(cp_group)
        with comparing("context_parallel_gather", dict, group):
            dim = self._token_dim(seq_dim)
        return self._per_token_only(
            lambda x: context_parallel_gather(
                x,
                cp_group=group,
                seq_dim=dim,
                layout=layout,
                cu_seqlens=cu_seqlens,
                grad=grad,
            )
        )

    @suggesting
    def unpack(
        self,
        cu_seqlens: Tensor | Sequence[int],
        lengths: Tensor | Sequence[int] | None = None,
        seq_dim: int = 1,
    ) -> list[TokenStats]:
        """One TokenStats for each packed sequence, without policy_loss; views, which torch lets
        nobody write in place where they have a gradient.

        Shape: `[..., T, ...]` with T tokens at seq_dim; item i is `[..., n_i, ...]`.

        Args:
            cu_seqlens: padded cumulative lengths `[0, ..., <= T]`, one more than sequences.
            lengths: each sequence's true length, which cuts the padding off at its end; None keeps
                the padding.

        Under context parallelism gather first (`gather_cp`). One host sync for each argument that
        is a tensor on a GPU, as the results' shapes depend on them.

        Raises:
            ValueError: bounds that do not ascend from 0 to at most T; lengths of another count, or
                past their sequence's end.
        """
        seq_dim = self._token_dim(seq_dim)
        bounds = _integers(cu_seqlens, "cu_seqlens")
        size = self.shape[seq_dim]
        # Only the ends, without the 0 in front, would lose the first sequence.
        if bounds[:1] != [0] or bounds[-1] > size or bounds != sorted(bounds):
            raise ValueError(
                f"cu_seqlens: expected bounds that ascend from 0 to at most {size}, got {bounds}"
            )
        parts = list(itertools.pairwise(bounds))
        widths = [end - start for start, end in parts]
        kept = widths if lengths is None else _integers(lengths, "lengths")
        if len(kept) != len(parts) or any(
            not 0 <= n <= width for n, width in zip(kept, widths, strict=True)
        ):
            raise ValueError(
                f"lengths: expected {len(parts)} lengths of at most {widths}, got {kept}"
            )

        # One split of each tensor: the gradient of a slice of one's own would be of all tokens.
        sizes = []
        for n, width in zip(kept, widths, strict=True):
            sizes += [n, width - n]
        sizes.append(size - bounds[-1])
        tensors, spec = pytree.tree_flatten(self._per_token())
        pieces = [x.split(sizes, seq_dim)[:-1:2] for x in tensors]
        return [
            replace(self, policy_loss=None, **pytree.tree_unflatten(list(own), spec))
            for own in zip(*pieces, strict=True)
        ]

    def _token_dim(self, seq_dim: int) -> int:
        """A dimension of the tokens from the front: from the end it would be a candidate's k."""
        check_integer("seq_dim", seq_dim)
        dims = len(self.shape)
        if not -dims <= seq_dim < dims:
            raise ValueError(f"seq_dim: out of range for shape {tuple(self.shape)}, got {seq_dim}")
        return seq_dim % dims

    def _tensors(self) -> dict[str, Any]:
        """Tensors, or tuples of them, by name."""
        by_name = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: x for name, x in by_name.items() if x is not None}

    def _per_token(self) -> dict[str, Any]:
        return {name: x for name, x in self._tensors().items() if name != "policy_loss"}

    def _all(self, fn: Callable[[Tensor], Tensor]) -> TokenStats:
        return replace(self, **pytree.tree_map(fn, self._tensors()))

    def _per_token_only(self, fn: Callable[[Tensor], Tensor]) -> TokenStats:
        return replace(self.map(fn), policy_loss=None)


def _integers(values: Tensor | Sequence[int], name: str) -> list[int]:
    if isinstance(values, Tensor):
        if values.dim() != 1 or values.is_floating_point() or values.is_complex():
            raise ValueError(
                f"{name}: expected a tensor of integers of one dimension, got {values.dtype} of "
                f"shape {tuple(values.shape)}"
            )
        values = values.tolist()
    if not isinstance(values, Sequence) or not all(
        isinstance(v, numbers.Integral) and not isinstance(v, bool) for v in values
    ):
        raise ValueError(f"{name}: expected a tensor or a list of ints, got {values!r}")
    return [int(v) for v in values]


def flatten(stats: TokenStats) -> tuple[list[object], None]:
    return [getattr(stats, f.name) for f in fields(stats)], None


def _unflatten(values: Any, context: None) -> TokenStats:
    return TokenStats(*values)


pytree.register_pytree_node(
    TokenStats, flatten, _unflatten, serialized_type_name="mcore_logprobs.TokenStats"
)
