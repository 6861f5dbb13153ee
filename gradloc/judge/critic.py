# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a spike of the critic's gradient comes from: large errors, or a network that amplifies ordinary ones."""

import math
from collections.abc import Mapping
from typing import Any

from ..lines import CriticSpike
from ..sources import layer_shares

# A gradient is Σ w (v − R) ∇v. If the errors are at least this many times the usual ones, and have grown by at least
# this share of what the norm has grown by, they are the cause.
LARGE_ERROR = 2.0
EXPLAINED = 1 / 3


def cause(spike: CriticSpike) -> str | None:
    """What has grown: "errors", "network" if the errors have not grown with the norm, or None if nothing is known."""
    largest = _largest(spike)
    error, usual = largest["error"], spike["ordinary_error"]
    norm, usual_norm = largest["token_equivalent"], spike["ordinary_token_norm"]
    if not usual or not usual_norm or error is None:
        return None
    growth = error / usual
    is_large = math.isfinite(norm) and growth >= max(LARGE_ERROR, EXPLAINED * norm / usual_norm)
    return "errors" if is_large or not math.isfinite(growth) else "network"


def summary(spike: CriticSpike) -> str:
    """A spike in a few sentences, from its other fields alone."""
    largest = _largest(spike)
    times = largest["token_equivalent"] / spike["threshold"]
    where = f"micro-batch {largest['micro_batch']} of rank {largest['rank']}" if spike["micro_batches"] else "all data"
    of_threshold = f"{times:.3g} times its threshold" if math.isfinite(times) else "not finite"
    sentences = [f"The critic's gradient norm is {of_threshold} in {where}."]
    if (found := cause(spike)) is not None:
        usual = f"{largest['error']:.3g} against {spike['ordinary_error']:.3g} in the last mini-batch without a spike"
        grown, so = "grown", ": look at the returns"
        if found == "network":
            grown = "hardly grown"
            so = f", so the model amplifies them{_most(largest['layer_norms'], spike['ordinary_layer_norms'])}"
        sentences.append(f"The values' errors have {grown} (root mean square {usual}){so}.")
    if spike["values"]:
        value = spike["values"][0]
        sentences.append(
            f"Largest error: value {value['value']:.3g}, return {value['return']:.3g}, in rank {value['rank']}, row "
            f"{value['row']}, position {value['position']}."
        )
    return " ".join(sentences)


def _largest(spike: CriticSpike) -> Mapping[str, Any]:
    """The largest micro-batch; where they are not measured alone, the whole mini-batch."""
    return spike["micro_batches"][0] if spike["micro_batches"] else {**spike, "token_equivalent": spike["token_norm"]}


def _most(layer_norms: Mapping[str, float], ordinary: Mapping[str, float] | None) -> str:
    """The layer with most of the squared norm, as the end of a sentence; nothing if the norms are not finite."""
    shares = layer_shares(layer_norms)
    if not shares:
        return ""
    layer = max(shares, key=lambda name: shares[name])
    usual = layer_shares(ordinary or {}).get(layer)
    usually = "" if usual is None else f", usually {usual:.0%}"
    return f"; {layer} has {shares[layer]:.0%} of the squared norm{usually}"
