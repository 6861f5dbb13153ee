# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A group that was given up: its gradient is over the threshold without any token."""

from collections.abc import Sequence

from .candidates import Candidates
from .codes import Probe, TokenSet


class NoTokens:
    """The end of a search in which no token can be named; it has what `FewTokens` and `Bisection` have.

    Args:
        tokens (Candidates): The group's tokens.
        whole (TokenSet): All of them.
        norm (float): The group's norm.
    """

    ended = True
    open_count = 0

    def __init__(self, tokens: Candidates, whole: TokenSet, norm: float) -> None:
        self.tokens = tokens
        self.rest: tuple[TokenSet, float] | None = (whole, norm)
        self.culprits: list[int] = []
        self.open_sets: list[TokenSet] = []
        self.given_up = [whole]
        self.diffuse = [(whole, norm)]

    def next_probes(self, count: int, passes_left: float) -> list[Probe]:
        """None."""
        return []

    def add_measurements(self, measured: Sequence[tuple[Probe, float]], count: int) -> None:
        """Records nothing."""
