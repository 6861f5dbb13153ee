"""GradLoc in a training loop of its own, without verl: one process, a model that is not sharded."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from notation import Caplog, cases
from plain_passes import observe
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from gradloc import GradLoc, GradLocConfig
from gradloc.critic_watch import CriticWatch
from gradloc.judge.judgement import judged
from gradloc.measure.pass_recorder import unchanged

ROWS, RESPONSE, PROMPT, VOCABULARY = 4, 8, 4, 37
CULPRIT = (2, 3)
SPIKE = 3e3


class Forward:
    """(None, log-probs of the responses) of some rows, by a language model."""

    def __init__(self, logits: nn.Module) -> None:
        self.logits = logits
        self.ids = torch.randint(3, VOCABULARY, (ROWS, PROMPT + RESPONSE), generator=torch.Generator().manual_seed(1))

    def __call__(self, inputs: dict[str, Any], rows: list[int], response_length: int) -> tuple[None, Tensor]:
        ids = inputs["ids"][rows][:, : PROMPT + response_length]
        log_prob = torch.log_softmax(self.logits(ids)[:, PROMPT - 1 : -1], -1)
        return None, log_prob.gather(-1, ids[:, PROMPT:, None])[..., 0]


EVEN = torch.full((ROWS, RESPONSE), 1 / (ROWS * RESPONSE))


def micro_batch(
    gradloc: GradLoc,
    forward: Forward,
    weight: Tensor = EVEN,
    factor: float = 1.0,
    facts_of: Callable[[Tensor], dict[str, Any]] = lambda log_prob: {},
) -> None:
    """A training pass whose loss is `factor` times what its facts say; `facts_of` makes more of them from log-probs."""
    gradloc.begin_pass({"ids": forward.ids}, range(ROWS))
    _, log_prob = forward({"ids": forward.ids}, [*range(ROWS)], RESPONSE)
    facts = facts_of(log_prob.detach())
    mask = torch.ones(ROWS, RESPONSE)
    observe(gradloc, log_prob, None, weight, response_mask=mask, token_id=forward.ids[:, PROMPT:], **facts)
    (factor * (-log_prob * facts.get("advantage", mask) * weight).sum()).backward()
    gradloc.end_pass()


def train_pass(model: nn.Module, forward: Forward, config: GradLocConfig, gradloc: GradLoc | None = None) -> GradLoc:
    """One training pass with a spike in it, and the search for it, by a watch that may be there already."""
    gradloc = gradloc or GradLoc(model, config, forward)
    advantage = torch.ones(ROWS, RESPONSE)
    advantage[CULPRIT] = SPIKE
    gradloc.start_update()
    micro_batch(gradloc, forward, facts_of=lambda _: {"advantage": advantage})
    assert gradloc.locate(epoch=0, mini_batch=0).take_step
    return gradloc


def norm_of_the_culprit(model: nn.Module, forward: Forward) -> float:
    """Of its own gradient, by autograd."""
    _, log_prob = forward({"ids": forward.ids}, list(range(ROWS)), RESPONSE)
    (log_prob[CULPRIT] * SPIKE).backward()
    norm = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None]).norm()
    model.zero_grad()
    return float(norm)


def found(gradloc: GradLoc) -> tuple[dict[str, Any], dict[str, Any]]:
    """The event and its only culprit."""
    ((event,),) = [gradloc.events]
    (culprit,) = event["culprits"]
    assert (culprit["row"], culprit["position"]) == CULPRIT and event["complete"]
    return event, culprit


class Plain(nn.Module):
    """A model that looks at every token alone, and that changes its buffers in every way that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, 8)
        self.lm_head = nn.Linear(8, VOCABULARY)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.statistics = nn.BatchNorm1d(8, affine=False)
        with torch.inference_mode():
            self.register_buffer("made_in_inference_mode", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        self.replaced = self.replaced + 1
        hidden = self.embed_tokens(ids)
        self.statistics(hidden.detach().flatten(0, 1))
        return self.lm_head(hidden)


def test_buffers_are_what_they_were() -> None:
    torch.manual_seed(0)
    plain = Plain()
    torch.manual_seed(0)
    model = Plain()
    forward = Forward(model)
    plain(forward.ids)
    event, _ = found(train_pass(model, forward, GradLocConfig(grad_norm_threshold=20.0)))
    assert event["passes"] > 0
    for expected, buffer in zip(plain.buffers(), model.buffers(), strict=True):
        assert torch.equal(expected, buffer)


def test_dropout_by_a_function_has_the_same_masks_in_probes() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = OPTConfig(vocab_size=VOCABULARY, word_embed_proj_dim=16, max_position_embeddings=64, dropout=0.1, **sizes)
    model = OPTForCausalLM(config).train()
    forward = Forward(lambda ids: model(input_ids=ids).logits)
    torch.manual_seed(5)
    expected = norm_of_the_culprit(model, forward)
    torch.manual_seed(5)
    _, culprit = found(train_pass(model, forward, GradLocConfig(grad_norm_threshold=expected / 8)))
    assert culprit["grad_norm"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_length_are_probed_whole(rope: str) -> None:
    torch.manual_seed(0)
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 8}
    scaling = {"rope_type": rope, "factor": 4.0, **(factors if rope == "longrope" else {})}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=8, rope_scaling=scaling, **sizes)
    model = LlamaForCausalLM(config).train()
    forward = Forward(lambda ids: model(input_ids=ids).logits)
    expected = norm_of_the_culprit(model, forward)
    _, culprit = found(train_pass(model, forward, GradLocConfig(grad_norm_threshold=expected / 8)))
    assert culprit["grad_norm"] == pytest.approx(expected, rel=1e-5)


def test_norms_are_taken_in_with_a_given_threshold_too(caplog: Caplog) -> None:
    model = Plain()
    state = train_pass(model, Forward(model), GradLocConfig(grad_norm_threshold=1e9)).state_dict()
    assert len(json.loads(json.dumps(state))["token_norms"]) == 1
    resumed = GradLoc(model, GradLocConfig(grad_norm_threshold="auto"), Forward(model))
    resumed.load_state_dict(state)
    assert "warm-up" not in caplog.text
    for nothing in (None, {"token_norms": []}):
        caplog.clear()
        resumed.load_state_dict(nothing)
        assert "its warm-up starts over" in caplog.text


@pytest.mark.parametrize("state", [None, {"token_norms": [3.0]}], ids=["none", "of an older release"])
def test_events_count_the_steps_since_a_resume(state: dict[str, Any] | None) -> None:
    torch.manual_seed(0)
    model = Plain()
    forward, config = Forward(model), GradLocConfig(grad_norm_threshold=20.0)
    gradloc = train_pass(model, forward, config)
    event, _ = found(gradloc)
    assert event["steps_since_resume"] is None
    gradloc.load_state_dict(state)
    for step in range(1, 5):
        model.zero_grad()
        event, _ = found(train_pass(model, forward, config, gradloc))
        assert event["steps_since_resume"] == step
        note = f" This is step {step} after a checkpoint was loaded."
        assert judged(event)["verdict"]["sentence"].endswith(note) == (step <= 3)


@pytest.mark.parametrize(("action", "rates"), [("log", 0.25), ("skip", 0.0)])
def test_learning_rates_are_those_of_the_steps_that_are_taken(action: str, rates: float) -> None:
    """Some optimizers have a tensor for a learning rate."""
    forward = Forward(Plain())
    config = GradLocConfig(grad_norm_threshold=1e-6, bisect_budget_steps=2, spike_action=action)
    gradloc = GradLoc(forward.logits, config, forward, learning_rate=lambda: torch.tensor(0.25))
    micro_batch(gradloc, forward, torch.ones(ROWS, RESPONSE))
    assert gradloc.locate(epoch=0, mini_batch=0).take_step == (action == "log")
    state = gradloc.state_dict()["run_checks"]["rates"]
    assert (type(state), state) == (float, rates)


def test_values_that_cannot_be_read_are_no_error_of_training(caplog: Caplog) -> None:
    """The next update is searched. What fails again is not logged again."""
    model = torch.nn.Linear(2, 1)
    watch = CriticWatch(model, GradLocConfig(grad_norm_threshold=1e-6), None)
    known = dict.fromkeys(("response_mask", "returns", "old_value"), torch.ones(ROWS, RESPONSE))
    found = []
    ones = torch.ones(ROWS, RESPONSE)
    for weight in (ones, ones[:1], ones[:1], ones):
        watch.start_update(1)
        watch.begin_pass({}, range(ROWS))
        value = model(torch.ones(ROWS, RESPONSE, 2))[..., 0]
        tokens = {**known, "value": value, "weight": weight}
        watch.observe(lambda tokens=tokens: tokens, {"coefficient": (value, unchanged)})
        value.square().sum().backward()
        watch.end_pass()
        watch.locate(0, 0)
        found.append(len(watch.events))
    assert found == [1, 0, 0, 1]
    (record,) = [record for record in caplog.records if "cannot be read" in record.message]
    assert record.exc_info is not None and "of one shape (rows, response length)" in str(record.exc_info[1])
    assert "'value': (4, 8)" in str(record.exc_info[1]) and "'weight': (1, 8)" in str(record.exc_info[1])


@cases(
    "modes warned",
    (["seq-mean-token-mean", "seq-mean-token-mean"], True),
    (["seq-mean-token-mean", "seq-mean-token-sum-norm"], False),
    (["seq-mean-token-sum-norm", "seq-mean-token-mean"], False),
)
def test_the_sum_of_weights_is_checked_if_all_promise_the_same(modes: list[str], warned: bool) -> None:
    """Each micro-batch's loss says how it is aggregated; the last one does not speak for the others."""
    forward = Forward(Plain())
    gradloc = GradLoc(forward.logits, GradLocConfig(grad_norm_threshold=1e9), forward)
    for step in range(3):
        gradloc.start_update(step)
        for mode in modes:
            micro_batch(gradloc, forward, 3 * EVEN, facts_of=lambda _, mode=mode: {"loss_agg_mode": mode})
        gradloc.locate(epoch=0, mini_batch=0)
        forward.logits.zero_grad()
    sentences = [warning["sentence"] for warning in gradloc.warnings]
    assert ["add up to 6 instead of 1 (seq-mean-token-mean)" in sentence for sentence in sentences] == [True] * warned


def test_an_update_warns_though_its_last_mini_batch_is_right() -> None:
    """The verdict on a spike in that one does not say so."""
    forward = Forward(Plain())
    config = GradLocConfig(grad_norm_threshold=1e-6, bisect_budget_steps=2)
    gradloc = GradLoc(forward.logits, config, forward)
    gradloc.start_update(1)
    for mini_batch, factor in enumerate([3.0, 3.0, 3.0, 3.0, 1.0]):
        micro_batch(gradloc, forward, factor * EVEN, facts_of=lambda _: {"loss_agg_mode": "token-mean"})
        gradloc.locate(0, mini_batch)
        forward.logits.zero_grad()
    assert [warning["name"] for warning in gradloc.warnings] == ["loss_scale"]
    blamed = [judged(event)["verdict"]["cause"] == "loss_scale" for event in gradloc.events]
    assert blamed == [False, False, True, True, False]
    gradloc.start_update(2)  # in which one mini-batch alone is wrong
    micro_batch(gradloc, forward, 3.0 * EVEN, facts_of=lambda _: {"loss_agg_mode": "token-mean"})
    gradloc.locate(0, 0)
    assert gradloc.warnings == []


@pytest.mark.parametrize(("stale_rows", "epochs", "warned"), [(1, 1, []), (1, 4, []), (4, 4, ["stale_weights"])])
def test_a_response_counts_once_however_many_epochs_train_on_it(
    stale_rows: int, epochs: int, warned: list[str]
) -> None:
    """Of eight responses, some agree with the reference; four make the least number that is warned of."""
    forward = Forward(Plain())
    gradloc = GradLoc(forward.logits, GradLocConfig(grad_norm_threshold=1e9), forward)

    def with_stale_rows(stale: int, old: Tensor) -> dict[str, Tensor]:
        rollout = torch.where(torch.arange(ROWS).unsqueeze(1) < stale, old - 0.5, old + 1e-4)
        return {"old_log_prob": old, "rollout_log_prob": rollout, "ref_log_prob": rollout.clone()}

    for step in range(6):
        gradloc.start_update(step)
        for epoch in range(epochs):
            for stale in (stale_rows, 0):
                micro_batch(gradloc, forward, torch.ones(ROWS, RESPONSE), 1.0, partial(with_stale_rows, stale))
            gradloc.locate(epoch, mini_batch=0)
            forward.logits.zero_grad()
    assert [warning["name"] for warning in gradloc.warnings] == warned
