# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The verdict on a spike: its cause in one line, with the evidence for it, or that no cause is known."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..run_checks import resume_note
from ..version import __version__
from .auxiliary import auxiliary_verdict
from .in_words import summary, turn_boundary
from .ordinary import APART, is_apart
from .scaling import LOSS_SCALE
from .schema import SCHEMA
from .shares import layer_shares
from .sources import RULES

logger = logging.getLogger(__name__)

# The limits of `find_cause`.
MOST_CULPRITS = 0.5
COMMON = 0.25
LIFT = 4.0
CLOSE = 0.1
# What the culprits of a micro-batch explain of its norm, at least: they are the cause of the spike only then.
EXPLAINED = 0.1
# How many times its odds in an ordinary token a layer's share of the squared norm has in a culprit, at least.
LAYER_ODDS = 50.0
# A culprit whose norm is over so many thresholds is not one because it is rare.
RARE_NORM = 30.0


# The rules that may be a cause.
CAUSES = {rule.name: rule for rule in RULES}

# By diagnosis, why no cause is known where the search has named no token.
_WITHOUT_CULPRITS = {
    "overflow": "the scaled fp16 gradients overflowed, and the gradient scaler takes a smaller scale",
    "nonfinite": "NaN or Inf is in the log-probs or gradients of all tokens",
    "diffuse": "no token stands out",
}

# Where no cause is known.
CHECK_UNKNOWN = (
    "`python -m verl.utils.gradloc.replay BUNDLE --switches` shows whether the spike comes back without training's "
    "kernels, in which layers it is, and what changes it."
)
# Where nothing was searched.
CHECK_UNSEARCHED = (
    "`python -m verl.utils.gradloc.replay BUNDLE --search` finds the tokens, with the weights that this step had."
)


def whole_event(
    fields: Mapping[str, Any], ordinary: Mapping[str, float | None], warnings: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """An event of these fields, with its verdict and summary; the other arguments are those of `decide`."""
    event = {"schema": SCHEMA, "gradloc_version": __version__, **fields}
    event |= {"layer_clip": None, "drill": None, "replay": None}
    event["verdict"] = verdict(event, ordinary, warnings)
    event["summary"] = summary(event)
    return event


def verdict(
    event: Mapping[str, Any], ordinary: Mapping[str, float | None], warnings: Sequence[Mapping[str, str]] = ()
) -> dict[str, Any] | None:
    """What `decide` gives; None if that fails: a verdict must not cost the event."""
    try:
        return decide(event, ordinary, warnings)
    except Exception:
        logger.warning("no verdict on an event could be made", exc_info=True)
        return None


def decide(
    event: Mapping[str, Any], ordinary: Mapping[str, float | None], warnings: Sequence[Mapping[str, str]] = ()
) -> dict[str, Any]:
    """The verdict on a spike.

    Args:
        event (Mapping): The event's other fields.
        ordinary (Mapping): What `ordinary_shares` returned.
        warnings (Sequence[Mapping]): What `RunChecks.warnings` returned. The first one that is about all tokens is the
            cause, unless gradients are not finite or come from no token: what is wrong with all tokens comes before
            what is wrong with a few.

    Returns:
        dict: `cause`, the name of a rule or of a warning, "auxiliary", or None where no cause is known; `culprits` and
            `ordinary`, the shares for which it holds (None where unknown); `sentence`, with what to do; `check`, how
            to check it in the run's own data.
    """
    if event.get("diagnosis") == "unsearched":
        return _unsearched(event, ordinary, [each for each in warnings if each["name"] not in CAUSES])
    auxiliary = auxiliary_verdict(event)
    if auxiliary is not None:
        return auxiliary
    count = len(event["culprits"])
    explaining = explaining_culprits(event["culprits"])
    culprits = {
        rule.name: sum(_suffices(rule.name, culprit, event) for culprit in explaining) / count if count else 0.0
        for rule in RULES
    }
    culprits["layer"] = _share_of_unusual_layers(event)
    cause = find_cause(culprits, ordinary, event["ordinary_layer_norms"])
    # A warning that a rule has as well is about some tokens: whether these are the culprits, the rule says.
    of_all_tokens = [warning for warning in warnings if warning["name"] not in CAUSES]
    if of_all_tokens and cause != "nonfinite":
        return _of_warning(event, ordinary, of_all_tokens[0])
    note = resume_note(event.get("steps_since_resume"))
    if cause is None:
        why = _WITHOUT_CULPRITS.get(event["diagnosis"], "the search ended without a result")
        if count:
            why = "no rule holds for most of the culprits and for few ordinary tokens"
            if all(share is None for share in ordinary.values()):
                why = "there are no ordinary tokens to compare the culprits with"
        if count and not explaining:
            why = f"the culprits make under {EXPLAINED:.0%} of the norm of their micro-batches"
        sentence, check = f"No known cause: {why}.{note}", CHECK_UNKNOWN
        return {"cause": None, "culprits": None, "ordinary": None, "sentence": sentence, "check": check}
    advice, claim = CAUSES[cause].advice, CAUSES[cause].claim
    if cause == "retokenized" and (boundary := turn_boundary(event["culprits"])):
        claim += f", {boundary}"
    shares = f"{of_culprits(culprits[cause], count)}, {_of_ordinary(ordinary[cause])}"
    return {
        "cause": cause,
        "culprits": culprits[cause],
        "ordinary": ordinary[cause],
        "sentence": f"{claim} ({shares}): {advice[0].lower()}{advice[1:]}{note}",
        "check": CAUSES[cause].check,
    }


def _unsearched(
    event: Mapping[str, Any], ordinary: Mapping[str, float | None], warnings: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """The verdict on a recorded spike: a warning about the run, or none until it is searched."""
    if warnings:
        return _of_warning(event, ordinary, warnings[0])
    sentence = f"Not searched yet: no token was measured.{resume_note(event.get('steps_since_resume'))}"
    return {"cause": None, "culprits": None, "ordinary": None, "sentence": sentence, "check": CHECK_UNSEARCHED}


def _of_warning(
    event: Mapping[str, Any], ordinary: Mapping[str, float | None], warning: Mapping[str, str]
) -> dict[str, Any]:
    """The verdict where something is wrong with the run; the shares, of a rollout, are those of tokens `is_apart`."""
    apart = [is_apart(culprit["rollout_log_prob"], culprit["old_log_prob"]) for culprit in event["culprits"]]
    known = [each for each in apart if each is not None]
    is_of_rollout = warning["name"] != LOSS_SCALE
    return {
        "cause": warning["name"],
        "culprits": sum(known) / len(known) if known and is_of_rollout else None,
        "ordinary": ordinary.get(APART) if is_of_rollout else None,
        "sentence": warning["sentence"],
        "check": warning["check"],
    }


def find_cause(
    culprits: Mapping[str, float],
    ordinary: Mapping[str, float | None],
    ordinary_layer_norms: Mapping[str, float] | None,
) -> str | None:
    """The rule that tells culprits from ordinary tokens; None if there is none, because a weak guess misleads.

    A rule is a possible cause if

    - it holds for at least `MOST_CULPRITS` of them: one that holds for fewer does not explain the spike;
    - it holds for less than `COMMON` of ordinary tokens, and `LIFT` times as often for culprits: what ordinary tokens
      have as well makes no spike.

    Of the possible causes whose shares of culprits are within `CLOSE` of the largest, the first in the order of `RULES`
    is taken. A bug often makes the rules after its own hold, too: a token that was not sampled has a ratio far from 1,
    and is rare. But a rule that holds for clearly more of the culprits comes before a more specific one.

    `nonfinite` needs a single culprit and comes before all: one NaN makes the whole gradient NaN.

    `retokenized` needs no such comparison: it compares the turns of a response, and a fault may be in all of them.

    Culprits that make next to nothing of their micro-batches' norms (`EXPLAINED`) count for `layer` alone.

    `advantage` counts only the culprits that would be under the threshold with the median advantage: an advantage of
    three times the median does not make a norm of a hundred thresholds. Nor does being rare: `unlikely` counts only
    culprits of up to `RARE_NORM` thresholds.

    For `layer`, no share of ordinary tokens is known. It is a possible cause if the layer norms of a typical ordinary
    token are known, and counts only the culprits of which the layer's share has `LAYER_ODDS` times its ordinary odds:
    in a model of three layers, one has half of the squared norm of ordinary tokens as well.

    Args:
        culprits (Mapping): By rule, the share of culprits for which it holds, and counts; zeros without a culprit.
        ordinary (Mapping): The same for ordinary tokens; None where unknown.
        ordinary_layer_norms (Mapping, optional): The event's field.
    """
    # Where all tokens are culprits, there are no ordinary ones to compare with.
    if culprits["nonfinite"] and (
        ordinary["nonfinite"] is None or _stands_out(culprits["nonfinite"], ordinary["nonfinite"])
    ):
        return "nonfinite"
    possible = [
        rule.name
        for rule in RULES
        if culprits[rule.name] >= MOST_CULPRITS
        and (
            rule.name == "retokenized"
            or (rule.name == "layer" and ordinary_layer_norms is not None)
            or (rule.name != "layer" and _stands_out(culprits[rule.name], ordinary[rule.name]))
        )
    ]
    most = max((culprits[name] for name in possible), default=0.0)
    return next((name for name in possible if culprits[name] >= most - CLOSE), None)


def _stands_out(of_culprits: float, of_ordinary: float | None) -> bool:
    return of_ordinary is not None and of_ordinary < COMMON and of_culprits >= LIFT * of_ordinary


def explaining_culprits(culprits: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The culprits of the micro-batches of whose norm they make at least `EXPLAINED`, or an unknown share."""
    shares: dict[tuple[int, int], float] = {}
    for culprit in culprits:
        where = culprit["rank"], culprit["micro_batch"]
        share = culprit["share"]
        shares[where] = shares.get(where, 0.0) + (math.inf if share is None else share)
    return [culprit for culprit in culprits if not shares[culprit["rank"], culprit["micro_batch"]] < EXPLAINED]


def _suffices(rule: str, culprit: Mapping[str, Any], event: Mapping[str, Any]) -> bool:
    """Whether a rule holds for a culprit and can be why its norm is over the threshold."""
    if rule not in culprit["sources"]:
        return False
    norm, threshold = culprit["grad_norm"], culprit["threshold"]
    if rule == "advantage":
        return bool(norm * event["median_advantage"] <= threshold * abs(culprit["advantage"]))
    return rule != "unlikely" or bool(norm <= RARE_NORM * threshold)


def _share_of_unusual_layers(event: Mapping[str, Any]) -> float:
    """The share of culprits for which `layer` holds, by a layer that has far less of an ordinary token's norm."""
    usual = layer_shares(event["ordinary_layer_norms"] or {})
    if not usual or not event["culprits"]:
        return 0.0
    found = 0
    for culprit in event["culprits"]:
        if "layer" in culprit["sources"]:
            # There are none if a norm is not finite.
            shares = layer_shares(culprit["layer_norms"]) or {"": 0.0}
            layer = max(shares, key=shares.__getitem__)
            here, before = shares[layer], usual.get(layer, 0.0)
            found += here * (1 - before) > LAYER_ODDS * before * (1 - here)
    return found / len(event["culprits"])


def of_culprits(share: float, count: int) -> str:
    """A share of an event's culprits, in words."""
    if count == 1:
        return "the only culprit"
    return f"all {count} culprits" if share == 1 else f"{percent(share)} of {count} culprits"


def _of_ordinary(share: float | None) -> str:
    return "unknown for ordinary tokens" if share is None else f"{percent(share)} of ordinary tokens"


def percent(share: float) -> str:
    """A share, rounded, but not to 0% or 100% where it is neither."""
    if 0 < share < 0.01:
        return "under 1%"
    return "over 99%" if 0.99 < share < 1 else f"{share:.0%}"
