# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Facts about a culprit token: probabilities, ratios, KL estimates, and its text with the tokens around it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..measure.turns import find_turns, from_there_on, misplaced, starts_turn, turn_starts
from .writer import WINDOW, window_start

# A log-prob that differs from the rollout's by more than this is misaligned.
MISALIGNED_NATS = 1.0

# A mismatch that begins somewhere: from there on, at least so many more tokens are misaligned than not.
MISMATCH_SURPLUS = 4
# Before that, at most this share of the tokens is.
MISALIGNED_BEFORE = 0.2

# The facts that are given.
_NUMBERS: tuple[str, ...] = ("weight", "coefficient", "advantage", "log_prob", "old_log_prob", "ref_log_prob")
_NUMBERS += ("entropy", "entropy_coefficient", "rollout_log_prob", "kl_coefficient")
_FACTS = (*_NUMBERS, "after_eos", "ratio", "rollout_ratio", "sequence_ratio", "misaligned_share", "misplaced")
_FACTS += ("response_length",)


def token_facts(tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The facts about all tokens that need no gradient, which the rules of `sources` look at. No host sync.

    Args:
        tokens (Mapping[str, Tensor]): As `token_evidence` takes them.

    Returns:
        dict: By the names that `token_evidence` gives, tensors of shape (rows, response length), or (rows, 1) for what
            is the same in a whole response; floats are float64. What there is no data for is missing; `turn` is 0
            where response_mask is 0, `mismatch_start` is -1 and `mismatch_turn` 0 where there is none.
    """
    mask = tokens["response_mask"].bool()
    facts = {name: tokens[name].double() for name in _NUMBERS if name in tokens}
    if "after_eos" in tokens:
        facts["after_eos"] = tokens["after_eos"].bool()
    others = {"ratio": "old_log_prob", "rollout_ratio": "rollout_log_prob"}
    log_ratios = {ratio: facts["log_prob"] - facts[of] for ratio, of in others.items() if of in facts}
    facts |= {ratio: log_ratio.exp() for ratio, log_ratio in log_ratios.items()}
    facts["response_length"] = mask.sum(1, keepdim=True)
    if log_ratios:
        facts["sequence_ratio"] = _mean(list(log_ratios.values())[-1], mask).exp()
    if "rollout_ratio" in log_ratios:
        facts["misaligned_share"] = _mean(off_the_rollout(log_ratios["rollout_ratio"]).double(), mask)
    facts["misplaced"], facts["shift"] = misplaced(tokens)
    facts["turn"] = find_turns(mask)
    facts["mismatch_start"], facts["mismatch_turn"] = find_mismatch(tokens)
    return facts


def token_evidence(
    tokens: Mapping[str, Tensor], row: int, position: int, facts: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """The facts about one token that need no gradient.

    Args:
        tokens (Mapping[str, Tensor]): Tensors of shape (rows, response length): `response_mask`, `token_id`, `weight`,
            `coefficient`, `log_prob`, and if available `advantage`, `old_log_prob`, `ref_log_prob`, `entropy`,
            `rollout_log_prob`, `kl_coefficient` (the KL loss's part of `coefficient`) and `after_eos`.
        facts (Mapping[str, Tensor], optional): Their `token_facts`, if they are known.

    Returns:
        dict: Numbers; None if there is no data. `misaligned_share` is the fraction of the response's tokens whose
            log-prob differs from the rollout's by more than a nat, or for which the difference is NaN. `turn` counts
            from 1, and is None in a response of one turn. `misplaced` and `shift` are what `alignment.misplaced` gives,
            `response_length` the number of the response's tokens. `mismatch_start` is the index in the response, and
            `mismatch_turn` the turn, that `find_mismatch` gives.
    """
    if facts is None:
        facts = token_facts(tokens)
    here = {name: of[row, position if of.shape[1] > 1 else 0].item() for name, of in facts.items()}
    return {
        "token_id": int(tokens["token_id"][row, position]),
        **{name: here.get(name) for name in _FACTS},
        "turn": here["turn"] if facts["turn"][row].max() > 1 else None,
        "mismatch_start": here["mismatch_start"] if here["mismatch_start"] >= 0 else None,
        "mismatch_turn": here["mismatch_turn"] or None,
        "shift": here["shift"] or None,
    }


def find_after_eos(token_id: Tensor, response_mask: Tensor, eos_tokens: Collection[int]) -> Tensor:
    """Which tokens the response mask includes although the turn has ended before them.

    The rollout stops at an EOS token, so it has not sampled what follows one in the same turn. The tensors are of shape
    (rows, response length), the result bool. No host sync.
    """
    mask = response_mask.bool()
    is_end = torch.zeros_like(mask)
    for eos_token in eos_tokens:
        is_end |= token_id == eos_token
    is_end &= mask
    ends_before = is_end.cumsum(1) - is_end.long()
    # How many EOS tokens there were before the turn.
    ends_before_turn = torch.where(turn_starts(mask), ends_before, 0).cummax(1).values
    return mask & (ends_before > ends_before_turn)


def find_mismatch(tokens: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Finds the start of the mismatch between training and rollout in each response, and whether a turn begins there.

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
    surplus = torch.where(mask, from_there_on(2 * off.long() - mask.long()), 0)
    most = surplus.amax(1, keepdim=True)
    position = torch.arange(mask.shape[1], device=mask.device)
    start = torch.where(mask & (surplus == most), position, mask.shape[1] - 1).amin(1, keepdim=True)
    before = mask & (position < start)
    usual = (off & before).sum(1, keepdim=True) <= MISALIGNED_BEFORE * before.sum(1, keepdim=True)
    begins = (most >= MISMATCH_SURPLUS) & usual
    turns = find_turns(mask)
    is_at_turn = begins & starts_turn(turns, start)
    return torch.where(begins, start, nowhere), torch.where(is_at_turn, turns.gather(1, start), 0)


def off_the_rollout(difference: Tensor) -> Tensor:
    """Which tokens are misaligned: log p − log q (to the rollout's log-probs) is over a nat in size, or NaN."""
    return ~(difference.abs() <= MISALIGNED_NATS)


def response_window(values: Tensor, response_mask: Tensor, position: int) -> list[float]:
    """One value per response token in a window around a culprit, rounded to 4 significant digits.

    Values and mask are of shape (response length,); the padding after the mask's last token is left out.
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
    token = _decode(tokenizer, response[position : position + 1])
    before = _decode(tokenizer, response[max(position - 16, 0) : position])
    after = _decode(tokenizer, response[position + 1 : position + 17])
    return {"token": token, "context": f"{before}«{token}»{after}"}


def text_evidence(tokenizer: Any, prompt: Sequence[int], response: Sequence[int], position: int) -> dict[str, Any]:
    """The culprit as text, with its context.

    Args:
        tokenizer (Any): Anything with `decode(list[int], skip_special_tokens=bool) -> str`.
        prompt (Sequence[int]): Token ids without padding, as of the response.

    Returns:
        dict: What `context_evidence` gives; `prompt`; `response`; `response_tokens`, up to 512 tokens around the
            culprit, each decoded alone; `response_tokens_start`, the index of the first of them.
    """
    start = window_start(position)
    window = response[start : start + WINDOW]
    pieces = {token_id: _decode(tokenizer, [token_id]) for token_id in set(window)}
    return {
        **context_evidence(tokenizer, response, position),
        "prompt": _decode(tokenizer, prompt),
        "response": _decode(tokenizer, response),
        "response_tokens": [pieces[token_id] for token_id in window],
        "response_tokens_start": start,
    }


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over each response's tokens, shape (rows, 1); NaN for a response without any."""
    # Not a product: the padding may be NaN.
    return torch.where(mask, values, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
