"""miles' actor in process, without Ray: its arguments, rollout manager and train actor.

As in `tests.trainers.slime`, from which the model, the rollouts and the command line are. miles is
a repository: `MCORE_LOGPROBS_PEERS` names the folder with a checkout of it in `miles`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from mcore_logprobs.cpu_megatron.bridged import bridged_block_spec
from mcore_logprobs.cpu_megatron.training import cpu_training
from tests.trainers import slime
from tests.trainers.absent import stand_in
from tests.trainers.frame import How, Row, Trace, checkout
from tests.trainers.half import dtype, rounded_alike

NOW = (
    "miles.backends.training_utils.loss_hub.logit_processors: get_log_probs_and_entropy: now those "
    "of mcore_logprobs.dropin.miles"
)


# What miles imports and the path under test does not use.
ABSENT = ("polars", "setproctitle", "uvicorn", "fastapi", "starlette", "mooncake")


def paths(row: Row) -> list[Path] | str:
    """miles' checkout."""
    folder = checkout("miles")
    return [folder] if folder else "no checkout of miles: tests/run.sh --all --peers DIR"


def arguments(row: Row, how: How) -> list[str]:
    given = slime.arguments(row, dataclasses.replace(how, switched=False))
    given = [word.replace("tests.trainers.slime", "tests.trainers.miles") for word in given]
    at = given.index("--rollout-data-postprocess-path")
    del given[at : at + 2]
    # miles reads Hugging Face's weights by Megatron-Bridge: here the model starts from a seed.
    for name in ("--load", "--ref-load"):
        given[given.index(name) + 1] = f"{how.folder}/empty"
    given += ["--init-method-std", "0.3", "--disable-rollout-global-dataset"]
    if how.switched:
        given += ["--custom-megatron-init-path", "mcore_logprobs.dropin.switch.miles"]
    return given


def cpu_layers(args: Any, config: Any, vp_stage: int | None) -> Any:
    """For --spec, as in `tests.trainers.slime`."""
    return bridged_block_spec(config, vp_stage=vp_stage)


def prepare(row: Row, folder: Path) -> None:
    """Writes the inputs, and imports miles: its switch acts when Megatron has been initialized."""
    slime.write_inputs(row, folder)
    (folder / "empty").mkdir()
    slime.ray_in_process()
    stand_in(*slime.ENGINES, *ABSENT)
    with cpu_training():
        tokenizers_of_before()
        float32_gradient()
        import miles.backends.megatron_utils.actor  # type: ignore[import-not-found]
        import miles.ray.rollout.rollout_manager  # type: ignore[import-not-found]  # noqa: F401


def drive(row: Row, how: How) -> Trace:
    """Through miles' rollout manager and actor, as `train.py` calls them."""
    import numpy

    with cpu_training(), mock.patch.object(numpy, "__version__", "1." + numpy.__version__):
        return train(row, how)


def train(row: Row, how: How) -> Trace:
    from miles.backends.megatron_utils import actor as actors
    from miles.ray.rollout.rollout_manager import RolloutManager
    from miles.utils import arguments as parser
    from miles.utils import dumper_utils, object_store
    from miles.utils.ft_utils.indep_dp import IndepDPInfo
    from miles.utils.reloadable_process_group import ReloadableProcessGroup
    from miles.utils.tracking_utils import tracking

    slime.forward_new_names(ReloadableProcessGroup)
    one_object_store(object_store)
    dumper_utils.DumperConfig = NoDumps
    sys.argv = ["train.py", *arguments(row, how)]
    parser.sglang_validate_args = lambda args: None  # of the rollout's engine, which is not there
    args = parser.parse_args()
    args.enable_gloo_process_groups = args.use_gloo_process_groups  # its name before 0.19
    if dtype(row) is torch.float32:
        args.bf16, args.params_dtype = False, torch.float32
    trace = Trace()
    watch(actors, tracking, trace)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    actor = actors.MegatronTrainRayActor(args, world, rank, *address, "", "actor", 0)
    alone = IndepDPInfo.create_trivial()
    with_ref = bool(args.use_kl_loss or args.kl_coef)
    actor.init(args, "actor", with_ref=with_ref, indep_dp_info=alone)
    manager = RolloutManager(args, None)
    manager.set_train_parallel_config(actor.train_parallel_config)
    before = slime.parameters(actor)
    with slime.step_watched(row, trace):
        for rollout in range(slime.ROLLOUTS):
            pack = asyncio.run(manager.generate(rollout))
            actor.train(rollout, pack["data_ref"])
    trace.parameters = slime.parameters(actor)
    trace.moved = max(float((trace.parameters[k] - x).abs().max()) for k, x in before.items())
    return trace


def watch(actors: Any, tracking: Any, trace: Trace) -> None:
    """Keeps what miles logs: the rollout's log-probabilities, and the metrics of each update."""
    log_rollout = actors.log_rollout_data

    def rollout_data(rollout: int, args: Any, data: dict[str, Any]) -> None:
        for name in ("log_probs", "ref_log_probs"):
            trace.logprobs += [x.clone() for x in data.get(name, ())]
        trace.entropy += [x.clone() for x in data.get("entropy", ())]
        log_rollout(rollout, args, data)

    def metrics(args: Any, found: dict[str, Any], step_key: str) -> None:
        slime.keep_metrics(args, found, step_key)

    actors.log_rollout_data = rollout_data
    tracking.log = metrics
    slime._trace = trace


class NoDumps:
    """sglang's dumper of intermediate tensors, off."""

    @staticmethod
    def _kv_pairs_to_dict(pairs: Any) -> dict[str, Any]:
        return {}


def float32_gradient() -> None:
    """Megatron's fused cross entropy, which miles calls, rounds every gradient to bfloat16."""
    from megatron.core.fusions import fused_cross_entropy as fused

    parts = fused.VocabParallelCrossEntropy

    def gradients(softmax: Any, upstream: Any, mask: Any, target: Any) -> Any:
        rows, place, update, result = parts.prepare_gradient_calculation_operands(softmax, mask)
        return parts.calculate_gradients(rows, place, target, update, result, upstream)

    fused.calculate_gradients = gradients


def tokenizers_of_before() -> None:
    """miles' fork of Megatron has the padding of the vocabulary where it was before 0.19."""
    from megatron.core.tokenizers.utils import build_tokenizer

    package = types.ModuleType("megatron.training.tokenizer")
    package.tokenizer = types.ModuleType("megatron.training.tokenizer.tokenizer")  # type: ignore
    package.tokenizer._vocab_size_with_padding = build_tokenizer.vocab_size_with_padding
    sys.modules |= {package.__name__: package, package.tokenizer.__name__: package.tokenizer}


def one_object_store(object_store: Any) -> None:
    """miles' rollout manager and actor are processes of their own, each with a store."""
    init = object_store.init_instance

    def once(args: Any, **options: Any) -> Any:
        return object_store._INSTANCE or init(args, **options)

    object_store.init_instance = once


def row(layout: str, option: str = "GRPO", **settings: Any) -> Row:
    given = slime.row(layout, option, **settings)
    return dataclasses.replace(given, framework="miles", log=(NOW,))


ROWS = [
    row("TP 1"),
    row("TP 2", "GRPO, chunks, lazy logits at V 8192", **slime.LAZY),
    row("TP 2", "GRPO, chunks", options=slime.CHUNKS),
    row("TP 2", "GSPO, padded batches", options=slime.GSPO | {"qkv-format": "bshd"}),
    row("TP 2 x SP", "GSPO, TIS", options=slime.GSPO, flags=["use-tis", "sequence-parallel"]),
    row("CP 2", "GRPO, chunks", options=slime.CHUNKS),
    row("PP 2", "GRPO, TIS", flags=["use-tis"]),
    row("DP 2", "GRPO, dynamic batches", options=slime.DYNAMIC, flags=["use-dynamic-batch-size"]),
    rounded_alike(row("TP 2", "GRPO, chunks", options=slime.CHUNKS), real=True),
    rounded_alike(row("TP 2", "GRPO, chunks, lazy logits at V 8192", **slime.LAZY)),
]
