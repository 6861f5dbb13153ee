# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What the checks of a run have in common: how far the run is, and what they keep for its later updates."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..lines import RunWarning, Said

# Where one update cannot tell, a rule has to hold in so many.
IN_A_ROW = 3
# So many steps after a loaded checkpoint, warnings and verdicts say that there was one.
RESUME_STEPS = 3
# After a check's first sentences.
SEE = "In a checkout of GradLoc, `bash run_experiment.sh --embedded --fault {}` plants this fault."


@dataclass
class Progress:
    """How far a run is.

    Args:
        step (int, optional): The update's global step.
        rates (float): The sum of the learning rates of all optimizer steps.
        rates_before (float): The same before this update.
        last_rates (float): That of the last update with a step.
        rate (float): The largest learning rate of a step of this update.
        last_rate (float): That of the last update with a step.
        largest_rate (float): The largest one of the updates before that.
        since_resume (int, optional): 1 in the first step after a loaded checkpoint; None if none was loaded.
    """

    step: int | None = None
    rates: float = 0.0
    rates_before: float = 0.0
    last_rates: float = 0.0
    rate: float = 0.0
    last_rate: float = 0.0
    largest_rate: float = 0.0
    since_resume: int | None = None

    @property
    def last_part(self) -> float:
        """The part that the last step's learning rate has of those of all steps before this update; 1 without any."""
        return self.last_rates / self.rates_before if self.rates_before else 1.0

    @property
    def is_first(self) -> bool:
        """Whether no optimizer step was taken yet: then both engines have the same weights."""
        return not self.rates_before and self.since_resume is None


def resume_note(steps: int | None) -> str:
    """A sentence, in the first `RESUME_STEPS` steps after a loaded checkpoint; otherwise nothing."""
    return f" This is step {steps} after a checkpoint was loaded." if steps and steps <= RESUME_STEPS else ""


def said(claim: str, rest: str, check: str, evidence: str = "") -> Said:
    """What a warning or a verdict says: its sentence is the claim, the evidence in brackets, and the rest."""
    brackets = f" ({evidence})" if evidence else ""
    return {"claim": claim, "evidence": evidence, "sentence": claim + brackets + rest, "check": check}


def as_warning(name: str, claim: str, rest: str, check: str, evidence: str = "", **known: float) -> RunWarning:
    """A warning that says this, with what else is known: `share`, `factor`."""
    warning: Any = {"name": name, **said(claim, rest, check, evidence), **known}
    return warning


def said_again(found: Mapping[str, Any]) -> Said:
    """What a warning or a verdict says; where one of another release has no claim, its whole sentence is one."""
    claim, evidence = found.get("claim", found["sentence"].removesuffix(".")), found.get("evidence", "")
    return {"claim": claim, "evidence": evidence, "sentence": found["sentence"], "check": found["check"]}


class RunCheck:
    """A check of every update. `NOW` names its attributes of the update so far; the others are kept over a resume."""

    NOW: ClassVar[tuple[str, ...]] = ()

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def end_update(self) -> None:
        """Takes the update's figures into what later ones are compared with."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What later updates are compared with."""
        kept = vars(self).keys() - {"_progress", *self.NOW}
        return {name[1:]: copy.deepcopy(value) for name, value in vars(self).items() if name in kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores it; what is missing stays as it is."""
        for name in self.state_dict().keys() & state.keys():
            setattr(self, f"_{name}", copy.deepcopy(state[name]))
