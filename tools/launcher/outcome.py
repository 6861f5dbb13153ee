# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What is said at the end of a run: the drill's verdict, and in the embedded profile what to do next."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import profiles
from .faults import FAULTS
from .log import say

NEXT = """\
What next:
  natural spikes of this model  bash run_experiment.sh --embedded{options} GRAD_NORM_THRESHOLD=90
  what a fault looks like       bash run_experiment.sh --embedded{options} --fault {example}   (or {others})
  your own run                  {install}, and add to your launch command:
                                  {keys}"""

OF_PATCH = "python apply_patch.py --installed"
OF_PLUGIN = "python -m pip install '.[report]'"
KEYS = (
    "actor_rollout_ref.actor.spike_detection=True",
    "actor_rollout_ref.actor.bisect_dump_dir=DIRECTORY",
)


# The files of a directory of evidence: their names begin with these words.
SPIKES, STEPS = "spikes", "steps"


def sizes(evidence: Path) -> dict[str, int]:
    """The size in bytes of all files of events, and of all files of steps."""
    return {name: sum(file.stat().st_size for file in _files(evidence, name)) for name in (SPIKES, STEPS)}


@dataclass(frozen=True)
class Outcome:
    """What a run has added to a directory of evidence.

    Args:
        spikes: The number of spikes.
        clips: The number of lines about what TokenClip found.
        drills: The events of drills.
        steps: Whether there are figures of steps.
    """

    spikes: int
    clips: int
    drills: list[dict[str, Any]]
    steps: bool

    @classmethod
    def of(cls, evidence: Path, before: Mapping[str, int] | None = None) -> "Outcome":
        """Reads a directory of evidence; it may be missing, incomplete lines are left out, and a disk error is told.

        Args:
            evidence: The directory.
            before: Its `sizes` before the run; None for an empty one.
        """
        start = before or {SPIKES: 0, STEPS: 0}
        spikes, clips, drills = 0, 0, []
        try:
            for event in _parsed(_lines(evidence, SPIKES, start[SPIKES])):
                if event.get("drill"):
                    drills.append(event)
                elif "token_clip" in event:
                    clips += 1
                elif "note" not in event:
                    spikes += 1
        except OSError as error:
            say(f"The evidence cannot be read: {error}")
        return cls(spikes, clips, drills, steps=sizes(evidence)[STEPS] > start[STEPS])

    @property
    def has_evidence(self) -> bool:
        return bool(self.spikes or self.clips or self.drills or self.steps)

    def verdict(self, drill_step: str) -> str:
        """One line on the drill that was to be in a step."""
        for event in self.drills:
            drill = event["drill"]
            if event["global_step"] == int(drill_step):
                passes = f"{drill['passes']} extra pass{'' if drill['passes'] == 1 else 'es'}"
                found = "found" if drill["found"] else "NOT FOUND: detection does not work here; see the log"
                step, seconds = event["global_step"], event["seconds"]
                return f"Drill in step {step}: the planted token was {found} ({passes}, {seconds:.0f} s)"
        return f"THE DRILL OF STEP {drill_step} LEFT NO EVIDENCE, so detection was not tested: see the log"

    def last_words(
        self, drill_step: str, fault: str | None, target: str | None = None, plugin: bool = False
    ) -> Iterator[str]:
        """The lines at the end of a run; `target` where the command named one."""
        yield ""
        if drill_step != "null":
            yield self.verdict(drill_step)
        if fault is not None:
            yield f"The fault '{fault}' was planted on purpose: {FAULTS[fault].meaning}."
            if not self.spikes:
                yield "It did not raise any gradient over the threshold."
        example, *others = (name for name in FAULTS if name != fault)
        yield NEXT.format(
            options=(f" --target {target}" if target else "") + " --plugin" * plugin,
            example=example,
            others=", ".join(others),
            install=OF_PLUGIN if plugin else OF_PATCH,
            keys=f"\n{' ' * 34}".join((*profiles.PLUGIN, *KEYS) if plugin else KEYS),
        )


def _files(evidence: Path, name: str) -> list[Path]:
    """name.1.jsonl, name.2.jsonl, ... and name.jsonl, which is the newest."""
    numbers = [number for file in evidence.glob(f"{name}.*.jsonl") if (number := file.name.split(".")[1]).isdecimal()]
    names = [f"{name}.{number}.jsonl" for number in sorted(numbers, key=int)] + [f"{name}.jsonl"]
    return [file for name in names if (file := evidence / name).is_file()]


def _lines(evidence: Path, name: str, start: int) -> Iterator[bytes]:
    """The lines after the first bytes of all files together."""
    for file in _files(evidence, name):
        size = file.stat().st_size
        if start < size:
            with open(file, "rb") as lines:
                lines.seek(start)
                yield from lines
        start = max(start - size, 0)


def _parsed(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue
