"""An event in one sentence."""

import math
from typing import Any

import pytest

from gradloc.judge.sentences import describe

EVEN = {"layers.0": 1.0, "layers.1": 1.1, "layers.2": 0.9}
ONE_LAYER = {"layers.0": 1.0, "layers.1": 9.0, "layers.2": 1.0}


def culprit(source: str = "unlikely", row: int = 0, advantage: float | None = 1.0, **changes: Any) -> dict[str, Any]:
    return {"sources": [source], "rank": 0, "row": row, "advantage": advantage, **changes}


def unit(**layer_norms: float) -> dict[str, Any]:
    return {"layer_norms": layer_norms or EVEN}


def event(*culprits: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "diagnosis": "tokens",
        "culprits": list(culprits),
        "diffuse": [],
        "micro_batches": 4,
        "units": [unit()],
        "ordinary_layer_norms": EVEN,
        "passes": 3,
        "error": None,
        **changes,
    }


PART = {"tokens": 48, "rows": [8, 9, 11]}
RARE = "rare tokens (p < 0.05)"
ONE = "The one culprit is a rare token (p < 0.05), in 1 response with a positive advantage"
ALL = "Every micro-batch is over its threshold"
DIFFUSE = "o small set of tokens explains the spike: it is the sum of 48 tokens of 3 responses"
NAN = "No single token is the cause: NaN or Inf is in the log-probs or gradients of all of them"
BROKEN = "The one culprit is a token with a NaN or infinite gradient"
LAYER = "layers.1 carries 98% of the squared norm"

SENTENCES: dict[str, list[dict[str, Any]]] = {
    f"{ONE}.": [
        event(culprit()),
        # The same layer carries the norm of ordinary micro-batches.
        event(culprit(), units=[unit(**ONE_LAYER)], ordinary_layer_norms=ONE_LAYER),
        # A single micro-batch that is over its threshold says nothing about every token.
        event(culprit(), ordinary_layer_norms=None, micro_batches=1),
    ],
    (
        "All 3 culprits are tokens in or after a turn where the mismatch with the rollout begins, in 3 "
        "responses with positive advantages; the mismatch begins with the first token after turn 1 in 2 of 3 "
        "responses."
    ): [event(*[culprit("retokenized", row, mismatch_turn=turn) for row, turn in enumerate([2, 2, 4])])],
    "The one culprit is a rare token (p < 0.05) ('+'), in 1 response with a negative advantage (reward 0).": [
        event(culprit(advantage=-1.0, token="+", reward=0.0))
    ],
    f"89% of 38 culprits are {RARE}, in 2 responses with positive advantages.": [
        event(*[culprit(row=i % 2) for i in range(34)], *[culprit("other", 5)] * 4)
    ],
    f"2 of 4 culprits are {RARE}, in 2 responses, 1 with a positive and 1 with a negative advantage.": [
        event(culprit(row=1), culprit("token", 1), culprit("layer", 2), culprit(row=2, advantage=-0.5))
    ],
    (
        "All 3 culprits are tokens with an outlying advantage (2 of them 'a'), in 1 response with a positive "
        "advantage (reward 100)."
    ): [event(*[culprit("advantage", 3, 99.0, token=token, reward=100.0) for token in ("a", "b", "a")])],
    f"{BROKEN}, in 1 response.": [
        event(culprit("nonfinite", advantage=math.nan)),
        event(culprit("nonfinite", advantage=None), units=[unit(**dict.fromkeys(EVEN, math.nan))]),
    ],
    f"N{DIFFUSE}; of the tokens that are over the threshold alone, t{ONE[1:]}.": [
        event(culprit(), diagnosis="diffuse", diffuse=[PART])
    ],
    f"N{DIFFUSE}.".replace("sum of", "sum of over").replace("of 3", "of over 3"): [
        event(diagnosis="diffuse", diffuse=[PART], more_diffuse=1)
    ],
    f"{NAN}.": [event(diagnosis="nonfinite", units=[unit(**dict.fromkeys(EVEN, math.nan))])],
    f"{NAN}; NaN or infinite gradients in 3 of 30 parameters, of which the backward reaches c first.": [
        event(diagnosis="nonfinite", broken_parameters={"count": 3, "of": 30, "names": ["c", "b", "a"]})
    ],
    "The scaled fp16 gradients overflowed, while log-probs and advantages are finite.": [
        event(diagnosis="overflow", units=[unit(**dict.fromkeys(EVEN, math.inf))])
    ],
    "The search ended after 3 passes without a result (rank 1: out of memory).": [
        event(diagnosis="incomplete", error="rank 1: out of memory")
    ],
    f"{ONE}, and the search ended before it could explain the spike.": [event(culprit(), diagnosis="incomplete")],
    # A fault that hits every token: no micro-batch is under its threshold.
    f"{ALL}; n{DIFFUSE}; {LAYER}.": [
        event(diagnosis="diffuse", diffuse=[PART], units=[unit(**ONE_LAYER)] * 4, ordinary_layer_norms=None)
    ],
    (
        "The one culprit is a token whose norm is mostly in one layer, in 1 response with a positive advantage; "
        "layers.1 carries 98% of the squared norm, ordinarily 40%."
    ): [event(culprit("layer"), units=[unit(**ONE_LAYER)])],
    # The layer that has gained most, not the one that carries most.
    f"{ONE}; b carries 42% of the squared norm, ordinarily 1%.": [
        event(culprit(), units=[unit(a=7.0, b=6.0)], ordinary_layer_norms={"a": 9.0, "b": 1.0})
    ],
    "A drill: the planted token was found, 1 extra pass.": [
        event(culprit(), drill={"planted": {"rank": 0, "row": 1, "position": 2}, "found": True, "passes": 1})
    ],
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_an_event_in_one_sentence(sentence: str) -> None:
    for found in SENTENCES[sentence]:
        assert describe(found) == sentence
