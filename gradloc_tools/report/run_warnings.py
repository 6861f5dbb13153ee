# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The warnings in steps.jsonl and the critic's spikes, each name once: a warning may be in every step of a run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .figures import clipped
from .spikes import as_a_command

# At most so many names are told apart.
_NAMES = 64
_NAME_CHARACTERS = 200
# Under this name the report has the critic's spikes.
CRITIC_SPIKES = "critic"
_CHECK_CRITIC = "Each spike of the critic is a line of `critic.jsonl`, with its layers and the largest errors."


@dataclass
class RunWarnings:
    """Warnings by name.

    Attributes:
        said (dict): By name, the warning as it was last said.
        steps (dict): By name, the steps in which it was said.
    """

    said: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    steps: dict[str, set[int | None]] = field(default_factory=dict)

    def take_in(self, step: int | None, warnings: Iterable[Mapping[str, Any]]) -> None:
        """Adds a line's warnings. Of a step with several lines, as a resumed run leaves them, the last counts."""
        if step is not None:
            for steps in self.steps.values():
                steps.discard(step)
        for warning in warnings:
            self._add(step, warning)

    def take_in_critic(self, spike: Mapping[str, Any]) -> None:
        """Adds a spike of the critic."""
        said = {"name": CRITIC_SPIKES, "sentence": spike["summary"], "check": _CHECK_CRITIC}
        self._add(spike["global_step"], said)

    def _add(self, step: int | None, warning: Mapping[str, Any]) -> None:
        name = str(clipped(warning["name"], _NAME_CHARACTERS))
        if name in self.said or len(self.said) < _NAMES:
            self.said[name] = {"name": name, **{key: clipped(warning[key]) for key in ("sentence", "check")}}
            self.steps.setdefault(name, set()).add(step)

    def listed(self, since: int | None = None, bundle: str | None = None) -> list[dict[str, Any]]:
        """The warnings, the first one first.

        Args:
            since (int, optional): Leave out earlier steps.
            bundle (str, optional): A bundle of the run for their checks, as words of a shell.

        Returns:
            list[dict]: `name`, `sentence`, `check`, `first_step` (None if unknown), `steps` (how many), and the last
                two in words as `when`.
        """
        found = []
        for name, warning in self.said.items():
            steps = {step for step in self.steps[name] if since is None or (step is not None and step >= since)}
            if steps:
                first = min((step for step in steps if step is not None), default=None)
                when = _when(first, len(steps))
                check = as_a_command(warning["check"], bundle, " The run has no bundle: each spike leaves one.")
                found.append({**warning, "check": check, "first_step": first, "steps": len(steps), "when": when})
        return sorted(found, key=lambda warning: -1 if warning["first_step"] is None else warning["first_step"])


def _when(first: int | None, steps: int) -> str:
    if first is None:
        return "Warning"
    return f"Warning in step {first}" if steps == 1 else f"Warning in {steps:,} steps, first in step {first}"
