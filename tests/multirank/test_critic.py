"""The watch over verl's critics, against plain autograd on an unsharded copy."""

from pathlib import Path
from typing import Any

import actors
import critic_cases
import pytest
import torch
from actors import Case
from jsonschema import Draft202012Validator
from notation import cases
from test_actor import Launch, near, on_engine, on_ranks

from gradloc.judge.critic import cause, summary
from gradloc_tools.report.reading import read
from gradloc_tools.report.summary import summarize
from gradloc_tools.schema import CRITIC

VALIDATOR = Draft202012Validator(CRITIC)
PLANTED = ((1, 5, 1),)


@on_ranks(
    on_engine(2, Case("fsdp1", mini_batch=4)),
    (2, Case("fsdp1-orig", dynamic=True)),
    on_engine(2, Case(loss_agg_mode="seq-mean-token-mean", nested=actors.ENGINE)),
    (1, Case("none")),
)
def test_norms_and_errors_are_those_of_plain_autograd(launch: Launch, tmp_path: Path, world: int, case: Case) -> None:
    """A τ of nearly zero makes every micro-batch a spike."""
    results = launch(world, critic_cases.first_spike, case, str(tmp_path), 1e-6)
    by_rank, reduced, spike, metrics = results[0]
    VALIDATOR.validate(spike)
    tolerance = case.tolerance
    expected = {
        (rank, index): unit
        for rank, of_rank in enumerate(by_rank)
        for index, unit in enumerate(of_rank)
        if unit["weight"]
    }
    assert len(expected) > 1
    found = {(unit["rank"], unit["micro_batch"]): unit for unit in spike["micro_batches"]}
    # All of them, or the largest eight.
    assert found.keys() <= expected.keys() and len(found) == min(len(expected), 8)
    for name, unit in found.items():
        of = expected[name]
        assert (unit["rows"], unit["tokens"]) == (of["rows"], of["tokens"])
        assert unit["norm"] == near(of["norm"], tolerance)
        assert unit["token_equivalent"] == near(of["norm"] / of["weight"], tolerance)
        assert unit["threshold"] == near(1e-6 * of["weight"], tolerance)
        assert unit["error"] == near(of["error"], tolerance)
        assert unit["layer_norms"] == {
            layer: pytest.approx(norm, rel=tolerance, abs=1e-6 * of["norm"])
            for layer, norm in of["layer_norms"].items()
        }
    assert spike["layer_norms"] == {layer: near(norm, tolerance) for layer, norm in reduced.items()}
    assert spike["global_norm"] == near(sum(norm**2 for norm in reduced.values()) ** 0.5, tolerance)
    largest = max(unit["norm"] / unit["weight"] for unit in expected.values())
    assert spike["token_norm"] == near(largest, tolerance)
    assert metrics["critic/gradloc/token_norm_max"] >= largest * (1 - tolerance)
    assert metrics["critic/gradloc/triggered"] == case.rows // case.mini_batch


@on_ranks(
    on_engine(2, Case("fsdp1", nested=actors.ENGINE, epochs=2, mini_batch=4, planted=PLANTED)),
)
def test_a_planted_return_is_found(launch: Launch, tmp_path: Path, world: int, case: Case) -> None:
    results = launch(world, critic_cases.planted, case, str(tmp_path), 100.0)
    metrics, lines = results[0]
    assert [of["critic/gradloc/triggered"] for of in metrics][::2] == [0, 0]
    spike, *later = lines
    for line in lines:
        VALIDATOR.validate(line)
    assert metrics[1]["critic/gradloc/triggered"] == len(lines)
    ((rank, row, position),) = PLANTED
    mini_batch, row_in = divmod(row, case.mini_batch)
    assert (spike["global_step"], spike["epoch"], spike["mini_batch"]) == (7, 0, mini_batch)
    (unit,) = spike["micro_batches"]
    assert unit["rank"] == rank
    value, *others = spike["values"]
    assert (value["rank"], value["row"], value["position"]) == (rank, row_in, position)
    assert value["return"] == critic_cases.RETURN
    assert value["uid"] == f"{rank}/{row}" and value["data_source"] == "sums"
    assert value["token"] and f"«{value['token']}»" in value["context"]
    assert value["error"] > 100 * max(other["error"] for other in others)
    assert (spike["cause"], cause(spike), summary(spike)) == ("errors", "errors", spike["summary"])
    assert "look at the returns" in spike["summary"] and f"row {row_in}, position {position}" in spike["summary"]
    assert len(later) == case.epochs - 1
    (warning,) = summarize(read(str(tmp_path)), 5)["warnings"]
    assert (warning["name"], warning["first_step"], warning["sentence"]) == ("critic", 7, lines[-1]["summary"])


def test_a_tiled_mlp_is_measured_by_its_reduced_gradient(launch: Launch, tmp_path: Path) -> None:
    case = Case("fsdp2", model="tiled", planted=PLANTED)
    _, reduced, spike, _ = launch(2, critic_cases.first_spike, case, str(tmp_path), 1.0)[0]
    VALIDATOR.validate(spike)
    assert spike["micro_batches"] == []
    # verl 0.7's critic computes in bfloat16, and a tiled MLP rounds its sums elsewhere.
    tolerance = case.tolerance if actors.ENGINE else 2e-2
    assert spike["layer_norms"] == {layer: near(norm, tolerance) for layer, norm in reduced.items()}
    assert (spike["values"][0]["rank"], spike["values"][0]["row"]) == PLANTED[0][:2]


@on_ranks(
    on_engine(2, Case("fsdp2", dynamic=True, planted=PLANTED)),
)
def test_training_is_that_of_the_released_verl(launch: Launch, tmp_path: Path, world: int, case: Case) -> None:
    stock = launch(world, critic_cases.parameters_after, case, str(tmp_path), True, {})
    for options in ({}, {"spike_detection": True, "grad_norm_threshold": 10.0}):
        for ours, released in zip(
            launch(world, critic_cases.parameters_after, case, str(tmp_path), False, options), stock, strict=True
        ):
            assert all(torch.equal(a, b) for a, b in zip(ours, released, strict=True))
    assert (tmp_path / "critic.jsonl").exists()


@pytest.mark.every_target
def test_learned_norms_come_back_with_a_checkpoint(launch: Launch, tmp_path: Path) -> None:
    for saved, loaded in launch(2, critic_cases.resumed, str(tmp_path)):
        assert saved == loaded and len(saved) == 1


@pytest.mark.every_target
def test_another_loss_is_not_looked_at(launch: Launch, tmp_path: Path) -> None:
    assert launch(2, critic_cases.loss_of_ones_own, str(tmp_path)) == [[], []]


@pytest.mark.every_target
def test_without_a_tokenizer_a_value_has_no_text(launch: Launch, tmp_path: Path) -> None:
    (spike,), _ = launch(2, critic_cases.without_a_tokenizer, str(tmp_path))
    assert spike["values"][0]["return"] == critic_cases.RETURN
    assert "token" not in spike["values"][0]
    VALIDATOR.validate(spike)


def spike(**fields: Any) -> dict[str, Any]:
    unit = {"rank": 0, "micro_batch": 1, "token_equivalent": 50.0, "error": 2.0, "layer_norms": {"a": 3.0, "b": 1.0}}
    return {
        "threshold": 10.0,
        "token_norm": 50.0,
        "ordinary_token_norm": 1.0,
        "ordinary_layer_norms": {"a": 1.0, "b": 1.0},
        "error": 2.0,
        "ordinary_error": 1.0,
        "micro_batches": [unit],
        "values": [],
        **fields,
    }


@cases(
    "fields expected",
    ({}, "network"),
    ({"ordinary_token_norm": 10.0}, "errors"),
    ({"ordinary_error": 0.05}, "errors"),
    ({"ordinary_error": None}, None),
    ({"micro_batches": [], "layer_norms": {"a": 3.0, "b": 1.0}}, "network"),
    ({"micro_batches": [], "layer_norms": {}, "error": float("nan")}, "errors"),
)
def test_the_cause_is_what_has_grown(fields: dict[str, Any], expected: str | None) -> None:
    assert cause(spike(**fields)) == expected


def test_a_model_that_amplifies_is_named_with_its_layer() -> None:
    assert summary(spike()) == (
        "The critic's gradient norm is 5 times its threshold in micro-batch 1 of rank 0. The values' errors have "
        "hardly grown (root mean square 2 against 1 in the last mini-batch without a spike), so the model amplifies "
        "them; a has 90% of the squared norm, usually 50%."
    )
