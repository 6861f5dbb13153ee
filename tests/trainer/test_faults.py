"""Runs with a fault planted on purpose: each is told by its evidence. Also that runs repeat themselves."""

from pathlib import Path
from typing import Any

import pytest
from runs import ROOT, finished

from tools.launcher.faults import FAULTS

REWARDS = [f"custom_reward_function.path={ROOT}/tests/trainer/varied_rewards.py"]
# A random model finds all tokens equally unlikely, so that their norms are alike: some are over these thresholds.
THRESHOLDS = {"unsampled": "3", "advantage": "30", "bitflip": "30", "stale": "3", "nan": "1000"}
CHANGES_IN_EACH_RUN = {"time", "seconds", "uid"}


def with_fault(name: str, directory: Path) -> tuple[str, list[dict[str, Any]]]:
    return finished(directory, "--fault", name, f"GRAD_NORM_THRESHOLD={THRESHOLDS[name]}", *REWARDS)


def repeated(value: Any) -> Any:
    """The evidence without what is another in each run."""
    if isinstance(value, dict):
        return {name: repeated(part) for name, part in value.items() if name not in CHANGES_IN_EACH_RUN}
    return [repeated(part) for part in value] if isinstance(value, list) else value


def sources(events: list[dict[str, Any]]) -> set[str]:
    return {culprit["source"] for event in events for culprit in event["culprits"]}


@pytest.fixture(scope="module")
def advantage(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    return with_fault("advantage", tmp_path_factory.mktemp("advantage"))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_by_its_evidence(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    printed, events = request.getfixturevalue(name) if name == "advantage" else with_fault(name, tmp_path / "out")
    assert f"FAULT '{name}' IS PLANTED IN THIS RUN ON PURPOSE" in printed
    assert events and {event["fault"] for event in events} == {name}
    print([(event["diagnosis"], event.get("summary"), [c["source"] for c in event["culprits"]]) for event in events])


def test_the_same_command_finds_the_same_culprits(advantage: tuple[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    _, again = with_fault("advantage", tmp_path / "out")
    assert repeated(again) == repeated(advantage[1])
