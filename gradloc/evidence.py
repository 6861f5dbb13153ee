# Copyright 2026 The GradLoc Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""What is known of a culprit token, what looks wrong with it, and the file that it is written to."""

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

logger = logging.getLogger(__name__)

SCHEMA = 1

# The rules of `classify`; the README states them.
MISALIGNED_NATS = 1.0
MISALIGNED_SHARE = 0.5
TOKEN_RATIO = 2.0
SEQUENCE_RATIO = 1.2
LAYER_SHARE = 0.5


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
            log-prob differs from the rollout's by more than a nat.
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
        "misaligned_share": None if rollout is None else float((rollout.abs() > MISALIGNED_NATS).double().mean()),
    }


def suspicion(tokens: Mapping[str, Tensor]) -> Tensor:
    """s_t = |∂L/∂log p_t|·(1 − p_t), within √2 of the norm of the gradient by the logits.

    An entropy bonus adds its own coefficient times the entropy, a rough measure of its gradient.
    """
    found = tokens["coefficient"].abs() * (1 - tokens["log_prob"].exp())
    if "entropy" in tokens:
        found = found + tokens["entropy_coefficient"].abs() * tokens["entropy"].abs()
    return found


def classify(culprit: Mapping[str, Any]) -> str:
    """What looks wrong with a culprit; the first rule that holds names it.

    - "nonfinite": its gradient norm is NaN or Inf.
    - "misaligned": most log-probs of the response differ by more than a nat from the rollout's: a bug, not a spike.
    - "token": its importance ratio (to the old policy or to the rollout's) is over 2 or under 1/2.
    - "sequence": the geometric mean of the response's ratios is over 1.2 or under 1/1.2.
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


def text_evidence(tokenizer: Any, prompt: Sequence[int], response: Sequence[int], position: int) -> dict[str, str]:
    """The culprit in words.

    Args:
        tokenizer (Any): Anything with `decode(list[int], skip_special_tokens=bool) -> str`.
        prompt (Sequence[int]): The prompt's token ids without padding.
        response (Sequence[int]): The response's token ids without padding.
        position (int): The culprit's index in the response.

    Returns:
        dict: `token`; `context`, up to 16 tokens on either side with the culprit in «»; `prompt`; `response`.
    """

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    token = decode(response[position : position + 1])
    before = decode(response[max(position - 16, 0) : position])
    after = decode(response[position + 1 : position + 17])
    return {
        "token": token,
        "context": f"{before}«{token}»{after}",
        "prompt": decode(prompt),
        "response": decode(response),
    }


def record_events(directory: str, events: Sequence[Mapping[str, Any]]) -> None:
    """Appends each event as one line to `<directory>/spikes.jsonl`. A failing disk gives a warning, not an error."""
    path = os.path.join(directory, "spikes.jsonl")
    try:
        os.makedirs(directory, exist_ok=True)
        lines = "".join(json.dumps(jsonable(event), allow_nan=False) + "\n" for event in events)
        with open(path, "a", encoding="utf-8") as file:
            file.write(lines)
    except OSError as error:
        logger.warning("%d gradient spike(s) could not be written to %s: %s", len(events), path, error)


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


def _ratio(log_prob: float | None, other: float | None) -> float | None:
    return None if log_prob is None or other is None else _exp(log_prob - other)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf if x == x else x


def _far_from_one(ratio: float | None, factor: float) -> bool:
    return ratio is not None and not 1 / factor <= ratio <= factor
