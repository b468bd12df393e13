"""Drop-ins switched on by configuration: by the frameworks' own loaders, in their own modules.

Each case is a process of its own, in which nothing of a framework has been imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mcore_logprobs.dropin import switch
from mcore_logprobs.dropin.installed import FRAMEWORKS
from tests.dropin.frameworks import checkout, source_root, versions
from tests.dropin.test_upstream import RECORDED
from tests.helpers.fresh import fresh as run_fresh

HELPERS = """
import ast, importlib.util, sys, types

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


# ---- every framework, as its main branch defines its names ---------------------------------------


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


def test_names_are_replaced_and_put_back(tmp_path: Path) -> None:
    """In modules that were imported before, that are imported later, and in their importers."""
    modules = {}
    for name, described in FRAMEWORKS.items():
        written(name, tmp_path)
        files = [described.installed_path(f).removesuffix(".py") for f in described.files]
        modules[name] = [file.replace("/", ".") for file in files]
    script = f"""
    from mcore_logprobs.dropin.switch import switch_off, switch_on
    def load(file):
        folder, _, stem = file.rpartition(".")
        return importlib.import_module(file), importlib.import_module(f"{{folder}}.caller_{{stem}}")
    def is_ours(value, name):
        ours = getattr(module_of_ours, name)
        methods = [m for m in vars(ours) if not m.startswith("_")]
        if name != "MegatronInferStrategy":
            return value is ours
        assert value is not ours and value.untouched == 1
        return all(vars(value)[m] is vars(ours)[m] for m in methods)
    for framework, files in {modules!r}.items():
        ours = module_of_ours = importlib.import_module("mcore_logprobs.dropin." + framework)
        before = [vars(m).copy() for m in load(files[0])]
        switch_on(framework)
        switch_on(framework)
        modules = [m for file in files for m in load(file)]
        replaced = [
            is_ours(value, name)
            for module in modules
            for name, value in vars(module).items()
            if name in ours.__all__ and name != "LinearCrossEntropy"
        ]
        assert all(replaced)
        print(framework, "replaced", len(replaced))
        switch_off(framework)
        switch_off(framework)
        assert [dict(vars(m)) for m in modules[:2]] == before
        names = [(m, n) for m in modules for n in ours.__all__ if n in vars(m)]
        assert not any(is_ours(vars(m)[n], n) for m, n in names)
    """
    printed = fresh(script, tmp_path).splitlines()
    for name, described in FRAMEWORKS.items():
        names = {n.partition(".")[0] for n in described.names()} - {"LinearCrossEntropy"}
        alone = {"VocabUtility", "MegatronInferStrategy"} & names  # without an importer here
        assert f"{name} replaced {2 * len(names) - len(alone)}" in printed
        for module in modules[name]:
            (line,) = [line for line in printed if line.startswith(f"{module}: ")]
            assert line.endswith(f": now those of mcore_logprobs.dropin.{name}")
    assert not any("found nowhere" in line for line in printed)


def test_a_release_that_does_not_fit(tmp_path: Path) -> None:
    root = written("areal", tmp_path)
    file = root / FRAMEWORKS["areal"].files[0]
    before = file.read_text()
    file.write_text(before.replace("temperature=1.0", "scale", 1))
    script = """
    import inspect
    from mcore_logprobs.dropin.switch import switch_on
    try:
        switch_on("areal")
    except ValueError as error:
        print(error)
    import areal.engine.megatron_utils.packed_context_parallel as fits
    own = [x for x in vars(fits).values() if inspect.isfunction(x)]
    assert own and all(x.__module__ == fits.__name__ for x in own)
    """
    printed = fresh(script, root, RANK="3")
    assert "areal.utils.functional.vocab_parallel.gather_logprobs: expected a release" in printed
    assert "expected 'scale' at position 2, got ['temperature']" in printed
    script = f"""
    from mcore_logprobs.dropin.switch import switch_on
    packages({str(root)!r}, "areal", "areal.utils", "areal.utils.functional")
    switch_on("areal")  # not found on sys.path: seen when it is imported
    try:
        import areal.utils.functional.vocab_parallel
    except ValueError as error:
        print(error)
    """
    printed = fresh(script)
    assert "expected 'scale' at position 2, got ['temperature']" in printed
    file.write_text(before.replace("def gather_logprobs(", "def renamed("))
    script = """
    from mcore_logprobs.dropin.switch import switch_on
    switch_on("areal")
    import areal.utils.functional.vocab_parallel
    import areal.engine.megatron_utils.packed_context_parallel
    import areal.utils.data
    try:
        switch_on("vllm")
    except ValueError as error:
        print(error)
    """
    printed = fresh(script, root)
    assert "areal-project/AReaL: found nowhere, and left as it is: gather_logprobs\n" in printed
    assert "framework: expected one of nemo_rl, roll, " in printed


def test_what_goes_wrong_leaves_nothing_half_on(tmp_path: Path) -> None:
    root = written("areal", tmp_path)
    module = "areal.utils.functional.vocab_parallel"
    file = root / FRAMEWORKS["areal"].files[0]
    before = file.read_text()
    again = """
    from mcore_logprobs.dropin.switch import main, switch_on
    for _ in range(2):
        try:
            switch_on("areal")
        except ValueError as error:
            print("refused:", error)
    print("status", main(["areal", "-m", "this"]))
    import areal.engine.megatron_utils.packed_context_parallel as other
    own = [x for x in vars(other).values() if inspect.isfunction(x)]
    assert own and all(x.__module__ == other.__name__ for x in own)
    """
    for text, said in (
        ("def broken(:\n", f"refused: {module}: expected a file that this Python parses"),
        (before.replace("temperature=1.0", "temperature=[]", 1), "expected the default '[]'"),
    ):
        file.write_text(text)
        printed = fresh("import inspect\n" + textwrap.dedent(again), root)
        assert printed.count(said) >= 2
        assert "status 2" in printed
    file.write_text(before)
    script = f"""
    import sys
    from mcore_logprobs.dropin.switch import switch_off, switch_on
    sys.modules["areal.optional"] = None  # a package that says it is not there
    switch_on("areal", fused="auto")
    assert importlib.util.find_spec({module!r}) is not None  # asked, and imported later
    switch_on("areal")
    for fused in ("require", False):
        try:
            switch_on("areal", fused=fused)
        except ValueError as error:
            print(error)
    import {module} as theirs
    from mcore_logprobs.dropin import areal as ours
    assert theirs.gather_logprobs is ours.gather_logprobs
    switch_off("areal")
    assert theirs.gather_logprobs.__module__ == {module!r}
    """
    printed = fresh(script, root)
    assert printed.count("fused: expected 'auto', with which areal is switched on, got") == 2
    file.write_text(before.replace("temperature=1.0", "scale", 1))
    script = f"""
    from mcore_logprobs.dropin.switch import switch_on
    packages({str(root)!r}, "areal", "areal.utils", "areal.utils.functional")
    switch_on("areal")
    for _ in range(2):
        try:
            import {module}
        except ValueError as error:
            print(error)
    """
    assert fresh(script).count("expected 'scale' at position 2") == 2


def test_two_frameworks_that_share_a_function(tmp_path: Path) -> None:
    files = {}
    for name in ("nemo_rl", "skyrl"):
        described = FRAMEWORKS[name]
        written(name, tmp_path)
        paths = [described.installed_path(f).removesuffix(".py") for f in described.files]
        files[name] = [path.replace("/", ".") for path in paths]
    script = f"""
    from mcore_logprobs.dropin import skyrl
    from mcore_logprobs.dropin.switch import switch_off, switch_on
    own = {{}}
    for framework, modules in {files!r}.items():
        for module in map(importlib.import_module, modules):
            own[framework] = vars(module).get("AllGatherCPTensor", own.get(framework))
    AllGatherCPTensor = own["skyrl"]  # the script has imported it
    switch_on("nemo_rl")
    switch_on("skyrl")
    assert AllGatherCPTensor is skyrl.AllGatherCPTensor
    switch_off("nemo_rl")
    assert AllGatherCPTensor is skyrl.AllGatherCPTensor
    switch_off("skyrl")
    assert AllGatherCPTensor is own["skyrl"] is not own["nemo_rl"]
    """
    fresh(script, tmp_path)


def test_a_mistake_in_the_environment_is_said_at_every_import(tmp_path: Path) -> None:
    root = written("areal", tmp_path)
    at_start = Path(switch.__file__).with_name("at_start") / "sitecustomize.py"
    script = f"""
    import runpy
    runpy.run_path({str(at_start)!r})  # as Python does when it starts
    for _ in range(2):
        try:
            import areal.utils.functional.vocab_parallel
        except ValueError as error:
            print(error)
    """
    variables = {"MCORE_LOGPROBS_DROPIN": "areal", "MCORE_LOGPROBS_FUSED": "yes"}
    printed = fresh(script, root, **variables)
    assert printed.count("MCORE_LOGPROBS_FUSED: expected auto, require or false, got 'yes'") == 2


# ---- the frameworks' own loaders -----------------------------------------------------------------

TENSOR_PARALLEL = """
    import verl.utils.megatron.tensor_parallel as theirs
    from mcore_logprobs.dropin import verl as ours
    assert theirs.vocab_parallel_entropy is ours.vocab_parallel_entropy
"""


@pytest.mark.parametrize(("distribution", "version"), versions("verl"))
def test_verl_loads_its_plugin(distribution: str, version: str) -> None:
    """By VERL_USE_EXTERNAL_MODULES, in verl's own __init__; by external_lib, as its config does."""
    root = source_root(distribution, version)
    packages = f'packages({str(root)!r}, "verl", "verl.utils", "verl.utils.megatron")'
    script = f"""
    {packages}
    # What stands in verl/__init__.py from the variable's name on to its use.
    def wanted(node):
        text = ast.unparse(node) if isinstance(node, (ast.Assign, ast.If)) else ""
        return text.startswith(("modules = os.getenv('VERL_USE", "if modules:"))
    import os
    from verl.utils.import_utils import import_external_libs
    exec(part_of({str(root / "verl/__init__.py")!r}, wanted))
    {TENSOR_PARALLEL}
    """
    plugin = "mcore_logprobs.dropin.verl_plugin"
    line = "verl.utils.megatron.tensor_parallel: vocab_parallel_entropy, "
    assert line in fresh(script, VERL_USE_EXTERNAL_MODULES=plugin)
    script = f"""
    {packages}
    from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy as own
    assert own.__module__ == "verl.utils.megatron.tensor_parallel"
    from verl.utils.import_utils import import_external_libs
    # HFModelConfig.__post_init__: its first statement.
    tree = ast.parse(open({str(root / "verl/workers/config/model.py")!r}).read())
    (config,) = [n for n in tree.body if getattr(n, "name", "") == "HFModelConfig"]
    (init,) = [n for n in config.body if getattr(n, "name", "") == "__post_init__"]
    self = types.SimpleNamespace(external_lib={plugin!r})
    exec(ast.unparse(init.body[0]))
    {TENSOR_PARALLEL}
    assert own is ours.vocab_parallel_entropy  # in the script too
    """
    assert line in fresh(script)


@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_slime_and_miles_load_a_function(tmp_path: Path, framework: str) -> None:
    """By --custom-megatron-init-path, at the end of their Megatron initialisation."""
    root = checkout(framework)
    if root is None:
        # As both define it: a dotted path, split at its last dot.
        loader = "load = lambda path: getattr(importlib.import_module(path[:path.rfind('.')]), "
        loader += "path[path.rfind('.') + 1:]); load(args.custom_megatron_init_path)(args)"
    else:
        initialize = root / framework / "backends/megatron_utils/initialize.py"
        misc = root / framework / "utils/misc.py"
        loader = f"""
    package("ray")
    package("{framework}.utils.http_utils").is_port_available = None
    import importlib.util
    spec = importlib.util.spec_from_file_location("{framework}.utils.misc", {str(misc)!r})
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
    def wanted(node):
        test = ast.unparse(node.test) if isinstance(node, ast.If) else ""
        return "custom_megatron_init_path" in test
    exec(part_of({str(initialize)!r}, wanted))
    """
    files = [f.removesuffix(".py").replace("/", ".") for f in FRAMEWORKS[framework].files]
    script = f"""
    import {framework}, {files[0]} as theirs
    args = types.SimpleNamespace(
        custom_megatron_init_path="mcore_logprobs.dropin.switch.{framework}"
    )
    {loader}
    from mcore_logprobs.dropin import {framework} as ours
    names = set(vars(theirs)) & set(ours.__all__)
    assert names and all(getattr(theirs, n) is getattr(ours, n) for n in names)
    """
    assert f"now those of mcore_logprobs.dropin.{framework}" in fresh(
        script, written(framework, tmp_path)
    )


@pytest.mark.parametrize(("distribution", "version"), versions("ms-swift"))
def test_ms_swift_imports_a_file(tmp_path: Path, distribution: str, version: str) -> None:
    """By --external_plugins, which imports a file from its folder."""
    root = source_root(distribution, version)
    plugin = tmp_path / "switch_logprobs.py"
    plugin.write_text("from mcore_logprobs.dropin.switch import switch_on\nswitch_on('ms_swift')\n")
    script = f"""
    import hashlib, importlib.util, os
    from typing import List
    packages({str(root)!r}, "swift", "swift.megatron", "swift.megatron.trainers")
    utils = {str(root / "swift/utils/utils.py")!r}
    def wanted(node):
        is_list = isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_external_files"
        return is_list or getattr(node, "name", "") == "import_external_file"
    exec(part_of(utils, wanted))
    import_external_file({str(plugin)!r})
    import swift.megatron.trainers.vocab_parallel_utils as theirs
    from mcore_logprobs.dropin import ms_swift as ours
    assert theirs.vocab_parallel_gather_logps is ours.vocab_parallel_gather_logps
    """
    assert "swift.megatron.trainers.vocab_parallel_utils: compute_logps_" in fresh(script)


@pytest.mark.parametrize(("distribution", "version"), versions("areal"))
def test_areal_s_command(tmp_path: Path, distribution: str, version: str) -> None:
    """`scheduling_spec.cmd` runs the module that it names with the drop-in on."""
    root = source_root(distribution, version)
    (tmp_path / "server.py").write_text(
        textwrap.dedent(
            f"""
            import sys, types
            for name in ("areal", "areal.utils", "areal.utils.functional", "areal.infra"):
                module = sys.modules[name] = types.ModuleType(name)
                module.__path__ = [{str(root)!r} + "/" + name.replace(".", "/")]
            platforms = sys.modules["areal.infra.platforms"] = types.ModuleType("platforms")
            platforms.is_npu_available = True
            from areal.utils.functional.vocab_parallel import gather_logprobs
            print(__name__, gather_logprobs.__module__, sys.argv[1:])
            """
        )
    )
    for how in (["-m", "server"], [str(tmp_path / "server.py")]):
        script = f"""
        import runpy
        sys.argv = ["dropin", "areal", *{how!r}, "--role", "actor"]
        runpy.run_module("mcore_logprobs.dropin", run_name="__main__", alter_sys=True)
        """
        printed = fresh(script, tmp_path)
        assert "__main__ mcore_logprobs.dropin.areal ['--role', 'actor']\n" in printed
        assert "areal.utils.functional.vocab_parallel: gather_logprobs, " in printed
    assert [switch.main([]), switch.main(["areal"]), switch.main(["areal", "-m"])] == [2, 2, 2]


def test_inherited_by_child_processes(tmp_path: Path) -> None:
    """As AReaL forks colocated roles: another command, in the environment of the first."""
    root = written("areal", tmp_path / "root")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("was_hidden = True\n")
    child = (
        "import sys; from sitecustomize import was_hidden; assert 'torch' not in sys.modules; "
        "from areal.engine.megatron_utils import packed_context_parallel as theirs; "
        "from areal.utils.functional.vocab_parallel import gather_logprobs as own; "
        "print(theirs.gather_logprobs_entropy.__module__, own.__module__)"
    )
    (tmp_path / "parent.py").write_text(
        "import os, subprocess, sys\nassert 'areal' not in sys.modules\n"
        f"print(subprocess.check_output([sys.executable, '-c', {child!r}], text=True))\n"
    )
    script = f"""
    import runpy
    sys.argv = ["dropin", "areal", {str(tmp_path / "parent.py")!r}]
    runpy.run_module("mcore_logprobs.dropin", run_name="__main__", alter_sys=True)
    """
    path = os.pathsep.join([str(hidden), str(root), os.environ.get("PYTHONPATH", "")])
    printed = fresh(script, PYTHONPATH=path)
    assert "mcore_logprobs.dropin.areal mcore_logprobs.dropin.areal\n" in printed
    assert printed.count("areal.utils.functional.vocab_parallel: gather_logprobs, ") == 1


def test_the_variables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert switch.main(["skyrl", "--env"]) == 0
    name, path = capsys.readouterr().out.splitlines()
    assert name == "export MCORE_LOGPROBS_DROPIN=skyrl"
    folder = path.removeprefix("export PYTHONPATH=").partition(os.pathsep)[0]
    assert Path(folder, "sitecustomize.py").is_file()
    command = [sys.executable, "-c", "print('went on')"]
    environment = {"MCORE_LOGPROBS_DROPIN": "vllm", "PYTHONPATH": folder}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "MCORE_LOGPROBS_DROPIN: expected one of nemo_rl, roll, " in done.stderr
    assert "went on" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["slimy", "--env"], "framework: expected one of nemo_rl, roll, "),
        (["slimy", "--env"], ", got 'slimy'; did you mean slime?"),
        (["vllm", "train.py"], ", got 'vllm'\n"),
        (["slime", "nowhere.py"], "expected a script, got nowhere.py: no such file\n"),
        (["slime", "-m", "no.where"], "expected a module, got no.where: not found on sys.path\n"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(arguments, said: str, capsys) -> None:
    path = list(sys.path)
    assert switch.main(arguments) == 2
    assert sys.path == path
    printed = capsys.readouterr()
    assert printed.err.startswith("python -m mcore_logprobs.dropin: error: ")
    assert said in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert not switch._on


def test_help_is_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["-h"], ["slime", "--help"]):
        assert switch.main(arguments) == 0
        assert capsys.readouterr().out.startswith("usage: python -m mcore_logprobs.dropin FRAMEW")
    assert switch.main(["slime"]) == 2
    assert capsys.readouterr().err.startswith("usage: ")
    assert not switch._on


def test_a_framework_that_is_not_there(tmp_path: Path) -> None:
    """Its name may be another's, or its environment the wrong one."""
    (tmp_path / "own.py").write_text("import sys; print('ran', sys.argv)\n")
    script = f"""
    from mcore_logprobs.dropin.switch import main
    print(main(["areal", {str(tmp_path / "own.py")!r}]))
    """
    said = "areal-project/AReaL: expected its files on sys.path, found none;"
    printed = fresh(script)
    assert said in printed
    assert "ran [" in printed
    root = written("areal", tmp_path)
    assert said not in fresh(script, root)
    # A checkout in which the script stands is found, as Python finds it.
    (root / "own.py").write_text("import areal.utils.data\n")
    printed = fresh(f"""
    from mcore_logprobs.dropin.switch import main
    main(["areal", {str(root / "own.py")!r}])
    """)
    assert said not in printed
    assert "areal.utils.data: " in printed


def test_another_version(tmp_path: Path) -> None:
    """One line with both versions where every call fits; else nothing is replaced."""
    root = written("areal", tmp_path)
    metadata = root / "areal-9.9.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: areal\nVersion: 9.9\n")
    script = """
    from mcore_logprobs.dropin.switch import switch_on
    switch_on("areal")
    """
    printed = fresh(script, root)
    assert "areal-project/AReaL: version 9.9 is installed, mcore_logprobs.dropin.areal" in printed
    assert "compared with 1.0.4; every call fits" in printed
    file = root / FRAMEWORKS["areal"].files[0]
    file.write_text(file.read_text().replace("def gather_logprobs(", "def renamed("))
    assert "not in its files: gather_logprobs; every other call fits" in fresh(script, root)


@pytest.mark.parametrize("framework", ["roll", "nemo_rl"])
def test_a_worker_class_by_its_path(tmp_path: Path, framework: str) -> None:
    """Ray imports the class's module in the worker: ROLL's worker_cls, NeMo-RL's extension."""
    (tmp_path / "your_workers.py").write_text(
        f"from mcore_logprobs.dropin.switch import switch_on\nswitch_on({framework!r})\n"
        "class Worker: ...\n"
    )
    load = "module, _, name = path.rpartition('.'); getattr(importlib.import_module(module), name)"
    root = checkout({"roll": "roll", "nemo_rl": "nemo-rl"}[framework])
    if root and framework == "roll":
        load = f"""
    import logging
    from typing import Any, Optional
    logger = logging.getLogger("roll")
    own = {str(root / "roll/utils/import_utils.py")!r}
    names = ("safe_import_class", "can_import_class")
    exec(part_of(own, lambda n: getattr(n, "name", "") in names))
    safe_import_class(path)
    """
    if root and framework == "nemo_rl":
        load = f"""
    # In RayWorkerBuilder.create_worker.
    own = {str(root / "nemo_rl/distributed/worker_groups.py")!r}
    def wanted(node):
        text = ast.unparse(node) if isinstance(node, ast.Assign) else ""
        return "ray_actor_class_fqn.rsplit" in text or text.startswith("module = importlib.")
    self = types.SimpleNamespace(ray_actor_class_fqn=path)
    exec(part_of(own, wanted))
    """
    described = FRAMEWORKS[framework]
    file = described.installed_path(described.files[-1]).removesuffix(".py").replace("/", ".")
    script = f"""
    path = "your_workers.Worker"
    {load}
    import {file}
    """
    line = (
        f"{file}: vocab_parallel_logprobs" if framework == "roll" else f"{file}: AllGatherCPTensor"
    )
    assert line in fresh(script, written(framework, tmp_path))
