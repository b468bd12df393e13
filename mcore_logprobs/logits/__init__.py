"""Public operations on vocab-parallel logits. They know process groups, but not Megatron."""
