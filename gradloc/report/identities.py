# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The top of the report: which identities hold, what is or was broken, and what has changed."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..judge.identities import BY_NAME
from ..judge.run import times_in_words
from ..levels import LASTS, LEVEL
from ..tools.figures import SHORT_CHARACTERS, TEXT_CHARACTERS, clipped, short, shown, visible
from ..tools.reading import Evidence
from ..tools.spike import as_a_command
from .view import Cell, Column, Table, sparkline

States = Mapping[str, Mapping[str, Any]]
# How many warnings are told apart, changes and spans of steps are shown, and points of a line drawn.
_WARNINGS, _CHANGES, _SPANS, _POINTS = 64, 8, 8, 100
# The critic's spikes as a warning.
_CRITIC, _CHECK_CRITIC = (
    "critic",
    "Each spike of the critic is a line of `critic.jsonl`, with its layers and the largest errors.",
)
HINT = (
    f"How far each is off, in times of what is usual in this run, from 0.1 to {LEVEL**LASTS:g} or more: "
    f"{LEVEL**LASTS:g} times break an identity at once, {LEVEL:g} times in {LASTS} updates."
)
_STATES = {"held": "holds", "broken": "broken", "unchecked": "not checked"}


def identities_of(evidence: Evidence) -> dict[str, Any] | None:
    """The `step` in which identities were checked last, their `states`, and these in words; None without any.

    In words: `sentence`, which begins with `claim`, that is how many hold and which are broken.
    """
    if not evidence.identities or not evidence.has(evidence.checked_in):
        return None
    states = {
        str(clipped(name, SHORT_CHARACTERS)): {**state, "missing": clipped(state["missing"], SHORT_CHARACTERS)}
        for name, state in evidence.identities.items()
    }
    claim = _claim(states, evidence.checked_in)
    sentence = " ".join(filter(None, [claim, _not_checked(states), _off_at_times(evidence)]))
    return {"step": evidence.checked_in, "claim": claim, "sentence": sentence, "states": states}


def _claim(states: States, step: int | None) -> str:
    """How many hold, and which are broken."""
    held, broken, unchecked = ([name for name in states if states[name]["state"] == state] for state in _STATES)
    where = "" if step is None else f" in step {step}"
    if broken:
        off = [f"{name} ({_since(states[name])}{_times(states[name])} the usual)" for name in broken]
        return f"{len(held)} of {len(held) + len(broken)} identities hold{where}. Broken: {'; '.join(off)}."
    if held:
        return f"All {len(held)} identities {'that could be checked ' if unchecked else ''}hold{where}."
    return f"No identity could be checked{where}."


def _not_checked(states: States) -> str:
    why = [f"{name} ({state['missing']})" for name, state in states.items() if state["state"] == "unchecked"]
    return f"Not checked: {'; '.join(why)}." if why else ""


def _off_at_times(evidence: Evidence) -> str:
    """Which identities were off in a step, but not for long enough to be broken in any."""
    warned, found = _warnings_by_step(evidence), []
    for name, of_steps in evidence.times.items():
        known = [
            (x, -step) for step, x in of_steps.items() if step is not None and x is not None and evidence.has(step)
        ]
        times, step = max(known, default=(0.0, 0))
        if name not in warned and times >= LEVEL:
            found.append(f"{clipped(name, SHORT_CHARACTERS)} ({times_in_words(times)} the usual in step {-step})")
    return f"Off at times, but not broken: {'; '.join(found)}." if found else ""


def _since(state: Mapping[str, Any]) -> str:
    return "" if state["since"] is None else f"since step {state['since']}, "


def _times(state: Mapping[str, Any]) -> str:
    return times_in_words(math.inf if state["times"] is None else float(state["times"]))


def warnings_of(evidence: Evidence) -> list[dict[str, Any]]:
    """The warnings of the steps and the critic's spikes, each identity or name once: first what is broken now.

    Returns:
        list[dict]: `name`, and as it was said last `sentence` and `check`; `first_step` (None if unknown), `steps` (how
            many), and these in words as `when`.
    """
    said = _warnings_by_step(evidence)
    now = [name for name, state in evidence.identities.items() if state["state"] == "broken"]
    found = []
    for key in sorted(said, key=lambda key: now.index(key) if key in now else len(now))[:_WARNINGS]:
        by_step = said[key]
        last, first = by_step[[*by_step][-1]], next((step for step in by_step if step is not None), None)
        check = as_a_command(last["check"], evidence.bundle, " The run has no bundle: each spike leaves one.")
        name = str(clipped(last["name"], SHORT_CHARACTERS))
        if "identity" in last:
            when = f"{key}{'' if name == key else f' ({name})'}"
            spans = _spans(by_step)
            if key not in now:
                when += f" was broken {_in_steps(spans)}"
            else:
                when += " is broken" + (f", and was {_in_steps(spans[:-1])}" if spans[1:] else "")
        else:
            when = "Warning"
            if first is not None:
                several = f"{len(by_step):,} steps, first in step {first}"
                when += f" in {several if len(by_step) > 1 else f'step {first}'}"
        text = {"name": name, "sentence": clipped(last["sentence"]), "check": check}
        found.append({**text, "first_step": first, "steps": len(by_step), "when": when})
    return found


def _warnings_by_step(evidence: Evidence) -> dict[str, dict[int | None, Mapping[str, Any]]]:
    """The warnings by identity, or by name where they have none, and by step."""
    pairs = [(step, warning) for step, warnings in evidence.warnings.items() for warning in warnings]
    pairs += [
        (spike["global_step"], {"name": _CRITIC, "sentence": spike["summary"], "check": _CHECK_CRITIC})
        for spike in evidence.critic
    ]
    said: dict[str, dict[int | None, Mapping[str, Any]]] = {}
    for step, warning in sorted(pairs, key=lambda pair: -1 if pair[0] is None else pair[0]):
        if evidence.has(step):
            key = str(clipped(warning.get("identity", warning["name"]), SHORT_CHARACTERS))
            said.setdefault(key, {})[step] = warning
    return said


def _spans(by_step: Mapping[int | None, Mapping[str, Any]]) -> list[str]:
    """From which step to which something was broken, by the warnings of these steps; the last eight."""
    ends = {warning.get("since", step): step for step, warning in by_step.items() if step is not None}
    return [str(end) if since in (None, end) else f"{since} to {end}" for since, end in [*ends.items()][-_SPANS:]]


def _in_steps(spans: Sequence[str]) -> str:
    return f"in step{'s' * (len(spans) > 1 or ' ' in ''.join(spans))} {', '.join(spans)}" if spans else "in a step"


def changes_of(evidence: Evidence) -> list[str]:
    """The last changes, each as a sentence with its step: one that lasts is told once."""
    found: list[str] = []
    before: set[str] = set()
    for step in sorted(filter(evidence.has, evidence.changes), key=lambda step: -1 if step is None else step):
        changes = evidence.changes[step]
        found += [str(clipped(change["sentence"])) for change in changes if change["what"] not in before]
        before = {change["what"] for change in changes}
    return found[-_CHANGES:]


def identities_table(evidence: Evidence) -> Table:
    """The state of each identity, over the run and at its end."""
    columns = (
        Column("Identity", "row"),
        Column("State"),
        Column("Times the usual", "num"),
        Column("Over the run", "spark"),
        Column("When broken, or why not checked"),
    )
    warned = _warnings_by_step(evidence)
    rows: list[Sequence[Cell]] = []
    for name, state in evidence.identities.items():
        times_of = evidence.times[name]
        of_steps = sorted((step, times) for step, times in times_of.items() if step is not None)
        values = [times for step, times in of_steps if evidence.has(step)]
        size = -(-len(values) // _POINTS) or 1
        most = [max(filter(None, values[i : i + size]), default=None) for i in range(0, len(values), size)]
        why = f"Broken {_in_steps(_spans(warned[name]))}." if name in warned else ""
        rows.append(
            [
                (BY_NAME[name].holds if name in BY_NAME else "–", visible(name)),
                _STATES[state["state"]],
                short(times_of[evidence.checked_in]),
                sparkline(most, state["state"] == "broken" and bool(most), 0.1, LEVEL**LASTS),
                shown(" ".join(filter(None, [state["missing"], why])), TEXT_CHARACTERS),
            ]
        )
    return Table("", columns, rows)
