"""The checks of a run in the patched actor: rank 0 judges the sums of all, and an event's verdict is the warning's."""

import itertools
import json
import re
import threading
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from actor_cases import train
from actors import Case, events_of
from notation import cases
from test_actor import Launch, on_engine, on_ranks
from verl import DataProto

import gradloc.judge
from gradloc import guarded, judging


def warned(case: Case, stale_ranks: tuple[int, ...], calls: int, late: int = 0) -> tuple[Any, ...]:
    """What is said after the last update of several.

    The policy moves away from the reference with each update, as training does: in the first one they are the same.

    Args:
        case (Case): What is trained.
        stale_ranks (tuple): Whose rollout has the reference's weights.
        calls (int): The number of updates.
        late (int): By how many positions the rollout's lists are late: a token in front has a log-prob, too.

    Returns:
        tuple: The warnings, the state for a checkpoint, the verdicts of the last update's events, and its metrics.
    """
    actors: list[Any] = []
    updates = itertools.count()

    def change(batch: DataProto) -> None:
        columns, update = batch.batch, next(updates)
        generator = torch.Generator().manual_seed(dist.get_rank())
        old = columns["old_log_probs"]
        columns["ref_log_prob"] = old - 0.5 * update * torch.rand(old.shape, generator=generator)
        source = columns["ref_log_prob"] if dist.get_rank() in stale_ranks else old
        columns["rollout_log_probs"] = source.roll(late, 1) + 0.01 * torch.randn(old.shape, generator=generator)

    detection = {"spike_detection": True, "grad_norm_threshold": 1e-6, "bisect_budget_steps": 2}
    train(case, calls=calls, prepare=actors.append, change_batch=change, **detection)
    gradloc = actors[0].gradloc
    verdicts = [event["verdict"] for event in events_of(actors[0])]
    return gradloc.warnings, gradloc.state_dict()["run_checks"], verdicts, gradloc.metrics()


ORDINARY = Case("fsdp2", mini_batch=4, kl=True, rollout=True)


def test_rank_0_warns_by_the_sums_of_all_ranks(launch: Launch) -> None:
    first, other = launch(2, warned, ORDINARY, (1,), 6)
    assert other[:2] == ([], None) and other[2:] == first[2:]
    (warning,), state, verdicts, _ = first
    assert len(state["readings"]) == state["updates"] == 6 and state["rates"] > 0
    said = r"For [456]\d% of the responses, as from one of several workers .*, the rollout still samples"
    assert warning["name"] == "partly_stale" and re.match(said, warning["sentence"])
    for verdict in verdicts:
        assert (verdict["cause"], verdict["check"]) == ("partly_stale", warning["check"])
        assert re.match(said, verdict["sentence"])
    assert verdicts


@on_ranks(on_engine(2, Case("fsdp1", mini_batch=4, epochs=2, kl=True, rollout=True, dynamic=True)))
def test_log_probs_of_other_positions_are_told_at_once(launch: Launch, world: int, case: Case) -> None:
    results = launch(world, warned, case, (), 1, 1)
    assert all(other[2:] == results[0][2:] for other in results)
    (warning,), _, verdicts, metrics = results[0]
    said = "The rollout's log-probs are one position late in all responses (r[t] fits p[t-1])"
    assert warning["name"] == "misaligned" and warning["sentence"].startswith(said)
    assert verdicts and {verdict["cause"] for verdict in verdicts} == {"misaligned"}
    assert metrics["actor/gradloc/misplaced_share"] == warning["share"] == 1


def broken(method: str, how: str) -> tuple[Any, ...]:
    """Training with a judge that fails in a method: warnings, metrics, weights, and how often it was asked that.

    And whether the metrics say that the run is checked.
    """
    actors: list[Any] = []
    ends = threading.Event()
    fails = {"raises": ZeroDivisionError("a bug of the judge"), "exits": SystemExit(3), "hangs": lambda *_: ends.wait()}
    of_judge: Any = mock.Mock(side_effect=fails.get(how), return_value=None if method == "__init__" else 7)
    with (
        mock.patch.object(gradloc.judge.RunChecks, method, of_judge, create=True),
        mock.patch.object(judging, "_thread", guarded.PatientThread("the judge")),
        mock.patch.object(guarded, "PATIENCE", 0.5 if how == "hangs" else guarded.PATIENCE),
    ):
        run = train(ORDINARY, calls=2, prepare=actors.append, spike_detection=True, grad_norm_threshold=1e-6)
        assert json.loads(run.events[-1])
        actors[0].gradloc.load_state_dict(actors[0].gradloc.state_dict())
        metrics = actors[0].gradloc.metrics()
        is_checked = metrics["actor/gradloc/checked"]
        warnings = actors[0].gradloc.warnings
    ends.set()
    return warnings, sorted(metrics), [each.tolist() for each in run.parameters], of_judge.call_count, is_checked


@cases(
    "method how",
    *((name, "raises") for name in ("start_update", "take_in", "add_step", "warnings", "__init__", "load_state_dict")),
    *(("take_in", "hangs"), ("warnings", "hangs"), ("take_in", "exits"), ("warnings", "answers 7")),
)
def test_a_failure_of_the_judge_costs_its_answer_alone(launch: Launch, method: str, how: str) -> None:
    first, other = launch(2, broken, method, how)
    assert (first[0], other[0]) == (None, []) and first[1] == other[1]
    assert first[3] <= 1 + (method == "load_state_dict")  # which is tried once more, without what was saved
    # Of the last mini-batch, before a state was loaded.
    assert first[4] == other[4] == float(method == "load_state_dict")
    whole = launch(2, broken, "unheard_of", "raises")[0]
    assert first[2] == whole[2] and whole[4] == 1
