"""`python -m mcore_logprobs doctor`: its report, its exit status, and that it notices mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from unittest import mock

import pytest
import torch

from mcore_logprobs import LogprobConfig, __main__, patch_model
from mcore_logprobs.debug import commands, doctor, oracle
from tests.helpers.documents import ROOT


def test_report_is_complete_and_passes() -> None:
    found = doctor.report()
    assert found["ok"]
    assert found["packages"]["torch"]["version"] == torch.__version__
    assert "version" in found["packages"]["megatron-core"]
    assert "not initialized" in found["groups"]["torch.distributed"]
    choices = {choice["name"]: choice for choice in found["backends"]["cpu"]["choices"]}
    assert choices["torch"]["available"]
    assert all(choice["reason"] for choice in choices.values())
    taken = set(found["backends"]["cpu"]["auto"].values())
    assert taken
    assert "compute_language_model_loss" in found["megatron"]["GPTModel"]
    checks = [test["name"] for test in found["self_test"]]
    for path in ("logits", "fused"):
        for dtype in ("float32", "bfloat16"):
            for value in ("logprob", "entropy", "rank"):
                assert f"{path} cpu {dtype} {value}" in checks
    assert any(name.endswith("dlogits") for name in checks)
    assert any(name.endswith("dweight") for name in checks)


def test_text_and_json_commands(capsys) -> None:
    assert __main__.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for heading in ("Packages", "Backends", "Megatron hooks", "Groups", "Self-test"):
        assert heading in text
    assert text.rstrip().endswith("All checks passed.")
    assert __main__.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_a_self_test_that_is_not_finite_is_strict_json(capsys, monkeypatch) -> None:
    monkeypatch.setattr(oracle, "entropy", lambda logits: logits.sum(-1) * torch.nan)
    assert __main__.main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["ok"] is False
    errors = {test["name"]: test["error"] for test in found["self_test"]}
    assert errors["logits cpu float32 entropy"] is None
    assert errors["logits cpu float32 logprob"] <= 1e-5


def test_unknown_command_is_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        __main__.main(["diagnose"])
    assert "doctor" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["logprobs", "entropy", "target_rank"])
def test_a_wrong_value_fails_the_self_test(field, monkeypatch, capsys) -> None:
    honest = doctor._on_logits

    def off_by_a_little(inputs, target, **options):
        stats = honest(inputs, target, **options)
        value = getattr(stats, field)
        setattr(stats, field, value + (1 if field == "target_rank" else 1e-4))
        return stats

    monkeypatch.setattr(doctor, "_on_logits", off_by_a_little)
    assert commands.doctor([]) == 1
    text = capsys.readouterr().out
    assert "OUT OF BOUND" in text
    assert text.rstrip().endswith("FAILED.")


def test_a_wrong_gradient_fails_the_self_test(monkeypatch) -> None:
    honest = doctor._on_hidden

    def half_the_gradient(inputs, target, **options):
        halves = tuple(x / 2 + x.detach() / 2 for x in inputs)
        return honest(halves, target, **options)

    monkeypatch.setattr(doctor, "_on_hidden", half_the_gradient)
    failed = {test.name for test in doctor.self_test() if not test.ok}
    kinds = {name.rpartition(" ")[2] for name in failed}
    assert {"dhidden", "dweight"} <= kinds
    assert "logprob" not in {
        name.rpartition(" ")[2] for name in failed if "float32" in name.split()
    }


def test_nan_is_out_of_bound() -> None:
    assert oracle.error(torch.tensor([float("nan")]), torch.zeros(1)) == float("inf")


def test_without_optional_packages() -> None:
    """Neither Megatron nor Triton nor Transformer Engine: reported with the real reason."""
    script = """
        import sys
        from importlib.machinery import ModuleSpec
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.split('.')[0] in ('megatron', 'triton', 'transformer_engine'):
                    return ModuleSpec(name, self)
            def create_module(self, spec):
                if spec.name == 'megatron':
                    raise ModuleNotFoundError("no megatron here")
                raise OSError(f"lib{spec.name}.so: cannot open shared object file")
            def exec_module(self, module):
                pass
        sys.meta_path.insert(0, Refuse())
        from mcore_logprobs.__main__ import main
        sys.exit(main(["doctor"]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "ModuleNotFoundError: no megatron here" in done.stdout
    assert "OSError: libtransformer_engine.so: cannot open shared object file" in done.stdout
    assert "All checks passed." in done.stdout


def test_hooks_are_read_off_the_classes(monkeypatch) -> None:
    from megatron.core.models.gpt import GPTModel

    def forward(self, input_ids): ...
    def forward_of_0_18(self, input_ids, output_processor=None): ...

    for method, there in (forward, False), (forward_of_0_18, True):
        monkeypatch.setattr(GPTModel, "forward", method)
        assert ("output_processor" in doctor._megatron_hooks()["GPTModel"]) == there


def test_invariance_that_does_not_hold(monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "self_test", lambda device: [])
    for holds, last in ((True, "All checks passed."), (False, "Batch invariance FAILED.")):
        found = {"forward across TP": True, "across rows": holds}
        monkeypatch.setattr(doctor, "_guarantees", lambda device, found=found: found)
        assert bool(commands.doctor(["--full"])) is not holds
        assert capsys.readouterr().out.rstrip().endswith(last)


@pytest.mark.night
def test_hooks_of_the_newest_megatron() -> None:
    """Found by looking at the classes, so the same code sees what 0.19 has and 0.16 has not."""
    unpacked = os.environ.get("MCORE_LOGPROBS_MEGATRON_019")
    assert unpacked, "MCORE_LOGPROBS_MEGATRON_019 is not set: run tests/run.sh"
    script = """
import json
from mcore_logprobs.debug import doctor
version = doctor._package("megatron-core", "megatron.core")["version"]
print(json.dumps([version, doctor._megatron_hooks()]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([unpacked, str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    version, hooks = json.loads(done.stdout.splitlines()[-1])
    assert version == "0.19.2"
    assert "output_processor" in hooks["GPTModel"]
    assert "compute_language_model_loss" in hooks["HybridModel"]
    assert "output_processor" not in hooks["HybridModel"]


def groups_seen_by_a_rank() -> dict[str, object]:
    found = doctor.report()
    return {"groups": found["groups"], "self_test": found["self_test"], "ok": found["ok"]}


def test_under_several_ranks(ranks) -> None:
    for rank, found in enumerate(ranks(2).run(groups_seen_by_a_rank)):
        assert f"rank {rank} of 2" in found["groups"]["torch.distributed"]
        assert found["self_test"] == []  # a shard must not be judged as a whole vocabulary


def head_of_a_model(adapter: bool, tokens: int | None = None, vocab_size: int | None = None) -> str:
    from mcore_logprobs.cpu_megatron import models as mm
    from mcore_logprobs.cpu_megatron.runtime import cpu_runtime

    with cpu_runtime():
        mm.init_model_parallel()
        try:
            model = mm.build_gpt_model(mm.transformer_config(), vocab_size=64)
            if adapter:
                model.output_layer = torch.nn.Sequential(model.output_layer)
            if tokens is None:
                return str(doctor.report(torch.nn.Sequential(model))["head"])
            with (
                mock.patch.object(doctor, "tokenizer_size", return_value=tokens or None),
                patch_model(model, LogprobConfig(vocab_size=vocab_size)) as handle,
            ):
                if vocab_size is None:
                    handle.remove()
                elif vocab_size == 61:  # of the model's config, before a patch
                    handle.remove()
                    model.config.logprob_vocab_size = vocab_size
                return str(doctor.report(model)["vocabulary"])
        finally:
            mm.destroy_model_parallel()


def test_says_whether_a_model_s_head_can_be_fused(ranks) -> None:
    assert ranks(1).run(head_of_a_model, False) == ["fused"]
    (reason,) = ranks(1).run(head_of_a_model, True)
    assert reason.startswith("logits path: the output layer is a Sequential")


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "said"),
    [
        (0, None, "all 64 columns count, padding too, unless vocab_size says otherwise"),
        (60, 61, "61 of 64 columns count (vocab_size=61)"),
        (60, None, "WARNING all 64 columns count, of which 4 are padding: pass vocab_size=60"),
        (64, None, "all 64 columns count; the tokenizer has as many"),
        (60, 60, "60 of 64 columns count (vocab_size=60)"),
    ],
    ids=["no tokenizer", "of the config", "padded", "whole", "given"],
)
def test_says_which_columns_count(ranks, tokens, vocab_size, said):
    assert ranks(1).run(head_of_a_model, False, tokens, vocab_size) == [said]
