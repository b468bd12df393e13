"""Which frameworks are installed, and whether the drop-ins fit what they define.

A framework's source is read as text, by `ast`: nothing of it is imported, so that it needs none of
what it imports itself.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["FRAMEWORKS", "Framework", "carried", "installed", "signature_mismatch", "signatures"]


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
        left_alone: names carried that the switch does not replace.
        compared: the release that the drop-in was last compared with; "" where it has none.
    """

    module: str
    repository: str
    files: tuple[str, ...]
    distributions: tuple[str, ...]
    ours_alone: tuple[str, ...] = ()
    source_root: str = ""
    methods_of: tuple[str, ...] = ()
    left_alone: tuple[str, ...] = ()
    compared: str = ""

    def names(self) -> list[str]:
        """Every name carried; `Class.method` for a class that is no autograd function."""
        module = importlib.import_module(f"mcore_logprobs.dropin.{self.module}")
        names = []
        for name in module.__all__:
            thing = getattr(module, name)
            if name in self.ours_alone:
                continue
            if isinstance(thing, type) and not hasattr(thing, "apply"):
                names += [f"{name}.{m}" for m in vars(thing) if not m.startswith("_")]
            else:
                names.append(name)
        return names

    def replaced_as(self, name: str) -> str:
        """Of `Class.method` the class, unless only some of its methods are carried."""
        owner = name.partition(".")[0]
        return name if owner in self.methods_of else owner

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
        compared="0.3.0",
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
        left_alone=("LinearCrossEntropy",),  # called by verl's FSDP models, not by its Megatron
        compared="0.9.1",
    ),
    _framework(
        "slime",
        "THUDM/slime",
        "slime/utils/ppo_utils.py",
        "slime/backends/megatron_utils/loss.py",
        "slime/backends/megatron_utils/cp_utils.py",
        "slime/backends/megatron_utils/server/logprob_utils.py",
        compared="0.3.1",
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
        compared="0.4.0",
    ),
    _framework(
        "areal",
        "areal-project/AReaL",
        "areal/utils/functional/vocab_parallel.py",
        "areal/engine/megatron_utils/packed_context_parallel.py",
        "areal/utils/data.py",
        compared="1.0.4",
    ),
    _framework(
        "ms_swift",
        "modelscope/ms-swift",
        "swift/megatron/trainers/vocab_parallel_utils.py",
        "swift/megatron/trainers/gkd_utils.py",
        compared="4.6.0",
    ),
)
FRAMEWORKS = {framework.module: framework for framework in _DESCRIBED}


# ---- what a framework defines --------------------------------------------------------------------


def signatures(source: str, names: Iterable[str]) -> dict[str, str]:
    """Parameters, without annotations, of those names that a file defines: `"(a, b=1, *, c)"`.

    Of a class with a `forward` (an autograd function) they are those of `apply`: without ctx.
    """
    defined = {node.name: node for node in ast.parse(source).body if hasattr(node, "name")}
    by_name = {}
    for name in names:
        owner, _, method = name.partition(".")
        node = defined.get(owner)
        is_class = isinstance(node, ast.ClassDef)
        if isinstance(node, ast.ClassDef):
            members = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
            node = members.get(method or "forward")
        if isinstance(node, ast.FunctionDef):
            by_name[name] = _bare(node.args, drop_first=is_class and not method)
    return by_name


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
    thing: Any = importlib.import_module(f"mcore_logprobs.dropin.{framework}")
    for part in name.split("."):
        thing = getattr(thing, part)
    return getattr(thing, "apply", thing)


def signature_mismatch(ours: Callable[..., object], theirs: str) -> str:
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
        if parameter.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD):
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
            return f"{name!r} is only ours and has no default"
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
        hash(value)
    except (ValueError, TypeError):  # no literal; or a list, which is no constant of the compiler's
        value = ast.unparse(node)
    return ast.copy_location(ast.Constant(value), node)


# ---- what is installed ---------------------------------------------------------------------------


def installed(path: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
    """What `switch_on` would do to each framework on `sys.path`; nothing of them is imported.

    For each framework found: its "version", the "compared" one, "replaces" ({module: names}) and
    "problems": calls that a drop-in does not take, and names that have moved or are gone.
    """
    roots = _roots(path)
    by_framework = {}
    for name, framework in FRAMEWORKS.items():
        if not any(_paths(framework, roots).values()):
            continue
        try:
            texts = _texts(framework, roots)
            found = {
                "replaces": replaced(framework, texts),
                "problems": list(_problems(framework, texts, roots)),
            }
        except ValueError as error:  # `switch_on` raises it; a report goes on
            found = {"replaces": {}, "problems": [str(error)]}
        version = _version(framework, roots)
        by_framework[name] = {"version": version, "compared": framework.compared, **found}
    return by_framework


def check_installed(framework: Framework) -> tuple[str, set[str]]:
    """Check all files of a framework on `sys.path` before the first function is replaced.

    Returns: (a line to log, or ""; the names that these files lack, which the line has). The line
        says that there are no files, that another version than the compared one is installed, or
        which names are not defined.

    Raises:
        ValueError: the first name whose calls the drop-in does not take.
    """
    roots = _roots()
    texts = _texts(framework, roots)
    if not texts:
        imported = any(framework.module_name(file) in sys.modules for file in framework.files)
        none = (
            f"{framework.repository}: expected its files on sys.path, found none; those that "
            "are imported later from elsewhere are still replaced"
        )
        return "" if imported else none, set()
    theirs: dict[str, str] = {}
    for file, text in texts.items():
        theirs |= check_fits(framework, framework.module_name(file), text, framework.names())
    gone = set(framework.names()) - set(framework.left_alone) - theirs.keys()
    version = _version(framework, roots)
    if version in (_UNKNOWN, framework.compared) or not framework.compared:
        return found_nowhere(framework, gone) if gone else "", gone
    found = "every call fits"
    if gone:
        found = f"not in its files: {', '.join(sorted(gone))}; every other call fits"
    return (
        f"{framework.repository}: version {version} is installed, mcore_logprobs.dropin."
        f"{framework.module} was compared with {framework.compared}; {found}"
    ), gone


def found_nowhere(framework: Framework, names: Iterable[str]) -> str:
    """The log line about names of a drop-in that the framework's files do not define."""
    missing = ", ".join(sorted(names))
    return f"{framework.repository}: found nowhere, and left as it is: {missing}"


def check_fits(
    framework: Framework, module: str, source: str, names: Iterable[str]
) -> dict[str, str]:
    """The signatures of those names that a file defines.

    Raises:
        ValueError: the first whose calls the drop-in does not take.
    """
    theirs = _signatures(module, source, names)
    for name, text in theirs.items():
        if why := signature_mismatch(carried(framework.module, name), text):
            raise ValueError(
                f"{module}.{name}: expected a release whose calls "
                f"mcore_logprobs.dropin.{framework.module} takes, got one that differs: {why}"
            )
    return theirs


def _signatures(module: str, source: str, names: Iterable[str]) -> dict[str, str]:
    """`signatures` of a framework's module; a ValueError where its file does not parse."""
    try:
        return signatures(source, names)
    except SyntaxError as error:
        raise ValueError(f"{module}: expected a file that this Python parses: {error}") from error


def replaced(framework: Framework, texts: dict[str, str]) -> dict[str, list[str]]:
    """The names that the switch replaces in each module; a class's methods as its `methods_of`."""
    carried_names = [name for name in framework.names() if name not in framework.left_alone]
    by_module = {}
    for file, text in texts.items():
        module = framework.module_name(file)
        theirs = _signatures(module, text, carried_names)
        by_module[module] = sorted({framework.replaced_as(name) for name in theirs})
    return by_module


def _roots(path: Iterable[str] | None = None) -> list[Path]:
    return [Path(p or ".") for p in (sys.path if path is None else path)]


def _paths(framework: Framework, roots: list[Path]) -> dict[str, Path | None]:
    """Where each of its files is."""
    paths = {}
    for file in framework.files:
        at = (root / framework.installed_path(file) for root in roots)
        paths[file] = next((p for p in at if p.is_file()), None)
    return paths


def _texts(framework: Framework, roots: list[Path]) -> dict[str, str]:
    """The source of those of its files that are there; a ValueError for one that is not text."""
    texts = {}
    for file, path in _paths(framework, roots).items():
        if path is not None:
            try:
                texts[file] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: expected a text in UTF-8: {error}") from error
    return texts


def _problems(framework: Framework, texts: dict[str, str], roots: list[Path]) -> Iterator[str]:
    names = framework.names()
    theirs: dict[str, str] = {}
    for file in framework.files:
        if file not in texts:
            yield f"{file} is not there"
        theirs |= signatures(texts.get(file, ""), names)
    missing = [name for name in names if name not in theirs]
    moved = _places(framework, missing, roots) if missing else {}
    for name in names:
        if name in moved:
            yield f"{name} has moved to {moved[name]}, where the switch does not replace it"
        elif name not in theirs:
            yield f"{name} is no longer in {framework.repository}'s files"
        elif why := signature_mismatch(carried(framework.module, name), theirs[name]):
            yield f"{name}: {why}"


def _places(framework: Framework, names: list[str], roots: list[Path]) -> dict[str, str]:
    """Another of the framework's own files that defines a name, for those that one does."""
    packages = {framework.installed_path(file).partition("/")[0] for file in framework.files}
    places: dict[str, str] = {}
    for root in roots:
        for package in packages:
            for path in sorted((root / package).rglob("*.py")):
                text = path.read_text(encoding="utf-8", errors="replace")
                likely = [n for n in names if n not in places and n.partition(".")[0] in text]
                with contextlib.suppress(SyntaxError):  # a template, which is no Python
                    for name in signatures(text, likely) if likely else ():
                        places[name] = str(path.relative_to(root))
    return places


_UNKNOWN = "unknown version"


def _version(framework: Framework, roots: list[Path]) -> str:
    at = [str(root) for root in roots]
    for distribution_name in framework.distributions:
        for distribution in metadata.distributions(name=distribution_name, path=at):
            return distribution.version
    return _UNKNOWN
