# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A spike: its event, and what the report says of it."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradloc.judge.sentences import ranks_looked_at

from .drills import MiniBatch, mini_batch_of
from .explanation import ended_early, explanation
from .figures import SHORT_CHARACTERS, clipped, rounded, severity, threshold_factor


@dataclass(frozen=True)
class Spike:
    """A spike, or a mini-batch that was recorded and is not known to have one.

    Attributes:
        event (Mapping): As the evidence has it.
        index (int): Its place in the order in which they were written.
        bundle (str, optional): Its bundle with options, as words of a shell.
        verdict (Mapping, optional): `cause`, `sentence` and `check`, with its bundle; None in one of an older release.
        next_command (str, optional): What measures what each remedy leaves of it, or searches a recorded one.
        level (float): The token-equivalent norm that triggered it.
        size (float): The largest culprit's norm, or without a culprit the largest token-equivalent norm.
        is_spike (bool): False where nothing was found to be over a threshold.
    """

    event: Mapping[str, Any]
    index: int
    bundle: str | None
    verdict: Mapping[str, Any] | None
    next_command: str | None
    level: float
    size: float
    is_spike: bool

    @classmethod
    def of(cls, event: Mapping[str, Any], index: int, directory: str = ".", options: str = "") -> "Spike":
        """The spike of an event.

        Args:
            event (Mapping): As the evidence has it.
            index (int): See above.
            directory (str): The directory that it is from.
            options (str): What every command on its bundle takes, as words of a shell.
        """
        bundle = bundle_of(event, directory, options)
        factor = threshold_factor(event["trigger"])
        level = float(event["threshold"]) * factor
        norms = [culprit["grad_norm"] for culprit in event["culprits"]]
        return cls(
            event,
            index,
            bundle,
            _verdict(event, bundle),
            _next_command(event, bundle),
            level,
            # The units may not be known.
            max(map(severity, norms or [level, *(unit["token_equivalent"] for unit in event["units"])])),
            factor > 1 or event["diagnosis"] not in ("unsearched", "under"),
        )

    @property
    def step(self) -> int | None:
        step: int | None = self.event["global_step"]
        return step

    @property
    def mini_batch(self) -> MiniBatch:
        return mini_batch_of(self.event)

    @property
    def ended_early(self) -> bool:
        return ended_early(self.event)

    @property
    def explanation(self) -> str | None:
        return explanation(self.event)

    @property
    def summary(self) -> str:
        return clipped(self.event["summary"]) or ""

    @property
    def opening(self) -> str:
        """What is said first of it; one of an older release has no verdict."""
        return self.summary if self.verdict is None else str(self.verdict["sentence"])

    @property
    def check(self) -> str:
        """How to check its verdict."""
        return "" if self.verdict is None else str(self.verdict["check"])

    @property
    def next_said(self) -> str:
        """The next command, unless the check has it."""
        has_it = self.next_command is None or self.next_command in self.check
        return "" if has_it else f"Next: `{self.next_command}`"

    @property
    def suspected_title(self) -> str:
        """The heading of its suspected tokens, which says whose were not looked at."""
        ranks = ranks_looked_at(self.event)
        return f"Suspected tokens{f' of {ranks}' if ranks else ''}: recorded, not measured"


def bundle_of(event: Mapping[str, Any], directory: str, options: str = "") -> str | None:
    """An event's bundle and the options, as words of a shell; None without one. For the arguments see above."""
    replay = event.get("replay")
    return shlex.quote(os.path.join(directory, replay)) + options if replay else None


def as_a_command(check: Any, bundle: str | None, without: str) -> str | None:
    """How to check a cause, with a command that works as it stands here.

    Args:
        check (Any): As the evidence has it.
        bundle (str, optional): The bundle that it is about, as words of a shell.
        without (str): What is added where it needs a bundle, and there is none.
    """
    text = str(clipped(check))
    if bundle is not None:
        text = text.replace("BUNDLE", bundle, 1)
    elif " BUNDLE" in text:
        text += without
    return clipped(text)


def _verdict(event: Mapping[str, Any], bundle: str | None) -> dict[str, Any] | None:
    verdict = event.get("verdict")
    if verdict is None:
        return None
    return {
        **rounded({name: verdict.get(name) for name in ("culprits", "ordinary")}),
        "cause": clipped(verdict["cause"], SHORT_CHARACTERS),
        "sentence": clipped(verdict["sentence"]),
        "check": as_a_command(verdict["check"], bundle, " No bundle was kept of this spike."),
    }


def _next_command(event: Mapping[str, Any], bundle: str | None) -> str | None:
    if bundle is None or event["diagnosis"] == "under":
        return None
    what = "--search" if event["diagnosis"] == "unsearched" else "--remedies"
    return clipped(f"gradloc replay {bundle} {what}")
