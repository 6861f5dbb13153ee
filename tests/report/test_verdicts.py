"""What the report makes of verdicts, and of the warnings in steps.jsonl."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from evidence import ORDINARY, Event, culprit, event, spike, unsearched, verdict_on, write, write_steps
from notation import cases, memory_peak

from gradloc.evidence.writer import jsonable, record_step
from gradloc.judge.rules import SOURCES
from gradloc.judge.verdict import CAUSES
from gradloc.report import words
from gradloc.tools.spike import Spike

NEWER = {"cause": "stale", "culprits": 1.0, "ordinary": 1.0, "check": "`look` shows it."}
STALE = {"name": "stale", "sentence": "The rollout is behind.", "check": "`look` shows it."}


def of_a_newer_release(found: Event) -> Event:
    return {
        **found,
        "verdict": {**NEWER, "claim": "The rollout is behind", "sentence": "The rollout is behind: sync it."},
    }


def of_an_older_release(found: Event) -> Event:
    return {name: value for name, value in found.items() if name != "verdict"}


def test_one_spike_opens_with_its_verdict(show: Any) -> None:
    found = spike(3, advantage=20.0)
    lines = show(events=[found]).splitlines()
    advice = SOURCES["advantage"].advice
    assert lines[:2] == [
        "1 gradient spike in step 3: advantages are outliers (possible: true of the one culprit, and of 2% of the "
        f"other tokens): l{advice[1:]}",
        CAUSES["advantage"].check,
    ]
    # The summary stays for what it adds; the cause's action is beside its rule as well.
    assert f"3 {found['summary']}" in lines and advice in lines
    assert any(SOURCES["advantage"].meaning in line for line in lines)


def test_many_spikes_open_with_their_causes_and_the_largest(show: Any, summary: Any, view: Any) -> None:
    events = [spike(1, 800.0), spike(2, advantage=20.0), spike(3, 700.0, advantage=20.0), spike(4, 720.0)]
    events.append(of_a_newer_release(spike(5, 750.0)))
    lines = show(events=[*events, of_an_older_release(spike(7, 710.0))]).splitlines()
    assert lines[0] == (
        "6 gradient spikes in steps 1 to 7: no known cause (2), advantages are outliers (2), the rollout is behind "
        "(1), no verdict (1)."
    )
    _, many, _, where = view().lead
    assert many == "6 tokens stand out in them. The largest is "
    assert where == " in step 2, with a gradient 14× the threshold."
    assert lines[1].startswith("The largest, in step 2: advantages are outliers (possible: true of the one culprit")
    assert lines[2] == CAUSES["advantage"].check
    # The others in brief, those of an older release without a verdict.
    rows = lines[lines.index("What happened") + 2 :]
    assert rows[:3] == [
        f"2 {events[1]['summary']}",
        f"1 No known cause. {events[0]['summary']}",
        f"5 The rollout is behind. {events[4]['summary']}",
    ]
    assert f"7 {spike(7, 710.0)['summary']}" in rows
    causes = {each["claim"]: each["events"] for each in summary()["verdicts"]}
    assert causes == {"No known cause": 2, "Advantages are outliers": 2, "The rollout is behind": 1}


def test_events_without_a_verdict_open_with_their_summary(show: Any, view: Any) -> None:
    found = of_an_older_release(spike(3))
    lowered = found["summary"][0].lower() + found["summary"][1:]
    lines = show(events=[found]).splitlines()
    assert lines[0] == f"1 gradient spike in step 3: {lowered}"
    assert "What happened" not in lines and "\n".join(lines).count(lowered[1:]) == 1
    (shown,) = view().spikes
    assert (shown.content["verdict"], shown.content["check"]) == (found["summary"], "")


def test_hostile_verdicts_and_warnings_are_bounded(tmp_path: Path, show: Any, summary: Any) -> None:
    hostile = "\x1b[2J\u202e" + "x" * 10**4
    said = {**NEWER, "cause": hostile, "sentence": hostile}
    short = [{**said, "cause": f"cause {i}", "sentence": "It is: so."} for i in range(100)]
    events = [{**spike(i, 800.0), "verdict": each} for i, each in enumerate(short)]
    write(tmp_path, [*events, {**spike(200), "verdict": said | {"more": ["x" * 10**6]}}])
    warnings = [{"name": f"{i}{hostile}", "sentence": hostile, "check": hostile} for i in range(100)]
    write_steps(tmp_path, 1, {1: warnings})
    out = show()
    assert "\x1b" not in out and "\u202e" not in out and "\\x1b[2J" in out
    found = summary()
    assert len(found["verdicts"]) == len(found["warnings"]) == 64 and len(json.dumps(found)) < 10**6
    assert found["largest_events"][0]["verdict"].keys() == NEWER.keys() | {"sentence", "claim", "evidence"}


def test_the_check_names_the_bundle_of_the_event(tmp_path: Path, show: Any, view: Any) -> None:
    """And the next command is said, unless the check has it or there is none."""
    lines = show(events=[{**spike(1), "replay": "replay/it's step1"}]).splitlines()
    path = f"{tmp_path}/replay/it'\"'\"'s step1"
    assert lines[1].startswith(f"`gradloc replay '{path}' --switches` shows whether the spike comes back")
    assert lines[2] == f"Next: `gradloc replay '{path}' --remedies`"
    has_it = {**spike(2), "replay": "replay/step2"}
    has_it["verdict"] = {**has_it["verdict"], "check": "`gradloc replay BUNDLE --remedies` shows it."}
    converted = {**unsearched(4, [culprit(0, ["a"])]), "verdict": None}
    said = [shown.content["then"] for shown in view([has_it, spike(3), converted]).spikes]
    assert said[:3] == [lines[2], "", ""] and said[3].endswith("mini_batch0 --search`")


def test_a_long_check_with_many_bundles_takes_little_memory(view: Any) -> None:
    found = {**of_a_newer_release(spike(1)), "replay": "replay/" + "x" * 10**4}
    found["verdict"]["check"] = "BUNDLE " * 10**4
    with memory_peak() as peak:
        view([found])
    assert peak() < 2 * 10**7


@pytest.mark.parametrize("name", [name for name in CAUSES if name != "weight"])  # a cause of the whole gradient alone
def test_every_cause_reads_well_in_brief(name: str) -> None:
    found = event(1, [], ordinary_layer_norms=dict.fromkeys("abcde", 1.0))
    place = {"rank": 0, "micro_batch": 0, "share": 0.4, "grad_norm": 2.0, "threshold": 1.0, "advantage": 30.0}
    place |= {"weight": 0.1, "coefficient": -3.0, "kl_coefficient": -2.9, "log_prob": -0.1, "old_log_prob": -0.1}
    place |= {"entropy": 1.0, "entropy_coefficient": 9.0, "row": 1, "rollout_log_prob": -1e-4, "misplaced": True}
    sources = [{"sources": [name], "layer_norms": {"a": 9.0, "b": 0.1}, **place}] * 2
    said = verdict_on({**found, "culprits": sources}, ORDINARY)
    claim = "The layer a makes most of the gradient" if name == "layer" else CAUSES[name].claim
    sure = "possible: true of both culprits" if name == "layer" else "likely: true of both culprits, "
    assert said["cause"] == name and said["claim"] == claim
    assert words.brief(said).startswith(f"{claim} ({sure}")


def test_a_claim_on_several_events_is_true_of_all() -> None:
    found = []
    for where, value in (("rank 0, micro-batch 2", "layers.1"), ("rank 3, micro-batch 0", "lm_head")):
        claim = f"93% of the norm of {where} comes from no token's log-prob, in the layer {value}"
        found.append({**NEWER, "cause": "auxiliary", "claim": claim})
    found.append({**NEWER, "cause": "misfire", "claim": "The culprits are in responses with the reward 5"})
    assert words.in_words(words.count_causes(found), 3) == (
        "Most of the gradient comes from no token's log-prob (2), the culprits are in responses with the reward 5 (1)"
    )


@cases(
    "said brief",
    ({"claim": "Tokens: all (or not)", "evidence": "2%: few"}, "Tokens: all (or not) (2%: few)"),
    # Of a release whose verdicts have no claim, nothing is parsed: the whole sentence stands in.
    ({"sentence": "Advantages are outliers (both): look."}, "Advantages are outliers (both): look"),
)
def test_a_verdict_in_brief(said: dict[str, str], brief: str) -> None:
    found = Spike({**spike(1), "verdict": {**NEWER, "sentence": "All of it.", **said}}, 0).verdict
    assert found is not None and words.brief(found) == brief
    # After a colon a sentence begins with a small letter.
    cases = {"The KL loss": "the KL loss", "A drill": "a drill", "MTP heads": "MTP heads", "": "", "τ": "τ"}
    assert {text: words.lowered(text) for text in cases} == cases


# Warnings


def test_a_warning_is_shown_once_as_it_was_said_last(tmp_path: Path, show: Any, summary: Any, view: Any) -> None:
    other = {"name": "scale", "sentence": "The gradient is 4 times too large.", "check": "Look."}
    last = {**STALE, "sentence": "The rollout is far behind."}
    write_steps(tmp_path, 6, {2: [STALE], 3: [STALE, other], 5: [last]})
    lines = show().splitlines()
    assert lines[:4] == [
        "Warning in 3 steps, first in step 2: The rollout is far behind.",
        STALE["check"],
        "Warning in step 3: The gradient is 4 times too large.",
        "Look.",
    ]
    assert lines[4].startswith("No gradient spike in")
    when = {"first_step": 5, "steps": 1, "when": "Warning in step 5"}
    assert summary("--since", "4")["warnings"] == [{**last, **when}]
    assert view(since=4).warnings == [("Warning in step 5: The rollout is far behind.", [STALE["check"]], "")]
    # Of a step that is repeated after a resume, the last line counts.
    write_steps(tmp_path, 6, {2: [STALE], 4: [STALE]})
    record_step(str(tmp_path), None, {}, [other])
    assert [each["when"] for each in summary()["warnings"]] == ["Warning", "Warning in 2 steps, first in step 2"]


def test_the_command_of_a_warning_has_a_bundle_of_the_run(tmp_path: Path, view: Any) -> None:
    write_steps(tmp_path, 3, {2: [{**STALE, "check": "`gradloc replay BUNDLE` compares them."}]})
    ((_, (check,), _),) = view().warnings
    assert check == "`gradloc replay BUNDLE` compares them. The run has no bundle: each spike leaves one."
    spikes = [{**spike(1), "replay": "replay/step1"}, {**spike(2), "replay": "replay/it's step2"}, spike(3)]
    ((_, (check,), _),) = view(spikes).warnings
    assert check == f"`gradloc replay {shlex.quote(f'{tmp_path}/replay/it' + chr(39) + 's step2')}` compares them."


@cases(
    "written cause said",
    ({"gradloc_version": "0.1.0"}, "unlikely", ": written by GradLoc 0.1.0, and judged again by the rules of "),
    # One of version 4 lacks what its verdict was judged by.
    ({"schema": 4, "gradloc_version": "0.1.0", "comparison": None, "warnings": None}, "kl", None),
    ({}, "kl", None),
    ({"gradloc_version": "0.1.0", "verdict": {"cause": "misfire"}}, "misfire", "judged again"),  # by rows
)
def test_an_old_line_is_judged_by_the_rules_of_today(
    written: dict[str, Any], cause: str, said: str | None, summary: Any, tmp_path: Path
) -> None:
    line = spike(1, log_prob=-6.0)
    verdict = {**line["verdict"], "cause": "kl", **(written.get("verdict") or {})}
    line = {**line, **written, "verdict": verdict}
    line = {name: value for name, value in line.items() if name not in written or value is not None}
    (tmp_path / "spikes.jsonl").write_text(json.dumps(jsonable(line)) + "\n")
    found = summary()
    assert found["largest_events"][0]["verdict"]["cause"] == cause
    notes = [note for note in found["notes"] if "judged" in note]
    assert len(notes) == (said is not None) and all(said in note for note in notes)
