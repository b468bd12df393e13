"""Processes in which a drop-in is switched on, and files of a framework to switch in."""

from __future__ import annotations

import textwrap
from pathlib import Path

from mcore_logprobs.dropin.installed import FRAMEWORKS
from tests.dropin.test_upstream import RECORDED
from tests.helpers.fresh import fresh as run_fresh

HELPERS = """
import ast, importlib.util, logging, sys, types

logging.basicConfig(format="%(message)s", force=True)  # a preloaded Megatron may have set another

def package(name, folder=None):
    '''A package whose own __init__ is not run; its modules are the real ones of a folder.'''
    module = types.ModuleType(name)
    module.__path__ = [folder] if folder else []
    sys.modules[name] = module
    return module

def packages(root, *names):
    for name in names:
        package(name, str(root) + "/" + name.replace(".", "/"))

def part_of(path, wanted):
    '''The statements of a file that `wanted` picks, compiled as they are.'''
    tree = ast.parse(open(path).read())
    tree.body = [node for node in ast.walk(tree) if wanted(node)]
    return compile(tree, path, "exec")
"""


def fresh(script: str, *paths: Path | str, **environment: str) -> str:
    return run_fresh(HELPERS + textwrap.dedent(script), *paths, **environment)


def written(framework: str, folder: Path) -> Path:
    """The framework's files with the signatures that are recorded of its main branch."""
    described = FRAMEWORKS[framework]
    theirs = RECORDED[framework][-1]["signatures"]
    plain = {n: text for n, text in theirs.items() if "." not in n}
    classes: dict[str, str] = {}
    for name, text in theirs.items():
        owner, _, method = name.partition(".")
        if method:
            start = classes.setdefault(owner, f"class {owner}:\n    untouched = 1\n")
            static = "" if text.startswith("(self") else "    @staticmethod\n"
            classes[owner] = f"{start}{static}    def {method}{text}: ...\n"
    for i, file in enumerate(described.files):
        path = folder / described.installed_path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        names = sorted(plain)[i :: len(described.files)]
        lines = [f"def {name}{plain[name]}: ..." for name in names]
        if i == 0:
            lines += classes.values()
        path.write_text("\n".join(lines) + "\n")
        own = path.with_name(f"caller_{path.name}")
        own.write_text(f"from .{path.stem} import {', '.join(names)}\n")
    return folder
