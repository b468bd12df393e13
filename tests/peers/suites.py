"""Which of the frameworks' test files are run, and which of their tests are not applicable."""

from __future__ import annotations

from tests.peers.run import Suite
from tests.trainers import areal

NO_CALL = "calls none of the functions that are replaced"
KERNEL = "needs a GPU kernel"
MOCK = "puts a mock into the framework's module, where the drop-in does not look"
OWN_COPY = "tests a reference function of the test file itself"
HELPER = "tests a private helper that the drop-in does not replace"

_AREAL = "areal.utils.functional.vocab_parallel:"
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
                "TestReassembleGradientCorrectness::test_advanced_indexing_is_bijective"
                "_permutation": HELPER,
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
)


def suites(framework: str = "") -> list[Suite]:
    """All suites, or a framework's."""
    return [suite for suite in SUITES if framework in ("", suite.framework)]
