"""`PatchHandle.policy_loss`, `.options` and `.targets`: single calls of a patched model."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs import LogprobConfig, TokenStats, patch_model
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.losses import ClippedLoss
from tests.megatron.common import (
    VOCAB,
    make_batch,
    megatron,
    relative,
    step,
    tiny_config,
    worst,
)
from tests.megatron.test_joints import log_lines, same_traces, traces
from tests.megatron.test_pipeline import train_step, wrapped_chunks
from tests.megatron.test_unpatch import copy_without_groups

LOSS = ClippedLoss(clip_low=0.2, clip_high=0.3, kl_coef=0.05)
OTHER = LogprobConfig(entropy=True, target_rank=True, temperature=0.7, vocab_size=VOCAB - 5)


def inputs_of(batch: dict[str, Any]) -> tuple[Tensor, ...]:
    """(old, advantages, reference) of each token: non-uniform, some of both signs."""
    labels, weights = batch["labels"], batch["weights"]
    old = -3.0 - torch.sin(labels.double()).float() * weights
    return old, torch.cos(3.0 * labels) * weights, old + 0.3 * torch.sin(5.0 * weights)


def with_entropy(logprobs: Tensor, entropy: Tensor | None, *rest: Tensor) -> Tensor:
    assert entropy is not None
    return LOSS(logprobs, entropy, *rest) - 0.1 * entropy * rest[1]


def reference(
    logits: Tensor, labels: Tensor, tensors: Any, config: LogprobConfig, entropy: bool
) -> Tensor:
    """The same loss in float64 from gathered logits [b, s, V], summed."""
    z = logits.double()
    if config.softcap is not None:
        z = config.softcap * torch.tanh(z / config.softcap)
    z = z / config.temperature
    if config.vocab_size is not None:
        z = z[..., : config.vocab_size]
    logp = z.log_softmax(-1)
    keep = labels != config.ignore_index
    chosen = logp.gather(-1, labels.masked_fill(~keep, 0)[..., None])[..., 0]
    spread = -(logp.exp() * logp).sum(-1)
    fn = with_entropy if entropy else LOSS
    loss = fn(chosen, spread, *(t.double() for t in tensors))
    return (loss * keep).sum()


def gradients(model: Any, loss: Tensor, upstream: float) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    (loss * upstream).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def errors(
    layout: dict[str, Any],
    config: LogprobConfig,
    *,
    tied: bool = True,
    packed: bool = False,
    bias: bool = False,
    change: str = "",
) -> dict[str, Any]:
    """On one rank, against float64 from the unpatched model's logits."""
    tp, cp = layout.get("tp", 1), layout.get("cp", 1)
    with megatron(**layout) as parallel_state, log_lines() as lines:
        made = tiny_config(tp, sequence_parallel=layout.get("tp", 1) > 1)
        model = mm.build_gpt_model(made, vocab_size=VOCAB, tied=tied)
        if bias:
            layer = model.output_layer
            layer.bias = torch.nn.Parameter(torch.linspace(-2, 2, layer.weight.shape[0]))
        if change == "hook":
            model.output_layer.register_forward_hook(lambda m, args, out: (out[0] * 1.5, out[1]))
        batch = make_batch(parallel_state, packed=packed)
        labels = batch["labels"] % (config.vocab_size or VOCAB)
        labels[:, 1::5] = config.ignore_index
        tensors = inputs_of(batch)
        fn = with_entropy if config.entropy else LOSS
        before = traces(model)
        with patch_model(model, config) as handle:
            with handle.policy_loss(fn, *tensors, denominator=torch.tensor(7.0)):
                stats = model(**batch["inputs"], labels=labels)
            logits = model(**batch["inputs"], runtime_gather_output=True)  # no labels: logits
            grads = gradients(model, stats.policy_loss, 2.5)
            plain = model(**batch["inputs"], labels=labels)
        assert same_traces(traces(model), before)
        assert plain.policy_loss is None
        assert not stats.requires_grad
        assert (stats.entropy is not None) == config.entropy
        assert (stats.target_rank is not None) == config.target_rank
        if not (change or bias):
            logits = model(**batch["inputs"], runtime_gather_output=True)
        expected = reference(logits, labels, tensors, config, config.entropy) / 7.0
        # The TP ranks' losses are one loss: each rank's gather backward takes its own columns.
        expected_grads = gradients(model, expected, 2.5)
        return {
            "loss": relative(stats.policy_loss, expected.detach()),
            "logprobs": relative(stats.logprobs, plain.logprobs),
            "grad": worst(grads, expected_grads),
            "lines": len(lines),
            "cp": cp,
        }


LAYOUTS = [
    ({}, {}),
    ({}, {"tied": False, "bias": True}),
    ({"tp": 2}, {}),
    ({"tp": 3}, {"tied": False}),
    ({"cp": 2}, {}),
    ({"cp": 2}, {"packed": True}),
    ({"tp": 2, "cp": 2}, {"packed": True}),
]
CONFIGS = {
    "plain": LogprobConfig(),
    "all": OTHER,
    "compact": LogprobConfig(compact=True, entropy=True, ignore_index=-7, chunk_size=5),
    "logits": LogprobConfig(fused=False, entropy=True, temperature=1.3),
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("layout", "options"), LAYOUTS, ids=str)
def test_against_float64(ranks, layout, options, config):
    world = layout.get("tp", 1) * layout.get("cp", 1)
    for found in ranks(world).run(errors, layout, CONFIGS[config], **options):
        assert found["lines"] == 0
        assert max(found["loss"], found["logprobs"], found["grad"]) < 2e-5, found


@pytest.mark.parametrize("fused", [True, False])
def test_softcap(ranks, fused):
    config = LogprobConfig(softcap=3.0, entropy=True, fused=fused)
    for found in ranks(2).run(errors, {"tp": 2}, config):
        assert max(found["loss"], found["grad"]) < 2e-5, found


def test_a_head_that_cannot_be_fused_computes_the_same(ranks):
    for rank, found in enumerate(ranks(2).run(errors, {"tp": 2}, OTHER, change="hook")):
        assert found["lines"] == (1 if rank == 0 else 0)
        assert max(found["loss"], found["grad"]) < 2e-5, found


def refused() -> None:
    with megatron() as parallel_state:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        tensors = inputs_of(batch)
        hook = model.output_layer.register_forward_hook(lambda *args: None)
        handle = patch_model(model)
        with (
            handle.options(fused="require"),
            handle.policy_loss(LOSS, *tensors),
            pytest.raises(ValueError, match="fused='require'"),
        ):
            model(**batch["inputs"], labels=batch["labels"])
        hook.remove()
        for wrong in ((tensors[0][:1], *tensors[1:]), (tensors[0].t(), *tensors[1:])):
            with handle.policy_loss(LOSS, *wrong), pytest.raises(ValueError, match="labels'"):
                model(**batch["inputs"], labels=batch["labels"])
        for denominator in (
            *(0, True, "3", -1.0, float("nan"), torch.zeros(1), torch.ones(2)),
            torch.ones(1, requires_grad=True),
        ):
            with pytest.raises(ValueError, match="denominator"):
                enter(handle.policy_loss(LOSS, *tensors, denominator=denominator))
        with pytest.raises(ValueError, match="loss_fn"):
            enter(handle.policy_loss(tensors[0]))
        for fused in (True, False):
            with (
                handle.options(fused=fused),
                handle.policy_loss(lambda logprobs, entropy: logprobs.sum()),
                pytest.raises(ValueError, match="loss per row"),
            ):
                model(**batch["inputs"], labels=batch["labels"])
            for fn, words in ((cut_off, "cut off"), (LearntScale(), "LearntScale.scale")):
                with (
                    handle.options(fused=fused),
                    handle.policy_loss(fn),
                    pytest.raises(ValueError, match=words),
                ):
                    model(**batch["inputs"], labels=batch["labels"])
        # Whatever raised, the blocks are closed.
        assert model(**batch["inputs"], labels=batch["labels"]).policy_loss is None
        handle.remove()
        with pytest.raises(ValueError, match="not patched any more"):
            enter(handle.options(entropy=True))


def cut_off(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    return -logprobs.detach()


class LearntScale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        return logprobs * self.scale


def in_place(logprobs: Tensor, entropy: Tensor | None, old: Tensor) -> Tensor:
    return logprobs.sub_(old.mul_(2.0)).exp_()


def losses_in_both_paths() -> list[dict[str, Any]]:
    """In place, an int16 denominator, and no token that counts: fused, then on real logits."""
    with megatron() as parallel_state:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        labels, inputs, old = batch["labels"], batch["inputs"], inputs_of(batch)[0]
        kept, over = old.clone(), torch.tensor(257, dtype=torch.int16)
        found = []
        with patch_model(model) as handle:
            plain = model(**inputs, labels=labels).logprobs.detach()
            for fused in (True, False):
                with (
                    handle.options(fused=fused),
                    handle.policy_loss(in_place, old, denominator=over),
                ):
                    stats = model(**inputs, labels=labels)
                    none = model(**inputs, labels=torch.full_like(labels, -100))
                assert torch.equal(old, kept)
                torch.testing.assert_close(stats.logprobs, plain)
                for gradient in gradients(model, none.policy_loss, 1.0).values():
                    assert not gradient.any()
                found.append(
                    gradients(model, stats.policy_loss, 1.0)
                    | {"loss": stats.policy_loss.detach(), "none": none.policy_loss.detach()}
                )
            expected = ((plain - 2.0 * old).exp().double().sum() / 257).float()
            torch.testing.assert_close(found[0]["loss"], expected)
            assert found[0]["none"] == 0
        return found


def test_both_paths_take_the_same_losses(ranks):
    ((fused, real),) = ranks(1).run(losses_in_both_paths)
    torch.testing.assert_close(fused, real, rtol=1e-4, atol=1e-7)


def enter(block: Any) -> None:
    with block:
        pass


def test_mistakes(ranks):
    ranks(1).run(refused)


def in_a_schedule(layout: dict[str, Any], mtp: bool) -> float:
    """Gradients of Megatron's schedule and DDP: the loss in the head against stats and a loss."""
    with megatron(**layout) as parallel_state:
        config = tiny_config(
            num_layers=4,
            sequence_parallel=layout.get("tp", 1) > 1,
            microbatch_group_size_per_vp_stage=layout.get("pp", 1),
            **({"mtp_num_layers": 1} if mtp else {}),
        )
        chunks = wrapped_chunks(config, mtp=mtp)
        batches = [make_batch(parallel_state, seed=i) for i in range(4)]
        reports = []

        def of_stats(stats: Any, batch: dict[str, Any]) -> Any:
            loss = with_entropy(stats.logprobs, stats.entropy, *inputs_of(batch)).sum() / 11.0
            return loss, loss.detach().clone()

        def in_head(stats: Any, batch: dict[str, Any]) -> Any:
            reports.append(stats)
            return stats.policy_loss, stats.policy_loss.detach().clone()

        settings = LogprobConfig(entropy=True)
        with patch_model(chunks, settings) as handle:
            expected, expected_grads = train_step(config, chunks, batches, of_stats)
            for chunk in chunks:  # forward_step opens the block around the model's call
                chunk.forward = types.MethodType(
                    _block_around(type(chunk).forward, handle, batches), chunk
                )
            got, grads = train_step(config, chunks, batches, in_head)
        assert all(isinstance(s, TokenStats) and not s.requires_grad for s in reports)
        worst_loss = max((relative(g, e) for g, e in zip(got, expected, strict=True)), default=0.0)
        return max(worst_loss, worst(grads, expected_grads))


def _block_around(forward: Any, handle: Any, batches: list[Any]) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = next(b for b in batches if b["labels"] is kwargs["labels"])
        with handle.policy_loss(with_entropy, *inputs_of(batch), denominator=11.0):
            return forward(self, *args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("layout", "mtp"),
    [
        ({"pp": 2}, False),
        ({"pp": 2, "vp": 2}, False),
        ({"tp": 2}, True),
        ({"cp": 2, "pp": 2}, False),
    ],
    ids=["pp2", "vp2", "tp2-mtp", "cp2-pp2"],
)
def test_in_megatrons_schedule(ranks, layout, mtp):
    world = layout.get("tp", 1) * layout.get("cp", 1) * layout.get("pp", 1)
    assert max(ranks(world).run(in_a_schedule, layout, mtp)) < 1e-5


def into_main_grad() -> float:
    """gradient_accumulation_fusion of the head alone, over two micro-batches."""
    with megatron(tp=2) as parallel_state:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )

        config = tiny_config(sequence_parallel=True)
        model = mm.build_gpt_model(config, vocab_size=VOCAB, tied=False)
        ddp = DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
        )
        batches = [make_batch(parallel_state, seed=seed) for seed in range(2)]

        def accumulate() -> dict[str, Tensor]:
            ddp.zero_grad_buffer()
            for batch in batches:
                with handle.policy_loss(LOSS, *inputs_of(batch)):
                    output = ddp(**batch["inputs"], labels=batch["labels"])
                (output.policy_loss * 0.7).backward()
            return {n: p.main_grad.clone() for n, p in model.named_parameters()}

        with patch_model(ddp, LogprobConfig(fused="require")) as handle:
            expected = accumulate()
            model.output_layer.gradient_accumulation_fusion = True
            return worst(accumulate(), expected)


def test_into_main_grad(ranks):
    assert max(ranks(2).run(into_main_grad)) < 1e-6


# ---- options and targets -----------------------------------------------------------------------


def options_and_targets(tp: int) -> None:
    with megatron(tp=tp) as parallel_state:
        model = mm.build_gpt_model(tiny_config(tp, sequence_parallel=tp > 1), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        batch["labels"] = labels = batch["labels"] % OTHER.vocab_size
        inputs = batch["inputs"]
        logits = model(**inputs)
        with patch_model(model, OTHER):
            expected = model(**inputs, labels=labels)
        handle = patch_model(model, LogprobConfig(output="loss"))
        fields = {k: v for k, v in OTHER.as_dict().items() if v != LogprobConfig().as_dict()[k]}
        with handle.options(output="stats", temperature=2.0), handle.options(**fields):
            got, grads = step(model, batch)
            assert torch.equal(got.logprobs, expected.logprobs)
            assert torch.equal(got.target_rank, expected.target_rank)
        loss = model(**inputs, labels=labels)
        assert isinstance(loss, Tensor)
        for fused in (True, False):
            with handle.options(fused=fused):
                assert relative(model(**inputs, labels=labels), loss) < 1e-5
        with handle.options(**fields | {"output": "stats"}), handle.targets(labels):
            stats = model(**inputs)
            assert torch.equal(stats.logprobs, expected.logprobs)
            model.zero_grad(set_to_none=True)
            (stats.loss * batch["weights"]).sum().backward()
            found = {n: p.grad for n, p in model.named_parameters()}
            assert worst(found, grads) == 0.0
            with pytest.raises(ValueError, match="without labels"):
                model(**inputs, labels=labels)
        assert torch.equal(model(**inputs), logits)
        with pytest.raises(ValueError, match="temperature"):
            enter(handle.options(temprature=1.0))
        with pytest.raises(ValueError, match="temperature"):
            enter(handle.options(temperature=-1.0))
        handle.remove()


@pytest.mark.parametrize("tp", [1, 2])
def test_options_and_targets(ranks, tp):
    ranks(tp).run(options_and_targets, tp)


def blocks_and_copies(pp: int) -> None:
    """A deep copy has no open block, and each block takes its own change back, whichever ends."""
    with megatron(pp=pp) as parallel_state:
        model = mm.build_gpt_chunks(tiny_config(num_layers=2), vocab_size=VOCAB, tied=False)[0]
        handle = patch_model(model)
        batch = make_batch(parallel_state)
        weights = batch["weights"]
        twins = []

        def copied() -> None:
            twins.append(copy_without_groups(model))

        outer, inner = handle.options(temperature=2.0, entropy=True), handle.options(top_p=0.9)
        loss = handle.policy_loss(lambda logprobs, entropy, w: -logprobs * w, weights)
        for block in (outer, inner, loss):
            block.__enter__()
        copied()
        outer.__exit__(None, None, None)
        copied()
        if not model.post_process:
            with pytest.raises(ValueError, match="label_smoothing"):
                enter(handle.options(label_smoothing=0.1))  # beside the filter that is still on
            inner.__exit__(None, None, None)
            enter(handle.options(label_smoothing=0.1))
            return loss.__exit__(None, None, None)

        def call(model: Any) -> Any:
            model.set_input_tensor(torch.ones(24, 2, 32)) if pp > 1 else None
            return model(**batch["inputs"], labels=batch["labels"])

        with handle.options(temperature=1.0):
            found = [call(model)]
        inner.__exit__(None, None, None)
        found.append(call(model))
        loss.__exit__(None, None, None)
        plain = call(model)
        assert [x.policy_loss is None for x in (*found, plain)] == [False, False, True]
        assert found[0].entropy is found[1].entropy is plain.entropy is None
        assert found[0].logprobs.isinf().any()  # what the filter leaves out
        assert torch.equal(found[1].logprobs, plain.logprobs)
        for twin in twins:
            assert torch.equal(call(twin).logprobs, plain.logprobs)
            with patch_model(twin).options(temperature=2.0):
                assert not torch.equal(call(twin).logprobs, plain.logprobs)


@pytest.mark.own_sizes
@pytest.mark.parametrize("pp", [1, 2])
def test_blocks_and_copies(ranks, pp):
    ranks(pp).run(blocks_and_copies, pp)
