"""What a watched training pass costs, and the norms of local gradients where a model is unusual."""

import pass_cost_cases
import pytest
from actors import Case
from notation import cases
from test_actor import THREE, Launch, near, on_engine, on_ranks

NORMS = ("_foreach_norm", "linalg_vector_norm", "norm")


@on_ranks(
    (2, Case("fsdp1", precision="bfloat16", mini_batch=4)),
    (2, Case("fsdp1-orig", mini_batch=4)),
    (2, Case("fsdp2", grouped=True, checkpointing=True)),
    # Its micro-batches leave some experts idle; only whole ones can be trained on.
    (2, Case("fsdp2", model="moe", micro_batch=8)),
    on_engine(2, Case("fsdp2", precision="bfloat16", mini_batch=4, deferred=True)),
)
def test_a_micro_batch_takes_one_norm_for_each_group_of_fsdp(launch: Launch, world: int, case: Case) -> None:
    for groups, of_passes in launch(world, pass_cost_cases.recorded_operations, case):
        assert len(of_passes) == case.rows // case.micro_batch
        for counts in of_passes:
            assert 0 < sum(counts[name] for name in NORMS) <= groups


def test_without_fsdp2s_method_each_parameter_is_measured_alone(launch: Launch) -> None:
    case = Case("fsdp2", mini_batch=4)
    for groups, of_passes in launch(2, pass_cost_cases.recorded_operations, case, False):
        for counts in of_passes:
            assert sum(counts[name] for name in NORMS) > groups


@on_ranks(
    (2, Case("fsdp1", dynamic=True)),
    on_engine(2, Case("fsdp2", nested=True, mini_batch=4, kl=True, entropy=True, rollout=True)),
)
@pytest.mark.parametrize("clip", [False, True], ids=["", "token_clip"])
def test_few_operations_come_between_loss_and_backward(launch: Launch, world: int, case: Case, clip: bool) -> None:
    """And those after the backward do not wait for the device."""
    for of_rank in launch(world, pass_cost_cases.operations_around_the_backward, case, clip):
        assert len(of_rank) >= case.rows // case.mini_batch
        for in_gap, after in of_rank:
            launched = {name: count for name, count in in_gap.items() if name != "detach"}  # a view
            assert sum(launched.values()) < 8, in_gap
            assert sum(after.values()) > 20  # the weights are computed there
            assert not after.keys() & {"_local_scalar_dense", "nonzero", "is_nonzero", "equal"}, after


@cases(
    "wrap dtype deferred later_torch",
    ("fsdp1-orig", "float32", True, False),
    ("fsdp1-orig", "bfloat16", False, False),
    ("fsdp2", "float32", False, False),
    ("fsdp2", "float32", True, False),
    ("fsdp2", "bfloat16", True, False),
    # torch 2.15 itself keeps deferred gradients in float32, for which this one has no room beside bfloat16.
    ("fsdp2", "bfloat16", True, True),
)
def test_norms_of_an_unusual_model(launch: Launch, wrap: str, dtype: str, deferred: bool, later_torch: bool) -> None:
    """Layers that are used twice, not at all or frozen, and gradients that are added to those of earlier passes."""
    for of_rank in launch(2, pass_cost_cases.norms_of_an_unusual_model, wrap, dtype, deferred, later_torch):
        for measured, expected in of_rank:
            # The sums of a layer that is used twice are rounded in another order.
            tolerance = 1e-5 if dtype == "float32" else 2e-2
            assert measured == {name: near(square, tolerance) for name, square in expected.items()}
            assert measured["layers.1"] > 0


@on_ranks(
    (2, Case("fsdp1-orig", precision="bfloat16", planted=THREE)),
    (4, Case("fsdp1", hsdp=True, planted=THREE)),
    (2, Case("fsdp2", planted=THREE)),
)
def test_the_gradient_that_a_probe_does_not_read_takes_no_memory(launch: Launch, world: int, case: Case) -> None:
    for of_step, of_probes in launch(world, pass_cost_cases.gradients_of_probes, case):
        assert of_probes and max(of_probes) < of_step / 100


def test_a_frozen_first_parameter_does_not_hide_gradients(launch: Launch) -> None:
    for first, *others in launch(2, pass_cost_cases.norms_of_repeated_passes):
        assert first > 0 and others == [near(first, 1e-5)] * 2


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "fsdp2"])
def test_layers_that_are_computed_again_are_measured(launch: Launch, wrapped: bool, reentrant: bool) -> None:
    """Also beside another meter, and after it is removed."""
    for found, expected in launch(2, pass_cost_cases.norms_with_checkpointing, wrapped, reentrant):
        for measured in found:
            assert measured == [near(square, 1e-5) for square in expected] and min(measured) > 0
