"""Imported by the server that ranks are forked from: what compiling a kernel imports.

A process that compiles its first kernel imports torch's compiler, which takes four seconds. Ranks
find it here.
"""

import setuptools  # noqa: F401
import sympy.combinatorics
import sympy.tensor.tensor  # noqa: F401
import torch._dynamo
import torch._inductor.compile_fx  # noqa: F401
