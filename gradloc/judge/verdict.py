# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What is judged of a line. Of a spike, the identity that is broken, or, where all hold, what its tokens share."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..facts import Place, TrainedRow
from ..guarded import guarded
from ..levels import EXPLAINS, LEVEL, SHARE
from ..lines import Answer, Culprit, Event, Fact, RunWarning, Verdict, kind_of
from ..sources import APART, APART_NATS, HOLDS, TOKEN_RATIO, is_apart, is_broken, layer_shares
from . import critic
from .rules import FAULTS, RATIOS, SOURCES
from .said import counted, percent, said, said_again
from .sentences import auxiliary_in_words, clips_in_words, describe, lowered

CHECK_NATURAL = "`gradloc replay BUNDLE --remedies` measures what each remedy leaves of the spike."
CHECK_UNKNOWN = "`gradloc replay BUNDLE --switches` shows whether it comes back, in which layers, and what changes it."
CHECK_UNSEARCHED = "`gradloc replay BUNDLE --search` finds the tokens, with the weights that this step had."
# The rule of numbers that are not finite.
_BROKEN = "nonfinite"
# verl's names of columns; each may make those after it not finite.
_COLUMNS = {
    "advantage": "advantages",
    "old_log_prob": "old_log_probs",
    "ref_log_prob": "ref_log_prob",
    "rollout_log_prob": "rollout_log_probs",
}
# The columns of log-probs that a loss need not read, and how near a coefficient is to what it is without them.
_UNREAD, _ALONE = ("rollout", "reference"), 0.01


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
    if (kind := kind_of(line)) == "spike":
        found |= {} if answer is None else {name: answer[name] for name in ("identities", "warnings")}
        found["verdict"] = None if found.get("drill") else verdict(found, rows)
        return {**found, "summary": describe(found)}
    found |= {"summary": "", **({"cause": None} if kind == "critic" else {})}
    with guarded("a line of the evidence could not be judged"):
        if kind == "clip":
            found["summary"] = clips_in_words(found["token_clip"])
        else:
            found |= {"cause": critic.cause(found), "summary": critic.summary(found)}
    return found


def verdict(event: Event, rows: Mapping[Place, TrainedRow] | None = None) -> Verdict | None:
    """What is known of a spike, from the event's other fields and the rows of its mini-batch.

    None if that fails: a verdict must not cost the event.
    """
    with guarded("no verdict on an event could be made"):
        if event.get("diagnosis") == "unsearched" and not event.get("warnings"):
            return _verdict(None, "Not searched yet", ": no token was measured.", CHECK_UNSEARCHED, event)
        found = _no_token(event) or _of_run(event) or _of_tokens(event) or _all_broken(event)
        return found or _natural(event, rows or {})
    return None


def _verdict(cause: str | None, claim: str, rest: str, check: str, event: Event, evidence: str = "") -> Verdict:
    return {"cause": cause, "facts": facts(event), **said(claim, rest, check, evidence)}


def _no_token(event: Event) -> Verdict | None:
    """A gradient that comes from no token: most of the squared norm."""
    what = auxiliary_in_words(event, math.sqrt(EXPLAINS))
    if not what:
        return None
    rest = ": look at the coefficient and the scale of the auxiliary loss (load balancing, z-loss, MTP or draft heads)."
    check = "Repeat the step with the auxiliary loss's coefficient at 0: `actor/grad_norm` should fall."
    return _verdict("auxiliary", what[0].upper() + what[1:], rest, check, event)


def _of_run(event: Event) -> Verdict | None:
    """The first identity that is broken, unless the loss does not read what is wrong."""
    warnings = [each for each in event.get("warnings", []) if not _is_unread(event, each)]
    if not warnings:
        return None
    first, others = warnings[0], len(warnings) - 1
    found: Any = said_again(first)
    since = "" if first.get("since") is None else f" since step {first['since']}"
    for name in ("claim", "sentence"):
        found[name] = f"The data path is broken{since}: {lowered(found[name])}"
    if others:
        found["sentence"] += f" {others} more of its identities {'is' if others == 1 else 'are'} broken."
    result: Verdict = found | {"cause": first["name"], "facts": facts(event)}
    return result


def _is_unread(event: Event, warning: RunWarning) -> bool:
    """Whether it is about log-probs that made no culprit's coefficient: weights, advantages and ratios give it."""
    if warning.get("column") not in _UNREAD or not event["culprits"]:
        return False
    for each in event["culprits"]:
        bypassed = each["old_log_prob"] == each["rollout_log_prob"]
        ratio = 1.0 if bypassed or each["ratio"] is None else each["ratio"]
        expected = -each["weight"] * (each["advantage"] or 0.0) * ratio
        if not abs(each["coefficient"] - expected) <= _ALONE * abs(expected):
            return False
    return True


def _of_tokens(event: Event) -> Verdict | None:
    """An equality that the culprits break, and ordinary tokens keep."""
    culprits, ordinary = event["culprits"], event["comparison"]["ordinary"]
    for name, rule in SOURCES.items():
        if not rule.claim:
            continue
        count, usual = sum(_shows(event, each, name) for each in culprits), ordinary.get(name)
        enough = count if name == _BROKEN else 0 < EXPLAINS * len(culprits) <= count
        if enough and (usual is None or usual < count / len(culprits) / LEVEL):
            claim = (name == _BROKEN and _broken_column(culprits)) or rule.claim
            others = "" if usual is None else f", and of {percent(usual)} of the other tokens"
            evidence = f"true of {counted(count, len(culprits))}{others}"
            return _verdict(name, claim, f": {lowered(rule.advice)}", rule.check, event, evidence)
    return None


def _shows(event: Event, culprit: Culprit, rule: str) -> bool:
    """Whether a rule holds for a culprit, and neither late weights, other engines nor the update's steps make it."""
    if rule not in culprit["sources"]:
        return False
    of_rollout = event.get("identities", {}).get("rollout_log_probs")
    is_late = of_rollout is not None and of_rollout.get("late", False)
    engines_agree = not is_late and (event["comparison"]["ordinary"].get(APART) or 0.0) < LEVEL * SHARE
    if rule == "misaligned":  # by nats, or by position
        return engines_agree or bool(culprit.get("misplaced"))
    if rule not in RATIOS:
        return True
    rollout, old = culprit["rollout_log_prob"], culprit["old_log_prob"]
    if rollout is not None and old == rollout and not event["epoch"] + event["mini_batch"]:  # verl's bypass mode
        old = culprit["log_prob"]
    # A token's gap alone has to make its ratio far from 1.
    nats = math.log(TOKEN_RATIO) if rule == "token" else APART_NATS
    return engines_agree and bool(is_apart(rollout, old, nats))


def _broken_column(culprits: Sequence[Culprit]) -> str | None:
    """Says which column is the first with a number that is not finite."""
    tokens: list[Any] = [each for each in culprits if _BROKEN in each["sources"]]
    for name, column in _COLUMNS.items():
        if any(is_broken(each.get(name) or 0.0) for each in tokens):
            return f"`{column}` of single tokens is NaN or infinite"
    return None


def _all_broken(event: Event) -> Verdict | None:
    """A gradient that is NaN or infinite for all tokens."""
    if event["diagnosis"] != "nonfinite" or event["culprits"]:
        return None
    if any(unit["broken_tokens"] for unit in event["units"]):
        return _verdict(_BROKEN, "NaN or Inf is in the log-probs or gradients of all tokens", ".", CHECK_UNKNOWN, event)
    broken = event.get("broken_parameters")
    where = f", first at {broken['names'][0]}" if broken and broken["names"] else ""
    rest = f": the backward makes it{where}. Look for a division or root at 0, torch.where over one, and kernels."
    claim = "The gradient is NaN or infinite, and no log-prob and no advantage is"
    return _verdict(_BROKEN, claim, rest, CHECK_UNKNOWN, event)


def _natural(event: Event, rows: Mapping[Place, TrainedRow]) -> Verdict:
    """All that could be checked holds: what the culprits have in common is no cause."""
    states = Counter(each["state"] for each in event.get("identities", {}).values())
    kind = "What the culprits have in common"
    if unread := event.get("warnings"):
        claim = f"The loss does not read what is broken ({lowered(unread[0].get('claim', unread[0]['name']))})"
    elif states["held"]:
        others = f", and {states['unchecked']} could not be" if states["unchecked"] else ""
        claim, kind = f"All {states['held']} identities that could be checked hold{others}", "A natural spike"
    else:
        claim = "No identity could be checked"
    if not event["culprits"]:
        return _verdict(None, claim, ". No token stands out.", CHECK_UNKNOWN, event)
    common = [_in_words(fact, len(event["culprits"])) for fact in facts(event)]
    common += filter(None, [_rewarded(event, rows)])
    what = "; ".join(common) or "nothing that stands out"
    return _verdict(None, claim, f". {kind}: {what}.", CHECK_NATURAL, event)


def facts(event: Event) -> list[Fact]:
    """What most culprits have in common, and ordinary tokens far less often."""
    culprits, found = event["culprits"], []
    for name in HOLDS:
        share = sum(name in each["sources"] for each in culprits) / max(len(culprits), 1)
        usual = event["comparison"]["ordinary"].get(name)
        # Ordinary tokens' norms may be mostly in one layer, too.
        layers = layer_shares(event["ordinary_layer_norms"] or {}) if name == "layer" else {}
        is_usual = max(layers.values(), default=0.0) > EXPLAINS or (usual is not None and share < LEVEL * usual)
        if name not in FAULTS and share >= EXPLAINS and not is_usual:
            found.append(Fact(source=name, culprits=share, ordinary=usual))
    return found


def _in_words(fact: Fact, culprits: int) -> str:
    count = round(fact["culprits"] * culprits)
    others = "" if fact["ordinary"] is None else f" (of the other tokens {percent(fact['ordinary'])})"
    return f"{counted(count, culprits)} {SOURCES[fact['source']].of(count)}{others}"


def _rewarded(event: Event, rows: Mapping[Place, TrainedRow]) -> str:
    """A reward that the culprits' responses have, and few others."""
    places = {(each["rank"], each["row"]) for each in event["culprits"]}
    rewards = Counter(rows[place].score for place in places if place in rows)
    known = [row.score for row in rows.values() if row.score is not None and row.largest]
    reward, count = rewards.most_common(1)[0] if rewards else (None, 0)
    if reward is None or count < EXPLAINS * len(places) or known.count(reward) * LEVEL > len(known):
        return ""
    return (
        f"{counted(count, len(places), 'responses')} with culprits {'has' if count == 1 else 'have'} the reward "
        f"{reward:g}, "
        f"as {percent(known.count(reward) / len(known))} of all with an advantage"
    )
