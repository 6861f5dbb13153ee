# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""PS-GRPO: the outcome as the reward, lowered where a process reward model sees the reasoning break down on its way.

A response with the right answer earns 1, or 1 - gamma if it has a drop moment: a relative fall
(p_i - p_{i+1}) / p_i >= rho between the scores of neighbouring steps. A single step cannot fall, so responses would
shrink to one step. So a response with fewer than `min_steps` scored steps earns at most 1 - gamma, too.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

from gradloc.rewards import guarded_math_verify


def compute_score(
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None,
    data_source: str = "ps_grpo",
    gamma: float = 0.5,
    rho: float = 0.3,
    min_steps: int = 2,
    **options: Any,
) -> dict[str, float]:
    """Score a response by its outcome and by the scores of its steps.

    Args:
        solution_str (str): The response.
        ground_truth (str): The expected answer, without `\\boxed`.
        extra_info (dict): Holds `step_scores`, one probability of being right for each step, in order.
        data_source (str): For error messages.
        gamma (float): What a drop moment costs, in [0, 1].
        rho (float): The relative fall that counts as a drop moment, in (0, 1].
        min_steps (int): With fewer scored steps a response earns at most 1 - gamma; 0 turns this off.
        **options: The settings of `math_verify`. An answer that exceeds the time limit is wrong.

    Returns:
        dict[str, float]: `score`; `acc`, 1 if the outcome is right; `has_drop`, 1 if there is a drop moment;
            `max_relative_drop`, 0 if there is no fall; `num_steps`. All are floats, because verl turns them into numpy
            scalars, of which only floats can be written as JSON.

    Raises:
        ValueError: If there are no step scores, or they are not numbers from 0 to 1, or a parameter is out of range.
        ImportError, TypeError: As `guarded_math_verify.compute_score`.
    """
    arguments = [data_source], [solution_str], [ground_truth], [extra_info]
    return compute_score_batch(*arguments, gamma=gamma, rho=rho, min_steps=min_steps, **options)[0]


def compute_score_batch(
    data_sources: Iterable[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[str],
    extra_infos: Iterable[dict[str, Any] | None],
    gamma: float = 0.5,
    rho: float = 0.3,
    min_steps: int = 2,
    **options: Any,
) -> list[dict[str, float]]:
    """As `compute_score`, for a batch; the reward function for verl's `BatchRewardManager`."""
    if not _is_number(gamma, Real) or not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be a number in [0, 1], but is {gamma!r}.")
    if not _is_number(rho, Real) or not 0 < rho <= 1:
        raise ValueError(f"rho must be a number in (0, 1], but is {rho!r}.")
    if not _is_number(min_steps, Integral) or min_steps < 0:
        raise ValueError(f"min_steps must be a whole number from 0, but is {min_steps!r}.")
    # Before the outcomes, which take time.
    steps = [_step_scores(source, extra) for source, extra in zip(data_sources, extra_infos, strict=True)]
    options.pop("timeout_score", None)
    outcomes = guarded_math_verify.compute_score_batch([], solution_strs, ground_truths, **options)
    return [_shape(outcome, scores, gamma, rho, min_steps) for outcome, scores in zip(outcomes, steps, strict=True)]


def _is_number(value: Any, kind: type) -> bool:
    """True and False are not numbers here, although Python counts with them."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _shape(outcome: float, steps: list[float], gamma: float, rho: float, min_steps: int) -> dict[str, float]:
    falls = [(before - after) / before for before, after in pairwise(steps) if before > 0]
    largest = max([0.0, *falls])
    # 0.8 to 0.56 is a fall by 0.3, but not in binary; as float32, it is one by 0.3 to 1e-7.
    has_drop = 0 < largest and largest >= rho - 1e-6
    return {
        "score": outcome * (1.0 - float(gamma) if has_drop or len(steps) < min_steps else 1.0),
        "acc": outcome,
        "has_drop": float(has_drop),
        "max_relative_drop": largest,
        "num_steps": float(len(steps)),
    }


def _step_scores(data_source: str, extra_info: dict[str, Any] | None) -> list[float]:
    sample, place = f"A sample of data source {data_source!r} has", "extra_info['step_scores']"
    if extra_info is not None and not isinstance(extra_info, Mapping):
        raise ValueError(f"{sample} malformed step scores: extra_info must be a dict, but is {extra_info!r:.200}.")
    scores = (extra_info or {}).get("step_scores")
    if scores is None:
        raise ValueError(f"{sample} no step scores; ps_grpo needs them in {place}, one probability for each step.")
    values = scores.tolist() if hasattr(scores, "tolist") else scores
    numbers = isinstance(values, list | tuple) and all(isinstance(value, Real) for value in values)
    if not numbers or not all(0 <= value <= 1 for value in values):
        raise ValueError(
            f"{sample} malformed step scores: {place} must be a list of numbers from 0 to 1, but is {scores!r:.200}."
        )
    return [float(value) for value in values]
