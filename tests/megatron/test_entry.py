"""The ways in from Megatron's flags, without a training run: flags, vocabulary, imports, `run`."""

from __future__ import annotations

import argparse
import importlib
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest

from mcore_logprobs import (
    LogprobConfig,
    add_logprob_args,
    logprob_model_hook,
    patched_model_provider,
    run,
)
from mcore_logprobs.megatron.imports import after_import, replace_function
from mcore_logprobs.megatron.launcher import Launcher, LaunchError


def parsed(*flags: str, **megatron: object) -> Namespace:
    namespace = add_logprob_args(argparse.ArgumentParser()).parse_args(list(flags))
    return Namespace(**vars(namespace), **megatron)


@pytest.mark.parametrize(
    ("megatron", "expected"),
    [
        ({"padded_vocab_size": 128, "vocab_size": 100}, 100),
        ({"padded_vocab_size": 128, "vocab_size": 128}, None),
        ({"padded_vocab_size": None, "vocab_size": 100}, 100),
        ({"padded_vocab_size": None, "vocab_size": None}, None),
        ({"vocab_size": 100}, None),  # not Megatron-LM's namespace
        ({}, None),
    ],
    ids=str,
)
def test_vocabulary_by_megatrons_arguments(megatron, expected):
    assert LogprobConfig.from_args(parsed(**megatron)).vocab_size == expected


def test_vocabulary_of_the_null_tokenizer_is_its_own():
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    args = parsed(padded_vocab_size=128, vocab_size=100, tokenizer_type="NullTokenizer")
    assert LogprobConfig.from_args(args).vocab_size == NullTokenizer(100).vocab_size


def test_vocabulary_by_flag_comes_first():
    args = parsed("--logprob-vocab-size", "90", padded_vocab_size=128, vocab_size=100)
    assert LogprobConfig.from_args(args).vocab_size == 90
    args = parsed("--logprob-vocab-size", "128", padded_vocab_size=128)
    assert LogprobConfig.from_args(args).vocab_size == 128


def test_vocabulary_of_unknown_size_raises():
    with pytest.raises(ValueError, match="--logprob-vocab-size"):
        LogprobConfig.from_args(parsed(padded_vocab_size=128, vocab_size=None))


def test_flags_can_be_added_twice():
    parser = add_logprob_args(add_logprob_args(argparse.ArgumentParser()))
    assert parser.parse_args(["--logprob-output", "loss"]).logprob_output == "loss"


@pytest.mark.parametrize("wrong", [{}, "loss", 3], ids=str)
def test_hook_refuses_what_it_cannot_read(wrong):
    with pytest.raises(ValueError, match="expected a LogprobConfig"):
        logprob_model_hook(wrong)


def test_a_hook_reads_what_megatron_makes_of_a_yaml_file():
    """`--yaml-cfg` gives a `types.SimpleNamespace`."""
    with pytest.raises(ValueError, match=r"LogprobConfig.temperature: .* got -1.0"):
        logprob_model_hook(SimpleNamespace(logprob_temperature=-1.0))([])
    with pytest.raises(ValueError, match="add_logprob_args"):
        logprob_model_hook(SimpleNamespace(hidden_size=4))([])


def test_a_namespace_without_the_flags_raises():
    with pytest.raises(ValueError, match="add_logprob_args"):
        logprob_model_hook(Namespace(hidden_size=4))([])
    with pytest.raises(ValueError, match="args to be a parsed namespace or None, got dict"):
        patched_model_provider(lambda: [], args={"logprob_temperature": 0.7})
    provider = patched_model_provider(lambda: [], args=Namespace(hidden_size=4))
    with pytest.raises(ValueError, match="add_logprob_args"):
        provider()


# Imports.


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose __init__ takes a name from a module of its own, as Megatron's does."""
    folder = tmp_path / "entry_probe"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .work import double\n")
    (folder / "work.py").write_text("def double(x, times=2):\n    return x * times\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "entry_probe"
    for name in [n for n in sys.modules if n.startswith("entry_probe")]:
        del sys.modules[name]


def test_after_import_comes_before_names_are_bound(package):
    finders = list(sys.meta_path)
    seen = []

    def act(module):
        seen.append(module.__name__)
        replace_function(module, "double", before=lambda given: given.__setitem__("times", 5))

    after_import(f"{package}.work", act)
    assert not seen
    import entry_probe

    assert seen == ["entry_probe.work"]
    assert entry_probe.double(3) == 15
    assert sys.meta_path == finders
    after_import(f"{package}.work", lambda module: seen.append("again"))  # it has run already
    assert seen[-1] == "again"


def test_after_import_can_be_taken_back(package):
    finders = list(sys.meta_path)
    after_import(f"{package}.work", lambda module: pytest.fail("taken back"))()
    assert sys.meta_path == finders
    import entry_probe

    assert entry_probe.double(3) == 6


def test_after_import_outlives_a_search_and_imports_that_fail(tmp_path, monkeypatch):
    finders, seen = list(sys.meta_path), []
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "entry_single.py"
    file.write_text("import entry_not_there\n")

    def act(module):
        seen.append(module.__name__)
        if len(seen) < 3:
            raise ValueError("not yet")

    after_import("entry_single", act)
    try:
        assert importlib.util.find_spec("entry_single") is not None  # and nobody imports it
        with pytest.raises(ImportError):
            importlib.import_module("entry_single")
        assert not seen
        file.write_text("value = 1\n")
        importlib.invalidate_caches()
        for _ in range(2):
            with pytest.raises(ValueError, match="not yet"):
                importlib.import_module("entry_single")
        assert importlib.import_module("entry_single").value == 1
        assert seen == ["entry_single"] * 3
        assert sys.meta_path == finders
    finally:
        sys.modules.pop("entry_single", None)


def test_replaced_function_is_put_back(package):
    import entry_probe.work as work

    plain, results = work.double, []
    undo = replace_function(work, "double", after=results.append)
    assert work.double(4, times=3) == 12
    assert results == [12]
    undo()
    assert work.double is plain


# `python -m mcore_logprobs run`.


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(text)
    return str(path)


def test_run_is_python_for_a_script_without_flags(tmp_path, capsys):
    (tmp_path / "beside.py").write_text("HERE = 'beside'\n")
    path = script(
        tmp_path,
        "import sys, beside\nprint(__name__, sys.argv[1:], beside.HERE, sys.path[0])\n",
    )
    argv, search, finders = sys.argv, list(sys.path), list(sys.meta_path)
    assert run.main([path, "--lr", "1"]) == 0
    out = capsys.readouterr()
    assert out.out == f"__main__ ['--lr', '1'] beside {tmp_path}\n"
    assert "no model was patched" in out.err
    assert (sys.argv, sys.path, sys.meta_path) == (argv, search, finders)
    del sys.modules["beside"]


@pytest.mark.parametrize("ending", ["", "import sys; sys.exit()", "raise SystemExit(0)"])
def test_run_with_a_flag_needs_megatrons_parser(tmp_path, capsys, ending):
    assert run.main([script(tmp_path, ending), "--logprob-output", "loss"]) == 1
    assert "--logprob-output was given" in capsys.readouterr().err


def test_run_passes_the_scripts_own_ending_on(tmp_path):
    with pytest.raises(SystemExit) as stop:
        run.main([script(tmp_path, "raise SystemExit(3)"), "--logprob-output", "loss"])
    assert stop.value.code == 3
    with pytest.raises(ZeroDivisionError):
        run.main([script(tmp_path, "1 / 0"), "--logprob-output", "loss"])
    with pytest.raises(SystemExit):
        run.main([script(tmp_path, "raise SystemExit(0)"), "--logprob-output", "loss", "--help"])


@pytest.mark.parametrize(
    "flags",
    [["--logprob-temprature", "2"], ["--logprob-output", "logits"], ["--logprob-temperature", "0"]],
    ids=str,
)
def test_run_refuses_bad_flags_before_the_script_runs(tmp_path, capsys, flags):
    path = script(tmp_path, "raise AssertionError('the script ran')")
    with pytest.raises(SystemExit) as stop:
        run.main([path, *flags])
    assert stop.value.code == 2
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--logprob-entropy", "LogprobConfig: entropy: expected output='stats'"),
        (
            "--logprob-target-rank --logprob-sum-pi-squared --logprob-output loss",
            "LogprobConfig: target_rank, sum_pi_squared: expected output='stats'",
        ),
        ("--logprob-top-p 0.9 --logprob-label-smoothing 0.1", "LogprobConfig.label_smoothing: "),
        ("--logprob-top-k 5 --logprob-invariant-segments 4", "LogprobConfig.invariant_segments: "),
        ("--logprob-no-fused --logprob-logits lazy", "LogprobConfig.logits: expected 'real'"),
    ],
    ids=["entropy", "two of them", "smoothing", "segments", "lazy"],
)
def test_run_refuses_flags_that_contradict_each_other_before_the_script_runs(
    tmp_path, capsys, flags, said
):
    path = script(tmp_path, "raise AssertionError('the script ran')")
    with pytest.raises(SystemExit) as stop:
        run.main([path, *flags.split()])
    assert stop.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"python -m mcore_logprobs run: error: {said}")


def test_run_takes_flags_of_which_each_allows_the_others(tmp_path):
    flags = "--logprob-entropy --logprob-output stats --logprob-top-p 0.9 --logprob-logits lazy"
    with pytest.raises(ZeroDivisionError):
        run.main([script(tmp_path, "1 / 0"), *flags.split()])


@pytest.mark.parametrize(
    "arguments", [[], ["--logprob-output"], ["no-such-file.py"], ["-m"], ["-m", "no.such"]]
)
def test_run_without_a_script_says_how(capsys, arguments):
    assert run.main(arguments) == 2
    assert "usage: python -m mcore_logprobs run" in capsys.readouterr().err


def test_run_takes_a_module(tmp_path, monkeypatch, capsys):
    (tmp_path / "entry_main.py").write_text("import sys; print(sys.argv[1:])\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert run.main(["-m", "entry_main", "--lr", "1"]) == 0
    assert capsys.readouterr().out == "['--lr', '1']\n"


def test_default_output_under_run_is_the_loss():
    assert Launcher([])._settings.logprob_output == "loss"
    assert Launcher(["--logprob-output", "stats"])._settings.logprob_output == "stats"


def test_what_the_script_sets_holds_where_no_flag_says_otherwise():
    launcher = Launcher(["--logprob-temperature", "0.5", "--logprob-top-k", "3"])
    args = Namespace(logprob_temperature=0.7, logprob_chunk_size=64, logprob_output="stats")
    config = launcher._config_of(args)
    assert (config.temperature, config.chunk_size, config.output) == (0.5, 64, "stats")
    assert config.top_k == 3
    assert launcher._config_of(Namespace()).output == "loss"


def test_a_model_without_the_parser_raises_when_it_is_built():
    import torch

    with pytest.raises(LaunchError, match="never saw"):
        Launcher(["--logprob-compact"]).patch(torch.nn.Linear(2, 2))
