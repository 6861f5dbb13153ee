"""An event in one sentence."""

import math
from typing import Any

import pytest

from gradloc.judge.sentences import describe

EVEN = {"layers.0": 1.0, "layers.1": 1.1, "layers.2": 0.9}
ONE_LAYER = {"layers.0": 1.0, "layers.1": 9.0, "layers.2": 1.0}


def culprit(row: int = 0, token: str | None = None) -> dict[str, Any]:
    return {"rank": 0, "row": row, "token": token}


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
ONE = "1 culprit in 1 response"
ALL = "Every micro-batch is over its threshold"
DIFFUSE = "o small set of tokens explains the spike: it is the sum of 48 tokens"
NAN = "No single token is the cause"
LAYER = "layers.1 carries 98% of the squared norm"

SENTENCES: dict[str, list[dict[str, Any]]] = {
    f"{ONE}.": [
        event(culprit()),
        # The same layer carries the norm of ordinary micro-batches.
        event(culprit(), units=[unit(**ONE_LAYER)], ordinary_layer_norms=ONE_LAYER),
        # A single micro-batch that is over its threshold says nothing about every token.
        event(culprit(), ordinary_layer_norms=None, micro_batches=1),
        event(culprit(), units=[unit(**dict.fromkeys(EVEN, math.nan))]),
        event(culprit(), diagnosis="nonfinite"),
    ],
    "1 culprit ('+') in 1 response.": [event(culprit(token="+"))],
    "3 culprits in 2 responses.": [event(culprit(1), culprit(1), culprit(2))],
    "4 culprits (mostly 'a') in 2 responses.": [event(*[culprit(i % 2, token) for i, token in enumerate("abaa")])],
    "2 culprits ('a') in 1 response.": [event(*[culprit(token="a")] * 2)],
    "2 culprits in 1 response.": [event(*[culprit(token=token) for token in "ab"])],
    f"N{DIFFUSE}; {ONE}.": [event(culprit(), diagnosis="diffuse", diffuse=[PART])],
    f"N{DIFFUSE}.".replace("sum of", "sum of over"): [event(diagnosis="diffuse", diffuse=[PART], more_diffuse=1)],
    f"{NAN}.": [event(diagnosis="nonfinite", units=[unit(**dict.fromkeys(EVEN, math.nan))])],
    f"{NAN}; NaN or infinite gradients in 3 of 30 parameters, of which the backward reaches c first.": [
        event(diagnosis="nonfinite", broken_parameters={"count": 3, "of": 30, "names": ["c", "b", "a"]})
    ],
    "The scaled fp16 gradients overflowed, while log-probs and advantages are finite.": [
        event(diagnosis="overflow", units=[unit(**dict.fromkeys(EVEN, math.inf))])
    ],
    "The search ended before it could explain the spike (rank 1: out of memory).": [
        event(diagnosis="incomplete", error="rank 1: out of memory")
    ],
    "The search ended before it could explain the spike (after 3 passes).": [event(diagnosis="incomplete")],
    f"The search ended before it could explain the spike (out of time); {ONE}.": [
        event(culprit(), diagnosis="incomplete", out_of_time=True)
    ],
    # A fault that hits every token: no micro-batch is under its threshold.
    f"{ALL}; n{DIFFUSE}; {LAYER}.": [
        event(diagnosis="diffuse", diffuse=[PART], units=[unit(**ONE_LAYER)] * 4, ordinary_layer_norms=None)
    ],
    f"{ONE}; {LAYER}, ordinarily 40%.": [
        event(culprit(), units=[unit(**ONE_LAYER)], ordinary_layer_norms={**EVEN, "layers.1": 1.1}),
    ],
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
