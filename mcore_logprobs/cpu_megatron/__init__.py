"""A real Megatron model on a CPU (runtime, layers, builders), for the example and the tests."""
