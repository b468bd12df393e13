"""What the tests stand on: gloo ranks, float64 oracles and a CPU runtime for Megatron."""
