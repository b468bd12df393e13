"""The command lines: help without torch, defaults, versions, the nearest name of a misspelt one."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys

import pytest

import mcore_logprobs
from mcore_logprobs.__main__ import COMMANDS, main
from mcore_logprobs.commands import why_not_written
from tests.helpers.documents import ROOT

HELP = [["--help"], ["--version"], ["bench", "--version"], ["doctor", "mismatch", "--help"]]
HELP += [[command, "--help"] for command in COMMANDS]


def test_help_comes_without_torch() -> None:
    script = f"""
import sys
from mcore_logprobs.__main__ import main
for arguments in {HELP!r}:
    print("$", *arguments)
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = stop.code
    assert not status, (arguments, status)
    assert "torch" not in sys.modules, arguments
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = {part.splitlines()[0]: part for part in done.stdout.split("$ ")[1:]}
    assert mcore_logprobs.__version__ in printed["--version"]
    assert mcore_logprobs.__version__ in printed["bench --version"]
    assert "(default: 5)" in printed["bench --help"]
    assert "(default: logprobs)" in printed["audit --help"]
    assert "--full" in printed["doctor --help"]
    assert "SCRIPT ARGS" in printed["run --help"]
    assert all(command in printed["--help"] for command in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctr"], "did you mean doctor?"),
        (["bench", "lineer"], "did you mean linear?"),
        (
            ["bench", "linear", "--rwos", "8"],
            "unrecognized argument --rwos; did you mean --rows?",
        ),
        (["bench", "--row", "8"], "did you mean --rows?"),
        (["doctor", "--ful"], "did you mean --full?"),
        (["bench", "--mem", "8"], "did you mean --memory-gib?"),
        (["audit", "a:b", "--kind", "logprob"], "did you mean logprobs?"),
        (["run", __file__, "--", "--logprob-entropy"], "expected before '--'"),
        (["bench", "--dtype", "bf17"], "expected some of bf16, bfloat16, fp16"),
        (["doctor", "--zzz"], "unrecognized argument --zzz\n"),
    ],
)
def test_the_nearest_name_of_a_misspelt_one(arguments, message: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_measurements(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name)
    )
    with pytest.raises(SystemExit):
        main(["bench", "logits", "--plot", "costs.png"])
    assert "--plot: expected matplotlib to be installed: pip" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--plot", "--json"])
def test_a_file_in_no_folder_is_refused_before_the_measurements(flag: str, tmp_path, capsys):
    file = str(tmp_path / "none" / "costs")
    with pytest.raises(SystemExit):
        main(["bench", "logits", flag, file])
    message = f"{flag}: expected a file in a folder that exists, got {file}"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--plot", "--json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_measurements(flag, tmp_path, capsys):
    folder, kept = tmp_path / "costs.png", tmp_path / "kept.png"
    folder.mkdir()
    kept.write_text("kept")
    for file, message in (
        (str(folder), f"expected a file, got the folder {str(folder)!r}"),
        ("/proc/costs.png", "expected a file that can be written, got /proc/costs.png ("),
        ("", "expected a file, got ''"),
    ):
        with pytest.raises(SystemExit):
            main(["bench", "logits", flag, file])
        assert f"{flag}: {message}" in capsys.readouterr().err
    assert why_not_written(str(kept)) == why_not_written(str(tmp_path / "new.png")) == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["costs.png", "kept.png"]
    assert kept.read_text() == "kept"


def test_a_picture_of_an_unknown_format_is_refused_before_the_measurements(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "logits", "--plot", str(tmp_path / "x.foo")])
    said = capsys.readouterr().err
    assert "--plot: expected a suffix of " in said
    assert " pdf," in said


def test_a_reader_that_stops_reading_and_ctrl_c_give_no_traceback(monkeypatch) -> None:
    script = """
import sys
from mcore_logprobs import __main__ as m
m.resolve_name = lambda name: lambda arguments: print("x" * 10**6) or 0
sys.exit(m.main(["doctor"]))
"""
    for words in (["-c", script], ["-m", "mcore_logprobs.dropin", "areal", "--env"]):
        command = [sys.executable, *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 141

    monkeypatch.setattr("sys.stdout", None)  # closed
    monkeypatch.setattr("mcore_logprobs.__main__.resolve_name", lambda name: lambda arguments: 0)
    assert main(["doctor"]) == 0

    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("mcore_logprobs.__main__.resolve_name", lambda name: interrupted)
    assert main(["bench"]) == 130
    with pytest.raises(KeyboardInterrupt):
        main(["run", "script.py"])


def test_the_tests_own_help_makes_no_environment(tmp_path) -> None:
    script = ROOT / "tests" / "run.sh"
    path = {"PATH": "/usr/bin:/bin", "PYTHON": "false"}
    done = subprocess.run(["bash", script, "--help"], capture_output=True, text=True, env=path)
    assert done.returncode == 0, done.stderr
    assert "--coverage" in done.stdout
    assert "--matrix" in done.stdout


def test_somebody_s_own_environment_is_not_cleared(tmp_path) -> None:
    """In a copy of what makes one, by an interpreter that makes none."""
    (tmp_path / "examples").mkdir()
    for name in ("pyproject.toml", "examples/setup_env.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    own = tmp_path / ".venv" / "mine.txt"
    own.parent.mkdir()
    own.write_text("kept")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" != -m ] && exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", "source examples/setup_env.sh"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(python)},
    )
    assert done.returncode == 1
    assert f"{own.parent} was not made by this script" in done.stderr
    assert own.read_text() == "kept"


def test_a_vocabulary_that_no_segment_divides_is_refused_before_the_measurements(capsys) -> None:
    with pytest.raises(
        SystemExit, match="--vocab: expected a multiple of 8 for invariant, got 500"
    ):
        main(["bench", "invariant", "--vocab", "504,500", "--busy-ok"])
    assert "GiB" not in capsys.readouterr().out


def test_run_gives_a_script_what_python_gives_it(tmp_path) -> None:
    """The script's folder first on sys.path, not the working folder, and an absolute `__file__`."""
    script = tmp_path / "sub" / "script"
    script.parent.mkdir()
    script.write_text("import sys; print(__file__, __name__, sys.argv[1:], sys.path)")
    printed = []
    for way in ((), ("-m", "mcore_logprobs", "run")):
        command = [sys.executable, *way, "sub/script", "--x"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    assert printed[0].startswith(f"{script} __main__ ['--x'] ['{script.parent}', ")
