# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the report with a replay in it."""

from collections.abc import Mapping
from typing import Any

from gradloc.evidence.writer import evidence_files, jsonable

from ..bundles.opening import Bundle
from ..report.page import write_page
from ..report.reading import Evidence, read


def write_replay_page(bundle: Bundle, result: Mapping[str, Any], out: str, options: str = "") -> None:
    """Writes the report on the evidence that the bundle lies in, or on its event alone where there is none.

    Args:
        bundle (Bundle): The bundle.
        result (Mapping): What `build_result` returned.
        out (str): The page.
        options (str): What commands on the bundle take, as words of a shell.

    Raises:
        OSError: The page cannot be written.
    """
    directory = bundle.path.resolve().parent.parent
    evidence = read(str(directory)) if evidence_files(str(directory)) else evidence_of(bundle.event, bundle, options)
    # Its own result may not have been written beside the bundle.
    plain = jsonable(result)
    evidence.replays = [plain, *(other for other in evidence.replays if other["bundle"] != plain["bundle"])]
    write_page(evidence, out)


def evidence_of(event: Mapping[str, Any], bundle: Bundle, options: str = "") -> Evidence:
    """The evidence of one event, whose commands take a bundle, and these words of a shell."""
    folder = bundle.path.resolve()
    evidence = Evidence(str(folder.parent), directory=str(folder.parent), options=options)
    evidence.add(jsonable({**event, "replay": folder.name}))
    return evidence
