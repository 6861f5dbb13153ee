"""Alignment: log-probs of a real model, with the columns spoiled as bugs in the data path spoil them."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from notation import cases
from torch import Tensor

from gradloc.judge.alignment import find_off, misaligned_warning
from gradloc.measure.alignment import align, misplaced, misplaced_share, own_alignment
from gradloc.sums import PAIR_SUMS, PAIRS, SHIFTS

Columns = dict[str, Tensor]
ROWS, LENGTH, PROMPT, WORDS = 24, 40, 5, 50


def alignment_warning(micro_batches: list[Columns]) -> Any:
    """The warning; the metric is at least its share, where responses can be told one by one, as that of any pair."""
    sums = own_alignment(micro_batches)
    found = misaligned_warning(find_off(sums.tolist()))
    if found is not None and found["share"] < 1:
        assert (misplaced_share(sums) or 0.0) >= found["share"] - 1e-6
    return found


class Model(torch.nn.Module):
    """A small recurrent language model, whose log-probs are gathered as trainers do it."""

    def __init__(self, seed: int, sharpness: float) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.step = torch.nn.Embedding(WORDS, 24), torch.nn.GRU(24, 24, batch_first=True)
        self.head = torch.nn.Linear(24, WORDS)
        self.sharpness = sharpness

    def log_probs(self, ids: Tensor, first_logit: int = -1, noise: float = 0.0) -> Tensor:
        """Of the response's tokens; `first_logit` is the position before the response's start that scores its first."""
        logits = self.sharpness * self.head(self.step(self.embed(ids))[0])
        logits = (logits + noise * torch.randn_like(logits)).log_softmax(-1)
        response = ids[:, PROMPT:]
        found = logits[:, :-1].gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        return torch.nn.functional.pad(found, (2, 2))[:, PROMPT + first_logit + 2 :][:, : response.shape[1]].detach()

    def sample(self, rows: int) -> Tensor:
        ids = torch.randint(0, WORDS, (rows, PROMPT))
        for _ in range(LENGTH):
            logits = self.sharpness * self.head(self.step(self.embed(ids))[0][:, -1])
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
        return ids.detach()


@pytest.fixture(params=[3.0, 12.0], ids=["flat", "sharp"], scope="module")
def model(request: pytest.FixtureRequest) -> Model:
    return Model(0, request.param)


def batch(model: Model, noise: float = 0.02, drift: float = 0.0, seed: int = 1) -> Columns:
    """A step's columns: responses of several lengths; `drift` moves the policy away from what the rollout has."""
    torch.manual_seed(seed)
    ids = model.sample(ROWS)
    policy = Model(0, model.sharpness)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += drift * torch.randn_like(parameter)
    mask = torch.arange(LENGTH) < torch.randint(12, LENGTH + 1, (ROWS, 1))
    now = policy.log_probs(ids)
    rollout, reference = model.log_probs(ids, noise=noise), model.log_probs(ids)
    columns = {"response_mask": mask.float(), "ids": ids, "log_prob": now, "old_log_prob": now}
    return columns | {"rollout_log_prob": rollout, "ref_log_prob": reference}


@cases("noise drift", (0.0, 0.0), (0.5, 0.0), (0.02, 0.1), (0.3, 0.05))
def test_noise_and_old_weights_are_no_misalignment(model: Model, noise: float, drift: float) -> None:
    assert all(alignment_warning([batch(model, noise, drift, seed)]) is None for seed in range(2))


@pytest.mark.parametrize("temperature", [0.6, 1.5, None])
def test_another_temperature_and_top_p_are_no_misalignment(model: Model, temperature: float | None) -> None:
    columns = batch(model)
    if temperature:
        columns["rollout_log_prob"] = Model(0, model.sharpness / temperature).log_probs(columns["ids"])
    else:
        rollout = columns["rollout_log_prob"]
        columns["rollout_log_prob"] = torch.where(rollout > -0.7, 0.0, rollout + 0.2)
    assert alignment_warning([columns]) is None


@pytest.mark.parametrize("late", [1, 2, -1])
def test_log_probs_of_the_rollout_one_entry_off(model: Model, late: int) -> None:
    """A list with an entry too many at its start, or one too few."""
    columns = batch(model)
    columns["rollout_log_prob"] = model.log_probs(columns["ids"], first_logit=-1 - late, noise=0.02)
    found = alignment_warning([columns])
    assert found is not None and found["name"] == "misaligned" and found["share"] == 1
    by, way = ("one position" if abs(late) == 1 else "2 positions"), "late" if late > 0 else "early"
    fits = f"(r[t] fits p[t{-late:+d}])"
    assert found["sentence"].startswith(f"The rollout's log-probs are {by} {way} in all responses {fits}")
    del columns["ref_log_prob"]
    found = alignment_warning([columns])
    assert found is not None and "a reference tells which of the two" in found["sentence"]


def gathered(columns: Columns, model: Model, name: str, first_logit: int) -> Tensor:
    return model.log_probs(columns["ids"], first_logit=first_logit)


def padded(columns: Columns, model: Model, name: str, value: float) -> Tensor:
    """Missing log-probs at the end, filled up (rllm #816)."""
    is_tail = torch.arange(LENGTH) >= columns["response_mask"].sum(1, keepdim=True) - 8
    return torch.where(is_tail, value, columns[name])


def of_other_rows(columns: Columns, model: Model, name: str, value: float) -> Tensor:
    """Of other lengths, which is no padding."""
    return torch.where(columns["response_mask"].bool().roll(1, 0), columns[name].roll(1, 0), value)


@cases(
    "spoil names value said",
    (gathered, "log_prob old_log_prob", -2, "Training's log-probs are one position late in all responses (p[t] fi"),
    (gathered, "old_log_prob", -2, "The old log-probs are one position late"),
    (gathered, "ref_log_prob", 0, "The reference's log-probs are one position early"),
    (padded, "rollout_log_prob", 0.0, "The rollout's log-probs end in exact zeros"),
    (padded, "log_prob old_log_prob", -1.0, "Training's log-probs end in one repeated value"),
    (of_other_rows, "old_log_prob", 0.0, "are those of other responses of the batch"),
)
def test_a_wrong_column_is_said(
    model: Model, spoil: Callable[..., Tensor], names: str, value: float, said: str
) -> None:
    columns = batch(model)
    columns.update(dict.fromkeys(names.split(), spoil(columns, model, names.split()[0], value)))
    found = alignment_warning([columns])
    assert found is not None and said in found["sentence"]


def test_some_responses_and_from_a_token_inside_on(model: Model) -> None:
    """An entry without an id is skipped in one of two lists (dynamo #8630, cookbook #483)."""
    columns = batch(model)
    rollout, start = columns["rollout_log_prob"], 9
    short = torch.cat([rollout[:, :start], rollout[:, start + 1 :], rollout[:, :1]], 1)
    chosen = torch.arange(ROWS).unsqueeze(1) < ROWS // 3
    columns["rollout_log_prob"] = torch.where(chosen, short, rollout)
    found = alignment_warning([columns])
    assert found is not None and "from inside them on (on average from token " in found["sentence"]
    assert 0.1 < found["share"] < 0.45
    mask = columns["response_mask"].bool()
    aligned = align(columns["rollout_log_prob"], columns["log_prob"], mask)
    moved = aligned.shift != 0
    assert not moved[ROWS // 3 :].any() and moved[: ROWS // 3].sum() >= 3
    assert (aligned.shift[moved] == 1).all() and ((aligned.start[moved] - start).abs() <= 6).all()
    between = torch.arange(LENGTH) == start - 1  # a tool's output, after which the second turn begins
    columns["response_mask"] = columns["response_mask"] * ~between
    found = alignment_warning([columns])
    assert found is not None and found["name"] == "retokenized"


def test_tokens_that_were_encoded_again_are_told(model: Model) -> None:
    """Pairs of sampled tokens become one other token: the log-probs that were reported belong to ever other ones."""
    columns, start = batch(model), 10
    ids, sampled = columns["ids"].clone(), model.log_probs(columns["ids"], noise=0.02)
    kept = [*range(start), *(t for t in range(start, LENGTH) if (t - start) % 3)]
    response = torch.cat([ids[:, PROMPT:][:, kept], torch.randint(0, WORDS, (ROWS, LENGTH - len(kept)))], 1)
    ids[:, PROMPT:] = response
    inside = torch.arange(LENGTH) < len(kept)
    columns["response_mask"] = (columns["response_mask"].bool() & inside).float()
    now = model.log_probs(ids)
    columns |= {"rollout_log_prob": sampled, "log_prob": now, "old_log_prob": now, "ref_log_prob": now}
    found = alignment_warning([columns])
    assert found is not None and "The rollout's log-probs" in found["sentence"] and "inside" in found["sentence"]
    # Engines that are apart from the first token on lose nothing inside.
    for seed in range(6):
        found = alignment_warning([batch(model, noise=1.5, seed=seed)])
        assert found is None or "agree with training's log-probs at first" not in found["sentence"]


@cases("lost kept is_lost", (256.5, 1755.9, False), (537.2, 780.8, False), (256.5, 30.0, True))
def test_few_responses_are_lost_if_others_are_near(lost: float, kept: float, is_lost: bool) -> None:
    """The first are distances of a run whose server had permuted rows of q_proj, of which the first tokens show
    little; the second those of a rollout that is late by six large steps.
    """
    sums = dict.fromkeys(PAIR_SUMS, 0.0) | {"responses": 64.0, "aligned": 22.0, "lost": 7.0, "lost_start": 107.0}
    sums |= {"lost_tokens": 106.0, "lost_distance": lost, "kept_tokens": 1458.0, "kept_distance": kept}
    sums |= {"tokens": 1564.0, "first_square": 1e4, "second_square": 1e4, "product": 5e3}
    off = find_off([*sums.values(), *[0.0] * (len(PAIRS) - 1) * len(sums)])["rollout"]
    assert (off is not None and off.kind == "lost") == is_lost


def test_one_wrong_token_in_each_response_moves_none(model: Model) -> None:
    """An end token that was appended has a large distance alone, which a moved comparison leaves out or halves."""
    columns = batch(model)
    is_last = torch.arange(LENGTH) == columns["response_mask"].sum(1, keepdim=True) - 1
    columns["rollout_log_prob"] = torch.where(is_last, 0.0, columns["rollout_log_prob"])
    for name in ("log_prob", "old_log_prob", "ref_log_prob"):
        columns[name] = torch.where(is_last, -9.0, columns[name])
    assert alignment_warning([columns]) is None


def test_log_probs_of_other_rows(model: Model) -> None:
    """Rows that were balanced between ranks in one column alone; also between micro-batches of a rank."""
    columns = batch(model)
    columns["response_mask"] = torch.ones_like(columns["response_mask"])
    columns["rollout_log_prob"] = columns["rollout_log_prob"].flip(0)
    halves = [{name: values[half::2] for name, values in columns.items()} for half in range(2)]
    found = alignment_warning(halves)
    assert found is not None and "are those of other responses of the batch" in found["sentence"]


def test_the_distances_are_those_of_a_loop_over_the_tokens() -> None:
    torch.manual_seed(0)
    a, b = -3 * torch.rand(5, 9), -3 * torch.rand(5, 9)
    a[0, 3], b[1, 2] = float("nan"), -float("inf")
    mask = torch.rand(5, 9) < 0.8
    found = align(a, b, mask)
    known = mask & a.isfinite() & b.isfinite()
    for number, k in enumerate(SHIFTS):
        here = there = 0.0
        for row, t in itertools.product(range(5), range(9)):
            if 0 <= t + k < 9 and known[row, t] and known[row, t + k]:
                here += float((a[row, t] - b[row, t]).abs())
                there += float((a[row, t] - b[row, t + k]).abs())
        assert float(found.compared[0, number]) == pytest.approx(here, rel=1e-5)
        assert float(found.compared[1, number]) == pytest.approx(there, rel=1e-5)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 1)])
def test_empty_and_short_responses_say_nothing(shape: tuple[int, int]) -> None:
    columns = {name: -torch.rand(shape) for name in ("log_prob", "old_log_prob", "rollout_log_prob", "ref_log_prob")}
    columns["response_mask"] = torch.ones(shape)
    assert alignment_warning([columns]) is None
    found, shift = misplaced(columns)
    assert found.shape == shape and not found.any() and not shift.any()
