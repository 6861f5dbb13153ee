"""Which identities hold: records by hand, and runs whose columns are spoiled as bugs in the data path spoil them."""

import copy
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from notation import cases
from torch import Tensor
from verl.trainer.ppo import core_algos

from gradloc.adapters.update_evidence import TrainedData, UpdateEvidence
from gradloc.facts import NAMES, TrainedRow
from gradloc.judge.forms import form_of
from gradloc.judge.identities import BY_NAME, check, measured
from gradloc.judge.readings import Layers
from gradloc.judge.readings import of_layers as of_all_layers
from gradloc.judge.readings import of_rows as of_rows_together
from gradloc.judge.records import MOST_RECORDS, Record, as_state, from_state
from gradloc.judge.run import Run, of_one_step
from gradloc.levels import LASTS, LEVEL, SHARE
from gradloc.measure.micro_batch import token_weights
from gradloc.measure.turns import misplaced
from gradloc.measure.update_facts import own_facts

Tokens = dict[str, Tensor]
PROMPTS, ANSWERS, LENGTH, WORDS = 8, 8, 24, 30
ROWS = PROMPTS * ANSWERS
ROW = torch.arange(ROWS).unsqueeze(1)
RATE = 1e-3


def noise(seed: int) -> Tensor:
    return torch.randn(ROWS, LENGTH, generator=torch.Generator().manual_seed(seed))


@dataclass
class Update:
    """What is known of an update: tokens, rows, and the fields of `Layers`."""

    tokens: Tokens
    rows: list[TrainedRow]
    layers: list[Any]


@cache
def run_of(
    count: int, behind: int = 0, rate: float = 0.03, noisy: float = 0.01, power: int = 0, seed: int = 1
) -> list[Update]:
    """A healthy run, whose logits move with each step; responses are sampled from those of `behind` steps ago.

    Args:
        noisy (float): The deviation of the rollout's log-probs, per nat.
        power (int): With it, the rate rises with this power of the step.
    """
    generator = torch.Generator().manual_seed(seed)
    certainty = 4 * torch.rand((ROWS, LENGTH, 1), generator=generator)
    past = [2 * certainty * torch.randn((ROWS, LENGTH, WORDS), generator=generator)]
    direction = torch.randn((ROWS, LENGTH, WORDS), generator=generator)
    found = []
    for step in range(count):
        distribution = past[max(step - behind, 0)].log_softmax(-1)
        token = torch.multinomial(distribution.exp().flatten(0, 1), 1, generator=generator).view(ROWS, LENGTH, 1)
        rollout, policy, reference = (
            each.log_softmax(-1).gather(-1, token)[..., 0] for each in (distribution, past[-1], past[0])
        )
        rollout = (rollout + noisy * rollout * torch.randn(rollout.shape, generator=generator)).clamp(max=0)
        mask = (torch.arange(LENGTH) < torch.randint(12, LENGTH + 1, (ROWS, 1), generator=generator)).float()
        rewards = (torch.rand(ROWS, generator=generator) < 0.4).float() * (torch.arange(ROWS) >= ANSWERS)
        tokens = {"response_mask": mask, "log_prob": policy, "old_log_prob": policy, "ref_log_prob": reference}
        tokens |= {"rollout_log_prob": rollout * mask, "weight": mask / mask.sum(), "kl_coefficient": 0 * mask}
        found.append(Update(tokens, [], layers_of(step)))
        reward(found[-1], rewards, normalized(rewards))
        move = rate * (step + 1) ** power * (direction + torch.randn(direction.shape, generator=generator))
        tokens["half_way"] = (past[-1] + move / 2).log_softmax(-1).gather(-1, token)[..., 0] - policy
        past.append(past[-1] + move)
    return found


def layers_of(step: int) -> list[Any]:
    weights = {f"layers.{i}": (10.0 + 1e-3 * step * (i + 1), 1000, 5.0 if step else math.nan) for i in range(3)}
    reduced, passes = ({f"layers.{i}": (1 + 0.1 * i) * norm for i in range(3)} for norm in (1.0, 1.2))
    last_pass = {f"layers.{i}": 0.5 for i in range(3)}
    sums = {f"layers.{i}": 0.1 * (-2) ** i for i in range(3)}
    moved = [1e-6, 3.0, -1e-3, 0.0] if step else [math.nan] * 4
    return [weights, reduced, passes, last_pass, moved, {layer: (of, 1.0) for layer, of in sums.items()}, sums]


def normalized(rewards: Tensor) -> Tensor:
    groups = rewards.view(PROMPTS, ANSWERS)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()


def reward(update: Update, rewards: Tensor, advantages: Tensor) -> None:
    """Gives each row these, and its tokens the coefficients that follow."""
    tokens = update.tokens
    tokens["advantage"] = advantages.unsqueeze(1) * tokens["response_mask"]
    tokens["coefficient"] = -tokens["weight"] * tokens["advantage"]
    length = tokens["response_mask"].sum(1).long().tolist()
    update.rows = [
        TrainedRow(
            *(f"uid {i // ANSWERS}", 1000 + i // ANSWERS, i, None, None),
            *(float(rewards[i]), float(rewards[i]), -40.0, float(a) or None),
            **{"length": length[i], "padding": LENGTH - length[i], "largest": abs(float(a))},
        )
        for i, a in enumerate(advantages)
    ]


def mini_batches(update: Update, halves: bool) -> Iterator[Tensor]:
    """The sums of an update's one mini-batch, or of two, the second after a step."""
    for half in range(1 + halves):
        tokens = {name: values[half :: 1 + halves].clone() for name, values in update.tokens.items()}
        for name in ("weight", "coefficient"):
            tokens[name] *= 1 + halves
        if half:
            tokens["log_prob"] += tokens["half_way"]
            tokens["coefficient"] *= tokens["half_way"].exp()
        yield own_facts([tokens], is_first=not half, loss_agg_mode="token-mean")


def answers(
    updates: Sequence[Update],
    begin: int = 1,
    spoil: Callable[[Update, int], Any] = lambda update, step: None,
    halves: bool = False,
    resumes: bool = False,
    is_current: bool = False,
) -> list[Any]:
    """What a run says of each update; from `begin` on, they are spoiled. It may be resumed before each."""
    run, found = Run(), []
    for step, update in enumerate(updates, 1):
        if step >= begin:
            update = copy.deepcopy(update)
            spoil(update, step)
        if resumes and step > 1:
            state, run = json.loads(json.dumps(run.state_dict())), Run()
            run.load_state_dict(state)
        run.start_update(step, is_current)
        for facts in mini_batches(update, halves):
            run.take_in(facts.tolist())
        run.take_in_layers(*update.layers)
        run.take_in_rows(update.rows)
        run.add_step(RATE)
        found.append(run.answer())
    return found


def names(answer: Any) -> list[str]:
    return [warning["name"] for warning in answer["warnings"]]


def states(answer: Any) -> dict[str, str]:
    return {name: each["state"] for name, each in answer["identities"].items()}


# One level, and how long.


def of_shares(shares: Sequence[float | None], saves: bool = False) -> list[Any]:
    """What is said of the identity of responses, of which so many are repeated in each update."""
    records: list[Record] = []
    found = []
    for step, share in enumerate(shares, 1):
        readings = {} if share is None else {"responses.repeated": share}
        records.append(measured([*records, Record(step, readings=readings)]))
        if saves:
            records = from_state(json.loads(json.dumps(as_state(records))))
        found.append(check(records)["responses"])
    return found


E = SHARE * LEVEL  # at which a residual is off
OFF, FAR = E * 1.01, SHARE * LEVEL**LASTS * 1.01


@pytest.mark.parametrize("saves", [False, True])
@cases(
    "shares broken",
    ([FAR], {1: 1}),
    ([0.99 * FAR / 1.01], {}),
    ([OFF] * 3, {3: 1}),
    ([E * 0.99] * 20, {}),
    ([OFF, OFF, 0.0, OFF], {4: 1}),
    ([OFF, OFF, 0.0, 0.0, OFF, 0.0], {5: 1, 6: 1}),
    ([OFF, OFF, 0.0, 0.0, 0.0, OFF, OFF], {}),
    ([LEVEL * OFF, 0.0, OFF], {3: 1}),
    # It holds again after three quiet updates, and `since` never moves before.
    ([0.0, FAR, 0.0, 0.0, FAR, 0.0, 0.0, 0.0, 0.0], {step: 2 for step in range(2, 8)}),
    ([FAR, 0.0, 0.0, 0.0, FAR], {1: 1, 2: 1, 3: 1, 5: 5}),
    # An unknown residual does not count, and is unchecked if nothing is broken.
    ([FAR, None, None, None], {1: 1, 2: 1, 3: 1}),
    # The usual is the median of healthy updates: 3 times the least, then 10 times is 3.3 times that.
    ([0.03] * 5 + [0.1] * 9, {}),
    ([0.03] * 5 + [0.13] * 3, {8: 6}),
    # Updates in which it was off do not make it usual.
    ([0.0] + [OFF] * 30, {step: 2 for step in range(4, 32)}),
)
def test_what_is_off_for_long_or_by_far_is_broken(
    shares: list[float | None], broken: dict[int, int], saves: bool
) -> None:
    found = of_shares(shares, saves)
    assert {step: each.since for step, each in enumerate(found, 1) if each.state == "broken"} == broken
    for step, (share, each) in enumerate(zip(shares, found, strict=True), 1):
        if step not in broken:
            assert each.state == ("unchecked" if share is None else "held")


def test_an_update_without_a_gradient_says_why_two_cannot_be_checked() -> None:
    update = run_of(1)[0]
    reward(update, torch.ones(ROWS), torch.zeros(ROWS))
    update.layers[1:4], update.layers[5] = [dict.fromkeys(update.layers[1], 0.0)] * 3, None
    (answer,) = answers([update])
    missing = {name: each["missing"] for name, each in answer["identities"].items()}
    assert missing["advantages"] == "no two rewards of a prompt differ" and missing["gradient"] == "the gradient is 0"


def test_a_broken_identity_says_how_far_it_was_off_at_last() -> None:
    found = of_shares([0.0, FAR, OFF, 0.0, 0.0])
    assert [each.times for each in found] == pytest.approx([0.0, FAR / SHARE, *[OFF / SHARE] * 3])
    assert found[0].state == "held" and found[3].residual == "responses.repeated"


def test_a_run_is_kept_in_checkpoints_and_bounded() -> None:
    for spoil in (shift_rollout, of_workers(0.65)):
        whole, resumed = (answers(run_of(6), 3, of_rollout(spoil), resumes=resumes) for resumes in (False, True))
        for step, (answer, expected) in enumerate(zip(resumed, whole, strict=True), 1):
            assert names(answer) == names(expected)
            assert answer["identities"]["rollout_log_probs"] == expected["identities"]["rollout_log_probs"]
            noted = ["step 1 after a checkpoint was loaded" in each["sentence"] for each in answer["warnings"]]
            assert noted == [step > 1] * len(noted)
    run = Run()
    for step in range(2 * MOST_RECORDS):
        run.start_update(step)
        run.take_in([0.0] * len(NAMES))
    assert len(run.state_dict()["records"]) <= MOST_RECORDS + 1


# Healthy runs.


@cases(
    "options",
    {},
    {"noisy": 0.0},
    {"noisy": 0.05},
    {"behind": 1},
    {"behind": 3},
    {"behind": 2, "power": 1, "rate": 0.01},
    {"rate": 0.15, "seed": 2},
    {"behind": 1, "rate": 0.02, "noisy": 0.001},
)
def test_nothing_is_broken_in_healthy_runs(options: dict[str, Any]) -> None:
    found = answers(run_of(12, **options))
    assert [names(each) for each in (*found, *answers(run_of(12, **options), halves=True))] == [[]] * 24
    assert set(states(found[-1]).values()) == {"held"}
    assert {name for name, state in states(found[0]).items() if state == "unchecked"} <= {"weights"}
    assert found[0]["news"][0].startswith("GradLoc checks 1") and not any(each["news"] for each in found[1:])


@pytest.mark.parametrize("seed", range(3))
def test_bypass_mode_and_few_columns_break_nothing(seed: int) -> None:
    def bypass(update: Update, _: int) -> None:
        update.tokens["old_log_prob"] = update.tokens["rollout_log_prob"]
        update.tokens["coefficient"] = (
            update.tokens["coefficient"] * (update.tokens["log_prob"] - update.tokens["old_log_prob"]).exp()
        )

    found = answers(run_of(6, seed=seed), spoil=bypass)
    assert [names(each) for each in found] == [[]] * 6
    assert found[-1]["identities"]["old_log_probs"]["missing"] == "bypass mode"
    alone = answers(run_of(6, seed=seed), spoil=lambda update, _: [update.tokens.pop(n) for n in (*OLD, *OTHERS)])
    assert [names(each) for each in alone] == [[]] * 6
    assert {"old_log_probs", "rollout_log_probs", "reference"} <= {
        n for n, s in states(alone[-1]).items() if s != "held"
    }


OLD, OTHERS = ("old_log_prob",), ("rollout_log_prob", "ref_log_prob")


@cases(
    "name spoil",
    ("old_log_probs", lambda update, _: update.tokens.pop("old_log_prob")),
    ("rollout_log_probs", lambda update, _: update.tokens.pop("rollout_log_prob")),
    ("responses", lambda update, _: update.rows.clear()),
    ("groups", lambda update, _: update.rows.__setitem__(slice(None), [replace(r, prompt=None) for r in update.rows])),
    ("advantages", lambda update, _: change_rows(update, lambda row, i: replace(row, reward=None, padding=0))),
    ("reference", lambda update, _: update.tokens.pop("ref_log_prob")),
    ("gradient", lambda update, _: [update.layers[i].clear() for i in (2, 6)]),
)
def test_what_is_missing_leaves_its_identity_unchecked_with_a_reason(name: str, spoil: Any) -> None:
    answer = answers(run_of(3), spoil=spoil)[-1]
    assert answer["identities"][name]["state"] == "unchecked" and len(answer["identities"][name]["missing"]) > 5
    others = {"groups", "advantages"} if name == "responses" else set()
    assert {n for n, state in states(answer).items() if state != "held"} - others == {name} and not answer["warnings"]


def change_rows(update: Update, change: Callable[[TrainedRow, int], TrainedRow]) -> None:
    update.rows = [change(row, i) for i, row in enumerate(update.rows)]


# Broken identities and their names.


def of_column(name: str, change: Callable[[Tensor, Tokens, int], Tensor]) -> Callable[[Update, int], None]:
    """Changes a column where there is a response; a rollout's padding is 0."""

    def spoil(update: Update, step: int) -> None:
        inside = update.tokens["response_mask"].bool()
        update.tokens[name] = torch.where(inside, change(update.tokens[name], update.tokens, step), 0.0)

    return spoil


def of_rollout(change: Callable[[Tensor, Tokens, int], Tensor]) -> Callable[[Update, int], None]:
    return of_column("rollout_log_prob", change)


def scored_otherwise(size: float, share: float = 1.0) -> Callable[[Tensor, Tokens, int], Tensor]:
    return lambda values, _, step: torch.where(
        ROW < share * ROWS, (values + size * noise(step)).clamp(max=-1e-4), values
    )


def after_a_cut(values: Tensor, tokens: Tokens, _: int) -> Tensor:
    """Likely tokens are alone, and a third of the others have lost neighbours."""
    policy = tokens["log_prob"]
    return torch.where(policy > -0.1, 0.0, torch.where(torch.arange(LENGTH) % 3 == 0, policy + 0.1, policy))


def rounded_off(values: Tensor, _: Tokens, step: int) -> Tensor:
    """The errors of rounding to steps of 0.25 nats, for tokens of any probability."""
    return values + 0.25 * (torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(step)) - 0.5)


shift_rollout = lambda values, *_: values.roll(1, 1)  # noqa: E731
garbage = of_rollout(lambda values, _, step: -noise(step).abs())


def move_labels(update: Update, _: int) -> None:
    """Log-probs of the tokens before, and exact zeros where there is none before."""
    update.tokens["rollout_log_prob"] = torch.where(
        torch.arange(LENGTH) == 0, 0.0, update.tokens["rollout_log_prob"].roll(1, 1)
    )


def add_tokens(update: Update, _: int) -> None:
    """An end token that was appended to some responses: the rollout has not sampled it."""
    is_last = torch.arange(LENGTH) == update.tokens["response_mask"].sum(1, keepdim=True) - 1
    is_added = is_last & (ROW % 8 == 0)
    for name, value in (("log_prob", -7.0), ("old_log_prob", -7.0), ("ref_log_prob", -7.0), ("rollout_log_prob", 0.0)):
        update.tokens[name] = torch.where(is_added, value, update.tokens[name])


def goes_on_after_the_end(update: Update, _: int) -> None:
    update.tokens["after_eos"] = (torch.arange(LENGTH) >= 10) & (ROW % 16 == 0)
    update.tokens["rollout_log_prob"] = update.tokens["rollout_log_prob"].masked_fill(update.tokens["after_eos"], 0.0)


def train_no_end(update: Update, _: int) -> None:
    mask = update.tokens["response_mask"]
    update.tokens["response_mask"] = mask * (torch.arange(LENGTH) < mask.sum(1, keepdim=True) - 1)


def invert_the_mask(update: Update, _: int) -> None:
    update.tokens["response_mask"] = 1 - update.tokens["response_mask"]
    update.tokens["weight"] = update.tokens["response_mask"] / update.tokens["response_mask"].sum()


def rescale(factor: Callable[[Tokens], Tensor | float], name: str = "coefficient") -> Callable[[Update, int], None]:
    return lambda update, _: update.tokens.update({name: update.tokens[name] * factor(update.tokens)})


def of_rows(change: Callable[[TrainedRow, int], TrainedRow]) -> Callable[[Update, int], None]:
    return lambda update, _: change_rows(update, change)


def of_layers(index: int, change: Callable[[Any, str], Any]) -> Callable[[Update, int], None]:
    def spoil(update: Update, _: int) -> None:
        update.layers[index] = {layer: change(of, layer) for layer, of in update.layers[index].items()}

    return spoil


def cut_a_part_off(update: Update, _: int) -> None:
    """The smallest tensor of a layer has no gradient, so that it does not move."""
    weights, *_, reduced_sums, sums = update.layers
    weights["layers.1"] = (*weights["layers.1"][:2], 0.0)
    reduced_sums["layers.1"], sums["layers.1"] = (0.0, 0.0), 0.0


def moved_by(**changes: float) -> Callable[[Update, int], None]:
    index = {"along": 2, "between": 3}
    return lambda update, _: [update.layers[4].__setitem__(index[name], value) for name, value in changes.items()]


def turned(update: Update, _: int) -> None:
    change_rows(update, lambda row, i: replace(row, advantage=row.advantage and -row.advantage))


def permuted(update: Update, step: int) -> None:
    """Advantages of other rows."""
    order = random.Random(step).sample(range(ROWS), ROWS)
    was = [row.advantage for row in update.rows]
    change_rows(update, lambda row, i: replace(row, advantage=was[order[i]]))


TEMPERATURE = of_rollout(lambda values, *_: 1.3 * values)
# By a column of log-probs: what is done, from which update on, the first name, and what the claim says.
LOG_PROBS = (
    (
        of_column("advantage", lambda values, *_: values.masked_fill(ROW == 3, math.nan)),
        3,
        "nonfinite",
        "`advantage` is",
    ),
    (of_rollout(lambda values, *_: values.masked_fill(ROW == 3, math.inf)), 3, "nonfinite", "`rollout_log_prob` is"),
    (
        of_column("old_log_prob", lambda values, *_: values.masked_fill(ROW == 3, math.nan)),
        3,
        "nonfinite",
        "`old_log_prob` is",
    ),
    (
        of_column("ref_log_prob", lambda values, *_: values.masked_fill(ROW == 3, math.nan)),
        3,
        "nonfinite",
        "`ref_log_prob` is",
    ),
    (
        of_column("log_prob", lambda values, *_: values.masked_fill(ROW == 3, math.nan)),
        3,
        "nonfinite",
        "`log_prob` is",
    ),
    (of_column("old_log_prob", scored_otherwise(0.2)), 1, "old_log_probs", "0."),
    (of_column("old_log_prob", lambda values, *_: values.flip(0)), 3, "misaligned", "other rows"),
    *((of_rollout(shift_rollout), begin, "misaligned", "1 position") for begin in (1, 3)),
    (of_rollout(lambda values, *_: values.roll(-2, 1)), 3, "misaligned", "2 positions"),
    (of_rollout(lambda values, *_: torch.where(ROW % 3 == 0, values.roll(1, 1), values)), 3, "misaligned", "% of the"),
    (of_rollout(lambda values, *_: values.flip(0)), 3, "misaligned", "unrelated"),
    (of_rollout(lambda values, *_: torch.where(torch.arange(LENGTH) > 9, -1.0, values)), 3, "misaligned", "repeat"),
    *((garbage, begin, "misaligned", "unrelated") for begin in (1, 3)),
    (of_rollout(lambda values, *_: values.round()), 3, "rollout_log_probs", "nats apart"),
    (of_rollout(rounded_off), 1, "rollout_log_probs", "as if they were rounded"),
    # Without a relation to training's in three of five responses.
    (of_rollout(scored_otherwise(3.1)), 3, "rollout_log_probs", "nats apart"),
    *((move_labels, begin, "misaligned", "1 position") for begin in (1, 3)),
    *((TEMPERATURE, begin, "other_log_probs", "temperature") for begin in (1, 3)),
    (of_rollout(lambda values, *_: values / math.log(2)), 1, "other_log_probs", "log2"),
    (of_rollout(lambda values, *_: values / math.log(10)), 1, "other_log_probs", "log10"),
    (of_rollout(lambda values, *_: -values), 1, "other_log_probs", "wrong sign"),
    (of_rollout(lambda values, *_: (values + 0.3).clamp(max=-1e-3)), 3, "other_log_probs", "larger"),
    (of_rollout(after_a_cut), 1, "other_log_probs", "top-p"),
    (of_rollout(lambda values, *_: values - 0.3), 3, "other_log_probs", "as before a temperature"),
    *((of_rollout(scored_otherwise(0.6)), begin, "rollout_log_probs", "nats apart") for begin in (1, 3)),
    (of_rollout(scored_otherwise(0.8, share=0.25)), 1, "rollout_log_probs", "25% of the responses"),
    (of_column("ref_log_prob", lambda values, tokens, _: tokens["log_prob"]), 3, "reference", "follows it"),
    (of_column("ref_log_prob", lambda values, *_: values.roll(1, 1)), 1, "misaligned", "Reference"),
    (add_tokens, 3, "unsampled", "8 trained"),
    (goes_on_after_the_end, 3, "unsampled", "after their turn's end"),
    (train_no_end, 3, "mask", "end token"),
    (invert_the_mask, 3, "mask", "inverted"),
)
ADVANTAGES = (
    (of_rows(lambda row, i: replace(row, response=i // ANSWERS)), "repeated_responses", "87.5%"),
    (of_rows(lambda row, i: replace(row, uid=f"uid {i % PROMPTS}")), "mixed_groups", "100"),
    (of_rows(lambda row, i: replace(row, uid=f"uid {i // (2 * ANSWERS)}", advantage=None)), "mixed_groups", "100"),
    (of_rows(lambda row, i: replace(row, uid=f"uid {i}")), "groups_of_one", "of its own"),
    (turned, "advantage_order", "is -1.00"),
    (permuted, "advantage_order", "do not follow"),
    (
        of_rows(lambda row, i: replace(row, unmoved=row.padding)),
        "advantage_mask",
        "as the row has padding",
    ),
    (of_rows(lambda row, i: replace(row, advantage=None)), "advantages", "are 0"),
    (of_rows(lambda row, i: replace(row, advantage=row.advantage and abs(row.advantage))), "advantages", "one sign"),
    (of_rows(lambda row, i: replace(row, advantage=(row.advantage or 0) + 20)), "advantages", "from 0"),
    (of_rows(lambda row, i: replace(row, advantage=row.advantage and 1e3 * row.advantage)), "advantages", "far apart"),
)
TRAINING = (
    (rescale(lambda tokens: 3.0), "loss_scale", "3 times"),
    (lambda update, _: [update.tokens[name].mul_(2.0) for name in ("weight", "coefficient")], "loss_scale", "sum to 2"),
    (rescale(lambda tokens: -1.0), "loss_sign", "wrong sign"),
    (rescale(lambda tokens: tokens["advantage"].sign()), "loss_sign", "lost the sign"),
    (rescale(lambda tokens: (0.5 * noise(1)).exp()), "loss", "of the tokens"),
    (of_layers(1, lambda norm, _: 2 * norm), "gradient", "1.67 times"),
    (of_layers(1, lambda norm, layer: 0.0 if layer == "layers.1" else norm), "gradient", "exactly 0"),
    (cut_a_part_off, "gradient", "1 layer(s), or their smallest tensors"),
    (of_layers(5, lambda of, _: (of[0] / 2, 0.5)), "gradient", "50% off the sum"),
    (of_layers(5, lambda of, layer: (of[0] / 4, 0.1) if layer == "layers.2" else of), "gradient", "off"),
    (of_layers(1, lambda norm, _: 0.5), "last_pass", "last micro-batch"),
    (of_layers(0, lambda of, _: (10.0, 1000, 0.0)), "not_moving", "3 of 3 layers"),
    (
        lambda update, step: update.layers[0].update({"layers.1": (10.0 * 3**step, 1000, 5.0)}),
        "weights",
        "optimizer step",
    ),
    (moved_by(along=1.5e-3), "ascent", "up the gradient"),
    (moved_by(between=5.0), "weights", "between two updates"),
)
LATER = [(spoil, 3, name, said) for spoil, name, said in (*ADVANTAGES, *TRAINING)]


@pytest.mark.parametrize(("spoil", "begin", "name", "said"), [*LOG_PROBS, *LATER])
def test_what_is_broken_is_named(spoil: Any, begin: int, name: str, said: str) -> None:
    found = answers(run_of(8), begin, spoil)
    assert not any(map(names, found[: begin - 1]))
    first = found[-1]["warnings"][0]
    assert first["name"] == name and said in first["claim"], [w["sentence"] for w in found[-1]["warnings"]]
    assert first["since"] in (begin, begin + 1)
    assert found[-1]["identities"][first["identity"]]["state"] == "broken"
    assert any(BY_NAME[first["identity"]].holds in line for each in found for line in each["news"])


@cases("identity", *BY_NAME)
def test_each_residual_alone_has_a_name(identity: str) -> None:
    run = Run()
    for step, update in enumerate(run_of(3), 1):
        run.start_update(step)
        run.take_in(next(mini_batches(update, False)).tolist())
        run.take_in_layers(*update.layers)
        run.take_in_rows(update.rows)
        run.add_step(RATE)
    readings = run.state_dict()["records"][-1]["readings"]
    known = {"advantages.power": 2.0, "loss.kl": 2.0, "loss.entropy": 2.0}  # of what this run has not
    for residual in BY_NAME[identity].residuals:
        form = form_of({**readings, **known, residual: 1e3}, residual)
        assert form.name and form.claim and "{" not in form.claim


@cases("column", "rollout_log_prob", "ref_log_prob")
def test_short_responses_whose_log_probs_are_moved_are_told(column: str) -> None:
    """They are too short for a correlation of their own."""
    update = copy.deepcopy(run_of(1)[0])
    tokens = {name: values[:, :6].clone() for name, values in update.tokens.items()}
    tokens[column] = torch.cat([tokens[column][:, 1:], tokens[column][:, :1]], 1)
    answer = of_one_step(own_facts([tokens], loss_agg_mode="token-mean").tolist())
    identity = "reference" if column == "ref_log_prob" else "rollout_log_probs"
    assert answer["identities"][identity]["state"] == "broken"


def test_a_reference_of_other_weights_is_named_before_the_first_step() -> None:
    found = answers(run_of(3), 1, of_column("ref_log_prob", scored_otherwise(0.3)))
    (warning,) = found[0]["warnings"]
    assert (warning["name"], warning["since"]) == ("reference", 1) and "Before any step" in warning["claim"]


@cases("column", "old_log_prob", "log_prob")
def test_a_reference_that_agrees_with_the_rollout_is_right(column: str) -> None:
    """Training's log-probs are wrong, in both forwards or in that of the old ones."""
    other = scored_otherwise(0.3)

    def spoil(update: Update, step: int) -> None:
        of_column("old_log_prob", other)(update, step)
        update.tokens[column] = update.tokens["old_log_prob"]

    found = answers(run_of(6, rate=1e-3), 1, spoil)
    assert all(names(each) for each in found) and "reference" not in {name for each in found for name in names(each)}


def test_another_reference_stays_broken_although_only_the_first_update_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradloc.judge.run.MOST_RECORDS", 4)
    found = answers(run_of(8), 1, of_column("ref_log_prob", scored_otherwise(0.3)))
    assert not any("holds again" in line for each in found for line in each["news"])
    (warning,) = found[-1]["warnings"]
    assert warning["name"] == "reference" and warning["claim"] == found[0]["warnings"][0]["claim"]


@cases("options broken", ({}, False), ({"noisy": 0.03}, False), ({"behind": 1}, True), ({"behind": 3}, True))
def test_a_rollout_is_late_only_where_the_trainer_does_not_say_that_it_is_current(options: Any, broken: bool) -> None:
    updates = run_of(8, rate=0.15, **options)
    found = answers(updates, halves=True)
    assert not any(map(names, found))
    is_late = [each["identities"]["rollout_log_probs"].get("late", False) for each in found]
    # Until the run itself shows how late it is, it may be; much noise looks like it.
    assert is_late[-1] == bool(options) and not is_late[0] and any(is_late)
    told = answers(updates, halves=True, is_current=True, resumes=True)
    assert (told[-1]["identities"]["rollout_log_probs"]["state"] == "broken") == broken
    assert not any("late" in each["identities"]["rollout_log_probs"] for each in told)
    assert not broken or set(names(told[-1])) <= {"rollout_log_probs", "stale_weights"}


@cases("noisy size broken", (0.0, 0.1, True), (0.01, 0.1, False), (0.01, 1.2, True), (0.0, 0.002, False))
def test_a_rollout_that_is_never_late_is_compared_with_the_runs_own_updates(
    noisy: float, size: float, broken: bool
) -> None:
    """In one update alone, and from then on in all, or from the second one on."""
    once = of_rollout(lambda values, _, step: values if step > 6 else scored_otherwise(size)(values, _, step))
    updates = run_of(9, noisy=noisy)
    assert any(map(names, answers(updates, 6, once, is_current=True))) == broken
    assert not any(map(names, answers(updates, 6, once))) or size > 1
    for begin in (6,) if noisy else (2, 6):  # beside noise, the second update is not enough
        lasting = answers(updates, begin, of_rollout(scored_otherwise(size)), is_current=True)
        broken_at_last = {each["identity"] for each in lasting[-1]["warnings"]}
        assert broken_at_last == ({"rollout_log_probs"} if size > 0.01 else set())


def test_a_reference_that_is_replaced_in_a_run_is_told_from_a_policy_that_moves() -> None:
    found = answers(run_of(8), 4, of_column("ref_log_prob", scored_otherwise(1.0)), halves=True)
    assert not any(map(names, found[:3])) and names(found[-1]) == ["reference"]
    assert (
        "more than the updates explain" in found[-1]["warnings"][0]["claim"] and found[-1]["warnings"][0]["since"] == 4
    )


def of_workers(share: float) -> Callable[[Tensor, Tokens, int], Tensor]:
    """Of a share of the responses, the log-probs of the first weights."""
    return lambda values, tokens, _: torch.where(ROW < share * ROWS, tokens["ref_log_prob"] + 1e-3 * values, values)


@cases(
    "change name said",
    (of_workers(1.0), "stale_weights", "100% of what changed"),
    (of_workers(0.65), "partly_stale", "some workers"),
    (of_workers(0.25), "partly_stale", "some workers"),
    (
        lambda values, tokens, _: values + 0.9 * (tokens["log_prob"] - tokens["ref_log_prob"]),
        *("adapter_scale", "1.9 times as far"),
    ),
    # A gap from the first step on has not come with steps.
    (lambda values, _, step: (values + 0.5 * noise(5)).clamp(max=0), "rollout_log_probs", "nats apart"),
)
def test_weights_on_the_way_from_the_reference_are_told(change: Any, name: str, said: str) -> None:
    found = answers(run_of(24, rate=0.06), 1, of_rollout(change), halves=True)
    assert names(found[-1])[:1] == [name] and said in found[-1]["warnings"][0]["claim"]


@cases("rate", 0.1, 1.0)
def test_a_copy_of_the_reference_is_named_in_any_update(rate: float) -> None:
    """Also where the policy has gone far from it."""
    copied = of_rollout(lambda values, tokens, _: tokens["ref_log_prob"])
    for each in answers(run_of(4, rate=rate), 2, copied)[1:]:
        assert names(each)[0] == "stale_weights" and "bit for bit" in each["warnings"][0]["claim"]


def moves(norm: float, was: float, names: Sequence[str] = ("layers.0", "layers.1"), dead: str = "") -> dict[str, float]:
    """What layers say whose weights had this norm, and have that one now; one has no gradient."""
    gradient = {name: float(name != dead) for name in names}
    of_sums = {name: (0.5, of) for name, of in gradient.items()}
    before, now = (
        Layers({name: (size, 100, 5.0) for name in names}, gradient, gradient, None, [math.nan] * 4, of_sums, gradient)
        for size in (was, norm)
    )
    return of_all_layers(now, before, RATE)


@cases("norm was apart", (10.0, 10.0, 0.0), (math.nan, 10.0, math.inf), (math.nan, math.nan, None), (5.0, 0.0, None))
def test_a_norm_that_becomes_nan_has_changed_and_one_that_was_is_unknown(
    norm: float, was: float, apart: float | None
) -> None:
    assert moves(norm, was).get("weights.apart") == apart


def test_layers_whose_gradient_is_not_finite_need_not_move() -> None:
    """Their step is skipped."""
    names = ("layers.0", "layers.1")
    gradient = dict.fromkeys(names, math.nan)
    layers = Layers(dict.fromkeys(names, (10.0, 100, 0.0)), gradient, gradient, None, [math.nan] * 4, None, {})
    assert "weights.still" not in of_all_layers(layers, layers, RATE)


@cases("names dead count", (("layers.0", "layers.1"), "layers.1", 1), (("fc1", "fc2"), "fc2", 0), (("0", "1"), "1", 1))
def test_a_layer_without_a_gradient_is_told_by_numbered_ones(names: Sequence[str], dead: str, count: int) -> None:
    """A second head may be unused."""
    assert moves(10.0, 10.0, names, dead)["gradient.zero"] == count


def test_a_policy_that_is_destroyed_is_no_fault_of_the_reference() -> None:
    """Its log-probs lose all relation to the reference's in one update, and the rollout has them, too."""

    def destroy(update: Update, step: int) -> None:
        tokens, mask = update.tokens, update.tokens["response_mask"]
        other = -noise(step).square() * mask
        tokens |= {"log_prob": other, "old_log_prob": other, "rollout_log_prob": other * (1 + 0.01 * noise(9))}

    found = answers(run_of(8), 4, destroy)
    assert not any(name in ("reference", "misaligned") for each in found[3:] for name in names(each))


@cases("column seed", *((column, seed) for column in ("rollout_log_prob", "ref_log_prob") for seed in range(4)))
def test_short_responses_that_fit_another_shift_by_chance_are_not_misaligned(column: str, seed: int) -> None:
    """Nor is one of them said to be so."""

    def spoil(update: Update, step: int) -> None:
        update.tokens["response_mask"][:, 9:] = 0
        update.tokens["weight"] = update.tokens["response_mask"] / update.tokens["response_mask"].sum()
        reward(update, *((row := torch.rand(ROWS).round()), normalized(row)))
        of_column(column, scored_otherwise(0.6))(update, step + 100 * seed)

    updates = run_of(6, seed=seed)
    assert "misaligned" not in {name for each in answers(updates, 1, spoil) for name in names(each)}
    for step, update in enumerate(updates):
        update = copy.deepcopy(update)
        spoil(update, step)
        assert misplaced(update.tokens)[0].float().mean() < 0.02


def test_one_step_alone_is_judged_at_once() -> None:
    (update,) = run_of(1)
    assert not of_one_step(own_facts([update.tokens]).tolist(), update.rows, is_first=True)["warnings"]
    spoiled = copy.deepcopy(update)
    of_rollout(scored_otherwise(0.6))(spoiled, 1)
    assert names(of_one_step(own_facts([spoiled.tokens]).tolist(), is_first=True)) == ["rollout_log_probs"]


@cases(
    "what change",
    ("advantages.size", of_rows(lambda row, i: replace(row, largest=8 * row.largest))),
    ("rewarded", of_rows(lambda row, i: replace(row, reward=float(i % 20 == 0) if row.reward is not None else None))),
    ("prompts", of_rows(lambda row, i: replace(row, prompt=i % 2))),
    ("length", lambda update, _: update.tokens["weight"].mul_(torch.arange(LENGTH) < 3)),
)
def test_changes_are_dated(what: str, change: Any) -> None:
    found = answers(run_of(6), 6, change)
    assert not any(each["changes"] for each in found[:5])
    changed = {each["what"]: each for each in found[5]["changes"]}
    assert changed[what]["sentence"].startswith("In step 6, ") and changed[what]["sentence"] in found[5]["news"]


def test_a_learning_rate_is_known_once_there_is_a_step() -> None:
    run = Run()
    for step in range(1, 8):
        run.start_update(step)
        run.take_in([0.0] * len(NAMES))
        assert not run.answer()["changes"]  # as before a spike's step
        run.add_step(RATE if step < 7 else 0.0)
    assert [each["what"] for each in run.answer()["changes"]] == ["rate"]


# The loss, by autograd.


def aggregate(losses: Tensor, mask: Tensor, mode: str) -> Tensor:
    """A mean over all rows with a token, by hand."""
    if mode == "token-mean":
        return (losses * mask).sum() / mask.sum()
    sums, filled = (losses * mask).sum(1), mask.any(1)
    return (sums / mask.sum(1).clamp(min=1) if mode == "seq-mean-token-mean" else sums).sum() / filled.sum()


def loss_of(mode: str = "token-mean", off: float = 0.3, **wrong: Any) -> list[Tokens]:
    """Micro-batches whose loss is PPO's with a KL loss and importance weights, but for what is wrong."""
    torch.manual_seed(0)
    shape = (40, 20)
    mask = (torch.arange(20) < torch.randint(1, 21, (40, 1))).float()
    weight = token_weights(lambda x: wrong.get("weights", 1.0) * aggregate(x, mask, mode), torch.zeros(shape))
    log_prob = (-torch.rand(shape)).requires_grad_()
    old = log_prob.detach() + off * torch.randn(shape) * (torch.rand(shape) < 0.2) * (torch.rand(40, 1) < 0.5)
    importance = torch.rand(shape) + 0.5
    rollout, reference = old - importance.log(), log_prob.detach() + torch.randn(shape)
    importance = importance.pow(wrong.get("power", 1))
    advantage = torch.randn(40, 1).expand(shape)
    kl = wrong.get("of_kl", 0.5) * (log_prob - reference).square()
    (of_kl,) = torch.autograd.grad((weight * kl).sum(), log_prob)
    ratio, a = (log_prob - old).exp(), wrong.get("of_advantage", lambda x: x)(advantage)
    worse = torch.minimum if "clips_wrong" in wrong else torch.maximum
    each = worse(-a * ratio, -a * ratio.clamp(0.8, 1.2)) * (1 if "uncorrected" in wrong else importance)
    (gradient,) = torch.autograd.grad(wrong.get("loss", 1.0) * (weight * each).sum(), log_prob)
    scale = wrong.get("scale", 1.0)
    tokens = {"response_mask": mask, "weight": weight, "log_prob": log_prob.detach(), "old_log_prob": old}
    tokens |= {"rollout_log_prob": rollout * mask, "ref_log_prob": reference, "advantage": advantage}
    tokens |= {"coefficient": (gradient + wrong.get("kl", 1.0) * of_kl) * scale, "kl_coefficient": of_kl}
    tokens |= {"rollout_is_weight": importance}
    return [{name: of[i : i + 8] for name, of in tokens.items()} for i in range(0, 40, 8)]


MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")


def of_the_loss(micro_batches: list[Tokens], mode: str = "token-mean", scale: float = 1.0) -> Any:
    answer = of_one_step(own_facts(micro_batches, scale=scale, loss_agg_mode=mode).tolist())
    return next((each for each in answer["warnings"] if each["identity"] == "loss"), None)


@pytest.mark.parametrize("mode", MODES)
@cases("changes", {}, {"off": 0.0}, {"scale": 1024.0}, {"kl": 1.0, "off": 1.0})
def test_a_loss_as_it_should_be_holds(mode: str, changes: dict[str, Any]) -> None:
    assert of_the_loss(loss_of(mode, **changes), mode, changes.get("scale", 1.0)) is None


@cases(
    "wrong name factor",
    *(({"loss": factor}, "loss_scale", factor) for factor in (15.0, 0.2)),
    *(({"weights": factor}, "loss_scale", factor) for factor in (15.0, 0.2)),
    *(({"kl": factor}, "kl_scale", factor) for factor in (3.0, 0.0, -1.0)),
    ({"loss": -1.0}, "loss_sign", -1.0),
    ({"of_advantage": torch.abs}, "loss_sign", None),
    ({"of_advantage": lambda a: (1 + 0.9 * torch.randn(40, 20)) * a}, "loss", None),
    ({"uncorrected": True}, "importance_weights", None),
    ({"power": -1}, "importance_weights", None),
    ({"clips_wrong": True, "off": 1.0, "of_kl": 0.0}, "loss", None),
)
def test_what_is_wrong_with_a_loss_is_named(wrong: dict[str, Any], name: str, factor: float | None) -> None:
    found = of_the_loss(loss_of(**wrong))
    assert found["name"] == name, found
    assert factor is None or found["factor"] == pytest.approx(factor, abs=0.02)


def test_few_tokens_that_are_off_are_no_factor_of_the_loss() -> None:
    found = of_the_loss(loss_of(off=0.0, of_advantage=lambda a: a * (1 + 0.2 * (torch.arange(20) % 10 == 3))))
    assert found["name"] == "loss"


@cases(
    "mode of_all",
    *((mode, False) for mode in MODES),
    *((mode, True) for mode in MODES),
)
def test_responses_that_are_filtered_out_are_no_scale(mode: str, of_all: bool) -> None:
    """Nor micro-batches without any; means are of a micro-batch, or of all, where responses without a token count."""
    mask = torch.ones(12, 6)
    mask[[0, 1, 2, 4, 6]] = 0
    weight = torch.cat([token_weights(lambda x, m=m: aggregate(x, m, mode), m).nan_to_num() for m in mask.split(2)]) / 6
    if of_all:
        weight = {MODES[0]: mask / mask.sum(), MODES[1]: mask / 6 / 12, MODES[2]: mask / 12}[mode]
    tokens = {"response_mask": mask, "weight": weight, "log_prob": -mask, "advantage": mask, "coefficient": -weight}
    assert of_the_loss([{name: of[i : i + 2] for name, of in tokens.items()} for i in range(0, 12, 2)], mode) is None


# Rows, as verl's trainer has them.

UIDS = numpy.repeat([f"prompt {i}" for i in range(PROMPTS)], ANSWERS).astype(object)


def columns(rewards: Tensor, estimator: str = "grpo", seed: int = 0) -> dict[str, Any]:
    """An update's columns with advantages of verl's estimator."""
    lengths = torch.randint(8, LENGTH + 1, (ROWS, 1), generator=torch.Generator().manual_seed(seed))
    mask, scores = (torch.arange(LENGTH) < lengths).float(), torch.zeros(ROWS, LENGTH)
    scores[torch.arange(ROWS), lengths[:, 0] - 1] = rewards
    options: dict[str, Any] = {"index": UIDS}
    if estimator == "reinforce_plus_plus":
        options = {"config": type("Config", (), {"gamma": 1.0})}
    estimate = core_algos.get_adv_estimator_fn(estimator)
    advantages, _ = estimate(token_level_rewards=scores, response_mask=mask, **options)
    return {"uid": UIDS, "token_level_rewards": scores, "advantages": advantages, "response_mask": mask}


def of_the_rows(data: dict[str, Any] | list[TrainedRow]) -> dict[str, str | None]:
    """What is said of rows alone in one step: by identity, what is broken; None where it is not checked."""
    rows = data if isinstance(data, list) else TrainedData(data).rows
    answer = of_one_step([0.0] * len(NAMES), rows)
    broken = {each["identity"]: each["name"] for each in answer["warnings"]}
    return {
        name: broken.get(name, "") if state != "unchecked" else None
        for name, state in states(answer).items()
        if name in ("responses", "groups", "advantages")
    }


@pytest.mark.parametrize("kind", ["right or wrong", "graded", "heavy-tailed"])
@cases("estimator", "grpo", "rloo", "opo", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
def test_advantages_follow_rewards_unless_moved_or_turned(estimator: str, kind: str) -> None:
    told = 0
    for seed in range(8):
        draw = torch.rand(ROWS, generator=torch.Generator().manual_seed(seed))
        rewards = {"graded": draw, "heavy-tailed": (3 * noise(seed)[:, 0]).exp()}.get(kind, (draw < 0.4).float())
        data = columns(rewards, estimator, seed)
        assert of_the_rows(data)["advantages"] == "", seed
        assert of_the_rows(data | {"advantages": -data["advantages"]})["advantages"] == "advantage_order"
        moved = columns(rewards[torch.randperm(ROWS)], estimator, seed)["advantages"]
        told += of_the_rows(data | {"advantages": moved})["advantages"] != ""
    assert told >= 4  # by chance, few pairs contradict each other in an update


@cases("power broken", (0, False), (1, False), (2, True), (3, True))
def test_advantages_are_divided_by_the_rewards_deviation_once_or_not(power: int, broken: bool) -> None:
    """By the mean reward instead, of as many kinds of groups, none of its powers fits."""
    groups = (torch.rand(PROMPTS, ANSWERS, generator=torch.Generator().manual_seed(1)) < 0.4).float()
    data = columns(groups.flatten())
    for by, name in ((groups.std(1) ** power, "advantages" * broken), (groups.mean(1), "")):
        advantages = (groups - groups.mean(1, keepdim=True)) / (by.unsqueeze(1) + 1e-6)
        rows = data | {"advantages": advantages.view(-1, 1) * data["response_mask"]}
        assert of_the_rows(rows)["advantages"] == name


@cases("seed", *range(8))
def test_credit_by_turn_is_healthy_and_advantages_at_the_other_end_are_not(seed: int) -> None:
    data = columns((torch.rand(ROWS, generator=torch.Generator().manual_seed(seed)) < 0.4).float(), seed=seed)
    by_turn = data["advantages"].clone()
    for row in range(0, ROWS, 5):
        by_turn[row, : int(data["response_mask"][row].sum()) // 2] = 0
    assert of_the_rows(data | {"advantages": by_turn})["advantages"] == ""
    assert of_the_rows(data | {"advantages": data["advantages"].flip(1)})["advantages"] == "advantage_mask"


def agents(seed: int, sessions: bool = False) -> list[TrainedRow]:
    """Each row's prompt is a state: the start, or one of six of its game, which other uids have, too."""
    draw = random.Random(seed)
    rows = []
    for i in range(ROWS):
        state = 0 if draw.random() < 0.2 else 1 + draw.randrange(6) + 5 * (i // ANSWERS % 2)
        rows.append(TrainedRow(f"uid {i // ANSWERS}", prompt=i % PROMPTS if sessions else state, response=i))
    return [replace(row, session_id=str(i // 2)) for i, row in enumerate(rows)] if sessions else rows


@cases("seed", *range(20))
def test_the_states_of_agents_are_not_mixed(seed: int) -> None:
    assert of_the_rows(agents(seed))["groups"] is None


def test_states_of_which_there_are_as_many_as_of_prompts_are_not_mixed() -> None:
    """verl's trainer says which rows are one trajectory's."""
    assert not of_the_rows(agents(0, sessions=True))["groups"]


RESPONSES = ("responses", "response_mask", "old_log_probs")


def sampled(wrong: str = "", certainty: float = 1.0, nested: Sequence[str] = ()) -> dict[str, Any]:
    """An update's columns of prompts that are repeated and of sampled responses; `wrong` is done wrongly.

    Nested columns are without padding, as verl's engine has them: the older trainer nests the inputs alone.
    """
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, 50, (PROMPTS, 4), generator=generator)
    prompts = prompts.repeat(ANSWERS, 1) if wrong == "interleaved" else prompts.repeat_interleave(ANSWERS, 0)
    # Requests of one prompt have one policy; with one seed, the same noise.
    policy = (
        (certainty * torch.randn(PROMPTS, 16, 50, generator=generator)).log_softmax(-1).repeat_interleave(ANSWERS, 0)
    )
    draw = torch.rand(policy.shape, generator=generator)
    ends = torch.randint(13, 17, (ROWS, 1), generator=generator)
    if wrong == "seeded":
        draw, ends = (each[::ANSWERS].repeat_interleave(ANSWERS, 0) for each in (draw, ends))
    responses = (policy - draw.log().neg().log()).argmax(-1)
    mask = (torch.arange(16) < ends).long()
    found = {"responses": responses, "response_mask": mask, "input_ids": torch.cat([prompts, responses], 1)}
    found |= {"attention_mask": torch.cat([torch.ones_like(prompts), mask], 1)}
    # Padding may have any number.
    found["old_log_probs"] = policy.gather(-1, responses.unsqueeze(-1))[..., 0].masked_fill(mask == 0, -99.0)
    rows = [*range(ROWS // 2)] * 2 if wrong == "doubled" else range(ROWS)  # where a gather takes a rank's rows twice
    found = {name: values[[*rows]] for name, values in found.items()}
    for name in nested:
        masks = found["attention_mask"] if name not in RESPONSES else (torch.arange(16) < ends[[*rows]])
        parts = [values[inside.bool()] for values, inside in zip(found[name], masks, strict=True)]
        found[name] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    return {"uid": UIDS[[*rows]], **found}


@pytest.mark.parametrize("nested", [(), ("input_ids",), ("input_ids", *RESPONSES)])
@cases(
    "wrong responses groups",
    ("interleaved", "", "mixed_groups"),
    ("seeded", "repeated_responses", ""),
    ("doubled", "repeated_responses", ""),
    ("", "", ""),
)
def test_prompts_of_one_uid_and_copies_are_told(wrong: str, responses: str, groups: str, nested: Any) -> None:
    found = of_the_rows(sampled(wrong, nested=nested))
    assert (found["responses"], found["groups"]) == (responses, groups)
    # Equal responses of a policy that is sure are not copies.
    assert of_the_rows(sampled(certainty=20.0, nested=nested))["responses"] == ""


def test_rows_of_an_updates_mini_batches_are_compared_together_and_once(tmp_path: Path) -> None:
    data, asked = columns(torch.rand(ROWS)), []
    parts = [TrainedData({name: column[i : i + 8] for name, column in data.items()}) for i in (0, 8)]
    evidence = UpdateEvidence(str(tmp_path), None, 1)
    for step, (counted, of) in enumerate(((parts[:1], "actor"), (parts, "actor"), (parts, "critic"))):
        for part in counted:
            evidence.add([], part)
            evidence.take_in_rows(part)
        evidence.write(step, {f"{of}/gradloc/token_norm_max": 1.0}, lambda rows: asked.append(len(rows)))
    assert asked == [8, 16]  # a critic's rows are the actor's


def test_correlations_are_means_over_the_prompts_in_which_both_differ() -> None:
    draw = random.Random(0)
    for size in (1e-3, 1.0, 1e3) * 20:
        rewards, advantages = ([draw.gauss(0.0, size) for _ in range(40)] for _ in range(2))
        uids = sorted(draw.choices("abcd", k=40))
        every = [*zip(uids, rewards, advantages, strict=True)]
        rows = [TrainedRow(uid, reward=reward, advantage=advantage, length=1) for uid, reward, advantage in every]
        rows += [TrainedRow("e", reward=1.0, advantage=number, length=1) for number in (1.0, 2.0)]  # the same
        rows += [TrainedRow("f", reward=number, advantage=None, length=1) for number in (1.0, 2.0)]
        rows += [TrainedRow("g", reward=reward, advantage=-1.0, length=1) for reward in (math.nan, 1.0, math.inf)]
        rows += [TrainedRow(uid, reward=1e6) for uid in "abcd"]  # of which no token is trained
        groups = [numpy.array([of[1:] for of in every if of[0] == uid]) for uid in "abcd"]
        counts = [len(of) - 1 for of in groups]
        expected = numpy.average([numpy.corrcoef(of.T)[0, 1] for of in groups], weights=counts)
        found = of_rows_together(rows)
        assert found["advantages.correlation"] == pytest.approx(expected) == 1 - found["advantages.not_following"]


def test_rewards_normalized_one_by_one_are_no_contradiction() -> None:
    """As GDPO does, which only verl 0.9 has: here for a score that is one of two rewards, the other one against it."""
    for seed in range(10):
        draw, chance = torch.rand(2, ROWS, generator=torch.Generator().manual_seed(seed))
        score = (draw < 0.4).float()
        against = ((1 - score) * 0.6 + 0.2 > chance).float()
        data = columns(score, seed=seed)
        advantages = (normalized(score) + normalized(against)).view(-1, 1) * data["response_mask"]
        assert of_the_rows(data | {"advantages": advantages})["advantages"] == ""
