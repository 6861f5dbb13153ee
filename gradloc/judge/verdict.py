# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What is judged of a line. Of a spike, the identity that is broken, or, where all hold, what its tokens share."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..facts import Place, TrainedRow
from ..guarded import guarded
from ..levels import EXPLAINS, LEVEL, SHARE
from ..lines import Answer, Culprit, Event, Fact, RunWarning, Said, Verdict, kind_of
from ..sources import APART, APART_NATS, HOLDS, TOKEN_RATIO, is_apart, is_broken, layer_shares
from . import critic
from .rules import FAULTS, RATIOS, SOURCES
from .said import counted, percent, said, said_again
from .sentences import MOST, auxiliary_in_words, clips_in_words, describe, lowered

CHECK_NATURAL = "`gradloc replay BUNDLE --remedies` measures what each remedy leaves of the spike."
CHECK_UNKNOWN = "`gradloc replay BUNDLE --switches` shows whether it comes back, in which layers, and what changes it."
CHECK_UNSEARCHED = "`gradloc replay BUNDLE --search` finds the tokens, with the weights that this step had."
# The rule of numbers that are not finite, and what may break a token's: each may make those after it not finite.
_BROKEN = "nonfinite"
_COLUMNS = ("advantage", "old_log_prob", "ref_log_prob", "rollout_log_prob")
# The columns of log-probs that a loss need not read, and how near a coefficient is to what it is without them.
_UNREAD, _ALONE = ("rollout", "reference"), 0.01

# The name of a cause, or None, and what is said.
_Found = tuple[str | None, Said]


def judged(
    line: Mapping[str, Any], rows: Mapping[Place, TrainedRow] | None = None, answer: Answer | None = None
) -> dict[str, Any]:
    """A line of an update, with its verdict and its summary; a drill has no verdict, because its cause is the drill.

    It needs nothing but the line, so that an old one can be judged by newer rules.

    Args:
        rows (Mapping, optional): Those of an event's mini-batch.
        answer (dict, optional): What the judge has said of an event's update; default: what the event has of that.
    """
    found: Any = dict(line)  # a type is known from its kind alone
    kind = kind_of(line)
    with guarded("a line of the evidence could not be judged"):
        if kind == "critic":
            found |= critic.judged(found)
        elif kind == "clip":
            found["summary"] = clips_in_words(found["token_clip"])
        else:
            found |= {} if answer is None else {name: answer[name] for name in ("identities", "warnings")}
            found["verdict"] = None if found.get("drill") else verdict(found, rows)
            found["summary"] = describe(found)
    return found


def verdict(event: Event, rows: Mapping[Place, TrainedRow] | None = None) -> Verdict | None:
    """What is known of a spike, from the event's other fields and the rows of its mini-batch.

    None if that fails: a verdict must not cost the event.
    """
    with guarded("no verdict on an event could be made"):
        found = _no_token(event) or _of_run(event) or _of_tokens(event) or _of_diagnosis(event)
        cause, what = found or _natural(event, rows or {})
        return {"cause": cause, "facts": facts(event), **what}
    return None


def _no_token(event: Event) -> _Found | None:
    """A gradient that comes from no token: most of the squared norm."""
    evidence = auxiliary_in_words(event, MOST)
    rest = ": look at its coefficient and scale (load balancing, z-loss, MTP or draft heads)."
    check = "Repeat the step with the auxiliary loss's coefficient at 0: `actor/grad_norm` should fall."
    what = said("An auxiliary loss makes most of the gradient", rest, check, evidence)
    return ("auxiliary", what) if evidence else None


def _of_run(event: Event) -> _Found | None:
    """The first identity that is broken, unless the loss does not read what is wrong."""
    warnings = [each for each in event.get("warnings", []) if not _is_unread(event, each)]
    if not warnings:
        return None
    first, found = warnings[0], said_again(warnings[0])
    since = "" if first.get("since") is None else f" since step {first['since']}"
    start = f"The data path is broken{since}: "
    also = ", ".join(each["name"] for each in warnings[1:])
    said_once = lowered(found["sentence"].replace(f" the usual{since})", " the usual)", 1))
    sentence = start + said_once + (f" Also broken: {also}." if also else "")
    return first["name"], {**found, "claim": start + lowered(found["claim"]), "sentence": sentence}


def _is_unread(event: Event, warning: RunWarning) -> bool:
    """Whether it is about log-probs that made no culprit's coefficient: weights, advantages and ratios give it."""
    return warning.get("column") in _UNREAD and bool(event["culprits"]) and not any(map(_reads, event["culprits"]))


def _reads(culprit: Culprit) -> bool:
    """Whether more has made a coefficient than weight, advantage and ratio, such as the rollout's log-prob."""
    bypassed = culprit["old_log_prob"] == culprit["rollout_log_prob"]
    ratio = 1.0 if bypassed or culprit["ratio"] is None else culprit["ratio"]
    expected = -culprit["weight"] * (culprit["advantage"] or 0.0) * ratio
    return not abs(culprit["coefficient"] - expected) <= _ALONE * abs(expected)


def _of_tokens(event: Event) -> _Found | None:
    """An equality that the culprits break, and ordinary tokens keep."""
    for name, rule in SOURCES.items():
        tokens = [each for each in event["culprits"] if rule.check and _shows(event, each, name)]
        if (fact := _fact(event, name, len(tokens))) is not None:
            broken = [each for each in _COLUMNS if any(is_broken(token.get(each) or 0.0) for token in tokens)]
            claim = f"`{broken[0]}` of single tokens is NaN or infinite" if name == _BROKEN and broken else rule.claim
            return name, said(claim, f": {lowered(rule.advice)}", rule.check, _true_of(event, fact))
    return None


def _shows(event: Event, culprit: Culprit, rule: str) -> bool:
    """Whether a rule holds for a culprit, and neither late weights, other engines nor the update's steps make it.

    A ratio to the rollout that the loss does not read makes no gradient.
    """
    if rule not in culprit["sources"]:
        return False
    states: Mapping[str, Any] = event.get("identities", {})
    is_late = states.get("rollout_log_probs", {}).get("late", False)
    engines_agree = not is_late and (event["comparison"]["ordinary"].get(APART) or 0.0) < LEVEL * SHARE
    if rule == "misaligned":
        return engines_agree
    if rule not in RATIOS:
        return True
    rollout, old = culprit["rollout_log_prob"], culprit["old_log_prob"]
    if rollout is not None and old == rollout and not event["epoch"] + event["mini_batch"]:  # verl's bypass mode
        old = culprit["log_prob"]
    # A token's gap alone has to make its ratio far from 1.
    nats = math.log(TOKEN_RATIO) if rule == "token" else APART_NATS
    return engines_agree and _reads(culprit) and bool(is_apart(rollout, old, nats))


def _of_diagnosis(event: Event) -> _Found | None:
    """What is known without a culprit: that nothing was searched, or that the gradient is broken for all tokens."""
    if event["diagnosis"] == "unsearched":
        return None, said("Not searched yet", ": no token was measured.", CHECK_UNSEARCHED)
    if event["diagnosis"] != "nonfinite" or event["culprits"]:
        return None
    claim, rest = "NaN or Inf is in the log-probs or gradients of all tokens", "."
    if not any(unit["broken_tokens"] for unit in event["units"]):
        claim = "The gradient is NaN or infinite, and no log-prob and no advantage is"
        rest = ": the backward makes it. Look for a division or root at 0, torch.where over one, and kernels."
    return _BROKEN, said(claim, rest, CHECK_UNKNOWN)


def _natural(event: Event, rows: Mapping[Place, TrainedRow]) -> _Found:
    """All that could be checked holds: what the culprits have in common is no cause."""
    states = Counter(each["state"] for each in event.get("identities", {}).values())
    kind = "What the culprits have in common"
    if unread := event.get("warnings"):
        claim = f"The loss does not read what is broken ({lowered(said_again(unread[0])['claim'])})"
    elif states["held"]:
        others = f", and {states['unchecked']} could not be" if states["unchecked"] else ""
        claim, kind = f"All {states['held']} identities that could be checked hold{others}", "A natural spike"
    else:
        claim = "No identity could be checked"
    if not event["culprits"]:
        return None, said(claim, ". No token stands out.", CHECK_UNKNOWN)
    common = [f"{lowered(SOURCES[fact['source']].claim)} ({_true_of(event, fact)})" for fact in facts(event)]
    what = "; ".join(filter(None, [*common, _rewarded(event, rows)])) or "nothing that stands out"
    return None, said(claim, f". {kind}: {what}.", CHECK_NATURAL)


def facts(event: Event) -> list[Fact]:
    """What most culprits have in common, and ordinary tokens far less often."""
    # Ordinary tokens' norms may be mostly in one layer, too.
    largest = max(layer_shares(event["ordinary_layer_norms"] or {}).values(), default=0.0)
    names = [name for name in HOLDS if name not in FAULTS and (name != "layer" or largest <= EXPLAINS)]
    found = [_fact(event, name, sum(name in each["sources"] for each in event["culprits"])) for name in names]
    return [fact for fact in found if fact is not None]


def _fact(event: Event, source: str, culprits: int) -> Fact | None:
    """That so many culprits have a source; None unless they are most, and ordinary tokens have it far less often."""
    share, usual = culprits / max(len(event["culprits"]), 1), event["comparison"]["ordinary"].get(source)
    # One NaN makes the whole gradient NaN.
    enough = culprits > 0 if source == _BROKEN else share >= EXPLAINS
    if not enough or (usual is not None and share < LEVEL * usual):
        return None
    return {"source": source, "culprits": share, "ordinary": usual}


def _true_of(event: Event, fact: Fact) -> str:
    total = len(event["culprits"])
    others = "" if fact["ordinary"] is None else f", and of {percent(fact['ordinary'])} of the other tokens"
    return f"true of {counted(round(fact['culprits'] * total), total)}{others}"


def _rewarded(event: Event, rows: Mapping[Place, TrainedRow]) -> str:
    """A reward that the culprits' responses have, and few others."""
    places = {(each["rank"], each["row"]) for each in event["culprits"]}
    rewards = Counter(rows[place].score for place in places if place in rows)
    known: Counter[float | None] = Counter(row.score for row in rows.values() if row.score is not None and row.largest)
    reward, count = rewards.most_common(1)[0] if rewards else (None, 0)
    # A reward that many others have does not stand out; nor is anything known where none has an advantage.
    usual = known[reward] / known.total() if known else 1.0
    if reward is None or count < EXPLAINS * len(places) or usual * LEVEL > 1:
        return ""
    responses = f"{counted(count, len(places), 'responses')} with culprits"
    return f"the reward is {reward:g} (true of {responses}, and of {percent(usual)} of all with an advantage)"
