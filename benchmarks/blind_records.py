# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What the judge is told in a run of blind.py, kept so that another judge can be asked without training again."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from gradloc import judge

_TOLD = ("start_update", "take_in", "take_in_layers", "take_in_rows", "add_step", "answer")


@contextlib.contextmanager
def recorded(path: Path | None) -> Iterator[None]:
    """Records what the judge is told within this context; nothing where there is no path."""
    calls: list[tuple[str, tuple[Any, ...]]] = []

    def noting(name: str, call: Any) -> Any:
        def noted(*args: Any) -> Any:
            calls.append((name, copy.deepcopy(args[name != "judged" :])))  # without `self`
            return call(*args)

        return noted

    with contextlib.ExitStack() as patches:
        if path is not None:
            places = [*((judge.Run, name) for name in _TOLD), (judge, "judged")]
            for place, name in places:
                patches.enter_context(mock.patch.object(place, name, noting(name, getattr(place, name))))
        yield
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(calls))


def judged_again(path: Path) -> list[dict[str, Any]]:
    """What the present judge says of a recorded run: the lines of its steps, and of its spikes."""
    run, answer, lines = judge.Run(), None, []
    for name, args in pickle.loads(path.read_bytes()):
        if name == "judged":
            line, rows, _ = args
            lines.append(judge.judged(line, rows, answer))
            continue
        found = getattr(run, name)(*args)
        if name == "start_update":
            step = args[0]
        elif name == "answer":
            answer = found
            lines.append({"global_step": step, **found})
    return lines
