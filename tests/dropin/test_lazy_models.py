"""Models built while a drop-in is on give lazy logits, and nothing else of them changes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_logprobs as ours
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.dropin import lazy_models, megatron_rl, nemo_rl, switch, verl
from mcore_logprobs.megatron import patch as patch_module
from mcore_logprobs.megatron.head_patch import HeadPatch, patch_of
from mcore_logprobs.sources.lazy import LazyLogits
from tests.megatron.common import VOCAB, make_batch, megatron, relative, step, tiny_config, worst
from tests.megatron.test_peft import LoraParallelLinear
from tests.megatron.test_pipeline import train_step, wrapped_chunks


def built(**config: Any) -> Any:
    return mm.build_gpt_model(tiny_config(**config), vocab_size=VOCAB)


@contextlib.contextmanager
def automatic(batch: dict[str, Any]) -> Iterator[Any]:
    """A model that is patched automatically, for as long as this is open."""
    off = lazy_models.lazy_models("auto")
    try:
        model = built()
        model(**batch["inputs"])
        yield model
    finally:
        off()


def while_it_is_on(fused: str) -> None:
    with megatron() as parallel_state:
        batch, before = make_batch(parallel_state), built()
        expected, expected_grads = step(before, batch)
        off = lazy_models.lazy_models(fused)
        try:
            model = built()
            model.load_state_dict(before.state_dict())
            assert patch_of(model) is None
            logits = model(**batch["inputs"])
            assert isinstance(logits, LazyLogits)
            # Labels give Megatron's loss and gradients.
            got, grads = step(model, batch)
            assert relative(got, expected) < 1e-6
            assert worst(grads, expected_grads) < 1e-4
            # A patch of somebody's own takes its place for as long as it is on.
            for _ in range(2):
                with ours.patch_model(model, ours.LogprobConfig(entropy=True)) as handle:
                    stats = model(**batch["inputs"], labels=batch["labels"])
                    assert stats.entropy is not None
                    assert type(model(**batch["inputs"])) is Tensor
                    assert handle.active
                assert isinstance(model(**batch["inputs"]), LazyLogits)
            with (
                ours.patch_model(model, ours.LogprobConfig()),
                pytest.raises(ValueError, match="entropy=False, got entropy=True"),
            ):
                ours.patch_model(model, ours.LogprobConfig(entropy=True))
            # A head that has no vocabulary.
            critic = built()
            critic.output_layer = torch.nn.Linear(32, 1)
            critic.output_layer.forward = lambda x, **_: (x.sum(-1, keepdim=True), None)
            assert type(critic(**batch["inputs"])) is Tensor
            reads = model(**batch["inputs"])
            if fused == "require":
                with pytest.raises(ValueError, match="fused='require'"):
                    reads.softmax(-1)
            else:
                assert type(reads.softmax(-1)) is Tensor
        finally:
            off()
        assert type(model(**batch["inputs"])) is Tensor
        assert patch_of(model) is None
        assert "output_layer" in dict(model.named_modules())
        made_while_off = built()
        with automatic(batch) as another:
            assert isinstance(another(**batch["inputs"]), LazyLogits)
            assert isinstance(model(**batch["inputs"]), LazyLogits)
            assert type(made_while_off(**batch["inputs"])) is Tensor


@pytest.mark.parametrize("fused", ["auto", "require"])
def test_models_made_while_it_is_on(ranks: Any, fused: str) -> None:
    ranks(1).run(while_it_is_on, fused)


def a_handle_s_end() -> None:
    """A patch that stood in the automatic one's place ends once, and its handle with it."""
    with megatron() as parallel_state:
        batch = make_batch(parallel_state)
        call = {**batch["inputs"], "labels": batch["labels"]}
        with automatic(batch) as model:
            with ours.patch_model(model, ours.LogprobConfig(entropy=True)) as handle:
                assert model(**call).entropy is not None
                handle.remove()
                assert not handle.active
                for block in (
                    handle.options(temperature=0.1),
                    handle.policy_loss(lambda logprobs, entropy: logprobs),
                ):
                    with pytest.raises(ValueError, match="not patched any more"), block:
                        pass
                handle.remove()
            assert isinstance(model(**batch["inputs"]), LazyLogits)
            # Nor is it on again with a later one.
            with ours.patch_model(model, ours.LogprobConfig(target_rank=True)) as later:
                assert later.active
                assert not handle.active
                handle.remove()
                assert model(**call).target_rank is not None
            handle = ours.patch_model(model, ours.LogprobConfig(entropy=True))
        for _ in range(2):  # switched off meanwhile
            assert model(**call).entropy is not None
        assert handle.active
        handle.remove()
        assert patch_of(model) is None
        assert type(model(**batch["inputs"])) is Tensor


def test_the_end_of_a_patch_in_its_place(ranks: Any) -> None:
    ranks(1).run(a_handle_s_end)


def a_block_outlives_a_stand_in() -> None:
    """What a handle on the automatic patch has open is there again when another's place ends."""
    with megatron() as parallel_state, automatic(batch := make_batch(parallel_state)) as model:
        call = {**batch["inputs"], "labels": batch["labels"]}
        patch: Any = patch_of(model)
        handle = ours.patch_model(model, patch.config)
        plain = model(**call)
        with handle.options(temperature=2.0):
            before = model(**call)
            with ours.patch_model(model, ours.LogprobConfig(entropy=True)):
                assert not handle.active
                assert model(**call).entropy is not None
            assert torch.equal(model(**call), before)
            assert not torch.equal(plain, before)
        assert handle.active
        assert torch.equal(model(**call), plain)


def test_a_block_outlives_a_patch_in_its_place(ranks: Any) -> None:
    ranks(1).run(a_block_outlives_a_stand_in)


def a_refused_patch() -> None:
    """One that cannot take the automatic one's place changes nothing."""
    with megatron() as parallel_state:
        inputs = make_batch(parallel_state)["inputs"]
        off = lazy_models.lazy_models("auto")
        try:
            model = built()
            model(**inputs)
            patch: Any = patch_of(model)
            for refused in ({"vocab_size": 10**6}, {"invariant_segments": 7}):
                with pytest.raises(ValueError, match=next(iter(refused))):
                    ours.patch_model(model, ours.LogprobConfig(**refused))
                assert patch.config.logits == "lazy"
                assert isinstance(model(**inputs), LazyLogits)
            # Nor does one that is refused on another stage, or that fails on another chunk.
            with pytest.MonkeyPatch.context() as fails:
                fails.setattr(patch_module, "_of_all_stages", lambda model, reason: ["elsewhere"])
                with pytest.raises(ValueError, match="but elsewhere"):
                    ours.patch_model(model, ours.LogprobConfig(fused="require"))
            assert isinstance(model(**inputs), LazyLogits)
            second = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
            for chunks in ([model, second], [second, model]):
                with pytest.MonkeyPatch.context() as fails:
                    fails.setattr(HeadPatch, "install", _fail)
                    with pytest.raises(RuntimeError, match="no room"):
                        ours.patch_model(chunks, ours.LogprobConfig(entropy=True))
                assert patch_of(model) is patch
                assert isinstance(model(**inputs), LazyLogits)
            with ours.patch_model(model, ours.LogprobConfig(entropy=True)) as handle:
                assert handle.active
        finally:
            off()


def _fail(patch: HeadPatch) -> None:
    raise RuntimeError("no room")


def test_a_refused_patch_changes_nothing(ranks: Any) -> None:
    ranks(1).run(a_refused_patch)


def settings_that_change() -> None:
    with megatron() as parallel_state:
        inputs = make_batch(parallel_state)["inputs"]
        model = built()

        def reads() -> str:
            logits = model(**inputs)
            try:
                return type(logits.softmax(-1)).__name__
            except ValueError:
                return "refused"

        first = lazy_models.lazy_models("require")
        model = built()
        assert reads() == "refused"
        second = lazy_models.lazy_models("auto")
        assert reads() == "Tensor"
        third = lazy_models.lazy_models("require")
        assert reads() == "refused"
        third()
        third()  # once is enough
        assert reads() == "Tensor"
        second()
        assert reads() == "refused"
        first()
        assert type(model(**inputs)) is Tensor
        off = lazy_models.lazy_models("auto")
        try:
            for own, found in (("require", "refused"), (False, "Tensor")):
                model = built()
                model.config.logprob_fused = own
                assert reads() == found
            assert patch_of(model) is None
        finally:
            off()
        off = lazy_models.lazy_models("require")
        try:
            for own in (True, False):
                model = built()
                model.config.logprob_fused = own
                assert reads() == "Tensor"
        finally:
            off()
        # Somebody else has patched the model too, and the patch cannot be taken back.
        off = lazy_models.lazy_models("require")
        try:
            model = built()
            assert reads() == "refused"
            ours_was = model.compute_language_model_loss
            model.compute_language_model_loss = lambda *args: ours_was(*args)
            later = lazy_models.lazy_models("auto")
            assert reads() == "refused"
            assert "GPTModel: its lazy logits stay as they were" in lazy_models._said[-1]
            later()
            model.compute_language_model_loss = ours_was
        finally:
            off()


def test_the_setting_that_is_on_last_holds(ranks: Any) -> None:
    ranks(1).run(settings_that_change)


def a_model_s_own_settings() -> None:
    """Functions that patch the model themselves take them as its lazy logits do."""
    with megatron() as parallel_state:
        batch = make_batch(parallel_state)
        inputs, labels = batch["inputs"], batch["labels"]

        def by_verl(model: Any) -> None:
            verl.patch_fused_forward(model)
            try:
                model(**inputs, labels=labels.clamp(min=0), temperature=1.0)
            finally:
                verl.unpatch_fused_forward(model)

        def by_megatrons_rl(model: Any) -> None:
            megatron_rl.get_logprobs(model, inputs["input_ids"], inputs["position_ids"])

        def by_nemo(model: Any) -> None:
            nemo_rl.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=4)
            try:
                flag = {"return_logprobs_for_linear_ce_fusion": True}
                model(**inputs, labels=inputs["input_ids"], **flag)
            finally:
                nemo_rl.unpatch_gpt_model_forward_for_linear_ce_fusion()

        off = lazy_models.lazy_models("require")
        try:
            for call in (by_verl, by_megatrons_rl, by_nemo):
                model = built()
                model.config.logprob_backend = "triton"
                with pytest.raises(ValueError, match="backend='triton' is unavailable"):
                    call(model)
                for own in (None, True, False):
                    model = built()
                    model.output_layer.register_forward_hook(lambda layer, args, out: out)
                    if own is None:
                        with pytest.raises(ValueError, match="fused='require'"):
                            call(model)
                    else:
                        model.config.logprob_fused = own
                        call(model)
        finally:
            off()


def test_a_model_s_own_settings(ranks: Any) -> None:
    ranks(1).run(a_model_s_own_settings)


def another_layer(model: Any) -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    old = model.output_layer
    model.output_layer = ColumnParallelLinear(
        old.input_size,
        old.output_size,
        config=old.config,
        init_method=torch.nn.init.normal_,
        bias=False,
        gather_output=False,
    )


def with_a_lora(model: Any) -> None:
    model.output_layer = LoraParallelLinear(model.output_layer)


def a_head_that_changes() -> list[str]:
    with megatron() as parallel_state:
        inputs = make_batch(parallel_state)["inputs"]
        off = lazy_models.lazy_models("require")
        try:
            model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB, tied=False)
            for change in (lambda model: None, another_layer, with_a_lora):
                change(model)
                logits = model(**inputs)
                assert isinstance(logits, LazyLogits)
                assert ours.vocab_parallel_entropy(logits).isfinite().all()
        finally:
            off()
        found = []
        for fused in ("require", True):
            model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB, tied=False)
            with ours.patch_model(model, ours.LogprobConfig(logits="lazy", fused=fused)):
                assert isinstance(model(**inputs), LazyLogits)
                another_layer(model)
                try:
                    found.append(type(model(**inputs)).__name__)
                except ValueError as error:
                    found.append(str(error))
        return found


def test_another_layer_after_the_first_call(ranks: Any) -> None:
    required, otherwise = ranks(1).run(a_head_that_changes)[0]
    assert "fused='require', but the model's output layer is not the one that" in required
    assert otherwise == "Tensor"


def a_drop_in_that_patches(fused: str) -> None:
    """Megatron's RL patches the head itself, which here cannot be fused."""
    with megatron() as parallel_state:
        inputs = make_batch(parallel_state)["inputs"]
        model = built()
        model.output_layer.register_forward_hook(lambda *_: None)
        call = model, inputs["input_ids"], inputs["position_ids"]
        off = lazy_models.lazy_models(fused)
        try:
            if fused == "require":
                with pytest.raises(ValueError, match="fused='require', but a forward hook"):
                    megatron_rl.get_logprobs(*call, no_grad=True)
            else:
                assert megatron_rl.get_logprobs(*call, no_grad=True).isfinite().all()
        finally:
            off()


@pytest.mark.parametrize("fused", ["auto", "require"])
def test_a_drop_in_that_patches_by_itself(ranks: Any, fused: str) -> None:
    ranks(1).run(a_drop_in_that_patches, fused)


def in_a_pipeline() -> list[str]:
    """The head's stage is patched within Megatron's schedule, where the other stage sends to it."""
    with megatron(pp=2) as parallel_state:
        off = lazy_models.lazy_models("require")
        try:
            config = tiny_config(gradient_accumulation_fusion=False)
            chunks = wrapped_chunks(config)
            batches = [make_batch(parallel_state, seed=seed) for seed in (3, 4, 5)]
            for batch in batches:
                batch["targets"], batch["labels"] = batch["labels"], None

            def loss(logits: Any, batch: dict[str, Any]) -> Any:
                logprobs = ours.vocab_parallel_logprobs(logits, batch["targets"])
                return -logprobs.mean(), type(logits).__name__

            kinds, _ = train_step(config, chunks, batches, loss)
        finally:
            off()
        return kinds


def test_the_first_call_is_in_a_pipeline(ranks: Any) -> None:
    first, last = ranks(2).run(in_a_pipeline, timeout=100)
    assert not first
    assert last == ["LazyLogits"] * 3


def test_the_setting(monkeypatch: Any) -> None:
    with pytest.raises(ValueError, match="fused: expected 'auto', 'require' or False, got 'of"):
        switch.switch_on("slime", fused="off")
    found: list[str] = []
    monkeypatch.setattr(switch, "lazy_models", lambda fused: found.append(fused) or found.clear)
    settings = [("Require", "require", None), ("Require", "auto", "auto"), ("Require", None, False)]
    settings += [("auto", "auto", None), ("False", None, None)]
    for variable, expected, given in settings:
        monkeypatch.setenv("MCORE_LOGPROBS_FUSED", variable)
        found.clear()
        switch.switch_on("slime", given)
        assert found == ([] if expected is None else [expected])
        switch.switch_off("slime")
    assert "MCORE_LOGPROBS_FUSED" in os.environ
    monkeypatch.setenv("MCORE_LOGPROBS_FUSED", "requir")
    with pytest.raises(ValueError, match=r"MCORE_LOGPROBS_FUSED: expected .*, got 'requir'"):
        switch.switch_on("slime")


def a_drop_in_beside_lazy_models() -> None:
    """An unfused head: what Megatron's RL gets is not what the automatic patch would give."""
    with megatron() as parallel_state:
        inputs = make_batch(parallel_state)["inputs"]
        model = built()
        call = model, inputs["input_ids"], inputs["position_ids"]
        want = megatron_rl.get_logprobs(*call, no_grad=True)
        off = lazy_models.lazy_models("auto")
        try:
            beside = built()
            beside.load_state_dict(model.state_dict())
            beside.output_layer.register_forward_hook(lambda *_: None)
            assert relative(megatron_rl.get_logprobs(beside, *call[1:], no_grad=True), want) < 1e-6
        finally:
            off()


def test_a_drop_in_that_patches_keeps_its_patch(ranks: Any) -> None:
    ranks(1).run(a_drop_in_beside_lazy_models)


def a_head_that_cannot_be_fused() -> list[str]:
    from tests.megatron.test_lora import said

    with megatron() as parallel_state:
        inputs = make_batch(parallel_state)["inputs"]
        for fused in ("auto", "require"):
            off = lazy_models.lazy_models(fused)
            try:
                model = built()
                model.output_layer.register_forward_hook(lambda *_: None)
                if fused == "require":
                    with pytest.raises(ValueError, match="fused='require', but a forward hook"):
                        model(**inputs)
                    continue
                with said() as lines:
                    assert type(model(**inputs)) is Tensor
            finally:
                off()
        return lines


def test_a_head_that_cannot_be_fused(ranks: Any) -> None:
    """ "auto" says so once, "require" raises."""
    (line,) = ranks(1).run(a_head_that_cannot_be_fused)[0]
    assert "a forward hook" in line


def test_a_head_s_settings_are_its_config_s() -> None:
    own = {
        "fused": "require",
        "chunk_size": 3,
        "backend": "torch",
        "logits_dtype": torch.bfloat16,
        "saved_bytes": 5,
    }
    config = SimpleNamespace(**{f"logprob_{name}": x for name, x in own.items()})
    assert lazy_models.head_settings(config) == own


@pytest.mark.parametrize("fused", [0, None, True, "always"])
def test_what_no_setting_is(fused: Any) -> None:
    with pytest.raises(ValueError, match="fused: expected 'auto', 'require' or False"):
        lazy_models.check_fused(fused)


def build(kind: str) -> Any:
    from tests.megatron.common import MAMBA

    if kind == "gpt":
        return built()
    return mm.build_hybrid_model(tiny_config(**MAMBA), vocab_size=VOCAB, pattern="M*")


def first_calls(kind: str) -> None:
    """The calls at which a model's patch is put on, changed and taken off are as those after."""
    with megatron() as parallel_state:
        batch = make_batch(parallel_state)
        inputs, labels = batch["inputs"], batch["labels"]
        plain = build(kind)
        expected, real = plain(**inputs, labels=labels), plain(**inputs)
        require = lazy_models.lazy_models("require")
        for by_labels in (False, True):
            model = build(kind)
            model.load_state_dict(plain.state_dict())
            if by_labels:
                torch.testing.assert_close(model(**inputs, labels=labels), expected)
            assert type(model(**inputs)) is LazyLogits
        require()
        torch.testing.assert_close(model(**inputs), real)
        assert patch_of(model) is None
        auto = lazy_models.lazy_models("auto")
        assert type(model(**inputs)) is LazyLogits
        require = lazy_models.lazy_models("require")
        with pytest.raises(ValueError, match="fused='require'"):
            model(**inputs).softmax(-1)
        require()
        torch.testing.assert_close(model(**inputs).softmax(-1), real.softmax(-1))
        auto()
        assert type(model(**inputs)) is Tensor


@pytest.mark.parametrize("kind", ["gpt", "hybrid"])
def test_the_first_call_after_each_change(ranks: Any, kind: str) -> None:
    ranks(1).run(first_calls, kind)
