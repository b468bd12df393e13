"""The public vocab-parallel operations. They know process groups, but nothing of Megatron."""
