# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A spike of the evidence: what is said of it, and the commands on its bundle."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..judge.rules import SOURCES
from ..judge.said import claim_of
from .command_line import in_shell
from .figures import SHORT_CHARACTERS, clipped, count, rounded, severity, threshold_factor

# A mini-batch: its step, PPO epoch and index.
MiniBatch = tuple[int | None, int, int]


def mini_batch_of(event: Mapping[str, Any]) -> MiniBatch:
    return event["global_step"], event["epoch"], event["mini_batch"]


@dataclass(frozen=True)
class Spike:
    """A spike, or a mini-batch that was converted and is not known to have one."""

    event: Mapping[str, Any]  # as the evidence has it
    index: int  # its place in the order in which they were written
    directory: str = "."  # that it is from
    options: Sequence[str] = ()  # what every command on its bundle takes

    @cached_property
    def bundle(self) -> str | None:
        """Its bundle with options, as words of a shell."""
        return bundle_of(self.event, self.directory, self.options)

    @cached_property
    def verdict(self) -> Mapping[str, Any] | None:
        """The event's verdict, with the bundle in `check`; None if it has none."""
        verdict = self.event.get("verdict")
        if verdict is None:
            return None
        # A verdict of an older release may have a sentence alone.
        said = {"evidence": "", **verdict, "claim": claim_of(verdict)}
        return {
            "facts": rounded(verdict.get("facts", [])[: len(SOURCES)]),
            "cause": clipped(verdict["cause"], SHORT_CHARACTERS),
            **{name: clipped(said[name]) for name in ("claim", "evidence", "sentence")},
            "check": as_a_command(verdict["check"], self.bundle, " No bundle was kept of this spike."),
        }

    @cached_property
    def next_command(self) -> str | None:
        """The command that measures each remedy, or searches a converted spike; None without a bundle."""
        if self.bundle is None or self.event["diagnosis"] == "under":
            return None
        what = "--search" if self.event["diagnosis"] == "unsearched" else "--remedies"
        return clipped(f"gradloc replay {self.bundle} {what}")

    @cached_property
    def level(self) -> float:
        """The token-equivalent norm that triggered it."""
        return float(self.event["threshold"]) * threshold_factor(self.event["trigger"])

    @cached_property
    def size(self) -> float:
        """The largest culprit's norm, or without a culprit the largest token-equivalent norm."""
        norms = [culprit["grad_norm"] for culprit in self.event["culprits"]]
        # The units may not be known.
        return max(map(severity, norms or [self.level, *(unit["token_equivalent"] for unit in self.event["units"])]))

    @property
    def is_spike(self) -> bool:
        """False where nothing was found to be over a threshold."""
        return threshold_factor(self.event["trigger"]) > 1 or self.event["diagnosis"] not in ("unsearched", "under")

    @property
    def step(self) -> int | None:
        step: int | None = self.event["global_step"]
        return step

    @property
    def mini_batch(self) -> MiniBatch:
        return mini_batch_of(self.event)

    @property
    def summary(self) -> str:
        return clipped(self.event["summary"]) or ""

    @property
    def opening(self) -> str:
        """The first sentence on the spike: its verdict's, or its summary."""
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
        return f"Suspected tokens{f' of {ranks}' if ranks else ''}: not measured"


def ranks_looked_at(event: Mapping[str, Any]) -> str | None:
    """Whose tokens a converted event's suspected ones were chosen from; None if they were every rank's."""
    ranks = event.get("suspected_ranks")
    if ranks is None or not (others := event["world_size"] - len(ranks)):
        return None
    return f"rank {', '.join(map(str, ranks))} ({count(others, 'other rank')} not looked at)"


def bundle_of(event: Mapping[str, Any], directory: str, options: Sequence[str] = ()) -> str | None:
    """An event's bundle and the options, as words of a shell; None without one. For the arguments see `Spike`."""
    replay = event.get("replay")
    return in_shell(os.path.join(directory, replay), *options) if replay else None


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
