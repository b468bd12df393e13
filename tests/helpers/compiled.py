"""Imported by the server that ranks are forked from: what compiling a kernel imports and looks up.

A process that compiles its first kernel imports torch's compiler, which takes four seconds, asks
which instructions it may use, which takes one, and makes tables. Ranks find all of it here.
"""

import contextlib

import setuptools  # noqa: F401
import sympy.combinatorics
import sympy.tensor.tensor  # noqa: F401
import torch._dynamo
import torch._inductor.compile_fx
import torch._inductor.config

# Without threads, which a fork would lack; where there is no compiler, tests that need one say so.
with torch._inductor.config.patch(compile_threads=1), contextlib.suppress(Exception):
    torch.compile(torch.exp)(torch.ones(8))
torch._dynamo.reset()
