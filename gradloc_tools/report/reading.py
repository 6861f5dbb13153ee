# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the evidence, which training may be writing at the same time, and which may come from a stranger."""

import errno
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from gradloc.evidence.foreign_json import LINE_BYTES, parse
from gradloc.evidence.schema import CLIP, CRITIC, EVENT, NOTE, SCHEMA, STEP, conforms
from gradloc.evidence.texts import without_texts
from gradloc.evidence.writer import STEP_FIGURES, evidence_files, line_digest

from ..bundles.results import read_results
from .figures import clipped, number, severity
from .run_warnings import RunWarnings
from .spikes import Spike

# Of the files of one kind at most so many bytes are read: as many as the writer writes.
MOST_BYTES = 64 * 2**20
# At most so many different notes are told apart, and characters of the kind of one.
_NOTES, _KIND_CHARACTERS = 1000, 200
# The names of the files in a directory with evidence.
_NAMES = ("spikes", "steps", "critic")
# Of directories with evidence near one without, how many are named, and how many are looked through.
_NEAR, _MOST_DIRECTORIES = 3, 1000
# What is too long is skipped in pieces of so many bytes.
_CHUNK = 2**20
# How a line begins that replaces another one.
_REPLACING = b'{"replaces": "'

Event = dict[str, Any]


@dataclass
class Evidence:
    """What the files hold, as far as the report needs it.

    Attributes:
        path (str): The directory or file that it is from.
        since (int, optional): Events of earlier steps are left out.
        texts (bool): Whether it has the texts of samples, and the results of replays.
        directory (str): The directory of the files.
        options (str): What every command on a bundle takes, as words of a shell.
        spikes (list[Spike]): In the order in which they were written; drills are no spikes.
        drills (list[dict]): Their events.
        clips (list[dict]): The lines on what TokenClip found.
        faults (list[str]): The names of faults that were planted in the run on purpose.
        steps (dict[int, dict]): The figures of each step, of its last line; None where there is no data.
        warnings (RunWarnings): The warnings of the steps, and the critic's spikes.
        notes (dict[str, set]): What was left out of the files, and in which steps.
        left_out (set): The kinds and steps of these notes.
        replays (list[dict]): The results of replays, in the order of their events.
        other_versions (Counter): Lines of other versions of the evidence, which are not read, by version.
        runs (int): How often the steps begin at 1, or once if they begin later: a resumed run begins later.
        doubled (int): Lines of spikes.jsonl that are there once more, which are not counted.
        lines (int): Lines that have the form of the evidence.
        skipped (int): Lines that are malformed or unfinished.
        too_large (bool): Whether there is more than `MOST_BYTES`, of which the end is not read.
    """

    path: str
    since: int | None = None
    texts: bool = True
    directory: str = "."
    options: str = ""
    spikes: list[Spike] = field(default_factory=list)
    drills: list[Event] = field(default_factory=list)
    clips: list[Event] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    steps: dict[int, dict[str, float | None]] = field(default_factory=dict)
    warnings: RunWarnings = field(default_factory=RunWarnings)
    notes: dict[str, set[int]] = field(default_factory=dict)
    left_out: set[tuple[str, int]] = field(default_factory=set)
    replays: list[dict[str, Any]] = field(default_factory=list)
    other_versions: Counter[int] = field(default_factory=Counter)
    runs: int = 1
    doubled: int = 0
    lines: int = 0
    skipped: int = 0
    too_large: bool = False
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

    def add(self, event: Event) -> None:
        """Adds an event, and the fields of its culprits that may be shown."""
        if not self.texts:
            event = without_texts(event)
        fault = event.get("fault")
        if fault is not None and (name := str(clipped(fault))) not in self.faults:
            self.faults.append(name)
        if event.get("drill") is not None:
            self.drills.append(event)
        else:
            self.spikes.append(Spike.of(event, len(self.spikes), self.directory, self.options))

    def add_clip(self, line: Event) -> None:
        """Adds a clip line."""
        self.clips.append(line if self.texts else without_texts(line))

    def add_note(self, note: Event) -> None:
        """Adds a note of a file."""
        step, message = note["global_step"], str(clipped(note["message"]))
        if message in self.notes or len(self.notes) < _NOTES:
            self.notes.setdefault(message, set()).update([] if step is None else [step])
        self.mark_left_out(note)

    def mark_left_out(self, note: Event) -> None:
        """Keeps a note's kind and step."""
        if note["global_step"] is not None:
            self.left_out.add((str(clipped(note["note"], _KIND_CHARACTERS)), note["global_step"]))

    def add_step(self, step: Event) -> None:
        """Adds a line of steps.jsonl; of a step with several lines, as a resumed run leaves them, the last counts."""
        self.warnings.take_in(step["global_step"], step.get("warnings", ()))
        if step["global_step"] is not None:
            self.runs += step["global_step"] <= 1 < self._last_step
            self._last_step = step["global_step"]
            figures = {name: step.get(name) for name in STEP_FIGURES}
            self.steps[self._last_step] = {
                name: None if figure is None else number(figure) for name, figure in figures.items()
            }

    def known_steps(self) -> list[int]:
        """The steps with figures, without those before `since`."""
        return [step for step in self.steps if self.since is None or step >= self.since]

    def skip(self, line: Any) -> None:
        """Counts a line that is not read: as one of another version if it says so, otherwise as malformed."""
        version = line.get("schema") if isinstance(line, dict) else None
        if type(version) is int and version != SCHEMA and 0 < version < 1000:
            self.other_versions[version] += 1
        else:
            self.skipped += 1


def read(path: str, since: int | None = None, texts: bool = True) -> Evidence:
    """Reads a directory with evidence, or a file; `spikes.jsonl` and `steps.jsonl` stand for their directory.

    Args:
        path (str): The directory or file. A run's directory stands for the `bisect_dump` in it.
        since (int, optional): Leave out events of earlier steps, and those without a step. The figures of earlier
            steps are kept, to be shown before later spikes.
        texts (bool): See `Evidence`.

    Raises:
        OSError: There is no such file, no evidence in it or in the directory, or it cannot be read.
    """
    events, steps, critic = _files(path)
    found = Evidence(path, since, texts, os.path.dirname((events or steps or critic)[0]) or ".")
    # Training writes a step's spikes before its figures: so all spikes that the figures count are there.
    for files, first, forms in (
        (steps, None, ((STEP, found.add_step),)),
        (events, since, ((EVENT, found.add), (CLIP, found.add_clip))),
        (critic, None, ((CRITIC, found.warnings.take_in_critic),)),
    ):
        lines = _lines(found, files)
        for entry in map(_parsed, lines) if files is steps else _each_once(found, [*lines]):
            add = next((add for form, add in (*forms, (NOTE, found.add_note)) if conforms(entry, form)), None)
            if add is None:
                found.skip(entry)
                continue
            found.lines += 1
            if first is None or (entry["global_step"] is not None and entry["global_step"] >= first):
                add(entry)
            elif "note" in entry:  # a full file stays full
                found.mark_left_out(entry)
    if not (found.lines or found.other_versions):
        if not (os.path.isdir(path) or _is_evidence(path)):
            raise OSError(f"{path} is no evidence: give the folder that has spikes.jsonl.")
        if found.skipped:
            raise OSError(f"{path} has no valid line: it is cut, or no evidence. Copy it again.")
    results = read_results(found.directory) if texts else []
    found.replays = [result for result in results if since is None or (result["global_step"] or 0) >= since]
    return found


def _lines(found: Evidence, files: Iterable[str]) -> Iterator[bytes]:
    """All lines that are not empty; the last one may still be being written. One that is too long is read as b""."""
    left = MOST_BYTES
    for file in files:
        with open(file, "rb") as lines:
            while line := lines.readline(LINE_BYTES + 1):
                rest = line
                while rest and not rest.endswith(b"\n"):
                    rest = lines.readline(_CHUNK)
                if len(line) > LINE_BYTES:
                    line = b""
                left -= len(line)
                if left < 0:
                    found.too_large = True
                    return
                if line != b"\n":
                    yield line


def _each_once(found: Evidence, lines: Sequence[bytes]) -> Iterator[Any]:
    """What the lines hold, each line once.

    In place of a line is read what the search of its bundle has appended; where the line is gone, that comes last.
    """
    later = {entry["replaces"]: entry for line in lines if (entry := _replacing(line)) is not None}
    seen: set[str] = set()
    for line in lines:
        digest = line_digest(line)
        entry = later.get(digest) or _parsed(line)
        if digest not in later and line.startswith(_REPLACING) and entry and str(entry.get("replaces")) in later:
            continue  # it is read in the other one's place
        if entry is not None and digest in seen:
            found.doubled += 1
            continue
        seen.add(digest)
        yield entry
    yield from (entry for digest, entry in later.items() if digest not in seen)


def _replacing(line: bytes) -> Event | None:
    """The event that a line holds in place of another one."""
    entry = _parsed(line) if line.startswith(_REPLACING) else None
    return entry if entry is not None and conforms(entry, EVENT) else None


def _parsed(line: bytes) -> Any:
    """What a line holds; None for one that is malformed or unfinished."""
    try:
        return parse(line)
    except ValueError:
        return None


def _files(path: str) -> list[list[str]]:
    """The files that a path stands for, those with events, steps and the critic's spikes, each the oldest first."""
    if os.path.isdir(path):
        for directory in (path, os.path.join(path, "bisect_dump")):
            if os.path.isdir(directory) and any(files := [evidence_files(directory, name) for name in _NAMES]):
                return files
        raise _no_evidence(path)
    if _is_evidence(path):
        directory = os.path.dirname(path) or "."
        if any(files := [evidence_files(directory, name) for name in _NAMES]):
            return files
    return [[path], [], []]


def _is_evidence(path: str) -> bool:
    """Whether a file has the name of one with evidence."""
    return os.path.basename(path) in [f"{name}.jsonl" for name in _NAMES]


def _no_evidence(path: str) -> OSError:
    """The error for a directory without evidence, with directories near it that have some."""
    if near := _with_evidence_near(path):
        more = f", and {len(near) - _NEAR} more" if len(near) > _NEAR else ""
        found = f"found in {', '.join(near[:_NEAR])}{more}: give {'that' if len(near) == 1 else 'one of them'}"
        return FileNotFoundError(errno.ENOENT, f"No steps.jsonl or spikes.jsonl, {found}", path)
    return FileNotFoundError(errno.ENOENT, "No steps.jsonl or spikes.jsonl, which spike_detection writes", path)


def _with_evidence_near(path: str) -> list[str]:
    """The directories with evidence up to two levels above and below one."""
    parent = os.path.dirname(os.path.abspath(path))
    near = [parent, os.path.dirname(parent)]
    level = [path]
    for _ in range(2):
        level = [found for directory in level for found in _directories(directory)][:_MOST_DIRECTORIES]
        near += level
    near = [directory for directory in near if os.access(directory, os.R_OK | os.X_OK)]
    return [directory for directory in near if any(evidence_files(directory, name) for name in _NAMES)]


def _directories(directory: str) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.path for entry in islice(entries, _MOST_DIRECTORIES) if entry.is_dir())
    except OSError:
        return []  # it only helps to find the right one
