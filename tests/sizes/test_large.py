"""What happens only at real sizes, besides tiles and blocks: far offsets, long sequences, trees.

`tests/measured.md` lists what was looked for and what has no case.
"""

from __future__ import annotations

import mmap
import random

import pytest
import torch
from torch import Tensor

import mcore_logprobs as ml
from mcore_logprobs.context_parallel.layouts import LAYOUTS, SequenceLayout
from mcore_logprobs.kernels.largest import largest_columns
from mcore_logprobs.kernels.segments import Segments
from mcore_logprobs.losses.two_pass import _discounted_ahead
from tests.engine import run
from tests.ops import EVERY_STATISTIC, PER_TOKEN, WITH_A_GRADIENT
from tests.sizes import shapes

FAR = 2**30 + 64  # elements between rows: the third begins past 2^31


def untouched(count: int) -> Tensor:
    """Zeros of which the system gives no memory until they are written.

    torch.zeros writes them; np.zeros too, where malloc keeps its heap (`bench` has it do so).
    """
    return torch.frombuffer(mmap.mmap(-1, 2 * count), dtype=torch.bfloat16)


def statistics(z: Tensor, target: Tensor, **options: object) -> tuple[Tensor, ...]:
    stats = ml.vocab_parallel_token_stats(z, target, **EVERY_STATISTIC, **options)
    return tuple(getattr(stats, name) for name in PER_TOKEN)


CALLS = {
    "statistics": lambda z, t: statistics(z, t),
    "compiled": lambda z, t: statistics(z, t, backend="inductor"),
    "invariant": lambda z, t: statistics(z, t, invariant_segments=4),
    "topk": lambda z, t: ml.vocab_parallel_topk(z, 50),
    "gather": lambda z, t: (ml.vocab_parallel_gather(z, t[:, None], log_softmax=True),),
    "filters": lambda z, t: (ml.vocab_parallel_sampling_logprobs(z, t, top_p=0.999),),
    "log_softmax": lambda z, t: (ml.vocab_parallel_log_softmax(z),),
    "kl_div": lambda z, t: (ml.vocab_parallel_kl_div(z, z.detach().flip(0)),),
    "sample": lambda z, t: ml.vocab_parallel_sample(z, seed=5),
}


COMPILED = ("compiled", "invariant")  # for which a kernel is compiled


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.night if n in COMPILED else ()) for n in CALLS]
)
def test_rows_past_two_to_the_31(name: str) -> None:
    """The same bits as of rows that lie next to each other. 4 GiB of addresses, little memory."""
    near = (3.0 * torch.randn(3, 8200)).bfloat16().requires_grad_()
    far = (
        untouched(2 * FAR + 8200)
        .as_strided((3, 8200), (FAR, 1))
        .copy_(near.detach())
        .requires_grad_()
    )
    target = torch.tensor([17, 8199, 5000])
    found = [CALLS[name](z, target) for z in (near, far)]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
        if one.requires_grad:
            g = torch.randn(one.shape)
            (dnear,) = torch.autograd.grad(one, near, g, retain_graph=True)
            (dfar,) = torch.autograd.grad(other, far, g, retain_graph=True)
            assert dnear.any()
            assert torch.equal(dnear, dfar)


@pytest.mark.night
def test_more_than_two_to_the_31_logits() -> None:
    """V 262144; zeros but for the last rows, so that only the gradient takes memory, 4 GiB."""
    rows, vocab = 8200, 262144
    z = untouched(rows * vocab).view(rows, vocab)
    z[-4:] = 3.0 * torch.randn(4, vocab).bfloat16()
    z.requires_grad_()
    target = torch.randint(0, vocab, (rows,))
    logprobs = ml.vocab_parallel_logprobs(z, target)
    g = torch.randn(rows)
    (grad,) = torch.autograd.grad(logprobs, z, g)
    for some in (slice(0, 2), slice(rows - 6, rows)):  # 2^31 elements end at row 8192
        leaf = z[some].detach().double().requires_grad_()
        truth = leaf.log_softmax(-1).gather(-1, target[some, None]).squeeze(-1)
        torch.testing.assert_close(logprobs[some].double(), truth, rtol=1e-6, atol=1e-5)
        (expected,) = torch.autograd.grad(truth, leaf, g[some].double())
        torch.testing.assert_close(grad[some].double(), expected, rtol=2**-8, atol=1e-9)
    torch.testing.assert_close(
        logprobs[:-4], torch.full((rows - 4,), -torch.tensor(float(vocab)).log().item())
    )


@pytest.mark.parametrize("k", [1, 50, 1000])
@pytest.mark.parametrize("width", [2004, 16032, 152064, 262144])
def test_the_largest_over_groups(width: int, k: int) -> None:
    """Of distinct values and of few: the smaller column is first among equals, in every group."""
    x = torch.randn(2, width)
    x = torch.cat([x, x.round(), x.sign()])
    expected = x.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values
    assert torch.equal(largest_columns(x, k).sort(-1).values, expected)


def test_segments_of_real_vocabularies() -> None:
    """Blocks cover each segment once, the last one of a segment being shorter or not."""
    for vocab in shapes.VOCABS:
        for share in (16, 24, 32, 96):
            if vocab % share:
                continue
            segments = Segments.of(share, vocab, 8)
            for device in ("cpu", "cuda"):
                block = segments.block(device)
                most = 8192 // block * block
                width = vocab // 8
                for valid in (width, width - 37, segments.width + 1):
                    covered = torch.zeros(width, dtype=torch.int64)
                    for columns in segments.columns(valid, most):
                        assert columns.stop > columns.start
                        for number, part in segments.calls(columns, block):
                            covered[part] += 1
                            whole = segments.width % block == 0
                            assert whole or part.stop <= (number + 1) * segments.width
                    assert torch.equal(covered, (torch.arange(width) < valid).long())


@pytest.mark.night
@pytest.mark.parametrize(("vocab", "segments"), [(50304, 8), (129280, 32), (151936, 32)])
def test_invariant_statistics_of_real_vocabularies(vocab: int, segments: int) -> None:
    """Segments of 6288 columns (blocks of 2048 and what is left over or a divisor), 4040, 4748."""
    z = (3.0 * torch.randn(9, vocab)).requires_grad_()
    target = torch.randint(0, vocab, (9,))
    values = statistics(z, target, invariant_segments=segments)
    *found, found_rank = (values[PER_TOKEN.index(x)] for x in (*WITH_A_GRADIENT, "target_rank"))
    exact = z.detach().double().requires_grad_()
    logp = exact.log_softmax(-1)
    own = logp.gather(-1, target[:, None]).squeeze(-1)
    truth = own, -(logp.exp() * logp).sum(-1), logp.exp().square().sum(-1), exact.logsumexp(-1)
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one.double(), other.detach(), rtol=2e-6, atol=1e-6)
    rank = (exact > exact.gather(-1, target[:, None])).sum(-1)
    assert torch.equal(found_rank, rank)
    g = [torch.randn(9) for _ in range(4)]
    (got,) = torch.autograd.grad(found, z, g)
    (expected,) = torch.autograd.grad(truth, exact, [x.double() for x in g])
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_context_parallel_layouts_of_long_sequences(layout: str) -> None:
    """A million tokens in thousands of sequences over CP 32, int32 bounds."""
    rng, cp = random.Random(0), 32
    lengths = [2 * cp * rng.choice((0, 1, 1, 2, 5, 40)) for _ in range(2000)]
    lengths += [2 * cp * 8192]  # one of half a million tokens
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    total = int(bounds[-1])
    where = SequenceLayout.of(layout, cp, total, bounds)
    positions = [where.positions(rank) for rank in range(cp)]
    slots = torch.cat(positions)
    assert torch.equal(slots.sort().values, torch.arange(total))
    assert torch.equal(slots[where.gather_order()], torch.arange(total))
    last = torch.zeros(total + 1, dtype=torch.bool)
    last[bounds[1:].long() - 1] = True  # of a sequence, its last token
    starts = torch.cat([own[where.chunk_starts()] for own in positions])
    for rank in (0, 1, cp - 1):
        own = positions[rank]
        place = torch.cat([own, starts, torch.tensor([-1])])
        following = torch.where(last[own], -1, own + 1)
        assert torch.equal(place[where.next_sources(rank)], following)


def test_a_prefix_tree_of_thousands_of_rows() -> None:
    """32 answers of up to 400 tokens each to a prompt of 4000; a chain as long as all of them."""
    rng = random.Random(0)
    prompt = [rng.randrange(50000) for _ in range(4000)]
    branches = [
        prompt + [rng.randrange(50000) for _ in range(rng.randint(1, 400))] for _ in range(32)
    ]
    tree = ml.PrefixTree.from_branches(branches, multiple=64)
    numbers = [tree.targets[path].tolist() for path in tree.paths]
    assert numbers == [branch[1:] for branch in branches]
    parents = tree.parents[tree.parents >= -1]
    assert torch.equal(tree.rows, parents[parents >= 0])
    depth = 20000
    chain = ml.PrefixTree.from_parents(torch.arange(depth), torch.arange(depth) - 1)
    assert torch.equal(chain.paths[0], torch.arange(depth - 1))
    assert torch.equal(chain.positions, torch.arange(depth))


@pytest.mark.parametrize("length", [1, 127, 128, 129, 255, 256, 257, 8191, 32768])
def test_discounted_sums_over_what_comes_later(length: int) -> None:
    """FIPO's sum over what comes later, against the recursion one token at a time."""
    values, gamma = torch.randn(2, length), 2.0 ** (-1.0 / 32.0)
    expected, after = torch.empty(2, length, dtype=torch.float64), torch.zeros(2).double()
    for at in reversed(range(length)):
        after = values[:, at].double() + gamma * after
        expected[:, at] = after
    torch.testing.assert_close(
        _discounted_ahead(values, gamma).double(), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.night
def test_hundreds_of_tiles() -> None:
    """400 all-gathers of hidden states and as many reduce-scatters, two ranks, with main_grad."""
    row = {name: values[0] for name, values in shapes.axes("hidden").items()}
    row |= {
        "op": "token_stats",
        "source": "hidden",
        "vocab": 32064,
        "share": 32,
        "at": ("tile", 400),
    }
    row |= {"chunk_size": 50, "off": -1, "ranks": "two, sequence parallel"}
    row |= {"gradient_accumulation_fusion": True}
    assert not run.failures([shapes.case_of(row, seed=1)])
