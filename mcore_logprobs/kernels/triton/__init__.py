"""The Triton backend: the functions of `kernels.backend.Backend`, as operators of torch.

`kernels.reference`, `kernels.pairs` and `kernels.codes` document them. The chunk size is of
no use here, as nothing but the results is ever written.
"""

from mcore_logprobs.kernels.triton.codes import decode, encode
from mcore_logprobs.kernels.triton.gradient import grad
from mcore_logprobs.kernels.triton.pair_gradient import pair_grad
from mcore_logprobs.kernels.triton.pair_statistics import pair_stats, pair_sums
from mcore_logprobs.kernels.triton.statistics import stats

__all__ = ["decode", "encode", "grad", "pair_grad", "pair_stats", "pair_sums", "stats"]
