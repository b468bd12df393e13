"""slime's `slime.utils.ppo_utils`, `backends.megatron_utils.loss`, `.cp_utils` and
`.server.logprob_utils`.

    from mcore_logprobs.dropin.slime import get_log_probs_and_entropy

Tokens given to `calculate_log_probs_and_entropy` are targets as they are; those given to
`get_log_probs_and_entropy` are whole sequences, shifted here. Log-probabilities, not losses. No
`[T, V]` mask is made for the rollout's kept ids.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import mcore_logprobs as ours
from mcore_logprobs.dropin._common import (
    IGNORED,
    ONE_PROCESS,
    no_targets,
    or_every_rank,
    or_one_process,
    setting,
    size_or_none,
)
from mcore_logprobs.groups import group_rank

__all__ = [
    "all_gather_with_cp",
    "calculate_log_probs_and_entropy",
    "get_label_token_log_probs_from_vocab_parallel_logits",
    "get_log_probs_and_entropy",
    "get_logits_and_tokens_offset_with_cp",
    "slice_log_prob_with_cp",
    "slice_with_cp",
]

# ---- log-probabilities ---------------------------------------------------------------------------

_MILES_STATE = "miles.backends.training_utils.parallel"


def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: ProcessGroup | None,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: Tensor | tuple[Tensor, Tensor] | None = None,
    with_entropy_grad: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`[n, V/TP]`, targets `[n]` -> (float32 log-probabilities `[n, 1]`, entropy `[n]` or None).

    Args:
        tp_group: None: every rank, as slime hands it to `torch.distributed`.
        chunk_size: rows at a time; -1: from a memory budget.
        log_prob_keep_mask: what the rollout sampled from. Either (flat ids, offsets `[n + 1]`), row
            i keeping the global ids `flat[offsets[i]:offsets[i + 1]]` and its target; or slime's
            bool `[n, V/TP]` of this rank's columns, for which a copy of the logits is made. The
            entropy is that of the unmasked logits.
        with_entropy_grad: False: the entropy has no gradient.

    No rows: two empty `[0]` tensors, as in slime.
    """
    if logits.shape[0] == 0:
        nothing = logits.new_zeros((0,))
        return nothing, nothing.clone() if with_entropy else None
    group = or_every_rank(tp_group)
    options: dict[str, Any] = {"tp_group": group, "chunk_size": size_or_none(chunk_size)}
    entropy = None
    if log_prob_keep_mask is None:
        stats = ours.vocab_parallel_token_stats(logits, tokens, entropy=with_entropy, **options)
        logprobs, entropy = stats.logprobs, stats.entropy
    else:
        if isinstance(log_prob_keep_mask, Tensor):
            masked = _masked(logits, tokens, log_prob_keep_mask, group_rank(group))
            logprobs = ours.vocab_parallel_logprobs(masked, tokens, **options)
        else:
            kept = _with_targets(*log_prob_keep_mask, tokens)
            logprobs = ours.vocab_parallel_sampling_logprobs(
                logits, tokens, kept_ids=kept, **options
            )
        if with_entropy:
            entropy = ours.vocab_parallel_token_stats(
                logits, no_targets(logits), entropy=True, **options
            ).entropy
    if entropy is not None and not with_entropy_grad:
        entropy = entropy.detach()
    return logprobs.unsqueeze(-1), entropy


def _masked(logits: Tensor, tokens: Tensor, keep: Tensor, rank: int) -> Tensor:
    """The logits with -inf where neither kept nor the target."""
    width = logits.shape[-1]
    column = tokens - rank * width
    is_here = ((column >= 0) & (column < width)).unsqueeze(-1)
    place = column.clamp(0, width - 1).unsqueeze(-1)
    keep = keep.scatter(-1, place, is_here | keep.gather(-1, place))
    return logits.masked_fill(~keep, -torch.inf)


def _with_targets(ids: Tensor, offsets: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's kept ids and, where it is not among them, the row's target. One host sync."""
    ids, offsets = (t.to(tokens.device).long() for t in (ids, offsets))
    row = torch.arange(len(tokens), device=tokens.device)
    of = row.repeat_interleave(offsets.diff(), output_size=len(ids))
    has = torch.zeros_like(row).index_add_(0, of, (ids == tokens[of]).long()) > 0
    missing = row[~has & (tokens >= 0)]
    of, order = torch.cat([of, missing]).sort(stable=True)
    counts = torch.zeros_like(row).index_add_(0, of, torch.ones_like(of))
    return torch.cat([ids, tokens[missing]])[order], torch.cat([offsets[:1], counts.cumsum(0)])


@torch.no_grad()
def get_label_token_log_probs_from_vocab_parallel_logits(
    vocab_parallel_logits: Tensor,
    label_token_ids: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    reduction_chunk_size: int = 4096,
) -> Tensor:
    """`[n, V/TP]`, several labels per row `[n, k]` -> float32 log-probabilities `[n, k]`.

    No gradient. tp_group None: Megatron's. reduction_chunk_size: rows at a time.
    """
    return ours.vocab_parallel_gather(
        vocab_parallel_logits,
        label_token_ids,
        log_softmax=True,
        tp_group=tp_group,
        chunk_size=reduction_chunk_size,
    )


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: object,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    top_p_token_ids: Sequence[object] | None = None,
    top_p_token_offsets: Sequence[object] | None = None,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Log-probabilities (and entropy) of each response: (empty, {"log_probs": [...], ...}).

    Shape: logits `[1, T, V/TP]`, samples one after the other; under CP this rank's part, zigzag in
    each sample or, with args.allgather_cp, a contiguous part of the whole. Each result is a list,
    one `[response part]` a sample: all of it without CP, else the two zigzag pieces of it.

    args (a namespace, mapping or OmegaConf node): rollout_temperature (applied here),
    log_probs_chunk_size, allgather_cp, entropy_coef (0: the entropy has no gradient).

    top_p_token_ids, top_p_token_offsets: for each sample flat ids and offsets; response token r
    keeps `ids[offsets[r]:offsets[r + 1]]` and itself, tokens past the record everything.
    """
    return logits.new_empty((0,)), responses_of(
        logits,
        args,
        unconcat_tokens,
        Layout(logits, args, total_lengths, response_lengths),
        with_entropy=with_entropy,
        entropy_grad=setting(args, "entropy_coef", 0.0) != 0,
        temperature=setting(args, "rollout_temperature", 1.0),
        replay=(top_p_token_ids, top_p_token_offsets),
    )


def responses_of(
    logits: Tensor,
    args: object,
    unconcat_tokens: Sequence[Tensor],
    layout: Layout,
    *,
    with_entropy: bool,
    entropy_grad: bool,
    temperature: float,
    replay: tuple[Sequence[object] | None, Sequence[object] | None] = (None, None),
) -> dict[str, list[Tensor]]:
    """Logits `[b, T, V/TP]` -> {"log_probs": one `[response part]` a sample, "entropy": ...}."""
    logits = logits.flatten(0, 1)
    targets = layout.next_tokens(unconcat_tokens, logits.device)
    options: dict[str, Any] = {
        "tp_group": _tp_group(),
        "temperature": temperature,
        "chunk_size": size_or_none(setting(args, "log_probs_chunk_size")),
    }
    results: dict[str, Tensor] = {}
    ids_of, offsets_of = replay
    kept, recorded, everywhere = None, None, False
    if ids_of is not None and offsets_of is not None:
        ids, offsets, recorded, everywhere = layout.kept_ids(ids_of, offsets_of, logits.device)
        kept = _with_targets(ids, offsets, targets)
    if not everywhere or with_entropy:
        stats = ours.vocab_parallel_token_stats(logits, targets, entropy=with_entropy, **options)
        results["log_probs"] = stats.logprobs
        if stats.entropy is not None:
            results["entropy"] = stats.entropy if entropy_grad else stats.entropy.detach()
    if kept is not None and recorded is not None:
        asked = targets.where(recorded, IGNORED)
        logprobs = ours.vocab_parallel_sampling_logprobs(logits, asked, kept_ids=kept, **options)
        if not everywhere:
            logprobs = torch.where(recorded, logprobs, results["log_probs"])
        results["log_probs"] = logprobs
    ordered = {n: results[n] for n in ("log_probs", "entropy") if n in results}
    return {name: layout.responses(x) for name, x in ordered.items()}


class Layout:
    """Where each sample's response lies in this rank's packed rows."""

    def __init__(
        self,
        logits: Tensor,
        args: object,
        totals: Sequence[int],
        responses: Sequence[int],
        max_seq_lens: Sequence[int] | None = None,
    ) -> None:
        """max_seq_lens: what the rows of a batch are padded to ("bshd"); None: nothing ("thd")."""
        if logits.dim() != 3 or (max_seq_lens is None and logits.shape[0] != 1):
            raise ValueError(f"logits: expected [1, T, V/TP], got {tuple(logits.shape)}")
        rows = logits.shape[0] * logits.shape[1]
        self._samples = list(zip(totals, responses, max_seq_lens or totals, strict=True))
        for total, response, _ in self._samples:
            if response and not 0 < response < total:  # no logits are before the first token
                raise ValueError(
                    f"response_lengths: expected less than the total length {total}, got {response}"
                )
        self._cp = _cp()
        cp = self._cp.size
        self._contiguous = cp > 1 and bool(setting(args, "allgather_cp", False))
        pieces = 2 * cp if cp > 1 and not self._contiguous else 1
        room = totals if self._contiguous else [-(-n // pieces) * pieces for *_, n in self._samples]
        starts = torch.tensor([0, *room]).cumsum(0)
        self._starts = starts.tolist()
        needed = -(-self._starts[-1] // cp)
        if needed > rows:
            raise ValueError(
                f"logits: expected at least {needed} rows for these lengths, got {rows}"
            )
        # Of every row that of a response token, counted through all samples; -1: of none.
        token_of_row = torch.full((rows * cp if self._contiguous else self._starts[-1],), -1)
        token = 0
        for start, (total, response, _) in zip(self._starts, self._samples, strict=False):
            token_of_row[start + total - response - 1 : start + total - 1] = torch.arange(
                token, token + response
            )
            token += response
        layout = {"layout": "contiguous"} if self._contiguous else {"cu_seqlens": starts}
        self._token = torch.full((rows,), -1)
        own_tokens = ours.context_parallel_shard(
            token_of_row, cp_group=self._cp.group(), seq_dim=0, **layout
        )
        self._token[: len(own_tokens)] = own_tokens
        self._rows = (self._token >= 0).nonzero()[:, 0]

    def next_tokens(self, tokens: Sequence[Tensor], device: torch.device) -> Tensor:
        """`[T]`: the token after each row of a response, IGNORED elsewhere."""
        parts = []
        for sample, (total, response, _) in zip(tokens, self._samples, strict=True):
            if len(sample) < total:  # every later response would get another's tokens
                raise ValueError(
                    f"unconcat_tokens: expected {total} tokens, a sample's total length, got "
                    f"{len(sample)}"
                )
            parts.append(sample[total - response : total])
        targets = torch.full(self._token.shape, IGNORED, device=device)
        if parts:
            own_tokens = torch.cat(parts).to(device)[self._token[self._rows].to(device)]
            targets[self._rows.to(device)] = own_tokens.long()
        return targets

    def kept_ids(
        self, ids: Sequence[object], offsets: Sequence[object], device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor, bool]:
        """(flat ids, offsets `[T + 1]`, which rows have a record, whether each response row)."""
        counts, flat = [], []  # of every response token, -1 where it has no record
        for sample_ids, sample_offsets, (_, response, _) in zip(
            ids, offsets, self._samples, strict=True
        ):
            bounds = torch.as_tensor(sample_offsets).cpu().long()[: response + 1]
            count = torch.full((response,), -1)
            count[: max(len(bounds) - 1, 0)] = bounds.diff()
            counts.append(count)
            sample_ids = torch.as_tensor(sample_ids).cpu().long()
            flat.append(sample_ids[bounds[0] : bounds[-1]] if len(bounds) else sample_ids[:0])
        count, own_places = torch.cat(counts), self._token[self._rows]
        here = torch.zeros_like(count, dtype=torch.bool).index_fill_(0, own_places, True)
        joined = torch.cat(flat)[here.repeat_interleave(count.clamp(min=0))]
        of_row = torch.full_like(self._token, -1).index_copy_(0, self._rows, count[own_places])
        bounds = torch.cat([of_row.new_zeros(1), of_row.clamp(min=0).cumsum(0)])
        recorded = of_row >= 0
        everywhere = bool(recorded[self._rows].all())
        return joined.to(device), bounds.to(device), recorded.to(device), everywhere

    def responses(self, values: Tensor) -> list[Tensor]:
        """`[T]` -> each sample's response part, zigzag under CP in either layout."""
        if not self._contiguous:
            lengths = torch.tensor([response for _, response, _ in self._samples])
            sample = torch.arange(len(lengths)).repeat_interleave(lengths)[self._token[self._rows]]
            counts = torch.bincount(sample, minlength=len(lengths)).tolist()
            return list(values[self._rows.to(values.device)].split(counts))
        gathered = ours.context_parallel_gather(
            values, cp_group=self._cp.group(), seq_dim=0, layout="contiguous", grad="sum"
        )
        parts = []
        for start, (total, response, padded) in zip(self._starts, self._samples, strict=False):
            part = gathered[start + total - response - 1 : start + total - 1]
            parts.append(_own_part(part, total, response, padded, self._cp))
        return parts


# ---- context parallelism -------------------------------------------------------------------------
#
# qkv_format "bshd" with max_seq_len is miles': sequences padded to one length. slime packs ("thd").


class _Place(NamedTuple):
    """This rank's place in a parallel dimension."""

    rank: int
    size: int
    given: ProcessGroup | None

    def group(self) -> ProcessGroup:
        if self.given is None and self.size > 1:
            raise ValueError(
                f"cp: expected a group of {self.size} ranks in miles' parallel state, got None"
            )
        return or_one_process(self.given)


def _miles_state() -> Any:
    """miles' own places and groups, which its FSDP backend has without Megatron; None elsewhere."""
    return getattr(sys.modules.get(_MILES_STATE), "_parallel_state", None)


def _cp() -> _Place:
    if (state := _miles_state()) is not None:
        return _Place(state.cp.rank, state.cp.size, state.cp.group)
    group = or_one_process(ours.ParallelGroups.from_megatron().cp)
    return _Place(group.rank(), group.size(), group)


def _tp_group() -> ProcessGroup | None:
    """miles' own; None, which is Megatron's, elsewhere."""
    if (state := _miles_state()) is None:
        return None
    return state.tp.group if state.tp.size > 1 else ONE_PROCESS


def _padded_length(total_length: int, qkv_format: str, max_seq_len: int | None) -> int:
    if qkv_format == "thd":
        return total_length
    if max_seq_len is None:
        raise ValueError(f"max_seq_len: expected a length with qkv_format={qkv_format!r}, got None")
    return max_seq_len


def _offsets(total: int, response: int, padded: int, rank: int, size: int) -> tuple:
    prompt = total - response
    chunk = -(-padded // (2 * size))
    chunks = tuple((i * chunk, (i + 1) * chunk) for i in (rank, 2 * size - 1 - rank))
    bounds = ((max(a, prompt - 1), min(b, total - 1)) for a, b in chunks)
    logits = tuple((a, b) if a < b else (0, 0) for a, b in bounds)
    tokens = tuple((a + 1, b + 1) if a < b else (0, 0) for a, b in logits)
    return chunk, chunks, logits, tokens


def get_logits_and_tokens_offset_with_cp(
    total_length: int,
    response_length: int,
    qkv_format: str = "thd",
    max_seq_len: int | None = None,
    cp_rank: int | None = None,
    cp_size: int | None = None,
) -> tuple:
    """(chunk, chunks, logits, tokens): this CP rank's two zigzag pieces of a sequence.

    Each of the last three is two half-open ranges from the start of the prompt: of the padded
    pieces (of `chunk` tokens), of the logits in them that predict response tokens, and of these
    tokens (one further on). A piece without any is (0, 0). cp_rank and cp_size: another rank's.
    """
    padded = _padded_length(total_length, qkv_format, max_seq_len)
    if cp_rank is None or cp_size is None:
        cp_rank, cp_size, _ = _cp()
    return _offsets(total_length, response_length, padded, cp_rank, cp_size)


def all_gather_with_cp(
    tensor: Tensor,
    total_length: int,
    response_length: int,
    qkv_format: str = "thd",
    max_seq_len: int | None = None,
) -> Tensor:
    """This rank's response values `[part, ...]` -> the whole response's `[response_length, ...]`.

    Values lie where `get_logits_and_tokens_offset_with_cp` says; the backward sums over CP.
    """
    cp = _cp()
    if cp.size == 1:
        return tensor
    group = cp.group()
    padded_length = _padded_length(total_length, qkv_format, max_seq_len)
    chunk, chunks, logits, _ = _offsets(
        total_length, response_length, padded_length, cp.rank, cp.size
    )
    parts = tensor.split([b - a for a, b in logits])
    padded = []
    for part, (start, end), (a, b) in zip(parts, chunks, logits, strict=True):
        before, after = (a - start, end - b) if b > a else (0, chunk)
        padded += [_zeros_like(tensor, before), part, _zeros_like(tensor, after)]
    gathered = ours.context_parallel_gather(
        torch.cat(padded), cp_group=group, seq_dim=0, grad="sum"
    )
    return gathered[total_length - response_length - 1 : total_length - 1]


def _zeros_like(x: Tensor, rows: int) -> Tensor:
    return x.new_zeros(rows, *x.shape[1:])


def slice_with_cp(
    tokens: Tensor,
    pad_value: float | Callable[[Tensor, int], Tensor],
    qkv_format: str = "thd",
    max_seq_len: int | None = None,
    parallel_state: Any = None,
) -> Tensor:
    """`[s, ...]` -> this CP rank's two zigzag pieces, padded at the end first.

    pad_value: a number, or a function of (tokens, how many to add). parallel_state: miles', for its
    `cp.rank` and `cp.size`; None: the one in use.
    """
    length = _padded_length(len(tokens), qkv_format, max_seq_len)
    if parallel_state is None:
        rank, size, _ = _cp()
    else:
        rank, size = parallel_state.cp.rank, parallel_state.cp.size
    missing = length - len(tokens) + (-length % (2 * size) if size > 1 else 0)
    if callable(pad_value):
        if missing or size > 1:
            tokens = pad_value(tokens, missing)
    elif missing:
        tokens = torch.cat([tokens, tokens.new_full((missing, *tokens.shape[1:]), pad_value)])
    if size == 1:
        return tokens
    pieces = tokens.chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


def slice_log_prob_with_cp(
    log_prob: list[float] | Tensor,
    total_length: int,
    response_length: int,
    qkv_format: str = "thd",
    max_token_len: int | None = None,
) -> list[float] | Tensor:
    """A whole response's values `[response_length]` -> this CP rank's part of them.

    Raises:
        ValueError: another length than the response's.
    """
    if len(log_prob) != response_length:
        raise ValueError(f"log_prob: expected {response_length} values, got {len(log_prob)}")
    padded = _padded_length(total_length, qkv_format, max_token_len)
    return _own_part(log_prob, total_length, response_length, padded, _cp())


def _own_part(values: Any, total: int, response: int, padded: int, cp: _Place) -> Any:
    if cp.size == 1:
        return values
    _, _, logits, _ = _offsets(total, response, padded, cp.rank, cp.size)
    first = total - response - 1
    one, two = (values[a - first : b - first] if b > a else values[:0] for a, b in logits)
    return one + two if isinstance(one, list) else torch.cat([one, two])
