"""GradLoc in a training loop of its own, without verl: one process, a model that is not sharded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from notation import Caplog, Patch
from plain_passes import Loop, log_probs_of
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

import gradloc.judge
from gradloc.adapters.update_evidence import TrainedData, UpdateEvidence
from gradloc.evidence.writer import jsonable
from gradloc.judge import judged
from gradloc.judging import in_one_line
from gradloc.report import read

ROWS, RESPONSE, PROMPT, VOCABULARY = 4, 8, 4, 37
CULPRIT = (2, 3)
IDS = torch.randint(3, VOCABULARY, (1, ROWS, PROMPT + RESPONSE), generator=torch.Generator().manual_seed(1))
SPIKE = torch.ones(ROWS, RESPONSE)
SPIKE[CULPRIT] = 3e3
EVEN = 1 / (ROWS * RESPONSE)


def norm_of_the_culprit(model: nn.Module, logits: Callable[[Tensor], Tensor]) -> float:
    """Of its own gradient, by autograd."""
    _, log_probs = log_probs_of(logits, IDS[0], PROMPT)
    (log_probs * SPIKE)[CULPRIT].backward()
    norm = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None]).norm()
    model.zero_grad()
    return float(norm)


def found(loop: Loop) -> tuple[dict[str, Any], dict[str, Any]]:
    """The event of a step with a spike, and its only culprit."""
    assert loop.step(SPIKE).take_step
    (event,) = loop.gradloc.events
    (culprit,) = event["culprits"]
    assert (culprit["row"], culprit["position"]) == CULPRIT and event["complete"]
    return event, culprit


class Plain(nn.Module):
    """A model that looks at every token alone, and that changes its buffers in every way that there is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
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
    plain, model = Plain(), Plain()
    plain(IDS[0])
    event, _ = found(Loop(model, IDS, PROMPT, grad_norm_threshold=20.0))
    assert event["passes"] > 0
    for expected, buffer in zip(plain.buffers(), model.buffers(), strict=True):
        assert torch.equal(expected, buffer)


def is_measured_as_by_autograd(model: nn.Module, seed: int) -> None:
    """Whether the search finds the culprit with the norm of its own gradient."""

    def logits(ids: Tensor) -> Tensor:
        return model.train()(input_ids=ids).logits

    torch.manual_seed(seed)
    expected = norm_of_the_culprit(model, logits)
    torch.manual_seed(seed)
    _, culprit = found(Loop(model, IDS, PROMPT, logits, grad_norm_threshold=expected / 8))
    assert culprit["grad_norm"] == pytest.approx(expected, rel=1e-5)


def test_dropout_by_a_function_has_the_same_masks_in_probes() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = OPTConfig(vocab_size=VOCABULARY, word_embed_proj_dim=16, max_position_embeddings=64, dropout=0.1, **sizes)
    is_measured_as_by_autograd(OPTForCausalLM(config), seed=5)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_length_are_probed_whole(rope: str) -> None:
    torch.manual_seed(0)
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 8}
    scaling = {"rope_type": rope, "factor": 4.0, **(factors if rope == "longrope" else {})}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=8, rope_scaling=scaling, **sizes)
    is_measured_as_by_autograd(LlamaForCausalLM(config), seed=5)


def test_norms_are_taken_in_with_a_given_threshold_too(caplog: Caplog) -> None:
    loop = Loop(Plain(), IDS, PROMPT, grad_norm_threshold=1e9)
    loop.step(1.0)
    state = loop.gradloc.state_dict()
    assert len(json.loads(json.dumps(state))["token_norms"]) == 1
    resumed = Loop(loop.model, IDS, PROMPT, grad_norm_threshold="auto").gradloc
    resumed.load_state_dict(state)
    assert "warm-up" not in caplog.text
    resumed.load_state_dict(None)
    assert "its warm-up starts over" in caplog.text


@pytest.mark.parametrize("state", [None, {"token_norms": [3.0]}], ids=["none", "of an older release"])
def test_events_count_the_steps_since_a_resume(state: dict[str, Any] | None) -> None:
    loop = Loop(Plain(), IDS, PROMPT, grad_norm_threshold=20.0)
    event, _ = found(loop)
    assert event["steps_since_resume"] is None
    loop.gradloc.load_state_dict(state)
    for step in range(1, 5):
        event, _ = found(loop)
        assert event["steps_since_resume"] == step


@pytest.mark.parametrize(("action", "rates"), [("log", 0.25), ("skip", 0.0)])
def test_learning_rates_are_those_of_the_steps_that_are_taken(action: str, rates: float) -> None:
    """Some optimizers have a tensor for a learning rate."""
    parts = {"learning_rate": lambda: torch.tensor(0.25)}
    settings = {"grad_norm_threshold": 1e-6, "bisect_budget_steps": 2, "spike_action": action}
    loop = Loop(Plain(), IDS, PROMPT, parts=parts, **settings)
    assert loop.step(1.0).take_step == (action == "log")
    state = loop.gradloc.state_dict()["run_checks"]["records"][-1]["readings"].get("rate", 0.0)
    assert (type(state), state) == (float, rates)


def test_an_update_warns_though_its_last_mini_batch_is_right() -> None:
    loop, said = Loop(Plain(), IDS, PROMPT, grad_norm_threshold=1e9), []
    for step, factors in enumerate(([1.0], [3.0, 3.0, 3.0, 3.0, 1.0], [3.0], [1.0, 5.0, 1.0])):
        loop.gradloc.start_update(step)
        for mini_batch, factor in enumerate(factors):
            loop.run_pass(weight=factor * EVEN, facts_of=lambda _: {"loss_agg_mode": "token-mean"})
            loop.gradloc.locate(0, mini_batch)
            loop.model.zero_grad()
        loop.gradloc.metrics()
        answer = loop.gradloc.answer()
        assert answer is not None
        said.append([(each["name"], each["since"]) for each in answer["warnings"]])
    # 3 times is said when it lasts; and no optimizer takes the steps.
    assert said[:2] == [[], []] and said[2][-1] == said[3][-1] == ("loss_scale", 1)
    assert [name for name, _ in said[3][:-1]] == ["not_moving"]


def test_a_response_counts_once_in_however_many_epochs() -> None:
    """Of the rollout's log-probs, and of what was sampled; later epochs have other log-probs of the policy."""

    def answer_of(epochs: int) -> Any:
        loop = Loop(Plain(), IDS, PROMPT, grad_norm_threshold=1e9)
        loop.gradloc.start_update(1)
        for epoch in range(epochs):
            move = 0.1 * epoch

            def with_columns(now: Tensor, move: float = move) -> dict[str, Tensor]:
                old = now - move
                stale = torch.where(torch.arange(ROWS).unsqueeze(1) < 1, old - 0.5, old + 1e-4)
                return {"old_log_prob": old, "rollout_log_prob": stale, "ref_log_prob": old}

            loop.run_pass(weight=EVEN, facts_of=with_columns)
            loop.gradloc.locate(epoch, mini_batch=0)
            loop.model.zero_grad()
        answer = loop.gradloc.answer()
        assert answer is not None
        return answer["identities"]

    once, often = answer_of(1), answer_of(4)
    same = ("old_log_probs", "rollout_log_probs", "sampled", "reference")
    assert [often[name] for name in same] == [once[name] for name in same]
    assert once["rollout_log_probs"]["times"] == pytest.approx(0.125 / 0.02, rel=0.02)


def test_without_the_judge_facts_are_written_and_judged_later(
    tmp_path: Path, monkeypatch: Patch, caplog: Caplog
) -> None:
    for name in ("Run", "judged"):
        monkeypatch.setattr(gradloc.judge, name, None)  # every question is an error
    loop = Loop(Plain(), IDS, PROMPT, grad_norm_threshold=20.0)
    loop.gradloc.load_state_dict(loop.gradloc.state_dict())
    event, _ = found(loop)
    metrics = loop.gradloc.metrics()
    assert metrics["actor/gradloc/checked"] == 0
    evidence = UpdateEvidence(str(tmp_path), None, 1)
    evidence.add([event], TrainedData({}))
    evidence.take_in_rows(TrainedData({}))
    evidence.write(1, metrics, loop.gradloc.answer)
    monkeypatch.undo()
    assert sum("gives no answer" in message for message in caplog.messages) == 2  # the run, the spike
    (said,) = [message for message in caplog.messages if "diagnosis" in message]
    assert "source): 0, 2, 3 (" in said
    assert in_one_line({"token_clip": {}}) == in_one_line({"values": []}) == "it is not judged."
    (line,) = (tmp_path / "spikes.jsonl").read_text().splitlines()
    assert json.loads(line)["verdict"] is None
    found_later = read(str(tmp_path))
    (spike,), (note,) = found_later.spikes, found_later.notes
    assert note.startswith("nothing has checked the run")
    later = judged(event)
    assert (spike.event["verdict"], spike.event["summary"]) == (jsonable(later["verdict"]), later["summary"])
