# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The evidence of an update: each rank describes its own culprits, and rank 0 writes."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..evidence.token_facts import context_evidence, text_evidence
from ..evidence.writer import (
    ALL_TEXTS,
    CULPRITS_WITH_TEXT,
    EVENTS_PER_STEP,
    LINE_BYTES,
    STEP_FIGURES,
    jsonable,
    limit_texts,
    record_events,
    record_step,
)
from ..facts import Place, TrainedRow
from ..fsdp import collectives
from ..guarded import PatientThread, guarded, warn_once
from ..judging import in_one_line, judged
from ..lines import Answer, kind_of

logger = logging.getLogger(__name__)

# The evidence's names for what is known of a token, and where a micro-batch holds it.
EVIDENCE_KEYS = {
    "token_id": "responses",
    "response_mask": "response_mask",
    "advantage": "advantages",
    "old_log_prob": "old_log_probs",
    "ref_log_prob": "ref_log_prob",
    "rollout_log_prob": "rollout_log_probs",
    "rollout_is_weight": "rollout_is_weights",
}

# The same of a critic's values.
VALUE_KEYS = {"response_mask": "response_mask", "old_value": "values", "returns": "returns"}

# How many events of an update are logged one by one.
_LOGGED_EVENTS = 3
# The kinds of lines: how each is logged, and the plural.
_KINDS = {
    "spike": ("Gradient spike", "gradient spikes"),
    "clip": ("Outlying tokens", "mini-batches with outlying tokens"),
    "critic": ("Gradient spike of the critic", "spikes of the critic"),
}
_NO_TEXT = "a token of a gradient spike is written without its text"
_NO_ROWS = "the rows of an update are not compared with each other"
_NOT_GATHERED = "the tokens of gradient spikes are written without what the trainer's data say of them"
_NOT_COMPARED = "a gradient spike is not compared with the rewards of its mini-batch"
# Warnings that this process has given.
_said: set[str] = set()
# A tokenizer is others' code, and rank 0 waits for what each rank reads with its own.
_tokenizing = PatientThread("the tokenizer")


# The column that has the scores of a response's tokens: the first one that there is.
SCORES = ("token_level_scores", "rm_scores")
# The advantages are computed from the first of these that exists.
REWARDS = ("token_level_rewards", *SCORES)
# The columns that `TrainedData` reads.
_OF_ROWS = ("response_mask", "advantages", *REWARDS, "data_source", "uid", "session_id", "old_log_probs")
DATA_KEYS: tuple[str, ...] = ("input_ids", "attention_mask", "responses", "reward_model", *_OF_ROWS)


@dataclass(frozen=True)
class TrainedData:
    """The data that a rank trains on in an update.

    Args:
        columns (Mapping): Of which `DATA_KEYS` are read; sequences are padded, or nested without padding.
        mini_batch_size (int, optional): The number of rows of a mini-batch; None if the data are one.
    """

    columns: Mapping[str, Any]
    mini_batch_size: int | None = None

    def sample(self, line: Mapping[str, Any], token: Mapping[str, Any]) -> dict[str, Any]:
        """The sample of a line's token, which this rank has: verl's columns, its `prompt`, `response` and `reward`.

        Prompt and response are token ids without padding, the reward is the sum of its scores.
        """
        row = self._start(line) + token["row"]
        of = {name: self.columns[name][row] for name in DATA_KEYS if name in self.columns}
        prompt, response = self._ids[row]
        reward = next((of[name].sum().item() for name in SCORES if name in of), None)
        return {**of, "prompt": prompt.tolist(), "response": response.tolist(), "reward": reward}

    def rows_of(self, line: Mapping[str, Any]) -> list[TrainedRow] | None:
        """The rows of a line's mini-batch; None without uids, which tell the prompts apart."""
        size, start = self.mini_batch_size, self._start(line)
        return self.rows[start : None if size is None else start + size] or None

    @cached_property
    def rows(self) -> list[TrainedRow]:
        """What the judge reads of the rows; nothing without uids."""
        if "uid" not in self.columns:
            return []
        # A nested tensor takes apart all of its rows for each that is asked for.
        read = ((name, self.columns[name]) for name in _OF_ROWS if name in self.columns)
        of = {name: [*each.cpu().unbind()] if isinstance(each, Tensor) else [*each] for name, each in read}
        ids: list[Any] = [(None, None)] * len(of["uid"])
        with guarded(_NO_ROWS, _said):
            if {"input_ids", "responses", "response_mask"} <= self.columns.keys():
                ids = [tuple(hash(part.cpu().numpy().tobytes()) for part in row) for row in self._ids]
        return [self._row(i, of, *row_ids) for i, row_ids in enumerate(ids)]

    @staticmethod
    def _row(i: int, of: Mapping[str, Any], prompt: int | None, response: int | None) -> TrainedRow:
        known: dict[str, Any] = {name: str(of[name][i]) for name in ("data_source", "session_id") if name in of}
        for name, columns in (("score", SCORES[::-1]), ("reward", REWARDS[::-1])):
            for each in filter(of.__contains__, columns):
                known[name] = of[each][i].sum().item()
        if "response_mask" in of:
            mask = of["response_mask"][i].bool()
            if "old_log_probs" in of:
                known["log_prob"] = of["old_log_probs"][i][mask].sum().item()
            known |= {
                "length": int(mask.sum()),
                "padding": len(mask) - 1 - int(mask.nonzero()[-1]) if mask.any() else 0,
            }
            if "advantages" in of and len(advantages := of["advantages"][i][mask]):
                known["largest"] = advantages.abs().amax().item()
                if len(places := advantages.nonzero()[:, 0]):
                    moving = advantages[places]
                    known |= {"advantage": moving[0].item(), "is_one": torch.allclose(moving, moving[:1])}
                    known["unmoved"] = int(places[0])
        return TrainedRow(str(of["uid"][i]), prompt, response, **known)

    @cached_property
    def _ids(self) -> list[tuple[Tensor, Tensor]]:
        """The token ids of each row's prompt and response, without padding."""
        ids, responses = self.columns["input_ids"], self.columns["responses"]
        if not (ids.is_nested and responses.is_nested):
            mask = self.columns["attention_mask"].bool()
        lengths = responses.offsets().diff() if responses.is_nested else mask[:, -responses.shape[1] :].sum(1)
        rows = ids.unbind() if ids.is_nested else ids[mask].split(mask.sum(1).tolist())
        starts = [len(row) - length for row, length in zip(rows, lengths.tolist(), strict=True)]
        return [(row[:start], row[start:]) for row, start in zip(rows, starts, strict=True)]

    def _start(self, line: Mapping[str, Any]) -> int:
        return 0 if self.mini_batch_size is None else line["mini_batch"] * self.mini_batch_size


class UpdateEvidence:
    """Collects the events of an update's mini-batches.

    Args:
        tokenizer (PreTrainedTokenizer, optional): Without one, culprits have no text.
        sequence_parallel_size (int): How many neighbouring ranks have the same data.
    """

    def __init__(self, directory: str, tokenizer: Any, sequence_parallel_size: int) -> None:
        self._rank = collectives.rank()
        # Whose data these are, and which of the ranks that have them this one is.
        self._of_data = divmod(self._rank, sequence_parallel_size)
        self._directory = directory
        self._tokenizer = tokenizer
        self._sequence_parallel_size = sequence_parallel_size
        self._events: list[dict[str, Any]] = []
        # The rows of a spike's mini-batch with their rewards, by the `id` of its event.
        self._rows: dict[int, dict[Place, TrainedRow]] = {}
        self._trained: list[TrainedRow] = []  # the rows of rank 0 in the update

    def add(self, events: Sequence[Any], data: TrainedData) -> None:
        """Adds an update's lines, and what the data say of their tokens and mini-batches. A collective call.

        Args:
            events (Sequence[dict]): Events, as `build_event` gives them on this rank; clip lines or a critic's spikes.
                Rank 0 keeps them.
        """
        counts = Counter(map(kind_of, self._events))
        self._events += events
        told: list[Any] = []
        for event in events:
            counts[kind_of(event)] += 1
            if counts[kind_of(event)] <= EVENTS_PER_STEP:  # no more of a kind are written
                told.append(event)
        if not told:
            return
        tokens = [(event, i, token) for event in told for i, token in enumerate(_tokens(event))]
        by_rank = None
        with collectives.guarded_on_all_ranks(_NOT_GATHERED):
            by_rank = collectives.gather_on_first((self._own_facts(tokens, data), _own_rows(told, data)))
        if by_rank is None:
            return
        facts, rows = zip(*by_rank, strict=True)
        for number, of_token in chain(*facts):
            tokens[number][2].update(of_token)
        for number in rows[0]:
            all_rows = [of_rank.get(number) for of_rank in rows[:: self._sequence_parallel_size]]
            if None not in all_rows:
                by_place = {(rank, i): row for rank, of_rank in enumerate(all_rows) for i, row in enumerate(of_rank)}
                self._rows[id(told[number])] = by_place

    def take_in_rows(self, data: TrainedData) -> None:
        """Adds rows of rank 0, to be compared with each other; called once for each row. No collective call."""
        if not self._rank:
            with guarded(_NO_ROWS, _said):
                self._trained += data.rows

    def write(
        self,
        global_step: int | None,
        metrics: Mapping[str, Any],
        read_answer: Callable[[Sequence[TrainedRow]], Answer | None],
    ) -> None:
        """Ends an update: rank 0 judges, logs and writes its lines, and writes the step's figures.

        Args:
            metrics (Mapping): Those of the actor or critic; of the latter, no line of steps.jsonl is made.
            read_answer (Callable): `GradLoc.answer`; called on rank 0 alone.
        """
        events, self._events = self._events, []
        rows, self._rows = self._rows, {}
        trained, self._trained = self._trained, []
        if self._rank:
            return
        names = {name: f"actor/gradloc/{name}" for name in STEP_FIGURES}
        figures = {name: metrics[metric] for name, metric in names.items() if metric in metrics}
        answer = read_answer(trained) if figures else None  # a critic's update has none
        for sentence in [] if answer is None else answer["news"]:
            logger.warning("Step %s: %s", global_step, sentence)
        events = [judged(event, answer, rows.get(id(event))) for event in events]
        by_kind: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _KINDS}
        for event in events:
            by_kind[kind_of(event)].append(event)
        for kind, lines in by_kind.items():
            start, what = _KINDS[kind]
            for line in lines[:_LOGGED_EVENTS]:
                said = start if line.get("drill") is None else "Spike drill"
                logger.warning("%s in step %s: %s", said, line["global_step"], in_one_line(line))
            if (more := len(lines) - _LOGGED_EVENTS) > 0:
                logger.warning("%d more %s in step %s: see the report on %s", more, what, global_step, self._directory)
        # The figures count the spikes, so these come first: a reader never finds fewer than are counted.
        record_events(self._directory, events, "critic" if by_kind["critic"] else "spikes")
        if figures:
            record_step(self._directory, global_step, figures, answer)

    def _own_facts(
        self, tokens: Sequence[tuple[dict[str, Any], int, dict[str, Any]]], data: TrainedData
    ) -> list[tuple[int, dict[str, Any]]]:
        """What the data of this rank say of its own tokens, by their numbers in a list of (line, index, token)."""
        own_rank, duplicate = self._of_data
        own = []
        for number, (line, index, token) in enumerate(tokens):
            if not duplicate and token["rank"] == own_rank:
                with guarded(_NO_TEXT, _said):
                    # Sent to rank 0: plain values, whatever a ground truth is.
                    facts = jsonable(self._facts(line, index, token, data.sample(line, token)))
                    # The tokens of a line share it, and those with long texts as well.
                    count = len(_tokens(line))
                    share = LINE_BYTES // (count if index >= CULPRITS_WITH_TEXT else min(count, CULPRITS_WITH_TEXT))
                    if (size := len(json.dumps(facts))) > share:
                        warn_once(_said, f"{_NO_TEXT}: it would take {size:,} bytes, and {share:,} are its share")
                        facts = limit_texts(facts, index, 0, ALL_TEXTS)
                    own.append((number, facts))
        return own

    def _facts(
        self, line: Mapping[str, Any], index: int, token: Mapping[str, Any], sample: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What a sample says of its token; no long texts that are not written, and none of a token in the prompt."""
        position, of_spike = token["position"], kind_of(line) == "spike"
        facts = {"reward": sample["reward"]}
        facts |= {name: str(sample[name]) if name in sample else None for name in ("data_source", "uid")}
        if of_spike:
            reward_model = sample.get("reward_model")
            facts["ground_truth"] = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
        if self._tokenizer is None or position < 0:
            return facts
        prompt, response = sample["prompt"], sample["response"]
        if not of_spike:
            return facts | _tokenizing.run(partial(context_evidence, self._tokenizer, response, position))
        return facts | limit_texts(
            _tokenizing.run(partial(text_evidence, self._tokenizer, prompt, response, position)), index
        )


def _own_rows(events: Sequence[Any], data: TrainedData) -> dict[int, list[TrainedRow] | None]:
    """The rows of this rank's mini-batches of which a verdict may change by them, by the event's number."""
    rows: dict[int, list[TrainedRow] | None] = {}
    for number, event in enumerate(events):
        with guarded(_NOT_COMPARED):
            if kind_of(event) == "spike" and _may_need_rows(event):
                rows[number] = data.rows_of(event)
    return rows


def _may_need_rows(event: Mapping[str, Any]) -> bool:
    """Whether the rows of an event's mini-batch may say more of it."""
    return not event.get("drill") and (bool(event["culprits"]) or event["diagnosis"] == "nonfinite")


def _tokens(line: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """The tokens that a line names or suspects; of a critic's, the values."""
    if (kind := kind_of(line)) == "clip":
        return line["token_clip"]["tokens"]
    return line["values"] if kind == "critic" else line["culprits"] or line.get("suspected", ())
