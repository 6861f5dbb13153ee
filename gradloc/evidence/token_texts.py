# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A culprit token as text, with the tokens around it."""

from collections.abc import Sequence
from typing import Any

# The maximum number of tokens around a culprit whose values are kept.
WINDOW = 512


def window_start(position: int) -> int:
    """The index in the response at which a culprit's `response_…` lists begin."""
    return max(position - WINDOW // 2, 0)


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
