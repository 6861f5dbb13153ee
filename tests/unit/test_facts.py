"""What training sums up for the judge: against a loop over the tokens; its operations, and its memory."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from dispatching import Operations
from notation import Patch, cases
from torch import Tensor

from gradloc.facts import BROKEN, MODES, NAMES, SHIFTS
from gradloc.levels import (
    FACTOR,
    FAR_NATS,
    LEAST_LOG_PROB,
    LEAST_NATS,
    LEVEL,
    MOVED,
    NEAR_NATS,
    ROW_TOKENS,
    UNRELATED,
    UNSAMPLED_NATS,
)
from gradloc.measure import update_facts
from gradloc.measure.update_facts import own_facts

Tokens = dict[str, Tensor]
OF_TRAINING = ("log_prob", "old_log_prob", "ref_log_prob")
OPTIONAL = (
    *("old_log_prob", "ref_log_prob", "rollout_log_prob", "advantage", "coefficient", "kl_coefficient"),
    *("rollout_is_weight", "after_eos", "policy_loss_mask", "entropy_expected"),
)


def micro_batch(
    seed: int = 0,
    rows: int = 28,
    width: int = 24,
    dtype: torch.dtype = torch.float32,
    bypass: bool = False,
    broken: bool = True,
    padding: float = 0.0,
) -> Tokens:
    """Tokens for which each sum has something: numbers that are not finite, also after the end, moved rows, zeros."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape or (rows, width), generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape or (rows, width), generator=generator)

    def moved(values: Tensor, kind: int) -> Tensor:
        """In every fourth row, by each of the shifts in turn."""
        shifts = [SHIFTS[row // 4 % len(SHIFTS)] if row % 4 == kind else 0 for row in range(rows)]
        return torch.stack([row.roll(-k) for row, k in zip(values, shifts, strict=True)])

    length = torch.randint(width // 2, width + 1, (rows, 1), generator=generator) * (uniform(rows, 1) < 0.95)
    mask = (torch.arange(width) < length) & (uniform() < 0.9)
    reference = -4 * uniform().pow(2)
    old = (reference + 0.4 * normal() * (uniform(rows, 1) < 0.7)).clamp(max=0)
    now = (moved(old, 0) + 0.01 * normal() + 0.3 * normal() * (uniform() < 0.2)).clamp(max=0)
    rollout = moved(old, 1) + 0.02 * normal()
    kind = torch.arange(rows).unsqueeze(1) % 12
    for number, other in ((3, reference + 0.01 * normal()), (7, -4 * uniform())):
        rollout = torch.where(kind == number, other, rollout)
    rollout = rollout.masked_fill(uniform() < 0.1, 0.0)
    rollout[0, 5:8], rollout[1, :3], old[2, 5:8] = rollout[0, 4], -30.0, old[2, 4]
    reference = moved(reference, 2).masked_fill(uniform() < 0.05, 0.0)
    rollout, now = (torch.where(uniform() < 0.05, old, each) for each in (rollout, now))
    certain = uniform() < 0.1
    reference = torch.where(certain, old, reference)
    weight = uniform(1, 1) * (0.5 + uniform()) * (uniform() > 0.1)
    advantage = normal(rows, 1).expand(rows, width) * (uniform(rows, 1) > 0.2)
    importance = (old - rollout).exp().clamp(max=2) * (uniform() > 0.05)
    kl = 0.1 * normal() * (uniform() > 0.2)
    is_clipped = (now - old > 0.2) & (advantage > 0) | (uniform() < 0.05)
    wrong = torch.tensor([1.0, 1.0, 1.0, 2.0, -1.0])[torch.randint(0, 5, (rows, width), generator=generator)]
    coefficient = -weight * advantage * importance * (now - old).exp() * wrong + kl
    tokens = {
        **{"log_prob": now, "old_log_prob": rollout if bypass else old, "ref_log_prob": reference},
        **{"rollout_log_prob": rollout, "advantage": advantage, "weight": weight, "rollout_is_weight": importance},
        **{"coefficient": coefficient.masked_fill(is_clipped, 0.0), "kl_coefficient": kl},
        **{"entropy_coefficient": -0.02 * mask * weight * (0.5 + uniform()), "entropy_expected": -0.01 * mask * weight},
    }
    tokens = {name: values.to(dtype).clone() for name, values in tokens.items()}
    for name in BROKEN if broken else ():
        if bypass and name in ("old_log_prob", "rollout_log_prob"):
            continue
        for value in (math.nan, math.inf, -math.inf):
            chosen = int(torch.randint(rows * width, (), generator=generator))
            tokens[name].view(-1)[chosen] = value
    only_inside(tokens["rollout_log_prob"], mask)
    after = torch.arange(width) >= length
    for name in (*OF_TRAINING, "advantage"):
        tokens[name] = tokens[name].masked_fill(after, math.nan)
    tokens["rollout_log_prob"] = tokens["rollout_log_prob"].masked_fill(after & (uniform(rows, 1) < 0.8), padding)
    tokens |= {
        "response_mask": mask.float(),
        "after_eos": uniform() < 0.1,
        "policy_loss_mask": mask & (uniform() < 0.9),
    }
    return tokens


def only_inside(rollout: Tensor, mask: Tensor) -> None:
    """Leaves no number outside of the responses that is not finite, so that it is no log-prob there."""
    rollout.masked_fill_(~mask.bool() & ~rollout.isfinite(), 0.0)


class Sums:
    """Sums by name, and the sums of sizes, to which errors of rounding are in proportion."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter(dict.fromkeys(NAMES, 0))
        self.sizes: Counter[str] = Counter()
        self.unclear: Counter[str] = Counter()  # how many may be rounded to either side of a limit

    def add(self, name: str, value: float) -> None:
        self.sums[name] += value
        self.sizes[name] += abs(value)


def finite(*values: float) -> bool:
    return all(map(math.isfinite, values))


def of_a_loop(
    micro_batches: Sequence[Tokens],
    epoch: int = 0,
    is_first: bool = True,
    scale: float = 1.0,
    mode: str | None = None,
    earlier: bool = True,
) -> Sums:
    """What gradloc/facts.py defines, one token at a time."""
    has = set.intersection(*(set(tokens) for tokens in micro_batches))
    found = Sums()
    rows, parts = [], []
    for tokens in micro_batches:
        columns = {name: tokens[name].double().tolist() for name in has}
        shape = tokens["response_mask"].shape
        parts.append([[{n: of[i][t] for n, of in columns.items()} for t in range(shape[1])] for i in range(shape[0])])
        rows += parts[-1]
    rounding = 8 * torch.finfo(micro_batches[0]["coefficient"].dtype).eps if "coefficient" in has else 0.0
    both = {"old_log_prob", "rollout_log_prob"} <= has
    bypassed = both and all(
        t["old_log_prob"] == t["rollout_log_prob"] for row in rows for t in row if t["response_mask"]
    )
    found.add("bypass", bypassed and (is_first or earlier))
    found.add("mini_batches", 1)
    in_bypass_mode = bypassed and (is_first or earlier)
    for row in rows:
        for t in row:
            t["policy"] = t["log_prob"] if in_bypass_mode else t.get("old_log_prob", t["log_prob"])
            t["sound"] = bool(t["response_mask"]) and finite(*(t[name] for name in OF_TRAINING if name in t))
        inside = [t for t in row if t["response_mask"]]
        found.add("responses", bool(inside))
        for name in BROKEN:
            found.add(f"broken {name}", any(not finite(t.get(name, 0.0)) for t in inside))
        if epoch == 0:
            loop_over_pairs(found, row, has, in_bypass_mode, is_first)
            loop_over_sampled(found, row, inside, has)
        loop_over_loss(found, inside, has, scale, rounding)
        if epoch and {"advantage", "old_log_prob"} <= has:
            loop_over_gained(found, [t for t in row if t["sound"]])
    if mode in MODES:
        kept = "policy_loss_mask" if "policy_loss_mask" in has else "response_mask"
        counted = max if mode == MODES[-1] else math.fsum
        whole = sum(counted(t["weight"] * bool(t[kept]) for t in row) for row in rows)
        filled = sum(any(t["response_mask"] for t in row) for row in rows)
        found.add("weights", whole)
        found.add("filled", filled / len(rows))
        found.add("promised", filled > 0)
    if {"entropy_coefficient", "entropy_expected"} <= has:
        of_entropy = [(t["entropy_coefficient"] / scale, t["entropy_expected"]) for row in rows for t in row]
        found.add("entropy_along", sum(c * e for c, e in of_entropy))
        found.add("entropy_size", sum(e * e for _, e in of_entropy))
    return found


def loop_over_pairs(found: Sums, row: list[Any], has: set[str], in_bypass_mode: bool, is_first: bool) -> None:
    if in_bypass_mode and not is_first:
        return  # the log-probs before the update are not known
    if "rollout_log_prob" in has:
        told = [
            t["sound"] and finite(t["rollout_log_prob"]) and not (t.get("after_eos") and not t["rollout_log_prob"])
            for t in row
        ]
        loop_over_pair(found, "rollout", row, told, "rollout_log_prob", "policy", "ref_log_prob" in has)
    told = [t["sound"] for t in row]
    if "ref_log_prob" in has:
        loop_over_pair(found, "reference", row, told, "ref_log_prob", "policy", False)
    if "old_log_prob" in has and not in_bypass_mode:
        loop_over_pair(found, "old" if is_first else "step", row, told, "old_log_prob", "log_prob", False)


def loop_over_pair(
    found: Sums, pair: str, row: list[Any], told: list[bool], of_a: str, of_b: str, with_reference: bool
) -> None:
    known: list[tuple[int, dict[str, float]]] = []
    before = (0.0, 0.0)
    for i, t in enumerate(row):
        is_zero = told[i] and t[of_a] == 0 and t[of_b] < -LEAST_NATS
        found.add(f"{pair} zero", is_zero)
        if not told[i] or is_zero:
            before = (0.0, 0.0)
            continue
        a, b = max(t[of_a], LEAST_LOG_PROB), max(t[of_b], LEAST_LOG_PROB)
        found.add(f"{pair} repeated", i > 0 and LEAST_LOG_PROB < a == before[0] and abs(b - before[1]) > FAR_NATS)
        before, values = (a, b), {"d": a - b, "b": b, "size": abs(a - b), "g": 0.0, "distance": 0.0}
        if with_reference:
            values["g"] = max(t["policy"], LEAST_LOG_PROB) - max(t["ref_log_prob"], LEAST_LOG_PROB)
            values["distance"] = abs(a - b + values["g"])
        known.append((i, values))
    n = len(known)
    for number, (i, values) in enumerate(known):
        place = (2 * number - n + 1) / n
        flags = {"tokens": True, "over": values["d"] > LEAST_NATS, "under": values["d"] < -LEAST_NATS}
        flags["unsure"] = values["b"] < -LEAST_NATS
        flags["same"] = flags["unsure"] and row[i][of_a] > LEAST_LOG_PROB and values["size"] < 1e-5
        products = {f"{x}*{y}": values[x] * values[y] for x in "dbg" for y in "dbg"}
        products["size*place"] = values["size"] * place
        for name, value in {**values, **products, **flags}.items():
            found.add(f"{pair} {name}", value)
    if n:
        loop_over_response(found, pair, known, n)


def loop_over_response(found: Sums, pair: str, known: list[tuple[int, dict[str, float]]], n: int) -> None:
    sums = {name: math.fsum(values[name] for _, values in known) for name in ("d", "b", "size", "distance")}
    d = {i: values["d"] - sums["d"] / n for i, values in known}
    b = {i: values["b"] - sums["b"] / n for i, values in known}
    a = {i: d[i] + b[i] for i in d}

    def product(x: Mapping[int, float], y: Mapping[int, float], k: int = 0) -> float:
        return math.fsum(x[i] * y[i + k] for i in x if i + k in y)

    aa, ab, bb = product(a, a), product(a, b), product(b, b)
    norm, of_rows = math.sqrt(aa * bb), Counter[str]()
    far = sums["size"] > FAR_NATS * n
    told = n >= ROW_TOKENS and min(aa, bb) > LEAST_NATS * n
    of_rows |= {"rows": 1, "far": far, "far_tokens": far * n, "told": told}
    of_rows["nearer"] = sums["distance"] < sums["size"] / LEVEL and sums["size"] > LEAST_NATS * n
    of_rows["unrelated"] = told and ab < UNRELATED * norm
    best, k = max((product(a, b, k), k) for k in SHIFTS)
    of_rows[f"moved {k}"] = told and best > ab + MOVED * norm
    found.unclear[f"{pair} moved {k}"] += told and abs(best - ab - MOVED * norm) < 0.01 * norm
    for name, value in of_rows.items():
        found.add(f"{pair} {name}", value)
    for name, value in (("far_size", far * sums["size"]), ("aa", aa), ("ab", ab), ("bb", bb)):
        found.add(f"{pair} {name}", value)
        found.sizes[f"{pair} {name}"] += math.fsum(values["b"] ** 2 + values["d"] ** 2 for _, values in known)
    for k in SHIFTS:
        for name, x in (("d", d), ("b", b)):
            found.sums[f"{pair} {name} {k}"] += product(x, b, k)
            found.sizes[f"{pair} {name} {k}"] += math.fsum(abs(x[i] * b[i + k]) for i in x if i + k in b)


def loop_over_sampled(found: Sums, row: list[Any], inside: list[Any], has: set[str]) -> None:
    sampled = [False] * len(row)
    for i, t in enumerate(row):
        is_trained = t["response_mask"] and t["weight"]
        if "rollout_log_prob" not in has:
            found.add("sampled trained", bool(is_trained))
            found.add("sampled after_end", bool(is_trained and t.get("after_eos")))
            continue
        rollout = t["rollout_log_prob"]
        is_after = bool(
            is_trained and t.get("after_eos") and (not rollout or t["policy"] < rollout + 3 * UNSAMPLED_NATS)
        )
        found.add("sampled trained", bool(is_trained))
        found.add("sampled after_end", is_after)
        found.add(
            "sampled unlogged", bool(is_trained and not rollout and t["policy"] < UNSAMPLED_NATS and not is_after)
        )
        if inside and rollout and finite(rollout):
            sampled[i] = True
            found.add("sampled logged", 1)
            found.add("sampled both", bool(t["response_mask"]))
    if "rollout_log_prob" in has:
        last = max((i for i, t in enumerate(row) if t["response_mask"]), default=None)
        found.add("sampled trained_rows", last is not None)
        found.add("sampled last_lost", last is not None and any(sampled[last + 1 :]))


def log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf if value == 0 else math.nan


def loop_over_loss(found: Sums, inside: list[Any], has: set[str], scale: float, rounding: float) -> None:
    if not {"advantage", "coefficient"} <= has:
        return
    has_old, has_importance = "old_log_prob" in has, "rollout_is_weight" in has
    if has_old and has_importance and "rollout_log_prob" in has and inside:
        logs = [log(t["rollout_is_weight"]) for t in inside]
        mean = sum(logs) / len(logs)
        for t, of_weight in zip(inside, logs, strict=True):
            gap = t["old_log_prob"] - t["rollout_log_prob"]
            told = all(abs(each) > NEAR_NATS for each in (gap, of_weight, of_weight - mean))
            found.add("loss corrected", told)
            found.add("loss along", told and gap * of_weight > 0)
    log_ratios = [t["log_prob"] - t["old_log_prob"] if has_old else 0.0 for t in inside]
    of_row = sum(log_ratios) / max(len(inside), 1)
    for t, log_ratio in zip(inside, log_ratios, strict=True):
        if not t.get("policy_loss_mask", True):
            continue
        c, k, z = t["coefficient"] / scale, t.get("kl_coefficient", 0.0), -t["weight"] * t["advantage"]
        if has_old:
            clipped = c == 0 and z != 0 and log_ratio * of_row > 0 and FAR_NATS < abs(log_ratio) and log_ratio <= 1
            found.add("loss clipped", clipped)
            found.add("loss clipped_right", clipped and log_ratio * z < 0)
            if not (abs(log_ratio) <= NEAR_NATS and abs(of_row) <= NEAR_NATS):
                continue
            z *= math.exp(log_ratio)
        e = z * t.get("rollout_is_weight", 1.0)
        if c == 0 or not finite(c, e, k, z):
            continue
        k *= abs(k) > rounding * abs(e)
        of = {"c": c, "e": e, "k": k, "z": z}
        for x in of:
            for y in of:
                found.add(f"loss {x}{y}", of[x] * of[y])
        unfit = e != 0 and abs(c - k - e) > (FACTOR + rounding) * abs(e) + LEAST_NATS * abs(k)
        found.add("loss told", e != 0)
        found.add("loss unfit", unfit)
        found.add("loss opposite", unfit and (c - k) * e < 0)


def loop_over_gained(found: Sums, sound: list[Any]) -> None:
    for t in sound:
        moved = max(min(t["log_prob"] - t["old_log_prob"], 1.0), -1.0)
        if finite(t["advantage"]):
            found.add("gained", moved * t["weight"] * t["advantage"])
            found.add("gained_size", abs(moved * t["weight"] * t["advantage"]))


def assert_same(found: Tensor, expected: Sums) -> None:
    assert found.dtype == torch.float64 and found.shape == (len(NAMES),)
    off = {}
    for name, value in zip(NAMES, found.tolist(), strict=True):
        if "distance" in name or "nearer" in name:
            if not expected.sums["rollout g*g"] or not name.startswith("rollout"):
                continue  # nothing reads them
        most = 1e-5 * expected.sizes[name] + expected.unclear[name] + 1e-6
        if not abs(value - expected.sums[name]) <= most:
            off[name] = value, expected.sums[name]
    assert not off


def mini_batch(**options: Any) -> list[Tokens]:
    """Micro-batches of different widths, one of which has no token."""
    found = [micro_batch(seed, rows, width, **options) for seed, rows, width in ((1, 28, 24), (2, 9, 31), (3, 12, 9))]
    found.append(micro_batch(4, 3, 12, **options))
    found[-1]["response_mask"].zero_()
    found[-1]["policy_loss_mask"].zero_()
    return found


def named(**place: Any) -> dict[str, Any]:
    """By the names of `own_facts`' arguments."""
    return {{"mode": "loss_agg_mode", "earlier": "earlier_bypassed"}.get(name, name): of for name, of in place.items()}


FIRST, LATER, AGAIN = {"mode": MODES[0]}, {"is_first": False, "mode": MODES[1]}, {"epoch": 1, "is_first": False}


@cases(
    "without place bypass",
    *(((), place, bypass) for place in (FIRST, {**AGAIN, "mode": MODES[2]}) for bypass in (False, True)),
    *(((), LATER, bypass) for bypass in (False, True)),
    *(((name,), FIRST, False) for name in OPTIONAL),
    *((("old_log_prob",), place, False) for place in (LATER, AGAIN)),
    (("rollout_log_prob", "ref_log_prob"), FIRST, True),
    *((OPTIONAL, place, False) for place in (FIRST, AGAIN)),
)
def test_sums_are_those_of_a_loop(without: tuple[str, ...], place: dict[str, Any], bypass: bool) -> None:
    micro_batches = mini_batch(bypass=bypass)
    # A column that one of the micro-batches lacks is unknown.
    for name in without:
        del micro_batches[1][name]
    expected = of_a_loop(micro_batches, **place)
    assert_same(own_facts(micro_batches, **named(**place)), expected)
    if not bypass and not without and "epoch" not in place:  # each sum is tested
        absent = "step " if place is FIRST else "old "
        of_reference = re.compile("(reference|old|step) .*(g|g[*].*|.*[*]g|distance.*|nearer)$")
        names = {name for name in NAMES if not name.startswith(absent) and not of_reference.match(name)}
        nothing = names - {"gained", "gained_size", "bypass"} - {name for name, value in expected.sums.items() if value}
        assert all(" moved " in name for name in nothing) and len(nothing) <= 6, nothing


@cases("dtype", torch.bfloat16, torch.float16, torch.float64)
def test_other_precisions_and_a_loss_scale_are_those_of_a_loop(dtype: torch.dtype) -> None:
    micro_batches = mini_batch(dtype=dtype)
    scale = torch.tensor(2.0**12)
    for tokens in micro_batches:
        tokens["coefficient"] = tokens["coefficient"].float() * scale
    expected = of_a_loop(micro_batches, scale=float(scale))
    assert expected.sums["loss told"] > 5 and expected.sums["loss opposite"]
    assert_same(own_facts(micro_batches, scale=scale), expected)


@cases(
    "spoil",
    lambda tokens: tokens["response_mask"].zero_(),
    lambda tokens: tokens["response_mask"][:, 1:].zero_(),
    lambda tokens: tokens["response_mask"][1:].zero_(),
    lambda tokens: [tokens[name].zero_() for name in tokens if name != "response_mask"],
    lambda tokens: [tokens[name].fill_(math.nan) for name in (*BROKEN, "coefficient")],
    lambda tokens: [tokens[name].fill_(-math.inf) for name in BROKEN],
    lambda tokens: tokens["weight"].zero_(),
    *(lambda tokens, name=name: tokens[name].fill_(math.nan) for name in BROKEN),
    *(lambda tokens, name=name: tokens[name].zero_() for name in ("rollout_is_weight", "coefficient", "advantage")),
)
def test_odd_mini_batches_are_those_of_a_loop(spoil: Callable[[Tokens], Any]) -> None:
    """All masked, one token or one response, zeros alone, nothing finite."""
    tokens = micro_batch(5, 6, 20, broken=False)
    spoil(tokens)
    only_inside(tokens["rollout_log_prob"], tokens["response_mask"])
    for place in (FIRST, {**AGAIN, "mode": MODES[2]}):
        assert_same(own_facts([tokens], **named(**place)), of_a_loop([tokens], **place))


def test_parts_and_ranks_add_up(monkeypatch: Patch) -> None:
    """Large inputs are summed up in parts; ranks' sums are added, but for what each knows of its whole mini-batch."""
    micro_batches = mini_batch()
    whole = own_facts(micro_batches, loss_agg_mode=MODES[0])
    of_ranks = own_facts(micro_batches[:1]) + own_facts(micro_batches[1:])
    expected = of_a_loop(micro_batches, mode=MODES[0])
    of_weights = [NAMES.index(name) for name in ("weights", "filled", "promised")]
    of_ranks[of_weights] = whole[of_weights]
    assert_same(whole, expected)
    expected.sums["mini_batches"] += 1
    assert_same(of_ranks, expected)
    calls, of_part = [], update_facts._of_part
    monkeypatch.setattr(update_facts, "_of_part", lambda *given: calls.append(given) or of_part(*given))
    for positions, parts in ((1, 52), (31 * 10, 6), (31 * 52, 1)):
        monkeypatch.setattr(update_facts, "_POSITIONS", positions)
        calls.clear()
        found = own_facts(micro_batches, loss_agg_mode=MODES[0])
        assert len(calls) == parts == found[NAMES.index("mini_batches")]
        expected.sums["mini_batches"], expected.sums["bypass"] = parts, found[NAMES.index("bypass")]
        assert_same(found, expected)


def test_columns_that_agree_to_the_bit_in_a_later_mini_batch_are_no_bypass_mode() -> None:
    micro_batches, place = mini_batch(bypass=True), {"is_first": False, "earlier": False}
    assert_same(own_facts(micro_batches, **named(**place)), of_a_loop(micro_batches, **place))


def test_padding_that_is_not_finite_was_not_sampled() -> None:
    tokens = micro_batch(broken=False, padding=math.nan)
    assert_same(own_facts([tokens]), of_a_loop([tokens]))


def cost(micro_batches: Sequence[Tokens], **place: Any) -> Operations:
    with Operations() as operations:
        own_facts(micro_batches, **place)
    return operations


@cases("place", {}, {"is_first": False}, AGAIN)
def test_a_mini_batch_takes_few_operations(place: dict[str, Any]) -> None:
    """Up to 200, and 5 for each further micro-batch, whatever its width: each is a launch of a GPU's kernel."""
    ten, twenty = (
        cost([micro_batch(i, 4, 9 + i % 3) for i in range(n)], loss_agg_mode=MODES[0], **place) for n in (10, 20)
    )
    assert (twenty.count - ten.count) / 10 <= 5
    count = cost([micro_batch()], loss_agg_mode=MODES[0], **place).count
    assert count <= 200


def test_a_large_mini_batch_takes_little_memory() -> None:
    """At most 40 bytes for each of its padded positions, the columns themselves not counted."""
    shape = 512, 2048
    tokens = {name: torch.empty(shape, device="meta", dtype=values.dtype) for name, values in micro_batch().items()}
    for rows in (64, shape[0]):
        parts = [{name: of[start : start + rows] for name, of in tokens.items()} for start in range(0, shape[0], rows)]
        assert 2**20 < cost(parts, loss_agg_mode=MODES[0]).peak <= 40 * 2**20
