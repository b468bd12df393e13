"""Where a patched model meets what users add: hooks, adapters, losses of their own, FSDP, flags."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_logprobs import LogprobConfig, TokenStats, patch_model, unpatch_model
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.megatron import heads as heads_module
from mcore_logprobs.sources.lazy import LazyLogits
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
from tests.megatron.test_heads import LoRAHead

MODES = [True, False]


class log_lines:
    """The lines that the package logs meanwhile."""

    def __enter__(self) -> list[str]:
        heads_module._said.clear()
        self.lines: list[str] = []
        self.handler = logging.Handler()
        self.handler.emit = lambda r: self.lines.append(r.getMessage())  # type: ignore[method-assign]
        logging.getLogger("mcore_logprobs").addHandler(self.handler)
        return self.lines

    def __exit__(self, *exc: Any) -> None:
        logging.getLogger("mcore_logprobs").removeHandler(self.handler)


WRITTEN = {"attn_norm_manager", "_input_layernorm_checkpoint_active"}  # by main, in a forward


def traces(model: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in vars(m).items() if k not in WRITTEN} for m in model.modules()]


def same_traces(after: list[dict[str, Any]], before: list[dict[str, Any]]) -> bool:
    return [list(d) for d in after] == [list(d) for d in before] and all(
        a[k] is b[k] for a, b in zip(after, before, strict=True) for k in b
    )


def checkpoint_keys(model: Any) -> tuple[list[str], list[str]]:
    return list(model.state_dict()), list(model.sharded_state_dict())


# ---- forward hooks -----------------------------------------------------------------------------


class Cap(torch.autograd.Function):
    """A softcap as an autograd.Function of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)  # not the result, which Megatron's own loss overwrites
        return 2.0 * torch.tanh(x / 2.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (1 - torch.tanh(x / 2.0) ** 2)


def gather_and_scatter(module: Any, args: Any, out: Any) -> Any:
    """Megatron's own regions are autograd.Functions too."""
    from megatron.core.tensor_parallel import mappings

    whole = mappings.gather_from_tensor_model_parallel_region(out[0])
    return mappings.scatter_to_tensor_model_parallel_region(whole * 0.5), out[1]


def in_place(module: Any, args: Any, out: Any) -> None:
    out[0].div_(3.0)


def multiply(module: Any, args: Any, out: Any) -> None:
    out[0].mul_(torch.linspace(0.5, 1.5, out[0].shape[-1]))


HOOKS = {
    "function": lambda module, args, out: (Cap.apply(out[0]), out[1]),
    "regions": gather_and_scatter,
    "div_": in_place,
    "mul_": multiply,
    "replaced": lambda module, args, out: (out[0] * 0.25 + 1.0, out[1]),
    "looks": lambda module, args, out: None,
}


def hooked(tp: int, name: str, everywhere: bool, fused: bool) -> dict[str, float]:
    with megatron(tp=tp) as parallel_state, log_lines() as lines:
        model = mm.build_gpt_model(tiny_config(tp, sequence_parallel=tp > 1), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        before, keys = traces(model), checkpoint_keys(model)
        with patch_model(model, LogprobConfig(fused=fused)):  # the hook comes later
            assert checkpoint_keys(model) == keys
            if everywhere:
                hook = nn.modules.module.register_module_forward_hook(
                    lambda m, args, out: (
                        HOOKS[name](m, args, out) if m is model.output_layer else None
                    )
                )
            else:
                hook = model.output_layer.register_forward_hook(HOOKS[name])
            got, grads = step(model, batch)
            logits = model(**batch["inputs"])
            assert len(lines) == (
                1 if fused and parallel_state.get_tensor_model_parallel_rank() == 0 else 0
            ), lines
            if fused:
                with patch_model(model).options(fused="require"):
                    with pytest.raises(ValueError, match="forward hook"):
                        step(model, batch)
                    assert torch.equal(model(**batch["inputs"]), logits)  # no labels: not patched
        expected, expected_grads = step(model, batch)
        assert torch.equal(logits, model(**batch["inputs"]))
        hook.remove()
        assert same_traces(traces(model), before)
        return {"loss": relative(loss_of(got), expected), "grad": worst(grads, expected_grads)}


@pytest.mark.parametrize("fused", MODES)
@pytest.mark.parametrize("name", HOOKS)
def test_forward_hooks(ranks, name, fused):
    for errors in ranks(2).run(hooked, 2, name, False, fused):
        assert max(errors.values()) < 1e-5


def test_forward_hooks_on_every_module(ranks):
    assert max(ranks(1).run(hooked, 1, "function", True, True)[0].values()) < 1e-5


# ---- code between the output layer and the loss ------------------------------------------------


class Unnamed(torch.autograd.Function):
    """One that does not call its context ctx."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class OwnApply(Unnamed):
    """Which does not go through torch's own `apply`."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return super(torch.autograd.Function, cls).apply(*args)


class Bound(OwnApply):
    """Whose forward has no code of its own either."""

    forward = staticmethod(functools.partial(lambda factor, context, x: x * factor, 1.0))


def between(case: str) -> dict[str, float]:
    """A model class that works on its logits before its loss."""
    with megatron() as parallel_state, log_lines() as lines:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB, tied=False)
        base = type(model)
        layer = model.output_layer

        class Meddles(base):  # type: ignore[misc, valid-type]
            def compute(self, labels: Tensor, logits: Any) -> Any:
                if case == "in place":
                    logits.mul_(0.5)
                elif case == "tensor hook":
                    logits.register_hook(lambda grad: grad * 0.5)
                elif case == "logger":
                    assert logits.detach().mean().isfinite()
                elif case == "function":
                    logits = Cap.apply(logits)
                elif case == "unnamed function":
                    logits = Unnamed.apply(logits)
                elif case == "function with an apply of its own":
                    logits = OwnApply.apply(logits)
                elif case == "function that no frame tells of":
                    logits = Bound.apply(logits)
                elif case == "hidden in place":
                    with torch.no_grad():
                        logits.mul_(0.5)
                elif case == "other":
                    logits = logits.square() + 1.0
                return self.compute_language_model_loss(labels, logits)

            def _postprocess(self, *args: Any, **kwargs: Any) -> Any:
                labels = kwargs["labels"]
                logits, _ = self.output_layer(
                    kwargs["hidden_states"], runtime_gather_output=kwargs["runtime_gather_output"]
                )
                if labels is None:
                    return Cap.apply(logits).transpose(0, 1).contiguous()
                return self.compute(labels, logits)

        model.__class__ = Meddles
        batch = make_batch(parallel_state)
        expected, expected_grads = step(model, batch)
        plain = model(**batch["inputs"])
        with patch_model(model):
            logits = model(**batch["inputs"])
            assert torch.equal(logits, plain)
            assert logits.requires_grad  # labels=None is not deferred: no Function loses gradients
            got, grads = step(model, batch)
            assert layer.weight.grad is not None
        return {
            "lines": len(lines),
            "loss": relative(loss_of(got), expected),
            "grad": worst(grads, expected_grads),
        }


@pytest.mark.parametrize("case", ["nothing", "in place", "tensor hook", "logger", "other"])
def test_code_between_output_layer_and_loss(ranks, case):
    result = ranks(1).run(between, case)[0]
    assert result.pop("lines") == (0 if case == "nothing" else 1)
    assert max(result.values()) < 1e-5


@pytest.mark.parametrize(
    ("case", "match"),
    [
        ("function", "was given the deferred logits"),
        ("unnamed function", "was given the deferred logits"),
        ("function with an apply of its own", "was given the deferred logits"),
        ("function that no frame tells of", "lost their gradient"),
        ("hidden in place", "in place"),
    ],
)
def test_a_gradient_is_never_lost_in_silence(ranks, case, match):
    error = ranks(1).run_expecting_errors(between, case)[0]
    assert isinstance(error, RuntimeError)
    assert match in str(error)


# ---- fused="require" in every call -------------------------------------------------------------


def later_reasons(tp: int) -> None:
    with megatron(tp=tp) as parallel_state:
        model = mm.build_gpt_model(tiny_config(tp), vocab_size=VOCAB, tied=False)
        batch = make_batch(parallel_state)
        expected, expected_grads = step(model, batch)
        layer = model.output_layer

        def check(reason: str, undo: Any, same: bool = True, **call: Any) -> None:
            with pytest.raises(ValueError, match=reason):
                step(model, batch, **call)
            with handle.options(fused=True), log_lines() as lines:
                for _ in range(2):
                    got, grads = step(model, batch, **call)
                rank = parallel_state.get_tensor_model_parallel_rank()
                assert len(lines) == (1 if rank == 0 else 0)
                assert all(reason.split("|")[0] in line for line in lines)
            if same:
                assert relative(loss_of(got), expected) < 1e-5
                assert worst(grads, expected_grads) < 1e-5
            undo()
            unpatch_model(model)

        handle = patch_model(model, LogprobConfig(fused="require"))
        check("runtime_gather_output", lambda: None, runtime_gather_output=True)

        handle = patch_model(model, LogprobConfig(fused="require"))
        hook = layer.register_full_backward_hook(lambda *args: None)
        check("backward hooks", hook.remove)

        handle = patch_model(model, LogprobConfig(fused="require"))
        model.output_layer = LoRAHead(layer)

        def take_out() -> None:
            model.output_layer = layer

        check("adapter", take_out, same=False)

        handle = patch_model(model, LogprobConfig(fused="require"))
        patched, layer.forward = layer.forward, lambda *a, **k: patched(*a, **k)

        def put_back() -> None:
            layer.forward = patched

        check("something else has replaced", put_back)
        step(model, batch)


@pytest.mark.parametrize("tp", [1, 2])
def test_require_holds_for_every_call(ranks, tp):
    ranks(tp).run(later_reasons, tp)


# ---- a loss of the model's own -----------------------------------------------------------------


def own_loss(mtp: bool) -> None:
    with megatron() as parallel_state:
        extra = {"mtp_num_layers": 1} if mtp else {}
        model = mm.build_gpt_model(tiny_config(**extra), vocab_size=VOCAB, mtp=mtp)
        base = type(model)

        class ZLoss(base):  # type: ignore[misc, valid-type]
            def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
                loss = super().compute_language_model_loss(labels, logits)
                return loss + 0.1 * logits.logsumexp(-1).square().t()

        model.__class__ = ZLoss
        batch = make_batch(parallel_state)
        before = traces(model)
        expected, expected_grads = step(model, batch)
        for config in (
            LogprobConfig(),
            LogprobConfig(output="loss", temperature=0.5),
            LogprobConfig(output="loss", vocab_size=VOCAB - 1),
            LogprobConfig(output="loss", fused="require"),
        ):
            with pytest.raises(ValueError, match="ZLoss has a compute_language_model_loss"):
                patch_model(model, config)
        assert same_traces(traces(model), before)
        # A call without labels has no loss: its logits are lazy even so.
        lazy = LogprobConfig(output="loss", logits="lazy", fused="require")
        with patch_model(model, lazy):
            if not mtp:  # whose own losses Megatron computes of labels that it takes to be there
                assert isinstance(model(**batch["inputs"]), LazyLogits)
            with pytest.raises(ValueError, match="ZLoss has a compute_language_model_loss"):
                model(**batch["inputs"], labels=batch["labels"])
        assert same_traces(traces(model), before)
        with patch_model(model, LogprobConfig(output="loss")) as handle:
            got, grads = step(model, batch)
            with pytest.raises(ValueError, match="ZLoss"), handle.options(output="stats"):
                pass
            ids = batch["labels"].flatten() % VOCAB
            kept = ids, torch.arange(len(ids) + 1)
            for block in (handle.targets(ids[:2], rows=torch.arange(2)), handle.replay(kept)):
                with pytest.raises(ValueError, match="knows neither rows nor a replay"), block:
                    pass
            with handle.policy_loss(lambda logprobs, entropy: -logprobs), handle.also(topk=2):
                stats = model(**batch["inputs"], labels=batch["labels"])
            assert isinstance(stats, TokenStats)
            with handle.also(topk=2), log_lines() as lines:
                for _ in range(2):
                    model(**batch["inputs"], labels=batch["labels"])
            assert len([x for x in lines if "also skips a loss: ZLoss" in x]) == 1
        assert same_traces(traces(model), before)
        assert torch.equal(got, expected)
        assert worst(grads, expected_grads) == 0.0

        # On the instance: called for output="loss", left out with a log line for "stats".
        model.__class__ = base
        calls = []
        own = model.compute_language_model_loss
        model.compute_language_model_loss = lambda *args: calls.append(1) or own(*args)
        expected, expected_grads = step(model, batch)
        calls.clear()
        with log_lines() as lines, patch_model(model):
            got, grads = step(model, batch)
            assert len(lines) == 1, lines
            assert len(calls) == mtp
        assert relative(got.loss, expected) < 1e-5
        calls.clear()
        with patch_model(model, LogprobConfig(output="loss")):
            got, grads = step(model, batch)
        assert len(calls) == 1 + mtp
        assert worst(grads, expected_grads) < 1e-5


@pytest.mark.parametrize("mtp", [False, True])
def test_a_loss_of_the_models_own(ranks, mtp):
    ranks(1).run(own_loss, mtp)


def loss_on_megatrons_class(owner: str) -> None:
    """A wrapper, with the name of what it wraps, on the class that has the loss or a lower one."""
    with megatron() as parallel_state, pytest.MonkeyPatch.context() as patch:
        from megatron.core.models.common.language_module.language_module import LanguageModule

        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        original = LanguageModule.compute_language_model_loss

        @functools.wraps(original)
        def with_z_loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
            return original(self, labels, logits) + 0.1 * logits.logsumexp(-1).square().t()

        kind = {"GPTModel": type(model), "LanguageModule": LanguageModule}[owner]
        patch.setattr(kind, original.__name__, with_z_loss)
        expected, expected_grads = step(model, batch)
        with pytest.raises(ValueError, match="GPTModel has a compute_language_model_loss"):
            patch_model(model, LogprobConfig())
        with patch_model(model, LogprobConfig(output="loss")):
            got, grads = step(model, batch)
        assert torch.equal(got, expected)
        assert worst(grads, expected_grads) == 0.0


@pytest.mark.parametrize("owner", ["GPTModel", "LanguageModule"])
def test_a_loss_that_is_put_on_megatrons_class(ranks, owner):
    ranks(1).run(loss_on_megatrons_class, owner)


# ---- a loss that goes around the patch ---------------------------------------------------------


def around_the_patch() -> None:
    """As Megatron's LogitsSaverHooks do: a loss put on the model after it was patched."""
    with megatron() as parallel_state:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        handle = patch_model(model, LogprobConfig(output="loss"))
        ours = model.compute_language_model_loss
        expected, grads = step(model, batch)
        model.compute_language_model_loss = lambda labels, logits: 2.0 * ours(labels, logits)
        doubled, _ = step(model, batch)
        assert torch.equal(doubled, 2.0 * expected)  # ours is called inside: nothing to say
        model.compute_language_model_loss = lambda labels, logits: (logits * 0).sum(-1).t()
        with log_lines() as lines:
            for _ in range(2):
                nothing, _ = step(model, batch)
            assert not nothing.any()
            assert len(lines) == 1
            assert "without calling the patched compute_language_model_loss" in lines[0]
        blocks = [handle.options(output="stats"), handle.policy_loss(lambda logp, ent: -logp)]
        for block in blocks:
            with block, pytest.raises(RuntimeError, match="without calling the patched"):
                step(model, batch)
        with (
            handle.options(fused="require"),
            pytest.raises(ValueError, match="without calling the patched"),
        ):
            step(model, batch)
        model.compute_language_model_loss = ours
        _, again = step(model, batch)
        assert worst(again, grads) == 0.0
        handle.remove()


def test_a_loss_that_goes_around_the_patch(ranks):
    ranks(1).run(around_the_patch)


# ---- gradient_accumulation_fusion without gradients --------------------------------------------


def reference_model() -> None:
    with megatron() as parallel_state:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB, tied=False)
        batch = make_batch(parallel_state)
        expected = model(**batch["inputs"], labels=batch["labels"])
        model.output_layer.gradient_accumulation_fusion = True  # not in DDP: no main_grad
        with patch_model(model, LogprobConfig(fused="require")) as handle:
            with torch.no_grad():
                got = model(**batch["inputs"], labels=batch["labels"])
                assert relative(got.loss, expected) < 1e-5
                with handle.policy_loss(lambda logprobs, entropy: -logprobs):
                    model(**batch["inputs"], labels=batch["labels"])
            _, grads = step(model, batch)  # and with gradients they are where autograd puts them
            assert "output_layer.weight" in grads


def test_gradient_accumulation_fusion_without_buffers(ranks):
    ranks(1).run(reference_model)


# ---- every pipeline stage ----------------------------------------------------------------------


def fail(chunks: Any, case: str, settings: LogprobConfig | None) -> None:
    weights = torch.ones(2, 3, requires_grad=True)
    blocks = {
        "options": lambda handle: handle.options(temprature=0.5),
        "policy": lambda handle: handle.policy_loss(lambda lp, ent, w: -lp * w, weights),
        "targets": lambda handle: handle.targets(torch.ones(2, 3)),
    }
    handle = patch_model(chunks, settings)
    with blocks[case](handle):
        pass


def errors_on_every_stage(case: str) -> str:
    with megatron(pp=2) as parallel_state:
        config = tiny_config(num_layers=2)
        if case == "misspelt":
            config.logprob_temprature = 0.5
        chunks = mm.build_gpt_chunks(config, vocab_size=VOCAB, tied=False)
        before = [traces(chunk) for chunk in chunks]
        settings = LogprobConfig(fused="require")
        if case == "lora" and parallel_state.is_pipeline_last_stage():
            chunks[0].output_layer = LoRAHead(chunks[0].output_layer)
            before = [traces(chunk) for chunk in chunks]
        if case == "hook" and parallel_state.is_pipeline_last_stage():
            chunks[0].output_layer.register_forward_hook(lambda *args: None)
        with pytest.raises(ValueError) as caught:
            fail(chunks, case, None if case == "misspelt" else settings)
        unpatch_model(chunks)
        assert all(same_traces(traces(c), b) for c, b in zip(chunks, before, strict=True))
        return str(caught.value)


@pytest.mark.parametrize(
    ("case", "match"),
    [
        ("misspelt", "temperature"),
        ("lora", "LoRAHead"),
        ("hook", "forward hook"),
        ("options", "temperature"),
        ("policy", "requires a gradient"),
        ("targets", "tensor of integers"),
    ],
)
def test_errors_on_every_pipeline_stage(ranks, case, match):
    messages = ranks(2).run(errors_on_every_stage, case)
    assert all(match in message for message in messages), messages
