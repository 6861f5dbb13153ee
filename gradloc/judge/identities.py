# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The identities: equalities between neighbouring stages that every healthy update keeps, in the order of the stages.

Each has residuals: readings that are compared with what is usual in this run, but at least with a number of
gradloc/levels.py. Held, broken or unchecked: `check` says which, of a list of records whose last one is the present.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from ..levels import (
    EXPLAINS,
    FACTOR,
    FAR_NATS,
    FOLLOWING,
    GAP,
    LASTS,
    LATE,
    LEVEL,
    ONE_SIDED,
    OWN_GAP,
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
# A residual of so many times the usual breaks an identity at once.
_AT_ONCE = LEVEL**LASTS
_HALF = EXPLAINS / LEVEL  # of what is broken from half of all on


class Residual(NamedTuple):
    """How far an equality is off.

    Args:
        name (str): A reading, and the residual that is made of it.
        least (float | Callable): What is usual at least: a number, or made of the records; infinite: not to be told.
        of (Callable, optional): The residual, of the readings; None if it is not known. Default: the reading itself.
    """

    name: str
    least: float | Callable[[Records], float]
    of: Callable[[Readings], float | None] | None = None

    def value(self, readings: Readings) -> float | None:
        """The residual; None if it is not known."""
        return readings.get(self.name) if self.of is None else self.of(readings)


@dataclass(frozen=True)
class Identity:
    """An equality.

    Args:
        name (str): Its name, also that of a warning without a closed form.
        holds (str): What every healthy update keeps, a clause.
        residuals (tuple): How far it is off.
        needs (Callable): Why it cannot be checked, of the records; "" where it can be.
        form (Callable): What is wrong, of the present readings and the largest residual.
    """

    name: str
    holds: str
    residuals: tuple[Residual, ...]
    needs: Callable[[Records], str]
    form: Callable[[Readings, str], Form]


def _if_apart(name: str, readings: Readings) -> float | None:
    """A reading that means something only where two columns differ."""
    return readings.get(name) if readings.get(f"{name.partition('.')[0]}.gap", 0.0) > SAME / 2 else None


def _off(name: str, readings: Readings, least: float = -1.0) -> float | None:
    """How far a reading is from 1; with `least` 0, above it."""
    if name not in readings:
        return None
    return max(readings[name] - 1, least) if least == 0 else abs(readings[name] - 1)


def _at_once(name: str, readings: Readings) -> float | None:
    """How many there are of what a single one of is enough."""
    return _AT_ONCE * TOKENS * readings[name] if name in readings else None


def _if_lasting(name: str, readings: Readings) -> float | None:
    """A residual that breaks in one update what another one does that lasts."""
    return readings[name] ** LASTS if name in readings else None


def _late_gap(records: Records) -> float:
    """How far a rollout that is late may be from the policy: as far as the last updates have moved it.

    Once there are enough updates, it may be as late as before. What was there before any optimizer step is not late,
    and nothing is where the trainer says that the rollout is current: then the run's own updates tell.
    """
    now, before = records[-1], records[:-1]
    was_off = before and before[0].is_first and before[0].readings.get("rollout.gap", 0.0) > LEVEL * GAP
    if now.readings.get("rollout.is_current"):
        return _own_gap(before)
    if now.is_first or was_off:
        return GAP
    moves = [moved_by(each) for each in before]
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


def _own_gap(before: Records) -> float:
    """How far a rollout that is never late may be from the policy, by earlier updates, whose median counts as well.

    Before any optimizer step the engines have the same weights, so that one update tells, if not so well.
    """
    healthy = [each for each in before if each.times.get("rollout.gap", LEVEL) < LEVEL]
    if len(healthy) >= LASTS:
        return OWN_GAP
    return max(OWN_GAP, 2 * healthy[0].readings["rollout.gap"]) if healthy and healthy[0].is_first else GAP


def may_be_late(records: Records) -> bool:
    """Whether the rollout may be late by enough for single tokens to be far apart."""
    return not records[-1].readings.get("rollout.is_current") and _late_gap(records) > 2 * GAP


def moved_by(record: Record) -> float:
    """How far an update has moved the policy: twice what its later mini-batches, in the mean half-way, have seen."""
    return 2 * record.readings.get("step.gap", 0.0)


def _wide(pair: str, least: float, records: Records, power: int = 1) -> float:
    """What is usual where columns of other weights are far apart, as after very large steps."""
    if pair == "rollout":
        apart = _late_gap(records)
    else:
        healthy = [each for each in records[:-1] if not each.streaks.get("reference", Streak()).score]
        apart = healthy[-1].readings.get("reference.gap", 0.0) if healthy else 0.0
    return least * max(apart / FAR_NATS, 1.0) ** power


def _nearer(records: Records) -> float:
    """How many responses may be so much nearer to the reference than to the policy: all, while a late rollout's are.

    One that is late by a part f of the way is f/(1 − f) times as near.
    """
    rates = [each.rate for each in records[:-1]]
    all_of, recent = math.fsum(rates), math.fsum(rates[-LATE:])
    may_be_late = not records[-1].readings.get("rollout.is_current")
    may_be_late &= len(records) < MOST_RECORDS and recent > 2 * (all_of - recent)
    return math.inf if may_be_late else _wide("rollout", SHARE, records)


def _follows(readings: Readings) -> float | None:
    """How many tokens have the very log-prob of the policy for the reference's, after the policy has moved."""
    nothing_moves = readings.get("weights.still", 0.0) >= readings.get("weights.layers", math.inf)
    return None if nothing_moves or not readings.get("has_moved") else readings.get("reference.same")


def _reference_gap(readings: Readings) -> float | None:
    """That before any step, which one update tells, and no later one: a difference counts as if it had lasted."""
    times = readings.get("reference.first_gap", math.nan) / SAME
    is_told = times >= LEVEL or (times >= 0 and not readings.get("has_moved", 1.0))
    return SAME * times**LASTS if is_told else None


def _kl(readings: Readings) -> float | None:
    """How far the KL loss's factor is from 1, where its multiple is what there is beside the policy loss's part."""
    if "loss.kl_factor" not in readings:
        return None
    gone = readings["loss.beside"] < FACTOR
    return abs(readings["loss.kl_factor"] - 1) if gone or readings["loss.kl_explained"] > 1 - FACTOR else 0.0


def _needs(*names: str, why: str) -> Callable[[Records], str]:
    return lambda records: "" if any(name in records[-1].readings for name in names) else why


def _old(records: Records) -> str:
    now = records[-1].readings
    return "" if "old.gap" in now else "bypass mode" if now.get("bypass") else "no old log-probs"


def _advantages(records: Records) -> str:
    now = records[-1].readings
    if {"advantages.not_following", "advantages.zero", "advantages.cut"} & now.keys():
        return ""
    if now.get("advantages.told") == 0:
        return "no two rewards of a prompt differ"
    return "no uid, no rewards, or an advantage of each token's own"


def _gradient(records: Records) -> str:
    now = records[-1].readings
    if "gradient.factor" in now:
        return ""
    return "the gradient is 0" if "gradient.zero" in now else "its norms are not measured"


IDENTITIES = (
    Identity(
        "finite",
        "log-probs and advantages are finite",
        tuple(
            Residual(f"{column}.broken", TOKENS, partial(_at_once, f"{column}.broken"))
            for column in ("advantages", "rollout", "old", "reference", "policy")
        ),
        _needs("policy.broken", why="no log-probs"),
        forms.finite,
    ),
    Identity(
        "old_log_probs",
        "the update's first forward gives the old log-probs again",
        (Residual("old.gap", SAME), Residual("old.unrelated", SHARE, partial(_if_apart, "old.unrelated"))),
        _old,
        forms.old,
    ),
    Identity(
        "rollout_log_probs",
        "rollout and training give the same log-probs with the same weights",
        (
            Residual("rollout.gap", _late_gap),
            Residual("rollout.shift", partial(_wide, "rollout", SHIFT)),
            Residual("rollout.moved", partial(_wide, "rollout", SHARE)),
            Residual(
                "rollout.unrelated", partial(_wide, "rollout", SHARE, power=2), partial(_if_apart, "rollout.unrelated")
            ),
            Residual("rollout.repeated", SHARE),
            Residual("rollout.one_sided", ONE_SIDED, partial(_if_apart, "rollout.one_sided")),
            Residual("rollout.slope", partial(_wide, "rollout", SLOPE)),
            Residual("rollout.nearer", _nearer),
            Residual("rollout.ahead", FACTOR),
            Residual("rollout.copied", TOKENS, partial(_at_once, "rollout.copied")),
        ),
        _needs("rollout.gap", why="no rollout log-probs: set actor_rollout_ref.rollout.calculate_log_probs=True"),
        forms.rollout,
    ),
    Identity(
        "sampled",
        "the tokens that are trained are those that the rollout sampled",
        (
            Residual("sampled.unlogged", TOKENS),
            Residual("sampled.after_end", TOKENS),
            Residual("sampled.zero", SHARE, lambda readings: readings.get("rollout.zero")),
            Residual("sampled.last_lost", _HALF),
            Residual("sampled.inverted", _HALF),
        ),
        _needs("sampled.last_lost", "sampled.unlogged", why="no rollout log-probs, and no end tokens"),
        forms.sampled,
    ),
    Identity(
        "responses",
        "the responses to a prompt differ",
        (Residual("responses.repeated", SHARE),),
        _needs("responses.repeated", why="no uid"),
        forms.by_residual,
    ),
    Identity(
        "groups",
        "the rows of a uid come from one prompt, and those of a prompt from one uid",
        (Residual("groups.mixed", SHARE), Residual("groups.alone", _HALF)),
        _needs("groups.mixed", why="no prompts, or a uid has several, as states of an environment are"),
        forms.by_residual,
    ),
    Identity(
        "advantages",
        "advantages follow the rewards of their prompt, at every token",
        (
            Residual("advantages.not_following", FOLLOWING),
            Residual("advantages.zero", _HALF),
            Residual("advantages.one_sided", _HALF),
            Residual("advantages.offset", EXPLAINS),
            Residual("advantages.spread", 1.0),
            Residual("advantages.cut", SHARE),
        ),
        _advantages,
        forms.by_residual,
    ),
    Identity(
        "reference",
        "the reference is the policy before its first step, and stays that",
        (
            Residual("reference.gap", SAME, _reference_gap),
            Residual("reference.jump", 1.0),
            Residual("reference.shift", partial(_wide, "reference", 2 * SHIFT)),
            Residual("reference.moved", partial(_wide, "reference", _HALF)),
            Residual("reference.same", _HALF, _follows),
        ),
        _needs("reference.gap", why="no reference log-probs (use_kl_loss=True with kl_loss_coef=0 has them)"),
        forms.reference,
    ),
    Identity(
        "loss",
        "the loss's gradient is −weight · advantage · ratio of each token, with weights that sum to 1",
        (
            Residual("loss.factor", FACTOR, partial(_off, "loss.factor")),
            Residual("loss.unfit", SHARE),
            Residual("loss.weights", FACTOR, lambda readings: readings.get("loss.weights_off")),
            Residual("loss.kl_factor", FACTOR, _kl),
            Residual("loss.entropy_factor", FACTOR, partial(_off, "loss.entropy_factor")),
            Residual("loss.clipped_wrong", _HALF),
            Residual("loss.against", _HALF),
        ),
        _needs("loss.factor", "loss.weights", why="no advantages, or a loss whose coefficients are not known"),
        forms.loss,
    ),
    Identity(
        "gradient",
        "the optimizer's gradient is the sum of the passes'",
        (
            Residual("gradient.factor", FACTOR, partial(_off, "gradient.factor", least=0.0)),
            Residual("gradient.off", FACTOR),
            Residual("gradient.zero", TOKENS),
            Residual("gradient.last_pass", 1.0),
        ),
        _gradient,
        forms.by_residual,
    ),
    Identity(
        "weights",
        "optimizer steps alone move the weights: all of them, downhill, by about the learning rate",
        (
            Residual("weights.between", TOKENS, partial(_at_once, "weights.between")),
            Residual("weights.apart", 1.0, partial(_if_lasting, "weights.apart")),
            Residual("weights.still", TOKENS),
            Residual("weights.uphill", UPHILL),
            Residual("weights.gained", EXPLAINS),
        ),
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
    for identity in IDENTITIES:
        for residual in identity.residuals:
            value = residual.value(now.readings)
            least = residual.least(records) if callable(residual.least) else residual.least
            if value is None or least == math.inf:
                continue
            healthy = [each for each in records[:-1] if each.times.get(residual.name, math.inf) < LEVEL]
            values = [residual.value(each.readings) or 0.0 for each in healthy]
            times[residual.name] = value / max(least, statistics.median(values) if values else 0.0)
        largest = max((times.get(each.name, 0.0) for each in identity.residuals), default=0.0)
        before = records[-2].streaks.get(identity.name, Streak()) if len(records) > 1 else Streak()
        streaks[identity.name] = before.then(largest**LASTS if at_once else largest, now.step)
    return replace(now, times=times, streaks=streaks)


def check(records: Records) -> dict[str, Held | Broken | Unchecked]:
    """By identity, whether it holds in the last of these records, which are `measured`."""
    return {identity.name: _check(identity, records) for identity in IDENTITIES}


def _check(identity: Identity, records: Records) -> Held | Broken | Unchecked:
    now, names = records[-1], [each.name for each in identity.residuals]
    streak = now.streaks[identity.name]
    if not streak.is_broken:
        known = [now.times[name] for name in names if name in now.times]
        missing = identity.needs(records)
        return Unchecked(missing) if missing or not known else Held(max(known))
    # The last update in which it was off.
    off = (each for each in reversed(records) if any(each.times.get(name, 0.0) >= LEVEL for name in names))
    at = next(off, now)
    residual = max(names, key=lambda name: at.times.get(name, 0.0))
    return Broken(at.times[residual], residual, streak.since, identity.form(at.readings, residual))
