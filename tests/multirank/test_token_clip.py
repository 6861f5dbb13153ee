"""TokenClip in the patched actor, against a plain computation on an unsharded copy."""

import json
import math
from functools import partial
from typing import Any

import pytest
import token_clip_cases
from actor_cases import train
from actors import IDENTITY_THRESHOLD, Case
from test_actor import MODES, ONE, Launch, on_engine, on_ranks
from token_clip_cases import BLOWN, CALLS, FACTOR, LOG_PROBS, SPIKED, Outcome

# In one row, so in one micro-batch.
TWO = ((1, 3, 0), (1, 3, 6))
OTHER_RANK = ((0, 2, 0), (0, 2, 6))
# The norm of a gradient's difference, which has rounding errors of both computations.
EXACT = 2e-5


def check(outcomes: list[list[Outcome]], case: Case) -> list[dict[str, Any]]:
    """Compares every step of every rank; returns the tokens that the spiked step's line has."""
    for of_step in zip(*outcomes, strict=True):
        assert len({json.dumps([of_all_ranks(line) for line in outcome.clips]) for outcome in of_step}) == 1
    check_errors(outcomes, case)
    if case.precision == "float32":
        for outcome in outcomes[0]:
            compare_line(outcome)
            # FSDP1 gives frozen parameters a gradient, too, where they share a flat parameter with others.
            seen = {name: outcome.averages[name] for name in outcome.expected_averages}
            assert seen == pytest.approx(outcome.expected_averages, rel=1e-4)
    (line,) = outcomes[0][SPIKED].clips
    return line["token_clip"]["tokens"]


def of_all_ranks(line: dict[str, Any]) -> dict[str, Any]:
    """A line without what rank 0 alone adds: what the data say of its tokens."""
    found = line["token_clip"]
    tokens = [{name: token[name] for name in ("rank", "micro_batch", "row", "position")} for token in found["tokens"]]
    return {**line, "time": None, "summary": None, "token_clip": {**found, "tokens": tokens}}


def check_errors(outcomes: list[list[Outcome]], case: Case) -> None:
    assert all(outcome.error < max(EXACT, case.tolerance) for of_rank in outcomes for outcome in of_rank)


def compare_line(outcome: Outcome) -> None:
    """The line of an update's only mini-batch, with the tokens that the plain computation has found over a bound."""
    if not outcome.expected:
        assert outcome.clips == []
        return
    (line,) = outcome.clips
    found = line["token_clip"]
    counts = {name: 0 for name in found["over"]}
    first: dict[tuple[int, int, int], Any] = {}
    for signal in outcome.expected:
        counts[signal.boundary] += 1
        first.setdefault((signal.rank, signal.row, signal.position), signal)
    assert found["over"] == counts
    tokens = {(token["rank"], token["row"], token["position"]): token for token in found["tokens"]}
    assert tokens.keys() == first.keys()
    for place, token in tokens.items():
        assert token["boundary"] == first[place].boundary
        assert token["micro_batch"] == first[place].micro_batch
        assert token["multiple"] == pytest.approx(first[place].multiple, rel=1e-4, nan_ok=True)


@on_ranks(
    (2, Case(planted=ONE)),
    (1, Case("none", planted=((0, 2, 6),))),
    (2, Case("fsdp1-orig", checkpointing=True, tied=True, planted=ONE)),
    (2, Case(loss_agg_mode=MODES[2], dynamic=True, kl=True, entropy=True, planted=ONE)),
    (2, Case("fsdp1", loss_mode="gspo", loss_agg_mode=MODES[1], planted=ONE)),
    (2, Case("fsdp1", model="lora", planted=ONE)),
    (2, Case(model="frozen", planted=ONE)),
    on_engine(2, Case("fsdp1", precision="float16", loss_scale=8.0, planted=ONE)),
    (4, Case(hsdp=True, planted=ONE)),
    on_engine(2, Case(packed=True, dynamic=True, micro_batch=1, deferred=True, planted=ONE)),
    on_engine(2, Case("fsdp1-orig", fused=True, planted=ONE)),
    on_engine(2, Case(nan=ONE, nested=True, packed=True)),
)
def test_an_outlier_at_the_log_probs_leaves_the_backward_pass(launch: Launch, world: int, case: Case) -> None:
    (token,) = check(launch(world, token_clip_cases.run, case), case)
    rank, row, position = (case.planted or case.nan)[0]
    assert (token["rank"], token["row"], token["position"]) == (rank, row, position)
    assert token["boundary"] == LOG_PROBS and token["cut"]
    assert token["multiple"] > 10 * FACTOR or math.isnan(token["multiple"])


@on_ranks(
    (2, Case("fsdp1", checkpointing=True)),
    (2, Case("fsdp1", packed=True, dynamic=True)),
    on_engine(2, Case(tied=True, deferred=True, nested=True)),
    (2, Case(model="moe", micro_batch=8)),
    (2, Case(model="tiled", micro_batch=8)),
    (2, Case(activation_offload=True, checkpointing=True)),
)
def test_an_outlier_of_a_layer_is_cut_where_it_leaves_it(launch: Launch, world: int, case: Case) -> None:
    tokens = check(launch(world, partial(token_clip_cases.run, case, blown_layer=1)), case)
    (token,) = tokens
    rank, row, position = BLOWN
    # Its hidden state predicts the next token.
    assert (token["rank"], token["row"], token["position"]) == (rank, row, position + 1)
    assert token["boundary"] == "layers.0" and token["cut"]


def test_reentrant_checkpointing_is_cut_once(launch: Launch) -> None:
    case = Case(checkpointing=True)
    reentrant = token_clip_cases.checkpoint_reentrantly
    check(launch(2, partial(token_clip_cases.run, case, blown_layer=1, change_model=reentrant)), case)


@on_ranks(on_engine(4, Case(packed=True, planted=((1, 3, 6),))))
def test_ranks_that_share_their_sequences_cut_the_same_token(launch: Launch, world: int, case: Case) -> None:
    (token,) = check(launch(world, partial(token_clip_cases.run, case, size=2)), case)
    assert (token["rank"], token["row"], token["position"]) == case.planted[0]


def test_log_only_writes_down(launch: Launch) -> None:
    case = Case("fsdp1", packed=True)
    outcomes = launch(2, partial(token_clip_cases.run, case, "log", 1))
    tokens = check(outcomes, case)
    assert tokens and not any(token["cut"] for token in tokens)
    assert not any(outcomes[0][SPIKED].clips[0]["token_clip"]["cut"].values())


def test_smooth_leaves_a_part_of_what_is_a_little_over(launch: Launch) -> None:
    """With a bound that ordinary tokens reach, many are between it and its double."""
    case = Case("fsdp1", packed=True)
    outcomes = launch(2, partial(token_clip_cases.run, case, "smooth", max_share=1.0, factor=1.05))
    check_errors(outcomes, case)
    multiples = [signal.multiple for outcome in outcomes[0] for signal in outcome.expected]
    assert any(1.05 < multiple < 2.1 for multiple in multiples)


def test_more_than_the_largest_share_are_left(launch: Launch) -> None:
    """Two tokens of a micro-batch are over the bound, and one of some forty may be cut: there, none is."""
    case = Case("fsdp1", packed=True, micro_batch=1, planted=(*TWO, (1, 6, 9)))
    outcomes = launch(2, partial(token_clip_cases.run, case, max_share=0.02))
    check(outcomes, case)
    (line,) = outcomes[0][SPIKED].clips
    found = line["token_clip"]
    assert LOG_PROBS in found["refused"]
    assert [(t["row"], t["position"]) for t in found["tokens"] if t["cut"]] == [p[1:] for p in case.planted[2:]]
    assert "more than max_share" in line["summary"]


@on_ranks((2, Case("fsdp1", packed=True, checkpointing=True)), on_engine(2, Case(dynamic=True)))
@pytest.mark.parametrize("action", ["drop", "smooth"])
def test_with_nothing_over_its_bound_training_is_as_without(
    launch: Launch, world: int, case: Case, action: str
) -> None:
    for same, run in launch(world, token_clip_cases.harmless, case, action):
        assert all(same.values()), same
        assert not any(run.clips)


def test_gradloc_sees_what_token_clip_leaves(launch: Launch) -> None:
    """With action log GradLoc finds the token; with drop there is no spike left for it."""
    options = {"spike_detection": True, "grad_norm_threshold": IDENTITY_THRESHOLD, "bisect_budget_steps": 100}
    for action in ("log", "drop"):
        clip = token_clip_cases.token_clip_config(enable=True, warmup_steps=2, max_share=0.2, action=action)
        trained = partial(train, calls=CALLS, token_clip=clip, **options)
        run, _ = launch(2, trained, Case("fsdp1", packed=True, planted=ONE))
        events = list(map(json.loads, run.events))
        assert [len(of_update) for of_update in run.clips] == [seed == 0 for seed in CALLS]
        assert [len(of_update) for of_update in events] == [action == "log" and seed == 0 for seed in CALLS]
        if action == "log":
            (event,) = events[SPIKED]
            assert [(c["rank"], c["row"], c["position"]) for c in event["culprits"]] == list(ONE)


def test_the_passes_of_drop_are_cut_as_training_was(launch: Launch) -> None:
    """TokenClip cuts an outlier that a layer makes; two planted tokens are too many for it, and GradLoc drops them."""
    case = Case("fsdp1", packed=True, checkpointing=True, planted=OTHER_RANK)
    run = partial(token_clip_cases.run, case, blown_layer=1, max_share=0.02, left_out=OTHER_RANK)
    options = {"spike_detection": True, "grad_norm_threshold": IDENTITY_THRESHOLD, "spike_action": "drop"}
    for outcomes in launch(2, partial(run, **options)):
        outcome = outcomes[SPIKED]
        (event,) = outcome.events
        assert event["applied"] and len(event["culprits"]) == 2
        assert [token["cut"] for token in outcome.clips[0]["token_clip"]["tokens"] if token["rank"] == 1] == [True]
        assert outcome.error < EXACT


def test_the_search_starts_at_a_token_whose_signal_stands_out(launch: Launch) -> None:
    """The token's log-prob and coefficient are ordinary, so that suspicion alone does not expect it."""
    run = partial(token_clip_cases.search, Case(rows=64, mini_batch=64, micro_batch=32), blown_layer=1, threshold=300.0)
    (alone, *_), (known, *_) = launch(2, run), launch(2, partial(run, clip=True))
    rank, row, position = BLOWN
    for event in (alone, known):
        assert [(c["rank"], c["row"], c["position"]) for c in event["culprits"]] == [(rank, row, position + 1)]
    assert known["passes"] < alone["passes"]
