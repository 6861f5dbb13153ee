"""What is kept of a micro-batch until the optimizer step, and what of it is sent to other ranks."""

from __future__ import annotations

import pickle
import types
from typing import Any

import torch

from gradloc.measure.micro_batch import MicroBatch

ROWS, PROMPT, RESPONSE = 8, 4, 8


def test_what_is_kept_for_a_search_comes_from_the_host() -> None:
    from verl import DataProto
    from verl.utils.gradloc.adapters import dp_actor

    ids = torch.arange(ROWS * (PROMPT + RESPONSE)).view(ROWS, -1)
    columns = {"responses": ids[:, PROMPT:], "input_ids": ids, "attention_mask": ids > 0, "position_ids": ids + 1}
    mini_batch = DataProto.from_dict(columns, non_tensors={"multi_modal_inputs": [{"row": row} for row in range(ROWS)]})
    rows = torch.tensor([5, 2])
    # On a device from which nothing can be read.
    on_device = {name: column[rows].to("meta") for name, column in columns.items()}
    kept: dict[str, Any] = {}
    watch = types.SimpleNamespace(
        watches_passes=True,
        begin_pass=lambda inputs, indices, _: kept.update(inputs, rows=indices),
        aggregation=types.SimpleNamespace(start=lambda: None),
        start_loss=lambda *_: None,
    )
    dp_actor.begin_pass(types.SimpleNamespace(watch=watch), mini_batch, on_device, 0.5, rows)
    assert kept.pop("rows") == [5, 2] and kept.pop("temperature") == 0.5
    assert list(kept.pop("multi_modal_inputs")) == [{"row": 5}, {"row": 2}]
    assert kept.keys() == columns.keys()
    assert all(torch.equal(tensor, columns[name][rows]) for name, tensor in kept.items())


def test_a_row_is_sent_without_the_others() -> None:
    """Rows of a nested tensor are views, and a pickled view takes its whole storage along."""
    rows = torch.nested.as_nested_tensor([torch.arange(500)] * 16, layout=torch.jagged).unbind()
    tokens = {name: torch.ones(16, 1) for name in ("log_prob", "weight", "response_mask", "coefficient")}
    rng_state = (torch.get_rng_state(), None)
    micro_batch = MicroBatch({"input_ids": list(rows), "settings": {"count": 3}}, list(range(16)), rng_state, tokens)
    sent = micro_batch.portable(1.0)
    assert sent.inputs["settings"] == {"count": 3}
    assert all(map(torch.equal, sent.inputs["input_ids"], rows))
    assert len(pickle.dumps(sent.inputs)) < 2 * 16 * 500 * 8
    assert micro_batch.portable(1.0, inputs=False).inputs == {}
