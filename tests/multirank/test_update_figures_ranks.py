"""The figures of an update in the patched actor against those of an unsharded copy, on all ranks."""

import math

import actor_cases
import pytest
from actors import Case
from oracle import Unit
from test_actor import Launch, on_ranks

THRESHOLD = 1e-6  # of `units_and_run`


def expected(case: Case, units: list[Unit]) -> dict[str, float]:
    """The figures from all tokens of all ranks and mini-batches."""
    log_prob, old, *rollout = (
        [value for unit in units for value in unit.log_probs[i]] for i in range(2 + case.rollout)
    )
    figures = {
        "ratio_max": math.exp(max(p - q for p, q in zip(log_prob, old, strict=True))),
        "unlikely_share": sum(p < math.log(0.05) for p in log_prob) / len(log_prob),
        "spike_margin": max(unit.norm / unit.weight for unit in units if unit.weight) / THRESHOLD,
    }
    if rollout:
        figures["rollout_ratio_max"] = math.exp(max(abs(p - q) for p, q in zip(log_prob, rollout[0], strict=True)))
    return figures


@on_ranks(
    (2, Case(mini_batch=4, clipped=((1, 4, 3),), rollout=True), pytest.mark.target(version="0.9.1")),
    (2, Case(mini_batch=4, epochs=2, dynamic=True, loss_agg_mode="seq-mean-token-mean")),
    # Micro-batches without a response token.
    (2, Case("fsdp1", mini_batch=4, micro_batch=1, rollout=True)),
    (2, Case("fsdp2", mini_batch=4, loss_mode="bypass_mode")),
)
def test_figures_of_an_update_are_those_of_the_oracle(launch: Launch, world: int, case: Case) -> None:
    results = launch(world, actor_cases.units_and_run, case)
    units = results[0][0]
    want = expected(case, units)
    of_ranks = []
    for _, _, run in results:
        metrics = run.metrics[0]
        of_ranks.append({name: metrics.get(f"actor/gradloc/{name}") for name in want})
        assert ("actor/gradloc/rollout_ratio_max" in metrics) == case.rollout
    assert of_ranks == of_ranks[:1] * world
    # A ratio is as far off as the difference of log-probs that it is the power of.
    assert of_ranks[0] == {name: pytest.approx(value, rel=2e-5) for name, value in want.items()}
    assert case.on_policy or want["ratio_max"] > 1.01
    # One rank alone happens to have no unlikely token.
    assert 0 < want["unlikely_share"] < 1
