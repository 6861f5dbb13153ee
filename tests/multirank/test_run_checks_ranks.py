"""The checks of a run in the patched actor: all ranks agree, and an event's verdict is the warning's."""

import itertools
import re
from typing import Any

import torch
import torch.distributed as dist
from actor_cases import train
from actors import Case, events_of
from test_actor import Launch, on_engine, on_ranks
from verl import DataProto


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


def test_all_ranks_warn_alike(launch: Launch) -> None:
    results = launch(2, warned, ORDINARY, (1,), 6)
    assert results == results[:1] * 2
    (warning,), state, verdicts, _ = results[0]
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
    assert results == results[:1] * world
    (warning,), _, verdicts, metrics = results[0]
    said = "The rollout's log-probs are one position late in all responses (r[t] fits p[t-1])"
    assert warning["name"] == "misaligned" and warning["sentence"].startswith(said)
    assert verdicts and {verdict["cause"] for verdict in verdicts} == {"misaligned"}
    assert metrics["actor/gradloc/misplaced_share"] == warning["share"] == 1
