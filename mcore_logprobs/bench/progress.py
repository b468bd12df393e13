"""How far a benchmark has come, and about how long the rest will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

_WIDTH = 30


class Progress:
    """A bar on a terminal; elsewhere one line after the first table.

    Times of what is left are in proportion to the work of what is done.

    Args:
        work: of each table, in any unit.
    """

    def __init__(self, work: Sequence[float], stream: TextIO | None = None) -> None:
        self._work, self._done = list(work), 0
        self._stream = sys.stderr if stream is None else stream
        self._started = time.monotonic()
        self._bar = self._stream.isatty()

    def show(self) -> None:
        """Draw the bar; before the first table the time is not known."""
        if self._bar:
            share = self._share()
            filled = round(_WIDTH * share)
            bar = "#" * filled + "." * (_WIDTH - filled)
            self._stream.write(
                f"\r\x1b[K[{bar}] table {self._done + 1} of {len(self._work)}{self._left()}"
            )
            self._stream.flush()

    def clear(self) -> None:
        """Take the bar away, so that a table can be printed."""
        if self._bar:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def step(self) -> None:
        """One more table is done."""
        self._done += 1
        if self._done == 1 < len(self._work) and not self._bar:
            self._stream.write(f"bench: 1 of {len(self._work)} tables{self._left()}\n")

    def _share(self) -> float:
        return sum(self._work[: self._done]) / max(sum(self._work), 1e-9)

    def _left(self) -> str:
        share = self._share()
        if not share:
            return ""
        seconds = (time.monotonic() - self._started) * (1.0 - share) / share
        time_left = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
        return f", about {time_left} left"
