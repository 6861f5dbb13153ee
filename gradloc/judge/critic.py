# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a spike of the critic's gradient comes from: large errors, or a network that amplifies ordinary ones."""

import math
from typing import Any

from ..lines import CriticSpike
from .sentences import layer_in_words, token_in_words

# A gradient is Σ w (v − R) ∇v. If the errors are at least this many times the usual ones, and have grown by at least
# this share of what the norm has grown by, they are the cause.
LARGE_ERROR = 2.0
EXPLAINED = 1 / 3


def judged(spike: CriticSpike) -> dict[str, Any]:
    """The `cause` of a spike and its `summary`, a few sentences, from its other fields alone.

    The cause is "errors", "network" if these have not grown with the norm, or None if nothing is known.
    """
    units, cause = spike["micro_batches"], None
    # The largest micro-batch; where they are not measured alone, the whole mini-batch.
    largest: Any = units[0] if units else {**spike, "token_equivalent": spike["token_norm"]}
    where = f"micro-batch {largest['micro_batch']} of rank {largest['rank']}" if units else "all data"
    norm, error = largest["token_equivalent"], largest["error"]
    size = f"{norm / spike['threshold']:.3g} times its threshold" if math.isfinite(norm) else "not finite"
    said = f"The critic's gradient norm is {size} in {where}."
    usual, usual_norm = spike["ordinary_error"], spike["ordinary_token_norm"]
    if usual and usual_norm and error is not None:
        growth = error / usual
        is_large = math.isfinite(norm) and growth >= max(LARGE_ERROR, EXPLAINED * norm / usual_norm)
        cause = "errors" if is_large or not math.isfinite(growth) else "network"
        rms = f"root mean square {error:.3g} against {usual:.3g} in the last mini-batch without a spike"
        what = "grown: look at the returns" if cause == "errors" else "hardly grown, so the model amplifies them"
        layer = layer_in_words([largest], spike["ordinary_layer_norms"])
        said += f" The values' errors have {what} ({rms}){'; ' if layer else ''}{layer}."
    for value in spike["values"][:1]:
        said += f" Largest error: value {value['value']:.3g}, return {value['return']:.3g}, {token_in_words(value)}."
    return {"cause": cause, "summary": said}
