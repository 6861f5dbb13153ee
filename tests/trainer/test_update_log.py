"""What rank 0 logs of an update with many spikes."""

from pathlib import Path
from typing import Any

import pytest
from notation import Caplog


def write(directory: Path, lines: list[dict[str, Any]]) -> None:
    from verl.utils.gradloc.adapters.update_evidence import UpdateEvidence

    evidence = UpdateEvidence(str(directory), None, 1)
    evidence._events = lines
    evidence.write(3, {}, list)


@pytest.mark.parametrize(("count", "lines"), [(0, 0), (1, 1), (3, 3), (4, 4), (40, 4)])
def test_few_lines_are_logged_of_an_update(count: int, lines: int, tmp_path: Path, caplog: Caplog) -> None:
    events: list[dict[str, Any]] = [
        {"global_step": 3, "summary": f"sum {index}.", "drill": {} if index == 0 else None} for index in range(count)
    ]
    write(tmp_path, events)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == lines
    assert said[:2] == ["Spike drill in step 3: sum 0.", "Gradient spike in step 3: sum 1."][:count]
    if count > 3:
        assert said[3] == f"{count - 3} more gradient spikes in step 3: see the report on {tmp_path}"


def test_clips_and_verdicts_are_logged_with_the_spikes(tmp_path: Path, caplog: Caplog) -> None:
    clips = [{"global_step": 3, "summary": "cut.", "token_clip": {"tokens": []}}] * 5
    verdict = {"cause": None, "sentence": "No known cause: that is so.", "check": "`look` shows it."}
    spikes = [{"global_step": 3, "summary": "sum.", "drill": None, "verdict": each} for each in (None, verdict)]
    write(tmp_path, [*clips, *spikes])
    assert [record.getMessage() for record in caplog.records] == [
        "Gradient spike in step 3: sum.",
        "Gradient spike in step 3: No known cause: that is so. `look` shows it. sum.",
        *["Outlying tokens in step 3: cut."] * 3,
        f"2 more mini-batches with outlying tokens in step 3: see the report on {tmp_path}",
    ]
