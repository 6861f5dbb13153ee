# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What the judge can compare of a step's responses, whose columns have verl's names."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..adapters.update_evidence import EVIDENCE_KEYS, REWARDS, TrainedData
from ..facts import TrainedRow
from ..judge import of_one_step
from ..lines import Answer, IdentityState, RunWarning
from ..measure.update_facts import own_facts
from ..tools.opening import Bundle
from .records import Record, RecordError

# By the name in a micro-batch, the column; the last three are of the update, and verl has them in no batch.
COLUMNS: Mapping[str, str] = {
    **EVIDENCE_KEYS,
    **{"log_prob": "log_probs", "weight": "weights", "coefficient": "coefficients"},
}
_PROMPTS = ("input_ids", "responses")
# By identity, the columns that it compares.
_NEEDS: Mapping[str, Sequence[str]] = {
    "old_log_probs": ("log_probs", "old_log_probs"),
    "rollout_log_probs": ("rollout_log_probs",),
    "sampled": ("rollout_log_probs",),
    "responses": _PROMPTS,
    "groups": ("uid", *_PROMPTS),
    "advantages": ("advantages", REWARDS[0]),
    "reference": ("ref_log_prob",),
    "loss": ("coefficients", "weights", "advantages"),
}
_IN_TRAINING = "only training sees it"


@dataclass(frozen=True)
class Told:
    """The responses of a step."""

    places: Sequence[str]  # what each is called
    # What is known of the tokens of each: of shape (1, length), by the names in a micro-batch.
    tokens: Sequence[Mapping[str, Tensor]]
    rows: Sequence[TrainedRow]  # each as a row; none if nothing tells prompts apart
    # What is known of identities without the judge: why some cannot be checked, or of a bundle, what was said before.
    states: Mapping[str, IdentityState]
    warnings: Sequence[RunWarning] = ()
    epoch: int = 0  # see `own_facts`
    is_first: bool = True

    def facts(self, of: Sequence[int] | None = None) -> list[float]:
        """What `own_facts` says of all responses, or of some."""
        tokens = self.tokens if of is None else [self.tokens[i] for i in of]
        return own_facts(tokens, self.epoch, self.is_first).tolist()

    def answer(self, is_first: bool = False) -> Answer:
        """Which identities hold; `is_first`: no optimizer step was taken before."""
        return self.explained(of_one_step(self.facts(), self.rows, is_first))

    def explained(self, answer: Answer) -> Answer:
        """An answer, and what is known besides: an identity is broken if either says so."""
        states = dict(answer["identities"])
        for name, state in self.states.items():
            # One of another release may have others.
            if name in states and (state["state"] == "broken" or states[name]["state"] != "broken"):
                states[name] = state
        return {**answer, "identities": states, "warnings": [*answer["warnings"], *self.warnings]}


def told(columns: Mapping[str, Any], places: Sequence[str] = (), names: Mapping[str, str] | None = None) -> Told:
    """What columns say.

    Args:
        columns (Mapping): `response_mask`, and what else there is of `COLUMNS` and of what `TrainedData` reads: padded
            or nested tensors, or a tensor for each response.
        places (Sequence[str]): What each response is called; default: its row.
        names (Mapping, optional): What columns are called in the file, where that is not verl's name.
    """
    found = {own: _rows(columns[name]) for own, name in COLUMNS.items() if name in columns}
    if not any(map(len, found["response_mask"])):
        raise ValueError("there is no token")
    missing, dropped = _missing(columns, found, names or {})
    policy = next((found[name] for name in ("log_prob", "old_log_prob", "rollout_log_prob") if name in found), None)
    kept = {name: rows for name, rows in found.items() if name not in dropped}
    kept.setdefault("weight", found["response_mask"])
    kept["log_prob"] = policy or [torch.zeros(len(mask)) for mask in found["response_mask"]]
    tokens = []
    for i in range(len(found["response_mask"])):
        row = {name: rows[i] if name == "token_id" else rows[i].float() for name, rows in kept.items()}
        row["response_mask"] = (row["response_mask"] != 0).float()
        for name, values in row.items():
            if values.shape != row["response_mask"].shape or values.dim() != 1:
                raise ValueError(f"the shape of {name} is {tuple(values.shape)} in row {i}, unlike response_mask's")
        if "rollout_log_prob" in row:  # what the mask leaves out may be NaN, and was not sampled
            rollout = row["rollout_log_prob"]
            row["rollout_log_prob"] = torch.where(rollout.isnan() & (row["response_mask"] == 0), 0.0, rollout)
        tokens.append({name: values.unsqueeze(0) for name, values in row.items()})
    # The sum of a response's log-probs is asked for by the name of the old ones.
    of_rows = dict(columns) if policy is None else {**columns, "old_log_probs": policy}
    rows = TrainedData({**of_rows, "uid": columns.get("uid", [""] * len(tokens))}).rows
    if "uid" not in columns:  # prompts tell them apart as well
        prompts = {prompt: f"prompt {i}" for i, prompt in enumerate(dict.fromkeys(row.prompt for row in rows), 1)}
        rows = [replace(row, uid=prompts[row.prompt]) for row in rows if row.prompt is not None]
    states: dict[str, IdentityState] = {
        name: {"state": "unchecked", "times": None, "since": None, "missing": why} for name, why in missing.items()
    }
    return Told(places or [f"row {i}" for i in range(len(tokens))], tokens, rows, states)


def _rows(column: Any) -> list[Tensor]:
    return [*(column.unbind() if isinstance(column, Tensor) else column)]


def _missing(
    columns: Mapping[str, Any], found: Mapping[str, Sequence[Tensor]], names: Mapping[str, str]
) -> tuple[dict[str, str], set[str]]:
    """By identity, why it cannot be checked; and columns that say nothing, by their names in a micro-batch.

    What stands for the log-probs of the update's own forward is not compared with itself.
    """
    missing = dict.fromkeys(("gradient", "weights"), _IN_TRAINING)
    rewarded = {REWARDS[0]} if any(name in columns for name in REWARDS) else set()
    for name, needed in _NEEDS.items():
        if lacks := [names.get(each, each) for each in needed if each not in {*columns, *rewarded}]:
            missing[name] = f"no {' and no '.join(dict.fromkeys(lacks))}"
    dropped = set()
    if "log_prob" not in found:
        dropped.add("old_log_prob")
        old, rollout = (found.get(name) for name in ("old_log_prob", "rollout_log_prob"))
        same = rollout is not None and old is not None and all(map(torch.equal, old, rollout))
        if old is None or same:
            dropped.add("rollout_log_prob")
            why = "old_log_probs are the rollout's, and there are no log_probs" if same else "no log-probs of training"
            missing |= dict.fromkeys(("rollout_log_probs", "sampled"), why)
        if old is None:
            missing["reference"] = "no log-probs of training"
            dropped.add("ref_log_prob")
            if rollout is None:
                missing["finite"] = "no log-probs"
    if "loss" in missing:
        dropped |= {"weight", "coefficient"}
    elif "ref_log_prob" in found:
        missing["loss"] = "coefficients may have the KL loss's part"
        dropped |= {"weight", "coefficient"}
    return missing, dropped


def told_by_records(records: Sequence[Record]) -> Told:
    """What records say; a column counts if all of them have it. Without any, it raises `RecordError`."""
    if not records:
        raise RecordError("There is no record.")
    columns: dict[str, Any] = {name: [each.tokens.get(own) for each in records] for own, name in COLUMNS.items()}
    columns["rollout_log_probs"] = [record.sampled for record in records]
    columns["uid"] = [record.uid for record in records]
    columns[REWARDS[0]] = [None if each.reward is None else torch.tensor([each.reward]) for each in records]
    columns = {name: values for name, values in columns.items() if all(value is not None for value in values)}
    ids = [record.row.input_ids for record in records]
    responses = [record.row.input_ids[record.row.prompt_length :] for record in records]
    for name, rows in zip(_PROMPTS, (ids, responses), strict=True):
        columns[name] = torch.nested.nested_tensor(rows, layout=torch.jagged)
    counts: Counter[int] = Counter()
    places = []
    for record in records:
        places.append(f"rank {record.rank}, row {counts[record.rank]}")
        counts[record.rank] += 1
    return told(columns, places, {REWARDS[0]: "reward", "ref_log_prob": "ref_log_probs"})


def told_by_bundle(bundle: Bundle) -> Told:
    """What the tokens of a bundle say, and what training, or a conversion, has said of them."""
    event, tokens, places = bundle.event, [], []
    for (rank, index), saved in bundle.micro_batches.items():
        known = {**saved.tokens}
        if bundle.is_converted:  # which computes what records lack
            del known["coefficient"]
        for i, row in enumerate(bundle.rows[rank, index]):
            tokens.append({name: values[i : i + 1] for name, values in known.items()})
            places.append(f"rank {rank}, row {row}")
    is_first = event["epoch"] == event["mini_batch"] == 0
    states = event.get("identities", {})  # older releases had none
    return Told(places, tokens, (), states, event["warnings"] if states else (), event["epoch"], is_first)
