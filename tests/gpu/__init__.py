"""The operations on a GPU's path, with values, on a machine without a GPU.

Importing `simulated` gives torch a CUDA device whose memory is the host's. Tensors are on "cuda:0",
calls are cut as on a GPU, 16-bit operands are multiplied as they are, a CPU tensor among CUDA
tensors is refused, and backwards run in the device's thread. What it is not: asynchronous, another
address space, or a place for Triton.

    python -m tests.gpu COUNT [SEED]                               # random cases of every operation
    python -m tests.engine OPERATION SOURCE device=cuda SETTING=VALUE ...    # one
"""
