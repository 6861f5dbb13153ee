# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The evidence of an update: each rank describes its own culprits, and rank 0 writes."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor

from ..evidence.token_facts import context_evidence, text_evidence
from ..evidence.writer import EVENTS_PER_STEP, STEP_FIGURES, jsonable, limit_texts, record_events, record_step
from ..fsdp import collectives
from ..guarded import guarded, warn_once
from ..judging import in_one_line, judge, judged
from ..lines import RunWarning, kind_of
from ..sums import LEAST_CHANCE, OTHER_NUMBER, Place, RewardedRow

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
_NOT_COMPARED = "a gradient spike is not compared with the rewards of its mini-batch"
# What a warning has told of in this process.
_said: set[str] = set()


# The column that has the scores of a response's tokens: the first one that there is.
SCORES = ("token_level_scores", "rm_scores")
# What the advantages are computed from: the first one that there is.
REWARDS = ("token_level_rewards", *SCORES)
# What `TrainedData` reads.
DATA_KEYS: tuple[str, ...] = ("input_ids", "attention_mask", "responses", "response_mask", "advantages", *REWARDS)
DATA_KEYS += ("reward_model", "data_source", "uid", "session_id", "old_log_probs")


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

    def rewarded_rows(self, line: Mapping[str, Any]) -> list[RewardedRow] | None:
        """What the rows of a line's mini-batch were rewarded for; None without uids, which tell the prompts apart."""
        if "uid" not in self.columns:
            return None
        size, start = self.mini_batch_size, self._start(line)
        rows = slice(start, None if size is None else start + size)
        read = ("uid", "data_source", "advantages", "response_mask", *SCORES)
        of = {name: [*self.columns[name]][rows] for name in read if name in self.columns}
        count = len(of["uid"])
        scores = next((of[name] for name in SCORES if name in of), None)
        rewards = [None] * count if scores is None else [float(each.sum()) for each in scores]
        sources = [str(source) for source in of["data_source"]] if "data_source" in of else [None] * count
        pairs = zip(of["advantages"], of["response_mask"], strict=True)
        advantages = [float(each[mask.bool()].abs().amax()) if mask.any() else 0.0 for each, mask in pairs]
        columns = zip(map(str, of["uid"]), rewards, sources, advantages, strict=True)
        return [RewardedRow(*row) for row in columns]

    def row_counts(self) -> Counter[str]:
        """How many `rows` there are, and what the judge's `row_warnings` reads of them."""
        if "uid" not in self.columns:
            return Counter()
        read = {name: self.columns[name] for name in DATA_KEYS if name in self.columns}
        data = TrainedData({name: each.cpu() if isinstance(each, Tensor) else [*each] for name, each in read.items()})
        counts: Counter[str] = Counter()
        for count in (data._pair_counts, data._group_counts):
            with guarded(_NO_ROWS, _said):
                counts += count()
        return counts

    def _group_counts(self) -> Counter[str]:
        """How many rows are `mixed`, of a uid with several prompts that others have, too, or `repeated` ones."""
        uids = [*map(str, self.columns["uid"])]
        counts = Counter(rows=len(uids))
        if not {"input_ids", "responses", "response_mask"} <= self.columns.keys():
            return counts
        ids = [tuple(each.numpy().tobytes() for each in parts) for parts in self._ids]
        prompts = {(uid, prompt) for uid, (prompt, _) in zip(uids, ids, strict=True)}
        uids_of = Counter(prompt for _, prompt in prompts)
        shared_of = Counter(uid for uid, prompt in prompts if uids_of[prompt] > 1)
        # A trajectory that is cut in rows has other prompts, too, which may be a common state of its environment.
        sessions = {*zip(uids, map(str, self.columns.get("session_id", range(len(uids)))), strict=True)}
        if len(sessions) == len(uids) and math.isclose(len(uids_of), len({*uids}), rel_tol=OTHER_NUMBER):
            counts["mixed"] = sum(shared_of[uid] > 1 for uid in uids)
        if "old_log_probs" in self.columns:
            seen = set()
            pairs = zip(self.columns["old_log_probs"], self.columns["response_mask"], strict=True)
            for each, (log_probs, mask) in zip(zip(uids, ids, strict=True), pairs, strict=True):
                if each in seen:
                    counts["repeated"] += bool(log_probs[mask.bool()].sum() < LEAST_CHANCE)
                seen.add(each)
        return counts

    def _pair_counts(self) -> Counter[str]:
        """How many `pairs` there are of the rows, and how many `contradicting` ones: see `order_warning`."""
        counts: Counter[str] = Counter()
        name = next((name for name in REWARDS if name in self.columns), None)
        if name is None or not {"advantages", "response_mask"} <= self.columns.keys():
            return counts
        groups: dict[str, list[tuple[float, float]]] = {}
        columns = (self.columns[each] for each in ("uid", name, "advantages", "response_mask"))
        for uid, rewards, advantages, mask in zip(*columns, strict=True):
            of_tokens = advantages[mask.bool() & (advantages != 0)]  # another row's may end before this one
            if not torch.allclose(of_tokens, of_tokens[:1]):  # an estimator with a value of each token's
                return counts
            if len(of_tokens):
                groups.setdefault(str(uid), []).append((rewards.sum().item(), of_tokens[0].item()))
        for group in groups.values():
            for one, other in combinations(group, 2):
                more_reward, more_advantage = (
                    0.0 if math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) else a - b
                    for a, b in zip(one, other, strict=True)
                )
                counts["pairs"] += more_reward * more_advantage != 0
                counts["contradicting"] += more_reward * more_advantage < 0
        return counts

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
        rank (int, optional): The number of this rank, of which 0 writes; by default, its number among all.
    """

    def __init__(self, directory: str, tokenizer: Any, sequence_parallel_size: int, rank: int | None = None) -> None:
        self._rank = collectives.rank() if rank is None else rank
        # Whose data these are, and which of the ranks that have them this one is.
        self._of_data = divmod(collectives.rank(), sequence_parallel_size) if rank is None else (rank, 0)
        self._directory = directory
        self._tokenizer = tokenizer
        self._sequence_parallel_size = sequence_parallel_size
        self._events: list[dict[str, Any]] = []
        # What the rows of a spike's mini-batch were rewarded for, by the `id` of its event.
        self._rows: dict[int, dict[Place, RewardedRow]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, events: Sequence[Any], data: TrainedData, own: bool = False) -> None:
        """Adds an update's lines, and what the data say of their tokens and mini-batches. A collective call.

        Args:
            events (Sequence[dict]): Events, as `build_event` gives them on this rank; clip lines or a critic's spikes.
                Rank 0 keeps them.
            own (bool): Whether they are events that this rank has recorded alone; then it is no collective call.
        """
        counts = Counter(map(kind_of, self._events))
        self._events += events
        told: list[Any] = []
        for event in events:
            counts[kind_of(event)] += 1
            if counts[kind_of(event)] <= EVENTS_PER_STEP:  # no more of a kind are written
                told.append(event)
        if not told or (own and self._rank):
            return
        tokens = [(event, i, token) for event in told for i, token in enumerate(_tokens(event))]
        known = self._own_facts(tokens, data), _own_rows(told, data)
        facts, rows = zip(*([known] if own else collectives.gather_objects(known)), strict=True)
        if self._rank:
            return
        for number, of_token in chain(*facts):
            tokens[number][2].update(of_token)
        for number in rows[0]:
            by_rank = [of_rank.get(number) for of_rank in rows[:: self._sequence_parallel_size]]
            if None not in by_rank:
                by_place = {(rank, i): row for rank, of_rank in enumerate(by_rank) for i, row in enumerate(of_rank)}
                self._rows[id(told[number])] = by_place

    def take_in_rows(self, data: TrainedData) -> None:
        """Compares the rows of rank 0 with each other; called once for each row of an update. No collective call."""
        if not self._rank:
            with guarded(_NO_ROWS, _said):
                self._counts += data.row_counts()

    def write(
        self,
        global_step: int | None,
        metrics: Mapping[str, Any],
        read_warnings: Callable[[], Sequence[RunWarning]],
    ) -> None:
        """Ends an update: rank 0 judges, logs and writes its lines, and writes the step's figures.

        Args:
            metrics (Mapping): Those of the actor or critic; of the latter, no line of steps.jsonl is made.
            read_warnings (Callable): Returns what `RunChecks.warnings` does; called on rank 0 alone.
        """
        events, self._events = self._events, []
        rows, self._rows = self._rows, {}
        counts, self._counts = self._counts, Counter()
        if self._rank:
            return
        names = {name: f"actor/gradloc/{name}" for name in STEP_FIGURES}
        figures = {name: metrics[metric] for name, metric in names.items() if metric in metrics}
        warnings = [*read_warnings()]
        # A critic, whose update has no such figures, is trained on the same rows.
        if figures and (found := judge()) is not None:
            warnings = [*found.row_warnings(counts), *warnings]
        for each in warnings:
            warn_once(_said, f"Step {global_step}: {each['sentence']} {each['check']}", about=each["name"])
        events = [judged(event, warnings, rows.get(id(event))) for event in events]
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
            record_step(self._directory, global_step, figures, warnings)

    def _own_facts(
        self, tokens: Sequence[tuple[dict[str, Any], int, dict[str, Any]]], data: TrainedData
    ) -> list[tuple[int, dict[str, Any]]]:
        """What the data of this rank say of its own tokens, by their numbers in a list of (line, index, token)."""
        own_rank, duplicate = self._of_data
        own = []
        for number, (line, index, token) in enumerate(tokens):
            if not duplicate and token["rank"] == own_rank:
                with guarded(_NO_TEXT):
                    # Sent to all ranks: plain values, whatever a ground truth is.
                    own.append((number, jsonable(self._facts(line, index, token, data.sample(line, token)))))
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
        if not of_spike:
            return facts | context_evidence(self._tokenizer, sample["response"], position)
        return facts | limit_texts(
            text_evidence(self._tokenizer, sample["prompt"], sample["response"], position), index
        )


def _own_rows(events: Sequence[Any], data: TrainedData) -> dict[int, list[RewardedRow] | None]:
    """The rows of this rank's mini-batches of which a verdict may change by them, by the event's number."""
    rows: dict[int, list[RewardedRow] | None] = {}
    for number, event in enumerate(events):
        with guarded(_NOT_COMPARED):
            if kind_of(event) == "spike" and _may_need_rows(event):
                rows[number] = data.rewarded_rows(event)
    return rows


def _may_need_rows(event: Mapping[str, Any]) -> bool:
    """Whether the rows of an event's mini-batch may say more of it."""
    return not event.get("drill") and (bool(event["culprits"]) or event["diagnosis"] == "nonfinite")


def _tokens(line: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """The tokens that a line names or suspects; of a critic's, the values."""
    if (kind := kind_of(line)) == "clip":
        return line["token_clip"]["tokens"]
    return line["values"] if kind == "critic" else line["culprits"] or line.get("suspected", ())
