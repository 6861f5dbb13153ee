"""A search beside TokenClip: what training did not have is not looked for."""

from typing import Any

import pytest
import torch
from notation import Patch
from plain_passes import Loop
from torch import Tensor, nn

from gradloc import TokenClip, TokenClipConfig
from gradloc.bundles import bundle_writer
from gradloc.measure.micro_batch import MicroBatch
from gradloc.measure.passes import Passes

VOCABULARY, HIDDEN, ROWS, PROMPT, RESPONSE = 40, 8, 2, 3, 12
# This token's signal is amplified on its way back, before the second layer or within it.
BLOWN = 7
# In the response: where it stands, and what its hidden state predicts.
INPUT, CUT = (0, 4), (0, 5)
LOUD = (1, 2)


def blown(hidden: Tensor, where: Tensor) -> Tensor:
    """The same, whose gradient is amplified at some positions."""
    hidden = hidden.clone()
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: torch.where(where.unsqueeze(-1), 1e4 * gradient, gradient))
    return hidden


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.experts = nn.ModuleList([nn.Identity()] * 5)  # more than there are layers

    def forward(self, hidden: Tensor, where: Tensor | None = None) -> tuple[Tensor, None]:
        change = torch.tanh(self.linear(hidden))
        return hidden + (change if where is None else blown(change, where)), None


class Model(nn.Module):
    """Each token on its own; with layers that are not of the text model, too."""

    def __init__(self, inside: bool = False) -> None:
        super().__init__()
        self.inside = inside
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY)
        self.vision_tower = nn.ModuleDict({"layers": nn.ModuleList([Layer() for _ in range(3)])})

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(self, ids: Tensor) -> Tensor:
        (hidden, _), where = self.layers[0](self.embed_tokens(ids)), ids == BLOWN
        hidden, _ = self.layers[1](hidden, where) if self.inside else self.layers[1](blown(hidden, where))
        return self.lm_head(hidden)


class Training(Loop):
    """A training loop with both; the second step has a token that TokenClip cuts, and a loud one."""

    def __init__(self, meter: str = "local", token_clip: str = "drop", inside: bool = False, **settings: Any) -> None:
        model = Model(inside)
        config = TokenClipConfig(action=token_clip, factor=50.0, warmup_steps=1, max_share=0.2)
        parts = {"meter": meter, "token_clip": TokenClip(model, config)}
        torch.manual_seed(1)
        self.advantage = torch.randn(ROWS, 1).sign().expand(ROWS, RESPONSE).clone()
        ids = torch.randint(BLOWN + 1, VOCABULARY, (1, ROWS, PROMPT + RESPONSE))
        super().__init__(model, ids, PROMPT, parts=parts, **{"grad_norm_threshold": 12.0, **settings})
        self.train(1)
        assert not self.gradloc.events
        self.ids[0, INPUT[0], PROMPT + INPUT[1]] = BLOWN

    def train(self, step: int) -> dict[str, Any] | None:
        """The clip line of a step."""
        self.start(step)
        self.gradloc.locate(0, 0)
        return self.clip.end_mini_batch()

    def start(self, step: int) -> None:
        self.gradloc.start_update(step)
        self.clip.discard()
        self.backward(self.advantage)


@pytest.fixture
def probed(monkeypatch: Patch) -> list[Tensor]:
    """The tokens of each probe; the passes of a drop are none."""
    found: list[Tensor] = []
    forward_backward = Passes._forward_backward

    def watched(self: Passes, subset: Any, own: int | None = None) -> None:
        if subset is not None and own is None:
            found.append(subset.keep != 0)
        forward_backward(self, subset, own)

    monkeypatch.setattr(Passes, "_forward_backward", watched)
    return found


@pytest.mark.parametrize("meter", ["local", "reduced"])
@pytest.mark.parametrize("token_clip", ["drop", "smooth", "log"])
@pytest.mark.parametrize("until", ["explained", "exhaustive"])
def test_a_token_that_was_cut_is_in_no_probe(meter: str, token_clip: str, until: str, probed: list[Tensor]) -> None:
    training = Training(meter, token_clip, bisect_until=until)
    training.advantage[LOUD] *= 40
    line = training.train(2)
    assert line is not None
    assert [((t["row"], t["position"]), t["boundary"]) for t in line["tokens"]] == [(CUT, "layers.0")]
    (event,) = training.gradloc.events
    culprits = {(culprit["row"], culprit["position"]) for culprit in event["culprits"]}
    was_probed = any(keep[CUT] for keep in probed)
    if token_clip == "log":  # it was not cut
        assert CUT in culprits and was_probed
        return
    assert culprits == {LOUD} and event["explained"] and not was_probed and len(probed) > 1
    assert all(culprit["share"] < 1.1 for culprit in event["culprits"])


@pytest.mark.parametrize("meter", ["local", "reduced"])
def test_a_unit_over_by_a_cut_token_is_judged_by_its_norm(meter: str, probed: list[Tensor]) -> None:
    """The layer that amplifies its signal had that in training. No other token is named for it."""
    training = Training(meter, inside=True)
    assert training.train(2) is not None
    (event,) = training.gradloc.events
    assert event["culprits"] == [] and not event["explained"] and event["error"] is None
    assert probed and not any(keep[CUT] for keep in probed)


def test_a_mini_batch_that_was_thrown_away_is_in_no_other() -> None:
    training, other = Training(), Training()
    for each in (training, other):
        each.advantage[LOUD] *= 40
    training.start(2)  # its optimizer step never comes
    assert training.train(2) == other.train(2)
    (event,), (expected,) = training.gradloc.events, other.gradloc.events
    assert event["culprits"] == expected["culprits"] and event["explained"]


def test_a_bundle_does_not_have_what_was_cut() -> None:
    """Nothing is cut in a replay."""
    columns = ("response_mask", "weight", "log_prob", "coefficient", "cut")
    micro_batch = MicroBatch({}, [0], (torch.get_rng_state(), None), {name: torch.ones(1, 2) for name in columns})
    saved = bundle_writer._saved(micro_batch, lambda _: [])
    assert "cut" in micro_batch.tokens and saved.tokens.keys() == micro_batch.tokens.keys() - {"cut"}
