"""Layers that have another gradient in a replay than in training."""

import math
from typing import Any

import pytest

from gradloc_tools.replay.verdict import layers_apart_in_words

NAMES = ("embed_tokens", "layers.0", "layers.1", "layers.2", "layers.3", "norm")


def layers(
    *factors: float | None, replayed: tuple[float, ...] = (4.0, 3.0, 2.0, 1.0, 1.0, 0.5)
) -> list[dict[str, Any]]:
    """Those of a result, with how much larger the recorded norms are than the replayed ones; None: not recorded."""
    return [
        {"layer": name, "norm": None if factor is None else factor * norm, "replayed": norm}
        for name, norm, factor in zip(NAMES, replayed, factors, strict=True)
    ]


@pytest.mark.parametrize(
    ("found", "names", "factor"),
    [
        (layers(20.0, 100.0, 30.0, 1.0, 1.0, 1.0), "3 of 6 layers: embed_tokens, layers.0, layers.1", "100"),
        (layers(1.0, 1.0, 0.01, 1.1, 1.0, 1.0), "1 of 6 layers: layers.1", "0.01"),
        (layers(9.0, 9.5, 9.0, 9.0, 1.0, 1.0), "4 of 6 layers: the last ones are layers.0, layers.1, layers.2", "9.5"),
        (layers(2.0, 2.0, 1.0, None, None, 1.0), "2 of 4 layers: embed_tokens, layers.0", "2"),
    ],
)
def test_layers_with_other_norms_are_named(found: list[dict[str, Any]], names: str, factor: str) -> None:
    (sentence,) = layers_apart_in_words(found)
    assert f"in {names} (" in sentence and f": {factor} times as large in training)" in sentence
    assert f"at {names.split()[-1]} first" in sentence and "`--switches`" in sentence


@pytest.mark.parametrize(
    "found",
    [
        [],
        layers(1.0, 1.4, 0.7, 1.0, 1.0, 1.0),
        layers(3.0, 3.0, 3.0, 3.0, 3.0, 3.0),
        layers(5.0, 1.0, 1.0, 1.0, 1.0, math.nan),
        layers(1.0, 1.0, 1.0, 1.0, 1.0, 2.0, replayed=(4.0, 3.0, 2.0, 1.0, 1.0, 1e-3)),
    ],
    ids=["nothing", "rounding", "all", "nan", "small"],
)
def test_the_same_norms_in_all_layers_or_others_in_all_say_nothing(found: list[dict[str, Any]]) -> None:
    assert layers_apart_in_words(found) == []
