"""Models in wrappers that hand attributes on, and losses that go around the patch."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.megatron import find_language_models, heads, patch_model
from mcore_logprobs.megatron.imports import PassedArguments, replace_function
from mcore_logprobs.sources.lazy import LazyLogits
from tests.megatron.common import VOCAB, make_batch, megatron, relative, tiny_config
from tests.megatron.test_other_uses import gpt, hybrid


class Delegating(nn.Module):
    """As PEFT's PeftModel and LoraModel: what it lacks is the inner model's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_model":
                raise
            return getattr(self.base_model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


class WithLossMethod(nn.Module):
    """As a vision-language model with Megatron's interface."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.language_model = self.module = model

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        return self.language_model.compute_language_model_loss(labels, logits)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.language_model(*args, **kwargs)


class Encoders(nn.Module):
    """As a vision-language model that keeps its language model under another name."""

    def __init__(self, model: nn.Module | None) -> None:
        super().__init__()
        self.language_model, self.llm = None, model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.llm(*args, **kwargs)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "delegating": Delegating,
    "delegating twice": lambda model: Delegating(Delegating(model)),
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "a loss method": WithLossMethod,
    "another name": Encoders,
}


def test_a_module_without_any_megatron_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a Megatron GPTModel .*, got Encoders"):
        find_language_models(Encoders(None))


@pytest.mark.parametrize(
    ("name", "build"),
    [
        pytest.param(
            name,
            build,
            # torch traces all of the model; the next test patches one compiled wrapper by day.
            marks=[pytest.mark.night] if name == "torch.compile" else [],
        )
        for name in WRAPPERS
        for build in (gpt, hybrid)
    ],
)
def test_the_model_within_is_patched(name: str, build: Callable[[], Any]) -> None:
    with megatron() as parallel_state:
        model, batch = build(), make_batch(parallel_state)
        wrapper = WRAPPERS[name](model)
        assert find_language_models(wrapper) == [model]
        before = [dict(vars(x)) for x in (wrapper, model, model.output_layer)]
        config = LogprobConfig(temperature=0.5, logits="lazy", fused="require")
        with patch_model(model, config):
            expected = model(**batch["inputs"], labels=batch["labels"])
        with patch_model(wrapper, config) as handle:
            stats = wrapper(**batch["inputs"], labels=batch["labels"])
            lazy = wrapper(**batch["inputs"])
            assert handle.active
            assert len(handle.reports) == 1
        torch.testing.assert_close(stats.logprobs, expected.logprobs)
        assert type(lazy) is LazyLogits
        after = [dict(vars(x)) for x in (wrapper, model, model.output_layer)]
        assert [list(x) for x in after] == [list(x) for x in before]


@pytest.mark.parametrize(
    ("block", "decoder"),
    [
        pytest.param("check_labels", "traced", marks=pytest.mark.night),
        pytest.param("targets", "traced", marks=pytest.mark.night),
        ("targets", "not traced"),  # which takes half as long
    ],
)
def test_a_compiled_model_whose_graph_breaks_before_the_head(block: str, decoder: str) -> None:
    with megatron() as parallel_state:
        model, batch = gpt(), make_batch(parallel_state)
        if decoder == "not traced":
            model.decoder.forward = torch.compiler.disable(model.decoder.forward)
        inputs, labels = batch["inputs"], batch["labels"]
        compiled = torch.compile(model, backend="eager")
        assert find_language_models(compiled) == [model]
        with patch_model(compiled, LogprobConfig()) as handle:
            expected = model(**inputs, labels=labels).logprobs
            if block == "check_labels":  # which reads numbers back
                with handle.options(check_labels=True):
                    found = compiled(**inputs, labels=labels).logprobs
            else:
                with handle.targets(labels):
                    found = compiled(**inputs).logprobs
        torch.testing.assert_close(found, expected)


@pytest.mark.night
def test_a_compiled_model_with_mtp_that_a_call_leaves_out() -> None:
    """After one that ran the MTP layers: its graph is not that of a call without them."""
    with megatron() as parallel_state:
        config = tiny_config(num_layers=1, mtp_num_layers=1)
        model = mm.build_gpt_model(config, vocab_size=VOCAB, mtp=True)
        batch = make_batch(parallel_state)
        inputs, labels = batch["inputs"], batch["labels"]
        compiled = torch.compile(model, backend="eager")
        with patch_model(compiled, LogprobConfig()) as handle:
            compiled(**inputs, labels=labels)
            with handle.sample(3):
                found, expected = compiled(**inputs), model(**inputs)
            with handle.options(mtp="off"):
                statistics = [x(**inputs, labels=labels).logprobs for x in (compiled, model)]
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(*statistics)


# ---- functions that somebody else has put on the model ------------------------------------------


def reads_keywords(inner: Any, seen: list[Any]) -> Any:
    """As a decorator does: a loss of 0 for one label, by the argument's name."""

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        output, labels = inner(*args, **kwargs), kwargs.get("labels")
        seen.append(None if labels is None else labels.shape)
        return output if labels is None else output * (labels != 7)

    return wrapper


def names_labels(inner: Any, seen: list[Any]) -> Any:
    def wrapper(*args: Any, labels: Any = None, **kwargs: Any) -> Any:
        return reads_keywords(inner, seen)(*args, labels=labels, **kwargs)

    return wrapper


def of_another_order(inner: Any, seen: list[Any]) -> Any:
    """As verl 0.9.1 has it, one parameter more before those that follow."""

    def wrapper(*, labels: Any = None, padding_mask: Any = None, **kwargs: Any) -> Any:
        return reads_keywords(inner, seen)(labels=labels, **kwargs)

    return wrapper


def takes_another(inner: Any, seen: list[Any]) -> Any:
    """A keyword that the signature, which is the inner function's, does not tell of."""

    @functools.wraps(inner)
    def wrapper(*args: Any, tag: str = "", **kwargs: Any) -> Any:
        seen.append(tag)
        return reads_keywords(inner, seen)(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["gpt", "hybrid"])
@pytest.mark.parametrize("wrap", [reads_keywords, names_labels, of_another_order, takes_another])
def test_who_stands_before_the_head_gets_arguments_as_the_caller_passes_them(
    wrap: Any, kind: str, fused: bool
) -> None:
    with megatron() as parallel_state:
        model, batch = gpt() if kind == "gpt" else hybrid(), make_batch(parallel_state)
        name, seen = ("_postprocess" if kind == "gpt" else "forward"), []
        setattr(model, name, wrap(getattr(model, name), seen))
        call = {**batch["inputs"], "labels": batch["labels"].clone()}
        call["labels"][:, ::3] = 7
        if wrap is takes_another and kind == "hybrid":
            call["tag"] = "a"

        def run(call: dict[str, Any]) -> list[Tensor]:
            model.zero_grad(set_to_none=True)
            output = model(**call)
            (output * torch.arange(1.0, output.numel() + 1).view_as(output)).sum().backward()
            return [output.detach(), *(p.grad.clone() for p in model.parameters())]

        del_labels = {k: v for k, v in call.items() if k != "labels"}
        expected = run(call), run(del_labels)
        known = list(seen)
        seen.clear()
        with patch_model(model, LogprobConfig(output="loss", fused=fused)):
            found = run(call), run(del_labels)
        assert seen == known
        assert int((expected[0][0] == 0).sum()) == int((call["labels"] == 7).sum())
        for got, want in zip(found, expected, strict=True):  # of a gradient's largest entry
            assert max(map(relative, got, want)) < 1e-5


@pytest.mark.parametrize("wrap", [reads_keywords, names_labels])
def test_arguments_without_a_name_are_found_too(wrap: Any) -> None:
    with megatron() as parallel_state:
        model, batch, seen = hybrid(), make_batch(parallel_state), []
        expected = model(**batch["inputs"], labels=batch["labels"])
        model.forward = wrap(model.forward, seen)
        by_position = [batch["inputs"][x] for x in ("input_ids", "position_ids", "attention_mask")]
        config = LogprobConfig(output="loss", check_labels=True)
        with patch_model(model, config) as handle:
            with pytest.raises(ValueError, match="labels: expected the token after each input"):
                model(*by_position, labels=batch["inputs"]["input_ids"])
            with handle.targets(batch["labels"]):
                got = model(*by_position)
        torch.testing.assert_close(got, expected * (batch["labels"] != 7))


def test_a_replaced_function_gets_arguments_as_they_were_passed() -> None:
    seen: list[Any] = []

    def build(provider: Any, kind: str = "x", *, hook: Any = None) -> None: ...

    @functools.wraps(build)
    def of_somebody(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return args, kwargs

    module = types.SimpleNamespace(build=of_somebody)

    def before(arguments: PassedArguments) -> None:
        assert arguments.get("kind", "none") in ("none", "y")
        arguments["provider"] = 2 * arguments.get("provider")
        arguments["hook"] = "ours"

    results: list[Any] = []
    undo = replace_function(module, "build", before=before, after=results.append)
    assert module.build("a", "y") == (("aa", "y"), {"hook": "ours"})
    assert module.build(provider="b") == ((), {"provider": "bb", "hook": "ours"})
    assert results == seen
    undo()
    assert module.build is of_somebody


def goes_around(
    self: Any, input_ids: Any, position_ids: Any, attention_mask: Any, labels: Any = None
) -> Any:
    """A fork's forward, from before there was a `_postprocess`."""
    hidden, rotary, cos, sin = self._preprocess(input_ids=input_ids, position_ids=position_ids)[:4]
    hidden = self.decoder(
        hidden_states=hidden,
        attention_mask=attention_mask,
        rotary_pos_emb=rotary,
        rotary_pos_cos=cos,
        rotary_pos_sin=sin,
    )
    tied = self.share_embeddings_and_output_weights
    weight = self.shared_embedding_or_output_weight() if tied else None
    logits, _ = self.output_layer(hidden, weight=weight)
    if labels is None:
        return logits.transpose(0, 1).contiguous()
    return self.compute_language_model_loss(labels, logits)


@pytest.mark.parametrize("of_class", [True, False])
def test_a_forward_that_ends_in_the_head_itself(of_class: bool) -> None:
    with megatron() as parallel_state:
        model, batch = gpt(), make_batch(parallel_state)
        inputs, labels = batch["inputs"], batch["labels"]
        if of_class:
            model.__class__ = type("Fork", (type(model),), {"forward": goes_around})
        else:
            model.forward = types.MethodType(goes_around, model)
        expected = model(**inputs, labels=labels)
        config = LogprobConfig(logits="lazy", fused="require", entropy=True)
        with patch_model(model, config) as handle:
            assert type(model(**inputs)) is LazyLogits
            stats = model(**inputs, labels=labels)
            with handle.targets(labels):
                named = model(**inputs)
            with handle.sample(3):
                drawn = model(**inputs)
            with handle.policy_loss(lambda logprobs, entropy: -logprobs):
                with pytest.raises(ValueError, match="policy_loss: expected a call with labels"):
                    model(**inputs)
                formed = model(**inputs, labels=labels)
        torch.testing.assert_close(-stats.logprobs, expected)
        torch.testing.assert_close(named.logprobs, stats.logprobs)
        torch.testing.assert_close(formed.policy_loss, expected.sum())
        assert drawn[0].shape == labels.shape


class Unknown(nn.Module):
    """A model of another kind, whose class has no method to follow labels through."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config, self.output_layer = model.config, model.output_layer
        self.compute_language_model_loss = model.compute_language_model_loss
        self._postprocess = model._postprocess


def test_a_model_that_cannot_be_patched_is_left_as_it_is() -> None:
    with megatron():
        model = Unknown(gpt())
        before = dict(vars(model)), dict(vars(model.output_layer))
        for _ in range(2):  # nor does a second try take it for a patched one
            with pytest.raises(AttributeError, match="_postprocess"):
                patch_model(model, LogprobConfig())
            assert (dict(vars(model)), dict(vars(model.output_layer))) == before


def megatrons_loss(model: Any) -> Callable[..., Tensor]:
    from megatron.core.models.common.language_module.language_module import LanguageModule

    return types.MethodType(LanguageModule.compute_language_model_loss, model)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"temperature": 0.5}, {}),
        ({"vocab_size": 50}, {}),
        ({}, {"label_smoothing": 0.3}),
        ({}, {"temperature": torch.full((1, 1), 0.5)}),
        ({}, {"logit_bias": {3: 1.0}}),
    ],
    ids=str,
)
def test_settings_that_a_later_loss_does_not_see_raise(
    settings: dict[str, Any], options: dict[str, Any]
) -> None:
    with megatron() as parallel_state, torch.no_grad():
        model, batch = gpt(), make_batch(parallel_state)
        labels = batch["labels"] % 50
        plain = model(**batch["inputs"], labels=labels)
        handle = patch_model(model, LogprobConfig(output="loss", saved_bytes=1000, **settings))
        ours = vars(model)["compute_language_model_loss"]
        model.compute_language_model_loss = megatrons_loss(model)
        with pytest.raises(RuntimeError, match="does not see"), handle.options(**options):
            model(**batch["inputs"], labels=labels)
        if not settings:  # a log line for what is the same loss
            assert torch.equal(model(**batch["inputs"], labels=labels), plain)
        model.compute_language_model_loss = ours
        handle.remove()


def test_settings_that_the_model_s_own_loss_does_not_see_raise() -> None:
    with megatron() as parallel_state:
        model, batch = gpt(), make_batch(parallel_state)

        class Doubled(type(model)):  # type: ignore[misc]
            def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
                return 2 * super().compute_language_model_loss(labels, logits)

        call = {**batch["inputs"], "labels": batch["labels"]}
        plain = model(**call)
        model.__class__ = Doubled
        with pytest.raises(ValueError, match=r"does not see, got temperature=0\.5"):
            patch_model(model, LogprobConfig(output="loss", temperature=0.5))
        with patch_model(model, LogprobConfig(output="loss", saved_bytes=1000)) as handle:
            torch.testing.assert_close(model(**call), 2 * plain)
            temperature = torch.full((1, 1), 0.5)
            with (
                pytest.raises(ValueError, match="temperature='a tensor"),
                handle.options(temperature=temperature),
            ):
                model(**call)
            with handle.options(temperature=temperature), handle.also(topk=2):
                stats = model(**call)  # not that loss's affair
        model.__class__ = Doubled.__base__
        with patch_model(model, LogprobConfig(temperature=0.5)):
            torch.testing.assert_close(stats.logprobs, model(**call).logprobs)


@pytest.mark.parametrize("impl", [None, "native", "te"])
def test_a_cross_entropy_in_the_place_of_megatron_s_is_told(
    impl: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron.core.models.common.language_module import language_module

    names = {"native": "fused_vocab_parallel_cross_entropy", "te": "te_parallel_cross_entropy"}
    name = names.get(impl, "vocab_parallel_cross_entropy")
    owner = language_module if impl else language_module.tensor_parallel
    monkeypatch.setattr(heads, "_said", set())
    with megatron() as parallel_state:
        model, batch = gpt(), make_batch(parallel_state)
        model.config.cross_entropy_loss_fusion = impl is not None
        model.config.cross_entropy_fusion_impl = impl or "native"
        call = {**batch["inputs"], "labels": batch["labels"]}

        def lines(**settings: Any) -> list[str]:
            caplog.clear()
            with patch_model(model, LogprobConfig(**settings)):
                model(**call)
            return [x.getMessage() for x in caplog.records if "not called" in x.getMessage()]

        assert lines(output="loss") == []
        monkeypatch.setattr(owner, name, functools.partial(own_cross_entropy, calls := []))
        assert lines() == []  # log-probabilities are nobody's loss
        (line,) = lines(output="loss")
        assert line.startswith(f"output='loss' computes Megatron's loss: {name},")
        assert lines(output="loss", fused=False) == calls == []
        heads._said.clear()
        own = model.compute_language_model_loss
        model.compute_language_model_loss = lambda labels, logits: own(labels, logits)
        assert lines(output="loss") == []
        assert calls, "the model's own loss calls it"


def own_cross_entropy(
    calls: list[Any], logits: Tensor, labels: Tensor, *_: Any, tp_group: Any = None
) -> Tensor:
    calls.append(labels.shape)
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return flat.expand(labels.shape)


def test_lazy_logits_given_to_the_model_s_loss_are_no_real_ones() -> None:
    with megatron() as parallel_state:
        model, batch = gpt(), make_batch(parallel_state)
        expected = model(**batch["inputs"], labels=batch["labels"])
        for output in ("loss", "stats"):
            config = LogprobConfig(logits="lazy", fused="require", output=output)
            with patch_model(model, config):
                logits = model(**batch["inputs"]).transpose(0, 1)
                got = model.compute_language_model_loss(batch["labels"], logits)
            torch.testing.assert_close(got if output == "loss" else -got.logprobs, expected)
