"""What the release matrix checks of a Megatron-Core: a short check per feature, by tests' means.

`release_matrix.py` runs these on every supported release, `test_release_matrix.py` on the
installed one. A feature that a release lacks says so by `missing`, which looks at Megatron's own
classes and signatures and never at a version; every other way not to pass is a failure.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.megatron.versions import has_output_processor, takes
from tests.helpers.distributed import get_pool
from tests.megatron import (
    newer_checks,
    test_expert_parallel,
    test_hybrid,
    test_llava,
    test_megatron_fsdp,
    test_mtp,
    test_patch,
    test_pipeline,
)
from tests.megatron.common import MOE

TOLERANCE = 1e-5  # relative, float32, patched against unpatched


@dataclasses.dataclass(frozen=True)
class Feature:
    """`check` raises where the patched model is wrong; `missing` says what a release lacks."""

    name: str
    check: Callable[[], None]
    missing: Callable[[], str]


FEATURES: list[Feature] = []


def feature(
    name: str, missing: Callable[[], str] = lambda: ""
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(check: Callable[[], None]) -> Callable[[], None]:
        FEATURES.append(Feature(name, check, missing))
        return check

    return add


def agree(world: int, compare: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Run a test's rank function and hold each rank's errors to the tolerance."""
    for rank, found in enumerate(get_pool(world).run(compare, *args, **kwargs)):
        errors = found if isinstance(found, dict) else {"error": found}
        for name, error in errors.items():
            assert error < TOLERANCE, f"rank {rank}: {name} is off by {error:.3g}"


@feature("fused head, TP 2")
def fused() -> None:
    agree(2, test_patch.compare, 2, 1, False, {"fused": "require", "entropy": True})


@feature("logits path, TP 2")
def logits_path() -> None:
    agree(2, test_patch.compare, 2, 1, False, {"fused": False, "entropy": True})


@feature('`output="loss"`')
def loss_output() -> None:
    agree(2, test_patch.compare, 2, 1, True, {"output": "loss"})


@feature("every statistic against float64")
def statistics() -> None:
    settings = {"entropy": True, "target_rank": True, "temperature": 0.7, "softcap": 5.0}
    settings |= {"vocab_size": 91, "fused": "require", "sum_pi_squared": True}
    agree(2, test_patch.all_outputs, 2, True, settings)


@feature("sequence parallelism")
def sequence_parallelism() -> None:
    agree(2, test_patch.compare, 2, 1, True, {"fused": "require"})


@feature("untied embeddings")
def untied() -> None:
    agree(2, test_patch.compare, 2, 1, True, {"fused": "require"}, tied=False)


@feature("CP 2 (zigzag)")
def context_parallelism() -> None:
    agree(2, test_patch.compare, 1, 2, False, {"fused": "require"})


@feature("packed sequences (THD), CP 2")
def packed() -> None:
    agree(2, test_patch.compare, 1, 2, False, {"fused": "require"}, packed=True)


@feature("activation recompute")
def recompute() -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    agree(2, test_patch.compare, 2, 1, True, {}, recompute_num_layers=1, **full)


@feature("PP 2, tied")
def pipeline() -> None:
    agree(2, test_pipeline.compare, {"pp": 2})


@feature("interleaved pipeline, 2 by 2")
def interleaved() -> None:
    agree(2, test_pipeline.compare, {"pp": 2, "vp": 2})


@feature("DDP, overlapped reduction")
def overlapped() -> None:
    agree(2, test_pipeline.compare, {"tp": 2}, ddp={"overlap_grad_reduce": True})


@feature("Megatron-FSDP")
def megatron_fsdp() -> None:
    agree(2, test_megatron_fsdp.errors, 1, "stats", "wrap")
    agree(2, test_megatron_fsdp.errors, 1, "policy", "patch")


def no_second_version() -> str:
    adapter = importlib.import_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
    found = hasattr(adapter, "FullyShardedDataParallelV2")
    return "" if found else "there is no FullyShardedDataParallelV2"


@feature("Megatron-FSDP v2", no_second_version)
def second_version() -> None:
    agree(2, test_megatron_fsdp.version_2)


@feature("gradient accumulation fusion")
def main_grad() -> None:
    agree(2, test_patch.main_grad_fusion, True, False)


@feature("MTP, TP 2 with SP")
def multi_token() -> None:
    agree(2, test_mtp.compare, 2, 1, True, {"fused": "require"})


def no_packed_mtp() -> str:
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    found = takes(roll_tensor, "packed_seq_params")
    return "" if found else "multi-token prediction's roll_tensor has no packed_seq_params"


@feature("MTP, packed", no_packed_mtp)
def multi_token_packed() -> None:
    agree(2, test_mtp.compare, 2, 1, True, {}, packed=True)


@feature("MTP, PP 2")
def multi_token_pipeline() -> None:
    agree(2, test_pipeline.compare, {"pp": 2}, mtp=True)


@feature("experts, EP 2")
def experts() -> None:
    agree(2, test_expert_parallel.compare, {"ep": 2}, MOE, settings={"fused": "require"})


@feature("experts, TP 2 by EP 2")
def experts_and_tensors() -> None:
    agree(2, test_expert_parallel.compare, {"tp": 2, "ep": 2, "etp": 1}, MOE)


@feature("multi-latent attention")
def latent_attention() -> None:
    agree(2, test_expert_parallel.compare, {"cp": 2}, test_expert_parallel.MLA)


def no_scaling() -> str:
    from megatron.core.models.common.language_module.language_module import LanguageModule

    found = hasattr(LanguageModule, "_scale_logits")
    return "" if found else "LanguageModule has no _scale_logits"


@feature("scaled logits (MuP)", no_scaling)
def scaled() -> None:
    agree(2, test_patch.compare, 2, 1, True, {"fused": "require"}, **newer_checks.MUP)


def no_output_dtype() -> str:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    found = takes(ColumnParallelLinear.__init__, "output_dtype")
    return "" if found else "ColumnParallelLinear has no output_dtype"


@feature("logits in float32 of a bfloat16 model (`output_dtype`)", no_output_dtype)
def wider_logits() -> None:
    agree(2, newer_checks.in_another_dtype, 2, torch.bfloat16, torch.float32)


def no_processor() -> str:
    from megatron.core.models.gpt import GPTModel

    return "" if has_output_processor(GPTModel) else "GPTModel.forward has no output_processor"


@feature("`output_processor`", no_processor)
def output_processor() -> None:
    agree(2, newer_checks.through_the_hook, 2, True, True, {}, {})


def no_hybrid_class() -> str:
    found = importlib.util.find_spec("megatron.core.models.hybrid")
    return "" if found else "there is no HybridModel yet, but MambaModel"


@feature("HybridModel", no_hybrid_class)
def hybrid_class() -> None:
    hybrid()


@feature("hybrid (Mamba, attention, MLP), TP 2 with SP")
def hybrid() -> None:
    agree(2, test_hybrid.compare, {"tp": 2}, "M*-M", settings={"fused": "require"})


@feature("hybrid, logits path, untied")
def hybrid_logits() -> None:
    agree(2, test_hybrid.compare, {"tp": 2}, "M*-M", settings={"fused": False}, tied=False)


@feature("hybrid, CP 2")
def hybrid_context() -> None:
    agree(2, test_hybrid.compare, {"cp": 2}, "M*-M")


@feature("hybrid, PP 2")
def hybrid_pipeline() -> None:
    agree(2, test_hybrid.schedule, {"pp": 2}, "M*M-")


def hybrid_lacks(method: str, parameter: str) -> Callable[[], str]:
    def missing() -> str:
        model_class, _ = mm.hybrid_model_class()
        if takes(getattr(model_class, method), parameter):
            return ""
        return f"{model_class.__name__}.{method} has no {parameter}"

    return missing


def stack_lacks(field: str) -> Callable[[], str]:
    def missing() -> str:
        _, block = mm.hybrid_model_class()
        parts = getattr(block, "HybridStackSubmodules", None) or block.MambaStackSubmodules
        if field in {known.name for known in dataclasses.fields(parts)}:
            return ""
        return f"{parts.__name__} has no {field}"

    return missing


@feature("hybrid, packed, CP 2", hybrid_lacks("forward", "packed_seq_params"))
def hybrid_packed() -> None:
    agree(2, test_hybrid.compare, {"cp": 2}, "M*-M", packed=True)


@feature("hybrid, interleaved pipeline", hybrid_lacks("__init__", "vp_stage"))
def hybrid_interleaved() -> None:
    agree(2, test_hybrid.schedule, {"pp": 2, "vp": 2}, "M|*-|M|*-")


@feature("hybrid, with experts, EP 2", stack_lacks("moe_layer"))
def hybrid_experts() -> None:
    agree(2, test_hybrid.compare, {"ep": 2}, "M*E")


@feature("hybrid, with MTP", stack_lacks("mtp_block_spec"))
def hybrid_multi_token() -> None:
    agree(2, test_hybrid.multi_token, {"tp": 2})


@feature("LLaVAModel, TP 2")
def vision_language() -> None:
    agree(2, test_llava.compare, 2, True, {"fused": "require"})
