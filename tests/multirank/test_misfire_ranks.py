"""The rewards of a mini-batch, as the trainers of both verls give them, against a verdict's claim."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import misfire_cases
import pytest
from actors import ENGINE, Case
from valid_events import valid_events

Launch = Callable[..., list[Any]]


def events(launch: Launch, folder: Path, with_uids: bool = True) -> list[dict[str, Any]]:
    case = Case(rows=24, mini_batch=12, nested=ENGINE, planted=misfire_cases.PLANTED)
    launch(2, misfire_cases.written, case, str(folder), with_uids)
    return valid_events(f"[{','.join((folder / 'spikes.jsonl').read_text().splitlines())}]")


@pytest.mark.every_target
def test_the_reward_of_the_culprits_responses_is_named(launch: Launch, tmp_path: Path) -> None:
    found = events(launch, tmp_path)
    assert [event["mini_batch"] for event in found] == [0, 1]
    for event in found:
        assert len(event["culprits"]) == 4 and {culprit["reward"] for culprit in event["culprits"]} == {-3.0}
        verdict = event["verdict"]
        # Row 1 of rank 0 has no response, and so no advantage.
        rows = 23 if event["mini_batch"] == 0 else 24
        assert (verdict["cause"], verdict["culprits"], verdict["ordinary"]) == ("misfire", 1.0, 4 / rows)
        assert "in responses with the reward -3 (all 4 culprits in 4 prompts, " in verdict["sentence"]


def test_without_uids_the_verdict_stays(launch: Launch, tmp_path: Path) -> None:
    for event in events(launch, tmp_path, with_uids=False):
        assert event["verdict"]["cause"] == "advantage"
