"""The benchmarks of LayerClip in their shortest forms: that they run, and that what they print is what they ran."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean

import pytest
import torch
import torch.distributed as dist

if importlib.util.find_spec("verl.workers.actor") is None:
    pytest.skip("these train with the actor of verl 0.7", allow_module_level=True)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from grpo_run import Run, Samples, Spike, Usual, Variant  # noqa: E402
from rival_clips import AGGC, SPAM, AdaGC, ZClip  # noqa: E402
from stability import QUICK  # noqa: E402
from sums_task import PROMPT, RESPONSE, new_model, prompts_and_answers  # noqa: E402

pytestmark = pytest.mark.slow
GLOBAL = Variant("global")
FIRST = QUICK.events[0][0]  # the step with the first spike


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(name: str, *arguments: str) -> list[list[str]]:
    """The rows of the tables that a benchmark prints."""
    command = [sys.executable, BENCHMARKS / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_stability(keep_start: Callable[[Path], None], tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    keep_start(results)
    names = ["global", "zscore", "both", "drop", "adagc"]
    rows = run("stability.py", "--quick", "--seeds", "0", "--results", str(results), "--rows", *names)
    runs = {name: json.loads(results.read_text())["runs"][f"0 | {name}"] for name in names}
    for kinds in runs.values():
        rewards = kinds["no"]["rewards"]
        assert 0 < min(rewards) and max(rewards) < 1 and len(set(rewards)) == len(rewards)
        for kind in ("layer", "token", "sequence", "blow"):
            spiked = kinds[kind]["rewards"]
            # Sampling, too, is the same until the first spike.
            assert spiked[:FIRST] == rewards[:FIRST]
    for kind in ("layer", "token", "sequence", "blow"):
        assert runs["global"][kind]["rewards"] != runs["global"]["no"]["rewards"]
        # A factor of 1.1 leaves far less than the spikes do.
        assert 0 < 10 * runs["global"]["floor"]["distance"] < runs["global"][kind]["distance"]
    # LayerClip takes in the spikes' norms, TokenClip drops the tokens.
    assert runs["zscore"]["layer"]["distance"] < 0.5 * runs["global"]["layer"]["distance"]
    for kind in ("token", "sequence", "blow"):
        assert runs["both"][kind]["distance"] < 0.5 * runs["zscore"][kind]["distance"]
        assert sum(runs["both"][kind]["token_clip"]["actor/token_clip/cut"]) >= 3
    # After its warm-up AdaGC cuts some tensors, and so changes the run even without a spike.
    assert runs["adagc"]["no"]["rewards"] != runs["global"]["no"]["rewards"]
    assert 0 < max(runs["adagc"]["no"]["clipped"]) <= 1
    # GradLoc sees the planted tokens and removes them; without the spike nothing happens.
    assert sum(runs["drop"]["no"]["events"]) == 0 and sum(runs["drop"]["token"]["events"]) == 3
    assert runs["drop"]["token"]["distance"] < 0.1 * runs["global"]["token"]["distance"]
    tables: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        if row[1] == "step length":
            table = tables.setdefault(row[0], {})
        else:
            table[row[0]] = row[1:]
    assert tables["distance"]["drop"][2] == f"{runs['drop']['token']['distance']:.2f}"
    assert tables["end"]["global"][4] == f"{runs['global']['sequence']['rewards'][-1]:.3f}"
    lost = mean(runs["zscore"]["no"]["rewards"][FIRST:]) - mean(runs["zscore"]["layer"]["rewards"][FIRST:])
    assert (
        tables["distance · lost"]["zscore"][1]
        == f"{runs['zscore']['layer']['distance']:.2f} · {round(lost, 3) + 0.0:+.3f}"
    )


def test_collapse(keep_start: Callable[[Path], None], tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    keep_start(results)
    arguments = ["--quick", "--seeds", "0", "--rates", "1e-4", "0.1", "--rows", "global", "ratio clip"]
    rows = run("collapse.py", "--results", str(results), *arguments)
    runs = json.loads(results.read_text())["runs"]
    for regime in ("four epochs", "false positives"):
        calm, broken = (runs[f"0 | {regime} | global | {rate}"]["rewards"] for rate in (1e-4, 0.1))
        assert mean(calm[-5:]) > calm[0] / 2 and mean(broken[-5:]) < broken[0] / 2
        (row,) = (row for i, row in enumerate(rows) if row[0] == "global" and rows[i - 1][0] == regime)
        assert row[1].split(" · ")[0] == f"{mean(calm[-5:]):.3f}" and row[1].endswith("0") and row[2].endswith("1")
        assert row[3:] == [f"{mean(calm[-5:]):.3f} (0.0001)", "0.0001"]
        assert runs[f"0 | {regime} | ratio clip | 0.0001"]["rewards"] != calm
    assert len(runs["0 | four epochs | global | 0.0001"]["moved"]) == 6 * 8


def test_rows_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "stability.py", "--results", tmp_path / "results.json", "--rows", "all"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "unknown rows ['all']: choose from ['none', 'global'," in done.stderr


def small_run(variant: Variant = GLOBAL) -> Run:
    settings = dataclasses.replace(QUICK, prompts=2, answers=4)
    return Run(settings, new_model(0).state_dict(), variant, 0, Usual(1.0, 1.0))


def test_a_replayed_run_without_spikes_is_the_run_itself(one_process: None) -> None:
    run, replayed = small_run(), small_run()
    for _ in range(3):
        run.step("no")
        replayed.step("no", run.samples[-1])
    assert len(run.moved) == 6 and min(run.moved) > 0
    assert torch.equal(run.parameters(), replayed.parameters())


def test_a_blown_token_changes_the_layers_below_by_its_signal() -> None:
    model = new_model(0)
    settings = dataclasses.replace(QUICK, prompts=2, answers=4)
    generator = torch.Generator().manual_seed(0)
    prompts, right = prompts_and_answers(torch.randint(100, (8, 2), generator=generator))
    responses = torch.randint(10, (8, RESPONSE), generator=generator)
    tokens = torch.cat([prompts, responses], 1)
    samples = Samples(prompts, responses, torch.rand(8, RESPONSE, generator=generator), right[:, 0] < 0, torch.zeros(8))
    weights = torch.randn(8, RESPONSE, generator=generator)
    spike = Spike(model)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        logits = model(input_ids=tokens).logits[:, PROMPT - 1 : -1]
        (logits.log_softmax(-1).gather(-1, responses.unsqueeze(-1)).squeeze(-1) * weights).sum().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    plain = gradients()
    advantages = torch.ones(settings.prompts * settings.answers, RESPONSE)
    spike.plant("blow", tokens, advantages, samples)
    assert torch.equal(advantages, torch.ones_like(advantages))
    blown = gradients()
    spike.clear()
    assert all(torch.equal(plain[name], gradient) for name, gradient in gradients().items())

    # By hand: the part of the gradient that goes through the token's hidden state above layers.1, 999 times more.
    row, position = divmod(int(samples.log_probs.argmin()), RESPONSE)
    outputs: list[torch.Tensor] = []
    handle = model.model.layers[1].register_forward_hook(
        lambda _, __, output: outputs.append(output[0] if isinstance(output, tuple) else output)
    )
    logits = model(input_ids=tokens).logits[:, PROMPT - 1 : -1]
    loss = (logits.log_softmax(-1).gather(-1, responses.unsqueeze(-1)).squeeze(-1) * weights).sum()
    handle.remove()
    (signal,) = torch.autograd.grad(loss, outputs, retain_graph=True)
    of_token = torch.zeros_like(signal)
    of_token[row, PROMPT - 1 + position] = signal[row, PROMPT - 1 + position]
    below = {
        n: p for n, p in model.named_parameters() if n.startswith(("model.embed", "model.layers.0", "model.layers.1"))
    }
    parts = torch.autograd.grad(outputs, list(below.values()), [of_token])
    for name, part in zip(below, parts, strict=True):
        expected = plain[name] + 999 * part
        assert (blown[name] - expected).norm() < 1e-4 * expected.norm()
    above = set(plain) - set(below)
    assert len(above) == 11 and all(torch.equal(plain[name], blown[name]) for name in above)


def norms_after(rival: AdaGC | ZClip | AGGC, *norms: float) -> tuple[list[float], float]:
    """The norms of tensors after a clip, and what it returns."""
    gradients = [torch.tensor([0.6 * norm, 0.8 * norm]) for norm in norms]
    cut = rival.clip(gradients)
    return [gradient.norm().item() for gradient in gradients], cut


def test_adagc() -> None:
    rival = AdaGC(warmup_clip=5.0, warmup_steps=3, ratio=1.05, beta=0.98)
    assert norms_after(rival, 0.0, 0.0) == ([0.0, 0.0], 0.0)  # does not count
    assert norms_after(rival, 3.0, 4.0) == (pytest.approx([3, 4]), 0.0)
    assert norms_after(rival, 6.0, 8.0) == (pytest.approx([3, 4]), 0.0)  # the shared norm is 5
    assert norms_after(rival, 4.0, 2.0) == (pytest.approx([4, 2]), 0.0)
    # The averages are now the smallest norms, 3 and 2, so that the bounds are 3.15 and 2.1.
    assert norms_after(rival, 300.0, 1.0) == (pytest.approx([3.15, 1]), 0.5)
    averages = [0.98 * 3 + 0.02 * 3.15, 0.98 * 2 + 0.02 * 1]
    assert norms_after(rival, 300.0, 300.0) == (pytest.approx([1.05 * value for value in averages]), 1.0)


def test_zclip() -> None:
    rival = ZClip(threshold=2.5, alpha=0.97, warmup_steps=2)
    assert norms_after(rival, 3.0, 4.0) == (pytest.approx([3, 4]), 0.0)  # norm 5
    assert norms_after(rival, 0.0, 7.0) == (pytest.approx([0, 7]), 0.0)
    # The mean is 6, the deviation 1: 8 is under 8.5; the spike of 10 deviations is cut to 2.5²/10 deviations.
    assert norms_after(rival, 0.0, 8.0) == (pytest.approx([0, 8]), 0.0)
    mean = 0.97 * 6 + 0.03 * 8
    deviation = (0.97 * 1 + 0.03 * (8 - mean) ** 2) ** 0.5
    assert norms_after(rival, 0.0, mean + 10 * deviation) == (pytest.approx([0, mean + 0.625 * deviation]), 1.0)


def test_aggc() -> None:
    # Two groups, of tensors 0 and 2, and of tensor 1; the bound changes after steps 2 to 4 of 10.
    options = {"beta": 0.9, "high": (0.5, 1.0), "low": 0.8, "switch": 0.2, "transition": 0.2}
    rival = AGGC(["q_proj", "norm", "q_proj"], 10, **options)
    assert norms_after(rival, 3.0, 0.0, 4.0) == ([pytest.approx(3), 0.0, pytest.approx(4)], 0.0)  # the averages start
    assert norms_after(rival, 3.0, 2.0, 4.0) == (pytest.approx([1.5, 2, 2]), 0.5)  # q_proj to half of 5
    average = 0.9 * 5 + 0.1 * 2.5
    assert norms_after(rival, 300.0, 0.1, 400.0) == (pytest.approx([0.3 * average, 1.6, 0.4 * average]), 0.5)
    average = 0.95 * average
    # In the middle of the transition the upper bound is 0.75.
    assert norms_after(rival, 300.0, 0.0, 400.0)[0] == pytest.approx([0.45 * average, 0, 0.6 * average])
    limited = AGGC(["q_proj", "q_proj"], 10, limits=(0.9, 1.1), **options)
    norms_after(limited, 3.0, 4.0)
    assert norms_after(limited, 300.0, 400.0) == (pytest.approx([270, 360]), 1.0)
    assert norms_after(limited, 0.3, 0.4) == (pytest.approx([0.33, 0.44]), 0.0)


def test_spam() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    rival = SPAM(optimizer, threshold=100.0, reset_interval=4, warmup_share=0.5, clip_after=2)
    rates, steps, squares = [], [], [0.0, 0.0, 0.0]
    for step in range(1, 9):
        gradient = [1.0, -500.0 if step in (3, 7) else -1.0, 0.5]
        parameter.grad = torch.tensor(gradient)
        cut = rival.clip([parameter.grad])
        squares = [0.0, 0.0, 0.0] if step == 5 else squares
        # Ten times the root of the second moment, which is not corrected for its start; not in the first two steps.
        bounds = [10 * square**0.5 if step in (3, 4, 7, 8) else math.inf for square in squares]
        expected = [max(-bound, min(bound, value)) for bound, value in zip(bounds, gradient, strict=True)]
        assert parameter.grad.tolist() == pytest.approx(expected, rel=1e-5)
        assert cut == pytest.approx(sum(old != new for old, new in zip(gradient, expected, strict=True)) / 3)
        assert (cut > 0) == (step in (3, 4, 7, 8))
        squares = [0.999 * square + 0.001 * value**2 for square, value in zip(squares, expected, strict=True)]
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
        steps.append(int(optimizer.state[parameter]["step"]))
    assert rates == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.05, 0.1, 0.1, 0.1])
    assert steps == [1, 2, 3, 4, 1, 2, 3, 4]


def test_clip_cost() -> None:
    rows = run("clip_cost.py", "--tiny", "--rounds", "1")
    seconds = {row[0]: float(row[4].split()[0]) for row in rows[1:]}
    assert len(seconds) == 4
    assert all((value == 0) == (name == "stock") for name, value in seconds.items())
