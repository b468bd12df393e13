"""Names, parameters, order and defaults of every framework, against what it ships and calls."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_logprobs.debug import doctor
from mcore_logprobs.dropin import installed, nemo_rl, roll
from mcore_logprobs.dropin.installed import FRAMEWORKS, carried, signature_mismatch, signatures
from tests.dropin.frameworks import MAIN, source_root, versions
from tests.dropin.upstream import Call, calls, refused

PINS = Path(__file__).with_name("frameworks.txt")
ON_PYPI = ("verl", "areal", "skyrl", "ms_swift")
SOURCES = [(f, v) for f in FRAMEWORKS for _, v in versions(FRAMEWORKS[f].distributions[0])]
RECORDED: dict[str, list[dict[str, Any]]] = json.loads(
    Path(__file__).with_name("upstream.json").read_text()
)
REVISIONS = [(name, r) for name, records in RECORDED.items() for r in records]


def check_signatures(framework: str, theirs: dict[str, str]) -> None:
    problems = {
        n: why
        for n, text in theirs.items()
        if (why := signature_mismatch(carried(framework, n), text))
    }
    assert problems == {}


def check_calls(framework: str, made: list[Call]) -> None:
    assert [why for call in made if (why := refused(carried(framework, call.name), call))] == []


@pytest.mark.parametrize(("framework", "version"), SOURCES)
def test_a_source_s_signatures(framework: str, version: str) -> None:
    described = FRAMEWORKS[framework]
    root = source_root(described.distributions[0], version)
    theirs: dict[str, str] = {}
    for file in described.files:
        path = root / (file if version == MAIN else described.installed_path(file))
        found = signatures(path.read_text(), described.names())
        assert found
        assert not found.keys() & theirs.keys()
        theirs |= found
    assert sorted(theirs) == sorted(described.names())
    check_signatures(framework, theirs)


@pytest.mark.parametrize(("framework", "version"), SOURCES)
def test_every_call_in_a_source(framework: str, version: str) -> None:
    """All files, so that a caller that upstream adds is met here first."""
    described = FRAMEWORKS[framework]
    root = source_root(described.distributions[0], version)
    roots = {name.partition(".")[0] for name in described.names()}
    made = []
    for path in filter(Path.is_file, root.rglob("*.py")):
        text = path.read_text()
        if any(name in text for name in roots):
            made += calls(text, str(path.relative_to(root)), described)
    # Names that only others' code calls are few in a wheel, and some in a repository.
    assert len({call.name for call in made}) >= len(described.names()) // (2 if not version else 3)
    check_calls(framework, made)


@pytest.mark.parametrize(
    ("framework", "record"), REVISIONS, ids=[f"{n}-{r['revision']}" for n, r in REVISIONS]
)
def test_what_is_recorded_of_the_others(framework: str, record: dict[str, Any]) -> None:
    assert len(record["commit"]) == 40
    assert record["date"] >= "2026-06"
    assert record["calls"]
    assert set(record["signatures"]) <= set(FRAMEWORKS[framework].names())
    check_signatures(framework, record["signatures"])
    made = [Call(**{**call, "keywords": tuple(call["keywords"])}) for call in record["calls"]]
    check_calls(framework, made)


def test_every_framework_is_compared() -> None:
    assert set(RECORDED) | set(ON_PYPI) == set(FRAMEWORKS)
    for name, records in RECORDED.items():
        # The main branch has every name; a release may lack those that came after it.
        assert set(records[-1]["signatures"]) == set(FRAMEWORKS[name].names())
    folder = Path(installed.__file__).parent
    assert all((folder / f"{name}.py").exists() for name in FRAMEWORKS)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_names_are_exported_and_described(framework: str) -> None:
    module = __import__(f"mcore_logprobs.dropin.{framework}", fromlist=["x"])
    for name in {n.partition(".")[0] for n in FRAMEWORKS[framework].names()}:
        assert name in module.__all__
        assert len(inspect.getdoc(getattr(module, name)) or "") > 20, name


# ---- the comparison itself -----------------------------------------------------------------------


def sample(a, b=1, *, c=None, ours="x"):
    """Takes more than upstream's, with defaults."""


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        ("(a, b=1, *, c=None)", ""),
        ("(a)", ""),
        ("(a, b=2)", "b: expected the default 2, got 1"),
        ("(b, a)", "expected 'b' at position 0, got ['a']"),
        ("(a, b=1, d=None)", "expected 'd' at position 2, got []"),
        ("(a, *, d)", "expected a parameter 'd'"),
        ("(a, **anything)", "upstream takes any keyword"),
        ("()", "'a' is only ours and has no default"),
    ],
)
def test_misfits(theirs: str, why: str) -> None:
    assert signature_mismatch(sample, theirs) == why


def test_calls_are_found_where_the_name_is_imported() -> None:
    source = """
from mcore_adapter.parallel_functions import context_parallel_gather as gather
from elsewhere import vocab_parallel_entropy
gather(x, parallel_dim=1)
vocab_parallel_entropy(x, 1, 2, 3)
def f(vocab_parallel_logprobs): ...
"""
    assert list(calls(source, "a.py", FRAMEWORKS["roll"])) == [
        Call("context_parallel_gather", 1, ("parallel_dim",))
    ]
    call = Call("x", 3, ("c",))
    assert "too many positional" in refused(sample, call)
    assert refused(sample, Call("x", 1, ("c",))) == ""
    assert "missing a required argument" in refused(sample, Call("x", 0, ("c",)))
    assert refused(sample, Call("x", 0, (), open=True)) == ""


def test_installed_frameworks_are_reported(tmp_path: Path) -> None:
    found = installed.installed([str(source_root("verl")), str(source_root("ms-swift", "4.5.2"))])
    assert {n: (f["version"], f["compared"], f["problems"]) for n, f in found.items()} == {
        "verl": ("0.9.1", "0.9.1", []),
        "ms_swift": ("4.5.2", "4.6.0", []),
    }
    replaces = found["verl"]["replaces"]
    assert replaces["verl.trainer.distillation.megatron.losses"] == ["compute_forward_kl_topk"]
    assert replaces["verl.utils.kernel.linear_cross_entropy"] == []  # left alone
    broken = tmp_path / "areal/utils/functional/vocab_parallel.py"
    broken.parent.mkdir(parents=True)
    broken.write_text("def gather_logprobs(logits, labels, brand_new): ...\n")
    elsewhere = tmp_path / "areal/engine/new_place.py"
    elsewhere.parent.mkdir()
    elsewhere.write_text("def reassemble_cp_packed_logprobs(local_tensor, padded): ...\n")
    (tmp_path / "areal/later.py").write_text(elsewhere.read_text())  # the first counts
    report = "; ".join(installed.installed([str(tmp_path)])["areal"]["problems"])
    assert "reassemble_cp_packed_logprobs has moved to areal/engine/new_place.py" in report
    assert "gather_logprobs: expected 'brand_new' at position 2" in report
    assert "gather_logprobs_entropy is no longer in" in report
    assert "packed_context_parallel.py is not there" in report


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"def gather_logprobs(logits:\n", "expected a file that this Python parses"),
        (b"\xff", "expected a text in UTF-8"),
    ],
)
def test_a_file_that_does_not_parse_is_a_problem_of_its_framework(
    tmp_path: Path, content: bytes, why: str
) -> None:
    broken = tmp_path / "areal/utils/functional/vocab_parallel.py"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(content)
    found = installed.installed([str(tmp_path), str(source_root("verl"))])
    assert found["verl"]["problems"] == []
    (problem,) = found["areal"]["problems"]
    assert why in problem


def test_doctor_reports_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.report()["frameworks"] == {}
    monkeypatch.syspath_prepend(str(source_root("areal")))
    text = doctor.as_text(doctor.report())
    assert "areal                1.0.4 (compared with 1.0.4): every call fits the drop-in" in text
    line = "switch_on('areal') replaces in areal.utils.functional.vocab_parallel: gather_logprobs, "
    assert line in text
    monkeypatch.setattr(installed, "signature_mismatch", lambda ours, theirs: "another argument")
    assert "WARNING gather_logprobs: another argument" in doctor.as_text(doctor.report())


def test_releases_compared_with_are_those_of_the_tests() -> None:
    pins = [line.split("==") for line in PINS.read_text().split() if "==" in line]
    for name, framework in FRAMEWORKS.items():
        versions_ = [version for pin, version in pins if pin in framework.distributions]
        assert not versions_ or framework.compared == versions_[0], name


# ---- what all drop-ins have in common: no mathematics, ranges checked, older calls taken ---------


def test_they_only_forward() -> None:
    """No mathematics of their own: no log, softmax or matrix product in any drop-in module."""
    banned = {"log", "logsumexp", "softmax", "log_softmax", "matmul", "mm", "bmm", "einsum"}
    for path in Path(nemo_rl.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in banned, f"{path.name}:{node.lineno} {node.attr}"
            if isinstance(node, ast.BinOp):
                assert not isinstance(node.op, ast.MatMult), f"{path.name}:{node.lineno}"


def test_a_range_that_is_not_this_ranks_raises() -> None:
    logits, target = torch.randn(1, 3, 8), torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"expected \(0, 8\) for rank 0 of 1 .* got \(8, 16\)"):
        nemo_rl.DistributedLogprob.apply(logits, target, 8, 16, None)
    with pytest.raises(ValueError, match=r"expected \(0, 8\) for rank 0 of 1 .* got \(0, 7\)"):
        nemo_rl.from_parallel_logits_to_logprobs(logits, target, 0, 7, None)


def test_hidden_states_with_and_without_output_weight() -> None:
    """NeMo-RL's call of before 0.7 and of today, by position and by name."""
    function = nemo_rl.from_parallel_hidden_states_to_logprobs
    hidden, weight = torch.randn(4, 2, 6), torch.randn(8, 6)
    target = torch.randint(0, 8, (2, 4))
    place = {"vocab_start_index": 0, "vocab_end_index": 8, "tp_group": None}
    want = (hidden @ weight.T).transpose(0, 1).double().log_softmax(-1)[:, :-1]
    want = want.gather(-1, target[:, 1:, None])[..., 0]
    calls = [
        function(hidden, weight, None, target, 0, 8, None),
        function(hidden, weight, True, target, 0, 8, None, True, None, 2),
        function(hidden, weight, None, target, **place, chunk_size=3),
        function(hidden, weight, runtime_gather_output=None, target=target, **place),
        function(hidden, weight, None, None, target, 0, 8, None),
        function(hidden, None, weight, False, target, 0, 8, None, False, None, 2),
        function(hidden, None, weight, None, target=target, **place),
        function(hidden, None, weight, runtime_gather_output=None, target=target, **place),
        function(
            hidden,
            output_weight_layer=None,
            output_weight=weight,
            runtime_gather_output=None,
            target=target,
            **place,
        ),
    ]
    for got in calls:
        assert (got - want).abs().max() < 1e-5
    with pytest.raises(ValueError, match="expected a tensor in one, got None"):
        function(hidden, None, None, None, target, 0, 8, None)


def test_vocab_utility() -> None:
    utility = roll.VocabUtility
    assert tuple(utility.vocab_range_from_per_partition_vocab_size(10, 2, 4)) == (20, 30)
    assert tuple(utility.vocab_range_from_global_vocab_size(40, 3, 4)) == (30, 40)
    with pytest.raises(ValueError, match="expected a multiple of 4, got 41"):
        utility.vocab_range_from_global_vocab_size(41, 3, 4)
