"""The patched actor against brute force, under FSDP1 and FSDP2 on several processes."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import actor_cases
import pytest
import torch.distributed as dist
from actor_cases import Run
from actors import ENGINE, Case
from notation import cases
from oracle import Token, Unit
from valid_events import valid_events
from verl import DataProto
from verl.utils.metric import reduce_metrics

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
# Different ranks, micro-batches and positions: first, middle and last ones.
ONE = ((1, 3, 6),)
THREE = ((0, 0, 4), (1, 3, 0), (1, 6, 9))
FIRST = THREE[:2]
# All of a row.
ROW = tuple((0, 0, position) for position in range(5))
# The other row of a planted token's micro-batch, a row of an ordinary one, and all rows of a third.
STILL = ((1, 2), (0, 3), (0, 6), (0, 7))
CLIPPED = ((0, 0, 1), (0, 2, 1), (1, 4, 3))
# On each replica of a model, and on both shards of one.
REPLICAS = ((0, 0, 4), (2, 4, 2), (3, 7, 0))

Launch = Callable[..., list[Any]]
ON_ENGINE = pytest.mark.target(version="0.9.1")


def on_engine(world: int, case: Case) -> tuple[Any, ...]:
    """A row of `on_ranks` that runs with the engine of verl 0.9.1, too: one for each thing that the adapters do."""
    return world, case, ON_ENGINE


def only_engine(world: int, case: Case) -> tuple[Any, ...]:
    """A row of `on_ranks` that runs with the engine alone."""
    return *on_engine(world, case), pytest.mark.skipif(not ENGINE, reason="this verl trains with its legacy actor")


def on_ranks(*rows: tuple[Any, ...], names: str = "world case") -> pytest.MarkDecorator:
    """Parametrizes a test by the number of ranks, the case and more: each row has these values, and then its marks."""
    count, params = len(names.split()), []
    for row in rows:
        values = row[:count]
        name = "-".join(str(getattr(value, "id", value)) for value in values)
        params.append(pytest.param(*values, id=name, marks=row[count:]))
    return pytest.mark.parametrize(names.split(), params)


def near(value: float, tolerance: float = Case().tolerance) -> Any:
    return pytest.approx(value, rel=tolerance)


def as_list(value: Any) -> list[float]:
    return value if isinstance(value, list) else [value]


def places(event: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Rank, row and position of its culprits, in their order."""
    return sorted((culprit["rank"], culprit["row"], culprit["position"]) for culprit in event["culprits"])


def same_events(runs: list[Run]) -> list[list[dict[str, Any]]]:
    """The events of every call, after checking that all ranks have the same and that they are valid."""
    assert all(run.events == runs[0].events for run in runs)
    return [valid_events(events) for events in runs[0].events]


def harmless(results: Sequence[tuple[Any, ...]]) -> list[list[dict[str, Any]]]:
    """The events of every call, after checking that training was bit for bit as without a search.

    Args:
        results (Sequence): Of each rank: what is bit-identical, the run, and more.
    """
    for same, *_ in results:
        assert all(same.values()), same
    return same_events([run for _, run, *_ in results])


def skip_what_verl_cannot_train(case: Case) -> None:
    """What verl 0.9.1 itself cannot do, with the versions in tests/requirements-0.9.1.txt."""
    if ENGINE and case.model == "vision":
        pytest.skip("its forward of a micro-batch without an image fails with transformers 5")
    if ENGINE and case.fused and case.wrap == "fsdp2":
        pytest.skip("its fused kernels fail under FSDP2: they multiply a sharded weight by a whole tensor")


def check_unit(found: dict[str, Any], unit: Unit, threshold: float, tolerance: float) -> None:
    assert found["norm"] == near(unit.norm, tolerance)
    assert found["layer_norms"] == {name: near(norm, tolerance) for name, norm in unit.layer_norms.items()}
    assert found["threshold"] == near(threshold * unit.weight)
    assert found["token_equivalent"] == near(unit.norm / unit.weight, tolerance)
    assert found["tokens"] == unit.tokens


@on_ranks(
    on_engine(2, Case("fsdp1", checkpointing=True, mini_batch=4, epochs=2, kl=True)),
    (2, Case("fsdp1-orig", checkpointing=True, tied=True, mini_batch=4, kl=True, entropy=True)),
    (2, Case("fsdp2", tied=True, entropy=True, loss_agg_mode=MODES[3], mini_batch=4)),
    on_engine(2, Case(loss_agg_mode=MODES[1], dynamic=True)),
    # Rows without an advantage, as those of a group with equal rewards: beside others, and all of a micro-batch.
    on_engine(2, Case(mini_batch=4, still=STILL, clipped=CLIPPED, dual_clipped=((0, 5, 3),), loss_agg_mode=MODES[2])),
    (2, Case(mini_batch=4, still=STILL, kl=True)),
    (2, Case("fsdp1", loss_mode="gspo", dynamic=True, mini_batch=4, still=STILL)),
    # A micro-batch without a response token, as rejection sampling may leave one.
    on_engine(2, Case(mini_batch=4, micro_batch=1, rollout=True)),
    (1, Case("none", checkpointing=True, reentrant=True)),
    on_engine(1, Case("fsdp2", checkpointing=True, reentrant=True, mini_batch=4)),
    (2, Case("fsdp2", mini_batch=4, loss_mode="bypass_mode")),
)
def test_norms_of_micro_batches_are_those_of_the_oracle(launch: Launch, world: int, case: Case) -> None:
    """A threshold of nearly zero makes every unit an event's unit, and a budget of two passes keeps it short."""
    results = launch(world, actor_cases.units_and_run, case)
    units, norms, _ = results[0]
    (events,) = same_events([result[-1] for result in results])
    steps = case.epochs * case.rows // case.mini_batch
    assert [(event["epoch"], event["mini_batch"]) for event in events] == [
        divmod(step, steps // case.epochs) for step in range(steps)
    ]
    expected = {unit.key: unit for unit in units}
    for event, norm in zip(events, norms, strict=True):
        assert event["global_norm"] == near(norm, case.tolerance)
        assert not event["complete"] and event["passes"] == 2 and event["open_segments"]
        for found in event["units"]:
            unit = expected.pop((event["epoch"], event["mini_batch"], found["rank"], found["micro_batch"]))
            check_unit(found, unit, 1e-6, case.tolerance)
    assert not any(unit.weight for unit in expected.values())
    figures = figures_of(case, units)
    check_sums(results[0][-1])
    for _, _, run in results:
        found = {name: run.metrics[0].get(f"actor/gradloc/{name}") for name in figures}
        # A ratio is as far off as the difference of log-probs that it is the power of.
        assert found == {name: near(value, 2e-5) for name, value in figures.items()}
        assert ("actor/gradloc/rollout_ratio_max" in run.metrics[0]) == case.rollout
    assert case.on_policy or figures["ratio_max"] > 1.01
    # One rank alone happens to have no unlikely token.
    assert 0 < figures["unlikely_share"] < 1


def check_sums(of_rank_0: Run) -> None:
    """What passes and losses of any kind give is what the judge expects of them."""
    assert {name: of_rank_0.identities[name] for name in ("loss", "gradient")} == {"loss": "held", "gradient": "held"}


def figures_of(case: Case, units: list[Unit]) -> dict[str, float]:
    """Those of an update, from all tokens of all ranks and mini-batches."""
    log_prob, old, *rollout = (
        [value for unit in units for value in unit.log_probs[i]] for i in range(2 + case.rollout)
    )
    largest = max(unit.norm / unit.weight for unit in units if unit.weight)
    figures = {
        "token_norm_max": largest,
        "spike_margin": largest / 1e-6,
        "ratio_max": math.exp(max(p - q for p, q in zip(log_prob, old, strict=True))),
        "unlikely_share": sum(p < math.log(0.05) for p in log_prob) / len(log_prob),
    }
    if rollout:
        figures["misaligned_share"] = 0.0
        figures["rollout_ratio_max"] = math.exp(max(abs(p - q) for p, q in zip(log_prob, rollout[0], strict=True)))
    return figures


@on_ranks(
    (*on_engine(2, Case("fsdp2", planted=THREE)), pytest.mark.smoke),
    on_engine(2, Case("fsdp2", checkpointing=True, mini_batch=4, kl=True, entropy=True, planted=ONE)),
    (2, Case(loss_agg_mode=MODES[3], dynamic=True, planted=THREE)),
    on_engine(
        2,
        Case("fsdp1", mini_batch=4, rollout=True, reference=True, planted=THREE, clipped=((0, 3, 1), (1, 4, 3))),
    ),
    (2, Case("fsdp2", mini_batch=4, still=STILL, clipped=CLIPPED, kl=True, planted=THREE)),
    (2, Case("fsdp2", loss_mode="gspo", mini_batch=4, planted=THREE)),
    on_engine(2, Case("fsdp1-orig", dynamic=True, trigger="global", planted=THREE)),
    (1, Case("fsdp1", dynamic=True, mini_batch=4, planted=((0, 0, 1), (0, 5, 9)))),
    (2, Case("fsdp1", model="lora", planted=ONE)),
    on_engine(2, Case(model="lora", planted=THREE)),
    (2, Case("fsdp1-orig", model="frozen", planted=ONE)),
    (2, Case(model="frozen", planted=ONE)),
    # Whole micro-batches reach every expert on every rank, or FSDP2 could not train on them; parts of them do not.
    (2, Case("fsdp1", model="moe", micro_batch=8, planted=THREE)),
    on_engine(2, Case("fsdp2", model="moe", micro_batch=8, planted=THREE)),
    # Mixed batches: two rows of three have no image.
    (2, Case("fsdp1-orig", model="vision", planted=THREE)),
    (2, Case("fsdp2", model="vision", tool_images=True, planted=THREE)),
    on_engine(2, Case("fsdp2", activation_offload=True, checkpointing=True, planted=ONE)),
    on_engine(2, Case("fsdp1", precision="float16", loss_scale=8.0, planted=THREE)),
    on_engine(2, Case("fsdp2", precision="bfloat16", planted=THREE)),
    (4, Case("fsdp1", hsdp=True, planted=REPLICAS)),
    on_engine(4, Case("fsdp2", hsdp=True, planted=REPLICAS)),
    (2, Case(offload_policy=True, checkpointing=True, planted=THREE)),
    on_engine(2, Case("fsdp2", packed=True, entropy=True, dynamic=True, planted=THREE)),
    on_engine(2, Case("fsdp1-orig", fused=True, planted=THREE)),
    (2, Case("fsdp2", packed=True, fused=True, entropy=True, planted=THREE)),
    only_engine(2, Case(nested=True, mini_batch=4, rollout=True, kl=True, planted=THREE)),
    # One of the micro-batches has no response, and so no column.
    only_engine(2, Case("fsdp1-orig", deferred=True, nested=True, micro_batch=1, kl=True, entropy=True, planted=THREE)),
    # The policy losses that verl has.
    (2, Case(mini_batch=4, rollout_weights=True, dual_clipped=((0, 2, 1), (1, 2, 1)), planted=FIRST)),
    (2, Case("fsdp1", loss_mode="sapo", planted=FIRST)),
    (2, Case("fsdp1", loss_mode="gpg", mini_batch=4, rollout_weights=True, planted=FIRST)),
    (2, Case(loss_mode="clip_cov", planted=FIRST)),
    (2, Case(loss_mode="kl_cov", planted=FIRST)),
    # An advantage is the sequence's here: so is the spike.
    (2, Case(loss_mode="geo_mean", rollout_weights=True, planted=ROW)),
    (2, Case("fsdp1", loss_mode="cispo", mini_batch=4, planted=FIRST)),
    (2, Case(loss_mode="bypass_mode", mini_batch=4, kl=True, planted=FIRST)),
)
def test_planted_tokens_are_found(launch: Launch, world: int, case: Case) -> None:
    skip_what_verl_cannot_train(case)
    results = launch(world, actor_cases.search, case)
    units, norms, threshold, run = results[0]
    (events,) = same_events([result[-1] for result in results])
    by_step: dict[tuple[int, int], list[Unit]] = {}
    for unit in units:
        by_step.setdefault((unit.epoch, unit.mini_batch), []).append(unit)
        # The brute force itself: the tokens' gradients make up the unit's.
        assert unit.residual < case.tolerance
    spiked = {
        step: norm
        for (step, members), norm in zip(sorted(by_step.items()), norms, strict=True)
        if any(unit.norm > threshold * unit.weight for unit in members)
    }
    assert [(event["epoch"], event["mini_batch"]) for event in events] == list(spiked)
    for event in events:
        step = (event["epoch"], event["mini_batch"])
        check_event(event, case, world, by_step[step], spiked[step], threshold)
    ordinary = len(by_step) * len(by_step[0, 0]) // world
    for _, _, _, other in results:
        # One forward of each rank a pass, and one of the rehearsal.
        assert other.forwards == [ordinary + sum(event["passes"] for event in events) + (world > 1)]
    if case.loss_mode != "geo_mean":  # it takes the mean of a sequence's advantages, which here are no longer alike
        check_sums(run)
    metrics = run.metrics[0]
    assert sum(as_list(metrics["actor/gradloc/triggered"])) == len(events)
    assert sum(as_list(metrics["actor/gradloc/culprits"])) == len(case.planted) * case.epochs
    assert sum(as_list(metrics["actor/gradloc/passes"])) == sum(event["passes"] for event in events)
    assert sum(as_list(metrics["actor/gradloc/seconds"])) > 0


def check_event(
    event: dict[str, Any], case: Case, world: int, units: list[Unit], norm: float, threshold: float
) -> None:
    over = {(unit.rank, unit.micro_batch): unit for unit in units if unit.norm > threshold * unit.weight}
    assert event["complete"] and event["open_segments"] == [] and 0 < event["passes"] <= event["budget"] == 500
    assert (event["action"], event["search"], event["world_size"], event["global_step"]) == ("log", "local", world, 7)
    assert event["threshold"] == near(threshold)
    assert event["global_norm"] == near(norm, case.tolerance)
    assert event["trigger"]["kind"] == case.trigger
    if case.trigger == "global":
        weight = math.hypot(*(unit.weight for unit in units)) / world
        assert event["trigger"]["norm"] == near(norm, case.tolerance)
        assert event["trigger"]["threshold"] == near(threshold * weight)
    found = {(unit["rank"], unit["micro_batch"]): unit for unit in event["units"]}
    assert set(found) == set(over) and len(event["units"]) == len(over)
    for key, unit in over.items():
        check_unit(found[key], unit, threshold, case.tolerance)

    for culprit, token in check_culprits(event, units, threshold, case):
        assert culprit["threshold"] == near(threshold)
        assert culprit["coefficient"] == near(token.coefficient, case.tolerance)
        assert (culprit["response_kl"] is None) == (culprit["ref_log_prob"] is None)
        # A log-prob is a difference of larger numbers, so its own size does not bound its error.
        for name, value in token.facts.items():
            assert culprit[name] == (
                value if value is None else pytest.approx(value, rel=case.tolerance, abs=case.tolerance)
            )


def check_medians(event: dict[str, Any], units: list[Unit]) -> None:
    """They are those of all ranks' tokens: one rank's would not do."""
    tokens = [token for unit in units for token in unit.each]
    for name, values in {
        "advantage": [abs(token.facts["advantage"]) for token in tokens if token.facts["advantage"]],
        "weight": [token.weight for token in tokens if token.weight],
    }.items():
        assert event[f"median_{name}"] == near(statistics.median(values)), name


def tokens_over(units: list[Unit], threshold: float) -> dict[tuple[int, int, int, int], tuple[Unit, Token]]:
    """By rank, micro-batch, row and position."""
    return {
        (unit.rank, unit.micro_batch, token.row, token.position): (unit, token)
        for unit in units
        for token in unit.each
        if token.norm > threshold
    }


def check_culprits(
    event: dict[str, Any], units: list[Unit], threshold: float, case: Case
) -> list[tuple[dict[str, Any], Token]]:
    """The culprits with their tokens, after checking which they are, their norms, and the medians beside them."""
    check_medians(event, units)
    expected = tokens_over(units, threshold)
    culprits = {(c["rank"], c["micro_batch"], c["row"], c["position"]): c for c in event["culprits"]}
    assert set(culprits) == set(expected) and len(event["culprits"]) == len(expected)
    for key, (unit, token) in expected.items():
        culprit = culprits[key]
        assert culprit["grad_norm"] == near(token.norm, case.tolerance)
        assert culprit["layer_norms"] == {
            name: near(value, case.tolerance) for name, value in token.layer_norms.items()
        }
        assert culprit["weight"] == near(token.weight)
        assert culprit["share"] == near(token.weight * token.norm / unit.norm, case.tolerance)
    return [(culprits[key], token) for key, (_, token) in expected.items()]


def test_a_spike_of_one_micro_batch_that_the_mean_hides_is_found(launch: Launch) -> None:
    """The threshold lies between what the two triggers compare it with: only that of the units fires.

    Without a spike, as in the second update and with the other trigger, nothing happens.
    """
    case = Case("fsdp1", planted=ONE)
    results = launch(2, actor_cases.both_triggers, case)
    by_micro_batch, second = same_events([by_micro_batch for by_micro_batch, _ in results])
    assert [(event["trigger"]["kind"], len(event["units"])) for event in by_micro_batch] == [("unit", 1)]
    assert second == []
    for _, by_norm in results:
        ordinary = case.rows // case.micro_batch
        assert by_norm.events == ["[]"] * 2
        assert by_norm.forwards == [ordinary + 1, ordinary]  # the rehearsal is in the first update
        for metrics in by_norm.metrics:
            for name in "triggered", "culprits", "passes":
                assert sum(as_list(metrics[f"actor/gradloc/{name}"])) == 0


# gpg has no ratio to clip: dropout alone can move that far.
TWO_EPOCHS = Case(
    checkpointing=True, dropout=0.2, optimizer="adamw", mini_batch=4, epochs=2, loss_mode="gpg", planted=ONE
)


@on_ranks(
    on_engine(2, Case("fsdp1", dropout=0.2, optimizer="adamw", reference=True, rollout=True, planted=THREE)),
    (2, dataclasses.replace(TWO_EPOCHS, wrap="fsdp1-orig", epochs=1)),
    on_engine(2, TWO_EPOCHS),
    (1, Case("none", dropout=0.2, optimizer="adamw", planted=((0, 5, 9),))),
    (2, Case("fsdp2", planted=ONE, nan=((0, 2, 7), (1, 3, 2)))),
    only_engine(2, Case(deferred=True, dropout=0.2, optimizer="adamw", planted=THREE)),
    only_engine(2, Case("fsdp1", deferred=True, nested=True, micro_batch=1, kl=True, entropy=True, planted=THREE)),
)
def test_training_is_bit_identical_after_a_search(launch: Launch, world: int, case: Case) -> None:
    results = launch(world, actor_cases.identity, case)
    first, second = same_events([run for _, _, run in results])
    assert sum(event["passes"] for event in first) > 0 and second == []
    for searched, off, _ in results:
        assert all(searched.values()), searched
        assert all(off.values()), off


# Micro-batches have two rows, ranks eight: one micro-batch, and one rank.
@pytest.mark.parametrize("rejected", [(2, 0), pytest.param((0, 8), marks=pytest.mark.every_target)])
def test_metrics_without_the_rejected_responses_are_averaged(launch: Launch, rejected: tuple[int, int]) -> None:
    case = Case(rollout=True, mini_batch=4, kl=True, entropy=True)

    def metrics_without(rejected: tuple[int, int]) -> dict[str, Any]:
        def reject(batch: DataProto) -> None:
            batch.batch["response_mask"][: rejected[dist.get_rank()]] = 0

        return actor_cases.train(case, change_batch=reject, spike_detection=rejected[1] > 0).metrics[0]

    ordinary, found = launch(2, metrics_without, (0, 0)), launch(2, metrics_without, rejected)
    together = DataProto.concat([DataProto(meta_info={"metrics": metrics}) for metrics in found])
    averages = reduce_metrics(together.meta_info["metrics"])
    assert not {name: value for name, value in averages.items() if not math.isfinite(value)}
    for rank, count in enumerate(rejected):
        for name, values in ordinary[rank].items():
            if name.startswith("rollout_corr/"):
                neutral = 1.0 if "ppl" in name and "log" not in name else 0.0
                assert found[rank][name][: count // 2] == [neutral] * (count // 2)
                assert len(found[rank][name]) == len(values)


AUTO = {"spike_replay": 0, "spike_detection": True, "grad_norm_threshold": "auto", "bisect_budget_steps": 50}


@cases(
    "world case",
    (2, Case("fsdp2", planted=((1, 3, 6),), nan=((0, 2, 7),))),
    # One micro-batch in all, and the reduced meter: a NaN leaves nothing to tell ordinary norms from.
    (1, Case("none", rows=4, mini_batch=4, micro_batch=4, nan=((0, 2, 7),))),
    (2, Case("fsdp2", model="tiled", rows=4, mini_batch=4, nan=((0, 2, 7),))),
)
def test_in_the_warm_up_only_nan_is_a_spike(launch: Launch, world: int, case: Case) -> None:
    for run in launch(world, partial(actor_cases.train, calls=2, **AUTO), case):
        (event,), second = (valid_events(events) for events in run.events)
        assert {*case.nan} <= {*places(event)} <= {*case.nan, *case.planted} and second == []
        assert event["complete"]
        for metrics in run.metrics:
            assert not {"actor/gradloc/spike_margin", "actor/gradloc/threshold"} & metrics.keys()
