"""What is installed, what will be used and why, and whether it computes what it should.

Nothing here needs Megatron, Triton or Transformer Engine: what does not import is reported with the
exception that it raised.
"""

from __future__ import annotations

import contextlib
import importlib
import platform
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_logprobs.debug import oracle
from mcore_logprobs.debug.batch import check_batch
from mcore_logprobs.dropin.installed import installed as installed_frameworks
from mcore_logprobs.vocabulary import tokenizer_size

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule

    from mcore_logprobs.config import LogprobConfig

# (name shown, distribution, module whose import shows that it works)
_PACKAGES = (
    ("mcore-logprobs", "mcore-logprobs", "mcore_logprobs"),
    ("torch", "torch", "torch"),
    ("megatron-core", "megatron-core", "megatron.core"),
    ("triton", "triton", "triton"),
    ("transformer-engine", "transformer-engine", "transformer_engine.pytorch"),
)


def report(
    model: object = None, *, full: bool = False, batch: str | PathLike[str] | None = None
) -> dict[str, Any]:
    """Return everything that `doctor` knows, as plain data that `json` can write.

    With a Megatron model (wrapped or not), "head" says whether `patch_model` can take the fused
    path on it, and if not, why; "vocabulary" says whether columns that pad it have probability.
    Makes no collective. "ok" is whether every check of the self-test is within its bound, what
    `full` tries holds, and the batch has no mistake.

    Args:
        full: also try what `invariant_segments` promises: compiles kernels, for a minute or more.
        batch: a .pt or .npz file with `input_ids` and `labels` `[b, s]`, and if wanted `loss_mask`
            `[b, s]` and the numbers `vocab_size` and `ignore_index`: "batch" says whether labels
            are the next tokens, whether any counts, and whether ids are in the vocabulary.

    Raises:
        ValueError: a model without a language model; a batch without these tensors.
    """
    checked = None if batch is None else check_batch(batch)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    tests = [test for device in devices for test in self_test(device)]
    kept = {device: _guarantees(device) for device in devices} if full else {}
    right = all(test.ok for test in tests) and all(all(x.values()) for x in kept.values())
    return {
        "python": platform.python_version(),
        "packages": {name: _package(dist, module) for name, dist, module in _PACKAGES},
        "devices": {d: torch.cuda.get_device_name() if d == "cuda" else "" for d in devices},
        "backends": {device: _backends(device) for device in devices},
        "megatron": _megatron_hooks(),
        "frameworks": installed_frameworks(),
        **({} if model is None else {"head": _head(model), "vocabulary": _vocabulary(model)}),
        "groups": _groups(),
        **({"invariant_segments": kept} if full else {}),
        "self_test": [asdict(test) | {"ok": test.ok} for test in tests],
        **({} if checked is None else {"batch": asdict(checked)}),
        "ok": right and not (checked and checked.problems),
    }


def _package(distribution: str, module: str) -> dict[str, str]:
    """Version and where it was imported from, or the reason why it was not."""
    facts: dict[str, str] = {}
    with contextlib.suppress(metadata.PackageNotFoundError):
        facts["version"] = metadata.version(distribution)
    imported, error = _import(module)
    if imported is None:
        facts["error"] = error
    else:
        # The module's own word counts: another version may shadow what pip installed, and only
        # torch itself says its build (+cu132). But Megatron adds the commit of whatever
        # repository it lies in, ours if that has the environment.
        version = str(getattr(imported, "__version__", facts.get("version", "unknown")))
        if module == "torch" or version.partition("+")[0] != facts.get("version"):
            facts["version"] = version
        facts["path"] = str(getattr(imported, "__file__", ""))
    return facts


def _import(module: str) -> tuple[Any, str]:
    """(module, "") or (None, the exception's type and message).

    Any exception counts: a package built for another CUDA raises OSError or RuntimeError, not
    ImportError, and that reason is what the reader needs.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _backends(device: str) -> dict[str, object]:
    """The backends for a device, best first, with the reasons, and what `auto` takes."""
    from mcore_logprobs.kernels import backend as backends
    from mcore_logprobs.kernels import products

    taken = {}
    for shape in ((8, 512), (1024, 32768)):
        logits = torch.empty(shape, dtype=torch.bfloat16, device=device)
        backend: Any = backends.select("auto", logits)
        name = backend.__name__.rpartition(".")[2].removesuffix("_backend")
        taken[f"{list(shape)} bfloat16"] = "torch" if name == "reference" else name
    return {
        "choices": [asdict(choice) for choice in backends.explain(device)],
        "auto": taken,
        "gemms": products.explain(torch.empty(0, device=device).device),
    }


def _megatron_hooks() -> dict[str, str]:
    from mcore_logprobs.megatron.versions import megatron_features

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = megatron_features()
    if len(found) > 1:
        found.pop("megatron-core")  # imported: its version is among the packages
    return found


def _head(model: object) -> str:
    """Whether it is fused."""
    from mcore_logprobs.megatron.heads import find_language_models, has_head, head_report

    models = find_language_models(model)
    with_head = next((x for x in models if has_head(x)), models[0])
    head = head_report(model, _settings(with_head))
    return "fused" if head.fusable else f"logits path: {head.reason}"


def _settings(language_model: LanguageModule) -> LogprobConfig:
    """The patch's, or those of the model's config."""
    from mcore_logprobs.config import LogprobConfig
    from mcore_logprobs.megatron.head_patch import patch_of

    patch = patch_of(language_model)
    if patch is not None:
        return patch.config
    return LogprobConfig.from_transformer_config(language_model.config)


def _vocabulary(model: object) -> str:
    """Which columns of the head have probability."""
    from mcore_logprobs.megatron.heads import find_language_models, has_head

    for language_model in find_language_models(model):
        columns = getattr(language_model, "vocab_size", None)
        if not has_head(language_model) or columns is None:
            continue
        vocab_size, tokens = _settings(language_model).vocab_size, tokenizer_size()
        if vocab_size:
            return f"{vocab_size} of {columns} columns count (vocab_size={vocab_size})"
        if tokens is None:
            return f"all {columns} columns count, padding too, unless vocab_size says otherwise"
        if tokens < columns:
            return (
                f"WARNING all {columns} columns count, of which {columns - tokens} are padding: "
                f"pass vocab_size={tokens}"
            )
        return f"all {columns} columns count; the tokenizer has as many"
    return "no head on this pipeline stage"


def _groups() -> dict[str, object]:
    """The process groups of this process, as far as they are initialized."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return {"torch.distributed": "not initialized: group=None means this process alone"}
    facts: dict[str, object] = {
        "torch.distributed": f"{dist.get_backend()}, rank {dist.get_rank()} of "
        f"{dist.get_world_size()}"
    }
    from mcore_logprobs.groups import (
        ParallelGroups,
        group_rank,
        group_size,
        megatron_parallel_state,
    )

    if megatron_parallel_state() is None:
        facts["megatron"] = "parallel_state is not initialized: pass tp_group and cp_group"
        return facts
    groups = ParallelGroups.from_megatron()
    for axis, group in (("tp", groups.tp), ("cp", groups.cp)):
        facts[axis] = f"rank {group_rank(group)} of {group_size(group)}"
    return facts


def _guarantees(device: str) -> dict[str, bool]:
    """What `invariant_segments` keeps here, by name; nothing where there are several ranks."""
    from mcore_logprobs.debug.invariance import find_guarantees

    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return {}
    try:
        return {guarantee.name: guarantee.holds for guarantee in find_guarantees(device)}
    except RuntimeError as error:  # what auto takes here does not compile
        return {f"any: {error}": False}


# ---- self-test ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class SelfTest:
    """One comparison with float64: `error` is the largest difference, `bound` what is allowed.

    The error of a value is absolute (nats, ranks), that of a gradient is relative to the largest
    entry of the float64 one.
    """

    name: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound


_ROWS, _HIDDEN, _VOCAB, _TRUE_VOCAB, _TEMPERATURE = 67, 48, 1031, 1009, 0.7
# A bf16 gradient is right to half a unit in its last place. Where products take bf16 operands, on a
# GPU, dlogits were rounded to that too, and a sum of them is off by as much again.
_GRAD_BOUND = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}


def self_test(device: str = "cpu") -> list[SelfTest]:
    """Log-probability, entropy, rank and gradients on one process against plain float64 torch.

    Covers the logits path and the fused path, float32 and bfloat16, with ignored targets, padded
    vocabulary, a temperature, and another upstream gradient for each token. Makes no collective;
    returns no checks where torch.distributed runs several ranks, which would read as a shard.
    """
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return []
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight = normal(_ROWS, _HIDDEN), normal(_VOCAB, _HIDDEN) / _HIDDEN**0.5
    upstream = normal(2, _ROWS).to(device)
    target = torch.randint(_TRUE_VOCAB, (_ROWS,), generator=generator)
    target[::9] = -100
    target = target.to(device)
    tests = []
    for dtype in (torch.float32, torch.bfloat16):
        logits = (hidden @ weight.T).to(device, dtype)
        head = (hidden.to(device, dtype), weight.to(device, dtype))
        label = f"{device} {str(dtype).removeprefix('torch.')}"
        tests += _compare(f"logits {label}", _on_logits, lambda y: y, (logits,), target, upstream)
        tests += _compare(
            f"fused {label}", _on_hidden, lambda h, w: h @ w.T, head, target, upstream
        )
    return tests


def _on_logits(inputs: tuple[Tensor, ...], target: Tensor, **options: Any) -> Any:
    from mcore_logprobs.ops.token_stats import vocab_parallel_token_stats

    return vocab_parallel_token_stats(inputs[0], target, **options)


def _on_hidden(inputs: tuple[Tensor, ...], target: Tensor, **options: Any) -> object:
    from mcore_logprobs.ops.token_stats import linear_token_stats

    return linear_token_stats(inputs[0], inputs[1], target, **options)


def _compare(
    label: str,
    function: Callable[..., Any],
    to_logits: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    target: Tensor,
    upstream: Tensor,
) -> list[SelfTest]:
    """Runs `function` on `inputs` and the same mathematics in float64 on the same numbers."""
    from mcore_logprobs.kernels.products import matmul_dtype

    leaves = tuple(x.detach().clone().requires_grad_() for x in inputs)
    stats = function(
        leaves,
        target,
        entropy=True,
        target_rank=True,
        temperature=_TEMPERATURE,
        vocab_size=_TRUE_VOCAB,
    )
    (upstream[0] * stats.logprobs + upstream[1] * stats.entropy).sum().backward()

    exact = tuple(x.detach().double().requires_grad_() for x in inputs)
    logits = to_logits(*exact)[:, :_TRUE_VOCAB] / _TEMPERATURE
    keep, safe_target = target >= 0, target.clamp(min=0)
    logprobs = torch.where(keep, oracle.logprobs(logits, safe_target), 0.0)
    entropy = torch.where(keep, oracle.entropy(logits), 0.0)
    rank = torch.where(keep, oracle.target_rank(logits, safe_target), -1)
    (upstream[0] * logprobs + upstream[1] * entropy).sum().backward()

    tests = [
        SelfTest(f"{label} logprob", oracle.error(stats.logprobs, logprobs), 1e-5),
        SelfTest(f"{label} entropy", oracle.error(stats.entropy, entropy), 1e-5),
        SelfTest(f"{label} rank", oracle.error(stats.target_rank, rank), 0.0),
    ]
    names = ("logits",) if len(leaves) == 1 else ("hidden", "weight")
    for name, leaf, reference in zip(names, leaves, exact, strict=True):
        assert leaf.grad is not None
        assert reference.grad is not None
        error, bound = oracle.relative_error(leaf.grad, reference.grad), _GRAD_BOUND[leaf.dtype]
        if name != "logits" and matmul_dtype(leaf.dtype, leaf.device) == torch.bfloat16:
            bound *= 2.0
        tests.append(SelfTest(f"{label} d{name}", error, bound))
    return tests


# ---- text --------------------------------------------------------------------------------------


def _of_framework(name: str, found: dict[str, Any]) -> list[str]:
    compared = f" (compared with {found['compared']})" if found["compared"] else ""
    state = "WARNING" if found["problems"] else "every call fits the drop-in"
    lines = [f"  {name:20} {found['version']}{compared}: {state}"]
    lines += [f"    WARNING {problem}" for problem in found["problems"]]
    for module, names in found["replaces"].items():
        lines.append(
            f"    switch_on({name!r}) replaces in {module}: {', '.join(names) or 'nothing'}"
        )
    return lines


def as_text(found: dict[str, Any]) -> str:
    lines = ["Packages", f"  {'python':20} {found['python']}"]
    for name, package in found["packages"].items():
        version = package.get("version", "not installed")
        error = f"  does not import: {package['error']}" if "error" in package else ""
        lines.append(f"  {name:20} {version}{error}")
    lines.append("Backends")
    for device, backends in found["backends"].items():
        lines.append(f"  {device} {found['devices'][device]}".rstrip())
        for choice in backends["choices"]:
            state = "available" if choice["available"] else "not available"
            lines.append(f"    {choice['name']:18} {state}: {choice['reason']}")
        for case, taken in backends["auto"].items():
            lines.append(f"    auto takes {taken} for {case}")
        lines += [f"    GEMMs: {text}" for text in backends["gemms"]]
    lines.append("Megatron hooks")
    lines += [f"  {name:20} {text}" for name, text in found["megatron"].items()]
    lines += [f"  {name:20} {found[name]}" for name in ("head", "vocabulary") if name in found]
    lines.append("Frameworks whose names mcore_logprobs.dropin carries")
    lines += [line for item in found["frameworks"].items() for line in _of_framework(*item)]
    lines += [] if found["frameworks"] else ["  none installed"]
    lines.append("Groups")
    lines += [f"  {name:20} {text}" for name, text in found["groups"].items()]
    lines.append("The same bits with invariant_segments, tried on this machine")
    lines += [] if "invariant_segments" in found else ["  not tried: doctor --full does"]
    for device, found_here in found.get("invariant_segments", {}).items():
        kept = [name for name, holds in found_here.items() if holds]
        lines.append(f"  {device}: {len(kept)} of {len(found_here)} checks found them")
        lines += [f"    NOT {name}" for name in found_here if name not in kept]
    lines.append("Self-test against float64 (largest error, bound)")
    for test in found["self_test"]:
        mark = "ok" if test["ok"] else "OUT OF BOUND"
        lines.append(f"  {test['name']:28} {test['error']:.1e}  {test['bound']:.1e}  {mark}")
    if not found["self_test"]:
        lines.append("  not run: torch.distributed has several ranks; run it in one process")
    batch = found.get("batch", {"facts": [], "problems": []})
    lines += ["Batch"] if "batch" in found else []
    lines += [f"  {fact}" for fact in batch["facts"]]
    lines += [f"  MISTAKE {problem}" for problem in batch["problems"]]
    if found["ok"]:
        return "\n".join([*lines, "All checks passed."])
    failed = [] if all(test["ok"] for test in found["self_test"]) else ["The self-test FAILED."]
    tried = found.get("invariant_segments", {}).values()
    failed += [] if all(all(x.values()) for x in tried) else ["Batch invariance FAILED."]
    failed += ["The batch FAILED."] if batch["problems"] else []
    return "\n".join([*lines, " ".join(failed)])
