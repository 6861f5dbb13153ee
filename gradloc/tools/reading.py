# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the evidence, which training may be writing at the same time, and which may come from a stranger."""

import errno
import glob
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ..evidence.writer import LINE_BYTES, STEP_FIGURES, evidence_files, jsonable
from ..judge import judged
from ..judge.rules import FAULTS
from ..lines import READABLE, SCHEMA, CriticSpike
from ..lines import Event as EventLine
from ..sources import OTHER
from .figures import SHORT_CHARACTERS, clipped, severity
from .results import read_events, read_results
from .schema import (
    CLIP,
    CLIPPED_TOKEN_FIELDS,
    CRITIC,
    CULPRIT_FIELDS,
    EVENT,
    NOTE,
    STEP,
    conforms,
    parse,
    with_numbers,
)
from .spike import Spike

# At most so many bytes of a file are read: as many as the writer writes.
MOST_BYTES = 64 * 2**20
# The names of the files in a directory with evidence.
_NAMES = ("spikes", "steps", "critic")
# How many directories near one without evidence are named, and how many are searched.
_NEAR, _MOST_DIRECTORIES = 3, 1000
# Lines that are too long are skipped in pieces of so many bytes.
_CHUNK = 2**20
# Why lines are not read.
MALFORMED = "malformed or unfinished"
OTHER_VERSION = "of another version of GradLoc, whose own report reads them"
# The fields that the trainer adds to a token, without texts but the token's own.
_ADDED = ("token", "response_tokens_start", "reward")
_CHECK_CRITIC = "Each spike of the critic is a line of `critic.jsonl`, with its layers and the largest errors."
# How many identities are told apart.
_IDENTITIES = 64

Event = dict[str, Any]


@dataclass
class Evidence:
    """The contents of the files, as far as the report needs them."""

    path: str  # the directory or file that it is from
    # Earlier steps are left out; of their figures, spikes show those before them.
    since: int | None = None
    texts: bool = True  # whether it has the texts of samples, and the results of replays
    directory: str = "."  # that of the files
    options: Sequence[str] = ()  # what every command on a bundle takes
    spikes: list[Spike] = field(default_factory=list)  # in the order in which they were written; drills are no spikes
    drills: list[Event] = field(default_factory=list)  # their events
    clips: list[Event] = field(default_factory=list)  # the lines on what TokenClip found
    faults: list[str] = field(default_factory=list)  # the names of faults that were planted in the run on purpose
    # The figures of each step, of its last line; None where there is no data.
    steps: dict[int, dict[str, float | None]] = field(default_factory=dict)
    # The warnings of each step, of its last line; the critic's spikes as well.
    warnings: dict[int | None, list[Event]] = field(default_factory=dict)
    # The state of each identity in the last step in which they were checked, and that step.
    identities: dict[str, Event] = field(default_factory=dict)
    checked_in: int | None = None
    # By identity and step, its residual in times of the usual.
    times: dict[str, dict[int | None, float | None]] = field(default_factory=dict)
    # By identity and the step since which it is broken, the last such step and its warning.
    broken: dict[tuple[str, int | None], tuple[int | None, Event]] = field(default_factory=dict)
    changes: dict[int | None, list[Event]] = field(default_factory=dict)  # what has changed in each step
    notes: dict[str, set[int]] = field(default_factory=dict)  # what was left out of the files, and in which steps
    left_out: set[tuple[str, int]] = field(default_factory=set)  # the kinds and steps of these notes
    replays: list[dict[str, Any]] = field(default_factory=list)  # the results of replays, in the order of their events
    runs: int = 1  # how often the steps begin at 1, or once if they begin later: a resumed run begins later
    skipped: Counter[str] = field(default_factory=Counter)  # lines that are not read, by why
    too_large: bool = False  # whether a file has more than `MOST_BYTES`, of which the end is not read
    _last_step: int = 1

    @property
    def events(self) -> list[Mapping[str, Any]]:
        """The events of the spikes."""
        return [spike.event for spike in self.spikes]

    @property
    def bundle(self) -> str | None:
        """The bundle of the last spike that has one, as words of a shell."""
        return next((spike.bundle for spike in reversed(self.spikes) if spike.bundle), None)

    def culprits(self) -> list[tuple[Spike, Mapping[str, Any]]]:
        """All culprits with their spikes, the largest first; among equals, the one that was written first."""
        pairs = [(spike, culprit) for spike in self.spikes for culprit in spike.event["culprits"]]
        return sorted(pairs, key=lambda pair: -severity(pair[1]["grad_norm"]))

    def has(self, step: int | None) -> bool:
        """Whether a step is not left out."""
        return self.since is None or (step is not None and step >= self.since)

    def known_steps(self) -> list[int]:
        """The steps with figures that are not left out, in order."""
        return sorted(filter(self.has, self.steps))

    def add(self, event: Event) -> None:
        """Adds an event, unless its step is left out."""
        if not self.has(event["global_step"]):
            return
        if not self.texts:
            event = without_texts(event)
        if not event.get("summary"):  # the judge failed in training
            event = _judged(event)
        if "identities" in event:
            event = self._agreeing(event)
            if not self.steps:
                self.add_answer(event, event["global_step"])
        fault = event.get("fault")
        if fault is not None and (name := str(clipped(fault))) not in self.faults:
            self.faults.append(name)
        if event.get("drill") is not None:
            self.drills.append(event)
        else:
            self.spikes.append(Spike(event, len(self.spikes), self.directory, self.options))

    def _agreeing(self, event: Event) -> Event:
        """An event as the whole run has it.

        If later steps have found what is broken since this one or before, it is judged by that. If nothing is, culprits
        keep what may be true of a natural spike: of a fault, few of them had the signs, or other tokens as well.
        """
        step, verdict = event["global_step"], event.get("verdict")
        if step is not None and verdict is not None and not event.get("warnings"):
            later = [warning for (_, since), (end, warning) in self.broken.items() if _is_in(step, since, end)]
            again = _judged({**event, "warnings": later}) if later else event
            if again["verdict"] is not None and again["verdict"]["cause"] != verdict["cause"]:
                self._add_note("a verdict is by what later steps have found to be broken", step)
                return again
        has_fault = any(set(FAULTS).intersection(each["sources"]) for each in event["culprits"])
        if verdict is None or verdict["cause"] is not None or not has_fault:
            return event
        left = [[name for name in each["sources"] if name not in FAULTS] or [OTHER] for each in event["culprits"]]
        pairs = zip(event["culprits"], left, strict=True)
        return {**event, "culprits": [{**each, "source": names[0], "sources": names} for each, names in pairs]}

    def add_clip(self, line: Event) -> None:
        """Adds a clip line, unless its step is left out."""
        if self.has(line["global_step"]):
            self.clips.append(line if self.texts else without_texts(line))

    def add_critic(self, line: Event) -> None:
        """Adds a spike of the critic, as a warning."""
        step, sentence = line["global_step"], line["summary"] or judged(with_numbers(line, CriticSpike))["summary"]
        if self.has(step):
            warning = {"name": "critic", "sentence": sentence, "check": _CHECK_CRITIC}
            self.warnings.setdefault(step, []).append(warning)

    def add_note(self, note: Event) -> None:
        """Adds a note of a file. Its kind is kept whatever its step: a full file stays full."""
        step = note["global_step"]
        if self.has(step):
            self._add_note(str(clipped(note["message"])), step)
        if step is not None:
            self.left_out.add((str(clipped(note["note"], SHORT_CHARACTERS)), step))

    def _add_note(self, message: str, step: int | None) -> None:
        self.notes.setdefault(message, set()).update([] if step is None else [step])

    def add_step(self, line: Event) -> None:
        """Adds a line of steps.jsonl; of a step with several lines, as a resumed run leaves them, the last counts."""
        step = line["global_step"]
        self.add_answer(line, step)
        if line["schema"] == SCHEMA and "warnings" not in line:
            self._add_note("nothing has checked the run: the log of training says why", step)
        if step is not None:
            self.runs += step <= 1 < self._last_step
            self._last_step = step
            figures = {name: line.get(name) for name in STEP_FIGURES}
            self.steps[step] = {name: None if figure is None else float(figure) for name, figure in figures.items()}

    def add_answer(self, line: Event, step: int | None) -> None:
        """Adds what the judge has said of an update, unless its step is left out."""
        if not self.has(step):
            return
        self.warnings[step] = [*line.get("warnings", [])]
        self.changes[step] = line.get("changes", [])
        named = islice(line.get("identities", {}).items(), _IDENTITIES)
        if states := {str(clipped(name, SHORT_CHARACTERS)): state for name, state in named}:
            self.identities, self.checked_in = {}, step
            for name, state in states.items():
                self.identities[name] = {**state, "missing": clipped(state["missing"], SHORT_CHARACTERS)}
                times = math.inf if state["state"] == "broken" else None
                self.times.setdefault(name, {})[step] = times if state["times"] is None else float(state["times"])
            for warning in self.warnings[step]:
                if (of := warning.get("identity", "")) in states:
                    self.broken[of, warning.get("since")] = step, warning

    def skip(self, line: Any) -> None:
        """Counts a line that is not read."""
        version = line.get("schema") if isinstance(line, dict) else None
        is_other = type(version) is int and version not in READABLE and 0 < version < 1000
        self.skipped[OTHER_VERSION if is_other else MALFORMED] += 1


def read(path: str, since: int | None = None, texts: bool = True) -> Evidence:
    """Reads a directory with evidence, or a file; `spikes.jsonl` and `steps.jsonl` stand for their directory.

    Args:
        path (str): The directory or file. A run's directory stands for the `bisect_dump` in it.
        since (int, optional): See `Evidence`.
        texts (bool): See `Evidence`.

    Raises:
        OSError: There is no such file, no evidence in it or in the directory, or it cannot be read.
    """
    known = evidence_at(path)
    if not known and os.path.isdir(path):
        raise _no_evidence(path)
    files = known or {"spikes": path}
    found = Evidence(path, since, texts, os.path.dirname(next(iter(files.values()))) or ".")
    forms = {
        # Training writes a step's spikes before its figures: so all spikes that the figures count are there.
        "steps": ((STEP, found.add_step), (NOTE, found.add_note)),
        "spikes": ((EVENT, found.add), (CLIP, found.add_clip), (NOTE, found.add_note)),
        "critic": ((CRITIC, found.add_critic), (NOTE, found.add_note)),
    }
    valid = 0
    for name in (name for name in forms if name in files):
        entries = map(_parsed, _lines(found, files[name]))
        for entry in _with_searches(entries, found.directory) if name == "spikes" else entries:
            add = next((add for form, add in forms[name] if conforms(entry, form)), found.skip)
            add(entry)
            valid += add != found.skip
    if not (valid or found.skipped[OTHER_VERSION]):
        if not known:
            raise OSError(f"{path} is not evidence: give the folder that has spikes.jsonl.")
        if found.skipped:
            raise OSError(f"{path} has no valid line: it is cut, or no evidence. Copy it again.")
    results = read_results(found.directory) if texts else []
    found.replays = [result for result in results if found.has(result["global_step"])]
    return found


def _is_in(step: int, since: int | None, end: int | None) -> bool:
    return since is not None and end is not None and since <= step <= end


def _judged(event: Event) -> Event:
    """An event, judged by the rules of this release."""
    found: Any = judged(with_numbers(event, EventLine))
    return {**event, "verdict": jsonable(found["verdict"]), "summary": found["summary"]}


def _lines(found: Evidence, file: str) -> Iterator[bytes]:
    """All lines that are not empty; the last one may still be being written. One that is too long is read as b""."""
    if os.path.exists(file) and not os.path.isfile(file):  # a pipe or a device may have no end
        raise OSError(f"{file} is not an ordinary file: give the folder that has spikes.jsonl, copied if need be.")
    left = MOST_BYTES
    with open(file, "rb") as lines:
        while line := lines.readline(LINE_BYTES + 1):
            left -= len(line)
            rest = line
            while rest and not rest.endswith(b"\n") and left >= 0:
                rest = lines.readline(_CHUNK)
                left -= len(rest)
            if left < 0:
                found.too_large = True
                return
            if len(line) > LINE_BYTES:
                line = b""
            if line != b"\n":
                yield line


def spike_of(events: Iterable[Event], event: Mapping[str, Any], replay: str | None) -> Event | None:
    """The event of a spike among those of the evidence; None if there is none, or more than one that may be it.

    It is that of the same step, epoch and mini-batch with the same bundle.

    Args:
        event (Mapping): What a bundle has of the spike, or a search.
        replay (str, optional): The bundle, as `replay` has it.
    """
    where = ("global_step", "epoch", "mini_batch")
    same = [each for each in events if all(each[name] == event[name] for name in where)]
    found = [each for each in same if replay is not None and each.get("replay") == replay]
    return found[0] if len(found) == 1 else None


def _with_searches(lines: Iterable[Any], directory: str) -> Iterable[Any]:
    """The lines' entries; an event is replaced by the last that a search has written beside its bundle."""
    if not (searched := read_events(directory)):
        return lines
    found = [*lines]
    events = [entry for entry in found if conforms(entry, EVENT)]
    pairs = [(spike_of(events, event, event.get("replay")), event) for event in searched]
    later = {id(line): event for line, event in pairs if line is not None}
    return [later.get(id(entry), entry) for entry in found]


def _parsed(line: bytes) -> Any:
    """The entry of a line; None if it is malformed or unfinished."""
    try:
        return parse(line)
    except ValueError:
        return None


def evidence_at(path: str) -> dict[str, str]:
    """The files with evidence that a path stands for, see `read`, by name; none if there are none."""
    directories = [path, os.path.join(path, "bisect_dump")]
    if os.path.basename(path) in [f"{name}.jsonl" for name in _NAMES] and not os.path.isdir(path):
        directories = [os.path.dirname(path) or "."]
    for directory in directories:
        files = {name: os.path.join(directory, f"{name}.jsonl") for name in _NAMES}
        if files := {name: file for name, file in files.items() if os.path.exists(file)}:
            return files
    return {}


def _no_evidence(path: str) -> OSError:
    """The error for a directory without evidence, with directories up to two levels above and below it that have."""
    parent = os.path.dirname(os.path.abspath(path))
    near = [parent, os.path.dirname(parent)]
    for below in ("*/", "*/*/"):
        near += sorted(islice(glob.iglob(os.path.join(glob.escape(path), below)), _MOST_DIRECTORIES))
    near = [os.path.normpath(folder) for folder in near if any(evidence_files(folder, name) for name in _NAMES)]
    if not near:
        return FileNotFoundError(errno.ENOENT, "No steps.jsonl or spikes.jsonl, which spike_detection writes", path)
    more = f", and {len(near) - _NEAR} more" if len(near) > _NEAR else ""
    found = f"found in {', '.join(near[:_NEAR])}{more}: give {'that' if len(near) == 1 else 'one of them'}"
    return FileNotFoundError(errno.ENOENT, f"No steps.jsonl or spikes.jsonl, {found}", path)


def without_texts(line: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of an event or a clip line with the actor's figures, and of texts the named tokens' own alone.

    Rewards are kept. Prompts, responses, contexts, ground truths, data sources, uids, and fields that the schema does
    not know, are left out.
    """
    if "culprits" in line:
        bare = _named(line, EVENT["properties"])
        for name in ("culprits", "suspected"):
            if name in line:
                bare[name] = [_named(token, (*CULPRIT_FIELDS, *_ADDED)) for token in line[name]]
        return bare
    found = line["token_clip"]
    tokens = [_named(token, (*CLIPPED_TOKEN_FIELDS, *_ADDED)) for token in found["tokens"]]
    known = _named(found, CLIP["properties"]["token_clip"]["properties"]) | {"tokens": tokens}
    return _named(line, CLIP["properties"]) | {"token_clip": known}


def _named(of: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: of[name] for name in names if name in of}
