"""How long searches may take: by the run's clock, over a resume, and for drills."""

from typing import Any

import pytest
from notation import Caplog, Patch
from plain_passes import Loop
from small_bundles import PROMPT, random_ids, small_model
from torch import Tensor

from gradloc import GradLoc
from gradloc.measure.passes import GroupName
from gradloc.search.groups import Groups
from gradloc.search.investigation import HEAD_START, SHARE, SearchTime, TimeLimit
from gradloc.search.search import Search


class Clock:
    """Shows the time that a test sets."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def spend(time: SearchTime, clock: Clock, seconds: float) -> TimeLimit:
    with time.search() as limit:
        clock.now += seconds
    return limit


def test_searches_take_a_share_of_the_run_and_the_head_start() -> None:
    clock = Clock()
    time, begun, searching = SearchTime("auto", clock), clock.now, 0.0
    for _ in range(2000):  # a collapse: a search after every 20 seconds, each until it is told to end
        clock.now += 20
        with time.search() as limit:
            while not limit.is_up():
                clock.now += 1
                searching += 1
    run = clock.now - begun
    assert HEAD_START + SHARE * run - 1 <= searching <= HEAD_START + SHARE * run + 1


def test_a_search_ends_when_its_limit_is_reached_and_not_before() -> None:
    clock = Clock()
    with SearchTime(60.0, clock).search() as limit:
        clock.now += 59.9
        assert not limit.is_up() and not limit.has_ended_search
        clock.now += 0.1
        assert limit.is_up() and limit.has_ended_search
    assert spend(SearchTime(None, clock), clock, 1e9).is_up() is False
    assert spend(SearchTime("auto", clock), clock, 0).seconds == HEAD_START  # in a run that is young
    time = SearchTime(60.0, clock)
    assert [spend(time, clock, 100).seconds for _ in range(3)] == [60.0] * 3


def test_the_count_goes_on_after_a_resume() -> None:
    clock = Clock()
    time = SearchTime("auto", clock)
    clock.now += 10_000
    spend(time, clock, 400)
    state = time.state_dict()
    assert state == {"run": 10_400, "searches": 400}
    clock = Clock(5.0)  # another machine
    resumed = SearchTime("auto", clock)
    resumed.load_state_dict(state)
    assert spend(resumed, clock, 0).seconds == pytest.approx(HEAD_START + SHARE * 10_400 - 400)
    resumed.load_state_dict(None)  # a checkpoint from before there was a limit
    assert spend(resumed, clock, 0).seconds == HEAD_START
    # A drill is neither counted nor refused.
    clock = Clock()
    time = SearchTime("auto", clock)
    spend(time, clock, 1e6)
    assert time.drill().seconds == HEAD_START and not time.drill().is_up()
    assert time.state_dict()["searches"] == 1e6


def trained(seconds: Any, clock: Clock, a_pass: float) -> tuple[GradLoc, list[dict[str, Any]]]:
    """Two updates of a model whose every pass takes that many seconds; all tokens are over the threshold."""
    model, ids = small_model(), random_ids()

    def logits(ids: Tensor) -> Tensor:
        clock.now += a_pass
        return model(input_ids=ids).logits

    loop = Loop(model, ids.unsqueeze(0), PROMPT, logits, grad_norm_threshold=1e-6, bisect_budget_seconds=seconds)
    loop.gradloc._search_time = SearchTime(seconds, clock)
    events = []
    for _ in range(2):
        loop.step(1.0)
        events += loop.gradloc.events
    return loop.gradloc, events


@pytest.mark.parametrize(("seconds", "a_pass", "passes"), [(10, 4.0, [3, 3]), ("auto", 200.0, [2, 0])])
def test_a_search_that_is_out_of_time_says_so(seconds: Any, a_pass: float, passes: list[int], caplog: Caplog) -> None:
    gradloc, events = trained(seconds, Clock(), a_pass)
    assert [event["passes"] for event in events] == passes
    for event in events:
        assert event["out_of_time"] and not event["complete"] and event["diagnosis"] == "incomplete"
        assert event["units"] and event["open_segments"]
    assert gradloc.metrics()["actor/gradloc/out_of_time"] == 1
    assert caplog.text.count(f"bisect_budget_seconds={seconds}") == 2


def test_the_limit_counts_while_micro_batches_are_sent(monkeypatch: Patch) -> None:
    """To send each takes a second, and there would be room for all in the first pass."""
    clock, sent, obtain = Clock(), [], Groups.obtain

    def slowly(groups: Groups, group: GroupName) -> None:
        clock.now += 1
        sent.append(group)
        obtain(groups, group)

    monkeypatch.setattr(Groups, "obtain", slowly)
    monkeypatch.setattr(Search, "has_room", lambda *_: True)
    model, ids = small_model(), random_ids().unsqueeze(0).repeat(40, 1, 1)
    for seconds, count, passes in ((10.0, 12, 0), (30.0, 32, 1)):
        settings: dict[str, Any] = {"grad_norm_threshold": 1e-6, "bisect_budget_seconds": seconds}
        loop = Loop(model, ids, PROMPT, lambda ids: model(input_ids=ids).logits, **settings)
        loop.gradloc._search_time = SearchTime(seconds, clock)
        loop.step(*[1.0] * len(ids))
        (event,) = loop.gradloc.events
        assert event["out_of_time"] and (len(sent), event["passes"]) == (count, passes)
        sent.clear()


def test_a_search_with_time_left_does_not_say_so(caplog: Caplog) -> None:
    gradloc, events = trained("auto", Clock(), 0.001)
    assert [(event["out_of_time"], event["passes"] > 3) for event in events] == [(False, True)] * 2
    assert gradloc.metrics()["actor/gradloc/out_of_time"] == 0 and "bisect_budget_seconds" not in caplog.text
