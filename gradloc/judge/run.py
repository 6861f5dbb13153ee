# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A run, update by update: collects what the ranks have summed up, and says which identities hold."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..facts import NAMES, TrainedRow
from ..lines import Answer, IdentityState, RunRecords, RunWarning
from .forms import Form
from .identities import BY_NAME, Found, check, may_be_late, measured
from .readings import COLUMNS, Layers, of_layers, of_rows, of_tokens, with_reference
from .records import MOST_RECORDS, Record, as_state, changes, from_state
from .said import said

# So many steps after a loaded checkpoint, warnings say that there was one.
RESUME_STEPS = 3


class Run:
    """Collects the sums of a run's mini-batches; on rank 0. `has_moved`: optimizer steps were taken before."""

    def __init__(self, has_moved: bool = False) -> None:
        self._has_moved = has_moved
        self._records: list[Record] = []
        self._since_resume: int | None = None
        self._layers_before: Layers | None = None
        self._start(None)

    def _start(self, global_step: int | None, rollout_is_current: bool = False) -> None:
        self._step, self._is_current, self._has_sums = global_step, rollout_is_current, False
        self._rate: float | None = None  # there is no step so far
        self._sums = [0.0] * len(NAMES)
        self._layers: Layers | None = None
        self._rows: Sequence[TrainedRow] = ()

    def start_update(self, global_step: int | None, rollout_is_current: bool = False) -> None:
        """Begins an update; `rollout_is_current`: the policy's own weights sampled, which are not late."""
        if self._has_sums:
            self._records.append(self._present())
            self._layers_before = self._layers
            if len(self._records) > MOST_RECORDS:
                del self._records[1]
        if self._since_resume is not None:
            self._since_resume += 1
        self._start(global_step, rollout_is_current)

    def take_in(self, facts: Sequence[float]) -> None:
        """Adds a mini-batch: what `own_facts` returned, added up over the ranks."""
        self._sums = [a + b for a, b in zip(self._sums, facts, strict=True)]
        self._has_sums = True

    def take_in_layers(self, *layers: Any) -> None:
        """Sets what is known of the layers: the fields of `Layers`."""
        self._layers = Layers(*layers)

    def take_in_rows(self, rows: Sequence[TrainedRow]) -> None:
        """Adds the update's rows, those of rank 0."""
        self._rows = rows

    def add_step(self, learning_rate: float) -> None:
        """Adds an optimizer step that is taken."""
        self._rate = (self._rate or 0.0) + learning_rate

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
        news = [*self._news(states, warnings), *(each["sentence"] for each in changed)]
        return {"identities": states, "warnings": warnings, "changes": changed, "news": news}

    def _news(self, states: Mapping[str, IdentityState], warnings: Sequence[RunWarning]) -> list[str]:
        """What is checked, in a first update, also after a resume; then what breaks, and what holds again."""
        begins = self._since_resume == 1 or (self._since_resume is None and not self._records)
        before = {} if begins or not self._records else self._records[-1].streaks
        was_broken = {name for name, streak in before.items() if streak.is_broken}
        missing = [f"{name} ({each['missing']})" for name, each in states.items() if each["state"] == "unchecked"]
        cannot = f"; it cannot check {len(missing)}: {'; '.join(missing)}" if missing else ""
        checked = f"GradLoc checks {len(states) - len(missing)} identities of every update{cannot}."
        return [
            *[checked] * begins,
            *(f"{each['sentence']} {each['check']}" for each in warnings if each["identity"] not in was_broken),
            *(f"The identity {name} holds again." for name in sorted(was_broken) if states[name]["state"] == "held"),
        ]

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
        before = self._records
        has_moved = self._has_moved or self._since_resume is not None or any(each.rate for each in before)
        now = of_tokens(dict(zip(NAMES, self._sums, strict=True))) | of_rows(self._rows)
        now |= {"has_moved": float(has_moved), "rollout.is_current": float(self._is_current)}
        if self._rate is not None:
            now["rate"] = self._rate
        if self._layers is not None:
            now |= of_layers(self._layers, self._layers_before, before[-1].rate if before else 0.0)
        return measured([*before, Record(self._step, with_reference(now, before))], at_once)

    def state_dict(self) -> RunRecords:
        """What later updates are compared with, for any number of ranks."""
        return as_state([*self._records, *([self._present()] if self._has_sums else [])])

    def load_state_dict(self, state: RunRecords | None) -> None:
        """Restores `state_dict` after a resume; with None (no saved state) the next step is the first one seen."""
        self._records, self._since_resume = [] if state is None else from_state(state), 0
        self._layers_before = None
        self._start(None)


def of_one_step(facts: Sequence[float], rows: Sequence[TrainedRow] = (), is_first: bool = False) -> Answer:
    """Which identities hold in one step, by what `own_facts` returned; `is_first`: no step was taken before it."""
    run = Run(has_moved=not is_first)
    run.take_in(facts)
    run.take_in_rows(rows)
    return run.answer(at_once=True)


def times_in_words(times: float) -> str:
    """How many times the usual a residual is."""
    return f"{times:.3g} times" if times < 1e6 else "over a million times"


def _state(found: Found) -> IdentityState:
    times = None if found.times is None or math.isinf(found.times) else found.times
    return {"state": found.state, "times": times, "since": found.since, "missing": found.missing}
