"""What the report makes of verdicts, and of the warnings in steps.jsonl."""

from __future__ import annotations

import json
import random
import shlex
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from evidence_samples import ORDINARY, culprit, event, unsearched, write_steps
from gradloc import record_events
from gradloc.evidence.schema import STEP, conforms
from gradloc.judge.rules import SOURCES
from gradloc.judge.sentences import in_one_line
from gradloc.judge.verdict import CAUSES, verdict
from gradloc_tools import report
from gradloc_tools.report import build, meanings, run_warnings, verdicts
from gradloc_tools.report.command import main
from gradloc_tools.report.view import json_of

NO_CAUSE = "No known cause: no rule tells the culprits from other tokens."
NEWER = {"cause": "stale", "culprits": 1.0, "ordinary": 1.0, "check": "`look` shows it."}
STALE = {"name": "stale", "sentence": "The rollout is behind.", "check": "`look` shows it."}


def spike(step: int, norm: float = 9000.0, **changes: Any) -> dict[str, Any]:
    """An event with one culprit, for which no rule holds unless it is changed."""
    generator = random.Random(step)
    usual = {"advantage": 1.0, "log_prob": -1.0, "old_log_prob": -1.0, "rollout_log_prob": -1.0, "sequence_ratio": 1.0}
    return event(step, [culprit(1, ["a", " b"], norm, generator, **usual | changes)], generator)


def of_a_newer_release(found: dict[str, Any], sentence: str = "The rollout is behind: sync it.") -> dict[str, Any]:
    return {**found, "verdict": {**NEWER, "sentence": sentence}}


def of_an_older_release(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "verdict"}


@pytest.fixture
def show(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Writes events and prints the report on tmp_path; each paragraph is a line."""
    monkeypatch.setenv("COLUMNS", "2000")

    def call(*arguments: str, events: list[dict[str, Any]] = ()) -> list[str]:
        record_events(str(tmp_path), events)
        assert main([str(tmp_path), *arguments]) == 0
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]

    yield call


def test_the_report_on_one_spike_opens_with_its_verdict(show: Any) -> None:
    found = spike(3, advantage=20.0)
    lines = show(events=[found])
    advice = SOURCES["advantage"].advice
    assert lines[:2] == [
        "1 gradient spike in step 3: advantages are outliers (possible: true of the one culprit, and of 2% of the "
        f"other tokens): l{advice[1:]}",
        CAUSES["advantage"].check,
    ]
    # The summary stays for what it adds; the cause's action is beside its rule as well.
    text = "\n".join(lines)
    assert f"3 {found['summary']}" in lines and meanings.SOURCES["advantage"] in text and advice in lines


def test_the_table_has_the_advice_on_each_source(show: Any) -> None:
    lines = show(events=[spike(3)])
    assert lines[0] == f"1 gradient spike in step 3: n{NO_CAUSE[1:]}"
    assert meanings.ADVICE["other"] in lines


def test_the_report_on_many_spikes_opens_with_the_causes_and_the_largest(show: Any) -> None:
    events = [spike(1, 800.0), spike(2, advantage=20.0), spike(3, 700.0, advantage=20.0), spike(4, 720.0)]
    events += [of_a_newer_release(spike(5, 750.0)), of_a_newer_release(spike(6, 740.0), "The rollout is 2 steps late.")]
    lines = show(events=[*events, of_an_older_release(spike(7, 710.0))])
    assert lines[0] == (
        "7 gradient spikes in steps 1 to 7: no known cause (2), advantages are outliers (2), the rollout is behind "
        "(2), no verdict (1)."
    )
    assert lines[1].startswith("The largest, in step 2: advantages are outliers (possible: true of the one culprit")
    assert lines[2] == CAUSES["advantage"].check
    # The others in brief, those of an older release without a verdict.
    rows = lines[lines.index("What happened") + 2 :]
    assert rows[0] == f"2 {events[1]['summary']}"
    assert rows[1] == f"1 No known cause. {events[0]['summary']}"
    assert rows[2] == f"5 The rollout is behind. {events[4]['summary']}"
    assert rows[3] == f"6 The rollout is 2 steps late. {events[5]['summary']}"
    assert rows[5] == f"7 {spike(7, 710.0)['summary']}"
    assert rows[6].startswith(
        "3 Advantages are outliers (possible: true of the one culprit, and of 2% of the other tokens). "
    )
    summary = json.loads("\n".join(show("--json")))
    assert summary["verdicts"] == [
        {"cause": None, "claim": "No known cause", "events": 2},
        {"cause": "advantage", "claim": "Advantages are outliers", "events": 2},
        {"cause": "stale", "claim": "The rollout is behind", "events": 2},
    ]
    assert summary["largest_events"][0]["verdict"] == events[1]["verdict"]


def test_spikes_without_a_known_cause_say_so_plainly(show: Any) -> None:
    lines = show(events=[spike(1), spike(2, 8000.0)])
    assert lines[0] == "2 gradient spikes in steps 1 to 2: no known cause (all 2)."
    assert lines[1] == f"The largest, in step 1: n{NO_CAUSE[1:]}"


def test_events_of_older_releases_open_with_their_summary(tmp_path: Path, show: Any) -> None:
    found = of_an_older_release(spike(3))
    lines = show(events=[found])
    assert lines[0] == f"1 gradient spike in step 3: {found['summary'][0].lower()}{found['summary'][1:]}"
    assert "What happened" not in lines and "\n".join(lines).count(found["summary"][1:]) == 1
    lines = show(events=[{**of_an_older_release(spike(4, 800.0)), "verdict": None}])
    assert lines[:2] == [
        "2 gradient spikes in steps 3 to 4.",
        f"The largest, in step 3: {found['summary'][0].lower()}{found['summary'][1:]}",
    ]
    spikes = build(report.read(str(tmp_path))).spikes
    assert spikes[0].content["verdict"] == found["summary"] and spikes[0].content["check"] == ""


def test_a_verdict_cannot_steer_the_terminal_or_fill_the_memory(tmp_path: Path, show: Any) -> None:
    hostile = "\x1b[2J\u202e" + "x" * 10**4
    record_events(str(tmp_path), [{**spike(1), "verdict": {**NEWER, "cause": hostile, "sentence": hostile}}])
    for i in range(100):
        name = {**NEWER, "cause": f"cause {i}", "sentence": "It is: so."}
        record_events(str(tmp_path), [{**spike(2 + i, 800.0), "verdict": name}])
    write_steps(
        tmp_path, 1, {1: [{"name": f"{i}{hostile}", "sentence": hostile, "check": hostile} for i in range(100)]}
    )
    out = "\n".join(show())
    assert "\x1b" not in out and "\u202e" not in out and "\\x1b[2J" in out
    summary = json.loads("\n".join(show("--json")))
    assert len(summary["verdicts"]) == len(summary["warnings"]) == 64 and len(json.dumps(summary)) < 10**6
    assert summary["verdict"].endswith("no verdict (37)")


def test_fields_of_a_verdict_that_are_not_known_are_left_out(tmp_path: Path, show: Any) -> None:
    found = of_a_newer_release(spike(1))
    found["verdict"] |= {"more": "x" * 10**6, "most": ["x" * 10**6], "ordinary": 0.123456789}
    summary = json.loads("\n".join(show("--json", events=[found])))
    known = {**NEWER, "sentence": "The rollout is behind: sync it.", "ordinary": 0.12346}
    assert summary["largest_events"][0]["verdict"] == known and len(json.dumps(summary)) < 10**5
    view = build(report.read(str(tmp_path)))
    assert view.spikes[0].content["verdict"] == known["sentence"] and len(json_of(view)) < 10**5


def test_the_check_names_the_bundle_of_the_event(tmp_path: Path, show: Any) -> None:
    bundle = {"replay": "replay/it's step1"}
    lines = show(events=[{**spike(1), **bundle}])
    path = f"{tmp_path}/replay/it'\"'\"'s step1"
    assert lines[1].startswith(f"`gradloc replay '{path}' --switches` shows whether the spike comes back")
    assert lines[2] == f"Next: `gradloc replay '{path}' --remedies`"
    (shown,) = build(report.read(str(tmp_path / "spikes.jsonl"))).spikes
    assert [shown.content[part] for part in ("check", "then")] == lines[1:3]


def test_a_spike_without_a_bundle_names_no_next_command_and_a_check_that_has_it_is_enough(show: Any) -> None:
    assert not any(line.startswith("Next") for line in show(events=[spike(1)]))
    check = "`gradloc replay BUNDLE --remedies` shows it."
    found = {**spike(2, 99_000.0), "replay": "replay/step2"}
    found["verdict"] = {**found["verdict"], "check": check}
    assert not any(line.startswith("Next") for line in show(events=[found]))


def test_the_next_command_searches_a_spike_that_was_only_recorded(show: Any) -> None:
    generator = random.Random(1)
    found = unsearched(1, [culprit(0, ["a"], 9000.0, generator)], generator)
    lines = show(events=[{**found, "replay": "replay/step1", "verdict": None}])
    (said,) = [line for line in lines if line.startswith("Next: `gradloc replay ")]
    assert said.endswith("replay/step1 --search`")


def test_a_long_check_with_many_bundles_takes_little_memory(tmp_path: Path) -> None:
    found = {**of_a_newer_release(spike(1)), "replay": "replay/" + "x" * 10**4}
    found["verdict"]["check"] = "BUNDLE " * 10**4
    record_events(str(tmp_path), [found])
    tracemalloc.start()
    build(report.read(str(tmp_path)))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2 * 10**7


@pytest.mark.parametrize("name", [name for name in CAUSES if name != "weight"])  # a cause of the whole gradient alone
def test_every_cause_reads_well_in_brief(name: str) -> None:
    found = event(1, [], random.Random(1), ordinary_layer_norms=dict.fromkeys("abcde", 1.0))
    place = {"rank": 0, "micro_batch": 0, "share": 0.4, "grad_norm": 2.0, "threshold": 1.0, "advantage": 30.0}
    place |= {"weight": 0.1, "coefficient": -3.0, "kl_coefficient": -2.9, "log_prob": -0.1, "old_log_prob": -0.1}
    place |= {"entropy": 1.0, "entropy_coefficient": 9.0, "row": 1, "rollout_log_prob": -1e-4}
    sources = [{"sources": [name], "layer_norms": {"a": 9.0, "b": 0.1}, **place}] * 2
    said = verdict({**found, "culprits": sources}, ORDINARY)
    claim = "The layer a makes most of the gradient" if name == "layer" else CAUSES[name].claim
    sure = "possible: true of both culprits" if name == "layer" else "likely: true of both culprits, "
    assert said["cause"] == name and verdicts.claim(said) == claim
    assert verdicts.brief(said).startswith(f"{claim} ({sure}")


def test_events_with_other_figures_have_a_claim_that_is_true_of_all() -> None:
    found = verdicts.Verdicts()
    for where, value in (("rank 0, micro-batch 2", "layers.1"), ("rank 3, micro-batch 0", "lm_head")):
        sentence = f"93% of the norm of {where} comes from no token's log-prob, in the layer {value}: look there."
        found.add({**NEWER, "cause": "auxiliary", "sentence": sentence})
    sentence = (
        "The culprits are in responses with the reward 5 (all 3 culprits in 3 prompts, 2% of the responses): read."
    )
    found.add({**NEWER, "cause": "misfire", "sentence": sentence})
    told = verdicts.in_words(found.counts(), 3)
    assert told == (
        "Most of the gradient comes from no token's log-prob (2), the culprits are in responses with the reward 5 (1)"
    )


@pytest.mark.parametrize(
    ("sentence", "said"),
    [
        ("Tokens are trained on (2% of the tokens: they follow an EOS token). Mask them.", None),
        ("Advantages are outliers (both culprits): look: there.", "Advantages are outliers (both culprits)"),
        ("An open bracket (is no reason: to go on", "An open bracket (is no reason"),
        ("At 12:30 it was late", "At 12:30 it was late"),
        ("", ""),
    ],
)
def test_a_verdict_in_brief_ends_before_what_to_do(sentence: str, said: str | None) -> None:
    assert verdicts.brief({**NEWER, "sentence": sentence}) == (sentence.removesuffix(".") if said is None else said)


def test_a_sentence_after_a_colon_begins_with_a_small_letter() -> None:
    cases = {"The KL loss": "the KL loss", "A drill": "a drill", "MTP heads": "MTP heads", "": "", "τ": "τ"}
    assert {text: verdicts.lowered(text) for text in cases} == cases


def test_log_and_trackers_get_the_verdict_before_the_summary() -> None:
    found = spike(1)
    said = found["verdict"]
    assert in_one_line(found) == f"{said['sentence']} {said['check']} {found['summary']}"
    assert in_one_line(of_an_older_release(found)) == in_one_line({**found, "verdict": None}) == found["summary"]
    assert in_one_line({"token_clip": {}, "summary": "TokenClip found a token."}) == "TokenClip found a token."


def test_two_runs_open_with_their_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    runs = [str(tmp_path / name) for name in "abc"]
    record_events(runs[0], [spike(1, advantage=20.0), spike(2)])
    record_events(runs[1], [of_an_older_release(spike(1))])
    write_steps(tmp_path / "a", 3, {2: [STALE], 3: [STALE]})
    write_steps(tmp_path / "c", 3, {})
    assert main([runs[0], runs[1]]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[:3] == [
        f"A: {runs[0]}, 2 spikes: advantages are outliers (1), no known cause (1)",
        f"B: {runs[1]}, 1 spike",
        "A: warning in 2 steps, first in step 2: The rollout is behind. `look` shows it.",
    ]
    assert main([runs[1], runs[2]]) == 0
    assert f"B: {runs[2]}, no spike\n" in capsys.readouterr().out


# Warnings


def test_a_warning_is_shown_once_at_the_top(tmp_path: Path, show: Any) -> None:
    other = {"name": "scale", "sentence": "The gradient is 4 times too large.", "check": "Look."}
    write_steps(tmp_path, 6, {2: [STALE], 3: [STALE, other], 5: [{**STALE, "sentence": "The rollout is far behind."}]})
    for line in map(json.loads, (tmp_path / "steps.jsonl").read_text().splitlines()):
        jsonschema.validate(line, STEP)
        assert conforms(line, STEP)
    lines = show(events=[spike(3)])
    # As it was said last.
    assert lines[:4] == [
        "Warning in 3 steps, first in step 2: The rollout is far behind.",
        STALE["check"],
        "Warning in step 3: The gradient is 4 times too large.",
        "Look.",
    ]
    assert lines[4].startswith("1 gradient spike in step 3")
    later = json.loads("\n".join(show("--json", "--since", "4")))
    when = {"first_step": 5, "steps": 1, "when": "Warning in step 5"}
    assert later["warnings"] == [{**STALE, "sentence": "The rollout is far behind.", **when}]
    (said,) = build(report.read(str(tmp_path), since=4)).warnings
    assert said == ("Warning in step 5: The rollout is far behind.", STALE["check"])
    assert not any(line.startswith("Warning") for line in show("--since", "6"))


def test_the_command_of_a_warning_has_a_bundle_of_the_run(tmp_path: Path) -> None:
    warning = {**STALE, "check": "`gradloc replay BUNDLE` compares them."}
    write_steps(tmp_path, 3, {2: [warning]})

    def check() -> str:
        ((_, found),) = build(report.read(str(tmp_path))).warnings
        return found

    command = "`gradloc replay {}` compares them."
    assert check() == f"{command.format('BUNDLE')} The run has no bundle: each spike leaves one."
    kept = [{**spike(1), "replay": "replay/step1"}, {**spike(2), "replay": "replay/it's step2"}, spike(3)]
    record_events(str(tmp_path), kept)
    assert check() == command.format(shlex.quote(f"{tmp_path}/replay/it's step2"))


def test_of_a_step_that_was_repeated_the_last_line_counts() -> None:
    found = run_warnings.RunWarnings()
    for step, warnings in ((1, []), (2, [STALE]), (3, [STALE]), (2, []), (3, [STALE]), (4, [STALE])):
        found.take_in(step, warnings)
    assert [(warning["first_step"], warning["steps"]) for warning in found.listed()] == [(3, 2)]
    found.take_in(3, [])
    found.take_in(4, [])
    assert found.listed() == []
    found.take_in(None, [STALE])
    assert [warning["when"] for warning in found.listed()] == ["Warning"] and found.listed(since=1) == []


def test_a_run_without_a_spike_shows_its_warnings(tmp_path: Path, show: Any) -> None:
    write_steps(tmp_path, 2, {1: [STALE], 2: [STALE]})
    lines = show()
    assert lines[0] == "Warning in 2 steps, first in step 1: The rollout is behind."
    assert lines[2].startswith("No gradient spike in")


@pytest.mark.parametrize("warnings", [7, [7], [{"name": "stale"}], [{**STALE, "check": None}]])
def test_a_malformed_warning_makes_its_line_malformed(tmp_path: Path, warnings: Any) -> None:
    write_steps(tmp_path, 2, {2: warnings})
    found = report.read(str(tmp_path))
    assert list(found.steps) == [1] and found.skipped == 1 and found.warnings.listed() == []


@pytest.mark.parametrize(
    ("steps", "spikes", "shown"), [(5, [1], False), (6, [1], True), (0, [1, 5], False), (0, [1, 6], True)]
)
def test_charts_are_for_runs_of_more_than_a_few_steps(
    tmp_path: Path, steps: int, spikes: list[int], shown: bool
) -> None:
    if steps:
        write_steps(tmp_path, steps, {})
    record_events(str(tmp_path), [spike(step) for step in spikes])
    assert bool(build(report.read(str(tmp_path))).charts) is shown
