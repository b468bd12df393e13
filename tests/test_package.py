"""The package as a whole: what importing it costs, its public names, its layers, its docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import mcore_logprobs

PACKAGE = Path(mcore_logprobs.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
HEAVY = ("triton", "megatron", "transformer_engine")

# ---- the public names and signatures (DESIGN section 3; outside code relies on them) -----------

COMMON = {"tp_group": None, "temperature": 1.0, "vocab_size": None, "chunk_size": None}
COMMON |= {"backend": "auto"}
TARGETED = COMMON | {"ignore_index": -100}
LAYOUT = {"cp_group": None, "layout": "zigzag", "cu_seqlens": None}
HEAD = {
    "bias": None,
    "logit_scale": 1.0,
    "softcap": None,
    "sequence_parallel": False,
    "logits_dtype": torch.float32,
    "compact": False,
    "gradient_accumulation_fusion": False,
    "saved_bytes": 0,
    "tp_group": None,
    "chunk_size": None,
}
STATISTICS = {"entropy": False, "target_rank": False, "sum_pi_squared": False}
LINEAR = TARGETED | HEAD | STATISTICS
LOGITS = "vocab_parallel_logits"
FILTERS = {"top_k": None, "top_p": 1.0, "min_p": 0.0}
SAMPLED = FILTERS | {"seed": inspect.Parameter.empty, "mask": None}

# name: (positional arguments, keywords that must exist with these defaults)
SIGNATURES = {
    "vocab_parallel_logprobs": ([LOGITS, "target"], TARGETED),
    "vocab_parallel_entropy": ([LOGITS], COMMON),
    "vocab_parallel_target_rank": ([LOGITS, "target"], TARGETED),
    "vocab_parallel_token_stats": ([LOGITS, "target"], TARGETED | STATISTICS),
    "vocab_parallel_log_softmax": ([LOGITS], {"tp_group": None, "temperature": 1.0}),
    "vocab_parallel_topk": ([LOGITS, "k"], {"tp_group": None}),
    "vocab_parallel_gather": ([LOGITS, "ids"], {"tp_group": None, "log_softmax": False}),
    "vocab_parallel_sampling_logprobs": (
        [LOGITS, "target"],
        {"tp_group": None, "temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0}
        | {"kept_ids": None, "missing": "error", "full": False},
    ),
    "vocab_parallel_soft_cross_entropy": (["student_logits", "teacher_logits"], {"tp_group": None}),
    "vocab_parallel_kl_div": (
        ["student_logits", "teacher_logits"],
        {"tp_group": None, "kind": "forward"},
    ),
    "all_to_all_vp2sp": (["x"], {"tp_group": None}),
    "all_to_all_sp2vp": (["x"], {"tp_group": None}),
    "linear_token_stats": (["hidden", "weight", "target"], LINEAR),
    "linear_map": (["hidden", "weight", "fn"], HEAD | {"mask": None}),
    "linear_topk": (["hidden", "weight", "k"], HEAD | COMMON | {"mask": None}),
    "linear_gather": (["hidden", "weight", "ids"], HEAD | TARGETED | {"log_softmax": False}),
    "linear_sampling_logprobs": (
        ["hidden", "weight", "target"],
        HEAD
        | TARGETED
        | {"top_k": None, "top_p": 1.0, "min_p": 0.0, "kept_ids": None, "missing": "error"},
    ),
    "linear_topk_distill": (
        ["hidden", "weight", "teacher_topk_logits", "teacher_topk_ids"],
        HEAD | COMMON | {"normalize": "vocab", "entropy": False, "teacher_temperature": None},
    ),
    "vocab_parallel_topk_kl_div": (
        ["student_logits", "teacher_logprobs", "ids"],
        TARGETED | {"kind": "forward", "tail": None, "generalized": False, "teacher_lse": None},
    ),
    "linear_topk_kl_div": (
        ["hidden", "weight", "teacher_logprobs", "ids"],
        HEAD | TARGETED | {"kind": "forward", "tail": None, "generalized": False},
    ),
    "linear_policy_loss": (
        ["hidden", "weight", "target", "loss_fn"],
        LINEAR | {"denominator": 1.0},
    ),
    "vocab_parallel_argmax": ([LOGITS], {"tp_group": None, "vocab_size": None}),
    "vocab_parallel_topk_distill": (
        ["student_logits", "teacher_topk_logits", "teacher_topk_ids"],
        COMMON | {"normalize": "vocab", "entropy": False, "teacher_temperature": None},
    ),
    "vocab_parallel_sample": ([LOGITS], COMMON | SAMPLED),
    "linear_sample": (["hidden", "weight"], HEAD | COMMON | SAMPLED),
    "linear_kl_div": (
        ["hidden", "weight", "teacher_logits"],
        HEAD
        | COMMON
        | {"kind": "forward", "mask": None, "teacher_hidden": None, "teacher_weight": None},
    ),
    "context_parallel_shard": (["x"], LAYOUT | {"seq_dim": 1}),
    "context_parallel_gather": (["x"], LAYOUT | {"seq_dim": 1, "grad": "sum"}),
    "context_parallel_positions": (["seq_len"], LAYOUT),
    "context_parallel_shift": (["x"], LAYOUT | {"seq_dim": 1, "lengths": None, "fill": 0}),
}
OTHER_NAMES = [
    "TokenStats",
    "LogprobConfig",
    "ParallelGroups",
    "PatchHandle",
    "add_logprob_args",
    "logprob_output_processor",
    "patch_gpt_model",
    "patch_model",
    "unpatch_gpt_model",
    "unpatch_model",
]


def test_public_names() -> None:
    names = mcore_logprobs.__all__
    assert {*SIGNATURES, *OTHER_NAMES} <= set(names) <= set(dir(mcore_logprobs))
    operations = ("vocab_parallel_", "linear_", "context_parallel_", "all_to_all_")
    assert {name for name in names if name.startswith(operations)} <= SIGNATURES.keys()
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(mcore_logprobs, name) is getattr(mcore_logprobs, name) is not None


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_the_contract(name) -> None:
    positional, keywords = SIGNATURES[name]
    parameters = inspect.signature(getattr(mcore_logprobs, name)).parameters
    kinds = inspect.Parameter
    assert [
        n for n, p in parameters.items() if p.kind in (kinds.POSITIONAL_OR_KEYWORD,)
    ] == positional
    for keyword, default in keywords.items():
        assert keyword in parameters, f"{name} lacks the keyword {keyword}"
        assert parameters[keyword].kind is kinds.KEYWORD_ONLY
        assert parameters[keyword].default == default
    var_positional = [n for n, p in parameters.items() if p.kind is kinds.VAR_POSITIONAL]
    assert len(var_positional) == (name in ("linear_policy_loss", "linear_map"))


def test_classes_have_the_contract_s_members() -> None:
    fields = [f.name for f in dataclasses.fields(mcore_logprobs.TokenStats)]
    per_token = ["logprobs", "entropy", "target_rank", "lse", "sum_pi_squared"]
    more = ["policy_loss", "divergence", "full_logprobs", "kept_entropy", "candidates", "topk"]
    assert fields == [*per_token, *more]
    assert isinstance(mcore_logprobs.TokenStats.loss, property)
    groups = [f.name for f in dataclasses.fields(mcore_logprobs.ParallelGroups)]
    assert groups[:2] == ["tp", "cp"]
    for source in ("from_megatron", "from_model", "from_device_mesh"):
        assert callable(getattr(mcore_logprobs.ParallelGroups, source))
    for block in ("options", "policy_loss", "map", "targets", "replay", "divergence", "sample"):
        assert callable(getattr(mcore_logprobs.PatchHandle, block))
    assert callable(mcore_logprobs.PatchHandle.remove)
    assert hasattr(mcore_logprobs.PatchHandle, "__enter__")


# ---- docstrings --------------------------------------------------------------------------------


def takes_or_gives_tensors(function) -> bool:
    return "Tensor" in str(inspect.signature(function))


@pytest.mark.parametrize("name", [*SIGNATURES, *OTHER_NAMES])
def test_docstring_says_what_a_caller_needs(name) -> None:
    thing = getattr(mcore_logprobs, name)
    doc = inspect.getdoc(thing) or ""
    assert len(doc) > 60, f"{name} has no docstring worth the name"
    if not inspect.isfunction(thing):
        return
    raises = ("patch_gpt_model", "context_parallel_shard", "vocab_parallel_logprobs")
    if takes_or_gives_tensors(thing):
        assert "[" in doc, f"{name}'s docstring gives no shapes"
    if name in raises:
        assert "Raises" in doc or "errors" in doc, f"{name} does not say what it raises"


# ---- imports -----------------------------------------------------------------------------------


def test_every_folder_of_the_package_is_one() -> None:
    """setuptools ships only folders with an __init__.py."""
    folders = {path.parent for path in MODULES}
    assert [str(f) for f in folders if not (f / "__init__.py").exists()] == []


def test_works_with_torch_alone() -> None:
    """torch comes with the first name that is looked up, optional packages with none of them."""
    script = f"""
import sys
tried = []
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {(*HEAVY, "yaml", "numpy")!r}:
            tried.append(name)
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import mcore_logprobs
assert "torch" not in sys.modules
assert "linear_token_stats" in dir(mcore_logprobs)
import torch
tried.clear()
assert mcore_logprobs.linear_token_stats.__module__ == "mcore_logprobs.ops.token_stats"
assert mcore_logprobs.kernels.__name__ == "mcore_logprobs.kernels"
names = {{}}
exec("from mcore_logprobs import *", names)
assert set(mcore_logprobs.__all__) <= set(names)
assert not tried, tried
assert not torch.cuda.is_initialized()
logits = torch.randn(3, 11, dtype=torch.float64)
target = torch.tensor([0, 10, 5])
got = mcore_logprobs.vocab_parallel_logprobs(logits.float(), target)
want = logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]
assert float((got - want).abs().max()) < 1e-5
try:
    mcore_logprobs.lineer_token_stats
except AttributeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=PACKAGE.parent
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "module 'mcore_logprobs' has no attribute 'lineer_token_stats'"


# ---- layers ------------------------------------------------------------------------------------

# A unit may import units of a lower level, and its own. A new unit must be given a level here.
LEVELS = {
    "prefix_tree": 1,
    "checks": 0,
    "spelling": 0,
    "commands": 0,
    "vocabulary": 0,
    "kernels": 0,
    "groups": 0,
    "fields": 1,
    "config": 1,
    "collectives": 1,
    "consistency": 1,
    "context_parallel": 2,
    "sources": 3,
    "ops": 4,
    "losses": 5,
    "megatron": 6,
    "cpu_megatron": 6,
    "bench": 7,
    "debug": 7,
    "dropin": 7,
    "run": 7,
    "audit": 8,  # the documented names of what debug/ has
    "diagnostics": 8,
    "doctor": 8,
    "api": 8,
    "__main__": 8,
}
# Units that may import the others of their own level (each direction named).
SIDEWAYS = {
    ("checks", "groups"),
    ("kernels", "checks"),
    ("commands", "spelling"),
    ("config", "fields"),
    ("consistency", "collectives"),
    ("bench", "debug"),
    ("debug", "dropin"),
}
MAY_IMPORT_MEGATRON = {
    "vocabulary",
    "groups",
    "megatron",
    "dropin",
    "bench",
    "debug",
    "cpu_megatron",
}


def unit_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, ast.AST, bool]]:
    """(dotted name, node, whether it runs on import); `from a import b` is named a.b."""
    tree = ast.parse(path.read_text())
    package = path.relative_to(PACKAGE.parent).parts[:-1]
    top = set(map(id, top_level(tree)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += [node.module] if node.module else []
            for alias in node.names:
                yield ".".join([*base, alias.name]), node, id(node) in top


def top_level(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements that run on import: not in functions, not under `if TYPE_CHECKING`."""
    stack: list[ast.AST] = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        stack.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_downward_only(path) -> None:
    unit = unit_of(path)
    if unit == "__init__":
        return
    assert unit in LEVELS, f"{unit} has no level: give it one in {__file__}"
    for name, node, _ in imports(path):
        if not name.startswith("mcore_logprobs."):
            continue
        other = name.split(".")[1]
        if other not in LEVELS:  # a name of the package itself: use the defining module instead
            pytest.fail(f"{path}:{node.lineno} imports {name} through the package's root")
        allowed = other == unit or LEVELS[other] < LEVELS[unit] or (unit, other) in SIDEWAYS
        assert allowed, f"{path}:{node.lineno}: {unit} imports {name}, which is not below it"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_packages_are_imported_where_they_belong(path) -> None:
    unit = unit_of(path)
    # Files of Triton kernels, which only backend.py loads, when asked for.
    in_triton_file = path.parent.name == "triton"
    for name, node, top in imports(path):
        where = f"{path}:{node.lineno} imports {name}"
        root = name.split(".")[0]
        if root in ("megatron", "transformer_engine"):
            assert unit in MAY_IMPORT_MEGATRON, where
            # cpu_megatron/ builds subclasses of Megatron's layers; nothing imports it by itself.
            assert not top or unit == "cpu_megatron", f"{where} at the module's top"
        if root == "triton" and not in_triton_file:
            assert not top, f"{where} at the module's top"


@pytest.mark.parametrize("path", sorted((PACKAGE / "kernels").rglob("*.py")), ids=lambda p: p.name)
def test_kernels_never_communicate(path) -> None:
    for name, node, _ in imports(path):
        assert not name.startswith("torch.distributed"), f"{path}:{node.lineno}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) != "torch.distributed", f"{path}:{node.lineno}"
