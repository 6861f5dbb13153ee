# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What the words in an event mean, in sentences for people."""

from gradloc.judge import rules as sources
from gradloc.judge.rules import UNLIKELY

# By source: the rule, and what to do.
SOURCES = {name: rule.meaning for name, rule in sources.SOURCES.items()}
ADVICE = {name: rule.advice for name, rule in sources.SOURCES.items()}

# By an event's `diagnosis`: what to look at. What it means is in the event's summary.
DIAGNOSES = {
    "tokens": "Look at what is wrong with each culprit.",
    "diffuse": "Look at the responses in the parts listed, at their advantages and at repeated text.",
    "nonfinite": "Look at the weights after the previous step, then at rewards and advantages.",
    "overflow": "The gradient scaler handles it; look at the loss scale if it happens repeatedly.",
    "incomplete": "Look at the search's error if there is one, or raise bisect_budget_steps (or _seconds).",
    "under": "The spike is not in these tokens, or τ is too high.",
    "unsearched": "Only recorded: search its bundle.",
}

# By `spike_action`: what was done, and what was done instead where that was not possible.
APPLIED = {
    "log": "Training went on as usual.",
    "skip": "The optimizer step was skipped.",
    "drop": "The gradient of the culprits found was removed from the step.",
    "stop": "The optimizer step was taken as usual; after repeated spikes, the trainer ends the run.",
}
NOT_APPLIED = {
    "log": "Training went on as usual.",
    "skip": "The step was left to the gradient scaler, which skips it after an overflow.",
    "drop": "No culprit's gradient could be removed from the step: the step's gradient was left unchanged.",
    "stop": "Training went on as usual.",
}

# By the figure in steps.jsonl: its name on the page, and what it is; in the order in which they are shown.
FIGURES = {
    "spike_margin": ("token norm over threshold", "The largest token-equivalent norm/τ: 1 is the threshold."),
    "ratio_max": ("largest ratio", "The largest importance ratio to the old policy."),
    "rollout_ratio_max": (
        "largest ratio to the rollout",
        "The largest ratio between a token's probabilities in training and in the rollout, either way round.",
    ),
    "unlikely_share": ("unlikely tokens", f"The share of tokens with a probability under {UNLIKELY:g}."),
}
