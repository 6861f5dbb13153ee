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
from typing import NamedTuple

from .. import levels
from ..levels import EXPLAINS, FACTOR, GAP, LASTS, LEVEL, SAME, SHARE, TOKENS
from . import forms
from .forms import Form
from .readings import COLUMNS
from .records import Readings, Record, Streak

Records = Sequence[Record]
_HALF = EXPLAINS / LEVEL  # of what is broken from half of all on


class Residual(NamedTuple):
    """How far an equality is off.

    Args:
        name (str): The reading that it is.
        least (float | Callable): What is usual at least: a number, or made of the records; infinite: not to be told.
        at_once (bool): Whether one update shows what otherwise has to last.
    """

    name: str
    least: float | Callable[[Records], float]
    at_once: bool = False


@dataclass(frozen=True)
class Identity:
    """An equality.

    Args:
        name (str): Its name, also that of a warning without a closed form.
        holds (str): What every healthy update keeps, a clause.
        check (str): How to check that by hand, a sentence or two.
        residuals (tuple): How far it is off.
        unknown (Mapping): Why it cannot be checked if no residual is known: the first reason whose reading is not 0, or
            that of the name "".
        form (Callable): What is wrong, of the readings and the largest residual.
    """

    name: str
    holds: str
    check: str
    residuals: tuple[Residual, ...]
    unknown: Mapping[str, str]
    form: Callable[[Readings, str], Form]


def _late_gap(records: Records) -> float:
    """How far a rollout that is late may be from the policy: as far as the last updates have moved it.

    Once there are enough updates, as far as it was before. What was there before any optimizer step is not late, and
    nothing is where the trainer says that the rollout is current: then the run's own updates tell.
    """
    now, before = records[-1], records[:-1]
    was_off = before and before[0].is_first and before[0].readings.get("rollout.gap", 0.0) > LEVEL * GAP
    if now.readings.get("rollout.is_current"):
        return _own_gap(before)
    if now.is_first or was_off:
        return GAP
    healthy = [each.readings["rollout.gap"] for each in before if each.is_usual("rollout.gap")]
    seen = statistics.median(healthy) if len(healthy) > levels.LATE else math.inf
    recent = math.fsum(each.moved for each in before[-levels.LATE :])
    return GAP + min(recent or now.readings.get("reference.gap", levels.FAR_NATS), seen)


def _own_gap(before: Records) -> float:
    """How far a rollout that is never late may be from the policy, by earlier updates, whose median counts as well.

    Before any optimizer step the engines have the same weights, so that one update tells, if not so well.
    """
    healthy = [each for each in before if each.is_usual("rollout.gap")]
    if len(healthy) >= LASTS:
        return levels.OWN_GAP
    return max(levels.OWN_GAP, 2 * healthy[0].readings["rollout.gap"]) if healthy and healthy[0].is_first else GAP


def may_be_late(records: Records) -> bool:
    """Whether the rollout may be late by enough for single tokens to be far apart."""
    return not records[-1].readings.get("rollout.is_current") and _late_gap(records) > 2 * GAP


def _wide(least: float, records: Records) -> float:
    """What is usual where a late rollout's weights are far from the policy's, as after very large steps."""
    return least * max(_late_gap(records) / levels.FAR_NATS, 1.0) ** 2


def _nearer(records: Records) -> float:
    """How many responses may be nearer to the reference: all in a late rollout's first updates, which are near it."""
    return math.inf if may_be_late(records) and len(records) <= 2 * levels.LATE else _wide(SHARE, records)


IDENTITIES = (
    Identity(
        "finite",
        "log-probs and advantages are finite",
        "Print this column of these rows before the update: if it is finite there, a later stage breaks it.",
        tuple(Residual(f"{column}.broken", TOKENS, at_once=True) for column in COLUMNS),
        {"": "no log-probs"},
        forms.finite,
    ),
    Identity(
        "weights",
        "optimizer steps alone move the weights: all of them, downhill, by about the learning rate",
        "Compare a parameter and its `grad` before `optimizer.step()`, after it, and before the next forward pass.",
        (
            Residual("weights.between", TOKENS, at_once=True),
            Residual("weights.apart", 1.0, at_once=True),
            Residual("weights.still", TOKENS),
            Residual("weights.uphill", levels.UPHILL),
            Residual("weights.gained", EXPLAINS),
        ),
        {"": "no optimizer step before"},
        forms.named,
    ),
    Identity(
        "old_log_probs",
        "the update's first forward gives the old log-probs again",
        "Compute them twice: if they differ, the forward is random; else compare what both calls get, row by row.",
        (Residual("old.gap", SAME),),
        {"bypass": "bypass mode", "": "no old log-probs"},
        forms.old,
    ),
    Identity(
        "rollout_log_probs",
        "rollout and training give the same log-probs with the same weights",
        "Score one response with the weights that the server has and with training's, on the same ids, at temperature "
        "1 and without top-p, and compare token by token: if they agree, the weights are not the cause.",
        (
            Residual("rollout.gap", _late_gap),
            Residual("rollout.shift", partial(_wide, levels.SHIFT)),
            Residual("rollout.moved", partial(_wide, SHARE)),
            Residual("rollout.unrelated", partial(_wide, SHARE)),
            Residual("rollout.slope", partial(_wide, levels.SLOPE)),
            Residual("rollout.repeated", SHARE),
            Residual("rollout.rounded", _HALF),
            Residual("rollout.one_sided", levels.ONE_SIDED),
            Residual("rollout.nearer", _nearer),
            Residual("rollout.ahead", FACTOR),
            Residual("rollout.copied", TOKENS, at_once=True),
        ),
        {"": "no rollout log-probs: set actor_rollout_ref.rollout.calculate_log_probs=True"},
        forms.rollout,
    ),
    Identity(
        "sampled",
        "the tokens that are trained are those that the rollout sampled",
        "Compare `response_mask` in the batch, row by row, with the token ids that the rollout returned: it should be "
        "1 for these alone, the end token included.",
        (
            Residual("sampled.unlogged", TOKENS),
            Residual("sampled.after_end", TOKENS),
            Residual("rollout.zero", SHARE),
            Residual("sampled.last_lost", _HALF),
        ),
        {"": "no rollout log-probs, and no end tokens"},
        forms.sampled,
    ),
    Identity(
        "responses",
        "the responses to a prompt differ",
        "Print the ids of the responses of one `uid` after the rollout. If they are the same there, look at seeds, "
        "temperature, top-p and top-k of the server; if not, at what pads, repeats or gathers rows.",
        (Residual("responses.repeated", SHARE),),
        {"": "no uid"},
        forms.named,
    ),
    Identity(
        "groups",
        "the rows of a uid come from one prompt, and those of a prompt from one uid",
        "Print `uid` and the decoded prompt of each row, in the order of `uid`.",
        (Residual("groups.mixed", SHARE), Residual("groups.alone", _HALF)),
        {"": "no prompts, or a uid has several, as states of an environment are"},
        forms.named,
    ),
    Identity(
        "advantages",
        "advantages follow the rewards of their prompt, at every token",
        "Print `uid`, the sum of `token_level_rewards`, `advantages` and `response_mask` of each row, in the order of "
        "`uid`: the highest reward has the highest advantage, wherever the mask is 1, and they are on both sides of 0.",
        (
            Residual("advantages.not_following", levels.FOLLOWING),
            Residual("advantages.zero", _HALF),
            Residual("advantages.one_sided", _HALF),
            Residual("advantages.offset", EXPLAINS),
            Residual("advantages.spread", 1.0),
            Residual("advantages.power_off", FACTOR),
            Residual("advantages.cut", SHARE),
        ),
        {
            "advantages.untold": "no two rewards of a prompt differ",
            "": "no uid, no rewards, or an advantage of each token's own",
        },
        forms.named,
    ),
    Identity(
        "reference",
        "the reference is the policy before its first step, and stays that",
        "Print a checksum of one weight of actor and reference, before the first step and after it.",
        (
            Residual("reference.first_gap", SAME, at_once=True),
            Residual("reference.jump", 1.0),
            Residual("reference.shift", 2 * levels.SHIFT),
            Residual("reference.same", _HALF),
        ),
        {"": "no reference log-probs; use_kl_loss=True with kl_loss_coef=0 has them"},
        forms.reference,
    ),
    Identity(
        "loss",
        "the loss's gradient is −weight · advantage · ratio of each token, with weights that sum to 1",
        "Print the policy loss of each token of one row, before the mean, its advantage, ratio and importance weight: "
        "where the ratio is 1, it is −advantage times that weight.",
        (
            Residual("loss.unfit", SHARE),
            Residual("loss.weights_off", FACTOR),
            Residual("loss.kl_off", FACTOR),
            Residual("loss.entropy_off", FACTOR),
            Residual("loss.clipped_wrong", _HALF),
            Residual("loss.against", _HALF),
        ),
        {"": "no advantages, or a loss whose coefficients are not known"},
        forms.loss,
    ),
    Identity(
        "gradient",
        "the optimizer's gradient is the sum of the passes'",
        "On one rank, compare a parameter's `grad` after each backward pass with that before the optimizer step.",
        (
            Residual("gradient.above", FACTOR),
            Residual("gradient.off", FACTOR),
            Residual("gradient.zero", TOKENS),
            Residual("gradient.last_pass", 1.0),
        ),
        {"gradient.is_zero": "the gradient is 0", "": "its norms are not measured"},
        forms.named,
    ),
)
BY_NAME = {identity.name: identity for identity in IDENTITIES}


@dataclass(frozen=True)
class Found:
    """What is known of an identity in an update.

    Args:
        state (str): "held", "broken" or "unchecked".
        times (float, optional): Its largest residual, in times of the usual; of a broken one, when it was off last.
        since (int, optional): The step since which it is broken.
        missing (str, optional): Why it cannot be checked.
        residual (str): The largest one, of a broken identity.
        form (Form, optional): What is wrong.
    """

    state: str
    times: float | None = None
    since: int | None = None
    missing: str | None = None
    residual: str = ""
    form: Form | None = None


def _as_lasting(times: float) -> float:
    """So many times the usual, where one update shows what otherwise has to last."""
    return times**LASTS if times < LEVEL else times * LEVEL ** (LASTS - 1)


def measured(records: Records, at_once: bool = False) -> Record:
    """The last record with its residuals, in times of the usual, and its streaks; `at_once`: as if they had lasted."""
    *before, now = records
    times: dict[str, float] = {}
    streaks: dict[str, Streak] = {}
    for identity in IDENTITIES:
        largest = 0.0
        for name, of, shows_at_once in identity.residuals:
            least = of(records) if callable(of) else of
            if name in now.readings and least < math.inf:
                usual = [each.readings[name] for each in before if each.is_usual(name)]
                ratio = now.readings[name] / max(least, statistics.median(usual or [0.0]))
                times[name] = _as_lasting(ratio) if shows_at_once else ratio
                largest = max(largest, times[name])
        streak = before[-1].streaks.get(identity.name, Streak()) if before else Streak()
        streaks[identity.name] = streak.then(_as_lasting(largest) if at_once else largest, now.step)
    return replace(now, times=times, streaks=streaks)


def check(records: Records) -> dict[str, Found]:
    """By identity, whether it holds in the last of these records, which are `measured`."""
    return {identity.name: _check(identity, records) for identity in IDENTITIES}


def _check(identity: Identity, records: Records) -> Found:
    now, names = records[-1], [each.name for each in identity.residuals]
    streak = now.streaks[identity.name]
    if streak.is_broken:
        # The last update in which it was off.
        off = (each for each in reversed(records) if any(each.times.get(name, 0.0) >= LEVEL for name in names))
        at = next(off, now)
        residual = max(names, key=lambda name: at.times.get(name, 0.0))
        return Found("broken", at.times[residual], streak.since, None, residual, identity.form(at.readings, residual))
    if known := [now.times[name] for name in names if name in now.times]:
        return Found("held", max(known))
    why = identity.unknown
    return Found("unchecked", missing=next(text for name, text in why.items() if not name or now.readings.get(name)))
