# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What the rows of a spike's mini-batch say of it: a reward that may misfire, or that is not finite."""

import math
import statistics
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

from ..lines import Event, Verdict
from ..sums import Place, TrainedRow
from .advantages import REWARD_SCALE
from .progress import said
from .rules import BROKEN, EXAMPLE, NATURAL_ADVANTAGE, NATURAL_FACTOR, RULES, Kind
from .shares import counted, percent
from .verdict import COMMON, LIFT, MOST_CULPRITS, as_verdict, explaining_culprits

# In how many prompts there are culprits, at least: those of one prompt share its data source, and often their reward.
LEAST_PROMPTS = 2
# The probability of as many culprits by chance, times the number of values that were compared, is under this.
SIGNIFICANT = 1e-3
# Advantages of culprits that are larger than this many times those of other responses explain the spike by themselves.
USUAL_ADVANTAGE = 1.5
# A reward that is so many times as far from all others as these are from each other makes the advantages of its group.
FAR = 5.0
# What more of the responses have is no misfire, but what their prompts are rewarded with.
MANY = 1 / 3
# The causes that say less than a reward does: what other rules hold for is a bug, or the loss itself.
LESS_SPECIFIC = (None, REWARD_SCALE, *(rule.name for rule in RULES if rule.kind in (Kind.NATURAL, Kind.LAYER)))

# What is said of several such verdicts, or of one of another release, which need not say what it names.
OF_EITHER = "The culprits are in responses with one reward or data source"
_ADVICE = ": read these responses, and look for what the reward function takes for right or wrong there."
_CHECK = (
    "Score the culprits' `response` in spikes.jsonl against its `ground_truth` by hand, and compare with its `reward`."
    + EXAMPLE.format("misfire")
)

_PLACE = "row {1} on rank {0}"


def needs_rows(event: Event) -> bool:
    """Whether the verdict on an event may change by the rows of its mini-batch."""
    verdict = event.get("verdict")
    if verdict is None:
        return False
    if verdict["cause"] in LESS_SPECIFIC:
        return bool(explaining_culprits(event["culprits"]))
    return verdict["cause"] == BROKEN


def verdict_by_rows(event: Event, rows: Mapping[Place, TrainedRow]) -> Verdict | None:
    """The verdict on an event, with what all rows of its mini-batch say of it where it `needs_rows`."""
    verdict = event.get("verdict")
    if verdict is None or not needs_rows(event):
        return verdict
    if verdict["cause"] == BROKEN:
        return {**verdict, "sentence": verdict["sentence"] + _broken_rows(rows)}
    return misfire(event, rows) or verdict


def _broken_rows(rows: Mapping[Place, TrainedRow]) -> str:
    """Where advantages are not finite, and which rewards: a sentence, or nothing."""
    broken = sorted(place for place, row in rows.items() if not math.isfinite(row.largest))
    if not broken:
        return ""
    prompts = {rows[place].uid for place in broken}
    count = counted(len(broken), sum(row.uid in prompts for row in rows.values()), "responses")
    whose = "one prompt" if len(prompts) == 1 else f"{len(prompts)} prompts"
    found = f" Advantages: {count} to {whose}, first {_PLACE.format(*broken[0])}."
    rewards = sorted(place for place, row in rows.items() if row.score is not None and not math.isfinite(row.score))
    more = f" and {len(rewards) - 1} more" * (len(rewards) > 1)
    return found + (f" The reward of {_PLACE.format(*rewards[0])}{more} is NaN or infinite." if rewards else "")


def misfire(event: Event, rows: Mapping[Place, TrainedRow]) -> Verdict | None:
    """The verdict that a reward value or a data source is the cause; None if neither stands out.

    Only responses with an advantage count. Of each prompt with culprits, that with the largest one is taken: that
    as many of them have the value by chance has a probability under `SIGNIFICANT`. Rare values have large advantages,
    which make spikes without any fault. So these are as large as those without the value, or the value is a reward that
    is farther from all others than they are from each other (below them, where responses without any merit are, with
    advantages that ordinary rewards do not give). In one prompt, only a reward that is `FAR` from all others is named.

    Args:
        event (Mapping): The event; its culprits, the largest first.
        rows (Mapping): All rows of its mini-batch.
    """
    count_of_culprits = len(event["culprits"])
    at = {place: row for place, row in rows.items() if math.isfinite(row.largest) and row.largest > 0}
    places = [(culprit["rank"], culprit["row"]) for culprit in explaining_culprits(event["culprits"])]
    moving, culprits = [*at.values()], [at[place] for place in places if place in at]
    if not culprits:
        return None
    of_prompts: dict[str, TrainedRow] = {}
    for row in culprits:
        of_prompts.setdefault(row.uid, row)
    prompts = {row.uid: row for row in moving}
    compared = (("reward", moving), ("data_source", [*prompts.values()])) if len(of_prompts) >= LEAST_PROMPTS else ()
    for what, drawn_from in compared:
        found = [_value(row, what) for row in of_prompts.values()]
        known = [value for row in drawn_from if (value := _value(row, what)) is not None]
        value, count = Counter(found).most_common(1)[0]
        if value is None or len(known) < len(drawn_from):
            continue
        chance = _chance(count, len(found), known.count(value), len(known)) * len(set(known))
        share = sum(_value(row, what) == value for row in culprits) / count_of_culprits
        ordinary = sum(_value(row, what) == value for row in moving) / len(moving)
        stands_out = share >= MOST_CULPRITS and ordinary < COMMON and share >= LIFT * ordinary
        with_value = [row.largest for row in of_prompts.values() if _value(row, what) == value]
        without = [row.largest for row in moving if _value(row, what) != value]
        is_usual = bool(without) and statistics.median(with_value) <= USUAL_ADVANTAGE * statistics.median(without)
        is_large = bool(without) and statistics.median(with_value) > NATURAL_FACTOR * statistics.median(without)
        is_outlier = what == "reward" and _is_outlier(value, {*known} - {value}, is_large)
        if stands_out and chance < SIGNIFICANT and (is_usual or is_outlier):
            name = f"reward {value:g}" if what == "reward" else f"data source {value}"
            where = f"The culprits are in responses with the {name}"
            named = _verdict(where, culprits, share, ordinary, count_of_culprits)
            return {**named, "data_source": None if what == "reward" else str(value)}
    return _far_reward(culprits, moving, count_of_culprits)


def _far_reward(culprits: Sequence[TrainedRow], rows: Sequence[TrainedRow], count: int) -> Verdict | None:
    """The verdict that one reward value far from all others makes the advantages.

    A value that many responses have, as those of a data source, does not count. The culprits' advantages must be larger
    than the other rewards are apart: no baseline among these gives that. A value below all others is that of responses
    without any merit, unless advantages are larger than ordinary rewards give.
    """
    rewards = [value for row in rows if isinstance(value := _value(row, "reward"), float)]
    for value in {min(rewards), max(rewards)} if len(rewards) == len(rows) else ():
        others = {*rewards} - {value}
        if len(others) < 2 or rewards.count(value) > MANY * len(rewards):
            continue
        low, high = min(others), max(others)
        groups = {row.uid for row in rows if _value(row, "reward") == value}
        is_far = max(value - high, low - value) >= FAR * (high - low)
        is_far &= value > high or max(row.largest for row in culprits) > NATURAL_ADVANTAGE
        if is_far and all(row.uid in groups and row.largest > high - low for row in culprits):
            share = sum(_value(row, "reward") == value for row in culprits) / count
            ordinary = rewards.count(value) / len(rewards)
            where = f"The reward {value:g}, while all others are from {low:g} to {high:g}, makes the culprits' "
            where += "advantages: they are in responses with it, or to the same prompts"
            return _verdict(where, culprits, share, ordinary, count)
    return None


def without_data_source(verdict: Verdict) -> Verdict:
    """A verdict without the name of a data source; of any cause."""
    if verdict["cause"] != "misfire" or verdict.get("data_source", "") is None:
        return verdict
    claim = "The culprits are in responses with one data source" if "data_source" in verdict else OF_EITHER
    bare = said(claim, _ADVICE, verdict["check"], verdict.get("evidence", ""))
    return {**verdict, **bare, "data_source": None}


def _value(row: TrainedRow, what: str) -> Hashable:
    """A reward, without rounding errors of its sum, or a data source; None if it is not known."""
    if what == "data_source":
        return row.data_source
    return None if row.score is None or not math.isfinite(row.score) else float(f"{row.score:.6g}")


def _chance(hits: int, draws: int, marked: int, total: int) -> float:
    """The probability of at least `hits` hits in draws without replacement from `total`, of which some are marked."""
    ways = sum(math.comb(marked, k) * math.comb(total - marked, draws - k) for k in range(hits, draws + 1))
    return ways / math.comb(total, draws)


def _is_outlier(reward: Any, others: Collection[Any], below_too: bool) -> bool:
    if len(others) < 2:
        return False
    low, high = min(others), max(others)
    return max((low - reward) * below_too, reward - high) > high - low


def _verdict(where: str, rows: Sequence[TrainedRow], share: float, ordinary: float, culprits: int) -> Verdict:
    """The verdict on culprits in these rows, as many as are given with those in no row."""
    prompts = len({row.uid for row in rows})
    shares = f"{counted(round(share * culprits), culprits)} in {prompts} prompt{'s' * (prompts > 1)}, "
    shares += f"{percent(ordinary)} of the responses"
    return {**as_verdict("misfire", where, _ADVICE, _CHECK, share, ordinary, shares), "data_source": None}
