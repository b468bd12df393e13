"""The names of each framework that a drop-in carries, and whether a framework's source fits them.

A framework's source is read as text, by `ast`: nothing of it is imported, so that it needs none of
what it imports itself.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = [
    "FRAMEWORKS",
    "Call",
    "Framework",
    "calls",
    "carried",
    "installed",
    "misfit",
    "refused",
    "signatures",
]


@dataclass(frozen=True)
class Framework:
    """Where one framework keeps the names that `mcore_logprobs.dropin.<its key>` carries.

    Attributes:
        repository: owner/name on GitHub.
        distributions: names that pip may know it by.
        files: path in the repository -> the names carried, separated by blanks. Of a class with a
            `forward` it is `apply` that is meant; `Class.method` names a method.
        source_root: folder of the repository that is not part of an installed path.
    """

    repository: str
    distributions: tuple[str, ...]
    files: Mapping[str, str]
    source_root: str = ""

    def names(self) -> list[str]:
        """Every name carried, in order."""
        return [name for names in self.files.values() for name in names.split()]

    def installed_path(self, path: str) -> str:
        """A repository's path as it is below site-packages."""
        return path.removeprefix(self.source_root)


FRAMEWORKS: dict[str, Framework] = {
    "nemo_rl": Framework(
        "NVIDIA-NeMo/RL",
        ("nemo-rl",),
        {
            "nemo_rl/distributed/model_utils.py": """
                AllGatherCPTensor ChunkedDistributedEntropy ChunkedDistributedGatherLogprob
                ChunkedDistributedHiddenStatesToLogprobs ChunkedDistributedLogprob
                ChunkedDistributedLogprobWithSampling DistributedCrossEntropy DistributedLogprob
                DistributedLogprobWithSampling _AllReduceSum _compute_distributed_log_softmax
                _compute_distributed_log_softmax_with_grad _compute_distributed_softmax
                _get_tokens_on_this_cp_rank _gpt_forward_with_linear_ce_fusion all_to_all_sq2vp
                all_to_all_vp2sq allgather_cp_sharded_tensor cp_load_balanced_to_contiguous
                cp_shift_next distributed_vocab_topk dtensor_from_parallel_logits_to_logprobs
                from_parallel_hidden_states_to_logprobs from_parallel_logits_to_logprobs
                from_parallel_logits_to_logprobs_packed_sequences gather_logits_at_global_indices
                get_distillation_topk_logprobs_from_logits get_logprobs_from_vocab_parallel_logits
                get_next_token_logprobs_from_logits group_all_reduce_sum
                group_all_reduce_sum_with_grad patch_gpt_model_forward_for_linear_ce_fusion
                vocab_parallel_argmax vocab_parallel_full_log_softmax vocab_parallel_gather_columns
                vocab_parallel_log_softmax"""
        },
    ),
    "roll": Framework(
        "alibaba/ROLL",
        ("mcore-adapter", "roll"),
        {
            "mcore_adapter/src/mcore_adapter/parallel_functions/vocab_parallel.py": """
                VocabUtility.vocab_range_from_global_vocab_size
                VocabUtility.vocab_range_from_per_partition_vocab_size
                vocab_parallel_logprobs vocab_parallel_target_rank""",
            "mcore_adapter/src/mcore_adapter/parallel_functions/context_parallel.py": """
                context_parallel_gather""",
            "mcore_adapter/src/mcore_adapter/parallel_functions/encoder_sequence_parallel.py": """
                encoder_sequence_parallel_gather encoder_small_batch_size_gather""",
            "roll/third_party/megatron/tensor_parallel.py": "vocab_parallel_entropy",
        },
        source_root="mcore_adapter/src/",
    ),
    "megatron_rl": Framework(
        "NVIDIA/Megatron-LM",
        ("megatron-core",),
        {"megatron/rl/rl_utils.py": "get_logprobs selective_log_softmax"},
    ),
    "verl": Framework(
        "verl-project/verl",
        ("verl",),
        {
            "verl/utils/megatron/tensor_parallel.py": """
                vocab_parallel_entropy vocab_parallel_entropy_with_chunking
                vocab_parallel_log_probs_from_logits
                vocab_parallel_log_probs_from_logits_response_rmpad
                vocab_parallel_sum_pi_squared""",
            "verl/utils/kernel/linear_cross_entropy.py": "LinearCrossEntropy",
            "verl/models/mcore/model_forward_fused.py": """
                fused_output_processor patch_fused_forward unpatch_fused_forward""",
            "verl/trainer/distillation/megatron/losses.py": "compute_forward_kl_topk",
        },
    ),
    "slime": Framework(
        "THUDM/slime",
        ("slime",),
        {
            "slime/utils/ppo_utils.py": "calculate_log_probs_and_entropy",
            "slime/backends/megatron_utils/loss.py": "get_log_probs_and_entropy",
            "slime/backends/megatron_utils/cp_utils.py": """
                all_gather_with_cp get_logits_and_tokens_offset_with_cp slice_log_prob_with_cp
                slice_with_cp""",
        },
    ),
    "skyrl": Framework(
        "NovaSky-AI/SkyRL",
        ("skyrl",),
        {
            "skyrl/backends/skyrl_train/distributed/megatron/model_utils.py": """
                AllGatherCPTensor AllGatherPackedCPTensor ChunkedDistributedLogprob
                DistributedLogprob FusedLinearChunkedDistributedLogprob
                _compute_distributed_log_softmax _fused_vocab_parallel_entropy_from_hidden
                _get_tokens_on_this_cp_rank allgather_cp_sharded_packed_tensor
                allgather_cp_sharded_tensor from_parallel_hidden_to_entropy_packed_sequences
                from_parallel_hidden_to_logprobs from_parallel_hidden_to_logprobs_packed_sequences
                from_parallel_logits_to_logprobs from_parallel_logits_to_logprobs_packed_sequences
                vocab_parallel_entropy vocab_parallel_entropy_packed_sequences
                vocab_parallel_entropy_weighted_sum"""
        },
    ),
    "areal": Framework(
        "inclusionAI/AReaL",
        ("areal",),
        {
            "areal/utils/functional/vocab_parallel.py": "gather_logprobs gather_logprobs_entropy",
            "areal/engine/megatron_utils/packed_context_parallel.py": """
                reassemble_cp_packed_logprobs split_packed_seqs_for_context_parallel""",
        },
    ),
    "ms_swift": Framework(
        "modelscope/ms-swift",
        ("ms-swift",),
        {
            "swift/megatron/trainers/vocab_parallel_utils.py": """
                compute_logps_and_entropy_from_logits vocab_parallel_entropy
                vocab_parallel_gather_logps vocab_parallel_kl_div vocab_parallel_log_softmax"""
        },
    ),
}


# ---- reading a framework's source ----------------------------------------------------------------


def signatures(source: str, names: Iterable[str]) -> dict[str, str]:
    """Parameters, without annotations, of the names that a file defines: `"(a, b=1, *, c)"`.

    Of a class with a `forward` (an autograd function) they are those of `apply`: without ctx.
    """
    defined = {node.name: node for node in ast.parse(source).body if hasattr(node, "name")}
    found = {}
    for name in names:
        owner, _, method = name.partition(".")
        node = defined.get(owner)
        is_class = isinstance(node, ast.ClassDef)
        if isinstance(node, ast.ClassDef):
            members = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
            node = members.get(method or "forward")
        if isinstance(node, ast.FunctionDef):
            found[name] = _bare(node.args, drop_first=is_class and not method)
    return found


def _bare(arguments: ast.arguments, drop_first: bool) -> str:
    for parameter in ast.walk(arguments):
        if isinstance(parameter, ast.arg):
            parameter.annotation = None
    if drop_first:
        (arguments.posonlyargs or arguments.args).pop(0)
    return f"({ast.unparse(arguments)})"


@dataclass(frozen=True)
class Call:
    """One call in a framework's own code.

    Attributes:
        positional: how many arguments come by position; keywords: which come by name.
        open: *args or **kwargs come too, so that not all of it is known.
    """

    name: str
    positional: int
    keywords: tuple[str, ...] = ()
    open: bool = False
    where: str = field(default="", compare=False)


def calls(source: str, path: str, framework: Framework) -> Iterator[Call]:
    """The calls in one file to names that it imports from the framework's files, or defines."""
    wanted = {}
    tree = ast.parse(source)
    for file, names in framework.files.items():
        module = Path(framework.installed_path(file)).with_suffix("").parts
        for name in names.split():
            root = name.partition(".")[0]
            if file == path:
                wanted[root] = name
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        for file, names in framework.files.items():
            module = Path(framework.installed_path(file)).with_suffix("").parts
            tail = tuple((node.module or "").split(".")) if node.module else ()
            if tail and tail not in (module[-len(tail) :], module[:-1][-len(tail) :]):
                continue
            roots = {name.partition(".")[0]: name for name in names.split()}
            for alias in node.names:
                if alias.name in roots:
                    wanted[alias.asname or alias.name] = roots[alias.name]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        target = node.func
        if isinstance(target, ast.Attribute) and target.attr == "apply":
            target = target.value
        if isinstance(target, ast.Name) and target.id in wanted:
            yield Call(
                wanted[target.id],
                sum(not isinstance(a, ast.Starred) for a in node.args),
                tuple(k.arg for k in node.keywords if k.arg),
                any(isinstance(a, ast.Starred) for a in node.args)
                or any(k.arg is None for k in node.keywords),
                f"{path}:{node.lineno}",
            )


# ---- comparing -----------------------------------------------------------------------------------


def carried(framework: str, name: str) -> Callable[..., Any]:
    """What the drop-in has under a name: the function, or a class's `apply`.

    Raises:
        AttributeError: it has no such name.
    """
    found: Any = importlib.import_module(f"mcore_logprobs.dropin.{framework}")
    for part in name.split("."):
        found = getattr(found, part)
    return getattr(found, "apply", found)


def misfit(ours: Callable[..., Any], theirs: str) -> str:
    """Why a call that upstream's signature takes may fail on ours; "" if none can.

    Ours may have more parameters, if they have defaults; those of upstream must be there by name,
    at the same position, with the same default.
    """
    here = inspect.signature(ours).parameters
    kinds = inspect.Parameter
    theirs_parameters = _parse(theirs).parameters
    by_place = [p.name for p in here.values() if p.kind is kinds.POSITIONAL_OR_KEYWORD]
    place = 0
    for name, parameter in theirs_parameters.items():
        if parameter.kind is kinds.VAR_KEYWORD:
            if all(p.kind is not kinds.VAR_KEYWORD for p in here.values()):
                return "upstream takes any keyword"
            continue
        if parameter.kind is kinds.POSITIONAL_OR_KEYWORD:
            if by_place[place : place + 1] != [name]:
                return f"expected {name!r} at position {place}, got {by_place[place:][:1]}"
            place += 1
        if name not in here:
            return f"expected a parameter {name!r}"
        if parameter.default is not kinds.empty and here[name].default != parameter.default:
            got = here[name].default
            return f"{name}: expected the default {parameter.default!r}, got {got!r}"
    for name, parameter in here.items():
        needed = parameter.default is kinds.empty and name not in theirs_parameters
        if needed and parameter.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL):
            return f"{name!r} is ours alone and has no default"
    return ""


def refused(ours: Callable[..., Any], call: Call) -> str:
    """Why ours does not take a call; "" if it does."""
    try:
        signature = inspect.signature(ours)
        bind = signature.bind_partial if call.open else signature.bind
        bind(*[None] * call.positional, **dict.fromkeys(call.keywords))
    except TypeError as error:
        return f"{call.where}: {error}"
    return ""


def _parse(text: str) -> inspect.Signature:
    node = ast.parse(f"def f{text}: ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    arguments, kinds, empty = node.args, inspect.Parameter, inspect.Parameter.empty
    ordered = [*arguments.posonlyargs, *arguments.args]
    defaults = [empty] * (len(ordered) - len(arguments.defaults)) + [
        _value(d) for d in arguments.defaults
    ]
    parameters = [
        kinds(a.arg, kinds.POSITIONAL_OR_KEYWORD, default=d)
        for a, d in zip(ordered, defaults, strict=True)
    ]
    if arguments.vararg:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        value = empty if default is None else _value(default)
        parameters.append(kinds(a.arg, kinds.KEYWORD_ONLY, default=value))
    if arguments.kwarg:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


# ---- what is installed ---------------------------------------------------------------------------


def installed(path: Iterable[str] | None = None) -> dict[str, str]:
    """Of each framework found on `sys.path`, its version and whether its signatures fit ours."""
    roots = [Path(p or ".") for p in (sys.path if path is None else path)]
    found = {}
    for name, framework in FRAMEWORKS.items():
        texts = {}
        for file in framework.files:
            at = (root / framework.installed_path(file) for root in roots)
            texts[file] = next((p.read_text(encoding="utf-8") for p in at if p.is_file()), None)
        if not any(texts.values()):
            continue
        problems = [p for f, text in texts.items() for p in _problems(name, f, text)]
        fits = "every call fits the drop-in" if not problems else "; ".join(problems)
        found[name] = f"{_version(framework, roots)}: {fits}"
    return found


def _problems(framework: str, file: str, text: str | None) -> Iterator[str]:
    names = FRAMEWORKS[framework].files[file].split()
    if text is None:
        yield f"{file} is not there"
        return
    theirs = signatures(text, names)
    for name in names:
        if name not in theirs:
            yield f"{name} is no longer in {file}"
        else:
            why = misfit(carried(framework, name), theirs[name])
            if why:
                yield f"{name}: {why}"


def _version(framework: Framework, roots: list[Path]) -> str:
    at = [str(root) for root in roots]
    for wanted in framework.distributions:
        for distribution in metadata.distributions(name=wanted, path=at):
            return distribution.version
    return "unknown version"
