# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The verdict on a spike: its cause in one line, with the evidence for it, or that no cause is known."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..guarded import guarded
from ..lines import Culprit, Event, RunWarning, Shares, Verdict
from ..sources import APART, APART_NATS, LARGE_ADVANTAGE, is_apart, layer_shares
from .advantages import CHECK_ADVANTAGES, REWARD_SCALE
from .log_probs import ENGINES_APART, OF_ROLLOUT, OF_SOME, OTHER_LOG_PROBS, REFERENCE, UNSAMPLED
from .progress import resume_note, said, said_again
from .rows import OF_GROUPS, REPEATED
from .rules import EXAMPLE, NATURAL_ADVANTAGE, RULES, Kind, Rule
from .sentences import auxiliary_in_words, is_over_everywhere, lowered
from .shares import counted, is_unusual, percent, threshold_factor

# The limits of `find_cause`.
MOST_CULPRITS = 0.5
COMMON = 0.25
LIFT = 4.0
CLOSE = 0.1
# The largest chance that as many ordinary tokens as there are culprits would have what a rule holds for.
CHANCE = 0.1
# What the culprits of a micro-batch explain of its norm, at least: they are the cause of the spike only then.
EXPLAINED = 0.1
# A cause is likely if it holds for so many culprits, and for this share of ordinary tokens at most.
LIKELY_TOKENS = 2
LIKELY_ORDINARY = 0.1
# Where the engines are apart in the whole run, or for so many tokens, as with late weights, more ordinary tokens than
# these are so, too.
SOME_APART, RARELY = 0.05, 0.01
# A weight that is so many times the median makes most of the gradient by itself: without it, under a quarter.
HEAVY = 5.0

# The rules that may be a cause, and those of each kind.
CAUSES = {rule.name: rule for rule in RULES}
_OF_KIND = {kind: [rule for rule in RULES if rule.kind is kind] for kind in Kind}
# Where one of these tells the culprits, and does not explain their norms, they are no natural spike.
_BUGS = [*_OF_KIND[Kind.BROKEN], *_OF_KIND[Kind.UNSAMPLED], *_OF_KIND[Kind.MISALIGNED], *_OF_KIND[Kind.RATIO]]
(_BROKEN,), (_WEIGHT,), (_LAYER,) = (_OF_KIND[kind] for kind in (Kind.BROKEN, Kind.WEIGHT, Kind.LAYER))

# What comes from no token's log-prob is the cause if it makes more than this part of the squared norm.
MOST_WITHOUT_TOKENS = 0.5
AUXILIARY_ADVICE = (
    "look at the coefficient and the scale of the auxiliary loss (load balancing, z-loss, MTP or draft heads), and at "
    "what its gradient is multiplied by."
)
AUXILIARY_CHECK = (
    "Take one step from the same checkpoint with the coefficient of the auxiliary loss at 0: `actor/grad_norm` should "
    "fall." + EXAMPLE.format("auxiliary")
)

# The columns of log-probs that a loss need not read, and how near a coefficient is to what it is without them.
_UNREAD, _ALONE = ("rollout", "reference"), 0.01

# By diagnosis, why no cause is known where the search has named no token.
_WITHOUT_CULPRITS = {
    "overflow": "the scaled fp16 gradients overflowed, and the gradient scaler takes a smaller scale",
    "diffuse": "no token stands out",
}

# Where no cause is known.
CHECK_UNKNOWN = (
    "`gradloc replay BUNDLE --switches` shows whether the spike comes back without training's "
    "kernels, in which layers it is, and what changes it."
)
# Where nothing was searched.
CHECK_UNSEARCHED = "`gradloc replay BUNDLE --search` finds the tokens, with the weights that this step had."


def verdict(event: Event) -> Verdict | None:
    """What the first of `_DECISIONS` says of a spike that says anything, from the event's other fields alone.

    None if that fails: a verdict must not cost the event.
    """
    with guarded("no verdict on an event could be made"):
        spike = Spike(event)
        return next(found for decision in _DECISIONS if (found := decision(spike)) is not None)
    return None


@dataclass(frozen=True)
class Spike:
    """What there is to judge a spike by: its event."""

    event: Event

    @property
    def culprits(self) -> list[Culprit]:
        """The event's."""
        return self.event["culprits"]

    @property
    def ordinary(self) -> Shares:
        """By rule, the share of ordinary tokens for which it holds."""
        return self.event["comparison"]["ordinary"]

    @property
    def warnings(self) -> list[RunWarning]:
        """What is wrong with the run."""
        return self.event.get("warnings", [])

    @cached_property
    def explaining(self) -> list[Culprit]:
        """The culprits that make some of their micro-batches' norm."""
        return explaining_culprits(self.culprits)

    @cached_property
    def shares(self) -> dict[str, float]:
        """By rule, the share of culprits for which it holds, and which it explains; zeros without a culprit."""
        return {
            rule.name: sum(rule.name in each["sources"] and rule.suffices(each, self.event) for each in self.explaining)
            / max(len(self.culprits), 1)
            for rule in RULES
        }

    @cached_property
    def cause(self) -> Rule | None:
        """The rule that tells the culprits from ordinary tokens."""
        compared, measured = dict(self.ordinary), self.event["comparison"]["measured"]
        if self.event["diagnosis"] not in ("tokens", "nonfinite"):
            # The search picks large and rare tokens first, and these did not explain the spike.
            for rule in (*_OF_KIND[Kind.NATURAL], *_OF_KIND[Kind.RATIO], _WEIGHT):
                compared[rule.name] = None if measured is None else measured[rule.name]
        return find_cause(self.shares, compared, len(self.culprits))

    @cached_property
    def doubt(self) -> str | None:
        """Why that rule is not named anyway."""
        if self.cause is not None and self.cause.kind in (Kind.RATIO, Kind.MISALIGNED):
            are_apart = any(warning["name"] == ENGINES_APART for warning in self.warnings)
            if (are_apart or self.apart_share > SOME_APART) and (self.ordinary.get(self.cause.name) or 0.0) > RARELY:
                return "rollout and training differ in the whole run, and so do some other tokens"
            return self.apart
        if self.cause is not None and self.cause.kind is Kind.NATURAL and not self.cause.is_outlying(self.event):
            return self.why_not_natural
        return None

    @property
    def apart_share(self) -> float:
        """The share of ordinary tokens whose log-probs of rollout and old policy differ; 0 where it is unknown."""
        return self.ordinary.get(APART) or 0.0

    def is_unread(self, warning: RunWarning) -> bool:
        """Whether it is about log-probs that made no culprit's coefficient: weights, advantages and ratios give it."""
        if warning.get("column") not in _UNREAD:
            return False
        expected = []
        for each in self.explaining:
            # In bypass mode, the ratio is that to the rollout.
            ratio = each["ratio"] if each["old_log_prob"] != each["rollout_log_prob"] else None
            expected.append(-each["weight"] * (each["advantage"] or 0.0) * (1.0 if ratio is None else ratio))
        pairs = zip(self.explaining, expected, strict=True)
        return bool(expected) and all(abs(each["coefficient"] - alone) <= _ALONE * abs(alone) for each, alone in pairs)

    @cached_property
    def apart(self) -> str | None:
        """That rollout and training differ everywhere, so that ratios far from 1 are no matter of single tokens."""
        if self.apart_share < COMMON:
            return None
        return (
            f"rollout and training differ by over {APART_NATS:g} nat for {percent(self.apart_share)} of all tokens, "
            "which is a matter of the run: old weights, another temperature, prompt or precision"
        )

    @cached_property
    def why_not_natural(self) -> str | None:
        """Why rare tokens, or unusual rewards, are not said to be all that there is to it; None where they may be."""
        if any(each["name"] not in (REFERENCE, REPEATED) and not self.is_unread(each) for each in self.warnings):
            return "there is a warning about the run, so that this need not be a natural spike"
        if (unusual := self.event["comparison"]["unusual"]) is not None:
            return unusual
        if is_over_everywhere(self.event):
            return "every micro-batch is over its threshold, so that this is no spike of single tokens"
        if self.apart:
            return self.apart
        if any(self.held(rule.name) >= MOST_CULPRITS for rule in _OF_KIND[Kind.PART]):
            return "the KL loss or the entropy bonus makes most of the gradient of most culprits"
        for rule in _BUGS:
            share = self.held(rule.name)
            if share >= MOST_CULPRITS and _stands_out(share, self.ordinary.get(rule.name), len(self.culprits)):
                return f"of most culprits the rule `{rule.name}` holds, which does not explain their norms"
        return None

    def held(self, name: str) -> float:
        """The share of the culprits for which a rule holds, whether it explains their norms or not."""
        return sum(name in each["sources"] for each in self.culprits) / max(len(self.culprits), 1)

    @property
    def why_unknown(self) -> str:
        """Why no cause is known."""
        if why := self.doubt or self.apart:
            return why
        if not self.culprits:
            return _WITHOUT_CULPRITS.get(self.event["diagnosis"], "the search ended without a result")
        if not self.explaining:
            return f"the culprits make under {EXPLAINED:.0%} of the norm of their micro-batches"
        if all(share is None for share in self.ordinary.values()):
            return "there are no ordinary tokens to compare the culprits with"
        return "no rule tells the culprits from other tokens"

    @property
    def note(self) -> str:
        """What to add soon after a resume."""
        return resume_note(self.event.get("steps_since_resume"))


def _unsearched(spike: Spike) -> Verdict | None:
    """A converted spike has the verdict of a warning about the run, or none until it is searched."""
    if spike.event.get("diagnosis") != "unsearched":
        return None
    if causes := [each for each in spike.warnings if each["name"] not in OF_SOME]:
        return of_warning(spike.event, spike.ordinary, causes[0])
    return as_verdict(None, "Not searched yet", f": no token was measured.{spike.note}", CHECK_UNSEARCHED)


def _no_token(spike: Spike) -> Verdict | None:
    """A gradient that comes from no token."""
    what = auxiliary_in_words(spike.event, math.sqrt(MOST_WITHOUT_TOKENS))
    if what is None:
        return None
    return as_verdict("auxiliary", f"{what[0].upper()}{what[1:]}", f": {AUXILIARY_ADVICE}", AUXILIARY_CHECK)


def _the_run(spike: Spike) -> Verdict | None:
    """What is wrong with all tokens comes before what is wrong with a few: the first warning that is about most."""
    told = None if spike.cause is None else spike.cause.kind
    is_nonfinite = told is Kind.BROKEN or spike.event["diagnosis"] == "nonfinite"
    for warning in spike.warnings:
        name = warning["name"]
        if name == _BROKEN.name:
            is_cause = is_nonfinite
        elif name == UNSAMPLED and told is None:  # of so many tokens that ordinary ones have it, too
            is_cause = spike.held(name) >= MOST_CULPRITS
        elif told is Kind.BROKEN or name in OF_SOME or (told is Kind.UNSAMPLED and name == OTHER_LOG_PROBS):
            is_cause = False
        elif name in OF_GROUPS:
            is_cause = told in (None, Kind.NATURAL)
        elif spike.is_unread(warning):
            is_cause = False
        else:
            # Where a rule has the warning's name, the warning may be about few responses, and not about the culprits.
            share = warning.get("share") if name in CAUSES else None
            is_cause = share is None or max(share, spike.shares[name]) >= MOST_CULPRITS
        if is_cause:
            return of_warning(spike.event, spike.ordinary, warning)
    return None


def _all_broken(spike: Spike) -> Verdict | None:
    """A gradient that is NaN or infinite for all tokens."""
    event = spike.event
    if event["diagnosis"] != "nonfinite" or spike.culprits:
        return None
    claim, rest = "NaN or Inf is in the log-probs or gradients of all tokens", "."
    if not any(unit["broken_tokens"] for unit in event["units"]):
        broken = event.get("broken_parameters")
        where = f", first at {broken['names'][0]}" if broken and broken["names"] else ""
        claim = "The gradient is NaN or infinite, and no log-prob and no advantage is"
        rest = (
            f": the backward makes it{where}. Look for a division or square root at 0, for torch.where over such a "
            "branch, and for a kernel."
        )
    return as_verdict(_BROKEN.name, claim, rest + spike.note, CHECK_UNKNOWN, None, 1.0)


def _the_whole(spike: Spike) -> Verdict | None:
    """Weights, or a layer, where no rule or only a natural spike would be named."""
    if spike.cause is None or spike.doubt or spike.cause.kind is Kind.NATURAL:
        return _weight_of_the_whole(spike) or _layer_of_all(spike.event)
    return None


def _the_culprits(spike: Spike) -> Verdict | None:
    """The rule that tells the culprits, with the evidence for it: few tokens, or small differences, are none."""
    if spike.cause is None or spike.doubt:
        return None
    name, count = spike.cause.name, len(spike.culprits)
    claim, advice = spike.cause.in_event(spike.event) or (spike.cause.claim, spike.cause.advice)
    share, ordinary = spike.shares[name], spike.ordinary.get(name)
    is_likely = share * count >= LIKELY_TOKENS and ordinary is not None and ordinary <= LIKELY_ORDINARY
    others = "" if ordinary is None else f", and of {percent(ordinary)} of the other tokens"
    evidence = f"{'likely' if is_likely else 'possible'}: true of {counted(round(share * count), count)}{others}"
    return as_verdict(name, claim, f": {lowered(advice)}{spike.note}", spike.cause.check, share, ordinary, evidence)


def _large_advantages(spike: Spike) -> Verdict | None:
    """Advantages of all tokens that are as large as no baseline and deviation leave them, and without which the event
    would not be one. Where spikes are rare, τ fits the run's advantages.
    """
    median = spike.event["median_advantage"] or 0.0
    if spike.event["comparison"]["unusual"] is None or not NATURAL_ADVANTAGE < median < math.inf:
        return None
    if max(map(threshold_factor, spike.event["units"]), default=math.inf) >= LARGE_ADVANTAGE * median:
        return None
    rest = (
        f": half of all tokens have one over {median:.3g}, where rewards that are divided by the deviation in their "
        "group give about 1, and the gradient grows with them. Look at the size of the rewards (a bonus by length, a "
        "penalty without a limit), and at how advantages are normalized."
    )
    return as_verdict(REWARD_SCALE, "Advantages are large", rest + spike.note, CHECK_ADVANTAGES)


def _unknown(spike: Spike) -> Verdict:
    """No cause is known, because a weak guess misleads."""
    rest = f": {spike.why_unknown}.{spike.note}"
    if spike.warnings:
        rest += f" But note: {spike.warnings[0]['sentence']}"
    return as_verdict(None, "No known cause", rest, CHECK_UNKNOWN)


_DECISIONS: tuple[Callable[[Spike], Verdict | None], ...] = (
    *(_unsearched, _no_token, _the_run, _all_broken, _the_whole, _the_culprits),
    *(_large_advantages, _unknown),
)


def as_verdict(
    cause: str | None,
    claim: str,
    rest: str,
    check: str,
    culprits: float | None = None,
    ordinary: float | None = None,
    evidence: str = "",
) -> Verdict:
    """What `verdict` returns; see `said`."""
    return {"cause": cause, "culprits": culprits, "ordinary": ordinary, **said(claim, rest, check, evidence)}


def of_warning(event: Event, ordinary: Shares, warning: RunWarning) -> Verdict:
    """The verdict where something is wrong with the run; the shares, of a rollout, are those of tokens `is_apart`."""
    apart = [is_apart(culprit["rollout_log_prob"], culprit["old_log_prob"]) for culprit in event["culprits"]]
    known = [each for each in apart if each is not None]
    is_known = warning["name"] in OF_ROLLOUT
    return {
        "cause": warning["name"],
        "culprits": sum(known) / len(known) if known and is_known else None,
        "ordinary": ordinary.get(APART) if is_known else None,
        **said_again(warning),
    }


def _weight_of_the_whole(spike: Spike) -> Verdict | None:
    """That the weights of some culprits, and not their norms, make the whole gradient large; None if they do not.

    With the median weight, their part of the squared norm would be under a quarter of what it is.
    """
    event = spike.event
    median = event["median_weight"] or math.inf
    heavy = [each for each in spike.culprits if each["weight"] > HEAVY * median and math.isfinite(each["grad_norm"])]
    parts = [each["weight"] * each["grad_norm"] / event["world_size"] for each in heavy]
    if not heavy or not math.hypot(*parts) >= math.sqrt(0.5) * event["global_norm"]:
        return None
    times = max(each["weight"] for each in heavy) / median
    what = "one token weighs" if len(heavy) == 1 else f"{len(heavy)} tokens weigh up to"
    claim = f"In the whole gradient, {what} as much as {times:.0f} ordinary tokens"
    rest, ordinary = f": {lowered(_WEIGHT.advice)}", spike.ordinary.get(_WEIGHT.name)
    return as_verdict(_WEIGHT.name, claim, rest, _WEIGHT.check, 1.0, ordinary)


def _layer_of_all(event: Event) -> Verdict | None:
    """A layer that carries most of the norm in every micro-batch over its threshold, and did not before."""
    usual = layer_shares(event["ordinary_layer_norms"] or {})
    known = [unit["layer_norms"] for unit in event["units"] if unit["layer_norms"]]
    shares = [layer_shares(norms) for norms in known]
    names = {max(share, key=share.__getitem__) for share in shares if share}
    if len(names) != 1 or not all(shares) or not usual:
        return None
    (name,) = names
    least, before = min(share[name] for share in shares), usual.get(name, 0.0)
    if not is_unusual(least, before):
        return None
    is_every = len(known) == len(event["units"]) + event.get("more_units", 0)
    every = "every micro-batch" if is_every else f"each of {len(known)} micro-batches"
    claim = (
        f"The layer {name} carries {percent(least)} of the squared norm or more in {every} over its "
        f"threshold, and ordinarily {percent(before)}"
    )
    rest = ": look at this layer's weights and kernels, and at losses that are added there (load balancing, z-loss)."
    check = (
        "`gradloc replay BUNDLE` says whether saved weights give the same norms: if not, the weights in memory were "
        f"damaged, or a kernel is wrong. {_LAYER.check}"
    )
    return as_verdict(_LAYER.name, claim, rest, check)


def find_cause(culprits: Mapping[str, float], ordinary: Shares, count: int) -> Rule | None:
    """The rule that tells culprits from ordinary tokens; None if there is none, because a weak guess misleads.

    A possible cause holds for `MOST_CULPRITS` of them at least, for less than `COMMON` of ordinary tokens and `LIFT`
    times as often for culprits, with a chance under `CHANCE` that as many ordinary tokens would have it. Of those that
    hold for about as many culprits (`CLOSE`), the first in the order of `RULES` is taken: a bug often makes the rules
    after its own hold, too. Numbers that are not finite need a single culprit, and come before all.

    Args:
        culprits (Mapping): By rule, the share of culprits for which it holds, and which it explains.
        ordinary (Mapping): The share of ordinary tokens for which it holds; None where unknown.
        count (int): The number of culprits.
    """
    # Where all tokens are culprits, there are no ordinary ones to compare with.
    broken, usual = culprits[_BROKEN.name], ordinary.get(_BROKEN.name)
    if broken and (usual is None or _stands_out(broken, usual, 0)):
        return _BROKEN
    possible = [
        rule
        for rule in RULES
        if culprits[rule.name] >= MOST_CULPRITS
        and not (rule.compared and not _stands_out(culprits[rule.name], ordinary.get(rule.name), count))
    ]
    most = max((culprits[rule.name] for rule in possible), default=0.0)
    return next((rule for rule in possible if culprits[rule.name] >= most - CLOSE), None)


def _stands_out(of_culprits: float, of_ordinary: float | None, count: int) -> bool:
    if of_ordinary is None or of_ordinary >= COMMON or of_culprits < LIFT * of_ordinary:
        return False
    hits = round(of_culprits * count)
    chance = sum(
        math.comb(count, k) * of_ordinary**k * (1 - of_ordinary) ** (count - k) for k in range(hits, count + 1)
    )
    return not count or chance <= CHANCE


def explaining_culprits(culprits: Sequence[Culprit]) -> list[Culprit]:
    """The culprits of the micro-batches of whose norm they make at least `EXPLAINED`, or an unknown share."""
    shares: dict[tuple[int, int], float] = {}
    for culprit in culprits:
        where = culprit["rank"], culprit["micro_batch"]
        share = culprit["share"]
        shares[where] = shares.get(where, 0.0) + (math.inf if share is None else share)
    return [culprit for culprit in culprits if not shares[culprit["rank"], culprit["micro_batch"]] < EXPLAINED]
