"""Whatever happens during a search: it ends on all ranks alike, and training goes on, or fails as it would without."""

from collections.abc import Callable
from typing import Any

import cluster
import fault_cases
import pytest
from actors import Case
from cluster import Cluster, RankFailed
from notation import cases
from test_actor import ONE, THREE, Launch, as_list, harmless, on_engine, on_ranks, places, same_events
from valid_events import valid_events


def check_search(results: list[Any], case: Case, error: str = "") -> dict[str, Any]:
    """The event of a search that has found the planted tokens, or has ended with an error; the next call has none."""
    (event,), second = harmless(results)
    assert second == [] and event["complete"] == (not error)
    if error:
        assert error in event["error"]
    else:
        assert places(event) == sorted(case.planted) and event["error"] is None
    return event


@cases(
    "world case where",
    (1, Case("fsdp2", planted=((0, 0, 4), (0, 6, 1))), "in a layer"),
    pytest.param(2, Case("fsdp1", planted=THREE), "in a layer", marks=pytest.mark.every_target),
    (2, Case("fsdp1", planted=THREE), "in a layer's backward"),
    (2, Case("fsdp1", planted=THREE), "in the backward"),
    (2, Case("fsdp2", checkpointing=True, planted=THREE), "in a layer"),
    (2, Case("fsdp2", activation_offload=True, planted=THREE), "in a layer's backward"),
    (2, Case("fsdp2", grouped=True, planted=THREE), "in a layer"),
    *[(2, Case("fsdp2", planted=THREE), where) for where in ("before the forward", "after the forward")],
    pytest.param(2, Case("fsdp2", planted=THREE), "in the backward", marks=pytest.mark.every_target),
    (4, Case("fsdp1", hsdp=True, planted=THREE), "in a layer's backward"),
    (4, Case("fsdp2", hsdp=True, planted=THREE), "in a layer"),
)
def test_out_of_memory_in_a_pass_ends_the_search_on_all_ranks(
    launch: Launch, world: int, case: Case, where: str
) -> None:
    failing, when = {1: ([0], 1), 2: ([1], 2), 4: ([1, 2], 2)}[world]
    check_search(launch(world, fault_cases.failing_search, case, where, failing, when), case, "OutOfMemoryError")


@pytest.mark.parametrize("failing", [[], [1]], ids=["found", "out of memory"])
def test_a_search_where_a_torch_has_what_2_15_has(launch: Launch, failing: list[int]) -> None:
    case = Case("fsdp2", planted=THREE)
    results = launch(2, fault_cases.failing_search, case, "in a layer's backward", failing, 2, True)
    check_search(results, case, "OutOfMemoryError" if failing else "")


@cases(
    "world case ranks",
    (2, Case("fsdp1", planted=THREE), [0, 1]),
    (2, Case("fsdp2", planted=THREE), [1]),
)
def test_what_torch_lacks_turns_the_search_off_on_all_ranks(
    launch: Launch, world: int, case: Case, ranks: list[int]
) -> None:
    name = "reduce_grads" if case.wrap == "fsdp2" else "_prefetched"
    results = launch(world, fault_cases.without_a_name, case, name, ranks)
    assert harmless(results) == [[], []]
    (warning,), other = [warnings for _, _, warnings in results]
    assert f"{'FSDPParamGroup' if case.wrap == 'fsdp2' else 'FlatParamHandle'}.{name}" in warning and other == []
    assert "off" in warning and f"rank {ranks[0]}" in warning


def test_layer_clip_says_at_the_start_what_torch_lacks(launch: Launch) -> None:
    for said in launch(2, fault_cases.layer_clip_without, Case("fsdp1"), "process_group"):
        assert (
            "layer_clip.enable: LayerClip cannot be built with torch " in said
            and "(rank 0: AttributeError: process_group); take a torch" in said
        )


@pytest.mark.parametrize("wrap", ["fsdp1", "fsdp2"])
def test_unseen_collective_calls_leave_no_rank_waiting(launch: Launch, wrap: str) -> None:
    """They are unknown, and there is no search, in which they would have to be made after an error."""
    results = launch(2, fault_cases.with_unseen_calls, Case(wrap, planted=THREE))
    (event,), second = harmless(results)
    assert "none of the collective calls" in event["error"] and event["culprits"] == [] and second == []
    (warning,), other = [warnings for _, _, warnings in results]
    assert "none of the collective calls" in warning and other == []


@cases(
    "calls failing errors known",
    ([3, 3], None, ["None", "None"], 3),
    ([3, 3], 1, ["None", "out of memory"], None),
    ([3, 1], 1, ["None", "out of memory"], None),
    ([3, 2], None, ["different numbers", "different numbers"], None),
    ([0, 0], None, ["none of the collective calls"] * 2, None),
)
def test_a_rehearsal_ends_on_all_ranks(
    launch: Launch, calls: list[int], failing: int | None, errors: list[str], known: int | None
) -> None:
    for (error, found), expected in zip(launch(2, fault_cases.rehearsed, calls, failing), errors, strict=True):
        assert expected in error and found == known


def test_a_model_that_asserts_on_its_activations_is_searched(launch: Launch) -> None:
    """A rehearsal without communication would see parameters of zero."""
    case = Case("fsdp2", planted=THREE)
    check_search(launch(2, fault_cases.with_assertions, case), case)


@pytest.mark.parametrize("others", [0.0, 1e6])
def test_the_clock_of_the_first_rank_ends_the_search_on_all(launch: Launch, others: float) -> None:
    """Other ranks would search on, or not at all, by their own clocks."""
    results = launch(2, fault_cases.out_of_time, Case("fsdp2", planted=THREE), others)
    (event,), second = harmless(results)
    assert event["out_of_time"] and not event["complete"] and second == []
    # A reading when it begins, and one before each pass.
    assert event["budget_seconds"] == 4.5 and event["passes"] == 3 and event["error"] is None


@on_ranks(
    (2, Case("fsdp1", stays_unsharded=True, planted=THREE)),
    on_engine(2, Case("fsdp2", stays_unsharded=True, deferred=True, planted=THREE)),
)
@cases(
    "where when",
    ("in a layer's backward", [1]),
    ("in a layer", [1, 2]),
    ids=["rehearsal", "both"],
)
def test_out_of_memory_after_an_evaluation_ends_the_search(
    launch: Launch, world: int, case: Case, where: str, when: list[int]
) -> None:
    """A forward without gradients may leave parameters unsharded, so that the training passes make fewer calls.

    The first extra pass is the rehearsal in the first update. If that fails, the search begins with another one.
    """
    results = launch(world, fault_cases.failing_after_an_evaluation, case, where, when)
    event = check_search(results, case, "" if when == [1] else "OutOfMemoryError")
    assert event["passes"] == 1 or when == [1]


def test_out_of_memory_with_an_idle_expert_ends_the_search(launch: Launch) -> None:
    """Probes make larger collective calls than training does there, also the first of them."""
    case = Case("fsdp2", model="moe", micro_batch=8, planted=((0, 0, 4), (0, 6, 1), (1, 6, 9)))
    results = launch(2, fault_cases.failing_without_an_expert, case)
    assert check_search(results, case, "OutOfMemoryError")["passes"] == 1


def test_a_drop_gives_no_gradient_to_what_had_none(launch: Launch) -> None:
    case = Case("fsdp2", model="moe", micro_batch=8, planted=THREE)
    for stock, dropped, events in launch(2, fault_cases.dropping_without_an_expert, case):
        (event,) = valid_events(events)
        assert event["applied"] and len(event["culprits"]) == len(THREE)
        assert dropped == stock


def test_ranks_with_other_arithmetic_search_alike(launch: Launch) -> None:
    (events,) = same_events(launch(2, fault_cases.with_other_arithmetic, Case(planted=THREE)))
    (event,) = events
    assert places(event) == sorted(THREE) and event["complete"]


@on_ranks((2, Case("fsdp1", trigger="global")), (2, Case("fsdp2", model="tiled")))
def test_ranks_whose_copies_of_a_sum_differ_decide_alike(launch: Launch, world: int, case: Case) -> None:
    """An all-reduce does not promise that all ranks get the same bits; at the threshold they would part."""
    results = launch(world, fault_cases.with_other_sums, case)
    for norm, threshold, run in results:
        assert norm < threshold < norm * (1 + 4e-9) and run.events == ["[]"]


def test_ranks_whose_gradients_are_not_averaged_decide_alike(launch: Launch) -> None:
    """Where verl's fsdp_size is 1, FSDP1 neither shards nor averages."""
    case = Case("fsdp1-orig", hsdp=True, trigger="global", planted=ONE)
    results = launch(2, fault_cases.failing_search, case, "in a layer", [], 1)
    (event,), second = same_events([run for _, run in results])
    assert places(event) == [*ONE] and second == []


@pytest.mark.parametrize("what", ["the units", "a norm", "its culprits", "the event"])
def test_out_of_memory_between_passes_ends_the_search(launch: Launch, what: str) -> None:
    results = launch(2, fault_cases.failing_beside_the_passes, Case("fsdp2", planted=THREE), what)
    first, second = harmless(results)
    assert second == []
    if what == "a norm":
        (event,) = first
        assert "OutOfMemoryError" in event["error"] and not event["complete"]
    else:
        assert first == [] and [run.metrics[0]["actor/gradloc/triggered"] for _, run in results] == [1, 1]


@on_ranks(on_engine(2, Case(mini_batch=4, planted=THREE)))
@cases("what ranks", ("norms", [1]), ("weights", [0, 1]), ("weights and TokenClip", [1]), ("sums", [1]))
def test_an_unread_pass_ends_the_searches_of_an_update(
    launch: Launch, world: int, case: Case, what: str, ranks: list[int]
) -> None:
    """And not training. The next update is watched again."""
    results = launch(world, fault_cases.with_an_unread_pass, case, what, ranks)
    assert harmless(results) == [[], []]
    for _, run in results:
        first, second = (max(as_list(metrics["actor/gradloc/token_norm_max"])) for metrics in run.metrics)
        assert first == 0 and second > 0


@pytest.mark.slow
@cases(
    "function case said",
    (fault_cases.failing_alone, Case(planted=THREE), "an error on this rank"),
    # With sequence parallelism, no other pass's collective calls can be made in place of the rest of this one's.
    pytest.param(
        fault_cases.failing_on_shared_data,
        Case(packed=True, planted=((0, 0, 4),)),
        "OutOfMemoryError(.|\n)*sequence parallelism",
        marks=pytest.mark.target(version="0.9.1"),
    ),
    ids=["unknown to others", "shared sequences"],
)
def test_an_error_that_would_leave_ranks_waiting_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, function: Callable[[Case], None], case: Case, said: str
) -> None:
    monkeypatch.setattr(cluster, "IDLE_SECONDS_AFTER_FAILURE", 5.0)
    with pytest.raises(RankFailed, match=f"rank 1: (.|\n)*RankLostError: .*{said}"):
        Cluster(2).run(function, case)


@pytest.mark.slow
@pytest.mark.parametrize("stock", [pytest.param(False, marks=pytest.mark.target(version="0.9.1")), True])
def test_the_rank_left_by_a_killed_one_fails_by_itself(stock: bool) -> None:
    """In a search as in the training of the unpatched actor."""
    with pytest.raises(RankFailed, match="rank 1: died with exit code -9") as failure:
        Cluster(2).run(fault_cases.killed, Case("fsdp2", planted=THREE), stock)
    assert "rank 0: Traceback" in str(failure.value) and "no answer" not in str(failure.value)
    assert stock or "RankLostError" in str(failure.value)


@on_ranks(on_engine(2, Case("fsdp2", dynamic=True, planted=ONE)))
def test_ranks_with_unequal_lengths_make_as_many_passes(launch: Launch, world: int, case: Case) -> None:
    """verl gives every rank as many micro-batches as the one that needs the most."""
    results = launch(world, fault_cases.unequal_lengths, case)
    ((event,),) = harmless(results)
    assert places(event) == [*ONE] and event["complete"]
    assert all(run.forwards == results[0][1].forwards for _, run in results)
