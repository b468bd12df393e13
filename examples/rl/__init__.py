"""A GRPO step on a Megatron model: the parts that `examples/rl_step.py` puts together."""
