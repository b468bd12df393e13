"""The output layer of a patched model, used for something else than the model's own loss."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.megatron import patch_gpt_model, patch_model, unpatch_model
from tests.megatron.common import VOCAB, loss_of, make_batch, megatron, relative, tiny_config, worst
from tests.megatron.test_hybrid import hybrid_config


def gpt(seed: int = 0, **built: Any) -> Any:
    return mm.build_gpt_model(tiny_config(num_layers=1), vocab_size=VOCAB, seed=seed, **built)


def hybrid() -> Any:
    config = hybrid_config({}, "*-")
    return mm.build_hybrid_model(
        config, vocab_size=VOCAB, pattern="*-", position_embedding_type="rope"
    )


def cross_entropy(logits: Any, labels: Tensor) -> Tensor:
    """Megatron's, an autograd function of its own."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    return vocab_parallel_cross_entropy(logits, labels.t().contiguous())


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("output", ["stats", "loss"])
def test_a_model_that_shares_the_head_trains_as_before(output: str) -> None:
    with megatron() as parallel_state:
        policy, draft = gpt(tied=False), gpt(seed=1, tied=False)
        draft.output_layer = policy.output_layer
        batch = make_batch(parallel_state)

        def step() -> tuple[Tensor, dict[str, Tensor]]:
            loss = draft(**batch["inputs"], labels=batch["labels"]).mean()
            return loss.detach(), gradients(draft, loss)

        expected, expected_grads = step()
        with patch_gpt_model(policy, LogprobConfig(output=output)):
            got, grads = step()
        assert torch.equal(got, expected)
        assert worst(grads, expected_grads) == 0.0


def test_two_patched_models_that_share_the_head() -> None:
    with megatron() as parallel_state:
        policy, draft = gpt(tied=False), gpt(seed=1, tied=False)
        draft.output_layer = policy.output_layer
        batch = make_batch(parallel_state)
        hidden = torch.randn(5, 2, policy.config.hidden_size)
        expected = policy.output_layer(hidden)[0]

        def step(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
            loss = loss_of(model(**batch["inputs"], labels=batch["labels"])).mean()
            return loss.detach(), gradients(model, loss)

        plain = [step(policy), step(draft)]
        with patch_model(policy, LogprobConfig(fused="require")):
            with patch_model(draft, LogprobConfig(fused="require", entropy=True)):
                patched = [step(policy), step(draft)]
                assert torch.equal(policy.output_layer(hidden)[0], expected)
            patched.append(step(policy))
        assert "forward" not in vars(policy.output_layer)
        for (got, grads), (loss, wanted) in zip(patched, [*plain, plain[0]], strict=True):
            assert relative(got, loss) < 1e-6
            assert worst(grads, wanted) < 1e-5


def test_the_layer_alone_gives_logits_with_their_gradient_and_keeps_nothing() -> None:
    with megatron() as parallel_state:
        model, labels = gpt(tied=False), make_batch(parallel_state)["labels"]
        hidden = torch.randn(labels.shape[1], labels.shape[0], model.config.hidden_size)
        hidden.requires_grad_()
        with patch_gpt_model(model):
            given = hidden * 1.0
            alive = weakref.ref(given)
            loss = cross_entropy(model.output_layer(given)[0], labels).mean()
            assert gradients(model, loss)["output_layer.weight"].any()
            del given, loss
            gc.collect()
            assert alive() is None


@pytest.mark.parametrize("output", ["stats", "loss"])
@pytest.mark.parametrize("read", [cross_entropy, lambda logits, _: logits.float().logsumexp(-1)])
def test_an_early_exit_s_loss_beside_the_model_s(
    output: str, read: Callable[[Any, Tensor], Tensor]
) -> None:
    with megatron() as parallel_state:
        model, batch, exits = gpt(tied=False), make_batch(parallel_state), []

        def early(module: Any, args: Any, out: Any) -> None:
            hidden = out[0] if isinstance(out, tuple) else out
            exits.append(read(model.output_layer(hidden)[0], batch["labels"]))

        model.decoder.layers[0].register_forward_hook(early)

        def step() -> tuple[Tensor, dict[str, Tensor]]:
            main = loss_of(model(**batch["inputs"], labels=batch["labels"])).sum()
            return exits[-1].detach(), gradients(model, main + 5.0 * exits[-1].sum())

        expected, expected_grads = step()
        with patch_gpt_model(model, LogprobConfig(output=output)):
            got, grads = step()
        assert relative(got, expected) < 1e-6
        assert worst(grads, expected_grads) < 1e-5


def early_exit(model: Any, use: Callable[[Any], None]) -> None:
    """Have the model's own code use the head a second time, after its first layer."""

    def hook(module: Any, args: Any, out: Any) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        use(model.output_layer(hidden, weight=model.shared_embedding_or_output_weight())[0])

    model.decoder.layers[0].register_forward_hook(hook)


def test_a_monitor_sees_what_the_model_s_own_code_wrote() -> None:
    """An early exit at a temperature of its own, written in place, and a monitor beside it."""
    with megatron() as parallel_state:
        model, batch, seen = hybrid(), make_batch(parallel_state), []

        def write_and_look(logits: Any) -> None:
            logits *= -2.0
            with torch.no_grad():
                seen.append((logits.max(dim=-1).values, logits.argmax(-1), logits.logsumexp(-1)))

        early_exit(model, write_and_look)
        model(**batch["inputs"], labels=batch["labels"])
        with patch_model(model, LogprobConfig()):
            model(**batch["inputs"], labels=batch["labels"])
        torch.testing.assert_close(seen[1], seen[0])


def test_a_second_use_within_a_forward_that_loses_its_gradient_raises() -> None:
    """A hybrid model's forward has no part of its own for the head: all of it is around the use."""
    with megatron() as parallel_state:
        model, batch, use = hybrid(), make_batch(parallel_state), []
        early_exit(model, lambda logits: use[0](logits))

        def forward() -> Any:
            return model(**batch["inputs"], labels=batch["labels"])

        with patch_model(model, LogprobConfig()):
            kept = []

            def keep(read: Callable[[Any], Tensor]) -> None:
                use[:] = [lambda logits: kept.append(read(logits))]
                forward()

            def trained(logits: Any) -> Tensor:
                return cross_entropy(logits, batch["labels"])

            with pytest.raises(RuntimeError, match=r"forward was given the deferred logits"):
                keep(trained)
            with torch.no_grad():
                keep(trained)
            keep(lambda logits: trained(logits.clone()))
            keep(lambda logits: logits.float().logsumexp(-1))
            assert all(x.requires_grad for x in kept[-2:])
            # Without a gradient, as a monitor has it, also in a checkpoint's recomputation.
            keep(torch.no_grad()(lambda logits: logits.argmax(-1).float()))
            checkpoint(forward, use_reentrant=False).loss.sum().backward()
            anchor = torch.ones((), requires_grad=True)
            checkpoint(lambda x: forward().loss * x, anchor, use_reentrant=True).sum().backward()


@pytest.mark.parametrize("policy", [False, True], ids=["statistics", "policy loss"])
def test_a_checkpoint_around_the_model_needs_the_same_blocks(policy: bool) -> None:
    with megatron() as parallel_state:
        model, batch = gpt(), make_batch(parallel_state)
        call = {**batch["inputs"], "labels": batch["labels"]}

        def loss() -> Tensor:
            stats = model(**call)
            if policy:
                return stats.policy_loss
            return (stats.logprobs * batch["weights"]).sum()

        def blocks(handle: Any) -> contextlib.ExitStack:
            stack = contextlib.ExitStack()
            stack.enter_context(handle.options(temperature=0.5))
            if policy:
                loss_fn = lambda logprobs, entropy, weights: logprobs * weights  # noqa: E731
                stack.enter_context(handle.policy_loss(loss_fn, batch["weights"]))
            return stack

        with patch_model(model, LogprobConfig()) as handle:
            with blocks(handle):
                expected = gradients(model, loss())
                with torch.no_grad():  # has no backward
                    loss()
                got = gradients(model, checkpoint(loss, use_reentrant=False))
            assert worst(got, expected) < 1e-6
            with blocks(handle):
                outside = checkpoint(loss, use_reentrant=False)
            with pytest.raises(RuntimeError, match="PatchHandle blocks open than in the forward"):
                outside.backward()
            offloaded = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
            with offloaded, blocks(handle):  # entered within hooks, but not the checkpoint's
                outside = checkpoint(loss, use_reentrant=False)
            with pytest.raises(RuntimeError, match="PatchHandle blocks open than in the forward"):
                outside.backward()
            if not policy:
                before = checkpoint(loss, use_reentrant=False)
                with (
                    blocks(handle),
                    pytest.raises(RuntimeError, match="PatchHandle blocks open"),
                ):
                    before.backward()
                plain = gradients(model, checkpoint(loss, use_reentrant=False))
                assert worst(plain, gradients(model, loss())) < 1e-6


def test_checkpoints_of_calls_with_the_same_labels() -> None:
    with megatron() as parallel_state:
        model, batch = gpt(), make_batch(parallel_state)
        call = {**batch["inputs"], "labels": batch["labels"]}

        def loss() -> Tensor:  # its product is computed again before the model's backward
            return (model(**call).logprobs.exp() * batch["weights"]).sum()

        def checkpointed() -> Tensor:
            return checkpoint(loss, use_reentrant=False)

        with patch_model(model, LogprobConfig()) as handle:
            temperatures = (0.5, 2.0)
            blocks = [lambda t=t: handle.options(temperature=t) for t in temperatures]

            def block_inside(t: float) -> Tensor:
                with handle.options(temperature=t):
                    return loss()

            expected = []
            for block in blocks:
                with block():
                    expected.append(gradients(model, loss()))
            # Two calls before the first backward, each with the same labels.
            with blocks[0]():
                first = checkpointed()
                with blocks[1]():
                    second = checkpointed()
                    assert worst(gradients(model, second), expected[1]) < 1e-6
                assert worst(gradients(model, first), expected[0]) < 1e-6
            with blocks[0]():
                first = checkpointed()
            with blocks[1]():
                checkpointed()
                with pytest.raises(RuntimeError, match="PatchHandle blocks open"):
                    first.backward()
            # A block that the checkpoint itself enters again.
            for t, grads in zip(temperatures, expected, strict=True):
                inside = checkpoint(block_inside, t, use_reentrant=False)
                assert worst(gradients(model, inside), grads) < 1e-6
            # Hooks that are no checkpoint's: what they saved is the first call's.
            with torch.autograd.graph.save_on_cpu(), blocks[0]():
                kept = loss()
            assert worst(gradients(model, kept), expected[0]) < 1e-6
            # The settings of the patch itself.
            outside = checkpointed()
        with (
            patch_model(model, LogprobConfig(temperature=2.0)),
            pytest.raises(RuntimeError, match="PatchHandle blocks open"),
        ):
            outside.backward()


def prompt_of_an_engine(tp: int, sequence_parallel: bool) -> bool:
    """Whether a patched model gives an engine's context the logits that it gives unpatched."""
    from megatron.core.inference.contexts import StaticInferenceContext

    with megatron(tp=tp), torch.no_grad():
        config = tiny_config(tp, num_layers=1, sequence_parallel=sequence_parallel)
        model = mm.build_gpt_model(config, vocab_size=VOCAB).eval()
        ids, position = torch.arange(16).view(2, 8) * 5, torch.arange(8).expand(2, 8)

        def logits(last_only: bool) -> Tensor:
            context = StaticInferenceContext(2, 16)
            context.materialize_only_last_token_logits = last_only
            given: Any = {"inference_context": context, "runtime_gather_output": True}
            return model(ids, position, None, **given)

        expected = [logits(True), logits(False)]
        found = []
        for kind in ("real", "lazy"):
            with patch_gpt_model(model, LogprobConfig(logits=kind)):
                found += [logits(True), logits(False)]
        pairs = zip(found, 2 * expected, strict=True)
        return all(type(got) is Tensor and torch.equal(got, want) for got, want in pairs)


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_an_inference_engine_gets_megatron_s_logits(ranks, tp: int, sequence_parallel: bool):
    assert ranks(tp).run(prompt_of_an_engine, tp, sequence_parallel) == [True] * tp


def test_a_block_is_entered_once() -> None:
    with megatron():
        handle = patch_gpt_model(gpt())
        block = handle.options(temperature=0.5)
        with block:
            pass
        with pytest.raises(RuntimeError, match=r"options: expected a block that is entered once"):
            block.__enter__()
        handle.remove()


def test_a_shallow_copy_of_a_patched_model_is_refused() -> None:
    with megatron():
        model = gpt()
        with patch_gpt_model(model):
            for function in (patch_model, unpatch_model):
                with pytest.raises(ValueError, match="got a shallow copy"):
                    function(copy.copy(model))
