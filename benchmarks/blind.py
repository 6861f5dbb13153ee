# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""How often the verdict names the cause of a run that it knows nothing about.

Ten causes and two kinds of healthy runs, GRPO on sums with verl's patched actor, as in stability.py. A seed draws
everything else: the sums and samples, the step from which on there is a cause, its size, which rows it hits, the
learning rate and the noise of the rollout's log-probs. Rules and limits were chosen on runs with TUNING seeds; the
figures are of other seeds, TEST. The verdict of a run is that of the first spike or warning from the step of the cause
on; of a cause that is there from step 1 on, the last one that is said; of a healthy run, the first cause that is named.

The patched verl must be importable; after `bash tests/run.sh`:

    PYTHONPATH=build/verl:. build/venv/bin/python benchmarks/blind.py --results build/blind.json --jobs 4

Finished runs are kept in the results and not repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from grpo_run import Run, Samples, Settings, Spike, Usual, Variant
from planted_causes import Tensors, advantages_of, cut_with_an_end
from run_warnings import Planted, Rollout
from seed_jobs import Results, arguments_of, key_of, run_all
from stability import FULL, QUICK
from torch import Tensor, nn
from verl.workers.actor import dp_actor

TUNING = range(20)
TEST = range(301, 311)
STEPS, QUICK_STEPS = 24, 3
# In which a cause may begin, except for those of a whole run.
EARLIEST, LATEST = 12, 20
HEALTHY = "healthy"
UNKNOWN = "no known cause"


@dataclasses.dataclass(frozen=True)
class Blind:
    """A cause, and what a verdict has to name.

    Args:
        expected (str | None): The cause in the verdict or the warning's name, `UNKNOWN` for one that no rule knows;
            None for a healthy run.
        kind (str): What happens to a step; see `strike`.
        whole_run (bool): Whether it is there from step 1 on.
    """

    expected: str | None
    kind: str
    whole_run: bool = False


ROWS = {
    "advantage of NaN": Blind("nonfinite", "nan"),
    "one outlying reward": Blind("advantage", "reward"),
    "gradient of one layer": Blind("layer", "layer"),
    "added EOS token": Blind("unsampled", "eos"),
    "rollout log-prob of one token": Blind("token", "log_prob"),
    "auxiliary loss": Blind("auxiliary", "auxiliary"),
    "rollout never synced": Blind("stale_weights", "stale", whole_run=True),
    "one rollout worker of two": Blind("partly_stale", "stale", whole_run=True),
    "rollout of another temperature": Blind("other_log_probs", "temperature", whole_run=True),
    "loss scaled wrongly": Blind("loss_scale", "scaled", whole_run=True),
    "backward signal of one token": Blind(UNKNOWN, "blow"),
    HEALTHY: Blind(None, ""),
    "healthy, 2 epochs": Blind(None, ""),
}


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What a seed draws for a row.

    Args:
        step (int): From which on there is a cause, from 0.
        rate (float): The learning rate, in the usual one.
        noise (float): Of the rollout's log-probs; see run_warnings.py.
        size (float): How large the cause is, from 0 to 1.
        temperature (float): Of the rollout's log-probs, where these are wrong.
        factor (float): That the loss is multiplied by, where that is wrong.
    """

    step: int
    rate: float
    noise: float
    size: float
    temperature: float
    factor: float


def draw(row: str, seed: int, steps: int) -> Drawn:
    drawn = random.Random(f"{row} {seed}")
    return Drawn(
        step=drawn.randrange(min(EARLIEST, steps - 1), min(LATEST, steps)),
        rate=drawn.choice([1.0, 2.0, 3.0]),
        noise=drawn.choice([0.0, 0.01, 0.02, 0.05]),
        size=drawn.random(),
        temperature=drawn.choice([0.4, 0.5, 0.7, 1.4, 1.8]),
        factor=drawn.choice([0.25, 0.5, 2.0, 4.0, 8.0]),
    )


def measure(settings: Settings, weights: Tensors, seed: int, usual: Usual, what: tuple[str, int]) -> dict[str, Any]:
    """The cause that is named in one run (None: nothing was said), and in which step."""
    row, steps = what
    blind, drawn = ROWS[row], draw(row, seed, steps)
    epochs = 2 if row == "healthy, 2 epochs" else 1
    settings = dataclasses.replace(settings, learning_rate=settings.learning_rate * drawn.rate, epochs=epochs)
    variant = Variant("blind", "zscore", action="log", ratio_clip=blind.kind != "log_prob")
    run = Run(settings, weights, variant, seed, usual)
    rollout = Rollout(_rollout(row, blind, drawn), run, seed)
    last: dict[str, Any] = {"named": None, "step": None}
    with scaled_loss(drawn.factor) if blind.kind == "scaled" else nullcontext():
        for step in range(steps):
            begun = blind.expected is not None and (blind.whole_run or step >= drawn.step)
            causes = take_step(run, rollout, blind.kind, begun and not blind.whole_run, drawn)
            named = next((cause for cause in causes if cause != UNKNOWN), UNKNOWN)
            is_better = named != UNKNOWN or last["named"] is None
            if causes and is_better and (begun or blind.expected is None):
                last = {"named": named, "step": step}
                if not blind.whole_run and (begun or named != UNKNOWN):
                    return last
    return last


def _rollout(row: str, blind: Blind, drawn: Drawn) -> Planted:
    stale = {"rollout never synced": 1.0, "one rollout worker of two": 0.5}.get(row, 0.0)
    temperature = drawn.temperature if blind.kind == "temperature" else 1.0
    return Planted(row, stale=stale, temperature=temperature, noise=drawn.noise)


def take_step(run: Run, rollout: Rollout, kind: str, strikes: bool, drawn: Drawn) -> list[str]:
    """One step, with a cause in its first mini-batch if it strikes.

    Returns:
        list[str]: The causes of the step's spikes, then the names of its warnings.
    """
    samples, log_probs = rollout.draw()
    if strikes and kind == "eos":
        samples = cut_with_an_end(run, samples, [])
        log_probs = torch.where(samples.log_probs == 0, 0.0, rollout.log_probs_of(samples))

    def change(tensors: Tensors) -> None:
        tensors["rollout_log_probs"] = log_probs
        tensors["ref_log_prob"] = rollout.reference(tensors["input_ids"])
        if kind == "reward":
            tensors["advantages"][:] = advantages_of(run, samples, samples.rewards, by_std=False)
        if strikes:
            strike(kind, drawn, run, samples, tensors)

    gradloc = run.actor.gradloc
    assert gradloc is not None
    scale = 10 ** (3 + drawn.size)
    attached = attach_auxiliary_loss(run.model, scale) if strikes and kind == "auxiliary" else nullcontext()
    with attached:
        run.step(kind if strikes and kind in Spike.KINDS else "no", samples, change)
    causes = [event["verdict"]["cause"] or UNKNOWN for event in gradloc.events]
    return causes + [warning["name"] for warning in gradloc.warnings]


def strike(kind: str, drawn: Drawn, run: Run, samples: Samples, tensors: Tensors) -> None:
    """Changes the batch of a step in which a cause strikes."""
    rows = len(samples.prompts) // 2
    moving = tensors["response_mask"][:rows].bool() & (tensors["advantages"][:rows] != 0)
    places = moving.nonzero()
    if kind not in ("nan", "reward", "log_prob") or not len(places):
        return
    row, position = places[int(drawn.size * len(places))].tolist()
    if kind == "nan":
        tensors["advantages"][row, position] = torch.nan
    elif kind == "reward":
        rewards = samples.rewards.clone()
        rewards[row] = 30 * 10**drawn.size
        tensors["advantages"][:] = advantages_of(run, samples, rewards, by_std=False)
    else:
        tensors["rollout_log_probs"][row, position] -= 5 + 5 * drawn.size
        tensors["old_log_probs"][:rows] = tensors["rollout_log_probs"][:rows]


@contextmanager
def scaled_loss(factor: float) -> Iterator[None]:
    """verl's policy losses times a factor, as where a division is forgotten, or done twice."""
    original = dp_actor.get_policy_loss_fn

    def scaled(name: str) -> Any:
        loss = original(name)

        def times(*arguments: Any, **options: Any) -> tuple[Any, ...]:
            value, *others = loss(*arguments, **options)
            return (value * factor, *others)

        return times

    dp_actor.get_policy_loss_fn = scaled
    try:
        yield
    finally:
        dp_actor.get_policy_loss_fn = original


class _AuxiliaryLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], gradients[0].new_tensor(ctx.scale), None


@contextmanager
def attach_auxiliary_loss(model: nn.Module, scale: float) -> Iterator[None]:
    """A z-loss of layer 1's gate, whose gradient is added in the backward pass."""

    def attached(block: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return output
        gate = block.get_submodule("gate_proj")(arguments[0].detach())
        return _AuxiliaryLoss.apply(output, gate.logsumexp(-1).square().mean(), scale)

    handle = model.get_submodule("model.layers.1.mlp").register_forward_hook(attached)
    try:
        yield
    finally:
        handle.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments = arguments_of(parser, ROWS)
    seeds = [*TEST] if arguments.seeds == parser.get_default("seeds") else arguments.seeds
    rows = arguments.rows
    settings, steps = (QUICK, QUICK_STEPS) if arguments.quick else (FULL, STEPS)
    results = Results(arguments.results, dataclasses.asdict(settings))
    tasks = {key_of(seed, row): (seed, (row, steps)) for row in rows for seed in seeds}
    run_all(results, settings, tasks, measure, arguments.jobs)
    print(f"Seeds {', '.join(map(str, seeds))}.\n")
    print("| run | right | no known cause | nothing said | named instead |\n|---|---|---|---|---|")
    totals: Counter[str] = Counter()
    for row in rows:
        expected = ROWS[row].expected
        named = Counter(results.runs[key_of(seed, row)]["named"] for seed in seeds)
        # In a healthy run, a spike without a known cause is no false name.
        right = named[expected] + (named[UNKNOWN] if expected is None else 0)
        silent, nothing = (0 if expected in (None, name) else named[name] for name in (UNKNOWN, None))
        others = [f"{name} {count}" for name, count in named.most_common() if name not in (None, UNKNOWN, expected)]
        print(f"| {row} | {right} of {len(seeds)} | {silent or '-'} | {nothing or '-'} | {', '.join(others) or '-'} |")
        what = "healthy" if expected is None else "unknown" if expected == UNKNOWN else "causes"
        totals += Counter({what: len(seeds), f"{what} right": right, f"{what} silent": silent + nothing})
    if totals["causes"]:
        print(f"\nRight: {totals['causes right']} of {totals['causes']}; not named: {totals['causes silent']}.")
    for what, runs in (("unknown", "runs with a cause that no rule knows"), ("healthy", "healthy runs")):
        if totals[what]:
            false = totals[what] - totals[f"{what} right"] - totals[f"{what} silent"]
            print(f"False names in {runs}: {false} of {totals[what]}.")


if __name__ == "__main__":
    main()
