"""A reward of 0 or 1 for each answer, by its text: a random model would never earn one, and have no gradient."""

import hashlib
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_kwargs: Any) -> float:
    return float(hashlib.sha256(solution_str.encode()).digest()[0] % 2)
