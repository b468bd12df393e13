"""Real `megatron.training.pretrain` runs, patched against unpatched, on the release on the path.

    PYTHONPATH=<unpacked wheel>:. python -m pytest tests/megatron/pretrain_checks.py

Not collected by its name: the wheels that ship `megatron.training` (from 0.17) are not what pip
installs on Python 3.11. `test_newer_megatron.py` runs it on the newest.

A run is `pretrain_script.py` as `__main__` in every rank: training, validation and checkpoints by
Megatron's own loop. What Megatron hands to its log (losses, gradient norm) is compared.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import os
import re
import runpy
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mcore_logprobs import run
from mcore_logprobs.cpu_megatron.models import all_groups, end_groups
from mcore_logprobs.cpu_megatron.training import cpu_training
from mcore_logprobs.megatron.heads import find_language_models
from mcore_logprobs.megatron.imports import PassedArguments, replace_function
from tests.helpers.distributed import preloaded

preloaded.append("tests.megatron.training_imports")
SCRIPT = str(Path(__file__).with_name("pretrain_script.py"))
FLAGS = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --position-embedding-type rope --no-rope-fusion
--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 4
--train-iters 4 --eval-iters 1 --eval-interval 2 --log-interval 1 --lr 2e-3 --lr-decay-iters 8
--adam-eps 1e-4 --make-vocab-size-divisible-by 1 --tokenizer-type NullTokenizer
--mock-data --num-workers 0 --distributed-backend gloo --disable-gloo-process-groups
--use-cpu-initialization --transformer-impl local --attention-backend unfused
--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
--no-gradient-accumulation-fusion --no-persist-layer-norm --ckpt-format torch
"""
TP_SP = "--tensor-model-parallel-size 2 --sequence-parallel"
PP_VPP_MTP = """
--pipeline-model-parallel-size 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2
--mtp-num-layers 1
"""
PATCH = "--logprob-output loss --logprob-fused require --logprob-backend torch"


def own_way() -> str:
    """The way in that a script of its own takes on this release: by the signature of `pretrain`."""
    with cpu_training():
        from megatron.training import pretrain

        takes = inspect.signature(pretrain).parameters
    return "hook" if takes["model_provider"].default is None else "provider"


@contextlib.contextmanager
def recording() -> Iterator[dict[str, Any]]:
    """What Megatron hands to its training and validation logs, unrounded, and what it printed."""
    with cpu_training(), contextlib.ExitStack() as undo:
        import megatron.training.training as training

        kept: dict[str, Any] = {"losses": [], "norms": [], "validation": []}

        def log(given: PassedArguments) -> None:
            losses = {k: mean(v) for k, v in given.get("loss_dict").items()}
            kept["losses"].append(losses)
            kept["norms"].append(float(given.get("grad_norm")))

        def evaluating(given: PassedArguments) -> None:
            models = find_language_models(given.get("model"))
            kept["patched"] = ["compute_language_model_loss" in vars(m) for m in models]

        def evaluated(result: Any) -> None:
            kept["validation"].append({k: mean(v) for k, v in (result[0] or {}).items()})

        undo.enter_context(torch.compiler.set_stance("force_eager"))  # Megatron's fusions
        undo.callback(replace_function(training, "training_log", before=log))
        undo.callback(replace_function(training, "evaluate", before=evaluating, after=evaluated))
        printed = undo.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield kept
        kept["printed"] = printed.getvalue()


def mean(value: Any) -> float:
    """A logged value: a mean, or a sum and a count."""
    value = torch.as_tensor(value, dtype=torch.float64).flatten()
    return float(value[0] / value[1]) if value.numel() == 2 else float(value)


def added_token() -> int:
    """How many tokens this release's NullTokenizer adds to --vocab-size."""
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    return int(NullTokenizer(64).vocab_size) - 64


def pretrain(way: str, flags: str) -> dict[str, Any]:
    """On every rank: one run of the script. `way` is "run", or the script's own `--way`."""
    ours = [*FLAGS.split(), "--vocab-size", str(64 - added_token()), *flags.split()]
    groups, argv = all_groups(), sys.argv
    # Python 3.11.0 to 3.11.3 pickle the enums of Megatron's arguments by getattr, which torch.load
    # takes from trusted files alone.
    trusted = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    environment = mock.patch.dict(os.environ, MASTER_ADDR="localhost", **trusted)
    try:
        with environment, recording() as kept, contextlib.redirect_stderr(io.StringIO()) as stderr:
            for name in [name for name in os.environ if name.startswith("NVTE_")]:
                del os.environ[name]  # a model's attention backend sets them, and wants its own
            from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

            MTPLossLoggingHelper.tracker.clear()  # it names another test's process groups
            if way == "run":
                kept["status"] = run.main([SCRIPT, *ours])
            else:
                sys.argv = [SCRIPT, "--way", way, *ours]
                runpy.run_path(SCRIPT, run_name="__main__")
        kept["stderr"] = stderr.getvalue()
        return kept
    finally:
        sys.argv = argv
        from megatron.training.training import destroy_global_state

        with contextlib.suppress(AttributeError, AssertionError):
            destroy_global_state()
        end_groups(g for g in all_groups() if g not in groups)


def assert_equal_logs(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Six digits of every logged value, on the rank that logs them (the last).

    That rank has the head; it is patched in the one and not in the other.
    """
    got, expected = got[-1], expected[-1]
    assert len(expected["losses"]) > 0
    assert len(expected["validation"]) > 0
    assert all(expected["losses"])
    assert got["patched"][-1]
    assert not any(expected["patched"])
    for name in ("losses", "validation"):
        assert [d.keys() for d in got[name]] == [d.keys() for d in expected[name]]
        for ours, theirs in zip(got[name], expected[name], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)
    assert got["norms"] == pytest.approx(expected["norms"], rel=1e-6)


def test_the_cpu_shims_are_taken_back():
    owners = [typing, torch, torch.cuda, torch.Tensor, torch.nn.Module]
    with cpu_training():  # imports Megatron, which adds what stays
        from megatron.core.datasets import utils
        from megatron.training import training

        owners += [utils, training]
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    before = [dict(vars(owner)) for owner in owners]
    with cpu_training(), cpu_training():
        assert [dict(vars(owner)) for owner in owners] != before
    assert [dict(vars(owner)) for owner in owners] == before
    assert torch.ones(1).type() == "torch.FloatTensor"


def test_training_validation_and_resume(ranks, tmp_path):
    """TP 2 with SP: every logged value, and each run's checkpoint resumed by the other."""
    pool = ranks(2)

    def flags(folder: str, patched: bool, resumed: bool = False) -> str:
        kept = tmp_path / folder
        load = f"--load {kept} --ckpt-step 2" if resumed else f"--save {kept} --save-interval 2"
        return f"{TP_SP} {load} {PATCH if patched else ''}"

    expected = pool.run(pretrain, "none", flags("none", False))
    for way in ("run", own_way()):
        got = pool.run(pretrain, way, flags(way, True))
        assert_equal_logs(got, expected)
        assert len(got[-1]["losses"]) == 4
    for way, saved_by in (("run", "none"), ("none", "run"), ("none", own_way())):
        resumed = pool.run(pretrain, way, flags(saved_by, way != "none", resumed=True))[-1]
        assert len(resumed["losses"]) == 2
        for ours, theirs in zip(resumed["losses"], expected[-1]["losses"][2:], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)
        assert resumed["norms"] == pytest.approx(expected[-1]["norms"][2:], rel=1e-6)


def test_pipeline_with_virtual_stages_and_mtp(ranks):
    """Each rank patches the one head there is; the multi-token loss is logged alike.

    Chunks of a provider are patched one by one, while their constructors wait for other stages.
    """
    pool = ranks(2)
    expected = pool.run(pretrain, "none", PP_VPP_MTP)
    assert "mtp_1 loss" in expected[-1]["printed"]
    for way in ("run", "provider-alone"):
        got = pool.run(pretrain, way, f"{PP_VPP_MTP} {PATCH}")
        assert_equal_logs(got, expected)
        assert mtp_losses(got) == pytest.approx(mtp_losses(expected), rel=1e-6)


def mtp_losses(runs: list[dict[str, Any]]) -> list[float]:
    found = [float(n) for n in re.findall(r"mtp_1 loss: (\S+)", runs[-1]["printed"])]
    assert len(found) == 4
    return found


def test_padding_is_masked_by_the_tokenizers_size(ranks):
    """61 tokens (62 where the tokenizer adds one) in 64 or more columns."""
    pool = ranks(1)
    padded = "--vocab-size 61 --make-vocab-size-divisible-by 32 --train-iters 1"
    plain = pool.run(pretrain, "none", padded)[-1]["losses"][0]["lm loss"]
    masked = pool.run(pretrain, "run", f"{padded} {PATCH}")[-1]
    counted = pool.run(pretrain, "run", f"{padded} {PATCH} --logprob-vocab-size 64")[-1]
    assert counted["losses"][0]["lm loss"] == pytest.approx(plain, rel=1e-6)
    # Weights start small: leaving out 2 or 3 of 64 nearly equal probabilities.
    kept = 61 + pool.run(added_token)[-1]
    assert masked["losses"][0]["lm loss"] - plain == pytest.approx(math.log(kept / 64), abs=2e-3)
    assert abs(math.log(kept / 64)) > 0.02


def test_a_provider_is_used_or_raises(ranks):
    """Where the container's model config builds the model a provider is ignored: an error then."""
    pool = ranks(1)
    if own_way() == "hook":
        (error,) = pool.run_expecting_errors(pretrain, "provider", PATCH)
        assert isinstance(error, ValueError)
        assert "pre_wrap_hooks" in str(error)
    (alone,) = pool.run(pretrain, "provider-alone", f"{PATCH} --train-iters 1")
    assert alone["patched"] == [True]


def test_run_raises_before_training_where_no_model_was_patched(ranks):
    pool = ranks(1)
    (got,) = pool.run(pretrain, "run", f"--way other-model {PATCH}")
    assert got["status"] == 1
    assert "no model was patched" in got["stderr"]
    assert "was seen there: expected a Megatron GPTModel" in got["stderr"]
    assert not got["losses"]


def own_parser(script: str) -> tuple[int, str]:
    """On a rank: exit status and stderr of `run` on a script whose parser ignores the flags."""
    with cpu_training(), contextlib.redirect_stderr(io.StringIO()) as stderr:
        status = run.main([script, *PATCH.split()])
    return status, stderr.getvalue()


@pytest.mark.parametrize("megatron", ["", "from megatron.training import arguments"])
def test_run_ends_with_an_error_where_the_parser_never_saw_the_flags(ranks, tmp_path, megatron):
    script = tmp_path / "script.py"
    script.write_text(
        f"import argparse\n{megatron}\nargparse.ArgumentParser().parse_known_args()\n"
    )
    ((status, stderr),) = ranks(1).run(own_parser, str(script))
    assert status == 1
    assert "which never saw the flags" in stderr
