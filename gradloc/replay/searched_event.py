# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The event of a spike after its bundle was searched: what training knew of it, with what the search found."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..bundles import limits
from ..evidence.writer import jsonable
from ..judge.said import said
from ..judge.sentences import describe
from ..lines import Begun
from ..tools.opening import Bundle, BundleError, check_places
from ..tools.reading import Evidence, read, spike_of
from ..tools.results import EVENT_SUFFIX
from ..tools.schema import EVENT, conforms, parse, read_plain_file
from .search import Searched

# Further fields that a recorded spike lacks.
_FOUND_FIRST = ("median_advantage", "median_weight", "ordinary_layer_norms")
# The fields that a search fills in: what an event has by its findings, but for what training alone knows.
_KNOWN_BEFORE = {"schema", "gradloc_version", "time", "threshold", "world_size", "loss_scale", *_FOUND_FIRST}
_FOUND = {"seconds", *Begun.__required_keys__, *Begun.__optional_keys__} - _KNOWN_BEFORE
# A verdict, and what it is judged by.
_JUDGED = ("verdict", "comparison", "identities", "warnings")
# The fields that an event has in common with its bundle's event.
_SAME = ("global_step", "epoch", "mini_batch", "loss_scale", "world_size")
# The fields that the trainer adds to a culprit: about the response, and about the token.
_OF_RESPONSE = ("prompt", "response", "ground_truth", "reward", "data_source", "uid")
_OF_TOKEN = ("token", "context", "response_tokens", "response_tokens_start")


def searched_event(
    base: Mapping[str, Any], found: Mapping[str, Any], bundle: Bundle, threshold: float, is_whole: bool
) -> dict[str, Any]:
    """The event after a search.

    What the bundle does not have stays as it was: the culprits of other micro-batches, if training has searched.

    Args:
        base (Mapping): The event so far: that of the bundle, or of the evidence, where it may have texts.
        found (Mapping): What `search` found.
        threshold (float): τ.
        is_whole (bool): Whether the bundle has every micro-batch that was over its threshold, as far as is known.
    """
    first = bundle.is_converted
    event = {**base, **{name: found[name] for name in _FOUND}, "search": "replayed", "suspected": []}
    if first:
        event |= {name: found[name] for name in _FOUND_FIRST} | {"micro_batches": bundle.event["micro_batches"]}
    known = [*base["culprits"], *base.get("suspected", ())]
    for name in ("units", "culprits", "diffuse"):
        elsewhere = [] if first else [each for each in base[name] if _is_elsewhere(each, bundle)]
        event[name] = [*found[name], *elsewhere]
    # A bundle has the first of the units that an event lists, so that those left out are not in it.
    for name in ("more_units", "more_diffuse"):
        event[name] = found[name] + (0 if first else base.get(name, 0))
    event["culprits"] = _with_texts(event["culprits"], known)
    if not is_whole:
        # Missing values can only come from an earlier search.
        event["explained"] = found["explained"] and (None if first else base["explained"])
        event["complete"] = found["complete"] and not first and base["complete"]
    if first or places(base["culprits"]) != places(event["culprits"]):
        event |= {name: found[name] for name in _JUDGED}
    return _finished(event, bundle, threshold)


def quiet_event(
    base: Mapping[str, Any], bundle: Bundle, threshold: float, searched: Searched, of_training: bool
) -> dict[str, Any]:
    """The event of a spike after a search with no micro-batch over its threshold.

    Args:
        threshold (float): τ.
        searched (Searched): What `search` gave.
        of_training (bool): Whether the weights are those of training.
    """
    check = "No token of the bundle has a gradient: see whether it is of the step with the spike."
    if searched.largest is not None:
        check = (
            f"`gradloc replay BUNDLE --search --threshold {searched.lower_threshold}` "
            "searches the largest one all the same."
        )
    event = {**base, "diagnosis": "under", "search": "replayed", "passes": searched.passes}
    # A cause that was found without a search stays.
    if not (base.get("verdict") or {}).get("cause"):
        or_ = "or" if of_training else "the weights are not those of training, or"
        rest = f": the spike is not in these tokens, {or_} τ is too high."
        event["verdict"] = {"cause": None, "facts": [], **said("No micro-batch is over its threshold", rest, check)}
    return _finished(event, bundle, threshold)


def _finished(event: Mapping[str, Any], bundle: Bundle, threshold: float) -> dict[str, Any]:
    """An event with the τ of its search, its bundle and its summary."""
    scaled = float(event["global_threshold"]) * threshold / event["threshold"]
    replay = event.get("replay") or f"{limits.FOLDER}/{bundle.path.name}"
    found: Any = {**event, "threshold": threshold, "global_threshold": scaled, "replay": replay}
    return {**found, "summary": describe(found)}


def event_around(bundle: Bundle) -> dict[str, Any] | None:
    """The event of a bundle's spike in the evidence around the bundle, which has texts; None without one."""
    folder = bundle.path.parent
    if folder.name != limits.FOLDER:
        return None
    try:
        events = [dict(event) for event in read(str(folder.parent)).events]
    except OSError:
        return None
    return spike_of(events, bundle.event, f"{limits.FOLDER}/{bundle.path.name}")


def evidence_of(event: Mapping[str, Any], bundle: Bundle, options: Sequence[str] = ()) -> Evidence:
    """The evidence of one event, whose commands take a bundle, and these options."""
    folder = str(bundle.path.parent)
    evidence = Evidence(folder, directory=folder, options=options)
    evidence.add(jsonable({**event, "replay": bundle.path.name}))
    return evidence


def with_findings(bundle: Bundle) -> Bundle:
    """The bundle of a converted spike with what a search has found since; as it is without one.

    The event beside the bundle may come from a stranger, too: it is checked like the bundle's own.
    """
    if not bundle.is_converted:
        return bundle
    try:
        path = bundle.path.with_name(bundle.path.name + EVENT_SUFFIX)
        event = parse(read_plain_file(path, limits.MANIFEST_BYTES))
    except (OSError, ValueError):
        return bundle
    if not (conforms(event, EVENT) and all(event[name] == bundle.event[name] for name in _SAME)):
        return bundle
    found = replace(bundle, manifest={**bundle.manifest, "event": event})
    try:
        check_places(found)
    except BundleError:
        return bundle
    return found


def places(tokens: Collection[Mapping[str, Any]]) -> set[tuple[int, int, int, int]]:
    """Where tokens are: (rank, micro-batch, row, position)."""
    return {(token["rank"], token["micro_batch"], token["row"], token["position"]) for token in tokens}


def _is_elsewhere(each: Mapping[str, Any], bundle: Bundle) -> bool:
    """Whether something that an earlier search found is in a micro-batch that the bundle does not have."""
    return each["rank"] is not None and (each["rank"], each["micro_batch"]) not in bundle.micro_batches


def _with_texts(culprits: Sequence[Mapping[str, Any]], known: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Culprits with what the trainer has added to known tokens: about their responses, and about themselves."""
    found = [{**culprit} for culprit in culprits]
    for where, names in ((("rank", "row"), _OF_RESPONSE), (("rank", "row", "position"), _OF_TOKEN)):
        by_place = {tuple(token[key] for key in where): token for token in reversed(known)}
        for culprit in found:
            token = by_place.get(tuple(culprit[key] for key in where), {})
            culprit |= {name: token[name] for name in names if name in token}
    return found
