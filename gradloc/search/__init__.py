# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The search for the tokens behind a spike: what to measure next, and what the measurements mean.

A *group* is what is searched as one: one rank's micro-batch whose gradient norm is over its threshold, or, where ranks
cannot be told apart, the micro-batches of all ranks with the same index. Its *candidates* are the tokens with a
gradient. A *probe* measures the norm of the gradient of some candidates; a pass measures up to W probes, one on each
rank. `search.Search` divides a pass's probes among the groups; for each group `few_tokens` or `bisection` decides. They
make no collective call and use only numbers that all ranks share, so every rank comes to the same decisions.
"""
