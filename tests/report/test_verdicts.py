"""What the report makes of verdicts, and of the identities and warnings in steps.jsonl."""

import json
import shlex
from pathlib import Path
from typing import Any

from evidence import ORDINARY, Event, answer, culprit, event, spike, unsearched, warning, write, write_steps
from notation import cases, memory_peak

from gradloc.evidence.writer import jsonable, record_step
from gradloc.judge import judged
from gradloc.judge.identities import BY_NAME
from gradloc.judge.rules import SOURCES
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


def with_identities(found: Event) -> Event:
    """An event of an update in which all but one of them hold."""
    identities = answer()["identities"]
    identities["groups"] = {"state": "unchecked", "times": None, "since": None, "missing": "no prompts"}
    return judged({**found, "identities": identities})


def test_one_spike_opens_with_its_verdict(show: Any) -> None:
    found = spike(3, 900.0, sequence_ratio=1.5)
    lines = show(events=[found]).splitlines()
    rule = SOURCES["sequence"]
    assert lines[:3] == [
        "1 gradient spike in step 3: the mean importance ratios of whole responses are far from 1 (true of the only "
        "culprit, and of 2% of the other tokens).",
        rule.advice,
        rule.check,
    ]
    # The summary stays for what it adds.
    assert any(line.startswith(f"3 {found['summary']}") for line in lines)
    assert any(rule.meaning in line for line in lines) and "\n".join(lines).count(rule.advice[1:]) == 1
    short = show(short=True).splitlines()
    assert short[:3] == lines[:3] and short[3] == "The culprits" and len(short) == 7


def test_a_natural_spike_opens_with_the_identities_that_hold(show: Any, summary: Any, view: Any) -> None:
    """Of its culprits, what would be a fault is no fact, where others have it, too, or few culprits have it."""
    tokens = [culprit(i, ["a"] * 5, 9000.0 - i, log_prob=-6.0) for i in range(5)]
    for each in tokens[:4]:
        each |= {"source": "misaligned", "sources": ["misaligned", "token", "unlikely"]}
    usual = {"comparison": {"ordinary": {**ORDINARY, "misaligned": 0.7, "token": 0.7}}}
    lines = show(events=[with_identities(event(3, tokens, **usual))]).splitlines()
    held = len(BY_NAME) - 1
    claim = f"All {held} identities that could be checked hold"
    assert lines[:2] == [f"{claim} in step 3.", "groups is not checked: no prompts."]
    assert lines[2].startswith(
        f"1 gradient spike in step 3: all {held} identities that could be checked hold, and 1 could not be. A natural "
        "spike: the tokens are rare, with p < 0.05 (true of all 5 culprits, and of 2% of the other tokens)"
    )
    found = summary()
    assert found["verdicts"] == [{"cause": None, "claim": f"{claim}, and 1 could not be", "events": 1}]
    facts = [{"source": "unlikely", "culprits": 1.0, "ordinary": 0.02}]
    assert found["largest_events"][0]["verdict"]["facts"] == facts
    assert found["sources"] == {"token": 4, "unlikely": 1} and "misaligned" not in "\n".join(lines)
    made = view()
    assert [each.reasons for each in made.culprits] == [["token", "unlikely"]] * 4 + [["unlikely"]]
    assert "misaligned" not in made.spikes[0].content["summary"]
    row = next(row for row in made.tables["identities"].rows if row[0] == "groups")
    assert row[1:] == [("not checked", "no prompts"), ("", "")]


def test_many_spikes_open_with_their_causes_and_the_largest(show: Any, summary: Any, view: Any) -> None:
    events = [
        spike(1, 800.0),
        spike(2, 1200.0, sequence_ratio=2.0),
        spike(3, 700.0, sequence_ratio=2.0),
        spike(4, 720.0),
    ]
    events.append(of_a_newer_release(spike(5, 750.0)))
    lines = show(events=[*events, of_an_older_release(spike(7, 710.0))]).splitlines()
    causes = {each["claim"]: each["events"] for each in summary()["verdicts"]}
    natural, ratios, behind = events[0]["verdict"]["claim"], events[1]["verdict"]["claim"], "The rollout is behind"
    assert causes == {natural: 2, ratios: 2, behind: 1}
    said = f"{natural} (2), {ratios} (2), {behind} (1), no verdict (1)"
    assert lines[0].lower() == f"6 gradient spikes in steps 1 to 7: {said}.".lower()
    assert view().texts["lead"].lower() == f"{said}.".lower()
    assert lines[1].startswith("The largest, in step 2: the mean importance ratios of whole responses are far from 1")
    assert lines[2:4] == [SOURCES["sequence"].advice, SOURCES["sequence"].check]
    # The others in brief, natural ones and those of an older release without a verdict.
    rows = lines[lines.index("What happened in the spikes") + 2 :]
    said = [
        f"2 {events[1]['summary']}",
        f"1 {events[0]['summary']}",
        f"5 The rollout is behind. {events[4]['summary']}",
        f"7 {spike(7, 710.0)['summary']}",
    ]
    assert all(any(row.startswith(text) for row in rows) for text in said)
    short = show(short=True).splitlines()
    assert short[:4] == lines[:4] and short[4] == "The spikes" and short[6].endswith(" tokens sequence")
    assert len(short) == 6 + 6 + 1 and short[-1].startswith("More: --all")


def test_spikes_from_one_cause_say_it_once(show: Any) -> None:
    events = [spike(step, 1200.0, sequence_ratio=2.0) for step in (1, 2, 4)]
    lines = show(events=events, short=True).splitlines()
    rule = SOURCES["sequence"]
    assert lines[0].startswith("3 gradient spikes in steps 1 to 4, all from one cause: the mean importance ratios")
    assert lines[1:4] == [rule.advice, rule.check, "The spikes"] and "\n".join(lines).count(rule.advice[1:]) == 1


def test_what_the_verdict_says_is_no_warning_as_well(tmp_path: Path, show: Any) -> None:
    broken = warning("stale_weights", "rollout_log_probs", 3)
    events = [judged({**spike(step), "warnings": [broken], "replay": f"replay/{step}"}) for step in (3, 4)]
    write_steps(tmp_path, 4, {3: [broken], 4: [broken, warning("loss")]})
    lines = show(events=events, short=True).splitlines()
    assert "The run has stale_weights" not in "".join(lines[1:3])
    assert lines[1] == "loss is broken in steps 3 to 4: The run has loss."
    assert lines[3].startswith(
        "2 gradient spikes in steps 3 to 4, all from one cause: the data path is broken: the run has stale_weights"
    )
    assert sum("stale_weights is broken" in line or "(stale_weights) is" in line for line in show().splitlines()) == 1


def test_events_without_a_verdict_open_with_their_summary(show: Any, view: Any) -> None:
    found = of_an_older_release(spike(3))
    lowered = found["summary"][0].lower() + found["summary"][1:]
    lines = show(events=[found]).splitlines()
    assert lines[0] == f"1 gradient spike in step 3: {lowered}"
    assert "\n".join(show(short=True).splitlines()).count(lowered[1:]) == 1
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
    names = {"cause", "facts", "sentence", "claim", "evidence", "check"}
    assert found["largest_events"][0]["verdict"].keys() == names


def test_the_check_names_the_bundle_of_the_event(tmp_path: Path, show: Any, view: Any) -> None:
    """And the next command is said, unless the check has it or there is none."""
    found = spike(1)
    found["verdict"]["check"] = "Look."
    lines = show(events=[{**found, "replay": "replay/it's step1"}]).splitlines()
    path = f"{tmp_path}/replay/it'\"'\"'s step1"
    assert lines[1] == "Look."
    assert lines[2] == f"Next: `gradloc replay '{path}' --remedies`"
    has_it = {**spike(2), "replay": "replay/step2"}  # a natural one
    converted = {**unsearched(4, [culprit(0, ["a"])]), "verdict": None}
    said = [shown.content["then"] for shown in view([has_it, spike(3), converted]).spikes]
    assert said[:3] == [lines[2], "", ""] and said[3].endswith("mini_batch0 --search`")


def test_a_long_check_with_many_bundles_takes_little_memory(view: Any) -> None:
    found = {**of_a_newer_release(spike(1)), "replay": "replay/" + "x" * 10**4}
    found["verdict"]["check"] = "BUNDLE " * 10**4
    with memory_peak() as peak:
        view([found])
    assert peak() < 2 * 10**7


def test_what_is_said_of_several_events_is_true_of_all() -> None:
    found = []
    for where in ("rank 0, micro-batch 2", "rank 3, micro-batch 0"):
        claim = f"93% of the norm of {where} comes from no token's log-prob"
        found.append({**NEWER, "cause": "auxiliary", "claim": claim})
    for held in (9, 9, 9, 8):
        found.append({**NEWER, "cause": None, "claim": f"All {held} identities that could be checked hold"})
    assert words.in_words(words.count_causes(found), 7) == (
        "All 9 identities that could be checked hold (3), auxiliary (2), all 8 identities that could be checked hold "
        "(1), no verdict (1)"
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
    cases |= {"TokenClip fits best": "TokenClip fits best", "NaN or Inf": "NaN or Inf", "`a` is NaN": "`a` is NaN"}
    assert {text: words.lowered(text) for text in cases} == cases


# Identities


def test_a_run_opens_with_what_is_broken(tmp_path: Path, show: Any, summary: Any, view: Any) -> None:
    """Also without a spike: first what is broken now, then what was, then what changed; each once."""
    stale = [warning("stale_weights", "rollout_log_probs", 3, times=3.0 * step) for step in range(8)]
    mixed = warning("mixed_groups", "groups", 7, times=None, check="`gradloc replay BUNDLE` compares them.")
    warnings = {4: [stale[4]], 5: [stale[5]], 6: [warning("loss")], 7: [mixed], 8: [mixed]}
    write_steps(tmp_path, 7, warnings)
    changed = {"what": "rate", "now": 4e-6, "before": 1e-6, "sentence": "In step 8, the learning rate is 4e-06."}
    last = answer([mixed], [changed])
    last["identities"]["reference"] = {"state": "unchecked", "times": None, "since": None, "missing": "no log-probs"}
    record_step(str(tmp_path), 8, {}, last)
    record_step(str(tmp_path), 9, {}, last)  # lasts
    held = len(BY_NAME) - 2
    assert show().splitlines()[:10] == [
        f"{held} of {held + 1} identities hold in step 9. Broken: groups.",
        "reference is not checked: no log-probs.",
        "groups (mixed_groups) is broken in steps 7 to 9: The run has mixed_groups.",
        "`gradloc replay BUNDLE` compares them. The run has no bundle: each spike leaves one.",
        "rollout_log_probs (stale_weights) was broken in steps 3 to 5: The run has stale_weights.",
        "Look.",
        "loss was broken in steps 3 to 6: The run has loss.",
        "Look.",
        "In step 8, the learning rate is 4e-06.",
        f"No gradient spike in {tmp_path}.",
    ]
    found = summary()
    assert found["identities"]["states"]["groups"]["state"] == "broken" and found["changes"] == [changed["sentence"]]
    assert [each["name"] for each in found["warnings"]] == ["mixed_groups", "stale_weights", "loss"]
    made = view()
    assert made.warnings[-1] == (changed["sentence"], [], "change") and made.identities[0].startswith(f"{held} of")
    assert ("groups", BY_NAME["groups"].holds) in made.help
    rows = {row[0]: row for row in made.tables["identities"].rows}
    assert rows["groups"][1] == ("broken", "mixed_groups in steps 7 to 9")
    assert rows["loss"][1] == ("holds", "broken in steps 3 to 6")
    line, end = rows["rollout_log_probs"][2]
    heights = [float(point.split(",")[1]) for point in line.split()]
    assert len(heights) == 9 and heights[4] < heights[3] < heights[2] == heights[8] and end == ""
    # Earlier steps are left out.
    lines = show("--since", "8").splitlines()
    assert lines[2].startswith("groups") and lines[4].startswith("In step 8") and len(heights) == 9
    assert not view(since=10).identities and "identities" not in view(since=10).tables


def test_an_identity_that_was_off_for_a_step_is_told(tmp_path: Path, show: Any, view: Any) -> None:
    for step, times in ((1, 8.0), (2, 3.9), (3, 0.5)):
        of_step = answer()
        of_step["identities"]["sampled"]["times"] = times
        record_step(str(tmp_path), step, {}, of_step)
    hold = f"All {len(BY_NAME)} identities hold in step 3."
    said = "sampled was off, but not broken: 8 times the usual in step 1."
    assert show().splitlines()[:2] == [hold, said]
    row = next(row for row in view().tables["identities"].rows if row[0] == "sampled")
    assert row[1] == ("holds", "8 times the usual in step 1")
    assert said not in show("--since", "2")


def test_a_run_in_which_all_identities_hold_says_so(tmp_path: Path, show: Any, view: Any) -> None:
    write_steps(tmp_path, 2)
    assert show().splitlines()[0] == f"All {len(BY_NAME)} identities hold in step 2."
    assert not view().warnings
    record_step(str(tmp_path), 3, {})  # nothing has checked it
    out = show()
    assert out.startswith(f"All {len(BY_NAME)} identities hold in step 2.")
    assert "in step 3: nothing has checked the run" in out
    none = answer()
    none["identities"] = dict.fromkeys("ab", {"state": "unchecked", "times": None, "since": None, "missing": "no uid"})
    record_step(str(tmp_path), 4, {}, none)
    said = ["No identity could be checked in step 4.", "a is not checked: no uid.", "b is not checked: no uid."]
    assert show().splitlines()[:3] == said == view().identities


def test_a_spike_is_judged_by_what_later_steps_have_found(tmp_path: Path, show: Any, view: Any) -> None:
    """It takes some updates to tell that an identity is broken."""
    late = warning("stale_weights", "rollout_log_probs", 3)
    write_steps(tmp_path, 6, {5: [late], 6: [late]})
    write(tmp_path, [with_identities(spike(step)) for step in (2, 4)])
    before, after = view().spikes
    assert before.content["verdict"].startswith("All ")
    assert after.content["verdict"].startswith("The data path is broken: the run has stale_weights")
    assert "in step 4: a verdict is by what later steps have found to be broken." in show()


def test_an_identity_that_breaks_again_is_told_with_all_its_steps(tmp_path: Path, show: Any) -> None:
    broken = {step: [warning("loss", since=since)] for step, since in ((2, 1), (3, 1), (6, 6), (9, 8), (10, 8))}
    write_steps(tmp_path, 10, broken)
    assert show().splitlines()[1] == "loss is broken in steps 1 to 3, 6, 8 to 10: The run has loss."
    write_steps(tmp_path, 32, {step: [warning("loss", since=step)] for step in range(2, 32, 2)})
    assert show().splitlines()[1].startswith("loss was broken in steps 2, …, 18, 20, 22, 24, 26, 28, 30: ")


def test_a_warning_is_shown_once_as_it_was_said_last(tmp_path: Path, show: Any, summary: Any, view: Any) -> None:
    other = {"name": "scale", "sentence": "The gradient is 4 times too large.", "check": "Look."}
    last = {**STALE, "sentence": "The rollout is far behind."}

    def record(step: int | None, *warnings: Event) -> None:
        of_step = answer(warnings)
        of_step["identities"] = {}
        record_step(str(tmp_path), step, {}, of_step)

    for step, warnings in enumerate(([], [STALE], [STALE, other], [], [last], []), 1):
        record(step, *warnings)
    lines = show().splitlines()
    assert lines[:4] == [
        "Warning in steps 2, 3, 5: The rollout is far behind.",
        STALE["check"],
        "Warning in step 3: The gradient is 4 times too large.",
        "Look.",
    ]
    assert lines[4].startswith("No gradient spike in")
    when = {"first_step": 5, "steps": 1, "when": "Warning in step 5"}
    assert summary("--since", "4")["warnings"] == [{**last, **when}]
    assert view(since=4).warnings == [("Warning in step 5: The rollout is far behind.", [STALE["check"]], "")]
    # Of a step that is repeated after a resume, the last line counts.
    for step, warnings in enumerate(([], [STALE], [], [STALE], [], []), 1):
        record(step, *warnings)
    record(None, other)
    assert [each["when"] for each in summary()["warnings"]] == ["Warning", "Warning in steps 2, 4"]


def test_the_command_of_a_warning_has_a_bundle_of_the_run(tmp_path: Path, view: Any) -> None:
    write_steps(tmp_path, 3, {2: [{**STALE, "check": "`gradloc replay BUNDLE` compares them."}]})
    ((_, (check,), _),) = view().warnings
    assert check == "`gradloc replay BUNDLE` compares them. The run has no bundle: each spike leaves one."
    spikes = [{**spike(1), "replay": "replay/step1"}, {**spike(2), "replay": "replay/it's step2"}, spike(3)]
    ((_, (check,), _),) = view(spikes).warnings
    assert check == f"`gradloc replay {shlex.quote(f'{tmp_path}/replay/it' + chr(39) + 's step2')}` compares them."


# Older lines


def test_older_lines_show_what_they_have(tmp_path: Path, show: Any, summary: Any, view: Any) -> None:
    """Of a release that knew no identities: its verdicts, also without a cause, and its warnings."""
    culprits = [{**spike(1)["culprits"][0], "source": "misaligned", "sources": ["misaligned"]}]
    unknown = {"cause": None, "culprits": None, "ordinary": None, "check": "Look.", "sentence": "No known cause: look."}
    misfire = {"cause": "misfire", "culprits": 1.0, "ordinary": 0.1, "check": "Look.", "data_source": None}
    misfire |= {"claim": "The culprits are in responses with the reward 5", "evidence": "likely: true of both"}
    misfire |= {"sentence": "The culprits are in responses with the reward 5 (likely: true of both): look."}
    lines = [
        {**spike(1), "schema": 4, "verdict": {**unknown, "claim": "No known cause"}},
        {**event(2, culprits), "verdict": misfire},
    ]
    with open(tmp_path / "spikes.jsonl", "w") as file:
        for line in lines:
            bare = {name: value for name, value in line.items() if name != "identities"}
            file.write(json.dumps(jsonable(bare)) + "\n")
    step = {"schema": 5, "time": "2026-03-01T00:00:00+00:00", "global_step": 2, "warnings": [STALE]}
    figures = "threshold token_norm_max spike_margin ratio_max rollout_ratio_max unlikely_share triggered".split()
    (tmp_path / "steps.jsonl").write_text(json.dumps({**step, **dict.fromkeys(figures)}) + "\n")
    found = summary()
    assert found["skipped_lines"] == 0 and found["identities"] is None and found["changes"] == []
    assert [each["verdict"]["cause"] for each in found["largest_events"]] == [None, "misfire"]
    assert found["sources"] == {"other": 1, "misaligned": 1}
    lines = show().splitlines()
    assert lines[0] == "Warning in step 2: The rollout is behind."
    assert lines[2] == (
        "2 gradient spikes in steps 1 to 2: no known cause (1), the culprits are in responses with the reward 5 (1)."
    )
    made = view()
    said = [(each.content["verdict"], each.content["advice"]) for each in made.spikes]
    assert said == [(unknown["sentence"], ""), (misfire["sentence"].replace(": look.", "."), "Look.")]
    assert "identities" not in made.tables and not made.identities
