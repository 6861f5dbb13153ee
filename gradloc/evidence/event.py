# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""An event: the findings of an investigation as plain values."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from ..fsdp import collectives
from ..measure.figures import suspects
from ..measure.micro_batch import MicroBatchName
from ..measure.mini_batch import OrdinaryGradient
from ..search.groups import Token
from ..search.investigation import Investigation
from .culprits import Facts, token_facts_of
from .ordinary import ordinary_shares, token_medians
from .sources import RULES, Medians, classify, has_large_advantage
from .verdict import whole_event

# How many of the largest tokens an event lists for a spike without a culprit.
_LARGEST_TOKENS = 3
# Of how many tokens measured under τ the sources are counted, at most and at least.
_MEASURED, _LEAST_MEASURED = 64, 4
# So many times the usual norm, of the typical micro-batch, is no matter of single tokens.
_LOUDER = 2.0


def build_event(
    investigation: Investigation,
    ordinary: OrdinaryGradient,
    where: Mapping[str, Any],
    action: str,
    applied: bool,
    started: float,
    warnings: Sequence[Mapping[str, str]] = (),
    medians: Medians | None = None,
    error: str | None = None,
) -> dict[str, Any]:
    """The event of a search, the same on every rank. A collective call.

    Args:
        investigation (Investigation): The search, after its end.
        ordinary (OrdinaryGradient): What an earlier mini-batch says of ordinary tokens.
        where (Mapping): `global_step`, `epoch`, `mini_batch` and `steps_since_resume`.
        action (str): `spike_action`.
        applied (bool): Whether it was applied.
        started (float): What `time.perf_counter` gave when the search began.
        warnings (Sequence[Mapping]): What `RunChecks.warnings` returned.
        medians (Mapping, optional): What `token_medians` gave in training; by default, that of this mini-batch.
        error (str, optional): What prevented the action.
    """
    mini_batch = investigation.mini_batch
    model = mini_batch.model
    facts = token_facts_of(investigation, investigation.culprits)
    if medians is None:
        medians = token_medians(mini_batch.micro_batches, model.sequence_parallel_size)
    ordinary_tokens = ordinary_shares(
        mini_batch.micro_batches,
        {(index, row, position) for (rank, index), row, position in facts if rank == model.rank},
        {**medians, "least_advantage": _least_advantage(facts, medians)},
        mini_batch.scale,
        model.sequence_parallel_size,
    )
    measured = _measured_shares(investigation, medians)
    ordinary_before = ordinary.layer_norms(model)
    clocks = collectives.gather_objects((time.perf_counter() - started, datetime.now(timezone.utc).isoformat()))
    with collectives.raised_on_all_ranks(model.device):
        fields = {
            "time": clocks[0][1],
            **where,
            "passes": investigation.passes.count,
            "action": action,
            "applied": applied,
            "trigger": _trigger(investigation),
            "threshold": investigation.threshold,
            "global_norm": mini_batch.global_norm(),
            "global_threshold": mini_batch.global_threshold(investigation.threshold),
            **_findings(investigation, facts, medians, ordinary_before),
            "broken_parameters": mini_batch.broken_parameters,
            "error": investigation.error or error,
            "suspected": [],
            "budget": investigation.config.bisect_budget_steps,
            "budget_seconds": investigation.time_limit.seconds,
            "out_of_time": investigation.out_of_time,
            "seconds": max(seconds for seconds, _ in clocks),
            "search": model.meter.kind,
            "world_size": model.data_parallel_size,
            "loss_scale": mini_batch.scale,
        }
        return whole_event(fields, ordinary_tokens, warnings, measured, _why_unusual(investigation, ordinary))


def _why_unusual(investigation: Investigation, ordinary: OrdinaryGradient) -> str | None:
    """Why the run is not as it usually is; None if it is, or if that is not known."""
    if ordinary.spikes_are_rare is None:
        return "too little of the run is known to call this a natural spike"
    if not ordinary.spikes_are_rare:
        return "other mini-batches shortly before had spikes, too, so that the cause is not in this one alone"
    norms = [each.token_equivalent for each in investigation.figures.values() if each.norm and each.has_advantages]
    usual = ordinary.token_norm
    if usual and norms and statistics.median(norms) > _LOUDER * usual:
        return "the other micro-batches are louder than before, too"
    return None


def _measured_shares(investigation: Investigation, medians: Medians) -> dict[str, float] | None:
    """By rule, the share of tokens that were measured under τ; None of too few. A collective call.

    They were picked by suspicion like the culprits: what is as frequent among them makes no norm large.
    """
    culprits = set(investigation.culprits)
    under = [token for token in sorted(investigation.measured) if token not in culprits][:_MEASURED]
    if len(under) < _LEAST_MEASURED:
        return None
    facts = token_facts_of(investigation, under)
    sources = [
        classify(
            {
                **facts[token],
                "grad_norm": _grad_norm(investigation, token),
                "layer_norms": _layer_norms(investigation, token),
            },
            medians,
        )
        for token in under
    ]
    return {rule.name: sum(rule.name in each for each in sources) / len(under) for rule in RULES}


def _least_advantage(facts: Mapping[Token, Facts], medians: Medians) -> float | None:
    """The smallest |A| of the culprits for which the rule `advantage` holds; None without any.

    With rewards that are rarely right, many ordinary tokens have a multiple of the median as well; what makes an
    advantage the cause is that theirs are not as large.
    """
    large = (each["advantage"] for each in facts.values() if has_large_advantage(each, medians))
    return min(map(abs, large), default=None)


def _trigger(investigation: Investigation) -> dict[str, Any]:
    """What started the search."""
    mini_batch, threshold = investigation.mini_batch, investigation.threshold
    norm: float | None
    if mini_batch.trigger == "global":
        norm, limit = mini_batch.global_norm(), mini_batch.global_threshold(threshold)
    else:
        worst = max(investigation.figures.values(), key=lambda each: each.token_equivalent)
        norm, limit = worst.norm, threshold * worst.root_square_weight
    return {"kind": mini_batch.trigger, "norm": norm, "threshold": limit}


def _findings(
    investigation: Investigation,
    facts: Mapping[Token, Facts],
    medians: Medians,
    ordinary_before: Mapping[str, float] | None,
) -> dict[str, Any]:
    """The fields that hold the findings; `ordinary_before` are layer norms of an ordinary token before this step."""
    return {
        "until": investigation.config.bisect_until,
        "diagnosis": _diagnosis(investigation),
        "explained": investigation.explained,
        "more_tokens": investigation.search.more_over(),
        # Where all responses to a prompt got the same reward, there is none.
        "micro_batches": sum(each.tokens > 0 and each.norm != 0 for each in investigation.figures.values()),
        "units": [
            _micro_batch(investigation, name) for name in suspects(investigation.figures, investigation.threshold)
        ],
        "culprits": sorted(
            (_culprit(investigation, token, facts[token], medians) for token in investigation.culprits),
            key=lambda culprit: -_finite(culprit["grad_norm"]),
        ),
        "diffuse": _diffuse(investigation),
        "without_tokens": _without_tokens(investigation),
        "complete": investigation.complete,
        "open_segments": _open_segments(investigation),
        "ordinary_layer_norms": _ordinary_layer_norms(investigation) or ordinary_before,
        **medians,
    }


def _diagnosis(investigation: Investigation) -> str:
    """What the search has shown; docs/reference/evidence.md gives the rules."""
    if investigation.everything_broken:
        return "nonfinite"
    if investigation.culprits and investigation.config.bisect_until == "explained":
        return "incomplete" if not investigation.ended else "diffuse" if investigation.left else "tokens"
    if investigation.culprits:
        return "tokens"
    if investigation.overflow:
        return "overflow"
    if investigation.broken:
        return "nonfinite"
    return "diffuse" if investigation.ended else "incomplete"


def _micro_batch(investigation: Investigation, name: MicroBatchName) -> dict[str, Any]:
    """A micro-batch over its threshold."""
    micro_batch, search = investigation.figures[name], investigation.search
    rest = search.rest(name) if search.knows(name) else None
    return {
        "rank": name[0],
        "micro_batch": name[1],
        "rows": micro_batch.rows,
        "tokens": micro_batch.tokens,
        "broken_tokens": micro_batch.broken_tokens,
        "norm": micro_batch.norm,
        "threshold": investigation.threshold * micro_batch.root_square_weight,
        "token_equivalent": micro_batch.token_equivalent,
        "layer_norms": micro_batch.layer_norms,
        "rest": rest and {"tokens": len(rest[0].candidates), "norm": rest[1], "threshold": search.threshold(rest[0])},
    }


def _ordinary_layer_norms(investigation: Investigation) -> dict[str, float] | None:
    """Each layer's norm for one ordinary token: the median norm/sqrt(Σw²) of micro-batches under their thresholds.

    A suspect's norm minus its culprits' norms is not used. If a culprit outweighs its micro-batch, that difference is
    smaller than the rounding error and the effect of the correlation between the two.

    Returns:
        dict: By layer; None if no micro-batch under its threshold has advantages and a known, nonzero norm.
    """
    ordinary = [
        each
        for each in investigation.figures.values()
        if each.norm and each.root_square_weight and each.has_advantages and not each.is_over(investigation.threshold)
    ]
    if not ordinary:
        return None
    return {
        layer: statistics.median(each.layer_norms[layer] / each.root_square_weight for each in ordinary)
        for layer in ordinary[0].layer_norms
    }


def _diffuse(investigation: Investigation) -> list[dict[str, Any]]:
    """The smallest token sets with a spike that no small set of tokens explains, with the largest tokens measured."""
    found = []
    for token_set, norm in investigation.search.diffuse:
        names = set(investigation.groups.members[token_set.group])
        here = investigation.groups.tokens_of(token_set)
        ranks = {name[0] for name, _, _ in here}
        # Of the whole micro-batch, because this set may be the micro-batch without its largest tokens.
        tokens = sorted(
            (t for t in investigation.measured if t[0] in names), key=lambda t: -_finite(_grad_norm(investigation, t))
        )
        found.append(
            {
                "rank": ranks.pop() if len(ranks) == 1 else None,
                "micro_batch": token_set.group[1],
                "rows": sorted({investigation.groups.micro_batches[name].rows[row] for name, row, _ in here}),
                "tokens": len(token_set.candidates),
                "norm": norm,
                "threshold": investigation.search.threshold(token_set),
                "largest_tokens": [
                    {
                        "row": investigation.groups.micro_batches[token[0]].rows[token[1]],
                        "position": token[2],
                        "grad_norm": _grad_norm(investigation, token),
                        "share": _share(investigation, token),
                    }
                    for token in tokens[:_LARGEST_TOKENS]
                ],
            }
        )
    return found


def _without_tokens(investigation: Investigation) -> dict[str, Any] | None:
    """What is left of a gradient with all coefficients zero; None if it was not measured."""
    found = investigation.without_tokens
    if found is None:
        return None
    return {
        "rank": found.group[0],
        "micro_batch": found.group[1],
        "norm": found.norm,
        "share": found.norm / found.whole,
        "layer_norms": found.layer_norms,
    }


def _open_segments(investigation: Investigation) -> list[dict[str, Any]]:
    """The token sets that the search left open, best first; a group not yet searched is one of all its tokens."""
    search, figures = investigation.search, investigation.figures
    begun = [
        (token_set.group, len(token_set.candidates), search.threshold(token_set))
        for token_set in (*search.open_sets, *search.given_up)
        if token_set.candidates
    ]
    waiting = [
        (
            group,
            sum(figures[name].tokens for name in investigation.groups.members[group]),
            investigation.threshold
            * math.hypot(*(figures[name].root_square_weight for name in investigation.groups.members[group])),
        )
        for group in investigation.waiting
    ]
    return [
        {"rank": rank, "micro_batch": index, "tokens": tokens, "threshold": threshold}
        for (rank, index), tokens, threshold in begun + waiting
    ]


def _culprit(investigation: Investigation, token: Token, facts: Facts, medians: Medians) -> dict[str, Any]:
    name, row, position = token
    micro_batch = investigation.groups.micro_batches[name]
    found = {
        "rank": name[0],
        "micro_batch": name[1],
        "row": micro_batch.rows[row],
        "position": position,
        "grad_norm": _grad_norm(investigation, token),
        "threshold": investigation.threshold,
        "share": _share(investigation, token),
        **facts,
        "layer_norms": _layer_norms(investigation, token),
    }
    sources = classify(found, medians)
    return {**found, "source": sources[0], "sources": sources}


def _layer_norms(investigation: Investigation, token: Token) -> dict[str, float]:
    """‖g_t‖ by layer; NaN if it was not measured."""
    norms = [math.nan] * len(investigation.layers)
    if token in investigation.measured:
        norms = [norm / _weight(investigation, token) for norm in investigation.measured[token]]
    return dict(zip(investigation.layers, norms, strict=True))


def _weight(investigation: Investigation, token: Token) -> float:
    name, row, position = token
    return abs(float(investigation.groups.micro_batches[name].tokens["weight"][row, position]))


def _grad_norm(investigation: Investigation, token: Token) -> float:
    """‖g_t‖; NaN if it was not measured."""
    if token not in investigation.measured:
        return math.nan
    return math.sqrt(sum(norm**2 for norm in investigation.measured[token])) / _weight(investigation, token)


def _share(investigation: Investigation, token: Token) -> float | None:
    """A token's share of its micro-batch's norm; None if that norm is zero or unknown."""
    norm = investigation.figures[token[0]].norm
    return _grad_norm(investigation, token) * _weight(investigation, token) / norm if norm else None


def _finite(norm: float) -> float:
    """The norm as a sort key: NaN and infinities count as infinite."""
    return norm if math.isfinite(norm) else math.inf
