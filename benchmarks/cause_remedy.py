# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Which remedy fits which cause: what each leaves of a spike with a planted cause, and what that costs other tokens.

The runs are those of stability.py: a Llama of three layers, GRPO on sums with verl's patched actor, LayerClip and a
grad_clip of five times the usual norm. Each has 19 ordinary steps; in the first mini-batch of the next one, a cause is
planted (planted_causes.py). GradLoc's threshold is three times the usual token norm, and it keeps a bundle of the
spike. Then the replay measures each remedy with the weights before that step, as
`gradloc replay BUNDLE --remedies` does. A cause that is an error of the backward pass (layer,
blow) is planted in the replayed model, too.

Tables of remedies: a cell is "left · moved", in percent, as mean over the seeds that have a spike: the norm that is
left of the spiked mini-batch, and how far the gradient of the ordinary tokens (all but the culprits) moves; in
parentheses the standard deviation of "left", where it is over 5 points; in brackets the number of seeds, where it is
not known for all spikes. * marks what is under the threshold each time; bold is the best, in the order of the replay;
"=" changes nothing; "–" cannot be computed.

"TokenClip" is the replay's, by the bounds that it has learned in the run (action log); "TokenClip in the actor" is
measured in runs with TokenClip on (drop, max_share=0.1): the largest norm of a mini-batch of that step by the one
without TokenClip.

Table of rewards: the reward that spikes in steps 20 and 35 to 37 cost, as in stability.py: from its results, or from
runs of the same kind with the cause planted in these steps (two runs for each cell and seed).

The patched verl must be importable; after `bash tests/run.sh`:

    PYTHONPATH=build/verl:. build/venv/bin/python benchmarks/cause_remedy.py --results build/cause_remedy.json \
        --stability build/stability.json --jobs 4

Finished runs are kept in the results and not repeated. All of it takes a quarter of an hour with two jobs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from grpo_run import TOKEN_THRESHOLD, Run, Settings, Spike, Usual, Variant
from planted_causes import CAUSES, Cause, Planted, Tensors, prepare, take_step
from seed_jobs import Results, arguments_of, key_of, run_all
from stability import FULL, KINDS, QUICK, VARIANTS, lost
from sums_task import reward_of
from torch import Tensor, nn

from gradloc_tools.bundles.opening import Bundle, open_bundle
from gradloc_tools.replay.measuring import measure, places
from gradloc_tools.replay.model import default_variant, load
from gradloc_tools.replay.remedies import DROP, measure_remedies, rank

# In the order of the columns; names as in the replay's table, but for the clips.
CLIPS = ("grad_clip 5x", "grad_clip 0.5x", "LayerClip", "TokenClip", DROP)
CORRECTIONS = ("token TIS", "sequence TIS", "sequence TIS and mask", "geometric mask", "token mask")
LOSSES = ("clip_ratio 0.1, 0.1", "dual clip 1.5", "GSPO", "CISPO", "SAPO", "GMPO")
MAX_SHARE = 0.1  # TokenClip's; its default is one token of a mini-batch here
# In the table of rewards: what stability.py has, and what is run here.
OF_STABILITY = ("none", "global", "zscore", "TokenClip", "both", "drop", "skip", "adagc", "zclip")
RUN_HERE = ("none", "global", "zscore", "TokenClip", "drop", "token mask")
WITH_REWARDS = ("advantage", "unsampled, reward 100", "one log-prob, no ratio clip")
# As in the replay's table of verl 0.7.0.
ROLLOUT_CORRECTIONS = {"token mask": {"rollout_is": None, "rollout_rs": "token", "rollout_rs_threshold": 2.0}}

Row = dict[str, Any]


class PlantedAgain:
    """An error of the backward pass in a replayed model, whose passes have one row, without padding.

    Args:
        model (nn.Module): The model.
        planted (Planted): The error as it was in training.
        rows (list[Tensor]): The tokens of each row, unpadded; to be sure that only one is meant.
    """

    def __init__(self, model: nn.Module, planted: Planted, rows: list[Tensor]) -> None:
        self._again = Spike(model)
        self._again.factor = planted.factor
        if planted.blown is not None:
            tokens, self._place = planted.blown
            # Passes end with the last token that has a coefficient, so a row is known by its tokens up to this one's.
            self._start = tokens[: self._place + 2]
            if sum(self._is_it(row) for row in rows) != 1:
                raise ValueError("more than one row of the mini-batch begins with the tokens of the blown one")
            model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _is_it(self, row: Tensor) -> bool:
        return len(row) >= len(self._start) and bool((row[: len(self._start)] == self._start).all())

    def _look(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        row = kwargs["input_ids"][0]
        self._again.blown = (row, self._place) if self._is_it(row) else None


def with_cause(
    settings: Settings, weights: Tensors, seed: int, usual: Usual, cause: Cause, folder: str, token_action: str = "log"
) -> tuple[float, Planted]:
    """Ordinary steps, then one with a cause.

    Args:
        folder (str): Gets the bundle of the spike, and the weights before that step.
        token_action (str): TokenClip's; with "log", it only learns its bounds, which the bundle then has.

    Returns:
        tuple: The largest norm of a mini-batch of that step, in thresholds, and the error of the backward pass.
    """
    variant = Variant("cause", "zscore", action="log", ratio_clip=cause.ratio_clip, token_action=token_action)
    variant = dataclasses.replace(variant, token_clip=MAX_SHARE)
    run = Run(settings, weights, variant, seed, usual, dump_dir=f"{folder}/dump")
    past: list[Tensors] = []
    for _ in range(settings.events[0][0] - 1):
        past.append({name: value.clone() for name, value in run.model.state_dict().items()})
        run.step("no")
        if run.logged("actor/gradloc/triggered")[-1]:
            raise RuntimeError(f"seed {seed} has a spike before the planted one")
    samples = prepare(cause, run, past)
    run.model.save_pretrained(f"{folder}/model")
    planted = take_step(cause, run, samples)
    return run.metrics[-1]["actor/gradloc/token_norm_max"] / (TOKEN_THRESHOLD * usual.token_norm), planted


def measure_cause(settings: Settings, weights: Tensors, seed: int, usual: Usual, cause: Cause) -> dict[str, Any]:
    """The spike that a cause makes, and what each remedy leaves of it.

    Returns:
        dict: `level` (the mini-batch's norm in thresholds), `diagnosis` (None without a spike); with a spike also what
            `measure_bundle` gives.
    """
    with tempfile.TemporaryDirectory() as folder:
        level, planted = with_cause(settings, weights, seed, usual, cause, folder)
        found: dict[str, Any] = {"level": level, "diagnosis": None}
        bundles = sorted(Path(folder).glob("dump/replay/*/manifest.json"))
        if not bundles:
            return found
        bundle = open_bundle(str(bundles[0].parent))
        return found | measure_bundle(bundle, f"{folder}/model", planted)


def measure_token_clip(settings: Settings, weights: Tensors, seed: int, usual: Usual, cause: Cause) -> dict[str, Any]:
    """The same with TokenClip on: what it leaves in the actor, by the bounds that it has learned itself."""
    with tempfile.TemporaryDirectory() as folder:
        return {"level": with_cause(settings, weights, seed, usual, cause, folder, "drop")[0]}


def measure_bundle(bundle: Bundle, model_folder: str, planted: Planted) -> dict[str, Any]:
    """The figures of a spike, by the replay's own functions.

    Returns:
        dict: Of the event: `diagnosis`, `mini_batch`, `culprits` (their number), their `sources`, the mini-batch's
            `threshold`; `replayed` (the replayed norm over the recorded one); the table's `rows` and `notes`.
    """
    event = bundle.event
    culprits = places(bundle, event["culprits"])
    model = load(bundle, model_folder, default_variant(bundle, None, None, "cpu"), "cpu", None, False)
    PlantedAgain(
        model.module, planted, [row.input_ids for saved in bundle.micro_batches.values() for row in saved.rows]
    )
    measured = measure(bundle, model, [], culprits)
    rows_found, notes = measure_remedies(bundle, model, measured)
    entry = bundle.manifest["micro_batches"][0]
    whole = measured.units[bundle.first].norm
    return {
        "diagnosis": event["diagnosis"],
        "mini_batch": event["mini_batch"],
        "culprits": len(culprits),
        "sources": sorted({culprit["source"] for culprit in event["culprits"]}),
        "threshold": float(entry["threshold"]),
        "replayed": whole / float(entry["norm"]),
        "rows": [named(row) for row in rows_found],
        "notes": notes,
    }


def named(row: Row) -> Row:
    """A row under a name that is the same in all runs."""
    name = row["name"]
    if name.startswith("grad_clip"):
        name = "grad_clip 5x" if row["override"] is None else "grad_clip 0.5x"
    elif name.startswith("LayerClip"):
        name = "LayerClip"
    kept = ("norm", "left", "under", "ordinary_moved", "masked")
    return {"name": name, **{key: row[key] for key in kept}}


def measure_lost(
    settings: Settings, weights: Tensors, seed: int, usual: Usual, what: tuple[Cause, str]
) -> dict[str, list[float]]:
    """The rewards of a run without and of one with a cause in the steps of the spikes, both with a remedy."""
    cause, remedy = what
    correction = ROLLOUT_CORRECTIONS.get(remedy)
    (variant,) = (v for v in VARIANTS if v.name == ("global" if correction else remedy))
    variant = dataclasses.replace(variant, ratio_clip=cause.ratio_clip)

    def rewards(planted: bool) -> list[float]:
        run, past = Run(settings, weights, variant, seed, usual), list[Tensors]()
        for step in range(1, settings.steps + 1):
            past.append({name: value.clone() for name, value in run.model.state_dict().items()})
            now = cause if planted and settings.spikes_in(step) else Cause("none")
            take_step(now, run, prepare(now, run, past), correction)
            run.rewards.append(reward_of(run.model, run.test))
        return run.rewards

    return {"no": rewards(False), "planted": rewards(True)}


def cells(of_seeds: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, str]:
    """The cells of a cause whose seeds have a spike, and the best remedy in bold."""
    found, means = {}, {}
    for name in (*CLIPS, *CORRECTIONS, *LOSSES):
        rows = [row for run in of_seeds for row in run["rows"] if row["name"] == name]
        if not rows:
            found[name] = "–"
            continue
        found[name], means[name] = cell(rows, len(of_seeds))
    best = min(means, key=lambda name: rank(means[name]))
    found[best] = f"**{found[best]}**"
    return {name: found[name] for name in names}


def cell(rows: list[Row], spikes: int) -> tuple[str, Row]:
    """The text of a remedy, and its mean as a row that the replay can rank."""
    moved = [row["ordinary_moved"] for row in rows]
    price = mean(moved) if None not in moved else None
    under = all(row["under"] for row in rows)
    norms = [float(row["norm"]) for row in rows]
    left = [row["left"] for row in rows]
    if None in left:  # the spike itself is not finite
        text = "NaN" if not all(map(math.isfinite, norms)) else "finite" if any(norms) else "0%"
    else:
        norms = left
        text = percent(mean(left))
        if len(left) > 1 and stdev(left) > 0.05:
            text += f" ({percent(stdev(left))})"
        if max(abs(value - 1) for value in left) < 0.005 and price is not None and price < 0.005:
            text, price = "=", 0.0
    text = text if text in ("=", "NaN") else f"{text} · {'?' if price is None else percent(price)}"
    text += "*" * under + (f" [{len(rows)}]" if len(rows) < spikes else "")
    return text, {
        "name": rows[0]["name"],
        "norm": mean(norms) if all(map(math.isfinite, norms)) else math.nan,
        "under": under,
        "ordinary_moved": price,
    }


def percent(value: float) -> str:
    """Whole percent, under 1% with a digit, and no sign before a rounded zero."""
    return "0%" if abs(value) < 5e-4 else f"{value:.1%}" if abs(value) < 0.01 else f"{value:.0%}"


def table(columns: list[str], rows: list[list[str]]) -> None:
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print()


def print_remedies(runs: dict[str, Any], seeds: list[int], causes: list[Cause]) -> None:
    """What GradLoc found of each cause, then the remedies of those that make spikes."""
    of_cause = {cause.name: [runs[key_of(seed, cause.name)] for seed in seeds] for cause in causes}
    with_spike = {name: [run for run in found if run["diagnosis"]] for name, found in of_cause.items()}
    with_spike = {name: found for name, found in with_spike.items() if found}
    rows = []
    for name, found in of_cause.items():
        levels = [float(run["level"]) for run in found]
        spikes = with_spike.get(name, [])
        diagnoses = Counter(run["diagnosis"] for run in spikes)
        sources = Counter(source for run in spikes for source in run["sources"])
        rows.append(
            [
                name,
                f"{min(levels):.2f} to {max(levels):.2f}" if all(map(math.isfinite, levels)) else "NaN",
                f"{len(spikes)} of {len(found)}" if spikes else "no spike",
                ", ".join(f"{what} {count}" for what, count in diagnoses.items()),
                ", ".join(f"{what} {count}" for what, count in sources.items()),
            ]
        )
    table(["cause", "norm in thresholds", "spikes", "diagnosis", "sources of culprits"], rows)
    learned = {}
    for name, found in with_spike.items():
        keys = [key_of("TokenClip", seed, name) for seed in seeds if runs[key_of(seed, name)]["diagnosis"]]
        pairs = [(runs[key]["level"], run["level"]) for key, run in zip(keys, found, strict=True) if key in runs]
        if pairs and all(math.isfinite(before) for _, before in pairs):
            learned[name] = f"{percent(mean(after / before for after, before in pairs))}" + (
                "*" if all(after <= 1 for after, _ in pairs) else ""
            )
        elif pairs:
            learned[name] = "finite*" if all(after <= 1 for after, _ in pairs) else "NaN"
    if learned:
        table(["left", "TokenClip in the actor"], [[name, text] for name, text in learned.items()])
    for names in (CLIPS, CORRECTIONS, LOSSES):
        table(
            ["left · moved", *names],
            [[name, *cells(found, names).values()] for name, found in with_spike.items()],
        )
    off = [abs(run["replayed"] - 1) for found in with_spike.values() for run in found]
    known = [value for value in off if math.isfinite(value)]
    if known:
        print(f"Largest difference of a replayed norm to the recorded one: {max(known):.1e}.\n")


def print_rewards(settings: Settings, runs: dict[str, Any], seeds: list[int], stability: Path | None) -> None:
    """The reward that each cause costs with each remedy, where it was run."""
    names = list(dict.fromkeys((*OF_STABILITY, *RUN_HERE)))
    first = settings.events[0][0]
    rows = []
    kept = json.loads(stability.read_text()) if stability else {"runs": {}, "settings": None}
    if stability and kept["settings"] != json.loads(json.dumps(dataclasses.asdict(settings))):
        sys.exit(f"{stability} holds runs of other settings")

    def text(values: list[float]) -> str:
        if len(values) < len(seeds):
            return "–"
        return f"{round(mean(values), 3) + 0.0:+.3f}" + (f" ({stdev(values):.3f})" if len(values) > 1 else "")

    for kind in KINDS:
        keys = [[key_of(seed, name) for seed in seeds] for name in names]
        values = [[lost(settings, kept["runs"][key], kind) for key in row if key in kept["runs"]] for row in keys]
        if any(values):
            rows.append([kind, *map(text, values)])
    for cause in WITH_REWARDS:
        found = []
        for name in names:
            of_seeds = [runs[key] for seed in seeds if (key := key_of("reward", seed, cause, name)) in runs]
            found.append(text([mean(run["no"][first:]) - mean(run["planted"][first:]) for run in of_seeds]))
        if set(found) != {"–"}:
            rows.append([cause, *found])
    table(["lost reward", *names], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stability", type=Path, help="the results of stability.py, for the lost reward")
    parser.add_argument("--no-rewards", action="store_true", help="without runs for the lost reward")
    arguments = arguments_of(parser, [cause.name for cause in CAUSES])
    settings = QUICK if arguments.quick else FULL
    causes = [cause for cause in CAUSES if cause.name in arguments.rows]
    results = Results(arguments.results, dataclasses.asdict(settings))
    tasks = {key_of(seed, cause.name): (seed, cause) for seed in arguments.seeds for cause in causes}
    run_all(results, settings, tasks, measure_cause, arguments.jobs)
    spiked = {
        key_of("TokenClip", seed, cause.name): (seed, cause)
        for seed, cause in tasks.values()
        if results.runs[key_of(seed, cause.name)]["diagnosis"]
    }
    run_all(results, settings, spiked, measure_token_clip, arguments.jobs)
    if not arguments.no_rewards:
        wanted = [
            (cause, name, seed)
            for seed in arguments.seeds
            for cause in causes
            if cause.name in WITH_REWARDS
            for name in RUN_HERE
        ]
        reward_tasks = {key_of("reward", seed, cause.name, name): (seed, (cause, name)) for cause, name, seed in wanted}
        run_all(results, settings, reward_tasks, measure_lost, arguments.jobs)
    print(f"Seeds: {len(arguments.seeds)}.\n")
    print_remedies(results.runs, arguments.seeds, causes)
    print_rewards(settings, results.runs, arguments.seeds, arguments.stability)


if __name__ == "__main__":
    main()
