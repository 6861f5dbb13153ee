"""What looks wrong with a culprit: the rules, on facts from tensors, and their order."""

import math
import statistics
from typing import Any

import pytest
import torch
from notation import cases

from gradloc.evidence.ordinary import token_medians
from gradloc.evidence.token_facts import find_after_eos, find_mismatch, response_kl, token_evidence
from gradloc.judge.rules import SOURCES
from gradloc.measure.micro_batch import MicroBatch
from gradloc.sources import CONFIDENT, HOLDS, UNLIKELY, classify
from gradloc.tools import schema

MEDIANS = {"median_advantage": 1.0, "median_weight": 0.1}
LAYERS = {"a": 1.0, "b": 1.0, "c": 1.0}
POSITION = 1


def tokens_of(**changes: list[float]) -> dict[str, torch.Tensor]:
    """A response of three tokens, three times over, and padding."""
    values = {
        "response_mask": [1.0, 1.0, 1.0, 0.0],
        "token_id": [5, 6, 7, 0],
        "weight": [0.1, 0.1, 0.1, 0.0],
        "coefficient": [0.1, -0.1, 0.1, 0.0],
        "advantage": [1.0, 1.0, -1.0, 0.0],
        "log_prob": [-1.0, -2.0, -0.5, 0.0],
        **changes,
    }
    return {name: torch.tensor([row[:3] * 3 + row[3:]]) for name, row in values.items()}


def facts(**changes: list[float]) -> dict[str, Any]:
    """A culprit in such a response, as `token_evidence` makes it."""
    return {"grad_norm": 100.0, "layer_norms": LAYERS, **token_evidence(tokens_of(**changes), 0, POSITION)}


def here(value: float, around: float = 0.0) -> list[float]:
    """A row of values with one at the culprit's position."""
    return [around if position != POSITION else value for position in range(3)] + [0.0]


def test_token_evidence_has_what_there_is_and_invents_nothing() -> None:
    found = facts(old_log_prob=[-1.0, -2.5, -0.5, 0.0], advantage=[1.0, 2.0, 3.0, 0.0])
    assert (found["token_id"], found["advantage"], found["coefficient"]) == (6, 2.0, pytest.approx(-0.1))
    assert found["ratio"] == pytest.approx(math.exp(0.5))
    assert found["sequence_ratio"] == pytest.approx(math.exp(0.5 / 3))  # padding does not count
    for name in ("ref_log_prob", "entropy", "rollout_log_prob", "rollout_ratio", "misaligned_share"):
        assert found[name] is None
    found = facts(rollout_log_prob=[-1.0, -4.0, -0.5, 0.0])
    assert found["rollout_ratio"] == pytest.approx(math.exp(2)) and found["ratio"] is None
    assert found["misaligned_share"] == pytest.approx(1 / 3)
    found = facts(rollout_log_prob=[math.nan, -4.0, -0.5, math.nan])
    assert found["misaligned_share"] == pytest.approx(2 / 3)  # as the metric counts
    # The KL estimates of the response, without padding.
    found = response_kl(tokens_of(ref_log_prob=[-1.0, -1.0, -2.5, 7.0]), 0, POSITION)
    assert found["k1"] == [0.0, -1.0, 2.0] * 3 and found["k2"] == [0.0, 0.5, 2.0] * 3
    assert found["k3"] == pytest.approx([0.0, math.e - 2, math.exp(-2) + 1] * 3, rel=1e-3)
    assert response_kl(tokens_of(), 0, POSITION) is None


CONFIDENT_LOG = math.log(CONFIDENT)
# Rollout log-probs as those of the training.
SAME = [-1.0, -2.0, -0.5, 0.0]


@cases(
    "changes sources",
    ({}, ["other"]),
    # Over half of the response is off by more than a nat; half is not over half.
    ({"rollout_log_prob": [-2.1, -3.1, -0.5, 0.0]}, ["misaligned", "token", "sequence"]),
    ({"rollout_log_prob": [-1.0, -3.1, -0.5, 0.0]}, ["token", "sequence"]),
    # Behind the end of the turn.
    ({"after_eos": here(1.0)}, ["unsampled"]),
    ({"after_eos": here(1.0), "rollout_log_prob": here(0.0, -1.0)}, ["unsampled", "token", "sequence"]),
    # A rollout that goes on behind an end token, and says with which probability, has sampled the token.
    ({"after_eos": here(1.0), "rollout_log_prob": SAME}, ["other"]),
    # Not sampled: no log-prob, or 0 where the token is all but impossible.
    ({"rollout_log_prob": [-1.0, math.nan, -0.5, 0.0]}, ["unsampled", "token", "sequence"]),
    (
        {"log_prob": here(-7.0, -1.0), "rollout_log_prob": here(0.0, -1.0)},
        ["unsampled", "token", "sequence", "unlikely"],
    ),
    ({"log_prob": here(-0.1, -1.0), "rollout_log_prob": here(0.0, -1.0)}, ["other"]),
    ({"advantage": here(-2.6, 1.0)}, ["advantage"]),
    ({"advantage": here(2.4, 1.0)}, ["other"]),
    ({"weight": here(0.51, 0.1)}, ["weight"]),
    ({"weight": here(0.49, 0.1)}, ["other"]),
    ({"coefficient": here(-0.1), "kl_coefficient": here(-0.06)}, ["kl"]),
    ({"coefficient": here(-0.1), "kl_coefficient": here(-0.04)}, ["other"]),
    # The KL loss pulls against the policy loss, and is larger.
    ({"coefficient": here(0.01), "kl_coefficient": here(0.11)}, ["kl"]),
    # 0.1·(1 − e⁻²) = 0.086 against 0.1·0.9 and 0.1·0.8.
    ({"entropy": here(0.9), "entropy_coefficient": here(-0.1)}, ["entropy"]),
    ({"entropy": here(0.8), "entropy_coefficient": here(-0.1)}, ["other"]),
    ({"old_log_prob": [-1.0, -2.7, -0.5, 0.0]}, ["token", "sequence"]),
    ({"old_log_prob": [-1.7, -2.7, 0.9, 0.0]}, ["token"]),
    ({"old_log_prob": [-1.2, -2.2, -0.7, 0.0]}, ["sequence"]),
    ({"log_prob": here(math.log(UNLIKELY) - 0.01, -1.0)}, ["unlikely"]),
    ({"log_prob": here(math.log(UNLIKELY) + 0.01, -1.0)}, ["other"]),
    # Pushed down although likely.
    ({"log_prob": here(CONFIDENT_LOG + 0.01), "advantage": here(-1.0), "coefficient": here(0.1)}, ["punished"]),
    ({"log_prob": here(CONFIDENT_LOG - 0.01), "advantage": here(-1.0), "coefficient": here(0.1)}, ["other"]),
    # The KL loss, or clipping, leaves a coefficient of the other sign.
    ({"log_prob": here(-0.1), "advantage": here(1.0), "coefficient": here(0.1)}, ["other"]),
    ({"log_prob": here(-0.1), "advantage": here(-1.0), "coefficient": here(-0.1)}, ["other"]),
)
def test_the_rules_on_facts_from_tensors(changes: dict[str, list[float]], sources: list[str]) -> None:
    assert classify(facts(**changes), MEDIANS) == sources


@cases(
    "changes sources",
    ({"grad_norm": math.nan}, ["nonfinite"]),
    # A ratio that overflows: no broken weights.
    ({"grad_norm": math.inf, "ratio": 6e24}, ["token"]),
    ({"grad_norm": math.inf, "rollout_ratio": 6e24}, ["token"]),
    ({"grad_norm": math.inf, "ratio": 1.0}, ["nonfinite"]),
    ({"grad_norm": math.inf, "ratio": 6e24, "log_prob": math.nan}, ["nonfinite", "token"]),
    # Behind the end of the turn: training gives it more, or less, than a thousandth of the rollout's probability.
    ({"after_eos": True, "rollout_log_prob": -0.5, "log_prob": -7.3}, ["unlikely"]),
    ({"after_eos": True, "rollout_log_prob": -0.5, "log_prob": -7.5}, ["unsampled", "unlikely"]),
    # A failed request that came back as one token; what is said of whole responses needs more.
    ({"response_length": 1, "rollout_log_prob": 0.0, "log_prob": -2.5}, ["unsampled"]),
    ({"response_length": 1, "misaligned_share": 1.0, "sequence_ratio": 9.0}, ["other"]),
    ({"misplaced": True, "shift": -1}, ["misaligned"]),
    ({"layer_norms": {"a": 1.0, "b": 3.0, "c": 1.0}}, ["layer"]),
    # The square is infinite.
    ({"layer_norms": {"a": 1e200, "b": 1.0}}, ["other"]),
    ({"advantage": math.nan}, ["other"]),
)
def test_the_rules_on_other_facts(changes: dict[str, Any], sources: list[str]) -> None:
    assert classify({**facts(), **changes}, MEDIANS) == sources


def test_code_schema_and_report_have_the_same_sources() -> None:
    assert list(SOURCES) == [*HOLDS, "other"]
    assert schema.EVENT["properties"]["culprits"]["items"]["properties"]["source"]["enum"] == list(SOURCES)


END = 9


@cases(
    "token_id mask behind",
    ([1, 2, END, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]),
    # Tokens that were added behind the end.
    ([1, END, 3, 4, 0], [1, 1, 1, 1, 0], [0, 0, 1, 1, 0]),
    # Two turns with masked tool output between them.
    ([1, END, 3, 4, END], [1, 1, 0, 1, 1], [0, 0, 0, 0, 0]),
    # An end token in the tool output counts for nothing.
    ([1, 2, END, 4, 5], [1, 1, 0, 1, 1], [0, 0, 0, 0, 0]),
    # The second turn goes on behind its end.
    ([1, END, 3, END, 5], [1, 1, 0, 1, 1], [0, 0, 0, 0, 1]),
    # A turn of the end token alone.
    ([END, 2, 3, 4, 5], [1, 1, 0, 1, 1], [0, 1, 0, 0, 0]),
)
def test_tokens_after_eos_are_behind_the_end_of_a_turn(token_id: list[int], mask: list[int], behind: list[int]) -> None:
    # Below a row without an end: each row is for itself.
    for ends in ({END}, [8, END]):
        found = find_after_eos(torch.tensor([[1] * 5, token_id]), torch.tensor([[1.0] * 5, mask]), ends)
        assert found.tolist() == [[False] * 5, [bool(value) for value in behind]]


def micro_batch(**tokens: list[list[float]]) -> MicroBatch:
    return MicroBatch({}, [], (torch.zeros(1), None), {name: torch.tensor(rows) for name, rows in tokens.items()})


def test_medians_are_over_tokens_of_all_micro_batches() -> None:
    first = micro_batch(
        response_mask=[[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]],
        advantage=[[-2.0, -2.0, -2.0], [0.0, 50.0, 50.0]],
        weight=[[0.5, 0.5, 0.5], [1.0, 7.0, 7.0]],
    )
    second = micro_batch(response_mask=[[1.0, 1.0]], advantage=[[1.0, math.nan]], weight=[[0.25, 0.0]])
    found = token_medians([first, second])
    # |A| 1, 2, 2, 2 and w 0.25, 0.5, 0.5, 0.5, 1: without padding, zeros and NaN.
    assert found == {"median_advantage": 2.0, "median_weight": 0.5}
    # Without any, nothing is an outlier.
    unknown = token_medians([micro_batch(response_mask=[[0.0]], weight=[[1.0]])])
    assert unknown == {"median_advantage": None, "median_weight": None}
    assert classify(facts(advantage=here(99.0), weight=here(99.0)), unknown) == ["other"]


@cases(
    "values",
    torch.randn(9999).exp().pow(9),  # some 40 octaves
    torch.randn(10_000, dtype=torch.float64),
    torch.randn(5001).bfloat16(),
    torch.full((777,), -0.1),
    torch.tensor([1e-45, 3.4e38, -2e-38]),
    torch.tensor([5e-324, -1.7e308, 1.0, 1.5], dtype=torch.float64),
    torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 3.0, 2.0]),
    torch.tensor([math.inf, math.nan, 0.0]),
)
def test_medians_are_exact_whatever_the_values(values: torch.Tensor) -> None:
    tokens = {"response_mask": torch.ones(1, len(values)), "advantage": values[None], "weight": values[None].abs()}
    found = token_medians([MicroBatch({}, [], (torch.zeros(1), None), tokens)])
    counted = values.double().abs()[values.isfinite() & (values != 0)].tolist()
    assert [*found.values()] == [statistics.median(counted) if counted else None] * 2


def bits(text: str) -> torch.Tensor:
    return torch.tensor([[bit == "1" for bit in text]])


TWO_TURNS = "11111100011111111"


@cases(
    "mask off found",
    # From the second turn on; what is off in the gap does not count.
    (TWO_TURNS, "00000011111111111", (9, 2)),
    # The first of other tokens are as likely by chance.
    (TWO_TURNS, "00000000000111111", (11, 2)),
    (TWO_TURNS, "00000000000011111", (12, 0)),
    (TWO_TURNS, "00000000010110111", (9, 2)),
    # Too few to tell.
    (TWO_TURNS, "00000000000000111", (-1, 0)),
    # In the first turn, or in all of the response: at no boundary.
    (TWO_TURNS, "00111111111111111", (2, 0)),
    # Much of the first turn is off as well.
    (TWO_TURNS, "10010011111111111", (-1, 0)),
    (TWO_TURNS, "01000011111111111", (9, 2)),
    # The last of three turns.
    ("1110110111110", "0000000111111", (7, 3)),
    # One turn alone has no boundary.
    ("111111111111", "000011111111", (4, 0)),
)
def test_where_a_mismatch_begins(mask: str, off: str, found: tuple[int, int]) -> None:
    """In a response some of whose tokens are off by two nats, and some by NaN."""
    difference = torch.tensor([[math.nan if i % 3 == 2 else 2.0 * (-1) ** i for i in range(len(mask))]])
    log_prob = torch.full((1, len(mask)), -3.0)
    rollout = torch.where(bits(off), log_prob - difference, log_prob + 0.9)
    tokens = {"response_mask": bits(mask).float(), "log_prob": log_prob, "rollout_log_prob": rollout}
    start, turn = find_mismatch(tokens)
    assert start.shape == turn.shape == (1, 1) and (int(start), int(turn)) == found


@cases(
    "position off_from known sources",
    (5, 9, [1, 9, 2], ["misaligned", "sequence"]),
    (12, 9, [2, 9, 2], ["retokenized", "misaligned", "token", "sequence"]),
    (16, 13, [2, 13, None], ["token", "sequence"]),
    (12, 17, [2, None, None], ["other"]),
)
def test_tokens_from_the_turn_with_the_mismatch_are_retokenized(
    position: int, off_from: int, known: list[int | None], sources: list[str]
) -> None:
    """In the second of two responses; the first one has one turn."""
    mask = torch.cat([torch.ones(1, 17), bits(TWO_TURNS).float()])
    log_prob = torch.full((2, 17), -1.0)
    rollout = log_prob.clone()
    rollout[1, off_from:] = -4.0
    tokens = {"response_mask": mask, "log_prob": log_prob, "rollout_log_prob": rollout}
    tokens |= {"token_id": torch.zeros(2, 17), "weight": mask / 10, "coefficient": mask / 10, "advantage": mask}
    names = ("turn", "mismatch_start", "mismatch_turn")
    other, found = token_evidence(tokens, 0, 3), token_evidence(tokens, 1, position)
    assert [other[name] for name in names] == [None, None, None]
    assert [found[name] for name in names] == known
    assert classify({"grad_norm": 100.0, "layer_norms": LAYERS, **found}, MEDIANS) == sources


def test_without_the_rollouts_log_probs_no_mismatch_begins() -> None:
    tokens = {"response_mask": bits(TWO_TURNS).float(), "log_prob": torch.full((1, 17), -3.0)}
    assert [found.tolist() for found in find_mismatch(tokens)] == [[[-1]], [[0]]]
    empty = {name: torch.zeros(2, 0) for name in ("response_mask", "log_prob", "rollout_log_prob")}
    assert [found.tolist() for found in find_mismatch(empty)] == [[[-1], [-1]], [[0], [0]]]
