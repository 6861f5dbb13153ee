"""TokenClip's settings, statistics and places, each on its own."""

import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from notation import cases
from plain_passes import Loop
from test_token_clip_search import Model
from torch import Tensor, nn

from gradloc import TokenClip, TokenClipConfig
from gradloc.judge.sentences import clips_in_words
from gradloc.token_clip.token_clip import UsualSignal
from gradloc.token_clip.watched_pass import Positions


def after(values: list[float], warmup_steps: int = 20, beta: float = 0.98) -> UsualSignal:
    usual = UsualSignal()
    for value in values:
        usual.take_in(value, TokenClipConfig(beta=beta, warmup_steps=warmup_steps))
    return usual


def test_what_signal_is_usual() -> None:
    values = [3.0, 0.0, 1.0, math.nan, math.inf, 2.0]
    assert after(values, 3, 0.9).value == 2.0 and after(values, 3, 0.9).count == 3
    # It is at least half the 90th percentile of recent ones.
    usual = after([1.0] * 50 + [100.0] * 8)
    assert usual.average < 50 and usual.value == 50.0
    assert len(after([1.0] * 200).recent) == 64
    # Rare spikes leave it as it is.
    spiked = after([1e3 if i in (5, 30, 50, 70) else 1.0 for i in range(80)])
    assert spiked.value < 1.3
    # A lasting change is followed.
    assert after([1.0] * 20 + [10.0] * 200).value > 9.0
    # With sparse rewards, the steps that have one are usual.
    values = [1.0 if i % 5 == 0 else 1e-3 for i in range(200)]
    usual = UsualSignal()
    over = []
    for i, value in enumerate(values):
        over += [i] * (usual.value > 0 and value > 4 * usual.value)
        usual.take_in(value, TokenClipConfig())
    assert over == []
    # Soon after a quiet phase, ordinary steps are usual.
    for before in ([1e-4] * 20, [1.0] * 30 + [1e-4] * 300):
        usual, over = after(before), []
        for _ in range(30):
            over.append(usual.value * 4 < 1.0)
            usual.take_in(1.0, TokenClipConfig())
        assert sum(over) <= 8


# Left-padded prompts, right-padded responses of two columns; the rows have 3, 4 and 2 tokens.
MASK = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 0], [0, 0, 1, 1, 0]]).bool()
PLACES = Positions(MASK, [3, 3, 3])


def tokens_of(places: Positions, shape: tuple[int, ...], whole: bool = False) -> tuple[list[int], list[int]]:
    """The row and the position in the response that each position predicts, in their order."""
    index, known = places.places(shape, whole)
    found = known.nonzero()[index[known].argsort()]
    return found[:, 0].tolist(), (found[:, 1] - 3).tolist()


def test_positions_of_hidden_states_with_padding_and_in_parts() -> None:
    # The hidden state in column 2 predicts the response's first token, in column 3.
    assert tokens_of(PLACES, (3, 5)) == ([0] * 5 + [1] * 5 + [2] * 5, [-2, -1, 0, 1, 2] * 3)
    without_padding = ([0] * 3 + [1] * 4 + [2] * 2, [-1, 0, 1, -2, -1, 0, 1, 0, 1])
    assert tokens_of(PLACES, (1, 9)) == tokens_of(PLACES, (9,), whole=True) == without_padding
    # Hidden states of something else have none.
    assert PLACES.places((2, 5)) is None and PLACES.places((9,)) is None
    # There may be more than the tokens: verl 0.9's `pad_to_length` adds some at the end.
    assert tokens_of(PLACES, (1, 32)) == tokens_of(PLACES, (1, 9))
    # A part of the sequences.
    parts = [Positions(MASK, [3, 3, 3], part) for part in (0, 1)]
    # Ten positions, of which the last belongs to no token.
    assert tokens_of(parts[0], (1, 5)) == ([0, 0, 0, 1, 1], [-1, 0, 1, -2, -1])
    assert tokens_of(parts[1], (1, 5)) == ([1, 1, 2, 2], [0, 1, 0, 1])
    assert tokens_of(parts[1], (9,), whole=True) == tokens_of(PLACES, (9,), whole=True)


def test_the_boundaries_are_those_of_the_text_model() -> None:
    clip = TokenClip(Model(), TokenClipConfig(enable=True))
    assert clip.boundaries == ["embed_tokens", "layers.0", "layers.1", "log_probs"]
    # A model without layers is refused, and a state of another model.
    with pytest.raises(ValueError, match=r"no list of decoder layers.*token_clip.enable=False"):
        TokenClip(nn.Linear(2, 2), TokenClipConfig(enable=True))
    state = clip.state_dict()
    clip.load_state_dict(None)  # of a checkpoint that has none
    assert clip.state_dict() == state
    del state["boundaries"]["layers.1"]
    with pytest.raises(ValueError, match=r"only in this model: \['layers.1'\]"):
        clip.load_state_dict(state)


class Clipped(Loop):
    """Rows of tokens that count up from the prompt's only one; after a step whose advantages are 1."""

    def __init__(self, rows: int, length: int, **settings: Any) -> None:
        model, self.scale = Model(), 1.0
        self.token_clip = TokenClip(model, TokenClipConfig(enable=True, warmup_steps=1, **settings))
        parts = {"token_clip": self.token_clip, "loss_scale": lambda: self.scale}
        ids = torch.arange(1 + length).expand(1, rows, -1)
        super().__init__(model, ids, 1, parts=parts, grad_norm_threshold=1e9)
        assert self.line(torch.ones(rows, length)) is None

    def line(self, advantages: Tensor) -> dict[str, Any] | None:
        self.step(advantages)
        return self.token_clip.end_mini_batch()


def test_only_the_outlier_is_cut_and_told() -> None:
    loop = Clipped(1, 4)
    found = loop.line(torch.tensor([[1.0, -1.0, 900.0, 1.0]]))
    assert found is not None
    (token,) = found["tokens"]
    assert (token["position"], token["token_id"], token["boundary"], token["cut"]) == (2, 3, "log_probs", True)
    assert token["multiple"] == pytest.approx(900)
    metrics = loop.token_clip.metrics()
    assert metrics["actor/token_clip/over"] == metrics["actor/token_clip/cut"] == 1
    assert metrics["actor/token_clip/largest"] == pytest.approx(900)
    assert loop.token_clip.boundaries[int(metrics["actor/token_clip/boundary"])] == "log_probs"
    assert loop.token_clip.metrics() == {}
    # Nothing is watched outside of a pass.
    loop.model.zero_grad()
    (1e6 * loop.model(torch.arange(3).unsqueeze(0))).sum().backward()
    assert loop.model.embed_tokens.weight.grad.abs().max() > 1e5
    assert loop.token_clip.end_mini_batch() is None


@pytest.mark.parametrize(("scale", "finite"), [(1.0, True), (1024.0, False)])
def test_an_overflow_is_left_for_the_gradient_scaler(scale: float, finite: bool) -> None:
    loop = Clipped(1, 3)
    loop.scale = scale
    assert (loop.line(torch.tensor([[1.0, math.inf, 1.0]])) is not None) == finite
    assert bool(loop.model.embed_tokens.weight.grad.isfinite().all()) == finite


def test_what_it_cannot_read_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Tokens are cut without their values, also where no hidden state is seen."""
    clip = TokenClip(Model(), TokenClipConfig(enable=True, warmup_steps=1))
    for size in (1.0, 100.0):
        clip.begin_pass(PLACES.select([0], 1), [0])
        log_prob = torch.zeros(1, 1, requires_grad=True)
        clip.observe(log_prob, torch.ones(1), 1.0, Mock(side_effect=RuntimeError("no memory")))
        (size * log_prob).sum().backward()
        clip.end_pass()
        found = clip.end_mini_batch()
    assert found is not None and found["over"]["log_probs"] == 1 and log_prob.grad.tolist() == [[0.0]]
    (token,) = found["tokens"]
    assert token["multiple"] == pytest.approx(100) and token["weight"] is None
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "sees the log-probs only" in said[0] and "cannot read the tokens" in said[1]


def test_of_many_tokens_over_a_bound_the_largest_are_told() -> None:
    advantages = 10 + torch.rand(40, 11, generator=torch.Generator().manual_seed(1)) * 100
    found = Clipped(40, 11, action="log").line(advantages)
    assert found is not None and found["over"]["log_probs"] == 440
    of_log_probs = [token["multiple"] for token in found["tokens"]]
    assert len(of_log_probs) == 64 and of_log_probs == sorted(of_log_probs, reverse=True)
    assert of_log_probs[0] == pytest.approx(float(advantages.max()))


def line(**found: Any) -> dict[str, Any]:
    token = {"rank": 1, "row": 3, "position": 5, "boundary": "layers.4", "multiple": 41.26, "token": " 7"}
    counts = {"over": {"layers.4": 1}, "cut": {"layers.4": 1}, "refused": [], "tokens": [token]}
    return {"action": "drop", "factor": 4.0, **counts, **found}


@cases(
    "found sentence",
    (
        {},
        "TokenClip found 1 backward signal over 4 times the usual largest one, and cut 1 (action drop); the largest: "
        "token ' 7' of rank 1, row 3, position 5, 41.3 times the usual at layers.4.",
    ),
    (
        {"over": {"layers.4": 7}, "cut": {"layers.4": 0}, "tokens": []},
        "TokenClip found 7 backward signals over 4 times the usual largest one, and cut 0 (action drop).",
    ),
)
def test_a_line_is_told_in_one_sentence(found: dict[str, Any], sentence: str) -> None:
    assert clips_in_words(line(**found)) == sentence
