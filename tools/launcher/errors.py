# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Errors that end the program with a sentence."""


class Refused(Exception):
    """The request cannot be met as given. The message is one sentence that says what to change."""
