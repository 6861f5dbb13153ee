"""Fixtures that show the evidence in `tmp_path`."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from evidence import Event

from gradloc import record_events, report
from gradloc.report.command import main
from gradloc.report.view import View


@pytest.fixture
def show(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes events and prints all of the report, or its `short` form.

    Unless the columns are given, each row and paragraph is one line.
    """

    def call(
        *arguments: str, events: Sequence[Event] = (), code: int = 0, columns: int = 0, short: bool = False
    ) -> str:
        monkeypatch.setenv("COLUMNS", str(columns or 3000))
        record_events(str(tmp_path), events)
        assert main([str(tmp_path), *arguments, *([] if short else ["--all"])]) == code
        out = capsys.readouterr().out
        return out if columns else "\n".join(" ".join(line.split()) for line in out.splitlines() if line.strip())

    return call


@pytest.fixture
def summary(show: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    """The same as `show`, as strict JSON."""

    def call(*arguments: str, events: Sequence[Event] = ()) -> dict[str, Any]:
        return json.loads(show("--json", *arguments, events=events), parse_constant=pytest.fail)

    return call


@pytest.fixture
def view(tmp_path: Path) -> Callable[..., View]:
    """Writes events and builds their view."""

    def call(events: Sequence[Event] = (), rows: int = 5000, details: int = 500, **options: Any) -> View:
        record_events(str(tmp_path), events)
        return report.build(report.read(str(tmp_path), **options), rows, details)

    return call
