"""Logs seven steps to verl's loggers, with a spike in the second, a spike and a drill in the third, as a run would.

In the fourth, TokenClip stops a spike; in the fifth, it only finds a token. In the sixth an identity breaks, without a
spike, and in the seventh it holds again.

python tracked_run.py FOLDER LOGGERS SPIKE_LOG [SITE_PACKAGES]

LOGGERS are verl's names with commas between. SPIKE_LOG is the key's value in JSON. SITE_PACKAGES come last in Python's
search.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

sys.path += sys.argv[4:]

from evidence import answer, clip, clipped_token, culprit, drill, event, marked, warning
from verl.utils.tracking import Tracking

from gradloc import record_events
from gradloc.evidence.writer import record_step


def main(folder: str, loggers: list[str], spike_log: bool | str | None) -> None:
    dump = f"{folder}/bisect_dump"
    tokens = [" the", " <think>", " a|b\n", " ends"]
    old = event(9, [culprit(2, [" of", " an", " earlier", " run"], 900.0)])
    first = event(2, [culprit(1, tokens, 9000.0), culprit(2, tokens, 7000.0, reward=None)])
    second = event(3, [culprit(3, tokens, float("nan"), rank=1)])
    record_events(dump, [marked(old)])
    record_step(dump, 9, {"token_norm_max": 900.0}, answer([warning("groups", since=9)]))
    actor = {"spike_detection": True, "spike_log": spike_log, "bisect_dump_dir": dump}
    config = {"trainer": {}, "actor_rollout_ref": {"actor": actor}}
    tracking = Tracking("project", "experiment", loggers, config)

    def log(step: int, metrics: dict[str, float], *lines: Any, warnings: Sequence[Any] = ()) -> None:
        record_events(dump, [marked(line) for line in lines])
        record_step(dump, step, {"token_norm_max": 9.0}, answer(warnings))
        tracking.log({"actor/gradloc/checked": 1.0} | metrics, step)

    tracking.log({"val/score": 0.0}, 0)
    log(1, {"actor/gradloc/triggered": 0.0})
    log(2, {"actor/gradloc/triggered": 1.0}, first)
    log(3, {"actor/gradloc/triggered": 1.0, "actor/gradloc/drill_found": 1.0}, drill(3, True), second)
    for step, action in ((4, "drop"), (5, "log")):
        log(step, {"actor/token_clip/over": 1.0}, clip(step, [clipped_token(1, tokens, 33.0)], action))
    log(
        6,
        {},
        warnings=[warning("stale_weights", "rollout_log_probs", since=5, claim="", sentence="Weights <are> old.")],
    )
    log(7, {})
    # Here, because a thread of a library may hold the last reference to it, and SwanLab ends in the main thread only.
    tracking.__del__()
    tracking.logger.clear()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","), json.loads(sys.argv[3]))
