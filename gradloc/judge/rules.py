# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a culprit's sources mean: the one table that verdicts, report and documentation use."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..sources import CONFIDENT, OTHER, UNLIKELY


@dataclass(frozen=True)
class Rule:
    """What a source means, and all that is said of it.

    Args:
        what (str): A token for which it holds, without the article.
        meaning (str): When it holds, in one sentence.
        advice (str): What to do about it, in one sentence.
        claim (str): Of a broken equality of single tokens, what is wrong, the start of a sentence; empty for a fact.
        check (str): How to check that in the run's own data.
    """

    what: str
    meaning: str
    advice: str
    claim: str = ""
    check: str = ""

    def of(self, count: int) -> str:
        """What so many tokens are, with the verb."""
        return f"is a {self.what}" if count == 1 else f"are {self.what.replace('token', 'tokens', 1)}"


_RATIOS = (
    "Compare the culprits' `rollout_log_prob`, `old_log_prob` and `log_prob` in spikes.jsonl: the first two differ by "
    "the engines (precision, temperature, old weights), the last two by the updates since the rollout."
)

# By source, most specific first: broken numbers, then broken equalities of tokens, then what they may have in common.
SOURCES: Mapping[str, Rule] = {
    "nonfinite": Rule(
        "token with a NaN or infinite gradient",
        "The token's gradient is NaN or infinite.",
        "Look at the column that is not finite first: the rest follows from it.",
        "Single tokens have NaN or infinite gradients",
        "Find which of the culprit's `advantage`, `log_prob`, `old_log_prob` and `weight` in spikes.jsonl is NaN or "
        "infinite; if none is, look at the weights, and before the optimizer step at the gradients of the event's "
        "`broken_parameters`, the first one first.",
    ),
    "unsampled": Rule(
        "token that the policy did not produce",
        "The policy did not sample it: it is after the turn's end (unless training confirms the rollout's log-prob), "
        "or its rollout log-prob is missing, or is exactly 0 while its probability in training is under 0.1.",
        "Set response_mask to 0 for tokens that were added later: EOS tokens, templates, tool output.",
        "Tokens that the policy did not produce are trained on",
        "Compare `response_mask` in the culprit's `row` with the rollout's token ids: it should be 1 for these alone.",
    ),
    "retokenized": Rule(
        "token in or after a turn where the mismatch with the rollout begins",
        "It is in or after a turn where the mismatch with the rollout begins: log-probs agree up to one of the turn's "
        "first three tokens, and most of the following ones are NaN or over 1 nat apart.",
        "Train on the token ids that were sampled: do not decode turns and encode them again; check the chat template.",
        "The mismatch between training and rollout begins at a turn boundary",
        "Compare `responses` in the culprit's `row` from `mismatch_start` on with the rollout's token ids.",
    ),
    "misaligned": Rule(
        "misaligned token, whose response has the log-probs of others",
        "The response's rollout or reference log-probs fit the policy's far better at other positions; or, in a "
        "response of at least 6 tokens, over half are NaN or over 1 nat from the rollout's.",
        "Look at where log-probs are gathered, sliced or padded, and at the rollout's weights and temperature.",
        "Log-probs of whole responses are far from training's",
        "Compare `rollout_log_prob`, `old_log_prob` and `ref_log_prob` of the culprit's row, token by token: `shift` "
        "in spikes.jsonl says by how many positions they fit. `gradloc replay BUNDLE` compares them with those of "
        "saved weights.",
    ),
    "token": Rule(
        "token whose importance ratio is far from 1",
        "Its ratio, to the old policy or to the rollout's, is over 2, under 1/2 or NaN.",
        "Use the same precision in rollout and training, train less off-policy, or clip or mask such ratios.",
        "The importance ratios of single tokens are far from 1",
        _RATIOS,
    ),
    "sequence": Rule(
        "token whose response has a mean importance ratio far from 1",
        "The geometric mean of the response's ratios is over 1.2, under 1/1.2 or NaN.",
        "Do the same as for token, for whole responses: mask those whose mean ratio is far from 1.",
        "The mean importance ratios of whole responses are far from 1",
        _RATIOS,
    ),
    "advantage": Rule(
        "token with an outlying advantage",
        "Its advantage is over 2.5 times the median of the other responses' non-zero ones.",
        "Look at the rewards of its group: clip outliers, and do not divide by the standard deviation, which gives "
        "nearly equal rewards and groups with a single right or wrong response more weight.",
    ),
    "weight": Rule(
        "token with an outlying weight in the loss",
        "Its weight in the loss is over 5 times the median of the mini-batch.",
        "Filter out very short responses, and fill micro-batches evenly: a mean over a sequence, or over the tokens "
        "of a micro-batch, gives few tokens large weights. With loss_agg_mode=token-mean, only the second does.",
    ),
    "kl": Rule(
        "token driven by the KL loss",
        "The KL loss's part of its coefficient is larger than the policy loss's.",
        "Lower kl_loss_coef, or use a KL estimator with a smaller gradient far from the reference (kl_loss_type).",
    ),
    "entropy": Rule(
        "token driven by the entropy bonus",
        "The entropy bonus's part of its gradient is estimated to be larger than all others'.",
        "Lower entropy_coeff.",
    ),
    "unlikely": Rule(
        f"rare token (p < {UNLIKELY:g})",
        "Its probability is under 0.05. It is reinforced if its coefficient is negative, else suppressed.",
        "If such spikes disturb training, give rare tokens less weight, sample with top-p, or clip layers.",
    ),
    "punished": Rule(
        f"punished, confident token (p > {CONFIDENT:g})",
        "Its advantage is negative, and the loss pushes it down although its probability is over 0.9.",
        "Look at what its response was punished for, and whether right responses have the same tokens.",
    ),
    "layer": Rule(
        "token whose norm is mostly in one layer",
        "One layer carries over half of the squared norm.",
        "Turn on LayerClip, and look at this layer's weights if it happens to all tokens.",
    ),
    OTHER: Rule(
        "token for which no rule holds",
        "None of the rules holds.",
        "Look at its advantage and its text, and whether the threshold is too low for ordinary tokens.",
    ),
}
# Those of importance ratios, which the update's own steps move, too.
RATIOS = ("token", "sequence")
# What is to be repaired where it comes from: a remedy only covers it up.
FAULTS = [name for name, rule in SOURCES.items() if rule.claim and name not in RATIOS]
