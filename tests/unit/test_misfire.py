"""Whether a reward value or a data source holds the culprits: planted, by chance, and explained by the advantage."""

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from notation import cases

from gradloc.judge.misfire import LESS_SPECIFIC, _chance, misfire, needs_rows, verdict_by_rows
from gradloc.judge.rules import BROKEN
from gradloc.judge.verdict import CAUSES
from gradloc.sums import TrainedRow
from gradloc.tools.reading import without_texts
from gradloc.tools.schema import EVENT, conforms

Rows = dict[tuple[int, int], TrainedRow]
PROMPTS, ANSWERS = 16, 4
USUAL = 1.0


def row_of(uid: str, score: float | None, data_source: str | None, largest: float) -> TrainedRow:
    return TrainedRow(uid, score=score, data_source=data_source, largest=largest)


def spread(rows: Sequence[TrainedRow]) -> Rows:
    """The rows on two ranks."""
    return {(i % 2, i // 2): row for i, row in enumerate(rows)}


def event(*places: tuple[int, int], cause: str | None = None) -> dict[str, Any]:
    culprits = [{"rank": rank, "micro_batch": 0, "row": row, "share": 0.1} for rank, row in places]
    return {"culprits": culprits, "verdict": {"cause": cause}}


def mini_batch(
    special: int = 6, reward: float = 0.5, advantage: float = USUAL, prompts: int = PROMPTS
) -> tuple[Rows, list[tuple[int, int]]]:
    """Rewards of 0 and 1, but for one response of the first prompts; and the places of these responses."""
    rows = []
    for prompt, answer in itertools.product(range(prompts), range(ANSWERS)):
        is_special = prompt < special and answer == 1
        value, size = (reward, advantage) if is_special else (float(answer % 2), USUAL)
        rows.append(row_of(f"uid {prompt}", value, f"source {prompt % 4}", size))
    found = spread(rows)
    return found, [place for place, row in found.items() if row.score == reward]


def test_a_reward_value_that_holds_the_culprits_is_named() -> None:
    rows, places = mini_batch()
    found = misfire(event(*places, places[0]), rows)
    assert found is not None and conforms(found, EVENT["properties"]["verdict"])
    assert (found["cause"], found["culprits"], found["ordinary"]) == ("misfire", 1.0, 6 / 64)
    where = "in responses with the reward 0.5 (all 7 culprits in 6 prompts, 9% of the responses): "
    assert found["sentence"].startswith(f"The culprits are {where}")
    assert without_texts({"culprits": [], "verdict": found})["verdict"] == found, "trackers see the names of rewards"


@cases(
    "reward advantage found",
    *((20.0, 15.0, True), (20.0, 1.5, True), (20.0, 0.9, False), (4.0, 15.0, False)),
    # A response without any merit has one far below the others.
    *((-20.0, 15.0, True), (-20.0, 2.5, False)),
)
def test_a_far_reward_is_named_in_one_response_or_several(reward: float, advantage: float, found: bool) -> None:
    """If the advantages are larger than the other rewards are apart, which no normalized ones need to be."""
    rows, places = mini_batch(special=PROMPTS, reward=reward, advantage=advantage)
    beside = [place for place, row in rows.items() if row.score == 0.0][:2]
    for place in beside:
        rows[place] = dataclasses.replace(rows[place], largest=advantage)
    said = misfire(event(places[0], *beside), rows)
    assert (said is not None) == found
    if said is not None:
        assert said["sentence"].startswith(f"The reward {reward:g}, while all others are from 0 to 1, makes the")
        assert (said["culprits"], said["ordinary"]) == (1 / 3, 16 / 64)


def test_a_far_reward_that_many_have_is_how_prompts_are_rewarded() -> None:
    """Of three prompts of four, right answers count 15 instead of 1."""
    rows, _ = mini_batch(special=0)
    for place, row in rows.items():
        tens = row.score == 1.0 and int(row.uid.split()[1]) % 4 != 0
        rows[place] = dataclasses.replace(row, score=15.0 if tens else row.score)
    place = next(place for place, row in rows.items() if row.score == 15.0)
    rows[place] = dataclasses.replace(rows[place], largest=9.0)
    assert misfire(event(place), rows) is None


@pytest.mark.parametrize("name", ["web (2024): all 6 culprits (sums", ""])
def test_trackers_do_not_see_the_name_of_a_data_source(name: str) -> None:
    culprits = [{"rank": 0, "micro_batch": 0, "share": 0.1, "row": row, "data_source": name} for row in range(5)]
    rows = [row_of(f"uid {row}", 1.0, name if row < 5 else "books", USUAL) for row in range(99)]
    line = {"verdict": None, "culprits": culprits}
    line["verdict"] = misfire(line, {(0, row): each for row, each in enumerate(rows)})
    assert line["verdict"]["sentence"].startswith(f"The culprits are in responses with the data source {name} (all 5")
    bare = without_texts(line)
    claim, shares = (
        "The culprits are in responses with one data source",
        "all 5 culprits in 5 prompts, 5% of the responses",
    )
    advice = ": read these responses, and look for what the reward function takes for right or wrong there."
    said = {"claim": claim, "evidence": shares, "sentence": f"{claim} ({shares}){advice}", "data_source": None}
    assert bare["verdict"] == line["verdict"] | said
    # One of another release does not say what it names: so it is left out, whatever it is.
    other = {name: line["verdict"][name] for name in ("cause", "culprits", "ordinary", "sentence", "check")}
    sentence = f"The culprits are in responses with one reward or data source{advice}"
    assert without_texts({**line, "verdict": other})["verdict"]["sentence"] == sentence
    assert "data_source" not in bare["culprits"][0]


@cases(
    "changes is_named",
    ({}, True),
    # Rare values have large advantages: these explain the spike, unless the reward is far from all others.
    ({"advantage": 1.4}, True),
    ({"advantage": 1.6}, False),
    ({"advantage": 9.0, "reward": 2.0}, False),
    ({"advantage": 9.0, "reward": 2.1}, True),
    # Groups of eight with one answer without any merit have such advantages.
    ({"advantage": 7.9, "reward": 2.1}, True),
    ({"advantage": 7.9, "reward": -1.1}, False),
    ({"advantage": 9.0, "reward": -1.1}, True),
    # Responses of groups with equal rewards have no advantage, and no gradient.
    ({"advantage": 0.0}, False),
    ({"advantage": math.nan}, False),
    # What many responses have is no cause.
    ({"reward": 1.0, "special": PROMPTS}, False),
)
def test_advantages_may_explain_a_spike(changes: dict[str, Any], is_named: bool) -> None:
    rows, places = mini_batch(**changes)
    assert (misfire(event(*places), rows) is not None) == is_named


@cases(
    "rows culprits is_named",
    *(({"special": 6}, range(count), named) for count, named in ((4, True), (3, False))),
    # Several culprits in a prompt are one.
    ({}, (0, 1, 2, 0), False),
    # Two are enough for a reward that few responses have: as many as a search names that ends once it is explained.
    ({"special": 2, "prompts": 64}, (0, 1), True),
    # A far one is named from one on.
    ({"special": 1, "reward": 9.0, "advantage": 9.0}, (0, 0), True),
    ({"special": 1, "reward": 4.0, "advantage": 9.0}, (0, 0), False),
)
def test_culprits_in_few_prompts_say_nothing(rows: dict[str, Any], culprits: Sequence[int], is_named: bool) -> None:
    found, places = mini_batch(**rows)
    said = misfire(event(*(places[number] for number in culprits)), found)
    assert (said is not None) == is_named
    if rows.get("reward") == 9.0:
        assert said["sentence"].startswith("The reward 9, while all others are from 0 to 1, makes")
        assert misfire(event(*places, (0, 0)), found) is None  # with one of another reward


def test_unknown_rewards_and_culprits_that_do_not_explain_the_norm_do_not_count() -> None:
    rows, places = mini_batch()
    line = event(*places)
    assert misfire(line, rows) is not None
    for culprit in line["culprits"]:
        culprit["share"] = 0.001
    assert misfire(line, rows) is None
    for reward in (None, math.nan):  # nor is an unknown source a value
        unknown = {place: row_of(row.uid, reward, None, row.largest) for place, row in rows.items()}
        assert misfire(event(*places), unknown) is None


def test_the_chance_is_that_of_drawing_without_replacement() -> None:
    for hits, draws, marked, total in ((0, 3, 2, 7), (1, 3, 2, 7), (2, 3, 2, 7), (3, 4, 5, 9), (4, 4, 4, 8)):
        drawn = [sum(i < marked for i in found) for found in itertools.combinations(range(total), draws)]
        assert _chance(hits, draws, marked, total) == pytest.approx(sum(n >= hits for n in drawn) / len(drawn))


@pytest.mark.parametrize("cause", [None, *CAUSES])
def test_more_specific_causes_stay(cause: str | None) -> None:
    places = [(0, 1), (0, 2), (1, 1)]
    assert needs_rows(event(*places, cause=cause)) == (cause in (*LESS_SPECIFIC, BROKEN))
    assert needs_rows(event(cause=cause)) == (cause == BROKEN)
    assert not needs_rows({**event(*places), "verdict": None})  # a drill


@cases(
    "rewards advantages said",
    ({5: math.nan}, range(4, 8), " first row 2 on rank 0. The reward of row 2 on rank 1 is NaN or infinite."),
    ({4: math.inf, 8: math.nan}, range(4, 12), " all 8 responses to 2 prompts, first row 2 on rank 0. The reward of"),
    ({}, (), None),
)
def test_rows_that_are_not_finite_are_named(rewards: dict[int, float], advantages: Sequence[int], said: str) -> None:
    rows = list(mini_batch()[0].values())  # in the order of the prompts
    for number, row in enumerate(rows):
        reward, advantage = rewards.get(number, row.score), math.nan if number in advantages else row.largest
        rows[number] = dataclasses.replace(row, score=reward, largest=advantage)
    line = event(cause="nonfinite")
    line["verdict"]["sentence"] = "`advantages` is NaN."
    found = verdict_by_rows(line, spread(rows))
    assert found["cause"] == "nonfinite" and found["sentence"].startswith("`advantages` is NaN.")
    if said is None:
        assert found == line["verdict"]
    else:
        assert said in found["sentence"]


def healthy(generator: random.Random, strength: float) -> dict[str, Any] | None:
    """The verdict where culprits are drawn, large advantages and wrong answers more often."""
    rows, weights = [], []
    for prompt in range(generator.choice([8, 32])):
        ability = generator.betavariate(*generator.choice([(1, 1), (1, 4), (4, 1)]))
        rewards = [float(generator.random() < ability) for _ in range(8)]
        mean = sum(rewards) / 8
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / 7)
        source = f"source {prompt % 3}"
        for reward in rewards:
            advantage = (reward - mean) / (deviation + 1e-6)
            rows.append(row_of(f"uid {prompt}", reward, source, abs(advantage)))
            weights.append(abs(advantage) ** strength * (generator.choice([1, 5]) if reward == 0 else 1))
    places = [*spread(rows)]
    drawn = generator.choices(places, weights, k=generator.randrange(2, 12)) if any(weights) else places[:3]
    return misfire(event(*drawn), spread(rows))


@pytest.mark.parametrize("strength", [0.0, 1.0, 4.0])
def test_no_reward_is_named_in_healthy_runs(strength: float) -> None:
    """Culprits by chance, in proportion to the advantage, and almost only where that is largest."""
    generator = random.Random(1)
    assert sum(healthy(generator, strength) is not None for _ in range(700)) <= 1
