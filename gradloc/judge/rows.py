# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of how an update's rows fit together: advantages and rewards, uids and prompts, repeated responses."""

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence

from ..lines import RunWarning
from ..sums import TrainedRow
from .progress import SEE, as_warning
from .shares import percent

# That a response with a higher reward has a lower advantage than another one to the same prompt; that rewards of
# several prompts are compared; that responses are there more than once; and that advantages are not where tokens are.
ADVANTAGE_ORDER, MIXED_GROUPS, REPEATED = "advantage_order", "mixed_groups", "repeated_responses"
ADVANTAGE_MASK = "advantage_mask"
# Those of them that may be the cause of a spike: of one without another bug.
OF_GROUPS = (ADVANTAGE_ORDER, MIXED_GROUPS, ADVANTAGE_MASK)
# The share of an update's rows from which on they are mixed, or repeated: rows may be doubled to fill a batch.
LEAST_ROWS = 0.05
# Where groups are mixed, there are as many prompts as uids; on rank 0 alone, up to such a part more or fewer.
OTHER_NUMBER = 1 / 3
# A response is repeated if the policy would have sampled it again with this log-prob, or less.
LEAST_CHANCE = -30.0
# In so many pairs, of so many at least. With a baseline of the prompt's, it is none; by chance, half of them. Rewards
# that are normalized one by one (GDPO) may contradict their sum, or the score, in up to a quarter.
CONTRADICTING, LEAST_PAIRS = 0.3, 16
# In so many responses, the advantage ends before the tokens do, or begins after them.
_LEAST_CUT = 4
# In so many, the sign is turned.
TURNED = 0.95


def row_warnings(rows: Sequence[TrainedRow]) -> list[RunWarning]:
    """The warnings of an update's rows, those of rank 0."""
    # Rows that are moved have other masks, too.
    of_advantages = _order(*count_pairs(rows)) or _mask(rows)
    checks = (of_advantages, _mixed(rows), _repeated(rows))
    return [warning for warning in checks if warning is not None]


def count_pairs(rows: Sequence[TrainedRow]) -> tuple[int, int]:
    """How many pairs there are of responses to one prompt with different rewards and different advantages, none of them
    0 or not finite, which are the same at all tokens; and in how many the higher reward has the lower advantage.
    """
    pairs = contradicting = 0
    groups: dict[str, list[tuple[float, float]]] = {}
    if all(row.is_one for row in rows):  # else an estimator has a value of each token's
        for row in rows:
            if row.reward is not None and row.advantage is not None and math.isfinite(row.reward + row.advantage):
                groups.setdefault(row.uid, []).append((row.reward, row.advantage))
    for group in groups.values():
        group.sort()
        lower = 0
        advantages: list[float] = []  # of the first `lower` rows, whose rewards are lower; sorted
        for reward, advantage in group:
            # What is close to a number lies around it without gaps, and farther up for a larger one.
            while not _close(group[lower][0], reward):
                insort(advantages, group[lower][1])
                lower += 1
            less = bisect_left(advantages, True, key=lambda other: other >= advantage or _close(other, advantage))
            more = bisect_left(advantages, True, key=lambda other: other > advantage and not _close(other, advantage))
            pairs += less + lower - more
            contradicting += lower - more
    return pairs, contradicting


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6)


def _order(pairs: int, contradicting: int) -> RunWarning | None:
    if pairs < LEAST_PAIRS or contradicting < CONTRADICTING * pairs:
        return None
    share = contradicting / pairs
    look = "Look for rows that are moved between rewards and advantages (a sort, a filter, padding, a gather)"
    if share > TURNED:
        look = "Their sign is turned: look at the loss's sign and at rewards that are costs"
    return as_warning(
        ADVANTAGE_ORDER,
        "Advantages do not follow the rewards",
        f": in {percent(share)} of the pairs of responses to one prompt, that with the higher reward has the lower "
        f"advantage. {look}.",
        "Before the update, print `uid`, the sum of `token_level_rewards` and the advantage of each row: of the "
        "rows with one `uid`, that with the highest reward has the highest advantage.",
    )


def _mask(rows: Sequence[TrainedRow]) -> RunWarning | None:
    """Where all tokens of responses have one advantage, but for those at their start, or at their end."""
    moving = [row for row in rows if row.advantage is not None]
    cut = sum(row.unmoved > 0 for row in moving)
    if cut < _LEAST_CUT or cut <= LEAST_ROWS * len(moving) or not all(row.is_one for row in moving):
        return None
    return as_warning(
        ADVANTAGE_MASK,
        f"In {percent(cut / len(moving))} of the responses, the tokens at one end have no advantage, while all "
        "others have the response's",
        ": look at how advantages are padded and aligned with `response_mask` (left or right, of which row).",
        "Before the update, print `advantages` and `response_mask` of one row: where the mask is 1, the advantage "
        "is the same.",
        share=cut / len(moving),
    )


def _mixed(rows: Sequence[TrainedRow]) -> RunWarning | None:
    """Where rows have a uid with several prompts that others have, too."""
    prompts = {(row.uid, row.prompt) for row in rows if row.prompt is not None}
    uids_of = Counter(prompt for _, prompt in prompts)
    shared_of = Counter(uid for uid, prompt in prompts if uids_of[prompt] > 1)
    # A trajectory that is cut in rows has other prompts, too, which may be a common state of its environment.
    sessions = {(row.uid, str(i) if row.session_id is None else row.session_id) for i, row in enumerate(rows)}
    uids = {row.uid for row in rows}
    mixed = sum(shared_of[row.uid] > 1 for row in rows)
    if mixed <= LEAST_ROWS * len(rows) or len(sessions) < len(rows):
        return None
    if not math.isclose(len(uids_of), len(uids), rel_tol=OTHER_NUMBER):
        return None
    return as_warning(
        MIXED_GROUPS,
        "Rewards of different prompts are compared",
        f": {percent(mixed / len(rows))} of the responses have a `uid` with several prompts that others have, too. "
        "Look at the order in which prompts are repeated for the rollout and put together with their responses.",
        "Before the update, print `uid` and the decoded prompt of each row: rows with one `uid` are of one prompt.",
        share=mixed / len(rows),
    )


def _repeated(rows: Sequence[TrainedRow]) -> RunWarning | None:
    """Where responses are the same as an earlier one to their uid."""
    seen: set[tuple[str, int | None, int | None]] = set()
    repeated = 0
    for row in rows:
        is_improbable = row.response is not None and row.log_prob is not None and row.log_prob < LEAST_CHANCE
        repeated += is_improbable and (row.uid, row.prompt, row.response) in seen
        seen.add((row.uid, row.prompt, row.response))
    if repeated <= LEAST_ROWS * len(rows):
        return None
    return as_warning(
        REPEATED,
        f"{percent(repeated / len(rows))} of the responses are the same, token for token, as an earlier one to "
        "their prompt",
        f". Without top-p or top-k, chance gives that once in e^{-LEAST_CHANCE:.0f} at most: the rollout samples "
        f"with one seed, or rows are doubled. {SEE.format('one_seed')}",
        "Print the ids of the responses of one `uid` after the rollout. If they are the same there, look at seeds, "
        "temperature, top-p and top-k of the server; if not, at what pads, repeats or gathers rows.",
        share=repeated / len(rows),
    )
