# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What training sums up of each mini-batch for the judge, by name and place, and with which limits.

No torch: the judge reads this, too.
"""

from dataclasses import dataclass

# Limits of what is summed up, in nats where they are differences of log-probs.
LARGEST = 10.0  # larger differences count as this, so that a single broken log-prob does not make a mean
STALE_RATIO = 0.5
STALE_GAP = 0.02
# Responses are far from the policy from here on.
APART_GAP = 0.1
ONE_SIDE_NATS = 0.01
# A gap is spread over many tokens if at least half of it is left when each counts for at most so many nats.
BOUNDED = 0.2
# A correlation takes larger differences, and smaller log-probs, as these: otherwise one token may make it.
CORRELATED_NATS = 1.0
LEAST_LEVEL = -5.0
# What `own_sums` gives, by place. "gap" is |rollout − policy|, "bounded" the same with at most `BOUNDED` nats a
# token, "distance" is |rollout − reference|, "moved" is |policy − reference|, and "along" the product of
# rollout − policy and policy − reference; responses are "far" whose mean gap is over `APART_GAP`, and "far_tokens"
# and "far_gap" are theirs. A response is stale if its log-probs are the reference's and not the policy's,
# fresh if it is the other way round, and unclear if neither holds although one of the two is far. "own_gap" is
# |old − now| in the update's first mini-batch, whose forward pass has the weights of the old log-probs, and "step_gap"
# in later ones: how far the update's own steps have moved. "weighted" are all tokens with a weight; those of them that
# the policy did not produce count nowhere else. "differing" have not the old log-prob for the rollout's.
SUMS = (
    *("weighted", "unsampled", "differing", "tokens", "gap", "bounded", "larger", "smaller"),
    *("difference", "difference_square", "level", "level_square", "product"),
    *("responses", "far", "far_tokens", "far_gap", "distance", "moved"),
    *("moved_square", "along"),
    *("stale", "fresh", "unclear", "stale_tokens", "stale_gap", "stale_distance"),
    *("positive", "own_tokens", "own_gap", "own_to_rollout", "own_old_to_rollout", "step_tokens", "step_gap"),
)

# What `own_columns` gives: responses; of each column, in how many of them a value is not finite; and, of responses with
# an advantage, Σ log|A|, Σ (log|A|)² and their number.
COLUMNS = ("advantage", "old_log_prob", "ref_log_prob", "log_prob")
COLUMN_SUMS = len(COLUMNS) + 4

# What `own_loss_figures` gives; "corrected" are tokens with an importance weight of the rollout's, whose mean
# |log(coefficient / expected)| is "with" that weight and "without" it; "apart" are those whose log-probs tell in which
# direction it is to correct, "along" those that it does; and "rest" is what coefficients have beside the policy loss's
# part, "kl" what the KL loss should give, of the tokens "told" where that is over the rounding error.
LOSS_FIGURES = (
    *("weights", "mode", "tokens", "low", "median", "high", "micro_batches", "filled"),
    *("corrected", "with", "without", "apart", "along", "kl_told", "kl_square", "rest_square", "kl_rest"),
)
# The aggregation modes that promise a sum of weights of 1: over all tokens, in the last over one of each response.
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")

# Of the comparison of log-probs a[t] with b[t + k].
SHIFTS = (-1, 1, -2, 2, -3, 3)
FITS = 0.6  # the moved comparison's distances have at most this share of the others
LARGEST_LOG_RATIO = 2.5
LEAST_COUNT = 5.0  # of tokens that count, for the evidence of a ratio
LEAST_GAP = 0.005  # nats, in the mean; smaller distances are no mismatch
MOSTLY = 1.5  # times as many tokens are nearer where the response is moved: a few large distances do not tell
LOST_TIMES = 5.0  # times as far apart as before, or as in other responses, where log-probs have no relation any more
# What `own_alignment` gives, of each pair.
PAIRS = ("rollout", "reference", "old")
COMPARED = ("here", "there", "size", "square", "nearer", "farther")
_OF_SHIFT = ("whole", "inside", *COMPARED)
PAIR_SUMS = (
    *("responses", "aligned"),
    *(f"{name} {shift}" for shift in SHIFTS for name in _OF_SHIFT),
    *("moved_start", "moved_at_turn", "other_row", "zero_tail", "constant_tail", "tail_of_b"),
    *("lost", "lost_start", "lost_at_turn", "lost_tokens", "lost_distance", "kept_tokens", "kept_distance"),
    *("tokens", "first", "second", "first_square", "second_square", "product"),
)
ALIGNMENT_SUMS = len(PAIRS) * len(PAIR_SUMS)

# (data-parallel rank, row in its mini-batch).
Place = tuple[int, int]


@dataclass(frozen=True)
class TrainedRow:
    """What is known of a row of an update; None where it is not known.

    Args:
        uid (str): Its prompt's.
        prompt, response (int, optional): Hashes of the token ids, on one rank.
        session_id, data_source (str, optional): verl's columns; the first tells which rows are of one trajectory.
        score, reward (float, optional): The sum of its scores, and of what its advantages are computed from.
        log_prob (float, optional): The sum of the response's old log-probs.
        advantage (float, optional): That of its first token with one.
        is_one (bool): Whether all of its tokens with an advantage have the same.
        unmoved (int): How many of its tokens have none, where these are its first, or its last; else 0.
        largest (float): The largest |A| of its tokens; NaN if one is.
    """

    uid: str
    prompt: int | None = None
    response: int | None = None
    session_id: str | None = None
    data_source: str | None = None
    score: float | None = None
    reward: float | None = None
    log_prob: float | None = None
    advantage: float | None = None
    is_one: bool = True
    unmoved: int = 0
    largest: float = 0.0
