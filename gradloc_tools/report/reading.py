# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the evidence and keeps only what the report shows.

It may be read while training writes it. Rotated files are read as well; a line that is still being
written is skipped.
"""

import errno
import heapq
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from gradloc.evidence.foreign_json import LINE_BYTES, parse
from gradloc.evidence.schema import CLIP, CRITIC, EVENT, NOTE, SCHEMA, STEP, conforms
from gradloc.evidence.texts import without_texts
from gradloc.evidence.writer import STEP_FIGURES, evidence_files, line_digest

from ..bundles.results import read_results
from .condensed import bundle_of, clipped, condensed_event, culprit_details, culprit_row
from .drills import condensed_drill
from .figures import severity
from .run_warnings import RunWarnings
from .steps import StepFigures
from .token_clips import TokenClips
from .totals import Totals, count_bounded

# How many culprits keep their details by default.
DETAILED = 500
# The maximum number of rows on the page, which would be slow with more; the largest are kept.
PAGE_ROWS = 5_000
# At most so many different tokens, messages, faults and versions are told apart.
_TOKENS, _NOTES, _FAULTS, _VERSIONS = 50_000, 1000, 16, 16
# The names of the files in a directory with evidence.
_NAMES = ("spikes", "steps", "critic")
# Of the kind of a note.
_KIND_CHARACTERS = 200
# Of directories with evidence near one without, how many are named, and how many are looked through.
_NEAR, _MOST_DIRECTORIES = 3, 1000
# What is too long is skipped in pieces of so many bytes.
_CHUNK = 2**20

# How a line begins that replaces another one.
_REPLACING = b'{"replaces": "'

# A file, and where in it a line begins.
_Place = tuple[str, int]
# A culprit after what it is sorted by (its size; among equals, the first comes first) and the index of its event.
RankedCulprit = tuple[float, int, int, dict[str, Any]]


@dataclass
class Evidence:
    """What the files hold, as far as the report needs it.

    Attributes:
        path (str): The directory or file that it is from.
        top (int): How many culprits keep their texts and layers: the largest of each event, then others.
        since (int, optional): Events of earlier steps are left out.
        texts (bool): Whether it has the texts of samples, and the results of replays.
        directory (str): The directory of the files.
        options (str): What every command on a bundle takes, as words of a shell.
        totals (Totals): Of all spikes, kept or not; drills are no spikes.
        kept (dict[int, dict]): The spikes with the largest norms, condensed, by their place in the order in which they
            were written; as many as the page may show.
        drills (list[dict]): Likewise.
        clips (TokenClips): What TokenClip found; that is no spike.
        faults (list[str]): The names of faults that were planted in the run on purpose.
        steps (dict[int, dict]): The figures of each step, of its last line; None where there is no data.
        warnings (RunWarnings): The warnings of the steps, and the critic's spikes.
        bundle (str, optional): The bundle of the last spike that has one, as words of a shell.
        notes (dict[str, set]): What was left out of the files, and in which steps.
        left_out (set): The kinds and steps of these notes.
        replays (list[dict]): The results of replays, in the order of their events.
        other_versions (Counter): Lines of other versions of the evidence, which are not read, by version.
        runs (int): How often the steps begin at 1, or once if they begin later: a resumed run begins later.
        doubled (int): Lines of spikes.jsonl that are there once more, which are not counted.
        lines (int): Lines that have the form of the evidence.
        skipped (int): Lines that are malformed or unfinished.
        sources (Counter): Of all culprits, kept or not.
        tokens (Counter): Likewise; by the token, and its id if it is not known. Only the first 50,000 are counted.
        largest (dict[int, RankedCulprit]): The largest culprit of each spike that is kept.
        others (list[RankedCulprit]): The largest of the other culprits, as many as the page may show; a heap.
    """

    path: str
    top: int = DETAILED
    since: int | None = None
    texts: bool = True
    directory: str = "."
    options: str = ""
    totals: Totals = field(default_factory=Totals)
    kept: dict[int, dict[str, Any]] = field(default_factory=dict)
    drills: list[dict[str, Any]] = field(default_factory=list)
    clips: TokenClips = field(default_factory=TokenClips)
    faults: list[str] = field(default_factory=list)
    steps: StepFigures = field(default_factory=StepFigures)
    warnings: RunWarnings = field(default_factory=RunWarnings)
    bundle: str | None = None
    notes: dict[str, set[int]] = field(default_factory=dict)
    left_out: set[tuple[str, int]] = field(default_factory=set)
    replays: list[dict[str, Any]] = field(default_factory=list)
    other_versions: Counter[int] = field(default_factory=Counter)
    runs: int = 1
    doubled: int = 0
    lines: int = 0
    skipped: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    tokens: Counter[tuple[str | None, int | None]] = field(default_factory=Counter)
    largest: dict[int, RankedCulprit] = field(default_factory=dict)
    others: list[RankedCulprit] = field(default_factory=list)
    _last_step: int = 1
    # A heap of the spikes that are kept: the size and minus the place of each.
    _sizes: list[tuple[float, int]] = field(default_factory=list)
    # A heap of those with details: whether it is its event's largest, its size, its order.
    _detailed: list[tuple[bool, float, int, dict[str, Any]]] = field(default_factory=list)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The spikes that are kept, in the order in which they were written."""
        return [self.kept[index] for index in sorted(self.kept)]

    def add(self, event: dict[str, Any]) -> None:
        """Adds an event, and the fields of its culprits that may be shown."""
        if not self.texts:
            event = without_texts(event)
        fault = event.get("fault")
        if fault is not None and len(self.faults) < _FAULTS and (name := str(clipped(fault))) not in self.faults:
            self.faults.append(name)
        if event.get("drill") is not None:
            if len(self.drills) < PAGE_ROWS:
                self.drills.append(condensed_drill(event))
            else:
                self.add_note(f"drills after the first {PAGE_ROWS:,} are left out", event["global_step"])
            return
        largest = max(event["culprits"], key=lambda culprit: severity(culprit["grad_norm"]), default=None)
        index, before = self.totals.events, self.sources.total()
        self.kept[index] = condensed = condensed_event(event, largest, self.directory, self.options)
        self.bundle = bundle_of(event, self.directory, self.options) or self.bundle
        self.totals.add(condensed, self.top)
        for order, culprit in enumerate(event["culprits"], before):
            row = culprit_row(event, culprit)
            self.sources[culprit["source"]] += 1
            count_bounded(self.tokens, (row["token"], row["token_id"] if row["token"] is None else None), _TOKENS)
            ranked = (severity(culprit["grad_norm"]), -order, index, row)
            if culprit is largest:
                self.largest[index] = ranked
            else:
                self._add_other(ranked)
            row["details"] = culprit_details(culprit)
            heapq.heappush(self._detailed, (culprit is largest, *ranked[:2], row))
            if len(self._detailed) > self.top:
                del heapq.heappop(self._detailed)[-1]["details"]
        heapq.heappush(self._sizes, (condensed["size"], -index))
        if len(self._sizes) > self._most:
            smallest = -heapq.heappop(self._sizes)[1]
            del self.kept[smallest]
            if smallest in self.largest:
                self._add_other(self.largest.pop(smallest))

    def add_clip(self, line: dict[str, Any]) -> None:
        """Adds a clip line."""
        for step in self.clips.add(line if self.texts else without_texts(line), PAGE_ROWS):
            self.add_note(f"of the tokens that TokenClip found, all but the {PAGE_ROWS:,} largest are left out", step)

    @property
    def _most(self) -> int:
        return max(PAGE_ROWS, self.top)

    def _add_other(self, ranked: RankedCulprit) -> None:
        heapq.heappush(self.others, ranked)
        if len(self.others) > self._most:
            heapq.heappop(self.others)

    def take_in_note(self, note: dict[str, Any]) -> None:
        """Adds a note of a file."""
        self.add_note(note["message"], note["global_step"])
        self.mark_left_out(note)

    def mark_left_out(self, note: dict[str, Any]) -> None:
        """Keeps a note's kind and step."""
        if note["global_step"] is not None:
            self.left_out.add((str(clipped(note["note"], _KIND_CHARACTERS)), note["global_step"]))

    def add_note(self, message: str, step: int | None) -> None:
        """Adds what was left out in a step."""
        steps = self.notes.get(message)
        if steps is None and len(self.notes) < _NOTES:
            steps = self.notes.setdefault(str(clipped(message)), set())
        if steps is not None and step is not None:
            steps.add(step)

    def known_steps(self) -> list[int]:
        """The steps with figures, without those before `since`."""
        return [step for step in self.steps if self.since is None or step >= self.since]

    def add_step(self, step: dict[str, Any]) -> None:
        """Adds a line of steps.jsonl; of a step with several lines, as a resumed run leaves them, the last counts."""
        self.warnings.take_in(step["global_step"], step.get("warnings", ()))
        if step["global_step"] is not None:
            self.runs += step["global_step"] <= 1 < self._last_step
            self._last_step = step["global_step"]
            self.steps.set(step["global_step"], {name: step.get(name) for name in STEP_FIGURES})

    def skip(self, line: Any) -> None:
        """Counts a line that is not read: as one of another version if it says so, otherwise as malformed."""
        version = line.get("schema") if isinstance(line, dict) else None
        if type(version) is int and version != SCHEMA and 0 < version < 1000:
            count_bounded(self.other_versions, version, _VERSIONS)
        else:
            self.skipped += 1

    def culprits(self) -> list[RankedCulprit]:
        """The culprits that are kept, largest first."""
        return sorted([*self.largest.values(), *self.others], reverse=True)


def read(path: str, since: int | None = None, top: int = DETAILED, texts: bool = True) -> Evidence:
    """Reads a directory with evidence, or a file; `spikes.jsonl` and `steps.jsonl` stand for their directory.

    Args:
        path (str): The directory or file. A run's directory stands for the `bisect_dump` in it.
        since (int, optional): Leave out events of earlier steps, and those without a step. The figures of earlier
            steps are kept, to be shown before later spikes.
        top (int): See `Evidence`.
        texts (bool): See `Evidence`.

    Raises:
        OSError: There is no such file, no evidence in it or in the directory, or it cannot be read.
    """
    events, steps, critic = _files(path)
    found = Evidence(path, top, since, texts, os.path.dirname((events or steps or critic)[0]) or ".")
    # Training writes a step's spikes before its figures: so all spikes that the figures count are there.
    for files, first, forms in (
        (steps, None, ((STEP, found.add_step),)),
        (events, since, ((EVENT, found.add), (CLIP, found.add_clip))),
        (critic, None, ((CRITIC, found.warnings.take_in_critic),)),
    ):
        for entry in _entries(found, files, once=files is not steps):
            add = next((add for form, add in (*forms, (NOTE, found.take_in_note)) if conforms(entry, form)), None)
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


def _entries(found: Evidence, files: Sequence[str], once: bool) -> Iterator[Any]:
    """What the lines hold, each line `once`; lines that are malformed or unfinished are counted as skipped.

    In place of a line is read what the search of its bundle has appended; where the line is gone, that comes last.
    """
    later = _replacing(files) if once else {}
    seen: set[int] = set()
    replaced: set[str] = set()
    for line, _ in _lines(files):
        digest = line_digest(line) if later else ""
        if digest in later:
            replaced.add(digest)
            line = _line_at(later[digest])
        entry = _parsed(line)
        if entry is None:
            found.skipped += line != b"\n"
        elif digest not in later and line.startswith(_REPLACING) and str(entry.get("replaces")) in later:
            pass  # it is read in the other one's place
        elif hash(line) in seen:
            found.doubled += 1
        else:
            if once:
                seen.add(hash(line))
            yield entry
    yield from (_parsed(_line_at(later[digest])) for digest in later if digest not in replaced)


def _replacing(files: Sequence[str]) -> dict[str, _Place]:
    """Where the last event is that replaces a line, by the line's digest."""
    found = {}
    for line, place in _lines(files):
        if line.startswith(_REPLACING) and (entry := _parsed(line)) is not None and conforms(entry, EVENT):
            found[entry["replaces"]] = place
    return found


def _line_at(place: _Place) -> bytes:
    with open(place[0], "rb") as file:
        file.seek(place[1])
        return file.readline(LINE_BYTES)


def _parsed(line: bytes) -> Any:
    """What a line holds; None for one that is malformed or unfinished."""
    try:
        return parse(line)
    except ValueError:
        return None


def _lines(files: Sequence[str]) -> Iterator[tuple[bytes, _Place]]:
    """All lines, and where they begin; the last one may still be being written.

    A line that is longer than `LINE_BYTES` is not read into memory: it is empty.
    """
    for file in files:
        with open(file, "rb") as lines:
            start = 0
            while line := lines.readline(LINE_BYTES + 1):
                size, rest = len(line), line
                while len(rest) > 0 and not rest.endswith(b"\n"):
                    rest = lines.readline(_CHUNK)
                    size += len(rest)
                yield line if len(line) <= LINE_BYTES else b"", (file, start)
                start += size


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
