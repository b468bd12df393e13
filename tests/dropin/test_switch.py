"""Drop-ins switched on: names replaced and put back, releases that do not fit.

Each case is a process of its own, in which nothing of a framework has been imported.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from mcore_logprobs.dropin import switch
from mcore_logprobs.dropin.installed import FRAMEWORKS
from tests.dropin.switching import fresh, written


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
    said = "areal-project/AReaL: found nowhere, and left as it is: gather_logprobs\n"
    printed = fresh(script, root)
    assert printed.count(said) == 1
    assert "framework: expected one of nemo_rl, roll, " in printed
    # At the start, as a process may never import all of the files.
    switched = "from mcore_logprobs.dropin.switch import switch_on; switch_on('areal')"
    assert fresh(switched, root).count(said) == 1
    # Or with the last file, where they are found only when they are imported.
    packages = ("areal", "areal.utils", "areal.utils.functional", "areal.engine")
    packages += ("areal.engine.megatron_utils",)
    printed = fresh(f"packages({str(root)!r}, *{packages})\n" + textwrap.dedent(script))
    assert printed.count(said) == 1


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


def test_a_file_whose_import_switches_on_is_named(tmp_path: Path) -> None:
    root = written("areal", tmp_path)
    file = root / FRAMEWORKS["areal"].files[0]
    file.write_text("import plugin\n" + file.read_text())
    plugin = tmp_path / "plugin.py"
    plugin.write_text("from mcore_logprobs.dropin.switch import switch_on\nswitch_on('areal')\n")
    script = """
    try:
        import areal.utils.functional.vocab_parallel
    except ValueError as error:
        print(error)
    from mcore_logprobs.dropin.switch import switch_on
    switch_on("areal")  # nothing is half on
    """
    said = "areal.utils.functional.vocab_parallel: expected a module whose import has ended or not"
    assert said in fresh(script, root)


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
