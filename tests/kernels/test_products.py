"""Products with float32 results, also where torch cannot give them from low-precision operands."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mcore_logprobs.kernels import products
from tests.kernels.common import DEVICE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_low_precision_operands_give_what_float32_ones_would(dtype):
    wide = torch.promote_types(dtype, torch.float32)
    a = torch.randn(24, 40, device=DEVICE).to(dtype)
    b = torch.randn(40, 16, device=DEVICE).to(dtype)
    exact = a.double() @ b.double()
    out = products.product(a, b, torch.full((24, 16), torch.nan, dtype=wide, device=DEVICE))
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    products.add_product(a, b, out)
    torch.testing.assert_close(out.double(), 2 * exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_low_precision_result_is_rounded_once(dtype):
    # A long inner dimension: where cuBLAS splits it, parts must not be added in low precision.
    a, b = (torch.randn(16, 1 << 14, device=DEVICE).to(dtype) for _ in range(2))
    out = products.rounded_product(a, b.t(), torch.empty(16, 16, dtype=dtype, device=DEVICE))
    exact = a.double() @ b.double().t()
    half_ulp = torch.finfo(dtype).eps / 2
    assert ((out.double() - exact).abs() <= exact.abs() * half_ulp + 1e-3).all()
    flags = torch.backends.cuda.matmul
    name = f"allow_{'bf16' if dtype == torch.bfloat16 else 'fp16'}_reduced_precision_reduction"
    for mine in (True, False):
        before = getattr(flags, name)
        try:
            setattr(flags, name, mine)
            with products._whole_sums(dtype):
                assert not getattr(flags, name)
            assert getattr(flags, name) == mine
        finally:
            setattr(flags, name, before)


def test_the_flag_of_whole_sums_holds_until_the_last_one_is_out():
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction
    try:
        flags.allow_bf16_reduced_precision_reduction = True
        first, second = (products._whole_sums(torch.bfloat16) for _ in range(2))
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not flags.allow_bf16_reduced_precision_reduction
        second.__exit__(None, None, None)
        assert flags.allow_bf16_reduced_precision_reduction
    finally:
        flags.allow_bf16_reduced_precision_reduction = before


@pytest.mark.parametrize("has_mm", [False, True])
def test_releases_of_torch_without_wide_results(has_mm, monkeypatch):
    # An older torch raises TypeError for out_dtype; the first with it refused a float32 addend.
    real = torch.mm

    def mm(a, b, *, out=None, out_dtype=None):
        if out_dtype is None:
            return real(a, b, out=out)
        if not has_mm:
            raise TypeError("unexpected keyword argument 'out_dtype'")
        return out.copy_(a.double() @ b.double())

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(products, "_answers", {})
    test_low_precision_operands_give_what_float32_ones_would(torch.bfloat16)
    assert products._has_wide_mm(torch.bfloat16, torch.device(DEVICE)) == has_mm


@pytest.mark.parametrize(
    ("version", "hip", "expected"),
    [
        ("2.7.1+cu128", None, 0),
        ("2.9.0", None, 0),
        ("2.10.1", None, 1),
        ("2.13.0+cpu", None, 1),
        ("2.9.0+rocm6.4", "6.4", 0),
        ("2.10.0+rocm7.1", "7.1", 1),
    ],
)
def test_where_nothing_can_be_tried_the_version_says(version, hip, expected, monkeypatch):
    """Fakes of a GPU take every product, and a graph that is traced runs none.

    Not `addmm(out_dtype=)`, which inductor does not lower.
    """
    monkeypatch.setattr(products, "_answers", {})
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "hip", hip)
    asked = torch.bfloat16, torch.device("cuda")

    def numbered(x):
        return x + products._has_wide_mm(*asked) + 2 * products._has_wide_addmm(*asked)

    with FakeTensorMode():
        assert products._has_wide_mm(*asked) + 2 * products._has_wide_addmm(*asked) == expected
    torch.compiler.reset()
    traced = torch.compile(numbered, backend="eager", fullgraph=True)
    assert traced(torch.zeros(2)).tolist() == [expected] * 2
    assert products._answers == {}


def test_a_compiled_sum_is_of_what_inductor_lowers(monkeypatch):
    for name in ("mm", "addmm"):
        on_a_gpu = partial(products._asked, name, torch.bfloat16, torch.device("cuda"))
        monkeypatch.setattr(products, f"_has_wide_{name}", lambda *_, asked=on_a_gpu: asked())
    called = []

    def backend(graph, _):
        called.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    a, out = torch.empty(16, 16, dtype=torch.bfloat16, device="meta"), torch.empty(16, 16)
    torch.compiler.reset()
    compiled = torch.compile(products.add_product, backend=backend, fullgraph=True)
    assert compiled(a, a, out.to("meta")).dtype == torch.float32
    assert torch.mm in called
    assert torch.addmm not in called


def test_what_was_tried_is_kept(monkeypatch):
    monkeypatch.setattr(products, "_answers", {})
    products._has_wide_addmm(torch.bfloat16, torch.device(DEVICE))
    assert len(products._answers) == 1


def test_a_flag_for_sums_in_float16_has_an_answer_of_its_own(monkeypatch):
    """Under which torch refuses float32 results of float16 operands, and of no others."""
    gpu, flag = torch.device("cuda"), ["off"]
    monkeypatch.setattr(products, "_answers", {})
    monkeypatch.setattr(products, "_works", lambda call: flag == ["off"])
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: torch.empty(0))
    asked = products._has_wide_mm
    assert asked(torch.float16, gpu)
    assert asked(torch.bfloat16, gpu)
    flag[0] = "on"
    matmul = torch.backends.cuda.matmul
    monkeypatch.setattr(type(matmul), "allow_fp16_accumulation", True, raising=False)
    assert not asked(torch.float16, gpu)
    assert asked(torch.bfloat16, gpu)
    assert "allow_fp16_accumulation is on" in products._slow("mm", torch.float16, gpu)
    rounded = torch.empty(2, 2, dtype=torch.float16)
    assert not products._adds_in_float16(rounded.dtype, rounded.device)
    monkeypatch.setattr(type(matmul), "allow_fp16_accumulation", False, raising=False)
    assert asked(torch.float16, gpu)


def test_operands_are_cast_only_where_there_is_no_matrix_unit_for_them():
    assert products.matmul_dtype(torch.bfloat16, torch.device("cuda")) == torch.bfloat16
    assert products.matmul_dtype(torch.bfloat16, torch.device("cpu")) == torch.float32
    assert products.matmul_dtype(torch.float64, torch.device("cuda")) == torch.float64


@pytest.mark.parametrize(
    "trouble",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
    ],
    ids=str,
)
def test_a_probe_in_trouble_is_no_answer(trouble):
    def fails():
        raise trouble

    with pytest.raises(type(trouble)):
        products._works(fails)


@pytest.mark.parametrize(
    "refusal",
    [
        NotImplementedError("Could not run 'aten::mm.dtype_out' with arguments from 'CPU'"),
        RuntimeError("self dtype must match either out_dtype or mat1 dtype"),
        RuntimeError('"addmm_impl" not implemented for BFloat16'),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasGemmEx"),
        TypeError("mm() got an unexpected keyword argument 'out_dtype'"),
        RuntimeError(
            "gemm input type at::BFloat16 and output type float is not supported for ROCm"
        ),
    ],
    ids=str,
)
def test_a_refusal_is_an_answer(refusal):
    def fails():
        raise refusal

    assert not products._works(fails)


def test_how_products_are_made_is_told(monkeypatch):
    device = torch.device("cpu")
    (text,) = products.explain(device)
    assert text.startswith("bfloat16 operands are multiplied in float32")
    # This torch is a later one.
    assert "or later" not in products._slow("mm", torch.bfloat16, device)
    monkeypatch.setattr(torch, "__version__", "2.7.0")
    assert products._slow("mm", torch.bfloat16, device).endswith("; torch 2.8 or later has it")
    assert "a pass of its own" in products._slow("addmm", torch.bfloat16, device)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert products._slow("mm", torch.bfloat16, device).endswith("; torch 2.10 or later has it")


def test_the_scale_is_of_the_largest_finite_magnitude():
    finite = torch.tensor([3.0, 0.25, 700.0])
    assert products.range_scale(finite) == 1.0
    spoilt = torch.tensor([3.0, torch.inf, 0.25, torch.nan, 700.0])
    assert products.range_scale(spoilt) == 1.0
