"""Where the time of the tests goes: `tests/run.sh --timings` has pytest write it down, and prints it as tables."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

SLOWEST = 30  # rows of a table
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Of this process and all that it has started, directly or not; what an orphan has used is lost when it ends."""
    used: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # has ended
            continue
        pid = int(file.parent.name)
        children[int(fields[1])].append(pid)
        used[pid] = sum(map(int, fields[11:15]))  # its own, and of its children that have ended
    family = [os.getpid()]
    for pid in family:
        family += children[pid]
    return sum(used[pid] for pid in family) / TICKS


class Timings:
    """A plugin that appends a line of JSON for each fixture that is made, and for each test without its fixtures.

    Args:
        file (Path): Gets the lines.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._nested: list[list[float]] = []  # what the fixtures within each one that is being made have taken

    def _note(self, place: str, kind: str, start: tuple[float, float]) -> None:
        whole = [time.monotonic() - start[0], max(0.0, cpu_seconds() - start[1])]
        inner = self._nested.pop()
        own = [total - part for total, part in zip(whole, inner, strict=True)]
        if self._nested:
            self._nested[-1] = [sum(pair) for pair in zip(self._nested[-1], whole, strict=True)]
        with self._file.open("a") as file:
            file.write(json.dumps([place, kind, *own]) + "\n")

    def _start(self) -> tuple[float, float]:
        self._nested.append([0.0, 0.0])
        return time.monotonic(), cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":  # part of its test
            return (yield)
        start = self._start()
        try:
            return (yield)
        finally:
            self._note(f"{fixturedef.baseid}::{fixturedef.argname}", "fixture", start)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        start = self._start()
        try:
            return (yield)
        finally:
            self._note(item.nodeid, "test", start)


def table(title: str, rows: dict[str, list[float]]) -> str:
    slowest = sorted(rows.items(), key=lambda row: -row[1][1])[:SLOWEST]
    lines = [f"{wall:8.1f} {cpu:8.1f}  {name}" for name, (wall, cpu) in slowest]
    wall, cpu = (sum(row[index] for row in rows.values()) for index in (0, 1))
    return "\n".join([title, "  wall s    CPU s", *lines, f"{wall:8.1f} {cpu:8.1f}  all {len(rows)}", ""])


def main(files: list[str]) -> None:
    """Prints the tables of what `Timings` has written; a part that was ended early may have left no file."""
    by_file: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    fixtures: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for file in filter(Path.is_file, map(Path, files)):
        for line in file.read_text().splitlines():
            place, kind, *seconds = json.loads(line)
            for rows in (by_file, fixtures) if kind == "fixture" else (by_file,):
                row = rows[place if rows is fixtures else place.partition("::")[0]]
                row[:] = [sum(pair) for pair in zip(row, seconds, strict=True)]
    print(table("Files, with their fixtures", by_file))
    print(table("Fixtures of a module or a session", fixtures))


if __name__ == "__main__":
    main(sys.argv[1:])
