# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What is judged of a line. Of a spike, the identity that is broken, or, where all hold, what its tokens share."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..facts import Place, TrainedRow
from ..guarded import guarded
from ..levels import EXPLAINS, LEVEL, SHARE
from ..lines import Answer, CriticSpike, Culprit, Event, Fact, Said, Verdict, kind_of
from ..sources import APART, APART_NATS, HOLDS, LAYER_FRACTION, TOKEN_RATIO, is_apart, is_broken, layer_shares
from .rules import FAULTS, SOURCES
from .said import claim_of, counted, lowered, percent, said
from .sentences import clips_in_words, describe, token_in_words

CHECK_NATURAL = "`gradloc replay BUNDLE --remedies` measures what each remedy leaves of the spike."
CHECK_UNKNOWN = "`gradloc replay BUNDLE --switches` shows whether it comes back, in which layers, and what changes it."
CHECK_UNSEARCHED = "`gradloc replay BUNDLE --search` finds the tokens, with the weights that this step had."
# A gradient that comes from no token, as that of an auxiliary loss, is mentioned from this part of the norm on. Without
# one it is exactly 0. From MOST on, that of the squared norm, it is the cause.
MENTIONED, MOST = 0.1, math.sqrt(EXPLAINS)
# The rule of numbers that are not finite, and what may break a token's: each may make those after it not finite.
_BROKEN = "nonfinite"
_COLUMNS = ("advantage", "old_log_prob", "ref_log_prob", "rollout_log_prob")
# The rules of ratios, and by how many nats a token's log-probs of rollout and training alone have to be apart.
_RATIOS = {"token": math.log(TOKEN_RATIO), "sequence": APART_NATS}
# The columns of log-probs that a loss need not read, and how near a coefficient is to what it is without them.
_UNREAD, _ALONE = ("rollout", "reference"), 0.01
# Σ w (v − R) ∇v is the critic's gradient. Errors that are at least so many times the usual ones, and have grown by at
# least this share of what the norm has grown by, are its cause.
_LARGE_ERROR, _EXPLAINED = 2.0, 1 / 3

# What is said of a gradient that comes from no token, and of one that is not finite for all: claim, rest and check.
_AUXILIARY = (
    "An auxiliary loss makes most of the gradient",
    ": look at its coefficient and scale (load balancing, z-loss, MTP or draft heads).",
    "Repeat the step with the auxiliary loss's coefficient at 0: `actor/grad_norm` should fall.",
)
_ALL_TOKENS = "NaN or Inf is in the log-probs or gradients of all tokens", "."
_BACKWARD = (
    "The gradient is NaN or infinite, and no log-prob and no advantage is",
    ": the backward makes it. Look for a division or root at 0, torch.where over one, and kernels.",
)
# By the cause of a critic's spike, what is said.
_OF_ERRORS = {
    "errors": "The values' errors have grown: look at the returns.",
    "network": "The values' errors have hardly grown, so the model amplifies them.",
}


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
            found["cause"], found["summary"] = _of_critic(found)
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
        facts = [*_shared(event, _is_fact)]
        cause, what = next(_causes(event), (None, None))
        return {"cause": cause, "facts": facts, **(what or _natural(event, facts, rows or {}))}
    return None


def _causes(event: Event) -> Iterator[tuple[str, Said]]:
    """The name of each cause, and what is said of it; the verdict's is the first."""
    culprits = event["culprits"]
    if part := _no_token_in_words(event, MOST):
        yield "auxiliary", said(*_AUXILIARY, part)
    broken = [each for each in event.get("warnings", []) if each.get("column") not in _UNREAD or _may_read(culprits)]
    for each in broken[:1]:
        claim, sentence = (f"The data path is broken: {lowered(of)}" for of in (claim_of(each), each["sentence"]))
        sentence += f" Also broken: {', '.join(other['name'] for other in broken[1:])}." if broken[1:] else ""
        evidence = each.get("evidence", "")
        yield each["name"], {"claim": claim, "evidence": evidence, "sentence": sentence, "check": each["check"]}
    for fact in _shared(event, _is_cause):
        name = fact["source"]
        rule, tokens = SOURCES[name], [each for each in culprits if name in each["sources"]]
        columns = [column for column in _COLUMNS if any(is_broken(token.get(column) or 0.0) for token in tokens)]
        claim = f"`{columns[0]}` of single tokens is NaN or infinite" if name == _BROKEN and columns else rule.claim
        yield name, said(claim, f": {lowered(rule.advice)}", rule.check, _true_of(event, fact))
    if event["diagnosis"] == "nonfinite" and not culprits:
        in_tokens = any(unit["broken_tokens"] for unit in event["units"])
        yield _BROKEN, said(*(_ALL_TOKENS if in_tokens else _BACKWARD), CHECK_UNKNOWN)


def _no_token_in_words(event: Event, least: float) -> str:
    """Which part of a micro-batch's norm comes from no token, and in which layer; empty if it is under `least`."""
    found = event.get("without_tokens")
    if found is None or not found["share"] >= least:
        return ""
    shares = layer_shares(found["layer_norms"])
    layer = next((f", mostly in {layer}" for layer, share in shares.items() if share > LAYER_FRACTION), "")
    return f"{percent(found['share'])} of a micro-batch's norm comes from no token's log-prob{layer}"


def _without_rollout(culprit: Culprit) -> float:
    """What a coefficient is made of weight, advantage and ratio alone, without the rollout's log-prob."""
    bypassed = culprit["old_log_prob"] == culprit["rollout_log_prob"]
    ratio = 1.0 if bypassed or culprit["ratio"] is None else culprit["ratio"]
    return -culprit["weight"] * (culprit["advantage"] or 0.0) * ratio


def _may_read(culprits: Sequence[Culprit]) -> bool:
    """Whether the loss may read more of tokens, such as the rollout's log-prob; without a culprit, nothing tells."""
    made = [(culprit["coefficient"], _without_rollout(culprit)) for culprit in culprits]
    return not (made and all(abs(found - expected) <= _ALONE * abs(expected) for found, expected in made))


def _is_cause(event: Event, source: str, culprit: Culprit) -> bool:
    """Whether a culprit's source is an equality that neither late weights, other engines nor the update's steps break.

    A ratio to the rollout is a cause if the token would be under its threshold without it.
    """
    if source not in ("misaligned", *_RATIOS):
        return source in FAULTS
    states: Mapping[str, Any] = event.get("identities", {})
    is_late = states.get("rollout_log_probs", {}).get("late", False)
    if is_late or (event["comparison"]["ordinary"].get(APART) or 0.0) >= LEVEL * SHARE:
        return False
    if source == "misaligned":
        return True
    rollout, old = culprit["rollout_log_prob"], culprit["old_log_prob"]
    if rollout is not None and old == rollout and not event["epoch"] + event["mini_batch"]:  # verl's bypass mode
        old = culprit["log_prob"]
    norm, most = abs(_without_rollout(culprit)) * culprit["grad_norm"], culprit["threshold"]
    is_over = math.inf > norm > abs(culprit["coefficient"]) * most
    return not is_over and bool(is_apart(rollout, old, _RATIOS[source]))


def _is_fact(event: Event, source: str, _: Culprit) -> bool:
    """Whether a source is no broken equality; nor a layer that has most of ordinary tokens' norms, too."""
    usual = layer_shares(event["ordinary_layer_norms"] or {}) if source == "layer" else {}
    return source not in FAULTS and max(usual.values(), default=0.0) <= EXPLAINS


def _shared(event: Event, counts: Callable[[Event, str, Culprit], bool]) -> Iterator[Fact]:
    """Each source that most culprits have, and for which it `counts`, and ordinary tokens far less often."""
    for source in HOLDS:
        tokens = sum(source in each["sources"] and counts(event, source, each) for each in event["culprits"])
        share, usual = tokens / max(len(event["culprits"]), 1), event["comparison"]["ordinary"].get(source)
        # One NaN makes the whole gradient NaN.
        enough = tokens > 0 if source == _BROKEN else share >= EXPLAINS
        if enough and (usual is None or share >= LEVEL * usual):
            yield {"source": source, "culprits": share, "ordinary": usual}


def _true_of(event: Event, fact: Fact) -> str:
    total = len(event["culprits"])
    others = "" if fact["ordinary"] is None else f", and of {percent(fact['ordinary'])} of the other tokens"
    return f"true of {counted(round(fact['culprits'] * total), total, 'culprits')}{others}"


def _natural(event: Event, facts: list[Fact], rows: Mapping[Place, TrainedRow]) -> Said:
    """Without a cause: which identities hold, and what the culprits have in common."""
    states = Counter(each["state"] for each in event.get("identities", {}).values())
    kind = "What the culprits have in common"
    if unread := event.get("warnings"):
        claim = f"The loss does not read what is broken ({lowered(claim_of(unread[0]))})"
    elif states["held"]:
        others = f", and {states['unchecked']} could not be" if states["unchecked"] else ""
        claim, kind = f"All {states['held']} identities that could be checked hold{others}", "A natural spike"
    else:
        claim = "No identity could be checked"
    rest, check = ".", CHECK_UNSEARCHED if event["diagnosis"] == "unsearched" else CHECK_UNKNOWN
    if event["culprits"]:
        common = [f"{lowered(SOURCES[fact['source']].claim)} ({_true_of(event, fact)})" for fact in facts]
        what = "; ".join(filter(None, [*common, _rewarded(event, rows)])) or "nothing that stands out"
        rest, check = f". {kind}: {what}.", CHECK_NATURAL
    if part := _no_token_in_words(event, MENTIONED):
        rest += f" {part}."
    return said(claim, rest, check)


def _rewarded(event: Event, rows: Mapping[Place, TrainedRow]) -> str:
    """A reward that the culprits' responses have, and few others."""
    places = {(each["rank"], each["row"]) for each in event["culprits"]}
    known: Counter[float | None] = Counter(row.score for row in rows.values() if row.score is not None and row.largest)
    for reward, n in Counter(rows[place].score for place in places if place in rows).most_common(1):
        # A reward that many others have does not stand out; nor is anything known where none has an advantage.
        usual = known[reward] / known.total() if known else 1.0
        if reward is not None and n >= EXPLAINS * len(places) and usual * LEVEL <= 1:
            responses = f"{counted(n, len(places), 'responses')} with culprits"
            return f"the reward is {reward:g} (true of {responses}, and of {percent(usual)} of all with an advantage)"
    return ""


def _of_critic(spike: CriticSpike) -> tuple[str | None, str]:
    """The cause of a critic's spike ("network": its errors have not grown with the norm), and a few sentences."""
    units, cause = spike["micro_batches"], None
    # The largest micro-batch; where they are not measured alone, the whole mini-batch.
    largest: Any = units[0] if units else {**spike, "token_equivalent": spike["token_norm"]}
    where = f"micro-batch {largest['micro_batch']} of rank {largest['rank']}" if units else "all data"
    norm, error = largest["token_equivalent"], largest["error"]
    size = f"{norm / spike['threshold']:.3g} times its threshold" if math.isfinite(norm) else "not finite"
    summary = f"The critic's gradient norm is {size} in {where}."
    usual, usual_norm = spike["ordinary_error"], spike["ordinary_token_norm"]
    if usual and usual_norm and error is not None:
        growth = error / usual
        is_large = math.isfinite(norm) and growth >= max(_LARGE_ERROR, _EXPLAINED * norm / usual_norm)
        cause = "errors" if is_large or not math.isfinite(growth) else "network"
        summary += f" {_OF_ERRORS[cause]}"
    for value in spike["values"][:1]:
        summary += f" Largest error: value {value['value']:.3g}, return {value['return']:.3g}, {token_in_words(value)}."
    return cause, summary
