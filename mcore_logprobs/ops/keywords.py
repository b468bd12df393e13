"""The keywords that operations share: declared and documented here.

A public operation takes its own arguments by name and the rest as `**shared: Unpack[...]`, which
type checkers and editors resolve. `shared_keywords` gives it the explicit signature and docstring
that `help`, `inspect` and the documentation show. Defaults are those of `given_logits` and
`head_logits`, which check the values.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict, TypeVar

import torch
import torch.distributed as dist

from mcore_logprobs.consistency import comparing
from mcore_logprobs.spelling import check_keywords

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from mcore_logprobs.sources.lora import LoRAInput
    from mcore_logprobs.sources.vocab_bias import Ids, LogitBias


class LogitsKeywords(TypedDict, total=False):
    """The shared keywords of an operation on vocab-parallel logits."""

    tp_group: ProcessGroup | None
    temperature: float | Tensor
    vocab_size: int | None
    softcap: float | None
    chunk_size: int | None
    backend: str
    logit_bias: LogitBias | None
    disallowed_ids: Ids | None


class StatisticsKeywords(LogitsKeywords, total=False):
    """Those of statistics, too."""

    inplace_backward: bool
    invariant_segments: int | None


class LayerKeywords(TypedDict, total=False):
    """The shared keywords of an operation on hidden states that concern the LM head and rows."""

    bias: Tensor | None
    lora: LoRAInput | None
    logit_scale: float
    softcap: float | None
    sequence_parallel: bool
    logits_dtype: torch.dtype
    rows: Tensor | None
    compact: bool
    gradient_accumulation_fusion: bool
    saved_bytes: int
    tp_group: ProcessGroup | None
    chunk_size: int | None


class HeadKeywords(LayerKeywords, total=False):
    """All shared keywords of an operation on hidden states: those that process logits too."""

    temperature: float | Tensor
    vocab_size: int | None
    backend: str
    logit_bias: LogitBias | None
    disallowed_ids: Ids | None


DOCS = {
    "tp_group": "ranks that share the vocabulary. None: Megatron's own group, or one process; see "
    "`mcore_logprobs.groups`.",
    "temperature": "logits are divided by it: a number, or a tensor without gradient that "
    "broadcasts to the tokens' shape (one temperature per token).",
    "vocab_size": "true vocabulary; columns at or past it count as -inf. None: all V.",
    "softcap": "z = softcap * tanh(logits / softcap) before bias and temperature, as Gemma does.",
    "chunk_size": "tokens at a time; None: chosen from a memory budget.",
    "backend": '"auto", "torch", "triton" (CUDA) or "inductor" (CPU; compiles at its first use); '
    "see `mcore_logprobs.kernels.backend`.",
    "inplace_backward": "write the gradient over the logits, so that no large tensor is made. The "
    "logits must not be used after the backward.",
    "invariant_segments": "g: values and the logits' gradient are bitwise identical for every TP "
    "size that divides g, for every chunk_size, and with any other rows in the call. This holds on "
    "one kind of machine, with one backend, dtype and number of threads. V must be divisible by g. "
    "None: no such guarantee.",
    "bias": "`[V/TP]`, added after scale and softcap, or None.",
    "lora": "None, or (A `[r, h]`, B `[V/TP, r]`, scale) in hidden's dtype: `scale * (hidden @ "
    "A^T) @ B^T` is added to the logits before logit_scale. A is the same on every TP rank; B is "
    "this rank's rows, like the weight.",
    "logit_scale": "hidden @ weight^T is multiplied by it (MuP).",
    "sequence_parallel": "hidden is split over TP along its first dimension.",
    "logits_dtype": "what a chunk of logits is rounded to. The default is float32 even for "
    "bfloat16 operands, because the rounding of logits is the main source of mismatch between "
    "trainer and rollout engine. torch.bfloat16 gives what a bfloat16 head gives.",
    "logit_bias": "None, or what is added to the logits before the temperature, as engines do: "
    "`{id: x}` with global ids, or this rank's `[V/TP]`; finite or -inf. A constant without a "
    "gradient. Both sides of a divergence get it.",
    "disallowed_ids": "None, or integers `[k]`: global ids whose logits are -inf (NaN and inf "
    "become NaN), the same on every TP rank. A target or an id to gather among them has "
    "log-probability -inf and, without a filter, a log-probability's gradient at its own column "
    "(grad_output): mask its loss.",
    "rows": "None, or int64 `[m]`: compute only these rows, flat indices into hidden's leading "
    "shape (of the whole sequence under sequence parallelism, the same on every TP rank), in any "
    "order, repeated or not. Targets, masks, per-token tensors and results are then `[m]`; other "
    "rows cost no GEMM. No host sync if the indices are on the CPU; if they are on a GPU one, and "
    "one more for a teacher's head.",
    "compact": "compute only rows that count (target not ignore_index, or mask True). The results "
    "are the same. Costs one host sync. Not allowed with rows.",
    "gradient_accumulation_fusion": "add the weight's gradient to `weight.main_grad` in place, as "
    "Megatron's linear layers do (`grad_added_to_main_grad` and `zero_out_wgrad` honored).",
    "saved_bytes": "bytes of logits that may be kept from the forward to the backward, chunk by "
    "chunk as they fit. A kept chunk is not computed again: it costs 3 GEMMs, any other 4. 0: "
    "none. `linear_token_stats` has the details.",
}

Function = TypeVar("Function", bound=Callable[..., object])


def shared_keywords(
    keywords: type, declared_by: Callable[..., object]
) -> Callable[[Function], Function]:
    """Makes the last parameter, `**shared: Unpack[keywords]`, explicit.

    In the docstring `{shared}` becomes the keywords' texts. An unknown keyword is a TypeError.

    Args:
        declared_by: the function whose defaults they have.
    """
    defaults = inspect.signature(declared_by).parameters
    names = tuple(keywords.__annotations__)

    def decorate(function: Function) -> Function:
        *own, _ = inspect.signature(function).parameters.values()
        shared = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults[name].default,
                annotation=defaults[name].annotation,
            )
            for name in names
        ]
        signature = inspect.signature(function).replace(parameters=[*own, *shared])
        known = frozenset(signature.parameters)

        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            if not known.issuperset(kwargs):
                check_keywords(function.__name__, kwargs, known)
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            if torch._C._are_functorch_transforms_active():
                raise RuntimeError(
                    f"{function.__name__}: expected torch.autograd or backward(), got a transform "
                    "of torch.func (grad, vmap, jvp, ...)"
                )
            if not (dist.is_available() and dist.is_initialized()):  # no rank to compare with
                return function(*args, **kwargs)
            with comparing(function.__name__, lambda: _bound(signature, args, kwargs)):
                return function(*args, **kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]
        if call.__doc__:  # None under python -OO
            doc = inspect.cleandoc(call.__doc__)  # as Python 3.13 has it already
            call.__doc__ = doc.replace("{shared}", _texts(names))
        return call  # type: ignore[return-value]

    return decorate


def _bound(
    signature: inspect.Signature, args: tuple[object, ...], kwargs: dict[str, object]
) -> dict[str, object]:
    """All arguments by name: one that is given may be the default of a rank that gives none."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _texts(names: tuple[str, ...]) -> str:
    lines = [
        textwrap.fill(
            f"{name}: {DOCS[name]}", 92, initial_indent=" " * 4, subsequent_indent=" " * 8
        )
        for name in names
    ]
    return "\n".join(lines).lstrip()
