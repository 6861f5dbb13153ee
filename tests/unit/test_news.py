"""What the log of rank 0 says of identities, update by update."""

from pathlib import Path
from typing import Any

from notation import Caplog

from gradloc.adapters.update_evidence import UpdateEvidence
from gradloc.facts import NAMES
from gradloc.judge.run import Run

ACTOR, CRITIC = {"actor/gradloc/triggered": 0.0}, {"gradloc/triggered": 0.0}


def test_a_log_says_what_is_checked_once_for_each_actor_and_never_for_a_critic(tmp_path: Path, caplog: Caplog) -> None:
    trained: list[tuple[dict[str, float], Run, UpdateEvidence]] = [
        (metrics, Run(), UpdateEvidence(str(tmp_path / name), None, 1))
        for name, metrics in (("actor", ACTOR), ("other", ACTOR), ("critic", CRITIC))
    ]

    def update(step: int) -> None:
        for metrics, run, evidence in trained:
            run.start_update(step)
            if metrics is ACTOR:
                run.take_in([0.0] * len(NAMES))
            evidence.write(step, metrics, lambda _, run=run: run.answer())

    for step in (1, 2, 3):
        update(step)
    assert [said[: said.index(" identities")] for said in caplog.messages] == ["Step 1: GradLoc checks 2"] * 2
    for _, run, _ in trained:  # as a resume does
        run.load_state_dict(run.state_dict())
    for step in (4, 5):
        update(step)
    assert [said[:20] for said in caplog.messages[2:]] == ["Step 4: GradLoc chec"] * 2


def test_a_log_says_the_news_of_an_update(tmp_path: Path, caplog: Caplog) -> None:
    evidence = UpdateEvidence(str(tmp_path), None, 1)
    answer: Any = {"identities": {}, "warnings": [], "changes": [], "news": ["One.", "Two."]}
    evidence.write(7, ACTOR, lambda _: answer)
    evidence.write(8, ACTOR, lambda _: None)  # nothing has checked it
    assert caplog.messages == ["Step 7: One.", "Step 7: Two."]
