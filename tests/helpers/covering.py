"""A covering array: few settings that hold every pair of values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest


def covering(
    axes: dict[str, Sequence[Any]],
    fits: Callable[[dict[str, Any]], bool],
    together: Iterable[tuple[str, ...]] = (),
    cheap: Iterable[str] = (),
    involving: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """Settings, one value of every axis each, found greedily.

    Args:
        axes: the values of each.
        fits: whether some values go together; given a whole setting or a part of one.
        together: axes all of whose combinations are wanted, in addition to every pair of values.
        cheap: axes whose first value is taken where another one holds no more that is new.
        involving: only the pairs with one of these axes are wanted; None: all.
    """
    rng = random.Random(0)
    wanted_axes = set(axes if involving is None else involving)
    pairs = (pair for pair in itertools.combinations(axes, 2) if not wanted_axes.isdisjoint(pair))
    groups = [*pairs, *together]
    wanted = dict.fromkeys(
        frozenset(zip(group, values, strict=True))
        for group in groups
        for values in itertools.product(*(axes[name] for name in group))
    )
    found = []

    def new_pairs(row: dict[str, Any], name: str, value: Any) -> int:
        return sum(frozenset({(name, value), other}) in wanted for other in row.items())

    while wanted:
        combination, _ = wanted.popitem()
        row = dict(combination)
        for name in rng.sample(list(axes), len(axes)):
            if name not in row:
                choices = [v for v in axes[name] if fits(row | {name: v})]
                if not choices:  # no setting holds the combination
                    break
                most = max(new_pairs(row, name, v) for v in choices)
                best = [v for v in choices if new_pairs(row, name, v) == most]
                drawn = rng.choice(best)
                row[name] = best[0] if name in cheap else drawn
        if len(row) == len(axes) and fits(row):
            found.append(row)
            for group in groups:
                wanted.pop(frozenset((name, row[name]) for name in group), None)
    return found


def every_pair(**axes: Sequence[Any]) -> Any:
    """`pytest.mark.parametrize` over few settings that hold every pair of values of the axes."""
    found = [tuple(row[name] for name in axes) for row in covering(axes, lambda setting: True)]
    return pytest.mark.parametrize(tuple(axes), found, ids=lambda value: str(value))
