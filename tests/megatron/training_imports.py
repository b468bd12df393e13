"""For the ranks' server to import: `megatron.training`, inside the CPU's shims."""

from mcore_logprobs.cpu_megatron.training import cpu_training

with cpu_training():
    import megatron.training.training  # noqa: F401
