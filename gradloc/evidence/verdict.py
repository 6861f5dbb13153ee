# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The verdict on a spike: its cause in one line, with the evidence for it, or that no cause is known."""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..version import __version__
from ..warned import WITHOUT_CAUSE, resume_note
from .auxiliary import auxiliary_verdict
from .in_words import summary, turn_boundary
from .schema import SCHEMA
from .shares import layer_shares
from .sources import APART, APART_NATS, OVERFLOW_RATIO, RULES, entropy_share, is_apart

logger = logging.getLogger(__name__)

# The limits of `find_cause`.
MOST_CULPRITS = 0.5
COMMON = 0.25
LIFT = 4.0
CLOSE = 0.1
# What the culprits of a micro-batch explain of its norm, at least: they are the cause of the spike only then.
EXPLAINED = 0.1
# How many times its odds in an ordinary token a layer's share of the squared norm has in a culprit, at least.
LAYER_ODDS = 20.0
# A cause is likely if it holds for so many culprits, and for this share of ordinary tokens at most.
LIKELY_TOKENS = 2
LIKELY_ORDINARY = 0.1
# Groups of up to 37 ordinary rewards, divided by their standard deviation, have advantages up to 6.
NATURAL_ADVANTAGE = 6.0
NATURAL_FACTOR = 8.0
# A weight that is so many times the median makes most of the gradient by itself: without it, under a quarter.
HEAVY = 5.0
# Where culprits are rare by selection, and what spikes of healthy runs are.
SELECTED = ("advantage", "weight", "unlikely", "punished")
NATURAL = ("advantage", "unlikely", "punished")
# The rules of a bug of single tokens or responses. Where one tells the culprits, and does not explain their norms, they
# are no natural spike.
OF_BUGS = ("nonfinite", "unsampled", "retokenized", "misaligned", "token", "sequence")
# The largest chance that as many ordinary tokens as there are culprits would have what a rule holds for.
CHANCE = 0.1
# The rules of a part of the loss, which may be the cause for all tokens.
PARTS = ("kl", "entropy")
# A culprit whose norm is over so many thresholds is not one because it is rare.
RARE_NORM = 30.0


# The rules that may be a cause.
CAUSES = {rule.name: rule for rule in RULES}

# The warnings that are about some tokens alone, or say no cause.
_OF_SOME = ("unsampled", *WITHOUT_CAUSE)
# The warnings that are about the rollout's log-probs.
_OF_ROLLOUT = ("misaligned", "retokenized", "stale_weights", "partly_stale", "other_log_probs")

# By diagnosis, why no cause is known where the search has named no token.
_WITHOUT_CULPRITS = {
    "overflow": "the scaled fp16 gradients overflowed, and the gradient scaler takes a smaller scale",
    "nonfinite": "NaN or Inf is in the log-probs or gradients of all tokens",
    "diffuse": "no token stands out",
}

# Where no cause is known.
CHECK_UNKNOWN = (
    "`gradloc replay BUNDLE --switches` shows whether the spike comes back without training's "
    "kernels, in which layers it is, and what changes it."
)
# Where nothing was searched.
CHECK_UNSEARCHED = "`gradloc replay BUNDLE --search` finds the tokens, with the weights that this step had."


def whole_event(
    fields: Mapping[str, Any],
    ordinary: Mapping[str, float | None],
    warnings: Sequence[Mapping[str, Any]],
    measured: Mapping[str, float] | None = None,
    unusual: str | None = None,
) -> dict[str, Any]:
    """An event of these fields, with its verdict and summary; the other arguments are those of `decide`."""
    event = {"schema": SCHEMA, "gradloc_version": __version__, **fields}
    event |= {"layer_clip": None, "drill": None, "replay": None}
    event["verdict"] = verdict(event, ordinary, warnings, measured, unusual)
    event["summary"] = summary(event)
    return event


def verdict(
    event: Mapping[str, Any],
    ordinary: Mapping[str, float | None],
    warnings: Sequence[Mapping[str, Any]] = (),
    measured: Mapping[str, float] | None = None,
    unusual: str | None = None,
) -> dict[str, Any] | None:
    """What `decide` gives; None if that fails: a verdict must not cost the event."""
    try:
        return decide(event, ordinary, warnings, measured, unusual)
    except Exception:
        logger.warning("no verdict on an event could be made", exc_info=True)
        return None


def decide(
    event: Mapping[str, Any],
    ordinary: Mapping[str, float | None],
    warnings: Sequence[Mapping[str, Any]] = (),
    measured: Mapping[str, float] | None = None,
    unusual: str | None = None,
) -> dict[str, Any]:
    """The verdict on a spike.

    Args:
        event (Mapping): The event's other fields.
        ordinary (Mapping): What `ordinary_shares` returned.
        warnings (Sequence[Mapping]): What `RunChecks.warnings` returned. The first one that is about most tokens is the
            cause, unless gradients come from no token: what is wrong with all tokens comes before what is wrong with a
            few.
        measured (Mapping, optional): By rule, the share of the tokens that the search measured under τ; None where it
            measured too few.
        unusual (str, optional): Why the run is not as it usually is, so that no spike of it is a natural one.

    Returns:
        dict: `cause`, the name of a rule or of a warning, "auxiliary", or None where no cause is known; `culprits` and
            `ordinary`, the shares for which it holds (None where unknown); `sentence`, with what to do; `check`, how
            to check it in the run's own data.
    """
    count = len(event["culprits"])
    explaining = explaining_culprits(event["culprits"])
    culprits = {
        rule.name: sum(_suffices(rule.name, culprit, event) for culprit in explaining) / count if count else 0.0
        for rule in RULES
    }
    culprits["layer"] = _share_of_unusual_layers(event)
    if event.get("diagnosis") == "unsearched":
        return _unsearched(event, ordinary, [each for each in warnings if each["name"] not in _OF_SOME])
    of_run = [each for each in warnings if _is_of_run(each, culprits)]
    auxiliary = auxiliary_verdict(event)
    if auxiliary is not None:
        return auxiliary
    compared = dict(ordinary)
    if event["diagnosis"] not in ("tokens", "nonfinite"):
        # The search picks large and rare tokens first, and these did not explain the spike.
        compared |= {name: None if measured is None else measured[name] for name in SELECTED}
    cause = find_cause(culprits, compared, event["ordinary_layer_norms"], count)
    broken = [each for each in of_run if each["name"] == "nonfinite"]
    if broken and (cause == "nonfinite" or event["diagnosis"] == "nonfinite"):
        return _of_warning(event, ordinary, broken[0])
    causes = [each for each in of_run if each["name"] != "nonfinite"]
    if cause in ("retokenized", "unsampled"):
        # Tokens that were not sampled look like another temperature or top-p.
        causes = [each for each in causes if each["name"] != "other_log_probs"]
    if causes and cause != "nonfinite":
        return _of_warning(event, ordinary, causes[0])
    why_unknown = _why_of_the_run(ordinary) or _why_unknown(event, ordinary, explaining)
    if cause in ("token", "sequence") and (why := _why_of_the_run(ordinary)):
        cause, why_unknown = None, why
    if cause in NATURAL and (why := _why_not_natural(event, ordinary, warnings, unusual)):
        if cause != "advantage" or not _has_outlying_advantage(event):
            cause, why_unknown = None, why
    if cause is None or cause in NATURAL:
        if of_weight := _weight_of_the_whole(event):
            return {"cause": "weight", "culprits": 1.0, "ordinary": ordinary.get("weight"), **of_weight}
        if layer := _layer_of_all(event):
            return {"cause": "layer", "culprits": None, "ordinary": None, **layer}
    note = resume_note(event.get("steps_since_resume"))
    of_all = next((name for name in PARTS if (ordinary.get(name) or 0.0) >= MOST_CULPRITS), None)
    if cause is None and of_all is not None:
        share, advice = ordinary[of_all], CAUSES[of_all].advice
        claim = f"{CAUSES[of_all].claim}: {percent(share or 0.0)} of all tokens"
        sentence = f"{claim}. {advice}{note}"
        return {
            "cause": of_all,
            "culprits": None,
            "ordinary": share,
            "sentence": sentence,
            "check": CAUSES[of_all].check,
        }
    if cause is None:
        sentence = f"No known cause: {why_unknown}.{note}"
        if warnings:
            sentence += f" But note: {warnings[0]['sentence']}"
        return {"cause": None, "culprits": None, "ordinary": None, "sentence": sentence, "check": CHECK_UNKNOWN}
    claim, advice = CAUSES[cause].claim, CAUSES[cause].advice
    if cause == "retokenized" and (boundary := turn_boundary(event["culprits"])):
        claim += f", {boundary}"
    if cause == "advantage" and not _has_outlying_advantage(event):
        claim = "A natural spike of tokens whose responses were rewarded unlike most of their group"
        advice = "Such spikes come without any fault, and do not exclude one. If they disturb training, clip "
        advice += "advantages or layers."
    if cause == "layer" and (name := _most_common_layer(event)):
        claim = f"The layer {name} makes most of the gradient"
    evidence = _evidence(culprits[cause], count, ordinary[cause])
    return {
        "cause": cause,
        "culprits": culprits[cause],
        "ordinary": ordinary[cause],
        "sentence": f"{claim} ({evidence}): {advice[0].lower()}{advice[1:]}{note}",
        "check": CAUSES[cause].check,
    }


def _is_of_run(warning: Mapping[str, Any], culprits: Mapping[str, float]) -> bool:
    """Whether a warning is about most tokens, or about the culprits: others are no cause of this spike.

    Of tokens that the policy did not produce, the rule tells.
    """
    name = warning["name"]
    if name in ("misaligned", "retokenized"):
        share = warning.get("share")
        return share is None or share >= MOST_CULPRITS or culprits[name] >= MOST_CULPRITS
    return name not in _OF_SOME


def _why_of_the_run(ordinary: Mapping[str, float | None]) -> str | None:
    """That rollout and training differ everywhere, so that ratios far from 1 are no matter of single tokens."""
    apart = ordinary.get(APART) or 0.0
    if apart < COMMON:
        return None
    return (
        f"rollout and training differ by over {APART_NATS:g} nat for {percent(apart)} of all tokens, which is a matter "
        "of the run: old weights, another temperature, prompt or precision"
    )


def _why_not_natural(
    event: Mapping[str, Any],
    ordinary: Mapping[str, float | None],
    warnings: Sequence[Mapping[str, Any]],
    unusual: str | None,
) -> str | None:
    """Why rare tokens, or unusual rewards, are not said to be all that there is to a spike; None where they may be."""
    if warnings:
        return "there is a warning about the run, so that this need not be a natural spike"
    if unusual is not None:
        return unusual
    if 1 < len(event["units"]) == event["micro_batches"]:
        return "every micro-batch is over its threshold, so that this is no spike of single tokens"
    if apart := _why_of_the_run(ordinary):
        return apart
    count = len(event["culprits"])
    if any(2 * sum(part in each["sources"] for each in event["culprits"]) >= count for part in PARTS):
        return "the KL loss or the entropy bonus makes most of the gradient of most culprits"
    for rule in OF_BUGS:
        share = sum(rule in each["sources"] for each in event["culprits"]) / count
        if share >= MOST_CULPRITS and _stands_out(share, ordinary.get(rule), count):
            return f"of most culprits the rule `{rule}` holds, which does not explain their norms"
    return None


def _why_unknown(
    event: Mapping[str, Any], ordinary: Mapping[str, float | None], explaining: Sequence[Mapping[str, Any]]
) -> str:
    if not event["culprits"]:
        return _WITHOUT_CULPRITS.get(event["diagnosis"], "the search ended without a result")
    if not explaining:
        return f"the culprits make under {EXPLAINED:.0%} of the norm of their micro-batches"
    if all(share is None for share in ordinary.values()):
        return "there are no ordinary tokens to compare the culprits with"
    return "no rule tells the culprits from other tokens"


def _evidence(share: float, count: int, of_ordinary: float | None) -> str:
    """How sure a cause is, and on what that rests: a few tokens, or a small difference, make it only possible."""
    is_likely = share * count >= LIKELY_TOKENS and of_ordinary is not None and of_ordinary <= LIKELY_ORDINARY
    word = "likely" if is_likely else "possible"
    others = "" if of_ordinary is None else f", and of {percent(of_ordinary)} of the other tokens"
    return f"{word}: true of {of_culprits(share, count)}{others}"


def _has_outlying_advantage(event: Mapping[str, Any]) -> bool:
    """Whether the culprits' advantages are larger than those that groups of ordinary rewards give."""
    median = event["median_advantage"] or math.inf
    largest = max((abs(each["advantage"]) for each in event["culprits"] if each["advantage"] is not None), default=0.0)
    return largest > max(NATURAL_ADVANTAGE, NATURAL_FACTOR * median)


def _weight_of_the_whole(event: Mapping[str, Any]) -> dict[str, str] | None:
    """That the weights of some culprits, and not their norms, make the whole gradient large; None if they do not.

    With the median weight, their part of the squared norm would be under a quarter of what it is.
    """
    whole, median = event["global_norm"], event["median_weight"]
    if not (median and math.isfinite(whole) and whole > 0):
        return None
    heavy = [each for each in event["culprits"] if each["weight"] > HEAVY * median and math.isfinite(each["grad_norm"])]
    parts = [each["weight"] * each["grad_norm"] / event["world_size"] for each in heavy]
    if math.hypot(*parts) < math.sqrt(0.5) * whole:
        return None
    times = max(each["weight"] for each in heavy) / median
    what = "one token weighs" if len(heavy) == 1 else f"{len(heavy)} tokens weigh up to"
    return {
        "sentence": f"In the whole gradient, {what} as much as {times:.0f} ordinary tokens: {CAUSES['weight'].advice}",
        "check": CAUSES["weight"].check,
    }


def _layer_of_all(event: Mapping[str, Any]) -> dict[str, str] | None:
    """A layer that carries most of the norm in every micro-batch over its threshold, and did not before."""
    usual = layer_shares(event["ordinary_layer_norms"] or {})
    shares = [layer_shares(unit["layer_norms"]) for unit in event["units"]]
    if not usual or not shares or not all(shares):
        return None
    names = {max(share, key=share.__getitem__) for share in shares}
    if len(names) != 1:
        return None
    name = names.pop()
    least = min(share[name] for share in shares)
    if not is_unusual(least, usual.get(name, 0.0)):
        return None
    return {
        "sentence": f"The layer {name} carries {percent(least)} of the squared norm or more in every micro-batch over "
        f"its threshold, and ordinarily {percent(usual.get(name, 0.0))}: look at this layer's weights and kernels.",
        "check": "`gradloc replay BUNDLE` says whether saved weights give the same norms: if not, "
        "the weights in memory were damaged, or a kernel is wrong. " + CAUSES["layer"].check,
    }


def _most_common_layer(event: Mapping[str, Any]) -> str | None:
    largest = [
        max(shares, key=shares.__getitem__)
        for each in event["culprits"]
        if (shares := layer_shares(each["layer_norms"]))
    ]
    return Counter(largest).most_common(1)[0][0] if largest else None


def is_unusual(share: float, usual: float) -> bool:
    """Whether a layer's share of the squared norm has `LAYER_ODDS` times its usual odds."""
    return share * (1 - usual) > LAYER_ODDS * usual * (1 - share)


def _unsearched(
    event: Mapping[str, Any], ordinary: Mapping[str, float | None], warnings: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The verdict on a recorded spike: a warning about the run, or none until it is searched."""
    if warnings:
        return _of_warning(event, ordinary, warnings[0])
    sentence = f"Not searched yet: no token was measured.{resume_note(event.get('steps_since_resume'))}"
    return {"cause": None, "culprits": None, "ordinary": None, "sentence": sentence, "check": CHECK_UNSEARCHED}


def _of_warning(
    event: Mapping[str, Any], ordinary: Mapping[str, float | None], warning: Mapping[str, Any]
) -> dict[str, Any]:
    """The verdict where something is wrong with the run; the shares, of a rollout, are those of tokens `is_apart`."""
    apart = [is_apart(culprit["rollout_log_prob"], culprit["old_log_prob"]) for culprit in event["culprits"]]
    known = [each for each in apart if each is not None]
    is_of_rollout = warning["name"] in _OF_ROLLOUT
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
    count: int,
) -> str | None:
    """The rule that tells culprits from ordinary tokens; None if there is none, because a weak guess misleads.

    A rule is a possible cause if

    - it holds for at least `MOST_CULPRITS` of them: one that holds for fewer does not explain the spike;
    - it holds for less than `COMMON` of ordinary tokens, and `LIFT` times as often for culprits, with a chance under
      `CHANCE` that as many ordinary tokens would have it: what ordinary tokens have as well makes no spike.

    Of the possible causes whose shares of culprits are within `CLOSE` of the largest, the first in the order of `RULES`
    is taken. A bug often makes the rules after its own hold, too: a token that was not sampled has a ratio far from 1,
    and is rare. But a rule that holds for clearly more of the culprits comes before a more specific one.

    `nonfinite` needs a single culprit and comes before all: one NaN makes the whole gradient NaN.

    `retokenized`, `kl` and `entropy` need no such comparison. The first compares the turns of a response, and a fault
    may be in all of them; the others are parts of the loss, without which the culprits are under the threshold.

    Culprits that make next to nothing of their micro-batches' norms (`EXPLAINED`) count for `layer` alone.

    `token` and `sequence` count only the culprits that would be under the threshold if both engines, and both policies,
    gave the token the same log-prob. `advantage` counts only the culprits that would be under it with the median
    advantage: one of three times the median does not make a norm of a hundred thresholds. Nor does being rare:
    `unlikely` counts only culprits of up to `RARE_NORM` thresholds.

    For `layer`, no share of ordinary tokens is known. It is a possible cause if the layer norms of a typical ordinary
    token are known, and counts only the culprits of which the layer's share has `LAYER_ODDS` times its ordinary odds:
    in a model of three layers, one has half of the squared norm of ordinary tokens as well.

    Args:
        culprits (Mapping): By rule, the share of culprits for which it holds, and counts; zeros without a culprit.
        ordinary (Mapping): The same for ordinary tokens; None where unknown.
        ordinary_layer_norms (Mapping, optional): The event's field.
        count (int): The number of culprits.
    """
    # Where all tokens are culprits, there are no ordinary ones to compare with.
    if culprits["nonfinite"] and (
        ordinary["nonfinite"] is None or _stands_out(culprits["nonfinite"], ordinary["nonfinite"], 0)
    ):
        return "nonfinite"
    possible = [
        rule.name
        for rule in RULES
        if culprits[rule.name] >= MOST_CULPRITS
        and (
            rule.name in ("retokenized", *PARTS)
            or (rule.name == "layer" and ordinary_layer_norms is not None)
            or (rule.name != "layer" and _stands_out(culprits[rule.name], ordinary[rule.name], count))
        )
    ]
    most = max((culprits[name] for name in possible), default=0.0)
    return next((name for name in possible if culprits[name] >= most - CLOSE), None)


def _stands_out(of_culprits: float, of_ordinary: float | None, count: int) -> bool:
    if of_ordinary is None or of_ordinary >= COMMON or of_culprits < LIFT * of_ordinary:
        return False
    hits = round(of_culprits * count)
    chance = sum(
        math.comb(count, k) * of_ordinary**k * (1 - of_ordinary) ** (count - k) for k in range(hits, count + 1)
    )
    return not count or chance <= CHANCE


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
    if rule in ("token", "sequence"):
        times = _times_by_ratio(culprit)
        return times > OVERFLOW_RATIO or not norm > threshold * times
    if rule == "kl":
        rest = culprit["coefficient"] - culprit["kl_coefficient"]
        return bool(norm * abs(rest) <= threshold * abs(culprit["coefficient"]))
    if rule == "entropy":
        return bool(norm * (1 - entropy_share(culprit)) <= threshold)
    # Norms are divided by the weight, which therefore is not why one is over the threshold.
    return rule != "weight" and (rule != "unlikely" or bool(norm <= RARE_NORM * threshold))


def _times_by_ratio(culprit: Mapping[str, Any]) -> float:
    """How many times larger a token's norm is than with the same log-prob in both engines, and before the update.

    The loss multiplies a coefficient by the ratio, and the gradient of a log-prob is about proportional to 1 − p.
    """
    advantage, weight = culprit["advantage"], culprit["weight"]
    rest = culprit["coefficient"] - (culprit["kl_coefficient"] or 0.0)
    times = abs(rest / (weight * advantage)) if weight and advantage else 1.0
    known = [culprit[name] for name in ("rollout_log_prob", "old_log_prob") if culprit[name] is not None]
    if not known or not all(math.isfinite(each) for each in (*known, culprit["log_prob"])):
        return math.inf
    sampled = max(-math.expm1(min(known[0], 0.0)), 1e-6)
    return times * max(-math.expm1(min(culprit["log_prob"], 0.0)), 1e-6) / sampled


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
            found += is_unusual(shares[layer], usual.get(layer, 0.0))
    return found / len(event["culprits"])


def of_culprits(share: float, count: int) -> str:
    """A share of an event's culprits, in words."""
    if count == 1:
        return "the one culprit"
    return f"all {count} culprits" if share == 1 else f"{round(share * count)} of {count} culprits"


def percent(share: float) -> str:
    """A share, rounded, but not to 0% or 100% where it is neither."""
    if 0 < share < 0.01:
        return "under 1%"
    return "over 99%" if 0.99 < share < 1 else f"{share:.0%}"
