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
from ..levels import EXPLAINS, FACTOR, GAP, LEAST_NATS, LEVEL, MOST, MOVE, SAME, SHARE
from .records import Readings, Record

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
# How far advantages are off by rounding.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class Layers:
    """What is known of the layers in an update's first mini-batch, by layer, the same ones in every update."""

    # The norm of the weights, their number, and how many elements of a small tensor have moved in the last optimizer
    # step; here and below, NaN is what is not known.
    weights: Mapping[str, tuple[float, int, float]]
    reduced: Mapping[str, float]  # the norm of the gradient that the optimizer gets
    passes: Mapping[str, float]  # at most so much, by the norms of the passes' own gradients
    last_pass: Mapping[str, float] | None  # that of the last pass, if all data are one rank's and others have one
    # Of small tensors over the last update, Σ Δ², Σ g² and Σ Δ·g, of its first gradient; and how many of their elements
    # have changed since its end.
    moved: Sequence[float]
    # Of a small tensor's gradient that the optimizer gets, the sum of the elements, and that of their squares.
    reduced_sums: Mapping[str, tuple[float, float]] | None
    sums_of_passes: Mapping[str, float]  # the sum of the elements, of the passes' in sum

    @property
    def live(self) -> set[str]:
        """The layers with a finite gradient, also in the smallest tensor, which has none in a part behind a detach."""
        dead = {layer for layer, (_, square) in (self.reduced_sums or {}).items() if square == 0}
        return {layer for layer, norm in self.reduced.items() if 0 < norm < math.inf} - dead


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


def _share(part: float, whole: float) -> float:
    """A part of the whole; 0 where there is nothing."""
    return part / whole if whole else 0.0


def _explained(product: float, square: float, other: float) -> float:
    """Which part of a square another one explains, by the product of what is squared; 0 where one of them is 0."""
    return product * product / square / other if square > 0 and other > 0 else 0.0


def _of_pair(of: Mapping[str, float]) -> Readings:
    """How a[t] and b[t] of the same tokens go together: r = a + slope·p[t + k] + way·(p − reference)[t] + rest."""
    n, gap = of["tokens"], of["size"] / of["tokens"]
    found = {
        "gap": gap,
        "distance": of["distance"] / n,
        "far": of["far"] / of["rows"],
        "near_gap": _share(of["size"] - of["far_size"], n - of["far_tokens"]),
        "far_gap": _share(of["far_size"], of["far_tokens"]),
        "repeated": of["repeated"] / n,
        "zero": of["zero"] / (n + of["zero"]),
        "moved": _share(max(of[f"moved {k}"] for k in SHIFTS), of["told"]),
        "later": _share(of["size*place"], of["size"]),
        "same": _share(of["same"], of["unsure"]),
        "differing": (of["over"] + of["under"]) / n,
        "larger": float(of["over"] > of["under"]),
    }
    found |= _shift(of, n)
    if gap > SAME / 2:  # columns that hardly differ say nothing
        found["unrelated"] = _share(of["unrelated"], of["told"])
        found["one_sided"] = (max(of["over"], of["under"]) + 1) / (min(of["over"], of["under"]) + 1)
    if gap > LEAST_NATS:
        found |= _slope(of, n) | _way(of)
        # 1 where errors are uniform, as of rounding, and 0 where they are normal; those of engines have longer tails.
        found["rounded"] = (gap * gap * n / of["d*d"] - 2 / math.pi) / (3 / 4 - 2 / math.pi)
    return found


def _shift(of: Mapping[str, float], n: float) -> Readings:
    """What b[t + k] says of a[t] beside b[t], for the best k: a coefficient in deviations; 0 if it may be chance."""
    norm = math.sqrt(of["aa"] * of["bb"])
    if not norm > 0:
        return {"shift": 0.0}
    correlation = of["ab"] / norm
    own = {k: of[f"b {k}"] / of["bb"] for k in SHIFTS}
    other = {k: (of[f"d {k}"] + of[f"b {k}"]) / norm for k in SHIFTS}
    found = {k: (other[k] - correlation * own[k]) / max(1 - own[k] ** 2, 1e-6) for k in SHIFTS}
    best = max(SHIFTS, key=lambda k: found[k])
    is_chance = found[best] * math.sqrt(n) <= LEVEL
    return {"correlation": correlation, "shift": 0.0 if is_chance else found[best], "shift_by": float(best)}


def _slope(of: Mapping[str, float], n: float) -> Readings:
    """The slope of a over b, both with errors, and what it explains of d², over what it leaves."""
    dd, bb, db = (of[f"{x}*{y}"] - of[x] * of[y] / n for x, y in ("dd", "bb", "db"))
    if bb <= 0:
        return {}
    # By the products of (a + b)/2, which has the errors of both.
    explained = min(_explained(db + dd / 2, bb + db + dd / 4, of["d*d"]), 1 - 1e-9)
    return {"slope": explained / (1 - explained), "slope_is": 1 + db / bb}


def _way(of: Mapping[str, float]) -> Readings:
    """By which part of the policy's way from the reference a lacks or exceeds it, and what that explains of d²."""
    if of["g*g"] <= 0:
        return {}
    way, explains = of["d*g"] / of["g*g"], _explained(of["d*g"], of["g*g"], of["d*d"])
    return {
        "ahead": way if explains > EXPLAINS and way > 0 else 0.0,  # which no rollout that is late can be
        "copied": float(of["distance"] == 0),
        "way": way,
        "way_explains": explains,
        "nearer": of["nearer"] / of["rows"],
    }


def _sampled(of: Mapping[str, float]) -> Readings:
    found = {"sampled.unlogged": of["unlogged"], "sampled.after_end": of["after_end"]}
    if of["logged"]:
        untrained = 1 - of["both"] / of["logged"]
        # More than tokens are left out at random, as by a correction that rejects them.
        found["sampled.last_lost"] = max(of["last_lost"] / of["trained_rows"] - LEVEL * untrained, 0.0)
        found["sampled.inverted"] = (1 - _share(of["both"], of["trained"])) * untrained
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
    if not (0 < of["ee"] < math.inf and of["cc"] < math.inf):
        return found
    found |= {"loss.unfit": of["unfit"] / of["told"], "loss.opposite": of["opposite"] / of["told"]}
    rest, beside = of["cc"] - 2 * of["ck"] + of["kk"], of["cc"] - 2 * of["ce"] + of["ee"]
    for name, product, square, whole in (
        ("factor", of["ce"] - of["ek"], of["ee"], rest),
        ("kl", of["ck"] - of["ek"], of["kk"], beside),
        ("without", of["cz"] - of["kz"], of["zz"], rest),
    ):
        if square > 0:
            found |= {f"loss.{name}": product / square, f"loss.{name}_explained": _explained(product, square, whole)}
    if "loss.kl" in found:
        # A multiple is all that there is beside the policy loss's part, or nothing is.
        is_all = found["loss.kl_explained"] > 1 - FACTOR or beside < FACTOR**2 * of["kk"]
        found["loss.kl_off"] = abs(found["loss.kl"] - 1) * is_all
    return found


def of_layers(now: Layers, before: Layers | None, rate: float) -> Readings:
    """What the layers say; `rate` is the sum of the learning rates since `before`, those of the update before."""
    found = _against_passes(now)
    reduced, passes = now.reduced, now.passes
    layers = reduced.keys() & passes.keys()
    whole, most = (math.hypot(*(of[layer] for layer in layers)) for of in (reduced, passes))
    if layers and math.isfinite(whole + most):
        found["gradient.is_zero"] = float(most == 0)
        if most > 0:
            # Only layers that have a part of the gradient: rounding makes factors out of nothing.
            with_part = [layer for layer in layers if reduced[layer] > FACTOR * FACTOR * whole]
            factors = [reduced[layer] / passes[layer] if passes[layer] else math.inf for layer in with_part]
            found["gradient.factor"] = max(factors, default=0.0)
            found["gradient.above"] = max(found["gradient.factor"] - 1, 0.0)
            # Others of their kind, which differ in their number, have a gradient.
            numbered = {layer: layer.rpartition(".")[0] for layer in reduced if layer.rpartition(".")[2].isdigit()}
            kinds = {numbered.get(layer) for layer in now.live}
            dead = [layer for layer, kind in numbered.items() if kind in kinds and layer not in now.live]
            found["gradient.zero"] = float(len(dead))
        if now.last_pass is not None and whole > 0:
            apart = max(abs(reduced[layer] - now.last_pass[layer]) for layer in layers)
            found["gradient.last_pass"] = SHARE * whole / max(apart, 1e-9 * whole)
    moved, gradient, along, between = now.moved
    if not math.isnan(between):
        found["weights.between"] = between
    if 0 < moved * gradient < math.inf and math.isfinite(along):
        cosine = along / math.sqrt(moved * gradient)
        found["weights.uphill"] = (1 + cosine) / max(1 - cosine, 1e-6)
    if before is not None and rate > 0:
        found |= _moves(now, before, rate)
    return found


def _against_passes(now: Layers) -> Readings:
    """How far sums over the optimizer's gradient are from those over the passes', and which multiple they are."""
    reduced, passes = now.reduced_sums or {}, now.sums_of_passes
    known = [(*reduced[layer], passes[layer]) for layer in passes if layer in reduced]
    # Those of a head's bias add up to rounding errors.
    pairs = [(a, b) for a, square, b in known if abs(b) > SHARE * math.sqrt(square)]
    size = math.fsum(b * b for _, b in pairs)
    if not 0 < size < math.inf:
        return {}
    factor = math.fsum(a * b for a, b in pairs) / size
    return {"gradient.off": math.sqrt(math.fsum((a - b) ** 2 for a, b in pairs) / size), "gradient.is": factor}


def _moves(now: Layers, before: Layers, rate: float) -> Readings:
    """How far weights moved, over what a step moves them; and how many layers did not, despite a gradient."""
    apart: list[float] = []
    changed: list[float] = []
    live = before.live
    for layer, (norm, count, moved) in now.weights.items():
        was = before.weights[layer][0] if layer in before.weights else 0.0
        if 0 < was < math.inf:
            most = max(SAME * was / 2, MOVE * rate * math.sqrt(count))
            apart.append(abs(norm - was) / most if math.isfinite(norm) else math.inf)
        if layer in live and not math.isnan(moved):
            changed.append(moved)
    found = {"weights.apart": max(apart)} if apart else {}
    if changed:
        found |= {"weights.still": float(changed.count(0.0)), "weights.layers": float(len(changed))}
    return found


def of_rows(rows: Sequence[TrainedRow]) -> Readings:
    """How rows fit together: advantages and rewards, uids and prompts, repeated responses."""
    if not rows:
        return {}
    count = len(rows)
    groups: defaultdict[str, list[TrainedRow]] = defaultdict(list)
    for row in rows:
        groups[row.uid].append(row)
    # Only responses that the policy would hardly have sampled again.
    told = [row for row in rows if row.response is not None and (row.log_prob or 0.0) < _LEAST_CHANCE]
    found = {"responses.repeated": (len(told) - len({(row.uid, row.prompt, row.response) for row in told})) / count}
    prompts = Counter(row.prompt for row in rows if row.prompt is not None)
    if prompts:
        found["prompts"] = len(prompts) / count
        mixed = sum(len(each) for each in groups.values() if len({row.prompt for row in each}) > 1)
        shared = sum(size for size in prompts.values() if size > 1)
        # States of an agent's environment are prompts that a uid may have several of, but not as many rows of each as
        # of any other, which is how a dataset's prompts are repeated. And no two rows are steps of a trajectory.
        sessions = [(row.uid, row.session_id) for row in rows if row.session_id is not None]
        is_even = shared == count and len(set(prompts.values())) == 1
        if len(set(sessions)) == len(sessions) and (is_even or not mixed):
            found["groups.mixed"] = mixed / count
            found["groups.alone"] = shared / count if len(groups) == count else 0.0
    rewards = [row.reward for row in rows if row.reward is not None and math.isfinite(row.reward)]
    if rewards:
        found["rewarded"] = sum(reward != 0 for reward in rewards) / len(rewards)
        if all(row.is_one for row in rows):
            found |= _of_groups([*groups.values()], count)
    sizes = [row.largest for row in rows if 0 < row.largest < math.inf]
    if sizes:
        found["advantages.size"] = statistics.geometric_mean(sizes)
    moving = [row for row in rows if row.advantage is not None and row.padding]
    if moving:
        cut = sum(0 < row.unmoved == row.padding for row in moving)
        # If credit begins later for other reasons, some rows have as much padding by chance.
        most = cut > MOST * sum(row.unmoved > 0 for row in moving)
        found["advantages.cut"] = cut / len(moving) if most else 0.0
    return found


def _of_groups(groups: Sequence[Sequence[TrainedRow]], count: int) -> Readings:
    """How advantages follow the rewards of their prompt, where these differ.

    The correlation is the mean over the prompts in which both differ, each counted by its responses but one. Increasing
    functions of the rewards give nearly 1, sums of rewards that are normalized one by one more than 0 unless these
    exclude each other, and values of other rows about 0.
    """
    found: Readings = {}
    differing: list[tuple[Sequence[float], Sequence[float]]] = []
    whole: list[tuple[Sequence[float], Sequence[float]]] = []
    of_equal: list[float] = []  # the advantages where the rewards do not differ
    for group in groups:
        known = [(row.reward, row.advantage or 0.0) for row in group if row.reward is not None and row.length]
        if len(known) < 2 or not all(math.isfinite(reward + advantage) for reward, advantage in known):
            continue
        rewards, advantages = zip(*known, strict=True)
        if close(min(rewards), max(rewards)):
            of_equal += advantages
        else:
            differing.append((rewards, advantages))
            if len(known) == len(group):  # a baseline counts all rewards
                whole.append((rewards, advantages))
    told = [(len(a) - 1, statistics.correlation(r, a)) for r, a in differing if not close(min(a), max(a))]
    if told:
        mean = math.fsum(weight * value for weight, value in told) / sum(weight for weight, _ in told)
        found |= {"advantages.correlation": mean, "advantages.not_following": 1 - mean}
    elif not differing:
        found["advantages.untold"] = 1.0
    if whole:
        found["advantages.zero"] = sum(not any(a) for _, a in whole) / len(whole)
        # Divided by a deviation, one of so many values is at most their number's root.
        most = math.sqrt(count) + 1
        found["advantages.spread"] = max((max(a) - min(a)) / max(max(r) - min(r), most) for r, a in whole)
        # If equal rewards have no advantage, the baseline is the group's and lies between its rewards.
        if of_equal and not any(of_equal):
            one_sided = [any(a) and not min(a) < 0 < max(a) for _, a in whole]
            found["advantages.one_sided"] = sum(one_sided) / len(whole)
        found |= _offset([pair for each in whole for pair in zip(*each, strict=True)]) | _power(whole)
    return found


def _offset(pairs: Sequence[tuple[float, float]]) -> Readings:
    """How far advantages are from 0, in their deviations; nothing if they are multiples of the rewards."""
    rewards, advantages = zip(*pairs, strict=True)
    norms, deviation = math.hypot(*rewards) * math.hypot(*advantages), statistics.pstdev(advantages)
    if deviation == 0 or abs(sum(r * a for r, a in pairs)) > (1 - 1e-6) * norms:
        return {}
    return {"advantages.offset": abs(statistics.fmean(advantages)) / deviation}


def _power(groups: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Readings:
    """By which power of its rewards' deviation each group's advantages are divided, if one fits all of them exactly."""
    spreads = [(statistics.stdev(rewards), statistics.stdev(advantages)) for rewards, advantages in groups]
    points = [(math.log(a), math.log(b / a)) for a, b in spreads if b > 0]
    if len({round(x, 4) for x, _ in points}) <= 2:  # which one power always fits
        return {}
    slope, start = statistics.linear_regression(*zip(*points, strict=True))
    if any(abs(y - start - slope * x) > _ROUNDING for x, y in points):
        return {}
    return {"advantages.power": -slope, "advantages.power_off": min(abs(slope), abs(slope + 1))}


def close(a: float, b: float) -> bool:
    """Whether two rewards, or two advantages, are the same but for rounding."""
    return math.isclose(a, b, rel_tol=_ROUNDING, abs_tol=1e-6)


def with_reference(now: Readings, before: Sequence[Record]) -> Readings:
    """The readings, with what the reference's distance from the policy says beside that of earlier updates."""
    if (gap := now.get("reference.gap")) is None:
        return now
    found = {**now}
    first = before[0] if before else Record(readings=now)
    last = before[-1] if before else Record(readings={} if now["has_moved"] else {"reference.gap": 0.0})
    if first.is_first:
        # A reference that agrees with the rollout is right, and training is not.
        gaps = first.readings.get("reference.gap", 0.0), first.readings.get("rollout.distance", math.inf)
        found["reference.first_gap"] = min(gaps)
    if not now["has_moved"] or 0 < now.get("weights.layers", 0.0) == now["weights.still"]:
        found.pop("reference.same", None)  # as it should be
    if (was := last.readings.get("reference.gap")) is not None:
        known = last.readings.get("reference.known", math.inf)
        is_off = any(last.streaks[name].score for name in ("rollout_log_probs", "reference") if name in last.streaks)
        # How far its updates can have taken the policy.
        known = (known if is_off and was > 2 * known else max(was, GAP)) + last.moved
        # If the rollout agrees with the policy, the reference has moved; else training's log-probs are wrong.
        agrees = "step.gap" in last.readings and now.get("rollout.gap", math.inf) < gap / LEVEL
        found |= {"reference.known": known, f"{'reference' if agrees else 'policy'}.jump": gap / known}
    return found
