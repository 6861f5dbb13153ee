# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a culprit's sources mean: the one table that verdicts, report and documentation use."""

from collections.abc import Mapping
from typing import NamedTuple

from ..sources import CONFIDENT, OTHER, UNLIKELY


class Rule(NamedTuple):
    """What a source means, and all that is said of it."""

    claim: str  # what is true of the tokens, the start of a sentence
    meaning: str  # when it holds for a token, in one sentence
    advice: str  # what to do about it, in one sentence
    check: str = ""  # of a broken equality, how to check that in the run's own data; empty for a fact


# What to do about importance ratios, and how to check them.
_OF_RATIOS = (
    "Use the same precision in rollout and training, train less off-policy, or clip or mask such ratios.",
    "Compare the culprits' `rollout_log_prob`, `old_log_prob` and `log_prob` in spikes.jsonl: the first two differ by "
    "the engines (precision, temperature, old weights), the last two by the updates since the rollout.",
)

# By source, most specific first: broken numbers, then broken equalities of tokens, then what they may have in common.
SOURCES: Mapping[str, Rule] = {
    "nonfinite": Rule(
        "Single tokens have NaN or infinite gradients",
        "The token's gradient is NaN or infinite.",
        "Look at the column that is not finite first: the rest follows from it.",
        "If a culprit's other figures in spikes.jsonl are finite, look at the weights, and at `broken_parameters`.",
    ),
    "unsampled": Rule(
        "Tokens that the policy did not produce are trained on",
        "The policy did not sample it: it is after the turn's end (unless training confirms the rollout's log-prob), "
        "or its rollout log-prob is missing, or is exactly 0 while its probability in training is under 0.1.",
        "Set response_mask to 0 for tokens that were added later: EOS tokens, templates, tool output.",
        "Compare `response_mask` in the culprit's `row` with the rollout's token ids: it should be 1 for these alone.",
    ),
    "retokenized": Rule(
        "The mismatch between training and rollout begins at a turn boundary",
        "It is in or after a turn where the mismatch with the rollout begins: log-probs agree up to one of the turn's "
        "first three tokens, and most of the following ones are NaN or over 1 nat apart.",
        "Train on the token ids that were sampled: do not decode turns and encode them again; check the chat template.",
        "Compare `responses` in the culprit's `row` from `mismatch_start` on with the rollout's token ids.",
    ),
    "misaligned": Rule(
        "Log-probs of whole responses are far from training's",
        "The response's rollout or reference log-probs fit the policy's far better at other positions; or, in a "
        "response of at least 6 tokens, over half are NaN or over 1 nat from the rollout's.",
        "Look at where log-probs are gathered, sliced or padded, and at the rollout's weights and temperature.",
        "`shift` in spikes.jsonl says by how many positions the log-probs in the culprit's `row` are moved; "
        "`gradloc replay BUNDLE` compares them with those of saved weights.",
    ),
    "token": Rule(
        "The importance ratios of single tokens are far from 1",
        "Its ratio, to the old policy or to the rollout's, is over 2, under 1/2 or NaN.",
        *_OF_RATIOS,
    ),
    "sequence": Rule(
        "The mean importance ratios of whole responses are far from 1",
        "The geometric mean of the response's ratios is over 1.2, under 1/1.2 or NaN.",
        *_OF_RATIOS,
    ),
    "advantage": Rule(
        "The advantages are outliers",
        "Its advantage is over 2.5 times the median of the other responses' non-zero ones.",
        "Clip the rewards, or do not divide by their deviation: it is small where nearly all of a group are equal.",
    ),
    "weight": Rule(
        "The weights in the loss are outliers",
        "Its weight in the loss is over 5 times the median of the mini-batch.",
        "Fill micro-batches evenly, and filter out very short responses or set loss_agg_mode=token-mean.",
    ),
    "kl": Rule(
        "The KL loss drives the tokens",
        "The KL loss's part of its coefficient is larger than the policy loss's.",
        "Lower kl_loss_coef, or use a KL estimator with a smaller gradient far from the reference (kl_loss_type).",
    ),
    "entropy": Rule(
        "The entropy bonus drives the tokens",
        "The entropy bonus's part of its gradient is estimated to be larger than all others'.",
        "Lower entropy_coeff.",
    ),
    "unlikely": Rule(
        f"The tokens are rare, with p < {UNLIKELY:g}",
        "Its probability is under 0.05. It is reinforced if its coefficient is negative, else suppressed.",
        "If such spikes disturb training, give rare tokens less weight, sample with top-p, or clip layers.",
    ),
    "punished": Rule(
        f"Confident tokens, with p > {CONFIDENT:g}, are punished",
        "Its advantage is negative, and the loss pushes it down although its probability is over 0.9.",
        "Look at what its response was punished for, and whether right responses have the same tokens.",
    ),
    "layer": Rule(
        "The norm is mostly in one layer",
        "One layer carries over half of the squared norm.",
        "Turn on LayerClip, and look at this layer's weights if it happens to all tokens.",
    ),
    OTHER: Rule(
        "No rule holds for the tokens",
        "None of the rules holds.",
        "Look at its advantage and its text, and whether the threshold is too low for ordinary tokens.",
    ),
}
# What is to be repaired where it comes from: a remedy only covers it up. Ratios move by the update's own steps, too.
FAULTS = [name for name, rule in SOURCES.items() if rule.check and rule.check not in _OF_RATIOS]
