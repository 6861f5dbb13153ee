# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A replay's result as texts and tables, which terminal and page show, and what its remedies say of each source."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..judge.loss import OF_LOSS
from ..judge.rows import OF_GROUPS
from ..judge.rules import SOURCES
from ..threshold import is_over
from ..tools.figures import percent, severity, short, visible
from .spike_view import Spec, figure, index, table_of
from .view import Column

Result = Mapping[str, Any]

# Causes besides the rules that are to be repaired where they come from: a remedy only covers them up.
_BUGS = (
    *("auxiliary", "stale_weights", "partly_stale", "other_log_probs", "reward_scale", "learning_rate"),
    *("adapter_scale", "misfire", *OF_LOSS, *OF_GROUPS),
)
# A remedy that leaves more of what the culprits add to the norm is not recommended.
_MOST_LEFT = 0.5
# One that moves the ordinary tokens' gradient by more is as good as a skipped step for them.
MOST_MOVED = 0.5


def best(rows: Sequence[Mapping[str, Any]], most: float = math.inf) -> Mapping[str, Any] | None:
    """The first row of a table that is under its threshold and can be turned on; None if there is none.

    Args:
        rows (Sequence[Mapping]): `remedies` of a replay's result, best first.
        most (float): The largest norm that it may leave.
    """
    usable = (row for row in rows if row["under"] and row["override"])
    return next((row for row in usable if float(row["norm"]) <= most), None)


def recommended(result: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, str]:
    """The remedy that a replay recommends, or None, and a sentence on it, or on why there is none.

    Args:
        result (Mapping): A replay's result, with measured remedies and a micro-batch.
    """
    unit = result["units"][0]
    replayed, rest = float(unit["replayed"]), unit["rest"]
    if not is_over(replayed, float(unit["threshold"])):
        return None, "Without a spike there is nothing to remedy."
    if cause := _bug(result):
        advice = SOURCES[cause].advice if cause in SOURCES else "Repair what the verdict names."
        return None, f"No remedy is recommended: the cause is {cause}, which a remedy only covers up. {advice}"
    if not result.get("same_weights", True):
        return None, (
            "No remedy is recommended, because these are probably not the weights of training: give --model those of "
            "the last checkpoint before the spike."
        )
    if best(result["remedies"]) is None:
        return None, "No remedy that could be computed brings it under its threshold."
    ordinary = 0.0 if rest is None or not float(rest) < replayed else float(rest)
    most = ordinary + _MOST_LEFT * (replayed - ordinary) if math.isfinite(replayed) else math.inf
    first = best(result["remedies"], most)
    if first is None:
        what = "what the culprits add to the norm" if ordinary else "the norm"
        return None, f"No remedy helps: each that brings it under its threshold leaves over half of {what}."
    return first, f"{remedy_in_words(first)}: {first['override']}"


def _bug(result: Mapping[str, Any]) -> str | None:
    """The cause that is to be repaired: of the verdict, of the scale, or the source of the largest culprit."""
    cause, source = result.get("cause"), _source(result)
    if cause in _BUGS or (cause in SOURCES and SOURCES[cause].is_bug):
        return cause
    if result.get("scale") is not None:
        return "loss_scale"
    return source if source in SOURCES and SOURCES[source].is_bug else None


def _source(result: Mapping[str, Any]) -> str | None:
    """The source of the largest culprit; None if that is not known."""
    culprits = [token for token in result["tokens"] if token["culprit"] and token["source"] in SOURCES]
    return max(culprits, key=lambda token: severity(token["replayed"]))["source"] if culprits else None


def remedy_in_words(row: Mapping[str, Any]) -> str:
    """What a remedy leaves of a spike, and its price; without a full stop."""
    left, moved = (None if row[name] is None else float(row[name]) for name in ("left", "ordinary_moved"))
    leaves = f"a norm of {float(row['norm']):.3g}" if left is None else f"{percent(left)} of the norm"
    price = "" if moved is None else f" and moves the gradient of the ordinary tokens by {percent(moved)}"
    if moved is not None and moved > MOST_MOVED:
        price += ", for which it is a skipped step"
    return f"{row['name']} fits best: it leaves {leaves}{price}"


def advice_by_source(replays: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What to do about each source: the remedy that the latest replay of it recommends, else a general sentence.

    A replay counts for the source of its largest culprit, if remedies were measured.

    Args:
        replays (Sequence[Mapping]): The results of replays, in the order of their events.
    """
    found = {name: rule.advice for name, rule in SOURCES.items()}
    for result in replays:
        source = _source(result)
        if source is None or not result["units"] or "remedy_notes" not in result:
            continue
        first, sentence = recommended(result)
        if first is not None:
            step = "" if result["global_step"] is None else f" of step {result['global_step']}"
            found[source] = f"In the replay{step}, {sentence}"
    return found


def replay_tables(result: Result) -> dict[str, Any]:
    """A result as `title`, `where` it was computed, `sentences`, `notes`, `tables`, and `step`."""
    step = "–" if result["global_step"] is None else str(result["global_step"])
    where = f"{result['model']}, {result['variant']} on {result['device']}; in training {result['recorded']}"
    notes = [f"{row['name']}: {row['note']}" for row in result["remedies"] if row.get("note") is not None]
    others = [_other(name, i) for i, name in enumerate(result["variants"])]
    norms = figure("In training", "norm"), figure("Replayed", "replayed")
    of_unit = index("Rank", "rank"), index("Micro-batch", "micro_batch"), index("Rows", "rows")
    rest = figure("Without culprits", "rest")
    tables = (
        table_of("Gradient norms of tokens", (*_PLACE, *others, *_LARGEST), result["tokens"]),
        table_of(
            "Gradient norms of micro-batches",
            (*of_unit, figure("Threshold", "threshold"), *norms, *others, rest),
            result["units"],
        ),
        table_of("The first micro-batch by layer", (_text("Layer", "layer", "row"), *norms, *others), result["layers"]),
        table_of("What each switch changes in the first micro-batch", _SWITCH, result.get("switches", ())),
        table_of("Which remedy fits: the first micro-batch's gradient", _REMEDY, result["remedies"]),
    )
    return {
        "step": step,
        "title": ("" if step == "–" else f"Step {step}: ") + visible(result["bundle"]),
        "where": visible(where),
        "sentences": [*map(visible, result["sentences"])],
        "notes": [visible(note) for note in (*result["notes"], *notes, *result.get("remedy_notes", ()))],
        "tables": [table for table in tables if table.rows],
    }


def _other(name: str, i: int) -> Spec:
    """A column for another way of computing."""
    return Column(visible(name), "num"), lambda row: short(next(iter(row["others"][i:]), None))


def _text(head: str, name: str, kind: str = "") -> Spec:
    return Column(head, kind), lambda row: visible(row[name] or "–")


_PLACE: Sequence[Spec] = (
    *(index("Rank", "rank"), index("Row", "row"), index("Position", "position"), index("Token id", "token_id")),
    *(figure("In training", "grad_norm"), figure("Replayed", "replayed")),
)
_LARGEST: Sequence[Spec] = (
    *(figure("Log p", "log_prob"), figure("Replayed", "replayed_log_prob"), _text("Largest layer", "layer")),
    *(figure("In training", "layer_norm"), figure("Replayed", "replayed_layer_norm")),
)
_SWITCH: Sequence[Spec] = (
    *(_text("Switch", "name", "row"), figure("Norm", "norm")),
    *(figure("Log-probs differ by up to", "log_probs"), figure("Culprit", "culprit")),
)
# Best first, with the overrides to copy.
_REMEDY: Sequence[Spec] = (
    _text("By", "name", "row"),
    figure("Norm", "norm"),
    (Column("Left", "num"), lambda row: percent(row["left"])),
    (Column("Under its threshold", "num"), lambda row: "yes" if row["under"] else "no"),
    (Column("Ordinary moved", "num"), lambda row: percent(row["ordinary_moved"])),
    (Column("Masked", "num"), lambda row: str(row["masked"]["tokens"])),
    (Column("Of them culprits", "num"), lambda row: str(row["masked"]["culprits"])),
    _text("Meaning", "meaning"),
    (Column("Override", "code"), lambda row: row["override"] or ""),
)
