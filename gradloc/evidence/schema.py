# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The version of the evidence's lines, and their limits. The form of each is in gradloc_tools/schema.py."""

# The version of all lines.
SCHEMA = 4
# A longer line of a file is not read, and none is written.
LINE_BYTES = 16 * 2**20
# What nests deeper would overflow the stack of recursive functions.
DEPTH = 64
