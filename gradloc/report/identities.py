# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What is said first: which identities hold, what is or was broken, and what has changed."""

from collections.abc import Collection, Mapping
from typing import Any

from ..judge.identities import BY_NAME
from ..judge.run import times_in_words
from ..levels import LASTS, LEVEL
from ..tools.figures import SHORT_CHARACTERS, TEXT_CHARACTERS, clipped, short, shown, visible
from ..tools.reading import Evidence
from ..tools.spike import as_a_command
from .view import Cell, Remark, sparkline

# How many warnings are told apart, changes and spans of steps are shown, and points of a line drawn.
_WARNINGS, _CHANGES, _SPANS, _POINTS = 64, 8, 8, 100
HINT = (
    f"How far each is off, in times of what is usual in this run, from 0.1 to {LEVEL**LASTS:g} or more: "
    f"{LEVEL**LASTS:g} times break an identity at once, {LEVEL:g} times in {LASTS} updates."
)
_STATES = {"held": "holds", "broken": "broken", "unchecked": "not checked"}


def identities_of(evidence: Evidence) -> dict[str, Any] | None:
    """The `step` in which identities were checked last, their `states`, and these in words; None without any.

    In words: `claim`, that is how many hold and which are broken; and which were `off` at times.
    """
    states, step = evidence.identities, evidence.checked_in
    if not states:
        return None
    claim = held_and_broken(states, None if step is None else f"step {step}")
    return {"step": step, "claim": claim, "off": _off_at_times(evidence), "states": states}


def said_of(found: Mapping[str, Any] | None) -> list[str]:
    """What `identities_of` returned in sentences; none without identities."""
    if found is None:
        return []
    missing = {name: state["missing"] for name, state in found["states"].items() if state["state"] == "unchecked"}
    unchecked = [f"{name} is not checked: {why}." for name, why in missing.items()]
    off = [f"{name} was off, but not broken: {how}." for name, how in found["off"].items()]
    return [found["claim"], *unchecked, *off]


def held_and_broken(states: Mapping[str, Mapping[str, Any]], where: str | None) -> str:
    """How many hold, and which are broken, `where` they were checked."""
    held, broken, unchecked = ([name for name in states if states[name]["state"] == state] for state in _STATES)
    there = "" if where is None else f" in {where}"
    if broken:
        return f"{len(held)} of {len(held) + len(broken)} identities hold{there}. Broken: {', '.join(broken)}."
    if held:
        return f"All {len(held)} identities {'that could be checked ' if unchecked else ''}hold{there}."
    return f"No identity could be checked{there}."


def _off_at_times(evidence: Evidence) -> dict[str, str]:
    """By identity that was off in a step, but not for long enough to be broken in any: how far, and when."""
    warned, found = _warnings_by_step(evidence), {}
    for name, of_steps in evidence.times.items():
        known = ((x or 0.0, -step) for step, x in of_steps.items() if step is not None)
        times, step = max(known, default=(0.0, 0))
        if name not in warned and times >= LEVEL:
            found[name] = f"{times_in_words(times)} the usual in step {-step}"
    return found


def warnings_of(evidence: Evidence) -> list[dict[str, Any]]:
    """The warnings of the steps and the critic's spikes, each identity or name once: first what is broken now.

    Returns:
        list[dict]: `identity`, if it is of one, `name`, and as it was said last `sentence` and `check`; `first_step`
            (None if unknown), `steps` (how many), and these in words as `when`.
    """
    said = _warnings_by_step(evidence)
    now = [name for name, state in evidence.identities.items() if state["state"] == "broken"]
    found = []
    for key in sorted(said, key=lambda key: now.index(key) if key in now else len(now))[:_WARNINGS]:
        by_step = said[key]
        last = by_step[[*by_step][-1]]
        name = str(clipped(last["name"], SHORT_CHARACTERS))
        what = "Warning"
        if "identity" in last:
            what = f"{key}{'' if name == key else f' ({name})'} {'is' if key in now else 'was'} broken"
        found.append(
            {
                **({"identity": key} if "identity" in last else {}),
                "name": name,
                "sentence": clipped(last["sentence"]),
                "check": as_a_command(last["check"], evidence.bundle, " The run has no bundle: each spike leaves one."),
                "first_step": next((step for step in by_step if step is not None), None),
                "steps": len(by_step),
                "when": what + _in_steps(by_step),
            }
        )
    return found


def remarks_of(evidence: Evidence, said: Collection[str] = ()) -> list[Remark]:
    """What is or was broken, with how to check it, and what has changed; `said`: what a verdict says as well."""
    found: list[Remark] = []
    for each in warnings_of(evidence):
        kind = "said" if each.get("identity", each["name"]) in said else ""
        found.append((visible(f"{each['when']}: {each['sentence']}"), [visible(each["check"])], kind))
    return [*found, *((visible(sentence), [], "change") for sentence in changes_of(evidence))]


def _warnings_by_step(evidence: Evidence) -> dict[str, dict[int | None, Mapping[str, Any]]]:
    """The warnings by identity, or by name where they have none, and by step."""
    said: dict[str, dict[int | None, Mapping[str, Any]]] = {}
    for step, warnings in sorted(evidence.warnings.items(), key=_in_order):
        for warning in warnings:
            key = str(clipped(warning.get("identity", warning["name"]), SHORT_CHARACTERS))
            said.setdefault(key, {})[step] = warning
    return said


def _in_order(pair: tuple[int | None, Any]) -> int:
    return -1 if pair[0] is None else pair[0]


def _in_steps(by_step: Mapping[int | None, Mapping[str, Any]]) -> str:
    """From which step to which something was broken, by the warnings of these steps; the first and the last spans."""
    ends = {warning.get("since", step): step for step, warning in by_step.items() if step is not None}
    spans = [str(end) if since in (None, end) else f"{since} to {end}" for since, end in ends.items()]
    if len(spans) > _SPANS:
        spans[1 : 1 - _SPANS] = ["…"]
    several = len(spans) > 1 or " " in "".join(spans)
    return f" in step{'s' * several} {', '.join(spans)}" if spans else ""


def changes_of(evidence: Evidence) -> list[str]:
    """The last changes, each as a sentence with its step: one that lasts is told once."""
    found: list[str] = []
    before: set[str] = set()
    for _, changes in sorted(evidence.changes.items(), key=_in_order):
        found += [str(clipped(change["sentence"])) for change in changes if change["what"] not in before]
        before = {change["what"] for change in changes}
    return found[-_CHANGES:]


def identity_rows(evidence: Evidence) -> list[tuple[str, str, str, str, Cell, str]]:
    """What is known of each identity: a part of each row is shown, by the page and by `gradloc check`.

    What holds; its name; its state; how many times the usual it is off; the same over the run, as a line; when it was
    off, or why it is not checked.
    """
    warned, off = _warnings_by_step(evidence), _off_at_times(evidence)
    rows = []
    for name, state in evidence.identities.items():
        told = off.get(name)
        if name in warned:
            form = [*warned[name].values()][-1]["name"]
            told = ("broken" if form == name else form) + _in_steps(warned[name])
        rows.append(
            (
                BY_NAME[name].holds if name in BY_NAME else "–",
                visible(name),
                _STATES[state["state"]],
                short(evidence.times[name][evidence.checked_in]),
                _line(evidence, name),
                shown("; ".join(filter(None, [told, state["missing"]])), TEXT_CHARACTERS),
            )
        )
    return rows


def _line(evidence: Evidence, name: str) -> Cell:
    """How far an identity was off, over the run."""
    values = [times for step, times in sorted(evidence.times[name].items(), key=_in_order) if step is not None]
    size = -(-len(values) // _POINTS) or 1
    spans = ([each for each in values[i : i + size] if each is not None] for i in range(0, len(values), size))
    most = [max(of_span, default=None) for of_span in spans]
    return sparkline(most, evidence.identities[name]["state"] == "broken" and bool(most), 0.1, LEVEL**LASTS)
