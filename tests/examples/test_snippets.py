"""Every snippet runs, under 50 lines, and shows what it says."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import get_pool

SNIPPETS = Path(__file__).parents[2] / "examples" / "snippets"
NAMES = sorted(p.stem for p in SNIPPETS.glob("*.py"))


def _main(name: str, *args: Any) -> Any:
    if str(SNIPPETS) not in sys.path:
        sys.path.insert(0, str(SNIPPETS))
    return importlib.import_module(name).main(*args)


def _run(name: str, *args: Any, ranks: int = 1) -> Any:
    return get_pool(ranks).run(_main, name, *args, timeout=200)[0]


@pytest.mark.parametrize("name", NAMES)
def test_length(name: str) -> None:
    assert len((SNIPPETS / f"{name}.py").read_text().splitlines()) < 50


def test_all_are_run_here() -> None:
    own = Path(__file__).read_text()
    assert [name for name in NAMES if f'"{name}"' not in own and name != "tiny"] == []


def test_patch_model() -> None:
    found = _run("patch_model")
    assert found["difference"] < 1e-5
    assert 0 < found["entropy"] <= math.log(90)
    assert found["gradient"] > 0


def test_dpo() -> None:
    losses = _run("dpo")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[-1] < 0.9 * losses[0]


def test_distill() -> None:
    losses = _run("distill")
    assert losses[-1] < 0.9 * losses[0]


def test_top_p() -> None:
    found = _run("top_p")
    assert found["with filter"] < 1e-5
    assert math.log(0.89) < found["without filter"] < -0.01
    assert found["weight"] == pytest.approx(1, abs=1e-5)


def test_cp_loss_scale() -> None:
    assert _run("cp_loss_scale", 2, ranks=2) == pytest.approx(_run("cp_loss_scale", 1), rel=1e-4)


def test_megatron_flags() -> None:
    loss, plain = _run("megatron_flags")
    assert loss == pytest.approx(plain, rel=1e-6)


def test_prefix_tree() -> None:
    found = _run("prefix_tree")
    assert found["logprobs"] < 1e-5
    assert found["gradient"] < 1e-5
    assert found["tokens saved"] == 3 * 9


def test_generate() -> None:
    one, two = _run("generate", 1), _run("generate", 2, ranks=2)
    assert one == two
    assert len({token for row in one for token in row}) > 10


def test_on_policy_distillation() -> None:
    losses = _run("on_policy_distillation")
    assert sum(losses[-2:]) < 0.9 * sum(losses[:2])
