"""The wheel and the sdist: what they carry, and that they work away from the checkout."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import mcore_logprobs
from tests.helpers.documents import PACKAGE, ROOT


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Folder of the sdist and of the wheel that is built from the sdist alone."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


def wheel_files(built: Path) -> set[str]:
    (wheel,) = built.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_version_stands_in_one_place(built) -> None:
    version = mcore_logprobs.__version__
    assert {path.name for path in built.iterdir()} == {
        f"mcore_logprobs-{version}-py3-none-any.whl",
        f"mcore_logprobs-{version}.tar.gz",
    }
    for other in ("pyproject.toml", "docs/CITATION.cff"):
        assert re.search(rf"^version\b.*{version}", (ROOT / other).read_text(), re.M) is None
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_wheel_has_the_package_and_nothing_else(built) -> None:
    files = wheel_files(built)
    package = {f for f in files if ".dist-info/" not in f}
    expected = {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert package == expected
    assert "mcore_logprobs/py.typed" in package
    assert any(f.endswith("licenses/LICENSE") for f in files)


def test_the_sdist_has_neither_tests_nor_benchmarks(built) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    tops = {name.split("/")[0] for name in names}
    assert tops >= {"mcore_logprobs", "pyproject.toml", "README.md", "LICENSE", "PKG-INFO"}
    assert not tops & {"tests", "benchmarks", "examples", "docs", "configs", "build", ".venv"}


def test_it_installs_and_imports_outside_the_checkout(built, tmp_path) -> None:
    (wheel,) = built.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)  # as pip does it for a wheel without scripts
    script = f"""
import sys
sys.path.insert(0, {str(site)!r})
import importlib.metadata, torch, mcore_logprobs
assert mcore_logprobs.__file__.startswith({str(site)!r}), mcore_logprobs.__file__
assert importlib.metadata.version("mcore-logprobs") == mcore_logprobs.__version__
from mcore_logprobs import linear_token_stats
from mcore_logprobs.dropin import nemo_rl
hidden, weight = torch.randn(3, 8), torch.randn(11, 8)
stats = linear_token_stats(hidden, weight, torch.tensor([0, 5, 10]))
want = (hidden @ weight.t()).log_softmax(-1)[[0, 1, 2], [0, 5, 10]]
torch.testing.assert_close(stats.logprobs, want)
print("works")
"""
    # -I: neither the working directory nor PYTHONPATH may lead to the checkout.
    assert run(sys.executable, "-I", "-c", script, cwd=tmp_path).strip() == "works"
