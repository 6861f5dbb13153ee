# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The trainer's part of the evidence: what only the driver knows of a culprit's sample, and a line for each step."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..evidence.in_words import describe
from ..evidence.token_facts import text_evidence
from ..evidence.writer import STEP_FIGURES, record_events, record_step

if TYPE_CHECKING:
    from verl import DataProto
    from verl.protocol import DataProtoItem

logger = logging.getLogger(__name__)

# How many events of an update are logged one by one.
_LOGGED_EVENTS = 3


def record_update(update: dict[str, Any], batch: "DataProto", config: Any, tokenizer: Any) -> None:
    """Adds texts, rewards and ids to the culprits of an update, sums up its events, and writes the evidence.

    Never raises for a culprit.

    Args:
        update (dict): The `meta_info` of the actor's output. Its events are taken out of it; its metrics are read. It
            has neither where detection is off.
        batch (DataProto): The batch of the update, its rows as dispatched to the workers.
        config (DictConfig): verl's `actor_rollout_ref`.
        tokenizer (PreTrainedTokenizer): The actor's.
    """
    events = update.pop("gradloc_events", [])
    for event in events:
        # The dispatch gives every rank an equal run of rows, and the actor cuts that into mini-batches.
        rows_per_rank = len(batch) // event["world_size"]
        rows_per_mini_batch = config.actor.ppo_mini_batch_size * config.rollout.n // event["world_size"]
        for culprit in event["culprits"]:
            row = culprit["rank"] * rows_per_rank + event["mini_batch"] * rows_per_mini_batch + culprit["row"]
            try:
                culprit.update(_describe(batch[row], culprit["position"], tokenizer))
            except Exception:
                logger.warning("a culprit of a gradient spike is written without its text", exc_info=True)
    sum_up(events)
    figures = step_figures(update.get("metrics", {}))
    write_update(config.actor.bisect_dump_dir, batch.meta_info.get("global_steps"), events, figures)


def write_update(
    directory: str, global_step: int | None, events: Sequence[dict[str, Any]], figures: Mapping[str, Any]
) -> None:
    """Logs the events of an update, and writes them and the step's figures. Never raises for an event.

    Args:
        directory (str): Where to.
        global_step (int, optional): The trainer's step.
        events (Sequence[dict]): With the facts on all culprits, and summed up.
        figures (Mapping): What `step_figures` gave; nothing where detection is off.
    """
    if figures:
        record_step(directory, global_step, figures)
    for event in events[:_LOGGED_EVENTS]:
        what = "Gradient spike" if event.get("drill") is None else "Spike drill"
        logger.warning("%s in step %s: %s", what, event["global_step"], event.get("summary", ""))
    if len(events) > _LOGGED_EVENTS:
        more = len(events) - _LOGGED_EVENTS
        logger.warning("%d more gradient spikes in step %s: see the report on %s", more, global_step, directory)
    record_events(directory, events)


def sum_up(events: Sequence[dict[str, Any]]) -> None:
    """Gives events the `summary` that the facts on their culprits make possible. Never raises for an event."""
    for event in events:
        try:
            event["summary"] = describe(event)
        except Exception:
            logger.warning("a gradient spike is written without the trainer's part of its summary", exc_info=True)


def step_figures(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of `record_step`, from the metrics of all workers: each has a list of the workers' equal values."""
    figures = {}
    for name in STEP_FIGURES:
        values = metrics.get(f"actor/gradloc/{name}")
        if values is not None:
            figures[name] = values[0] if isinstance(values, (list, tuple)) else values
    return figures


def _describe(sample: "DataProtoItem", position: int, tokenizer: Any) -> dict[str, Any]:
    """The text around a response's token, and what the sample was rewarded for."""
    response_length = sample.batch["responses"].shape[-1]
    valid = sample.batch["attention_mask"].bool()
    ids = sample.batch["input_ids"]
    prompt = ids[:-response_length][valid[:-response_length]]
    response = ids[-response_length:][valid[-response_length:]]
    scores = sample.batch.get("token_level_scores")
    return {
        **text_evidence(tokenizer, prompt.tolist(), response.tolist(), position),
        **sample_facts(None if scores is None else scores.sum().item(), sample.non_tensor_batch),
    }


def sample_facts(reward: float | None, columns: Mapping[str, Any]) -> dict[str, Any]:
    """What the evidence says of a culprit's sample besides its text.

    Args:
        reward (float, optional): The sum of its scores.
        columns (Mapping): Its values in the batch's columns, by name.
    """
    reward_model = columns.get("reward_model")
    return {
        "ground_truth": reward_model.get("ground_truth") if isinstance(reward_model, dict) else None,
        "reward": reward,
        "data_source": str(columns["data_source"]) if "data_source" in columns else None,
        "uid": str(columns["uid"]) if "uid" in columns else None,
    }
