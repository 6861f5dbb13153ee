"""The blind benchmark: what it plants is what it says, and its table counts right, silent and false verdicts."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("verl.workers.actor") is None:
    pytest.skip("these train with the actor of verl 0.7", allow_module_level=True)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import blind  # noqa: E402
from stability import QUICK  # noqa: E402
from torch import nn  # noqa: E402
from verl.trainer.ppo.core_algos import get_policy_loss_fn  # noqa: E402
from verl.workers.actor import dp_actor  # noqa: E402

pytestmark = pytest.mark.slow


def test_a_seed_draws_the_same_again_and_another_seed_something_else() -> None:
    drawn = [blind.draw("advantage of NaN", seed, 24) for seed in (101, 101, 102)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(blind.EARLIEST <= each.step < blind.LATEST for each in drawn)
    assert set(blind.TUNING).isdisjoint(blind.TEST)


def test_a_scaled_loss_is_the_loss_times_its_factor_while_it_lasts() -> None:
    log_prob, old = torch.randn(2, 3), torch.randn(2, 3)
    arguments = {"advantages": torch.ones(2, 3), "response_mask": torch.ones(2, 3), "loss_agg_mode": "token-mean"}
    config = dp_actor_config()
    stock = get_policy_loss_fn("vanilla")(old, log_prob, config=config, **arguments)[0]
    with blind.scaled_loss(4.0):
        scaled = dp_actor.get_policy_loss_fn("vanilla")(old, log_prob, config=config, **arguments)[0]
    assert torch.equal(scaled, 4.0 * stock) and dp_actor.get_policy_loss_fn is get_policy_loss_fn


def dp_actor_config() -> object:
    from verl.workers.config import FSDPActorConfig

    return FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)


class OneLayer(nn.Module):
    """A model with the parts of a layer 1 that an auxiliary loss needs."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Module()
        block.mlp = nn.Module()
        block.mlp.gate_proj = nn.Linear(2, 3)
        block.mlp.forward = lambda x: x * 2.0
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([nn.Identity(), block])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.layers[1].mlp(x)


def test_an_auxiliary_loss_gives_the_gate_its_own_gradient_and_nothing_else() -> None:
    torch.manual_seed(0)
    model, x = OneLayer(), torch.randn(4, 2, requires_grad=True)
    gate = model.model.layers[1].mlp.gate_proj
    expected = torch.autograd.grad(500.0 * gate(x.detach()).logsumexp(-1).square().mean(), gate.weight)[0]
    with blind.attach_auxiliary_loss(model, 500.0):
        model(x).sum().backward()
    assert torch.allclose(gate.weight.grad, expected) and torch.equal(x.grad, torch.full_like(x, 2.0))
    gate.weight.grad = None
    model(x).sum().backward()
    assert gate.weight.grad is None


def test_the_table_counts_what_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of finished runs, so that none is made."""
    import dataclasses

    named = {
        "advantage of NaN": ["nonfinite", None],
        "one outlying reward": ["unlikely", blind.UNKNOWN],
        "backward signal of one token": [blind.UNKNOWN, "unlikely"],
        "healthy": [blind.UNKNOWN],
    }
    runs = {}
    for row, found in named.items():
        for seed, name in enumerate(found):
            runs[f"{seed} | {row}"] = {"named": name, "step": 1}
    runs["1 | healthy"] = {"named": "layer", "step": 1}
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"settings": dataclasses.asdict(QUICK), "runs": runs}))
    command = ["blind.py", "--quick", "--results", str(path), "--seeds", "0", "1", "--rows", *named]
    monkeypatch.setattr(sys, "argv", command)
    blind.main()
    table = capsys.readouterr().out
    assert "| advantage of NaN | 1 of 2 | - | 1 | - |" in table
    assert "| one outlying reward | 0 of 2 | 1 | - | unlikely 1 |" in table
    assert "| backward signal of one token | 1 of 2 | - | - | unlikely 1 |" in table
    assert "| healthy | 1 of 2 | - | - | layer 1 |" in table
    assert "Right: 1 of 4; not named: 2." in table and "False names in healthy runs: 1 of 2." in table
    assert "False names in runs with a cause that no rule knows: 1 of 2." in table


def test_a_run_is_named_by_the_cause_that_was_planted(
    keep_start: Callable[[Path, int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blind, "EARLIEST", 1)
    path = tmp_path / "results.json"
    keep_start(path, 7)
    command = [
        "blind.py",
        "--quick",
        "--results",
        str(path),
        "--seeds",
        "7",
        "--rows",
        "gradient of one layer",
        "healthy",
    ]
    monkeypatch.setattr(sys, "argv", command)
    blind.main()
    runs = json.loads(path.read_text())["runs"]
    assert {name: run["named"] for name, run in runs.items()} == {
        "7 | gradient of one layer": "layer",
        "7 | healthy": None,
    }
