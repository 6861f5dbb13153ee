# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a culprit's sources mean: the one table that verdicts, report and documentation use."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from .. import sources
from ..lines import Event
from ..sources import CONFIDENT, OVERFLOW_RATIO, UNLIKELY, Facts, entropy_share, is_broken, layer_shares
from .shares import counted, is_unusual

# Groups of up to 37 ordinary rewards, divided by their standard deviation, have advantages up to 6.
NATURAL_ADVANTAGE = 6.0
NATURAL_FACTOR = 8.0
# A culprit whose norm is over so many thresholds is not one because it is rare.
RARE_NORM = 30.0


class Kind(Enum):
    """What a rule that tells the culprits says of a spike."""

    BROKEN = "numbers are not finite: one such token is enough"
    UNSAMPLED = "a bug: tokens were not sampled, which looks like another temperature"
    MISALIGNED = "a bug: log-probs are of other tokens"
    RATIO = "a bug, or training far off-policy"
    NATURAL = "it comes without any fault, too; the search picks tokens by it"
    WEIGHT = "a matter of the whole gradient; the search picks tokens by it"
    PART = "a part of the loss, which may be the cause for all tokens"
    LAYER = "a layer, or nothing, is to be blamed"


@dataclass(frozen=True)
class Rule:
    """What a source means, and all that is said of it.

    Args:
        name (str): The source.
        kind (Kind): What it says of a spike.
        one (str): What a culprit is for which it holds; `several`, what culprits are.
        meaning (str): When it holds, in one sentence.
        advice (str): What to do about it, in one sentence.
        claim (str): What a verdict says is wrong, the start of a sentence.
        check (str): How to check it in the run's own data: with a command, or what to compare.
        left (Callable): The share of a culprit's norm that would be left without it, in this event.
        compared (bool): Whether it tells culprits only if ordinary tokens have it far less often. Not so: what compares
            the turns of a response, parts of the loss, and layers, of which ordinary tokens' are known on average.
        is_outlying (Callable): Whether the culprits of an event have more of it than comes without any fault.
        in_event (Callable): Claim and advice in an event, where they are others.
    """

    name: str
    kind: Kind
    one: str
    several: str
    meaning: str
    advice: str
    claim: str = ""
    check: str = ""
    left: Callable[[Facts, Event], float] = lambda culprit, event: 0.0
    compared: bool = True
    is_outlying: Callable[[Event], bool] = lambda event: False
    in_event: Callable[[Event], tuple[str, str] | None] = lambda event: None

    @property
    def is_bug(self) -> bool:
        """Whether it is to be repaired where it comes from: a remedy only covers it up."""
        return self.kind in (Kind.BROKEN, Kind.UNSAMPLED, Kind.MISALIGNED, Kind.WEIGHT)

    def suffices(self, culprit: Facts, event: Event) -> bool:
        """Whether what it holds for can be why a culprit of this event is over its threshold."""
        left = self.left(culprit, event)
        return left < math.inf and not culprit["grad_norm"] * left > culprit["threshold"]


# What would be left of a culprit's norm without what a rule holds for; and claims that depend on the event.


def _times_by_ratio(culprit: Facts) -> float:
    """How many times larger a token's norm is than with the same log-prob in both engines, and before the update.

    The loss multiplies a coefficient by the ratio, and the gradient of a log-prob is about proportional to 1 − p.
    """
    advantage, rollout = culprit["advantage"], culprit["rollout_log_prob"]
    rest = culprit["coefficient"] - (culprit["kl_coefficient"] or 0.0)
    times = abs(rest / (culprit["weight"] * advantage)) if advantage else 1.0
    sampled = culprit["old_log_prob"] if rollout is None else rollout
    if sampled is None or not math.isfinite(sampled):
        return math.inf
    times *= _improbability(culprit["log_prob"]) / _improbability(sampled)
    return max(times, sys.float_info.min) if times <= OVERFLOW_RATIO else math.inf


def _improbability(log_prob: float) -> float:
    return max(-math.expm1(min(log_prob, 0.0)), 1e-6)


def _left_without_a_layer(culprit: Facts, event: Event) -> float:
    """All, if it is an ordinary one: in a model of three layers, one has half of the squared norm of any token."""
    usual = layer_shares(event["ordinary_layer_norms"] or {})
    shares = layer_shares(culprit["layer_norms"])
    layer = max(shares, key=shares.__getitem__)
    return 0.0 if usual and is_unusual(shares[layer], usual.get(layer, 0.0)) else math.inf


def _has_outlying_advantage(event: Event) -> bool:
    """Whether the culprits' advantages are larger than those that groups of ordinary rewards give."""
    median = event["median_advantage"] or math.inf
    largest = max((abs(each["advantage"]) for each in event["culprits"] if each["advantage"] is not None), default=0.0)
    return largest > max(NATURAL_ADVANTAGE, NATURAL_FACTOR * median)


def turn_boundary(culprits: Sequence[Facts]) -> str | None:
    """With which token the mismatch to the rollout begins in most of the culprits' responses; None if with no turn."""
    responses = {
        (culprit["rank"], culprit["row"]): turn for culprit in culprits if (turn := culprit.get("mismatch_turn"))
    }
    if not responses:
        return None
    turn, count = Counter(responses.values()).most_common(1)[0]
    share = "" if count == len(responses) else f" in {counted(count, len(responses), 'responses')}"
    return f"with the first token after turn {turn - 1}{share}"


def _at_a_turn(event: Event) -> tuple[str, str] | None:
    rule, boundary = SOURCES["retokenized"], turn_boundary(event["culprits"])
    return (f"{rule.claim}, {boundary}", rule.advice) if boundary else None


def _as_far_from_training(event: Event) -> tuple[str, str] | None:
    if any(each.get("misplaced") for each in event["culprits"] if "misaligned" in each["sources"]):
        return None
    return (
        "Log-probs of whole responses are over 1 nat from training's",
        "Look for what the rollout had other than training for these requests: weights, temperature, prompt; or for "
        "where log-probs are gathered, sliced or padded.",
    )


def _as_a_natural_spike(event: Event) -> tuple[str, str] | None:
    if _has_outlying_advantage(event):
        return None
    return (
        "A natural spike of tokens whose responses were rewarded unlike most of their group",
        "Such spikes come without any fault, and do not exclude one. If they disturb training, clip advantages or "
        "layers.",
    )


def _with_its_name(event: Event) -> tuple[str, str]:
    shares = [layer_shares(each["layer_norms"]) for each in event["culprits"]]
    ((name, _),) = Counter(max(each, key=each.__getitem__) for each in shares if each).most_common(1)
    return f"The layer {name} makes most of the gradient", SOURCES["layer"].advice


# After what to compare in the run's own data.
EXAMPLE = " An example, in a checkout of GradLoc: `bash run_experiment.sh --embedded --fault {}`."
_RATIOS = (
    "Compare the culprits' `rollout_log_prob`, `old_log_prob` and `log_prob` in spikes.jsonl: a gap between the first "
    "two is between the engines (precision, temperature, old weights), one between the last two comes from the updates "
    "since the rollout." + EXAMPLE.format("stale")
)
_REMEDIES = "`gradloc replay BUNDLE --remedies` measures what each remedy leaves of the spike."

# The name of the rule of numbers that are not finite.
BROKEN = "nonfinite"
# What verl calls a column; each may make those after it not finite.
VERL_NAMES = {
    "advantage": "advantages",
    "old_log_prob": "old_log_probs",
    "ref_log_prob": "ref_log_prob",
    "rollout_log_prob": "rollout_log_probs",
}


def _with_its_column(event: Event) -> tuple[str, str] | None:
    """The first column of the batch that is not finite for a token with such a gradient."""
    tokens: list[Facts] = [each for each in event["culprits"] if BROKEN in each["sources"]]
    for name, column in VERL_NAMES.items():
        if any(each.get(name) is not None and is_broken(each[name]) for each in tokens):
            return f"`{column}` of single tokens is NaN or infinite", "Look at what computes it, before the update."
    return None


_NATURAL = "It is none if {}: then the cause is elsewhere. "

# Most specific first: broken numbers, then bugs, then what ordinary tokens rarely have.
RULES = (
    Rule(
        BROKEN,
        Kind.BROKEN,
        "a token with a NaN or infinite gradient",
        "tokens with NaN or infinite gradients",
        "The token's gradient is NaN or infinite.",
        "Look at the column that is not finite first: the rest follows from it.",
        claim="Single tokens have NaN or infinite gradients",
        check="Find which of the culprit's `advantage`, `log_prob`, `old_log_prob` and `weight` in spikes.jsonl is NaN "
        "or infinite: then look at that column of the batch; if none is, at the weights, and at the gradients of the "
        "event's `broken_parameters` before the optimizer step, the first one first." + EXAMPLE.format("nan"),
        in_event=_with_its_column,
    ),
    Rule(
        "unsampled",
        Kind.UNSAMPLED,
        "a token that the policy did not produce",
        "tokens that the policy did not produce",
        "The policy did not produce the token: it is after the turn's end (unless training confirms "
        "the rollout's log-prob), or the rollout gave it no log-prob, or exactly 0 while training gives it under 0.1.",
        "Set response_mask to 0 for tokens that were added later: EOS tokens, templates, tool output.",
        claim="Tokens that the policy did not produce are trained on",
        check="Compare `response_mask` in the batch, in the culprit's `row` at its `position`, with the token ids "
        "that the rollout returned: it should be 1 for these alone." + EXAMPLE.format("unsampled"),
    ),
    Rule(
        "retokenized",
        Kind.UNSAMPLED,
        "a token in or after a turn with which the mismatch to the rollout begins",
        "tokens in or after turns with which the mismatch to the rollout begins",
        "It is in or after a turn with which the mismatch to the rollout begins: up to one of the turn's first three "
        "tokens log-probs agree, and most of those that follow differ by more than 1 nat, or are NaN.",
        "Train on the token ids that the rollout sampled: do not decode a turn and encode it again, and check the "
        "tokens that the chat template puts between turns.",
        claim="The mismatch between training and rollout begins at a turn boundary",
        check="Compare `responses` in the batch, in the culprit's `row` from `mismatch_start` on, with the token ids "
        "that the rollout returned: they should be equal." + EXAMPLE.format("retokenized"),
        compared=False,
        in_event=_at_a_turn,
    ),
    Rule(
        "misaligned",
        Kind.MISALIGNED,
        "a misaligned token (log-probs of its response belong to other tokens)",
        "misaligned tokens (log-probs of their responses belong to other tokens)",
        "Its response's log-probs, of the rollout or the reference, fit the policy's at other positions better, from "
        "its own position or an earlier one on, or end in one repeated value. Or over half of them differ from the "
        "rollout's by more than 1 nat, or are NaN, in a response of at least 6 tokens.",
        "Look for where log-probs are gathered, sliced or padded; or for other weights or another temperature in the "
        "rollout.",
        claim="Log-probs do not belong to the tokens that they are used for",
        check="Compare `rollout_log_prob`, `old_log_prob` and `ref_log_prob` of the culprit's row, token by token: "
        "`shift` in spikes.jsonl says by how many positions they fit. `gradloc replay BUNDLE` "
        "compares them with those of saved weights.",
        in_event=_as_far_from_training,
    ),
    Rule(
        "token",
        Kind.RATIO,
        "a token whose importance ratio is far from 1",
        "tokens whose importance ratios are far from 1",
        "Its ratio, to the old policy or to the rollout's, is over 2, under 1/2 or NaN.",
        "Use the same precision in rollout and training, train less off-policy, or clip or mask such ratios.",
        claim="The importance ratios of single tokens are far from 1",
        check=_RATIOS,
        left=lambda culprit, event: 1 / _times_by_ratio(culprit),
    ),
    Rule(
        "sequence",
        Kind.RATIO,
        "a token whose response has a mean importance ratio far from 1",
        "tokens whose responses have mean importance ratios far from 1",
        "The geometric mean of the response's ratios is over 1.2, under 1/1.2 or NaN.",
        "Do the same as for token, for whole responses: mask those whose mean ratio is far from 1.",
        claim="The mean importance ratios of whole responses are far from 1",
        check=_RATIOS,
        left=lambda culprit, event: 1 / _times_by_ratio(culprit),
    ),
    Rule(
        "advantage",
        Kind.NATURAL,
        "a token with an outlying advantage",
        "tokens with outlying advantages",
        "Its advantage is over 2.5 times the median of the mini-batch (of the advantages that are not zero): its "
        "response was rewarded unlike most of its group, or its reward is an outlier.",
        "Look at the rewards of its group: clip outliers, and do not divide by the standard deviation, which gives "
        "nearly equal rewards and groups with a single right or wrong response more weight.",
        claim="Advantages are outliers",
        check="Compare the culprit's `reward` in spikes.jsonl with `token_level_scores` in the batch, summed over each "
        "row of the same `uid`: see whether one is unlike the others." + EXAMPLE.format("advantage"),
        left=lambda culprit, event: event["median_advantage"] / abs(culprit["advantage"]),
        is_outlying=_has_outlying_advantage,
        in_event=_as_a_natural_spike,
    ),
    Rule(
        "weight",
        Kind.WEIGHT,
        "a token with an outlying weight in the loss",
        "tokens with outlying weights in the loss",
        "Its weight in the loss is over 5 times the median of the mini-batch.",
        "Check that response_mask is 0 or 1, filter out very short responses, and fill micro-batches evenly: a mean "
        "over a sequence, or over the tokens of a micro-batch, gives few tokens large weights. With "
        "loss_agg_mode=token-mean, only the second does.",
        claim="A few tokens weigh much more in the loss than others, and so make most of the whole gradient",
        check="Multiply the culprits' `grad_norm` in spikes.jsonl by the event's `median_weight` instead of by their "
        "own `weight`: if that is about as large as `global_norm`, too, the weights are not the cause.",
        # Norms are divided by the weight, which therefore is not why one is over the threshold.
        left=lambda culprit, event: math.inf,
    ),
    Rule(
        "kl",
        Kind.PART,
        "a token driven by the KL loss",
        "tokens driven by the KL loss",
        "The KL loss's part of its coefficient is larger than the policy loss's.",
        "Lower kl_loss_coef, or use a KL estimator with a smaller gradient far from the reference (kl_loss_type).",
        claim="The KL loss, not the policy loss, makes the gradient of these tokens",
        check="Compare `actor/kl_loss` with the steps before, and the culprits' `ref_log_prob` with their `log_prob` "
        "in spikes.jsonl: they should be far apart. " + _REMEDIES,
        left=lambda culprit, event: (
            abs(culprit["coefficient"] - culprit["kl_coefficient"]) / abs(culprit["coefficient"])
        ),
        compared=False,
    ),
    Rule(
        "entropy",
        Kind.PART,
        "a token driven by the entropy bonus",
        "tokens driven by the entropy bonus",
        "The entropy bonus's part of its gradient is estimated to be larger than all others'.",
        "Lower entropy_coeff.",
        claim="The entropy bonus, not the policy loss, makes the gradient of these tokens",
        check="Compare `actor/pg_loss` with entropy_coeff times `actor/entropy` in the log: if the second is far "
        "smaller, the bonus is not the cause. " + _REMEDIES,
        left=lambda culprit, event: 1 - entropy_share(culprit),
        compared=False,
    ),
    Rule(
        "unlikely",
        Kind.NATURAL,
        f"a rare token (p < {UNLIKELY:g})",
        f"rare tokens (p < {UNLIKELY:g})",
        "The policy gives it a probability under 0.05: a rare token is reinforced (if its coefficient is negative) or "
        "suppressed.",
        "Such spikes come without any fault, and do not exclude one. If they disturb training, give rare tokens less "
        "weight, sample with top-p, or clip layers.",
        claim="A natural spike of rare tokens that were sampled, and are rewarded or punished",
        check=_NATURAL.format(
            "`rollout_log_prob` and `log_prob` of the culprits in spikes.jsonl differ by more than "
            "they do in other tokens, or if most steps have such spikes"
        )
        + _REMEDIES,
        left=lambda culprit, event: 1 / RARE_NORM,
    ),
    Rule(
        "punished",
        Kind.NATURAL,
        f"a confident token (p > {CONFIDENT:g}) that is pushed down",
        f"confident tokens (p > {CONFIDENT:g}) that are pushed down",
        "Its advantage is negative, and the loss pushes down a token to which the policy gives a probability over 0.9.",
        "Look at what its response was punished for, and whether right responses have the same tokens; give tokens of "
        "negative responses less weight.",
        claim=f"A natural spike of confident tokens (p > {CONFIDENT:g}) that are pushed down",
        check=_NATURAL.format("the culprits' `response` in spikes.jsonl is right, and its `reward` is low") + _REMEDIES,
    ),
    Rule(
        "layer",
        Kind.LAYER,
        "a token whose norm is mostly in one layer",
        "tokens whose norms are mostly in one layer",
        "One layer carries over half of the squared norm.",
        "Turn on LayerClip, and look at this layer's weights if it happens to all tokens.",
        claim="One layer makes most of the gradient",
        check="Compare the culprits' `layer_norms` with the event's `ordinary_layer_norms` in spikes.jsonl: if one "
        "layer is far above in all of them, look at its weights in the checkpoint." + EXAMPLE.format("bitflip"),
        left=_left_without_a_layer,
        compared=False,
        in_event=_with_its_name,
    ),
)

OTHER = Rule(
    sources.OTHER,
    Kind.LAYER,
    "a token for which no rule holds",
    "tokens for which no rule holds",
    "None of the rules holds.",
    "Look at its advantage and its text, and whether the threshold is too low for ordinary tokens.",
)

SOURCES = {rule.name: rule for rule in (*RULES, OTHER)}
