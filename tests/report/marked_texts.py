"""Samples of which every text has a word of its own, to search for in what a tracker got."""

from __future__ import annotations

from typing import Any

# Put together here, so that a tracker that keeps a program's source has none of them from there.
WORDS = {
    name: "Sample" + name.title().replace("_", "") + "Text"
    for name in ("prompt", "response", "response_tokens", "context", "ground_truth", "data_source", "uid", "extra_info")
}


def marked(event: dict[str, Any]) -> dict[str, Any]:
    """The event with other texts. All that is left of the old ones are the tokens of its culprits.

    `extra_info` is a field that evidence does not have.
    """
    return {**event, "extra_info": WORDS["extra_info"], "culprits": [_marked(found) for found in event["culprits"]]}


def marked_clip(line: dict[str, Any]) -> dict[str, Any]:
    """The same for a clip line."""
    texts = {name: f"The {WORDS[name]} of a sample" for name in ("context", "data_source", "uid", "extra_info")}
    found = line["token_clip"]
    return {**line, "token_clip": {**found, "tokens": [token | texts for token in found["tokens"]]}}


def _marked(culprit: dict[str, Any]) -> dict[str, Any]:
    tokens = [f" {WORDS['response_tokens']}"] * len(culprit["response_tokens"])
    tokens[culprit["position"]] = culprit["token"]
    return {
        **culprit,
        **{name: f"The {word} of a sample" for name, word in WORDS.items()},
        "ground_truth": {"answer": [WORDS["ground_truth"]]},
        "response_tokens": tokens,
    }
