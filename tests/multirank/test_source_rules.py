"""What looks wrong with a culprit: each rule against a real actor's batch, and what is usual in a mini-batch."""

import dataclasses
import functools
import math
import statistics
from typing import Any

import actors
import pytest
import reduced_meter_cases
import torch
import torch.distributed as dist
from actor_cases import train
from actors import KL_COEF, PROMPT, RESPONSE, Case, build_model, on_device
from batches import build_batch, response_length
from mini_batches import token_weights
from notation import cases
from oracle import log_probs_and_entropy
from test_actor import Launch
from valid_events import valid_events
from verl import DataProto

from gradloc.judge.rules import UNLIKELY, UNSAMPLED, classify

# What LlamaConfig has as its eos_token_id.
END, NO_END = 2, 3
# Of every rule but `layer`, which depends on the model, the tokens for which it holds: (rank, row, position).
Place = tuple[int, int, int]
ADVANTAGE: Place = (0, 2, 4)
NONFINITE: Place = (1, 3, 2)
KL: Place = (1, 7, 1)
RATIO: Place = (1, 0, 5)
RARE: Place = (0, 7, 2)
# The rollout gave it 0.
RARE_WITHOUT_LOG_PROB: Place = (1, 6, 3)
ENDED_ROW, END_POSITION = (0, 5), 5
DRIFTED_ROW, MISALIGNED_ROW = (0, 6), (1, 4)
# With one token.
SHORT_ROWS = ((0, 8), (1, 9))

EVERY_TOKEN = {"grad_norm_threshold": 1e-6, "bisect_until": "exhaustive", "bisect_budget_steps": 2000}
CASE = Case(rows=10, mini_batch=10, rollout=True, kl=True, loss_agg_mode="seq-mean-token-mean")


def places(rank: int, row: int, start: int = 0) -> set[Place]:
    return {(rank, row, position) for position in range(start, response_length(rank, row))}


def planted() -> dict[str, set[Place]]:
    """The tokens for which each rule holds, but for `unlikely` and `layer`, which also hold for ordinary tokens."""
    unsampled = places(*ENDED_ROW, END_POSITION + 1) | {RARE_WITHOUT_LOG_PROB}
    return {
        "nonfinite": {NONFINITE},
        "misaligned": places(*MISALIGNED_ROW),
        "unsampled": unsampled,
        "advantage": {ADVANTAGE},
        "weight": {(*row, 0) for row in SHORT_ROWS},
        "kl": {KL},
        # A rollout log-prob of 0 is far from that of the training.
        "token": {RATIO} | places(*MISALIGNED_ROW) | unsampled,
        "sequence": set().union(
            *(places(*r) for r in (DRIFTED_ROW, MISALIGNED_ROW, ENDED_ROW, RARE_WITHOUT_LOG_PROB[:2]))
        ),
    }


def plant(case: Case, batch: DataProto) -> torch.Tensor:
    """Changes a batch; returns its log-probs."""
    rank, tensors = dist.get_rank(), batch.batch
    mask = tensors["response_mask"]
    model = build_model(case).eval()

    def own(place: tuple[int, ...]) -> tuple[int, ...] | None:
        return place[1:] if place[0] == rank else None

    def put(row: int, position: int, token: int) -> None:
        tensors["responses"][row, position] = tensors["input_ids"][row, PROMPT + position] = token

    for name in ("responses", "input_ids"):
        tensors[name][tensors[name] == END] = NO_END
    if row := own(ENDED_ROW):
        put(*row, END_POSITION, END)
    for place in filter(None, map(own, (RARE, RARE_WITHOUT_LOG_PROB))):
        with torch.no_grad():
            names = ("input_ids", "attention_mask", "position_ids")
            inputs = on_device({name: tensors[name][place[:1]] for name in names})
            logits = model(**{name: tensor.reshape(1, -1) for name, tensor in inputs.items()}).logits[0]
        put(*place, int(logits[PROMPT + place[1] - 1].argmin()))
    with torch.no_grad():
        log_prob = log_probs_and_entropy(case, model, on_device(tensors))[0].float().cpu() * mask

    tensors["rollout_log_probs"] = log_prob.clone()
    if "ref_log_prob" in tensors.keys():
        tensors["ref_log_prob"] = log_prob.clone()
    changes = (
        ("advantages", ADVANTAGE, 30.0),
        ("advantages", NONFINITE, math.nan),
        ("advantages", KL, 0.01),
        ("ref_log_prob", KL, 1.0),
        ("rollout_log_probs", RATIO, -1.0),
        *(("rollout_log_probs", (*DRIFTED_ROW, p), -0.3) for p in range(response_length(*DRIFTED_ROW))),
        *(("rollout_log_probs", (*MISALIGNED_ROW, p), -2.0) for p in range(response_length(*MISALIGNED_ROW))),
    )
    for name, place, value in changes:
        if (here := own(place)) and name in tensors.keys():
            tensors[name][here] = value if name == "advantages" else tensors[name][here] + value
    for place in filter(None, map(own, planted()["unsampled"])):
        tensors["rollout_log_probs"][place] = 0.0
    return log_prob


@functools.cache
def every_source(case: Case = CASE) -> tuple[str, dict[str, float]]:
    """A run whose culprits are all tokens with a coefficient.

    Returns:
        tuple: Its events, and this rank's log-probs by "row position".
    """
    log_probs: dict[str, float] = {}

    def change(batch: DataProto) -> None:
        found = plant(case, batch)
        for row, position in batch.batch["response_mask"].nonzero().tolist():
            log_probs[f"{row} {position}"] = float(found[row, position])

    run = train(case, change_batch=change, spike_detection=True, **EVERY_TOKEN)
    return run.events[0], log_probs


# Rows of the longest responses, with masked tokens between two turns. From the second turn of the first row on, the
# rollout's log-probs are of other tokens; of the second row, from the middle of the first turn on.
TURNS, GAP = ((0, 5), (1, 6)), range(3, 5)


def of_two_turns(case: Case) -> str:
    """The events of a run whose culprits are all tokens with a coefficient, where two rows have two turns."""
    rank = dist.get_rank()

    def change(batch: DataProto) -> None:
        tensors = batch.batch
        rollout = tensors["old_log_probs"].clone()
        for number, (at, row) in enumerate(TURNS):
            assert response_length(at, row) == RESPONSE
            if at == rank:
                rollout[row, 1 if number else GAP.stop :] -= 3.0
                for name in ("response_mask", "advantages", "old_log_probs"):
                    tensors[name][row, GAP.start : GAP.stop] = 0.0
                rollout[row, GAP.start : GAP.stop] = 0.0  # as verl's agent loops write them
        tensors["rollout_log_probs"] = rollout

    return train(case, change_batch=change, spike_detection=True, **EVERY_TOKEN).events[0]


def medians(case: Case, sequence_parallel_size: int) -> tuple[str, list[float], list[float]]:
    """A run whose search has one pass, and |A| and w of all response tokens of this rank's rows."""
    detection = {"grad_norm_threshold": 1e-6, "bisect_budget_steps": 1}
    rank = dist.get_rank() // sequence_parallel_size
    batch = build_batch(case, rank).batch
    if sequence_parallel_size > 1:
        events = reduced_meter_cases.train(case, sequence_parallel_size, **detection).events[0]
    else:
        events = train(case, spike_detection=True, **detection).events[0]
    mask = batch["response_mask"]
    factor = case.micro_batch / case.mini_batch
    weights = [token_weights(case, part, factor, {}) for part in mask.split(case.micro_batch)]
    return events, batch["advantages"].abs()[mask > 0].tolist(), torch.cat(weights)[mask > 0].tolist()


def culprits_by_place(results: list[Any]) -> tuple[dict[str, Any], dict[Place, dict[str, Any]]]:
    assert all(found[0] == results[0][0] for found in results)
    (event,) = valid_events(results[0][0])
    return event, {(c["rank"], c["row"], c["position"]): c for c in event["culprits"]}


@pytest.mark.slow
def test_each_rule_holds_for_the_tokens_that_were_planted_for_it(launch: Launch) -> None:
    results = launch(2, every_source)
    event, culprits = culprits_by_place(results)
    log_probs = {
        (rank, *map(int, key.split())): value for rank, (_, found) in enumerate(results) for key, value in found.items()
    }
    assert culprits.keys() == log_probs.keys()  # every response token is a culprit
    for source, places in planted().items():
        assert {place for place, c in culprits.items() if source in c["sources"]} == places, source
    rare = {place for place, value in log_probs.items() if value < math.log(UNLIKELY)}
    for place in (RARE, RARE_WITHOUT_LOG_PROB):
        assert log_probs[place] < math.log(UNSAMPLED)
    assert {place for place, c in culprits.items() if "unlikely" in c["sources"]} == rare
    # The most specific rule is the source.
    for source, place in (
        ("nonfinite", NONFINITE),
        ("misaligned", (*MISALIGNED_ROW, 0)),
        ("unsampled", RARE_WITHOUT_LOG_PROB),
        ("unsampled", (*ENDED_ROW, END_POSITION + 1)),
        ("advantage", ADVANTAGE),
        ("weight", (*SHORT_ROWS[0], 0)),
        ("kl", KL),
        ("token", RATIO),
        ("sequence", (*DRIFTED_ROW, 0)),
        ("unlikely", RARE),
    ):
        assert culprits[place]["source"] == source, source
    # A reader of the event can check the rules.
    for culprit in culprits.values():
        numbers = {name: float(value) if value in ("NaN", "Infinity") else value for name, value in culprit.items()}
        assert classify(numbers, event) == culprit["sources"]
        assert culprit["source"] == culprit["sources"][0]
        ended = (culprit["rank"], culprit["row"]) == ENDED_ROW
        assert culprit["after_eos"] == (ended and culprit["position"] > END_POSITION)


@pytest.mark.slow
def test_the_kl_part_of_a_coefficient_is_what_the_kl_loss_adds(launch: Launch) -> None:
    _, with_kl = culprits_by_place(launch(2, every_source))
    without = dataclasses.replace(CASE, kl=False)
    _, without_kl = culprits_by_place(launch(2, every_source, without))
    assert with_kl.keys() == without_kl.keys()
    for place, culprit in with_kl.items():
        policy = without_kl[place]
        assert policy["kl_coefficient"] is None and "kl" not in policy["sources"]
        added = culprit["coefficient"] - policy["coefficient"]
        if place != NONFINITE:
            assert culprit["kl_coefficient"] == pytest.approx(added, rel=1e-4, abs=1e-6)
    # low_var_kl of log p_ref - log p = 1 has the derivative 1 - e.
    kl = with_kl[KL]
    assert kl["kl_coefficient"] == pytest.approx(kl["weight"] * KL_COEF * (1 - math.e), rel=1e-4)


@pytest.mark.slow
@pytest.mark.target(version="0.9.1")
def test_turns_and_where_the_mismatch_begins_are_recorded(launch: Launch) -> None:
    case = Case(rollout=True, nested=actors.ENGINE)
    event, culprits = culprits_by_place([[found] for found in launch(2, of_two_turns, case)])
    (retokenized, misaligned), gap = TURNS, GAP
    for row in TURNS:
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
    results = launch(world, medians, case, size)
    event, _ = culprits_by_place(results)
    ranks = results[::size]
    for name, values in (("advantage", 1), ("weight", 2)):
        everywhere = [value for rank in ranks for value in rank[values] if value]
        assert event[f"median_{name}"] == pytest.approx(statistics.median(everywhere), rel=1e-6)
    assert event["world_size"] == world // size
    # One rank's median would not do.
    assert len({statistics.median(rank[1]) for rank in ranks}) == len(ranks)
