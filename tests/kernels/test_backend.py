"""Which backend is taken, what is said of it, and what is refused."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

from mcore_logprobs import vocab_parallel_logprobs
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels import reference

CUDA = torch.cuda.is_available()


def test_auto_takes_torch_on_a_cpu_even_where_triton_could_be_interpreted(monkeypatch):
    small = torch.zeros(2, 3)
    assert backends.select("auto", small) is reference
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backends.select("auto", small) is reference


def test_torch_is_had_by_name_anywhere():
    for dtype in (torch.bfloat16, torch.float64):
        assert backends.select("torch", torch.zeros(2, 3, dtype=dtype)) is reference


def test_an_unknown_backend_is_refused():
    for operation in (
        lambda: backends.select("cuda", torch.zeros(2, 3)),
        lambda: vocab_parallel_logprobs(
            torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), backend="cuda"
        ),
    ):
        with pytest.raises(ValueError, match=r"expected one of .*'triton'.*got 'cuda'"):
            operation()


def test_triton_on_a_cpu_is_refused_with_the_reason(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"need a CUDA device, not cpu.*TRITON_INTERPRET=1"):
        backends.select("triton", torch.zeros(2, 3))


def test_explain_lists_every_backend_with_a_reason(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for device_type in ("cpu", "cuda"):
        choices = {choice.name: choice for choice in backends.explain(device_type)}
        assert list(choices)[-1] == "torch"
        assert choices["torch"].available
        assert all(choice.reason for choice in choices.values())
        assert choices["triton"].available == (device_type == "cuda")


def test_a_choice_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(backends, "_logged", set())
    with caplog.at_level(logging.INFO, logger="mcore_logprobs"):
        for _ in range(3):
            backends.select("torch", torch.zeros(2, 3))
    assert [record.getMessage() for record in caplog.records] == [
        "backend for cpu tensors: torch (eager torch, on any device)"
    ]


FRESH = """
import logging
import os
import sys
import torch
import mcore_logprobs
from mcore_logprobs.kernels import backend as backends

def refusal(select):
    try:
        select()
    except ValueError as error:
        return str(error)
    raise AssertionError("it was taken")

backends.select("auto", torch.zeros(2, 3))
backends.explain("cpu")
mcore_logprobs.vocab_parallel_logprobs(torch.zeros(2, 3), torch.tensor([0, 1]))
assert "triton" not in sys.modules, "triton was imported"

sys.modules["triton"] = None  # importing it now raises ImportError
(triton, *_) = backends.explain("cuda")
assert not triton.available and "does not import: ModuleNotFoundError" in triton.reason, triton
del sys.modules["triton"]
backends._triton_failure.clear()

import triton.language
from torch._subclasses import FakeTensorMode

tuples = triton.language.tuple
del triton.language.tuple  # as before Triton 3.3
records = []
backends.logger.addHandler(logging.Handler())
backends.logger.setLevel(logging.INFO)
backends.logger.handlers[-1].emit = lambda record: records.append(record.getMessage())
with FakeTensorMode():
    logits = torch.empty(2, 3, device="cuda")
backends._logged.clear()
for _ in range(2):
    assert backends.select("auto", logits) is backends.reference
reason = f"Triton {triton.__version__} has no tuples in kernels: 3.3 or later is needed"
assert records[0] == f"backend for cuda tensors: not triton ({reason})", records
assert len(records) == 2, records
message = refusal(lambda: backends.select("triton", logits))
assert message == f"backend='triton' is unavailable: {reason}", message
triton.language.tuple = tuples
backends._triton_failure.clear()

os.environ["TRITON_INTERPRET"] = "1"
message = refusal(lambda: backends.select("triton", torch.zeros(2, 3)))
assert "before triton is first imported" in message, message
"""


def test_a_fresh_process_imports_triton_late_and_says_why_it_does_not_serve():
    run = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
