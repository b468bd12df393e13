"""Runs the rows of `ops.py`: every pair of settings of every operation, values and gradients.

    python -m tests.engine gather hidden tp=2 dtype=bfloat16    # reruns and shrinks one case

A case is an operation, where its logits come from, and one value of every axis. It runs forward
and backward on its ranks, with an upstream gradient of its own for each output and token. Outputs
and gradients are held to the truth in float64: no worse than plain torch in the same dtype.
"""
