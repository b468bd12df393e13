"""Which frameworks are installed, and whether the drop-ins fit what they define.

A framework's source is read as text, by `ast`: nothing of it is imported, so that it needs none of
what it imports itself.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["FRAMEWORKS", "Framework", "carried", "installed", "misfit", "signatures"]


@dataclass(frozen=True)
class Framework:
    """Where one framework keeps the names that a module of `mcore_logprobs.dropin` carries.

    Attributes:
        module: of `mcore_logprobs.dropin`; its `__all__` has the names.
        repository: owner/name on GitHub.
        files: paths in the repository.
        distributions: names that pip may know it by.
        ours_alone: names in `__all__` that the framework does not define.
        source_root: folder of the repository that is not part of an installed path.
        methods_of: classes of which only the carried methods are replaced.
    """

    module: str
    repository: str
    files: tuple[str, ...]
    distributions: tuple[str, ...]
    ours_alone: tuple[str, ...] = ()
    source_root: str = ""
    methods_of: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """Every name carried; `Class.method` for a class that is no autograd function."""
        module = importlib.import_module(f"mcore_logprobs.dropin.{self.module}")
        found = []
        for name in module.__all__:
            thing = getattr(module, name)
            if name in self.ours_alone:
                continue
            if isinstance(thing, type) and not hasattr(thing, "apply"):
                found += [f"{name}.{m}" for m in vars(thing) if not m.startswith("_")]
            else:
                found.append(name)
        return found

    def installed_path(self, path: str) -> str:
        """A repository's path as it is below site-packages."""
        return path.removeprefix(self.source_root)

    def module_name(self, path: str) -> str:
        """The name that a repository's file is imported by."""
        return self.installed_path(path).removesuffix(".py").replace("/", ".")


def _framework(module: str, repository: str, *files: str, **more: Any) -> Framework:
    return Framework(
        module, repository, files, **{"distributions": (module.replace("_", "-"),), **more}
    )


_DESCRIBED = (
    _framework(
        "nemo_rl",
        "NVIDIA-NeMo/RL",
        "nemo_rl/distributed/model_utils.py",
        ours_alone=("unpatch_gpt_model_forward_for_linear_ce_fusion",),
    ),
    _framework(
        "roll",
        "alibaba/ROLL",
        "mcore_adapter/src/mcore_adapter/parallel_functions/vocab_parallel.py",
        "mcore_adapter/src/mcore_adapter/parallel_functions/context_parallel.py",
        "mcore_adapter/src/mcore_adapter/parallel_functions/encoder_sequence_parallel.py",
        "mcore_adapter/src/mcore_adapter/parallel_functions/fused_cross_entropy.py",
        "roll/third_party/megatron/tensor_parallel.py",
        "roll/distributed/strategy/megatron_strategy.py",
        distributions=("mcore-adapter", "roll"),
        source_root="mcore_adapter/src/",
        methods_of=("MegatronInferStrategy",),
    ),
    _framework(
        "megatron_rl",
        "NVIDIA/Megatron-LM",
        "megatron/rl/rl_utils.py",
        distributions=("megatron-core",),
    ),
    _framework(
        "verl",
        "verl-project/verl",
        "verl/utils/megatron/tensor_parallel.py",
        "verl/utils/kernel/linear_cross_entropy.py",
        "verl/models/mcore/model_forward_fused.py",
        "verl/trainer/distillation/megatron/losses.py",
        ours_alone=(
            "ForwardKL",
            "FusedOutput",
            "FusedOutputProcessorContext",
            "linear_cross_entropy",
        ),
    ),
    _framework(
        "slime",
        "THUDM/slime",
        "slime/utils/ppo_utils.py",
        "slime/backends/megatron_utils/loss.py",
        "slime/backends/megatron_utils/cp_utils.py",
        "slime/backends/megatron_utils/server/logprob_utils.py",
    ),
    _framework(
        "miles",
        "radixark/miles",
        "miles/backends/training_utils/loss_hub/math_utils.py",
        "miles/backends/training_utils/loss_hub/logit_processors.py",
        "miles/backends/training_utils/cp_utils.py",
    ),
    _framework(
        "skyrl",
        "NovaSky-AI/SkyRL",
        "skyrl/backends/skyrl_train/distributed/megatron/model_utils.py",
        "skyrl/backends/skyrl_train/mtp/soft_ce.py",
    ),
    _framework(
        "areal",
        "areal-project/AReaL",
        "areal/utils/functional/vocab_parallel.py",
        "areal/engine/megatron_utils/packed_context_parallel.py",
    ),
    _framework(
        "ms_swift",
        "modelscope/ms-swift",
        "swift/megatron/trainers/vocab_parallel_utils.py",
        "swift/megatron/trainers/gkd_utils.py",
    ),
)
FRAMEWORKS = {framework.module: framework for framework in _DESCRIBED}


# ---- what a framework defines --------------------------------------------------------------------


def signatures(source: str, names: Iterable[str]) -> dict[str, str]:
    """Parameters, without annotations, of those names that a file defines: `"(a, b=1, *, c)"`.

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


def _parse(text: str) -> inspect.Signature:
    """The signature that a text stands for; defaults that are no constants stay text."""
    function = ast.parse(f"lambda {text[1:-1]}: None", mode="eval")
    assert isinstance(function.body, ast.Lambda)
    arguments = function.body.args
    arguments.defaults = [_constant(d) for d in arguments.defaults]
    arguments.kw_defaults = [d and _constant(d) for d in arguments.kw_defaults]
    return inspect.signature(eval(compile(function, "<signature>", "eval")))


def _constant(node: ast.expr) -> ast.expr:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        value = ast.unparse(node)
    return ast.copy_location(ast.Constant(value), node)


# ---- what is installed ---------------------------------------------------------------------------


def installed(path: Iterable[str] | None = None) -> dict[str, str]:
    """The version of each framework on `sys.path`, and whether its signatures fit ours."""
    roots = [Path(p or ".") for p in (sys.path if path is None else path)]
    found = {}
    for name, framework in FRAMEWORKS.items():
        texts = {}
        for file in framework.files:
            at = (root / framework.installed_path(file) for root in roots)
            texts[file] = next((p.read_text(encoding="utf-8") for p in at if p.is_file()), None)
        if any(texts.values()):
            problems = "; ".join(_problems(framework, texts))
            fits = problems or "every call fits the drop-in"
            found[name] = f"{_version(framework, roots)}: {fits}"
    return found


def _problems(framework: Framework, texts: dict[str, str | None]) -> Iterator[str]:
    names = framework.names()
    theirs: dict[str, str] = {}
    for file, text in texts.items():
        if text is None:
            yield f"{file} is not there"
        else:
            theirs |= signatures(text, names)
    for name in names:
        if name not in theirs:
            yield f"{name} is no longer in {framework.repository}'s files"
        elif why := misfit(carried(framework.module, name), theirs[name]):
            yield f"{name}: {why}"


def _version(framework: Framework, roots: list[Path]) -> str:
    at = [str(root) for root in roots]
    for wanted in framework.distributions:
        for distribution in metadata.distributions(name=wanted, path=at):
            return distribution.version
    return "unknown version"
