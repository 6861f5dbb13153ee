"""The checks of every step: sums against a plain loop, and warnings on planted runs."""

import math
import random
import re
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from notation import cases
from torch import Tensor

from gradloc.judge.rules import VERL_NAMES
from gradloc.judge.run_checks import RunChecks
from gradloc.measure.alignment import own_alignment
from gradloc.measure.run_sums import own_columns, own_sums
from gradloc.sums import APART_GAP, LARGEST, ONE_SIDE_NATS, STALE_GAP, STALE_RATIO, SUMS

Spoil = Callable[[dict[str, Tensor], int], Any]

COLUMNS = ("log_prob", "old_log_prob", "ref_log_prob", "rollout_log_prob")


def broken_tokens(seed: int, bypass: bool = False) -> dict[str, Tensor]:
    """Tokens with numbers that are not finite, empty responses, padding and tokens without a weight."""
    random.seed(seed)
    torch.manual_seed(seed)
    shape = (12, 7)
    columns = {name: -3 * torch.rand(shape) for name in COLUMNS}
    # Stale rows, fresh rows, and rows that are neither.
    columns["rollout_log_prob"][:4] = columns["ref_log_prob"][:4] + 0.01 * torch.randn(4, 7)
    columns["rollout_log_prob"][4:8] = columns["old_log_prob"][4:8] + 0.01 * torch.randn(4, 7)
    columns["rollout_log_prob"][8, :2] = -40.0
    columns["rollout_log_prob"][9, :2] = 0.5
    for name in COLUMNS:
        for value in (math.nan, math.inf, -math.inf):
            columns[name][random.randrange(12), random.randrange(7)] = value
    if bypass:
        columns["old_log_prob"] = columns["rollout_log_prob"].clone()
    weight = torch.full(shape, 0.5)
    weight[torch.rand(shape) < 0.1] = 0.0
    mask = (torch.arange(7) < torch.randint(0, 8, (12, 1))).float()
    return {"response_mask": mask, "weight": weight, "unsampled": torch.rand(shape) < 0.1, **columns}


def cut(value: float, most: float = LARGEST) -> float:
    return max(min(value, most), -most)


def sums_of_a_loop(micro_batches: list[dict[str, Tensor]], first: bool, in_bypass: bool) -> list[float]:
    """What `own_sums` gives, one token at a time."""
    total = dict.fromkeys(SUMS, 0.0)
    for tokens in micro_batches:
        if "rollout_log_prob" not in tokens or ("old_log_prob" not in tokens and not first):
            continue
        places = [[{name: float(of[row, i]) for name, of in tokens.items()} for i in range(7)] for row in range(12)]
        rows = [[each for each in row if each["response_mask"] and each["weight"]] for row in places]
        total["weighted"] += sum(len(row) for row in rows)
        total["unsampled"] += sum(each["unsampled"] for row in rows for each in row)
        rows = [
            [each for each in row if not each["unsampled"] and math.isfinite(each["rollout_log_prob"])] for row in rows
        ]
        policy = "old_log_prob" if "old_log_prob" in tokens else "log_prob"
        has_own = "old_log_prob" in tokens
        differing = sum(each[policy] != each["rollout_log_prob"] for row in rows for each in row)
        total["differing"] += differing if "old_log_prob" in tokens else 0
        if not differing:
            policy, has_own = "log_prob" if first else policy, False
            if in_bypass and not first:
                continue
        for row in rows:
            found = []
            for each in row:
                old, rollout, now = each[policy], each["rollout_log_prob"], each["log_prob"]
                reference = each.get("ref_log_prob", rollout)
                if not (math.isfinite(old) and math.isfinite(reference)):
                    continue
                difference, level = cut(rollout - old), max((rollout + old) / 2, -5.0)
                limited = cut(difference, 1.0)
                found.append((abs(difference), abs(cut(rollout - reference)), min(abs(difference), 0.2)))
                total["larger"] += difference > ONE_SIDE_NATS
                total["smaller"] += difference < -ONE_SIDE_NATS
                total["difference"] += limited
                total["difference_square"] += limited**2
                total["level"] += level
                total["level_square"] += level**2
                total["product"] += limited * level
                total["positive"] += rollout > ONE_SIDE_NATS
                if "ref_log_prob" in tokens:
                    moved = cut(old - reference, 1.0)
                    total["moved"] += abs(cut(old - reference))
                    total["moved_square"] += moved**2
                    total["along"] += limited * moved
                if has_own and not first and math.isfinite(now):
                    total["step_tokens"] += 1
                    total["step_gap"] += abs(cut(old - now))
                if has_own and first and math.isfinite(now):
                    total["own_tokens"] += 1
                    total["own_gap"] += abs(cut(old - now))
                    total["own_to_rollout"] += abs(cut(rollout - now))
                    total["own_old_to_rollout"] += abs(difference)
            if not found:
                continue
            count, gaps, distances, bounded = len(found), *map(sum, zip(*found, strict=True))
            gap, distance = gaps / count, distances / count
            total["tokens"] += count
            total["gap"] += gaps
            total["bounded"] += bounded
            total["responses"] += 1
            total["far"] += gap > APART_GAP
            total["far_tokens"] += (gap > APART_GAP) * count
            total["far_gap"] += (gap > APART_GAP) * gaps
            if "ref_log_prob" in tokens:
                total["distance"] += distances
                stale = gap > STALE_GAP and distance < STALE_RATIO * gap
                fresh = distance > STALE_GAP and gap < STALE_RATIO * distance
                total["stale"] += stale
                total["fresh"] += fresh
                total["unclear"] += max(gap, distance) > STALE_GAP and not (stale or fresh)
                total["stale_tokens"] += stale * count
                total["stale_gap"] += stale * gaps
                total["stale_distance"] += stale * distances
    return list(total.values())


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("without", [(), *((name,) for name in COLUMNS[1:]), ("old_log_prob", "ref_log_prob")])
@pytest.mark.parametrize("bypass", [True, False])
@pytest.mark.parametrize("in_bypass", [True, False])
def test_sums_are_those_of_a_plain_loop(in_bypass: bool, bypass: bool, without: tuple[str, ...], first: bool) -> None:
    micro_batches = [
        {name: values for name, values in broken_tokens(seed, bypass).items() if name not in without}
        for seed in range(5)
    ]
    found = own_sums(micro_batches, first, in_bypass)
    assert found.tolist() == pytest.approx(sums_of_a_loop(micro_batches, first, in_bypass))
    if not without and not bypass:
        absent = "step_" if first else "own_"
        assert [value == 0 for value in found.tolist()] == [name.startswith(absent) for name in SUMS]


@dataclass(frozen=True)
class Run:
    """A planted run: logits that move with each step, and responses sampled from what the rollout has of them.

    Args:
        behind (int | None): By how many steps the rollout's weights are late; None: they are those of the first step.
        stale_share (float): The share of the responses for which they are.
        noise (float): The deviation of the rollout's log-probs, per nat of their size, and at least a tenth of it.
        rate (float): How far the logits move in a step; in a warm-up, in the first one, and in the second twice as far.
        reported (float): The temperature of the reported log-probs; sampled at 1.
        scale (float): How far the rollout's logits are on the policy's way from those of the first step.
        reference (bool): Whether the reference's log-probs are known.
        resumed_after (int | None): After this step, the rollout gets the weights once.
        halves (bool): Each step has two mini-batches, the first and the second half of the responses.
        epochs (int): How often a step trains on them.
    """

    behind: int | None = 0
    stale_share: float = 1.0
    noise: float = 0.0
    rate: float = 0.0
    warm_up: bool = False
    reported: float = 1.0
    scale: float = 1.0
    reference: bool = True
    resumed_after: int | None = None
    halves: bool = False
    epochs: int = 1
    responses: int = 48
    length: int = 40


def steps(run: Run, count: int, seed: int = 1) -> Iterator[dict[str, Tensor]]:
    """A mini-batch for each step; "half_way" is how much half of the update changes the policy's log-probs."""
    generator = torch.Generator().manual_seed(seed)
    shape = (run.responses, run.length, 30)
    # Some tokens are next to certain, others have many alternatives.
    certainty = 3 * torch.rand(shape[:2], generator=generator, dtype=torch.float64).unsqueeze(-1)
    past = [2 * certainty * torch.randn(shape, generator=generator, dtype=torch.float64)]
    direction = torch.randn(shape, generator=generator, dtype=torch.float64)
    late = torch.arange(run.responses) < run.stale_share * run.responses
    old = 0
    for step in range(count):
        if run.behind is not None:
            old = max(step - run.behind, 0)
        elif step == run.resumed_after:
            old = step
        synced = past[0] + run.scale * (past[old] - past[0])
        logits = torch.where(late[:, None, None], synced, past[-1])
        distribution = logits.log_softmax(-1)
        uniform = torch.rand(shape[:2], generator=generator, dtype=torch.float64).unsqueeze(-1)
        token = (distribution.exp().cumsum(-1) < uniform).sum(-1).clamp(max=29).unsqueeze(-1)

        def of(values: Tensor, token: Tensor = token) -> Tensor:
            return values.gather(-1, token).squeeze(-1)

        reported = (distribution / run.reported).log_softmax(-1)
        rollout = of(reported)
        scale = run.noise * torch.maximum(rollout.abs(), torch.tensor(0.1))
        rollout = rollout + scale * torch.randn(rollout.shape, generator=generator, dtype=torch.float64)
        policy = of(past[-1].log_softmax(-1))
        ones = torch.ones_like(policy)
        tokens = {"response_mask": ones, "weight": ones, "log_prob": policy, "old_log_prob": policy}
        tokens["unsampled"] = torch.zeros_like(policy, dtype=torch.bool)
        tokens |= {"rollout_log_prob": rollout}
        if run.reference:
            tokens["ref_log_prob"] = of(past[0].log_softmax(-1))
        rate = run.rate * (step + 1 if run.warm_up else 1)
        way = rate * (direction + torch.randn(shape, generator=generator, dtype=torch.float64))
        tokens["half_way"] = of((past[-1] + way / 2).log_softmax(-1)) - policy
        yield tokens
        past.append(past[-1] + way)


def resumed(checks: RunChecks) -> RunChecks:
    other = RunChecks()
    other.load_state_dict(checks.state_dict())
    return other


def warned(
    batches: Iterable[dict[str, Tensor]],
    checks: RunChecks | None = None,
    first: int = 1,
    rates: dict[int, float] | None = None,
    halves: bool = False,
    epochs: int = 1,
) -> list[list[dict[str, Any]]]:
    """The warnings of each of some steps, which begin with `first`; with other learning rates than 1e-6 in some."""
    checks, found = checks or RunChecks(), []
    for step, tokens in enumerate(batches, first):
        checks.start_update(step)
        rows = len(tokens["weight"]) // 2 if halves else None
        parts = [{name: values[:rows] for name, values in tokens.items()}]
        if halves:
            second = {name: values[rows:] for name, values in tokens.items()}
            parts.append(second | {"log_prob": second["log_prob"] + second["half_way"]})
        differing = 0.0
        for number, part in enumerate(parts):
            sums = own_sums([part], number == 0, not differing)
            differing += sums[SUMS.index("differing")]
            checks.take_in(sums.tolist(), alignment=own_alignment([part]).tolist())
            checks.state_dict()  # a checkpoint, for which rank 0 alone asks, changes nothing
        for _ in range((epochs - 1) * len(parts)):
            checks.take_in(None)
        checks.add_step((rates or {}).get(step, 1e-6))
        found.append(checks.warnings())
    return found


# What is warned of, by a letter for each step.
LETTERS = {
    "adapter_scale": "D",
    "engines_apart": "A",
    "learning_rate": "L",
    "misaligned": "M",
    "other_log_probs": "O",
    "partly_stale": "P",
    "reference": "R",
    "reward_scale": "V",
    "stale_weights": "S",
    "unsampled": "U",
}


def told(found: list[list[dict[str, Any]]]) -> str:
    """A letter for each step, and a dot where nothing is warned of."""
    assert all(len(warnings) <= 1 for warnings in found)
    return "".join(LETTERS[warnings[0]["name"]] if warnings else "." for warnings in found)


@pytest.mark.parametrize("behind", [1, 3])
@pytest.mark.parametrize("warm_up", [False, True])
def test_weights_that_are_late_are_no_part_of_the_policy_s(warm_up: bool, behind: int) -> None:
    """With a rising learning rate, the last steps have more of the policy's way from the reference for longer."""
    rates = {step: 1e-6 * step for step in range(1, 25)} if warm_up else {}
    found = warned(steps(Run(behind=behind, rate=0.01, warm_up=warm_up), 24), rates=rates)
    assert not any("of which a part" in warning["sentence"] for warnings in found for warning in warnings)


@pytest.mark.parametrize("reference", [True, False])
def test_a_jump_in_a_long_run_is_never_called_old_weights(reference: bool) -> None:
    """From step 300 of 1,600 on, of a policy that moves; most earlier gaps are forgotten by its end."""
    checks, found = RunChecks(), []
    run = Run(noise=0.02, rate=0.002, reference=reference, responses=12, length=20)
    for step, tokens in enumerate(steps(run, 1600), 1):
        if step >= 300:
            tokens["rollout_log_prob"] = (tokens["rollout_log_prob"] + noise_of(step)[:12, :20]).clamp(max=0.0)
        checks.start_update(step)
        checks.take_in(own_sums([tokens], True).tolist())
        checks.add_step(1e-6)
        found.append(checks.warnings())
    assert re.fullmatch(r"\.{299}A{1301}", told(found))
    assert "in the mean since about step 321, and by 0.033 before" in found[-1][0]["sentence"]
    readings = checks.state_dict()["readings"]
    assert len(readings) <= 64 and readings[0][1] == 1 and readings[-1][1] > 1500
    apart = {later[1] - earlier[1] for earlier, later in zip(readings, readings[1:], strict=False)}
    assert len(apart) == 1, "thinned evenly"


ROW = torch.arange(48).unsqueeze(1)


def noise_of(seed: int) -> Tensor:
    """A number for each token of a run."""
    return torch.randn(48, 40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_column(name: str, change: Callable[[Tensor, int], Tensor]) -> Spoil:
    """Changes log-probs, in the first of the steps that have it, the second, …"""
    return lambda tokens, number: tokens.update({name: change(tokens[name], number)})


def of_rollout(change: Callable[[Tensor, int], Tensor]) -> Spoil:
    return of_column("rollout_log_prob", change)


def of_training(change: Callable[[Tensor, int], Tensor]) -> Spoil:
    """Changes both log-probs of training."""
    both = ("log_prob", "old_log_prob")
    return lambda tokens, number: tokens.update(dict.fromkeys(both, change(tokens["log_prob"], number)))


def of_others(column: str, kept: float) -> Spoil:
    """A column that is of other tokens, but for a share that is training's: as where all turns are encoded again."""

    def change(tokens: dict[str, Tensor], _: int) -> None:
        generator = torch.Generator().manual_seed(5)
        is_kept = torch.rand(48, 40, generator=generator) < kept
        others = tokens[column].flatten()[torch.randperm(48 * 40, generator=generator)].view(48, 40)
        tokens[column] = torch.where(is_kept, tokens["log_prob"], others)

    return change


def load_no_weights_of_the_reference(tokens: dict[str, Tensor], number: int) -> None:
    """Responses are short and end in sure tokens, to which nearly constant log-probs fit better if they are moved."""
    tokens["response_mask"][:, 10:] = 0
    for name in COLUMNS[:2] + COLUMNS[3:]:
        tokens[name][:, 7:10] = 0.01 * tokens[name][:, 7:10]
    tokens["ref_log_prob"] = 0.15 * noise_of(number) - 4


def score_with_another_model(tokens: dict[str, Tensor], number: int) -> None:
    """Which is far away where the policy has taken small steps to."""
    difference = (tokens["log_prob"] + 0.6 * noise_of(5)).clamp(max=0.0) - tokens["log_prob"]
    tokens["rollout_log_prob"] = tokens["log_prob"] + difference
    tokens["ref_log_prob"] = tokens["log_prob"] - 0.002 * number * difference


def added_tokens(count: int) -> Spoil:
    """Adds EOS tokens to so many responses, but not in the fifth step: no mismatch of the log-probs."""

    def change(tokens: dict[str, Tensor], number: int) -> None:
        if number != 4:
            tokens["unsampled"][:count, -1] = True
            tokens["rollout_log_prob"][:count, -1] = 0.0

    return change


def agree_to_the_bit_in_half(tokens: dict[str, Tensor], _: int) -> None:
    tokens["rollout_log_prob"] = torch.where(ROW < 24, tokens["rollout_log_prob"], tokens["old_log_prob"])


NOTHING: Spoil = lambda tokens, number: None  # noqa: E731
BACK_TO_THE_REFERENCE: Spoil = lambda tokens, _: tokens.update(rollout_log_prob=tokens["ref_log_prob"])  # noqa: E731
ONE_OF_EACH_LOWERED = of_rollout(lambda values, _: torch.where(torch.arange(40) == 3, values - 3.0, values))
# As of prompts that the engine was given otherwise, from the first step on; and the longest responses, as with other
# positions.
A_THIRD_OTHERWISE = of_rollout(lambda values, number: (values + (ROW < 16) * noise_of(number)).clamp(max=0.0))
A_THIRD_EVER_MORE_OTHERWISE = of_rollout(
    lambda values, number: (values + (ROW < 16) * 0.2 * (1 + number) * noise_of(number)).clamp(max=0.0)
)
A_FEW_OTHERWISE = of_rollout(lambda values, number: (values + (ROW < 8) * 0.5 * noise_of(number)).clamp(max=0.0))
# As after another prompt, or with other positions: log-probs that are related, and not the same.
SCORED_OTHERWISE = of_rollout(lambda values, _: (values + 0.6 * noise_of(5)).clamp(max=0.0))
SCORED_A_LITTLE_OTHERWISE = of_rollout(lambda values, _: values + 0.065 * noise_of(8))
SCORED_A_LITTLE_OTHERWISE_ONCE = of_rollout(
    lambda values, number: values + (0.045 if number else 0.065) * noise_of(number)
)
NOISY = of_rollout(lambda values, number: (values + (0.3, 0.15)[number % 2] * noise_of(number)).clamp(max=0.0))
LABELS_NOT_SHIFTED = of_training(lambda values, _: 0.2 * values - 3 + noise_of(7))
LABELS_UNRELATED_AT_FIRST = of_training(
    lambda values, number: (0.1 if number < 2 else 0.6) * values - 3 + noise_of(number)
)
OTHER_KERNEL = of_training(lambda values, number: values + 0.8 * noise_of(number))
OTHER_REFERENCE = of_column("ref_log_prob", lambda values, _: values + noise_of(6))
OTHER_OLD = of_column("old_log_prob", lambda values, _: values + 0.1 * noise_of(9))
UNRELATED_OLD = of_column("old_log_prob", lambda values, _: 0.2 * values - 2 + noise_of(9))
OTHER_NOW = of_column("log_prob", lambda values, _: 0.8 * values)
HALVED = of_rollout(lambda values, _: 0.5 * values)
CUT = of_rollout(lambda values, _: (values + 0.05).clamp(max=0.0))
ALL_MISSING = of_rollout(lambda values, _: 0 * values)
LABELS_OF_OTHERS = of_training(
    lambda values, number: values.roll(1, 0) if number < 3 else 0.85 * values.roll(1, 0) + 0.15 * values
)
ONE_LATE = of_rollout(lambda values, _: torch.cat([values[:, :1], values[:, :-1]], 1))
ONE_LATE_IN_TWO = of_rollout(
    lambda values, _: torch.where(ROW < 2, torch.cat([values[:, :1], values[:, :-1]], 1), values)
)
NO_REFERENCE = {"noise": 0.02, "rate": 0.0, "reference": False}
LATE = {"noise": 0.0, "behind": 3, "rate": 0.1}
NEVER_SYNCED = {"behind": None, "noise": 0.02, "rate": 0.05, "reference": False}
ONE_OF_TWO = {"behind": None, "noise": 0.02, "rate": 0.1, "stale_share": 0.5}
STILL = {"rate": 0.0}
MOVING = {"rate": 0.02}
LARGE_STEPS = {"rate": 0.5, "halves": True}
QUIET = {"rate": 0.0, "noise": 0.005}


@cases(
    "run begin spoil expected said",
    # Ordinary runs: with a learning rate that is far too large, and where training is on the last step's responses.
    *(
        ({**run, "reference": known}, 1, NOTHING, "............", "")
        for known in (True, False)
        for run in (
            {"noise": 0.025, "rate": 0.02},
            {"noise": 0.02, "rate": 0.5},
            {"noise": 0.02, "rate": 0.02, "behind": 1},
        )
    ),
    # A rollout with the weights of step 1, and with an adapter at another scale.
    *(
        ({**run, "rate": 0.05, "noise": noise}, 1, NOTHING, expected, said)
        for noise in (0.0, 0.02)
        for run, expected, said in (
            ({"behind": None}, "..???SSSSS", "the weights of step 1: its log-probs are nearer to the reference's"),
            ({"scale": 0.5}, "...~~~~SSSSS", "at too small a scale: its log-probs have gone about 47% of the policy's"),
            ({"scale": 2.0}, "...~~~~DDDDD", "have gone about 1.8 times as far from the reference's as the policy's"),
        )
    ),
    # Late weights arrive, and count as old ones in a row alone.
    (LATE, 1, NOTHING, "ssssss......", ""),
    # The labels are not shifted against the logits; later the two have some relation, by chance.
    (MOVING, 1, LABELS_OF_OTHERS, "MMMMMMMM", "those of other responses"),
    ({**MOVING, "reference": False}, 1, ALL_MISSING, "MMM", "end in exact zeros in all responses"),
    # What is there before any optimizer step is told at once, and as long as it stays.
    ({}, 1, SCORED_OTHERWISE, "AAAAA", ""),
    ({}, 1, OTHER_REFERENCE, "RRRRR", ""),
    ({}, 1, load_no_weights_of_the_reference, "RRRRR", "with hardly a relation"),
    ({}, 1, LABELS_NOT_SHIFTED, "MMMMM", ""),
    # Although the policy moves away from the reference that has shown it.
    ({"rate": 0.3}, 1, of_training(lambda values, _: 0.7 * values), "OOOOO", ""),
    ({}, 1, of_rollout(lambda values, _: values.clamp(min=-0.5)), "OOOOO", "they are larger for"),
    # Where engines differ later, the jump tells it, and no side is blamed, but where the reference shows it.
    ({}, 4, SCORED_OTHERWISE, "...AAAAA", ""),
    ({}, 4, LABELS_NOT_SHIFTED, "...MMMMM", ""),
    ({}, 4, LABELS_UNRELATED_AT_FIRST, "...MMMMM", "the reference's do not"),
    ({}, 4, OTHER_REFERENCE, "........", ""),
    # A small gap is told where late weights do not make it, and not that of a few tokens.
    (QUIET, 1, SCORED_A_LITTLE_OTHERWISE, "..AAAAAAAA", ""),
    ({"noise": 0.005}, 2, SCORED_A_LITTLE_OTHERWISE, "...AAAAAAA", "since step 2"),
    (QUIET, 4, A_FEW_OTHERWISE, ".....AAAAA", "In 17% of the responses they differ by"),
    (QUIET, 4, SCORED_A_LITTLE_OTHERWISE_ONCE, "..........", ""),
    (STILL, 1, ONE_OF_EACH_LOWERED, "..........", ""),
    (STILL, 4, ONE_OF_EACH_LOWERED, "..........", ""),
    ({"noise": 0.0, "rate": 0.15, "behind": 1}, 1, ONE_OF_EACH_LOWERED, "........", ""),
    *(({"behind": late, "rate": 0.04, "reference": False}, 1, NOTHING, "..........", "") for late in (1, 4)),
    # Two log-probs of the same weights: the rollout tells which of them is wrong.
    (MOVING, 3, OTHER_OLD, "..OOOO", "the old log-probs are wrong"),
    (MOVING, 3, OTHER_NOW, "..OOOO", "the update's are wrong"),
    (MOVING, 3, UNRELATED_OLD, "..MMMM", "with hardly a relation"),
    # Positive log-probs at once, and another temperature from a later step on by the jump.
    ({}, 2, of_rollout(lambda values, _: -values), ".OOO", "is positive"),
    (STILL, 7, HALVED, "........OOOO", ""),
    # Log-probs may suddenly keep little relation; a policy may move far from its reference.
    (STILL, 4, of_others("rollout_log_prob", 0.15), "...AAAAA", "before, with hardly a relation (correlation"),
    (STILL, 4, of_others("ref_log_prob", 0.18), "........", ""),
    # Log-probs after a mild cut are told by their sign, also where the rollout is late.
    ({"noise": 0.001, "behind": 1}, 4, CUT, ".....OOO", ""),
    # Both engines have the same weights in step 1, so that another temperature is certain there.
    ({"noise": 0.02, "reported": 0.62}, 1, NOTHING, "OOOOOO", "lower"),
    ({"noise": 0.02, "reported": 1.5, "reference": False}, 1, NOTHING, "OOOOOO", "higher"),
    # Without a reference, old weights are a gap that grows and have no name.
    (NEVER_SYNCED, 1, NOTHING, "......???AAAAA", "have drifted apart since step 1, from"),
    # The rollout gets weights once: the readings begin again.
    ({**NEVER_SYNCED, "noise": 0.0, "resumed_after": 12}, 1, NOTHING, "?????????AAA.....?????????", "since step 13"),
    # One of two workers is not updated.
    (ONE_OF_TWO, 1, NOTHING, "?????????????P", "For 50% of the responses, as from one of several workers"),
    ({**ONE_OF_TWO, "reference": False}, 1, NOTHING, "~~~~~~~~~~~~~P", "For 50% of the responses, as from one of"),
    (NO_REFERENCE, 1, A_THIRD_OTHERWISE, "ppppAAAAAAAAAA", "in 33% of the responses by over"),
    (NO_REFERENCE, 4, A_THIRD_OTHERWISE, "pppppppp", ""),
    # What was there before any optimizer step is no matter of weights that do not arrive, nor of an adapter.
    (NO_REFERENCE, 1, A_THIRD_EVER_MORE_OTHERWISE, "pppppppp", ""),
    ({"noise": 0.02, "rate": 0.02}, 4, A_THIRD_EVER_MORE_OTHERWISE, "pppppppppp", ""),
    (STILL, 1, score_with_another_model, "AAAAAAAA", ""),
    # A gap that weights of no step make is said at once, and while it lasts.
    ({"noise": 0.02, "rate": 0.02}, 4, NOISY, "...AAAAAAAAA", "since step 4, and by"),
    # A rollout that goes back to the first weights is no fault of the policy.
    ({"noise": 0.0, "rate": 0.3}, 6, BACK_TO_THE_REFERENCE, ".....~~~~S", ""),
    # Other tokens, with likely ones lowered, and missing log-probs are no other temperature.
    (STILL, 1, of_rollout(lambda values, _: values.roll(7, 0) - 3 * noise_of(3).abs()), "oooooooo", ""),
    (STILL, 1, of_rollout(lambda values, _: torch.where(torch.arange(40) < 12, 0.0, values)), "oooooooo", ""),
    # Tokens that the policy did not produce are told in updates that have one, from the fourth token on.
    ({}, 1, added_tokens(4), "UUUU.UUU", "(0.21% of the response tokens"),
    ({}, 1, added_tokens(1), "...U.UUU", ""),
    # Rollout and reference that agree are no old weights before the first step, nor where the policy's log-probs
    # jump in one step: an optimizer does not make that, another kernel does.
    (STILL, 1, OTHER_KERNEL, "sssssssO", "the reference's do not"),
    (STILL, 4, OTHER_KERNEL, "...ssssO", "the reference's do not"),
    # Updates that move the policy by over 0.3 nats, in which a rollout keeps the first weights for some steps; and the
    # same gap where updates move it by less.
    ({**LARGE_STEPS, "behind": 1}, 1, NOTHING, "....AAAAAAAA", "late by some steps"),
    ({**LATE, "halves": True, "warm_up": True, "noise": 0.05}, 1, NOTHING, "..........AA", "late by some steps"),
    ({**MOVING, "halves": True}, 4, OTHER_KERNEL, "...OOOOO", "the reference's do not"),
    ({**MOVING, "halves": True, "epochs": 200}, 4, OTHER_KERNEL, "...ooooo", ""),  # that move it as far
    # Rollouts that agree to the bit are no bypass mode: one mini-batch is of the worker with old weights.
    ({**ONE_OF_TWO, "halves": True}, 1, agree_to_the_bit_in_half, "??????PPP", "For 50% of the responses"),
    # A shift is told with the step since which it lasts; in a few responses, in the third update that has it.
    ({}, 3, ONE_LATE, "..MMMMMM", " Since step 3."),
    ({}, 3, ONE_LATE_IN_TWO, "....MMMM", " Since step 3."),
)
def test_what_is_wrong_in_a_run_is_named(
    run: dict[str, Any], begin: int, spoil: Spoil, expected: str, said: str
) -> None:
    """Expected is a letter for each step; `?` is any, `~` the last one or none, and a small one any but that."""
    letters = {"?": ".", ".": r"\.", "~": f"[.{expected[-1]}]"} | {x.lower(): f"[^{x}]" for x in LETTERS.values()}
    batches = list(steps(Run(**{"noise": 0.01, "rate": 0.01, **run}), len(expected)))
    for number, tokens in enumerate(batches[begin - 1 :]):
        spoil(tokens, number)
    found = warned(batches, halves=run.get("halves", False), epochs=run.get("epochs", 1))
    assert re.fullmatch("".join(letters.get(x, x) for x in expected), told(found)), told(found)
    assert not said or said in found[-1][0]["sentence"]


def test_a_policy_that_is_destroyed_is_no_fault_of_the_reference() -> None:
    """Its log-probs lose all relation to the reference's in one update, and the rollout has them, too."""
    batches = list(steps(Run(noise=0.01, rate=0.01), 8))
    for tokens in batches[4:]:
        tokens["ref_log_prob"] = tokens["ref_log_prob"].roll(7, 0) - 4
        for name in ("log_prob", "old_log_prob", "rollout_log_prob"):
            tokens[name] = 0.3 * tokens[name]
    assert told(warned(batches)) == "........"
    assert told(warned(batches, rates={4: 1e-4})) == "....L..."


def batch_of(policy: Tensor, rollout: Tensor, **more: Tensor) -> dict[str, Tensor]:
    ones = torch.ones_like(policy)
    tokens = {"response_mask": ones, "weight": ones, "unsampled": ones == 0, "log_prob": policy}
    return {**tokens, "old_log_prob": policy, "rollout_log_prob": rollout, **more}


def sampled(policy: Tensor, rollout: Tensor, generator: torch.Generator, noise: float = 0.0) -> dict[str, Tensor]:
    """Tokens that a rollout with these logits has sampled, scored by both."""
    token = torch.multinomial(rollout.softmax(-1).flatten(0, 1), 1, generator=generator).view(48, 40, 1)
    scored, reported = (each.double().log_softmax(-1).gather(-1, token)[..., 0] for each in (policy, rollout))
    reported = reported + noise * reported * torch.randn(reported.shape, generator=generator)
    return batch_of(scored, reported.clamp(max=0.0))


def test_a_sure_policys_temperature_is_told_from_the_start() -> None:
    """Most tokens are all but certain, so that the differences say little of the likelihood."""
    batches, generator = [], torch.Generator().manual_seed(7)
    for _ in range(5):
        logits = 12 * torch.rand((48, 40, 1), generator=generator) * torch.randn((48, 40, 30), generator=generator)
        batches.append(sampled(logits, logits / 0.7, generator))
    assert told(warned(batches))[2:] == "OOO"


@pytest.mark.parametrize(("factor", "behind"), [(1.03, 3), (1.05, 1), (1 / 1.03, 3)])
def test_a_late_rollout_of_a_sharpening_policy_is_no_temperature(factor: float, behind: int) -> None:
    """Each step multiplies the logits, and the rollout has those of some steps before."""
    generator = torch.Generator().manual_seed(1)
    logits = 6 * torch.rand((48, 40, 1), generator=generator) * torch.randn((48, 40, 30), generator=generator)
    of_steps = [logits * factor**step for step in range(12)]
    batches = [sampled(now, of_steps[max(i - behind, 0)], generator, 0.02) for i, now in enumerate(of_steps)]
    assert "O" not in told(warned(batches))


LAYER = 10_000  # weights


@cases(
    "before after said",
    (20.0, 20.9, ""),  # 5%
    (20.0, 21.1, "The weights of b changed before step 2 by more than an optimizer step should change them:"),
    (20.0, 0.0, "their norm is 0 times what it was"),
    (20.0, math.nan, "they are NaN or infinite"),
    (5.0, 5.9, ""),  # an optimizer step of rate 1e-3 moves 10,000 weights by 1 at most, give or take
    (5.0, 6.1, "their norm is 1.22 times what it was"),
)
@pytest.mark.parametrize("resumes", [False, True])
def test_weights_that_no_optimizer_step_wrote_are_said(before: float, after: float, said: str, resumes: bool) -> None:
    checks = RunChecks()
    for step, norm in enumerate([before, after] + [after] * 6, 1):
        checks = resumed(checks) if resumes and step == 2 else checks
        checks.start_update(step)
        checks.layers.take_in({"a": (1.0, LAYER), "b": (norm, LAYER)}, {})
        checks.add_step(1e-3)
        sentences = [warning["sentence"] for warning in checks.warnings() if warning["name"] == "layer"]
        assert len(sentences) == (bool(said) and 2 <= step < 7), step
        assert all(said in sentence for sentence in sentences)
    # Of several layers, the most changed one is named.
    for step, factor in ((9, 1.0), (10, 3.0)):
        checks.start_update(step)
        checks.layers.take_in({"a": (factor, 4), "b": (factor**2, 4), "c": (1.0, 4)}, {})
    (warning,) = checks.warnings()
    assert warning["sentence"].startswith("The weights of b, and those of 1 other layer, changed before step 10 by")


BLOCKS = {"embed": 2.0, "layers.0": 1.0, "layers.1": 3.0, "layers.2": 1.0, "layers.3": 0.5}


@cases(
    "begins ends factor said",
    (1, 6, 30.0, "far more than every other block"),
    (6, 30, 30.0, "40% before"),
    (6, 6, 2.5, ""),  # far less than 20 times the odds
    (1, 1, 2.5, ""),  # the blocks of a model have different gradients,
)
@pytest.mark.parametrize("resumes", [False, True])
def test_a_layer_with_the_gradient_is_said(begins: int, ends: int, factor: float, said: str, resumes: bool) -> None:
    """Until that is usual."""
    checks = RunChecks()
    for step in range(1, 41):
        checks = resumed(checks) if resumes and step == 7 else checks
        checks.start_update(step)
        gradient = {name: math.sqrt(square * (1 + 0.1 * (step % 3))) for name, square in BLOCKS.items()}
        gradient["layers.1"] *= factor if step >= begins else 1
        checks.layers.take_in({}, gradient)
        sentences = [warning["sentence"] for warning in checks.warnings() if warning["name"] == "layer"]
        assert len(sentences) == (begins + 2 <= step < ends), step
        for sentence in sentences:
            assert sentence.startswith("The layer layers.1 carries over 99% of the gradient's squared norm")
            assert f"since step {begins}" in sentence and said in sentence
        checks.start_update(step)
        checks.layers.take_in({}, dict.fromkeys(BLOCKS, 0.0))
        assert not checks.warnings(), "an update without a gradient says nothing"


@cases(
    "times name said",
    ({"a": 1.0, "b": 0.2}, None, ""),
    ({"a": 1.2, "b": 1.0}, None, ""),  # rounded
    ({"a": 4.0, "b": 0.2}, "layer", "The optimizer's gradient in the layer a is at least 4 times what"),
    ({"a": 4.0, "b": 2.0}, "loss_scale", "The optimizer's gradient is at least 2 times what"),
    ({"a": math.inf, "b": 0.2}, None, ""),  # as fp16 overflows
)
def test_a_gradient_of_more_than_its_passes_is_said(times: dict[str, float], name: str | None, said: str) -> None:
    checks = RunChecks()
    checks.start_update(1)
    passes = {"a": 2.0, "b": 0.5, "frozen": 0.0}
    checks.layers.take_in({}, {layer: factor * passes[layer] for layer, factor in times.items()}, passes)
    found = checks.warnings()
    assert [warning["name"] for warning in found] == ([name] if name else [])
    assert not found or said in found[0]["sentence"]
    assert name != "loss_scale" or "zero_grad" in found[0]["sentence"]
    checks.start_update(2)
    assert not checks.warnings()


def test_a_resume_keeps_the_readings_and_says_so() -> None:
    batches = list(steps(Run(behind=None, rate=0.05, noise=0.02), 12))
    whole, first = warned(batches), RunChecks()
    found = warned(batches[:8], first)
    again = resumed(first)
    found += warned(batches[8:], again, first=9)
    assert told(found) == told(whole) and again.progress.since_resume == 4
    for step in (9, 10, 11):
        note = f" This is step {step - 8} after a checkpoint was loaded."
        assert found[step - 1][0]["sentence"] == whole[step - 1][0]["sentence"] + note
    assert found[11] == whole[11]
    # Without saved state, the first step seen counts.
    again.load_state_dict(None)
    assert again.state_dict() == RunChecks().state_dict()
    again.start_update(5)
    assert again.progress.since_resume == 1 and again.warnings() == []


def of_columns(checks: RunChecks, step: int, tokens: dict[str, Tensor]) -> list[dict[str, Any]]:
    """A step of which only the columns are known; its warnings."""
    checks.start_update(step)
    checks.take_in(None, columns=own_columns([tokens]).tolist())
    return checks.warnings()


def rewarded(seed: int) -> dict[str, Tensor]:
    """Columns with advantages over groups of eight responses, of rewards of 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    rewards = (torch.rand(8, 8, generator=generator) < 0.4).double()
    advantages = rewards - rewards.mean(1, keepdim=True)
    mask = torch.ones(64, 5)
    advantage = advantages.reshape(64, 1) * mask
    return {"response_mask": mask, "log_prob": -mask, "old_log_prob": -mask, "advantage": advantage}


@cases(
    "rows factor spoiled usual expected said",
    # Where nearly all rewards are the same in one update, advantages are small, too.
    (64, 10.0, range(6, 11), 1.0, ".....VVVVV.", " times what they were"),
    (64, 0.1, range(6, 11), 1.0, "......VVVV.", "Advantages are 1/"),
    # Rewards of 100 in some groups, also where answers get better.
    (8, 100.0, [30], 1.0, "." * 59, ""),
    (48, 20.0, range(5, 9), 1.0, "." * 8, ""),
    # Where the advantages of many are usually 20 times those of others, one update cannot tell it.
    (64, 50.0, [7, 8], 20.0, ".......V", ""),
)
def test_rewards_on_another_scale_are_told(
    rows: int, factor: float, spoiled: Container[int], usual: float, expected: str, said: str
) -> None:
    checks, found = RunChecks(), []
    for step in range(1, len(expected) + 1):
        tokens = rewarded(step)
        tokens["advantage"][:40] *= usual
        tokens["advantage"][:rows] *= factor if step in spoiled else 1.0
        found.append(of_columns(checks, step, tokens))
    assert told(found) == expected
    if said:
        assert said in found[9][0]["sentence"] and "since step 6" in found[9][0]["sentence"]


@pytest.mark.parametrize("column", ["advantage", "old_log_prob", "ref_log_prob"])
def test_a_column_that_is_not_finite_is_named_at_once(column: str) -> None:
    tokens = rewarded(1)
    tokens["ref_log_prob"] = tokens["log_prob"].clone()
    tokens[column][8:16, 2] = math.nan
    tokens["response_mask"][20, 4], tokens[column][20, 4] = 0.0, math.inf  # padding
    if column == "advantage":
        tokens["log_prob"][3] = math.nan  # it follows from another one
    (warning,) = of_columns(RunChecks(), 1, tokens)
    assert warning["name"] == "nonfinite" and warning["share"] == 8 / 64
    assert warning["sentence"].startswith(f"`{VERL_NAMES[column]}` is NaN or infinite in 8 of 64 responses")


def test_a_rollout_that_stopped_getting_weights_is_told() -> None:
    """From step 5 on it keeps those of step 4; late by three steps, it does not fall behind any more."""
    torch.manual_seed(0)
    reference = -3 * torch.rand(48, 40)
    policies = [reference + move for move in (0.12 * torch.randn(14, 48, 40)).cumsum(0)]

    def end(behind: list[int]) -> str:
        rollouts = (policies[step - late] + 0.01 * torch.randn(48, 40) for step, late in enumerate(behind))
        batches = [batch_of(*each, ref_log_prob=reference) for each in zip(policies, rollouts, strict=True)]
        return told(warned(batches, rates=dict.fromkeys(range(1, 15), 1e-3)))[-3:]

    assert end([max(step - 4, 0) for step in range(14)]) == "SSS"
    assert "S" not in end([min(step, 3) for step in range(14)])


@cases("rate resumes name", (5e-5, False, "L"), (5e-5, True, "L"), (1e-6, False, "M"))
def test_a_policy_that_moved_far_is_told_by_its_learning_rate(rate: float, resumes: bool, name: str) -> None:
    """The rollout is late by a step, and the weights of step 5 are far away; with an ordinary rate, that cannot be."""
    batches = list(steps(Run(behind=1, rate=0.02), 8))
    _, jump = steps(Run(rate=8.0), 2, seed=3)
    batches[4]["log_prob"] = batches[4]["old_log_prob"] = jump["log_prob"]
    checks = RunChecks()
    found = warned(batches[:4], checks, rates={4: rate})
    found += warned(batches[4:], resumed(checks) if resumes else checks, first=5)
    assert told(found) == f"....{name}..."


@pytest.mark.parametrize(
    "rate", [lambda step: step, lambda step: (step + 1) ** 3, lambda step: 3**step, lambda step: step not in (5, 6, 7)]
)
def test_a_learning_rate_that_warms_up_or_pauses_is_usual(rate: Callable[[int], float]) -> None:
    rates, checks = {step: 1e-7 * rate(step - 1) for step in range(1, 13)}, RunChecks()
    batches = list(steps(Run(rate=0.02, noise=0.02), 12))
    found = warned(batches[:7], checks, rates=rates) + warned(batches[7:], resumed(checks), 8, rates)
    assert told(found) == "." * 12


def test_blocks_that_are_not_trained_are_no_comparison() -> None:
    checks = RunChecks()
    for step in range(1, 7):
        checks.start_update(step)
        checks.layers.take_in({}, dict.fromkeys(BLOCKS, 0.0) | {"layers.1": 1.0})
        assert checks.warnings() == []


@pytest.mark.parametrize(("behind", "rate", "temperature"), [(1, 0.1, 0.7), (1, 0.05, 1.4), (0, 0.0, 0.85)])
def test_another_temperature_that_begins_later_is_told(behind: int, rate: float, temperature: float) -> None:
    """The gap of late weights hides its jump, or it is a small one."""
    late, other = (list(steps(Run(behind=behind, rate=rate, reported=each), 10)) for each in (1.0, temperature))
    assert told(warned([*late[:3], *other[3:]])) == ".....OOOOO"
