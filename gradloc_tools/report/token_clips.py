# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What TokenClip found: totals of all clip lines, the tokens furthest over their bounds, and the same in words."""

import heapq
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradloc.evidence.clips import DONE

from .condensed import clipped
from .drills import MiniBatch, mini_batch_of
from .figures import count, rounded, severity
from .totals import count_bounded

# At most so many different boundaries are told apart.
_BOUNDARIES = 1024
_SHORT_CHARACTERS = 200
# At most so many boundaries are named in a sentence.
_NAMED = 8

_TOKEN_FIELDS = (
    "rank micro_batch row position multiple cut token_id weight advantage log_prob old_log_prob rollout_log_prob reward"
).split()
_SHORT_TEXTS = ("boundary", "token", "data_source", "uid")

# How the table's tokens are to be read.
EXPLANATION = (
    "At the log-probs a position's signal is its own token's; below, the losses of later tokens reach earlier "
    "positions through attention as well."
)


@dataclass(slots=True)
class Signals:
    """How many backward signals (tokens × boundaries) were over their bounds, and how many of these were cut."""

    over: int = 0
    cut: int = 0

    @property
    def all_cut(self) -> bool:
        return 0 < self.over <= self.cut


@dataclass
class TokenClips:
    """Sums over clip lines, and some of their tokens.

    Attributes:
        lines (int): How many there are.
        mini_batches (dict): The signals of each mini-batch.
        refused (Counter): By boundary, in how many mini-batches some were left because there were too many.
        boundaries (Counter): The tokens, kept or not, by the boundary where they were first over their bound.
        tokens (list): Those that are furthest over their bounds, condensed; a heap.
        tokens_in_all (int): How many tokens the lines name.
    """

    lines: int = 0
    mini_batches: dict[MiniBatch, Signals] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    boundaries: Counter[str] = field(default_factory=Counter)
    tokens: list[tuple[float, int, dict[str, Any]]] = field(default_factory=list)
    tokens_in_all: int = 0

    def add(self, line: Mapping[str, Any], most: int) -> set[int | None]:
        """Adds a clip line; returns the steps of tokens that are now left out, as only `most` are kept."""
        found = line["token_clip"]
        self.lines += 1
        signals = self.mini_batches.setdefault(mini_batch_of(line), Signals())
        signals.over += sum(found["over"].values())
        signals.cut += sum(found["cut"].values())
        for boundary in dict.fromkeys(found["refused"]):
            count_bounded(self.refused, str(clipped(boundary, _SHORT_CHARACTERS)), _BOUNDARIES)
        left_out = set()
        for token in found["tokens"]:
            row = _row(line, token)
            count_bounded(self.boundaries, row["boundary"], _BOUNDARIES)
            self.tokens_in_all += 1
            heapq.heappush(self.tokens, (severity(token["multiple"]), -self.tokens_in_all, row))
            if len(self.tokens) > most:
                left_out.add(heapq.heappop(self.tokens)[-1]["global_step"])
        return left_out

    @property
    def over(self) -> int:
        return sum(signals.over for signals in self.mini_batches.values())

    @property
    def cut(self) -> int:
        return sum(signals.cut for signals in self.mini_batches.values())

    def beside(self, event: Mapping[str, Any]) -> str | None:
        """What is said of TokenClip beside a spike; None if it found nothing in its mini-batch."""
        signals = self.mini_batches.get(mini_batch_of(event))
        return None if signals is None or event["global_step"] is None else _beside_spike(signals)

    def stopped(self, spikes: Collection[MiniBatch]) -> set[MiniBatch]:
        """The mini-batches of which every signal over its bound was cut, and that have no spike nevertheless."""
        return {key for key, signals in self.mini_batches.items() if signals.all_cut and key not in spikes}

    def largest(self, most: int, spikes: Collection[MiniBatch]) -> list[dict[str, Any]]:
        """The tokens furthest over their bounds, NaN first; `spike` says whether their mini-batch has a spike."""
        return [
            rounded({**row, "spike": mini_batch_of(row) in spikes}) for *_, row in heapq.nlargest(most, self.tokens)
        ]


def summarize_clips(clips: TokenClips, spikes: Collection[MiniBatch], top: int) -> dict[str, Any] | None:
    """What TokenClip found, ready for `jsonable`; None without a clip line.

    Args:
        clips (TokenClips): What was read.
        spikes (Collection): The mini-batches with a spike.
        top (int): How many of the largest tokens are listed.

    Returns:
        dict: `title` and `sentences`; `mini_batches`, how many had a signal over its bound, `stopped`, in how many of
            these all were cut and left no spike, `with_spike`, how many of them have a spike; `over` and `cut`, how
            many signals; `refused` and `boundaries` as in `TokenClips`; `tokens`, how many are named; `by_step`, for
            each step `over`, `cut` and `stopped`, whether all its mini-batches were; `largest_tokens`.
    """
    if not clips.lines:
        return None
    stopped = clips.stopped(spikes)
    found = {
        "mini_batches": len(clips.mini_batches),
        "stopped": len(stopped),
        "with_spike": sum(key in spikes for key in clips.mini_batches),
        "over": clips.over,
        "cut": clips.cut,
        "refused": dict(clips.refused.most_common()),
        "boundaries": dict(clips.boundaries.most_common()),
        "tokens": clips.tokens_in_all,
        "by_step": _by_step(clips, stopped),
        "largest_tokens": clips.largest(top, spikes),
    }
    title = "Tokens that TokenClip cut" if clips.cut else "Tokens that TokenClip found"
    return {"title": title, "sentences": _sentences(found), **found}


def done_to(row: Mapping[str, Any]) -> str:
    """What became of a token's signal, in a word."""
    return DONE.get(row["action"], "left") if row["cut"] else "left"


def clipped_token_name(row: Mapping[str, Any]) -> str:
    """The token's text, or its id where that is not known; of the prompt's tokens, neither is."""
    if row["token"] is not None:
        return str(row["token"])
    if row["token_id"] is not None:
        return f"id {row['token_id']}"
    return "(prompt)" if row["position"] < 0 else "(unknown)"


def _beside_spike(signals: Signals) -> str:
    """What is said of a spike in whose mini-batch TokenClip found tokens."""
    over = f"{count(signals.over, 'backward signal')} over {'its bound' if signals.over == 1 else 'their bounds'}"
    if not signals.cut:
        return f"TokenClip found {over} in this mini-batch, and cut none."
    cut = "all" if signals.all_cut else f"{signals.cut:,}"
    cut = "it" if signals.all_cut and signals.over == 1 else f"{cut} of them"
    return f"TokenClip found {over} in this mini-batch, and cut {cut}: the spike is in what was left."


def _row(line: Mapping[str, Any], token: Mapping[str, Any]) -> dict[str, Any]:
    """A token as one row of a table."""
    return {
        **{name: line[name] for name in ("global_step", "epoch", "mini_batch")},
        "action": line["token_clip"]["action"],
        **{name: token.get(name) for name in _TOKEN_FIELDS},
        **{name: clipped(token.get(name), _SHORT_CHARACTERS) for name in _SHORT_TEXTS},
        "context": clipped(token.get("context")),
    }


def _by_step(clips: TokenClips, stopped: Collection[MiniBatch]) -> dict[int, dict[str, Any]]:
    steps: dict[int, dict[str, Any]] = {}
    for key, signals in clips.mini_batches.items():
        if key[0] is not None:
            step = steps.setdefault(key[0], {"over": 0, "cut": 0, "stopped": True})
            step["over"] += signals.over
            step["cut"] += signals.cut
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
