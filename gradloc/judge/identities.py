# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The identities: equalities between neighbouring stages that every healthy update keeps, in the order of the stages.

Each has residuals: readings that are compared with what is usual in this run, but at least with a number of
gradloc/levels.py. Held, broken or unchecked: `check` says which, of a list of records whose last one is the present.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..levels import (
    CONTRADICTING,
    EXPLAINS,
    FACTOR,
    FAR_NATS,
    GAP,
    LASTS,
    LATE,
    LEVEL,
    ONE_SIDED,
    SAME,
    SHARE,
    SHIFT,
    SLOPE,
    TOKENS,
    UPHILL,
)
from . import forms
from .forms import Form
from .records import MOST_RECORDS, Readings, Record, Streak

Records = Sequence[Record]
# What breaks an identity at once.
_AT_ONCE = LEVEL**LASTS
_HALF = EXPLAINS / LEVEL  # of what is broken from half of all on


@dataclass(frozen=True)
class Identity:
    """An equality.

    Args:
        name (str): Its name, also that of a warning without a closed form.
        holds (str): What every healthy update keeps, a clause.
        residuals (Mapping): By name, how a record's residual is made of its readings (None if it is not known), and
            what is usual at least: a number, or made of the records.
        needs (Callable): Why it cannot be checked, of the records.
        form (Callable): What is wrong, of the present readings and the largest residual: the closed form, if there is
            one.
    """

    name: str
    holds: str
    residuals: Mapping[str, tuple[Callable[[Readings], float | None], float | Callable[[Records], float]]]
    needs: Callable[[Records], str]
    form: Callable[[Readings, str], Form]


def _of(name: str) -> Callable[[Readings], float | None]:
    return lambda readings: readings.get(name)


def _if_apart(pair: str, name: str) -> Callable[[Readings], float | None]:
    """A reading that means something only where two columns differ."""
    return lambda readings: readings.get(name) if readings.get(f"{pair}.gap", 0.0) > SAME / 2 else None


def _off(name: str, right: float = 1.0) -> Callable[[Readings], float | None]:
    return lambda readings: None if name not in readings else abs(readings[name] - right)


def _broken(column: str) -> Callable[[Readings], float | None]:
    return lambda readings: _AT_ONCE * TOKENS * readings[f"{column}.broken"] if f"{column}.broken" in readings else None


def _late_gap(records: Records) -> float:
    """How far a rollout that is late may be from the policy: as far as the last updates have moved it.

    Once there are enough updates, it may be as late as before. What was there before any optimizer step is not late.
    """
    now, before = records[-1], records[:-1]
    if now.is_first or (before and before[0].is_first and before[0].readings.get("rollout.gap", 0.0) > LEVEL * GAP):
        return GAP
    moves = [_move(each) for each in before]
    recent = math.fsum(moves[-LATE:])
    healthy = [
        each.readings["rollout.gap"] / moved
        for each, moved in zip(before[1:], moves, strict=False)
        if moved > GAP and "rollout.gap" in each.readings and each.times.get("rollout.gap", LEVEL) < LEVEL
    ]
    late = min(statistics.median_low(healthy) / LATE, 1.0) if len(healthy) > 1 else 1.0
    if any(moves):
        return GAP + late * recent
    return GAP + now.readings.get("reference.gap", FAR_NATS)


def _move(record: Record) -> float:
    """How far an update has moved the policy: twice what its later mini-batches, in the mean half-way, have seen."""
    return 2 * record.readings.get("step.gap", 0.0)


def _wide(pair: str, least: float, power: int = 1) -> Callable[[Records], float]:
    """What is usual where columns of other weights are far apart, as after very large steps."""

    def of_records(records: Records) -> float:
        if pair == "rollout":
            apart = _late_gap(records)
        else:
            healthy = [each for each in records[:-1] if not each.streaks["reference"].score]
            apart = healthy[-1].readings.get("reference.gap", 0.0) if healthy else 0.0
        return least * max(apart / FAR_NATS, 1.0) ** power

    return of_records


def _nearer(records: Records) -> float:
    """How many responses may be so much nearer to the reference than to the policy: all, while a late rollout's are.

    One that is late by a part f of the way is f/(1 − f) times as near.
    """
    rates = [each.rate for each in records[:-1]]
    all_of, recent = math.fsum(rates), math.fsum(rates[-LATE:])
    is_late = len(records) < MOST_RECORDS and recent > 2 * (all_of - recent)
    return math.inf if is_late else _wide("rollout", SHARE)(records)


def _follows(readings: Readings) -> float | None:
    """How many tokens have the very log-prob of the policy for the reference's, after the policy has moved."""
    nothing_moves = readings.get("weights.still", 0.0) >= readings.get("weights.layers", math.inf)
    return None if nothing_moves or not readings.get("has_moved") else readings.get("reference.same")


def _reference_gap(readings: Readings) -> float | None:
    """Before any step there is one update to tell; a difference counts as if it had lasted."""
    if readings.get("has_moved", 1.0) or "reference.gap" not in readings:
        return None
    return SAME * (readings["reference.gap"] / SAME) ** LASTS


def _kl(readings: Readings) -> float | None:
    """How far the KL loss's factor is from 1, where its multiple is what there is beside the policy loss's part."""
    if "loss.kl_factor" not in readings:
        return None
    gone = readings["loss.beside"] < FACTOR
    return abs(readings["loss.kl_factor"] - 1) if gone or readings["loss.kl_explained"] > 1 - FACTOR else 0.0


def _without_rollout(records: Records) -> str:
    if "rollout.gap" in records[-1].readings:
        return ""
    return "no rollout log-probs: set actor_rollout_ref.rollout.calculate_log_probs=True"


def _needs(*names: str, why: str) -> Callable[[Records], str]:
    return lambda records: "" if any(name in records[-1].readings for name in names) else why


def _old(records: Records) -> str:
    now = records[-1].readings
    return "" if "old.gap" in now else "bypass mode" if now.get("bypass") else "no old log-probs"


IDENTITIES = (
    Identity(
        "finite",
        "log-probs and advantages are finite",
        {
            f"{column}.broken": (_broken(column), TOKENS)
            for column in ("advantages", "rollout", "old", "reference", "policy")
        },
        _needs("policy.broken", why="no log-probs"),
        forms.finite,
    ),
    Identity(
        "old_log_probs",
        "before an update's first step, its forward gives the old log-probs",
        {
            "old.gap": (_of("old.gap"), SAME),
            "old.unrelated": (_if_apart("old", "old.unrelated"), SHARE),
        },
        _old,
        forms.old,
    ),
    Identity(
        "rollout_log_probs",
        "with the same weights, rollout and training give the same log-probs",
        {
            "rollout.gap": (_of("rollout.gap"), _late_gap),
            "rollout.shift": (_of("rollout.shift"), _wide("rollout", SHIFT)),
            "rollout.moved": (_of("rollout.moved"), _wide("rollout", SHARE)),
            "rollout.unrelated": (_if_apart("rollout", "rollout.unrelated"), _wide("rollout", SHARE, power=2)),
            "rollout.repeated": (_of("rollout.repeated"), SHARE),
            "rollout.one_sided": (_if_apart("rollout", "rollout.one_sided"), ONE_SIDED),
            "rollout.slope": (_of("rollout.slope"), _wide("rollout", SLOPE)),
            "rollout.nearer": (_of("rollout.nearer"), _nearer),
        },
        _without_rollout,
        forms.rollout,
    ),
    Identity(
        "sampled",
        "the tokens that are trained are those that the rollout sampled",
        {
            "sampled.unlogged": (_of("sampled.unlogged"), TOKENS),
            "sampled.after_end": (_of("sampled.after_end"), TOKENS),
            "sampled.last_lost": (_of("sampled.last_lost"), _HALF),
            "sampled.inverted": (_of("sampled.inverted"), _HALF),
        },
        _needs("sampled.last_lost", "sampled.unlogged", why="no rollout log-probs, and no end tokens"),
        forms.sampled,
    ),
    Identity(
        "responses",
        "the responses to a prompt differ",
        {"responses.repeated": (_of("responses.repeated"), SHARE)},
        _needs("responses.repeated", why="no uid"),
        forms.responses,
    ),
    Identity(
        "groups",
        "the rows of a uid come from one prompt, and a prompt's from one uid",
        {"groups.mixed": (_of("groups.mixed"), SHARE), "groups.alone": (_of("groups.alone"), _HALF)},
        _needs("groups.mixed", why="no prompts, or a uid has several, as states of an environment are"),
        forms.groups,
    ),
    Identity(
        "advantages",
        "advantages follow the rewards of their prompt, at every token",
        {
            "advantages.contradicting": (_of("advantages.contradicting"), CONTRADICTING),
            "advantages.zero": (_of("advantages.zero"), _HALF),
            "advantages.one_sided": (_of("advantages.one_sided"), _HALF),
            "advantages.offset": (_of("advantages.offset"), EXPLAINS),
            "advantages.spread": (_of("advantages.spread"), 1.0),
            "advantages.cut": (_of("advantages.cut"), SHARE),
        },
        _needs(
            *("advantages.contradicting", "advantages.zero", "advantages.cut"),
            why="no uid, no rewards, or an advantage of each token's own",
        ),
        forms.advantages,
    ),
    Identity(
        "reference",
        "the reference is the policy before its first step, and stays that",
        {
            "reference.gap": (_reference_gap, SAME),
            "reference.shift": (_of("reference.shift"), _wide("reference", SHIFT)),
            "reference.moved": (_of("reference.moved"), _wide("reference", SHARE)),
            "reference.same": (_follows, _HALF),
        },
        _needs("reference.gap", why="no reference log-probs (use_kl_loss=True with kl_loss_coef=0 has them)"),
        forms.reference,
    ),
    Identity(
        "loss",
        "the loss's gradient is −weight · advantage · ratio of each token, with weights that sum to 1",
        {
            "loss.factor": (_off("loss.factor"), FACTOR),
            "loss.unfit": (_of("loss.unfit"), SHARE),
            "loss.weights": (_off("loss.weights"), FACTOR),
            "loss.kl_factor": (_kl, FACTOR),
            "loss.clipped_wrong": (_of("loss.clipped_wrong"), _HALF),
            "loss.against": (lambda r: None if "loss.along" not in r else 1 - r["loss.along"], _HALF),
        },
        _needs("loss.factor", "loss.weights", why="no advantages, or a loss whose coefficients are not known"),
        forms.loss,
    ),
    Identity(
        "gradient",
        "the optimizer's gradient is the sum of the passes'",
        {
            "gradient.factor": (lambda r: max(r["gradient.factor"] - 1, 0) if "gradient.factor" in r else None, FACTOR),
            "gradient.less": (_of("gradient.less"), LEVEL),
            "gradient.zero": (_of("gradient.zero"), TOKENS),
            "gradient.last_pass": (
                lambda r: SHARE * FACTOR / max(r["gradient.last_pass"], 1e-9) if "gradient.last_pass" in r else None,
                FACTOR,
            ),
        },
        _needs("gradient.factor", why="its norms are not measured"),
        forms.gradient,
    ),
    Identity(
        "weights",
        "optimizer steps alone move the weights: all of them, downhill, by about the learning rate",
        {
            "weights.apart": (lambda r: r["weights.apart"] ** LASTS if "weights.apart" in r else None, 1.0),
            "weights.still": (_of("weights.still"), TOKENS),
            "weights.between": (lambda r: r["weights.between"] * _AT_ONCE if "weights.between" in r else None, 1.0),
            "weights.uphill": (_of("weights.uphill"), UPHILL),
            "weights.gained": (lambda r: None if "weights.gained" not in r else 1 - r["weights.gained"], EXPLAINS),
        },
        _needs("weights.apart", "weights.between", "weights.uphill", why="no optimizer step before"),
        forms.weights,
    ),
)
BY_NAME = {identity.name: identity for identity in IDENTITIES}


@dataclass(frozen=True)
class Held:
    """An identity that holds; its largest residual is so many times the usual."""

    times: float


@dataclass(frozen=True)
class Unchecked:
    """An identity that cannot be checked, and why."""

    missing: str


@dataclass(frozen=True)
class Broken:
    """An identity that is broken: by how much, since which step, and what is known of it."""

    times: float
    residual: str
    since: int | None
    form: Form


def measured(records: Records, at_once: bool = False) -> Record:
    """The last record with its residuals, in times of the usual, and its streaks; `at_once`: as if they had lasted."""
    now = records[-1]
    times: dict[str, float] = {}
    streaks: dict[str, Streak] = {}
    before = records[-2].streaks if len(records) > 1 else {}
    for identity in IDENTITIES:
        for name, (residual, least) in identity.residuals.items():
            value = residual(now.readings)
            of_records = least(records) if callable(least) else least
            if value is None or of_records == math.inf:
                continue
            healthy = [each for each in records[:-1] if each.times.get(name, math.inf) < LEVEL]
            values = [residual(each.readings) or 0.0 for each in healthy]
            times[name] = value / max(of_records, statistics.median(values) if values else 0.0)
        largest = max((times.get(name, 0.0) for name in identity.residuals), default=0.0)
        lasting = largest**LASTS if at_once else largest
        streaks[identity.name] = before.get(identity.name, Streak()).then(lasting, now.step)
    return replace(now, times=times, streaks=streaks)


def check(records: Records) -> dict[str, Held | Broken | Unchecked]:
    """By identity, whether it holds in the last of these records, which are `measured`."""
    return {identity.name: _check(identity, records) for identity in IDENTITIES}


def _check(identity: Identity, records: Records) -> Held | Broken | Unchecked:
    now = records[-1]
    known = {name: now.times[name] for name in identity.residuals if name in now.times}
    streak = now.streaks[identity.name]
    if not streak.is_broken:
        missing = identity.needs(records)
        return Unchecked(missing) if missing or not known else Held(max(known.values()))
    at = next(each for each in reversed(records) if _largest(identity, each) >= LEVEL)
    residual = max(identity.residuals, key=lambda name: at.times.get(name, 0.0))
    return Broken(_largest(identity, at), residual, streak.since, identity.form(at.readings, residual))


def _largest(identity: Identity, record: Record) -> float:
    return max((record.times.get(name, 0.0) for name in identity.residuals), default=0.0)
