"""Multi-token prediction keeps its own losses; the main head alone follows the config."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.megatron import head_loss, patch_gpt_model
from mcore_logprobs.megatron.deferred import DeferredLogits
from mcore_logprobs.megatron.mtp import without_mtp
from mcore_logprobs.ops.token_stats import TokenStats
from mcore_logprobs.sources import lazy_head
from tests.helpers.lazy import lazy_logits
from tests.megatron.common import (
    VOCAB,
    loss_of,
    make_batch,
    megatron,
    relative,
    step,
    tiny_config,
    worst,
)
from tests.megatron.test_pipeline import furthest, train_step, weighted, wrapped_chunks


def logged_metrics(run: Any) -> dict[str, torch.Tensor]:
    """What Megatron logged for each MTP head while `run` ran: losses, from 0.19 on also hits."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()
    run()
    tracker = MTPLossLoggingHelper.tracker
    return {k.replace("loss_", ""): v.clone() for k, v in tracker.items() if torch.is_tensor(v)}


def compare(
    tp: int,
    cp: int,
    sp: bool,
    settings: dict[str, Any],
    *,
    tied: bool = True,
    heads: int = 2,
    packed: bool = False,
) -> dict[str, float]:
    with megatron(tp=tp, cp=cp) as parallel_state:
        config = tiny_config(tp, sequence_parallel=sp, mtp_num_layers=heads)
        model = mm.build_gpt_model(config, vocab_size=VOCAB, tied=tied, mtp=True)
        batch = make_batch(parallel_state, packed=packed)
        results: dict[str, Any] = {}
        logged = {"plain": logged_metrics(lambda: results.update(plain=step(model, batch)))}
        with patch_gpt_model(model, LogprobConfig(**settings)):
            logged["ours"] = logged_metrics(lambda: results.update(ours=step(model, batch)))
        (expected, expected_grads), (got, grads) = results["plain"], results["ours"]
        assert isinstance(got, TokenStats) == (settings.get("output", "stats") == "stats")
        assert max(value.max() for value in logged["plain"].values()) > 1.0
        assert "_postprocess" not in vars(model)
        return {
            "loss": relative(loss_of(got), expected),
            "grad": worst(grads, expected_grads),
            "logged": worst(logged["ours"], logged["plain"]),
        }


@pytest.mark.parametrize("settings", [{}, {"output": "loss"}, {"fused": False}], ids=str)
@pytest.mark.parametrize(
    ("tp", "cp", "sp"), [(1, 1, False), (2, 1, True), (1, 2, False), (2, 2, True)]
)
def test_same_losses_and_gradients(ranks, tp, cp, sp, settings):
    for errors in ranks(tp * cp).run(compare, tp, cp, sp, settings):
        assert max(errors.values()) < 1e-5


def compare_gathered(settings: dict[str, Any]) -> dict[str, float]:
    """A head that gathers its logits, patched, and one that does not, unpatched."""
    with megatron(tp=2) as parallel_state:
        config = tiny_config(2, mtp_num_layers=2)
        sharded, gathered = (
            mm.build_gpt_model(config, vocab_size=VOCAB, mtp=True, parallel_output=parallel)
            for parallel in (True, False)
        )
        gathered.load_state_dict(sharded.state_dict())
        batch = make_batch(parallel_state)
        results: dict[str, Any] = {}
        logged = [logged_metrics(lambda: results.update(plain=step(sharded, batch)))]
        with patch_gpt_model(gathered, LogprobConfig(**settings)):
            logged.append(logged_metrics(lambda: results.update(ours=step(gathered, batch))))
        (expected, expected_grads), (got, grads) = results["plain"], results["ours"]
        return {
            "loss": relative(loss_of(got), expected),
            "grad": worst(grads, expected_grads),
            "logged": worst(*logged[::-1]),
        }


@pytest.mark.parametrize("settings", [{}, {"output": "loss"}, {"fused": False}], ids=str)
def test_gathered_logits(ranks, settings):
    """Megatron's own loss, which theirs are, takes a shard and would take whole rows for one."""
    for errors in ranks(2).run(compare_gathered, settings):
        assert max(errors.values()) < 1e-5, errors


def test_untied(ranks):
    for errors in ranks(2).run(compare, 2, 1, True, {}, tied=False):
        assert max(errors.values()) < 1e-5


@pytest.mark.parametrize(("tp", "cp", "sp"), [(2, 1, True), (2, 2, True)])
def test_packed_sequences(ranks, tp, cp, sp):
    for errors in ranks(tp * cp).run(compare, tp, cp, sp, {}, packed=True):
        assert max(errors.values()) < 1e-5


@pytest.mark.parametrize("output", ["stats", "loss"])
@pytest.mark.parametrize("fused", [True, False])
def test_main_heads_settings_stay_with_the_main_head(ranks, output, fused):
    settings = {"output": output, "fused": fused, "temperature": 0.5, "label_smoothing": 0.1}
    errors = ranks(1).run(compare, 1, 1, False, settings)[0]
    assert errors["loss"] > 0.01
    assert errors["logged"] < 1e-5


# ---- labels that are not in the vocabulary -----------------------------------------------------


def odd_labels(
    tp: int, settings: dict[str, Any], masked: bool, per_token: bool
) -> dict[str, float]:
    """-100 labels, with a loss mask and without; MTP's loss knows no ignore_index."""
    with megatron(tp=tp) as parallel_state:
        config = tiny_config(
            tp,
            sequence_parallel=tp > 1,
            mtp_num_layers=2,
            calculate_per_token_loss=per_token,
        )
        model = mm.build_gpt_model(config, vocab_size=VOCAB, mtp=True)
        batch = make_batch(parallel_state)
        ignore = settings.get("ignore_index", -100)
        batch["labels"][:, 3::4] = ignore
        # Megatron's main loss has no ignore_index either: what it makes of such labels stays out.
        batch["weights"] = batch["weights"] * (batch["labels"] != ignore)
        call = {"loss_mask": (batch["weights"] > 1.0).float()} if masked else {}
        results: dict[str, Any] = {}
        plain = logged_metrics(lambda: results.update(plain=step(model, batch, **call)))
        with patch_gpt_model(model, LogprobConfig(**settings)):
            ours = logged_metrics(lambda: results.update(ours=step(model, batch, **call)))
        (expected, expected_grads), (got, grads) = results["plain"], results["ours"]
        kept = (batch["labels"] != ignore).float()
        return {
            "loss": relative(loss_of(got) * kept, expected * kept),
            "grad": worst(grads, expected_grads),
            "logged": worst(ours, plain),
        }


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"ignore_index": -1}, {"ignore_index": 7}, {"fused": False}], ids=str
)
def test_labels_to_ignore(ranks, settings, masked):
    for errors in ranks(2).run(odd_labels, 2, settings, masked, False):
        assert max(errors.values()) < 1e-5, errors


def test_labels_to_ignore_with_a_loss_per_token(ranks):
    for errors in ranks(1).run(odd_labels, 1, {}, False, True):
        assert max(errors.values()) < 1e-5, errors


def of_transformer_engine(
    logits: torch.Tensor, labels: torch.Tensor, *_: Any
) -> torch.Tensor:  # [s, b, V], [s, b]
    """What its kernel gives (cross_entropy.py): 0, and no gradient, for the label -100."""
    flat = logits.float().flatten(0, 1), labels.reshape(-1)
    return torch.nn.functional.cross_entropy(*flat, reduction="none").view(labels.shape)


def ignored_by_fused_loss(fused: bool) -> dict[str, float]:
    """Transformer Engine cannot run here: its loss in its place, in Megatron's own dispatch."""
    from megatron.core.models.common.language_module import language_module

    with megatron() as parallel_state, pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_module, "te_parallel_cross_entropy", of_transformer_engine)
        config = tiny_config(
            mtp_num_layers=2, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te"
        )
        model = mm.build_gpt_model(config, vocab_size=VOCAB, mtp=True)
        batch = make_batch(parallel_state)
        batch["labels"][:, 3::4] = -100
        results: dict[str, Any] = {}
        plain = logged_metrics(lambda: results.update(plain=step(model, batch)))
        with patch_gpt_model(model, LogprobConfig(output="loss", fused=fused)):
            ours = logged_metrics(lambda: results.update(ours=step(model, batch)))
        (expected, expected_grads), (got, grads) = results["plain"], results["ours"]
        return {
            "loss": relative(got, expected),
            "grad": worst(grads, expected_grads),
            "logged": worst(ours, plain),
        }


@pytest.mark.parametrize("fused", [True, False])
def test_labels_that_a_fused_loss_ignores(ranks, fused):
    (errors,) = ranks(1).run(ignored_by_fused_loss, fused)
    assert max(errors.values()) < 1e-5, errors


# ---- mtp="off" ---------------------------------------------------------------------------------


def switched_off(tp: int, fused: bool) -> None:
    with megatron(tp=tp) as parallel_state:
        config = tiny_config(tp, sequence_parallel=tp > 1, mtp_num_layers=2)
        model = mm.build_gpt_model(config, vocab_size=VOCAB, mtp=True)
        batch = make_batch(parallel_state)
        before = [dict(vars(m)) for m in model.modules()]
        layers = list(model.mtp.parameters())
        with without_mtp(model):  # a HybridModel that offloads activations reads them in its call
            assert all(a is b for a, b in zip(model.mtp.parameters(), layers, strict=True))
        expected, with_mtp = step(model, batch)
        config.mtp_loss_scaling_factor = 0.0  # what is left without MTP's gradients
        _, without = step(model, batch)
        config.mtp_loss_scaling_factor = 0.1
        settings = LogprobConfig(fused=fused, mtp="off")
        with patch_gpt_model(model, settings) as handle:
            results: dict[str, Any] = {}
            assert not logged_metrics(lambda: results.update(off=step(model, batch)))
            got, grads = results["off"]
            assert not any(name.startswith("mtp.") for name in grads)
            left = {n: g for n, g in without.items() if not n.startswith("mtp.")}
            assert worst(grads, left) < 1e-5
            assert relative(loss_of(got), expected) < 1e-5
            assert model.config is config
            with handle.options(mtp="keep"):
                _, kept = step(model, batch)
            assert worst(kept, with_mtp) < 1e-5
            with pytest.raises(ValueError, match="mtp"), handle.options(mtp="on"):
                pass
        after = [dict(vars(m)) for m in model.modules()]
        assert [list(d) for d in after] == [list(d) for d in before]
        assert all(a[k] is b[k] for a, b in zip(after, before, strict=True) for k in b)


def counted_by_ddp() -> None:
    """DDP with overlapping reductions waits for a gradient of every parameter."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    with megatron() as parallel_state:
        config = tiny_config(mtp_num_layers=1)
        model = mm.build_gpt_model(config, vocab_size=VOCAB, mtp=True)
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=True, bucket_size=4000
        )
        wrapped = DistributedDataParallel(config, settings, model)
        batch = make_batch(parallel_state)
        with patch_gpt_model(model) as handle:
            for mtp in ("keep", "off", "off"):
                wrapped.zero_grad_buffer()
                with handle.options(mtp=mtp):
                    output = wrapped(**batch["inputs"], labels=batch["labels"])
                (loss_of(output) * batch["weights"]).sum().backward()
                finalize_model_grads([wrapped])
                named = model.named_parameters()
                learnt = {n: bool(p.main_grad.any()) for n, p in named if n.startswith("mtp.")}
                assert any(learnt.values()) == (mtp == "keep")
                assert model.decoder.layers[0].mlp.linear_fc1.weight.main_grad.any()


def test_switched_off_under_ddp(ranks):
    ranks(1).run(counted_by_ddp)


def trained_without_heads(parallel_state: Any, config: Any, chunks: list[Any]) -> float:
    """How far two steps under `mtp="off"` are from one in which MTP's losses weigh nothing."""
    batches = [make_batch(parallel_state, seed=seed) for seed in range(2)]
    config.mtp_loss_scaling_factor = 0.0
    expected = train_step(config, chunks, batches, weighted)
    with patch_gpt_model(chunks, LogprobConfig(mtp="off")):
        steps = [train_step(config, chunks, batches, weighted) for _ in range(2)]
    return furthest(steps, expected)


def counted_on_a_later_stage(tied: bool) -> float:
    """The last stage has an embedding: that of the tied head, or multi-token prediction's alone.

    Tied: without overlap, as Megatron's own DDP waits there for the output layer's unused weight.
    """
    with megatron(pp=2) as parallel_state:
        config = tiny_config(mtp_num_layers=1)
        overlap = {"overlap_grad_reduce": not tied}
        chunks = wrapped_chunks(config, tied=tied, mtp=True, ddp=overlap)
        return trained_without_heads(parallel_state, config, chunks)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_switched_off_in_a_pipeline_under_ddp(ranks, tied):
    assert max(ranks(2).run(counted_on_a_later_stage, tied)) < 1e-5


def sampled_on_a_later_stage() -> float:
    """`PatchHandle.sample` leaves the MTP layers out too, whatever the settings say."""
    with megatron(pp=2) as parallel_state:
        config = tiny_config(mtp_num_layers=1)
        model = mm.build_gpt_model(config, vocab_size=VOCAB, tied=True, mtp=True).eval()
        if not parallel_state.is_pipeline_last_stage():
            return 0.0
        batch = make_batch(parallel_state)["inputs"]
        shape = *batch["input_ids"].T.shape, config.hidden_size
        model.set_input_tensor(torch.randn(shape, generator=torch.Generator().manual_seed(5)))
        with patch_gpt_model(model) as handle, torch.no_grad():
            with handle.sample(3):
                ids, logprobs = model(**batch)
            scored = model(**batch, labels=ids).logprobs
        return float((logprobs - scored).abs().max())


def test_samples_of_a_tied_head_in_a_pipeline(ranks):
    assert max(ranks(2).run(sampled_on_a_later_stage)) < 1e-5


@pytest.mark.parametrize(("tp", "fused"), [(1, False), (2, True)])
def test_switched_off(ranks, tp, fused):
    ranks(tp).run(switched_off, tp, fused)


SETTINGS: dict[str, Any] = {
    "chunk_size": 3,
    "backend": "torch",
    "invariant_segments": 2,
    "logits_dtype": torch.bfloat16,
}


@pytest.mark.parametrize("lazy", [False, True])
def test_a_further_head_follows_the_settings(monkeypatch: pytest.MonkeyPatch, lazy: bool) -> None:
    hidden, weight = torch.randn(5, 2, 8).bfloat16(), torch.randn(16, 8).bfloat16()
    logits: Any = lazy_logits(hidden, weight, logits_dtype=torch.bfloat16)
    seen, original = [], lazy_head.head_logits

    def spy(*args: Any, **options: Any) -> Any:
        seen.append(options)
        return original(*args, **options)

    monkeypatch.setattr(lazy_head, "head_logits", spy)
    loss = head_loss.lazy_mtp_loss
    if not lazy:
        loss, logits = head_loss.mtp_loss, DeferredLogits(logits.view_of_head.rows.head)
    labels, config = torch.arange(10).view(2, 5), LogprobConfig(**SETTINGS)
    loss(labels, logits, config, tp_group=None, loss_mask=None, ignored=None)
    assert {name: seen[0][name] for name in SETTINGS} == SETTINGS
