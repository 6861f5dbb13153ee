"""The package's parts that need neither verl nor several processes."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from notation import Patch, cases
from plain_passes import Loop

from gradloc import GradLoc, GradLocConfig, LayerClipConfig, TokenClipConfig, record_events
from gradloc.evidence import event as events
from gradloc.evidence.writer import FILE_BYTES, jsonable
from gradloc.fsdp.collectives import RankFailedError, RankLostError, broadcast
from gradloc.fsdp.failed_pass import RecordedCollectives
from gradloc.judge import judged
from gradloc.measure.local_norms import LocalNorms
from gradloc.measure.micro_batch import MicroBatchFigures
from gradloc.measure.passes import Passes
from gradloc.search.findings import Findings, Part


@cases(
    "key value wanted",
    *(("grad_norm_threshold", value, "a positive finite number or auto") for value in (-1.0, math.inf, True)),
    ("bisect_budget_steps", 0, "an integer of at least 1"),
    ("bisect_budget_seconds", "soon", "a positive finite number, auto or null"),
    ("spike_action", "explode", "one of ['log', 'skip', 'drop', 'stop']"),
    ("spike_drill_step", 0, "null or a step"),
    ("layer_clip.enable", 1, "True or False"),
    ("layer_clip.z", 0, "a positive number"),
    ("layer_clip.beta", 1.0, "a number between 0 and 1"),
    ("layer_clip.warmup_steps", 0, "an integer over 0"),
    ("layer_clip.min_bound", -1, "a number of at least 0"),
    ("token_clip.factor", 1.0, ""),
    ("token_clip.max_share", 0.0, ""),
)
def test_bad_settings_are_refused_with_the_key_to_mend(key: str, value: Any, wanted: str) -> None:
    clip, _, name = key.rpartition(".")
    kind = {"layer_clip": LayerClipConfig, "token_clip": TokenClipConfig, "": GradLocConfig}[clip]
    with pytest.raises(ValueError, match=rf"{re.escape(f'{key} must be {wanted}')}.*, got {re.escape(repr(value))}"):
        kind(**{name: value})


def test_local_norms_leave_no_hook_behind() -> None:
    model = torch.nn.Linear(4, 2)
    norms = LocalNorms(model, torch.device("cpu"))
    for closed in (False, True):
        norms.start()
        model(torch.randn(3, 4)).sum().backward()
        assert (norms.stop().sum() == 0) == closed
        norms.close()


def test_a_sender_that_fails_fails_on_all_ranks() -> None:
    with pytest.raises(RankFailedError, match="rank 0: ValueError: unreadable"):
        broadcast(Mock(side_effect=ValueError("unreadable")), 0)


def test_a_pass_that_loses_a_rank_leaves_no_recording(monkeypatch: Patch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    watched = GradLoc(model, GradLocConfig(), lambda *_: None)._model
    assert watched is not None

    def broken(_: int) -> None:
        model(torch.randn(3, 4)).sum().backward()
        raise RuntimeError("broken")

    monkeypatch.setattr(RecordedCollectives, "complete", Mock(side_effect=RankLostError("no other rank answers")))
    with pytest.raises(RankLostError):
        Passes(watched, [], 1.0).accumulate(broken, lambda: None)
    model(torch.randn(3, 4)).sum().backward()
    assert watched.meter.stop().tolist() == [0.0]


def test_events_are_appended_as_strict_json(tmp_path: Path) -> None:
    event = {"norm": math.nan, "list": [math.inf, -math.inf, None, True], "text": "«é»\n", "array": torch.ones(2)}
    event["summary"] = "judged"
    record_events(str(tmp_path / "deep" / "dump"), [event])
    record_events(str(tmp_path / "deep" / "dump"), [event, event])
    lines = (tmp_path / "deep" / "dump" / "spikes.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 3
    expected = {"norm": "NaN", "list": ["Infinity", "-Infinity", None, True], "text": "«é»\n", "array": [1.0, 1.0]}
    expected["summary"] = "judged"
    assert all(json.loads(line, parse_constant=pytest.fail) == expected for line in lines)
    # Anything can be written.
    assert jsonable({1: (torch.tensor(2.0), object)}) == {"1": [2.0, str(object)]}


def small_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7))


@pytest.mark.parametrize("meter", ["local", "reduced"])
@pytest.mark.parametrize(("scale", "diagnosis"), [(1.0, "nonfinite"), (1024.0, "overflow")])
def test_a_gradient_that_is_broken_where_there_is_no_token(meter: str, scale: float, diagnosis: str) -> None:
    parts = {"loss_scale": lambda: scale, "meter": meter}
    settings = {"grad_norm_threshold": 1.0, "spike_trigger": "global"}
    loop = Loop(small_model(), torch.randint(7, (2, 2, 5)), 1, parts=parts, **settings)
    loop.gradloc.start_update(1)
    for index in range(2):
        loop.run_pass(index, weight=0.0, facts_of=lambda log_prob: {"response_mask": 0 * log_prob})
    loop.model[1].bias.grad.fill_(math.nan)
    assert loop.gradloc.locate(0, 0).take_step
    (event,) = loop.gradloc.events
    assert event["diagnosis"] == diagnosis and event["culprits"] == [] and event["error"] is None
    assert event["broken_parameters"] == {"count": 1, "of": 3, "names": ["1.bias"]}
    assert "in 1 of 3 parameters, of which the backward reaches 1.bias first" in judged(event)["summary"]
    assert loop.model[1].bias.grad.isnan().all()


@pytest.mark.parametrize("ranks", [64, 640])
def test_an_event_of_many_ranks_is_bounded(ranks: int) -> None:
    """A thousand events of 64 ranks have room in a file; what a verdict and the report look for is listed."""
    norms, culprits = {f"layers.{i}": math.pi + i for i in range(94)}, [((ranks - 1, i), 0, 3) for i in range(2)]
    of = MicroBatchFigures(rows=64, tokens=4096, broken_tokens=0, root_square_weight=0.01, norm=5.0)
    of = replace(of, layers=[*norms], by_layer=torch.tensor([*norms.values()], dtype=torch.float64))
    figures = {(rank, index): replace(of, norm=5.0 - rank / 1e4) for rank in range(ranks) for index in range(8)}
    figures[ranks - 1, 2] = replace(of, norm=4.0, broken_tokens=1)
    rests = {name: Part(*name, 4096, 1.0, 2.0) for name in figures} | {(40, 3): Part(40, 3, 4096, 1.0, 3.0)}
    diffuse = [Part(*name, 9, 1.0, 2.0 + name[0], (1, 2)) for name in figures]
    open_parts = [Part(*name, 9, 3.0) for name in figures]
    findings = Findings(1.0, "explained", [*norms], figures, {}, [], culprits, {}, rests, diffuse, open_parts)
    medians, where = dict.fromkeys(("median_advantage", "median_weight")), {"global_step": 1, "epoch": 0}
    found = events._begun(1.0, ranks, findings, medians, {**where, "mini_batch": 0}, events.Done(False))
    units = {(unit["rank"], unit["micro_batch"]): unit for unit in found["units"]}
    assert [*units][0] == (0, 0) and {*culprits[0][:1], *culprits[1][:1], (ranks - 1, 2), (40, 3)} < units.keys()
    assert len(units) == 64 and found["more_units"] == 8 * ranks - 64
    assert sum(bool(unit["layer_norms"]) for unit in units.values()) == 4 and units[0, 0]["layer_norms"] == norms
    assert units[40, 3]["rest"]["norm"] == 3.0 and units[ranks - 1, 2]["broken_tokens"] == 1
    assert [part["norm"] for part in found["diffuse"]] == [ranks + 1.0] * 8 + [ranks + 0.0] * 8
    assert found["more_diffuse"] == 8 * ranks - 16
    assert [(part["rank"], part["micro_batch"]) for part in found["open_segments"]] == [(None, i) for i in range(8)]
    assert {(part["tokens"], part["threshold"]) for part in found["open_segments"]} == {(9 * ranks, 3 * ranks**0.5)}
    assert len(json.dumps(jsonable(found))) < FILE_BYTES / 1000


def test_only_the_largest_culprits_have_figures_of_their_responses() -> None:
    """All ranks get them."""
    loop = Loop(small_model(), torch.randint(7, (1, 4, 6)), 1, grad_norm_threshold=1e-9, bisect_until="exhaustive")
    loop.step(1.0)
    (event,) = loop.gradloc.events
    known = [culprit["response_suspicion"] is not None for culprit in event["culprits"]]
    assert known == [True] * 16 + [False] * 4


def test_a_micro_batch_that_is_broken_without_tokens_is_searched_once() -> None:
    """Its backward gives NaN from a token on, whatever the loss; another micro-batch has a loud token."""
    model, ids = small_model(), torch.arange(6).repeat(2, 1, 1)
    ids[0, 0, 3] = 6

    def spoil(_: object, inputs: tuple[torch.Tensor], hidden: torch.Tensor) -> None:
        hidden.register_hook(lambda gradient: gradient.masked_fill((inputs[0] == 6).unsqueeze(-1), math.nan))

    model[0].register_forward_hook(spoil)
    loop = Loop(model, ids, 1, grad_norm_threshold=20.0)
    loop.step(1.0, torch.tensor([[1.0, 1.0, 1.0, 1e3, 1.0]]))
    (event,) = loop.gradloc.events
    assert [(each["micro_batch"], each["position"]) for each in event["culprits"]] == [(0, 2), (1, 3)]
    assert event["complete"] and event["passes"] == 5


def test_micro_batches_without_advantages_are_no_ordinary_ones() -> None:
    """What KL and entropy terms leave of them is far smaller; in the mini-batch of the spike, and in one before it."""
    model, ids = small_model(), torch.randint(7, (1, 1, 6))

    def ordinary_of(*mini_batches: list[tuple[float, float]]) -> dict[str, float]:
        """Of mini-batches, by micro-batch: the advantage and the coefficient of their tokens."""
        loop = Loop(model, ids, 1, grad_norm_threshold=100.0, bisect_budget_steps=4)
        loop.gradloc.start_update(1)
        for number, micro_batches in enumerate(mini_batches):
            for advantage, coefficient in micro_batches:
                facts = {"advantage": torch.full((1, 5), advantage)}
                loop.run_pass(0, -coefficient, 0.1, facts_of=lambda _, facts=facts: facts)
            loop.gradloc.locate(0, number)
            model.zero_grad()
        return loop.gradloc.events[-1]["ordinary_layer_norms"]

    ordinary, still, spike = (1.0, 1.0), (0.0, 1e-3), (1e4, 1e4)
    expected = ordinary_of([ordinary, spike])
    assert min(expected.values()) > 0
    assert ordinary_of([ordinary, still, still, spike]) == pytest.approx(expected)
    assert ordinary_of([ordinary, still, still], [still, spike]) == pytest.approx(expected)
