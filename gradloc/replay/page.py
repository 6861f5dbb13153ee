# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the report with a replay in it. It needs plotly."""

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
    evidence = read(str(directory)) if evidence_files(str(directory)) else _of_event(bundle)
    # Its own result may not have been written beside the bundle.
    plain = jsonable(result)
    evidence.replays = [plain, *(other for other in evidence.replays if other["bundle"] != plain["bundle"])]
    write_page(evidence, out)


def _of_event(bundle: Bundle) -> Evidence:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "spikes.jsonl").write_text(json.dumps(jsonable(bundle.event), allow_nan=False) + "\n")
        return read(directory)
