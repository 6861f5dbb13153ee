# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What the embedded profile says at the end of a run: the drill's verdict, and what to do next."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .faults import FAULTS

NEXT = """\
What next:
  natural spikes of this model  bash run_experiment.sh --embedded{target} GRAD_NORM_THRESHOLD=90
  what a fault looks like       bash run_experiment.sh --embedded{target} --fault unsampled   (or {others})
  your own run                  python apply_patch.py --installed, and add to your launch command:
                                  actor_rollout_ref.actor.spike_detection=True
                                  actor_rollout_ref.actor.grad_norm_threshold=auto
                                  actor_rollout_ref.actor.bisect_dump_dir=DIRECTORY"""


@dataclass(frozen=True)
class Outcome:
    """The events that a run left behind those of earlier runs."""

    events: list[dict[str, Any]]

    @classmethod
    def of(cls, evidence: Path, start: int = 0) -> "Outcome":
        """Reads a directory of evidence; one without any has no events, and an incomplete line is left out.

        Args:
            evidence: The directory.
            start: The size of the evidence before the run.
        """
        try:
            lines = (evidence / "spikes.jsonl").read_bytes()[start:].decode(errors="replace").splitlines()
        except OSError:
            return cls([])
        return cls([event for event in _parsed(lines) if "note" not in event])

    @property
    def spikes(self) -> list[dict[str, Any]]:
        return [event for event in self.events if not event.get("drill")]

    def verdict(self, drill_step: str) -> str | None:
        """One line on the drill; None if there was to be none."""
        if drill_step == "null":
            return None
        for event in self.events:
            drill = event.get("drill")
            if drill and event["global_step"] == int(drill_step):
                passes = f"{drill['passes']} extra pass{'' if drill['passes'] == 1 else 'es'}"
                found = "found" if drill["found"] else "NOT FOUND: detection does not work here; see train.log"
                step, seconds = event["global_step"], event["seconds"]
                return f"Drill in step {step}: the planted token was {found} ({passes}, {seconds:.0f} s)"
        return f"THE DRILL OF STEP {drill_step} LEFT NO EVIDENCE, so detection was not tested: see train.log"

    def last_words(self, drill_step: str, fault: str | None, target: str | None = None) -> Iterator[str]:
        """The lines at the end of a run; `target` where the command named one."""
        yield ""
        if verdict := self.verdict(drill_step):
            yield verdict
        if fault is not None:
            yield f"The fault '{fault}' was planted on purpose: {FAULTS[fault].meaning}."
            if not self.spikes:
                yield "It did not raise any gradient over the threshold."
        others = ", ".join(name for name in FAULTS if name != "unsampled")
        yield NEXT.format(others=others, target=f" --target {target}" if target else "")


def _parsed(lines: list[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue
