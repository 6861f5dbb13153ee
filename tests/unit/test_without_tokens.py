"""A gradient that comes from no token's log-prob: measured, named, and never taken for a token's."""

import json
import math
from typing import Any

import pytest
import torch
from evidence import verdict_on
from notation import cases
from plain_passes import Loop
from test_few_tokens import Natural
from test_search import THRESHOLD
from torch import Tensor, nn
from valid_events import valid_events

from gradloc.judge import judged
from gradloc.judge.verdict import MENTIONED, MOST
from gradloc.levels import EXPLAINS
from gradloc.search.search import Search

ROWS, PROMPT, RESPONSE, VOCABULARY, WIDTH = 4, 2, 12, 17, 8


class AuxiliaryLoss(torch.autograd.Function):
    """Attaches the gradient of a loss to a hidden state, as trainers of MoE models do."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(loss)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, hidden: Tensor, scale: float) -> Tensor:
        hidden = hidden + torch.tanh(self.mix(hidden.cumsum(1)))
        if scale:
            hidden = AuxiliaryLoss.apply(hidden, auxiliary_loss(self, hidden.detach(), scale))
        return hidden


def auxiliary_loss(block: Block, hidden: Tensor, scale: float) -> Tensor:
    return scale * block.router(hidden).logsumexp(-1).square().mean()


class Model(nn.Module):
    """A causal model with two layers, of which the second has an auxiliary loss."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = scale
        self.model = nn.ModuleDict(
            {"embed_tokens": nn.Embedding(VOCABULARY, WIDTH), "layers": nn.ModuleList([Block(), Block()])}
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def hidden(self, ids: Tensor) -> Tensor:
        return self.model["layers"][0](self.model["embed_tokens"](ids), 0.0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.model["layers"][1](self.hidden(ids), self.scale))


def brute_force(model: Model, ids: Tensor) -> dict[str, float]:
    """By layer, the norm of the auxiliary loss's own gradient."""
    with torch.no_grad():
        hidden = model.hidden(ids)
        block = model.model["layers"][1]
        hidden = hidden + torch.tanh(block.mix(hidden.cumsum(1)))
    parameters = list(block.router.parameters())
    gradients = torch.autograd.grad(auxiliary_loss(block, hidden, model.scale), parameters)
    norm = math.hypot(*(float(gradient.norm()) for gradient in gradients))
    layers = ("embed_tokens", "layers.0", "layers.0.router", "layers.1", "lm_head")
    return {**dict.fromkeys(layers, 0.0), "layers.1.router": norm}


def spike(
    scale: float,
    until: str = "explained",
    over: float = 0.2,
    outlier: float = 1.0,
    meter: str = "local",
) -> tuple[Model, Tensor, dict[str, Any]]:
    """The event of a mini-batch with one micro-batch; τ is that part of its norm."""
    model = Model(scale)
    torch.manual_seed(1)
    ids = torch.randint(VOCABULARY, (ROWS, PROMPT + RESPONSE))
    advantages = torch.randn(ROWS, RESPONSE)
    advantages[1, 4] *= outlier

    def step(threshold: float) -> list[dict[str, Any]]:
        settings = {"grad_norm_threshold": threshold, "bisect_until": until}
        loop = Loop(model, ids.unsqueeze(0), PROMPT, parts={"meter": meter}, **settings)
        loop.gradloc.start_update(1)
        loop.backward(advantages)
        before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        loop.gradloc.locate(0, 0)
        after = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert all(map(torch.equal, before, after))
        return loop.gradloc.events

    level = step(1e-9)[0]["global_norm"] * math.sqrt(ROWS * RESPONSE)
    event = judged(*step(over * level))
    assert valid_events(json.dumps(event | {"drill": None}).join("[]"))
    return model, ids, event


@cases(
    "scale until meter",
    *((3.0, "explained", "local"), (1e3, "exhaustive", "local")),
    (1e3, "explained", "reduced"),  # ranks cannot be told apart: the group is measured
)
def test_the_gradient_without_tokens_is_the_auxiliary_losss(scale: float, until: str, meter: str) -> None:
    model, ids, event = spike(scale, until, meter=meter)
    found, expected = event["without_tokens"], brute_force(model, ids)
    assert event["search"] == meter and (found["rank"], found["micro_batch"]) == ({"local": 0}.get(meter), 0)
    assert found["layer_norms"] == pytest.approx(expected, rel=1e-5)
    assert found["norm"] == pytest.approx(expected["layers.1.router"], rel=1e-5)
    whole = event["units"][0]["norm"] if meter == "local" else event["global_norm"]
    assert found["share"] == pytest.approx(found["norm"] / whole)
    # It alone is over the threshold, so no token is called a culprit, although each probe is over τ.
    assert (event["diagnosis"], event["culprits"], event["explained"]) == ("diffuse", [], False)
    assert event["passes"] <= 9 and not event["complete"]
    assert event["verdict"]["cause"] == "auxiliary"
    assert "comes from no token's log-prob, mostly in layers.1.router): look at" in event["verdict"]["sentence"]


def test_only_a_search_that_ends_diffuse_measures_it() -> None:
    _, _, event = spike(0.0, over=0.3, outlier=1e3)
    assert event["diagnosis"] == "tokens" and event["without_tokens"] is None
    # Without an auxiliary loss nothing comes from no token.
    _, _, event = spike(0.0)
    assert event["diagnosis"] == "diffuse"
    assert (event["without_tokens"]["norm"], event["without_tokens"]["share"]) == (0.0, 0.0)
    assert event["verdict"]["cause"] is None and "no token's" not in event["verdict"]["sentence"]


def test_a_token_is_over_the_threshold_only_by_its_own_part() -> None:
    """Every probe contains the auxiliary gradient, so a norm under τ plus that is not known to be over τ."""
    model, ids, event = spike(0.1, outlier=10.0, over=0.4)
    own = event["without_tokens"]["norm"]
    assert 0 < own < event["units"][0]["threshold"]
    assert event["without_tokens"]["layer_norms"] == pytest.approx(brute_force(model, ids), rel=1e-5)
    assert event["culprits"]
    for culprit in event["culprits"]:
        assert culprit["grad_norm"] - own / culprit["weight"] > event["threshold"]


class WithAuxiliary(Natural):
    """A unit in which every probe contains another gradient, `part` of the unit's threshold."""

    own = 0.0

    def __init__(self, excess: float, seed: int, part: float) -> None:
        super().__init__(128, excess, seed)
        self.own = part * THRESHOLD * float(self.weights.norm())

    def norm(self, tokens: list[int], factors: list[float] | None = None) -> float:
        return math.hypot(super().norm(tokens, factors), self.own)


def searched(unit: WithAuxiliary, width: int, until: str) -> tuple[Search, int]:
    """A search as `investigate` makes it, and its passes."""
    search, passes, measured = Search(THRESHOLD, until, 1.0), 0, False
    search.add_group("a", unit.norm([*range(128)]), unit.suspicion(True), unit.weights)
    while passes < 128:
        passes += 1
        if search.may_have_more_than_tokens and not measured:
            measured = True
            search.add_norm_without_tokens("a", unit.own)
        elif probes := search.next_probes(width):
            search.add_measurements([(probe, unit.measure(probe)) for probe in probes])
        else:
            return search, passes - 1
    return search, passes


@pytest.mark.parametrize("until", ["explained", "exhaustive"])
@pytest.mark.parametrize(("width", "most"), [(1, 60), (2, 20), (8, 6)])
@pytest.mark.parametrize("part", [1.05, 5.0, 1e3])
def test_a_spike_that_comes_from_no_token_ends_the_search(part: float, width: int, most: int, until: str) -> None:
    for seed in range(4):
        search, passes = searched(WithAuxiliary(0.8, seed, part), width, until)
        assert search.gave_up and search.culprits == [] and search.diffuse and search.open_sets == []
        assert passes <= most


def event(share: float, layers: dict[str, float] | None = None) -> dict[str, Any]:
    layers = {"a": 1.0} if layers is None else layers
    norm = math.hypot(*layers.values())
    return {
        "without_tokens": {"rank": 3, "micro_batch": 2, "norm": norm, "share": share, "layer_norms": layers},
        **{"culprits": [], "units": [], "diffuse": [], "ordinary_layer_norms": None},
        **{"diagnosis": "diffuse", "micro_batches": 1},
    }


HALF = "50% of a micro-batch's norm comes from no token's log-prob"


@cases(
    "given sentence",
    (event(0.5, {"a": 1.0, "b": 3.0}), f"{HALF}, mostly in b."),
    (event(0.5, dict.fromkeys("abcdef", 1.0)), f"{HALF}."),
    # Squares that are infinite tell no layer.
    *((event(0.5, layers), f"{HALF}.") for layers in ({"a": 1e200, "b": 1.0}, {"a": math.inf}, {})),
    (event(MENTIONED - 0.01), ""),
)
def test_the_verdict_names_the_part_and_the_layer(given: dict[str, Any], sentence: str) -> None:
    said = "No identity could be checked."
    assert verdict_on(given, {})["sentence"] == " ".join(filter(None, [said, sentence]))


def test_it_is_the_cause_if_it_makes_most_of_the_square() -> None:
    assert MOST**2 == pytest.approx(EXPLAINS)
    for share, is_cause in ((MOST - 0.01, False), (MOST + 0.01, True), (0.999, True)):
        found = verdict_on(event(share), {})
        assert (found["cause"] == "auxiliary") == is_cause
        part = "over 99%" if share > 0.99 else f"{share:.0%}"
        said = f"{part} of a micro-batch's norm comes from no token's log-prob, mostly in a"
        assert said in found["sentence"] and (found["evidence"] == said) == is_cause
    assert "`actor/grad_norm` should fall" in found["check"]
