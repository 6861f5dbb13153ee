# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the report with a replay in it, which needs plotly."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..bundles.opening import Bundle
from ..evidence.writer import evidence_files, jsonable
from ..report.page import write_page
from ..report.reading import Evidence, read


def write_replay_page(bundle: Bundle, result: Mapping[str, Any], out: str) -> None:
    """Writes the report on the evidence that the bundle lies in, or on its event alone where there is none.

    Raises:
        OSError: The page cannot be written.
    """
    directory = bundle.path.resolve().parent.parent
    evidence = read(str(directory)) if evidence_files(str(directory)) else evidence_of(bundle.event)
    # Its own result may not have been written beside the bundle.
    plain = jsonable(result)
    evidence.replays = [plain, *(other for other in evidence.replays if other["bundle"] != plain["bundle"])]
    write_page(evidence, out)


def evidence_of(event: Mapping[str, Any]) -> Evidence:
    """The evidence of one event."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "spikes.jsonl").write_text(json.dumps(jsonable(event), allow_nan=False) + "\n")
        return read(directory)
