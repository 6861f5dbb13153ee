# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The identities: equalities between neighbouring stages that every healthy update keeps, the likeliest cause first.

Each has residuals: readings that are compared with what is usual in this run, but at least with a number of
gradloc/levels.py. Held, broken or unchecked: `check` says which, of a list of records whose last one is the present.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from .. import levels
from ..levels import EXPLAINS, FACTOR, GAP, LASTS, LEVEL, SAME, SHARE, TOKENS
from .forms import Form, form_of
from .readings import COLUMNS
from .records import Record, Streak

Records = Sequence[Record]
Least = float | Callable[[Records], float]  # what is usual at least, also by the records; infinite: not to be told
_HALF = EXPLAINS / LEVEL  # of what is broken from half of all on
# Residuals of which one update shows what otherwise has to last.
_AT_ONCE = {"weights.apart", "reference.first_gap", "rollout.copied", *(f"{column}.broken" for column in COLUMNS)}


@dataclass(frozen=True)
class Identity:
    """An equality."""

    name: str  # also that of a warning without a closed form
    holds: str  # what every healthy update keeps, a clause
    check: str  # how to check that by hand, a sentence or two
    residuals: Mapping[str, Least]  # how far it is off: by reading, what of it is usual at least
    # Why it cannot be checked if no residual is known: the first reason whose reading is not 0, or that of the name "".
    unknown: Mapping[str, str]


def _late_gap(records: Records) -> float:
    """How far the rollout may be from the policy, in nats: if it is late, as far as the last updates have moved it.

    Once there are enough updates, as far as it was before. What was there before any optimizer step is not late, and
    nothing is where the trainer says that the rollout is current: then the run's own updates tell.
    """
    first, now, before = records[0], records[-1], records[:-1]
    healthy = [each.readings["rollout.gap"] for each in before if each.is_usual("rollout.gap")]
    if now.readings.get("rollout.is_current"):
        return levels.OWN_GAP if healthy else GAP
    if now.is_first or (first.is_first and first.readings.get("rollout.gap", 0.0) > LEVEL * GAP):
        return GAP
    recent = math.fsum(each.moved for each in before[-levels.LATE :])
    seen = statistics.median(healthy) if len(healthy) > levels.LATE else math.inf
    return GAP + min(recent or now.readings.get("reference.gap", levels.FAR_NATS), seen)


def may_be_late(records: Records) -> bool:
    """Whether the rollout may be late by enough for single tokens to be far apart."""
    return _late_gap(records) > 2 * GAP


def _wide(least: float, records: Records) -> float:
    """What is usual where a late rollout's weights are far from the policy's, as after very large steps."""
    return least * max(_late_gap(records) / levels.FAR_NATS, 1.0) ** 2


def _nearer(records: Records) -> float:
    """How many responses may be nearer to the reference: all in a late rollout's first updates, which are near it."""
    now = records[-1]
    is_near = not (now.is_first or now.readings.get("rollout.is_current")) and len(records) <= 2 * levels.LATE
    return math.inf if is_near else _wide(SHARE, records)


IDENTITIES = (
    Identity(
        "finite",
        "log-probs and advantages are finite",
        "Print this column of these rows before the update: if it is finite there, a later stage breaks it.",
        {f"{column}.broken": TOKENS for column in COLUMNS},
        {"": "no log-probs"},
    ),
    Identity(
        "weights",
        "optimizer steps alone move the weights: all of them, downhill, by about the learning rate",
        "Compare a parameter and its `grad` before `optimizer.step()`, after it, and before the next forward pass.",
        {
            "weights.between": TOKENS,
            "weights.apart": 1.0,
            "weights.still": TOKENS,
            "weights.uphill": levels.UPHILL,
            "weights.gained": EXPLAINS,
        },
        {"": "no optimizer step before"},
    ),
    Identity(
        "old_log_probs",
        "the update's first forward gives the old log-probs again",
        "Compute them twice: if they differ, the forward is random; else compare what both calls get, row by row.",
        {"old.gap": SAME},
        {"bypass": "bypass mode", "": "no old log-probs"},
    ),
    Identity(
        "rollout_log_probs",
        "rollout and training give the same log-probs with the same weights",
        "Score one response's ids with the server's weights and with training's, at temperature 1 and without top-p: "
        "if they agree token by token, the weights are not the cause.",
        {
            "rollout.gap": _late_gap,
            "rollout.unrelated": partial(_wide, SHARE),
            "rollout.slope": partial(_wide, levels.SLOPE),
            "rollout.copied": TOKENS,
            "rollout.repeated": SHARE,
            "rollout.rounded": _HALF,
            "rollout.one_sided": levels.ONE_SIDED,
            "rollout.nearer": _nearer,
            "rollout.ahead": FACTOR,
        },
        {"": "no rollout log-probs: set actor_rollout_ref.rollout.calculate_log_probs=True"},
    ),
    Identity(
        "sampled",
        "the tokens that are trained are those that the rollout sampled",
        "Compare `response_mask` with the ids that the rollout returned: 1 for these alone, the end token included.",
        {"sampled.unlogged": TOKENS, "sampled.after_end": TOKENS, "sampled.zero": SHARE, "sampled.last_lost": _HALF},
        {"": "no rollout log-probs, and no end tokens"},
    ),
    Identity(
        "responses",
        "the responses to a prompt differ",
        "Print the ids of the responses of one `uid` after the rollout. If they are the same there, look at seeds, "
        "temperature, top-p and top-k of the server; if not, at what pads, repeats or gathers rows.",
        {"responses.repeated": SHARE},
        {"": "no uid"},
    ),
    Identity(
        "groups",
        "the rows of a uid come from one prompt, and those of a prompt from one uid",
        "Print `uid` and the decoded prompt of each row, in the order of `uid`.",
        {"groups.mixed": SHARE, "groups.alone": _HALF},
        {"": "no prompts, or a uid has several, as states of an environment are"},
    ),
    Identity(
        "advantages",
        "advantages follow the rewards of their prompt, at every token",
        "Sort rows by `uid` and reward: where the mask is 1, `advantages` rise with them, from below 0 to above it.",
        {
            "advantages.not_following": levels.FOLLOWING,
            "advantages.zero": _HALF,
            "advantages.one_sided": _HALF,
            "advantages.offset": EXPLAINS,
            "advantages.spread": 1.0,
            "advantages.power_off": FACTOR,
            "advantages.cut": SHARE,
        },
        {"advantages.untold": "no two rewards of a prompt differ", "": "no uid or rewards, or an advantage per token"},
    ),
    Identity(
        "reference",
        "the reference is the policy before its first step, and stays that",
        "Print a checksum of one weight of actor and reference, before the first step and after it.",
        {
            "reference.first_gap": SAME,
            "reference.jump": 1.0,
            "reference.shift": 2 * levels.SHIFT,
            "reference.same": _HALF,
        },
        {"": "no reference log-probs; use_kl_loss=True with kl_loss_coef=0 has them"},
    ),
    Identity(
        "loss",
        "the loss's gradient is −weight · advantage · ratio of each token, with weights that sum to 1",
        "Print the policy loss of one row's tokens before the mean: where the ratio is 1, it is −advantage · weight.",
        {
            "loss.unfit": SHARE,
            "loss.weights_off": FACTOR,
            "loss.kl_off": FACTOR,
            "loss.entropy_off": FACTOR,
            "loss.clipped_wrong": _HALF,
            "loss.against": _HALF,
        },
        {"": "no advantages, or a loss whose coefficients are not known"},
    ),
    Identity(
        "gradient",
        "the optimizer's gradient is the sum of the passes'",
        "On one rank, compare a parameter's `grad` after each backward pass with that before the optimizer step.",
        {"gradient.above": FACTOR, "gradient.off": FACTOR, "gradient.zero": TOKENS, "gradient.last_pass": 1.0},
        {"gradient.is_zero": "the gradient is 0", "": "its norms are not measured"},
    ),
)
BY_NAME = {identity.name: identity for identity in IDENTITIES}


@dataclass(frozen=True)
class Found:
    """What is known of an identity in an update."""

    state: str  # "held", "broken" or "unchecked"
    times: float | None = None  # the largest residual, in times of the usual; of a broken one, when it was off last
    since: int | None = None  # the step since which it is broken
    missing: str | None = None  # why it cannot be checked
    residual: str = ""  # the largest one, of a broken identity
    form: Form | None = None  # what is wrong


def _as_lasting(times: float) -> float:
    """So many times the usual, where one update shows what otherwise has to last."""
    return times * min(times, LEVEL) ** (LASTS - 1)


def measured(records: Records, at_once: bool = False) -> Record:
    """The last record with its residuals, in times of the usual, and its streaks; `at_once`: as if they had lasted."""
    *before, now = records
    times: dict[str, float] = {}
    streaks: dict[str, Streak] = {}
    for identity in IDENTITIES:
        largest = 0.0
        for name, of in identity.residuals.items():
            least = of(records) if callable(of) else of
            if name in now.readings and least < math.inf:
                usual = [each.readings[name] for each in before if each.is_usual(name)]
                ratio = now.readings[name] / max(least, statistics.median(usual or [0.0]))
                times[name] = _as_lasting(ratio) if name in _AT_ONCE else ratio
                largest = max(largest, times[name])
        streak = before[-1].streaks.get(identity.name, Streak()) if before else Streak()
        streaks[identity.name] = streak.then(_as_lasting(largest) if at_once else largest, now.step)
    return replace(now, times=times, streaks=streaks)


def check(records: Records) -> dict[str, Found]:
    """By identity, whether it holds in the last of these records, which are `measured`."""
    return {identity.name: _check(identity, records) for identity in IDENTITIES}


def _check(identity: Identity, records: Records) -> Found:
    now, names = records[-1], identity.residuals
    streak = now.streaks[identity.name]
    if streak.is_broken:
        # The last update in which it was off.
        off = (each for each in reversed(records) if any(each.times.get(name, 0.0) >= LEVEL for name in names))
        at = next(off, now)
        residual = max(names, key=lambda name: at.times.get(name, 0.0))
        return Found("broken", at.times[residual], streak.since, None, residual, form_of(at.readings, residual))
    if known := [now.times[name] for name in names if name in now.times]:
        return Found("held", max(known))
    why = identity.unknown
    return Found("unchecked", missing=next(text for name, text in why.items() if not name or now.readings.get(name)))
