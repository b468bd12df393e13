"""Exact per-token log-probabilities, entropy, target ranks and top-k for Megatron-Core.

From a vocabulary sharded over tensor-parallel ranks and a sequence sharded over context-parallel
ranks; and from hidden states, without materializing the logits. Importing the package needs neither
CUDA nor Triton nor Transformer Engine nor Megatron; torch is imported with the first name that is
looked up, so that `python -m mcore_logprobs --help` comes at once.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from mcore_logprobs.api import *  # noqa: F403
    from mcore_logprobs.api import __all__ as __all__


def __getattr__(name: str) -> Any:
    if name in {module.name for module in iter_modules(__path__)}:  # noqa: F405
        return import_module(f"{__name__}.{name}")
    if name == "__all__" or not name.startswith("_"):
        api = import_module("mcore_logprobs.api")
        public = {public: getattr(api, public) for public in api.__all__}
        globals().update(public, __all__=[*public, "__version__"])
    if name in globals():
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
