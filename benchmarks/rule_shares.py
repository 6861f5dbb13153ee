# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""How often each rule of `source` holds in the mini-batches of an actor: for ordinary tokens, and for culprits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl.utils.gradloc import Located
from verl.utils.gradloc.evidence import sources
from verl.utils.gradloc.evidence.medians import token_medians
from verl.utils.gradloc.evidence.ordinary import HOLDS, ordinary_shares
from verl.utils.gradloc.evidence.sources import RULES
from verl.utils.gradloc.evidence.verdict import COMMON
from verl.utils.gradloc.measure.token_weights import movable

# By rule, its limits.
LIMITS = {
    "misaligned": f"over {sources.MISALIGNED_FRACTION:.0%} of the response off by 1 nat",
    "unsampled": f"p under {sources.UNSAMPLED:g} where the rollout had 1",
    "token": f"ratio over {sources.TOKEN_RATIO:g}, or under 1/{sources.TOKEN_RATIO:g}",
    "sequence": f"mean ratio over {sources.SEQUENCE_RATIO:g}, or under 1/{sources.SEQUENCE_RATIO:g}",
    "advantage": f"over {sources.LARGE_ADVANTAGE:g} medians",
    "weight": f"over {sources.LARGE_WEIGHT:g} medians",
    "unlikely": f"p under {sources.UNLIKELY:g}",
    "punished": f"negative advantage, p over {sources.CONFIDENT:g}",
    "layer": f"over {sources.LAYER_FRACTION:.0%} of the squared norm in a layer",
}

NO_EVENT = {"verdict": None, "culprits": None, "norms": None, "layer_odds": None}

MiniBatch = Mapping[str, Any]


class RuleShares:
    """Looks at every mini-batch of an actor on one rank, before the optimizer step.

    Args:
        actor (DataParallelPPOActor): The actor, with GradLoc on.

    Attributes:
        found (list[dict]): For each mini-batch with a token that can move: `ordinary`, the share of ordinary tokens by
            rule (None where unknown), `tokens`, their number, and if there is an event, its `verdict`, `culprits`, the
            sources of each, `norms`, theirs in thresholds, and `layer_odds`, by how much the odds of each one's largest
            layer are over those in an ordinary token (None where unknown).
    """

    def __init__(self, actor: Any) -> None:
        self.found: list[dict[str, Any]] = []
        self._gradloc = actor.gradloc
        self._locate = actor.gradloc.locate
        actor.gradloc.locate = self._look

    def _look(self, epoch: int, mini_batch: int) -> Located:
        micro_batches, before = list(self._gradloc._recorder.micro_batches), len(self._gradloc.events)
        located = self._locate(epoch, mini_batch)
        events = self._gradloc.events[before:]
        culprits = [culprit for event in events for culprit in event["culprits"]]
        # A row's place in its micro-batch, by its place in the mini-batch.
        places = {(index, row): at for index, micro in enumerate(micro_batches) for at, row in enumerate(micro.rows)}
        own = {(c["micro_batch"], places[c["micro_batch"], c["row"]], c["position"]) for c in culprits}
        tokens = sum(int(_moving(micro.portable(1.0, inputs=False).tokens)) for micro in micro_batches) - len(own)
        if tokens:
            shares = ordinary_shares(micro_batches, own, token_medians(micro_batches))
            self.found.append({"tokens": tokens, "ordinary": shares} | (_of_event(*events) if events else NO_EVENT))
        return located


def _of_event(event: Mapping[str, Any]) -> dict[str, Any]:
    usual, culprits = event["ordinary_layer_norms"], event["culprits"]
    return {
        "verdict": event["verdict"]["cause"] or "no known cause",
        "culprits": [culprit["sources"] for culprit in culprits],
        "norms": [culprit["grad_norm"] / culprit["threshold"] for culprit in culprits],
        "layer_odds": [_odds_of_largest(culprit["layer_norms"], usual) for culprit in culprits] if usual else None,
    }


def _odds_of_largest(norms: Mapping[str, float], usual: Mapping[str, float]) -> float:
    largest = max(norms, key=norms.__getitem__)

    def odds(of: Mapping[str, float]) -> float:
        others = math.fsum(norm**2 for name, norm in of.items() if name != largest)
        return of[largest] ** 2 / others if others else math.inf

    return odds(norms) / odds(usual)


def _moving(tokens: Mapping[str, Any]) -> Any:
    return (tokens["response_mask"].bool() & movable(tokens)).sum()


def print_null(runs: Mapping[str, Sequence[MiniBatch]]) -> None:
    """The null distribution: a table of how often each rule holds for ordinary tokens.

    A cell is "share of all ordinary tokens of the runs · share in the mini-batch where it is largest [number of
    mini-batches in which it is too large for a cause]".

    Args:
        runs (Mapping): By the name of a kind of run, its mini-batches.
    """
    print(f"| rule | limits | {' | '.join(runs)} |\n|---|---|{'---|' * len(runs)}")
    for name in HOLDS:
        cells = [null_cell(name, found) for found in runs.values()]
        print(f"| `{name}` | {LIMITS.get(name, '–')} | {' | '.join(cells)} |")
    counts = [f"{sum(one['tokens'] for one in found):,} in {len(found)}" for found in runs.values()]
    print(f"| ordinary tokens, in mini-batches | | {' | '.join(counts)} |\n")


def null_cell(name: str, found: Iterable[MiniBatch]) -> str:
    known = [(one["ordinary"][name], one["tokens"]) for one in found if one["ordinary"][name] is not None]
    if not known:
        return "–"
    pooled = math.fsum(share * tokens for share, tokens in known) / sum(tokens for _, tokens in known)
    common = sum(share >= COMMON for share, _ in known)
    return f"{percent(pooled)} · {percent(max(share for share, _ in known))}" + (f" [{common}]" if common else "")


def culprit_shares(found: Sequence[MiniBatch]) -> dict[str, tuple[float, float | None]]:
    """By rule that holds for a culprit, the shares of culprits and of the ordinary tokens beside them, over events."""
    of_events = [one for one in found if one["culprits"]]
    culprits = [names for one in of_events for names in one["culprits"]]
    shares: dict[str, tuple[float, float | None]] = {}
    for rule in RULES:
        holding = sum(rule.name in names for names in culprits)
        if holding:
            known = [(one["ordinary"][rule.name], one["tokens"]) for one in of_events]
            beside = None
            if all(share is not None for share, _ in known):
                beside = math.fsum(share * tokens for share, tokens in known) / sum(tokens for _, tokens in known)
            shares[rule.name] = holding / len(culprits), beside
    return shares


def percent(share: float | None) -> str:
    return "–" if share is None else "0%" if share == 0 else f"{share:.2%}" if share < 0.01 else f"{share:.0%}"
