"""Runs with a fault planted on purpose: each is told by its evidence. Also that runs repeat themselves."""

import re
from pathlib import Path
from typing import Any

import pytest
from runs import ROOT, finished

from tools.launcher.faults import FAULTS

REWARDS = [f"custom_reward_function.path={ROOT}/tests/trainer/varied_rewards.py"]
# A random model finds all tokens equally unlikely, so that their norms are alike: some are over these thresholds.
THRESHOLDS = {"unsampled": "3", "advantage": "30", "bitflip": "3", "stale": "3", "nan": "1000"}
CHANGED = {"stale": ["LR=0.01"]}
CHANGES_IN_EACH_RUN = {"time", "seconds", "uid"}


def with_fault(name: str, directory: Path) -> tuple[str, list[dict[str, Any]]]:
    return finished(
        directory, "--fault", name, f"GRAD_NORM_THRESHOLD={THRESHOLDS[name]}", *CHANGED.get(name, []), *REWARDS
    )


def repeated(value: Any) -> Any:
    """The evidence without what is another in each run."""
    if isinstance(value, dict):
        return {name: repeated(part) for name, part in value.items() if name not in CHANGES_IN_EACH_RUN}
    return [repeated(part) for part in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def advantage(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    return with_fault("advantage", tmp_path_factory.mktemp("advantage"))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_by_its_evidence(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    printed, events = request.getfixturevalue(name) if name == "advantage" else with_fault(name, tmp_path / "out")
    assert f"FAULT '{name}' IS PLANTED IN THIS RUN ON PURPOSE" in printed
    assert events and {event["fault"] for event in events} == {name}
    culprits = [culprit for event in events for culprit in event["culprits"]]
    match name:
        case "unsampled":
            appended = [culprit for culprit in culprits if culprit["source"] == "unsampled"]
            assert appended and {culprit["token"] for culprit in appended} == {"<|im_end|>"}
        case "advantage":
            assert {event["global_step"] for event in events} == {2}
            assert {culprit["source"] for culprit in culprits} == {"advantage"}
            assert 100.0 in {culprit["reward"] for culprit in culprits}
        case "nan":
            (culprit,) = culprits
            assert (culprit["source"], culprit["advantage"]) == ("nonfinite", "NaN")
        case "stale":
            # A random model's ratios stay within the rules' limits. Where nothing is stale, these are 1 up to rounding.
            first = [event for event in events if event["mini_batch"] == 0 and event["global_step"] >= 4]
            assert first
            for event in first:
                assert max(abs(culprit["rollout_ratio"] - 1) for culprit in event["culprits"]) > 0.05
        case "bitflip":
            # A flip moves a random model little, since its small weights cannot become larger than 2. What is tested
            # here is that one weight of one rank changes, once.
            log = (tmp_path / "out/train.log").read_text()
            assert len(re.findall(r"planted on purpose: bit \d+ of weight \d+ of model\.layers\.1\.", log)) == 1


def test_the_same_command_finds_the_same_culprits(advantage: tuple[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    _, again = with_fault("advantage", tmp_path / "out")
    assert repeated(again) == repeated(advantage[1])
