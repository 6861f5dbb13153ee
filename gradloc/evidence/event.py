# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""An event as plain values: the findings of a search, or a converted spike."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import lines
from ..fsdp import collectives
from ..judging import asked
from ..measure.micro_batch import AllFigures, MicroBatch, MicroBatchName, Token, movable, suspects
from ..measure.mini_batch import MiniBatch, OrdinaryGradient
from ..search.findings import Findings, Part
from ..sources import Medians, classify, has_large_advantage
from ..threshold import largest_first, threshold_factor
from ..version import __version__
from .ordinary import largest_tokens, ordinary_counts, ordinary_shares, token_medians
from .token_facts import response_kl, response_window, token_evidence, token_facts
from .writer import CULPRITS_WITH_TEXT, now


def token_facts_of(mini_batch: MiniBatch, tokens: Sequence[Token]) -> dict[Token, lines.Facts]:
    """The facts about some tokens of a mini-batch; both the same on every rank. A collective call.

    Of all but the first 16, those about other tokens of the response are left out, as in the file.

    Raises:
        RankFailedError: A rank could not tell of its tokens.
    """
    by_rank: dict[int, list[Token]] = {}
    for token in tokens:
        by_rank.setdefault(token[0][0], []).append(token)
    found: dict[Token, lines.Facts] = {}
    for rank, of_rank in by_rank.items():
        # Not an all-gather, which would pad what each rank sends to the longest.
        sender = rank * mini_batch.model.sequence_parallel_size
        found |= collectives.broadcast(partial(_own_facts, mini_batch, of_rank, tokens[:CULPRITS_WITH_TEXT]), sender)
    return found


def _own_facts(
    mini_batch: MiniBatch, tokens: Sequence[Token], with_response: Sequence[Token]
) -> dict[Token, lines.Facts]:
    found: dict[Token, lines.Facts] = {}
    for index in {index for (_, index), _, _ in tokens}:
        columns = mini_batch.micro_batches[index].portable(mini_batch.scale, inputs=False).tokens
        of_all = token_facts(columns)
        for token in tokens:
            if token[0][1] == index:
                found[token] = _facts(columns, of_all, *token[1:], token in with_response)
    return found


# How many of the largest tokens an event lists for a spike without a culprit.
_LARGEST_TOKENS = 3
# How many micro-batches over their thresholds an event lists, how many norms by layer of them, and how many diffuse
# parts: a thousand events of many ranks and layers are to have room in a file.
_UNITS, _UNIT_LAYERS, _DIFFUSE = 64, 400, 16
# How many suspected tokens an event lists.
SUSPECTED = 16


class Done(NamedTuple):
    """The result of `spike_action`; the same on every rank."""

    applied: bool
    squared_norms: Tensor | None = None  # by layer, of the gradient that is left
    passes: int = 0  # how many it took
    error: str | None = None  # what prevented it


def build_event(
    mini_batch: MiniBatch,
    findings: Findings,
    ordinary: OrdinaryGradient,
    where: lines.Where,
    action: str,
    done: Done,
    started: float,
    steps_since_resume: int | None = None,
    answer: Callable[[], lines.Answer | None] = lambda: None,
    medians: Medians | None = None,
    layer_clip: dict[str, lines.ClippedLayer] | None = None,
    drill: lines.Drill | None = None,
    keep: Callable[[lines.Event], str | None] = lambda event: None,
) -> lines.Event:
    """The event of a search, on every rank, for `judged`. A collective call.

    Args:
        mini_batch (MiniBatch): The gradient with the spike.
        ordinary (OrdinaryGradient): What an earlier mini-batch says of ordinary tokens.
        where (Where): The mini-batch.
        started (float): What `time.perf_counter` gave when the search began.
        steps_since_resume (int, optional): See `RunFacts.steps_since_resume`.
        answer (Callable): Returns what `RunFacts.answer` does.
        medians (Mapping, optional): What `token_medians` gave in training; by default, that of this mini-batch.
        layer_clip (dict, optional): What `LayerClip.preview` gives, the same on every rank.
        drill (Drill, optional): What was planted, if it was.
        keep (Callable): Keeps the event's bundle, and returns its folder; called on every rank.
    """
    model = mini_batch.model
    culprits = _largest_culprits(findings)
    facts = token_facts_of(mini_batch, culprits)
    if medians is None:
        medians = token_medians(mini_batch.micro_batches, model.device, model.sequence_parallel_size)
    # With rewards that are rarely right, many ordinary tokens have a multiple of the median as well; what makes an
    # advantage the cause is that theirs are not as large.
    large = [abs(of["advantage"] or 0.0) for token in culprits if has_large_advantage(of := facts[token], medians)]
    least = {**medians, "least_advantage": min(large, default=None)}
    places = {(name[1], row, position) for name, row, position in culprits if name[0] == model.rank}

    def own() -> tuple[Tensor, Tensor | None, float]:
        counts = ordinary_counts(mini_batch.micro_batches, places, least, mini_batch.scale)
        return counts, ordinary.own_sums(), time.perf_counter() - started

    of_run = answer()
    counts, sums, seconds = zip(*collectives.exchange(own)[:: model.sequence_parallel_size], strict=True)
    with collectives.raised_on_all_ranks(model.device):
        event: lines.Event = {
            **_begun(mini_batch.scale, model.data_parallel_size, findings, medians, where, done),
            "action": action,
            "applied": done.applied,
            "seconds": max(seconds),
            # Micro-batches whose advantages are all zero have no gradient and do not count.
            "micro_batches": sum(each.tokens > 0 and each.norm != 0 for each in findings.figures.values()),
            "culprits": [_culprit(findings, token, facts[token], medians, i) for i, token in enumerate(culprits)],
            "suspected": [],
            "trigger": _trigger(mini_batch, findings),
            "global_norm": mini_batch.global_norm(),
            "global_threshold": mini_batch.global_threshold(findings.threshold),
            "ordinary_layer_norms": _ordinary_layer_norms(findings) or ordinary.layer_norms(sums, model.meter.layers),
            "broken_parameters": mini_batch.broken_parameters,
            "search": "reduced" if model.meter.reduces else "local",
            "comparison": {"ordinary": ordinary_shares(counts)},
            "identities": {} if of_run is None else of_run["identities"],
            "warnings": [] if of_run is None else of_run["warnings"],
            "steps_since_resume": steps_since_resume,
            "layer_clip": layer_clip,
            "drill": drill,
        }
    return {**event, "replay": keep(event)}


def converted_event(
    micro_batches: Mapping[MicroBatchName, MicroBatch],
    *,
    where: lines.Where,
    threshold: float,
    global_norm: float,
    global_threshold: float,
    world_size: int,
    answer: Callable[[], lines.Answer | None] = lambda: None,
) -> lines.Event:
    """The event of a spike of which the tokens' figures are known, and nothing was measured. In one process.

    Args:
        micro_batches (Mapping): All of them, as `MicroBatch.portable` gives them.
        where (Where): The mini-batch.
        threshold (float): τ.
        global_norm (float): The norm of the reduced gradient; NaN if it is not known.
        world_size (int): The number of data-parallel ranks.
        answer (Callable): Returns which identities hold, as far as what was recorded tells.
    """
    medians = token_medians(list(micro_batches.values()))
    found = asked(answer, form=lines.Answer | None)
    return {
        **_begun(1.0, world_size, Findings(threshold), medians, where, Done(False)),
        "action": "log",
        "applied": False,
        "seconds": 0.0,
        "trigger": {"kind": "global", "norm": global_norm, "threshold": global_threshold},
        "global_norm": global_norm,
        "global_threshold": global_threshold,
        "ordinary_layer_norms": None,
        "search": "converted",
        "micro_batches": sum(bool(movable(each.tokens).any()) for each in micro_batches.values()),
        "culprits": [],
        "suspected": _suspected_tokens(micro_batches, medians),
        "suspected_ranks": sorted({rank for rank, _ in micro_batches}),
        "comparison": {"ordinary": {}},
        "identities": {} if found is None else found["identities"],
        "warnings": [] if found is None else found["warnings"],
        "steps_since_resume": None,
        "layer_clip": None,
        "drill": None,
    }


def _begun(
    loss_scale: float, world_size: int, findings: Findings, medians: Medians, where: lines.Where, done: Done
) -> lines.Begun:
    """The fields of an event that need the findings alone."""
    units, more_units = _units(findings)
    diffuse = sorted(findings.diffuse, key=_farthest_first)
    return {
        "schema": lines.SCHEMA,
        "gradloc_version": __version__,
        "time": now(),
        **where,
        "threshold": findings.threshold,
        "until": findings.until,
        "diagnosis": findings.diagnosis,
        "explained": findings.explained,
        "complete": findings.complete,
        "passes": findings.passes + done.passes,
        "budget": findings.budget,
        "budget_seconds": findings.budget_seconds,
        "out_of_time": findings.out_of_time,
        "error": findings.error or done.error,
        "more_tokens": findings.more_over,
        "units": units,
        "more_units": more_units,
        "diffuse": [_diffuse(findings, part) for part in diffuse[:_DIFFUSE]],
        "more_diffuse": len(diffuse[_DIFFUSE:]),
        "without_tokens": _without_tokens(findings),
        "open_segments": _open_segments(findings.open),
        "median_advantage": medians["median_advantage"],
        "median_weight": medians["median_weight"],
        "world_size": world_size,
        "loss_scale": loss_scale,
    }


def _trigger(mini_batch: MiniBatch, findings: Findings) -> lines.Trigger:
    """The norm and the threshold that started the search."""
    if mini_batch.trigger == "global":
        norm, limit = mini_batch.global_norm(), mini_batch.global_threshold(findings.threshold)
    else:
        worst = max(findings.figures.values(), key=lambda each: each.token_equivalent)
        norm, limit = _or_nan(worst.norm), findings.threshold * worst.root_square_weight
    return {"kind": mini_batch.trigger, "norm": norm, "threshold": limit}


def micro_batch_over(figures: AllFigures, name: MicroBatchName, threshold: float) -> lines.MicroBatchRecord:
    """A micro-batch over its threshold."""
    rank, index = name
    of = figures[name]
    return {
        "rank": rank,
        "micro_batch": index,
        "rows": of.rows,
        "tokens": of.tokens,
        "norm": _or_nan(of.norm),
        "threshold": threshold * of.root_square_weight,
        "token_equivalent": of.token_equivalent,
        "layer_norms": of.layer_norms,
    }


def _units(findings: Findings) -> tuple[list[lines.Unit], int]:
    """The micro-batches over their thresholds, largest first, and how many are left out.

    Kept are the largest; the first with broken tokens, and the one that is farthest over its threshold without its
    culprits, which verdict and report look for; and those of the largest culprits, as in a bundle. The first of these
    have their norms by layer.
    """
    names, rests = suspects(findings.figures, findings.threshold), findings.rests
    kept = names[:1] + [name for name in names if findings.figures[name].broken_tokens][:1]
    kept += sorted((name for name in names if name in rests), key=lambda name: _farthest_first(rests[name]))[:1]
    over = set(names)
    kept += [token[0] for token in _largest_culprits(findings) if token[0] in over]
    kept = list(dict.fromkeys([*kept, *names]))[:_UNITS]
    listed, with_layers = set(kept), set(kept[: max(_UNIT_LAYERS // max(len(findings.layers), 1), 1)])
    units = [_unit(findings, name, name in with_layers) for name in names if name in listed]
    return units, len(names) - len(units)


def _largest_culprits(findings: Findings) -> list[Token]:
    """The largest first."""
    return sorted(findings.culprits, key=lambda token: largest_first(findings.alone(token).grad_norm))


def _farthest_first(part: Part) -> float:
    """A key that sorts sets by how far they are over their thresholds."""
    return largest_first(threshold_factor(_rest(part)))


def _unit(findings: Findings, name: MicroBatchName, with_layers: bool) -> lines.Unit:
    """A micro-batch over its threshold with what the search has found."""
    found, rest = micro_batch_over(findings.figures, name, findings.threshold), findings.rests.get(name)
    return {
        **found,
        "layer_norms": found["layer_norms"] if with_layers else {},
        "broken_tokens": findings.figures[name].broken_tokens,
        "rest": None if rest is None else _rest(rest),
    }


def _ordinary_layer_norms(findings: Findings) -> dict[str, float] | None:
    """Each layer's norm for one ordinary token: the median norm/sqrt(Σw²) of micro-batches under their thresholds.

    A suspect's norm minus its culprits' norms is not used. If a culprit outweighs its micro-batch, that difference is
    smaller than the rounding error and the effect of the correlation between the two.

    Returns:
        dict: By layer; None if no micro-batch under its threshold has advantages and a known, nonzero norm.
    """
    ordinary = [
        each
        for each in findings.figures.values()
        if each.norm and each.root_square_weight and each.has_advantages and not each.is_over(findings.threshold)
    ]
    if not ordinary:
        return None
    roots = torch.tensor([each.root_square_weight for each in ordinary], dtype=torch.float64)
    by_layer = torch.stack([each.by_layer for each in ordinary]).div_(roots.unsqueeze(1)).unbind(1)
    return {layer: statistics.median(of.tolist()) for layer, of in zip(ordinary[0].layers, by_layer, strict=True)}


def _rest(part: Part) -> lines.Rest:
    return {"tokens": part.tokens, "norm": _or_nan(part.norm), "threshold": part.threshold}


def _or_nan(norm: float | None) -> float:
    return math.nan if norm is None else norm


def _open(part: Part) -> lines.OpenPart:
    return {"rank": part.rank, "micro_batch": part.micro_batch, "tokens": part.tokens, "threshold": part.threshold}


def _open_segments(parts: Sequence[Part]) -> list[lines.OpenPart]:
    """The parts left open; too many of a micro-batch as one, with the threshold of all, and at last of all ranks."""
    for is_one in (False, True):
        if len(parts) > _UNITS:
            places: dict[tuple[int | None, int], list[Part]] = {}
            for part in parts:
                places.setdefault((None if is_one else part.rank, part.micro_batch), []).append(part)
            parts = [
                Part(*place, sum(each.tokens for each in of_place), math.hypot(*(each.threshold for each in of_place)))
                for place, of_place in places.items()
            ]
    return [_open(part) for part in parts]


def _diffuse(findings: Findings, part: Part) -> lines.DiffusePart:
    """A token set with a spike that no small set of tokens explains, with the largest tokens measured."""
    return {
        **_open(part),
        "norm": _or_nan(part.norm),
        "rows": list(part.rows),
        "largest_tokens": [
            {
                "row": findings.row(token),
                "position": token[2],
                "grad_norm": findings.measured[token].grad_norm,
                "share": findings.share(token),
            }
            for token in part.largest[:_LARGEST_TOKENS]
        ],
    }


def _without_tokens(findings: Findings) -> lines.WithoutTokens | None:
    """The gradient with all coefficients zero; None if it was not measured."""
    found = findings.without_tokens
    if found is None:
        return None
    return {
        "rank": found.group[0],
        "micro_batch": found.group[1],
        "norm": found.norm,
        "share": found.norm / found.whole,
        "layer_norms": found.layer_norms,
    }


def place_of(name: MicroBatchName, row: int, position: int) -> lines.Place:
    """The place of a token; its row counts in its rank's mini-batch."""
    return {"rank": name[0], "micro_batch": name[1], "row": row, "position": position}


def _culprit(findings: Findings, token: Token, facts: lines.Facts, medians: Medians, index: int) -> lines.Culprit:
    """A culprit; `index` is its place among them, of which the largest come first."""
    grad_norm, layer_norms = findings.alone(token).grad_norm, findings.layer_norms(token)
    sources = classify({**facts, "grad_norm": grad_norm, "layer_norms": layer_norms}, medians)
    return {
        **place_of(token[0], findings.row(token), token[2]),
        **facts,
        "grad_norm": grad_norm,
        "threshold": findings.threshold,
        "share": findings.share(token),
        "layer_norms": layer_norms if index < CULPRITS_WITH_TEXT else {},
        "source": sources[0],
        "sources": sources,
    }


def _suspected_tokens(
    micro_batches: Mapping[MicroBatchName, MicroBatch], medians: Medians
) -> list[lines.SuspectedToken]:
    """The tokens with the largest suspicion, largest first; one that is not finite counts as infinite."""
    suspicions = {
        name: torch.where(movable(each.tokens), each.tokens["suspicion"], -math.inf)
        for name, each in micro_batches.items()
    }
    largest = largest_tokens(suspicions, SUSPECTED)
    of_all = {name: token_facts(micro_batches[name].tokens) for name in {name for name, _, _ in largest}}
    found: list[lines.SuspectedToken] = []
    for name, row, position in largest:
        facts = _facts(micro_batches[name].tokens, of_all[name], row, position)
        # Suspicion is not finite where the log-prob or the coefficient is not, and then no gradient is. Of the layers
        # nothing is known.
        sources = classify({**facts, "grad_norm": facts["suspicion"], "layer_norms": {}}, medians)
        place = place_of(name, micro_batches[name].rows[row], position)
        found.append({**place, **facts, "source": sources[0], "sources": sources})
    return found


def _facts(
    tokens: Mapping[str, Tensor], of_all: Mapping[str, Tensor], row: int, position: int, with_response: bool = True
) -> lines.Facts:
    """The facts of a token (`of_all`: the `token_facts` of all), and of those around it in its response."""
    suspicion = tokens["suspicion"][row]
    found: Any = token_evidence(tokens, row, position, of_all)
    found["suspicion"] = float(suspicion[position])
    found |= {"response_suspicion": None, "response_kl": None}
    if with_response:
        found["response_suspicion"] = response_window(suspicion, tokens["response_mask"][row], position)
        found["response_kl"] = response_kl(tokens, row, position)
    return found
