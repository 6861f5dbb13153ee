"""Builds evidence as a run of a small model on sums leaves it: for the tests of the report and of the trackers."""

import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradloc import record_events
from gradloc.evidence.writer import now, record_step
from gradloc.judge import judged
from gradloc.judge.identities import BY_NAME
from gradloc.judge.verdict import verdict
from gradloc.lines import SCHEMA
from gradloc.sources import HOLDS, classify
from gradloc.version import __version__

Event = dict[str, Any]

LAYERS = ["embed_tokens", *(f"layers.{i}" for i in range(30)), "norm"]
THRESHOLD = 640.0
# In a unit; a mini-batch has 24 of them.
TOKENS = 160
WEIGHT = 1 / (TOKENS * 24)
# The threshold of a unit is this times τ.
ROOT = math.sqrt(TOKENS) * WEIGHT
# How often the rules hold for ordinary tokens; of layers, that is not known.
ORDINARY = {name: None if name == "layer" else 0.02 for name in HOLDS}
COMPARISON = {"ordinary": ORDINARY}
MEDIANS = {"median_advantage": 1.3, "median_weight": WEIGHT}
# Texts that might take control of a page, or of a terminal.
HOSTILE = "<b>x</b></script><script>document.title='owned'</script><img src=x onerror=alert(1)>\u202e"
HOSTILE_TO_TERMINALS = "\x1b[2J[bold]\u202e"
# A word for each text of a sample, put together here: a tracker that keeps a program's source has none from there.
WORDS = {
    name: "Sample" + name.title().replace("_", "") + "Text"
    for name in ("prompt", "response", "response_tokens", "context", "ground_truth", "data_source", "uid", "extra_info")
}


def culprit(position: int, tokens: Sequence[str], norm: float = 9000.0, **changes: Any) -> Event:
    """A culprit for which no rule holds unless it is changed; its other figures follow.

    `share_of_layer` of its squared norm is in one layer.
    """
    figures = {"log_prob": -1.0, "advantage": 1.0, "sequence_ratio": 1.0, "misaligned_share": 0.0} | changes
    log_prob, advantage = figures["log_prob"], figures["advantage"]
    old_log_prob = figures.get("old_log_prob", log_prob)
    # A sequence's ratio is one to the rollout, and the loss has it.
    apart = math.log(min(figures.get("sequence_ratio", 1.0), 1.9))
    rollout_log_prob = figures.get("rollout_log_prob", old_log_prob - apart)
    ratio = math.exp(log_prob - old_log_prob)
    share_of_layer = figures.pop("share_of_layer", 0.05)
    relative = dict.fromkeys(LAYERS, math.sqrt((1 - share_of_layer) / (len(LAYERS) - 1)))
    relative["layers.14"] = math.sqrt(share_of_layer)
    heat = [float(f"{WEIGHT * abs(advantage) * (7 * i % 10 / 10) ** 4:.4g}") for i in range(len(tokens))]
    heat[position] = float(f"{WEIGHT * abs(advantage) * ratio * (1 - math.exp(log_prob)):.4g}")
    found: Event = dict.fromkeys(("rank", "micro_batch", "row"), 0)
    found |= dict.fromkeys(("kl_coefficient", "ref_log_prob", "turn", "mismatch_start", "mismatch_turn", "shift"))
    found |= {"after_eos": False, "misplaced": False, "position": position, "threshold": THRESHOLD, "share": 0.9}
    found |= {"grad_norm": norm, "layer_norms": {name: norm * value for name, value in relative.items()}}
    found |= {"suspicion": heat[position], "response_suspicion": heat, "response_kl": None, "response_length": 40}
    coefficient = -WEIGHT * advantage * ratio * math.exp(apart)
    found |= {"weight": WEIGHT, "coefficient": coefficient, "entropy_coefficient": 0.0, "entropy": 1.5}
    found |= {"old_log_prob": old_log_prob, "rollout_log_prob": rollout_log_prob, "ratio": ratio}
    found |= {"rollout_ratio": math.exp(log_prob - rollout_log_prob), "token": tokens[position]}
    before, after = "".join(tokens[max(position - 16, 0) : position]), "".join(tokens[position + 1 : position + 17])
    found |= {
        "token_id": sum(map(ord, tokens[position])) * 7 % 49152,
        "context": f"{before}«{tokens[position]}»{after}",
    }
    found["prompt"] = "<|im_start|>user\nState the final answer to the following arithmetic problem.<|im_end|>\n"
    found |= {"response": "".join(tokens), "response_tokens": [*tokens], "response_tokens_start": 0}
    found |= {
        "ground_truth": "188",
        "reward": 1.0 if advantage > 0 else 0.0,
        "data_source": "math_verify",
        "uid": "5f3c",
    }
    found |= figures
    sources = classify(found, MEDIANS)
    return {"source": sources[0], "sources": sources, **found}


def event(step: int | None, culprits: Sequence[Event], **changes: Any) -> Event:
    """An event with the units that the culprits are in; without these, what is left of the units is ordinary."""
    changes = {"explained": bool(culprits), "more_tokens": 20} | changes
    culprits = sorted(culprits, key=lambda c: -c["grad_norm"] if math.isfinite(c["grad_norm"]) else -math.inf)
    units = []
    for place in sorted({(c["rank"], c["micro_batch"]) for c in culprits}):
        mine = [c for c in culprits if (c["rank"], c["micro_batch"]) == place]
        units.append(_unit(*place, mine, changes["explained"]))
        for c in mine:
            c["share"] = c["weight"] * c["grad_norm"] / units[-1]["norm"]
    norm = units[0]["norm"] if units else 30.0
    if not all(math.isfinite(c["grad_norm"]) for c in culprits):
        norm = math.nan
    found: Event = {"schema": SCHEMA, "gradloc_version": __version__, "time": "2026-03-01T00:00:00+00:00"}
    found |= dict.fromkeys(("drill", "replay", "without_tokens", "broken_parameters", "steps_since_resume"))
    found |= {"global_step": step, "epoch": 0, "mini_batch": 0, "world_size": 4, "loss_scale": 1.0, "error": None}
    found |= {"trigger": {"kind": "unit", "norm": norm, "threshold": THRESHOLD * ROOT}, "threshold": THRESHOLD}
    found |= {"global_norm": norm / 4 if math.isfinite(norm) else norm, "layer_clip": None}
    found |= {"global_threshold": THRESHOLD * ROOT * math.sqrt(24) / 4, "action": "log", "applied": True}
    found |= {"ordinary_layer_norms": dict.fromkeys(LAYERS, 6.0), "diagnosis": "tokens", "until": "explained"}
    found |= {"micro_batches": max(len(units), 24), "units": units, "culprits": culprits, "search": "local"}
    found |= {name: [] for name in ("suspected", "diffuse", "open_segments")}
    found |= {"passes": 3, "budget": 128, "seconds": 2.5, "budget_seconds": 300.0, "out_of_time": False}
    found |= {"complete": True, **MEDIANS, **changes}
    return {**judged({"comparison": COMPARISON, "identities": {}, "warnings": [], **found}), **changes}


def verdict_on(event: Event, ordinary: Event, warnings: Sequence[Event] = ()) -> Any:
    """The verdict on an event that is compared with these shares."""
    found: Any = {**event, "comparison": {"ordinary": ordinary}, "warnings": [*warnings]}
    return verdict(found)


def _unit(rank: int, micro_batch: int, culprits: Sequence[Event], explained: bool) -> Event:
    """A unit of ordinary tokens and some culprits."""
    squares = {name: sum((c["weight"] * c["layer_norms"].get(name, 0.0)) ** 2 for c in culprits) for name in LAYERS}
    layer_norms = {name: math.sqrt((6 * ROOT) ** 2 + square) for name, square in squares.items()}
    norm, left = math.hypot(*layer_norms.values()), TOKENS - len(culprits)
    rest = {"tokens": left, "norm": 6 * ROOT * math.sqrt(len(LAYERS))}
    rest |= {"threshold": THRESHOLD * ROOT * math.sqrt(left / TOKENS)}
    return _bare_unit(rank, micro_batch, norm) | {"layer_norms": layer_norms, "rest": rest if explained else None}


def _bare_unit(rank: int, micro_batch: int, norm: float) -> Event:
    unit = {"rank": rank, "micro_batch": micro_batch, "rows": 4, "tokens": TOKENS, "broken_tokens": 0, "norm": norm}
    unit |= {"threshold": THRESHOLD * ROOT, "token_equivalent": norm / ROOT, "rest": None}
    return unit | {"layer_norms": dict.fromkeys(LAYERS, norm)}


def spike(
    step: int | None = 3, norm: float = 9000.0, tokens: Sequence[str] = ("a", " b", " c"), **changes: Any
) -> Event:
    """An event whose one culprit is the second of the tokens, with these changes."""
    return event(step, [culprit(1, tokens, norm, **changes)])


def without_culprits(step: int, diagnosis: str, **changes: Any) -> Event:
    """An event of which no token is the culprit."""
    norm = {"nonfinite": math.nan, "overflow": math.inf}.get(diagnosis, 4 * THRESHOLD * ROOT)
    found: Event = {"complete": diagnosis == "tokens", "more_tokens": None, "diagnosis": diagnosis}
    found |= {"units": [_bare_unit(1, 2, norm)], "global_norm": norm}
    if diagnosis == "diffuse":
        tokens = [{"row": 9, "position": 3 * i, "grad_norm": 600.0 - i, "share": 0.01 * (i + 2)} for i in range(3)]
        part = {"rank": 1, "micro_batch": 2, "rows": [8, 9, 11], "tokens": 48, "norm": norm / 2}
        part |= {"threshold": THRESHOLD * ROOT * math.sqrt(48 / TOKENS), "largest_tokens": tokens}
        found["diffuse"] = [part, {**part, "rank": None, "norm": norm / 3, "largest_tokens": []}]
    if diagnosis == "incomplete":
        token_set = {"rank": 1, "micro_batch": 2, "tokens": 224, "threshold": 10.6}
        found |= {"passes": 128, "open_segments": [token_set]}
    found["trigger"] = {"kind": "unit", "norm": norm, "threshold": THRESHOLD * ROOT}
    return event(step, [], **found | changes)


def unsearched(step: int, tokens: Sequence[Event], **changes: Any) -> Event:
    """An event that was converted, and not searched; the culprits given become its suspected tokens."""
    norm, measured = 4 * THRESHOLD * ROOT, ("grad_norm", "threshold", "share", "layer_norms")
    found: Event = {"suspected": [{name: of[name] for name in of if name not in measured} for of in tokens]}
    found |= {"suspected_ranks": [0], "replay": f"replay/step{step}-epoch0-mini_batch0"}
    found |= {"diagnosis": "unsearched", "search": "converted", "units": [], "passes": 0, "complete": False}
    found |= {"explained": False, "more_tokens": None, "ordinary_layer_norms": None, "global_norm": norm}
    found["trigger"] = {"kind": "global", "norm": norm, "threshold": THRESHOLD * ROOT}
    return event(step, [], **found | changes)


def drill(step: int, found: bool, **changes: Any) -> Event:
    """The event of a drill."""
    made = event(step, [culprit(1, ["a", " b", " c"], 5 * THRESHOLD)] if found else [], passes=1, seconds=4.0)
    planted = {"planted": {"rank": 0, "row": 0, "position": 1}, "found": found, "passes": 1}
    return judged({**made, "drill": planted, **changes})


def clipped_token(position: int, tokens: Sequence[str], multiple: float, **changes: Any) -> Event:
    """A token over one of TokenClip's bounds."""
    found: Event = dict.fromkeys(("token_id", "weight", "advantage", "log_prob", "old_log_prob", "rollout_log_prob"))
    found |= {
        "rank": 0,
        "micro_batch": 0,
        "row": 0,
        "position": position,
        "boundary": "log_probs",
        "multiple": multiple,
    }
    found |= {"cut": True, "reward": 1.0, "data_source": "math_verify", "uid": "u1"}
    if position >= 0:
        context = f"{''.join(tokens[:position])}«{tokens[position]}»{''.join(tokens[position + 1 :])}"
        found |= {"token_id": 7, "weight": 1 / TOKENS, "advantage": -1.0, "log_prob": -3.0, "old_log_prob": -3.0}
        found |= {"token": tokens[position], "context": context}
    return {**found, **changes}


def clip(step: int | None, tokens: Sequence[Event], action: str = "drop", **changes: Any) -> Event:
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
    line = {"schema": SCHEMA, "time": now(), **where, "token_clip": {**figures, "tokens": tokens}}
    return {**judged(line), **changes}


def marked(line: Event) -> Event:
    """An event or clip line of which every text has a word of its own; of the old ones, its tokens alone are left.

    `extra_info` is a field that evidence does not have.
    """
    texts: Event = {name: f"The {word} of a sample" for name, word in WORDS.items()}
    if "token_clip" in line:
        texts = {name: texts[name] for name in ("context", "data_source", "uid", "extra_info")}
        tokens = [token | texts for token in line["token_clip"]["tokens"]]
        return {**line, "token_clip": {**line["token_clip"], "tokens": tokens}}
    texts["ground_truth"] = {"answer": [WORDS["ground_truth"]]}
    culprits = []
    for found in line["culprits"]:
        words = [f" {WORDS['response_tokens']}"] * len(found["response_tokens"])
        words[found["position"]] = found["token"]
        culprits.append({**found, **texts, "response_tokens": words})
    return {**line, "extra_info": WORDS["extra_info"], "culprits": culprits}


KINDS: list[Event] = [{"log_prob": -6.0, "rollout_log_prob": -8.5}, {"share_of_layer": 0.8}, {"sequence_ratio": 1.5}]
KINDS += [{"log_prob": -7.0}, {}]


def samples(count: int) -> list[Event]:
    """Events of a run: of up to three culprits each, of which one has no finite norm; a few searches ended early."""
    generator = random.Random(1)
    events, step = [], 12
    for i in range(count):
        step += generator.randrange(1, 12)
        found: list[Event] = []
        for j in range(generator.choice([1, 1, 1, 2, 3])):
            a, b = generator.randrange(10, 99), generator.randrange(10, 99)
            text = f"Let's add them.\n\n{a} + {b} = {a + b}\n\nThe answer is \\boxed{{{a + b}}}."
            tokens = re.findall(r" ?[A-Za-z]+|\d| ?[^A-Za-z\d\s]|\s+", text)
            # Alone in its unit, a token must be sqrt(n) times over its threshold to lift the unit over its own.
            norm = THRESHOLD * math.sqrt(TOKENS) * (1.05 + generator.expovariate(1.0))
            place = {"rank": generator.randrange(4), "micro_batch": j, "row": 4 * j}
            position = generator.randrange(1, len(tokens))
            changes = generator.choice(KINDS) | place | {"advantage": generator.choice([-1.0, 1.0])}
            found.append(culprit(position, tokens, math.nan if (i, j) == (7, 0) else norm, **changes))
        ended: Event = {"complete": False, "until": "exhaustive", "explained": None} if i % 25 == 20 else {}
        events.append(event(step, found, mini_batch=generator.randrange(4), passes=generator.randrange(2, 14), **ended))
    return events


def write_steps(
    directory: Path, last: int, warnings: dict[int, list[Event]] | None = None, events: Sequence[Event] = ()
) -> dict[int, dict[str, float | None]]:
    """Writes the figures of the steps up to `last` of a run with these spikes, with warnings by step; returns them."""
    generator = random.Random(1)
    spikes: dict[int, float] = {}
    for found in events:
        step, factor = found["global_step"], found["trigger"]["norm"] / found["trigger"]["threshold"]
        spikes[step] = max(factor, spikes.get(step, 0.0))
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
        record_step(str(directory), step, steps[step], answer((warnings or {}).get(step, ())))
    return steps


def answer(warnings: Sequence[Event] = (), changes: Sequence[Event] = ()) -> Any:
    """What the judge says of an update with these warnings: all identities but theirs hold."""
    identities = {name: {"state": "held", "times": 0.5, "since": None, "missing": None} for name in BY_NAME}
    broken = [each for each in warnings if "identity" in each]  # older lines lack it
    identities |= {
        each["identity"]: {"state": "broken", "times": each["times"], "since": each["since"], "missing": None}
        for each in broken
    }
    return {"identities": identities, "warnings": [*warnings], "changes": [*changes], "news": []}


def warning(name: str, identity: str | None = None, since: int | None = 3, **changes: Any) -> Event:
    """A warning as the judge gives it, of an identity that by default has its name."""
    said = {"sentence": f"The run has {name}.", "claim": f"The run has {name}", "evidence": "", "check": "Look."}
    return {"name": name, "identity": identity or name, "since": since, "times": 80.0, **said, **changes}


def write(directory: Path, events: Sequence[Event]) -> Path:
    """Writes events, each as if it were the first of its step."""
    for each in events:
        record_events(str(directory), [each])
    return directory


def replay_result(step: int | None, **changes: Any) -> Event:
    """A result as a replay writes it beside its bundle."""
    unit = {"rank": 1, "micro_batch": 0, "rows": 2, "norm": 3321.0, "threshold": 358.5, "replayed": 3320.9}
    token = {"rank": 1, "micro_batch": 0, "row": 3, "position": 6, "token_id": 15, "culprit": True}
    token |= {"source": "advantage", "layer": "layers.0", "layer_norm": 1.5e5, "replayed_layer_norm": 1.5e5}
    token |= {"grad_norm": 1.9e5, "replayed": 1.9e5, "others": [1.8e5], "log_prob": -4.7, "replayed_log_prob": -4.7}
    remedy: Event = {"name": "spike_action=drop", "override": "actor_rollout_ref.actor.spike_action=drop", "note": None}
    remedy |= {
        "norm": 3.0,
        "left": 0.0009,
        "under": True,
        "ordinary_moved": 0.0,
        "masked": {"tokens": 1, "culprits": 1},
    }
    remedy |= {"meaning": "the step without the culprits"}
    found: Event = {"format": 1, "kind": "gradloc replay result", "time": "2026-11-22T12:00:00+00:00"}
    found |= {"bundle": f"step{step}-epoch0-mini_batch0", "global_step": step, "epoch": 0, "mini_batch": 0}
    found |= {"model": "/models/small", "device": "cpu", "variant": "bfloat16, sdpa", "variants": ["float32, sdpa"]}
    found |= {"recorded": "bfloat16, flash_attention_2", "notes": [], "remedies": [remedy]}
    sentences = ["The spike comes back: rank 1, micro-batch 0.", "layers.0 carries 61% of the squared norm."]
    found |= {"sentences": sentences, "log_probs": {"tokens": 14, "nonfinite": 0, "mean": 1e-7, "max": 1e-6}}
    found |= {"units": [{**unit, "others": ["NaN"], "rest": 3.0}], "tokens": [token]}
    found |= {"layers": [{"layer": "layers.0", "norm": 2586.0, "replayed": 2586.1, "others": [2500.0]}]}
    return {**found, **changes}


def write_replay(directory: Path, result: Event) -> None:
    """Writes it where the report looks for it."""
    (directory / "replay").mkdir(parents=True, exist_ok=True)
    (directory / "replay" / f"{result['bundle']}.result.json").write_text(json.dumps(result))
