# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A reward function for verl that asks a process reward model for the scores of a response's steps."""

import json
from typing import Any
from urllib.request import Request, urlopen

from gradloc.rewards import ps_grpo


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], prm_url: str, **options: Any
) -> dict[str, float]:
    # Adapt this to your model's server: here it takes a question and its steps, and returns a probability for each.
    steps = [step for step in solution_str.split("\n\n") if step.strip()]
    question = json.dumps({"question": extra_info.get("question"), "steps": steps}).encode()
    with urlopen(Request(prm_url, question, {"Content-Type": "application/json"}), timeout=60) as answer:
        step_scores = json.load(answer)
    return ps_grpo.compute_score(solution_str, ground_truth, {"step_scores": step_scores}, data_source, **options)
