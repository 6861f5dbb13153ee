# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""How the tool speaks to its user."""

from __future__ import annotations

import contextlib


class Refused(Exception):
    """Ends the run with a sentence for the user."""


class OutOfDate(Exception):
    """The verdict of --check, with a sentence that says what is not as the sources produce it."""


def say(message: str) -> None:
    with contextlib.suppress(OSError):  # a closed pipe must not turn success into failure
        print(f"make_patch.sh: {message}", flush=True)
