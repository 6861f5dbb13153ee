# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The figures of a run's steps, in little memory: a run may have hundreds of thousands of steps."""

from array import array
from collections.abc import Iterator, Mapping

from ..evidence.writer import STEP_FIGURES

_WIDTH = len(STEP_FIGURES)


class StepFigures(Mapping[int, Mapping[str, float | None]]):
    """`STEP_FIGURES` by step; None where there is no data."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._values = array("d")
        self._known = bytearray()

    def set(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Sets the figures of a step; those that it had are gone."""
        row = self._rows.setdefault(step, len(self._rows))
        if row * _WIDTH == len(self._values):
            self._values.extend([0.0] * _WIDTH)
            self._known.extend([False] * _WIDTH)
        for place, name in enumerate(STEP_FIGURES, row * _WIDTH):
            value = figures[name]
            self._known[place] = value is not None
            self._values[place] = 0.0 if value is None else value

    def __getitem__(self, step: int) -> Mapping[str, float | None]:
        start = self._rows[step] * _WIDTH
        return {
            name: self._values[place] if self._known[place] else None for place, name in enumerate(STEP_FIGURES, start)
        }

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
