"""Drop-ins that run a real Megatron model: verl's fused forward and Megatron-LM's own RL."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import sys
import tempfile
import types
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.dropin import megatron_rl, nemo_rl, verl
from mcore_logprobs.dropin.settings import logprob_config
from tests.dropin.common import columns_of
from tests.dropin.frameworks import load, source_root, versions
from tests.dropin.test_beside import theirs
from tests.engine.truths import take
from tests.megatron.common import VOCAB, make_batch, megatron, relative, tiny_config, worst

LENGTHS = (7, 12, 5)
TEMPERATURE = 0.8


def packing(version: str) -> Any:
    """verl's own pack and unpack functions."""
    util = load(
        "verl",
        "verl/models/mcore/util.py",
        version,
        verl__utils__device={"is_npu_available": False},
        verl__utils__model={"CausalLMOutputForPPO": object},
    )
    util.logger.warning_once = lambda message: None  # what verl adds to its loggers
    return util


def grads_of(model: Any) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def run_verl(
    version: str, tp: int, cp: int, sequence_parallel: bool, tied: bool
) -> dict[str, float]:
    with megatron(tp=tp, cp=cp):
        util, own = packing(version), theirs("verl", version)
        config = tiny_config(tp, sequence_parallel=sequence_parallel)
        model = mm.build_gpt_model(config, vocab_size=VOCAB, tied=tied)
        generator = torch.Generator().manual_seed(0)
        rows = [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS]
        weights = [torch.randn(n, generator=generator) for n in LENGTHS]
        ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        tokens, params, _ = util.preprocess_thd_engine(ids)
        labels, _, _ = util.preprocess_thd_engine(ids, need_roll=True)
        inputs = {
            "input_ids": tokens,
            "position_ids": None,
            "attention_mask": None,
            "packed_seq_params": params,
        }

        def finish(log_probs: Tensor, entropy: Tensor) -> dict[str, Any]:
            """Unpack as verl does, one loss, every parameter's gradient."""
            values = {}
            loss = torch.zeros(())
            for name, x, scale in (("log_probs", log_probs, 1.0), ("entropy", entropy, 0.3)):
                if x.dim() == 1:
                    x = x.unsqueeze(0)
                nested = util.postprocess_thd_engine(x, params, ids, len(LENGTHS))
                values[name] = nested.values()
                loss = loss + (nested.values() * torch.cat(weights)).sum() * scale
            loss.backward()
            return {"values": values, "grads": grads_of(model)}

        logits = model(**inputs) / TEMPERATURE
        entropy = own.vocab_parallel_entropy(logits)
        log_probs = own.vocab_parallel_log_probs_from_logits(logits.clone(), labels)
        unfused = finish(log_probs, entropy)

        model.forward_backup = model.forward  # as verl's own patch leaves a model
        with pytest.raises(ValueError, match="expected a forward without verl's own patch"):
            verl.patch_fused_forward(model)
        del model.forward_backup
        model.forward = before = functools.partial(model.forward)  # somebody else's, from before
        verl.patch_fused_forward(model)
        verl.patch_fused_forward(model)
        output = model(**inputs, labels=labels, temperature=TEMPERATURE)
        assert output.log_probs.shape == (labels.numel(),)
        fused = finish(output.log_probs, output.entropy)
        assert not isinstance(model(**inputs), verl.FusedOutput)  # no labels: logits as before
        ours = model.forward
        model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
        with pytest.raises(ValueError, match="forward was replaced by something else"):
            verl.unpatch_fused_forward(model)
        model.forward = ours
        verl.unpatch_fused_forward(model)
        assert vars(model)["forward"] is before
        del model.forward

        errors = {n: relative(fused["values"][n], unfused["values"][n]) for n in fused["values"]}
        errors["gradients"] = worst(fused["grads"], unfused["grads"])

        # The output processor of Megatron 0.18 and later, called as Megatron calls it.
        hidden = torch.randn(*(6 // tp if sequence_parallel else 6, 2, config.hidden_size))
        hidden.requires_grad_()
        target = torch.randint(0, VOCAB, (2, 6), generator=generator)
        weight = model.shared_embedding_or_output_weight() if tied else None
        found = verl.fused_output_processor(
            hidden_states=hidden,
            output_layer=model.output_layer,
            output_weight=weight,
            labels=target,
            context=verl.FusedOutputProcessorContext(TEMPERATURE),
            config=config,
            input_ids=target,
        )
        got = torch.autograd.grad(found.log_probs.sum() + found.entropy.sum(), hidden)[0]
        direct = model.output_layer(hidden, weight=weight)[0] / TEMPERATURE
        value = own.vocab_parallel_log_probs_from_logits(direct.clone(), target.T.contiguous())
        other = own.vocab_parallel_entropy(direct)
        errors["processor"] = relative(found.log_probs, value.T.reshape(-1))
        want = torch.autograd.grad(value.sum() + other.sum(), hidden)[0]
        errors["processor gradient"] = relative(got, want)
        errors |= logged(found, hidden, target, model, weight)
        return errors


def logged(found: Any, hidden: Tensor, target: Tensor, model: Any, weight: Any) -> dict[str, float]:
    """What Megatron's config logger writes of the output processor's call: as verl's own does."""
    config = copy.copy(model.config)
    with tempfile.TemporaryDirectory() as folder:
        config.config_logger_dir = folder
        verl.fused_output_processor(
            hidden_states=hidden,
            output_layer=model.output_layer,
            output_weight=weight,
            labels=target,
            context=verl.FusedOutputProcessorContext(TEMPERATURE),
            config=config,
            input_ids=target,
            position_ids=None,
        )
        (file,) = Path(folder).glob("input_and_logits*.pth")
        payload = torch.load(file, weights_only=False)
    keys = ["input_ids", "position_ids", "attention_mask", "decoder_input", "logprobs", "entropy"]
    assert list(payload) == keys
    assert torch.equal(payload["input_ids"], target)
    results = {"logprobs": found.log_probs, "entropy": found.entropy}
    return {f"logged {name}": relative(payload[name], x) for name, x in results.items()}


@pytest.mark.parametrize(
    ("tp", "cp", "sequence_parallel", "tied"),
    [(2, 2, True, True), (2, 1, False, False)],
)
@pytest.mark.parametrize(("distribution", "version"), versions("verl"))
def test_verl_s_fused_forward_equals_its_unfused_path(
    ranks, distribution: str, version: str, tp: int, cp: int, sequence_parallel: bool, tied: bool
) -> None:
    for errors in ranks(tp * cp).run(run_verl, version, tp, cp, sequence_parallel, tied):
        assert max(errors.values()) < 2e-5, errors


def run_mtp() -> dict[str, float]:
    """verl turns its fused path off under multi-token prediction; this one need not."""
    with megatron(tp=2) as state:
        config = tiny_config(2, mtp_num_layers=1)
        model = mm.build_gpt_model(config, vocab_size=VOCAB, mtp=True)
        batch = make_batch(state)
        inputs = {**batch["inputs"], "labels": batch["labels"]}
        loss = model(**inputs)
        (loss * batch["weights"]).sum().backward()
        want = grads_of(model)
        verl.patch_fused_forward(model)
        log_probs = model(**inputs, temperature=1.0).log_probs
        (-log_probs * batch["weights"].reshape(-1)).sum().backward()
        grads = grads_of(model)
        assert any(name.startswith("mtp") and g.any() for name, g in grads.items())
        return {
            "log_probs": relative(-log_probs.detach(), loss.detach().reshape(-1)),
            "gradients": worst(grads, want),
        }


def test_verl_s_fused_forward_under_mtp(ranks) -> None:
    for errors in ranks(2).run(run_mtp):
        assert max(errors.values()) < 2e-5, errors


# ---- Megatron-LM's RL and NeMo-RL's patched forward ----------------------------------------------


def each_by_itself(
    state: Any, model: Any, tokens: Tensor, bounds: tuple[int, ...], temperature: float = 1.0
) -> Tensor:
    """`[b, 15]`: every sequence's next tokens, by NeMo-RL's function of the model's own logits."""
    group = state.get_context_parallel_group()
    found = []
    for first, last in itertools.pairwise(bounds):
        if last > first:
            part = tokens[:, first:last]
            inputs = on_this_rank(state, part, first)
            logits = model(*inputs, None) / temperature
            place = columns_of(state, VOCAB)
            got = nemo_rl.from_parallel_logits_to_logprobs(logits, part, *place, cp_group=group)
            found += [got, got.new_zeros(len(tokens), 1)]
    return torch.cat(found, 1)[:, :-1]


def on_this_rank(state: Any, tokens: Tensor, first: int = 0) -> list[Tensor]:
    """A CP rank's (tokens, positions)."""
    position = torch.arange(first, first + tokens.shape[1]).expand(tokens.shape)
    rank, cp = state.get_context_parallel_rank(), state.get_context_parallel_world_size()
    return [nemo_rl._get_tokens_on_this_cp_rank(x, rank, cp) for x in (tokens, position)]


def run_next_tokens(tp: int, cp: int, bounds: tuple[int, ...] | None) -> dict[str, float]:
    with megatron(tp=tp, cp=cp) as state:
        from megatron.core.packed_seq_params import PackedSeqParams

        # Learned positions are of each token; rotary ones Megatron finds by the rank.
        kind = "rope" if bounds else "learned_absolute"
        model = mm.build_gpt_model(tiny_config(tp), vocab_size=VOCAB, position_embedding_type=kind)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, VOCAB, (1 if bounds else 2, 16), generator=generator)
        upstream = torch.randn(len(tokens), 15, generator=generator)
        given, params = {}, None
        if bounds:
            cu = torch.tensor(bounds, dtype=torch.int32)
            params = PackedSeqParams("thd", cu, cu, max_seqlen_q=16, max_seqlen_kv=16)
            given = {"packed_seq_params": params}
        call = (model, tokens, torch.arange(16).expand(tokens.shape))
        logprobs = megatron_rl.get_logprobs(*call, **given)
        (logprobs * upstream).sum().backward()
        grads = grads_of(model)
        assert params is None or params.cu_seqlens_q_padded is None  # the caller's own
        quiet = megatron_rl.get_logprobs(*call, **given, no_grad=True)
        assert not quiet.requires_grad
        assert torch.equal(quiet, logprobs.detach())
        want = each_by_itself(state, model, tokens, bounds or (0, 16))
        (want * upstream).sum().backward()
        return {
            "value": relative(logprobs.detach(), want.detach()),
            "gradients": worst(grads, grads_of(model)),
        }


BOUNDS = {
    "one sequence": (0, 16),  # what Megatron-LM makes for every call that brings nothing
    "ghosts": (0, 16, 16, 16),  # its default where sequences are packed
    "a bin": (0, 8, 12, 16, 16),
    "no parameters": None,
}


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("cp", [1, 2])
def test_next_tokens(ranks, cp: int, bounds: str) -> None:
    for errors in ranks(2 * cp).run(run_next_tokens, 2, cp, BOUNDS[bounds]):
        assert max(errors.values()) < 2e-5, errors


def test_a_model_without_groups(monkeypatch) -> None:
    """As upstream's own test makes one: it returns logits, and nothing of Megatron is set up."""
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, VOCAB, generator=generator, requires_grad=True)

    class Model(LanguageModule):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)

        def forward(self, *given: Any, **more: Any) -> Tensor:
            return logits

    tokens = torch.randint(0, VOCAB, (2, 6), generator=generator)
    found = megatron_rl.get_logprobs(Model(), tokens, None)
    quiet = megatron_rl.get_logprobs(Model(), tokens, None, no_grad=True)
    want = take(logits.double().log_softmax(-1)[:, :-1], tokens[:, 1:])
    assert relative(found.detach(), want.detach()) < 1e-6
    assert found.requires_grad
    assert not quiet.requires_grad
    monkeypatch.setattr(megatron_rl, "_collected_in", lambda: torch.bfloat16)
    rounded = megatron_rl.get_logprobs(Model(), tokens, None)
    assert rounded.dtype is torch.bfloat16
    assert torch.equal(rounded, found.bfloat16())


FLAG = {"return_logprobs_for_linear_ce_fusion": True}


@contextlib.contextmanager
def fused(**settings: Any) -> Iterator[None]:
    """GPTModel's forward as NeMo-RL patches it."""
    nemo_rl.patch_gpt_model_forward_for_linear_ce_fusion(**settings)
    try:
        yield
    finally:
        nemo_rl.unpatch_gpt_model_forward_for_linear_ce_fusion()


def run_temperatures(tp: int, cp: int) -> dict[str, float]:
    """Of NeMo-RL's patch, and of a call that names another."""
    with megatron(tp=tp, cp=cp) as state:
        model = mm.build_gpt_model(tiny_config(tp), vocab_size=VOCAB)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, VOCAB, (2, 16), generator=generator)
        local = on_this_rank(state, tokens)
        with fused(chunk_size=4, temperature=0.7):
            by_patch = model(*local, None, labels=local[0], **FLAG, is_spec_decode=None)
            by_call = model(*local, None, labels=local[0], **FLAG, temperature=0.5)
            assert torch.equal(model(*local, None, is_spec_decode=None), model(*local, None))
        return {
            name: relative(got.detach(), each_by_itself(state, model, tokens, (0, 16), t).detach())
            for name, got, t in (("patch", by_patch, 0.7), ("call", by_call, 0.5))
        }


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (2, 2)])
def test_temperatures_of_nemo_rl_s_patch(ranks, tp: int, cp: int) -> None:
    for errors in ranks(tp * cp).run(run_temperatures, tp, cp):
        assert max(errors.values()) < 2e-5, errors


def run_made_parameters() -> list[Any]:
    """What the model is given where the caller has none: nothing, or what its own RL makes."""
    with megatron(), pytest.MonkeyPatch.context() as change:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
        seen: list[Any] = []

        def watch(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            params = kwargs.get("packed_seq_params")
            seen.append(params and (params.cu_seqlens_q.tolist(), params.cu_seqlens_q_padded))

        model.register_forward_pre_hook(watch, with_kwargs=True)
        tokens, position = torch.zeros(2, 8, dtype=torch.int64), torch.arange(8).expand(2, 8)
        one = megatron_rl.get_logprobs(model, tokens[:1], position[:1])
        packing = types.ModuleType("megatron.rl.sequence_packing_utils")
        packing.get_default_packed_seq_params = None  # type: ignore[attr-defined]
        change.setitem(sys.modules, packing.__name__, packing)
        two = megatron_rl.get_logprobs(model, tokens[:1], position[:1])
        megatron_rl.get_logprobs(model, tokens, position)
        assert relative(two, one) < 1e-6
        return seen


def test_parameters_that_megatron_s_rl_makes(ranks) -> None:
    assert ranks(1).run(run_made_parameters)[0] == [None, ([0, 8], None), None]


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        (None, torch.float32),
        ({}, torch.float32),
        ({"bf16": True}, torch.bfloat16),
        ({"bf16": False, "fp16": True}, torch.float16),
    ],
    ids=str,
)
def test_the_dtype_that_megatron_s_rl_asserts(monkeypatch, flags: Any, dtype: torch.dtype) -> None:
    """By Megatron's arguments; that its own loop takes it is seen in `tests.trainers`."""

    def get_args() -> types.SimpleNamespace:
        assert flags is not None, "args is not initialized."
        return types.SimpleNamespace(**flags)

    global_vars = types.ModuleType("megatron.training.global_vars")
    global_vars.get_args = get_args  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, global_vars.__name__, global_vars)
    with megatron():
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
        tokens = torch.arange(12).view(2, 6)
        got = megatron_rl.get_logprobs(model, tokens, torch.arange(6).expand(2, 6))
        assert got.dtype == dtype
        got.float().sum().backward()
        assert all(g.abs().sum() > 0 for g in grads_of(model).values())
        monkeypatch.delitem(sys.modules, global_vars.__name__)
        exact = megatron_rl.get_logprobs(model, tokens, torch.arange(6).expand(2, 6))
    assert torch.equal(got, exact.to(dtype))


def test_batch_invariance_is_refused(monkeypatch) -> None:
    """Megatron's RL promises the inference engine's bits there, by a log-softmax of its own."""
    from megatron.core.transformer.custom_layers import batch_invariant_kernels

    logits, ids = torch.randn(2, 3, 11), torch.randint(0, 11, (2, 3))
    assert megatron_rl.selective_log_softmax(logits, ids).isfinite().all()
    # The flag alone: to enable it replaces torch's own matmuls by kernels for GPUs.
    monkeypatch.setattr(batch_invariant_kernels, "_batch_invariant_MODE", True)
    with pytest.raises(ValueError, match="batch-invariant mode: expected it off"):
        megatron_rl.selective_log_softmax(logits, ids)
    with pytest.raises(ValueError, match="batch-invariant mode: expected it off"):
        megatron_rl.get_logprobs(None, ids, None)


def test_selective_log_softmax() -> None:
    logits, index = torch.randn(2, 3, 11), torch.randint(0, 11, (2, 3))
    want = take(logits.double().log_softmax(-1), index)
    assert relative(megatron_rl.selective_log_softmax(logits, index), want) < 1e-6


# ---- settings ------------------------------------------------------------------------------------


class Node:
    """Attributes, as an args namespace or a dataclass has."""

    use_fused_kernels = True
    rollout_temperature = 0.9
    log_probs_chunk_size = -1


@pytest.mark.parametrize(("distribution", "version"), versions("verl"))
def test_settings_of_verl_s_own_configuration(distribution: str, version: str, caplog: Any) -> None:
    """As docs/frameworks/index.md has it; the rollout's temperature is in neither node."""
    name = "verl/trainer/config/_generated_ppo_megatron_trainer.yaml"
    text = (source_root(distribution, version) / name).read_text()
    nodes = yaml.safe_load(text)["actor_rollout_ref"]
    nodes["rollout"]["temperature"] = 0.6
    given = {"temperature": nodes["rollout"]["temperature"]}
    config = logprob_config(nodes["model"], nodes["actor"], **given)
    assert (config.temperature, config.fused, config.filtered) == (0.6, False, False)
    assert not caplog.records
    assert logprob_config(nodes["model"], nodes["actor"]).temperature == 1.0
    assert "temperature=, got none: it is 1.0" in caplog.text


def test_settings_of_the_frameworks() -> None:
    config = logprob_config(Node())
    assert (config.fused, config.temperature, config.chunk_size) == (True, 0.9, None)
    nemo = {"use_fused_linear_logprobs": False, "fused_linear_logprobs_chunk_size": 256}
    config = logprob_config(nemo, {"logprob_chunk_size": 1024, "temperature": None}, entropy=True)
    assert (config.fused, config.chunk_size, config.entropy) == (False, 256, True)
    assert logprob_config({"fused_lm_head_logprob": True, "top_k": -1, "top_p": 1.0}).fused is True
    with pytest.raises(ValueError, match="temperature"):
        logprob_config({"temperature": -1.0})
    with pytest.raises(ValueError, match=r"top_k: .*got '50'"):
        logprob_config({"top_k": "50"})
    with pytest.raises(ValueError, match="nodes with names, got str 'actor'"):
        logprob_config("actor")
    # Mappings that are no dicts, as OmegaConf's are, which this environment does not have.
    node = UserDict(log_probs_chunk_size=8, temperature=0.6)
    config = logprob_config(UserDict(use_fused_kernels=True), node)
    assert (config.fused, config.chunk_size, config.temperature) == (True, 8, 0.6)


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("top_k", -1, "top_k", None),
        ("top_k", 7, "top_k", 7),
        ("top_p", 0.9, "top_p", 0.9),
        ("min_p", 0.1, "min_p", 0.1),
        ("calculate_entropy", True, "entropy", True),
        ("calculate_sum_pi_squared", True, "sum_pi_squared", True),
        ("logprobs_chunk_size", 5, "chunk_size", 5),
        ("logprob_chunk_size", 0, "chunk_size", None),
    ],
)
def test_each_name_of_the_frameworks(name: str, value: Any, field: str, expected: Any) -> None:
    assert getattr(logprob_config({name: value}, temperature=1.0), field) == expected


def stage_without_a_head() -> bool:
    """What the model of a first pipeline stage gives goes on to the next."""
    with megatron(pp=2) as state:
        model = mm.build_gpt_model(tiny_config(num_layers=2), vocab_size=VOCAB)
        tokens, place = torch.zeros(2, 8, dtype=torch.int64), torch.arange(8).expand(2, 8)
        if state.is_pipeline_last_stage():
            model.set_input_tensor(torch.zeros(8, 2, model.config.hidden_size))
        got = megatron_rl.get_logprobs(model, tokens, place)
        return got.shape == ((2, 7) if model.post_process else (8, 2, model.config.hidden_size))


def test_a_stage_without_a_head_gives_what_its_model_does(ranks) -> None:
    assert ranks(2).run(stage_without_a_head) == [True, True]
