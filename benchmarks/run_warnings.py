# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The checks of gradloc/run_checks.py on natural runs and on runs with a planted cause: figures, and who is warned.

A tiny model adds two-digit numbers, as in stability.py: sampled responses of at most four tokens, verl's patched actor,
two mini-batches a step. Log-probs of the rollout get the noise of another engine: a Student t with three degrees of
freedom, times the size of the log-prob (at least 0.1 nat) and the given deviation. Healthy runs have several such
deviations, and learning rates up to a hundred times the usual one.

Printed for each run: the largest and the smallest gap (the mean difference of the log-probs of rollout and policy), the
largest share of stale responses and the most of them in a step, the largest growth of the gap, the share of differences
of one sign and the correlation that come nearest to the limits, the most tokens of a step that the policy did not
produce, how far the sum of the weights and the coefficients are from what they should be (a factor), and the first step
with a warning. Limits are in docs/verdict.md.

The patched verl must be importable; after `bash tests/run.sh`:

    PYTHONPATH=build/verl:. build/venv/bin/python benchmarks/run_warnings.py --seeds 3
"""

from __future__ import annotations

import argparse
import dataclasses
import warnings
from typing import Any

import torch
import torch.distributed as dist
from grpo_run import Run, Samples, Settings, Variant
from sums_task import PROMPT, RESPONSE, learn_from_examples, new_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from verl.utils.gradloc import run_warnings
from verl.utils.gradloc.evidence.scaling import coefficient_factor

RATE = 1e-4


@dataclasses.dataclass(frozen=True)
class Planted:
    """What is wrong with the rollout of a run.

    Args:
        name (str): As printed.
        stale (float): The share of the responses that are sampled with the weights of step 1.
        behind (int): By how many steps the rollout's weights are late.
        temperature (float): Of the log-probs that the rollout reports; it samples at 1.
        noise (float): The deviation of its log-probs.
        rate (float): The learning rate, in the usual one.
        reference (bool): Whether the log-probs of the reference are known.
    """

    name: str
    stale: float = 0.0
    behind: int = 0
    temperature: float = 1.0
    noise: float = 0.02
    rate: float = 1.0
    reference: bool = True


HEALTHY = (
    *(Planted(f"healthy, noise {noise:g}", noise=noise) for noise in (0.0, 0.02, 0.1)),
    *(Planted(f"healthy, learning rate × {rate:g}", rate=rate) for rate in (10.0, 100.0)),
    Planted("healthy, no reference", reference=False),
    Planted("one step late", behind=1),
)
CAUSES = (
    Planted("never synced", stale=1.0, rate=3.0),
    Planted("never synced, no reference", stale=1.0, rate=3.0, reference=False),
    Planted("one worker", stale=0.5, rate=3.0),
    Planted("one worker, no reference", stale=0.5, rate=3.0, reference=False),
    Planted("temperature 0.6", temperature=0.6),
    Planted("temperature 1.5", temperature=1.5),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "CPU Autocast only supports")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for seed in range(options.seeds):
        weights = learn_from_examples(seed, Settings().skill)
        for planted in (*HEALTHY, *CAUSES):
            print(f"seed {seed}  {planted.name:32}", described(run(planted, weights, seed, options.steps)), flush=True)


def run(planted: Planted, weights: dict[str, Tensor], seed: int, steps: int) -> list[dict[str, Any]]:
    """The figures and the warning of each step."""
    settings = dataclasses.replace(Settings(steps=steps), learning_rate=RATE * planted.rate)
    training = Run(settings, weights, Variant("no clip", "none"), seed, None)
    rollout = Rollout(planted, training, seed)
    gradloc = training.actor.gradloc
    assert gradloc is not None
    scales: list[Tensor] = []
    check_run = run_warnings.loss_scale_warning

    def looked_at(by_rank: Tensor, *others: Any) -> dict[str, str] | None:
        scales.append(by_rank)
        return check_run(by_rank, *others)

    run_warnings.loss_scale_warning = looked_at
    figures = []
    for _ in range(steps):
        samples, log_probs = rollout.draw()

        def change(tensors: dict[str, Tensor], log_probs: Tensor = log_probs) -> None:
            tensors["rollout_log_probs"] = log_probs
            if planted.reference:
                tensors["ref_log_prob"] = rollout.reference(tensors["input_ids"])

        training.step("no", samples, change)
        found = {**_figures(gradloc._warnings._checks), "scale": max(map(_off_scale, scales))}
        figures.append({**found, "warnings": [warning["name"] for warning in gradloc.warnings]})
        scales.clear()
    run_warnings.loss_scale_warning = check_run
    return figures


def _off_scale(by_rank: Tensor) -> float:
    """The larger one of both factors that `loss_scale_warning` looks at, or of one over it; 1 if none is known."""
    factors = [float(by_rank[:, 0].mean()), coefficient_factor(by_rank)]
    return max((max(factor, 1 / factor) for factor in factors if factor), default=1.0)


class Rollout:
    """Samples and reports log-probs with what is planted.

    Args:
        planted (Planted): What is wrong with it.
        training (Run): The run that trains on its samples, before its first step.
        seed (int): Of the noise.
    """

    def __init__(self, planted: Planted, training: Run, seed: int) -> None:
        self._planted, self._training, self._seed = planted, training, seed
        self._noise = torch.Generator().manual_seed(seed)
        self._past = [_copied(training.model, seed)]
        self._drawn = 0
        self._used: LlamaForCausalLM = self._past[0]

    def draw(self) -> tuple[Samples, Tensor]:
        """The samples of the next step, and the log-probs that are reported of them."""
        planted, training = self._planted, self._training
        if planted.behind and self._drawn:
            self._past.append(_copied(training.model, self._seed))
        current = training.model
        self._used = self._past[max(self._drawn - planted.behind, 0)] if planted.behind else current
        self._drawn += 1
        training.model = self._used
        samples = training.draw()
        if planted.stale:
            training.model = self._past[0]
            samples = _joined(training.draw(), samples, round(planted.stale * len(samples.prompts)))
        training.model = current
        return samples, self.log_probs_of(samples)

    def log_probs_of(self, samples: Samples) -> Tensor:
        """The log-probs that are reported of these samples of the last step."""
        reported = _reported(self._used, self._past[0], self._planted, samples)
        size = reported.abs().clamp(min=0.1)
        t = torch.randn(3, *reported.shape, generator=self._noise).square().sum(0).div(3).sqrt()
        return reported + self._planted.noise * size * torch.randn(reported.shape, generator=self._noise) / t

    def reference(self, tokens: Tensor) -> Tensor:
        """The log-probs of the policy before the first step, of the responses in whole rows."""
        return _log_probs(self._past[0], tokens)


def _copied(model: nn.Module, seed: int) -> LlamaForCausalLM:
    """A model with these weights, and without the hooks of what watches it."""
    copied = new_model(seed)
    copied.load_state_dict(model.state_dict())
    return copied


def _joined(first: Samples, second: Samples, count: int) -> Samples:
    """The first rows of one, and the other rows of the other."""
    fields = [field.name for field in dataclasses.fields(Samples)]
    return Samples(
        **{name: torch.cat([getattr(first, name)[:count], getattr(second, name)[count:]]) for name in fields}
    )


def _reported(used: nn.Module, initial: nn.Module, planted: Planted, samples: Samples) -> Tensor:
    """The log-probs that the rollout reports, without noise."""
    tokens = torch.cat([samples.prompts, samples.responses], 1)
    reported = _log_probs(used, tokens, planted.temperature)
    late = _log_probs(initial, tokens, planted.temperature)
    stale = torch.arange(len(tokens)) < round(planted.stale * len(tokens))
    return torch.where(stale.unsqueeze(1), late, reported)


@torch.no_grad()
def _log_probs(model: nn.Module, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    logits = model(input_ids=tokens).logits[:, PROMPT - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, tokens[:, -RESPONSE:].unsqueeze(-1)).squeeze(-1)


def _figures(checks: Any) -> dict[str, float]:
    """What the rules of the last update looked at."""
    sums = checks._sums
    told = sums["stale"] + sums["fresh"]
    signed = sums["larger"] + sums["smaller"]
    gap = sums["gap"] / sums["tokens"]
    base = checks._readings[0][1] if checks._readings else gap
    return {
        "gap": gap,
        "stale": sums["stale"],
        "share": sums["stale"] / told if told else 0.0,
        "growth": gap / base if base else 1.0,
        "one_side": max(sums["larger"], sums["smaller"]) / signed if signed else 0.5,
        "correlation": abs(checks._correlation()),
        "unsampled": sums["unsampled"],
    }


def described(figures: list[dict[str, Any]]) -> str:
    """A run in one line."""
    most = {name: max(step[name] for step in figures) for name in figures[0] if name != "warnings"}
    least = min(step["gap"] for step in figures)
    first = next((i for i, step in enumerate(figures, 1) if step["warnings"]), None)
    names = sorted({name for step in figures for name in step["warnings"]})
    warned = sum(bool(step["warnings"]) for step in figures)
    return (
        f"gap {least:.3f} to {most['gap']:.3f}  stale {most['share']:4.0%} (at most {most['stale']:.0f})  "
        f"growth {most['growth']:5.1f}  one side {most['one_side']:4.0%}  correlation {most['correlation']:.2f}  "
        f"unsampled {most['unsampled']:.0f}  scale {most['scale']:.3f}  "
        + (f"{', '.join(names)} in {warned} of {len(figures)} steps, first in {first}" if names else "no warning")
    )


if __name__ == "__main__":
    main()
