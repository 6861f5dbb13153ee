"""Recorded spikes of an engine that has only verl's base interface; no GPU, no other ranks, no FSDP."""

from __future__ import annotations  # TensorDict is there in one verl alone

import functools
import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from notation import Caplog, Patch, cases

import trees

pytestmark = [
    pytest.mark.target(version="0.9.1"),
    pytest.mark.skipif(trees.TARGET != "0.9.1", reason="verl 0.7 trains without such engines"),
]
if trees.TARGET == "0.9.1":
    from tensordict import TensorDict
    from valid_events import events_in, lines_in
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import McoreActorConfig
    from verl.workers.engine import BaseEngine
    from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches
    from verl.workers.utils.losses import ppo_loss

    from gradloc import guarded, judging
    from gradloc.adapters import replay_bundles, spike_recorder, watch
    from gradloc.adapters.engines import TrainedEngine
    from gradloc.tools.opening import open_bundle
else:
    BaseEngine = TrainedEngine = object

VOCABULARY, ROWS, PROMPT = 23, 6, 3
TAU = 100.0
PLANTED = (4, 2)


class StandIn(BaseEngine):
    """Trains a tiny model in one process. Its loss function sees what verl's engines show it."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.module = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.engine_config = SimpleNamespace(dtype="float32")
        self.optimizer_config = SimpleNamespace(clip_grad=1.0)
        self.model_config = SimpleNamespace(hf_config=None, tokenizer=None)

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_size(self) -> int:
        return 1

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        return norm.item()

    def model_output(self, micro_batch: Any) -> dict[str, torch.Tensor]:
        ids = micro_batch["input_ids"]
        log_probs = self.module(ids.values()).log_softmax(-1)
        labels = ids.values().roll(-1)
        chosen = log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return {"log_probs": torch.nested.nested_tensor_from_jagged(chosen, ids.offsets())}

    def backward(self, loss: torch.Tensor, count: int) -> None:
        loss.backward()

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        tu.assign_non_tensor(data, batch_num_tokens=data["loss_mask"].values().sum().item(), dp_size=1)
        micro_batches, indices = prepare_micro_batches(data)
        outputs = []
        for micro_batch in micro_batches:
            output = self.model_output(micro_batch)
            loss, metrics = loss_function(model_output=output, data=micro_batch, dp_group=None)
            self.backward(loss, len(micro_batches))
            outputs.append({"loss": loss.item(), "metrics": metrics})
        return postprocess_batch_func(outputs, indices, data)

    def save_checkpoint(self, local_path: str, *_: Any, **__: Any) -> None:
        Path(local_path).mkdir(parents=True, exist_ok=True)

    def load_checkpoint(self, local_path: str, *_: Any, **__: Any) -> None:
        pass


class LikeMegatron(StandIn):
    """The loss times the number of micro-batches, which the schedule divides by again; fp16's scale."""

    scale = 1024.0

    def backward(self, loss: torch.Tensor, count: int) -> None:
        scaled = loss * count
        output = scaled * self.scale
        output /= count
        output.backward()

    def optimizer_step(self) -> float:
        for parameter in self.module.parameters():
            parameter.grad /= self.scale
        return super().optimizer_step()


class PerToken(LikeMegatron):
    """A loss in sums of tokens, which the gradient is divided by once all of them are known."""

    scale = 17.0

    def backward(self, loss: torch.Tensor, count: int) -> None:
        (loss * self.scale).backward()


def batch(planted: bool = True, micro_batch: int = 2) -> TensorDict:
    """Rows of several lengths; one of their tokens has an advantage that makes a spike."""
    random = torch.Generator().manual_seed(8)
    lengths = [2, 5, 1, 3, 6, 4]

    def ragged(values: Callable[[int], torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([values(length) for length in lengths], layout=torch.jagged)

    prompts = ragged(lambda _: torch.randint(0, VOCABULARY, (PROMPT,), generator=random))
    responses = ragged(lambda length: torch.randint(0, VOCABULARY, (length,), generator=random))
    rows = [torch.cat(pair) for pair in zip(prompts.unbind(), responses.unbind(), strict=True)]
    advantages = [torch.randn(length, generator=random) for length in lengths]
    if planted:
        advantages[PLANTED[0]][PLANTED[1]] = 5e3
    mask = ragged(lambda length: torch.ones(length))
    columns = {
        "input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        "position_ids": torch.nested.as_nested_tensor([torch.arange(len(row)) for row in rows], layout=torch.jagged),
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "loss_mask": mask,
        "old_log_probs": ragged(lambda length: torch.full((length,), -3.0)),
        "advantages": torch.nested.as_nested_tensor(advantages, layout=torch.jagged),
    }
    settings = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": micro_batch,
        "global_batch_size": ROWS,
        "temperature": 1.0,
        "training_step": 7,
    }
    return tu.get_tensordict(columns, settings)


def actor_config(directory: Path, **options: Any) -> McoreActorConfig:
    keys = {"spike_detection": True, "grad_norm_threshold": TAU, "bisect_dump_dir": str(directory), **options}
    keys |= {"ppo_micro_batch_size_per_gpu": 2, "clip_ratio_high": 1e9}
    return McoreActorConfig(strategy="megatron", rollout_n=1, **keys)


def recorded(engine: type[StandIn]) -> Any:
    return type("Recorded", (TrainedEngine, engine), {})()


def trained(engine: Any, directory: Path, batches: list[TensorDict], **options: Any) -> list[dict[str, Any]]:
    loss = functools.partial(options.pop("loss", ppo_loss), config=actor_config(directory, **options))
    return [engine.train_batch(data, loss) for data in batches]


def trained_alike(kind: type[StandIn], directory: Path, batches: Callable[[], list[TensorDict]], **options: Any) -> Any:
    """What a recorded engine gives, after checking that it trains as the engine does without."""
    engine, plain = recorded(kind), kind()
    outputs, others = (trained(each, directory, batches(), **options) for each in (engine, plain))
    norms = ([output["metrics"]["grad_norm"] for output in each] for each in (outputs, others))
    assert next(norms) == next(norms)
    assert all(map(torch.equal, engine.module.parameters(), plain.module.parameters()))
    return outputs


@pytest.mark.parametrize("kind", [StandIn, LikeMegatron, PerToken])
def test_a_spike_is_recorded_and_training_is_as_without(kind: type[StandIn], tmp_path: Path) -> None:
    first, second = trained_alike(kind, tmp_path, lambda: [batch(), batch(planted=False)])
    (event,) = events_in(tmp_path)
    assert event["diagnosis"] == "unsearched" and event["search"] == "recorded" and event["global_step"] == 7
    assert event["global_norm"] == first["metrics"]["grad_norm"]
    count = 21
    assert event["global_threshold"] == pytest.approx(TAU / math.sqrt(count))
    assert (event["suspected"][0]["row"], event["suspected"][0]["position"]) == PLANTED
    assert first["metrics"]["actor/gradloc/triggered"].aggregate() == 1
    token_norm = event["global_norm"] * math.sqrt(count)
    assert first["metrics"]["actor/gradloc/token_norm_max"].aggregate() == pytest.approx(token_norm)
    assert second["metrics"]["actor/gradloc/triggered"].aggregate() == 0
    assert [step["triggered"] for step in lines_in(tmp_path, "steps.jsonl")] == [1, 0]

    bundle = open_bundle(tmp_path / event["replay"])
    assert Path(event["replay"]).name == "step7-epoch0-mini_batch0-rank0"
    data, model = batch(), kind()
    tu.assign_non_tensor(data, batch_num_tokens=count, dp_size=1)
    micro_batches, _ = prepare_micro_batches(data)
    assert bundle.rows == {(0, index): [2 * index, 2 * index + 1] for index in range(3)}
    for index, micro_batch in enumerate(micro_batches):
        output = model.model_output(micro_batch)
        flat = output["log_probs"].values().detach().requires_grad_()
        loss, _ = ppo_loss(actor_config(tmp_path), {"log_probs": flat}, micro_batch)
        (gradient,) = torch.autograd.grad(loss, flat)
        tokens = bundle.micro_batches[0, index].tokens
        start = 0
        for row, response in enumerate(micro_batch["responses"].unbind()):
            at = slice(start + PROMPT - 1, start + PROMPT - 1 + len(response))
            assert torch.equal(tokens["log_prob"][row, : len(response)], flat.detach()[at])
            assert torch.allclose(tokens["coefficient"][row, : len(response)], gradient[at], rtol=1e-6, atol=0)
            assert torch.equal(tokens["token_id"][row, : len(response)], response)
            assert torch.allclose(tokens["weight"][row, : len(response)], torch.tensor(1 / count))
            start += PROMPT + len(response)


def test_a_loss_without_log_probs_is_an_event_without_tokens(tmp_path: Path, caplog: Caplog) -> None:
    def loss_of_logits(config: Any, model_output: dict[str, Any], data: Any, dp_group: Any = None) -> Any:
        return model_output["logits"].sum() * 1e3, {}

    class OfLogits(StandIn):
        def model_output(self, micro_batch: Any) -> dict[str, torch.Tensor]:
            return {"logits": self.module(micro_batch["input_ids"].values())}

    trained_alike(OfLogits, tmp_path, lambda: [batch(), batch()], loss=loss_of_logits)
    assert [record.getMessage() for record in caplog.records if "log-probs" in record.getMessage()] == [
        "data-parallel rank 0: a mini-batch is not recorded, and no warning follows for later ones: the loss has no "
        "log-probs"
    ]
    assert [(event["suspected"], event["replay"]) for event in lines_in(tmp_path)] == [([], None)] * 2


@cases(
    "module name",
    ("engines", "flat_outputs"),
    ("spike_recorder", "SpikeRecorder.observe"),
    ("spike_recorder", "recorded_event"),
    ("update_evidence", "UpdateEvidence.write"),
)
def test_an_error_of_ours_is_a_warning(
    module: str, name: str, tmp_path: Path, monkeypatch: Patch, caplog: Caplog
) -> None:
    broken = Mock(side_effect=KeyError("broken"))
    monkeypatch.setattr(f"gradloc.adapters.{module}.{name}", broken)
    trained_alike(StandIn, tmp_path, lambda: [batch(), batch()])
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING and record.exc_info]) == 1


def test_an_error_of_the_loss_is_raised_and_verls_function_back(tmp_path: Path) -> None:
    from verl.trainer.ppo import core_algos

    before = core_algos.agg_loss
    with pytest.raises(ZeroDivisionError, match="of the loss"):
        trained(recorded(StandIn), tmp_path, [batch()], loss=Mock(side_effect=ZeroDivisionError("of the loss")))
    assert core_algos.agg_loss is before
    # An engine can call the loss function otherwise.
    inner = functools.partial(lambda *arguments, config, **named: (arguments, named), config=actor_config(tmp_path))
    engine = recorded(StandIn)
    engine._build(inner.keywords["config"])
    assert engine._observed(inner, student_logits=1, data=2) == ((), {"student_logits": 1, "data": 2})


@pytest.mark.parametrize("fails", ["is full", "hangs"])
def test_a_disk_without_a_bundle_is_a_warning(fails: str, tmp_path: Path, monkeypatch: Patch, caplog: Caplog) -> None:
    """One that does not answer is waited for once, and not long."""
    answers = threading.Event()
    if fails == "is full":
        full = Mock(side_effect=OSError(28, "No space left on device"))
        monkeypatch.setattr(spike_recorder, "write_recorded_bundle", full)
    else:  # where the checkpoints lie
        monkeypatch.setattr(replay_bundles, "last_checkpoint", lambda *_: answers.wait(60))
    monkeypatch.setattr(judging, "_thread", guarded.PatientThread("the judge"))  # it may be late, too
    monkeypatch.setattr(guarded, "PATIENCE", 0.05)
    try:
        outputs = trained(recorded(StandIn), tmp_path, [batch(), batch()])
    finally:
        answers.set()
    assert [output["metrics"]["actor/gradloc/triggered"].aggregate() for output in outputs] == [1, 1]
    assert [event["replay"] for event in lines_in(tmp_path)] == [None] * 2
    assert "no replay bundle is kept of a gradient spike" in caplog.text
    assert ("No space left" if fails == "is full" else "does not respond") in caplog.text


def test_no_more_bundles_than_wanted(tmp_path: Path, caplog: Caplog) -> None:
    trained(recorded(StandIn), tmp_path, [batch(), batch(), batch()], spike_replay=2)
    assert [event["replay"] is None for event in lines_in(tmp_path)] == [False, False, True]
    assert "-rank0 has 2 of 2 (spike_replay)" in caplog.text


def test_a_norm_that_is_not_finite_is_a_spike(tmp_path: Path) -> None:
    data = batch()
    data["advantages"].values()[3] = math.nan
    trained(recorded(StandIn), tmp_path, [data])
    (event,) = lines_in(tmp_path)
    assert event["global_norm"] == "NaN" and event["suspected"][0]["source"] == "nonfinite"
    (step,) = lines_in(tmp_path, "steps.jsonl")
    assert step["token_norm_max"] == "Infinity"


def test_an_automatic_threshold_survives_a_checkpoint(tmp_path: Path) -> None:
    engine = recorded(StandIn)
    trained(engine, tmp_path, [batch(planted=False) for _ in range(3)], grad_norm_threshold="auto")
    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    other = recorded(StandIn)
    other.load_checkpoint(str(tmp_path / "checkpoint"))
    trained(other, tmp_path, [batch(planted=False)], grad_norm_threshold="auto")
    saved, loaded = (each.watch.recorder._threshold.state_dict()["token_norms"] for each in (engine, other))
    assert len(saved) == 3 and loaded[:3] == saved and len(loaded) == 4


def test_a_state_that_cannot_be_read_is_a_sentence(tmp_path: Path, caplog: Caplog) -> None:
    path = tmp_path / "checkpoint" / watch.STATE_FILE
    path.parent.mkdir()
    path.write_bytes(b"no state")
    engine = recorded(StandIn)
    engine.load_checkpoint(str(path.parent))
    trained(engine, tmp_path, [batch(planted=False)], grad_norm_threshold="auto")
    (record,) = [record for record in caplog.records if str(path) in record.getMessage()]
    assert record.getMessage().endswith("): all warm-ups start over") and "\n" not in record.getMessage()
    assert record.exc_info is None
    assert len(engine.watch.recorder._threshold.state_dict()["token_norms"]) == 1


@pytest.mark.parametrize("change", ["off", "not_a_source", "dynamic"])
def test_where_nothing_is_recorded_the_loss_is_verls(change: str, tmp_path: Path, caplog: Caplog) -> None:
    engine = recorded(StandIn)
    engine.forward_backward_batch = Mock(side_effect=lambda *_, **__: {"metrics": {}})
    if change == "not_a_source":
        engine.is_mp_src_rank_with_outputs = lambda: False
    if change == "dynamic":
        engine.engine_config.dynamic_context_parallel = True
    loss = functools.partial(ppo_loss, config=actor_config(tmp_path, spike_detection=change != "off"))
    for parameter in engine.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):
        engine.train_batch(batch(), loss)
    assert {called.args[1] for called in engine.forward_backward_batch.call_args_list} == {loss}
    assert caplog.text.count("dynamic_context_parallel") == (change == "dynamic")


class WithScaler(StandIn):
    """fp16's scaler, as FSDP's engine has it; its scale doubles with every optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=1)

    def backward(self, loss: torch.Tensor, count: int) -> None:
        self.scaler.scale(loss).backward()

    def optimizer_step(self) -> float:
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm.item()


def test_the_scale_is_that_of_the_spike(tmp_path: Path) -> None:
    trained(recorded(WithScaler), tmp_path, [batch(), batch()])
    assert [event["loss_scale"] for event in lines_in(tmp_path)] == [4096.0, 8192.0]


def test_a_last_mini_batch_without_a_record_ends_the_step(tmp_path: Path, monkeypatch: Patch, caplog: Caplog) -> None:
    batches = [batch(), batch()]
    for index, data in enumerate(batches):
        tu.assign_non_tensor(data, epoch_and_mini_batch=(0, index), update_lr_scheduler=index == 1)
    failing = Mock(wraps=spike_recorder.recorded_event, side_effect=[DEFAULT, KeyError("broken")])
    monkeypatch.setattr(spike_recorder, "recorded_event", failing)
    first, second = trained(recorded(StandIn), tmp_path, batches)
    assert "actor/gradloc/triggered" not in first["metrics"]
    assert second["metrics"]["actor/gradloc/triggered"].aggregate() == 1
    assert [event["mini_batch"] for event in lines_in(tmp_path)] == [0]
    assert len(lines_in(tmp_path, "steps.jsonl")) == 1 and "a mini-batch is not recorded" in caplog.text


def test_a_rank_without_a_token_that_can_move_is_no_warning(tmp_path: Path, monkeypatch: Patch, caplog: Caplog) -> None:
    """The gradient's norm is that of all ranks, and the spike is on another one."""
    data = batch(planted=False)
    data["advantages"].values().zero_()
    monkeypatch.setattr(StandIn, "optimizer_step", lambda _: 1e4)
    trained(recorded(StandIn), tmp_path, [data, batch(planted=False)])
    assert [event["replay"] is None for event in lines_in(tmp_path)] == [True, False]
    assert "gradient spike" not in caplog.text
