# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What training sums up of each mini-batch for the judge, by name and place. No torch: the judge reads this, too.

All are sums: over tokens or responses of a rank, then over ranks, then over the mini-batches of an update.
"""

from dataclasses import dataclass

# Log-probs a and b of the same tokens. The policy's are those before the update: the old ones, unless verl's bypass
# mode took the rollout's for them. "step" is "old" in later mini-batches: how far the update's own steps have moved.
PAIRS = ("rollout", "reference", "old", "step")
SHIFTS = (-3, -2, -1, 1, 2, 3)  # by which a[t] is compared with b[t + k]
# For a pair, with d = a − b, g = policy − reference and r = a − reference. Tokens: their number; |d|, d, b, g and |r|;
# those with d over LEAST_NATS, and under −LEAST_NATS; with an exact 0 for a that b contradicts; with b under
# −LEAST_NATS, and of these with an a that is b; with the a of the token before, while b is another. The last two leave
# out each a that is at or under LEAST_LOG_PROB. Only the rollout's has g and r.
TOKENS_OF_PAIR = (
    *("tokens", "size", "d", "b", "g", "distance"),
    *("over", "under", "zero", "unsure", "same", "repeated"),
)
PRODUCTS_OF_PAIR = tuple(f"{one}*{other}" for one in "dbg" for other in "dbg")
# Responses: their number; those far apart; those nearer to the reference; those whose correlation is known, those
# without any; a², ab and b² about their means, and |d| times the position in the response from −1 to 1 ("place"); the
# tokens of those far apart, and |d|; those moved by each shift; and d[t]·b[t + k], then b[t]·b[t + k], for each shift.
ROWS_OF_PAIR = (
    *("rows", "far", "nearer", "told", "unrelated", "aa", "ab", "bb", "size*place", "far_tokens", "far_size"),
    *(f"{name} {k}" for name in ("moved", "d", "b") for k in SHIFTS),
)
_OF_PAIR = (*TOKENS_OF_PAIR, *PRODUCTS_OF_PAIR, *ROWS_OF_PAIR)
# Responses, all and with a column that is not finite.
BROKEN = ("log_prob", "old_log_prob", "ref_log_prob", "advantage", "rollout_log_prob")
# Responses that are trained, and of these those whose last sampled token is not. Tokens: trained ones; those for which
# the rollout has no log-prob, although training's is far from 0; those after the end; sampled ones (with a log-prob) of
# responses that are trained, and those of them that are.
SAMPLED = ("trained_rows", "last_lost", "trained", "unlogged", "after_end", "logged", "both")
# For coefficients c and their expected value e = −w·A·ratio, where the ratio is near 1, with the KL loss's part k, and
# z, which is e without importance weights: how many tokens there are; those with another size than e, and of these with
# another sign; those with c = 0 for the clip, and of these those on the right side; those with an importance weight of
# their own, and of these those that it corrects the right way; and the products of each two.
LOSS = ("told", "unfit", "opposite", "clipped", "clipped_right", "corrected", "along")
PRODUCTS_OF_LOSS = tuple(one + other for one in "cekz" for other in "cekz")
# Σ w·A·(log-prob now − old), and Σ |…|, of tokens that a later PPO epoch sees again.
GAINED = ("gained", "gained_size")
# The sum of weights. Whether verl's bypass mode is on, and parts of mini-batches. The part of the responses that have a
# token, and whether the mode promises a sum. Σ c·e and Σ e² of the entropy bonus's coefficients c, which should be e.
OTHERS = ("weights", "bypass", "mini_batches", "filled", "promised", "entropy_along", "entropy_size")

NAMES: tuple[str, ...] = (
    *("responses", *(f"broken {name}" for name in BROKEN)),
    *(f"sampled {name}" for name in SAMPLED),
    *(f"loss {name}" for name in (*LOSS, *PRODUCTS_OF_LOSS)),
    *(f"{pair} {name}" for pair in PAIRS for name in _OF_PAIR),
    *GAINED,
    *OTHERS,
)
OF_PAIR = len(_OF_PAIR)
# The aggregation modes that promise a sum of weights of 1: over all tokens, in the last over one of each response.
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")

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
        unmoved (int): How many of its first tokens have none, if a later one has.
        length, padding (int): Its tokens, and the positions after them.
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
    length: int = 0
    padding: int = 0
    largest: float = 0.0
