"""What every operation that takes the argument refuses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.engine.operation import VOCAB


def _of_lora(
    a: Callable[[Tensor], Any] = lambda a: a,
    b: Callable[[Tensor], Any] = lambda b: b,
    scale: Any = 0.5,
) -> Callable[[tuple], tuple]:
    return lambda lora: (a(lora[0]), b(lora[1]), scale)


# Argument: (a bad value, or what is made of the good one; words of the message).
MISTAKES: dict[str, list[tuple[Any, str]]] = {
    "logits": [
        (Tensor.long, "expected dtype in"),
        (Tensor.bool, "expected dtype in"),
        (lambda x: x.to(torch.complex64), "expected dtype in"),
        (Tensor.tolist, "expected a torch.Tensor"),
        (Tensor.to_sparse, "expected a dense tensor, got torch.sparse_coo"),
        (torch.tensor(1.0), "expected"),
        (lambda x: x[..., :0], "expected"),
    ],
    "hidden": [
        (Tensor.long, "hidden: expected dtype in"),
        (Tensor.to_sparse, "hidden: expected a dense tensor"),
        (None, "hidden: expected"),
    ],
    "weight": [
        (Tensor.half, "weight: expected hidden's dtype"),
        (lambda w: w[:, 1:], "weight: expected shape"),
        (Tensor.flatten, "weight: expected"),
    ],
    "bias": [(lambda b: b[1:], "bias: expected shape"), (Tensor.half, "bias: expected")],
    "lora": [
        ((1.0,), "lora: expected a tuple"),
        ([1.0, 2.0, 3.0], "got list of 3 values"),
        (lambda lora: lora[0], "got Tensor"),
        (lambda lora: lora[:2], "2 values"),
        *(
            (_of_lora(**made), f"lora: {words}")
            for made, words in (
                ({"a": Tensor.t}, "expected A of shape [r, 8]"),
                ({"a": lambda a: a[0]}, "expected A of shape [r, 8]"),
                ({"a": lambda a: a[:0], "b": lambda b: b[:, :0]}, "expected A of shape [r, 8]"),
                ({"a": lambda a: a[:2]}, "expected B of shape [12, 2]"),
                ({"b": lambda b: torch.cat([b, b])}, "expected B of shape [12, 3]"),
                ({"a": Tensor.half}, "expected A"),
                ({"b": Tensor.double}, "expected B"),
                (
                    {"b": lambda b: None},
                    "expected (A [r, h], B [V/TP, r], scale), got NoneType for B",
                ),
                *(
                    ({"scale": bad}, "expected a finite number for scale")
                    for bad in (torch.tensor(2.0), True)
                ),
                ({"scale": float("inf")}, "expected a finite number for scale"),
            )
        ),
    ],
    "target": [
        (Tensor.float, "target: expected an integer dtype"),
        (lambda t: t[1:], "target: expected shape"),
        (Tensor.bool, "target: expected an integer dtype"),
        (Tensor.tolist, "target: expected a torch.Tensor"),
        (lambda t: t.flatten()[1:], "target: expected shape"),
        (lambda t: t.to("meta"), "target: expected"),
        *(
            (functools.partial(torch.full_like, fill_value=bad), "target: expected ids in [0, 24)")
            for bad in (VOCAB, -1, -101, 2**31)
        ),
        (None, "target: expected a torch.Tensor"),
    ],
    "ignore_index": [
        (bad, "ignore_index: expected None or an int") for bad in (True, -1.5, "ignored")
    ],
    "log_softmax": [(1, "log_softmax: expected True or False")],
    "ids": [
        (Tensor.float, "ids: expected an integer dtype"),
        (lambda t: t[1:], "ids: expected shape"),
        (lambda t: torch.full_like(t, VOCAB), "ids: expected ids in [0, 24)"),
    ],
    "teacher_topk_ids": [
        (lambda t: t[..., 1:], "teacher_topk_ids: expected shape"),
        (lambda t: torch.full_like(t, VOCAB), "teacher_topk_ids: expected ids in [0, 24)"),
    ],
    "teacher_logprobs": [(lambda x: x[1:], "teacher_logprobs: expected shape")],
    "teacher_logits": [(lambda x: x[..., 1:], "teacher_logits: expected shape")],
    "mask": [
        (Tensor.float, "mask: expected a bool tensor"),
        (lambda m: m[1:], "mask: expected shape"),
    ],
    "temperature": [
        (0.0, "temperature: expected a finite number > 0"),
        (-1.0, "temperature: expected a finite number > 0"),
        (float("nan"), "temperature: expected a finite number > 0"),
        (float("inf"), "temperature: expected a finite number > 0"),
        (1e-40, "temperature: expected a finite number > 0, from 1.2e-38 to 8.5e+37"),
        (10**400, "temperature: expected a finite number > 0, from 1.2e-38 to 8.5e+37"),
        ("hot", "temperature: expected"),
        (torch.ones(5), "temperature: expected a number or a tensor that broadcasts"),
        (torch.zeros(6, 2), "temperature: expected finite numbers > 0"),
        (torch.full((6, 2), torch.nan), "temperature: expected finite numbers > 0"),
        (torch.full((6, 2), 1e-40), "finite numbers > 0, from 1.2e-38 to 8.5e+37, got [9.99"),
        (torch.full((2,), 1e300, dtype=torch.float64), "temperature: expected finite numbers > 0"),
        (torch.ones(2, 6, 2), "broadcasts"),
        (torch.ones(2, dtype=torch.bool), "real numbers"),
        (torch.ones(2, requires_grad=True), "detach"),
        (torch.ones(2, device="meta"), "device"),
    ],
    "vocab_size": [
        (0, "vocab_size: expected 1 to 24"),
        (VOCAB + 1, "vocab_size: expected 1 to 24"),
        (12.0, "vocab_size: expected"),
    ],
    "chunk_size": [(bad, "chunk_size: expected None or an int >= 1") for bad in (0, -3, 2.0)],
    "backend": [("cuda", "backend: expected one of")],
    "tp_group": [("tp", "tp_group: expected a torch.distributed ProcessGroup"), (None, "tp_group")],
    "softcap": [(bad, "softcap: expected") for bad in (-1.0, 0.0, float("nan"), 1e300)],
    "logit_scale": [(bad, "logit_scale: expected") for bad in (0.0, float("nan"), 1e-40)],
    "logits_dtype": [(torch.int8, "logits_dtype: expected")],
    "rows": [
        ([0], "rows: expected a torch.Tensor"),
        (torch.tensor([0.0]), "rows: expected int64"),
        (torch.tensor([[0]]), "rows: expected int64 of shape [m]"),
        (torch.tensor([0, -1]), "rows: expected indices in [0, 12), got [-1]"),
        (torch.tensor([12]), "rows: expected indices in [0, 12), got [12]"),
    ],
    "logit_bias": [
        ({VOCAB: 1.0}, "logit_bias: expected ids in [0, 24), got 24"),
        ({0: float("nan")}, "expected finite numbers in float32 or -inf, got nan for id 0"),
        ({0: float("inf")}, "logit_bias: expected finite numbers in float32 or -inf"),
        ({0: 10**400}, "logit_bias: expected finite numbers in float32 or -inf"),
        ({0.5: 1.0}, "logit_bias: expected ids as ints"),
        ([3], "logit_bias: expected {id: x} or [V/TP], got 3"),
        (3.0, "logit_bias: expected {id: x} or [V/TP], got 3.0"),
        ([(3, 1.0), (3, 2.0)], "logit_bias: expected each id once, got [(3, 1.0), (3, 2.0)]"),
        (torch.zeros(5), "logit_bias: expected {id: x} or floating-point [V/TP] = [12]"),
        (torch.full((VOCAB // 2,), torch.nan), "logit_bias: expected finite numbers in float32"),
        (
            torch.full((VOCAB // 2,), 1e300, dtype=torch.float64),
            "logit_bias: expected finite numbers in float32",
        ),
        (torch.zeros(VOCAB // 2, requires_grad=True), "logit_bias: requires a gradient"),
    ],
    "disallowed_ids": [
        (torch.tensor([3, VOCAB]), "disallowed_ids: expected ids in [0, 24), got [24]"),
        ([-1], "disallowed_ids: expected ids in [0, 24)"),
        ([2**70], f"disallowed_ids: expected ids in [0, 24), got [{2**70}]"),
        (torch.tensor([0.5]), "disallowed_ids: expected integers [k]"),
        (torch.zeros(2, 2, dtype=torch.int64), "disallowed_ids: expected integers [k]"),
        (3, "disallowed_ids: expected integers [k], got 3"),
        (torch.arange(VOCAB), "expected at least one id to remain, got all 24"),
    ],
    "saved_bytes": [(bad, "saved_bytes: expected an int >= 0") for bad in (-1, 1.5, True, "1GiB")],
    "gradient_accumulation_fusion": [(True, "expected weight.main_grad")],
    "label_smoothing": [
        (bad, "label_smoothing: expected") for bad in (1.0, -0.1, 2, float("nan"), "a little")
    ],
    "kind": [("sideways", "kind: expected one of")],
    "beta": [(bad, "beta: expected a number in (0, 1)") for bad in (0.0, 1.0)],
}

# The same of several together.
MISTAKES_TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"rows": torch.arange(12), "compact": True}, "compact: expected False with rows"),
    ({"target": lambda t: torch.full_like(t, 11), "vocab_size": 11}, "expected ids in [0, 11)"),
    ({"target": lambda t: t.clamp(min=-100) - 1, "ignore_index": -2}, "target: expected ids"),
    ({"rows": torch.arange(5)}, "expected"),  # whatever there is for each of 12 tokens
]


_IDS, _BOUNDS = torch.arange(12), torch.arange(13)
BAD_RECORDS: list[tuple[Any, str]] = [
    (_IDS, "kept_ids: expected (flat_ids, offsets)"),
    ((_IDS, _IDS), "kept_ids[1]: expected shape"),
    ((_IDS.float(), _BOUNDS), "kept_ids[0]: expected an integer"),
    ((_IDS, _BOUNDS.clamp(max=11)), "offsets that rise"),
    ((_IDS, torch.cat([_BOUNDS[:5], _BOUNDS[3:4], _BOUNDS[6:]])), "offsets that rise"),
    ((_IDS + VOCAB, _BOUNDS), "kept_ids: expected ids in"),
    ((_IDS, _BOUNDS.clamp(min=2) - 2), "offsets that rise"),
    ((_IDS[:10], (_BOUNDS - 2).clamp(min=0)), "record of every row whose target counts, got none"),
    ((_IDS * 0, torch.cat([_BOUNDS[:1], _BOUNDS[2:], _BOUNDS[-1:]])), "at most once per row"),
]
