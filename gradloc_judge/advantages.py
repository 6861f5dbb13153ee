# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of every update's columns: are they finite, are advantages as large as before, do they follow the rewards?"""

import math
import statistics
from collections.abc import Mapping, Sequence

from gradloc.lines import RunWarning
from gradloc.sums import COLUMN_SUMS, COLUMNS, LEAST_CHANCE

from .progress import SEE, Progress, RunCheck
from .rules import BROKEN, VERL_NAMES
from .shares import percent

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

# That a response with a higher reward has a lower advantage than another one to the same prompt; that rewards of
# several prompts are compared; and that responses are there more than once.
ADVANTAGE_ORDER, MIXED_GROUPS, REPEATED = "advantage_order", "mixed_groups", "repeated_responses"
# Those of them that may be the cause of a spike: of one without another bug.
OF_GROUPS = (ADVANTAGE_ORDER, MIXED_GROUPS)
# The share of an update's rows from which on they are mixed, or repeated: rows may be doubled to fill a batch.
LEAST_ROWS = 0.05
# In so many pairs, of so many at least. With a baseline of the prompt's, it is none; by chance, half of them. Rewards
# that are normalized one by one (GDPO) may contradict their sum, or the score, in up to a quarter.
CONTRADICTING, LEAST_PAIRS = 0.3, 16
# In so many, the sign is turned.
TURNED = 0.95


def order_warning(pairs: int, contradicting: int) -> RunWarning | None:
    """The warning that advantages do not follow the rewards; None if they do, or of too few pairs.

    Args:
        pairs (int): Of responses to one prompt with different rewards and different advantages, none of them 0, which
            are the same at all tokens of a response.
        contradicting (int): In how many of them the higher reward has the lower advantage.
    """
    if pairs < LEAST_PAIRS or contradicting < CONTRADICTING * pairs:
        return None
    share = contradicting / pairs
    look = "Look for rows that are moved between rewards and advantages (a sort, a filter, padding, a gather)"
    if share > TURNED:
        look = "Their sign is turned: look at the loss's sign and at rewards that are costs"
    return {
        "name": ADVANTAGE_ORDER,
        "sentence": f"Advantages do not follow the rewards: in {percent(share)} of the pairs of responses to one "
        f"prompt, that with the higher reward has the lower advantage. {look}.",
        "check": "Before the update, print `uid`, the sum of `token_level_rewards` and the advantage of each row: of "
        "the rows with one `uid`, that with the highest reward has the highest advantage.",
    }


def row_warnings(counts: Mapping[str, int]) -> list[RunWarning]:
    """The warnings of how an update's rows fit together, by what `TrainedData.row_counts` gives."""
    rows, mixed, repeated = (counts.get(name, 0) for name in ("rows", "mixed", "repeated"))
    found = [order_warning(counts.get("pairs", 0), counts.get("contradicting", 0))]
    if mixed > LEAST_ROWS * rows:
        found.append(
            {
                "name": MIXED_GROUPS,
                "sentence": f"Rewards of different prompts are compared: {percent(mixed / rows)} of the responses have "
                "a `uid` with several prompts that others have, too. Look at the order in which prompts are repeated "
                "for the rollout and put together with their responses.",
                "check": "Before the update, print `uid` and the decoded prompt of each row: rows with one `uid` "
                "are of one prompt.",
                "share": mixed / rows,
            }
        )
    if repeated > LEAST_ROWS * rows:
        found.append(
            {
                "name": REPEATED,
                "sentence": f"{percent(repeated / rows)} of the responses are the same, token for token, as an earlier "
                f"one to their prompt. Without top-p or top-k, chance gives that once in e^{-LEAST_CHANCE:.0f} at "
                f"most: the rollout samples with one seed, or rows are doubled. {SEE.format('one_seed')}",
                "check": "Print the ids of the responses of one `uid` after the rollout. If they are the same there, "
                "look at seeds, temperature, top-p and top-k of the server; if not, at what pads, repeats or gathers "
                "rows.",
                "share": repeated / rows,
            }
        )
    return [warning for warning in found if warning is not None]


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
        return {
            "name": REWARD_SCALE,
            "sentence": f"Advantages are {times} what they were{when}, in the typical response: rewards are scaled "
            "differently, or no longer normalized. Look at what changed in the reward function or in the advantage's "
            "normalization at that step.",
            "check": CHECK_ADVANTAGES,
        }

    def _broken(self) -> RunWarning | None:
        """A column with NaN or Inf: the first one from which the others follow."""
        responses, *broken = self._columns[: len(COLUMNS) + 1]
        for name, count in zip(COLUMNS[:-1], broken, strict=False):
            if count:
                column, of_advantage = VERL_NAMES[name], name == "advantage"
                where = "all" if count == responses else f"{count:.0f} of {responses:.0f}"
                rows = " (one bad reward makes the advantages of its whole group NaN)" if of_advantage else ""
                look = "rewards and their normalization" if of_advantage else "its forward pass and its precision"
                return {
                    "name": BROKEN,
                    "sentence": f"`{column}` is NaN or infinite in {where} responses{rows}: look at what computes it, "
                    f"before the update: {look}.",
                    "check": f"Print `{column}` of these rows before the update, and for advantages "
                    "`token_level_scores` of all rows of the same `uid`.",
                    "share": count / responses,
                }
        return None
