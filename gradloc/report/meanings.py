# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What the words in an event mean, in sentences for people."""

# By `evidence.classify`.
SOURCES = {
    "token": "The token's importance ratio is far from 1: over 2 or under ½.",
    "sequence": "The response as a whole has drifted: its mean ratio is over 1.2 or under 1/1.2.",
    "layer": "The ratios are fine, but one layer carries over half of the squared norm.",
    "nonfinite": "The token's gradient is NaN or infinite.",
    "misaligned": "Most log-probs of the response differ from the rollout's by over a nat: a bug, not a spike.",
    "unsampled": "The policy did not produce the token.",
    "advantage": "Its advantage is over five times the median of the mini-batch.",
    "weight": "Its weight in the loss is over five times the median of the mini-batch.",
    "kl": "The KL term's share of its coefficient outweighs the policy's.",
    "unlikely": "The policy gives the token a probability under 1e-3.",
    "other": "None of the rules holds.",
}

# By source: what to do.
ADVICE = {
    "token": "Look at the rollout's precision, at how off-policy training is, and at the clipping of ratios.",
    "sequence": "Do the same as for token, for whole responses.",
    "layer": "Turn on LayerClip.",
    "nonfinite": "Look at the data, the precision and the loss.",
    "misaligned": "Look for log-probs gathered at wrong positions, or other weights or temperatures in the rollout.",
    "unsampled": "Mask tokens in response_mask that the policy did not sample.",
    "advantage": "Look at the rewards of its group.",
    "weight": "Look at loss_agg_mode, and at short responses.",
    "kl": "Lower kl_loss_coef.",
    "unlikely": "Give rare tokens less weight.",
    "other": "Look at the advantages, and at the threshold itself.",
}

# By `Investigation.diagnosis`: what it means, and what to look at.
DIAGNOSES = {
    "tokens": "Single tokens are over the threshold: look at what is wrong with each of them.",
    "diffuse": "No small set of tokens explains the spike, it is the sum of many: "
    "look at the responses in the parts listed, at their advantages and at repeated text.",
    "nonfinite": "NaN or Inf is in everything, not in single tokens: "
    "look at the weights after the step before, then at rewards and advantages.",
    "overflow": "The scaled fp16 gradients overflowed, while log-probs and advantages are fine: "
    "the gradient scaler handles it; look at the loss scale if it happens again and again.",
    "incomplete": "The search ended before it had an answer: "
    "look at its error if there is one, or raise bisect_budget_steps.",
}

# By `spike_action`: what was done, and what was done instead where that was not possible.
APPLIED = {
    "log": "Training went on as usual.",
    "skip": "The optimizer step was skipped.",
    "drop": "The gradient of the culprits found was taken out of the step.",
}
NOT_APPLIED = {
    "log": "Training went on as usual.",
    "skip": "The step was left to the gradient scaler, which skips it after an overflow.",
    "drop": "No culprit's gradient could be taken out of the step: the step's gradient was left unchanged.",
}

# By the figure in steps.jsonl: its name on the page, and what it is.
FIGURES = {
    "spike_margin": ("token norm over threshold", "The largest token-equivalent norm over τ: 1 is the threshold."),
    "ratio_max": ("largest ratio", "The largest importance ratio to the old policy."),
    "ratio_p999": ("99.9% of ratios", "99.9% of the tokens' importance ratios are at most this."),
    "rollout_ratio_max": ("largest ratio to the rollout", "How far apart training and rollout are on one token."),
    "unlikely_share": ("unlikely tokens", "The share of tokens with a probability under 1e-3."),
}
