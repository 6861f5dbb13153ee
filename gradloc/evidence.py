# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What is known of a culprit token, what looks wrong with it, and the file that it is written to."""

import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from torch import Tensor

logger = logging.getLogger(__name__)

SCHEMA = 2

# The rules of `classify`; the README states them.
MISALIGNED_NATS = 1.0
MISALIGNED_SHARE = 0.5
TOKEN_RATIO = 2.0
SEQUENCE_RATIO = 1.2
LAYER_SHARE = 0.5

# Of a culprit's response, at most so many tokens around it are kept one by one.
WINDOW = 512

# The limits of `record_events`.
EVENTS_PER_STEP = 16
CULPRITS_WITH_TEXT = 16
FILE_BYTES = 64 * 2**20
TOTAL_BYTES = 2**30
_TEXTS = ("prompt", "response", "response_tokens", "response_suspicion", "response_kl")


def token_evidence(tokens: Mapping[str, Tensor], row: int, position: int) -> dict[str, Any]:
    """The figures of one token that need no gradient.

    Args:
        tokens (Mapping[str, Tensor]): Tensors of shape (rows, response length): `response_mask`, `token_id`, `weight`,
            `coefficient`, `log_prob`, and where there is such data `advantage`, `old_log_prob`, `ref_log_prob`,
            `entropy`, `rollout_log_prob`.
        row (int): The row in them.
        position (int): The index in the response.

    Returns:
        dict: Floats; None where there is no data. `misaligned_share` is the share of the response's tokens whose
            log-prob differs from the rollout's by more than a nat, or is NaN there.
    """

    def value(name: str) -> float | None:
        return float(tokens[name][row, position]) if name in tokens else None

    def difference(name: str) -> Tensor | None:
        """log p − log q over the response's tokens, shape (n,)."""
        if name not in tokens:
            return None
        mask = tokens["response_mask"][row].bool()
        return (tokens["log_prob"][row].double() - tokens[name][row].double())[mask]

    old, rollout = difference("old_log_prob"), difference("rollout_log_prob")
    reference = rollout if rollout is not None else old
    names = ("advantage", "log_prob", "old_log_prob", "ref_log_prob", "entropy", "rollout_log_prob")
    return {
        "token_id": int(tokens["token_id"][row, position]),
        "weight": value("weight"),
        "coefficient": value("coefficient"),
        **{name: value(name) for name in names},
        "ratio": _ratio(value("log_prob"), value("old_log_prob")),
        "rollout_ratio": _ratio(value("log_prob"), value("rollout_log_prob")),
        "sequence_ratio": None if reference is None else _exp(float(reference.mean())),
        "misaligned_share": None if rollout is None else float(off_the_rollout(rollout).double().mean()),
    }


def off_the_rollout(difference: Tensor) -> Tensor:
    """Which tokens' log-probs differ from the rollout's by more than a nat, or are NaN; from log p − log q."""
    return ~(difference.abs() <= MISALIGNED_NATS)


def window_start(position: int) -> int:
    """The index in the response at which a culprit's `response_…` lists begin."""
    return max(position - WINDOW // 2, 0)


def response_window(values: Tensor, response_mask: Tensor, position: int) -> list[float]:
    """A figure of each of the response's tokens around a culprit, rounded to 4 digits.

    Args:
        values (Tensor): The figures, shape (response length,).
        response_mask (Tensor): Same shape; the padding behind its last token is left out.
        position (int): The culprit's index in the response.
    """
    start = window_start(position)
    tokens = response_mask.nonzero()
    stop = min(start + WINDOW, int(tokens.max()) + 1 if len(tokens) else 0)
    return [float(f"{value:.4g}") for value in values[start:stop].tolist()]


def response_kl(tokens: Mapping[str, Tensor], row: int, position: int) -> dict[str, list[float]] | None:
    """What each of the response's tokens around a culprit adds to the KL to the reference policy.

    With r = log p_ref − log p: k1 = −r, k2 = r²/2, k3 = e^r − 1 − r (Schulman, "Approximating KL Divergence").

    Returns:
        dict: Lists as those of `response_window`; None without a reference policy.
    """
    if "ref_log_prob" not in tokens:
        return None
    mask = tokens["response_mask"][row]
    r = (tokens["ref_log_prob"][row].double() - tokens["log_prob"][row].double()) * mask
    estimates = {"k1": -r, "k2": r.square() / 2, "k3": r.expm1() - r}
    return {name: response_window(values, mask, position) for name, values in estimates.items()}


def classify(culprit: Mapping[str, Any]) -> str:
    """What looks wrong with a culprit; the first rule that holds names it.

    - "nonfinite": its gradient norm is NaN or Inf.
    - "misaligned": most log-probs of the response differ by more than a nat from the rollout's: a bug, not a spike.
    - "token": its importance ratio (to the old policy or to the rollout's) is over 2 or under 1/2, or NaN.
    - "sequence": the geometric mean of the response's ratios is over 1.2 or under 1/1.2, or NaN.
    - "layer": the ratios are fine, but one layer carries over half of the squared norm.
    - "other": none of these.
    """
    if not math.isfinite(culprit["grad_norm"]):
        return "nonfinite"
    if (culprit["misaligned_share"] or 0.0) > MISALIGNED_SHARE:
        return "misaligned"
    if any(_far_from_one(culprit[name], TOKEN_RATIO) for name in ("ratio", "rollout_ratio")):
        return "token"
    if _far_from_one(culprit["sequence_ratio"], SEQUENCE_RATIO):
        return "sequence"
    squares = [norm**2 for norm in culprit["layer_norms"].values()]
    if len(squares) > 1 and max(squares) > LAYER_SHARE * sum(squares):
        return "layer"
    return "other"


def text_evidence(tokenizer: Any, prompt: Sequence[int], response: Sequence[int], position: int) -> dict[str, Any]:
    """The culprit in words.

    Args:
        tokenizer (Any): Anything with `decode(list[int], skip_special_tokens=bool) -> str`.
        prompt (Sequence[int]): The prompt's token ids without padding.
        response (Sequence[int]): The response's token ids without padding.
        position (int): The culprit's index in the response.

    Returns:
        dict: `token`; `context`, up to 16 tokens on either side with the culprit in «»; `prompt`; `response`;
            `response_tokens`, up to 512 tokens around the culprit, each decoded alone; `response_tokens_start`, the
            index of the first of them.
    """

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    token = decode(response[position : position + 1])
    before = decode(response[max(position - 16, 0) : position])
    after = decode(response[position + 1 : position + 17])
    start = window_start(position)
    window = response[start : start + WINDOW]
    pieces = {token_id: decode([token_id]) for token_id in set(window)}
    return {
        "token": token,
        "context": f"{before}«{token}»{after}",
        "prompt": decode(prompt),
        "response": decode(response),
        "response_tokens": [pieces[token_id] for token_id in window],
        "response_tokens_start": start,
    }


def record_events(directory: str, events: Sequence[Mapping[str, Any]]) -> None:
    """Appends each event as one line to `<directory>/spikes.jsonl`. A failing disk gives a warning, not an error.

    A run that collapses, with a spike in every mini-batch, cannot fill the disk. Of each step, the first 16 events
    are written: the cause comes before its consequences. Of each event, the 16 largest culprits keep their long texts.
    A file of 64 MiB is renamed to spikes.1.jsonl, spikes.2.jsonl and so on, and once all have 1 GiB, nothing more
    is written. Where something is left out, a line with a `note` in place of an event says what.

    Args:
        directory (str): Made if it is not there. Files of an earlier run are continued.
        events (Sequence[Mapping]): All events of a step, in order; or of several steps.
    """
    if not events:
        return
    by_step: dict[Any, list[Mapping[str, Any]]] = {}
    for event in events:
        by_step.setdefault(event.get("global_step"), []).append(event)
    lines = []
    for step, of_step in by_step.items():
        for event in of_step[:EVENTS_PER_STEP]:
            lines.append(_line(_without_texts(event)))
            if (bare := len(event.get("culprits", ())) - CULPRITS_WITH_TEXT) > 0:
                message = f"of a spike, the {bare} smallest culprits are written without their texts"
                lines.append(_note("text_limit", step, bare, message))
        if (dropped := len(of_step) - EVENTS_PER_STEP) > 0:
            message = f"{dropped} more spikes are not written: {EVENTS_PER_STEP} in a step are the limit"
            lines.append(_note("rate_limit", step, dropped, message))
    try:
        os.makedirs(directory, exist_ok=True)
        _append(directory, b"".join(lines), events)
    except OSError as error:
        path = os.path.join(directory, "spikes.jsonl")
        logger.warning("%d gradient spike(s) could not be written to %s: %s", len(events), path, error)


def evidence_files(directory: str) -> list[str]:
    """The files that `record_events` has written, the oldest first."""
    names = [f"spikes.{number}.jsonl" for number in _rotated(directory)] + ["spikes.jsonl"]
    return [path for name in names if os.path.isfile(path := os.path.join(directory, name))]


def jsonable(value: Any) -> Any:
    """The value in plain JSON: NaN and infinities as the strings "NaN", "Infinity" and "-Infinity"."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):  # numpy and torch
        return jsonable(value.tolist())
    return str(value)


def _rotated(directory: str) -> list[int]:
    """The numbers of the full files, in order."""
    names = (re.fullmatch(r"spikes\.([1-9]\d*)\.jsonl", name) for name in os.listdir(directory))
    return sorted(int(name[1]) for name in names if name)


def _append(directory: str, data: bytes, events: Sequence[Mapping[str, Any]]) -> None:
    path = os.path.join(directory, "spikes.jsonl")
    files = evidence_files(directory)
    size = os.path.getsize(path) if path in files else 0
    last_line = _last_line(path) if size else b"\n"
    if sum(map(os.path.getsize, files)) + len(data) > TOTAL_BYTES:
        message = f"events are not written from here on: the files have reached {TOTAL_BYTES} bytes; move some away"
        logger.warning("%d gradient spike(s) left out of %s: %s", len(events), directory, message)
        if b'"note": "size_limit"' in last_line:
            return
        data = _note("size_limit", events[0].get("global_step"), len(events), message)
    elif size and size + len(data) > FILE_BYTES:
        os.rename(path, os.path.join(directory, f"spikes.{max(_rotated(directory), default=0) + 1}.jsonl"))
        last_line = b"\n"
    # A run that was killed may have left half a line; what follows must not be lost with it.
    mend = b"" if last_line.endswith(b"\n") else b"\n"
    with open(path, "ab") as file:
        file.write(mend + data)


def _last_line(path: str, most: int = 4096) -> bytes:
    """The last line of a file, or its end where the line is longer."""
    with open(path, "rb") as file:
        file.seek(max(os.path.getsize(path) - most, 0))
        return file.read().splitlines(keepends=True)[-1]


def _line(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(jsonable(value), allow_nan=False) + "\n").encode()


def _note(kind: str, step: Any, count: int, message: str) -> bytes:
    now = datetime.now(timezone.utc).isoformat()
    note = {"schema": SCHEMA, "time": now, "global_step": step, "note": kind, "count": count, "message": message}
    return _line(note)


def _without_texts(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """The event, whose culprits come the largest first, without the long texts of all but the first few."""
    culprits = event.get("culprits", ())
    if len(culprits) <= CULPRITS_WITH_TEXT:
        return event
    bare = [{**culprit, **dict.fromkeys(culprit.keys() & set(_TEXTS))} for culprit in culprits[CULPRITS_WITH_TEXT:]]
    return {**event, "culprits": [*culprits[:CULPRITS_WITH_TEXT], *bare]}


def _ratio(log_prob: float | None, other: float | None) -> float | None:
    return None if log_prob is None or other is None else _exp(log_prob - other)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf if x == x else x


def _far_from_one(ratio: float | None, factor: float) -> bool:
    return ratio is not None and not 1 / factor <= ratio <= factor
