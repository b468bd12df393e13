"""What the engine runs: axes of settings, cases drawn from them, and a case's tensors."""

from __future__ import annotations

import ast
import functools
import itertools
import math
import random
import shlex
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mcore_logprobs.kernels.budgets import Budgets
from tests.engine.operation import SEGMENTS, VOCAB, Draw, Subject
from tests.helpers.covering import covering
from tests.ops import OPERATIONS

WIDTH, LORA_RANK = 8, 3
LEADS = {"[s, b]": (6, 2), "[n]": (12,), "[a, b, c]": (2, 3, 2)}
UNUSUAL_LEADS = ("[]", "[1]", "[0]", "[4, 0]")
Setting = dict[str, Any]

# ---- budgets -------------------------------------------------------------------------------------

# How calls are cut, so that few rows and columns walk through several tiles and blocks of each, the
# last of either shorter; blocks are no multiples of a vector, and tiles no multiple of the ranks.
ONE_CELL = dict.fromkeys((field.name for field in fields(Budgets)), 1)
NARROW = Budgets(
    **ONE_CELL
    | {"tile_rows": 5, "chunk_bytes": 4 * 5 * 7, "max_block": 7, "held_bytes": 4 * 5 * VOCAB}
    | {"max_held_bytes": 4 * 5 * VOCAB, "gathered_bytes": 8 * WIDTH * 3, "copy_bytes": 4 * 2 * 7}
    | {"fixed_columns": 10, "fixed_rows": 4, "segment_block": 5}
)
BUDGETS = {
    "narrow": NARROW,
    # Cells of one number where a whole row's logits are held, or with a chunk_size of 1.
    "one column": Budgets(**ONE_CELL | {"tile_rows": 5}),
    "steps": replace(
        NARROW,
        **{"tile_rows": 4, "chunk_bytes": 4 * 4 * 20, "max_block": 20, "block_step": 16},
        **{"held_bytes": 4 * 7 * 34, "max_held_bytes": 4 * 7 * 34, "row_step": 2},
    ),
    "gpu": replace(
        NARROW,
        **{"tile_rows": 8, "max_block": 1 << 20, "chunk_bytes": 4 * 8 * 33, "block_step": 16},
        **{"held_bytes": 4 * 3 * 51, "held_rows": 6, "max_held_bytes": 4 * 9 * 51, "row_step": 2},
        **{"min_segment_block": 5},
    ),
}

# ---- axes: the first value is the default -------------------------------------------------------

AXES: dict[str, Sequence[Any]] = {
    "tp": (1, 2, 3),
    "lead": ("[s, b]", "[n]"),
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "layout": (
        *("contiguous", "transposed", "wider rows", "every second row", "vocabulary first"),
        "each rank's own",
    ),
    "hooks": ("none", "row-major", "column-major", "clone"),
    "checkpoint": ("none", "reentrant", "non-reentrant"),
    "autocast": (False, True),
    "temperature": ("one", "number", "token", "sequence"),
    # Of three shards of 24 columns the last keeps one, or none; of 102 a block keeps some.
    "vocab_size": (None, 17, 11, 95),
    "chunk_size": (None, 1, 3, 7),
    "ignored": (False, True, "all"),
    "upstream": ("all", "one output", "some rows"),
    "budgets": ("shipped", *BUDGETS),
    "vocab": (VOCAB, 102, 66),
    "logit_bias": (None, "pairs", "columns", "disallowed"),
}
LOGITS_AXES: dict[str, Sequence[Any]] = {
    "lead": tuple(LEADS),
    "garbage": (False, True),  # in rows and columns that do not count
    "values": ("normal", "ties", "far", "minus infinity", "flat to peaked"),
}
HIDDEN_AXES: dict[str, Sequence[Any]] = {
    "sequence_parallel": (False, True),
    "bias": (False, True),
    "lora": (False, True),
    "softcap": (None, 8.0),
    "logit_scale": (1.0, 0.5),
    "logits_dtype": ("float32", "bfloat16"),
    "compact": (False, True),
    "rows": (None, "some", "repeated", "one"),
    "gradient_accumulation_fusion": (False, True),
    "saved_bytes": (0, 1700, 1 << 20),  # nothing, a part, all
    "frozen": ("nothing", "weight", "hidden", "bias", "A", "B"),
    "values": ("normal", "large"),
}
# Keywords of a call whose value is the setting itself. The default is left to the operation.
KEYWORDS = ("vocab_size", "chunk_size", "softcap", "logit_scale", "compact", "sequence_parallel")
KEYWORDS += ("gradient_accumulation_fusion", "saved_bytes", "ignore_index")
# Covered in threes, of logits that are read in place: how they are is the driver's and the source's
# matter, so one operation of each kind that they know.
MEMORY = ("layout", "hooks", "checkpoint")
OF_MEMORY = ("token_stats", "topk", "gather", "sampling_logprobs", "kl_div")
# How many ranks, which dtype and how a call is cut meet what an operation does with a block; the
# rest of AXES is the driver's and the sources' matter, which all operations share.
MEETS_EVERY_OPERATION = ("tp", "dtype", "budgets")
SEVERAL_RANKS = (  # covered in threes too
    ("budgets", "tp", "vocab"),
    ("tp", "vocab_size", "chunk_size"),
    ("tp", "sequence_parallel", "rows"),
    ("tp", "sequence_parallel", "compact"),
)


def shape_of(lead: str) -> tuple[int, ...]:
    """A leading shape by its name, or as it is written: "[2200]", "[1100, 2]"."""
    return LEADS[lead] if lead in LEADS else tuple(ast.literal_eval(lead))


def axes_of(op: Subject, source: str) -> dict[str, Sequence[Any]]:
    axes = AXES | (HIDDEN_AXES if source == "hidden" else LOGITS_AXES) | op.axes | op.options
    without = op.without if op.differentiable else (*op.without, "hooks", "checkpoint", "upstream")
    return {"source": (source,)} | {n: values for n, values in axes.items() if n not in without}


Get = Callable[..., Any]  # a setting by its name; None, or a second argument, if it is missing


def _is_flat(s: Get) -> bool:
    return s("lead") is not None and len(shape_of(s("lead"))) == 1


# Settings that do not go together, and why.
CONFLICTS: dict[str, Callable[[Get, Subject], Any]] = {
    "one dimension is not transposed": (
        lambda s, op: _is_flat(s) and s("layout") in ("transposed", "each rank's own")
    ),
    "one dimension has no sequences": (
        lambda s, op: _is_flat(s) and s("temperature") == "sequence"
    ),
    "one rank has no parallel sequence": lambda s, op: s("sequence_parallel") and s("tp") == 1,
    "float64 is not rounded": (
        lambda s, op: s("dtype") == "float64" and s("logits_dtype", "float32") != "float32"
    ),
    "a frozen weight has no main_grad": (
        lambda s, op: s("gradient_accumulation_fusion") and s("frozen") == "weight"
    ),
    "there is no bias to freeze": lambda s, op: s("frozen") == "bias" and not s("bias", True),
    "there is no LoRA to freeze": lambda s, op: s("frozen") in ("A", "B") and not s("lora", True),
    "rows name what compact would find": lambda s, op: s("rows") and s("compact"),
    "rows are no sequences": lambda s, op: s("rows") and s("temperature") == "sequence",
    "torch's reentrant checkpoint gives no gradient": (
        lambda s, op: s("frozen") == "hidden" and s("checkpoint") == "reentrant"
    ),
    "no target is ignored": lambda s, op: s("ignored") and s("ignore_index", 0) is None,
    "a column without probability": (
        lambda s, op: op.support and s("values") in ("minus infinity", "large")
    ),
    "a forbidden column has no probability": (
        lambda s, op: op.support and s("logit_bias") in ("columns", "disallowed")
    ),
    "a softcap makes large logits equal, in float64 too": (
        lambda s, op: s("values") in ("far", "large") and s("softcap")
    ),
    "no truth is wider than float64": (
        lambda s, op: s("values") in ("far", "large") and s("dtype") == "float64"
    ),
    "a division rounds large logits by 5e-4": (
        lambda s, op: s("values") == "far" and s("temperature", "one") != "one"
    ),
    "low precision rounds large logits away": (
        lambda s, op: s("values") == "large" and s("logits_dtype", "float32") != "float32"
    ),
    "large logits and a bias have a rounded sum": (
        lambda s, op: s("values") in ("far", "large") and s("logit_bias")
    ),
    "segments take no LoRA": lambda s, op: s("invariant_segments") and s("lora"),
    "segments divide the vocabulary": (
        lambda s, op: s("invariant_segments") and s("vocab", VOCAB) % SEGMENTS
    ),
    "a true vocabulary of 95 is that of 102": (
        lambda s, op: s("vocab_size") == 95 and s("vocab", 102) != 102
    ),
    "a record has no forbidden id": lambda s, op: s("logit_bias") == "disallowed" and s("replay"),
    "ranks with other layouts save other tensors": (
        lambda s, op: s("tampered") and s("layout") == "each rank's own"
    ),
    "blocks of 24 columns are many enough": (
        lambda s, op: s("budgets") == "one column" and s("vocab", VOCAB) != VOCAB
    ),
    "there are not so many ids": lambda s, op: (s("topk") or 0) > s("vocab", VOCAB),
    "a checkpoint computes again from new values": (
        lambda s, op: s("tampered") and s("checkpoint", "none") != "none"
    ),
}


def allowed(op: Subject, setting: Setting) -> bool:
    """Whether settings, some of which may be missing, go together."""
    conflicts = CONFLICTS.values()
    return op.allowed(setting) and not any(rule(setting.get, op) for rule in conflicts)


# ---- a case -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    op: str
    setting: Setting
    seed: int = 0

    @property
    def source(self) -> str:
        return self.setting["source"]

    @property
    def operation(self) -> Subject:
        return OPERATIONS[self.op]

    def __str__(self) -> str:
        """The line that reruns it: settings that are not the default."""
        axes = axes_of(self.operation, self.source)
        told = {
            name: self.setting[name]
            for name in (*axes, *sorted(self.setting.keys() - axes))
            if name not in axes or self.setting[name] != axes[name][0]
        }
        if self.seed:
            told["seed"] = self.seed
        words = [shlex.quote(f"{name}={value}") for name, value in told.items()]
        return " ".join(["python -m tests.engine", self.op, self.source, *words])

    def generator(self, what: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{self} {what}".encode()))


def cases_of(op: Subject, source: str) -> list[Case]:
    """Every pair of settings, and every three of those about memory and several ranks."""
    return [Case(op.name, row) for row in _covering_rows(op.name, source)]


def fewer_cases_of(op: Subject, source: str) -> list[Case]:
    """Every pair with one of the operation's own options, or of `MEETS_EVERY_OPERATION`.

    Pairs of the other settings are in the cases of all operations together.
    """
    return [Case(op.name, row) for row in _covering_rows(op.name, source, fewer=True)]


@functools.cache
def _covering_rows(name: str, source: str, fewer: bool = False) -> list[Setting]:
    op = OPERATIONS[name]
    axes = axes_of(op, source)
    together, involving = [], None
    if fewer:
        involving = {*op.axes, *op.options, *MEETS_EVERY_OPERATION}
    else:
        together += [MEMORY] if name in OF_MEMORY and source == "logits" else []
        together += [group for group in SEVERAL_RANKS if axes.keys() >= set(group)]
    return covering(
        axes, lambda s: allowed(op, {"source": source} | s), together, ("tp",), involving
    )


def random_cases(op: Subject, source: str, rng: random.Random, **fixed: Any) -> Iterator[Case]:
    axes = axes_of(op, source)
    while True:
        row = {name: rng.choice(values) for name, values in axes.items()} | fixed
        if allowed(op, row):
            yield Case(op.name, row, rng.randrange(1, 2**31))


def tampered_cases(op: Subject, source: str) -> list[Case]:
    """Each tensor that a call takes changed in place between forward and backward: on two ranks,
    and on one under a saved-tensor hook, another for each tensor.
    """
    none, *hooks = axes_of(op, source)["hooks"]
    names = dict.fromkeys(n for case in cases_of(op, source) for n in Problem(case).tensors())
    found, rng = [], random.Random(0)
    for name, hook in zip(names, itertools.cycle(hooks), strict=False):
        for how in ({"hooks": none, "tp": 2}, {"hooks": hook, "tp": 1}):
            drawn = random_cases(op, source, rng, tampered=name, checkpoint="none", **how)
            found.append(next(case for case in drawn if name in Problem(case).tensors()))
    return found


def compiled_cases(op: Subject, source: str) -> list[Case]:
    """By inductor, on several tiles and blocks of one rank; and on two ranks, in one chunk."""
    alone = {"tp": 1, "budgets": "gpu", "compiled": "inductor"}
    together = {"tp": 2, "budgets": "shipped", "compiled": "aot_eager"}
    if "chunk_size" in axes_of(op, source):
        together["chunk_size"] = None
    both = {"hooks": "none", "checkpoint": "none"} if op.differentiable else {}
    return [
        next(random_cases(op, source, random.Random(0), **both, **fixed))
        for fixed in (alone, together)
    ]


# The operations and the settings at which torch.compile breaks its graph.
BREAKS = ("sampling_logprobs", "sample", "linear_map", "linear_policy_loss")
WITHOUT_BREAKS = {"rows": None, "compact": False, "saved_bytes": 0}
WITHOUT_BREAKS |= {"gradient_accumulation_fusion": False, "invariant_segments": None}


def symbolic_cases(op: Subject, source: str) -> list[Case]:
    """By torch.compile with the tokens' dimensions as symbols: the operation's options, each value
    that 500 random cases have once.

    In one chunk: each more takes the compiler seconds.
    """
    axes = axes_of(op, source)
    fixed = {"tp": 1, "budgets": "shipped", "hooks": "none", "checkpoint": "none"}
    fixed |= WITHOUT_BREAKS | {"chunk_size": None}
    fixed = {name: x for name, x in fixed.items() if name in axes}
    own = [name for name in axes if name in op.options | op.axes or name in ("lead", "temperature")]
    wanted = {(name, x) for name in own for x in axes[name]}
    found: list[Case] = []
    drawn = random_cases(op, source, random.Random(0), **fixed, compiled="symbolic")
    for case in itertools.islice(drawn, 500):
        if wanted & case.setting.items():
            found.append(case)
            wanted -= case.setting.items()
    return found


def narrow_cases() -> Iterator[Case]:
    """Every operation on shards of 7 and 127 columns, no multiple of a vector, and on wide ones."""
    rng = random.Random(0)
    widths = ((1, 7), (1, 260), (2, 127), (3, 7))
    for op, (tp, width) in itertools.product(OPERATIONS.values(), widths):
        for source in op.sources:
            fixed = {"tp": tp, "vocab": tp * width, "vocab_size": None, "k": 3, "budgets": "steps"}
            known = {"vocab", *axes_of(op, source)}
            fixed = {name: x for name, x in fixed.items() if name in known}
            yield next(random_cases(op, source, rng, **fixed))


def unusual_cases() -> Iterator[Case]:
    """Every operation on one row, on none, and on a row without a leading dimension: each with
    every one of its options, and with what leaves rows out.
    """
    for op in OPERATIONS.values():
        for source in op.sources:
            axes = axes_of(op, source)
            if axes["lead"] == ("[n]",):
                continue
            own = {name: values for name, values in axes.items() if name in op.options | op.axes}
            own |= {"lead": UNUSUAL_LEADS[source == "hidden" :], "tp": (1, 2)}
            rest = {name: values[0] for name, values in axes.items() if name not in own}
            more = {"compact": True, "ignored": True} if "compact" in axes else {}
            for row in covering(own, lambda some, op=op, rest=rest: allowed(op, rest | some)):
                yield Case(op.name, rest | row)
                if more and allowed(op, rest | more | row):
                    yield Case(op.name, rest | more | row)


def wide_cases(op: Subject) -> list[Case]:
    """From hidden states, several blocks of columns on each rank; in float64, where little ties."""
    found, rng = [], random.Random(0)
    for vocab_size in (None, 3 * 4200 - 5) * 2:
        fixed = {"vocab": 3 * 4200, "vocab_size": vocab_size, "chunk_size": None}
        fixed["budgets"] = "shipped"
        found.append(next(random_cases(op, "hidden", rng, dtype="float64", **fixed)))
    return found


class Problem:
    """The whole tensors of a case, the same in every process.

    Attributes:
        lead: the shape of targets and results.
        rows: the keyword `rows`, or None.
        head: what has a gradient: logits, or hidden, weight, bias, A and B.
        side: the arguments that are not options.
        temperature: a number or a tensor.
        unread: the logits that do not count, and may hold anything.
    """

    def __init__(self, case: Case) -> None:
        s, op = case.setting, case.operation
        lead, dtype = shape_of(s["lead"]), getattr(torch, s["dtype"])
        self.columns = s.get("vocab", VOCAB)
        columns, width = s.get("vocab", VOCAB), s.get("h", WIDTH)
        true, ignored = s.get("vocab_size") or columns, s.get("ignored", False)
        generator = case.generator("tensors")
        self.rows = named_rows(s.get("rows"), math.prod(lead), generator)
        self.lead = lead if self.rows is None else (len(self.rows),)
        draw = Draw(self.lead, lead, columns, true, dtype, ignored, case.source, s, generator)
        if case.source == "logits":
            self.head = {"logits": draw.logits()}
        else:
            self.head = {"hidden": draw.spread(*lead, width), "weight": draw.spread(columns, width)}
            self.head["hidden"] *= 12.0 if s["values"] == "large" else 1.0
        if s.get("bias"):
            self.head["bias"] = draw.spread(columns)
        if s.get("lora"):
            self.head["A"] = draw.spread(LORA_RANK, width, step=1 / 4)
            self.head["B"] = draw.spread(columns, LORA_RANK, step=1 / 4)
        self.side = op.side(draw)
        self.vocab_bias = vocab_bias_of(s.get("logit_bias"), columns, true, generator)
        kind = s.get("temperature", "one")
        self.temperature: float | Tensor = {"one": 1.0, "number": 0.7}.get(kind, 0.0)
        if not self.temperature:
            shape = self.lead if kind == "token" else (1, *lead[1:])
            self.temperature = 0.5 + torch.rand(
                shape, generator=draw.generator, dtype=torch.float32
            )

        first, keep = next(iter(self.head)), kept_rows(self.side)
        self.unread = torch.zeros(self.head[first].shape, dtype=torch.bool)
        if s.get("garbage"):
            self.unread |= torch.arange(columns) >= true
            self.unread |= False if keep is None else ~keep.unsqueeze(-1)
            junk = torch.tensor([torch.nan, torch.inf, -torch.inf]).to(dtype)
            self.head[first][self.unread] = junk.repeat(self.unread.numel())[: self.unread.sum()]
            if "teacher_logits" in self.side:
                self.side["teacher_logits"].masked_fill_(self.unread, torch.nan)

    def move(self, device: torch.device) -> None:
        """All that the call takes."""
        for name in ("head", "side", "vocab_bias", "temperature", "rows"):
            moved = tree_map_only(Tensor, lambda x: x.to(device), getattr(self, name))
            setattr(self, name, moved)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the call by name."""
        more = {"temperature": self.temperature, "rows": self.rows}
        return self.head | tensors_of(self.side | self.vocab_bias | more)

    def bias_of_ids(self) -> Tensor | None:
        """`[V]` float64: all that `vocab_bias` adds to the logits."""
        if not self.vocab_bias:
            return None
        bias = torch.zeros(self.columns, dtype=torch.float64)
        for number, x in self.vocab_bias.get("pairs", {}).items():
            bias[number] = x
        bias += self.vocab_bias.get("logit_bias", 0.0)
        bias[self.vocab_bias.get("disallowed_ids", [])] = -torch.inf
        return bias


def vocab_bias_of(
    kind: str | None, columns: int, true: int, generator: torch.Generator
) -> dict[str, Any]:
    """The keywords that shift or forbid ids; `logit_bias` of pairs by the name "pairs"."""
    if kind is None:
        return {}
    if kind == "disallowed":
        return {"disallowed_ids": torch.tensor([7, 2, 7]) % true}
    if kind == "pairs":
        return {"pairs": {0: 1.5, 4 % true: -2.25, 9 % true: 0.75}}
    bias = torch.randint(-8, 9, (columns,), generator=generator) / 4.0
    bias[3::5] = -torch.inf
    return {"logit_bias": bias}


def named_rows(kind: str | None, count: int, generator: torch.Generator) -> Tensor | None:
    """int64 `[m]` in [0, count): some in any order; more than there are; or the last alone."""
    if kind is None:
        return None
    if kind == "one":
        return torch.tensor([count - 1])
    if kind == "some":
        return torch.randperm(count, generator=generator)[: count // 2 + 1]
    return torch.randint(0, count, (count + 3,), generator=generator)


def tensors_of(values: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors among them, those of a tuple each by its own."""
    found = {}
    for name, value in values.items():
        if isinstance(value, tuple):
            parts = {f"{name}[{i}]": part for i, part in enumerate(value)}
            found |= tensors_of(parts)
        elif isinstance(value, Tensor):
            found[name] = value
    return found


def kept_rows(side: dict[str, Any]) -> Tensor | None:
    """bool `[...]`: the rows that count."""
    if "mask" in side:
        return side["mask"]
    if "target" in side:
        return side["target"] >= 0
    return side["ids"][..., 0] >= 0 if "ids" in side else None


def parse(words: Sequence[str]) -> Case:
    """The case of a line: an operation, a source, and settings that are not the default."""
    op, source, *told = words
    setting = {name: values[0] for name, values in axes_of(OPERATIONS[op], source).items()}
    for word in told:
        name, _, value = word.partition("=")
        if name == "lead":
            setting[name] = value
            continue
        try:
            setting[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            setting[name] = value
    seed = setting.pop("seed", 0)
    return Case(op, setting, seed)
