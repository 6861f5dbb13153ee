"""Evidence as a run of a small model on sums leaves it, made up: for the tests of the report and its screenshot.

python tests/report/evidence_samples.py DIRECTORY [EVENTS]   writes such evidence
"""

from __future__ import annotations

import json
import math
import random
import re
import sys
from pathlib import Path
from typing import Any

from gradloc import record_events
from gradloc.evidence.clips import clip_line
from gradloc.evidence.schema import SCHEMA
from gradloc.evidence.writer import record_step
from gradloc.judge.rules import RULES, classify
from gradloc.judge.sentences import describe
from gradloc.judge.verdict import verdict
from gradloc.version import __version__

LAYERS = ["embed_tokens", *(f"layers.{i}" for i in range(30)), "norm"]
THRESHOLD = 640.0
TOKENS = 160  # in a unit; a mini-batch has 24 of them
# How often the rules hold for ordinary tokens; of layers, that is not known.
ORDINARY = {rule.name: None if rule.name == "layer" else 0.02 for rule in RULES}
MEDIANS = {"median_advantage": 1.3, "median_weight": 1 / (TOKENS * 24)}


def pieces(text: str) -> list[str]:
    """The text cut as a tokenizer would."""
    return re.findall(r" ?[A-Za-z]+|\d| ?[^A-Za-z\d\s]|\s+", text)


def answer(numbers: list[int], random: random.Random) -> str:
    steps, total = [], numbers[0]
    for n in numbers[1:]:
        steps.append(f"{total} + {n} = {total + n}")
        total += n
    ending = random.choice([f"The answer is \\boxed{{{total}}}.", f"So the sum is {total - 10}.", f"**{total}**"])
    return "Let's add them one by one.\n\n" + "\n".join(steps) + "\n\n" + ending


def culprit(position: int, tokens: list[str], norm: float, random: random.Random, **changes: Any) -> dict[str, Any]:
    """A culprit whose figures fit together; layer_norms are those of a layer in the middle and of all others."""
    weight = 1 / (TOKENS * 24)
    log_prob = changes.pop("log_prob", -random.uniform(0.3, 2.9))
    old_log_prob = changes.pop("old_log_prob", log_prob - random.gauss(0, 0.05))
    rollout_log_prob = changes.pop("rollout_log_prob", old_log_prob + random.gauss(0, 0.05))
    advantage = changes.pop("advantage", random.choice([-1.0, 1.0]) * random.uniform(0.4, 2.2))
    share_of_layer = changes.pop("share_of_layer", 0.05)
    at = random.randrange(3, 28)
    relative = {name: random.uniform(0.6, 1.5) for name in LAYERS}
    rest = sum(value**2 for name, value in relative.items() if name != LAYERS[at])
    relative[LAYERS[at]] = math.sqrt(rest * share_of_layer / (1 - share_of_layer))
    scale = norm / math.sqrt(sum(value**2 for value in relative.values()))
    ratio = math.exp(log_prob - old_log_prob)
    heat = [float(f"{weight * abs(advantage) * random.uniform(0, 1) ** 4:.4g}") for _ in tokens]
    heat[position] = float(f"{weight * abs(advantage) * ratio * (1 - math.exp(log_prob)):.4g}")
    found = {
        "rank": 0,
        "micro_batch": 0,
        "row": 0,
        "position": position,
        "grad_norm": norm,
        "threshold": THRESHOLD,
        "suspicion": heat[position],
        "share": 0.9,
        "token_id": sum(map(ord, tokens[position])) * 7 % 49152,
        "weight": weight,
        "coefficient": -weight * advantage * ratio,
        "kl_coefficient": None,
        "after_eos": False,
        "advantage": advantage,
        "log_prob": log_prob,
        "old_log_prob": old_log_prob,
        "ref_log_prob": None,
        "entropy": random.uniform(0.1, 3),
        "rollout_log_prob": rollout_log_prob,
        "ratio": ratio,
        "rollout_ratio": math.exp(log_prob - rollout_log_prob),
        "sequence_ratio": changes.pop("sequence_ratio", math.exp(random.gauss(0, 0.03))),
        "misaligned_share": changes.pop("misaligned_share", 0.0),
        "turn": None,
        "mismatch_start": None,
        "mismatch_turn": None,
        "misplaced": False,
        "shift": None,
        "response_length": 40,
        "entropy_coefficient": 0.0,
        "layer_norms": {name: scale * value for name, value in relative.items()},
        "response_suspicion": heat,
        "response_kl": None,
        "token": tokens[position],
        "context": "".join(tokens[max(position - 16, 0) : position])
        + f"«{tokens[position]}»"
        + "".join(tokens[position + 1 : position + 17]),
        "prompt": "<|im_start|>user\nState the final answer to the following arithmetic problem.<|im_end|>\n",
        "response": "".join(tokens),
        "response_tokens": tokens,
        "response_tokens_start": 0,
        "ground_truth": "188",
        "reward": 1.0 if advantage > 0 else 0.0,
        "data_source": "math_verify",
        "uid": f"{random.getrandbits(64):016x}",
        **changes,
    }
    sources = classify(found, MEDIANS)
    return {**found, "source": sources[0], "sources": sources}


def event(step: int, culprits: list[dict[str, Any]], random: random.Random, **changes: Any) -> dict[str, Any]:
    """An event with the units that the culprits are in; without these, what is left of the units is ordinary."""
    changes = {"explained": bool(culprits), "more_tokens": 20} | changes
    units = []
    root = math.sqrt(TOKENS) / (TOKENS * 24)
    for rank, micro_batch in sorted({(c["rank"], c["micro_batch"]) for c in culprits}):
        mine = [c for c in culprits if (c["rank"], c["micro_batch"]) == (rank, micro_batch)]
        ordinary = {name: root * random.uniform(4, 9) for name in LAYERS}
        layer_norms = {
            name: math.hypot(ordinary[name], *(c["weight"] * c["layer_norms"][name] for c in mine)) for name in LAYERS
        }
        left = TOKENS - len(mine)
        rest = {"tokens": left, "norm": math.hypot(*ordinary.values())}
        rest |= {"threshold": THRESHOLD * root * math.sqrt(left / TOKENS)}
        norm = math.sqrt(sum(value**2 for value in layer_norms.values()))
        for c in mine:
            c["share"] = c["weight"] * c["grad_norm"] / norm
        units.append(
            {
                "rank": rank,
                "micro_batch": micro_batch,
                "rows": 4,
                "tokens": TOKENS,
                "broken_tokens": 0,
                "norm": norm,
                "threshold": THRESHOLD * root,
                "token_equivalent": norm / root,
                "layer_norms": layer_norms,
                "rest": rest if changes["explained"] else None,
            }
        )
    culprits.sort(key=lambda c: -c["grad_norm"] if math.isfinite(c["grad_norm"]) else -math.inf)
    norm = units[0]["norm"] if units else 30.0
    if any(not math.isfinite(c["grad_norm"]) for c in culprits):
        norm = math.nan
    found = {
        "schema": SCHEMA,
        "gradloc_version": __version__,
        "drill": None,
        "replay": None,
        "time": f"2026-03-0{1 + step // 1440 % 9}T{step // 60 % 24:02d}:{step % 60:02d}:00+00:00",
        "global_step": step,
        "epoch": 0,
        "mini_batch": random.randrange(4),
        "trigger": {"kind": "unit", "norm": norm, "threshold": THRESHOLD * root},
        "threshold": THRESHOLD,
        "global_norm": norm / 4 if math.isfinite(norm) else norm,
        "global_threshold": THRESHOLD * root * math.sqrt(24) / 4,
        "ordinary_layer_norms": {name: random.uniform(4, 9) for name in LAYERS},
        "without_tokens": None,
        "broken_parameters": None,
        "steps_since_resume": None,
        "diagnosis": "tokens",
        "until": "explained",
        "micro_batches": max(len(units), 24),
        "units": units,
        "culprits": culprits,
        "suspected": [],
        "diffuse": [],
        "passes": random.randrange(2, 14),
        "budget": 128,
        "budget_seconds": 300.0,
        "out_of_time": False,
        "complete": True,
        "open_segments": [],
        "action": "log",
        "applied": True,
        "layer_clip": None,
        "seconds": random.uniform(0.8, 6),
        "search": "local",
        "world_size": 4,
        "loss_scale": 1.0,
        "error": None,
        **MEDIANS,
        **changes,
    }
    return {"verdict": verdict(found, ORDINARY), **found, "summary": describe(found)}


def without_culprits(step: int, diagnosis: str, random: random.Random, **changes: Any) -> dict[str, Any]:
    """An event of which no token is the culprit."""
    root = math.sqrt(TOKENS) / (TOKENS * 24)
    norm = {"nonfinite": math.nan, "overflow": math.inf}.get(diagnosis, 4 * THRESHOLD * root)
    unit = {"rank": 1, "micro_batch": 2, "rows": 4, "tokens": TOKENS, "broken_tokens": 0, "norm": norm}
    unit |= {"threshold": THRESHOLD * root, "token_equivalent": norm / root, "layer_norms": dict.fromkeys(LAYERS, norm)}
    unit |= {"rest": None}
    changes = {"complete": diagnosis == "tokens", "more_tokens": None} | changes
    changes = {"diagnosis": diagnosis, "units": [unit], "global_norm": norm} | changes
    if diagnosis == "diffuse":
        tokens = [{"row": 9, "position": 3 * i, "grad_norm": 600.0 - i, "share": 0.01 * (i + 2)} for i in range(3)]
        part = {"rank": 1, "micro_batch": 2, "rows": [8, 9, 11], "tokens": 48, "norm": norm / 2}
        part |= {"threshold": THRESHOLD * root * math.sqrt(48 / TOKENS), "largest_tokens": tokens}
        changes = {"diffuse": [part, {**part, "rank": None, "norm": norm / 3, "largest_tokens": []}]} | changes
    if diagnosis == "incomplete":
        token_set = {"rank": 1, "micro_batch": 2, "tokens": 224, "threshold": 10.6}
        changes = {"passes": 128, "open_segments": [token_set]} | changes
    found = event(step, [], random, **changes)
    return {**found, "trigger": {**found["trigger"], "norm": norm}}


def unsearched(step: int, tokens: list[dict[str, Any]], random: random.Random, **changes: Any) -> dict[str, Any]:
    """An event that was only recorded; the culprits given become its suspected tokens."""
    root = math.sqrt(TOKENS) / (TOKENS * 24)
    measured = ("grad_norm", "threshold", "share", "layer_norms")
    suspected = [{name: value for name, value in each.items() if name not in measured} for each in tokens]
    changes = {
        "suspected": suspected,
        "suspected_ranks": [0],
        "replay": f"replay/step{step}-epoch0-mini_batch0-rank0",
    } | changes
    changes |= {"diagnosis": "unsearched", "search": "recorded", "units": [], "passes": 0, "complete": False}
    changes |= {
        "explained": False,
        "more_tokens": None,
        "ordinary_layer_norms": None,
        "global_norm": 4 * THRESHOLD * root,
    }
    found = event(step, [], random, **changes)
    trigger = {"kind": "global", "norm": found["global_norm"], "threshold": THRESHOLD * root}
    return {**found, "trigger": trigger}


def samples(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Events of a run that goes wrong more and more often."""
    generator = random.Random(seed)
    events, step = [], 12
    for i in range(count):
        step += max(1, round(generator.expovariate(1 / 9) * (1.6 - i / count)))
        found = []
        unit: dict[str, Any] = {}
        for k in range(generator.choice([1, 1, 1, 1, 2, 2, 3, 5])):
            tokens = pieces(answer([generator.randrange(10, 99) for _ in range(generator.randrange(3, 7))], generator))
            likely = [j for j, token in enumerate(tokens) if token.strip() in ("=", "boxed", "{", "So", "+", "**")]
            position = generator.choice(likely if generator.random() < 0.7 else range(len(tokens)))
            alone = k == 0 or generator.random() < 0.3
            if alone:
                unit = {"rank": generator.randrange(4), "micro_batch": generator.randrange(6)}
            # Alone in its unit, a token must be sqrt(n) times over its threshold to lift the unit over its own.
            factor = math.sqrt(TOKENS) if alone else 1
            norm = THRESHOLD * factor * (1.05 + generator.expovariate(1.2) ** 2 * (1 + 3 * i / count))
            kind = generator.choices(["token", "layer", "sequence", "unlikely", "nan"], [45, 30, 12, 10, 1])[0]
            changes: dict[str, Any] = {**unit, "row": 4 * unit["micro_batch"] + generator.randrange(4)}
            if kind == "token":
                log_prob = -generator.uniform(2, 6)
                changes |= {"log_prob": log_prob, "rollout_log_prob": log_prob - generator.uniform(0.8, 3.5)}
            elif kind == "layer":
                changes |= {"share_of_layer": generator.uniform(0.55, 0.95)}
            elif kind == "sequence":
                changes |= {"sequence_ratio": generator.uniform(1.25, 1.7)}
            elif kind == "unlikely":
                changes |= {"log_prob": -generator.uniform(4, 9)}
            elif kind == "nan":
                norm = math.nan
            found.append(culprit(position, tokens, norm, generator, **changes))
        changes = {}
        if generator.random() < 0.04:
            token_set = {"rank": 1, "micro_batch": 2, "tokens": 224, "threshold": 10.6}
            changes = {"complete": False, "passes": 128, "open_segments": [token_set]}
            changes |= {"until": "exhaustive", "explained": None}
        events.append(event(step, found, generator, **changes))
    return events


def drill(step: int, found: bool, random: random.Random, **changes: Any) -> dict[str, Any]:
    """The event of a drill."""
    tokens = ["a", " b", " c"]
    place = {"rank": 0, "row": 0, "position": 1}
    made = event(step, [culprit(1, tokens, 5 * THRESHOLD, random)] if found else [], random, passes=1, mini_batch=0)
    planted = {"planted": place, "found": found, "passes": 1}
    made |= {"seconds": 4.0, "drill": planted, "verdict": None, **changes}
    return {**made, "summary": describe(made)}


def clipped_token(position: int, tokens: list[str], multiple: float, **changes: Any) -> dict[str, Any]:
    """A token over one of TokenClip's bounds."""
    found = {"rank": 0, "micro_batch": 0, "row": 0, "position": position, "boundary": "log_probs", "multiple": multiple}
    found |= {"cut": True, "token_id": None, "weight": None, "advantage": None, "log_prob": None}
    found |= {"old_log_prob": None, "rollout_log_prob": None, "reward": 1.0, "data_source": "math_verify", "uid": "u1"}
    if position >= 0:
        context = f"{''.join(tokens[:position])}«{tokens[position]}»{''.join(tokens[position + 1 :])}"
        found |= {"token_id": 7, "weight": 1 / TOKENS, "advantage": -1.0, "log_prob": -3.0, "old_log_prob": -3.0}
        found |= {"token": tokens[position], "context": context}
    return {**found, **changes}


def clip(step: int | None, tokens: list[dict[str, Any]], action: str = "drop", **changes: Any) -> dict[str, Any]:
    """A clip line of tokens that are each over one bound; each is cut unless the action is log.

    `refused` and `mini_batch` are among the changes; others are of the whole line.
    """
    boundaries = dict.fromkeys(["embed_tokens", "layers.0", *(token["boundary"] for token in tokens), "log_probs"])
    tokens = sorted(tokens, key=lambda token: -token["multiple"] if math.isfinite(token["multiple"]) else -math.inf)
    tokens = [{**token, "cut": token["cut"] and action != "log"} for token in tokens]
    over = {name: sum(token["boundary"] == name for token in tokens) for name in boundaries}
    cut = {name: sum(token["boundary"] == name and token["cut"] for token in tokens) for name in boundaries}
    figures = {"action": action, "factor": 4.0, "over": over, "cut": cut, "refused": changes.pop("refused", [])}
    figures |= {"largest": dict.fromkeys(boundaries, 9.0), "usual": dict.fromkeys(boundaries, 1.5)}
    where = {"global_step": step, "epoch": 0, "mini_batch": changes.pop("mini_batch", 0)}
    return {**clip_line(where, {**figures, "tokens": tokens}), **changes}


def step_figures(events: list[dict[str, Any]], last: int, seed: int = 1) -> dict[int, dict[str, float | None]]:
    """The figures of every step of a run with these spikes."""
    generator = random.Random(seed)
    spikes: dict[int, float] = {}
    for found in events:
        factor = found["trigger"]["norm"] / found["trigger"]["threshold"]
        spikes[found["global_step"]] = max(factor, spikes.get(found["global_step"], 0.0))
    steps: dict[int, dict[str, float | None]] = {}
    for step in range(1, last + 1):
        noise = [math.exp(generator.gauss(0, 0.25)) for _ in range(4)]
        norm = THRESHOLD * spikes.get(step, 0.25 * noise[0])
        steps[step] = {
            "threshold": THRESHOLD,
            "token_norm_max": norm,
            "spike_margin": norm / THRESHOLD,
            "ratio_max": math.exp(0.2 * noise[1] * (2 if step in spikes else 1)),
            "rollout_ratio_max": math.exp(0.3 * noise[2]),
            "unlikely_share": 0.004 * noise[3],
            "triggered": sum(found["global_step"] == step for found in events),
        }
    return steps


def replay_result(step: int, **changes: Any) -> dict[str, Any]:
    """A result as a replay writes it beside its bundle."""
    unit = {"rank": 1, "micro_batch": 0, "rows": 2, "norm": 3321.0, "threshold": 358.5, "replayed": 3320.9}
    token = {
        "rank": 1,
        "micro_batch": 0,
        "row": 3,
        "position": 6,
        "token_id": 15,
        "culprit": True,
        "source": "advantage",
    }
    figures = {"grad_norm": 1.9e5, "replayed": 1.9e5, "others": [1.8e5], "log_prob": -4.7, "replayed_log_prob": -4.7}
    return {
        "format": 1,
        "kind": "gradloc replay result",
        "time": "2026-11-22T12:00:00+00:00",
        "bundle": f"step{step}-epoch0-mini_batch0",
        "global_step": step,
        "epoch": 0,
        "mini_batch": 0,
        "model": "/models/small",
        "device": "cpu",
        "variant": "bfloat16, sdpa",
        "variants": ["float32, sdpa"],
        "recorded": "bfloat16, flash_attention_2",
        "notes": [],
        "sentences": ["The spike comes back: rank 1, micro-batch 0.", "layers.0 carries 61% of the squared norm."],
        "log_probs": {"tokens": 14, "nonfinite": 0, "mean": 1e-7, "max": 1e-6},
        "units": [{**unit, "others": ["NaN"], "rest": 3.0}],
        "tokens": [{**token, **figures, "layer": "layers.0", "layer_norm": 1.5e5, "replayed_layer_norm": 1.5e5}],
        "layers": [{"layer": "layers.0", "norm": 2586.0, "replayed": 2586.1, "others": [2500.0]}],
        "remedies": [{"name": "spike_action=drop", "norm": 3.0, "meaning": "the step without the culprits"}],
        **changes,
    }


def write_replay(directory: Path, result: dict[str, Any]) -> None:
    """Writes it where the report looks for it."""
    (directory / "replay").mkdir(parents=True, exist_ok=True)
    (directory / "replay" / f"{result['bundle']}.result.json").write_text(json.dumps(result))


def write_steps(directory: Path, last: int, warnings: dict[int, list[dict[str, str]]]) -> None:
    """The figures of the steps up to `last`, with warnings by step."""
    for step, figures in step_figures([], last).items():
        record_step(str(directory), step, figures)
    file = directory / "steps.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["warnings"] = warnings.get(line["global_step"], [])
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def write_run(directory: str, count: int) -> None:
    """Evidence of a whole run: spikes, a drill in step 2, and a line for each step."""
    events = samples(count)
    for entry in [drill(2, True, random.Random(1)), *events]:
        record_events(directory, [entry])
    for step, figures in step_figures(events, events[-1]["global_step"] + 8).items():
        record_step(directory, step, figures)


if __name__ == "__main__":
    write_run(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 40)
