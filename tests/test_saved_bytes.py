"""`saved_bytes`: values, gradients, products and bytes of chunks kept for the backward.

The engine has it as an axis of every operation from hidden states (`tests/engine/cases.py`); here
stands what an axis does not see: bits, counts of products, bytes, and what is left alive.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import mcore_logprobs as ml
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.kernels import budgets
from mcore_logprobs.sources import kept
from tests.helpers.flops import Flops
from tests.helpers.memory import TensorsMade
from tests.helpers.oracles import finished_logits
from tests.helpers.shards import world_group, world_rank, world_size
from tests.megatron.common import VOCAB, make_batch, megatron, tiny_config
from tests.ops import EVERY_STATISTIC
from tests.test_costs_hidden import mapped, policy_loss

# Three tiles of 5 rows by 4 blocks of columns, the last of either shorter.
ROWS, COLUMNS, WIDTH = 13, 90, 24
SMALL = replace(
    budgets.CPU, tile_rows=5, chunk_bytes=4 * 5 * 25, max_block=25, min_block=25, block_step=1
)
BLOCKS = [23, 23, 23, 21]
TILES = [5, 5, 3]
ALL = 1 << 30
PRODUCT = 2 * ROWS * COLUMNS * WIDTH


def chunk_bytes(dtype: torch.dtype, rows: int, columns: int) -> int:
    numbers = rows * (-(-columns // 16) * 16)
    return 2 * numbers + 8 * rows if dtype.itemsize == 2 else dtype.itemsize * numbers


def whole_bytes(dtype: torch.dtype) -> int:
    return sum(chunk_bytes(dtype, rows, columns) for rows in TILES for columns in BLOCKS)


@dataclass
class Head:
    hidden: Tensor
    weight: Tensor
    target: Tensor

    @classmethod
    def of(cls, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> Head:
        generator = torch.Generator().manual_seed(7)
        hidden = torch.randn(ROWS, WIDTH, generator=generator).mul(spread).to(dtype)
        weight = torch.randn(COLUMNS, WIDTH, generator=generator).mul(0.5).to(dtype)
        target = torch.randint(COLUMNS, (ROWS,), generator=generator)
        target[4] = -100
        return cls(hidden.requires_grad_(), weight.requires_grad_(), target)

    def stats(self, **options: Any) -> ml.TokenStats:
        return ml.linear_token_stats(self.hidden, self.weight, self.target, **options)

    def gradients(self, stats: ml.TokenStats, **how: Any) -> list[Tensor]:
        wanted = [x for x in vars(stats).values() if x is not None and x.requires_grad]
        generator = torch.Generator().manual_seed(8)
        incoming = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in wanted]
        return list(torch.autograd.grad(wanted, [self.hidden, self.weight], incoming, **how))


@contextmanager
def cut_small() -> Iterator[None]:
    with budgets.use(SMALL):
        yield


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(
        float((x.double() - y.double()).norm() / y.double().norm())
        for x, y in zip(found, exact, strict=True)
    )


@pytest.mark.parametrize(
    "setting", [{}, {"label_smoothing": 0.1}, {"temperature": "rows"}], ids=str
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_values_are_the_same_bits_and_gradients_as_close_to_float64(
    dtype: torch.dtype, setting: dict[str, Any]
) -> None:
    head, options = Head.of(dtype), {**EVERY_STATISTIC, **setting}
    if setting.get("temperature"):
        options["temperature"] = 0.5 + torch.rand(ROWS, generator=torch.Generator().manual_seed(0))
    exact = Head(
        head.hidden.detach().double().requires_grad_(),
        head.weight.detach().double().requires_grad_(),
        head.target,
    )
    truth = exact.gradients(exact.stats(**options))
    with cut_small():
        plain = head.stats(**options)
        before = head.gradients(plain)
        for saved in (1500, whole_bytes(dtype), ALL):
            found = head.stats(**options, saved_bytes=saved)
            for name, value in vars(plain).items():
                assert value is None or torch.equal(value, getattr(found, name)), name
            after = head.gradients(found)
            if dtype.itemsize > 2:
                assert all(map(torch.equal, before, after))
            assert error(after, truth) <= 1.1 * error(before, truth) + 1e-7


@pytest.mark.parametrize("spread", [1e-3, 1.0, 30.0])
def test_rounded_logits_cost_no_digit_that_bfloat16_has(spread: float) -> None:
    """From nearly equal logits, where log p + H is all difference, to those of certain tokens."""
    head = Head.of(torch.bfloat16, spread)
    with cut_small():
        before = head.gradients(head.stats(**EVERY_STATISTIC))
        after = head.gradients(head.stats(**EVERY_STATISTIC, saved_bytes=ALL))
    assert error(after, before) < 2.0**-9


def test_no_kept_logit_is_written_over() -> None:
    """Two backwards, and saved tensors that a hook holds on to."""
    packed: list[tuple[Tensor, Tensor]] = []

    def pack(x: Tensor) -> Tensor:
        packed.append((x, x.clone()))
        return x

    for dtype in (torch.float32, torch.bfloat16):
        head = Head.of(dtype)
        with cut_small(), saved_tensors_hooks(pack, lambda x: x):
            stats = head.stats(**EVERY_STATISTIC, saved_bytes=ALL)
            first = head.gradients(stats, retain_graph=True)
            second = head.gradients(stats)
        assert all(map(torch.equal, first, second))
        assert len(packed) > len(TILES) * len(BLOCKS)
        # By their bytes: what pads rows to a multiple of 16 columns is not written.
        assert all(torch.equal(*(x.view(torch.uint8) for x in pair)) for pair in packed)
        packed.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_as_many_bytes_as_were_asked_for_and_as_many_products_fewer(
    dtype: torch.dtype, share: float
) -> None:
    asked, saved = int(whole_bytes(dtype) * share), []
    head = Head.of(dtype)
    with cut_small(), saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        head.stats()
        inputs, count = sum(x.nbytes for x in saved), len(saved)
        saved.clear()
        with TensorsMade() as made, Flops() as forward:
            stats = head.stats(saved_bytes=asked)
        held = sum(x.nbytes for x in saved) - inputs
    assert held <= asked
    assert held >= asked - chunk_bytes(dtype, 5, 23)
    assert share or len(saved) == count
    assert made.live <= asked + ROWS * 8 * 10
    fewer, left = 0, asked  # in the order of the walk, while they fit
    for rows in TILES:
        for columns in BLOCKS:
            if chunk_bytes(dtype, rows, columns) <= left:
                left -= chunk_bytes(dtype, rows, columns)
                fewer += 2 * rows * columns * WIDTH
    saved.clear()
    with cut_small(), Flops() as backward:
        head.gradients(stats)
    assert forward.total == PRODUCT
    assert backward.total == 3 * PRODUCT - fewer
    assert (share == 1.0) == (fewer == PRODUCT)


@pytest.mark.parametrize(
    ("dtype", "row_bytes"), [(torch.float32, 1024 + 64), (torch.bfloat16, 512 + 8)], ids=str
)
def test_what_parts_rows_of_1024_bytes_counts_too(dtype: torch.dtype, row_bytes: int) -> None:
    hidden, weight = (torch.randn(n, WIDTH).to(dtype).requires_grad_() for n in (ROWS, 512))
    saved: list[Tensor] = []
    blocks_of_256 = replace(SMALL, max_block=256, min_block=256, chunk_bytes=1)
    asked = 2 * ROWS * row_bytes

    def held(saved_bytes: int) -> int:
        saved.clear()
        with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            ml.linear_token_stats(hidden, weight, torch.arange(ROWS), saved_bytes=saved_bytes)
        return sum(x.nbytes for x in saved)

    with budgets.use(blocks_of_256):
        without = held(0)
        assert held(asked) - without == asked
        assert held(asked - 1) - without == asked - TILES[-1] * row_bytes


def test_nothing_is_kept_without_a_gradient_nor_after_it() -> None:
    head = Head.of()
    with cut_small():
        with torch.no_grad(), TensorsMade() as made:
            stats = head.stats(saved_bytes=ALL)
        assert made.live <= ROWS * 8 * 10
        frozen = Head(head.hidden.detach(), head.weight.detach(), head.target)
        with TensorsMade() as made:
            stats = frozen.stats(saved_bytes=ALL)
        assert made.live <= ROWS * 8 * 10
        assert made.peak < whole_bytes(torch.float32)  # nor for the time of the forward
        with TensorsMade() as made:
            stats = head.stats(saved_bytes=ALL)
            assert made.live >= whole_bytes(torch.float32)
            head.gradients(stats)
        assert made.live <= ROWS * 8 * 10


@pytest.mark.parametrize("reentrant", [False, True])
def test_within_a_checkpoint(reentrant: bool) -> None:
    head = Head.of()

    def call(hidden: Tensor) -> Tensor:
        found = ml.linear_token_stats(hidden, head.weight, head.target, saved_bytes=ALL)
        return found.logprobs

    with cut_small():
        expected = torch.autograd.grad(
            head.stats().logprobs, [head.hidden, head.weight], _upstream()
        )
        checkpoint(call, head.hidden, use_reentrant=reentrant).backward(_upstream())
    assert torch.equal(head.hidden.grad, expected[0])
    assert torch.equal(head.weight.grad, expected[1])


def _upstream() -> Tensor:
    return torch.randn(ROWS, generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kept_logits_go_where_a_hook_puts_them(dtype: torch.dtype) -> None:
    head = Head.of(dtype)
    with cut_small():
        expected = head.gradients(head.stats(saved_bytes=ALL))
        with save_on_cpu():
            stats = head.stats(saved_bytes=ALL)
        assert all(map(torch.equal, head.gradients(stats), expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_nan_and_infinity_keep_to_themselves(dtype: torch.dtype) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        head = Head.of(dtype)
        with torch.no_grad():
            head.hidden[2] = bad
            head.hidden[7] = bad
        upstream = _upstream()
        upstream[7] = 0.0
        found = []
        with cut_small():
            for saved in (0, ALL):
                stats = head.stats(entropy=True, saved_bytes=saved)
                loss = (stats.logprobs * upstream + stats.entropy * upstream).masked_fill(
                    upstream == 0, 0.0
                )
                found.append(torch.autograd.grad(loss.sum(), head.hidden)[0])
        plain, kept_logits = found
        assert plain[2].isnan().all()
        assert not plain[7].any()
        assert torch.equal(plain.isnan(), kept_logits.isnan())
        assert error([kept_logits.nan_to_num()], [plain.nan_to_num()]) < 2.0**-9
        assert not kept_logits[7].any()


def test_minus_infinity_has_no_probability_in_a_rounded_chunk() -> None:
    head = Head.of(torch.bfloat16)
    with torch.no_grad():
        head.hidden[:, 0] = 1.0
        head.weight[:, 0] = 0.0
        head.weight[::3, 0] = -torch.inf
        head.target.masked_fill_(head.target % 3 == 0, 1)
    with cut_small():
        before = _of_hidden_columns(head, 0)
        after = _of_hidden_columns(head, ALL)
    assert before.isfinite().all()
    assert error([after], [before]) < 2.0**-9


def _of_hidden_columns(head: Head, saved: int) -> Tensor:
    """dWeight, of which the rows at -inf are 0."""
    stats = head.stats(entropy=True, label_smoothing=0.2, saved_bytes=saved)
    loss = ((stats.logprobs + stats.entropy) * _upstream()).sum()
    grad = torch.autograd.grad(loss, head.weight)[0]
    assert not grad[::3].any()
    return grad


# ---- which operations keep what ------------------------------------------------------------------


def divergence(h: Tensor, w: Tensor, t: Tensor, **options: Any) -> Tensor:
    teacher = {"teacher_hidden": h.detach() + 1.0, "teacher_weight": w.detach()}
    mask = t != -100 if options.get("compact") else None
    return ml.linear_kl_div(h, w, **teacher, mask=mask, **options)


def log_softmax_of_entries(h: Tensor, w: Tensor, t: Tensor, **options: Any) -> Tensor:
    return ml.linear_gather(h, w, t[:, None].expand(-1, 4), log_softmax=True, **options)


# Products of the backward with everything kept: of float32 operands, and of bfloat16 ones.
OPERATIONS: dict[str, tuple[Callable[..., Tensor], int, int]] = {
    "statistics": (lambda h, w, t, **k: ml.linear_token_stats(h, w, t, **k).logprobs, 2, 2),
    "softcap": (
        lambda h, w, t, **k: ml.linear_token_stats(h, w, t, softcap=5.0, **k).logprobs, 2, 3,
    ),
    "segments": (
        lambda h, w, t, **k: (
            ml.linear_token_stats(h, w, t, invariant_segments=2, backend="torch", **k).logprobs
        ),
        2,
        3,
    ),
    "bias": (
        lambda h, w, t, **k: (
            ml.linear_token_stats(h, w, t, bias=w.detach()[:, 0].contiguous(), **k).logprobs
        ),
        2,
        3,
    ),
    "divergence": (divergence, 2, 4),
    "log-softmax of entries": (log_softmax_of_entries, 2, 3),
    "filters": (
        lambda h, w, t, **k: (
            ml.linear_sampling_logprobs(h, w, t, top_k=80, **k).nan_to_num(neginf=0.0)
        ),
        2,
        3,
    ),
    "map": (mapped, 2, 3),
    "policy loss": (policy_loss, 0, 0),
    "top-k": (lambda h, w, t, **k: ml.linear_topk(h, w, 3, **k)[0], 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_products_of_the_backward_with_everything_kept(name: str) -> None:
    call, *expected = OPERATIONS[name]
    for dtype, products in zip((torch.float32, torch.bfloat16), expected, strict=True):
        head = Head.of(dtype)
        target = head.target.clamp(min=0)
        found = []
        for saved in (0, ALL):
            out = call(head.hidden, head.weight, target, saved_bytes=saved)
            with Flops() as backward:
                grads = torch.autograd.grad(out.sum(), [head.hidden, head.weight])
            found.append((out.detach(), grads))
        if name != "segments":  # whose products are of fixed shapes
            assert backward.total == products * PRODUCT
        assert torch.equal(found[0][0], found[1][0])
        if dtype == torch.float32:
            assert all(map(torch.equal, found[0][1], found[1][1]))
        else:
            assert error(list(found[1][1]), list(found[0][1])) < 2.0**-9


def test_two_operations_of_one_source_share_the_bytes(ranks: Any) -> None:
    for live in ranks(1).run(_kept_by_a_model):
        assert 0 < live <= 4000


def _kept_by_a_model() -> int:
    """Bytes of logits that a patched model keeps for statistics and a divergence."""
    with megatron() as parallel_state:
        model = mm.build_gpt_model(tiny_config(1), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        teacher = torch.randn(*batch["labels"].shape, VOCAB)
        saved: list[Tensor] = []
        sizes = []
        for count in (0, 4000):
            with (
                cut_small(),
                ml.patch_model(model) as handle,
                handle.options(saved_bytes=count, entropy=True),
                handle.divergence("forward", teacher_logits=teacher),
                saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x),
            ):
                stats = model(**batch["inputs"], labels=batch["labels"])
            (stats.logprobs.sum() + stats.divergence.sum()).backward()
            sizes.append(sum(x.nbytes for x in saved))
            saved.clear()
        return sizes[1] - sizes[0]


def test_one_line_where_no_chunk_fits(caplog: Any) -> None:
    kept._logged.clear()
    head = Head.of()
    with caplog.at_level(logging.WARNING, "mcore_logprobs"), cut_small():
        for _ in range(2):
            head.gradients(head.stats(saved_bytes=17))
        # Nor for another number of rows, whose smallest chunk has another size.
        shorter = torch.randn(2, 4, requires_grad=True), torch.randn(24, 4)
        ml.linear_token_stats(*shorter, torch.arange(2), saved_bytes=17)
    (line,) = caplog.messages
    assert line.startswith("saved_bytes=17: smaller than the smallest chunk of logits, 384 bytes")
    with pytest.raises(ValueError, match="saved_bytes: expected an int >= 0, in bytes, got -1"):
        head.stats(saved_bytes=-1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 5.0}, "which a softcap or a bias (logit_bias, disallowed_ids) does not allow"),
        (
            {"disallowed_ids": [3]},
            "which a softcap or a bias (logit_bias, disallowed_ids) does not allow",
        ),
        ({"invariant_segments": 2}, "which invariant_segments does not allow"),
        ({"topk": 2}, "and the gradient requires exact ones"),
        ({"logits_dtype": torch.bfloat16, "softcap": 5.0}, None),
        ({}, None),
    ],
    ids=str,
)
def test_one_line_where_no_chunk_is_kept(options: dict, reason: str | None, caplog: Any) -> None:
    kept._logged.clear()
    hidden, weight = torch.randn(6, 8).bfloat16().requires_grad_(), torch.randn(64, 8).bfloat16()
    with caplog.at_level(logging.WARNING, "mcore_logprobs"):
        for _ in range(2):
            ml.linear_token_stats(
                hidden, weight, torch.arange(6), saved_bytes=1 << 20, backend="torch", **options
            )
    line = (
        "saved_bytes=1048576: no logits are kept for this backward: torch.float32 logits of "
        f"torch.bfloat16 operands would be rounded, {reason}; logits of "
        "logits_dtype=torch.bfloat16 are kept"
    )
    assert caplog.messages == ([] if reason is None else [line])


def test_an_allocation_that_fails_names_the_setting(monkeypatch: Any) -> None:
    if not hasattr(RuntimeError, "add_note"):
        pytest.skip("notes on errors came with Python 3.11")
    plain = Tensor.new_empty

    def full(self: Tensor, *size: Any, **options: Any) -> Tensor:
        if options.get("dtype") == torch.int16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(self, *size, **options)

    monkeypatch.setattr(Tensor, "new_empty", full)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        Head.of(torch.bfloat16).stats(saved_bytes=ALL)
    assert any(f"saved_bytes={ALL}" in note for note in raised.value.__notes__)


# ---- codes ---------------------------------------------------------------------------------------


def test_finished_logits_are_what_is_kept() -> None:
    """What a scale and a temperature make of codes, against float64."""
    head = Head.of(torch.bfloat16)
    options = {"logit_scale": 0.5, "temperature": 0.25}
    with cut_small():
        (found,) = torch.autograd.grad(
            head.stats(saved_bytes=ALL, **options).logprobs, head.hidden, _upstream()
        )
    hidden, weight = (x.detach().double().requires_grad_() for x in (head.hidden, head.weight))
    z = finished_logits(hidden @ weight.t(), dtype=torch.float64, **options)
    at = z.log_softmax(-1).gather(1, head.target.clamp(min=0).unsqueeze(1)).squeeze(1)
    upstream = _upstream().double().masked_fill(head.target < 0, 0.0)
    (exact,) = torch.autograd.grad(at, hidden, upstream)
    assert error([found], [exact]) < 2.0**-8


CHUNK_OF_ALL = 16 * 32 * 4  # bytes: all 16 rows by the 32 columns of one of two ranks


def kept_of_a_split_sequence(budget: int) -> bool:
    """Whether a rank keeps its chunk of the whole sequence, of which it has half the rows."""
    count, rank, group = world_size(), world_rank(), world_group()
    hidden, weight = torch.randn(16, 1, 8), torch.randn(64, 8)
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        ml.linear_token_stats(
            hidden.chunk(count)[rank].clone().requires_grad_(),
            weight.chunk(count)[rank].clone().requires_grad_(),
            torch.arange(16).view(16, 1),
            tp_group=group,
            sequence_parallel=True,
            saved_bytes=budget,
        )
    return any(x.nbytes == CHUNK_OF_ALL for x in saved)


@pytest.mark.own_sizes
def test_a_budget_under_sequence_parallelism(ranks: Any) -> None:
    assert ranks(2).run(kept_of_a_split_sequence, CHUNK_OF_ALL) == [True, True]
    assert ranks(2).run(kept_of_a_split_sequence, CHUNK_OF_ALL - 4) == [False, False]


def test_segments_keep_no_rounded_logits() -> None:
    hidden, weight = torch.randn(16, 8).bfloat16(), torch.randn(64, 8).bfloat16()
    upstream, found = torch.linspace(0.5, 1.5, 16), []
    for saved_bytes in (0, 1 << 20):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        stats = ml.linear_token_stats(
            *leaves, torch.arange(16), invariant_segments=2, saved_bytes=saved_bytes
        )
        found.append(torch.autograd.grad(stats.logprobs, leaves, upstream))
    assert all(map(torch.equal, *found))
