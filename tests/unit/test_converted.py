"""Converted spikes: the event, the bundle, and what of them is read. In one process, without verl."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from notation import Patch
from small_bundles import resign
from valid_events import valid_events

from gradloc.bundles import layout, limits
from gradloc.bundles.bundle_writer import write_converted_bundle
from gradloc.bundles.layout import NotReplayableError, Row, SavedMicroBatch
from gradloc.evidence.event import SUSPECTED, converted_event
from gradloc.judge import judged
from gradloc.judge.verdict import CHECK_UNSEARCHED
from gradloc.measure.micro_batch import MicroBatch, MicroBatchName, suspicion
from gradloc.tools.opening import BundleError, open_bundle
from gradloc.tools.spike import ranks_looked_at

ROWS, PROMPT, RESPONSE = 2, 3, 12
BAD = (1, 2)
CONTEXT = {**dict.fromkeys(("grad_clip", "checkpoint")), "dtype": "float32", "actor": {}, "model": {"path": None}}
CONTEXT["versions"] = {"trainer": "another 1.0"}

Parts = dict[MicroBatchName, MicroBatch]


def micro_batch(seed: int, rows: list[int] | None = None) -> MicroBatch:
    torch.manual_seed(seed)
    log_prob = -torch.rand(ROWS, RESPONSE)
    weight = torch.full_like(log_prob, 1 / log_prob.numel())
    advantage = torch.ones(ROWS, RESPONSE)
    tokens = {
        "token_id": torch.randint(23, (ROWS, RESPONSE)),
        "response_mask": torch.ones(ROWS, RESPONSE),
        "log_prob": log_prob,
        "old_log_prob": log_prob.clone(),
        "weight": weight,
        "advantage": advantage,
        "coefficient": -weight * advantage,
        "entropy_coefficient": torch.zeros_like(weight),
        "broken": torch.zeros(ROWS, RESPONSE, dtype=torch.bool),
    }
    tokens["suspicion"] = suspicion(tokens)
    return MicroBatch({}, rows or [0, 1], (torch.get_rng_state(), None), tokens)


def planted(parts: Parts, value: float = 1e4) -> Parts:
    """The same with a token whose coefficient is `value`."""
    tokens = parts[0, 1].tokens
    tokens["coefficient"][BAD] = value
    tokens["advantage"][BAD] = -value * RESPONSE * ROWS
    tokens["log_prob"][BAD] = tokens["old_log_prob"][BAD] = -9.0
    tokens["suspicion"] = suspicion(tokens)
    return parts


def micro_batches(count: int = 3) -> Parts:
    return planted({(0, index): micro_batch(index, [2 * index, 2 * index + 1]) for index in range(count)})


def event_of(parts: Parts, **changes: Any) -> dict[str, Any]:
    where = {"global_step": 7, "epoch": 0, "mini_batch": 1}
    figures = {"threshold": 640.0, "global_norm": 5e3, "global_threshold": 75.0, "world_size": 1}
    return converted_event(parts, where=where, **{**figures, **changes})


def samples(_: Any) -> list[Row]:
    ids = torch.arange(PROMPT + RESPONSE)
    return [Row(ids, ids, RESPONSE, 1.0)] * ROWS


def write(directory: Path, parts: Parts) -> str:
    return write_converted_bundle(directory, event_of(parts), parts, samples, CONTEXT)


def test_the_event_claims_nothing_that_was_not_measured() -> None:
    event = judged(event_of(micro_batches()))
    valid_events(json.dumps([event]))
    assert [event[name] for name in ("units", "culprits", "diffuse", "open_segments")] == [[]] * 4
    assert [event[name] for name in ("without_tokens", "more_tokens", "ordinary_layer_norms")] == [None] * 3
    assert (event["search"], event["diagnosis"], event["passes"]) == ("converted", "unsearched", 0)
    assert not (event["complete"] or event["explained"] or event["out_of_time"] or event["applied"])
    assert event["trigger"] == {"kind": "global", "norm": 5e3, "threshold": 75.0}
    assert event["verdict"]["cause"] is None and event["verdict"]["check"] == CHECK_UNSEARCHED
    most = "token of rank 0, row 3, position 2, with p = 0.00012"
    assert event["summary"] == f"Converted, not searched; the most suspicious: {most}."
    of_three = judged(event_of(micro_batches(), world_size=3))
    valid_events(json.dumps([of_three]))
    assert ranks_looked_at(of_three) == "rank 0 (2 other ranks not looked at)" and ranks_looked_at(event) is None


def test_the_event_has_the_answer_that_it_is_given() -> None:
    state = {"state": "unchecked", "times": None, "since": None, "missing": "no uid"}
    answer = {"identities": {"groups": state}, "warnings": [], "changes": [], "news": []}
    event = event_of(micro_batches(), answer=lambda: answer)
    assert (event["identities"], event["warnings"]) == (answer["identities"], [])
    # Without one, nothing was checked.
    assert event_of(micro_batches())["identities"] == {}


def test_suspected_tokens_are_ordered_by_suspicion() -> None:
    parts = micro_batches()
    found = event_of(parts)["suspected"]
    assert len(found) == SUSPECTED
    first = found[0]
    assert (first["rank"], first["micro_batch"], first["row"], first["position"]) == (0, 1, 3, 2)
    assert first["suspicion"] == pytest.approx(1e4 * (1 - math.exp(-9)))
    assert first["sources"][0] == "advantage" and "unlikely" in first["sources"]
    assert not {"grad_norm", "share", "threshold", "layer_norms"} & first.keys()
    expected = torch.cat([part.tokens["suspicion"].flatten() for part in parts.values()]).topk(SUSPECTED).values
    assert [token["suspicion"] for token in found] == expected.tolist()
    # A token that cannot move is not suspected.
    parts = {(0, 0): micro_batch(0)}
    tokens = parts[0, 0].tokens
    tokens["coefficient"] = torch.zeros_like(tokens["coefficient"])
    tokens["coefficient"][0, 3] = tokens["coefficient"][0, 4] = -1.0
    tokens["weight"][0, 4] = 0.0
    tokens["suspicion"] = suspicion(tokens)
    assert [token["position"] for token in event_of(parts)["suspected"]] == [3]


def test_the_bundle_claims_nothing_that_was_not_measured(tmp_path: Path) -> None:
    parts = micro_batches()
    names = [write(tmp_path, parts) for _ in range(2)]
    assert names == ["replay/step7-epoch0-mini_batch1", "replay/step7-epoch0-mini_batch1-2"]
    for name in names:
        bundle = open_bundle(tmp_path / name)
        assert len((tmp_path / name / limits.MANIFEST).read_text().splitlines()) == 1
        assert bundle.event["global_step"] == 7 and bundle.rows == {part: each.rows for part, each in parts.items()}
        assert (bundle.manifest["layers"], bundle.manifest["measured"], bundle.manifest["left_out"]) == ([], [], 0)
        assert bundle.is_converted and bundle.missing == []
        for entry in bundle.manifest["micro_batches"]:
            assert (entry["norm"], entry["layer_norms"]) == (None, {})
            assert entry["threshold"] == pytest.approx(640 / math.sqrt(ROWS * RESPONSE))


def test_of_many_micro_batches_the_likeliest_are_kept(tmp_path: Path) -> None:
    count = limits.CONVERTED_MICRO_BATCHES + 3
    parts = micro_batches(count)
    quiet = parts[0, count - 1].tokens
    quiet["coefficient"] = torch.zeros_like(quiet["coefficient"])  # a prompt whose responses have the same reward
    bundle = open_bundle(tmp_path / write(tmp_path, parts))
    assert len(bundle.micro_batches) == limits.CONVERTED_MICRO_BATCHES and bundle.manifest["left_out"] == 2
    assert (0, 1) in bundle.micro_batches and (0, count - 1) not in bundle.micro_batches
    assert list(bundle.micro_batches) == sorted(bundle.micro_batches)


def test_what_a_bundle_may_not_have_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    parts = micro_batches()
    saved = SavedMicroBatch(samples({}), parts[0, 1].tokens, parts[0, 1].rng_state)
    size = sum(tensor.nbytes for tensor in layout.to_tensors(saved).values())
    monkeypatch.setattr(limits, "BUNDLE_BYTES", size)
    name = write(tmp_path, parts)
    assert list(open_bundle(tmp_path / name).micro_batches) == [(0, 1)]  # the likeliest alone
    monkeypatch.setattr(limits, "BUNDLE_BYTES", size - 1)
    with pytest.raises(NotReplayableError, match="it would take"):
        write(tmp_path, parts)
    monkeypatch.setattr(limits, "TOTAL_BYTES", 1)
    with pytest.raises(NotReplayableError, match="move some away"):
        write(tmp_path, parts)
    still = {(0, 0): micro_batch(0)}
    still[0, 0].tokens["coefficient"] = torch.zeros(ROWS, RESPONSE)
    with pytest.raises(NotReplayableError, match="no token with a gradient"):
        write(tmp_path, still)
    assert [path.name for path in (tmp_path / "replay").iterdir()] == [Path(name).name]


CLAIMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "layers": lambda m: m.update(layers=["a"]),
    "a norm": lambda m: m["micro_batches"][0].update(norm=1.0),
    "a diagnosis": lambda m: m["event"].update(diagnosis="diffuse"),
    "a measured token": lambda m: m["measured"].append(
        {"rank": 0, "micro_batch": 0, "row": 0, "position": 0, "grad_norm": 1.0, "layer_norms": {}}
    ),
    "a token elsewhere": lambda m: m["event"]["suspected"][0].update(position=RESPONSE),
    "a file twice": lambda m: m["micro_batches"].append(m["micro_batches"][0]),
    "a long list": lambda m: m.update(micro_batches=m["micro_batches"] * 30),
    "a field": lambda m: m["event"]["suspected"][0].pop("weight"),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_bundle_that_claims_more_is_refused(tmp_path: Path, claim: str) -> None:
    bundle = tmp_path / write(tmp_path, micro_batches())
    open_bundle(bundle)
    resign(bundle, CLAIMS[claim])
    with pytest.raises(BundleError, match="is damaged"):
        open_bundle(bundle)
