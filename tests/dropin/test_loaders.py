"""Drop-ins switched on by configuration: by the frameworks' own loaders, commands, environments.

Each case is a process of its own, in which nothing of a framework has been imported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mcore_logprobs.dropin import switch
from mcore_logprobs.dropin.installed import FRAMEWORKS
from tests.dropin.frameworks import checkout, source_root, versions
from tests.dropin.switching import fresh, written

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
            assert vars(sys.modules["__main__"]) is globals()  # where pickle looks
            print(__name__, gather_logprobs.__module__, sys.argv[1:], "from", sys.path[0])
            """
        )
    )
    apart = tmp_path.resolve() / "apart"
    apart.mkdir()
    shutil.copy(tmp_path / "server.py", apart)
    for how in (["-m", "server"], [str(apart / "server.py")]):
        script = f"""
        import runpy
        sys.argv = ["dropin", "areal", *{how!r}, "--role", "actor"]
        runpy.run_module("mcore_logprobs.dropin", run_name="__main__", alter_sys=True)
        """
        printed = fresh(script, tmp_path)
        assert "__main__ mcore_logprobs.dropin.areal ['--role', 'actor'] from " in printed
        assert how[0] == "-m" or f" from {apart}\n" in printed
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
    (tmp_path / "own.py").write_text("import sys; print('ran', sys.argv, sys.path)\n")
    script = f"""
    import os, sys
    os.chdir("/")
    sys.path.insert(0, "/")  # as `python -m` does
    from mcore_logprobs.dropin.switch import main
    print(main(["areal", {str(tmp_path / "own.py")!r}]))
    """
    said = "areal-project/AReaL: expected its files on sys.path, found none;"
    printed = fresh(script)
    assert said in printed
    assert "ran [" in printed
    assert "'/'" not in printed  # the working folder, which Python gives no script
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
