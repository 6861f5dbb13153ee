"""What looks wrong with a culprit: each rule against a real actor's batch, and what is usual in a mini-batch."""

import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import Any

import actors
import pytest
import source_cases
from actors import KL_COEF, Case
from notation import cases
from valid_events import valid_events

from gradloc.judge.rules import UNLIKELY, UNSAMPLED, classify

Launch = Callable[..., list[Any]]


def culprits_by_place(results: list[Any]) -> tuple[dict[str, Any], dict[source_cases.Place, dict[str, Any]]]:
    assert all(found[0] == results[0][0] for found in results)
    (event,) = valid_events(results[0][0])
    return event, {(c["rank"], c["row"], c["position"]): c for c in event["culprits"]}


@pytest.mark.slow
def test_each_rule_holds_for_the_tokens_that_were_planted_for_it(launch: Launch) -> None:
    results = launch(2, source_cases.every_source)
    event, culprits = culprits_by_place(results)
    log_probs = {
        (rank, *map(int, key.split())): value for rank, (_, found) in enumerate(results) for key, value in found.items()
    }
    assert culprits.keys() == log_probs.keys()  # every response token is a culprit
    planted = source_cases.planted()
    for source, places in planted.items():
        assert {place for place, c in culprits.items() if source in c["sources"]} == places, source
    rare = {place for place, value in log_probs.items() if value < math.log(UNLIKELY)}
    for place in (source_cases.RARE, source_cases.RARE_WITHOUT_LOG_PROB):
        assert log_probs[place] < math.log(UNSAMPLED)
    assert {place for place, c in culprits.items() if "unlikely" in c["sources"]} == rare
    # The most specific rule is the source.
    for source, place in (
        ("nonfinite", source_cases.NONFINITE),
        ("misaligned", (*source_cases.MISALIGNED_ROW, 0)),
        ("unsampled", source_cases.RARE_WITHOUT_LOG_PROB),
        ("unsampled", (*source_cases.ENDED_ROW, source_cases.END_POSITION + 1)),
        ("advantage", source_cases.ADVANTAGE),
        ("weight", (*source_cases.SHORT_ROWS[0], 0)),
        ("kl", source_cases.KL),
        ("token", source_cases.RATIO),
        ("sequence", (*source_cases.DRIFTED_ROW, 0)),
        ("unlikely", source_cases.RARE),
    ):
        assert culprits[place]["source"] == source, source
    # A reader of the event can check the rules.
    for culprit in culprits.values():
        numbers = {name: float(value) if value in ("NaN", "Infinity") else value for name, value in culprit.items()}
        assert classify(numbers, event) == culprit["sources"]
        assert culprit["source"] == culprit["sources"][0]
        ended = (culprit["rank"], culprit["row"]) == source_cases.ENDED_ROW
        assert culprit["after_eos"] == (ended and culprit["position"] > source_cases.END_POSITION)


@pytest.mark.slow
def test_the_kl_part_of_a_coefficient_is_what_the_kl_loss_adds(launch: Launch) -> None:
    _, with_kl = culprits_by_place(launch(2, source_cases.every_source))
    without = dataclasses.replace(source_cases.CASE, kl=False)
    _, without_kl = culprits_by_place(launch(2, source_cases.every_source, without))
    assert with_kl.keys() == without_kl.keys()
    for place, culprit in with_kl.items():
        policy = without_kl[place]
        assert policy["kl_coefficient"] is None and "kl" not in policy["sources"]
        added = culprit["coefficient"] - policy["coefficient"]
        if place != source_cases.NONFINITE:
            assert culprit["kl_coefficient"] == pytest.approx(added, rel=1e-4, abs=1e-6)
    # low_var_kl of log p_ref - log p = 1 has the derivative 1 - e.
    kl = with_kl[source_cases.KL]
    assert kl["kl_coefficient"] == pytest.approx(kl["weight"] * KL_COEF * (1 - math.e), rel=1e-4)


@pytest.mark.slow
@pytest.mark.target(version="0.9.1")
def test_turns_and_where_the_mismatch_begins_are_recorded(launch: Launch) -> None:
    case = Case(rollout=True, nested=actors.ENGINE)
    event, culprits = culprits_by_place([[found] for found in launch(2, source_cases.of_two_turns, case)])
    (retokenized, misaligned), gap = source_cases.TURNS, source_cases.GAP
    for row in source_cases.TURNS:
        positions = {position for *place, position in culprits if tuple(place) == row}
        assert positions == {*range(actors.RESPONSE)} - {*gap}
    for (*place, position), culprit in culprits.items():
        found = tuple(culprit[name] for name in ("turn", "mismatch_start", "mismatch_turn"))
        turn = 1 if position < gap.start else 2
        if tuple(place) == retokenized:
            assert found == (turn, gap.stop, 2)
        elif tuple(place) == misaligned:
            assert found == (turn, 1, None)
        else:
            assert found == (None, None, None)
        is_retokenized = tuple(place) == retokenized and turn == 2
        assert ("retokenized" in culprit["sources"]) == is_retokenized == (culprit["source"] == "retokenized")
    assert "; the mismatch begins with the first token after turn 1" in event["summary"]


@cases(
    "world size case",
    (2, 1, Case(loss_agg_mode="seq-mean-token-mean")),
    (4, 2, Case("fsdp2", packed=True)),
    ids=["data parallel", "sequence parallel"],
)
def test_medians_are_those_of_all_ranks(launch: Launch, world: int, size: int, case: Case) -> None:
    results = launch(world, source_cases.medians, case, size)
    event, _ = culprits_by_place(results)
    ranks = results[::size]
    for name, values in (("advantage", 1), ("weight", 2)):
        everywhere = [value for rank in ranks for value in rank[values] if value]
        assert event[f"median_{name}"] == pytest.approx(statistics.median(everywhere), rel=1e-6)
    assert event["world_size"] == world // size
    # One rank's median would not do.
    assert len({statistics.median(rank[1]) for rank in ranks}) == len(ranks)
