# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Facts about a culprit token: probabilities, ratios, KL estimates and text."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# A log-prob that differs from the rollout's by more than this is misaligned.
MISALIGNED_NATS = 1.0

# A mismatch that begins somewhere: from there on, at least so many more tokens are misaligned than not.
MISMATCH_SURPLUS = 4
# Before that, at most this share of the tokens is.
MISALIGNED_BEFORE = 0.2
# A turn begins it if it begins in one of the turn's first tokens: the first may be as likely as the sampled one.
TURN_START = 3

# The maximum number of tokens around a culprit whose values are kept.
WINDOW = 512


def token_evidence(tokens: Mapping[str, Tensor], row: int, position: int) -> dict[str, Any]:
    """The facts about one token that need no gradient.

    Args:
        tokens (Mapping[str, Tensor]): Tensors of shape (rows, response length): `response_mask`, `token_id`, `weight`,
            `coefficient`, `log_prob`, and if available `advantage`, `old_log_prob`, `ref_log_prob`, `entropy`,
            `rollout_log_prob`, `kl_coefficient` (the KL loss's part of `coefficient`) and `after_eos`.
        row (int): The row in them.
        position (int): The index in the response.

    Returns:
        dict: Numbers; None if there is no data. `misaligned_share` is the fraction of the response's tokens whose
            log-prob differs from the rollout's by more than a nat, or for which the difference is NaN. `turn` counts
            from 1, and is None in a response of one turn. `mismatch_start` is the index in the response, and
            `mismatch_turn` the turn, that `find_mismatch` gives.
    """

    def value(name: str) -> float | None:
        return float(tokens[name][row, position]) if name in tokens else None

    def difference(name: str) -> Tensor | None:
        """log p − log q over the response's tokens, shape (n,)."""
        if name not in tokens:
            return None
        mask = tokens["response_mask"][row].bool()
        return (tokens["log_prob"][row].double() - tokens[name][row].double())[mask]

    old, rollout = difference("old_log_prob"), difference("rollout_log_prob")
    reference = rollout if rollout is not None else old
    after_eos = value("after_eos")
    turns = find_turns(tokens["response_mask"][row : row + 1])
    start, turn = (int(found) for found in find_mismatch({name: of[row : row + 1] for name, of in tokens.items()}))
    names = ("advantage", "log_prob", "old_log_prob", "ref_log_prob", "entropy", "rollout_log_prob")
    return {
        "token_id": int(tokens["token_id"][row, position]),
        "weight": value("weight"),
        "coefficient": value("coefficient"),
        **{name: value(name) for name in names},
        "kl_coefficient": value("kl_coefficient"),
        "after_eos": None if after_eos is None else bool(after_eos),
        "ratio": _ratio(value("log_prob"), value("old_log_prob")),
        "rollout_ratio": _ratio(value("log_prob"), value("rollout_log_prob")),
        "sequence_ratio": None if reference is None else _exp(float(reference.mean())),
        "misaligned_share": None if rollout is None else float(off_the_rollout(rollout).double().mean()),
        "turn": int(turns[0, position]) if turns.max() > 1 else None,
        "mismatch_start": start if start >= 0 else None,
        "mismatch_turn": turn or None,
    }


def response_evidence(tokens: Mapping[str, Tensor], row: int, position: int) -> dict[str, Any]:
    """A token's suspicion, and what is known of the tokens around it: `response_suspicion` and `response_kl`.

    Args:
        tokens (Mapping[str, Tensor]): As `token_evidence` takes them, with `suspicion`.
        row (int): The row in them.
        position (int): The index in the response.
    """
    suspicion = tokens["suspicion"][row]
    return {
        "suspicion": float(suspicion[position]),
        "response_suspicion": response_window(suspicion, tokens["response_mask"][row], position),
        "response_kl": response_kl(tokens, row, position),
    }


def find_after_eos(token_id: Tensor, response_mask: Tensor, eos_tokens: Collection[int]) -> Tensor:
    """Which tokens the response mask includes although the turn has ended before them.

    The rollout stops at an EOS token, so it has not sampled what follows one in the same turn. No host sync.

    Args:
        token_id (Tensor): Shape (rows, response length).
        response_mask (Tensor): Same shape.
        eos_tokens (Collection[int]): The ids at which the rollout stops.

    Returns:
        Tensor: bool, same shape.
    """
    mask = response_mask.bool()
    is_end = torch.zeros_like(mask)
    for eos_token in eos_tokens:
        is_end |= token_id == eos_token
    is_end &= mask
    ends_before = is_end.cumsum(1) - is_end.long()
    # How many EOS tokens there were before the turn.
    ends_before_turn = torch.where(_turn_starts(mask), ends_before, 0).cummax(1).values
    return mask & (ends_before > ends_before_turn)


def find_turns(response_mask: Tensor) -> Tensor:
    """The turn of each token, from 1; 0 where response_mask is 0. No host sync.

    A turn is a run of tokens with response_mask 1. Between turns, tool output or a user's message has response_mask 0.

    Args:
        response_mask (Tensor): Shape (rows, response length).

    Returns:
        Tensor: int64, same shape.
    """
    mask = response_mask.bool()
    return torch.where(mask, _turn_starts(mask).cumsum(1), 0)


def _turn_starts(mask: Tensor) -> Tensor:
    """The first token of each turn, bool of the mask's shape."""
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    return starts


def find_mismatch(tokens: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Where the mismatch between training and rollout begins in each response, and whether a turn begins there.

    It begins with the token from which on the misaligned tokens outnumber the others by most, and at least by
    `MISMATCH_SURPLUS`, if most tokens before it are not misaligned.

    Args:
        tokens (Mapping[str, Tensor]): `response_mask`, `log_prob` and, if available, `rollout_log_prob`, of shape
            (rows, response length).

    Returns:
        tuple[Tensor, Tensor]: int64 of shape (rows, 1): the first token's index in the response, -1 where the mismatch
            has no beginning; and the number of the turn, of those after the first, that begins with it, else 0.
    """
    mask = tokens["response_mask"].bool()
    nowhere = torch.full((len(mask), 1), -1, device=mask.device)
    if "rollout_log_prob" not in tokens or not mask.shape[1]:
        return nowhere, torch.zeros_like(nowhere)
    difference = tokens["log_prob"].double() - tokens["rollout_log_prob"].double()
    off = off_the_rollout(difference) & mask
    surplus = (2 * off.long() - mask.long()).flip(1).cumsum(1).flip(1)
    surplus = torch.where(mask, surplus, 0)
    most = surplus.amax(1, keepdim=True)
    position = torch.arange(mask.shape[1], device=mask.device)
    start = torch.where(mask & (surplus == most), position, mask.shape[1] - 1).amin(1, keepdim=True)
    before = mask & (position < start)
    usual = (off & before).sum(1, keepdim=True) <= MISALIGNED_BEFORE * before.sum(1, keepdim=True)
    begins = (most >= MISMATCH_SURPLUS) & usual
    turns = find_turns(mask)
    turn = turns.gather(1, start)
    place_in_turn = (before & (turns == turn)).sum(1, keepdim=True)
    is_at_turn = begins & (turn > 1) & (place_in_turn < TURN_START)
    return torch.where(begins, start, nowhere), torch.where(is_at_turn, turn, 0)


def off_the_rollout(difference: Tensor) -> Tensor:
    """Which tokens are misaligned: log p − log q (to the rollout's log-probs) is over a nat in size, or NaN."""
    return ~(difference.abs() <= MISALIGNED_NATS)


def window_start(position: int) -> int:
    """The index in the response at which a culprit's `response_…` lists begin."""
    return max(position - WINDOW // 2, 0)


def response_window(values: Tensor, response_mask: Tensor, position: int) -> list[float]:
    """One value per response token in a window around a culprit, rounded to 4 significant digits.

    Args:
        values (Tensor): The values, shape (response length,).
        response_mask (Tensor): Same shape; the padding after its last token is left out.
        position (int): The culprit's index in the response.
    """
    start = window_start(position)
    tokens = response_mask.nonzero()
    stop = min(start + WINDOW, int(tokens.max()) + 1 if len(tokens) else 0)
    return [float(f"{value:.4g}") for value in values[start:stop].tolist()]


def response_kl(tokens: Mapping[str, Tensor], row: int, position: int) -> dict[str, list[float]] | None:
    """KL estimates to the reference policy for each response token in a window around a culprit.

    With r = log p_ref − log p: k1 = −r, k2 = r²/2, k3 = e^r − 1 − r (Schulman, "Approximating KL Divergence").

    Returns:
        dict: Lists like those of `response_window`; None without a reference policy.
    """
    if "ref_log_prob" not in tokens:
        return None
    mask = tokens["response_mask"][row]
    r = (tokens["ref_log_prob"][row].double() - tokens["log_prob"][row].double()) * mask
    estimates = {"k1": -r, "k2": r.square() / 2, "k3": r.expm1() - r}
    return {name: response_window(values, mask, position) for name, values in estimates.items()}


def context_evidence(tokenizer: Any, response: Sequence[int], position: int) -> dict[str, str]:
    """A token of a response as text, and its `context`: up to 16 tokens on either side with the token in «»."""

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    token = decode(response[position : position + 1])
    before = decode(response[max(position - 16, 0) : position])
    after = decode(response[position + 1 : position + 17])
    return {"token": token, "context": f"{before}«{token}»{after}"}


def text_evidence(tokenizer: Any, prompt: Sequence[int], response: Sequence[int], position: int) -> dict[str, Any]:
    """The culprit as text, with its context.

    Args:
        tokenizer (Any): Anything with `decode(list[int], skip_special_tokens=bool) -> str`.
        prompt (Sequence[int]): The prompt's token ids without padding.
        response (Sequence[int]): The response's token ids without padding.
        position (int): The culprit's index in the response.

    Returns:
        dict: `token`; `context`, up to 16 tokens on either side with the culprit in «»; `prompt`; `response`;
            `response_tokens`, up to 512 tokens around the culprit, each decoded alone; `response_tokens_start`, the
            index of the first of them.
    """

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    start = window_start(position)
    window = response[start : start + WINDOW]
    pieces = {token_id: decode([token_id]) for token_id in set(window)}
    return {
        **context_evidence(tokenizer, response, position),
        "prompt": decode(prompt),
        "response": decode(response),
        "response_tokens": [pieces[token_id] for token_id in window],
        "response_tokens_start": start,
    }


def _ratio(log_prob: float | None, other: float | None) -> float | None:
    return None if log_prob is None or other is None else _exp(log_prob - other)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf if x == x else x
