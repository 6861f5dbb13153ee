# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Scorers of answers, for verl's data sources `math_verify` and `ps_grpo`. They need no torch."""

from importlib import import_module
from typing import Any

# The data sources that have a scorer of ours, and the scorer's module.
SCORERS = {"math_verify": "guarded_math_verify", "ps_grpo": "ps_grpo"}


def score(data_source: str, solution: str, ground_truth: str, extra_info: Any, **options: Any) -> Any:
    """The reward of an answer from a data source in SCORERS."""
    scorer = import_module(f".{SCORERS[data_source]}", __package__)
    if data_source == "math_verify":
        return scorer.compute_score(solution, ground_truth, **options)
    return scorer.compute_score(solution, ground_truth, extra_info, data_source=data_source, **options)
