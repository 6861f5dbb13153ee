"""The benchmark of causes and remedies: its figures against gradients that are computed by hand."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaForCausalLM

if importlib.util.find_spec("verl.workers.actor") is None:
    pytest.skip("these train with the actor of verl 0.7", allow_module_level=True)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from cause_remedy import cell, measure_bundle, with_cause  # noqa: E402
from grpo_run import SPIKE, Usual  # noqa: E402
from planted_causes import CAUSES, correct  # noqa: E402
from stability import QUICK  # noqa: E402

from gradloc_tools.bundles.opening import Bundle, open_bundle  # noqa: E402

pytestmark = pytest.mark.slow
TOLERANCE = 1e-4  # float32, rows one by one against a batch
BY_NAME = {cause.name: cause for cause in CAUSES}


@pytest.fixture(scope="module")
def start(learned: tuple[dict[str, Tensor], Usual]) -> Iterator[tuple[dict[str, Tensor], Usual]]:
    """One seed's start weights and usual norms."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield learned
    dist.destroy_process_group()


def gradient(model: LlamaForCausalLM, bundle: Bundle, without: float | None = None) -> list[Tensor]:
    """The policy gradient of the first micro-batch, on-policy: Σ A·∇log p / tokens; without tokens of an advantage."""
    (saved,) = bundle.micro_batches.values()
    model.zero_grad()
    total = saved.tokens["response_mask"].sum()
    for row, advantages in zip(saved.rows, saved.tokens["advantage"], strict=True):
        log_probs = model(input_ids=row.input_ids[None]).logits[0, row.prompt_length - 1 : -1].log_softmax(-1)
        taken = log_probs.gather(-1, row.input_ids[row.prompt_length :, None]).squeeze(-1)
        weights = advantages[: len(taken)].clone()
        if without is not None:
            weights[weights == without] = 0.0
        (-(taken * weights).sum() / total).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def norm(gradients: list[Tensor]) -> float:
    return math.hypot(*(float(part.norm()) for part in gradients))


def test_the_figures_of_one_token(start: tuple[dict[str, Tensor], Usual], tmp_path: Path) -> None:
    weights, usual = start
    level, planted = with_cause(QUICK, weights, 0, usual, BY_NAME["token"], str(tmp_path))
    (manifest,) = tmp_path.glob("dump/replay/*/manifest.json")
    bundle = open_bundle(str(manifest.parent))
    found = measure_bundle(bundle, str(tmp_path / "model"), planted)
    rows = {row["name"]: row for row in found["rows"]}
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    whole, rest = norm(gradient(model, bundle)), norm(gradient(model, bundle, SPIKE))
    assert level > 1 and found["diagnosis"] == "tokens" and found["culprits"] == 1
    assert rows["as recorded"]["norm"] == pytest.approx(whole, rel=TOLERANCE)
    for name in ("spike_action=drop", "TokenClip"):
        assert rows[name]["left"] == pytest.approx(rest / whole, rel=TOLERANCE)
        assert rows[name]["masked"] == {"tokens": 1, "culprits": 1} and rows[name]["ordinary_moved"] == 0
    # The mini-batch is the step, so its norm becomes the clip, and every token is scaled alike.
    assert rows["grad_clip 5x"]["norm"] == pytest.approx(5 * usual.norm, rel=TOLERANCE)
    assert rows["grad_clip 5x"]["ordinary_moved"] == pytest.approx(1 - 5 * usual.norm / whole, rel=TOLERANCE)
    # The rollout agrees with training, so no correction of it sees the token.
    for name in ("token TIS", "token mask", "clip_ratio 0.1, 0.1"):
        assert rows[name]["left"] == pytest.approx(1, rel=TOLERANCE) and rows[name]["ordinary_moved"] < TOLERANCE


@pytest.mark.parametrize("name", ["layer", "blow"])
def test_an_error_of_the_backward_pass_is_in_the_replay_too(
    start: tuple[dict[str, Tensor], Usual], tmp_path: Path, name: str
) -> None:
    weights, usual = start
    _, planted = with_cause(QUICK, weights, 0, usual, BY_NAME[name], str(tmp_path))
    (manifest,) = tmp_path.glob("dump/replay/*/manifest.json")
    bundle = open_bundle(str(manifest.parent))
    found = measure_bundle(bundle, str(tmp_path / "model"), planted)
    assert found["replayed"] == pytest.approx(1, rel=TOLERANCE)
    # Without the error, the replay has the gradient that the data give.
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert float(bundle.event["global_norm"]) > 3 * norm(gradient(model, bundle))


def test_token_clip_in_the_actor_takes_the_token_out(start: tuple[dict[str, Tensor], Usual], tmp_path: Path) -> None:
    weights, usual = start
    level, _ = with_cause(QUICK, weights, 0, usual, BY_NAME["token"], str(tmp_path), "drop")
    assert 0 < level < 1 and not list(tmp_path.glob("dump/replay/*"))


def test_the_token_mask_rejects_what_the_rollout_did_not_sample() -> None:
    log_probs = torch.full((2, 4), -1.0)
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0]])
    tensors = {"old_log_probs": log_probs.clone(), "rollout_log_probs": log_probs.clone(), "response_mask": mask}
    tensors["old_log_probs"][0, 1] = -9.0
    tensors["rollout_log_probs"][0, 1] = 0.0
    correct(tensors, {"rollout_is": None, "rollout_rs": "token", "rollout_rs_threshold": 2.0})
    assert tensors["response_mask"].tolist() == [[1, 0, 1, 1], [1, 1, 0, 0]]


def test_cells() -> None:
    row = {"name": "x", "norm": 1.0, "left": 0.1, "under": True, "ordinary_moved": 0.5}
    assert cell([row, row | {"left": 0.3, "norm": 3.0}], 2)[0] == "20% (14%) · 50%*"
    assert cell([row, row | {"under": False}], 3)[0] == "10% · 50% [2]"
    assert cell([row | {"left": 1.001, "under": False, "ordinary_moved": 1e-7}], 1)[0] == "="
    assert cell([row | {"left": None, "norm": math.nan, "under": False, "ordinary_moved": None}], 1)[0] == "NaN"
    assert cell([row | {"left": None}], 1)[0] == "finite · 50%*"


def test_the_command(keep_start: Callable[[Path], None], tmp_path: Path) -> None:
    keep_start(tmp_path / "results.json")
    command = [sys.executable, BENCHMARKS / "cause_remedy.py", "--quick", "--seeds", "0", "--no-rewards"]
    command += ["--results", tmp_path / "results.json", "--rows", "token", "stale by 3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    tables = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert runs["0 | stale by 3"]["diagnosis"] is None
    assert ["stale by 3", f"{runs['0 | stale by 3']['level']:.2f} to {runs['0 | stale by 3']['level']:.2f}"] in [
        row[:2] for row in tables
    ]
    (clips,) = (tables[i + 1] for i, row in enumerate(tables) if row[1] == "grad_clip 5x")
    assert clips[0] == "token"
    assert clips[4].startswith("**") and clips[4].endswith(" · 0%***")
    assert sum(cell.startswith("**") for row in tables for cell in row) == 1
