# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of every update's columns: are they finite, and are advantages as large as before?"""

import math
import statistics
from collections.abc import Sequence

from ..lines import RunWarning
from ..sums import COLUMN_SUMS, COLUMNS
from .progress import Progress, RunCheck, as_warning
from .rules import BROKEN, VERL_NAMES

# That advantages have another size: rewards of one kind may be the cause.
REWARD_SCALE = "reward_scale"
# Advantages so many times as large, or as small, as in all of the last updates, of which there are some, and so many
# responses with one.
SCALE_FACTOR = 5.0
SCALE_UPDATES = 2
SCALE_RESPONSES = 8
# And no farther spread than before, in nats of deviation: where some rewards are others, some advantages are.
SCALE_SPREAD = 0.4
# Where they are spread so far, the typical one varies, and where nearly all rewards are the same, it is small: the
# update before has to show the same.
SCALE_WIDE = 0.8
_SIZES = 8
CHECK_ADVANTAGES = (
    "Compare `critic/score/mean`, `critic/score/max` and `critic/advantages/max` in the log, before and after the "
    "first step with this."
)


class AdvantageChecks(RunCheck):
    """The checks of columns, by what `own_columns` gives."""

    NOW = ("_columns",)

    def __init__(self, progress: Progress) -> None:
        super().__init__(progress)
        self._columns = [0.0] * COLUMN_SUMS
        # Of the last updates, the typical |A|, a geometric mean, and how far log|A| is spread; and of another size the
        # step since which it holds, and the factor.
        self._sizes: list[float] = []
        self._spreads: list[float] = []
        self._scale: tuple[int | None, float] | None = None

    def take_in(self, columns: Sequence[float] | None) -> None:
        """Adds a mini-batch; see `RunChecks.take_in`."""
        if columns is not None:
            self._columns = [a + b for a, b in zip(self._columns, columns, strict=True)]

    def warnings(self) -> list[RunWarning]:
        """Of the update so far."""
        return [warning for check in (self._broken, self._reward_scale) if (warning := check()) is not None]

    def end_update(self) -> None:
        """Takes the update's figures into what later ones are compared with."""
        self._scale = self._other_scale()
        if (size := self._size()) is not None and self._scale is None:
            self._sizes, self._spreads = [*self._sizes, size[0]][-_SIZES:], [*self._spreads, size[1]][-_SIZES:]
        self._columns = [0.0] * COLUMN_SUMS

    def _size(self) -> tuple[float, float] | None:
        """The typical |A| of the update's responses, and the deviation of log|A|; None of too few."""
        *_, total, square, count = self._columns
        if count < SCALE_RESPONSES:
            return None
        return math.exp(total / count), math.sqrt(max(square / count - (total / count) ** 2, 0.0))

    def _other_scale(self) -> tuple[int | None, float] | None:
        """Since which step advantages have another size, and by which factor; None while they have not.

        Another scale moves all of them. If they are spread farther than before, some rewards are others.
        """
        if (found := self._size()) is None or len(self._sizes) < SCALE_UPDATES:
            return self._scale
        size, spread = found
        is_usual = min(self._sizes) / SCALE_FACTOR < size < max(self._sizes) * SCALE_FACTOR
        if is_usual or spread > max(self._spreads, default=math.inf) + SCALE_SPREAD:
            return None
        step = self._progress.step if self._scale is None else self._scale[0]
        return step, size / statistics.median(self._sizes)

    def _reward_scale(self) -> RunWarning | None:
        scale, found = self._other_scale(), self._size()
        if scale is None:
            return None
        step, factor = scale
        is_wide = found is not None and max([found[1], *self._spreads]) > SCALE_WIDE
        if (is_wide or factor < 1) and self._scale is None:
            return None
        when = "" if step is None else f" since step {step}"
        times = f"{factor:.3g} times" if factor > 1 else f"1/{1 / factor:.3g} of"
        return as_warning(
            REWARD_SCALE,
            f"Advantages are {times} what they were{when}, in the typical response",
            ": rewards are scaled differently, or no longer normalized. Look at what changed in the reward "
            "function or in the advantage's normalization at that step.",
            CHECK_ADVANTAGES,
        )

    def _broken(self) -> RunWarning | None:
        """A column with NaN or Inf: the first one from which the others follow."""
        responses, *broken = self._columns[: len(COLUMNS) + 1]
        for name, count in zip(COLUMNS[:-1], broken, strict=False):
            if count:
                column, of_advantage = VERL_NAMES[name], name == "advantage"
                where = "all" if count == responses else f"{count:.0f} of {responses:.0f}"
                rows = "one bad reward makes the advantages of its whole group NaN" if of_advantage else ""
                look = "rewards and their normalization" if of_advantage else "its forward pass and its precision"
                return as_warning(
                    BROKEN,
                    f"`{column}` is NaN or infinite in {where} responses",
                    f": look at what computes it, before the update: {look}.",
                    f"Print `{column}` of these rows before the update, and for advantages `token_level_scores` "
                    "of all rows of the same `uid`.",
                    rows,
                    share=count / responses,
                )
        return None
