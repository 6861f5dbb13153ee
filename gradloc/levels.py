# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""All numbers that decide whether an identity holds, with the reason for each: docs/lab/identities.md has the figures.

A residual is compared with what is usual: the median of the run's own healthy updates, but at least the number here. No
torch: training and judge read them.
"""

# For every residual: LEVEL times the usual counts once, LEVEL² times twice, ...; with LASTS in a row, the identity is
# broken. So 64 times breaks at once, 4 times in three updates. In 300 healthy runs nothing was.
LEVEL, LASTS = 4.0, 3
# A closed form is named if it explains this part of the residual; so many of the responses are nearly all.
EXPLAINS, MOST = 0.5, 0.75
# A rollout may be late by so many updates: async trainers allow up to three.
LATE = 3

# Lower limits of the usual. Engines with the same weights: 0.005 to 0.035 nats apart in bf16, 0.02 in float8.
GAP = 0.02
# The same once a run whose rollouts are never late has shown how far its own are: in float32, with other kernels.
OWN_GAP = 6e-4
# The same engine twice: 0 in float32, under 0.01 in bf16 with other micro-batches.
SAME = 0.01
# Rows or tokens that no healthy update has, or one in a hundred by chance.
SHARE = 0.01
# Tokens that contradict exactly: one in three updates is enough.
TOKENS = 0.25
# How much the log-prob of a neighbouring token says beside that of the token itself: up to 0.03 in healthy runs.
SHIFT = 0.03
# How many differences have one sign, for each that has the other.
ONE_SIDED = 3.0
# Differences that a slope explains, over those that it leaves: up to 0.08.
SLOPE = 0.1
# Factors and sums that are 1: rounding in half precision, and what float8 gradients lose.
FACTOR = 0.05
# 1 minus the correlation of rewards and advantages in a prompt's responses: up to 0.7 for rewards that are normalized
# one by one and oppose each other (GDPO), around 1 for those of other rows.
FOLLOWING = 0.2
# (1 + c)/(1 − c) of the cosine c between a step and the gradient: −0.2 to −0.7 with Adam.
UPHILL = 0.5
# How far weights move in a step, root mean square, in learning rates: about 1 with Adam.
MOVE = 1.5

# Smaller log-probs, and larger differences, count as this in sums, so that one broken token does not make the mean.
LEAST_LOG_PROB = -10.0
# Nats that are a difference: an exact zero is no log-prob where the other engine has less.
LEAST_NATS = 0.01
# Training's log-prob of a token for which the rollout has none (an exact zero): it did not sample it.
UNSAMPLED_NATS = -2.3
# The mean difference of a response that is far.
FAR_NATS = 0.1
# For responses with so many tokens: the correlation under which two columns have no relation, and how much larger one
# after a shift is where they are moved.
ROW_TOKENS, UNRELATED, MOVED = 8, 0.5, 0.4
# Log-ratios near 0, where all losses of policy gradients have the same slope.
NEAR_NATS = 0.02
