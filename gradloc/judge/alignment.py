# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What the sums of `measure.alignment` say: which log-probs belong to other tokens, and in which column."""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..lines import RunWarning
from ..sums import (
    COMPARED,
    FITS,
    LARGEST_LOG_RATIO,
    LEAST_COUNT,
    LEAST_GAP,
    LOST_TIMES,
    MOSTLY,
    PAIR_SUMS,
    PAIRS,
    SHIFTS,
)
from .progress import as_warning
from .sentences import lowered

# The limits of the rules in docs/reference/verdict.md; those that the sums are made with are in gradloc/sums.py.
KEPT_NATS = 0.3  # weights differ where responses whose log-probs keep their relation are so far apart
POOLED_TOKENS = 32
POOLED_EVIDENCE = 6.0
CORRELATED_TOKENS = 128
CLEAR_RESPONSES = 3
CLEAR_SHARE = 0.05
MOSTLY_MISSING = 0.8  # of the responses, where too few log-probs are left to compare


class Off(NamedTuple):
    """What is wrong between two columns of log-probs.

    Args:
        kind (str): "moved", "lost" (from a token on), "other_row", "zero_tail" or "constant_tail".
        share (float): In which share of the responses.
        clear (bool): Whether this update shows it for certain.
        shift (int): k, where a[t] fits b[t + k]; else 0.
        start (float): Where it begins inside most of these responses, the mean index from which on; else 0.
        at_turn (bool): Whether most of these begin with a turn.
        of_b (bool): Whether a tail is in b, in most of these.
    """

    kind: str
    share: float
    clear: bool
    shift: int = 0
    start: float = 0.0
    at_turn: bool = False
    of_b: bool = False


def find_off(sums: Sequence[float]) -> dict[str, Off | None]:
    """By pair ("rollout" with the policy, "reference" and "old" with the current one) what is wrong; None if nothing.

    A pair that cannot be judged is missing.

    Args:
        sums (Sequence[float]): What `own_alignment` returned, added up over ranks and mini-batches.
    """
    return {
        pair: _off(of_pair)
        for pair, of_pair in by_pair(sums).items()
        if of_pair["tokens"] >= POOLED_TOKENS or _is_missing(of_pair)
    }


def _is_missing(sums: Mapping[str, float]) -> bool:
    """Whether one column has hardly anything but one repeated value."""
    return sums["zero_tail"] + sums["constant_tail"] >= max(CLEAR_RESPONSES, MOSTLY_MISSING * sums["responses"])


def by_pair(sums: Sequence[float]) -> dict[str, dict[str, float]]:
    """The sums of `own_alignment` by pair and name."""
    size = len(PAIR_SUMS)
    parts = {pair: sums[i * size : (i + 1) * size] for i, pair in enumerate(PAIRS)}
    return {pair: dict(zip(PAIR_SUMS, part, strict=True)) for pair, part in parts.items()}


def correlation(sums: Mapping[str, float]) -> float | None:
    """Between the log-probs of a pair, by its sums; None where they are too few, or all alike."""
    count = sums["tokens"]
    if count < CORRELATED_TOKENS:
        return None
    first, second = _variance(sums, "first"), _variance(sums, "second")
    if min(first, second) < LEAST_GAP**2:
        return None
    return (sums["product"] - sums["first"] * sums["second"] / count) / count / math.sqrt(first * second)


def _variance(sums: Mapping[str, float], name: str) -> float:
    return sums[f"{name}_square"] / sums["tokens"] - (sums[name] / sums["tokens"]) ** 2


def _evidence(here: float, there: float, size: float, square: float) -> float:
    """The same of sums as `_evidence` in `measure.alignment` of tensors."""
    tiny = sys.float_info.min
    by_sum = (here - there) / max(math.sqrt(square), tiny)
    count = size**2 / max(square, tiny)
    ratio = min(math.log(max(here, tiny)) - math.log(max(there, tiny)), LARGEST_LOG_RATIO)
    return max(by_sum, math.sqrt(count / 2) * ratio if count >= LEAST_COUNT else 0.0)


def _off(sums: Mapping[str, float]) -> Off | None:
    moved = {k: sums[f"whole {k}"] + sums[f"inside {k}"] for k in SHIFTS}
    inside = sum(sums[f"inside {k}"] for k in SHIFTS)
    counts = {
        "moved": sum(moved.values()),
        **{name: sums[name] for name in ("lost", "other_row", "zero_tail", "constant_tail")},
    }
    # Where most other responses are about as far apart, some look so by chance.
    is_chance = sums["kept_distance"] * sums["lost_tokens"] * LOST_TIMES > sums["lost_distance"] * sums["kept_tokens"]
    is_chance |= sums["kept_distance"] > KEPT_NATS * sums["kept_tokens"]
    if is_chance and 2 * sums["lost"] < sums["responses"]:
        counts["lost"] = 0.0
    kind = max(counts, key=counts.__getitem__)
    count = counts[kind]
    # Some responses are too short, or their tokens too sure, to tell.
    known = max(count + sums["aligned"] if kind in ("moved", "lost") else sums["responses"], 1.0)
    # Of how many responses it begins inside.
    begins = {"moved": inside, "lost": count}.get(kind, 0.0)
    is_inside = 2 * begins > count
    found = Off(
        kind,
        count / known,
        count >= max(CLEAR_RESPONSES, CLEAR_SHARE * known),
        shift=max(moved, key=moved.__getitem__) if kind == "moved" else 0,
        start=sums[f"{kind}_start"] / begins if is_inside else 0.0,
        at_turn=is_inside and 2 * sums[f"{kind}_at_turn"] > begins,
        of_b=kind in _TAILS and 2 * sums["tail_of_b"] > sums["zero_tail"] + sums["constant_tail"],
    )
    if found.clear:
        return found
    # Responses too short, or engines too far apart, to tell one by one.
    spread = math.sqrt(max(min(_variance(sums, "first"), _variance(sums, "second")), 0.0))
    for k in SHIFTS:
        *parts, nearer, farther = (sums[f"{name} {k}"] for name in COMPARED)
        evidence = _evidence(*parts)
        is_nearer = parts[1] <= (1 + FITS) / 2 * parts[0] and parts[0] > LEAST_GAP * sums["tokens"]
        is_nearer = is_nearer and parts[1] <= sums["tokens"] * spread
        if is_nearer and nearer >= MOSTLY * farther and evidence >= POOLED_EVIDENCE:
            return Off("moved", 1.0, True, shift=k)
    return found if count else None


_COLUMNS = {
    "rollout": ("The rollout's log-probs", "r"),
    "policy": ("Training's log-probs", "p"),
    "reference": ("The reference's log-probs", "ref"),
    "old": ("The old log-probs", "old"),
    "now": ("The log-probs of the update", "p"),
}
_OF_PAIR = {"rollout": ("rollout", "policy"), "reference": ("reference", "now"), "old": ("old", "now")}
_TAILS = ("zero_tail", "constant_tail")
# What is misaligned in few responses is said if it lasts; other kinds may be chance.
_LASTING = ("moved", *_TAILS)
_WHICH = "; a reference tells which of the two (use_kl_loss=True with kl_loss_coef=0)"


def misaligned_warning(off: Mapping[str, Off | None], lasting: bool = False) -> RunWarning | None:
    """The warning of what is clear, or None: `name` ("misaligned", or "retokenized"), `sentence`, `check` and `share`.

    Where the log-probs alone are of others, and it is known whose, `column` is "rollout", "reference" and so on.

    Args:
        off (Mapping): What `find_off` returned.
        lasting (bool): Whether updates before had something of the kind, too: then few responses are enough.
    """
    wrong = {pair: each for pair, each in off.items() if each and (each.clear or (lasting and each.kind in _LASTING))}
    if not wrong:
        return None
    column, other, pair = _wrong_column(wrong, off)
    each = wrong[pair]
    if each.kind in _TAILS:
        column, other = _OF_PAIR[pair][:: -1 if each.of_b else 1]
    # r[t] fits p[t + k]: if it is p that was moved, p[t] fits r[t − k].
    shift = each.shift if column == pair else -each.shift
    subject, letter = _COLUMNS[column]
    unsure = column == "rollout" and "reference" not in off and each.kind in ("moved", "lost", "other_row")
    share = "under 1%" if each.share < 0.01 else f"{each.share:.0%}"
    where = f"in {share} of the responses" if each.share < 0.995 else "in all responses"
    others, evidence = lowered(_COLUMNS[other][0]), ""
    if each.kind == "moved":
        by = "one position" if abs(shift) == 1 else f"{abs(shift)} positions"
        way, back = ("late", "early") if shift < 0 else ("early", "late")
        fits = f"{letter}[t] fits {_COLUMNS[other][1]}[t{shift:+d}]"
        what = f"are {by} {way}"
        if unsure:
            what += f", or training's are {by} {back},"
        if each.start:
            where += f", from inside them on (on average from token {each.start:.0f})"
        claim, evidence = f"{subject} {what} {where}", fits
        advice = "look for where they are sliced, padded or gathered, and whether a list begins one token later"
        if each.start:
            advice = (
                "look for tokens that only one of the two lists has from there on: decoded and encoded again, or "
                "special tokens left out"
            )
    elif each.kind == "lost":
        claim = (
            f"{subject} {where} agree with {others} at first, and have no relation to them from inside the responses on"
        )
        evidence = f"on average from token {each.start:.0f}"
        advice = "look for tokens that were decoded and encoded again, or that only one of the two lists has"
    elif each.kind == "other_row":
        claim = f"{subject} {where} are those of other responses of the batch"
        advice = "look for what reorders, pads or repeats rows in one of the columns alone"
    else:
        value = "exact zeros" if each.kind == "zero_tail" else "one repeated value"
        claim = f"{subject} end in {value} {where}, where {others} are not"
        advice = "log-probs are missing there and were padded: take the engine's own, or set response_mask to 0"
    turn = ", beginning with a turn" if each.at_turn else ""
    found = as_warning(
        "retokenized" if each.at_turn else "misaligned",
        claim,
        f"{turn}: {advice}{_WHICH if unsure else ''}.",
        "Print `responses`, `rollout_log_probs`, `old_log_probs` and `ref_log_prob` of one row of the batch side "
        "by side, and the engine's own list of tokens and log-probs: the same token should have about the same "
        "log-prob everywhere.",
        evidence,
        share=each.share,
    )
    return found if unsure or each.kind == "lost" else {**found, "column": column}


def alignment_warning(sums: Sequence[float]) -> RunWarning | None:
    """The warning of what the sums of some micro-batches alone show, if it is clear."""
    return misaligned_warning(find_off(sums))


def _wrong_column(wrong: Mapping[str, Off], off: Mapping[str, Off | None]) -> tuple[str, str, str]:
    """Which column is off, what it was compared with, and the pair that shows it: the one that fits no other."""
    if "old" in wrong and "rollout" in off and "rollout" not in wrong:
        return "now", "old", "old"
    if "old" in wrong:
        return "old", "now", "old"
    if "rollout" in wrong and "reference" in wrong:
        return "policy", "rollout", "rollout"
    if "rollout" in wrong:
        return "rollout", "policy", "rollout"
    return "reference", "now", "reference"
