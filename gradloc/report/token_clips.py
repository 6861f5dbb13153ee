# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""TokenClip's results: totals of all clip lines, the tokens furthest over their bounds, and the same in words."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, get_type_hints

from ..lines import ClippedToken
from ..tools.figures import SHORT_CHARACTERS, clipped, count, rounded, severity
from ..tools.spike import MiniBatch, mini_batch_of

# At most so many boundaries are named in a sentence.
_NAMED = 8

# By TokenClip's action, what happened to the signals that were cut.
_DONE = {"drop": "dropped", "smooth": "reduced"}

# How the table's tokens are to be read.
EXPLANATION = (
    "At the log-probs a position's signal is its own token's; below, the losses of later tokens reach earlier "
    "positions through attention as well."
)


# How many backward signals (tokens × boundaries) were `over` their bounds, and how many of these were `cut`.
Signals = Counter[str]


def signals_of(lines: Sequence[Mapping[str, Any]]) -> dict[MiniBatch, Signals]:
    """The signals of each mini-batch."""
    found: dict[MiniBatch, Signals] = defaultdict(Counter)
    for line in lines:
        for name in ("over", "cut"):
            found[mini_batch_of(line)][name] += sum(line["token_clip"][name].values())
    return found


def _all_cut(signals: Signals) -> bool:
    return 0 < signals["over"] <= signals["cut"]


def summarize_clips(
    lines: Sequence[Mapping[str, Any]], spikes: Collection[MiniBatch], top: int
) -> dict[str, Any] | None:
    """Sums up the clip lines, ready for `jsonable`; None without any.

    Args:
        lines (Sequence[Mapping]): The clip lines.
        spikes (Collection): The mini-batches with a spike.
        top (int): How many of the largest tokens are listed.

    Returns:
        dict: `title` and `sentences`; `mini_batches`, how many had a signal over its bound, `stopped`, in how many of
            these all were cut and left no spike, `with_spike`, how many of them have a spike; `over` and `cut`, how
            many signals; by boundary, `refused`, in how many mini-batches some were left because there were too many,
            and `boundaries`, the tokens that were first over their bound there; `tokens`, how many are named;
            `by_step`, for each step `over`, `cut` and `stopped`, whether all its mini-batches were; `largest_tokens`,
            those furthest over their bounds, NaN first, each with `spike`, whether its mini-batch has one.
    """
    if not lines:
        return None
    signals = signals_of(lines)
    stopped = {key for key, of_one in signals.items() if _all_cut(of_one) and key not in spikes}
    found_in = [line["token_clip"] for line in lines]
    pairs = [(line, token) for line in lines for token in line["token_clip"]["tokens"]]
    largest = heapq.nlargest(top, pairs, key=lambda pair: severity(pair[1]["multiple"]))
    found = {
        "mini_batches": len(signals),
        "stopped": len(stopped),
        "with_spike": sum(key in spikes for key in signals),
        **{name: sum(of_one[name] for of_one in signals.values()) for name in ("over", "cut")},
        "refused": _by_boundary(boundary for found in found_in for boundary in dict.fromkeys(found["refused"])),
        "boundaries": _by_boundary(token["boundary"] for _, token in pairs),
        "tokens": len(pairs),
        "by_step": _by_step(signals, stopped),
        "largest_tokens": [
            rounded({**_row(line, token), "spike": mini_batch_of(line) in spikes}) for line, token in largest
        ],
    }
    title = "Tokens that TokenClip cut" if found["cut"] else "Tokens that TokenClip found"
    return {"title": title, "sentences": _sentences(found), **found}


def done_to(row: Mapping[str, Any]) -> str:
    """The action on a token's signal, in a word."""
    return _DONE.get(row["action"], "left") if row["cut"] else "left"


def beside_spike(signals: Signals | None) -> str | None:
    """TokenClip's result in a spike's mini-batch, as a sentence; None if it found nothing there."""
    if signals is None:
        return None
    over = f"{count(signals['over'], 'backward signal')} over {'its bound' if signals['over'] == 1 else 'their bounds'}"
    if not signals["cut"]:
        return f"TokenClip found {over} in this mini-batch, and cut none."
    cut = "all" if _all_cut(signals) else f"{signals['cut']:,}"
    cut = "it" if _all_cut(signals) and signals["over"] == 1 else f"{cut} of them"
    return f"TokenClip found {over} in this mini-batch, and cut {cut}: the spike is in what was left."


def _row(line: Mapping[str, Any], token: Mapping[str, Any]) -> dict[str, Any]:
    """A token as one row of a table."""
    fields = {name: token.get(name) for name in get_type_hints(ClippedToken)}
    return {
        **{name: line[name] for name in ("global_step", "epoch", "mini_batch")},
        "action": line["token_clip"]["action"],
        **{
            name: clipped(value, SHORT_CHARACTERS) if isinstance(value, str) else value
            for name, value in fields.items()
        },
        "context": clipped(token.get("context")),
    }


def _by_boundary(names: Iterable[Any]) -> dict[str, int]:
    return dict(Counter(str(clipped(name, SHORT_CHARACTERS)) for name in names).most_common())


def _by_step(signals: Mapping[MiniBatch, Signals], stopped: Collection[MiniBatch]) -> dict[int, dict[str, Any]]:
    steps: dict[int, dict[str, Any]] = {}
    for key, of_one in signals.items():
        if key[0] is not None:
            step = steps.setdefault(key[0], {"over": 0, "cut": 0, "stopped": True})
            step |= {name: step[name] + of_one[name] for name in ("over", "cut")}
            step["stopped"] &= key in stopped
    return dict(sorted(steps.items()))


def _sentences(found: Mapping[str, Any]) -> list[str]:
    steps = list(found["by_step"])
    where = "" if not steps else f" of step {steps[0]}" if len(steps) == 1 else f" of steps {steps[0]} to {steps[-1]}"
    over, bound = count(found["over"], "backward signal"), "its bound" if found["over"] == 1 else "their bounds"
    was = "was" if found["over"] == 1 else "were"
    cut = "none was cut" if not found["cut"] else f"{found['cut']:,} {'was' if found['cut'] == 1 else 'were'} cut"
    texts = [
        f"In {count(found['mini_batches'], 'mini-batch', 'mini-batches')}{where}, {over} {was} over {bound}: {cut}."
    ]
    if found["stopped"]:
        stopped = count(found["stopped"], "mini-batch was", "mini-batches were")
        texts.append(f"{stopped} stopped: all such signals were cut, and no spike is recorded.")
    if found["with_spike"]:
        texts.append(f"{count(found['with_spike'], 'mini-batch has', 'mini-batches have')} a gradient spike as well.")
    if found["refused"]:
        refused = ", ".join(f"{boundary} ({times})" for boundary, times in [*found["refused"].items()][:_NAMED])
        refused += ", …" * (len(found["refused"]) > _NAMED)
        texts.append(f"More than max_share, so that some were left as they are, in mini-batches: {refused}.")
    return texts
