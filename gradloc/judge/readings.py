# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The readings of an update: numbers by name, made of the sums of its tokens, its layers and its rows.

The names are those of the residuals in identities.py, and of what the closed forms are told by. What is not known is
missing.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..facts import PAIRS, SHIFTS, TrainedRow
from ..levels import EXPLAINS, FACTOR, LEAST_NATS, LEVEL, MOST, MOVE, SAME, SHARE
from .records import Readings

# What readings of a column begin with, and its name among the tokens.
COLUMNS = {
    "advantages": "advantage",
    "rollout": "rollout_log_prob",
    "old": "old_log_prob",
    "reference": "ref_log_prob",
    "policy": "log_prob",
}
# A response is repeated if the policy would have sampled it again with this log-prob, or less.
_LEAST_CHANCE = -30.0


@dataclass(frozen=True)
class Layers:
    """What is known of the layers in the update's first mini-batch; dicts by layer.

    Args:
        weights (dict): The norm of the weights, their number, and how many elements of a small tensor have moved in the
            last optimizer step (NaN if that is not known).
        reduced (dict): The norm of the gradient that the optimizer gets.
        passes (dict): At most so much, by the norms of the passes' own gradients.
        last_pass (dict): The norm of the last pass alone, if the data are one rank's and others have a gradient.
        moved (Sequence, optional): Of small tensors over the last update, Σ Δ², Σ g² and Σ Δ·g, of its first gradient;
            and how many of their elements have changed since its end. NaN where that is not known.
        reduced_sums (dict, optional): The sum of the elements of a small tensor's gradient, and that of their squares,
            of the gradient that the optimizer gets. NaN where that is not known.
        sums_of_passes (dict, optional): The sum of the elements, of the passes' in sum.
    """

    weights: Mapping[str, tuple[float, int, float]]
    reduced: Mapping[str, float]
    passes: Mapping[str, float]
    last_pass: Mapping[str, float] | None = None
    moved: Sequence[float] | None = None
    reduced_sums: Mapping[str, tuple[float, float]] | None = None
    sums_of_passes: Mapping[str, float] | None = None


def of_tokens(sums: Mapping[str, float]) -> Readings:
    """What an update's sums say: those that gradloc/facts.py names, of all ranks and mini-batches."""
    found = {f"{name}.broken": sums[f"broken {column}"] for name, column in COLUMNS.items()}
    for pair in PAIRS:
        if (of := _part(sums, pair))["tokens"] > 0:
            found |= {f"{pair}.{name}": value for name, value in _of_pair(of).items()}
    found |= _sampled(_part(sums, "sampled")) | _loss(sums, _part(sums, "loss"))
    if "rollout.zero" in found:
        found["sampled.zero"] = found["rollout.zero"]
    if sums["gained_size"]:
        found["weights.gained"] = 1 - sums["gained"] / sums["gained_size"]
    found["bypass"] = float(sums["bypass"] == sums["mini_batches"] > 0)
    if sums["responses"]:
        found["length"] = sums["sampled trained"] / sums["responses"]
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _part(sums: Mapping[str, float], of: str) -> Mapping[str, float]:
    """Those whose names begin so, by the rest of them."""
    return {name.removeprefix(f"{of} "): value for name, value in sums.items() if name.startswith(f"{of} ")}


def _of_pair(of: Mapping[str, float]) -> Readings:
    """How a[t] and b[t] of the same tokens go together: r = a + slope·p[t + k] + way·(p − reference)[t] + rest."""
    n, rows, told = of["tokens"], max(of["rows"], 1.0), max(of["told"], 1.0)
    gap = of["size"] / n
    found = {
        "gap": gap,
        "distance": of["distance"] / n,
        "far": of["far"] / rows,
        "near_gap": (of["size"] - of["far_size"]) / max(n - of["far_tokens"], 1.0),
        "far_gap": of["far_size"] / max(of["far_tokens"], 1.0),
        "repeated": of["repeated"] / n,
        "zero": of["zero"] / (n + of["zero"]),
        "moved": max(of[f"moved {k}"] for k in SHIFTS) / told,
        "later": of["size*place"] / max(of["size"], 1e-12),
        "same": of["same"] / max(of["unsure"], 1.0),
        "correlation": of["ab"] / math.sqrt(of["aa"] * of["bb"]) if of["aa"] * of["bb"] > 0 else math.nan,
        "differing": (of["over"] + of["under"]) / n,
        "larger": float(of["over"] > of["under"]),
    }
    found["shift"], found["shift_by"] = _shift(of, n)
    if gap > SAME / 2:  # columns that hardly differ say nothing
        found["unrelated"] = of["unrelated"] / told
        found["one_sided"] = (max(of["over"], of["under"]) + 1) / (min(of["over"], of["under"]) + 1)
    if gap > LEAST_NATS:
        found |= _slope(of, n) | _way(of, n)
        # 1 where errors are uniform, as of rounding, and 0 where they are normal; those of engines have longer tails.
        found["rounded"] = (gap * gap * n / of["d*d"] - 2 / math.pi) / (3 / 4 - 2 / math.pi)
    return found


def _shift(of: Mapping[str, float], n: float) -> tuple[float, float]:
    """What b[t + k] says of a[t] beside b[t], for the best k: a coefficient in deviations; 0 if it may be chance."""
    best, at = 0.0, 0
    if of["aa"] > 0 and of["bb"] > 0:
        norm = math.sqrt(of["aa"] * of["bb"])
        for k in SHIFTS:
            own = of[f"b {k}"] / of["bb"]
            beta = ((of[f"d {k}"] + of[f"b {k}"]) / norm - of["ab"] / norm * own) / max(1 - own * own, 1e-6)
            if beta > best and beta * math.sqrt(n) > LEVEL:
                best, at = beta, k
    return best, float(at)


def _slope(of: Mapping[str, float], n: float) -> Readings:
    """The slope of a over b, both with errors, and what it explains of d², over what it leaves."""
    dd, bb, db = (
        of[name] - of[x] * of[y] / n for name, x, y in (("d*d", "d", "d"), ("b*b", "b", "b"), ("d*b", "d", "b"))
    )
    level, product = bb + db + dd / 4, db + dd / 2  # of (a + b)/2, and of it with d
    if bb <= 0 or level <= 0 or dd <= 0:
        return {}
    explained = min(product * product / level / of["d*d"], 1 - 1e-9)
    return {"slope": explained / (1 - explained), "slope_is": 1 + db / bb}


def _way(of: Mapping[str, float], n: float) -> Readings:
    """By which part of the policy's way from the reference a lacks or exceeds it, and what that explains of d²."""
    gg, dd = of["g*g"], of["d*d"]
    if gg <= 0 or dd <= 0:
        return {}
    way, explains = of["d*g"] / gg, of["d*g"] ** 2 / gg / dd
    return {
        "ahead": way if explains > EXPLAINS and way > 0 else 0.0,  # which no rollout that is late can be
        "copied": float(of["distance"] == 0),
        "way": way,
        "way_explains": explains,
        "nearer": of["nearer"] / max(of["rows"], 1.0),
    }


def _sampled(of: Mapping[str, float]) -> Readings:
    found = {"sampled.unlogged": of["unlogged"], "sampled.after_end": of["after_end"], "sampled.trained": of["trained"]}
    if of["logged"]:
        untrained = 1 - of["both"] / of["logged"]
        last = of["last_lost"] / max(of["trained_rows"], 1.0)
        # More than tokens are left out at random, as by a correction that rejects them.
        found |= {"sampled.last_lost": max(last - LEVEL * untrained, 0.0) if untrained < 1 / LEVEL else 0.0}
        found |= {"sampled.inverted": (1 - of["both"] / max(of["trained"], 1.0)) * untrained}
    return found


def _loss(sums: Mapping[str, float], of: Mapping[str, float]) -> Readings:
    """Coefficients c against e, what they should be, beside the KL loss's part k."""
    found: Readings = {}
    if sums["promised"]:
        found["loss.weights"] = sums["weights"] / sums["promised"]
        # Whether a mean counts responses, or micro-batches, without a token is the trainer's choice.
        least = sums["filled"] / sums["promised"]
        found["loss.weights_off"] = max(found["loss.weights"] - 1, 1 - found["loss.weights"] / least, 0.0)
    if sums["entropy_size"] > 0:
        found["loss.entropy"] = sums["entropy_along"] / sums["entropy_size"]
        found["loss.entropy_off"] = abs(found["loss.entropy"] - 1)
    if of["clipped"]:
        found["loss.clipped_wrong"] = 1 - of["clipped_right"] / of["clipped"]
    if of["corrected"]:
        found["loss.against"] = 1 - of["along"] / of["corrected"]
    if not of["told"] or not 0 < of["ee"] < math.inf or not math.isfinite(of["cc"]):
        return found
    rest, along = of["cc"] - 2 * of["ck"] + of["kk"], of["ce"] - of["ek"]
    found |= {
        "loss.unfit": of["unfit"] / of["told"],
        "loss.opposite": of["opposite"] / of["told"],
        "loss.factor": along / of["ee"],
        "loss.factor_off": abs(along / of["ee"] - 1),
        "loss.explained": along * along / (rest * of["ee"]) if rest > 0 else 0.0,
    }
    if of["kk"] > 0:
        beside, with_kl = of["cc"] - 2 * of["ce"] + of["ee"], of["ck"] - of["ek"]
        explains = with_kl**2 / (of["kk"] * beside) if beside > 0 else 0.0
        found["loss.kl"] = with_kl / of["kk"]
        # A multiple is all that there is beside the policy loss's part, or nothing is.
        found["loss.kl_fits"] = float(explains > 1 - FACTOR or beside < FACTOR**2 * of["kk"])
        found["loss.kl_off"] = abs(found["loss.kl"] - 1) * found["loss.kl_fits"]
    if of["corrected"] and of["zz"] > 0:
        without = of["cz"] - of["kz"]
        found["loss.without"] = without / of["zz"]
        found["loss.without_explained"] = without**2 / (rest * of["zz"]) if rest > 0 else 0.0
    return found


def of_layers(now: Layers, before: Layers | None, rate: float) -> Readings:
    """What the layers say; `rate` is the sum of the learning rates since `before`, those of the update before."""
    found: Readings = {}
    reduced, passes = now.reduced, now.passes
    pairs = [(reduced[layer], passes[layer]) for layer in passes if layer in reduced]
    if pairs and all(math.isfinite(a + b) for a, b in pairs):
        whole, most = math.hypot(*(a for a, _ in pairs)), math.hypot(*(b for _, b in pairs))
        found["gradient.is_zero"] = float(most == 0)
        if most > 0:
            # Only layers that have a part of the gradient: rounding makes factors out of nothing.
            parts = [a / b if b else math.inf for a, b in pairs if a > FACTOR * FACTOR * whole]
            found["gradient.factor"] = max(parts, default=0.0)
            found["gradient.above"] = max(found["gradient.factor"] - 1, 0.0)
            found["gradient.zero"] = float(_dead(_live(now)))
        if now.last_pass is not None and whole > 0:
            apart = max(abs(reduced[layer] - norm) for layer, norm in now.last_pass.items() if layer in reduced)
            found["gradient.last_pass"] = SHARE * whole / max(apart, 1e-9 * whole)
    found |= _against_passes(now.reduced_sums or {}, now.sums_of_passes or {})
    if now.moved is not None and not math.isnan(now.moved[3]):
        found["weights.between"] = now.moved[3]
    moved, gradient, along = (math.nan,) * 3 if now.moved is None else now.moved[:3]
    if math.isfinite(moved + gradient + along) and moved * gradient > 0:
        cosine = along / math.sqrt(moved * gradient)
        found["weights.uphill"] = (1 + cosine) / max(1 - cosine, 1e-6)
    if before is not None and rate > 0:
        found |= _moves(now, before, rate)
    return found


def _against_passes(reduced: Mapping[str, tuple[float, float]], passes: Mapping[str, float]) -> Readings:
    """How far sums over the optimizer's gradient are from those over the passes', and which multiple they are."""
    known = [(*reduced[layer], passes[layer]) for layer in passes if layer in reduced]
    # Those of a head's bias add up to rounding errors.
    pairs = [(a, b) for a, square, b in known if math.isfinite(square) and abs(b) > SHARE * math.sqrt(square)]
    size = math.fsum(b * b for _, b in pairs)
    if not 0 < size < math.inf:
        return {}
    factor = math.fsum(a * b for a, b in pairs) / size
    return {"gradient.off": math.sqrt(math.fsum((a - b) ** 2 for a, b in pairs) / size), "gradient.is": factor}


def _live(of: Layers) -> dict[str, float]:
    """The layers' gradient norms; 0 also where the smallest tensor has no gradient, as in a part behind a detach."""
    dead = {layer for layer, (_, square) in (of.reduced_sums or {}).items() if square == 0}
    return {layer: 0.0 if layer in dead else norm for layer, norm in of.reduced.items()}


def _dead(reduced: Mapping[str, float]) -> int:
    """How many numbered layers have a gradient of exactly 0, while others of their kind have one."""
    kinds: defaultdict[str, list[float]] = defaultdict(list)
    for layer, norm in reduced.items():
        kind, _, number = layer.rpartition(".")
        if number.isdigit():
            kinds[kind].append(norm)
    return sum(norms.count(0.0) for norms in kinds.values() if any(norms))


def _moves(now: Layers, before: Layers, rate: float) -> Readings:
    """How far weights moved, over what a step moves them; and how many layers did not, despite a gradient."""
    apart = []
    for layer, (norm, count, _) in now.weights.items():
        was = before.weights[layer][0] if layer in before.weights else 0.0
        if 0 < was < math.inf:
            most = max(SAME * was / 2, MOVE * rate * math.sqrt(count))
            apart.append(abs(norm - was) / most if math.isfinite(norm) else math.inf)
    found = {"weights.apart": max(apart)} if apart else {}
    live = [_live(now), _live(before)]
    moving = [layer for layer in now.weights if all(each.get(layer) for each in live)]
    changed = [now.weights[layer][2] for layer in moving if not math.isnan(now.weights[layer][2])]
    if changed:
        found |= {"weights.still": float(changed.count(0.0)), "weights.layers": float(len(changed))}
    return found


def of_rows(rows: Sequence[TrainedRow]) -> Readings:
    """How rows fit together: advantages and rewards, uids and prompts, repeated responses."""
    if not rows:
        return {}
    count = len(rows)
    found = {"responses.repeated": _repeated(rows) / count}
    groups: defaultdict[str, list[TrainedRow]] = defaultdict(list)
    for row in rows:
        groups[row.uid].append(row)
    prompts = Counter(row.prompt for row in rows if row.prompt is not None)
    if prompts:
        if (mixed := _mixed(groups, prompts)) is not None:
            shared = sum(size for size in prompts.values() if size > 1) / count
            found["groups.mixed"], found["groups.alone"] = mixed / count, shared if len(groups) == count else 0.0
        found["prompts"] = len(prompts) / count
    rewards = [row.reward for row in rows if row.reward is not None and math.isfinite(row.reward)]
    if rewards:
        found["rewarded"] = sum(reward != 0 for reward in rewards) / len(rewards)
    sizes = [row.largest for row in rows if 0 < row.largest < math.inf]
    if sizes:
        found["advantages.size"] = statistics.geometric_mean(sizes)
    if all(row.is_one for row in rows) and rewards:
        found |= _following([*groups.values()])
        found |= _of_groups([each for each in groups.values() if len(each) > 1], count)
    moving = [row for row in rows if row.advantage is not None and row.padding]
    if moving:
        cut = sum(0 < row.unmoved == row.padding for row in moving)
        # If credit begins later for other reasons, some rows have as much padding by chance.
        most = cut > MOST * sum(row.unmoved > 0 for row in moving)
        found["advantages.cut"] = cut / len(moving) if most else 0.0
    return found


def _of_groups(groups: Sequence[Sequence[TrainedRow]], count: int) -> Readings:
    """Advantages of groups whose rewards differ: all 0, all of one sign, or spread much farther than the rewards."""
    known = [
        [(row.reward, row.advantage or 0.0) for row in each]
        for each in groups
        if all(row.reward is not None and row.length and math.isfinite(row.reward + row.largest) for row in each)
    ]
    differing: list[tuple[Sequence[float], Sequence[float]]] = []
    equal: list[tuple[Sequence[float], Sequence[float]]] = []
    for each in known:
        rewards, advantages = zip(*each, strict=True)
        (equal if close(min(rewards), max(rewards)) else differing).append((rewards, advantages))
    found: Readings = {}
    if differing:
        found["advantages.zero"] = sum(not any(advantages) for _, advantages in differing) / len(differing)
        # Divided by a deviation, one of so many values is at most their number's root.
        found["advantages.spread"] = max(
            (max(advantages) - min(advantages)) / max(max(rewards) - min(rewards), math.sqrt(count) + 1)
            for rewards, advantages in differing
        )
    found |= _power(differing)
    # If equal rewards have no advantage, the baseline is the group's and lies between its rewards.
    if differing and equal and not any(any(advantages) for _, advantages in equal):
        one_sided = [not min(each) < 0 < max(each) and any(each) for _, each in differing]
        found["advantages.one_sided"] = sum(one_sided) / len(differing)
    pairs = [each for rewards, advantages in differing for each in zip(rewards, advantages, strict=True)]
    if len(pairs) > 1 and not _is_proportional(pairs):
        values = [advantage for _, advantage in pairs]
        if (deviation := statistics.pstdev(values)) > 0:
            found["advantages.offset"] = abs(statistics.fmean(values)) / deviation
    return found


def _power(groups: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Readings:
    """By which power of its rewards' deviation each group's advantages are divided, if one fits all of them exactly."""
    spreads = [(statistics.stdev(rewards), statistics.stdev(advantages)) for rewards, advantages in groups]
    points = [(math.log(a), math.log(b / a)) for a, b in spreads if b > 0]
    if len({round(x, 4) for x, _ in points}) <= 2:  # which one power always fits
        return {}
    slope, start = statistics.linear_regression(*zip(*points, strict=True))
    is_exact = all(close(math.exp(y), math.exp(start + slope * x)) for x, y in points)
    return {"advantages.power": -slope, "advantages.power_off": min(abs(slope), abs(slope + 1))} if is_exact else {}


def _is_proportional(pairs: Sequence[tuple[float, float]]) -> bool:
    """Whether advantages are a multiple of the rewards: there is no baseline."""
    factor = sum(r * a for r, a in pairs) / sum(r * r for r, _ in pairs)
    return all(close(a, factor * r) for r, a in pairs)


def _following(groups: Sequence[Sequence[TrainedRow]]) -> Readings:
    """How far advantages are from following the rewards of their prompt: 1 minus their correlation.

    It is the mean over the prompts in which both differ, each counted by its responses but one. Increasing functions
    of the rewards give nearly 0, sums of rewards that are normalized one by one less than 1 unless these exclude each
    other, and values of other rows about 1.
    """
    found: list[tuple[int, float]] = []
    for group in groups:
        known = [(row.reward, row.advantage) for row in group if row.reward is not None and row.advantage is not None]
        rewards, advantages = zip(*known, strict=True) if len(known) > 1 else ((0.0,), (0.0,))
        apart = not close(min(rewards), max(rewards)) and not close(min(advantages), max(advantages))
        if apart and all(map(math.isfinite, (*rewards, *advantages))):
            found.append((len(known) - 1, statistics.correlation(rewards, advantages)))
    count = sum(of for of, _ in found)
    if not count:
        return {"advantages.untold": 1.0}
    mean = math.fsum(of * value for of, value in found) / count
    return {"advantages.correlation": mean, "advantages.not_following": 1 - mean}


def close(a: float, b: float) -> bool:
    """Whether two rewards, or two advantages, are the same but for rounding."""
    return math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6)


def _mixed(groups: Mapping[str, Sequence[TrainedRow]], prompts: Mapping[int, int]) -> int | None:
    """How many rows have a uid with several prompts; None where that may be right.

    States of an agent's environment are prompts that a uid may have several of, but not as many rows of each as of any
    other, which is how a dataset's prompts are repeated.
    """
    sessions = [(uid, row.session_id) for uid, each in groups.items() for row in each if row.session_id is not None]
    if len(set(sessions)) < len(sessions):  # rows are steps of a trajectory
        return None
    mixed = sum(len(each) for each in groups.values() if len({row.prompt for row in each}) > 1)
    sizes = set(prompts.values())
    return mixed if not mixed or (len(sizes) == 1 and min(sizes) > 1) else None


def _repeated(rows: Sequence[TrainedRow]) -> int:
    """How many responses are the same as an earlier one to their prompt, although chance hardly gives that."""
    seen: set[tuple[str, int | None, int | None]] = set()
    repeated = 0
    for row in rows:
        is_improbable = row.response is not None and row.log_prob is not None and row.log_prob < _LEAST_CHANCE
        repeated += is_improbable and (row.uid, row.prompt, row.response) in seen
        seen.add((row.uid, row.prompt, row.response))
    return repeated
