"""A patched model under torch's FSDP2 (`fully_shard`), patched before and after the wrap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)

from mcore_logprobs import LogprobConfig, patch_model, unpatch_model
from mcore_logprobs.cpu_megatron import models as mm
from tests.megatron.common import VOCAB, loss_of, make_batch, megatron, relative, tiny_config, worst
from tests.megatron.test_joints import log_lines, traces


def wrap(model: Any, group: Any, *, head: str, **options: Any) -> None:
    """As Megatron's TorchFullyShardedDataParallel does; `head` says with what it is sharded."""
    # A name of its own: torch caches an operation's result by meshes that compare equal, also where
    # their groups are other tests', which are gone.
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"dp_{group.group_name}",))
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh, **options)
    if head == "own":
        fully_shard(model.output_layer, mesh=mesh, **options)
    elif head == "group":
        fully_shard([model.decoder.final_layernorm, model.output_layer], mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(model: Any, batches: list[dict[str, Any]], how: Any) -> tuple[list[Tensor], Any]:
    """(losses, gradients) of a backward for each of two micro-batches, accumulated."""
    model.zero_grad(set_to_none=True)
    losses = []
    for batch in batches:
        output = how(model, batch)
        losses.append(loss_of(output).detach())
        (loss_of(output) * batch["weights"]).sum().backward()
    grads = {n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
    return losses, grads


def plain(model: Any, batch: dict[str, Any]) -> Any:
    return model(**batch["inputs"], labels=batch["labels"])


def errors(
    first: str, tp: int, wrapping: dict[str, Any], settings: dict[str, Any], case: str = ""
) -> dict[str, Any]:
    """Against the model before it was wrapped, its gradients averaged over data-parallel ranks."""
    mtp = case == "mtp"
    with megatron(tp=tp) as parallel_state, log_lines() as lines:
        config = tiny_config(tp, sequence_parallel=tp > 1, **({"mtp_num_layers": 1} if mtp else {}))
        model = mm.build_gpt_model(config, vocab_size=VOCAB, tied=case == "tied", mtp=mtp)
        group = parallel_state.get_data_parallel_group()
        own_seeds = 100 * dist.get_rank(group)
        batches = [make_batch(parallel_state, seed=own_seeds + i) for i in range(2)]
        expected, expected_grads = train(model, batches, plain)
        for grad in expected_grads.values():
            dist.all_reduce(grad, group=group)
            grad /= group.size()
        logits = None if mtp else model(**batches[0]["inputs"]).detach()
        before = traces(model)
        options = dict(wrapping)
        if case == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        if first == "patch":
            handle = patch_model(model, LogprobConfig(**settings))
            wrap(model, group, **options)
        else:
            wrap(model, group, **options)
            wrapped = traces(model)
            handle = patch_model(model, LogprobConfig(**settings))
        keys = list(model.state_dict())
        for _ in range(2):  # the second time after a backward
            got, grads = train(model, batches, plain)
        model.zero_grad(set_to_none=True)  # a forward alone leaves FSDP's root open
        with torch.no_grad():
            again = loss_of(plain(model, batches[0]))
        found = None if mtp else model(**batches[0]["inputs"]).detach()

        def in_head(model: Any, batch: dict[str, Any]) -> Any:
            with handle.policy_loss(lambda lp, ent, w: -lp * w, batch["weights"]):
                stats = model(**batch["inputs"], labels=batch["labels"])
            return stats

        for batch in batches:
            in_head(model, batch).policy_loss.backward()
        head_grads = {
            n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None
        }
        unpatch_model(model)
        if first == "wrap":
            assert [set(d) for d in traces(model)] == [set(d) for d in wrapped]
        else:
            assert all("_mcore" not in k for d in traces(model) for k in d)
        assert "forward" not in vars(model.output_layer)
        assert list(model.state_dict()) == keys
        unpatched, unpatched_grads = train(model, batches, plain)
        if case == "bf16":  # against the same model unpatched, which rounds its logits besides
            expected, expected_grads, logits = unpatched, unpatched_grads, found
            again, expected[0] = again.float(), expected[0].float()
        pairs = list(zip(got, expected, strict=True))
        return {
            "loss": max(relative(g, e) for g, e in pairs),
            "grad": worst(grads, expected_grads),
            "no_grad": relative(again, expected[0]),
            "dtype": float(got[0].dtype != torch.float32),
            "logits": 0.0 if mtp else relative(found, logits),
            "policy grad": worst(head_grads, grads),
            "unpatched": worst(unpatched_grads, expected_grads),
            "lines": len(lines),
            "before": len(before),
        }


def with_lora(kind: str) -> Any:
    from tests.megatron import test_lora, test_peft

    model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB, tied=False)
    layer = model.output_layer
    if kind == "bridge":
        adapter = test_lora.ParallelLinearAdapter(layer)
        model.output_layer = test_lora.LoRALinear(layer, adapter)
    else:
        model.output_layer = test_peft.LoraParallelLinear(layer, ("first",))
    return model


def lora(kind: str, first: str, head: str) -> dict[str, float]:
    """FSDP2 gives the adapter's class another name, and shards its parameters before the patch."""
    with megatron() as parallel_state, log_lines() as lines:
        model, group = with_lora(kind), parallel_state.get_data_parallel_group()
        batch = make_batch(parallel_state)
        expected, expected_grads = train(model, [batch], plain)
        if first == "wrap":
            wrap(model, group, head=head)
            with pytest.raises(ValueError, match="invariant_segments: expected None with a LoRA"):
                patch_model(model, LogprobConfig(invariant_segments=1))
        handle = patch_model(model, LogprobConfig(fused="require"))
        assert handle.reports[0].fusable
        if first == "patch":
            wrap(model, group, head=head)
        got, grads = train(model, [batch], plain)
        logits = model(**batch["inputs"])
        handle.remove()
        return {
            "loss": relative(got[0], expected[0]),
            "grad": worst(grads, expected_grads),
            "logits": relative(logits, model(**batch["inputs"])),
            "lines": len(lines),
        }


@pytest.mark.parametrize(
    ("kind", "first", "head"),
    [("bridge", "patch", "own"), ("bridge", "wrap", "own"), ("peft", "wrap", "root")],
)
def test_a_lora(ranks, kind, first, head):
    for found in ranks(2).run(lora, kind, first, head):
        assert max(found.values()) < 1e-5, found


def lora_with_groups_inside(kind: str) -> str:
    """A part that FSDP gathers when it is called, which a fused head does not."""
    with megatron() as parallel_state:
        model, group = with_lora(kind), parallel_state.get_data_parallel_group()
        layer, batch = model.output_layer, make_batch(parallel_state)
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"in_{group.group_name}",))
        fully_shard(
            layer.adapter.linear_in if kind == "bridge" else layer.lora_A["first"], mesh=mesh
        )
        wrap(model, group, head="own")
        expected, expected_grads = train(model, [batch], plain)
        (report,) = patch_model(model, LogprobConfig()).reports
        got, grads = train(model, [batch], plain)
        assert not report.fusable
        assert relative(got[0], expected[0]) < 1e-5
        assert worst(grads, expected_grads) < 1e-5
        return report.reason


@pytest.mark.parametrize("kind", ["bridge", "peft"])
def test_a_lora_with_groups_inside_is_not_fused(ranks, kind):
    for reason in ranks(2).run(lora_with_groups_inside, kind):
        assert "FSDP shards its adapter" in reason


OWN: dict[str, Any] = {"head": "own"}
ROOT: dict[str, Any] = {"head": "root"}
WRAPPINGS = {
    "own": OWN,
    "root": ROOT,
    "reshard": OWN | {"reshard_after_forward": True},
    "root-reshard": ROOT | {"reshard_after_forward": True},
    "keep": OWN | {"reshard_after_forward": False},
}


def check(found: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert found.pop("lines") == 0, found
    found.pop("before")
    assert max(found.values()) < tolerance, found


@pytest.mark.parametrize(
    ("wrapping", "first"),
    [
        ("own", "patch"),
        ("own", "wrap"),
        ("root", "wrap"),
        ("reshard", "wrap"),
        ("root-reshard", "patch"),
        ("keep", "patch"),
    ],
)
def test_fused(ranks, first, wrapping):
    for found in ranks(2).run(errors, first, 1, WRAPPINGS[wrapping], {"fused": "require"}):
        check(found)


@pytest.mark.parametrize("first", ["patch", "wrap"])
def test_from_logits(ranks, first):
    for found in ranks(2).run(errors, first, 1, OWN, {"fused": False}):
        check(found)


def hooked_input(sharded: bool) -> tuple[dict[str, float], list[str]]:
    """(errors, log lines) where a hook changes what the head is given."""
    with megatron() as parallel_state, log_lines() as lines:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB, tied=False)
        model.output_layer.register_forward_pre_hook(lambda _, args: (args[0] * 0.5, *args[1:]))
        if sharded:
            wrap(model, parallel_state.get_data_parallel_group(), head="own")
        batches = [make_batch(parallel_state, seed=seed) for seed in range(2)]
        expected, expected_grads = train(model, batches, plain)
        with patch_model(model, LogprobConfig()):
            got, grads = train(model, batches, plain)
        return {
            "loss": max(relative(g, e) for g, e in zip(got, expected, strict=True)),
            "grad": worst(grads, expected_grads),
        }, list(lines)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_hook_on_the_heads_input_runs_once(ranks, sharded):
    for found, lines in ranks(2).run(hooked_input, sharded):
        assert max(found.values()) < 1e-5, found
        assert [("would run twice, as FSDP calls" in line) for line in lines] == [True] * sharded


@pytest.mark.parametrize("first", ["patch", "wrap"])
def test_a_head_in_a_group_of_modules_is_not_fused(ranks, first):
    """Its weight goes when the last of the group has run, and comes back for all of them only."""
    for found in ranks(2).run(errors, first, 1, {"head": "group"}, {}):
        assert found["lines"] == 1
        check({**found, "lines": 0})


@pytest.mark.parametrize("first", ["patch", "wrap"])
@pytest.mark.parametrize("case", ["mtp", "tied"])
def test_mtp_and_tied_weights(ranks, first, case):
    wrapping = ROOT if case == "tied" else OWN
    for found in ranks(2).run(errors, first, 1, wrapping, {"fused": "require"}, case):
        check(found)


def test_with_tensor_parallelism(ranks):
    for found in ranks(4).run(errors, "patch", 2, OWN, {"fused": "require"}):
        check(found)


@pytest.mark.parametrize("first", ["patch", "wrap"])
def test_mixed_precision(ranks, first):
    for found in ranks(2).run(errors, first, 1, OWN, {"fused": "require"}, "bf16"):
        check(found, 0.03)


def processor(tp: int) -> None:
    """The output processor leaves the layer before its loss calls it for the weight again."""
    from mcore_logprobs import logprob_output_processor

    with megatron(tp=tp) as parallel_state:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB, tied=False)
        batch = make_batch(parallel_state)
        expected, expected_grads = train(model, [batch], plain)
        wrap(model, parallel_state.get_data_parallel_group(), **OWN)

        def through_the_processor(model: Any, batch: dict[str, Any]) -> Any:
            def postprocess(**call: Any) -> Any:
                return logprob_output_processor(
                    hidden_states=call["hidden_states"],
                    output_layer=model.output_layer,
                    labels=call["labels"],
                    context=LogprobConfig(fused="require"),
                    config=model.config,
                )

            model._postprocess = postprocess
            try:
                return model(**batch["inputs"], labels=batch["labels"])
            finally:
                del model._postprocess

        got, grads = train(model, [batch], through_the_processor)
        assert "forward" not in vars(model.output_layer)
        assert relative(got[0], expected[0]) < 1e-5
        assert worst(grads, expected_grads) < 1e-5


def test_output_processor(ranks):
    ranks(2).run(processor, 1)


def lazy_under_the_first_version() -> dict[str, Any]:
    with megatron() as parallel_state, log_lines() as lines:
        model = mm.build_gpt_model(tiny_config(1), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        expected, expected_grads = train(model, [batch], of_logits)
        patch_model(model, LogprobConfig(logits="lazy"))
        group = parallel_state.get_data_parallel_group()
        options = {"use_orig_params": True, "device_id": torch.device("cpu")}
        wrapped = FullyShardedDataParallel(model, group, **options)
        got, _ = train(wrapped, [batch], of_logits)
        with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return {
            "loss": relative(got[0], expected[0]),
            "grad": worst(grads, expected_grads),
            "lines": [line for line in lines if "FSDP shards its weight" in line],
        }


def of_logits(model: Any, batch: dict[str, Any]) -> Tensor:
    logits = model(**batch["inputs"])
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), reduction="none"
    ).view(batch["labels"].shape)


def test_lazy_logits_are_real_under_the_first_version_too(ranks) -> None:
    for found in ranks(2).run(lazy_under_the_first_version):
        assert max(found["loss"], found["grad"]) < 1e-5
        assert len(found["lines"]) == 1
