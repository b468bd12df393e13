"""Replace a framework's functions by those of a drop-in, without changing its source.

Each framework's page (docs/frameworks) says which of its settings calls `switch_on`. If a framework
can only be told which command to run, `python -m mcore_logprobs.dropin FRAMEWORK [-m] SCRIPT ARGS`
switches the drop-in on in the script and in every Python process that it starts. Workers that only
inherit an environment get the variables that `python -m mcore_logprobs.dropin FRAMEWORK --env`
prints.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import runpy
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from mcore_logprobs.commands import check_script, leave_out_cwd, or_closed_pipe
from mcore_logprobs.dropin.installed import FRAMEWORKS, check_fits, check_installed, found_nowhere
from mcore_logprobs.dropin.lazy_models import check_fused, lazy_models
from mcore_logprobs.megatron.imports import after_import
from mcore_logprobs.spelling import nearest

__all__ = ["environment", "main", "miles", "slime", "switch_off", "switch_on"]

logger = logging.getLogger("mcore_logprobs")

USAGE = """usage: python -m mcore_logprobs.dropin FRAMEWORK [-m] SCRIPT ARGS...
       python -m mcore_logprobs.dropin FRAMEWORK --env"""

FUSED_VARIABLE = "MCORE_LOGPROBS_FUSED"

_on: dict[str, _Switch] = {}


def switch_on(framework: str, fused: str | bool | None = None) -> None:
    """Replace a framework's functions by those of `mcore_logprobs.dropin.<framework>`.

    This holds in this process, for files of the framework that are imported already and for those
    that are imported later. Models that the framework builds from now on return lazy logits
    (docs/lazy.md), so that its own code computes from hidden states. Rank 0 logs one line per file,
    and one if the installed version is not the one that the drop-in was compared with, or if no
    file of the framework is on `sys.path`. A second call does nothing, and may not ask for another
    `fused`.

    Args:
        fused: what code gets that reads logits outside this library's functions. "auto": real
            logits, with a log line. "require": an error that names the line. False: the models are
            not patched at all. None: the environment variable MCORE_LOGPROBS_FUSED (auto, require
            or false), else "auto".

    Raises:
        ValueError: an unknown framework or fused; another fused than the one that is on; a function
            whose calls the drop-in does not accept. Files on `sys.path` are checked before any
            function is replaced, others when they are imported.
    """
    _check(framework)
    asked = _fused_setting() if fused is None else fused
    check_fused(asked)
    if framework not in _on:
        _on[framework] = _Switch(framework, asked)
        try:
            _on[framework].watch()
        except BaseException:  # a file of theirs that does not parse, for one: nothing is half on
            switch_off(framework)
            raise
    elif fused is not None and fused != _on[framework].fused:
        raise ValueError(
            f"fused: expected {_on[framework].fused!r}, with which {framework} is switched on, got "
            f"{fused!r}; call switch_off first"
        )


def _fused_setting() -> str | bool:
    text = os.environ.get(FUSED_VARIABLE, "auto")
    if text.lower() not in ("auto", "require", "false"):
        raise ValueError(f"{FUSED_VARIABLE}: expected auto, require or false, got {text!r}")
    return False if text.lower() == "false" else text.lower()


def _check(framework: str) -> None:
    if framework not in FRAMEWORKS:
        raise ValueError(
            f"framework: expected one of {', '.join(FRAMEWORKS)}, got {framework!r}"
            f"{nearest(str(framework), FRAMEWORKS)}"
        )


def switch_off(framework: str) -> None:
    """Undo `switch_on`; does nothing if the framework is not switched on."""
    if framework in _on:
        _on.pop(framework).undo.close()


class _Switch:
    def __init__(self, framework: str, fused: str | bool) -> None:
        self.undo, self.fused = contextlib.ExitStack(), fused
        self._framework = FRAMEWORKS[framework]
        self._missing = set(self._framework.names()) - set(self._framework.left_alone)
        self._told: set[str] = set()  # of the missing ones
        self._given: list[object] = []
        self._to_come = set(self._framework.files)

    def watch(self) -> None:
        line, self._told = check_installed(self._framework)
        if line:
            _say(line)
        if self.fused:
            self.undo.callback(lazy_models(str(self.fused)))
        for file in self._framework.files:
            name = self._framework.module_name(file)
            self.undo.callback(after_import(name, functools.partial(self._replace, file)))

    def _replace(self, file: str, module: Any) -> None:
        text = Path(module.__file__).read_text(encoding="utf-8")
        theirs = check_fits(self._framework, module.__name__, text, self._missing)
        dropin = importlib.import_module(f"mcore_logprobs.dropin.{self._framework.module}")
        names = sorted({self._framework.replaced_as(name) for name in theirs})
        for name in names:
            if "." in name:
                self._put_method(name, module, dropin)
                continue
            own, ours = getattr(module, name), getattr(dropin, name)
            self._given.append(ours)
            self.undo.callback(self._take_back, own, ours, self._put(ours, in_place_of=own))
        if names:
            _say(f"{module.__name__}: {', '.join(names)}: now those of {dropin.__name__}")
        self._missing -= theirs.keys()
        self._to_come.discard(file)
        if not self._to_come and (missing := self._missing - self._told):
            _say(found_nowhere(self._framework, missing))

    def _put_method(self, name: str, module: object, dropin: object) -> None:
        owner, _, method = name.partition(".")
        theirs = getattr(module, owner)
        self.undo.callback(setattr, theirs, method, vars(theirs)[method])
        setattr(theirs, method, vars(getattr(dropin, owner))[method])

    def _take_back(self, own: object, ours: object, places: list[tuple[ModuleType, str]]) -> None:
        for module, attribute in places:
            if vars(module).get(attribute) is ours:
                setattr(module, attribute, own)
        # And where it was imported since. Frameworks share functions of ours: the script's may be
        # another one's, which is on.
        shared = any(given is ours for other in _on.values() for given in other._given)
        self._put(own, in_place_of=ours, in_script=not shared)

    def _put(
        self, new: object, *, in_place_of: object, in_script: bool = True
    ) -> list[tuple[ModuleType, str]]:
        """In the framework's modules and the script, whichever imported it.

        Returns: where: modules and attributes.
        """
        places = []
        packages = {self._framework.installed_path(f).split("/")[0] for f in self._framework.files}
        for name, module in list(sys.modules.items()):
            is_script = in_script and name == "__main__"
            if is_script or name.partition(".")[0] in packages:
                for attribute, value in list(getattr(module, "__dict__", {}).items()):
                    if value is in_place_of:
                        setattr(module, attribute, new)
                        places.append((module, attribute))
        return places


def _say(line: str) -> None:
    """At the level that frameworks show."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning(line)


def slime(args: object = None) -> None:
    """`switch_on("slime")`, for slime's --custom-megatron-init-path."""
    switch_on("slime")


def miles(args: object = None) -> None:
    """`switch_on("miles")`, for miles' --custom-megatron-init-path."""
    switch_on("miles")


def environment(framework: str) -> dict[str, str]:
    """The variables that switch a drop-in on in every Python process that inherits them.

    PYTHONPATH puts a `sitecustomize` first, which Python imports when it starts, before what this
    process has there already. It runs a `sitecustomize` that it hides.

    Raises:
        ValueError: an unknown framework.
    """
    _check(framework)
    folder = str(Path(__file__).with_name("at_start"))
    before = os.environ.get("PYTHONPATH")
    others = [entry for entry in before.split(os.pathsep) if entry != folder] if before else []
    return {"MCORE_LOGPROBS_DROPIN": framework, "PYTHONPATH": os.pathsep.join([folder, *others])}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script or (-m) a module as `__main__` with a framework's drop-in switched on.

    In the processes that it starts too. `FRAMEWORK --env` only prints the `environment`.

    Returns: 0, or 2 after one line on stderr where the arguments or the framework's release do not
    fit. What the script raises passes.
    """
    framework, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    asked_for_help = framework in ("-h", "--help") or arguments in (["-h"], ["--help"])
    only_print, as_module = arguments == ["--env"], arguments[:1] == ["-m"]
    arguments = arguments[1:] if as_module else arguments
    if asked_for_help or not arguments:
        print(USAGE, file=sys.stdout if asked_for_help else sys.stderr)
        return 0 if asked_for_help else 2
    path_before = list(sys.path)
    try:
        variables = environment(framework)
        if not only_print:
            check_script(arguments[0], as_module)
            if not as_module:  # as Python does, and before the framework's files are looked up
                leave_out_cwd()
                sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            switch_on(framework)
    except ValueError as error:
        sys.path[:] = path_before
        print(f"python -m mcore_logprobs.dropin: error: {error}", file=sys.stderr)
        return 2
    if only_print:
        lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        return or_closed_pipe(lambda: print(*lines, sep="\n"))
    os.environ.update(variables)
    sys.argv = arguments
    if as_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")
    return 0
