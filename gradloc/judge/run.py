# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A run, update by update: collects what the ranks have summed up, and says which identities hold."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..facts import NAMES, TrainedRow
from ..levels import GAP, LEVEL, SAME
from ..lines import Answer, IdentityState, RunRecords, RunWarning
from .changes import changes
from .forms import Form
from .identities import BY_NAME, Found, check, may_be_late, measured
from .readings import COLUMNS, Layers, of_layers, of_rows, of_tokens
from .records import Record, Streak, as_state, from_state, latest
from .said import said

# So many steps after a loaded checkpoint, warnings say that there was one.
RESUME_STEPS = 3


class Run:
    """Collects the sums of a run's mini-batches; on rank 0."""

    def __init__(self) -> None:
        self._begin([], None)

    def _begin(self, records: list[Record], since_resume: int | None) -> None:
        self._records, self._since_resume = records, since_resume
        self._layers_before: Layers | None = None
        self._start(None)

    def start_update(self, global_step: int | None, rollout_is_current: bool = False) -> None:
        """Begins an update; `rollout_is_current`: the policy's own weights sampled, which are not late."""
        if self._has_sums:
            self._records = latest([*self._records, self._present()])
            self._layers_before = self._layers
        if self._since_resume is not None:
            self._since_resume += 1
        self._start(global_step, rollout_is_current)

    def _start(self, global_step: int | None, rollout_is_current: bool = False) -> None:
        self._step, self._is_current, self._rate, self._has_sums = global_step, rollout_is_current, 0.0, False
        self._sums = [0.0] * len(NAMES)
        self._layers: Layers | None = None
        self._rows: list[TrainedRow] = []

    def take_in(self, facts: Sequence[float]) -> None:
        """Adds a mini-batch: what `own_facts` returned, added up over the ranks."""
        self._sums = [a + b for a, b in zip(self._sums, facts, strict=True)]
        self._has_sums = True

    def take_in_layers(self, *layers: Any) -> None:
        """Sets what is known of the layers: the fields of `Layers`."""
        self._layers = Layers(*layers)

    def take_in_rows(self, rows: Sequence[TrainedRow]) -> None:
        """Adds the update's rows, those of rank 0."""
        self._rows = [*rows]

    def add_step(self, learning_rate: float) -> None:
        """Adds an optimizer step that is taken."""
        self._rate += learning_rate

    def answer(self, at_once: bool = False) -> Answer:
        """What is known of the update so far: its identities, what is broken, and what has changed.

        Args:
            at_once (bool): Whether one update is enough for what otherwise has to last.
        """
        records = [*self._records, self._present(at_once)]
        found = check(records)
        states: dict[str, IdentityState] = {name: _state(each) for name, each in found.items()}
        warnings = [self._warning(name, each, each.form) for name, each in found.items() if each.form is not None]
        if may_be_late(records):
            states["rollout_log_probs"]["late"] = True
        changed = changes(records)
        news = [
            *self._first_news(states),
            *_news(records[-1:] if self._since_resume == 1 else records, warnings, states),
            *(each["sentence"] for each in changed),
        ]
        return {"identities": states, "warnings": warnings, "changes": changed, "news": news}

    def _first_news(self, states: Mapping[str, IdentityState]) -> list[str]:
        """What is checked, in the first update, and in the first one after a resume."""
        if self._since_resume != 1 and (self._records or self._since_resume is not None):
            return []
        missing = {name: each["missing"] for name, each in states.items() if each["state"] == "unchecked"}
        cannot = "; ".join(f"{name} ({why})" for name, why in missing.items())
        of_others = f"; it cannot check {len(missing)}: {cannot}." if missing else "."
        return [f"GradLoc checks {len(states) - len(missing)} identities of every update{of_others}"]

    def _warning(self, name: str, found: Found, form: Form) -> RunWarning:
        state = _state(found)
        since = "" if found.since is None else f" since step {found.since}"
        evidence = f"{times_in_words(found.times or 0.0)} the usual{since}"
        identity = BY_NAME[name]
        rest = f". In every healthy update, {identity.holds}. {form.look}".rstrip()
        if self._since_resume and self._since_resume <= RESUME_STEPS:
            rest += f" This is step {self._since_resume} after a checkpoint was loaded."
        warning: Any = {
            **{"name": form.name, "identity": name, "since": found.since, "times": state["times"]},
            **said(form.claim, rest, identity.check, evidence),
        }
        column = found.residual.partition(".")[0]
        more = {"column": column if column in COLUMNS else None, "factor": form.factor}
        return warning | {key: value for key, value in more.items() if value is not None}

    def _present(self, at_once: bool = False) -> Record:
        """The record of the update so far."""
        before = self._records[-1] if self._records else None
        has_moved = self._since_resume is not None or any(each.rate for each in self._records)
        now = of_tokens(dict(zip(NAMES, self._sums, strict=True))) | of_rows(self._rows)
        if self._layers is not None:
            now |= of_layers(self._layers, self._layers_before, 0.0 if before is None else before.rate)
        now |= {"has_moved": float(has_moved), "rollout.is_current": float(self._is_current)}
        if self._rate or before is not None:
            now["rate"] = self._rate
        first = self._records[0] if self._records else Record(readings=now)
        # A reference that agrees with the rollout is right, and training is not.
        gaps = [first.readings[name] for name in ("reference.gap", "rollout.distance") if name in first.readings]
        if first.is_first and "reference.gap" in first.readings and not min(gaps) < LEVEL * SAME * has_moved:
            now["reference.first_gap"] = min(gaps)  # what only the first update tells
        nothing_moves = now.get("weights.still", 0.0) >= now.get("weights.layers", math.inf)
        if nothing_moves or not has_moved:
            now.pop("reference.same", None)
        now |= _jump(before, now)
        return measured([*self._records, Record(self._step, now)], at_once)

    def state_dict(self) -> RunRecords:
        """What later updates are compared with, for any number of ranks."""
        return as_state([*self._records, *([self._present()] if self._has_sums else [])])

    def load_state_dict(self, state: RunRecords | None) -> None:
        """Restores `state_dict` after a resume; with None (no saved state) the next step is the first one seen."""
        self._begin([] if state is None else from_state(state), 0)


def _news(records: Sequence[Record], warnings: Sequence[RunWarning], states: Mapping[str, IdentityState]) -> list[str]:
    """What has broken since the update before, or holds again."""
    was = {name for name, streak in records[-2].streaks.items() if streak.is_broken} if len(records) > 1 else set()
    broken = [f"{each['sentence']} {each['check']}" for each in warnings if each["identity"] not in was]
    return broken + [f"The identity {name} holds again." for name in sorted(was) if states[name]["state"] == "held"]


def of_one_step(facts: Sequence[float], rows: Sequence[TrainedRow] = (), is_first: bool = False) -> Answer:
    """Which identities hold in one step, of which nothing before is known.

    Args:
        facts (Sequence[float]): What `own_facts` returned.
        is_first (bool): Whether no optimizer step was taken before it.
    """
    run = Run()
    if not is_first:
        run.load_state_dict(None)
    run.take_in(facts)
    run.take_in_rows(rows)
    return run.answer(at_once=True)


def _jump(before: Record | None, now: Mapping[str, float]) -> dict[str, float]:
    """How many times as far from the reference the policy is as its updates can have taken it.

    If the rollout agrees with the policy, the reference has moved; else training's log-probs are wrong.
    """
    if before is None and not now["has_moved"]:
        before = Record(readings={"reference.gap": 0.0})
    if before is None or not ("reference.gap" in before.readings and "reference.gap" in now):
        return {}
    gap, known = before.readings["reference.gap"], before.readings.get("reference.known", math.inf)
    is_off = any(before.streaks.get(name, Streak()).score for name in ("rollout_log_probs", "reference"))
    known = (known if is_off and gap > 2 * known else max(gap, GAP)) + before.moved
    agrees = "step.gap" in before.readings and now.get("rollout.gap", math.inf) < now["reference.gap"] / LEVEL
    return {"reference.known": known, f"{'reference' if agrees else 'policy'}.jump": now["reference.gap"] / known}


def times_in_words(times: float) -> str:
    """How many times the usual a residual is."""
    return f"{times:.3g} times" if times < 1e6 else "over a million times"


def _state(found: Found) -> IdentityState:
    times = None if found.times is None or math.isinf(found.times) else found.times
    return {"state": found.state, "times": times, "since": found.since, "missing": found.missing}
