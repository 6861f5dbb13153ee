"""What the report says moved before a spike."""

import math
import random
from typing import Any

import pytest

from gradloc.report.before_spike import FIGURES, StepHistory, what_moved


def steps(count: int, **changes: Any) -> dict[int, dict[str, float | None]]:
    """Ordinary steps from 1 on; changes are {step: value} by figure."""
    generator = random.Random(1)
    found: dict[int, dict[str, float | None]] = {}
    for step in range(1, count + 1):
        noise = [math.exp(generator.gauss(0, 0.2)) for _ in FIGURES]
        found[step] = {
            "spike_margin": 0.3 * noise[0],
            "ratio_max": math.exp(0.2 * noise[1]),
            "ratio_p999": math.exp(0.05 * noise[2]),
            "rollout_ratio_max": None,
            "unlikely_share": 0.01 * noise[4],
        }
        for name, by_step in changes.items():
            found[step][name] = by_step.get(step, found[step][name])
    return found


def leads(history: StepHistory, step: int) -> dict[str, int | None]:
    before = history.before(step)
    assert before is not None
    return {figure["name"]: figure["lead"] for figure in before["figures"]}


def test_figures_may_be_of_any_size() -> None:
    history = StepHistory(steps(21, unlikely_share={step: (1e-8, 1e30)[step % 2] for step in range(22)}))
    before = history.before(21)
    assert before is not None and leads(history, 21)["unlikely_share"] is None
    assert [figure["limits"][-1] for figure in before["figures"] if figure["name"] == "unlikely_share"] == [math.inf]


def test_figures_that_left_their_range_are_named_with_their_lead() -> None:
    # A ratio of 3 is far out of the range of ratios around 1.2, though it is not three times the usual one.
    found = steps(60, ratio_max={53: 3.0, 57: 9.0}, spike_margin={60: 4.0}, unlikely_share={55: math.inf})
    history = StepHistory(found)
    assert leads(history, 60) == {"spike_margin": 0, "ratio_max": 7, "ratio_p999": None, "unlikely_share": 5}
    text = what_moved(history.before(60))
    assert text == (
        "Moved before the spike: ratio_max 7 steps before it, unlikely_share 5 steps before it, "
        "spike_margin only in its own step."
    )
    before = history.before(60)
    assert before is not None and before["steps"] == list(range(40, 61))
    (ratio,) = (figure for figure in before["figures"] if figure["name"] == "ratio_max")
    assert ratio["values"] == [found[step]["ratio_max"] for step in range(40, 61)]
    assert all(1.4 < limit < 3 for limit in ratio["limits"])


@pytest.mark.parametrize("seed_step", [41, 60])
def test_ordinary_steps_are_in_their_range(seed_step: int) -> None:
    history = StepHistory(steps(60))
    assert set(leads(history, seed_step).values()) == {None}
    assert what_moved(history.before(seed_step)) == "No early-warning figure left its range in these steps."


def test_what_only_the_spikes_step_shows_is_no_warning() -> None:
    history = StepHistory(steps(60, ratio_max={60: 50.0}))
    text = what_moved(history.before(60))
    assert text == "Nothing moved before the spike: ratio_max only in its own step."


def test_earlier_spikes_do_not_widen_the_range() -> None:
    often = {step: 5.0 for step in range(3, 60, 4)}
    assert leads(StepHistory(steps(60, spike_margin=often | {60: 5.0})), 60)["spike_margin"] == 17


def test_steps_with_spikes_of_their_own_are_no_warning() -> None:
    found = steps(60, spike_margin={48: 5.0, 49: 5.0, 60: 5.0}, ratio_max={48: 50.0, 58: 50.0})
    for step in (48, 49, 60):
        found[step]["triggered"] = 1.0
    text = what_moved(StepHistory(found).before(60))
    assert text == (
        "Moved before the spike: ratio_max 2 steps before it, spike_margin only in its own step. "
        "Not counted: steps 48 to 49, with spikes."
    )


def test_too_few_steps_are_not_judged() -> None:
    history = StepHistory(steps(20, ratio_max={20: 50.0}))
    assert history.before(1) is None and history.before(30) is not None
    assert set(leads(history, 20).values()) == {None} and what_moved(history.before(20)) is None
    assert what_moved(None) is None and StepHistory({}).before(3) is None


def test_missing_steps_and_a_spike_without_its_step_are_taken_as_they_are() -> None:
    found = steps(60, ratio_max={55: 50.0})
    del found[50], found[60]
    before = StepHistory(found).before(60)
    assert before is not None and before["steps"] == [*range(40, 50), *range(51, 60)]
    assert leads(StepHistory(found), 60)["ratio_max"] == 5
