"""A simulation of LayerClip on the norms of one layer, from which the default of `z` was chosen.

Norms are log-normal with median 1 and a given spread (standard deviation of the logarithm). Each run has 2000 steps
after the warm-up, with a few seeds. For each z the table gives

- bound: the average bound, in medians;
- clipped: the share of ordinary steps that are clipped, of all steps and of the first 100 after the warm-up;
- 10x, 100x: what such a spike is scaled down to, in medians;
- ten 100x: by how much ten 100x spikes in a row raise the bound;
- start: the first bound after a warm-up with one 100x spike in it, in average bounds (smallest to largest);
- follow 3x, 100x: steps after a lasting shift of the norms until the bound has covered 80% of it (median, worst);
- follow 1/10, 1/100: the same for lasting falls, until the bound is at most 1.5 times what it should be.

Usage: python benchmarks/layer_clip.py [--seeds N]
"""

import argparse
import copy
import random
import sys
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gradloc.layers.layer_clip import LayerClipConfig, LayerStatistics

SPREADS = (0.3, 0.5, 0.8)
STEPS = 2000
CONFIGS = [LayerClipConfig(z=z) for z in (3.0, 4.0, 5.0, 6.0)]


def learned_bound(statistics: LayerStatistics, config: LayerClipConfig) -> float:
    """The bound after the warm-up."""
    bound = statistics.bound(config)
    assert bound is not None
    return bound


def step(statistics: LayerStatistics, norm: float, config: LayerClipConfig) -> float:
    """What `LayerClip.take_in` does with one layer's norm; returns the norm, cut at the bound."""
    bound = statistics.bound(config)
    clipped = norm if bound is None else min(norm, bound)
    statistics.take_in(clipped, config)
    return clipped


def follow(
    statistics: LayerStatistics, config: LayerClipConfig, norms: random.Random, spread: float, goal: float, shift: float
) -> int:
    """How many steps the bound needs to reach a goal once all norms are `shift` times what they were."""
    statistics = copy.deepcopy(statistics)
    steps, direction = 0, 1 if shift > 1 else -1
    while direction * learned_bound(statistics, config) < direction * goal and steps < STEPS:
        step(statistics, shift * norms.lognormvariate(0, spread), config)
        steps += 1
    return steps


def simulate(config: LayerClipConfig, spread: float, seed: int) -> dict[str, float]:
    """One run."""
    norms = random.Random(seed)
    statistics = LayerStatistics()
    for _ in range(config.warmup_steps):
        step(statistics, norms.lognormvariate(0, spread), config)
    clipped, bounds = [], []
    for _ in range(STEPS):
        norm = norms.lognormvariate(0, spread)
        bounds.append(learned_bound(statistics, config))
        clipped.append(step(statistics, norm, config) < norm)
    found = {"bound": mean(bounds), "clipped": mean(clipped), "clipped_early": mean(clipped[:100])}

    for size in (10, 100):
        over = size > learned_bound(statistics, config)
        found[f"spike_{size}"] = statistics.target(size, config) if over else size
    spiked = copy.deepcopy(statistics)
    for _ in range(10):
        step(spiked, 100.0, config)
    found["ten_spikes"] = learned_bound(spiked, config) / learned_bound(statistics, config)
    for shift in (3, 100):
        goal = 0.8 * shift * found["bound"]
        found[f"follow_{shift}"] = follow(statistics, config, norms, spread, goal, shift)

    started = LayerStatistics()
    for i in range(config.warmup_steps):
        step(started, norms.lognormvariate(0, spread) * (100 if i == 7 else 1), config)
    found["start"] = learned_bound(started, config) / found["bound"]

    for fall in (10, 100):
        goal = 1.5 / fall * found["bound"]
        found[f"fall_{fall}"] = follow(statistics, config, norms, spread, goal, 1 / fall)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="runs for each line of the table (default: 20)")
    seeds = parser.parse_args().seeds
    columns = ["z", "spread", "bound", "clipped (first 100)", "10x", "100x", "ten 100x", "start"]
    columns += ["follow 3x", "follow 100x", "follow 1/10", "follow 1/100"]
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for config in CONFIGS:
        for spread in SPREADS:
            runs = [simulate(config, spread, seed) for seed in range(seeds)]
            values = {name: [run[name] for run in runs] for name in runs[0]}
            cells = [f"{config.z:g}", f"{spread}", f"{mean(values['bound']):.2f}"]
            cells += [f"{mean(values['clipped']):.2%} ({mean(values['clipped_early']):.2%})"]
            cells += [f"{mean(values[name]):.1f}" for name in ("spike_10", "spike_100")]
            cells += [f"x{mean(values['ten_spikes']):.2f}", f"{min(values['start']):.2f} to {max(values['start']):.2f}"]
            shifts = (values[name] for name in ("follow_3", "follow_100", "fall_10", "fall_100"))
            print(f"| {' | '.join([*cells, *(f'{median(each):.0f}, {max(each)}' for each in shifts)])} |")


if __name__ == "__main__":
    main()
