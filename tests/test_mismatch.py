"""explain_mismatch on a real Megatron model: each cause is put in, alone and in pairs, and found.

What each side reports is computed here with plain torch in float64, so that the function is not
held against itself.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mcore_logprobs.__main__ import main
from mcore_logprobs.debug.mismatch_result import RIGHT
from mcore_logprobs.diagnostics import Settings, explain_mismatch, load_mismatch_dump
from tests.helpers.distributed import get_pool
from tests.megatron.common import megatron

VOCAB, TRUE_VOCAB, TEMPERATURE, TOP_P = 96, 89, 0.7, 0.9
BATCH, LENGTH, PROMPT = 6, 21, 5
SETTINGS: dict[str, Any] = {"temperature": TEMPERATURE, "top_p": TOP_P, "vocab_size": TRUE_VOCAB}
GIVEN = ("target", "mask", "logits", "stale_logits")


def _model_data() -> dict[str, Tensor]:
    """Logits of a Megatron GPTModel before and after an update, and tokens sampled from the first
    weights as a rollout engine would."""
    from mcore_logprobs.cpu_megatron import models as mm
    from tests.megatron.common import megatron

    with megatron():
        config = mm.transformer_config(hidden_size=32, num_attention_heads=4, num_query_groups=2)
        model = mm.build_gpt_model(config, vocab_size=VOCAB, max_sequence_length=64, tied=False)
        with torch.no_grad():  # logits as wide as a trained model's
            model.output_layer.weight.mul_(12)
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(TRUE_VOCAB, (BATCH, PROMPT), generator=generator)
        positions = torch.arange(LENGTH + 1).expand(BATCH, -1)

        def logits(ids: Tensor) -> Tensor:
            width = ids.shape[1]
            return model(ids, positions[:, :width], None).detach().clone()

        while tokens.shape[1] <= LENGTH:
            z = logits(tokens)[:, -1].double()[:, :TRUE_VOCAB] / TEMPERATURE
            probs = _filtered(z).softmax(-1)
            drawn = torch.multinomial(probs, 1, generator=generator)
            tokens = torch.cat([tokens, drawn], 1)
        stale = logits(tokens[:, :-1])
        loss = model(
            tokens[:, :-1], positions[:, :LENGTH], None, labels=tokens[:, 1:].contiguous()
        ).mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.05 * p.grad)
        hidden: list[Tensor] = []
        hook = model.output_layer.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
        fresh = logits(tokens[:, :-1])
        hook.remove()
        # The trained weights in two lower precisions: a trainer's layers and an engine's.
        weight, low = model.output_layer.weight.detach().clone(), {}
        for name, dtype in (("low", torch.bfloat16), ("engine", torch.float16)):
            hook = model.to(dtype).output_layer.register_forward_pre_hook(
                lambda _, args: hidden.append(args[0].detach().transpose(0, 1).float())
            )
            logits(tokens[:, :-1])
            hook.remove()
            low[f"{name}_logits"] = hidden[-1] @ weight.T
        mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
        mask[:, PROMPT - 1 :] = True
        mask[0, -4:] = False  # a shorter answer
        return {
            "target": tokens[:, 1:].contiguous(),
            "mask": mask,
            "logits": fresh,
            "stale_logits": stale,
            **low,
            "hidden": hidden[0].detach().transpose(0, 1).contiguous(),
            "weight": weight,
        }


def _filtered(z: Tensor) -> Tensor:
    """Top-p by a plain sort."""
    ordered, index = z.sort(dim=-1, descending=True, stable=True)
    p = ordered.softmax(-1)
    dropped = (p.cumsum(-1) - p) >= TOP_P
    return z.masked_fill(torch.zeros_like(dropped).scatter(-1, index, dropped), -torch.inf)


def _reported(data: dict[str, Tensor], settings: Settings) -> Tensor:
    """[b, s] of a side that computes so: plain torch."""
    source = "low_logits" if settings.trainer_layers else "logits"
    source = "engine_logits" if settings.engine_layers else source
    z = data["stale_logits" if settings.stale_weights else source].float()
    if settings.bf16_logits:
        z = z.bfloat16()
    z = z.double()
    if not settings.padding_counted:
        z = z[..., :TRUE_VOCAB]
    if settings.temperature_applied:
        z = z / TEMPERATURE
    if settings.filter_applied:
        z = _filtered(z)
    logp = z.log_softmax(-1)
    labels = data["target"]
    if settings.alignment == "labels late":  # never shifted: label t is token t
        labels = labels.roll(1, 1)
    elif settings.alignment == "labels early":  # shifted twice
        labels = labels.roll(-1, 1)
    values = logp.gather(-1, labels[..., None])[..., 0]
    if settings.alignment == "values late":
        values = values.roll(1, 1)
    elif settings.alignment == "values early":
        values = values.roll(-1, 1)
    return values.float()


@pytest.fixture(scope="module")
def data() -> dict[str, Tensor]:
    return get_pool(1).run(_model_data, timeout=200)[0]


def _explain(data: dict[str, Tensor], ours: Settings, theirs: Settings, **more: Any) -> Any:
    inputs = {name: data[name] for name in GIVEN}
    return explain_mismatch(
        _reported(data, ours), _reported(data, theirs), **{**inputs, **SETTINGS, **more}
    )


# Each cause on the side where it happens.
CAUSES: dict[str, tuple[dict, dict]] = {
    "labels late": ({"alignment": "labels late"}, {}),
    "labels early": ({"alignment": "labels early"}, {}),
    "values early": ({"alignment": "values early"}, {}),
    "engine's values late": ({}, {"alignment": "values late"}),
    "trainer without temperature": ({"temperature_applied": False}, {}),
    "engine's raw temperature": ({}, {"temperature_applied": False}),
    "trainer without filter": ({"filter_applied": False}, {}),
    "engine without filter": ({}, {"filter_applied": False}),
    "trainer's bf16 logits": ({"bf16_logits": True}, {}),
    "engine's bf16 logits": ({}, {"bf16_logits": True}),
    "padding counted": ({"padding_counted": True}, {}),
    "stale engine": ({}, {"stale_weights": True}),
}


def _check(data: dict[str, Tensor], ours: dict, theirs: dict) -> Any:
    train, rollout = Settings(**ours), Settings(**theirs)
    found = _explain(data, train, rollout)
    assert found.train == train
    assert found.rollout == rollout
    assert {(c.setting, c.side) for c in found.causes} == {
        *((name, "train") for name in ours),
        *((name, "rollout") for name in theirs),
    }
    assert found.remainder.max_abs < 1e-5
    parts = sum(c.per_token for c in found.causes) + found.remainder.per_token
    torch.testing.assert_close(parts, found.total.per_token, rtol=0, atol=1e-12)
    counted = int(data["mask"].sum())
    assert found.tokens + found.left_out == counted
    return found


@pytest.mark.parametrize("name", CAUSES)
def test_each_cause_is_found_alone(data: dict[str, Tensor], name: str) -> None:
    ours, theirs = CAUSES[name]
    found = _check(data, ours, theirs)
    (cause,) = found.causes
    # The size is the difference itself, as nothing else differs.
    d = _reported(data, Settings(**ours)) - _reported(data, Settings(**theirs))
    d = d[data["mask"]].double()
    expected = d[d.isfinite()].abs()
    if found.tokens == len(expected):
        assert cause.mean_abs == pytest.approx(expected.mean().item(), abs=1e-6)
        assert cause.max_abs == pytest.approx(expected.max().item(), abs=1e-5)
        share = (expected > found.threshold).double().mean().item()
        assert cause.share == pytest.approx(share, abs=1.5 / len(expected))
    assert cause.cure


LAYERS: dict[str, tuple[dict, dict]] = {
    "trainer's layers": ({"trainer_layers": True}, {}),
    "engine's layers": ({}, {"engine_layers": True}),
    "both layers": ({"trainer_layers": True}, {"engine_layers": True}),
    "layers and the engine's head": (
        {"trainer_layers": True},
        {"engine_layers": True, "bf16_logits": True},
    ),
    "layers and both heads": (
        {"trainer_layers": True, "bf16_logits": True},
        {"engine_layers": True, "bf16_logits": True},
    ),
    "layers and no filter": (
        {"trainer_layers": True, "filter_applied": False},
        {"engine_layers": True},
    ),
}


# By day the layers and heads of both sides are rounded; the other combinations wait for the night.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name.endswith("both heads") else pytest.mark.night)
        for name in LAYERS
    ],
)
def test_rounding_in_the_layers_is_split_by_side(data: dict[str, Tensor], name: str) -> None:
    ours, theirs = LAYERS[name]
    train, rollout = Settings(**ours), Settings(**theirs)
    sources = {
        "logits": data["low_logits"],
        "float32_logits": data["logits"],
        "rollout_logits": data["engine_logits"],
    }
    found = _explain(data, train, rollout, **sources)
    assert (found.train, found.rollout) == (train, rollout)
    # Where both heads round, each rounds its own hidden states' logits: a part of each side.
    assert sorted((c.setting, c.side) for c in found.causes) == sorted(
        [*((setting, "train") for setting in ours), *((setting, "rollout") for setting in theirs)]
    )
    assert not any("both sides" in note for note in found.notes)
    assert found.remainder.max_abs < 1e-5
    parts = sum(c.per_token for c in found.causes)
    torch.testing.assert_close(parts, found.total.per_token, rtol=0, atol=1e-5)
    # Without the engine's hidden states its share is the remainder, and a note says so.
    del sources["rollout_logits"]
    found = _explain(data, train, rollout, **sources)
    assert found.train == train
    assert (found.remainder.mean_abs > 1e-5) == ("engine_layers" in theirs)
    assert any("rollout_hidden" in note for note in found.notes)


def _pairs() -> list[Any]:
    """Causes of two settings each; by day one pair for each two settings."""
    by_setting: dict[str, list[str]] = {}
    for name, sides in CAUSES.items():
        (setting,) = {**sides[0], **sides[1]}
        by_setting.setdefault(setting, []).append(name)
    found = []
    for number, (ours, theirs) in enumerate(itertools.combinations(by_setting.values(), 2)):
        for i, j in itertools.product(range(len(ours)), range(len(theirs))):
            by_day = (i, j) == (number % len(ours), number % len(theirs))
            marks = () if by_day else pytest.mark.night
            found.append(pytest.param(ours[i], theirs[j], marks=marks))
    return found


@pytest.mark.parametrize(("first", "second"), _pairs())
def test_pairs_are_told_apart(data: dict[str, Tensor], first: str, second: str) -> None:
    (a, b), (c, d) = CAUSES[first], CAUSES[second]
    found = _check(data, {**a, **c}, {**b, **d})
    assert len(found.causes) == 2


@pytest.mark.parametrize("other", ["temperature_applied", "alignment"])
@pytest.mark.parametrize("filtered", ["train", "rollout"])
def test_a_filter_of_one_side_leaves_no_token_out(other: str, filtered: str) -> None:
    """Which both sides have: under the other side's settings it would cut some of them."""
    torch.manual_seed(0)
    z = torch.randn(4, 80, 300, dtype=torch.float64) * 3
    cut, plain = _filtered(z / TEMPERATURE).log_softmax(-1), z.log_softmax(-1)
    target = cut.exp().flatten(0, 1).multinomial(1).view(4, 80)
    labels = target
    if other == "alignment":
        labels, plain = target.roll(1, 1), (z / TEMPERATURE).log_softmax(-1)
    both = {
        filtered: cut.gather(-1, target[..., None])[..., 0],
        "rollout" if filtered == "train" else "train": plain.gather(-1, labels[..., None])[..., 0],
    }
    mask = torch.ones(4, 80, dtype=torch.bool)
    mask[:, :1] = mask[:, -1:] = False
    found = explain_mismatch(
        both["train"],
        both["rollout"],
        target,
        mask=mask,
        logits=z.float(),
        temperature=TEMPERATURE,
        top_p=TOP_P,
    )
    assert found.left_out == 0
    assert {cause.setting for cause in found.causes} == {other, "filter_applied"}
    assert found.remainder.mean_abs < 1e-4


# What filters keep, and whether the engine applies them.
FILTERS: list[dict[str, Any]] = [{"top_p": 0.95}, {"top_k": 20}, {"min_p": 0.05}]


# At seed 4, the day's, a search that counts every such token blames top-k and top-p.
@pytest.mark.parametrize(
    "seed", [4, *(pytest.param(seed, marks=pytest.mark.night) for seed in (2, 3))]
)
@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_noise_at_the_cut_of_a_filter(filters: dict[str, Any], applied: bool, seed: int) -> None:
    """Tokens that noise carries over the cut are impossible for the trainer. They are few, and do
    not make an engine's filter look as if it were not there; tokens far outside do."""

    def kept(z: Tensor) -> Tensor:
        ordered, index = z.sort(dim=-1, descending=True)
        p = ordered.softmax(-1)
        out = p.cumsum(-1) - p >= filters.get("top_p", 1.0)
        out[..., filters.get("top_k", z.shape[-1]) :] = True
        out |= p < filters.get("min_p", 0.0) * p[..., :1]
        return z.masked_fill(torch.zeros_like(out).scatter(-1, index, out), -torch.inf)

    generator = torch.Generator().manual_seed(seed)
    trainer = 2.5 * torch.randn(4, 64, 300, generator=generator)
    engine = trainer + 0.03 * torch.randn(trainer.shape, generator=generator)
    sampler = kept(engine.double()) if applied else engine.double()
    probs = sampler.softmax(-1).flatten(0, 1)
    target = torch.multinomial(probs, 1, generator=generator).view(4, 64)
    ours, theirs = (
        z.log_softmax(-1).gather(-1, target.unsqueeze(-1))[..., 0]
        for z in (kept(trainer.double()), sampler)
    )
    assert ours.isinf().any() or seed == 2  # at which only top-k has such tokens
    found = explain_mismatch(ours, theirs, target, logits=trainer, vocab_size=300, **filters)
    assert found.train.departures() == []
    assert found.rollout.departures() == ([] if applied else ["filter_applied"])


def test_no_cause_where_nothing_differs(data: dict[str, Tensor]) -> None:
    noise = 3e-6 * torch.randn(BATCH, LENGTH, generator=torch.Generator().manual_seed(1))
    right = _reported(data, Settings())
    inputs = {name: data[name] for name in GIVEN}
    found = explain_mismatch(right, right + noise, **inputs, **SETTINGS)
    assert found.causes == ()
    assert found.notes == ()
    expected = noise[data["mask"]].abs().double().mean().item()
    assert found.remainder.mean_abs == pytest.approx(expected, rel=0.1)


def test_a_mistake_of_both_sides_is_noted(data: dict[str, Tensor]) -> None:
    same = Settings(temperature_applied=False)
    found = _explain(data, same, same)
    assert found.causes == ()
    assert found.notes == (
        "both sides: temperature not applied. They agree, and both are wrong, unless the logits "
        "given are divided by it already",
    )


def test_a_side_that_is_nothing_that_was_tried_is_named(data: dict[str, Tensor]) -> None:
    """As where half of a batch is shifted, or another temperature is applied."""
    right = _reported(data, RIGHT)
    half = right.clone()
    half[::2] = _reported(data, Settings(alignment="labels late"))[::2]
    inputs = {name: data[name] for name in GIVEN}
    for train, rollout, named in (
        (half, right, ["train"]),
        (right, half, ["rollout"]),
        (half, -right, ["train", "rollout"]),
    ):
        notes = explain_mismatch(train, rollout, **inputs, **SETTINGS).notes
        said = [note.split(": no setting that was tried comes closer than ") for note in notes]
        assert [side for side, _ in said] == named
        if named == ["train"]:  # its size is that of the remainder
            size = (train - right)[data["mask"]]
            size = float(size[size.isfinite()].abs().mean())
            assert float(said[0][1].split()[0]) == pytest.approx(size, rel=0.1)


def test_from_hidden_states(data: dict[str, Tensor]) -> None:
    """The same causes and sizes as from logits."""
    sides = (Settings(temperature_applied=False), Settings(bf16_logits=True))
    of_logits = _explain(data, *sides, stale_logits=None)
    of_hidden = _explain(
        data, *sides, logits=None, stale_logits=None, hidden=data["hidden"], weight=data["weight"]
    )
    assert of_hidden.train == of_logits.train
    assert of_hidden.rollout.bf16_logits
    for a, b in zip(of_logits.causes, of_hidden.causes, strict=True):
        assert a.name == b.name
        # A logit on the edge between two bfloat16 numbers may fall to the other side.
        assert a.mean_abs == pytest.approx(b.mean_abs, rel=0.02)


def test_autocast_around_the_call_changes_nothing(data: dict[str, Tensor]) -> None:
    """Its products in bfloat16 would hide a head that rounds."""
    given = {"logits": None, "stale_logits": None, "hidden": data["hidden"]}
    given["weight"] = data["weight"]
    plain = _explain(data, Settings(), Settings(bf16_logits=True), **given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = _explain(data, Settings(), Settings(bf16_logits=True), **given)
    assert plain.rollout.departures() == found.rollout.departures() == ["bf16_logits"]
    assert found.text() == plain.text()


def test_known_settings_are_not_searched(data: dict[str, Tensor]) -> None:
    found = _explain(
        data, Settings(), Settings(), train={"filter_applied": False}, rollout={"bf16_logits": True}
    )
    assert not found.train.filter_applied
    assert {c.name for c in found.causes} == {"truncation mass", "rounding of the head"}
    # What was not there is taken back by the remainder.
    sizes = sum(c.per_token for c in found.causes)
    torch.testing.assert_close(found.remainder.per_token, -sizes, rtol=0, atol=1e-5)


def test_without_logits_a_shift_of_values_is_found(data: dict[str, Tensor]) -> None:
    right = _reported(data, Settings())
    for name in ("values late", "values early"):
        shifted = _reported(data, Settings(alignment=name))
        found = explain_mismatch(shifted, right, data["target"], mask=data["mask"])
        assert found.train.alignment == name
        assert found.causes[0].name == "shifted by one"
        assert found.remainder.max_abs < 1e-6
        assert found.notes[1].startswith("or the engine's values are ")
    found = explain_mismatch(right, right, data["target"], mask=data["mask"])
    assert found.causes == ()
    assert found.notes[0].endswith("can be found")
    known = {"train": {"temperature_applied": True}, "top_p": 0.9}
    found = explain_mismatch(right, right, data["target"], mask=data["mask"], **known)
    assert found.notes[0].endswith("can be found; not looked at: top_p, train")


def test_sharded_logits(data: dict[str, Tensor]) -> None:
    whole = _explain(data, Settings(padding_counted=True), Settings(bf16_logits=True))
    for found in get_pool(3).run(_explain_sharded, data, timeout=200):
        assert found.train == whole.train
        assert found.rollout == whole.rollout
        assert found.total.mean_abs == whole.total.mean_abs
        for a, b in zip(whole.causes, found.causes, strict=True):
            torch.testing.assert_close(a.per_token, b.per_token, rtol=0, atol=1e-5)


def _explain_sharded(data: dict[str, Tensor]) -> Any:
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    mine = {k: data[k].chunk(world, -1)[rank] for k in ("logits", "stale_logits")}
    sides = (Settings(padding_counted=True), Settings(bf16_logits=True))
    return _explain(data, *sides, **mine, tp_group=dist.group.WORLD)


def _explain_other_reports(data: dict[str, Tensor], changed: str) -> str:
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    logits = data["logits"].chunk(world, -1)[rank]
    given = {
        "train_logprobs": _reported(data, Settings()),
        "rollout_logprobs": _reported(data, Settings(bf16_logits=True)),
        "target": data["target"],
        "temperature": 1.0,
    }
    if rank == 1:
        given[changed] = given[changed] + 1
    try:
        explain_mismatch(**given, logits=logits, tp_group=dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("changed", ["train_logprobs", "rollout_logprobs", "target", "temperature"])
def test_other_reports_on_a_rank_raise_on_every_rank(data: dict[str, Tensor], changed: str) -> None:
    """The search goes by their values: ranks that search on would wait for each other."""
    for found in get_pool(2).run(_explain_other_reports, data, changed, timeout=60):
        assert found.startswith(f"{changed}: expected the same on every rank of the TP group, got ")


def _without_a_group() -> tuple[float, Settings]:
    with megatron(tp=2) as parallel_state:
        logits, target = torch.randn(2, 16, 48), torch.arange(32).view(2, 16) + 16
        right = logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
        mine = logits.chunk(2, -1)[parallel_state.get_tensor_model_parallel_rank()]
        found = explain_mismatch(right, right - 0.1, target, logits=mine)
        return found.remainder.max_abs, found.train


def test_megatron_s_group_is_taken_where_none_is_given() -> None:
    """For ids too, which are of both ranks' columns."""
    for remainder, train in get_pool(2).run(_without_a_group):
        assert remainder == pytest.approx(0.1, abs=1e-5)
        assert train == Settings()


def _dump(data: dict[str, Tensor], path: Path) -> None:
    inputs: dict[str, Any] = {
        "train_logprobs": _reported(data, Settings(temperature_applied=False)),
        "rollout_logprobs": _reported(data, Settings(stale_weights=True)),
        **{name: data[name] for name in GIVEN},
    }
    if path.suffix == ".npz":
        np.savez(path, **{k: v.numpy() for k, v in inputs.items()}, **SETTINGS)
    else:
        torch.save({**inputs, **SETTINGS}, path)


@pytest.mark.parametrize("suffix", [".npz", ".pt"])
def test_dumps_and_the_command_that_reads_them(
    data: dict[str, Tensor], tmp_path: Path, suffix: str, capsys
) -> None:
    path, plot = tmp_path / f"dump{suffix}", tmp_path / "m.png"
    _dump(data, path)
    found = explain_mismatch(**load_mismatch_dump(path))
    assert [c.name for c in found.causes] == ["stale weights", "temperature not applied"]
    assert "cure of temperature not applied (train): LogprobConfig(temperature" in found.text()
    if suffix == ".npz":
        assert main(["doctor", "mismatch", str(path), "--json", "--plot", str(plot)]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert [c["name"] for c in printed["causes"]] == [c.name for c in found.causes]
        assert plot.read_bytes().startswith(b"\x89PNG")
