"""The checks of a run in the patched actor: all ranks agree, and an event's verdict is the warning's."""

from __future__ import annotations

import re

import pytest
import run_check_cases
from actors import Case
from test_actor import Launch, cases, on_engine

ORDINARY = Case("fsdp2", mini_batch=4, kl=True, rollout=True)
DYNAMIC = Case("fsdp1", mini_batch=4, epochs=2, kl=True, rollout=True, dynamic=True)


@pytest.mark.parametrize(
    ("case", "stale_ranks", "name", "said"),
    [
        (
            DYNAMIC,
            (0, 1),
            "stale_weights",
            "The rollout still samples from the weights of step 1: its log-probs agree with",
        ),
        (
            ORDINARY,
            (1,),
            "partly_stale",
            r"For [456]\d% of the responses, as from one of several workers, the rollout still samples",
        ),
        (ORDINARY, (), None, None),
    ],
)
def test_all_ranks_warn_alike(
    launch: Launch, case: Case, stale_ranks: tuple[int, ...], name: str | None, said: str | None
) -> None:
    results = launch(2, run_check_cases.warned, case, stale_ranks, 6)
    assert results == results[:1] * 2
    warnings, state, verdicts, _ = results[0]
    assert len(state["readings"]) == state["updates"] == 6 and state["rates"] > 0
    assert verdicts
    if name is None:
        assert warnings == [] and {verdict["cause"] for verdict in verdicts}.isdisjoint({"stale_weights"})
    else:
        (warning,) = warnings
        assert warning["name"] == name and re.match(said, warning["sentence"])
        for verdict in verdicts:
            assert (verdict["cause"], verdict["check"]) == (name, warning["check"])
            assert re.match(said, verdict["sentence"])


def test_one_update_does_not_warn(launch: Launch) -> None:
    for warnings, state, *_ in launch(2, run_check_cases.warned, ORDINARY, (0, 1), 2):
        assert warnings == [] and state["times"] == {"off": 0, "stale_reference": 1}


@cases(on_engine(2, ORDINARY), (2, DYNAMIC))
def test_log_probs_of_other_positions_are_told_in_the_first_update(launch: Launch, world: int, case: Case) -> None:
    results = launch(world, run_check_cases.warned, case, (), 1, 1)
    assert results == results[:1] * world
    (warning,), _, verdicts, metrics = results[0]
    said = "The rollout's log-probs are one position late in all responses (r[t] fits p[t-1])"
    assert warning["name"] == "misaligned" and warning["sentence"].startswith(said)
    assert verdicts and {verdict["cause"] for verdict in verdicts} == {"misaligned"}
    assert metrics["actor/gradloc/misplaced_share"] == warning["share"] == 1


@cases(on_engine(2, ORDINARY), (2, DYNAMIC))
def test_weights_that_are_written_on_one_rank_are_told_by_layer(launch: Launch, world: int, case: Case) -> None:
    results = launch(world, run_check_cases.warned, case, (), 3, 0, "layers.1")
    assert results == results[:1] * world
    warnings, _, verdicts, _ = results[0]
    assert re.match(r"The weights of layers\.1 changed .*: their norm is [12]\.\d+ times what", warnings[0]["sentence"])
    assert verdicts and {verdict["cause"] for verdict in verdicts} == {"layer"}
