"""Which of the frameworks' test files are run, and which of their tests are not applicable."""

from __future__ import annotations

from tests.peers.run import Suite
from tests.trainers import areal, megatron_rl, miles, nemo_rl, skyrl, slime

NO_CALL = "calls none of the functions that are replaced"
KERNEL = "needs a GPU kernel"
MOCK = "puts a mock into the framework's module, where the drop-in does not look"
OWN_COPY = "tests a reference function of the test file itself"
EIGHT = "starts eight ranks; others start two and four"
HELPER = "tests a private helper that the drop-in does not replace"

_AREAL = "areal.utils.functional.vocab_parallel:"
# A sentence of its page.
_SKYRL_OUTSIDE = "An id outside the vocabulary is an error, where SkyRL returns 0 for it."
_NO_MEGATRON = "runs without Megatron, whose groups the drop-in takes"
_VERL = ("ray", "datasets", "pandas", "peft", "uvicorn", "fastapi")
_SERVICES = (  # SkyRL's tests import them, and use none
    "ray httpx fastapi uvicorn vllm vllm_router datasets pandas peft hydra wandb openai starlette "
    "tqdm litellm flash_attn torchdata accelerate jinja2"
)
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
                "*": _SKYRL_OUTSIDE,
            },
            "tests/backends/skyrl_train/mtp/test_soft_ce.py": {
                "test_draft_losses_reject_attached_teacher": "Teacher logits that require a "
                "gradient are a `ValueError`, not an `AssertionError`.",
            },
            f"{_SKYRL_GPU}/test_chunked_logprob_backward.py": {
                "test_chunked_matches_non_chunked[True*": _SKYRL_OUTSIDE,
                "test_chunked_matches_non_chunked_edge_cases[all_out*": _SKYRL_OUTSIDE,
            },
            f"{_SKYRL_GPU}/test_fused_linear_logprob.py": {
                "test_fused_matches_materialized_logits[*dtype0-weight_dtype0-False*": "From "
                "bfloat16 operands the fused path computes float32 logits, where SkyRL rounds them "
                "to bfloat16.",
                "test_fused_matches_materialized_logits[*-True-*": _SKYRL_OUTSIDE,
                "test_fused_matches_materialized_logits_edge_cases[all_out*": _SKYRL_OUTSIDE,
                "test_fused_linear_logprob_tp": "That share is the whole gradient divided by TP, "
                "where SkyRL's is of the rank's own columns; the sums agree.",
            },
        },
        needs=("skyrl",),
        absent=(*skyrl.ABSENT, *_SERVICES.split()),
        prepare=("skyrl",),
    ),
    Suite(
        "nemo_rl",
        files={
            "tests/unit/distributed/test_distributed_logprob.py": {
                "test_get_next_token_logprobs_chunking_reduces_memory": "measures a GPU's memory",
            },
            "tests/unit/distributed/test_model_utils.py": {
                "test_sampling_params_top_k_top_p": NO_CALL,
            },
            "tests/unit/algorithms/test_loss_functions.py": {
                "test_distillation_loss_different_settings": "expects numbers of a GPU's generator",
                "test_vocab_parallel_gather_columns_tp_sharded": MOCK,
                "test_clipped_pg_loss_cispo_incompatibility_asserts": NO_CALL,
                "test_calculate_kl*": NO_CALL,
                "test_clipped_pg_loss_kl_gradient_includes_sampling_term": NO_CALL,
                "test_clipped_pg_loss_reports_is_oob_ratio_tis": NO_CALL,
                "test_clipped_pg_loss_rejects_tis_min_above_max": NO_CALL,
                "test_clipped_pg_loss_tis_min_bound_defaults_to_zero": NO_CALL,
                "test_masked_mean_all_zeros": NO_CALL,
                "test_distillation_loss_fn_initialization": NO_CALL,
                "test_cross_tokenizer_mismatched_per_teacher_lists_raises": NO_CALL,
                "test_normalize_teacher_by_vocab_rejected_outside_sum_mode": NO_CALL,
                "test_cross_tokenizer_ce*": NO_CALL,
                "TestMetricNormalizationAdvertisement": NO_CALL,
                "test_split_rescale_matches_sync_normalization": NO_CALL,
            },
            "tests/unit/algorithms/test_sequence_packing_fusion.py": {},
        },
        by_design={
            "tests/unit/algorithms/test_loss_functions.py": {
                "test_distillation_loss_invalid_k_zero": "A `k` of 0 raises a `ValueError` with "
                "another text.",
            },
        },
        needs=("verl",),
        absent=(*nemo_rl.ABSENT, "ray", "wandb", "datasets"),
        prepare=("nemo_rl",),
        megatron="core",
        devices=4,
    ),
    Suite(  # its conftest leaves these tests out of the others' run
        "nemo_rl",
        files={
            "tests/unit/algorithms/test_sequence_packing_fusion.py": {
                "*cp2_tp4]": EIGHT,
                "*cp4_tp2]": EIGHT,
            },
        },
        arguments=("--mcore-only",),
        release=slime.MEGATRON,
        needs=("verl",),
        absent=(*nemo_rl.ABSENT, "ray", "wandb", "datasets", "megatron.bridge"),
        prepare=("nemo_rl",),
        megatron="core",
        devices=4,
    ),
    Suite(
        "slime",
        files={
            "tests/test_ppo_logprob_entropy.py": {},
            "tests/test_ppo_logprob_entropy_gpu.py": {
                "*": "compares with the rounding of Megatron's CUDA kernel",
            },
            "tests/test_cp_utils.py": {"test_cp_chunking*": _NO_MEGATRON, "*": NO_CALL},
            "tests/test_loss_cp_invariance.py": {"*-1]": NO_CALL, "*": _NO_MEGATRON},
            "tests/test_advantage_whiten_cp.py": {"*-1]": NO_CALL, "*": _NO_MEGATRON},
            "tests/test_metric_report_dist.py": {"*-1]": NO_CALL, "*": _NO_MEGATRON},
        },
        rounding=1e-6,
        absent=slime.ENGINES,
    ),
    Suite(
        "miles",
        files={
            "tests/fast/utils/test_true_on_policy_logprobs.py": {"*": HELPER},
            "tests/fast/backends/training_utils/test_cp_log_prob_assembly.py": {},
            "tests/fast/backends/training_utils/test_opd_cp_data.py": {
                "test_sglang_opd_response_fields_follow_rollout_log_prob_cp_slice": MOCK,
                "test_multimodal_cp_reslices_precomputed_opd_reverse_kl": NO_CALL,
            },
            "tests/fast/backends/training_utils/test_ppo_cp_advantages.py": {},
            "tests/fast/backends/training_utils/loss/test_training_logprob_reuse.py": {
                "test_policy_loss_rejects_missing_old_policy_log_probs": NO_CALL,
                "test_skip_actor_forward_only_synthesizes_zero_kl_only_on_the_last*": NO_CALL,
                "test_skip_actor_forward_only_detaches_fixed_scores*": NO_CALL,
                "test_loss_dispatcher*": NO_CALL,
            },
        },
        needs=("slime",),
        absent=(*slime.ENGINES, *miles.ABSENT),
    ),
    Suite(
        "verl",
        files={
            "tests/models/test_model_forward_fused.py": {
                "test_mcore_gpt_forward_has_native_output_processor_contract": NO_CALL,
                "test_native_hook_selection*": "asserts how verl marks a model that it patched",
                "test_legacy_fallback*": "asserts how verl marks a model that it patched",
                "test_engine_hook_context_and_current_thd_arguments": NO_CALL,
                "test_megatron_bridge_wrapper_chain*": "its output layer cannot be called",
                "test_output_processor*": MOCK,
            },
            "tests/workers/test_megatron_distillation_only_on_cpu.py": {"*": MOCK},
        },
        needs=("verl",),
        absent=_VERL,
        megatron="core",
        release=slime.MEGATRON,
    ),
    Suite(
        "verl",
        files={"tests/utils/test_special_megatron_kl_loss_tp.py": {}},
        script=True,
        needs=("verl",),
        absent=_VERL,
        megatron="core",
        ranks=2,
    ),
    Suite(
        "megatron_rl",
        files={
            "tests/unit_tests/rl/test_rl_utils.py": {
                "TestRLUtils::test_get_logprobs_cuda_graphs": "records CUDA graphs",
                "TestRLUtils::test_get_logprobs_updates_all*": "packs sequences by a bare object()",
                "TestRLUtils::test_get_logprobs[*-pp2]": "its mock has logits on every stage",
                "TestRLUtils::test_get_logprobs*": "",
                "TestRLUtils::test_gpt_logprobs": "needs Transformer Engine",
                "TestRLUtils::test_prepare_data_for_update[tp*-pp1]": "",
                "TestRLUtils::test_prepare_data_for_update[*-pp2]": "sends between stages what "
                "gloo does not take",
                "*": NO_CALL,
            },
            "tests/unit_tests/rl/test_rl_batch_invariant.py": {"*": KERNEL},
            "tests/unit_tests/rl/test_context_parallel.py": {"*": "needs Transformer Engine"},
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
