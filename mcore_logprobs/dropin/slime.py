"""slime's `slime.utils.ppo_utils`, `backends.megatron_utils.loss` and `.cp_utils`.

    from mcore_logprobs.dropin.slime import get_log_probs_and_entropy

Tokens given to `calculate_log_probs_and_entropy` are targets as they are; those given to
`get_log_probs_and_entropy` are whole sequences, shifted here. Log-probabilities, not losses. No
`[T, V]` mask is made for the rollout's kept ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import mcore_logprobs as ours
from mcore_logprobs.dropin._common import no_targets, or_one_process, setting
from mcore_logprobs.groups import group_rank

__all__ = [
    "all_gather_with_cp",
    "calculate_log_probs_and_entropy",
    "get_log_probs_and_entropy",
    "get_logits_and_tokens_offset_with_cp",
    "slice_log_prob_with_cp",
    "slice_with_cp",
]

_IGNORED = -100


# ---- log-probabilities ---------------------------------------------------------------------------


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
    group = or_one_process(tp_group)
    options: dict[str, Any] = {
        "tp_group": group,
        "chunk_size": chunk_size if chunk_size > 0 else None,
    }
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
    own = ((column >= 0) & (column < width)).unsqueeze(-1)
    place = column.clamp(0, width - 1).unsqueeze(-1)
    keep = keep.scatter(-1, place, own | keep.gather(-1, place))
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


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    top_p_token_ids: Sequence[Any] | None = None,
    top_p_token_offsets: Sequence[Any] | None = None,
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
    if logits.dim() != 3 or logits.shape[0] != 1:
        raise ValueError(f"logits: expected [1, T, V/TP], got {tuple(logits.shape)}")
    logits = logits.squeeze(0)
    layout = _Layout(logits.shape[0], list(total_lengths), list(response_lengths), args)
    targets = layout.next_tokens(unconcat_tokens, logits.device)
    chunk_size = setting(args, "log_probs_chunk_size", -1)
    options: dict[str, Any] = {
        "temperature": setting(args, "rollout_temperature", 1.0),
        "chunk_size": chunk_size if chunk_size is not None and chunk_size > 0 else None,
    }
    results: dict[str, Tensor] = {}
    replay = top_p_token_ids is not None and top_p_token_offsets is not None
    kept, recorded, everywhere = None, None, False
    if replay:
        ids, offsets, recorded, everywhere = layout.kept_ids(
            list(top_p_token_ids or []), list(top_p_token_offsets or []), logits.device
        )
        kept = _with_targets(ids, offsets, targets)
    if not everywhere or with_entropy:
        stats = ours.vocab_parallel_token_stats(logits, targets, entropy=with_entropy, **options)
        results["log_probs"] = stats.logprobs
        if stats.entropy is not None:
            keep_grad = setting(args, "entropy_coef", 0.0) != 0
            results["entropy"] = stats.entropy if keep_grad else stats.entropy.detach()
    if kept is not None and recorded is not None:
        asked = targets.where(recorded, _IGNORED)
        logprobs = ours.vocab_parallel_sampling_logprobs(logits, asked, kept_ids=kept, **options)
        if not everywhere:
            logprobs = torch.where(recorded, logprobs, results["log_probs"])
        results["log_probs"] = logprobs
    ordered = {n: results[n] for n in ("log_probs", "entropy") if n in results}
    return logits.new_empty((0,)), {n: layout.responses(x) for n, x in ordered.items()}


@dataclass(frozen=True)
class _Piece:
    """Consecutive logits of one response: from local row `row` on, `first` of the response."""

    row: int
    first: int
    length: int


class _Layout:
    """Where each sample's response lies in this rank's packed rows."""

    def __init__(self, rows: int, totals: list[int], responses: list[int], args: Any) -> None:
        self._rows = rows
        self._samples = list(zip(totals, responses, strict=True))
        self._cp = or_one_process(ours.ParallelGroups.from_megatron().cp)
        self._contiguous = self._cp.size() > 1 and bool(setting(args, "allgather_cp", False))

    def pieces(self) -> Iterator[list[_Piece]]:
        """Each sample's pieces, in order."""
        base = 0
        start, end = (self._rows * (self._cp.rank() + i) for i in (0, 1))
        for total, response in self._samples:
            prompt = total - response
            if self._contiguous:
                first, last = base + prompt - 1, base + total - 1
                s, e = max(first, start), min(last, end)
                yield [_Piece(s - start, s - first, e - s)] if e > s else []
                base += total
            elif self._cp.size() == 1:
                yield [_Piece(base + prompt - 1, 0, response)]
                base += total
            else:
                chunk, chunks, at, _ = get_logits_and_tokens_offset_with_cp(total, response)
                yield [
                    _Piece(base + i * chunk + a - c[0], a - (prompt - 1), b - a)
                    for i, (c, (a, b)) in enumerate(zip(chunks, at, strict=True))
                    if b > a
                ]
                base += 2 * chunk

    def next_tokens(self, tokens: Sequence[Tensor], device: torch.device) -> Tensor:
        """`[T]`: the token after each row of a response, IGNORED elsewhere."""
        targets = torch.full((self._rows,), _IGNORED, dtype=torch.int64, device=device)
        for sample, (total, response), pieces in zip(
            tokens, self._samples, self.pieces(), strict=True
        ):
            for piece in pieces:
                at = total - response + piece.first
                targets[piece.row : piece.row + piece.length] = sample[at : at + piece.length]
        return targets

    def kept_ids(
        self, ids: list[Any], offsets: list[Any], device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor, bool]:
        """(flat ids, offsets `[T + 1]`, which rows have a record, whether each response row)."""
        counts = torch.zeros(self._rows, dtype=torch.int64)
        recorded = torch.zeros(self._rows, dtype=torch.bool)
        flat: list[tuple[int, Tensor]] = []
        everywhere = True
        for sample_ids, sample_offsets, pieces in zip(ids, offsets, self.pieces(), strict=True):
            sample_ids = torch.as_tensor(sample_ids).cpu().long()
            bounds = torch.as_tensor(sample_offsets).cpu().long()
            for piece in pieces:
                last = min(piece.first + piece.length, max(len(bounds) - 1, 0))
                everywhere &= last == piece.first + piece.length
                if last <= piece.first:
                    continue
                rows = slice(piece.row, piece.row + last - piece.first)
                recorded[rows] = True
                counts[rows] = bounds[piece.first : last + 1].diff()
                flat.append((piece.row, sample_ids[bounds[piece.first] : bounds[last]]))
        parts = [part for _, part in sorted(flat, key=lambda pair: pair[0])]
        joined = torch.cat(parts) if parts else counts[:0]
        bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return joined.to(device), bounds.to(device), recorded.to(device), everywhere

    def responses(self, values: Tensor) -> list[Tensor]:
        """`[T]` -> each sample's response part, zigzag under CP in either layout."""
        if not self._contiguous:
            return [
                torch.cat([values[:0], *(values[p.row : p.row + p.length] for p in pieces)])
                for pieces in self.pieces()
            ]
        whole = ours.context_parallel_gather(
            values, cp_group=self._cp, seq_dim=0, layout="contiguous", grad="sum"
        )
        parts, base = [], 0
        for total, response in self._samples:
            part = whole[base + total - response - 1 : base + total - 1]
            parts.append(torch.as_tensor(slice_log_prob_with_cp(part, total, response)))
            base += total
        return parts


# ---- context parallelism -------------------------------------------------------------------------


def get_logits_and_tokens_offset_with_cp(total_length: int, response_length: int) -> tuple:
    """(chunk, chunks, logits, tokens): this CP rank's two zigzag pieces of a sequence.

    Each of the last three is two half-open ranges from the start of the prompt: of the padded
    pieces (of `chunk` tokens), of the logits in them that predict response tokens, and of these
    tokens (one further on). A piece without any is (0, 0).
    """
    cp = or_one_process(ours.ParallelGroups.from_megatron().cp)
    rank, size = cp.rank(), cp.size()
    prompt = total_length - response_length
    chunk = -(-total_length // (2 * size))
    chunks = tuple((i * chunk, (i + 1) * chunk) for i in (rank, 2 * size - 1 - rank))
    bounds = ((max(a, prompt - 1), min(b, total_length - 1)) for a, b in chunks)
    logits = tuple((a, b) if a < b else (0, 0) for a, b in bounds)
    tokens = tuple((a + 1, b + 1) if a < b else (0, 0) for a, b in logits)
    return chunk, chunks, logits, tokens


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int) -> Tensor:
    """This rank's response values `[part, ...]` -> the whole response's `[response_length, ...]`.

    Values lie where `get_logits_and_tokens_offset_with_cp` says; the backward sums over CP.
    """
    cp = or_one_process(ours.ParallelGroups.from_megatron().cp)
    if cp.size() == 1:
        return tensor
    chunk, chunks, logits, _ = get_logits_and_tokens_offset_with_cp(total_length, response_length)
    parts = tensor.split([b - a for a, b in logits])
    padded = []
    for part, (start, end), (a, b) in zip(parts, chunks, logits, strict=True):
        before, after = (a - start, end - b) if b > a else (0, chunk)
        padded += [_zeros_like(tensor, before), part, _zeros_like(tensor, after)]
    whole = ours.context_parallel_gather(torch.cat(padded), cp_group=cp, seq_dim=0, grad="sum")
    return whole[total_length - response_length - 1 : total_length - 1]


def _zeros_like(x: Tensor, rows: int) -> Tensor:
    return x.new_zeros(rows, *x.shape[1:])


def slice_with_cp(tokens: Tensor, pad_value: float | Callable[[Tensor, int], Tensor]) -> Tensor:
    """`[s, ...]` -> this CP rank's two zigzag pieces, padded at the end first.

    pad_value: a number, or a function of (tokens, how many to add).
    """
    cp = or_one_process(ours.ParallelGroups.from_megatron().cp)
    if cp.size() == 1:
        return tokens
    missing = -len(tokens) % (2 * cp.size())
    if callable(pad_value):
        tokens = pad_value(tokens, missing)
    elif missing:
        tokens = torch.cat([tokens, tokens.new_full((missing, *tokens.shape[1:]), pad_value)])
    return ours.context_parallel_shard(tokens, cp_group=cp, seq_dim=0)


def slice_log_prob_with_cp(
    log_prob: list[float] | Tensor, total_length: int, response_length: int
) -> list[float] | Tensor:
    """A whole response's values `[response_length]` -> this CP rank's part of them.

    Raises:
        ValueError: another length than the response's.
    """
    if len(log_prob) != response_length:
        raise ValueError(f"log_prob: expected {response_length} values, got {len(log_prob)}")
    if or_one_process(ours.ParallelGroups.from_megatron().cp).size() == 1:
        return log_prob
    _, _, logits, _ = get_logits_and_tokens_offset_with_cp(total_length, response_length)
    first = total_length - response_length - 1
    one, two = (log_prob[a - first : b - first] if b > a else log_prob[:0] for a, b in logits)
    return one + two if isinstance(one, list) else torch.cat([one, two])  # type: ignore[operator, list-item]
