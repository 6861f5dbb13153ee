"""GradLoc, LayerClip and TokenClip beside a stand-in for a GPU: no operation mixes devices, hardly any waits for it."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cuda_stand_in import CUDA, CudaStandIn, MixedDevices
from notation import cases
from plain_passes import Loop
from small_bundles import BAD, NAME, THRESHOLD, VOCABULARY, kept, small_model
from torch import nn

import gradloc
from gradloc import GradLocConfig
from gradloc.adapters.dp_actor import WatchedActor
from gradloc.critic_watch import CriticWatch
from gradloc.judge import judged
from gradloc.layers.layer_clip import LayerClip, LayerClipConfig
from gradloc.layers.reduced_norms import ReducedNorms
from gradloc.measure.pass_recorder import unchanged
from gradloc.replay import search as searching
from gradloc.replay.model import default_variant, load
from gradloc.replay.search import search
from gradloc.token_clip.token_clip import TokenClip, TokenClipConfig
from gradloc.tools.opening import open_bundle

__all__ = ["kept"]

PACKAGE = str(Path(gradloc.__file__).parent)
MICRO_BATCHES, ROWS, PROMPT, RESPONSE = 2, 2, 4, 8
CULPRIT = (1, 0, 3)
SPIKE = 3e3


class Training(Loop):
    """A plain training loop on the stand-in's GPU, with a planted token where `spike` is given."""

    def __init__(
        self,
        stand_in: CudaStandIn,
        layer_clip: bool = False,
        token_clip: str = "",
        meter: str = "local",
        **settings: Any,
    ) -> None:
        model = small_model(initializer_range=0.02).train()
        ids = torch.randint(3, VOCABULARY, (MICRO_BATCHES, ROWS, PROMPT + RESPONSE))
        stand_in.put(model, ids)
        self.layer_clip = LayerClip(model, LayerClipConfig(warmup_steps=1), CUDA) if layer_clip else None
        clip = TokenClip(model, TokenClipConfig(warmup_steps=1, action=token_clip), CUDA) if token_clip else None
        parts = {"device": CUDA, "meter": meter, "token_clip": clip, "layer_clip": self.layer_clip}
        settings = {"grad_norm_threshold": 20.0, **settings}
        super().__init__(model, ids, PROMPT, lambda ids: model(input_ids=ids).logits, 0.01, parts, **settings)

    def train(self, step: int, spike: bool) -> None:
        self.model.zero_grad()
        self.gradloc.start_update(step)
        for index in range(MICRO_BATCHES):
            advantage = torch.ones(ROWS, RESPONSE, device=CUDA)
            if spike and index == CULPRIT[0]:
                advantage[CULPRIT[1:]] = SPIKE
            self.run_pass(index, advantage, facts_of=lambda log_prob: {"old_log_prob": log_prob})
        take_step, squared_norms, *_ = self.gradloc.locate(0, 0)
        if self.layer_clip and take_step:
            self.layer_clip.clip(self.layer_clip.squared_norms() if squared_norms is None else squared_norms)
        if self.clip and (found := self.clip.end_mini_batch()):
            self.found = [found]
        self.gradloc.metrics()


def of_package(stand_in: CudaStandIn, start: int) -> list[str]:
    """The waits in the package's code since there were `start`."""
    return [place for place in stand_in.waits[start:] if place.startswith(PACKAGE)]


def test_the_stand_in_refuses_mixed_devices_and_counts_waits() -> None:
    with CudaStandIn() as stand_in:
        here, there, first = torch.ones(2), torch.ones(2, device="cuda"), torch.tensor([0])
        gradient = there.clone().requires_grad_()
        gradient.square().sum().backward()
        on_gpu = (there, there * 2, there + torch.tensor(1.0), there[first], gradient.grad)
        assert {str(each.device) for each in on_gpu} == {"cuda:0"} and str(here.device) == "cpu"
        assert str((here.to("cuda") + there).cpu().device) == "cpu"
        for mixed in (lambda: here + there, lambda: here[first.to("cuda")], lambda: gradient.grad.copy_(here) + here):
            with pytest.raises(MixedDevices):
                mixed()
        # Waits are counted.
        waiting = (there.tolist, there[0].item, there.nonzero, lambda: there[there > 0], lambda: here.to("cuda"))
        for call in waiting:
            before = len(stand_in.waits)
            call()
            assert len(stand_in.waits) == before + 1 and stand_in.waits[-1].startswith(__file__)
        before = len(stand_in.waits)
        torch.ones(2, device="cuda").sum() * 2 + torch.zeros_like(there)
        torch.ones(2).tolist()
        assert len(stand_in.waits) == before


@pytest.mark.parametrize("meter", ["local", "reduced"])
@cases("options", {}, {"layer_clip": True}, {"token_clip": "smooth"}, ids=["alone", "layer", "token"])
def test_an_ordinary_step_waits_once_for_each_part(options: dict[str, Any], meter: str) -> None:
    """For GradLoc's norms, and those of the reduced gradient where they are needed; and for TokenClip's counts."""
    with CudaStandIn() as stand_in:
        training = Training(stand_in, meter=meter, **options)
        for step in range(3):  # the first may put constants on the device
            before = len(stand_in.waits)
            training.train(step, spike=False)
        waits = of_package(stand_in, before)
        assert not training.gradloc.events
        assert len(waits) == 1 + ("token_clip" in options), waits


@pytest.mark.parametrize("action", ["log", "drop"])
def test_the_tokens_over_token_clip_s_bounds_take_one_more_wait(action: str) -> None:
    with CudaStandIn() as stand_in:
        training = Training(stand_in, token_clip=action, grad_norm_threshold=1e9)
        for step in range(3):
            training.train(step, spike=False)
        before = len(stand_in.waits)
        training.train(3, spike=True)
        waits = of_package(stand_in, before)
        (found,) = training.found
        assert len(found["tokens"]) >= (2 if action == "log" else 1) and len(waits) == 3, waits
        assert all(token["weight"] and token["token_id"] for token in found["tokens"] if token["position"] >= 0)


def test_the_reference_of_a_penalty_is_copied_before_the_forward() -> None:
    """In verl 0.7. It is on the host, where the loss has no term of it."""
    with CudaStandIn() as stand_in:
        reference, waits = torch.rand(2 * ROWS, RESPONSE), []
        names = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask", "old_log_probs")
        columns = {name: torch.ones(ROWS, RESPONSE) for name in names}
        stand_in.put(*columns.values())
        log_prob = columns["old_log_probs"].clone()

        class Verls:
            def _forward_micro_batch(self, _: Any) -> tuple[None, torch.Tensor]:
                waits.append(len(stand_in.waits))
                return None, log_prob

        actor = object.__new__(type("Actor", (WatchedActor, Verls), {"_watching": True, "_passed": None}))
        actor._steps = actor._next_row = 0
        actor.watch, actor._mini_batches, actor._rows = mock.MagicMock(), 1, [[3, 1]]
        actor.config = mock.Mock(ppo_mini_batch_size=2 * ROWS, use_dynamic_bsz=True)
        batch = {name: torch.ones(2 * ROWS, RESPONSE) for name in names}
        actor._data = mock.MagicMock(non_tensor_batch={}, batch={**batch, "ref_log_prob": reference})
        actor._forward_micro_batch(columns)
        given = {"log_prob": log_prob, "old_log_prob": log_prob, "response_mask": columns["response_mask"]}
        actor._observed(lambda **_: None)(**given)
        _, read, *_ = actor.watch.observe.call_args.args
        tokens = read()
        assert waits == [1] and len(stand_in.waits) == 1, stand_in.waits
        assert stand_in.device_of(tokens["ref_log_prob"]) == CUDA
        assert tokens["ref_log_prob"].tolist() == reference[[3, 1]].tolist()


def test_a_critics_step_waits_once() -> None:
    with CudaStandIn() as stand_in:
        model = nn.Linear(4, 1)
        states, returns = torch.randn(ROWS, RESPONSE, 4), torch.randn(ROWS, RESPONSE)
        stand_in.put(model, states, returns)
        mask = torch.ones(ROWS, RESPONSE, device=CUDA)
        watch = CriticWatch(model, GradLocConfig(grad_norm_threshold=100.0), None, CUDA)
        for step, planted in enumerate((0.0, 0.0, 1e4)):
            before = len(stand_in.waits)
            model.zero_grad()
            watch.start_update(step)
            watch.begin_pass({}, [0, 1])
            value, wanted = model(states)[..., 0], returns + planted
            known = {"response_mask": mask, "value": value, "returns": wanted, "old_value": value}
            watch.observe(
                lambda known=known: {**known, "weight": mask / mask.sum()}, {"coefficient": (value, unchanged)}
            )
            (((value - wanted) ** 2).mean() / 2).backward()
            watch.end_pass()
            watch.locate(0, 0)
            assert planted or len(of_package(stand_in, before)) == 1
        (spike,) = watch.events
        assert judged(spike)["cause"] == "errors"


@cases(
    "measure",
    ReducedNorms.own_squares,
    partial(ReducedNorms.own_squares, with_weights=True),
    ReducedNorms.broken_parameters,
    ids=["gradients", "weights", "broken"],
)
def test_many_parameters_take_no_more_operations_or_waits(measure: Callable[[ReducedNorms], Any]) -> None:
    """A mixture whose experts lie apart has tens of thousands."""
    costs = []
    for count in (3, 9):
        with CudaStandIn() as stand_in:
            model = nn.Sequential(*(nn.Linear(4, 2) for _ in range(count)))
            stand_in.put(model)
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, math.nan)
            norms, before = ReducedNorms(model, CUDA), len(stand_in.waits)
            with mock.patch.object(stand_in, "dispatched", wraps=stand_in.dispatched) as dispatched:
                measure(norms)
            costs.append((dispatched.call_count, len(stand_in.waits) - before))
    assert costs[0] == costs[1]


@cases(
    "options",
    {},
    {"spike_action": "drop"},
    {"spike_trigger": "global", "bisect_until": "exhaustive"},
    {"meter": "reduced", "spike_action": "drop"},
    {"spike_drill_step": 1, "grad_norm_threshold": "auto"},
    {"layer_clip": True},
    {"token_clip": "log", "spike_action": "drop"},
    ids=lambda options: "-".join(map(str, options.values())) or "log",
)
def test_no_operation_of_a_search_mixes_devices(options: dict[str, Any]) -> None:
    with CudaStandIn() as stand_in:
        training = Training(stand_in, **options)
        training.train(1, spike=False)
        if "spike_drill_step" in options:
            (event,) = training.gradloc.events
            assert event["drill"]["found"], event
            return
        training.train(2, spike=True)
        (event,) = training.gradloc.events
        (culprit,) = event["culprits"]
        assert event["error"] is None and event["complete"]
        assert (culprit["row"], culprit["position"]) == (CULPRIT[0] * ROWS + CULPRIT[1], CULPRIT[2])


def test_a_search_of_a_bundle_mixes_no_devices(kept: Path) -> None:
    """Its micro-batches stay on the CPU. The stand-in does not see what is computed again in the backward."""
    opened = open_bundle(str(kept / "replay" / NAME))
    variant = default_variant(opened, None, None, "cpu")
    model = load(opened, str(kept / "model"), variant, "cpu", None, False)
    once = mock.patch.object(searching, "_again_in_backward", lambda function, *arguments: function(*arguments))
    with once, CudaStandIn() as stand_in:
        stand_in.put(model.module)
        model = replace(model, device=CUDA)
        found = search(opened, model, searching.build_forward(model), THRESHOLD, 20).found
    assert [(culprit["row"], culprit["position"]) for culprit in found["culprits"]] == [BAD]
