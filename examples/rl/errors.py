"""One exception for everything that a user can put right."""

from __future__ import annotations


class SetupError(ValueError):
    """The run cannot start as asked; the message says what to change, without a traceback."""
