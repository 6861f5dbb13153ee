# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The evidence of an engine's update: each rank describes its own culprits, and rank 0 writes."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from ..evidence.token_facts import text_evidence
from ..fsdp import collectives
from .samples import sample_facts, step_figures, sum_up, write_update

logger = logging.getLogger(__name__)


class EngineEvidence:
    """Collects the events of an update's mini-batches.

    Args:
        directory (str): Where they are written.
        tokenizer (PreTrainedTokenizer, optional): The actor's; without one, culprits have no text.
        sequence_parallel_size (int): How many neighbouring ranks have the same data.
    """

    def __init__(self, directory: str, tokenizer: Any, sequence_parallel_size: int) -> None:
        self._directory = directory
        self._tokenizer = tokenizer
        self._own_rank, self._duplicate = divmod(collectives.rank(), sequence_parallel_size)
        self._global_step: int | None = None
        self._events: list[dict[str, Any]] = []

    def add(self, global_step: int | None, events: Sequence[dict[str, Any]], data: TensorDict) -> None:
        """Adds the events of a mini-batch, and to their culprits what `data` says of them. A collective call.

        Args:
            global_step (int, optional): The trainer's step.
            events (Sequence[dict]): The same on every rank; they are changed.
            data (TensorDict): This rank's mini-batch.
        """
        self._global_step = global_step
        self._events += events
        culprits = [culprit for event in events for culprit in event["culprits"]]
        if not culprits:
            return
        own = [
            (index, found)
            for index, culprit in enumerate(culprits)
            if not self._duplicate and culprit["rank"] == self._own_rank
            for found in self._describe(culprit, data)
        ]
        for of_rank in collectives.gather_objects(own):
            for index, found in of_rank:
                culprits[index].update(found)
        sum_up(events)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Ends an update: writes its events and, from its metrics, the step's figures."""
        events, self._events = self._events, []
        if collectives.rank() == 0:
            write_update(self._directory, self._global_step, events, step_figures(metrics))

    def _describe(self, culprit: Mapping[str, Any], data: TensorDict) -> list[dict[str, Any]]:
        """The text around a culprit, and what its sample was rewarded for; nothing if that fails."""
        try:
            return [_describe(data, culprit["row"], culprit["position"], self._tokenizer)]
        except Exception:
            logger.warning("a culprit of a gradient spike is written without its text", exc_info=True)
            return []


def _describe(data: TensorDict, row: int, position: int, tokenizer: Any) -> dict[str, Any]:
    ids = data["input_ids"][row]
    responses = data["responses"]
    if responses.is_nested:
        length = len(responses[row])
    else:
        length = int(data["attention_mask"][row, -responses.shape[1] :].sum())
    prompt, response = ids[: len(ids) - length].tolist(), ids[len(ids) - length :].tolist()
    scores = [data[key][row].sum().item() for key in ("token_level_scores", "rm_scores") if key in data.keys()]
    columns = {key: tu.get(data, key)[row] for key in ("reward_model", "data_source", "uid") if key in data.keys()}
    text = text_evidence(tokenizer, prompt, response, position) if tokenizer is not None else {}
    return {**text, **sample_facts(scores[0] if scores else None, columns)}
