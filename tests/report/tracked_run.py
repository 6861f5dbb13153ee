"""Logs five steps to verl's loggers, with a spike in the second, a spike and a drill in the third, as a run would.

In the fourth, TokenClip stops a spike; in the fifth, it only finds a token.

python tracked_run.py FOLDER LOGGERS SPIKE_LOG [SITE_PACKAGES]

LOGGERS are verl's names with commas between. SPIKE_LOG is the key's value in JSON. SITE_PACKAGES come last in Python's
search.
"""

import json
import sys

sys.path += sys.argv[4:]

from evidence import clip, clipped_token, culprit, drill, event, marked
from verl.utils.tracking import Tracking

from gradloc import record_events


def main(folder: str, loggers: list[str], spike_log: bool | str | None) -> None:
    dump = f"{folder}/bisect_dump"
    tokens = [" the", " <think>", " a|b\n", " ends"]
    old = event(9, [culprit(2, [" of", " an", " earlier", " run"], 900.0)])
    first = event(2, [culprit(1, tokens, 9000.0), culprit(2, tokens, 7000.0, reward=None)])
    second = event(3, [culprit(3, tokens, float("nan"), rank=1)])
    record_events(dump, [marked(old)])
    actor = {"spike_detection": True, "spike_log": spike_log, "bisect_dump_dir": dump}
    config = {"trainer": {}, "actor_rollout_ref": {"actor": actor}}
    tracking = Tracking("project", "experiment", loggers, config)
    tracking.log({"val/score": 0.0}, 0)
    tracking.log({"actor/gradloc/triggered": 0.0}, 1)
    record_events(dump, [marked(first)])
    tracking.log({"actor/gradloc/triggered": 1.0}, 2)
    record_events(dump, [marked(drill(3, True)), marked(second)])
    tracking.log({"actor/gradloc/triggered": 1.0, "actor/gradloc/drill_found": 1.0}, 3)
    for step, action in ((4, "drop"), (5, "log")):
        record_events(dump, [marked(clip(step, [clipped_token(1, tokens, 33.0)], action))])
        tracking.log({"actor/token_clip/over": 1.0}, step)
    # Here, because a thread of a library may hold the last reference to it, and SwanLab ends in the main thread only.
    tracking.__del__()
    tracking.logger.clear()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","), json.loads(sys.argv[3]))
