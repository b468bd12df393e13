"""Which of the frameworks' test files are run, and which of their tests are not applicable."""

from __future__ import annotations

from tests.peers.run import Suite
from tests.trainers import areal, megatron_rl, miles, nemo_rl, skyrl, slime

NO_CALL = "calls none of the functions that are replaced"
KERNEL = "needs a GPU kernel"
MOCK = "puts a mock into the framework's module, where the drop-in does not look"
OWN_COPY = "tests a reference function of the test file itself"
HELPER = "tests a private helper that the drop-in does not replace"

_AREAL = "areal.utils.functional.vocab_parallel:"
# A sentence of a framework's page.
_OUTSIDE = "An id outside the vocabulary is an error, where {} returns 0 for it."
_SKYRL_GPU = "tests/backends/skyrl_train/gpu/gpu_ci/megatron"
SUITES = (
    Suite(
        "areal",
        files={
            "tests/test_vocab_parallel_inplace.py": {
                "test_gather_logprobs_forwards_explicit_chunk_size": MOCK,
                "test_inplace_vocab_parallel_matches_reference_and_reuses_storage": KERNEL,
                "test_inplace_vocab_parallel_rejects_invalid_temperature": HELPER,
                "test_reuse_logits_accepts_full_storage_squeeze_view": KERNEL,
                "test_reuse_logits_rejects_partial_view": HELPER,
            },
            "tests/test_reassemble_cp_logprobs.py": {
                "TestReassembleGradientFlow": OWN_COPY,
                "TestReassembleGradientCorrectness::test_advanced*": HELPER,
                "TestReassembleGradientCorrectness": OWN_COPY,
                "TestSplitReassembleRoundtrip": OWN_COPY,
                "TestReassembleCpPackedLogprobs::test_reassemble_matches_reference": MOCK,
                "TestReassembleCpPackedLogprobs::test_gradient_flows_through_reassembly": MOCK,
                "TestSplitReassembleConsistencyWithMegatron": MOCK,
            },
        },
        needs=("areal",),
        absent=areal.ABSENT,
    ),
    Suite(
        "areal",
        files={
            "tests/torchrun/run_vocab_parallel.py": {
                "test_inplace_vocab_parallel_logprobs_entropy": KERNEL,
                "test_areal_lm_head_tensor_and_sequence_parallel": "needs a product with a float32 "
                "result from bfloat16, which torch has on GPUs only",
                "test_areal_lm_head_packed_dlogits_tensor_and_sequence_parallel": KERNEL,
                "test_chunked_fp32_lm_head_tensor_and_sequence_parallel": KERNEL,
            },
        },
        needs=("areal",),
        absent=areal.ABSENT,
        adapters={
            f"{_AREAL}_vocab_parallel_logprobs": "areal_logprobs",
            f"{_AREAL}_vocab_parallel_logprobs_entropy": "areal_logprobs_entropy",
        },
        megatron="core",
        ranks=2,
        start="setup_distributed_environment",
    ),
    Suite(
        "skyrl",
        files={
            "tests/backends/skyrl_train/distributed/test_chunked_logprob_backward_streaming.py": {},
            "tests/backends/skyrl_train/distributed/test_vocab_entropy_chunking.py": {
                "test_vocab_entropy_auto_chunk*": HELPER,
                "test_vocab_entropy_chunk_resolver_rejects_invalid_values": HELPER,
            },
            "tests/backends/skyrl_train/mtp/test_soft_ce.py": {
                "test_vocab_parallel_soft_ce*": HELPER,
                "test_draft_soft_ce_topk*": NO_CALL,
                "test_build_teacher_logits_rolls_and_detaches": NO_CALL,
                "test_shift_mask*": NO_CALL,
                "test_unpadded_vocab_shard_width": NO_CALL,
            },
            f"{_SKYRL_GPU}/test_chunked_logprob_backward.py": {
                "test_chunked_backward_uses_scatter_add_path": "counts calls of one of torch's "
                "functions in their own backward",
            },
            f"{_SKYRL_GPU}/test_fused_linear_logprob.py": {
                "test_fused_forward_matches_liger_flce": "needs Liger's Triton kernels",
                "test_fused_linear_logprob_tp[4]": "starts four ranks; [2] starts two",
            },
            f"{_SKYRL_GPU}/test_fused_linear_logprob_triton.py": {"*": KERNEL},
        },
        by_design={
            "tests/backends/skyrl_train/distributed/test_chunked_logprob_backward_streaming.py": {
                "*": _OUTSIDE.format("SkyRL"),
            },
            "tests/backends/skyrl_train/mtp/test_soft_ce.py": {
                "test_draft_losses_reject_attached_teacher": "Teacher logits that require a "
                "gradient are a `ValueError`, not an `AssertionError`.",
            },
            f"{_SKYRL_GPU}/test_chunked_logprob_backward.py": {
                "test_chunked_matches_non_chunked[True*": _OUTSIDE.format("SkyRL"),
                "test_chunked_matches_non_chunked_edge_cases[all_out*": _OUTSIDE.format("SkyRL"),
            },
            f"{_SKYRL_GPU}/test_fused_linear_logprob.py": {
                "test_fused_matches_materialized_logits_edge_cases[all_out*": _OUTSIDE.format(
                    "SkyRL"
                ),
            },
        },
        needs=("skyrl",),
        absent=(
            *skyrl.ABSENT,
            "ray",
            "httpx",
            "fastapi",
            "uvicorn",
            "vllm",
            "vllm_router",
            "datasets",
            "pandas",
            "peft",
            "hydra",
            "wandb",
            "openai",
            "starlette",
            "tqdm",
            "litellm",
            "flash_attn",
            "torchdata",
            "accelerate",
            "jinja2",
        ),
        prepare=("skyrl",),
    ),
    Suite(
        "nemo_rl",
        files={
            "tests/unit/distributed/test_distributed_logprob.py": {},
            "tests/unit/distributed/test_model_utils.py": {},
            "tests/unit/algorithms/test_loss_functions.py": {},
            "tests/unit/algorithms/test_sequence_packing_fusion.py": {},
        },
        needs=("verl",),
        absent=(*nemo_rl.ABSENT, "ray", "wandb", "datasets"),
        prepare=("nemo_rl",),
        megatron="core",
        devices=4,
    ),
    Suite(
        "slime",
        files={
            "tests/test_ppo_logprob_entropy.py": {},
            "tests/test_ppo_logprob_entropy_gpu.py": {},
            "tests/test_cp_utils.py": {},
            "tests/test_loss_cp_invariance.py": {},
            "tests/test_advantage_whiten_cp.py": {},
            "tests/test_metric_report_dist.py": {},
        },
        absent=slime.ENGINES,
    ),
    Suite(
        "miles",
        files={
            "tests/fast/utils/test_true_on_policy_logprobs.py": {},
            "tests/fast/backends/training_utils/test_cp_log_prob_assembly.py": {},
            "tests/fast/backends/training_utils/test_opd_cp_data.py": {},
            "tests/fast/backends/training_utils/test_ppo_cp_advantages.py": {},
            "tests/fast/backends/training_utils/test_true_on_policy_loss_metrics.py": {},
            "tests/fast/backends/training_utils/loss/test_training_logprob_reuse.py": {},
        },
        needs=("slime",),
        absent=(*slime.ENGINES, *miles.ABSENT),
    ),
    Suite(
        "verl",
        files={
            "tests/models/test_model_forward_fused.py": {},
            "tests/workers/test_megatron_distillation_only_on_cpu.py": {},
        },
        needs=("verl",),
        absent=("ray", "datasets", "pandas", "peft", "uvicorn", "fastapi"),
        megatron="core",
    ),
    Suite(
        "megatron_rl",
        files={
            "tests/unit_tests/rl/test_rl_utils.py": {},
            "tests/unit_tests/rl/test_rl_batch_invariant.py": {},
            "tests/unit_tests/rl/test_context_parallel.py": {},
        },
        absent=megatron_rl.ABSENT,
        prepare=("megatron_rl",),
        megatron="training",
        ranks=2,
    ),
)


def suites(framework: str = "") -> list[Suite]:
    """All suites, or a framework's."""
    return [suite for suite in SUITES if framework in ("", suite.framework)]
