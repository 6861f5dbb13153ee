# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The faults that --fault plants in the embedded profile; embedded/faults.py is what plants them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import Refused


@dataclass(frozen=True)
class Fault:
    """A fault that a run can be given on purpose.

    Args:
        meaning: What goes wrong, for people.
        settings: Defaults that are other ones with this fault.
        overrides: Hydra overrides that the fault needs.
    """

    meaning: str
    settings: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()


FAULTS = {
    "unsampled": Fault(
        "the rollout appends an EOS token to truncated responses, and training does not mask it",
        {"TOTAL_STEPS": "2", "GRAD_NORM_THRESHOLD": "120.0"},
    ),
    "advantage": Fault(
        "in step 2 one response gets a reward of 100 instead of 1, and advantages are not divided by their deviation",
        {"TOTAL_STEPS": "2"},
        ("algorithm.adv_estimator=planted_reward", "algorithm.norm_adv_by_std_in_grpo=False"),
    ),
    "bitflip": Fault(
        "in step 2 one exponent bit of one weight of the training model flips",
        {"TOTAL_STEPS": "2"},
    ),
    "stale": Fault(
        "the rollout uses the weights of three steps ago",
        {"TOTAL_STEPS": "5", "LR": "1e-4"},
    ),
    "nan": Fault(
        "in step 2 the advantage of one token is NaN",
        {"TOTAL_STEPS": "2"},
        ("algorithm.adv_estimator=planted_nan",),
    ),
    "auxiliary": Fault(
        "in step 2 a large auxiliary loss is attached to layer 1, whose gradient comes from no token",
        {"TOTAL_STEPS": "2"},
    ),
}


def find(name: str) -> Fault:
    """The fault of that name; raises Refused if there is none."""
    if name not in FAULTS:
        raise Refused(f"unknown fault {name}: give {', '.join([*FAULTS][:-1])} or {[*FAULTS][-1]}")
    return FAULTS[name]
