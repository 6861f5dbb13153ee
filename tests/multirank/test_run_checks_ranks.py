"""The checks of a run in the patched actor: all ranks agree, and an event's verdict is the warning's."""

from __future__ import annotations

import re

import pytest
import run_check_cases
from actors import Case
from test_actor import Launch, cases


@cases(
    (2, Case("fsdp2", mini_batch=4, kl=True, rollout=True), pytest.mark.target(version="0.9.1")),
    (2, Case("fsdp1", mini_batch=4, epochs=2, kl=True, rollout=True, dynamic=True)),
)
@pytest.mark.parametrize(
    ("stale_ranks", "name", "said"),
    [
        ((0, 1), "stale_weights", "The rollout still samples from the weights of step 1: its log-probs agree with"),
        (
            (1,),
            "partly_stale",
            r"For [456]\d% of the responses, as from one of several workers, the rollout still samples",
        ),
        ((), None, None),
    ],
)
def test_all_ranks_warn_alike(
    launch: Launch, world: int, case: Case, stale_ranks: tuple[int, ...], name: str | None, said: str | None
) -> None:
    results = launch(world, run_check_cases.warned, case, stale_ranks, 3)
    assert results == results[:1] * world
    warnings, state, verdicts = results[0]
    assert len(state["readings"]) == 3 and state["rates"] > 0
    assert verdicts
    if name is None:
        assert warnings == [] and {verdict["cause"] for verdict in verdicts}.isdisjoint({"stale_weights"})
    else:
        (warning,) = warnings
        assert warning["name"] == name and re.match(said, warning["sentence"])
        for verdict in verdicts:
            assert (verdict["cause"], verdict["check"]) == (name, warning["check"])
            assert re.match(said, verdict["sentence"])


@cases((2, Case("fsdp2", mini_batch=4, kl=True, rollout=True)))
def test_one_update_does_not_warn(launch: Launch, world: int, case: Case) -> None:
    for warnings, state, _ in launch(world, run_check_cases.warned, case, (0, 1), 1):
        assert warnings == [] and state["held"] == {"rule": "stale_reference", "times": 1}
